"""`convert(keep_inputs="fp8")`: inputs are saved in FP8 for the gradients of weights.

Kernels of an H200 are emulated here; some of these tests run on a GPU, too.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import lokakern
from lokakern.conversion.convert import Conversion
from lokakern.errors import FormatError, ShapeError, UnsupportedError
from lokakern.mods import FuseShared, Pad, apply
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.saved_inputs import SAVED
from tests.conversion.test_main_grads import main_grad

SEEDS = (0,)
M, K, N = 256, 64, 48
FP8 = {"output": "row", "grad_input": "row", "grad_weight": "1x128"}
KINDS = pytest.mark.parametrize(
    "kernels", [FP8, "row", "tensor", {"grad_weight": "1x128"}, "bf16"],
    ids=["1x128", "row", "tensor", "alone", "bf16"],
)  # fmt: skip
WHERE = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
where_there_is = pytest.mark.parametrize("where", WHERE)
IN = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
Middle = Callable[[], nn.Module]


def model_of(middle: Middle = nn.SiLU, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N), middle(), nn.Linear(N, 32)).to(dtype)


def both_of(
    kernels: Any = FP8, middle: Middle = nn.SiLU, dtype: torch.dtype = torch.bfloat16,
    where: str = "cpu", **options: Any,
) -> tuple[nn.Sequential, nn.Sequential]:  # fmt: skip
    """A model that saves its inputs, and one with the option."""
    models = model_of(middle, dtype).to(where), model_of(middle, dtype).to(where)
    for model, keep in zip(models, (None, "fp8"), strict=True):
        lokakern.convert(model, kernels=kernels, keep_inputs=keep, **options)
    return models


def converted(**options: Any) -> tuple[nn.Sequential, Conversion]:
    model = model_of()
    return model, lokakern.convert(model, kernels=FP8, keep_inputs="fp8", **options)


def batch(m: int = M, k: int = K, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)


def passed(model: nn.Module, x: Tensor, call: Any = None) -> list[Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    y = (model if call is None else call)(x)
    y.backward(torch.randn_like(y))
    found = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    return [f for f in found if f is not None]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def saved_by(model: nn.Module, x: Tensor) -> int:
    """Bytes of all storages that autograd saves, but those of parameters."""
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(y: Tensor) -> Tensor:
        storage = y.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes(), y
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        y = model(x)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = sum(size for place, (size, _) in kept.items() if place not in own)
    del y
    return found


# --- bits


@where_there_is
@KINDS
@IN
def test_gradients_have_the_bits_of_inputs_that_are_saved(
    half: torch.dtype, kernels: Any, where: str
) -> None:
    model, other = both_of(kernels, dtype=half, where=where)
    for m in (M, 100, 16, 11, 8, 1, 0):
        x = batch(m, dtype=half).to(where)
        assert same(passed(other, x), passed(model, x))
    x = batch(dtype=half).to(where)
    for several in (x.view(2, M // 2, K), x.view(2, M // 2, K).transpose(0, 1)):
        assert same(passed(other, several), passed(model, several))


@where_there_is
@IN
@pytest.mark.parametrize("kernels", [FP8, {"grad_weight": "1x128"}], ids=["all", "alone"])
def test_float32_weights_have_them_under_autocast(
    half: torch.dtype, kernels: Any, where: str
) -> None:
    models = [model_of(dtype=torch.float32).to(where) for _ in range(2)]
    for model, keep in zip(models, (None, "fp8"), strict=True):
        lokakern.convert(model, kernels=kernels, keep_inputs=keep, dtype=half)
    x = batch(dtype=torch.float32).to(where)
    results = []
    for model in models:
        with torch.autocast(where, half):
            results.append(passed(model, x))
    assert same(*results)
    with torch.autocast(where, half):
        before, after = (saved_by(model, x) for model in models)
    if where == "cpu":
        assert after < before - 0.9 * M * (K + N) * (1 - 1 / 32)


@where_there_is
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("middle", [nn.SiLU, nn.ReLU, nn.Identity])
def test_compiled_gradients_have_them_too(middle: Middle, dtype: torch.dtype, where: str) -> None:
    x = batch(dtype=dtype).to(where)
    results = []
    for model in both_of(FP8, middle, dtype, where):
        torch._dynamo.reset()
        counters.clear()
        with torch.autocast(where, torch.bfloat16, enabled=dtype is torch.float32):
            compiled = torch.compile(model, fullgraph=True, dynamic=False)
            results.append([passed(model, x, compiled), passed(model, x, compiled)])
        assert counters["stats"]["unique_graphs"] == 1
    assert same(results[0][0], results[1][0]) and same(results[0][1], results[1][1])


@pytest.mark.parametrize("kernels", [FP8, "row"], ids=["1x128", "row"])
def test_rows_of_fp8_data_with_gaps_cross_graphs(kernels: Any) -> None:
    results = []
    for model in both_of(kernels):
        torch._dynamo.reset()
        call = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
        results.append(passed(model, batch(1000), call))
    assert same(*results)


def test_compiled_code_of_dynamic_rows_saves_inputs() -> None:
    model, other = both_of()
    torch._dynamo.reset()
    for m in (M, 128, 16, 8):
        calls = [torch.compile(x, fullgraph=True, dynamic=True) for x in (model, other)]
        assert same(passed(model, batch(m), calls[0]), passed(other, batch(m), calls[1]))


@pytest.mark.parametrize("main_grads", [False, True])
def test_compiled_code_of_few_rows_saves_inputs_as_they_are(main_grads: bool) -> None:
    """Where FP8 with gaps and scales is larger."""
    model, other = both_of("row", main_grads=main_grads)
    torch._dynamo.reset()
    calls = [torch.compile(x, fullgraph=True, dynamic=False) for x in (model, other)]
    assert same(passed(model, batch(8), calls[0]), passed(other, batch(8), calls[1]))
    assert saved_by(other, batch(8)) == saved_by(model, batch(8))
    if main_grads:
        assert torch.equal(main_grad(other[0]), main_grad(model[0]))


@where_there_is
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@KINDS
def test_main_gradients_have_them(kernels: Any, is_compiled: bool, where: str) -> None:
    results = []
    for model in both_of(kernels, main_grads=True, where=where):
        torch._dynamo.reset()
        call: Any = torch.compile(model, fullgraph=True, dynamic=False) if is_compiled else model
        for seed in range(2):
            torch.manual_seed(seed)
            call(torch.randn(M, K).bfloat16().to(where)).float().square().sum().backward()
        assert model[0].weight.grad is None
        results.append([*(main_grad(model[at]) for at in (0, 2)), model[0].bias.grad])
    assert same(*results)


def test_a_main_gradient_is_not_added_to_where_another_one_is_asked() -> None:
    model, _ = converted(main_grads=True)
    x = batch().requires_grad_()
    torch.autograd.grad(model(x).float().sum(), x)
    assert not main_grad(model[0]).any()
    (grad,) = torch.autograd.grad(model(x).float().sum(), model[0].weight)
    assert grad.any() and not main_grad(model[0]).any()


@where_there_is
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_have_them(is_reentrant: bool, where: str) -> None:
    x = batch().to(where)
    model, other = both_of(where=where)
    results = [
        passed(one, x, lambda y, one=one: checkpoint(one, y, use_reentrant=is_reentrant))
        for one in (model, other)
    ]
    assert same(*results) and same(results[0], passed(model, x))


def test_graphs_that_are_kept_and_padded_layers_have_them() -> None:
    model, other = both_of()
    results = []
    for one in (model, other):
        x = batch().requires_grad_()
        y = one(x)
        for _ in range(2):
            y.backward(torch.ones_like(y), retain_graph=True)
        results.append([x.grad, one[0].weight.grad])
    assert same(*results)
    models = [nn.Sequential(nn.Linear(60, 44), nn.SiLU(), nn.Linear(44, 32)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    handles = []
    for one, keep in zip(models, (None, "fp8"), strict=True):
        one.bfloat16()
        apply(one, [Pad(16)])
        handles.append(lokakern.convert(one, kernels=FP8, keep_inputs=keep))
    assert same(*(passed(one, batch(k=60)) for one in models))
    assert [row["k"] for row in handles[1].saved_inputs(M)] == [64, 48]


# --- bytes


@pytest.mark.parametrize("m", [M, 100, 16, 8, 1])
@KINDS
def test_half_the_bytes_are_saved_as_told(kernels: Any, m: int) -> None:
    """What a SiLU saves is there in both."""
    model, other = model_of(), model_of()
    handles = [
        lokakern.convert(one, kernels=kernels, keep_inputs=keep)
        for one, keep in ((model, None), (other, "fp8"))
    ]
    x = batch(m)
    found = [saved_by(one, x) - 2 * m * N for one in (model, other)]
    told = [handle.saved_inputs(m) for handle in handles]
    assert found == [sum(row["bytes"] for row in rows) for rows in told]
    assert found == [sum(row[f"bytes_in_{x}"] for row in told[0]) for x in ("16_bits", "fp8")]
    assert found[0] == 2 * m * (K + N) and found[1] <= found[0]
    if m == M and kernels is FP8:
        assert found[1] == m * (K + N) + 4 * (K + N) * m // 128
    assert (found[1] == found[0]) is (kernels == "bf16" or m < 10)


@pytest.mark.parametrize(
    ("middle", "gain"),
    [
        (nn.SiLU, K + N), (nn.Identity, K + N), (nn.LayerNorm, K + N), (nn.Dropout, K + N),
        # These keep their results, which the next layer reads.
        (nn.ReLU, K), (nn.Sigmoid, K), (nn.Tanh, K), (nn.Flatten, K + N),
    ],
)  # fmt: skip
def test_eager_calls_save_no_input_twice(middle: Any, gain: int) -> None:
    made = (lambda: nn.LayerNorm(N)) if middle is nn.LayerNorm else middle
    model, other = both_of(middle=made)
    before, after = saved_by(model, batch()), saved_by(other, batch())
    assert before - after == gain * (M - 4 * M // 128)
    assert same(passed(other, batch()), passed(model, batch()))


def test_an_input_that_a_view_of_a_relu_is_stays_with_it() -> None:
    class Viewed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu().view(2, -1, N)

    model, other = both_of(middle=Viewed)
    assert saved_by(model, batch()) - saved_by(other, batch()) == K * (M - 4 * M // 128)


def test_memory_is_free_after_the_forward_pass() -> None:
    """Nothing but FP8 holds the input."""
    layer = nn.Linear(K, N).bfloat16()
    lokakern.convert(layer, kernels=FP8, keep_inputs="fp8")
    made: list[Any] = []

    def call() -> Tensor:
        x = batch() * 1
        made.append(weakref.ref(x.untyped_storage()))
        y: Tensor = layer(x)
        return y

    y = call()
    gc.collect()
    assert made[0]() is None
    y.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.any()


@pytest.mark.gpu
def test_memory_of_a_gpu_is_free_after_the_forward_pass() -> None:
    torch.manual_seed(0)
    m, k, layers = 8192, 1024, 8
    taken = []
    for keep in (None, "fp8"):
        model = nn.Sequential(*(nn.Linear(k, k) for _ in range(layers))).to("cuda", torch.bfloat16)
        lokakern.convert(model, kernels=FP8, keep_inputs=keep)
        for _ in range(2):  # the first call compiles kernels
            model.zero_grad()
            x = torch.randn(m, k, device="cuda").bfloat16().requires_grad_()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y = model(x)
            taken.append(torch.cuda.memory_allocated() - before - y.nbytes)
            y.sum().backward()
            del y
    # The input of the first layer is the caller's.
    expected = [2 * m * k * (layers - 1), (m * k + m * k // 32) * layers]
    for found, bytes_told in zip((taken[1], taken[3]), expected, strict=True):
        assert abs(found - bytes_told) < 0.02 * bytes_told


def test_handles_tell_bytes() -> None:
    _, handle = converted()
    assert "2 inputs saved in FP8: 224 -> 116 bytes per sample where each has one reader" in repr(
        handle
    )
    text = handle.explain("0")
    assert "0: 66 bytes of each sample are saved, where 16 bits take 128" in text
    assert "2: " not in text and "one FP8 copy for each reader" in text
    _, main = converted(skip="2")
    assert "1 input saved in FP8: 128 -> 66 bytes per sample" in repr(main)
    plain = lokakern.convert(model_of(), kernels=FP8)
    assert "saved" not in repr(plain) + plain.explain()
    handle.undo()
    assert "saved in FP8" not in repr(handle) and handle.saved_inputs(M) == []


def test_the_table_tells_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    handle = lokakern.convert(
        model_of(), kernels={"grad_weight": "1x128"}, keep_inputs="fp8", skip="2"
    )
    handle.table()
    assert "input of 0: 66 bytes of each sample are saved" in capsys.readouterr().out
    handle = lokakern.convert(model_of(), kernels="bf16", keep_inputs="fp8")
    handle.table()
    assert "input of 0: 128 bytes of each sample are saved in 16 bits" in capsys.readouterr().out


# --- other features


def saves(model: nn.Sequential) -> list[bool]:
    return [SAVED in model[at]._plan for at in (0, 2)]


def test_what_reads_inputs_keeps_them() -> None:
    model, handle = converted(check="1:8")
    assert saves(model) == [False, False]
    assert handle.saved_inputs(M)[0]["bytes"] == 2 * M * K
    passed(model, batch())
    assert {row["site"] for row in handle.checks} >= {"0/grad_weight"}
    model, handle = converted()
    assert saves(model) == [True, True]
    with handle.watch(budget=0.06):
        assert saves(model) == [False, False]
        passed(model, batch())
        assert "saved in 16 bits: a watch is under way" in repr(handle)
        assert handle.saved_inputs(M)[0]["bytes"] == 2 * M * K
    assert saves(model) == [False, False]  # as compiled graphs are compiled for switches
    assert "saved in 16 bits: a watch has ended: refresh" in repr(handle)
    handle.refresh()
    assert saves(model) == [True, True]
    assert handle.saved_inputs(M)[0]["bytes"] == M * K * 33 // 32
    assert repr(handle) == repr(converted()[1])


@pytest.mark.parametrize("how", ["check", "environment"])
def test_words_of_a_handle_are_of_what_is_saved(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"check": "1:8"} if how == "check" else {}
    if how == "environment":
        monkeypatch.setenv("LOKAKERN_CHECK", "1:8")
    _, handle = converted(**options)
    assert {row["bytes"] for row in handle.saved_inputs(M)} == {2 * M * K, 2 * M * N}
    assert "inputs saved in 16 bits: products are checked" in repr(handle)
    handle.table()
    for text in (repr(handle), handle.explain(), capsys.readouterr().out):
        assert "saved in FP8" not in text and "66 bytes" not in text
        assert "products are checked" in text
    assert "input of 0: 128 bytes of each sample are saved in 16 bits" in handle.explain("0")


def test_a_watch_that_ended_may_begin_again() -> None:
    model, handle = converted()
    for _ in range(2):
        with handle.watch(budget=0.06):
            handle.turn([("0", "grad_weight")], False)
        assert handle.turned_off
        handle.refresh()
        assert saves(model) == [True, True] and not handle.turned_off
        expected, _ = converted()
        assert same(passed(model, batch()), passed(expected, batch()))


@pytest.mark.parametrize("m", [0, -1, 2.0, True, "1"])
def test_rows_are_a_positive_number(m: Any) -> None:
    with pytest.raises(ShapeError, match="expected at least 1 row"):
        converted()[1].saved_inputs(m)


def test_layers_without_a_gradient_of_the_weight_save_what_they_did() -> None:
    model, other = both_of()
    for one in (model, other):
        one.requires_grad_(False)
    x = batch().requires_grad_()
    assert saved_by(model, x) == saved_by(other, x)
    layers = [nn.Linear(K, 1).bfloat16() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, keep in zip(layers, (None, "fp8"), strict=True):
        lokakern.convert(layer, kernels=FP8, keep_inputs=keep)
    assert saved_by(layers[0], batch()) == saved_by(layers[1], batch())
    assert same(*(passed(layer, batch()) for layer in layers))


def test_without_gradients_nothing_changes() -> None:
    model, other = both_of()
    with torch.no_grad():
        assert torch.equal(model(batch()), other(batch()))


def test_second_derivatives_of_inputs_work_and_those_of_weights_say_why_not() -> None:
    model, other = both_of(middle=nn.Tanh)
    results = []
    for one in (model, other):
        x = batch().requires_grad_()
        (g,) = torch.autograd.grad(one(x).float().sum(), x, create_graph=True)
        g.float().square().sum().backward()
        results.append([g.detach(), x.grad, one[2].weight.grad])
    assert same(*results)
    for ask in (
        lambda y, w: y.backward(create_graph=True),
        lambda y, w: torch.autograd.grad(y, w, create_graph=True),
    ):
        with pytest.raises(UnsupportedError, match="saved in FP8 only"):
            ask(other(batch()).float().sum(), other[0].weight)


def test_copies_and_files_save_inputs_in_fp8() -> None:
    model, handle = converted()
    expected, size = passed(model, batch()), saved_by(model, batch())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert saves(other) == [True, True]
        assert same(passed(other, batch()), expected) and saved_by(other, batch()) == size
    handle.undo()
    assert type(model[0]) is nn.Linear and model.state_dict().keys() == other.state_dict().keys()


def test_refresh_keeps_the_option_and_another_conversion_ends_it() -> None:
    model, handle = converted()
    handle.refresh(kernels="row")
    assert saves(model) == [True, True]
    handle.refresh(kernels="bf16")
    assert saves(model) == [False, False] and not model[0].is_special
    handle.refresh(kernels=FP8)
    newer = lokakern.convert(model, kernels=FP8)
    assert saves(model) == [False, False]
    newer.undo()
    assert saves(model) == [True, True]


def test_weights_unchanged_and_written_weights_work() -> None:
    model, other = both_of()
    handle = lokakern.convert(other, kernels=FP8, keep_inputs="fp8")
    with handle.weights_unchanged():
        first = passed(other, batch())
        assert same(passed(other, batch()), first)
    assert same(first, passed(model, batch()))


def test_crosses_are_as_without() -> None:
    """Of a budget; gradients behind crosses read inputs as they are."""

    class Crosses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(K, 32), nn.Linear(32, K)

        def forward(self, x0: Tensor) -> Tensor:
            return x0 * self.up(self.down(x0)) + x0

    torch.manual_seed(0)
    one = Crosses().bfloat16()
    other = copy.deepcopy(one)
    for model, keep in ((one, None), (other, "fp8")):
        lokakern.convert(model, kernels=FP8, keep_inputs=keep)
    x = batch()
    assert same(passed(one, x), passed(other, x))
    results = []
    for model in (one, other):
        torch._dynamo.reset()
        results.append(passed(model, x, torch.compile(model, fullgraph=True, dynamic=False)))
    assert same(*results)


class Raw(nn.Module):
    """Products with parameters, of rows and of a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(N, K).bfloat16())
        self.v = nn.Parameter(torch.randn(N, 32).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.w) @ self.v


class Attention(nn.Module):
    """Self-attention, which has raw products."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(K, 2, batch_first=True).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(*[x.view(8, -1, K)] * 3, need_weights=False)[0]
        return y


class Shared(nn.Module):
    """Layers on one input, which a mod multiplies in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(K, N).bfloat16() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x)], -1)


def normalized() -> nn.Module:
    return LinearNormAct(K, N, norm="layer", activation="silu").bfloat16()


@pytest.mark.parametrize("make", [Raw, Attention, Shared, normalized])
@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=pytest.mark.rest)], ids=["eager", "compiled"]
)
def test_other_products_save_inputs_in_fp8_too(
    make: Callable[[], nn.Module], is_compiled: bool
) -> None:
    results, sizes = [], []
    for keep in (None, "fp8"):
        torch.manual_seed(0)
        model = make()
        if make is Shared:
            apply(model, [FuseShared()])
        handle = lokakern.convert(model, kernels=FP8, keep_inputs=keep)
        torch._dynamo.reset()
        call: Any = torch.compile(model, fullgraph=True, dynamic=False) if is_compiled else model
        results.append(passed(model, batch(), call))
        sizes.append(saved_by(model, batch()))
    assert same(*results)
    rows = handle.saved_inputs(M)
    gain = sum(row["bytes_in_16_bits"] - row["bytes"] for row in rows)
    found = sizes[0] - sizes[1]
    assert 0 < found <= gain  # an attention has sites for other kinds of calls, too
    assert make is Attention or found == gain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_inputs": "bf16"}, "keep_inputs is 'bf16'; expected 'fp8' or None"),
        ({"keep_inputs": "fp8", "inference": True}, "for training, and inference is given"),
        ({"keep_inputs": "fp8", "scaling": "delayed"}, "and scaling is 'delayed'"),
    ],
)
def test_mistakes_are_errors(options: dict[str, Any], message: str) -> None:
    model = model_of()
    with pytest.raises(FormatError, match=message):
        lokakern.convert(model, kernels="tensor", **options)
    assert type(model[0]) is nn.Linear
