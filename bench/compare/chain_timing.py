"""A chain measured whole: time in one graph and error at the end, beside the sums over layers.

Dispatch's choice, the fastest unquantized chain and torch.compile of the whole are timed in the
same rounds, on the same inputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lokakern import numerics
from lokakern.bench.compare import compiled_baselines as compiled_layers
from lokakern.bench.compare.race import Setting, median_of
from lokakern.chain.candidates import NONE, Chain
from lokakern.chain.choice import ChainChoice
from lokakern.device import l2_bytes
from lokakern.errors import MeasurementError, UnknownNameError
from lokakern.kernels.torch import norm as stock
from lokakern.measure import timing
from lokakern.measure.accuracy import SEEDS
from lokakern.measure.norm_operands import draw_epilogue, written_parts
from lokakern.measure.operand_cache import OperandKey, device_operand, most_rows
from lokakern.measure.operands import poison
from lokakern.measure.time_problem import floor_us, torch_device
from lokakern.measure.timing import Contender, faults_of
from lokakern.registry import ops
from lokakern.types import NormEpilogue, QuantizedTensor, norm_form

CHOSEN, UNQUANTIZED = "dispatch_chain", "unquantized"
COMPILED = {
    "torch.compile": "default",
    "torch.compile_max_autotune": "max-autotune-no-cudagraphs",
}
TIMED_ON = "X1"
BETWEEN_LAYERS = 100  # from the seed of a layer's weight to that of the next
Matrix = Tensor | QuantizedTensor
_Layers = Sequence[tuple[Tensor, NormEpilogue]]  # drawn weights and epilogues in the chain's dtype


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run the chain."""

    name: str  # `CHOSEN`, `UNQUANTIZED` or one of `COMPILED`
    kernels: tuple[str, ...]  # kernels in the order of launches
    summed_us: float | None  # sum of the stored times of the layers; None where one is not known
    latency_us: float | None  # median time of the whole; None where it failed
    margin_us: float | None  # half-width of the 95 % interval of the median
    # Its time over that of the chosen chain; above 1 the chosen one is faster.
    speedup: float | None
    summed_row_err: float | None  # the row error that the stored errors of the layers predict
    # Row error against float64: the largest upper limit over distributions and seeds.
    row_err: float | None
    worst_on: str  # the distribution of that
    failed: str  # why there is no time, or why the output is incorrect


def _parameters(layers: _Layers) -> tuple[list[Any], ...]:
    """Copies of weights, biases, weights and biases of norms."""
    columns = zip(*((w, e.bias, e.norm_weight, e.norm_bias) for w, e in layers), strict=True)
    return tuple([None if x is None else x.clone() for x in column] for column in columns)


def rivals_named(words: Sequence[str]) -> list[str]:
    """Names in `COMPILED` that begin with one of the words; an UnknownNameError if none does."""
    for word in words:
        if not any(name.startswith(word) for name in COMPILED):
            raise UnknownNameError(f"rival {word!r} is unknown; expected {', '.join(COMPILED)}")
    return [name for name in COMPILED if name.startswith(tuple(words))] if words else []


def measure_chain(
    choice: ChainChoice,
    *,
    rivals: Sequence[str] = (),
    regime: str | None = None,
    step: Callable[[str], None] = lambda _text: None,
) -> list[Row]:
    """Time a choice and its rivals whole, in the same rounds, and measure errors of the whole.

    Args:
        choice: A choice for the device here.
        rivals: Names in `COMPILED`.
        regime: Timing regime; None means graph-cold on GPUs and eager on CPUs.
        step: Called with each phase.

    Raises:
        UnsupportedError: The choice is for another device.
        MeasurementError: A graph regime on a device without graphs.
        DeviceLostError: A chain left the device unusable.
    """
    regime = Setting(regime or "").regime
    choices = {CHOSEN: choice}
    if choice.steps != choice.plain:
        choices[UNQUANTIZED] = choice.unquantized
    step("times")
    contenders = _timed(choices, rivals, regime)
    errors = {name: _error_of(found, step) for name, found in choices.items()}
    times = {one.name: median_of(one) for one in contenders if one.status == "ok"}
    ours = times.get(CHOSEN)
    rows = []
    for contender in contenders:
        name = contender.name
        found = choices.get(name)
        median, margin = times.get(name, (None, None))
        error, worst_on, wrong = errors.get(name, (None, "", ""))
        rows.append(Row(
            name=name,
            kernels=found.kernels if found else (),
            summed_us=found.latency_us if found else None,
            latency_us=median,
            margin_us=margin,
            speedup=median / ours[0] if median and ours else None,
            summed_row_err=found.row_err if found else None,
            row_err=error,
            worst_on=worst_on,
            failed=contender.reason or wrong,
        ))  # fmt: skip
    timing.release(contenders)
    return rows


def _timed(choices: dict[str, ChainChoice], rivals: Sequence[str], regime: str) -> list[Contender]:
    """Contenders with their samples, the chosen chain first.

    Each operand set is distinct, until their bytes exceed 2x the cache.
    """
    chain, where = choices[CHOSEN].chain, torch_device()
    layers = _drawn(chain, TIMED_ON, 0)
    x = _inputs(chain, TIMED_ON, 0)
    weights = sum(weight.numel() for weight, _ in layers)
    set_bytes = 2 * (chain.m * (chain.layers[0].k + chain.layers[-1].n) + weights)
    count = 1 if regime == "graph-hot" else math.ceil(2 * l2_bytes() / set_bytes)
    generator = torch.Generator().manual_seed(1)
    inputs = [x[torch.randperm(chain.m, generator=generator).to(where)] for _ in range(count)]
    given = [_as_read(chain, x) for x in inputs]
    contenders: list[Contender] = []
    outputs: list[Matrix] = []
    for name, choice in choices.items():
        runs = [choice.prepare(*_parameters(layers)) for _ in range(count)]
        outputs = outputs or [run.empty_output() for run in runs]
        sets = zip(runs, given, outputs, strict=True)
        calls: list[Any] = [functools.partial(run, x, out) for run, x, out in sets]
        contenders.append(Contender(name, calls))
    contenders += [_compiled(name, chain, layers, inputs) for name in rivals]
    timing.warm(where)
    floor = sum(floor_us(s.problem) for s in choices[CHOSEN].steps)
    ready = [contender for contender in contenders if contender.status == "ok"]
    timing.time_contenders(ready, regime=regime, device=where, floor_us=floor, keep_all=True)
    for contender in contenders[: len(choices)]:
        if contender.status != "ok":
            continue
        with faults_of(contender, where):
            for out in outputs:
                poison(written_parts(out), chain.fp8.nan_byte)
            contender.run_all()
            if any(torch.isnan(part.float()).any() for part in written_parts(outputs[0])):
                raise MeasurementError("outputs were not written, or are NaN")
    return contenders


def _compiled(name: str, chain: Chain, layers: _Layers, inputs: Sequence[Tensor]) -> Contender:
    """The whole chain in its dtype, compiled by torch.compile from stock modules."""
    contender = Contender(name, ())
    with faults_of(contender, torch_device()):
        compiled = compiled_layers.compiled(_function_of(layers), COMPILED[name])
        columns = chain.layers[-1].n
        contender.calls = [
            functools.partial(compiled, x, x.new_empty((chain.m, columns)), *_parameters(layers))
            for x in inputs
        ]
        contender.calls[0]()  # compiles and tunes, once for all sets
    return contender


def _function_of(layers: _Layers) -> Callable[..., None]:
    kinds = [(e.norm, NormEpilogue(activation=e.activation)) for _, e in layers]

    def chain(
        y: Tensor,
        out: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        norm_weights: Sequence[Tensor | None],
        norm_biases: Sequence[Tensor | None],
    ) -> None:
        for place, (norm, tail) in enumerate(kinds):
            y = torch.nn.functional.linear(y, weights[place], biases[place])
            y = stock._torch_norm(y, norm, norm_weights[place], norm_biases[place])
            y = stock._tail(y, tail)
        out.copy_(y)  # inside, so that the last kernel writes there

    return chain


def _error_of(choice: ChainChoice, step: Callable[[str], None]) -> tuple[float, str, str]:
    """Largest upper limit of the row error, its distribution, and non-finite outputs."""
    worst, where, wrong = 0.0, "", ""
    for distribution in choice.chain.distributions:
        step(f"errors on {distribution}")
        for errors in _errors(choice, distribution, SEEDS):
            if errors.nonfinite_unexpected_count:
                wrong = f"{errors.nonfinite_unexpected_count} outputs on {distribution} not finite"
            if errors.row_err_upper > worst or not where:
                worst, where = errors.row_err_upper, distribution
    return worst, where, wrong


def _errors(
    choice: ChainChoice, distribution: str, seeds: Sequence[int]
) -> Iterator[numerics.Errors]:
    chain = choice.chain
    for seed in seeds:
        layers = _drawn(chain, distribution, seed)
        x = _inputs(chain, distribution, seed)
        out = choice.prepare(*_parameters(layers))(_as_read(chain, x))
        exact = x[: most_rows(chain.layers[0].k)].double()  # the rest repeats it
        for weight, epilogue in layers:
            sums = exact @ weight.double().t()
            exact, _ = ops.normalized(sums, torch.zeros_like(sums), epilogue)
        value = ops.exact(out)[: len(exact)]
        yield numerics.measure_errors(value, exact)


def _drawn(chain: Chain, distribution: str, seed: int) -> _Layers:
    """Weights of the distribution, and biases as small as after initialization.

    Large biases hide errors: one as large as the sums reduces the row error of four FP8 layers with
    BlockNorm and hard-swish from 0.085 to 0.024.
    """
    where, form = torch_device(), chain.half
    layers = []
    for place, layer in enumerate(chain.layers):
        own = seed + BETWEEN_LAYERS * place
        draw = OperandKey(distribution, layer.n, layer.k, own, weight=True)
        weight = device_operand(draw, layer.n, form, where)
        drawn = draw_epilogue(norm_form(layer.epilogue), 1, layer.n, where, seed=own)
        biases = {"bias": drawn.bias, "norm_bias": drawn.norm_bias}
        small = {name: x * layer.k**-0.5 for name, x in biases.items() if x is not None}
        parts: list[Any] = [
            x.to(form.dtype) if isinstance(x, Tensor) else x for x in drawn._replace(**small)
        ]
        layers.append((weight, NormEpilogue(*parts)))
    return layers


def _inputs(chain: Chain, distribution: str, seed: int) -> Tensor:
    """Rows of the input: the drawn rows, repeated."""
    k = chain.layers[0].k
    rows = min(most_rows(k), chain.m)
    draw = OperandKey(distribution, most_rows(k), k, seed, weight=False)
    x = device_operand(draw, rows, chain.half, torch_device())
    return x[torch.arange(chain.m, device=x.device) % rows]


def _as_read(chain: Chain, x: Tensor) -> Matrix:
    return x if chain.reads is NONE else numerics.quantize(x, chain.fp8, chain.reads)
