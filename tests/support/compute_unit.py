"""Time of blocks on one compute unit of AMD GPUs, in which their waves wait for each other.

Simulated from instructions, not measured. The count of whole_kernel.py adds up the cycles of one
wave; here the waves of a compute unit run at once: each executes in order; matrix instructions and
vector instructions of a SIMD do not wait for each other, but their own kind does; local memory
serves one wave of all four SIMDs at a time; data pass from caches at `MEMORY_RATE`. Every block
takes the way of whole tiles. What data depend on counts only where an s_waitcnt says so.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from typing import NamedTuple

from tests.support.machine_code import (
    ISSUE,
    LATENCY,
    LOCAL_RATE,
    MATRIX,
    SIMDS,
    WAVE,
    cycles,
    local_bytes_of,
    matrices,
    moved_bytes_of,
)

MEMORY_RATE = 64  # bytes that caches give a compute unit in a cycle
ROUNDS = 2  # blocks one after the other in each place: the first ones begin together


class Step(NamedTuple):
    """What an instruction does: its kind, cycles of what executes it, waits by counter."""

    kind: str
    spent: float
    left: tuple[tuple[str, int], ...] = ()


class Wave:
    """Where a wave is, and when what it has begun is done, by counter."""

    def __init__(self, block: int, simd: int, steps: Sequence[Step]) -> None:
        self.block, self.simd, self.steps = block, simd, steps
        self.position = 0
        self.pending: dict[str, list[float]] = {counter: [] for counter in LATENCY}


def busy_share(waves: Sequence[Sequence[str]], blocks: int) -> float:
    """Share of the time in which matrix cores multiply.

    Args:
        waves: Instructions of each wave of a block, as they run.
        blocks: That a compute unit holds at once.
    """
    decoded = {id(each): [_step(instruction) for instruction in each] for each in waves}
    steps = [decoded[id(each)] for each in waves]
    multiplied = sum(cycles(x) for each in waves for x in matrices(each)) * blocks * ROUNDS
    return round(multiplied / SIMDS / _Unit(steps, blocks).run(), 3)


def _step(instruction: str) -> Step:
    name, _, operands = instruction.partition(" ")
    if name == "s_waitcnt":
        found = re.findall(r"(vmcnt|lgkmcnt)\((\d+)\)", operands)
        return Step("wait", 0, tuple((counter, int(left)) for counter, left in found))
    if name == "s_barrier":
        return Step("barrier", ISSUE)
    if name == "s_nop":
        return Step("other", ISSUE * (1 + int(operands or "0", 0)))
    if name.startswith(MATRIX):
        return Step("matrix", cycles(name))
    if name.startswith("ds_"):
        return Step("local", (local_bytes_of(name) or 4) * WAVE / LOCAL_RATE)
    if name.startswith("v_"):
        return Step("vector", cycles(name))
    if name.startswith("s_"):
        return Step("constant" if name.startswith("s_load") else "other", cycles(name))
    spent = moved_bytes_of(name) * WAVE / MEMORY_RATE
    return Step("copy" if operands == "lds" else "memory", spent)


class _Unit:
    """A compute unit; what executes instructions is free from a time on."""

    def __init__(self, waves: Sequence[Sequence[Step]], blocks: int) -> None:
        self.waves = waves
        self.matrix, self.vector = [0.0] * SIMDS, [0.0] * SIMDS
        self.local = self.memory = 0.0
        self.left = [ROUNDS] * blocks
        self.running = [0] * blocks
        self.met: list[list[Wave]] = [[] for _ in range(blocks)]  # at a barrier
        # Waves, and bytes that arrive in local memory. Of equal times, what came first goes first.
        self.events: list[tuple[float, int, Wave | float]] = []
        self.number = 0

    def run(self) -> float:
        """Cycles until the last block ends."""
        now = 0.0
        for block in range(len(self.left)):
            self.begin(block, now)
        while self.events:
            now, _, what = heapq.heappop(self.events)
            if not isinstance(what, Wave):
                self.local = max(self.local, now) + what / LOCAL_RATE
            elif what.position == len(what.steps):
                self.end(what, now)
            else:
                self.execute(what, now)
        return max(now, *self.matrix)

    def at(self, time: float, what: Wave | float) -> None:
        self.number += 1
        heapq.heappush(self.events, (time, self.number, what))

    def begin(self, block: int, now: float) -> None:
        if self.left[block]:
            self.left[block] -= 1
            self.running[block] = len(self.waves)
            for number, steps in enumerate(self.waves):
                self.at(now, Wave(block, number % SIMDS, steps))

    def end(self, wave: Wave, now: float) -> None:
        self.running[wave.block] -= 1
        if self.running[wave.block]:
            self.pass_barrier(wave.block, now)
        else:
            self.begin(wave.block, now)

    def pass_barrier(self, block: int, now: float) -> None:
        """Where all waves that still run have met."""
        if self.met[block] and len(self.met[block]) == self.running[block]:
            waiting, self.met[block] = self.met[block], []
            for wave in waiting:
                self.at(now + ISSUE, wave)

    def execute(self, wave: Wave, now: float) -> None:
        step = wave.steps[wave.position]
        after = now + ISSUE
        if step.kind in ("matrix", "vector"):
            is_matrix = step.kind == "matrix"
            free = max(self.vector[wave.simd], self.matrix[wave.simd] if is_matrix else 0.0)
            if free > now:
                return self.at(free, wave)
            if is_matrix:
                self.matrix[wave.simd] = now + step.spent
            else:
                after = now + step.spent
            self.vector[wave.simd] = after
        elif step.kind == "local":
            start = max(now, self.local)
            self.local = start + step.spent
            wave.pending["lgkmcnt"].append(start + LATENCY["lgkmcnt"])
        elif step.kind == "constant":
            wave.pending["lgkmcnt"].append(now + LATENCY["lgkmcnt"])
        elif step.kind in ("memory", "copy"):
            start = max(now, self.memory)
            self.memory = start + step.spent
            done = start + LATENCY["vmcnt"]
            wave.pending["vmcnt"].append(done)
            if step.kind == "copy":
                self.at(done, step.spent * MEMORY_RATE)
        elif step.kind == "wait":
            after = now
            for counter, left in step.left:
                queue = wave.pending[counter]
                count = max(0, len(queue) - left)
                after = max([after, *queue[:count]])
                del queue[:count]
        elif step.kind == "barrier":
            wave.position += 1
            self.met[wave.block].append(wave)
            return self.pass_barrier(wave.block, now)
        else:
            after = now + step.spent
        wave.position += 1
        return self.at(after, wave)
