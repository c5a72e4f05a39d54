"""Weights gathered as FP8 under FSDP2, on one rank; on two: test_communication.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint

from lokakern import convert, numerics
from lokakern.distributed.fsdp2_gather import Gathering
from lokakern.errors import UnknownNameError, UnsupportedError
from lokakern.nn.linear import Linear
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.routed_matmul import in_dtype
from lokakern.types import Format, Granularity

SEEDS = (0,)
ONE_SCALE = "tensor;16:0=,16=cuda.quantize_tensor+cuda.scaled_gemm_tensor;1:0="
BY_ROW = "row;16:0=cuda.quantize_row+cuda.scaled_gemm_row;1:0="
N, K = 24, 32


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layer_of(output: str = ONE_SCALE, to_input: str = ONE_SCALE, k: int = K) -> Linear:
    torch.manual_seed(0)
    layer = Linear(k, N, bias=False, dtype=torch.bfloat16)
    layer.take_routes((output, to_input, ""), layer.weight)
    return layer


def sharded(module: nn.Module, **options: object) -> nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)), **options)  # type: ignore[arg-type]
    return module


def rows(m: int = 48, k: int = K) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(1)).bfloat16()


def meant(weight: Tensor) -> Tensor:
    """Weight after quantization and dequantization, float32."""
    return numerics.dequantize(numerics.quantize(weight, Format.E4M3FN, Granularity.TENSOR))


def local(layer: nn.Module) -> Tensor:
    return layer.weight.to_local()  # type: ignore[operator, union-attr, no-any-return]


def test_unquantized_products_read_the_dequantized_weight() -> None:
    """Few rows, and an input's gradient without a route."""
    layer = layer_of(to_input="")
    weight = layer.weight.detach().clone()
    plain = meant(weight).bfloat16()
    sharded(layer)
    Gathering(layer)
    x = rows(8).requires_grad_()
    y = layer(x)
    assert torch.equal(y, x @ plain.t())
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(y) @ plain)  # type: ignore[arg-type]
    assert layer.weight.grad.shape == (N, K)  # type: ignore[union-attr]
    assert torch.equal(local(layer), weight)  # nothing was rounded where it is kept


@pytest.mark.parametrize(
    ("k", "options"),
    [
        (K, {"reshard_after_forward": False}),
        (K, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        (27, {}),
    ],
    ids=str,
)
def test_a_gathered_layer_computes_like_an_unsharded_one(
    k: int, options: dict[str, object]
) -> None:
    results = []
    for is_gathered in (False, True):
        layer = layer_of(k=k)
        with torch.no_grad():
            layer.weight[3] = 0.0
        if is_gathered:
            sharded(layer, **options)
            Gathering(layer)
        found = []
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        for _ in range(3):
            x = rows(k=k).requires_grad_()
            y = layer(x)
            y.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():  # of the new weights
                found += [y.detach(), x.grad, layer(x)]
        results.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_policy_rounds_weights_once_before_they_are_quantized(half: torch.dtype) -> None:
    layer = layer_of(to_input="").float()
    layer.take_routes((in_dtype(ONE_SCALE, half), "", ""), layer.weight)
    with torch.no_grad():  # as each FP8 number has its ties
        layer.weight.copy_(1.0 + torch.rand(N, K) / 8)
    expected = meant(layer.weight.detach().to(half)).to(half)
    sharded(layer, mp_policy=MixedPrecisionPolicy(param_dtype=half))
    Gathering(layer)
    x = rows(8).to(half)  # few, which read the dequantized weight
    assert torch.equal(layer(x), x @ expected.t())


@pytest.mark.parametrize("value", [0.0, 1e30, float("nan"), float("inf")])
def test_weights_of_any_magnitude_are_gathered(value: float) -> None:
    expected, layer = layer_of(), layer_of()
    for one in (expected, layer):
        with torch.no_grad():
            if value == 0.0:
                one.weight.zero_()
            one.weight[2, 5] = value
    sharded(layer)
    Gathering(layer)
    assert torch.equal(layer(rows()).nan_to_num(7.0), expected(rows()).nan_to_num(7.0))


@pytest.mark.parametrize("has_backward", [False, True])
@pytest.mark.parametrize("write", ["data", "local"])
def test_writes_that_bypass_fsdp_reach_the_next_forward_pass(
    write: str, has_backward: bool
) -> None:
    layer = sharded(layer_of())
    Gathering(layer)
    y = layer(rows())
    if has_backward:
        y.sum().backward()
    layer.reshard()
    with torch.no_grad():
        written = layer.weight.data if write == "data" else local(layer)
        written.mul_(8.0)  # exact, and so is the scale's
    assert torch.equal(layer(rows()), 8.0 * y)


def test_manual_updates_train_a_gathered_layer_like_an_optimizer() -> None:
    """Weights grow beyond the range of their previous scale."""
    losses = []
    for by_hand in (False, True):
        block = sharded(layer_of())
        model = sharded(nn.Sequential(block))  # reshards the block: backward gathers, too
        Gathering(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
        found = []
        for _ in range(6):
            loss = (model(rows()).float() - 3.0).square().mean()
            loss.backward()
            if by_hand:
                for p in model.parameters():
                    p.data.sub_(p.grad, alpha=4.0)  # type: ignore[arg-type]
            else:
                optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.8 * losses[0][0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_scales_are_found_once_in_a_pass(monkeypatch: pytest.MonkeyPatch, reentrant: bool) -> None:
    blocks = [sharded(layer_of(k=N)) for _ in range(3)]
    model = sharded(nn.Sequential(*blocks))
    Gathering(model)
    found: list[int] = []
    reduce = dist.all_reduce

    def counted(x: Tensor, *args: Any, **options: Any) -> Any:
        found.append(x.numel())
        return reduce(x, *args, **options)

    monkeypatch.setattr(dist, "all_reduce", counted)
    for number in range(1, 4):
        x = rows(k=N).requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        assert found == [3] * number


def test_layers_that_cannot_gather_are_named_with_the_reason() -> None:
    padded, by_row, plain = layer_of(), layer_of(BY_ROW), layer_of("", "")
    padded.padding = (8, 0)
    mixed, left = layer_of(ONE_SCALE, BY_ROW), layer_of()
    norm = LinearNormAct(K, N, dtype=torch.bfloat16)
    norm.take_routes((ONE_SCALE, "", ""), norm.weight)
    model = nn.Sequential(padded, by_row, plain, mixed, norm)
    sharded(model)
    gathering = Gathering(nn.Sequential(*model, left))
    assert list(gathering.layers) == ["4"]
    assert gathering.skipped == {
        "0": "mods.Pad adds zeros to its weight at each call",
        "1": "its output reads a weight with row scales",
        "2": "its output is not quantized",
        "3": "its input's gradient reads a weight with row scales",
        "5": "its weight is not sharded by fully_shard",
    }
    assert repr(gathering) == f"Gathering(1 weights, {N * K} bytes a gather, 5 left alone)"
    with pytest.raises(UnknownNameError, match=r"no layer of Linear has a weight to gather.*row s"):
        Gathering(by_row)


def test_a_model_that_was_called_already_is_refused() -> None:
    layer = sharded(layer_of())
    layer(rows())
    with pytest.raises(UnsupportedError, match="the model was called since fully_shard"):
        Gathering(layer)


def test_a_conversion_that_is_undone_leaves_layers_that_gather() -> None:
    """Their rows stay what FSDP2 asks for bytes: so must what answers."""
    block = nn.Sequential(nn.Linear(K, N, bias=False, dtype=torch.bfloat16))
    model = nn.Sequential(block)
    handle = convert(model, 0.0)
    weight = block[0].weight.detach().clone()
    block[0].take_routes((ONE_SCALE, ONE_SCALE, ""), block[0].weight)
    sharded(block)  # a root gathers once, a part of it anew at each call
    sharded(model)
    gathering = Gathering(model)
    model(rows())
    handle.undo()
    assert gathering.layers.keys() == {"0.0"}
    assert torch.equal(model(rows()), rows() @ meant(weight).bfloat16().t())


def test_gathering_keeps_no_hook_of_a_deleted_model() -> None:
    gc.collect()
    before = len(_global_optimizer_post_hooks)
    layer = sharded(layer_of())
    Gathering(layer)
    assert len(_global_optimizer_post_hooks) == before + 1
    del layer
    gc.collect()
    assert len(_global_optimizer_post_hooks) == before
