"""Public functions under torch.compile and torch.export: one graph, the bits of eager calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import lokakern
from lokakern.functional import norm_gradient
from lokakern.norm import Norm
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher, misses
from lokakern.types import Granularity, QuantizedTensor

M, N, K = 48, 128, 96
Call = Callable[[Tensor, Tensor], Any]


@pytest.fixture(autouse=True)
def empty_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "user.sqlite"))
    dispatcher.use_snapshot(load_snapshot([]))
    torch._dynamo.reset()
    yield
    dispatcher.use_snapshot(None)
    misses._COUNTS.clear()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


X, W, Y, Z = drawn(M, K, seed=1), drawn(N, K, seed=2), drawn(M, N, seed=3), drawn(M, N, seed=4)
BIAS, WEIGHT, SHIFT = (drawn(N, seed=seed) for seed in (5, 6, 7))
QW = lokakern.quantize(W).t()
BY_BLOCK, BY_TENSOR = (lokakern.quantize(W, form).t() for form in ("128x128", "tensor"))
STACKED = lokakern.quantize(drawn(64, 2 * N, seed=8), "128x128").t()
LAST = drawn(32, N, seed=10)
SCALE = torch.tensor(0.03)
q = lokakern.quantize


def delayed(x: Tensor, _: Tensor) -> Any:
    amax = torch.zeros(1)
    return q(x, "tensor", scale=SCALE, amax=amax), amax


def delayed_both(x: Tensor, _: Tensor) -> Any:
    amax = torch.zeros(1)
    both = lokakern.quantize_transpose(x, "tensor", scale=SCALE, amax=amax, column_sums=True)
    return (*both, amax)


def added(x: Tensor, y: Tensor) -> Tensor:
    total = y.float()
    lokakern.scaled_gemm(q(x), QW, accumulate=True, out=total)
    return total


def placed(x: Tensor, _: Tensor) -> Tensor:
    whole = torch.zeros(x.shape[0], 3 * N, dtype=torch.bfloat16)
    lokakern.scaled_gemm(q(x), QW, out=whole[:, :N])
    lokakern.gemm_norm(x, W.t(), norm="rms", out=whole[:, N : 2 * N])
    return whole


def chained(x: Tensor, y: Tensor) -> Any:
    hidden = lokakern.gemm_norm(
        q(x), QW, norm="layer", norm_weight=WEIGHT, norm_bias=SHIFT, residual=y, activation="relu",
        out_scale="static",
    )  # fmt: skip
    return lokakern.scaled_gemm(hidden, lokakern.quantize(LAST, "tensor").t())


CALLS: dict[str, Call] = {
    "layer": lambda x, y: lokakern.gemm_norm(
        x, W.t(), norm="layer", bias=BIAS, norm_weight=WEIGHT, norm_bias=SHIFT, activation="silu",
        residual=y, on_miss="bf16"),
    "budget": lambda x, y: lokakern.gemm_norm(x, W.t(), norm="block_rms(64)", budget=0.06),
    "gate": lambda x, y: lokakern.gemm_norm(x, W.t(), norm="rms", gate=y, out_granularity="row"),
    "cross": lambda x, y: lokakern.gemm_norm(x, W.t(), norm="none", cross=(y, y)),
    "last": lambda x, y: lokakern.gemm_norm(
        x, W.t(), norm="rms", out_granularity="1x128", residual=y, residual_last=True),
    "static": lambda x, y: lokakern.gemm_norm(x, W.t(), norm="rms", out_scale="static"),
    "static, affine": lambda x, y: lokakern.gemm_norm(
        q(x), QW, norm="layer", norm_weight=WEIGHT, norm_bias=SHIFT, out_scale="static"),
    "number": lambda x, y: lokakern.gemm_norm(x, W.t(), norm="layer", out_scale=0.02),
    "tensor": lambda x, y: lokakern.gemm_norm(x, W.t(), norm="layer", out_scale=SCALE),
    "norm_quantize": lambda x, y: lokakern.norm_quantize(y, norm="layer", norm_weight=WEIGHT),
    "norm_quantize, static": lambda x, y: lokakern.norm_quantize(
        y, norm=Norm("block_rms", 32), out_scale="static", out_format="e5m2"),
    "quantize": lambda x, y: q(x),
    "quantize, 1x128": lambda x, y: q(x.t(), "1x128"),
    "quantize, e5m2": lambda x, y: q(x, "tensor", out_format="e5m2"),
    "quantize, 1x32": lambda x, y: q(x, "1x32"),
    "quantize, static": lambda x, y: q(x, "tensor", scale=SCALE),
    "quantize, delayed": delayed,
    "both": lambda x, y: lokakern.quantize_transpose(x),
    "both, sums": lambda x, y: lokakern.quantize_transpose(
        x.float(), "row", power_of_two=True, column_sums=True),
    "both, static": lambda x, y: lokakern.quantize_transpose(x, "tensor", scale=SCALE),
    "both, delayed": delayed_both,
    "dequantize": lambda x, y: lokakern.dequantize(q(x).t(), "float32"),
    "scaled_gemm": lambda x, y: lokakern.scaled_gemm(q(x), QW, bias=BIAS, activation="relu"),
    "scaled_gemm, cross": lambda x, y: lokakern.scaled_gemm(q(x), QW, cross=(y, y)),
    "scaled_gemm, FP8": lambda x, y: lokakern.scaled_gemm(q(x, "1x128"), BY_BLOCK, out_scale=0.5),
    "scaled_gemm, scale": lambda x, y: lokakern.scaled_gemm(
        q(x, "tensor"), BY_TENSOR, out_scale=SCALE),
    "scaled_gemm, float32": lambda x, y: lokakern.scaled_gemm(
        q(x), QW, out_format="float32", budget=0.06),
    "scaled_gemm, added": added,
    "scaled_gemm, slices": lambda x, y: lokakern.scaled_gemm(
        [q(y, "1x128"), q(y.neg(), "1x128")], STACKED),
    "out": placed,
    "chain": chained,
}  # fmt: skip


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, QuantizedTensor):
        assert result.scale is not None
        scale = result.scale
        return [result.data.view(torch.uint8), scale if scale.element_size() > 1 else scale.view(
            torch.uint8)]  # fmt: skip
    if isinstance(result, tuple):
        return [x for part in result for x in tensors(part)]
    return [result]


def same(found: Any, wanted: Any) -> None:
    pairs = list(zip(tensors(found), tensors(wanted), strict=True))
    assert pairs and all(one.stride() == other.stride() for one, other in pairs)
    assert all(one.dtype is other.dtype and torch.equal(one, other) for one, other in pairs)


@pytest.mark.sample(every=2, of=("name",))
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_is_one_graph_with_the_bits_of_the_eager_call(
    name: str, dynamic: bool
) -> None:
    call = CALLS[name]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for m in (M, 16, 7) if dynamic else (7,):  # each of the latter is a graph of its own
            same(compiled(X[:m], Y[:m]), call(X[:m], Y[:m]))


@pytest.mark.rest
@pytest.mark.parametrize("name", CALLS)
def test_inductor_generates_calls_with_the_bits_of_eager_ones(name: str) -> None:
    compiled = torch.compile(CALLS[name], fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (M, 7):
            same(compiled(X[:m], Y[:m]), CALLS[name](X[:m], Y[:m]))


def test_compiled_gradients_are_those_of_eager_calls_and_near_exact_ones() -> None:
    def layer(*given: Tensor) -> Any:
        x, w, bias, weight, shift, residual, gate = given
        return lokakern.gemm_norm(
            x, w.t(), norm="layer", bias=bias, norm_weight=weight, norm_bias=shift,
            residual=residual, gate=gate, budget=0.06,
        )  # fmt: skip

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for m in (M, 7):
        given = [X[:m], W, BIAS, WEIGHT, SHIFT, Y[:m], Z[:m]]
        eager, ours = ([x.clone().requires_grad_() for x in given] for _ in range(2))
        wide = [x.double().requires_grad_() for x in given]
        upstream = drawn(m, N, seed=9)
        layer(*eager).backward(upstream)
        compiled(*ours).backward(upstream)
        x, w, bias, weight, shift, residual, gate = wide
        z = F.layer_norm(x @ w.t() + bias + residual, (N,), weight, shift)
        (gate * torch.sigmoid(z)).backward(upstream.double())
        for one, other, exact in zip(ours, eager, wide, strict=True):
            assert one.grad is not None and other.grad is not None and exact.grad is not None
            assert torch.equal(one.grad, other.grad) and one.grad.dtype is torch.bfloat16
            # The rows that are normalized, their gradient and each result are rounded to bfloat16:
            # each time up to 2^-8 of an element, and of independent ones 2^-9 of their norm.
            error = (one.grad.double() - exact.grad).norm() / exact.grad.norm()
            assert error < 3 * 2**-9


def test_compiled_gradients_are_those_of_an_op_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU with the kernel, behind a norm with two vectors; the same bits as eagerly."""
    monkeypatch.setattr(norm_gradient, "is_fast", lambda *_: True)

    def gradients(run: Call, vectors: int) -> tuple[list[Tensor], int]:
        given = [x.clone().requires_grad_() for x in (X, W, BIAS, WEIGHT)[: 2 + vectors]]
        y = run(*given)
        with torch.profiler.profile() as profile:
            y.backward(Z)
        called = sum(event.name == "lokakern::norm_gradient" for event in profile.events() or ())
        return [x.grad for x in given if x.grad is not None], called

    for vectors in (0, 1, 2):

        def layer(x: Tensor, w: Tensor, bias: Any = None, weight: Any = None) -> Any:
            return lokakern.gemm_norm(
                x, w.t(), norm="layer", bias=bias, norm_weight=weight, activation="silu"
            )

        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        eager, calls = gradients(layer, vectors)
        found, compiled_calls = gradients(compiled, vectors)
        assert (calls, compiled_calls) == (1, int(vectors == 2)) and len(found) == 2 + vectors
        for one, other in zip(found, eager, strict=True):
            if compiled_calls:
                assert torch.equal(one, other)
            assert (one - other).norm() <= 2**-8 * other.norm()
    monkeypatch.undo()
    for norm, count, columns in (("layer", 2, 128), ("layer", 2, 4096), ("none", 1, 128)):
        assert not norm_gradient.is_faster_compiled(columns, Norm(norm), count, "cpu")
    monkeypatch.setattr(norm_gradient, "is_fast", lambda *_: True)
    for norm, count, columns, is_faster in (
        (Norm("layer"), 2, 2048, True), (Norm("layer"), 1, 2048, False),
        (Norm("rms"), 3, 4096, False), (Norm("none"), 1, 4096, True), (Norm("none"), 0, 64, False),
        (Norm("block_rms", 64), 2, 128, False), (Norm("block_rms", 128), 2, 128, True),
    ):  # fmt: skip
        assert norm_gradient.is_faster_compiled(columns, norm, count, "cuda") is is_faster


@pytest.mark.parametrize("with_source", [False, True])
def test_gradients_reach_a_prepared_weight(with_source: bool) -> None:
    def gradients(run: Callable[..., Any]) -> list[Tensor]:
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        if with_source:
            made = q(W)
            b = QuantizedTensor(made.data, made.scale, made.granularity, True, w)
        else:
            b = QuantizedTensor(w, None, Granularity.NONE, True)
        y = run(x, b)
        y.float().square().sum().backward()
        assert x.grad is not None and w.grad is not None
        return [y.detach(), x.grad, w.grad]

    def call(x: Tensor, b: QuantizedTensor) -> Any:
        return lokakern.gemm_norm(x, b, norm="rms")

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(compiled), gradients(call), strict=True):
        assert (one - other).norm() <= 2**-8 * other.norm()  # by torch's steps, and by the op


def test_compiled_calls_raise_the_errors_of_eager_calls() -> None:
    x, weight = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("FP8 output has no gradient", lambda: lokakern.gemm_norm(
            x, W.t(), norm="rms", out_granularity="row")),
        ("a is quantized", lambda: lokakern.gemm_norm(q(X), QW, norm="rms", norm_weight=weight)),
        ("out= cannot be", lambda: lokakern.gemm_norm(x, W.t(), norm="rms", out=Y.clone())),
        ("FP8 outputs have no gradient", lambda: lokakern.norm_quantize(x, norm="rms")),
        ("norm 'batch' is unknown", lambda: lokakern.gemm_norm(X, W.t(), norm="batch")),
        ("only block_rms takes a block size", lambda: lokakern.gemm_norm(
            X, W.t(), norm=Norm("layer", 32))),
        ("with gate the output is not bounded", lambda: lokakern.gemm_norm(
            X, W.t(), norm="rms", gate=Y, out_scale="static")),
        ("out_scale is -1", lambda: lokakern.norm_quantize(X, norm="rms", out_scale=-1.0)),
        ("choose one", lambda: lokakern.gemm_norm(X, W.t(), norm="rms", gate=Y, activation="relu")),
        (r"bias is \[64\]", lambda: lokakern.gemm_norm(X, W.t(), norm="rms", bias=BIAS[:64])),
        ("expected k|a is", lambda: lokakern.gemm_norm(X, W, norm="rms")),
        ("format is 'e3m4'", lambda: q(X, out_format="e3m4")),
        ("amax without scale", lambda: q(X, "tensor", amax=torch.zeros(1))),
        ("must be quantize", lambda: lokakern.scaled_gemm(QW, QW)),
        ("accumulate adds to out", lambda: lokakern.scaled_gemm(q(X), QW, accumulate=True)),
        ("with scales", lambda: lokakern.scaled_gemm(X, QW)),  # type: ignore[arg-type]
    ]  # fmt: skip
    for words, call in calls:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=words):
            torch.compile(call, backend="eager", fullgraph=True)()


class Layers(nn.Module):
    """Two layers with FP8 between them, and their output in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gamma = nn.Parameter(W), nn.Parameter(WEIGHT)
        self.last = nn.Parameter(LAST)

    def forward(self, x: Tensor) -> Any:
        hidden = lokakern.gemm_norm(
            x, self.weight.t(), norm="rms", norm_weight=self.gamma, out_scale="static"
        )
        weight = lokakern.quantize(self.last, "tensor").t()
        return lokakern.gemm_norm(hidden, weight, norm="layer", activation="relu")


@pytest.mark.parametrize("strict", [False, True])
def test_calls_are_exported(strict: bool, tmp_path: Path) -> None:
    model = Layers()
    shapes = {"x": {0: torch.export.Dim.DYNAMIC}}
    with torch.no_grad():
        program = torch.export.export(model, (X,), dynamic_shapes=shapes, strict=strict)
        torch.export.save(program, tmp_path / "layers.pt2")
        loaded = torch.export.load(tmp_path / "layers.pt2").module()
        for m in (M, 24, 7):
            same(loaded(X[:m]), model(X[:m]))


def test_ops_pass_opcheck() -> None:
    ops = torch.ops.lokakern
    epilogue = (BIAS, WEIGHT, None, Y, None, None, None, "layer", 1e-5, "relu", False)
    operands = (X, None, "", W.t(), None, None, "")
    choice = ([], [], "bf16")
    # Of fake tensors and schemas; gradients are compared above.
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        ops.gemm_norm.default, (*operands, *epilogue, "", "", None, *choice), test_utils=checks
    )
    torch.library.opcheck(
        ops.gemm_norm_scaled.default, (*operands, *epilogue, "", "1x128", None, *choice),
        test_utils=checks,
    )  # fmt: skip
    out = torch.empty(M, N, dtype=torch.bfloat16)
    torch.library.opcheck(
        ops.gemm_norm_out.default, (out, *operands, *epilogue, "", "", None, *choice),
        test_utils=checks,
    )  # fmt: skip
    for x in (X, X[:7], drawn(33, 70)):
        for form in ("tensor", "row", "1x128", "128x128"):
            for op in (ops.quantize, ops.quantize_transpose, ops.quantize_transpose_sums):
                torch.library.opcheck(op.default, (x, form, "e5m2", False), test_utils=checks)


@pytest.mark.parametrize("op", ["gemm_norm", "scaled_gemm", "dequantize"])
def test_transforms_that_kernels_would_miss_are_refused_in_every_call(op: str) -> None:
    """Also where an equal call before has passed the checks, and with operands made outside."""
    left, right = lokakern.quantize(X, "row"), lokakern.quantize(W, "row").t()

    def call(x: Tensor, bias: Tensor) -> Tensor:
        if op == "gemm_norm":
            return lokakern.gemm_norm(x, W.t(), norm="layer", bias=bias)
        if op == "scaled_gemm":
            made = lokakern.scaled_gemm(left, right, bias=bias)
            assert isinstance(made, Tensor)
            return made
        return lokakern.dequantize(QuantizedTensor(left.data, x[:, :1].float(), left.granularity))

    def loss(x: Tensor) -> Tensor:
        return call(x, BIAS).float().sum()

    call(X, BIAS)
    refused = pytest.raises(lokakern.errors.UnsupportedError, match=f"{op}: torch.func")
    with refused, forward_ad.dual_level():
        call(forward_ad.make_dual(X, X), BIAS)  # type: ignore[no-untyped-call]
    with refused:
        torch.func.grad(loss)(X)
    with refused:
        torch.func.vmap(lambda bias: call(X, bias))(BIAS[None])
    with refused:
        torch.jit.trace(call, (X, BIAS), check_trace=False)
    call(X, BIAS)
