"""Kernels that quantize short rows without gaps: what they take, every size, view and value."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lokakern import numerics
from lokakern.functional.checks import operand_of
from lokakern.functional.run import run
from lokakern.kernels.cuda import quantize_short
from lokakern.kernels.cuda.quantize_short import Tile, tile_of
from lokakern.problems import make_problem
from lokakern.quantized_tensor import pitch_of
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.types import (
    ACCEPTED,
    Device,
    Format,
    Granularity,
    Layout,
    Operand,
    Rejected,
    Support,
)
from tests.support.kernel_cases import kernel_here

load_kernels()
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)
NAMES = ("cuda.quantize_short_row", "cuda.quantize_short_group")
FORMS = (Format.E4M3FN, Format.E5M2)
POISON = 0xA5


def answer(name: str, columns: int, **fields: object) -> Support:
    kernel = KERNELS[name]
    options = {"out_granularity": kernel.granularity, **fields}
    return kernel.supports(make_problem("quantize", (4096, columns), **options), H200)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_taken(name: str) -> None:
    for columns in (1, 13, 39, 90, 100, 121, 127):
        for form in (Format.BFLOAT16, Format.FLOAT16):
            alignment = make_problem("quantize", (1, columns)).a.alignment
            assert answer(name, columns, a=Operand(form, alignment=alignment)) == ACCEPTED
    assert answer(name, 39, a=Operand(Format.FLOAT32, alignment=4)) == ACCEPTED


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_taken_and_why(name: str) -> None:
    def why(columns: int, **fields: object) -> str:
        found = answer(name, columns, **fields)
        assert isinstance(found, Rejected)
        return found.reason

    assert "multiples of 16 bytes need no copy" in why(64)
    assert why(129) == "rows have at most 256 bytes; these have 258"
    assert "at most 256 bytes" in why(479)  # quantize.py is as fast
    column_major = Operand(Format.BFLOAT16, Granularity.NONE, Layout.COLUMN, 2)
    assert why(39, a=column_major) == "takes row-major input"
    gaps = Operand(Format.BFLOAT16, alignment=16)  # such as 39 columns of 40
    assert "without gaps" in why(39, a=gaps)
    assert "without gaps" in why(90, a=Operand(Format.BFLOAT16, alignment=2))  # of 4
    assert "makes" in why(39, out_granularity=Granularity.BLOCK)
    assert "epilogue" in why(39, epilogue="power_of_two")
    assert "takes bfloat16 or float32" in why(39, a=Operand(Format.E4M3FN, alignment=1))


def test_no_composition_is_made_of_them() -> None:
    assert not [name for name in KERNELS if "quantize_short" in name and "+" in name]


@pytest.mark.parametrize("item", [2, 4])
def test_threads_hold_few_chunks_and_rows_are_whole_pieces(item: int) -> None:
    for columns in range(1, quantize_short.MOST_BYTES // item + 1):
        tile = tile_of(columns, item)
        chunks = -(-columns * item // 16)
        assert tile.team in (1, 2, 4) and tile.team <= chunks
        assert -(-chunks // tile.team) <= max(quantize_short.MOST_CHUNKS, -(-chunks // 4))
        of_warp = 32 // tile.team * max(columns * item, (-(-columns // 16) | 1) * 16) + 16
        assert tile.warps * of_warp <= 18 << 10


def test_longer_rows_are_shared_by_more_threads() -> None:
    assert [tile_of(columns, 2).team for columns in (13, 39, 90, 100, 121)] == [1, 2, 4, 4, 4]
    assert tile_of(39, 4).team == 4


# ---------------------------------------------------------------- on a GPU

COLUMNS = (1, 2, 3, 5, 7, 9, 12, 13, 15, 17, 23, 31, 33, 36, 39, 45, 50, 63, 65, 71, 77, 84, 90, 95,
           100, 111, 121, 127)  # fmt: skip
ROWS = (1, 7, 8, 9, 1000, 4097)


def hostile(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of every size of scale, zeros, subnormals and what is not finite."""
    generator = torch.Generator(device="cuda").manual_seed(rows * 1000 + columns)
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    sizes = (-7, 4) if dtype is torch.float16 else (-42, 37)
    x *= torch.logspace(*sizes, rows, device="cuda").unsqueeze(1)
    x[::5] = x[::5].abs().sqrt()
    if rows > 6:
        x[0], x[1] = 0.0, -0.0
        x[2, -1], x[3, 0], x[4, columns // 2] = math.nan, math.inf, -math.inf
        x[5], x[6] = math.nan, 1e-41
    return x.to(dtype)


def poisoned(rows: int, pitch: int) -> Tensor:
    return torch.full((rows, pitch), POISON, dtype=torch.uint8, device="cuda")


def launch(kernel: Kernel, x: Tensor, form: Format, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Data, as a slice of `whole`, and scales, NaN where nothing was written."""
    columns = x.shape[1]
    data = whole.view(form.dtype)[:, :columns]
    scale = kernel.granularity.empty_scale(*x.shape, x.device).fill_(math.nan)
    kernel.launch(x, data, scale, kernel.workspace(x, data, scale))
    return data, scale


def check(kernel: Kernel, x: Tensor, form: Format, pitch: int) -> None:
    """Bytes and scales are those of `numerics`, and of all else only the usual gaps are zeroed."""
    rows, columns = x.shape
    words = f"{kernel.name} {x.dtype} {list(x.shape)} {form.value} {pitch}"
    problem = make_problem(
        "quantize", (rows, columns), a=operand_of(x), out_format=form,
        out_granularity=kernel.granularity,
    )  # fmt: skip
    assert kernel.supports(problem, H200) == ACCEPTED, words
    whole = poisoned(rows + 8, pitch)
    data, scale = launch(kernel, x, form, whole[:rows])
    expected = numerics.quantize(x, form, kernel.granularity)
    assert expected.scale is not None
    same = data.view(torch.uint8) == expected.data.view(torch.uint8)
    assert same.all(), f"{words}: data differ at {(~same).nonzero()[:3].tolist()}"
    assert torch.equal(scale, expected.scale), words
    gaps = whole[:rows, columns:]
    zeroed = pitch == pitch_of(columns) and bool((gaps == 0).all())
    assert zeroed or (gaps == POISON).all(), f"{words}: gaps are neither zero nor kept"
    assert (whole[rows:] == POISON).all(), f"{words}: rows beyond the last were written"


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [c for c in COLUMNS if c % 8])
def test_every_size_and_format(name: str, columns: int) -> None:
    kernel = kernel_here(name, "cuda")
    forms = itertools.cycle(FORMS)
    for rows, dtype in itertools.product(ROWS, (torch.bfloat16, torch.float16, torch.float32)):
        if (
            columns * dtype.itemsize > quantize_short.MOST_BYTES
            or columns * dtype.itemsize % 16 == 0
        ):
            continue
        check(kernel, hostile(rows, columns, dtype), next(forms), pitch_of(columns))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("team", [1, 2, 4])
def test_any_team_computes_the_same(name: str, team: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than all blocks of a GPU hold at once, too."""
    kernel = kernel_here(name, "cuda")
    warps = itertools.cycle((4, 2, 8, 2, 1))
    for rows, columns in ((4097, 39), (131072, 13), (300001, 39), (65531, 90), (20480, 121)):
        tile = Tile(team, next(warps))
        monkeypatch.setattr(quantize_short, "tile_of", lambda *_, tile=tile: tile)
        check(kernel, hostile(rows, columns, torch.bfloat16), Format.E4M3FN, pitch_of(columns))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_outputs_with_other_gaps_or_none(name: str) -> None:
    """Those whose rows do not start at multiples of 16 bytes are another kernel's."""
    kernel = kernel_here(name, "cuda")
    for columns in (13, 39, 100, 121):
        x = hostile(1000, columns, torch.bfloat16)
        for pitch in (columns, columns + 1, pitch_of(columns) + 16, 1024):
            check(kernel, x, Format.E4M3FN, pitch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_turn_out_to_lie_otherwise(name: str) -> None:
    kernel = kernel_here(name, "cuda")
    x = hostile(1000, 39, torch.bfloat16)
    wide = torch.zeros(1000, 45, dtype=x.dtype, device="cuda")
    wide[:, 3:42] = x
    flat = torch.zeros(39 * 1000 + 1, dtype=x.dtype, device="cuda")
    flat[1:] = x.flatten()
    for view in (wide[:, 3:42], flat[1:].view(1000, 39), x[8:], x[3:], x[:1]):
        check(kernel, view, Format.E5M2, 48)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_bfloat16_value_and_quotients_beside_ties(name: str, form: Format) -> None:
    kernel = kernel_here(name, "cuda")
    values = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16)
    every = values.view(torch.bfloat16)
    check(kernel, every.view(-1, 1), form, 16)
    check(kernel, every[: 65536 // 39 * 39].view(-1, 39), form, 48)
    amax = torch.rand(65536, 1, device="cuda") * 448 + 1
    ties = torch.tensor([17.0, 19.0, 27.0, 29.0, 104.0, 232.0, 2**-10, 3 * 2**-10], device="cuda")
    for exponent in (0, -100, -112, 90):
        near = ties * (amax * 2.0**exponent / form.maximum)
        x = torch.cat([amax * 2.0**exponent, near, -near, near.nextafter(near * 2)], 1)
        for dtype in (torch.bfloat16, torch.float32):
            check(kernel, x.to(dtype), form, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_launches_repeat_bit_by_bit(name: str) -> None:
    kernel = kernel_here(name, "cuda")
    for rows, columns in ((4097, 39), (131072, 39), (20480, 121)):
        x = hostile(rows, columns, torch.bfloat16)
        first_whole = poisoned(rows, pitch_of(columns))
        _, first_scale = launch(kernel, x, Format.E4M3FN, first_whole)
        for _ in range(100):
            whole = poisoned(rows, pitch_of(columns))
            _, scale = launch(kernel, x, Format.E4M3FN, whole)
            assert torch.equal(whole, first_whole) and torch.equal(scale, first_scale)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_no_rows_are_left_to_the_public_function(name: str) -> None:
    kernel = kernel_here(name, "cuda")
    made = run(kernel, torch.zeros(0, 39, dtype=torch.bfloat16, device="cuda"))
    assert made.data.shape == (0, 39)
