"""Converted layers multiply by the current weight, however it was written.

Kernels of an H200 are emulated here.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lokakern import convert
from lokakern.conversion.convert import Conversion
from lokakern.mods.together import FusedLinear
from lokakern.nn import linear, routed_matmul
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import PLAIN
from tests.support.routed_layers import BY_ROW, ROUTES, K, N, layer_of, passed, plain_of, rows, same

SEEDS = (0,)


def converted(dtype: torch.dtype = torch.bfloat16, inference: bool = False) -> tuple[
    nn.Sequential, Conversion
]:  # fmt: skip
    """Two layers, the second of which reads what requires a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, 32), nn.ReLU(), nn.Linear(32, N)).to(dtype)
    handle = convert(model, 0.0, inference=inference)
    for site in handle.sites.values():
        layer = site.module
        assert isinstance(layer, Linear)
        layer.take_routes(ROUTES, layer.weight)
        if inference:
            layer.freeze()
    return model, handle


def fresh(model: nn.Module, inference: bool = False) -> nn.Module:
    """The same weights in layers that never saw others."""
    dtype = next(model.parameters()).dtype
    other, handle = converted(dtype)
    other.load_state_dict(model.state_dict())
    for site in handle.sites.values() if inference else ():
        site.module.freeze()
    return other


def by_data(weight: Tensor) -> None:
    weight.data.mul_(-2.0)


def by_new_data(weight: Tensor) -> None:
    weight.data = torch.randn_like(weight)


def by_data_in_place_of_a_slice(weight: Tensor) -> None:
    weight.data[: len(weight) // 2].zero_()


def by_peft(weight: Tensor) -> None:
    """The weight is changed as by `merge_adapter`: ``base_layer.weight.data += delta``."""
    n, k = weight.shape
    a, b = torch.randn(4, k).to(weight.dtype), torch.randn(n, 4).to(weight.dtype)
    weight.data += 2.0 * (b @ a)


def by_optimizer(weight: Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()


def in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(3.0)


def past_autograd(weight: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(weight), torch.no_grad():
        weight.add_(1.0)


WRITES = [by_data, by_new_data, by_data_in_place_of_a_slice, by_peft, by_optimizer, in_place,
          past_autograd]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_every_kind_of_weight_update_takes_effect(
    write: Callable[[Tensor], None], dtype: torch.dtype
) -> None:
    """The input gradient reads the new weight too, as the first layer's gradient shows."""
    model, _ = converted(dtype)
    x, gradient = rows().to(dtype), rows(k=N, seed=2)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
        before = passed(model, x, gradient)
        for place in (0, 2):
            layer = model[place]
            assert isinstance(layer, Linear)
            write(layer.weight)
            layer.weight.grad = None
        found = passed(model, x, gradient)
        assert same(found, passed(fresh(model), x, gradient))
        assert not torch.equal(found[0], before[0]) and not torch.equal(found[1], before[1])
        with torch.no_grad():
            assert torch.equal(model(x), found[0])


def test_manual_updates_train_as_with_linear() -> None:
    losses = []
    for routes in ((PLAIN,) * 3, ROUTES):
        layer, found = layer_of(routes), []  # type: ignore[arg-type]
        for _ in range(6):
            loss = layer(rows()).float().square().mean()
            loss.backward()
            found.append(loss.item())
            for p in layer.parameters():
                assert p.grad is not None
                p.data.sub_(p.grad, alpha=5.0)
                p.grad = None
        losses.append(torch.tensor(found))
    assert losses[0][-1] < 0.5 * losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0.0)


def test_a_merged_adapter_takes_effect() -> None:
    """A low-rank branch beside a converted layer; merged, as peft does, the sum is the same."""
    layer = layer_of()
    torch.manual_seed(3)
    a, b = torch.randn(4, K).bfloat16(), torch.randn(N, 4).bfloat16()
    apart = (layer(rows()) + rows() @ a.t() @ b.t()).detach()
    alone = layer(rows()).detach()
    layer.weight.data += b @ a
    merged = layer(rows()).detach()
    error = (merged - apart).float().norm() / apart.float().norm()
    assert error < 0.06 < (alone - apart).float().norm() / apart.float().norm()


def test_weight_updates_between_forward_and_backward_act_as_with_linear() -> None:
    """A write that autograd sees is refused where it refuses nn.Linear's."""
    for call in (layer_of(), nn.Linear(K, N).bfloat16()):
        x = rows().requires_grad_()
        y = call(x)
        with torch.no_grad():
            call.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# ---- kept on purpose ----


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Shapes of weights that were quantized ahead of kernels."""
    found: list[str] = []
    original = routed_matmul.quantize_weight

    def count(weight: Tensor, scales: str) -> tuple[Tensor, Tensor]:
        found.append("x".join(map(str, weight.shape)))
        return original(weight, scales)

    monkeypatch.setattr(routed_matmul, "quantize_weight", count)
    monkeypatch.setattr(linear, "quantize_weight", count)
    yield found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_micro_batches_of_a_step_share_weights_in_fp8(
    quantized: list[str], dtype: torch.dtype
) -> None:
    model, handle = converted(dtype)
    x, gradient = rows().to(dtype), rows(k=N, seed=2)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
        for _ in range(2):  # steps
            expected = passed(model, x, gradient)
            quantized.clear()
            with handle.weights_unchanged():
                for _ in range(4):
                    assert same(passed(model, x, gradient), expected)
            assert sorted(quantized) == sorted([f"32x{K}", f"{K}x32", f"{N}x32", f"32x{N}"])
            for p in model.parameters():
                p.data.mul_(1.5)


def test_only_needed_fp8_weights_are_kept(quantized: list[str]) -> None:
    model, handle = converted()
    with handle.weights_unchanged():
        with torch.no_grad():
            model(rows())
        assert sorted(quantized) == [f"32x{K}", f"{N}x32"]  # no gradient of an input
        model(rows()).sum().backward()
        assert sorted(quantized) == sorted([f"32x{K}", f"32x{N}", f"{N}x32"])  # nor of the model's
        model(rows(8)).sum().backward()
    quantized.clear()
    with handle.weights_unchanged():
        model(rows(8)).sum().backward()  # where no kernel quantizes
    assert quantized == []


def test_weights_are_freed_after_the_block_and_backward_may_follow() -> None:
    model, handle = converted()
    x, gradient = rows(), rows(k=N, seed=2)
    expected = passed(model, x, gradient)
    leaf = x.clone().requires_grad_()
    with pytest.raises(KeyError), handle.weights_unchanged():
        y = model(leaf)
        raise KeyError
    y.backward(gradient)
    assert leaf.grad is not None and torch.equal(leaf.grad, expected[1])
    model.zero_grad()
    with handle.weights_unchanged():
        with handle.weights_unchanged():
            model(x)
        model[0].weight.data.zero_()  # against the promise: not seen
        assert torch.equal(model(x), expected[0])
        copied = copy.deepcopy(model)
        assert same(passed(copied, x, gradient), passed(fresh(model), x, gradient))
    assert same(passed(model, x, gradient), passed(fresh(model), x, gradient))
    with handle.weights_unchanged():
        model(x)
        handle.undo()
    assert all(type(m) is not Linear and "_kept" not in vars(m) for m in model.modules())


def test_a_refresh_inside_the_block_quantizes_again() -> None:
    model, handle = converted()
    layer = model[0]
    assert isinstance(layer, Linear)
    with handle.weights_unchanged():
        model(rows())
        layer.weight.data.mul_(2.0)
        layer.take_routes(ROUTES, layer.weight)
        assert torch.equal(model(rows()), fresh(model)(rows()))
        with handle.weights_unchanged():
            layer.weight.data.mul_(2.0)
            layer.take_routes(ROUTES, layer.weight)
        assert torch.equal(model(rows()), fresh(model)(rows()))
    assert "_kept" not in vars(layer)


def test_fused_layers_share_fp8_weights(quantized: list[str]) -> None:
    torch.manual_seed(0)
    fused = FusedLinear([nn.Linear(K, 24, dtype=torch.bfloat16) for _ in range(2)])
    model = nn.Sequential(fused)
    handle = convert(model, 0.0)
    fused.take_routes((BY_ROW, BY_ROW, PLAIN), None)
    x = rows().requires_grad_()
    expected = model(x)
    with handle.weights_unchanged():
        for _ in range(3):
            y = model(x)
            assert all(torch.equal(a, b) for a, b in zip(y, expected, strict=True))
            sum(part.sum() for part in y).backward()  # type: ignore[union-attr]
    assert sorted(quantized) == [f"48x{K}", f"{K}x48"]
    fused.parts[0].weight.data.mul_(2.0)
    assert not torch.equal(model(x)[0], expected[0])


def test_a_compiled_graph_keeps_no_weights_and_is_not_recompiled() -> None:
    torch._dynamo.reset()
    model, handle = converted()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        with handle.weights_unchanged():
            assert torch.equal(compiled(rows()), model(rows()))
        for write in (by_data, past_autograd):
            write(model[0].weight)
            assert torch.equal(compiled(rows()), fresh(model)(rows()))
    assert counter.frame_count == 1


# ---- copies ----


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def moved(model: nn.Module) -> nn.Module:
    return model.to("cpu", torch.float32).to(torch.bfloat16)


def shared(model: nn.Module) -> nn.Module:
    return model.share_memory()  # type: ignore[no-any-return, no-untyped-call]


def assigned(model: nn.Module) -> nn.Module:
    other = {name: 2.0 * p.detach() for name, p in model.state_dict().items()}
    model.load_state_dict(other, assign=True)
    return model


def loaded(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: 2.0 * p.detach() for name, p in model.state_dict().items()})
    return model


def test_fp8_weights_of_an_earlier_version_are_laid_out_when_they_are_loaded() -> None:
    layer = layer_of((BY_ROW, PLAIN, PLAIN), k=1000)
    layer.freeze()
    layer.keep_chain_weight("any", "row")
    layer.keep_chain_weight("any", "tensor")
    x = rows(k=1000)
    with torch.no_grad():
        expected = layer(x)
    weights = [layer.chain_weight(scales)[0].clone() for scales in ("row", "tensor")]
    layer.fp8_data = layer.fp8_data[:, :1008].contiguous()  # the pitch before that of cache lines
    layer.chain_data_tensor = weights[1].view(N, -1)[:, :1008].flatten()
    again = saved(layer)
    assert again.fp8_data.shape == (N, 1024)
    for scales, weight in zip(("row", "tensor"), weights, strict=True):
        data = again.chain_weight(scales)[0]
        assert torch.equal(data.view(N, 1024)[:, :1000], weight.view(N, 1024)[:, :1000])
    with torch.no_grad():
        assert torch.equal(again(x), expected)


COPIES = [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved, moved, shared, assigned,
          loaded]  # fmt: skip
NAMES = ["deepcopy", "pickle", "save", "to", "share_memory", "assign", "load_state_dict"]


@pytest.mark.parametrize("copied", COPIES, ids=NAMES)
def test_copied_moved_and_loaded_layers_use_their_own_weight(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    model, _ = converted()
    x, gradient = rows(), rows(k=N, seed=2)
    passed(model, x, gradient)
    other = copied(model)
    for write in (None, by_data, in_place):
        if write is not None:
            write(other[0].weight)  # type: ignore[index]
        found = passed(other, x, gradient)
        assert same(found, passed(fresh(other), x, gradient))
        for place in (0, 2):  # FP8 it is
            plain = plain_of(other[place])  # type: ignore[index]
            inside = x if place == 0 else other[1](other[0](x)).detach()  # type: ignore[index]
            assert not torch.equal(other[place](inside), plain(inside))  # type: ignore[index]


@pytest.mark.parametrize("copied", COPIES, ids=NAMES)
def test_frozen_layers_keep_their_weight_until_it_is_loaded(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    model, _ = converted(inference=True)
    with torch.no_grad():
        expected = model(rows())
        other = copied(model)
        if copied in (assigned, loaded):
            expected = fresh(other, inference=True)(rows())
        assert torch.equal(other(rows()), expected)
        for layer in (other[0], other[2]):  # type: ignore[index]
            assert layer.is_frozen and "fp8_data" in dict(layer.named_buffers())
            layer.weight.data.zero_()
        assert torch.equal(other(rows()), expected)  # its weight is what it was
        assert torch.equal(loaded(other)(rows()), fresh(other, inference=True)(rows()))
        assert torch.equal(assigned(other)(rows()), fresh(other, inference=True)(rows()))


def test_a_copy_shares_nothing_with_the_original() -> None:
    for inference in (False, True):
        model, _ = converted(inference=inference)
        with torch.no_grad():
            other = copy.deepcopy(model)
            other.load_state_dict({n: 3.0 * p for n, p in other.state_dict().items()})
            assert torch.equal(other(rows()), fresh(other, inference)(rows()))
            assert torch.equal(model(rows()), fresh(model, inference)(rows()))


@pytest.mark.rest
def test_the_measuring_script_runs_without_a_gpu() -> None:
    script = Path(__file__).parents[2] / "scripts" / "measure_weight_quantizing.py"
    done = subprocess.run(
        [sys.executable, str(script), "--device", "cpu", "--tiny"],
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["weight"] for row in rows] == ["bfloat16", "float32"]
    assert all(list(row["host_us"]) == ["linear", "each", "kept"] for row in rows)
