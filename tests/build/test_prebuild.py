"""Launches find all kernels compiled ahead of time, and failures do not stop a build."""

from __future__ import annotations

import json
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Hashable
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lokakern
from lokakern import jit, nvrtc
from lokakern.build import pool, prebuild
from lokakern.build.empty_operands import empty_operands
from lokakern.build.pool import BuildReport, Failure, build
from lokakern.build.prebuild import jobs_for
from lokakern.device import current_device
from lokakern.errors import BudgetError, DeviceError, ShapeError
from lokakern.kernels.adapters import deep_gemm, fbgemm
from lokakern.nvrtc import Program
from lokakern.problems import make_problem
from lokakern.progress import Progress
from lokakern.registry import libraries
from lokakern.registry.libraries import Library, Package
from lokakern.registry.register import (
    KERNELS,
    fp8_format,
    kernel_named,
    kernels_for,
    load_kernels,
)
from lokakern.selection import dispatcher
from lokakern.types import Device, Format, Granularity, Layout, Operand, Problem, Rejected
from lokakern.workloads.suite_files import suite_named
from lokakern.workloads.suites import gemm_cases

pytest.importorskip("triton", reason="needs Triton")
from lokakern.kernels.triton import quantize, scaled_gemm
from lokakern.triton_job import TritonJob

META = torch.device("meta")
ROOT = Path(__file__).resolve().parents[2]
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
MI300X = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)
MI355X = Device("amd", "AMD Instinct MI355X", "gfx950", 256, 288)
L4 = Device("nvidia", "NVIDIA L4", "sm_89", 58, 22)
DEVICES = [H200, Device("nvidia", "NVIDIA B200", "sm_100", 148, 180), L4, MI300X, MI355X]
ROW = "triton.quantize_row+triton.scaled_gemm_row"


def problems_of(suite: str, device: Device) -> list[Problem]:
    return list(dict.fromkeys(case.problem for case in suite_named(suite).cases(device)))


def triton_jobs(problems: list[Problem], device: Device) -> list[TritonJob]:
    load_kernels()
    kernels = [kernel for kernel in KERNELS.values() if "cuda." not in kernel.name]
    return jobs_for(problems, device, kernels)  # type: ignore[return-value]


def keys(jobs: list[Any]) -> set[Hashable]:
    return {job.key for job in jobs}


@pytest.mark.parametrize(
    ("suite", "device"),
    [*(("smoke", device) for device in DEVICES), ("anchors", H200), ("anchors", MI300X)],
    ids=str,
)
def test_jobs_of_every_triton_kernel_are_recorded(suite: str, device: Device) -> None:
    problems = problems_of(suite, device)
    jobs = triton_jobs(problems, device)
    assert len(keys(jobs)) == len(jobs) > 10
    assert all(isinstance(job, TritonJob) for job in jobs), [str(job) for job in jobs]
    programs = [job for job in jobs_for(problems, device) if job.key not in keys(jobs)]
    assert all(isinstance(job, Program) for job in programs)
    assert bool(programs) is (device.architecture in ("sm_90", "sm_100"))  # those of CUDA C++
    for kernel in [k for op in {p.op for p in problems} for k in kernels_for(op, device)]:
        accepts = [p for p in problems if not isinstance(kernel.supports(p, device), Rejected)]
        found = jobs_for(problems, device, [kernel])
        compiles = "triton." in kernel.name or "cuda." in kernel.name  # in part or whole
        assert bool(found) == bool(accepts and compiles), kernel.name
        assert keys(found) <= keys([*jobs, *programs])


def test_only_the_quantizers_of_a_library_gemm_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_kernels()
    for adapter in (fbgemm.operators, deep_gemm.library):
        monkeypatch.setattr(sys.modules[adapter.__module__], adapter.__name__, None)  # not called
    problem = make_problem("gemm", (256, 256, 256))
    for name, entries in (
        ("cuda.quantize_row+fbgemm.rowwise", ["quantize"]),
        ("cuda.quantize_group+deep_gemm.block", ["quantize", "quantize_tile"]),
    ):
        jobs = prebuild._record([(KERNELS[name], problem)], H200)
        assert (
            [job.entry for job in jobs if isinstance(job, Program)]
            == entries
            == [job.entry for job in jobs]
        )
    scaled = KERNELS["fbgemm.rowwise"]
    assert not list(prebuild._own(scaled, problem, H200))


def test_a_cross_is_recorded_for_two_matrices() -> None:
    """As calls usually have: where x0 is x, there is another program."""
    load_kernels()
    problem = make_problem(
        "gemm_norm", (8192, 3456, 512), a=Operand(Format.E4M3FN, Granularity.ROW),
        b=Operand(Format.E4M3FN, Granularity.ROW, Layout.COLUMN), epilogue="bias+cross",
    )  # fmt: skip
    (job,) = prebuild._record([(KERNELS["cuda.gemm_cross_row"], problem)], H200)
    assert isinstance(job, Program)
    assert dict(job.macros)["SAME"] == 0


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.architecture)
def test_m_changes_only_the_tile(device: Device) -> None:
    def at(m: int) -> list[TritonJob]:
        cases = gemm_cases(m, 1024, 1024, "X1", fp8_format(device), epilogue="bias")
        return triton_jobs([case.problem for case in cases], device)

    def without_tile(job: TritonJob) -> Hashable:
        if job.name != "scaled_gemm_kernel":
            return job.key
        return replace(job, constants=job.constants[:4], options={}).key

    def tile(job: TritonJob) -> Any:
        return (*job.constants[4:7], job.options["num_warps"])

    every = {
        (t.block_m, t.block_n, t.block_k, t.num_warps)
        for t in (scaled_gemm.LARGE, *scaled_gemm.TILES)
    }
    usual = {without_tile(job) for job in at(2048)}
    for m in (1, 7, 100, 4096, 33000):
        jobs = at(m)
        assert {without_tile(job) for job in jobs} == usual
        assert {tile(job) for job in jobs if job.name == "scaled_gemm_kernel"} <= every


def test_constants_are_recorded_for_the_target_gpu() -> None:
    """With OCP formats AMD sets NaN explicitly and pipelines two stages; NVIDIA does neither."""
    here = quantize.format_constants(torch.float8_e4m3fn)
    quantizing = make_problem("quantize", (2048, 1024))
    multiplying = make_problem("scaled_gemm", (2048, 1024, 1024))
    parts = [kernel_named("triton.quantize_row"), kernel_named("triton.scaled_gemm_row")]
    for device, byte, deep in ((MI355X, 0x7F, 2), (H200, 0, 4)):
        jobs: Any = jobs_for([quantizing, multiplying], device, parts)
        found = {job.name: job for job in jobs}
        assert found["quantize_row_kernel"].constants[1] == byte
        assert found["scaled_gemm_kernel"].options["num_stages"] == deep
        assert found["scaled_gemm_kernel"].pointers[0].dtype is fp8_format(device).dtype
    assert quantize.format_constants(torch.float8_e4m3fn) == here
    assert jit.recording is None


def test_tiles_follow_the_compute_units_of_the_target_gpu() -> None:
    def tile(units: int) -> Any:
        device = replace(H200, compute_units=units)
        problem = make_problem("scaled_gemm", (256, 1024, 1024))
        (job,) = jobs_for([problem], device, [kernel_named("triton.scaled_gemm_row")])
        assert isinstance(job, TritonJob)
        return job.constants[4:6]

    assert tile(132) == (64, 64)
    assert tile(4) == (128, 128)


def test_one_recording_at_a_time() -> None:
    with jit.record(H200), pytest.raises(RuntimeError, match="inside"), jit.record(MI300X):
        pass
    assert jit.recording is None


@pytest.mark.parametrize(
    "problem",
    [
        make_problem("gemm", (32, 48, 64), epilogue="bias"),
        make_problem("gemm", (32, 48, 64), b=Operand(Format.BFLOAT16, layout=Layout.ROW)),
        make_problem("gemm", (32, 48, 64), prepared=True,
                     b=Operand(Format.E4M3FN, Granularity.BLOCK, Layout.COLUMN)),
        make_problem("scaled_gemm", (32, 48, 200),
                     a=Operand(Format.E4M3FN, Granularity.GROUP)),
        make_problem("scaled_gemm", (32, 40, 39), batch=3, epilogue="bias+cross",
                     out_format=Format.E4M3FN, out_granularity=Granularity.TENSOR),
        make_problem("quantize", (32, 39)),
        make_problem("quantize", (32, 200), out_granularity=Granularity.BLOCK),
        make_problem("dequantize", (32, 200), out_format=Format.FLOAT32),
    ],
    ids=str,
)  # fmt: skip
def test_meta_operands_have_the_layouts_of_a_sweep(problem: Problem) -> None:
    from lokakern.measure.operands import Operands
    from lokakern.types import QuantizedTensor

    def facts(x: Any) -> Any:
        if isinstance(x, QuantizedTensor):
            return [facts(y) for y in (x.data, x.scale, x.source, *x.transpose)]
        return None if x is None else (x.dtype, x.shape, x.stride())

    real = Operands(problem, "X1", torch.device("cpu"), H200, cold=False).sets[0]
    assert [facts(x) for x in empty_operands(problem, META)] == [facts(x) for x in real]


def test_a_batch_is_three_dimensional() -> None:
    problem = make_problem("gemm", (32, 48, 64), batch=5, epilogue="bias")
    a, b, out, bias = empty_operands(problem, META)
    assert (a.shape, b.shape, out.shape, bias.shape) == (
        (5, 32, 64),
        (5, 64, 48),
        (5, 32, 48),
        (48,),
    )
    assert b.mT.is_contiguous()
    assert not jobs_for([make_problem("gemm", (32, 48, 64), batch=5)], H200)  # none takes it


@pytest.mark.rest
def test_a_kernel_that_cannot_be_recorded_is_a_failure() -> None:
    def launch(*_: Any) -> None:
        raise RuntimeError("0 active drivers")

    problem = make_problem("gemm", (32, 48, 64))
    broken = replace(
        kernel_named(ROW), name="mine.broken", language="mine", parts=(), launch=launch
    )
    (job,) = jobs_for([problem], MI300X, [broken])
    report = build([job], MI300X)
    assert report.compiled == 0
    assert [f.job for f in report.failures] == [f"mine.broken: {problem}"]
    assert "RuntimeError: 0 active drivers" in report.failures[0].reason


# Compiling


def folders(cache: Path) -> set[str]:
    return {x.name for x in cache.iterdir()}


def launch_prebuilt(device: Device, **environment: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, ROOT / "tests/support/launch_prebuilt.py", json.dumps(asdict(device))],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def problems_launched(device: Device) -> list[Problem]:
    script = runpy.run_path(str(ROOT / "tests" / "support" / "launch_prebuilt.py"))
    return list(script["problems_of"](device))


@pytest.mark.parametrize("device", [H200, MI300X], ids=lambda d: d.architecture)
@pytest.mark.rest
def test_launches_find_all_compiled_kernels(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process launches through Triton with a driver that does nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    jobs = triton_jobs(problems_launched(device), device)
    report = build(jobs, device)
    assert report.failures == []
    assert (report.compiled, report.already_there) == (len(jobs), 0)
    compiled = folders(tmp_path)
    assert len(compiled) >= len(jobs)
    found = launch_prebuilt(device)
    assert folders(tmp_path) == compiled
    assert found["looks"] == found["hits"] == len(jobs)
    assert found["launches"] >= len(jobs)


@pytest.mark.rest
def test_cuda_programs_are_compiled_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOKAKERN_CACHE", str(tmp_path))
    problem = make_problem("quantize", (512, 256))
    jobs = jobs_for([problem], H200, [kernel_named("cuda.quantize_row")])
    assert len(jobs) == 1
    assert (build(jobs, H200, 1).compiled, build(jobs, H200, 1).already_there) == (1, 1)
    assert list(tmp_path.rglob("*")), "the cache is elsewhere"


@pytest.mark.rest
def test_a_prebuild_is_remembered_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that is continued need not record again."""
    monkeypatch.setenv("LOKAKERN_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    recorded: list[int] = []
    real = prebuild.jobs_for

    def counted(problems: Any, *more: Any, **options: Any) -> Any:
        recorded.append(len(list(problems)))
        return real(problems, *more, **options)

    monkeypatch.setattr(prebuild, "jobs_for", counted)
    only = ("cuda.quantize_row",)

    def built(*shapes: tuple[int, int], again: bool = False) -> tuple[int, int, int]:
        problems = [make_problem("quantize", shape) for shape in shapes]
        report = prebuild.prebuild(problems, H200, only, 1, again=again)
        return report.compiled, report.already_there, len(recorded)

    first = built((512, 256), (512, 512))
    assert first[0] >= 1 and first[1:] == (0, 1)
    assert built((512, 256)) == (0, 0, 1), "some of them"
    assert built((512, 256), (512, 512), again=True) == (0, first[0], 2)
    assert built((512, 256), (512, 1024))[2] == 3, "others, too"
    assert built((512, 1024), (512, 512))[2] == 3
    with monkeypatch.context() as patch:
        patch.setitem(KERNELS["cuda.quantize_row"].__dict__, "digest", "f" * 64)
        assert built((512, 256))[2] == 4, "another kernel"
    for path in (tmp_path / "cubin").glob("*"):
        path.unlink()
    assert built((512, 256))[::2] == (1, 5), "what was compiled is gone"


@pytest.mark.rest
def test_integers_that_triton_specializes_alike_are_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def job(columns: int) -> Any:
        (found,) = jobs_for(
            [make_problem("dequantize", (32, columns), out_format=Format.FLOAT32)],
            H200,
            [KERNELS["triton.dequantize_row"]],
        )
        return found

    assert job(256).key == job(512).key != job(250).key
    assert build([job(256), job(512), job(250)], H200, 1).compiled == 2
    report = build([job(512), job(38)], H200, 1)
    assert (report.compiled, report.already_there) == (0, 2)
    assert str(report).startswith("0 compiled, 2 already there, in ")


# Plugins

PLUGIN = """
import triton
import triton.language as tl
from lokakern import register
from lokakern.types import Granularity

@triton.jit
def whole(x, data, columns, row: tl.constexpr):
    at = tl.program_id(0) * columns + tl.arange(0, row)
    tl.store(data + at, tl.load(x + at).to(data.dtype.element_ty))

tuned = triton.autotune([triton.Config({}, num_warps=n) for n in (1, 2)], key=[])(whole)

@register("quantize", granularity=Granularity.ROW)
def by_row(x, data, scale, workspace):
    whole[len(x),](x, data, x.shape[1], row=512)
    tuned[len(x),](x, data, x.shape[1], row=512)
"""


def test_a_plugin_that_was_tried_in_the_interpreter_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lokakern.bench.cli.main import app

    (tmp_path / "some_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    package = Package("pytest", "", ("some_plugin",))
    plugin = Library(name="some", packages=(package,), is_plugin=True)
    load_kernels()
    monkeypatch.setattr(libraries, "plugins", lambda: {"some": plugin})
    monkeypatch.setenv("LOKAKERN_CACHE", str(tmp_path / "cache" / "here"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    with monkeypatch.context() as interpreted:
        interpreted.setenv("TRITON_INTERPRET", "1")
        libraries.keep_trial(plugin, current_device(), libraries.Trial(right=1))

    def build_one(jobs: list[Any], device: Device, *_: Any) -> BuildReport:
        assert sorted(job.options.get("num_warps", 0) for job in jobs) == [0, 1, 2]
        pickle.loads(pickle.dumps(jobs[0])).compile(device)
        assert jobs[0].compile(device)  # it is there
        return BuildReport(1, resources={str(jobs[0]): jobs[0].resources})

    monkeypatch.setattr(prebuild, "build", build_one)
    words = "sweep --prebuild --shape 256,512,512 --errors none --kernel some_plugin --device"
    try:
        for device, found in (
            ("NVIDIA H200", r"\d+ registers, 0 bytes of stack, .*, 0 bytes of shared"),
            ("AMD Instinct MI300X", r"\d+ vector registers, .* 0 spilled vector registers, .*"),
        ):
            app([*words.split(), device], standalone_mode=False)
            kernel = r"whole\(bfloat16, float8_e4m3fn(uz)?; row=512\): "
            assert re.search(kernel + found, capsys.readouterr().err)
    finally:
        del KERNELS["some_plugin.by_row"]


# Failing

JOBS = """
import os, time
from dataclasses import dataclass

@dataclass(frozen=True)
class Fine:
    key: int
    def compile(self, device):
        assert device.product == "NVIDIA H200"
        return self.key < 0

class Raises(Fine):
    def compile(self, device):
        raise ValueError("no such instruction")

class Dies(Fine):
    def compile(self, device):
        print("LLVM ERROR: cannot select", flush=True)
        os.abort()

class Exits(Fine):
    def compile(self, device):
        os._exit(3)

class Sleeps(Fine):
    def compile(self, device):
        open(f"{os.getpid()}.pid", "w").close()
        while True:
            time.sleep(60)

class Unpicklable(Fine):
    def __reduce__(self):
        raise TypeError("holds a handle")
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of jobs that workers can import."""
    (tmp_path / "made_jobs.py").write_text(JOBS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import made_jobs  # type: ignore[import-not-found]

    yield made_jobs
    del sys.modules["made_jobs"]


class Steps(Progress):
    def __init__(self) -> None:
        self.total, self.steps = 0, 0

    def begin(self, phase: str, total: int) -> None:
        self.total = total

    def step(self, text: str) -> None:
        self.steps += 1


@pytest.mark.rest
def test_failures_are_reported_and_other_jobs_are_built(made: Any) -> None:
    bad = [made.Raises(100), made.Dies(101), made.Exits(102), made.Unpicklable(103)]
    jobs = [*map(made.Fine, range(5)), *bad, *map(made.Fine, range(5, 10)), made.Fine(-1)]
    steps = Steps()
    report = build([*jobs, *jobs], H200, 2, steps)
    assert (report.compiled, report.already_there) == (10, 1)
    reasons = {failure.job: failure.reason for failure in report.failures}
    assert reasons.keys() == {str(job) for job in bad}
    assert reasons[str(bad[0])] == "ValueError: no such instruction"
    assert reasons[str(bad[1])].startswith("its process ended with SIGABRT: LLVM ERROR: cannot")
    assert reasons[str(bad[2])] == "its process ended with exit status 3"
    assert reasons[str(bad[3])] == "TypeError: holds a handle"
    assert steps.total == steps.steps == len(jobs)
    assert ", 4 failed, in " in str(report)


def test_a_compilation_that_hangs_is_ended(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the job creates a file when it begins

    def wait_for_answer(connections: Any, limit_s: float) -> list[Any]:
        """Run out of time as soon as the job has begun."""
        assert limit_s == pool.LONGEST_S
        while not (ready := wait(connections, 0.1)):
            for begun in tmp_path.glob("*.pid"):
                begun.unlink()
                return []
        return ready

    monkeypatch.setattr(pool, "wait", wait_for_answer)
    sleeps = made.Sleeps(1)
    report = build([made.Fine(0), sleeps, made.Fine(2)], H200, 1)
    assert report.compiled == 2
    assert report.failures == [Failure(str(sleeps), "not done after 300 s")]


def test_workers_that_cannot_start_are_reported(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    report = build([made.Fine(0), made.Fine(1), made.Fine(2)], H200, 2)
    assert len(report.failures) == 3
    assert {f.reason for f in report.failures} == {
        "no worker starts: its process ended with exit status 1"
    }


def test_two_writers_of_a_mark_do_not_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads have one process id, and so may containers that share the folder."""
    written, rename = [], Path.replace

    def replaced(self: Path, target: Path) -> Path:
        written.append(self)
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", replaced)
    mark = tmp_path / "prebuilt" / "mark"
    for problems in ({"a"}, {"a", "b"}):
        prebuild._write_mark(mark, problems)
    assert len({*written}) == 2 and {x.parent for x in written} == {mark.parent}
    assert prebuild._read_mark(mark) == {"a", "b"}
    assert [*mark.parent.iterdir()] == [mark]


def test_nothing_to_build_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_Worker", None)
    assert build([], H200).compiled == 0


@pytest.mark.rest
def test_an_interrupt_ends_the_workers(made: Any, tmp_path: Path) -> None:
    """The script has no ``if __name__ == "__main__"``, and needs none."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import signal
        from made_jobs import Sleeps
        from lokakern.build.pool import build
        from lokakern.types import Device
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let jobs ignore it
        build([Sleeps(0), Sleeps(1)], {H200!r}, 2)
    """)
    )
    running = subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
    )  # fmt: skip
    while len(pids := list(tmp_path.glob("*.pid"))) < 2:
        assert running.poll() is None
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, printed = running.communicate(timeout=1800)
    assert "KeyboardInterrupt" in printed
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.stem), 0)


# warmup


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Jobs that `warmup` would build."""
    jobs: list[Any] = []

    def take(given: Any, device: Device, workers: int | None) -> BuildReport:
        jobs.extend(given)
        return BuildReport()

    monkeypatch.setattr(prebuild, "build", take)
    return jobs


def test_warmup_without_a_gpu_asks_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuild, "current_device", lambda: current_device("cpu"))
    with pytest.raises(DeviceError, match="there is no GPU here; name the one"):
        lokakern.warmup([(32, 64, 64)])
    with pytest.raises(DeviceError, match="is no GPU"):
        lokakern.warmup([(32, 64, 64)], device=current_device("cpu"))
    with pytest.raises(DeviceError, match="is in no database"):
        lokakern.warmup([(32, 64, 64)], device="NVIDIA H2000")
    with pytest.raises(DeviceError, match="not known to compile for"):
        from lokakern.triton_job import target_of

        target_of(current_device("cpu"))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([(32, 64)],), ShapeError, "expected .m, n, k."),
        (((32, 64, 64),), ShapeError, "shape is 32"),
        ((make_problem("gemm", (32, 64, 64)),), ShapeError, "expected a list"),
        (([(32, 64, 64)], -1.0), BudgetError, "expected a finite number"),
    ],
)
def test_warmup_rejects_invalid_arguments(
    arguments: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        lokakern.warmup(*arguments, device=H200)


def test_warmup_needs_a_worker() -> None:
    with pytest.raises(ValueError, match="workers is 0"):
        lokakern.warmup([(32, 64, 64)], device=H200, workers=0)


def test_warmup_without_a_budget_compiles_for_every_kernel(built: list[Any]) -> None:
    lokakern.warmup([(32, 64, 64)], device=MI300X)
    problem = make_problem("gemm", (32, 64, 64))
    assert keys(built) == keys(jobs_for([problem], MI300X))
    assert {job.constants[0] for job in built if job.name == "scaled_gemm_kernel"} == {
        "tensor", "row", "block",
    }  # fmt: skip


def test_warmup_with_a_budget_compiles_the_winners_at_every_m(
    built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of every measured m are compiled, and no kernel that is never chosen."""
    table = SimpleNamespace(
        breakpoints=[0, 256, 4097], winners=["torch.bf16", ROW, "torch.bf16"],
        measured_m=[256, 4096],
    )  # fmt: skip
    asked: list[Any] = []
    monkeypatch.setattr(dispatcher, "table_for", lambda *args: asked.append(args) or table)
    problem = make_problem("gemm", (8192, 1024, 1024))
    lokakern.warmup([problem], 0.06, device=H200)
    assert asked == [(problem, lokakern.ErrorBudget(row_err=0.06), None, H200)]
    for m in (256, 1000, 2048, 4096):
        assert keys(jobs_for([replace(problem, m=m)], H200, [KERNELS[ROW]])) <= keys(built)
    assert {job.constants[0] for job in built if job.name == "scaled_gemm_kernel"} == {"row"}


def test_ops_without_a_budget_are_asked_without_one(
    built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    table = SimpleNamespace(breakpoints=[0], winners=["triton.quantize_row"], measured_m=[])
    monkeypatch.setattr(dispatcher, "table_for", lambda *args: asked.append(args) or table)
    problem = make_problem("quantize", (32, 64))
    lokakern.warmup([problem], 0.06, device=H200)
    assert asked == [(problem, None, None, H200)]
    assert [job.name for job in built] == ["quantize_row_kernel"]


def test_a_prebuild_compiles_only_the_given_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def build_nothing(jobs: list[Any], *_: Any) -> BuildReport:
        found.extend(jobs)
        return BuildReport(failures=[Failure("all", "none is built")])  # so that nothing is noted

    monkeypatch.setattr(prebuild, "build", build_nothing)
    prebuild.prebuild(problems_of("smoke", H200), H200, ["dequantize"])
    names = {job.entry if isinstance(job, Program) else job.name for job in found}
    assert names == {"dequantize", "dequantize_kernel"}


@pytest.mark.parametrize(("errors", "sizes"), [("all", {8192, 2048}), ("none", {8192})])
def test_the_command_compiles_for_errors_too(
    errors: str, sizes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lokakern.bench.cli.main import app

    found: list[Any] = []

    def build_nothing(problems: Any, *_: Any, **_options: Any) -> BuildReport:
        found.extend(problems)
        return BuildReport()

    monkeypatch.setattr(prebuild, "prebuild", build_nothing)
    words = "sweep --prebuild --shape 8192,256,512 --epilogue bias+layer+affine --errors"
    app([*words.split(), errors, "--device", "NVIDIA H200"], standalone_mode=False)
    assert {problem.m for problem in found} == sizes
    assert {problem.epilogue for problem in found if problem.m == 2048} <= {"layer"}


# On a GPU


@pytest.mark.gpu
def test_a_gpu_launches_kernels_compiled_without_a_gpu(tmp_path: Path) -> None:
    device = current_device()
    script = """
import json, runpy, sys, torch
from lokakern.build.prebuild import prebuild
from lokakern.types import Device
assert not torch.cuda.is_available()
device = Device(**json.loads(sys.argv[1]))
problems = runpy.run_path("tests/support/launch_prebuilt.py")["problems_of"](device)
report = prebuild(problems, device)
assert report.compiled > 10 and not report.failures, report
"""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    cache = {"TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", script, json.dumps(asdict(device))],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **hidden, **cache},
        check=True, timeout=1800,
    )  # fmt: skip
    compiled = folders(tmp_path)
    found = launch_prebuilt(device, **cache)
    assert found["looks"] == found["hits"] > 10
    # Triton 3.6 compiles launchers in C where the GPU is; only kernels have a .json.
    added = folders(tmp_path) - compiled
    assert [name for name in added if list((tmp_path / name).glob("*.json"))] == []


@pytest.mark.gpu
def test_the_first_call_after_warmup_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device = current_device()
    problems = problems_launched(device)
    report = lokakern.warmup(problems)
    assert report.compiled > 10 and not report.failures, report
    found = launch_prebuilt(device)
    assert found["looks"] == found["hits"] > 10


def test_without_bindings_the_command_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lokakern.bench.cli.main import app

    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    nvrtc.version.cache_clear()
    monkeypatch.setattr("lokakern.build.prebuild.jobs_for", None)  # no work
    words = ["sweep", "--shape", "64,64,64", "--prebuild", "--device", "NVIDIA H200", "--quiet"]
    with pytest.raises(SystemExit) as ended:
        app(words)
    assert ended.value.code
    (line,) = capsys.readouterr().err.splitlines()
    assert "CUDA kernels need cuda-bindings" in line and "pip install" in line
    assert line.endswith("or choose others, as by --kernel triton")
    monkeypatch.setattr("lokakern.build.prebuild.jobs_for", lambda *_, **_options: [])
    with pytest.raises(SystemExit) as ended:
        app([*words, "--kernel", "triton"])
    assert not ended.value.code
