"""`apply`: changes a model mod by mod, all or nothing, and reports each change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import nn

from lokakern.errors import FormatError, UnsupportedError
from lokakern.nn.adoption import adopt, release, retake
from lokakern.nn.module_scan import ModuleFilter, named_modules
from lokakern.nn.torch_owners import fast_paths, set_fast_paths


class Mod(ABC):
    """A reusable change to a model; exact if only the order of sums may change."""

    is_exact: ClassVar[bool] = False

    @abstractmethod
    def edit(self, editor: Editor) -> None:
        """Change modules through the methods of an editor."""

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True, slots=True)
class Change:
    """A change that one mod made at one module, or the reason for none.

    ``is_exact``: the module computes the same, but for the order of sums. ``effect``: the change of
    the result, or the reason why nothing changed.
    """

    mod: str
    site: str
    before: str
    after: str
    is_exact: bool
    effect: str
    is_done: bool = True


class Editor:
    """Changes modules, and can undo every change."""

    def __init__(self, model: nn.Module, accepts: ModuleFilter | None) -> None:
        self.model = model
        self.changes: list[Change] = []
        self.accepts: ModuleFilter = accepts or (lambda _module, _name: True)
        self._undo: list[Callable[[], object]] = []
        self._set: dict[tuple[int, str], tuple[Any, object]] = {}  # owner and value, as set last
        self._owners = fast_paths(model)

    def modules(self, *kinds: type[nn.Module]) -> list[tuple[str, nn.Module]]:
        """Current modules of some kinds, or of all, that the filter accepts, with names."""

        def is_wanted(module: nn.Module, name: str) -> bool:
            return (not kinds or isinstance(module, kinds)) and self.accepts(module, name)

        return list(named_modules(self.model, is_wanted))

    def do(self, act: Callable[[], object], undo: Callable[[], object]) -> None:
        """Make a change that `undo` reverts, also after later changes."""
        self._undo.append(undo)  # first, so that a change that fails halfway is undone
        act()

    def set(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute: a parameter, a child, the class, or a plain one."""
        known = _value(owner, name)
        self._set[id(owner), name] = owner, value

        def undo() -> None:
            delattr(owner, name) if known is _ABSENT else setattr(owner, name, known)

        self.do(lambda: setattr(owner, name, value), undo)

    def set_of_linear(
        self, layer: Any, name: str, value: object, undo: Callable[[], object] = lambda: None
    ) -> None:
        """Set an attribute of a `Linear` beside its routes; an `nn.Linear` becomes one."""

        def end() -> None:
            undo()
            retake(layer)
            release(layer)

        self.do(lambda: adopt(layer), end)
        self.set(layer, name, value)
        layer.changed()

    def replace(self, module: nn.Module, new: nn.Module) -> bool:
        """Replace a module in all its places; False if it is the model."""
        places = [
            (parent, name)
            for parent in self.model.modules()
            for name, child in parent._modules.items()
            if child is module
        ]
        new.train(module.training)
        for parent, name in places:
            self.set(parent, name, new)
        return bool(places)

    def done(self, mod: Mod, site: str, before: str, after: str, effect: str,
             is_exact: bool | None = None) -> None:  # fmt: skip
        """Report a change."""
        exact = mod.is_exact if is_exact is None else is_exact
        self.changes.append(Change(str(mod), site, before, after, exact, effect))

    def left(self, mod: Mod, site: str, what: str, why: str) -> None:
        """Report a module that was not changed."""
        self.changes.append(Change(str(mod), site, what, what, True, why, is_done=False))

    def finish(self) -> None:
        """Make modules of torch call their changed children instead of a fast path."""
        set_fast_paths(self._owners)

    def undo(self) -> None:
        """Undo all changes, the last first."""
        self._set.clear()
        while self._undo:
            self._undo.pop()()
        self.finish()

    def check_undo(self) -> None:
        """Raise an UnsupportedError if undoing would overwrite a later change."""
        names = {id(module): name for name, module in self.model.named_modules()}
        found = [
            f"{attribute} of {names.get(id(owner)) or type(owner).__name__}"
            for (_, attribute), (owner, value) in self._set.items()
            if _value(owner, attribute) is not value
        ]
        if found:
            raise UnsupportedError(
                f"undo: {', '.join(found)} changed since these mods were applied; undo the later "
                "change first. Nothing was undone"
            )


def site_of(name: str, child: object) -> str:
    """Name of a child of a module."""
    return f"{name}.{child}" if name else str(child)


_ABSENT = object()


def _value(owner: Any, name: str) -> object:
    """An attribute of an object itself, not of its class."""
    known = type(owner) if name == "__class__" else vars(owner).get(name, _ABSENT)
    if known is _ABSENT and isinstance(owner, nn.Module):
        for kept in (owner._parameters, owner._modules, owner._buffers):
            known = kept.get(name, known)
    return known


class Report(Sequence[Change]):
    """The changes of some mods, in order."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._changes = tuple(editor.changes)

    def __getitem__(self, place: Any) -> Any:
        return self._changes[place]

    def __len__(self) -> int:
        return len(self._changes)

    @property
    def changed(self) -> tuple[Change, ...]:
        """The changes that were made."""
        return tuple(change for change in self._changes if change.is_done)

    @property
    def is_exact(self) -> bool:
        """Whether the model computes the same as before, except for the order of sums."""
        return all(change.is_exact for change in self._changes)

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each change."""
        return [asdict(change) for change in self._changes]

    def table(self) -> None:
        """Print a table."""
        from lokakern.render.terminal import print_rows

        rows = [
            {
                "mod": c.mod, "site": c.site, "before": c.before,
                "after": c.after if c.is_done else "as it was",
                "exact": c.is_exact if c.is_done else None, "effect": c.effect,
            }
            for c in self._changes
        ]  # fmt: skip
        print_rows(rows, "table", title=repr(self))

    def undo(self) -> None:
        """Restore the model, with its current parameters.

        Reports and conversions can be undone in any order, unless a later one set the same
        attribute. A second call does nothing.

        Raises:
            UnsupportedError: A later one did; nothing is undone.
        """
        self._editor.check_undo()
        self._editor.undo()

    def __repr__(self) -> str:
        done = len(self.changed)
        left = len(self._changes) - done
        return f"Report({done} changes" + (f", {left} left alone)" if left else ")")


def apply(model: nn.Module, mods: Sequence[Mod], *, filter: ModuleFilter | None = None) -> Report:
    """Change a model in place by mods, in order.

    Apply mods before creating an optimizer, because some remove parameters, and before
    `lokakern.convert`, DDP, `fully_shard` and torch.compile.

    Args:
        model: Any module.
        mods: The mods.
        filter: ``(module, name) -> bool``, which modules may be changed; None: all.

    Returns:
        All changes, and the modules left alone, with reasons.

    Raises:
        FormatError: One of ``mods`` is no mod.
        LokakernError: A mod failed; the model is unchanged.
    """
    given: Sequence[object] = mods
    for mod in given:
        if not isinstance(mod, Mod):
            hint = f"; make one: {mod.__name__}()" if isinstance(mod, type) else ""
            raise FormatError(f"mods.apply: {mod!r} is not a mod{hint}")
    editor = Editor(model, filter)
    try:
        for change in mods:
            change.edit(editor)
        editor.finish()
    except BaseException:
        editor.undo()
        raise
    return Report(editor)
