"""Arrays of other libraries as operands: torch's bits, no copy, the caller's stream, plain errors.

NumPy and a library made for tests take the routes of DLPack on a CPU; CuPy, JAX and objects with
``__cuda_array_interface__`` only need a GPU.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import lokakern
from lokakern import arrays
from lokakern.arrays import QuantizedArray
from lokakern.errors import DeviceError, FormatError, LokakernError, ShapeError, UnsupportedError
from lokakern.native import replay
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher
from lokakern.types import QuantizedTensor
from tests.support import native
from tests.support.native import bits
from tests.support.other_library import Array, tensor_of

M, N, K = 33, 32, 256
Convert = Callable[[Tensor], Any]


@pytest.fixture(autouse=True)
def empty_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "user.sqlite"))
    monkeypatch.setattr(arrays, "_LIBRARIES", {})
    dispatcher.use_snapshot(load_snapshot([]))
    yield
    dispatcher.use_snapshot(None)


def drawn(dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Operands of `CALLS`, the same in each call."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"x": (M, K), "w": (N, K), "bias": (N,), "residual": (M, N), "scale": (1, 1)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["scale"] = made["scale"].abs()
    made["x"][3] = float("nan")
    kept = ("scale",)
    return {
        name: (x if name in kept else x.to(dtype)).to(device).contiguous()
        for name, x in made.items()
    }


def turned(x: Any) -> Any:
    return Array(tensor_of(x).t()) if isinstance(x, Array) else x.T


CALLS: dict[str, Callable[[Any], Any]] = {
    "gemm": lambda o: lokakern.gemm(o.x, turned(o.w), budget=0.06, bias=o.bias),
    "row-major": lambda o: lokakern.gemm(o.x, o.right, budget=0.06),
    "gemm by names": lambda o: lokakern.gemm(b=turned(o.w), a=o.x),
    "prepared": lambda o: lokakern.gemm(o.x, lokakern.prepare_weight(o.w, 0.06, (1, 64))),
    "quantize": lambda o: lokakern.quantize(o.x),
    "1x32": lambda o: lokakern.quantize(o.x, "1x32"),
    "static": lambda o: lokakern.quantize(o.x, "tensor", scale=o.scale),
    "transposed": lambda o: lokakern.quantize(turned(o.x)),
    "both": lambda o: lokakern.quantize_transpose(o.x, "1x128", column_sums=True),
    "scaled_gemm": lambda o: lokakern.scaled_gemm(
        lokakern.quantize(o.x), lokakern.quantize(o.w).t()),
    "slices": lambda o: lokakern.scaled_gemm(
        [lokakern.quantize(o.x, "1x128"), lokakern.quantize(o.x, "1x128")],
        lokakern.quantize(o.wide, "128x128").t()),
    "fp8": lambda o: lokakern.scaled_gemm(
        lokakern.quantize(o.x), lokakern.quantize(o.w).t(), out_scale=0.05),
    "dequantize": lambda o: lokakern.dequantize(lokakern.quantize(o.x).t()),
}  # fmt: skip
OF_BFLOAT16: dict[str, Callable[[Any], Any]] = {
    "cross": lambda o: lokakern.scaled_gemm(
        lokakern.quantize(o.x), lokakern.quantize(o.w).t(), cross=(o.residual, o.residual)),
    "gemm_norm": lambda o: lokakern.gemm_norm(
        o.x, turned(o.w), norm="layer", bias=o.bias, residual=o.residual),
    "gemm_norm fp8": lambda o: lokakern.gemm_norm(
        o.x, turned(o.w), norm="rms", norm_weight=o.bias, out_scale="static"),
    "norm_quantize": lambda o: lokakern.norm_quantize(o.x, norm="rms", out_scale=0.1,
                                                      granularity="tensor"),
}  # fmt: skip


def operands(dtype: torch.dtype, convert: Convert, device: str = "cpu") -> SimpleNamespace:
    made = drawn(dtype, device)
    made["wide"] = torch.cat([made["w"], made["w"]], 1)
    made["right"] = made["w"].t().contiguous()  # JAX's transposes are copies
    return SimpleNamespace(**{name: convert(x) for name, x in made.items()})


def same(x: Tensor) -> Tensor:
    return x


def as_tensors(result: Any, kind: type, back: Convert) -> Any:
    """A result in torch, after a test that all of it is of the caller's kind."""
    if isinstance(result, tuple):
        return tuple(as_tensors(item, kind, back) for item in result)
    if isinstance(result, QuantizedArray):
        assert isinstance(result.data, kind) and isinstance(result.scale, kind)
        data = back(result.data)
        assert data.data_ptr() == result.tensor.data.data_ptr()
        if result.tensor.scale.itemsize > 1:  # type: ignore[union-attr]
            assert torch.equal(back(result.scale), result.tensor.scale)  # type: ignore[arg-type]
        assert torch.equal(data, result.tensor.data.view(torch.uint8))
        return result.tensor
    assert isinstance(result, kind)
    return back(result)


def assert_torchs_bits(
    call: Callable[[Any], Any], dtype: torch.dtype, kind: type, to: Convert, back: Convert,
    device: str = "cpu",
) -> None:  # fmt: skip
    expected = call(operands(dtype, same, device))
    found = as_tensors(call(operands(dtype, to, device)), kind, back)
    assert isinstance(found, type(expected))
    assert all(map(torch.equal, bits(found), bits(expected)))


@pytest.mark.parametrize("name", [*CALLS, *OF_BFLOAT16])
def test_results_of_a_library_have_torchs_bits(name: str) -> None:
    call = {**CALLS, **OF_BFLOAT16}[name]
    assert_torchs_bits(call, torch.bfloat16, Array, Array, tensor_of)


@pytest.mark.parametrize("name", CALLS)
def test_results_of_numpy_have_torchs_bits(name: str) -> None:
    if name in ("scaled_gemm", "slices", "dequantize"):
        pytest.importorskip("ml_dtypes")  # their results are bfloat16
    assert_torchs_bits(CALLS[name], torch.float32, numpy.ndarray, Tensor.numpy, of_numpy)


@pytest.mark.parametrize("name", [*CALLS, *OF_BFLOAT16])
def test_bfloat16_of_numpy_is_that_of_ml_dtypes(name: str) -> None:
    pytest.importorskip("ml_dtypes")
    call = {**CALLS, **OF_BFLOAT16}[name]
    assert_torchs_bits(call, torch.bfloat16, numpy.ndarray, arrays._numpy().give, of_numpy)


def of_numpy(x: Any) -> Tensor:
    is_bfloat16 = x.dtype.name == "bfloat16"
    return torch.from_numpy(x.view("uint16")).view(torch.bfloat16) if is_bfloat16 else (
        torch.from_numpy(x))  # fmt: skip


def test_operands_and_outputs_share_memory() -> None:
    x, w = numpy.ones((M, K), numpy.float32), numpy.ones((N, K), numpy.float32)
    library = arrays._library_of("gemm", x)
    assert library is not None
    assert arrays._tensor("gemm", library, x[:, ::2]).data_ptr() == x.ctypes.data
    out = numpy.zeros((M, 2 * N), numpy.float32)[:, :N]
    assert lokakern.gemm(x, w.T, out=out) is out and (out == K).all()
    y = lokakern.gemm(x, w.T)
    y += 1  # results can be written
    amax = numpy.zeros(1, numpy.float32)
    lokakern.quantize(-2 * x, "tensor", scale=numpy.ones(1, numpy.float32), amax=amax)
    assert amax == 2


def test_an_operand_is_asked_for_once() -> None:
    x, w = Array(torch.ones(M, K)), Array(torch.ones(K, N))
    y = lokakern.gemm(x, w)
    assert x.exports == w.exports == 1
    assert (tensor_of(y) == K).all()


def test_rows_of_none_and_read_only_operands() -> None:
    empty, w = numpy.ones((0, K), numpy.float32), numpy.ones((N, K), numpy.float32)
    w.flags.writeable = False
    assert lokakern.gemm(empty, w.T).shape == (0, N)
    assert lokakern.quantize(empty).data.shape == (0, K)
    assert (lokakern.gemm(numpy.ones((1, K), numpy.float32), w.T) == K).all()


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


X, W = numpy.ones((4, 16), numpy.float32), numpy.ones((16, 8), numpy.float32)
REFUSED: dict[str, tuple[Callable[[], Any], type[LokakernError], str]] = {
    "float64": (lambda: lokakern.gemm(X.astype(float), W.astype(float)), FormatError, "float64"),
    "integers": (lambda: lokakern.quantize(X.astype(int)), FormatError, "int64"),
    "words": (lambda: lokakern.quantize(X.astype(">f4")), FormatError,
              "numpy.ndarray of >f4, which cannot become a tensor .*native byte order"),
    "objects": (lambda: lokakern.quantize(X.astype(object)), FormatError, "cannot become a tensor"),
    "shapes": (lambda: lokakern.gemm(X, W.T), ShapeError, r"b must be \[16, n\]"),
    "backwards": (lambda: lokakern.gemm(X[::-1], W), FormatError, "no negative ones: pass a copy"),
    "masked": (lambda: lokakern.gemm(numpy.ma.masked_array(X, X > 0), W), FormatError,
               r"mask is lost: pass .filled\(0\)"),
    "three axes": (lambda: lokakern.gemm(X[None], W), ShapeError, "two dimensions"),
    "mixed": (lambda: lokakern.gemm(X, torch.ones(16, 8)), FormatError, "arrays of one library"),
    "mixed kinds": (lambda: lokakern.gemm(X, Array(torch.ones(16, 8))), FormatError,
                    "other_library.Array of float32, and the first is of numpy; pass arrays of"),
    "a tensor first": (lambda: lokakern.gemm(torch.ones(4, 16), W), FormatError, "b is ndarray"),
    "read-only output": (
        lambda: lokakern.gemm(X, W, out=read_only(numpy.zeros((4, 8), numpy.float32))),
        FormatError, "out is a numpy.ndarray of float32 that is read-only"),
    "budget": (lambda: lokakern.gemm(X, W, budget=numpy.ones(2)), LokakernError, "budget"),
    "no operand": (lambda: lokakern.gemm(None, W), FormatError, "a is NoneType; expected a torch"),
    "empty list": (lambda: lokakern.gemm([], W), FormatError, "a is list; expected a torch"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_told(name: str) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call()


class OfInterface:
    """An object with the older interface only."""

    def __init__(self, x: Any) -> None:
        self._x = x

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._x.__cuda_array_interface__


def test_a_torch_for_cpus_is_told_before_arrays_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(DeviceError, match=r"on a GPU that torch .* does not use \(Torch not comp"):
        lokakern.gemm(OfInterface(None), OfInterface(None))


def test_a_missing_cupy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of what cannot say how it takes arrays are CuPy's."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    arrays._cupy.cache_clear()
    with pytest.raises(UnsupportedError, match=r"CuPy is missing: pip install '\.\[cupy\]'"):
        lokakern.gemm(OfInterface(None), OfInterface(None))


def test_a_result_that_a_library_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(FormatError, match=r"result is torch.bfloat16, which numpy .* ml_dtypes"):
        lokakern.dequantize(lokakern.quantize(X))


def test_numba_gets_its_own_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("numba.cuda")
    module.as_cuda_array = lambda made: ("numba", made)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "numba.cuda", module)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    arrays._numba.cache_clear()
    kind = type("DeviceNDArray", (OfInterface,), {"__module__": "numba.cuda.cudadrv.devicearray"})
    library = arrays._library_of("gemm", kind(None))
    assert library is not None and library.give(torch.ones(2))[0] == "numba"
    arrays._numba.cache_clear()


def test_handles_of_streams_become_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 and 1 are the default stream; torch's current one is not entered again."""
    current = 7
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current, raising=False)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: ("default", index))
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda handle, device: ("external", handle, device)
    )
    arrays._entered.cache_clear()
    assert arrays._stream(7, 0) is None
    assert arrays._stream(0, 1) == arrays._stream(1, 1) == ("default", 1)
    assert arrays._stream(9, 0) == ("external", 9, 0)
    current = 0
    assert arrays._stream(0, 0) is arrays._stream(1, 0) is None
    arrays._entered.cache_clear()


def test_operands_and_results_are_converted_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @contextmanager
    def entered(stream: str) -> Iterator[None]:
        seen.append(f"enter {stream}")
        yield
        seen.append(f"leave {stream}")

    def take(x: Array) -> Tensor:
        seen.append("take")
        return tensor_of(x)

    def give(made: Tensor) -> Array:
        seen.append("give")
        return Array(made)

    monkeypatch.setattr(torch.cuda, "stream", entered)
    library = arrays.Library("tests", take, give, lambda x: "side")  # type: ignore[arg-type,return-value]
    monkeypatch.setitem(arrays._LIBRARIES, Array, library)
    x, w = Array(torch.ones(M, K)), Array(torch.ones(K, N))
    assert (tensor_of(lokakern.gemm(x, w)) == K).all()
    assert seen == ["enter side", "take", "take", "give", "leave side"]
    with pytest.raises(ShapeError):
        lokakern.gemm(x, x)


def test_a_result_that_needs_a_gradient_is_detached() -> None:
    weight = torch.nn.Parameter(torch.ones(N, K))
    y = lokakern.gemm(Array(torch.ones(M, K)), lokakern.prepare_weight(weight, 0.06, (1, 64)))
    assert (tensor_of(y) == K).all() and not tensor_of(y).requires_grad


@pytest.mark.parametrize("replays", [False, True])
def test_calls_with_tensors_enter_nothing_for_arrays(replays: bool) -> None:
    """The file is not entered, and the wrapper calls what it called before."""
    given = operands(torch.bfloat16, same)
    entered: set[str] = set()

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    calls = [call for name, call in {**CALLS, **OF_BFLOAT16}.items()
             if name not in ("prepared", "slices")]  # fmt: skip
    with native.in_use() if replays else pytest.MonkeyPatch.context():
        for _ in range(3):
            sys.setprofile(see)
            try:
                for call in calls:
                    call(given)
            finally:
                sys.setprofile(None)
    assert entered and arrays.__file__ not in entered


# --- on a GPU


def of_cupy(x: Any) -> Tensor:
    made: Tensor = torch.from_dlpack(x)
    return made


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="needs a GPU of a machine with it")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in (*CALLS, *OF_BFLOAT16)]
    + [(name, torch.float32) for name in CALLS],
    ids=str,
)
def test_results_of_cupy_have_torchs_bits(name: str, dtype: torch.dtype, cupy: Any) -> None:
    pytest.importorskip("ml_dtypes", reason="needs a GPU of a machine with it")
    call = {**CALLS, **OF_BFLOAT16}[name]
    with native.in_use():
        for _ in range(3):  # in Python, recorded, replayed
            assert_torchs_bits(call, dtype, cupy.ndarray, cupy.from_dlpack, of_cupy, "cuda")


def misses(call: Callable[[], Any]) -> tuple[Any, int]:
    """A result, and how many calls of public functions had no replay."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        own = replay.NATIVE.replay
        assert own is not None
        patch.setattr(replay.NATIVE, "replay", lambda *x: found.append(own(*x)) or found[-1])
        return call(), sum(x is None or type(x) is bytes for x in found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [x for x in (*CALLS, *OF_BFLOAT16) if x != "prepared"])
def test_warm_calls_with_cupy_are_replayed_as_those_with_tensors(name: str, cupy: Any) -> None:
    pytest.importorskip("ml_dtypes", reason="needs a GPU of a machine with it")
    call = {**CALLS, **OF_BFLOAT16}[name]
    of_torch = operands(torch.bfloat16, same, "cuda")
    given = operands(torch.bfloat16, cupy.from_dlpack, "cuda")
    by_number = name in ("fp8", "gemm_norm fp8", "norm_quantize")  # Python makes it a tensor
    with native.in_use():
        for _ in range(3):
            call(given)
        expected, missed = misses(lambda: call(of_torch))
        result, cupys = misses(lambda: call(given))
    if name in ("row-major", "gemm by names", "quantize") or not missed:
        assert (missed, cupys) == (0, by_number)
    assert cupys <= 2 * missed + by_number  # Python makes the call with arrays, and that it makes
    assert all(map(torch.equal, bits(as_tensors(result, cupy.ndarray, of_cupy)), bits(expected)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_results_of_replays_are_laid_out_as_cupys(dtype: torch.dtype, cupy: Any) -> None:
    pytest.importorskip("ml_dtypes", reason="needs a GPU of a machine with it")
    a, b = (torch.randn(n, K, device="cuda").to(dtype) for n in (M, N))
    x, w = cupy.from_dlpack(a), cupy.from_dlpack(b)
    with native.in_use() as library:
        assert arrays._bind_cupy(library.bind_arrays, arrays._cupy())
        for rows in (slice(None), slice(0, 1), slice(None, None, 2), slice(3, 4)):
            expected = lokakern.gemm(a[rows], b.T)
            call = functools.partial(lokakern.gemm, x[rows], w.T)
            own, _ = call(), call()
            y, missed = misses(call)
            assert missed == 0 and torch.equal(of_cupy(y), expected)
            for name in ("shape", "dtype", "size", "nbytes", "ndim", "base", "device"):
                assert getattr(y, name) == getattr(own, name), name
            assert y.flags.c_contiguous and y.flags.f_contiguous == own.flags.f_contiguous
            for axis, size in enumerate(y.shape):
                assert size == 1 or y.strides[axis] == own.strides[axis]
            kept = y.T[1:3]  # a view keeps the memory
            del y, own
            for _ in range(8):
                torch.full_like(expected, float("nan"))
            assert torch.equal(of_cupy(kept), expected.T[1:3])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["row-major", "prepared", "quantize", "static", "scaled_gemm"])
def test_results_of_jax_have_torchs_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave torch some memory
    jax = pytest.importorskip("jax", reason="needs a GPU of a machine with it")
    to = jax.numpy.from_dlpack
    assert_torchs_bits(CALLS[name], torch.bfloat16, jax.Array, to, torch.from_dlpack, "cuda")
    out = to(torch.zeros(M, N, device="cuda"))
    given = operands(torch.float32, to, "cuda")
    with pytest.raises(FormatError, match=r"out is a .* that is read-only"):
        lokakern.gemm(given.x, given.right, out=out)


@pytest.mark.gpu
def test_memory_of_cupy_is_not_copied(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = cupy.ones((M, K), cupy.float32), cupy.ones((K, N), cupy.float32)
    seen: list[Any] = []
    plain = lokakern.gemm

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs, made := plain(*args, **kwargs)))
        return made

    monkeypatch.setattr(sys.modules["lokakern.functional.gemm"], "gemm", watched)
    out = cupy.empty((M, N), cupy.float32)
    y = plain(x, w)
    assert plain(x, w, out=out) is out
    for args, _, _ in seen:
        assert [t.data_ptr() for t in args] == [x.data.ptr, w.data.ptr]
    assert y.data.ptr == seen[0][2].data_ptr()
    assert out.data.ptr == seen[1][1]["out"].data_ptr()
    assert len(seen) == 2 and (y == K).all() and (out == K).all()


def race(cupy: Any, convert: Callable[[Any], Any], calls: int = 5) -> int:
    """Products on a stream that is late: what runs on another one reads zeros, or is too early.

    Returns how many calls had no replay.
    """
    stream = cupy.cuda.Stream(non_blocking=True)
    handle = torch.cuda.ExternalStream(stream.ptr)
    before = torch.cuda.current_stream()
    x, w = cupy.zeros((M, K), cupy.float32), cupy.ones((K, N), cupy.float32)
    expected = cupy.full((M, N), K, cupy.float32)
    cupy.cuda.Device().synchronize()
    missed = 0
    with native.in_use():
        for call in range(calls):
            with stream:
                x.fill(0)
                with torch.cuda.stream(handle):
                    torch.cuda._sleep(50_000_000)  # 25 ms
                x.fill(call + 1)
                made, no_replay = misses(lambda: lokakern.gemm(convert(x), convert(w)))
                missed += no_replay
                y = cupy.asarray(made)
                result = y * 1  # on the same stream, at once
            assert torch.cuda.current_stream() == before
            stream.synchronize()
            assert (result == expected * (call + 1)).all(), call
    return missed


@pytest.mark.gpu
def test_a_call_runs_on_cupys_current_stream(cupy: Any) -> None:
    # Two calls with arrays, and those with tensors that Python makes of them.
    assert race(cupy, lambda x: x) == 4


@pytest.mark.gpu
def test_a_call_runs_on_the_stream_that_an_interface_names(cupy: Any) -> None:
    race(cupy, OfInterface)


@pytest.mark.gpu
def test_a_call_in_a_stream_of_torch_runs_on_cupys(cupy: Any) -> None:
    """CuPy's default stream is not torch's side stream."""
    x, w = cupy.zeros((M, K), cupy.float32), cupy.ones((K, N), cupy.float32)
    side = torch.cuda.Stream()
    with native.in_use():
        for call in range(1, 5):
            torch.cuda._sleep(50_000_000)
            x.fill(call)
            with torch.cuda.stream(side):
                y = lokakern.gemm(x, w)
                assert torch.cuda.current_stream() == side
            assert (y == call * K).all()


@pytest.mark.gpu
def test_objects_with_an_interface_get_cupys_arrays(cupy: Any) -> None:
    x, w = cupy.ones((M, K), cupy.float32), cupy.ones((K, N), cupy.float32)
    y = lokakern.gemm(OfInterface(x), OfInterface(w))
    assert isinstance(y, cupy.ndarray) and (y == K).all()


@pytest.mark.gpu
def test_arrays_of_two_gpus_are_refused(cupy: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a GPU of two")
    x = cupy.ones((M, K), cupy.float32)
    with cupy.cuda.Device(1):
        w = cupy.ones((K, N), cupy.float32)
        y = lokakern.gemm(cupy.ones((M, K), cupy.float32), w)
        assert y.device.id == 1 and (y == K).all()
    with pytest.raises(DeviceError, match="a is on cuda:0, b is on cuda:1"):
        lokakern.gemm(x, w)


@pytest.mark.gpu
def test_cupy_and_numpy_do_not_mix(cupy: Any) -> None:
    x = cupy.ones((M, K), cupy.float32)
    with pytest.raises(FormatError, match=r"numpy\.ndarray of float32, and the first is of cupy"):
        lokakern.gemm(x, numpy.ones((K, N), numpy.float32))
    with pytest.raises(FormatError, match="no negative ones"):
        lokakern.quantize(x[::-1])
    with pytest.raises(FormatError, match="float64"):
        lokakern.quantize(x.astype(float))
    assert lokakern.gemm(x[:0], cupy.ones((K, N), cupy.float32)).shape == (0, N)


def test_the_tensor_of_a_quantized_array_is_what_can_be_saved() -> None:
    made = lokakern.quantize(X, "row")
    file = io.BytesIO()
    for save in (pickle.dumps, lambda x: torch.save(x, file)):
        with pytest.raises(UnsupportedError, match=r"of numpy cannot be saved.*\.tensor to torch"):
            save(made)
    file.seek(0)
    torch.save(made.tensor, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    product = lokakern.scaled_gemm(made, again.t(), out_format="float32")
    assert numpy.array_equal(product, lokakern.scaled_gemm(made, made.t(), out_format="float32"))


def test_a_quantized_array_tells_what_it_is() -> None:
    made = lokakern.quantize(X, "1x128")
    assert repr(made) == "QuantizedArray(QuantizedTensor([4, 16], e4m3fn, 1x128, cpu), numpy)"
    assert made.shape == (4, 16) and made.t().shape == (16, 4)
    assert made.format.is_fp8 and made.granularity == "1x128"
    data = copy.deepcopy(made).data
    assert numpy.array_equal(data, made.data) and not numpy.shares_memory(data, made.data)
    product = lokakern.scaled_gemm(copy.deepcopy(made), made.t(), out_format="float32")
    assert numpy.array_equal(product, lokakern.scaled_gemm(made, made.t(), out_format="float32"))
    weight = lokakern.prepare_weight(X, 0.06, (1, 64))  # nothing was measured: not quantized
    assert isinstance(weight.tensor, QuantizedTensor)
    assert weight.scale is None and weight.data.dtype == X.dtype
