"""Chains in the backend of torch.compile, by rows made by hand, with kernels emulated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo import lookup_backend

import lokakern
from lokakern import numerics
from lokakern.chain.candidates import Layer
from lokakern.conversion import compile_backend
from lokakern.conversion.compile_backend import Options, compile_graph, explain, replace_products
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.problems import make_problem
from lokakern.types import Format, Operand
from tests.conversion.test_cross_sites import FullCrosses, LowRank, full, low
from tests.conversion.test_tail_chains import (
    apart,
    by_functions,
    by_modules,
    in_a_loop,
    in_a_residual,
    made,
)
from tests.conversion.test_wide_tails import PATTERNS, before_in_place, behind_in_place, measure
from tests.conversion.test_wide_tails import made as made_wide
from tests.support.chain_rows import NARROW, ROW, WIDE, both, layer_rows
from tests.support.chained_models import Given, Run, rows, tower
from tests.support.conversions import H200
from tests.support.measurements import Book, time

__all__ = ["full", "low"]  # fixtures
OPTIONS: dict[str, Any] = {"budget": 0.06, "device": H200, "distribution": "X1"}
TOWER = ["wide to narrow"]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No compiled code, and no choices, of other tests."""
    torch._dynamo.reset()
    compile_backend._EXPLAINED.clear()
    with torch.no_grad():
        yield


@pytest.fixture
def quantized(chain_book: Book) -> Book:
    """`chain_book` with times of quantizing the weights."""
    return chain_book.write(*of_weights(WIDE, NARROW))


def of_weights(*layers: Layer, us: float = 3.0) -> list[Any]:
    found = []
    for layer in layers:
        problem = make_problem(
            "quantize", (layer.n, layer.k), a=Operand(Format.BFLOAT16, alignment=16),
            out_format=Format.E4M3FN, out_granularity=ROW,
        )  # fmt: skip
        found.append(time("cuda.quantize_row", problem, us))
    return found


class Compiled:
    """A model compiled by the backend with AOTAutograd alone, and the graphs that it gave."""

    def __init__(
        self, model: Callable[..., Any], dynamic: bool | None = None, **options: Any
    ) -> None:
        self.graphs: list[fx.Graph] = []
        self.call = torch.compile(
            model, backend=self._compile, options=OPTIONS | options, dynamic=dynamic
        )

    def _compile(self, gm: fx.GraphModule, inputs: Any, *, options: dict[str, Any]) -> Any:
        before = str(gm.graph)
        is_changed = replace_products(gm, Options.read(options, None)[0])
        assert is_changed is (str(gm.graph) != before)
        gm.graph.lint()
        gm.recompile()
        self.graphs.append(copy.deepcopy(gm.graph))
        return lookup_backend("aot_eager")(gm, inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        found: Tensor = self.call(*inputs)
        return found

    def calls_of(self, function: Callable[..., Any]) -> list[fx.Node]:
        """The calls of a function in the graphs."""
        return [
            node for graph in self.graphs
            for node in graph.find_nodes(op="call_function", target=function)
        ]  # fmt: skip

    @property
    def epilogues(self) -> list[list[str]]:
        """Those of the layers of each chain."""
        plans = [str(x.args[2]) for x in self.calls_of(torch.ops.lokakern.chained_layers.default)]
        return [[x.split("|")[2] for x in plan.split(";")[0].split(",")] for plan in plans]


BOTH = [[WIDE.epilogue, NARROW.epilogue]]


def converted(model: nn.Module, **options: Any) -> nn.Module:
    """A copy that `convert` changed, of which nothing is read that a backend does not know."""
    found = copy.deepcopy(model)
    lokakern.convert(found, 0.06, device=H200, distribution="X1", inference=True, **options)
    return found


def is_within(found: Tensor, model: nn.Module, x: Tensor, limit: float = 0.085) -> bool:
    """Whether the errors of two layers within the budget explain the difference."""
    exact = copy.deepcopy(model).double()(x.double())
    return 0.01 < numerics.measure_errors(found, exact).row_err < limit


# ---- bits ----


def test_outputs_are_those_of_the_converted_model(quantized: Book) -> None:
    model, x = tower().eval(), rows()
    call = Compiled(model)
    y = call(x)
    assert call.epilogues == BOTH
    assert torch.equal(y, torch.compile(converted(model), backend="aot_eager")(x))
    assert is_within(y, model, x)
    words = explain()
    assert "0 to 2: chain of 2 layers (1024 x 512 bias+relu, 512 x 1024 bias+layer" in words
    assert "0 (m=512, n=1024, k=512): a chain runs it" in words
    assert "weights quantized in each call" in words
    assert "m=512: 28.00 us, 40.00 us without the chain" in words  # 3 us for each weight


@pytest.mark.rest
def test_inductor_calls_the_chain(quantized: Book) -> None:
    model, x = tower().eval(), rows()
    call = torch.compile(model, backend=compile_graph, options=OPTIONS, fullgraph=True)
    y = call(x)
    with torch.profiler.profile() as profile:
        assert torch.equal(call(x), y)
    assert any(event.name == "lokakern::routed_chain" for event in profile.events())
    assert torch.equal(y, Compiled(model)(x))


def test_weights_may_change_between_calls(quantized: Book) -> None:
    model, x = tower().eval(), rows()
    call = Compiled(model)
    for scale in (1.0, 0.5):
        for parameter in model.parameters():
            parameter.data.mul_(scale)  # no new version
        model[0].weight.data[0] = 3.0
        expected = torch.compile(converted(model), backend="aot_eager")(x)
        assert torch.equal(call(x), expected)
    assert len(call.graphs) == 1


def test_one_graph_serves_every_m(quantized: Book) -> None:
    model = tower().eval()
    call = Compiled(model)
    other = converted(model)
    for m in (512, 1000, 2048):
        x = rows(m)
        torch._dynamo.mark_dynamic(x, 0)
        y = call(x)
        assert is_within(y, model, x)
        assert torch.equal(y, torch.compile(other, backend="aot_eager", dynamic=False)(x))
    for m in (16, 4096):  # nothing was measured there
        x = rows(m)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(call(x), model(x))
    assert len(call.graphs) == 1
    assert "0 to 2: chain of 2 layers" in explain()


def test_where_m_is_known_a_chain_without_launches_is_left_out(quantized: Book) -> None:
    model, x = tower().eval(), rows(32)
    call = Compiled(model)
    assert torch.equal(call(x), model(x))
    assert not call.epilogues
    assert "0 to 2 (m=32): no chain at this m" in explain()


def test_rows_may_be_in_several_dimensions(quantized: Book) -> None:
    model, x = tower().eval(), rows()
    expected = Compiled(model)(x)
    call = Compiled(model)
    assert torch.equal(call(x.view(2, 256, 512)), expected.view(2, 256, 512))
    assert call.epilogues == BOTH


# ---- what is found ----


@pytest.mark.parametrize("run", [by_modules, by_functions, in_a_loop, in_a_residual])
def test_forwards_are_chains(run: Run, quantized: Book) -> None:
    model, x = made(run), rows()
    call = Compiled(model)
    y = call(x.clone())
    assert call.epilogues == BOTH
    assert is_within(y, model, x)


NOT_FOUND = behind_in_place, before_in_place  # written by a method, or an activation's output


@pytest.mark.parametrize("run", [run for run in PATTERNS if run not in NOT_FOUND])
def test_residuals_and_gates_are_parts_of_chains(run: Run, book: Book) -> None:
    measure(book, PATTERNS[run])
    book.write(*of_weights(Layer(512, 512)))
    model, x = made_wide(run), rows()
    call = Compiled(model)
    y = call(x)
    assert call.epilogues == [[PATTERNS[run]]]
    expected = converted(model)
    assert torch.equal(y, expected(x))
    torch._dynamo.reset()
    assert torch.equal(call(x.view(2, 256, 512)), y.view(2, 256, 512))


@pytest.mark.parametrize("run", NOT_FOUND)
def test_other_sums_in_place_stay_as_they_are(run: Run, book: Book) -> None:
    measure(book, PATTERNS[run])
    book.write(*of_weights(Layer(512, 512)))
    model, x = made_wide(run), rows()
    call = Compiled(model)
    assert torch.equal(call(x), model(x))
    assert not call.epilogues


def summed_in_place(net: Any, x: Tensor) -> Tensor:
    y = net.fc(x)
    y += x
    return net.norm(y)  # type: ignore[no-any-return]


def test_a_sum_into_the_output_of_a_layer_is_a_residual(book: Book) -> None:
    measure(book, "bias+residual+layer+affine")
    book.write(*of_weights(Layer(512, 512)))
    model, x = made_wide(summed_in_place), rows()
    call = Compiled(model)
    assert is_within(call(x), model, x)
    assert call.epilogues == [["bias+residual+layer+affine"]]


class Tower(Given):
    """The layers of `tower`, and what else a test may call."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.wide, self.narrow = nn.Linear(512, 1024), nn.Linear(1024, 512)
        self.norm, self.drop, self.block = nn.LayerNorm(512), nn.Dropout(), BlockRMSNorm(512, 128)


def dropped(net: Any, x: Tensor) -> Tensor:
    y = net.drop(F.relu(net.drop(net.wide(x))))
    return F.relu(F.layer_norm(net.narrow(y), (512,), net.norm.weight, net.norm.bias))


def by_addmm(net: Any, x: Tensor) -> Tensor:
    y = torch.addmm(net.wide.bias, x, net.wide.weight.t()).relu()
    return net.norm(net.narrow(y)).relu()  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", [dropped, by_addmm])
def test_other_ways_to_write_layers_are_found(run: Run, quantized: Book) -> None:
    model, x = Tower(run).bfloat16().eval(), rows()
    call = Compiled(model)
    y = call(x)
    assert call.epilogues == BOTH
    assert is_within(y, model, x)
    if run is dropped:
        torch._dynamo.reset()
        call = Compiled(model.train())
        call(x)
        assert not any(len(x) > 1 for x in call.epilogues)


@pytest.mark.parametrize("dynamic", [False, True])
def test_norms_of_blocks_are_found(book: Book, dynamic: bool) -> None:
    layer = Layer(512, 1024, "bias+block_rms(128)+relu")
    found = [row for x in (WIDE, layer) for row in layer_rows(
        x, {512: 20.0, 2048: 60.0}, {512: 10.0, 2048: 30.0})]  # fmt: skip
    book.write(*found, *of_weights(WIDE, layer))
    model = Tower(lambda net, x: F.relu(net.block(net.narrow(F.relu(net.wide(x))))))
    model, x = model.bfloat16().eval(), rows()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    call = Compiled(model)
    assert is_within(call(x), model, x)
    assert call.epilogues == [[WIDE.epilogue, layer.epilogue]]


def test_crosses_are_chains(full: Book) -> None:
    full.write(*of_weights(Layer(512, 512), us=1.0))
    torch.manual_seed(0)
    model, x = FullCrosses().bfloat16(), rows()
    call = Compiled(model)
    y = call(x)
    assert call.epilogues == [["bias+cross"], ["bias+cross"]]
    assert torch.equal(y, converted(model)(x))


def test_crosses_of_low_rank_are_chains(low: Book) -> None:
    low.write(*of_weights(Layer(64, 512), Layer(512, 64), us=1.0))
    torch.manual_seed(0)
    model, x = LowRank().bfloat16(), rows()
    call = Compiled(model)
    y = call(x)
    assert call.epilogues == [["none", "bias+cross"]]
    assert torch.equal(y, converted(model)(x))


def test_a_layer_that_is_called_twice_is_one_at_each_place(quantized: Book) -> None:
    model = Tower(lambda net, x: by_addmm(net, by_addmm(net, x))).bfloat16().eval()
    call = Compiled(model)
    call(rows())
    assert call.epilogues in (2 * BOTH, [BOTH[0] + BOTH[0]])
    assert "narrow#2: chain of " in explain()


def test_each_graph_of_a_model_has_its_chains(quantized: Book) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        y = net.norm(net.narrow(F.relu(net.wide(x)))).relu()
        torch._dynamo.graph_break()
        return net.norm(net.narrow(F.relu(net.wide(y)))).relu()  # type: ignore[no-any-return]

    model, x = Tower(run).bfloat16().eval(), rows()
    call = Compiled(model)
    y = call(x)
    assert call.epilogues == 2 * BOTH and len(call.graphs) == 2
    assert is_within(y, model, x, 0.15)


# ---- what is not ----


def read_twice(net: Any, x: Tensor) -> Tensor:
    y = net.wide(x)
    return net.narrow(F.relu(y)) + y[:, :512]  # type: ignore[no-any-return]


def written_between(net: Any, x: Tensor) -> Tensor:
    seen = x * 1.0
    y = F.relu(net.wide(x))
    seen += 1.0
    return F.relu(net.norm(net.narrow(y))) + seen


def in_float32(net: Any, x: Tensor) -> Tensor:
    return F.relu(net.wide(x).float())


def of_one_row(net: Any, x: Tensor) -> Tensor:
    return F.relu(net.norm(net.narrow(F.relu(net.wide(x))) + x[:1]))


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (read_twice, []),
        (written_between, [[WIDE.epilogue], [NARROW.epilogue]]),
        (in_float32, []),
        (of_one_row, [[WIDE.epilogue]]),
        (apart, [[WIDE.epilogue]]),
    ],
)
def test_other_calls_are_none(run: Run, expected: Any, book: Book) -> None:
    times = {512: 20.0, 2048: 60.0}, {512: 5.0, 2048: 15.0}
    book.write(*both(*times), *of_weights(WIDE, NARROW))
    model, x = Tower(run).bfloat16().eval(), rows()
    model.relu = nn.ReLU()
    call = Compiled(model)
    y = call(x)
    found = [x for x in call.epilogues if run is not apart or x != [NARROW.epilogue]]
    assert found == expected
    assert numerics.measure_errors(y.double(), model(x).double()).row_err < 0.1


def test_a_write_to_what_the_chain_reads_comes_before_or_after_it(quantized: Book) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        x = x * 1.0
        y = net.wide(x)
        x += 100.0
        return F.relu(net.norm(net.narrow(F.relu(y)))) + 0 * x

    model, x = Tower(run).bfloat16().eval(), rows()
    assert is_within(Compiled(model)(x), model, x)


def test_with_gradients_products_alone_are_replaced(quantized: Book) -> None:
    model, x = tower(), rows()
    call = Compiled(model)
    with torch.enable_grad():
        y = call(x)
        assert y.requires_grad and not call.epilogues
        y.sum().backward()
        assert model[0].weight.grad is not None
        torch._dynamo.reset()
        call = Compiled(model.requires_grad_(False))
        call(x)
        assert call.epilogues == BOTH
        if torch.__version__ < (2, 12):  # whose guards do not notice it
            return
        model[3].weight.requires_grad_(True)
        assert call(x).requires_grad
        assert call.epilogues == [*BOTH, [WIDE.epilogue]]  # in front of the norm


def test_autocast_has_none(quantized: Book) -> None:
    model, x = tower().float().eval(), rows().float()
    call = Compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        call(x)
    assert not call.epilogues


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chains": False}, "no chains: chains=False"),
        ({"budget": None}, "no chains: there is no budget"),
        ({"check": "1000:64"}, "no chains: check= compares products"),
        ({"skip": "0"}, ""),
        ({"budget": 0.02}, "over the budget: the least row_err is"),
    ],
)
def test_options_leave_chains_out(options: dict[str, Any], words: str, quantized: Book) -> None:
    call = Compiled(tower().eval(), **options)
    call(rows())
    assert not any(len(x) > 1 for x in call.epilogues)
    assert words in explain()


def test_chains_count_the_time_to_quantize_weights(chain_book: Book) -> None:
    call = Compiled(tower().eval())
    call(rows())
    assert not call.epilogues  # unknown
    assert "0 to 2: no chain" in explain()
    torch._dynamo.reset()
    chain_book.write(*of_weights(WIDE, NARROW, us=40.0))
    call = Compiled(tower().eval())
    call(rows())
    assert not call.epilogues
    assert "0 to 2: no chain: not faster: " in explain()


def test_transforms_around_run_torch(quantized: Book) -> None:
    model = tower().eval().requires_grad_(False)
    call, x = Compiled(model), rows()
    call(x)

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad():
            return torch.func.grad(lambda x: run(x).float().square().sum())(x)  # type: ignore[no-any-return]

    assert torch.equal(gradient(call), gradient(model))


def test_what_convert_chose_stays(quantized: Book) -> None:
    model, x = converted(tower().eval()), rows()
    expected = torch.compile(model, backend="aot_eager")(x)
    torch._dynamo.reset()
    call = Compiled(model)
    assert torch.equal(call(x), expected)
    assert not call.epilogues
