"""Cycles of a whole kernel for AMD GPUs: before its main loop, in it, and behind it.

They are counted from the text, not measured. One wave executes an instruction after the other,
each in the cycles that machine_code.py gives. It goes the way of whole tiles: of the ways that
convert and store all outputs of a lane, the one of fewest cycles; blocks that lanes enter for
themselves are entered; in the loop every block counts in every turn.

A wait costs what the awaited instruction still lacks of its latency. The waves of a SIMD take
turns: as much as one wave executes in the meantime, each of the others does.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

from tests.support.compute_unit import busy_share
from tests.support.machine_code import (
    LATENCY,
    SIMDS,
    Block,
    blocks_of,
    cycles,
    instructions_of,
    main_loop,
    main_loop_blocks,
    matrices,
    matrix_shape,
    stored_bytes_of,
)

PAIR_TO_FP8 = ("v_cvt_pk_fp8_f32", "v_cvt_scalef32_pk_fp8_f32")
DEPTHS = (256, 1024, 4096)  # k for which whole kernels are counted
SIMULATED = 1024  # k, for which waves of a compute unit run at once
KINDS = {"v_mfma_": "matrix", "v_": "vector", "s_": "scalar", "ds_": "local"}  # else memory


def whole_kernel(
    text: str, products: int, occupancy: int, stored: int = 0, converted: int = 0
) -> dict[str, Any]:
    """Cycles of a wave that multiplies so many matrix instructions, by what executes them.

    Args:
        text: Assembly of one kernel.
        products: Matrix instructions that the wave executes, in the loop and outside.
        occupancy: Waves of a SIMD, which take turns.
        stored: Bytes that a lane stores of a whole tile. Ways that store less are those of tails.
        converted: Numbers that a lane converts to FP8. Ways that convert fewer leave out both sides
            of a branch whose condition is tested twice.

    Returns:
        ``matrix``, ``vector``, ``scalar``, ``local`` and ``memory`` cycles; ``waits``, cycles that
        no wave fills, and of these ``loop_waits`` in the loop; ``share`` of the matrix cycles in
        all but the waits.

    Raises:
        ValueError: No number of turns of the loop executes so many products, or no way converts
            and stores so much.
    """
    return _count(way_of(text, products, stored, converted), occupancy)


class Way(NamedTuple):
    """Instructions before the loop, in each of its turns, and behind it."""

    before: list[str]
    turn: list[str]
    turns: int
    behind: list[str]

    def executed(self) -> list[str]:
        """As they run."""
        return self.before + self.turn * self.turns + self.behind


def way_of(text: str, products: int, stored: int = 0, converted: int = 0) -> Way:
    """Which instructions a wave executes, with arguments and errors as of `whole_kernel`."""
    blocks = blocks_of(text)
    loop = main_loop_blocks(blocks)
    if loop is None:
        raise ValueError("no loop holds matrix instructions")
    exits = [n for number in loop for n in blocks[number].following if n not in loop]
    ends = [number for number, block in enumerate(blocks) if "s_endpgm" in block.instructions]
    before = _executed(blocks, _cheapest(blocks, [0], [loop[0]], loop)[:-1])
    turn = instructions_of(blocks, loop)
    behind = _executed(blocks, _cheapest(blocks, exits, ends, loop, stored, converted))
    each, once = len(matrices(turn)), len(matrices(before + behind))
    turns, more = divmod(products - once, each)
    if more or turns < 0:
        raise ValueError(f"turns of {each} products and {once} outside do not make {products}")
    return Way(before, turn, turns, behind)


def at_depths(
    text: str, tile: tuple[int, int], waves: int, occupancy: int, **outputs: int
) -> dict[str, Any]:
    """What a kernel that multiplies takes at some k, and the tile that this is for.

    Args:
        text: Assembly of one kernel.
        tile: Sums of a block.
        waves: Of a block.
        occupancy: Waves of a SIMD.
        outputs: As of `whole_kernel`.
    """
    (instruction,) = set(matrices(main_loop(blocks_of(text)) or []))
    m, n, k, _ = matrix_shape(instruction)
    each = tile[0] * tile[1] // (m * n * waves)  # for k of the instruction
    ways = {depth: way_of(text, depth // k * each, **outputs) for depth in DEPTHS}
    busy = busy_share([ways[SIMULATED].executed()] * waves, max(1, occupancy * SIMDS // waves))
    counted = {f"k={depth}": _count(way, occupancy) for depth, way in ways.items()}
    return {"tile": list(tile), "waves": waves, "whole": counted, f"busy_k{SIMULATED}": busy}


def _executed(blocks: list[Block], path: Iterable[int]) -> list[str]:
    return [instruction for number in path for instruction in blocks[number].instructions]


def _cheapest(
    blocks: list[Block],
    first: Iterable[int],
    last: Container[int],
    around: Container[int],
    stored: int = 0,
    converted: int = 0,
) -> list[int]:
    """Numbers of the blocks of the way with the fewest cycles, around those of the loop.

    It stores so many bytes of a lane and converts so many numbers to FP8, or more.
    """
    waiting = [(0.0, number, (stored, converted), [number]) for number in first]
    known: set[tuple[int, tuple[int, int]]] = set()
    while waiting:
        spent, number, (stored, converted), path = heapq.heappop(waiting)
        block = blocks[number]
        stored -= sum(map(stored_bytes_of, block.instructions))
        converted -= 2 * sum(name.startswith(PAIR_TO_FP8) for name in block.instructions)
        left = max(0, stored), max(0, converted)
        if number in last and left == (0, 0):
            return path
        if (number, left) in known or number in around:
            continue
        known.add((number, left))
        spent += sum(map(cycles, block.instructions))
        following = block.following
        if block.instructions and block.instructions[-1] == "s_cbranch_execz":
            following = following[:1]  # some lane is at work
        for other in following:
            heapq.heappush(waiting, (spent, other, left, [*path, other]))
    raise ValueError("no way leads to the loop, or none from it converts and stores enough")


class Issued(NamedTuple):
    """An instruction whose result is under way, and when it was issued."""

    at: float
    latency: int


def _count(way: Way, occupancy: int) -> dict[str, Any]:
    counted = dict.fromkeys(("matrix", "vector", "scalar", "local", "memory"), 0.0)
    waits = {"outside": 0.0, "loop": 0.0}
    pending: dict[str, list[Issued]] = {counter: [] for counter in LATENCY}
    now = 0.0
    parts = [("outside", way.before), *[("loop", way.turn)] * way.turns, ("outside", way.behind)]
    for where, instruction in ((where, each) for where, part in parts for each in part):
        for counter, left in re.findall(r"(vmcnt|lgkmcnt)\((\d+)\)", instruction):
            queue = pending[counter]
            done = max(0, len(queue) - int(left))  # results come in order
            ready = [each.at + each.latency / occupancy for each in queue[:done]]
            del queue[:done]
            wait = max(0.0, max(ready, default=now) - now)
            waits[where] += wait
            now += wait
        kinds = (kind for start, kind in KINDS.items() if instruction.startswith(start))
        kind = next(kinds, "memory")
        counter = "vmcnt" if kind == "memory" else "lgkmcnt"
        if kind in ("memory", "local") or instruction.startswith("s_load"):
            pending[counter].append(Issued(now, LATENCY[counter]))
        counted[kind] += cycles(instruction)
        now += cycles(instruction)
    return {
        **{kind: round(spent) for kind, spent in counted.items()},
        "waits": round(sum(waits.values())),
        "loop_waits": round(waits["loop"]),
        "share": round(counted["matrix"] / sum(counted.values()), 3),
    }
