"""Programs that dequantize, compiled for Hopper, to the instructions they are for."""

from __future__ import annotations

import re

import pytest

from lokakern import nvrtc
from tests.support.disassembly import disassembled
from tests.support.norm_programs import DEQUANTIZED, dequantizers
from tests.support.sharing import shared_folder

PROGRAMS = dict(dequantizers())


@pytest.mark.parametrize("words", DEQUANTIZED)
@pytest.mark.sample(every=5)
def test_all_rows_are_read_before_any_is_converted(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 or 4 bytes at a time, and written 16 at a time; nothing branches between the loads."""
    monkeypatch.setenv("LOKAKERN_CACHE", str(shared_folder("compiled")))
    names = [name for name in PROGRAMS if name.endswith(f"plain {words}")]
    codes = disassembled([nvrtc.cubin(PROGRAMS[name], "sm_90") for name in names])
    assert len(names) == 4
    for name, code in zip(names, codes, strict=True):
        macros = dict(PROGRAMS[name].macros)
        text = r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]+)"
        found = re.findall(text, code)
        form = "E5M2" if macros["IS_E5M2"] else "E4M3"
        first = next(at for at, word in enumerate(found) if word.startswith(f"F2FP.F16.{form}"))
        loads = [at for at, word in enumerate(found) if word.startswith("LDG")]
        wide = ".64" if macros["OUT_BYTES"] == 2 else ""
        of_a_piece = f"LDG.E.NA{wide}" if macros["IN_PLACE"] else f"LDG.E{wide}"
        assert sum(found[at] == of_a_piece for at in loads) >= macros["ACCESSES"], name
        assert found.index("ACQBULK") < loads[0] and loads[-1] < first, name
        if macros["IN_PLACE"] and macros["ACCESSES"] > 1:
            assert not any(word.startswith(("BRA", "CALL")) for word in found[: loads[-1]]), name
        stores = [word for word in found if word.startswith("STG")]
        assert stores.count("STG.E.128") == macros["ACCESSES"], name
        assert macros["RAGGED"] or len(stores) == macros["ACCESSES"], name
        packed = {"2 0": "F2FP.BF16.F32", "2 1": "F2FP.F16.F32.PACK_AB"}
        wanted = packed.get(f"{macros['OUT_BYTES']} {macros['IS_HALF']}", "FMUL")
        assert any(word.startswith(wanted) for word in found), name
