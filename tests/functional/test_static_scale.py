"""Static scales are computed once, for the weights as they are, and never written."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lokakern
from lokakern import norm
from lokakern.functional import static_scale
from lokakern.functional.run import run
from lokakern.registry.register import KERNELS
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher, misses
from lokakern.types import QuantizedTensor
from tests.support import native

M, N, K = 32, 128, 64


@pytest.fixture(autouse=True)
def empty_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "user.sqlite"))
    dispatcher.use_snapshot(load_snapshot([]))
    static_scale._KEPT.clear()
    torch._dynamo.reset()
    yield
    dispatcher.use_snapshot(None)
    misses._COUNTS.clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of each computation of a scale."""
    found: list[tuple[Any, ...]] = []
    compute = static_scale._bound_scale

    def noted(*given: Any) -> Tensor:
        found.append(given)
        return compute(*given)

    monkeypatch.setattr(static_scale, "_bound_scale", noted)
    return found


class Counter(TorchDispatchMode):
    """Counts torch's operators that are no views, in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def operators(call: Callable[[], Any]) -> list[str]:
    with Counter() as counter:
        call()
    return counter.names


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


X, W, Y = drawn(M, K, seed=1), drawn(N, K, seed=2), drawn(M, N, seed=3)
Q, QW = lokakern.quantize(X), lokakern.quantize(W).t()


def scale_of(found: Any) -> Tensor:
    assert isinstance(found, QuantizedTensor) and found.scale is not None
    return found.scale


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gemm_norm": lambda **options: lokakern.gemm_norm(Q, QW, **options),
    "norm_quantize": lambda **options: lokakern.norm_quantize(Y, **options),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("affine", [False, True])
def test_a_static_scale_costs_no_operator_that_a_tensor_does_not(name: str, affine: bool) -> None:
    call = FUNCTIONS[name]
    options: dict[str, Any] = {"norm": "layer"}
    if affine:
        options |= {"norm_weight": drawn(N, seed=4), "norm_bias": drawn(N, seed=5)}
    for given in ("static", 0.02):
        first = call(out_scale=given, **options)
        scale = scale_of(first).clone()
        for _ in range(3):
            assert scale_of(call(out_scale=given, **options)) is scale_of(first)
        ours = operators(lambda given=given: call(out_scale=given, **options))
        theirs = operators(lambda scale=scale: call(out_scale=scale, **options))
        # A caller's tensor is reshaped to [1, 1].
        assert ours and [n for n in ours if "view" not in n] == [
            n for n in theirs if "view" not in n
        ]
        again = call(out_scale=scale, **options)
        assert torch.equal(first.data.view(torch.uint8), again.data.view(torch.uint8))


def test_a_write_to_the_weight_makes_a_new_scale_and_leaves_results_alone(made: list[Any]) -> None:
    weight, shift = drawn(N, seed=4), drawn(N, seed=5)

    def call() -> Any:
        return lokakern.gemm_norm(
            Q, QW, norm="rms", norm_weight=weight, norm_bias=shift, out_scale="static"
        )

    for change in (lambda: weight.mul_(2.0), lambda: shift.fill_(50.0), lambda: None):
        first, before = call(), None
        before = scale_of(first).clone()
        call()
        count = len(made)
        change()
        second = call()
        wanted = norm.static_scale(norm.norm_named("rms"), N, second.format, weight, shift)
        assert float(scale_of(second)) == pytest.approx(wanted, rel=1e-6)
        assert torch.equal(scale_of(first), before)
        assert len(made) == count + (0 if torch.equal(scale_of(second), before) else 1)
    assert len(made) == 3


def in_memory_of(weight: Tensor) -> None:
    weight.data = weight.data * 2


def as_a_vector(weight: Tensor) -> None:
    torch.nn.utils.vector_to_parameters(2 * weight.detach().reshape(-1), [weight])


def by_a_fused_optimizer(weight: Tensor) -> None:
    weight.requires_grad_()
    weight.grad = -weight.detach()
    torch.optim.SGD([weight], lr=1.0, fused=True).step()


def by_data_while_trained(weight: Tensor) -> None:
    weight.requires_grad_()
    weight.data.mul_(2.0)


@pytest.mark.parametrize(
    "write", [in_memory_of, as_a_vector, by_a_fused_optimizer, by_data_while_trained]
)
@pytest.mark.parametrize("is_trained", [False, True])
def test_writes_without_a_new_version_are_followed(
    write: Callable[[Tensor], None], is_trained: bool
) -> None:
    weight = torch.nn.Parameter(torch.ones(N), requires_grad=is_trained)
    with torch.no_grad():
        before, after = (
            (write(weight) if again else None,
             float(scale_of(lokakern.norm_quantize(
                 Y, norm="layer", norm_weight=weight, out_scale="static"))))[1]
            for again in (False, True)
        )  # fmt: skip
    assert after == pytest.approx(2 * before)


def test_memory_that_comes_back_makes_no_old_scale_valid() -> None:
    """A freed address may be that of the next weight."""
    weight = torch.nn.Parameter(torch.ones(N), requires_grad=False)
    scales = []
    for factor in range(1, 6):
        weight.data = torch.full((N,), float(factor))
        gc.collect()
        found = lokakern.norm_quantize(Y, norm="rms", norm_weight=weight, out_scale="static")
        scales.append(float(scale_of(found)))
    assert scales == pytest.approx([x * scales[0] for x in range(1, 6)])


def test_weights_share_no_scale_even_at_one_address(made: list[Any]) -> None:
    for factor in range(1, 5):
        weight = torch.full((N,), float(factor)).bfloat16()  # the memory, and id, of the last one
        found = lokakern.norm_quantize(Y, norm="rms", norm_weight=weight, out_scale="static")
        assert float(scale_of(found)) == pytest.approx(factor * N**0.5 / 448)
        del weight, found
        gc.collect()
    assert len(made) == 4


def test_a_scale_that_a_caller_wrote_to_is_made_again(made: list[Any]) -> None:
    first = lokakern.norm_quantize(Y, norm="rms", out_scale="static")
    before = float(scale_of(first))
    scale_of(first).mul_(3.0)
    assert float(scale_of(lokakern.norm_quantize(Y, norm="rms", out_scale="static"))) == before
    assert len(made) == 2


def test_weights_of_inference_mode_have_no_kept_scale(made: list[Any]) -> None:
    with torch.inference_mode():
        weight = torch.ones(N).bfloat16()
        for factor in (1.0, 2.0):  # no version tells of this write
            weight.fill_(factor)
            found = lokakern.norm_quantize(Y, norm="rms", norm_weight=weight, out_scale="static")
            assert float(scale_of(found)) == pytest.approx(factor * N**0.5 / 448)
        kept = [lokakern.norm_quantize(Y, norm="rms", out_scale="static") for _ in range(2)]
    assert scale_of(kept[0]) is scale_of(kept[1]) and not scale_of(kept[0]).is_inference()
    assert len(made) == 3


def test_kept_scales_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_scale, "_MOST_SCALES", 3)
    for number in range(1, 9):
        lokakern.norm_quantize(Y, norm="rms", out_scale=float(number))
        assert len(static_scale._KEPT) <= 3


def test_a_scale_in_a_graph_is_kept_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay of a graph reads the memory of its capture."""
    device = torch.device("cpu")
    known = static_scale.number_scale(0.25, device)
    is_capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    fake = torch.device("cuda")  # nothing is allocated: `make` is given
    entry = static_scale._KEPT[(0.25, device)]
    static_scale._KEPT["of a graph"] = entry
    assert static_scale.kept("of a graph", fake, (), lambda: torch.ones(1, 1)) is known
    assert static_scale._OF_GRAPHS.pop(id(known)) is known
    # What a capture computes has no value yet.
    first = static_scale.kept("another", fake, (), lambda: torch.ones(1, 1))
    is_capturing = False
    assert static_scale.kept("another", fake, (), lambda: torch.ones(1, 1)) is not first


@pytest.mark.parametrize("value", [2.0**-126, 0.1, 3.0e38])
def test_the_copy_of_a_scale_has_all_bits(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronized: list[torch.device] = []
    stream = SimpleNamespace(synchronize=lambda: synchronized.append(torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    scale = torch.full((1, 1), value)
    copy = static_scale._in_memory_of_all_streams(scale)
    assert torch.equal(copy, scale) and copy.dtype is torch.float32 and copy.shape == (1, 1)
    assert synchronized and copy.data_ptr() != scale.data_ptr()


def test_calls_with_a_given_kernel_have_kept_scales(made: list[Any]) -> None:
    kernel = KERNELS["torch.norm_quantize"]
    found = [run(kernel, Y, norm="rms", out_scale="static") for _ in range(2)]
    assert scale_of(found[0]) is scale_of(found[1]) and len(made) == 1


def test_replayed_calls_follow_writes_to_the_weight() -> None:
    weight = drawn(N, seed=4)

    def call() -> Any:
        return lokakern.gemm_norm(Q, QW, norm="rms", norm_weight=weight, out_scale="static")

    with native.in_use() as library, torch.no_grad():
        for _ in range(2):
            for _ in range(4):
                found = call()
                wanted = norm.static_scale(norm.norm_named("rms"), N, found.format, weight)
                assert float(scale_of(found)) == pytest.approx(wanted, rel=1e-6)
            weight.mul_(2.0)
        assert library.size() > 0


# --- in code that Inductor generates


def chain(x: Tensor, weight: Tensor) -> Any:
    hidden = lokakern.gemm_norm(
        x, W.t(), norm="layer", norm_weight=weight, activation="relu", out_scale="static"
    )
    assert isinstance(hidden, QuantizedTensor)
    small = x[:1, :1].float() + 1.0  # of the scale's size, and later
    y = lokakern.gemm_norm(hidden, lokakern.quantize(NEXT, "tensor").t(), norm="rms")
    return y, (small * y[:1, :1]).sin() * 3.0


NEXT = drawn(48, N, seed=6)


def test_inductor_reads_kept_scales_and_never_writes_them(made: list[Any]) -> None:
    weight, other = drawn(N, seed=4), drawn(N, seed=5) * 3.0
    compiled = torch.compile(chain, fullgraph=True)
    with torch.no_grad():
        compiled(X, weight)
        assert len(made) == 1
        for given in (weight, other, weight):
            for _ in range(3):
                y, z = compiled(X, given)
                expected = chain(X, given)
                assert torch.equal(y, expected[0])
                torch.testing.assert_close(z, expected[1])
        assert len(made) == 2
        other.mul_(2.0)
        assert torch.equal(compiled(X, other)[0], chain(X, other)[0])
    assert len(made) == 3


def test_inductor_may_write_to_a_scale_that_others_read(made: list[Any]) -> None:
    def call(x: Tensor) -> Any:
        found = lokakern.norm_quantize(x, norm="rms", out_scale="static")
        assert isinstance(found, QuantizedTensor) and found.scale is not None
        return found.data, found.scale * 2.0 + 1.0

    compiled = torch.compile(call, fullgraph=True)
    for _ in range(3):
        data, scale = compiled(Y)
        assert torch.equal(data.view(torch.uint8), call(Y)[0].view(torch.uint8))
        assert torch.equal(scale, call(Y)[1])
    assert len(made) == 4  # a new tensor in each compiled call, and the kept one


@pytest.mark.parametrize("captures", [False, True])
def test_inductor_returns_a_kept_scale_unless_it_captures_graphs(
    captures: bool, made: list[Any]
) -> None:
    weight = drawn(N, seed=4)

    def call(x: Tensor) -> Any:
        return lokakern.norm_quantize(x, norm="rms", norm_weight=weight, out_scale="static")

    expected = call(Y)
    # On a CPU this option changes no more than what is returned.
    compiled = torch.compile(call, fullgraph=True, options={"triton.cudagraphs": captures})
    for _ in range(2):
        assert (scale_of(compiled(Y)) is scale_of(expected)) is not captures
        assert torch.equal(scale_of(compiled(Y)), scale_of(expected))
    assert len(made) == 1 + (4 if captures else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("returns_scale", [False, True])
def test_graphs_of_inductor_with_static_scales(returns_scale: bool) -> None:
    x, w, weight = X.cuda(), W.cuda(), drawn(N, seed=4).cuda()
    following = lokakern.quantize(NEXT.cuda(), "tensor").t()

    def call(x: Tensor) -> Any:
        hidden = lokakern.gemm_norm(x, w.t(), norm="layer", norm_weight=weight, out_scale="static")
        y = lokakern.gemm_norm(hidden, following, norm="rms")
        return (y, hidden) if returns_scale else y

    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        expected = call(x)
        for _ in range(5):
            found = compiled(x)
            for one, other in zip(native.bits(found), native.bits(expected), strict=True):
                assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_static_scale_launches_nothing_on_a_gpu() -> None:
    weight = drawn(N, seed=4).cuda()
    a, b = lokakern.quantize(X.cuda()), lokakern.quantize(W.cuda()).t()

    def call(scale: Any) -> Any:
        return lokakern.gemm_norm(a, b, norm="layer", norm_weight=weight, out_scale=scale)

    def launches(run: Callable[[], Any]) -> int:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            run()
            torch.cuda.synchronize()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA
                   for event in profile.events() or ())  # fmt: skip

    scale = scale_of(call("static")).clone()
    for given in ("static", scale):
        for _ in range(4):
            call(given)
    count = launches(lambda: call(scale))
    assert launches(lambda: call("static")) == count > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call("static")
    static_scale._KEPT.clear()
    gc.collect()
    torch.cuda.empty_cache()
    junk = torch.full((1 << 20,), float("nan"), device="cuda")
    assert launches(graph.replay) == count
    assert torch.equal(found.scale, scale) and junk.isnan().all()
    assert torch.equal(found.data.view(torch.uint8), call(scale).data.view(torch.uint8))
