"""`RawProduct`: products of a module with a parameter of its own, on kernels of their routes.

The module keeps the parameter. A child of the module, which has no parameters, holds the routes and
in inference the FP8 weight; its forward gets the parameter at each call (`crossed_forward` writes
these calls). As a child it moves, loads and is copied with the module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from lokakern.errors import UnsupportedError
from lokakern.functional.checks import warn_once
from lokakern.nn.autocast import half_of
from lokakern.nn.linear import Routed, _is_sharded, _is_without_data, _way, warn_unfit
from lokakern.nn.raw_pattern import ADDMM, LEFT, LINEAR, MM, Matrix, reads_turned, roles_of
from lokakern.nn.routed_matmul import dtype_of, is_known

CHILD = "lokakern_products"  # name of the child that holds them


class RawProduct(Routed):
    """The products of a module with one matrix of its parameters.

    Args:
        owner: The module.
        matrix: The matrix.
        has_bias: Whether a product adds a bias.
    """

    def __init__(self, owner: nn.Module, matrix: Matrix, has_bias: bool) -> None:
        super().__init__()
        self.owner = (owner,)  # no child
        self.matrix, self.has_bias = matrix, has_bias
        self._frozen_of: tuple[nn.Parameter | None] = (None,)  # no parameter of this module

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter of the module.

        Raises:
            UnsupportedError: It was removed or parametrized since the module was traced.
        """
        found = self._found()
        if found is None:
            raise UnsupportedError(
                f"a {type(self.owner[0]).__name__} has no parameter {self.matrix.parameter} now, "
                "and had one when it was converted: undo the conversion and convert again"
            )
        return found

    def _found(self) -> nn.Parameter | None:
        path, _, key = self.matrix.parameter.rpartition(".")
        holder: Any = self.owner[0]
        for name in path.split(".") if path else ():
            holder = None if holder is None else holder._modules.get(name)
        return None if holder is None else holder._parameters.get(key)

    @property
    def is_there(self) -> bool:
        """Whether the module still has the parameter."""
        return self._found() is not None

    @property
    def weight(self) -> Tensor:
        """The matrix, ``[n, k]``."""
        found = self.matrix.of(self.parameter)
        return found.t() if self.matrix.is_turned else found

    @property
    def in_features(self) -> int:
        """Columns of the inputs."""
        return self.product_shape()[1]

    @property
    def out_features(self) -> int:
        """Columns of the outputs."""
        return self.product_shape()[0]

    def product_shape(self) -> tuple[int, int, bool, Tensor]:
        """n, k, whether there is a bias, and the parameter."""
        parameter = self.parameter
        return *self.matrix.shape_in(parameter), self.has_bias, parameter

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, form: str) -> Tensor:
        """The product of a form (`lokakern.nn.raw_pattern`).

        It is that of the original call where nothing is quantized.

        Args:
            x: The activation.
            weight: The matrix as the original call reads it.
            bias: What the original call adds.
            form: Which call it was.
        """
        y = self._routed(x, weight, bias, form) if self._plan else None
        return _original(x, weight, bias, form) if y is None else y

    def _routed(self, x: Tensor, weight: Tensor, bias: Tensor | None, form: str) -> Tensor | None:
        """The product by routes, or None if none quantizes it."""
        if not _is_dense(x, weight):
            return None
        if form == LEFT:
            if x.dim() < 3 or x.shape[-1] != 1:  # else rows of x are no rows in memory
                return None
            x = x.mT
        if weight.dim() != 2 or x.dim() < 1 or (form in (MM, ADDMM) and x.dim() != 2):
            return None
        if not _fits_equation(x, form):
            return None
        given = weight.t() if reads_turned(form) else weight
        if x.shape[-1] != given.shape[1] or (bias is not None and bias.shape != given.shape[:1]):
            return None
        if not self.quantizes(x, given):
            return None
        y = self.product(x, given, bias)
        return y.mT if form == LEFT else y

    def quantizes(self, x: Tensor, weight: Tensor) -> bool:
        """Whether rows ``[..., k]`` are quantized, to be multiplied by a weight of this dtype."""
        if not self._plan or not _is_dense(x, weight):
            return False
        # A compiler has other objects in the place of parameters.
        if self.is_frozen and not is_compiling() and self._found() is not self._frozen_of[0]:
            warn_once(
                f"{self.matrix.parameter} of a converted {type(self.owner[0]).__name__} is another "
                "parameter than the one that was quantized: its products are unquantized until the "
                "conversion is refreshed (handle.refresh())"
            )
            return False
        given = x.dtype, weight.dtype, x.device.type
        if not is_compiling() and half_of(*given) is not dtype_of(self._plan):
            warn_unfit(x, weight, self._plan)
            return False
        m = x.numel() // x.shape[-1]  # the size of a shape is no symbol in torch.export
        m = m if is_known(m) else -1
        return bool(_way(self._plan, m, *given, is_compiling()))

    def freeze(self) -> None:
        if self.is_there:
            self._frozen_of = (self.parameter,)
            self.freeze_weight(self.weight)
        else:  # nothing calls it, as the module is not as it was traced
            self.thaw()

    def hold(self, weight: Tensor, before: Tensor | None) -> None:
        """Nothing, as an unquantized product reads the parameter."""

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        if self.is_frozen:  # the parameters of the owner, whose turn comes before
            self.freeze()

    def extra_repr(self) -> str:
        """Shapes and routes."""
        if not self.is_there:
            return f"{self.matrix.parameter} is gone, {self.route_words()}"
        return f"k={self.in_features}, n={self.out_features}, {self.route_words()}"

    @property
    def is_special(self) -> bool:
        """Whether it differs from the original calls in any way."""
        return bool(self._plan)

    def register(self) -> None:
        """Make it a child of its module, by way of `CHILD`."""
        owner = self.owner[0]
        if CHILD not in owner._modules:
            owner.add_module(CHILD, nn.ModuleDict())
        owner.get_submodule(CHILD).add_module(self.matrix.key, self)
        owner.get_submodule(CHILD).train(owner.training)

    def unregister(self) -> None:
        """Undo `register`."""
        owner = self.owner[0]
        found = products_of(owner)
        if found.get(self.matrix.key) is self:
            del found[self.matrix.key]
            if not found:
                del owner._modules[CHILD]


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a linear layer, converted or not."""
    return isinstance(module, nn.Linear | Routed) and not isinstance(module, RawProduct)


def products_of(module: nn.Module) -> dict[str, Any]:
    """The registered products of a module by key."""
    found = module._modules.get(CHILD)
    return {} if found is None else found._modules


def _is_dense(x: Tensor, weight: Tensor) -> bool:
    """Whether kernels can read the operands."""
    if not is_compiling() and _is_without_data(x):
        return False
    return not (x.is_meta or x.is_nested or _is_sharded(weight) or _is_sharded(x))


def _fits_equation(x: Tensor, form: str) -> bool:
    """Whether x has the axes of an equation, if the form is one."""
    roles = roles_of(form)
    if roles is None:
        return True
    axes = roles[2].replace("...", "")
    return x.dim() == len(axes) or (x.dim() > len(axes) and "..." in roles[2])


def _original(x: Tensor, weight: Tensor, bias: Tensor | None, form: str) -> Tensor:
    if form == LINEAR:
        return functional.linear(x, weight, bias)
    if form == LEFT:
        return torch.matmul(weight, x)
    if form == ADDMM:
        assert bias is not None
        return torch.addmm(bias, x, weight)
    roles = roles_of(form)
    if roles is not None:
        operands = (weight, x) if roles[0] == 0 else (x, weight)
        return torch.einsum(form, *operands)
    return torch.mm(x, weight) if form == MM else torch.matmul(x, weight)
