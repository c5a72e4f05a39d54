"""scripts/measure_tiles.py: tiles that race, with times that are made up, and what it tells."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lokakern import jit, nvrtc
from lokakern.device import current_device
from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda import fast_tiles, scaled_gemm
from lokakern.kernels.cuda.tiles import Kind
from lokakern.measure.timing import Contender

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure_tiles.py"
H200_SMS = 132


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_tiles", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "measure_tiles", module)
    spec.loader.exec_module(module)
    return module


def tiles_of(module: ModuleType, few: int, drawn: int) -> Any:
    given = ((1280, 1760, 2928), Kind("row"), 2, True)
    return module.tiles_for(*given, H200_SMS, few, drawn)


def test_the_tile_of_the_rule_races_with_the_next_and_with_some_of_the_others(
    script: ModuleType,
) -> None:
    shape, kind = (1280, 1760, 2928), Kind("row")
    found = tiles_of(script, 18, 6)
    assert found[0] == fast_tiles.tile_of(*shape, kind, 2, True, H200_SMS, True)
    assert len({script.name_of(tile) for tile in found}) == len(found) == 25
    costs = [fast_tiles.cost_us(*shape, tile, 2, H200_SMS, True) for tile in found]
    assert costs[1:19] == sorted(costs[1:19])
    assert max(costs[:19]) <= min(costs[19:])
    assert found == tiles_of(script, 18, 6)  # what is drawn is the size's
    every = tiles_of(script, 1000, 0)
    assert set(found) <= set(every)


def test_names_tell_tiles_apart(script: ModuleType) -> None:
    for level in range(3):
        for promotes in (False, True):
            tiles = fast_tiles.tiles_of(2, level, True, promotes)
            assert len({script.name_of(tile) for tile in tiles}) == len(tiles)


def test_a_race_is_told_kept_and_read_again(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each launch of a tile is of the plan of that tile; the first takes 1.5 times as long."""
    launched: list[CudaLaunch] = []
    compiled: list[nvrtc.Program] = []
    raced: list[list[str]] = []

    def run(contenders: Sequence[Contender], **_options: Any) -> None:
        raced.append([contender.name for contender in contenders])
        for place, contender in enumerate(contenders):
            launched.clear()
            contender.calls[0]()
            (launch,) = launched
            macros = dict(launch.program.macros)
            assert contender.name.startswith(
                f"{64 * int(macros['WARPGROUPS'])}x{macros['BLOCK_N']}"
            )
            assert launch.program in compiled
            contender.calls_per_replay = 1
            contender.samples_us = [30.0 if place == 0 else 20.0 + place - 1] * 5

    device = dataclasses.replace(current_device(), vendor="nvidia", architecture="sm_90")
    monkeypatch.setattr(script, "current_device", lambda: device)
    monkeypatch.setattr(script, "time_contenders", run)
    monkeypatch.setattr(script, "drawn_sizes", lambda *_: [(520, 64, 512), (1280, 208, 688)])
    monkeypatch.setattr(jit, "compute_units", lambda _: H200_SMS)
    monkeypatch.setattr(scaled_gemm, "tensor_map", lambda *_: "a map")
    monkeypatch.setattr(nvrtc, "cubin", lambda program, architecture: compiled.append(program))
    monkeypatch.setattr(CudaLaunch, "__call__", lambda self, *_: launched.append(self))
    file = tmp_path / "races.jsonl"
    script.main(["--seed", "1", "--tiles", "3", "--drawn", "1", "--out", str(file)])
    told = capsys.readouterr().out.splitlines()
    assert [len(names) for names in raced] == [5, 5]  # without promoted sums and with them
    assert told[0] == f"1280 208 688 fast {raced[0][0]} 1.500"
    assert "fast sums, 1 sizes: the rule's tile takes 1.5000 of the fastest's time" in told[2]
    assert told[3].strip() == (
        f"1280 x 208 x 688: 30.0 us by {raced[0][0]}, 20.0 by {raced[0][1]} (1.500)"
    )
    script.main(["--read", str(file)])
    assert capsys.readouterr().out.splitlines() == told[2:]


def test_without_a_gpu_one_line_says_so(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = dataclasses.replace(current_device(), vendor="none")
    monkeypatch.setattr(script, "current_device", lambda: device)
    with pytest.raises(SystemExit, match=r"^measure_tiles: no GPU is available; [^\n]+$"):
        script.main(["--seed", "1"])
    with pytest.raises(SystemExit, match="2"):  # argparse's
        script.main([])
