"""Relus in products: values and gradients, where both modules run, and routes between others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

from lokakern.native import NATIVE
from lokakern.nn import rectified
from lokakern.nn.linear import Linear
from lokakern.nn.rectified import KERNEL, rectified_between, route_between
from lokakern.nn.routed_matmul import in_dtype
from lokakern.nn.static_handoff import BoundedSequential, set_handoff
from tests.support import native
from tests.support.routed_layers import BY_ROW, EAGER_ROUTES, K, layer_of, rows

ALWAYS = f"none;16:0={KERNEL};1:0={KERNEL}"
BF16, REST = torch.bfloat16, pytest.mark.rest
HALVES = pytest.mark.parametrize("half", [BF16, torch.float16], ids=str)
MOSTLY_BF16 = pytest.mark.parametrize("half", [BF16, pytest.param(torch.float16, marks=REST)])
ONLY_16 = f"none;16:0={KERNEL};1:0="


@pytest.fixture(params=["Python", "C++"])
def launched(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[int]]:
    """Rows of calls with the relu in the product; in C++ those that profilers see."""
    found: list[int] = []
    product = torch._addmm_activation

    def counted(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        found.append(len(x))
        return product(bias, x, weight)

    if request.param == "Python":
        monkeypatch.setattr(NATIVE, "call_sequence", None)
        monkeypatch.setattr(NATIVE, "call_layer", None)
        monkeypatch.setattr(rectified, "_addmm_activation", counted)
        yield found
        return
    monkeypatch.setattr(rectified, "_addmm_activation", counted)
    with native.in_use():
        yield found


def model_of(
    *modules: nn.Module, routes: list[str] | None = None, half: torch.dtype = torch.bfloat16
) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*modules).to(half).eval()
    none = [""] * len(model)
    set_handoff(model, none, none, rectified=routes or [*rectified_between(model)])
    return model


def usual(routes: list[str] | None = None, half: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return model_of(
        Linear(K, 2 * K), nn.ReLU(), Linear(2 * K, K), nn.ReLU(inplace=True), Linear(K, 8),
        routes=routes, half=half,
    )  # fmt: skip


def plain(model: nn.Sequential) -> nn.Sequential:
    """The modules without settings."""
    return nn.Sequential(*copy.deepcopy(list(model)))


def run_of_profile(model: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, int]:
    """The output, and the number of products with a relu."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        y = model(x)
    return y, sum(event.name == "aten::_addmm_activation" for event in found.events())


def test_where_the_relu_may_be_in_the_product() -> None:
    model = nn.Sequential(
        Linear(K, K), nn.ReLU(), Linear(K, K), nn.ReLU(inplace=True), Linear(K, K), nn.Tanh(),
        Linear(K, K, bias=False), nn.ReLU(), Linear(K, 12), nn.ReLU(), nn.Linear(12, K), nn.ReLU(),
    ).bfloat16()  # fmt: skip
    assert [place for place, route in enumerate(rectified_between(model)) if route] == [0, 2]
    assert rectified_between(model)[0] == ALWAYS
    model[2] = layer_of((BY_ROW, "", ""), n=K)  # which quantizes from 16 rows on
    first, _, second, *_ = rectified_between(model)
    assert first == second != ALWAYS
    assert any(rectified_between(model.float()))  # for autocast
    assert not any(rectified_between(model.double()))
    padded = Linear(K, K).bfloat16()
    padded.padding = (8, 0)
    assert not any(rectified_between(nn.Sequential(padded, nn.ReLU())))
    empty = nn.Linear(0, 8, dtype=torch.bfloat16)
    empty.__class__ = Linear
    assert not any(rectified_between(nn.Sequential(empty, nn.ReLU())))
    for k, n, is_narrow in ((13, 52, False), (13, 56, True), (14, 48, False), (13, 57, False)):
        layer = Linear(k, n).bfloat16()
        assert rectified_between(nn.Sequential(layer, nn.ReLU()))[0] == (
            ALWAYS if is_narrow else ""
        )


def test_the_route_between_two_others() -> None:
    own = "row;16:0=,64=a,1024=;1:0="
    then = "row;16:0=,2048=b;1:0=,33=b"
    assert route_between("", "") == ALWAYS
    assert route_between(own, then) == (
        f"none;16:0={KERNEL},64=,1024={KERNEL},2048=;1:0={KERNEL},33="
    )
    assert route_between("row;16:0=a;1:0=a", "") == ""


@pytest.mark.parametrize("shape", [(32, K), (3, K), (0, K), (4, 8, K)])
@HALVES
def test_values_are_those_of_both_modules(
    launched: list[int], shape: tuple[int, ...], half: torch.dtype
) -> None:
    model = usual(half=half)
    x = torch.randn(shape).to(half)
    expected = plain(model)(x)
    with torch.no_grad():
        for _ in range(3):
            y, count = run_of_profile(model, x)
            assert torch.equal(y, expected) and count == 2


def test_a_route_holds_at_its_rows_only(launched: list[int]) -> None:
    model = usual([ONLY_16, "", "", "", ""])
    with torch.no_grad():
        for m, expected in ((32, 1), (33, 0), (32, 1)):
            assert run_of_profile(model, torch.randn(m, K).bfloat16())[1] == expected


def test_both_modules_run_where_anything_is_unusual(launched: list[int]) -> None:
    x = torch.randn(32, K).bfloat16()

    def count(model: nn.Sequential, x: Tensor = x) -> int:
        expected = plain(model)(x)
        y, found = run_of_profile(model, x)
        assert torch.equal(y, expected)
        return found

    assert count(usual()) == 0  # with gradients
    with torch.no_grad():
        assert count(usual()) == 2
        seen: list[Tensor] = []
        for place in (0, 1):
            model = usual()
            model[place].register_forward_hook(lambda _m, _x, y: seen.append(y))
            assert count(model) == 1
        assert len(seen) == 4  # those of the copies, too
        model = usual()
        model.float()
        assert count(model, x.float()) == 0
        model = usual()
        model[0].bias = None
        assert count(model) == 1
        model = usual()
        model[1] = nn.SiLU()
        assert count(model) == 0  # not as known
        model = usual()
        vars(model[0])["_routes"], model[0]._plan = (BY_ROW, "", ""), ""
        model[0].changed()
        assert run_of_profile(model, x)[1] == 1  # the layer quantizes now
        with torch.autocast("cpu", torch.bfloat16):
            assert run_of_profile(usual(), x)[1] in (0, 2)
        with torch.autocast("cpu", torch.float16):
            assert run_of_profile(usual(), x)[1] == 0
    frozen = usual().requires_grad_(False)
    assert count(frozen) == 2  # nothing needs a gradient
    assert count(frozen, x.clone().requires_grad_()) == 0


def test_both_modules_run_with_unusual_operands(launched: list[int]) -> None:
    x = torch.randn(32, K).bfloat16()

    @torch.no_grad()
    def count(model: nn.Sequential, x: Tensor) -> int:
        for _ in range(2):  # C++ runs the second call
            y, found = run_of_profile(model, x)
            assert torch.equal(y, plain(model)(x))
        return found

    assert count(usual(), x.view(4, 8, K).transpose(0, 1)) == 1  # the second layer's input is dense
    assert count(usual(), x.to_sparse()) == 1
    other = usual()
    for layer in (other[0], other[2], other[4]):
        layer.bias = nn.Parameter(layer.bias.float())  # which autocast casts
    with torch.autocast("cpu", torch.bfloat16):
        assert count(other, x) == 0
    meta, dual = usual().to("meta"), usual()
    with torch.no_grad(), forward_ad.dual_level():
        for _ in range(2):
            assert meta(x.to("meta")).shape == (32, 8)
            tangents = [
                forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent
                for model in (dual, plain(dual))
            ]
            assert torch.equal(*tangents)


@pytest.mark.parametrize("owner, name", [
    (nn.ReLU, "forward"), (nn.Module, "__call__"), (nn.Module, "_call_impl"),
])  # fmt: skip
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_replaced_method_of_a_class_is_called(
    launched: list[int], monkeypatch: pytest.MonkeyPatch, owner: type, name: str, is_compiled: bool
) -> None:
    model, before = usual(), getattr(owner, name)
    x = torch.randn(32, K).bfloat16()
    run = torch.compile(model, backend="aot_eager") if is_compiled else model
    with torch.no_grad():
        if not is_compiled:
            model(x)
        monkeypatch.setattr(owner, name, lambda self, *given: before(self, *given))
        if is_compiled:
            run(x)
        assert run_of_profile(run, x)[1] == 0


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_a_compiled_backward_pass_run(place: int, name: str) -> None:
    model, seen = usual(), []
    getattr(model[place], name)(lambda *given: seen.append(given[0]))
    x = rows(32).requires_grad_()
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    assert seen == [model[place]]


class Negated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(-1)


def test_gradients_are_of_the_relu_where_a_module_writes_to_its_output() -> None:
    model = model_of(Linear(K, K), nn.ReLU(), Negated(), Linear(K, 8))
    gradients = []
    for each in (model, lambda x: model[3](-model[1](model[0](x)))):
        x = rows(32).requires_grad_()
        torch._dynamo.reset()
        torch.compile(each, backend="aot_eager", fullgraph=True)(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_weight_of_another_class_is_multiplied_by_its_own_linear() -> None:
    model = usual()
    weight = model[0].weight.detach()
    model[0].weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        compiled(rows(32))
        assert run_of_profile(compiled, rows(32))[1] == 0  # its output is of that class, too


@pytest.mark.parametrize("is_strict", [False, True])
def test_an_exported_model_may_be_trained(is_strict: bool) -> None:
    model, x = usual(), rows(32)
    exported = torch.export.export(model, (x,), strict=is_strict).module()
    exported(x).sum().backward()
    assert exported.get_parameter("0.weight").grad is not None


@HALVES
def test_a_compiled_model_has_it_with_its_gradients(half: torch.dtype) -> None:
    model = usual(half=half).train()
    x = torch.randn(32, K).to(half).requires_grad_()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    other = plain(model)
    compiled(x)
    for _ in range(2):
        for each in (x, *model.parameters(), *other.parameters()):
            each.grad = None
        y, count = run_of_profile(compiled, x)
        assert count == 2
        y.float().square().sum().backward()
        found = [x.grad, *(p.grad for p in model.parameters())]
        x.grad = None
        z = other(x)
        z.float().square().sum().backward()
        assert torch.equal(y, z)
        for one, expected in zip(
            found, [x.grad, *(p.grad for p in other.parameters())], strict=True
        ):
            assert torch.equal(one, expected)
    with torch.no_grad():
        compiled(x)
        y, count = run_of_profile(compiled, x)
    assert torch.equal(y, other(x)) and count == 2


@HALVES
def test_compiled_code_pads_narrow_rows(half: torch.dtype) -> None:
    """Of 13 columns, with gradients."""
    model = model_of(Linear(13, 64), nn.ReLU(), Linear(64, 8), half=half).train()
    other, exact = plain(model), plain(model).double()
    x = torch.randn(32, 13).to(half).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x)
    results = []
    for each, expected in ((compiled, 1), (other, 0), (exact, 0)):
        given = x.detach().to(next(each.parameters()).dtype).requires_grad_()
        each.zero_grad()
        y, count = run_of_profile(each, given)
        y.double().square().sum().backward()
        assert count == expected
        results.append([y.detach(), given.grad, *(p.grad for p in each.parameters())])
    for one, usual, right in zip(*results, strict=True):
        assert one.shape == right.shape
        error, rounding = ((z.double() - right).norm() for z in (one, usual))
        assert error <= 1.5 * rounding + 1e-3 * right.norm()
    with torch.no_grad():
        compiled(x)
        y, count = run_of_profile(compiled, x)
    assert count == 1
    torch.testing.assert_close(y, results[1][0])


def test_eager_calls_of_narrow_rows_run_both_modules(launched: list[int]) -> None:
    model, x = model_of(Linear(13, 64), nn.ReLU(), Linear(64, 8)), torch.randn(32, 13).bfloat16()
    with torch.no_grad():
        for _ in range(3):
            y, count = run_of_profile(model, x)
            assert torch.equal(y, plain(model)(x)) and count == 0 and not launched


def test_a_held_copy_of_a_narrow_weight_does_not_matter() -> None:
    layer = layer_of(("", "", ""), n=64, k=13, bias=True)
    layer.freeze()
    assert layer.is_held
    model, x = model_of(layer, nn.ReLU(), Linear(64, 8)), torch.randn(32, 13).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(x)
        y, count = run_of_profile(compiled, x)
        assert count == 1
        torch.testing.assert_close(y, plain(model)(x))


def test_narrow_rows_are_not_padded_for_kernels_of_gradients() -> None:
    layer = layer_of(("", BY_ROW, ""), n=64, k=13, bias=True)
    model = model_of(layer, nn.ReLU(), Linear(64, 8))
    assert rectified_between(model)[0] == ALWAYS
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(32, 13).bfloat16().requires_grad_()
    compiled(x)
    y, count = run_of_profile(compiled, x)
    assert torch.equal(y, plain(model)(x)) and count == 0


@MOSTLY_BF16
def test_gradients_by_routes_of_a_compiled_layer(half: torch.dtype) -> None:
    """A layer whose gradients quantize, and not its output."""
    layer = layer_of(("", *[in_dtype(BY_ROW, half)] * 2), n=K, bias=True)
    model = model_of(layer, nn.ReLU(), Linear(K, 8), half=half)
    assert rectified_between(model)[0] == ALWAYS
    other = nn.Sequential(*copy.deepcopy(list(model)))
    x = rows(32).to(half).requires_grad_()
    results = []
    for each, count in ((model, 1), (other, 0)):
        x.grad = None
        compiled = torch.compile(each, backend="aot_eager", fullgraph=True)
        compiled(x)
        y, found = run_of_profile(compiled, x)
        assert found == count
        y.float().square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in each.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "half",
    [pytest.param(BF16, marks=REST), pytest.param(torch.float16, marks=REST), torch.float32],
)
def test_compiled_code_under_autocast_to_float16(
    monkeypatch: pytest.MonkeyPatch, half: torch.dtype
) -> None:
    """Of all dtypes; not with a gradient by kernels for bfloat16, of which a layer warns once."""
    monkeypatch.setattr("lokakern.nn.linear.warn_once", lambda _: None)
    model, x = usual(half=half), rows(32).to(half).requires_grad_()
    layer = layer_of(("", BY_ROW, ""), n=K, bias=True, dtype=half)
    other = model_of(layer, nn.ReLU(), Linear(K, 8), half=half)
    for each, count in ((model, 2), (other, 0)):
        torch._dynamo.reset()
        run = torch.compile(each, backend="aot_eager", fullgraph=True)
        results = []
        with torch.autocast("cpu", torch.float16):
            for call in (run, plain(each)):
                x.grad = None
                call(x)
                y, found = run_of_profile(call, x)
                (1024 * y.float().square().sum()).backward()
                results.append([y, x.grad])
                assert found == count * (call is run) and y.dtype is torch.float16
            with torch.no_grad():
                run(x)
                assert run_of_profile(run, x)[1] == count
        assert all(map(torch.equal, *results))


def test_values_beyond_float16_are_infinite_as_those_of_modules(launched: list[int]) -> None:
    model, x = usual(half=torch.float16), torch.randn(32, K).half()
    x[3] = 60000.0
    model[0].weight.data[5] = -2.0
    model[0].weight.data[6] = 2.0
    with torch.no_grad():
        for _ in range(3):
            y, count = run_of_profile(model, x)
            assert torch.equal(y.nan_to_num(7.0), plain(model)(x).nan_to_num(7.0))
            assert count == 2
    assert not y[3].isfinite().all() and y[:3].isfinite().all()


@pytest.mark.parametrize("eager", [0, 2])
def test_a_kernel_of_eager_calls_only_keeps_no_relu_from_compiled_products(eager: int) -> None:
    model = usual()
    model[eager] = layer_of(EAGER_ROUTES, n=model[eager].out_features, k=model[eager].in_features)
    model = model_of(*model)
    assert [*rectified_between(model)] == [ALWAYS, "", ALWAYS, "", ""]
    x = rows(32).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    compiled(x)
    for each, count in ((compiled, 2), (torch.compile(plain(model), backend="aot_eager"), 0)):
        x.grad = None
        y, found = run_of_profile(each, x)
        assert found == count
        y.float().square().sum().backward()
        results.append((y, x.grad))
    assert all(map(torch.equal, *results))
    with torch.no_grad():
        compiled(x)
        assert run_of_profile(compiled, x)[1] == 2
        y, count = run_of_profile(model, x)
        assert torch.equal(y, plain(model)(x)) and count == {0: 1, 2: 1}[eager]


def test_dynamic_rows_and_another_mode_of_compilation() -> None:
    torch._dynamo.reset()
    model = usual()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        compiled(torch.randn(80, K).bfloat16())  # not K rows, which would be one symbol
        for m in (32, 33, 48):
            x = torch.randn(m, K).bfloat16()
            y, count = run_of_profile(compiled, x)
            assert torch.equal(y, plain(model)(x)) and count == 2
    some = usual([ONLY_16, "", "", "", ""])
    compiled = torch.compile(some, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        assert run_of_profile(compiled, torch.randn(32, K).bfloat16())[1] == 0


def test_sequences_of_earlier_versions_are_read() -> None:
    model = usual()
    state = model.__getstate__()
    state["_handoffs"] = tuple(h._replace(rectified=()) for h in state["_handoffs"])
    other = BoundedSequential.__new__(BoundedSequential)
    other.__setstate__(state)
    x = torch.randn(32, K).bfloat16()
    with torch.no_grad():
        y, count = run_of_profile(other, x)
    assert torch.equal(y, plain(model)(x)) and count == 0


@pytest.mark.gpu
@HALVES
def test_a_compiled_training_step_on_a_gpu(half: torch.dtype) -> None:
    """As exact as the modules; what exceeds float16 is infinite in both."""
    model = usual(half=half).train().cuda()
    other, exact = plain(model), plain(model).double()
    x = torch.randn(256, K, device="cuda").to(half)
    x[3], model[0].weight.data[5], other[0].weight.data[5] = 3e4, 2.0, 2.0
    exact[0].weight.data[5] = 2.0
    found = []
    for each in (torch.compile(model, fullgraph=True, dynamic=False), other, exact):
        for _ in range(2):
            given = x.detach().to(next(each.parameters()).dtype).requires_grad_()
            each.zero_grad()
            y, count = run_of_profile(each, given)
            (y[4:].float().square().sum()).backward()
        assert count == (0 if each in (other, exact) else 2)
        found.append([y.detach(), *(p.grad for p in each.parameters()), given.grad[4:]])
    for one, theirs, right in zip(*found, strict=True):
        assert one.dtype is theirs.dtype and torch.equal(one.isfinite(), theirs.isfinite())
        kept = theirs.isfinite()
        error, rounding = ((z.double() - right)[kept].norm() for z in (one, theirs))
        assert error <= 1.5 * rounding + 1e-3 * right[kept].norm()
