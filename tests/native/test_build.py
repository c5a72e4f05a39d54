"""Building the library: once, by many processes, and what is said where it cannot be built."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lokakern.errors import CompilationError
from lokakern.native import build, replay
from tests.support import native


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several that ask at once one compiles."""
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    compiles = tmp_path / "compiles"
    fake = tmp_path / "cxx"
    fake.write_text(
        f'#!/bin/sh\necho x >> {compiles}\nsleep 0.2\nwhile [ "$1" != -o ]; do shift; done\n'
        'touch "$2"\n',
        encoding="utf-8",
    )
    fake.chmod(0o755)
    threads = [threading.Thread(target=build.build, args=(str(fake),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiles.read_text(encoding="utf-8") == "x\n"
    assert build.library_path(str(fake)).exists()


def test_a_failed_build_keeps_calls_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert not list(tmp_path.glob("*.so"))


def test_the_status_tells_why_calls_stay_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, words in (("off", "LOKAKERN_NATIVE is 'off'"), ("", "no C++ compiler")):
        monkeypatch.setenv("LOKAKERN_NATIVE", value)
        monkeypatch.setattr(build, "compiler", lambda: None)
        own = replay._Native()
        own.ask()
        assert words in own.reason and own.replay is None
    monkeypatch.setenv("LOKAKERN_NATIVE", "no")
    with pytest.raises(CompilationError, match="LOKAKERN_NATIVE is 'no'; expected"):
        replay._Native().ask()


def test_sources_decide_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library_path("g++")
    assert build.library_path("clang++") != before
    monkeypatch.setattr(build.torch, "__version__", "0.0")
    assert build.library_path("g++") != before


def test_a_built_library_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    native.library()
    monkeypatch.setenv("LOKAKERN_NATIVE", "wait")
    own = replay._Native()
    own.ask()
    assert own.replay is not None and own.reason.startswith("in use, built by ")
