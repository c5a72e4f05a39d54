"""Chains by plan: several layers in one op, whose launches were chosen ahead for ranges of m.

The op looks up the launches when it runs, not when it is traced, because m may be dynamic. Where
the plan has none, it computes the layers unquantized. On another device a kernel's emulation runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lokakern import scratch
from lokakern.chain.launches import Matrix, empty_matrix, kernel_on, launcher_of, read_as
from lokakern.device import current_device
from lokakern.epilogue import ACTIVATIONS, BESIDE, norm_form
from lokakern.functional.checks import row_major
from lokakern.functional.norm_checks import aligned_epilogue
from lokakern.functional.quantize import dequantize, quantize
from lokakern.native import NATIVE, recorded_op
from lokakern.nn.activations import APPLY
from lokakern.nn.block_rms_norm import block_rms_norm
from lokakern.nn.chain_plan import ChainLayer, Steps, read_plan, steps_at
from lokakern.nn.routed_matmul import (
    OPS,
    dtype_of,
    equal_scales,
    fp8_on,
    laid_out,
    written_into,
)
from lokakern.norm import Norm, largest
from lokakern.numerics import SMALLEST_SCALE
from lokakern.quantized_tensor import pitch_of
from lokakern.registry.register import KERNELS, Kernel, fp8_format, kernel_named, load_kernels
from lokakern.types import Format, Granularity, NormEpilogue, QuantizedTensor

_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")


class LayerOperands(NamedTuple):
    """The tensors of a layer, in the order of the op's ``operands``.

    Attributes:
        weight: ``[n, k]``, in the dtype of the plan; None if no step at this m reads it.
        data: FP8 data of the weight as `quantize` lays them out, or their bytes; None without a
            granularity, and where each call quantizes the weight.
        scale: Its scales, as ``data``.
        bias: ``[n]``, or None.
        norm_weight: ``[n]``, or None.
        norm_bias: ``[n]``, or None.
        out_scale: Bytes of the static scale of its output, once for each row or for fewer, if that
            depends on the norm's weight or bias (`lokakern.nn.chain_norm`); else None.
        beside: Each ``[m, n]``: what the epilogue reads beside, in its order, such as a residual,
            a gate, or x0 and x of DCN's cross ``x0 * y + x``. They follow the other operands of all
            layers.
    """

    weight: Tensor | None
    data: Tensor | None
    scale: Tensor | None
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    out_scale: Tensor | None
    beside: tuple[Tensor, ...] = ()


WIDTH = len(LayerOperands._fields) - 1  # operands of a layer without those beside


class _Step(NamedTuple):
    """A launch at some m, on a device.

    Attributes:
        place: Index of the layer.
        kernel: The kernel, or its emulation.
        reads: As of `ChainStep`.
        weight: As of `ChainStep`.
        writes: As of `ChainStep`.
        columns: Of the output.
    """

    place: int
    kernel: Kernel
    reads: Granularity
    weight: Granularity
    writes: Granularity
    columns: int


class _Form(NamedTuple):
    """A layer's epilogue without tensors."""

    norm: Norm
    last: str  # an activation, a gate or a cross
    beside: tuple[str, ...]  # words of the epilogue


@functools.lru_cache(maxsize=4096)
def _steps(
    plan: str, m: int, device: torch.device, is_quantized: bool = False
) -> tuple[_Step, ...]:
    layers, *_ = read_plan(plan)
    found = []
    for step in _behind_quantizer(plan, m)[1] if is_quantized else steps_at(plan, m):
        kernel, layer = kernel_on(step.kernel, device), layers[step.place]
        columns = layer.n if kernel.op == "gemm_norm" else layer.k
        found.append(_Step(step.place, kernel, step.reads, step.weight, step.writes, columns))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _behind_quantizer(plan: str, m: int) -> tuple[str, Steps]:
    """The quantizer of the input at m, and the launches behind it; "" and none without one."""
    load_kernels()
    steps = steps_at(plan, m)
    name = steps[0].kernel if steps else ""
    quantizer, _, rest = name.partition("+")
    if not name or KERNELS[quantizer].op != "quantize":
        return "", ()
    if not rest:
        return quantizer, steps[1:]
    if rest not in KERNELS:
        return "", ()
    reads = kernel_named(name).granularity
    return quantizer, (steps[0]._replace(kernel=rest, reads=reads), *steps[1:])


def form_of_input(plan: str, m: int, k: int) -> tuple[str, str]:
    """Granularity in which a plan's launches at m read a quantized input, and their quantizer.

    Both are "" if none quantizes it, or the layout of data and scales would not fit the kernel.
    """
    quantizer, steps = _behind_quantizer(plan, m)
    form = laid_out(steps[0].reads, m, k) if steps else ""
    return (form, quantizer) if form else ("", "")


@functools.lru_cache(maxsize=1024)
def _forms(plan: str) -> tuple[_Form, ...]:
    layers, *_ = read_plan(plan)
    forms = [norm_form(layer.epilogue) for layer in layers]
    return tuple(
        _Form(form.norm._replace(eps=layer.eps), form.last, form.beside)
        for form, layer in zip(forms, layers, strict=True)
    )


def _operands_of(operands: Sequence[Tensor | None], forms: Sequence[_Form]) -> list[LayerOperands]:
    """The operands of each layer."""
    found, after = [], WIDTH * len(forms)
    for place, form in enumerate(forms):
        first, count = WIDTH * place, sum(BESIDE[word] for word in form.beside)
        beside = tuple(x for x in operands[after : after + count] if x is not None)
        own: Any = operands[first : first + WIDTH]
        found.append(LayerOperands(*own)._replace(beside=beside))
        after += count
    return found


def run_chain(x: Tensor, operands: Sequence[Tensor | None], plan: str) -> Tensor:
    """The layers of a plan, by its launches at this m; there are no gradients.

    Args:
        x: ``[m, k]``, in the dtype of the plan, as are operands that are not FP8; m may be 0.
        operands: Those of each layer, one after the other, see `LayerOperands`.
        plan: See `lokakern.nn.chain_plan`.

    Returns:
        ``[m, n]`` with the n of the last layer, in the dtype of the plan. Where the plan has no
        launches at this m, the layers are computed unquantized, each as its modules would.
    """
    out: Tensor = OPS.routed_chain(x, operands, plan)
    return out


def replay_chain(x: Tensor, operands: Sequence[Tensor | None], plan: str) -> Tensor | None:
    """`run_chain` in C++ without the dispatcher, in eager mode; None where the call has no plan."""
    call = NATIVE.call_op
    if call is None or torch._C._is_torch_function_mode_enabled():  # which sees the dispatcher
        return None
    return call("lokakern::routed_chain", x, operands, plan)  # type: ignore[no-any-return]


def _chain(
    x: Tensor, operands: Sequence[Tensor | None], plan: str, out: Tensor | None = None
) -> Tensor:
    """See `run_chain`; written to ``out``, if that is given, where the plan has launches."""
    layers, *_ = read_plan(plan)
    m, forms = x.shape[0], _forms(plan)
    if not m:
        return _chain_fake(x, operands, plan)
    given = _operands_of(operands, forms)
    with torch.autocast(x.device.type, enabled=False):  # emulations multiply in float32
        steps = _steps(plan, m, x.device)
        if steps:
            with scratch.of_one_call():
                x, half = row_major(x.detach()), x.dtype
                return _launched(x, half, layers, forms, given, steps, out)
        return unquantized_chain(x, operands, plan)


def unquantized_chain(x: Tensor, operands: Sequence[Tensor | None], plan: str) -> Tensor:
    """`run_chain` in torch's operators, as modules would."""
    layers, *_ = read_plan(plan)
    forms = _forms(plan)
    for layer, form, tensors in zip(layers, forms, _operands_of(operands, forms), strict=True):
        x = _unquantized(x, layer, form, tensors)
    return x


def _quantized_chain(
    data: Tensor, scales: Tensor, operands: Sequence[Tensor | None], plan: str,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `run_chain`, of an input in FP8 as `form_of_input` names it.

    Args:
        data: ``[m, k]``, at an m at which the plan quantizes its input.
        scales: Of ``data``, float32.
        operands: As of `run_chain`.
        plan: As of `run_chain`.
        out: What is written, or None.
    """
    layers, *_ = read_plan(plan)
    forms, steps = _forms(plan), _steps(plan, len(data), data.device, is_quantized=True)
    x, given = QuantizedTensor(data, scales, steps[0].reads), _operands_of(operands, forms)
    with torch.autocast(data.device.type, enabled=False), scratch.of_one_call():
        return _launched(x, dtype_of(plan), layers, forms, given, steps, out)


def _launched(
    x: Matrix,
    half: torch.dtype,
    layers: Sequence[ChainLayer],
    forms: Sequence[_Form],
    given: Sequence[LayerOperands],
    steps: Sequence[_Step],
    last: Tensor | None = None,
) -> Tensor:
    """The launches of a chain; tensors between layers are new in each call, ``last`` may not be."""
    m, device, fp8 = x.shape[0], x.device, fp8_on(x.device)
    written, like = x, x.data if isinstance(x, QuantizedTensor) else x
    known: str | Tensor = ""  # the static scale of what was written, as of `_static_scale`
    for step in steps:
        layer, form, tensors = layers[step.place], forms[step.place], given[step.place]
        left = _spread(written, step.reads, known)
        scale, known = None, ""
        if step.writes is Granularity.TENSOR and step.kernel.op == "gemm_norm":
            scale, known = _static_scale(like, layer, form, tensors)
        out: Matrix
        if last is not None and step is steps[-1]:
            out = last
        else:
            out = empty_matrix(m, step.columns, step.writes, scale, fp8, device, half)
        right, epilogue = None, NormEpilogue()
        if step.kernel.op == "gemm_norm":
            right = _right(layer, tensors, step.weight, fp8, half)
            epilogue = aligned_epilogue(_epilogue(form, tensors))
        launcher_of(step.kernel, left, right, out, epilogue)(left, out)
        written = out
    assert isinstance(written, Tensor)  # no plan ends in FP8
    return written


def _epilogue(form: _Form, tensors: LayerOperands) -> NormEpilogue:
    vectors = (tensors.bias, tensors.norm_weight, tensors.norm_bias)
    epilogue = NormEpilogue(form.norm, *vectors, form.last if form.last in ACTIVATIONS else "none")
    matrices = iter([row_major(x.detach(), apart=True) for x in tensors.beside])
    for word in form.beside:
        if word == "gate":
            epilogue = epilogue._replace(gate=next(matrices))
        elif word == "cross":
            epilogue = epilogue._replace(x0=next(matrices), x=next(matrices))
        else:
            is_last = word == "residual_last"
            epilogue = epilogue._replace(residual=next(matrices), residual_last=is_last)
    return epilogue


def _spread(written: Matrix, scales: Granularity, known: str | Tensor) -> Matrix:
    """What was written as the next layer reads it, without a launch if the scale is known."""
    if isinstance(known, str) and known:
        assert isinstance(written, QuantizedTensor)
        return QuantizedTensor(written.data, equal_scales(scales, written.data, known), scales)
    is_kept = isinstance(known, Tensor) and scales is Granularity.ROW
    if is_kept and isinstance(known, Tensor) and len(known) >= written.shape[0]:
        assert isinstance(written, QuantizedTensor)
        return QuantizedTensor(written.data, known[: written.shape[0]], scales)
    return read_as(written, scales)


def _static_scale(
    x: Tensor, layer: ChainLayer, form: _Form, tensors: LayerOperands
) -> tuple[Tensor, str | Tensor]:
    """The static scale of a layer's output, and what is known of it without a launch.

    That is its text, if it depends on no tensor, or the scales of rows, ``[rows, 1]``, that are
    kept for a norm with a weight or a bias.
    """
    if tensors.out_scale is not None:
        scales = tensors.out_scale.view(torch.float32)
        return scales[:1], scales
    assert tensors.norm_weight is None and tensors.norm_bias is None
    fp8 = fp8_format(current_device(x.device.type, x.device.index or 0))
    bound = largest(form.norm, layer.n)
    text = repr(max(float(np.float32(bound) / np.float32(fp8.maximum)), SMALLEST_SCALE))
    return equal_scales(Granularity.TENSOR, x, text), text


def _right(
    layer: ChainLayer, tensors: LayerOperands, scales: Granularity, fp8: torch.dtype,
    half: torch.dtype,
) -> Matrix:  # fmt: skip
    """The right operand ``[k, n]`` of a launch."""
    if scales is not Granularity.NONE:
        return _quantized_weight(layer, tensors, fp8).t()
    return row_major(_weight(layer, tensors, fp8, half).detach()).t()


def _weight(
    layer: ChainLayer, tensors: LayerOperands, fp8: torch.dtype, half: torch.dtype
) -> Tensor:
    """The unquantized weight, ``[n, k]``; from its FP8 form if it is not given."""
    if tensors.weight is not None:
        return tensors.weight
    return dequantize(_quantized_weight(layer, tensors, fp8), Format.of(half))


def _quantized_weight(
    layer: ChainLayer, tensors: LayerOperands, fp8: torch.dtype
) -> QuantizedTensor:
    """Data and scales of a weight, which may be bytes, in the layout of `quantize`."""
    n, k, scales = layer.n, layer.k, layer.weight
    data, scale = tensors.data, tensors.scale
    if data is None and tensors.weight is not None:
        return quantize(row_major(tensors.weight.detach()), scales)
    assert data is not None and scale is not None
    pitch = data.stride(0) if data.dim() == 2 else pitch_of(k)
    data = data.view(fp8).as_strided((n, k), (pitch, 1))
    shape = scales.scale_shape(n, k)
    scale = scale.view(scales.scale_dtype).as_strided(shape, scales._scale_stride(*shape))
    return QuantizedTensor(data, scale, scales)


def _unquantized(x: Tensor, layer: ChainLayer, form: _Form, tensors: LayerOperands) -> Tensor:
    """A layer in torch's operators, as its modules compute it."""
    weight, shift, norm, columns = tensors.norm_weight, tensors.norm_bias, form.norm, (layer.n,)
    given = _weight(layer, tensors, fp8_on(x.device), x.dtype)
    y, beside = functional.linear(x, given, tensors.bias), iter(tensors.beside)
    if "residual" in form.beside:
        y = y + next(beside)
    if norm.kind == "layer":
        y = functional.layer_norm(y, columns, weight, shift, norm.eps)
    else:
        if norm.kind == "rms":
            y = functional.rms_norm(y, columns, weight, norm.eps)
        elif norm.kind == "block_rms":
            y = block_rms_norm(y, norm.block, norm.eps)
        if weight is not None and norm.kind != "rms":
            y = y * weight
        y = y if shift is None else y + shift
    if form.last == "cross":
        y = next(beside) * y + next(beside)
    elif form.last == "gate":
        y = next(beside) * torch.sigmoid(y)
    elif form.last != "none":
        y = APPLY[form.last](y)
    return y + next(beside) if "residual_last" in form.beside else y


def _quantized_chain_fake(
    data: Tensor, scales: Tensor, operands: Sequence[Tensor | None], plan: str
) -> Tensor:
    return _chain_fake(data, operands, plan)


def _chain_fake(x: Tensor, operands: Sequence[Tensor | None], plan: str) -> Tensor:
    layers, *_ = read_plan(plan)
    return x.new_empty((x.shape[0], layers[-1].n), dtype=dtype_of(plan))


recorded_op(_LIBRARY, "routed_chain(Tensor x, Tensor?[] operands, str plan) -> Tensor", _chain)
recorded_op(
    _LIBRARY,
    "quantized_chain(Tensor data, Tensor scales, Tensor?[] operands, str plan) -> Tensor",
    _quantized_chain,
)
# As Inductor calls chains whose output it places (`lokakern.nn.inductor`).
recorded_op(
    _LIBRARY,
    "routed_chain_into(Tensor x, Tensor?[] operands, str plan, Tensor(a!) out) -> ()",
    written_into(_chain),
)
recorded_op(
    _LIBRARY,
    "quantized_chain_into(Tensor data, Tensor scales, Tensor?[] operands, str plan, "
    "Tensor(a!) out) -> ()",
    written_into(_quantized_chain),
)
torch.library.register_fake("lokakern::routed_chain", _chain_fake, lib=_LIBRARY)
torch.library.register_fake("lokakern::quantized_chain", _quantized_chain_fake, lib=_LIBRARY)
