"""Kill the command line at any moment: no row is lost or doubled, and no lock or file remains.

By hand, so many kills of a command (some seconds each), from a seed if one is named:

    python -m tests.support.faults {sweep,merge,import,export} --kills 80 [--seed S]

Every fourth process is started as `python -m lokakern.bench` and killed at any moment of its life.
The start of Python and torch takes most of that: the others are forked from here, where all of it
is imported, and killed after the first thing they wrote. The whole process group gets SIGKILL.

With `--how steps` a command dies before each file or folder that it makes, renames or removes;
`full`, `readonly` and `nolocks` are the faults of disks. `--quick` is what tests do: small
databases, and a sweep of few rows without worker processes.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import fcntl
import hashlib
import importlib
import io
import os
import random
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lokakern.bench.cli import main as cli
from lokakern.errors import DatabaseError
from lokakern.measure import operands
from lokakern.registry.locks import Lock
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.schema.manifest import place_of
from lokakern.registry.schema.records import KernelRow
from lokakern.registry.storage.reader import open_readonly, read_rows, rows_digest
from lokakern.registry.storage.run_files import collect_runs, runs_folder
from lokakern.sweep import engine, plan
from tests.benchmarks import many_rows
from tests.support.inline_worker import run_tasks_here

ROOT = Path(__file__).resolve().parents[2]
ROWS = 40_000
DEADLINE_S = 1800.0  # ends what hangs
TO_THE_END = 10  # after so many kills the command is let end
# One kernel takes each of these, so that no time belongs to a set that is measured again.
SWEEP = (
    *("--shape", "128,32", "--shape", "128,48", "--shape", "128,64", "--shape", "128,80"),
    *("--kernel", "torch.quantize_row", "--quiet"),
)
HOW = ("moments", "steps", "full", "readonly", "nolocks")
QUICK_ROWS = 500
# What Python tells of before it is done: whatever makes, renames and removes names, but for SQLite.
STEPS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "sqlite3.connect"}
Keys = frozenset[tuple[str, bytes]]


class Started:
    """A command line in a process group of its own."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        *,
        cold: bool = False,
        hurt: Sequence[Callable[[], object]] = (),
    ) -> None:
        self.words = words
        self._log, log = os.pipe()  # no file: the disk may be full
        os.set_blocking(self._log, False)
        self._printed = b""
        self.environment = os.environ | {
            "TMPDIR": str(folder / "tmp"), "LOKAKERN_DB": str(folder / "user.sqlite"),
            "LOKAKERN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        self._code: int | None = None
        if cold:
            command = [sys.executable, "-m", "lokakern.bench", *words]
            self._pid = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=log, stderr=log,
                start_new_session=True,
            ).pid  # fmt: skip
        else:
            self._pid = os.fork() or self._become(log, hurt)
        os.close(log)

    def __del__(self) -> None:
        os.close(self._log)

    def _become(self, log: int, hurt: Sequence[Callable[[], object]]) -> int:
        """Run the command in the forked process; never returns."""
        code = 70
        try:
            os.setsid()
            os.environ.update(self.environment)
            tempfile.tempdir = None
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.argv = ["lokakern.bench", *self.words]
            for harm in hurt:
                harm()
            cli.app(self.words, prog_name="python -m lokakern.bench")
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    @property
    def printed(self) -> str:
        """Output so far."""
        with suppress(BlockingIOError):
            while part := os.read(self._log, 1 << 16):
                self._printed += part
        return self._printed.decode(errors="replace")

    @property
    def said(self) -> str:
        """The last line."""
        return (self.printed.splitlines() or [""])[-1]

    def code(self) -> int | None:
        """Exit code, negative of a signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self) -> int:
        """Let it end."""
        ends = time.monotonic() + DEADLINE_S
        while (code := self.code()) is None:
            if time.monotonic() > ends:
                self.kill()
                raise AssertionError(f"{' '.join(self.words)}: hangs; {self.printed[-2000:]}")
            time.sleep(0.002)
        return code

    def kill(self) -> bool:
        """Kill all of the group, and wait for it; whether the command was still at it."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        code = self.wait()
        while True:  # its workers end a little later
            try:
                os.killpg(self._pid, 0)
            except ProcessLookupError:
                return code == -signal.SIGKILL
            with suppress(ChildProcessError):
                os.waitpid(-self._pid, os.WNOHANG)
            time.sleep(0.002)


# What is done to a forked process before it begins.


def measure_here() -> None:
    """A sweep without workers, of few operands."""
    engine.run_tasks = run_tasks_here
    operands.l2_bytes = lambda: 20_000


def before_step(step: int, folder: Path, do: Callable[[], object]) -> Callable[[], None]:
    """Something that happens before a step of those that change what lies in a folder."""
    left = step

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in STEPS and isinstance(arguments[0], (str, bytes, Path)):
            place = os.fsdecode(arguments[0]).removeprefix("file:")
            if place.startswith(f"{folder}/") or not place.startswith("/"):
                left -= 1
                if left == 0:
                    do()

    return lambda: sys.addaudithook(hear)


def die() -> None:
    """Kill the process, as the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def fill_the_disk() -> None:
    """Make all writes to files fail, as on a full disk, but with another error number."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def have_no_locks(number: int) -> Callable[[], None]:
    """Make locks fail, as on file systems without locks."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    def hurt() -> None:
        fcntl.flock = refuse  # type: ignore[assignment]

    return hurt


def be_nobody() -> None:
    """Drop root's capabilities, with which no file is read-only."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None).capset(header, none):
        raise OSError("capabilities cannot be given up")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_free(lock: Path) -> bool:
    """Whether nobody holds a lock; it is not made."""
    if not lock.exists():
        return True
    held = Lock(lock)
    free = held.acquire()
    held.release()
    return free


@dataclass
class Scene:
    """A command, what it reads and what it writes; `complaints` are violations."""

    folder: Path
    rows: int = ROWS
    quick: bool = False
    words: tuple[str, ...] = ()
    target: Path = Path()
    sources: tuple[Path, ...] = ()
    complaints: list[str] = field(default_factory=list)
    _known: dict[str, str] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        """The folder of databases."""
        return self.folder / "data"

    def prepare(self) -> None:
        """Make what is read, and what is there before."""

    def reset(self) -> None:
        """Before a process is started."""

    def observe(self) -> None:
        """Just before the kill."""

    def check(self) -> None:
        """After a kill: complain, and get ready for the next."""
        raise NotImplementedError

    def check_end(self, code: int, printed: str) -> None:
        """After the command ended by itself."""
        raise NotImplementedError

    def phase(self) -> str:
        """Progress of the killed process, judged by its files."""
        raise NotImplementedError

    def check_refused(self, what: str, code: int, printed: str) -> None:
        """After a fault that the command met: it says so, and nothing has changed."""
        lines = printed.splitlines() or [""]
        said = sum(line.startswith("DatabaseError: ") for line in lines)
        advice = re.search("make room|choose another|TMPDIR", lines[-1])
        if code != 1 or said != 1 or not lines[-1].startswith("DatabaseError: ") or not advice:
            self.complain(f"{what}: exit code {code}; {printed[-1000:]}")
        self.check()
        left = [path.name for path in (*self.temporaries(), *self.copies())]
        if left:
            self.complain(f"{what}: left {', '.join(left)}")

    def complain(self, words: str) -> None:
        self.complaints.append(words)
        print(f"VIOLATION: {words}", flush=True)

    def start(self, *hurt: Callable[[], object], cold: bool = False) -> Started:
        (self.folder / "tmp").mkdir(exist_ok=True)
        every = (measure_here, *hurt) if self.quick else hurt
        return Started(self.words, self.folder, cold=cold, hurt=every)

    def traces(self) -> set[str]:
        """All files in the folder."""
        return {
            os.path.join(folder, name)
            for part in (self.data, self.folder / "tmp")
            for folder, folders, files in os.walk(part)  # what vanishes meanwhile is no error
            for name in (*folders, *files)
        }

    def digest(self, path: Path) -> str:
        """Digest of the rows of a file, which has to be whole."""
        content = sha256(path)
        if content not in self._known:
            try:
                with open_readonly(path) as connection:
                    found = connection.execute("PRAGMA quick_check").fetchall()
                if found != [("ok",)]:
                    raise DatabaseError(str(found))
                self._known[content] = rows_digest(read_rows(path))
            except DatabaseError as error:
                self.complain(f"{path.name} is not whole: {error}")
                return "not whole"
        return self._known[content]

    def temporaries(self) -> list[Path]:
        return list(self.target.parent.glob(f"{self.target.name}*.tmp*"))

    def copies(self) -> list[Path]:
        """Files in the temporary folder, except those that Python leaves there."""
        return list((self.folder / "tmp").glob("lokakern-*"))

    def check_locks(self) -> None:
        for lock in self.folder.rglob("*.lock"):
            if not is_free(lock):
                self.complain(f"{lock.name} is held")


@dataclass
class AllOrNothing(Scene):
    """A command that writes one file of others."""

    before: bytes | None = None
    finished: str = ""

    def prepare(self) -> None:
        self.make()
        self._contents = {path: sha256(path) for path in self.sources}
        self.reset()
        self._before = self.digest(self.target) if self.target.exists() else ""
        ended = self.start()
        if ended.wait():
            raise SystemExit(ended.printed)
        self.finished = self.digest(self.target)
        assert self.finished != self._before
        self.reset()

    def make(self) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        """The target as it was, whatever else lies there."""
        self.target.unlink(missing_ok=True)
        if self.before is not None:
            self.target.write_bytes(self.before)

    def check_refused(self, what: str, code: int, printed: str) -> None:
        super().check_refused(what, code, printed)
        found = self.digest(self.target) if self.target.exists() else ""
        if found != self._before:
            self.complain(f"{what}: {self.target.name} is not as it was")

    def check(self) -> None:
        for path, content in self._contents.items():
            if sha256(path) != content:
                self.complain(f"{path.name} changed")
        found = self.digest(self.target) if self.target.exists() else ""
        if found not in (self._before, self.finished):
            self.complain(f"{self.target.name} is neither as before nor finished")
        self.check_locks()

    def check_end(self, code: int, printed: str) -> None:
        if code or self.digest(self.target) != self.finished:
            self.complain(f"it did not end well: exit code {code}; {printed[-1000:]}")
        left = [path.name for path in (*self.temporaries(), *self.copies())]
        if left:
            self.complain(f"left: {', '.join(left)}")

    def phase(self) -> str:
        if self.target.exists() and self.digest(self.target) == self.finished:
            return "after the rename"
        if self.temporaries():
            return "while the new file was written"
        if self.copies():
            return "while files were copied and checked"
        return "before the first write"


class Merge(AllOrNothing):
    """`merge` of two large files into a new one."""

    def make(self) -> None:
        one, other = self.data / "one.sqlite", self.data / "other.sqlite"
        many_rows.write_many(one, self.rows, "a" * 32)
        many_rows.write_many(other, self.rows // 2, "b" * 32)
        self.sources, self.target = (one, other), self.data / "both.sqlite"
        self.words = ("merge", str(one), str(other), "--out", str(self.target))


class Import(AllOrNothing):
    """`import` of a large file into a database that has rows."""

    def make(self) -> None:
        source, self.target = self.data / "source.sqlite", self.data / "mine.sqlite"
        many_rows.write_many(source, self.rows, "a" * 32)
        many_rows.write_many(self.target, self.rows // 4, "b" * 32)
        self.before, self.sources = self.target.read_bytes(), (source,)
        self.words = ("import", str(source), "--into", str(self.target), "--trust")


class Export(AllOrNothing):
    """`export` of current rows over an older file, with a manifest."""

    def reset(self) -> None:
        super().reset()
        place_of(self.target).unlink(missing_ok=True)

    def check_refused(self, what: str, code: int, printed: str) -> None:
        super().check_refused(what, code, printed)
        if place_of(self.target).exists():
            self.complain(f"{what}: a manifest of what is not there")

    def make(self) -> None:
        rows = [KernelRow.of(kernel) for kernel in KERNELS.values() if kernel.op == "gemm"]
        kernels = rows[: many_rows.KERNELS]
        assert len(kernels) == many_rows.KERNELS
        source, self.target = self.data / "source.sqlite", self.data / "shipped.sqlite"
        many_rows.write_many(source, self.rows // 2, "a" * 32, kernels)
        many_rows.write_many(self.target, self.rows // 8, "b" * 32, kernels)
        self.before, self.sources = self.target.read_bytes(), (source,)
        self.words = ("export", str(self.target), "--device", "NVIDIA H200", "--db", str(source))


@dataclass
class Sweep(Scene):
    """`sweep` into a database that has other rows, killed again and again until it is done."""

    facts: dict[str, int] = field(default_factory=lambda: {"timing": 4, "accuracy": 4 * 39})
    committed: Keys = frozenset()
    collects: int = 0

    def prepare(self) -> None:
        self.target = self.data / "mine.sqlite"
        self._fresh = self.folder / "fresh.sqlite"
        if self.quick:
            self.facts = {"timing": 4}
        many_rows.write_many(self._fresh, self.rows // 2, "b" * 32)
        errors = ("--errors", "none") if self.quick else ()
        self.words = ("sweep", *SWEEP, *errors, "--db", str(self.target))
        self.begin_anew()
        ended = self.start()  # tries libraries, once
        self.check_end(ended.wait(), ended.printed)

    def begin_anew(self) -> None:
        collect_runs(self.target)
        shutil.copyfile(self._fresh, self.target)
        self.committed = self._others = keys_of([self.target])

    def run_files(self) -> list[Path]:
        return sorted(runs_folder(self.target).glob("*.sqlite"))

    def observe(self) -> None:
        """Record the committed rows, as any reader sees them."""
        self.committed |= keys_of(self.run_files())

    def phase(self) -> str:
        new = keys_of([self.target]) - self._at_start
        if self.temporaries():
            return "while the new file was written"
        if new and not self.run_files():
            return "after the rename, the run file is gone"
        if new:
            return "after a rename, a run file is there"
        if self.run_files():
            return "while rows were written to a run file"
        return "before the first write"

    def reset(self) -> None:
        self._at_start = keys_of([self.target])

    def check(self) -> None:
        self.digest(self.target)
        there = keys_of([self.target, *copied(self.run_files(), self.folder / "recovered")])
        self._complain_of_lost(there)
        self.committed |= there
        self.check_locks()
        self.collects += 1
        if self.collects % 2:  # else the next sweep does
            found = collect_runs(self.target)
            if found.skipped:
                self.complain(f"not collected: {found.skipped}")
            self._complain_of_lost(keys_of([self.target]))
            self._complain_of_left_runs()
        self._complain_of_doubled()

    def check_end(self, code: int, printed: str) -> None:
        if code:
            self.complain(f"it did not end well: exit code {code}; {printed[-1000:]}")
        self._complain_of_lost(keys_of([self.target]))
        self._complain_of_left_runs()
        self._complain_of_doubled()
        found = Counter(name for name, _ in keys_of([self.target]) - self._others)
        if found != self.facts:
            self.complain(f"rows of the finished sweep: {found}; expected {self.facts}")
        again = self.start()
        if again.wait() or "0 times of 0 problems and 0 errors" not in again.printed:
            self.complain(f"the sweep after the last measured: {again.printed[-1000:]}")
        left = [path.name for path in (*self.temporaries(), *self.copies())]
        if left:
            self.complain(f"left: {', '.join(left)}")
        self.begin_anew()

    def _complain_of_lost(self, there: Keys) -> None:
        if lost := self.committed - there:
            self.complain(f"{len(lost)} committed rows are lost")

    def _complain_of_left_runs(self) -> None:
        left = [path.name for path in runs_folder(self.target).glob("*")]
        if left:
            self.complain(f"left: {', '.join(left)}")

    def _complain_of_doubled(self) -> None:
        """One kernel takes each problem: nothing has to be measured twice."""
        columns = {"timing": "kernel, problem, distribution, device, environment, regime",
                   "accuracy": "kernel, problem, distribution, architecture, seed"}  # fmt: skip
        with closing(sqlite3.connect(f"file:{self.target}?mode=ro", uri=True)) as connection:
            for name, cell in columns.items():
                (count,) = connection.execute(
                    f"SELECT count(*) FROM (SELECT 1 FROM {name} GROUP BY {cell} "
                    "HAVING count(*) > 1)"
                ).fetchone()
                if count:
                    self.complain(f"{count} {name} cells are there twice")


def keys_of(files: Sequence[Path]) -> Keys:
    """Facts that are committed in files, which others may be writing."""
    found: set[tuple[str, bytes]] = set()
    for path in files:
        # None where it was merged, and deleted, meanwhile.
        with (
            suppress(sqlite3.OperationalError),
            closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection,
        ):
            for name in ("timing", "accuracy"):
                found |= {(name, key) for (key,) in connection.execute(f"SELECT key FROM {name}")}
    return frozenset(found)


def copied(files: Sequence[Path], folder: Path) -> list[Path]:
    """Copies of files with what lies beside them, for SQLite to recover."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in files:
        for beside in path.parent.glob(f"{path.name}*"):
            shutil.copyfile(beside, folder / beside.name)
    found = [folder / path.name for path in files]
    for path in found:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("SELECT count(*) FROM run").fetchone()
    return found


def load() -> None:
    """Import and compute everything that forked commands need at their start."""
    for name in ("bench.report.summary", "bench.report.library_smoke", "bench.exchange.export",
                 "selection.dispatcher", "registry.sharing.import_file",
                 "registry.snapshot.snapshot", "render.terminal"):  # fmt: skip
        importlib.import_module(f"lokakern.{name}")
    load_kernels()
    plan.kernels_digest()
    with suppress(SystemExit), redirect_stdout(io.StringIO()):
        cli.app(("list", "suites"))


SCENES: dict[str, type[Scene]] = {
    "sweep": Sweep, "merge": Merge, "import": Import, "export": Export
}  # fmt: skip


@dataclass
class Summary:
    """Results of the runs of a command with injected faults."""

    counts: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    violations: int = 0

    def __str__(self) -> str:
        phases = "; ".join(f"{count} {phase}" for phase, count in sorted(self.counts.items()))
        return (
            f"{self.counts.total()} times ({phases}), {self.ended} ended before, "
            f"{self.violations} violations"
        )


def at_moments(scene: Scene, kills: int, random_: random.Random) -> Summary:
    """Kill a command so many times, at moments spread over all of its life."""
    found, known = Summary(), len(scene.complaints)
    lasts = {
        cold: _lasts(scene, cold=cold) for cold in ((False,) if scene.quick else (False, True))
    }
    moments: list[float] = []
    for number in range(3 * kills + 10):
        if found.counts.total() == kills:
            break
        if not moments:  # in any order
            moments = [(place + random_.random()) / 20 for place in range(20)]
            random_.shuffle(moments)
        cold = not scene.quick and number % 4 == 3
        process = _begin(scene, cold=cold)
        time.sleep(moments.pop() * 1.05 * lasts[cold])
        scene.observe()
        if process.kill():
            found.counts[f"{scene.phase()}{' (python -m)' if cold else ''}"] += 1
            scene.check()
            if found.counts.total() % TO_THE_END and found.counts.total() < kills:
                continue
            scene.reset()
            process = scene.start()
        else:
            found.ended += 1
        scene.check_end(process.wait(), process.printed)
    found.violations = len(scene.complaints) - known
    return found


def _begin(scene: Scene, *, cold: bool) -> Started:
    """Start a command; one that is forked is waited for until there is a trace of it."""
    scene.reset()
    known = scene.traces()
    process = scene.start(cold=cold)
    while not cold and process.code() is None and scene.traces() <= known:
        time.sleep(0.001)
    return process


def _lasts(scene: Scene, *, cold: bool) -> float:
    """Seconds that the command takes; of one that was forked, after the first trace of it."""
    begun = time.monotonic()
    process = _begin(scene, cold=cold)
    begun = begun if cold else time.monotonic()
    scene.check_end(process.wait(), process.printed)
    return time.monotonic() - begun


def at_steps(scene: Scene, every: int, do: Callable[[], object]) -> Summary:
    """Let something happen before a step of a command, at one after the other.

    Args:
        scene: The command.
        every: 1 for all steps, 2 for every other one.
        do: Ends the command, or makes it fail.
    """
    found, known = Summary(), len(scene.complaints)
    code, step = 1, 1
    while code:
        scene.reset()
        process = scene.start(before_step(step, scene.folder, do))
        code = process.wait()
        if code == -signal.SIGKILL:
            process.kill()
            found.counts[scene.phase()] += 1
            scene.check()
        elif code:
            found.counts[scene.phase()] += 1
            scene.check_refused(f"step {step}", code, process.printed)
            print(f"step {step}: {process.said}", flush=True)
        else:
            found.ended += 1
            scene.check_end(code, process.printed)
        if isinstance(scene, Sweep):
            scene.begin_anew()
        step += every
    found.violations = len(scene.complaints) - known
    return found


def refused(scene: Scene, hurts: Mapping[str, Callable[[], object]]) -> Summary:
    """Let a command meet faults, and then end without any."""
    found, known = Summary(), len(scene.complaints)
    for what, hurt in hurts.items():
        scene.reset()
        if what == "read-only":
            for path in (*scene.data.glob("*.lock"), *scene.data.glob("*.runs")):
                path.unlink() if path.is_file() else path.rmdir()
        scene.data.chmod(0o555 if hurt is be_nobody else 0o755)
        try:
            process = scene.start(hurt)
            code = process.wait()
        finally:
            scene.data.chmod(0o755)
        scene.check_refused(what, code, process.printed)
        print(f"{what}: {process.said}", flush=True)
        found.counts[what] += 1
        if isinstance(scene, Sweep):
            scene.begin_anew()
    scene.reset()
    process = scene.start()
    scene.check_end(process.wait(), process.printed)
    found.violations = len(scene.complaints) - known
    return found


def scene_of(name: str, folder: Path, *, quick: bool) -> Scene:
    """A command in an empty folder; `quick`: forked only, and measuring without workers."""
    scene = SCENES[name](folder, rows=QUICK_ROWS if quick else ROWS, quick=quick)
    scene.data.mkdir()
    scene.prepare()
    return scene


def torment(scene: Scene, how: str, *, kills: int, every: int, random_: random.Random) -> Summary:
    """Hurt a command in one of the ways `HOW`: at so many moments, or at every so many steps."""
    match how:
        case "moments":
            return at_moments(scene, kills, random_)
        case "steps":
            return at_steps(scene, every, die)
        case "full":
            return at_steps(scene, every, fill_the_disk)
        case "nolocks":
            numbers = (errno.ENOLCK, errno.ENOSYS)
            return refused(scene, {errno.errorcode[n]: have_no_locks(n) for n in numbers})
        case _:
            return refused(scene, {"read-only beside a lock": be_nobody, "read-only": be_nobody})


def main() -> None:
    """Hurt commands, and print what became of them; exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("commands", nargs="+", choices=SCENES)
    parser.add_argument("--how", nargs="+", default=["moments"], choices=HOW)
    parser.add_argument("--kills", type=int, default=80)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    load()
    complaints = 0
    for name in given.commands:
        with tempfile.TemporaryDirectory() as folder:
            scene = scene_of(name, Path(folder).resolve(), quick=given.quick)
            for how in given.how:
                begun = time.monotonic()
                found = torment(
                    scene, how, kills=given.kills, every=given.every,
                    random_=random.Random(given.seed),
                )  # fmt: skip
                seconds = time.monotonic() - begun
                print(f"{name}, {how}, seed {given.seed}, {seconds:.0f} s: {found}", flush=True)
            complaints += len(scene.complaints)
            if python := len(list(Path(folder, "tmp").glob("pymp-*"))):
                print(f"{python} folders of Python's multiprocessing, of a socket each, are left")
    sys.exit(complaints > 0)


if __name__ == "__main__":
    main()
