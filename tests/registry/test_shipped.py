"""The shipped measurements are current and plausible, and dispatch answers from them."""

from __future__ import annotations

import functools
import re
import shutil
import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

import pytest
import torch
from torch import nn

import lokakern
from lokakern.problems import make_problem
from lokakern.registry import digests, libraries, staleness
from lokakern.registry.coverage import Gap, coverage_of, missing_evidence
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.schema.manifest import manifest_beside
from lokakern.registry.schema.records import TestResultRecord
from lokakern.registry.sharing.untrusted import open_guarded
from lokakern.registry.snapshot.facts import common_keys, image_of
from lokakern.registry.snapshot.loading import load_snapshot
from lokakern.registry.snapshot.snapshot import Snapshot
from lokakern.registry.sqlite_file import FACTS
from lokakern.registry.staleness import is_current
from lokakern.registry.storage.merge import merge
from lokakern.registry.storage.paths import shipped_databases
from lokakern.registry.storage.reader import database_digest
from lokakern.registry.unmeasured import NEW_KERNELS, NEW_OPS, UNMEASURED
from lokakern.selection import dispatcher
from lokakern.selection.candidates import (
    ALIGNMENT_OF_N,
    CARRIED,
    ERRORS_ELSEWHERE,
    LIMIT_COLUMNS,
    WIDE,
)
from lokakern.selection.ties import is_unsteady
from lokakern.types import Device, Environment, ErrorBudget, Format, Granularity, Layout, Operand
from lokakern.workloads.suites import SUITES, Case
from tests.support.rows_at_once import RowsAtOnce
from tests.support.run_files import content_digest
from tests.support.shipped import H100_FILE, H200_FILE

H200 = "NVIDIA H200"
LARGEST_BYTES, LARGEST_IN_WHEEL = 20 * 2**20, 13 * 2**20
load_kernels()


@pytest.fixture(scope="module")
def path() -> Path:
    return H200_FILE


@pytest.fixture(scope="module")
def facts(path: Path) -> Snapshot:
    return load_snapshot([path])


@pytest.fixture(scope="module")
def every_fact() -> Snapshot:
    """Of all shipped files: a kernel is measured on one GPU type of its architecture at least."""
    return load_snapshot(shipped_databases())


@pytest.fixture(autouse=True)
def shipped_only(facts: Snapshot) -> Iterator[None]:
    dispatcher.use_snapshot(facts)
    yield
    dispatcher.use_snapshot(None)


def gemms(device: Device) -> list[Case]:
    return [case for case in SUITES["anchors"].cases(device) if case.problem.op == "gemm"]


every_file = pytest.mark.parametrize("file", shipped_databases(), ids=lambda file: file.stem)


@every_file
def test_a_file_is_small_of_one_device_and_its_digest_is_of_its_rows(file: Path) -> None:
    found = load_snapshot([file])
    assert file.stat().st_size <= LARGEST_BYTES
    assert len(zlib.compress(file.read_bytes())) <= LARGEST_IN_WHEEL
    assert database_digest(file) == content_digest(found)
    assert len(found.devices) == 1
    assert all(is_current(kernel) for kernel in found.kernels)


def test_unsteady_times_are_as_rare_as_the_docs_say() -> None:
    """docs/measure.md: fewer than one in 10,000."""
    count, unsteady = 0, 0
    for file in shipped_databases():
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
            for quantiles in connection.execute(
                "SELECT latency_us_p20, latency_us_p80 FROM timing WHERE status = 'ok'"
            ):
                count, unsteady = count + 1, unsteady + is_unsteady(*quantiles)
    assert unsteady * 10_000 < count, f"{unsteady} of {count}"


def test_shipped_files_share_no_row() -> None:
    """Rows that two files have would be shipped, and merged, twice."""
    images = [image_of(path) for path in shipped_databases()]
    for one, other in combinations(images, 2):
        assert not any(common_keys(one.keys(name), other.keys(name)) for name in FACTS)


@every_file
def test_a_shipped_file_matches_its_manifest(file: Path) -> None:
    """The file is checked as by `import`, which trusts no file."""
    manifest = manifest_beside(file)
    assert manifest is not None and manifest.file == file.name
    with open_guarded(file) as opened:  # which compares digest and size
        assert opened.manifest == manifest


def test_every_kernel_is_registered_here() -> None:
    """Every kernel loads here, so the tests below cover all of them."""
    assert load_kernels() == {}


def missing(facts: Snapshot, table: str) -> list[str]:
    gaps = missing_evidence(facts, KERNELS.values())
    return [str(gap) for gap in gaps if gap.table == table]


def test_every_claimed_architecture_has_a_time_of_the_current_kernel(
    every_fact: Snapshot,
) -> None:
    """Changing a line of a kernel, or removing its rows, fails here."""
    found = missing(every_fact, "timing")
    assert not found, "\n".join(["sweep there, or give @register a reason:", *found])


def test_every_claimed_architecture_has_a_test_run_of_the_current_kernel(
    every_fact: Snapshot,
) -> None:
    """Every kernel, compositions too, is a parameter of tests/kernels/test_kernels.py."""
    found = missing(every_fact, "test_result")
    assert not found, "\n".join(["run `pytest -m gpu --evidence FILE` there:", *found])


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped rows, and an invented passing test of every kernel that claims its GPU."""
    copy = tmp_path_factory.mktemp("complete") / "with_test_results.sqlite"
    merge(shipped_databases(), copy)
    record = TestResultRecord(seeds="0", passed_count=1, failed_count=0, skipped_count=0)
    with RowsAtOnce.create(copy, suite="tests", command="pytest", harness_digest="h") as run:
        for kernel in KERNELS.values():
            run.add_test_result(kernel, "sm_90", "tests/test_a.py", Environment(), record)
    return copy


@pytest.fixture(scope="module")
def complete_facts(complete: Path) -> Snapshot:
    return load_snapshot([complete])


def test_kernels_declared_unmeasured_have_no_measurements(every_fact: Snapshot) -> None:
    """An entry that is no longer needed fails here."""
    found = {(c.kernel, c.architecture): c for c in coverage_of(every_fact, KERNELS.values())}
    for entry, reason in UNMEASURED.items():
        assert (found[entry].state, found[entry].why) == ("unmeasured", reason)
    for (op, architecture), reason in NEW_OPS.items():
        known = [
            found[kernel.name, architecture]
            for kernel in KERNELS.values()
            if kernel.op == op and (kernel.name, architecture) in found
        ]
        needed = [c for c in known if c.why == reason or c.why.endswith("never tested")]
        assert needed, f"all kernels of {op} have a time and a test result on {architecture}"
    for entry, reason in NEW_KERNELS.items():
        row = found[entry]
        assert row.why == reason or row.why.endswith("never tested"), f"{entry} is new no more"
    lacking = {(g.kernel, g.architecture) for g in missing_evidence(every_fact, KERNELS.values())}
    assert not lacking & UNMEASURED.keys()


def test_a_complete_file_has_no_missing_evidence(complete_facts: Snapshot) -> None:
    assert missing_evidence(complete_facts, KERNELS.values()) == []


@pytest.mark.parametrize("table", ["timing", "test_result"])
def test_removing_the_rows_of_a_kernel_is_seen(complete: Path, tmp_path: Path, table: str) -> None:
    name = "cuda.quantize_row+cuda.scaled_gemm_row"
    copy = tmp_path / "copy.sqlite"
    shutil.copy(complete, copy)
    with closing(sqlite3.connect(copy)) as connection, connection:
        deleted = connection.execute(
            f"DELETE FROM {table} WHERE kernel IN (SELECT id FROM kernel WHERE name = ?)", (name,)
        ).rowcount
    assert deleted
    (gap,) = missing_evidence(load_snapshot([copy]), KERNELS.values())
    assert (gap.kernel, gap.architecture, gap.table) == (name, "sm_90", table)
    assert gap.why.startswith("never")


@pytest.mark.parametrize(
    "module", ["triton/scaled_gemm.py", "torch/scaled_mm.py", "cuda/quantize.cu"]
)
def test_changing_a_line_of_a_kernel_is_seen(
    complete_facts: Snapshot,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    module: str,
) -> None:
    """In a copy of the sources: every kernel made of that file lacks both kinds of rows.

    Made of it are, too, kernels of modules that import its module.
    """
    sources = tmp_path / "kernels"
    shutil.copytree(digests.KERNELS_ROOT, sources)
    monkeypatch.setattr(digests, "KERNELS_ROOT", sources)
    request.addfinalizer(staleness._has_its_digest.cache_clear)

    def gaps() -> list[Gap]:
        # Copies, because a kernel keeps the digest that it was asked for once, as rows do.
        staleness._has_its_digest.cache_clear()
        return missing_evidence(complete_facts, [replace(kernel) for kernel in KERNELS.values()])

    changed = sources / module
    comment, line = ("//", "constexpr int ADDED = 1;") if "cuda" in module else ("#", "_ADDED = 1")
    with changed.open("a", encoding="utf-8") as file:
        file.write(f"{comment} A comment.\n")
    assert gaps() == []
    with changed.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    stem = module.rsplit(".", 1)[0]
    claiming = [k for k in KERNELS.values() if k.architectures & {"sm_90", "any"}]
    claiming = [kernel for kernel in claiming if "sm_90" not in kernel.unmeasured]
    folder, name = stem.split("/")
    words = rf"^from lokakern\.kernels\.{folder}(\.{name} import| import .*\b{name}\b)"
    importing = [
        path for path in sources.glob("*/*.py") if re.search(words, path.read_text("utf-8"), re.M)
    ]
    modules = {stem, *(f"{path.parent.name}/{path.stem}" for path in importing)}
    made_of_it = {kernel.name for kernel in claiming if modules & set(kernel.modules)}
    found = gaps()
    assert {gap.kernel for gap in found} == made_of_it
    assert {gap.table for gap in found} == {"timing", "test_result"}
    assert all(gap.why.startswith("changed since") for gap in found)


def test_every_anchor_is_answered_and_never_slower_than_bf16(facts: Snapshot) -> None:
    device = facts.find_device(H200)
    chosen_fp8 = 0
    for case in gemms(device):
        table = dispatcher.table_for(case.problem, ErrorBudget.of(0.06), None, device)
        pick = table.pick(case.problem.m)
        assert not pick.note, f"{case.problem}: {pick.note}"
        assert pick.time is not None and pick.candidate is not None
        base = next(c for c in table.candidates if c.name == table.baseline)
        plain = base.times[case.problem.m]
        if pick.candidate.granularity is Granularity.NONE:
            continue
        chosen_fp8 += 1
        assert pick.time.latency_us < plain.latency_us
        assert pick.candidate.errors["row_err"] <= 0.06
    assert chosen_fp8 > 0


def test_no_budget_under_the_floor_admits_fp8(facts: Snapshot) -> None:
    device = facts.find_device(H200)
    for case in gemms(device):
        for budget in (0.03, None):
            limits = None if budget is None else ErrorBudget.of(budget)
            table = dispatcher.table_for(case.problem, limits, None, device)
            assert table.pick(case.problem.m).name == table.baseline


def test_tensor_scales_are_kept_out_by_heterogeneous_rows() -> None:
    choice = lokakern.dispatch("gemm", (32768, 2048, 2048), 0.06, device=H200)
    why = choice.rejected["cuda.quantize_tensor+torch.scaled_mm_tensor_fast"]
    assert "worst on X14" in why
    narrow = lokakern.dispatch("gemm", (32768, 2048, 2048), 0.06, device=H200, distribution="X1")
    assert "row_err" not in narrow.rejected.get(
        "cuda.quantize_tensor+torch.scaled_mm_tensor_fast", ""
    )


def test_times_are_interpolated_in_m_and_not_extrapolated() -> None:
    assert lokakern.dispatch("gemm", (20000, 2048, 2048), 0.06, device=H200).interpolated
    assert lokakern.dispatch("gemm", (40000, 2048, 2048), 0.06, device=H200).is_miss
    assert lokakern.dispatch("gemm", (20000, 2048, 2047), 0.06, device=H200).is_miss


def test_deleting_a_row_changes_the_answer(path: Path, tmp_path: Path) -> None:
    shape = (32768, 2048, 2048)
    before = lokakern.dispatch("gemm", shape, 0.06, device=H200)
    assert before.kernel != "torch.bf16"
    kernel = KERNELS[before.kernel]
    copy = tmp_path / "copy.sqlite"
    shutil.copy(path, copy)
    copy.chmod(0o644)
    with closing(sqlite3.connect(copy)) as connection, connection:
        deleted = connection.execute(
            """DELETE FROM accuracy WHERE kernel IN (
                   SELECT id FROM kernel
                   WHERE (granularity, b_granularity, accumulation) = (?, ?, ?)
               ) AND distribution IN (SELECT id FROM distribution WHERE name = 'X7')""",
            (kernel.granularity.value, kernel.b_granularity.value, kernel.accumulation),
        ).rowcount  # any kernel of the numerics class may have brought the error
    assert deleted >= 3
    dispatcher.use_snapshot(load_snapshot([copy]))
    after = lokakern.dispatch("gemm", shape, 0.06, device=H200)
    assert after.kernel != before.kernel
    assert "X7" in after.rejected[before.kernel]


def test_shipped_kernels_are_current_without_imports(facts: Snapshot) -> None:
    """Freshness needs no import: it holds where Triton is not installed."""
    device = facts.find_device(H200)
    problem = gemms(device)[0].problem
    from lokakern.registry.schema.row_keys import family_key

    cells = facts.timing_cells(device, family_key(problem), "graph-cold")
    assert cells and all(is_current(cell.kernel) for cell in cells)


# --- libraries


@pytest.fixture
def installed(facts: Snapshot, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Packages as they were where the rows come from, by name; one that is taken out is gone."""
    words = {word for row in facts.kernels for word in row.modules if word.startswith("package:")}
    here = dict(word.removeprefix("package:").split("==") for word in words)
    monkeypatch.setattr(libraries, "_version_here", here.get)
    monkeypatch.setattr(libraries, "_folder_version", here.get)
    return here


def choices(facts: Snapshot) -> dict[str, dispatcher.Choice]:
    """The choices of dispatch for large square layers, where libraries are fastest, by problem."""
    dispatcher.use_snapshot(facts)
    found = {}
    (device,) = facts.devices
    for case in SUITES["lrm"].cases(device):
        problem = case.problem
        if problem.op == "gemm" and problem.m <= 8192 and problem.n == problem.k >= 2048:
            table = dispatcher.table_for(problem, ErrorBudget.of(0.06), device=H200)
            found[str(problem)] = dispatcher.Choice(table, problem.m)
    return found


def test_rows_of_libraries_are_shipped(facts: Snapshot) -> None:
    timed = {name.rpartition("+")[2].partition(".")[0] for name, *_ in facts.timing_outcomes()}
    assert timed >= {"fbgemm", "torchao", "deep_gemm", "cublaslt"}


@pytest.mark.rest
def test_removing_a_library_changes_only_choices(
    installed: dict[str, str], facts: Snapshot
) -> None:
    whole = choices(facts)
    lost = Counter[str]()
    timed = [one for one in libraries.LIBRARIES.values() if one.here is not None]
    for library in timed:
        packages = {one.name: installed.pop(one.name, "") for one in library.packages}
        for problem, choice in choices(facts).items():
            before = whole[problem]
            assert library.name not in KERNELS[choice.kernel].libraries
            if library.name in KERNELS[before.kernel].libraries:
                lost[library.name] += 1
                assert choice.kernel != before.kernel
                assert "is not installed" in choice.rejected[before.kernel]
            else:
                assert choice.kernel == before.kernel
            assert not choice.errors or choice.errors["row_err"] <= 0.06
        installed.update({name: version for name, version in packages.items() if version})
    assert set(lost) == {"fbgemm", "deep_gemm"}, "whom dispatch takes somewhere"


def test_errors_hardly_depend_on_n_where_dispatch_says_so(path: Path) -> None:
    """`ERRORS_ELSEWHERE` covers every two that were measured, whichever stands for the other."""
    columns = [LIMIT_COLUMNS[limit] for limit in CARRIED]
    worst = ", ".join(f"max(e.{column})" for column in columns)
    form = "p.k, p.a, p.b, p.out_format, k.granularity, k.b_granularity, k.accumulation"
    query = (
        f"select {form}, d.name, p.n, {worst} from accuracy e join problem p on p.id = e.problem "
        "join kernel k on k.id = e.kernel join distribution d on d.id = e.distribution "
        f"where p.op = 'gemm' and p.n >= {WIDE} and e.status = 'ok' "
        f"and (k.granularity <> 'none' or p.n % {ALIGNMENT_OF_N} = 0) "
        f"group by {form}, d.name, p.n"
    )
    found: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
    with closing(sqlite3.connect(path)) as rows:
        for row in rows.execute(query):
            found.setdefault(row[:8], []).append(row[9:])
    several = [errors for errors in found.values() if len(errors) > 1]
    assert len(several) > 500
    for place, limit in enumerate(CARRIED):
        apart = max(
            max(e[place] for e in errors) / min(e[place] for e in errors) for errors in several
        )
        assert 1.0 < apart <= ERRORS_ELSEWHERE, limit


# --- an H100, and what two files give together

H100 = "NVIDIA H100 80GB HBM3"


def tower() -> torch.nn.Module:
    """A tower of layer norms without data, whose routes and chains are chosen all the same."""
    sizes = ((3200, 2048), (2048, 2048), (2048, 1024))
    with torch.device("meta"):
        layers = [(nn.Linear(k, n), nn.LayerNorm(n), nn.ReLU()) for k, n in sizes]
        return nn.Sequential(*chain.from_iterable(layers)).to(torch.bfloat16).eval()


@pytest.fixture
def every_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOKAKERN_DB", str(tmp_path / "none.sqlite"))
    dispatcher.use_snapshot(None)


def test_an_h100_has_times_of_its_own_and_the_errors_of_both_files(every_shipped: None) -> None:
    for m, n, k in ((8192, 4096, 4096), (8192, 2048, 2048)):
        found = {name: lokakern.dispatch("gemm", (m, n, k), 0.06, device=name)
                 for name in (H100, H200)}  # fmt: skip
        assert not any(choice.is_miss for choice in found.values())
        assert found[H100].latency_us != found[H200].latency_us
    dispatcher.use_snapshot(load_snapshot([H100_FILE]))
    alone = lokakern.dispatch("gemm", (8192, 4096, 4096), 0.06, device=H100)
    assert alone.kernel.startswith("cuda.quantize_together_row"), "its errors are in this file"


def test_one_name_stands_for_launches_that_are_equal(every_shipped: None) -> None:
    """With a prepared weight, kernels that quantize operands together launch what others do."""
    together = "cuda.quantize_together_row"
    for n in (2048, 4096):
        both, one = (
            lokakern.dispatch("gemm", (8192, n, n), 0.06, device=H100, prepared=prepared)
            for prepared in (False, True)
        )
        assert both.kernel.startswith(together), both.kernel
        assert not one.kernel.startswith(together), one.kernel
        told = {name: why for name, why in one.rejected.items() if name.startswith(together)}
        assert told and all("launches what cuda.quantize_row+" in why for why in told.values())


@pytest.mark.parametrize(("layout", "kernel"), [
    (Layout.ROW, "cuda.quantize_row"), (Layout.COLUMN, "cuda.quantize_together_row"),
])  # fmt: skip
def test_columns_of_a_size_without_times_are_quantized_in_one_launch(
    every_shipped: None, layout: Layout, kernel: str
) -> None:
    (device,) = (x for x in dispatcher.snapshot().devices if x.product == H100)
    x = Operand(Format.BFLOAT16, Granularity.NONE, layout, 16)
    problem = make_problem("quantize", (3333, 4111), a=x)
    pick = dispatcher.unquantized_table(problem, device).pick(problem.m)
    assert pick.name == kernel and "nothing was measured" in pick.note


@pytest.mark.rest
def test_layers_with_norms_are_chains_by_errors_that_an_h100_measured(
    every_shipped: None,
) -> None:
    """Errors belong to the architecture: those of the H100 admit chains of the H200's times."""
    convert = functools.partial(
        lokakern.convert, report_or_budget=0.06, inference=True, regime="compiled-graph"
    )
    for device in (H100, H200):
        handle = convert(tower(), device=device)
        assert any(span.plan.chains for span in handle.spans), device
    dispatcher.use_snapshot(load_snapshot([H200_FILE]))
    handle = convert(tower(), device=H200)
    assert not any(span.plan.chains for span in handle.spans)
