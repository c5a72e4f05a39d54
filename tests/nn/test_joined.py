"""Gradients behind layers in one op: values, where the modules run, and what a compiler makes."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import layer_norm

from lokakern import mods
from lokakern.epilogue import ACTIVATIONS
from lokakern.functional import norm_gradient
from lokakern.nn import joined, rectified
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.joined import count_joined, joined_between
from lokakern.nn.linear import Linear
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.rectified import rectified_between
from lokakern.nn.routed_matmul import in_dtype
from lokakern.nn.static_handoff import BoundedSequential, set_handoff
from lokakern.norm import norm_named, normalize
from lokakern.sums import column_sums
from tests.support import compiled_steps
from tests.support.compiled_steps import Behind, codes_of, compiled, step
from tests.support.routed_layers import BY_ROW, K, layer_of, rows

N = 2 * K
BF16, REST = torch.bfloat16, pytest.mark.rest
HALVES = pytest.mark.parametrize("half", [BF16, torch.float16], ids=str)
MOSTLY_BF16 = pytest.mark.parametrize("half", [BF16, pytest.param(torch.float16, marks=REST)])
calls_of = functools.partial(compiled_steps.calls_of, "lokakern::norm_gradient")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has the kernel; its emulation runs."""
    for module in (joined, rectified):
        monkeypatch.setattr(module, "is_fast", lambda columns, device: columns <= 8192)
    torch._dynamo.reset()


def model_of(
    *modules: nn.Module, relus: bool = False, half: torch.dtype = torch.bfloat16
) -> nn.Sequential:
    torch.manual_seed(0)
    for module in modules:
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            for vector in module.parameters():
                nn.init.normal_(vector)
    model = nn.Sequential(*modules).to(half)
    none = [""] * len(model)
    relus_at = rectified_between(model) if relus else ()
    set_handoff(model, none, none, rectified=relus_at, joined=joined_between(model))
    return model


def usual(half: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return model_of(
        Linear(K, N), nn.LayerNorm(N), nn.ReLU(), Linear(N, K), nn.LayerNorm(K), nn.SiLU(),
        Linear(K, N), nn.ReLU(), Linear(N, K), nn.LayerNorm(K), half=half,
    )  # fmt: skip


def gradients(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    found = [x.grad, *(p.grad for p in model.parameters())]
    assert all(grad is not None for grad in found)
    return [grad.double() for grad in found if grad is not None]


def test_where_gradients_are_joined() -> None:
    model = usual()
    assert joined_between(model) == (
        "layer relu linear", "", "", "layer silu linear", "", "", "none relu", "", "layer none", ""
    )  # fmt: skip
    assert [count_joined(text) for text in joined_between(model) if text] == [3, 3, 2, 2]
    for layer in (Linear(K, N, bias=False), nn.Linear(K, N)):
        assert joined_between(nn.Sequential(layer.bfloat16(), nn.SiLU())) == ("", "")
    assert joined_between(nn.Sequential(Linear(K, N).bfloat16(), nn.ELU())) == ("", "")
    norms = (
        nn.LayerNorm(K), nn.RMSNorm(K), nn.LayerNorm((1, N)), nn.RMSNorm((1, N)),
        nn.LayerNorm(N, elementwise_affine=False), BlockRMSNorm(N, 8), nn.BatchNorm1d(N),
    )  # fmt: skip
    for norm in norms:  # the first is of K columns of rows of N, seen as more rows
        assert not any(joined_between(nn.Sequential(Linear(K, N), norm, nn.ReLU()).bfloat16()))
    wide = 2 * norm_gradient.LONGEST_COMPILED
    for norm in (nn.LayerNorm(wide), nn.RMSNorm(wide)):
        assert not any(joined_between(nn.Sequential(Linear(8, wide), norm).bfloat16()))
    alone = nn.Sequential(Linear(K, N, bias=False), nn.RMSNorm(N)).bfloat16()
    assert not any(joined_between(alone))  # one sum is left to the compiler
    assert any(joined_between(nn.Sequential(Linear(K, N), nn.ReLU())))  # float32, for autocast
    assert not any(joined_between(nn.Sequential(Linear(K, N), nn.ReLU()).double()))
    for columns in (N + 1, norm_gradient.LONGEST_ROW + norm_gradient.CHUNK):  # of no kernel
        assert not any(joined_between(nn.Sequential(Linear(K, columns), nn.ReLU()).bfloat16()))


def check(model: nn.Sequential, x: Tensor, calls: int, factor: float = 1.2) -> None:
    """The output has the bits of the modules, gradients are as exact, and so many ops run.

    Over several layers their roundings add up, by chance more than those of the modules.
    """
    plain = nn.Sequential(*copy.deepcopy(list(model)))
    for layer in plain.modules():
        if isinstance(layer, LinearNormAct):
            layer.take_form("")
    exact = copy.deepcopy(plain).double()
    found = []
    run = compiled(model, fullgraph=True)
    for each in (run, plain, exact):
        given = (x.double() if each is exact else x.clone()).detach().requires_grad_()
        y = step(each, given)
        found.append([y.double(), *gradients(getattr(each, "_orig_mod", each), given)])
    mine, theirs, true = found
    assert torch.equal(mine[0], theirs[0])
    for one, other, right in zip(mine, theirs, true, strict=True):
        size = right.norm() + 1e-30
        assert (one - right).norm() / size <= factor * (other - right).norm() / size + 1e-3
    assert calls_of(run, x.clone().requires_grad_()) == calls


@pytest.mark.parametrize(
    ("shape", "half"),
    [((48, K), BF16), ((1, K), BF16), ((2, 3, K), BF16), ((48, K), torch.float16)],
)
def test_gradients_are_as_exact_as_those_of_the_modules(
    shape: tuple[int, ...], half: torch.dtype
) -> None:
    check(usual(half), rows(shape[0] if len(shape) == 2 else 6).view(shape).to(half), 4)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "layer weight": lambda n: nn.LayerNorm(n, bias=False),
    "layer without vectors": lambda n: nn.LayerNorm(n, elementwise_affine=False),
    "rms": nn.RMSNorm,
    "rms eps": lambda n: nn.RMSNorm(n, eps=0.1),
    "rms without vectors": lambda n: nn.RMSNorm(n, elementwise_affine=False),
}
LAST: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "hardswish": nn.Hardswish, "silu": nn.SiLU,
    "gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU("tanh"),
}  # fmt: skip


@pytest.mark.sample(every=2, of=("norm",))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_with_every_activation(norm: str, bias: bool) -> None:
    """Also of 24 and 200 columns. With two vectors and more one op computes their gradients."""
    make = NORMS[norm]
    count = 4 * (bias + len(list(make(8).parameters())) >= 2)
    torch.manual_seed(0)
    model = model_of(
        Linear(K, 200, bias=bias), make(200), nn.ReLU(), Linear(200, 24, bias=bias), make(24),
        nn.Hardswish(), Linear(24, 64, bias=bias), make(64), nn.SiLU(inplace=True),
        Linear(64, 40, bias=bias), make(40),
    )  # fmt: skip
    check(model, rows(130) if bias else rows(130).view(2, 65, K), count, factor=2.0)


@pytest.mark.parametrize("last", LAST)
def test_an_activation_alone(last: str) -> None:
    torch.manual_seed(0)
    model = model_of(Linear(K, 200), LAST[last](), Linear(200, 24), LAST[last](), Linear(24, 8))
    model[0].weight.data.mul_(8.0)  # where a hardswish ends
    check(model, rows(130), 2)


@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_empty_batches(norm: str) -> None:
    norms = [NORMS[norm](N)] if norm != "none" else []
    model = model_of(Linear(K, N), *norms, nn.Hardswish(), Linear(N, 8))
    x = torch.empty(0, K).bfloat16().requires_grad_()
    compiled(model, fullgraph=True)(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    for parameter in model.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_an_rms_norm_without_eps_has_that_of_float32() -> None:
    model = model_of(Linear(K, N), nn.RMSNorm(N))
    with torch.no_grad():
        model[0].weight.mul_(1e-3)
        model[0].bias.mul_(1e-3)
    check(model, rows(48), 1)


@pytest.mark.parametrize("norm", ["layer", "layer weight", "rms"])
def test_a_layer_whose_input_and_weight_need_no_gradient(norm: str) -> None:
    model = model_of(Linear(K, N, norm != "layer"), NORMS[norm](N), nn.SiLU(), Linear(N, 8))
    model[0].weight.requires_grad_(False)
    plain = nn.Sequential(*copy.deepcopy(list(model)))
    exact = copy.deepcopy(plain).double()
    y = step(compiled(model, fullgraph=True), rows(48))
    assert torch.equal(y, step(compiled(plain, fullgraph=True), rows(48)))
    step(exact, rows(48).double())
    every = zip(*(each.parameters() for each in (model, plain, exact)), strict=True)
    for one, other, right in every:
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None and right.grad is not None:
            error, rounding = (x.double() - right.grad for x in (one.grad, other.grad))
            assert error.norm() <= 1.2 * rounding.norm() + 1e-3 * right.grad.norm()


def test_a_relu_alone_has_the_bits_of_the_modules_and_sums_in_the_order_of_kernels() -> None:
    model = model_of(Linear(K, N), nn.ReLU(), Linear(N, K))
    plain = nn.Sequential(*copy.deepcopy(list(model)))
    x = rows(300).requires_grad_()
    step(compiled(model, fullgraph=True), x)
    mine = gradients(model, x)
    x.grad = None
    seen: list[Tensor] = []
    plain[1].register_full_backward_hook(lambda _module, into, _out: seen.append(into[0]))
    step(plain, x)
    theirs = gradients(plain, x)
    for place, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if place != 2:  # the bias before the relu
            assert torch.equal(one, other)
    assert torch.equal(mine[2].bfloat16(), column_sums(seen[0]).bfloat16())


def alone(*given: object, **options: object) -> LinearNormAct:
    torch.manual_seed(0)
    layer = LinearNormAct(*given, **options).bfloat16()  # type: ignore[arg-type]
    for vector in layer.norm.parameters():
        nn.init.normal_(vector)
    layer.take_form(layer.joined)
    return layer


class Residual(nn.Module):
    def __init__(self, layer: LinearNormAct) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, residual=x[..., : self.layer.out_features].sin())
        return y


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(
    ("norm", "activation", "bias"),
    [
        ("layer", "relu", True), ("layer", "silu", False), ("rms", None, True),
        ("none", "relu", True), ("none", "silu", True),
    ],
)  # fmt: skip
def test_a_layer_with_its_own_norm(
    norm: str, activation: str | None, bias: bool, has_residual: bool
) -> None:
    layer = alone(K, 24, bias, norm=norm, activation=activation)
    assert layer.joined == f"{norm} {activation or 'none'}"
    model = nn.Sequential(Residual(layer) if has_residual else layer)
    check(model, rows(48).view(2, 24, K), 1)
    layer.take_form("")
    torch._dynamo.reset()
    assert calls_of(compiled(model), rows(48).requires_grad_()) == 0


@pytest.mark.rest
def test_a_layer_with_its_own_norm_in_float16() -> None:
    """With a residual, which has that dtype."""
    model = nn.Sequential(Residual(alone(K, 24).half()))
    check(model, rows(48).half(), 1)


def test_where_a_layer_with_its_own_norm_runs_as_it_is() -> None:
    for options in ({"norm": "none", "activation": None}, {"norm": "none", "bias": False}):
        assert not alone(K, 24, **options).joined
    assert not LinearNormAct(K, 24).double().joined
    assert joined_between(nn.Sequential(alone(K, 24), nn.ReLU())) == ("", "")
    changes: tuple[Callable[[LinearNormAct], object], ...] = (
        lambda layer: layer.norm.register_forward_hook(_hook),
        lambda layer: setattr(layer, "activation", "silu"),
        lambda layer: setattr(layer, "norm", nn.Identity()),
        lambda layer: setattr(layer, "norm", nn.RMSNorm(24).bfloat16()),
        lambda layer: layer.norm.weight.requires_grad_(False),
    )
    for change in changes:
        layer = alone(K, 24)
        change(layer)
        torch._dynamo.reset()
        assert calls_of(compiled(nn.Sequential(layer)), rows(48).requires_grad_()) == 0


def test_a_layer_with_its_own_norm_of_a_file() -> None:
    layer = pickle.loads(pickle.dumps(alone(K, 24)))
    assert calls_of(compiled(layer, fullgraph=True), rows(48).requires_grad_()) == 1


@MOSTLY_BF16
def test_gradients_by_routes_of_a_quantized_layer(half: torch.dtype) -> None:
    """The products of an FP8 layer read the gradient that the op computes."""
    found, route = [], in_dtype(BY_ROW, half)
    for is_joined in (True, False):
        layers = layer_of((route, route, route), n=K, bias=True), nn.ReLU(), Linear(K, 8)
        model = model_of(*layers, half=half)
        assert joined_between(model)[0] == "none relu"
        if not is_joined:
            model = nn.Sequential(*model)
        x = rows(32).to(half).requires_grad_()
        torch._dynamo.reset()
        assert calls_of(compiled(model, fullgraph=True), x) == is_joined
        x.grad = None
        model.zero_grad()
        y = step(compiled(model, fullgraph=True), x)
        found.append([y, x.grad, *(p.grad for p in model.parameters())])
    for place, (one, other) in enumerate(zip(*found, strict=True)):
        assert torch.equal(one, other) if place != 3 else torch.allclose(one, other, rtol=0.02)


def test_a_relu_in_the_product_has_the_op_too() -> None:
    model = model_of(Linear(K, N), nn.ReLU(), Linear(N, K), nn.ReLU(), relus=True)
    assert calls_of(compiled(model, fullgraph=True), rows(32).requires_grad_()) == 2
    model[0].bias.requires_grad_(False)
    torch._dynamo.reset()
    assert calls_of(compiled(model, fullgraph=True), rows(32).requires_grad_()) == 1


def test_a_gradient_beyond_float16_is_infinite_and_its_step_is_skipped() -> None:
    """Sums are float32 in the op, and their rounding overflows, as that of torch's does."""
    model = model_of(Linear(K, N), nn.ReLU(), Linear(N, K), half=torch.float16).float()
    run, x = compiled(model, fullgraph=True), rows(300).float()
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    before = model[0].weight.clone()
    for scale, is_skipped in ((2.0**16, False), (2.0**40, True)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = run(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() < scale) is is_skipped
        assert torch.equal(model[0].weight, before) is is_skipped
        before = model[0].weight.clone()
    ones = torch.full((300, 8), 300.0, dtype=torch.float16)
    dy, sums = norm_gradient.norm_gradient(ones, ones, ones[0], None, None, "none", "relu", 0.0)
    assert torch.equal(dy, ones) and sums.isinf().all()
    wide = ones[0].float()
    _, sums = norm_gradient.norm_gradient(ones, ones, wide, None, None, "none", "relu", 0.0)
    assert torch.equal(sums, torch.full((1, 8), 9e4))


def _hook(*_given: object) -> None:
    return None


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda m: m[1].register_forward_hook(_hook), 3),
        (lambda m: m[2].register_full_backward_hook(_hook), 0),  # Dynamo does not trace the model
        (lambda m: m[0].register_full_backward_pre_hook(_hook), 0),
        (lambda m: setattr(m[1], "forward", lambda x: nn.LayerNorm.forward(m[1], x)), 3),
        (lambda m: m[0].bias.requires_grad_(False), 3),
        (lambda m: m[4].weight.requires_grad_(False), 3),
        (lambda m: m[0].weight.requires_grad_(False), 4),
        (lambda m: setattr(m[0], "bias", m[1].bias), 3),  # one parameter at two places
        (lambda m: setattr(m[4], "weight", m[4].bias), 3),
        (lambda m: m.requires_grad_(False), 0),
        (lambda m: m.float(), 0),
        (lambda m: m.__setitem__(1, nn.LayerNorm(N).bfloat16()), 0),  # other modules than known
        (lambda m: mods.apply(m[0], [mods.Pad(k=20, n=1)]), 3),
        (lambda m: setattr(m[0], "bias", None), 4),
        (lambda m: setattr(m[1], "bias", None), 4),
        (lambda m: setattr(m[6], "bias", None), 3),  # a relu alone
    ],
)
def test_the_modules_run_where_anything_is_unusual(
    change: Callable[[nn.Sequential], object], count: int
) -> None:
    model = usual()
    change(model)
    x = rows(32).to(model[0].weight.dtype).requires_grad_()
    assert calls_of(compiled(model), x) == count


@pytest.mark.parametrize("relus", [False, True])
@MOSTLY_BF16
def test_gradients_under_autocast_are_those_in_its_dtype(relus: bool, half: torch.dtype) -> None:
    """With float32 parameters, whose gradients are not rounded to that."""
    model = model_of(*usual(), relus=relus).float()
    plain = nn.Sequential(*copy.deepcopy(list(model)))
    exact, x = copy.deepcopy(plain).double(), rows(48).float()
    found = []
    for each in (compiled(model, fullgraph=True), compiled(plain, fullgraph=True), exact):
        given = (x.double() if each is exact else x.clone()).requires_grad_()
        with torch.autocast("cpu", half, enabled=each is not exact):
            y = step(each, given)
        made = getattr(each, "_orig_mod", each)
        assert all(p.grad.dtype is p.dtype for p in made.parameters())
        found.append([y.double(), *gradients(made, given)])
    mine, theirs, true = found
    assert torch.equal(mine[0], theirs[0])
    for one, other, right in zip(mine, theirs, true, strict=True):
        size = right.norm() + 1e-30
        assert (one - right).norm() / size <= 1.2 * (other - right).norm() / size + 1e-3
    with torch.autocast("cpu", half):
        # Not behind the last norm, whose gradient is that of float32 where autocast widens norms.
        assert calls_of(compiled(model), x.clone().requires_grad_()) == 3
        assert calls_of(model, x.clone().requires_grad_()) == 0
        with torch.no_grad():
            assert torch.equal(compiled(model)(x), plain(x))


def test_vectors_have_one_dtype() -> None:
    model = usual()
    model[1].float()
    x = rows(32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert calls_of(compiled(model), x) == 2
        half = model_of(Linear(K, N), nn.ReLU()).half()  # beside a product in bfloat16
        assert calls_of(compiled(half), x) == 0


def test_a_gradient_in_float32_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where linear layers read a norm in float32, their gradients were bfloat16 before."""

    def wide(x: Tensor, *given: Any) -> Tensor:
        return layer_norm(x.float(), *given)

    monkeypatch.setattr(joined, "layer_norm", wide)  # as autocast does on a GPU
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda s, x: wide(
        x, s.normalized_shape, s.weight, s.bias, s.eps))  # fmt: skip
    monkeypatch.setattr(joined, "are_calls_plain", lambda: True)
    for count in (0, 1):
        readers = (Linear(N, K),) * count
        model = model_of(Linear(K, N), nn.LayerNorm(N), nn.SiLU(), *readers).float()
        x = rows(48).float()
        plain = nn.Sequential(*copy.deepcopy(list(model)))
        found = []
        for each in (model, plain):
            given = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = compiled(each, fullgraph=True)(given)
            (y.float() - 1).square().mean().backward()
            found.append(gradients(each, given))
            torch._dynamo.reset()
        for one, other in zip(*found, strict=True):
            assert (one - other).norm() <= 0.01 * other.norm() * bool(count)
        with torch.autocast("cpu", torch.bfloat16):
            assert calls_of(compiled(model), x.clone().requires_grad_()) == count


def test_the_modules_run_in_eager_mode_and_without_gradients() -> None:
    model, x = usual(), rows(32).requires_grad_()
    assert calls_of(model, x) == 0
    run = compiled(model)
    plain = nn.Sequential(*model)
    with torch.no_grad():
        assert torch.equal(run(x), plain(x))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, nn.Hardswish])
def test_a_replaced_method_is_called(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: before(self, x))
    assert calls_of(compiled(usual()), rows(32).requires_grad_()) == 0


def test_an_exported_model_may_be_trained() -> None:
    exported = torch.export.export(usual(), (rows(32),)).module()
    step(exported, rows(32))
    assert exported.get_parameter("0.bias").grad is not None


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("norm", ["layer", "rms", "rms eps"])
def test_dynamic_rows(norm: str) -> None:
    model = model_of(
        Linear(K, N), NORMS[norm](N), nn.ReLU(), Linear(N, K), NORMS[norm](K),
        nn.SiLU(), Linear(K, N), nn.Hardswish(), Linear(N, K), NORMS[norm](K),
    )  # fmt: skip
    run = compiled(model, fullgraph=True, dynamic=True)
    for m in (48, 33, 64):
        assert calls_of(run, rows(m).requires_grad_()) == 4


@pytest.mark.parametrize("relus", [False, True])
def test_a_module_may_write_to_the_output_of_a_relu(relus: bool) -> None:
    """The gradient is that of the output before."""
    model, found = model_of(Linear(K, N), nn.ReLU(), relus=relus), []
    for writes in (True, False):
        each, x = copy.deepcopy(model), rows(48).requires_grad_()
        torch._dynamo.reset()
        step(compiled(Behind(each, writes=writes), fullgraph=True), x)
        found.append(gradients(each, x))
    assert all(map(torch.equal, *found))


def test_sequences_of_earlier_versions_are_read() -> None:
    model = usual()
    state = model.__getstate__()
    state["_handoffs"] = tuple(h._replace(joined=()) for h in state["_handoffs"])
    other = BoundedSequential.__new__(BoundedSequential)
    other.__setstate__(state)
    assert calls_of(compiled(other), rows(32).requires_grad_()) == 0


class Doubled(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.model(x).cos()


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("last", "is_generated"), [("relu", False), *((last, True) for last in LAST)]
)
def test_a_compiler_computes_an_activation_where_it_computes_what_comes_after(
    last: str, is_generated: bool
) -> None:
    """Its own kernel multiplies by the slope, and sums for the bias, a gradient of its own."""
    tail: Sequence[nn.Module] = () if is_generated else (Linear(N, K),)
    model = model_of(Linear(K, N), LAST[last](), *tail, relus=True)
    model[0].weight.data.mul_(4.0)  # where a hardswish ends
    plain = nn.Sequential(*copy.deepcopy(list(model)))
    x = rows(48).requires_grad_()
    run = torch.compile(Doubled(model), fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: step(run, x))
    assert any("lokakern_norm_gradient(" in code for code in codes) is not is_generated
    mine = gradients(model, x)
    x.grad = None
    step(Doubled(plain), x)
    for one, other in zip(mine, gradients(plain, x), strict=True):
        assert (one - other).norm() <= 1e-2 * other.norm()


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("last", LAST)
def test_a_compiler_does_not_round_sums_for_a_bias_of_float32(last: str) -> None:
    model = model_of(Linear(K, N), LAST[last]()).float()
    exact, x = nn.Sequential(*copy.deepcopy(list(model))).double(), rows(300).float()
    with torch.autocast("cpu", torch.bfloat16):
        step(torch.compile(Doubled(model), fullgraph=True), x)
    step(Doubled(exact), x.double())
    sums = model[0].bias.grad
    assert not torch.equal(sums, sums.bfloat16().float())
    assert (sums.double() - exact[0].bias.grad).norm() <= 1e-2 * exact[0].bias.grad.norm()


def test_products_quantize_a_gradient_that_is_summed_for_a_bias() -> None:
    """A compiler would join both reductions, see `lokakern.nn.inductor`."""
    layer = layer_of((BY_ROW, BY_ROW, BY_ROW), n=K, bias=True)
    codes = codes_of(Doubled(model_of(layer, nn.ReLU())), rows(48).requires_grad_())
    products = [x for x in codes[-1].splitlines() if "= lokakern_routed_gemm(" in x]
    assert len(products) == 1 and "routed_gemm(None" not in products[0]


@pytest.mark.parametrize("m", [0, 1, 130])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_op(m: int, dtype: torch.dtype) -> None:
    half = torch.bfloat16 if dtype is torch.float32 else dtype
    dd, y = (rows(m, 2 * K).to(half)[:, :K] for _ in range(2))  # views with gaps between rows
    vectors = [torch.randn(K).to(dtype) for _ in range(3)]
    for given in (vectors, [vectors[0], None, None], [None] * 3):
        norm = "layer" if given[1] is not None else "none"
        call = (dd, y, *given, norm, "relu", 1e-5)
        dy, sums = torch.ops.lokakern.norm_gradient(*call)
        count = sum(x is not None for x in given)
        assert dy.shape == dd.shape and dy.dtype is half
        assert sums.shape == (count, K) and sums.dtype is (dtype if count else torch.float32)
        if norm == "none":
            assert torch.equal(dy, torch.where(y <= 0, 0, dd))
        if count:
            assert bool(sums.isfinite().all())
        if m:  # opcheck cannot copy empty views
            checks = ("test_schema", "test_faketensor")
            torch.library.opcheck(torch.ops.lokakern.norm_gradient, call, test_utils=checks)


@pytest.mark.parametrize("norm", ["layer", "rms", "block_rms(8)", "block_rms(72)", "none"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@HALVES
def test_the_op_has_the_gradients_of_float64(norm: str, activation: str, half: torch.dtype) -> None:
    """With every selection of vectors."""
    m, n, eps = 130, 72, 0.01
    dd, y = (rows(m, n, seed=seed).to(half) for seed in (2, 3))
    y = 2 * y
    every = [torch.randn(n).to(half) for _ in range(3)]
    for mask in range(8):
        given = [x if mask >> i & 1 else None for i, x in enumerate(every)]
        if norm == "none" and mask > 1:
            continue
        wide = [None if x is None else x.double().requires_grad_() for x in given]
        into = y.double().requires_grad_()
        z = normalize(into, norm_named(norm, eps), wide[1], wide[2])
        last = LAST[activation]() if activation != "none" else nn.Identity()
        last(z).backward(dd.double())
        is_relu_alone = norm == "none" and activation == "relu"
        dy, sums = norm_gradient.norm_gradient(
            dd, y.relu() if is_relu_alone else y, *given, norm, activation, eps
        )
        assert dy.dtype is half
        assert into.grad is not None
        assert (dy.double() - into.grad).norm() <= 3e-3 * into.grad.norm()
        expected = [
            into.grad.sum(0) if i == 0 else x.grad for i, x in enumerate(wide) if x is not None
        ]
        assert len(sums) == len(expected)
        for one, other in zip(sums, expected, strict=True):
            assert other is not None
            assert (one.double() - other).norm() <= 3e-3 * other.norm()


def test_no_gpu_has_the_kernel_here() -> None:
    assert norm_gradient.takes(K) and not norm_gradient.is_fast(K, "cpu")
    assert not norm_gradient.is_fast(0, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 130, 2048, 8200])
@pytest.mark.parametrize("of_vectors", [None, torch.float32])
@HALVES
def test_a_gpu_kernel_has_the_values_of_the_emulation(
    m: int, of_vectors: torch.dtype | None, half: torch.dtype
) -> None:
    """Called three times: the third is replayed."""
    for n in (8, 264, norm_gradient.LONGEST_COMPILED):
        dd, y = (torch.randn(m, n, device="cuda").to(half) for _ in range(2))
        vectors = (torch.randn(n, device="cuda").to(of_vectors or half) for _ in range(3))
        bias, weight, shift = vectors
        every = (
            (None, None, "none", "relu"), (None, None, "none", "hardswish"),
            (weight, shift, "layer", "silu"), (None, None, "layer", "silu"),
            (weight, None, "rms", "relu"), (None, None, "block_rms(8)", "hardswish"),
        )  # fmt: skip
        for given in every:
            call = (dd, y, bias, *given, 1e-5)
            expected = norm_gradient.norm_gradient(*(
                x.cpu() if isinstance(x, Tensor) else x for x in call
            ))  # fmt: skip
            for _ in range(3):
                found = torch.ops.lokakern.norm_gradient(*call)
                for one, other in zip(found, expected, strict=True):
                    assert one.dtype is other.dtype
                    difference = (one.cpu().double() - other.double()).norm()
                    assert difference <= 2e-3 * other.double().norm()


@pytest.mark.gpu
@HALVES
def test_a_compiled_training_step_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, half: torch.dtype
) -> None:
    for module in (joined, rectified):
        monkeypatch.setattr(module, "is_fast", norm_gradient.is_fast)
    model = model_of(
        *usual(), nn.RMSNorm(K), Linear(K, N, bias=False), nn.LayerNorm(N), nn.Hardswish(),
        Linear(N, K), nn.Hardswish(), Linear(K, N), nn.RMSNorm(N), nn.SiLU(), half=half,
    ).cuda()  # fmt: skip
    plain = nn.Sequential(*copy.deepcopy(list(model)))
    x = rows(256).to(half).cuda().requires_grad_()
    for dynamic in (False, True):
        torch._dynamo.reset()
        found = []
        for each in (model, plain):
            run = torch.compile(each, fullgraph=True, dynamic=dynamic)
            for _ in range(3):
                x.grad = None
                each.zero_grad()
                y = run(x)
                y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).to(y.dtype))
            found.append(gradients(each, x))
        for one, other in zip(*found, strict=True):
            assert (one - other).norm() <= 0.02 * other.norm()
