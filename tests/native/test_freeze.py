"""Files of plans: what is saved, what is refused, and damaged ones, without a GPU."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern import jit
from lokakern.driver import CudaLaunch
from lokakern.errors import ChoicesError
from lokakern.native import build, freeze, record, replay
from lokakern.native.freeze import save_plans
from lokakern.nvrtc import Program

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests/support"
ELF = b"\x7fELF\x02" + bytes(59)
LAUNCH = CudaLaunch(Program("a.cu", "multiply"), pointers=2, threads=64, scalars="i",
                    shared_bytes=65536)  # fmt: skip
NEEDS_COMPILER = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def imaginary_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(freeze.nvrtc, "cubin", lambda program, architecture: ELF)
    monkeypatch.setattr(freeze, "current_device", lambda *_: SimpleNamespace(architecture="sm_90"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Imaginary GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    code = {torch.float32: 6, torch.bfloat16: 15, torch.uint8: 0}
    module = SimpleNamespace(dtype_code=code.__getitem__, install=lambda *_: None)
    monkeypatch.setattr(replay.NATIVE, "module", module)
    monkeypatch.setattr(replay, "OPS", {})
    monkeypatch.setattr(freeze, "OPS", replay.OPS)
    monkeypatch.setattr(record, "KERNELS", {})
    monkeypatch.setattr(freeze, "KERNELS", record.KERNELS)
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


def test_a_file_has_each_kernel_once_and_the_calls_of_one_gpu(tmp_path: Path) -> None:
    path = tmp_path / "model.plans"
    path.write_bytes(b"older")
    call(signature(0, "gemm", 1))
    call(signature(1, "gemm", 1))
    call(signature(0, "gemm", 2), op="")  # a public function
    assert save_plans(path) == 1
    data = path.read_bytes()
    assert data.count(ELF) == 1
    assert signature(0, "gemm", 1) in data
    assert signature(1, "gemm", 1) not in data
    assert struct.pack("<q", 0x1111) not in data
    assert struct.pack("<q", 0x2222) not in data
    assert save_plans(path, "cuda:1") == 1
    assert [x.name for x in tmp_path.iterdir()] == ["model.plans"]


def test_text_with_addresses_is_what_the_library_installs() -> None:
    call(signature(0, "gemm"))
    (recording,) = replay.OPS.values()
    assert isinstance(recording, record.Recording)
    text = recording.text()
    assert recording.kernels == [0x1111, 0x2222]
    numbered = recording.text({0x1111: 5, 0x2222: 5})
    changed = text
    for function in recording.kernels:
        changed = changed.replace(struct.pack("<q", function), struct.pack("<q", 5))
    assert numbered == changed != text


def test_calls_that_cannot_be_replayed_are_refused_with_reasons(tmp_path: Path) -> None:
    path = tmp_path / "model.plans"
    with pytest.raises(ChoicesError, match="run the exported model three times"):
        save_plans(path)

    call(signature(0, "gemm"), torch.rand_like)
    with pytest.raises(ChoicesError, match=r"gemm\(torch.float32 \[4, 4\]\) calls aten::rand_like"):
        save_plans(path)
    replay.OPS.clear()

    def scaled(x: Tensor) -> Tensor:
        jit.recorder.constant(SCALE)
        return multiplied(x)

    call(signature(0, "gemm"), scaled)
    with pytest.raises(ChoicesError, match="cached tensor"):
        save_plans(path)
    assert not path.exists()


SCALE = torch.ones(1)


def test_more_calls_than_are_kept_are_not_saved_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_MOST_OPS", 2)
    for i in range(4):
        call(signature(0, "gemm", i))
    assert len(replay.OPS) == 3
    with pytest.raises(ChoicesError, match="more than 2 calls"):
        save_plans(tmp_path / "model.plans")


def test_forgotten_choices_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(signature(0, "gemm"))
    monkeypatch.setattr(replay.NATIVE, "module", None)
    replay.forget()
    with pytest.raises(ChoicesError):
        save_plans(tmp_path / "model.plans")


def test_a_failed_write_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.plans"
    path.write_bytes(b"older")
    call(signature(0, "gemm"))

    def full(source: str, target: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(freeze.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        save_plans(path)
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
    call(signature(0, "gemm", 1))
    call(signature(0, "quantize_weight", 2))
    save_plans(folder / "model.plans")
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
