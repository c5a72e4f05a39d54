"""Files of plans: what is saved, what is refused, and damaged ones, without a GPU."""

from __future__ import annotations

import ast
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern import jit
from lokakern.driver import CudaLaunch
from lokakern.errors import ChoicesError, CompilationError
from lokakern.functional import gemm
from lokakern.native import build, plan_file, record, replay
from lokakern.native.plan_file import save_plans
from lokakern.nn import inductor, routed_chain, routed_matmul
from lokakern.nvrtc import Program

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests/support"
ELF = b"\x7fELF\x02" + bytes(59)
LAUNCH = CudaLaunch(Program("a.cu", "multiply"), pointers=2, threads=64, scalars="i",
                    shared_bytes=65536)  # fmt: skip
NEEDS_COMPILER = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def imaginary_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plan_file.nvrtc, "cubin", lambda program, architecture: ELF)
    monkeypatch.setattr(
        plan_file, "current_device", lambda *_: SimpleNamespace(architecture="sm_90")
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Imaginary GPU")
    code = {torch.float32: 6, torch.bfloat16: 15, torch.uint8: 0}
    module = SimpleNamespace(
        dtype_code=code.__getitem__, install=lambda *_: None, clear=lambda: None,
        operators=lambda: ["aten::mm", "aten::addmm"],
    )  # fmt: skip
    monkeypatch.setattr(replay.NATIVE, "module", module)
    monkeypatch.setattr(record, "KERNELS", {})
    monkeypatch.setattr(plan_file, "KERNELS", record.KERNELS)
    with torch.no_grad():
        yield


def signature(device: int, name: str, *rest: int) -> bytes:
    text = name.encode()
    padded = text + bytes(-len(text) % 8)
    return struct.pack("<2q", device, len(text)) + padded + struct.pack(f"<{len(rest)}q", *rest)


def multiplied(x: Tensor) -> Tensor:
    """A call whose launches are told, each by the address of a kernel."""
    out, workspace = torch.empty(4, 4), torch.zeros(16)
    for function in (0x1111, 0x2222):  # one program, loaded twice
        jit.recorder.launched(LAUNCH, (1, 1, 1), (x, workspace), (4,), (), function)
    torch.mm(x, x, out=out)
    return out


def call(of: bytes, function: Any = multiplied, op: str = "gemm") -> None:
    x = torch.ones(4, 4)
    replay._recorded(of, [x], function, (x,), {}, op)


def model_of(*calls: tuple[Any, ...]) -> Callable[[], None]:
    """A model that makes these calls."""

    def model() -> None:
        for arguments in calls:
            call(*arguments)

    return model


def test_a_file_has_each_kernel_once_and_the_calls_of_ops(tmp_path: Path) -> None:
    path = tmp_path / "model.plans"
    path.write_bytes(b"older")
    call(signature(0, "gemm", 3))  # before
    public = (signature(0, "gemm", 2), multiplied, "")
    assert save_plans(path, model_of((signature(0, "gemm", 1),), public)) == 1
    data = path.read_bytes()
    assert data.count(ELF) == 1
    assert signature(0, "gemm", 1) in data
    assert signature(0, "gemm", 2) not in data
    assert signature(0, "gemm", 3) not in data
    assert struct.pack("<q", 0x1111) not in data
    assert struct.pack("<q", 0x2222) not in data
    assert [x.name for x in tmp_path.iterdir()] == ["model.plans"]


def test_text_with_addresses_is_what_the_library_installs() -> None:
    with replay.keeping() as kept:
        call(signature(0, "gemm"))
    (recording,) = kept.calls.values()
    assert isinstance(recording, record.Recording)
    text = recording.text()
    assert recording.kernels == [0x1111, 0x2222]
    numbered = recording.text({0x1111: 5, 0x2222: 5})
    changed = text
    for function in recording.kernels:
        changed = changed.replace(struct.pack("<q", function), struct.pack("<q", 5))
    assert numbered == changed != text


def scaled(x: Tensor) -> Tensor:
    """A call with a tensor of its own."""
    jit.recorder.constant(SCALE)
    return multiplied(x)


SCALE = torch.ones(1)


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([], "on 0 GPUs"),
        ([(signature(0, "gemm"),), (signature(1, "gemm"),)], "on 2 GPUs"),
        ([(signature(0, "gemm"), torch.rand_like)],
         r"gemm\(torch.float32 \[4, 4\]\) calls aten::rand_like"),
        ([(signature(0, "gemm"),), (signature(0, "gemm", 1), scaled)], "cached tensor"),
        ([(signature(0, "gemm"), torch.relu)],
         "a call needs aten::relu; files may hold aten::addmm, aten::mm"),
    ],
)  # fmt: skip
def test_calls_that_cpp_cannot_make_are_refused_with_reasons(
    calls: list[tuple[Any, ...]], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.plans"
    with pytest.raises(ChoicesError, match=reason):
        save_plans(path, model_of(*calls))
    assert not path.exists()


def test_a_call_that_stays_in_python_is_refused(tmp_path: Path) -> None:
    library = torch.library.Library("lokakern", "FRAGMENT")
    replay.recorded_op(library, "never(Tensor x) -> Tensor", torch.neg)
    replay.NATIVE.module.recorded = lambda: None
    with pytest.raises(ChoicesError, match="no call of never was recorded"):
        save_plans(tmp_path / "model.plans", torch.ops.lokakern.never_cold, torch.ones(2))


def test_choices_forgotten_by_the_model_are_not_saved(tmp_path: Path) -> None:
    def model() -> None:
        call(signature(0, "gemm"))
        replay.forget()

    with pytest.raises(ChoicesError):
        save_plans(tmp_path / "model.plans", model)


def test_it_needs_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay.NATIVE, "module", None)
    monkeypatch.setenv("LOKAKERN_NATIVE", "off")
    with pytest.raises(CompilationError, match="LOKAKERN_NATIVE is 'off'"):
        save_plans(tmp_path / "model.plans", model_of((signature(0, "gemm"),)))


def test_a_failed_write_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.plans"
    path.write_bytes(b"older")

    def full(source: str, target: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(plan_file.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        save_plans(path, model_of((signature(0, "gemm"),)))
    assert [(x.name, x.read_bytes()) for x in tmp_path.iterdir()] == [("model.plans", b"older")]


# --- loaded, with a stand-in for the driver


def environment(folder: Path) -> dict[str, str]:
    """For a process that finds the stand-in."""
    cxx = build.compiler()
    assert cxx is not None
    made = folder / "libcuda.so.1"
    subprocess.run([cxx, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(made),
                    str(SUPPORT / "fake_cuda.cpp")], check=True)  # fmt: skip
    paths = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    return {**os.environ, "LD_LIBRARY_PATH": paths, "PYTHONPATH": str(ROOT)}


def saved(folder: Path) -> Path:
    model = model_of((signature(0, "gemm", 1),), (signature(0, "quantize_weight", 2),))
    save_plans(folder / "model.plans", model)
    return folder / "model.plans"


@NEEDS_COMPILER
@pytest.mark.rest
def test_saved_files_load_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    script = [sys.executable, str(SUPPORT / "damaged_plans.py"), str(saved(tmp_path)), "1500"]
    done = subprocess.run(script, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"


PROGRAM = """
import ctypes, sys
import torch
assert "lokakern" not in sys.modules
library = ctypes.CDLL(sys.argv[1])
library.lokakern_load_plans.restype = ctypes.c_char_p
for path in sys.argv[2:]:
    reason = library.lokakern_load_plans(path.encode(), 0)
    print("loaded" if reason is None else reason.decode())
for schema in torch._C._jit_get_all_schemas():
    if schema.name.startswith("lokakern::"):
        print(schema)
"""


@NEEDS_COMPILER
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
@pytest.mark.rest
def test_the_example_builds_and_its_library_needs_no_python(tmp_path: Path) -> None:
    made = tmp_path / "build"
    prefix = f"-DCMAKE_PREFIX_PATH={torch.__path__[0]}"
    for command in (
        ["cmake", "-S", str(ROOT / "examples/serve_cpp"), "-B", str(made), prefix],
        ["cmake", "--build", str(made)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    asked = subprocess.run([str(made / "serve")], capture_output=True, text=True)
    assert asked.returncode == 2
    assert "usage: serve model.plans" in asked.stderr
    path = saved(tmp_path)
    files = [str(path), str(tmp_path / "model.pt2"), str(tmp_path / "missing.pt"), "output.pt"]
    failed = subprocess.run([str(made / "serve"), *files], capture_output=True, text=True)
    assert failed.returncode == 1
    assert f"cannot read {files[2]}" in failed.stderr
    other = tmp_path / "other.plans"
    other.write_bytes(path.read_bytes().replace(b"Imaginary GPU", b"Imaginary GPX"))
    library = made / "liblokakern_ops.so"
    script = [sys.executable, "-c", PROGRAM, str(library), str(path), str(other), "missing"]
    done = subprocess.run(script, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    good, refused, missing, *schemas = done.stdout.splitlines()
    assert good == "loaded"
    assert "compiled for Imaginary GPX; this GPU is Imaginary GPU" in refused
    assert missing.startswith("cannot read missing")
    listed = (build.FOLDER / "ops.h").read_text().split("kOps[] = {")[1].split("}")[0]
    ops = [name.strip().strip('"') for name in listed.split(",")]
    in_python = [getattr(torch.ops.lokakern, name).default._schema for name in ops]
    defining = {x.__name__ for x in (inductor, routed_chain, routed_matmul, gemm)}
    assert defining <= set(sys.modules)
    assert sorted(schemas) == sorted(map(str, in_python))


def test_a_call_of_an_op_without_plans_is_refused(tmp_path: Path) -> None:
    """An FP8 output with a static scale needs a tensor that Python keeps."""
    like = torch.ones(4, 4)
    given = (like, None, None, "rms", 4, "", 0.0)

    def model() -> None:
        call(signature(0, "gemm", 1))
        torch.ops.lokakern.kept_output_scale(*given)

    with pytest.raises(ChoicesError, match="no call of kept_output_scale was recorded"):
        save_plans(tmp_path / "model.plans", model)


def test_programs_without_python_know_ops_as_python_defines_them() -> None:
    text = (ROOT / "lokakern/native/ops.h").read_text(encoding="utf-8")
    table = text.partition("kSchemas[] = {")[2].partition("};")[0]
    schemas = ast.literal_eval(f"[{table}]")
    assert len(schemas) > 20
    for schema in schemas:
        name = schema.partition("(")[0]
        found = torch._C.parse_schema(f"lokakern::{schema}")
        assert found == getattr(torch.ops.lokakern, name).default._schema, name
