"""Static scales of FP8 outputs, computed once and kept.

A scale that a call makes anew costs launches, four times the kernel's own time where m is small. So
scales of numbers, and scales that follow from a norm with its weight and bias, are kept in memory
that no call writes: `number_scale` and `bound_scale`. A weight that was written since, as torch's
version counter and the weight's memory tell, gets a new scale in new memory; results of earlier
calls keep theirs. A weight that requires a gradient has no kept scale: fused optimizers write to it
without a new version. A CUDA graph keeps the scale of its capture, as it keeps every other value
that Python computed.

In a compiled graph the scale is an output of an op. Compilers may write to memory of outputs that
nobody reads any more, so the op `output_scale` computes a new tensor. Where Inductor generates the
code, it is replaced by `kept_output_scale`, and Inductor is told never to write to its output.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from lokakern.device import current_device
from lokakern.errors import FormatError, LokakernError
from lokakern.formats import Format
from lokakern.native import plain_op, recorded_op
from lokakern.norm import largest, norm_named
from lokakern.numerics import SMALLEST_SCALE
from lokakern.problems import format_named
from lokakern.registry.register import fp8_format
from lokakern.scratch import outlasting

_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
_MOST_SCALES = 1024
_P = ParamSpec("_P")
_R = TypeVar("_R")
Vectors = tuple[Tensor | None, ...]


class _Seen(NamedTuple):
    """A vector as it was when a scale was computed from it, not kept alive.

    Attributes:
        vector: The tensor.
        version: Its version.
        address: Of its first element.
        storage: Its memory; no other one has this identity while the reference exists.
    """

    vector: weakref.ref[Tensor]
    version: int
    address: int
    storage: StorageWeakRef

    @classmethod
    def of(cls, x: Tensor) -> _Seen:
        """A vector as it is now."""
        storage = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(weakref.ref(x), x._version, x.data_ptr(), storage)

    def is_as(self, x: Tensor) -> bool:
        """Whether x is the vector, and nothing tells of a write to it."""
        return (
            self.vector() is x
            and self.version == x._version
            and self.address == x.data_ptr()
            and self.storage.cdata == x.untyped_storage()._cdata
        )


class _Kept(NamedTuple):
    """A scale, with what it was computed from.

    Attributes:
        scale: float32 ``[1, 1]``.
        own_version: Its version; another one tells that a caller wrote to it.
        vectors: The norm's weight and bias, or None.
    """

    scale: Tensor
    own_version: int
    vectors: tuple[_Seen | None, ...]

    def is_of(self, vectors: Vectors) -> bool:
        """Whether it is the scale of these vectors as they are now."""
        return self.own_version == self.scale._version and all(
            seen is None if x is None else seen is not None and seen.is_as(x)
            for seen, x in zip(self.vectors, vectors, strict=True)
        )


_KEPT: dict[Any, _Kept] = {}
_OF_GRAPHS: dict[int, Tensor] = {}  # by identity, kept for good: nothing tells when a graph ends


def check_number(op: str, given: Any) -> None:
    """Check that a scale is a number in the range of float32, whose least normal one is 2^-126.

    Raises:
        FormatError: It is not.
    """
    usable = isinstance(given, int | float) and not isinstance(given, bool)
    if not usable or not SMALLEST_SCALE <= given <= torch.finfo(torch.float32).max:
        raise FormatError(
            f"{op}: out_scale is {given!r}; expected a finite float32 number > 0, or a tensor of "
            "one"
        )


def with_kept_scale(
    find: Callable[[Any, tuple[Any, ...], dict[str, Any]], Tensor | None],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make ``out_scale`` of a function a tensor before its call may be replayed.

    A plan knows neither the values nor the versions of tensors.

    Args:
        find: Gives the scale of ``out_scale``, positional and named arguments, or None for
            arguments that the function refuses, or may refuse.
    """

    def wrapped(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given = kwargs.get("out_scale")
            if given is not None and not isinstance(given, Tensor) and not is_compiling():
                try:
                    found = find(given, args, kwargs)
                except (LokakernError, AttributeError, IndexError, KeyError, TypeError):
                    found = None  # the checks of the function raise
                if found is not None:
                    kwargs["out_scale"] = found
            return function(*args, **kwargs)

        return call

    return wrapped


def number_scale(value: float, device: torch.device) -> Tensor:
    """A number as a scale, float32 ``[1, 1]``, in memory that nobody may write."""
    return kept((value, device), device, (), lambda: _full(value, (1, 1), device))


def bound_scale(
    bound: float, form: Format, weight: Tensor | None, bias: Tensor | None, device: torch.device
) -> Tensor:
    """The scale at which ``|bound * weight| + |bias|`` is the format's largest value.

    Args:
        bound: Of what the weight is multiplied with, such as `lokakern.norm.largest`.
        form: FP8.
        weight: ``[n]``, or None for 1.
        bias: ``[n]``, or None for 0.
        device: Of the scale.

    Returns:
        float32 ``[1, 1]``, at least 2^-126, in memory that nobody may write.
    """
    key = (bound, form, device, id(weight), id(bias))
    made = functools.partial(_bound_scale, bound, form, weight, bias, device)
    return kept(key, device, (weight, bias), made)


def new_bound_scale(
    bound: float, form: Format, weight: Tensor | None, bias: Tensor | None, device: torch.device
) -> Tensor:
    """`bound_scale` computed in each call, in a new tensor; its launches can be recorded."""
    return _bound_scale(bound, form, weight, bias, device)


def _bound_scale(
    bound: float, form: Format, weight: Tensor | None, bias: Tensor | None, device: torch.device
) -> Tensor:
    most = _full(bound, (1,), device)
    if weight is not None:
        most = most * weight.detach().float().abs()
    if bias is not None:
        most = most + bias.detach().float().abs()
    return (most.amax() / form.maximum).clamp_min(SMALLEST_SCALE).reshape(1, 1)


def _full(value: float, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, value, dtype=torch.float32, device=device)


def kept(key: Any, device: torch.device, vectors: Vectors, make: Callable[[], Tensor]) -> Tensor:
    """The scale that ``make`` computes, from memory if it was computed for these vectors.

    Args:
        key: All that the scale depends on but the values of the vectors, with their identities.
        device: Of the scale.
        vectors: Tensors that it depends on.
        make: Computes it, float32 ``[1, 1]``.
    """
    is_trained = any(x is not None and x.requires_grad for x in vectors)
    known = None if is_trained else _KEPT.get(key)
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if known is not None and known.is_of(vectors):
        if is_captured:
            _OF_GRAPHS[id(known.scale)] = known.scale
        return known.scale
    with torch.inference_mode(False), torch.no_grad():  # a tensor with a version
        scale = make()
    # Writes to tensors of inference mode cannot be noticed. Launches of a capture run when the
    # graph is replayed, and tracers' tensors have no values.
    has_versions = not any(x is not None and x.is_inference() for x in vectors)
    if is_trained or is_captured or not has_versions or type(scale) is not Tensor:
        return scale
    if scale.is_cuda:
        scale = _in_memory_of_all_streams(scale)
    if len(_KEPT) >= _MOST_SCALES:
        _KEPT.clear()
    seen = tuple(None if x is None else _Seen.of(x) for x in vectors)
    _KEPT[key] = _Kept(scale, scale._version, seen)
    return scale


def _in_memory_of_all_streams(scale: Tensor) -> Tensor:
    """A copy that any stream may read, at once and for good.

    It synchronizes, once for each version of a weight.
    """
    value = scale.item()

    def copied() -> Tensor:
        copy = torch.full((1, 1), value, dtype=scale.dtype, device=scale.device)
        torch.cuda.current_stream(scale.device).synchronize()
        return copy

    return outlasting(scale.device, copied)


# --- in compiled graphs


def _output_scale(
    like: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, columns: int,
    out_format: str, number: float,
) -> Tensor:  # fmt: skip
    """See `output_scale`; a new tensor."""
    if not norm:
        return _full(number, (1, 1), like.device)
    form = _form_of(out_format, like.device)
    return _bound_scale(_bound_of(norm, columns), form, weight, bias, like.device)


def _kept_output_scale(
    like: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, columns: int,
    out_format: str, number: float,
) -> Tensor:  # fmt: skip
    if not norm:
        return number_scale(number, like.device)
    form = _form_of(out_format, like.device)
    return bound_scale(_bound_of(norm, columns), form, weight, bias, like.device)


def output_scale(
    like: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, columns: int,
    out_format: str, number: float = 0.0,
) -> Tensor:  # fmt: skip
    """A static scale in a traced graph, float32 ``[1, 1]``.

    Args:
        like: Any tensor on the device.
        weight: Of the norm, ``[columns]``, or None.
        bias: As ``weight``.
        norm: Its name, or "" for a number.
        columns: Of the output.
        out_format: Of the output; "" means the device's E4M3.
        number: The scale, without a norm.
    """
    made: Tensor = torch.ops.lokakern.output_scale(
        like, weight, bias, norm, columns, out_format, number
    )
    return made


@functools.lru_cache(maxsize=1024)
def _bound_of(norm: str, columns: int) -> float:
    return largest(norm_named(norm), columns)


@functools.lru_cache(maxsize=64)
def _form_of(out_format: str, device: torch.device) -> Format:
    if out_format:
        return format_named("out_scale", out_format)
    return fp8_format(current_device(device.type, device.index or 0))


def _output_scale_fake(like: Tensor, *_: Any) -> Tensor:
    if "torch._inductor.lowering" in sys.modules:
        _keep_under_inductor()
    return like.new_empty((1, 1), dtype=torch.float32)


@functools.cache
def _keep_under_inductor() -> None:
    """Let code that Inductor generates read kept scales; its functions for this are not stable."""
    try:
        from torch._inductor import config
        from torch._inductor.lowering import fallback_handler, register_lowering
        from torch._inductor.virtualized import V
    except ImportError:
        return
    ops = torch.ops.lokakern
    calls = [fallback_handler(op.default, False)  # type: ignore[no-untyped-call]
             for op in (ops.output_scale, ops.kept_output_scale)]  # fmt: skip

    def lowered(*args: Any) -> Any:
        graph = V.graph
        protected = getattr(graph, "never_reuse_buffers", None)
        # A C++ program has no kept scales, and Inductor's CUDA graphs return their own memory only.
        readers_are_known = _is_only_read(graph.current_node, not config.triton.cudagraphs)
        if protected is None or graph.cpp_wrapper or not readers_are_known:
            return calls[0](*args)
        scale = calls[1](*args)
        protected.add(scale.get_name())
        return scale

    register_lowering(ops.output_scale.default, type_promotion_kind=None)(lowered)


def _is_only_read(node: torch.fx.Node, by_caller: bool) -> bool:
    """Whether ops of this package, and the caller if told so, are all that reads a result."""
    return all(
        by_caller if user.op == "output" else getattr(user.target, "namespace", "") == "lokakern"
        for user in node.users
    )


_SCHEMA = (
    "(Tensor like, Tensor? weight, Tensor? bias, str norm, SymInt columns, str out_format, "
    "float number) -> Tensor"
)
recorded_op(_LIBRARY, "output_scale" + _SCHEMA, _output_scale)
torch.library.register_fake("lokakern::output_scale", _output_scale_fake, lib=_LIBRARY)
# A plan does not know versions of weights.
plain_op(_LIBRARY, "kept_output_scale" + _SCHEMA, _kept_output_scale)
torch.library.register_fake("lokakern::kept_output_scale", _output_scale_fake, lib=_LIBRARY)
