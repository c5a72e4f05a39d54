"""Chains across sequences that are children of one: found, run, hooked, copied and undone."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lokakern.conversion.chain_spans import spans_of
from lokakern.nn.adoption import adopt
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.static_handoff import BoundedSequential
from lokakern.selection.weight_forms import with_weight
from tests.conversion.test_tuned_chains import kept, tuned
from tests.support import measurements
from tests.support.chain_rows import ROW
from tests.support.chained_models import chains_of, convert, is_chained, line, rows, tower
from tests.support.measurements import BF16, Book, accuracy, gemm, time
from tests.support.measurements import ROW as ROUTED

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def in_blocks() -> nn.Sequential:
    """A block of each layer."""
    wide, relu, narrow, norm, last = tower()
    return nn.Sequential(nn.Sequential(wide, relu), nn.Sequential(narrow, norm, last)).eval()


def behind_norms() -> nn.Sequential:
    """Blocks that end with a layer, in a block."""
    wide, relu, narrow, norm, last = tower()
    blocks = nn.Sequential(
        nn.Sequential(wide), nn.Sequential(relu, nn.Dropout(), narrow), nn.Sequential(norm)
    )
    return nn.Sequential(nn.Sequential(), blocks, last).eval()


@torch.no_grad()
def outputs(model: nn.Module) -> Tensor:
    y: Tensor = model(rows())
    return y


@pytest.mark.parametrize(("make", "chain"), [(in_blocks, "0.0 1.0"), (behind_norms, "1.0.0 1.1.2")])
def test_a_chain_crosses_sequences(make: type[nn.Sequential], chain: str, chain_book: Book) -> None:
    model, flat = make(), tower().eval()
    plain = outputs(model)
    handle = convert(model, 0.06)
    convert(flat, 0.06)
    assert chains_of(handle) == [chain]
    y = outputs(model)
    assert torch.equal(y, outputs(flat)) and not torch.equal(y, plain)
    assert is_chained(model) and not is_chained(model, 100)
    run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    assert is_chained(run) and torch.equal(outputs(run), y)
    assert not is_chained(run, 100)
    handle.undo()
    assert all(type(x) is not BoundedSequential for x in model.modules())
    assert torch.equal(outputs(model), plain) and not list(model.buffers())


def test_the_modules_run_where_an_inner_sequence_changed(chain_book: Book) -> None:
    model = in_blocks()
    convert(model, 0.06)
    y = outputs(model)
    seen: list[nn.Module] = []
    hook = model[1].register_forward_hook(lambda module, *_: seen.append(module))
    assert not is_chained(model) and seen == [model[1]]
    assert not is_chained(torch.compile(model, backend="aot_eager"))
    hook.remove()
    assert torch.equal(outputs(model), y) and is_chained(model)
    relu = model[1][2]
    model[1][2] = nn.SiLU()
    assert not is_chained(model)
    model[1][2] = relu
    model[0].append(nn.ReLU())
    assert not is_chained(model)
    del model[0][-1]
    assert is_chained(model)
    model[0].forward = lambda x: model[0][0](x) * 0  # type: ignore[method-assign]
    assert not is_chained(model) and torch.equal(outputs(model), model[1](0 * rows().repeat(1, 2)))


def test_a_hook_keeps_a_sequence_apart(chain_book: Book) -> None:
    model = in_blocks()
    model[0].register_forward_hook(lambda *_: None)
    assert sorted(chains_of(convert(model, 0.06))) == ["0.0", "1.0"]


def test_copies_files_and_refreshes_keep_chains(chain_book: Book) -> None:
    model = in_blocks()
    handle = convert(model, 0.06)
    y, file = outputs(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    twin = copy.deepcopy(model)
    handle.undo()
    for other in (twin, loaded):
        assert is_chained(other) and torch.equal(outputs(other), y)
        assert is_chained(torch.compile(other, backend="aot_eager"))
    handle = convert(model, 0.06)
    assert handle.refresh(0.01) == ["0.0 to 1.0/chain"] and not is_chained(model)
    handle.refresh(0.06)
    assert is_chained(model)


def test_a_chain_within_an_inner_sequence_stays_there(chain_book: Book) -> None:
    model = nn.Sequential(tower(), nn.ELU(), line(nn.Linear(512, 64), nn.ReLU())).eval()
    handle = convert(model, 0.06)
    assert chains_of(handle) == ["0.0 0.2"]
    assert type(model) is nn.Sequential and is_chained(model) and is_chained(model[0])


class Looping(nn.Module):
    """A forward that calls the children of a sequence one by one, or the sequence."""

    def __init__(self, *, is_called: bool) -> None:
        super().__init__()
        self.is_called, self.blocks = is_called, in_blocks()

    def forward(self, x: Tensor) -> Tensor:
        if self.is_called:
            return 2 * self.blocks(x)  # type: ignore[no-any-return]
        for block in self.blocks:
            x = block(x)
        return x


def test_a_sequence_whose_children_are_called_keeps_their_chains(chain_book: Book) -> None:
    both, apart = Looping(is_called=True), Looping(is_called=False)
    assert chains_of(convert(both, 0.06)) == ["blocks.0.0 blocks.1.0"]
    assert sorted(chains_of(convert(apart, 0.06))) == ["blocks.0.0", "blocks.1.0"]
    assert is_chained(both) and is_chained(apart)


class Holding(nn.Module):
    """A forward that calls the children of sequences in a container."""

    def __init__(self, held: nn.Module, blocks: str) -> None:
        super().__init__()
        self.held, self.of_blocks = held, blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.get_submodule(self.of_blocks):  # type: ignore[union-attr]
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("hold", "name"),
    [
        (lambda blocks: nn.ModuleList([blocks]), "held.0"),
        (lambda blocks: nn.ModuleDict({"a": nn.ModuleList([blocks])}), "held.a.0"),
        (lambda blocks: nn.Sequential(blocks), "held.0"),
    ],
)
def test_so_does_one_in_a_container(
    hold: Callable[[nn.Module], nn.Module], name: str, chain_book: Book
) -> None:
    model = Holding(hold(in_blocks()), name)
    chains = sorted(chains_of(convert(model, 0.06)))
    assert chains == [f"{name}.0.0", f"{name}.1.0"]
    assert is_chained(model)


def test_layers_of_a_span_are_told_once(chain_book: Book) -> None:
    model = in_blocks()
    adopt(model[0][0]), adopt(model[1][0])
    ((first, second),) = spans_of(model, lambda _: True)
    assert (first.place, first.stop, second.place, second.stop) == (0, 2, 2, 5)
    handle = convert(model, 0.06)
    assert handle.explain().count("0.0 to 1.0: chain of 2 layers") == 1
    assert "1 chain of 2 layers" in repr(handle)


def test_static_scales_cross_sequences_with_a_chain(chain_book: Book) -> None:
    """The third layer reads what the norm of another block bounds."""
    last = line(nn.Linear(512, 512), BlockRMSNorm(512, 256), nn.ReLU())
    model = nn.Sequential(*in_blocks(), last, line(nn.Linear(512, 64))).eval()
    found = []
    for n in (512, 64):
        prepared = with_weight(gemm(512, n, 512), ROW, measurements.H200)
        found += [time(BF16, prepared, 20.0), time(ROUTED, prepared, 5.0),
                  accuracy(ROUTED, prepared, 0.04)]  # fmt: skip
    chain_book.write(*found)
    handle = convert(model, 0.06)
    assert chains_of(handle) == ["0.0 1.0"]
    assert handle.handed_over == ["3.0"]
    y = outputs(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert is_chained(compiled) and torch.equal(outputs(compiled), y)


def test_tuning_turns_a_chain_across_sequences_off(chain_book: Book) -> None:
    model = in_blocks()
    found, handle, _ = tuned(model, {("0.0 to 1.0", "chain"): -30.0})
    assert kept(found) == {("chain", "0.0 to 1.0"): False}
    assert not is_chained(model) and "gave it up" in handle.explain()
