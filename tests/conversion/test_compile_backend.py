"""The backend "lokakern" of torch.compile, with kernels of an H200 emulated."""

from __future__ import annotations

import copy
import functools
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import lokakern
from lokakern.conversion.compile_backend import Options, compile_graph, explain, replace_products
from lokakern.conversion.routes import _grad_input_problem
from lokakern.nn.graph_products import Product, linear_products
from lokakern.selection import dispatcher
from lokakern.types import ErrorBudget
from lokakern.workloads.gemm_gradient_cases import grad_weight_case
from tests.support.conversions import H200, K, N, measured, rows_of
from tests.support.measurements import Book, gemm
from tests.support.routed_layers import passed, rows, same

M = 256
OPTIONS: dict[str, Any] = {"budget": 0.06, "device": H200, "distribution": "X1"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Book:
    return Book(tmp_path_factory.mktemp("book") / "rows.sqlite").write(*measured(), *of_matrix())


@pytest.fixture(autouse=True)
def known(written: Book) -> Iterator[None]:
    torch._dynamo.reset()
    written.use()
    yield
    dispatcher.use_snapshot(None)


def of_matrix() -> list[Any]:
    """Rows of ``x @ w`` with a row-major w ``[K, N]``, all three products of which are worth it.

    Errors do not depend on layouts: `measured` has those of the first two.
    """
    found = []
    for m in (16, M):
        found += rows_of(_grad_input_problem(K, N)(m), bf16=8.0, row=4.0, errors=False)
        found += rows_of(gemm(m, K, N), bf16=8.0, row=4.0, errors=False)
        found += rows_of(grad_weight_case(m, K, N).problem, bf16=8.0, row=4.0)
    return found


class Matrix(nn.Module):
    """``x @ w`` with a raw parameter, as HSTU multiplies."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(K, N, generator=generator).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def layer_of(dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(K, N, bias, dtype=dtype)


def traced(gm: fx.GraphModule, inputs: Any, *, options: dict[str, Any]) -> Any:
    """The backend with AOTAutograd alone, which compiles in a second."""
    if replace_products(gm, Options.read(options, None)[0]):
        gm.recompile()
    return lookup_backend("aot_eager")(gm, inputs)


def compiled(model: Any, backend: Any = traced, **options: Any) -> Any:
    return torch.compile(model, backend=backend, options=OPTIONS | options, fullgraph=True)


def products_of(model: Callable[..., Any], *inputs: Tensor) -> list[Product]:
    """The products of the graph of a call."""
    found: list[Product] = []

    def listing(gm: fx.GraphModule, _: Any) -> Any:
        found.extend(linear_products(gm))
        return gm.forward

    torch.compile(model, backend=listing, fullgraph=True)(*inputs)
    return found


# ---- bits ----


@pytest.mark.parametrize("m", [16, M, 1024])
def test_outputs_and_gradients_are_those_of_the_converted_layer(m: int) -> None:
    layer = layer_of()
    converted = copy.deepcopy(layer)
    lokakern.convert(converted, 0.06, device=H200, distribution="X1")
    x, gradient = rows(m, K), rows(m, N, seed=2)
    expected = passed(converted, x, gradient)
    assert same(passed(compiled(layer), x, gradient), expected)
    assert not same(passed(layer, x, gradient), expected)


@pytest.mark.rest
def test_inductor_compiles_what_was_chosen() -> None:
    layer = layer_of()
    converted = copy.deepcopy(layer)
    lokakern.convert(converted, 0.06, device=H200, distribution="X1")
    x, gradient = rows(M, K), rows(M, N, seed=2)
    expected = passed(converted, x, gradient)
    # Inductor may add up the gradient of the bias in another order.
    assert same(passed(compiled(layer, compile_graph), x, gradient)[:-1], expected[:-1])


@pytest.mark.rest
def test_the_graph_is_that_of_inductor_where_nothing_is_chosen() -> None:
    model = nn.Sequential(layer_of(), nn.ReLU())
    x, gradient = rows(M, K), rows(M, N, seed=2)
    expected = passed(torch.compile(model, fullgraph=True), x, gradient)
    torch._dynamo.reset()
    assert same(passed(compiled(model, compile_graph, budget=None), x, gradient), expected)


def test_a_row_major_matrix_is_multiplied_by_kernels_of_its_layout() -> None:
    model = Matrix()
    layer = nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(model.w.detach().t().contiguous())
    lokakern.convert(layer, kernels={"output": "row", "grad_input": "row"})
    x, gradient = rows(M, K), rows(M, N, seed=2)
    call, x = compiled(model), x.requires_grad_()
    y = call(x)
    grad_x, grad_w = torch.autograd.grad(y, [x, model.w], gradient)
    expected = passed(layer, x.detach(), gradient)
    assert same([y.detach(), grad_x], expected[:2])
    exact = x.detach().double().t() @ gradient.double()
    assert 0.01 < float((grad_w.double() - exact).norm() / exact.norm()) < 0.06  # is quantized
    assert grad_w.is_contiguous()  # so that it becomes w.grad without a copy
    assert "grad_weight: quantized at m=16..256" in explain()


def test_vectors_in_columns_are_rows() -> None:
    layer = layer_of(bias=False)
    converted = copy.deepcopy(layer)
    lokakern.convert(converted, 0.06, device=H200, distribution="X1")
    x, gradient = rows(M, K), rows(M, N, seed=2)

    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.several = nn.Parameter(layer.weight.detach().t().repeat(2, 1, 1))

        def forward(self, x: Tensor) -> Tensor:  # as DCN-Mix
            return torch.matmul(self.several[1].t(), x.unsqueeze(2)).squeeze(2)

    model = Columns()
    y, grad_x, grad_w = passed(compiled(model), x, gradient)
    expected = passed(converted, x, gradient)
    assert torch.equal(y, expected[0])
    assert [(p.name, p.is_turned, p.why_not) for p in products_of(model, x)] == [
        ("several", True, "")
    ]
    exact = x.double().t() @ gradient.double()
    assert 0.01 < float((grad_w[1].double() - exact).norm() / exact.norm()) < 0.06
    assert grad_x.shape == x.shape


def test_weights_may_change_between_calls() -> None:
    layer = layer_of()
    call = compiled(layer)
    x = rows(M, K)
    for seed in (3, 4):
        with torch.no_grad():
            layer.weight.data.copy_(rows(N, K, seed=seed))  # no new version
            converted = copy.deepcopy(layer)
            lokakern.convert(converted, 0.06, device=H200, distribution="X1")
            assert torch.equal(call(x), converted(x))


def test_one_graph_serves_every_m() -> None:
    layer = layer_of()
    converted = copy.deepcopy(layer)
    lokakern.convert(converted, 0.06, device=H200, distribution="X1")
    counter = CompileCounterWithBackend("aot_eager")

    def counting(gm: fx.GraphModule, inputs: Any) -> Any:
        replace_products(gm, Options.read(OPTIONS, None)[0])
        gm.recompile()
        return counter(gm, inputs)

    call = torch.compile(layer, backend=counting, fullgraph=True)
    for m in (272, 16, 3, M):
        x = rows(m, K)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(call(x), converted(x)), m
    assert counter.frame_count == 1
    assert "(any m, n=64, k=48)" in explain()


def test_the_number_of_samples_may_depend_on_data() -> None:
    layer = layer_of()

    def selected(x: Tensor, mask: Tensor) -> Tensor:
        return layer(x[mask].transpose(0, 1))  # type: ignore[no-any-return]

    x, mask = rows(64 * 8, K).view(64, 8, K), torch.arange(64) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = compiled(selected)(x, mask)
    assert found.shape == (8, 32, N)
    lokakern.convert(layer, 0.06, device=H200, distribution="X1")
    assert torch.equal(found, selected(x, mask))


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_quantizes_float32_weights(inside: bool) -> None:
    layer = layer_of(torch.float32)
    converted = copy.deepcopy(layer)
    lokakern.convert(converted, 0.06, device=H200, distribution="X1")
    x = rows(M, K).float()

    def cast(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    with torch.autocast("cpu", torch.bfloat16):
        expected = converted(x)
        found = expected if inside else compiled(layer)(x)
    if inside:
        found = compiled(functools.partial(cast, layer))(x)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


def test_checkpointed_layers_are_quantized() -> None:
    layer = layer_of()

    def called(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]

    found = products_of(called, rows(M, K))
    assert [(x.name, x.why_not) for x in found] == [("layer", "")]
    x, gradient = rows(M, K), rows(M, N, seed=2)
    expected = passed(compiled(layer), x, gradient)[0]
    assert torch.equal(compiled(called)(x), expected)


# ---- which products there are ----


class Calls(nn.Module):
    """Products in all ways of writing, and some that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer_of()
        self.w = nn.Parameter(torch.ones(N, N, dtype=torch.bfloat16))
        self.several = nn.Parameter(torch.ones(3, N, N, dtype=torch.bfloat16))
        self.register_buffer("table", torch.ones(N, N, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        x = nn.functional.linear(x, self.w)
        x = torch.addmm(self.layer.bias, x, self.several[1])
        x = torch.mm(x, self.w.t())
        x = x.mm(torch.cat([self.w[:32], self.several[0, 32:]]))
        x = x.unflatten(0, (2, -1)).matmul(self.several[2])[0]
        x = x + self.w @ self.several[0]
        x = torch.addmm(x, x, self.w)
        x = torch.addmm(self.layer.bias[:1], x, self.w)
        x = torch.addmm(self.layer.bias, x, self.w, alpha=2)
        x = x @ self.table  # no parameter
        x = (self.w @ x.view(1, N, -1))[0].view(-1, N)  # several columns
        return x @ x.t()


def test_every_way_to_multiply_by_parameters_is_found() -> None:
    found = products_of(Calls(), rows(128, K))
    assert [(x.name, x.n, x.k, x.m, x.has_bias, x.is_turned) for x in found] == [
        ("layer", N, K, 128, True, False),
        ("w", N, N, 128, False, False),
        ("several", N, N, 128, True, True),
        ("w", N, N, 128, False, False),
        ("w", N, N, 128, False, True),
        ("several", N, N, 128, False, True),
        ("several", N, N, 64, False, True),
        *[("w", N, N, 64, True, True)] * 3,
    ]
    assert [x.why_not for x in found] == [
        *[""] * 6, "both operands are made of parameters",
        "it adds [64, 64]; expected a bias [64]", "it adds [1]; expected a bias [64]",
        "it has other arguments than its operands",
    ]  # fmt: skip
    assert all(x.is_trained for x in found)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (layer_of(torch.float32), "it multiplies torch.float32 by torch.float32"),
        (layer_of(torch.float64), "it multiplies torch.float64 by torch.float64"),
    ],
    ids=["float32", "float64"],
)
def test_other_dtypes_are_left_alone(model: nn.Module, expected: str) -> None:
    dtype = next(model.parameters()).dtype
    [found] = products_of(model, rows(M, K).to(dtype))
    assert found.why_not.startswith(expected)


def test_converted_layers_are_left_alone() -> None:
    model = nn.Sequential(layer_of(), nn.Linear(N, N, dtype=torch.bfloat16))
    lokakern.convert(model, 0.06, device=H200, distribution="X1", skip="1")
    lokakern.convert(model[1], None)
    x, gradient = rows(M, K), rows(M, N, seed=2)
    found = products_of(model, x)
    assert [(x.name, x.why_not) for x in found] == [("1", "convert chose its kernels")]
    expected = passed(model, x, gradient)
    assert same(passed(compiled(model), x, gradient), expected)


def test_transforms_are_left_alone() -> None:
    layer = layer_of()

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: layer(x).sum())(x) + layer(x)[:, :K]  # type: ignore[no-any-return]

    found = products_of(gradient, rows(M, K))
    expected = ["it is under torch.func or forward-mode AD", ""]
    assert [x.why_not for x in found] == expected
    torch._dynamo.reset()
    x = rows(M, K)

    def around(layer: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.func.grad(lambda x: layer(x).float().square().sum())(x)  # type: ignore[no-any-return]

    assert torch.equal(around(torch.compile(layer, backend=traced, options=OPTIONS)), around(layer))


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch breaks the graph"
)
@pytest.mark.parametrize("create_graph", [True, False])
def test_products_that_a_graph_differentiates_twice_are_left_alone(create_graph: bool) -> None:
    model = Matrix()

    def gradient(x: Tensor) -> Tensor:
        y = (x @ model.w).float().square().sum()
        return torch.autograd.grad(y, x, create_graph=create_graph)[0]

    x = rows(M, K).requires_grad_()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        call = compiled(gradient)
        assert torch.equal(call(x), gradient(x)) == create_graph
        if create_graph:
            found, expected = (
                torch.autograd.grad(f(x).float().square().sum(), model.w)[0]
                for f in (call, gradient)
            )
            assert expected.any()
            assert torch.equal(found, expected)


def test_weights_that_kernels_would_copy_are_left_alone() -> None:
    w = nn.Parameter(torch.randn(2 * N, 2 * N).bfloat16())

    def slices(x: Tensor) -> Tensor:
        x = x @ w[:N].t()
        x = x @ w[N:]
        x = x @ w[:, N:]
        x = nn.functional.linear(x, w[:, ::2])
        x = nn.functional.linear(x, w[::2])
        return x @ w[0].expand(N, 2 * N)

    why = "its weight has gaps: kernels would copy it first, and times are without that"
    expected = ["", "", why, why, why, why]
    assert [x.why_not for x in products_of(slices, rows(M, 2 * N))] == expected


def test_without_gradients_only_the_output_has_a_route() -> None:
    layer = layer_of()

    def blocks(x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + layer(x).sum()
        return layer(x)  # type: ignore[no-any-return]

    assert [x.is_trained for x in products_of(blocks, rows(M, K))] == [False, True]
    with torch.no_grad():
        assert not any(x.is_trained for x in products_of(layer, rows(M, K)))


def test_parameters_that_inductor_freezes_are_found() -> None:
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        found = products_of(Calls(), rows(128, K))
    assert [x.name for x in found][:4] == ["layer", "w", "several", "w"]
    assert not any(x.why_not for x in found[:6])


# ---- options ----


def test_skipped_and_unmeasured_products_say_why() -> None:
    model = Calls().requires_grad_(False)
    compiled(model, skip="layer")(rows(128, K))
    words = explain()
    assert "layer (m=128, n=64, k=48): unchanged: skip names it" in words
    assert "w (m=128, n=64, k=64): output: nothing was measured" in words


@pytest.mark.parametrize(
    ("options", "mode", "message"),
    [
        (None, None, 'without a budget; expected options={"budget": 0.06}'),
        ({"device": H200}, None, "without a budget"),
        (None, "max-autotune", """options={"budget": 0.06, "mode": 'max-autotune'}"""),
        ({"budget": True}, None, "budget"),
        ({"budget": -1}, None, "budget"),
        ({"budget": 0.06, "buget": 1}, None, "unknown option buget; expected one of budget"),
        ({"budget": 0.06, 3: 1}, None, "unknown option 3; expected one of budget"),
        ({"budget": 0.06, "mode": []}, None, "mode [] is unknown; expected one of default"),
        ({"budget": 0.06, "mode": "fast"}, None, "mode 'fast' is unknown; expected one of default"),
        ({"budget": 0.06, "regime": "fast"}, None, "regime 'fast' is unknown"),
        ({"budget": 0.06, "device": "H2000"}, None, "H2000"),
        ({"budget": 0.06, "skip": 3}, None, "skip is 3; expected names, or patterns"),
        ({"budget": 0.06, "distribution": 3}, None, "distribution is 3"),
        ({"budget": 0.06, "check": "often"}, None, "often"),
    ],
)  # fmt: skip
def test_wrong_options_raise_with_what_is_expected(
    options: dict[Any, Any] | None, mode: str | None, message: str
) -> None:
    call = torch.compile(layer_of(), backend=compile_graph, options=options, mode=mode)
    with pytest.raises(BackendCompilerFailed) as raised:
        call(rows(M, K))
    assert message in str(raised.value)


def test_other_options_are_those_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def take(gm: fx.GraphModule, inputs: Any, options: Any) -> Any:
        given.append(options)
        return gm.forward

    monkeypatch.setattr(torch._inductor, "compile", take)
    options = {"budget": ErrorBudget(row_err=0.06), "mode": "max-autotune-no-cudagraphs",
               "max-autotune": False, "epilogue_fusion": True}  # fmt: skip
    torch.compile(layer_of(), backend=compile_graph, options=options)(rows(M, K))
    assert given == [
        {"max_autotune": False, "coordinate_descent_tuning": True, "epilogue_fusion": True}
    ]


def test_torch_finds_the_backend_by_its_name() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    group = "torch_dynamo_backends"
    [(name, value)] = project["project"]["entry-points"][group].items()
    assert name == "lokakern"
    assert EntryPoint(name, value, group).load() is compile_graph
