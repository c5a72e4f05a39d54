"""Chains of blocks, each an `nn.Sequential`, that a forward calls in a row."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lokakern import numerics
from lokakern.conversion import tail_chains
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.crossed_forward import crossed_of
from lokakern.nn.static_handoff import BoundedSequential
from lokakern.selection.weight_forms import with_weight
from tests.conversion.test_tuned_chains import kept, tuned
from tests.support import measurements
from tests.support.chain_rows import ROW
from tests.support.chained_models import Given, Run, chains_of, convert, is_chained, line, rows
from tests.support.measurements import BF16, Book, accuracy, gemm, time
from tests.support.measurements import ROW as ROUTED

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(Given):
    """Two blocks of a layer each, in a forward that a test gives."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        first = line(nn.Linear(512, 1024), nn.Dropout(), nn.ReLU())
        last = line(nn.Sequential(nn.Linear(1024, 512), nn.LayerNorm(512)), nn.ReLU())
        self.blocks = nn.ModuleList([first, last])
        self.back, self.norm = nn.Linear(1024, 512).bfloat16(), nn.LayerNorm(512).bfloat16()


def in_a_loop(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x


def one_by_one(net: Any, x: Tensor) -> Tensor:
    return x * net.blocks[1](net.blocks[0](2 * x))  # type: ignore[no-any-return]


def before_a_layer(net: Any, x: Tensor) -> Tensor:
    return torch.relu(net.norm(net.back(net.blocks[0](x)))) + net.blocks[1](torch.cat([x, x], 1))


def made(run: Run) -> Net:
    return Net(run).eval().requires_grad_(False)


BOTH = ["blocks.0.0 blocks.1.0.0"]


@pytest.mark.parametrize(
    ("run", "chains"),
    [
        (in_a_loop, BOTH), (one_by_one, BOTH),
        (before_a_layer, ["blocks.1.0.0", "blocks.0.0 back"]),
    ],
)  # fmt: skip
def test_a_chain_crosses_blocks(run: Run, chains: list[str], chain_book: Book) -> None:
    model, x = made(run), rows()
    plain, exact = model(x), copy.deepcopy(model).double()(x.double())
    handle = convert(model, 0.06)
    assert chains_of(handle) == chains
    assert handle.explain().count("chain of 2 layers") == 1
    y = model(x)
    assert is_chained(model) and torch.equal(model(x), y) and not torch.equal(y, plain)
    assert numerics.measure_errors(y, exact).row_err < 0.09
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    assert is_chained(compiled) and torch.equal(compiled(x), y)
    assert not is_chained(model, 100) and not is_chained(compiled, 100)
    handle.undo()
    assert torch.equal(model(x), plain) and "forward" not in vars(model)
    assert all(type(x) is not BoundedSequential for x in model.modules())


def test_one_block_is_a_chain_of_its_own(chain_book: Book) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.blocks[1](net.blocks[0](x) * 1.0)  # type: ignore[no-any-return]

    model = made(run)
    handle = convert(model, 0.06)
    assert chains_of(handle) == ["blocks.0.0", "blocks.1.0.0"]
    assert crossed_of(model) is None and is_chained(model.blocks[0])


def test_the_modules_run_where_a_block_changed(chain_book: Book) -> None:
    model, x = made(in_a_loop), rows()
    plain = model(x)
    convert(model, 0.06)
    y = model(x)
    blocks: Any = model.blocks
    seen: list[nn.Module] = []
    for module in (blocks[0], blocks[1], blocks[1][0], blocks[0][0]):
        hook = module.register_forward_hook(lambda module, *_: seen.append(module))
        assert torch.equal(model(x), plain) and seen[-1] is module
        hook.remove()
    assert torch.equal(model(x), y)
    model.train()
    assert not torch.equal(model(x), y)
    model.eval()
    blocks[0].append(nn.ReLU())
    assert torch.equal(model(x), plain)
    del blocks[0][-1]
    assert torch.equal(model(x), y)
    blocks[1][0][0] = nn.Linear(1024, 512).bfloat16()
    assert not is_chained(model)


def test_a_hook_keeps_a_block_apart(chain_book: Book) -> None:
    model = made(in_a_loop)
    model.blocks[1].register_forward_hook(lambda *_: None)
    assert chains_of(convert(model, 0.06)) == ["blocks.0.0", "blocks.1.0.0"]


def test_copies_files_and_refreshes_keep_chains(chain_book: Book) -> None:
    model, x = made(in_a_loop), rows()
    handle = convert(model, 0.06)
    y, file = model(x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert is_chained(other) and torch.equal(other(x), y)
    assert handle.refresh(0.01) == ["blocks.0.0 to blocks.1.0.0/chain"] and not is_chained(model)
    handle.refresh(0.06)
    assert is_chained(model) and torch.equal(model(x), y)


def test_tuning_turns_a_chain_of_blocks_off(chain_book: Book) -> None:
    model = made(in_a_loop)
    found, _, _ = tuned(model, {("blocks.0.0 to blocks.1.0.0", "chain"): -30.0})
    assert kept(found) == {("chain", "blocks.0.0 to blocks.1.0.0"): False}
    assert not is_chained(model)


class Halves(nn.Module):
    """Blocks whose layers chains may cross, but not cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm, relu = nn.LayerNorm(512), nn.ReLU()
        self.first = line(nn.Linear(512, 1024), relu, nn.Linear(1024, 512), norm, relu)
        self.last = line(nn.Linear(512, 1024), relu, nn.Linear(1024, 96), relu)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


def test_chains_do_not_cut_blocks(chain_book: Book) -> None:
    """The last layer was not measured, so that no chain has the second block."""
    assert chains_of(convert(Halves().eval(), 0.06)) == ["first.0 first.2", "last.0"]


def test_training_calls_blocks_as_before(chain_book: Book) -> None:
    model = made(in_a_loop)
    convert(model, 0.06, inference=False)
    assert crossed_of(model) is None


def test_static_scales_within_blocks_are_part_of_what_runs_instead(
    chain_book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, spans = Halves().eval(), []
    model.first = line(nn.Linear(512, 512), BlockRMSNorm(512, 256), nn.ReLU(), nn.Linear(512, 512))
    plan = tail_chains.plan_span
    monkeypatch.setattr(tail_chains, "plan_span", lambda x, *y: spans.append(x) or plan(x, *y))
    prepared = with_weight(gemm(512, 512, 512), ROW, measurements.H200)
    chain_book.write(
        time(BF16, prepared, 20.0), time(ROUTED, prepared, 5.0), accuracy(ROUTED, prepared, 0.04)
    )
    convert(model, 0.06)
    assert [[x.is_handed for x in span] for span in spans] == [[False, True, False, False]]
