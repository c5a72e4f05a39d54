"""Rivals made by torch.compile: correct, compiled once for each layer, timed on request only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lokakern.bench.cli.main import app
from lokakern.bench.compare import compiled_baselines
from lokakern.bench.compare.kernels import contest
from lokakern.bench.compare.race import Setting
from lokakern.build.pool import build
from lokakern.device import current_device
from lokakern.measure import operands
from lokakern.measure.norm_operands import operands_of
from lokakern.measure.time_problem import contender_of
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.sweep.engine import candidates
from lokakern.types import ACCEPTED, Device, Format, Granularity, Operand, Problem
from lokakern.workloads.gemm_cases import Case
from lokakern.workloads.norm_cases import epilogue_cases, gemm_norm_cases

load_kernels()
CPU = torch.device("cpu")
HERE = Device("cpu", "some CPU", "x86_64", 2, 16)
ROW = Operand(Format.E4M3FN, Granularity.ROW)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run traced graphs directly: Inductor takes many seconds to compile C++."""
    monkeypatch.setattr(compiled_baselines, "BACKEND", "eager")
    monkeypatch.setattr(operands, "l2_bytes", lambda: 20_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    current_device.cache_clear()
    yield
    current_device.cache_clear()
    torch._dynamo.reset()


def layer(epilogue: str, **fields: Any) -> Problem:
    return make_problem("gemm_norm", (48, 64, 32), epilogue=epilogue, **fields)


EPILOGUES = [
    "none", "bias+layer+affine", "residual+layer", "bias+rms+affine+silu",
    "bias+block_rms(16)+hardswish", "block_rms(16)+affine+relu", "layer+affine+gate",
    "bias+rms+cross", "bias+layer+residual_last", "affine+hardswish",
]  # fmt: skip


def check(kernel: Kernel, problem: Problem, distribution: str = "X1") -> str:
    made = operands_of(problem, distribution, CPU, HERE, cold=True)
    assert len(made.sets) > 1
    before = made.fingerprint()
    made.poison()
    for call in contender_of(made, kernel).calls:
        call()
    assert made.fingerprint() == before
    return made.check(kernel)[1]


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("distribution", ["X1", "X6", "X13"])
@pytest.mark.sample(every=5)
def test_compiled_layers_are_correct(epilogue: str, distribution: str) -> None:
    problem = layer(epilogue)
    with compiled_baselines.registered():
        for name in compiled_baselines.MODES:
            kernel = KERNELS[name]
            assert kernel.supports(problem, HERE) == ACCEPTED
            assert check(kernel, problem, distribution) == ""


@pytest.mark.rest
def test_layers_of_inductor_are_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled in another process, into caches that this one reads."""
    if not shutil.which("g++"):  # no compiler; traced graphs are tested above
        return
    monkeypatch.setattr(compiled_baselines, "BACKEND", "inductor")
    name, problem = "torch.compiled_norm", layer("bias+layer+affine")
    with compiled_baselines._one_thread_each():
        built = build([compiled_baselines._Layer(problem, (name,), "cpu")], HERE, 1)
    assert (built.compiled, built.failures) == (1, [])
    with compiled_baselines.registered():
        assert check(KERNELS[name], problem) == ""


def test_a_layer_is_compiled_once_for_all_operand_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many layers do not reach the recompilation limit of torch."""
    made: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        made.append("")
        return graph.forward

    monkeypatch.setattr(compiled_baselines, "BACKEND", backend)
    shapes = [(m, 64, 32) for m in range(32, 32 + 10)]
    problems = [make_problem("gemm_norm", shape, epilogue="bias+layer") for shape in shapes]
    with compiled_baselines.registered():
        name = "torch.compiled_norm"
        assert compiled_baselines.compile_ahead(problems, [name, "torch.bf16"], CPU, HERE) == len(
            shapes
        )
        assert len(made) == len(shapes)
        for problem in problems:
            assert check(KERNELS[name], problem) == ""
        assert len(made) == len(shapes)
        assert compiled_baselines.compile_ahead(problems, ["torch.bf16"], CPU, HERE) == 0


def test_a_failed_compilation_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such template")

    monkeypatch.setattr(compiled_baselines, "BACKEND", broken)
    told: list[str] = []
    cases = [Case(layer("layer"), "X1")]
    with compiled_baselines.registered():
        found = contest(cases, "gemm_norm", Setting(note=told.append), ours=["torch.norm_*"],
                        rivals=["torch.compiled_norm"])  # fmt: skip
    (row,) = found.rows
    (entry,) = [entry for entry in row.entries if not entry.ours]
    assert "no such template" in entry.failed and not entry.wrong and row.ours
    assert len(told) == 1 and "no such template" in told[0]


def test_compiled_layers_take_bfloat16_only() -> None:
    static: dict[str, Any] = {"out_format": ROW.format, "out_granularity": Granularity.TENSOR}
    with compiled_baselines.registered():
        for problem in (layer("layer", a=ROW), layer("layer", **static),
                        layer("layer", out_strided=True)):  # fmt: skip
            assert KERNELS["torch.compiled_norm"].supports(problem, HERE) != ACCEPTED


def test_compiled_layers_are_registered_on_request_only() -> None:
    problem = layer("layer")
    before = {kernel.name for kernel in candidates(problem, HERE)}
    with compiled_baselines.registered():
        inside = {kernel.name for kernel in candidates(problem, HERE)}
    assert inside - before == set(compiled_baselines.MODES)
    with compiled_baselines.registered(False):
        assert {kernel.name for kernel in candidates(problem, HERE)} == before
    assert {kernel.name for kernel in candidates(problem, HERE)} == before
    with pytest.raises(RuntimeError), compiled_baselines.registered():
        raise RuntimeError("while they are there")
    assert not compiled_baselines.MODES.keys() & KERNELS.keys()


@pytest.mark.parametrize(
    ("globs", "asked"),
    [(["torch.compiled_norm"], True), (["torch.compiled*"], True), (["*compiled*"], True),
     (["*"], False), (["torch.*"], False), (["cuda.*", "*+*"], False), (["cuda.compiled"], False)],
)  # fmt: skip
def test_only_patterns_with_their_name_ask_for_compiled_layers(
    globs: list[str], asked: bool
) -> None:
    """All kernels (*) is not enough: compiling takes minutes."""
    assert compiled_baselines.are_asked_for(globs) is asked


def test_one_command_compares_with_each_kind_of_rival() -> None:
    shape = ["compare", "--op", "gemm_norm", "--shape", "48,64,32", "--quiet", "--format", "csv"]
    bars = [
        ["--epilogue", "bias+layer+affine", "--rivals", "torch.compiled_norm*"],
        ["--epilogue", "bias+layer+affine", "--rivals", "*+*norm_quantize"],
        ["--epilogue", "bias+block_rms(32)+hardswish", "--rivals", "torch.compiled_norm*"],
    ]
    for bar in bars:
        words = [*shape, "--ours", "torch.norm_*", *bar]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        (line,) = [x for x in result.stdout.splitlines() if x.startswith("m=48 ")]
        assert line.split(",")[1].startswith("torch.norm_")
        rival = line.split(",")[3]
        assert rival in compiled_baselines.MODES or rival.endswith("+torch.norm_quantize")
    assert not compiled_baselines.MODES.keys() & KERNELS.keys()
    result = CliRunner().invoke(app, [*shape, "--epilogue", "layer", "--ours", "torch.norm_*",
                                      "--compile"])  # fmt: skip
    assert result.exit_code == 0


def test_formats_of_a_layer_are_compared() -> None:
    """FP8 in and bfloat16 out, FP8 in and out, and bfloat16 throughout."""
    cases = list(gemm_norm_cases(48, 64, 32, "X1", Format.E4M3FN))
    with compiled_baselines.registered():
        found = contest(cases, "gemm_norm", Setting(), ours=["torch.norm_emulated_*"],
                        rivals=["torch.compiled_norm", "torch.norm_unfused"])  # fmt: skip
    after_layer, after_block = found.rows
    for row in (after_layer, after_block):
        assert row.ours.startswith("torch.norm_emulated_")
        names = [entry.kernel for entry in row.entries]
        assert sorted(names) == ["torch.compiled_norm", "torch.norm_emulated_row",
                                 "torch.norm_emulated_tensor", "torch.norm_unfused"]  # fmt: skip
        assert not any(entry.failed for entry in row.entries)
    ours = [entry.problem for entry in after_block.entries if entry.ours]
    assert [problem.endswith("out=e4m3fn/tensor") for problem in ours] == [True, True]
    assert after_block.problem.endswith("out=bfloat16")


def test_processes_that_compile_use_one_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    monkeypatch.delenv(name, raising=False)
    with compiled_baselines._one_thread_each():
        assert os.environ[name] == "1"
    assert name not in os.environ
    monkeypatch.setenv(name, "7")
    with compiled_baselines._one_thread_each():
        assert os.environ[name] == "7"
    assert os.environ[name] == "7"


def test_shapes_with_an_epilogue_make_all_cases() -> None:
    cases = list(epilogue_cases([(48, 64, 32), (48, 64)], "bias+layer", Format.E4M3FN))
    assert {case.problem.epilogue for case in cases} == {"bias+layer"}
    layers = [case.problem for case in cases if case.problem.op == "gemm_norm"]
    assert len(layers) == 5 and {p.shape for p in layers} == {(48, 64, 32)}
    rows = [case.problem for case in cases if case.problem.op == "norm_quantize"]
    assert {p.out_granularity for p in rows} == {Granularity.ROW, Granularity.GROUP}
