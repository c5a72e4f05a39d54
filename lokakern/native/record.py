"""Recording one call: its allocations, launches and operators, as text for ``plan.h``.

All that a call does on the GPU passes by here: torch's operators through a dispatch mode, launches
of this package's kernels through ``lokakern.jit.recorder``. A launch by anything else, such as a
library, refuses the recording, and so do a pointer into unknown memory and an operator that depends
on more than its arguments: the call then stays in Python.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lokakern import driver, scratch
from lokakern.types import QuantizedTensor

_VERSION = 2
_INPUT, _OUTPUT, _WORKSPACE, _SCRATCH, _COMPUTED, _CONSTANT = range(6)
_LAUNCH, _FILL, _OPERATOR = range(3)
_NONE, _TENSOR, _INT, _FLOAT, _BOOL, _TEXT, _INTS, _TENSORS, _DEVICE, _NUMBER = range(10)
_ATTRIBUTE_BYTES = 72

_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
          "aten::new_empty_strided"}  # fmt: skip
_FILLED = {"aten::zeros": 0, "aten::zeros_like": 0, "aten::new_zeros": 0, "aten::zero_": 0,
           "aten::full": None, "aten::full_like": None, "aten::fill_": None}  # fmt: skip
# Operators of these kinds depend on more than their arguments, or change what a tensor is.
_REFUSED_TAGS = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output,
                 torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}  # fmt: skip
_REFUSED = ("resize", "set_", "record_stream")
# Numbers of C++'s enums.
_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1}

# Kernels by address: program, dynamic shared bytes and cluster, for `lokakern.native.plan_file`.
KERNELS: dict[int, tuple[Any, int, int]] = {}


class _Refusal(Exception):
    """The call cannot be replayed."""


@dataclass
class _Buffer:
    kind: int
    tensor: Tensor  # kept, so that no later allocation of the call gets its memory
    start: int
    end: int
    index: int = 0
    view: bytes = b""


@dataclass
class Text:
    """Numbers and texts as ``reader.h`` reads them."""

    parts: list[bytes] = field(default_factory=list)

    def number(self, *values: int) -> None:
        self.parts.append(struct.pack(f"<{len(values)}q", *values))

    def text(self, value: bytes) -> None:
        self.number(len(value))
        self.parts.append(value)

    @property
    def bytes(self) -> bytes:
        return b"".join(self.parts)


@dataclass(frozen=True)
class Recording:
    """The plan of a call, which names its kernels.

    Attributes:
        parts: The text of the plan; an integer stands for a kernel, by its address.
        constants: The number of tensors that it needs beside the call's.
        operators: The names of torch's operators that it calls.
    """

    parts: tuple[bytes | int, ...]
    constants: int
    operators: frozenset[str]

    @property
    def kernels(self) -> list[int]:
        """The addresses of the kernels that it launches."""
        return [part for part in self.parts if isinstance(part, int)]

    def text(self, numbers: Mapping[int, int] | None = None) -> bytes:
        """The plan as ``plan.h`` reads it; with `numbers` of kernels instead of addresses."""
        return b"".join(
            part if isinstance(part, bytes) else
            struct.pack("<q", part if numbers is None else numbers[part])
            for part in self.parts
        )  # fmt: skip


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the calls of this thread inside the block.

    Args:
        inputs: The call's tensors, in the order of its arguments.
        dtype_code: Number of a dtype in C++.
    """

    def __init__(self, inputs: Sequence[Tensor], dtype_code: Callable[[torch.dtype], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs = list(inputs)
        self.constants: list[Tensor] = []
        self.reason: str | None = None  # against a plan
        self._dtype_code = dtype_code
        self._thread = threading.get_ident()
        self._steps: list[tuple[bytes | int, ...]] = []
        self._operators: set[str] = set()
        self._results: list[bytes] = []
        self._written: set[int] = set()
        self._buffers: list[_Buffer] = []
        storages = [x.untyped_storage().data_ptr() for x in inputs]
        for place, x in enumerate(inputs):
            # Another input in the same memory: only what begins where this one does is its own.
            is_alone = storages.count(storages[place]) == 1
            end = storages[place] + x.untyped_storage().nbytes() if is_alone else x.data_ptr() + 1
            self._buffers.append(_Buffer(_INPUT, x, x.data_ptr(), end, place))

    def refuse(self, reason: str) -> None:
        """Keep the call in Python."""
        if self.is_here and self.reason is None:
            self.reason = reason

    @property
    def is_here(self) -> bool:
        """Whether this thread's calls are recorded."""
        return threading.get_ident() == self._thread

    # --- torch's operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        try:
            self._operated(func, args, kwargs or {}, result)
        except _Refusal as refusal:
            self.refuse(str(refusal))
        except Exception as error:  # the call itself succeeded
            self.refuse(f"calls {func}, whose recording fails: {error!r}")
        return result

    def _operated(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name
        made = result if isinstance(result, tuple | list) else (result,)
        fresh = [x for x in made if isinstance(x, Tensor) and not self._knows(x)]
        if name in _EMPTY:
            if not fresh:  # without elements, or given by the caller
                raise _Refusal("allocates nothing")
            self._allocated(fresh[0])
        elif name in _FILLED:
            if fresh:
                self._allocated(fresh[0])
            value = _FILLED[name]
            if value is None:
                value = args[1]
            self._filled(made[0], value)
        elif fresh or not _is_view(func):
            if (
                not name.startswith("aten::")
                or _REFUSED_TAGS & set(func.tags)
                or any(word in name for word in _REFUSED)
                or not all(isinstance(x, Tensor) for x in made)
            ):
                raise _Refusal(f"calls {name}")
            self._called(func, args, kwargs, made, fresh)

    def _allocated(self, x: Tensor) -> None:
        if x.device != self.inputs[0].device:
            raise _Refusal(f"allocates on {x.device}")
        self._add(_WORKSPACE, x)

    def _filled(self, x: Tensor, value: Any) -> None:
        size = x.numel() * x.element_size()
        if isinstance(value, Tensor) or not x.is_contiguous() or size % 4:
            raise _Refusal("fills strided memory")
        count = max(4 // x.element_size(), 1)
        with torch.utils._python_dispatch._disable_current_modes():
            # The device is named, because a user may set another default.
            pattern = torch.full((count,), value, dtype=x.dtype, device="cpu")
            words = {int(word) for word in pattern.view(torch.uint8).numpy().view("<u4")}
        if len(words) > 1:
            raise _Refusal(f"fills memory with {value!r}, which is no repeated word of 4 bytes")
        step = Text()
        step.number(_FILL, *self._find(x.data_ptr()), size // 4, words.pop())
        self._steps.append((step.bytes,))

    def _called(
        self, func: Any, args: Any, kwargs: dict[str, Any], made: Any, fresh: list[Tensor]
    ) -> None:
        step = Text()
        step.number(_OPERATOR)
        self._operators.add(func._schema.name)
        step.text(func._schema.name.encode())
        step.text(func._schema.overload_name.encode())
        parameters = func._schema.arguments
        step.number(len(parameters))
        for place, parameter in enumerate(parameters):
            given = args[place] if place < len(args) else kwargs.get(
                parameter.name, parameter.default_value
            )  # fmt: skip
            self._argument(step, given, str(parameter.type))
        for x in fresh:
            self._add(_COMPUTED, x)
        step.number(len(made))
        places = {id(x): self._find(x.data_ptr())[0] for x in fresh}
        step.number(*[places.get(id(x), -1) for x in made])
        self._steps.append((step.bytes,))

    def _argument(self, step: Text, given: Any, type_: str) -> None:
        if given is None:
            step.number(_NONE)
        elif isinstance(given, Tensor):
            step.number(_TENSOR)
            step.parts.append(self._view(given))
        elif isinstance(given, bool | int | float) and type_ in ("Tensor", "Optional[Tensor]"):
            step.number(_NUMBER)
            self._argument(step, given, "number")
        elif isinstance(given, bool):
            step.number(_BOOL, given)
        elif isinstance(given, torch.dtype):
            step.number(_INT, self._dtype_code(given))
        elif isinstance(given, int):
            step.number(_INT, given)
        elif isinstance(given, float):
            step.number(_FLOAT)
            step.parts.append(struct.pack("<d", given))
        elif isinstance(given, str):
            step.number(_TEXT)
            step.text(given.encode())
        elif isinstance(given, torch.memory_format) and given in _MEMORY_FORMATS:
            step.number(_INT, _MEMORY_FORMATS[given])
        elif given is torch.strided:
            step.number(_INT, 0)
        elif isinstance(given, torch.device) and given == self.inputs[0].device:
            step.number(_DEVICE)
        elif isinstance(given, list | tuple) and "Tensor" in type_:
            step.number(_TENSORS, len(given))
            step.parts += [self._view(x) for x in given]
        elif isinstance(given, list | tuple) and all(isinstance(x, int) for x in given):
            step.number(_INTS, len(given), *given)
        else:
            raise _Refusal(f"calls an operator with {type(given).__name__}")

    # --- launches, called by the launchers

    def launched(
        self,
        launch: driver.CudaLaunch,
        grid: tuple[int, int, int],
        pointers: Sequence[Tensor],
        scalars: Sequence[int | float],
        tensor_maps: Sequence[driver.TensorMap],
        function: int,
    ) -> None:
        """Record a launch of a kernel of CUDA."""
        if not self.is_here:
            return
        facts = driver.launch_facts(launch)
        KERNELS[function] = (launch.program, facts.shared_bytes, facts.cluster)
        self._launched(
            (*grid, facts.threads, 1, 1, facts.shared_bytes), facts.attributes, pointers,
            zip(facts.scalars, scalars, strict=True), tensor_maps, function,
        )  # fmt: skip

    def launched_by_hip(
        self,
        blocks: int,
        threads: int,
        pointers: Sequence[Tensor | None],
        scalars: Iterable[tuple[str, int | float]],
        function: int,
    ) -> None:
        """Record a launch of a kernel of HIP; scalars with their `struct` codes."""
        if self.is_here:
            self._launched((blocks, 1, 1, threads, 1, 1, 0), b"", pointers, scalars, (), function)

    def _launched(
        self,
        shape: tuple[int, ...],
        attributes: bytes,
        pointers: Sequence[Tensor | None],
        scalars: Iterable[tuple[str, int | float]],
        tensor_maps: Sequence[driver.TensorMap],
        function: int,
    ) -> None:
        try:
            values, places = bytearray(8 * len(pointers)), [8 * i for i in range(len(pointers))]
            for code, scalar in scalars:
                value = struct.pack(f"={code}", scalar)
                values += bytes(-len(values) % len(value))
                places.append(len(values))
                values += value
            map_places = []
            for _ in tensor_maps:
                values += bytes(-len(values) % 64)
                map_places.append(len(values))
                values += bytes(128)
            step = Text()
            step.number(*shape)
            step.text(attributes)
            step.text(bytes(values))
            places += map_places
            step.number(len(places), *places)
            given = [(8 * place, x) for place, x in enumerate(pointers) if x is not None]
            step.number(len(given))
            for place, pointer in given:
                step.number(place, *self._find(pointer.data_ptr()))
            step.number(len(tensor_maps))
            for place, tensor_map in zip(map_places, tensor_maps, strict=True):
                found = driver.map_facts(tensor_map)
                if found is None:
                    raise _Refusal("uses a tensor map that was forgotten")
                step.number(place, *self._find(found.address), found.item, found.swizzle)
                step.number(len(found.sizes), *found.sizes, *found.strides_bytes, *found.box)
            self._steps.append((struct.pack("<q", _LAUNCH), function, step.bytes))
        except _Refusal as refusal:
            self.refuse(str(refusal))

    def wrote(self, x: Tensor) -> None:
        """Tell that launches wrote to a tensor of the caller, whose version changes."""
        if not self.is_here:
            return
        for place, given in enumerate(self.inputs):
            if given.data_ptr() == x.data_ptr():
                self._written.add(place)
                return
        self.refuse("writes to a tensor that is no argument")

    def constant(self, x: Tensor) -> None:
        """Tell of a tensor that never changes and belongs to no argument."""
        if self.is_here and not self._knows(x):
            self.constants.append(x)
            self._add(_CONSTANT, x).index = len(self.constants) - 1

    # --- memory

    def _add(self, kind: int, x: Tensor) -> _Buffer:
        start = x.untyped_storage().data_ptr()
        self._buffers.append(_Buffer(kind, x, start, start + x.untyped_storage().nbytes()))
        return self._buffers[-1]

    def _knows(self, x: Tensor) -> bool:
        start = x.untyped_storage().data_ptr()
        return any(start == y.tensor.untyped_storage().data_ptr() for y in self._buffers)

    def _find(self, address: int) -> tuple[int, int]:
        """Buffer and offset of an address."""
        for place, buffer in enumerate(self._buffers):
            if buffer.start == address and buffer.kind == _INPUT:
                return place, 0
        for place, buffer in enumerate(self._buffers):
            if buffer.start <= address < buffer.end:
                return place, address - buffer.start
        for shared in list(scratch._OF_STREAM.values()):
            start = shared.data_ptr()
            if start <= address < start + shared.numel():
                self._add(_SCRATCH, shared)
                return len(self._buffers) - 1, address - start
        raise _Refusal("uses memory that is neither an argument nor allocated in the call")

    def _address(self, address: int) -> tuple[int, int]:
        return self._find(address)

    def _view(self, x: Tensor) -> bytes:
        text = Text()
        text.number(*self._find(x.data_ptr()), self._dtype_code(x.dtype), x.dim())
        text.number(*x.shape, *x.stride())
        return text.bytes

    # --- results

    def result(self, x: Tensor) -> int:
        """Number of a result."""
        place, offset = self._find(x.data_ptr())
        buffer = self._buffers[place]
        if buffer.kind == _WORKSPACE:
            if offset:
                raise _Refusal("returns a part of its memory")
            buffer.kind, buffer.view = _OUTPUT, self._view(x)
        elif buffer.kind in (_OUTPUT, _SCRATCH, _CONSTANT):
            raise _Refusal("returns shared memory")
        self._results.append(self._view(x))
        return len(self._results) - 1

    def recording(self) -> Recording | None:
        """The plan, or None where there is a reason against it."""
        if self.reason is not None:
            return None
        text = Text()
        text.number(_VERSION, len(self.inputs), len(self._buffers))
        for buffer in self._buffers:
            text.number(buffer.kind)
            if buffer.kind in (_INPUT, _CONSTANT):
                text.number(buffer.index)
            else:
                text.number(buffer.end - buffer.start)
            text.parts.append(buffer.view)
        text.number(len(self._steps))
        results = Text()
        results.number(len(self._results))
        results.parts += self._results
        results.number(len(self._written), *sorted(self._written))
        steps = [part for step in self._steps for part in step]
        parts = (text.bytes, *steps, results.bytes)
        return Recording(parts, len(self.constants), frozenset(self._operators))


def _is_view(func: Any) -> bool:
    """Whether an operator returns views of its arguments and writes nothing."""
    aliases = [x.alias_info for x in func._schema.returns]
    return bool(aliases) and all(x is not None and not x.is_write for x in aliases)


def result_template(result: Any, recorder: Recorder) -> Any:
    """How a result is put together from the plan's tensors and the call's own."""
    try:
        if result is None:  # the library says so where there is no plan
            raise _Refusal("returns nothing")
        return _template(result, recorder)
    except _Refusal as refusal:
        recorder.refuse(str(refusal))
        return None


def _template(result: Any, recorder: Recorder) -> Any:
    if result is None:
        return None
    if isinstance(result, Tensor):
        for place, x in enumerate(recorder.inputs):
            if x is result:
                return ("input", place)
        return ("tensor", recorder.result(result))
    if type(result) is QuantizedTensor and result.source is None and result.budget is None:
        parts = [_template(x, recorder) for x in (result.data, result.scale)]
        return ("quantized", parts, result.granularity, result.transposed)
    if type(result) is tuple:
        return ("tuple", [_template(x, recorder) for x in result])
    raise _Refusal(f"returns {type(result).__name__}")
