"""Functions of amd.hpp compile to the instructions and operands that the GPU manual specifies.

Each function is compiled in a separate kernel (tests/fixtures/hip_probes.hip). Expected values come
from the formats and the definitions of instructions, not from compiler output.
"""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import pytest

from lokakern.types import Format
from tests.support.hip_compiler import GPUS, MATRIX, compiled, needs_clang
from tests.support.instructions import (
    Instruction,
    bits_of,
    functions_of,
    immediate,
    literals,
    past,
    products_of_loads,
    registers,
    traced,
    unfinished_at_barriers,
)

PROBES = Path(__file__).parents[1] / "fixtures" / "hip_probes.hip"
FORMATS = {"gfx942": Format.E4M3FNUZ, "gfx950": Format.E4M3FN}


@functools.cache
def probes(gpu: str) -> dict[str, list[Instruction]]:
    return functions_of(compiled(gpu, PROBES, {}))


def named(instructions: list[Instruction], *beginnings: str) -> list[Instruction]:
    return [each for each in instructions if each.name.startswith(beginnings)]


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_a_pair_is_clamped_to_the_largest_and_converted_in_order(gpu: str) -> None:
    code = probes(gpu)["encodes"]
    clamps = [each for each in traced(code) if each.instruction.name == "v_med3_f32"]
    largest = FORMATS[gpu].maximum
    limits = {bits_of(largest), bits_of(-largest)}
    assert [set(each.values) - {None} for each in clamps] == [limits, limits]
    (conversion,) = named(code, "v_cvt")
    assert conversion.name == "v_cvt_pk_fp8_f32" and not conversion.modifiers  # to the low half
    assert conversion.operands[1:] == tuple(each.instruction.operands[0] for each in clamps)
    first, second = (next(iter(each.instruction.operands[1:])) for each in clamps)
    assert int(second.strip("sv")) == int(first.strip("sv")) + 1  # x[0], then x[1]


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_nan_is_seen_before_the_clamp_and_becomes_the_one_of_the_format(gpu: str) -> None:
    code = probes(gpu)["encodes"]
    seen = [each.operands[-2:] for each in named(code, "v_cmp_o_f32", "v_cmp_u_f32")]
    clamped = {each.operands[1] for each in named(code, "v_med3_f32")}
    assert {one for one, _ in seen} == clamped and all(one == other for one, other in seen)
    other = {0x80: 0x7F, 0x7F: 0x80}[FORMATS[gpu].nan_byte]
    written = literals(code)
    assert {FORMATS[gpu].nan_byte, FORMATS[gpu].nan_byte << 8} <= written
    assert not {other, other << 8} & written
    compared = [each for each in code if "_cmp" in each.name and "0x80" in each.operands]
    assert len(compared) == (2 if gpu == "gfx942" else 0)  # there is no -0: each byte is looked at


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_four_finite_numbers_are_converted_in_order_without_a_check(gpu: str) -> None:
    code = probes(gpu)["encodes_four"]
    low, high = named(code, "v_cvt")
    assert {low.name, high.name} == {"v_cvt_pk_fp8_f32"}
    assert (low.modifiers, high.modifiers) == ("", "op_sel:[0,0,1]")
    assert low.operands[0] == high.operands[0]
    loaded = registers(named(code, "global_load_dwordx4")[0].operands[0])
    assert [*low.operands[1:], *high.operands[1:]] == loaded
    assert not named(code, "v_med3", "v_cmp", "v_mov")
    signs = {0x7F7F7F7F} & literals(code)
    assert bool(signs) == (gpu == "gfx942")  # there is no -0


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_a_quotient_takes_two_packed_instructions_for_two_numbers(gpu: str) -> None:
    code = probes(gpu)["divides"]
    packed = [each.name for each in named(code, "v_pk")]
    assert sorted(packed) == ["v_pk_fma_f32"] * 2 + ["v_pk_mul_f32"] * 2
    assert len(named(code, "v_rcp_f32")) == 1 and not named(code, "v_div")


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_subnormal_roots_are_scaled_and_limits_are_a_modifier(gpu: str) -> None:
    code = probes(gpu)["approximates"]
    assert len(named(code, "v_rsq_f32")) == 1 and len(named(code, "v_cndmask_b32")) == 2
    assert {bits_of(2.0**-100), bits_of(2.0**64)} <= literals(code)  # 2^32 may be an exponent
    clamped = [each for each in code if "clamp" in " ".join((*each.operands, each.modifiers))]
    assert len(clamped) == 1 and not named(code, "v_med3")


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_nan_is_larger_than_all_where_an_instruction_finds_it(gpu: str) -> None:
    code = probes(gpu)["compares"]
    counted = Counter(each.name for each in code if each.name.startswith(("v_max", "v_cmp")))
    if gpu == "gfx950":  # two sizes, then 0
        assert counted == {"v_maximum3_f32": 3}
        (limit,) = [each for each in code if "0" in each.operands and "max" in each.name]
        assert set(limit.operands[2:]) == {"0"}
    else:
        assert counted == {"v_max3_f32": 2, "v_cmp_nge_f32": 1}  # not greater or equal: NaN, too
    sizes = named(code, "v_maximum3", "v_max3")[:2]
    assert [sum("|" in operand for operand in each.operands) for each in sizes] == [2, 2]


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_each_byte_of_a_word_is_decoded(gpu: str) -> None:
    conversions = named(probes(gpu)["decodes"], "v_cvt")
    assert {each.name for each in conversions} == {"v_cvt_f32_fp8"}
    places = [each.modifiers.partition("BYTE_")[2] or "0" for each in conversions]
    assert places == ["0", "1", "2", "3"]
    into = [int(each.operands[0].strip("v")) for each in conversions]
    assert into == [*range(into[0], into[0] + 4)]


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_128_of_k_are_multiplied_once_and_added_to_the_sums(gpu: str) -> None:
    code = probes(gpu)["multiplies"]
    matrices = [each for each in traced(code) if each.instruction.name.startswith("v_mfma")]
    assert {each.instruction.name for each in matrices} == {MATRIX[gpu]}
    for each in matrices:
        into, _x, _y, sums, *scales = each.instruction.operands
        assert into == sums, "sums go on"
        # FP8 of both operands is the format 0, which is not printed, and so is no broadcast.
        assert each.instruction.modifiers == ("op_sel_hi:[0,0,0]" if scales else "")
        assert each.values[3:] == ([127, 127] if scales else [])  # 2^(127 - 127)
    assert len(matrices) == (4 if gpu == "gfx942" else 1)
    for operand, first in ((1, 0), (2, 64 * 32)):  # 32 bytes of x and of y, each once
        origins = [
            origin
            for each in matrices
            for origin in origins_of(code, each.instruction, operand)
        ]  # fmt: skip
        assert sorted(origins) == [first + 4 * word for word in range(8)]
    pairs = [
        [origins_of(code, each.instruction, operand) for operand in (1, 2)] for each in matrices
    ]
    assert all([64 * 32 + byte for byte in x] == y for x, y in pairs), "of the same k"


def origins_of(code: list[Instruction], reader: Instruction, operand: int) -> list[int]:
    """From which offset in memory the last load before it brought each word of an operand."""
    words: dict[str, int] = {}
    for each in code:
        if each is reader:
            break
        if each.name.startswith("global_load"):
            offset = int(each.modifiers.partition("offset:")[2] or 0)
            for number, register in enumerate(registers(each.operands[0])):
                words[register] = offset + 4 * number
    return [words[register] for register in registers(reader.operands[operand])]


@needs_clang
def test_scales_come_with_the_operands_that_they_are_of() -> None:
    code = probes("gfx950")["multiplies_scaled"]
    (matrix,) = named(code, "v_mfma")
    assert matrix.name == MATRIX["gfx950"] and matrix.modifiers == "op_sel_hi:[0,0,0]"  # low bytes
    assert [origins_of(code, matrix, operand)[0] for operand in (1, 2, 4, 5)] == [
        0, 64 * 32, 0, 64 * 4
    ]  # fmt: skip


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_copies_are_complete_before_the_barrier(gpu: str) -> None:
    code = probes(gpu)["copies"]
    loads = named(code, "buffer_load")
    assert [each.name for each in loads] == ["buffer_load_dwordx4"] * 2
    order = [each.name for each in named(code, "buffer_load", "ds_write", "s_barrier", "ds_read")]
    puts = ["ds_write_b128"] * 2 if gpu == "gfx942" else []
    assert order == ["buffer_load_dwordx4"] * 2 + puts + ["s_barrier", "ds_read_b128"]
    assert unfinished_at_barriers(code) == []
    assert [past(each) for each in loads] == [gpu == "gfx950"] * 2
    if gpu == "gfx950":  # both from one base, which the second instruction shifts by a wave
        assert [each.modifiers for each in loads] == ["offen lds", "offen offset:1024 lds"]
        assert len([each for each in code if each.operands[:1] == ("m0",)]) == 1
    # Each lane gives its whole offset: none that all lanes share, whose bounds are in doubt.
    assert {each.operands[-1] for each in loads} == {"0"}
    assert 0x27000 in literals(code)


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_two_numbers_are_rounded_to_bfloat16_in_order(gpu: str) -> None:
    code = probes(gpu)["rounds"]
    if gpu == "gfx950":
        (conversion,) = named(code, "v_cvt")
        assert conversion.name == "v_cvt_pk_bf16_f32" and not conversion.modifiers
        assert [origins_of(code, conversion, operand) for operand in (1, 2)] == [[0], [4 * 64]]
        return
    assert not named(code, "v_cvt")
    assert len(named(code, "v_cmp_o_f32", "v_cmp_u_f32")) == 2  # NaN is seen in both
    assert {0x7FFF} <= literals(code) and {0x7FC0, 0x7FC00000} & literals(code)


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_a_barrier_waits_for_the_writes_of_threads(gpu: str) -> None:
    code = probes(gpu)["waits"]
    order = [each.name for each in named(code, "ds_", "s_barrier")]
    assert order == ["ds_write_b32", "s_barrier", "ds_read_b32"]
    assert unfinished_at_barriers(code) == []


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_lanes_16_apart_exchange_a_value(gpu: str) -> None:
    code = probes(gpu)["shuffles"]
    assert [each.name for each in named(code, "ds_")] == ["ds_bpermute_b32"]
    flips = [each for each in code if each.name in ("v_xor_b32", "v_bitop3_b32")]
    assert [4 * 16 in map(immediate, each.operands) for each in flips] == [True]  # bytes


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_roots_are_rounded_right_and_powers_are_of_two(gpu: str) -> None:
    code = probes(gpu)["computes"]
    assert len(named(code, "v_exp_f32")) == 1 and len(named(code, "v_sqrt_f32")) == 1
    assert len(named(code, "v_fma_f32")) >= 2  # both neighbors of what v_sqrt_f32 gives are tried


# --- what reads instructions

TEXT = """
two:                                    ; @two
	s_load_dword s4, s[0:1], 0x10
	v_mov_b32_e32 v1, 0x43700000
	v_mov_b32_e32 v2, s4                ; a scale
	global_load_dword v3, v0, s[2:3] offset:64
	v_mul_f32_e32 v4, s4, v3
	v_mul_f32_e32 v5, v2, v3
	v_mul_f32_e64 v6, v1, v3
	v_pk_mul_f32 v[4:5], v[4:5], v[2:3] op_sel_hi:[0,1]
	global_load_lds_dwordx4 v[2:3], off
	ds_write_b32 v0, v5
	s_waitcnt vmcnt(1) lgkmcnt(0)
	s_barrier
	s_waitcnt vmcnt(0)
	s_barrier
	s_endpgm
.Lfunc_end0:
"""


def test_operands_and_modifiers_are_read_apart() -> None:
    code = functions_of(TEXT)["two"]
    assert code[3] == Instruction("global_load_dword", ("v3", "v0", "s[2:3]"), "offset:64")
    assert code[7] == Instruction(
        "v_pk_mul_f32", ("v[4:5]", "v[4:5]", "v[2:3]"), "op_sel_hi:[0,1]"
    )  # fmt: skip
    assert literals(code) == {0x10, 0x43700000}
    assert [immediate(word) for word in ("1.0", "-4.0", "-16", "v1")] == [
        0x3F800000, 0xC0800000, 0xFFFFFFF0, None
    ]  # fmt: skip


def test_products_of_two_loads_are_found() -> None:
    code = functions_of(TEXT)["two"]
    assert [each.operands[0] for each in products_of_loads(code)] == ["v4", "v5"]
    assert [each.values for each in traced(code)][6] == [0x43700000, None]


def test_copies_unfinished_at_a_barrier_are_found() -> None:
    assert unfinished_at_barriers(functions_of(TEXT)["two"]) == ["global_load_lds_dwordx4"]
    behind = TEXT.replace("\tds_write", "\tglobal_load_dword v3, v0, s[2:3]\n\tds_write")
    assert unfinished_at_barriers(functions_of(behind)["two"]) == []


@needs_clang
@pytest.mark.parametrize("gpu", GPUS)
def test_products_of_24_bits_take_one_instruction(gpu: str) -> None:
    """Rows are less than 2^23 bytes apart; fewer bits would take a mask."""
    code = probes(gpu)["counts_bytes"]
    products = named(code, "v_mul_", "v_mad_")
    assert [(each.name, each.modifiers) for each in products] == [("v_mul_u32_u24", "")]
    assert not named(code, "v_and", "v_bfe")
