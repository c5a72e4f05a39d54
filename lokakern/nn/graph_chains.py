"""Chains in the graphs of Dynamo, for the backend of torch.compile.

In such a graph layers, norms and activations are functions of parameters. `layers_in` makes a
graph that calls modules instead, so that chains and relus are found in it as in the forward of a
module (`lokakern.nn.tail`, `lokakern.nn.cross_pattern`), and `replace_chain` puts one into Dynamo's
graph, `replace_relu` a product with its relu.
Weights are operands in the dtype of the model: each call quantizes them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from lokakern.functional.checks import is_traced
from lokakern.nn.autocast import HALF
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.chain_plan import read_plan
from lokakern.nn.cross_pattern import PRODUCTS, SUMS, crosses_in
from lokakern.nn.graph_products import Product, value
from lokakern.nn.linear import Linear
from lokakern.nn.rectified import rectified_product
from lokakern.nn.routed_chain import WIDTH, run_chain, unquantized_chain
from lokakern.nn.tail import _FUNCTIONS, _SIGMOIDS, wanted_tails
from lokakern.nn.traced_forward import writes

_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")
# Classes of functions, names of arguments, and the default of eps.
_NORMS: dict[Any, tuple[Callable[..., nn.Module], tuple[str, ...], float | None]] = {
    functional.layer_norm: (
        nn.LayerNorm, ("input", "normalized_shape", "weight", "bias", "eps"), 1e-5
    ),
    **dict.fromkeys(
        (functional.rms_norm, torch.rms_norm),
        (nn.RMSNorm, ("input", "normalized_shape", "weight", "eps"), None),
    ),
}  # fmt: skip
_DROPOUT = ("input", "p", "training", "inplace")
_IN_PLACE = tuple(
    getattr(operator, name) for name in dir(operator)
    if name.startswith("i") and hasattr(operator, f"__{name}__")
)  # fmt: skip
# What `BlockRMSNorm` calls.
_BLOCK_NORM = ["reshape", "float", "square", "mean", "add", "rsqrt", "mul", "to", "reshape"]


class Layers(NamedTuple):
    """The layers of a graph as modules.

    Attributes:
        module: The parent of the modules, whose parameters have no data.
        graph: A graph that calls them.
        products: Layers that may be parts of chains, with their products, by their ids.
        origins: Nodes of Dynamo's graph by those of this one.
    """

    module: nn.Module
    graph: fx.Graph
    products: dict[int, tuple[Linear, Product]]
    origins: dict[fx.Node, fx.Node]


class _Call(NamedTuple):
    """A module in the place of a node, and its input."""

    module: nn.Module
    input: Any


def layers_in(gm: fx.GraphModule, products: Iterable[Product]) -> Layers:
    """The layers of a graph as modules, with the norms and activations that kernels compute.

    Args:
        gm: Dynamo's graph.
        products: The products that chains may run; those with gradients are none.
    """
    by_node = {x.node: x for x in products if x.node.graph is gm.graph and _is_layer(x)}
    found = Layers(nn.Module(), fx.Graph(), {}, {})
    made: dict[fx.Node, fx.Node] = {}
    blocks, inner = _block_norms(gm.graph)
    for node in gm.graph.nodes:
        if node in inner:
            continue
        passed, product = _input_of_dropout(node), by_node.get(node)
        if passed is not None:
            made[node] = made[passed]
            continue
        call = blocks.get(node) or _norm(node)
        if product is not None:
            layer = Linear(
                product.k, product.n, product.has_bias, device="meta", dtype=product.dtype
            )
            found.products[id(layer)] = layer, product
            call = _Call(layer, product.operands[0])
        if call is not None:
            found.module.add_module(node.name, call.module)
            made[node] = found.graph.call_module(node.name, (made[call.input],))
        else:
            made[node] = found.graph.node_copy(node, lambda x: made[x])
            _mark(made[node], node)
        found.origins[made[node]] = node
    return found


def _is_layer(product: Product) -> bool:
    """Whether a product is that of a layer in one dtype, without gradients."""
    is_alike = _fits(product.node) and not product.is_turned and product.kind != "columns"
    return is_alike and not product.is_trained


def _fits(node: fx.Node) -> bool:
    """Whether a value and its operands are dense, in one half precision, and need no gradients."""
    made = value(node)
    given = [x for x in map(value, node.all_input_nodes) if isinstance(x, Tensor)]
    if not isinstance(made, Tensor) or made.dtype not in HALF or made.requires_grad:
        return False
    return all(
        type(x).__name__ in ("FakeTensor", "Parameter") and x.layout is torch.strided
        and x.dtype is made.dtype and x.device == made.device
        for x in (made, *given)
    )  # fmt: skip


def _given(node: fx.Node) -> dict[str, Any]:
    """The arguments of a norm by name."""
    _, names, eps = _NORMS[node.target]
    return {"eps": eps} | dict(zip(names, node.args, strict=False)) | node.kwargs


def _norm(node: fx.Node) -> _Call | None:
    """The LayerNorm or RMSNorm that a node is, over the last dimension."""
    if node.op != "call_function" or node.target not in _NORMS or not _fits(node):
        return None
    given = _given(node)
    kind, shape, eps = _NORMS[node.target][0], given["normalized_shape"], given["eps"]
    columns = shape[0] if isinstance(shape, tuple | list) and len(shape) == 1 else None
    if not isinstance(columns, int) or not isinstance(eps, float | None):
        return None
    module = kind(columns, eps, elementwise_affine=False)
    for name in ("weight", "bias"):
        if given.get(name) is not None:
            if not isinstance(value(given[name]), nn.Parameter):
                return None
            empty = torch.empty(columns, device="meta", dtype=value(node).dtype)
            setattr(module, name, nn.Parameter(empty))
    return _Call(module, given["input"])


def _block_norms(graph: fx.Graph) -> tuple[dict[fx.Node, _Call], set[fx.Node]]:
    """`BlockRMSNorm` modules by the last nodes of their calls, and the nodes before these."""
    found: dict[fx.Node, _Call] = {}
    inner: set[fx.Node] = set()
    runs: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        path, kind = next(reversed(node.meta.get("nn_module_stack", {"": ("", None)}).values()))
        if kind is BlockRMSNorm and node.target != "size":
            runs.setdefault(path, []).append(node)
    for run in runs.values():
        names = [getattr(x.target, "__name__", x.target) for x in run]
        if names == _BLOCK_NORM and _fits(run[-1]) and _fits(run[0]):
            columns, block = value(run[-1]).shape[-1], value(run[0]).shape[-1]
            eps: Any = run[names.index("add")].args[1]
            (before, *_) = run[0].all_input_nodes
            sizes = [x for x in before.users if x.target == "size" and x.users.keys() <= set(run)]
            found[run[-1]] = _Call(BlockRMSNorm(columns, block, eps), before)
            inner.update(run[:-1], sizes)
    return found, inner


def _input_of_dropout(node: fx.Node) -> fx.Node | None:
    """What a dropout that is not in training returns."""
    if node.target is not functional.dropout:
        return None
    given: dict[str, Any] = dict(zip(_DROPOUT, node.args, strict=False)) | node.kwargs
    return given["input"] if given.get("training") is False else None


def _mark(made: fx.Node, node: fx.Node) -> None:
    """Make a call one that no chain has, unless it is what it seems; ``inplace`` a keyword."""
    if node.op == "call_module":  # of which Dynamo makes functions where it can
        made.op, made.target = "call_function", _other_
    if node.target in _IN_PLACE:
        made.target = operator.add if node.target is operator.iadd and _is_own(node) else _other_
    if made.target not in (*_FUNCTIONS, *_SIGMOIDS, *SUMS, *PRODUCTS):
        return
    operands = [value(x) for x in node.all_input_nodes]
    if not _fits(node) or not all(_have_shape(x, value(node)) for x in operands):
        is_written = node.target in _IN_PLACE or writes(node, nn.Module())
        made.op, made.target = "call_function", _other_ if is_written else _other
        return
    *operands, last = made.args
    if type(last) is bool:
        made.args, made.kwargs = tuple(operands), {"inplace": last}


def _is_own(node: fx.Node) -> bool:
    """Whether a call writes to the output of a product or a norm that nothing else reads."""
    target = node.args[0]
    if not isinstance(target, fx.Node) or len(target.users) > 1:
        return False
    return target.target in (functional.linear, *_NORMS)


def _have_shape(x: Any, made: Tensor) -> bool:
    """Whether a value is known to have the shape of another one."""
    if not isinstance(x, Tensor) or x.dim() != made.dim():
        return False
    return all(
        statically_known_true(size == wanted)
        for size, wanted in zip(x.shape, made.shape, strict=True)
    )


def _other(*_: Any, **__: Any) -> None:
    """Stands for a function that writes to nothing."""


def _other_(*_: Any, **__: Any) -> None:
    """Stands for a function that writes to its input."""


class FoundChain(NamedTuple):
    """The calls of a chain in a graph of `layers_in`.

    Attributes:
        calls: Those of layers and norms, and the others between them, in order.
        beside: The matrices that they read beside.
    """

    calls: tuple[fx.Node, ...]
    beside: tuple[fx.Node, ...]


def tail_chain(layers: Layers, names: tuple[str, ...]) -> FoundChain:
    """The chain of layers with tails that have these names, as of `lokakern.nn.tail.Tail`."""
    (tail,) = wanted_tails(layers.graph, layers.module, [names])
    beside = tuple(x for x in tail.arguments if isinstance(x, fx.Node))
    return FoundChain((tail.layer, *tail.behind), beside)


def cross_chain(layers: Layers, names: tuple[str, ...]) -> FoundChain:
    """The chain of a cross whose last layers have these names."""
    crosses = crosses_in(layers.graph, layers.module)
    cross = next(x for x in crosses if x.names[-len(names) :] == names)
    return FoundChain((*cross.layers[-len(names) :], cross.product, cross.sum), (cross.x0, cross.x))


def replace_chain(layers: Layers, chain: FoundChain, plan: str) -> None:
    """Run a chain by a plan in Dynamo's graph, at the place of its last call.

    What it replaces is left without readers.
    """
    end = layers.origins[chain.calls[-1]]
    x: fx.Node | None = None
    operands: list[Any] = []
    with end.graph.inserting_before(end):
        for call in chain.calls:
            if call.op != "call_module":
                continue
            found = layers.products.get(id(layers.module.get_submodule(str(call.target))))
            if found is not None:
                product = found[1]
                first, weight, bias = product.operands
                x = x or first
                if product.kind == "rows":
                    weight = end.graph.call_method("t", (weight,))
                operands += [weight, None, None, bias, None, None, None]
            elif layers.origins[call].target in _NORMS:
                given = _given(layers.origins[call])
                operands[-3:-1] = given.get("weight"), given.get("bias")
    operands += [layers.origins[node] for node in chain.beside]
    end.op, end.target = "call_function", torch.ops.lokakern.chained_layers.default
    end.args, end.kwargs = (x, operands, plan), {}


def _chained_layers(x: Tensor, operands: Sequence[Tensor | None], plan: str) -> Tensor:
    """See `run_chain`, of an x of any dimensions; AOTAutograd traces what this calls."""
    run = unquantized_chain if is_traced() else run_chain
    if x.dim() == 2:
        return run(x, operands, plan)
    layers = WIDTH * len(read_plan(plan)[0])
    rows = [
        None if each is None else each.reshape(-1, each.shape[-1]) for each in operands[layers:]
    ]
    y = run(x.reshape(-1, x.shape[-1]), [*operands[:layers], *rows], plan)
    return y.view(*x.shape[:-1], y.shape[-1])


def replace_relu(layers: Layers, product: Product, relu: fx.Node) -> None:
    """Let a product apply the relu behind it in Dynamo's graph, at the place of the relu."""
    end, (x, weight, bias) = layers.origins[relu], product.operands
    if product.kind == "rows":
        with end.graph.inserting_before(end):
            weight = end.graph.call_method("t", (weight,))
    end.op, end.target = "call_function", torch.ops.lokakern.rectified_layer.default
    end.args, end.kwargs = (x, weight, bias), {}


def _rectified_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See `rectified_product`, of an x of any dimensions; AOTAutograd traces what this calls."""
    if is_traced():
        return functional.relu(functional.linear(x, weight, bias))
    if x.dim() == 2:
        return rectified_product(x, weight, bias)
    y = rectified_product(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], y.shape[-1])


_LIBRARY.define("rectified_layer(Tensor x, Tensor weight, Tensor bias) -> Tensor")
_LIBRARY.impl("rectified_layer", _rectified_layer, "CompositeImplicitAutograd")
_LIBRARY.define("chained_layers(Tensor x, Tensor?[] operands, str plan) -> Tensor")
_LIBRARY.impl("chained_layers", _chained_layers, "CompositeImplicitAutograd")
