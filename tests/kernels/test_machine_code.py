"""Small programs whose main loop and cycles are known."""

from __future__ import annotations

import pytest

from tests.support.machine_code import (
    assembly_of,
    blocks_of,
    cycles,
    main_loop,
    matrix_share,
    noted,
    resources,
)

FP8, BF16 = "v_mfma_f32_16x16x32_fp8_fp8", "v_mfma_f32_16x16x16_bf16"
NOTES = """
; Occupancy: 3
	.amdgpu_metadata
amdhsa.kernels:
  - .agpr_count:     32
    .group_segment_fixed_size: 0
    .max_flat_workgroup_size: 512
    .private_segment_fixed_size: 0
    .sgpr_count:     53
    .vgpr_count:     160
"""
LOOP = f"""
kernel:                                 ; @kernel
; %bb.0:
	s_load_dwordx2 s[0:1], s[2:3], 0x0
	{FP8} v[0:3], v[4:5], v[6:7], 0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	ds_read_b128 v[4:7], v8             ; v_mfma_ in a comment
	s_waitcnt lgkmcnt(0)
	{FP8} v[0:3], v[4:5], v[6:7], v[0:3]
	v_add_u32_e32 v8, 16, v8
	s_cbranch_scc1 .LBB0_1
; %bb.2:
	global_store_dwordx4 v[8:9], v[0:3], off
	s_endpgm
.Lfunc_end0:
"""
UNROLLED = f"""
kernel:
	{BF16} v[0:3], v[4:5], v[6:7], 0
.LBB0_1:
	v_add_u32_e32 v8, 16, v8
	s_cbranch_scc1 .LBB0_1
	{BF16} v[0:3], v[4:5], v[6:7], v[0:3]
	s_endpgm
"""
# The outer loop has more products than either of its inner ones, which differ.
NESTED = f"""
kernel:
.LBB0_1:
	s_nop 0
	{BF16} v[0:3], v[4:5], v[6:7], 0
.LBB0_2:
	{FP8} v[0:3], v[4:5], v[6:7], 0
	{FP8} v[0:3], v[4:5], v[6:7], 0
	s_cbranch_vccnz .LBB0_2
.LBB0_3:
	{FP8} v[0:3], v[4:5], v[6:7], 0
	s_cbranch_vccnz .LBB0_3
	s_cbranch_scc1 .LBB0_1
	s_endpgm
"""
# The loop is entered at its middle, a part of it comes first, and another jumps over a mask. The
# block at the end jumps back, but is in no loop.
MOVED = f"""
kernel:
	s_cbranch_execz .LBB0_9
	s_branch .LBB0_2
.LBB0_1:
	{FP8} v[0:3], v[4:5], v[6:7], 0
	s_cbranch_scc1 .LBB0_4
.LBB0_2:
	v_mov_b32_e32 v0, 0
	s_cbranch_execz .LBB0_3
	v_and_b32_e32 v0, v0, v1
.LBB0_3:
	s_branch .LBB0_1
.LBB0_4:
	{FP8} v[0:3], v[4:5], v[6:7], 0
	{FP8} v[0:3], v[4:5], v[6:7], 0
	s_endpgm
.LBB0_9:
	s_branch .LBB0_4
"""


def test_a_loop_goes_from_its_label_to_the_branch_back() -> None:
    assert main_loop(blocks_of(LOOP)) == [
        "ds_read_b128", "s_waitcnt lgkmcnt(0)", FP8, "v_add_u32_e32", "s_cbranch_scc1"
    ]  # fmt: skip


def test_the_innermost_loop_with_the_most_products_is_chosen() -> None:
    assert main_loop(blocks_of(NESTED)) == [FP8, FP8, "s_cbranch_vccnz"]


def test_loops_are_found_in_any_order_of_blocks() -> None:
    assert main_loop(blocks_of(MOVED)) == [
        FP8, "s_cbranch_scc1", "v_mov_b32_e32", "s_cbranch_execz", "v_and_b32_e32", "s_branch"
    ]  # fmt: skip


def test_products_that_are_unrolled_have_no_loop_and_no_share() -> None:
    assert main_loop(blocks_of(UNROLLED)) is None
    found = resources(UNROLLED + NOTES, "gfx942")
    assert (found["matrix"], found["matrix_share"]) == ({BF16: 2}, None)


def test_a_kernel_without_products_has_no_share() -> None:
    found = resources(
        LOOP.replace("v_mfma_f32_16x16x32_fp8_fp8", "v_mov_b32_e32") + NOTES, "gfx942"
    )
    assert (found["matrix"], found["matrix_share"]) == ({}, None)


DISASSEMBLY = f"""
0000000000001000 <kernel>:
	s_cbranch_scc0 label_0004                                  // 000000001000: BF840003
	{FP8} v[0:3], v[4:5], v[6:7], v[0:3]      // 000000001004: D3F30000 04020D04
	s_branch label_0000                                        // 00000000100C: BF82FFFC

0000000000001010 <label_0004>:
	v_mov_b32_e32 v0, 0x43700000                               // 000000001010: 7E0002FF 43700000
	s_endpgm                                                   // 000000001018: BF810000
"""


def test_branches_of_a_disassembly_go_where_their_encoding_says() -> None:
    blocks = blocks_of(assembly_of(DISASSEMBLY))
    assert [block.following for block in blocks if block.instructions] == [[2, 4], [1], []]
    assert main_loop(blocks) == ["s_cbranch_scc0", FP8, "s_branch"]


def test_the_share_is_of_the_cycles_in_the_loop() -> None:
    loop = main_loop(blocks_of(LOOP))
    assert loop is not None
    assert matrix_share(loop) == round(16 / (8 + 0 + 16 + 4 + 4), 3)
    found = resources(LOOP + NOTES, "gfx942")
    assert (found["matrix"], found["matrix_share"]) == ({FP8: 1}, 0.5)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        (FP8, 16),
        ("v_mfma_f32_16x16x32_bf8_fp8", 16),
        ("v_mfma_f32_32x32x16_fp8_fp8", 32),
        (BF16, 16),
        ("v_mfma_f32_32x32x8_bf16", 32),
        ("v_mfma_f32_32x32x8bf16_1k", 32),
        ("v_mfma_f32_16x16x32_bf16", 16),
        ("v_mfma_f32_32x32x16_bf16", 32),
        ("v_mfma_f32_16x16x128_f8f6f4", 32),
        ("v_mfma_scale_f32_16x16x128_f8f6f4", 32),
        ("v_mfma_f32_32x32x64_f8f6f4", 64),
        ("v_mfma_scale_f32_32x32x64_f8f6f4", 64),
        ("ds_read_b128", 8),
        ("ds_write2st64_b64", 8),
        ("ds_read_b64_tr_b8", 4),
        ("ds_read_u16_d16_hi", 4),  # no faster than it is issued
        ("ds_bpermute_b32", 4),
        ("buffer_load_dwordx4", 4),
        ("global_load_lds_dwordx4", 4),
        ("v_pk_fma_f32", 4),
        ("v_rcp_f32_e32", 16),
        ("v_rcp_iflag_f32_e32", 16),
        ("v_exp_f32_e32", 16),
        ("s_add_i32", 4),
        ("s_waitcnt", 0),
        ("s_barrier", 0),
        ("s_nop", 0),
        ("s_setprio", 0),
    ],
)
def test_cycles(instruction: str, expected: float) -> None:
    assert cycles(instruction) == expected


def test_a_matrix_instruction_without_a_known_rate_raises() -> None:
    with pytest.raises(ValueError, match="no rate is known of v_mfma_i32_16x16x32_i8"):
        cycles("v_mfma_i32_16x16x32_i8")


@pytest.mark.parametrize(
    ("gpu", "local_bytes", "waves", "expected"),
    [
        ("gfx942", 0, 8, 2),  # registers for 3 waves hold one block of 8
        ("gfx942", 0, 4, 3),
        ("gfx942", 20 << 10, 4, 3),
        ("gfx942", 40 << 10, 4, 1),
        ("gfx950", 40 << 10, 4, 3),
        ("gfx950", 60 << 10, 4, 2),
        ("gfx942", 40 << 10, 1, 1),
    ],
)
def test_waves_come_in_blocks_that_fit_registers_and_local_memory(
    gpu: str, local_bytes: int, waves: int, expected: int
) -> None:
    notes = NOTES.replace("size: 512", f"size: {64 * waves}")
    assert resources(LOOP + notes, gpu, local_bytes)["occupancy"] == expected


def test_notes_of_the_compiler_are_parsed() -> None:
    found = resources(LOOP + NOTES, "gfx942")
    assert (found["vector_registers"], found["accumulation_registers"]) == (160, 32)
    assert (found["scalar_registers"], found["local_bytes"], found["scratch_bytes"]) == (53, 0, 0)
    with pytest.raises(AssertionError):
        noted(LOOP, "Occupancy")
