"""Sweeps survive kernels that crash, hang, lose the device or lie, and lose no row."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lokakern.device import current_device
from lokakern.errors import MeasurementError
from lokakern.problems import accuracy_problem, make_problem
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.schema.row_keys import family_key, key_of
from lokakern.registry.snapshot.cells import TimingCell
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.registry.storage.reader import open_readonly
from lokakern.selection.dispatcher import default_regime
from lokakern.sweep import engine as sweep_module
from lokakern.sweep import worker
from lokakern.sweep.engine import SweepReport, sweep
from lokakern.sweep.worker import Death, TimingTask, run_tasks
from lokakern.types import Format, Problem
from lokakern.workloads.suites import Case
from tests.support.inline_worker import launches_take, run_tasks_here

load_kernels()
ROOT = Path(__file__).resolve().parents[2]
# Each fault at each stage; a thousand take minutes: LOKAKERN_FAULTS=1000 python -m pytest
FAULTS = int(os.environ.get("LOKAKERN_FAULTS", "24"))
WATCHDOG_S = 2.0  # of the clock below


class Clock:
    """Stands still until a worker has told that it hangs: no other is ever too slow."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._hanging: set[int | None] = set()

    def monotonic(self) -> float:
        alive = {child.pid for child in multiprocessing.active_children()}
        for process in alive:
            told = Path(os.environ["LOKAKERN_TESTS"], f"hangs-{process}")  # faulty_kernels.hang_of
            if told.exists():
                told.unlink()
                self._hanging.add(process)
        self._now_s += bool(self._hanging & alive)
        return self._now_s

    def sleep(self, _seconds: float) -> None:
        """Nobody here has a GPU that must get rid of a process."""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that measures silence in the sweep process; workers have their own."""
    clock = Clock()
    monkeypatch.setattr(worker, "time", clock)
    return clock


def registered(name: str) -> Iterator[ModuleType]:
    """A module's kernels, for as long as a test needs them."""
    before = set(KERNELS)
    module = importlib.import_module(name)
    mine = {k: v for k, v in KERNELS.items() if k not in before} or module.__dict__["_kept"]
    module.__dict__["_kept"] = mine
    KERNELS.update(mine)
    yield module
    for kernel in mine:
        KERNELS.pop(kernel, None)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "tests" / "support")
    yield from registered("faulty_kernels")


@pytest.fixture
def faulty_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "tests" / "support")
    yield from registered("faulty_gpu_kernels")


def case(m: int, n: int = 256, k: int = 512) -> Case:
    return Case(make_problem("gemm", (m, n, k)), "X1")


def swept(path: Path, cases: list[Case], *only: str, **options: Any) -> SweepReport:
    settings = {"errors": "none", "watchdog_s": WATCHDOG_S, **options}
    return sweep(cases, database=path, suite="test", command="test", only=only, **settings)


def rows(facts: Snapshot, problem: Problem) -> dict[str, TimingCell]:
    device = current_device()
    cells = facts.timing_cells(device, family_key(problem), default_regime(device))
    found = [cell for cell in cells if cell.problem.m == problem.m]
    assert len({cell.kernel.name for cell in found}) == len(found)
    return {cell.kernel.name: cell for cell in found}


@pytest.mark.rest
def test_faults_become_rows_and_no_rows_are_lost(faulty: Any, tmp_path: Path) -> None:
    """Every fault at every stage: the culprit gets the row, its rivals get theirs."""
    path = tmp_path / "rows.sqlite"
    cases = [case(m) for m in range(1, FAULTS + 1)]
    report = swept(path, cases, "faulty_kernels.chaos", "torch.bf16", strikes=10**9)
    assert report.problems == FAULTS and not report.out_of_time
    facts = load_snapshot([path])
    seen = 0
    for one in cases:
        found = rows(facts, one.problem)
        fault = faulty.fault_of(one.problem)
        assert found["torch.bf16"].status == "ok", one
        culprit = found["faulty_kernels.chaos"]
        assert culprit.status == faulty.STATUS[fault], (one, culprit)
        seen += len(found)
    assert seen == 2 * FAULTS == report.timed
    deadly = [one for one in cases if faulty.fault_of(one.problem) in faulty.DEADLY]
    assert report.deaths == len(deadly)


@pytest.mark.rest
def test_an_incorrect_norm_becomes_a_row(faulty: Any, tmp_path: Path) -> None:
    """Found while it is timed, and where its error is measured."""
    path = tmp_path / "rows.sqlite"
    problem = make_problem("gemm_norm", (64, 96, 32), epilogue="rms")
    words = ("faulty_kernels.norm", "torch.norm_unfused")
    # X6 has rows of zeros, which nothing but eps keeps from being divided by 0.
    report = swept(path, [Case(problem, "X6")], *words, errors="all", distributions=["X6"])
    found = {name: cell.status for name, cell in rows(load_snapshot([path]), problem).items()}
    expected = {f"faulty_kernels.{fault}": "wrong" for fault in faulty.NORM_FAULTS}
    right = dict.fromkeys(("faulty_kernels.norm_is_right", "torch.norm_unfused"), "ok")
    assert found == {**expected, **right}
    assert len(report.failures) == len(faulty.NORM_FAULTS) and not report.deaths
    assert report.measured == 2 * 3  # of the two classes that are right, at three seeds


@pytest.mark.rest
def test_reasons_name_the_signal_and_the_stage(faulty: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    size = len(faulty.FAULTS)
    first = {fault: size * 3 + place for place, fault in enumerate(faulty.FAULTS)}
    cases = [case(m) for m in first.values()]
    swept(path, cases, "faulty_kernels.chaos", strikes=10**9)
    facts = load_snapshot([path])
    words = {
        fault: rows(facts, case(m).problem)["faulty_kernels.chaos"].reason
        for fault, m in first.items()
    }
    assert words["segfault"] == "the process was killed by SIGSEGV while it is timed"
    assert "SIGABRT" in words["abort"]
    assert words["kill"] == "the process was killed by SIGKILL while it is timed"
    assert words["exit"] == "the process exited with 3 while it is timed"
    assert words["hang"] == "no sign of life for 2 s while it is timed"
    assert "raised on purpose" in words["raise"]


@pytest.mark.rest
def test_a_failed_kernel_is_retried_only_on_request(faulty: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    cases = [case(8), case(9)]
    only = ("faulty_kernels.segfault", "torch.bf16")
    assert swept(path, cases, *only).deaths == 2
    again = swept(path, cases, *only)
    assert (again.deaths, again.timed, again.skipped) == (0, 0, 4)
    asked = swept(path, cases, *only, retry=True)
    assert (asked.deaths, asked.timed) == (2, 4)


@pytest.mark.rest
def test_a_kernel_is_not_launched_after_three_failures(faulty: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    cases = [case(m) for m in range(8, 16)]
    only = ("faulty_kernels.segfault", "torch.bf16")
    report = swept(path, cases, *only)
    assert report.deaths == 3
    assert report.given_up == ["faulty_kernels.segfault: crashed or hung 3 times"]
    assert report.timed == 8 + 3 and report.problems == 8
    later = swept(path, [*cases, case(100)], *only)
    assert later.given_up == ["faulty_kernels.segfault: crashed or hung 3 times before"]
    assert (later.deaths, later.timed) == (0, 1)


@pytest.mark.rest
def test_another_kernel_of_the_class_measures_the_error(faulty: Any, tmp_path: Path) -> None:
    """The first by name dies at its first error; torch.bf16 brings them all, and once is enough."""
    path = tmp_path / "rows.sqlite"
    options: dict[str, Any] = {"errors": "all", "distributions": ("X1", "X8")}
    only = ("faulty_kernels.segfault", "torch.bf16")
    report = swept(path, [case(64)], *only, **options)
    assert report.deaths == 2  # one while it was timed, one while its error was measured
    assert (report.timed, report.measured) == (2, 6 + 6)
    facts = load_snapshot([path])
    asked = key_of(accuracy_problem(case(64).problem, Format.E4M3FN))
    architecture = current_device().architecture
    mine = facts.accuracy_cells(architecture, "faulty_kernels.segfault", asked)
    assert Counter(cell.status for cell in mine) == {"crashed": 6}
    assert sum(cell.reason.startswith("not launched") for cell in mine) == 5
    others = facts.accuracy_cells(architecture, "torch.bf16", asked)
    assert {(cell.distribution, cell.seed, cell.status) for cell in others} == {
        (name, seed, "ok") for name in ("X1", "X8") for seed in range(3)
    }
    again = swept(path, [case(64)], *only, **options)
    assert (again.deaths, again.timed, again.measured) == (0, 0, 0)


@pytest.mark.rest
def test_a_later_sweep_measures_a_failed_error(faulty: Any, tmp_path: Path) -> None:
    """A kernel that failed alone hides no other of its class."""
    path = tmp_path / "rows.sqlite"
    options: dict[str, Any] = {"errors": "all", "distributions": ("X1",)}
    assert swept(path, [case(64)], "faulty_kernels.segfault", **options).deaths == 2
    later = swept(path, [case(64)], "faulty_kernels.segfault", "torch.bf16", **options)
    assert (later.deaths, later.measured) == (1, 3)  # the problem is timed anew, its errors added


@pytest.mark.rest
def test_a_kernel_that_overwrites_operands_does_not_affect_others(
    faulty: Any, tmp_path: Path
) -> None:
    path = tmp_path / "rows.sqlite"
    swept(path, [case(64)], "faulty_kernels.scribble", "faulty_kernels.segfault", "torch.bf16")
    found = rows(load_snapshot([path]), case(64).problem)
    assert found["torch.bf16"].status == "ok"
    culprit = found["faulty_kernels.scribble"]
    assert (culprit.status, culprit.reason) == ("wrong", "it changes what it should only read")
    assert found["faulty_kernels.segfault"].status == "crashed"


def test_only_errors_of_possible_choices_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would choose an emulation slower than bf16, and a baseline is nobody's choice."""
    monkeypatch.setattr(sweep_module, "run_tasks", run_tasks_here)
    launches_take(monkeypatch, lambda name: 1e4 if name == "torch.bf16" else 3e4)
    path = tmp_path / "rows.sqlite"
    only = ("torch.bf16", "torch.quantize_row+torch.emulated_row")
    options: dict[str, Any] = {"errors": "needed", "distributions": ("X1",)}
    first = swept(path, [case(256)], *only, **options)
    assert (first.timed, first.measured) == (2, 0)
    with open_readonly(path) as connection:
        runs = connection.execute("SELECT count(*) FROM run").fetchone()[0]
    again = swept(path, [case(256)], *only, **options)
    assert (again.timed, again.measured) == (0, 0)
    with open_readonly(path) as connection:
        assert connection.execute("SELECT count(*) FROM run").fetchone()[0] == runs
    assert swept(path, [case(256)], *only, errors="all", distributions=("X1",)).measured == 6


def test_errors_of_kernels_faster_than_bf16_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "run_tasks", run_tasks_here)
    launches_take(monkeypatch, lambda name: 3e4 if name == "torch.bf16" else 1e4)
    report = swept(tmp_path / "rows.sqlite", [case(256)], "torch.bf16",
                   "torch.quantize_row+torch.emulated_row", errors="needed",
                   distributions=("X1",))  # fmt: skip
    assert (report.timed, report.measured) == (2, 6)


def test_no_errors_are_needed_where_all_kernels_were_wrong_before(
    faulty: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "run_tasks", run_tasks_here)
    wrong = case(faulty.FAULTS.index("wrong"))
    options: dict[str, Any] = {"errors": "needed", "distributions": ("X1",)}
    path = tmp_path / "rows.sqlite"
    for timed in (1, 0):
        report = swept(path, [wrong], "faulty_kernels.chaos", **options)
        assert (report.timed, report.measured) == (timed, 0)


@pytest.mark.rest
def test_a_death_between_tasks_blames_no_kernel() -> None:
    """The worker dies while it draws operands, and the next worker does the remaining tasks."""
    tasks: dict[int, Any] = {n: TimingTask(case(8 + n), ("torch.bf16",), "eager") for n in range(3)}
    done: list[int] = []

    def kill(number: int, task: Any, event: Any) -> None:
        done.append(number)
        if number == 0:
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    def died(number: int, task: Any, death: Death) -> Any:
        assert death.kernel is None or death.status == "out_of_memory"
        return task

    assert run_tasks(tasks, kill, died, watchdog_s=60.0)
    assert sorted(done) == [0, 1, 2]


def runs(process: int) -> bool:
    """Whether it has not ended; where nobody waits for it, what is left of it stays in state Z."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status


@pytest.mark.rest
def test_a_hung_worker_ends_with_a_killed_sweep(faulty: Any, tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
        from lokakern.registry.register import load_kernels
        load_kernels()
        import faulty_kernels
        from lokakern.sweep import worker
        from lokakern.workloads.suites import Case
        from lokakern.problems import make_problem
        case = Case(make_problem("gemm", (8, 256, 512)), "X1")
        tasks = {{0: worker.TimingTask(case, ("faulty_kernels.hang",), "eager")}}
        with worker.Worker(tasks, watchdog_s=600.0) as one:
            while one._page.kernel != 0:
                pass
            print(one._process.pid, flush=True)
            next(one.events())
    """)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                               env=environment, start_new_session=True)  # fmt: skip
    assert process.stdout is not None
    worker_pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    while runs(worker_pid):
        time.sleep(0.1)


@pytest.mark.rest
def test_hangs_differ_from_slow_preparation(
    faulty: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.sqlite"
    report = swept(path, [case(8)], "faulty_kernels.hang", "torch.bf16", watchdog_s=0.3)
    assert report.deaths == 1
    hung = rows(load_snapshot([path]), case(8).problem)["faulty_kernels.hang"]
    assert (hung.status, hung.reason) == ("timeout", "no sign of life for 0.3 s while it is timed")
    # Ten times as long where nothing of a kernel runs: here a module of a user is imported.
    (tmp_path / "hangs_when_imported.py").write_text(
        "import os, faulty_kernels as f\nf.hang_of(os.getpid()).touch()\nwhile True: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(worker, "_plugin_modules", lambda: ("hangs_when_imported",))
    tasks: dict[int, Any] = {0: TimingTask(case(8), ("torch.bf16",), "eager")}
    with worker.Worker(tasks, watchdog_s=0.3) as one:
        (death,) = one.events()
    assert isinstance(death, Death)
    assert (death.task, death.kernel, death.status) == (None, None, "timeout")
    assert death.reason.startswith("no sign of life for 3 s")


def test_a_time_limit_ends_a_sweep_between_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second a problem, by a clock of which three have passed after the third."""
    now_s = 0.0
    time_case = worker.time_case

    def second(*arguments: Any, **named: Any) -> Any:
        nonlocal now_s
        now_s += 1.0
        return time_case(*arguments, **named)

    monkeypatch.setattr(worker, "time_case", second)
    for module in (worker, sweep_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(sweep_module, "run_tasks", run_tasks_here)
    path = tmp_path / "rows.sqlite"
    report = swept(path, [case(m) for m in range(1, 9)], "torch.bf16", time_limit_s=2.5)
    assert report.out_of_time and report.problems == 3
    facts = load_snapshot([path])
    assert sum(len(rows(facts, case(m).problem)) for m in range(1, 9)) == report.timed == 3


def test_a_worker_starts_no_task_after_the_deadline(tmp_path: Path) -> None:
    tasks: dict[int, Any] = {0: TimingTask(case(8), ("torch.bf16",), "eager")}
    with worker.Worker(tasks, watchdog_s=60.0, deadline=0.0) as one:
        assert isinstance(next(events := one.events()), worker.Idle)
        one.give(None)
        assert list(events) == []


def test_workers_that_never_start_end_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_plugin_modules", lambda: ("no_such_module_anywhere",))
    tasks: dict[int, Any] = {0: TimingTask(case(8), ("torch.bf16",), "eager")}
    with pytest.raises(MeasurementError, match="3 workers ended before they began"):
        run_tasks(tasks, _unexpected, _unexpected, watchdog_s=60.0)


def _unexpected(*_: Any) -> None:
    raise AssertionError


def test_nothing_is_left_running(faulty: Any, tmp_path: Path) -> None:
    tasks: dict[int, Any] = {0: TimingTask(case(8), ("faulty_kernels.hang",), "eager")}
    deaths: list[Death] = []
    with worker.Worker(tasks, watchdog_s=1.0) as one:
        deaths = [event for event in one.events() if isinstance(event, Death)]
        process = one._process
    assert [death.kernel for death in deaths] == ["faulty_kernels.hang"]
    assert not process.is_alive()


SWEEP_AND_WAIT = """
import sys
from pathlib import Path
from lokakern.workloads.suites import Case
from lokakern.sweep.engine import sweep
from lokakern.progress import Progress
from lokakern.problems import make_problem

class Waits(Progress):
    def reach(self, count, text):
        if count == 3:
            print("three", flush=True)
            sys.stdin.read()

cases = [Case(make_problem("gemm", (m, 256, 512)), "X1") for m in range(8, 16)]
sweep(cases, database=Path(sys.argv[1]), suite="test", command="test", only=["torch.bf16"],
      errors="none", watchdog_s=1e9, progress=Waits())
"""


@pytest.mark.rest
def test_a_killed_sweep_keeps_reported_rows(tmp_path: Path) -> None:
    """kill -9 of the sweep itself: its workers end, its rows are collected by the next."""
    path = tmp_path / "rows.sqlite"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", SWEEP_AND_WAIT, str(path)], text=True,
                               cwd=ROOT, env=environment, start_new_session=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "three\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    cases = [case(m, 256, 512) for m in range(8, 16)]
    report = swept(path, cases, "torch.bf16")
    assert (report.skipped, report.timed) == (3, 5)
    facts = load_snapshot([path])
    assert all("torch.bf16" in rows(facts, one.problem) for one in cases)


@pytest.mark.gpu
def test_gpu_faults_become_rows(faulty_on_gpu: Any, tmp_path: Path) -> None:
    """A real SIGSEGV, a device loop without end, a real illegal access, and no memory."""
    path = tmp_path / "rows.sqlite"
    cases = [case(m, 256, 256) for m in (256, 512)]
    report = swept(path, cases, "faulty_gpu_kernels", "torch.bf16", watchdog_s=8.0)
    facts = load_snapshot([path])
    for one in cases:
        found = {
            name: (cell.status, cell.reason) for name, cell in rows(facts, one.problem).items()
        }
        assert found["torch.bf16"][0] == "ok", found
        status, reason = found["faulty_gpu_kernels.gpu_segfault"]
        assert status == "crashed" and "SIGSEGV" in reason
        assert found["faulty_gpu_kernels.gpu_loop"][0] == "timeout", found
        status, reason = found["faulty_gpu_kernels.gpu_illegal_access"]
        assert status == "crashed" and "illegal memory access" in reason, found
        assert found["faulty_gpu_kernels.gpu_out_of_memory"][0] == "out_of_memory", found
    assert report.deaths == 6
    torch.cuda.synchronize()  # this process never noticed
