"""Times and memory of training steps with the options of `convert`, in CUDA graphs on a GPU.

    python scripts/measure_training_options.py [wide] [tower] [--batch N] [--out FILE]

A step is four micro-batches whose gradients add up: in `weight.grad` of bfloat16 weights, or with
``main_grads=True`` in float32. Products are those of `convert(model, 0.06)`; or all of them in FP8,
with scales of rows, with one dynamic scale for each tensor, and with delayed ones, whose step ends
with `update`. Each variant is compiled, captured, and races bfloat16 in turn. Prints a line for
each with its speedup and 95 % interval, the time of a micro-batch, and the memory of a step beside
parameters. ``--batch 64`` on a CPU tries it, in emulation and without times of a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lokakern
from lokakern.bench.models.throughput import EVENTS, HOST, Stepper, aside, capture, race, warm
from lokakern.bench.models.zoo.catalog import ZOO
from lokakern.types import COMPILED_GRAPH

MICRO_BATCHES = 4
BUDGET = 0.06
VARIANTS: dict[str, dict[str, Any]] = {
    "by budget": {"report_or_budget": BUDGET},
    "by budget, main gradients": {"report_or_budget": BUDGET, "main_grads": True},
    "rows": {"kernels": "row"},
    "tensor, dynamic": {"kernels": "tensor"},
    "tensor, delayed": {"kernels": "tensor", "scaling": "delayed"},
}


def stepper(name: str, batch: int, variant: str, options: dict[str, Any] | None) -> Stepper:
    """A variant of a model, warm and captured; without options bfloat16."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = ZOO[name].build().to(device, torch.bfloat16).train()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    handle = None
    if options is not None:
        how = dict(options)
        given = [how.pop("report_or_budget")] if "report_or_budget" in how else []
        handle = lokakern.convert(model, *given, regime=COMPILED_GRAPH, **how)
    inputs = [
        [feature.draw(batch, seed).to(device).requires_grad_(feature.is_learned)
         for feature in ZOO[name].features]
        for seed in range(MICRO_BATCHES)
    ]  # fmt: skip
    compiled: Callable[..., Tensor] = torch.compile(
        model, dynamic=False, backend="inductor" if on_gpu else "aot_eager"
    )

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        if handle is not None and "main_grads" in (options or {}):
            handle.main_grads.zero()
        for each in inputs:
            for x in each:
                x.grad = None
            compiled(*each).float().square().mean().backward()  # type: ignore[no-untyped-call]
        if handle is not None and "scaling" in (options or {}):
            handle.delayed_scaling.update()

    found = Stepper(variant, step, step, EVENTS if on_gpu else HOST, steps=MICRO_BATCHES)
    with aside(on_gpu):
        warm(step)
    if on_gpu:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        found.peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
        capture(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["wide", "tower"], help="of the zoo")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out is not None:
        try:
            asked.out.open("a", encoding="utf-8").close()
        except OSError as error:  # before minutes of measuring
            parser.error(f"--out cannot be written: {error}")
    rows = []
    for name in asked.models:
        plain = stepper(name, asked.batch, "bf16", None)
        for variant, options in VARIANTS.items():
            other = stepper(name, asked.batch, variant, options)
            pace = race(plain, other, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            rows.append({"model": name, "bf16_gib": plain.peak_gib, **asdict(pace)})
            memory = ""
            if other.peak_gib is not None:
                memory = f", {plain.peak_gib:.2f} and {other.peak_gib:.2f} GiB"
            print(
                f"{name}, {variant}: {pace.speedup:.3f}x +- {pace.speedup_margin:.3f}, "
                f"{pace.baseline_us:.0f} and {pace.step_us:.0f} us a micro-batch{memory} "
                f"({pace.timer})",
                flush=True,
            )
            if asked.out is not None:
                asked.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
            del other
            gc.collect()


if __name__ == "__main__":
    main()
