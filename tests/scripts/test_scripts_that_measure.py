"""What scripts that measure say of few rounds, and before they measure where they cannot."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lokakern.probe import sample_kernel
from tests.support import native, window_kernel

ROOT = Path(__file__).resolve().parents[2]
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    def loaded(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [f"{name}.py"])
        return module

    yield loaded


def test_a_range_of_few_rounds_is_no_interval(load: Load) -> None:
    script = load("measure_watch")
    values = [1.0, 5.0, 2.0, 4.0, 3.0]
    assert script.interval_of(values) == (1.0, 5.0)
    few = script.interval_words(0.01, 0.05, len(values))
    assert few == "range of 5 rounds +1.00% to +5.00%, no 95 % interval"
    assert script.interval_of([*values, 6.0]) == (1.0, 6.0)
    assert script.interval_words(0.01, 0.06, 6) == "95 % interval +1.00% to +6.00%"
    # Of a fair coin for each value, at most 5 % of samples have the median outside.
    assert 2 * 0.5**script.FEWEST <= 0.05 < 2 * 0.5 ** (script.FEWEST - 1)


def test_samples_of_a_watch_are_compared(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the kernel, compiled for the CPU, and those of torch."""
    script = load("measure_watch")
    monkeypatch.setattr(script, "STEPS", 1)
    asked = Namespace(size="tiny")
    with native.in_use(), window_kernel.on_host() as launches:
        row = script.measure_samples(asked)
        assert launches.blocks, "no sample was taken by the kernel"
        assert row["by_kernel"].keys() == row["by_torch"].keys()
        assert "equal" in script.sample_lines(row)[0]
    taken = script.Samples(64, [(8, 8)])
    with native.in_use(), taken.probe:
        taken.step()
        found = taken.taken()
    script.compare(found, found)
    (name, x), *_ = found[0].items()
    with pytest.raises(SystemExit, match=f"not those of torch: {name}"):
        script.compare(({**found[0], name: x + 1}, found[1]), found)


def test_samples_go_on_without_the_kernel_after_a_failed_launch(load: Load) -> None:
    script = load("measure_watch")
    found = []
    for failure in (0, 701):
        with native.in_use(), window_kernel.on_host() as launches:
            launches.failure = failure
            steps = script.Samples(64, [(8, 8)])
            warns = pytest.warns(UserWarning, match="from now on; taking them: error 701")
            with steps.probe, warns if failure else contextlib.nullcontext():
                steps.step()
                found.append(steps.taken()[0])
                assert ("error 701" in steps.probe._kernel.status()) == bool(failure)
    assert all(torch.equal(x, found[1][name].to(x.dtype)) for name, x in found[0].items())


@pytest.mark.parametrize("error", [OSError("no disk"), RuntimeError("no driver")])
def test_a_kernel_of_samples_that_does_not_compile_is_refused(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_index: int) -> bytes:
        raise error

    monkeypatch.setattr(sample_kernel, "_code_for", fail)
    kernel = sample_kernel.SampleKernel([torch.device("cuda", 0)])
    assert kernel.status() == "not loaded"
    kernel.load()  # before it is compiled
    kernel = sample_kernel.SampleKernel([torch.device("cuda", 0)])
    kernel.compile()
    assert kernel.status() == f"GPU 0: {error}"


@pytest.mark.parametrize("name", ["measure_saved_inputs", "measure_energy"])
def test_without_a_gpu_one_line_says_so(
    name: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=f"^{name}: no GPU is available; [^\n]+$"):
        script.main()


def test_energy_needs_nvml(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("measure_energy")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(SystemExit, match="pip install nvidia-ml-py"):
        script.main()
    fake = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    fake.NVMLError, fake.nvmlInit = NVMLError, fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    with pytest.raises(SystemExit, match="counts no energy of this GPU: Driver Not Loaded"):
        script.main()


def test_a_file_that_cannot_be_written_ends_a_measurement_before_it_begins(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("measure_training_options")
    monkeypatch.setattr(script, "stepper", lambda *_: pytest.fail("it measured"))
    out = tmp_path / "missing" / "rows.json"
    monkeypatch.setattr(sys, "argv", ["measure_training_options.py", "--out", str(out)])
    with pytest.raises(SystemExit):
        script.main()
    assert "--out cannot be written" in capsys.readouterr().err
