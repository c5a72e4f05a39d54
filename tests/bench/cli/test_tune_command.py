"""The command `tune`; what it decides is tested in tests/conversion/test_tune.py."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lokakern.bench.cli.main import app
from lokakern.conversion import tune as conversion_tune
from lokakern.conversion import tuning_file
from lokakern.conversion.variants import refuse_emulation
from lokakern.selection import dispatcher
from tests.support.conversions import measured
from tests.support.measurements import Book

MODELS = """
import lokakern, torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1)).bfloat16()

def convert(model, **options):
    return lokakern.convert(model, 0.06, device="NVIDIA H200", distribution="X1", **options)

def tuned():
    net, x = model(), torch.randn(256, 48).bfloat16()
    return convert(net), lambda: net(x).float().sum().backward()

def alone():
    return convert(model())

def unconverted():
    return model(), lambda: None
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """The command; kernels are emulated here, which is else refused."""
    database = tmp_path / "rows.sqlite"
    Book(database).write(*measured())

    monkeypatch.setattr(conversion_tune, "refuse_emulation", lambda _conversion: None)
    monkeypatch.setattr(conversion_tune, "TIME_LIMIT_S", {True: 0.0, False: 0.0})

    def tune(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        asked = ("tune", *map(str, words), "--db", str(database))
        with pytest.raises(SystemExit) as ended:
            app(asked, prog_name="python -m lokakern.bench")
        found = capsys.readouterr()
        return int(ended.value.code or 0), found.out, found.err

    yield tune
    dispatcher.use_snapshot(None)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "somebodys_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "somebodys_models"
    sys.modules.pop("somebodys_models", None)


QUICK = ("--rounds", 8)


def test_a_model_is_tuned_and_its_outcome_saved(
    run: Run, models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "tuned.json"
    code, text, err = run(f"{models}:tuned", *QUICK, "--out", out, "--json")
    assert code == 0, err
    found = json.loads(text)
    assert sorted(row["gemm"] for row in found["groups"]) == [
        "grad_input", "grad_weight", "output", "relu",
    ]  # fmt: skip
    sites = {row["gemm"]: row["sites"] for row in found["groups"]}
    assert sites.pop("relu") == "0, 2"  # forms of layers in compiled code
    assert set(sites.values()) == {"0"}
    assert "gain over nn.Linear" in found["summary"] and f"tuned={str(out)!r}" in err
    assert [site.name for site in tuning_file.read(out).sites] == ["0", "2"]
    module = sys.modules[models]
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "rows.sqlite"))  # beside the shipped files
    dispatcher.use_snapshot(None)
    handle = module.convert(module.model(), tuned=out)
    dropped = {row["gemm"] for row in found["groups"] if not row["kept"]} - {"relu"}
    assert {r.gemm for r in handle.sites["0"].routes if not r.text} == dropped


def test_emulated_kernels_are_refused(
    run: Run, models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion_tune, "refuse_emulation", refuse_emulation)
    out = tmp_path / "tuned.json"
    code, text, err = run(f"{models}:tuned", *QUICK, "--out", out)
    assert (code, text) == (1, "") and "emulated on this CPU" in err and not out.exists()


def test_a_table_and_csv_are_printed(run: Run, models: str) -> None:
    code, text, _ = run(f"{models}:tuned", *QUICK)
    assert code == 0 and "predicted gain us" in text and "gain over nn.Linear" in text
    code, text, _ = run(f"{models}:tuned", *QUICK, "--format", "csv", "--quiet")
    assert code == 0 and len(list(csv.DictReader(io.StringIO(text)))) == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("alone", "returned Conversion; expected a function without arguments that returns the"),
        ("unconverted", "returned Sequential, function; expected"),
        ("none", "tune: 'somebodys_models' has no 'none'; it has model, convert"),
    ],
)
def test_other_factories_are_refused(run: Run, models: str, name: str, words: str) -> None:
    code, out, err = run(f"{models}:{name}", *QUICK)
    assert (code, out) == (2 if name == "none" else 1, "") and words in err
