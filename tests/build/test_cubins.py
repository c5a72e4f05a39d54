"""Compiled kernels as files: whole machine code, of the kernel that was named, or a reason."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lokakern import nvrtc
from lokakern.build.cubins import cubins
from lokakern.errors import DeviceError, UnknownNameError, UnsupportedError
from lokakern.problems import make_problem
from lokakern.types import Device

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
PROBLEM = make_problem("quantize", (4096, 512))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings", reason="needs NVRTC")
    monkeypatch.setenv("LOKAKERN_CACHE", str(tmp_path))


def test_a_file_is_the_machine_code_without_the_checksum() -> None:
    (found,) = cubins("cuda.quantize_row", PROBLEM, H200)
    (entry,) = nvrtc.cache_folder().glob("*.cubin")
    code = found.path.read_bytes()
    assert code.startswith(b"\x7fELF")
    assert entry.read_bytes()[: len(code)] == code and len(entry.read_bytes()) == len(code) + 32
    assert found.entry == "quantize" and found.macros["COLUMNS"] == 512
    assert cubins("cuda.quantize_row", PROBLEM, H200) == [found]
    assert [path.name for path in found.path.parent.iterdir()] == [found.path.name]


def test_a_composition_has_a_file_for_each_function() -> None:
    problem = make_problem("gemm", (4096, 512, 512))
    found = cubins("cuda.quantize_row+cuda.scaled_gemm_row", problem, H200)
    assert {cubin.entry for cubin in found} == {"quantize", "scaled_gemm"}
    assert len({cubin.path for cubin in found}) == len(found)


def test_threads_write_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    write, both = Path.write_bytes, threading.Barrier(2, timeout=60)

    def wait(path: Path, code: bytes) -> int:
        count = write(path, code)
        both.wait()
        return count

    monkeypatch.setattr(Path, "write_bytes", wait)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(cubins, "cuda.quantize_row", PROBLEM, H200) for _ in range(2)]
    assert found[0].result() == found[1].result()


@pytest.mark.parametrize(
    ("kernel", "device", "kind", "words"),
    [
        ("cuda.quantize_group", H200, UnsupportedError, "makes 1x128 scales, not row"),
        ("triton.quantize_row", H200, UnsupportedError, r"expected a kernel cuda\.\*"),
        ("torch.quantize_row", H200, UnsupportedError, r"expected a kernel cuda\.\*"),
        ("cuda.quantize", H200, UnknownNameError, "is not registered"),
        ("cuda.quantize_row", "cpu", DeviceError, "cpu"),
    ],
)
def test_what_has_no_file_is_told(
    kernel: str, device: Device | str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        cubins(kernel, PROBLEM, device)
