"""Chains across modules with forwards of their own."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lokakern import numerics
from lokakern.nn.crossed_forward import crossed_of
from tests.conversion.test_tuned_chains import kept, tuned
from tests.support.chained_models import (
    Apart,
    Given,
    Run,
    chains_of,
    convert,
    is_chained,
    rows,
    tower,
)
from tests.support.conversions import H200
from tests.support.measurements import Book

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Wide(nn.Module):
    activate = staticmethod(torch.relu)

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.factor = nn.Linear(512, 1024), 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.scaled(self.fc(x))
        return self.activate(y)  # type: ignore[no-any-return]

    def scaled(self, y: Tensor) -> Tensor:
        return y if self.factor == 1 else y * self.factor


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(1024, 512), nn.LayerNorm(512), nn.Dropout()

    def forward(self, x: Tensor, *, is_on: bool = True) -> Tensor:
        y = self.norm(self.fc(x))
        return self.clamp(self.drop(torch.relu(y))) if is_on else y

    @classmethod
    def clamp(cls, y: Tensor) -> Tensor:
        return y


class Row(nn.Sequential):
    """A sequence of a user's class."""


class Net(Given):
    def __init__(self, run: Run, make: Callable[..., nn.Module] = nn.ModuleList) -> None:
        super().__init__(run)
        wide, narrow = Wide(), Narrow()
        blocks = make([wide, narrow]) if make is nn.ModuleList else make(wide, narrow)
        self.blocks: Any = blocks


class Normed(nn.Module):
    """A norm behind a layer of another forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Apart(nn.Linear(1024, 512)), nn.LayerNorm(512)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.inner(x)))


def in_a_loop(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x


def at_once(net: Any, x: Tensor) -> Tensor:
    return net.blocks(x)  # type: ignore[no-any-return]


def usual(model: nn.Module) -> Any:
    return model.bfloat16().eval().requires_grad_(False)


def made() -> Any:
    return usual(Net(in_a_loop))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return usual(make())  # type: ignore[no-any-return]


def count_chains(call: Callable[[Tensor], object]) -> int:
    with torch.no_grad(), torch.profiler.profile() as profile:
        call(rows())
    return sum(event.name == "lokakern::routed_chain" for event in profile.events())


def holders(model: nn.Module) -> list[str]:
    """Names of the modules whose forward holds others."""
    every = {name: crossed_of(module) for name, module in model.named_modules()}
    return [name for name, x in every.items() if x is not None and x.settings[-1].inlined]


def are_near(y: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by the errors of FP8 alone."""
    return numerics.measure_errors(y, expected.double()).row_err < 0.1


MODELS: dict[str, tuple[Callable[[], nn.Module], str, list[str]]] = {
    "loop": (lambda: Net(in_a_loop), "blocks.0.fc blocks.1.fc", [""]),
    "sequence": (lambda: Net(at_once, nn.Sequential), "blocks.0.fc blocks.1.fc", ["blocks"]),
    "row": (lambda: Net(at_once, Row), "blocks.0.fc blocks.1.fc", ["blocks"]),
    "alone": (lambda: nn.Sequential(Wide(), Narrow()), "0.fc 1.fc", [""]),
    "deep": (
        lambda: nn.Sequential(nn.Sequential(Apart(Wide())), nn.Identity(), Apart(Apart(Narrow()))),
        "0.0.layer.fc 2.layer.layer.fc", [""],
    ),
    "of-layers": (
        lambda: nn.Sequential(Apart(nn.Linear(512, 1024)), nn.ReLU(), Narrow()),
        "0.layer 2.fc", [""],
    ),
    "block-first": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(512, 1024), nn.ReLU()), Narrow()),
        "0.0 1.fc", [""],
    ),
    "inner": (lambda: Apart(nn.Sequential(Wide(), Narrow())), "layer.0.fc layer.1.fc", ["layer"]),
    "row-of-layers": (lambda: Row(*tower()), "0 2", []),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(every=3)
def test_a_chain_crosses_forwards(name: str, chain_book: Book) -> None:
    make, chain, where = MODELS[name]
    model, x = seeded(make), rows()
    plain, exact = model(x), copy.deepcopy(model).double()(x.double())
    few = model(rows(100))
    handle = convert(model, 0.06)
    assert chains_of(handle) == [chain] and holders(model) == where
    assert handle.explain().count("chain of 2 layers") == 1
    y = model(x)
    assert is_chained(model) and not torch.equal(y, plain)
    assert numerics.measure_errors(y, exact).row_err < 0.09
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    assert is_chained(compiled) and torch.equal(compiled(x), y)
    assert torch.equal(model(rows(100)), few)
    assert not is_chained(model, 100) and not is_chained(compiled, 100)
    handle.undo()
    assert torch.equal(model(x), plain)
    assert all("forward" not in vars(module) for module in model.modules())


def test_norms_behind_layers_of_other_forwards_are_theirs(chain_book: Book) -> None:
    model, x = seeded(Normed), torch.cat([rows(), -rows()], 1)
    plain = model(x)
    assert chains_of(convert(model, 0.06)) == ["inner.layer"] and holders(model) == [""]
    assert are_near(model(x), plain) and not torch.equal(model(x), plain)


class Stage(nn.Module):
    """Two chains, with a function between them that no kernel has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Wide(), Narrow(), Wide()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(self.a(x))))  # type: ignore[no-any-return]


def test_chains_within_forwards_that_another_one_holds_stay(chain_book: Book) -> None:
    model = seeded(lambda: nn.Sequential(Stage(), Narrow()))
    handle = convert(model, 0.06)
    assert sorted(chains_of(handle)) == ["0.a.fc 0.b.fc", "0.c.fc 1.fc"]
    assert count_chains(model) == 2 and holders(model) == ["", "0"]


def test_blocks_keep_their_chains_where_the_outer_forward_does_not_run(chain_book: Book) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Wide(), Narrow()

        def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
            y: Tensor = self.b(self.a(x))
            return y if scale is None else y * scale

        def encode(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))  # type: ignore[no-any-return]

    model: Any = seeded(Scaled)
    handle = convert(model, 0.06)
    assert chains_of(handle) == ["a.fc b.fc"] and holders(model) == [""]
    calls = (model, lambda x: model(x, 2.0), model.encode, model.a)
    assert [count_chains(call) for call in calls] == [1, 2, 2, 1]
    model.a.register_forward_hook(lambda *_: None)
    assert count_chains(model) == 2
    model.a._forward_hooks.clear()
    handle.use_routes({}, off_chains=[("a.fc", "b.fc")])
    assert [count_chains(call) for call in calls] == [0, 0, 0, 0]


def test_sequences_in_one_that_hands_values_on_have_chains(chain_book: Book) -> None:
    blocks = lambda: nn.Sequential(Wide(), Narrow())  # noqa: E731
    model = seeded(lambda: nn.Sequential(blocks(), nn.LayerNorm(512), nn.Linear(512, 16)))
    assert chains_of(convert(model, 0.06)) == ["0.0.fc 0.1.fc"]


# --- changes

Change = Callable[[Any], object]


def replace_a_layer(net: Any) -> None:
    net.blocks[1].fc = nn.Linear(1024, 512).bfloat16()


def replace_a_norm(net: Any) -> None:
    net.blocks[1].norm = nn.LayerNorm(512, eps=1.0).bfloat16()


def replace_a_block(net: Any) -> None:
    net.blocks[0] = seeded(lambda: nn.Sequential(nn.Linear(512, 1024), nn.Tanh()))


def add_a_block(net: Any) -> None:
    net.blocks.append(nn.Tanh())


def set_a_number(net: Any) -> None:
    net.blocks[0].factor = -1


def set_a_method(net: Any) -> None:
    net.blocks[0].scaled = torch.neg


def set_a_function(net: Any) -> None:
    net.blocks[0].activate = torch.tanh


def set_a_forward(net: Any) -> None:
    net.blocks[1].forward = lambda x: torch.tanh(x[:, :512])


def change_the_class(net: Any) -> None:
    class Other(Narrow):
        def forward(self, x: Tensor, *, is_on: bool = True) -> Tensor:
            return 2 * super().forward(x, is_on=is_on)

    net.blocks[1].__class__ = Other


def call_otherwise(net: Any) -> None:
    class Twice(Narrow):
        def __call__(self, *given: Any) -> Any:
            return 2 * super().__call__(*given)

    net.blocks[1].__class__ = Twice


def set_a_class_method(net: Any) -> None:
    net.blocks[1].clamp = torch.tanh


def hook_a_block(net: Any) -> None:
    net.blocks[1].register_forward_hook(lambda *given: 2 * given[2])


def hook_before_a_block(net: Any) -> None:
    net.blocks[1].register_forward_pre_hook(lambda _, given: (given[0].flip(1),))


CHANGES = [
    replace_a_layer, replace_a_norm, replace_a_block, add_a_block, set_a_number, set_a_method,
    set_a_function, set_a_forward, set_a_class_method, change_the_class, call_otherwise,
    hook_a_block, hook_before_a_block,
]  # fmt: skip


@pytest.mark.parametrize("make", [nn.ModuleList, nn.Sequential, Row], ids=lambda x: x.__name__)
@pytest.mark.parametrize("change", CHANGES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.sample(every=6)
def test_the_own_forwards_run_after_a_change(
    change: Change, make: Any, is_compiled: bool, chain_book: Book
) -> None:
    model = usual(Net(in_a_loop if make is nn.ModuleList else at_once, make))
    plain, x = copy.deepcopy(model), rows()
    convert(model, 0.06)
    call: Any = model
    if is_compiled:
        call = torch.compile(model, backend="eager", dynamic=False)
    y = call(x)
    assert is_chained(call)
    for each in (model, plain):
        torch.manual_seed(1)
        change(each)
    if "hook" in change.__name__:  # compiled code does not notice a new one, whoever called it
        torch._dynamo.reset()
    assert are_near(call(x), plain(x)) and not are_near(y, plain(x))


def test_a_compiled_block_is_called(chain_book: Book) -> None:
    model, x, graphs = made(), rows(), []
    convert(model, 0.06)
    y = model(x)
    model.blocks[1].compile(backend=lambda graph, _: graphs.append(graph) or graph)
    assert torch.allclose(model(x), y, atol=0.5) and graphs


def test_functions_of_a_class_are_compared(
    chain_book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = made(), rows()
    plain = copy.deepcopy(model)
    convert(model, 0.06)
    model(x)
    y = model(x)
    changes = {
        (Wide, "activate"): staticmethod(torch.tanh),
        (Narrow, "clamp"): classmethod(lambda _, y: 2 * y),
        (Narrow, "forward"): lambda self, x: self.fc(x),
        (Narrow, "__call__"): lambda self, x: 2 * nn.Module.__call__(self, x),
    }
    for where, change in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(*where, change)
            assert are_near(model(x), plain(x)) and not are_near(y, plain(x))
        assert count_chains(model) == 1


def test_hooks_of_all_modules_are_called(chain_book: Book) -> None:
    model, x, seen = made(), rows(), list[nn.Module]()
    convert(model, 0.06)
    model(x)
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        model(x)
    finally:
        hook.remove()
    assert {*model.modules()} - {*seen} == {model.blocks}
    assert is_chained(model)


def test_hooks_of_all_backward_passes_are_called(chain_book: Book) -> None:
    model, x, seen = made(), rows().requires_grad_(), list[nn.Module]()
    convert(model, 0.06)
    model(x)
    register = nn.modules.module.register_module_full_backward_hook
    hook = register(lambda module, *_: seen.append(module))
    try:
        model(x).float().sum().backward()
    finally:
        hook.remove()
    assert {*model.blocks} <= {*seen}


def test_dropout_in_training_draws_as_before(chain_book: Book) -> None:
    model, x = seeded(lambda: nn.Sequential(Wide(), nn.Dropout(), Narrow())), rows()
    plain: Any = copy.deepcopy(model)
    handle = convert(model, 0.06)
    assert chains_of(handle) == ["0.fc 2.fc"]
    model(x)
    for some in (lambda net: net, lambda net: net[1]):
        found = []
        for each in (model, plain):
            some(each).train()
            torch.manual_seed(3)
            found.append(each(x))
            each.eval()
        assert are_near(*found)
    assert count_chains(model) == 1


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("change", [change_the_class, set_a_number, set_a_function, replace_a_norm])
def test_copies_of_a_changed_model_run_their_own_forwards(
    change: Change, is_file: bool, chain_book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = made(), rows()
    convert(model, 0.06)
    model(x)
    if change is change_the_class:
        monkeypatch.setattr(Narrow, "forward", lambda self, x: self.fc(x))
    elif change is set_a_function:
        monkeypatch.setattr(Wide, "activate", staticmethod(torch.tanh))
    else:
        change(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False) if is_file else copy.deepcopy(model)
    assert torch.equal(other(x), model(x)) and count_chains(other) == count_chains(model)


def scaled(by: float) -> Callable[..., Any]:
    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(self: Any, x: Tensor, shift: float = 0.0) -> Tensor:
            return by * forward(self, x) + shift  # type: ignore[no-any-return]

        return run

    return decorate


class Above(Narrow):
    """Its forward calls that of its base."""

    @scaled(1.0)
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def with_default(self: Any, x: Tensor, shift: float = 1.0) -> Tensor:
    return Narrow.forward(self, x) + shift


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    ("where", "name", "change"),
    [
        (Narrow, "forward", lambda self, x: self.fc(x)),
        (Narrow, "clamp", classmethod(lambda _, y: 2 * y)),
        (Above, "forward", scaled(2.0)(Above.forward.__wrapped__)),  # type: ignore[attr-defined]
        (Above, "forward", with_default),
        (Wide, "activate", staticmethod(torch.tanh)),
    ],
    ids=["body", "method", "closure", "default", "function"],
)
@pytest.mark.parametrize("is_inlined", [True, False])
def test_files_of_other_classes_run_these(
    where: Any, name: str, change: Any, is_inlined: bool, chain_book: Book,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As of a program whose code was edited since."""
    model: Any = seeded(lambda: nn.Sequential(Wide(), Above()))
    plain, x, file = copy.deepcopy(model), rows(), io.BytesIO()
    handle = convert(model if is_inlined else model[1], 0.06)
    if not is_inlined:
        convert(model[0], 0.06)
    assert count_chains(model) == (1 if is_inlined else 2), handle.explain()
    y = model(x)
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), y)
    monkeypatch.setattr(where, name, change)
    file.seek(0)
    assert are_near(torch.load(file, weights_only=False)(x), plain(x))
    assert not are_near(y, plain(x))


class Two(nn.Module):
    """Of two modes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(512, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(torch.relu(self.fc(x)), 0.5, self.training)


def test_forwards_of_two_modes_are_those_of_each(chain_book: Book) -> None:
    model, x = seeded(lambda: nn.Sequential(Two(), Narrow())), rows()
    plain = copy.deepcopy(model)
    convert(model, 0.06)
    assert is_chained(model)
    for some in (lambda net: net, lambda net: net[0], lambda net: net[1]):
        found = []
        for each in (model, plain):
            some(each).train()
            torch.manual_seed(3)
            found.append(each(x))
            each.eval()
        assert are_near(*found)


# --- what stays


def test_modules_that_are_called_twice_stay(chain_book: Book) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        return in_a_loop(net, x) + net.blocks[1](net.blocks[0](2 * x))

    model = usual(Net(run))
    assert chains_of(convert(model, 0.06)) == ["blocks.0.fc", "blocks.1.fc"]
    assert not holders(model)


class Branching(Narrow):
    def forward(self, x: Tensor, *, is_on: bool = True) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Multiplying(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(512))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.matrix)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def with_forward(module: Any) -> nn.Module:
    module.forward = functional.relu
    return module  # type: ignore[no-any-return]


def compiled_alone(module: Any) -> nn.Module:
    module.compile(backend="eager")
    return module  # type: ignore[no-any-return]


class Disabled(Wide):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class LooksUp(Wide):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


class Negating(Wide):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Negated.apply(x))  # type: ignore[no-untyped-call]


class Reading(Wide):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if "shift" not in vars(self) else x + self.shift)


class Calls(Wide):
    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (Wide(), Branching()), lambda: (Multiplying(), Narrow()),
        lambda: (hooked(Wide()), Narrow()), lambda: (Wide(), with_forward(Narrow())),
        lambda: (compiled_alone(Wide()), Narrow()), lambda: (Disabled(), Narrow()),
        lambda: (LooksUp(), Narrow()), lambda: (Calls(), Narrow()),
        lambda: (Negating(), Narrow()), lambda: (Reading(), Narrow()),
        lambda: (nn.Linear(512, 1024), nn.ReLU(), Narrow()),  # the sequence hands values on
    ],
    ids=["branch", "matrix", "hook", "forward", "compiled", "disabled", "lookup", "call",
         "function", "vars", "open"],
)  # fmt: skip
def test_other_modules_stay(make: Any, chain_book: Book) -> None:
    model = seeded(lambda: nn.Sequential(*make()))
    plain, x = copy.deepcopy(model), rows()
    handle = convert(model, 0.06)
    assert not holders(model) and all(" " not in chain for chain in chains_of(handle))
    for chain in chains_of(handle):  # of the others
        assert chain in ("0.fc", "0", "1.fc", "2.fc")
    assert numerics.measure_errors(model(x), plain.double()(x.double())).row_err < 0.09


def test_a_module_of_a_user_between_ends_a_chain_and_no_other(chain_book: Book) -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Wide(), Narrow()
            self.other, self.more = Apart(nn.Tanh()), Apart(nn.Linear(512, 3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.last(self.first(x))
            z = self.other(x)
            return self.more(y) + z[:, :3]  # type: ignore[no-any-return]

    model = seeded(Between)
    assert chains_of(convert(model, 0.06)) == ["first.fc last.fc"]


def test_training_calls_modules_as_before(chain_book: Book) -> None:
    model = made()
    convert(model, 0.06, inference=False)
    assert not holders(model)


class Constants(Wide):
    """Reads what a class holds, which compilers make anew."""

    sizes, part, kept = (1, [2]), slice(None), functools.partial(torch.add, alpha=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activate(self.fc(x[self.part]))
        return y if self.sizes[1] else self.kept(y, y)  # type: ignore[no-any-return]


def test_constants_of_classes_are_read_in_compiled_code(chain_book: Book) -> None:
    model, x = seeded(lambda: nn.Sequential(Constants(), Narrow())), rows()
    assert chains_of(convert(model, 0.06)) == ["0.fc 1.fc"] and count_chains(model) == 1
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_have_the_chain(strict: bool, chain_book: Book) -> None:
    model, x = seeded(lambda: nn.Sequential(Wide(), Narrow())), rows()
    convert(model, 0.06)
    found = torch.export.export(model, (x,), strict=strict)
    assert torch.equal(found.module()(x), model(x))


class Attached(Narrow):
    """Has a property that raises, as modules of training frameworks do."""

    @property
    def trainer(self) -> Any:
        raise RuntimeError("not attached")

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        with contextlib.suppress(RuntimeError):
            x = x * self.trainer.scale
        return super().forward(x)


@pytest.mark.parametrize("make", [Attached, lambda: nn.Sequential(Wide(), Attached())])
def test_properties_may_raise(make: Callable[[], nn.Module], chain_book: Book) -> None:
    assert len(chains_of(convert(seeded(make), 0.06))) == 1


def test_files_of_earlier_versions_keep_chains(chain_book: Book) -> None:
    model, x = made(), rows()
    convert(model, 0.06)
    y, crossed = model(x), crossed_of(model.blocks[0])
    assert crossed is not None
    state = crossed.__getstate__()
    del state["_code"], state["_is_stale"]
    state["_of_class"] = dict.fromkeys(state["_of_class"], "\0method")
    crossed.__setstate__(state)
    assert crossed.is_as_traced and torch.equal(model(x), y)


# --- conversions


def test_copies_files_and_refreshes_keep_chains(chain_book: Book) -> None:
    model, x = made(), rows()
    handle = convert(model, 0.06)
    y, file = model(x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert is_chained(other) and torch.equal(other(x), y)
        other.blocks[1].register_forward_hook(lambda *given: 2 * given[2])
        assert are_near(other(x), 2 * y)
    site = "blocks.0.fc to blocks.1.fc/chain"
    assert handle.refresh(0.01) == [site] and not is_chained(model)
    assert handle.refresh(0.06) == [site]
    assert is_chained(model) and torch.equal(model(x), y)


def test_weights_are_read_anew(chain_book: Book) -> None:
    model, other, x = made(), made(), rows()
    with torch.no_grad():
        other.blocks[1].norm.weight.mul_(2)
        other.blocks[0].fc.weight.mul_(3)
    convert(model, 0.06)
    model(x)
    model.load_state_dict(other.state_dict())
    convert(other, 0.06)
    assert is_chained(model) and torch.equal(model(x), other(x))


@pytest.mark.parametrize("is_first", [True, False])
def test_conversions_of_a_block_and_of_all_can_be_undone_in_any_order(
    is_first: bool, chain_book: Book
) -> None:
    model, x = made(), rows()
    plain = model(x)
    both = [convert(model, 0.06), convert(model.blocks[1], 0.06)]
    y = model(x)
    assert holders(model) == [""] and count_chains(model) == 1 and not torch.equal(y, plain)
    both.pop(0 if is_first else 1).undo()
    assert holders(model) == ([] if is_first else [""]) and count_chains(model) == 1
    assert torch.equal(model(x), y) is not is_first
    both[0].undo()
    assert torch.equal(model(x), plain) and count_chains(model) == 0


def test_a_loss_is_limited_after_a_block_was_removed(chain_book: Book) -> None:
    model, x = seeded(lambda: nn.Sequential(Wide(), Narrow())), rows()
    handle = convert(model, 0.06)
    del model[1]  # type: ignore[attr-defined]
    found = handle.limit_loss(lambda x: model(x).float().square().mean(), [x] * 8, relative=0.5)
    assert found.relative == 0.5


def test_tuning_turns_the_chain_off(chain_book: Book) -> None:
    model = made()
    found, _, _ = tuned(model, {("blocks.0.fc to blocks.1.fc", "chain"): -30.0})
    assert kept(found) == {("chain", "blocks.0.fc to blocks.1.fc"): False}
    assert not is_chained(model)


def test_a_suite_lists_layers_with_norms_of_other_forwards(book: Book) -> None:
    handle = convert(seeded(Normed), 0.06)
    assert '"bias+layer+affine+relu"' in handle.suite([512])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(2048, 2048), nn.LayerNorm(2048)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.fc(x)))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["eager", "compiled", "graph"])
def test_blocks_have_the_chain_and_bits_of_one_sequence(where: str) -> None:
    if torch.cuda.get_device_name() != H200:
        pytest.skip("times are those of the H200")
    blocks = seeded(lambda: nn.Sequential(*(Layer() for _ in range(4)))).cuda()
    flat = nn.Sequential(*(part for b in blocks for part in (b.fc, b.norm, nn.ReLU())))
    flat = copy.deepcopy(flat)
    found = [convert(m, 0.06, regime="graph-cold") for m in (blocks, flat)]
    chains = [[c.text for s in h.spans for c in s.plan.chains] for h in found]
    assert chains[0] == chains[1] and len(chains[0]) == 1
    x = torch.randn(8192, 2048, device="cuda").bfloat16()
    with torch.no_grad(), torch.profiler.profile() as profile:
        blocks(x)
    assert any(event.name == "lokakern::routed_chain" for event in profile.events())
    with torch.no_grad():
        run: list[Callable[[Tensor], Tensor]] = [blocks, flat]
        if where == "compiled":
            run = [torch.compile(model, fullgraph=True) for model in run]
        y, expected = (call(x) for call in run)
        if where == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = blocks(x)
            graph.replay()
        assert torch.equal(y, expected)
