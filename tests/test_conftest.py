"""Selection of the core, and ``--evidence``: rows of a test run on a GPU."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lokakern.native import NATIVE
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.snapshot.cells import TestResultCell
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.storage.reader import read_rows

ROOT = Path(__file__).resolve().parent.parent
CONFTEST = runpy.run_path(str(ROOT / "tests" / "conftest.py"))
results_of, portable_command = CONFTEST["results_of"], CONFTEST["portable_command"]
Subject, PROPERTY = CONFTEST["Subject"], CONFTEST["_SUBJECT"]
HERE = Path("/home/me/lokakern")
load_kernels()


def subject(of: int) -> Any:
    return Subject("torch.bf16", "d" * 64, "tests/test_a.py", "0,7", of)


def reports(name: str, about: Any, *, message: str = "1 > 0.5\nassert", **ends: str) -> list[Any]:
    """Reports of a test: how its phases ended; by default all three passed."""
    found = []
    for when, end in (ends or PASSED).items():
        longrepr: Any = None
        if end == "failed":
            crash = SimpleNamespace(path=f"{HERE}/tests/test_a.py", lineno=7, message=message)
            longrepr = SimpleNamespace(reprcrash=crash)
        elif end == "skipped":
            longrepr = (f"{HERE}/tests/test_a.py", 3, "Skipped: needs 60 GiB")
        found.append(
            SimpleNamespace(
                nodeid=f"tests/test_a.py::{name}", when=when, longrepr=longrepr,
                user_properties=[] if about is None else [(PROPERTY, list(about))],
                failed=end == "failed", skipped=end == "skipped",
            )
        )  # fmt: skip
    return found


PASSED = {"setup": "passed", "call": "passed", "teardown": "passed"}
FAILED = PASSED | {"call": "failed"}
SKIPPED = {"setup": "skipped", "teardown": "passed"}


@pytest.mark.parametrize(
    ("reason", "marks", "outcome"),
    [
        ("needs a GPU", ["gpu"], "skipped"),
        ("needs a GPU of sm_90", ["gpu"], "skipped"),
        ("needs a GPU of sm_90", [], "failed"),
        ("needs a GPU with 60 GiB", ["gpu"], "failed"),
        ("no compiler", [], "failed"),
    ],
)
def test_skips_hide_only_a_missing_gpu(
    monkeypatch: pytest.MonkeyPatch, reason: str, marks: list[str], outcome: str
) -> None:
    monkeypatch.setenv("LOKAKERN_STRICT", "1")
    report = SimpleNamespace(
        nodeid="tests/test_a.py::one", outcome="skipped", keywords=dict.fromkeys(marks, 1),
        longrepr=("tests/test_a.py", 3, f"Skipped: {reason}"),
    )  # fmt: skip
    CONFTEST["_fail_a_silent_skip"](report)
    assert report.outcome == outcome


class Item:
    """A collected test: its name, its parameters, and its markers."""

    def __init__(self, name: str, parameters: dict[str, Any], *markers: Any) -> None:
        self.nodeid = f"tests/test_a.py::{name}[{parameters}]"
        self.callspec = SimpleNamespace(params=parameters)
        self.markers = {marker.name: marker for marker in markers}

    def get_closest_marker(self, name: str) -> Any:
        return self.markers.get(name)

    def add_marker(self, marker: Any) -> None:
        self.markers[marker.name] = marker


def test_the_first_of_every_few_cases_of_a_sampled_test_is_core() -> None:
    every_third = pytest.mark.sample(every=3, of=("name",))
    kernels = [
        Item("test_kernel", {"name": name, "m": m}, every_third)
        for m in range(5)
        for name in ("torch.bf16", "torch.fp32")
    ]
    on_gpu = [Item("test_kernel", {"name": "torch.bf16", "m": 9}, every_third, pytest.mark.gpu)]
    alone = [Item("test_alone", {"m": m}, pytest.mark.sample(every=2)) for m in range(3)]
    unmarked = [Item("test_unmarked", {"m": m}) for m in range(3)]
    items = [*kernels, *on_gpu, *alone, *unmarked]
    CONFTEST["_sample"](items)
    core = [item for item in items if item.get_closest_marker("rest") is None]
    assert [item.callspec.params for item in core] == [
        {"name": "torch.bf16", "m": 0},
        {"name": "torch.fp32", "m": 0},
        {"name": "torch.bf16", "m": 3},
        {"name": "torch.fp32", "m": 3},
        {"name": "torch.bf16", "m": 9},
        {"m": 0},
        {"m": 2},
        *({"m": m} for m in range(3)),
    ]


def test_a_test_that_leaves_the_library_in_use_fails() -> None:
    """And the tests behind it find the library as it did."""

    def leave(**values: Any) -> None:
        with CONFTEST["native_left_as_found"]():
            vars(NATIVE).update(values)

    leave()
    found = dict(vars(NATIVE))
    with pytest.raises(pytest.fail.Exception, match="call_layer is 'counted', was "):
        leave(call_layer="counted")
    assert vars(NATIVE) == found


def test_each_test_counts_once() -> None:
    it = subject(5)
    found = results_of(
        [
            *reports("one", it),
            *reports("two", it, **FAILED),
            *reports("three", it, **PASSED | {"teardown": "failed"}),
            *reports("four", it, setup="failed", teardown="passed"),
            *reports("of_no_kernel", None, **FAILED),
            *reports("five", it),
        ],
        HERE,
    )[it]
    assert (found.passed_count, found.failed_count, found.skipped_count) == (2, 3, 0)
    assert (found.status, found.seeds) == ("failed", "0,7")
    assert found.reason == "tests/test_a.py::two: test_a.py:7: 1 > 0.5"


@pytest.mark.parametrize("last", [{}, {"setup": "passed", "call": "passed"}], ids=["no", "half"])
def test_there_is_no_result_until_every_test_has_ended(last: dict[str, str]) -> None:
    """The process of the last one died."""
    it = subject(2)
    begun = reports("two", it, **last) if last else []
    assert results_of([*reports("one", it), *begun], HERE) == {it: None}


def test_skips_are_counted_and_are_a_reason_only_if_nothing_ran() -> None:
    it = subject(2)
    found = results_of([*reports("one", it, **SKIPPED), *reports("two", it)], HERE)[it]
    assert (found.passed_count, found.skipped_count) == (1, 1)
    assert (found.status, found.reason) == ("ok", "")
    found = results_of([*reports("one", it, **SKIPPED), *reports("two", it, **SKIPPED)], HERE)[it]
    assert (found.passed_count, found.skipped_count, found.status) == (0, 2, "nothing")
    assert found.reason == "tests/test_a.py::one: Skipped: needs 60 GiB"


def test_reports_of_several_processes_may_come_in_any_order() -> None:
    it, other = subject(2), subject(1)._replace(kernel="torch.fp32")
    one, two = reports("one", it), reports("two", it)
    third = reports("three", other)
    mixed = [one[0], two[0], third[0], two[1], one[1], third[1], two[2], third[2], one[2]]
    found = results_of(mixed, HERE)
    assert (found[it].passed_count, found[other].passed_count) == (2, 1)


def test_a_stored_reason_contains_no_local_folder() -> None:
    it = subject(1)
    message = f"FileNotFoundError: {HERE}/build/x is not there"
    failed = reports("one", it, **FAILED, message=message)
    assert str(HERE) not in results_of(failed, HERE)[it].reason


def test_a_stored_command_contains_no_local_folder() -> None:
    words = ["-m", "gpu", "-n", "8", f"{HERE}/tests/test_a.py", "--evidence", "/tmp/a.sqlite",
             "--basetemp=/tmp/b", "-k", "not slow"]  # fmt: skip
    expected = "pytest -m gpu -n 8 tests/test_a.py --basetemp=b -k 'not slow'"
    assert portable_command(words, HERE) == expected
    assert portable_command(["--evidence=/tmp/a.sqlite", "tests"], HERE) == "pytest tests"


# --- whole sessions, with a device that is not there

FAKE_GPU = """
import torch
from lokakern import device
from lokakern.types import Device, Environment

torch.cuda.is_available = lambda: True
device.current_device = lambda *_: Device("nvidia", "NVIDIA H200", "sm_90", 132, 141)
device.current_environment = lambda *_: Environment(driver="1.0")
"""
TINY = """
import pytest
import torch

SEEDS = (7, 0)
WHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
{more}

@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ["torch.bf16", "torch.fp32", "not.registered"])
def test_one(name, where):
    assert torch.initial_seed() == 7
    assert name != "torch.fp32" or where == "cpu", "too far off"

@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch.bf16", "torch.quantize_row"])
def test_two(name):
    pytest.skip("needs 60 GiB")

@pytest.mark.parametrize("name", ["torch.bf16", "torch.quantize_row"])
def test_three(name):
    assert False
"""


def session(
    folder: Path, *words: str, more: str = "", gpu: bool = True
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Runs a tiny test module under a copy of our conftest."""
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
    (folder / "tests" / "test_tiny.py").write_text(TINY.format(more=more), encoding="utf-8")
    (folder / "fake_gpu.py").write_text(FAKE_GPU, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    file = folder / "evidence.sqlite"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "LOKAKERN_"))}
    kept |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "CUDA_VISIBLE_DEVICES": ""}
    fake = ["-p", "fake_gpu"] if gpu else []
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *fake, "tests",
         f"--evidence={file.name}", *words],
        cwd=folder, env=kept, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    return ran, file


@pytest.mark.rest
def test_processes_leave_one_row_for_each_kernel_and_module(tmp_path: Path) -> None:
    ran, file = session(tmp_path, "-n", "2")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "evidence: 3 results of kernels on sm_90, 1 ok" in ran.stdout
    cells = {cell.kernel.name: cell for cell in load_snapshot([file]).test_results}

    def counts(cell: TestResultCell) -> tuple[str, int, int, int]:
        return cell.status, cell.passed_count, cell.failed_count, cell.skipped_count

    assert {name: counts(cell) for name, cell in cells.items()} == {
        "torch.bf16": ("ok", 1, 0, 1),
        "torch.fp32": ("failed", 0, 1, 0),
        "torch.quantize_row": ("nothing", 0, 0, 1),
    }
    for name, cell in cells.items():
        assert cell.kernel.digest == KERNELS[name].digest
        assert (cell.architecture, cell.suite) == ("sm_90", "tests/test_tiny.py")
        assert cell.seeds == "0,7"
        assert load_snapshot([file]).environment(cell.environment).driver == "1.0"
    failed = cells["torch.fp32"].reason
    assert failed.startswith("tests/test_tiny.py::test_one[torch.fp32-cuda]: test_tiny.py:")
    assert "too far off" in failed
    assert cells["torch.quantize_row"].reason.endswith("Skipped: needs 60 GiB")
    (run,) = read_rows(file)["run"]
    assert {"tests", "pytest -p no:cacheprovider -p fake_gpu tests -n 2"} < set(run)


@pytest.mark.rest
def test_an_interrupted_session_leaves_nothing(tmp_path: Path) -> None:
    more = "def test_zero():\n    raise KeyboardInterrupt"
    ran, file = session(tmp_path, more=more)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "nothing written: the session did not end by itself" in ran.stdout
    assert not file.exists()


@pytest.mark.rest
def test_a_kernel_of_which_not_every_test_ran_is_left_out(tmp_path: Path) -> None:
    ran, file = session(tmp_path, "-k", "test_one")
    assert "1 results of kernels on sm_90, 0 ok; 1 left out: not all" in ran.stdout, ran.stdout
    assert [cell.kernel.name for cell in load_snapshot([file]).test_results] == ["torch.fp32"]


@pytest.mark.parametrize(
    ("words", "gpu", "why"),
    [((), False, "--evidence needs a GPU"),
     (("tests/test_tiny.py::test_two",), True, "leave out --lf, and names of tests")],
    ids=["no GPU", "one test"],
)  # fmt: skip
@pytest.mark.rest
def test_options_that_would_invalidate_evidence_raise(
    tmp_path: Path, words: tuple[str, ...], gpu: bool, why: str
) -> None:
    ran, file = session(tmp_path, *words, gpu=gpu)
    assert ran.returncode == 4
    assert why in ran.stderr
    assert not file.exists()


def test_parts_are_disjoint_and_complete() -> None:
    """Whatever the order in which tests are collected."""

    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid

        def get_closest_marker(self, name: str) -> Any:
            return True if name == "rest" and self.nodeid in rest else None

    def names_of(part: str, given: list[str], option: str = "--part") -> set[str]:
        gone: list[Any] = []
        hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
        config = SimpleNamespace(getoption={option: part}.get, hook=hook)
        items = [Item(name) for name in given]
        CONFTEST["_keep_part"](config, items)
        assert {x.nodeid for x in (*items, *gone)} == set(given)
        return {x.nodeid for x in items}

    names = [f"tests/test_a.py::test_{i}" for i in range(400)]
    rest = set(names[::3])
    parts = [names_of(f"{i}/4", names) for i in (1, 2, 3, 4)]
    assert set.union(*parts) == set(names) and sum(map(len, parts)) == len(names)
    assert min(map(len, parts)) > 70
    assert names_of("2/4", names[::-1]) == parts[1] and names_of("", names) == set(names)
    assert names_of("2/4", names, "--core-and") == (set(names) - rest) | (parts[1] & rest)
    slow = set(CONFTEST["SLOW_TESTS"].read_text().split())
    rest = {name for name in slow if not len(name) % 3}
    assert names_of("2/4", [*names, *slow], "--slow") == {
        *names, *rest, *(names_of("2/4", [*slow]) - rest)
    }  # fmt: skip
    for wrong in ("0/4", "5/4", "2", "a/4", "1/0"):
        for option in ("--part", "--core-and", "--slow"):
            with pytest.raises(pytest.UsageError, match=f"{option} is .* expected such as 2/4"):
                names_of(wrong, names, option)
    # Cases of one name share what they are about.
    cases = [f"tests/test_a.py::test_{i}[sm_{j}]" for i in range(10) for j in range(20)]
    for i in range(4):
        of_part = names_of(f"{i + 1}/4", cases)
        assert of_part == {
            case for case in cases if f"tests/test_a.py::test_0[{case.split('[')[1]}" in of_part
        }
