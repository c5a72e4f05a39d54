"""Chains of a conversion by a report of Probe, from rows and verdicts made by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lokakern
from lokakern.chain.candidates import Layer, Step
from lokakern.conversion.chain_rivals import Rivals, SpanLayer
from lokakern.conversion.chain_verdicts import reads_safely, reported_error, safe_ways
from lokakern.conversion.chains import plan_span
from lokakern.conversion.routes import NO_VERDICT
from lokakern.errors import DeviceError
from lokakern.nn.block_rms_norm import BlockRMSNorm
from lokakern.nn.chain_plan import steps_at
from lokakern.probe.report import Judged, ProbeReport
from lokakern.probe.verdicts import ClassVerdict, Verdict
from lokakern.selection import dispatcher
from lokakern.selection.weight_forms import with_weight
from lokakern.types import ErrorBudget, Format, Granularity
from tests.conversion.test_chain_spans import chain_count
from tests.conversion.test_chains import JUDGE, PLAIN, kernels_at
from tests.conversion.test_cross_sites import (
    DOWN,
    UP,
    LowRank,
    crosses_of,
    fastest_mover,
    model_of,
    products,
    same,
)
from tests.support.chain_rows import (
    FUSED,
    NARROW,
    NONE,
    QUANTIZING,
    ROW,
    WIDE,
    both,
    layer_problem,
    layer_rows,
    plain_rows,
)
from tests.support.chained_models import convert, is_chained, line, rows, tower
from tests.support.conversions import report_of
from tests.support.measurements import BF16, H200, Book, accuracy, gemm, time
from tests.support.measurements import ROW as ROUTED

TENSOR, BLOCK = Granularity.TENSOR, Granularity.BLOCK
UPPER = {"row": 0.03, "tensor": 0.035, "1x128 x 128x128": 0.025}


def output(site: str, safety: Mapping[str, str], **fields: Any) -> Verdict:
    """A verdict on the output of a site, by ways."""
    order = ("safe", "undecided", "unsafe")
    classes = tuple(
        ClassVerdict(way, found, 0.02, UPPER.get(way, 0.03), 0.04, reason=f"{way} is {found}")
        for way, found in safety.items()
    )
    whole = min(safety.values(), key=order.index, default="unsafe")
    return replace(
        Verdict(site, "output", (512, 512, 512), "", whole, "", "", 0.002, None, "", (), classes),
        **fields,
    )


SAFE = {"row": "safe"}
BOTH = (output("0", SAFE), output("2", SAFE))


# --- what is chosen


def test_a_report_plans_the_chain_of_a_budget(chain_book: Book) -> None:
    by_budget, by_report = (convert(tower(), by) for by in (0.06, report_of(*BOTH)))
    assert by_report.why_no_chains == ""
    ((expected,), (chain,)) = (h.spans[0].plan.chains for h in (by_budget, by_report))
    assert chain.text == expected.text
    assert by_report.choices[-1]["rival_us"] == pytest.approx([40.0, 120.0])
    # The errors are the report's 0.03, and the stored ones of an FP8 output, 0.045, cancel.
    assert [t.row_err for t in chain.times] == pytest.approx([math.hypot(0.03, 0.03)] * 2)
    assert f"layer 2: {FUSED} (row to bf16), 10.00 us, row_err 0.03\n" in by_report.explain("2")


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        ((), "no verdict in the report (Probe did not see it)"),
        ((output("2", {"row": "unsafe"}),),
         "unsafe by the report, at best with row: row is unsafe"),
        ((output("2", {"row": "unsafe", "1x128": "undecided"}),),
         "undecided by the report, at best with 1x128: 1x128 is undecided"),
        ((output("2", SAFE, dtype="float16"),),
         "the report judges products in float16, not bfloat16: probe the model in bfloat16"),
        ((replace(BOTH[1], gemm="grad_input"),), "no verdict in the report"),
        ((output("2", {}),), "Probe replayed nothing in FP8 that holds on sm_90"),
    ],
    ids=["unseen", "unsafe", "undecided", "dtype", "gradient", "nothing"],
)  # fmt: skip
def test_no_chain_over_a_layer_that_a_report_does_not_find_safe(
    chain_book: Book, verdict: tuple[Verdict, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = convert(tower(), report_of(BOTH[0], *verdict))
    # The layer before it is a chain of its own, whose output is bfloat16.
    assert [row["site"] for row in handle.choices if row["gemm"] == "chain"] == ["0"]
    assert "no chain: " not in handle.explain("0")
    assert f"2: no chain: {why}" in handle.explain("2")
    handle.table()
    assert "no chain of 2: " in capsys.readouterr().out


@pytest.mark.parametrize("by", [0.06, report_of(output("0", SAFE))], ids=["budget", "report"])
def test_a_layer_that_a_sequence_calls_twice(chain_book: Book, by: Any) -> None:
    layer = Layer(512, 512, "bias+relu")
    chain_book.write(*layer_rows(layer, {512: 20.0}, {512: 10.0}))
    linear = nn.Linear(512, 512)
    handle = convert(line(linear, nn.ReLU(), linear, nn.ReLU()), by)
    assert [span.sites for span in handle.spans] == [("0", "0")]
    assert [len(chain.layers) for chain in handle.spans[0].plan.chains] == [2]


def test_a_way_that_holds_elsewhere_is_not_safe_here(chain_book: Book) -> None:
    of_others = replace(BOTH[1].classes[0], architecture="sm_100")
    handle = convert(tower(), report_of(BOTH[0], replace(BOTH[1], classes=(of_others,))))
    assert "2: no chain: Probe replayed nothing in FP8 that holds on sm_90" in handle.explain()
    there = replace(of_others, architecture="sm_90")
    assert chain_count(convert(tower(), report_of(BOTH[0], replace(BOTH[1], classes=(there,)))))


def test_other_scales_than_those_of_the_kernels_are_no_chain(chain_book: Book) -> None:
    others = {"row": "unsafe", "tensor": "safe"}
    handle = convert(tower(), report_of(output("0", others), output("2", others)))
    assert "no kernel of a chain multiplies as the report finds safe (tensor)" in handle.explain()
    assert '"chain"' not in handle.suite([512])  # nothing is missing


def test_stored_errors_count_for_fp8_outputs_alone(chain_book: Book) -> None:
    # Of inputs and weights the report knows more than the database.
    chain_book.write(*both({512: 20.0}, {512: 10.0}, row_err=0.07))
    assert chain_count(convert(tower(), 0.06)) == 0
    handle = convert(tower(), report_of(*BOTH))
    chains = [chain for span in handle.spans for chain in span.plan.chains]
    assert {k for chain in chains for k in kernels_at(chain, 512)} == {QUANTIZING}


def test_layers_need_no_stored_errors_without_fp8_outputs(chain_book: Book) -> None:
    problem = layer_problem(NARROW, 512, NONE, ROW, NONE)
    chain_book.path.unlink()
    chain_book.write(*plain_rows(NARROW, 512, 20.0), time(QUANTIZING, problem, 10.0))
    for ways, count in ((None, 0), ((("row", 0.03),), 1)):
        plan = plan_span([SpanLayer(NARROW, 1e-5, PLAIN, ways=ways)], JUDGE)
        assert len(plan.chains) == count
        assert bool(plan.missing) is (count == 0)


@pytest.mark.parametrize("ways", [("row", "tensor"), ("row",)], ids=" ".join)
def test_a_static_scale_needs_a_reader_that_is_safe_with_it(
    chain_book: Book, ways: tuple[str, ...]
) -> None:
    """The second layer reads a tensorwise scale by a kernel for rowwise ones."""
    layer = Layer(512, 512, "bias+block_rms(256)+relu")
    writes = layer_problem(layer, 512, NONE, ROW, TENSOR)
    reads = layer_problem(layer, 512, ROW, ROW, NONE)
    chain_book.write(
        *plain_rows(layer, 512, 20.0), time(QUANTIZING, writes, 5.0), time(FUSED, reads, 5.0),
        accuracy(QUANTIZING, writes, 0.05), accuracy(FUSED, reads, 0.04),
    )  # fmt: skip
    safe = tuple((way, UPPER[way]) for way in ways)
    span = [SpanLayer(layer, 1e-5, PLAIN, ways=found) for found in ((("row", 0.03),), safe)]
    found = plan_span(span, JUDGE).chains
    assert [kernels_at(chain, 512) for chain in found] == (
        [[QUANTIZING, FUSED]] if "tensor" in ways else []
    )


def test_the_rival_is_what_the_report_runs_without_a_chain(chain_book: Book) -> None:
    extra = []
    for n, k in ((1024, 512), (512, 1024)):
        prepared = with_weight(gemm(512, n, k), ROW, H200)
        extra += [time(BF16, prepared, 19.0), time(ROUTED, prepared, 15.0),
                  accuracy(ROUTED, prepared, 0.04)]  # fmt: skip
    chain_book.write(*extra)
    # Products by the routes; what a norm takes is unknown, and counts nothing.
    for ways, rival_us in ((SAFE, 30.0), ({"row fast": "safe"}, 38.0)):
        verdicts = [output(site, ways) for site in ("0", "2")]
        handle = convert(tower(), report_of(*verdicts), m_range=(512, 512))
        x = SpanLayer(WIDE, 1e-5, handle.sites["0"].routes[0])
        y = SpanLayer(NARROW, 1e-5, handle.sites["2"].routes[0])
        found = [Rivals(JUDGE).at(layer, 512) or (0.0, 0.0) for layer in (x, y)]
        assert sum(us for us, _ in found) == pytest.approx(rival_us)
        for chain in handle.spans[0].plan.chains:
            assert chain.times[0].rival_us == pytest.approx(rival_us)


# --- what runs


def test_refresh_undo_and_copies_work_as_with_a_budget(chain_book: Book) -> None:
    model = tower()
    with torch.no_grad():
        plain = model(rows())
    unsafe = report_of(BOTH[0], output("2", {"row": "unsafe"}))
    handle = convert(model, report_of(*BOTH))
    assert handle.refresh() == []
    twin = copy.deepcopy(model)
    assert handle.refresh(unsafe) == ["0 to 2/chain", "0/chain"]
    assert handle.refresh(0.06) == ["0/chain", "0 to 2/chain"]
    assert handle.refresh(report_of(*BOTH)) == []  # by the budget it is the same chain
    handle.offload(m_range=(512, 512))
    assert not any(site.module.is_offloaded for site in handle.sites.values())
    with torch.no_grad():
        y = model(rows())
        assert (y - plain).float().norm() < 0.06 * plain.float().norm()
        handle.undo()
        assert torch.equal(model(rows()), plain)
        assert is_chained(twin)
        assert torch.equal(twin(rows()), y)


def test_chains_is_false_with_a_report_too(chain_book: Book) -> None:
    handle = convert(tower(), report_of(*BOTH), chains=False)
    assert handle.explain().endswith("no chains: chains=False")


def test_a_report_of_other_limits_gives_no_chains(chain_book: Book) -> None:
    judged = [Judged(v, {}, 1) for v in BOTH]
    report = ProbeReport(judged, ErrorBudget(row_err=0.06, mean_shift=0.01), None)
    handle = convert(tower(), report)
    assert handle.why_no_chains.startswith("the budget limits row_err, mean_shift; of chains")


def test_probe_sees_each_layer_of_a_chain(chain_book: Book) -> None:
    model = tower()
    handle = convert(model, 0.06)
    assert is_chained(model)
    probe = lokakern.Probe(model, every=1)
    with probe, torch.no_grad():
        before = is_chained(model)
    assert not before  # chains step aside
    assert set(probe.sites()) == {"0", "2"}
    assert handle.refresh(report_of(*BOTH)) == []
    assert is_chained(model)


@pytest.mark.parametrize(
    "where",
    [pytest.param("cpu", marks=pytest.mark.rest), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_a_model_that_was_probed_has_the_chain_of_its_budget(where: str) -> None:
    """By the shipped times of the H200: 1.95 by a report of a CPU, 1.96 by the budget."""
    torch.manual_seed(0)
    block = [nn.Linear(512, 512), BlockRMSNorm(512, 256), nn.Hardswish()]
    model = line(*block, *copy.deepcopy(block)).to(where)
    x = torch.randn(2048, 512, device=where).bfloat16()
    probe = lokakern.Probe(model, every=1)
    with probe, torch.no_grad():
        plain = model(x)
    report = probe.report(device="NVIDIA H200", seeds=(0,))
    gains = []
    for by in (report, 0.06):
        twin = copy.deepcopy(model)
        handle = lokakern.convert(twin, by, device="NVIDIA H200", inference=True)
        (chain,) = handle.spans[0].plan.chains
        assert len(chain.layers) == 2 and steps_at(chain.text, 2048)
        gains.append(math.prod(t.rival_us / t.us for t in chain.times) ** (1 / len(chain.times)))
        with torch.no_grad():
            error = (twin(x) - plain).float().norm() / plain.float().norm()
        assert 0.01 < error < 0.06
    assert gains[0] > 0.95 * gains[1] > 1.5


# --- crosses


@pytest.mark.parametrize(
    ("down", "up", "sites", "whys"),
    [
        ("safe", "safe", [["crosses.down", "crosses.up"]], set()),
        ("unsafe", "safe", [["crosses.up"]], {"crosses.down"}),
        ("safe", "unsafe", [], {"crosses.up"}),
        ("unsafe", "unsafe", [], {"crosses.up"}),
    ],
)
def test_crosses_are_judged_by_the_products_of_their_layers(
    chain_book: Book, down: str, up: str, sites: list[list[str]], whys: set[str]
) -> None:
    chain_book.write(
        *products(DOWN, same(8.0)), *products(UP, same(9.0)),
        *layer_rows(DOWN, same(9.0), same(3.0)), *layer_rows(UP, same(30.0), same(5.0)),
        *fastest_mover(),
    )  # fmt: skip
    report = report_of(
        output("crosses.down", {"row": down}), output("crosses.up", {"row": up}),
    )  # fmt: skip
    handle = convert(model_of(LowRank), report)
    chained = [[*span.sites] for span in crosses_of(handle) if span.plan.chains]
    assert chained == sites
    assert set(handle.left_crosses) - {"a Net"} == whys
    for name in whys:
        assert f"{name}: no cross is a chain: unsafe by the report" in handle.explain(name)


# --- layers with tails in a forward


class Forward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.relu, self.narrow, self.norm, _ = tower()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.relu(self.norm(self.narrow(self.relu(self.wide(x)))))
        return y


@pytest.mark.parametrize(
    ("narrow", "sites"), [("safe", [("wide", "narrow")]), ("unsafe", [("wide",)])]
)
def test_layers_with_tails_are_judged_by_their_products(
    chain_book: Book, narrow: str, sites: list[tuple[str, ...]]
) -> None:
    report = report_of(output("wide", SAFE), output("narrow", {"row": narrow}))
    handle = convert(Forward().bfloat16().eval(), report)
    chained = [span.sites_of(c) for span in handle.spans for c in span.plan.chains]
    assert chained == sites
    words = "narrow: no chain: unsafe by the report, at best with row: row is unsafe"
    assert (words in handle.explain("narrow")) is (narrow == "unsafe")
    assert handle.refresh(report_of()) == [f"{' to '.join(sites[0])}/chain"]
    assert {span.plan.why for span in handle.spans} == {NO_VERDICT}


# --- parts


def test_ways_that_are_safe() -> None:
    ways = {"row": "safe", "1x128 x 128x128": "undecided", "tensor": "unsafe", "row fast": "safe"}
    found, why = safe_ways(output("0", ways), H200, Format.BFLOAT16)
    assert (found, why) == ((("row", 0.03), ("row fast", 0.03)), "")
    assert reads_safely(found, ROW) and not reads_safely(found, TENSOR)
    assert reads_safely((("1x128 x 128x128", 0.03),), Granularity.GROUP)
    assert not reads_safely((("1x128 x 128x128", 0.03),), BLOCK)


@pytest.mark.parametrize(
    ("kernel", "writes", "stored", "expected"),
    [
        ("cuda.gemm_norm_row", NONE, 0.07, 0.03),
        ("cuda.gemm_norm_row", NONE, None, 0.03),
        ("cuda.gemm_norm_row", ROW, 0.05, 0.05),
        ("cuda.gemm_norm_row", ROW, 0.01, 0.03),
        ("cuda.gemm_norm_row", ROW, None, None),
        ("cuda.gemm_norm_row_fast", NONE, 0.01, None),
        ("cuda.gemm_norm_tensor", NONE, 0.01, None),
        ("cuda.gemm_norm_bf16", NONE, 0.002, 0.002),
        ("cuda.gemm_norm_bf16", NONE, None, None),
        ("of another machine", NONE, 0.02, None),
    ],
)
def test_errors_of_layers(
    kernel: str, writes: Granularity, stored: float | None, expected: float | None
) -> None:
    problem = layer_problem(NARROW, 512, ROW, ROW, writes)
    step = Step(0, problem, kernel, row_err=stored)
    assert reported_error(step, (("row", 0.03),)) == expected


# --- frozen choices


def test_a_saved_model_keeps_its_chains_with_frozen_choices(
    chain_book: Book, tmp_path: Path
) -> None:
    """A file for this machine has none for a GPU; a conversion by it has no chains, and says so."""
    model = tower()
    handle = convert(model, report_of(*BOTH))
    with torch.no_grad():
        y = model(rows())
    torch.save(model, tmp_path / "model.pt")
    lokakern.dispatch("gemm", (64, 64, 64), 0.06)  # freeze wants a choice of this device
    lokakern.freeze(tmp_path / "choices.json")
    dispatcher.use_choices(tmp_path / "choices.json")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert is_chained(loaded)
    with torch.no_grad():
        assert torch.equal(loaded(rows()), y)
    with pytest.raises(DeviceError, match="unset LOKAKERN_CHOICES"):
        handle.refresh()
    other = lokakern.convert(tower(), report_of(*BOTH), inference=True)
    assert not chain_count(other)
    choice = lokakern.dispatch_chain([(512, 512, "relu")] * 2, 512, 0.09)
    assert choice.is_miss and "not among the choices of" in choice.note
