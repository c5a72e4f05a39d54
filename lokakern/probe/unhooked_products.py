"""Products that are made outside of sites, read from what autograd keeps of a forward pass.

A module that multiplies by a parameter of its own, or two activations with each other, is no site.
Nothing is run for this, and nothing is changed: nodes of the graph name their products.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd as _Convolution
from torch.utils._pytree import tree_leaves

from lokakern.errors import UnsupportedError

BETWEEN = "(activations)"  # in the place of a name: no parameter is multiplied
# Of products: which of their arguments are the factors.
_PRODUCTS = {
    "MmBackward0": (0, 1), "AddmmBackward0": (1, 2), "BmmBackward0": (0, 1),
    "BaddbmmBackward0": (1, 2), "MvBackward0": (0, 1), "ConvolutionBackward0": (0, 1),
    "_MixedBackward": (1, 0),  # of `mods.MixTokens`
}  # fmt: skip
# Modules of torch that multiply by a parameter of their own; others only hold parameters, look rows
# up or scale by them.
_MULTIPLYING = (
    nn.MultiheadAttention, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, _Convolution,
    nn.ParameterList, nn.ParameterDict,
)  # fmt: skip
_HIDDEN = (nn.Bilinear, nn.RNNBase)  # whose nodes hold several products, or are the backend's
_ATTENTION = "ScaledDotProduct"  # what the names of its nodes begin with
# What only lays a tensor out anew, casts it or puts several together.
_LAYOUTS = frozenset(
    f"{word}Backward0"
    for word in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "Reshape", "ReshapeAlias", "Alias"),
        *("AsStrided", "Expand", "Select", "Slice", "Squeeze", "Unsqueeze", "Split"),
        *("SplitWithSizes", "Unbind", "Clone", "ToCopy", "Cat", "Stack", "ConstantPadNd"),
    )
)


def products_elsewhere(
    output: Any, names: Mapping[int, str], sites: Collection[int]
) -> dict[str, str]:
    """What a forward pass multiplied outside of sites, in words.

    Args:
        output: Of the model, or made of that, in any structure; before a backward pass ends.
        names: Of parameters, by id. Products with others are left out.
        sites: Ids of parameters of sites.

    Returns:
        By name of the parameter, or `BETWEEN`; empty where autograd kept nothing.
    """
    found: dict[str, list[int]] = {}
    known = 0  # multiply-adds of sites, and of what needs no gradient, which has no name
    strangers = False  # parameters that are no module's by now, as those that FSDP2 gathered
    for node in _nodes(x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor)):
        kind = node.name()
        if any(x.is_nested_tensor for x in node._input_metadata):
            continue  # it has no shape; a plain one has no nested factors
        factors: list[list[Tensor] | None]
        if kind.startswith(_ATTENTION):
            factors, work, constant = [None, None], _attention_work(node), False
        elif kind in _PRODUCTS:
            places = _PRODUCTS[kind]
            constant = any(node.next_functions[place][0] is None for place in places)
            factors = [_parameters(*node.next_functions[place]) for place in places]
            work = _work(node, *places)
        else:
            continue
        leaves = [x for factor in factors for x in factor or ()]
        if any(id(x) in sites for x in leaves):
            known += work
        elif leaves and id(leaves[0]) in names:
            found.setdefault(names[id(leaves[0])], []).append(work)
        elif leaves:
            strangers = True
        elif constant:
            known += work
        else:
            found.setdefault(BETWEEN, []).append(work)
    total = 0 if strangers else known + sum(map(sum, found.values()))
    return {name: _words(name, work, total) for name, work in found.items()}


def roots_under_way(names: Mapping[int, str]) -> list[Tensor]:
    """What backward passes over a model began from: the arguments of the calls that run them.

    A loss is what a caller has, who may never have called the model itself but a method of it, and
    no node of a graph knows what was made of its output.

    Args:
        names: Of the model's parameters, by id.

    Raises:
        UnsupportedError: This version of torch does not tell.
    """
    if _RUN_BACKWARD is None or "t_outputs" not in _RUN_BACKWARD.co_varnames:
        raise UnsupportedError(
            f"torch {torch.__version__} does not tell what a backward pass began from; expected "
            "torch.autograd.graph._engine_run_backward(t_outputs, ...)"
        )
    found = []
    for frame in sys._current_frames().values():  # hooks run in threads of the devices, too
        above: Any = frame
        while above is not None:
            if above.f_code is _RUN_BACKWARD:
                found += [x for x in above.f_locals["t_outputs"] if isinstance(x, Tensor)]
            above = above.f_back
    return [x for x in found if _reaches(x.grad_fn, names)]


# Of a private function, which another version of torch need not have.
_RUN_BACKWARD: CodeType | None = getattr(
    getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None
)


def _reaches(root: Any, names: Mapping[int, str]) -> bool:
    return any(id(getattr(node, "variable", None)) in names for node in _nodes([root]))


def matrices_elsewhere(model: nn.Module, *, is_seen: bool = False) -> dict[str, str]:
    """Parameters that modules other than `nn.Linear` may multiply by.

    Of torch's own modules they are those that do multiply by a parameter.

    Args:
        model: Any module.
        is_seen: Whether there are `products_elsewhere` of a forward pass: then only those that
            autograd does not show there.
    """
    return {
        f"{name}.{key}" if name else key: f"a {type(module).__name__} holds {_size(p)}; "
        "products of an nn.Linear only are converted"
        for name, module in model.named_modules()
        if (isinstance(module, _HIDDEN) if is_seen else _may_multiply(module))
        for key, p in module.named_parameters(recurse=False)
        if _is_matrix(module, p)
    }


def _may_multiply(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return False
    is_known = type(module).__module__.startswith(("torch.", "lokakern."))
    return isinstance(module, _MULTIPLYING) or not is_known


def _is_matrix(module: nn.Module, p: Tensor) -> bool:
    """Whether both sizes of a product with a parameter are more than 1."""
    if isinstance(p, nn.UninitializedParameter):
        return True  # for all that is known
    if p.dim() < 2:
        return False
    is_kernel = isinstance(module, _Convolution)  # [outputs, inputs / groups, *window]
    return min(p.flatten(1).shape if is_kernel else p.shape[-2:]) > 1


def _size(p: Tensor) -> str:
    is_sized = not isinstance(p, nn.UninitializedParameter)
    return str(list(p.shape)) if is_sized else "a parameter that is not initialized"


def _words(name: str, work: list[int], total: int) -> str:
    count = "1 product" if len(work) == 1 else f"{len(work)} products"
    what = "of activations with each other" if name == BETWEEN else "with this parameter"
    share = f"{sum(work) / total:.1%} of all multiply-adds of a forward pass, " if total else ""
    return f"{count} {what}, {share}of no nn.Linear"


def _nodes(roots: Iterable[Any]) -> Iterable[Any]:
    seen: set[Any] = set()
    waiting = [root for root in roots if root is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [child for child, _ in node.next_functions if child is not None]


def _parameters(node: Any, _output: int) -> list[Tensor] | None:
    """Of which parameters a factor is laid out; None where it was computed."""
    if node is None:
        return None
    variable = getattr(node, "variable", None)
    if variable is not None:
        return [variable]
    if node.name() not in _LAYOUTS:
        return None
    found = []
    for child, place in node.next_functions:
        leaves = _parameters(child, place)
        if leaves is None:
            return None
        found += leaves
    return found


def _shape(node: Any, output: int = 0) -> tuple[int, ...]:
    return tuple(node._input_metadata[output].shape)


def _work(node: Any, left: int, right: int) -> int:
    """Multiply-adds of a product: what it sums over is read from either factor."""
    size = math.prod(_shape(node))
    other, place = node.next_functions[right]
    if node.name() == "ConvolutionBackward0":
        return size * math.prod(_shape(other, place)[1:]) if other is not None else 0
    if other is not None:
        shape = _shape(other, place)
        return size * shape[-2 if len(shape) > 1 else -1]
    other, place = node.next_functions[left]
    return size * _shape(other, place)[-1] if other is not None else 0


def _attention_work(node: Any) -> int:
    key, place = node.next_functions[1]
    return 0 if key is None else 2 * math.prod(_shape(node)) * _shape(key, place)[-2]
