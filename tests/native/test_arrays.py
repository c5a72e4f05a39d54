"""Warm calls with CuPy's arrays are replayed in C++ as those with tensors, on CuPy's stream."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lokakern
from lokakern import arrays, jit
from lokakern.arrays import Library, QuantizedArray
from lokakern.driver import CudaLaunch
from lokakern.errors import FormatError, LaunchError, LokakernError
from lokakern.functional.checks import note_write
from lokakern.native import replayed
from lokakern.nvrtc import Program
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher
from lokakern.types import QuantizedTensor
from tests.functional.test_foreign_arrays import CALLS, OF_BFLOAT16, as_tensors, operands, same
from tests.support import cupy_like, native
from tests.support.cupy_like import Array, of_tensor, tensor_of
from tests.support.native import bits

M, N, K = 16, 8, 32
# `prepare_weight` is not replayed.
NAMES = [name for name in (*CALLS, *OF_BFLOAT16) if name != "prepared"]
# Python makes a number a tensor, and such a call is then replayed as one with tensors.
OF_NUMBERS = ("fp8", "gemm_norm fp8", "norm_quantize")


CALLED: list[str] = []  # functions of which Python made a call with arrays


@pytest.fixture(autouse=True)
def empty_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "user.sqlite"))
    dispatcher.use_snapshot(load_snapshot([]))
    yield
    dispatcher.use_snapshot(None)


@pytest.fixture(autouse=True)
def count_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    own = arrays.call

    def counted(function: Any, *given: Any) -> Any:
        CALLED.append(function.__name__)
        return own(function, *given)

    monkeypatch.setattr(arrays, "call", counted)


@pytest.fixture
def library() -> Iterator[Any]:
    with native.in_use() as module, cupy_like.served(module):
        yield module


def count(call: Callable[[], Any]) -> tuple[Any, int]:
    """A result, and how many calls Python made for it: none where all are replayed."""
    CALLED.clear()
    return call(), len(CALLED)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, torch.bfloat16) for name in NAMES),
    *((name, torch.float16) for name in ("gemm", "quantize", "both", "gemm_norm")),
])  # fmt: skip
def test_the_third_call_has_torchs_bits_without_python(
    name: str, dtype: torch.dtype, library: Any
) -> None:
    call = {**CALLS, **OF_BFLOAT16}[name]
    expected = bits(call(operands(dtype, same)))
    given = operands(dtype, of_tensor)
    made = [count(lambda: call(given)) for _ in range(4)]
    assert made[0][1] and bool(made[2][1]) == bool(made[3][1]) == (name in OF_NUMBERS)
    for result, _ in made:
        assert all(map(torch.equal, bits(as_tensors(result, Array, tensor_of)), expected))


def test_arrays_have_the_plans_of_tensors(library: Any) -> None:
    a, b = drawn(M, K), drawn(N, K).t()
    for _ in range(3):
        expected = lokakern.gemm(a, b)
    assert library.size() == 1
    y, calls = count(lambda: lokakern.gemm(of_tensor(a), of_tensor(b)))
    assert torch.equal(tensor_of(y), expected) and calls == 0 and library.size() == 1


def test_memory_is_shared_and_outputs_are_the_callers_own(library: Any) -> None:
    wide, base = drawn(M, 2 * K), torch.zeros(M, 2 * N, dtype=torch.bfloat16)
    x, w = of_tensor(wide[:, ::2]), of_tensor(drawn(N, K, seed=1))
    out = of_tensor(base[:, :N])
    for call in range(4):
        wide.mul_(-1)
        base.zero_()
        made, calls = count(lambda: lokakern.gemm(x, w.T, out=out))
        assert made is out and calls == (call < 2)
        assert torch.equal(base[:, :N], tensor_of(x) @ tensor_of(w).t())
        assert not base[:, N:].any()
    assert lokakern.gemm(x, w.T, out=None) is not out


def test_results_with_gaps_between_rows_are_told_by_strides(library: Any) -> None:
    for _ in range(4):
        made = gapped(of_tensor(drawn(M, K)))
    assert made.shape == (4, 5) and made.strides == (14, 2) and made.dtype == "bfloat16"
    assert made.data.mem.size == 3 * 14 + 5 * 2  # to the end of the last element


@replayed
def gapped(x: Tensor) -> Tensor:
    return torch.empty((4, 7), dtype=torch.bfloat16)[:, :5]


def test_results_outlive_operands_and_keep_their_memory(library: Any) -> None:
    a, b = drawn(M, K), drawn(N, K).t()
    expected = a @ b
    for _ in range(4):
        y = lokakern.gemm(of_tensor(a.clone()), of_tensor(b.clone()))
    z = y.T  # y may go, what shares its memory stays
    del y
    for _ in range(64):
        torch.full_like(expected, float("nan"))
    assert torch.equal(tensor_of(z).t(), expected)


@replayed
def detached(x: Tensor) -> Tensor:
    return x.detach()


@pytest.mark.parametrize("kind", ["view", "part"])
def test_an_operand_lives_as_long_as_results_in_its_memory(kind: str, library: Any) -> None:
    x = of_tensor(drawn(M, K))

    def call(scale: Array) -> Any:
        return detached(scale) if kind == "view" else lokakern.quantize(x, "tensor", scale=scale)

    for _ in range(3):
        scale = of_tensor(torch.full((1, 1), 0.5))
        made, calls = count(functools.partial(call, scale))
    assert calls == 0
    part = tensor_of(made) if kind == "view" else made.tensor.scale
    assert part.data_ptr() == scale.data.ptr
    gone = weakref.ref(scale)
    del scale
    gc.collect()
    assert gone() is not None and part.item() == 0.5
    del made, part
    gc.collect()
    assert gone() is None


def test_nothing_is_kept_of_other_calls(library: Any) -> None:
    w = of_tensor(drawn(K, N))
    for _ in range(4):
        x = of_tensor(drawn(M, K))
        lokakern.gemm(x, w)
        lokakern.quantize(x)
    before = [sys.getrefcount(y) for y in (x, w, w.data, "bfloat16", Array, arrays.QuantizedArray)]
    for _ in range(100):
        lokakern.gemm(x, w)
        lokakern.quantize(x)
    after = [sys.getrefcount(y) for y in (x, w, w.data, "bfloat16", Array, arrays.QuantizedArray)]
    assert after == before
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_one_array_in_two_places_is_one_tensor(library: Any) -> None:
    x = drawn(K, K)
    for _ in range(3):
        lokakern.gemm(of_tensor(x), of_tensor(x))
    before = library.size()
    square = of_tensor(x)
    y, calls = count(lambda: lokakern.gemm(square, square))
    assert calls == 0 and library.size() == before and torch.equal(tensor_of(y), x @ x)


# --- what Python has to take or to refuse, where a plan is there


def warmed() -> SimpleNamespace:
    """Operands of calls with plans."""
    a, w = drawn(M, K), drawn(N, K, seed=1)
    made = SimpleNamespace(
        x=of_tensor(a), b=of_tensor(w.t()), left=a, right=w.t(),
        q=lokakern.quantize(of_tensor(a)), qw=lokakern.quantize(of_tensor(w)).t(),
    )  # fmt: skip
    for _ in range(4):
        lokakern.gemm(made.x, made.b)
        lokakern.gemm(a=made.x, b=made.b)
        lokakern.quantize(made.x)
        lokakern.scaled_gemm(made.q, made.qw)
        lokakern.scaled_gemm(b=made.qw, a=made.q)
    return made


def backwards(x: Array) -> Array:
    last = (x.shape[0] - 1) * x.strides[0]
    place = cupy_like.Pointer(x.data.mem, last)
    return Array(x.shape, x.dtype, place, (-x.strides[0], x.strides[1]))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "negative strides": (lambda o: lokakern.gemm(backwards(o.x), o.b), "strides are"),
    "a tensor among arrays": (lambda o: lokakern.gemm(o.x, o.right), "pass arrays of one library"),
    "an array among tensors": (lambda o: lokakern.gemm(o.left, o.b), "b is Array"),
    "a tensor in a tuple": (
        lambda o: lokakern.scaled_gemm(o.q, o.qw, cross=(o.left, o.left)),
        "pass arrays of one library"),
    "quantized of another library": (
        lambda o: lokakern.scaled_gemm(o.q, QuantizedArray(
            o.qw.tensor, Library("other", lambda x: x, lambda x: x))), "pass arrays of one"),
    "an array among quantized tensors": (
        lambda o: lokakern.scaled_gemm(o.q.tensor, o.qw), "b is QuantizedArray"),
    "the same by names": (
        lambda o: lokakern.scaled_gemm(b=o.qw, a=o.q.tensor), "b is QuantizedArray"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_python_refuses_has_no_replay(name: str, library: Any) -> None:
    call, words = REFUSED[name]
    given = warmed()
    for _ in range(2):
        with pytest.raises(LokakernError, match=words):
            call(given)


def test_other_dtypes_are_left_to_python(library: Any) -> None:
    """An equal dtype may be another object, and one that C++ was not told of has no plan."""
    given = warmed()

    class Name(str):
        pass

    given.x.dtype = Name("bfloat16")
    assert count(lambda: lokakern.gemm(given.x, given.b))[1] == 0
    given.x.dtype = "float64"
    with pytest.raises(FormatError, match="cannot become a tensor"):
        lokakern.gemm(given.x, given.b)


def test_results_that_the_library_lacks_are_left_to_python() -> None:
    dtypes = [("float32", torch.float32)]
    a, b = torch.ones(M, K), torch.ones(K, N)
    with native.in_use() as module, cupy_like.served(module, dtypes=dtypes):
        for _ in range(4):
            y, calls = count(lambda: half(of_tensor(a)))
        assert calls == 1 and y.dtype == "bfloat16"
        for _ in range(4):
            _, calls = count(lambda: lokakern.gemm(of_tensor(a), of_tensor(b)))
        assert calls == 0


@replayed
def half(x: Tensor) -> Tensor:
    return x.bfloat16()


def test_arrays_without_elements_stay_in_python(library: Any) -> None:
    w = of_tensor(drawn(K, N))
    for _ in range(4):
        y, calls = count(lambda: lokakern.gemm(of_tensor(drawn(0, K)), w))
        assert y.shape == (0, N) and calls == 1


def test_quantized_tensors_multiply_arrays(library: Any) -> None:
    """Such as a weight that was loaded from a file: the first operand decides."""
    a, w = drawn(M, K), drawn(N, K, seed=1)
    weight = lokakern.quantize(w).t()
    expected = lokakern.scaled_gemm(lokakern.quantize(a), weight)
    x = of_tensor(a)
    for _ in range(4):
        y, calls = count(lambda: lokakern.scaled_gemm(lokakern.quantize(x), weight))
    assert calls == 0 and isinstance(y, Array) and torch.equal(tensor_of(y), expected)
    prepared = lokakern.prepare_weight(torch.nn.Parameter(w), 0.06, (1, 64))
    assert isinstance(prepared, QuantizedTensor)
    for _ in range(4):  # its source needs a gradient, the product of an array has none
        y = lokakern.gemm(x, prepared)
        assert isinstance(y, Array) and not tensor_of(y).requires_grad


def test_inference_mode_and_others_take_turns(library: Any) -> None:
    """Tensors of calls before are used again, but not those of another mode."""
    a, b = drawn(M, K), drawn(N, K).t()
    x, y, out = of_tensor(a), of_tensor(b), of_tensor(torch.empty(M, N, dtype=torch.bfloat16))

    def work() -> None:
        for call in range(8):
            with torch.inference_mode(call % 2 == 0):
                tensor_of(out).zero_()
                assert lokakern.gemm(x, y, out=out) is out
                assert torch.equal(tensor_of(out), a @ b)

    with ThreadPoolExecutor(1) as of_no_calls:  # a thread without tensors of calls before
        of_no_calls.submit(work).result()


def test_threads_have_their_own_tensors(library: Any) -> None:
    failures: list[str] = []
    right = drawn(N, K).t()

    def work(seed: int) -> None:
        a = drawn(M, K, seed=seed)
        x, b, expected = of_tensor(a), of_tensor(right), a @ right
        for _ in range(200):
            if not torch.equal(tensor_of(lokakern.gemm(x, b)), expected):
                failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- streams

CURRENT = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)
EXCHANGE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int)


class Streams:
    """torch's streams of a GPU by number, and the library's current one by handle."""

    def __init__(self, module: Any) -> None:
        self.module, self.torchs, self.librarys = module, 0, 0
        self.seen: list[str] = []
        self.entered: list[tuple[int, int]] = []
        self._functions = CURRENT(lambda _: self.torchs), EXCHANGE(self._exchange)

    def __enter__(self) -> Streams:
        addresses = [ctypes.cast(x, ctypes.c_void_p).value for x in self._functions]
        self.module.use_streams(*addresses)
        return self

    def __exit__(self, *_: object) -> None:
        self.module.use_streams(0, 0)

    def _exchange(self, number: int, _: int) -> int:
        before, self.torchs = self.torchs, number
        self.seen.append(f"enter {number}")
        return before

    def current(self, index: int) -> cupy_like.Stream:
        if self.librarys < 0:
            raise RuntimeError("no stream")
        return cupy_like.Stream(self.librarys)

    def enter(self, handle: int, index: int) -> torch.Stream:
        self.entered.append((handle, index))
        return torch.Stream(stream_id=handle, device_index=index, device_type=1)


class Seen(native.FakeDriver):
    """Notes launches among the streams that are entered."""

    def __init__(self, module: Any, streams: Streams) -> None:
        super().__init__(module)
        self.streams, self.parameter_count = streams, 2

    def _launch(self, *given: int) -> int:
        self.streams.seen.append("launch")
        return super()._launch(*given)


@replayed
def launching(x: Tensor, out: Tensor) -> Tensor:
    launch = CudaLaunch(Program("a.cu", "f"), pointers=2, scalars="", threads=64)
    if jit.recorder is not None:
        jit.recorder.launched(launch, (1, 1, 1), (x, out), (), (), 1234)
    note_write(out)
    return out


def test_calls_run_on_the_librarys_current_stream() -> None:
    x, out = (of_tensor(torch.ones(4)) for _ in range(2))
    with (
        native.in_use() as module,
        Streams(module) as streams,
        Seen(module, streams) as fake,
        cupy_like.served(module, current=streams.current, entered=streams.enter),
    ):
        for _ in range(3):
            launching(x, out=out)
        streams.seen.clear()
        fake.launches.clear()
        for librarys, expected in (
            (0, ["launch"]), (1, ["launch"]), (64, ["enter 64", "launch", "enter 0"]),
            (128, ["enter 128", "launch", "enter 0"]), (64, ["enter 64", "launch", "enter 0"]),
        ):  # fmt: skip
            streams.librarys = librarys
            made, calls = count(lambda: launching(x, out=out))
            assert made is out and calls == 0
            assert streams.seen == expected and streams.torchs == 0
            assert fake.launches.pop()[2] == [x.data.ptr, out.data.ptr]
            streams.seen.clear()
        assert streams.entered == [(64, 0), (128, 0)]  # a stream is asked for once
        streams.torchs, streams.librarys = 64, 0  # torch's is another one
        launching(x, out=out)
        assert streams.seen == ["enter 0", "launch", "enter 64"]
        streams.seen.clear()
        fake.failure = 7
        with pytest.raises(LaunchError, match="error 7"):
            launching(x, out=out)
        assert streams.seen == ["enter 0", "launch", "enter 64"]
        streams.librarys = -1
        with pytest.raises(RuntimeError, match="no stream"):
            launching(x, out=out)


def test_both_ways_to_meet_bind_cupys_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library is loaded before an array of CuPy is met, or after."""
    bound: list[str] = []
    monkeypatch.setattr(arrays, "_bind_cupy", lambda bind, made: bound.append(f"{bind} {made}"))
    monkeypatch.setattr(arrays, "_bind", None)
    monkeypatch.setattr(arrays, "_met", None)
    arrays.serve("first")  # type: ignore[arg-type]
    assert bound == []
    assert arrays._meet("cupy") == "cupy"  # type: ignore[arg-type,comparison-overlap]
    assert arrays._meet("again") == "cupy"  # type: ignore[arg-type,comparison-overlap]
    assert bound == ["first cupy"]
    arrays.serve("second")  # type: ignore[arg-type]
    assert bound == ["first cupy", "second cupy"]


def test_a_cupy_that_names_things_otherwise_is_left_to_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bind(*_: object) -> None:
        raise AttributeError("module 'cupy.cuda' has no attribute 'UnownedMemory'")

    monkeypatch.setattr(arrays, "_bind_cupy", bind)
    monkeypatch.setattr(arrays, "_bind", None)
    monkeypatch.setattr(arrays, "_met", None)
    arrays.serve("library")  # type: ignore[arg-type]
    assert arrays._meet("cupy") == "cupy"  # type: ignore[arg-type,comparison-overlap]
    arrays.serve("library")  # type: ignore[arg-type]
    assert [x.message for x in caplog.records] == [
        "calls with CuPy's arrays are made in Python, more slowly: module 'cupy.cuda' has no "
        "attribute 'UnownedMemory'"
    ] * 2


@replayed
def first_of(slices: list[Tensor], out: Tensor) -> Tensor:
    launching.__wrapped__(slices[0], out)  # type: ignore[attr-defined]
    return slices[0].detach()


def test_an_array_that_leaves_its_list_lives_as_long_as_a_result() -> None:
    """Another thread may change a list while a call waits for its launch."""
    out = of_tensor(torch.zeros(4))

    class Emptying(native.FakeDriver):
        def _launch(self, *given: int) -> int:
            slices.clear()
            return super()._launch(*given)

    with native.in_use() as module, cupy_like.served(module), Emptying(module) as fake:
        fake.parameter_count = 2
        for call in range(4):
            slices = [of_tensor(torch.full((4,), float(call)))]
            gone, address = weakref.ref(slices[0]), slices[0].data.ptr
            made, calls = count(functools.partial(first_of, slices, out=out))
        assert calls == 0 and not slices and made.data.ptr == address
        assert gone() is not None and tensor_of(made).tolist() == [3.0] * 4
        del made
        gc.collect()
        assert gone() is None
