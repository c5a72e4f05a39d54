"""The kernel that quantizes gradients behind relus: compiled, and right at every size and value."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lokakern import numerics, nvrtc
from lokakern.kernels.cuda import relu_backward
from lokakern.kernels.cuda.relu_backward import MOST_COLUMNS, TEAMS, Plan, bind, plan_of
from lokakern.kernels.cuda.tiles import SHARED_BYTES
from lokakern.quantized_tensor import empty_data
from lokakern.types import GROUP, Format, Granularity, QuantizedTensor
from lokakern.workloads.distributions import distribution_named, draw_rows
from tests.support.register_use import registers
from tests.support.sharing import shared_folder

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
SIZES = (
    (128, 128), (256, 384), (128, 512), (384, 640), (1024, 1024), (128 * 37, 4096), (2048, 2560),
    (16384, 128), (640, 3584),
)  # fmt: skip
SPILLED = 8  # bytes of addresses, outside of what is done for each tile


@pytest.mark.parametrize("teams", TEAMS)
@pytest.mark.parametrize("writes_output", [True, False])
def test_registers_hold_a_tile(
    teams: int, writes_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOKAKERN_CACHE", str(shared_folder("compiled")))
    plan = Plan(8, teams)
    code = nvrtc.cubin(bind(plan, writes_output, FORMATS[teams % 2]).program, "sm_90")
    used, spilled = registers(code)
    assert used * teams * relu_backward.TEAM * (4 // teams) <= 65536 and spilled <= SPILLED
    assert plan.shared_bytes + 1024 <= SHARED_BYTES // (4 // teams)


def test_plans_cover_all_columns_and_use_all_multiprocessors() -> None:
    for rows, columns in itertools.product(
        (128, 2048, 8192, 131072), range(GROUP, MOST_COLUMNS + 1, GROUP)
    ):
        plan = plan_of(rows, columns, 132)
        assert plan.cluster <= relu_backward.MOST_BLOCKS
        assert 0 <= plan.cluster * plan.teams - columns // GROUP < plan.teams
        is_full = plan.cluster * rows // GROUP >= 132
        assert is_full or plan.teams == 1 or columns // GROUP > 8 * (plan.teams - 1)


def drawn(kind: str, m: int, n: int) -> tuple[Tensor, Tensor]:
    """A gradient, and the output of a relu."""
    random = torch.Generator("cuda").manual_seed(0)
    if kind not in ("tiny", "hostile"):
        dy, y = (draw_rows(distribution_named(x), m, n, seed=i) for i, x in enumerate((kind, "X1")))
        return dy.bfloat16().cuda(), y.relu().bfloat16().cuda()
    dy, y = (torch.randn(m, n, device="cuda", generator=random) for _ in range(2))
    scale = 1e-36 if kind == "tiny" else 1.0
    dy, y = (dy * scale).bfloat16(), (y.relu() * scale / 100).bfloat16()
    if kind == "hostile":
        for x in (dy, y):
            places = torch.randint(m * n, (60,), device="cuda", generator=random)
            x.view(-1)[places[:20]] = math.nan
            x.view(-1)[places[20:40]] = math.inf
            x.view(-1)[places[40:]] = -math.inf
        y[7], y[9, :4] = 0, -0.0
        dy[:, 3], dy[:128, 1::2] = 0, 0
    return dy, y


def empty(m: int, n: int, granularity: Granularity, fp8: torch.dtype) -> QuantizedTensor:
    device = torch.device("cuda")
    data, scale = empty_data(m, n, fp8, device), granularity.empty_scale(m, n, device)
    data.view(torch.uint8).fill_(0x55)
    return QuantizedTensor(data, scale.fill_(math.nan), granularity)


def check(dy: Tensor, y: Tensor, fp8: torch.dtype, writes_output: bool) -> None:
    """All bytes, but that a NaN may be any."""
    m, n = dy.shape
    sizes = (m, n, Granularity.ROW), (n, m, Granularity.GROUP), (n, m, Granularity.BLOCK)
    made = [empty(rows, columns, scales, fp8) for rows, columns, scales in sizes]
    relu_backward.launch(dy, y, made[0], made[1], made[2] if writes_output else None)
    dz = torch.where(y <= 0, torch.zeros_like(dy), dy)
    for found, x in zip(made, (dz, dz.t(), y.t()), strict=True):
        if found is made[2] and not writes_output:
            continue
        right = numerics.quantize(x.contiguous(), Format.of(fp8), found.granularity)
        assert found.scale is not None and torch.equal(found.scale, right.scale)
        same = found.data.view(torch.uint8) == right.data.view(torch.uint8)
        both_nan = found.data.float().isnan() & right.data.float().isnan()
        assert (same | both_nan).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["X1", "X5", "X12", "X13", "tiny", "hostile"])
@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_those_of_numerics(size: tuple[int, int], kind: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's")
    dy, y = drawn(kind, *size)
    for fp8, writes_output in itertools.product(FORMATS, (True, False)):
        check(dy, y, fp8, writes_output)


@pytest.mark.gpu
def test_rows_may_have_gaps() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's")
    dy, y = drawn("X1", 512, 2048)
    check(dy[:, 8:1032], y[:, 512:1536], FORMATS[0], True)
