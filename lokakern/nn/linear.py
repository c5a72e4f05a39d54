"""`Linear`: an `nn.Linear` whose three products run on kernels of their routes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, bfloat16, float32, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.nn.functional import linear

from lokakern import sampled_check
from lokakern.errors import UnsupportedError
from lokakern.functional.checks import is_traced, warn_once
from lokakern.native import NATIVE
from lokakern.nn.autocast import HALF, half_of
from lokakern.nn.chain_norm import KeptNorm, admitted_norms, drop_every_norm, made_buffers
from lokakern.nn.compiled_form import crossed_plan, form_at, fuse_quantizers, multiply_in_form
from lokakern.nn.routed_matmul import (
    CROSSED,
    EAGER,
    FLOAT16,
    OPS,
    PLAIN,
    Delayed,
    KeepingLinear,
    RoutedLinear,
    TurnedLinear,
    constant_of,
    delayed_key,
    dtype_of,
    find_activator,
    has_delayed,
    has_switch,
    in_dtype,
    is_known,
    kernel_at,
    multiply,
    multiply_activated,
    prepare_to_be_compiled,
    quantize_weight,
    quantizes_at,
    read_route,
    scales_of,
    segments_of,
    traced_route,
)
from lokakern.nn.saved_inputs import SAVED, SavingLinear, form_in, is_kept, saved_at, saved_form
from lokakern.nn.token_mixing import KINDS, mix_tokens, mixes, with_aligned_layout
from lokakern.quantized_tensor import pitch_of

if TYPE_CHECKING:
    from typing_extensions import TypeIs

PLAIN_ROUTES = (PLAIN, PLAIN, PLAIN)
_DERIVED = (
    "_kept", "_fp8_views", "_gathering", "_weight_scale", "_gathered", "_plan", "_chain_recipes",
    "adds_gradient", "delayed", "saves_input",
)  # fmt: skip
# Flags of a plan, see `Routed.changed`, in this order.
ALTERED, HELD, FROZEN, OFFLOADED = "altered", "held", "frozen", "offloaded"
ADDING = "adding"  # alone; with the dtype, which plain routes do not tell
KEEPING = "keeping"  # see `multiply_rows`
_BETWEEN = "\0"  # between the parts of a plan
OWN_CHAIN = "\0own"  # owner of the FP8 weights of a layer's own chain
CHAIN_DATA, CHAIN_SCALE = "chain_data_", "chain_scale_"  # names of buffers, before a granularity
_OF_OFFLOADED = (
    "a layer with an offloaded weight multiplies without gradients only, in the dtype that it was "
    "converted for: use torch.no_grad() and bfloat16, or float16 if it is for that, or refresh the "
    "conversion"
)


def _is_without_data(x: Tensor) -> bool:
    """Whether x has no data for a kernel: a meta tensor, or one of a tracer or a transform.

    Not for compilers, see `_way`.
    """
    if isinstance(x, Tensor) and not is_traced():
        return x.is_meta
    warn_once(
        "a converted layer of lokakern multiplies unquantized, as nn.Linear, under torch.func, "
        "torch.jit.trace, torch.fx and forward-mode AD, and so do their results: undo the "
        "conversion first (handle.undo()), or use torch.compile, which keeps the kernels"
    )
    return True


def _main_grad_of(weight: Tensor) -> Tensor:
    """What the gradient of a weight is added to.

    Raises:
        UnsupportedError: The weight is another one than that of the conversion.
    """
    found: Tensor | None = getattr(weight, "main_grad", None)
    if found is None:
        raise UnsupportedError(
            f"the weight {list(weight.shape)} of a layer has no main_grad, as it is not the one "
            "that convert(main_grads=True) found: FSDP2, whose weights are new in each pass, adds "
            "gradients in float32 by MixedPrecisionPolicy(reduce_dtype=torch.float32), without "
            "main_grads=True; of a weight that was assigned, convert the model again"
        )
    return found


def _has_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


def _is_sharded(weight: Tensor) -> bool:
    return hasattr(weight, "device_mesh")  # which a compiler also knows


def _wants_gradients(*operands: Tensor | None) -> bool:
    return is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)


def warn_unfit(x: Tensor, weight: Tensor, plan: str) -> None:
    """Warn once that the kernels of a plan do not take these dtypes."""
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device)
    how = f" under autocast to {torch.get_autocast_dtype(device)}" if is_cast else ""
    half = str(dtype_of(plan)).removeprefix("torch.")
    warn_once(
        f"a converted layer multiplies {x.dtype} by a weight in {weight.dtype}{how} "
        f"unquantized, as its kernels are for {half}: run the model under torch.autocast in "
        f"{half}, convert all of it to {half}, or choose kernels for another dtype by "
        "lokakern.convert(..., dtype=)"
    )


def _quantizable(weight: Tensor, half: torch.dtype) -> Tensor:
    """The weight as quantizers read it; float32 is not rounded first."""
    return weight if weight.dtype in (half, float32) else weight.to(half)


def _in_memory_of(old: Tensor | None, new: Tensor) -> Tensor:
    """The new tensor in the memory of the old one if possible, which CUDA graphs read."""
    if old is None or old.is_inference() != new.is_inference():
        return new
    kinds = [(x.shape, x.stride(), x.dtype, x.device) for x in (old, new)]
    return old.copy_(new) if kinds[0] == kinds[1] else new


def _bytes_of(x: Tensor) -> Tensor:
    """All memory of a tensor, gaps between rows included, which casts of a module do not change."""
    elements = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((elements,), (1,), 0).view(torch.uint8)


def _at_pitch(data: Tensor, rows: int, columns: int) -> Tensor:
    """Bytes of FP8 rows with gaps, which files of earlier versions have at other pitches."""
    pitch = pitch_of(columns)
    if data.numel() == rows * pitch:
        return data
    made = data.new_zeros(rows, pitch)
    made[:, :columns] = data.view(rows, -1)[:, :columns]
    return made if data.dim() == 2 else made.flatten()


class Routed(nn.Module):
    """Base of modules with a product ``x @ weight.t() + bias``: its routes, and FP8 weights.

    Routes are texts (`lokakern.nn.routed_matmul`) that only `lokakern.convert` sets.
    """

    # All that a call depends on, in one text, for compilers: "" multiplies as nn.Linear. Dynamo
    # checks each attribute that `forward` reads before each call of a compiled model.
    _plan = ""
    fp8_data: Tensor  # buffers of `freeze_weight` and `hold`
    fp8_scale: Tensor
    held_weight: Tensor
    _routes: tuple[str, str, str] = PLAIN_ROUTES
    # FP8 weights by product and device, inside `Conversion.weights_unchanged`.
    _kept: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] | None = None
    _has_parameter = False  # whether a parameter is multiplied without change
    # Choices of conversions, see `lokakern.nn.adoption`.
    _choices: tuple[Any, ...] = ()
    _is_adopted = False  # whether it was an nn.Linear
    # Owner and granularity of FP8 weights that chains read, see `Linear.keep_chain_weight`.
    _chain_weights: tuple[tuple[str, str], ...] = ()
    _chain_scales: tuple[str, ...] = ()  # granularities of these that the newest choice admits
    _chain_norms: tuple[KeptNorm, ...] = ()  # see `lokakern.nn.chain_norm`
    _frozen_norms: tuple[nn.Module, ...] = ()  # those of the newest choice, once each
    # How chains that begin here were called, see `lokakern.nn.chain_call.call_again`.
    _chain_recipes: dict[Any, Any] | None = None
    # For a weight that FSDP2 gathers as FP8, see `lokakern.distributed.fsdp2_gather`: the owner of
    # the scales, the scale, and the gathered weight.
    _gathering: Any = None
    _weight_scale: Any = None
    _gathered: Any = None
    is_frozen = False  # in inference: FP8 weights are buffers of bytes, which casts do not change
    is_held = False  # in inference: the unquantized weight is a buffer, see `hold`
    makes_weight = False  # whether its weight is not a parameter
    is_mixing = False  # whether it multiplies across tokens, see `mods.MixTokens`
    is_offloaded = False  # whether the unquantized weight is on another device
    # The dtype of products whose gradients of the weight are added to its float32 ``main_grad``;
    # None in copies, and for ordinary gradients.
    adds_gradient: torch.dtype | None = None
    # State of delayed scaling by the key of the layer in its routes; not in copies.
    delayed: dict[str, Delayed] | None = None
    saves_input = False  # whether the plan says to save inputs in FP8, for eager calls
    padding: tuple[int, int] = (0, 0)  # zeros added to k and n, see `mods.Pad`
    form = ""  # in compiled code, see `lokakern.nn.compiled_form`
    _fp8_dtype = torch.float8_e4m3fn
    _fp8_widths = (0, 0)  # columns of data and of scales without padding
    _fp8_views: tuple[Tensor, Tensor, Tensor] | None = None

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, input_scale: str = ""
    ) -> Tensor:
        """``x @ weight.t() + bias``, bitwise equal to `nn.Linear` where nothing is quantized.

        ``input_scale`` is a static scale of x, if any.
        """
        plan = self._plan
        is_plain = not plan or plan.endswith(_BETWEEN * len(PLAIN_ROUTES))
        if is_plain and not plan.startswith(ADDING):
            return linear(x, weight, bias)  # every route is plain
        if is_compiling():
            return _traced_product(self, plan, x, weight, bias, input_scale)
        if _is_without_data(x):
            return linear(x, weight, bias)
        if x.is_nested:
            warn_once(
                "a converted layer multiplies nested tensors unquantized, as nn.Linear: pass "
                "rows in one dense tensor, such as the values() of a jagged one"
            )
            return linear(x, weight, bias)
        if _is_sharded(weight):
            return self._of_shards(x, weight, bias, input_scale)
        fits = half_of(x.dtype, weight.dtype, x.device.type) is dtype_of(plan)
        if self.is_offloaded and (not fits or _wants_gradients(x, weight, bias)):
            raise UnsupportedError(_OF_OFFLOADED)
        if not fits:  # kernels were chosen for one dtype
            warn_unfit(x, weight, plan)
            return linear(x, weight, bias)
        m = x.shape[:-1].numel()
        parts: tuple[Tensor | None, ...]
        asked = self._routes if is_grad_enabled() else self._routes[:1]
        adds = self.adds_gradient and is_grad_enabled() and weight.requires_grad
        if not quantizes_at(asked, m) and not self.is_offloaded and not adds:
            return linear(x, weight, bias)  # in the layout of x, as nn.Linear
        way = "training" if is_grad_enabled() else "inference"
        way = "offloaded" if self.is_offloaded else way
        if self.saves_input and way == "training" and not is_kept(x, dtype_of(plan)):
            form = saved_form(self._routes[2], m)
            if form:
                parts = self._parts(x, weight, m)
                return self._saving_product(plan, x, weight, bias, parts, input_scale, form)
        if way == "training" and (adds or has_delayed(plan)):
            return self._keeping_product(plan, x, weight, bias, m, input_scale)
        parts = (*_frozen(self), None, None) if self.is_frozen else self._parts(x, weight, m)
        return multiply_rows(x, weight, bias, parts, self._routes, input_scale, way)

    def _keeping_product(
        self, plan: str, x: Tensor, weight: Tensor, bias: Tensor | None, m: int, input_scale: str
    ) -> Tensor:
        """`product` in training of a layer with main gradients or delayed scaling."""
        adds = plan.startswith(ADDING) and weight.requires_grad
        main_grad = _main_grad_of(weight) if adds else None
        state = self.delayed.get(delayed_key(plan)) if self.delayed and has_delayed(plan) else None
        parts: tuple[Tensor | None, ...] = (None, None, None, None)
        if state is None and not is_compiling():
            parts = self._parts(x, weight, m)
        parts = (*parts, main_grad, *((None, None, None) if state is None else state))
        routes, way = plan.split(_BETWEEN)[2:], in_dtype("keeping", dtype_of(plan))
        return multiply_rows(x, weight, bias, parts, routes, input_scale, way)

    def _saving_product(
        self, plan: str, x: Tensor, weight: Tensor, bias: Tensor | None,
        parts: tuple[Tensor | None, ...], input_scale: str, form: str,
    ) -> Tensor:  # fmt: skip
        """`product` in training of a layer that saves its input in FP8, of a granularity."""
        adds = plan.startswith(ADDING) and weight.requires_grad
        main_grad = _main_grad_of(weight) if adds else None
        way, routes = "training", plan.split(_BETWEEN)[2:]
        # Without the gradient nothing is saved for it; products of vectors are torch's.
        if weight.requires_grad and 1 not in weight.shape:
            way, parts = KEEPING + form, (*parts, main_grad)
        elif adds:
            way, parts = KEEPING, (*parts, main_grad, None, None, None)
        return multiply_rows(x, weight, bias, parts, routes, input_scale, way)

    def _of_shards(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, input_scale: str
    ) -> Tensor:
        """`product` of DTensors: each rank multiplies its shards."""
        from lokakern.nn.tensor_parallel import product_of_shards  # its import takes 1 s

        def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if self.is_frozen and not self._is_frozen_of(weight):
                if is_compiling():
                    raise UnsupportedError(
                        "a weight was frozen before it was sharded: call the model once before it "
                        "is compiled, so that each rank quantizes its shard"
                    )
                self.thaw()
                self.freeze_weight(weight)
            return self.product(x, weight, bias, input_scale)

        return product_of_shards(multiplied, x, weight, bias)

    def mixes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether to multiply across tokens, without a copy of x."""
        found = self.is_mixing and self._routes == PLAIN_ROUTES and mixes(x, weight, bias)
        if found and is_compiling():
            fuse_quantizers()  # for the key of the cache alone
        return found

    def _parts(self, x: Tensor, weight: Tensor, m: int) -> tuple[Tensor | None, ...]:
        """FP8 weights for the output and for the input's gradient, if they are kept.

        Else kernels quantize the weight in each call: writes through ``data`` do not change its
        version, and a replay of a graph runs no Python.
        """
        if self._gathered is not None and self._gathered.is_of(weight):
            return self._gathered.parts(self._routes)  # type: ignore[no-any-return]
        to_output, to_input, _ = self._routes
        is_kept = self._kept is not None and not (
            weight.is_cuda and torch.cuda.is_current_stream_capturing()
        )
        forward = backward = (None, None)
        if is_kept and kernel_at(to_output, m):
            forward = self._quantized(weight, 0)  # type: ignore[assignment]
        # As with autocast, the backward pass multiplies by a copy that optimizers do not change.
        is_cast = self._has_parameter and weight.dtype is torch.float32
        if (is_kept or is_cast) and _wants_gradients(x) and kernel_at(to_input, m):
            backward = self._quantized(weight, 1)  # type: ignore[assignment]
        return (*forward, *backward)

    def _quantized(self, weight: Tensor, product: int) -> tuple[Tensor, Tensor]:
        """The FP8 weight for kernels of the output (0) or of the input's gradient (1)."""
        key = (product, weight.device)
        found = None if self._kept is None else self._kept.get(key)
        if found is None:
            with torch.no_grad():
                weight = _quantizable(weight.detach(), dtype_of(self._routes[product]))
                right = weight.t() if product else weight
                found = quantize_weight(right, scales_of(self._routes[product]))
            if self._kept is not None:
                self._kept[key] = found
        return found

    def _is_frozen_of(self, weight: Tensor) -> bool:
        """Whether the frozen weight has the shape of this shard."""
        shape = (self.fp8_data.shape[0], self._fp8_widths[0])
        return not _is_sharded(self.fp8_data) and shape == tuple(weight.shape)

    def changed(self) -> None:
        """Renew what is derived from routes, flags and buffers; each change of these calls it."""
        if self.is_mixing:
            prepare_to_be_compiled(fuse_quantizers)
        is_altered = self.is_held or self.is_mixing or self.padding != (0, 0)
        is_held = self.is_held and not self.is_mixing and self.padding == (0, 0)
        adding = in_dtype(ADDING, self.adds_gradient or bfloat16)
        flags = ((ALTERED, is_altered), (HELD, is_held), (FROZEN, self.is_frozen),
                 (OFFLOADED, self.is_offloaded), (adding, self.adds_gradient))  # fmt: skip
        words = " ".join(word for word, holds in flags if holds)
        columns = self._fp8_widths[0] if self.is_frozen else 0
        is_whole = not self.is_frozen or self.fp8_data.shape[1] == columns
        parts = (words, "" if is_whole else str(columns), *self._routes)
        # One object for equal plans: `layer.cpp` keeps each.
        is_any = is_altered or self.adds_gradient or any(self._routes)
        self._plan = sys.intern(_BETWEEN.join(parts)) if is_any else ""
        if self.saves_input is not (SAVED in self._plan):
            self.saves_input = not self.saves_input

    def take_routes(self, texts: Sequence[str], weight: Tensor | None) -> None:
        """Set the routes; ``weight`` is the parameter if it is multiplied without change."""
        self.thaw()
        if any(texts):
            prepare_to_be_compiled(_way, _activated_way, fuse_quantizers)
        self._routes = (texts[0], texts[1], texts[2])
        self._has_parameter = weight is not None
        self._kept = None if self._kept is None else {}
        self.changed()

    def freeze(self) -> None:
        """Quantize the weight of the output, see `freeze_weight`."""
        raise NotImplementedError

    def freeze_weight(self, weight: Tensor) -> None:
        """Quantize the weight of the output once; later changes have no effect."""
        device = self.fp8_data.device if self.is_frozen else weight.device
        before = (self.fp8_data, self.fp8_scale) if self.is_frozen else (None, None)
        held = self.held_weight if self.is_held else None
        self.thaw()
        if self._routes[0] == PLAIN:
            self.hold(weight, held)
            return
        with torch.no_grad():
            # A sharded one is gathered from all ranks.
            source = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            source = _quantizable(source.detach().to(device), dtype_of(self._routes[0]))
            data, scale = quantize_weight(source, scales_of(self._routes[0]))
        whole = data.as_strided((data.shape[0], data.stride(0)), (data.stride(0), 1))
        scales = scale.as_strided((scale.shape[0], scale.stride(0)), (scale.stride(0), 1))
        self._fp8_dtype, self._fp8_widths = data.dtype, (data.shape[1], scale.shape[1])
        data, scale = whole.view(torch.uint8), scales.view(torch.uint8)
        self.register_buffer("fp8_data", _in_memory_of(before[0], data), persistent=False)
        self.register_buffer("fp8_scale", _in_memory_of(before[1], scale), persistent=False)
        self.is_frozen = True
        self.changed()
        if traced_route(self._routes[0]) == PLAIN:  # compiled graphs read no FP8
            self.hold(weight, held)

    def hold(self, weight: Tensor, before: Tensor | None) -> None:
        """Keep a copy of an unquantized weight in a faster form, if there is one.

        ``before`` is the previous copy.
        """
        if weight.dtype not in HALF or hasattr(weight, "to_local"):
            return  # autocast casts it in each call; shards are not supported
        is_padded = self.padding != (0, 0)
        found = weight.detach() if is_padded else with_aligned_layout(weight.detach())
        if self.makes_weight or is_padded or found.stride() != weight.stride():
            self.register_buffer("held_weight", _in_memory_of(before, found), persistent=False)
            self.is_held = True
            self.changed()

    def held(self, x: Tensor) -> Tensor | None:
        """The copy of `hold`, unless the parameter may need a gradient.

        A column-major copy is only for a column-major x; with rows it was not measured.
        """
        if not self.is_held or is_grad_enabled() or type(x) not in KINDS:
            return None
        is_turned = self.held_weight.stride(-1) != 1 and x.stride(-1) == 1
        return None if is_turned else self.held_weight

    def thaw(self) -> None:
        """Undo `freeze_weight`."""
        if self.is_frozen:
            del self.fp8_data, self.fp8_scale
        if self.is_held:
            del self.held_weight
        self.is_frozen, self.is_held, self._fp8_views = False, False, None
        self.changed()

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        applied = super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]
        self.changed()  # buffers moved
        return applied

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script; its result would replace the module permanently.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"torch.jit.script cannot compile lokakern's {type(self).__name__}: undo the "
            "conversion first (handle.undo()), or use torch.compile or torch.export"
        )

    def __getstate__(self) -> dict[str, Any]:
        """The state without derived attributes."""
        state = dict(self.__dict__)
        for name in _DERIVED:
            state.pop(name, None)
        if self.adds_gradient:  # not in a copy, of which no handle knows
            state["_choices"] = tuple(c._replace(adds_gradient=None) for c in self._choices)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        vars(self).pop("is_special", None)  # in files of earlier versions
        for name in [x for x in self._buffers if x == "fp8_data" or x.startswith(CHAIN_DATA)]:
            data: Tensor = getattr(self, name)
            is_own = name == "fp8_data"
            shape = (data.shape[0], self._fp8_widths[0]) if is_own else self.weight.shape
            setattr(self, name, _at_pitch(data, *shape))  # type: ignore[misc]
        if any(self._routes) or self.form:
            prepare_to_be_compiled(_way, _activated_way, fuse_quantizers)
        if self.form:
            prepare_to_be_compiled(form_at, crossed_plan)
        self.changed()

    def route_words(self) -> str:
        """The routes in a few words, for `extra_repr`."""
        names = ("output", "grad_input", "grad_weight")
        return ", ".join(f"{n}={words_of(r)}" for n, r in zip(names, self._routes, strict=True))


def multiply_rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, parts: tuple[Tensor | None, ...],
    routes: Sequence[str], input_scale: str, way: str,
) -> Tensor:  # fmt: skip
    """The product by routes in their dtype, with the FP8 weights of `Routed._parts`.

    Of ``way`` see `_way`; or "turned", training with a weight that is the transpose of a row-major
    one, and its gradient, too; or "keeping", training with what `KeepingLinear` is given behind the
    FP8 weights, with the dtype as of a route (`in_dtype`), which plain routes do not tell. With one
    tensor more, the main gradient or None, it is what `SavingLinear` is given, and the granularity
    of the saved input is behind the word.
    """
    if is_compiling():
        fuse_quantizers()
    to_output, to_input, to_weight = routes
    is_half = FLOAT16 in to_output + to_input + to_weight + way
    x = x.half() if is_half else x.bfloat16()
    if bias is not None:
        bias = bias.half() if is_half else bias.bfloat16()
    # float32 is not rounded before it is quantized
    if weight is not None and weight.dtype is not x.dtype and weight.dtype is not float32:
        weight = weight.half() if is_half else weight.bfloat16()
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    apart = x.dim() > 2 and not x.is_contiguous()  # then nn.Linear adds the bias separately
    if way == "training":
        y: Tensor = RoutedLinear.apply(rows, weight, bias, *parts, *routes, input_scale, apart)  # type: ignore[no-untyped-call]
    elif way == "turned":
        y = TurnedLinear.apply(rows, weight, bias, *parts, *routes, input_scale, apart)  # type: ignore[no-untyped-call]
    elif way.startswith("keeping"):
        fp8, kept = parts[:4], parts[4:]
        if len(kept) == 1:
            given = (*routes, input_scale, apart, way.removeprefix("keeping"), *kept)
            y = SavingLinear.apply(rows, weight, bias, *fp8, *given)  # type: ignore[no-untyped-call]
            return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
        y = KeepingLinear.apply(rows, weight, bias, *fp8, *routes, input_scale, apart, *kept)  # type: ignore[no-untyped-call]
    else:
        right = None if weight is None or way == "offloaded" else weight.t()
        y = multiply(rows, right, parts[0], parts[1], bias, routes[0], input_scale, apart)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def _traced_product(
    layer: Routed,
    plan: str,
    x: Tensor,
    given: Tensor | None,
    bias: Tensor | None,
    input_scale: str,
) -> Tensor:
    """`Routed.product` for a compiler, which guards each attribute and global that this reads.

    Without a given weight it is that of the layer. A product with a frozen weight does not read
    it: it would be one more input of the graph, which each call checks.
    """
    if (
        given is None
        and plan.startswith("frozen")
        and not (_is_sharded(x) or x.is_meta or x.is_nested)
    ):
        m = x.numel() // x.shape[-1]  # the size of a shape is no symbol in torch.export
        found = _way(plan, constant_of(m), x.dtype, x.dtype, x.device.type)
        if found.startswith("frozen"):
            way, _, columns, *routes = found.split("\0")
            frozen = (*_frozen_bytes(layer, columns), None, None)
            return multiply_rows(x, None, bias, frozen, routes, input_scale, way)
    weight: Tensor = layer.weight if given is None else given  # type: ignore[assignment]
    if x.is_meta or x.is_nested:
        return linear(x, weight, bias)
    is_sharded = type(weight) is not Parameter and _is_sharded(weight)
    if is_sharded and not torch._C._are_functorch_transforms_active():
        return layer._of_shards(x, weight, bias, input_scale)
    m = x.numel() // x.shape[-1]
    found = _way(plan, constant_of(m), x.dtype, weight.dtype, x.device.type)
    if not found:
        return linear(x, weight, bias)
    way, flags, columns, *routes = found.split("\0")
    if way == "keeping":
        plan = found.partition("\0")[2]
        return layer._keeping_product(plan, x, weight, bias, m, input_scale)
    if way == "saving":
        plan, none = found.partition("\0")[2], (None, None, None, None)
        return layer._saving_product(plan, x, weight, bias, none, input_scale, form_in(plan))
    if way == "refused" or (way == "offloaded" and _wants_gradients(x, weight, bias)):
        raise UnsupportedError(_OF_OFFLOADED)
    parts: tuple[Tensor | None, ...] = (None, None, None, None)
    if "frozen" in flags:
        parts = (*_frozen_bytes(layer, columns), None, None)
    return multiply_rows(x, weight, bias, parts, routes, input_scale, way)


def traced_activated(
    layer: Linear, plan: str, x: Tensor, activation: str, activating: str
) -> Tensor | None:
    """`Linear.forward_activated` for a compiler."""
    if _is_sharded(x) or x.is_meta or x.is_nested or not is_known(*x.shape):
        return None
    m, k = x.shape[:-1].numel(), x.shape[-1]
    found = _activated_way(plan, activating, m, k, x.dtype, x.device.type)
    if not found or k != layer.in_features:
        return None
    fuse_quantizers()
    kernel, columns, route = found.split("\0")
    data, scale = _frozen_bytes(layer, columns)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    rows = x if x.dim() == 2 else x.reshape(-1, k)
    y: Tensor = OPS.activated_gemm(rows, activation, kernel, data, scale, bias, route)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def _activated_way(
    plan: str, activating: str, m: int, k: int, dtype: torch.dtype, device: str
) -> str:
    """Kernel, columns and route of `traced_activated`, or "": as of `_way`, a constant."""
    if not plan.startswith("frozen") or dtype is not dtype_of(plan):
        return ""
    if torch.is_grad_enabled() or half_of(dtype, dtype, device) is not dtype:
        return ""
    _, columns, route, *_ = plan.split(_BETWEEN)
    route = traced_route(route)
    if torch._C._are_functorch_transforms_active() or sampled_check.is_checked(route):
        return ""
    kernel = find_activator(activating, route, m, k)
    return _BETWEEN.join((kernel, columns, route)) if kernel else ""


def _way(
    plan: str, m: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: str,
    is_traced: bool = True,
) -> str:  # fmt: skip
    """How a product multiplies: a word before the plan; "" as nn.Linear.

    A constant for compilers. It reads the state of autograd and autocast, which Dynamo guards.
    ``m`` is -1 if it is dynamic. Unless ``is_traced``, of an eager call. The word is "training",
    "keeping" if the layer has main gradients or delayed scaling, "saving" if it saves its input in
    FP8 at this m, "inference", "frozen" if the product reads only the frozen weight, or "offloaded"
    or "refused" for an offloaded weight.
    """
    flags, columns, *routes = plan.split(_BETWEEN)
    if is_traced and EAGER in plan:
        routes = [traced_route(route) for route in routes]
        plan = _BETWEEN.join((flags, columns, *routes))
    if torch._C._are_functorch_transforms_active():
        return ""
    fits = half_of(dtype, weight_dtype, device) is dtype_of(plan)
    if OFFLOADED in flags:
        return f"{'offloaded' if fits else 'refused'}{_BETWEEN}{plan}"
    is_training = is_grad_enabled()
    asked = tuple(routes) if is_training else (routes[0],)
    is_plain = not any(asked) if m < 0 else not quantizes_at(asked, m)
    is_kept = is_training and (flags.startswith(ADDING) or CROSSED in plan)
    if not fits or (is_plain and not is_kept):
        return ""
    is_frozen = FROZEN in flags and m >= 0 and not sampled_check.is_checked(routes[0])
    word = "training" if is_training else "frozen" if is_frozen else "inference"
    if is_training and (flags.startswith(ADDING) or has_delayed(plan)):
        word = "keeping"
    if is_training and SAVED in plan and (form := saved_form(routes[2], max(m, 0))):
        word, plan = "saving", saved_at(plan, form)
    return f"{word}{_BETWEEN}{plan}"


def _frozen_bytes(layer: Routed, columns: str) -> tuple[Tensor, Tensor]:
    """`_frozen` for a compiler: Inductor calls an operator for each view as another dtype."""
    data = layer.fp8_data
    return data[:, : int(columns)] if columns else data, layer.fp8_scale


def _frozen(layer: Routed) -> tuple[Tensor, Tensor]:
    """Data and scales of a frozen weight."""
    stored = layer.fp8_data
    views = layer._fp8_views
    if views is not None and views[0] is stored:
        return views[1], views[2]
    columns, width = layer._fp8_widths
    data = stored.view(layer._fp8_dtype)[:, :columns]
    scale = layer.fp8_scale.view(torch.float32)[:, :width]
    layer._fp8_views = (stored, data, scale)
    return data, scale


def words_of(route: str) -> str:
    """The kernels of a route by ranges of m that 16 divides."""
    if route == PLAIN:
        return "bf16"
    _, segments, _ = read_route(route)
    found = []
    for place, (start, name) in enumerate(segments):
        if name:
            end = f"..{segments[place + 1][0] - 1}" if place + 1 < len(segments) else ".."
            found.append(f"{name} at m={start}{end}")
    return "; ".join(found)


def quantizes(plan: str, m: int) -> bool:
    """Whether a product of a plan reads FP8 at m, in this mode of autograd."""
    return _quantizes(plan, m, is_grad_enabled())


@functools.lru_cache(maxsize=4096)
def _quantizes(plan: str, m: int, is_training: bool) -> bool:
    if not plan:
        return False
    flags, _, *routes = plan.split(_BETWEEN)
    asked = tuple(routes) if is_training else (routes[0],)
    return OFFLOADED in flags or quantizes_at(asked, m)


def described(plan: str) -> list[tuple[str, bool, list[list[tuple[int, bool]]]]] | None:
    """What ``layer.h`` reads of a plan, by product; None if calls stay in Python.

    The route, whether a check or a switch may need unquantized operands, and at which m it has a
    kernel.
    """
    flags, _, *routes = plan.split(_BETWEEN)
    keeps = flags.startswith(ADDING) or has_delayed(plan) or SAVED in plan
    if keeps or OFFLOADED in flags or (ALTERED in flags and HELD not in flags):
        return None
    return [
        (text, sampled_check.is_checked(text) or has_switch(text), segments_of(text))
        for text in routes
    ]


class Linear(nn.Linear, Routed):
    """`nn.Linear` with chosen kernels for ``output``, ``grad_input`` and ``grad_weight``.

    The kernels are chosen once for all ranges of m, here or by `lokakern.convert`. Where nothing is
    quantized the result is bitwise equal to `nn.Linear`, except with weights in inference whose
    layout `with_aligned_layout` changes, for which cuBLAS may sum in another order, and in compiled
    code with a ``form``. Only operands in bfloat16, or in float16 if kernels were chosen for that,
    are quantized, also under autocast. Keys of a state_dict are those of `nn.Linear`.

    Args:
        in_features: k.
        out_features: n.
        bias: Whether it has a bias.
        device: As of `nn.Linear`.
        dtype: As of `nn.Linear`.
        budget: Largest accepted row error of each product, or an `ErrorBudget`; None quantizes
            nothing.
        distribution: As of `lokakern.gemm`.

    Attributes:
        padding: Zeros added to k and n, see `lokakern.mods.Pad`.
        form: How compiled code multiplies, see `lokakern.nn.compiled_form`; "" as nn.Linear.
    """

    @property
    def is_special(self) -> bool:
        """Whether it differs from nn.Linear in any way."""
        return bool(self._plan)

    def take_routes(self, texts: Sequence[str], weight: Tensor | None) -> None:
        """See `Routed`."""
        self.bring_back()
        super().take_routes(texts, weight)
        self.renew_chain_weights()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        budget: Any = None,
        distribution: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._convert(budget, distribution)

    def _convert(self, budget: Any, distribution: str | Sequence[str] | None) -> None:
        """Choose kernels for a layer that is complete, if there is a budget."""
        if budget is not None:
            import lokakern  # the public function, which is imported when it is first used

            lokakern.convert(self, budget, distribution=distribution)

    def forward(self, input: Tensor, input_scale: str = "") -> Tensor:
        """``input @ weight.t() + bias``, ``[..., n]``; of ``input_scale`` see `Routed.product`."""
        plan = self._plan
        if is_compiling():
            y = multiply_in_form(self, input, input_scale) if self.form else None
            if y is not None:
                return y
        elif NATIVE.call_layer is None:
            # No op that asks may run at this m.
            if plan and not NATIVE.is_asked and isinstance(input, Tensor) and input.is_cuda:
                NATIVE.ask()
        elif not input_scale:
            y = NATIVE.call_layer(self, input, described)
            if y is not None:
                return y  # type: ignore[no-any-return]
        if not plan:
            return linear(input, self.weight, self.bias)
        if plan.startswith("altered"):
            return self._altered(input, input_scale)
        if is_compiling():
            return _traced_product(self, plan, input, None, self.bias, input_scale)
        return self.product(input, self.weight, self.bias, input_scale)

    def forward_with(
        self, input: Tensor, bias: Tensor | None, input_scale: str = "", plan: str = ""
    ) -> Tensor:
        """`forward` with another bias or plan, for compilers; not with padding or across tokens."""
        plan = plan or self._plan
        if not plan:
            return linear(input, self.weight, bias)
        return _traced_product(self, plan, input, None, bias, input_scale)

    def take_form(self, form: str) -> None:
        """Set ``form``."""
        if form:
            prepare_to_be_compiled(form_at, crossed_plan)
            prepare_to_be_compiled(_way, _activated_way, fuse_quantizers)
        self.form = form
        self.changed()

    def changed(self) -> None:
        """See `Routed`; without a plan and a form, an `nn.Linear` becomes a `PlainLinear`."""
        super().changed()
        if self._is_adopted and is_linear(self):
            self.__class__ = Linear if self._plan or self.form else PlainLinear

    def _altered(self, input: Tensor, input_scale: str) -> Tensor:
        """`forward` with padding, a held weight, or across tokens."""
        if self.padding == (0, 0):
            held = self.held(input)
            weight = self.weight if held is None else held
            if self.is_mixing and self.mixes(input, weight, self.bias):
                return mix_tokens(input, weight, self.bias).mT
            return self.product(input, weight, self.bias, input_scale)
        k, n = self.padding
        held = self.held(input)
        if held is None:  # an offloaded weight is not multiplied
            held = self.weight if self.is_offloaded else self._padded()
        bias = None if self.bias is None else nn.functional.pad(self.bias, (0, n))
        y = self.product(nn.functional.pad(input, (0, k)), held, bias)
        return y[..., : self.out_features] if n else y

    def forward_activated(self, x: Tensor, activation: str, activating: str) -> Tensor | None:
        """``forward(f(x))`` with f and quantizing in one kernel; see `multiply_activated`.

        Returns:
            None at m without measurements, for other dtypes, and if a gradient needs f(x).
        """
        if is_compiling():
            return traced_activated(self, self._plan, x, activation, activating)
        if NATIVE.call_layer is not None:
            y = NATIVE.call_layer(self, x, described, activation, activating, find_activator)
            if y is not None:
                return y  # type: ignore[no-any-return]
        plan, weight = self._plan, self.weight
        is_own = type(weight) is Parameter or not _is_sharded(weight)
        if not (plan.startswith("frozen") and is_own) or x.is_meta or x.is_nested:
            return None
        route = self._routes[0]
        way = _way(plan, -1, x.dtype, weight.dtype, x.device.type, False)
        if not way or way.startswith("refused") or _wants_gradients(x, weight, self.bias):
            return None
        if x.dtype is not dtype_of(plan) or x.shape[-1:] != weight.shape[-1:]:
            return None
        data, scale = _frozen(self)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        y = multiply_activated(rows, activation, activating, data, scale, bias, route)
        return y if y is None or x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def extra_repr(self) -> str:
        """Shapes and routes."""
        padded = "" if self.padding == (0, 0) else f", padding={self.padding}"
        return f"{super().extra_repr()}{padded}, {self.route_words()}"

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        if self.is_frozen or self.is_held:
            self.freeze()
        else:
            self.renew_chain_weights()
        self._keep_gathering()
        self._renew_main_grad()
        self.changed()  # parameters may be others

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        applied = super()._apply(*arguments, **options)
        self._keep_gathering()
        self._renew_main_grad()
        for key, state in list((self.delayed or {}).items()):
            self.keep_delayed(key, state.on(self.weight.device))
        return applied

    def keep_delayed(self, key: str, state: Delayed | None) -> None:
        """Keep the state of routes with a key; None forgets it."""
        others = {k: x for k, x in (self.delayed or {}).items() if k != key}
        self.delayed = (others if state is None else {**others, key: state}) or None

    def add_gradient(self, dtype: torch.dtype | None) -> None:
        """Add gradients of the weight to its ``main_grad``, zeros at first, from now on, or not.

        A weight that is not multiplied as it is, that is not trained, or whose gradient hooks wait
        for, keeps its gradients. ``dtype`` is that of the products; None: ordinary gradients.
        """
        weight: Any = self._parameters.get("weight")  # none where it is computed
        fits = type(weight) is Parameter and weight.requires_grad and self._has_parameter
        fits = fits and not self.is_mixing and not _has_hooks(weight)
        wanted = dtype if fits else None
        kept = getattr(weight, "main_grad", None)
        if wanted and not self.adds_gradient and isinstance(kept, Tensor):
            kept.detach().zero_()  # such as that of a file of the model
        if self.adds_gradient and not wanted and hasattr(weight, "main_grad"):
            del weight.main_grad
        self.adds_gradient = wanted
        self._renew_main_grad()
        if wanted:
            prepare_to_be_compiled(_way, _activated_way, fuse_quantizers)
        self.changed()

    def _renew_main_grad(self) -> None:
        """Make a ``main_grad`` for a weight that has none, such as after a move or a load."""
        weight: Any = self._parameters.get("weight")
        if not self.adds_gradient or weight is None:
            return
        found = getattr(weight, "main_grad", None)
        if found is None or found.device != weight.device:
            weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

    def _keep_gathering(self) -> None:
        """Register the new local tensor of a sharded weight after a cast or a load."""
        if self._gathering is not None:
            self._gathering.keep(self)

    def offload(self, device: torch.device) -> int:
        """Move a frozen weight to a device, see `Conversion.offload`; returns the freed bytes."""
        if not self.is_frozen:
            return 0
        there = self.weight.device
        self.weight.data = self.weight.data.to(device)
        self.is_offloaded = True
        self.changed()
        return self.weight.nbytes if self.weight.device != there else 0

    def bring_back(self) -> None:
        """Undo `offload`."""
        if self.is_offloaded:
            self.weight.data = self.weight.data.to(self.fp8_data.device)
            self.is_offloaded = False
            self.changed()

    def freeze(self) -> None:
        """Quantize the weight once, or `hold` it."""
        self.freeze_weight(self.weight if self.padding == (0, 0) else self._padded())
        self.renew_chain_weights()

    def keep_chain_weight(self, owner: str, scales: str) -> None:
        """Keep the FP8 weight of a granularity for a chain, quantized when `freeze` is called.

        It is the frozen weight if that has this granularity. Each call needs one of
        `drop_chain_weight`.

        Args:
            owner: Key of the conversion.
            scales: The granularity.
        """
        self._chain_weights = (*self._chain_weights, (owner, scales))
        self.renew_chain_weights()

    def drop_chain_weight(self, owner: str, scales: str) -> None:
        """Undo one call of `keep_chain_weight`, if there was one."""
        found = list(self._chain_weights)
        if (owner, scales) in found:
            found.remove((owner, scales))
            self._chain_weights = tuple(found)
            self.renew_chain_weights()

    def drop_chain_weights(self) -> None:
        """Undo all calls of `keep_chain_weight`, and of `chain_norm.keep_norms`."""
        drop_every_norm(self)
        if self._chain_weights:
            self._chain_weights = ()
            self.renew_chain_weights()

    def chain_weight(self, scales: str) -> tuple[Tensor, Tensor] | None:
        """Bytes of data and scales of `keep_chain_weight`.

        None if it could not be quantized, or if a newer conversion chose for this layer.
        """
        if scales not in self._chain_scales:
            return None
        if self._freezes(scales):
            return self.fp8_data, self.fp8_scale
        name = CHAIN_DATA + scales
        if name not in self._buffers:
            return None
        return getattr(self, name), getattr(self, CHAIN_SCALE + scales)

    def _freezes(self, scales: str) -> bool:
        """Whether the frozen weight, if any, has this granularity."""
        if not self._plan:
            return False
        flags, _, route, *_ = self._plan.split(_BETWEEN)
        return FROZEN in flags and scales_of(route) == scales

    def renew_chain_weights(self) -> None:
        """Quantize the weight for chains, and copy norms, anew, in the same memory if possible."""
        newest = {self._choices[-1].key, OWN_CHAIN} if self._choices else None
        vars(self).pop("_chain_recipes", None)
        self._chain_scales = tuple(
            dict.fromkeys(x for owner, x in self._chain_weights if not newest or owner in newest)
        )
        self._frozen_norms = admitted_norms(self, newest)
        names = [name for name in self._buffers if name.startswith((CHAIN_DATA, CHAIN_SCALE))]
        before = {name: self._buffers[name] for name in names}
        for name in names:
            delattr(self, name)
        weight = self.weight
        is_usual = type(weight) in (Parameter, Tensor) and weight.dtype in HALF
        if not is_usual or weight.is_meta or self.padding != (0, 0) or self.is_offloaded:
            return
        for scales in self._chain_scales:
            if self._freezes(scales):
                continue
            with torch.no_grad():
                made = quantize_weight(weight.detach(), scales)
            for prefix, x in zip((CHAIN_DATA, CHAIN_SCALE), made, strict=True):
                name = prefix + scales
                kept = _in_memory_of(before.get(name), _bytes_of(x))
                self.register_buffer(name, kept, persistent=False)
        for name, x in made_buffers(self).items():
            self.register_buffer(name, _in_memory_of(before.get(name), x), persistent=False)

    def held(self, x: Tensor) -> Tensor | None:
        """See `Routed`; None if `Pad` changed since."""
        held, (k, n) = super().held(x), self.padding
        is_it = held is not None and held.shape == (self.out_features + n, self.in_features + k)
        return held if is_it else None

    def _padded(self) -> Tensor:
        k, n = self.padding
        return nn.functional.pad(self.weight, (0, k, 0, n))


class PlainLinear(Linear):
    """A `Linear` that multiplies as `nn.Linear` at every m, which its `forward` assumes.

    Each question takes the host about 1 us between the kernels of a model, where the memory that it
    reads is cold: HSTU without graphs takes 1 % longer if its seven layers compare rows.
    `Linear.changed` sets the class.
    """

    def forward(self, input: Tensor, input_scale: str = "") -> Tensor:
        """See `Linear`."""
        if self._plan:  # of another class, or of a library that kept this method from before
            return Linear.forward(self, input, input_scale)
        return linear(input, self.weight, self.bias)

    def _get_name(self) -> str:
        return Linear.__name__ if type(self) is PlainLinear else type(self).__name__


LINEARS = (Linear, PlainLinear)
LINEARS_OF_ANY = (nn.Linear, *LINEARS)


def is_linear(layer: object) -> TypeIs[Linear]:
    """Whether it is a `Linear` of no other class, with or without a plan."""
    return type(layer) in LINEARS
