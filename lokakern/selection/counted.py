"""Cycles of compiled kernels for AMD GPUs, by which kernels are ordered that nobody measured.

They were counted from instructions (kernels/hip/README.md), never measured. Tests compare the
snapshots that they are read from with the compilers' output.
"""

from __future__ import annotations

import functools
import json
import math
from typing import NamedTuple

from lokakern.registry.digests import KERNELS_ROOT
from lokakern.types import Device, Problem

LANGUAGES = ("hip", "triton")
SIMDS = 4  # of a compute unit
PARTS_OF_ROWS = "triton.gemm_block_norm"  # others hold whole rows in a block
DEPTHS = (256, 4096)  # k of two counts, between and beyond which cycles are a line


class Variant(NamedTuple):
    """A compiled kernel: the sums of a block, its waves, and cycles of a wave at `DEPTHS`."""

    tile_m: int
    tile_n: int
    waves: int
    cycles: tuple[float, float]

    def at(self, problem: Problem, compute_units: int) -> float:
        """Cycles of the busiest SIMD, whose waves take turns.

        Recorded kernels have one norm and activation each: of a norm only what k adds is counted.
        """
        blocks = -(-problem.m // self.tile_m) * -(-problem.n // self.tile_n)
        waves = -(-blocks // compute_units) * self.waves / SIMDS
        first, last = self.cycles
        slope = (last - first) / (DEPTHS[1] - DEPTHS[0])
        once = first - slope * DEPTHS[0] if problem.op == "scaled_gemm" else 0.0
        return waves * (once + slope * problem.k)


def counted_cycles(kernel: str, problem: Problem, device: Device) -> float:
    """Cycles of a registered kernel in the best of its recorded tiles, infinite without any.

    A launch whose blocks do not fill the GPU waits longer than counted.
    """
    variants = _variants(device.architecture).get(kernel, [])
    if problem.op == "gemm_norm" and not kernel.startswith(PARTS_OF_ROWS):
        variants = [each for each in variants if each.tile_n >= problem.n]
    return min((each.at(problem, device.compute_units) for each in variants), default=math.inf)


@functools.cache
def _variants(architecture: str) -> dict[str, list[Variant]]:
    found: dict[str, list[Variant]] = {}
    for language in LANGUAGES:
        path = KERNELS_ROOT / language / "resources.json"
        for recorded in json.loads(path.read_text("utf-8")).get(architecture, {}).values():
            if "whole" in recorded:
                whole = recorded["whole"]
                first, last = (_sum(whole[f"k={depth}"]) for depth in DEPTHS)
                tile_m, tile_n = recorded["tile"]
                variant = Variant(tile_m, tile_n, recorded["waves"], (first, last))
                for name in recorded["kernels"]:
                    found.setdefault(name, []).append(variant)
    return found


def _sum(counted: dict[str, float]) -> float:
    return sum(counted[kind] for kind in ("matrix", "vector", "scalar", "local", "memory", "waits"))
