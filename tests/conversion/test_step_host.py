"""The host of a training step: scripted costs, and the m from which on convert quantizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lokakern
from lokakern.bench.models.zoo.catalog import ZOO
from lokakern.conversion.convert import Conversion
from lokakern.nn.routed_matmul import kernel_at, traced_route
from lokakern.registry.schema.records import HostCostRecord
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.storage import paths
from lokakern.selection import dispatcher, host_cost
from lokakern.selection.host_cost import STEP, TRAINING, TRAINING_BF16, MachineClass
from lokakern.selection.weight_forms import with_weight
from lokakern.types import Granularity
from lokakern.workloads.gemm_gradient_cases import grad_weight_case
from tests.support.measurements import BF16, ENVIRONMENT, H200, ROW, Book, accuracy, gemm, time
from tests.support.rows_at_once import RowsAtOnce

HERE = MachineClass("AMD EPYC 9654 96-Core Processor", "2.11")
# By m: the times of bfloat16 and of a quantized kernel on the GPU, in us.
TIMES = {64: (6.0, 4.0), 1024: (11.0, 7.0), 8192: (60.0, 35.0)}
PLAIN_US, QUANTIZED_US = 1.0, 2.0  # of the host for a product


def costs(**us: float) -> list[HostCostRecord]:
    """Costs of the host by kind of call, in the regime "compiled"."""
    return [
        HostCostRecord(
            cpu=HERE.cpu, regime="compiled", call=call, language="torch",
            path="python" if call == TRAINING else "torch", host_us_p20=x, host_us_p50=x,
            host_us_p80=x, round_count=40, calls_per_round=20,
        )
        for call, x in us.items()
    ]  # fmt: skip


def write(path: Path, records: list[HostCostRecord]) -> None:
    run = RowsAtOnce.create(path, suite="host", command="test", harness_digest="0" * 64)
    with run:
        for record in records:
            run.add_host_cost(H200, ENVIRONMENT, record)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of this machine, whose host makes calls in Python."""
    monkeypatch.setattr(dispatcher, "devices_here", lambda: frozenset({H200}))
    monkeypatch.setattr(host_cost, "machine_class", lambda: HERE)
    monkeypatch.setattr(host_cost.native, "status", lambda: "off")
    yield
    dispatcher.use_snapshot(None)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    """Times of outputs, not of gradients, and host costs of their calls."""
    book = Book(tmp_path / "book.sqlite")
    rows = [
        row
        for m, (bf16, quantized) in TIMES.items()
        for row in (time(BF16, gemm(m), bf16), time(ROW, gemm(m), quantized))
    ]
    book.write(*rows, accuracy(BF16, gemm(64), 0.003), accuracy(ROW, gemm(64), 0.04))
    write(book.path, costs(**{TRAINING_BF16: PLAIN_US, TRAINING: QUANTIZED_US}))
    book.use()
    return book


def with_step(book: Book, us: float) -> None:
    write(book.path, costs(**{STEP: us}))
    book.use()


def converted(layers: int = 1, **options: object) -> Conversion:
    with torch.device("meta"):  # routes need no data
        stack = (nn.Linear(512, 512, bias=False, dtype=torch.bfloat16) for _ in range(layers))
        model = nn.Sequential(*stack)
    return lokakern.convert(model, 0.06, device=H200, **options)  # type: ignore[arg-type]


def starts(found: Conversion) -> set[int]:
    """The least m at which the outputs quantize, 0 if at none."""
    texts = [site.routes[0].text for site in found.sites.values()]
    return {next((m for m in range(1, 9000) if kernel_at(text, m)), 0) for text in texts}


def test_without_the_cost_of_a_step_each_product_is_judged_alone(book: Book) -> None:
    found = converted(2)
    assert starts(found) == {64}
    assert "training step" not in found.explain()


@pytest.mark.parametrize(
    ("layers", "least_m"),
    [
        # A layer takes the host 2 + 1 + 1 us besides the 60 of the step, and the GPU `TIMES`.
        (2, 4389),  # at 4388 the GPU takes 67.99 us, and the host 68
        (12, 641),  # at 640 both take 108 us
        (1, 0),  # 64 us of the host, and 60 of the GPU at the largest m that was measured
        (100, 64),  # 600 us of the GPU at the smallest: the host is never the limit
    ],
)
def test_products_are_quantized_from_the_m_on_at_which_the_gpu_limits_the_step(
    book: Book, layers: int, least_m: int
) -> None:
    with_step(book, 60.0)
    found = converted(layers)
    assert starts(found) == {least_m}
    if least_m > 64:
        host = 60 + 4 * layers
        words = f"host cost: a training step takes the host {host} us, {4 * layers} of them for "
        assert f"{words}{3 * layers} products; below m={least_m} the GPU takes" in found.explain()
        assert f"; bf16 below m={least_m}: the host limits the step" in found.choices[0]["why"]
        at = found.choices[0]["m"].index(64)
        assert found.choices[0]["us"][at] == 6.0, "of bfloat16, which runs there"


def test_the_table_tells_the_limit(book: Book, capsys: pytest.CaptureFixture[str]) -> None:
    with_step(book, 60.0)
    converted().table()
    told = " ".join(capsys.readouterr().out.split())
    assert "a training step takes the host 64 us, 4 of them for 3 products; below m=8739" in told


def test_gradients_count_at_the_samples_that_they_sum_over(book: Book) -> None:
    for m, us in ((1024, 40.0), (8192, 400.0)):
        problem = grad_weight_case(m, 512, 512).problem
        book.write(time(BF16, problem, us), time(ROW, problem, us / 2))
    with_step(book, 60.0)
    found = converted()
    # 64 us of the host, or 65 with a quantized gradient: (40 + 11) + x (360 + 49) of the GPU.
    quantized = sum(bool(route.text) for route in next(iter(found.sites.values())).routes)
    share = (63 + quantized - 51) / 409
    assert starts(found) == {1024 + int(share * 7168) + 1}


def test_inference_and_graphs_are_as_without_the_cost_of_a_step(book: Book) -> None:
    for m, (bf16, quantized) in TIMES.items():
        problem = with_weight(gemm(m, prepared=True), Granularity.ROW, H200)
        book.write(time(BF16, problem, bf16), time(ROW, problem, quantized))
    with_step(book, 1e4)
    assert starts(converted()) == {0}
    for found in (converted(inference=True), converted(regime="compiled-graph")):
        assert starts(found) == {64}
        assert "training step" not in found.explain()


def test_eager_calls_of_unaligned_layers_are_judged_alone(book: Book) -> None:
    """What the host limits is a compiled step, in which the rows of these products are padded."""
    fp8 = "cuda.quantize_row+cuda.scaled_gemm_row"
    for m, (bf16, quantized) in TIMES.items():
        odd = gemm(m, k=479)
        book.write(
            time(BF16, odd, 4 * bf16), time(BF16, gemm(m, k=480), bf16),
            time(fp8, odd, 2 * quantized), accuracy(fp8, odd, 0.04),
        )  # fmt: skip
    with_step(book, 1e4)
    with torch.device("meta"):
        layers = [nn.Linear(k, 512, bias=False, dtype=torch.bfloat16) for k in (479, 512)]
    found = lokakern.convert(nn.Sequential(*layers), 0.06, device=H200)
    first, second = (site.routes[0].text for site in found.sites.values())
    assert kernel_at(first, 1024) and not traced_route(first) and not second


def test_a_layer_alone_is_no_step(book: Book) -> None:
    """It may be a part of any model, as a `lokakern.Linear` with a budget."""
    with_step(book, 1e4)
    with torch.device("meta"):
        layer = nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
    found = lokakern.convert(layer, 0.06, device=H200)
    assert starts(found) == {64} and "training step" not in found.explain()


def test_forced_kernels_stay(book: Book) -> None:
    with_step(book, 1e4)
    model = nn.Sequential(nn.Linear(512, 512, dtype=torch.bfloat16))
    found = lokakern.convert(model, kernels="row", device=H200)
    assert all(kernel_at(route.text, 64) for route in found.sites["0"].routes)


def test_a_range_of_m_stays_the_outer_limit(book: Book) -> None:
    with_step(book, 60.0)
    (least_m,) = starts(converted(2))
    found = converted(2, m_range=(64, 8192))
    assert starts(found) == {least_m}
    text = found.sites["0"].routes[0].text
    assert kernel_at(text, 8192) and not kernel_at(text, 8208)
    assert starts(converted(2, m_range=(64, 1024))) == {0}, "measured m outside do not count"


def test_refresh_finds_a_cost_that_was_measured_since(book: Book) -> None:
    found = converted(2)
    with_step(book, 60.0)
    assert found.refresh() == ["0/output", "1/output"]
    assert starts(found) == {4389}


@pytest.mark.parametrize(
    ("model", "batch", "is_quantized"),
    [("tower", 8192, False), ("tower", 32768, True), ("wide", 2048, False), ("wide", 8192, True)],
)
def test_models_of_the_zoo_quantize_where_the_gpu_limits_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, batch: int, is_quantized: bool
) -> None:
    """Without graphs, FP8 makes the steps of an H200 0.97, 1.20, 0.97 and 1.34 times as fast."""
    path = tmp_path / "costs.sqlite"
    write(path, costs(**{TRAINING_BF16: 41.0, TRAINING: 48.0, STEP: 1500.0}))
    dispatcher.use_snapshot(load_snapshot([*paths.shipped_databases(), path]))
    with torch.device("meta"):
        built = ZOO[model].build().to(torch.bfloat16)
    found = lokakern.convert(built, 0.06, device=H200.product)
    routes = [route for site in found.sites.values() for route in site.routes]
    assert any(kernel_at(route.text, batch) for route in routes) is is_quantized
