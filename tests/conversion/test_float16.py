"""`convert` for float16: choices by errors with it, dtypes of calls, and what it leaves alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lokakern
from lokakern import mods
from lokakern.conversion.compile_backend import Options, replace_products
from lokakern.conversion.convert import Conversion
from lokakern.conversion.routes import GEMMS, problem_of
from lokakern.errors import ChoicesError, FormatError, UnsupportedError
from lokakern.functional import checks
from lokakern.functional.norm_gradient import KERNEL as GRADIENT_KERNEL
from lokakern.nn import compiled_form, joined, rectified
from lokakern.nn.chain_plan import steps_at
from lokakern.nn.graph_products import linear_products
from lokakern.nn.linear import Linear
from lokakern.nn.rectified import KERNEL as RELU_KERNEL
from lokakern.nn.routed_matmul import FLOAT16, PLAIN
from lokakern.problems import make_problem
from lokakern.registry import float16
from lokakern.selection import dispatcher
from lokakern.types import Format, Granularity, Operand
from lokakern.workloads.gemm_cases import prepared_weight
from lokakern.workloads.suite_files import suite_from_file
from tests.support.chain_rows import (
    FUSED,
    NARROW,
    NONE,
    QUANTIZING,
    ROW,
    WIDE,
    half_errors,
    layer_problem,
)
from tests.support.conversions import H200, report_of, verdict
from tests.support.measurements import BF16, Book, accuracy, time
from tests.support.measurements import H200 as DEVICE
from tests.support.routed_layers import passed, same

HALF = torch.float16
FP8 = "cuda.quantize_row+cuda.scaled_gemm_row"
M, N, K = 256, 64, 48
WHERE = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
convert = functools.partial(lokakern.convert, distribution="X1", device=H200)


def rows_of(form: Format = Format.BFLOAT16, *, has_times: bool = True) -> list[Any]:
    """Times of all products of a layer, by which FP8 gains, and errors at 0.04 with a format."""
    found = []
    for gemm in GEMMS:
        problem = problem_of(gemm, M, N, K)
        if has_times:
            found += [time(BF16, problem, 8.0), time(FP8, problem, 4.0)]
        measured = problem_of(gemm, M, N, K, half=form)
        found.append(accuracy(FP8, measured, 0.04, only=("X1",)))
    return found


@pytest.fixture
def unmeasured(tmp_path: Path) -> Iterator[Book]:
    """Errors with bfloat16 alone, and times of a relu in a product, and of gradients in one op."""
    relu = time(RELU_KERNEL, make_problem("gemm_norm", (512, 8, 8), epilogue="bias+relu"), 3.0)
    gradient = make_problem(
        "norm_backward", (512, 8), epilogue="bias+relu", out_format=Format.BFLOAT16
    )
    book = Book(tmp_path / "rows.sqlite")
    book.write(*rows_of(), relu, time(GRADIENT_KERNEL, gradient, 3.0)).use()
    yield book
    dispatcher.use_snapshot(None)


@pytest.fixture
def known(unmeasured: Book) -> Book:
    return unmeasured.write(*rows_of(Format.FLOAT16, has_times=False))


def model_of(dtype: torch.dtype = HALF) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N, bias=False), nn.ReLU(), nn.Linear(N, 8)).to(dtype)


def batch(columns: int = K, seed: int = 1) -> Tensor:
    return torch.randn(M, columns, generator=torch.Generator().manual_seed(seed)).to(HALF)


def texts(handle: Conversion, site: str = "0") -> list[str]:
    return list(handle.sites[site].module._routes)


# ---- what is chosen ----


def test_errors_with_float16_decide_and_times_are_those_with_bfloat16(
    unmeasured: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, options in ((model_of(), {}), (model_of(torch.float32), {"dtype": HALF})):
        handle = convert(model, 0.06, **options)
        assert texts(handle) == [PLAIN] * 3
        rows = [row for row in handle.choices if row["site"] == "0"]
        assert {row["choice"] for row in rows} == {"float16"} and rows[0]["us"] == [8.0]
        assert all("error not measured" in row["why"] for row in rows)
        handle.table()
        told = " ".join(capsys.readouterr().out.split())
        assert "float16: times are those with bfloat16" in told
        assert "that of bfloat16, which has as many bytes" in handle.explain("0")
        unmeasured.write(*rows_of(Format.FLOAT16, has_times=False))
        assert handle.refresh() == [f"0/{gemm}" for gemm in GEMMS]
        assert all(FP8 in text and FLOAT16 in text for text in texts(handle))
        assert {row["choice"] for row in handle.choices if row["site"] == "0"} == {FP8}
        words = " under float16 autocast" if options else ""
        assert f"3 of 6 products quantized{words}, regime" in repr(handle)
        unmeasured.path.unlink()
        unmeasured.write(*rows_of())


def test_kernels_without_float16_are_named_as_such(known: Book) -> None:
    """And not as the first reasons, though they are faster in bfloat16."""
    library = "cuda.quantize_row+torch.scaled_mm_row"
    known.write(time(library, problem_of("output", M, N, K), 2.0))
    handle = convert(model_of(), 0.01)  # which no kernel meets
    explained = handle.explain("0")
    assert (
        f"{library}" in explained and "quantized ahead: torch.scaled_mm_row: takes" not in explained
    )
    assert "torch.scaled_mm_row: takes no float16" in explained
    (why,) = (r["why"] for r in handle.choices if (r["site"], r["gemm"]) == ("0", "output"))
    assert FP8 in why.partition(";")[2].partition(";")[0]


def test_missing_errors_are_a_suite_with_float16(unmeasured: Book, tmp_path: Path) -> None:
    """As long as there are no times with it."""
    path = tmp_path / "suite.toml"
    for inference in (False, True):
        path.write_text(convert(model_of(), 0.06, inference=inference).suite([M]))
        cases = suite_from_file(path).cases(DEVICE)
        of_layers = [case.problem for case in cases if case.problem.op == "gemm_norm"]
        assert all(p.a.format is Format.FLOAT16 or p.a.format.is_fp8 for p in of_layers)
        assert bool(of_layers) == inference  # of chains
        problems = [case.problem for case in cases if case.problem.op != "gemm_norm"]
        assert {p.a.format for p in problems} == {Format.FLOAT16}
        for gemm in GEMMS[: 1 if inference else None]:
            assert problem_of(gemm, M, N, K, half=Format.FLOAT16) in problems
        assert {p.op for p in problems} == {"gemm"}
    assert "float16" not in convert(model_of(torch.bfloat16), 0.06).suite([M])


def test_reports_of_probe_admit_kernels_for_their_dtype(
    unmeasured: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = [verdict(gemm, "row", "safe", 0.03) for gemm in GEMMS]
    for own, other in (("float16", "bfloat16"), ("bfloat16", "float16")):
        report = report_of(*(replace(v, dtype=own) for v in verdicts))
        dtype = getattr(torch, own)
        for model, options in ((model_of(dtype), {}), (model_of(torch.float32), {"dtype": dtype})):
            handle = convert(model, report, **options)
            assert all(FP8 in text for text in texts(handle))
            assert all((FLOAT16 in text) is (own == "float16") for text in texts(handle))
            assert ("those with bfloat16" in handle.explain()) is (own == "float16")
            assert "need errors" not in handle.explain()
        handle = convert(model_of(getattr(torch, other)), report)
        assert texts(handle) == [PLAIN] * 3
        why = f"the report judges products in {own}, not {other}: probe the model in {other}"
        assert all(why in route.why for route in handle.sites["0"].routes)
        assert why in handle.explain("0")
        handle.table()
        assert f"in {own}, not {other}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("where", WHERE)
def test_a_model_is_converted_by_what_probe_saw_of_it(unmeasured: Book, where: str) -> None:
    """Under autocast to float16, without any errors in the database."""
    model = model_of(torch.float32).to(where)
    x = batch().float().to(where)

    def step() -> Tensor:
        with torch.autocast(where, HALF):
            y: Tensor = model(x)
        (y.float().square().mean() * 1024.0).backward()
        return y.detach()

    with lokakern.Probe(model, every=1) as probe:
        plain = step()
    report = probe.report(seeds=(0,))
    assert report.dtypes == "float16" and all(v.safety == "safe" for v in report)
    # The gradient of the input of the first layer is not needed, and not judged.
    kinds = zip(texts(convert(model, report, dtype=HALF)), GEMMS, strict=True)
    assert {gemm for text, gemm in kinds if FP8 in text} == {"output", "grad_weight"}
    y = step()
    assert y.dtype is HALF and not torch.equal(y, plain)
    assert (y.double() - plain.double()).norm() <= 0.06 * plain.double().norm()


def test_what_has_no_float16_is_refused_with_the_reason(known: Book) -> None:
    with pytest.raises(FormatError, match=r"dtype is torch\.float64; expected torch\.bfloat16"):
        convert(model_of(torch.float32), 0.06, dtype=torch.float64)


# ---- chains ----


def tower(dtype: torch.dtype = HALF) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.LayerNorm(512), nn.ReLU()
    ).to(dtype)


def chains_of(handle: Conversion) -> list[Any]:
    return [chain for span in handle.spans for chain in span.plan.chains]


def test_chains_are_planned_by_errors_with_float16(chain_book: Book, tmp_path: Path) -> None:
    """And by times with bfloat16; a suite lists what is missing with float16."""
    handle = convert(tower(), 0.06, inference=True)
    assert not chains_of(handle)
    assert chains_of(convert(tower(torch.bfloat16), 0.06, inference=True))
    text = handle.suite([512])
    assert text.count('format = "float16"\nforms = ["chain"]') == 2
    (tmp_path / "s.toml").write_text(text)
    problems = [case.problem for case in suite_from_file(tmp_path / "s.toml").cases(DEVICE)]
    for layer in (WIDE, NARROW):
        for given in ((NONE, NONE, NONE), (NONE, ROW, NONE), (ROW, ROW, NONE), (NONE, ROW, ROW)):
            assert layer_problem(layer, 512, *given, Format.FLOAT16) in problems
    chain_book.write(*half_errors(WIDE), *half_errors(NARROW))
    assert handle.refresh() == ["0 to 2/chain"]
    (chain,) = chains_of(handle)
    assert chain.text.endswith(FLOAT16) and "(float16 to row)" in chain.explain()
    assert [step.kernel for step in steps_at(chain.text, 512)] == [QUANTIZING, FUSED]
    assert not steps_at(chain.text, 100)
    # Nor are layers of both dtypes one chain.
    mixed = nn.Sequential(*tower()[:2], *tower(torch.bfloat16)[2:])
    assert not any(len(chain.layers) > 1 for chain in chains_of(convert(mixed, 0.06)))


def test_kernels_that_read_no_float16_are_in_no_chain_of_it(
    chain_book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though no problem from FP8 to FP8 tells of what is beside the sums."""
    chain_book.write(*half_errors(WIDE), *half_errors(NARROW))
    monkeypatch.setattr(
        float16, "why_not", lambda name, _: "takes no float16" if name == FUSED else None
    )
    for chain in chains_of(convert(tower(), 0.06, inference=True)):
        assert FUSED not in {s.kernel for s in steps_at(chain.text, 512)}
    plans = chains_of(convert(tower(torch.bfloat16), 0.06, inference=True))
    assert any(FUSED in {s.kernel for s in steps_at(plan.text, 512)} for plan in plans)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_chain_runs_in_float16_alone(chain_book: Book, is_compiled: bool) -> None:
    chain_book.write(*half_errors(WIDE), *half_errors(NARROW))
    model, x = tower(), torch.randn(512, 512, generator=torch.Generator().manual_seed(1)).half()
    with torch.no_grad():
        plain, few, exact = model(x), model(x[:100]), tower(torch.float64)(x.double())
        handle = convert(model, 0.06, inference=True)
        assert len(chains_of(handle)) == 1
        call = torch.compile(model, backend="aot_eager") if is_compiled else model
        y = call(x)
        assert y.dtype is HALF and is_chained(call, x)
        assert 1e-3 < (y.double() - exact).norm() / exact.norm() < 0.06
        assert torch.equal(call(x[:100]), few)
        if not is_compiled:
            assert not is_chained(call, x[:100])
            handle.undo()
            assert torch.equal(model(x), plain)
            # A model that was cast after its conversion has no chain until a refresh.
            other = tower(torch.bfloat16)
            handle = convert(other, 0.06, inference=True)
            assert is_chained(other, x.bfloat16())
            other.half()
            assert not is_chained(other, x)


def is_chained(model: Any, x: Tensor) -> bool:
    with torch.no_grad(), torch.profiler.profile() as profile:
        model(x)
    return any(event.name == "lokakern::routed_chain" for event in profile.events())


# ---- tuning ----


def test_a_tuning_in_bfloat16_is_none_for_float16(known: Book, tmp_path: Path) -> None:
    path, given = tmp_path / "limits.json", list(torch.randn(4, M, K))
    for dtype in (torch.bfloat16, HALF):
        model = model_of(torch.float32).eval().requires_grad_(False)
        handle = lokakern.convert(
            model, kernels={"output": "row"}, device=H200, dtype=dtype, inference=True
        )

        def loss(x: Tensor, model: nn.Module = model, dtype: torch.dtype = dtype) -> Tensor:
            with torch.autocast("cpu", dtype):
                return 1.0 + model(x).float().square().mean()

        found = handle.limit_loss(loss, given, relative=1.0)
        assert [site.name for site in found.sites] == ["0", "2"] and not found.unjudged
        if dtype is torch.bfloat16:
            found.save(path)
    with pytest.raises(UnsupportedError, match="autocast in float16, or convert all of the model"):
        handle.limit_loss(lambda x: 1.0 + model(x).square().mean(), given)
    again = functools.partial(
        lokakern.convert, kernels={"output": "row"}, device=H200, inference=True, tuned=path
    )
    again(model_of(torch.float32), dtype=torch.bfloat16)
    with pytest.raises(ChoicesError, match="dtype of 0 is 'float32', and here it is 'float32 in"):
        again(model_of(torch.float32), dtype=HALF)


# ---- what runs ----


def test_a_model_that_was_cast_after_its_conversion(known: Book) -> None:
    """It warns, and a refresh chooses for its new dtype."""
    checks.warn_once.cache_clear()
    model = model_of(torch.bfloat16)
    handle = convert(model, 0.06)
    plain, x = model_of(), batch()
    model.half()
    model.load_state_dict(plain.state_dict())
    with pytest.warns(UserWarning, match="its kernels are for bfloat16"):
        assert torch.equal(model(x), plain(x))
    assert handle.refresh() == [] and FLOAT16 in texts(handle)[0]
    assert not torch.equal(model(x), plain(x))
    handle.undo()
    assert type(model[0]) is nn.Linear and torch.equal(model(x), plain(x))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_eager_and_compiled_models_run_in_float16(
    where: str, dtype: torch.dtype, inference: bool
) -> None:
    """With a norm, activations, a static scale and a layer with one output behind products."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(K, 128), nn.ReLU(), nn.Linear(128, N), nn.LayerNorm(N), nn.SiLU(),
        nn.Linear(N, 128), mods.BlockRMSNorm(128, 32), nn.Hardswish(), nn.Linear(128, 1),
    ).to(dtype).to(where)  # fmt: skip
    kernels = {gemm: "row" for gemm in GEMMS}
    kernels["grad_weight"] = "1x128"
    handle = lokakern.convert(model, kernels=kernels, inference=inference, dtype=HALF)
    assert not handle.rectified and not handle.joined and not handle.forms
    x = batch().to(dtype).to(where)
    torch._dynamo.reset()

    def called(call: Any) -> list[Tensor]:
        with torch.autocast(where, HALF, enabled=dtype is not HALF):
            if not inference:
                y = call(x)
                model.zero_grad()
                y.float().square().sum().backward()
                return [y.detach(), *(p.grad for p in model.parameters())]  # type: ignore[misc]
            with torch.no_grad():
                return [call(x)]

    expected = called(model)
    found = called(torch.compile(model, dynamic=False))
    assert expected[0].dtype is HALF
    for a, b in zip(found, expected, strict=True):
        # Inductor does not round to float16 between operators.
        assert a.dtype is b.dtype and a.isfinite().all()
        assert (a.double() - b.double()).norm() <= 0.05 * b.double().norm()
    handle.undo()
    plain = called(model)
    assert not same(plain, expected)
    assert (plain[0].double() - expected[0].double()).norm() <= 0.3 * plain[0].double().norm()


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_relus_sums_of_biases_and_gradients_behind_layers_are_those_of_bfloat16(
    known: Book, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same places, by the same times; float32 under autocast with a `GradScaler`."""
    for module in (compiled_form, joined, rectified):
        monkeypatch.setattr(module, "is_fast", lambda columns, device: True)

    def made(dtype: torch.dtype) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 1)
        ).to(dtype)

    other, model, plain = convert(made(torch.bfloat16), 0.06), made(dtype), made(dtype)
    handle = convert(model, 0.06, dtype=HALF)
    assert handle.rectified and handle.rectified == other.rectified
    assert handle.joined and (handle.joined, handle.forms) == (other.joined, other.forms)
    torch._dynamo.reset()
    x, ran, found = torch.randn(M, 16).to(dtype), [], []
    for each in (torch.compile(model, backend="aot_eager", fullgraph=True), plain):
        parameters = list(each.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        for _ in range(2):
            optimizer.zero_grad()
            with (
                torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen,
                torch.autocast("cpu", HALF, enabled=dtype is not HALF),
            ):
                y = each(x)
                assert y.dtype is HALF
                scaler.scale((y.float() - 1.0).square().mean()).backward()
            if dtype is not HALF:
                scaler.step(optimizer)
                scaler.update()
        ran.append({event.name for event in seen.events()})
        found.append([y.detach(), *(p.grad for p in parameters)])
    assert {"lokakern::norm_gradient", "aten::_addmm_activation"} <= ran[0] - ran[1]
    for one, exact in zip(*found, strict=True):
        assert one.dtype is exact.dtype
        assert (one.double() - exact.double()).norm() <= 5e-3 * exact.double().norm()


def test_a_kernel_activates_and_quantizes_in_inference(known: Book) -> None:
    """At the m at which it was timed with bfloat16."""
    prepared = make_problem(
        "gemm", (M, N, K), b=prepared_weight(Format.E4M3FN, Granularity.ROW), prepared=True
    )
    relu = make_problem(
        "norm_quantize", (M, K), epilogue="relu", out_format=Format.E4M3FN,
        out_granularity=Granularity.ROW,
    )  # fmt: skip
    errors = accuracy(FP8, replace(prepared, a=Operand(Format.FLOAT16), out_format=Format.FLOAT16),
                      0.04, only=("X1",))  # fmt: skip
    known.write(time(BF16, prepared, 8.0), time(FP8, prepared, 4.0), errors,
                time("cuda.norm_quantize", relu, 2.0))  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, K), nn.ReLU(), nn.Linear(K, N), nn.ReLU()).to(HALF)
    handle = convert(model, 0.06, inference=True)
    assert handle.handed_over == ["2"]
    x = batch(8)
    with torch.no_grad():
        h = model[1](model[0](x))
        expected = model[3](model[2](h))
        seen: list[Tensor] = []
        hook = model[1].register_forward_hook(lambda *given: seen.append(given[-1]))
        assert torch.equal(model(x), expected) and len(seen) == 1
        hook.remove()
        assert torch.equal(model(x), expected)
        calls: list[str] = []
        real = Linear.forward_activated
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Linear, "forward_activated",
                          lambda *given: (calls.append("it"), real(*given))[1])  # fmt: skip
            assert torch.equal(model(x), expected) and calls == ["it"]
        assert real(model[2], model[0](x), "relu", model._handoffs[-1].activating[1]) is not None


def test_a_layer_of_the_library_in_float16(known: Book) -> None:
    layer = lokakern.Linear(K, N, dtype=HALF, budget=0.06, distribution="X1")
    assert layer(batch()).dtype is HALF
    product = lokakern.LinearNormAct(K, N, dtype=HALF, norm="rms", activation="silu")
    handle = lokakern.convert(product, kernels="row", inference=True)
    with torch.no_grad():
        y = Linear.forward(product, batch())
        expected = nn.functional.silu(product.norm(y))
        assert torch.equal(product(batch()), expected)
    assert not handle.spans


def test_delayed_scaling_and_checks(known: Book) -> None:
    layer = nn.Linear(K, N).half()
    handle = lokakern.convert(layer, kernels="tensor", scaling="delayed", check="1:8")
    x, gradient = batch(), batch(N, seed=2)
    first = passed(layer, x, gradient)
    handle.delayed_scaling.update()
    assert same(passed(layer, x, gradient), first) and first[0].dtype is HALF
    found = {row["site"]: row for row in handle.checks}
    assert found["/output"]["checks"] == 2 and 0 < found["/output"]["row_err"] < 0.1
    with torch.no_grad():
        layer.weight.fill_(60000.0)
        assert layer(x.abs() + 1.0).isinf().all()
    (row,) = (row for row in handle.checks if row["site"] == "/output")
    assert row["checks"] == 3 and row["row_err"] < 0.1  # torch's product is infinite, too


class Cast(nn.Module):
    """A product with a parameter in float32 that the forward casts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(K, N))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.half()


def test_a_parameter_that_a_forward_casts_is_a_site() -> None:
    torch.manual_seed(0)
    model = Cast()
    plain, x = model(batch()), batch()
    handle = lokakern.convert(model, kernels="row", dtype=HALF)
    assert list(handle.sites) == ["w"]
    y = model(x)
    assert y.dtype is HALF and not torch.equal(y, plain)
    assert (y - plain).norm() < 0.06 * plain.norm()


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_the_backend_of_torch_compile_takes_it(known: Book, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N)).to(dtype)
    found: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        asked, _options = Options.read({"budget": 0.06, "device": H200, "distribution": "X1"}, None)
        products = linear_products(gm)
        assert [(p.dtype, p.why_not) for p in products] == [(HALF, "")]
        assert replace_products(gm, asked)
        gm.recompile()
        found.extend(str(node.args[3]) for node in gm.graph.nodes if len(node.args) == 7)
        return gm

    torch._dynamo.reset()
    x = batch().to(dtype)
    with torch.autocast("cpu", HALF, enabled=dtype is not HALF):
        y = torch.compile(model, backend=backend)(x)
        converted = lokakern.convert(model, 0.06, device=H200, distribution="X1", dtype=HALF)
        assert y.dtype is HALF and torch.equal(y, model(x))
    assert found == [converted.sites["0"].module._routes[0]] and FLOAT16 in found[0]
