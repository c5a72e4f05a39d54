"""The file of frozen choices: JSON, read as if a stranger had written it.

Its digest finds what was damaged. Against what was made up every name, number and size is checked,
and each kernel is asked whether it takes its problem: the worst that a file can do is choose
another kernel that is right.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lokakern.device import devices_here
from lokakern.errors import ChoicesError, LokakernError
from lokakern.problems import baseline_name
from lokakern.registry.ops import EPILOGUE_OPS, op_named
from lokakern.registry.register import KERNELS, NEEDS, Kernel, load_kernels
from lokakern.registry.schema.row_keys import device_from_row, problem_from_row, problem_row
from lokakern.selection.frozen.lookup import Choices, Key, Weight
from lokakern.selection.table import FrozenTable, Origin, Table
from lokakern.types import (
    REGIMES,
    Device,
    ErrorBudget,
    Format,
    Granularity,
    Problem,
    Rejected,
    alignment_of,
    norm_form,
)

FORMAT = "lokakern choices"
VERSION = 1
LARGEST_FILE_BYTES = 16 * 2**20  # 20 000 tables; a model has some hundred
MOST_BREAKPOINTS = 4096  # of a table; the shipped database makes 20 at most
LONGEST_TEXT = 1000
LARGEST_SIZE = 2**48  # of an axis
LARGEST_M = 2**24  # 16 million rows: a batch of 4096 of 4096 each
_HEX = re.compile(r"[0-9a-f]{64}")
_FIELDS = (
    "format", "version", "lokakern", "frozen_utc_ms", "device", "snapshot", "unverified",
    "kernels", "tables", "weights", "digest",
)  # fmt: skip
_TABLE_FIELDS = (
    "problem", "m_alignment", "budget", "distributions", "regime", "needs", "breakpoints",
    "winners", "misses",
)  # fmt: skip
_UNREADABLE = (ValueError, TypeError, KeyError, ArithmeticError, RecursionError, LokakernError)
_AGAIN = "write it again with lokakern.freeze"


def load(path: str | os.PathLike[str]) -> Choices:
    """Read a file of frozen choices.

    Raises:
        ChoicesError: It cannot be read, is none, is damaged, or was written for another device,
            by another version, or with other kernels.
    """
    shown = os.fspath(path)
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # a pipe may never end
            raise ChoicesError(f"choices {shown}: it is no file; {_AGAIN}")
        with Path(path).open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ChoicesError(
            f"choices {shown} cannot be read: {error}; write it with lokakern.freeze, or unset "
            "LOKAKERN_CHOICES"
        ) from None
    return parse(content, shown)


def parse(content: bytes, path: str) -> Choices:
    """Read what a file of frozen choices holds.

    Raises:
        ChoicesError: As `load`.
    """
    if len(content) > LARGEST_FILE_BYTES:
        raise ChoicesError(
            f"choices {path}: it has more than {LARGEST_FILE_BYTES >> 20} MiB; no model has so "
            f"many choices: {_AGAIN}"
        )
    try:
        whole = json.loads(content.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        _expect(type(whole) is dict and whole.get("format") == FORMAT, f"it is no {FORMAT!r}")
        version = whole.get("version")
        if type(version) is not int or version != VERSION:
            raise ChoicesError(
                f"choices {path}: its version is {_shown(version)}, and this lokakern reads "
                f"{VERSION}: {_AGAIN} here, or use lokakern {_shown(whole.get('lokakern'))}"
            )
        return _choices(whole, path)
    except ChoicesError:
        raise
    except _UNREADABLE as error:
        raise ChoicesError(f"choices {path}: {_words(error)}; {_AGAIN}") from None


def digest_of(whole: dict[str, Any]) -> str:
    """SHA-256, in hex, of all but the digest itself and when and by what it was written."""
    left_out = ("digest", "frozen_utc_ms", "lokakern")
    kept = {name: value for name, value in whole.items() if name not in left_out}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def rows_of(key: Key, table: Table) -> dict[str, Any]:
    """A table as the file has it."""
    problem = problem_row(key.problem)
    return {
        "problem": {name: value for name, value in problem.items() if name not in ("key", "m")},
        "m_alignment": key.m_alignment,
        "budget": None if key.budget is None else key.budget.limits,
        "distributions": list(key.distributions),
        "regime": key.regime,
        "needs": sorted(key.needs),
        "breakpoints": table.breakpoints,
        "winners": table.winners,
        "misses": table.misses,
    }


def weight_row(asked: Weight, form: Granularity) -> dict[str, Any]:
    """What was chosen for a weight, as the file has it."""
    return {
        **asked._asdict(),
        "format": str(asked.format),
        "budget": asked.budget.limits,
        "distributions": list(asked.distributions),
        "form": str(form),
    }


# --- what a file may say


class _WrongError(ValueError):
    """What is wrong with a file."""


def _words(error: BaseException) -> str:
    text = str(error) if isinstance(error, _WrongError) else f"it is damaged ({error})"
    return "".join(c if c.isprintable() else " " for c in text[:300])


def _expect(is_right: bool, otherwise: str) -> None:
    if not is_right:
        raise _WrongError(otherwise)


def _shown(value: Any) -> str:
    return repr(value)[:80]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    _expect(len(found) == len(pairs), "a name is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise _WrongError(f"it holds {name}")


def _row(value: Any, names: Iterable[str], what: str) -> dict[str, Any]:
    _expect(type(value) is dict, f"{what} is {_shown(value)}")
    _expect(value.keys() == set(names), f"fields of {what} are {_shown(sorted(value))}")
    found: dict[str, Any] = value
    return found


def _list(value: Any, what: str, most: int = 1 << 20) -> list[Any]:
    _expect(type(value) is list and len(value) <= most, f"{what} is {_shown(value)}")
    found: list[Any] = value
    return found


def _integer(value: Any, what: str, least: int, most: int) -> int:
    _expect(type(value) is int and least <= value <= most, f"{what} is {_shown(value)}")
    return int(value)


def _text(value: Any, what: str) -> str:
    is_right = type(value) is str and len(value) <= LONGEST_TEXT and value.isprintable()
    _expect(is_right, f"{what} is {_shown(value)}")
    return str(value)


def _texts(value: Any, what: str) -> tuple[str, ...]:
    return tuple(_text(x, what) for x in _list(value, what, 1000))


def _digest(value: Any, what: str) -> str:
    _expect(type(value) is str and bool(_HEX.fullmatch(value)), f"{what} is {_shown(value)}")
    return str(value)


def _choices(whole: dict[str, Any], path: str) -> Choices:
    _row(whole, _FIELDS, "the file")
    digest = digest_of(whole)
    _expect(whole["digest"] == digest, "it was changed since it was written")
    written = _integer(whole["frozen_utc_ms"], "frozen_utc_ms", 0, 1 << 45)
    unverified = _integer(whole["unverified"], "unverified", 0, 1 << 20)
    origin = Origin(path, written, _digest(whole["snapshot"], "snapshot"), unverified)
    software = _text(whole["lokakern"], "lokakern")
    device = _device(whole["device"])
    if device not in devices_here():
        here = ", ".join(sorted(_words_of(found) for found in devices_here()))
        raise ChoicesError(
            f"choices {path}: they are for {_words_of(device)}; here is {here}; freeze the choices "
            "of this device, too"
        )
    kernels = _kernels(whole["kernels"], path, software)
    tables: dict[Key, FrozenTable] = {}
    for row in _list(whole["tables"], "tables"):
        table = _table(row, device, kernels, origin)
        _expect(Key.of(table) not in tables, f"{table.problem} is there twice")
        tables[Key.of(table)] = table
    forms: dict[Weight, Granularity] = {}
    for row in _list(whole["weights"], "weights"):
        weight, form = _weight(row)
        _expect(weight not in forms, f"{weight} is there twice")
        forms[weight] = form
    return Choices(origin, digest, device, tables, forms)


def _device(value: Any) -> Device:
    row = _row(value, [field.name for field in fields(Device)], "device")
    for name in ("compute_units", "memory_gib"):
        _integer(row[name], name, 0, 1 << 32)
    for name in ("vendor", "product", "architecture", "partition"):
        _text(row[name], name)
    return device_from_row(row)


def _words_of(device: Device) -> str:
    """All that two devices of one name may differ in."""
    more = "" if device.partition == "none" else f", {device.partition}"
    return f"{device.product!r} ({device.compute_units} units, {device.memory_gib} GiB{more})"


def _kernels(value: Any, path: str, software: str) -> dict[str, Kernel]:
    """The kernels that a file names, all as they were then."""
    _expect(type(value) is dict, f"kernels is {_shown(value)}")
    unavailable = load_kernels()
    found: dict[str, Kernel] = {}
    wrong = []
    for name, then in value.items():
        _text(name, "name of a kernel")
        _digest(then, f"digest of {name!r}")
        kernel = KERNELS.get(name)
        now = "" if kernel is None else _digest_here(kernel)
        if kernel is None:
            wrong.append(f"{name} is not registered here")
        elif now != then:
            wrong.append(f"{name} was {then[:12]} and is {now[:12] or 'not readable'} here")
        else:
            found[name] = kernel
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        absent = "".join(f"; {module}: {why}" for module, why in list(unavailable.items())[:3])
        raise ChoicesError(
            f"choices {path}: kernels are not those that were frozen: {', '.join(wrong[:3])}{more}"
            f"{absent}; install what it was frozen with (lokakern {software}, and libraries of the "
            "same versions), or freeze again"
        )
    return found


def _digest_here(kernel: Kernel) -> str:
    try:
        return kernel.digest
    except (OSError, ValueError, SyntaxError):
        return ""


def _budget(value: Any) -> ErrorBudget:
    names = {field.name for field in fields(ErrorBudget) if field.init}
    _expect(type(value) is dict and names.issuperset(value), f"budget is {_shown(value)}")
    for limit in value.values():
        _expect(type(limit) in (int, float) and math.isfinite(limit), f"budget is {_shown(value)}")
    return ErrorBudget(**value)


def _distributions(value: Any) -> tuple[str, ...]:
    names = _texts(value, "distributions")
    _expect(bool(names), "distributions are none")
    return names


def _problem(value: Any, m: int) -> Problem:
    names = [field.name for field in fields(Problem) if field.name != "m"]
    row = _row(value, names, "problem")
    for name in names:
        if name in ("n", "k"):
            _integer(row[name], name, 0, LARGEST_SIZE)
        elif name == "batch":
            _integer(row[name], name, 1, LARGEST_SIZE)
        elif name in ("prepared", "out_strided", "accumulate"):
            _integer(row[name], name, 0, 1)
        else:
            _text(row[name], name)
    problem = problem_from_row({**row, "m": m})
    again = problem_row(problem)
    _expect(all(again[name] == row[name] for name in names), f"problem is {_shown(row)}")
    _expect(len(op_named(problem.op).axes) == len(problem.shape), f"{problem} is none of its op")
    if problem.op in EPILOGUE_OPS:
        norm_form(problem.epilogue)
    return problem


def _table(value: Any, device: Device, kernels: dict[str, Kernel], origin: Origin) -> FrozenTable:
    row = _row(value, _TABLE_FIELDS, "a table")
    unit = _integer(row["m_alignment"], "m_alignment", 1, 16)
    _expect(alignment_of(unit) == unit, f"m_alignment is {unit}")
    problem = _problem(row["problem"], unit)
    regime, needs = _text(row["regime"], "regime"), _texts(row["needs"], "needs")
    _expect(regime in REGIMES, f"regime is {regime!r}")
    _expect(NEEDS.keys() >= set(needs), f"needs are {needs}")
    _expect(sorted(set(needs)) == list(needs), f"needs are {needs}")
    starts = _list(row["breakpoints"], "breakpoints", MOST_BREAKPOINTS)
    for start in starts:
        _integer(start, "a breakpoint", 0, LARGEST_SIZE)
    _expect(starts[:1] == [0], f"breakpoints are {_shown(starts)}")
    _expect(starts == sorted(set(starts)), f"breakpoints are {_shown(starts)}")
    winners = _list(row["winners"], "winners", MOST_BREAKPOINTS)
    misses = _list(row["misses"], "misses", MOST_BREAKPOINTS)
    _expect(len(winners) == len(misses) == len(starts), f"{problem} has not a winner each")
    for winner, miss in zip(winners, misses, strict=True):
        known = type(winner) is str and winner in kernels
        _expect(type(miss) is bool, f"a miss is {_shown(miss)}")
        _expect(known or (winner == "" and miss), f"a winner is {_shown(winner)}")
    base = baseline_name(problem)
    table = FrozenTable(
        problem=problem, device=device,
        budget=None if row["budget"] is None else _budget(row["budget"]),
        distributions=_distributions(row["distributions"]), regime=regime, candidates=(),
        rejected=(), baseline=base, baseline_kernel=KERNELS.get(base) if base else None,
        callable_here=True, m_alignment=unit, needs=frozenset(needs), breakpoints=starts,
        winners=winners, kernels=[kernels[name] if name else None for name in winners],
        misses=misses, origin=origin,
    )  # fmt: skip
    _check_kernels(table)
    return table


def _check_kernels(table: FrozenTable) -> None:
    """Launchers check nothing: each kernel must take its problem, from its first m to its last.

    Of what comes after all that was measured the last is `LARGEST_M`, or its first.
    """
    last = max(table.breakpoints[-1], LARGEST_M)
    ends = [*(start - 1 for start in table.breakpoints[1:]), last]
    for kernel, *places in zip(table.kernels, table.breakpoints, ends, strict=True):
        if kernel is None:
            continue
        reason = kernel.lacks(table.needs)
        for m in places:
            try:
                answer = kernel.supports(replace(table.problem, m=table.like(m)), table.device)
            except Exception as error:  # of a problem that nobody can pose
                raise _WrongError(f"{table.problem}: {type(error).__name__}: {error}") from None
            reason = reason or (answer.reason if isinstance(answer, Rejected) else None)
        _expect(reason is None, f"{kernel.name} does not take {table.problem}: {reason}")


def _weight(value: Any) -> tuple[Weight, Granularity]:
    row = _row(value, (*Weight._fields, "form"), "a weight")
    least = _integer(row["least_m"], "least_m", 1, LARGEST_SIZE)
    form = Format(_text(row["format"], "format of a weight"))
    scales = Granularity(_text(row["form"], "form of a weight"))
    _expect(not form.is_fp8, f"format of a weight is {form.value!r}")
    possible = (Granularity.NONE, Granularity.TENSOR, Granularity.ROW, Granularity.BLOCK)
    _expect(scales in possible, f"form of a weight is {scales.value!r}")
    weight = Weight(
        _integer(row["n"], "n", 0, LARGEST_SIZE),
        _integer(row["k"], "k", 0, LARGEST_SIZE),
        form,
        _budget(row["budget"]),
        _distributions(row["distributions"]),
        least,
        _integer(row["largest_m"], "largest_m", least, LARGEST_SIZE),
    )
    return weight, scales
