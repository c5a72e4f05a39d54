"""Products with parameters of no `nn.Linear` in conversions: found, chosen, told and undone."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

import lokakern
from lokakern import numerics
from lokakern.conversion.convert import Conversion
from lokakern.conversion.routes import grad_input_problem, output_problem
from lokakern.conversion.variants import groups_of, observed_rows
from lokakern.errors import UnknownNameError, UnsupportedError
from lokakern.functional import checks
from lokakern.nn.linear import Linear
from lokakern.nn.raw_product import CHILD, products_of
from lokakern.workloads.gemm_gradient_cases import grad_weight_case
from tests.support.conversions import H200, report_of, rows_of
from tests.support.measurements import Book

N, K, M = 64, 48, 256
convert = functools.partial(lokakern.convert, device=H200, distribution="X1")
forced = functools.partial(lokakern.convert, device=H200, kernels="row")


class Raw(nn.Module):
    """Products of several forms, and the same as linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(K, N) * K**-0.5)
        self.same = nn.Parameter(torch.randn(N, N) * N**-0.5)
        self.square = nn.ParameterList([nn.Parameter(torch.randn(N, N) * N**-0.5)])
        self.experts = nn.Parameter(torch.randn(2, 1, N, N) * N**-0.5)
        self.bias = nn.Parameter(torch.randn(N))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.up + self.bias)
        x = torch.tanh(functional.linear(x, self.same, self.bias))
        x = torch.tanh(torch.addmm(self.bias, x, self.square[0]))
        x = torch.tanh(torch.mm(x, self.experts[0, 0].t()))
        y = torch.matmul(self.experts[1][0], x.unsqueeze(2))  # as the experts of DCN-Mix
        return y.squeeze(2)


class Plain(nn.Module):
    """The same as `Raw` with linear layers."""

    def __init__(self, raw: Raw) -> None:
        super().__init__()
        weights = (raw.up.t(), raw.same, raw.square[0].t(), raw.experts[0, 0], raw.experts[1, 0])
        self.layers = nn.ModuleList()
        for place, weight in enumerate(weights):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=place in (1, 2))
            layer.weight.data = weight.detach().clone(memory_format=torch.contiguous_format)
            if layer.bias is not None:
                layer.bias.data = raw.bias.detach().clone()
            self.layers.append(layer)
        self.bias = nn.Parameter(raw.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth, fifth = self.layers
        x = torch.tanh(first(x) + self.bias)
        x = torch.tanh(fourth(torch.tanh(third(torch.tanh(second(x))))))
        y: Tensor = fifth(x)
        return y

    def gradients(self) -> list[Tensor]:
        """In the order of the parameters of `Raw`."""
        first, second, third, fourth, fifth = (layer.weight.grad for layer in self.layers)
        biases = [self.bias.grad, self.layers[2].bias.grad, self.layers[1].bias.grad]
        bias = biases[1] + biases[2]
        return [first.t(), second, torch.stack([fourth, fifth])[:, None], bias + biases[0],
                third.t()]  # fmt: skip


NAMES = ["up", "same", "square.0", "experts.0.0", "experts.1.0"]


def raw(dtype: torch.dtype = torch.bfloat16) -> Raw:
    torch.manual_seed(0)
    return Raw().to(dtype)


def rows(m: int = M, dtype: torch.dtype = torch.bfloat16, k: int = K) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(dtype)


def passed(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradient of the input, and those of parameters."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    assert x.grad is not None
    grads = [p.grad for p in model.parameters()]
    found = [g for g in grads if g is not None]
    found = model.gradients() if isinstance(model, Plain) else found
    model.zero_grad()
    return [y.detach(), x.grad, *found]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def measured(n: int, k: int, is_turned: bool, errors: bool = True) -> list[Any]:
    """Rows of the three products of a weight in one layout, at `M` samples."""
    problems = (
        output_problem(n, k, "none", is_turned)(M), grad_input_problem(n, k, is_turned)(M),
        grad_weight_case(M, n, k).problem,
    )  # fmt: skip
    return [x for p in problems for x in rows_of(p, bf16=8.0, row=4.0, errors=errors)]


# --- what runs


@pytest.mark.parametrize("autocast", [False, True])
def test_bits_are_those_of_converted_linear_layers(autocast: bool) -> None:
    model = raw(torch.float32 if autocast else torch.bfloat16)
    plain = Plain(model).to(model.bias.dtype)
    assert list(forced(model).sites) == NAMES
    forced(plain)
    x = rows(dtype=model.bias.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, expected = passed(model, x), passed(plain, x)
    assert same(found[:2], expected[:2])
    # The bias is one parameter here, and three there: its sum is rounded in another order.
    names = [name for name, _ in model.named_parameters()]
    for name, one, other in zip(names, found[2:], expected[2:], strict=True):
        if name == "bias":
            assert torch.allclose(one, other, rtol=0.02, atol=0.1)
        else:
            assert torch.equal(one, other), name
    exact = raw(torch.float64)
    assert numerics.measure_errors(found[0].double(), exact(rows().double())).row_err < 0.2


@pytest.mark.parametrize("autocast", [False, True])
def test_unquantized_products_have_the_bits_of_the_original(autocast: bool) -> None:
    model = raw(torch.float32 if autocast else torch.bfloat16)
    twin, x = copy.deepcopy(model), rows(dtype=model.bias.dtype)
    forced(model, m_range=(16, 32))  # x has more rows
    assert "forward" in vars(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert same(passed(model, x), passed(twin, x))
        assert not same(passed(model, x[:32]), passed(twin, x[:32]))
    # Without autocast float32 is not quantized.
    wide, x = raw(torch.float32), rows(dtype=torch.float32)
    forced(wide)
    assert same(passed(wide, x), passed(raw(torch.float32), x))


def test_a_parameter_that_is_read_twice_is_cast_once() -> None:
    """Autocast casts a parameter once, so that its gradients are added in bfloat16."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(K, K) * K**-0.5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.w) @ self.w

    model, x = Twice(), rows(dtype=torch.float32)
    twin = copy.deepcopy(model)
    forced(model, m_range=(16, 32))
    with torch.autocast("cpu", torch.bfloat16):
        assert same(passed(model, x), passed(twin, x))


def test_other_inputs_run_the_original() -> None:
    model = raw()
    forced(model)
    assert model(rows(0)).shape == (0, N)
    with pytest.raises(RuntimeError):
        model(rows(k=K + 1))
    with pytest.raises(RuntimeError):
        model(rows()[None])  # torch.addmm takes no third axis

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(N, K))

        def forward(self, x: Tensor) -> Tensor:
            return self.w @ x

    wide = Wide().bfloat16()
    twin = copy.deepcopy(wide)
    assert list(forced(wide).sites) == ["w"]
    for shape in ((K,), (K, 16), (4, K, 16)):  # whose rows are no rows in memory
        x = torch.randn(shape).bfloat16()
        assert torch.equal(wide(x), twin(x))
    x = torch.randn(16, K, 1).bfloat16()
    assert not torch.equal(wide(x), twin(x)) and wide(x).shape == (16, N, 1)


def test_a_parameter_may_be_read_in_both_directions() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(N, K) * K**-0.5)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(torch.tanh(functional.linear(x, self.w) @ self.w), self.w)

    model = Tied().bfloat16()
    handle = forced(model)
    assert list(handle.sites) == ["w", "w.t"]
    assert not same(passed(model, rows()), passed(copy.deepcopy(Tied().bfloat16()), rows()))
    handle.undo()
    forced(model, skip="w.t")
    assert len(products_of(model)) == 1


class Layer(nn.Module):
    """HSTU: projections in raw parameters, dropout, and arguments that are seldom given."""

    def __init__(self, dim: int = N) -> None:
        super().__init__()
        self.uvqk = nn.Parameter(torch.randn(dim, 4 * dim) * dim**-0.5)
        self.out = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)
        self.norm, self.drop = nn.LayerNorm(dim), nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        y = functional.silu(torch.matmul(self.norm(x), self.uvqk))
        u, v, q, k = y.chunk(4, -1)
        scores = functional.silu(q @ k.mT) / x.shape[-2]
        if mask is not None:
            scores = scores * mask
        y = functional.dropout(u * (scores @ v), self.drop.p, self.drop.training)
        return x + functional.linear(y, self.out.to(y.dtype)) * scale


def test_hstu_trains_and_serves() -> None:
    torch.manual_seed(0)
    model = Layer().bfloat16()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 16, N).bfloat16()
    handle = forced(model)
    assert list(handle.sites) == ["uvqk", "out"] and not handle.skipped
    for is_trained in (True, False):
        for each in (model, twin):
            each.train(is_trained)
        outputs = []
        for each in (model, twin, model):
            torch.manual_seed(3)
            outputs.append(each(x))
        assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[1])
        error = (outputs[0] - outputs[1]).float().norm() / outputs[1].float().norm()
        assert error < 0.06
    assert torch.equal(model(x, None, scale=1.0), model(x))
    mask = torch.ones(16, 16).tril().bfloat16()
    assert torch.equal(model(x, mask), twin(x, mask))  # the forward of the class
    assert torch.equal(model(x=x, scale=2.0), twin(x, scale=2.0))
    with pytest.raises(TypeError):
        model(x, x=x)
    for each in (model, twin):
        each.drop.train()  # which the forward asks
    torch.manual_seed(4)
    y = model(x)
    torch.manual_seed(4)
    assert torch.equal(y, twin(x)) and not torch.equal(y, twin.eval()(x))


def test_activation_checkpoints_and_second_derivatives() -> None:
    from torch.utils.checkpoint import checkpoint

    model = raw()
    forced(model)
    expected = passed(model, rows())

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.model, x, use_reentrant=False)
            return y

    assert same(passed(Checkpointed(), rows()), expected)
    grads = []
    for each in (model, raw()):
        x = rows().requires_grad_()
        (first,) = torch.autograd.grad(each(x).float().square().sum(), x, create_graph=True)
        grads.append(torch.autograd.grad(first.float().square().sum(), each.up)[0])
    assert torch.allclose(grads[0], grads[1], rtol=0.1, atol=0.1 * float(grads[1].abs().max()))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_modules(dynamic: bool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = raw()
    forced(model)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for m in (32, 17, 256) if dynamic else (32,):
            assert torch.equal(compiled(rows(m)), model(rows(m)))
    assert counter.frame_count == 1
    assert counter.graphs[0].code.count("ops.lokakern.routed_gemm") == len(NAMES)
    if not dynamic:
        assert same(passed(compiled, rows(32)), passed(model, rows(32)))


class Pair(nn.Module):
    """Two products with an activation between them: little for Inductor to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(N, 2 * N) * N**-0.5)
        self.down = nn.Parameter(torch.randn(N, 2 * N) * N**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.silu(torch.matmul(x, self.up)), self.down)


@pytest.mark.rest  # Inductor compiles several models
def test_compiled_by_inductor() -> None:
    torch.manual_seed(0)
    model = Pair().bfloat16()
    forced(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    x = torch.randn(2, 16, N).bfloat16()
    y, expected = compiled(x), model(x)
    # Inductor quantizes before it rounds to bfloat16: some values round to another FP8 number.
    assert (y - expected).float().norm() < 0.04 * expected.float().norm()
    y.float().sum().backward()
    assert model.up.grad is not None and model.down.grad is not None


# --- slices and equations


class Sliced(nn.Module):
    """One product with a part of a parameter."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.run = nn.Parameter(torch.randn(96, 88) * 0.1), run
        self.cube = nn.Parameter(torch.randn(2, 96, 88) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


linear, einsum = functional.linear, torch.einsum
SLICES: dict[str, list[tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], Tensor]]]] = {
    "w.0:40": [(lambda s, x: linear(x, s.w[:40]), lambda s: s.w[:40])],
    "w.88:96,3:50": [(lambda s, x: linear(x, s.w[-8:, 3:50]), lambda s: s.w[88:, 3:50])],
    "w.4:20,10:88": [
        (lambda s, x: linear(x, s.w[..., 10:][4:20]), lambda s: s.w[4:20, 10:]),
        (lambda s, x: linear(x, s.w.t()[10:].t()[2:40][2:18]), lambda s: s.w[4:20, 10:]),
    ],
    "w.:,24:88": [(lambda s, x: x @ s.w[:, 24:], lambda s: s.w[:, 24:].t())],
    "w.:,8:88": [(lambda s, x: x @ s.w.t()[8:], lambda s: s.w[:, 8:])],
    "w.16:49": [
        (lambda s, x: linear(x, s.w.narrow(0, 16, 33)), lambda s: s.w[16:49]),
        (lambda s, x: x @ torch.narrow(s.w.t(), dim=1, start=-80, length=33), lambda s: s.w[16:49]),
    ],
    "w.32:64": [
        (lambda s, x: linear(x, s.w.chunk(3)[1]), lambda s: s.w[32:64]),
        (lambda s, x: linear(x, s.w.split(32)[-2]), lambda s: s.w[32:64]),
    ],
    "w.:,60:88": [
        (lambda s, x: x @ torch.split(s.w, [60, 28], dim=1)[1], lambda s: s.w[:, 60:].t()),
        (lambda s, x: x @ s.w.chunk(3, 1)[2], lambda s: s.w[:, 60:].t()),
    ],
    "cube.1.2:96": [(lambda s, x: linear(x, s.cube[1, 2:]), lambda s: s.cube[1, 2:])],
    "cube.0.:,0:16": [
        (lambda s, x: x @ s.cube[-2][:, :16], lambda s: s.cube[0, :, :16].t()),
        (lambda s, x: x @ s.cube[:, :, :16][0], lambda s: s.cube[0, :, :16].t()),
    ],
    "w": [
        (lambda s, x: linear(x, s.w[:]), lambda s: s.w),
        (lambda s, x: einsum("bld,de->ble", x, s.w), lambda s: s.w.t()),
        (lambda s, x: einsum("...d, ed -> ...e", x, s.w), lambda s: s.w),
        (lambda s, x: einsum("ed,bld->ble", s.w, x), lambda s: s.w),
        (lambda s, x: einsum("de,...d->...e", s.w, x), lambda s: s.w.t()),
    ],
}  # fmt: skip
CASES = [(name, *each) for name, several in SLICES.items() for each in several]


@pytest.mark.parametrize(("name", "run", "matrix"), CASES, ids=[name for name, *_ in CASES])
def test_slices_and_equations(
    name: str, run: Callable[[Any, Tensor], Tensor], matrix: Callable[[Any], Tensor]
) -> None:
    """Bits are those of a converted layer, or, where nothing is quantized, of the original."""
    torch.manual_seed(0)
    model = Sliced(run).bfloat16()
    twin = copy.deepcopy(model)
    weight = matrix(twin)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False).bfloat16()
    layer.weight.data = weight.detach().clone(memory_format=torch.contiguous_format)
    x = torch.randn(3, 7, weight.shape[1]).bfloat16()
    x[1, 2] = 0
    handle = forced(model, m_range=(16, 30))
    assert list(handle.sites) == [name]
    site = handle.sites[name].module
    assert (site.out_features, site.in_features) == tuple(weight.shape)
    forced(layer)
    found, expected = passed(model, x), passed(layer, x)
    assert same(found[:2], expected[:2])
    weight.backward(expected[2])
    parameter = twin.cube if name.startswith("cube") else twin.w
    assert torch.equal(found[2], parameter.grad)
    exact = x.double() @ weight.detach().double().t()
    assert (
        numerics.measure_errors(found[0].double().flatten(0, 1), exact.flatten(0, 1)).row_err < 0.05
    )
    twin.zero_grad()
    wide = torch.cat([x, x])
    assert same(passed(model, wide), passed(twin, wide))
    with torch.no_grad():
        frozen = forced(model, inference=True)
        for each in model.parameters():
            each.mul_(2)
        assert torch.equal(model(x), found[0])
        frozen.undo()
    handle.undo()
    assert torch.equal(model(x), twin(x) * 2)


def test_compiled_slices_and_equations() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        first, second = s.w.chunk(2)
        y = linear(x, first[:, :40]) * linear(x, second[:, 48:])
        return einsum("bd,de->be", y, s.cube[0, :48])

    model = Sliced(run).bfloat16()
    assert list(forced(model).sites) == ["w.0:48,0:40", "w.48:96,48:88", "cube.0.0:48"]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = rows(17, k=40)
    assert same(passed(compiled, x), passed(model, x))
    assert not torch.equal(model(x), Sliced.forward(model, x))


def test_other_shapes_of_an_equation_run_the_original() -> None:
    model = Sliced(lambda s, x: einsum("bd,de->be", x, s.w)).bfloat16()
    assert list(forced(model).sites) == ["w"]
    assert model(torch.randn(20, 96).bfloat16()).shape == (20, 88)
    for shape in ((96,), (2, 16, 96), (16, 95)):
        with pytest.raises(RuntimeError):
            model(torch.randn(shape).bfloat16())


# --- inference


def test_weights_are_quantized_once_in_inference() -> None:
    model, x = raw(), rows()
    plain = Plain(model).bfloat16()
    handle = forced(model, inference=True)
    forced(plain, inference=True)
    assert list(model.state_dict()) == list(raw().state_dict())
    assert list(dict(model.named_parameters())) == list(dict(raw().named_parameters()))
    with torch.no_grad():
        y = model(x)
        assert torch.equal(y, plain(x))
        model.up.mul_(2)
        assert torch.equal(model(x), y)
        addresses = [buffer.data_ptr() for buffer in model.buffers()]
        torch.manual_seed(5)
        other = Raw().bfloat16()
        model.load_state_dict(other.state_dict())
        assert [buffer.data_ptr() for buffer in model.buffers()] == addresses
        z = model(x)
        forced(other, inference=True)
        assert torch.equal(z, other(x)) and not torch.equal(z, y)
        handle.undo()
        assert torch.equal(model(x), Raw.forward(model, x)) and not list(model.buffers())


def test_copies_and_pickles() -> None:
    for inference in (False, True):
        model, x = raw(), rows()
        handle = forced(model, inference=inference)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        with torch.no_grad():
            y = model(x)
            handle.undo()
            for twin in twins:
                assert torch.equal(twin(x), y) and not torch.equal(model(x), y)
                owners = [product.owner[0] for product in products_of(twin).values()]
                assert all(owner is twin for owner in owners)
                torch.manual_seed(6)
                state = Raw().bfloat16().state_dict()
                twin.load_state_dict(state)
                assert not torch.equal(twin(x), y)


def test_kept_weights() -> None:
    model, x = raw(), rows()
    handle = forced(model)
    expected = passed(model, x)
    with handle.weights_unchanged():
        assert same(passed(model, x), expected)
        assert {key[0] for p in products_of(model).values() for key in p._kept} == {0, 1}
        with torch.no_grad():
            model.up.mul_(2)
        assert torch.equal(passed(model, x)[0], expected[0])
    assert not torch.equal(passed(model, x)[0], expected[0])


# --- choices


class Both(nn.Module):
    """One product by a weight [n, k], and one by a weight [k, n]."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(N, K))
        self.turned = nn.Parameter(torch.randn(K, N))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.row) * (x @ self.turned)


@pytest.mark.parametrize("is_turned", [False, True])
def test_routes_follow_the_layout_of_the_weight(book: Book, is_turned: bool, capsys: Any) -> None:
    book.write(*measured(N, K, is_turned))
    handle = convert(Both().bfloat16(), 0.06)
    name = "turned" if is_turned else "row"
    quantized = [f"{row['site']}/{row['gemm']}" for row in handle.choices if row["us"] == [4.0]]
    assert quantized == [f"{name}/{gemm}" for gemm in ("output", "grad_input", "grad_weight")]
    assert "2.00x as fast" in handle.explain(name)
    handle.table()
    assert name in capsys.readouterr().out
    assert repr(handle).startswith("Conversion(2 sites, 3 of 6 products quantized")
    # A product with [k, n] is a gradient of a layer with as many outputs as it has inputs.
    text = handle.suite([M])
    ours = f'n = {N}\nk = {K}\nforms = ["gemm", "grad_input"]'
    theirs = f'n = {K}\nk = {N}\nforms = ["grad_input", "gemm"]'
    assert (ours in text, theirs in text) == (is_turned, not is_turned)


def test_without_routes_the_forward_stays(book: Book) -> None:
    model = raw()
    handle = convert(model, None)
    assert list(handle.sites) == NAMES and "forward" not in vars(model)
    book.write(*measured(N, K, True))
    assert set(handle.refresh(0.06)) == {f"up/{g}" for g in ("output", "grad_input", "grad_weight")}
    assert "forward" in vars(model)
    handle.refresh(None)
    assert "forward" not in vars(model) and same(passed(model, rows()), passed(raw(), rows()))


def test_skip_and_filter() -> None:
    model = raw()
    handle = forced(model, skip=["up", "experts.*"], filter=lambda m, _: m.in_features == N or 1)
    assert list(handle.sites) == ["same", "square.0"]
    assert set(handle.skipped) == {"up", "experts.0.0", "experts.1.0"}
    handle.undo()
    handle = forced(model, filter=lambda module, name: name == "up" and module.out_features == N)
    assert list(handle.sites) == ["up"] and not handle.skipped
    handle.undo()
    with pytest.raises(UnknownNameError, match="matches no layer; layers are up"):
        forced(model, skip="other")


def test_undoing_in_any_order() -> None:
    model, x = raw(), rows()
    plain = passed(model, x)
    first = forced(model, skip="up")
    ours = passed(model, x)
    second = lokakern.convert(model, kernels="tensor", device=H200)
    assert len(products_of(model)) == 5
    theirs = passed(model, x)
    first.undo()
    assert same(passed(model, x), theirs)
    second.undo()
    assert same(passed(model, x), plain)
    assert CHILD not in model._modules and "forward" not in vars(model)
    first = forced(model, skip="up")
    second = lokakern.convert(model, kernels="tensor", device=H200)
    second.undo()
    assert same(passed(model, x), ours)
    first.undo()
    assert same(passed(model, x), plain) and "forward" not in vars(model)


def test_a_conversion_of_only_raw_products_beside_one_by_a_report() -> None:
    """Probe observes no operands of raw products, so that a report leaves them alone."""
    model = nn.Sequential(nn.Linear(K, K), raw()).bfloat16()
    handle = lokakern.convert(model, report_of(), device=H200)
    assert list(handle.sites) == ["0"]
    assert "convert them by a budget" in handle.skipped["1.up"]
    other = forced(model, filter=lambda module, _: not isinstance(module, nn.Linear))
    assert list(other.sites) == [f"1.{name}" for name in NAMES]
    other.undo()
    assert "forward" not in vars(model[1]) and type(model[0]) is Linear


def test_groups_of_tuning() -> None:
    model = raw()
    handle = forced(model)
    x = rows(32)
    seen, trained, _ = observed_rows(handle, lambda: model(x))
    assert seen == {name: [32] for name in NAMES} and trained == set(NAMES)
    groups = groups_of(handle, seen, trained)
    assert {name for group in groups for name in group.sites} == set(NAMES)
    off = {name: handle.sites[name].routes for name in NAMES}
    plain = {
        name: tuple(type(r)(r.gemm, "", "off") for r in routes) for name, routes in off.items()
    }
    handle.use_routes(plain, keep_classes=True)
    assert "forward" in vars(model) and same(passed(model, x), passed(raw(), x))
    handle.use_routes(off, keep_classes=True)
    assert not same(passed(model, x), passed(raw(), x))


def test_changed_modules_run_as_they_are() -> None:
    class Scaled(Raw):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    torch.manual_seed(0)
    model = Scaled().bfloat16()
    handle: Conversion = forced(model)
    model.scale = 2.0
    checks.warn_once.cache_clear()
    with torch.no_grad():
        with pytest.warns(UserWarning, match="a Scaled was changed since its forward was traced"):
            assert torch.equal(model(rows()), raw()(rows()) * 2)
        handle.refresh()
        assert not torch.equal(model(rows()), raw()(rows()) * 2)


@pytest.mark.parametrize("strict", [False, True])
def test_exports_name_the_arguments_of_the_original(strict: bool) -> None:
    model = raw()
    forced(model)
    assert inspect.signature(model.forward) == inspect.signature(raw().forward)
    assert inspect.signature(copy.deepcopy(model).forward) == inspect.signature(raw().forward)
    sizes = {"x": {0: torch.export.Dim("m", min=2, max=4096)}}
    with torch.no_grad():
        exported = torch.export.export(model, (rows(),), dynamic_shapes=sizes, strict=strict)
        for m in (M, 7):
            assert torch.equal(exported.module()(rows(m)), model(rows(m)))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_changed_settings_of_children(is_compiled: bool) -> None:
    class Dropped(Raw):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.25)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 - self.drop.p)

    torch.manual_seed(0)
    model = Dropped().bfloat16()
    twin, handle = copy.deepcopy(model), forced(model)
    assert len(handle.sites) == len(NAMES)
    called = torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model
    with torch.no_grad():
        quantized = called(rows())
        assert torch.equal(quantized, model(rows())) and not torch.equal(quantized, twin(rows()))
        model.drop.p = twin.drop.p = 0.5
        assert torch.equal(called(rows()), twin(rows()))
        assert torch.equal(copy.deepcopy(model)(rows()), twin(rows()))
        handle.refresh()
        assert not torch.equal(called(rows()), twin(rows()))


def test_parameters_that_are_no_longer_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(N, N) * N**-0.5)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.first) @ self.second

    model = Tied().bfloat16()
    twin, handle, x = copy.deepcopy(model), forced(model), rows(k=N)
    assert list(handle.sites) == ["first"]
    assert not torch.equal(copy.deepcopy(model)(x), twin(x))
    model.second = nn.Parameter(torch.randn(N, N).bfloat16())
    twin.second = model.second
    assert torch.equal(model(x), twin(x))
    handle.refresh()
    assert not torch.equal(model(x), twin(x)) and torch.allclose(model(x), twin(x), atol=4.0)


@pytest.mark.parametrize("inference", [False, True])
def test_a_parameter_that_is_gone(inference: bool) -> None:
    model = raw()
    older, handle = (forced(model, inference=inference) for _ in range(2))
    parametrize.register_parametrization(model, "up", nn.Tanh())
    model.square = nn.ParameterList()
    with pytest.raises(UnsupportedError, match=r"has no parameter (up|square\.0) now"):
        handle.refresh()
    assert "up is gone" in repr(model)
    model.load_state_dict(model.state_dict())
    handle.undo()
    older.undo()
    assert CHILD not in model._modules and "forward" not in vars(model)


# --- what stays as it is


class Around(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.w, self.run = nn.Parameter(torch.randn(K, K)), run
        self.cube = nn.Parameter(torch.randn(2, K, K))
        self.layer = nn.Linear(K, K)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def keeps(s: Any, x: Tensor) -> Tensor:
    s.last = x @ s.w
    return s.last  # type: ignore[no-any-return]


def calls_all(s: Any, x: Tensor) -> Tensor:
    for child in s.children():
        x = child(x @ s.w)
    return x


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda s, x: x @ s.w if x.sum() > 0 else x, "torch.fx cannot trace it"),
        (keeps, "its forward sets the attribute last"),
        (calls_all, "its forward reads all children of the module"),
        (lambda s, x: x @ s.w + torch.rand(K), "draws random numbers"),
        (lambda s, x: x @ s.w + torch.ones(K), "makes a tensor of no input"),
        (lambda s, x: x * s.w, "no forward of its module shows a product of rows with it"),
        (lambda s, x: torch.addmm(x, x, s.w, alpha=2), "no forward of its module shows"),
        (lambda s, x: (s.w @ s.w) * x.sum(), "no forward of its module shows"),
        (lambda s, x: x @ s.w.transpose(0, 0)[None][0], "no forward of its module shows"),
        (lambda s, x: functional.linear(x, s.w[::2]), "no forward of its module shows"),
        (lambda s, x: functional.linear(x, s.w[: x.shape[0]]), "no forward of its module shows"),
        (lambda s, x: x * s.w[:, 0] + x * s.w[:1], "no forward of its module shows"),
        (lambda s, x: torch.einsum("bd,de->eb", x, s.w), "no forward of its module shows"),
        (lambda s, x: torch.einsum("bd,de->b", x, s.w), "no forward of its module shows"),
        (lambda s, x: torch.einsum("dd,de->de", x, s.w), "no forward of its module shows"),
        (lambda s, x: torch.einsum("bd,de", x, s.w), "no forward of its module shows"),
        (lambda s, x: torch.einsum("be,de->be", x, s.w), "no forward of its module shows"),
        (lambda s, x: torch.einsum("bd,ede->be", x, s.cube), "no forward of its module shows"),
        (lambda s, x: torch.einsum("bd,de,ef->bf", x, s.w, s.w), "no forward of its module shows"),
    ],
)
def test_why_a_product_is_left_alone(run: Callable[[Any, Tensor], Any], words: str) -> None:
    model = Around(run)
    attributes = set(vars(model))
    handle = forced(model)
    assert list(handle.sites) == ["layer"] and words in handle.skipped["w"]
    assert handle.skipped["w"].startswith(f"a Around holds [{K}, {K}]; ")
    assert set(vars(model)) == attributes and set(model._modules) == {"layer"}


def test_matrices_of_parameters_with_more_axes() -> None:
    forms: list[tuple[Callable[[Any, Tensor], Any], list[str]]] = [
        (lambda s, x: x @ s.cube[-1], ["cube.1"]),
        (lambda s, x: x @ s.cube[0].T + x @ s.cube[1].mT, ["cube.0", "cube.1"]),
        (lambda s, x: x.matmul(s.w.permute(1, 0)), ["w"]),
        (lambda s, x: x.mm(s.w.transpose(-1, 0).bfloat16()), ["w"]),
        (lambda s, x: torch.matmul(input=x, other=s.w), ["w"]),
        (lambda s, x: torch.matmul(x, s.cube), []),  # a batch
        (lambda s, x: x @ s.cube[:, 0].T @ s.cube[:, 1], []),
    ]
    for run, names in forms:
        model = Around(run).bfloat16()
        twin, handle = copy.deepcopy(model), forced(model)
        assert list(handle.sites) == ["layer", *names]
        x = rows(32)
        assert torch.equal(model(x), twin(x)) == (not names)
        assert torch.allclose(model(x), twin(x), atol=2.0)


def test_a_bias_of_another_size_is_not_quantized() -> None:
    forms: list[Callable[[Any, Tensor], Any]] = [
        lambda s, x: torch.addmm(s.w[0, :1], x, s.w),
        lambda s, x: functional.linear(x, s.w, s.w[0, :1]),
    ]
    for run in forms:  # a kernel would read beyond it
        model = Around(run).bfloat16()
        twin, handle = copy.deepcopy(model), forced(model)
        assert "w" in handle.sites and torch.equal(model(rows()), twin(rows()))


def test_scores_of_items_by_the_embedding() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(N, K)

        def forward(self, places: Tensor) -> Tensor:
            return functional.linear(self.items(places), self.items.weight)

    model = Scores().bfloat16()
    assert list(forced(model).sites) == ["items.weight"]
    places = torch.arange(16)
    assert not torch.equal(model(places), Scores.forward(model, places))
