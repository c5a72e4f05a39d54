"""Operands have tensorwise scales from their amax in earlier steps.

Kernels are emulated here; some of these tests run on a GPU, too.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lokakern
from lokakern.bench.models.throughput import aside
from lokakern.conversion.convert import Conversion
from lokakern.distributed.fsdp2_gather import Gathering
from lokakern.errors import FormatError, ShapeError, UnknownNameError, UnsupportedError
from lokakern.types import Granularity
from tests.support.routed_layers import passed, same
from tests.support.two_ranks import results_of_two_ranks

SEEDS = (0,)
K, N, M = 64, 48, 32
MAX = 448.0
WHERE = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
where_there_is = pytest.mark.parametrize("where", WHERE)


def batch(seed: int, m: int = M, k: int = K) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer_of(n: int = N, where: str = "cpu", **options: Any) -> tuple[nn.Linear, Conversion]:
    torch.manual_seed(0)
    layer = nn.Linear(K, n).bfloat16().to(where)
    options = {"kernels": "tensor", "scaling": "delayed", **options}
    return layer, lokakern.convert(layer, **options)


def model_of(where: str = "cpu", **options: Any) -> tuple[nn.Sequential, Conversion]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 32)).bfloat16().to(where)
    options = {"kernels": "tensor", "scaling": "delayed", **options}
    return model, lokakern.convert(model, **options)


def scales_of(handle: Conversion, site: str = "") -> list[float]:
    return list(handle.delayed_scaling.scales[site].values())


# --- scales


@where_there_is
def test_the_same_operands_give_the_bits_of_dynamic_scaling(where: str) -> None:
    """At first because scales are dynamic, and then because the amax is that of the step before.

    Quantizers get slices of scales and amax that start every 4 bytes.
    """
    layer, handle = layer_of(where=where)
    dynamic, _ = layer_of(where=where, scaling="dynamic")
    given = batch(1).to(where), batch(2, k=N).to(where)
    expected = passed(dynamic, *given)
    for _ in range(5):  # warm calls are replayed
        assert same(passed(layer, *given), expected)
        handle.delayed_scaling.update()
    scales = scales_of(handle)
    operands = (given[0], layer.weight, given[1])
    for scale, x in zip(scales, operands, strict=True):
        most = x.detach().float().abs().max()
        assert scale == (most / torch.tensor(MAX, device=where)).item()
    assert handle.delayed_scaling.products == ["/output", "/grad_input", "/grad_weight"]
    assert handle.delayed_scaling.left == []


@pytest.mark.parametrize(
    ("gemm", "operands"),
    [
        ("output", ("input", "weight")),
        ("grad_input", ("weight", "grad_output")),
        ("grad_weight", ("input", "grad_output")),
    ],
)
def test_each_product_alone_records_its_operands(gemm: str, operands: tuple[str, ...]) -> None:
    layer, handle = layer_of(kernels={gemm: "tensor"})
    of = {"input": batch(1), "weight": layer.weight.detach(), "grad_output": batch(2, k=N)}
    for _ in range(2):  # dynamic, then delayed
        passed(layer, of["input"], of["grad_output"])
        handle.delayed_scaling.update()
        scales = handle.delayed_scaling.scales[""]
        assert tuple(scales) == operands
        for name, scale in scales.items():
            expected = of[name].float().abs().max().item() / MAX
            assert scale == pytest.approx(expected, rel=1e-6)


def test_products_have_the_scales_of_the_history() -> None:
    """Larger elements saturate; the step is as with static scales of `lokakern.quantize`."""
    layer, handle = layer_of(history=2, margin=0)
    passed(layer, batch(1), batch(2, k=N))
    handle.delayed_scaling.update()
    s_x, s_w, s_g = scales_of(handle)
    x, g = 3 * batch(3), 5 * batch(4, k=N)
    y, dx, dw, _ = passed(layer, x, g)

    def rounded(operand: Tensor, scale: float) -> Tensor:
        made = lokakern.quantize(operand, Granularity.TENSOR, scale=torch.tensor([scale]))
        return lokakern.dequantize(made, "float32")

    q_x, q_w, q_g = (
        rounded(operand.detach(), scale)
        for operand, scale in ((x, s_x), (layer.weight, s_w), (g, s_g))
    )
    assert q_x.abs().max().item() == pytest.approx(MAX * s_x)
    assert x.abs().max() > q_x.abs().max()
    for found, exact in (
        (y, q_x @ q_w.t() + layer.bias.float()), (dx, q_g @ q_w), (dw, q_g.t() @ q_x)
    ):  # fmt: skip
        torch.testing.assert_close(found, exact.bfloat16(), rtol=2**-7, atol=1e-6)


def test_a_history_holds_the_largest_amax_of_its_steps() -> None:
    layer, handle = layer_of(history=3, margin=1)
    largest = []
    for step, size in enumerate((1.0, 8.0, 2.0, 0.5, 0.25, 0.125)):
        x = size * batch(step)
        passed(layer, x, batch(9, k=N))
        passed(layer, x / 2, batch(9, k=N))  # the largest of all calls of a step
        handle.delayed_scaling.update()
        largest.append(x.float().abs().max().item())
        expected = 2 * max(largest[-3:]) / MAX
        assert scales_of(handle)[0] == pytest.approx(expected, rel=1e-6)


def test_zeros_and_steps_without_a_call_keep_the_scale() -> None:
    layer, handle = layer_of(history=1)
    passed(layer, batch(1), batch(2, k=N))
    handle.delayed_scaling.update()
    before = scales_of(handle)
    passed(layer, torch.zeros_like(batch(1)), batch(2, k=N))
    handle.delayed_scaling.update()
    assert scales_of(handle) == before
    handle.delayed_scaling.update()
    assert scales_of(handle) == before


@where_there_is
def test_non_finite_elements_are_no_amax(where: str) -> None:
    layer, handle = layer_of(where=where)
    x = batch(1).to(where)
    most = x.float().abs().max().item()
    for value in (float("nan"), float("inf"), float("-inf")):
        for _ in range(2):  # dynamic, then delayed
            bad = x.clone()
            bad[3, 5] = value
            y = layer(bad)
            y.backward(batch(2, k=N).to(where))
            assert y[3].isnan().all()
            assert y[:3].isfinite().all()
            handle.delayed_scaling.update()
            assert scales_of(handle)[0] == pytest.approx(most / MAX, rel=1e-6)


def test_an_operand_that_comes_later_begins_with_a_dynamic_scale() -> None:
    """As of a layer that is not called at first, or not yet differentiated."""
    layer, handle = layer_of()
    layer(batch(1))  # no backward pass
    handle.delayed_scaling.update()
    assert list(handle.delayed_scaling.scales[""]) == ["input", "weight"]
    tiny = 1e-6 * batch(2, k=N)  # nothing is left of it at a scale of 1
    _, dx, *_ = passed(layer, batch(1), tiny)
    exact = tiny.float() @ layer.weight.float()
    assert (dx.float() - exact).norm() < 0.1 * exact.norm()
    handle.delayed_scaling.update()
    assert scales_of(handle)[2] == pytest.approx(tiny.float().abs().max().item() / MAX, rel=1e-6)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_an_operand_without_an_amax_stays_dynamic(value: float) -> None:
    """As gradients behind a weight of zeros, or of a step whose gradients all overflow."""
    layer, handle = layer_of()
    for _ in range(2):
        passed(layer, batch(1), torch.full((M, N), value).bfloat16())
        handle.delayed_scaling.update()
        assert list(handle.delayed_scaling.scales[""]) == ["input", "weight"]
    tiny = 1e-6 * batch(2, k=N)  # nothing is left of it at a scale of 1
    _, dx, *_ = passed(layer, batch(1), tiny)
    exact = tiny.float() @ layer.weight.float()
    assert (dx.float() - exact).norm() < 0.1 * exact.norm()
    handle.delayed_scaling.update()
    assert scales_of(handle)[2] == pytest.approx(tiny.float().abs().max().item() / MAX, rel=1e-6)


def test_evaluation_is_dynamic_and_leaves_the_history() -> None:
    layer, handle = layer_of()
    dynamic, _ = layer_of(scaling="dynamic")
    passed(layer, batch(1), batch(2, k=N))
    handle.delayed_scaling.update()
    before = scales_of(handle)
    with torch.no_grad():
        assert torch.equal(layer(100 * batch(3)), dynamic(100 * batch(3)))
    handle.delayed_scaling.update()
    assert scales_of(handle) == before


@where_there_is
@pytest.mark.parametrize("m", [M, 17])
def test_float32_weights_under_autocast(m: int, where: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(K, N, device=where), nn.Linear(K, N, device=where)]
    layers[1].load_state_dict(layers[0].state_dict())
    handle = lokakern.convert(layers[0], kernels="tensor", scaling="delayed")
    lokakern.convert(layers[1], kernels="tensor")
    for _ in range(2):
        given = batch(1, m).to(where), batch(2, m, N).to(where)
        with torch.autocast(where, torch.bfloat16):
            found, expected = (passed(x, *given) for x in layers)
        assert same(found, expected)
        handle.delayed_scaling.update()


def test_other_products_stay_as_they_are() -> None:
    """Of other scales, in bfloat16, and of no rows."""
    kernels = {"output": "tensor", "grad_weight": "1x128"}
    layer, handle = layer_of(kernels=kernels)
    dynamic, _ = layer_of(kernels=kernels, scaling="dynamic")
    assert handle.delayed_scaling.products == ["/output"]
    assert handle.delayed_scaling.left == ["/grad_weight"]
    assert "1 by delayed scaling" in repr(handle)
    for _ in range(2):
        given = batch(1), batch(2, k=N)
        assert same(passed(layer, *given), passed(dynamic, *given))
        passed(layer, batch(1, 0), batch(2, 0, N))
        handle.delayed_scaling.update()
    assert list(handle.delayed_scaling.scales[""]) == ["input", "weight"]


# --- in compiled code, with main gradients, checks


@where_there_is
@pytest.mark.parametrize("main_grads", [False, True])
def test_one_graph_serves_all_steps(main_grads: bool, where: str) -> None:
    results = []
    for is_compiled in (False, True):
        model, handle = model_of(where, main_grads=main_grads)
        torch._dynamo.reset()
        counters.clear()
        call: Any = torch.compile(model, fullgraph=True) if is_compiled else model
        for step in range(4):
            call((1 + step) * batch(step).to(where)).float().square().sum().backward()
            handle.delayed_scaling.update()
        weight: Any = model[0].weight
        assert (weight.grad is None) is main_grads
        results.append(
            (handle.delayed_scaling.scales, weight.main_grad if main_grads else weight.grad)
        )
        assert counters["stats"]["unique_graphs"] == int(is_compiled)
    (eager, a), (compiled, b) = results
    # Inductor rounds less between layers, and the GPU's fuses more.
    apart = 0.01 if where == "cpu" else 0.03
    assert (a.float() - b.float()).norm() < apart * a.float().norm()
    for site, scales in eager.items():
        assert len(scales) == 3
        for operand, scale in scales.items():
            assert compiled[site][operand] == pytest.approx(scale, rel=apart)


@where_there_is
def test_main_gradients_are_products_of_the_delayed_operands(where: str) -> None:
    layer, handle = layer_of(where=where, main_grads=True)
    other, its = layer_of(where=where)
    for seed in range(3):
        given = 2**seed * batch(seed).to(where), batch(9, k=N).to(where)
        layer.weight.main_grad.zero_()  # type: ignore[union-attr, operator]
        passed(layer, *given)
        expected = passed(other, *given)[2]
        found: Any = layer.weight
        apart = (found.main_grad - expected.float()).norm() / expected.float().norm()
        assert apart < 0.004, "bfloat16 rounds by 0.2 %"
        assert not torch.equal(found.main_grad, expected.float()), "nothing is rounded"
        for x in (handle, its):
            x.delayed_scaling.update()
    assert scales_of(handle) == scales_of(its)


@pytest.mark.gpu
@pytest.mark.parametrize("holds_update", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_cuda_graph_of_a_step_advances_the_history(is_compiled: bool, holds_update: bool) -> None:
    model, handle = model_of("cuda", history=3)
    call: Any = torch.compile(model, fullgraph=True) if is_compiled else model
    x = batch(0).cuda()

    def step(with_update: bool = True) -> None:
        call(x).float().square().sum().backward()
        if with_update:
            handle.delayed_scaling.update()

    with aside(True):
        for _ in range(3):
            step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(holds_update)
    largest = []
    for seed, size in enumerate((1.0, 8.0, 2.0, 0.5, 0.25, 0.125)):
        x.copy_(size * batch(seed))
        graph.replay()
        if not holds_update:
            handle.delayed_scaling.update()
        largest.append(x.float().abs().max().item())
        before = [batch(0).float().abs().max().item()] * 3
        expected = max([*before, *largest][-3:]) / MAX
        assert scales_of(handle, "0")[0] == pytest.approx(expected, rel=1e-6)


class _Calls(TorchDispatchMode):
    """Operators that run, with their arguments but tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        self.found.append((func, [x for x in given if not isinstance(x, Tensor)]))
        return func(*args, **kwargs or {})


def test_each_update_is_the_same_to_a_cuda_graph() -> None:
    layer, handle = layer_of(history=3)
    passed(layer, batch(1), batch(2, k=N))
    handle.delayed_scaling.update()
    found = []
    for _ in range(3):
        with _Calls() as calls:
            handle.delayed_scaling.update()
        found.append(calls.found)
    assert found[0] and found[0] == found[1] == found[2]
    kept = handle.delayed_scaling._amax
    handle.delayed_scaling.load_state_dict(handle.delayed_scaling.state_dict())
    assert handle.delayed_scaling._amax is kept, "a graph knows its address"


def test_a_check_sees_what_saturates() -> None:
    layer, handle = layer_of(check="1:32")
    errors = []
    for size in (1.0, 1.0, 32.0):
        passed(layer, size * batch(1), batch(2, k=N))
        handle.delayed_scaling.update()
        errors.append({row["site"]: row["row_err"] for row in handle.checks}["/output"])
    assert errors[0] < 0.06
    assert errors[2] > 4 * errors[0]


# --- the life of a conversion


def test_training_goes_on_from_a_state_dict() -> None:
    def trained(model: nn.Module, handle: Conversion, steps: range) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in steps:
            y = model((1 + step % 3) * batch(step))
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.delayed_scaling.update()
        return y

    model, handle = model_of(history=4)
    trained(model, handle, range(6))
    file = io.BytesIO()
    torch.save((model.state_dict(), handle.delayed_scaling.state_dict()), file)
    expected = trained(model, handle, range(6, 9))
    file.seek(0)
    saved, scaling = torch.load(file)  # with weights_only
    assert list(saved) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    other, its = model_of(history=4)
    other.load_state_dict(saved)
    its.delayed_scaling.load_state_dict(scaling)
    assert torch.equal(trained(other, its, range(6, 9)), expected)
    dynamic, of_dynamic = model_of(history=4)
    dynamic.load_state_dict(saved)
    assert not torch.equal(trained(dynamic, of_dynamic, range(6, 9)), expected)


def test_a_state_of_other_layers_or_lengths_is_refused() -> None:
    _, handle = model_of(history=4)
    state = handle.delayed_scaling.state_dict()
    handle.delayed_scaling.load_state_dict(state)  # of no step yet
    for other in (model_of(history=3)[1], layer_of(history=4)[1]):
        with pytest.raises(FormatError, match="the same arguments"):
            other.delayed_scaling.load_state_dict(state)
    with pytest.raises(FormatError, match="'2' is missing"):
        handle.delayed_scaling.load_state_dict({"0": state["0"]})


def test_undo_and_a_newer_conversion_have_dynamic_scales() -> None:
    layer, handle = layer_of()
    passed(layer, batch(1), batch(2, k=N))
    handle.delayed_scaling.update()
    newer = lokakern.convert(layer, kernels="tensor")
    dynamic, _ = layer_of(scaling="dynamic")
    given = 50 * batch(3), batch(4, k=N)
    assert same(passed(layer, *given), passed(dynamic, *given))
    newer.undo()
    assert not same(passed(layer, *given), passed(dynamic, *given))
    handle.refresh(kernels={"output": "row"})
    assert handle.delayed_scaling.products == []
    handle.refresh(kernels="tensor")
    assert len(handle.delayed_scaling.products) == 3
    handle.undo()
    assert type(layer) is nn.Linear
    assert not [name for name in vars(layer) if "delayed" in name]
    older = lokakern.convert(layer, kernels="tensor")
    lokakern.convert(layer, kernels="tensor", scaling="delayed").undo()
    state: Any = layer
    assert state.delayed is None
    assert same(passed(layer, *given), passed(dynamic, *given))
    older.undo()


def test_copies_and_files_have_dynamic_scales() -> None:
    layer, handle = layer_of()
    passed(layer, batch(1), batch(2, k=N))
    handle.delayed_scaling.update()
    dynamic, _ = layer_of(scaling="dynamic")
    given = 50 * batch(3), batch(4, k=N)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert same(passed(other, *given), passed(dynamic, *given))


def test_a_model_may_get_its_memory_after_it_was_converted() -> None:
    layer = nn.Linear(K, N, device="meta").bfloat16()
    handle = lokakern.convert(layer, kernels="tensor", scaling="delayed", device="NVIDIA H200")
    layer.to_empty(device="cpu")
    layer.load_state_dict(nn.Linear(K, N).state_dict())
    for _ in range(2):
        assert passed(layer, batch(1), batch(2, k=N))[0].any()
        handle.delayed_scaling.update()
        assert scales_of(handle)[0] == pytest.approx(batch(1).float().abs().max().item() / MAX)


def test_mistakes_are_errors() -> None:
    for options, error, words in (
        ({"scaling": "static"}, UnknownNameError, "expected 'dynamic' or 'delayed'"),
        ({"history": 0}, ShapeError, "history is 0"),
        ({"history": 2.0}, ShapeError, "history is 2.0"),
        ({"margin": -1}, ShapeError, "margin is -1"),
        ({"inference": True}, FormatError, "delayed scaling is for training"),
    ):
        with pytest.raises(error, match=words):
            layer_of(**options)
    _, handle = layer_of()
    with pytest.raises(UnsupportedError, match="delayed scaling"):
        handle.watch(budget=0.06)
    with pytest.raises(UnsupportedError, match="delayed scaling"):
        handle.tune(lambda: None)
    handle.undo()
    with pytest.raises(UnsupportedError, match="was undone"):
        handle.delayed_scaling  # noqa: B018


def test_the_op_is_as_torch_wants_ops() -> None:
    layer, _ = layer_of()
    route = layer._routes[0]  # type: ignore[operator, index]
    given = (batch(1), layer.weight.detach().t(), None, torch.ones(3), torch.zeros(2), route, 0)
    torch.library.opcheck(torch.ops.lokakern.delayed_gemm.default, given)


# --- two ranks


def one_of_two_ranks(rank: int) -> dict[str, Any]:
    """Scales after a step on other samples, under DDP and FSDP2."""
    found: dict[str, Any] = {}
    for kind in ("ddp", "fsdp2"):
        model, handle = model_of()
        if kind == "ddp":
            call: nn.Module = nn.parallel.DistributedDataParallel(model)
        else:
            call = fully_shard(model)
            with pytest.raises(UnknownNameError) as error:
                Gathering(model)
            found["gathering"] = str(error.value)
        call((1 + 3 * rank) * batch(1)).float().square().sum().backward()
        handle.delayed_scaling.update()
        found[kind] = handle.delayed_scaling.scales
    return found


def test_ranks_have_the_scales_of_the_largest_amax() -> None:
    first, second = results_of_two_ranks(__name__)
    assert first == second
    for kind in ("ddp", "fsdp2"):
        scale = first[kind]["0"]["input"]
        assert scale == pytest.approx(4 * batch(1).float().abs().max().item() / MAX)
    assert "scaling='delayed'" in first["gathering"]
