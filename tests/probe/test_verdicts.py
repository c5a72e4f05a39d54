"""Verdicts: planted hazards are found for the right kernels, and times come from a file."""

from __future__ import annotations

import functools
import json
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lokakern
from lokakern import numerics
from lokakern.errors import UnknownNameError, UnsupportedError
from lokakern.probe import fingerprint
from lokakern.probe.problems import Replayed
from lokakern.probe.report import Judged, ProbeReport, page_of
from lokakern.probe.session import Probe
from lokakern.probe.statistics import SiteStatistics
from lokakern.probe.verdicts import Verdict, verdicts_of
from lokakern.problems import make_problem
from lokakern.selection import dispatcher
from lokakern.selection.dispatcher import OUTSIDE
from lokakern.types import ErrorBudget, Format, Granularity
from lokakern.workloads.distributions import distribution_named, draw_rows
from tests.support.measurements import BF16, Book, time
from tests.support.measurements import ROW as ROW_KERNEL
from tests.support.probe_sites import CPU, drawn, site_of

GROUP_KERNEL = "cuda.quantize_group+cuda.scaled_gemm_group"
H200 = "NVIDIA H200"
D, ROWS = 128, 512


@pytest.fixture(autouse=True, scope="module")
def few_rows() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr("lokakern.problems.ACCURACY_ROWS", 384)
    yield
    patch.undo()


class Spread(nn.Module):
    """Scales rows over 1e7."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(len(x))
        factor = 10 ** (7 * torch.rand((len(x), 1), generator=generator) - 3.5)
        return x * factor


class Model(nn.Module):
    """Ten layers, of which three are hazards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for place in range(10):
            if place == 5:
                layers.append(Spread())
            if place == 8:
                layers.append(nn.Sigmoid())
            norm = nn.LayerNorm(D) if place in (3, 8) else nn.RMSNorm(D)
            layers += [nn.Linear(D, D, bias=place % 2 == 0), norm]
        self.m = nn.Sequential(*layers)
        with torch.no_grad():
            # The function stays as it was: what the norm makes small the next weight makes large.
            self.m[1].weight[7] /= 3e6
            self.m[2].weight[:, 7] *= 3e6
            self.m[18].weight += 4 / D**0.5  # all outputs share a mean, which LayerNorm subtracts

    def forward(self, x: Tensor) -> Tensor:
        return self.m(x)


RESCALED, SPREAD, SHARED = "m.2", "m.11", "m.18"


def inputs(seed: int) -> Tensor:
    return draw_rows(distribution_named("X2"), 4 * ROWS, D, 0).float()[seed * ROWS :][:ROWS]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def probe(model: Model) -> Probe:
    with Probe(model, every=1) as probe:
        for step in range(3):
            model(inputs(step).requires_grad_()).square().mean().backward()
    return probe


@pytest.fixture(scope="module")
def report(probe: Probe) -> ProbeReport:
    return probe.report(seeds=(0,))


def verdict(report: ProbeReport, site: str, gemm: str = "output") -> Verdict:
    (found,) = (v for v in report if (v.site, v.gemm) == (site, gemm))
    return found


def safety(report: ProbeReport, site: str, scales: str) -> str:
    found = verdict(report, site).of(scales)
    assert found is not None
    return found.safety


def test_model_has_the_planted_hazards(report: ProbeReport) -> None:
    assert len(report.sites) == 10 and {RESCALED, SPREAD, SHARED} < set(report.sites)
    assert len(report.verdicts) == 30


def test_a_rescaled_column_is_unsafe_for_row_and_tensor_scales(report: ProbeReport) -> None:
    assert safety(report, RESCALED, "tensor") == safety(report, RESCALED, "row") == "unsafe"
    found = verdict(report, RESCALED)
    assert found.safety == "unsafe" and found.best == ""
    assert found.bf16_err < 0.01
    row = found.of("row")
    assert row is not None and row.row_err > 0.5


def test_rows_spread_widely_are_unsafe_for_tensor_scales_alone(report: ProbeReport) -> None:
    assert safety(report, SPREAD, "tensor") == "unsafe"
    assert safety(report, SPREAD, "row") == "safe"
    assert verdict(report, SPREAD).safety == "safe"
    assert verdict(report, SPREAD).change == "row instead of tensor scales"


def test_a_common_mean_is_unsafe_after_layernorm_alone(report: ProbeReport) -> None:
    found = verdict(report, SHARED)
    assert (found.norm, found.safety) == ("layer", "unsafe")
    assert found.change == "BlockNorm instead of LayerNorm"
    assert any("LayerNorm subtracts means of" in note for note in found.notes)


def test_no_safe_layer_is_called_unsafe(report: ProbeReport) -> None:
    for v in report:
        if v.site not in (RESCALED, SPREAD, SHARED):
            assert v.safety == "safe", v
            assert all(c.safety == "safe" for c in v.classes if c.scales in ("row", "1x128")), v


def test_verdicts_agree_with_held_out_rows(model: Model, report: ProbeReport) -> None:
    """The true error of every layer, after its norm, on rows that no probe saw."""
    x = inputs(3)
    compared = 0
    for place, module in enumerate(model.m):
        y = module(x)
        if isinstance(module, nn.Linear):
            norm = (
                torch.nn.functional.layer_norm
                if isinstance(model.m[place + 1], nn.LayerNorm)
                else torch.nn.functional.rms_norm
            )
            a, b = x.detach().bfloat16(), module.weight.detach().bfloat16()
            exact = norm(a.double() @ b.double().t(), (D,))
            for scales in (Granularity.TENSOR, Granularity.ROW):
                left, right = (numerics.quantize(o, Format.E4M3FN, scales) for o in (a, b))
                sums = numerics.dequantize(left).double() @ numerics.dequantize(right).double().t()
                error = numerics.measure_errors(norm(sums, (D,)), exact).row_err
                wanted = "safe" if error <= 0.06 else "unsafe"
                assert safety(report, f"m.{place}", scales.value) == wanted, (place, scales, error)
                compared += 1
        x = y
    assert compared == 20


def test_gradient_errors_agree_with_held_out_rows(model: Model, report: ProbeReport) -> None:
    """Against float64 products: within 10 %, of a weight's gradient 30 %, and the same verdict.

    Not of the last layer, whose gradient through a norm under a sum of squares is rounding alone.
    """
    linears = {f"m.{i}": m for i, m in enumerate(model.m) if isinstance(m, nn.Linear)}
    seen: list[tuple[Tensor, Tensor]] = []
    handles = [m.register_forward_hook(lambda _m, args, y: seen.append((args[0].detach(), y)))
               for m in linears.values()]  # fmt: skip
    loss = model(inputs(3)).square().mean()
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(loss, [y for _, y in seen])
    compared = 0
    for name, gradient, (x, _) in list(zip(linears, gradients, seen, strict=True))[:-1]:
        g, w, x = (o.detach().bfloat16() for o in (gradient, linears[name].weight, x))
        for gemm, a, b, allowed in (("grad_input", g, w, 0.1), ("grad_weight", g.t(), x, 0.3)):
            exact = a.double() @ b.double()
            for scales in (Granularity.TENSOR, Granularity.ROW):
                left, right = (
                    numerics.dequantize(numerics.quantize(o.contiguous(), Format.E4M3FN, scales))
                    for o in (a, b.t())
                )
                error = numerics.measure_errors(left.double() @ right.t().double(), exact).row_err
                found = verdict(report, name, gemm).of(scales.value)
                assert found is not None
                assert found.row_err == pytest.approx(error, rel=allowed), (name, gemm, scales)
                assert found.safety == ("safe" if error <= 0.06 else "unsafe")
                compared += 1
    assert compared == 36


def test_reports_print_tables_and_json(
    report: ProbeReport, capsys: pytest.CaptureFixture[str]
) -> None:
    safe = sum(v.safety == "safe" for v in report)
    begin = f"ProbeReport(30 GEMMs of 10 sites, {safe} safe, "
    end = ", within row_err 0.06, in bfloat16)"
    assert repr(report).startswith(begin) and repr(report).endswith(end)
    report.table()
    out = capsys.readouterr().out
    assert RESCALED in out and "BlockNorm instead of LayerNorm" in out
    content = json.loads(report.to_json())
    assert (content["version"], content["budget"]) == (1, {"row_err": 0.06})
    assert len(content["verdicts"]) == 30
    assert content["verdicts"][0]["classes"][0]["safety"] in ("safe", "unsafe", "undecided")
    assert report.saved_share is None and content["saved_share"] is None


def test_drifted_sites_are_named(probe: Probe, report: ProbeReport, model: Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report.drift(probe.sites()) == {}
    with Probe(model) as later:
        model(inputs(1) * torch.logspace(0, 4, D)).sum().backward()
    with pytest.warns(UserWarning, match="moved"):
        found = report.drift(later.sites())
    assert "column_spread" in found["m.0/output"]


# ---- by hand ----


def replayed(
    gemm: str = "output", *, row_err: float = 0.04, upper: float | None = None, norm: str = "",
    scales: Granularity = Granularity.ROW, reason: str = "", accumulation: str = "promoted",
    shift: float = 0.0, rows: int = 512,
) -> Replayed:  # fmt: skip
    top = row_err if upper is None else upper
    errors = (row_err, top, top, top, shift, shift)
    return Replayed(gemm, norm, "kernel", scales, scales, *errors, rows, reason, accumulation)


def shaped(n: int, k: int, m: int, **options: object) -> SiteStatistics:
    site = SiteStatistics(n, k, CPU, **options)  # type: ignore[arg-type]
    x = torch.ones(100, k)
    for operand, columns in ((site.input, k), (site.grad_output, n)):
        x = torch.ones(100, columns)
        operand.add(x, x.double(), torch.rand(100, dtype=torch.float64))
    site.sizes[m] = 1
    return site


def only(found: tuple[Verdict, ...]) -> Verdict:
    (one,) = found
    return one


@pytest.mark.parametrize(
    ("row_err", "upper", "wanted"),
    [(0.04, 0.05, "safe"), (0.059, 0.061, "undecided"), (0.07, 0.08, "unsafe")],
)
def test_budgets_within_the_interval_are_undecided(
    row_err: float, upper: float, wanted: str
) -> None:
    found = only(verdicts_of("a", shaped(64, 64, 9), [replayed(row_err=row_err, upper=upper)]))
    assert (found.safety, found.speed) == (wanted, "")
    assert bool(found.classes[0].reason) == (wanted != "safe")
    why = ("row: row_err 0.059, at most 0.061 > 0.06",)  # the table shows the lesser error alone
    assert found.notes == (why if wanted == "undecided" else ())


def test_notes_tell_when_bfloat16_exceeds_the_budget() -> None:
    errors = [replayed(row_err=0.2), replayed(scales=Granularity.NONE, row_err=0.07)]
    found = only(verdicts_of("a", shaped(64, 64, 9), errors))
    assert found.notes == ("bfloat16 itself has a row_err of 0.07 > 0.06",)


def test_notes_name_the_input_column_that_stands_out() -> None:
    """Where FP8 is not safe; of a gradient of the input no column is read."""
    x = torch.randn(256, 9, generator=torch.Generator().manual_seed(0))
    x[:, 4] *= 1000
    site = site_of(x, torch.randn(64, 9), torch.randn(256, 64))
    errors = [replayed(row_err=0.2), replace(replayed(row_err=0.2), gemm="grad_input")]
    output, grad_input = verdicts_of("a", site, errors)
    assert len(output.notes) == 1
    assert re.fullmatch(
        r"input column 4 is \S+ times as large as the median one: normalize it", output.notes[0]
    )
    assert grad_input.notes == ()
    assert only(verdicts_of("a", site, [replayed(row_err=0.02)])).notes == ()
    site.input.column_sizes.zero_()
    assert verdicts_of("a", site, errors)[0].notes == ()


def test_few_rows_are_undecided_and_wrong_kernels_are_ignored() -> None:
    few = only(verdicts_of("a", shaped(64, 64, 9), [replayed(rows=63)]))
    assert few.safety == "undecided"
    assert few.classes[0].reason == "63 rows were sampled; expected at least 64"
    wrong = replayed(row_err=float("inf"), reason="wrong: kernel_err 90 > 1")
    for order in ([wrong, replayed()], [replayed(), wrong]):
        assert only(verdicts_of("a", shaped(64, 64, 9), order)).safety == "safe"
    found = only(verdicts_of("a", shaped(64, 64, 9), [wrong]))
    assert (found.safety, found.classes[0].reason) == ("unsafe", "wrong: kernel_err 90 > 1")


def test_budgets_may_limit_the_99th_percentile() -> None:
    site, found = shaped(64, 64, 9), [replayed(row_err=0.04, upper=0.05)]
    assert only(verdicts_of("a", site, found, budget=ErrorBudget(row_p99=0.045))).safety == "unsafe"
    near = [replace(found[0], row_p99=0.04)]  # and at most 0.05
    tight = ErrorBudget(row_p99=0.045)
    assert only(verdicts_of("a", site, near, budget=tight)).safety == "undecided"
    with pytest.raises(UnsupportedError, match="judges by row_err and row_p99 and mean_shift"):
        verdicts_of("a", site, found, budget=ErrorBudget(sqnr_db=20.0))
    shifted, tight = [replayed(shift=0.01)], ErrorBudget(row_err=0.06, mean_shift=1e-3)
    assert only(verdicts_of("a", site, shifted, budget=tight)).safety == "unsafe"
    assert only(verdicts_of("a", site, found, budget=tight)).safety == "safe"


def test_classes_have_the_largest_errors_of_their_kernels() -> None:
    """Whichever of them dispatch takes in the end."""
    site, tight = shaped(64, 64, 9), ErrorBudget(row_err=0.06, mean_shift=1e-3)
    errors = [replayed(row_err=0.0401), replayed(row_err=0.04, shift=0.05)]
    for order in (errors, errors[::-1]):
        found = only(verdicts_of("a", site, order, budget=tight))
        assert found.safety == "unsafe" and "mean_shift 0.05 > 0.001" in found.classes[0].reason
        assert (found.classes[0].row_err, found.classes[0].mean_shift) == (0.0401, 0.05)


def test_unpromoted_sums_are_judged_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpromoted sums are judged by their own errors, on GPUs of the kind that replayed them."""
    site = shaped(4096, 4096, 8192)
    bad = [replayed(), replayed(accumulation="fast", row_err=0.2)]
    good = [replayed(), replayed(accumulation="fast"), replayed(accumulation="promoted+fbgemm")]
    h200 = dispatcher.device_named(H200)
    monkeypatch.setattr("lokakern.probe.verdicts.current_device", lambda: h200)
    found = only(verdicts_of("a", site, bad, device=H200))
    assert (found.safety, found.best) == ("safe", "row")
    assert [(c.scales, c.safety) for c in found.classes] == [
        ("row", "safe"),
        ("row fast", "unsafe"),
    ]
    found = only(verdicts_of("a", site, good, device=H200))
    assert [c.scales for c in found.classes] == ["row", "row fast", "row fbgemm"]
    row, fast, own = found.classes
    assert found.best == "row fast" and fast.kernel.endswith("_fast")
    assert row.latency_us is not None and fast.latency_us is not None
    assert fast.latency_us < row.latency_us and not row.kernel.endswith("_fast")
    assert [c.architecture for c in (row, fast, own)] == ["", "sm_90", "sm_90"]
    monkeypatch.setattr(
        "lokakern.probe.verdicts.current_device", lambda: replace(h200, architecture="sm_100")
    )
    found = only(verdicts_of("a", site, good, device=H200))
    assert [c.scales for c in found.classes] == ["row"]


def test_times_come_from_a_shipped_file(capsys: pytest.CaptureFixture[str]) -> None:
    """The H200's: FP8 is faster at 8192 x 4096 x 4096, and slower at 2048 x 512 x 512."""
    errors = [replayed(scales=s) for s in (Granularity.ROW, Granularity.TENSOR)]
    errors.append(replayed(scales=Granularity.NONE, row_err=0.002))
    large = only(verdicts_of("a", shaped(4096, 4096, 8192), errors, device=H200))
    assert (large.safety, large.speed) == ("safe", "fast") and large.is_worth_it
    best = large.of(large.best)
    assert best is not None and best.latency_us is not None and large.bf16_us is not None
    assert large.saved_us == large.bf16_us - best.latency_us > 0
    assert large.bf16_err == 0.002
    choice = lokakern.dispatch("gemm", (8192, 4096, 4096), None, device=H200)
    assert large.bf16_us == choice.latency_us
    small = only(verdicts_of("a", shaped(512, 512, 2048), errors, device=H200))
    assert (small.safety, small.speed, small.saved_us) == ("safe", "slow", 0.0)
    unknown = only(verdicts_of("a", shaped(500, 516, 2048), errors, device=H200))
    assert (unknown.speed, unknown.bf16_us) == ("", None)
    untimed = 8192 * 4097 * 4095
    share = 8192 * 4096 * 4096 / (8192 * 4096 * 4096 + untimed)
    both = ProbeReport([Judged(large, {}, 1), Judged(replace(large, shape=(8192, 4097, 4095),
                        bf16_us=None), {}, 1)], ErrorBudget(row_err=0.06), H200)  # fmt: skip
    assert f"of the GEMMs that were timed, {share:.0%} of the FLOPs, in bf" in both.summary
    command = f'`explain --probe FILE --training --device "{H200}"`'
    assert f"of the others {command} predicts times" in both.summary
    none = ProbeReport([Judged(unknown, {}, 1)], ErrorBudget(row_err=0.06), H200)
    assert none.summary == f"{H200}: none of these sizes was timed; {command} predicts them"
    none.table()
    out = capsys.readouterr().out
    assert none.summary in out and "no times" not in out + page_of(none.content())
    assert ", not timed, within" in repr(none) and "2 worth it on" in repr(both)
    alone = ProbeReport([Judged(large, {}, 1)], ErrorBudget(row_err=0.06), H200)
    assert alone.summary.endswith("of the time of these GEMMs in bfloat16 would be saved")


def test_unsafe_weight_gradients_stay_in_bf16() -> None:
    errors = [replayed("grad_weight", row_err=0.2)]
    found = only(verdicts_of("a", shaped(64, 64, 256), errors))
    assert (found.safety, found.change) == ("unsafe", "weight gradient in bf16")


# ---- fingerprints ----


@pytest.mark.parametrize("name", ["X1", "X5", "X6", "X7", "X9", "X12", "X13", "X14"])
def test_sites_map_to_their_source_distribution(name: str) -> None:
    x, _, w = drawn(name, 256, 256, seed=17)
    found = fingerprint.fingerprint_of(site_of(x, w), "output")
    assert fingerprint.outside(found) == ""
    assert fingerprint.nearest(found) == name


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are looked up where a file has them."""
    monkeypatch.setattr("lokakern.problems.ACCURACY_ROWS", 2048)


def test_cancelling_sums_are_outside_the_hull() -> None:
    """Inputs N(2, 1) under weight rows that sum to zero err twice as much as the nearest."""
    generator = torch.Generator().manual_seed(3)
    w = torch.randn((96, 128), generator=generator) / 128**0.5
    x = torch.randn((1024, 128), generator=generator) + 2
    harmless, zero_sums = (
        fingerprint.fingerprint_of(site_of(x, weight, 1e-3 * x[:, :96]), "output")
        for weight in (w, w - w.mean(dim=1, keepdim=True))
    )
    assert fingerprint.outside(harmless) == ""
    assert zero_sums["cancellation"] == pytest.approx(0.5 * math.log2(5), abs=0.05)
    assert fingerprint.outside(zero_sums).startswith("cancellation 1.18 is outside 0 to 0.05")
    assert fingerprint.moved(harmless, zero_sums).startswith("cancellation moved from")
    assert fingerprint.moved(harmless, {**harmless, "cancellation": 0.3}) == ""
    site = site_of(x, w, 1e-3 * x[:, :96])
    for gemm in ("grad_input", "grad_weight"):
        assert fingerprint.fingerprint_of(site, gemm)["cancellation"] < 0.1
    site.cancellations += torch.tensor([16.0, 1.0])
    assert fingerprint.fingerprint_of(site, "grad_weight")["cancellation"] == 2.0


@pytest.mark.usefixtures("stored")
def test_reports_can_be_passed_to_dispatch(report: ProbeReport) -> None:
    harmless = report["m.4"]
    assert set(harmless) <= set(lokakern.types.REALISTIC_DISTRIBUTIONS)
    ask = functools.partial(lokakern.dispatch, "gemm", (8192, 4096, 4096), 0.06, device=H200)
    choice = ask(distribution=harmless)
    assert choice.kernel == ask(distribution=tuple(harmless)).kernel
    assert choice.kernel != "torch.bf16"
    assert f"judged on {', '.join(harmless)} only" in choice.explain()
    with pytest.raises(UnknownNameError, match="no site 'nobody'"):
        report["nobody"]


@pytest.mark.usefixtures("stored")
def test_dispatch_warns_and_takes_bf16_outside_the_hull(report: ProbeReport) -> None:
    with pytest.warns(UserWarning, match=r"like no benchmarked distribution.*weight_columns"):
        rescaled = report[RESCALED]
    (name,) = rescaled
    assert name.startswith(f"{OUTSIDE}: {RESCALED}/output: ")
    choice = lokakern.dispatch("gemm", (8192, 4096, 4096), 0.06, distribution=rescaled, device=H200)
    assert choice.kernel == "torch.bf16"
    assert f"error not measured on {name}" in choice.explain()
    assert "weight_columns" in choice.explain()
    with pytest.warns(UserWarning, match="m is like no"):
        (name,) = report["m"]  # every site of it
    assert name.startswith(OUTSIDE)


def test_the_table_tells_what_was_unusual_in_safe_operands(report: ProbeReport) -> None:
    notes = {(row["site"], row["gemm"]): row["notes"] for row in report.rows()}
    words = notes[RESCALED, "output"]
    assert words.startswith("seen: column_spread 21.8, weight_rows ")
    assert words.endswith("; judged on its own rows")
    assert notes["m.4", "output"] == ""
    wide = {"row_spread": 0.5, "column_spread": 10.4}  # of X12, too
    assert fingerprint.unusual(wide) == "column_spread 10.4" and not fingerprint.outside(wide)
    with pytest.warns(UserWarning, match="verdicts, and convert by the report, are of its own"):
        report[RESCALED]


@pytest.mark.usefixtures("stored")
def test_one_gemm_of_a_site_can_be_selected(report: ProbeReport) -> None:
    with pytest.warns(UserWarning, match="like no benchmarked"):
        site = report[RESCALED]
    with pytest.warns(UserWarning, match=r"m\.2/grad_weight: column_spread"):
        gradient = site.gemm("grad_weight")
    assert [v.gemm for v in gradient.verdicts] == ["grad_weight"]
    assert "weight_columns" not in gradient[0]  # the weight is no operand of its gradient
    fine = report["m.4"].gemm("output")
    assert set(fine) <= set(lokakern.types.REALISTIC_DISTRIBUTIONS)
    assert len(fine) == len(fine.verdicts) == 1
    with pytest.raises(UnknownNameError, match="no GEMM 'wgrad'"):
        site.gemm("wgrad")


def test_padding_k_is_suggested_if_it_makes_a_gemm_fast() -> None:
    errors = [replayed()]
    padded = only(verdicts_of("a", shaped(2048, 10232, 20480), errors, device=H200))
    assert (padded.safety, padded.speed) == ("safe", "")  # nobody timed k = 10232
    assert padded.change == "pad K 10232 to 10240"
    assert only(verdicts_of("a", shaped(2048, 10240, 20480), errors, device=H200)).change == ""
    assert only(verdicts_of("a", shaped(512, 500, 2048), errors, device=H200)).change == ""


def test_dropping_the_bias_is_suggested_if_it_makes_a_gemm_fast(tmp_path: Path) -> None:
    plain = make_problem("gemm", (4096, 512, 512))
    with_bias = make_problem("gemm", (4096, 512, 512), epilogue="bias")
    Book(tmp_path / "rows.sqlite").write(
        time(BF16, plain, 20.0), time(ROW_KERNEL, plain, 10.0),
        time(BF16, with_bias, 20.0), time(ROW_KERNEL, with_bias, 30.0),
    )  # fmt: skip
    try:
        for has_bias, wanted in ((True, ("slow", "drop the bias")), (False, ("fast", ""))):
            site = shaped(512, 512, 4096, has_bias=has_bias)
            found = only(verdicts_of("a", site, [replayed()], device=H200))
            assert (found.speed, found.change) == wanted
    finally:
        dispatcher.use_snapshot(None)


@pytest.mark.parametrize(("row_err", "change"), [(0.04, "drop the bias"), (0.5, "")])
def test_dropping_the_bias_is_not_suggested_for_unsafe_scales(
    tmp_path: Path, row_err: float, change: str
) -> None:
    """Without it kernels with scales of groups are fast, and only those of rows are safe or not."""
    plain = make_problem("gemm", (4096, 512, 512))
    with_bias = make_problem("gemm", (4096, 512, 512), epilogue="bias")
    Book(tmp_path / "rows.sqlite").write(
        time(BF16, plain, 20.0), time(GROUP_KERNEL, plain, 10.0), time(ROW_KERNEL, plain, 30.0),
        time(BF16, with_bias, 20.0), time(ROW_KERNEL, with_bias, 30.0),
    )  # fmt: skip
    errors = [replayed(), replayed(scales=Granularity.GROUP, row_err=row_err)]
    try:
        site = shaped(512, 512, 4096, has_bias=True)
        assert only(verdicts_of("a", site, errors, device=H200)).change == change
    finally:
        dispatcher.use_snapshot(None)
