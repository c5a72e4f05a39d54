"""Chains of layers whose norm and activation a forward calls: found, chosen, run and undone."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lokakern.conversion.convert import Conversion
from lokakern.conversion.tail_chains import TailSpan
from lokakern.nn import tail
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.crossed_forward import crossed_of, remove_crosses, set_crosses
from lokakern.nn.tail import Tail
from tests.support.chained_models import Given, Run, convert, rows
from tests.support.measurements import Book

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(Given):
    """Two layers with tails, in a forward that a test gives."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.wide, self.narrow = nn.Linear(512, 1024), nn.Linear(1024, 512)
        self.norm, self.relu = nn.LayerNorm(512), nn.ReLU()
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)


def by_modules(net: Any, x: Tensor) -> Tensor:
    return net.relu(net.norm(net.narrow(net.relu(net.wide(x)))))  # type: ignore[no-any-return]


def by_functions(net: Any, x: Tensor) -> Tensor:
    return torch.relu_(net.norm(net.narrow(F.relu(net.wide(x), inplace=True))))


def apart(net: Any, x: Tensor) -> Tensor:
    return net.relu(net.norm(net.narrow(net.relu(net.wide(x)) * 1.0)))  # type: ignore[no-any-return]


def in_a_loop(net: Any, x: Tensor) -> Tensor:
    for layer, behind in ((net.wide, [net.relu]), (net.narrow, [net.norm, net.relu])):
        x = layer(x)
        for each in behind:
            x = each(x)
    return x


def in_a_residual(net: Any, x: Tensor) -> Tensor:
    y = net.wide(x).relu()
    return x + net.relu(net.norm(net.narrow(y))) * 2.0


def made(run: Run = by_modules, kind: type[Net] = Net) -> Net:
    return kind(run).bfloat16().eval().requires_grad_(False)


def chains_of(handle: Conversion) -> list[str]:
    return [
        " ".join(span.sites_of(chain)) for span in handle.spans
        if isinstance(span, TailSpan) for chain in span.plan.chains
    ]  # fmt: skip


BOTH = ["wide narrow"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a chain ran it."""
    found: list[bool] = []
    call_parts, call_again = tail.call_parts, tail.call_again

    def called(*args: Any, **options: Any) -> Tensor | None:
        y = call_parts(*args, **options)
        found.append(y is not None)
        return y

    def again(*args: Any, **options: Any) -> tuple[Tensor | None, int]:
        y, end = call_again(*args, **options)
        if y is not None:
            found.append(True)
        return y, end

    monkeypatch.setattr(tail, "call_parts", called)
    monkeypatch.setattr(tail, "call_again", again)
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize(
    ("run", "chains"),
    [
        (by_modules, BOTH), (by_functions, BOTH), (in_a_residual, BOTH), (in_a_loop, BOTH),
        (apart, ["wide", "narrow"]),
    ],
)  # fmt: skip
def test_tails_run_as_chains_in_eager_and_compiled_calls(
    run: Run, chains: list[str], chain_book: Book, ran: list[bool]
) -> None:
    model, x = made(run), rows()
    before = model(x.clone())
    handle = convert(model, 0.06)
    assert chains_of(handle) == chains
    words = "chain of 1 layer (1024" if run is apart else "chain of 2 layers (1024"
    assert handle.explain("wide").count(words) == 1
    eager = model(x.clone())
    all_ran = [True] * len(chains)
    assert ran == all_ran and 0 < error(eager, before) < 0.1
    assert torch.equal(model(x.clone()), eager) and ran == 2 * all_ran
    ran.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x.clone()), eager) and ran == all_ran
    ran.clear()
    model(rows(32)), model(rows(32))  # nothing was measured there
    assert not ran
    handle.undo()
    assert torch.equal(model(x.clone()), before) and "forward" not in vars(model)


def test_the_modules_run_where_a_chain_does_not_hold(chain_book: Book, ran: list[bool]) -> None:
    model, x = made(), rows()
    convert(model, 0.06)
    chained = model(x)
    ran.clear()
    seen: list[nn.Module] = []
    for module in (model.wide, model.norm, model.relu):
        hook = module.register_forward_hook(lambda module, *_: seen.append(module))
        model(x)
        hook.remove()
        assert module in seen
    model.norm.weight.requires_grad_(True)
    assert model(x).requires_grad
    model.norm.weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    model.norm.eps = 1.0
    assert error(model(x), chained) > 0.01
    model.norm.eps = 1e-5
    ran.clear()
    assert torch.equal(model(x), chained) and ran == [True]
    model.norm.weight.fill_(2.0)  # read in each call
    assert error(model(x), chained) > 0.1


def test_a_norm_of_blocks_is_a_tail(chain_book: Book) -> None:
    model = made()
    model.norm = BlockRMSNorm(512, 128)  # type: ignore[assignment]
    handle = convert(model, 0.06)
    spans = {span.sites[0]: span for span in handle.spans}
    assert spans["wide"].found[1].layer.epilogue == "bias+block_rms(128)+relu"
    assert chains_of(handle) == ["wide"]  # of blocks nothing was measured


def test_other_calls_are_no_tails(chain_book: Book) -> None:
    def twice(net: Any, x: Tensor) -> Tensor:
        return F.relu(net.wide(x)) + net.relu(net.wide(2 * x))

    def read(net: Any, x: Tensor) -> Tensor:
        y = net.wide(x)
        return F.relu(y) + y

    def other(net: Any, x: Tensor) -> Tensor:
        return F.elu(net.wide(x))

    def again(net: Any, x: Tensor) -> Tensor:
        x = F.relu(net.wide(x))
        x = F.relu(net.narrow(x) + 0.0)
        return F.relu(net.wide(x))  # with one tail, at two places

    handle = convert(made(again), 0.06)
    assert chains_of(handle) == ["wide"]
    handle.undo()
    for run in (twice, read, other):
        handle = convert(made(run), 0.06)
        assert "wide" not in chains_of(handle), run.__name__
        handle.undo()
    assert not chains_of(convert(made(), 0.06, chains=False))


def test_copies_and_files_keep_chains_and_changes_end_them(
    chain_book: Book, ran: list[bool]
) -> None:
    model, x = made(by_functions), rows()
    convert(model, 0.06)
    y = model(x.clone())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model), loaded):
        ran.clear()
        assert torch.equal(other(x.clone()), y) and ran == [True]
    ran.clear()
    model.norm = nn.LayerNorm(512, dtype=torch.bfloat16)
    model(x.clone())
    assert not ran  # its own forward runs


@pytest.mark.parametrize("run", [by_modules, apart])
def test_tuning_turns_chains_off_in_a_forward_that_stays(
    run: Run, chain_book: Book, ran: list[bool]
) -> None:
    model, x = made(run), rows()
    handle = convert(model, 0.06)
    forward = crossed_of(model)
    off = [("wide",)] if run is apart else [("wide", "narrow")]
    handle.use_routes({}, off_chains=off, keep_classes=True)
    model(x)
    assert ran == [True] * (run is apart) and crossed_of(model) is forward
    assert "tuning, or a limit of the loss, gave it up" in handle.explain("wide")
    handle.use_routes({}, off_chains=[], keep_classes=True)
    ran.clear()
    model(x)
    assert ran == [True] * (1 + (run is apart))


def test_what_is_written_between_keeps_layers_apart(chain_book: Book) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        seen = x * 1.0
        y = net.relu(net.wide(x))
        seen.add_(1.0)
        return net.relu(net.norm(net.narrow(y))) + seen

    assert chains_of(convert(made(run), 0.06)) == ["wide", "narrow"]


def test_rows_of_nothing_and_what_is_not_measured_is_told(chain_book: Book) -> None:
    model = made()
    model.wide, model.narrow = nn.Linear(512, 96), nn.Linear(96, 512)
    handle = convert(model.bfloat16(), 0.06)
    assert not chains_of(handle)
    assert "no chain: not measured" in handle.explain("narrow")
    assert model(rows(0)).shape == (0, 512)


def test_layers_drop_their_own_weights_beside_one_that_was_replaced(chain_book: Book) -> None:
    model = made()
    convert(model, 0.06)
    (found,) = crossed_of(model).tails  # type: ignore[union-attr]
    children = dict(model.named_children())
    assert found.layers(children) == [model.wide, model.narrow]
    assert Tail(("wide",), "", "").layers(children) == []
    chain = found.chain.replace("|row,", "|tensor,", 1)  # of the first layer
    set_crosses(model, (), "other", [found._replace(chain=chain)])
    narrow: Any = model.narrow
    assert narrow._chain_weights[-1] == ("other", "row")
    model.wide = nn.Linear(512, 1024)
    remove_crosses(model, "other")
    assert "other" not in dict(narrow._chain_weights)


class InDict(nn.Module):
    """Its layers are in a dict alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: getattr(made(), name) for name in ("wide", "narrow")})

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers["narrow"](F.relu(self.layers["wide"](x))))


def test_layers_of_a_dict_are_found(chain_book: Book, ran: list[bool]) -> None:
    model, x = InDict().eval(), rows()
    assert chains_of(convert(model, 0.06)) == ["layers.wide"]
    model(x)
    assert ran == [True]
    model.layers["wide"] = nn.Linear(512, 1024, dtype=torch.bfloat16)
    model(x)
    assert ran == [True]


def test_another_forward_of_the_class_runs(
    chain_book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(Net):
        def forward(self, x: Tensor) -> Tensor:
            return by_modules(self, x)

    model, x = made(kind=Plain), rows()
    del model.run  # nothing but children is compared in each call
    convert(model, 0.06)
    assert not torch.equal(model(x), x * 2)
    monkeypatch.setattr(Plain, "forward", lambda self, x: x * 2)
    assert torch.equal(model(x), x * 2)
