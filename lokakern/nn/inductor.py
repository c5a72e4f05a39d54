"""How Inductor lowers the ops of converted layers.

It fuses quantizing into the producer of the operand. In the traced graph a product is one op, which
quantizes its left operand in a kernel of its own. Where Inductor itself generates the kernel that
computes the operand, quantizing there saves that kernel, and the bfloat16 operand if it has no
other use. Where the operand is an input of the graph or comes from a library, a separate kernel of
Inductor would only cost the host a launch: the op's own quantizer reads and writes the same bytes.
An operand that is also summed over its rows, as a gradient is for a bias, is left to the op, too:
Inductor would join both reductions, and add up partial sums by four operators of torch, which take
the host 87 us where its two kernels of a sum take 27. An operand of several products is quantized
once for all.

And generated code calls `routed_gemm` and its like below, which replay a call without the checks
that torch makes for any op, and a product with a relu as it calls other products of torch. In
inference it gives products and chains that only a concatenation along columns reads their columns
of it as output, as it does products of torch, so that nothing is copied.

Inductor's functions for this are not stable. Without them products are right, but not fused.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from lokakern import numerics, sampled_check
from lokakern.functional import norm_gradient as _norm_gradient  # noqa: F401  # defines its op
from lokakern.native import NATIVE, is_keeping
from lokakern.nn import bias_gradient as _bias_gradient  # noqa: F401  # defines its op
from lokakern.nn import crossed_gradients as _crossed_gradients  # noqa: F401  # defines its ops
from lokakern.nn import crossed_products as _crossed_products  # noqa: F401  # defines its op
from lokakern.nn import logit as _logit  # noqa: F401  # defines its op
from lokakern.nn import routed_matmul
from lokakern.nn.activations import GELUS
from lokakern.nn.chain_plan import steps_at
from lokakern.nn.graph_edit import joins_columns
from lokakern.nn.routed_chain import form_of_input  # and its module defines ops
from lokakern.types import GROUP, Granularity

# Products whose outputs Inductor places itself.
_OF_TORCH = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# Of a row of a slice: `cuda.scaled_gemm_*` write shorter rows together if they have no gaps.
LEAST_BYTES = 64


@functools.cache
def fuse_quantizers() -> None:
    """Register the lowering; once, when a compiler first traces a product."""
    try:
        from torch._inductor import config, ir
        from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
        from torch._inductor.virtualized import V
    except ImportError:
        return

    places = hasattr(ir, "ExternKernelOut") and hasattr(ir.FallbackKernel, "process_kernel")

    def called(name: str) -> Callable[..., Any]:
        op = getattr(torch.ops.lokakern, name).default
        call = fallback_handler(op, add_to_fallback_set=False)  # type: ignore[no-untyped-call]

        def lowered(*args: Any, **options: Any) -> Any:
            if not options and places and _takes_slice(V.graph):
                return _sliced(ir, V.graph, name, args)
            out = call(*args, **options)
            _call_directly(ir, V.graph, op, name)
            return out

        return lowered

    call = called("routed_gemm")
    quantize_op = torch.ops.lokakern.quantize_weight.default
    call_quantize = fallback_handler(quantize_op, False)  # type: ignore[no-untyped-call]

    def quantize(a: Any, form: str) -> tuple[Any, Any]:
        found: tuple[Any, Any] = call_quantize(a, form)
        _made(ir, V.graph, quantize_op)
        return found

    def quantized(a: Any, form: str, quantizer: str) -> tuple[Any, Any]:
        """The operand in FP8, once for all readers, or None if the product is to quantize it.

        By Inductor where it computes a, and else by a kernel if others read a so, too.
        """
        is_fused = (
            _is_generated(ir, a)
            and not routed_matmul.is_left_to_kernel(quantizer, int(a.get_size()[1]))
            and not _is_summed_over_rows(V.graph.current_node)
        )
        if not is_fused and _readers(V.graph.current_node, a, form) == 1:
            return None, None
        key = (V.graph.current_node.args[0], form)
        known = V.graph.__dict__.setdefault("lokakern_quantized", {})
        if key not in known:
            known[key] = _quantized(ir, lowerings, a, form) if is_fused else quantize(a, form)
        return known[key]  # type: ignore[no-any-return]

    def lowered(
        a: Any, b: Any, data: Any, scale: Any, bias: Any, route: str, left: Any = None,
        left_scales: Any = None, left_scale: str = "", apart: bool = False,
    ) -> Any:  # fmt: skip
        form, quantizer = ("", "") if a is None else _form(a, route)
        if form and left is None:
            left, left_scales = quantized(a, form, quantizer)
        reads_operands = sampled_check.is_checked(route) or routed_matmul.has_switch(route)
        if form and left is not None and not reads_operands:
            a, b = None, b if data is None else None
        is_usual = left is None and not left_scale and not apart
        given = () if is_usual else (left, left_scales, left_scale, apart)
        return call(a, b, data, scale, bias, route, *given)

    def behind(name: str) -> Callable[..., Any]:
        """The lowering of a product that computes what is behind it."""
        call = called(name)

        def lowered(a: Any, b: Any, data: Any, scale: Any, *others: Any) -> Any:
            form, quantizer = _form(a, others[-1])
            left, left_scales = quantized(a, form, quantizer) if form else (None, None)
            if left is None:  # the op may quantize both operands in one launch
                return call(a, b, data, scale, *others)
            b = b if data is None else None
            return call(None, b, data, scale, *others, left, left_scales)

        return lowered

    ops = torch.ops.lokakern
    for name in ("rectified_product", "crossed_product"):
        op = getattr(ops, name).default
        register_lowering(op, type_promotion_kind=None)(behind(name))
    register_lowering(ops.routed_gemm.default, type_promotion_kind=None)(lowered)
    call_chain, call_quantized_chain = called("routed_chain"), called("quantized_chain")

    def chain(x: Any, operands: Any, plan: str) -> Any:
        form, quantizer = _form(x, plan, form_of_input)
        # Alone it has launches of its own for that, whose times are those of the chain.
        if form and _readers(V.graph.current_node, x, form) > 1:
            return call_quantized_chain(*quantized(x, form, quantizer), operands, plan)
        return call_chain(x, operands, plan)

    register_lowering(ops.routed_chain.default, type_promotion_kind=None)(chain)
    for name in (
        "activated_gemm", "weight_gradient", "wide_weight_gradient", "crossed_gradient",
        "quantized_weight_gradient", "saved_weight_gradient",
    ):  # fmt: skip
        op = getattr(ops, name).default
        register_lowering(op, type_promotion_kind=None)(called(name))
    call_gradient, call_sums = called("norm_gradient"), called("bias_gradient")

    def summed(dy: Any, bias: Any) -> Any:
        if _is_generated(ir, dy) and not _is_read_in_order(ir, V.graph, dy):
            return call_sums(dy, bias)
        # In the dtype of the bias: one of float32, under autocast, has sums that nothing rounds.
        return lowerings[torch.ops.aten.sum.dim_IntList](dy, [0], dtype=bias.get_dtype())

    register_lowering(ops.bias_gradient.default, type_promotion_kind=None)(summed)

    def gradient(
        dd: Any, y: Any, bias: Any, norm_weight: Any, norm_bias: Any, norm: str, activation: str,
        eps: float,
    ) -> Any:  # fmt: skip
        if norm == "none" and bias is not None and _is_generated(ir, dd):
            # In the kernel that computes dd, which would otherwise be written and read for this.
            dy = _through(lowerings, dd, y, activation)
            dy.realize()  # else the sum computes dd once more, from all that it is made of
            return dy, lowerings[torch.ops.aten.unsqueeze.default](summed(dy, bias), 0)
        return call_gradient(dd, y, bias, norm_weight, norm_bias, norm, activation, eps)

    register_lowering(ops.norm_gradient.default, type_promotion_kind=None)(gradient)

    def logit(x: Any, weight: Any, bias: Any) -> Any:
        cast = lowerings[torch.ops.prims.convert_element_type.default]
        half = torch.float16 if x.get_dtype() is torch.float16 else torch.bfloat16
        x, weight = (cast(cast(y, half), torch.float32) for y in (x, weight))
        product = lowerings[torch.ops.aten.mul.Tensor](x, weight)
        total = lowerings[torch.ops.aten.sum.dim_IntList](product, [-1], True)
        if bias is not None:
            wide = cast(cast(bias, half), torch.float32)
            total = lowerings[torch.ops.aten.add.Tensor](total, wide)
        return cast(total, half)

    register_lowering(ops.logit.default, type_promotion_kind=None)(logit)
    rectify = torch.ops.aten._addmm_activation
    call_rectified = fallback_handler(rectify.default, add_to_fallback_set=False)  # type: ignore[no-untyped-call]

    def rectified(
        bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
    ) -> Any:
        is_usual = beta == alpha == 1 and not use_gelu
        if is_usual and (config.max_autotune or config.max_autotune_gemm):
            # As nn.Linear and nn.ReLU: Inductor's templates apply relu, too, and it times them.
            aten = torch.ops.aten
            return lowerings[aten.relu.default](lowerings[aten.addmm.default](bias, a, b))
        if V.graph.cpp_wrapper or not is_usual:
            return call_rectified(bias, a, b, beta=beta, alpha=alpha, use_gelu=use_gelu)
        inputs = [ir.ExternKernel.realize_input(x) for x in (bias, a, b)]
        sizes = [a.get_size()[0], b.get_size()[1]]
        # No flexible one, which might become a slice: into rows with gaps torch copies the bias,
        # adds the product, and applies relu in a launch of its own.
        layout = ir.FixedLayout(a.get_device(), a.get_dtype(), sizes)
        made = ir.ExternKernelOut(
            layout=layout, inputs=inputs, python_kernel_name="torch._addmm_activation",
            op_overload=rectify.out,
        )  # fmt: skip
        return ir.TensorBox.create(made)

    register_lowering(rectify.default, type_promotion_kind=None)(rectified)


def _through(lowerings: dict[Any, Callable[..., Any]], dd: Any, y: Any, activation: str) -> Any:
    """The gradient of an activation: ``dd * slope(y)``, see `lokakern.gradients.slope`."""
    aten = torch.ops.aten
    add, mul = lowerings[aten.add.Tensor], lowerings[aten.mul.Tensor]
    where, cast = (
        lowerings[x] for x in (aten.where.self, torch.ops.prims.convert_element_type.default)
    )
    zero = lowerings[aten.full.default]([], 0, dtype=dd.get_dtype(), device=dd.get_device())
    if activation == "relu":
        return where(lowerings[aten.le.Scalar](y, 0), zero, dd)
    wide, g = cast(y, torch.float32), cast(dd, torch.float32)
    if activation == "silu":
        s = lowerings[aten.sigmoid.default](wide)
        rest = lowerings[aten.sub.Tensor](s, mul(s, s))
        return cast(mul(g, add(s, mul(wide, rest))), dd.get_dtype())
    if activation in GELUS.values():
        return cast(mul(g, _gelu_slope(lowerings, wide, activation)), dd.get_dtype())
    rising = cast(mul(g, add(mul(wide, 1 / 3), 0.5)), dd.get_dtype())
    found = where(lowerings[aten.ge.Scalar](y, 3), dd, rising)
    return where(lowerings[aten.le.Scalar](y, -3), zero, found)


def _gelu_slope(lowerings: dict[Any, Callable[..., Any]], z: Any, activation: str) -> Any:
    """As `lokakern.gradients.slope` computes it, of float32."""
    aten = torch.ops.aten
    add, mul = lowerings[aten.add.Tensor], lowerings[aten.mul.Tensor]
    square = mul(z, z)
    if activation == "gelu":
        density = mul(lowerings[aten.exp.default](mul(square, -0.5)), 1 / math.sqrt(2 * math.pi))
        distribution = add(mul(lowerings[aten.erf.default](mul(z, 1 / math.sqrt(2))), 0.5), 0.5)
        return add(distribution, mul(z, density))
    factor = 2 * math.sqrt(2 / math.pi)
    u = mul(mul(z, factor), add(mul(square, 0.044715), 1.0))
    s = lowerings[aten.sigmoid.default](u)
    by_z = mul(mul(z, factor), add(mul(square, 3 * 0.044715), 1.0))
    return mul(s, add(mul(by_z, add(mul(s, -1.0), 1.0)), 1.0))


def _call_directly(ir: Any, graph: Any, op: Any, name: str) -> None:
    """Let the code that Inductor generates call a function of this module."""
    made = _made(ir, graph, op)
    if made is None:
        return
    generate = made.codegen

    def codegen(wrapper: Any) -> None:
        if not graph.cpp_wrapper and hasattr(wrapper, "add_import_once"):
            wrapper.add_import_once(f"from {__name__} import {name} as lokakern_{name}")
            made.python_kernel_name = f"lokakern_{name}"
        generate(wrapper)

    made.codegen = codegen


def _sliced(ir: Any, graph: Any, name: str, args: tuple[Any, ...]) -> Any:
    """The call of an op with an output that Inductor places, at best in a concatenation."""
    op, like = getattr(torch.ops.lokakern, name).default, graph.current_node.meta["val"]
    missing = [argument.default_value for argument in op._schema.arguments[len(args) :]]
    with graph.fake_mode:
        _, tensors, others, unflatten, *_ = ir.FallbackKernel.process_kernel(op, *args, *missing)
    made = ir.ExternKernelOut(
        layout=ir.FlexibleLayout(like.device, like.dtype, list(like.shape)), inputs=tensors,
        constant_args=others, python_kernel_name=f"torch.ops.lokakern.{name}_into.default",
    )  # fmt: skip
    made.unflatten_args = unflatten
    made.codegen_args = types.MethodType(ir.FallbackKernel.codegen_args, made)
    generate = made.codegen

    def codegen(wrapper: Any) -> None:
        if hasattr(wrapper, "add_import_once"):
            wrapper.add_import_once(f"from {__name__} import {name}_into as lokakern_{name}_into")
            made.python_kernel_name = f"lokakern_{name}_into"
        generate(wrapper)

    made.codegen = codegen
    return ir.TensorBox.create(made)


def _made(ir: Any, graph: Any, op: Any) -> Any:
    """The call of an op that Inductor has just made, or None.

    Its outputs are not checked: this library allocates them, and checks of strides and alignment
    take the host 0.8 us each.
    """
    made = next(
        (x for x in reversed(getattr(graph, "operations", [])) if isinstance(x, ir.FallbackKernel)),
        None,
    )
    if made is None or made.op_overload is not op:
        return None
    for output in made.outputs:
        output.skip_size_stride_alignment_checks = True
    return made


def routed_gemm(
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
    """``torch.ops.lokakern.routed_gemm``."""
    given = (a, b, data, scale, bias, route, left, left_scales, left_scale, apart)
    return _called("lokakern::routed_gemm", torch.ops.lokakern.routed_gemm.default, given)


def activated_gemm(*given: Any) -> Tensor:
    """``torch.ops.lokakern.activated_gemm``."""
    return _called("lokakern::activated_gemm", torch.ops.lokakern.activated_gemm.default, given)


def rectified_product(*given: Any) -> Tensor:
    """``torch.ops.lokakern.rectified_product``."""
    op = torch.ops.lokakern.rectified_product.default
    return _called("lokakern::rectified_product", op, given)


def crossed_product(*given: Any) -> tuple[Tensor, Tensor]:
    """``torch.ops.lokakern.crossed_product``."""
    op = torch.ops.lokakern.crossed_product.default
    return cast("tuple[Tensor, Tensor]", _called("lokakern::crossed_product", op, given))


def weight_gradient(*given: Any) -> Tensor:
    """``torch.ops.lokakern.weight_gradient``."""
    return _called("lokakern::weight_gradient", torch.ops.lokakern.weight_gradient.default, given)


def wide_weight_gradient(*given: Any) -> Tensor:
    """``torch.ops.lokakern.wide_weight_gradient``."""
    op = torch.ops.lokakern.wide_weight_gradient.default
    return _called("lokakern::wide_weight_gradient", op, given)


def norm_gradient(*given: Any) -> tuple[Tensor, Tensor]:
    """``torch.ops.lokakern.norm_gradient``."""
    op = torch.ops.lokakern.norm_gradient.default
    return cast("tuple[Tensor, Tensor]", _called("lokakern::norm_gradient", op, given))


def crossed_gradient(*given: Any) -> tuple[Tensor, ...]:
    """``torch.ops.lokakern.crossed_gradient``."""
    op = torch.ops.lokakern.crossed_gradient.default
    return cast("tuple[Tensor, ...]", _called("lokakern::crossed_gradient", op, given))


def quantized_weight_gradient(*given: Any) -> Tensor:
    """``torch.ops.lokakern.quantized_weight_gradient``."""
    op = torch.ops.lokakern.quantized_weight_gradient.default
    return _called("lokakern::quantized_weight_gradient", op, given)


def saved_weight_gradient(*given: Any) -> Tensor:
    """``torch.ops.lokakern.saved_weight_gradient``."""
    op = torch.ops.lokakern.saved_weight_gradient.default
    return _called("lokakern::saved_weight_gradient", op, given)


def bias_gradient(*given: Any) -> Tensor:
    """``torch.ops.lokakern.bias_gradient``."""
    return _called("lokakern::bias_gradient", torch.ops.lokakern.bias_gradient.default, given)


def routed_chain(*given: Any) -> Tensor:
    """``torch.ops.lokakern.routed_chain``."""
    return _called("lokakern::routed_chain", torch.ops.lokakern.routed_chain.default, given)


def quantized_chain(*given: Any) -> Tensor:
    """``torch.ops.lokakern.quantized_chain``."""
    op = torch.ops.lokakern.quantized_chain.default
    return _called("lokakern::quantized_chain", op, given)


def _called(name: str, op: Callable[..., Tensor], given: tuple[Any, ...]) -> Tensor:
    call = NATIVE.call_op
    found = None if call is None else call(name, *given)
    return op(*given) if found is None else found


def _write(into: str, name: str, *given: Any, out: Tensor) -> None:
    """Call an op that writes to ``out``; named as `NATIVE.call_op` and as torch name it."""
    call = NATIVE.call_op
    if call is not None and call(into, *given, out) is not None:
        return
    ops = torch.ops.lokakern
    if is_keeping():  # beside a package, whose calls return their outputs
        out.copy_(getattr(ops, name)(*given))
    else:
        getattr(ops, f"{name}_into")(*given, out)


routed_gemm_into, rectified_product_into, routed_chain_into, quantized_chain_into = (
    functools.partial(_write, f"lokakern::{name}_into", name)
    for name in ("routed_gemm", "rectified_product", "routed_chain", "quantized_chain")
)


def _takes_slice(graph: Any) -> bool:
    """Whether the output of the current product or chain is to be a slice of a concatenation.

    In inference with static shapes, where rows of the slice start at multiples of 16 bytes, as
    other kernels of CUDA write them otherwise. Without slices Inductor writes all parts in one
    kernel, and may compute what reads the concatenation there instead of writing it. So at most one
    part may be left to copy, and this only where a library or the caller reads the result.
    """
    node = graph.current_node
    if graph.cpp_wrapper or not graph.is_inference or len(node.users) != 1:
        return False
    (cat,) = node.users
    if not joins_columns(cat):
        return False
    parts, joined = cat.args[0], cat.meta["val"]
    values = [x.meta["val"] for x in parts]
    if any(x.dtype is not joined.dtype or x.dim() != 2 for x in values):
        return False
    item = joined.element_size()
    starts = [0, *itertools.accumulate(x.shape[1] * item for x in values)]

    def is_slice(place: int) -> bool:
        x, begin, end = parts[place], starts[place], starts[place + 1]
        if len(x.users) > 1 or parts.count(x) > 1:
            return False
        is_aligned = not (begin | end | starts[-1]) % 16 and end - begin >= LEAST_BYTES
        return x.target in _OF_TORCH or (is_aligned and _is_sliceable(x))

    copied = [x for place, x in enumerate(parts) if not is_slice(place)]
    if node in copied or len(copied) > 1:
        return False
    return not copied or all(x.op == "output" or x.target in _OF_TORCH for x in cat.users)


def _is_sliceable(node: Any) -> bool:
    """Whether a kernel of CUDA of this library writes the output of a node.

    Libraries take no strided outputs, or copy them; kernels of Triton were not timed with them.
    """
    ops, rows = torch.ops.lokakern, node.meta["val"].shape[0]
    if node.target is ops.routed_chain.default:
        steps = steps_at(node.args[2], rows)
        name = steps[-1].kernel if steps else ""
    elif node.target in (ops.routed_gemm.default, ops.rectified_product.default):
        route = node.args[5]
        name = "" if sampled_check.is_checked(route) else routed_matmul.kernel_at(route, rows)
    else:
        return False
    return name.rpartition("+")[2].startswith("cuda.")


def _form_of_left(route: str, m: int, k: int) -> tuple[str, str]:
    form = routed_matmul.form_of_left(route, m, k)
    return (form, routed_matmul.quantizer_at(route, m)) if form else ("", "")


def _form(a: Any, text: Any, form_at: Callable[..., tuple[str, str]] = _form_of_left) -> Any:
    """Granularity in which kernels of a route or a plan read a, and their quantizer, or ""."""
    try:
        m, k = (int(size) for size in a.get_size())
    except TypeError:  # a symbol of a dynamic size
        return "", ""
    return form_at(text, m, k)


def _readers(node: torch.fx.Node, a: Any, form: str) -> int:
    """How many products and chains read the operand of this one in this form."""
    operand = node.args[0]
    assert isinstance(operand, torch.fx.Node)
    ops = torch.ops.lokakern
    texts: dict[Any, tuple[int, Callable[..., tuple[str, str]]]] = {
        ops.routed_gemm.default: (5, _form_of_left),
        ops.rectified_product.default: (5, _form_of_left),
        ops.crossed_product.default: (7, _form_of_left),
        ops.routed_chain.default: (2, form_of_input),
    }
    of_readers = (
        (x.args[place], form_at)
        for x in operand.users
        if x.target in texts and x.args[0] is operand
        for place, form_at in (texts[x.target],)
    )
    return sum(_form(a, text, form_at)[0] == form for text, form_at in of_readers)


def _is_summed_over_rows(node: torch.fx.Node) -> bool:
    """Whether the left operand of a product is summed over its rows, as for a bias."""
    operand = node.args[0]
    assert isinstance(operand, torch.fx.Node)
    made = operand.args[0] if operand.target is operator.getitem else None
    if isinstance(made, torch.fx.Node) and made.target is torch.ops.lokakern.norm_gradient.default:
        return True
    total, sums = torch.ops.aten.sum.dim_IntList, torch.ops.lokakern.bias_gradient.default
    return any(
        x.target is sums or (x.target is total and x.args[1] in ([0], [-2])) for x in operand.users
    )


def _is_generated(ir: Any, x: Any) -> bool:
    """Whether a kernel of Inductor computes x."""
    while isinstance(x, ir.TensorBox | ir.StorageBox | ir.BaseView):
        x = x.data
    return isinstance(x, ir.Loops | ir.ComputedBuffer)


def _is_read_in_order(ir: Any, graph: Any, x: Any) -> bool:
    """Whether a kernel of Inductor that computes x reads along the rows of memory.

    It also computes what x is made of, as far as that is no result of a library or a reduction. Of
    a view of x this is not asked: a gradient is usually reshaped, which keeps the order.
    """
    left, seen = [x], set()
    while left:
        x = left.pop()
        while isinstance(x, ir.TensorBox | ir.StorageBox | ir.BaseView | ir.ComputedBuffer):
            x = x.data
        for read in x.get_reads():
            if not getattr(read, "var_names", ()):
                continue
            last = read.var_names[-1]
            step = read.index.subs(last, last + 1) - read.index
            if step.expand(identity=True) not in (0, 1):  # Inductor marks indices of parts
                return False
            made = graph.try_get_buffer(read.name)
            is_made_too = isinstance(made, ir.ComputedBuffer) and isinstance(
                made.data, ir.Pointwise
            )
            if is_made_too and read.name not in seen:
                seen.add(read.name)
                left.append(made)
    return True


def _quantized(
    ir: Any, lowerings: dict[Any, Callable[..., Any]], x: Any, form: str
) -> tuple[Any, Any]:
    """`lokakern.numerics.quantize` by rows or whole groups.

    A non-finite element makes the scale non-finite, and so the whole row of the product, as a NaN
    element would. Checks of each element took 34 us of an H200, this takes 25.
    """
    aten = torch.ops.aten
    rows, columns = x.get_size()
    width = columns if form == Granularity.ROW.value else GROUP
    fp8 = routed_matmul.fp8_on(x.get_device())

    def cast(y: Any, dtype: torch.dtype) -> Any:
        return lowerings[torch.ops.prims.convert_element_type.default](y, dtype)

    def constant(value: float, dtype: torch.dtype = torch.float32) -> Any:
        return lowerings[aten.full.default](
            amax.get_size(), value, dtype=dtype, device=x.get_device()
        )

    wide = lowerings[aten.view.default](cast(x, torch.float32), [rows, columns // width, width])
    wide.mark_reuse(2)
    amax = lowerings[aten.amax.default](lowerings[aten.abs.default](wide), [2])
    # In float64, as Inductor multiplies by the reciprocal of a constant: in float32 35 of
    # a test's 64 scales were off by one ulp.
    largest = constant(torch.finfo(fp8).max, torch.float64)
    scale = cast(lowerings[aten.div.Tensor](cast(amax, torch.float64), largest), torch.float32)
    scale = lowerings[aten.where.self](
        lowerings[aten.eq.Scalar](amax, 0),
        constant(1.0),
        lowerings[aten.maximum.default](scale, constant(numerics.SMALLEST_SCALE)),
    )
    data = lowerings[aten.div.Tensor](wide, lowerings[aten.unsqueeze.default](scale, 2))
    data = lowerings[aten.view.default](cast(data, fp8), [rows, columns])
    columns_first = ir.ExternKernel.require_contiguous(
        lowerings[aten.permute.default](scale, [1, 0])
    )
    return (
        ir.ExternKernel.require_contiguous(data),
        lowerings[aten.permute.default](columns_first, [1, 0]),
    )
