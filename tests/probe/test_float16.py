"""Probe on models that multiply in float16: dtypes of sites, replays in it, and loss scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lokakern import numerics
from lokakern.errors import FormatError
from lokakern.probe import files
from lokakern.probe.problems import Replayed
from lokakern.probe.replay import FITTING, LearnedSite, replay
from lokakern.probe.report import ProbeReport, page_of
from lokakern.probe.session import Probe
from lokakern.probe.statistics import SiteStatistics
from lokakern.types import Format, Granularity
from lokakern.workloads.distributions import distribution_named, draw_rows
from tests.support.probe_sites import drawn, site_of

HALF = torch.float16
N, K = 96, 128
ROW = "torch.quantize_row+torch.emulated_row"
TENSOR = "torch.quantize_tensor+torch.emulated_tensor"
WHERE = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lokakern.problems.ACCURACY_ROWS", 384)


def probed(
    dtype: torch.dtype, half: torch.dtype, *, compiles: bool = False, where: str = "cpu"
) -> dict[str, SiteStatistics]:
    """Sites of a model that is called under autocast if its parameters are not in ``half``."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 32)).to(where, dtype)
    with Probe(model, every=1) as probe:
        call: Any = torch.compile(model, backend="aot_eager") if compiles else model
        x = torch.randn(256, K, generator=torch.Generator().manual_seed(1)).to(where, dtype)
        with torch.autocast(where, half, enabled=dtype is not half):
            call(x).float().square().sum().backward()
    return probe.sites()


def half_site(gradient: Tensor | None = None) -> tuple[SiteStatistics, Tensor, Tensor]:
    """Statistics of a site in float16, rows that it did not see, and the weight."""
    x, held_out, w = drawn("X1", N, K)
    if gradient is None:
        gradient = draw_rows(distribution_named("X12"), 1024, N, 5).float()
    return site_of(x, w, gradient).in_dtype(HALF), held_out, w


def of(found: list[Replayed], gemm: str, kernel: str) -> Replayed:
    (one,) = (r for r in found if (r.gemm, r.kernel) == (gemm, kernel))
    return one


# ---- dtypes of sites ----


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("compiles", [False, True])
def test_sites_are_judged_in_the_dtype_of_their_outputs(compiles: bool, where: str) -> None:
    for dtype, half, expected in (
        (HALF, HALF, Format.FLOAT16),
        (torch.float32, HALF, Format.FLOAT16),
        (torch.float32, torch.bfloat16, Format.BFLOAT16),
        (torch.float32, torch.float32, Format.BFLOAT16),
    ):
        sites = probed(dtype, half, compiles=compiles, where=where)
        assert {site.half for site in sites.values()} == {expected}
    report = ProbeReport.of({"0": sites["0"].in_dtype(HALF), "2": sites["2"]}, seeds=(0,))
    assert {v.site: v.dtype for v in report} == {"0": "float16", "2": "bfloat16"}
    assert report.dtypes == "float16 and bfloat16"
    assert all(v.safety == "safe" for v in report)


def test_ranks_and_sessions_agree_on_the_dtype(tmp_path: Path) -> None:
    first, second = site_of(*drawn("X1", N, K)[::2]), half_site()[0]
    second.merge(first)
    assert second.half is Format.FLOAT16
    first.merge(second)
    assert first.half is Format.FLOAT16
    files.save(tmp_path / "probe.bin", {"a": first, "b": site_of(*drawn("X1", N, K)[::2])})
    found = files.load(tmp_path / "probe.bin")
    assert [site.half for site in found.values()] == [Format.FLOAT16, Format.BFLOAT16]


def test_a_report_says_its_dtype_and_takes_another(capsys: pytest.CaptureFixture[str]) -> None:
    site, _, _ = half_site()
    report = ProbeReport.of({"a": site}, seeds=(0,))
    assert repr(report).endswith("within row_err 0.06, in float16)")
    report.table()
    assert "within row_err 0.06, in float16" in capsys.readouterr().out
    content = report.content()
    assert content["dtypes"] == "float16" and content["verdicts"][0]["dtype"] == "float16"
    assert "0.06, in float16." in page_of(content)
    del content["dtypes"]  # of an earlier version
    assert "0.06, in bfloat16." in page_of(content)
    other = ProbeReport.of({"a": site}, seeds=(0,), dtype=torch.bfloat16)
    assert other.dtypes == "bfloat16" and site.half is Format.FLOAT16
    errors = [v.bf16_err for r in (report, other) for v in r if v.gemm == "output"]
    assert errors[0] < 3e-4 < 1e-3 < errors[1]
    with pytest.raises(FormatError, match=r"dtype is torch\.float32; expected torch\.bfloat16 or"):
        ProbeReport.of({"a": site}, dtype=torch.float32)


# ---- replays ----


def test_replay_predicts_the_error_of_rows_that_were_held_out() -> None:
    """Within 10 %, and that of the unquantized product is the rounding of float16."""
    site, held_out, w = half_site()
    found = replay(LearnedSite("a", site), seeds=(0,))
    a, b = held_out.to(HALF).contiguous(), w.to(HALF).contiguous()
    for kernel, granularity in ((ROW, Granularity.ROW), (TENSOR, Granularity.TENSOR)):
        parts = [numerics.dequantize(numerics.quantize(o, Format.E4M3FN, granularity))
                 for o in (a, b)]  # fmt: skip
        out = (parts[0] @ parts[1].t()).to(HALF)
        real = numerics.measure_errors(out, a.double() @ b.double().t()).row_err
        assert of(found, "output", kernel).row_err == pytest.approx(real, rel=0.1)
    assert 1e-4 < of(found, "output", "torch.bf16").row_err < 3e-4


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("scale", [2.0**-20, 2.0**-8, 1.0, 2.0**8, 2.0**15])
def test_the_scale_of_a_loss_changes_no_error(scale: float) -> None:
    """At the largest, products of gradients overflow float16; at the least all are subnormal."""
    gradient = draw_rows(distribution_named("X12"), 1024, N, 5).float()
    gradient = gradient / gradient.abs().max()
    expected, found = (
        replay(LearnedSite("a", half_site(gradient * by)[0]), seeds=(0,)) for by in (1.0, scale)
    )
    if scale > 1.0:
        w = drawn("X1", N, K)[2].abs().sum(dim=0).max()
        assert scale * w > Format.FLOAT16.maximum or scale < 2.0**15
    for kernel in (ROW, TENSOR, "torch.bf16"):
        for gemm in ("grad_input", "grad_weight"):
            one, other = of(found, gemm, kernel), of(expected, gemm, kernel)
            assert not one.reason and one.row_err == other.row_err
            assert one.row_err_upper == other.row_err_upper


def test_products_of_gradients_fit_at_the_scale_of_a_replay() -> None:
    site, _, _ = half_site(torch.full((1024, N), 60000.0))
    learned = LearnedSite("a", site)
    y, weight_t = learned._rows("grad_output", 384, N, 0), drawn("X1", N, K)[2].t().double()
    assert FITTING / 64 < float((y @ weight_t.t()).abs().max().clamp_min(float(y.max()))) <= FITTING
    left, right = learned._fitting_pairs(512, N, 0), learned._paired(0, 512, K, 0)
    assert 1.0 < float((left.t() @ right).abs().max()) <= FITTING


def test_outputs_that_overflow_are_unsafe_and_rows_that_were_scaled_up_are_none() -> None:
    x, _, w = drawn("X1", N, K)
    w = w * 8.0
    site = site_of(x * 100.0, w).in_dtype(HALF)
    site.input.largest.fill_(60000.0)  # of a row that no sample has, such as of one large element
    found = replay(LearnedSite("a", site), seeds=(0,))
    assert not of(found, "output", ROW).reason and of(found, "output", ROW).row_err < 0.06
    rows, wide = LearnedSite("a", site)._rows("input", 384, K, 0), w.double().t()
    assert float((rows @ wide).abs().max()) == pytest.approx(FITTING)
    wider = LearnedSite("a", site.in_dtype(torch.bfloat16))._rows("input", 384, K, 0)
    assert float((wider @ wide).abs().max()) > 65504
    # Rows that were seen.
    sites = {"a": site_of(x * 4000.0, w)}
    safeties = [[v.safety for v in ProbeReport.of(sites, seeds=(0,), dtype=dtype)]
                for dtype in (HALF, torch.bfloat16)]  # fmt: skip
    assert safeties == [["unsafe"], ["safe"]]
    found = replay(LearnedSite("a", sites["a"].in_dtype(HALF)), seeds=(0,))
    assert "outputs overflow float16, up to 65504" in of(found, "output", ROW).reason


def test_inputs_beyond_float16_are_unsafe() -> None:
    """As of a model that ran in bfloat16, and a weight that makes outputs small."""
    x, _, w = drawn("X1", N, K)
    gradient = draw_rows(distribution_named("X12"), 1024, N, 5).float()
    site = site_of(x * 1e5, w * 1e-4, gradient).in_dtype(HALF)
    found = replay(LearnedSite("a", site), seeds=(0,))
    for gemm in ("output", "grad_weight"):
        assert of(found, gemm, ROW).reason.startswith("inputs up to ")
    assert not of(found, "grad_input", ROW).reason
    verdicts = {v.gemm: v for v in ProbeReport.of({"a": site}, seeds=(0,))}
    assert verdicts["output"].safety == "unsafe" and verdicts["grad_input"].safety == "safe"
    assert "overflow float16, up to 65504" in verdicts["output"].classes[0].reason


def test_changes_of_a_loss_are_of_operands_in_float16() -> None:
    torch.manual_seed(0)
    model = nn.Linear(K, N, bias=False).to(HALF).requires_grad_(False)
    seen: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        seen.append(model(x))
        return seen[-1].float().square().mean()

    batches = [torch.randn(64, K).to(HALF) for _ in range(2)]
    Probe(model).loss_changes(loss, batches)
    parts = [
        numerics.dequantize(numerics.quantize(o, Format.E4M3FN, Granularity.ROW))
        for o in (batches[0], model.weight.detach())
    ]
    assert torch.equal(seen[1], (parts[0] @ parts[1].t()).to(HALF))
