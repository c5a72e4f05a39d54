"""Chains of a conversion: consecutive layers that run as one op where that was measured faster.

Kernels of a chain are those of op gemm_norm, with FP8 or bfloat16 between layers, as in
`lokakern.chain`, or float16 where layers multiply in it, with another limit: the row error of each
layer alone is within the budget, or a report of Probe finds its kernel safe
(`lokakern.conversion.chain_verdicts`), as with each product of a route. A chain is used at an m
only if it is faster beyond noise than what would run instead: for each layer the faster of

- the unquantized layer: the fastest unquantized product with a separate norm and activation, which
  stand for what torch.compile makes;
- the layer as converted without chains: the product by its route, with the unquantized norm, whose
  time is the difference between that of the unquantized layer and of its product. An activation
  without a norm counts nothing, and neither does a quantizer after a norm with a static scale.

Times are those of the GPU alone, measured or interpolated between measured m, never predicted.
Where each call quantizes the weights, as in the backend of torch.compile, times of a chain are with
that.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, cast

from lokakern.chain.candidates import GAINS, NONE, TENSOR, Chain, Form, Layer, Step, own_options
from lokakern.chain.search import LayerOption, best_paths
from lokakern.conversion.chain_rivals import (
    ChainJudge,
    Rivals,
    SpanLayer,
    is_product,
    is_separate,
)
from lokakern.conversion.chain_verdicts import SafeWays, reads_safely, reported_error
from lokakern.conversion.frozen_chains import checked_plan
from lokakern.conversion.routes import ANY_M, within
from lokakern.nn.chain_plan import ChainLayer, ChainStep, Steps, plan_text, read_plan
from lokakern.nn.routed_matmul import dtype_of, in_dtype
from lokakern.registry import float16
from lokakern.registry.register import KERNELS, kernels_for
from lokakern.selection import dispatcher
from lokakern.selection.frozen.answers import digest_of, question
from lokakern.selection.ties import within_noise
from lokakern.types import Device, Format, Granularity, norm_form

MOST_LAYERS = 8  # of one chain
BFLOAT16 = Form(NONE, NONE)
SWEEP = "measure them with `handle.suite(m)` and `python -m lokakern.bench sweep --suite FILE`"
_MEASURED = "measured"
Segments = list[tuple[int, Steps]]


class TimedChain(NamedTuple):
    """The fastest chain within the budget at one m.

    Attributes:
        m: Rows.
        steps: Its launches.
        us: Their time.
        margin_us: Half-width of its 95 % interval.
        rival_us: Time of what runs instead.
        rival_margin_us: Half-width of its 95 % interval.
        row_err: Error of the chain from those of its layers: the root of the sum of their squares.
        interpolated: Whether a time is interpolated.
    """

    m: int
    steps: tuple[Step, ...]
    us: float
    margin_us: float
    rival_us: float
    rival_margin_us: float
    row_err: float
    interpolated: bool

    @property
    def is_faster(self) -> bool:
        """Whether it is faster than what runs instead, beyond noise."""
        times = (self.us, self.margin_us, self.rival_us, self.rival_margin_us)
        return self.us < self.rival_us and not within_noise(*times)

    @property
    def kernels(self) -> str:
        """Names of kernels in the order of launches."""
        return ", ".join(step.kernel for step in self.steps)

    @property
    def used(self) -> Steps:
        """The launches as in a plan; none if it is not faster."""
        return tuple(map(_launch, self.steps)) if self.is_faster else ()


@dataclass(frozen=True)
class PlannedChain:
    """A chain of some layers of a span.

    Attributes:
        start: Index of the first layer in the span.
        stop: Index after the last one.
        layers: The layers.
        text: The plan, see `lokakern.nn.chain_plan`.
        times: The fastest chain at each measured m where there is one.
        why: The reason in a few words.
        most_added: For each layer the most that a static scale of its output may add to its error
            if its norm has a weight or a bias; infinite without such a scale.
    """

    start: int
    stop: int
    layers: tuple[ChainLayer, ...]
    text: str
    times: tuple[TimedChain, ...] = field(repr=False)
    why: str
    most_added: tuple[float, ...] = field(default=(), repr=False)

    @property
    def launches(self) -> tuple[Steps, ...]:
        """The different launches, from the smallest m on."""
        segments = (segment for part in read_plan(self.text)[1:] for segment in part)
        return tuple(dict.fromkeys(steps for _, steps in segments if steps))

    def explain(self) -> str:
        """Kernels, times and error at every measured m; of frozen choices kernels only."""
        words = ", ".join(f"{x.n} x {x.k} {x.epilogue}" for x in self.layers)
        lines = [f"chain of {_count(self.layers)} ({words}): {self.why}"]
        if not self.times:
            lines += [f"  {', '.join(step.kernel for step in steps)}" for steps in self.launches]
        for t in self.times:
            kind = ", interpolated" if t.interpolated else ""
            is_used = "" if t.is_faster else ", not used: not faster beyond noise"
            lines.append(
                f"  m={t.m}: {t.us:.2f} us{kind}, {t.rival_us:.2f} us without the chain, row_err "
                f"{t.row_err:.4g} (root of the sum of squares over layers){is_used}"
            )
            lines += [f"    {words}" for words in map(_words, t.steps)]
        return "\n".join(lines)


@dataclass(frozen=True)
class SpanPlan:
    """The chains of a span of layers.

    Attributes:
        chains: They do not overlap.
        why: Why there is none, or "".
        missing: Layers without the measurements that chains need.
    """

    chains: tuple[PlannedChain, ...]
    why: str = ""
    missing: tuple[Layer, ...] = ()


def plan_span(
    span: Sequence[SpanLayer], judge: ChainJudge, cuts: Collection[int] | None = None
) -> SpanPlan:
    """Choose the chains of consecutive layers; with frozen choices those of the file.

    A span is cut into chains, and layers that are left alone, once for all m: so that the gains,
    each relative to the time of the span, are largest over the measured m.

    Args:
        span: The layers.
        judge: What they are judged by.
        cuts: Places of layers before which a chain may begin or end; None: all.

    Raises:
        ChoicesError: The file of frozen choices holds no chains of these layers, but something
            else.
    """
    asked = [_asked(span, judge, cuts, by_values=by_values) for by_values in (True, False)]
    if dispatcher.choices() is not None:
        return _held_plan(asked, span, judge)
    own = _Search(tuple(span), judge)
    search = _Search(tuple(map(own.as_measured, span)), judge)
    chains = tuple(
        _of_layers(search.planned(start, stop), span[start:stop])
        for start, stop in search.best_cuts(cuts)
    )
    why = "" if chains else search.why_none()
    if chains:
        texts = [f"{c.start} {c.stop} {_text_of(c.most_added)} {c.text}" for c in chains]
        names = {s.kernel for chain in chains for steps in chain.launches for s in steps}
        dispatcher.keep_answer(judge.device, asked[0], texts, names)
        if any(x.added < math.inf for x in span):
            # Of spans that differ in the values of norms, those with the least static scales.
            least = min(most for chain in chains for most in chain.most_added)
            dispatcher.keep_answer(judge.device, asked[1], texts, names, rank=(-least, *texts))
    return SpanPlan(chains, why, own.missing)


def _asked(
    span: Sequence[SpanLayer], judge: ChainJudge, cuts: Collection[int] | None, *, by_values: bool
) -> str:
    """The question for the chains of a span, of norms with these values, or with any."""
    layers = [
        (*x.layer, x.eps, x.route.text, x.is_handed, x.tensors, *([x.added] if by_values else []))
        for x in span
    ]  # fmt: skip
    ways = None if all(x.ways is None for x in span) else digest_of([x.ways for x in span])
    return question(
        "chains" if by_values else "chains of any norms",
        layers=layers if len(span) == 1 else digest_of(layers), ways=ways,
        row_err=judge.limit, distributions=judge.distributions, regime=judge.regime,
        m_range=judge.m_range, static=judge.admits_static, weights=judge.weights,
        format=judge.half, cuts=None if cuts is None else sorted(cuts),
        **({"quantizes_weights": True} if judge.quantizes_weights else {}),
    )  # fmt: skip


def _text_of(most_added: Sequence[float]) -> str:
    return ",".join(f"{most:.9g}" for most in most_added)


def _held_plan(asked: Sequence[str], span: Sequence[SpanLayer], judge: ChainJudge) -> SpanPlan:
    """The chains of the frozen choices in use; none if they have none.

    Where they were not made for norms with these values, those for others, but chains with a static
    scale that would now add too much to the error.
    """
    answers = (dispatcher.held_answer(judge.device, x) for x in asked)
    answer = next((x for x in answers if x is not None), None)
    held = dispatcher.choices()
    assert held is not None
    if answer is None:
        return SpanPlan((), f"none is among the choices of {held.origin}")
    found: list[PlannedChain] = []
    for given in answer.texts:
        first, last, *rest = given.split(" ", 3)
        is_range = first.isdecimal() and last.isdecimal() and len(first + last) <= 8
        answer.expect(is_range and len(rest) == 2, f"{given!r} is no chain")
        start, stop, behind = int(first), int(last), found[-1].stop if found else 0
        fits = behind <= start < stop <= min(len(span), start + MOST_LAYERS)
        answer.expect(fits, f"a chain of layers {start} to {stop} of {len(span)}")
        layers = checked_plan(rest[1], span[start:stop], judge, answer)
        most = _numbers_in(rest[0])
        is_most = len(most) == stop - start and not any(map(math.isnan, most))
        answer.expect(is_most, f"{given!r} is no chain")
        why = f"of the choices of {held.origin}"
        chain = PlannedChain(start, stop, layers, rest[1], (), why, most)
        scales = {step.place for steps in chain.launches for step in steps if _is_static(step)}
        affine = {i for i, x in enumerate(layers) if norm_form(x.epilogue).affine}
        is_limited = all(most[place] <= judge.limit for place in scales & affine)
        answer.expect(is_limited, f"static scales of {given!r} may add more than {judge.limit:g}")
        found.append(chain)
    left = [(x, place) for x in found if (place := _over(x, span)) is not None]
    chains = tuple(x for x in found if _over(x, span) is None)
    if chains or not left:
        return SpanPlan(chains)
    chain, place = left[0]
    return SpanPlan(
        (),
        f"over the budget: behind the norm of layer {chain.start + place + 1} a static scale adds "
        f"{span[chain.start + place].added:.4g} to row_err, and the chain of the choices of "
        f"{held.origin} has room for {chain.most_added[place]:.4g}",
    )


def _numbers_in(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        return ()


def _is_static(step: ChainStep) -> bool:
    return step.writes is TENSOR


def _over(chain: PlannedChain, span: Sequence[SpanLayer]) -> int | None:
    """The first layer of a chain whose static scale adds too much to its error; None without."""
    for place, most in enumerate(chain.most_added):
        # Both are rounded.
        if most < math.inf and span[chain.start + place].added > most * (1 + 1e-6):
            return place
    return None


def is_measured(x: SpanLayer, judge: ChainJudge) -> bool:
    """Whether the unquantized layer was measured, with or without a bias.

    With frozen choices, whether it was where they were made.
    """
    asked = question("measured layer", layer=x.layer, regime=judge.regime, format=judge.half)
    if dispatcher.choices() is not None:
        answer = dispatcher.held_answer(judge.device, asked)
        if answer is not None:
            answer.expect(answer.texts == (_MEASURED,), f"{asked} is wrong")
        return answer is not None
    search = _Search((x,), judge)
    is_so = bool(search.measured_m(search.as_measured(x)))
    if is_so:
        dispatcher.keep_answer(judge.device, asked, [_MEASURED], ())
    return is_so


def _of_layers(chain: PlannedChain, span: Sequence[SpanLayer]) -> PlannedChain:
    """The chain with the epilogues of the span, which may differ from the measured ones."""
    layers = tuple(
        layer._replace(epilogue=x.layer.epilogue)
        for layer, x in zip(chain.layers, span, strict=True)
    )
    if layers == chain.layers:
        return chain
    others = zip(chain.layers, layers, strict=True)
    names = dict.fromkeys(old.epilogue for old, new in others if old != new)
    _, aligned, other = read_plan(chain.text)
    why = f"{chain.why}, by times of {', '.join(names)}"
    text = in_dtype(plan_text(layers, aligned, other), dtype_of(chain.text))
    return replace(chain, layers=layers, text=text, why=why)


def _with_other_bias(epilogue: str) -> str:
    """The same epilogue without its bias, or with one."""
    words = [word for word in epilogue.split("+") if word not in ("bias", "none")]
    if "bias" not in epilogue.split("+"):
        words.insert(0, "bias")
    return "+".join(words) or "none"


def takes(
    layer: Layer, device: Device, writes: Granularity = NONE, half: Format = Format.BFLOAT16
) -> bool:
    """Whether any kernel of a device multiplies and normalizes such a layer in one launch.

    Args:
        layer: The layer.
        device: The device.
        writes: Granularity of the output; NONE for an unquantized one.
        half: Format of unquantized operands and outputs.
    """
    chain = Chain((layer, layer), 16, device, (), None, half=half)
    row, group, block = Granularity.ROW, Granularity.GROUP, Granularity.BLOCK
    problems = [
        chain.problem(0, reads, weight, writes)
        for reads, weight in ((NONE, NONE), (TENSOR, TENSOR), (row, row), (group, block))
    ]
    fused = [k for k in kernels_for("gemm_norm", device) if not is_separate(k)]
    return any(k.refusal(problem, device) is None for k in fused for problem in problems)


def _count(layers: Sequence[object]) -> str:
    return "1 layer" if len(layers) == 1 else f"{len(layers)} layers"


def _launch(step: Step) -> ChainStep:
    problem = step.problem
    weight = NONE if problem.b is None else problem.b.granularity
    return ChainStep(
        step.place, step.kernel, problem.a.granularity, weight, problem.out_granularity
    )


def _words(step: Step) -> str:
    problem, us = step.problem, step.time.latency_us if step.time else math.nan
    half = "float16" if float16.is_in(problem) else "bf16"
    scales = [str(x).replace("none", half) for x in _launch(step)[2::2]]
    error = "" if problem.b is None else f", row_err {step.row_err:.4g}"
    return f"layer {step.place + 1}: {step.kernel} ({scales[0]} to {scales[1]}), {us:.2f} us{error}"


def _is_read_safely(option: LayerOption, ways: SafeWays) -> bool:
    """Whether a report finds the operand safe with the scales in which it was written."""
    written = cast(Form, option.reads).written
    return written is NONE or reads_safely(ways, written)


def _is_frozen(option: LayerOption) -> bool:
    """Whether an output has a static scale that depends on the norm's weight or bias."""
    problem = option.steps[-1].problem
    return problem.out_granularity is TENSOR and norm_form(problem.epilogue).affine


def _with_added(option: LayerOption, added: float) -> LayerOption:
    """An option with what such a scale adds to its error."""
    last = option.steps[-1]
    if not _is_frozen(option) or last.row_err is None:
        return option
    last = last._replace(row_err=math.hypot(last.row_err, added))
    return option._replace(square=option.square + added**2, steps=(*option.steps[:-1], last))


def _weight_of(option: LayerOption) -> Granularity:
    """Granularity of the weight that an option reads."""
    return cast(Granularity, option.steps[-1].problem.b.granularity)


Weights = Mapping[int, Granularity]  # of layers; others may have any


class _Search:
    """The chains of one span."""

    def __init__(self, span: tuple[SpanLayer, ...], judge: ChainJudge) -> None:
        self._span, self._judge = span, judge
        self._options: dict[tuple[SpanLayer, int, bool], list[LayerOption]] = {}
        self._rivals = Rivals(judge)
        self._found: dict[tuple[object, ...], TimedChain | None] = {}
        self._quantized: dict[SpanLayer, list[float]] = {}
        self._sizes = [self._rivals.measured_m(x.layer) for x in span]

    # ---- what was measured

    def as_measured(self, x: SpanLayer) -> SpanLayer:
        """The layer, or without times of it one that is much alike and has some.

        That is the same with, or without, a bias, which changes times by little, errors not at all,
        and for GELU by tanh the one that is not, which takes a little longer. Suites rarely hold
        both.
        """
        own = x.layer.epilogue
        usual = own.replace("gelu_tanh", "gelu")
        alike = own, _with_other_bias(own), usual, _with_other_bias(usual)
        layers = (x.layer._replace(epilogue=epilogue) for epilogue in alike)
        found = next((layer for layer in layers if self._rivals.measured_m(layer)), x.layer)
        return x._replace(layer=found)

    def measured_m(self, x: SpanLayer) -> list[int]:
        """The m at which the unquantized layer was measured."""
        return self._rivals.measured_m(x.layer)

    @property
    def missing(self) -> tuple[Layer, ...]:
        """Layers without a time of an unquantized kernel, or of kernels that quantize.

        Before another layer they also need one that writes FP8, if a kernel does.
        """
        found: dict[Layer, None] = {}
        for place, (x, sizes) in enumerate(zip(self._span, self._sizes, strict=True)):
            stored = x._replace(ways=None)
            is_known = bool(self._errors(x, sizes) or self._errors(stored, sizes))
            if is_known and place < len(self._span) - 1:
                is_known = self._writes_fp8(stored, sizes) or not takes(
                    x.layer, self._judge.device, Granularity.ROW, self._judge.half
                )
            if not is_known:
                found[x.layer] = None
        return tuple(found)

    def _writes_fp8(self, x: SpanLayer, sizes: Sequence[int]) -> bool:
        return any(
            option.writes != BFLOAT16 and _weight_of(option) is not NONE
            for m in sizes
            for option in self._own_options(x, m, False, math.inf)
        )

    def sizes(self, start: int, stop: int) -> list[int]:
        """The m at which rows of the layers exist, and times of all of them are known."""
        every = self._sizes[start:stop]
        if not all(every):
            return []
        low, high = max(x[0] for x in every), min(x[-1] for x in every)
        return sorted({m for x in every for m in x if low <= m <= high})

    def _in_range(self, start: int, stop: int) -> list[int]:
        """Those of `sizes` in the range; near the ends of one between them, interpolated."""
        low, high = self._judge.m_range or (0, ANY_M)
        sizes = self.sizes(start, stop)
        found = [m for m in sizes if low <= m <= high]
        is_between = sizes and sizes[0] <= low <= high <= sizes[-1]
        if found or not is_between:
            return found
        first = -(-low // 16) * 16
        return sorted({first, max(first, high // 16 * 16)})

    def _errors(self, x: SpanLayer, sizes: Sequence[int]) -> list[float]:
        """Row errors of all measured quantizing kernels of a layer, whatever the budget.

        By a report those of kernels that it finds safe.
        """
        if x not in self._quantized:
            self._quantized[x] = [
                option.steps[-1].row_err or 0.0
                for m in sizes
                for option in self._own_options(x, m, True, math.inf)
                if _weight_of(option) is not NONE
            ]
        return self._quantized[x]

    # ---- chains of some layers

    def _own_options(
        self, x: SpanLayer, m: int, is_last: bool, limit: float
    ) -> Iterable[LayerOption]:
        # In the middle of a chain, or at its end: what a layer can read and write, and nothing
        # else, depends on its place, and what the first one reads is among it.
        chain = self._judge.chain((x.layer,) * (2 if is_last else 3), m)
        ways = x.ways
        error_of = None if ways is None else functools.partial(reported_error, ways=ways)
        usable = filter(self._is_usable, own_options(chain, 1, limit, error_of))
        every = (_with_added(option, x.added) for option in usable)
        if self._judge.quantizes_weights:
            every = (more for option in every if (more := self._with_weight(option, x)) is not None)
        found = (o for o in every if o.square < math.inf and (o.steps[-1].row_err or 0.0) <= limit)
        return found if ways is None else (o for o in found if _is_read_safely(o, ways))

    def _with_weight(self, option: LayerOption, x: SpanLayer) -> LayerOption | None:
        """An option with the time to quantize its weight; None if that is unknown."""
        scales, last = _weight_of(option), option.steps[-1]
        if scales is NONE:
            return option
        found = self._rivals.of_weight(x.layer, scales)
        if found is None:
            return None
        us, margin = found.latency_us, math.hypot(last.time.margin_us, found.margin_us)
        time = replace(last.time, latency_us=last.time.latency_us + us, margin_us=margin)
        steps = (*option.steps[:-1], last._replace(time=time))
        return option._replace(time_us=option.time_us + us, steps=steps)

    def _is_usable(self, option: LayerOption) -> bool:
        forms = cast(Form, option.reads), cast(Form, option.writes)
        if TENSOR in {form.written for form in forms} and not self._judge.admits_static:
            return False
        # Scales of a norm with a weight or a bias are kept for rows; others a launch would repeat.
        if _is_frozen(option) and forms[1].read is Granularity.GROUP:
            return False
        if _weight_of(option) not in (NONE, *self._judge.weights):
            return False
        kernels = [KERNELS.get(step.kernel) for step in option.steps]
        last = kernels[-1]
        # A kernel that quantizes the weight in each call is for training.
        quantizes = last is not None and last.quantizes and _weight_of(option) is NONE
        return None not in kernels and not quantizes

    def _fastest(self, x: SpanLayer, m: int, is_last: bool) -> list[LayerOption]:
        """The fastest option of each kind within the budget."""
        key = x, m, is_last
        if key not in self._options:
            kinds: dict[tuple[object, ...], LayerOption] = {}
            for option in self._own_options(x, m, is_last, self._judge.limit):
                kind = option.reads, option.writes, _weight_of(option)
                other = kinds.get(kind)
                if other is None or option[2:4] < other[2:4]:
                    kinds[kind] = option
            self._options[key] = list(kinds.values())
        return self._options[key]

    def at(self, start: int, stop: int, m: int, weights: Weights) -> TimedChain | None:
        """The fastest chain of some layers within the budget at m; None without one."""
        key = (start, stop, m, *(weights.get(place) for place in range(start, stop)))
        if key not in self._found:
            self._found[key] = self._chain_at(start, stop, m, weights)
        return self._found[key]

    def _rival(self, place: int, m: int) -> tuple[float, float] | None:
        """Time of a layer without a chain, and half of its interval; None if unknown."""
        reader = self._span[place + 1] if place + 1 < len(self._span) else None
        return self._rivals.at(self._span[place], m, reader)

    def _chain_at(self, start: int, stop: int, m: int, weights: Weights) -> TimedChain | None:
        rivals = [self._rival(place, m) for place in range(start, stop)]
        if None in rivals:
            return None
        options = [
            [
                option._replace(square=0.0, steps=(option,))
                for option in self._fastest(self._span[place], m, place == stop - 1)
                if _weight_of(option) in (NONE, weights.get(place, _weight_of(option)))
            ]
            for place in range(start, stop)
        ]
        path = next(iter(best_paths(options, BFLOAT16, BFLOAT16)), None)
        if path is None:
            return None
        chosen = [option.steps[0] for option in path.options]
        # A cross multiplies its sums and their error alike, and adds a tensor without one.
        gains = [GAINS.get(norm_form(x.layer.epilogue).last, 1.0) for x in self._span[start:stop]]
        square = sum(
            option.square * math.prod(gains[place + 1 :]) for place, option in enumerate(chosen)
        )
        steps = tuple(
            step._replace(place=place) for place, option in enumerate(chosen)
            for step in option.steps
        )  # fmt: skip
        margin = math.hypot(*(step.time.margin_us for step in steps))
        known = [rival for rival in rivals if rival is not None]
        return TimedChain(
            m, steps, path.time_us, margin, sum(us for us, _ in known),
            math.hypot(*(margin for _, margin in known)), math.sqrt(square),
            any(step.interpolated for step in steps),
        )  # fmt: skip

    def weights(self, start: int, stop: int) -> Weights:
        """Granularities of weights with the least time in geometric mean over the measured m."""
        used: dict[int, Counter[Granularity]] = {}
        for m in self._in_range(start, stop):
            found = self.at(start, stop, m, {})
            for step in found.steps if found is not None and found.is_faster else ():
                scales = _launch(step).weight
                if scales is not NONE:
                    used.setdefault(start + step.place, Counter())[scales] += 1
        first = dict.fromkeys(range(start, stop), NONE)
        first |= {place: counts.most_common(1)[0][0] for place, counts in used.items()}
        several = {place: list(counts) for place, counts in used.items() if len(counts) > 1}
        if not several:
            return first
        alike = {scales for counts in several.values() for scales in counts}
        starts = [first, *({**first, **dict.fromkeys(several, scales)} for scales in alike)]
        return min(
            (self._descended(start, stop, weights, several) for weights in starts),
            key=lambda weights: self._log_gain(start, stop, weights),
        )

    def _descended(
        self, start: int, stop: int, weights: dict[int, Granularity],
        several: Mapping[int, Sequence[Granularity]],
    ) -> dict[int, Granularity]:  # fmt: skip
        """Weights that no change of one layer makes faster."""
        while True:
            tried = [
                {**weights, place: scales} for place, every in several.items() for scales in every
            ]
            best = min(tried, key=lambda x: self._log_gain(start, stop, x))
            if not self._log_gain(start, stop, best) < self._log_gain(start, stop, weights):
                return weights
            weights = best

    def _log_gain(self, start: int, stop: int, weights: Weights) -> float:
        """Sum of log(time with the chain / time without) over the measured m."""
        every = (self.at(start, stop, m, weights) for m in self._in_range(start, stop))
        return sum(math.log(x.us / x.rival_us) for x in every if x is not None and x.is_faster)

    # ---- the whole span

    def best_cuts(self, cuts: Collection[int] | None = None) -> list[tuple[int, int]]:
        """First layer, and layer after the last one, of each chain."""
        count = len(self._span)
        cuts = range(count) if cuts is None else cuts
        best: list[tuple[float, list[tuple[int, int]]]] = [(0.0, [])]
        for stop in range(1, count + 1):
            gain, parts = best[-1]
            for start in range(max(0, stop - MOST_LAYERS), stop):
                is_allowed = start in cuts and (stop in cuts or stop == count)
                more = self._gain(start, stop) if is_allowed else 0.0
                # Of equal gains that of the longest chain, which is tried first, counts.
                if more > 0 and best[start][0] + more > gain * (1 + 1e-9):
                    gain, parts = best[start][0] + more, [*best[start][1], (start, stop)]
            best.append((gain, parts))
        return best[-1][1]

    def _gain(self, start: int, stop: int) -> float:
        """Sum over the measured m of the gain of a chain relative to the time of the span."""
        if stop - start == 1 and is_product(self._span[start].layer):
            return 0.0  # which its route runs
        weights = self.weights(start, stop)
        total = 0.0
        for m in self._in_range(start, stop):
            found = self.at(start, stop, m, weights)
            if found is not None and found.is_faster:
                every = (self._rival(place, m) for place in range(len(self._span)))
                total += (found.rival_us - found.us) / sum(x[0] for x in every if x is not None)
        return total

    def planned(self, start: int, stop: int) -> PlannedChain:
        """The plan of a chain."""
        weights = self.weights(start, stop)
        aligned = self._segments(start, stop, weights)
        launched = {step for _, steps in aligned for step in steps}
        read = {s.place: s.weight for s in launched if s.weight is not NONE}
        layers = tuple(
            ChainLayer(*x.layer, x.eps, read.get(place, NONE))
            for place, x in enumerate(self._span[start:stop])
        )
        other = []
        for first, steps in aligned:
            # A range of m may begin at an odd one, where other launches would be chosen.
            found = self.at(start, stop, -(-first // 16) * 16, weights)
            is_odd = found is not None and found.used == steps and self._takes_odd(found)
            other.append((first, steps if is_odd else ()))
        every = (self.at(start, stop, m, weights) for m in self._in_range(start, stop))
        times = tuple(x for x in every if x is not None)
        logs = [math.log(t.rival_us / t.us) for t in times if t.is_faster]
        at = [t.m for t in times if t.is_faster]
        why = (
            f"{math.exp(sum(logs) / len(logs)):.2f}x as fast in geometric mean over m="
            f"{at[0] if len(at) == 1 else f'{at[0]}..{at[-1]}'}"
        )
        if self._judge.quantizes_weights and read:
            why += ", weights quantized in each call"
        text = in_dtype(plan_text(layers, aligned, _merged(other)), self._judge.half.dtype)
        begins = (self.at(start, stop, m, weights) for m, steps in aligned if steps)
        most = self._most_added(start, stop, [x for x in (*times, *begins) if x is not None])
        return PlannedChain(start, stop, layers, text, times, why, most)

    def _most_added(
        self, start: int, stop: int, times: Sequence[TimedChain]
    ) -> tuple[float, ...]:  # fmt: skip
        """What static scales behind norms with values may add to errors, see `PlannedChain`."""
        found = [math.inf] * (stop - start)
        for step in (step for t in times if t.is_faster for step in t.steps):
            problem = step.problem
            if problem.out_granularity is TENSOR and norm_form(problem.epilogue).affine:
                # What is stored without the scale, as of `_with_added`.
                own = (step.row_err or 0.0) ** 2 - self._span[start + step.place].added ** 2
                room = math.sqrt(max(0.0, self._judge.limit**2 - max(0.0, own)))
                found[step.place] = min(found[step.place], room)
        return tuple(found)

    def _segments(self, start: int, stop: int, weights: Weights) -> Segments:
        """Launches by ranges of m; none outside the measured ones."""

        def steps(m: int) -> Steps:
            found = self.at(start, stop, m, weights)
            return () if found is None else found.used

        sizes = self.sizes(start, stop)
        found: Segments = [(0, ())]
        for low, high in pairwise(sizes):
            found.append((low, steps(low)))
            while found[-1][1] != steps(high):
                found.append(_change(found[-1], high, steps))
        found += [(sizes[-1], steps(sizes[-1])), (sizes[-1] + 1, ())]
        m_range = self._judge.m_range
        return _merged(found if m_range is None else within(found, m_range, ()))

    def _takes_odd(self, found: TimedChain) -> bool:
        """Whether the kernels take an m that 16 does not divide."""
        return all(_refusal(step, found.m | 1, self._judge.device) is None for step in found.steps)

    def why_none(self) -> str:
        """Why there is no chain."""
        errors = [
            error for x, sizes in zip(self._span, self._sizes, strict=True)
            for error in self._errors(x, sizes)
        ]  # fmt: skip
        least, limit = min(errors, default=0.0), self._judge.limit
        if least > limit:
            return f"over the budget: the least row_err is {least:.4g} > {limit:g}"
        count = len(self._span)
        every = [
            found
            for stop in range(1, count + 1)
            for start in range(max(0, stop - MOST_LAYERS), stop)
            for m in self._in_range(start, stop)
            if (found := self.at(start, stop, m, {})) is not None
        ]
        known = sorted({m for place in range(count) for m in self.sizes(place, place + 1)})
        low, high = self._judge.m_range or (0, ANY_M)
        if known and errors and (high < known[0] or low > known[-1]):
            return f"measured at m={', '.join(map(str, known))}, not within m_range={low}..{high}"
        safe = dict.fromkeys(way for x in self._span for way, _ in x.ways or ())
        if not errors and safe and not self.missing:
            return f"no kernel of a chain multiplies as the report finds safe ({', '.join(safe)})"
        if not every or not errors:
            return f"not measured at these sizes: {SWEEP}"
        best = min(every, key=lambda x: x.us / x.rival_us)
        return (
            f"not faster: {best.us:.2f} us at best, at m={best.m}, and {best.rival_us:.2f} us "
            "without a chain"
        )


def _change(
    before: tuple[int, Steps], high: int, steps: Callable[[int], Steps]
) -> tuple[int, Steps]:
    """The next m with other launches, by bisection; there are others at ``high``."""
    low, known = before
    while low < (middle := (low + high) // 32 * 16) < high:  # m that 16 divides
        low, high = (middle, high) if steps(middle) == known else (low, middle)
    return high, steps(high)


def _merged(segments: Iterable[tuple[int, Steps]]) -> Segments:
    """Segments without those that repeat the one before; the last of equal starts counts."""
    found: Segments = []
    for start, steps in dict(segments).items():
        if not found or found[-1][1] != steps:
            found.append((start, steps))
    return found


def _refusal(step: Step, m: int, device: Device) -> str | None:
    kernel = KERNELS[step.kernel]
    return kernel.refusal(replace(step.problem, m=m), device)
