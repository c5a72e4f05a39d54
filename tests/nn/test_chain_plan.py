from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lokakern.nn.chain_plan import ChainLayer, ChainStep, plan_text, read_plan, steps_at
from lokakern.types import Granularity

GRANULARITIES = st.sampled_from(list(Granularity))
KERNELS = st.sampled_from(["cuda.gemm_norm_row", "cuda.quantize_row+cuda.gemm_norm_row"])
LAYERS = st.builds(
    ChainLayer,
    st.integers(1, 10_000),
    st.integers(1, 10_000),
    st.sampled_from(["none", "bias+relu", "bias+layer+affine", "bias+block_rms(256)+hardswish"]),
    st.floats(1e-12, 1.0),
    GRANULARITIES,
)
STEPS = st.builds(
    ChainStep, st.integers(0, 9), KERNELS, GRANULARITIES, GRANULARITIES, GRANULARITIES
)
SEGMENTS = st.lists(
    st.tuples(st.integers(1, 10**6), st.lists(STEPS, max_size=4).map(tuple)),
    max_size=4,
    unique_by=lambda segment: segment[0],
).map(lambda found: [(0, ()), *sorted(found)])


@given(st.lists(LAYERS, min_size=1, max_size=4), SEGMENTS, SEGMENTS)
def test_a_plan_is_read_as_it_was_written(layers, aligned, other):
    text = plan_text(layers, aligned, other)
    if not any(steps for _, steps in (*aligned, *other)):
        assert text == ""
        return
    assert read_plan(text) == (tuple(layers), tuple(aligned), tuple(other))


def test_steps_are_those_of_the_segment():
    layer = ChainLayer(512, 256, "bias+relu", 1e-5, Granularity.ROW)
    step = ChainStep(0, "a+b", Granularity.NONE, Granularity.ROW, Granularity.NONE)
    text = plan_text([layer], [(0, ()), (64, (step,)), (129, ())], [(0, ())])
    assert [steps_at(text, m) for m in (48, 64, 65, 128, 144)] == [(), (step,), (), (step,), ()]
