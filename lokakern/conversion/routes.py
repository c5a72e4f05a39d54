"""Routes of a site: the measured kernels of each of its GEMMs by ranges of m.

A weight is quantized once for all m, so that a route has one granularity of it, the fastest over
the measured m in the range. Times in training are those of GEMMs that quantize both operands,
because the weight changes in every step; times in inference are those of prepared weights. The
gradient of a weight sums over m, so that kernels are known only at measured m, and between two
equal choices.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import TypeVar

from lokakern.conversion.frozen_routes import checked_route
from lokakern.errors import UnsupportedError
from lokakern.mods.pad import Pad
from lokakern.nn.chain_plan import read_plan
from lokakern.nn.routed_matmul import (
    PLAIN,
    Segments,
    emulation_of,
    merged,
    name_at,
    read_route,
    route_text,
    with_eager,
)
from lokakern.probe.problems import way_of
from lokakern.probe.verdicts import Verdict
from lokakern.problems import PADDED, make_problem
from lokakern.registry import float16
from lokakern.registry.register import Kernel, fp8_format
from lokakern.selection import dispatcher
from lokakern.selection.candidates import Candidate
from lokakern.selection.choice import Choice
from lokakern.selection.frozen.answers import digest_of, question
from lokakern.selection.measured_neighbors import sizes_of
from lokakern.selection.padded_rows import padded_problem
from lokakern.selection.table import Table
from lokakern.selection.weight_forms import FORMS as FORMS
from lokakern.selection.weight_forms import with_weight
from lokakern.types import (
    COMPILED,
    Device,
    ErrorBudget,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    alignment_of,
)
from lokakern.workloads.gemm_cases import dense_operand
from lokakern.workloads.gemm_gradient_cases import grad_weight_case
from lokakern.workloads.norm_cases import norm_quantize_case

GEMMS = ("output", "grad_input", "grad_weight")
ANY_M = 2**31  # larger than any m
NO_GRADIENTS = "inference has none"  # the reason of their routes
UNALIGNED = "convert takes no predictions of unaligned rows"
PREDICTED = ", predicted at the lower end of an interval, not measured"
# m of swept weight gradients, in addition to those of the output
SAMPLES = (1024, 2048, 8192, 20480)
MRange = tuple[int, int]


@dataclass(frozen=True)
class Route:
    """The kernels of one GEMM of a site.

    Attributes:
        gemm: "output", "grad_input" or "grad_weight".
        text: The route of modules, see `lokakern.nn.routed_matmul`; "" if nothing is quantized.
        why: The reason in a few words.
        choices: The choice at each measured m, or at some m if times are predicted.
        eager: The route of eager calls where rows are unaligned, which nothing pads there.
    """

    gemm: str
    text: str
    why: str
    choices: tuple[Choice, ...] = ()
    eager: str = PLAIN

    def rows_at(self, choice: Choice) -> int:
        """Samples at a choice; the gradient of a weight sums over them."""
        problem = choice.problem
        return int(problem.k if self.gemm == "grad_weight" else problem.m)

    def above(self, m: int, why: str) -> Route:
        """The same route from m on, with nothing quantized below."""
        if self.text == PLAIN:
            return self
        form, *both = read_route(self.text)
        aligned, other = (merged(within(segments, (m, ANY_M), "")[:-1]) for segments in both)
        return replace(self, text=route_text(form, aligned, other), why=f"{self.why}; {why}")

    def with_eager(self) -> Route:
        """The same route with the kernels of eager calls in its text."""
        text = with_eager(self.text, self.eager)
        if text == self.text:
            return self
        names = {name for segments in read_route(self.eager)[1:] for _, name in segments if name}
        why = f"{self.why}; eager calls, in which nothing pads rows, run {', '.join(sorted(names))}"
        return replace(self, text=text, why=why)

    @property
    def is_predicted(self) -> bool:
        """Whether nothing was measured, and times are those of the time model."""
        return any(_is_predicted(choice.table) for choice in self.choices)

    @property
    def is_of_bfloat16(self) -> bool:
        """Whether it is of float16, and times are those with bfloat16."""
        return any(
            float16.is_in(choice.problem) and any(c.estimated for c in choice.table.candidates)
            for choice in self.choices
        )

    @property
    def is_padded(self) -> bool:
        """Whether choices compare with bfloat16 of padded rows."""
        return any(choice.table.padded for choice in self.choices)

    def explain(self, m: int | None = None) -> str:
        """The choice at every measured m, or at one, with the reason for each kernel that lost."""
        choices = self.choices
        if m is not None and self.gemm == "grad_weight":  # each m has its own table
            choices = tuple(c for c in choices if self.rows_at(c) == m)
        elif m is not None:
            choices = tuple(Choice(c.table, m) for c in choices[:1])
        return "\n".join([f"{self.gemm}: {self.why}", *(c.explain() for c in choices)])


@dataclass(frozen=True)
class Judge:
    """Source of errors and their limit: the database, or verdicts of Probe.

    Attributes:
        budget: Largest accepted error; None admits no quantizing kernel.
        distributions: Distributions of stored errors; None: all realistic ones.
        verdicts: Verdicts whose errors replace stored ones, if any.
        regime: Regime of the times, as of `dispatch`.
        is_training: Whether host costs are those of training steps.
        predicts: Whether times are predicted where nothing was measured.
        pads: Whether unaligned rows may be padded, as by a compiler; not in eager calls of modules.
        m_range: Smallest and largest m to choose for; None: all m. Predictions are listed there.
        is_of_one_m: Whether tables are asked at an end of this range only, as of weight gradients.
        wide: N and k that `mods.Pad` makes of those of the layer; None if it leaves them alone.
        has_bias: Whether the layer adds a bias to its output, which times may lack.
    """

    budget: ErrorBudget | None
    distributions: tuple[str, ...] | None = None
    verdicts: tuple[Verdict, ...] | None = None
    regime: str = COMPILED
    is_training: bool = False
    predicts: bool = False
    pads: bool = True
    m_range: MRange | None = None
    is_of_one_m: bool = False
    wide: tuple[int, int] | None = None
    has_bias: bool = False

    def candidates(
        self, problem: Problem, gemm: str, device: Device
    ) -> tuple[Table, list[Candidate]]:
        """The table of a problem, and its candidates with the errors of this source."""
        table = dispatcher.table_for(
            problem, self.budget, self.distributions, device, self.regime, is_choice=False,
            is_training=self.is_training, predicts=self.predicts,
            has_bias=self.has_bias and gemm == "output",
        )  # fmt: skip
        candidates = list(table.candidates)
        if table.padded and not self.pads:
            table = replace(table, padded="", forecast=None)
            candidates = [c for c in candidates if c.name != PADDED]
        # Few unaligned sizes were measured, and there predictions are inexact.
        if table.forecast is not None and not (self._is_measured(table) or table.padded):
            # At both ends of each of its cells, so that every m has the choice of `dispatch`.
            changes = [] if self.is_of_one_m else table.forecast.changes
            ends = (m for change in changes for m in (change - 1, change))
            candidates = table.forecast.low_ends((*ends, *(self.m_range or ())))
        table = replace(table, forecast=None)  # from here on a prediction is like a measured time
        if self.verdicts is None:
            return table, candidates
        verdict = next((v for v in self.verdicts if v.gemm == gemm), None)
        half = Format.FLOAT16 if float16.is_in(problem) else Format.BFLOAT16
        return table, [_judged(c, verdict, device, half.value) for c in candidates]

    def _is_measured(self, table: Table) -> bool:
        """Whether any m was measured, and not only beyond one end of the range."""
        low, high = self.m_range or (0, ANY_M)
        measured = table.measured_m
        return bool(measured) and measured[0] <= high and low <= measured[-1]

    def table(self, problem: Problem, gemm: str, device: Device) -> Table:
        """The table with these candidates."""
        table, candidates = self.candidates(problem, gemm, device)
        return replace(table, candidates=tuple(candidates))


def routes_of(
    n: int, k: int, judge: Judge, device: Device, *, has_bias: bool = False,
    inference: bool = False, m_range: MRange | None = None, forms: Sequence[Granularity] = FORMS,
    is_prepared: bool | None = None, is_turned: bool = False, turns_gradient: bool = False,
    can_pad: bool = True, half: Format = Format.BFLOAT16,
) -> tuple[Route, ...]:  # fmt: skip
    """Routes of the three GEMMs of a layer ``Y[m, n] = X[m, k] W[n, k]^T``.

    With frozen choices they are those of the file, for the same arguments.

    Args:
        n: Outputs.
        k: Inputs.
        judge: Source of errors and their limit.
        device: Device of the times.
        has_bias: Whether the output has a bias; times without bias are used if there are no others.
        inference: Whether there are no gradients.
        m_range: Smallest and largest m to choose for; None: all measured m.
        forms: Granularities of the weight.
        is_prepared: Whether the weight was quantized before, so that times are without that; None:
            in inference.
        is_turned: Whether the weight is stored as ``[k, n]``. A prepared weight has no such layout.
        turns_gradient: Whether the gradient of a turned weight is computed as ``[k, n]``, too.
        can_pad: Whether `mods.Pad` takes a layer of this kind, which reasons then name.
        half: Format of operands and outputs, bfloat16 or float16.

    Raises:
        ChoicesError: The file of frozen choices holds no routes for these arguments, but something
            else.
    """
    if judge.budget is None:
        return tuple(Route(gemm, PLAIN, "no budget: nothing is quantized") for gemm in GEMMS)
    is_prepared = inference if is_prepared is None else is_prepared
    is_turned = is_turned and not is_prepared
    judge = replace(judge, is_training=not inference, has_bias=has_bias)
    asked = question(
        "routes", n=n, k=k, judge=replace(judge, verdicts=None), verdicts=_judged_by(judge),
        inference=inference, m_range=m_range, forms=forms, prepared=is_prepared, turned=is_turned,
        turns_gradient=turns_gradient, format=half,
    )  # fmt: skip

    def problem_at(gemm: str, m: int) -> Problem:
        is_swapped = gemm == "grad_weight" and is_turned and turns_gradient
        sizes = (k, n) if is_swapped else (n, k)
        return problem_of(gemm, m, *sizes, is_turned=is_turned, half=half)

    if dispatcher.choices() is not None:
        return _held_routes(asked, problem_at, device, inference, is_prepared, forms)
    # Only where no form of a GEMM was measured.
    wide = Pad().sizes_of(n, k) if can_pad else None
    predicting = replace(judge, predicts=True, m_range=m_range, wide=wide)
    found = _chosen_routes(
        n, k, judge, predicting, device, has_bias, inference, m_range, forms, is_prepared,
        is_turned, turns_gradient, half,
    )  # fmt: skip
    texts = [text for route in found for text in (route.text, route.eager)]
    if any(texts):
        dispatcher.keep_answer(device, asked, texts, names_in(texts))
    return found


def _judged_by(judge: Judge) -> str:
    """What a question tells of verdicts: a digest of what `_judged` reads."""
    if judge.verdicts is None:
        return ""
    return digest_of([
        (v.gemm, v.dtype, [
            (c.scales, c.safety, c.row_err_upper, c.row_p99, c.mean_shift, c.architecture)
            for c in v.classes
        ])
        for v in judge.verdicts
    ])  # fmt: skip


def names_in(routes: Iterable[str]) -> set[str]:
    """Names of the kernels in routes."""
    every = (part for text in routes if text for part in read_route(text)[1:])
    return {name for segments in every for _, name in segments if name}


def _held_routes(
    asked: str,
    problem_at: Callable[[str, int], Problem],
    device: Device,
    inference: bool,
    is_prepared: bool,
    forms: Sequence[Granularity],
) -> tuple[Route, ...]:
    """The routes of the frozen choices in use; without a kernel if they have none."""
    answer = dispatcher.held_answer(device, asked)
    held = dispatcher.choices()
    assert held is not None
    if answer is None:
        why = f"no kernel for it is among the choices of {held.origin}: nothing is quantized"
        return tuple(Route(gemm, PLAIN, why) for gemm in GEMMS)
    answer.expect(len(answer.texts) == 2 * len(GEMMS), f"{len(answer.texts)} texts answer {asked}")
    found = []
    for gemm, text, eager in zip(GEMMS, answer.texts[::2], answer.texts[1::2], strict=True):
        if inference and gemm != "output":
            answer.expect(text == eager == PLAIN, f"kernels of gradients answer {asked}")
            found.append(Route(gemm, PLAIN, NO_GRADIENTS))
            continue
        is_ahead = is_prepared and gemm == "output"
        refusal = partial(_refusal, gemm, problem_at, is_ahead, device)
        is_alone = gemm == "grad_weight"
        of_gemm = (Granularity.NONE,) if is_alone else forms
        route, eager = (checked_route(x, of_gemm, refusal, answer, is_alone) for x in (text, eager))
        found.append(Route(gemm, route, f"of the choices of {held.origin}", eager=eager))
    return tuple(found)


def _refusal(
    gemm: str, problem_at: Callable[[str, int], Problem], is_ahead: bool, device: Device,
    kernel: Kernel, m: int,
) -> str | None:  # fmt: skip
    """Why a kernel does not compute a GEMM at an m, also with a weight quantized ahead, or None."""
    problem = problem_at(gemm, m)
    why = None if is_ahead else kernel.refusal(problem, device)
    if why is not None or gemm == "grad_weight":
        return why
    return kernel.refusal(with_weight(problem, kernel.b_granularity, device), device)


def _chosen_routes(
    n: int, k: int, judge: Judge, predicting: Judge, device: Device, has_bias: bool,
    inference: bool, m_range: MRange | None, forms: Sequence[Granularity], is_prepared: bool,
    is_turned: bool, turns_gradient: bool, half: Format,
) -> tuple[Route, ...]:  # fmt: skip
    """`routes_of` from the database, or by predictions where nothing was measured."""
    epilogues = ("bias", "none") if has_bias else ("none",)
    if is_turned:
        epilogues = ("none",)  # no other was measured
    first = Route("output", PLAIN, "nothing was measured")
    for epilogue in epilogues:
        problem_at = output_problem(n, k, epilogue, is_turned, half)
        first = _route("output", problem_at, judge, device, is_prepared, m_range, forms)
        if first.choices:
            break
    else:
        problem_at = output_problem(n, k, epilogues[0], is_turned, half)
        first = _route("output", problem_at, predicting, device, is_prepared, m_range, forms)
    if inference:
        return (first, *(Route(gemm, PLAIN, NO_GRADIENTS) for gemm in GEMMS[1:]))
    problem_at = grad_input_problem(n, k, is_turned, half)
    second = _route("grad_input", problem_at, judge, device, False, m_range, forms)
    if not second.choices:
        second = _route("grad_input", problem_at, predicting, device, False, m_range, forms)
    n, k = (k, n) if is_turned and turns_gradient else (n, k)
    third = _grad_weight_route(n, k, judge, device, first, m_range, half)
    if not third.choices:
        third = _grad_weight_route(n, k, predicting, device, first, m_range, half)
    if third.is_padded:
        eager = replace(judge, pads=False)
        then = _grad_weight_route(n, k, eager, device, first, m_range, half)
        third = replace(third, eager=then.text)
    return first, second, third


def measures_bias(m: int, n: int, k: int, device: Device, regime: str) -> bool:
    """Whether to measure a layer with a bias with it, at m rows.

    Not where other m were measured without a bias and none with it: `routes_of` reads the times
    without a bias only where there are none with it, so that these m would be lost.
    """
    for epilogue, found in (("bias", True), ("none", False)):
        problem = output_problem(n, k, epilogue)(m)
        table = dispatcher.table_for(problem, None, None, device, regime, is_choice=False)
        if table.measured_m:
            return found
    return True


def with_padded_sizes(n: int, k: int, forms: Sequence[str]) -> dict[tuple[int, int], list[str]]:
    """Sizes to measure for an unaligned layer besides its own, with the forms of a suite.

    Those of bf16 with padded rows, which a compiler runs, and those that `mods.Pad` makes. None of
    aligned layers, nor where zeros cost so much that `mods.Pad` leaves the layer alone.
    """
    wide, aligned = Pad().sizes_of(n, k), (-(-n // 8) * 8, -(-k // 8) * 8)
    if wide is None or aligned == (n, k):
        return {}
    return {aligned: [form for form in forms if form != "prepared"], wide: [*forms]}


def activating_route(
    device: Device, k: int, activation: str, *, m_range: MRange | None = None
) -> str:
    """The route of the fastest kernels that activate and quantize rows of k columns.

    All have the same rounding. "" if no kernel with a single launch was measured.
    """
    fp8, row = fp8_format(device), Granularity.ROW
    problem = norm_quantize_case(16, k, activation, "X1", fp8, row).problem
    asked = question("activating", k=k, activation=activation, m_range=m_range)
    if dispatcher.choices() is not None:
        answer = dispatcher.held_answer(device, asked)
        if answer is None:
            return ""
        answer.expect(len(answer.texts) == 1, f"{len(answer.texts)} texts answer {asked}")

        def refusal(kernel: Kernel, m: int) -> str | None:
            return kernel.refusal(replace(problem, m=m), device)

        return checked_route(answer.texts[0], (row,), refusal, answer, reads_no_weight=True)
    table = dispatcher.table_for(problem, None, None, device, is_choice=False)
    segments: Segments = [(0, PLAIN)]
    for m in _sizes(table, m_range):
        timed = [
            (found[0].latency_us, c.name)
            for c in table.candidates
            if c.kernel is not None
            and c.kernel.language != "torch"
            and (found := c.time_at(m)) is not None
            and c.kernel.refusal(replace(problem, m=m), device) is None
        ]
        segments.append((m, min(timed)[1] if timed else PLAIN))
    segments.append((segments[-1][0] + 1, PLAIN))
    text = route_text(Granularity.ROW, segments, [(0, PLAIN)])
    if text:
        dispatcher.keep_answer(device, asked, [text], names_in([text]))
    return text


def without_chain(route: str, plan: str) -> str:
    """A route of `activating_route` where no chain begins at the layer that reads the rows.

    A chain computes more than this layer, and quantizes its input itself.

    Args:
        route: The route.
        plan: Of the chain (`lokakern.nn.chain_plan`); "" for none.
    """
    if not plan:
        return route
    form, aligned, other = read_route(route)
    chained = [(m, "chain" if steps else PLAIN) for m, steps in read_plan(plan)[1]]
    starts = sorted({m for m, _ in (*aligned, *chained)})
    kept = [(m, PLAIN if name_at(chained, m) else name_at(aligned, m)) for m in starts]
    return route_text(form, merged(kept), other)


def problem_of(
    gemm: str, m: int, n: int, k: int, epilogue: str = "none", is_turned: bool = False,
    half: Format = Format.BFLOAT16,
) -> Problem:  # fmt: skip
    """One of `GEMMS` of a layer at m rows; ``epilogue`` is that of the output."""
    if gemm == "output":
        return output_problem(n, k, epilogue, is_turned, half)(m)
    if gemm == "grad_input":
        return grad_input_problem(n, k, is_turned, half)(m)
    return grad_weight_case(m, n, k, half).problem


def output_problem(
    n: int, k: int, epilogue: str, is_turned: bool = False, half: Format = Format.BFLOAT16
) -> Callable[[int], Problem]:
    """``Y[m, n] = X[m, k] W[n, k]^T``; of a weight ``[k, n]`` a gradient of another layer."""
    return _grad_input_problem(k, n, half) if is_turned else _output_problem(n, k, epilogue, half)


def grad_input_problem(
    n: int, k: int, is_turned: bool = False, half: Format = Format.BFLOAT16
) -> Callable[[int], Problem]:
    """``dX[m, k] = dY[m, n] W[n, k]``; of a weight ``[k, n]`` the output of another layer."""
    return _output_problem(k, n, "none", half) if is_turned else _grad_input_problem(n, k, half)


def _output_problem(
    n: int, k: int, epilogue: str, half: Format = Format.BFLOAT16
) -> Callable[[int], Problem]:
    a = Operand(half, alignment=alignment_of(2 * k))
    return lambda m: make_problem("gemm", (m, n, k), a=a, epilogue=epilogue)


def _grad_input_problem(n: int, k: int, half: Format = Format.BFLOAT16) -> Callable[[int], Problem]:
    """``dX[m, k] = dY[m, n] W[n, k]``, W as the forward pass stores it."""
    a = dense_operand(half, (16, n), Layout.ROW, Layout.ROW)
    b = dense_operand(half, (n, k), Layout.ROW, Layout.COLUMN)  # as cases of sweeps
    return lambda m: make_problem("gemm", (m, k, n), a=a, b=b)


def _route(
    gemm: str,
    problem_at: Callable[[int], Problem],
    judge: Judge,
    device: Device,
    is_prepared: bool,
    m_range: MRange | None,
    forms: Sequence[Granularity],
) -> Route:
    """The route with the granularity of the weight that is fastest, and that of eager calls."""
    found = _best_route(gemm, problem_at, judge, device, is_prepared, m_range, forms)
    if not found.is_padded:
        return found
    if found.text != PLAIN:
        forms = (read_route(found.text)[0],)
    eager = replace(judge, pads=False)
    then = _best_route(gemm, problem_at, eager, device, is_prepared, m_range, forms)
    return replace(found, eager=then.text)


def _best_route(
    gemm: str,
    problem_at: Callable[[int], Problem],
    judge: Judge,
    device: Device,
    is_prepared: bool,
    m_range: MRange | None,
    forms: Sequence[Granularity],
) -> Route:
    @cache  # without a prepared weight, problems of all forms are equal
    def candidates(problem: Problem) -> tuple[Table, list[Candidate]]:
        return judge.candidates(problem, gemm, device)

    def of_forms(m: int, *kept: Granularity) -> Table:
        return _of_forms(problem_at(m), kept, candidates, device, is_prepared)

    best: tuple[float, Granularity, Table] | None = None
    for form in forms:
        aligned = of_forms(16, form)
        gain = _mean_log_gain(aligned, m_range)
        if gain < 0 and (best is None or gain < best[0]):
            best = gain, form, aligned
    if best is None:
        every = of_forms(16, *((Granularity.ROW,) if is_prepared else FORMS))
        if not every.measured_m:
            if not judge.predicts:  # a prediction takes its place; a search for words takes 20 ms
                return Route(gemm, PLAIN, "nothing was measured")
            why = _why_unaligned(gemm, every, judge)
            if not why:
                # A conversion cannot ask with other arguments.
                why, _, _ = every.pick(16).note.partition(": ask with")
            return Route(gemm, PLAIN, why or "nothing was measured")
        sizes = _sizes(every, m_range)
        return Route(gemm, PLAIN, _why_plain(every, sizes), tuple(Choice(every, m) for m in sizes))
    gain, form, aligned = best
    sizes = _sizes(aligned, m_range)
    segments = [_segments(table, m_range) for table in (aligned, of_forms(17, form))]
    text = route_text(form, segments[0], segments[1])
    why = f"{math.exp(-gain):.2f}x as fast in geometric mean over m={_words(sizes)}"
    why += PREDICTED if _is_predicted(aligned) else ""
    return Route(gemm, text, why, tuple(Choice(aligned, m) for m in sizes))


def _of_forms(
    problem: Problem,
    forms: Sequence[Granularity],
    candidates_of: Callable[[Problem], tuple[Table, list[Candidate]]],
    device: Device,
    is_prepared: bool,
) -> Table:
    """Candidates that read a prepared weight with one of these granularities."""
    asked = with_weight(problem, forms[0], device) if is_prepared else problem
    table, candidates = candidates_of(asked)
    kept, rejected = [], list(table.rejected)
    for candidate in candidates:
        reason = None
        if not candidate.unquantized:
            reason = _why_not(candidate.kernel, forms, problem, device)
        if reason is None:
            kept.append(candidate)
        else:
            rejected.append((candidate.name, reason))
    return replace(table, candidates=tuple(kept), rejected=tuple(rejected))


def _why_not(
    kernel: Kernel | None, forms: Sequence[Granularity], problem: Problem, device: Device
) -> str | None:
    if kernel is None:
        return "is in the database but not registered here"
    form = kernel.b_granularity
    if form not in forms:
        return f"reads a weight with {form} scales, and another gains more"
    if float16.is_in(problem) and (why := float16.why_not(kernel.name, kernel.parts)):
        return why
    refusal = kernel.refusal(with_weight(problem, form, device), device)
    return None if refusal is None else f"reads no weight quantized ahead: {refusal}"


def _judged(candidate: Candidate, verdict: Verdict | None, device: Device, dtype: str) -> Candidate:
    """A candidate with the replayed errors of a verdict, if that is for this dtype."""
    kernel = candidate.kernel
    if candidate.unquantized or kernel is None:
        return candidate
    numerics = way_of(kernel.granularity, kernel.b_granularity, kernel.accumulation)
    found = None if verdict is None else verdict.of(numerics)
    errors: dict[str, float] = {}
    reason = ""
    if verdict is None:
        reason = NO_VERDICT
    elif verdict.dtype != dtype:
        reason = why_other_dtype(verdict, dtype)
    elif found is None:
        reason = f"Probe did not replay {numerics}"
    elif found.architecture not in ("", device.architecture):
        reason = f"Probe replayed {numerics} on {found.architecture}"
    elif found.safety == "undecided":
        reason = f"undecided: {found.reason}"
    else:
        errors = {
            "row_err": found.row_err_upper,
            "row_p99": found.row_p99,
            "mean_shift": found.mean_shift,
        }
    where = "the site" if errors else ""
    return replace(
        candidate, errors=errors, worst_distribution=where, error_unknown=reason, errors_at=""
    )


def why_other_dtype(verdict: Verdict, dtype: str) -> str:
    """Why a verdict in another dtype than that of a layer admits nothing."""
    return (
        f"{OTHER_DTYPE}{verdict.dtype}, not {dtype}: probe the model in {dtype}, or make a report "
        f"of the same statistics by report(dtype=torch.{dtype})"
    )


def _sizes(table: Table, m_range: MRange | None) -> list[int]:
    """The measured m in a range; the ends of one between them, where times are interpolated.

    Of predictions, which are at every m, the usual m and the ends.
    """
    measured = table.measured_m
    low, high = m_range or (0, ANY_M)
    if _is_predicted(table):
        from lokakern.selection.prediction.forecast import SAMPLED_M  # loaded by then

        measured = [m for m in measured if m in (*SAMPLED_M, low, high)]
    found = [m for m in measured if low <= m <= high]
    is_between = measured and measured[0] <= low <= high <= measured[-1]
    return found if found or not is_between else sorted({low, high})


def _mean_log_gain(table: Table, m_range: MRange | None) -> float:
    """Mean of log(chosen time / least unquantized time); 0 without measurements."""
    gains = []
    for m in _sizes(table, m_range):
        pick, plain = table.pick(m), table.plain_at(m)
        if pick.time is not None and plain is not None:
            gains.append(math.log(pick.time.latency_us / plain.latency_us))
    return sum(gains) / len(gains) if gains else 0.0


def _segments(table: Table, m_range: MRange | None) -> Segments:
    ends = [*table.breakpoints[1:], ANY_M]
    found: Segments = []
    for start, end, kernel, missed in zip(
        table.breakpoints, ends, table.kernels, table.misses, strict=True
    ):
        is_used = kernel is not None and kernel.quantizes and not missed and runs(kernel, table)
        found.append((start, kernel.name if kernel is not None and is_used else ""))
        if kernel is not None and is_used and end < ANY_M and _refuses(kernel, table, end - 1):
            # Predictions do not ask at every m, and large products have limits.
            sizes = range(start, end)
            found.append(
                (sizes[bisect_left(sizes, True, key=partial(_refuses, kernel, table))], "")
            )
    found = merged(found)
    return found if m_range is None else within(found, m_range, "")


def _refuses(kernel: Kernel, table: Table, m: int) -> bool:
    return kernel.refusal(replace(table.problem, m=table.like(m)), table.device) is not None


Used = TypeVar("Used")


def within(
    segments: Sequence[tuple[int, Used]], m_range: MRange, outside: Used
) -> list[tuple[int, Used]]:
    """The segments, with something else outside a range."""
    low, high = m_range
    starts = [start for start, _ in segments]
    first = segments[bisect_right(starts, low) - 1][1]
    inner = [(start, name) for start, name in segments if low < start <= high]
    return [(0, outside), (max(low, 1), first), *inner, (high + 1, outside)]


def runs(kernel: Kernel, table: Table) -> bool:
    """Whether the kernel, or its emulation, can run here."""
    if table.callable_here:
        return True
    try:
        return emulation_of(kernel) is not None
    except UnsupportedError:
        return False


def _why_plain(table: Table, sizes: Sequence[int]) -> str:
    """Why nothing is quantized at the largest m, where FP8 gains most."""
    if not sizes:
        return f"measured only outside the range (m={_words(table.measured_m)})"
    return f"at m={sizes[-1]} {_reasons(Choice(table, sizes[-1]))}"


def _why_unaligned(gemm: str, table: Table, judge: Judge) -> str:
    """Why nothing was chosen for unaligned rows that were not measured; "" for aligned ones."""
    if not table.padded or table.device not in dispatcher.snapshot().devices:
        return ""
    why = f"nothing was measured at {sizes_of(table.problem)}, {judge.regime}, and {UNALIGNED}"
    if judge.wide is None:
        return why
    n, k = reversed(judge.wide) if gemm == "grad_input" else judge.wide
    return f"{why}: mods.Pad, before it, makes them n={n} k={k}"


_SLOWER = re.compile(r"slower: ([0-9.]+) us")
NO_VERDICT = "no verdict in the report (Probe did not see it)"
OTHER_DTYPE = "the report judges products in "
EMULATED = "torch.emulated_"  # in names of kernels
_NOT_HERE = (
    "not installed", "reads no weight quantized ahead", "takes no float16", "emulates",
    "rows of n=",
)  # fmt: skip


def _reasons(choice: Choice) -> str:
    """The two reasons that tell most: of the fastest kernels, else errors, and others last.

    First come kernels that would be taken if Probe had replayed them.
    """
    pick = choice.pick
    if any(NO_VERDICT in why for _, why in pick.rejected):
        return NO_VERDICT
    if other := next((why for _, why in pick.rejected if OTHER_DTYPE in why), ""):
        return other[other.index(OTHER_DTYPE) :]
    us = {c.name: x[0].latency_us for c in choice.table.candidates if (x := c.time_at(choice.m))}

    def rank(rejected: tuple[str, str]) -> tuple[float, ...]:
        name, why = rejected
        if why.startswith("Probe ") and name in us:  # slower ones begin with their times
            return -1, 0, us[name]
        if slower := _SLOWER.match(why):
            return 0, "error" in why, float(slower[1])
        if any(words in why for words in _NOT_HERE):
            return 3, "not installed" in why
        return (1,) if " > " in why else (2,)

    reasons = [
        f"{name}: {why}"
        for name, why in sorted(pick.rejected, key=rank)
        if "another gains more" not in why
    ]
    real = [words for words in reasons if EMULATED not in words]  # others are slow on any GPU
    than = "" if pick.time is None else f" than {pick.name} ({pick.time.latency_us:.2f} us)"
    plain_us = math.inf if pick.time is None else pick.time.latency_us
    is_unjudged = any(
        why.startswith("Probe ") and us.get(name, math.inf) < plain_us
        for name, why in pick.rejected
    )
    if is_unjudged:
        return "; ".join([
            f"no kernel that Probe judged is better{than}, but one that it could not judge on this "
            "machine is faster",
            reasons[0],
            "probe.save(FILE) here, probe.load(FILE) and probe.report() on that GPU",
        ])  # fmt: skip
    return "; ".join([f"no kernel that quantizes is better{than}", *(real or reasons)[:2]])


def _words(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}..{sizes[-1]}"


def _grad_weight_route(
    n: int, k: int, judge: Judge, device: Device, output: Route, m_range: MRange | None,
    half: Format,
) -> Route:  # fmt: skip
    """The route of ``dW[n, k] = dY[m, n]^T X[m, k]``, from a table for each m."""
    gemm = "grad_weight"
    low, high = m_range or (1, ANY_M)
    judge = replace(judge, m_range=(n, n), is_of_one_m=True)  # the m of its product
    known = {*SAMPLES, *(m_range or ()), *(choice.m for choice in output.choices)}

    def measured(sizes: Iterable[int]) -> list[Choice]:
        problems = (grad_weight_case(m, n, k, half).problem for m in sizes if m % 16 == 0)
        found = (Choice(judge.table(problem, gemm, device), n) for problem in problems)
        return [choice for choice in found if choice.latency_us]

    choices = measured(sorted(m for m in known if low <= m <= high))
    if not choices:
        others = [choice.problem.k for choice in measured(sorted(known)) if m_range is not None]
        where = "was never measured"
        if judge.predicts and padded_problem(grad_weight_case(SAMPLES[0], n, k, half).problem):
            where += f", and {UNALIGNED}"
            where += ": mods.Pad, before it, aligns them" if judge.wide else ""
        if others:
            sizes = ", ".join(map(str, others))
            where = f"was measured at m={sizes}, not within m_range={low}..{high}"
        return Route(gemm, PLAIN, f"dW[{n}, {k}], whose product sums over m samples, {where}")
    names = {c.problem.k: _quantizing(c) for c in choices}
    segments: Segments = [(0, "")]
    for (m, name), (_, then) in pairwise([*names.items(), (ANY_M, "")]):
        if segments[-1][1] != name:
            segments.append((m, name))
        if name and name != then:  # unknown between two different choices
            segments.append((m + 1, ""))
    text = route_text(Granularity.NONE, segments, [(0, "")])
    fast = [m for m, name in names.items() if name]
    if fast:
        why = f"quantized at m={_words(fast)}"
        why += PREDICTED if any(_is_predicted(c.table) for c in choices) else ""
    else:
        why = f"at m={max(names)} {_reasons(choices[-1])}"
    return Route(gemm, text, why, tuple(choices))


def _is_predicted(table: Table) -> bool:
    """Whether times are those of the time model."""
    return any(c.is_predicted for c in table.candidates)


def _quantizing(choice: Choice) -> str:
    """Name of the chosen kernel if it quantizes, or ""."""
    kernel = choice.pick.candidate.kernel if choice.pick.candidate else None
    return "" if kernel is None or not kernel.quantizes or choice.is_miss else kernel.name
