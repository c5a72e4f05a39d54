"""Small programs whose time on a compute unit is known."""

from __future__ import annotations

import pytest

from tests.support.compute_unit import busy_share

FP8 = "v_mfma_f32_16x16x32_fp8_fp8"  # 16 cycles
READ = "ds_read_b128"  # 8 cycles of local memory, 128 until it is there
WAIT = "s_waitcnt lgkmcnt(0)"
LONG = 64  # turns of a program: what is before and behind them counts less


def share(program: list[str], *, waves: int = 4, blocks: int = 1) -> float:
    return busy_share([program * LONG] * waves, blocks)


def test_matrix_cores_that_wait_for_nothing_are_always_busy() -> None:
    assert share([FP8]) == 1.0
    assert share([FP8], waves=1) == 0.25  # of four


def test_other_instructions_of_a_wave_run_beside_a_matrix_instruction() -> None:
    assert share([FP8, *["v_mov_b32_e32"] * 3]) == 1.0
    assert share([FP8, *["v_mov_b32_e32"] * 7]) == pytest.approx(16 / 32, rel=0.01)
    assert share([FP8, "s_nop 4"]) == pytest.approx(16 / 24, rel=0.01)


def test_vector_instructions_of_a_simd_take_turns() -> None:
    program = [FP8, *["v_exp_f32_e32"] * 2]  # 4 and 32 cycles, of which two waves share neither
    assert share(program) == pytest.approx(16 / 36, rel=0.01)
    assert share(program, blocks=2) == pytest.approx(16 / 36, rel=0.01)


def test_a_wave_fills_what_another_waits() -> None:
    alone = share([READ, WAIT, FP8])
    assert alone == pytest.approx(16 / (128 + 4), rel=0.02)
    assert share([READ, WAIT, FP8], blocks=3) == pytest.approx(3 * alone, rel=0.05)


def test_local_memory_serves_one_wave_at_a_time() -> None:
    program = [*[READ] * 8, WAIT, FP8]  # 64 cycles of it for each wave of four SIMDs
    for blocks in (2, 4):
        assert share(program, blocks=blocks) == pytest.approx(16 / (4 * 64), rel=0.05)


@pytest.mark.parametrize(("load", "arrival"), [("buffer_load_dwordx4", 0), ("lds", 8)])
def test_data_pass_from_memory_at_its_rate(load: str, arrival: int) -> None:
    """And where they arrive in local memory, it serves nobody else."""
    load = "buffer_load_dwordx4 lds" if load == "lds" else load
    program = [load, "s_waitcnt vmcnt(0)", *[READ] * 8, WAIT, FP8]
    found = share(program, blocks=8)
    assert found == pytest.approx(16 / (4 * (64 + arrival)), rel=0.05)
    loads = [*[load] * 16, "s_waitcnt vmcnt(0)", FP8]  # 256 cycles for each wave
    assert share(loads, blocks=4) == pytest.approx(16 / (4 * 256), rel=0.05)


def test_a_barrier_waits_for_the_slowest_wave() -> None:
    slow = ["v_mov_b32_e32"] * 100
    waves = [["s_barrier", FP8] * LONG] * 3
    assert busy_share([[*slow, "s_barrier", FP8] * LONG, *waves], 1) == pytest.approx(
        16 / (400 + 4 + 4), rel=0.01
    )


def test_waves_that_differ_need_not_meet_at_the_end() -> None:
    """A block with a barrier more in one wave ends when the others have."""
    waves = [[FP8] * 10, [FP8] * 10, [FP8] * 10, ["s_barrier", *[FP8] * 10]]
    assert 0.4 < busy_share(waves, 1) < 0.6  # one after the three
