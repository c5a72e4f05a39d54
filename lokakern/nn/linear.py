"""`Linear`: an `nn.Linear` whose three products run on kernels of their routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lokakern.errors import UnsupportedError
from lokakern.functional.checks import is_traced, warn_once
from lokakern.nn.routed_matmul import (
    PLAIN,
    RoutedLinear,
    is_known,
    kernel_at,
    multiply_activated,
    output,
    prepare_to_be_compiled,
    quantize_weight,
    quantizes_at,
    read_route,
    scales_of,
)
from lokakern.nn.token_mixing import CAST, HALF, KINDS, mix_tokens, mixes, with_aligned_layout

PLAIN_ROUTES = (PLAIN, PLAIN, PLAIN)
_NO_WEIGHTS = (None, None, None, None)
_DERIVED = ("_kept", "_fp8_views", "_gathering", "_weight_scale", "_gathered")


def _is_without_data(x: Tensor) -> bool:
    """Whether x has no data for a kernel: a meta tensor, or one of a tracer or a transform."""
    if torch.compiler.is_compiling():
        return x.is_meta or torch._C._are_functorch_transforms_active()
    if isinstance(x, Tensor) and not is_traced():
        return x.is_meta
    warn_once(
        "a converted layer of lokakern multiplies unquantized, as nn.Linear, under torch.func, "
        "torch.jit.trace, torch.fx and forward-mode AD, and so do their results: undo the "
        "conversion first (handle.undo()), or use torch.compile, which keeps the kernels"
    )
    return True


def _is_sharded(weight: Tensor) -> bool:
    return hasattr(weight, "device_mesh")  # which a compiler also knows


def _wants_gradients(*operands: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)


def _product_dtype(x: Tensor, weight: Tensor) -> tuple[torch.dtype, bool]:
    """The dtype of the product, and whether it is bfloat16, which kernels need."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return dtype, dtype is torch.bfloat16 and x.dtype in CAST and weight.dtype in CAST
    return x.dtype, x.dtype is torch.bfloat16 and weight.dtype is x.dtype


def _quantizable(weight: Tensor) -> Tensor:
    """The weight as quantizers read it; float32 is not rounded to bfloat16 first."""
    return weight if weight.dtype in (torch.bfloat16, torch.float32) else weight.to(torch.bfloat16)


def _in_memory_of(old: Tensor | None, new: Tensor) -> Tensor:
    """The new tensor in the memory of the old one if possible, which CUDA graphs read."""
    if old is None or old.is_inference() != new.is_inference():
        return new
    kinds = [(x.shape, x.stride(), x.dtype, x.device) for x in (old, new)]
    return old.copy_(new) if kinds[0] == kinds[1] else new


class Routed(nn.Module):
    """Base of modules with a product ``x @ weight.t() + bias``: its routes, and FP8 weights.

    Routes are texts (`lokakern.nn.routed_matmul`) that only `lokakern.convert` sets.
    """

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
    padding: tuple[int, int] = (0, 0)  # zeros added to k and n, see `mods.Pad`
    _fp8_dtype = torch.float8_e4m3fn
    _fp8_widths = (0, 0)  # columns of data and of scales without padding
    _fp8_views: tuple[Tensor, Tensor, Tensor] | None = None

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, input_scale: str = ""
    ) -> Tensor:
        """``x @ weight.t() + bias``, bitwise equal to `nn.Linear` where nothing is quantized.

        ``input_scale`` is a static scale of x, if any.
        """
        if self._routes == PLAIN_ROUTES or _is_without_data(x):
            return functional.linear(x, weight, bias)
        if x.is_nested:
            if not torch.compiler.is_compiling():
                warn_once(
                    "a converted layer multiplies nested tensors unquantized, as nn.Linear: pass "
                    "rows in one dense tensor, such as the values() of a jagged one"
                )
            return functional.linear(x, weight, bias)
        if _is_sharded(weight):
            return self._of_shards(x, weight, bias, input_scale)
        dtype, fits = _product_dtype(x, weight)
        if self.is_offloaded and (not fits or _wants_gradients(x, weight, bias)):
            raise UnsupportedError(
                "a layer with an offloaded weight multiplies bfloat16 without gradients only: use "
                "torch.no_grad() and bfloat16, or refresh the conversion"
            )
        if not fits:  # kernels were measured on bfloat16 only
            if not torch.compiler.is_compiling():
                warn_once(
                    f"a converted layer multiplies {x.dtype} by a weight in {weight.dtype} "
                    "unquantized, as kernels need bfloat16: run the model under torch.autocast in "
                    "bfloat16, or convert all of it to bfloat16"
                )
            return functional.linear(x, weight, bias)
        m = x.shape[:-1].numel()
        asked = self._routes if torch.is_grad_enabled() else self._routes[:1]
        if is_known(m) and not quantizes_at(asked, m) and not self.is_offloaded:
            return functional.linear(x, weight, bias)  # in the layout of x, as nn.Linear
        if self.is_frozen:
            parts: tuple[Tensor | None, ...] = (*_frozen(self), None, None)
        elif torch.compiler.is_compiling():
            parts = _NO_WEIGHTS
        else:
            parts = self._parts(x, weight, m)
        x = x.to(dtype)
        weight = _quantizable(weight)
        bias = None if bias is None else bias.to(dtype)
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        apart = x.dim() > 2 and not x.is_contiguous()  # then nn.Linear adds the bias separately
        if self.is_offloaded:
            y = output(rows, None, bias, parts[0], parts[1], self._routes[0], input_scale, apart)
        elif torch.is_grad_enabled():
            y = RoutedLinear.apply(rows, weight, bias, *parts, *self._routes, input_scale, apart)  # type: ignore[no-untyped-call]
        else:
            y = output(rows, weight, bias, parts[0], parts[1], self._routes[0], input_scale, apart)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def _of_shards(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, input_scale: str
    ) -> Tensor:
        """`product` of DTensors: each rank multiplies its shards."""
        from lokakern.nn.tensor_parallel import product_of_shards  # its import takes 1 s

        def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if self.is_frozen and not self._is_frozen_of(weight):
                if torch.compiler.is_compiling():
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
        return self.is_mixing and self._routes == PLAIN_ROUTES and mixes(x, weight, bias)

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
                weight = _quantizable(weight.detach())
                right = weight.t() if product else weight
                found = quantize_weight(right, scales_of(self._routes[product]))
            if self._kept is not None:
                self._kept[key] = found
        return found

    def _is_frozen_of(self, weight: Tensor) -> bool:
        """Whether the frozen weight has the shape of this shard."""
        shape = (self.fp8_data.shape[0], self._fp8_widths[0])
        return not _is_sharded(self.fp8_data) and shape == tuple(weight.shape)

    def take_routes(self, texts: Sequence[str], weight: Tensor | None) -> None:
        """Set the routes; ``weight`` is the parameter if it is multiplied without change."""
        self.thaw()
        if any(texts):
            prepare_to_be_compiled()
        self._routes = (texts[0], texts[1], texts[2])
        self._has_parameter = weight is not None
        self._kept = None if self._kept is None else {}

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
            if hasattr(weight, "full_tensor"):  # from all ranks
                weight = weight.full_tensor()
            weight = _quantizable(weight.detach().to(device))
            data, scale = quantize_weight(weight, scales_of(self._routes[0]))
        whole = data.as_strided((data.shape[0], data.stride(0)), (data.stride(0), 1))
        scales = scale.as_strided((scale.shape[0], scale.stride(0)), (scale.stride(0), 1))
        self._fp8_dtype, self._fp8_widths = data.dtype, (data.shape[1], scale.shape[1])
        data, scale = whole.view(torch.uint8), scales.view(torch.uint8)
        self.register_buffer("fp8_data", _in_memory_of(before[0], data), persistent=False)
        self.register_buffer("fp8_scale", _in_memory_of(before[1], scale), persistent=False)
        self.is_frozen = True

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

    def held(self, x: Tensor) -> Tensor | None:
        """The copy of `hold`, unless the parameter may need a gradient.

        A column-major copy is only for a column-major x; with rows it was not measured.
        """
        if not self.is_held or torch.is_grad_enabled() or type(x) not in KINDS:
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
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if any(self._routes):
            prepare_to_be_compiled()

    def route_words(self) -> str:
        """The routes in a few words, for `extra_repr`."""
        names = ("output", "grad_input", "grad_weight")
        return ", ".join(f"{n}={_words(r)}" for n, r in zip(names, self._routes, strict=True))


def _frozen(layer: Routed) -> tuple[Tensor, Tensor]:
    """Data and scales of a frozen weight; bytes for a compiler."""
    stored = layer.fp8_data
    if torch.compiler.is_compiling():
        # As bytes: Inductor calls an operator for each view as another dtype.
        return stored[:, : layer._fp8_widths[0]], layer.fp8_scale
    views = layer._fp8_views
    if views is not None and views[0] is stored:
        return views[1], views[2]
    columns, width = layer._fp8_widths
    data = stored.view(layer._fp8_dtype)[:, :columns]
    scale = layer.fp8_scale.view(torch.float32)[:, :width]
    layer._fp8_views = (stored, data, scale)
    return data, scale


def _words(route: str) -> str:
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


class Linear(nn.Linear, Routed):
    """`nn.Linear` with chosen kernels for ``output``, ``grad_input`` and ``grad_weight``.

    The kernels are chosen once for all ranges of m, here or by `lokakern.convert`. Where nothing is
    quantized the result is bitwise equal to `nn.Linear`, except with weights in inference whose
    layout `with_aligned_layout` changes, for which cuBLAS may sum in another order. Only bfloat16
    operands are quantized, also under autocast. Keys of a state_dict are those of `nn.Linear`.

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
    """

    is_special = False  # whether it differs from nn.Linear in any way

    def take_routes(self, texts: Sequence[str], weight: Tensor | None) -> None:
        """See `Routed`."""
        self.bring_back()
        super().take_routes(texts, weight)
        self.is_special = any(texts) or self.padding != (0, 0) or self.is_mixing

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
        if budget is not None:
            import lokakern  # the public function, which is imported when it is first used

            lokakern.convert(self, budget, distribution=distribution)

    def forward(self, input: Tensor, input_scale: str = "") -> Tensor:
        """``input @ weight.t() + bias``, ``[..., n]``; of ``input_scale`` see `Routed.product`."""
        if not self.is_special:  # the usual case, with little overhead
            return functional.linear(input, self.weight, self.bias)
        if self.padding == (0, 0):
            # Methods are called only where they matter, as each is also a guard of torch.compile.
            held = self.held(input) if self.is_held else None
            weight = self.weight if held is None else held
            if self.is_mixing and self.mixes(input, weight, self.bias):
                return mix_tokens(input, weight, self.bias).mT
            return self.product(input, weight, self.bias, input_scale)
        k, n = self.padding
        held = self.held(input)
        if held is None:  # an offloaded weight is not multiplied
            held = self.weight if self.is_offloaded else self._padded()
        bias = None if self.bias is None else functional.pad(self.bias, (0, n))
        y = self.product(functional.pad(input, (0, k)), held, bias)
        return y[..., : self.out_features] if n else y

    def forward_activated(self, x: Tensor, activation: str, activating: str) -> Tensor | None:
        """``forward(f(x))`` with f and quantizing in one kernel; see `multiply_activated`.

        Returns:
            None at m without measurements, for other dtypes, and if a gradient needs f(x).
        """
        if (
            x.is_meta
            or x.is_nested
            or not self.is_frozen
            or x.shape[-1:] != (self.in_features,)
            or _is_sharded(self.weight)
            or x.dtype is not torch.bfloat16
            or not _product_dtype(x, self.weight)[1]
            or _wants_gradients(x, self.weight, self.bias)
        ):
            return None
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        y = multiply_activated(rows, activation, activating, *_frozen(self), bias, self._routes[0])
        return y if y is None or x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Shapes and routes."""
        padded = "" if self.padding == (0, 0) else f", padding={self.padding}"
        return f"{super().extra_repr()}{padded}, {self.route_words()}"

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        if self.is_frozen or self.is_held:
            self.freeze()
        self._keep_gathering()

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        applied = super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]
        self._keep_gathering()
        return applied

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
        return self.weight.nbytes if self.weight.device != there else 0

    def bring_back(self) -> None:
        """Undo `offload`."""
        if self.is_offloaded:
            self.weight.data = self.weight.data.to(self.fp8_data.device)
        self.is_offloaded = False

    def freeze(self) -> None:
        """Quantize the weight once, or `hold` it."""
        self.freeze_weight(self.weight if self.padding == (0, 0) else self._padded())
        self.is_special |= self.is_held

    def held(self, x: Tensor) -> Tensor | None:
        """See `Routed`; None if `Pad` changed since."""
        held, (k, n) = super().held(x), self.padding
        is_it = held is not None and held.shape == (self.out_features + n, self.in_features + k)
        return held if is_it else None

    def _padded(self) -> Tensor:
        k, n = self.padding
        return functional.pad(self.weight, (0, k, 0, n))
