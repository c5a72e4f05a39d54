"""FP8 in every layer that it fits, whatever it costs: what a user without dispatch does."""

from __future__ import annotations

from torch import nn

from lokakern.bench.compare.by_library import owner_of
from lokakern.conversion.convert import convert
from lokakern.device import current_device
from lokakern.errors import UnsupportedError
from lokakern.nn.routed_matmul import PLAIN, route_text
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.types import Granularity

FP8_MULTIPLE = 16  # of the sizes that torch's FP8 product takes


def fits(layer: nn.Linear) -> bool:
    """Whether torch's FP8 product takes its sizes."""
    return layer.in_features % FP8_MULTIPLE == 0 == layer.out_features % FP8_MULTIPLE


def stock_kernel(granularity: Granularity) -> Kernel:
    """The FP8 product of torch itself, promoted, on this device; its emulation elsewhere.

    Raises:
        UnsupportedError: Neither takes such scales.
    """
    load_kernels()
    found = [
        kernel
        for kernel in KERNELS.values()
        if kernel.op == "gemm"
        and kernel.quantizes
        and owner_of(kernel) == "torch"
        and kernel.granularity is kernel.b_granularity is granularity
        and kernel.accumulation in ("promoted", "float32")
        and kernel.runs_on(current_device())
    ]
    if not found:
        raise UnsupportedError(f"torch has no FP8 product with {granularity} scales here")
    return min(found, key=lambda kernel: ("any" in kernel.architectures, kernel.name))


def quantize_everywhere(
    model: nn.Module, granularity: Granularity, *, inference: bool
) -> tuple[str, ...]:
    """Run all three products of every layer that fits in E4M3, in place.

    Args:
        model: Its linear layers become `lokakern.Linear`.
        granularity: Of all scales: TENSOR or ROW.
        inference: Whether weights are quantized once and for all.

    Returns:
        What ran, and the layers that do not fit.
    """
    kernel = stock_kernel(granularity)
    everywhere, nowhere = [(0, kernel.name)], [(0, "")]
    weight_route = route_text(granularity, everywhere, nowhere)
    sum_route = route_text(Granularity.NONE, everywhere, nowhere)
    left = []
    for site in convert(model, None, inference=inference).sites.values():
        layer = site.module
        assert isinstance(layer, nn.Linear)  # of which the models are made
        if not fits(layer):
            left.append(f"{site.name} ({layer.out_features}x{layer.in_features})")
            continue
        routes = (
            weight_route,
            PLAIN if inference else weight_route,
            PLAIN if inference else sum_route,
        )
        layer.take_routes(routes, layer.weight)
        if inference:
            layer.freeze()
    words = f"{len(left)} layers are not multiples of {FP8_MULTIPLE}: {', '.join(left)}"
    return (kernel.name, *([words] if left else []))
