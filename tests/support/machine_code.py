"""Resources of machine code for AMD GPUs, and the share of matrix work in its main loop.

Reads what LLVM prints, as `clang -S` and as Triton keeps it: registers and memory as the compiler
notes them, instructions block by block. The share of matrix cycles is counted, not measured: those
of one wave, with nothing overlapped and nothing waited for. whole_kernel.py counts what is outside
the loop, too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

SIMDS = 4  # of a compute unit
WAVE = 64  # lanes
LOCAL_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}  # of a compute unit
MATRIX = "v_mfma_"
LABEL = re.compile(r"([.\w$]+):")
INSTRUCTION = re.compile(r"\s+((?:s|v|ds|global|buffer|flat|scratch)_\w+)[ \t]*([^;\n]*)")
# Of a disassembly: name and operands, address, words of the encoding.
DISASSEMBLED = re.compile(r"\t(\S+)\s*(.*?)\s*// ([0-9A-F]+): ([0-9A-F ]+)")
ENDS = ("s_branch", "s_cbranch", "s_endpgm")  # of a block
TYPES = {"f8f6f4": 1, "fp8": 1, "bf8": 1, "bf16": 2, "f16": 2}  # bytes; operands of f8f6f4 are FP8
ISSUE = 4  # cycles: 16 lanes at a time
# Four lanes at a time, as LLVM's scheduling model for both GPUs has it.
TRANSCENDENTAL = ("v_rcp_", "v_rsq_", "v_sqrt_", "v_exp_", "v_log_", "v_sin_", "v_cos_")
LOCAL_RATE = 128  # bytes that local memory moves in a cycle
# Cycles from an instruction to its result. Assumed, of the order of published measurements: main
# memory and local memory without conflicts. Caches are faster.
LATENCY = {"vmcnt": 700, "lgkmcnt": 128}
KEPT = ("s_waitcnt", "s_nop")  # with operands
FREE = ("s_waitcnt", "s_barrier", "s_nop", "s_setprio")


class Block(NamedTuple):
    """Instructions that only run one after the other, and the numbers of blocks that may follow.

    The next block comes first, then the target of a branch. Waits keep their operands, and loads
    to local memory the word `lds`.
    """

    instructions: list[str]
    following: list[int]


def resources(text: str, gpu: str, local_bytes: int | None = None) -> dict[str, Any]:
    """Resources that a kernel uses.

    Args:
        text: Assembly of one kernel.
        gpu: "gfx942" or "gfx950".
        local_bytes: Local memory that the launcher gives. None: the compiler notes it.
    """
    if local_bytes is None:
        local_bytes = noted(text, ".group_segment_fixed_size")
    blocks = blocks_of(text)
    loop = main_loop(blocks)
    every = [instruction for block in blocks for instruction in block.instructions]
    counted = Counter(matrices(every if loop is None else loop))
    return {
        "vector_registers": noted(text, ".vgpr_count"),  # with those for accumulation
        "accumulation_registers": noted(text, ".agpr_count"),
        "scalar_registers": noted(text, ".sgpr_count"),
        "local_bytes": local_bytes,
        "scratch_bytes": noted(text, ".private_segment_fixed_size"),
        "occupancy": occupancy(text, gpu, local_bytes),
        "matrix": dict(sorted(counted.items())),
        "matrix_share": None if loop is None else matrix_share(loop),
    }


def assembly_of(disassembly: str) -> str:
    """What `llvm-objdump -d` prints of a code object, with a label wherever a branch goes."""
    lines: list[tuple[int, str, str]] = []
    for name, operands, address, words in DISASSEMBLED.findall(disassembly):
        if name.startswith(("s_branch", "s_cbranch")):
            ahead = (int(words.split()[0], 16) + 0x8000 & 0xFFFF) - 0x8000  # words, with a sign
            operands = f".L{int(address, 16) + 4 + 4 * ahead:x}"
        lines.append((int(address, 16), name, operands))
    targets = {operands for _, name, operands in lines if "branch" in name}
    return "".join(
        (f".L{address:x}:\n" if f".L{address:x}" in targets else "") + f"\t{name} {operands}\n"
        for address, name, operands in lines
    )


def noted(text: str, name: str) -> int:
    found = re.search(rf"{re.escape(name)}:\s*(\d+)", text)
    assert found, name
    return int(found[1])


def occupancy(text: str, gpu: str, local_bytes: int) -> int:
    """Waves of whole blocks on a SIMD. LLVM does not know what local memory a launcher gives."""
    waves = noted(text, ".max_flat_workgroup_size") // WAVE
    blocks = noted(text, "Occupancy") * SIMDS // waves
    if local_bytes:
        blocks = min(blocks, LOCAL_BYTES[gpu] // local_bytes)
    return max(1, blocks * waves // SIMDS)


def blocks_of(text: str) -> list[Block]:
    """The control flow of a kernel; the first block is where it begins."""
    blocks = [Block([], [])]
    labels: dict[str, int] = {}
    targets: dict[int, str] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(blocks)
            blocks.append(Block([], []))
        elif found := INSTRUCTION.match(line):
            name, operands = found[1], found[2].strip()
            kept = operands if name in KEPT else "lds" if operands.endswith(" lds") else ""
            blocks[-1].instructions.append(f"{name} {kept}".rstrip())
            if name.startswith(ENDS):
                targets[len(blocks) - 1] = operands
                blocks.append(Block([], []))
    for number, block in enumerate(blocks[:-1]):
        last = block.instructions[-1] if block.instructions else ""
        if last not in ("s_branch", "s_endpgm"):
            block.following.append(number + 1)
        if last.startswith(("s_branch", "s_cbranch")):
            block.following.append(labels[targets[number]])
    return blocks


def main_loop(blocks: list[Block]) -> list[str] | None:
    """Instructions of the innermost loop that holds the most matrix instructions, if one does.

    Every block counts once, those too that most turns jump over.
    """
    loop = main_loop_blocks(blocks)
    return None if loop is None else instructions_of(blocks, loop)


def main_loop_blocks(blocks: list[Block]) -> list[int] | None:
    """Numbers of the blocks of the main loop, the one that it is entered by first."""

    def count(loop: list[int]) -> int:
        return len(matrices(instructions_of(blocks, loop)))

    found = [loop for loop in loops(blocks) if count(loop)]
    innermost = [loop for loop in found if not any(set(other) < set(loop) for other in found)]
    return max(innermost, key=count, default=None)


def instructions_of(blocks: list[Block], numbers: Iterable[int]) -> list[str]:
    """Of these blocks, in the order of the text."""
    return [each for number in sorted(numbers) for each in blocks[number].instructions]


def loops(blocks: list[Block]) -> Iterator[list[int]]:
    """Blocks of each loop: one that nothing enters the loop around, and all that comes back to it.

    Which way a branch goes says little: LLVM also jumps back from blocks that it moved to the end.
    Loops from which no matrix instruction is reached are left out.
    """
    after = {number: block.following for number, block in enumerate(blocks)}
    before: dict[int, list[int]] = {number: [] for number in after}
    for number, following in after.items():
        for other in following:
            before[other].append(number)
    running = reached([0], after)
    multiply = [number for number, block in enumerate(blocks) if matrices(block.instructions)]
    for head in sorted(running & reached(multiply, before)):
        within = running - reached([0], after, without=head)
        last = [number for number in before[head] if number in within]
        if last:
            yield [head, *sorted(reached(last, before, without=head))]


def reached(first: Iterable[int], ways: Mapping[int, list[int]], without: int = -1) -> set[int]:
    """Blocks that are reached from the first ones but through one."""
    found: set[int] = set()
    waiting = list(first)
    while waiting:
        number = waiting.pop()
        if number != without and number not in found:
            found.add(number)
            waiting += ways[number]
    return found


def matrices(instructions: Iterable[str]) -> list[str]:
    return [instruction for instruction in instructions if instruction.startswith(MATRIX)]


def matrix_share(loop: list[str]) -> float:
    """Cycles of matrix instructions by those of all."""
    return round(sum(map(cycles, matrices(loop))) / sum(map(cycles, loop)), 3)


def cycles(instruction: str) -> float:
    """Cycles in which one wave occupies what executes an instruction."""
    if instruction.startswith(FREE):
        return 0
    if instruction.startswith(MATRIX):
        return matrix_cycles(instruction)
    if instruction.startswith("ds_"):
        return max(ISSUE, local_bytes_of(instruction) * WAVE / LOCAL_RATE)
    if instruction.startswith(TRANSCENDENTAL):
        return 4 * ISSUE
    return ISSUE  # all that is counted of loads and stores, too


def matrix_cycles(instruction: str) -> float:
    """From the m x n x k of a matrix instruction's name.

    A SIMD of MI300X makes 1024 FP8 or 512 bfloat16 FLOP a cycle: 512 products of bytes, if one of
    bfloat16 counts as two. MI350X makes twice as many (2048, 1024), but only by the instructions it
    adds, whose lanes hold more than 8 bytes of an operand; it takes as long as MI300X for others.
    """
    m, n, k, size = matrix_shape(instruction)
    rate = 512 if m * k * size <= 8 * WAVE else 1024
    return m * n * k * size / rate


def matrix_shape(instruction: str) -> tuple[int, int, int, int]:
    """Its m, n and k, and the bytes of an element of an operand.

    Raises:
        ValueError: The name is none of those known.
    """
    found = re.fullmatch(
        r"v_mfma_(?:scale_)?f32_(\d+)x(\d+)x(\d+)_?(f8f6f4|bf16|f16|fp8|bf8)(?:_.*)?", instruction
    )
    if found is None:
        raise ValueError(f"no rate is known of {instruction}")
    m, n, k = map(int, found.groups()[:3])
    return m, n, k, TYPES[found[4]]


def local_bytes_of(instruction: str) -> float:
    """Bytes that a lane reads or writes: `ds_read_b128`, `ds_write2st64_b64` (two)."""
    found = re.search(r"(2?)(?:st64)?_[bfiu](\d+)", instruction)
    return int(found[2]) / 8 * (2 if found[1] else 1) if found else 0


def stored_bytes_of(instruction: str) -> int:
    """Bytes that a lane writes to memory: `global_store_dwordx4`, `buffer_store_short_d16_hi`."""
    return moved_bytes_of(instruction) if "_store_" in instruction else 0


def moved_bytes_of(instruction: str) -> int:
    """Bytes that a lane reads from memory or writes to it, but for spilled registers."""
    found = re.match(
        r"(?:global|buffer|flat)_(?:load_(?:lds_)?[us]?|store_)(byte|short|dword)(?:x(\d))?",
        instruction,
    )
    return {"byte": 1, "short": 2, "dword": 4}[found[1]] * int(found[2] or 1) if found else 0
