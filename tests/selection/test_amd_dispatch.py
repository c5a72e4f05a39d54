"""Dispatch on AMD GPUs, with a torch that is patched to look like a ROCm build."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lokakern
from lokakern import device, numerics
from lokakern.device import current_device, current_environment
from lokakern.errors import FormatError
from lokakern.kernels.compositions import _device_fp8
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, fp8_format, load_kernels
from lokakern.selection import arguments, dispatcher, misses
from lokakern.types import Accepted, Device, Format, Granularity, Operand, Problem, Rejected

load_kernels()
MI300X = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)
MI350X = Device("amd", "AMD Instinct MI350X", "gfx950", 256, 288)
OWN = {MI300X: Format.E4M3FNUZ, MI350X: Format.E4M3FN}


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Patch torch and the files of the driver to show a GPU."""

    def install(found: Device, *, compute: str = "SPX", memory: str = "NPS1") -> None:
        properties = SimpleNamespace(
            gcnArchName=f"{found.architecture}:sramecc+:xnack-",
            multi_processor_count=found.compute_units, total_memory=found.memory_gib << 30,
            pci_domain_id=0, pci_bus_id=0x2F, pci_device_id=0,
        )  # fmt: skip
        folder = tmp_path / "bus/pci/devices/0000:2f:00.0"
        (folder / "hwmon/hwmon3").mkdir(parents=True)
        (folder / "hwmon/hwmon3/power1_cap").write_text("750000000\n")
        (folder / "current_compute_partition").write_text(f"{compute}\n")
        (folder / "current_memory_partition").write_text(f"{memory}\n")
        (tmp_path / "module/amdgpu").mkdir(parents=True)
        (tmp_path / "module/amdgpu/version").write_text("6.14.14\n")
        monkeypatch.setattr(device, "_SYS", tmp_path)
        monkeypatch.setattr(torch.version, "hip", "7.0.2")
        monkeypatch.setattr(torch.version, "cuda", None)
        replaced = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_properties": lambda *_: properties,
            "get_device_name": lambda *_: found.product,
            "get_device_capability": lambda *_: (9, 4),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        forget()

    def forget() -> None:
        current_device.cache_clear()
        current_environment.cache_clear()
        device.devices_here.cache_clear()
        _device_fp8.cache_clear()
        dispatcher.use_snapshot(None)

    yield install
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("gpu", OWN, ids=str)
def test_a_gpu_is_identified_by_architecture_and_compute_units(gpu: Device, rocm: Any) -> None:
    rocm(gpu)
    assert current_device("cuda") == gpu
    assert fp8_format(current_device("cuda")) is OWN[gpu]
    assert _device_fp8(torch.device("cuda", 0)) is OWN[gpu].dtype
    environment = current_environment("cuda")
    assert (environment.driver, environment.toolkit) == ("6.14.14", "7.0.2")
    assert environment.power_cap_w == "750"


def test_a_partition_is_another_device(rocm: Any) -> None:
    part = Device("amd", MI300X.product, "gfx942", 38, 24)
    rocm(part, compute="CPX", memory="NPS4")
    found = current_device("cuda")
    assert found.partition == "CPX/NPS4"
    assert (found.compute_units, found.memory_gib) == (38, 24)
    assert found != MI300X


def test_a_driver_without_information_is_no_error(
    rocm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rocm(MI300X)
    monkeypatch.setattr(device, "_SYS", tmp_path / "nothing")
    current_device.cache_clear()
    current_environment.cache_clear()
    assert current_device("cuda").partition == "none"
    assert current_environment("cuda").driver == "unknown"
    assert current_environment("cuda").power_cap_w == "unknown"


def taking(problem: Problem, gpu: Device, language: str) -> set[str]:
    return {
        name
        for name, kernel in KERNELS.items()
        if kernel.language == language and isinstance(kernel.supports(problem, gpu), Accepted)
    }


@pytest.mark.parametrize("gpu", OWN, ids=str)
def test_each_gpu_multiplies_its_own_format(gpu: Device) -> None:
    """Bits of the other format mean half or twice as much; they are refused with a reason."""
    (other,) = set(OWN.values()) - {OWN[gpu]}
    for granularity in (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP):
        own = make_problem("scaled_gemm", (256, 128, 256), a=Operand(OWN[gpu], granularity))
        foreign = make_problem("scaled_gemm", (256, 128, 256), a=Operand(other, granularity))
        for language in ("hip", "triton", "torch"):
            kernels = taking(own, gpu, language)
            refusing = {name for name in kernels if "emulated" not in name}
            assert language == "hip" or granularity is Granularity.GROUP or refusing, language
            assert not refusing & taking(foreign, gpu, language)
            for name in refusing:
                answer = KERNELS[name].supports(foreign, gpu)
                assert isinstance(answer, Rejected) and other.value in answer.reason


def test_ocp_tensors_convert_to_fnuz_exactly_and_not_back() -> None:
    x = torch.randn(40, 200, generator=torch.Generator().manual_seed(0))
    for granularity in (Granularity.TENSOR, Granularity.ROW, Granularity.GROUP, Granularity.BLOCK):
        q = numerics.quantize(x, Format.E4M3FN, granularity)
        moved = numerics.to_fnuz(q)
        assert moved.format is Format.E4M3FNUZ
        assert torch.equal(numerics.dequantize(moved), numerics.dequantize(q))
        with pytest.raises(FormatError, match="refused"):
            numerics.to_fnuz(moved)


@pytest.mark.parametrize("gpu", OWN, ids=str)
def test_without_measurements_bf16_is_chosen_and_the_command_is_logged(
    gpu: Device, rocm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rocm(gpu)
    monkeypatch.setattr(misses, "LOGGED", set())
    choice = lokakern.dispatch("gemm", (4096, 256, 512), 0.06)
    assert choice.kernel == "torch.bf16" and choice.is_miss
    assert choice.table.device == gpu
    assert "not measured" in choice.explain()
    monkeypatch.setattr(arguments, "current_device", lambda *_: gpu)
    a, b = torch.randn(64, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    with caplog.at_level(logging.WARNING, "lokakern"):
        out = lokakern.gemm(a, b.t(), budget=0.06)
    assert torch.equal(out, a @ b.t())
    assert "using torch.bf16" in caplog.text
    assert "python -m lokakern.bench sweep --shape 64,16,32" in caplog.text


@pytest.mark.parametrize("gpu", OWN, ids=str)
def test_kernels_of_all_languages_compete(gpu: Device) -> None:
    """HIP, Triton and torch, as single kernels and as compositions."""
    gemm = make_problem("gemm", (4096, 256, 512))
    names = {name for name in KERNELS if isinstance(KERNELS[name].supports(gemm, gpu), Accepted)}
    assert {
        "torch.bf16",
        "hip.quantize_row+hip.scaled_gemm_row",
        "triton.quantize_group+hip.scaled_gemm_block",
        "hip.quantize_row+torch.scaled_mm_row",
        "triton.quantize_row+triton.scaled_gemm_row",
    } <= names
    assert ("hip.quantize_mx+hip.scaled_gemm_mx" in names) is (gpu is MI350X)
    norm = make_problem("gemm_norm", (4096, 512, 512), epilogue="bias+layer+affine")
    names = {name for name in KERNELS if isinstance(KERNELS[name].supports(norm, gpu), Accepted)}
    assert "hip.quantize_row+hip.scaled_gemm_row+triton.norm_quantize" in names
    assert dispatcher.snapshot() is not None
