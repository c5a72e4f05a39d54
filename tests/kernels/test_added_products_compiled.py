"""Sums of two products of each sample, compiled for Hopper, and what the kernel takes."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from lokakern import nvrtc
from lokakern.kernels.cuda import added_products
from lokakern.kernels.cuda.tiles import SHARED_BYTES
from lokakern.types import Device
from tests.support.disassembly import disassembled
from tests.support.register_use import registers
from tests.support.sharing import shared_folder

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)
# m, k, r, n: as in Wukong S and M, then tiles of fewer and of the most sums.
SIZES = (
    (720, 24, 120, 160), (720, 48, 192, 160), (60, 8, 8, 40), (300, 64, 256, 256),
    (720, 64, 256, 192),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_sums_stay_in_registers_while_products_are_under_way(
    size: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing spills; products of a step follow each other, and a step waits for the one before."""
    monkeypatch.setenv("LOKAKERN_CACHE", str(shared_folder("compiled")))
    m, k, r, n = size
    tile = added_products.tile_of(m, n, r)
    code = nvrtc.cubin(added_products.bind(tile, k, r, dtype).program, "sm_90")
    used, spilled = registers(code)
    assert spilled == 0 and used <= {1: 255, 2: 168, 3: 128}[tile.warpgroups]
    (text,) = disassembled([code])
    words = re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]+)", text)
    products = [word for word in words if word.startswith("HGMMA")]
    assert len(products) == -(-k // 16) + -(-r // 16)
    assert all(f"64x{tile.width}x16" in word for word in products)
    assert sum(word.startswith("WARPGROUP.DEPBAR") for word in words) == tile.steps + 1
    first_copy = next(at for at, word in enumerate(words) if word.startswith("UTMALDG"))
    assert 0 < words.index("ACQBULK") < words.index("PREEXIT") < first_copy


def test_tiles_fit_and_cover_all_sizes() -> None:
    for m, n, r in itertools.product(
        (1, 64, 65, 193, 720, 5000), range(8, 257, 8), range(8, 257, 8)
    ):
        tile = added_products.tile_of(m, n, r)
        assert tile.slots >= added_products.LEAST_SLOTS and tile.shared_bytes <= SHARED_BYTES
        assert n <= tile.width < n + 32 and r <= 64 * tile.steps < r + 64
        assert 1 <= tile.warpgroups <= (3 if tile.width <= 192 else 2)


def test_others_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(added_products, "current_device", lambda *_: H200)
    monkeypatch.setattr(nvrtc, "why_not", lambda _: None)

    def takes(m: int, k: int, r: int, n: int, gap: int = 0, batch: int = 2) -> bool:
        a = torch.zeros(batch, m, k + gap, dtype=torch.bfloat16)[:, :, :k]
        b, x = (torch.zeros(batch, rows, n, dtype=torch.bfloat16) for rows in (k, r))
        return added_products.takes(a, b, torch.zeros(r, m, dtype=torch.bfloat16).t(), x)

    def takes_of(dtype: torch.dtype) -> bool:
        x = torch.zeros(2, 8, 8, dtype=dtype)
        return added_products.takes(x, x, x[0], x)

    assert takes(720, 24, 120, 160) and takes(1, 64, 256, 256) and takes(5, 24, 8, 8, gap=8)
    refused = [(5, 20, 8, 8), (5, 8, 12, 8), (5, 8, 8, 12), (5, 72, 8, 8), (5, 8, 264, 8),
               (5, 8, 8, 264), (5, 24, 8, 8, 4), (5, 8, 8, 8, 0, 0)]  # fmt: skip
    assert not any(takes(*sizes) for sizes in refused)
    x = torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    assert not added_products.takes(x, x.mT, x[0], x), "columns that are not contiguous"
    assert not added_products.takes(x, x[:1].expand(2, 8, 8), x[0], x), "one for all samples"
    assert added_products.takes(x, x, x[0], x)
    assert not added_products.takes(x, x.half(), x[0], x) and not takes_of(torch.float32)
    assert not added_products.takes(x, x[:1], x[0], x) and not added_products.takes(
        x, x, x[0, :7], x
    )
    monkeypatch.setattr(
        added_products, "current_device", lambda *_: Device("nvidia", "H", "sm_100", 148, 180)
    )
    assert not takes(720, 24, 120, 160)
