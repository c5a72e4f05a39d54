"""Measure the host time of steps of converted models of the zoo, as a multiple of bfloat16's.

    python scripts/measure_step_host.py [--train] [--batch N] [--steps N] [--rounds N] [MODEL ...]

Prints a line of JSON for each model. Blocks of steps without CUDA graphs, of bfloat16 and of the
converted model, compiled and eager, in random order. The host's clock stops when the last step of a
block is launched, then the block waits for the GPU. If a block makes more launches than the queue
of the GPU holds, its host time contains time on the GPU: measure fewer steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lokakern
from lokakern import native
from lokakern.bench.models.zoo.catalog import ZOO

WARM_STEPS = 4


def build(name: str, device: torch.device, training: bool) -> nn.Module:
    """The model in bfloat16, with the same parameters in each call."""
    torch.manual_seed(0)
    model = ZOO[name].build().to(device, torch.bfloat16)
    return model.train() if training else model.eval().requires_grad_(False)


def stepper(run: Callable[..., Tensor], batch: list[Tensor], training: bool) -> Callable[[], None]:
    """A prediction, or a forward and a backward pass."""

    def step() -> None:
        with torch.set_grad_enabled(training):
            logits = run(*batch).float()
        if training:
            F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits)).backward()

    return step


def block_us(step: Callable[[], None], steps: int) -> float:
    """Host time of a step in us."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    host_s = time.perf_counter() - started
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return host_s / steps * 1e6


def measure(name: str, training: bool, samples: int, steps: int, rounds: int) -> dict[str, object]:
    """Host times of a model, medians over rounds."""
    torch._dynamo.reset()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plain, converted = (build(name, device, training) for _ in range(2))
    handle = lokakern.convert(converted, 0.06, inference=not training)
    batch = [
        feature.draw(samples, 0).to(device).requires_grad_(training and feature.is_learned)
        for feature in ZOO[name].features
    ]
    # On a CPU a compiled step is only traced: its code is no evidence for a GPU.
    backend = "inductor" if device.type == "cuda" else "eager"
    arms = {
        f"{whose} {how}": stepper(
            torch.compile(model, dynamic=False, backend=backend) if how == "compiled" else model,
            batch, training,
        )
        for whose, model in (("bf16", plain), ("converted", converted))
        for how in ("compiled", "eager")
    }  # fmt: skip
    for _ in range(2):
        for step in arms.values():
            for _ in range(WARM_STEPS):
                step()
        native.wait()  # the first call begins to build it, and calls are in Python until then
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    order = random.Random(0)
    for _ in range(rounds):
        for arm in order.sample(list(arms), len(arms)):
            times[arm].append(block_us(arms[arm], steps))
    us = {arm: statistics.median(found) for arm, found in times.items()}
    return {
        "model": name, "step": "train" if training else "infer", "batch": samples,
        "conversion": repr(handle), "host_us": {arm: round(x, 1) for arm, x in us.items()},
        "ratio": {how: round(us[f"converted {how}"] / us[f"bf16 {how}"], 3)
                  for how in ("compiled", "eager")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(ZOO)}")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    unknown = set(given.models) - set(ZOO)
    if unknown:
        parser.error(f"no model {', '.join(sorted(unknown))}; expected some of {', '.join(ZOO)}")
    for name in given.models or ZOO:
        found = measure(name, given.train, given.batch, given.steps, given.rounds)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
