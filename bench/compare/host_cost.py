"""Host costs of linear layers and training steps: calls in a row, without waiting for the GPU.

A stack of equal layers, each followed by an activation, is called as a model calls them: in eager
mode or compiled, in inference or in a training step, in bfloat16 or converted to a forced kernel.
The time until its calls return, divided by their number, is the host cost of a call. That of a
training step without products is the time of a step of a model that is one norm: entry of the
model, loss, backward pass and zeroing of gradients, as a user's script runs them. The GPU works
behind the host, and its queue has room for all launches of a round. Rounds of all kinds of calls
are interleaved.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lokakern
from lokakern import native
from lokakern.conversion.convert import convert
from lokakern.conversion.routes import GEMMS
from lokakern.device import current_device
from lokakern.errors import LokakernError, MeasurementError, UnknownNameError
from lokakern.problems import make_problem
from lokakern.progress import Progress
from lokakern.registry.register import Kernel, kernels_for, load_kernels
from lokakern.registry.schema.records import HOST_REGIMES, HostCostRecord
from lokakern.selection.host_cost import (
    BF16,
    PREPARED,
    STEP,
    TORCH,
    TRAINING,
    TRAINING_BF16,
    UNPREPARED,
    path_here,
)
from lokakern.types import Device, Granularity

LAYERS = 20  # so many layers or steps, then a synchronization
ROUNDS, WARM_ROUNDS = 40, 8
ROWS, WIDTH = 256, 1024  # small, so that the GPU is done before the host
TORCH_MM, TORCH_SCALED_MM = "torch.mm", "torch._scaled_mm"
EAGER, COMPILED = HOST_REGIMES
CALLS = (BF16, PREPARED, UNPREPARED, TRAINING_BF16, TRAINING, STEP, TORCH_MM, TORCH_SCALED_MM)


@dataclass(frozen=True)
class Arm:
    """A kind of call.

    Attributes:
        regime: "eager" or "compiled".
        call: Kind of call, see `lokakern.selection.host_cost`, or a function of torch.
        language: Of the kernel of the GEMM.
        is_ours: Whether the call takes our path, which is known after the first call.
        run: Makes all calls of a round.
        calls: Their number.
    """

    regime: str
    call: str
    language: str
    is_ours: bool
    run: Callable[[], object]
    calls: int

    def __str__(self) -> str:
        return f"{self.regime} {self.call} {self.language}"


def measure_host_costs(
    regimes: Sequence[str] = HOST_REGIMES,
    calls: Sequence[str] = CALLS,
    progress: Progress | None = None,
) -> tuple[list[HostCostRecord], list[str]]:
    """Measure the host costs of this machine with its GPU.

    Args:
        regimes: Some of "eager" and "compiled".
        calls: Some of `CALLS`.
        progress: Receives the progress.

    Returns:
        The costs, and notes on what could not be measured.

    Raises:
        UnknownNameError: A kind of call is unknown.
        MeasurementError: There is no GPU.
    """
    unknown = [call for call in calls if call not in CALLS]
    if unknown:
        raise UnknownNameError(
            f"host: call {unknown[0]!r} is unknown; expected some of {', '.join(CALLS)}"
        )
    if not torch.cuda.is_available():
        raise MeasurementError(
            "host costs are those of calls on a GPU, and there is none; run this on the machine "
            "whose models you convert"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    arms, notes = arms_on(device, current_device("cuda", device.index), regimes, calls)
    ready, more = _warmed(arms, torch.cuda.synchronize, progress or Progress())
    return timed(ready, torch.cuda.synchronize), [*notes, *more]


def representatives(device: Device) -> dict[str, Kernel]:
    """One rowwise kernel of each language whose calls differ in host cost, without libraries."""
    load_kernels()
    found: dict[str, Kernel] = {}
    problem = make_problem("gemm", (ROWS, WIDTH, WIDTH))
    for kernel in sorted(
        kernels_for("gemm", device), key=lambda k: (k.accumulation == "fast", k.name)
    ):
        is_usual = (
            kernel.granularity is kernel.b_granularity is Granularity.ROW
            and kernel.parts
            and not kernel.libraries
            and not any(".emulated" in part for part in kernel.parts)
            and kernel.refusal(problem, device) is None  # some take long rows only
        )
        if is_usual:
            found.setdefault(kernel.language, kernel)
    return found


def arms_on(
    place: torch.device, device: Device, regimes: Sequence[str], calls: Sequence[str] = CALLS
) -> tuple[list[Arm], list[str]]:
    """The kinds of calls in these regimes, and notes on what cannot be called.

    Args:
        place: Where tensors are.
        device: The GPU whose kernels are called, or emulated elsewhere.
        regimes: Some of "eager" and "compiled".
        calls: Some of `CALLS`.
    """
    x = torch.randn(ROWS, WIDTH, device=place, dtype=torch.bfloat16)
    arms = _torch_arms(x) if EAGER in regimes and place.type == "cuda" else []
    notes: list[str] = []
    for regime in regimes:
        stack = _stack(place)
        arms.append(_inference(regime, BF16, TORCH, stack, x))
        arms.append(_training(regime, TRAINING_BF16, TORCH, stack, x))
        arms.append(_step(regime, x))
    for language, kernel in representatives(device).items():
        for call in (x for x in (PREPARED, UNPREPARED, TRAINING) if x in calls):
            # A stack for each, so that no kind of call changes what another one keeps.
            for regime in regimes:
                stack = _stack(place)
                try:
                    convert(stack, kernels=kernel.name, inference=call == PREPARED, device=device)
                except LokakernError as error:
                    notes.append(f"{regime} {call} {language} was not measured: {error}")
                    continue
                make = _training if call == TRAINING else _inference
                arms.append(make(regime, call, language, stack, x))
    return [arm for arm in arms if arm.call in calls], notes


def timed(
    arms: Sequence[Arm], synchronize: Callable[[], object], *, rounds: int = ROUNDS, seed: int = 0
) -> list[HostCostRecord]:
    """Time warm calls, in rounds of all arms in random order.

    Args:
        arms: The kinds of calls.
        synchronize: Waits for the GPU, before each time.
        rounds: Number of times of each arm.
        seed: Of the order.
    """
    order = random.Random(seed)
    times: dict[int, list[float]] = {number: [] for number in range(len(arms))}
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for number in order.sample(range(len(arms)), len(arms)):
                synchronize()
                start = time.perf_counter_ns()
                arms[number].run()
                end = time.perf_counter_ns()
                times[number].append((end - start) / 1e3 / arms[number].calls)
        synchronize()
    finally:
        if was_enabled:
            gc.enable()
    return [_record(arm, times[number]) for number, arm in enumerate(arms)]


def table_of(costs: Iterable[HostCostRecord]) -> list[dict[str, Any]]:
    """One row for each kind of call, with ratios to torch's own functions where they were timed."""
    found = list(costs)
    rows = []
    for cost in found:
        row: dict[str, Any] = {
            "regime": cost.regime, "call": cost.call, "language": cost.language, "path": cost.path,
            "host us": round(cost.host_us_p50, 2), "p20": round(cost.host_us_p20, 2),
            "p80": round(cost.host_us_p80, 2),
        }  # fmt: skip
        for name in (TORCH_MM, TORCH_SCALED_MM):
            us = next((other.host_us_p50 for other in found if other.call == name), None)
            row[f"/ {name}"] = None if us is None else round(cost.host_us_p50 / us, 2)
        rows.append(row)
    return rows


def _record(arm: Arm, times: Sequence[float]) -> HostCostRecord:
    p20, _, _, p80 = statistics.quantiles(times, n=5, method="inclusive")
    return HostCostRecord(
        cpu=current_device("cpu").product,
        regime=arm.regime,
        call=arm.call,
        language=arm.language,
        path=path_here() if arm.is_ours else TORCH,
        host_us_p20=p20,
        host_us_p50=statistics.median(times),
        host_us_p80=p80,
        round_count=len(times),
        calls_per_round=arm.calls,
    )


def _warmed(
    arms: Sequence[Arm], synchronize: Callable[[], object], progress: Progress
) -> tuple[list[Arm], list[str]]:
    """Arms after calls that compile and record, and notes on those that fail."""
    ready, notes = [], []
    progress.begin("host", len(arms))
    for arm in arms:
        try:
            for _ in range(WARM_ROUNDS):
                arm.run()
                native.wait()
            synchronize()
            ready.append(arm)
        except Exception as error:  # of a compiler or a library: the other kinds are still known
            words = (str(error) or type(error).__name__).splitlines()[0]
            notes.append(f"{arm} was not measured: {words}")
        progress.step(str(arm))
    return ready, notes


def _stack(place: torch.device) -> nn.Sequential:
    """Layers, each with an activation: models launch kernels besides their products."""
    layers = (
        layer
        for _ in range(LAYERS)
        for layer in (
            nn.Linear(WIDTH, WIDTH, bias=False, device=place, dtype=torch.bfloat16),
            nn.ReLU(),
        )
    )
    return nn.Sequential(*layers)


def _forward_of(stack: nn.Sequential, regime: str) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        for layer in stack:
            x = layer(x)
        return x

    if regime == EAGER:
        return forward
    # Dynamo keeps compiled graphs by code object, and each call tries those of all stacks in turn.
    own = FunctionType(forward.__code__.replace(), forward.__globals__, closure=forward.__closure__)
    compiled: Callable[[Tensor], Tensor] = torch.compile(own, fullgraph=True, dynamic=False)
    return compiled


def _inference(regime: str, call: str, language: str, stack: nn.Sequential, x: Tensor) -> Arm:
    forward = _forward_of(stack, regime)

    def run() -> None:
        with torch.no_grad():
            forward(x)

    return Arm(regime, call, language, call != BF16, run, LAYERS)


def _training(regime: str, call: str, language: str, stack: nn.Sequential, x: Tensor) -> Arm:
    forward = _forward_of(stack, regime)
    leaf = x.clone().requires_grad_()
    inputs = [leaf, *stack.parameters()]

    def run() -> None:
        torch.autograd.grad(forward(leaf), inputs, x)

    return Arm(regime, call, language, call != TRAINING_BF16, run, len(GEMMS) * LAYERS)


def _step(regime: str, x: Tensor) -> Arm:
    norm = nn.LayerNorm(WIDTH, device=x.device, dtype=x.dtype)
    forward = _forward_of(nn.Sequential(norm), regime)
    parameters = [*norm.parameters()]
    labels = torch.zeros_like(x, dtype=torch.float32)

    def run() -> None:
        for _ in range(LAYERS):
            for parameter in parameters:
                parameter.grad = None
            loss = F.binary_cross_entropy_with_logits(forward(x).float(), labels)
            loss.backward()  # type: ignore[no-untyped-call]

    return Arm(regime, STEP, TORCH, False, run, LAYERS)


def _torch_arms(x: Tensor) -> list[Arm]:
    """Functions of torch, to compare with."""
    b = torch.randn(WIDTH, WIDTH, device=x.device, dtype=x.dtype).t()
    left, right = lokakern.quantize(x), lokakern.quantize(b.t()).t()

    def product() -> None:
        for _ in range(LAYERS):
            torch.mm(x, b)

    data, scale = right.transpose
    left_scale = left.scale
    assert data is not None and scale is not None and left_scale is not None

    def scaled() -> None:
        for _ in range(LAYERS):
            torch._scaled_mm(left.data, data, left_scale, scale, out_dtype=torch.bfloat16)

    return [
        Arm(EAGER, TORCH_MM, TORCH, False, product, LAYERS),
        Arm(EAGER, TORCH_SCALED_MM, TORCH, False, scaled, LAYERS),
    ]
