"""Gradients of weights add up in float32, in ``weight.main_grad``.

Kernels of an H200 are emulated here; some of these tests run on a GPU, too.
"""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lokakern
from lokakern import numerics
from lokakern.bench.models.throughput import aside
from lokakern.conversion.convert import Conversion
from lokakern.conversion.restored_state import restored_state
from lokakern.errors import FormatError, ShapeError, UnsupportedError
from lokakern.mods import MixTokens, Pad, apply
from lokakern.nn import routed_matmul
from lokakern.types import Granularity
from tests.support.two_ranks import results_of_two_ranks

SEEDS = (0,)
K, N, M = 64, 48, 32
FP8 = {"output": "row", "grad_input": "row", "grad_weight": "1x128"}
KINDS = pytest.mark.parametrize("kernels", [FP8, "bf16"], ids=["fp8", "bf16"])
MICRO_BATCHES = 16
WHERE = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
where_there_is = pytest.mark.parametrize("where", WHERE)
HALF = torch.float16
IN = pytest.mark.parametrize("half", [torch.bfloat16, HALF], ids=["bfloat16", "float16"])


def model_of(dtype: torch.dtype = torch.bfloat16, where: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 32)).to(where, dtype)


def converted(
    kernels: Any = FP8, where: str = "cpu", half: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[nn.Sequential, Conversion]:
    model = model_of(half, where)
    return model, lokakern.convert(model, kernels=kernels, main_grads=True, **options)


def batch(seed: int, m: int = M, k: int = K) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


def distance(found: Any, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def main_grad(layer: nn.Module) -> Any:
    weight: Any = layer.weight
    return weight.main_grad


def passed(
    model: nn.Module,
    steps: int = MICRO_BATCHES,
    where: str = "cpu",
    half: torch.dtype = torch.bfloat16,
) -> None:
    for seed in range(steps):
        model(batch(seed).to(where, half)).float().square().sum().backward()


# --- sums


@where_there_is
@KINDS
@IN
def test_micro_batches_add_up_as_in_float64(half: torch.dtype, kernels: Any, where: str) -> None:
    """Products of FP8 are exact products of the quantized operands; nothing is rounded to half."""
    layer = nn.Linear(K, N).to(where, half)
    handle = lokakern.convert(layer, kernels=kernels, main_grads=True)
    exact = torch.zeros(N, K, dtype=torch.float64, device=where)
    in_half = torch.zeros(N, K, device=where).to(half)
    for seed in range(MICRO_BATCHES):
        x, grad = batch(seed).to(where, half), batch(100 + seed, k=N).to(where, half)
        layer(x).backward(grad)
        parts: list[Any] = [grad.t(), x.t()]
        if kernels is FP8:
            forms = Granularity.GROUP, Granularity.GROUP
            parts = [
                numerics.dequantize(lokakern.quantize(part, form))
                for part, form in zip(parts, forms, strict=True)
            ]
        exact += parts[0].double() @ parts[1].double().t()
        in_half += (parts[0].float() @ parts[1].float().t()).to(half)
    assert layer.weight.grad is None
    assert main_grad(layer).dtype is torch.float32
    # Tensor cores add products of FP8 with 14 bits, see `PROMOTED_KERNEL_ERR_BOUND`.
    limit = 1e-6 if where == "cpu" else 2e-3 if kernels is FP8 else 1e-5
    assert distance(main_grad(layer), exact) < limit
    assert distance(in_half, exact) > (3e-3 if half is torch.bfloat16 else 3e-4)
    assert layer.bias.grad is not None
    assert handle.main_grads.left == {}


@KINDS
def test_everything_but_the_weight_gradient_is_as_without(kernels: Any) -> None:
    model, _ = converted(kernels)
    other = model_of()
    lokakern.convert(other, kernels=kernels, between=False)
    results = []
    for call in (model, other):
        x = batch(1).requires_grad_()
        y = call(x)
        y.backward(batch(2, k=32))
        results.append((y, x.grad, call[0].bias.grad, call[2].bias.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    for mine, its in ((model[0], other[0]), (model[2], other[2])):
        torch.testing.assert_close(main_grad(mine).bfloat16(), its.weight.grad)


@where_there_is
@KINDS
def test_a_sum_is_of_all_rows_of_all_calls(kernels: Any, where: str) -> None:
    """Rows in more axes, slices, m that 16 does not divide, no rows, and one row."""
    layer = nn.Linear(K, N).bfloat16().to(where)
    lokakern.convert(layer, kernels=kernels, main_grads=True)
    whole = batch(3, m=2 * 17, k=2 * K).to(where)
    inputs = [whole[:, :K], whole[:, K:], whole[:, :K].view(2, 17, K)]
    inputs += [batch(4, 0).to(where), batch(5, 1).to(where)]
    exact = torch.zeros(N, K, dtype=torch.float64, device=where)
    for x in inputs:
        y = layer(x)
        grad = batch(y.numel(), y.shape[:-1].numel(), N).to(where).view(y.shape)
        y.backward(grad)
        exact += grad.reshape(-1, N).double().t() @ x.reshape(-1, K).double()
    assert distance(main_grad(layer), exact) < 0.05


def test_without_a_kernel_that_adds_the_product_is_rounded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.Linear(K, N).bfloat16()
    lokakern.convert(layer, kernels=FP8, main_grads=True)
    sums = []
    for adds in (True, False):
        monkeypatch.setattr(routed_matmul, "_adds", lambda *_, adds=adds: adds)
        main_grad(layer).zero_()
        layer(batch(1)).backward(batch(2, k=N))
        sums.append(main_grad(layer).clone())
    assert not torch.equal(*sums)
    assert torch.equal(sums[0].bfloat16().float(), sums[1])


def test_kernels_that_add_are_those_of_the_scales_and_the_device() -> None:
    lokakern.dispatch("gemm", (64, 64, 64), 0.06, device="NVIDIA H200")  # loads kernels
    here = torch.device("cpu")
    of = routed_matmul.kernel_named
    assert routed_matmul._adds(of("torch.quantize_row+torch.emulated_row"), here)
    # An emulation of other names, and kernels of absent GPUs, add nothing here.
    assert not routed_matmul._adds(of("cuda.quantize_row+cuda.scaled_gemm_row"), here)


# --- in compiled code


@where_there_is
@KINDS
@IN
def test_one_graph_adds_in_place(half: torch.dtype, kernels: Any, where: str) -> None:
    model, handle = converted(kernels, where, half)
    passed(model, where=where, half=half)
    eager = [main_grad(layer).clone() for layer in (model[0], model[2])]
    handle.main_grads.zero()
    torch._dynamo.reset()
    counters.clear()
    compiled: Any = torch.compile(model, fullgraph=True)
    passed(compiled, where=where, half=half)
    assert counters["stats"]["unique_graphs"] == 1
    for layer, expected in zip((model[0], model[2]), eager, strict=True):
        assert layer.weight.grad is None
        # Inductor rounds less between layers, and the GPU's fuses more.
        assert distance(main_grad(layer), expected) < (5e-3 if where == "cpu" else 2e-2)


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_cuda_graph_adds_in_each_replay(is_compiled: bool, kernels: Any) -> None:
    model, handle = converted(kernels, "cuda")
    passed(model, where="cuda")
    eager = [main_grad(layer).clone() for layer in (model[0], model[2])]
    call: Any = torch.compile(model, fullgraph=True) if is_compiled else model
    inputs = [batch(0).cuda(), batch(1).cuda()]

    def step() -> None:
        for x in inputs:
            call(x).float().square().sum().backward()

    with aside(True):
        step()
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    handle.main_grads.zero()
    for seed in range(0, MICRO_BATCHES, 2):
        for place, x in enumerate(inputs):
            x.copy_(batch(seed + place))
        graph.replay()
    for layer, expected in zip((model[0], model[2]), eager, strict=True):
        assert distance(main_grad(layer), expected) < (2e-2 if is_compiled else 2e-3)


@where_there_is
def test_graphs_that_are_kept_add_in_any_order(where: str) -> None:
    model, _ = converted(where=where)
    torch._dynamo.reset()
    losses = [torch.compile(model)(batch(seed).to(where)).float().sum() for seed in range(3)]
    for loss in reversed(losses):
        loss.backward()
    found = main_grad(model[0]).clone()
    main_grad(model[0]).zero_()
    for seed in range(3):
        model(batch(seed).to(where)).float().sum().backward()
    assert distance(found, main_grad(model[0])) < (5e-3 if where == "cpu" else 2e-2)


def test_the_op_is_as_torch_wants_ops() -> None:
    given = (torch.zeros(N, K), batch(1, k=N), batch(2), "")
    torch.library.opcheck(torch.ops.lokakern.add_weight_gradient.default, given)


# --- optimizers


def trained(main_grads: bool, dtype: torch.dtype, where: str) -> list[float]:
    """Losses of a model with `MICRO_BATCHES` backward passes for each step."""
    model = model_of(dtype, where)
    handle = lokakern.convert(model, None, main_grads=main_grads)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for step in range(8):
        total = 0.0
        for seed in range(MICRO_BATCHES):
            x = batch(100 * step + seed).to(where, dtype)
            with torch.autocast(where, torch.bfloat16, enabled=dtype is torch.float32):
                loss = (model(x).float() - x[:, :32].float()).square().mean()
            loss.backward()
            total += loss.item()
        if main_grads:
            handle.main_grads.reduce()  # of one process: as it is
            handle.main_grads.hand_over()
            for layer in (model[0], model[2]):
                assert (layer.weight.grad is main_grad(layer)) is (dtype is torch.float32)
                assert layer.weight.grad.dtype is dtype
        optimizer.step()
        if main_grads:
            handle.main_grads.zero()
            assert model[0].weight.grad is None
            assert not main_grad(model[0]).any()
        optimizer.zero_grad()
        found.append(total)
    return found


@where_there_is
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_train_as_with_ordinary_gradients(dtype: torch.dtype, where: str) -> None:
    mine, ordinary = (trained(main_grads, dtype, where) for main_grads in (True, False))
    assert mine[-1] < 0.9 * mine[0]
    assert mine == pytest.approx(ordinary, rel=2e-3)


def scaled_steps(
    main_grads: bool, kernels: Any, dtype: torch.dtype, where: str, steps: int = 16
) -> tuple[list[float], list[float]]:
    """Losses and loss scales of a model in float16, from a scale that overflows at first.

    Of float16 weights the optimizer has float32 copies, as gradients in float16 are refused.
    """
    model = model_of(dtype, where)
    handle = lokakern.convert(model, kernels=kernels, main_grads=main_grads, dtype=HALF)
    weights = list(model.parameters())
    copies = [w if dtype is torch.float32 else nn.Parameter(w.detach().float()) for w in weights]
    optimizer = torch.optim.SGD(copies, 0.5)
    scaler = torch.amp.GradScaler(where, init_scale=2.0**24, growth_interval=3)
    losses, scales = [], []
    for _ in range(steps):
        losses.append(0.0)
        for seed in range(4):
            x = batch(seed).to(where, dtype)
            with torch.autocast(where, HALF, enabled=dtype is torch.float32):
                loss = (model(x).float() - x[:, :32].float()).square().mean() / 4
            scaler.scale(loss).backward()
            losses[-1] += loss.item()
        if main_grads:
            handle.main_grads.reduce()
            if dtype is torch.float32:
                handle.main_grads.hand_over()
        for copied, weight in zip(copies, weights, strict=True):
            if copied is not weight:
                found = getattr(weight, "main_grad", weight.grad)
                assert found is not None
                copied.grad = found.float()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(copies, 1.0)
        before = [copied.detach().clone() for copied in copies]
        scaler.step(optimizer)
        same = [torch.equal(a, b) for a, b in zip(before, copies, strict=True)]
        assert same == [not norm.isfinite()] * len(same)
        scaler.update()
        scales.append(scaler.get_scale())
        with torch.no_grad():
            for copied, weight in zip(copies, weights, strict=True):
                weight.copy_(copied)
        if main_grads:
            handle.main_grads.zero()
        model.zero_grad()
    return losses, scales


@where_there_is
@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_models_train_in_float16_under_a_scaler(
    dtype: torch.dtype, kernels: Any, where: str
) -> None:
    """Steps of gradients that overflow are skipped, and clipping sees unscaled ones."""
    losses, scales = scaled_steps(True, kernels, dtype, where)
    factors = [b / a for a, b in itertools.pairwise(scales)]
    assert scales[0] == 2.0**23 and {0.5, 2.0} <= set(factors)
    assert losses[-1] < 0.9 * losses[0]
    ordinary, _ = scaled_steps(False, kernels, dtype, where)
    assert losses[-1] == pytest.approx(ordinary[-1], rel=0.02)


def test_gradients_of_other_readers_are_part_of_the_sum() -> None:
    """A tied embedding, and a gradient that is differentiated again."""
    layer, table = nn.Linear(K, N, bias=False), nn.Embedding(N, K)
    model = nn.Sequential(layer, table).bfloat16()
    table.weight = layer.weight

    def penalty() -> None:
        x = batch(4).requires_grad_()
        (g,) = torch.autograd.grad(layer(x).float().square().sum(), x, create_graph=True)
        g.float().square().sum().backward()

    def lookup() -> None:
        table(torch.tensor([3, 3])).float().square().sum().backward()

    for passes in (penalty, lookup):
        passes()
        assert layer.weight.grad is not None
        expected = layer.weight.grad.clone()
        model.zero_grad()
        handle = lokakern.convert(model, kernels="bf16", main_grads=True)
        passes()
        assert layer.weight.grad is not None
        handle.main_grads.reduce()
        assert layer.weight.grad is None
        assert distance(main_grad(layer), expected) < 5e-3
        handle.undo()


@KINDS
def test_autograd_grad_adds_nothing(kernels: Any) -> None:
    layer = nn.Linear(K, N).bfloat16()
    x = batch(1).requires_grad_()
    lokakern.convert(layer, kernels=kernels)
    weight: Tensor = layer.weight
    expected = torch.autograd.grad(layer(x), (x, weight), batch(2, k=N))
    lokakern.convert(layer, kernels=kernels, main_grads=True)
    for of in ((x,), (x, weight)):
        found = torch.autograd.grad(layer(x), of, batch(2, k=N))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=False))
        assert not main_grad(layer).any()
    layer(x).backward(batch(2, k=N), inputs=[weight])
    assert x.grad is None
    assert distance(main_grad(layer), expected[1]) < 5e-3


def test_tied_layers_share_one_sum() -> None:
    model = nn.Sequential(nn.Linear(K, K, False), nn.Linear(K, K, False)).bfloat16()
    model[1].weight = model[0].weight
    handle = lokakern.convert(model, kernels=FP8, main_grads=True)
    assert list(handle.main_grads.weights) == ["0"]
    model(batch(1)).sum().backward()
    first = main_grad(model[0])
    assert first is main_grad(model[1])
    handle.undo()
    model(batch(1)).sum().backward()
    assert distance(first, model[0].weight.grad) < 0.05


# --- the life of a conversion


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_handles_hand_a_shared_sum_over_once(dtype: torch.dtype) -> None:
    model, other = model_of(dtype), model_of(dtype)
    other[0].weight = model[0].weight
    handles = [lokakern.convert(x, kernels="bf16", main_grads=True) for x in (model, other)]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
        passed(model, 2)
    total = main_grad(model[0]).clone()
    for handle in handles:
        handle.main_grads.hand_over()
    assert torch.equal(model[0].weight.grad, total.to(dtype))
    assert torch.equal(main_grad(model[0]), total)
    for handle in handles:
        handle.main_grads.zero()
    assert not main_grad(model[0]).any() and model[0].weight.grad is None


def test_gradients_of_gradients_leave_no_graph_behind() -> None:
    model, handle = converted("bf16")
    for _ in range(2):
        model(batch(0)).float().square().sum().backward(create_graph=True)
        handle.main_grads.hand_over()
        handle.main_grads.zero()
        assert not main_grad(model[0]).requires_grad
    passed(model, 2)


def test_weights_with_hooks_or_computed_ones_keep_their_gradients() -> None:
    model = model_of()
    seen: list[Any] = []
    model[0].weight.register_hook(seen.append)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    handle = lokakern.convert(model, kernels="bf16", main_grads=True)
    assert set(handle.main_grads.left) == {"0", "2"} and not handle.main_grads.weights
    passed(model, 1)
    assert len(seen) == 2 and all(isinstance(x, Tensor) for x in seen)
    for main_grads in (False, True):
        model = model_of()
        lokakern.convert(model, kernels="bf16", main_grads=main_grads)
        torch.nn.utils.parametrizations.weight_norm(model[0])
        model.float().bfloat16()
        model.load_state_dict(model.state_dict())
        if main_grads:
            with pytest.raises(UnsupportedError, match="convert the model again"):
                model(batch(0))
        else:
            model(batch(0)).sum().backward()


def test_a_frozen_weight_has_no_gradient() -> None:
    model, handle = converted("bf16")
    model[0].weight.requires_grad_(False)
    passed(model, 1)
    handle.main_grads.hand_over()
    assert model[0].weight.grad is None and model[2].weight.grad is not None


def test_a_sum_in_a_file_is_not_added_to() -> None:
    model, _ = converted("bf16")
    passed(model, 1)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    lokakern.convert(again, kernels="bf16", main_grads=True)
    assert not main_grad(again[0]).any()


def test_undo_and_a_newer_conversion_restore_ordinary_gradients() -> None:
    model, handle = converted()
    newer = lokakern.convert(model, None)
    assert handle.main_grads.weights == {}
    model(batch(1)).sum().backward()
    assert model[0].weight.grad is not None
    newer.undo()
    model.zero_grad()
    model(batch(1)).sum().backward()
    assert model[0].weight.grad is None
    assert main_grad(model[0]).any()
    handle.refresh()
    assert list(handle.main_grads.weights) == ["0", "2"]
    handle.undo()
    assert type(model[0]) is nn.Linear
    assert not hasattr(model[0].weight, "main_grad")
    model(batch(1)).sum().backward()
    assert model[0].weight.grad is not None
    with pytest.raises(UnsupportedError, match="the conversion was undone"):
        handle.main_grads  # noqa: B018


def test_copies_and_files_have_ordinary_gradients() -> None:
    model, _ = converted()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(batch(1)).sum().backward()
        assert other[0].weight.grad is not None
        assert "cuda" in repr(other) or "emulated" in repr(other)  # with the kernels
        lokakern.convert(other, None).undo()
        assert not other[0].adds_gradient
    assert not main_grad(model[0]).any()


def test_a_checkpoint_is_that_of_linear_and_training_goes_on_from_it() -> None:
    """Between steps main gradients are zero, so there is nothing of them to save."""

    def step(model: nn.Sequential, handle: Conversion, optimizer: Any, seed: int) -> None:
        model(batch(seed)).float().square().mean().backward()
        handle.main_grads.hand_over()
        optimizer.step()
        handle.main_grads.zero()
        optimizer.zero_grad()

    model, handle = converted()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    step(model, handle, optimizer, 1)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert states[0].keys() == model_of().state_dict().keys()
    step(model, handle, optimizer, 2)
    for is_assigned in (False, True):
        other, its = converted()
        other.load_state_dict(copy.deepcopy(states[0]), assign=is_assigned)
        resumed = torch.optim.Adam(other.parameters(), 1e-2)
        resumed.load_state_dict(copy.deepcopy(states[1]))
        step(other, its, resumed, 2)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_move_to_another_device_makes_new_main_gradients() -> None:
    model, _ = converted()
    passed(model, 1)
    model.to("meta")
    assert main_grad(model[0]).is_meta
    model.to_empty(device="cpu")
    assert not main_grad(model[0]).any()
    assert main_grad(model.float()[0]).dtype is torch.float32
    weight: Any = model[0].weight
    weight.main_grad = weight.main_grad.to("meta")  # as after a move that keeps the parameter
    model.float()
    assert not main_grad(model[0]).is_meta


class AcrossTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mixing(x.transpose(1, 2))
        return mixed


def test_a_layer_across_tokens_keeps_its_gradient() -> None:
    model = AcrossTokens().bfloat16()
    apply(model, [MixTokens()])
    assert model.mixing.is_mixing
    handle = lokakern.convert(model, None, main_grads=True)
    assert handle.main_grads.weights == {}
    model(batch(1, 32, 64).view(2, 16, 64)).sum().backward()
    assert model.mixing.weight.grad is not None


def test_other_layers_keep_their_gradients() -> None:
    """Padded and frozen ones; a frozen one has no gradient at all."""
    model = nn.Sequential(nn.Linear(K, 39), nn.Linear(39, 32), nn.Linear(32, 32)).bfloat16()
    apply(model, [Pad(16)])
    model[2].weight.requires_grad_(False)
    handle = lokakern.convert(model, kernels=FP8, main_grads=True)
    assert handle.main_grads.weights == {}
    assert list(handle.main_grads.left) == ["0", "1", "2"]
    model(batch(1)).sum().backward()
    assert model[0].weight.grad is not None
    assert model[2].weight.grad is None


def test_a_layer_with_float32_operands_keeps_its_gradient() -> None:
    model = model_of(torch.float32)
    handle = lokakern.convert(model, kernels=FP8, main_grads=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns once in a process
        model(batch(1).float()).sum().backward()
    kept = model[0].weight.grad
    assert kept is not None
    handle.main_grads.hand_over()
    assert torch.equal(main_grad(model[0]), kept)


def test_trial_steps_leave_main_gradients_as_they_were() -> None:
    """As those of `Conversion.tune`."""
    model, _ = converted()
    passed(model, 1)
    before = main_grad(model[0]).clone()
    with restored_state(model, is_trained=True):
        passed(model, 1)
        assert not torch.equal(main_grad(model[0]), before)
    assert torch.equal(main_grad(model[0]), before)


def test_no_other_op_computes_gradients_of_weights() -> None:
    """As of relus in products, gradients behind layers and other forms in compiled code."""

    def found(**options: Any) -> list[dict[str, str]]:
        layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU()]
        model = nn.Sequential(*layers, nn.Linear(64, 1)).bfloat16()
        handle = lokakern.convert(model, 0.06, device="NVIDIA H200", **options)
        handle.use_routes({}, has_relus=True)
        return [handle.rectified, handle.joined, handle.forms]

    assert all(found())
    assert not any(found(main_grads=True))
    assert not any(found(scaling="delayed"))


def test_a_check_samples_all_but_weight_gradients() -> None:
    model, handle = converted(check="1:8")
    passed(model, 3)
    assert {row["site"].partition("/")[2] for row in handle.checks} <= {"output", "grad_input"}
    assert len(handle.checks) > 1


@IN
def test_a_watch_turns_weight_gradients_off_and_on(half: torch.dtype) -> None:
    model, handle = converted("tensor", half=half)
    with handle.watch(budget=0.06):
        places = [("0", "grad_weight")]
        sums = []
        for is_on in (True, False, True):
            handle.turn(places, is_on)
            main_grad(model[0]).zero_()
            passed(model, 1, half=half)
            sums.append(main_grad(model[0]).clone())
    assert torch.equal(sums[0], sums[2])
    assert not torch.equal(sums[0], sums[1])


# --- errors


def test_mistakes_are_errors() -> None:
    with pytest.raises(FormatError, match="main_grads is for training"):
        lokakern.convert(model_of(), 0.06, inference=True, main_grads=True)
    with pytest.raises(UnsupportedError, match="without main_grads=True"):
        lokakern.convert(model_of(), None).main_grads  # noqa: B018
    model, handle = converted()
    handle.main_grads.hand_over()
    for call in (handle.main_grads.hand_over, handle.main_grads.reduce):
        with pytest.raises(UnsupportedError, match=r"call zero\(\)"):
            call()
    handle.main_grads.zero()
    handle.main_grads.hand_over()
    with pytest.raises(UnsupportedError, match="none of these weights"):
        handle.main_grads.ddp(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match=r"without DDP"):
        alone = nn.Linear(K, N, bias=False)
        lokakern.convert(alone, None, main_grads=True).main_grads.ddp(alone)
    model[0].weight.main_grad = torch.zeros(2, 2)
    with pytest.raises(ShapeError, match=r"expected \[48, 64\] torch.float32"):
        model(batch(1)).sum().backward()
    model[0].weight = nn.Parameter(model[0].weight.detach())
    with pytest.raises(UnsupportedError, match="reduce_dtype"):
        model(batch(1))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="reduce_dtype"):
        torch.compile(model)(batch(1))


# --- two ranks


def losses_of(rank: int, kernels: Any, ranks: int, *, is_plain: bool = False) -> list[Any]:
    """Losses of steps of two micro-batches on this rank's rows, and sums of the weights."""
    torch.manual_seed(rank if ranks > 1 else 0)  # the first rank's weights hold
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 32)).bfloat16()
    handle = lokakern.convert(model, kernels=kernels, main_grads=True)
    call: nn.Module = model
    if ranks > 1:
        wrap: Any = nn.parallel.DistributedDataParallel if is_plain else handle.main_grads.ddp
        call = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    found: list[Any] = []
    for step in range(4):
        for micro in range(2):
            x = batch(10 * step + micro)[rank::ranks]
            call(x).float().square().mean().backward()
            assert is_plain or model[0].weight.grad is None
        handle.main_grads.reduce()
        handle.main_grads.hand_over()
        optimizer.step()
        handle.main_grads.zero()
        optimizer.zero_grad()
        found.append(model(batch(99)).float().square().mean().item())
    return [found, *(p.detach().double().sum().item() for p in model.parameters())]


def refused_by_fsdp2() -> str:
    from torch.distributed.fsdp import fully_shard

    model, _ = converted()
    fully_shard(model)
    try:
        model(batch(1))
    except UnsupportedError as error:
        return str(error)
    return ""


def one_of_two_ranks(rank: int) -> dict[str, Any]:
    return {
        "fp8": losses_of(rank, FP8, 2),
        "bf16": losses_of(rank, "bf16", 2),
        "plain ddp": losses_of(rank, "bf16", 2, is_plain=True),
        "fsdp2": refused_by_fsdp2(),
    }


@KINDS
def test_two_ranks_train_as_one(kernels: Any) -> None:
    both = results_of_two_ranks(__name__)
    name = "fp8" if kernels is FP8 else "bf16"
    first, second = (found[name] for found in both)
    assert first == second, "weights are equal on all ranks"
    alone = losses_of(0, kernels, 1)
    assert first[0] == pytest.approx(alone[0], rel=0.02)
    assert first[0][-1] < 0.9 * first[0][0]
    if kernels == "bf16":
        assert both[0]["plain ddp"] == first, "DDP reduces zeros then"


def test_fsdp2_is_refused() -> None:
    for found in results_of_two_ranks(__name__):
        assert "MixedPrecisionPolicy(reduce_dtype=torch.float32)" in found["fsdp2"]
