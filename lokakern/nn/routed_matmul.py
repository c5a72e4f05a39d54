"""Products by route: a module's kernels, chosen ahead for ranges of m.

A route is text, so that a compiled graph does not depend on this process: the granularity of the
right operand, then the first m of each kernel, for m that 16 divides and for other m::

    row;16:0=,1024=cuda.quantize_row+cuda.scaled_gemm_row,20481=;1:0=

An empty name means torch's unquantized product, and a name behind "~" that there is a kernel in
eager calls only. On another device a kernel's emulation runs. A part ``float16`` says that operands
and outputs are float16 instead of bfloat16 (`in_dtype`), one ``switch=NAME`` names a switch
(`turn`), one ``delayed=KEY`` a layer with delayed scaling (`delayed`), one ``saved=FORM`` that the
input of a layer is saved in FP8 (`lokakern.nn.saved_inputs`), and a last part may define a check
(`lokakern.sampled_check`) or, in compiled graphs, another kernel for a left operand that is
quantized as it is computed (`crossed`). The ops look up a kernel when they run, not when they are
traced, because m may be dynamic. Where Inductor knows m, it may quantize the left operand in the
kernel that computes it (`lokakern.nn.inductor`).
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor, bfloat16, finfo, float8_e4m3fn, float16, is_grad_enabled
from torch.compiler import is_compiling
from torch.nn.functional import linear

from lokakern import jit, sampled_check
from lokakern.device import current_device
from lokakern.epilogue import Epilogue, NormEpilogue
from lokakern.errors import ShapeError, UnsupportedError
from lokakern.functional.checks import row_major
from lokakern.functional.quantize import dequantize, quantize
from lokakern.functional.scaled_gemm import scaled_gemm
from lokakern.native import forget, plain_op, recorded_op
from lokakern.quantized_tensor import pitch_of
from lokakern.registry.register import KERNELS, Kernel, fp8_format, kernel_named, load_kernels
from lokakern.scratch import outlasting
from lokakern.types import GROUP, Format, Granularity, QuantizedTensor, empty_data

Segments = list[tuple[int, str]]  # first m and kernel, "" for the unquantized product
PLAIN = ""  # the unquantized route
EAGER = "~"  # before the name of a kernel that no compiled graph runs
# Most columns of rows that a compiler quantizes. Inductor reads longer rows twice, the quantizer
# below once: 8192 rows of 10240, 15360 and 123200 columns take 65, 94 and 891 us of an H200 with
# the quantizer, and 102, 111 and 1441 with Inductor. After a block norm the first two take 195 and
# 292 us in separate kernels, and 208 and 314 in one; 4096 columns take 78 and 53. Sizes between
# 4096 and 10240 were not timed.
LONGEST_HERE = 8192
READS_ONCE = ("cuda.quantize_row", "cuda.quantize_long_row", "cuda.quantize_together_row")
# It reads column-major operands; a vector is row-major and column-major at once.
BY_TILES = "cuda.quantize_together_group"
BY_ROWS = "cuda.quantize_together_row"  # both operands of a product in one launch
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
# Traced functions name what they use of torch, not torch: a compiled model compares in each call,
# slowly, whether a module that is named in two places is still the same.
OPS = torch.ops.lokakern
_IS_AMD = torch.version.hip is not None
_ROUTES: dict[tuple[str, torch.device], _LoadedRoute] = {}
FLOAT16 = ";float16"  # in the text of a route, or of several
_SWITCH = ";switch="
_DELAYED = ";delayed="
CROSSED = ";crossed="
SHARED = "&"  # before a kernel that reads a gradient which nothing need be behind
_NO_KERNELS = "none;16:0=;1:0="
# Products, and for each of them the places of its operands in `Delayed.scales`, and those in `amax`
# (of the output) or `amax_behind`.
OUTPUT, GRAD_INPUT, GRAD_WEIGHT = 0, 1, 2
_PLACES = (((0, 1), (0, 1)), ((2, 1), (0, 1)), ((2, 0), (2, 3)))
_SEEN: set[tuple[str, int]] = set()  # key and operand of what was quantized before it was settled
_SETTLED: set[tuple[str, int]] = set()  # of what has a scale of earlier steps
_OFF: set[str] = set()  # switches
_turns = [0]  # how often switches were turned


class Delayed(NamedTuple):
    """State of a layer with delayed scaling, float32.

    Attributes:
        scales: Of input, weight and gradient of the output, ``[3]``.
        amax: Since the last step, of input and weight in the output, ``[2]``.
        amax_behind: The same of both operands of the gradient of the input, and of that of the
            weight, ``[4]``. The backward pass has its own, because compilers do not let both passes
            write to one tensor.
    """

    scales: Tensor
    amax: Tensor
    amax_behind: Tensor

    def on(self, device: torch.device) -> Delayed:
        """The state on a device; that of a meta device as at first."""
        return (
            new_delayed(device) if self.scales.is_meta else Delayed(*(x.to(device) for x in self))
        )


class _LoadedRoute(NamedTuple):
    """A route on a device; kernels for m that 16 divides, and for other m."""

    form: Granularity
    starts: tuple[list[int], list[int]]
    kernels: tuple[list[Kernel | None], list[Kernel | None]]
    watch: sampled_check.Watch | None
    dtype: torch.dtype  # of operands and output


def route_text(form: Granularity, aligned: Segments, other: Segments) -> str:
    """The text of a route; `PLAIN` without kernels."""
    if not any(name for _, name in (*aligned, *other)):
        return PLAIN
    parts = (",".join(f"{start}={name}" for start, name in x) for x in (aligned, other))
    return f"{form};16:{next(parts)};1:{next(parts)}"


def read_route(text: str) -> tuple[Granularity, Segments, Segments]:
    """Parse a text of `route_text`, as eager calls read it."""
    form, *both = _read(text)
    aligned, other = (merged((m, name.removeprefix(EAGER)) for m, name in x) for x in both)
    return form, aligned, other


def with_eager(text: str, eager: str) -> str:
    """A route that in eager calls has the kernels of another one where it has none."""
    if eager == PLAIN:
        return text
    form, *others = _read(eager)
    own = _read(text)[1:] if text != PLAIN else ([(0, "")],) * 2
    both = []
    for segments, other in zip(own, others, strict=True):
        starts = sorted({start for start, _ in (*segments, *other)})
        then = [name and EAGER + name for name in (name_at(other, m) for m in starts)]
        names = (name_at(segments, m) or name for m, name in zip(starts, then, strict=True))
        both.append(merged(zip(starts, names, strict=True)))
    return route_text(form, *both)


@functools.lru_cache(maxsize=4096)
def traced_route(text: str) -> str:
    """The route of compiled graphs, without kernels of eager calls."""
    route = kernels_of(text)
    if EAGER not in route:
        return text
    form, *both = _read(route)
    aligned, other = (merged((m, "" if EAGER in name else name) for m, name in x) for x in both)
    found = route_text(form, aligned, other)
    return found and found + text.removeprefix(route)


def in_dtype(text: str, dtype: torch.dtype) -> str:
    """A route without other parts yet, for operands and outputs of this dtype; `PLAIN` has none."""
    return text and text + FLOAT16 if dtype is float16 else text


def dtype_of(text: str) -> torch.dtype:
    """The dtype of operands and outputs of a route that has kernels, or of those of a plan."""
    return float16 if FLOAT16 in text else bfloat16


def kernels_of(text: str) -> str:
    """A route without its dtype, its switch and its check."""
    return ";".join(text.split(";", 3)[:3])


def switched(text: str, switch: str) -> str:
    """A route with a switch; `PLAIN` has none."""
    return text and text + _SWITCH + switch


def has_switch(text: str) -> bool:
    """Whether a route has a switch."""
    return _SWITCH in text


def delayed(text: str, key: str) -> str:
    """A route whose operands have scales of earlier steps, which `Delayed` of a layer keeps.

    As it is if it has no kernel, or one whose scales are not tensorwise, or that quantizes itself.
    """
    if text == PLAIN:
        return text
    load_kernels()
    names = {name for part in read_route(text)[1:] for _, name in part if name}
    tensorwise = Granularity.TENSOR, Granularity.TENSOR
    found = [kernel_named(name) for name in names]
    is_fit = all(kernel.parts and _scales_of(kernel) == tensorwise for kernel in found)
    return text + _DELAYED + key if is_fit else text


def new_delayed(device: torch.device) -> Delayed:
    """The state of a layer before its first step."""
    return Delayed(*(x.to(device) for x in (torch.ones(3), torch.zeros(2), torch.zeros(4))))


def has_delayed(text: str) -> bool:
    """Whether operands of a route, or of one in a plan, have scales of earlier steps."""
    return _DELAYED in text


def delayed_key(text: str) -> str:
    """The key of the layer in a route, or in a plan, with scales of earlier steps."""
    return text.partition(_DELAYED)[2].partition(";")[0].partition("\0")[0]


def unsettled(key: str) -> list[int]:
    """The operands of a layer that were quantized with dynamic scales since they were settled."""
    return [place for place in range(3) if (key, place) in _SEEN]


def settle(key: str, places: Iterable[int]) -> None:
    """Let operands of a layer have their scales of `Delayed`."""
    for place in places:
        _SEEN.discard((key, place))
        _SETTLED.add((key, place))


def settled(key: str) -> list[bool]:
    """Whether input, weight and gradient of a layer have scales of earlier steps."""
    return [(key, place) in _SETTLED for place in range(3)]


def set_settled(key: str, are_settled: Sequence[bool]) -> None:
    """Set `settled`; all False forgets the layer."""
    for place, is_settled in enumerate(are_settled):
        _SEEN.discard((key, place))
        (_SETTLED.add if is_settled else _SETTLED.discard)((key, place))


def crossed(text: str, kernel: str) -> str:
    """A route of a gradient with a kernel for a left operand that is quantized behind a cross.

    `lokakern.nn.crossed_gradients` finds such an operand, or with `SHARED` any that both gradients
    of a layer read. Elsewhere the route is as without it.
    """
    return (text or _NO_KERNELS) + CROSSED + kernel


def crossed_kernel(text: str) -> str:
    """The kernel of `crossed` in a route, or ""."""
    return text.partition(CROSSED)[2]


def uncrossed(text: str) -> str:
    """The route without that kernel."""
    usual = text.partition(CROSSED)[0]
    return PLAIN if usual == _NO_KERNELS else usual


def _is_off(text: str) -> bool:
    return bool(_OFF) and sampled_check.unchecked(text).partition(_SWITCH)[2] in _OFF


def turn(switches: Iterable[str], is_on: bool) -> None:
    """Let products run the kernels of their routes, or torch's unquantized product, from now on.

    Compiled graphs, too, which hold the route: they are not compiled again, and their calls cost
    the same, as a switch is read when a route is loaded. CUDA graphs replay what they captured, and
    a product of which only FP8 data are left multiplies these dequantized.
    """
    (_OFF.difference_update if is_on else _OFF.update)(switches)
    _turns[0] += 1
    _ROUTES.clear()
    forget()


def merged(segments: Iterable[tuple[int, str]]) -> Segments:
    """The segments without those that continue the one before."""
    found: Segments = []
    for start, name in segments:
        if not found or found[-1][1] != name:
            found.append((start, name))
    return found


def _read(text: str) -> tuple[Granularity, Segments, Segments]:
    """`read_route` with `EAGER` before names."""
    form, *parts = text.split(";")
    found: list[Segments] = []
    for part in parts[:2]:
        pairs = (pair.split("=") for pair in part.partition(":")[2].split(","))
        found.append([(int(start), name) for start, name in pairs])
    return Granularity(form), found[0], found[1]


def name_at(segments: Segments, m: int) -> str:
    """Name of the kernel at m."""
    return segments[bisect_right(segments, m, key=lambda segment: segment[0]) - 1][1]


def segments_of(text: str) -> list[list[tuple[int, bool]]]:
    """First m, and whether it has a kernel, for m that 16 divides and for other m."""
    both = ([(0, "")],) * 2 if text == PLAIN else read_route(text)[1:]
    return [[(start, bool(name)) for start, name in segments] for segments in both]


@functools.lru_cache(maxsize=4096)
def kernel_at(text: str, m: int) -> str:
    """Name of the kernel of a route at m; "" for the unquantized product."""
    if text == PLAIN:
        return ""
    _, *both = read_route(text)
    return name_at(both[0] if m % 16 == 0 else both[1], m)


def quantizes_at(routes: tuple[str, ...], m: int) -> bool:
    """Whether any of these routes has a kernel at m."""
    return any(kernel_at(route, m) for route in routes)


def emulation_of(kernel: Kernel) -> Kernel:
    """The kernel with the same rounding in stock PyTorch, which runs on any device.

    Raises:
        UnsupportedError: There is none.
    """
    for other in KERNELS.values():
        scales = (other.granularity, other.b_granularity)
        if (
            other.op == "gemm"
            and other.quantizes
            and all(part.startswith("torch.") for part in other.parts)
            and "any" in other.architectures
            and scales == (kernel.granularity, kernel.b_granularity)
        ):
            return other
    raise UnsupportedError(f"{kernel.name} runs on {', '.join(sorted(kernel.architectures))} only, "
                           "and its scales have no emulation")  # fmt: skip


def _load_route(text: str, device: torch.device) -> _LoadedRoute:
    load_kernels()
    form, *both = read_route(text)
    here = current_device(device.type, device.index or 0)
    turns, is_off = _turns[0], _is_off(text)
    kernels: list[list[Kernel | None]] = []
    for segments in both:
        found = [kernel_named(name) if name and not is_off else None for _, name in segments]
        kernels.append([k if k is None or k.runs_on(here) else emulation_of(k) for k in found])
    starts = [[start for start, _ in segments] for segments in both]
    if len(_ROUTES) > 4096:
        _ROUTES.clear()
    check = sampled_check.check_of(text)
    watch = sampled_check.watch_named(check) if check else None
    both_kernels = kernels[0], kernels[1]
    loaded = _LoadedRoute(form, (starts[0], starts[1]), both_kernels, watch, dtype_of(text))
    if turns == _turns[0]:  # else a switch was turned meanwhile: the next call loads it again
        _ROUTES[text, device] = loaded
    return loaded


def multiply(
    a: Tensor,
    b: Tensor | None,
    data: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    route: str,
    left_scale: str = "",
    apart: bool = False,
) -> Tensor:
    """``a @ b + bias`` by the kernel of a route at this m.

    Args:
        a: ``[m, k]``, of the dtype of the route, bfloat16 or float16.
        b: ``[k, n]``, of that dtype, or a float32 weight: quantizers read it directly, an
            unquantized product rounds it first. None: only ``data`` is available.
        data: FP8 data of ``b.t()`` from `quantize_weight`; None if the kernel has to quantize b.
        scale: The scales of ``data``. Both may be views as bytes.
        bias: ``[n]``, or None.
        route: See the module.
        left_scale: Static scale of a, or ""; text, because torch.compile makes numbers symbolic.
        apart: Whether an unquantized product adds the bias in a separate step.
    """
    left = quantize_by(a, left_scale) if left_scale else None
    if left is None and not apart:  # the usual call; a compiled graph pays for each argument
        out: Tensor = OPS.routed_gemm(a, b, data, scale, bias, route)
    else:
        out = OPS.routed_gemm(a, b, data, scale, bias, route, left, None, left_scale, apart)
    return out


def multiply_activated(
    x: Tensor, activation: str, activating: str, data: Tensor, scale: Tensor, bias: Tensor | None,
    route: str,
) -> Tensor | None:  # fmt: skip
    """``f(x) @ b + bias``, where one kernel of the registry activates and quantizes x.

    At 8192 x 2048 with relu and rowwise scales an H200 takes 14 us with
    `cuda.activate_quantize_row`, as long as for quantizing alone, and 25 us with Inductor's kernel.

    Args:
        x: ``[m, k]``, bfloat16 or float16 as of the route.
        activation: f, one of `lokakern.epilogue.ACTIVATIONS`.
        activating: The route of kernels that activate and quantize.
        data: As of `multiply`, as the other arguments.
        scale: The scales of ``data``.
        bias: ``[n]``, or None.
        route: The route of the product.

    Returns:
        None if no kernel was timed at m, or the call has to be checked.
    """
    name = find_activator(activating, route, *x.shape)
    if not name or sampled_check.is_due(route):
        return None  # a check reads f(x)
    out: Tensor = OPS.activated_gemm(x, activation, name, data, scale, bias, route)
    return out


def is_known(*sizes: int) -> bool:
    """Whether all sizes are constants for the compiler, if one traces."""
    if not is_compiling():
        return True
    for size in sizes:  # noqa: SIM110  # `all` is one more guard of each compiled call
        if not is_constant(size):
            return False
    return True


def is_constant(size: int) -> bool:
    """Whether a size is a constant for the compiler that traces."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imports Triton

    return has_static_value(size)


def constant_of(size: int) -> int:
    """A size as a number, for the compiler that traces; -1 if it is dynamic.

    Of one sample in a graph of dynamic sizes the number of rows is a symbol that Dynamo knows the
    value of, but passes to no function of constants.
    """
    return index(size) if is_constant(size) else -1


def find_activator(activating: str, route: str, m: int, k: int) -> str:
    """Name of the kernel that activates and quantizes at m, or ""; a constant for compilers."""
    return _cached_activator(activating, route, m, k)


@functools.lru_cache(maxsize=4096)
def _cached_activator(activating: str, route: str, m: int, k: int) -> str:
    by_rows = form_of_left(route, m, k) == Granularity.ROW.value
    return kernel_at(activating, m) if by_rows else ""


def reads_rows(route: str) -> bool:
    """Whether a route's kernels may read a left operand with rowwise scales."""
    return route != PLAIN and read_route(route)[0] is Granularity.ROW


def has_activator(activating: str, route: str, k: int) -> bool:
    """Whether there is an m at which `multiply_activated` has both kernels."""
    starts = {start for text in (activating, route) for start, _ in read_route(text)[1]}
    return any(find_activator(activating, route, m, k) for m in starts)


@functools.lru_cache(maxsize=64)
def _activating_kernel(name: str, device: torch.device) -> Kernel:
    """The kernel, or on another device its emulation."""
    load_kernels()
    kernel = kernel_named(name)
    here = current_device(device.type, device.index or 0)
    return kernel if kernel.runs_on(here) else kernel_named("torch.norm_quantize")


def form_of_left(route: str, m: int, k: int) -> str:
    """Granularity in which a route's kernel at m reads a quantized left operand, or "".

    It is "" if nothing is quantized, if a library quantizes itself, or if the layout of data and
    scales would not fit the kernel.
    """
    name = kernel_at(route, m)
    if not name or read_route(route)[0] is Granularity.NONE:
        return ""
    load_kernels()
    kernel = kernel_named(name)
    return laid_out(kernel.granularity, m, k) if kernel.parts else ""


def laid_out(scales: Granularity, m: int, k: int) -> str:
    """The granularity, or "" if a compiler's data and scales of it would not fit kernels."""
    whole = {Granularity.ROW: 1, Granularity.GROUP: GROUP}.get(scales, 0)
    fits = bool(m and whole) and m % 4 == k % max(whole, 1) == 0
    return scales.value if fits and pitch_of(k) == k else ""  # it leaves no gaps between rows


def quantizer_at(route: str, m: int) -> str:
    """Name of the quantizer of a route's kernel at m, which `form_of_left` has a form of."""
    return kernel_named(kernel_at(route, m)).parts[0]


def is_left_to_kernel(quantizer: str, k: int) -> bool:
    """Whether a quantizer is faster than a compiler's for k columns."""
    return k > LONGEST_HERE and quantizer in READS_ONCE


@functools.cache
def prepare_to_be_compiled(*others: Callable[..., str]) -> None:
    """Mark functions whose results are constants for compilers; once, as it imports Dynamo.

    Dynamo guards each global that it meets while it traces, and each call of a compiled model pays
    for it. It does not trace these functions.
    """
    for asked in (find_activator, *others):
        torch.compiler.assume_constant_result(asked)  # type: ignore[no-untyped-call]


def _quantize_activated(x: Tensor, activation: str, name: str) -> tuple[Tensor, Tensor]:
    """f(x) in FP8 with rowwise scales, by a kernel of op norm_quantize or its emulation."""
    kernel = _activating_kernel(name, x.device)
    x = row_major(x.detach())
    data, scale = _quantize_activated_fake(x, activation, name)
    out = QuantizedTensor(data, scale, Granularity.ROW)
    epilogue = NormEpilogue(activation=activation)
    kernel.launch(x, out, epilogue, kernel.workspace(x, out, epilogue))
    return data, scale


def _quantize_activated_fake(x: Tensor, activation: str, name: str) -> tuple[Tensor, Tensor]:
    data = empty_data(x.shape[0], x.shape[1], _fp8_of(x), x.device)
    return data, Granularity.ROW.empty_scale(x.shape[0], x.shape[1], x.device)


def _activated_gemm(
    x: Tensor, activation: str, name: str, data: Tensor, scale: Tensor, bias: Tensor | None,
    route: str,
) -> Tensor:  # fmt: skip
    """Both kernels of `multiply_activated` in one op, because a compiled graph pays for each op."""
    left, left_scales = _quantize_activated(x, activation, name)
    return _multiply(None, None, data, scale, bias, route, left, left_scales)


def _activated_gemm_fake(
    x: Tensor, activation: str, name: str, data: Tensor, scale: Tensor, bias: Tensor | None,
    route: str,
) -> Tensor:  # fmt: skip
    return _empty(x, None, data, dtype_of(route))


def _rectified_product(
    a: Tensor | None, b: Tensor | None, data: Tensor | None, scale: Tensor | None,
    bias: Tensor | None, route: str, left: Tensor | None = None,
    left_scales: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``relu(a @ b + bias)`` by the GEMM of a route's kernel at this m, which has one.

    Args:
        a: As of `multiply`, as the other arguments; None with ``left``.
        b: ``[k, n]``; None: only ``data`` is available.
        data: FP8 data of ``b.t()``; None if it is to be quantized here.
        scale: The scales of ``data``.
        bias: ``[n]``, or None.
        route: The route.
        left: a in FP8.
        left_scales: The scales of ``left``.
        out: What is written, or None.
    """
    whole = left if a is None else a
    assert whole is not None
    kernel = kernel_here(route, len(whole), whole.device)
    assert kernel is not None
    x, right = quantized_operands(kernel, a, b, data, scale, left, left_scales)
    assert x.scale is not None  # FP8 has scales
    if out is None:
        out = _empty(whole, b, data, dtype_of(route))
    _launch_scaled(kernel, x.data, x.scale, right, out, bias, rectifies=True)
    return out


def _rectified_product_fake(
    a: Tensor | None, b: Tensor | None, data: Tensor | None, scale: Tensor | None,
    bias: Tensor | None, route: str, left: Tensor | None = None,
    left_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _multiply_fake(a, b, data, scale, bias, route, left)


def written_into(function: Callable[..., Tensor]) -> Callable[..., None]:
    """A function that writes to its last argument what this one returns.

    Args:
        function: With an optional argument ``out``, to which it need not write.
    """

    def write(*given: Any) -> None:
        *others, out = given
        made = function(*others, out=out)
        if made is not out:
            out.copy_(made)

    return write


def quantize_weight(weight: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    """Data and scales of a weight ``[n, k]`` in FP8, as `multiply` takes them."""
    data, scale = OPS.quantize_weight(weight, scales)
    return data, scale


def _multiply(
    a: Tensor | None,
    b: Tensor | None,
    data: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    route: str,
    left: Tensor | None = None,
    left_scales: Tensor | None = None,
    left_scale: str = "",
    apart: bool = False,
    *,
    is_wide: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See `multiply`; ``left`` and ``data`` replace a and b of None.

    A wide result of a kernel is float32; one without a kernel has the dtype of a, and is not
    written to ``out``.
    """
    whole = left if a is None else a
    assert whole is not None
    loaded = _ROUTES.get((route, whole.device)) or _load_route(route, whole.device)
    # The gradient of a weight sums over samples.
    m = whole.shape[1] if loaded.form is Granularity.NONE else whole.shape[0]
    other = bool(m & 15)
    kernel = loaded.kernels[other][bisect_right(loaded.starts[other], m) - 1]
    if kernel is None or not m:
        assert a is not None
        if b is None:
            b = _dequantized(*_typed(data, scale, loaded.form, whole), loaded.form, a.dtype)
        else:
            b = b.to(a.dtype)
        if bias is None or apart:
            return torch.mm(a, b) if bias is None else torch.mm(a, b).add_(bias)
        return torch.addmm(bias, a, b)
    if out is None:
        out = _empty(whole, b, data, torch.float32 if is_wide else loaded.dtype)
    data, scale = _typed(data, scale, loaded.form, whole)
    right: Tensor | QuantizedTensor
    if not kernel.parts:  # a library that quantizes itself
        left, b = None, None if b is None else b.to(loaded.dtype)
    if data is None and b is not None and (left is not None or b.dtype is torch.float32):
        data, scale = _quantize_weight(b.t(), loaded.form.value)
    if data is not None:
        right = right_of(data, scale, loaded.form)
        if left is not None:
            if left_scales is None:
                left_scales = equal_scales(kernel.granularity, left, left_scale)
            _launch_scaled(kernel, left, left_scales, right, out, bias)
            if loaded.watch is not None:
                loaded.watch.see(a, b, out, bias, kernel.name)
            return out
    else:
        assert b is not None
        # Column-major b is the transpose of a weight.
        right = row_major(b.t()).t() if b.stride(0) == 1 else row_major(b)
    assert a is not None
    apart = bool(kernel.parts)  # our quantizers read strided rows
    a = row_major(a.t(), apart).t() if loaded.form is Granularity.NONE else row_major(a, apart)
    if torch.is_autocast_enabled(a.device.type):  # emulations multiply in float32
        with torch.autocast(a.device.type, enabled=False):
            kernel.launch(a, right, out, bias, kernel.workspace(a, right))
    else:
        kernel.launch(a, right, out, bias, kernel.workspace(a, right))
    if loaded.watch is not None:
        loaded.watch.see(a, b, out, bias, kernel.name)
    return out


def right_of(data: Tensor, scale: Tensor | None, form: Granularity) -> QuantizedTensor:
    """The right operand of a product, from the data of ``b.t()``."""
    if data.stride(1) == 1 and data.stride(0) == pitch_of(data.shape[1]):
        return QuantizedTensor(data, scale, form, True)
    assert scale is not None  # gathered, or transposed with a tensorwise scale
    return QuantizedTensor.packed(data, scale, form).t()


def quantized_operands(
    kernel: Kernel, a: Tensor | None, b: Tensor | None, data: Tensor | None, scale: Tensor | None,
    left: Tensor | None = None, left_scales: Tensor | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor]:  # fmt: skip
    """Both operands in FP8, with the bytes that the quantizers of a composition write.

    In one launch where the composition has one for both. Arguments as of `multiply`; ``left``
    replaces a.
    """
    whole = left if a is None else a
    assert whole is not None
    forms = kernel.granularity, kernel.b_granularity
    data, scale = _typed(data, scale, forms[1], whole)
    weight = None
    if data is None:
        assert b is not None
        weight = row_major(b.t()) if b.stride(0) == 1 else row_major(b).t()
    if left is None:
        assert a is not None
        a = row_major(a, apart=True)
        if kernel.parts[0] == BY_ROWS and weight is not None and weight.dtype is a.dtype:
            from lokakern.kernels.cuda.quantize_together import Matrix, launch_together

            left, left_scales = _quantize_weight_fake(a, forms[0].value)
            data, scale = _quantize_weight_fake(weight, forms[1].value)
            right = Matrix(weight, data, scale, forms[1])
            launch_together((right, Matrix(a, left, left_scales, forms[0])))
        else:
            left, left_scales = _quantize_weight(a, forms[0].value)
    if data is None:
        assert weight is not None
        data, scale = _quantize_weight(weight, forms[1].value)
    return QuantizedTensor(left, left_scales, forms[0]), right_of(data, scale, forms[1])


def multiply_quantized(
    left: Tensor, scales: Tensor, b: Tensor | None, route: str, data: Tensor | None = None,
    data_scales: Tensor | None = None, *, is_wide: bool = False,
) -> Tensor:  # fmt: skip
    """``left @ b`` by a route that has a kernel at this m; float32 if it ``is_wide``.

    Args:
        left: ``[m, k]`` in FP8, in the granularity that the kernel reads.
        scales: Its scales.
        b: ``[k, n]``, bfloat16; None with ``data``.
        route: The route, which names the granularity of b.
        data: FP8 data of ``b.t()``; None with b.
        data_scales: Its scales.
        is_wide: Whether the kernel writes float32.
    """
    return _multiply(None, b, data, data_scales, None, route, left, scales, is_wide=is_wide)


def _typed(
    data: Tensor | None, scale: Tensor | None, form: Granularity, x: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Data and scales from bytes, if they are bytes."""
    if data is None or scale is None or data.dtype is not torch.uint8:
        return data, scale
    width = form.scale_shape(*data.shape)[1]
    return data.view(_fp8_of(x)), scale.view(torch.float32)[:, :width]


def _dequantized(
    data: Tensor | None, scale: Tensor | None, form: Granularity, dtype: torch.dtype
) -> Tensor:
    """The right operand in bfloat16 or float16, from its FP8 form."""
    assert data is not None
    return dequantize(QuantizedTensor(data, scale, form, True), Format.of(dtype))


def _launch_scaled(
    kernel: Kernel, left: Tensor, scales: Tensor, right: QuantizedTensor, out: Tensor,
    bias: Tensor | None, rectifies: bool = False,
) -> None:  # fmt: skip
    """Launch the GEMM of a composition on a quantized left operand."""
    multiply = KERNELS[kernel.parts[-1]]
    extra = (Epilogue("relu"),) if rectifies else ()
    workspace = multiply.workspace(left, scales, *right.transpose, None, None, *extra)
    with torch.autocast(left.device.type, enabled=False):
        multiply.launch(left, scales, *right.transpose, out, bias, workspace, *extra)


_SCALES: dict[tuple[Granularity, torch.Size, torch.device, str], Tensor] = {}
_SCALES_OF_GRAPHS: dict[Any, Tensor] = {}  # kept for good: nobody tells when a graph ends


def equal_scales(granularity: Granularity, x: Tensor, scale: str) -> Tensor:
    """A tensor of equal scales, cached, because filling it takes a launch."""
    key = (granularity, x.shape, x.device, scale)
    found = _SCALES.get(key)
    is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if found is None:
        value = float(scale)

        def filled() -> Tensor:
            return granularity.empty_scale(x.shape[0], x.shape[1], x.device).fill_(value)

        found = filled() if is_captured else outlasting(x.device, filled)
        if not is_captured:  # a fill during capture runs only when the graph is replayed
            if len(_SCALES) > 256:
                _SCALES.clear()
                _SCALES.update(_SCALES_OF_GRAPHS)
            _SCALES[key] = found
    elif is_captured:
        _SCALES_OF_GRAPHS[key] = found
    if jit.recorder is not None:
        jit.recorder.constant(found)
    return found


def quantize_by(x: Tensor, scale: str) -> Tensor:
    """Quantize with a static scale in torch's operators, which torch.compile fuses."""
    fp8 = _fp8_of(x)
    most = finfo(fp8).max
    return (x.float() / float(scale)).clamp(-most, most).to(fp8).contiguous()


def _fp8_of(x: Tensor) -> torch.dtype:
    return fp8_on(x.device)


def fp8_on(device: torch.device) -> torch.dtype:
    """The dtype of FP8 data on a device."""
    if _IS_AMD and device.type == "cuda":
        return fp8_format(current_device("cuda", device.index or 0)).dtype
    return float8_e4m3fn


def _empty(
    a: Tensor, b: Tensor | None, data: Tensor | None, dtype: torch.dtype = bfloat16
) -> Tensor:
    """An empty output."""
    n = b if b is not None else data
    assert n is not None
    columns = n.shape[1] if n is b else n.shape[0]
    return torch.empty((a.shape[0], columns), dtype=dtype, device=a.device)


def _multiply_fake(
    a: Tensor | None,
    b: Tensor | None,
    data: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    route: str,
    left: Tensor | None = None,
    left_scales: Tensor | None = None,
    left_scale: str = "",
    apart: bool = False,
) -> Tensor:
    whole = left if a is None else a
    assert whole is not None
    return _empty(whole, b, data, dtype_of(route))


def _weight_gradient(grad: Tensor, x: Tensor, route: str) -> Tensor:
    """``grad.t() @ x`` by the kernel of a route at the number of rows."""
    if _is_left_to_torch(grad, x, route):
        dtype = dtype_of(route)
        return torch.mm(grad.t().to(dtype), x.to(dtype))
    return _multiply(grad.t(), x, None, None, None, route)


def _wide_weight_gradient(grad: Tensor, x: Tensor, route: str) -> Tensor:
    """The same in float32, not rounded to bfloat16 first where the kernel `writes_float32`."""
    kernel = kernel_here(route, grad.shape[0], x.device)
    if kernel is None or _is_left_to_torch(grad, x, route):
        if x.is_cuda and not _IS_AMD:
            return torch.mm(grad.t(), x, out_dtype=torch.float32)
        return grad.t().float() @ x.float()
    is_wide = writes_float32(kernel.name)
    return _multiply(grad.t(), x, None, None, None, route, is_wide=is_wide).float()


def _is_left_to_torch(grad: Tensor, x: Tensor, route: str) -> bool:
    is_vector = grad.shape[1] == 1 or x.shape[1] == 1
    return is_vector and kernel_at(route, grad.shape[0]).startswith(BY_TILES)


def writes_float32(kernel: str) -> bool:
    """Whether a composition's GEMM takes a float32 output, with no loss of time.

    At 8192 samples and 4096 x 4096, `torch.scaled_mm_block` takes 239 us of an H200 with one, 234
    without. At 4096 x 15360, products by rows and with one scale take 9 and 14 % longer.
    """
    return kernel.endswith(("+torch.scaled_mm_block", "+torch.emulated_block"))


def kernel_here(route: str, m: int, device: torch.device) -> Kernel | None:
    """The kernel of a route at m on a device; None for the unquantized product."""
    if route == PLAIN or not m:
        return None
    loaded = _ROUTES.get((route, device)) or _load_route(route, device)
    other = bool(m & 15)
    return loaded.kernels[other][bisect_right(loaded.starts[other], m) - 1]


def _add_weight_gradient(
    main_grad: Tensor, grad: Tensor, x: Tensor, route: str, scales: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:  # fmt: skip
    """Add ``grad.t() @ x`` to float32 ``main_grad``, which nothing rounds before.

    Except where a kernel of these scales that adds to float32 is for other GPUs than this one: the
    product is rounded to the dtype of its operands then. With ``scales`` and ``amax`` of `Delayed`
    for a route with a key.

    Raises:
        ShapeError: ``main_grad`` is not float32 ``[n, k]``.
    """
    check_main_grad(main_grad, grad.shape[1], x.shape[1])
    # The version stays: compilers may save it for the backward pass of each graph that is kept.
    total, kernel = main_grad.data, kernel_here(route, grad.shape[0], x.device)
    with torch.autocast(x.device.type, enabled=False):  # emulations multiply in float32
        if kernel is not None and _adds(kernel, x.device):
            if scales is not None and amax is not None:
                left, right = _quantize_delayed(grad.t(), x.t(), scales, amax, route, GRAD_WEIGHT)
            else:
                left = quantize(_readable(grad.t()), kernel.granularity)
                right = quantize(_readable(x.t()), kernel.b_granularity)
            scaled_gemm(left, right.t(), accumulate=True, out=total)
        elif kernel is not None and scales is not None and amax is not None:
            total.add_(_delayed_gemm(grad.t(), x, None, scales, amax, route, GRAD_WEIGHT))
        elif kernel is not None:
            total.add_(_weight_gradient(grad, x, route))
        elif x.is_cuda and not _IS_AMD:
            torch.ops.aten.addmm.dtype_out(total, grad.t(), x, torch.float32, out=total)
        else:  # torch adds such products to float32 on NVIDIA GPUs only
            total.addmm_(grad.t().float(), x.float())


def check_main_grad(main_grad: Tensor, n: int, k: int) -> None:
    """Check what the gradient of a weight ``[n, k]`` is added to.

    Raises:
        ShapeError: It is not float32 ``[n, k]``.
    """
    if main_grad.dtype is not torch.float32 or tuple(main_grad.shape) != (n, k):
        raise ShapeError(
            f"main_grad of a weight is {list(main_grad.shape)} {main_grad.dtype}; expected "
            f"{[n, k]} torch.float32"
        )


def _readable(x: Tensor) -> Tensor:
    """The matrix as quantizers read it, row-major or column-major."""
    return x if 1 in x.stride() else x.contiguous()


def _delayed_gemm(
    a: Tensor, b: Tensor, bias: Tensor | None, scales: Tensor, amax: Tensor, route: str,
    product: int,
) -> Tensor:  # fmt: skip
    """``a @ b + bias`` by a route, with scales of earlier steps, see `Delayed`.

    Args:
        a: ``[m, k]``, of the dtype of the route.
        b: ``[k, n]``, of that dtype or float32.
        bias: ``[n]``, or None.
        scales: Of the layer.
        amax: That of the products of the forward or of the backward pass.
        route: With a key, see `delayed`.
        product: `OUTPUT`, `GRAD_INPUT` or `GRAD_WEIGHT`.
    """
    kernel = kernel_here(route, a.shape[1 if product == GRAD_WEIGHT else 0], a.device)
    if kernel is None:
        b = b.to(a.dtype)
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    left, right = _quantize_delayed(a, b.t(), scales, amax, route, product)
    assert left.scale is not None  # FP8 has scales
    out = _empty(a, b, None, dtype_of(route))
    _launch_scaled(kernel, left.data, left.scale, right.t(), out, bias)
    if sampled_check.is_checked(route):
        watch = sampled_check.watch_named(sampled_check.check_of(route))
        watch.see(a, b, out, bias, kernel.name)
    return out


def _quantize_delayed(
    a: Tensor, b: Tensor, scales: Tensor, amax: Tensor, route: str, product: int
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Both operands of a product ``a @ b.t()`` with scales of earlier steps, recording their amax.

    With a scale of their own in steps before the first `settle` of an operand.
    """
    key, amax = delayed_key(route), amax.data  # whose version stays, as of main gradients
    found = []
    for x, scale, place in zip((a, b), *_PLACES[product], strict=True):
        x, most = _readable(x), amax[place : place + 1]
        if (key, scale) in _SETTLED:
            earlier = scales.data[scale : scale + 1]
            found.append(quantize(x, Granularity.TENSOR, scale=earlier, amax=most))
        else:
            wide = x.float().abs()
            torch.maximum(most, torch.where(wide.isfinite(), wide, 0.0).amax(), out=most)
            _SEEN.add((key, scale))
            found.append(quantize(x, Granularity.TENSOR))
    return found[0], found[1]


@functools.lru_cache(maxsize=256)
def _adds(kernel: Kernel, device: torch.device) -> bool:
    """Whether a kernel for the scales of this one adds to float32 here, emulated if this one is."""
    here, scales = current_device(device.type, device.index or 0), _scales_of(kernel)
    return any(
        other.accumulates
        and _scales_of(other) == scales
        and other.runs_on(here)
        and ("any" not in other.architectures or other.name in kernel.parts)
        for other in KERNELS.values()
        if other.op == "scaled_gemm" and not other.library
    )


def _scales_of(kernel: Kernel) -> tuple[Granularity, Granularity]:
    return kernel.granularity, kernel.b_granularity


def _weight_gradient_fake(
    grad: Tensor, x: Tensor, route: str, dtype: torch.dtype | None = None
) -> Tensor:
    return grad.new_empty((grad.shape[1], x.shape[1]), dtype=dtype or dtype_of(route))


def _quantize_weight(weight: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    weight = weight.detach()
    weight = weight if 1 in weight.stride() else weight.contiguous()
    quantized = quantize(weight, Granularity(scales))
    assert quantized.scale is not None  # FP8 has scales
    return quantized.data, quantized.scale


def _quantize_weight_fake(weight: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    fp8 = _fp8_of(weight)
    data = empty_data(rows, columns, fp8, weight.device)
    return data, Granularity(scales).empty_scale(rows, columns, weight.device)


recorded_op(
    _LIBRARY,
    "routed_gemm(Tensor? a, Tensor? b, Tensor? data, Tensor? scale, Tensor? bias, str route, "
    'Tensor? left=None, Tensor? left_scales=None, str left_scale="", bool apart=False) -> Tensor',
    _multiply,
)
# A fixed layout would copy views of tensors that are not materialized yet.
_ANY_LAYOUT = (torch.Tag.flexible_layout,)
recorded_op(
    _LIBRARY, "weight_gradient(Tensor grad, Tensor x, str route) -> Tensor", _weight_gradient,
    tags=_ANY_LAYOUT,
)  # fmt: skip
recorded_op(
    _LIBRARY, "wide_weight_gradient(Tensor grad, Tensor x, str route) -> Tensor",
    _wide_weight_gradient, tags=_ANY_LAYOUT,
)  # fmt: skip
plain_op(
    _LIBRARY,
    "add_weight_gradient(Tensor(a!) main_grad, Tensor grad, Tensor x, str route, "
    "Tensor? scales=None, Tensor(b!)? amax=None) -> ()",
    _add_weight_gradient,
    tags=_ANY_LAYOUT,
)
plain_op(
    _LIBRARY,
    "delayed_gemm(Tensor a, Tensor b, Tensor? bias, Tensor scales, Tensor(a!) amax, str route, "
    "int product) -> Tensor",
    _delayed_gemm,
    tags=_ANY_LAYOUT,
)
torch.library.register_fake(
    "lokakern::delayed_gemm",
    lambda a, b, bias, scales, amax, route, product: _empty(a, b, None, dtype_of(route)),
    lib=_LIBRARY,
)
recorded_op(
    _LIBRARY, "quantize_weight(Tensor weight, str scales) -> (Tensor, Tensor)", _quantize_weight,
    tags=_ANY_LAYOUT,
)  # fmt: skip
recorded_op(
    _LIBRARY, "quantize_activated(Tensor x, str activation, str name) -> (Tensor, Tensor)",
    _quantize_activated,
)  # fmt: skip
recorded_op(
    _LIBRARY,
    "activated_gemm(Tensor x, str activation, str name, Tensor data, Tensor scale, Tensor? bias, "
    "str route) -> Tensor",
    _activated_gemm,
)
recorded_op(
    _LIBRARY,
    "rectified_product(Tensor? a, Tensor? b, Tensor? data, Tensor? scale, Tensor? bias, "
    "str route, Tensor? left=None, Tensor? left_scales=None) -> Tensor",
    _rectified_product,
)
# As Inductor calls products whose output it places (`lokakern.nn.inductor`).
recorded_op(
    _LIBRARY,
    "routed_gemm_into(Tensor? a, Tensor? b, Tensor? data, Tensor? scale, Tensor? bias, str route, "
    "Tensor? left, Tensor? left_scales, str left_scale, bool apart, Tensor(a!) out) -> ()",
    written_into(_multiply),
)
recorded_op(
    _LIBRARY,
    "rectified_product_into(Tensor? a, Tensor? b, Tensor? data, Tensor? scale, Tensor? bias, "
    "str route, Tensor? left, Tensor? left_scales, Tensor(a!) out) -> ()",
    written_into(_rectified_product),
)
torch.library.register_fake("lokakern::rectified_product", _rectified_product_fake, lib=_LIBRARY)
torch.library.register_fake("lokakern::activated_gemm", _activated_gemm_fake, lib=_LIBRARY)
torch.library.register_fake("lokakern::quantize_activated", _quantize_activated_fake, lib=_LIBRARY)
torch.library.register_fake("lokakern::routed_gemm", _multiply_fake, lib=_LIBRARY)
torch.library.register_fake("lokakern::weight_gradient", _weight_gradient_fake, lib=_LIBRARY)
torch.library.register_fake(
    "lokakern::wide_weight_gradient", functools.partial(_weight_gradient_fake, dtype=torch.float32),
    lib=_LIBRARY,
)  # fmt: skip
torch.library.register_fake("lokakern::add_weight_gradient", lambda *_: None, lib=_LIBRARY)
torch.library.register_fake("lokakern::quantize_weight", _quantize_weight_fake, lib=_LIBRARY)


class RoutedLinear(torch.autograd.Function):
    """``x @ weight.t() + bias`` and its gradients, each of the three products by its route.

    The weight is of the dtype of x, or float32 where autocast would round it: see `multiply`.
    Gradients that are differentiated again (``create_graph=True``) are those of `nn.Linear`,
    unquantized.

    Arguments are flat, as torch.compile requires: the FP8 weights for the output and for the
    gradient of the input (None: kernels quantize it), three routes, the static scale of x or "",
    and ``apart`` of `multiply`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        data: Tensor | None,
        scale: Tensor | None,
        turned: Tensor | None,
        turned_scale: Tensor | None,
        to_output: str,
        to_input: str,
        to_weight: str,
        input_scale: str,
        apart: bool,
    ) -> Tensor:
        ctx.to_input, ctx.to_weight, ctx.dtype = to_input, to_weight, weight.dtype
        given, kept = weight, weight
        is_plain = turned is not None and not kernel_at(to_input, x.shape[0])
        if to_input == PLAIN or is_plain or (not is_compiling() and _is_off(to_input)):
            kept = weight = weight.to(x.dtype)  # both products read the same rounded weight
        elif turned is not None:
            kept = None  # type: ignore[assignment]  # the weight may change before the backward pass
        ctx.save_for_backward(x, kept, turned, turned_scale)
        if not is_compiling():  # compiled graphs are differentiated once
            version = None if given.is_inference() else given._version
            ctx.given = None if kept is given else (given, version)
        return output(x, weight, bias, data, scale, to_output, input_scale, apart)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        grad = gradients[0]
        x, weight, turned, turned_scale = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if is_grad_enabled() and not is_compiling():
            weight = weight if ctx.given is None else unchanged(*ctx.given)
            return *_gradients(grad, x, weight, needs), *[None] * 9
        return *routed_gradients(ctx, grad, x, weight, turned, turned_scale), *[None] * 9


class KeepingLinear(RoutedLinear):
    """`RoutedLinear` of a layer that keeps a main gradient, or scales and their amax.

    More arguments: ``main_grad`` ``[n, k]``, to which the weight's gradient is added, or None; and
    a `Delayed`, in three arguments, or three times None. To autograd a weight with a main gradient
    has no other one, except where gradients are differentiated again, or where torch.autograd.grad
    asks for that of the weight.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *others, main_grad, scales, amax, amax_behind = given
        x, weight, bias, _, _, _, _, to_output, to_input, to_weight, *_ = others
        # Not saved, as other passes may write to them until the backward one.
        ctx.main_grad, ctx.scales, ctx.amax = main_grad, scales, amax_behind
        if scales is None or not has_delayed(to_output):
            return RoutedLinear.forward(ctx, *others)
        ctx.to_input, ctx.to_weight, ctx.dtype = to_input, to_weight, weight.dtype
        ctx.save_for_backward(x, weight, None, None)
        ctx.given = None  # as the weight that is saved is the original one
        y: Tensor = OPS.delayed_gemm(x, weight.t(), bias, scales, amax, to_output, OUTPUT)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if is_grad_enabled() and not is_compiling():
            return *RoutedLinear.backward(ctx, *gradients), *[None] * 4
        needs, main_grad = ctx.needs_input_grad, ctx.main_grad
        is_asked = needs[1]
        if is_asked and main_grad is not None and not is_compiling():
            try:  # torch.autograd.grad of other tensors adds to no gradient of a weight
                is_asked = torch._C._will_engine_execute_node(ctx.next_functions[1][0])
            except RuntimeError:  # its result is the gradient of the weight
                main_grad = None
        (grad,), to_weight, to_input = gradients, ctx.to_weight, ctx.to_input
        x, weight, turned, turned_scale = ctx.saved_tensors
        is_delayed = ctx.scales is not None and has_delayed(to_weight)
        state = (ctx.scales, ctx.amax) if is_delayed else (None, None)
        grad_x = grad_weight = grad_bias = None
        if is_asked and main_grad is not None:  # first, as in `routed_gradients`
            OPS.add_weight_gradient(main_grad, grad, x, to_weight, *state)
        elif is_asked and is_delayed:
            grad_weight = OPS.delayed_gemm(grad.t(), x, None, *state, to_weight, GRAD_WEIGHT)
        elif is_asked and to_weight == PLAIN:
            grad_weight = grad.t() @ x
        elif is_asked:
            grad_weight = OPS.weight_gradient(grad, x, to_weight)
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.dtype)
        if needs[0] and ctx.scales is not None and has_delayed(to_input):
            given = ctx.scales, ctx.amax, to_input, GRAD_INPUT
            grad_x = OPS.delayed_gemm(grad, weight, None, *given)
        elif needs[0] and to_input == PLAIN:
            grad_x = grad @ weight.to(grad.dtype)
        elif needs[0]:
            is_checked = weight is None and sampled_check.is_checked(to_input)
            if is_checked and _is_unchanged(*ctx.given):
                weight = ctx.given[0]
            grad_x = multiply(grad, weight, turned, turned_scale, None, to_input, "", False)
        if needs[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, *[None] * 13


class TurnedLinear(RoutedLinear):
    """`RoutedLinear` of the transpose of a row-major weight ``[k, n]``; only for compiled graphs.

    The gradient of the weight is row-major ``[k, n]``, too, transposed.
    """

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        grad = gradients[0]
        x, weight, _, _ = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs[1]:  # first, as in `RoutedLinear`
            if ctx.to_weight == PLAIN:
                turned = x.t() @ grad
            else:
                turned = OPS.weight_gradient(x, grad, ctx.to_weight)
            grad_weight = turned.to(ctx.dtype).t()
        if needs[0]:
            if ctx.to_input == PLAIN:
                grad_x = grad @ weight
            else:
                grad_x = multiply(grad, weight, None, None, None, ctx.to_input)
        if needs[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, *[None] * 9


def routed_gradients(
    ctx: Any, grad: Tensor, x: Tensor, weight: Any, turned: Tensor | None,
    turned_scale: Tensor | None, *, sums_bias: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, weight and, if it is to be summed here, bias by their routes."""
    needs = ctx.needs_input_grad
    grad_x = grad_weight = grad_bias = None
    if needs[1]:
        # First, and of the gradient without a copy: Inductor materializes the operands of an
        # opaque op, and later uses read that. With a copy, or scales computed before this
        # product, it would recompute the gradient of a norm for each use.
        if ctx.to_weight == PLAIN:
            grad_weight = grad.t() @ x
        else:
            grad_weight = OPS.weight_gradient(grad, x, ctx.to_weight)
        grad_weight = grad_weight.to(ctx.dtype)
    if needs[0]:
        if ctx.to_input == PLAIN:
            grad_x = grad @ weight
        else:
            is_checked = weight is None and sampled_check.is_checked(ctx.to_input)
            if is_checked and _is_unchanged(*ctx.given):
                weight = ctx.given[0]
            grad_x = multiply(grad, weight, turned, turned_scale, None, ctx.to_input, "", False)
    if needs[2] and sums_bias:
        grad_bias = grad.sum(0)
    return grad_x, grad_weight, grad_bias


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> list[Any]:
    """Gradients of x, weight and bias in differentiable operators."""
    return [
        grad @ weight.to(x.dtype) if needs[0] else None,
        (grad.t() @ x).to(weight.dtype) if needs[1] else None,
        grad.sum(0) if needs[2] else None,
    ]


def _is_unchanged(weight: Tensor, version: int | None) -> bool:
    """Whether the original weight is unchanged since the forward pass."""
    return version is None or weight._version == version


def unchanged(weight: Tensor, version: int | None) -> Tensor:
    """The original weight of a forward pass that saw this version of it.

    Raises:
        UnsupportedError: It changed since.
    """
    if not _is_unchanged(weight, version):
        raise UnsupportedError(
            "a gradient that is differentiated again (create_graph=True) needs the weight of its "
            f"layer, {list(weight.shape)}, which was changed since the forward pass: call the "
            "layer again, or change weights after the backward pass"
        )
    return weight


def output(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    data: Tensor | None,
    scale: Tensor | None,
    route: str,
    input_scale: str = "",
    apart: bool = False,
) -> Tensor:
    """``x @ weight.t() + bias`` by a route; arguments as of `multiply`."""
    if weight is None:
        return multiply(x, None, data, scale, bias, route, input_scale, apart)
    if route == PLAIN:
        weight = weight.to(x.dtype)
        if bias is None or not apart:
            return linear(x, weight, bias)
        return linear(x, weight) + bias
    return multiply(x, weight.t(), data, scale, bias, route, input_scale, apart)


def scales_of(route: str) -> str:
    """Granularity of the right operand of a route."""
    return route.partition(";")[0]
