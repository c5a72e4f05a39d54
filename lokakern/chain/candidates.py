"""Measured options of each layer of a chain, which `lokakern.chain.search` combines.

The tensor between two layers is bfloat16 (in a chain of float16, that), or FP8 with rowwise, 1x128
or, if the norm bounds the output, static tensorwise scales. A kernel for rowwise scales can read a
tensorwise scale, so that the weight may have other scales.

The stored error of a layer is against unquantized operands, so that the rounding between two layers
is part of the reader's error. The writer counts with its error for a bfloat16 output, plus the
excess of a coarser rounding than with the reader's scales.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lokakern.chain.search import LayerOption
from lokakern.problems import baseline_name, make_problem
from lokakern.registry.register import KERNELS, Kernel, fp8_format, kernels_for
from lokakern.selection import dispatcher, remedies
from lokakern.selection.candidates import Time
from lokakern.types import (
    Device,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    alignment_of,
    norm_form,
)

NONE, TENSOR, ROW = Granularity.NONE, Granularity.TENSOR, Granularity.ROW
GROUP, BLOCK = Granularity.GROUP, Granularity.BLOCK
SCALED = (TENSOR, ROW, GROUP)  # between layers
WEIGHTS = {TENSOR: (TENSOR,), ROW: (ROW,), GROUP: (BLOCK, GROUP)}  # weights for each input
CONVERSIONS = ("quantize", "dequantize")
# Gain of an activation for the square of a small relative error: mean(f'(z)^2) over mean(f(z)^2)
# for normal z.
GAINS = {"none": 1.0, "relu": 1.0, "hardswish": 1.081, "silu": 1.067, "gelu": 1.072,
         "gelu_tanh": 1.072}  # fmt: skip


class Layer(NamedTuple):
    """Output and input columns, and the epilogue as in `Problem`."""

    n: int
    k: int
    epilogue: str = "none"

    @property
    def is_bounded(self) -> bool:
        """Whether the output has a static scale from its norm."""
        return norm_form(self.epilogue).is_bounded


class Form(NamedTuple):
    """Granularity of a tensor between layers, as it is written and as it is read."""

    written: Granularity
    read: Granularity


@dataclass(frozen=True)
class Chain:
    """A request for a chain.

    Attributes:
        layers: The layers in order.
        m: Rows of all layers.
        device: The device type.
        distributions: Input distributions for errors.
        regime: Regime of times.
        reads: Granularity of the first layer's input; NONE for bfloat16.
        writes: Granularity of the last layer's output; NONE for bfloat16.
        prepared: Whether weights are prepared; else they and the tensors between layers are
            bfloat16.
        half: What is said to be bfloat16 here: bfloat16, or float16.
    """

    layers: tuple[Layer, ...]
    m: int
    device: Device
    distributions: tuple[str, ...]
    regime: str | None
    reads: Granularity = NONE
    writes: Granularity = NONE
    prepared: bool = True
    half: Format = Format.BFLOAT16

    @property
    def fp8(self) -> Format:
        return fp8_format(self.device)

    def problem(
        self, place: int, takes: Granularity, weight: Granularity, writes: Granularity
    ) -> Problem:
        """The problem of a layer with these granularities."""
        n, k, epilogue = self.layers[place]
        a = self.operand(k) if takes is NONE else Operand(self.fp8, takes)
        b = None if weight is NONE else Operand(self.fp8, weight, Layout.COLUMN)
        out = self.half if writes is NONE else self.fp8
        return make_problem(
            "gemm_norm", (self.m, n, k), a=a, b=b, prepared=takes is NONE and weight is not NONE,
            epilogue=epilogue, out_format=out, out_granularity=writes,
        )  # fmt: skip

    def operand(self, columns: int) -> Operand:
        """An unquantized operand with rows of so many columns."""
        return Operand(self.half, alignment=alignment_of(columns * self.half.dtype.itemsize))

    def takes(self, kernel: Kernel | None) -> bool:
        """Whether a kernel takes what is not FP8, which no problem from FP8 to FP8 tells."""
        if self.half is not Format.FLOAT16:
            return True
        return kernel is not None and kernel.float16

    def dequantizing(self, columns: int) -> Problem:
        """The problem of an FP8 input that an unquantized kernel reads."""
        a = Operand(self.fp8, self.reads)
        return make_problem("dequantize", (self.m, columns), a=a, out_format=self.half)

    def is_last(self, place: int) -> bool:
        return place == len(self.layers) - 1

    def gain(self, place: int) -> float:
        """Gain of the following layers for a layer's squared error."""
        later = (norm_form(layer.epilogue).last for layer in self.layers[place + 1 :])
        return math.prod(GAINS[last] for last in later)

    def wanted(self, place: int) -> Granularity:
        """Granularity of a layer's output in the unquantized chain."""
        return self.writes if self.is_last(place) else NONE


class Step(NamedTuple):
    """One launch of a chain.

    Attributes:
        place: Index of the layer.
        problem: The problem.
        kernel: Name of the kernel.
        time: None without a measurement.
        interpolated: Whether the time is interpolated.
        row_err: Worst stored bound of the layer alone; None without a measurement.
        share: Share of the chain's squared error; 0 for conversions, whose rounding is part of the
            next layer's error; None if unknown.
    """

    place: int
    problem: Problem
    kernel: str
    time: Time | None = None
    interpolated: bool = False
    row_err: float | None = None
    share: float | None = None


def options_of(chain: Chain, place: int) -> list[LayerOption]:
    """All options of a layer with known time and error, unquantized kernels included."""
    return [with_gain(option, chain.gain(place)) for option in own_options(chain, place)]


def own_options(
    chain: Chain, place: int, limit: float = math.inf,
    error_of: Callable[[Step], float | None] | None = None,
) -> list[LayerOption]:  # fmt: skip
    """The options of a layer, with squares of errors at its own output.

    Args:
        chain: The chain.
        place: Index of the layer.
        limit: Largest accepted row error of the layer alone, as stored: with the rounding of its
            operands and of its output.
        error_of: Row error of a kernel in the place of the stored one, or None to leave it out.
    """
    steps = [s for problem in _problems(chain, place) for s in _measured(chain, place, problem)]
    if error_of is not None:
        steps = [step._replace(row_err=error_of(step)) for step in steps]
    errors = {_numerics(s): s.row_err for s in steps if s.row_err is not None}
    readings = {takes: list(_readings(chain, place, takes)) for takes in (NONE, *SCALED)}
    found = []
    for step in steps:
        if step.row_err is None or step.row_err > limit:
            continue
        for (reads, before), writes in itertools.product(
            readings[step.problem.a.granularity], _readable_forms(chain, step)
        ):
            square = _squared_error(step, writes, errors, chain.is_last(place))
            if square is None:
                continue
            whole = (*before, step._replace(share=square))
            us = sum(s.time.latency_us for s in whole if s.time is not None)
            found.append(LayerOption(reads, writes, us, square, whole))
    return found


def with_gain(option: LayerOption, gain: float) -> LayerOption:
    """An option with the error that later layers make of its own."""
    steps = tuple(s if s.share is None else s._replace(share=s.share * gain) for s in option.steps)
    return option._replace(square=option.square * gain, steps=steps)


def _numerics(step: Step, writes: Granularity | None = None) -> tuple[object, ...]:
    """The numerics class of a layer, with its output or another granularity."""
    kernel = KERNELS.get(step.kernel)
    scales: tuple[object, ...] = (step.kernel,)
    if kernel is not None:
        scales = (kernel.granularity, kernel.b_granularity, kernel.accumulation)
    return (*scales, step.problem.out_granularity if writes is None else writes)


def _squared_error(
    step: Step, writes: Form, errors: dict[tuple[object, ...], float], is_last: bool
) -> float | None:
    """The square of a layer's error in the chain, see the module; None if unknown."""
    own = step.row_err
    if own is None:
        return None
    plain, as_read = (errors.get(_numerics(step, scales)) for scales in (NONE, writes.read))
    if is_last or writes.written is NONE or plain is None or as_read is None:
        return own**2
    return plain**2 + max(0.0, own**2 - as_read**2)


def unquantized_steps(chain: Chain) -> tuple[Step, ...]:
    """The chain of the fastest unquantized kernels, which always runs, measured or not."""
    steps: list[Step] = []
    if chain.reads is not NONE:
        problem = chain.dequantizing(chain.layers[0].k)
        steps += _conversion(chain, 0, problem) or [Step(0, problem, _any_kernel(problem, chain))]
    for place in range(len(chain.layers)):
        problem = chain.problem(place, NONE, NONE, chain.wanted(place))
        known = list(_measured(chain, place, problem, unquantized=True))
        base = baseline_name(problem)
        assert base is not None  # of bfloat16 operands there is one
        best = min(known, key=_by_time, default=Step(place, problem, base))
        square = None if best.row_err is None else best.row_err**2 * chain.gain(place)
        steps.append(best._replace(share=square))
    return tuple(steps)


def worth_measuring(chain: Chain, known: Iterable[LayerOption]) -> list[Problem]:
    """Problems without time or error: unquantized layers, and FP8 in the whole chain.

    FP8 has rowwise or 1x128 scales; bounded outputs of rowwise layers have a static scale.
    """
    there = {step.problem for option in known for step in option.steps}
    unquantized = [s.problem for s in unquantized_steps(chain) if s.time is None]
    found = [p for p in unquantized if p.op not in CONVERSIONS]
    for place, layer in enumerate(chain.layers if chain.prepared else ()):
        for scales in (ROW, GROUP):
            takes = chain.reads if place == 0 else scales
            if takes not in (NONE, scales):
                continue
            inner = TENSOR if scales is ROW and layer.is_bounded else scales
            writes = chain.writes if chain.is_last(place) else inner
            found.append(chain.problem(place, takes, WEIGHTS[scales][0], writes))
    return [
        problem for problem in dict.fromkeys(found)
        if problem not in there and remedies.why_not_measurable(problem) is None
        and _any_kernel(problem, chain)
    ]  # fmt: skip


def _problems(chain: Chain, place: int) -> Iterator[Problem]:
    """The problems of a layer with all granularities."""
    if chain.is_last(place):
        outputs = [chain.writes]
    elif chain.prepared:
        outputs = [NONE, ROW, GROUP, *([TENSOR] if chain.layers[place].is_bounded else [])]
    else:
        outputs = [NONE]
    for writes in outputs:
        yield chain.problem(place, NONE, NONE, writes)
        for scales, weights in WEIGHTS.items() if chain.prepared else ():
            for weight in weights:
                yield chain.problem(place, NONE, weight, writes)
                yield chain.problem(place, scales, weight, writes)


def _readings(
    chain: Chain, place: int, takes: Granularity
) -> Iterator[tuple[Form, tuple[Step, ...]]]:
    """Forms in which the previous layer may write the input, with conversions before the kernel."""
    yield Form(takes, takes), ()
    k = chain.layers[place].k
    if takes is NONE:
        if place == 0 and chain.reads is not NONE:
            for step in _conversion(chain, place, chain.dequantizing(k)):
                yield Form(chain.reads, chain.reads), (step,)
        return
    if place > 0 and takes is not TENSOR:
        yield Form(TENSOR, takes), ()
    problem = make_problem(
        "quantize", (chain.m, k), a=chain.operand(k), out_format=chain.fp8, out_granularity=takes
    )
    for step in _conversion(chain, place, problem):
        yield Form(NONE, NONE), (step,)


def _readable_forms(chain: Chain, step: Step) -> list[Form]:
    """Forms in which the next layer may read the output of a step."""
    writes = step.problem.out_granularity
    if writes is TENSOR and not chain.is_last(step.place):
        return [Form(TENSOR, scales) for scales in SCALED]
    return [Form(writes, writes)]


def _conversion(chain: Chain, place: int, problem: Problem) -> list[Step]:
    """The fastest conversion of a layer's input; all kernels write the same bytes."""
    found = [s._replace(share=0.0) for s in _measured(chain, place, problem)]
    return [min(found, key=_by_time)] if found else []


def _measured(
    chain: Chain, place: int, problem: Problem, *, unquantized: bool = False
) -> Iterator[Step]:
    """Steps of all kernels with a time at a problem, or of unquantized kernels only."""
    table = dispatcher.table_for(
        problem, None, chain.distributions, chain.device, chain.regime, is_choice=False,
        predicts=False,
    )  # fmt: skip
    for candidate in table.candidates:
        found = candidate.time_at(problem.m)
        if found is None or (unquantized and not candidate.unquantized):
            continue
        if candidate.unquantized and problem.prepared:
            continue  # it reads the unquantized weight
        kernel = candidate.kernel  # None for kernels of other machines, which have times
        if kernel is not None and kernel.refusal(problem, chain.device) is not None:
            continue
        if not chain.takes(kernel):
            continue
        row_err = candidate.errors.get("row_err")
        yield Step(place, problem, candidate.name, *found, row_err)


def _by_time(step: Step) -> tuple[float, str]:
    return (step.time.latency_us if step.time else math.inf, step.kernel)


def _any_kernel(problem: Problem, chain: Chain) -> str:
    """Name of a kernel that supports a problem, or ""."""
    found = (
        kernel.name
        for kernel in kernels_for(problem.op, chain.device)
        if kernel.refusal(problem, chain.device) is None and chain.takes(kernel)
    )
    return next(found, "")
