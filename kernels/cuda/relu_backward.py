"""Gradient of a relu's input, quantized both ways, and the relu's output. See relu_backward.cu.

    dz = dy where y > 0 (or NaN), else 0

dy, y: [rows, columns], bfloat16, multiples of 128, at most 4096 columns; rows start at multiples of
16 bytes. dz: e4m3 or e5m2 with a scale for each row, and its transpose with 1x128 scales; y: its
transpose with 128x128 scales. Bytes are those of `lokakern.numerics.quantize`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lokakern import jit, nvrtc
from lokakern.device import current_device
from lokakern.driver import CudaLaunch, tensor_map
from lokakern.kernels.cuda.quantize_long import clusters_at_once
from lokakern.types import GROUP, QuantizedTensor

SOURCE = str(Path(__file__).with_suffix(".cu"))
TEAM = 256  # threads of a tile of 128 x 128
TEAMS = (4, 3, 2, 1)  # of a block
MOST_BLOCKS = 8  # of a cluster
MOST_COLUMNS = MOST_BLOCKS * TEAMS[0] * GROUP
# Of shared memory: a box, what goes across, lists by warp, divisors, a barrier.
TEAM_BYTES = GROUP * GROUP * (2 + 1) + TEAM // 32 * (GROUP * 2 + 4) + GROUP * 24 + 8
TOLD_BYTES = 2 * (GROUP * 8 + 8)  # amax of rows


class Plan(NamedTuple):
    """How blocks share 128 rows: how many there are, and how many tiles each of them has."""

    cluster: int
    teams: int

    @property
    def shared_bytes(self) -> int:
        return self.teams * TEAM_BYTES + TOLD_BYTES


def runs_on(device: torch.device) -> bool:
    """Whether the kernel runs on a device."""
    found = current_device(device.type, device.index or 0)
    return found.architecture == "sm_90" and nvrtc.why_not(found) is None


@functools.lru_cache(maxsize=4096)
def plan_of(rows: int, columns: int, units: int) -> Plan:
    """The fewest blocks for 128 rows that leave none of so many multiprocessors without any."""
    across, bands = columns // GROUP, rows // GROUP
    plans = [Plan(-(-across // teams), teams) for teams in TEAMS]
    plans = [plan for plan in plans if plan.cluster <= MOST_BLOCKS]
    return next((plan for plan in plans if plan.cluster * bands >= units), plans[-1])


@functools.lru_cache(maxsize=64)
def bind(plan: Plan, writes_output: bool, target: torch.dtype) -> CudaLaunch:
    """The launch for any number of rows."""
    macros = {
        "CLUSTER": plan.cluster, "TEAMS": plan.teams, "OUTPUT": int(writes_output),
        "IS_E5M2": int(target is torch.float8_e5m2), "INPUT_BYTES": 2, "IN_PLACE": 1, "WHOLE": 1,
        "POWER_OF_TWO": 0,
    }  # fmt: skip
    program = nvrtc.Program(SOURCE, "relu_backward", tuple(macros.items()))
    return CudaLaunch(
        program, pointers=6, scalars="iiqqqqq", threads=plan.teams * TEAM,
        shared_bytes=plan.shared_bytes, tensor_maps=2, cluster=plan.cluster, programmatic=True,
    )  # fmt: skip


def launch(
    dy: Tensor, y: Tensor, made: QuantizedTensor, turned: QuantizedTensor,
    output: QuantizedTensor | None,
) -> None:  # fmt: skip
    """Quantize the gradient of a relu's input and its transpose, and the relu's output.

    Args:
        dy: ``[m, n]``, bfloat16, with m and n as above; rows start at multiples of 16 bytes.
        y: The same.
        made: ``[m, n]``, with a scale for each row.
        turned: ``[n, m]``, of the same format, with 1x128 scales.
        output: ``[n, m]``, the transpose of y, with 128x128 scales; None for none.
    """
    rows, columns = dy.shape
    units = jit.compute_units(dy.get_device())
    plan = plan_of(rows, columns, units)
    every = made, turned, turned if output is None else output
    tensors = [x for of in every for x in (of.data, of.scale) if x is not None]  # FP8 has scales
    data, _, across, across_scale, y_across, y_scale = tensors
    strides = (
        data.stride(0), across.stride(0), across_scale.stride(1), y_across.stride(0),
        y_scale.stride(0),
    )  # fmt: skip
    clusters = min(rows // GROUP, clusters_at_once(plan.cluster, units))
    box = (GROUP, GROUP)
    bind(plan, output is not None, made.data.dtype)(
        (clusters * plan.cluster, 1, 1), tuple(tensors), (rows, columns, *strides),
        (tensor_map(dy, box, 0), tensor_map(y, box, 0)),
    )  # fmt: skip
