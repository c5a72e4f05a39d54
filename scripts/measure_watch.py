"""Measure what `Conversion.watch` costs a training, and that it swaps without compiling.

    python scripts/measure_watch.py [graph] [compiled] [--rounds N] [--size tiny] [--out FILE]

The dense part of MLPerf's DLRM-DCNv2, bfloat16, fused AdamW: "graph" at 8192 samples in CUDA graphs
of torch.compile, "compiled" at 2048 without graphs. Blocks of steps with and without a watch, each
with one sampled step, run in turn; the overhead is the median of their ratios. Then one feature
grows until FP8 is unsafe. Prints a line for each case, and writes all figures to FILE. About a
minute on an H200; ``--size tiny --every 10 --kernels row`` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lokakern
from lokakern.bench.models.dlrm import SIZES
from lokakern.bench.models.throughput import sent
from lokakern.bench.models.zoo.architecture import Feature
from lokakern.bench.models.zoo.catalog import dlrm_dcnv2
from lokakern.conversion.convert import Conversion
from lokakern.conversion.drift_watch import TO_BF16, DriftWatch
from lokakern.types import COMPILED, COMPILED_GRAPH

CASES = {  # regime, mode of torch.compile, samples
    "graph": (COMPILED_GRAPH, "reduce-overhead", 8192),
    "compiled": (COMPILED, "default", 2048),
}
BUDGET, MOST_STEPS, GROWTH = 0.06, 500, 1e6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNTERS = torch._dynamo.utils.counters["stats"]


class Training:
    """A converted model with its optimizer and a batch; it is compiled at the first step."""

    def __init__(self, case: str, size: str, kernels: str | None) -> None:
        regime, mode, samples = CASES[case]
        config = SIZES[size]
        torch.manual_seed(0)
        self.model = dlrm_dcnv2(size).to(DEVICE, torch.bfloat16)
        self.ignored = config.dim  # the column of the first embedding's first element
        with torch.no_grad():  # products do not read it, as of a feature that tells nothing
            for name, module in self.model.named_modules():
                if isinstance(module, nn.Linear) and name.endswith((".down", "head.0")):
                    module.weight[:, self.ignored] = 0.0
        self.handle: Conversion = (
            lokakern.convert(self.model, kernels=kernels, regime=regime)
            if kernels
            else lokakern.convert(self.model, BUDGET, regime=regime)
        )
        # At a rate of 0 the drift is found in the model that was timed.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        columns = config.inputs.dense, len(config.inputs.rows) * config.dim
        self.inputs = [
            Feature(k, kind).draw(64 if size == "tiny" else samples, 0).to(DEVICE)
            for k, kind in zip(columns, ("X7", "X5"), strict=True)
        ]
        self.inputs[1].requires_grad_()
        self.labels = (torch.rand(len(self.inputs[0]), 1, device=DEVICE) < 0.03).bfloat16()
        self.compiled: Any = torch.compile(self.model, fullgraph=True, dynamic=False, mode=mode)

    def step(self) -> None:
        logits = self.compiled(*map(sent, self.inputs))
        nn.functional.binary_cross_entropy_with_logits(logits, self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def block_ms(self, count: int) -> float:
        """Time of a step, in a block of them; the host waits for the last one only."""
        if DEVICE == "cpu":
            begun = time.perf_counter()
            for _ in range(count):
                self.step()
            return (time.perf_counter() - begun) * 1e3 / count
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            self.step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count


def measure(case: str, size: str, every: int, rounds: int, kernels: str | None) -> dict[str, Any]:
    torch._dynamo.reset()
    watched = Training(case, size, kernels)
    with watched.handle.watch(budget=BUDGET, every=2) as watch:
        alone = Training(case, size, kernels)
        for _ in range(2):  # the first judgements may turn products off: compiled again in graphs
            for training in (watched, alone):
                for _ in range(8):  # compiled, and captured, sampled and not
                    training.step()
            watch.apply(wait=True)
        probe: Any = watch._probe
        without_waits(watched, watch)
        probe.every = every
        graphs = COUNTERS["unique_graphs"]
        ratios, plain_ms, beyond_ms = [], [], []
        for place in range(-1, rounds):  # the clock of a GPU comes down to where it stays
            # Early in a block, so that what the thread does is within it.
            while watch.steps % every != every - every // 10:
                watched.step()
            watch.apply(wait=True)
            found = {}
            for training in (watched, alone) if place % 2 else (alone, watched):
                found[training] = training.block_ms(every)
                begun = time.perf_counter()
                watch.apply(wait=True)
                if training is watched:
                    beyond_ms.append((time.perf_counter() - begun) * 1e3)
            if place >= 0:
                ratios.append(found[watched] / found[alone])
                plain_ms.append(found[alone])
        recompiled = COUNTERS["unique_graphs"] - graphs
        told = list(watch.events)
        steps, compiled = swapped_after(watched, watch)
    return {
        "case": case, "samples": len(watched.inputs[0]), "every": every,
        "overhead": statistics.median(ratios) - 1.0, "overheads": [x - 1.0 for x in ratios],
        "step_ms": statistics.median(plain_ms), "thread_beyond_block_ms": beyond_ms[1:],
        "layers": len({event.site for event in told}),
        "alarms": sum(bool(event.moved) for event in told), "recompiled": recompiled,
        "swapped_after": steps, "compiled_by_swap": compiled, "in_bf16": watch.in_bf16,
        "host_waits": 0 if DEVICE == "cuda" else None,  # or an error was raised
    }  # fmt: skip


def without_waits(watched: Training, watch: DriftWatch) -> None:
    """Sampled steps and others, in which an error is raised where the host waits for the GPU.

    The thread waits for it, on purpose: meanwhile it gets no windows.
    """
    if DEVICE == "cpu":
        return
    judge: Any = watch._judge
    judge.put, put = lambda sites: None, judge.put
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            watched.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        judge.put = put


def swapped_after(watched: Training, watch: DriftWatch) -> tuple[int | None, int]:
    """Steps from a drift until products run in bfloat16, and graphs that were compiled for it."""
    earlier, begun, graphs = len(watch.events), watch.steps, COUNTERS["unique_graphs"]
    watched.inputs[1].data[:, 0] *= GROWTH
    found = None
    for _ in range(MOST_STEPS):
        watched.step()
        if any(event.action == TO_BF16 for event in watch.events[earlier:]):
            found = watch.steps - begun
            break
    for _ in range(3):
        watched.step()
    return found, COUNTERS["unique_graphs"] - graphs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"{', '.join(CASES)}; all of them if none")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--every", type=int, default=100, help="steps between samples")
    parser.add_argument("--size", choices=list(SIZES), default="mlperf")
    parser.add_argument("--kernels", help="for all products, as of convert, instead of a budget")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if unknown := set(asked.cases) - CASES.keys():
        parser.error(f"no case {', '.join(unknown)}; expected some of {', '.join(CASES)}")
    rows = []
    for case in asked.cases or CASES:
        begun = time.perf_counter()
        row = measure(case, asked.size, asked.every, asked.rounds, asked.kernels)
        row |= {
            "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
            "torch": torch.__version__, "took_s": round(time.perf_counter() - begun, 1),
        }  # fmt: skip
        rows.append(row)
        print(
            f"{case} at {row['samples']}: overhead {row['overhead']:+.2%} of {row['step_ms']:.3f} "
            f"ms, {row['layers']} layers, {row['recompiled']} compiled, {row['alarms']} alarms; "
            f"swapped after {row['swapped_after']} steps, {row['compiled_by_swap']} compiled for "
            f"it; {row['took_s']} s",
            flush=True,
        )
        if asked.out:
            asked.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
