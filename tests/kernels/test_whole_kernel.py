"""Small programs whose cycles are known from the first instruction to the last."""

from __future__ import annotations

import pytest

from tests.support.whole_kernel import at_depths, whole_kernel

FP8 = "v_mfma_f32_16x16x32_fp8_fp8"
# The first branch is the wave's: the shorter way jumps. The last is its lanes': some store.
PROGRAM = f"""
kernel:
	s_load_dwordx2 s[0:1], s[2:3], 0x0
	s_cbranch_scc1 .LBB0_2
; %bb.1:
	v_mov_b32_e32 v0, 0
	v_mov_b32_e32 v1, 0
.LBB0_2:
	buffer_load_dwordx4 v[0:3], v8, s[0:3], 0 offen
	s_waitcnt vmcnt(0)
.LBB0_3:
	ds_read_b128 v[4:7], v8
	s_waitcnt lgkmcnt(0)
	{FP8} v[0:3], v[4:5], v[6:7], v[0:3]
	s_cbranch_scc1 .LBB0_3
; %bb.4:
	v_cmp_gt_i32_e32 vcc, s0, v0
	s_cbranch_execz .LBB0_6
; %bb.5:
	global_store_dwordx4 v[8:9], v[0:3], off
.LBB0_6:
	s_endpgm
"""
CYCLES = {
    "matrix": 4 * 16,
    "vector": 4,  # the comparison
    "scalar": 2 * 4 + 4 * 4 + 2 * 4,  # before the loop, in it, behind it
    "local": 4 * 8,
    "memory": 2 * 4,
}


@pytest.mark.parametrize("occupancy", [1, 2])
def test_each_instruction_on_the_way_counts_as_often_as_it_runs(occupancy: int) -> None:
    found = whole_kernel(PROGRAM, 4, occupancy)
    assert {kind: found[kind] for kind in CYCLES} == CYCLES
    assert found["share"] == round(64 / sum(CYCLES.values()), 3)


def test_a_wait_costs_what_the_latency_exceeds_the_work_of_all_waves() -> None:
    alone, two, eight = (whole_kernel(PROGRAM, 4, waves) for waves in (1, 2, 8))
    assert (alone["loop_waits"], alone["waits"]) == (4 * (128 - 8), 4 * 120 + 700 - 4)
    assert (two["loop_waits"], two["waits"]) == (4 * (64 - 8), 4 * 56 + 350 - 4)
    assert eight["loop_waits"] == 4 * (16 - 8)


def test_a_wait_for_all_but_the_last_leaves_those_on_their_way() -> None:
    """Two are read; after the first has come, the second lacks what it was issued later."""
    program = PROGRAM.replace(
        "\tds_read_b128 v[4:7], v8\n\ts_waitcnt lgkmcnt(0)\n",
        "\tds_read_b128 v[4:7], v8\n\tds_read_b128 v[4:7], v8\n\ts_waitcnt lgkmcnt(1)\n"
        "\ts_waitcnt lgkmcnt(0)\n",
    )
    assert whole_kernel(program, 4, 1)["loop_waits"] == 4 * (128 - 16 + 8)


def test_work_between_an_instruction_and_its_wait_hides_the_latency() -> None:
    shorter = whole_kernel(PROGRAM, 4, 1)["loop_waits"]
    busy = "\tv_mov_b32_e32 v9, 0\n" * 10
    program = PROGRAM.replace("\ts_waitcnt lgkmcnt(0)\n", f"{busy}\ts_waitcnt lgkmcnt(0)\n")
    assert whole_kernel(program, 4, 1)["loop_waits"] == shorter - 4 * 10 * 4


def test_products_outside_the_loop_take_turns_from_it() -> None:
    program = PROGRAM.replace("; %bb.4:\n", f"; %bb.4:\n\t{FP8} v[0:3], v[4:5], v[6:7], v[0:3]\n")
    found = whole_kernel(program, 4, 1)
    assert (found["matrix"], found["local"]) == (4 * 16, 3 * 8)


def test_products_follow_from_the_tile_and_the_depth() -> None:
    """Two waves make 32 x 32 sums: two of 16 x 16 each, for 32 of k at a time."""
    found = at_depths(PROGRAM, (32, 32), 2, 1)
    assert (found["tile"], found["waves"]) == ([32, 32], 2)
    assert {k: whole["matrix"] for k, whole in found["whole"].items()} == {
        f"k={k}": k // 32 * 2 * 16 for k in (256, 1024, 4096)
    }


# Behind the loop: a whole wave stores, or jumps over it, as where a tile has no rows.
TAIL = PROGRAM.replace("s_cbranch_execz .LBB0_6", "s_cbranch_scc1 .LBB0_6")


def test_ways_that_leave_outputs_out_are_not_counted() -> None:
    assert whole_kernel(TAIL, 4, 1)["memory"] == 4
    assert whole_kernel(TAIL, 4, 1, stored=16)["memory"] == 2 * 4
    with pytest.raises(ValueError, match="none from it converts and stores enough"):
        whole_kernel(TAIL, 4, 1, stored=17)


def test_ways_between_both_sides_of_a_branch_are_not_counted() -> None:
    """The condition is tested twice: no wave jumps over both conversions."""
    one, other = (
        f"\ts_cbranch_scc1 .LBB0_{n}\n; %bb.{n}:\n{before}\tv_cvt_pk_fp8_f32 v0, v0, v1\n"
        f".LBB0_{n}:\n"
        for n, before in ((7, ""), (8, "\tv_mov_b32_e32 v0, 0\n"))
    )
    program = TAIL.replace(".LBB0_6:\n", f".LBB0_6:\n{one}{other}")
    least = whole_kernel(program, 4, 1)["vector"]
    assert whole_kernel(program, 4, 1, converted=2)["vector"] == least + 4
    assert whole_kernel(program, 4, 1, converted=4)["vector"] == least + 3 * 4


def test_what_cannot_be_counted_raises() -> None:
    twice = f"\t{FP8} v[0:3], v[4:5], v[6:7], v[0:3]\n" * 2
    program = PROGRAM.replace("; %bb.4:\n", f"; %bb.4:\n{twice}")
    with pytest.raises(ValueError, match="turns of 1 products and 2 outside do not make 1"):
        whole_kernel(program, 1, 1)
    with pytest.raises(ValueError, match="no loop holds matrix instructions"):
        whole_kernel(PROGRAM.replace("s_cbranch_scc1 .LBB0_3", "s_nop 0"), 4, 1)
