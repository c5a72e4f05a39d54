"""A snapshot's data on a device as flat tables: choices, times, errors and coverage.

Choices are those of dispatch (`lokakern.selection.dispatcher.Table.pick`) at every timed problem
and budget, by errors on all realistic distributions.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lokakern.bench.report.coverage import Holdings
from lokakern.problems import baseline_name
from lokakern.progress import Progress
from lokakern.registry.register import KERNELS
from lokakern.registry.sharing.plausibility import least_us
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of
from lokakern.selection.table import LooseTable, Pick, Undecided
from lokakern.types import (
    Device,
    ErrorBudget,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    alignment_of,
)

if TYPE_CHECKING:
    from lokakern.registry.snapshot.snapshot import Snapshot
    from lokakern.selection.candidates import Candidate
    from lokakern.selection.prediction.forecast import Prediction

Row = dict[str, Any]

# They admit: no E4M3; rowwise and groupwise scaling; all E4M3; E5M2; tensorwise scaling.
BUDGETS = (0.03, 0.045, 0.06, 0.08, 0.12)
USUAL_BUDGET = 0.06
NO_BUDGET = "none"  # not an `ErrorBudget`: the unquantized kernel where an op has one
UNQUANTIZED = "unquantized"  # instead of a language
# Answers: of a time at this m; of times at the m around; of padded sizes; of the time model; of an
# unquantized kernel, as errors of a faster one are not all measured; none within the budget.
MEASURED, INTERPOLATED, ESTIMATED = "measured", "interpolated", "estimated"
PREDICTED, UNDECIDED, NO_ANSWER = "predicted", "undecided", "none"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Survey:
    """Tables of rows with equal columns.

    Attributes:
        device: The device.
        regime: The regime of all times.
        snapshot: `Snapshot.digest`.
        totals: `lokakern.bench.report.coverage.Holdings.totals`, as `list device` prints them.
        budgets: Budgets on the row error, as words.
        ops: For each op: number of problems, initial selection of its pictures, whether a choice is
            `undecided` or has no time at its m (`inexact`), and `gain`: "speedup" if there is an
            unquantized baseline, else "light".
        choices: For each problem and budget: the kernel, its time, the least possible time, the
            baseline's time, what the time is (`answer`), why there is no better answer or no gain
            (`note`), and the quantizing kernel that may be one, as its error is unknown
            (`undecided`).
        predicted: The same by the time model, where nothing was measured, see `_gaps`.
        times: For each problem and kernel: time (the median over rows), worst row error, and
            whether it is on the Pareto front of both (`front`).
        errors: For each op, arithmetic and distribution: the worst bounds over all shapes.
        holdings: `lokakern.bench.report.coverage.Holding` of every op and suite.
    """

    device: Device
    regime: str
    snapshot: str
    totals: dict[str, str]
    budgets: tuple[str, ...]
    ops: list[Row]
    choices: list[Row]
    predicted: list[Row]
    times: list[Row]
    errors: list[Row]
    holdings: list[Row]

    def undecided_words(self, budget: str) -> str:
        """At how many problems missing errors may hide a faster choice; "" if at none."""
        count = sum(bool(row["undecided"]) for row in self.choices if row["budget"] == budget)
        if not count:
            return ""
        return (
            f"a quantizing kernel is faster than the unquantized one chosen at {count} "
            f"problem{'s' * (count > 1)} within {budget}, but its error is not wholly measured "
            "(notes name the kernel and what is missing): sweep them with --errors needed"
        )


def survey_of(
    facts: Snapshot,
    device: Device,
    budgets: Iterable[float] = BUDGETS,
    progress: Progress | None = None,
) -> Survey:
    """Collect the data of a report on a device, in its default regime.

    Args:
        facts: The result of `lokakern.selection.dispatcher.snapshot`.
        device: A device of `facts`.
        budgets: Limits on the row error, in addition to none.
        progress: Reports every group of problems that differ in m only.

    Raises:
        ChoicesError: Choices are frozen.
        BudgetError: A budget is not a finite, non-negative number.
    """
    progress = progress or Progress()
    regime = dispatcher.default_regime(device)
    limits = {NO_BUDGET: None} | {f"{b:g}": budget_of(b) for b in sorted({*budgets})}
    groups = _groups(cell.problem for cell in facts.timings_on(device, regime))
    # Problems with the same errors are adjacent: a snapshot caches its last read.
    order = sorted(groups, key=lambda place: (place[0].n, place[0].k, str(place[0]), place[1]))
    tables: dict[tuple[Problem, int], LooseTable] = {}
    progress.begin("choosing", len(order))
    plain: dict[Problem, float] = {}
    for place in order:
        problems = groups[place]
        table = tables[place] = dispatcher.loose_table(problems[0], device, regime)
        plain |= _baseline_times(table, problems)
        progress.step(str(place[0]))
    choices: list[Row] = []
    times: list[Row] = []
    for place in sorted(order, key=lambda place: (place[0].op, str(place[0]), place[1])):
        table = tables[place]
        within = {word: table.within(limit) for word, limit in limits.items()}
        for problem in groups[place]:
            row = _place_of(problem) | {"least_us": _us(least_us(problem, device, regime))}
            times += _times_of(row, table.candidates, problem.m)
            row["plain_us"] = _plain_us(problem, plain)
            for word, asked in within.items():
                pick = asked.pick(problem.m)
                found = _choice(row, word, pick, asked.undecided(problem.m, pick))
                if found["us"] is not None and found["plain_us"] is None:
                    found["note"] = _joined(found["note"], _why_no_gain(problem, table.baseline))
                choices.append(found)
    measured = [problem for found in groups.values() for problem in found]
    predicted = _predicted(measured, device, regime, limits, plain, progress)
    letters = _letters(choices, times)
    for row in itertools.chain(choices, predicted, times):
        letter = letters.get((row["op"], row["kernel"]), "-")
        row["letter"] = letter if row.get("answered", True) or letter == "-" else f"{letter}?"
    held = Holdings(facts, device, regime)
    return Survey(
        device=device,
        regime=regime,
        snapshot=facts.digest,
        totals=held.totals(),
        budgets=tuple(limits),
        ops=_ops(choices, times),
        choices=choices,
        predicted=predicted,
        times=times,
        errors=_errors(held, facts, device),
        holdings=held.rows(),
    )


def _groups(problems: Iterable[Problem]) -> dict[tuple[Problem, int], list[Problem]]:
    """Problems that one table answers: those that differ in m only, equally aligned."""
    groups: dict[tuple[Problem, int], dict[Problem, None]] = defaultdict(dict)
    for problem in problems:
        groups[replace(problem, m=0), alignment_of(problem.m)][problem] = None
    return {place: sorted(found, key=lambda problem: problem.m) for place, found in groups.items()}


def _gaps(measured: Iterable[Problem]) -> list[Problem]:
    """Problems without times between those of maps: at sizes that two or more times have."""
    maps: dict[Problem, dict[tuple[int, int], Problem]] = defaultdict(dict)
    for p in measured:
        is_product = p.b is not None
        place = (p.n, p.k) if is_product else (p.m, p.k)
        maps[replace(p, m=p.m if is_product else 0, n=0, k=0)][place] = p
    gaps = []
    for there in maps.values():
        xs, ks = (
            sorted(size for size, count in Counter(sizes).items() if count > 1)
            for sizes in zip(*there, strict=True)
        )
        some = next(iter(there.values()))
        gaps += [
            replace(some, n=x, k=k) if some.b is not None else replace(some, m=x, k=k)
            for x in xs
            for k in ks
            if (x, k) not in there
        ]
    return gaps


def _predicted(
    measured: Sequence[Problem],
    device: Device,
    regime: str,
    limits: Mapping[str, ErrorBudget | None],
    plain: dict[Problem, float],
    progress: Progress,
) -> list[Row]:
    """Choices by predicted times in the gaps of maps."""
    if dispatcher.model_of(device) is None:
        return []
    groups = _groups(_gaps(measured))
    rows: list[Row] = []
    progress.begin("predicting", len(groups))
    for place in sorted(groups, key=lambda place: (place[0].n, place[0].k, str(place[0]))):
        table = dispatcher.loose_table(groups[place][0], device, regime, predicts=True)
        progress.step(str(place[0]))
        within = {word: table.within(limit) for word, limit in limits.items()}
        if table.forecast is None:
            continue
        for problem in groups[place]:
            row = _place_of(problem) | {"least_us": _us(least_us(problem, device, regime))}
            for word, asked in within.items():
                if problem.op == "gemm" and asked.budget is None:
                    continue  # dispatch does not predict what it does not choose
                pick = asked.pick(problem.m)
                # A prediction from another GPU type chooses nothing.
                if pick.prediction is not None and not pick.prediction.transferred_from:
                    rows.append(_prediction(row, word, pick, pick.prediction, problem, plain))
    return rows


def _prediction(
    place: Row, budget: str, pick: Pick, found: Prediction, problem: Problem,
    plain: dict[Problem, float],
) -> Row:  # fmt: skip
    has_baseline = baseline_name(problem) is not None
    plain_us = _us(found.plain_us) if has_baseline else _plain_us(problem, plain)
    us = _us(found.latency_us)
    error = pick.candidate.errors.get("row_err") if pick.candidate else None
    return place | {
        "plain_us": plain_us,
        "budget": budget,
        "kernel": pick.name,
        "us": us,
        "speedup": _short(plain_us and plain_us / us),
        "light": _short(place["least_us"] / us),
        "row_err": _short(error),
        "answered": True,
        "answer": PREDICTED,
        "undecided": "",
        "note": f"predicted, not measured: {found}",
    }


def form_of(problem: Problem) -> str:
    """A problem in words without its op and sizes."""
    sizes = ("m=", "n=", "k=")
    return " ".join(word for word in str(problem).split()[1:] if not word.startswith(sizes))


def _place_of(problem: Problem) -> Row:
    n = problem.n if problem.b is not None else None
    return {"op": problem.op, "form": form_of(problem), "m": problem.m, "n": n, "k": problem.k}


def _us(value: float) -> float:
    return round(value, 2)  # as `explain` prints it


def _baseline_times(table: LooseTable, problems: Iterable[Problem]) -> dict[Problem, float]:
    times = {p: table.plain_at(p.m) for p in problems if table.has_baseline_at(p.m)}
    return {p: time.latency_us for p, time in times.items() if time is not None}


def _plain_us(problem: Problem, plain: dict[Problem, float]) -> float | None:
    """Time of the fastest unquantized kernel at the problem in microseconds, as in `explain`.

    For quantized operands it is the time of the same product in bfloat16.
    """
    if baseline_name(problem) is None:
        if problem.op not in ("scaled_gemm", "gemm_norm") or problem.b is None:
            return None
        if problem.accumulate:  # into float32, which has no counterpart in bfloat16
            return None
        k = problem.k
        problem = replace(
            problem,
            op="gemm" if problem.op == "scaled_gemm" else problem.op,
            a=_unquantized(problem.a, k if problem.a.layout == Layout.ROW else problem.m),
            b=_unquantized(problem.b, k if problem.b.layout == Layout.COLUMN else problem.n),
            out_format=Format.BFLOAT16,
            out_granularity=Granularity.NONE,
        )
    found = plain.get(problem)
    return None if found is None else _us(found)


def _unquantized(operand: Operand, contiguous: int) -> Operand:
    """The operand in bfloat16, without the padding of FP8."""
    form = Format.BFLOAT16
    size = form.dtype.itemsize
    return Operand(form, layout=operand.layout, alignment=alignment_of(contiguous * size))


def _choice(place: Row, budget: str, pick: Pick, undecided: Undecided | None) -> Row:
    us = None if pick.time is None else _us(pick.time.latency_us)
    plain, least = place["plain_us"], place["least_us"]
    note = pick.note or (f"tied with {', '.join(pick.tied)}" if pick.tied else "")
    if pick.time is not None and pick.time.freshness == "stale":
        note = _joined(note, "a stale time")
    if undecided is not None:
        note = _joined(note, f"undecided: {undecided}")
    error = pick.candidate.errors.get("row_err") if pick.candidate else None
    return place | {
        "budget": budget,
        "kernel": pick.name or "no answer",
        "us": us,
        "speedup": _short(us and plain and plain / us),
        "light": _short(us and least / us),
        "row_err": _short(error),
        "answered": not pick.is_miss,
        "answer": NO_ANSWER if pick.is_miss else UNDECIDED if undecided else _kind_of(pick),
        "undecided": undecided.name if undecided else "",
        "note": note,
    }


def _joined(*words: str) -> str:
    return "; ".join(filter(None, words))


def _kind_of(pick: Pick) -> str:
    """What the time of a choice is, as `explain` says."""
    if pick.candidate is not None and pick.candidate.estimated:
        return ESTIMATED
    return INTERPOLATED if pick.interpolated else MEASURED


def _why_no_gain(problem: Problem, baseline: str | None) -> str:
    """Why a problem has no time of an unquantized kernel; "" for ops without one."""
    if baseline is not None:
        return f"no gain is known: {baseline} was not timed at m={problem.m}"
    if problem.b is None:
        return ""
    if problem.accumulate:
        return "no gain: sums into float32 have no counterpart in bfloat16"
    return "no gain is known: the product of bfloat16 operands was not timed"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _times_of(place: Row, candidates: Sequence[Candidate], m: int) -> list[Row]:
    rows = [
        place
        | {
            "kernel": candidate.name,
            "kind": UNQUANTIZED if candidate.unquantized else _language(candidate.name),
            "us": _us(time.latency_us),
            "row_err": _short(candidate.errors.get("row_err")),
            "state": time.freshness,
        }
        for candidate in candidates
        if (time := candidate.times.get(m)) is not None
    ]
    known = [(row["us"], row["row_err"]) for row in rows if row["row_err"] is not None]
    for row in rows:
        here = (row["us"], row["row_err"])
        row["front"] = here[1] is not None and not any(
            us <= here[0] and error <= here[1] and (us, error) != here for us, error in known
        )
    return rows


def _language(name: str) -> str:
    """Language of the product, which is the last part of a composition."""
    kernel = KERNELS.get(name)
    if kernel is not None and kernel.parts:
        kernel = KERNELS.get(kernel.parts[-1])
    return "not registered" if kernel is None else kernel.language


def _letters(choices: Iterable[Row], times: Iterable[Row]) -> dict[tuple[str, str], str]:
    """Letters for the kernels of each op, in order of how often they are chosen."""
    won = Counter((row["op"], row["kernel"]) for row in choices if row["us"] is not None)
    timed = Counter((row["op"], row["kernel"]) for row in times)
    letters: dict[tuple[str, str], str] = {}
    count: Counter[str] = Counter()
    for op, name in sorted(won | timed, key=lambda key: (-won[key], -timed[key], key)):
        number = count[op]
        count[op] += 1
        ahead = _LETTERS[number // 26 - 1] if number >= 26 else ""
        letters[op, name] = ahead + _LETTERS[number % 26]
    return letters


def _ops(choices: Sequence[Row], times: Sequence[Row]) -> list[Row]:
    rows = []
    for op in sorted({row["op"] for row in choices}):
        here = [row for row in choices if row["op"] == op]
        forms = Counter(row["form"] for row in here)
        often = [form for form, count in forms.items() if 2 * count >= max(forms.values())]
        form = min(often, key=lambda form: (len(form), form))
        answered = Counter(row["budget"] for row in here if row["answered"])
        usual = f"{USUAL_BUDGET:g}"
        enough = usual in answered and 2 * answered[usual] >= answered[NO_BUDGET]
        m = Counter(row["m"] for row in here if row["form"] == form)
        most = max(m, key=lambda each: (m[each], -abs(each - 8192)))
        timed = [row for row in times if (row["op"], row["form"]) == (op, form)]
        known = Counter(
            (row["m"], row["n"], row["k"]) for row in timed if row["row_err"] is not None
        ) or Counter((row["m"], row["n"], row["k"]) for row in timed)
        at = max(known, key=lambda place: (known[place], place[0] == most, str(place)))
        rows.append(
            {
                "op": op,
                "problems": len({(r["form"], r["m"], r["n"], r["k"]) for r in here}),
                "gain": "speedup" if any(r["speedup"] is not None for r in here) else "light",
                "axes": ["n", "k"] if here[0]["n"] is not None else ["m", "k"],
                "form": form,
                "m": most,
                "budget": usual if enough else NO_BUDGET,
                "shape": list(at),
                "undecided": any(r["undecided"] for r in here),
                "inexact": any(r["answer"] in (INTERPOLATED, ESTIMATED) for r in here),
            }
        )
    return rows


def _errors(held: Holdings, facts: Snapshot, device: Device) -> list[Row]:
    """Errors of current kernels, worst over seeds; the worst and the median of all shapes."""
    names = ("row_err", "row_p99", "mean_rel_err", "mean_shift")
    worst: dict[tuple[str, str, str], dict[Problem, list[float]]] = {}
    for head, word in held.errors:
        if word in ("stale", "older") or head.status != "ok":
            continue
        name, parameters = head.distribution.name, head.distribution.parameters
        if parameters != facts.parameters_of(device.architecture, name):
            continue
        problem = facts.problem(head.problem)
        key = (problem.op, _arithmetic(problem, head.kernel), name)
        found = [getattr(head, f"{metric}_upper") for metric in names]
        here = worst.setdefault(key, {})
        here[problem] = [*map(max, here.get(problem, found), found)]
    return [
        {"op": op, "arithmetic": arithmetic, "distribution": distribution, "shapes": len(found)}
        | {name: _short(max(errors)) for name, errors in zip(names, columns, strict=True)}
        | {"typical_row_err": _short(statistics.median(columns[0]))}
        for (op, arithmetic, distribution), found in sorted(worst.items())
        for columns in [[*zip(*found.values(), strict=True)]]
    ]


def _arithmetic(problem: Problem, kernel: Any) -> str:
    """The formats, scales and accumulation that determine an error."""
    words = []
    if problem.a.format.is_fp8 and problem.b is not None:
        words.append(f"{problem.a.format} x {problem.b.format},")
    if kernel.granularity == Granularity.NONE:
        words.append(UNQUANTIZED)
    elif problem.b is None:
        words.append(kernel.granularity)
    else:
        words.append(f"{kernel.granularity} x {kernel.b_granularity}")
    if kernel.accumulation not in ("none", "float32"):
        words[-1] += f", {kernel.accumulation}"
    if problem.epilogue != "none":
        words[-1] += f", then {problem.epilogue}"
    if problem.out_format is not Format.BFLOAT16:
        words[-1] += f", to {problem.out_format}"
    return " ".join(words)
