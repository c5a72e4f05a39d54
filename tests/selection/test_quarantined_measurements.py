"""Dispatch with imported measurements, which count less until some are verified here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lokakern.errors import DatabaseError
from lokakern.registry.digests import kernel_digest
from lokakern.registry.quarantine import Tier, quarantined_files
from lokakern.registry.register import KERNELS
from lokakern.registry.schema.records import KernelRow
from lokakern.registry.schema.row_keys import row_key
from lokakern.registry.schema.tables import COLUMNS
from lokakern.registry.sharing.import_file import import_file, merge_files
from lokakern.registry.sharing.quarantine import reject, settle
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.staleness import is_current
from lokakern.registry.storage.merge import without_unused
from lokakern.registry.storage.reader import Rows, read_rows
from lokakern.registry.storage.writer import write_file
from lokakern.selection import dispatcher
from lokakern.selection.dispatcher import dispatch
from tests.support.imported_measurements import (
    DEEPER,
    ELSEWHERE,
    HERE,
    M,
    chosen,
    others,
    own,
)
from tests.support.measurements import BF16, H200, ROW, TENSOR, Book, accuracy, gemm, time

Write = Callable[..., None]


def test_an_imported_error_is_at_least_that_of_its_arithmetic(mine: Path) -> None:
    own(mine, time(ROW, DEEPER, 50.0), accuracy(ROW, DEEPER, 0.041))
    others(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.02))
    choice = chosen()
    assert choice.kernel == ROW and choice.latency_us == 5.0
    assert choice.errors["row_err"] == 0.041, "the worse of 0.02 and 0.041"
    assert choice.errors["row_p99"] == pytest.approx(0.041 * 1.2)
    assert "5.00 us (measured, 1 run, graph-cold, imported and not verified)" in choice.explain()
    assert choice.table.rests_on_imports
    assert "error: imported and not verified: the worse of it" in choice.explain()
    assert chosen(0.03).kernel == BF16


def test_a_larger_imported_error_is_kept(mine: Path) -> None:
    own(mine, accuracy(ROW, DEEPER, 0.041))
    others(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.055))
    assert chosen().errors["row_err"] == 0.055


def test_an_imported_error_without_comparison_does_not_count(mine: Path) -> None:
    """Other granularities and distributions are no comparison."""
    own(mine, accuracy(TENSOR, ELSEWHERE, 0.041), accuracy(ROW, ELSEWHERE, 0.041, without=("X3",)))
    others(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04))
    choice = chosen()
    assert choice.kernel == BF16
    assert "error on X3 is only imported" in choice.rejected[ROW]
    assert "`python -m lokakern.bench verify`" in choice.rejected[ROW]


def test_a_measured_error_at_the_problem_decides(mine: Path) -> None:
    """The measured error needs no comparison, and imported errors do not change it."""
    own(mine, time(ROW, HERE, 6.0), accuracy(ROW, HERE, 0.04))
    others(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.02))
    choice = chosen()
    assert (choice.errors["row_err"], choice.latency_us) == (0.04, 6.0)
    assert "not verified" not in choice.explain()
    others(mine, accuracy(ROW, HERE, 0.07))
    choice = chosen()
    assert (choice.kernel, choice.errors["row_err"]) == (ROW, 0.04)
    assert "set aside, imported and not verified: row_err 0.07 on X" in choice.explain()


def test_times_measured_here_come_first(mine: Path) -> None:
    own(mine, time(ROW, HERE, 30.0), accuracy(ROW, HERE, 0.04))
    others(mine, time(ROW, HERE, 5.0), time(ROW, gemm(2 * M), 5.0), time(BF16, gemm(2 * M), 50.0))
    assert chosen().kernel == BF16, "30 us here, whatever others say"
    far = chosen(m=2 * M)
    assert far.kernel == ROW and "imported and not verified" in far.explain()


def test_imported_failures_do_not_outvote_a_measurement(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04))
    others(mine, time(ROW, HERE, 5.0, status="wrong"))
    others(mine, time(ROW, HERE, 5.0, status="error"))
    assert chosen().kernel == ROW, "it was right here, at the same problem"


def test_an_imported_success_cancels_no_measured_crash(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0, status="crashed"), accuracy(ROW, HERE, 0.04))
    others(mine, time(ROW, HERE, 5.0))
    assert chosen().kernel == BF16 and "crashed" in chosen().rejected[ROW]
    own(mine, time(ROW, HERE, 5.0))
    assert chosen().kernel == ROW


def test_interpolation_of_measured_times_ignores_imports(mine: Path) -> None:
    for m, us in ((M // 2, 15.0), (2 * M, 45.0)):
        own(mine, time(BF16, gemm(m), us), time(ROW, gemm(m), 2 * us), accuracy(ROW, gemm(m), 0.04))
    others(mine, time(ROW, HERE, 5.0))
    choice = chosen()
    assert choice.kernel == BF16 and choice.rejected[ROW] == "slower: 50.00 us"


@pytest.mark.parametrize(("ours", "theirs"), [(M // 2, 2 * M), (2 * M, M // 2)])
def test_a_time_interpolated_with_an_imported_one_is_unverified(
    mine: Path, ours: int, theirs: int
) -> None:
    own(mine, *(time(BF16, gemm(m), 50.0) for m in (ours, theirs)))
    own(mine, time(ROW, gemm(ours), 5.0), accuracy(ROW, HERE, 0.04))
    others(mine, time(ROW, gemm(theirs), 7.0))
    choice = chosen()
    assert choice.kernel == ROW and choice.interpolated
    assert "graph-cold, imported and not verified)" in choice.explain()


def test_unverified_times_are_marked_in_reasons(mine: Path) -> None:
    """A forged slow time of the unquantized kernel would make any other win."""
    own(mine, time(ROW, ELSEWHERE, 50.0), time(ROW, gemm(2 * M), 70.0), accuracy(ROW, HERE, 0.04))
    others(mine, time(BF16, gemm(2 * M), 90.0))
    choice = chosen(m=2 * M)
    assert choice.kernel == ROW
    assert choice.rejected[BF16] == "slower: 90.00 us, imported and not verified"
    assert choice.table.rests_on_imports, "what wins is ours, and by what"


def test_a_device_name_means_the_measured_device(mine: Path) -> None:
    """Also if an import has another device of this name, with more timings."""
    more = replace(H200, memory_gib=999)
    rows = [time(BF16, gemm(m), 9.0, device=more) for m in (1024, 2048, M, 2 * M)]
    others(mine, *rows)
    dispatcher.use_snapshot(load_snapshot())
    assert dispatch("gemm", (M, 512, 512), 0.06, device="NVIDIA H200").table.device == H200


def test_a_rejected_file_is_not_read(mine: Path) -> None:
    others(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04))
    assert "only imported" in chosen().rejected[ROW]
    reject(quarantined_files(mine)[0], mine)
    assert "not measured here" in chosen().rejected.get(ROW, "not measured here")


def test_settled_rows_are_trusted_and_the_rest_stays_quarantined(mine: Path) -> None:
    others(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04))
    (quarantined,) = quarantined_files(mine)
    rows = read_rows(quarantined.path)
    settle(quarantined, mine, without_unused({**rows, "timing": []}, rows),
           without_unused({**rows, "accuracy": []}, rows))  # fmt: skip
    choice = chosen()
    assert (choice.kernel, choice.errors["row_err"]) == (ROW, 0.04)
    assert "graph-cold, imported and not verified)" in choice.explain()
    assert "error: imported" not in choice.explain()
    nothing: Rows = {name: [] for name in rows}
    settle(quarantined, mine, read_rows(quarantined.path), nothing)
    assert quarantined_files(mine) == [] and "not verified" not in chosen().explain()
    with pytest.raises(DatabaseError, match="is not in quarantine any more"):
        settle(quarantined, mine, nothing, nothing)


def test_a_contradiction_with_a_shipped_file_is_refused(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = mine.with_name("shipped.sqlite")
    Book(shipped).write(time(BF16, HERE, 20.0))
    edited = edit(shipped, latency_us_p50=5.0, latency_us_p20=5.0)
    with monkeypatch.context() as patch:
        patch.setattr("lokakern.registry.storage.paths.shipped_databases", lambda: [shipped])
        for trusted in (False, True):
            with pytest.raises(DatabaseError, match=r"two contents.*latency_us_p50"):
                import_file(edited, mine, trusted=trusted)
        assert quarantined_files(mine) == []


def test_an_import_that_contradicts_a_new_shipped_file_is_left_out(
    mine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A later version ships a file that contradicts a quarantined import."""
    shipped = mine.with_name("shipped.sqlite")
    Book(shipped).write(time(BF16, HERE, 20.0))
    import_file(edit(shipped, latency_us_p50=5.0, latency_us_p20=5.0), mine)
    others(mine, time(ROW, HERE, 7.0))
    first = quarantined_files(mine)
    monkeypatch.setattr("lokakern.registry.storage.paths.shipped_databases", lambda: [shipped])
    facts = load_snapshot()
    assert len(first) == 2 and len(facts.sources) == 3
    assert "is left out: timing row" in caplog.text
    assert sorted(c.latency_us_p50 for c in facts.timings_on(H200, "graph-cold")) == [
        7.0, 20.0, 20.0, 40.0,
    ]  # fmt: skip
    quarantined_files(mine)[0].path.write_bytes(b"no database")
    assert load_snapshot().sources and "no database" not in str(load_snapshot())


def times_here() -> list[float]:
    facts = load_snapshot()
    assert facts.has_quarantined
    return sorted(c.latency_us_p50 for c in facts.timings_on(H200, "graph-cold"))


@pytest.mark.parametrize("lies", [(5.0,), (5.0, 4.0), (5.0, 6.0, 4.0)])
def test_rows_that_differ_between_imports_are_not_read(
    mine: Path, caplog: pytest.LogCaptureFixture, lies: tuple[float, ...]
) -> None:
    """Imports may come in any order and number; their other rows are read."""
    genuine = mine.with_name("genuine.sqlite")
    Book(genuine).write(time(BF16, HERE, 21.0))
    for place, us in enumerate(lies):
        import_file(edit(genuine, latency_us_p50=us, latency_us_p20=us), mine)
        if place == 0:
            assert import_file(genuine, mine).contradicted
    merge_files([genuine, Book(mine.with_name("b.sqlite")).write(time(ROW, HERE, 7.0)).path],
                mine.with_name("both.sqlite"))  # fmt: skip
    import_file(mine.with_name("both.sqlite"), mine)
    assert len(quarantined_files(mine)) == len(lies) + 2
    assert times_here() == [7.0, 20.0, 40.0]
    assert "differ in 1 rows of the same keys" in caplog.text
    assert all(
        str(one.path) in caplog.text and one.since in caplog.text for one in quarantined_files(mine)
    )
    caplog.clear()
    (fact,) = read_rows(genuine)["timing"]
    for one in quarantined_files(mine):
        if fact not in read_rows(one.path)["timing"]:
            one.path.unlink()
    assert times_here() == [7.0, 20.0, 21.0, 40.0] and "differ" not in caplog.text


def test_runs_that_differ_between_imports_are_not_read(mine: Path) -> None:
    genuine = mine.with_name("genuine.sqlite")
    Book(genuine).write(time(BF16, HERE, 21.0), accuracy(BF16, HERE, 0.002))
    import_file(genuine, mine)
    Book(mine.with_name("b.sqlite")).write(time(ROW, HERE, 7.0))
    import_file(mine.with_name("b.sqlite"), mine)
    assert times_here() == [7.0, 20.0, 21.0, 40.0]
    rows = read_rows(genuine)
    (values,) = rows["run"]
    later = dict(zip(COLUMNS["run"], values, strict=True))
    later["started_utc_ms"] += 1
    write_file(mine.with_name("edited.sqlite"), {**rows, "run": [tuple(later.values())]})
    import_file(mine.with_name("edited.sqlite"), mine)
    assert times_here() == [7.0, 20.0, 40.0]
    assert load_snapshot().digest != load_snapshot([mine]).digest


def edit(path: Path, **changes: float) -> Path:
    """A copy with other values in its only timing, under the same key."""
    rows = read_rows(path)
    (values,) = rows["timing"]
    row = dict(zip(COLUMNS["timing"], values, strict=True)) | changes
    edited = path.with_name("edited.sqlite")
    edited.unlink(missing_ok=True)
    write_file(edited, {**rows, "timing": [tuple(row.values())]})
    return edited


def test_an_import_of_trusted_rows_leaves_them_trusted(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0), accuracy(ROW, HERE, 0.04))
    Book(mine.with_name("more.sqlite")).write(time(ROW, ELSEWHERE, 5.0))
    import_file(mine, mine.with_name("again.sqlite"))
    os.replace(mine, mine.with_name("again.sqlite"))
    os.rename(mine.with_name("again.sqlite"), mine)
    os.rename(mine.with_name("again.sqlite.imports"), mine.with_name("mine.sqlite.imports"))
    assert len(quarantined_files(mine)) == 1
    choice = chosen()
    assert choice.kernel == ROW and "not verified" not in choice.explain()


def test_an_import_with_another_digest_does_not_count(mine: Path) -> None:
    own(mine, accuracy(ROW, gemm(M, k=1024), 0.041))
    others(mine, time(ROW, HERE, 5.0, digest="f" * 64),
           accuracy(ROW, HERE, 0.04, digest="f" * 64))  # fmt: skip
    assert chosen().kernel == BF16 and KERNELS[ROW].digest != "f" * 64


def test_a_row_added_to_a_measured_run_is_unverified(mine: Path) -> None:
    own(mine, time(ROW, HERE, 30.0), accuracy(ROW, HERE, 0.04))
    rows = read_rows(mine)
    forged = []
    for values in rows["timing"]:
        row = dict(zip(COLUMNS["timing"], values, strict=True))
        if row["latency_us_p50"] == 30.0:
            row |= {"regime": "graph-hot", "latency_us_p20": 5.0, "latency_us_p50": 5.0}
            forged.append((row_key("timing", row), *list(row.values())[1:]))
    theirs = mine.with_name("forged.sqlite")
    write_file(theirs, {**rows, "timing": sorted([*rows["timing"], *forged])})
    import_file(theirs, mine)
    facts = load_snapshot()
    tiers = {cell.tier for cell in facts.timings_on(H200, "graph-cold")}
    assert tiers == {""}, "what we have, too, is ours"
    (cell,) = facts.timings_on(H200, "graph-hot")
    assert cell.tier == Tier.UNVERIFIED
    assert facts.digest != load_snapshot([mine]).digest


def test_the_snapshot_digest_covers_trust(mine: Path) -> None:
    own(mine, time(ROW, HERE, 5.0))
    before = load_snapshot().digest
    others(mine, accuracy(ROW, HERE, 0.04))
    quarantined = load_snapshot()
    ours = mine.with_name("ours.sqlite")
    merge_files([mine, quarantined_files(mine)[0].path], ours)
    merged = load_snapshot([ours])
    assert len({before, quarantined.digest, merged.digest}) == 3
    assert merged.digest == load_snapshot([ours, mine]).digest


def test_the_registered_numerics_class_of_a_kernel_counts(mine: Path) -> None:
    """A quantized kernel that claims bf16's class would have bf16's errors."""
    own(mine, accuracy(BF16, ELSEWHERE, 0.0016), time(BF16, gemm(1), 9.0))
    forged = {"granularity": "none", "b_granularity": "none", "accumulation": "float32"}
    others(mine, time(ROW, gemm(1), 5.0, **forged), time(ROW, HERE, 5.0, **forged))
    for budget in (0.002, 0.06):
        assert chosen(budget).kernel == BF16
    own(mine, time(ROW, HERE, 5.0, **forged), time(ROW, gemm(1), 5.0, **forged))
    choice = chosen(0.06)
    assert choice.kernel == BF16, "not even ours: its digest is not of its class"
    assert all(c.name != ROW or not c.unquantized for c in choice.table.candidates)


def test_a_digest_without_modules_is_never_current(mine: Path) -> None:
    row = KernelRow.of(KERNELS[BF16])
    assert is_current(row)
    assert not is_current(replace(row, modules=(), digest=kernel_digest(row.name, ())))
    assert not is_current(replace(row, name="x.y", modules=(), digest=kernel_digest("x.y", ())))


@pytest.mark.parametrize("status", ["crashed", "timeout", "wrong", "error"])
def test_imported_failures_of_the_unquantized_kernel_do_not_count(mine: Path, status: str) -> None:
    own(mine, *(time(BF16, gemm(m), 20.0) for m in (M // 2, 2 * M)))
    own(mine, *(time(ROW, gemm(m), 5.0) for m in (M // 2, 2 * M)), accuracy(ROW, HERE, 0.04))
    before = [chosen(m=m).kernel for m in (M, M + 16, 2 * M)]
    assert before == [ROW] * 3
    others(mine, time(BF16, gemm(M + 32), 20.0, status=status))
    others(mine, time(BF16, gemm(3), 20.0, status=status))
    others(mine, time(ROW, gemm(M + 32), 20.0, status="timeout"))
    assert [chosen(m=m).kernel for m in (M, M + 16, 2 * M)] == before
