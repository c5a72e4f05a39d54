"""Locks of files, and folders for copies: whoever is killed leaves nothing locked or behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from lokakern.errors import DatabaseError
from lokakern.registry import locks
from lokakern.registry.locks import Lock, private_folder


def test_one_at_a_time_holds_a_lock(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    second.release()  # which it does not hold
    assert first.acquire() and not second.acquire()
    first.release()
    assert second.acquire() and not first.acquire()


def test_a_lock_is_waited_for_as_long_as_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, waiter = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    assert holder.acquire()
    now_s, looks = 0.0, 0

    def sleep(seconds: float) -> None:
        nonlocal now_s, looks
        now_s, looks = now_s + seconds, looks + 1
        if looks == 100:
            holder.release()

    monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    assert not waiter.acquire(timeout_s=1.0)
    assert looks in (20, 21) and now_s == pytest.approx(1.0, abs=0.06)
    assert waiter.acquire(timeout_s=60.0) and looks == 100


def test_a_lock_of_a_file_that_was_removed_is_none(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    old, new = Lock(path), Lock(path)
    assert old.acquire()
    path.unlink()
    assert new.acquire(), "another file, and another lock"
    old.release()
    assert not Lock(path).acquire()


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


def test_a_private_folder_is_there_only_inside(temporary: Path) -> None:
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
