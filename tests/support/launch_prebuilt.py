"""Launch prebuilt Triton kernels: ``python tests/support/launch_prebuilt.py DEVICE``.

Run by test_prebuild.py in a process of its own. DEVICE is the fields of a `Device`, in JSON. Where
that GPU is not here, real tensors lie on the CPU and Triton's own launch goes through all but the
GPU's driver. Prints, in JSON, how often Triton looked into its cache on disk and how often it hit.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver

from lokakern.device import devices_here
from lokakern.kernels import compositions
from lokakern.kernels.triton import quantize, scaled_gemm
from lokakern.measure.norm_operands import operands_of
from lokakern.problems import make_problem
from lokakern.registry.register import fp8_format
from lokakern.sweep.engine import candidates
from lokakern.triton_job import _AbsentDriver, target_of
from lokakern.types import Device, Granularity, Layout, Operand, Problem
from lokakern.workloads.suites import dequantize_case, gemm_cases, quantize_case


def problems_of(device: Device) -> list[Problem]:
    """A small GEMM and its parts; and one with sizes of 1 and not divisible by 16."""
    fp8 = fp8_format(device)
    weight = Operand(fp8, Granularity.ROW, Layout.COLUMN, alignment=8)
    cases = [
        *gemm_cases(512, 256, 256, "X1", fp8),
        quantize_case(256, 256, Granularity.BLOCK, "X1", fp8),
        dequantize_case(512, 256, Granularity.BLOCK, "X1", fp8),
    ]
    odd = make_problem("gemm", (100, 1, 200), b=weight, prepared=True, epilogue="bias")
    return [*(case.problem for case in cases), odd]


class _InertDriver(_AbsentDriver):
    """Loads and launches nothing."""

    launches = 0
    utils = SimpleNamespace(
        get_device_properties=lambda _device: {"max_shared_mem": 2**20},
        load_binary=lambda *_: (object(), None, 0, 0, 1024),
        unload_module=lambda _module: None,
    )

    def launcher_cls(self, _source: Any, _metadata: Any) -> Any:
        return self._launch

    def _launch(self, *_: Any) -> None:
        self.launches += 1


def pretend(device: Device) -> _InertDriver:
    """CPU tensors become those of a GPU to the launchers."""
    found = _InertDriver(target_of(device))
    driver.set_active(found)
    torch._C._cuda_getDevice = lambda: -1  # what CPU tensors say of their device
    torch._C._cuda_getCurrentRawStream = lambda _device: 0
    scaled_gemm.compute_units = lambda _device: device.compute_units
    scaled_gemm.for_amd = quantize.for_amd = lambda: device.vendor == "amd"
    compositions._device_fp8 = lambda _device: fp8_format(device).dtype
    return found


def main(text: str) -> None:
    device = Device(**json.loads(text))
    here = device in devices_here()
    inert = None if here else pretend(device)
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    for problem in problems_of(device):
        kernels = [k for k in candidates(problem, device) if k.language == "triton"]
        where = torch.device("cuda" if here else "cpu")
        operands = operands_of(problem, "X1", where, device, cold=False)
        for kernel in kernels:
            operands.call_of(kernel, 0)()
    if here:
        torch.cuda.synchronize()
    launches = inert.launches if inert else None
    print(json.dumps({"looks": len(hits), "hits": sum(hits), "launches": launches}))


if __name__ == "__main__":
    main(sys.argv[1])
