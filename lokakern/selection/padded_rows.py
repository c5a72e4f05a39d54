"""The time of bfloat16, or float16, with padded rows, where no such kernel was measured.

Where n or k is no multiple of 8, cuBLAS reads unaligned rows: it may take 5 times as long as with
zeros added, which a user, or torch.compile, would add. A product of the padded sizes is a measured
fact of another problem. Added to it is the time to copy what is padded, at the rate of the fastest
quantizer measured on the same rows; not in a compiled model, whose compiler writes padded rows in
the first place, but may copy the bias over the output (`copies_bias`). Launches are not counted, so
that the time is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lokakern.problems import PADDED, baseline_name, make_problem, padded_sizes
from lokakern.registry import float16
from lokakern.registry.register import KERNELS, fp8_format
from lokakern.selection.candidates import Candidate, Evidence, Time, candidate_of
from lokakern.types import Format, Granularity, Layout, Operand, Problem, alignment_of

_HALVES = Format.BFLOAT16, Format.FLOAT16


def padded_problem(problem: Problem) -> Problem | None:
    """The problem with padded sizes; None if a kernel that pads has nothing to do."""
    if problem.op != "gemm" or problem.batch != 1 or problem.a.format not in _HALVES:
        return None
    m, n, k = padded_sizes(problem)
    if (m, n, k) == (problem.m, problem.n, problem.k) or problem.b is None:
        return None
    a, b = (replace(x, alignment=16) for x in (problem.a, problem.b))
    return replace(problem, m=m, n=n, k=k, a=a, b=b, out_strided=False)


def with_padded_rows(
    problem: Problem, candidates: Sequence[Candidate], evidence: Evidence, timed: str, *,
    is_compiled: bool, has_bias: bool,
) -> tuple[list[Candidate], str]:  # fmt: skip
    """The candidates and the kernel that pads, with an estimate of its time if it has none.

    Args:
        problem: The problem, at any m.
        candidates: The measured ones.
        evidence: The rows that count.
        timed: The regime of times.
        is_compiled: Whether a compiler pads activations at no cost. A measured time, which contains
            the cost, is then replaced, or dropped if the padded sizes were not measured.
        has_bias: Whether a bias is added, in the problem or behind it.

    Returns:
        The candidates, and the padded sizes in words; "" if rows are aligned.
    """
    wide = padded_problem(problem)
    found = list(candidates)
    if wide is None or not evidence.device.is_gpu:
        return found, ""
    words = f"m={wide.m} " if wide.m != problem.m else ""
    words += f"n={wide.n} k={wide.k}"
    base = next((c for c in found if c.name == baseline_name(problem)), None)
    own = next((c for c in found if c.name == PADDED), None)
    like = base or own
    if like is None or (own is not None and not is_compiled):
        return found, words
    at_wide = _measured(wide, evidence, timed, problem.k)
    if at_wide is None:
        return [c for c in found if c is not own], words
    rates = {} if is_compiled else _rates(problem, evidence, timed)
    us_per_byte = 0.0
    if is_compiled and has_bias and copies_bias(wide.n, problem.n):
        us_per_byte = evidence.facts.least_us_per_byte(evidence.device, timed)
    times = {}
    for m in sorted({m for c in found for m in c.times}):
        here = replace(problem, m=m)
        sizes = padded_sizes(here)
        time = at_wide.time_at(sizes[0])
        if time is not None:
            copied = bytes_copied(here) / rates[m] if m in rates else 0.0
            copied += sizes[0] * wide.n * wide.a.format.dtype.itemsize * us_per_byte
            times[m] = replace(time[0], latency_us=time[0].latency_us + copied)
    if not times:
        return [c for c in found if c is not own], words
    how = f"of {at_wide.name} at {words}"
    if any(m in rates for m in times):
        how += ", and of copies at the rate of a quantizer"
    if us_per_byte:
        how += ", and of a copy of the bias over the output"
    estimate = replace(
        like, name=PADDED, kernel=KERNELS[PADDED], times=times, failed={}, estimated=how,
        failed_here=frozenset(), has_unverified=at_wide.has_unverified, set_aside=(),
    )  # fmt: skip
    return [c for c in found if c is not own] + [estimate], words


def _measured(wide: Problem, evidence: Evidence, timed: str, k: int) -> Candidate | None:
    """The unquantized kernel at the padded sizes; a bias and a prepared weight change no time.

    Nor does float16, where it was not timed. A vector (``k`` of 1) is contiguous along both axes:
    its padded form has either layout.
    """
    from lokakern.registry.schema.row_keys import family_key

    name = baseline_name(wide)
    assert name is not None and wide.b is not None  # of a GEMM
    layouts = (wide.b.layout,) if k > 1 else (Layout.COLUMN, Layout.ROW)
    plain = [
        replace(wide, b=Operand(wide.a.format, layout=layout), prepared=False) for layout in layouts
    ]
    forms = [form for x in (wide, *plain) for form in (x, replace(x, epilogue="none"))]
    if float16.is_in(wide):
        forms += [float16.as_bfloat16(form) for form in forms]
    for asked in forms:
        rows = evidence.facts.timing_cells(evidence.device, family_key(asked), timed)
        cells = [cell for cell in rows if cell.kernel.name == name]
        found = candidate_of(name, cells, asked, evidence) if cells else ""
        if isinstance(found, Candidate):
            return found
    return None


def _rates(problem: Problem, evidence: Evidence, timed: str) -> dict[int, float]:
    """Bytes per microsecond of the fastest rowwise quantizer of a, by m."""
    from lokakern.registry.schema.row_keys import family_key

    a = Operand(problem.a.format, Granularity.NONE, Layout.ROW, alignment_of(2 * problem.k))
    fp8 = fp8_format(evidence.device)
    asked = make_problem("quantize", (problem.m, problem.k), a=a, out_format=fp8)
    cells = evidence.facts.timing_cells(evidence.device, family_key(asked), timed)
    if not cells and float16.is_in(asked):
        asked = float16.as_bfloat16(asked)
        cells = evidence.facts.timing_cells(evidence.device, family_key(asked), timed)
    rates: dict[int, float] = {}
    for name in {cell.kernel.name for cell in cells}:
        mine = [cell for cell in cells if cell.kernel.name == name]
        found = candidate_of(name, mine, asked, evidence)
        times: dict[int, Time] = found.times if isinstance(found, Candidate) else {}
        for m, time in times.items():
            rate = replace(asked, m=m).bytes_moved / time.latency_us
            rates[m] = max(rate, rates.get(m, 0.0))
    return rates


def copies_bias(n: int, columns: int) -> bool:
    """Whether torch.compile copies a bias over an output that it pads to n columns.

    Inductor separates rows of more than 1024 columns by multiples of 64, and cuBLAS adds a bias
    itself to outputs without gaps only. The copy takes 23 us at 8192 x 1677 on an H200.
    """
    return n != columns and n > 1024 and n % 64 != 0


def bytes_copied(problem: Problem) -> int:
    """Bytes read and written to pad a and an unprepared b, and to copy the output."""
    m, n, k = problem.m, problem.n, problem.k
    wide_m, wide_n, wide_k = padded_sizes(problem)
    pairs = [(m * k, wide_m * wide_k), (m * n, wide_m * wide_n)]
    if not problem.prepared:
        pairs.append((k * n, wide_k * wide_n))
    item = problem.a.format.dtype.itemsize
    return sum(item * (few + many) for few, many in pairs if few != many)
