"""`gemm_norm` and `norm_quantize`: results, errors for invalid arguments, and choices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lokakern
from lokakern import norm, numerics
from lokakern.epilogue import ACTIVATIONS
from lokakern.errors import (
    BudgetError,
    DeviceError,
    FormatError,
    LokakernError,
    MissError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from lokakern.functional import gemm_norm, norm_gradient
from lokakern.functional.norm_checks import aligned_epilogue, is_aligned
from lokakern.functional.run import run
from lokakern.norm import Norm, norm_named
from lokakern.registry import ops
from lokakern.registry.register import KERNELS
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher, misses
from lokakern.types import ErrorBudget, Granularity, NormEpilogue, QuantizedTensor

M, N, K = 40, 128, 96


@pytest.fixture(autouse=True)
def empty_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "user.sqlite"))
    dispatcher.use_snapshot(load_snapshot([]))
    misses.LOGGED.clear()
    yield
    dispatcher.use_snapshot(None)
    misses._COUNTS.clear()


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, W = drawn(M, K, seed=1), drawn(N, K, seed=2)
BIAS, WEIGHT, SHIFT = (drawn(N, seed=seed) for seed in (3, 4, 5))
BESIDE = [drawn(M, N, seed=seed) for seed in (6, 7)]
SUMS = X.double() @ W.t().double()


def close(found: torch.Tensor, wanted: torch.Tensor, share: float = 0.02) -> None:
    """Within a share of the largest of each row: bfloat16 loses up to four times 2^-9 of it."""
    largest = wanted.abs().amax(1, keepdim=True).clamp_min(1e-3)
    worst = float(((found.double() - wanted).abs() / largest).nan_to_num(nan=math.inf).max())
    assert worst <= share, worst


# --- what they compute


def test_layer_and_rms_norm_equal_torch() -> None:
    parts = (WEIGHT.double(), SHIFT.double())
    wanted = F.layer_norm(SUMS + BIAS.double(), (N,), *parts, 1e-5)
    found = lokakern.gemm_norm(
        X, W.t(), norm="layer", bias=BIAS, norm_weight=WEIGHT, norm_bias=SHIFT
    )
    assert isinstance(found, torch.Tensor) and found.dtype == torch.bfloat16
    close(found, wanted)
    wanted = F.rms_norm(SUMS, (N,), parts[0], 1e-2)
    close(lokakern.gemm_norm(X, W.t(), norm="rms", norm_weight=WEIGHT, eps=1e-2), wanted)
    close(lokakern.gemm_norm(X, W.t(), norm=Norm("rms", 0, 1e-2), norm_weight=WEIGHT), wanted)
    blocks = F.rms_norm(SUMS.view(M, -1, 32), (32,), None, 1e-5).view(M, N)
    close(lokakern.gemm_norm(X, W.t(), norm="block_rms(32)"), blocks)
    close(lokakern.gemm_norm(X, W.t(), norm="none", bias=BIAS), SUMS + BIAS.double())


@pytest.mark.parametrize("wide", [False, True])
def test_epilogues_after_the_norm(wide: bool) -> None:
    one, two = BESIDE
    z = F.layer_norm(SUMS, (N,), WEIGHT.double())
    weight = WEIGHT.float() if wide else WEIGHT
    before = F.layer_norm(SUMS + one.double(), (N,), WEIGHT.double())
    for options, wanted in (
        ({"activation": "relu"}, torch.relu(z)),
        ({"activation": "hardswish"}, F.hardswish(z)),
        ({"activation": "silu"}, F.silu(z)),
        ({"activation": "gelu"}, F.gelu(z)),
        ({"activation": "gelu_tanh"}, F.gelu(z, approximate="tanh")),
        ({"activation": "none"}, z),
        ({"gate": one}, one.double() * torch.sigmoid(z)),
        ({"cross": (one, two)}, one.double() * z + two.double()),
        ({"residual": one}, before),
        ({"residual": one, "residual_last": True}, z + one.double()),
        ({"residual": one, "activation": "silu"}, F.silu(before)),
        ({"residual": two, "residual_last": True, "gate": one},
         one.double() * torch.sigmoid(z) + two.double()),
    ):  # fmt: skip
        found = lokakern.gemm_norm(X, W.t(), norm="layer", norm_weight=weight, **options)
        close(found, wanted)


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128"])
def test_quantized_operands_are_normalized_in_float32(granularity: str) -> None:
    a = lokakern.quantize(X, granularity)
    b = lokakern.quantize(W, granularity).t()
    exact = numerics.dequantize(a, torch.float64) @ numerics.dequantize(b, torch.float64)
    found = lokakern.gemm_norm(a, b, norm="layer", activation="silu")
    close(found, F.silu(F.layer_norm(exact, (N,))), 2.0**-8)
    block = lokakern.gemm_norm(
        lokakern.quantize(X, "1x128"), lokakern.quantize(W, "128x128").t(), norm="rms"
    )
    close(block, F.rms_norm(SUMS, (N,)), 0.2)


def test_fp8_outputs_are_bitwise_equal_to_quantize() -> None:
    """The FP8 output is quantized from float32, and the next layer reads it unchanged."""
    a, b = lokakern.quantize(X), lokakern.quantize(W).t()
    exact = (numerics.dequantize(a) @ numerics.dequantize(b)).float()
    d = norm.normalize(exact, Norm("block_rms", 64))
    for granularity in ("row", "1x128"):
        found = lokakern.gemm_norm(a, b, norm="block_rms(64)", out_granularity=granularity)
        wanted = lokakern.quantize(d, granularity)
        assert isinstance(found, QuantizedTensor) and found.granularity == granularity
        assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))
        assert found.scale is not None and torch.equal(found.scale, wanted.scale)  # type: ignore[arg-type]
        following = lokakern.gemm_norm(found, lokakern.quantize(drawn(64, N)).t(), norm="rms") if (
            granularity == "row") else None  # fmt: skip
        assert following is None or following.shape == (M, 64)
    found = lokakern.gemm_norm(a, b, norm="block_rms(64)", out_scale=torch.tensor(0.02))
    assert isinstance(found, QuantizedTensor) and found.granularity is Granularity.TENSOR
    wanted = lokakern.quantize(d, "tensor", scale=torch.tensor([[0.02]]))
    assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))


@settings(deadline=None, max_examples=30)
@given(
    name=st.sampled_from(["layer", "rms", "block_rms(64)", "block_rms(128)"]),
    activation=st.sampled_from([None, *ACTIVATIONS[1:]]),
    seed=st.integers(0, 2**31), affine=st.booleans(), quantized=st.booleans(),
)  # fmt: skip
def test_nothing_saturates_with_the_bound_of_the_norm_as_scale(
    name: str, activation: str | None, seed: int, affine: bool, quantized: bool
) -> None:
    """The scale is that of `lokakern.norm.static_scale`, for any rows."""
    weight, shift = drawn(2, N, seed=seed) if affine else (None, None)
    spikes = torch.eye(K).bfloat16()[:16] * 3e4
    x = torch.cat([drawn(24, K, seed=seed) * 1e3, spikes])
    w = torch.zeros(N, K).bfloat16()
    w[:K] = torch.eye(K)
    a, b = (lokakern.quantize(x), lokakern.quantize(w).t()) if quantized else (x, w.t())
    found = lokakern.gemm_norm(
        a, b, norm=name, norm_weight=weight, norm_bias=shift, activation=activation,
        out_scale="static", eps=0.0,
    )  # fmt: skip
    assert isinstance(found, QuantizedTensor) and found.scale is not None
    wanted = norm.static_scale(norm.norm_named(name), N, found.format, weight, shift)
    assert float(found.scale) == pytest.approx(wanted, rel=1e-6)
    z = norm.normalize(x.double() @ w.t().double(), norm.norm_named(name, 0.0), weight, shift)
    z = FUNCTIONS[activation or "none"](z)
    assert z.nan_to_num().abs().max() <= wanted * found.format.maximum * (1 + 1e-6)
    if not quantized:
        error = (numerics.dequantize(found).double() - z).nan_to_num().abs()
        assert (error <= z.nan_to_num().abs() * 0.08 + wanted / 64 + 0.02).all()


def test_norm_quantize_equals_norm_and_quantize() -> None:
    x = drawn(33, 200, seed=9)
    weight, shift = drawn(2, 200, seed=10)
    residual = drawn(33, 200, seed=11)
    d = norm.normalize((x + residual.float()), Norm("layer"), weight, shift)
    d = F.silu(d)
    for granularity in ("row", "1x128"):
        found = lokakern.norm_quantize(
            x, norm="layer", norm_weight=weight, norm_bias=shift, residual=residual,
            activation="silu", granularity=granularity,
        )  # fmt: skip
        wanted = lokakern.quantize(d, granularity)
        assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))
        assert found.scale is not None and torch.equal(found.scale, wanted.scale)  # type: ignore[arg-type]
    by_bound = lokakern.norm_quantize(x, norm="rms", out_scale="static")
    assert by_bound.granularity is Granularity.TENSOR and by_bound.scale is not None
    assert float(by_bound.scale) == pytest.approx(math.sqrt(200) / 448)
    strided = torch.stack([x, x], 2)[:, :, 0]
    assert not strided.is_contiguous()
    again = lokakern.norm_quantize(strided, norm="rms", out_scale="static")
    assert torch.equal(again.data.view(torch.uint8), by_bound.data.view(torch.uint8))


def test_odd_sizes_views_and_slices() -> None:
    for m, n, k in ((1, 1, 1), (3, 77, 5), (17, 130, 33)):
        x, w = drawn(m, 2 * k, seed=m)[:, ::2], drawn(n, k, seed=n)
        wanted = F.layer_norm(x.double() @ w.t().double(), (n,))
        close(lokakern.gemm_norm(x, w.t(), norm="layer"), wanted, 0.03)
        close(lokakern.gemm_norm(x, w.t().contiguous(), norm="layer"), wanted, 0.03)
        whole = torch.full((m, 3 * n), 7.0).bfloat16()
        out = whole[:, n : 2 * n]
        assert lokakern.gemm_norm(x, w.t(), norm="layer", out=out) is out
        close(out, wanted, 0.03)
        assert (whole[:, :n] == 7).all() and (whole[:, 2 * n :] == 7).all()
        q = lokakern.gemm_norm(x, w.t(), norm="layer", out_granularity="1x128")
        close(numerics.dequantize(q), wanted, 0.1)  # type: ignore[arg-type]


def test_rows_of_zeros_and_nan() -> None:
    x = X.clone()
    x[3], x[5, 7] = 0.0, math.nan
    for options in ({}, {"out_granularity": "row"}, {"out_scale": "static"}):
        found = lokakern.gemm_norm(x, W.t(), norm="layer", activation="silu", **options)
        values = numerics.dequantize(found) if isinstance(found, QuantizedTensor) else found
        assert (values[3] == 0).all() and values[5].isnan().all()
        assert values[[0, 1, 2, 4, 6]].isfinite().all()
        rows = x.clone()
        q = lokakern.norm_quantize(rows, norm="block_rms(32)")
        nan = numerics.dequantize(q)[5].isnan()
        assert nan[:32].all() and not nan[32:].any()


def test_empty_inputs() -> None:
    x, vector = X[:0], drawn(N)
    assert lokakern.gemm_norm(x, W.t(), norm="layer", bias=vector).shape == (0, N)
    found = lokakern.gemm_norm(x, W.t(), norm="rms", out_granularity="row")
    assert isinstance(found, QuantizedTensor) and found.shape == (0, N)
    found = lokakern.norm_quantize(x, norm="rms", granularity="1x128")
    assert found.shape == (0, K)
    a, b = lokakern.quantize(x), lokakern.quantize(W).t()
    assert lokakern.gemm_norm(a, b, norm="rms", out_scale=1.0).shape == (0, N)


# --- plans


def test_a_cached_table_serves_every_m_and_checks_shapes() -> None:
    gemm_norm._PLANS.clear()
    options: dict[str, Any] = {"norm": "layer", "residual": BESIDE[0], "budget": 0.06}
    lokakern.gemm_norm(X, W.t(), **options)
    (key,) = gemm_norm._PLANS
    lokakern.gemm_norm(X[:24], W.t(), **{**options, "residual": BESIDE[0][:24]})
    assert list(gemm_norm._PLANS) == [key]
    with pytest.raises(ShapeError, match=r"residual is \[40, 128\]; expected \[24, 128\]"):
        lokakern.gemm_norm(X[:24], W.t(), **options)
    out = torch.empty(40, N).bfloat16()
    lokakern.gemm_norm(X, W.t(), norm="layer", out=out)
    with pytest.raises(ShapeError, match=r"out is \[40, 128\]; expected \[24, 128\]"):
        lokakern.gemm_norm(X[:24], W.t(), norm="layer", out=out)
    before = len(gemm_norm._PLANS)
    for other in ({"norm": "rms"}, {"norm": "layer", "eps": 1e-3}, {"norm": "layer", "bias": BIAS}):
        lokakern.gemm_norm(X, W.t(), **other)
    assert len(gemm_norm._PLANS) == before + 3
    dispatcher.use_snapshot(load_snapshot([]))
    assert not gemm_norm._PLANS


def test_a_prepared_weight_allows_the_unquantized_kernel() -> None:
    kept = lokakern.prepare_weight(W, 0.06, (1, 4096))
    assert kept.scale is None  # nothing was measured: FP8 never pays
    wanted = F.layer_norm(SUMS, (N,))
    close(lokakern.gemm_norm(X, kept, norm="layer"), wanted)
    prepared = QuantizedTensor(
        *((q := lokakern.quantize(W)).data, q.scale), Granularity.ROW, True, W, ErrorBudget(0.06)
    )
    close(lokakern.gemm_norm(X, prepared, norm="layer"), wanted)
    fused = KERNELS["torch.quantize_row+torch.norm_emulated_row"]
    found = run(fused, X, prepared, norm="layer")
    whole = run(fused, X, W.t(), norm="layer")
    assert torch.equal(found, whole)


def test_run_with_a_given_kernel() -> None:
    unfused = run(KERNELS["torch.norm_unfused"], X, W.t(), norm="rms", bias=BIAS)
    close(unfused, F.rms_norm(SUMS + BIAS.double(), (N,)))
    kernel = KERNELS["torch.norm_quantize"]
    found = run(kernel, X, norm="rms", granularity="1x128")
    assert found.granularity is Granularity.GROUP
    with pytest.raises(UnsupportedError, match="takes row x row scales, not none x none"):
        run(KERNELS["torch.norm_emulated_row"], X, W.t(), norm="rms")


# --- choosing


def test_on_miss_logs_raises_or_records(caplog: pytest.LogCaptureFixture) -> None:
    wanted = lokakern.gemm_norm(X, W.t(), norm="layer")
    assert not caplog.records and not misses._COUNTS
    for _ in range(3):
        assert torch.equal(lokakern.gemm_norm(X, W.t(), norm="layer", budget=0.06), wanted)
    (record,) = caplog.records
    said = record.getMessage().removeprefix("using torch.norm_unfused: ")
    assert "measure it with: python -m lokakern.bench sweep --problem" in said
    ((problem, _),) = misses._COUNTS
    assert (problem.op, problem.epilogue) == ("gemm_norm", "layer")
    assert misses.parse(misses.json.dumps(misses.plain(problem))) == problem
    with pytest.raises(MissError, match=r"nothing was measured at n=128 k=96") as raised:
        lokakern.gemm_norm(X, W.t(), norm="layer", budget=0.06, on_miss="raise")
    assert str(raised.value) == said
    explained = dispatcher.Choice(dispatcher.table_for(problem, ErrorBudget.of(0.06)), problem.m)
    assert f"  miss: {said.removeprefix(f'gemm_norm: {problem}: ')}" in (
        explained.explain().splitlines()
    ), "in the same words"
    x, w = lokakern.quantize(X), lokakern.quantize(W).t()
    for a, b, budget in ((X, W.t(), None), (x, w, None), (x, w, 1e-9)):
        with pytest.raises(MissError, match=r"nothing was measured at n=128 k=96"):
            lokakern.gemm_norm(a, b, norm="layer", budget=budget, on_miss="raise")


def test_a_budget_that_fp8_cannot_meet_does_not_raise() -> None:
    for budget in (0.0, 1e-9, 0.06, ErrorBudget(sqnr_db=200.0)):
        for options in ({}, {"out_granularity": "row"}):
            lokakern.gemm_norm(X, W.t(), norm="layer", budget=budget, **options)
        lokakern.gemm_norm(
            lokakern.quantize(X), lokakern.quantize(W).t(), norm="layer", budget=budget
        )
    for wrong in (-1.0, math.nan, "x", True):
        with pytest.raises(BudgetError):
            lokakern.gemm_norm(X, W.t(), norm="layer", budget=wrong)


def test_dispatch_knows_the_ops() -> None:
    choice = lokakern.dispatch(
        "gemm_norm", (M, N, K), 0.06, epilogue="bias+layer+affine", out_format="e4m3fn"
    )
    assert choice.is_miss and choice.kernel == "torch.norm_unfused"
    assert "out=e4m3fn/row" in choice.explain()
    options = {"norm": "layer", "bias": BIAS, "norm_weight": WEIGHT, "out_format": "e4m3fn"}
    assert isinstance(choice(X, W.t(), **options), QuantizedTensor)
    choice = lokakern.dispatch("norm_quantize", (M, K), epilogue="rms")
    assert choice.kernel == "torch.norm_quantize"
    assert isinstance(choice(X, norm="rms"), QuantizedTensor)


# --- gradients


FUNCTIONS = {name: function for name, (function, _) in ops.ACTIVATIONS.items()}
Named = dict[str, torch.Tensor]


def operands_of(
    shape: tuple[int, int, int], dtype: torch.dtype, options: dict[str, Any], device: str = "cpu"
) -> Named:
    """All operands of a call, as far as ``options`` name them."""
    m, n, k = shape
    shapes: dict[str, tuple[int, ...]] = {"a": (m, k), "w": (n, k)}
    shapes |= {name: (n,) for name in ("bias", "norm_weight", "norm_bias") if name in options}
    beside = {"residual": ("residual",), "gate": ("gate",), "cross": ("x0", "x")}
    shapes |= {name: (m, n) for key, names in beside.items() if key in options for name in names}
    made = {name: drawn(*shapes[name], seed=seed) for seed, name in enumerate(shapes)}
    return {name: x.to(device, dtype).requires_grad_() for name, x in made.items()}


def call_of(given: Named, options: dict[str, Any]) -> torch.Tensor:
    """The call; an option that is True is an operand."""
    found = {name: given.get(name, option) for name, option in options.items()}
    if "cross" in options:
        found["cross"] = (given["x0"], given["x"])
    result = lokakern.gemm_norm(given["a"], given["w"].t(), **found)
    assert isinstance(result, torch.Tensor)
    return result


def exact_of(given: Named, options: dict[str, Any], rows: torch.Tensor | None = None) -> Any:
    """The same in float64, and what is normalized: with the values of ``rows``, if given."""
    a, w = given["a"], given["w"]
    is_last, zero = options.get("residual_last", False), a.new_zeros(())
    residual = given.get("residual", zero)
    y = a @ w.t() + given.get("bias", zero) + (zero if is_last else residual)
    y.retain_grad()
    values = y if rows is None else y + (rows.double() - y).detach()
    parts = given.get("norm_weight"), given.get("norm_bias")
    z = norm.normalize(values, norm_named(options["norm"]), *parts)
    if "gate" in given:
        z = given["gate"] * torch.sigmoid(z)
    elif "cross" in options:
        z = given["x0"] * z + given["x"]
    else:
        z = FUNCTIONS[options.get("activation", "none")](z)
    return (z + residual if is_last else z), y


def rows_of(given: Named, options: dict[str, Any]) -> torch.Tensor:
    """What the backward pass normalizes: rounded to the dtype of the operands."""
    given = {name: x.detach() for name, x in given.items()}
    bias, residual = given.get("bias"), given.get("residual")
    product = given["a"] @ given["w"].t()
    if "gate" in options or "cross" in options:  # by steps of torch in float32 from here
        product = product.double()
        product = product if bias is None else product + bias
    elif bias is not None:
        product = torch.addmm(bias, given["a"], given["w"].t())
    return product if residual is None or options.get("residual_last") else product + residual


AFFINE = {"bias": True, "norm_weight": True, "norm_bias": True}
LAST: dict[str, dict[str, Any]] = {
    "none": {}, "relu": {"activation": "relu"}, "hardswish": {"activation": "hardswish"},
    "silu": {"activation": "silu"}, "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"}, "gate": {"gate": True}, "cross": {"cross": True},
}  # fmt: skip
BEFORE: dict[str, dict[str, Any]] = {
    "": {}, "affine": AFFINE, "weight, residual": {"norm_weight": True, "residual": True},
    "bias, last": {"bias": True, "residual": True, "residual_last": True},
    "all": {**AFFINE, "residual": True},
}  # fmt: skip


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("name", ["layer", "rms", "block_rms(11)", "none"])
@pytest.mark.sample(every=16, of=("last",))
def test_gradients_are_rounded_where_products_are(name: str, last: str, before: str) -> None:
    """Of the rows, once dy is, and each result; all else is float32.

    Roundings lose up to u of each element: of dy, what its products make of that. Relu's slope
    jumps at 0: rows that are rounded across it have another gradient, so float64 gets their values.
    """
    options = {"norm": name, **LAST[last], **BEFORE[before]}
    for dtype, shape in ((torch.bfloat16, (40, 88, 96)), (torch.float16, (33, 77, 50))):
        check_roundings(options, dtype, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("name", ["layer", "rms", "block_rms(64)", "none"])
@pytest.mark.sample(every=8, of=("last",))
def test_gradients_are_rounded_where_products_are_on_a_gpu(
    name: str, last: str, before: str
) -> None:
    """Cold, recorded and replayed, by the kernel and, at 77 columns, by its emulation."""
    options = {"norm": name, **LAST[last], **BEFORE[before]}
    for n in (256, 1024) if name == "block_rms(64)" else (1024, 77):
        for dtype in (torch.bfloat16, torch.float16):
            first, *others = (check_roundings(options, dtype, (333, n, 200), "cuda")
                              for _ in range(4))  # fmt: skip
            for other in others:
                assert all(torch.equal(first[key], x) for key, x in other.items())


@pytest.mark.gpu
@pytest.mark.parametrize("before", ["", "all"])
@pytest.mark.parametrize("last", ["silu", "gate"])
def test_compiled_gradients_on_a_gpu(last: str, before: str) -> None:
    """By the op with the vectors, and by Inductor's kernels; and in a CUDA graph."""
    options = {"norm": "layer", **LAST[last], **BEFORE[before]}
    given = operands_of((512, 1024, 256), torch.bfloat16, options, "cuda")
    upstream = drawn(512, 1024, seed=12).cuda()
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    exact_of(exact, options)[0].backward(upstream.double())
    wanted = [x.grad for x in exact.values()]

    def gradients(run: Any, given: Named = given) -> list[torch.Tensor]:
        return list(torch.autograd.grad(run(given, options), list(given.values()), upstream))

    def are_near(found: list[torch.Tensor]) -> bool:
        pairs = zip(found, wanted, strict=True)
        return all((x.double() - y).norm() <= 3 * 2.0**-9 * y.norm() for x, y in pairs)

    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        compiled = torch.compile(call_of, fullgraph=True, mode=mode)
        for _ in range(4):
            assert are_near(gradients(compiled))
    for _ in range(3):
        assert are_near(gradients(call_of))
    # Autograd waits for the stream on which it first met a leaf, which a capture refuses.
    fresh = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(call_of, fresh)
    graph.replay()
    assert are_near(captured)


def check_roundings(
    options: dict[str, Any], dtype: torch.dtype, shape: tuple[int, int, int], device: str = "cpu"
) -> Named:
    """Check gradients against float64 with the rows that were normalized; returns them."""
    u = torch.finfo(dtype).eps / 2
    ours = operands_of(shape, dtype, options, device)
    upstream = drawn(shape[0], shape[1], seed=12).to(device, dtype)
    call_of(ours, options).backward(upstream)
    exact = {name: x.detach().double().requires_grad_() for name, x in ours.items()}
    d, y = exact_of(exact, options, rows_of(ours, options))
    d.backward(upstream.double())
    dy = y.grad.abs()
    spread = {"a": dy @ exact["w"].abs(), "w": dy.t() @ exact["a"].abs()}
    for key, x in ours.items():
        assert x.grad is not None and x.grad.dtype is dtype
        wanted = exact[key].grad
        assert wanted is not None
        allowed = u * (wanted.abs() + spread.get(key, dy.new_zeros(())))
        allowed = 1.01 * allowed + 2.0**-13 * wanted.abs().amax()  # float32, and u of u
        assert ((x.grad.double() - wanted).abs() <= allowed).all(), (dtype, key)
    return {key: x.grad for key, x in ours.items() if x.grad is not None}


@pytest.mark.parametrize("last", ["none", "silu", "gate", "cross"])
def test_gradients_are_near_those_of_the_unquantized_product(last: str) -> None:
    """Within three roundings: of rows, dy and the result, each 2^-9 of a norm in bfloat16."""
    for name, dtype in itertools.product(
        ("layer", "block_rms(32)"), (torch.bfloat16, torch.float16)
    ):
        options = {"norm": name, **LAST[last], **BEFORE["all"], "budget": 0.06}
        ours = operands_of((M, N, K), dtype, options)
        upstream = drawn(M, N, seed=12).to(dtype)
        y = call_of(ours, options)
        assert y.requires_grad
        y.backward(upstream)
        exact = {name: x.detach().double().requires_grad_() for name, x in ours.items()}
        exact_of(exact, options)[0].backward(upstream.double())
        for key, x in ours.items():
            wanted = exact[key].grad
            assert x.grad is not None and wanted is not None
            error = (x.grad.double() - wanted).norm() / wanted.norm()
            assert error <= 3 * torch.finfo(dtype).eps / 4, (name, dtype, key)
    with torch.no_grad():
        assert not call_of(ours, options).requires_grad


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of products that run, and all results in float32 of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.wide: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.names += [name] if name in ("mm", "addmm") else []
        if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
            self.wide.add(result.shape)
        return result


@pytest.mark.parametrize(
    ("wanted", "count"),
    [(("a", "w"), 3), (("a",), 2), (("w",), 2), (("bias",), 1), (("norm_weight", "residual"), 1),
     (("x",), 0), (("residual_last",), 0)],
)  # fmt: skip
def test_the_backward_pass_makes_the_products_that_it_needs(
    wanted: tuple[str, ...], count: int
) -> None:
    """In the dtype of the operands, of which it makes no copies in float32."""
    options = {"norm": "rms", **BEFORE["all"]}
    if "x" in wanted:
        options |= LAST["cross"]
    if "residual_last" in wanted:
        options["residual_last"], wanted = True, ("residual",)
    given = operands_of((M, N, K), torch.bfloat16, options)
    for name, x in given.items():
        x.requires_grad_(name in wanted)
    y = call_of(given, options)
    with Products() as seen:
        y.sum().backward()
    assert len(seen.names) == count
    assert not seen.wide & {torch.Size((M, K)), torch.Size((N, K)), torch.Size((K, N))}
    assert {name for name, x in given.items() if x.grad is not None} == set(wanted)


def test_gradients_of_float32_vectors_are_not_rounded() -> None:
    options = {"norm": "layer", **AFFINE, "activation": "silu"}
    given = operands_of((M, N, K), torch.bfloat16, options)
    for name in AFFINE:
        given[name] = given[name].detach().float().requires_grad_()
    call_of(given, options).float().square().sum().backward()
    for name in AFFINE:
        found = given[name].grad
        assert found is not None and found.dtype is torch.float32
        assert not torch.equal(found, found.bfloat16().float())


def test_gradients_of_no_rows_and_of_nan() -> None:
    options = {"norm": "layer", "activation": "relu", **BEFORE["all"]}
    for m in (0, 5):
        given = operands_of((m, 24, 16), torch.bfloat16, options)
        if m:
            with torch.no_grad():
                given["a"][2, 3] = math.nan
        call_of(given, options).sum().backward()
        grads = {name: x.grad for name, x in given.items()}
        for name, x in given.items():
            grad = grads[name]
            assert grad is not None and grad.shape == x.shape
            if not m:
                assert not grad.any()
            elif name in ("a", "residual"):
                assert grad.isnan().any(1).tolist() == [row == 2 for row in range(m)]
            elif name != "norm_bias":  # relu's slope is 1 at NaN
                assert grad.isnan().any()


def test_autocast_around_a_backward_pass_changes_nothing() -> None:
    options = {"norm": "rms", **LAST["gate"], **BEFORE["all"]}
    found = []
    for is_cast in (False, True):
        given = operands_of((M, N, K), torch.float16, options)
        loss = call_of(given, options).float().square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            loss.backward()
        found.append([x.grad for x in given.values()])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_rows_that_no_kernel_takes_are_differentiated_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU with the kernel, too: its blocks are powers of two, its rows multiples of 8."""
    assert all(norm_gradient.takes(*rows) for rows in ((8, 0), (8192, 256), (24, 24), (96, 32)))
    refused = ((0, 0), (12, 0), (8200, 0), (88, 11), (1024, 512), (24, 12), (16, 4))
    assert not any(norm_gradient.takes(*rows) for rows in refused)
    kernel = KERNELS["cuda.norm_backward"]
    monkeypatch.setattr(norm_gradient, "gradient_kernel", lambda _: kernel)
    for n, name in ((77, "layer"), (88, "block_rms(11)")):
        given = operands_of((6, n, 16), torch.bfloat16, options := {"norm": name})
        call_of(given, options).sum().backward()
        assert given["a"].grad is not None and given["a"].grad.isfinite().all()


def test_only_operands_that_require_gradients_get_them() -> None:
    x = X.clone().requires_grad_()
    y = lokakern.gemm_norm(x, W.t(), norm="rms", cross=(BESIDE[0], BESIDE[1]))
    assert isinstance(y, torch.Tensor)
    y.float().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    prepared = QuantizedTensor(W, None, Granularity.NONE, True)
    lokakern.gemm_norm(x, prepared, norm="rms").sum().backward()  # type: ignore[union-attr]


def test_calls_without_a_gradient_raise() -> None:
    x = X.clone().requires_grad_()
    a, b = lokakern.quantize(X), lokakern.quantize(W).t()
    weight = WEIGHT.clone().requires_grad_()
    for call, words in (
        (lambda: lokakern.gemm_norm(x, W.t(), norm="rms", out_granularity="row"), "FP8 output"),
        (lambda: lokakern.gemm_norm(x, W.t(), norm="rms", out_format="e4m3fn"), "FP8 output"),
        (lambda: lokakern.gemm_norm(a, b, norm="rms", norm_weight=weight), "a is quantized"),
        (lambda: lokakern.gemm_norm(x, W.t(), norm="rms", out=BESIDE[0].clone()), "out="),
        (lambda: lokakern.norm_quantize(x, norm="rms"), "FP8"),
    ):
        with pytest.raises(UnsupportedError, match=words) as caught:
            call()
        assert "torch.no_grad()" in str(caught.value)


# --- what they refuse


Q, QW = lokakern.quantize(X), lokakern.quantize(W).t()
REFUSED: list[tuple[type[LokakernError], str, dict[str, Any]]] = [
    (UnknownNameError, "gemm_norm: norm 'batch' is unknown; expected layer", {"norm": "batch"}),
    (UnknownNameError, "norm is 7; expected a name", {"norm": 7}),
    (UnknownNameError, "eps is -1", {"eps": -1.0}),
    (UnknownNameError, r"norm is Norm\(kind='layer', block=32, .* only block_rms takes a block",
     {"norm": Norm("layer", 32)}),
    (UnknownNameError, "kind='none', block=8", {"norm": Norm("none", 8)}),
    (UnknownNameError, r"norm is Norm\(kind='rms', block='32'", {"norm": Norm("rms", "32")}),  # type: ignore[arg-type]
    (UnknownNameError, "block='32'", {"norm": Norm("block_rms", "32")}),  # type: ignore[arg-type]
    (UnknownNameError, r"block_rms\(0\)' is unknown", {"norm": Norm("block_rms")}),
    (UnknownNameError, r"block_rms\(True\)' is unknown", {"norm": Norm("block_rms", True)}),
    (UnknownNameError, "'batch' is unknown; expected layer", {"norm": Norm("batch")}),
    (UnknownNameError, r"kind='block_rms\(32\)'", {"norm": Norm("block_rms(32)")}),
    (UnknownNameError, "kind=7", {"norm": Norm(7)}),  # type: ignore[arg-type]
    (UnknownNameError, "activation is 'elu'; expected one of none, relu", {"activation": "elu"}),
    (UnknownNameError, "activation and gate are given; choose one",
     {"activation": "silu", "gate": BESIDE[0]}),
    (UnknownNameError, "gate and cross are given", {"gate": BESIDE[0], "cross": tuple(BESIDE)}),
    (UnknownNameError, "residual_last is True and residual is None", {"residual_last": True}),
    (UnknownNameError, "on_miss is 'x'", {"on_miss": "x"}),
    (UnknownNameError, "distribution is 7", {"distribution": 7, "budget": 0.06}),
    (ShapeError, r"block_rms\(96\) of 128 columns: blocks must divide", {"norm": "block_rms(96)"}),
    (ShapeError, r"cross is Tensor; expected \(x0, x\)", {"cross": BESIDE[0]}),
    (FormatError, r"cross is \(Tensor, NoneType\); expected \(x0, x\), both",
     {"cross": (BESIDE[0], None)}),
    (FormatError, r"cross is \(NoneType, Tensor\)", {"cross": (None, BESIDE[0])}),
    (FormatError, r"cross is \(NoneType, NoneType\)", {"cross": (None, None)}),
    (FormatError, r"cross is \(Tensor, int\)", {"cross": [BESIDE[0], 3]}),
    (ShapeError, r"cross is tuple; expected \(x0, x\)", {"cross": (BESIDE[0],)}),
    (ShapeError, r"x of cross is \[40, 64\]", {"cross": (BESIDE[0], BESIDE[1][:, :64])}),
    (ShapeError, r"bias is \[64\] .* expected \[128\]", {"bias": BIAS[:64]}),
    (ShapeError, "norm_weight is .* contiguous", {"norm_weight": drawn(256)[::2]}),
    (FormatError, "norm_bias is torch.float64", {"norm_bias": SHIFT.double()}),
    (FormatError, "bias is torch.bfloat16, norm_weight is torch.float32; convert",
     {"bias": BIAS, "norm_weight": WEIGHT.float()}),
    (FormatError, "bias is int", {"bias": 7}),
    (FormatError, "bias is torch.sparse_coo; expected a dense", {"bias": BIAS.to_sparse()}),
    (ShapeError, r"residual is \[40, 128\] torch.float32", {"residual": BESIDE[0].float()}),
    (ShapeError, "gate is .* columns contiguous", {"gate": drawn(N, M).t()}),
    (FormatError, "residual is int", {"residual": 7}),
    (FormatError, "format is 'e3m4'", {"out_format": "e3m4"}),
    (FormatError, "out_format is 'float32'; expected 'bfloat16', 'float16' or",
     {"out_format": "float32"}),
    (FormatError, "'bfloat16', which has no scales",
     {"out_format": "bfloat16", "out_granularity": "row"}),
    (FormatError, "'128x128'; expected tensor, row or 1x128", {"out_granularity": "128x128"}),
    (FormatError, "'tensor' and out_scale is not given", {"out_granularity": "tensor"}),
    (FormatError, "'row' and out_scale is given", {"out_granularity": "row", "out_scale": 1.0}),
    (FormatError, "out_scale is -1.0", {"out_scale": -1.0}),
    (FormatError, "out_scale is 'best'; expected a number", {"out_scale": "best"}),
    (ShapeError, r"out_scale is \[2\]", {"out_scale": torch.ones(2)}),
    (FormatError, "with norm 'none' the output is not", {"norm": "none", "out_scale": "static"}),
    (FormatError, "with gate the output is not", {"gate": BESIDE[0], "out_scale": "static"}),
    (FormatError, "with cross and residual_last the output",
     {"cross": tuple(BESIDE), "residual": BESIDE[0], "residual_last": True,
      "out_scale": "static"}),
    (ShapeError, r"out is \[40, 64\]", {"out": BESIDE[0][:, :64]}),
    (FormatError, "out is int; expected a torch.Tensor", {"out": 3}),
    (FormatError, "out is list; expected a torch.Tensor", {"out": [3]}),
    (FormatError, "out is torch.sparse_coo; expected a dense", {"out": BESIDE[0].to_sparse()}),
    (UnsupportedError, "out requires a gradient", {"out": BESIDE[0].clone().requires_grad_()}),
    (FormatError, "out is given and the output is e4m3fn",
     {"out": BESIDE[0], "out_format": "e4m3fn"}),
    (FormatError, "a is torch.float32; expected torch.bfloat16", {"a": X.float()}),
    (FormatError, "a is list", {"a": [1]}),
    (FormatError, "a is torch.sparse_coo; expected a dense", {"a": X.to_sparse()}),
    (FormatError, "b is torch.sparse_coo; expected a dense", {"b": W.t().to_sparse()}),
    (ShapeError, r"b must be \[96, n\] \(pass weight.t\(\)\)", {"b": W}),
    (FormatError, "a is torch.bfloat16 and b is torch.float32", {"b": W.t().float()}),
    (FormatError, "a is a QuantizedTensor and b is Tensor; expected both", {"a": Q}),
    (FormatError, "b is quantized without its source", {"b": QW}),
    (ShapeError, r"a must be quantize\(x\)", {"a": QW, "b": QW}),
    (ShapeError, r"b must be \[128, n\]", {"a": lokakern.quantize(drawn(4, 128)), "b": QW}),
    (DeviceError, "bias is on meta", {"bias": torch.empty(N, device="meta").bfloat16()}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "words", "given"), REFUSED, ids=[w for _, w, _ in REFUSED])
def test_messages_state_the_value_and_a_remedy(
    kind: type[LokakernError], words: str, given: dict[str, Any]
) -> None:
    """The same when asked again: no plan is left behind that lets it through."""
    options = {"norm": "layer", **given}
    a, b = options.pop("a", X), options.pop("b", W.t())
    for _ in range(2):
        with pytest.raises(kind, match=words) as caught:
            lokakern.gemm_norm(a, b, **options)
        assert str(caught.value).startswith(("gemm_norm: ", "distribution is "))


def test_norm_quantize_raises_the_errors_of_gemm_norm() -> None:
    for kind, words, wrong in (
        (FormatError, "x is torch.float32", {"x": X.float()}),
        (ShapeError, r"x is \[96\]", {"x": X[0]}),
        (FormatError, "out_format is 'bfloat16'; expected an FP8", {"out_format": "bfloat16"}),
        (FormatError, "granularity is '128x128'", {"granularity": "128x128"}),
        (ShapeError, r"residual is \[40, 128\]", {"residual": BESIDE[0]}),
        (FormatError, "is not bounded", {"norm": "none", "out_scale": "static"}),
        (FormatError, r"cross is \(Tensor, NoneType\)", {"cross": (X, None)}),
        (UnknownNameError, "kind='layer', block=32", {"norm": Norm("layer", 32)}),
        (FormatError, "x is torch.sparse_coo", {"x": X.to_sparse()}),
        (DeviceError, "x0 of cross is on meta",
         {"cross": (torch.empty_like(X, device="meta"), X)}),
    ):  # fmt: skip
        options: dict[str, Any] = {"x": X, "norm": "layer", **wrong}
        x = options.pop("x")
        with pytest.raises(kind, match=words) as caught:
            lokakern.norm_quantize(x, **options)
        assert str(caught.value).startswith("norm_quantize: ")


@example(  # a residual that cancels the only sum of a row
    m=3, n=1, k=1, seed=198, name="rms", last="none", residual=False, granularity=None
)  # fmt: skip
@settings(deadline=None, max_examples=60)
@given(
    m=st.integers(1, 20), n=st.integers(1, 140), k=st.integers(1, 40), seed=st.integers(0, 999),
    name=st.sampled_from(["layer", "rms", "none"]),
    last=st.sampled_from([*ACTIVATIONS, "gate", "cross"]),
    residual=st.sampled_from([None, False, True]),
    granularity=st.sampled_from([None, "row", "1x128"]),
)  # fmt: skip
def test_random_calls_are_correct_on_every_kernel_here(
    m: int, n: int, k: int, seed: int, name: str, last: str, residual: bool | None,
    granularity: str | None,
) -> None:  # fmt: skip
    """All kernels that run anywhere agree, as far as their roundings let them."""
    x, w = drawn(m, k, seed=seed), drawn(n, k, seed=seed + 1)
    one, two = drawn(m, n, seed=seed + 2), drawn(m, n, seed=seed + 3)
    options: dict[str, Any] = {"norm": name, "out_granularity": granularity}
    options |= {"gate": {"gate": one}, "cross": {"cross": (one, two)}}.get(
        last, {"activation": last}
    )
    if residual is not None:
        options |= {"residual": two, "residual_last": residual}
    a, b = lokakern.quantize(x), lokakern.quantize(w).t()
    exact = numerics.dequantize(a), numerics.dequantize(b)
    found = []
    for kernel in ("torch.norm_emulated_row", "torch.emulated_row+torch.norm_quantize"):
        found.append(run(KERNELS[kernel], a, b, **options))
    rounded = (exact[0].bfloat16(), exact[1].bfloat16())
    found.append(run(KERNELS["torch.norm_unfused"], *rounded, **options))
    first, *others = (
        numerics.dequantize(y).double() if isinstance(y, QuantizedTensor) else y.double()
        for y in found
    )
    largest = first.abs().amax() + 1e-6
    terms = exact[0].double().abs() @ exact[1].double().abs()
    if name == "none":  # terms of few sums may cancel, the roundings of operands do not
        largest = max(largest, 0.2 * terms.amax())
    spread = exact[0].double() @ exact[1].double()
    if residual is False:  # a term of what is normalized
        spread, terms = spread + two.double(), terms + two.double().abs()
    if name == "layer" and float(spread.var(1, correction=0).min()) < 1e-2:
        return  # rows that hardly vary: rounding the sums is most of what is left
    if name == "rms" and bool((spread.norm(dim=1) < 0.05 * terms.norm(dim=1)).any()):
        return  # rows whose sums cancel, such as their only one: the same
    for other in others:
        assert float((other - first).abs().max() / largest) <= (
            0.06 if granularity is None else 0.2
        )


def test_every_public_option_is_documented() -> None:
    for function in (lokakern.gemm_norm, lokakern.norm_quantize):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        names += tuple(function.__kwdefaults__ or ())
        for name in itertools.chain(names):
            assert f"{name}:" in (function.__doc__ or ""), name


def test_an_out_that_requires_grad_is_written_without_gradients() -> None:
    out = BESIDE[0].clone().requires_grad_()
    with torch.no_grad():
        assert lokakern.gemm_norm(X, W.t(), norm="layer", out=out) is out
    with pytest.raises(UnsupportedError, match="out requires a gradient"):  # the plan is there
        lokakern.gemm_norm(X, W.t(), norm="layer", out=out)


def askew(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values that start 2 or 4 bytes after a multiple of 16, as those of a view may."""
    return torch.randn(*shape[:-1], shape[-1] + 1).to(dtype)[..., 1:]


@pytest.mark.parametrize("n", [24, 13])
def test_unaligned_tensors_of_an_epilogue_are_copied(n: int) -> None:
    """GPU kernels read so many: what a launcher is given starts at a multiple of them."""
    vectors = {name: askew(n) for name in ("bias", "norm_weight", "norm_bias")}
    matrices = {name: askew(5, n) for name in ("residual", "x0", "x")}
    given = NormEpilogue(norm_named("layer"), **vectors, **matrices)
    found = aligned_epilogue(given)
    for name, x in (vectors | matrices).items():
        moved = getattr(found, name)
        assert is_aligned(moved) and not is_aligned(x)
        assert torch.equal(moved, x) and moved.stride(-1) == 1
    assert aligned_epilogue(found) is found
    assert aligned_epilogue(NormEpilogue()) == NormEpilogue()


@pytest.mark.parametrize("n", [24, 13])
def test_outputs_and_epilogue_tensors_may_have_any_alignment(n: int) -> None:
    a, b = torch.randn(5, 32).bfloat16(), torch.randn(n, 32).bfloat16().t()
    options = {"bias": askew(n), "residual": askew(5, n), "gate": askew(5, n)}
    plain = {name: x.clone() for name, x in options.items()}
    out = torch.zeros(5, n + 9, dtype=torch.bfloat16)
    found = lokakern.gemm_norm(a, b, norm="rms", out=out[:, 1 : n + 1], **options)
    assert torch.equal(found, lokakern.gemm_norm(a, b, norm="rms", **plain))
    assert found.data_ptr() == out[:, 1:].data_ptr()
    assert not out[:, 0].any() and not out[:, n + 1 :].any()
