"""Where gradients behind a cross are quantized as they are computed, chosen by measured times.

Of the last layer of a cross both gradients read one gradient ``[m, n]``. At each measured m the sum
of

- the time of `lokakern.nn.crossed_gradients.KERNEL`, and
- the times of both products by the fastest kernels within the budget that read it with 1x128
  scales: of their GEMM, if that was timed alone, and the bytes and the launch of the other
  operand's quantizer; else of the whole, without the bytes that the gradient's quantizer moves,

is compared with what runs instead: the fastest products, bfloat16 included, and what a compiler
moves to compute the gradient: two tensors that it reads and one that it writes, and one more that
it reads for a bias. A compiler's kernel, and a quantizer, move bytes no faster than the fastest
kernel that was ever timed, so that neither side gains by that. Both products change, or none.

Of other layers, whose gradient a compiler computes as before, no such bytes count, but the sums for
a bias: the same kernel reads their gradient once for both products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from lokakern.conversion.routes import (
    ANY_M,
    Judge,
    MRange,
    grad_input_problem,
    runs,
    within,
)
from lokakern.errors import UnsupportedError
from lokakern.nn.compiled_form import SUMS, behind_cross
from lokakern.nn.cross_pattern import crosses_in
from lokakern.nn.crossed_forward import graph_of
from lokakern.nn.crossed_gradients import KERNEL
from lokakern.nn.graph_edit import CHUNK
from lokakern.nn.linear import is_linear
from lokakern.nn.routed_matmul import SHARED
from lokakern.registry.register import KERNELS, fp8_format
from lokakern.selection import dispatcher
from lokakern.selection.candidates import Candidate, Time
from lokakern.selection.table import Table
from lokakern.selection.ties import within_noise
from lokakern.types import GROUP, Device, Granularity
from lokakern.workloads.gemm_cases import fused_case
from lokakern.workloads.gemm_gradient_cases import GRADIENTS, grad_weight_case
from lokakern.workloads.norm_cases import cross_backward_case

HALF, FP8 = 2, 1  # bytes of an element
LAUNCH_US = 2.0  # of a quantizer, beyond its bytes
NONE = ("", "")


class TimedGradients(NamedTuple):
    """Gradients behind a cross at one m.

    Attributes:
        m: Rows.
        kernels: The kernels of the gradients of input and weight.
        us: What they take with a gradient that is quantized where it is computed.
        margin_us: Half-width of its 95 % interval.
        rival_us: What they take otherwise.
        rival_margin_us: Half-width of its 95 % interval.
        rivals: The kernels of that.
    """

    m: int
    kernels: tuple[str, str]
    us: float
    margin_us: float
    rival_us: float
    rival_margin_us: float
    rivals: tuple[str, str]

    @property
    def is_faster(self) -> bool:
        """Whether they are faster, beyond noise."""
        times = (self.us, self.margin_us, self.rival_us, self.rival_margin_us)
        return self.us < self.rival_us and not within_noise(*times)

    def __str__(self) -> str:
        used = "" if self.is_faster else ", not used: not faster beyond noise"
        return (
            f"m={self.m}: {self.us:.2f} us ({KERNEL}, {', '.join(self.kernels)}), "
            f"{self.rival_us:.2f} us otherwise ({', '.join(self.rivals)}){used}"
        )


@dataclass(frozen=True)
class CrossGradients:
    """The choice for the last layer of a cross, or another layer.

    Attributes:
        times: At each measured m where times and errors of all are known.
        m_range: Smallest and largest m to choose for; None: all measured m.
        why: Why nothing is known, or "".
        is_crossed: Whether it is the last layer of a cross.
    """

    times: tuple[TimedGradients, ...]
    m_range: MRange | None = None
    why: str = ""
    is_crossed: bool = True

    @property
    def used(self) -> list[TimedGradients]:
        """Those that are used, in the range."""
        low, high = self.m_range or (0, ANY_M)
        return [x for x in self.times if x.is_faster and low <= x.m <= high]

    def form(self, usual: str) -> str:
        """The form of the layer in compiled code, from "" or `SUMS`."""
        if usual not in ("", SUMS):
            return usual
        found = [(0, NONE)]
        names = [(x.m, x.kernels if x.is_faster else NONE) for x in self.times]
        for (m, kernels), (_, then) in pairwise([*names, (ANY_M, NONE)]):
            if found[-1][1] != kernels:
                found.append((m, kernels))
            if kernels != NONE and kernels != then:  # unknown between two different choices
                found.append((m + 1, NONE))
        found = found if self.m_range is None else within(found, self.m_range, NONE)
        if not self.is_crossed:
            found = [(m, (a and SHARED + a, b and SHARED + b)) for m, (a, b) in found]
        return behind_cross(usual, found)

    def explain(self, *, is_off: bool = False) -> str:
        """Times and kernels at every measured m, and whether it was given up since."""
        off = "; off: a tuning, a watch or a newer conversion" * (is_off and bool(self.used))
        lines = [f"{self.site}: {self.why or self.words}{off}"]
        return "\n".join([*lines, *(f"  {x}" for x in self.times)])

    @property
    def site(self) -> str:
        """What is quantized."""
        return "gradients behind the cross" if self.is_crossed else "the gradient of both products"

    @property
    def words(self) -> str:
        """The gain, or that there is none."""
        used = self.used
        if not used:
            return "quantized by their products, if at all, which is not slower"
        gain = math.exp(sum(math.log(x.rival_us / x.us) for x in used) / len(used))
        sizes = ", ".join(str(x.m) for x in used)
        return f"{gain:.2f}x as fast in geometric mean if {KERNEL} quantizes them, at m={sizes}"


def last_layers(modules: Iterable[nn.Module]) -> Iterator[nn.Linear]:
    """The last layers of crosses that modules compute, as far as their forwards can be traced."""
    for module in modules:
        try:
            graph = graph_of(module)
        except UnsupportedError:
            continue
        for cross in crosses_in(graph, module):
            layer: Any = module.get_submodule(cross.names[-1])
            if is_whole(layer):
                yield layer


def is_whole(layer: nn.Module) -> bool:
    """Whether it is a layer whose gradients are those of its parameters as they are."""
    if is_linear(layer):
        return layer.padding == (0, 0) and not layer.is_mixing
    return type(layer) is nn.Linear


def cross_gradients(
    n: int, k: int, has_bias: bool, judge: Judge, device: Device, m_range: MRange | None = None,
    *, is_crossed: bool = True,
) -> CrossGradients:  # fmt: skip
    """The choice for a layer ``[n, k]`` that multiplies in bfloat16.

    Args:
        n: Outputs.
        k: Inputs.
        has_bias: Whether it has a bias, whose gradient is computed, too.
        judge: Source of errors and their limit.
        device: Device of the times.
        m_range: Smallest and largest m to choose for; None: all measured m.
        is_crossed: Whether it is the last layer of a cross.
    """
    judge = replace(judge, is_training=True, has_bias=has_bias)
    crossed = _crossed_at(n, device, judge.regime, is_crossed)
    if n % CHUNK or not crossed:
        why = f"rows of {n} elements" if n % CHUNK else f"{KERNEL} was not measured at n={n}"
        return CrossGradients((), m_range, why, is_crossed)
    facts = dispatcher.snapshot()
    least = facts.least_us_per_byte(device, dispatcher.default_regime(device))
    to_input = judge.table(grad_input_problem(n, k)(16), "grad_input", device)
    of_weight = replace(judge, m_range=(n, n), is_of_one_m=True)  # the m of its product
    found = []
    for m, (us, margin) in sorted(crossed.items()):
        to_weight = of_weight.table(grad_weight_case(m, n, k).problem, "grad_weight", device)
        products = [(to_input, m), (to_weight, n)]
        usual = [_fastest(table, at, lambda c: True) for table, at in products]
        ours = [_fastest(table, at, _reads_groups) for table, at in products]
        if any(table.plain_at(at) is None for table, at in products) or None in (*usual, *ours):
            continue
        moved = m * n * least
        tensors = [x for x in (*usual, *ours) if x is not None]
        (old_x, old_w, new_x, new_w) = tensors
        shapes = (m, k, n), (n, k, m)
        both = [
            _with_quantized_left(x, shape, device, judge.regime, least)
            for x, shape in zip((new_x, new_w), shapes, strict=True)
        ]
        found.append(
            TimedGradients(
                m, (new_x[0], new_w[0]),
                us + sum(x[0] for x in both), math.hypot(margin, *(x[1] for x in both)),
                old_x[1] + old_w[1] + (3 * is_crossed + has_bias) * HALF * moved,
                math.hypot(old_x[2], old_w[2]), (old_x[0], old_w[0]),
            )
        )  # fmt: skip
    why = "" if found else "a product of them has no time, or no kernel within the budget"
    return CrossGradients(tuple(found), m_range, why, is_crossed)


def _with_quantized_left(
    product: tuple[str, float, float], shape: tuple[int, int, int], device: Device, regime: str,
    least: float,
) -> tuple[float, float]:  # fmt: skip
    """Time and margin of a product ``[m, n, k]`` by a composition whose left operand is in FP8.

    Args:
        product: Name, time and margin of the composition.
        shape: Of the product.
        device: Device of the times.
        regime: Regime of the times.
        least: Microseconds per byte of the fastest kernel that was ever timed.
    """
    name, us, margin = product
    (m, n, k), gemm = shape, KERNELS[KERNELS[name].parts[-1]]
    problem = fused_case(*shape, Granularity.GROUP, GRADIENTS, fp8_format(device)).problem
    if problem.b is not None and problem.b.granularity is gemm.b_granularity:
        table = dispatcher.table_for(
            problem, None, None, device, regime, is_choice=False, predicts=False
        )
        times = next((c.times for c in table.candidates if c.name == gemm.name), {})
        if m in times:
            quantizing = LAUNCH_US + (HALF + FP8) * n * k * least
            return times[m].gpu_us + quantizing, times[m].margin_us
    return us - (HALF + FP8) * m * k * least, margin


def lacks_time(m: int, n: int, device: Device, regime: str) -> bool:
    """Whether the kernel takes a gradient ``[m, n]`` on a device, but was not timed."""
    problem = cross_backward_case(m, n, fp8_format(device)).problem
    kernel = KERNELS[KERNEL]
    is_taken = kernel.runs_on(device) and kernel.refusal(problem, device) is None
    return is_taken and m % GROUP == 0 and m not in _crossed_at(n, device, regime)


def _crossed_at(
    n: int, device: Device, regime: str, is_crossed: bool = True
) -> dict[int, tuple[float, float]]:
    """Times of the kernel, and half of their intervals, at measured m that are whole groups."""
    problem = cross_backward_case(16, n, fp8_format(device), is_crossed=is_crossed).problem
    table = dispatcher.table_for(
        problem, None, None, device, regime, is_choice=False, predicts=False
    )
    times = next((c.times for c in table.candidates if c.name == KERNEL), {})
    return {m: (x.gpu_us, x.margin_us) for m, x in times.items() if m and m % GROUP == 0}


def _fastest(
    table: Table, m: int, accepts: Callable[[Candidate], bool]
) -> tuple[str, float, float] | None:
    """Name, time on the GPU and margin of the fastest kernel within the budget."""
    timed = [
        (_margin(found[0]), found[0].gpu_us, c)
        for c in table.candidates
        if accepts(c) and (found := c.time_at(m)) is not None
    ]
    for margin, us, c in sorted(timed, key=lambda x: (x[1], x[2].name)):
        is_run = c.unquantized or (c.kernel is not None and runs(c.kernel, table))
        if is_run and table.admits(c, m) and table.takes(c, m):
            return c.name, us, margin
    return None


def _margin(time: Time) -> float:
    return 0.0 if time.is_of_host else time.margin_us


def _reads_groups(candidate: Candidate) -> bool:
    """Whether a kernel is made of quantizers and a product that reads 1x128 scales on the left."""
    kernel = candidate.kernel
    if kernel is None or kernel.granularity is not Granularity.GROUP or not kernel.parts:
        return False
    return KERNELS[kernel.parts[-1]].op == "scaled_gemm"
