"""What all tests share: the marker ``gpu``, strict skips, and a database of their own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

NEEDS_A_GPU = "needs a GPU"
# Before torch is imported: as many threads in all as there are cores.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _PROCESSES > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _PROCESSES)))
_FOLDER = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"gpu: {NEEDS_A_GPU}; skipped where there is none")
    folder = Path(tempfile.mkdtemp(prefix="lokakern-tests-"))
    config.stash[_FOLDER] = folder
    os.environ["LOKAKERN_DB"] = str(folder / "user.sqlite")  # never the user's


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if not for_gpus:
        return
    import torch

    if not torch.cuda.is_available():
        for item in for_gpus:
            item.add_marker(pytest.mark.skip(reason=NEEDS_A_GPU), append=False)


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
    """Under LOKAKERN_STRICT=1 a skip that hides anything but a missing GPU is a failure."""
    if os.environ.get("LOKAKERN_STRICT") != "1" or report.outcome != "skipped":
        return
    where = report.longrepr
    reason = where[2] if isinstance(where, tuple) else str(where)
    reason = reason.removeprefix("Skipped: ")
    if reason != NEEDS_A_GPU:
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid} was skipped because {reason!r}; LOKAKERN_STRICT=1 accepts "
            f"{NEEDS_A_GPU!r} only"
        )
