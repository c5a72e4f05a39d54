"""`convert`: choices from rows made by hand, and the converted model."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lokakern
from lokakern.conversion import convert as converting
from lokakern.conversion.convert import Conversion
from lokakern.conversion.routes import GEMMS, _grad_input_problem
from lokakern.errors import (
    BudgetError,
    DeviceError,
    FormatError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from lokakern.functional import checks
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import kernel_at, traced_route
from lokakern.probe.report import Judged, ProbeReport
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.selection import dispatcher
from lokakern.selection.padded_rows import padded_problem
from lokakern.types import ErrorBudget, Format, Granularity
from lokakern.workloads.gemm_cases import prepared_weight
from lokakern.workloads.gemm_gradient_cases import grad_weight_case
from lokakern.workloads.suite_files import suite_from_file
from tests.support.conversions import (
    BLOCK_KERNEL,
    H200,
    K,
    N,
    measured,
    report_of,
    rows_of,
    verdict,
)
from tests.support.measurements import BF16, TENSOR, Book, accuracy, gemm, time
from tests.support.measurements import ROW as ROW_KERNEL

SEEDS = (0,)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Book:
    return Book(tmp_path_factory.mktemp("book") / "rows.sqlite").write(*measured())


@pytest.fixture
def known(written: Book) -> Iterator[Book]:
    written.use()
    yield written
    dispatcher.use_snapshot(None)


convert = functools.partial(lokakern.convert, distribution="X1")


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 1)).to(dtype)


def kernels(conversion: Conversion, site: str, gemm: str, sizes: tuple[int, ...]) -> list[str]:
    route = next(r for r in conversion.sites[site].routes if r.gemm == gemm)
    return [kernel_at(route.text, m) for m in sizes]


# ---- what is chosen ----


def test_each_product_gets_its_measured_kernels(known: Book) -> None:
    found = convert(model_of(), 0.06, device=H200)
    names = kernels(found, "0", "output", (8, 16, 17, 256, 300, 1024, 1040))
    assert names == ["", "", "", *[ROW_KERNEL] * 3, ""]
    assert kernels(found, "0", "grad_input", (8, 16, 1024)) == ["", ROW_KERNEL, ROW_KERNEL]
    sizes = (16, 240, 256, 272, 1024)  # samples, which are summed: only where they were measured
    assert kernels(found, "0", "grad_weight", sizes) == ["", "", ROW_KERNEL, "", ""]
    assert not any(r.text for r in found.sites["2"].routes)
    assert "nothing was measured" in found.sites["2"].routes[0].why


def test_a_weight_has_the_scales_that_gain_most_over_all_m(book: Book) -> None:
    """A weight is quantized once, so kernels with other scales are never chosen at any m."""
    fast = {16: 3.0, 256: 3.0, 1024: 3.0}
    rows = []
    for m in fast:
        block = 2.0 if m == 16 else 5.0
        rows += rows_of(gemm(m, N, K), bf16=6.0, errors=m == 16, row=fast[m], block=block)
    book.write(*rows)
    found = convert(model_of(), 0.06, device=H200)
    assert kernels(found, "0", "output", (16, 256, 1024)) == [ROW_KERNEL] * 3
    assert "reads a weight with 128x128 scales, and another gains more" in found.explain("0")
    found = convert(model_of(), 0.06, device=H200, m_range=(1, 20))
    assert kernels(found, "0", "output", (16, 256)) == [BLOCK_KERNEL, ""]
    for m_range in ((300, 300), (300, 900)):  # between measured m, where times are interpolated
        found = convert(model_of(), 0.06, device=H200, m_range=m_range)
        assert kernels(found, "0", "output", (256, *m_range)) == ["", ROW_KERNEL, ROW_KERNEL]
        assert f"geometric mean over m={m_range[0]}" in found.sites["0"].routes[0].why
    (route, *_) = convert(model_of(), 0.06, device=H200, m_range=(2000, 2000)).sites["0"].routes
    assert not route.text


def test_the_reason_for_bfloat16_begins_with_the_fastest_kernels(book: Book) -> None:
    book.write(*rows_of(gemm(256, N, K), bf16=6.0, row=8.0, tensor=7.0, block=9.0))
    why = convert(model_of(), 0.06, device=H200).sites["0"].routes[0].why
    assert why == (
        f"at m=256 no kernel that quantizes is better than torch.bf16 (6.00 us); {TENSOR}: slower: "
        f"7.00 us; {ROW_KERNEL}: slower: 8.00 us"
    )


def test_weight_scales_restrict_the_granularity(book: Book) -> None:
    book.write(*rows_of(gemm(256, N, K), bf16=6.0, row=2.0, tensor=3.0))
    assert kernels(convert(model_of(), 0.06, device=H200), "0", "output", (256,)) == [ROW_KERNEL]
    found = convert(model_of(), 0.06, device=H200, weight_scales=["tensor"])
    assert kernels(found, "0", "output", (256,)) == [TENSOR]
    found.refresh(None)
    assert found.refresh(0.06) and kernels(found, "0", "output", (256,)) == [TENSOR]
    found = convert(model_of(), 0.06, device=H200, weight_scales=["128x128"])
    assert kernels(found, "0", "output", (256,)) == [""]


def test_times_with_a_bias_are_preferred_to_times_without(book: Book) -> None:
    with_bias = gemm(256, N, K, epilogue="bias")
    rows = rows_of(gemm(256, N, K), bf16=4.0, row=2.0)
    book.write(*rows, *rows_of(with_bias, bf16=2.0, errors=False, row=4.0))
    assert kernels(convert(model_of(), 0.06, device=H200), "0", "output", (256,)) == [""]
    model = nn.Sequential(nn.Linear(K, N, bias=False))
    assert kernels(convert(model, 0.06, device=H200), "0", "output", (256,)) == [ROW_KERNEL]


def test_inference_uses_prepared_weights_and_freezes_them(book: Book) -> None:
    weight = prepared_weight(Format.E4M3FN, Granularity.ROW)
    prepared = gemm(256, N, K, b=weight, prepared=True)
    book.write(
        *rows_of(gemm(256, N, K), bf16=4.0, row=9.0),
        *rows_of(prepared, bf16=4.0, row=2.0, errors=False),
    )
    assert not any(r.text for r in convert(model_of(), 0.06, device=H200).sites["0"].routes)
    model = model_of()
    found = convert(model, 0.06, device=H200, inference=True)
    assert kernels(found, "0", "output", (256,)) == [ROW_KERNEL]
    assert [r.text for r in found.sites["0"].routes[1:]] == ["", ""]
    x = torch.randn(256, K).bfloat16()
    with torch.no_grad():
        y = model(x)
        model[0].weight.mul_(2.0)
        assert torch.equal(model(x), y)
        found.refresh(0.06)
        assert not torch.equal(model(x), y)
        found.undo()
    assert not list(model.buffers())


def frozen_model(book: Book) -> tuple[nn.Module, Conversion]:
    prepared = gemm(256, N, K, b=prepared_weight(Format.E4M3FN, Granularity.ROW), prepared=True)
    book.write(
        *rows_of(gemm(256, N, K), bf16=4.0, row=9.0),
        *rows_of(prepared, bf16=4.0, row=2.0, errors=False),
    )
    model = model_of()
    return model, convert(model, 0.06, device=H200, inference=True)


def test_a_weight_of_an_fp8_product_can_be_offloaded(book: Book) -> None:
    """The weight is not read, so it may be NaN."""
    model, found = frozen_model(book)
    layer, x = model[0], torch.randn(256, K).bfloat16()
    with torch.no_grad():
        exact, few = layer(x), torch.nn.functional.linear(x[:7], layer.weight, layer.bias)
    state = model.state_dict()
    found.offload()
    assert layer.is_offloaded and model.state_dict().keys() == state.keys()
    layer.weight.data.fill_(float("nan"))
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        for call in (layer, compiled):
            assert torch.equal(call(x), exact)
            # At m that was not measured: bfloat16, by what the FP8 weight means.
            error = (call(x[:7]) - few).norm() / few.norm()
            assert 0.01 < error < 0.04
    with pytest.raises(UnsupportedError, match="without gradients only"):
        model(x)  # whose bias would get one
    with pytest.raises(UnsupportedError, match="without gradients only"):
        model.requires_grad_(False)(x.requires_grad_())
    with pytest.raises(UnsupportedError, match="without gradients only"):
        model(torch.randn(256, K))


def test_offloaded_weights_load_and_return(book: Book) -> None:
    model, found = frozen_model(book)
    assert found.offload() == 0  # from the CPU to the CPU
    layer, x = model[0], torch.randn(256, K).bfloat16()
    before = layer.weight.detach().clone()
    with torch.no_grad():
        y = layer(x)
        model.load_state_dict({name: 2 * v for name, v in model.state_dict().items()})
        assert torch.equal(layer(x), 2 * y) and layer.is_offloaded
        found.refresh(0.06)
        assert torch.equal(layer(x), 2 * y) and not layer.is_offloaded
        found.offload()
        found.undo()
    assert torch.equal(layer.weight, 2 * before) and type(layer) is nn.Linear
    assert "is_offloaded" not in vars(layer)


def test_a_refresh_of_offloaded_weights_chooses_for_the_running_device(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = frozen_model(book)
    found._device, place = None, converting.device_of

    def device_of(weight: Tensor) -> Any:
        assert not model[0].is_offloaded, "the weight is on the CPU, the layer on a GPU"
        return dispatcher.device_named(H200) if weight.ndim else place(weight)

    monkeypatch.setattr(converting, "device_of", device_of)
    found.offload()
    assert model[0].is_offloaded and found.refresh(0.06) == []
    found.offload()
    assert model[0].is_offloaded
    other = convert(model, 0.06, inference=True)
    assert other.choices[0]["choice"] == found.choices[0]["choice"] != "bf16"


def test_trained_shared_and_bfloat16_weights_are_not_offloaded(book: Book) -> None:
    prepared = prepared_weight(Format.E4M3FN, Granularity.ROW)
    small = gemm(16, N, K, b=prepared, prepared=True)
    book.write(*rows_of(small, bf16=2.0, errors=False, row=4.0))
    model, found = frozen_model(book)
    with pytest.raises(UnsupportedError, match="inference=True"):
        convert(model_of(), 0.06, device=H200).offload()
    with pytest.raises(UnsupportedError, match="offload to meta"):
        found.offload("meta")
    with pytest.raises(ShapeError, match="m_range"):
        found.offload(m_range=(9, 1))
    found.offload()
    assert not model[0].is_offloaded, "at m = 16 bfloat16 is faster"
    found.offload(m_range=(200, 256))
    assert model[0].is_offloaded
    other = nn.Embedding(N, K)
    tied = model_of()
    other.weight = tied[0].weight
    model = nn.ModuleList([*tied, other])
    found = convert(model, 0.06, device=H200, inference=True)
    found.offload()
    assert tied[0].is_frozen and not tied[0].is_offloaded
    encoder = nn.TransformerEncoderLayer(K, 2, N, batch_first=True)
    found = convert(encoder, 0.06, device=H200, inference=True)
    found.offload(m_range=(256, 256))
    assert encoder.linear1.is_offloaded  # the fast path, which would read it, is not taken
    with torch.no_grad():
        encoder.bfloat16().eval()(torch.randn(256, 1, K).bfloat16())


@pytest.mark.parametrize("budget", [None, 0.03])
def test_nothing_is_quantized_without_a_budget_or_with_a_small_one(
    known: Book, budget: float | None
) -> None:
    found = convert(model_of(), budget, device=H200)
    assert not any(row["choice"] != "bf16" for row in found.choices)
    reason = "no budget" if budget is None else "row_err 0.0400 > 0.03"
    assert reason in found.choices[0]["why"]


# ---- reports of Probe ----


def test_a_report_judges_each_product_by_its_replayed_errors(book: Book) -> None:
    """Errors of gradients need not be in the database."""
    rows = []
    for problem in (gemm(256, N, K), _grad_input_problem(N, K)(256)):
        rows += [time(BF16, problem, 4.0), time(ROW_KERNEL, problem, 2.0)]
    book.write(*rows)
    assert not any(r.text for r in convert(model_of(), 0.06, device=H200).sites["0"].routes)
    report = report_of(
        verdict("output", "row", "safe", 0.04), verdict("grad_input", "row", "unsafe", 0.2)
    )
    found = convert(model_of(), report, device=H200)
    assert kernels(found, "0", "output", (256,)) == [ROW_KERNEL]
    assert kernels(found, "0", "grad_input", (256,)) == [""]
    assert "row_err 0.2000 > 0.06 (worst on the site" in found.explain("0")
    undecided = report_of(verdict("output", "row", "undecided", 0.04))
    assert found.refresh(undecided) == ["0/output"]
    assert "undecided: few rows" in found.explain("0")
    assert found.refresh(report_of(verdict("output", "tensor", "safe", 0.04))) == []
    assert "Probe did not replay row" in found.explain("0")


def test_unpromoted_sums_need_their_own_verdict(book: Book) -> None:
    """Only a replay on the same kind of GPU gives this verdict."""
    fast = "cuda.quantize_row+torch.scaled_mm_row_fast"
    problem = gemm(256, N, K)
    times = [(BF16, 4.0), (ROW_KERNEL, 2.0), (fast, 1.0)]
    book.write(*(time(name, problem, us) for name, us in times))
    (row,) = verdict("output", "row", "safe", 0.04).classes
    row = replace(row, mean_shift=1e-4)
    for found, wanted in (
        ((), ROW_KERNEL),
        ((replace(row, scales="row fast", architecture="sm_90"),), fast),
        ((replace(row, scales="row fast", architecture="sm_100"),), ROW_KERNEL),
        ((replace(row, scales="row fast", architecture="sm_90", row_err_upper=0.1),), ROW_KERNEL),
        ((replace(row, scales="row fast", architecture="sm_90", mean_shift=0.1),), ROW_KERNEL),
    ):
        judged = replace(verdict("output", "row", "safe", 0.04), classes=(row, *found))
        report = ProbeReport(
            [Judged(judged, {}, 1)], ErrorBudget(row_err=0.06, mean_shift=0.01), None
        )
        conversion = convert(model_of(), report, device=H200)
        assert kernels(conversion, "0", "output", (256,)) == [wanted]
        if "sm_100" in [c.architecture for c in found]:
            assert "Probe replayed row fast on sm_100" in conversion.explain("0")


def test_a_faster_kernel_that_probe_did_not_replay_is_named_first(book: Book) -> None:
    """A CPU replays no unpromoted sums; two slower kernels are no reason for bf16."""
    fast = "cuda.quantize_row+torch.scaled_mm_row_fast"
    slow = "cuda.quantize_row+cuda.scaled_gemm_row"
    times = ((BF16, 4.0), (ROW_KERNEL, 5.0), (slow, 6.0), (fast, 1.0))
    book.write(*(time(name, gemm(256, N, K), us) for name, us in times))
    found = convert(model_of(), report_of(verdict("output", "row", "safe", 0.04)), device=H200)
    assert found.sites["0"].routes[0].why == (
        "at m=256 no kernel that Probe judged is better than torch.bf16 (4.00 us), but one that it "
        f"could not judge on this machine is faster; {fast}: Probe did not replay row fast; it "
        "takes 1.00 us; probe.save(FILE) here, probe.load(FILE) and probe.report() on that GPU"
    )


def test_a_product_without_a_verdict_says_so(book: Book) -> None:
    book.write(*(time(name, gemm(256, N, K), us) for name, us in ((BF16, 4.0), (ROW_KERNEL, 1.0))))
    report = report_of(verdict("output", "row", "safe", 0.04, site="another"))
    found = convert(model_of(), report, device=H200)
    assert found.sites["0"].routes[0].why == (
        "at m=256 no verdict in the report (Probe did not see it)"
    )
    assert kernels(found, "0", "output", (256,)) == [""]


def test_a_probe_of_a_model_converts_it(known: Book) -> None:
    """A user may do this on a machine without a GPU."""
    model = nn.Sequential(nn.Linear(K, N, bias=False), nn.LayerNorm(N), nn.Linear(N, 1))
    patch = pytest.MonkeyPatch()
    patch.setattr("lokakern.problems.ACCURACY_ROWS", 128)
    with lokakern.Probe(model) as probe:
        model(torch.randn(256, K)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = probe.report(budget=0.06, seeds=(0, 1, 2))
    patch.undo()
    found = convert(model, report, device=H200)
    row = next(v for v in report if v.site == "0" and v.gemm == "output").of("row")
    assert row is not None
    is_safe = row.safety == "safe"
    assert kernels(found, "0", "output", (256,)) == [ROW_KERNEL if is_safe else ""]
    assert is_safe


# ---- what is done to a model ----


def test_a_model_is_converted_in_place_and_back(known: Book) -> None:
    model = model_of()
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    parts = list(model.modules()), list(model.parameters()), list(model.state_dict())
    x = torch.randn(256, K).bfloat16()
    before = model(x)
    found = convert(model, 0.06, device=H200)
    assert type(model[0]) is Linear and isinstance(model[0], nn.Linear)
    assert (list(model.modules()), list(model.parameters()), list(model.state_dict())) == parts
    after = model(x)
    assert not torch.equal(after, before)  # quantized: emulated, as no H200 is here
    assert torch.allclose(after.float(), before.float(), atol=0.1)
    assert torch.equal(model(x[:7]), nn.Sequential(*model)(x[:7]))
    found.undo()
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]
    assert torch.equal(model(x), before)
    assert not [name for name in vars(model[0]) if name.startswith("_routes")]
    assert len(seen) == 5 and len(found) == 0
    with pytest.raises(UnknownNameError, match="was undone"):
        found.refresh(0.06)


def test_without_measurements_a_model_is_bitwise_unchanged(known: Book) -> None:
    model, plain = model_of(), model_of()
    found = convert(model, 0.06)
    assert "nothing was measured" in found.choices[0]["why"]
    x = torch.randn(1024, K).bfloat16()
    for m in (model, plain):
        m(x).sum().backward()
    assert torch.equal(model(x), plain(x))
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


def test_choices_change_only_by_refresh(known: Book) -> None:
    model = model_of()
    found = convert(model, 0.06, device=H200)
    before = model[0]._routes
    dispatcher.use_snapshot(load_snapshot([]))  # a sweep, or another database
    with pytest.raises(DeviceError):
        found.refresh(0.06)
    assert model[0]._routes == before  # all or nothing
    known.use()
    assert found.refresh(0.06) == []
    assert found.refresh(0.03) == ["0/output", "0/grad_input", "0/grad_weight"]
    assert model[0]._routes == ("", "", "")
    assert found.refresh(0.06) == ["0/output", "0/grad_input", "0/grad_weight"]
    assert model[0]._routes == before


def test_a_compiled_model_follows_a_refresh_without_a_break(known: Book) -> None:
    torch._dynamo.reset()
    model = model_of()
    found = convert(model, 0.06, device=H200)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(256, K).bfloat16()
    assert torch.equal(compiled(x), model(x))
    found.refresh(None)
    assert torch.equal(compiled(x), model_of()(x))
    found.undo()
    assert torch.equal(compiled(x), model_of()(x))


def test_refreshes_take_effect_under_autocast_compiled_or_not(known: Book) -> None:
    torch._dynamo.reset()
    found: dict[str, list[float]] = {}
    for way in ("eager", "compiled", "never"):
        model = model_of(torch.float32)
        handle = convert(model, 0.06, device=H200)
        counter = CompileCounterWithBackend("aot_eager")
        called = model
        if way == "compiled":
            called = torch.compile(model, backend=counter, fullgraph=True)  # type: ignore[assignment]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        found[way] = []
        for step in range(9):
            if step % 3 == 0 and step and way != "never":
                assert handle.refresh(0.06 if step == 6 else None)
            with torch.autocast("cpu", torch.bfloat16):
                y = called(torch.randn(256, K, generator=torch.Generator().manual_seed(step)))
            loss = (y.float() - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[way].append(loss.item())
        if way == "compiled":
            assert counter.frame_count <= 3  # once for each choice, or less
    assert found["compiled"] == found["eager"]
    assert found["eager"][:3] == found["never"][:3] and found["eager"][3] != found["never"][3]
    assert found["eager"][-1] < found["eager"][0]


def test_shared_layers_are_one_site(known: Book) -> None:
    shared = nn.Linear(K, N)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert list(convert(model, 0.06, device=H200).sites) == ["a"]
    assert type(model["b"]) is Linear


class Odd(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.0


def test_skipped_layers_have_reasons(known: Book, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(K, N), Odd(N, N), nn.Linear(N, N).double(), nn.Linear(N, 1))
    found = convert(model, 0.06, device=H200, filter=lambda module, name: name != "3")
    assert list(found.sites) == ["0"] and set(found.skipped) == {"1", "2"}
    assert [type(m) for m in model] == [Linear, Odd, nn.Linear, nn.Linear]
    found.table()
    out = capsys.readouterr().out
    assert "it is a Odd, which may do more" in out and "its weight is torch.float64" in out
    assert ROW_KERNEL in out and "grad_weight" in out
    attention = nn.MultiheadAttention(16, 2, add_zero_attn=True)
    with pytest.raises(UnknownNameError, match=r"out_proj: nn\.MultiheadAttention reads its"):
        convert(attention, 0.06, device=H200)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("inference", [False, True])
def test_layers_inside_of_sharded_modules_are_converted(inference: bool) -> None:
    x = torch.randn(32, K).bfloat16()
    before = model_of()
    after = copy.deepcopy(before)
    convert(before, kernels="row", inference=inference)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(after, mesh=mesh)
    handle = convert(after, kernels="row", inference=inference)
    assert len(handle.sites) == len(handle) and torch.equal(after(x), before(x))
    for layer in (sharded := model_of()):
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    with pytest.raises(UnknownNameError, match="call convert before fully_shard"):
        convert(sharded, kernels="row")


def test_a_saved_model_keeps_its_kernels(tmp_path: Path) -> None:
    model, x = model_of(), torch.randn(32, K).bfloat16()
    plain = copy.deepcopy(model)
    convert(model, kernels="row", inference=True)
    assert model.state_dict().keys() == plain.state_dict().keys()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(x), model(x)) and not torch.equal(loaded(x), plain(x))
    convert(loaded, kernels="tensor", inference=True)
    assert not torch.equal(loaded(x), model(x)), "chosen again"
    again = model_of()
    again.load_state_dict(loaded.state_dict())
    assert torch.equal(again(x), plain(x))


def test_choices_are_plain_data(known: Book) -> None:
    first, *_ = convert(model_of(), 0.06, device=H200).choices
    assert first == {
        "site": "0", "gemm": "output", "n": N, "k": K, "choice": f"bf16, {ROW_KERNEL}",
        "eager_choice": f"bf16, {ROW_KERNEL}", "m": [16, 256, 1024], "us": [2.0, 3.0, 8.0],
        "host_us": [None] * 3, "why": "1.39x as fast in geometric mean over m=16..1024",
    }  # fmt: skip


def test_missing_measurements_are_a_suite_to_sweep(known: Book, tmp_path: Path) -> None:
    found = convert(model_of(), 0.06, device=H200)
    file = tmp_path / "model.toml"
    file.write_text(found.suite([256, 2048], "mine"))
    problems = {case.problem for case in suite_from_file(file).build(Format.E4M3FN)}
    for m in (256, 2048):
        assert replace(gemm(m, 1, N), epilogue="bias") in problems
        # Beyond the measured m, which convert would no longer read with times with a bias.
        assert (gemm(m, N, K) in problems) == (m == 2048)
        assert replace(gemm(m, N, K), epilogue="bias") not in problems
        assert grad_weight_case(m, 1, N).problem in problems
        beyond = {(m, N, K), (m, K, N)} if m == 2048 else set()
        assert {p.shape for p in problems if p.m == m} == {(m, 1, N), (m, N, 1)} | beyond
    model = nn.Sequential(nn.Linear(K, N))
    assert convert(model, 0.06, device=H200).suite([256]) == ""


def test_unaligned_layers_are_left_to_a_compiler_that_pads() -> None:
    """By the shipped times; eager calls pad nothing, and take FP8 from m = 256 on."""
    dispatcher.use_snapshot(None)
    sizes = (256, 1024, 2048, 6144, 8192)
    for regime in ("compiled", "graph-cold"):
        model = nn.Sequential(nn.Linear(479, 1024, bias=False, dtype=torch.bfloat16))
        found = lokakern.convert(
            model, 0.06, device=H200, regime=regime, m_range=(256, 8192), inference=True
        )
        assert found.regime == regime
        (site,) = found.sites.values()
        chosen = {choice.m: choice for choice in site.routes[0].choices}
        assert set(chosen) == set(sizes)
        for choice in chosen.values():
            plain = choice.table.plain_at(choice.m)
            unaligned = next(c for c in choice.table.candidates if c.name == BF16)
            time = unaligned.time_at(choice.m)
            assert plain is not None and time is not None
            assert plain.latency_us < 0.75 * time[0].latency_us
        routed = [kernel_at(traced_route(site.routes[0].text), m) for m in sizes]
        assert any(routed) == (regime == "graph-cold"), routed
        if regime == "compiled":
            assert all(kernel_at(site.routes[0].text, m) for m in sizes)
            assert "eager calls, in which nothing pads rows, run cuda." in site.routes[0].why
            assert found.choices[0]["choice"] == "bf16" != found.choices[0]["eager_choice"]
            assert ", 0 of 1 products quantized, 1 more in eager calls only," in repr(found)
    x = torch.randn(256, 479).bfloat16()
    model = nn.Sequential(nn.Linear(479, 1024, bias=False, dtype=torch.bfloat16))
    expected = model(x)
    lokakern.convert(model, 0.06, device=H200, m_range=(256, 8192))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="eager")(x), expected)
    error = (model(x) - expected).norm() / expected.norm()
    assert 0.01 < error < 0.06, "E4M3 rounds by 4 %"


@pytest.mark.parametrize("regime", ["compiled", "compiled-graph", "graph-cold"])
def test_eager_calls_choose_against_the_unaligned_product(
    book: Book, regime: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """FP8 is slower than padded bf16 at both m, and faster than unaligned bf16 at one."""
    n, k, wide = 512, 479, 480
    fp8 = "cuda.quantize_row+cuda.scaled_gemm_row"
    products = (
        gemm,
        lambda m, n, k: _grad_input_problem(n, k)(m),
        lambda m, n, k: grad_weight_case(m, n, k).problem,
    )
    for problem_of in products:
        for m, unaligned, aligned, row in ((256, 4.0, 3.0, 5.0), (1024, 40.0, 4.0, 10.0)):
            problem = problem_of(m, n, k)
            book.write(
                time(BF16, problem, unaligned), time(BF16, problem_of(m, n, wide), aligned),
                time(fp8, problem, row), accuracy(fp8, problem, 0.04, only=("X1",)),
            )  # fmt: skip
    model = nn.Sequential(nn.Linear(k, n, bias=False, dtype=torch.bfloat16))
    found = convert(model, 0.06, device=H200, regime=regime)
    assert all(kernels(found, "0", gemm, (256, 1024)) == ["", fp8] for gemm in GEMMS)
    routes = found.sites["0"].routes
    assert [traced_route(route.text) for route in routes] == ["", "", ""]
    assert ", 0 of 3 products quantized, 3 more in eager calls only, " in repr(found)
    said = [(row["choice"], row["eager_choice"]) for row in found.choices]
    assert said == [("bf16", f"bf16, {fp8}")] * 3
    found.table()
    table = [[word.strip() for word in x.split("│")] for x in capsys.readouterr().out.splitlines()]
    assert [row[4:6] for row in table if row[0] == "0"] == [["bf16", f"bf16, {fp8}"]] * 3
    assert all(f"nothing pads rows, run {fp8}" in route.why for route in routes)
    assert found.refresh() == []
    assert found.refresh(None) == [f"0/{gemm}" for gemm in GEMMS]


def test_a_weight_that_compiled_graphs_read_is_not_offloaded() -> None:
    dispatcher.use_snapshot(None)
    model = nn.Sequential(nn.Linear(479, 1024, bias=False, dtype=torch.bfloat16))
    found = lokakern.convert(model, 0.06, device=H200, m_range=(256, 8192), inference=True)
    assert all(kernel_at(found.sites["0"].routes[0].text, m) for m in (256, 8192))
    found.offload(m_range=(256, 8192))
    assert not model[0].is_offloaded


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(FormatError, match="model is the class Sequential; expected"):
        convert(nn.Sequential, 0.06)
    with pytest.raises(FormatError, match="model is int; expected"):
        convert(7, 0.06)


def test_an_unknown_regime_is_refused(known: Book) -> None:
    model = model_of()
    with pytest.raises(UnknownNameError, match="regime 'graphs' is unknown"):
        convert(model, 0.06, device=H200, regime="graphs")
    assert type(model[0]) is nn.Linear


def test_reasons_name_no_emulation_and_no_call_of_dispatch() -> None:
    """By the shipped times; of a layer with 13 inputs emulations were timed, too."""
    dispatcher.use_snapshot(None)
    model = nn.Sequential(nn.Linear(13, 512), nn.Linear(512, 13, bias=False))
    rows = convert(model, 0.06, device=H200).choices
    assert len(rows) == 6 and any("slower: " in row["why"] for row in rows)
    assert not any("emulated" in row["why"] or "ask with" in row["why"] for row in rows)


def test_a_suite_has_the_padded_sizes_of_unaligned_layers(known: Book, tmp_path: Path) -> None:
    """Those that a compiler pads to, and those of Pad, but none of layers that Pad leaves alone."""
    model = nn.Sequential(nn.Linear(143, 300), nn.Linear(300, 1))
    for inference in (False, True):
        found = convert(model, 0.06, device=H200, inference=inference)
        file = tmp_path / f"{inference}.toml"
        file.write_text(found.suite([256]))
        problems = {case.problem for case in suite_from_file(file).build(Format.E4M3FN)}
        for problem in [p for p in problems if p.op == "gemm" and not p.prepared]:
            wide = padded_problem(problem) if 1 not in problem.shape else None
            assert wide is None or wide in problems, problem
        of_pad = {p.prepared for p in problems if (p.m, p.n, p.k) == (256, 304, 144)}
        assert of_pad == ({False, True} if inference else {False})
        assert not any({8, 16} & {p.n, p.k} for p in problems)
        found.undo()


def test_a_linear_with_a_budget_chooses_its_kernels() -> None:
    layer = Linear(K, N, budget=0.06, dtype=torch.bfloat16)  # this CPU was never measured
    assert layer._routes == ("", "", "")
    with pytest.raises(BudgetError):
        Linear(K, N, budget=-1.0)


def test_products_outside_linear_layers_are_reported(known: Book) -> None:
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.experts = nn.Linear(K, N), nn.Parameter(torch.randn(2, N, 4))
            self.shift = nn.Parameter(torch.zeros(2, N, 1))
            self.more = nn.ParameterList([torch.randn(4, 4)])

    found = convert(Mix(), 0.06, device=H200)
    assert set(found.skipped) == {"experts", "more.0"}
    assert found.skipped["experts"] == "a Mix holds [2, 64, 4]; it has no forward"
    report = ProbeReport([], ErrorBudget(row_err=0.06), None, unseen={"experts": "2 products"})
    found = convert(Mix(), report, device=H200)
    assert found.skipped == {"experts": "2 products"}


def test_other_dtypes_stay_unquantized_with_one_warning(known: Book) -> None:
    checks.warn_once.cache_clear()
    model = model_of(torch.float32)
    convert(model, 0.06, device=H200)
    with pytest.warns(UserWarning, match="torch.float32 by a weight in torch.float32 unquantized"):
        model(torch.randn(256, K))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(256, K))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"report_or_budget": "0.06"}, FormatError, "is str; expected a ProbeReport, a number"),
    ({"report_or_budget": True}, FormatError, "is bool"),
    ({"report_or_budget": float("nan")}, BudgetError, "nan"),
    ({"device": "NVIDIA H9000"}, DeviceError, "H9000"),
    ({"m_range": (4, 2)}, ShapeError, r"m_range is \(4, 2\); expected .* in this order"),
    ({"weight_scales": ["1x128"]}, UnknownNameError, "names '1x128'; expected some of tensor, row"),
    ({"m_range": 4}, ShapeError, "m_range is 4"),
    ({"distribution": 3}, UnknownNameError, "distribution is 3"),
    ({"filter": lambda module, name: False}, UnknownNameError, "has no layer to convert"),
]


@pytest.mark.parametrize(("wrong", "error", "words"), BAD)
def test_invalid_arguments_raise_and_leave_the_model_unchanged(
    known: Book, wrong: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = model_of()
    arguments: dict[str, Any] = {"report_or_budget": 0.06, "device": H200, **wrong}
    with pytest.raises(error, match=words):
        convert(model, arguments.pop("report_or_budget"), **arguments)
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]


def test_explain_of_an_unknown_site(known: Book) -> None:
    with pytest.raises(UnknownNameError, match="no site '7'; expected one of 0, 2"):
        convert(model_of(), 0.06, device=H200).explain("7")
