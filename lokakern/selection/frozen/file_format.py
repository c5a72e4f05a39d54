"""The file of frozen choices: JSON, validated as untrusted input.

The digest detects damage. Against forged content, msgspec checks types, bounds and field names, and
every kernel is asked whether it supports its problem: the worst that a file can do is choose
another correct kernel. Kernels of answers (`lokakern.selection.frozen.answers`) are asked by who
reads these, when they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, ValidationError, convert, structs, to_builtins

from lokakern.device import devices_here
from lokakern.errors import ChoicesError, LokakernError
from lokakern.registry.ops import EPILOGUE_OPS, op_named
from lokakern.registry.register import KERNELS, NEEDS, Kernel, load_kernels
from lokakern.registry.schema.row_keys import from_row, row_of
from lokakern.selection.frozen.answers import LARGEST_M
from lokakern.selection.frozen.lookup import Choices, Key, Weight
from lokakern.selection.rank_agreement import readable_digest
from lokakern.selection.table import FrozenTable, Origin, Ranges, Table
from lokakern.types import (
    CHOICE_REGIMES,
    Device,
    ErrorBudget,
    Format,
    Granularity,
    Problem,
    norm_form,
)

FORMAT = "lokakern choices"
VERSION = 2
READABLE = (1, VERSION)  # files of version 1 have no answers
LARGEST_FILE_BYTES = 16 * 2**20  # 20 000 tables; a model has some hundred
# Most of a character in a file, so that a hostile file of tiny values is refused before it is
# decoded. Tables have a comma in at least 11 bytes, a colon in 23, and a bracket in 100.
MOST_OF = {b",": LARGEST_FILE_BYTES // 8, b":": LARGEST_FILE_BYTES // 16,
           b"[": LARGEST_FILE_BYTES // 32, b"{": LARGEST_FILE_BYTES // 32}  # fmt: skip
MOST_BREAKPOINTS = 4096  # of a table; the shipped database makes 20 at most
MOST_NAMES = 1000
LONGEST_TEXT = 1000
MOST_ELEMENTS = 2**33 - 1  # of one operand of a quantizer
LONGEST_ANSWER = 2**16  # a chain of eight layers with ten ranges of m has some 10 000
MOST_ANSWERS = 64  # texts; a route has six
LARGEST_SIZE = 2**48  # of an axis
_UNREADABLE = (ValueError, TypeError, KeyError, ArithmeticError, RecursionError, LokakernError)
_REMEDY = "write it again with lokakern.freeze"

_Size = Annotated[int, Meta(ge=0, le=LARGEST_SIZE)]
_Positive = Annotated[int, Meta(ge=1, le=LARGEST_SIZE)]
_Flag = Literal[0, 1]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Distributions = Annotated[tuple[str, ...], Meta(min_length=1, max_length=MOST_NAMES)]


class _Problem(Struct, forbid_unknown_fields=True):
    op: str
    n: _Size
    k: _Size
    batch: _Positive
    a: str
    b: str
    prepared: _Flag
    epilogue: str
    out_format: str
    out_granularity: str
    out_strided: _Flag
    accumulate: _Flag


class _Table(Struct, forbid_unknown_fields=True):
    problem: _Problem
    m_alignment: Literal[1, 2, 4, 8, 16]
    budget: dict[str, float] | None
    distributions: _Distributions
    regime: str
    needs: Annotated[list[str], Meta(max_length=MOST_NAMES)]
    breakpoints: Annotated[list[_Size], Meta(min_length=1, max_length=MOST_BREAKPOINTS)]
    winners: list[str]
    misses: list[bool]

    def __post_init__(self) -> None:
        known = sorted(set(self.needs) & NEEDS.keys())
        _expect(
            self.regime in CHOICE_REGIMES,
            f"regime is {self.regime!r}; expected one of {CHOICE_REGIMES}",
        )
        _expect(self.needs == known, f"needs are {self.needs}; expected some of {[*NEEDS]}, sorted")
        starts = self.breakpoints
        is_ascending = starts[0] == 0 and starts == sorted(set(starts))
        _expect(is_ascending, f"breakpoints are {_shown(starts)}; expected ascending m from 0")
        is_whole = len(starts) == len(self.winners) == len(self.misses)
        _expect(is_whole, f"expected {len(starts)} winners and misses, one for each breakpoint")
        if self.budget is not None:
            ErrorBudget(**self.budget)


class _Weight(Struct, forbid_unknown_fields=True):
    n: _Size
    k: _Size
    format: Format
    budget: dict[str, float]
    distributions: _Distributions
    least_m: _Positive
    largest_m: _Positive
    form: Granularity

    def __post_init__(self) -> None:
        possible = (Granularity.NONE, Granularity.TENSOR, Granularity.ROW, Granularity.BLOCK)
        _expect(not self.format.is_fp8, f"format is {self.format.value!r}; expected none of FP8")
        _expect(self.form in possible, f"form is {self.form.value!r}; expected one of {possible}")
        is_range = self.least_m <= self.largest_m
        _expect(is_range, f"largest_m is {self.largest_m}; expected at least {self.least_m}")
        self.asked()

    def asked(self) -> Weight:
        row = structs.asdict(self)
        del row["form"]
        return Weight(**{**row, "budget": ErrorBudget(**self.budget)})


class _Answer(Struct, forbid_unknown_fields=True):
    question: Annotated[str, Meta(max_length=LONGEST_TEXT)]
    answer: Annotated[list[str], Meta(min_length=1, max_length=MOST_ANSWERS)]


class _File(Struct, forbid_unknown_fields=True):
    format: str
    version: int
    lokakern: str
    frozen_utc_ms: Annotated[int, Meta(ge=0, le=1 << 45)]
    device: dict[str, str | int]
    snapshot: _Digest
    unverified: Annotated[int, Meta(ge=0, le=1 << 20)]
    kernels: dict[str, _Digest]
    tables: list[_Table]
    weights: list[_Weight]
    digest: str
    answers: list[_Answer] = []


def load(path: str | os.PathLike[str]) -> Choices:
    """Read a file of frozen choices.

    Raises:
        ChoicesError: The file cannot be read, has another format or version, is damaged, or was
            written for another device or with other kernels.
    """
    shown = os.fspath(path)
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # reading a pipe may never end
            raise ChoicesError(f"choices {shown}: it is not a regular file; {_REMEDY}")
        with Path(path).open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ChoicesError(
            f"choices {shown} cannot be read: {error}; write it with lokakern.freeze, or unset "
            "LOKAKERN_CHOICES"
        ) from None
    return parse(content, shown)


def parse(content: bytes, path: str) -> Choices:
    """Read the content of a file of frozen choices.

    Raises:
        ChoicesError: As `load`.
    """
    if len(content) > LARGEST_FILE_BYTES:
        raise ChoicesError(
            f"choices {path}: it has more than {LARGEST_FILE_BYTES >> 20} MiB; no model has so "
            f"many choices: {_REMEDY}"
        )
    for mark, most in MOST_OF.items():
        if content.count(mark) > most:
            raise ChoicesError(
                f"choices {path}: it has more than {most} of {mark.decode()!r}; no model has so "
                f"many choices: {_REMEDY}"
            )
    try:
        # Not msgspec's parser: it accepts names that occur twice.
        whole = json.loads(content.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        _expect(type(whole) is dict and whole.get("format") == FORMAT, f"it is not {FORMAT!r}")
        version = whole.get("version")
        if type(version) is not int or version not in READABLE:
            raise ChoicesError(
                f"choices {path}: its version is {_shown(version)}, and this lokakern reads "
                f"{' and '.join(map(str, READABLE))}: {_REMEDY} here, or use lokakern "
                f"{_shown(whole.get('lokakern'))}"
            )
        file = _converted(whole)  # first, because it is the fastest of the checks
        for place, text in () if _is_plain(content) else _texts(whole, "$"):
            longest = LONGEST_ANSWER if place.startswith("$.answers[") else LONGEST_TEXT
            _expect(
                len(text) <= longest and text.isprintable(),
                f"Expected at most {longest} printable characters - at `{place}`, found "
                f"{_shown(text)}",
            )
        _expect(file.digest == digest_of(whole), "it was changed since it was written")
        return _choices(file, path)
    except ChoicesError:
        raise
    except _UNREADABLE as error:
        raise ChoicesError(f"choices {path}: {_reason(error)}; {_REMEDY}") from None


def digest_of(whole: dict[str, Any]) -> str:
    """SHA-256, in hex, of all fields but the digest and those that say when and by what version."""
    left_out = ("digest", "frozen_utc_ms", "lokakern")
    kept = {name: value for name, value in whole.items() if name not in left_out}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def table_row(key: Key, table: Table) -> dict[str, Any]:
    """The row of a table in the file."""
    problem = row_of(key.problem)
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


def answer_row(asked: str, texts: tuple[str, ...]) -> dict[str, Any]:
    """The row of an answer in the file."""
    return {"question": asked, "answer": list(texts)}


def weight_row(asked: Weight, form: Granularity) -> dict[str, Any]:
    """The row of a weight's form in the file."""
    row: dict[str, Any] = to_builtins(
        {**asked._asdict(), "budget": asked.budget.limits, "form": form}
    )
    return row


class _WrongError(ValueError):
    """What is wrong with a file."""


def _reason(error: BaseException) -> str:
    text = str(error) if isinstance(error, _WrongError) else f"it is damaged ({error})"
    return "".join(c if c.isprintable() else " " for c in text[:300])


def _expect(is_right: bool, otherwise: str) -> None:
    if not is_right:
        raise _WrongError(otherwise)


def _shown(value: Any) -> str:
    return repr(value)[:80]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    _expect(len(found) == len(pairs), "a name occurs twice in an object")
    return found


def _no_constant(name: str) -> Any:
    raise _WrongError(f"it holds {name}")


def _is_plain(content: bytes) -> bool:
    """Whether bytes alone show that each text is short and printable, as in most files."""
    is_printable = content.isascii() and b"\\" not in content and b"\x7f" not in content
    return is_printable and re.search(rb'"[^"]{%d}' % (LONGEST_TEXT + 1), content) is None


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Every text, names too, with its place."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{place}[{index}]")
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield place, name
            yield from _texts(inner, f"{place}.{name}")


def _converted(whole: Any) -> _File:
    try:
        return convert(whole, _File)
    except ValidationError as error:  # which ends with a path such as `$.tables[0].regime`
        found = whole
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", str(error).rpartition("`$")[2]):
            found = found[name or int(index)]
        raise _WrongError(f"{error}, found {_shown(found)}") from None


def _choices(file: _File, path: str) -> Choices:
    origin = Origin(path, file.frozen_utc_ms, file.snapshot, file.unverified)
    wrong = file.device.keys() ^ {field.name for field in fields(Device)}
    if wrong:
        raise _WrongError(f"fields of device are missing or unknown: {_shown(sorted(wrong))}")
    device = from_row(Device, file.device)
    if device not in devices_here():
        here = ", ".join(sorted(_device_words(found) for found in devices_here()))
        raise ChoicesError(
            f"choices {path}: they are for {_device_words(device)}; here is {here}; freeze the "
            "choices of this device, too"
        )
    kernels = _kernels(file.kernels, path, file.lokakern)
    tables: dict[Key, FrozenTable] = {}
    for row in file.tables:
        table = _table(row, device, kernels, origin)
        _expect(Key.of(table) not in tables, f"{table.problem} occurs twice")
        tables[Key.of(table)] = table
    forms: dict[Weight, Granularity] = {}
    for weight in file.weights:
        asked = weight.asked()
        _expect(asked not in forms, f"{asked} occurs twice")
        forms[asked] = weight.form
    answers = {row.question: tuple(row.answer) for row in file.answers}
    _expect(len(answers) == len(file.answers), "a question occurs twice")
    return Choices(origin, file.digest, device, tables, forms, kernels, answers)


def _device_words(device: Device) -> str:
    """Everything in which two devices of one product may differ."""
    more = "" if device.partition == "none" else f", {device.partition}"
    return f"{device.product!r} ({device.compute_units} units, {device.memory_gib} GiB{more})"


def _kernels(digests: dict[str, str], path: str, software: str) -> dict[str, Kernel]:
    """The kernels that a file names.

    Raises:
        ChoicesError: One is not registered here or has another digest.
    """
    unavailable = load_kernels()
    wrong = []
    for name, then in digests.items():
        now = readable_digest(KERNELS[name]) if name in KERNELS else ""
        if name not in KERNELS:
            wrong.append(f"{name} is not registered here")
        elif now != then:
            wrong.append(f"{name} was {then[:12]} and is {now[:12] or 'not readable'} here")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        absent = "".join(f"; {module}: {why}" for module, why in list(unavailable.items())[:3])
        raise ChoicesError(
            f"choices {path}: kernels differ from those that were frozen: {', '.join(wrong[:3])}"
            f"{more}{absent}; install the same software (lokakern {software}, and libraries of the "
            "same versions), or freeze again"
        )
    return {name: KERNELS[name] for name in digests}


def _problem(row: _Problem, m: int) -> Problem:
    given = structs.asdict(row)
    problem = from_row(Problem, {**given, "m": m})
    again = row_of(problem)
    _expect(given.items() <= again.items(), f"problem is {_shown(given)}")
    is_of_op = len(op_named(problem.op).axes) == len(problem.shape)
    _expect(is_of_op, f"{problem} has not the operands of its op")
    if problem.op in EPILOGUE_OPS:
        norm_form(problem.epilogue)
    return problem


def _table(row: _Table, device: Device, kernels: dict[str, Kernel], origin: Origin) -> FrozenTable:
    problem = _problem(row.problem, row.m_alignment)
    for winner, miss in zip(row.winners, row.misses, strict=True):
        is_known = winner in kernels or (winner == "" and miss)
        _expect(is_known, f"a winner of {problem} is {winner!r}; expected a kernel of the file")
    budget = None if row.budget is None else ErrorBudget(**row.budget)
    found = [kernels[name] if name else None for name in row.winners]
    table = FrozenTable(
        problem, device, budget, row.distributions, row.regime, callable_here=True,
        needs=frozenset(row.needs), origin=origin,
        ranges=Ranges(row.breakpoints, row.winners, found, row.misses),
    )  # fmt: skip
    _check_kernels(table)
    return table


def _check_kernels(table: FrozenTable) -> None:
    """Check that each kernel supports its problem from its first to its last m.

    Launchers check nothing. The last range ends at `LARGEST_M`, where an operand or the output
    would have more than `MOST_ELEMENTS`, which functions refuse, or at its first m.
    """
    columns = max(table.problem.n, table.problem.k, 1)
    last = max(table.breakpoints[-1], min(LARGEST_M, MOST_ELEMENTS // columns))
    ends = [*(start - 1 for start in table.breakpoints[1:]), last]
    for kernel, *places in zip(table.kernels, table.breakpoints, ends, strict=True):
        if kernel is None:
            continue
        reason = kernel.lacks(table.needs)
        for m in places:
            try:
                asked = replace(table.problem, m=table.like(m))
                reason = reason or kernel.refusal(asked, table.device)
            except Exception as error:  # a forged problem may be one that cannot exist
                raise _WrongError(f"{table.problem}: {type(error).__name__}: {error}") from None
        _expect(reason is None, f"{kernel.name} does not take {table.problem}: {reason}")
