"""Building the library: once, by many processes, and what is said where it cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lokakern.errors import CompilationError
from lokakern.native import build, replay
from tests.support import native

ROOT = Path(__file__).parents[2]


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several that ask at once one compiles."""
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    compiles = tmp_path / "compiles"
    fake = tmp_path / "cxx"
    fake.write_text(
        f'#!/bin/sh\necho x >> {compiles}\nsleep 0.2\nwhile [ "$1" != -o ]; do shift; done\n'
        'printf "\\177ELF\\2" > "$2"; head -c 35 /dev/zero >> "$2"\n'  # a header: one section
        'printf "\\144\\0\\0\\0\\0\\0\\0\\0" >> "$2"; head -c 10 /dev/zero >> "$2"\n'
        'printf "\\144\\0\\1\\0" >> "$2"; head -c 150 /dev/zero >> "$2"\n',
        encoding="utf-8",
    )
    fake.chmod(0o755)
    threads = [threading.Thread(target=build.build, args=(str(fake),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiles.read_text(encoding="utf-8") == "x\n"
    path = build.library_path(str(fake))
    for size in (70, 5, 0):  # cut off, such as by a full disk
        assert build.is_whole(path)
        path.write_bytes(path.read_bytes()[:size])
        build.build(str(fake))
    assert build.is_whole(path) and compiles.read_text(encoding="utf-8") == "x\n" * 4


def test_a_library_that_was_cut_off_is_not_whole(tmp_path: Path) -> None:
    path, cut = Path(native.library().__file__), tmp_path / "cut.so"
    assert build.is_whole(path)
    for size in (-1000, 5000, 64, 0):
        cut.write_bytes(path.read_bytes()[:size])
        assert not build.is_whole(cut)


STARTS = """
import os, sys
from pathlib import Path
from lokakern.native import build, replay
build.cache_folder = lambda: Path(sys.argv[1])
own = replay._Native()
own.ask()
print(own.reason)
sys.stdout.flush()
with open(sys.argv[2]) as begun:  # by the compiler
    begun.read()
"""


@pytest.mark.rest
def test_a_build_outlives_its_process(tmp_path: Path) -> None:
    """Else processes shorter than a build would all begin one."""
    begun, go, cache = tmp_path / "begun", tmp_path / "go", tmp_path / "a cache"
    os.mkfifo(begun)
    os.mkfifo(go)
    fake = tmp_path / "cxx"
    fake.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > {begun}\nread word < {go}\n'
        'echo "$word" > "$2"\n',
        encoding="utf-8",
    )
    fake.chmod(0o755)
    environment = {**os.environ, "CXX": str(fake), "PYTHONPATH": str(ROOT), "LOKAKERN_NATIVE": ""}
    command = [sys.executable, "-c", STARTS, str(cache), str(begun)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("being built by "), done.stderr
    assert not list(cache.glob("*.so"))
    go.write_text("whole\n", encoding="utf-8")  # waits for the compiler, which still runs
    for _ in range(3000):
        if list(cache.glob("*.so")):
            break
        time.sleep(0.01)
    (built,) = cache.glob("*.so")
    assert built.read_text(encoding="utf-8") == "whole\n"
    assert {x.name for x in cache.iterdir()} == {built.name, f"{built.name}.lock"}


def test_a_failed_build_keeps_calls_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    fake = tmp_path / "cxx"
    fake.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n", encoding="utf-8")
    fake.chmod(0o755)
    with pytest.raises(CompilationError, match="no such header"):
        build.build(str(fake))
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("LOKAKERN_NATIVE", "wait")
    own = replay._Native()
    own.ask()
    assert own.replay is None and own.reason.startswith("off: ") and "no such header" in own.reason
    assert "no such header" in caplog.text and "LOKAKERN_NATIVE=off" in caplog.text
    assert not list(tmp_path.glob("*.so"))


def test_the_status_tells_why_calls_stay_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, words in (("off", "LOKAKERN_NATIVE is 'off'"), ("", "no C++ compiler")):
        monkeypatch.setenv("LOKAKERN_NATIVE", value)
        monkeypatch.setattr(build, "compiler", lambda: None)
        own = replay._Native()
        own.ask()
        assert words in own.reason and own.replay is None
    monkeypatch.setenv("LOKAKERN_NATIVE", "no")
    own = replay._Native()
    for _ in range(2):
        with pytest.raises(CompilationError, match="LOKAKERN_NATIVE is 'no'; expected"):
            own.ask()


def test_what_keeps_a_build_from_starting_keeps_calls_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOKAKERN_NATIVE", raising=False)

    def forbidden(cxx: str) -> Path:
        raise PermissionError("no access to the cache")

    def absent(cxx: str) -> Path:
        return Path("/absent/library.so")

    class Thread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(build, "compiler", lambda: "g++")
    for path, words in ((forbidden, "no access"), (absent, "can't start new thread")):
        monkeypatch.setattr(build, "library_path", path)
        monkeypatch.setattr(replay.threading, "Thread", Thread)
        own = replay._Native()
        own.ask()
        assert own.replay is None and own.reason.startswith("off: ") and words in own.reason


def test_all_that_decides_a_library_decides_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler, also one that was upgraded in its place, torch, and the machine's libc."""
    cxx = tmp_path / "g++"
    cxx.write_text("older", encoding="utf-8")
    found = [build.library_path("clang++"), build.library_path(str(cxx))]
    cxx.write_text("a newer one", encoding="utf-8")
    found.append(build.library_path(str(cxx)))
    monkeypatch.setattr(build.platform, "libc_ver", lambda: ("glibc", "2.0"))
    found.append(build.library_path(str(cxx)))
    monkeypatch.setattr(build.torch.version, "git_version", "0")
    found.append(build.library_path(str(cxx)))
    monkeypatch.setattr(build.torch, "__version__", "0.0")
    found.append(build.library_path(str(cxx)))
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    (tmp_path / "unity.cpp").write_text("other sources", encoding="utf-8")
    found.append(build.library_path(str(cxx)))
    assert len(set(found)) == len(found) == 7


def test_a_built_library_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    native.library()
    monkeypatch.setenv("LOKAKERN_NATIVE", "wait")
    own = replay._Native()
    own.ask()
    assert own.replay is not None and own.reason.startswith("in use, built by ")


def test_a_build_that_has_begun_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release = threading.Event(), threading.Event()

    def refuse(_cxx: str) -> Path:
        begun.set()
        assert release.wait(60)
        raise CompilationError("no headers")

    monkeypatch.delenv("LOKAKERN_NATIVE", raising=False)
    monkeypatch.setattr(build, "compiler", lambda: "cxx")
    monkeypatch.setattr(build, "library_path", lambda _cxx: tmp_path / "none.so")
    monkeypatch.setattr(build, "build", refuse)
    state = replay._Native()
    state.wait()  # none has begun
    state.ask()
    assert begun.wait(60) and state.reason == "being built by cxx"
    release.set()
    state.wait()
    assert state.reason == "off: no headers"
