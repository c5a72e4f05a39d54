"""Recorded launches: addresses, scalars, tensor maps, scratch; and damaged plans."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lokakern import driver, jit
from lokakern.driver import CudaLaunch, TensorMap, _maps
from lokakern.errors import LaunchError
from lokakern.functional.checks import note_write
from lokakern.native import replayed
from lokakern.native.record import Recorder, result_template
from lokakern.nvrtc import Program
from tests.support import native

FUNCTION = 0x1234_5678


@pytest.fixture
def library() -> Iterator[Any]:
    with native.in_use() as module, torch.no_grad():
        yield module


def launch_of(scalars: str, pointers: int = 3, maps: int = 0, **options: Any) -> CudaLaunch:
    return CudaLaunch(Program("a.cu", "f"), pointers=pointers, scalars=scalars, threads=64,
                      tensor_maps=maps, **options)  # fmt: skip


def tell(
    launch: CudaLaunch,
    grid: tuple[int, int, int],
    pointers: tuple[Tensor, ...],
    scalars: tuple[int, ...],
    maps: tuple[TensorMap, ...] = (),
) -> None:
    """What a launch on a GPU tells."""
    if jit.recorder is not None:
        jit.recorder.launched(launch, grid, pointers, scalars, maps, FUNCTION)


def test_addresses_are_those_of_each_call(library: Any) -> None:
    launch = launch_of("iq", shared_bytes=512, programmatic=True)

    @replayed
    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        out, workspace = torch.empty(8, 8), torch.empty(64)
        column = torch.empty_strided((8, 1), (1, 1))
        tell(launch, (5, 1, 2), (x[2:], out, workspace[16:]), (7, -3))
        tell(launch, (1, 1, 1), (x, column, workspace), (8, 4))
        return out, column

    with native.FakeDriver(library) as fake:
        fake.parameter_count = 5
        for _ in range(3):
            x = torch.empty(16, 4)
            out, column = call(x)
    (shape, function, values), (_, _, later) = fake.launches
    assert shape == (5, 1, 2, 64, 1, 1, 512) and function == FUNCTION
    assert values[0] == x.data_ptr() + 32 and values[1] == out.data_ptr()
    assert values[2] == later[2] + 64 and values[3] & 0xFFFFFFFF == 7
    assert values[4] == 2**64 - 3 and later[:2] == [x.data_ptr(), column.data_ptr()]
    assert out.shape == (8, 8) and column.stride() == (1, 1)


def test_writes_to_an_argument_change_its_version(library: Any) -> None:
    launch = launch_of("i", pointers=2)

    @replayed
    def call(x: Tensor, out: Tensor) -> Tensor:
        tell(launch, (1, 1, 1), (x, out), (1,))
        note_write(out)
        return out

    with native.FakeDriver(library) as fake:
        fake.parameter_count = 3
        x, out = torch.empty(4), torch.empty(4)
        versions = []
        for _ in range(4):
            before = out._version
            assert call(x, out) is out
            versions.append((out._version - before, x._version))
        assert versions == [(1, 0)] * 4 and len(fake.launches) == 2
        with torch.enable_grad():  # autograd refuses what was overwritten
            w = torch.ones(4, requires_grad=True)
            loss = (w * out).sum()
        call(x, out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            given = torch.empty(4)
            for _ in range(3):
                assert call(x, given) is given
    assert library.size() == 1


def test_tensor_maps_follow_their_tensors(library: Any) -> None:
    launch = launch_of("i", pointers=1, maps=1)

    @replayed
    def call(x: Tensor) -> Tensor:
        out = torch.empty(1)
        made = TensorMap()
        _maps[x.data_ptr(), x.shape, x.stride(), x.dtype, (8, 16), 32] = made
        tell(launch, (1, 1, 1), (out,), (1,), (made,))
        return out

    with native.FakeDriver(library) as fake:
        fake.parameter_count = 3
        given_ = [torch.empty(32, 16) for _ in range(12)]
        for x in [given_[0], *given_, *given_[-8:]]:
            call(x)
    maps = [values[2] - 1 for _, _, values in fake.launches]
    assert maps == [x.data_ptr() for x in (*given_[1:], *given_[-8:])]
    assert fake.encoded == [x.data_ptr() for x in given_[1:]]  # the last eight are kept


def test_a_call_is_recorded_where_few_tensor_maps_can_be_kept(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second map of the call would have been one too many, and the first one forgotten."""
    launch = launch_of("i", pointers=1, maps=2)
    monkeypatch.setattr(driver, "_encode", lambda *_: TensorMap())
    monkeypatch.setattr(driver, "_maps", {})

    @replayed
    def call(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty(1)
        maps = tuple(driver.tensor_map(z, (8, 16), 32) for z in (x, y))
        tell(launch, (1, 1, 1), (out,), (1,), maps)
        return out

    tensors = [torch.empty(32, 16) for _ in range(6)]  # all at once: of different addresses
    with native.FakeDriver(library) as fake:
        fake.parameter_count = 4
        for number in range(3):
            missing = driver._MOST_MAPS - 1 - len(driver._maps)
            driver._maps.update({(number, i): TensorMap() for i in range(missing)})
            call(*tensors[2 * number : 2 * number + 2])
    assert len(fake.launches) == 1  # the third call is replayed


@pytest.mark.parametrize("value", [0.0, 1.5, -2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_memory_is_filled_as_torch_fills_it(library: Any, value: float, dtype: torch.dtype) -> None:
    value = abs(round(value)) if dtype is torch.uint8 else value

    @replayed
    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full((4, 4), value, dtype=dtype), torch.zeros(8, dtype=dtype)

    for _ in range(3):
        full, zeros = call(torch.empty(2))
    assert library.size() == 1 and not zeros.any()
    assert torch.equal(full, torch.full((4, 4), value, dtype=dtype))


def test_a_refused_launch_raises(library: Any) -> None:
    launch = launch_of("i", pointers=1)

    @replayed
    def call(x: Tensor) -> Tensor:
        tell(launch, (3, 1, 1), (x,), (1,))
        return x

    with native.FakeDriver(library) as fake:
        fake.parameter_count = 2
        x = torch.empty(4)
        assert call(x) is x and call(x) is x and call(x) is x
        fake.failure = 1
        with pytest.raises(LaunchError, match=r"grid 3x1x1, 64 threads, 0 bytes .*: error 1"):
            call(x)


def record(body: Any, *inputs: Tensor) -> Recorder:
    with Recorder(inputs, native.library().dtype_code) as recorder:
        result = body(recorder, *inputs)
    result_template(result, recorder)
    return recorder


def test_what_cannot_be_replayed_is_refused(library: Any) -> None:
    launch, elsewhere = launch_of("i", pointers=1), torch.empty(4)
    x = torch.randn(4, 4)

    def tells(recorder: Recorder, x: Tensor) -> None:
        recorder.launched(launch, (1, 1, 1), (elsewhere,), (1,), (), FUNCTION)

    assert "neither an argument" in str(record(tells, x).reason)
    assert record(lambda _, x: x.exp().to(torch.bfloat16, copy=True), x).reason is None
    assert record(lambda _, x: torch.rand_like(x), x).reason == "calls aten::rand_like"
    assert record(lambda _, x: x + torch.tensor(2.0), x).reason is not None
    assert record(lambda _, x: x.clone().resize_(2), x).reason == "calls aten::resize_"
    assert record(lambda _, x: x[x > 0], x).recording() is None
    assert record(lambda _, x: x.to("meta"), x).recording() is None
    assert record(lambda _, x: x.sum().item(), x).recording() is None
    for allocate in (torch.empty, torch.zeros):
        on_meta = record(lambda _, x, make=allocate: make(4, device="meta"), x)
        assert on_meta.reason == "allocates on meta"
    assert "part of its memory" in str(record(lambda _, x: torch.empty(8)[4:], x).reason)
    assert record(lambda _, x: [x], x).reason == "returns list"
    overlapping = x.view(-1)[4:]
    assert record(lambda _, x, y: x.view(-1)[6:], x, overlapping).reason is not None


def test_an_operator_that_returns_something_else_is_noticed(library: Any) -> None:
    """Else its memory would be read as what was recorded, up to another end."""
    call = replayed(lambda x: x / 2)
    x = torch.arange(8)
    for _ in range(3):
        assert call(x).dtype is torch.float32
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(
            LaunchError, match=r"aten::div.* returned 16 bytes; it returned 32 when"
        ):
            call(x)
    finally:
        torch.set_default_dtype(torch.float32)


def test_launches_of_other_threads_are_not_recorded(library: Any) -> None:
    launch = launch_of("i", pointers=1)

    def body(recorder: Recorder, x: Tensor) -> Tensor:
        arguments = (launch, (1, 1, 1), (torch.empty(4),), (1,), (), FUNCTION)
        thread = threading.Thread(target=recorder.launched, args=arguments)
        thread.start()
        thread.join()
        return x

    recorder = record(body, torch.empty(4))
    assert recorder.reason is None and not recorder._steps


def plan_text() -> bytes:
    def body(recorder: Recorder, x: Tensor) -> Tensor:
        out, made = torch.empty(8, 8), TensorMap()
        _maps[x.data_ptr(), x.shape, x.stride(), x.dtype, (8, 8), 32] = made
        launch = launch_of("i", pointers=2, maps=1)
        recorder.launched(launch, (1, 1, 1), (x, out), (3,), (made,), FUNCTION)
        torch.mm(x, x, out=out)
        return out.zero_()

    recording = record(body, torch.empty(8, 8)).recording()
    assert recording is not None
    return recording.text()


@given(
    place=st.integers(0, 200),
    number=st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-4, 70)),
    cut=st.one_of(st.none(), st.integers(0, 1600)),
)
def test_damaged_plans_are_refused_or_harmless(place: int, number: int, cut: int | None) -> None:
    """Reading never fails in another way than with a reason."""
    library, text = native.library(), bytearray(plan_text())
    at = 8 * place % len(text) // 8 * 8
    text[at : at + 8] = number.to_bytes(8, "little", signed=True)
    try:
        library.install(bytes(16), bytes(text[:cut]), 0, False, [], ("tensor", 0))
    except (ValueError, RuntimeError) as error:
        assert str(error)
    finally:
        library.clear()


def test_a_result_in_the_place_of_an_argument_is_refused(library: Any) -> None:
    recording = record(lambda _, x: x.exp(), torch.empty(4)).recording()
    assert recording is not None
    text = recording.text()
    # The argument's stride, one result of the operator, in buffer 1; one result of the plan.
    at = text.index(struct.pack("<4q", 1, 1, 1, 1), text.index(b"aten::exp"))
    library.install(bytes(16), text, 0, False, [], ("tensor", 0))
    damaged = text[:at] + struct.pack("<4q", 1, 1, 0, 1) + text[at + 32 :]
    with pytest.raises(ValueError, match="an operator returns memory of something else"):
        library.install(bytes(16), damaged, 0, False, [], ("tensor", 0))


def test_a_cut_plan_is_refused(library: Any) -> None:
    text = plan_text()
    with pytest.raises(ValueError, match="cut off"):
        library.install(bytes(16), text[:-8], 0, False, [], ("tensor", 0))
    with pytest.raises(ValueError, match="8 bytes follow"):
        library.install(bytes(16), text + bytes(8), 0, False, [], ("tensor", 0))
