"""`MixTokens`: products across tokens, without turning them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from lokakern.mods.editor import Editor, Mod
from lokakern.mods.together import FusedLinear, graph_of
from lokakern.nn.adoption import adopt, release, retake
from lokakern.nn.linear import Linear

_KINDS = (nn.Linear, Linear, FusedLinear)
# What lies anew, whatever it is made of, and modules whose outputs lie as their inputs.
_ANEW = frozenset(
    ("reshape", "flatten", "contiguous", "clone", "matmul", "bmm", "einsum", "cat", "stack")
)
_ELEMENTWISE = frozenset(f"torch.nn.modules.{word}" for word in ("activation", "dropout"))


@dataclass(frozen=True)
class MixTokens(Mod):
    """Multiply across tokens where they lie: ``linear(x.transpose(1, 2))`` as ``weight @ x``.

    Exact: each output has the sums that it had, in their order or another. What is spared are
    copies the other way round, of x, of the output and of their gradients; and, where the number of
    tokens is no multiple of 8, kernels that read its rows slowly. It can be differentiated once,
    backward.

    Layers whose input is a tensor ``[batch, tokens, d]`` transposed where they are called become
    ones that look how it lies at each call, and whose output lies so, too. `lokakern.convert`
    leaves them unquantized, because no FP8 kernel reads operands across rows; a filter keeps those
    out whose ``transpose(1, 2)`` is of a tensor of four dimensions, which cannot be seen here.
    """

    is_exact = True

    def edit(self, editor: Editor) -> None:
        """See `Mod`."""
        for name, parent in editor.modules():
            if type(parent).__module__.startswith("torch."):
                continue
            if not any(type(child) in _KINDS for child in _called(parent)):
                continue
            graph = graph_of(self, editor, name, parent)
            for node in graph.nodes if graph is not None else ():
                if node.op == "call_module" and node.args and _is_transposed(node.args[0]):
                    site = f"{name}.{node.target}" if name else str(node.target)
                    self._mark(editor, site, parent, node)

    def _mark(self, editor: Editor, site: str, parent: nn.Module, call: fx.Node) -> None:
        layer: Any = parent.get_submodule(str(call.target))
        if type(layer) not in _KINDS or not editor.accepts(layer, site):
            return
        if getattr(layer, "is_mixing", False) or getattr(layer, "padding", (0, 0)) != (0, 0):
            return
        before = type(layer).__name__
        why = ""
        if any(getattr(layer, "_routes", ())):
            why = "it is converted to FP8: apply Mods before convert"
        elif _is_viewed(parent, call):
            why = "its output is taken by view, which needs it to lie as it does: say reshape"
        if why:
            editor.left(self, site, before, why)
            return

        def start() -> None:
            adopt(layer)
            layer.is_special = True

        def end() -> None:
            retake(layer)
            release(layer)

        editor.do(start, end)
        editor.set(layer, "is_mixing", True)
        editor.done(self, site, f"{before} of x.mT", "W @ x", "nothing is turned to be multiplied")


def _called(parent: nn.Module) -> Iterator[nn.Module]:
    """Its children, and those of lists, which nobody calls."""
    for child in parent.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child)
        else:
            yield child


def _name_of(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _is_viewed(parent: nn.Module, call: fx.Node) -> bool:
    """Whether what lies as an output does, by columns, is asked for as a view."""
    waiting, seen = list(call.users), set()
    while waiting:
        user = waiting.pop()
        name = _name_of(user)
        if user.op == "call_method" and name in ("view", "view_as"):
            return True
        is_kept = name not in _ANEW
        if user.op == "call_module":
            is_kept = type(parent.get_submodule(name)).__module__ in _ELEMENTWISE
        if is_kept and user not in seen:
            seen.add(user)
            waiting += user.users
    return False


def _is_transposed(node: Any) -> bool:
    """Whether it is the transpose of the last two dimensions of three, as far as can be seen."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] == "mT"
    if node.op not in ("call_method", "call_function"):
        return False
    name, rest = _name_of(node), node.args[1:]
    found: Any = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest
    places = [place % 3 for place in found if isinstance(place, int)]
    if name in ("transpose", "swapaxes", "swapdims"):
        return sorted(places) == [1, 2]
    return name == "permute" and places == [0, 2, 1]
