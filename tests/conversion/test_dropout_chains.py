"""Chains of forwards that pass over dropout and identities, and calls with active dropout."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lokakern import numerics
from lokakern.chain.candidates import Layer
from lokakern.nn.crossed_forward import crossed_of
from tests.support.chain_rows import WIDE, layer_rows
from tests.support.chained_models import Given, Run, chains_of, convert, is_chained, rows
from tests.support.measurements import BF16, Book, gemm, time

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PLAIN, FP8 = {512: 20.0, 2048: 60.0}, {512: 5.0, 2048: 15.0}
LAST = Layer(512, 1024, "bias+residual+layer+affine")
BOTH = ["wide narrow"]


class Net(Given):
    """Two layers of a feed-forward block in a forward that a test gives."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.wide, self.narrow = nn.Linear(512, 1024), nn.Linear(1024, 512)
        self.norm, self.relu, self.none = nn.LayerNorm(512), nn.ReLU(), nn.Identity()
        self.drop, self.last = nn.Dropout(0.5), nn.Dropout(0.5, inplace=True)
        self.other, self.rate = nn.Dropout(0.5), 0.5


def without(net: Any, x: Tensor) -> Tensor:
    return net.norm(x + net.narrow(net.relu(net.wide(x))))  # type: ignore[no-any-return]


def by_modules(net: Any, x: Tensor) -> Tensor:
    y = net.drop(net.narrow(net.drop(net.relu(net.wide(x)))))  # one of them is called twice
    return net.norm(x + net.last(y))  # which writes in place  # type: ignore[no-any-return]


def by_functions(net: Any, x: Tensor) -> Tensor:
    y = F.dropout(F.relu(net.wide(x)), net.rate, training=net.training)
    return net.norm(x + F.dropout(net.narrow(y), 0.5, net.training, True))  # type: ignore[no-any-return]


def of_nothing(net: Any, x: Tensor) -> Tensor:
    return net.norm(x + net.narrow(F.dropout(net.relu(net.wide(x)), 0.0)))  # type: ignore[no-any-return]


def everywhere(net: Any, x: Tensor) -> Tensor:
    y = net.none(net.drop(net.relu(net.none(net.wide(x)))))
    return net.norm(net.drop(net.narrow(y)) + x)  # type: ignore[no-any-return]


RUNS = [by_modules, by_functions, of_nothing, everywhere]


@pytest.fixture
def known(book: Book) -> Book:
    """Rows by which both layers are one chain."""
    found = [row for layer in (WIDE, LAST) for row in layer_rows(layer, PLAIN, FP8)]
    sizes = ((1024, 512), (512, 1024))
    found += [time(BF16, gemm(m, *x), us - 2) for m, us in PLAIN.items() for x in sizes]
    return book.write(*found)


def made(run: Run = by_modules) -> Net:
    return Net(run).bfloat16().eval().requires_grad_(False)


def seeded(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return model(x)


@pytest.mark.parametrize("run", RUNS)
def test_dropout_and_identities_are_passed_over(run: Run, known: Book) -> None:
    model, other, x = made(run), made(without), rows()
    plain, exact = model(x), copy.deepcopy(model).double()(x.double())
    handle = convert(model, 0.06)
    convert(other, 0.06)
    assert chains_of(handle) == BOTH
    eager = model(x)
    assert is_chained(model) and torch.equal(model(x), eager) and torch.equal(other(x), eager)
    assert 0 < numerics.measure_errors(eager, exact).row_err < 0.09
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    assert is_chained(compiled) and torch.equal(compiled(x), eager)
    assert not is_chained(model, 100) and not is_chained(compiled, 100)
    handle.undo()
    assert torch.equal(model(x), plain) and "forward" not in vars(model)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_training_draws_what_the_modules_draw(run: Run, is_compiled: bool, known: Book) -> None:
    model, x = made(run), rows()
    plain = copy.deepcopy(model)
    convert(model, 0.06)
    call: Any = model
    if is_compiled:
        call = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    chained = call(x)
    for each in (model, plain):
        each.train()
    if run is not of_nothing:
        assert torch.equal(seeded(call, x), seeded(plain, x)) and not is_chained(call)
    for each in (model, plain):
        each.requires_grad_(True)
        seeded(each, x).sum().backward()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad)
    model.eval().requires_grad_(False)
    assert torch.equal(call(x), chained) and is_chained(call)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_one_dropout_that_is_set_to_training(is_compiled: bool, known: Book) -> None:
    """As for samples of a prediction, and with p=0 then."""
    model, x = made(everywhere), rows()
    plain = copy.deepcopy(model)
    convert(model, 0.06)
    call: Any = model
    if is_compiled:
        call = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    chained = call(x)
    for each in (model, plain):
        each.drop.train()
    assert torch.equal(seeded(call, x), seeded(plain, x)) and not is_chained(call)
    for each in (model, plain):
        each.drop.p = 0.0
    assert torch.equal(call(x), plain(x)) and not is_chained(call)
    model.drop.eval()
    assert torch.equal(call(x), chained) and is_chained(call)


def test_the_order_of_two_dropouts_stays(known: Book) -> None:
    """The call of the chain is at the place of the sum, behind the other dropout."""

    def run(net: Any, x: Tensor) -> Tensor:
        y = net.drop(net.narrow(net.relu(net.wide(x))))
        return net.norm(y + net.other(x * 1.0))  # type: ignore[no-any-return]

    model, x = made(run), rows()
    plain = copy.deepcopy(model)
    assert chains_of(convert(model, 0.06)) == BOTH and is_chained(model)
    for each in (model, plain):
        each.train()
    assert torch.equal(seeded(model, x), seeded(plain, x))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", ["drop", "none"])
def test_hooks_and_other_modules_run_the_modules(name: str, is_compiled: bool, known: Book) -> None:
    model, x = made(everywhere), rows()
    plain = copy.deepcopy(model)
    convert(model, 0.06)
    call: Any = model
    if is_compiled:
        call = torch.compile(model, backend="eager", dynamic=False)
    chained = call(x)
    for each in (model, plain):
        module: Any = each.get_submodule(name)
        if is_compiled:  # torch.compile does not look for hooks that come later
            module.forward = torch.neg
        else:
            module.register_forward_hook(lambda *given: given[-1] * 2.0)
    assert torch.equal(call(x), plain(x)) and not is_chained(call)
    for each in (model, plain):
        setattr(each, name, nn.Softsign())
    assert torch.equal(call(x), plain(x)) and not is_chained(call)
    for each in (model, plain):
        setattr(each, name, nn.Dropout().eval())
    assert torch.equal(call(x), plain(x)) and not torch.equal(call(x), chained)  # as it was traced


def test_what_reads_a_value_twice_and_active_dropout_end_chains(known: Book) -> None:
    class Scaled(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2.0

    def active(net: Any, x: Tensor) -> Tensor:
        return net.norm(x + net.narrow(F.dropout(net.relu(net.wide(x)), 0.5)))  # type: ignore[no-any-return]

    def read(net: Any, x: Tensor) -> Tensor:
        y = net.drop(net.relu(net.wide(x)))
        return net.norm(x + net.narrow(y)) + y[:, :512]  # type: ignore[no-any-return]

    def read_before(net: Any, x: Tensor) -> Tensor:
        y = net.relu(net.wide(x))
        return net.norm(x + net.narrow(net.drop(y))) + y[:, :512]  # type: ignore[no-any-return]

    def other(net: Any, x: Tensor) -> Tensor:
        return net.norm(x + net.narrow(net.scaled(net.relu(net.wide(x)))))  # type: ignore[no-any-return]

    def twice(net: Any, x: Tensor) -> Tensor:
        y = net.narrow(net.drop(net.relu(net.wide(x)))) + net.relu(net.wide(2 * x))[:, :512]
        return net.norm(y)  # type: ignore[no-any-return]

    for run in (active, read, read_before, other, twice):
        model = Net(run)
        model.scaled = Scaled()
        model, x = model.bfloat16().eval().requires_grad_(False), rows()
        plain = copy.deepcopy(model)
        handle = convert(model, 0.06)
        assert "wide narrow" not in chains_of(handle), run.__name__
        assert not any("wide" in chain for chain in chains_of(handle)) or run is not twice
        y, expected = seeded(model, x), seeded(plain, x)
        assert numerics.measure_errors(y, expected.double()).row_err < 0.06, run.__name__


def test_a_chain_ends_before_dropout_in_front_of_a_layer_that_is_none(book: Book) -> None:
    book.write(*layer_rows(WIDE, PLAIN, FP8), time(BF16, gemm(512, 1024, 512), 18.0))
    model = made()
    assert chains_of(convert(model, 0.06)) == ["wide"] and is_chained(model)
    (tail,) = crossed_of(model).tails  # type: ignore[union-attr]
    assert tail.names == ("wide", "relu")


def test_a_conversion_in_training_has_the_chains_of_evaluation(known: Book) -> None:
    for run in (by_modules, by_functions):
        model, other = made(run), made(run)
        convert(other, 0.06)
        model.train()
        assert chains_of(convert(model, 0.06)) == BOTH
        model.eval()
        assert is_chained(model) and torch.equal(model(rows()), other(rows()))


def test_copies_files_states_and_gradients(known: Book) -> None:
    model, x = made(), rows()
    names = list(model.state_dict())
    convert(model, 0.06)
    y, file = model(x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    plain = made()
    plain.load_state_dict({name: model.state_dict()[name] for name in names})
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert is_chained(other) and torch.equal(other(x), y)
        twin = copy.deepcopy(plain)
        for each in (other, twin):
            each.drop.train()  # the copy's own, and not that of the model
        assert torch.equal(seeded(other, x), seeded(twin, x))
    assert torch.equal(model(x), y)
    asked = x.clone().requires_grad_(True)
    assert model(asked).requires_grad and torch.equal(model(asked), plain(x))


def test_tuning_turns_a_chain_with_dropout_off(known: Book) -> None:
    model, x = made(), rows()
    plain = model(x)
    handle = convert(model, 0.06)
    forward = crossed_of(model)
    handle.use_routes({}, off_chains=[("wide", "narrow")], keep_classes=True)
    assert torch.equal(model(x), plain) and crossed_of(model) is forward
    handle.use_routes({}, off_chains=[], keep_classes=True)
    assert is_chained(model)


class Blocks(nn.Module):
    """Sequences of whole layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        last = nn.Sequential(nn.Linear(1024, 512), nn.LayerNorm(512), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(512, 1024), nn.ReLU()), last])
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.drop(block(x))
        return x


def test_a_chain_crosses_dropout_between_blocks(chain_book: Book) -> None:
    model, x = Blocks().bfloat16().eval().requires_grad_(False), rows()
    plain = copy.deepcopy(model)
    assert chains_of(convert(model, 0.06)) == ["blocks.0.0 blocks.1.0"] and is_chained(model)
    for each in (model, plain):
        each.train()
    assert torch.equal(seeded(model, x), seeded(plain, x))
