"""FP8 between layers: inputs with a static scale from a norm, or from a fused activation.

Outputs of BlockNorm over n columns are at most sqrt(n), and the usual activations do not increase
magnitudes. So the scale of the next layer's input is static and quantizing is elementwise, which
torch.compile fuses into the norm: there is no separate quantizer that reads the whole tensor.

After an activation without a norm scales are dynamic. In inference, where its output has no other
use, a kernel of the registry activates and quantizes in one pass. Where neither the layer before a
relu nor the one behind it quantizes, the product applies the relu. And several layers may run as a
chain, in one op (`lokakern.nn.routed_chain`), also across sequences that are children of one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling

from lokakern.errors import UnsupportedError
from lokakern.native import NATIVE
from lokakern.nn.activations import CLASSES, activation_of
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.chain_call import (
    Keeper,
    Part,
    Words,
    are_same,
    call_again,
    call_parts,
    has_norm_and_activation,
    is_idle_at,
    is_part,
    is_plain_call,
    layers_at,
    prepare_chains,
    rows_in,
    static_rows,
    words_of_plan,
)
from lokakern.nn.chain_norm import drop_norms, keep_norms, norms_of
from lokakern.nn.chain_plan import read_plan
from lokakern.nn.joined import count_joined, joined_way, multiply_joined
from lokakern.nn.linear import LINEARS, Linear, described, is_linear, quantizes
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.rectified import ALWAYS, multiply_rectified, traced_way
from lokakern.nn.routed_matmul import PLAIN, kernel_at, reads_rows
from lokakern.norm import norm_named, static_scale
from lokakern.quantized_tensor import pitch_of
from lokakern.registry.register import fp8_format
from lokakern.types import Device, ErrorBudget, Granularity

# Row errors of products after BlockNorm(256) and hard-swish, emulated on the realistic
# distributions (m 512, k 1024, n 256): 0.036-0.046 with the static scale, 0.035-0.043 with rowwise
# scales; but 0.18 on X12, gradients, which are not inputs of a forward pass.
FLOOR = 0.05
_BOUNDED = (*CLASSES, nn.Identity)  # |f(z)| <= |z|


class Handoff(NamedTuple):
    """Settings of a conversion for a sequence.

    Attributes:
        key: Key of the conversion.
        modules: Modules for which the settings were made: the children, or where a chain crosses
            a child that is a sequence, the `leaves`.
        scales: Static scale of each module's input, as text; "" without one.
        activating: For an activation that only the next module reads, the route of kernels that
            activate and quantize; "" for other modules.
        chains: For the first module of a chain, its plan (`lokakern.nn.chain_plan`); "" for others.
        rectified: For a layer before a relu, the route of products that apply it
            (`lokakern.nn.rectified`); "" for other modules.
        joined: For a layer, what is behind it whose gradients one op computes in compiled training
            steps (`lokakern.nn.joined`); "" for other modules.
    """

    key: str = ""
    modules: tuple[nn.Module, ...] = ()
    scales: tuple[str, ...] = ()
    activating: tuple[str, ...] = ()
    chains: tuple[str, ...] = ()
    rectified: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[tuple[str, ...], ...]:
        """What `_states_at` reads: all but what only compilers read."""
        return self[2:6]


_ROWWISE = frozenset((
    Linear, LinearNormAct, BlockRMSNorm, *_BOUNDED, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.GELU,
    nn.Sigmoid, nn.Tanh, nn.Dropout, nn.BatchNorm1d,
))  # fmt: skip
_KEEPS_ROWS = "\2"
_OF_LEAVES = "\3"
_DERIVED = ("_chain_recipes", "_by_rows")
_MOST_ROWS = 16
_RELU = 3  # a state of `_states_at`


class BoundedSequential(nn.Sequential):
    """`nn.Sequential` that quantizes inputs of linear layers before the layers.

    The container does this, because a layer may have other callers. A slice, or a container whose
    modules changed, runs as `nn.Sequential`. The newest handoff is in effect.
    """

    # With an underscore, so that names of children do not collide.
    _handoffs: tuple[Handoff, ...] = (Handoff(),)
    # The newest handoff in one text, for compilers: for a module that Dynamo meets in two places,
    # each call of the compiled model evaluates a guard in Python.
    _known = ""

    # How its chains were called, see `lokakern.nn.chain_call.call_again`.
    _chain_recipes: dict[Any, Any] | None = None
    # By the rows of calls, what `_states_at` and the handoff were. C++ runs calls of as many rows;
    # `_run` took an H100's host 14 us of 220 for the tower at 512 rows.
    _by_rows: dict[int, tuple[tuple[int, ...], Handoff]] | None = None

    @property
    def is_as_known(self) -> bool:
        """Whether the modules are unchanged since the settings were made."""
        modules = self._handoffs[-1].modules
        return are_same(tuple(self._modules.values()), modules) or _has_leaves(self, modules)

    def forward(self, input: Tensor) -> Tensor:
        """Call the modules in order, as `nn.Sequential` does."""
        if not is_compiling():
            if NATIVE.call_sequence is not None:
                y = NATIVE.call_sequence(self, input, described)
                if y is not None:
                    return y  # type: ignore[no-any-return]
            return BoundedSequential._run(self, input)  # of which another thread may take the class
        return self.run_compiled(input)

    def run_compiled(self, input: Tensor, place: int = 0) -> Tensor:
        """The output of the modules from a place on, for compilers."""
        modules, known = list(self._modules.values()), self._known
        if known.startswith(_OF_LEAVES):
            modules, known = leaves(modules), known.removeprefix(_OF_LEAVES)
        # Dynamo runs this as it is where a module cannot be traced.
        relus = _relus_at(known, static_rows(input)) if is_compiling() else ""
        if relus is not None:
            return _rectified(modules, input, place, relus.split(","))
        words = [word.split("\0") for word in known.rstrip(_KEEPS_ROWS).split("\1")]
        if [word[0] for word in words] != [_kind(module) for module in modules]:
            return _rectified(modules, input, place, ())
        scales, activating = tuple(w[1] for w in words), tuple(w[2] for w in words)
        chains, rectified, joined = (tuple(w[i] for w in words) for i in (3, 4, 5))
        while place < len(modules):
            if chains[place]:
                found, end = _called(input, modules, place, chains[place])
                if found is not None:
                    input, place = found, end
                    continue
            module, route = modules[place], activating[place]
            done = None
            if rectified[place]:
                done = multiply_rectified(module, modules[place + 1], input, rectified[place])
            reader = modules[place + 1] if route else None
            # A module that was converted separately may have been undone separately.
            if (
                isinstance(reader, Linear)
                and not getattr(module, "inplace", False)
                and is_plain_call(module)
                and is_plain_call(reader)
            ):
                done = reader.forward_activated(input, activation_of(module), route)
            if done is not None:
                input, place = done, place + 2
                continue
            scale = scales[place] if isinstance(module, Linear) else ""
            if scale and not _is_bounded(modules, place):
                scale = ""
            if joined[place]:
                end = place + count_joined(joined[place])
                done = multiply_joined(modules[place:end], input, joined[place], scale)
                if done is not None:
                    input, place = done, end
                    continue
            input = module(input, input_scale=scale) if scale else module(input)
            place += 1
        return input

    def _run(self, input: Tensor) -> Tensor:
        """`forward` in eager mode, at the cost of `nn.Sequential` where nothing holds at this m."""
        handoff, m = self._handoffs[-1], rows_in(input)
        if not are_same(tuple(self._modules.values()), handoff.modules):
            is_idle = all([is_idle_at(plan, m) for plan in handoff.chains])
            if is_idle or not _has_leaves(self, handoff.modules):
                return super().forward(input)  # type: ignore[no-any-return, no-untyped-call]
            return BoundedSequential._run_from(self, input, 0, handoff)
        if m >= 0:
            kept = self._by_rows
            if kept is None or len(kept) >= _MOST_ROWS:
                kept = vars(self)["_by_rows"] = {}
            kept[m] = _states_at(*handoff.settings, m), handoff
        return BoundedSequential._run_from(self, input, 0, handoff)

    def _run_from(self, input: Tensor, place: int, handoff: Handoff) -> Tensor:
        """The output of the modules from a place on."""
        modules, settings = handoff.modules, handoff.settings
        m = rows_in(input)
        states = _states_at(*settings, m)
        for here in range(place, len(modules)):
            if here < place:
                continue  # a part of what ran
            if states[here]:
                rows = rows_in(input)  # a hook, or another module, may change them
                if rows != m:
                    m, states = rows, _states_at(*settings, rows)
                # With a gradient an eager layer and its relu run one by one.
                is_alone = states[here] == _RELU and is_grad_enabled() and input.requires_grad
                if states[here] > 1 and not is_alone:
                    input, place = BoundedSequential._handed(self, input, here, m, handoff)
                    continue
            input = modules[here](input)
        return input

    def _handed(self, input: Tensor, place: int, m: int, handoff: Handoff) -> tuple[Tensor, int]:
        """The output of the module at a place, or of a chain, and the place after it."""
        _, modules, scales, activating, chains, rectified, _ = handoff
        module, plan, route, scale = modules[place], chains[place], activating[place], scales[place]
        if plan:
            found, end = call_again(self, input, plan, modules, place=place)
            if found is None:
                found, end = _called(input, modules, place, plan, self)
            if found is not None:
                return found, end
        if rectified[place]:
            done = multiply_rectified(module, modules[place + 1], input, rectified[place])
            if done is not None:
                return done, place + 2
        # A module that was converted separately may have been undone separately.
        reader = modules[place + 1] if route else None
        if (
            isinstance(reader, Linear)
            and (m < 0 or kernel_at(reader._routes[0], m))
            and not getattr(module, "inplace", False)
            and is_plain_call(module)
            and is_plain_call(reader)
        ):
            done = reader.forward_activated(input, activation_of(module), route)
            if done is not None:
                return done, place + 2
        if (
            scale
            and isinstance(module, Linear)
            and not _drops_scale(module, m)
            and _is_bounded(modules, place)
        ):
            return module(input, input_scale=scale), place + 1
        return module(input), place + 1

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            _write_known(self)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _write_known(self)

    def __getstate__(self) -> dict[str, Any]:
        """The state without derived attributes."""
        state = dict(self.__dict__)
        for name in _DERIVED:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # Files of earlier versions lack the last columns.
        self._handoffs = tuple(
            Handoff(h.key, h.modules, *(x or ("",) * len(h.modules) for x in h[2:]))
            for h in self._handoffs
        )
        if any(map(any, (x for handoff in self._handoffs for x in handoff[2:]))):
            prepare_chains(_relus_at, traced_way, joined_way)
        _write_known(self)


def _rectified(
    modules: Sequence[nn.Module], input: Tensor, place: int, relus: Sequence[str]
) -> Tensor:
    """The output of the modules from a place on, with relus in the products at some places.

    For a compiler where nothing else holds. It reads less than the rest of `run_compiled`, and each
    read is a guard.
    """
    while place < len(modules):
        done = None
        if str(place) in relus and place + 1 < len(modules):
            done = multiply_rectified(modules[place], modules[place + 1], input, ALWAYS)
        input = modules[place](input) if done is None else done
        place += 1 if done is None else 2
    return input


@functools.lru_cache(maxsize=4096)
def _states_at(
    scales: tuple[str, ...], activating: tuple[str, ...], chains: tuple[str, ...],
    rectified: tuple[str, ...], m: int,
) -> tuple[int, ...]:  # fmt: skip
    """For each place 0 if nothing is set, and else 1 if it does not hold at m, 2 if it may.

    `_RELU` if all that may hold is a relu in a product, which C++ computes.
    """
    found = []
    for scale, route, plan, joined in zip(scales, activating, chains, rectified, strict=True):
        is_idle = not scale and m >= 0 and not kernel_at(route, m) and is_idle_at(plan, m)
        if is_idle and kernel_at(joined, m):
            found.append(_RELU)
        else:
            found.append((1 if is_idle else 2) if scale or route or plan or joined else 0)
    return tuple(found)


def _relus_at(known: str, m: int) -> str | None:
    """The places of ``_known`` whose products apply a relu at m, if nothing else of it holds.

    None where something else may, where m is unknown (-1), and where a module may change the rows.
    A constant for compilers, see `lokakern.nn.chain_call.has_no_launch`.
    """
    if m < 0 or not known.endswith(_KEEPS_ROWS):
        return None
    words = (word.split("\0") for word in known.removesuffix(_KEEPS_ROWS).split("\1"))
    _, *columns, joined = zip(*words, strict=True)
    if any(joined):
        return None
    states = _states_at(*columns, m)
    return None if 2 in states else ",".join(str(i) for i, x in enumerate(states) if x == _RELU)


def _drops_scale(module: Linear, m: int) -> bool:
    """Whether a layer at m multiplies as without a static scale, of which its product has none."""
    is_own = (type(module) is LinearNormAct and not module._chain) or is_linear(module)
    return m >= 0 and is_own and not quantizes(module._plan, m)


def _is_bounded(modules: Sequence[nn.Module], place: int) -> bool:
    """Whether no hook changes values from the norm that bounds them to the layer at a place."""
    if not is_plain_call(modules[place]):
        return False
    for module in reversed(modules[:place]):
        if not is_plain_call(module):
            return False
        if isinstance(module, LinearNormAct):
            return is_plain_call(module.norm)
        if isinstance(module, BlockRMSNorm):
            return True
    return False


def _kind(module: nn.Module) -> str:
    """The kind of a module in a handoff, if it has one, with the sizes of its norm.

    A compiler finds it without a guard. It tells modules apart that were exchanged in ``_modules``.
    """
    if isinstance(module, BlockRMSNorm):
        return f"norm {module.columns} {module.block}"
    if isinstance(module, LinearNormAct):
        return f"linear {_kind(module.norm)}"
    if isinstance(module, Linear):
        return "linear"
    for kind in _BOUNDED:
        if isinstance(module, kind):
            return kind.__name__
    return "other"


def leaves(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules in the order of their calls, where sequences without hooks call their children."""
    found: list[nn.Module] = []
    for module in modules:
        found += leaves(module) if is_inner(module) else [module]
    return found


def is_inner(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module does nothing but call its children in a row."""
    return type(module) in (nn.Sequential, BoundedSequential) and is_plain_call(module)


def _has_leaves(sequence: nn.Sequential, modules: tuple[nn.Module, ...]) -> bool:
    """Whether these modules are the leaves of a sequence, more than its children."""
    return len(modules) > 0 and are_same(tuple(leaves(sequence)), modules)


def _write_known(sequence: nn.Sequential) -> None:
    """Write the newest handoff for compilers, unless the modules changed."""
    assert isinstance(sequence, BoundedSequential)
    _, modules, *columns = sequence._handoffs[-1] if sequence.is_as_known else Handoff()
    rows = ((_kind(module), *rest) for module, *rest in zip(modules, *columns, strict=True))
    sequence._known = "\1".join(map("\0".join, rows))
    has_settings = any(map(any, columns))
    if has_settings and all(type(module) in _ROWWISE for module in modules):
        sequence._known += _KEEPS_ROWS
    if _has_leaves(sequence, modules) and not are_same(tuple(sequence), modules):
        sequence._known = _OF_LEAVES + sequence._known
    for name in _DERIVED:
        vars(sequence).pop(name, None)


def _called(
    x: Tensor,
    modules: Sequence[nn.Module],
    place: int,
    plan: str,
    keeper: nn.Module | None = None,
) -> tuple[Tensor | None, int]:
    """The output of a chain that begins at a place, and the place after it.

    The output is None where the modules have to run one by one. A module may keep the call.
    """
    layers = layers_at(x, plan)
    parts, end = _parts_at(modules, place, layers) if layers else ([], place)
    if not parts:
        return None, end
    kept = None if keeper is None else Keeper(keeper, tuple(modules), place, end)
    return call_parts(x, plan, layers, parts, keeper=kept), end


def _parts_at(
    modules: Sequence[nn.Module], place: int, layers: Sequence[Words], *, in_call: bool = True
) -> tuple[list[Part], int]:
    """The modules of a chain that begins at a place, and the place after it.

    There are none if the modules are not the layers. Identities between them, and dropout in
    evaluation, are passed over; without ``in_call`` dropout in training, too.
    """
    parts: list[Part] = []
    for words in layers:
        layer, place = _take(modules, place, in_call)
        part: Part
        if type(layer) is LinearNormAct:
            part = (layer, layer.norm, layer.activation)
        elif is_linear(layer):
            has_norm, has_last = has_norm_and_activation(words)
            norm, activation = None, "none"
            if has_norm:
                norm, place = _take(modules, place, in_call)
            if has_last:
                last, place = _take(modules, place, in_call)
                if last is None or not is_plain_call(last):
                    return [], place
                activation = activation_of(last)
            part = (layer, norm, activation)
        else:
            return [], place
        if not is_part(part, words):
            return [], place
        parts.append(part)
    return parts, place


def _take(modules: Sequence[nn.Module], place: int, in_call: bool) -> tuple[nn.Module | None, int]:
    """The next module that does anything, if there is one, and the place after it."""
    while place < len(modules) and passes_on(modules[place], in_call):
        place += 1
    return (modules[place] if place < len(modules) else None), place + 1


def passes_on(module: nn.Module, in_call: bool) -> bool:
    """Whether a module returns its input: identities, and dropout in evaluation.

    Without ``in_call`` also what may do so in a later call: dropout in training, or with hooks.
    """
    if type(module) not in (nn.Identity, nn.Dropout):
        return False
    is_idle = type(module) is nn.Identity or not module.training
    return not in_call or (is_idle and is_plain_call(module))


def set_handoff(
    sequence: nn.Sequential,
    scales: Sequence[str],
    activating: Sequence[str],
    key: str = "",
    chains: Sequence[str] = (),
    rectified: Sequence[str] = (),
    joined: Sequence[str] = (),
    modules: Sequence[nn.Module] = (),
) -> None:
    """Apply a conversion's settings for the current modules of a sequence.

    Args:
        sequence: The sequence.
        scales: See `Handoff`, as the others.
        activating: For each module.
        key: Of the conversion.
        chains: For each module; () means none. The layers keep the FP8 weights that they read.
        rectified: For each module; () means none.
        joined: For each module; () means none.
        modules: The children of the sequence, or its `leaves`; () means the children.

    Raises:
        UnsupportedError: The modules at a place are not the layers of its chain.
    """
    modules = tuple(modules) or tuple(sequence)
    none = ("",) * len(modules)
    chains, rectified, joined = (tuple(x) or none for x in (chains, rectified, joined))
    for place, plan in enumerate(chains):
        if plan and not _parts_at(modules, place, words_of_plan(plan), in_call=False)[0]:
            found = ", ".join(str(module) for module in modules[place:])
            raise UnsupportedError(
                f"a chain of {plan.partition(';')[0]} cannot begin at module {place}: the modules "
                f"are {found}"
            )
    _drop_chain_weights(sequence, key)
    given = (tuple(scales), tuple(activating), chains, rectified, joined)
    handoff = Handoff(key, modules, *given)
    sequence._handoffs = (*_others(sequence, key), handoff)  # type: ignore[assignment]
    for layer, granularity in _chain_weights(handoff):
        layer.keep_chain_weight(key, granularity)
    for place, plan in enumerate(chains):
        parts = _parts_at(modules, place, words_of_plan(plan), in_call=False)[0] if plan else []
        keep_norms(sequence, key, norms_of(plan, parts))
    if any(map(any, handoff[2:])):
        prepare_chains(_relus_at, traced_way, joined_way)
    if type(sequence) is nn.Sequential:
        sequence.__class__ = BoundedSequential  # last, for concurrent calls
    _write_known(sequence)


def remove_handoff(sequence: nn.Sequential, key: str = "") -> None:
    """Remove a conversion's settings from a sequence."""
    others = _others(sequence, key)
    _drop_chain_weights(sequence, key)
    if others:
        sequence._handoffs = others  # type: ignore[assignment]
        _write_known(sequence)
        return
    if type(sequence) is BoundedSequential:  # a class from fully_shard stays
        sequence.__class__ = nn.Sequential  # type: ignore[assignment]
    for name in ("_handoffs", "_known", *_DERIVED):
        vars(sequence).pop(name, None)


def _drop_chain_weights(sequence: nn.Sequential, key: str) -> None:
    drop_norms(sequence, key)  # its own: another sequence may run a chain of the same layers
    for handoff in vars(sequence).get("_handoffs", ()):
        if handoff.key == key:
            for layer, granularity in _chain_weights(handoff):
                if isinstance(layer, Linear):  # no longer where its conversion was undone
                    layer.drop_chain_weight(key, granularity)


def _chain_weights(handoff: Handoff) -> list[tuple[Linear, str]]:
    """The layers of the chains of a handoff, each with the granularity of its FP8 weight."""
    found = []
    for place, plan in enumerate(handoff.chains):
        layers = [x for x in handoff.modules[place:] if isinstance(x, nn.Linear)] if plan else []
        for linear, layer in zip(layers, read_plan(plan)[0] if plan else (), strict=False):
            if layer.weight is not Granularity.NONE:
                found.append((linear, layer.weight.value))
    return found  # type: ignore[return-value]


def _others(sequence: nn.Sequential, key: str) -> tuple[Handoff, ...]:
    return tuple(h for h in vars(sequence).get("_handoffs", ()) if h.key != key)


def scales_between(modules: Iterable[nn.Module], device: Device) -> tuple[str, ...]:
    """Static scale of the input of each module; "" without one, or if no kernel reads it."""
    found, known = [], ""
    for module in modules:
        found.append(known if _reads(module) else "")
        norm = module.norm if isinstance(module, LinearNormAct) else module
        if isinstance(norm, BlockRMSNorm):
            form = fp8_format(device)
            known = repr(static_scale(norm_named(norm.norm_name), norm.columns, form))
        elif type(module) not in _BOUNDED:
            known = ""
    return tuple(found)


def activations_between(
    modules: Iterable[nn.Module], scales: Sequence[str]
) -> dict[int, tuple[str, Linear]]:
    """Activations before a linear layer without a static scale, and the layer, by place."""
    found = {}
    for place, (module, reader) in enumerate(itertools.pairwise(modules)):
        name = activation_of(module)
        if not name or getattr(module, "inplace", False) or scales[place + 1]:
            continue
        if is_linear(reader) and _reads(reader) and reads_rows(reader._routes[0]):
            found[place] = name, reader
    return found


def _reads(module: nn.Module) -> bool:
    if not isinstance(module, Linear) or type(module) not in (*LINEARS, LinearNormAct):
        return False
    columns = module.in_features
    is_whole = module.padding == (0, 0) and pitch_of(columns) == columns
    return is_whole and module._routes[0] != PLAIN


def is_affordable(budget: ErrorBudget | None) -> bool:
    """Whether a budget admits the rounding with a static scale."""
    limits = {} if budget is None else budget.limits
    return set(limits) == {"row_err"} and limits["row_err"] >= FLOOR
