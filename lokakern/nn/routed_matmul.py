"""Products by route: what runs where a module chose its kernels beforehand, by range of m.

A route is text, so that a compiled graph holds all of it and none of this process: the scales of
the right operand, then for m that 16 divides and for any other, from which m on which kernel runs::

    row;16:0=,1024=cuda.quantize_row+cuda.scaled_gemm_row,20481=;1:0=

No kernel is the unquantized product, by torch. Where a kernel's GPU is not, its emulation runs.
A part behind says how the product is checked (`lokakern.sampled_check`).
The ops look a kernel up when they run, not when they are traced: m may be dynamic. Where a compiler
knows m, what is quantized of a composition's left operand is written in steps that it puts where
this operand is made: a kernel less, and bfloat16 that nobody else reads is never written. Long rows
are left to a quantizer that reads them once.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lokakern import numerics, sampled_check
from lokakern.device import current_device
from lokakern.epilogue import NormEpilogue
from lokakern.errors import UnsupportedError
from lokakern.functional.quantize import dequantize, quantize
from lokakern.quantized_tensor import ROW_BYTES
from lokakern.registry.register import KERNELS, Kernel, fp8_format, kernel_named, load_kernels
from lokakern.types import GROUP, Granularity, QuantizedTensor, empty_data

Segments = list[tuple[int, str]]  # from which m on which kernel, "" for the unquantized product
PLAIN = ""  # the route that quantizes nothing
# Columns up to which a compiler quantizes rows where they are made. Longer ones it reads twice, and
# the quantizer below once: 8192 rows of 10240, 15360 and 123200 columns take that 65, 94 and 891 us
# of an H200, and Inductor 102, 111 and 1441; the first two behind a block norm take 195 and 292
# apart, and 208 and 314 in one kernel, but 4096 columns 78 and 53. Between 4096 and 10240 nothing
# was timed.
LONGEST_HERE = 8192
READS_ONCE = "cuda.quantize_row"
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
_WAYS: dict[tuple[str, torch.device], _Ways] = {}


class _Ways(NamedTuple):
    """A route on a device: for m that 16 divides, and for any other."""

    form: Granularity
    starts: tuple[list[int], list[int]]
    kernels: tuple[list[Kernel | None], list[Kernel | None]]
    watch: sampled_check.Watch | None


def route_text(form: Granularity, aligned: Segments, other: Segments) -> str:
    """A route as text; `PLAIN` if it has no kernel."""
    if not any(name for _, name in (*aligned, *other)):
        return PLAIN
    parts = (",".join(f"{start}={name}" for start, name in x) for x in (aligned, other))
    return f"{form};16:{next(parts)};1:{next(parts)}"


def read_route(text: str) -> tuple[Granularity, Segments, Segments]:
    """What `route_text` wrote."""
    form, *parts = text.split(";")
    found: list[Segments] = []
    for part in parts[:2]:
        pairs = (pair.split("=") for pair in part.partition(":")[2].split(","))
        found.append([(int(start), name) for start, name in pairs])
    return Granularity(form), found[0], found[1]


@functools.lru_cache(maxsize=4096)
def kernel_at(text: str, m: int) -> str:
    """Name of the kernel of a route at m; "" for the unquantized product."""
    if text == PLAIN:
        return ""
    _, *both = read_route(text)
    segments = both[0] if m % 16 == 0 else both[1]
    return segments[bisect_right([start for start, _ in segments], m) - 1][1]


def quantizes_at(routes: tuple[str, ...], m: int) -> bool:
    """Whether any of these routes has a kernel at m."""
    return any(kernel_at(route, m) for route in routes)  # a compiler takes this for a constant


def emulation_of(kernel: Kernel) -> Kernel:
    """The kernel that rounds alike on any device, in stock PyTorch.

    Raises:
        UnsupportedError: None does.
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
                           "and nothing emulates its scales")  # fmt: skip


def _ways(text: str, device: torch.device) -> _Ways:
    load_kernels()
    form, *both = read_route(text)
    here = current_device(device.type, device.index or 0)
    kernels: list[list[Kernel | None]] = []
    for segments in both:
        found = [kernel_named(name) if name else None for _, name in segments]
        kernels.append([k if k is None or k.runs_on(here) else emulation_of(k) for k in found])
    starts = [[start for start, _ in segments] for segments in both]
    if len(_WAYS) > 4096:
        _WAYS.clear()
    check = sampled_check.check_of(text)
    watch = sampled_check.watch_named(check) if check else None
    ways = _Ways(form, (starts[0], starts[1]), (kernels[0], kernels[1]), watch)
    _WAYS[text, device] = ways
    return ways


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
        a: ``[m, k]``, bfloat16.
        b: ``[k, n]``, bfloat16, or float32 of a weight: what quantizes it reads it as it is, and
            what multiplies in bfloat16 rounds it first. None: ``data`` stands for it everywhere.
        data: FP8 elements of ``b.t()`` by `quantize_weight`, which is not quantized again; None
            where the kernel is to quantize b.
        scale: Its scales.
        bias: ``[n]``, or None.
        route: See this module.
        left_scale: One scale for all of a, where it is known; as text, because of a number
            torch.compile makes a symbol.
        apart: Whether the bias is added by itself where nothing is quantized.
    """
    form, (m, k) = "", a.shape
    if torch.compiler.is_compiling() and is_known(m, k):
        form = _form_of_left(route, m, k)
    left = left_scales = None
    if left_scale:
        left = quantize_by(a, left_scale)
    elif form and not _is_left_to_kernel(route, m, k):
        left, left_scales = _quantize_here(a, form)
    if form and data is None:
        assert b is not None
        data, scale = quantize_weight(b.t(), scales_of(route))
    is_read = not form or sampled_check.is_checked(route)
    # None, or the compiler would have to make what nobody reads.
    given = a if is_read or left is None else None
    out: Tensor = torch.ops.lokakern.routed_gemm(
        given, b if is_read else None, data, scale, bias, route, left, left_scales, left_scale,
        apart,
    )  # fmt: skip
    return out


def multiply_activated(
    x: Tensor, activation: str, activating: str, data: Tensor, scale: Tensor, bias: Tensor | None,
    route: str,
) -> Tensor | None:  # fmt: skip
    """``f(x) @ b + bias`` with x activated and quantized by one kernel of the registry.

    Inductor's takes 25 us of an H200 for relu, scales of rows and rounding at 8192 x 2048, where
    `cuda.activate_quantize_row` takes 14, as long as a quantizer alone.

    Args:
        x: ``[m, k]``, bfloat16.
        activation: f, one of `lokakern.epilogue.ACTIVATIONS`.
        activating: From which m on which kernel activates and quantizes, a route.
        data: As of `multiply`, as are the next three.
        scale: Its scales.
        bias: ``[n]``, or None.
        route: Of the product.

    Returns:
        None where m is not known, or no kernel was timed there, or this call is to be checked.
    """
    m, k = x.shape
    if not is_known(m, k):
        return None
    name = _activator(activating, route, m, k)
    if not name or (not torch.compiler.is_compiling() and sampled_check.is_due(route)):
        return None  # a check reads f(x)
    left, left_scales = torch.ops.lokakern.quantize_activated(x, activation, name)
    out: Tensor = torch.ops.lokakern.routed_gemm(
        None, None, data, scale, bias, route, left, left_scales, ""
    )
    return out


def is_known(*sizes: int) -> bool:
    """Whether no compiler takes any of these for a symbol."""
    if not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value  # which imports Triton

    return all(map(has_static_value, sizes))


def _activator(activating: str, route: str, m: int, k: int) -> str:
    """Name of the kernel that makes what the route's kernel reads at m; "" where there is none."""
    return _found_activator(activating, route, m, k)  # a compiler takes this for a constant


@functools.lru_cache(maxsize=4096)
def _found_activator(activating: str, route: str, m: int, k: int) -> str:
    by_rows = _form_of_left(route, m, k) == Granularity.ROW.value
    return kernel_at(activating, m) if by_rows else ""


def reads_rows(route: str) -> bool:
    """Whether a route's kernels may read a left operand with scales of rows."""
    return route != PLAIN and read_route(route)[0] is Granularity.ROW


def has_activator(activating: str, route: str, k: int) -> bool:
    """Whether there is an m at which one route's kernel makes what the other's reads."""
    starts = {start for text in (activating, route) for start, _ in read_route(text)[1]}
    return any(_activator(activating, route, m, k) for m in starts)


@functools.lru_cache(maxsize=64)
def _activating_kernel(name: str, device: torch.device) -> Kernel:
    """The kernel, or what rounds alike on any device."""
    load_kernels()
    kernel = kernel_named(name)
    here = current_device(device.type, device.index or 0)
    return kernel if kernel.runs_on(here) else kernel_named("torch.norm_quantize")


def _form_of_left(route: str, m: int, k: int) -> str:
    """By which scales a route's kernel at m reads its left operand; "" where it is not handed it.

    That is where nothing is quantized, or a library quantizes in its own way, or scales and rows
    would lie otherwise than kernels want them.
    """
    name = kernel_at(route, m)
    if not name or read_route(route)[0] is Granularity.NONE:
        return ""
    load_kernels()
    kernel = kernel_named(name)
    whole = {Granularity.ROW: 1, Granularity.GROUP: GROUP}.get(kernel.granularity, 0)
    fits = bool(m and kernel.parts and whole) and m % 4 == k % ROW_BYTES == k % max(whole, 1) == 0
    return kernel.granularity.value if fits else ""


def _is_left_to_kernel(route: str, m: int, k: int) -> bool:
    """Whether the kernel of a composition at m quantizes k columns sooner than a compiler would."""
    return k > LONGEST_HERE and kernel_named(kernel_at(route, m)).parts[0] == READS_ONCE


@functools.cache
def prepare_to_be_compiled() -> None:
    """Say that what these answer is no part of a graph; once, as it imports Dynamo."""
    for asked in (_form_of_left, _is_left_to_kernel, _activator, quantizes_at):
        torch.compiler.assume_constant_result(asked)  # type: ignore[no-untyped-call]


def _quantize_here(x: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """As `lokakern.numerics.quantize` by rows, or groups that are whole, in steps for a compiler.

    What is not finite makes the scale so, and with it all of the row that is multiplied, as a NaN
    among its elements does; looking at each element took 34 us of an H200 where this takes 25.
    """
    rows, columns = x.shape
    wide = x.float().view(rows, -1, columns if form == Granularity.ROW.value else GROUP)
    amax = wide.abs().amax(dim=2)
    fp8 = _fp8_of(x)
    scale = amax / torch.full_like(amax, torch.finfo(fp8).max)
    scale = torch.where(amax == 0, 1.0, scale.clamp_min(numerics.SMALLEST_SCALE))
    data = (wide / scale[:, :, None]).to(fp8).view(rows, columns).contiguous()
    return data, scale.t().contiguous().t()


def _quantize_activated(x: Tensor, activation: str, name: str) -> tuple[Tensor, Tensor]:
    """f(x) in FP8 with scales of rows, by a kernel of op norm_quantize or its emulation."""
    kernel = _activating_kernel(name, x.device)
    x = _laid_out(x.detach())
    data, scale = _quantize_activated_fake(x, activation, name)
    out = QuantizedTensor(data, scale, Granularity.ROW)
    epilogue = NormEpilogue(activation=activation)
    kernel.launch(x, out, epilogue, kernel.workspace(x, out, epilogue))
    return data, scale


def _quantize_activated_fake(x: Tensor, activation: str, name: str) -> tuple[Tensor, Tensor]:
    data = empty_data(x.shape[0], x.shape[1], _fp8_of(x), x.device)
    return data, Granularity.ROW.empty_scale(x.shape[0], x.shape[1], x.device)


def quantize_weight(weight: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    """A weight ``[n, k]`` in FP8, elements and scales, as `multiply` takes ``weight.t()``."""
    data, scale = torch.ops.lokakern.quantize_weight(weight, scales)
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
) -> Tensor:
    """See `multiply`. Without a and b ``left`` and ``data`` stand for them."""
    whole = left if a is None else a
    assert whole is not None
    ways = _WAYS.get((route, whole.device)) or _ways(route, whole.device)
    # Of a weight's gradient samples are what is summed.
    m = whole.shape[1] if ways.form is Granularity.NONE else whole.shape[0]
    other = bool(m & 15)
    kernel = ways.kernels[other][bisect_right(ways.starts[other], m) - 1]
    if kernel is None or not m:
        assert a is not None
        b = _meant(data, scale, ways.form) if b is None else b.to(a.dtype)
        if bias is None or apart:
            return torch.mm(a, b) if bias is None else torch.mm(a, b).add_(bias)
        return torch.addmm(bias, a, b)
    out = _empty(whole, b, data)
    right: Tensor | QuantizedTensor
    if not kernel.parts:  # it quantizes by itself, in its library's way
        left, b = None, None if b is None else b.to(torch.bfloat16)
    if data is None and b is not None and (left is not None or b.dtype is torch.float32):
        data, scale = _quantize_weight(b.t(), ways.form.value)
    if data is not None:
        if data.stride(1) == 1 and data.stride(0) % ROW_BYTES == 0:
            right = QuantizedTensor(data, scale, ways.form, True)
        else:  # as it was gathered, or the transpose of that, under the same one scale
            assert scale is not None
            right = QuantizedTensor.packed(data, scale, ways.form).t()
        if left is not None:
            if left_scales is None:
                left_scales = _scales_of(kernel.granularity, left, left_scale)
            _launch_scaled(kernel, left, left_scales, right, out, bias)
            if ways.watch is not None:
                ways.watch.see(a, b, out, bias, kernel.name)
            return out
    else:
        assert b is not None
        # Column-major it is a weight's transpose.
        right = _laid_out(b.t()).t() if b.stride(0) == 1 else _laid_out(b)
    assert a is not None
    apart = bool(kernel.parts)  # quantizers of ours read rows wherever they begin
    a = _laid_out(a.t(), apart).t() if ways.form is Granularity.NONE else _laid_out(a, apart)
    if torch.is_autocast_enabled(a.device.type):  # an emulation multiplies float32
        with torch.autocast(a.device.type, enabled=False):
            kernel.launch(a, right, out, bias, kernel.workspace(a, right))
    else:
        kernel.launch(a, right, out, bias, kernel.workspace(a, right))
    if ways.watch is not None:
        ways.watch.see(a, b, out, bias, kernel.name)
    return out


def _meant(data: Tensor | None, scale: Tensor | None, form: Granularity) -> Tensor:
    """A right operand in bfloat16 of which there is nothing but its FP8 form."""
    assert data is not None
    return dequantize(QuantizedTensor(data, scale, form, True))


def _launch_scaled(
    kernel: Kernel, left: Tensor, scales: Tensor, right: QuantizedTensor, out: Tensor,
    bias: Tensor | None,
) -> None:  # fmt: skip
    """The GEMM of a composition, on a left operand that is quantized."""
    multiply = KERNELS[kernel.parts[-1]]
    workspace = multiply.workspace(left, scales, *right.transpose, None, None)
    with torch.autocast(left.device.type, enabled=False):
        multiply.launch(left, scales, *right.transpose, out, bias, workspace)


_SCALES: dict[tuple[Granularity, torch.Size, torch.device, str], Tensor] = {}


def _scales_of(granularity: Granularity, x: Tensor, scale: str) -> Tensor:
    """One scale in the place of many; kept, because filling them takes a launch."""
    key = (granularity, x.shape, x.device, scale)
    found = _SCALES.get(key)
    if found is None:
        found = granularity.empty_scale(x.shape[0], x.shape[1], x.device).fill_(float(scale))
        # What is filled while a graph is captured is filled only when that graph is replayed.
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            if len(_SCALES) > 256:
                _SCALES.clear()
            _SCALES[key] = found
    return found


def quantize_by(x: Tensor, scale: str) -> Tensor:
    """FP8 under a scale that is known, in steps that torch.compile puts where x is made."""
    fp8 = _fp8_of(x)
    most = torch.finfo(fp8).max
    return (x.float() / float(scale)).clamp(-most, most).to(fp8).contiguous()


def _fp8_of(x: Tensor) -> torch.dtype:
    if x.device.type == "cuda" and torch.version.hip is not None:
        return fp8_format(current_device("cuda", x.device.index or 0)).dtype
    return torch.float8_e4m3fn


def _laid_out(x: Tensor, apart: bool = False) -> Tensor:
    """Row-major, and aligned as well as the number of its columns lets rows be.

    Args:
        x: Any layout.
        apart: Whether rows may lie apart, as those of a slice do.
    """
    columns, item = x.shape[1], x.element_size()
    step = item * columns
    askew = min(step & -step, 16) - 1
    pitch = x.stride(0)
    fits = apart and pitch > columns and not item * pitch & askew
    if x.stride(1) != 1 or not (fits or pitch == columns):
        x = x.contiguous()  # an expanded gradient
    return x.clone() if x.data_ptr() & askew else x


def _empty(a: Tensor, b: Tensor | None, data: Tensor | None) -> Tensor:
    """Room for the product, in bfloat16: kernels write nothing else."""
    n = b if b is not None else data
    assert n is not None
    columns = n.shape[1] if n is b else n.shape[0]
    return torch.empty((a.shape[0], columns), dtype=torch.bfloat16, device=a.device)


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
    return _empty(whole, b, data)


def _weight_gradient(grad: Tensor, x: Tensor, route: str) -> Tensor:
    """``grad.t() @ x`` by a route, which goes by the number of rows."""
    return _multiply(grad.t(), x, None, None, None, route)


def _weight_gradient_fake(grad: Tensor, x: Tensor, route: str) -> Tensor:
    return grad.new_empty((grad.shape[1], x.shape[1]), dtype=torch.bfloat16)


def _quantize_weight(weight: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    weight = weight.detach()
    weight = weight if 1 in weight.stride() else weight.contiguous()
    quantized = quantize(weight, Granularity(scales))
    assert quantized.scale is not None  # what quantize makes has scales
    return quantized.data, quantized.scale


def _quantize_weight_fake(weight: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    fp8 = _fp8_of(weight)
    pitch = -(-columns // 16) * 16
    data = torch.empty((rows, pitch), dtype=fp8, device=weight.device)[:, :columns]
    return data, Granularity(scales).empty_scale(rows, columns, weight.device)


_LIBRARY.define(
    "routed_gemm(Tensor? a, Tensor? b, Tensor? data, Tensor? scale, Tensor? bias, str route, "
    'Tensor? left=None, Tensor? left_scales=None, str left_scale="", bool apart=False) -> Tensor'
)
# Asked for as it was traced, a view of what was not written yet would be written once more.
_ANYHOW = (torch.Tag.flexible_layout,)
_LIBRARY.define("weight_gradient(Tensor grad, Tensor x, str route) -> Tensor", tags=_ANYHOW)
_LIBRARY.define("quantize_weight(Tensor weight, str scales) -> (Tensor, Tensor)", tags=_ANYHOW)
_LIBRARY.define("quantize_activated(Tensor x, str activation, str name) -> (Tensor, Tensor)")
_LIBRARY.impl("quantize_activated", _quantize_activated, "CompositeExplicitAutograd")
torch.library.register_fake("lokakern::quantize_activated", _quantize_activated_fake, lib=_LIBRARY)
_LIBRARY.impl("routed_gemm", _multiply, "CompositeExplicitAutograd")
_LIBRARY.impl("weight_gradient", _weight_gradient, "CompositeExplicitAutograd")
_LIBRARY.impl("quantize_weight", _quantize_weight, "CompositeExplicitAutograd")
torch.library.register_fake("lokakern::routed_gemm", _multiply_fake, lib=_LIBRARY)
torch.library.register_fake("lokakern::weight_gradient", _weight_gradient_fake, lib=_LIBRARY)
torch.library.register_fake("lokakern::quantize_weight", _quantize_weight_fake, lib=_LIBRARY)


class RoutedLinear(torch.autograd.Function):
    """``x @ weight.t() + bias`` and its gradients, each of the three products by its route.

    The weight is bfloat16, or float32 where autocast would round it: see `multiply`. Of gradients
    that are differentiated again (``create_graph=True``) nothing is quantized: they, and their
    derivatives, are those of `nn.Linear`.

    Arguments are flat, because torch.compile wants them so: the weight quantized ahead for the
    output and for the gradient of the input (None: kernels do it), then three routes, the scale of
    x where it is known (else ""), and whether the bias is added apart, see `multiply`.
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
        if to_input == PLAIN or (turned is not None and not kernel_at(to_input, x.shape[0])):
            kept = weight = weight.to(x.dtype)  # both products read what is rounded once
        elif turned is not None:
            kept = None  # type: ignore[assignment]  # the weight may change before the backward pass
        ctx.save_for_backward(x, kept, turned, turned_scale)
        if not torch.compiler.is_compiling():  # which differentiates once
            version = None if given.is_inference() else given._version
            ctx.given = None if kept is given else (given, version)
        return output(x, weight, bias, data, scale, to_output, input_scale, apart)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        grad = gradients[0]
        x, weight, turned, turned_scale = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            weight = weight if ctx.given is None else _given(ctx)
            return *_gradients(grad, x, weight, needs), *[None] * 9
        grad_x = grad_weight = grad_bias = None
        if needs[1]:
            # First, and of the gradient as it lies: for what no compiler looks into Inductor writes
            # it, whole where this is a slice, and all that follows reads that. From a contiguous
            # copy, or for scales before this product, a norm's gradient is made anew each time.
            if ctx.to_weight == PLAIN:
                grad_weight = grad.t() @ x
            else:
                grad_weight = torch.ops.lokakern.weight_gradient(grad, x, ctx.to_weight)
            grad_weight = grad_weight.to(ctx.dtype)
        if needs[0]:
            if ctx.to_input == PLAIN:
                grad_x = grad @ weight
            else:
                if weight is None and sampled_check.is_checked(ctx.to_input) and _is_unchanged(ctx):
                    weight = ctx.given[0]
                grad_x = multiply(grad, weight, turned, turned_scale, None, ctx.to_input)
        if needs[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, *[None] * 9


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> list[Any]:
    """Of x, weight and bias, in steps that are differentiated again."""
    return [
        grad @ weight.to(x.dtype) if needs[0] else None,
        (grad.t() @ x).to(weight.dtype) if needs[1] else None,
        grad.sum(0) if needs[2] else None,
    ]


def _is_unchanged(ctx: Any) -> bool:
    """Whether the weight that was multiplied in another form is what it was."""
    weight, version = ctx.given
    return version is None or weight._version == version


def _given(ctx: Any) -> Tensor:
    """The weight that was multiplied in another form.

    Raises:
        UnsupportedError: It was written to since: derivatives would be of another.
    """
    weight: Tensor = ctx.given[0]
    if not _is_unchanged(ctx):
        raise UnsupportedError(
            "a gradient that is differentiated again (create_graph=True) needs the weight of its "
            f"layer, {list(weight.shape)}, which was written to since the forward pass: call the "
            "layer again, or write to weights after the backward pass"
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
    """``x @ weight.t() + bias`` by a route; x and the weight are quantized unless they were.

    Without a weight, ``data`` and ``scale`` are all there is of it. Of ``apart`` see `multiply`.
    """
    if weight is None:
        return multiply(x, None, data, scale, bias, route, input_scale, apart)
    if route == PLAIN:
        weight = weight.to(x.dtype)
        if bias is None or not apart:
            return torch.nn.functional.linear(x, weight, bias)
        return torch.nn.functional.linear(x, weight) + bias
    return multiply(x, weight.t(), data, scale, bias, route, input_scale, apart)


def scales_of(route: str) -> str:
    """Scales of the right operand."""
    return route.partition(";")[0]
