"""What a snapshot says of a device, as flat tables: choices, times, errors, and what is held.

Choices are dispatch's own: each is what `lokakern.selection.dispatcher.Table.pick` says at a
problem that was timed, within a budget, judged on all realistic distributions.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lokakern.bench.report.coverage import Holdings
from lokakern.problems import baseline_name
from lokakern.progress import Progress
from lokakern.registry.register import KERNELS
from lokakern.registry.sharing.plausibility import least_us
from lokakern.selection import dispatcher
from lokakern.selection.table import LooseTable, Pick
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
    from lokakern.selection.candidates import Candidate, Memory

Row = dict[str, Any]

# E4M3 within none of them; scales of rows and groups; all E4M3; E5M2, too; scales of tensors.
BUDGETS = (0.03, 0.045, 0.06, 0.08, 0.12)
USUAL_BUDGET = 0.06
NO_BUDGET = "none"  # what `ErrorBudget` cannot say: only what is unquantized, where there is such
UNQUANTIZED = "unquantized"  # in the place of a language
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Survey:
    """Tables of rows with equal columns.

    Attributes:
        device: Whose.
        regime: Of all times.
        snapshot: `Snapshot.keys_digest`.
        budgets: Words for the limits on row error that choices were made within.
        ops: Of each op: how many problems, what its pictures show first, and `gain`, which is
            "speedup" where something in bfloat16 can be compared with, else "light".
        choices: Of each problem and budget: the kernel, its time, the least that is possible, that
            of bfloat16, and why there is no better answer (`note`).
        times: Of each problem and kernel: time and worst row error, and whether no other is better
            in both (`front`).
        errors: Of each op, arithmetic and distribution: the worst limits over all shapes.
        holdings: `lokakern.bench.report.coverage.Holding` of every op and suite.
    """

    device: Device
    regime: str
    snapshot: str
    budgets: tuple[str, ...]
    ops: list[Row]
    choices: list[Row]
    times: list[Row]
    errors: list[Row]
    holdings: list[Row]


def survey_of(
    facts: Snapshot,
    device: Device,
    budgets: Iterable[float] = BUDGETS,
    progress: Progress | None = None,
) -> Survey:
    """Everything that a report shows of a device, in its usual regime.

    Args:
        facts: What `lokakern.selection.dispatcher.snapshot` gives.
        device: One of `facts`.
        budgets: Limits on row error, beside none.
        progress: Told of every problem without m.

    Raises:
        ChoicesError: Answers are frozen.
        BudgetError: A budget is not a finite, non-negative number.
    """
    progress = progress or Progress()
    regime = dispatcher.default_regime(device)
    limits = {NO_BUDGET: None} | {f"{b:g}": ErrorBudget.of(b) for b in sorted({*budgets})}
    groups: dict[tuple[Problem, int], dict[Problem, None]] = defaultdict(dict)
    for cell in facts.timings_on(device, regime):
        place = (replace(cell.problem, m=0), alignment_of(cell.problem.m))
        groups[place][cell.problem] = None
    # Those with the same errors follow each other: a snapshot keeps what it read last.
    order = sorted(groups, key=lambda place: (place[0].n, place[0].k, str(place[0]), place[1]))
    tables: dict[tuple[Problem, int], LooseTable] = {}
    progress.begin("choosing", len(order))
    plain: dict[Problem, float] = {}
    memory: Memory = {}
    for place in order:
        problems = sorted(groups[place], key=lambda problem: problem.m)
        table = tables[place] = dispatcher.loose_table(problems[0], device, regime, memory)
        plain |= _baseline_times(table, problems)
        progress.step(str(place[0]))
    choices: list[Row] = []
    times: list[Row] = []
    for place in sorted(order, key=lambda place: (place[0].op, str(place[0]), place[1])):
        table = tables[place]
        within = {word: table.within(limit) for word, limit in limits.items()}
        for problem in sorted(groups[place], key=lambda problem: problem.m):
            row = _place_of(problem) | {"least_us": _us(least_us(problem, device, regime))}
            times += _times_of(row, table.candidates, problem.m)
            row["plain_us"] = _plain_us(problem, plain)
            for word, asked in within.items():
                choices.append(_choice(row, word, asked.pick(problem.m)))
    letters = _letters(choices, times)
    for row in itertools.chain(choices, times):
        letter = letters.get((row["op"], row["kernel"]), "-")
        row["key"] = f"{letter}  {row['kernel']}"
        row["hue"] = _hue(letter)
        row["letter"] = letter if row.get("answered", True) or letter == "-" else f"{letter}?"
    held = Holdings(facts, device, regime)
    return Survey(
        device=device,
        regime=regime,
        snapshot=facts.keys_digest,
        budgets=tuple(limits),
        ops=_ops(choices, times),
        choices=choices,
        times=times,
        errors=_errors(held, facts, device),
        holdings=[holding.as_row() for holding in (*held.of_ops(), *held.of_suites())],
    )


def form_of(problem: Problem) -> str:
    """All of a problem but its op and sizes, in words."""
    sizes = ("m=", "n=", "k=")
    return " ".join(word for word in str(problem).split()[1:] if not word.startswith(sizes))


def _place_of(problem: Problem) -> Row:
    n = problem.n if problem.b is not None else None
    return {"op": problem.op, "form": form_of(problem), "m": problem.m, "n": n, "k": problem.k}


def _us(value: float) -> float:
    return round(value, 2)  # as `explain` prints it


def _baseline_times(table: LooseTable, problems: Iterable[Problem]) -> dict[Problem, float]:
    base = next((c for c in table.candidates if c.name == table.baseline), None)
    if base is None:
        return {}
    return {p: base.times[p.m].latency_us for p in problems if p.m in base.times}


def _plain_us(problem: Problem, plain: dict[Problem, float]) -> float | None:
    """Time of the unquantized kernel at the problem, in microseconds, as `explain` compares it.

    Of quantized operands, which it does not take, that of the same product of bfloat16 ones, to
    bfloat16.
    """
    if baseline_name(problem) is None:
        if problem.op not in ("scaled_gemm", "gemm_norm") or problem.b is None:
            return None
        if problem.accumulate:  # into float32: nothing in bfloat16 does the same
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
    """In bfloat16, without the padding that only FP8 has."""
    form = Format.BFLOAT16
    size = form.dtype.itemsize
    return Operand(form, layout=operand.layout, alignment=alignment_of(contiguous * size))


def _choice(place: Row, budget: str, pick: Pick) -> Row:
    us = None if pick.time is None else _us(pick.time.latency_us)
    plain, least = place["plain_us"], place["least_us"]
    note = pick.note or (f"tied with {', '.join(pick.tied)}" if pick.tied else "")
    error = pick.candidate.errors.get("row_err") if pick.candidate else None
    return place | {
        "budget": budget,
        "kernel": pick.name or "no answer",
        "us": us,
        "speedup": None if us is None or plain is None else _short(plain / us),
        "light": None if us is None else _short(least / us),
        "row_err": None if error is None else _short(error),
        "answered": not pick.note,
        "note": note,
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _times_of(place: Row, candidates: Sequence[Candidate], m: int) -> list[Row]:
    rows = []
    for candidate in candidates:
        time = candidate.times.get(m)
        if time is not None:
            error = candidate.errors.get("row_err")
            rows.append(
                place
                | {
                    "kernel": candidate.name,
                    "kind": UNQUANTIZED if candidate.unquantized else _language(candidate.name),
                    "us": _us(time.latency_us),
                    "row_err": None if error is None else _short(error),
                    "state": time.freshness,
                }
            )
    known = [(row["us"], row["row_err"]) for row in rows if row["row_err"] is not None]
    for row in rows:
        here = (row["us"], row["row_err"])
        row["front"] = here[1] is not None and not any(
            us <= here[0] and error <= here[1] and (us, error) != here for us, error in known
        )
    return rows


def _language(name: str) -> str:
    """Of what multiplies: the last part of a composition."""
    kernel = KERNELS.get(name)
    if kernel is not None and kernel.parts:
        kernel = KERNELS.get(kernel.parts[-1])
    return "not registered" if kernel is None else kernel.language


def _letters(choices: Iterable[Row], times: Iterable[Row]) -> dict[tuple[str, str], str]:
    """A letter, or more, for each kernel of an op; the first for those chosen most often."""
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


def _hue(letter: str) -> int:
    """Which of ten colors; kernels in the same one differ in their letters."""
    return 0 if letter == "-" else (_LETTERS.index(letter[-1]) + 26 * (len(letter) - 1)) % 10


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
            }
        )
    return rows


def _errors(held: Holdings, facts: Snapshot, device: Device) -> list[Row]:
    """The worst over seeds, of kernels as they are now; of shapes the worst, and the median."""
    names = ("row_err", "row_p99", "mean_rel_err", "mean_shift")
    worst: dict[tuple[str, str, str], dict[Problem, list[float]]] = {}
    for problem, cell, word in held.errors():
        if word == "stale" or cell.status != "ok":
            continue
        if cell.parameters != facts.parameters_of(device.architecture, cell.distribution):
            continue
        key = (problem.op, _arithmetic(problem, cell.kernel), cell.distribution)
        found = [getattr(cell, f"{name}_upper") for name in names]
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
    """Formats, scales and sums, which decide an error."""
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
