"""Arrays of other libraries (CuPy, JAX, NumPy, numba) as operands of public functions.

The first operand decides: if it is an array of another library, all operands are of that library,
or quantized, and so is the result. Arrays become tensors that share their memory, by DLPack or else
by ``__cuda_array_interface__``, and results become arrays in the same way.

The call runs on CuPy's current stream, or on the stream that an interface names. Other libraries
order their own stream before and after torch's current one, as DLPack lets them.

Calls with tensors never come here: `lokakern.native.replay` tries a replay first, and then looks at
the type of the first operand. Nor do warm calls with CuPy's arrays: the C++ library, once `serve`
gave it to this file, takes and gives such arrays itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lokakern.errors import DeviceError, FormatError, UnsupportedError
from lokakern.formats import Format, Granularity
from lokakern.quantized_tensor import QuantizedTensor

_LOG = logging.getLogger("lokakern")
OWN = (Tensor, QuantizedTensor)  # first operands of calls that need nothing of this file
INSTALL = "pip install '.[cupy]' in a clone of lokakern"
_WRITTEN = ("out", "amax")
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """How arrays of one library become tensors, and tensors its arrays.

    Attributes:
        name: Of the library.
        take: A tensor that shares an array's memory.
        give: The reverse.
        stream: On which a call with this first operand runs; None: torch's current one.
    """

    name: str
    take: Callable[[Any], Tensor]
    give: Callable[[Tensor], Any]
    stream: Callable[[Any], torch.cuda.Stream | None] = lambda _: None

    def __deepcopy__(self, _: Any) -> Library:
        return self  # operands of one library have the same one

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            f"a QuantizedArray of {self.name} cannot be saved, because it refers to functions of "
            "that library: pass its .tensor to torch.save"
        )


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedArray:
    """A `QuantizedTensor` that was made from another library's array; its parts are such arrays.

    Attributes:
        tensor: The same for calls with tensors.
        library: Of ``data`` and ``scale``.
    """

    tensor: QuantizedTensor
    library: Library

    @property
    def data(self) -> Any:
        """``[rows, columns]``, memory of ``tensor``: FP8 as its bytes, uint8."""
        data = self.tensor.data
        return self.library.give(data.view(torch.uint8) if data.itemsize == 1 else data)

    @property
    def scale(self) -> Any:
        """Memory of ``tensor.scale``: float32, or of 1x32 scales the bytes; None without scales."""
        scale = self.tensor.scale
        if scale is None:
            return None
        return self.library.give(scale.view(torch.uint8) if scale.itemsize == 1 else scale)

    @property
    def granularity(self) -> Granularity:
        return self.tensor.granularity

    @property
    def format(self) -> Format:
        return self.tensor.format

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape

    def t(self) -> QuantizedArray:
        """The transpose; shares memory."""
        return QuantizedArray(self.tensor.t(), self.library)

    def __repr__(self) -> str:
        return f"QuantizedArray({self.tensor!r}, {self.library.name})"


def accepted(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function whose calls are not replayed take arrays, too."""
    first = first_name(function)

    @functools.wraps(function)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not isinstance(args[0] if args else kwargs.get(first), OWN):
            return call(function, args, kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return made


@functools.cache
def first_name(function: Callable[..., Any]) -> str:
    """Name of a function's first operand."""
    return next(iter(inspect.signature(function).parameters))


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a public function whose first operand is no tensor, but may be an array.

    Raises:
        FormatError: An operand cannot become a tensor, or the result an array.
        LokakernError: As the function.
    """
    op = function.__name__
    first = args[0] if args else kwargs.get(first_name(function))
    while type(first) in (list, tuple) and first:  # slices along k
        first = first[0]
    library = _library_of(op, first)
    if library is None:
        return function(*args, **kwargs)  # which refuses what it was given
    stream = library.stream(first)
    if stream is None:
        return _called(function, library, args, kwargs)
    with torch.cuda.stream(stream):
        return _called(function, library, args, kwargs)


def _called(
    function: Callable[..., Any], library: Library, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    op, outputs = function.__name__, {}
    tensors = [_tensor(op, library, x) for x in args]
    for name, x in kwargs.items():
        kwargs[name] = made = _tensor(op, library, x)
        if name in _WRITTEN and made is not x:
            if _is_read_only(x):
                raise FormatError(f"{op}: {name} is {_words(x)} that is read-only")
            outputs[id(made)] = x
    public = getattr(sys.modules[function.__module__], op)  # with the decorators around it
    return _array(op, library, public(*tensors, **kwargs), outputs)


def _tensor(op: str, library: Library, x: Any) -> Any:
    """An argument as the function takes it; what is no array stays."""
    kind = type(x)
    own = _LIBRARIES.get(kind) or _library_of(op, x)
    if own is not library:
        if kind is list or kind is tuple:  # slices of a, or a cross
            return kind([_tensor(op, library, item) for item in x])
        if own is None and not isinstance(x, Tensor):
            return x
        raise FormatError(
            f"{op}: an operand is {_words(x)}, and the first is of {library.name}; pass arrays of "
            "one library"
        )
    if kind is QuantizedArray:
        return x.tensor
    try:
        return library.take(x)
    except (BufferError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise FormatError(
            f"{op}: an operand is {_words(x)}, which cannot become a tensor ({error}); expected "
            "bfloat16 or float32 in memory that torch uses"
        ) from error


def _array(op: str, library: Library, made: Any, outputs: dict[int, Any]) -> Any:
    """What the function returned, in the caller's library; of ``out``, the caller's own."""
    if type(made) is QuantizedTensor:
        return QuantizedArray(made, library)
    if type(made) is tuple:
        return tuple(_array(op, library, item, outputs) for item in made)
    if outputs and id(made) in outputs:
        return outputs[id(made)]
    try:
        return library.give(made.detach() if made.requires_grad else made)
    except (BufferError, ImportError, NotImplementedError, RuntimeError, TypeError) as error:
        raise FormatError(
            f"{op}: the result is {made.dtype}, which {library.name} cannot take ({error}); "
            "install ml_dtypes for bfloat16, or ask for float32"
        ) from error


def _words(x: Any) -> str:
    dtype = getattr(x, "dtype", None)
    return f"a {type(x).__module__}.{type(x).__qualname__}" + (f" of {dtype}" if dtype else "")


def _is_read_only(x: Any) -> bool:
    """Whether a library refuses writes to an array; JAX's arrays have `at` instead."""
    return not getattr(getattr(x, "flags", None), "writeable", not hasattr(x, "at"))


# --- libraries

_LIBRARIES: dict[type, Library | None] = {}


def _library_of(op: str, x: Any) -> Library | None:
    """The library of an array or of a `QuantizedArray`; None for anything else."""
    kind = type(x)
    if kind is QuantizedArray:
        library: Library = x.library
        return library
    if kind not in _LIBRARIES:
        _LIBRARIES[kind] = _found(op, x)
    return _LIBRARIES[kind]


def _found(op: str, x: Any) -> Library | None:
    kind = type(x)
    has_dlpack = hasattr(kind, "__dlpack__")
    if isinstance(x, Tensor) or not (has_dlpack or hasattr(kind, "__cuda_array_interface__")):
        return None
    packages = [base.__module__.partition(".")[0] for base in kind.__mro__]  # of subclasses, too
    if "cupy" in packages or not has_dlpack:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (AssertionError, RuntimeError) as error:
            raise DeviceError(
                f"{op}: an operand is {_words(x)}, on a GPU that torch {torch.__version__} does "
                f"not use ({error}); install torch with CUDA or ROCm"
            ) from error
    if "numpy" in packages and hasattr(kind, "mask"):  # DLPack passes elements that it hides
        raise FormatError(f"{op}: an operand is {_words(x)}, whose mask is lost: pass .filled(0)")
    for name, library in (("cupy", _cupy), ("numpy", _numpy), ("numba", _numba)):
        if name in packages:
            return library()
    if has_dlpack and hasattr(kind, "__array_namespace__"):
        return Library(packages[0], _of_dlpack, x.__array_namespace__().from_dlpack)
    try:
        give = _cupy().give
    except ImportError as error:
        raise UnsupportedError(
            f"{op}: an operand is {_words(x)}, whose library does not say how it takes results "
            f"(__array_namespace__); they would be CuPy's arrays, and CuPy is missing: {INSTALL}, "
            "or pass torch.from_dlpack(x)"
        ) from error
    return Library(packages[0], _of_dlpack if has_dlpack else _of_interface, give, _named)


_BINDING = threading.Lock()
_bind: Callable[..., Any] | None = None  # bind_arrays of the C++ library, where it is loaded
_met: Library | None = None  # CuPy's, where one of its arrays was met


def serve(bind: Callable[..., Any]) -> None:
    """Let the C++ library replay calls with CuPy's arrays; `bind` is its ``bind_arrays``."""
    global _bind
    with _BINDING:
        _bind = bind
        if _met is not None:
            _try_to_bind(bind, _met)


def _try_to_bind(bind: Callable[..., Any], library: Library) -> None:
    """Without it, as with a CuPy that names things otherwise, Python makes all calls."""
    try:
        _bind_cupy(bind, library)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        _LOG.warning("calls with CuPy's arrays are made in Python, more slowly: %s", error)


def _bind_cupy(bind: Callable[..., Any], library: Library) -> Any:
    """Returns whether C++ reads CuPy's arrays where they lie; else it asks for their attributes."""
    import cupy
    import numpy  # which CuPy needs

    dtypes = [(numpy.dtype(x), getattr(torch, x)) for x in ("float32", "float16", "int32")]
    # As in its from_dlpack: None without ml_dtypes, and where NumPy is too old.
    bfloat16 = getattr(getattr(cupy._core, "dlpack", None), "bfloat16", None)
    if bfloat16 is not None:
        dtypes.append((numpy.dtype(bfloat16), torch.bfloat16))
    return bind(
        array=cupy.ndarray, quantized=QuantizedArray, library=library,
        memory=cupy.cuda.UnownedMemory, pointer=cupy.cuda.MemoryPointer,
        current=cupy.cuda.get_current_stream, entered=_entered, dtypes=dtypes,
    )  # fmt: skip


def _meet(library: Library) -> Library:
    """Returns the library that was met first: two threads may meet CuPy at once."""
    global _met
    with _BINDING:
        if _met is None:
            _met = library
            if _bind is not None:
                _try_to_bind(_bind, library)
        return _met


@functools.cache
def _cupy() -> Library:
    import cupy

    current = cupy.cuda.get_current_stream
    from_capsule, to_capsule = torch._C._from_dlpack, torch._C._to_dlpack

    def take(x: Any) -> Tensor:
        _refuse_negative(x.strides)
        made: Tensor = from_capsule(x.__dlpack__(stream=-1))  # the call is on its stream
        return made

    def stream(x: Any) -> torch.cuda.Stream | None:
        index = x.tensor.data.get_device() if type(x) is QuantizedArray else x.data.device_id
        return _stream(current(index).ptr, index)

    return _meet(Library("cupy", take, lambda made: cupy.from_dlpack(to_capsule(made)), stream))


@functools.cache
def _numpy() -> Library:
    """NumPy's arrays; bfloat16 of ml_dtypes goes as uint16, because NumPy's DLPack has none."""

    def take(x: Any) -> Tensor:
        if x.dtype.name == "bfloat16":
            return _of_dlpack(x.view("uint16")).view(torch.bfloat16)
        return _of_dlpack(x)

    def give(made: Tensor) -> Any:
        if made.dtype is torch.bfloat16:
            ml_dtypes = importlib.import_module("ml_dtypes")
            return made.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return made.numpy()

    return Library("numpy", take, give)


@functools.cache
def _numba() -> Library:
    as_array = importlib.import_module("numba.cuda").as_cuda_array
    return Library("numba", _of_interface, as_array, _named)


def _of_dlpack(x: Any) -> Tensor:
    _refuse_negative(getattr(x, "strides", None) or ())
    return from_dlpack(x)


def _refuse_negative(strides: tuple[int, ...]) -> None:
    """Refuse what torch has not: its conversion would end the process."""
    if min(strides, default=0) < 0:
        raise ValueError(f"strides are {strides}, and torch has no negative ones: pass a copy")


def _of_interface(x: Any) -> Tensor:
    _refuse_negative(x.__cuda_array_interface__.get("strides") or ())
    made = torch.as_tensor(x)  # does not look at the stream
    other = _named(x)
    if other is not None:
        torch.cuda.current_stream(made.device).wait_stream(other)
    return made


def _named(x: Any) -> torch.cuda.Stream | None:
    """The stream that the interface of an array names, unless it is torch's current one."""
    interface = getattr(x, "__cuda_array_interface__", {})
    handle = interface.get("stream")
    if handle is None:
        return None
    return _stream(handle, torch.as_tensor(x).get_device())


def _stream(handle: int, index: int) -> torch.cuda.Stream | None:
    """A stream of a GPU by its handle, unless it is torch's current one."""
    if handle == 1:  # the default stream in the interface
        handle = 0
    if handle == torch._C._cuda_getCurrentRawStream(index):
        return None
    return _entered(handle, index)


@functools.lru_cache(maxsize=64)
def _entered(handle: int, index: int) -> torch.cuda.Stream:
    if handle == 0:  # which ExternalStream takes for none
        return torch.cuda.default_stream(index)
    return torch.cuda.ExternalStream(handle, device=index)  # type: ignore[no-untyped-call]
