"""Replay: errors of sampled operands agree with those of real ones."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lokakern
from lokakern import numerics
from lokakern.errors import DeviceError, UnknownNameError
from lokakern.probe import replay as replays
from lokakern.probe.problems import Replayed, block_norm, problem_of
from lokakern.probe.replay import LearnedSite, compile_ahead
from lokakern.probe.report import ProbeReport, page_of
from lokakern.probe.statistics import GEMMS, SiteStatistics
from lokakern.probe.verdicts import verdicts_of
from lokakern.problems import sums_over_samples
from lokakern.registry.register import KERNELS, load_kernels, register
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher
from lokakern.types import Device, Format, Granularity, Problem
from lokakern.what_if.formats import FORMATS
from lokakern.workloads.distributions import distribution_named, draw_rows, draw_weight, learned
from tests.support.probe_sites import drawn, site_of

load_kernels()
N, K = 96, 128
ROW = "torch.quantize_row+torch.emulated_row"
TENSOR = "torch.quantize_tensor+torch.emulated_tensor"
GPU_ROW = "cuda.quantize_row+cuda.scaled_gemm_row"


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lokakern.problems.ACCURACY_ROWS", 384)


def seen(
    name: str, n: int = N, k: int = K, norm: str = ""
) -> tuple[SiteStatistics, Tensor, Tensor]:
    x, held_out, w = drawn(name, n, k)
    gradient = draw_rows(distribution_named("X12"), 1024, n, 5).float()
    return site_of(x, w, gradient, norm=norm), held_out, w


def replay(name: str, site: SiteStatistics, **options: Any) -> list[Replayed]:
    return replays.replay(LearnedSite(name, site), **options)


def of(found: list[Replayed], gemm: str, kernel: str, norm: str = "") -> Replayed:
    (one,) = (r for r in found if (r.gemm, r.kernel, r.norm) == (gemm, kernel, norm))
    return one


def true_error(x: Tensor, w: Tensor, granularity: Granularity) -> float:
    """Row error of real rows."""
    a, b = x.bfloat16().contiguous(), w.bfloat16().contiguous()
    left, right = (numerics.quantize(operand, Format.E4M3FN, granularity) for operand in (a, b))
    out = (numerics.dequantize(left) @ numerics.dequantize(right).t()).bfloat16()
    return numerics.measure_errors(out, a.double() @ b.double().t()).row_err


@pytest.mark.parametrize("name", ["X2", "X3", "X4"])
def test_replay_predicts_the_error_of_rows_that_were_held_out(name: str) -> None:
    """Within 10 %."""
    site, held_out, w = seen(name)
    found = replay(name, site, seeds=(0,))
    for kernel, granularity in ((ROW, Granularity.ROW), (TENSOR, Granularity.TENSOR)):
        real = true_error(held_out, w, granularity)
        assert of(found, "output", kernel).row_err == pytest.approx(real, rel=0.1)


def test_replayed_rows_keep_their_magnitudes() -> None:
    """Rows of X14 are spread over 1e5: tensor scales flush the small ones."""
    site, held_out, w = seen("X14")
    found = replay("a", site, seeds=(0,))
    real = true_error(held_out, w, Granularity.TENSOR)
    assert real > 0.08
    assert of(found, "output", TENSOR).row_err == pytest.approx(real, rel=0.2)
    assert of(found, "output", ROW).row_err < 0.045
    rows = LearnedSite("a", site).distribution("output").rows(700, K, 0)
    known = {tuple(row) for row in site.input.kept()[0].double().tolist()}
    # One row stands for the largest of rows that were not sampled.
    assert {tuple(row) for row in rows[:-1].tolist()} <= known
    assert float(rows.abs().max()) == pytest.approx(site.input.amax)


@pytest.mark.parametrize("mean", [1.0, 2.0, 5.0])
def test_replay_keeps_correlation_of_weight_and_mean_input(mean: float) -> None:
    """Rows that sum to zero lose the mean and keep what rounding made of it."""
    generator = torch.Generator().manual_seed(3)
    w = torch.randn((N, K), generator=generator) / K**0.5
    w -= w.mean(dim=1, keepdim=True)
    x = torch.randn((2048, K), generator=generator) + mean
    found = replay("a", site_of(x[:1024], w), seeds=(0,))
    for kernel, granularity in ((ROW, Granularity.ROW), (TENSOR, Granularity.TENSOR)):
        real = true_error(x[1024:], w, granularity)
        assert real > 0.045
        one = of(found, "output", kernel)
        assert one.row_err == pytest.approx(real, rel=0.05)
        assert one.row_err_upper > one.row_err


def test_upper_limits_depend_on_the_number_of_distinct_rows() -> None:
    """A standard error of 128 rows that are 65 in truth is 1.4 times as large."""
    x = draw_rows(distribution_named("X6"), 65, K, 11).float()
    w = drawn("X1", N, K)[2]
    few = of(replay("a", site_of(x, w)), "output", ROW)
    assert few.rows == 65
    a, b = x.bfloat16(), w.bfloat16()
    left, right = (numerics.quantize(o, Format.E4M3FN, Granularity.ROW) for o in (a, b))
    out = (numerics.dequantize(left) @ numerics.dequantize(right).t()).bfloat16()
    alone = numerics.measure_errors(out, a.double() @ b.double().t())
    width = few.row_err_upper**2 - few.row_err**2
    assert width == pytest.approx(alone.row_err_upper**2 - alone.row_err**2, rel=0.15)
    assert few.row_p99_upper == pytest.approx(alone.row_max, rel=1e-3)


def test_rows_unlike_the_sample_count_as_errors_of_one() -> None:
    """An octave beyond in size: of 1 % of all rows, whose errors nobody knows."""
    x = torch.randn(1000, K)
    site = site_of(x, torch.randn(N, K))
    assert LearnedSite("a", site).unlike("output") == 0.0
    unsampled = torch.full((510,), math.inf, dtype=torch.float64)
    x = torch.zeros(510, K)  # of zeros it is known
    x[:10] = 1e-6
    site.input.add(x, x, unsampled)
    unlike = LearnedSite("a", site).unlike("output")
    assert unlike == pytest.approx(10 / 1510)
    row = of(replay("a", site), "output", ROW)
    assert row.row_err < 0.045 and row.row_err_upper > unlike**0.5


def test_large_weights_are_kept_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole rows for the output, whole columns for the input's gradient, the largest element."""
    site, _, w = seen("X2", 320, 256)
    whole = replay("a", site)
    monkeypatch.setattr("lokakern.probe.statistics.SNAPSHOT_ELEMENTS", 320 * 256 // 3)
    w[200] *= 8
    site.add_weight(w)
    assert site.snapshot is not None and site.snapshot_t is not None
    assert site.snapshot.shape == (106, 256) and site.snapshot_t.shape == (85, 320)
    assert float(site.snapshot.max()) == float(w.max())
    assert torch.equal(site.snapshot[-1], w[200])
    w[200] /= 8
    site.add_weight(w)
    for one in replay("a", site):
        if one.gemm != "grad_weight":
            (other,) = (r for r in whole if (r.gemm, r.kernel) == (one.gemm, one.kernel))
            assert one.row_err == pytest.approx(other.row_err, rel=0.05)


def test_draws_are_seeded_and_have_the_requested_shape() -> None:
    site = LearnedSite("a", seen("X2")[0])
    for gemm, k in zip(GEMMS, (K, N, N), strict=True):
        distribution = site.distribution(gemm)
        with learned(distribution):
            assert distribution_named(distribution.name) is distribution
            one, again, other = (draw_rows(distribution, 50, k, seed) for seed in (0, 0, 1))
            columns = K if gemm == "grad_weight" else k
            w = draw_weight(distribution, 50, columns, 0)
        assert one.shape == (50, k) and w.shape == (50, columns)
        assert one.dtype == w.dtype == torch.float64
        assert torch.equal(one, again)
        assert torch.equal(one, other) == (gemm != "grad_weight")  # whose sums take other samples
    with pytest.raises(UnknownNameError, match="unknown distribution"):
        distribution_named(distribution.name)
    with (
        pytest.raises(UnknownNameError, match="a name is there already"),
        learned(distribution, distribution),
    ):
        pass
    with pytest.raises(UnknownNameError, match="was learned"):
        distribution.with_parameters(a=1.0)


def test_weight_gradients_are_replayed_from_paired_rows() -> None:
    """Each row of the sample of gradients once, with the input of the same row.

    Scales span the samples of a column: two have the largest that whole columns had, and add
    nothing to any product.
    """
    x = draw_rows(distribution_named("X1"), 1024, K, 3).float()
    gradient = (x[:, :N] * 3).contiguous()
    statistics = site_of(x, torch.randn(N, K), gradient)
    site = LearnedSite("a", statistics).distribution("grad_weight")
    rows, inputs = site.rows(300, 2 * N, 4), site.weight(300, K, 4)
    assert torch.allclose(rows[2:, :N], inputs[2:, :N] * 3)
    assert torch.equal(rows[:, N:], rows[:, :N])
    assert not inputs[1].any() and not rows[0].any()
    for found, operand in ((inputs, statistics.input), (rows[:, :N], statistics.grad_output)):
        assert torch.equal(found.abs().amax(dim=0), operand.column_sizes.double())
    every, three_in_four = (site.rows(1024, N, seed)[2:] for seed in (0, 1))
    for found, count in ((every, 512), (three_in_four, 384)):
        real = found[found.any(dim=1)]
        assert len(real) == len(real.unique(dim=0)) == count
        assert len(found) + 2 == -(-(count + 2) // 128) * 128


@pytest.mark.parametrize("kind", ["zero sums", "pairs"])
def test_cancellation_within_batches_enlarges_errors(kind: str) -> None:
    """Rows of many batches do not: their product errs by 0.75 of what batches' do, or less."""
    generator = torch.Generator().manual_seed(5)

    def batch() -> tuple[Tensor, Tensor]:
        x, gradient = (torch.randn((1024, c), generator=generator) for c in (K, N))
        if kind == "zero sums":
            return x + 1.5, gradient - gradient.mean(dim=0)
        x[512:], gradient[512:] = -x[:512], gradient[:512] + 0.5 * gradient[512:]
        return x + 0.7, gradient

    layer = torch.nn.Linear(K, N, bias=False)
    with lokakern.Probe(layer, every=1) as probe:
        for _ in range(4):
            x, gradient = batch()
            layer(x).backward(gradient)
    found = replay("a", probe.sites()[""], seeds=(0,))
    for kernel, granularity in ((ROW, Granularity.ROW), (TENSOR, Granularity.TENSOR)):
        real = [true_error(g.t(), x.t(), granularity) for x, g in (batch() for _ in range(3))]
        mean = sum(real) / len(real)
        assert mean > 0.06
        assert of(found, "grad_weight", kernel).row_err == pytest.approx(mean, rel=0.15)
    site = probe.sites()[""]
    site.cancellations.zero_()  # as of a weight whose gradient nobody saw
    alone = of(replay("a", site, seeds=(0,)), "grad_weight", ROW).row_err
    assert alone < 0.8 * of(found, "grad_weight", ROW).row_err


def test_unpaired_operands_have_no_verdict() -> None:
    """A checkpoint that repeats several calls gives such gradients."""
    x, _, w = drawn("X1", N, K)
    site = site_of(x, w)
    keys = torch.rand(256, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    gradient = torch.randn(256, N)
    site.grad_output.add(gradient, gradient.double(), keys)
    (row,) = {r.rows for r in replay("a", site) if r.gemm == "grad_weight"}
    assert row == 0
    (verdict,) = (v for v in verdicts_of("a", site, replay("a", site)) if v.gemm == "grad_weight")
    assert verdict.safety == "undecided"
    assert all("0 rows were sampled" in c.reason for c in verdict.classes)


def test_kernels_are_compiled_before_replay_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All problems of all sites at once; where nothing is compiled, nothing is asked."""
    asked: list[tuple[set[Problem], Device, bool]] = []
    named: list[Sequence[str]] = []

    def prebuild(
        problems: Iterable[Problem], device: Device, only: Sequence[str], *, workers: int,
        again: bool,
    ) -> None:  # fmt: skip
        assert workers >= 1
        asked.append((set(problems), device, again))
        named.append(only)

    monkeypatch.setattr("lokakern.probe.replay.prebuild", prebuild)
    sites = [LearnedSite(name, seen("X3", n, norm="layer")[0]) for name, n in (("a", N), ("b", 64))]
    compile_ahead(sites)
    assert asked == []
    h200 = dispatcher.device_named("NVIDIA H200")
    monkeypatch.setattr("lokakern.probe.replay.current_device", lambda: h200)
    compile_ahead(sites)
    ((problems, device, again),) = asked
    assert device == h200 and not again
    assert {(p.op, p.n, p.k) for p in problems if p.op == "gemm_norm"} == {
        ("gemm_norm", N, K), ("gemm_norm", 64, K)
    }  # fmt: skip
    assert {N, 64} <= {p.n for p in problems} and K in {p.n for p in problems}
    assert not named.pop(), "all kernels"
    compile_ahead(sites, {"a": {"output": [GPU_ROW]}, "b": {}})
    problems, *_ = asked[1]
    assert named == [[GPU_ROW, f"{GPU_ROW}+cuda.norm_quantize"]]
    assert {(p.op, p.n, p.k) for p in problems} == {("gemm", N, K), ("gemm_norm", N, K)}


def test_only_the_kernels_of_a_product_are_replayed() -> None:
    """Of a way of which none of them is here, such as a GPU's, all that are."""
    site = LearnedSite("a", seen("X3")[0])
    every = replays.replay(site)
    assert replays.replay(site, only={"output": [ROW]}) == [of(every, "output", ROW)]
    found = replays.replay(site, only={"output": [GPU_ROW], "grad_input": [TENSOR]})
    assert found == [of(every, "output", ROW), of(every, "grad_input", TENSOR)]


def test_reports_compile_before_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(
        "lokakern.probe.replay.compile_ahead", lambda sites: done.extend(s.name for s in sites)
    )
    real = replays.replay

    def watched(site: LearnedSite, **options: Any) -> list[Replayed]:
        done.append(f"replay {site.name}")
        return real(site, **options)

    monkeypatch.setattr("lokakern.probe.replay.replay", watched)
    site = seen("X3", 32)[0]
    report = ProbeReport.of({"a": site, "b": site}, seeds=(0,))
    assert done == ["a", "b", "replay a", "replay b"]
    assert report.sites == ("a", "b")


def test_mean_shifts_and_accumulation_are_recorded() -> None:
    """Without a sign; float32 sums, which are emulated, count as promoted ones."""
    negative = site_of(-torch.rand(1024, K), torch.rand(N, K))  # whose output is negative
    found = replay("a", negative, seeds=(0, 1))
    row = of(found, "output", ROW)
    assert 0 < row.mean_shift <= row.mean_shift_upper < row.row_err
    assert row.accumulation == "float32" and row.way == "row" and row.is_everywhere
    block = of(found, "output", "torch.quantize_group+torch.emulated_block")
    assert block.way == "1x128 x 128x128" and block.mean_shift != row.mean_shift
    (shifted,) = (
        numerics.measure_errors(
            torch.full((4, 4), -0.9), torch.full((4, 4), -1.0, dtype=torch.float64)
        ),
    )
    assert shifted.mean_shift == pytest.approx(0.1)


def test_every_gemm_and_the_norm_after_it_are_replayed() -> None:
    site, _, _ = seen("X13", norm="layer")
    found = replay("a", site, seeds=(0,))
    assert {r.gemm for r in found} == set(GEMMS)
    assert {r.norm for r in found} == {"", "layer", "block_rms(96)"}
    assert [r for r in found if r.reason] == []
    before, after, block = (
        of(found, "output", "torch.quantize_row+torch." + kernel, norm).row_err
        for kernel, norm in (
            ("emulated_row", ""), ("norm_emulated_row", "layer"),
            ("norm_emulated_row", "block_rms(96)"),
        )
    )  # fmt: skip
    assert before < 0.01 and block < 0.01 and after > 5 * before
    assert sums_over_samples(problem_of(site, "grad_weight"))
    assert problem_of(site, "grad_input").shape == (256, K, N)
    assert block_norm(1024) == "block_rms(256)" and block_norm(720) == "block_rms(240)"


def test_without_gradients_only_the_output_is_replayed() -> None:
    x, _, w = drawn("X1", N, K)
    assert {r.gemm for r in replay("a", site_of(x, w), seeds=(0,))} == {"output"}
    bare = SiteStatistics(N, K, torch.device("cpu"))
    assert replay("a", bare) == []


def test_replayed_rows_are_stored_under_the_name_of_the_site(tmp_path: Path) -> None:
    site, _, _ = seen("X2")
    path = tmp_path / "rows.sqlite"
    found = replay("layers.3.mlp", site, seeds=(0, 1), database=path)
    digest = LearnedSite("layers.3.mlp", site).digest
    facts = load_snapshot([path])
    rows = {d.name: (d.parameters, d.realistic) for d in facts.distributions}
    wanted = f'{{"statistics":"{digest}"}}'
    assert rows == {f"site:layers.3.mlp/{gemm}": (wanted, False) for gemm in GEMMS}
    with sqlite3.connect(path) as connection:
        (count,) = connection.execute("SELECT count(*) FROM accuracy").fetchone()
    of_samples = sum(r.gemm == "grad_weight" for r in found)
    assert count == len(found) + of_samples  # two seeds of these alone
    dispatcher.use_snapshot(facts)
    try:
        choice = dispatcher.dispatch(
            "gemm", (2048, N, K), 0.06, distribution="site:layers.3.mlp/output"
        )
        assert "judged on site:layers.3.mlp/output only" in choice.explain()
    finally:
        dispatcher.use_snapshot(None)


@pytest.fixture
def broken() -> Iterator[str]:
    """A row-scaled kernel that loses rows whose largest magnitude is under 1/10."""
    right = KERNELS[ROW]

    def launch(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, workspace: object) -> None:
        right.launch(a, b, out, bias, right.workspace(a, b))
        out[a.abs().amax(dim=1) < 0.1] = 0.0

    register(
        "gemm", name="broken", granularity=Granularity.ROW, b_granularity=Granularity.ROW,
        accumulation="float32",
    )(launch)  # fmt: skip
    name = next(name for name in KERNELS if name.endswith(".broken"))
    yield name
    del KERNELS[name]


def test_replay_exposes_kernels_broken_for_unusual_operands(broken: str) -> None:
    hidden = replay("a", seen("X1")[0], seeds=(0,))
    assert of(hidden, "output", broken).reason == ""
    assert of(hidden, "output", broken).row_err < 0.04
    found = replay("a", seen("X14")[0], seeds=(0,))
    exposed = of(found, "output", broken)
    assert exposed.reason.startswith("wrong: kernel_err")
    assert exposed.row_err_upper == float("inf")
    assert of(found, "output", ROW).reason == ""


def test_formats_of_a_gpu_that_nobody_measured_are_judged_by_the_operands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    site, held_out, w = seen("X2")
    report = ProbeReport.of({"a": site}, device="b200", seeds=(0,), budget=0.06)
    assert report.device == "NVIDIA B200"
    report.table()
    assert "within row_err 0.06, in bfloat16, no times of NVIDIA B200" in capsys.readouterr().out
    assert "no times of NVIDIA B200" in page_of(report.content())
    assert "not timed" in repr(report) and "worth it" not in repr(report)
    output = report.verdicts[0]
    assert {"nvfp4", "mxfp4", "1x32", "row", "int8", "int4-weight"} <= {
        c.scales for c in output.classes
    }
    assert (output.safety, output.speed, output.bf16_us) == ("safe", "", None)
    for name, safety in (("nvfp4", "unsafe"), ("int8", "safe")):
        form = FORMATS[name]
        left, right = (form.quantized_as("x", x.bfloat16()).data for x in (held_out, w))
        exact = held_out.bfloat16().double() @ w.bfloat16().double().t()
        real = numerics.measure_errors((left @ right.t()).bfloat16(), exact).row_err
        judged = output.of(name)
        assert judged is not None
        assert judged.row_err == pytest.approx(real, rel=0.1)
        assert (judged.safety, judged.kernel, judged.latency_us) == (safety, "", None)
    for verdict in report.verdicts[1:]:  # gradients, of whose operands neither is kept
        assert not any(c.scales.endswith("weight") for c in verdict.classes)
        assert verdict.of("nvfp4") is not None


def test_a_gpu_without_fp8_gets_no_verdict_on_it() -> None:
    site, _, _ = seen("X1", norm="layer")
    report = ProbeReport.of({"a": site}, device="A100", seeds=(0,))
    output = report.verdicts[0]
    assert output.norm == "layer"
    assert {c.scales for c in output.classes} == {"int8", "int8-weight", "int4-weight"}
    assert output.best == "int8-weight"  # errors after the norm: bfloat16 rows, weights of 8 bits


def test_errors_of_formats_are_no_rows(tmp_path: Path) -> None:
    site, _, _ = seen("X1")
    place = tmp_path / "probe.sqlite"
    found = replay("a", site, seeds=(0,), database=place, formats=[FORMATS["int8"]])
    assert any(r.format == "int8" for r in found)
    with sqlite3.connect(str(place)) as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM kernel")}
    assert names and not any(name.startswith("emulated") for name in names)


def test_an_unknown_gpu_is_refused() -> None:
    site, _, _ = seen("X1")
    with pytest.raises(DeviceError, match="'NVIDIA X9' is in no database"):
        ProbeReport.of({"a": site}, device="NVIDIA X9")
