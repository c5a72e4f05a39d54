"""Measure the cost of the sampled check for an FP8 layer, in host time and GPU time.

    python scripts/measure_check.py [--rounds N] [--kernel NAME]

Prints a line of JSON for each shape: microseconds a call of a frozen layer, eager, without a check,
with `1000:64` and with `1:64`. Blocks of 1000 calls, so that each has one check of `1000:64`, in
turn; medians over rounds. The host's clock stops when the last call is launched: where the GPU
is slower than that, launches wait for it. Any wait of ours for the GPU is an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

import lokakern
from lokakern import sampled_check
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import route_text
from lokakern.types import Granularity

CALLS = 1000
CHECKS = ("off", f"{CALLS}:64", "1:64")
SHAPES = ((256, 512, 512), (2048, 1024, 1024), (8192, 2048, 2048), (32768, 2048, 2048))  # m, n, k
BUDGET = lokakern.ErrorBudget(row_err=0.06)


def layer_of(n: int, k: int, kernel: str, check: str) -> Linear:
    """A layer whose output runs on a kernel at any m."""
    layer = Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    route = route_text(Granularity.ROW, *[[(0, kernel)]] * 2)
    route = sampled_check.Marker(check).mark(route, BUDGET, f"{n}x{k} {check}")
    layer.take_routes([route, "", ""], layer.weight)
    layer.freeze()
    return layer


def block_us(layer: Linear, x: torch.Tensor) -> tuple[float, float]:
    """A call's time on the host and on the GPU, over a block."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    started = time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(CALLS):
        layer(x)
    torch.cuda.set_sync_debug_mode("default")
    host_s = time.perf_counter() - started
    end.record()
    end.synchronize()
    return host_s / CALLS * 1e6, begin.elapsed_time(end) / CALLS * 1e3


@torch.no_grad()
def measure(m: int, n: int, k: int, kernel: str, rounds: int) -> dict[str, object]:
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    layers = {check: layer_of(n, k, kernel, check) for check in CHECKS}
    for layer in layers.values():
        block_us(layer, x)
    times: dict[str, list[tuple[float, float]]] = {check: [] for check in CHECKS}
    for place in range(rounds):
        for check in CHECKS if place % 2 else reversed(CHECKS):
            times[check].append(block_us(layers[check], x))
    found: dict[str, object] = {"m": m, "n": n, "k": k}
    for place, clock in enumerate(("host", "gpu")):
        us = {check: statistics.median(t[place] for t in times[check]) for check in CHECKS}
        pairs = zip(times[CHECKS[1]], times["off"], strict=True)
        ratios = [one[place] / other[place] - 1.0 for one, other in pairs]
        found[f"{clock}_us"] = {check: round(t, 2) for check, t in us.items()}
        found[f"{clock}_cost_of_{CHECKS[1]}"] = round(us[CHECKS[1]] / us["off"] - 1.0, 5)
        found[f"{clock}_cost_by_round"] = [round(ratio, 4) for ratio in sorted(ratios)]
        found[f"{clock}_us_of_a_check"] = round(us["1:64"] - us["off"], 1)
    rows = sampled_check.results(layer._routes[0] for layer in layers.values())
    checks = {row["site"].split()[1]: row["checks"] for row in rows}
    expected = {CHECKS[1]: rounds + 1, "1:64": (rounds + 1) * CALLS}
    if checks != expected:
        raise SystemExit(f"{checks} checks were made; expected {expected}")
    found["row_err"] = round(max(row["row_err"] for row in rows), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kernel", default="cuda.quantize_row+torch.scaled_mm_row")
    asked = parser.parse_args()
    card = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for shape in SHAPES:
        print(json.dumps(card | measure(*shape, asked.kernel, asked.rounds)), flush=True)


if __name__ == "__main__":
    main()
