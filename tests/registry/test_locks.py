"""File locks and folders for copies: killed processes leave no locks and no files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lokakern.errors import DatabaseError
from lokakern.registry import locks
from lokakern.registry.locks import Lock, private_folder
from lokakern.registry.storage.writer import locked


def test_one_at_a_time_holds_a_lock(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    second.release()  # which it does not hold
    assert first.acquire() and not second.acquire()
    first.release()
    assert second.acquire() and not first.acquire()


def test_acquire_waits_until_the_holder_releases(tmp_path: Path) -> None:
    holder, waiter = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    assert holder.acquire()
    began = time.monotonic()
    assert not waiter.acquire(timeout_s=0.2)
    assert time.monotonic() - began >= 0.2
    timer = threading.Timer(0.2, holder.release)
    timer.start()
    assert waiter.acquire(timeout_s=600.0)
    timer.join()


def test_a_lock_ends_with_its_process_and_not_with_a_fork_of_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from lokakern.registry.locks import Lock\n"
        f"lock = Lock(Path({str(path)!r}))\n"
        "assert lock.acquire()\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert not Lock(path).acquire()
        process.kill()
        process.wait()
    holder = Lock(path)
    assert holder.acquire()
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert not Lock(path).acquire()


def test_a_lock_on_a_removed_file_does_not_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    old, new = Lock(path), Lock(path)
    assert old.acquire()
    path.unlink()
    assert new.acquire(), "another file, and another lock"
    old.release()
    assert not Lock(path).acquire()


def test_a_lock_whose_file_goes_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    count = tmp_path / "count"

    def add(times: int) -> None:
        for _ in range(times):
            with locked(count, once=True):
                before = int(count.read_text()) if count.exists() else 0
                time.sleep(0.001)  # others wait on the file that goes
                count.write_text(str(before + 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, [5] * 4))
    assert count.read_text() == "20" and list(tmp_path.iterdir()) == [count]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        Lock(tmp_path / "lock").acquire()
    assert not (tmp_path / "elsewhere").exists()


def test_a_refused_lock_leaves_no_descriptor_open(tmp_path: Path) -> None:
    holder = Lock(tmp_path / "lock")
    assert holder.acquire()
    before = len(os.listdir("/proc/self/fd"))
    assert not any(Lock(tmp_path / "lock").acquire() for _ in range(5))
    assert len(os.listdir("/proc/self/fd")) == before
    holder.release()
    assert len(os.listdir("/proc/self/fd")) == before - 1


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_private_folder_exists_only_inside_the_context(temporary: Path) -> None:
    with pytest.raises(RuntimeError), private_folder() as folder:
        assert folder.parent == temporary and folder.stat().st_mode & 0o777 == 0o700
        assert not Lock(folder / "lock").acquire(), "it is held, or it were taken for left over"
        (folder / "copy").write_text("x")
        with private_folder() as other:
            assert other != folder and (folder / "copy").exists()
        raise RuntimeError
    assert list(temporary.iterdir()) == []


def test_folders_of_processes_that_were_killed_are_removed(temporary: Path) -> None:
    left = Path(tempfile.mkdtemp(prefix=locks._PREFIX))
    (left / "lock").touch()
    (left / "copy").write_text("x")
    of_others = Path(tempfile.mkdtemp(prefix="other-"))
    with private_folder() as folder:
        assert {path for path in temporary.iterdir()} == {folder, of_others}


def test_without_room_for_a_folder_one_line_says_so(temporary: Path) -> None:
    shutil.rmtree(temporary)
    words = "no folder for copies can be made: No such file"
    with pytest.raises(DatabaseError, match=words), private_folder():
        raise AssertionError
    assert not temporary.exists()
