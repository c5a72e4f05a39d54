"""The registry: registration of kernels, accepted problems, and requirements of an import."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lokakern.errors import UnknownNameError
from lokakern.problems import make_problem
from lokakern.registry import libraries
from lokakern.registry import register as registry
from lokakern.registry.digests import KERNELS_ROOT
from lokakern.registry.libraries import LIBRARIES, Library, Package
from lokakern.registry.ops import EPILOGUE_OPS, OPS
from lokakern.registry.register import (
    ANY,
    FP8_GPUS,
    KERNELS,
    Kernel,
    add,
    fp8_format,
    kernel_named,
    kernels_for,
    load_kernels,
    register,
)
from lokakern.types import (
    ACCEPTED,
    Accepted,
    Device,
    Format,
    Granularity,
    Layout,
    NumericsClass,
    Operand,
    Problem,
    Rejected,
)

UNAVAILABLE = load_kernels()
compositions = importlib.import_module("lokakern.kernels.compositions")
norm_compositions = importlib.import_module("lokakern.kernels.norm_compositions")
ROOT = Path(__file__).resolve().parents[2]
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
MI300X = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)
CPU = Device("cpu", "some CPU", "x86_64", 2, 16)
GEMM = make_problem("gemm", (64, 256, 512))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    """The registry, as a copy that a test may change."""
    copy = dict(KERNELS)
    monkeypatch.setattr(registry, "KERNELS", copy)
    monkeypatch.setattr(compositions, "KERNELS", copy)
    return copy


def launch(*_: Any) -> None:
    """Do nothing."""


def kernel(**fields: Any) -> Kernel:
    usual: dict[str, Any] = {
        "name": "test.kernel", "op": "gemm", "language": "test", "modules": ("compositions",),
        "launch": launch, "architectures": ANY,
    }  # fmt: skip
    return Kernel(**{**usual, **fields})


def reason(answer: object) -> str:
    assert isinstance(answer, Rejected)
    return answer.reason


# --- entering


def test_register_alone_registers_a_kernel(registered: dict[str, Kernel]) -> None:
    def multiply(*_: Any) -> None:
        """Do nothing."""

    multiply.__module__ = "lokakern.kernels.cuda.gemm_row"
    enter = register(
        "scaled_gemm",
        architectures=frozenset({"sm_90"}),
        granularity=Granularity.ROW,
        accumulation="promoted",
        unmeasured={"sm_90": "no GPU"},
        kernel_err_bound=4.0,
    )
    assert enter(multiply) is multiply
    found = registered["cuda.multiply"]
    assert kernel_named("cuda.multiply") is found
    assert str(found) == "cuda.multiply"
    assert (found.language, found.modules, found.launch) == ("cuda", ("cuda/gemm_row",), multiply)
    assert found.b_granularity is Granularity.ROW  # that of a, unless it is given
    assert found.unmeasured == {"sm_90": "no GPU"}
    assert (found.compile_only, found.parts, found.workspace()) == ({}, (), ())
    register("gemm", name="other", b_granularity=Granularity.BLOCK)(multiply)
    assert registered["cuda.other"].b_granularity is Granularity.BLOCK
    assert registered["cuda.other"].granularity is Granularity.NONE


def own_kernel(*_: Any) -> None:
    """Do nothing."""


LENT = Library(name="lent", packages=(Package("lent-cuda", "", ()),))


@pytest.fixture
def lent(registered: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    """A library that is here and works."""
    monkeypatch.setitem(LIBRARIES, "lent", LENT)
    monkeypatch.setattr(libraries, "why_not", lambda *_: None)
    return registered


def test_a_library_is_given_aligned_operands(
    lent: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = kernel(library="lent")
    for operand in ("a", "b"):
        askew = replace(GEMM, **{operand: replace(getattr(GEMM, operand), alignment=8)})
        assert "multiples of 16 bytes" in reason(found.supports(askew, H200))
        assert kernel().supports(askew, H200) == Accepted()
    assert found.supports(GEMM, H200) == Accepted()
    monkeypatch.setitem(LIBRARIES, "lent", replace(LENT, is_plugin=True))
    assert found.supports(askew, H200) == Accepted(), "a plugin says itself what it takes"


def test_a_library_runs_on_the_device_of_its_operands(
    lent: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams and handles of a library are those of the current device."""
    now = [0]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, now[0] = now[0], device.index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", on)
    seen: list[int] = []

    def multiply(_a: Any, *_: Any) -> tuple[torch.Tensor, ...]:
        seen.append(now[0])
        return ()

    multiply.__module__ = "lokakern.kernels.adapters.lent"
    register("gemm", workspace=multiply)(multiply)
    elsewhere = SimpleNamespace(device=torch.device("cuda", 1))
    for first in (elsewhere, SimpleNamespace(device=torch.device("cuda", 0)), torch.ones(1), ()):
        lent["lent.multiply"].launch(first)
        lent["lent.multiply"].workspace(first)
    assert seen == [1, 1, 0, 0, 0, 0, 0, 0] and now == [0]


def test_a_kernel_may_live_outside_lokakern(registered: dict[str, Kernel]) -> None:
    register("gemm")(own_kernel)
    (name,) = set(registered) - set(KERNELS)
    assert name.endswith(".own_kernel")
    found = registered[name]
    assert found.modules == (f"python:{own_kernel.__module__}",)
    assert len(found.digest) == 64
    assert found.supports(GEMM, CPU) == Accepted()


def test_a_name_is_taken_once(registered: dict[str, Kernel]) -> None:
    with pytest.raises(ValueError, match=r"'torch\.bf16' is registered twice"):
        add(kernel(name="torch.bf16"))

    def bf16(*_: Any) -> None:
        """Do nothing."""

    bf16.__module__ = "lokakern.kernels.torch.again"
    with pytest.raises(ValueError, match="twice"):
        register("gemm")(bf16)
    assert registered["torch.bf16"] is KERNELS["torch.bf16"]


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="'gem' is unknown; expected one of dequantize, ge"):
        register("gem")


# --- accepting


def test_supports_says_why_not() -> None:
    narrow = kernel(architectures=frozenset({"sm_90", "sm_100"}))
    assert narrow.supports(GEMM, H200) == Accepted()
    quantize = make_problem("quantize", (64, 512))
    assert reason(narrow.supports(quantize, H200)) == "computes gemm, not quantize"
    assert reason(narrow.supports(GEMM, CPU)) == "needs sm_100, sm_90; device is x86_64"
    assert "batch" in reason(narrow.supports(replace(GEMM, batch=2), H200))
    assert "accumulate" in reason(narrow.supports(replace(GEMM, accumulate=True), H200))
    assert narrow.supports(replace(GEMM, epilogue="bias"), H200) == Accepted()
    assert "'elu'" in reason(narrow.supports(replace(GEMM, epilogue="elu"), H200))


def test_kernels_declare_epilogues_accumulation_and_slices(registered: dict[str, Kernel]) -> None:
    register("gemm", epilogues=frozenset({"relu"}), accumulates=True, k_slices=True)(own_kernel)
    (name,) = set(registered) - set(KERNELS)
    found = registered[name]
    assert found.supports(replace(GEMM, epilogue="relu"), H200) == Accepted()
    assert found.supports(replace(GEMM, epilogue="relu", accumulate=True), H200) == Accepted()
    assert "has no epilogue 'none'" in reason(found.supports(GEMM, H200))
    assert found.lacks(()) is None and found.lacks({"k_slices"}) is None
    assert (
        found.lacks({"k_slices", "batch_invariant"}) == "its bits may depend on the number of rows"
    )
    assert kernel().lacks({"k_slices"}) == "does not take a as slices along k"


def test_kernels_declare_that_they_take_a_batch(registered: dict[str, Kernel]) -> None:
    many = replace(GEMM, batch=2)
    assert reason(kernel().supports(many, H200)) == "takes no batch"
    assert kernel(batched=True).supports(many, H200) == Accepted()
    register("gemm", batched=True)(own_kernel)
    (name,) = set(registered) - set(KERNELS)
    assert registered[name].batched
    batched = {k.name for k in KERNELS.values() if k.batched and k.op == "gemm"}
    assert batched == {"torch.bf16", "torch.fp32"}
    weight = Operand(Format.E4M3FN, Granularity.ROW, Layout.COLUMN)
    prepared = make_problem("gemm", (64, 256, 512), b=weight, prepared=True, batch=2)
    assert "no batch of prepared" in reason(KERNELS["torch.bf16"].supports(prepared, H200))


def test_supports_asks_the_kernel_last() -> None:
    asked: list[tuple[Problem, Device]] = []

    def accept(problem: Problem, device: Device) -> Accepted:
        asked.append((problem, device))
        return ACCEPTED

    picky = kernel(supports_problem=accept)
    for problem in (replace(GEMM, batch=2), replace(GEMM, accumulate=True)):
        assert isinstance(picky.supports(problem, H200), Rejected)
    assert not asked
    assert picky.supports(GEMM, H200) == ACCEPTED
    assert asked == [(GEMM, H200)]
    answer = Rejected("too small")
    assert kernel(supports_problem=lambda *_: answer).supports(GEMM, H200) is answer


def test_any_is_everywhere() -> None:
    """Also for a set of the same content that somebody made."""
    for architectures in (ANY, frozenset({"any"})):
        everywhere = kernel(architectures=architectures)
        assert all(everywhere.runs_on(device) for device in (H200, MI300X, CPU))
        assert everywhere.supports(GEMM, CPU) == Accepted()


def test_numerics_classes() -> None:
    quantizing = kernel(
        granularity=Granularity.GROUP, b_granularity=Granularity.BLOCK, accumulation="promoted"
    )
    found = quantizing.numerics(GEMM, MI300X)
    assert found == NumericsClass(
        Format.E4M3FNUZ, Granularity.GROUP, Format.E4M3FNUZ, Granularity.BLOCK,
        "promoted", Format.BFLOAT16,
    )  # fmt: skip
    assert str(found) == "e4m3fnuz/1x128 x e4m3fnuz/128x128 -> bfloat16, promoted"
    plain = KERNELS["torch.bf16"].numerics(GEMM, H200)
    assert str(plain) == "bfloat16/none x bfloat16/none -> bfloat16, float32"
    assert fp8_format("gfx942") is Format.E4M3FNUZ
    assert {fp8_format(a) for a in ("sm_90", "gfx950", "x86_64")} == {Format.E4M3FN}


# --- finding


def test_kernels_for_an_op_and_a_device() -> None:
    every = [k for op in OPS for k in kernels_for(op)]
    assert sorted(k.name for k in every) == sorted(KERNELS)
    for op in OPS:
        names = [k.name for k in kernels_for(op)]
        assert names == sorted(names)
        assert {KERNELS[name].op for name in names} == {op}
        here = kernels_for(op, CPU)
        assert here
        assert all(k.architectures == {"any"} for k in here)
        assert [k for k in kernels_for(op, H200) if not k.runs_on(H200)] == []
        assert {k.name for k in here} < {k.name for k in kernels_for(op, H200)} | {""}
    assert kernels_for("gem") == []


def test_an_unknown_kernel_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError) as caught:
        kernel_named("torch.bf61")
    message = str(caught.value)
    assert message.startswith("kernel 'torch.bf61' is not registered; expected one of ")
    assert all(name in message for name in KERNELS)


def test_every_module_can_be_imported_here() -> None:
    """CI has Triton: what does not import there is not tested there."""
    assert UNAVAILABLE == {}


# --- what is registered

LANGUAGES = {"torch", "triton", "cuda", "hip", "adapters"}
ACCUMULATIONS = {
    "quantize": {"none"},
    "quantize_transpose": {"none"},
    "dequantize": {"none"},
    "scaled_gemm": {"float32", "promoted", "fast"},
    "gemm": {"float32", "promoted", "fast", "promoted+rounded"},
    "gemm_norm": {"float32", "promoted", "fast", "rounded", "promoted+rounded", "fast+rounded"},
    "norm_quantize": {"none", "rounded"},
    "norm_backward": {"none"},
}


PARTS = {
    "gemm": {"quantize", "scaled_gemm"},
    "gemm_norm": {"quantize", "gemm", "scaled_gemm", "gemm_norm", "norm_quantize"},
}


@pytest.mark.parametrize("found", KERNELS.values(), ids=str)
def test_every_kernel_is_described(found: Kernel) -> None:
    assert KERNELS[found.name] is found
    assert re.fullmatch(r"[a-z0-9_]+\.[a-z0-9_]+(\+[a-z0-9_]+\.[a-z0-9_]+)*", found.name)
    assert found.op in OPS
    assert found.language in (*LANGUAGES, *LIBRARIES)
    assert callable(found.launch)
    assert found.architectures == {"any"} or found.architectures <= FP8_GPUS
    assert found.accumulation.removesuffix(f"+{found.library}") in ACCUMULATIONS[found.op]
    assert found.accumulation.endswith(f"+{found.library}") == (found.quantized_as is not None)
    assert ("fast" in found.name) == found.accumulation.startswith("fast")
    assert found.kernel_err_bound >= 1
    for exceptions in (found.compile_only, found.unmeasured):
        assert exceptions.keys() <= found.architectures
        assert all(exceptions.values())
    if not found.parts:
        assert not found.compile_only.keys() & found.unmeasured.keys()
    for module in (name for name in found.modules if not name.startswith("package:")):
        assert (KERNELS_ROOT / f"{module}.py").is_file()
    for part in found.parts:
        assert KERNELS[part].op in PARTS[found.op]
    if found.op not in ("gemm", *EPILOGUE_OPS):
        assert found.granularity is not Granularity.NONE
    if found.op != "gemm_norm":
        assert found.quantizes == bool(found.parts or found.quantized_as)
    else:
        assert found.quantizes == any(KERNELS[part].op == "quantize" for part in found.parts)
        assert not found.quantizes or found.granularity is not Granularity.NONE
    if not found.parts:
        assert found.name.startswith(f"{found.language}.")
        folder = "adapters" if found.library else found.language
        assert found.modules[0].startswith(f"{folder}/")
        assert found.library in ("", found.language)


@pytest.mark.parametrize("device", [H200, MI300X, CPU], ids=str)
@pytest.mark.parametrize("found", KERNELS.values(), ids=str)
def test_support_is_defined_for_every_problem(found: Kernel, device: Device) -> None:
    fp8 = fp8_format(device)
    problems = [
        make_problem(op, (96, 40, 56)[: len(OPS[op].axes)], **fields)
        for op in OPS
        for fields in (
            {}, {"batch": 3}, {"out_format": Format.FLOAT32}, {"epilogue": "bias"},
            {"a": Operand(fp8, Granularity.TENSOR)}, {"a": Operand(Format.FLOAT32)},
            {"a": Operand(fp8, Granularity.GROUP, Layout.STRIDED, 1)},
        )
    ]  # fmt: skip
    for problem in problems:
        answer = found.supports(problem, device)
        assert isinstance(answer, Accepted) or reason(answer).strip()
        if not found.runs_on(device) or problem.op != found.op:
            assert isinstance(answer, Rejected)


# --- compositions


def composed(op: str) -> list[Kernel]:
    return [k for k in KERNELS.values() if k.parts and k.op == op]


@pytest.mark.parametrize("found", composed("gemm_norm"), ids=str)
def test_compositions_with_a_norm_are_made_of_their_parts(found: Kernel) -> None:
    """A GEMM, which may be composed itself, and a norm; or quantizers and a fused kernel."""
    *front, last = found.name.split("+")
    parts = [KERNELS[name] for name in found.parts]
    assert (found.parts[-1], found.language) == (last, KERNELS[last].language)
    fused = KERNELS[last].op == "gemm_norm"
    multiplies = KERNELS[last if fused else "+".join(front)]
    assert found.granularity is multiplies.granularity
    assert found.b_granularity is multiplies.b_granularity
    if fused:
        assert found.accumulation == multiplies.accumulation
        assert found.kernel_err_bound == multiplies.kernel_err_bound
        assert found.quantizes
    else:
        accumulation = found.accumulation.removesuffix("rounded").removesuffix("+") or "float32"
        assert accumulation == multiplies.accumulation
        assert KERNELS[last].op == "norm_quantize"
        assert found.quantizes == multiplies.quantizes
    for reasons in ("compile_only", "unmeasured"):
        given = {name for part in parts for name in getattr(part, reasons)}
        assert getattr(found, reasons).keys() == given & found.architectures
    for device in (H200, MI300X, CPU):
        if found.runs_on(device):
            assert all(part.runs_on(device) for part in parts)
    assert found.architectures


def test_norms_are_composed_with_gemms_for_bfloat16_and_fp8() -> None:
    for name in ("torch.bf16", "torch.emulated_row", "torch.quantize_row+torch.emulated_row"):
        assert f"{name}+torch.norm_quantize" in KERNELS
    for name in ("tensor", "row", "block", "group"):
        fused = f"torch.norm_emulated_{name}"
        assert f"torch.quantize_{KERNELS[fused].granularity.suffix}+{fused}" in KERNELS
    assert norm_compositions.compose("torch.bf16", "gone.norm") is None
    assert norm_compositions.compose("gone.gemm", "torch.norm_quantize") is None
    assert norm_compositions.compose_quantized("gone.quantize", "torch.norm_emulated_row") is None
    assert norm_compositions.compose_quantized("torch.quantize", "gone.gemm_norm") is None


def test_a_composition_with_a_norm_refuses_problems_of_no_part() -> None:
    problem = make_problem("gemm_norm", (64, 256, 512), epilogue="bias+layer")
    plain = KERNELS["torch.bf16+torch.norm_quantize"]
    assert plain.supports(problem, CPU) == Accepted()
    wide = replace(problem, a=Operand(Format.FLOAT32))
    assert reason(plain.supports(wide, CPU)).startswith("torch.bf16: ")
    other = replace(problem, out_format=Format.FLOAT32)
    assert reason(plain.supports(other, CPU)).startswith("torch.norm_quantize: writes")
    fused = KERNELS["torch.quantize_row+torch.norm_emulated_row"]
    assert fused.supports(problem, CPU) == Accepted()
    assert "use torch.norm_emulated_row" in reason(
        fused.supports(replace(problem, a=Operand(Format.E4M3FN, Granularity.ROW)), CPU)
    )
    weight = Operand(Format.E4M3FN, Granularity.ROW, Layout.COLUMN)
    assert fused.supports(replace(problem, b=weight, prepared=True), CPU) == Accepted()
    weight = replace(weight, granularity=Granularity.BLOCK)
    found = fused.supports(replace(problem, b=weight, prepared=True), CPU)
    assert reason(found) == "needs a weight prepared as e4m3fn/row; it is e4m3fn/128x128"


@pytest.mark.parametrize("found", composed("gemm"), ids=str)
def test_compositions_are_made_of_their_parts(found: Kernel) -> None:
    quantizer, gemm = found.name.split("+")
    parts = [KERNELS[name] for name in found.parts]
    assert (found.parts[0], found.parts[-1]) == (quantizer, gemm)
    assert (found.op, found.language) == ("gemm", KERNELS[gemm].language)
    assert found.granularity is KERNELS[gemm].granularity
    assert KERNELS[quantizer].granularity is found.granularity
    assert found.b_granularity is KERNELS[gemm].b_granularity
    assert found.accumulation == KERNELS[gemm].accumulation
    assert found.kernel_err_bound == KERNELS[gemm].kernel_err_bound
    for reasons in ("compile_only", "unmeasured"):
        given = dict(item for part in parts for item in getattr(part, reasons).items())
        wanted = {name: why for name, why in given.items() if name in found.architectures}
        assert getattr(found, reasons) == wanted
    makes = {part.granularity for part in parts if part.op == "quantize"}
    assert makes == {found.granularity, found.b_granularity}
    for device in (H200, MI300X, CPU):
        if found.runs_on(device):
            assert all(part.runs_on(device) for part in parts)
    assert found.architectures


def test_gemm_on_an_h200_is_composed_of_the_cuda_quantizers() -> None:
    names = [k.name for k in composed("gemm") if k.runs_on(H200)]
    assert {name.split(".")[0] for name in names} == {"cuda", "torch"}
    assert any(name.startswith("triton.quantize_row+") for name in KERNELS)


def composition() -> Kernel:
    return KERNELS["torch.quantize_row+torch.emulated_row"]


def prepared(form: Format, granularity: Granularity) -> Problem:
    weight = Operand(form, granularity, Layout.COLUMN)
    return make_problem("gemm", (64, 256, 512), b=weight, prepared=True)


def test_a_composition_asks_its_gemm_about_the_alignment_of_a_prepared_weight() -> None:
    found = KERNELS["cuda.quantize_row+torch.scaled_mm_row"]
    problem = prepared(Format.E4M3FN, Granularity.ROW)
    assert found.supports(problem, H200) == Accepted()
    assert problem.b is not None
    askew = replace(problem, b=replace(problem.b, alignment=8))
    assert "operands must be 16-byte aligned" in reason(found.supports(askew, H200))


def test_a_composition_takes_weights_prepared_its_way() -> None:
    found = composition()
    assert found.supports(GEMM, CPU) == Accepted()
    assert found.supports(prepared(Format.E4M3FN, Granularity.ROW), CPU) == Accepted()
    assert found.supports(prepared(Format.E4M3FNUZ, Granularity.ROW), MI300X) == Accepted()
    for problem in (
        prepared(Format.E4M3FN, Granularity.BLOCK),
        prepared(Format.E5M2, Granularity.ROW),
    ):
        assert problem.b is not None
        assert reason(found.supports(problem, CPU)) == (
            "needs a weight prepared as e4m3fn/row; it is "
            f"{problem.b.format}/{problem.b.granularity}"
        )
    assert "e4m3fnuz/row" in reason(
        found.supports(prepared(Format.E4M3FN, Granularity.ROW), MI300X)
    )


def test_a_composition_refuses_problems_that_its_parts_refuse() -> None:
    found = composition()
    small = replace(GEMM, out_format=Format.E4M3FN)
    assert "writes the format of a, not e4m3fn" in reason(found.supports(small, CPU))
    quantized = replace(GEMM, a=Operand(Format.E4M3FN, Granularity.ROW))
    assert "unquantized a" in reason(found.supports(quantized, CPU))
    row_major = replace(GEMM, b=Operand(Format.BFLOAT16, layout=Layout.ROW))
    assert found.supports(row_major, CPU) == Accepted()
    triton = KERNELS["triton.quantize_row+torch.scaled_mm_row"]
    assert reason(triton.supports(row_major, MI300X)) == (
        "triton.quantize_row: takes row-major input"
    )
    odd = make_problem("gemm", (64, 40, 512))
    assert reason(triton.supports(odd, MI300X)).startswith("torch.scaled_mm_row: n and k must be")
    strided = replace(GEMM, a=Operand(Format.BFLOAT16, layout=Layout.STRIDED))
    assert reason(triton.supports(strided, MI300X)).startswith("triton.quantize_row: ")


def test_compose_needs_both_parts(registered: dict[str, Kernel]) -> None:
    before = set(registered)
    assert compositions.compose("gone.quantize", "torch.emulated_row") is None
    assert compositions.compose("torch.quantize", "gone.gemm") is None
    elsewhere = frozenset({"gfx90a"})
    assert compositions.compose("triton.quantize", "torch.emulated_block", elsewhere) is None
    assert set(registered) == before
    made = compositions.compose("triton.quantize", "torch.emulated_block")
    assert made is not None
    assert registered["triton.quantize_group+torch.emulated_block"] is made
    assert made.parts == ("triton.quantize_group", "triton.quantize_block", "torch.emulated_block")
    assert made.architectures == KERNELS["triton.quantize_group"].architectures
    with pytest.raises(ValueError, match="twice"):
        compositions.compose("triton.quantize", "torch.emulated_block")


# --- what importing needs


def in_a_fresh_process(program: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT.parent,
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_import_lokakern_is_light() -> None:
    loaded = in_a_fresh_process(
        "import json, sys\nimport lokakern\n"
        "assert all(hasattr(lokakern, name) for name in lokakern.__all__)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    assert "torch" in loaded
    assert not {"sqlalchemy", "triton", "cupy", "typer", "rich"} & set(loaded)


@pytest.mark.rest
def test_without_triton_and_cupy_the_rest_works() -> None:
    found = in_a_fresh_process(
        "import json, sys\n"
        "import torch\n"  # which has its own idea of what Triton is
        "sys.modules['triton'] = sys.modules['cupy'] = None\n"
        "import lokakern\n"
        "from lokakern.registry.register import KERNELS, kernel_named, load_kernels\n"
        "gone = load_kernels()\n"
        "try:\n    kernel_named('triton.quantize_row')\nexcept KeyError as error:\n"
        "    message = str(error)\n"
        "x = torch.ones(4, 8, dtype=torch.bfloat16)\n"
        "q = lokakern.quantize(x)\n"
        "print(json.dumps([gone, message, sorted(KERNELS), q.shape]))"
    )
    gone, message, names, shape = found
    assert "triton/quantize" in gone
    assert all(module.startswith(("triton/", "cuda/")) for module in gone)
    assert "; triton/quantize: " in message
    assert "torch.quantize_row+torch.emulated_row" in names
    assert not [name for name in names if "triton" in name]
    assert shape == [4, 8]


# --- scales that a kernel of another package declares


def outside(**fields: Any) -> Kernel:
    return kernel(modules=("python:acme",), **fields)


@pytest.mark.parametrize("op", ["quantize", "quantize_transpose", "dequantize", "scaled_gemm"])
def test_an_op_with_scales_needs_a_granularity(op: str, registered: dict[str, Kernel]) -> None:
    with pytest.raises(ValueError, match=f"{op} has scales, and granularity is NONE; .*ROW"):
        register(op)(launch)
    register(op, granularity="row")(launch)  # type: ignore[arg-type]
    (made,) = (k for k in registered.values() if k.name.endswith(f".{launch.__name__}"))
    assert made.granularity is made.b_granularity is Granularity.ROW
    with pytest.raises(ValueError, match="'rows' is not a valid Granularity"):
        register(op, granularity="rows")  # type: ignore[arg-type]


TENSOR, ROW, GROUP, BLOCK = (
    Granularity.TENSOR, Granularity.ROW, Granularity.GROUP, Granularity.BLOCK
)  # fmt: skip
QUANTIZED = {x: Operand(Format.E4M3FN, x, Layout.COLUMN) for x in (TENSOR, ROW, GROUP, BLOCK)}


@pytest.mark.parametrize(
    ("op", "declared", "fields", "reason"),
    [
        ("scaled_gemm", (ROW, ROW), {"a": ROW}, None),
        ("scaled_gemm", (ROW, ROW), {"a": TENSOR}, "a has tensor scales; it declares row"),
        ("scaled_gemm", (GROUP, BLOCK), {"a": GROUP}, None),
        ("scaled_gemm", (GROUP, GROUP), {"a": GROUP}, "b has 128x128 scales; it declares 1x128"),
        ("dequantize", (ROW, ROW), {"a": GROUP}, "a has 1x128 scales; it declares row"),
        ("quantize", (ROW, ROW), {}, None),
        ("quantize", (TENSOR, TENSOR), {}, "the output has row scales; it declares tensor"),
        ("quantize_transpose", (TENSOR, TENSOR), {},
         "the output has row scales; it declares tensor"),
        ("gemm", (ROW, ROW), {}, None),
        ("gemm", (ROW, ROW), {"b": ROW}, None),
        ("gemm", (ROW, ROW), {"b": BLOCK}, "b has 128x128 scales; it declares row"),
        ("gemm", (Granularity.NONE, Granularity.NONE), {"b": BLOCK}, None),  # it reads the source
    ],
)  # fmt: skip
def test_kernels_of_others_get_only_the_scales_that_they_declare(
    op: str, declared: tuple[Granularity, Granularity], fields: dict[str, Any], reason: str | None
) -> None:
    given: dict[str, Any] = {}
    if "a" in fields:
        given["a"] = Operand(Format.E4M3FN, fields["a"])
    if "b" in fields:
        given |= {"b": QUANTIZED[fields["b"]], "prepared": True}
    shape = (64, 256, 512) if "gemm" in op else (64, 512)
    problem = make_problem(op, shape, **given)
    found = outside(op=op, granularity=declared[0], b_granularity=declared[1])
    assert found.refusal(problem, CPU) == reason


def test_what_kernels_of_others_may_not_get_no_kernel_of_lokakern_takes() -> None:
    """The rule is that of lokakern's own kernels: it rejects nothing that they accept."""
    from lokakern.workloads.suites import SUITES

    accepted = 0
    for suite in SUITES.values():
        for case in list(suite.cases(H200))[::7]:
            for own in kernels_for(case.problem.op, H200):
                if not isinstance(own.supports(case.problem, H200), Rejected):
                    accepted += 1
                    assert registry._why_not_declared(own, case.problem) is None, own
    assert accepted


def test_cuts_of_sums_count_more_in_float16() -> None:
    """Of a product without promotion, in units of the output's rounding and 2^-13 of the sum."""
    problems = [make_problem("scaled_gemm", (64, 64, 2048), out_format=form)
                for form in (Format.BFLOAT16, Format.FLOAT16)]  # fmt: skip
    unit = [x.out_format.unit_roundoff + 2**-13 for x in problems]
    fast, promoted = (KERNELS[f"cuda.scaled_gemm_row{x}"] for x in ("_fast", ""))
    assert fast.bound_at(problems[1]) == pytest.approx(
        fast.bound_at(problems[0]) * unit[0] / unit[1]
    )
    assert promoted.bound_at(problems[1]) == promoted.bound_at(problems[0])
