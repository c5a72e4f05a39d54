"""Forms of layers in compiled code: values, where they are used, and what a compiler makes."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from lokakern.bench.models.zoo.hstu import HSTU
from lokakern.functional.norm_gradient import is_fast
from lokakern.nn import bias_gradient, compiled_form
from lokakern.nn.adoption import Chosen, adopt, apply_choice, remove_choice
from lokakern.nn.compiled_form import DOT, LOGIT, SUMS, form_at, form_of
from lokakern.nn.graph_passes import Passes
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import in_dtype
from lokakern.sums import column_sums
from tests.support import compiled_steps
from tests.support.compiled_steps import codes_of, compiled, step
from tests.support.routed_layers import BY_ROW, K, rows

N = 2 * K
BF16 = torch.bfloat16
calls_of = functools.partial(compiled_steps.calls_of, "lokakern::bias_gradient")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU on which both forms are faster."""
    monkeypatch.setattr(compiled_form, "is_fast", lambda columns, device: columns <= 8192)
    torch._dynamo.reset()


def in_form(layer: Linear) -> Linear:
    layer.take_form(form_of(layer))
    return layer


def linear(k: int = K, n: int = N, bias: bool = True, half: torch.dtype = torch.bfloat16) -> Linear:
    torch.manual_seed(0)
    return in_form(Linear(k, n, bias).to(half))


def plain_of(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Linear):
            module.take_form("")
    return model


def results(model: Any, x: Tensor) -> list[Tensor]:
    """The output and all gradients of one training step."""
    x = x.detach().clone().requires_grad_()
    y = step(model, x)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def assert_as_exact(mine: list[Tensor], theirs: list[Tensor], exact: list[Tensor]) -> None:
    for one, other, right in zip(mine, theirs, exact, strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        size = right.norm() + 1e-30
        error, rounding = ((y.double() - right).norm() / size for y in (one, other))
        assert error <= 1.2 * rounding + 2e-3


def test_the_form_of_a_layer() -> None:
    def form(*sizes: int, **options: Any) -> str:
        return form_of(Linear(*sizes, **options))

    half = {"dtype": torch.bfloat16}
    assert form(K, 1, **half) == form(K, 1, bias=False, **half) == DOT
    assert form(K, N, **half) == SUMS
    assert not form(K, N, bias=False, **half)
    assert not form(K, N + 1, **half)  # the kernel reads 16 bytes at a time
    assert form(K, 1) == DOT and form(K, N) == SUMS  # for autocast
    assert not form(0, 1, **half) and not form(K, N, dtype=torch.float64)
    for name, value in {"padding": (1, 0), "is_mixing": True}.items():
        layer = Linear(K, 1, **half)
        setattr(layer, name, value)
        assert not form_of(layer)


@pytest.mark.parametrize(
    ("shape", "half"),
    [((48, K), BF16), ((1, K), BF16), ((2, 3, K), BF16), ((48, K), torch.float16)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_with_one_output_is_as_exact_as_its_product(
    shape: tuple[int, ...], bias: bool, half: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(K, K).to(half), nn.ReLU(), linear(K, 1, bias, half))
    plain, x = plain_of(model), rows(torch.Size(shape[:-1]).numel()).view(shape).to(half)
    exact = results(copy.deepcopy(plain).double(), x.double())
    mine = results(compiled(model, fullgraph=True), x)
    torch._dynamo.reset()
    theirs = results(compiled(plain, fullgraph=True), x)
    assert_as_exact(mine, theirs, exact)


@pytest.mark.parametrize(
    ("form", "half"),
    [(DOT, BF16), (SUMS, BF16), (LOGIT, torch.float16), (SUMS, torch.float16)],
)
def test_forms_under_autocast_are_those_in_its_dtype(form: str, half: torch.dtype) -> None:
    """With float32 parameters, whose gradients are not rounded to that."""
    torch.manual_seed(0)
    n = N if form == SUMS else 1
    model = nn.Sequential(nn.Linear(K, K), nn.LayerNorm(K), in_form(Linear(K, n)))
    model[2].take_form(form)
    plain, x = plain_of(model), rows(48).float()
    exact = results(copy.deepcopy(plain).double(), x.double())
    assert type(model[2]) is Linear and model[2].form
    with torch.autocast("cpu", half):
        mine = results(compiled(model, fullgraph=True), x)
        torch._dynamo.reset()
        theirs = results(compiled(plain, fullgraph=True), x)
    assert mine[0].dtype is half
    assert_as_exact(mine, theirs, exact)
    with torch.autocast("cpu", half):
        torch._dynamo.reset()
        assert calls_of(compiled(model), x.requires_grad_()) == (n > 1)


@pytest.mark.parametrize(
    ("form", "half"),
    [
        (DOT, BF16), pytest.param(LOGIT, BF16, marks=pytest.mark.rest),
        pytest.param(DOT, torch.float16, marks=pytest.mark.rest), (LOGIT, torch.float16),
    ],
)  # fmt: skip
def test_autocast_decides_the_dtype_of_a_sum(form: str, half: torch.dtype) -> None:
    """Also of operands in the other dtype of 16 bits."""
    other = torch.float16 if half is torch.bfloat16 else torch.bfloat16
    layer, x = linear(n=1, half=other), rows(8).to(other)
    layer.take_form(form)
    with torch.no_grad(), torch.autocast("cpu", half):
        y = compiled(layer, fullgraph=True)(x)
        expected = plain_of(layer)(x)
    assert y.dtype is expected.dtype is half
    assert (y - expected).norm() <= 8e-3 * expected.norm()


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("transposes", [False, True])
def test_a_compiler_does_not_round_sums_for_a_bias_of_float32(transposes: bool) -> None:
    layer = linear().float()
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        step(torch.compile(Heads(layer, transposes=transposes), fullgraph=True), rows(48).float())
    sums = layer.bias.grad
    assert sums is not None and not torch.equal(sums, sums.bfloat16().float())


def test_no_product_of_a_layer_with_one_output_is_left_to_a_library() -> None:
    model, x = nn.Sequential(nn.ReLU(), linear(K, 1)), rows(48).requires_grad_()
    codes = codes_of(model, x)
    assert len(codes) == 2 and not any("mm(" in code for code in codes)
    with torch.no_grad():
        (code,) = codes_of(model, x)
    assert "mm(" not in code
    codes = codes_of(plain_of(model), x)
    assert len(codes) == 2 and all("mm(" in code for code in codes)


@pytest.mark.parametrize(
    ("bias", "shape", "half"),
    [
        (True, (40, K), torch.bfloat16), (False, (40, K), torch.bfloat16),
        (True, (3, 8, K), torch.bfloat16), (True, (40, K), torch.float16),
    ],
)  # fmt: skip
def test_a_logit_of_an_inference_is_a_sum_in_the_kernels_of_the_compiler(
    bias: bool, shape: tuple[int, ...], half: torch.dtype
) -> None:
    layer = linear(n=1, bias=bias, half=half)
    torch.manual_seed(1)
    x = torch.randn(shape).to(half)
    layer.take_form(LOGIT)
    texts: list[str] = []

    def read(graph: fx.GraphModule, given: Any) -> Any:
        texts.append(graph.code)
        return torch._inductor.compile(graph, given)

    with torch.no_grad():
        found = torch.compile(layer, backend=read, dynamic=False)(x)
        expected = layer.double()(x.double())
    assert "lokakern.logit" in texts[0]
    assert found.dtype is half and found.shape == (*shape[:-1], 1)
    most = 4e-3 if half is torch.bfloat16 else 6e-4  # of its rounding
    assert (found.double() - expected).norm() <= most * expected.norm()
    with torch.no_grad():
        codes = codes_of(layer.to(half), x)
    assert "logit(" not in codes[0] and "mm(" not in codes[0]


def test_a_logit_with_gradients_is_differentiable_and_sums_to_a_vector() -> None:
    layer = linear(n=1)
    layer.take_form(LOGIT)
    texts: list[str] = []

    def read(graph: fx.GraphModule, _: Any) -> Any:
        texts.append(graph.code)
        return make_boxed_func(graph.forward)

    found = results(torch.compile(layer, backend=aot_autograd(fw_compiler=read)), rows(40))
    layer.take_form("")
    theirs = results(layer, rows(40))
    assert all(
        torch.allclose(a, b, rtol=0.02, atol=0.02) for a, b in zip(found, theirs, strict=True)
    )
    assert "lokakern.logit" in texts[0] and "logit" not in texts[-1]
    # Inductor of torch 2.11 returned a vector in place of a sum of shape [1, k].
    assert "aten.sum.dim_IntList" in texts[-1]
    assert f"[1, {K}]" in texts[-1] or "unsqueeze" in texts[-1]


def test_sums_of_a_bias_have_the_order_of_kernels() -> None:
    model = linear()
    x, plain = rows(300), plain_of(model)
    mine, theirs = results(compiled(model, fullgraph=True), x), results(plain, x)
    for place in (0, 1, 2):
        assert torch.equal(mine[place], theirs[place])
    gradient = torch.linspace(-1, 1, 300 * N).view(300, N).bfloat16()
    assert torch.equal(mine[3], column_sums(gradient).bfloat16())
    assert calls_of(compiled(model), x.requires_grad_()) == 1


@pytest.mark.parametrize("shape", [(2, 3, K), (1, K)])
def test_other_shapes_and_dynamic_rows(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(linear(), nn.SiLU(), linear(N, 1))
    plain, run = plain_of(model), compiled(model, fullgraph=True, dynamic=True)
    for m in (1, 2, 5):
        x = rows(m * torch.Size(shape[:-1]).numel()).view(-1, *shape[1:])
        model.zero_grad()
        plain.zero_grad()
        for one, other in zip(results(run, x), results(plain, x), strict=True):
            assert (one.double() - other.double()).norm() <= 0.02 * other.double().norm() + 1e-6


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda layer: layer.bias.requires_grad_(False), 0),
        (lambda layer: layer.weight.requires_grad_(False), 1),
        (lambda layer: layer.float(), 0),
        (lambda layer: setattr(layer, "bias", None), 0),
        (lambda layer: layer.register_forward_hook(lambda *_: None), 1),
        (lambda layer: layer.bias.register_hook(lambda grad: 2 * grad), 1),
        (lambda layer: layer.take_routes((BY_ROW, "", ""), layer.weight), 1),
        (lambda layer: layer.take_routes(("", BY_ROW, ""), layer.weight), 0),
        (lambda layer: layer.take_routes(("", "", BY_ROW), layer.weight), 0),
    ],
)
def test_where_a_bias_is_summed_apart(change: Callable[[Linear], object], count: int) -> None:
    layer = linear()
    change(layer)
    x = rows(48).to(layer.weight.dtype).requires_grad_()
    assert calls_of(compiled(layer), x) == count


def test_forms_are_not_for_eager_mode_and_functions() -> None:
    x = rows(48).requires_grad_()
    for layer in (linear(), linear(K, 1)):
        plain = plain_of(layer)
        assert torch.equal(layer(x), plain(x)) and calls_of(layer, x) == 0
        with torch.no_grad():
            assert layer.form == DOT or torch.equal(compiled(layer)(x), compiled(plain)(x))
        exported = torch.export.export(layer, (x,)).module()
        assert torch.equal(exported(x), plain(x)) and calls_of(exported, x) == 0
        torch._dynamo.reset()
        mapped = torch.compile(torch.func.vmap(layer), backend="aot_eager")(x.view(2, 24, K))
        assert torch.equal(mapped, torch.func.vmap(plain)(x.view(2, 24, K)))


USUAL = ("", 48, torch.bfloat16, torch.bfloat16, "cpu")
TO_INPUT = "\0".join(("", "", "", BY_ROW, ""))  # a plan whose gradient of the input is quantized


@pytest.mark.parametrize(
    ("form", "columns", "changes", "found"),
    [  # without autocast
        (DOT, 1, {}, DOT),
        (DOT, 2, {}, ""),
        (DOT, 1, {0: TO_INPUT}, ""),
        (DOT, 1, {0: "altered held\0\0\0\0"}, ""),
        (SUMS, N, {}, SUMS),
        (SUMS, 2 * 8192, {}, ""),
        (SUMS, N, {0: TO_INPUT}, ""),
        (SUMS, N, {0: TO_INPUT, 1: -1}, ""),
        (SUMS, N, {0: "\0".join(("", "", BY_ROW, "", "")), 1: -1}, SUMS),
        (SUMS, N, {0: "altered\0\0\0\0"}, ""),
        (SUMS, N, {2: torch.float16}, ""),
        (DOT, 1, {2: torch.float32, 3: torch.float32}, ""),
        (DOT, 1, {3: torch.float32}, ""),
        (DOT, 1, {2: torch.float16, 3: torch.float16}, in_dtype(DOT, torch.float16)),
        (SUMS, N, {2: torch.float16, 3: torch.float16}, in_dtype(SUMS, torch.float16)),
    ],
)
def test_where_a_form_is_used(form: str, columns: int, changes: dict[int, Any], found: str) -> None:
    plan, m, dtype, weight, device = (changes.get(i, x) for i, x in enumerate(USUAL))
    given = form, plan, m, columns, dtype, weight, device
    assert form_at(*given) == found
    with torch.autocast("cpu", dtype=torch.bfloat16):
        is_cast = {dtype, weight} != {torch.bfloat16}
        assert form_at(*given) == (form if is_cast else found)
    with torch.autocast("cpu", dtype=torch.float16):
        other = form_at(*given)
    is_taken = found or {dtype, weight} != {torch.bfloat16}
    assert other == (in_dtype(form, torch.float16) if is_taken else "")


def test_sums_of_gradients_bring_the_passes() -> None:
    """And with them a key of the cache that tells code which overwrites saved tensors."""
    with config.patch(post_grad_custom_post_pass=None, force_disable_caches=True):
        step(torch.compile(linear()), rows())
        assert isinstance(config.post_grad_custom_post_pass, Passes)


def test_no_form_is_used_on_a_gpu_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_form, "is_fast", is_fast)
    assert not form_at(DOT, "", 48, 1, torch.bfloat16, torch.bfloat16, "cpu")
    assert not form_at(SUMS, "", 48, N, torch.bfloat16, torch.bfloat16, "cpu")


@pytest.mark.parametrize("n", [3, 8])
def test_a_weight_that_was_replaced_is_multiplied_as_it_is(n: int) -> None:
    for layer in (linear(K, 1), linear(K, 24)):
        layer.weight = nn.Parameter(rows(n, K))
        x = rows(n)
        for columns in (1, n):  # one is for all outputs
            layer.bias = nn.Parameter(rows(1, columns)[0])
            assert torch.equal(compiled(layer)(x), plain_of(layer)(x))


def test_a_weight_of_another_class_is_multiplied_as_usual() -> None:
    layer = linear()
    given = {name: value.detach().requires_grad_() for name, value in layer.named_parameters()}

    def called(x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(layer, given, (x,))
        return found

    assert calls_of(torch.compile(called, backend="aot_eager"), rows(48).requires_grad_()) == 0


LOADED = """
import pickle, sys, torch
from lokakern.nn import compiled_form
compiled_form.is_fast = lambda columns, device: True
layer = pickle.loads(bytes.fromhex(sys.argv[1]))
x = torch.ones(3, layer.in_features).bfloat16()
y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
print(type(y.grad_fn).__name__, layer.form)
"""


@pytest.mark.rest
def test_a_form_of_a_file_is_a_constant_for_a_compiler() -> None:
    words = [sys.executable, "-c", LOADED, pickle.dumps(linear()).hex()]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["CompiledFunctionBackward", SUMS]


def test_a_sum_of_products_before_the_op_of_gradients_stays_a_sum() -> None:
    """Inductor asks for this tag, see `lokakern.functional.norm_gradient`; on GPUs only."""
    assert torch.Tag.pointwise in torch.ops.lokakern.norm_gradient.default.tags


def test_a_compiler_looks_through_what_it_fuses() -> None:
    """In HSTU the concatenation is a buffer of its own, which is read along rows."""
    torch.manual_seed(0)
    model = HSTU(dim=K, heads=2, layers=1, length=16).bfloat16()
    for module in model.modules():
        if type(module) is nn.Linear:
            adopt(module)
    for layer in (x for x in model.modules() if isinstance(x, Linear)):
        in_form(layer)
    with torch._inductor.config.patch(force_pointwise_cat=True):
        codes = codes_of(model, rows(160).requires_grad_())
    assert len(codes) == 2
    assert codes[-1].count("= lokakern_bias_gradient(") == 1


def test_a_form_belongs_to_a_choice() -> None:
    layer = nn.Linear(K, 1).bfloat16()
    layer.__class__ = Linear
    layer._is_adopted = True  # type: ignore[assignment]
    assert isinstance(layer, Linear)
    apply_choice(layer, Chosen("first", ("", "", ""), False, "", DOT))
    apply_choice(layer, Chosen("second", ("", "", ""), False))
    assert not layer.form
    remove_choice(layer, "second")
    assert layer.form == DOT
    kept = pickle.loads(pickle.dumps(layer))
    assert kept.form == DOT and calls_of(compiled(kept), rows(3).requires_grad_()) == 0
    remove_choice(layer, "first")
    assert type(layer) is nn.Linear and "form" not in vars(layer)


class Heads(nn.Module):
    """A layer whose gradient is put together of what attention transposes."""

    def __init__(self, layer: nn.Module, *, transposes: bool) -> None:
        super().__init__()
        self.layer, self.transposes = layer, transposes

    def forward(self, x: Tensor) -> Tensor:
        parts = self.layer(x).view(2, -1, N).sin().chunk(2, dim=-1)
        if self.transposes:
            parts = tuple(y.view(2, -1, 4, N // 8).transpose(1, 2) for y in parts)
            return (parts[0] @ parts[1].mT @ parts[1]).flatten(1)
        return (parts[0] * parts[1]).flatten(1)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("transposes", [False, True])
def test_a_compiler_sums_where_it_reads_along_rows(transposes: bool) -> None:
    x, model = rows(48), Heads(linear(), transposes=transposes)
    plain = plain_of(model)
    # On a GPU a concatenation is computed where it is read.
    with torch._inductor.config.patch(force_disable_caches=True, force_pointwise_cat=True):
        run = torch.compile(model, fullgraph=True)
        made, codes = run_and_get_code(lambda: results(run, x))
        others = codes_of(plain, x.clone().requires_grad_())
    assert any("lokakern_bias_gradient(" in code for code in codes) is transposes
    assert len(others) == 2 and not any("lokakern_bias_gradient(" in code for code in others)
    for one, other in zip(made, results(plain, x), strict=True):
        assert (one.double() - other.double()).norm() <= 0.01 * other.double().norm()


@pytest.mark.parametrize("m", [0, 1, 130])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_op(m: int, dtype: torch.dtype) -> None:
    gradient, bias = rows(m, 2 * K)[:, :K], torch.zeros(K, dtype=dtype)
    gradient = gradient.half() if dtype is torch.float16 else gradient
    sums = torch.ops.lokakern.bias_gradient(gradient, bias)
    assert sums.dtype is dtype and torch.equal(sums, column_sums(gradient).to(dtype))
    if m:  # opcheck cannot copy empty views
        checks = ("test_schema", "test_faketensor")
        op = torch.ops.lokakern.bias_gradient
        torch.library.opcheck(op, (gradient, bias), test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 130, 2048, 8200])
@pytest.mark.parametrize("n", [8, 264, 2048])
def test_sums_on_a_gpu_have_the_bits_of_the_emulation(m: int, n: int) -> None:
    for half, is_wide in itertools.product((torch.bfloat16, torch.float16), (False, True)):
        whole, dtype = rows(m, 2 * n).to(half)[:, :n], torch.float32 if is_wide else half
        expected = column_sums(whole).to(dtype)
        for gradient in (whole, whole.contiguous(), whole.contiguous().t().contiguous().t()):
            for _ in range(3):  # in Python, recorded, replayed
                bias = torch.zeros(n, dtype=dtype, device="cuda")
                sums = bias_gradient.OPS.bias_gradient(gradient.cuda(), bias)
                assert torch.equal(sums.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("transposes", [False, True])
def test_compiled_training_steps_on_a_gpu(
    transposes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_form, "is_fast", is_fast)
    layers = nn.Sequential(nn.Linear(K, K).bfloat16(), nn.ReLU(), linear())
    model = nn.Sequential(Heads(layers, transposes=transposes), linear(24 * N // 2, 1)).cuda()
    plain, x = plain_of(model), rows(48).cuda()
    exact = results(copy.deepcopy(plain).double(), x.double())
    mine = results(torch.compile(model, fullgraph=True), x)
    torch._dynamo.reset()
    theirs = results(torch.compile(plain, fullgraph=True), x)
    for one, other, right in zip(mine, theirs, exact, strict=True):
        error, rounding = (float((y.double() - right).norm()) for y in (one, other))
        assert error <= 1.5 * rounding + 2e-3 * float(right.norm())
