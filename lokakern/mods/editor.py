"""`apply`: changes a model mod by mod, all or nothing, and reports what changed where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import nn

from lokakern.errors import FormatError, UnsupportedError
from lokakern.nn.module_scan import ModuleFilter, named_modules
from lokakern.nn.torch_owners import fast_paths, set_fast_paths


class Mod(ABC):
    """One reusable change to a model.

    Attributes:
        is_exact: Whether the model computes the same, but for the order of sums.
    """

    is_exact: ClassVar[bool] = False

    @abstractmethod
    def edit(self, editor: Editor) -> None:
        """Change what the editor offers, through its methods only."""

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True, slots=True)
class Change:
    """What one mod did at one place, or why it did nothing there.

    Attributes:
        mod: Its name.
        site: Name of the module.
        before: What was there.
        after: What is there now; the same where nothing changed.
        is_exact: Whether the model computes the same there, but for the order of sums.
        effect: What changes in what is computed, or why nothing was done.
        is_done: Whether something was done.
    """

    mod: str
    site: str
    before: str
    after: str
    is_exact: bool
    effect: str
    is_done: bool = True


class Editor:
    """Changes modules, and remembers how to take every change back."""

    def __init__(self, model: nn.Module, accepts: ModuleFilter | None) -> None:
        self.model = model
        self.changes: list[Change] = []
        self._accepts = accepts
        self._undo: list[Callable[[], object]] = []
        self._set: dict[tuple[int, str], tuple[Any, object]] = {}  # owner and value, as set last
        self._owners = fast_paths(model)

    def modules(self, *kinds: type[nn.Module]) -> list[tuple[str, nn.Module]]:
        """Modules of some kinds, or of all, that the filter accepts, by name; as they are now."""

        def is_wanted(module: nn.Module, name: str) -> bool:
            is_kind = not kinds or isinstance(module, kinds)
            return is_kind and (self._accepts is None or self._accepts(module, name))

        return list(named_modules(self.model, is_wanted))

    def accepts(self, module: nn.Module, name: str) -> bool:
        """Whether the filter does."""
        return self._accepts is None or self._accepts(module, name)

    def do(self, act: Callable[[], object], undo: Callable[[], object]) -> None:
        """Change something that `undo` takes back, whatever else was changed since."""
        self._undo.append(undo)  # before: what fails halfway is taken back as well
        act()

    def set(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute: a parameter, a child, the class, or a plain one."""
        known = _value(owner, name)
        self._set[id(owner), name] = owner, value
        if known is _ABSENT:
            self.do(lambda: setattr(owner, name, value), lambda: delattr(owner, name))
        else:
            self.do(lambda: setattr(owner, name, value), lambda: setattr(owner, name, known))

    def replace(self, module: nn.Module, new: nn.Module) -> bool:
        """Put another module in its place, wherever it stands; False where it is the model."""
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
        """Report what was left alone."""
        self.changes.append(Change(str(mod), site, what, what, True, why, is_done=False))

    def finish(self) -> None:
        """See that modules of torch call their children where these are not what they were."""
        set_fast_paths(self._owners)

    def undo(self) -> None:
        """Take everything back, the last first."""
        self._set.clear()
        while self._undo:
            self._undo.pop()()
        self.finish()

    def check_undo(self) -> None:
        """Raise if an attribute was set anew since: what it was then would be lost.

        Raises:
            UnsupportedError: With the names of such attributes.
        """
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


_ABSENT = object()


def _value(owner: Any, name: str) -> object:
    """What an attribute is of an object itself, and not of its class."""
    known = type(owner) if name == "__class__" else vars(owner).get(name, _ABSENT)
    if known is _ABSENT and isinstance(owner, nn.Module):
        for kept in (owner._parameters, owner._modules, owner._buffers):
            known = kept.get(name, known)
    return known


class Report(Sequence[Change]):
    """What mods changed where: a sequence of `Change`, in order."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._changes = tuple(editor.changes)

    def __getitem__(self, place: Any) -> Any:
        return self._changes[place]

    def __len__(self) -> int:
        return len(self._changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self._changes)

    @property
    def changed(self) -> tuple[Change, ...]:
        """Changes that were done."""
        return tuple(change for change in self._changes if change.is_done)

    @property
    def is_exact(self) -> bool:
        """Whether the model computes the same as before, but for the order of sums."""
        return all(change.is_exact for change in self._changes)

    def rows(self) -> list[dict[str, Any]]:
        """Plain data: one row for each change."""
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
        """Make the model what it was before, with the parameters it has now.

        Reports and conversions can be undone in any order, as long as no later one set the same
        attribute. A second call does nothing.

        Raises:
            UnsupportedError: One did; nothing is undone then.
        """
        self._editor.check_undo()
        self._editor.undo()

    def __repr__(self) -> str:
        done = len(self.changed)
        left = len(self._changes) - done
        return f"Report({done} changes" + (f", {left} left alone)" if left else ")")


def apply(model: nn.Module, mods: Sequence[Mod], *, filter: ModuleFilter | None = None) -> Report:
    """Change a model in place, mod after mod, each on what the one before left.

    Apply mods before an optimizer is made, because some take parameters away, and before
    `lokakern.convert`, DDP, `fully_shard` and torch.compile.

    Args:
        model: Any module.
        mods: In order.
        filter: ``(module, name) -> bool``, which modules may be changed; None: all.

    Returns:
        What changed where, and what was left alone and why.

    Raises:
        FormatError: One of ``mods`` is no mod.
        LokakernError: A mod cannot do what it was asked; then the model is as it was before.
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
