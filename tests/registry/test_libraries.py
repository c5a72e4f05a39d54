"""Plugins and libraries: usable ones are loaded, and broken ones are named and stop nothing."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from lokakern import numerics
from lokakern.bench.cli import sweep
from lokakern.bench.cli.main import app
from lokakern.bench.report import library_smoke, listing
from lokakern.build.prebuild import load_interpreted
from lokakern.device import current_device
from lokakern.errors import UnknownNameError
from lokakern.measure.time_problem import check_case
from lokakern.problems import make_problem
from lokakern.registry import digests, libraries, register
from lokakern.registry.libraries import LIBRARIES, Library, Package, Trial
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.registry.schema.records import KernelRow
from lokakern.registry.staleness import is_current
from lokakern.types import (
    ACCEPTED,
    Accepted,
    Device,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    Rejected,
)
from lokakern.workloads.distributions import learned
from lokakern.workloads.edge_values import POSITIVE
from lokakern.workloads.gemm_cases import Case, scaled_gemm_cases

load_kernels()
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "tests" / "fixtures" / "example_plugin"
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
KERNEL = """
import ctypes
from lokakern import register
from lokakern.types import ACCEPTED, Rejected

def supports(problem, device):
    return Rejected("takes tensors") if problem.prepared else ACCEPTED

@register("gemm", accumulation="float32", supports=supports)
def multiply(a, b, out, bias, workspace):
    {body}
"""
RIGHT = "out.copy_(a.float() @ b.float() + (0 if bias is None else bias.float()))"
# Modules of plugins that are broken, each in its own way, and what is said of each.
BROKEN = {
    "no_such_import": ("import a_module_that_is_not_there", "ModuleNotFoundError: No module named"),
    "dies_imported": ("import ctypes\nctypes.string_at(8)", "killed by SIGSEGV when it was"),
    "exits_imported": ("import sys\nsys.exit('goodbye')", "SystemExit: goodbye"),
    "twice": (KERNEL.format(body="pass") + "register('gemm', name='multiply')(multiply)",
              "ValueError: kernel 'twice.multiply' is registered twice"),
}  # fmt: skip
FAULTY = {
    "dies_launched": (
        "ctypes.string_at(8)",
        "the process was killed by SIGSEGV when dies_launched.multiply was launched at gemm m=",
    ),
    "exits_launched": (
        "raise SystemExit(3)",
        "SystemExit: 3 (exits_launched.py, line 11) at gemm m=",
    ),
    "is_wrong": ("out.zero_()", "multiply: wrong: "),
}


def put(folder: Path, name: str, text: str, version: str = "1.0", module: str = "") -> None:
    """A distribution with a plugin, as an installer leaves it."""
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    facts = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (facts / "entry_points.txt").write_text(f"[lokakern.kernels]\n{name} = {module or name}\n")


Run = Callable[..., subprocess.CompletedProcess[str]]


def runner(folder: Path, paths: list[Path]) -> Run:
    """Python with plugins on its path, and a cache and a database of its own."""

    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *paths])),
            "LOKAKERN_CACHE": str(folder / "cache"),
            "LOKAKERN_DB": str(folder / "user.sqlite"),
        }
        ran = subprocess.run([sys.executable, *words], cwd=folder, env=environment, text=True,
                             capture_output=True, timeout=1800, check=False)  # fmt: skip
        assert ran.returncode == code, f"{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
        return ran

    return run


LIST = ("-m", "lokakern.bench", "list", "libraries", "--json")
SWEEP = ("-m", "lokakern.bench", "sweep", "--shape", "16,64,64", "--grade", "quick", "--errors",
         "none", "--quiet", "--json")  # fmt: skip


def libraries_listed(run: Run, code: int = 0) -> dict[str, dict[str, Any]]:
    return {row["library"]: row for row in json.loads(run(*LIST, code=code).stdout)}


@pytest.mark.rest
def test_a_plugin_is_tried_then_measured_then_chosen(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
           "--disable-pip-version-check", "--target", installed, tmp_path / "source"]  # fmt: skip
    source = tmp_path / "source"
    source.mkdir()
    for path in EXAMPLE.iterdir():  # building leaves files beside the source
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    subprocess.run(pip, check=True, capture_output=True)
    run = runner(tmp_path, [installed])
    program = """if True:
        import torch, lokakern
        from lokakern.registry.register import KERNELS, load_kernels
        print(load_kernels().get("plugin example"))
        kernel = KERNELS.get("lokakern_example.float32_gemm")
        if kernel is not None:
            print(kernel.library, *kernel.modules)
            print(lokakern.dispatch("gemm", (16, 64, 64), 0.001).rejected.get(kernel.name))
        x = torch.ones(16, 64).bfloat16()
        print(lokakern.gemm(x, x.t())[0, 0].item())
    """
    before = run("-c", program).stdout.splitlines()
    assert before[0].startswith("example was never tried here: python -m lokakern.bench list")
    assert before[1:] == ["64.0"]
    (row,) = (row for row in json.loads(run(*LIST[:-2], "kernels", "--json").stdout)
              if row["kernel"] == "(plugin example)")  # fmt: skip
    assert row["state"] == "untried" and row["why"].endswith(libraries.TRY)
    listed = libraries_listed(run)["example"]
    assert (listed["state"], listed["version"], listed["kind"]) == ("usable", "1.2.0", "plugin")
    assert (listed["package"], listed["kernels"], listed["won"]) == ("lokakern-example", 1, 0)
    words = ["example python:lokakern_example package:lokakern-example==1.2.0", "not measured here"]
    assert run("-c", program).stdout.splitlines() == ["None", *words, "64.0"]
    swept = run(*SWEEP, "--kernel", "lokakern_example", "--kernel", "torch.bf16")
    assert "trying" not in swept.stderr  # once is enough
    times = {(row["problem"], row["kernel"]): row["time us"] for row in json.loads(swept.stdout)}
    races = [(us, times[problem, "torch.bf16"]) for (problem, name), us in times.items()
             if name == "lokakern_example.float32_gemm"]  # fmt: skip
    assert races and all(us > 0 for us, _ in races)
    explain = ("-m", "lokakern.bench", "explain", "gemm", "16", "64", "64")
    assert "plugin left out" not in run(*explain).stdout
    elsewhere = ("--device", "NVIDIA H200", "--json")
    unmeasured = "example: lokakern_example.float32_gemm does not take it: is for CPUs"
    assert json.loads(run(*explain, *elsewhere).stdout)["left_out"] == [unmeasured]
    module = installed / "lokakern_example.py"
    module.write_text(module.read_text() + "\nANOTHER = 1\n")
    changed = f"example changed since it was tried: {libraries.TRY}"
    assert run(*explain).stdout.splitlines()[-1] == f"  plugin left out: {changed}"
    assert json.loads(run(*explain, *elsewhere).stdout)["left_out"] == [changed]
    assert (
        json.loads(run(*explain, "--json").stdout)["rejected"]["lokakern_example.float32_gemm"]
        == changed
    )


@pytest.mark.rest
def test_broken_plugins_are_named_and_stop_nothing(tmp_path: Path) -> None:
    for name, (text, _) in BROKEN.items():
        put(tmp_path, name, text)
    for name, (body, _) in FAULTY.items():
        second = KERNEL.format(body=RIGHT).partition("@register")[2].replace("multiply", "second")
        put(tmp_path, name, f"{KERNEL.format(body=body)}\n@register{second}")
    put(tmp_path, "hyphen-name", "", module="hyphen-name")
    put(tmp_path, "works", KERNEL.format(body=RIGHT))
    run = runner(tmp_path, [tmp_path])
    ones = "x = torch.ones(16, 64).bfloat16()"
    program = f"import torch, lokakern; {ones}; print(lokakern.gemm(x, x.t())[0, 0].item())"
    one = run(*LIST, "--only", "works")
    assert [row["library"] for row in json.loads(one.stdout)] == ["works"]
    lines = one.stderr.splitlines()
    assert lines[0].startswith("trying works: ") and lines[1].startswith("  works.multiply: gemm m")
    assert "'nothing' is unknown; expected one of" in run(*LIST, "--only", "nothing", code=2).stderr
    found = libraries_listed(run, code=5)
    for state, expected in (("broken", BROKEN), ("partly", FAULTY)):
        for name, (_, words) in expected.items():
            assert (found[name]["state"], words in found[name]["why"]) == (state, True), found[name]
    assert found["works"]["state"] == "usable"
    assert found["hyphen-name"]["state"] == "broken"
    assert all("second" not in found[name]["why"] for name in FAULTY)  # it is right
    at = "at gemm m=256 n=256 k=256 a=bfloat16 b=bfloat16 out=bfloat16: a [256, 256], b [256, 256]"
    assert at in found["is_wrong"]["why"]
    swept = run(*SWEEP, "--kernel", "multiply")
    assert "trying" not in swept.stderr  # what was tried is not tried again
    rows = json.loads(swept.stdout)
    assert {(row["kernel"], row["status"]) for row in rows} == {("works.multiply", "ok")}, rows
    assert run("-c", program).stdout == "64.0\n"


@pytest.mark.rest
def test_plugins_that_pass_their_trial_and_break_later_stop_nothing(tmp_path: Path) -> None:
    working = KERNEL.format(body=RIGHT)
    late = "    if problem.m == 17:\n        raise RuntimeError('not 17')\n    return Rejected"
    texts = {
        "brackets": "raise ValueError('[/bold]')",
        "unprintable": "raise ValueError('a \\ud800 b')",
        "reads_arguments": "import argparse\nargparse.ArgumentParser().parse_args()\n" + working,
        "raises_at_17": working.replace("    return Rejected", late),
        "names_no_epilogues": working.replace("supports=supports", "epilogues=None"),
        "named_as_ours": working,
    }
    for name, text in texts.items():
        put(tmp_path, name, text)
    put(tmp_path, "nameless", working)
    (tmp_path / "nameless-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\n")
    entry = tmp_path / "named_as_ours-1.0.dist-info" / "entry_points.txt"
    entry.write_text("[lokakern.kernels]\ncuda = named_as_ours\n")
    run = runner(tmp_path, [tmp_path])
    table = run("-m", "lokakern.bench", "list", "libraries", code=5).stdout
    assert "ValueError: [/bold]" in table and "ValueError: a   b" in table
    assert "ValueError: epilogues is None; expected a set of names" in table
    found = libraries_listed(run, code=5)
    assert found["raises_at_17"]["state"] == "usable"
    assert found["reads_arguments"]["why"] == "SystemExit: 2"  # it was right when it was tried
    assert found["nameless"]["state"] == "not installed" and "cuda" not in found
    program = """if True:
        import torch, lokakern
        x = torch.ones(17, 64).bfloat16()
        print(lokakern.gemm(x, x.t(), budget=0.001)[0, 0].item())
        print(lokakern.dispatch("gemm", (17, 17, 64), 0.001).rejected["raises_at_17.multiply"])
    """
    lines = run("-c", program, "--epochs", "3").stdout.splitlines()
    assert lines == ["64.0", "cannot say whether it takes it: RuntimeError: not 17"]


@pytest.mark.rest
def test_silence_ends_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = tmp_path / "asleep"
    program = f"""
        import pathlib, time
        print("good night", flush=True)
        pathlib.Path({str(asleep)!r}).touch()
        while True:
            time.sleep(60)
    """
    put(tmp_path, "sleeps", program)
    monkeypatch.syspath_prepend(str(tmp_path))  # the process finds what this one would
    clock = SimpleNamespace(monotonic=lambda: 12.5 if asleep.exists() else 0.0)
    monkeypatch.setattr(library_smoke, "time", clock)
    sleeps = Library(name="sleeps", packages=(Package("sleeps", "", ("sleeps",)),), is_plugin=True)
    trial = library_smoke._try(sleeps, 12, print)
    assert trial.why.startswith("no sign of life for 12 s when it was imported: good night")


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("word", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_a_trial_ends_with_the_process_that_asked_for_it(tmp_path: Path, word: str) -> None:
    begun = tmp_path / "begun"
    program = f"""
        import os, pathlib, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        written = pathlib.Path({str(tmp_path / "written")!r})
        written.write_text(f"{{os.getpid()}} {{child.pid}}")
        written.rename({str(begun)!r})
        while True:
            pass
    """
    put(tmp_path, "spins", program)
    code = """if True:
        from lokakern.bench.report import library_smoke
        from lokakern.registry import libraries
        library_smoke._try(libraries.named("spins"), 300, print)
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, tmp_path]))}
    asking = subprocess.Popen([sys.executable, "-c", code], env=environment,
                              stderr=subprocess.DEVNULL)  # fmt: skip
    wait_until(begun.exists)
    asking.send_signal(getattr(signal, word))
    assert asking.wait(60) != 0
    for process in map(int, begun.read_text().split()):
        wait_until(lambda process=process: has_ended(process))


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def has_ended(process: int) -> bool:
    """Whether a process that need not be a child is gone, or waits for its parent to notice."""
    ran = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True,
                         check=False)  # fmt: skip
    return ran.stdout.strip()[:1] in ("", "Z")


# --- what counts where


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Library:
    """One whose version is that of pytest, with no trial kept."""
    monkeypatch.setenv("LOKAKERN_CACHE", str(tmp_path / "cache"))
    packages = (Package("not-there", ">=1", ()), Package("pytest", ">=8", ("pytest",)))
    found = Library(
        name="some", packages=packages, never_run="there is no such GPU", is_plugin=True
    )
    monkeypatch.setitem(LIBRARIES, "some", found)
    return found


def kernel_of(library: Library) -> Kernel:
    return Kernel(
        name="some.kernel", op="gemm", language="some", modules=("compositions", *library.words),
        launch=print, architectures=frozenset({"any"}), library=library.name,
    )  # fmt: skip


def reason(kernel: Kernel, device: Device) -> str | None:
    answer = kernel.supports(make_problem("gemm", (16, 64, 64)), device)
    return answer.reason if isinstance(answer, Rejected) else None


def test_a_kernel_counts_where_its_library_was_tried(library: Library) -> None:
    kernel, here = kernel_of(library), current_device()
    assert library_smoke.state_of(library, here) == (
        "untried",
        f"it was never tried here: {libraries.TRY}; written, never run: there is no such GPU",
    )  # fmt: skip
    assert reason(kernel, here) == f"some was never tried here: {libraries.TRY}"
    assert reason(kernel, H200) is None  # elsewhere nothing was tried
    libraries.keep_trial(library, here, Trial())
    assert reason(kernel, here) is None and library_smoke.state_of(library, here)[0] == "usable"
    libraries.keep_trial(library, here, Trial("", {"some.kernel": "wrong: 9 > 1"}))
    assert reason(kernel, here) == "wrong: 9 > 1"
    assert library_smoke.state_of(library, here) == ("broken", "some.kernel: wrong: 9 > 1")
    libraries.keep_trial(library, here, Trial("", {"some.kernel": "wrong: 9 > 1"}, right=1))
    assert library_smoke.state_of(library, here) == ("partly", "some.kernel: wrong: 9 > 1")
    libraries.keep_trial(library, here, Trial(right=1, idle={"some.kernel": "no FP8 (gemm m=1)"}))
    assert reason(kernel, here) is None  # a sweep tells whether it is right where it takes some
    assert library_smoke.state_of(library, here) == (
        "usable",
        "tried: it imports, and 1 of its kernels was right; some.kernel: no FP8 (gemm m=1)",
    )
    libraries.keep_trial(library, here, Trial("OSError: undefined symbol"))
    assert reason(kernel, here) == "OSError: undefined symbol"
    assert library_smoke.state_of(library, here) == ("broken", "OSError: undefined symbol")


def test_another_version_is_tried_again(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    here = current_device()
    libraries.keep_trial(library, here, Trial())
    monkeypatch.setattr(
        libraries, "_version_here", lambda name: "9.9" if name == "pytest" else None
    )
    assert libraries.trial_of(library, here) is None
    libraries.keep_trial(library, here, Trial("broken since"))
    monkeypatch.undo()


def test_what_changed_since_its_trial_is_called_so(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, here = kernel_of(library), current_device()
    libraries.keep_trial(library, here, Trial())
    assert not libraries.is_changed(library, here)
    monkeypatch.setattr(libraries, "_state_of", lambda _library: "another")
    assert libraries.is_changed(library, here)
    assert reason(kernel, here) == f"some changed since it was tried: {libraries.TRY}"
    state, why = library_smoke.state_of(library, here)
    assert (state, why.partition(";")[0]) == (
        "changed, untried", f"it changed since it was tried: {libraries.TRY}"
    )  # fmt: skip
    monkeypatch.setattr(library_smoke, "known", lambda: [library])
    assert library_smoke.untried(here) == library_smoke.doubtful(here) == [library]
    libraries.keep_trial(library, here, Trial())
    assert not libraries.is_changed(library, here) and reason(kernel, here) is None
    assert not libraries.is_changed(library, H200)  # where it was never tried


def test_a_trial_in_the_interpreter_holds_only_there(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = current_device()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    libraries.keep_trial(library, here, Trial())
    assert libraries.trial_of(library, here) == Trial()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert libraries.trial_of(library, here) is None
    words = "was tried in the interpreter only: set TRITON_INTERPRET=1"
    state, why = library_smoke.state_of(library, here)
    assert (state, why.partition(";")[0]) == ("untried", f"it {words}")  # not "changed"
    assert reason(kernel_of(library), here) == f"some {words}"
    libraries.keep_trial(library, here, Trial(right=1))
    assert libraries.trial_of(library, here) == Trial(right=1)


def test_prebuild_says_that_a_plugin_failed_in_the_interpreter(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "plugins", lambda: {"some": library})
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    libraries.keep_trial(library, current_device(), Trial("registers no kernel"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    load_interpreted()  # imports nothing
    assert sweep._why_none([], H200, ["some."]) == (
        "plugin some was tried in the interpreter only: try it on NVIDIA H200; "
    )


def test_a_part_of_a_name_means_a_plugin_that_changed(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels are not imported, so their names are unknown; that of its module is pytest."""
    monkeypatch.setattr(libraries, "plugins", lambda: {"some": library})
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    libraries.keep_trial(library, current_device(), Trial(right=1))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not libraries.is_changed(library, current_device())
    monkeypatch.setattr(libraries, "_state_of", lambda _library: "another")
    way = "" if current_device().is_gpu else "TRITON_INTERPRET=1 "
    words = f"changed since it was tried: {way}{libraries.TRY}; "
    for word in ("pytes", "pytest.kernel", "some"):
        assert sweep._why_none([], H200, [word]) == f"plugin some {words}"
    assert sweep._why_none([], H200, ["torch.bf61"]) == ""
    state, why = library_smoke.state_of(library, current_device())
    row = {"kernel": "(plugin some)", "state": state, "why": why}
    with pytest.raises(UnknownNameError, match="plugin some is changed, untried: it changed since"):
        listing.kernels_named("pytes", [row])


def test_prebuild_tells_why_a_kernel_takes_none_of_the_problems_with_its_scales(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "trying", "some")
    kernel = replace(
        kernel_of(library), op="scaled_gemm", granularity=Granularity.ROW,
        b_granularity=Granularity.ROW, supports_problem=lambda *_: Rejected("another format"),
    )  # fmt: skip
    monkeypatch.setitem(KERNELS, kernel.name, kernel)
    cases = [*scaled_gemm_cases(64, 64, 64, "X1", Format.E4M3FN)]  # by tensor first
    words = f"{kernel.name}: another format (scaled_gemm m=64 n=64 k=64 a=e4m3fn/row "
    assert sweep._why_none(cases, current_device(), [kernel.name]).startswith(words)


@pytest.mark.parametrize("name", ["AMD Instinct MI300X", "mi300x", "NVIDIA B200", "NVIDIA H200"])
def test_kernels_are_compiled_for_gpus_that_nobody_measured(name: str) -> None:
    assert name.upper().split()[-1] in sweep._compiled_for(name).product


def breaking(rule: str) -> Callable[..., None]:
    """A launcher of quantizers that keeps all rules of the contract but one."""

    def launch(x: Tensor, data: Tensor, scale: Tensor, _workspace: tuple[()]) -> None:
        wide = x.float()
        finite = wide.isfinite()
        counted = finite | (rule == "finite amax")
        amax = torch.where(counted, wide.abs(), 0.0).amax(dim=1, keepdim=True)
        exact = amax / torch.full_like(amax, Format.of(data.dtype).maximum)
        if rule != "least scale":
            exact = exact.clamp_min(2.0**-126)
        scale.copy_(exact if rule == "zero amax" else torch.where(amax == 0, 1.0, exact))
        numerics.cast(torch.where(finite | (rule == "infinity"), wide / scale, math.nan), data)

    return launch


@pytest.mark.parametrize("rule", ["", "zero amax", "finite amax", "infinity", "least scale"])
def test_quantizers_of_plugins_are_tried_on_zeros_nan_infinity_and_tiny_values(
    library: Library, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setattr(libraries, "trying", "some")
    of_rows = lambda problem, _device: (  # noqa: E731
        ACCEPTED if problem.out_granularity is Granularity.ROW else Rejected("scales of rows")
    )
    kernel = replace(
        kernel_of(library), op="quantize", launch=breaking(rule), supports_problem=of_rows
    )
    told: list[str] = []
    outcome = library_smoke._outcome_of(kernel, told.append)
    fnuz = [] if current_device().is_gpu else ["e4m3fnuz", "e5m2fnuz"]
    assert len(told) == {"": 11 + len(fnuz), "least scale": 6}.get(rule, 4)
    if not rule:
        also = ", ".join(["float32 x", "column-major x", "e5m2", *fnuz])
        words = f"(to m=520, k=5000; also {also}; not tried: x strided along both axes)"
        assert outcome == f"{library_smoke.RIGHT} {words}"
        return
    values = "tiny values and an infinity" if rule == "least scale" else "rows of zeros, NaN"
    words = "quantize m=67 k=200 a=bfloat16 out=e4m3fn/row with "
    assert outcome.startswith("wrong: ") and words + values in outcome, outcome


def taking(op: str, scales: Granularity) -> Callable[..., Accepted | Rejected]:
    """What a kernel supports: one op, row-major by column-major, with these scales."""

    def supports(problem: Problem, _device: Device) -> Accepted | Rejected:
        usual = problem.a.layout is Layout.ROW and (
            problem.b is None or problem.b.layout is Layout.COLUMN
        )
        granularity = problem.out_granularity if problem.b is None else problem.a.granularity
        if problem.op != op or not usual or problem.prepared or granularity is not scales:
            return Rejected("another problem")
        return ACCEPTED

    return supports


def bfloat16_sums(left: Tensor, right: Tensor) -> Tensor:
    """A product whose sums are rounded to bfloat16 every 128 of k."""
    sums = torch.zeros(len(left), right.shape[1])
    for start in range(0, left.shape[1], 128):
        within = slice(start, start + 128)
        sums = (sums + left[:, within] @ right[within]).bfloat16().float()
    return sums


def tensor_core_sums(left: Tensor, right: Tensor, promoted_every: int) -> Tensor:
    """A product as by an FP8 tensor core of Hopper.

    32 products and the running sum are lined up with the largest and cut at 14 bits; float32 takes
    over after so many of k.
    """
    sums = running = torch.zeros(len(left), right.shape[1], dtype=torch.float64)
    for start in range(0, left.shape[1], 32):
        products = left[:, start : start + 32, None] * right[None, start : start + 32]
        terms = torch.cat([running[:, None], products.double()], 1)
        last_bit = torch.exp2(terms.abs().amax(1, keepdim=True).log2().floor() - 13)
        running = ((terms / last_bit).trunc() * last_bit).sum(1)
        if (start + 32) % promoted_every == 0:
            sums, running = (sums + running).float().double(), torch.zeros_like(running)
    return (sums + running).float()


@pytest.mark.parametrize("out_format", [Format.FLOAT32, Format.BFLOAT16])
@pytest.mark.parametrize(
    ("product", "status"),
    [
        (functools.partial(tensor_core_sums, promoted_every=128), "ok"),
        (functools.partial(tensor_core_sums, promoted_every=1 << 14), "wrong"),
        (bfloat16_sums, "wrong"),
    ],
    ids=["promoted", "never promoted", "bfloat16"],
)
def test_sums_of_positive_values_tell_promoted_ones_from_others(
    library: Library, product: Callable[..., Tensor], status: str, out_format: Format
) -> None:
    def launch(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor,
               _bias: None, _workspace: tuple[()]) -> None:  # fmt: skip
        out.copy_(product(a.float(), b.float()) * a_scale * b_scale)

    kernel = replace(
        kernel_of(library), op="scaled_gemm", launch=launch,
        granularity=Granularity.ROW, b_granularity=Granularity.ROW, accumulation="promoted",
        kernel_err_bound=register.PROMOTED_KERNEL_ERR_BOUND,
    )  # fmt: skip
    case = Case.of(
        "scaled_gemm", library_smoke.SUMMED["scaled_gemm"][0], POSITIVE.name,
        a=Operand(Format.E4M3FN, Granularity.ROW), out_format=out_format,
    )  # fmt: skip
    judged = library_smoke._within_trial_bound(kernel, case, H200)
    with learned(POSITIVE):
        record = check_case(case, judged, current_device())
    assert record.status == status, record.reason


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("", ""),
        ("out", "out=bfloat16/strided with gaps between rows of out"),
        ("a", "without gaps between rows of a"),
        ("b", "without gaps between columns of b"),
        ("gaps", "writes 67 elements outside of out [67, 90], the first at row 0, column 90 at"),
        ("long k", "at scaled_gemm m=35 n=40 k=4100"),
        ("many rows", "at scaled_gemm m=2100 n=24 k=40"),
        ("many tiles", "only rows from 512 of 700, past the last whole 256; only columns"),
        ("float32 out", "all are bfloat16 numbers, as if rounded before they are written at"),
        ("bfloat16 sums", " %: sums or scales are rounded, or products left out at"),
        (
            "drift",
            "at scaled_gemm m=16 n=24 k=16384 a=e4m3fn/row b=e4m3fn/row out=float32 with "
            "positive values: a [16, 16384]",
        ),
        ("e5m2", "a=e5m2/row b=e4m3fn/row bias out=bfloat16: a ["),
        ("row", "writes 256 elements outside of out [256, 256], the first at row 256, column 0"),
    ],
)
def test_scaled_gemms_of_plugins_are_tried_on_all_strides(
    library: Library, monkeypatch: pytest.MonkeyPatch, rule: str, words: str
) -> None:
    monkeypatch.setattr(libraries, "trying", "some")

    def launch(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor,
               bias: Tensor | None, _workspace: tuple[()]) -> None:  # fmt: skip
        (m, k), n = a.shape, b.shape[1]
        pitch = -(-k // 16) * 16  # as rows begin in what lokakern allocates
        left, right = a.float(), b.float()
        if rule == "a" and a.stride(0) != pitch:
            left = left.roll(1, 0)
        if rule == "b" and b.stride(1) != pitch:
            right = right.roll(1, 1)
        if rule == "long k":
            left = left[:, :4096]
        if rule == "bfloat16 sums" or (rule == "drift" and k > 8192):
            wide = bfloat16_sums(left, right) * a_scale * b_scale
        else:
            wide = left @ right[: left.shape[1]] * a_scale * b_scale
        if rule == "many rows":
            wide[2048:] = 0
        if rule == "many tiles":
            wide[512:, 512:] = 0
        if rule == "e5m2" and a.dtype is torch.float8_e5m2:
            wide = a.view(torch.float8_e4m3fn).float() @ right * a_scale * b_scale
        target = out.as_strided((m, n), (n, 1)) if rule == "out" else out
        target.copy_(wide if bias is None else wide + bias.float())
        if rule == "float32 out":
            target.copy_(target.bfloat16())
        begin, stride = out.storage_offset(), out.stride()
        if rule == "gaps" and stride[0] > n:
            out.as_strided((m, 1), stride, begin + n).zero_()
        if rule == "row":
            out.as_strided((1, n), stride, begin + m * stride[0]).zero_()

    kernel = replace(
        kernel_of(library), op="scaled_gemm", launch=launch,
        granularity=Granularity.ROW, b_granularity=Granularity.ROW, accumulation="promoted",
        kernel_err_bound=register.PROMOTED_KERNEL_ERR_BOUND,
        supports_problem=taking("scaled_gemm", Granularity.ROW),
    )  # fmt: skip
    outcome = library_smoke._outcome_of(kernel, lambda _: None)
    if rule:
        assert outcome.startswith("wrong: ") and words in outcome, outcome
    else:
        assert outcome.startswith(library_smoke.RIGHT)


@pytest.mark.parametrize("rule", ["", "out", "a", "b"])
def test_gemms_of_plugins_are_tried_on_slices(
    library: Library, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setattr(libraries, "trying", "some")

    def launch(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, _workspace: Any) -> None:
        (m, k), n = a.shape, b.shape[1]
        left = a.as_strided((m, k), (k, 1)) if rule == "a" else a
        right = b.as_strided((k, n), (1, k)) if rule == "b" else b
        target = out.as_strided((m, n), (n, 1)) if rule == "out" else out
        target.copy_(left.float() @ right.float() + (0 if bias is None else bias.float()))

    kernel = replace(
        kernel_of(library), launch=launch, supports_problem=taking("gemm", Granularity.NONE)
    )
    outcome = library_smoke._outcome_of(kernel, lambda _: None)
    expected = f" of {rule}: a [" if rule else library_smoke.RIGHT
    assert expected in outcome, outcome


@pytest.mark.parametrize(
    "rule", ["float32", "strides", "gaps", "scale", "long", "many", "e5m2", "turned"]
)
def test_quantizers_of_plugins_are_tried_on_float32_and_slices(
    library: Library, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setattr(libraries, "trying", "some")

    def launch(x: Tensor, data: Tensor, scale: Tensor, _workspace: tuple[()]) -> None:
        if rule == "float32" and x.dtype is not torch.bfloat16:
            raise TypeError("not bfloat16")
        read = x.as_strided(x.shape, (x.shape[1], 1)) if rule == "strides" else x
        breaking("")(read, data, scale, ())
        if rule == "e5m2" and data.dtype is torch.float8_e5m2:
            data.copy_(x.float() / scale.mul_(57344 / 448))  # as if it wrote e4m3fn
        if rule == "turned" and x.stride(1) != 1:
            breaking("")(x.as_strided(x.shape, (1, 1)), data, scale, ())
        if rule == "long":
            data.view(torch.uint8)[:, 4096:] = 0
        if rule == "many":
            data.view(torch.uint8)[512:] = 0
        if rule == "gaps":  # between rows of FP8 data they are lokakern's own
            data.as_strided((len(x), data.stride(0)), data.stride()).view(torch.uint8)[
                :, x.shape[1] :
            ] = 0
        if rule == "scale":
            scale.as_strided((1,), (1,), scale.storage_offset() + len(x)).zero_()

    by_row = taking("quantize", Granularity.ROW)
    turns = lambda problem, device: (  # noqa: E731
        by_row(replace(problem, a=replace(problem.a, layout=Layout.ROW)), device)
    )
    kernel = replace(
        kernel_of(library), op="quantize", launch=launch,
        supports_problem=turns if rule == "turned" else by_row,
    )  # fmt: skip
    outcome = library_smoke._outcome_of(kernel, lambda _: None)
    words = {
        "float32": "TypeError: not bfloat16 at quantize m=67 k=200 a=float32",
        "long": ", column 4096: 0, not ",
        "many": "at quantize m=520 k=40",
        "scale": "writes 1 element outside of scale [256, 1], the first at row 256, column 0",
        "e5m2": "at quantize m=67 k=200 a=bfloat16 out=e5m2/row: x [67, 200]",
        "turned": "at quantize m=67 k=200 a=bfloat16/column-major/align2 out=e4m3fn/row",
        "strides": "a=bfloat16 out=e4m3fn/row with gaps between rows of x: x [67, 200]",
    }
    assert words.get(rule, library_smoke.RIGHT) in outcome, outcome


def test_a_gemm_that_quantizes_inside_is_told_to_declare_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "trying", "some")

    def launch(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, _workspace: Any) -> None:
        left, right = (
            numerics.dequantize(numerics.quantize(x, Format.E4M3FN, Granularity.ROW), torch.float32)
            for x in (a, b.t())
        )
        out.copy_(left @ right.t() + (0 if bias is None else bias.float()))

    kernel = replace(
        kernel_of(library), launch=launch, supports_problem=taking("gemm", Granularity.NONE)
    )
    hint = "(a gemm that quantizes inside declares it: granularity=Granularity.ROW) at gemm m="
    assert hint in library_smoke._outcome_of(kernel, lambda _: None)
    declared = replace(kernel, granularity=Granularity.ROW, b_granularity=Granularity.ROW)
    outcome = library_smoke._outcome_of(declared, lambda _: None)
    assert outcome == "right (to m=2100, n=600, k=8064; also float32)"


def test_a_trial_says_its_limit(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_smoke, "_try", lambda *_: Trial(right=1))
    told: list[str] = []
    library_smoke.try_all([library], told.append)
    seconds = 300 if current_device().is_gpu else 60
    assert told[0].endswith(f"in another process; each step takes at most {seconds} s")


@pytest.mark.parametrize(("state", "code"), [("usable", 0), ("partly", 5), ("broken", 5)])
def test_list_libraries_exits_with_5_where_a_kernel_of_a_plugin_failed(
    library: Library, monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    row = {"library": "some", "version": "1", "state": state, "won": 0, "why": ""}
    monkeypatch.setattr(library_smoke, "doubtful", lambda *_: [])
    monkeypatch.setattr(listing, "rows_of", lambda *_, **__: [row])
    command = ["list", "libraries"]
    assert CliRunner().invoke(app, command).exit_code == 0  # an adapter
    monkeypatch.setattr(libraries, "plugins", lambda: {"some": library})
    assert CliRunner().invoke(app, command).exit_code == code


def test_absent_and_unsuitable_libraries_are_reported() -> None:
    absent = Library(name="absent", packages=(Package("a-b", ">=1", ()), Package("c", "", ())))
    assert absent.words == ()
    assert absent.why_not_here() == "absent is not installed (pip install a-b or c)"
    assert library_smoke.state_of(absent, H200)[0] == "not installed"
    old = Library(name="old", packages=(Package("pytest", "<2", ()),))
    assert str(old.why_not_here()).startswith("written for pytest <2; ")
    assert library_smoke.state_of(old, H200)[0] == "unsuitable"


def test_a_folder_without_a_package_has_the_version_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "lies_here"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise OSError('imported')")
    versions = []
    for text in ("1", "1", "2"):
        (folder / "deep.py").write_text(text)
        libraries._folder_version.cache_clear()
        package = Package("lies-here", ">=7", ("lies_here",), or_folder=True)
        library = Library(name="lies", packages=(package,))
        assert library.here is not None and library.why_not_here() is None
        versions.append(library.here[1])
    assert versions[0] == versions[1] != versions[2] and versions[0].startswith("0+")
    (folder / "gone.py").symlink_to("nowhere")  # as editors leave them
    libraries._folder_version.cache_clear()
    assert library.here is not None and library.here[1] == versions[2]
    assert Library(name="x", packages=(replace(package, or_folder=False),)).here is None


def test_rows_of_another_version_are_stale(library: Library) -> None:
    kernel = kernel_of(library)
    (word,) = library.words
    row = KernelRow.of(kernel)
    assert is_current(row)

    def as_of(version: str) -> KernelRow:
        modules = ("compositions", f"package:{version}")
        return replace(row, modules=modules, digest=digests.kernel_digest(row.name, modules))

    assert as_of(word.removeprefix("package:")).digest == row.digest
    assert not is_current(as_of("pytest==0.1"))
    assert is_current(as_of("of-nobody==0.1"))  # measured elsewhere, and it holds there
    assert as_of("of-nobody==0.1").digest != as_of("of-nobody==0.2").digest


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"version": 2, "trials": {}}', '{"version": 1}', "[" * 100_000,
     '{"version": 1, "trials": []}',
     '{"version": 1, "trials": {"k": {"why": 1, "kernels": {}, "right": 1}}}',
     '{"version": 1, "trials": {"k": {"why": "", "kernels": {"a": []}, "right": 1}}}', "\0\xff",
     '{"version": 1, "trials": {"k": {"why": "' + "x" * 501 + '", "kernels": {}, "right": 1}}}',
     '{"version": 1, "trials": {"k": {"why": "", "kernels": {}, "right": true}}}',
     '{"version": 1, "trials": {"k": {"why": "", "kernels": {}, "right": 1, "idle": {"a": 1}}}}',
     '{"version": 1, "trials": {"k": {"why": "", "kernels": {}, "right": 1, "sizes": []}}}',
     " " * (libraries.LARGEST_FILE_BYTES + 1)],
)  # fmt: skip
def test_an_invalid_file_of_trials_is_ignored(library: Library, text: str) -> None:
    path = libraries.trials_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    here = current_device()
    assert libraries.trial_of(library, here) is None
    libraries.keep_trial(library, here, Trial())
    assert libraries.trial_of(library, here) == Trial()


def test_a_trial_of_before_idle_kernels_and_sizes_were_named_holds(library: Library) -> None:
    here = current_device()
    libraries.keep_trial(library, here, Trial(right=2))
    path = libraries.trials_file()
    stored = json.loads(path.read_text())
    for entry in stored["trials"].values():
        del entry["idle"], entry["sizes"]
    path.write_text(json.dumps(stored))
    libraries._trials.cache_clear()
    assert libraries.trial_of(library, here) == Trial(right=2)


def test_a_plugin_that_fails_leaves_no_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "half_a_plugin.py").write_text(KERNEL.format(body=RIGHT) + "\nraise OSError('x')")
    monkeypatch.syspath_prepend(str(tmp_path))
    package = Package("pytest", "", ("half_a_plugin",))
    half = Library(name="half", packages=(package,), is_plugin=True)
    before = dict(KERNELS)
    with pytest.raises(OSError, match="x"):
        register.import_plugin(half)
    assert before == KERNELS


def test_a_suitable_package_counts_before_another_that_is_there() -> None:
    old, new = Package("pytest", "<2", ()), Package("numpy", ">=1", ())
    found = Library(name="two", packages=(old, new))
    assert found.here is not None and found.here[0] is new and found.why_not_here() is None


def test_rows_of_the_package_that_is_not_called_here_are_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = Library(name="two", packages=(Package("not-there", "", ()), Package("pytest", "", ())))
    monkeypatch.setitem(LIBRARIES, "two", two)
    assert libraries.is_of_another("package:not-there==1.0")
    assert not libraries.is_of_another(two.words[0])
    assert not libraries.is_of_another("package:of-nobody==1.0")


def test_rows_of_another_version_are_stale_before_any_kernel_is_imported() -> None:
    """In a process of its own, whose package of cuBLAS is newer than that of the row."""
    program = """
import importlib.metadata
true = importlib.metadata.version
importlib.metadata.version = lambda name: "13.9" if name == "nvidia-cublas" else true(name)
from lokakern.registry.digests import kernel_digest
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.registry.schema.records import KernelRow
from lokakern.registry.staleness import is_current
name = "cublaslt.tensor_fast_2"
of_versions = [("adapters/cublaslt", f"package:nvidia-cublas=={x}") for x in ("13.1", "13.9")]
rows = [
    KernelRow(name, "scaled_gemm", "cublaslt", modules, kernel_digest(name, modules), "fast",
              "tensor", "tensor")
    for modules in of_versions
]
assert name not in KERNELS
before = [*map(is_current, rows)]
load_kernels()
print(before, [*map(is_current, rows)])
"""
    found = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    assert found.stdout.strip() == "[False, True] [False, True]", found.stderr


def test_a_plugin_is_identified_by_its_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = {
        name: Library(name=name, packages=(Package(name, "", (module,)),), is_plugin=True)
        for name, module in {"whole": "acme", "deep": "acme.deep.fp8", "other": "zeta.x"}.items()
    }
    monkeypatch.setattr(libraries, "plugins", lambda: named)
    for module, name in (
        ("acme", "whole"), ("acme.more", "whole"), ("acme.deep.fp8", "deep"), ("zeta.y", "other"),
        ("acmetwo", None), ("lokakern_example", None),
    ):  # fmt: skip
        found = libraries.plugin_of(module)
        assert (found and found.name) == name, module


def test_trials_that_cannot_be_stored_hold_for_the_process(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOKAKERN_CACHE", str(tmp_path / "file" / "under"))
    monkeypatch.setattr(libraries, "_unkept", {})
    libraries.keep_trial(library, current_device(), Trial("bad"))
    assert libraries.trial_of(library, current_device()) == Trial("bad")


def test_a_miss_never_selects_a_kernel_of_a_library(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a miss the first kernel that accepts is taken: by name it would be this one."""
    from lokakern.registry.snapshot.loading import load_snapshot
    from lokakern.selection import dispatcher

    kernel = replace(kernel_of(library), name="a.kernel", op="scaled_gemm")
    monkeypatch.setitem(KERNELS, kernel.name, kernel)
    libraries.keep_trial(library, current_device(), Trial())
    problem = {"a": Operand(Format.E4M3FN, Granularity.ROW),
               "b": Operand(Format.E4M3FN, Granularity.ROW, Layout.COLUMN)}  # fmt: skip
    dispatcher.use_snapshot(load_snapshot([]))
    try:
        choice = dispatcher.dispatch("scaled_gemm", (16, 64, 64), None, **problem)
    finally:
        dispatcher.use_snapshot(None)
    assert isinstance(kernel.supports(choice.problem, current_device()), Accepted)
    assert choice.kernel == "torch.emulated_row"


def test_a_plugin_lowers_no_coverage_elsewhere_nor_where_its_trial_failed(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coverage on an H200 counted kernels of plugins that nobody tried there as missing."""
    from lokakern.bench.report.coverage import Holdings, _Rows
    from lokakern.registry.snapshot.loading import load_snapshot

    kernel = kernel_of(library)
    monkeypatch.setitem(KERNELS, kernel.name, kernel)
    here, facts = current_device(), load_snapshot([])
    problem = make_problem("gemm", (16, 64, 64))

    def missing(device: Device) -> int:
        held = Holdings(facts, device)
        held._rows[problem], held._staleness.times[problem] = _Rows(), {}  # of other kernels
        lack = held._lack(problem)
        assert lack is not None
        return lack[0]

    def added(device: Device) -> int:
        with_it = missing(device)
        monkeypatch.delitem(KERNELS, kernel.name)
        without = missing(device)
        monkeypatch.setitem(KERNELS, kernel.name, kernel)
        return with_it - without

    assert added(here) == 0  # untried
    libraries.keep_trial(library, here, Trial("", {kernel.name: "wrong: 9 > 1"}))
    assert added(here) == 0
    libraries.keep_trial(library, here, Trial())
    assert (added(here), added(H200)) == (1, 0)


@pytest.mark.parametrize("way", ["", ", in the interpreter"])
def test_a_kernel_tried_on_a_cpu_only_is_listed_so(
    library: Library, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    kernel = kernel_of(library)
    monkeypatch.setitem(KERNELS, kernel.name, kernel)
    monkeypatch.setattr(libraries, "plugins", lambda: {"some": library})
    monkeypatch.setattr(listing, "load_kernels", dict)
    monkeypatch.setenv("TRITON_INTERPRET", "1" if way else "0")

    def listed() -> list[tuple[str, str, str]]:
        return [(row["architectures"], row["state"], row["why"])
                for row in listing.rows_of("kernels") if row["kernel"] == kernel.name]  # fmt: skip

    untried = listed()
    assert untried and {row[1:] for row in untried} == {("unmeasured", "never timed")}
    libraries.keep_trial(library, current_device(), Trial(right=1))
    where = current_device().product if current_device().is_gpu else "a CPU"
    why = f"tried on {where}{way}; never timed"
    assert listed() == [("any", "unmeasured", why)]
    assert listing.facts_of(kernel)[-1] == {"what": "on any", "value": f"unmeasured: {why}"}


def test_wins_are_of_medians_against_others() -> None:
    from lokakern.bench.report.listing import wins_of

    device = current_device()
    problem, alone = (make_problem("gemm", (m, 64, 64)) for m in (16, 32))
    cells = [
        SimpleNamespace(kernel=KernelRow.of(KERNELS[name]), problem=where, status=status,
                        latency_us_p50=us)
        for name, where, status, us in (
            ("torch.bf16", problem, "ok", 11.0), ("torch.fp32", problem, "ok", 20.0),
            ("torch.fp32", problem, "ok", 10.0), ("torch.fp32", problem, "ok", 21.0),
            ("torch.bf16", alone, "ok", 1.0),
        )
    ]  # fmt: skip
    facts: Any = SimpleNamespace(timings_on=lambda *_: cells)
    assert wins_of(facts, device) == {"": 1}
    cells.append(SimpleNamespace(kernel=cells[0].kernel, problem=alone, status="wrong"))
    assert wins_of(facts, device) == {}
