"""Kernels for long rows: every cluster, size, format and value, and what they refuse."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern import numerics, nvrtc
from lokakern.device import current_device
from lokakern.functional.run import run
from lokakern.kernels.cuda import quantize, quantize_long, tiles
from lokakern.measure.tiled_compare import compare_bytes
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS
from lokakern.types import (
    Device,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    QuantizedTensor,
    Rejected,
)
from tests.kernels.test_kernels import hostile, quantized_wrong
from tests.support.disassembly import disassembled
from tests.support.kernel_cases import LONG_ROWS, kernel_here
from tests.support.norm_programs import long_rows
from tests.support.sharing import shared_folder

SEEDS = (0,)  # of everything drawn here
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)
SOURCES = (Format.BFLOAT16, Format.FLOAT16, Format.FLOAT32)
TARGETS = (Format.E4M3FN, Format.E5M2)
COLUMNS = (16385, 17280, 17283, 20001, 34560, 65537, 69120, 123200, 131072, 262144)
# Threads, 16 columns of a thread in a box, and whether amax of the next row comes first.
RINGS = ((512, 1, True), (512, 2, True), (512, 1, False), (256, 1, True), (768, 1, True))
PROGRAMS = dict(long_rows())
WORDS = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]+)")


def on_gpu(op: str) -> list[Any]:
    names = [name for name in LONG_ROWS if KERNELS[name].op == op]
    return [pytest.param(name, "cuda", id=name, marks=pytest.mark.gpu) for name in names]


def plans() -> Iterator[tuple[int, quantize_long.Plan]]:
    """Bytes of an element, and each plan that there is."""
    for columns, item in itertools.product(COLUMNS, (2, 4)):
        for cluster, threads, rounds in itertools.product((1, 2, 4, 8), (256, 512, 768), (1, 2)):
            plan = quantize_long.plan_for(columns, item, cluster, threads, rounds)
            if plan is not None:
                assert plan.cluster * plan.piece >= columns
                last = (plan.cluster - 1) * plan.piece + (plan.per_piece - 1) * plan.box
                assert last < columns, "a box is empty"
                yield item, plan


def refusal(name: str, problem: Problem, device: Device = H200) -> str:
    answer = KERNELS[name].supports(problem, device)
    return answer.reason if isinstance(answer, Rejected) else ""


def test_rings_fit_and_hold_enough_pieces() -> None:
    found = list(plans())
    assert {plan.cluster for _, plan in found} == {1, 2, 4, 8}
    for item, plan in found:
        assert plan.shared_bytes(item) <= tiles.SHARED_BYTES
        least, most = quantize_long.LEAST_PIECES, quantize_long.MOST_PIECES
        assert least <= plan.boxes / plan.per_piece <= most
        assert plan.per_piece * plan.box >= plan.piece
        assert plan.piece % quantize_long.WIDE == plan.box % quantize_long.WIDE == 0


@pytest.mark.parametrize(("columns", "item", "cluster"), [
    (17280, 2, 1), (17280, 4, 2), (34560, 2, 2), (69120, 2, 4), (123200, 2, 8), (123200, 4, 8),
    (262144, 2, 8),
])  # fmt: skip
def test_longer_rows_are_shared_by_more_blocks(columns: int, item: int, cluster: int) -> None:
    assert quantize_long.plan_of(columns, item).cluster == cluster


def test_clusters_are_those_that_a_gpu_holds() -> None:
    found = [quantize_long.clusters_at_once(n, H200.compute_units) for n in (1, 2, 4, 8)]
    assert found == [132, 66, 30, 14]
    assert quantize_long.clusters_at_once(8, 4) == 1, "at least one"
    assert quantize_long.clusters_at_once(2, 114) == 57


@pytest.mark.parametrize("suffix", ["", "_power_of_two"])
def test_what_a_quantizer_refuses(suffix: str) -> None:
    name = f"cuda.quantize_long_row{suffix}"
    problem = make_problem("quantize", (64, 17280), epilogue=suffix[1:] or "none")
    for source, target in itertools.product(SOURCES, TARGETS):
        given = replace(problem, a=Operand(source), out_format=target)
        assert not refusal(name, given), given
    others = {
        "more than 16384": replace(problem, k=16384),
        "start at multiples": replace(problem, a=replace(problem.a, alignment=8)),
        "must be contiguous": replace(problem, a=replace(problem.a, layout=Layout.COLUMN)),
        "k=400000": replace(problem, k=400000),
        "scales": replace(problem, out_granularity=Granularity.GROUP),
        "epilogue": replace(problem, epilogue="static"),
    }
    for words, other in others.items():
        assert words in refusal(name, other), words
    assert "k=262144 takes" in refusal(name, replace(problem, k=262144, a=Operand(Format.FLOAT32)))
    assert "needs sm_90" in refusal(name, problem, replace(H200, architecture="sm_100"))


@pytest.mark.parametrize("name", [name for name in LONG_ROWS if KERNELS[name].op == "gemm"])
def test_what_a_composition_refuses(name: str) -> None:
    """Its weight is of `cuda.quantize_row`, which takes any rows."""
    problem = make_problem("gemm", (256, 512, 17280))
    assert KERNELS[name].parts[:2] == ("cuda.quantize_long_row", "cuda.quantize_row")
    assert not refusal(name, problem)
    assert problem.b is not None
    turned = replace(problem, b=replace(problem.b, layout=Layout.ROW))
    assert not refusal(name, turned)
    short = make_problem("gemm", (256, 512, 1024))
    assert "cuda.quantize_long_row: takes rows of more than 16384" in refusal(name, short)


def test_float16_has_a_program_of_its_own() -> None:
    plan = quantize_long.plan_of(123200, 2)
    programs = [
        quantize_long.bind(123200, plan, True, source.dtype, Format.E4M3FN.dtype).program
        for source in SOURCES[:2]
    ]
    assert [Path(program.source).name for program in programs] == [
        "quantize_long.cu", "half_quantize_long.cu"
    ]  # fmt: skip
    assert programs[0].macros == programs[1].macros


@pytest.mark.parametrize("suffix", ["", "_power_of_two"])
def test_rows_that_lie_askew_are_left_to_the_quantizer_of_any_rows(
    suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers launch the kernel of a route on whatever their input is."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(quantize, "_quantize", lambda *given: found.append(given))
    monkeypatch.setattr(quantize_long, "launch", lambda *given: found.append(given))
    kernel = KERNELS[f"cuda.quantize_long_row{suffix}"]
    whole = torch.zeros(4, 17288).bfloat16()
    odd, turned = torch.zeros(4, 17284).bfloat16(), torch.zeros(17280, 4).t()
    for x in (whole[:, 1:17281], odd[:, :17280], turned, whole[:, :17280]):
        kernel.launch(x, x, x, ())
    assert [given[:2] for given in found[:3]] == [(Granularity.ROW, bool(suffix))] * 3
    assert found[3][0].shape == (4, 17280)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.sample(every=8)
def test_rows_arrive_in_bulk_and_leave_16_bytes_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a box is given back behind the last use of what was read of it."""
    monkeypatch.setenv("LOKAKERN_CACHE", str(shared_folder("compiled")))
    (code,) = disassembled([nvrtc.cubin(PROGRAMS[name], "sm_90")])
    words, macros = WORDS.findall(code), dict(PROGRAMS[name].macros)
    assert not [word for word in words if word.startswith("LDG")]
    assert words.index("ACQBULK") < next(
        at for at, word in enumerate(words) if word.startswith("UBLKCP"))  # fmt: skip
    is_ragged = int(macros["COLUMNS"]) % quantize_long.WIDE != 0
    stores = [word for word in words if word.startswith("STG")]
    assert ("STG.E.128" in stores) is bool(macros["WHOLE"])
    assert is_ragged or len(stores) == 2, "a wide one, and that of the scale"
    assert any(word.startswith("STAS") for word in words) is (int(macros["CLUSTER"]) > 1)
    given_back = max(
        at for at, word in enumerate(words) if word.startswith("SYNCS.ARRIVE") and "A1T0" in word
    )
    begins = max(at for at in range(given_back) if words[at].startswith("LDS.128"))
    between = words[begins:given_back]
    assert any(word.startswith("STG") for word in between), "what was read is written before"


# --- on a GPU


def with_gaps(x: Tensor) -> Tensor:
    """The same rows, each followed by NaN, at multiples of 16 bytes."""
    rows, columns = x.shape
    pitch = -(-columns // 8) * 8 + 8
    whole = torch.full((rows, pitch), math.nan, dtype=x.dtype, device=x.device)
    whole[:, :columns] = x
    return whole[:, :columns]


def drawn(rows: int, columns: int, source: Format) -> Tensor:
    """Rows of zeros, subnormals, extremes and what is not finite among others, with gaps of NaN."""
    largest = 1e4 if source is Format.FLOAT16 else 1e36
    x = hostile(rows, columns, "cuda", source, largest=largest)
    if rows > 8:
        x[5, 7], x[6, 0], x[6, columns - 1] = math.nan, math.inf, -math.inf
        x[7] = math.inf
        x[8, : columns // 2] = math.nan
    return with_gaps(x)


def assert_right(kernel: Any, x: Tensor, form: Format, padded: bool = True) -> None:
    wrong = quantized_wrong(kernel, x, form, padded)
    assert wrong is not None, "refused"
    assert not wrong, f"{kernel} {form.value} {x.dtype} {list(x.shape)}: {wrong}"


@pytest.mark.parametrize(("name", "where"), on_gpu("quantize"))
def test_every_size_and_format(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    forms = itertools.cycle(TARGETS)
    for columns, source in itertools.product(COLUMNS, SOURCES):
        if columns * source.dtype.itemsize > 600_000:
            continue
        form = next(forms)
        for rows in (1, 2, 9, 131, 300):
            x = drawn(rows, columns, source)
            for padded in (True, False):
                assert_right(kernel, x, form, padded)


@pytest.mark.parametrize(("name", "where"), on_gpu("quantize"))
@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_every_cluster_and_ring(
    name: str, where: str, cluster: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one cluster that takes all rows, of some, and of more clusters than there is room for."""
    kernel = kernel_here(name, where)
    monkeypatch.setattr(quantize_long, "clusters_at_once", lambda *_: at_once)
    for columns, source in itertools.product((17283, 34560, 123200), SOURCES):
        x = drawn(67, columns, source)
        for threads, rounds, ahead in RINGS if source is Format.BFLOAT16 else RINGS[:1]:
            item = source.dtype.itemsize
            plan = quantize_long.plan_for(columns, item, cluster, threads, rounds)
            if plan is not None:
                chosen = plan._replace(ahead=ahead)
                monkeypatch.setattr(quantize_long, "plan_of", lambda *_, plan=chosen: plan)
                assert_right(kernel, x, Format.E4M3FN)


@pytest.mark.parametrize(("name", "where"), on_gpu("quantize"))
def test_many_rows_are_equal_bits_a_hundred_times(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    for rows, columns in ((3000, 17280), (700, 69120), (500, 123200)):
        x = torch.randn(rows, columns, device=where).bfloat16()
        assert_right(kernel, x, Format.E4M3FN)
        data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=where)
        scale = torch.empty(rows, 1, device=where)
        kernel.launch(x, data, scale, ())
        others = [(torch.empty_like(data), torch.empty_like(scale)) for _ in range(4)]
        for _ in range(25):
            for other, other_scale in others:  # launches that follow one another
                other.view(torch.uint8).fill_(0xA5)
                other_scale.fill_(math.nan)
            for other, other_scale in others:
                kernel.launch(x, other, other_scale, ())
            for other, other_scale in others:
                assert not compare_bytes(other, other_scale, data, scale)


@pytest.mark.parametrize(("name", "where"), on_gpu("quantize"))
def test_every_value_of_16_bits(name: str, where: str) -> None:
    """Under scales from the smallest to the largest, and each value that is not finite."""
    kernel = kernel_here(name, where)
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for source, form in itertools.product((torch.bfloat16, torch.float16), TARGETS):
        x = values.view(source).to(where).repeat(24, 1)
        for row in range(24):  # all but what is larger than one bound each
            x[row, x[row].abs() > 2.0 ** (8 * row - 60)] = 0.0
        x[0] = values.view(source).to(where)
        assert_right(kernel, x, form)


@pytest.mark.parametrize(("name", "where"), on_gpu("quantize"))
def test_rows_past_two_to_the_31_elements(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    columns = 17280
    rows = 2**31 // columns + 200
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=where).normal_()
    data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=where)
    scale = torch.full((rows, 1), math.nan, device=where)
    kernel.launch(x, data, scale, ())
    by_power = "power_of_two" in kernel.epilogues
    for some in (slice(0, 100), slice(rows - 300, rows)):
        wanted = numerics.quantize(
            x[some], Format.E4M3FN, Granularity.ROW, power_of_two_scale=by_power
        )
        assert not compare_bytes(data[some], scale[some], wanted.data, wanted.scale)
    assert scale.isfinite().all()


@pytest.mark.parametrize(("name", "where"), on_gpu("quantize"))
def test_rows_that_lie_askew_are_right(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    by_power = "power_of_two" in kernel.epilogues
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        whole = torch.randn(33, 17292, device=where).to(dtype)
        for x in (whole[:, 1:17281], whole[:, :17280], whole.t().contiguous().t()):
            data = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=where)
            scale = torch.full((33, 1), math.nan, device=where)
            kernel.launch(x, data, scale, ())
            wanted = numerics.quantize(
                x, Format.E4M3FN, Granularity.ROW, power_of_two_scale=by_power
            )
            assert not compare_bytes(data, scale, wanted.data, wanted.scale)


@pytest.mark.parametrize(("name", "where"), on_gpu("quantize"))
def test_no_rows(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    x = torch.empty(0, 17280, dtype=torch.bfloat16, device=where)
    made = run(kernel, x, power_of_two="power_of_two" in kernel.epilogues)
    assert made.data.shape == (0, 17280)


@pytest.mark.parametrize(("name", "where"), on_gpu("gemm"))
def test_products_are_those_behind_the_quantizer_of_any_rows(name: str, where: str) -> None:
    kernel = kernel_here(name, where)
    other = KERNELS[f"cuda.quantize_row+{kernel.parts[-1]}"]
    device = current_device(where)
    for dtype, (m, n, k) in itertools.product(
        (torch.bfloat16, torch.float16), ((130, 64, 17280), (1, 128, 34560), (256, 512, 123200))
    ):
        form = Format.of(dtype)
        problem = make_problem("gemm", (m, n, k), a=Operand(form), out_format=form)
        if isinstance(kernel.supports(problem, device), Rejected):
            assert isinstance(other.supports(problem, device), Rejected)
            continue
        x = torch.randn(m, k, device=where).to(dtype)
        w = torch.randn(n, k, device=where).to(dtype)
        made = numerics.quantize(w, Format.E4M3FN, Granularity.ROW)
        prepared = QuantizedTensor(made.data, made.scale, made.granularity, True, w)
        for b in (w.t(), w.t().contiguous(), prepared):
            found, wanted = run(kernel, x, b), run(other, x, b)
            assert torch.equal(found, wanted), f"{m} x {n} x {k} {dtype}"
