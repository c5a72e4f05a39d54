"""Calls of chains by modules: whether a plan holds for a call, and the operands of the op.

Where a plan does not hold, modules run one by one: with gradients, under autocast or a transform of
torch, for other dtypes, for m without launches, and where a layer, a hook or a mod was changed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.nn import Parameter

from lokakern import sampled_check
from lokakern.epilogue import BESIDE, NormForm, norm_form
from lokakern.functional.checks import is_traced
from lokakern.native import NATIVE
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.chain_norm import frozen_names, frozen_norms, frozen_vectors
from lokakern.nn.chain_plan import ChainLayer, ChainStep, Steps, read_plan, steps_at
from lokakern.nn.compiled_form import fuse_quantizers
from lokakern.nn.linear import (
    ALTERED,
    CHAIN_DATA,
    CHAIN_SCALE,
    HELD,
    OFFLOADED,
    Linear,
)
from lokakern.nn.routed_chain import replay_chain, run_chain
from lokakern.nn.routed_matmul import constant_of, dtype_of, is_constant, prepare_to_be_compiled
from lokakern.registry.register import kernel_named
from lokakern.types import Granularity

# A layer, its norm, and what else it has, such as its activation or "cross", see `_last_of`.
Part = tuple[Linear, nn.Module | None, str]
Words = list[str]  # of a layer of a plan, see `_layer_words`
_BETWEEN_WORDS, _BETWEEN_LAYERS = "\0", "\1"
_NONE = "none"
_MOST_RECIPES = 64  # of a module: a few m each for a few chains
# What a call of a chain reads of its modules' attributes, beside hooks and ``forward``. Of tensors,
# which are in dictionaries of their own, attributes of the same name would be read instead.
_READS: dict[type[nn.Module], tuple[str, ...]] = {
    Linear: (
        "in_features", "out_features", "_plan", "_chain_scales", "_frozen_norms", "activation",
        "weight", "bias", "fp8_data", "fp8_scale", "norm",
    ),
    nn.LayerNorm: ("normalized_shape", "eps", "weight", "bias"),
    nn.RMSNorm: ("normalized_shape", "eps", "weight"),
    BlockRMSNorm: ("norm_name", "columns", "eps"),
    nn.Dropout: ("training",),
    nn.GELU: ("approximate",),
}  # fmt: skip
_OPERAND, _BYTES = True, False  # kinds of operands of a recipe; None: the module has none


class Noted(str):
    """A plan that notes whether it was idle at the rows of every call."""

    __slots__ = ("is_idle",)
    is_idle: bool


class Recipe(NamedTuple):
    """What the slow path found for a chain, for `call_chain` of ``lokakern/native/layer.h``.

    It names tensors by modules and does not hold them: a parameter may be replaced or moved. None
    stands for the module that keeps the recipe, which would else be a cycle.

    Attributes:
        plan: The plan.
        facts: For each module its class, the names and values of what was read of it, and names
            that it does not have.
        children: Module, "_modules", name and child, for what was read of a layer's children.
        operands: Module, dictionary, name and kind of each operand; None for an absent one.
        unread: As ``operands``, parameters that have to be as usual and that no launch reads.
        is_half: Whether the plan is for float16.
        among: As of `Keeper`.
        end: As of `Keeper`.
    """

    plan: str
    facts: tuple[tuple[nn.Module | None, type, tuple[Any, ...], tuple[str, ...]], ...]
    children: tuple[tuple[nn.Module | None, str, str, nn.Module], ...]
    operands: tuple[tuple[nn.Module | None, str, str, bool | None] | None, ...]
    unread: tuple[tuple[nn.Module | None, str, str], ...]
    is_half: bool
    among: tuple[nn.Module, ...]
    end: int


class Keeper(NamedTuple):
    """Where the recipe of a chain is kept.

    Attributes:
        module: The module that keeps it, as ``_chain_recipes``.
        among: The modules of a sequence, the layers of a cross after the first one, or the modules
            behind a layer.
        place: In a sequence the place of the chain's first module.
        end: In a sequence the place after the chain; how many modules are behind a layer.
    """

    module: nn.Module
    among: tuple[nn.Module, ...] = ()
    place: int = 0
    end: int = 0


def are_same(modules: tuple[nn.Module | None, ...], known: tuple[nn.Module | None, ...]) -> bool:
    """Whether both have the same modules."""
    return len(modules) == len(known) and all(map(operator.is_, modules, known))


def is_plain_call(module: nn.Module) -> bool:
    """Whether a call of a module runs only its class's forward."""
    return not (has_own_call(module) or has_global_hooks())


def has_own_call(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward beside that of its class."""
    if module._forward_hooks or module._forward_pre_hooks:  # torch 2.11 traces no bool of hooks
        return True
    # Dynamo guards an attribute that is read, and not what a dictionary lacks: without the second
    # part compiled code would not notice a forward that the module gets later.
    return "forward" in module.__dict__ or module.forward is None


def has_global_hooks() -> bool:
    """Whether every call of a module runs a hook."""
    module = nn.modules.module
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


def is_usual(x: object) -> bool:
    """Whether a compiler knows x as a tensor of no other class, with data in rows."""
    return type(x) is Tensor and not (x.is_meta or x.is_nested)


def static_rows(x: object) -> int:
    """For a compiler, the rows of an input; -1 if they are dynamic, or it is no usual tensor."""
    if not isinstance(x, Tensor) or hasattr(x, "device_mesh") or x.is_meta or x.is_nested:
        return -1
    if x.dim() < 2 or not is_constant(x.shape[-1]) or not x.shape[-1]:
        return -1
    m = x.numel() // x.shape[-1]  # the size of a shape is no symbol in torch.export
    return constant_of(m)


def has_no_launch(plan: str, m: int) -> bool:
    """Whether a plan has no launches at m, which is -1 if it is unknown; a constant for compilers.

    Where all of a model is idle, each global that the way to its layers reads would be two guards
    more, which the compiled call of each step evaluates.
    """
    return m >= 0 and is_idle_at(plan, m)


def layers_at(x: Tensor, plan: str) -> list[Words]:
    """The layers of a plan that holds for an input, as words; none if it does not hold."""
    if is_compiling():
        if hasattr(x, "device_mesh") or x.is_meta or x.is_nested or x.dim() < 2:
            return []
        found = chain_way(plan, static_rows(x), x.dtype, x.device.type)
    else:
        if type(x) is not Tensor or is_traced() or x.is_meta or x.is_nested or x.dim() < 2:
            return []
        found = chain_way(plan, x.shape[:-1].numel(), x.dtype, x.device.type)
    words = [layer.split(_BETWEEN_WORDS) for layer in found.split(_BETWEEN_LAYERS)] if found else []
    return words if words and x.shape[-1] == int(words[0][1]) else []


def rows_in(x: Any) -> int:
    """The rows of an input, or -1 for what is no usual tensor."""
    if type(x) is not Tensor or torch._C._get_tracing_state() is not None:
        return -1
    if x.dim() == 2:
        return x.size(0)
    return -1 if x.is_nested else x.shape[:-1].numel()


def is_idle_at(plan: str, m: int) -> bool:
    """Whether a plan, if any, has no launches at m."""
    return not plan or (m >= 0 and not _words_at(plan, m))


def call_again(
    keeper: nn.Module, x: Tensor, plan: str, among: tuple[nn.Module, ...] = (),
    beside: tuple[Tensor, ...] = (), place: int = 0,
) -> tuple[Tensor | None, int]:  # fmt: skip
    """The output of a chain that was called before, and the place after it; in eager mode only.

    The output is None where anything changed since, see `Recipe`.

    Args:
        keeper: The module that keeps the recipe.
        x: As of `call_parts`.
        plan: As of `call_parts`.
        among: As of `Keeper`.
        beside: As of `call_parts`.
        place: As of `Keeper`.
    """
    recipes: dict[Any, Recipe] | None = keeper._chain_recipes  # type: ignore[assignment]
    call = NATIVE.call_chain
    if not recipes or call is None or type(x) is not Tensor or is_traced():
        return None, 0
    module = nn.modules.module
    if module._global_forward_hooks or module._global_forward_pre_hooks:
        return None, 0
    recipe = recipes.get((place, plan, _words_at(plan, rows_in(x))))
    if recipe is None or not (recipe.among is among or are_same(recipe.among, among)):
        return None, 0
    return call(x, recipe, keeper, beside), recipe.end


def _keep(
    keeper: Keeper, x: Tensor, plan: str, layers: Sequence[Words], parts: Sequence[Part]
) -> None:
    """Keep how a chain was called, for `call_again`."""
    made = _recipe_of(keeper, plan, layers, parts)
    if made is None:
        return
    recipes: dict[Any, Recipe] = keeper.module._chain_recipes or {}  # type: ignore[assignment]
    if len(recipes) >= _MOST_RECIPES:
        recipes = {}
    key = (keeper.place, plan, _words_at(plan, rows_in(x)))
    vars(keeper.module)["_chain_recipes"] = {**recipes, key: made}


def _recipe_of(
    keeper: Keeper, plan: str, layers: Sequence[Words], parts: Sequence[Part]
) -> Recipe | None:
    """The recipe of a chain; None if something that a call reads may be changed in place."""

    def named(module: nn.Module) -> nn.Module | None:
        return None if module is keeper.module else module

    children: list[tuple[nn.Module | None, str, str, nn.Module]] = []
    operands: list[tuple[nn.Module | None, str, str, bool | None] | None] = []
    unread: list[tuple[nn.Module | None, str, str]] = []
    modules: dict[int, nn.Module] = {id(x): x for x in keeper.among[keeper.place : keeper.end]}
    for (layer, norm, _), words in zip(parts, layers, strict=True):
        granularity, reads_weight = words[7], bool(words[8])
        modules[id(layer)] = layer
        if norm is not None:
            modules[id(norm)] = norm
            if layer._modules.get("norm") is norm:
                children.append((named(layer), "_modules", "norm", norm))
        weight = (named(layer), "_parameters", "weight")
        operands.append((*weight, _OPERAND) if reads_weight else None)
        if not reads_weight:
            unread.append(weight)
        data, scale = CHAIN_DATA + granularity, CHAIN_SCALE + granularity
        if granularity == _NONE:
            operands += [None, None]
        else:
            pair = ("fp8_data", "fp8_scale") if layer._freezes(granularity) else (data, scale)
            operands += [(named(layer), "_buffers", name, _BYTES) for name in pair]
        vectors: list[tuple[nn.Module | None, str]] = [(layer, "bias")]
        vectors.append((norm if isinstance(norm, nn.LayerNorm | nn.RMSNorm) else None, "weight"))
        vectors.append((norm if isinstance(norm, nn.LayerNorm) else None, "bias"))
        for owner, name in vectors:
            if owner is None:
                operands.append(None)
            else:
                kind = None if getattr(owner, name) is None else _OPERAND
                operands.append((named(owner), "_parameters", name, kind))
        operands.append(None)
        if words[10]:  # in the place of the norm's own
            unread += [place[:3] for place in operands[-3:-1] if place is not None and place[3]]
            buffers = frozen_names(layer, norm)
            if buffers is None:
                return None
            operands[-3:] = [
                (named(layer), "_buffers", name, kind) if name in layer._buffers else None
                for name, kind in zip(buffers, (_OPERAND, _OPERAND, _BYTES), strict=True)
            ]
    facts = []
    for module in modules.values():
        kinds = (kind for kind in type(module).__mro__ if kind in _READS)
        names = _READS.get(next(kinds, nn.Module), ())
        if isinstance(module, Linear):
            names += tuple(
                name for name in module._buffers if name.startswith((CHAIN_DATA, CHAIN_SCALE))
            )
        own = vars(module)
        present = [item for name in names if name in own for item in (name, own[name])]
        if not all(isinstance(x, int | float | str | tuple) for x in present[1::2]):
            return None
        absent = tuple(name for name in names if name not in own)
        facts.append((named(module), type(module), tuple(present), absent))
    return Recipe(
        plan, tuple(facts), tuple(children), tuple(operands), tuple(unread),
        dtype_of(plan) is torch.float16, keeper.among, keeper.end,
    )  # fmt: skip


def chain_way(plan: str, m: int, dtype: torch.dtype, device: str) -> str:
    """Words of the layers of a plan that holds at m, or ""; m is -1 if it is dynamic.

    A constant for compilers. It reads the state of autocast, which Dynamo guards.
    """
    if dtype is not dtype_of(plan) or torch.is_autocast_enabled(device):
        return ""
    if torch._C._are_functorch_transforms_active():
        return ""
    return _words_at(plan, m)


@functools.lru_cache(maxsize=4096)
def _words_at(plan: str, m: int) -> str:
    layers, *both = read_plan(plan)
    if m >= 0:
        cases: list[Steps] = [steps_at(plan, m)]
        if not m or not cases[0]:
            return ""
    else:
        cases = [steps for segments in both for _, steps in segments]
    frozen = dict(frozen_norms(plan))
    words = (
        _layer_words(layer, _reads_weight(cases, place), place in frozen)
        for place, layer in enumerate(layers)
    )
    return _BETWEEN_LAYERS.join(map(_BETWEEN_WORDS.join, words))


def prepare_chains(*others: Callable[..., Any]) -> None:
    """Mark functions whose results are constants for compilers, see `prepare_to_be_compiled`."""
    prepare_to_be_compiled(chain_way, has_no_launch, fuse_quantizers, *others)


def words_of_plan(plan: str) -> list[Words]:
    """The layers of a plan, as of `layers_at` where all of it holds."""
    frozen = dict(frozen_norms(plan))
    return [_layer_words(x, True, place in frozen) for place, x in enumerate(read_plan(plan)[0])]


def _reads_weight(cases: Sequence[Steps], place: int) -> bool:
    """Whether the unquantized weight of a layer is read, or may be, in one of these cases."""
    return any(not steps or any(_is_unquantized(step, place) for step in steps) for steps in cases)


def _is_unquantized(step: ChainStep, place: int) -> bool:
    """Whether a launch multiplies by the unquantized weight of a layer."""
    is_at = step.place == place and step.weight is Granularity.NONE
    return is_at and kernel_named(step.kernel).op == "gemm_norm"


def _layer_words(layer: ChainLayer, reads_weight: bool, is_frozen: bool) -> Words:
    """n, k, "bias", norm, eps, "affine", `_last_of`, granularity, "weight", matrices, "frozen"."""
    form = norm_form(layer.epilogue)
    return [
        str(layer.n), str(layer.k), "bias" if form.bias else "", str(form.norm), str(layer.eps),
        "affine" if form.affine else "", _last_of(form), layer.weight.value,
        "weight" if reads_weight else "", str(sum(BESIDE[word] for word in form.beside)),
        "frozen" if is_frozen else "",
    ]  # fmt: skip


def _last_of(form: NormForm) -> str:
    """What a layer has but its norm, such as "relu", "residual+relu" or "none"."""
    return str(NormForm(residual=form.residual, last=form.last, residual_last=form.residual_last))


def has_norm_and_activation(words: Words) -> tuple[bool, bool]:
    """Whether a layer of a plan has a norm and an activation."""
    return words[3] != _NONE, words[6] != _NONE


def is_part(part: Part, words: Words) -> bool:
    """Whether a layer and its norm compute what a layer of a plan does."""
    layer, norm, activation = part
    n, k, bias, norm_name, eps, affine, last, *_ = words
    # Numbers of modules may be symbols of a compiler, which it cannot write as text.
    if layer.out_features != int(n) or layer.in_features != int(k) or activation != last:
        return False
    if (layer.bias is not None) != bool(bias):
        return False
    if norm is None or type(norm) is nn.Identity:
        return norm_name == _NONE
    if type(norm) is BlockRMSNorm:
        is_same = norm.norm_name == norm_name and norm.columns == int(n)
        return is_same and norm.eps == float(eps) and not affine
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        return False
    kind = {nn.LayerNorm: "layer", nn.RMSNorm: "rms"}.get(type(norm))
    _, norm_weight, norm_bias = _vectors(part)
    shape = norm.normalized_shape
    return (
        norm_name == kind
        and len(shape) == 1
        and shape[0] == int(n)
        and norm.eps == float(eps)
        and (norm_weight is not None or norm_bias is not None) == bool(affine)
    )


def _vectors(part: Part) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Bias, and weight and bias of the norm."""
    layer, norm, _ = part
    if isinstance(norm, nn.LayerNorm):
        return layer.bias, norm.weight, norm.bias
    return layer.bias, norm.weight if isinstance(norm, nn.RMSNorm) else None, None


def call_parts(
    x: Tensor, plan: str, layers: Sequence[Words], parts: Sequence[Part],
    beside: Sequence[Tensor] = (), keeper: Keeper | None = None,
) -> Tensor | None:  # fmt: skip
    """The output of a chain, or None where its modules have to run one by one.

    Args:
        x: The input.
        plan: The plan.
        layers: Those of `layers_at`.
        parts: The modules of each layer.
        beside: Residuals, gates, and x0 and x of crosses, in the order of layers and of their
            epilogues.
        keeper: Where a replayed call is kept for `call_again`.
    """
    operands: list[Tensor | None] = []
    for part, words in zip(parts, layers, strict=True):
        layer, norm, _ = part
        granularity, reads_weight = words[7], words[8]
        is_plain = is_plain_call(layer) and (norm is None or is_plain_call(norm))
        if not is_plain or not _is_usual(layer):
            return None
        found: tuple[Tensor | None, Tensor | None] = (None, None)
        if granularity != _NONE:
            kept = layer.chain_weight(granularity)
            if kept is None or kept[0].device != x.device:
                return None
            found = kept
        # A compiled graph does not check tensors that it does not read.
        weight = layer.weight if reads_weight or not is_compiling() else None
        vectors: tuple[Tensor | None, ...] = _vectors(part)
        for tensor in (weight, *vectors):
            if tensor is not None and not _is_usual_tensor(tensor, x):
                return None
        scale: Tensor | None = None
        if words[10]:
            frozen = frozen_vectors(layer, norm)  # none of a norm that was replaced
            if frozen is None or frozen[2].device != x.device:
                return None
            vectors, scale = (vectors[0], *frozen[:2]), frozen[2]
            for tensor in frozen[:2]:
                if tensor is not None and not _is_usual_tensor(tensor, x):
                    return None
        operands += [weight if reads_weight else None, *found, *vectors, scale]
    # Of each matrix that the layers read beside.
    columns = [int(words[0]) for words in layers for _ in range(int(words[9]))]
    if len(columns) != len(beside):
        return None
    for tensor, n in zip(beside, columns, strict=True):
        if not _is_usual_tensor(tensor, x) or tensor.dim() != x.dim():
            return None
        # Compared one by one, because sizes may be symbols of a compiler.
        sizes = (*x.shape[:-1], n)
        if any(size != wanted for size, wanted in zip(tensor.shape, sizes, strict=True)):
            return None
        operands.append(tensor if x.dim() == 2 else tensor.reshape(-1, sizes[-1]))
    if is_grad_enabled() and _wants_gradients(x, parts, beside):
        return None
    if is_compiling():
        fuse_quantizers()  # and the direct call of the op
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    replayed = None if is_compiling() else replay_chain(rows, operands, plan)
    if replayed is not None and keeper is not None:
        _keep(keeper, x, plan, layers, parts)
    y = run_chain(rows, operands, plan) if replayed is None else replayed
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def _wants_gradients(x: Tensor, parts: Sequence[Part], beside: Sequence[Tensor]) -> bool:
    for part in parts:
        for tensor in (part[0].weight, *_vectors(part)):
            if tensor is not None and tensor.requires_grad:
                return True
    for tensor in beside:
        if tensor.requires_grad:
            return True
    return x.requires_grad


def _is_usual(layer: Linear) -> bool:
    """Whether a layer multiplies its weight as it is, on the device, and is not checked."""
    plan = layer._plan
    flags = plan.partition("\0")[0]
    is_whole = ALTERED not in flags or HELD in flags
    return is_whole and OFFLOADED not in flags and not sampled_check.is_checked(plan)


def _is_usual_tensor(tensor: Tensor, x: Tensor) -> bool:
    # Tensors that a compiler traces have other types; a parameter is one of either.
    is_own = type(tensor) in (Parameter, Tensor) or (
        is_compiling() and isinstance(tensor, Tensor) and not hasattr(tensor, "device_mesh")
    )
    return is_own and tensor.dtype is x.dtype and tensor.device == x.device
