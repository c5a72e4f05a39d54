"""One cell of the zoo's table: a model at a batch size, converted, against itself in bfloat16.

Both copies live in one process and their replays alternate, so that heating, throttling and the
host's load affect both. A training step is a forward and a backward pass without an optimizer,
whose time would be equal in both. Parameters and inputs are bfloat16; under autocast parameters
are float32.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lokakern.bench.fp8_gain.products import counted
from lokakern.bench.models.throughput import (
    BATCHES,
    EVENTS,
    GRAPH,
    HOST,
    Pace,
    Stepper,
    aside,
    capture,
    elapsed_us,
    race,
    sent,
    warm,
)
from lokakern.bench.models.zoo.catalog import ZOO
from lokakern.conversion.convert import Conversion, convert
from lokakern.conversion.variants import start_again
from lokakern.errors import DeviceLostError, MeasurementError, UnsupportedError
from lokakern.measure.timing import GRAPH_US, status_and_reason
from lokakern.nn.routed_matmul import kernel_at, traced_route
from lokakern.types import COMPILED, COMPILED_GRAPH

MODES = ("graph", "compiled", "eager")


@dataclass(frozen=True, slots=True)
class Cell:
    """What is compared: a model, its batch size, and the step."""

    model: str  # name in `ZOO`
    batch: int  # rows of its inputs
    training: bool  # whether a step is a training step or a prediction
    autocast: bool = False  # whether parameters are float32, and autocast to bfloat16

    @property
    def step(self) -> str:
        """The step in words."""
        word = "train" if self.training else "infer"
        return f"{word}, autocast" if self.autocast else word


@dataclass(frozen=True, slots=True)
class Row:
    """The measurement of a cell in one mode; without times if it failed."""

    model: str
    batch: int
    step: str  # of `Cell`
    mode: str  # one of `MODES`
    speedup: float | None = None  # median of bfloat16's time over the converted model's, by rounds
    speedup_margin: float | None = None  # half of its 95 % interval
    bf16_us: float | None = None  # median step in bfloat16
    us: float | None = None  # median step of the converted model
    rounds: int = 0  # rounds with a steady clock
    timer: str = ""  # the clock
    products: int | None = None  # products of the converted layers in a step
    quantized: int | None = None  # of these with a quantizing kernel at this batch size
    graph_breaks: int = 0  # of the compilation of both
    recompiles: int = 0  # graphs compiled while the times were taken
    tuned_speedup: float | None = None  # after `Conversion.tune` of the step
    tuned_margin: float | None = None
    tune_s: float | None = None  # seconds that it took
    error: str = ""  # why there are no times


def measure(
    cell: Cell,
    modes: Sequence[str],
    device: torch.device,
    budget: float,
    tune_s: float | None = None,
) -> Iterator[Row]:
    """Measure a cell, one row for each mode as soon as it is known.

    An error of the model, its conversion or a mode becomes the error of rows.

    Args:
        cell: The model and its step.
        modes: Some of `MODES`.
        device: Where it runs.
        budget: Largest accepted row error of a quantized product.
        tune_s: Limit of `Conversion.tune` in seconds, after which the step is timed once more;
            None: no tuning.

    Raises:
        DeviceLostError: The device is unusable, after the row of the mode that failed.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    about = functools.partial(Row, cell.model, cell.batch, cell.step)
    try:
        pair = _Pair(cell, device, budget, modes)
    except Exception as error:  # a model may need more memory than there is
        reason = status_and_reason(error)[1]
        for mode in modes:
            yield about(mode, error=reason)
        _check(device, reason)
        return
    for mode in modes:
        try:
            pace = pair.race(mode)
            tuned = (None,) * 3 if tune_s is None else pair.race_tuned(mode, tune_s)
        except Exception as error:  # a compiler or a library may raise anything
            reason = status_and_reason(error)[1]
            yield about(mode, products=pair.products, quantized=pair.quantized[mode], error=reason)
            _check(device, reason)
            continue
        yield about(
            mode, pace.speedup, pace.speedup_margin, pace.baseline_us, pace.step_us, pace.rounds,
            pace.timer, pair.products, pair.quantized[mode], pace.graph_breaks, pace.recompiles,
            *tuned,
        )  # fmt: skip


def compile_cell(cell: Cell, modes: Sequence[str], device: torch.device, budget: float) -> None:
    """Compile and run what `measure` times, so that Inductor keeps it on disk."""
    _Pair(cell, device, budget, modes).compile()


def free_memory() -> None:
    """Drop compiled code and cached memory of the last cell."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check(device: torch.device, reason: str) -> None:
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:  # the context keeps its error until the process ends
        raise DeviceLostError(
            f"the GPU cannot be used any more: {reason}; run the same command again: with --out it "
            "continues after this cell"
        ) from error


class _Pair:
    """A model in bfloat16 and converted copies, with the same inputs.

    In CUDA graphs the host makes no call, so that choices may differ from those without graphs.
    """

    def __init__(
        self, cell: Cell, device: torch.device, budget: float, modes: Sequence[str]
    ) -> None:
        self.cell, self.device = cell, device
        regimes = {mode: COMPILED_GRAPH if mode == MODES[0] else COMPILED for mode in modes}
        self.models = {"": self._build()}
        conversions = self.conversions = dict[str, Conversion]()
        for regime in sorted(set(regimes.values())):
            model = self.models[regime] = self._build()
            conversions[regime] = convert(model, budget, inference=not cell.training, regime=regime)
        features = ZOO[cell.model].features
        self.batches = [
            [
                feature.draw(cell.batch, seed).to(device)
                .requires_grad_(cell.training and feature.is_learned)
                for feature in features
            ]
            for seed in range(BATCHES)
        ]  # fmt: skip
        counts = {
            mode: self._products_of(self.models[regime], conversions[regime], mode)
            for mode, regime in regimes.items()
        }
        self.products, _, shape = next(iter(counts.values()))
        self.regimes = regimes
        self.quantized = {mode: count[1] for mode, count in counts.items()}
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.rand(shape, generator=generator).round().to(device)

    def _build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = ZOO[self.cell.model].build()
        dtype = torch.float32 if self.cell.autocast else torch.bfloat16
        model = model.to(self.device, dtype)
        return model.train() if self.cell.training else model.eval().requires_grad_(False)

    def _products_of(
        self, model: nn.Module, conversion: Conversion, mode: str
    ) -> tuple[int, int, torch.Size]:
        """The number of products in a step, of quantized ones, and the shape of the logits."""
        layers = {name: site.module for name, site in conversion.sites.items()}
        with torch.no_grad(), self._cast(), counted(layers) as calls:
            shape = model(*self.batches[0]).shape
        products = quantized = 0
        for (name, rows), count in calls.items():
            routes = conversion.sites[name].routes
            for route in routes if self.cell.training else routes[:1]:
                products += count
                text = route.text if mode == MODES[2] else traced_route(route.text)
                quantized += count * bool(kernel_at(text, rows))
        return products, quantized, shape

    @functools.cached_property
    def compiled(self) -> dict[str, Any]:
        # On a CPU it is only traced: CPU code of Inductor is no evidence for a GPU.
        backend = "inductor" if self.device.type == "cuda" else "eager"
        return {
            regime: torch.compile(model, dynamic=False, backend=backend)
            for regime, model in self.models.items()
        }

    def compile(self) -> None:
        """Compile both models and run them once."""
        for regime in self.models:
            self._stepper(regime, MODES[1], 1)

    def race_tuned(self, mode: str, limit_s: float) -> tuple[float, float, float]:
        """The speedup after `Conversion.tune`, its margin, and how many seconds that took."""
        conversion = self.conversions[self.regimes[mode]]
        model: Any = self._callable(self.regimes[mode], mode)
        parameters = list(self.models[self.regimes[mode]].parameters())
        step = self._trained if self.cell.training else self._predicted
        start = time.perf_counter()
        conversion.tune(
            lambda: step(model, self.batches[0], parameters), graph=mode == MODES[0],
            time_limit=limit_s,
        )  # fmt: skip
        took = time.perf_counter() - start
        try:
            pace = self.race(mode)
        finally:
            start_again(conversion)  # other modes run the same model
        return pace.speedup, pace.speedup_margin, took

    def race(self, mode: str) -> Pace:
        """Time both models in a mode against each other."""
        if mode == MODES[0] and self.device.type != "cuda":
            raise UnsupportedError(f"mode graph needs a GPU; found {self.device.type}")
        plain = self._stepper("", mode, 1)
        # The first replay of a graph also uploads it.
        once_us = min(elapsed_us(plain, self.device) for _ in range(2))
        repeats = math.ceil(GRAPH_US / once_us)
        if repeats > 1:
            plain = self._stepper("", mode, repeats)
        return race(plain, self._stepper(self.regimes[mode], mode, repeats), self.device)

    def _stepper(self, regime: str, mode: str, repeats: int) -> Stepper:
        """The model of a regime ("" for bfloat16), warm, with repeated replays of all batches."""
        model = self._callable(regime, mode)
        step = self._trained if self.cell.training else self._predicted
        parameters = list(self.models[regime].parameters())

        def replay() -> None:
            for _ in range(repeats):
                for batch in self.batches:
                    step(model, batch, parameters)

        on_gpu = self.device.type == "cuda"
        found = Stepper(
            "converted" if regime else "bf16", replay, replay, EVENTS if on_gpu else HOST,
            steps=BATCHES * repeats,
        )  # fmt: skip
        with aside(on_gpu):
            warm(replay)
        found.graph_breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        if mode == MODES[0]:
            capture(found)
            if found.timer != GRAPH:
                raise MeasurementError(f"{found.name}: {found.note}")
        return found

    def _callable(self, regime: str, mode: str) -> Any:
        return self.models[regime] if mode == MODES[2] else self.compiled[regime]

    def _cast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cell.autocast)

    @torch.no_grad()
    def _predicted(
        self, model: Any, batch: Sequence[Tensor], _parameters: Sequence[nn.Parameter]
    ) -> None:
        with self._cast():
            model(*batch)

    def _trained(
        self, model: Any, batch: Sequence[Tensor], parameters: Sequence[nn.Parameter]
    ) -> None:
        for parameter in parameters:
            parameter.grad = None
        with self._cast():
            logits = model(*map(sent, batch))
        loss = F.binary_cross_entropy_with_logits(logits.float(), self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
