"""Shared parts of all tests: markers, strict skips, a separate database, options.

A test is in the core, which ``make test`` runs in minutes, unless it is marked ``rest``: ``make
test-all`` runs those. ``sample(every=n, of=("name",))`` marks most cases of a parametrized test
``rest``: of the cases that share the values of the parameters ``of``, the first of each n stays.

``--part 2/4`` keeps the second of four parts of the tests, drawn by their names; ``--core-and 2/4``
keeps the core and that part of the rest, in one run. ``--slow 1/2`` keeps of the core's tests that
slow_tests.txt lists the first of two parts only. Tests of a file whose cases have the same name are
in one part: what they share, such as a compilation for a GPU, is made for one part.

``--keep-screenshots`` keeps how pages look now, where they are compared with kept pictures.

With ``--evidence FILE`` a run on a GPU leaves a row in FILE for each kernel and test module: how
many of the module's tests that take the kernel as ``name`` passed, failed and were skipped there.
Tests on the CPU leave none. A module says with ``SEEDS`` what its tests draw from.
"""

from __future__ import annotations

import gc
import hashlib
import os
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import hypothesis
import pytest

if TYPE_CHECKING:
    from lokakern.registry.schema.records import TestResultRecord
    from tests.support.measurements import Book

NEEDS_A_GPU = "needs a GPU"
# Programs that pip does not have: .ci/run says aloud that they are not there.
SAID_TO_BE_MISSING = {
    "needs clang 22": "LOKAKERN_NO_CLANG",
    "needs PostgreSQL": "LOKAKERN_NO_POSTGRES",
    "needs Chromium": "LOKAKERN_NO_CHROMIUM",
}
# Before torch is imported: as many threads in all as there are cores.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _PROCESSES > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _PROCESSES)))
# A busy machine makes any example slow.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")
SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")  # by scripts/list_slow_tests.py
_FOLDER = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="N/OF", help="only the Nth of so many parts of the tests")
    parser.addoption(
        "--core-and", metavar="N/OF", help="only the core, and the Nth of so many parts of the rest"
    )
    parser.addoption(
        "--slow", metavar="N/OF", help="of the core's slow tests only the Nth of so many parts"
    )
    parser.addoption(
        "--evidence", metavar="FILE", help="database that gets this GPU run's result of each kernel"
    )
    parser.addoption(
        "--keep-screenshots", action="store_true", help="replace the pictures that pages must match"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"gpu: {NEEDS_A_GPU}; skipped where there is none")
    config.addinivalue_line("markers", "rest: too slow for the core; make test-all runs it")
    config.addinivalue_line(
        "markers",
        "sample(every, of=()): every so many cases one is core, for each value of the parameters "
        "`of`; the others are rest",
    )
    folder = Path(tempfile.mkdtemp(prefix="lokakern-tests-"))
    config.stash[_FOLDER] = folder
    os.environ["LOKAKERN_DB"] = str(folder / "user.sqlite")  # never the user's
    # Most tests are about what was measured; those of predictions turn them on.
    os.environ["LOKAKERN_PREDICT"] = "0"
    os.environ.pop("LOKAKERN_CHOICES", None)
    os.environ.setdefault("LOKAKERN_NATIVE", "off")  # but for tests of it
    os.environ.setdefault("LOKAKERN_TESTS", str(folder))  # sharing.py: that of the first process
    if config.getoption("evidence") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Evidence(config))


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections: it lives until the end.

    Some tests collect garbage several times, and each time took half a second to visit all of it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # a compilation makes millions of objects


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # else libraries tell at the end of the process that they leak
    shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before -k and -m take tests away: `of` counts them all
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("evidence"):
        _name_subjects(items)
    _sample(items)
    _keep_part(config, items)
    for_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if not for_gpus:
        return
    import torch

    if not torch.cuda.is_available():
        for item in for_gpus:
            item.add_marker(pytest.mark.skip(reason=NEEDS_A_GPU), append=False)


def _keep_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other parts."""
    part, of_rest, of_slow = (_part(config, name) for name in ("--part", "--core-and", "--slow"))
    slow = set(SLOW_TESTS.read_text(encoding="utf-8").split()) if of_slow else set()
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        function, _, case = item.nodeid.partition("[")
        group = f"{function.partition('::')[0]}[{case}" if case else function
        parts = [part]
        if item.get_closest_marker("rest"):
            parts.append(of_rest)
        elif function in slow:
            parts.append(of_slow)
        digest = int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big")
        is_kept = all(found is None or digest % found[1] + 1 == found[0] for found in parts)
        (kept if is_kept else others).append(item)
    if others:
        items[:] = kept
        config.hook.pytest_deselected(items=others)


def _part(config: pytest.Config, option: str) -> tuple[int, int] | None:
    """Which of how many parts an option names."""
    part = config.getoption(option)
    if not part:
        return None
    place, _, count = part.partition("/")
    if not (place.isdecimal() and count.isdecimal() and 1 <= int(place) <= int(count)):
        raise pytest.UsageError(f"{option} is {part!r}; expected such as 2/4")
    return int(place), int(count)


def _sample(items: Iterable[pytest.Item]) -> None:
    """Mark ``rest`` what is left of tests marked ``sample``; GPU cases are sampled apart."""
    seen: Counter[tuple[Any, ...]] = Counter()
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample is None:
            continue
        every, of = sample.kwargs["every"], sample.kwargs.get("of", ())
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        kept = tuple(repr(parameters[name]) for name in of)
        case = (item.nodeid.split("[")[0], item.get_closest_marker("gpu") is None, *kept)
        if seen[case] % every:
            item.add_marker(pytest.mark.rest)
        seen[case] += 1


def _native_functions() -> dict[str, Any]:
    """The C++ library of this process and its functions that calls go through; None where unused.

    Tests that never import them are not made to.
    """
    replay = sys.modules.get("lokakern.native.replay")
    state = {} if replay is None else vars(replay.NATIVE)
    return {
        name: value for name, value in state.items()
        if name in ("module", "replay") or name.startswith("call_")
    }  # fmt: skip


@contextmanager
def native_left_as_found() -> Iterator[None]:
    """Fail where the block ends with the C++ library in use otherwise than it began."""
    before = _native_functions()
    yield
    after = _native_functions()
    changed = [name for name, value in after.items() if value is not before.get(name)]
    if changed:
        found = {name: before.get(name) for name in changed}
        vars(sys.modules["lokakern.native.replay"].NATIVE).update(found)  # for the tests behind it
        told = ", ".join(f"{name} is {after[name]!r}, was {found[name]!r}" for name in changed)
        pytest.fail(
            f"this test leaves the C++ library in use otherwise than it found it: {told}. "
            "Undo patches of NATIVE inside `with native.in_use()`, not behind it",
            pytrace=False,
        )


@pytest.fixture(autouse=True)
def _native_left_as_found() -> Iterator[None]:
    """Later tests of the process would fail, and which ones depends on the order.

    Set up before and torn down behind the fixtures of a test; those of its module count as found.
    """
    if os.environ["LOKAKERN_NATIVE"] == "off":
        with native_left_as_found():
            yield
    else:  # the first call on a GPU loads the library, for good
        yield


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    """A database of measurements made by hand, on which dispatch answers."""
    from lokakern.selection import dispatcher
    from tests.support.measurements import Book

    yield Book(tmp_path / "rows.sqlite")
    dispatcher.use_snapshot(None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    seeds = _seeds_of(item)
    if seeds:
        import torch

        torch.manual_seed(seeds[0])  # the same values whatever ran before, in whichever process


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not hasattr(report, "wasxfail"):
        _fail_a_silent_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_a_silent_skip(report)
    return report


def _fail_a_silent_skip(report: Any) -> None:
    """Under LOKAKERN_STRICT=1 a skip that hides anything but a missing GPU is a failure.

    A test marked ``gpu`` may also say which one it needs, where there is another.
    """
    if os.environ.get("LOKAKERN_STRICT") != "1" or report.outcome != "skipped":
        return
    where = report.longrepr
    reason = where[2] if isinstance(where, tuple) else str(where)
    reason = reason.removeprefix("Skipped: ")
    another = "gpu" in getattr(report, "keywords", ()) and reason.startswith(f"{NEEDS_A_GPU} of ")
    missing = os.environ.get(SAID_TO_BE_MISSING.get(reason, "")) == "1"
    if reason != NEEDS_A_GPU and not another and not missing:
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid} was skipped because {reason!r}; LOKAKERN_STRICT=1 accepts "
            f'{NEEDS_A_GPU!r} only, and of tests marked gpu "{NEEDS_A_GPU} of ..."'
        )


# --- evidence: what a run on a GPU leaves in a database

_SUBJECT = "lokakern_subject"  # the property by which a report says what it is evidence of


class Subject(NamedTuple):
    """Subject of a test: a current kernel, in one of `of` tests of a module."""

    kernel: str
    digest: str
    suite: str
    seeds: str
    of: int


def _seeds_of(item: pytest.Item) -> Sequence[int] | None:
    seeds: Sequence[int] | None = getattr(getattr(item, "module", None), "SEEDS", None)
    return seeds


def _name_subjects(items: Iterable[pytest.Item]) -> None:
    from lokakern.registry.register import KERNELS, load_kernels
    from lokakern.registry.schema.records import canonical_seeds

    load_kernels()
    found = []
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        name, where = parameters.get("name"), parameters.get("where")
        on_gpu = where == "cuda" or (where is None and item.get_closest_marker("gpu"))
        if on_gpu and isinstance(name, str) and name in KERNELS:
            found.append((item, name, item.nodeid.split("::")[0]))
    counts = Counter((name, suite) for _, name, suite in found)
    for item, name, suite in found:
        known = _seeds_of(item)
        seeds = "unknown" if known is None else canonical_seeds(known)
        subject = Subject(name, KERNELS[name].digest, suite, seeds, counts[name, suite])
        item.user_properties.append((_SUBJECT, list(subject)))  # a list goes between processes


def results_of(
    reports: Iterable[pytest.TestReport], root: Path
) -> dict[Subject, TestResultRecord | None]:
    """Results of the tests of each subject; None where not all of them finished."""
    from lokakern.registry.schema.records import TestResultRecord

    tests: dict[Subject, dict[str, list[pytest.TestReport]]] = {}
    for report in reports:
        for name, value in report.user_properties:
            if name == _SUBJECT:
                by_test = tests.setdefault(Subject(*value), {})
                by_test.setdefault(report.nodeid, []).append(report)
    results: dict[Subject, TestResultRecord | None] = {}
    for subject, by_test in tests.items():
        ended = [phases for phases in by_test.values() if phases[-1].when == "teardown"]
        if len(ended) < subject.of:  # chosen by -k, or its process died
            results[subject] = None
            continue
        failed = [next((r for r in phases if r.failed), None) for phases in ended]
        skipped = [next((r for r in phases if r.skipped), None) for phases in ended]
        failures = [report for report in failed if report]
        skips = [s for s, f in zip(skipped, failed, strict=True) if s and not f]
        passed_count = len(ended) - len(failures) - len(skips)
        reasons = failures or ([] if passed_count else skips)
        results[subject] = TestResultRecord(
            seeds=subject.seeds,
            passed_count=passed_count,
            failed_count=len(failures),
            skipped_count=len(skips),
            reason=_line_of(reasons[0], root) if reasons else "",
        )
    return results


def _line_of(report: pytest.TestReport, root: Path) -> str:
    """Name of a test and the line that failed, without paths of the machine."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        why = f"{Path(crash.path).name}:{crash.lineno}: {crash.message}"
    else:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    first = (why.splitlines() or [""])[0]
    return f"{report.nodeid}: {first}".replace(str(root), ".")


def portable_command(arguments: Iterable[str], root: Path) -> str:
    """The command again, without ``--evidence`` and paths of this machine."""
    words = ["pytest"]
    skip = False
    for word in arguments:
        option, equals, value = word.rpartition("=")
        if not skip and word != "--evidence" and option != "--evidence":
            path = Path(value)
            if path.is_absolute():
                value = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
            words.append(f"{option}{equals}{value}")
        skip = word == "--evidence"
    return shlex.join(words)


class Evidence:
    """Collects reports, where they come together, and writes them as rows in the end."""

    def __init__(self, config: pytest.Config) -> None:
        import torch

        from lokakern.errors import DatabaseError
        from lokakern.registry.storage.reader import database_digest

        self._root = config.rootpath
        self._file = config.invocation_params.dir / Path(config.getoption("evidence"))
        self._command = portable_command(config.invocation_params.args, self._root)
        self._reports: list[pytest.TestReport] = []
        self._summary = "nothing written: the session did not end by itself"
        if not torch.cuda.is_available():
            raise pytest.UsageError(f"--evidence {NEEDS_A_GPU}; tests on a CPU leave no rows")
        if config.getoption("lf", False) or any("::" in word for word in config.args):
            raise pytest.UsageError(
                "--evidence counts all tests of a module; leave out --lf, and names of tests"
            )
        if self._file.exists():
            try:
                database_digest(self._file)
            except DatabaseError as error:  # now, rather than after all tests
                raise pytest.UsageError(f"--evidence: {error}") from error

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if ended and not session.shouldstop and not session.shouldfail:
            self._write()

    def _write(self) -> None:
        from lokakern import device
        from lokakern.errors import DatabaseError
        from lokakern.registry.register import KERNELS, load_kernels
        from lokakern.registry.schema.records import now_utc_ms
        from lokakern.registry.storage.run_files import RunFile

        load_kernels()
        known = results_of(self._reports, self._root)
        results = {subject: record for subject, record in known.items() if record is not None}
        changed = {s.kernel for s in results if KERNELS[s.kernel].digest != s.digest}
        if changed:
            pytest.exit(f"--evidence: {', '.join(changed)} changed while tested", returncode=3)
        architecture = device.current_device("cuda").architecture
        environment = device.current_environment("cuda")
        digest = hashlib.sha256()
        for path in sorted(Path(__file__).parent.rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
        try:
            if results:
                with RunFile.create(
                    self._file, suite="tests", command=self._command,
                    harness_digest=digest.hexdigest(),
                ) as run:  # fmt: skip
                    for subject, record in results.items():
                        run.add_test_result(
                            KERNELS[subject.kernel], architecture, subject.suite, environment,
                            replace(record, measured_utc_ms=now_utc_ms()),
                        )  # fmt: skip
        except DatabaseError as error:
            pytest.exit(f"--evidence: {error}", returncode=3)
        good = sum(record.status == "ok" for record in results.values())
        self._summary = f"{len(results)} results of kernels on {architecture}, {good} ok"
        if len(known) > len(results):
            self._summary += f"; {len(known) - len(results)} left out: not all their tests ran"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"evidence: {self._summary} ({self._file})")
