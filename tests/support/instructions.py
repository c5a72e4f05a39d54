"""Instructions of AMD's GPUs with their operands, as LLVM prints them, in the order of the text.

What is followed here (constants, loads, waits) is followed from one line to the next, whatever
branches there are: enough for code that branches only around what it does.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

LINE = re.compile(r"\t((?:s|v|ds|global|buffer|scratch)_\w+)[ \t]*([^;\n]*)")
FUNCTION = re.compile(r"^(\w+):\s+; @\1\n(.*?)^\.Lfunc_end", re.MULTILINE | re.DOTALL)
RANGE = re.compile(r"([svam])(?:(\d+)|\[(\d+):(\d+)\])")
FIRST_MODIFIER = re.compile(
    r"\s+(?=(?:op_sel|src\d_sel|dst_|offset|cbsz|blgp|abid|neg_|off\b|offen|lds\b|bitop3))"
)


class Instruction(NamedTuple):
    """One line.

    Attributes:
        name: Without the suffix of its encoding.
        operands: As they are printed, the destination first where there is one.
        modifiers: What follows: ``op_sel_hi:[0,0,0]``.
    """

    name: str
    operands: tuple[str, ...]
    modifiers: str


def functions_of(text: str) -> dict[str, list[Instruction]]:
    """Kernels of an assembly text by name."""
    return {name: list(_read(body)) for name, body in FUNCTION.findall(text)}


def _read(body: str) -> Iterator[Instruction]:
    for name, rest in LINE.findall(body):
        words, *more = FIRST_MODIFIER.split(rest.strip(), maxsplit=1)
        operands = tuple(word.strip() for word in re.split(r",(?![^\[]*\])", words) if word.strip())
        yield Instruction(re.sub(r"_(e32|e64|sdwa|dpp)$", "", name), operands, "".join(more))


def registers(operand: str) -> list[str]:
    """Single registers of an operand: ``v[2:3]`` is v2 and v3; of a number there are none."""
    found = RANGE.fullmatch(operand.strip("-|"))
    if not found:
        return []
    first = int(found[2] or found[3])
    return [f"{found[1]}{number}" for number in range(first, int(found[2] or found[4]) + 1)]


def bits_of(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def immediate(operand: str) -> int | None:
    """32 bits of a number that is written in an instruction, or None."""
    if re.fullmatch(r"-?\d+", operand) or operand.startswith(("0x", "-0x")):
        return int(operand, 0) & 0xFFFFFFFF
    return bits_of(float(operand)) if re.fullmatch(r"-?\d+\.\d+", operand) else None


def past(each: Instruction) -> bool:
    """Whether it brings memory to local memory, past the registers."""
    return each.name.startswith("global_load_lds") or (
        each.name.startswith("buffer_load") and "lds" in each.modifiers.split()
    )


class Traced(NamedTuple):
    """An instruction, and for each of its sources the number that is in it and what wrote it."""

    instruction: Instruction
    values: list[int | None]
    writers: list[str]


def traced(instructions: Iterable[Instruction]) -> Iterator[Traced]:
    """Each instruction with what is known of its sources; moves pass on what they move."""
    values: dict[str, int | None] = {}
    writers: dict[str, str] = {}
    for each in instructions:
        into, *sources = each.operands or ("",)
        of_sources = [registers(source)[:1] for source in sources]
        known = [
            values.get(first[0]) if first else immediate(source)
            for first, source in zip(of_sources, sources, strict=True)
        ]
        by = [writers.get(first[0], "") if first else "" for first in of_sources]
        yield Traced(each, known, by)
        if each.name.startswith(("global_store", "ds_write", "buffer_store")) or past(each):
            continue
        moves = re.match(r"[sv]_mov(k_i|_b)|v_accvgpr|v_readfirstlane", each.name)
        for register in registers(into):
            values[register] = known[0] if moves and known else None
            writers[register] = by[0] if moves and by and of_sources[0] else each.name


def literals(instructions: Iterable[Instruction]) -> set[int]:
    """All numbers that are written in instructions."""
    found = (immediate(operand) for each in instructions for operand in each.operands)
    return {number for number in found if number is not None}


def unfinished_at_barriers(instructions: Iterable[Instruction]) -> list[str]:
    """Accesses to local memory that are still pending at a barrier, of any kind.

    Other loads and stores count, too: `vmcnt(8)` awaits a copy that eight of them follow.
    """
    waiting: dict[str, list[Instruction]] = {"vmcnt": [], "lgkmcnt": []}
    found = []
    for each in instructions:
        if each.name.startswith("ds_"):
            waiting["lgkmcnt"].append(each)
        elif re.match("(buffer|global|flat)_", each.name):
            waiting["vmcnt"].append(each)
        elif each.name == "s_waitcnt":
            for counter, left in re.findall(r"(\w+)\((\d+)\)", " ".join(each.operands)):
                del waiting[counter][: max(0, len(waiting[counter]) - int(left))]
        elif each.name == "s_barrier":
            pending = [x.name for x in waiting["vmcnt"] if past(x)]
            found += sorted({*pending, *(x.name for x in waiting["lgkmcnt"])})
    return found


def products_of_loads(instructions: Iterable[Instruction]) -> list[Instruction]:
    """Multiplications of two floats as they came from memory."""
    return [
        each.instruction
        for each in traced(instructions)
        if re.fullmatch(r"v_(pk_)?mul_f32", each.instruction.name)
        and all("_load_" in writer for writer in each.writers)
    ]
