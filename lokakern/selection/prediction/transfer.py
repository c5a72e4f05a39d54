"""The time model of one GPU type, carried over to another one of its architecture by physics.

Rates are multiplied by the ratios of nominal peaks; what trees correct stays, and laws are left
out. Without measurements nothing tells how wrong that is, so a transferred prediction is shown and
never chosen.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

from msgspec import structs

from lokakern.selection.prediction.model_file import Model
from lokakern.types import Device


class Peaks(NamedTuple):
    """Nominal peaks of a product, of its data sheet.

    Attributes:
        bf16_tflops: Dense products of bfloat16; of FP8 twice as much.
        memory_tb_s: Bandwidth of memory.
    """

    bf16_tflops: float
    memory_tb_s: float


PEAKS = {
    "NVIDIA H100 80GB HBM3": Peaks(989.0, 3.35),
    "NVIDIA H100 PCIe": Peaks(756.0, 2.0),
    "NVIDIA H100 NVL": Peaks(835.0, 3.9),
    "NVIDIA H200": Peaks(989.0, 4.8),
}


def transferred(model: Model, device: Device) -> Model | None:
    """A model for another device; None if nothing is known to transfer it by."""
    before, now = PEAKS.get(model.device.product), PEAKS.get(device.product)
    is_whole = device.partition == model.device.partition == "none"
    if before is None or now is None or not is_whole:
        return None
    if device.architecture != model.device.architecture:
        return None  # its kernels are others
    compute, memory = now.bf16_tflops / before.bf16_tflops, now.memory_tb_s / before.memory_tb_s
    rates = model.content.rates
    rates = structs.replace(
        rates,
        compute_units=device.compute_units,
        fp8_flops_per_us=rates.fp8_flops_per_us * compute,
        bf16_flops_per_us=rates.bf16_flops_per_us * compute,
        unaligned_flops_per_us=rates.unaligned_flops_per_us * compute,
        bytes_per_us=rates.bytes_per_us * memory,
    )
    content = structs.replace(model.content, rates=rates, laws={}, device=asdict(device))
    return Model(content, model.path, model.digest, transferred_from=model.device.product)
