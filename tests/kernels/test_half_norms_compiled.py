"""Programs with norms in float16, compiled for sm_90 and compared with those of bfloat16."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lokakern import nvrtc
from lokakern.kernels.cuda import activate_quantize
from tests.support.disassembly import disassembled
from tests.support.half_norm_programs import PROGRAMS
from tests.support.norm_programs import E4M3
from tests.support.register_use import registers
from tests.support.sharing import shared_folder


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKAKERN_CACHE", str(shared_folder("compiled")))


@pytest.mark.sample(every=6, of=("entry",))
@pytest.mark.parametrize(
    ("entry", "name"), [(x.entry, name) for name, (_, x) in PROGRAMS.items()], ids=list(PROGRAMS)
)
def test_float16_takes_no_more_of_a_multiprocessor(entry: str, name: str) -> None:
    """As many warps fit, nothing spills, and elements are converted in hardware."""
    plain, halved = PROGRAMS[name]
    same, others = ({**dict(x.macros), "HALF": 0} for x in (plain, halved))
    assert same == others and plain != halved
    codes = [nvrtc.cubin(program, "sm_90") for program in (plain, halved)]
    (before, _), (after, spilled) = map(registers, codes)
    assert spilled == 0
    # Two blocks of norm_backward, which are bound to that, fit with up to 128.
    most = 128 if plain.entry == "norm_backward" else -(-before // 8) * 8
    assert after <= most, f"{after} registers, {before} with bfloat16"
    instruction = r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]+)"
    usual, words = (re.findall(instruction, text) for text in disassembled(codes))
    assert any(word.startswith(("HADD2.F32", "F2FP.F16.F32")) for word in words)
    macros = dict(halved.macros)
    wide = [word for word in words if "BF16" in word]
    if halved.entry == "gemm_norm" and macros["BF16"] == 1:
        # A bias that is part of the product, in three parts of bfloat16, is one more instruction.
        product = f"HGMMA.64x{macros['BLOCK_N']}x16.F32"
        assert set(wide) == {"F2FP.BF16.F32.PACK_AB", f"{product}.BF16"}
        of_half, of_bias = words.count(product), words.count(f"{product}.BF16")
        assert of_half > 0 and of_bias <= 2 and of_half + of_bias == usual.count(f"{product}.BF16")
    else:
        assert not wide
    if halved.entry in ("gemm_norm", "gemm_cross", "column_sums", "gradient_sums"):
        assert len(words) == len(usual)
    elif halved.entry == "norm_backward":
        assert len(words) <= 1.07 * len(usual)
    else:
        assert any(word.startswith("F2FP.SATFINITE.E4M3") for word in words)
    assert 0 < words.index("ACQBULK") < words.index("PREEXIT")


def test_programs_of_bfloat16_and_float32_are_of_their_own_sources() -> None:
    sources = {
        dtype: Path(
            activate_quantize.bind(64, "relu", True, True, dtype, E4M3).launch.program.source
        ).name
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }
    assert list(sources.values()) == [
        "activate_quantize.cu", "half_activate_quantize.cu", "activate_quantize.cu",
    ]  # fmt: skip
