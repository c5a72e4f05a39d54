"""CUDA kernels compute the right bytes, compiled for the CPU with their own launch parameters."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lokakern import numerics
from lokakern.kernels.cuda import (
    quantize,
    quantize_short,
    quantize_sums,
    quantize_tensor,
    quantize_tile,
    quantize_together,
)
from lokakern.measure.tiled_compare import compare_bytes, compare_sums
from lokakern.nvrtc import Program
from lokakern.quantized_tensor import pitch_of
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.sums import error_bound
from lokakern.types import GROUP, Format, Granularity, QuantizedTensor
from tests.support import cuda_host_launch
from tests.support.cuda_host_launch import (
    HALF_HEADER,
    HEADER,
    NORM_HEADER,
    SHORT_HEADER,
    TOGETHER_HEADER,
    HostLaunch,
    sources,
)

load_kernels()  # with what binds them for float16


@pytest.fixture(scope="module")
def folder() -> Path:
    kernels = Path(quantize.SOURCE).parent.glob("*quantize*.cu*")
    headers = {
        "half_ptx.cuh": HALF_HEADER,
        "ptx.cuh": HEADER,
        "norm_backward_ptx.cuh": NORM_HEADER,
        "quantize_short_ptx.cuh": SHORT_HEADER,
        "quantize_together_ptx.cuh": TOGETHER_HEADER,
    }
    return sources("host", {path.name: path for path in kernels} | headers)


@pytest.fixture
def on_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = functools.partial(HostLaunch, folder)
    modules = (quantize, quantize_short, quantize_sums, quantize_tile, quantize_tensor)
    for module in (*modules, quantize_together):
        monkeypatch.setattr(module, "CudaLaunch", launch)
        monkeypatch.setattr(module, "bind", functools.cache(module.bind.__wrapped__))
    for module, name in ((quantize_tile, "bind_scales"), (quantize_together, "bind_tiles")):
        monkeypatch.setattr(module, name, functools.cache(getattr(module, name).__wrapped__))
    monkeypatch.setattr(quantize_tensor, "_units", lambda index: 3)


def test_programs_in_one_process_share_no_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder / "counting.cu"
    source.write_text("""
inline unsigned count() {
    __shared__ unsigned calls;
    return ++calls;
}
""")
    call = 'extern "C" unsigned launch() { return count(); }'
    monkeypatch.setitem(cuda_host_launch.CALLS, "count", call)
    first, second = (
        cuda_host_launch.compiled(folder, Program(str(source), "count", (("NUMBER", number),)))
        for number in (1, 2)
    )
    assert [first(), first(), second()] == [1, 2, 1]


def hostile(rows: int, columns: int, source: torch.dtype) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    sizes = (-9, 4) if source is torch.float16 else (-40, 36)
    x *= torch.logspace(*sizes, rows).unsqueeze(1)  # every size of scale, subnormal ones too
    x[::3] = x[::3].abs().sqrt()
    if rows > 6:
        x[1] = 0.0
        x[2] = -0.0
        x[3, -1], x[4, 0], x[5, columns // 2] = math.nan, math.inf, -math.inf
        x[6] = math.nan
    return x.to(source)


def padded(rows: int, columns: int, form: Format) -> Tensor:
    """Data as lokakern allocates them, with bytes between rows that nobody may write."""
    pitch = pitch_of(columns)
    whole = torch.full((rows, pitch), 0xA5, dtype=torch.uint8)
    return whole.view(form.dtype)[:, :columns]


def check_padding(data: Tensor, fill: int = 0xA5) -> None:
    """Check that the padding between rows is unchanged, or what a kernel fills it with."""
    rows, pitch = data.shape[0], data.stride(0)
    whole = data.view(torch.uint8).as_strided((rows, pitch), (pitch, 1))
    assert (whole[:, data.shape[1] :] == fill).all(), "padding was written"


def check(
    x: Tensor,
    form: Format,
    granularity: Granularity,
    epilogue: str = "none",
    contiguous: bool = False,
    stem: str = "quantize",
    fill: int = 0xA5,
) -> None:
    """Bytes and scales of a quantizer are those of `numerics`, and nothing else is written."""
    suffix = "" if epilogue == "none" else f"_{epilogue}"
    kernel = KERNELS[f"cuda.{stem}_{granularity.suffix}{suffix}"]
    expected, amax = exact(x, form, granularity, epilogue)
    data = padded(*x.shape, form)
    if contiguous:
        data = torch.full(x.shape, 0xA5, dtype=torch.uint8).view(form.dtype)
    scale = granularity.empty_scale(*x.shape, x.device).fill_(math.nan)
    if amax is not None:
        scale.copy_(expected.scale)  # type: ignore[arg-type]
    workspace = kernel.workspace(x, data, scale)
    kernel.launch(x, data, scale, workspace)
    wrong = compare_bytes(data, scale, expected.data, expected.scale)
    assert not wrong, f"{kernel} {form.value} {x.dtype} {list(x.shape)} {x.stride()}: {wrong}"
    check_padding(data, fill)
    if epilogue == "delayed":
        assert float(workspace[0]) == float(amax)  # type: ignore[arg-type]


def exact(
    x: Tensor, form: Format, granularity: Granularity, epilogue: str
) -> tuple[QuantizedTensor, Tensor | None]:
    """Result of `numerics` for x; a given scale is far exceeded by some values."""
    by_power = epilogue == "power_of_two"
    made = numerics.quantize(x, form, granularity, power_of_two_scale=by_power)
    if epilogue not in ("static", "delayed"):
        return made, None
    assert made.scale is not None
    return numerics.quantize_static(x, form, granularity, made.scale * 0.01)


SOURCES = [torch.bfloat16, torch.float32, torch.float16]
# One size of every kind of tile: parts of a warp, a warp, a block, a cluster; exact and not.
ROW_SIZES = [(9, 8), (9, 13), (37, 128), (11, 200), (9, 520), (9, 1024), (9, 2048), (9, 4096),
             (9, 7168), (8, 9001), (8, 16384), (7, 17280), (7, 40001)]  # fmt: skip


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), ROW_SIZES)
@pytest.mark.sample(every=4)
def test_rowwise_quantization_equals_numerics(rows: int, columns: int, source: torch.dtype) -> None:
    form = Format.E4M3FN if source is torch.bfloat16 else Format.E5M2
    check(hostile(rows, columns, source), form, Granularity.ROW)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(9, 13), (37, 128), (70, 384), (9, 1000), (9, 201)])
def test_groupwise_quantization_equals_numerics(
    rows: int, columns: int, source: torch.dtype
) -> None:
    form = Format.E5M2 if source is torch.bfloat16 else Format.E4M3FN
    check(hostile(rows, columns, source), form, Granularity.GROUP)


# Of 1, 2 and 4 threads a row, with every kind of tail; the last blocks and warps have rows left.
SHORT_SIZES = [(1, 1), (9, 13), (300, 39), (70, 50), (37, 55), (37, 90), (37, 100), (19, 121)]


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHORT_SIZES)
@pytest.mark.sample(every=4)
def test_short_rows_without_gaps_equal_numerics(
    rows: int, columns: int, source: torch.dtype
) -> None:
    form = Format.E4M3FN if source is torch.bfloat16 else Format.E5M2
    for granularity in (Granularity.ROW, Granularity.GROUP):
        check(hostile(rows, columns, source), form, granularity, stem="quantize_short", fill=0)


@pytest.mark.usefixtures("on_host")
def test_rows_that_turn_out_to_lie_otherwise_are_read_as_others_are() -> None:
    wide = hostile(20, 80, torch.bfloat16)
    for x in (wide[:, :39], wide.flatten()[1 : 1 + 20 * 39].view(20, 39), wide[:1, 5:18]):
        check(x, Format.E4M3FN, Granularity.ROW, stem="quantize_short")
    dense = wide[:, :39].contiguous()
    check(dense, Format.E4M3FN, Granularity.GROUP, contiguous=True, stem="quantize_short")


@pytest.mark.usefixtures("on_host")
def test_wider_gaps_than_lokakern_leaves_are_not_written() -> None:
    x = hostile(20, 39, torch.bfloat16)
    expected = numerics.quantize(x, Format.E4M3FN, Granularity.ROW)
    data = torch.full((20, 64), 0xA5, dtype=torch.uint8).view(Format.E4M3FN.dtype)[:, :39]
    scale = Granularity.ROW.empty_scale(20, 39, x.device)
    KERNELS["cuda.quantize_short_row"].launch(x, data, scale, ())
    assert not compare_bytes(data, scale, expected.data, expected.scale)
    check_padding(data)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_lines_too_long_for_a_cluster_are_read_twice(
    source: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "LARGEST_BLOCK", 128)
    monkeypatch.setattr(quantize, "LONGEST_TEAM", 96)
    assert quantize.tile_of(40001, 8) == (96, quantize.LOADS, 96, 1, 1)
    check(hostile(7, 40001, source), Format.E4M3FN, Granularity.ROW)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("granularity", [Granularity.ROW, Granularity.GROUP], ids=str)
@pytest.mark.parametrize("offset", [8, 3])
@pytest.mark.sample(every=2)
def test_views_with_any_stride_are_read_in_place(granularity: Granularity, offset: int) -> None:
    for source in SOURCES:
        wide = hostile(20, 512, source)
        check(wide[:, offset : offset + 256], Format.E4M3FN, granularity)
        askew = hostile(21, 491, source)
        check(askew[1:, offset : offset + 251], Format.E4M3FN, granularity)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("granularity", [Granularity.ROW, Granularity.GROUP], ids=str)
@pytest.mark.parametrize("columns", [13, 200, 479])
@pytest.mark.sample(every=3)
def test_contiguous_data_are_written_too(granularity: Granularity, columns: int) -> None:
    for source in SOURCES:
        check(hostile(20, columns, source), Format.E5M2, granularity, contiguous=True)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("granularity", [Granularity.ROW, Granularity.GROUP], ids=str)
@pytest.mark.parametrize("form", [Format.E4M3FN, Format.E5M2], ids=str)
def test_scales_may_be_powers_of_two(granularity: Granularity, form: Format) -> None:
    for source in SOURCES:
        x = hostile(40, 256, source)
        x[7, :128] = form.maximum * 2.0**-20  # amax / MAX is a power of two already
        x[8] = 1e-41
        check(x, form, granularity, "power_of_two")


@pytest.mark.usefixtures("on_host")
def test_many_short_rows_are_processed_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "MANY_WARPS", 3)
    for rows, columns in [(9, 13), (70, 64), (67, 39)]:
        for source in SOURCES:
            check(hostile(rows, columns, source), Format.E4M3FN, Granularity.ROW)
    assert quantize.tile_of(64, 8, many=True).lines == quantize.LOADS
    assert quantize.tile_of(128, 8, many=True).lines == 1


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("lines", [2, 4])
def test_a_thread_may_process_several_lines(lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tile_of = quantize.tile_of
    monkeypatch.setattr(quantize, "tile_of", lambda *size: tile_of(*size)._replace(lines=lines))
    for rows, columns in [(9, 13), (37, 128), (70, 64), (67, 200)]:
        for granularity in (Granularity.ROW, Granularity.GROUP):
            check(hostile(rows, columns, torch.bfloat16), Format.E4M3FN, granularity)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("form", [Format.E4M3FN, Format.E5M2], ids=str)
def test_every_bfloat16_value_is_cast_correctly(form: Format) -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    check(values.reshape(512, 128), form, Granularity.ROW)
    check(values.reshape(8192, 8), form, Granularity.ROW)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("form", [Format.E4M3FN, Format.E5M2], ids=str)
@pytest.mark.parametrize("exponent", [0, 100, -60, -100])
@pytest.mark.sample(every=4)
def test_all_quotients_of_bfloat16_are_rounded_correctly(form: Format, exponent: int) -> None:
    """Every significand by the scale of every other, down to where all becomes 0."""
    significands = torch.arange(128, 256, dtype=torch.float32) / 128
    scales = 2.0 ** torch.arange(0, -34, -1, dtype=torch.float32)
    values = torch.cat([significands / 2 * scale for scale in scales])
    x = torch.cat([significands.unsqueeze(1), values.expand(128, -1)], 1) * 2.0**exponent
    check(x.bfloat16(), form, Granularity.ROW)
    check(-x.bfloat16(), form, Granularity.ROW)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("exponent", [0, -100, -112, 90])
def test_quotients_beside_the_ties_are_rounded_once(exponent: int) -> None:
    """x next to a tie of E4M3 times each scale: a quotient off by a last place would show.

    Tiny scales too, where remainders underflow unless they are lifted.
    """
    ties = torch.tensor([17.0, 19.0, 27.0, 29.0, 104.0, 232.0, 2.0**-10, 3 * 2.0**-10])
    amax = torch.rand(4096, 1, generator=torch.Generator().manual_seed(1)) * 448 + 1
    amax = amax * 2.0**exponent
    near = ties * (amax / 448)
    up = torch.nextafter(near, torch.tensor(math.inf))
    down = torch.nextafter(near, torch.tensor(0.0))
    check(torch.cat([amax, near, up, down, amax, near, -up], 1), Format.E4M3FN, Granularity.ROW)


ALL_SCALES = [g for g in Granularity if g not in (Granularity.NONE, Granularity.MX)]
TILE_SIZES = [(1, 1), (3, 150), (140, 13), (130, 272), (257, 128)]


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("epilogue", ["none", "power_of_two"])
@pytest.mark.sample(every=2)
def test_blockwise_quantization_equals_numerics(source: torch.dtype, epilogue: str) -> None:
    for rows, columns in TILE_SIZES:
        wide = hostile(rows, columns + 9, source)
        for x in (wide[:, :columns].contiguous(), wide[:, 5 : 5 + columns]):
            check(x, Format.E4M3FN, Granularity.BLOCK, epilogue)
    check(hostile(40, 77, source), Format.E5M2, Granularity.BLOCK, epilogue, contiguous=True)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("granularity", ALL_SCALES, ids=str)
@pytest.mark.sample(every=4)
def test_column_major_input_is_written_transposed(
    granularity: Granularity, source: torch.dtype
) -> None:
    for rows, columns in TILE_SIZES:
        wide = hostile(columns, rows + 9, source)
        for x in (wide[:, :rows].contiguous().t(), wide[:, 5 : 5 + rows].t()):
            check(x, Format.E4M3FN, granularity)
            if granularity is Granularity.TENSOR:
                check(x, Format.E5M2, granularity, "static")
                check(x, Format.E5M2, granularity, "delayed")
            else:
                check(x, Format.E5M2, granularity, "power_of_two")
    check(hostile(77, 40, source).t(), Format.E4M3FN, granularity, contiguous=True)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("epilogue", ["none", "static", "delayed"])
@pytest.mark.sample(every=3)
def test_tensorwise_quantization_equals_numerics(source: torch.dtype, epilogue: str) -> None:
    """Rows are in registers of 3 multiprocessors, or read twice; every kind of row occurs."""
    form = Format.E4M3FN if source is torch.bfloat16 else Format.E5M2
    for rows, columns in [(1, 1), (3, 150), (140, 13), (70, 1024), (200, 700), (61, 7001)]:
        wide = hostile(rows, columns + 9, source) * 1e-37
        for x in (wide[:, :columns].contiguous(), wide[:, 5 : 5 + columns]):
            check(x, form, Granularity.TENSOR, epilogue)
    for contiguous in (False, True):
        x = hostile(40, 77, source) * 1e-37
        check(x, form, Granularity.TENSOR, epilogue, contiguous=contiguous)
    check(torch.zeros(40, 80, dtype=source), form, Granularity.TENSOR, epilogue)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("form", [Format.E4M3FN, Format.E5M2], ids=str)
@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-70, 0.3, 2.0**60, 2.0**120])
def test_static_scales_of_any_size_saturate_and_keep_non_finite_values(
    form: Format, scale: float
) -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for x in (values.reshape(512, 128), values.reshape(512, 128).t()):
        given = torch.full((1, 1), scale)
        expected, amax = numerics.quantize_static(x, form, Granularity.TENSOR, given)
        for name in ("static", "delayed"):
            kernel = KERNELS[f"cuda.quantize_tensor_{name}"]
            data = padded(*x.shape, form)
            workspace = kernel.workspace(x, data, given)
            kernel.launch(x, data, given, workspace)
            assert not compare_bytes(data, given, expected.data, expected.scale)
            assert name == "static" or float(workspace[0]) == float(amax)


TRANSPOSING = [name for name in KERNELS if name.startswith("cuda.quantize_transpose")]
SUMMING = [name for name in TRANSPOSING if any("sums" in x for x in KERNELS[name].epilogues)]


def check_both_ways(name: str, x: Tensor, with_sums: bool = False) -> Tensor | None:
    """Bytes, scales and sums are those of the emulation; returns the sums."""
    kernel = KERNELS[name]
    granularity = kernel.granularity
    epilogue = "none" if "none" in kernel.epilogues else min(kernel.epilogues)
    form = Format.E4M3FN if x.dtype is torch.bfloat16 else Format.E5M2
    expected, amax = exact(x, form, granularity, epilogue)
    turned, _ = exact(x.t(), form, granularity, epilogue)
    data, data_t = padded(*x.shape, form), padded(*x.t().shape, form)
    scale = granularity.empty_scale(*x.shape, x.device).fill_(math.nan)
    scale_t = granularity.empty_scale(*x.t().shape, x.device).fill_(math.nan)
    sums = torch.full((x.shape[1],), math.nan) if with_sums else None
    if amax is not None:
        scale.copy_(expected.scale)  # type: ignore[arg-type]
    outputs = (data, scale, data_t, scale_t, sums)
    workspace = kernel.workspace(x, *outputs)
    kernel.launch(x, *outputs, workspace)
    where = f"{name} {list(x.shape)} {x.stride()}"
    wrong = compare_bytes(data, scale, expected.data, expected.scale)
    assert not wrong, f"{where}: {wrong}"
    wrong = compare_bytes(data_t, scale_t, turned.data, turned.scale)
    assert not wrong, f"{where}, transposed: {wrong}"
    wrong = "" if sums is None else compare_sums(sums, x)
    assert not wrong, f"{where}: {wrong}"
    check_padding(data)
    check_padding(data_t)
    assert epilogue != "delayed" or float(workspace[0]) == float(amax)  # type: ignore[arg-type]
    return sums


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("name", TRANSPOSING)
@pytest.mark.sample(every=5)
def test_quantize_transpose_equals_numerics(name: str, source: torch.dtype) -> None:
    for rows, columns in TILE_SIZES:
        wide = hostile(rows, columns + 9, source)
        tall = hostile(columns, rows + 9, source)
        views = [
            wide[:, :columns].contiguous(),
            wide[:, 5 : 5 + columns],
            tall[:, 3 : 3 + rows].t(),
        ]
        for x in views:
            check_both_ways(name, x)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("name", SUMMING)
@pytest.mark.sample(every=4)
def test_quantize_transpose_also_computes_column_sums(name: str, source: torch.dtype) -> None:
    for rows, columns in [(1, 1), (130, 150), (257, 128)]:
        wide = hostile(rows, columns + 9, source)
        wide[6:7] = 1.0  # no NaN in every column
        for x in (wide[:, :columns].contiguous(), wide[:, 5 : 5 + columns]):
            sums = check_both_ways(name, x, with_sums=True)
            assert sums is not None
            plain = x.double().sum(dim=0)
            finite = plain.isfinite()
            assert (sums.double() - plain).abs()[finite].le(error_bound(x)[finite]).all()
            assert finite.any() and torch.equal(sums[~finite].isnan(), plain[~finite].isnan())
            infinite = plain.isinf()
            assert torch.equal(sums[infinite].double(), plain[infinite])


@pytest.mark.usefixtures("on_host")
def test_lines_of_many_tiles_are_added_in_their_order() -> None:
    x = torch.randn(16700, 9, generator=torch.Generator().manual_seed(0))
    for source in SOURCES:
        sums = check_both_ways("cuda.quantize_transpose_block", x.to(source), with_sums=True)
        assert sums is not None
        assert ((sums - x.to(source).double().sum(dim=0)).abs() <= error_bound(x)).all()


def check_together(
    *given: Tensor,
    granularities: tuple[Granularity, ...] = (Granularity.ROW,) * 3,
    power_of_two: bool = False,
) -> None:
    """Bytes and scales of matrices that one launch quantizes are those of `numerics`."""
    form = Format.E4M3FN if given[0].dtype is torch.bfloat16 else Format.E5M2
    matrices = tuple(
        quantize_together.Matrix(
            x,
            padded(*x.shape, form),
            scales.empty_scale(*x.shape, x.device).fill_(math.nan),
            scales,
        )
        for x, scales in zip(given, granularities, strict=False)
    )
    quantize_together.launch_together(matrices, power_of_two)
    for x, data, scale, scales in matrices:
        expected = numerics.quantize(x, form, scales, power_of_two_scale=power_of_two)
        wrong = compare_bytes(data, scale, expected.data, expected.scale)
        assert not wrong, f"{form.value} {scales} {list(x.shape)} {x.stride()}: {wrong}"
        check_padding(data)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [
    (1, 2), (13, 7), (200, 66), (70, 513),  # a tile, clusters of 1 to 4
    (9, 2100), (21, 4300),  # clusters of 8 with two tiles in registers, and read again
])  # fmt: skip
@pytest.mark.sample(every=4)
def test_columns_are_quantized_by_clusters(rows: int, columns: int, source: torch.dtype) -> None:
    wide = hostile(columns, rows + 9, source)
    for x in (wide[:, :rows].contiguous().t(), wide[:, 5 : 5 + rows].t()):
        check_together(x)
        check_together(x, power_of_two=True)
    across = hostile(rows, columns, source).t().contiguous().t()  # magnitudes within a column
    check_together(across)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.sample(every=2)
def test_several_matrices_are_quantized_in_one_launch(source: torch.dtype) -> None:
    rows, long, columns = hostile(9, 40, source), hostile(3, 9001, source), hostile(300, 24, source)
    for given in (
        (rows, columns.t()),
        (columns.t(), rows),
        (columns.t(), hostile(600, 70, source).t()),
        (rows, long, columns.t()),
        (long, rows),
        (hostile(37, 128, source), columns.t(), rows),
    ):
        check_together(*given)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.sample(every=2)
def test_operands_of_a_weight_gradient_are_quantized_by_tiles(
    source: torch.dtype, power_of_two: bool
) -> None:
    group, block = Granularity.GROUP, Granularity.BLOCK
    for rows, columns, others in [(1, 2, 3), (140, 13, 272), (300, 130, 64)]:
        x, y = hostile(rows, columns, source), hostile(rows, others + 9, source)
        for right in (y[:, :others].contiguous(), y[:, 5 : 5 + others]):
            for scales in ((group, block), (block, group), (group, group)):
                check_together(x.t(), right.t(), granularities=scales, power_of_two=power_of_two)
        check_together(x.t(), granularities=(group,), power_of_two=power_of_two)


def test_tiles_cover_their_lines() -> None:
    for chunk in (4, 8):
        for span in (*range(1, 2100), 4096, 5000, 7168, *range(8192, 123200, 997), 123200):
            tile = quantize.tile_of(span, chunk)
            assert tile.team * tile.accesses * chunk * tile.cluster >= span
            assert tile.threads <= 1024 and tile.cluster <= 8
            assert tile.team <= 32 or (tile.team == tile.threads and tile.team % 32 == 0)


def test_groups_are_read_8_threads_a_line() -> None:
    tile = quantize.tile_of(GROUP, 8)
    assert (tile.team, tile.accesses, tile.rows_of_warp) == (8, 2, 4)
