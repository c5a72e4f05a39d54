"""`LinearNormAct`: a linear layer, a norm and an activation in one module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from lokakern.epilogue import ACTIVATIONS
from lokakern.errors import UnknownNameError, UnsupportedError
from lokakern.nn.activations import APPLY
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.chain_call import (
    Keeper,
    call_again,
    call_parts,
    is_idle_at,
    is_part,
    layers_at,
    prepare_chains,
    rows_in,
    words_of_plan,
)
from lokakern.nn.chain_plan import read_plan
from lokakern.nn.joined import joined_at, joined_way, multiply_with_norm
from lokakern.nn.linear import OWN_CHAIN, Linear
from lokakern.nn.routed_matmul import prepare_to_be_compiled
from lokakern.norm import Norm, norm_named
from lokakern.types import Granularity


class LinearNormAct(Linear):
    """``activation(norm(x @ weight.t() + bias + residual))``.

    Keys of a state_dict are those of `nn.Linear`, and ``norm.weight`` and ``norm.bias`` if the norm
    has them. `lokakern.convert` treats its products like those of a `Linear`; norm and activation
    are torch's, which torch.compile fuses into one kernel.

    Args:
        in_features: k.
        out_features: n.
        bias: As of `nn.Linear`.
        device: As of `nn.Linear`.
        dtype: As of `nn.Linear`.
        norm: "layer", "rms", "block_rms(n)" with n a divisor of ``out_features`` (without
            parameters), or "none".
        activation: A name of `lokakern.epilogue.ACTIVATIONS`, or None.
        eps: Of the norm.
        budget: As of `Linear`.
        distribution: As of `Linear`.

    Raises:
        UnknownNameError: The norm or activation is unknown.
        ShapeError: Blocks do not divide the outputs.
    """

    _chain = ""  # the plan of a chain of this layer alone, see `take_chain`

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        norm: str = "layer",
        activation: str | None = "relu",
        eps: float = 1e-5,
        budget: Any = None,
        distribution: str | Sequence[str] | None = None,
    ) -> None:
        name = "none" if activation is None else activation
        if name not in ACTIVATIONS:
            raise UnknownNameError(
                f"LinearNormAct: activation is {activation!r}; expected one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        super().__init__(in_features, out_features, bias, device, dtype)
        self.norm = _module_of(norm_named(norm, eps), out_features, device, dtype)
        self.activation = name
        self._convert(budget, distribution)

    def take_chain(self, plan: str) -> None:
        """Set the plan of a chain of this layer alone; "" for none.

        Raises:
            UnsupportedError: The plan is for other layers.
        """
        words = words_of_plan(plan) if plan else []
        if plan and (len(words) != 1 or not is_part((self, self.norm, self.activation), words[0])):
            raise UnsupportedError(f"a chain of {plan.partition(';')[0]} cannot be set in {self}")
        for text, change in ((self._chain, self.drop_chain_weight), (plan, self.keep_chain_weight)):
            for layer in read_plan(text)[0] if text else ():
                if layer.weight is not Granularity.NONE:
                    change(OWN_CHAIN, layer.weight.value)
        self._chain = plan
        if plan:
            prepare_chains()

    @property
    def joined(self) -> str:
        """Its norm and activation if one op is to compute their gradients, see `joined_at`."""
        return joined_at(self, self._norm, self.activation)

    @property
    def _norm(self) -> nn.Module | None:
        return None if type(self.norm) is nn.Identity else self.norm

    def take_form(self, form: str) -> None:
        """See `Linear`; also a text of `joined`."""
        super().take_form(form)
        if form:
            prepare_to_be_compiled(joined_way)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.take_form(self.form)

    def forward(
        self, input: Tensor, input_scale: str = "", residual: Tensor | None = None
    ) -> Tensor:
        """``[..., n]``; a residual is added before the norm."""
        chain = self._chain
        if chain and not is_compiling() and is_idle_at(chain, rows_in(input)):
            chain = ""
        if chain and residual is None and not input_scale:
            if not is_compiling():
                y, _ = call_again(self, input, chain)
                if y is not None:
                    return y
            parts = [(self, self.norm, self.activation)]
            layers = layers_at(input, chain)
            if layers and is_part(parts[0], layers[0]):
                keeper = None if is_compiling() else Keeper(self)
                y = call_parts(input, chain, layers, parts, keeper=keeper)
                if y is not None:
                    return y
        if is_compiling() and self.form.endswith(f" {self.activation}"):
            y = multiply_with_norm(self, self._norm, input, self.form, input_scale, residual)
            if y is not None:
                return y
        y = super().forward(input, input_scale)
        z = self.norm(y if residual is None else y + residual)
        return APPLY[self.activation](z)

    def extra_repr(self) -> str:
        """The representation of `Linear`, and the activation."""
        return f"{super().extra_repr()}, activation={self.activation}"


def _module_of(norm: Norm, columns: int, device: Any, dtype: torch.dtype | None) -> nn.Module:
    if norm.kind == "none":
        return nn.Identity()
    if norm.kind == "block_rms":
        return BlockRMSNorm(columns, norm.block, norm.eps)
    kind = nn.LayerNorm if norm.kind == "layer" else nn.RMSNorm
    return kind(columns, eps=norm.eps, device=device, dtype=dtype)
