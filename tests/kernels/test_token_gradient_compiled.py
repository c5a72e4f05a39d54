"""Gradients of products across tokens, compiled for Hopper."""

from __future__ import annotations

import re

import pytest
import torch

from lokakern import nvrtc
from lokakern.kernels.cuda import token_gradient
from tests.support.disassembly import disassembled
from tests.support.register_use import registers
from tests.support.sharing import shared_folder

# Tokens of gradient and input, columns: tiles of three warpgroups, two and one.
SIZES = ((192, 770, 160), (96, 770, 64), (56, 64, 40))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_sums_stay_in_registers_while_products_are_under_way(
    size: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing spills; products of a step follow each other, and one step waits for the one before.

    Where the compiler makes products take turns, it waits for each.
    """
    monkeypatch.setenv("LOKAKERN_CACHE", str(shared_folder("compiled")))
    count, n, d = size
    tile = token_gradient.tile_of(count, n)
    code = nvrtc.cubin(token_gradient.bind(tile, d, dtype).program, "sm_90")
    used, spilled = registers(code)
    assert spilled == 0 and used <= {1: 255, 2: 168, 3: 128}[tile.warpgroups]
    (text,) = disassembled([code])
    words = re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]+)", text)
    kind = ".BF16" if dtype is torch.bfloat16 else ""
    products = [word for word in words if word.startswith("HGMMA")]
    assert {word.removesuffix(kind).rsplit(".", 1)[1] for word in products} == {"F32"}
    slices = 1 + (tile.width in (160, 192, 224))
    steps = {d // 64 and 4, -(-(d - (-(-d // 64) - 1) * 64) // 16)} - {0}
    assert len(products) == slices * sum(steps)
    assert sum(word.startswith("WARPGROUP.DEPBAR") for word in words) == 2
    assert 0 < words.index("ACQBULK") < words.index("PREEXIT")
