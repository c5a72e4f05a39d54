"""Compare quantizing a weight in each pass with keeping it for the micro-batches of a step.

    python scripts/measure_weight_quantizing.py [--device cpu --tiny]

Prints a line of JSON for each layer and dtype of its weight: microseconds of an optimizer step of
four micro-batches, forward and backward, of one layer whose input requires a gradient. Arms are
`nn.Linear`; a converted layer that quantizes its weight in each pass; and one that keeps it inside
`Conversion.weights_unchanged`. ``gpu_us`` is between two events, with all launches of the host
queued behind a pause; ``host_us`` is what the host takes for them. Products of output and input
have scales of rows, that of the weight 1x128, whatever dispatch would choose; with ``--chosen``
choices are those of `convert` at a budget of 0.06. On a CPU kernels are emulated, and times say
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lokakern.conversion.convert import Conversion, convert
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import route_text
from lokakern.types import Granularity

SHAPES = [(1024, 1024), (512, 1024), (2048, 2048)]  # n, k
MICRO_BATCHES = 4
BY_ROW = route_text(Granularity.ROW, *[[(0, "cuda.quantize_row+cuda.scaled_gemm_row")]] * 2)
BY_GROUP = route_text(
    Granularity.NONE, [(0, "cuda.quantize_group+cuda.scaled_gemm_group")], [(0, "")]
)
PAUSE = 100_000_000  # cycles, some 50 ms: the host is never behind


def converted(layer: nn.Linear, is_chosen: bool) -> Conversion:
    handle = convert(layer, 0.06 if is_chosen else 0.0, device="NVIDIA H200")
    if not is_chosen:
        assert isinstance(layer, Linear)
        layer.take_routes((BY_ROW, BY_ROW, BY_GROUP), layer.weight)
    return handle


def step(layer: nn.Module, x: Tensor, gradient: Tensor, scope: Any) -> None:
    """Forward and backward passes of an optimizer step, without the update."""
    with scope():
        for _ in range(MICRO_BATCHES):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.dtype is torch.float32):
                y = layer(x)
            y.backward(gradient)
            x.grad = None
    layer.zero_grad()


def timed(call: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Microseconds of a call: of the GPU, and of the host."""
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return 0.0, 1e6 * (time.perf_counter() - begin)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(PAUSE)  # type: ignore[no-untyped-call]
    first.record()
    begin = time.perf_counter()
    call()
    host = time.perf_counter() - begin
    last.record()
    torch.cuda.synchronize()
    return 1e3 * first.elapsed_time(last), 1e6 * host


def measured(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, rounds: int, is_chosen: bool
) -> dict[str, Any]:
    layers = {name: nn.Linear(k, n, device=device, dtype=dtype) for name in ("linear", "each")}
    handle = converted(layers["each"], is_chosen)
    arms: dict[str, tuple[nn.Module, Any]] = {
        "linear": (layers["linear"], contextlib.nullcontext),
        "each": (layers["each"], contextlib.nullcontext),
        "kept": (layers["each"], handle.weights_unchanged),
    }
    x = torch.randn(m, k, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for number in range(rounds + 3):
        for name, (layer, scope) in arms.items():
            found = timed(lambda layer=layer, scope=scope: step(layer, x, gradient, scope), device)  # type: ignore[misc]
            if number >= 3:  # compiled and warm
                times[name].append(found)
    row: dict[str, Any] = {"m": m, "n": n, "k": k, "weight": str(dtype).removeprefix("torch.")}
    for place, unit in enumerate(("gpu_us", "host_us")):
        row[unit] = {
            name: round(statistics.median(t[place] for t in found), 1)
            for name, found in times.items()
        }
    words = layers["each"].route_words()  # type: ignore[operator]
    return row | {"rounds": rounds, "routes": words}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--m", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--tiny", action="store_true", help="32 rows, 48 x 64, one round")
    parser.add_argument("--chosen", action="store_true", help="kernels of dispatch")
    options = parser.parse_args()
    m, shapes, rounds = options.m, SHAPES, options.rounds
    if options.tiny:
        m, shapes, rounds = 32, [(48, 64)], 1
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "emulated on a CPU"
    for n, k in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            row = measured(m, n, k, dtype, device, rounds, options.chosen)
            print(json.dumps({"device": name, **row}), flush=True)


if __name__ == "__main__":
    main()
