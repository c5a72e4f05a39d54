"""Export with its manifest, import and merge: all or nothing, with their messages."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from msgspec import structs

from lokakern.bench.cli.main import app
from lokakern.bench.exchange.export import export
from lokakern.errors import DatabaseError
from lokakern.registry import staleness
from lokakern.registry.quarantine import Tier, quarantined_files
from lokakern.registry.schema import manifest
from lokakern.registry.schema.manifest import manifest_beside, place_of, text_of
from lokakern.registry.schema.row_keys import FACT_IDENTITY, fact_keys, row_key
from lokakern.registry.schema.tables import COLUMNS, TABLES
from lokakern.registry.sharing import validate
from lokakern.registry.sharing.download import download
from lokakern.registry.sharing.import_file import import_file, merge_files, read_foreign
from lokakern.registry.sharing.quarantine import reject
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.storage import paths
from lokakern.registry.storage.reader import Rows, database_digest, read_rows
from lokakern.registry.storage.writer import write_file
from tests.support.foreign_files import base_rows, write_base
from tests.support.run_files import CHOICES, edited, rows_of
from tests.support.shipped import H100_FILE

ROOT = Path(__file__).resolve().parents[3]
NOTHING = dict.fromkeys(TABLES, 0)


def whole(choices: list[tuple[int, int, int]]) -> Rows:
    """`rows_of` as a file of others may hold them: begun after 2020."""
    rows = rows_of(choices)
    place = COLUMNS["run"].index("started_utc_ms")
    rows["run"] = [(*r[:place], 1_700_000_000_000, *r[place + 1 :]) for r in rows["run"]]
    return rows


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "others.sqlite"
    write_base(path)
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "mine.sqlite"
    write_base(path, run=2)
    return path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app([str(word) for word in words], prog_name="python -m lokakern.bench")
        found = capsys.readouterr()
        return int(ended.value.code or 0), found.out, found.err

    return run


# Import


def test_an_import_adds_new_rows(file: Path, target: Path) -> None:
    before = read_rows(target)
    report = import_file(file, target, trusted=True)
    assert report.added == {**NOTHING, "run": 1, "timing": 8, "accuracy": 8, "test_result": 2,
                            "host_cost": 1}  # fmt: skip
    assert report.known["problem"] == 2 and report.left_out == NOTHING
    assert report.changed_kernels == ("cuda.gemm_row", "torch.bf16")
    rows, brought = read_rows(target), read_rows(file)
    for name in TABLES:
        assert set(rows[name]) == set(before[name]) | set(brought[name])
    content = target.read_bytes()
    again = import_file(file, target, trusted=True)
    assert again.added == NOTHING and sum(again.known.values()) == sum(map(len, brought.values()))
    assert target.read_bytes() == content
    merge_files([target], target.with_name("fresh.sqlite"))
    assert target.with_name("fresh.sqlite").read_bytes() == content, "no other bytes than a merge's"


def test_unreferenced_rows_are_left_out(tmp_path: Path, target: Path) -> None:
    rows = base_rows()
    write_file(tmp_path / "few.sqlite", {**rows, "accuracy": [], "test_result": [], "host_cost": [],
                                         "timing": rows["timing"][:1]})  # fmt: skip
    report = import_file(tmp_path / "few.sqlite", tmp_path / "new.sqlite", trusted=True)
    assert report.left_out == {**NOTHING, "device": 1, "kernel": 1, "problem": 1}
    assert {name: len(found) for name, found in read_rows(tmp_path / "new.sqlite").items()} == {
        **dict.fromkeys(TABLES, 1), "accuracy": 0, "test_result": 0, "host_cost": 0,
    }  # fmt: skip


@pytest.mark.parametrize("fails", ["sqlite", "rename", "conflict"])
def test_a_failed_import_leaves_the_target(
    file: Path, target: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    before, names = target.read_bytes(), {path.name for path in target.parent.iterdir()}
    words = "No space left"
    if fails == "conflict":
        write_file(target.with_name("a.sqlite"), edited(base_rows(), "timing", kernel_err=0.125))
        import_file(target.with_name("a.sqlite"), target, trusted=True)
        before, words = target.read_bytes(), r"timing row .*kernel_err 0\.125 and"
        names = {path.name for path in target.parent.iterdir()}
    else:
        where = {"rename": "os.replace", "sqlite": "synchronize"}[fails]

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(f"lokakern.registry.storage.writer.{where}", full)
    with pytest.raises(DatabaseError, match=words):
        import_file(file, target, trusted=True)
    assert target.read_bytes() == before
    assert {path.name for path in target.parent.iterdir()} - {"mine.sqlite.lock"} == names - {
        "mine.sqlite.lock"
    }


@pytest.mark.parametrize("by", [0, 1000])
def test_a_duplicate_row_is_refused(
    file: Path, target: Path, monkeypatch: pytest.MonkeyPatch, by: int
) -> None:
    """The index of the file was edited: the copy has the same id, or another one."""
    batches = validate._batches

    def twice(opened: Any, name: str, *more: str) -> Iterator[list[tuple[Any, ...]]]:
        for batch in batches(opened, name, *more):
            yield batch
            if name == "kernel":
                yield [(row[0] + by, *row[1:]) for row in batch]

    monkeypatch.setattr(validate, "_batches", twice)
    with pytest.raises(DatabaseError, match="or the key is there twice; expected it once"):
        import_file(file, target)


def test_a_checksum_has_to_be_that_of_the_file(file: Path, target: Path) -> None:
    with pytest.raises(DatabaseError, match=r"has SHA-256 [0-9a-f]{64}; expected 00"):
        import_file(file, target, sha256="0" * 64, trusted=True)


# Manifests


@pytest.fixture
def exported(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("lokakern.bench.exchange.export.is_current", lambda _: True)
    path = tmp_path / "out" / "h200.sqlite"
    export(read_foreign(file), path, load_snapshot([file]).find_device("NVIDIA H200"))
    return path


def test_a_manifest_describes_the_content_of_the_file(exported: Path, tmp_path: Path) -> None:
    found = manifest_beside(exported)
    assert found is not None and found.file == "h200.sqlite"
    assert found.bytes == exported.stat().st_size
    assert found.rows_digest == database_digest(exported)
    assert found.counts == {name: len(rows) for name, rows in read_rows(exported).items()}
    assert found.device["product"] == "NVIDIA H200" and found.suites == ["lrm"]
    assert [kernel["name"] for kernel in found.kernels] == ["torch.bf16", "cuda.gemm_row"]
    assert found.environments[0]["torch"] == "2.9.0"
    assert import_file(exported, tmp_path / "in.sqlite", trusted=True).added["timing"] == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sha256": "0" * 64}, "sha256 is .*; expected 000.*, as its manifest says"),
        ({"bytes": 1}, "bytes is [0-9]+; expected 1,"),
        ({"schema_version": 5}, "schema_version is 4; expected 5"),
        ({"counts": {**NOTHING, "timing": 5}}, "counts of .* is"),
        ({"counts": {"timing": 5}}, "counts must have the fields accuracy, .* timing"),
        ({"format": "lokakern manifest 2"}, "Invalid enum value .*format"),
        ({"created_utc_ms": True}, "Expected `int`, got `bool` - at .*created_utc_ms"),
        ({"file": "../x"}, r"Expected `str` matching regex .* - at `\$.file`"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_a_manifest_of_another_file_is_refused(
    exported: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    found = json.loads(place_of(exported).read_bytes())
    place_of(exported).write_text(json.dumps(found | change))
    with pytest.raises(DatabaseError, match=words):
        import_file(exported, tmp_path / "in.sqlite", trusted=True)
    assert not (tmp_path / "in.sqlite").exists()


def test_every_command_compares_the_manifest(
    exported: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    found = json.loads(place_of(exported).read_bytes())
    place_of(exported).write_text(json.dumps(found | {"sha256": "0" * 64}))
    for words in (
        ("import", exported, "--into", tmp_path / "i.sqlite"),
        ("merge", exported, "--out", tmp_path / "m.sqlite"),
        ("diff", exported, exported),
        ("describe", exported),
        ("report", "--db", exported, "--device", "NVIDIA H200"),
        ("explain", "--db", exported, "--device", "NVIDIA H200"),
        ("sweep", "--shape", "64,32,32", "--db", exported, "--quiet"),
    ):
        code, _, err = command(*words)
        assert code == 1 and "as its manifest says" in err, words


def test_a_database_that_grows_has_no_manifest(
    exported: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    """An exported file that its owner adds rows to stays readable, and so does a merged one."""
    import_file(exported, exported, trusted=True)
    assert place_of(exported).exists(), "nothing was new"
    write_base(tmp_path / "more.sqlite", run=3)
    import_file(tmp_path / "more.sqlite", exported, trusted=True)
    assert not place_of(exported).exists() and command("describe", exported)[0] == 0
    place_of(tmp_path / "m.sqlite").write_text("of an earlier file")
    assert command("merge", exported, "--out", tmp_path / "m.sqlite")[0] == 0
    assert command("describe", tmp_path / "m.sqlite")[0] == 0


@pytest.mark.parametrize("trusted", [False, True])
def test_no_import_contradicts_the_shipped_files(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """Whatever the target is: dispatch reads the shipped files together with any."""
    monkeypatch.setattr(paths, "shipped_databases", lambda: [file])
    write_file(tmp_path / "edited.sqlite", edited(base_rows(), "timing", kernel_err=0.125))
    into = tmp_path / "into.sqlite"
    with pytest.raises(DatabaseError, match=r"has two contents \(kernel_err"):
        import_file(tmp_path / "edited.sqlite", into, trusted=trusted)
    assert not into.exists() and not quarantined_files(into)
    assert import_file(file, into, trusted=trusted).added["timing"] > 0


def test_an_import_says_that_it_had_no_checksum(
    exported: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    words = ("import", exported, "--into", tmp_path / "i.sqlite")
    assert "damage" not in command(*words)[2]
    place_of(exported).unlink()
    assert "no h200.sqlite.manifest.json beside it, and no --sha256" in command(*words)[2]


@pytest.mark.parametrize(
    "content", [b"", b"[" * 100_000, b"\xff", b"[]", b'{"file": "\xff"}', b"x" * (4 << 20) + b"y"]
)
def test_an_invalid_manifest_is_refused(exported: Path, content: bytes) -> None:
    place_of(exported).write_bytes(content)
    with pytest.raises(DatabaseError, match=r"manifest .*(JSON|object|larger)"):
        import_file(exported, exported.with_name("in.sqlite"), trusted=True)


def test_a_manifest_survives_a_round_trip(exported: Path) -> None:
    content = place_of(exported).read_bytes()
    found = manifest.parse(content, "x")
    assert text_of(found).encode() == content
    assert structs.asdict(found) == json.loads(content)


def test_the_description_of_the_database_is_current() -> None:
    place = ROOT / "scripts" / "describe_database.py"
    spec = importlib.util.spec_from_file_location("describe_database", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PLACE.read_text("utf-8") == module.text(), "run scripts/describe_database.py"


# Downloads


@pytest.fixture
def served(file: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(file.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def sha256_of(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_url_is_downloaded_and_imported(
    file: Path, served: str, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    into = tmp_path / "in.sqlite"
    code, out, err = command(
        "import", f"{served}/{file.name}", "--sha256", sha256_of(file), "--into", into
    )
    assert (code, out) == (0, "")
    assert (
        "8 timing, 8 accuracy, 2 test_result, 1 host_cost; there already: nothing; left out" in err
    )
    where = f"with LOKAKERN_DB={into} (`--db` does not read them), until `verify`"
    assert f"count with caution, {where}" in err and not into.exists()
    (quarantined,) = quarantined_files(into)
    assert quarantined.tier is Tier.UNVERIFIED and read_rows(quarantined.path) == read_rows(file)
    code, _, err = command("import", file, "--into", into)
    assert code == 0 and "added nothing; there already: 2 device" in err
    code, _, err = command("import", file, "--into", into, "--trust")
    assert code == 0 and "caution" not in err and read_rows(into) == read_rows(file)
    code, _, err = command("import", f"{served}/{file.name}", "--into", into)
    assert code == 1 and "the checksum is None; expected --sha256 with the 64 hex digits" in err


def test_downloads_with_another_checksum_or_size_are_refused(
    file: Path, served: str, tmp_path: Path
) -> None:
    size = file.stat().st_size
    known = functools.partial(download, folder=tmp_path / "to", largest_bytes=size)
    assert known(f"{served}/{file.name}", sha256_of(file)).read_bytes() == file.read_bytes()
    for url, digest, words in [
        (f"{served}/{file.name}?a", "0" * 64, "does not match"),
        (f"{served}/absent.sqlite", "0" * 64, "404"),
        (f"{served}/{file.name}", "beef", "the checksum is 'beef'"),
        ("http://127.0.0.1:9/x", "0" * 64, "import 'http://127.0.0.1/x'"),
    ]:
        with pytest.raises(DatabaseError, match=words):
            known(url, digest, folder=tmp_path / digest)
    with pytest.raises(DatabaseError, match="larger than a file of others may be"):
        known(f"{served}/{file.name}", sha256_of(file), folder=tmp_path / "x",
              largest_bytes=size - 1)  # fmt: skip


@pytest.mark.parametrize("url", ["http://someone:hunter2@127.0.0.1:9/x?token=hunter2",
                                 "http://someone:hunter2@[x/y"])  # fmt: skip
def test_no_error_repeats_a_password(url: str, tmp_path: Path) -> None:
    with pytest.raises(DatabaseError) as raised:
        download(url, "0" * 64, tmp_path, largest_bytes=1)
    assert "hunter2" not in str(raised.value)


def test_a_slow_download_has_a_deadline(
    served: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lokakern.registry.sharing.download.LONGEST_S", -1.0)
    with pytest.raises(DatabaseError, match="not done after"):
        download(f"{served}/{file.name}", sha256_of(file), tmp_path, largest_bytes=1 << 30)


def test_a_download_without_pooch_names_the_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DatabaseError, match=r"pip install '\.\[exchange\]'"):
        download("http://127.0.0.1:9/x", "0" * 64, tmp_path, largest_bytes=1)


def test_a_repeated_import_quarantines_the_file_once(file: Path, target: Path) -> None:
    before = target.read_bytes()
    assert import_file(file, target).added["timing"] == 8
    again = import_file(file, target)
    assert again.added == NOTHING and again.contradicted == () and again.known["timing"] == 8
    assert target.read_bytes() == before
    (quarantined,) = quarantined_files(target)
    assert [path.name for path in quarantined.path.parent.iterdir()] == [quarantined.path.name]


def test_an_import_of_known_rows_writes_nothing(file: Path, target: Path, tmp_path: Path) -> None:
    rows = base_rows()
    write_file(tmp_path / "some.sqlite", {**rows, "timing": rows["timing"][:3]})
    import_file(file, target)
    assert import_file(tmp_path / "some.sqlite", target).added == NOTHING
    assert len(quarantined_files(target)) == 1
    import_file(file, target, trusted=True)
    before = target.stat().st_ino
    assert import_file(file, target, trusted=True).added == NOTHING
    assert target.stat().st_ino == before, "the file is let alone"


@pytest.mark.parametrize("trusted", [False, True])
def test_a_quarantined_altered_copy_does_not_block_the_genuine_file(
    exported: Path, target: Path, trusted: bool
) -> None:
    """Whether it came with a manifest, which who alters a file can alter, too."""
    altered = exported.with_name("altered.sqlite")
    write_file(altered, edited(read_rows(exported), "timing", kernel_err=0.125))
    first = import_file(altered, target)
    assert first.contradicted == () and first.added["timing"] == 4
    (quarantined,) = quarantined_files(target)
    report = import_file(exported, target, trusted=trusted)
    assert report.added["timing"] == 4 and report.known["timing"] == 0
    if trusted:
        assert report.contradicted == ()
        assert set(read_rows(exported)["timing"]) <= set(read_rows(target)["timing"])
    else:
        ((found, words),) = report.contradicted
        assert found == quarantined and "two contents (kernel_err 0.125 and" in words
        assert len(quarantined_files(target)) == 2


def test_a_contradiction_names_the_quarantined_file(
    file: Path, target: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    write_file(tmp_path / "lie.sqlite", edited(base_rows(), "timing", kernel_err=0.125))
    code, _, err = command("import", tmp_path / "lie.sqlite", "--into", target)
    assert code == 0 and "other contents" not in err
    (quarantined,) = quarantined_files(target)
    os.utime(quarantined.path, (1_790_000_000, 1_790_000_000))
    code, _, err = command("import", file, "--into", target)
    assert code == 0
    assert f"{quarantined.path}, imported 2026-09-21 14:13 UTC, is quarantined too" in err
    assert "run `verify`, or remove the edited file (timing row" in err


def test_a_rejected_file_does_not_come_back(file: Path, target: Path, tmp_path: Path) -> None:
    import_file(file, target)
    (quarantined,) = quarantined_files(target)
    rejected = reject(quarantined, target)
    assert quarantined_files(target) == []
    copy = tmp_path / "copy.sqlite"
    shutil.copyfile(file, copy)
    with closing(sqlite3.connect(copy)) as connection:
        connection.execute("PRAGMA page_size = 16384")
        connection.execute("VACUUM")
    assert copy.read_bytes() != file.read_bytes()
    write_base(tmp_path / "other.sqlite", run=3)
    merge_files([file, tmp_path / "other.sqlite"], tmp_path / "more.sqlite")
    for same in (file, copy, tmp_path / "more.sqlite"):
        with pytest.raises(DatabaseError, match=r"`verify` rejected them.*remove that file") as no:
            import_file(same, target)
        assert str(rejected) in str(no.value) and ", imported 20" in str(no.value)
    with pytest.raises(DatabaseError, match="another `verify` moved it"):
        reject(quarantined, target)


@pytest.mark.parametrize("how", ["another value", "a row more", "another run"])
def test_a_rejected_altered_copy_does_not_block_the_genuine_file(
    file: Path, target: Path, tmp_path: Path, how: str
) -> None:
    rows = base_rows()
    if how == "another value":
        altered = edited(rows, "timing", kernel_err=0.125)
    elif how == "another run":
        altered = edited(rows, "run", started_utc_ms=1_700_000_000_001)
    else:
        row = dict(zip(COLUMNS["timing"], rows["timing"][0], strict=True)) | {"regime": "eager"}
        forged = (row_key("timing", row), *list(row.values())[1:])
        altered = {**rows, "timing": sorted([*rows["timing"], forged])}
    write_file(tmp_path / "altered.sqlite", altered)
    import_file(tmp_path / "altered.sqlite", target)
    reject(quarantined_files(target)[0], target)
    assert import_file(file, target).added["timing"] == 8
    assert read_rows(quarantined_files(target)[0].path) == read_rows(file)
    with pytest.raises(DatabaseError, match="`verify` rejected them"):
        import_file(tmp_path / "altered.sqlite", target)


def test_a_database_that_is_a_link_stays_one(file: Path, tmp_path: Path) -> None:
    real, link = tmp_path / "real" / "mine.sqlite", tmp_path / "link.sqlite"
    real.parent.mkdir()
    link.symlink_to(real)
    import_file(file, link, trusted=True)
    assert link.is_symlink() and read_rows(real) == read_rows(file)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux")
def test_an_import_without_locks_fails_at_once(file: Path) -> None:
    with pytest.raises(DatabaseError, match=r"lock '/proc/mine.sqlite.lock' cannot be made"):
        import_file(file, Path("/proc/mine.sqlite"), trusted=True)


@pytest.mark.parametrize("name", ["a\0b.sqlite", "a" * 300 + ".sqlite"])
def test_invalid_file_names_are_errors_of_one_line(
    name: str, file: Path, command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    target = str(tmp_path / name)
    for words in (("import", name), ("import", str(file), "--into", target),
                  ("diff", name, str(file)), ("merge", str(file), "--out", target)):  # fmt: skip
        code, out, err = command(*words)
        assert (code, out) == (1, "") and len(err.splitlines()) == 1


# Merging


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(a=CHOICES, b=CHOICES)
def test_merging_is_a_set_union(
    tmp_path_factory: pytest.TempPathFactory,
    a: list[tuple[int, int, int]],
    b: list[tuple[int, int, int]],
) -> None:
    """Commutative, idempotent, the sources unchanged: one content, one digest, the same bytes."""
    folder = tmp_path_factory.mktemp("merge")
    one, other, both = (folder / f"{name}.sqlite" for name in ("a", "b", "both"))
    for path, choices in ((one, a), (other, b), (both, a + b)):
        write_file(path, whole(choices))
    before = [path.read_bytes() for path in (one, other)]
    results = [folder / f"{number}.sqlite" for number in range(4)]
    merge_files([one, other], results[0])
    merge_files([other, one], results[1])
    merge_files([results[0], one], results[2])
    merge_files([one, one, other, results[1]], results[3])
    assert {path.read_bytes() for path in results} == {both.read_bytes()}
    assert {database_digest(path) for path in results} == {database_digest(both)}
    assert len(read_rows(results[0])["timing"]) == len({*a, *b})
    assert [path.read_bytes() for path in (one, other)] == before


def test_a_merge_writes_a_new_file(
    file: Path, target: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = command("merge", file, target, "--out", tmp_path / "both.sqlite")
    assert (code, out) == (0, "") and "16 timing, 16 accuracy" in err
    assert "duplicates: 2 device, 1 environment" in err
    assert [path.name for path in tmp_path.glob("both.sqlite*")] == ["both.sqlite"]  # no lock
    before = target.read_bytes()
    code, _, err = command("merge", file, target, "--out", target)
    assert code == 1 and "is one of the sources" in err and "remove" not in err
    assert target.read_bytes() == before
    code, _, err = command("merge", file, file, "--out", target)
    assert code == 1 and "is there; expected the name of a new file" in err
    write_file(tmp_path / "x.sqlite", edited(base_rows(), "timing", kernel_err=0.125))
    code, _, err = command("merge", file, tmp_path / "x.sqlite", "--out", tmp_path / "c.sqlite")
    assert code == 1 and "has two contents (kernel_err" in err
    assert not [*tmp_path.glob("c.sqlite*")]  # nor a lock
    known = tmp_path / "known.sqlite"
    assert command("import", file, "--into", known, "--trust")[0] == 0
    code, _, err = command("import", tmp_path / "x.sqlite", "--into", known)
    assert code == 1 and err.startswith("DatabaseError: timing row ")
    code, _, err = command("import", file, "--into", target, "--sha256", "abc")
    assert code == 1 and "the checksum is 'abc'; expected --sha256 with 64 hex digits" in err


def test_an_import_of_shipped_rows_says_that_they_are_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str, str]]
) -> None:
    into = tmp_path / "mine.sqlite"
    monkeypatch.setenv("LOKAKERN_DB", str(into))
    code, _, err = command("import", H100_FILE)
    assert code == 0 and "added nothing; there already: nothing; in the shipped files " in err
    assert f"{into} is not written: dispatch reads these rows from the shipped files" in err
    assert not [*tmp_path.iterdir()]  # nor a lock


def test_every_command_that_reads_a_database_checks_it(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    path = tmp_path / "edited.sqlite"
    write_file(path, edited(base_rows(), "timing", regime="eager"))
    for words in (
        ("import", path, "--into", tmp_path / "i.sqlite"),
        ("merge", path, "--out", tmp_path / "m.sqlite"),
        ("diff", path, path),
        ("explain", "--db", path, "--device", "NVIDIA H200"),
        ("list", "kernels", "--db", path),
        ("export", tmp_path / "e.sqlite", "--device", "NVIDIA H200", "--db", path),
        ("sweep", "--shape", "64,32,32", "--db", path, "--quiet"),
    ):
        code, _, err = command(*words)
        assert code == 1 and "does not have the key of its content" in err, words
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".sqlite") == [path.name]


def test_keys_computed_by_column_equal_keys_by_row() -> None:
    for name in FACT_IDENTITY:
        rows = [dict(zip(COLUMNS[name], row, strict=True)) for row in base_rows()[name]]
        columns = {column: [row[column] for row in rows] for column in COLUMNS[name]}
        assert fact_keys(name, columns) == [row_key(name, row) for row in rows]


def test_staleness_reads_only_files_of_the_kernels_folder() -> None:
    """Names of modules in an imported file open no file outside the folder of kernels."""
    from lokakern.registry.sharing.validate import MODULE

    for module in ("cuda/a", "norm_compositions", "python:a.b", "package:fbgemm-gpu==1.2+cu"):
        assert MODULE.fullmatch(module)
    for module in ("../a", "/etc/passwd", "a/../b", "cuda//a", "python:", "a b", "cuda/a\n"):
        assert not MODULE.fullmatch(module)
    assert staleness._has_its_digest.cache_info().maxsize
