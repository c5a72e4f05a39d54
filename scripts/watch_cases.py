"""False alarms of `Conversion.watch` in a long training, and the steps until it finds a drift.

A small MLP learns a teacher's scores by Adam, in emulated FP8 on a CPU. Its first layer ignores a
constant of all features and one feature, as trained layers do, so that each drift makes FP8 unsafe:
all features shift by four deviations, every second row is 100 times smaller, or the ignored feature
100 times larger.

    python scripts/watch_cases.py [STEPS]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import lokakern
from lokakern.conversion.drift_watch import STAYS, DriftWatch

K, M, EVERY = 64, 256, 100
BEFORE, AFTER = 650, 500  # steps
STEPS = 10_000


def shifted(x: Tensor) -> Tensor:
    return x + 4.0


def spread(x: Tensor) -> Tensor:
    return x * torch.where(torch.arange(len(x)) % 2 > 0, 1.0, 0.01)[:, None]


def blown_up(x: Tensor) -> Tensor:
    return torch.cat((100.0 * x[:, :1], x[:, 1:]), dim=1)


def same(x: Tensor) -> Tensor:
    return x


# With the forced kernels of each.
DRIFTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "all features shift by 4": (shifted, "row"),
    "spread of rows x 100": (spread, "tensor"),
    "one feature x 100": (blown_up, "row"),
}


class Training:
    """A model with forced kernels, its optimizer and its data."""

    def __init__(self, kernels: str) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(K, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)]
        self.model = nn.Sequential(*layers)
        with torch.no_grad():
            weight = layers[0].weight
            weight[:, 0] = 0.0
            weight[:, 1:] -= weight[:, 1:].mean(dim=1, keepdim=True)
        self.model.bfloat16()
        self.teacher = torch.randn(K, generator=torch.Generator().manual_seed(1)) / K**0.5
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.handle = lokakern.convert(self.model, kernels=kernels)
        self.seed = 0

    def run(self, watch: DriftWatch, steps: int, drift: Callable[[Tensor], Tensor] = same) -> None:
        for _ in range(steps):
            self.seed += 1
            x = torch.randn(M, K, generator=torch.Generator().manual_seed(self.seed))
            score = (x @ self.teacher).tanh()
            loss = (self.model(drift(x).bfloat16())[:, 0].float() - score).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def found_after(name: str) -> None:
    """Print after how many steps of a drift it was told, and a product swapped."""
    drift, kernels = DRIFTS[name]
    training = Training(kernels)
    with training.handle.watch(budget=0.06, every=EVERY) as watch:
        training.run(watch, BEFORE)
        watch.apply(wait=True)
        earlier = len(watch.events)
        training.run(watch, AFTER, drift)
        events = [event for event in watch.events[earlier:] if event.site == "0"]
    told = events[0].step - BEFORE if events else None
    swaps = [e for e in events if e.action != STAYS]
    swapped = swaps[0].step - BEFORE if swaps else None
    print(f"{name}, {kernels} scales: told after {told} steps, swapped after {swapped}")
    for event in swaps[:1]:
        print(f"    {event}")


def main(steps: int) -> None:
    for name in DRIFTS:
        found_after(name)
    training, start = Training("row"), time.perf_counter()
    with training.handle.watch(budget=0.06, every=EVERY) as watch:
        training.run(watch, steps)
    first = [event for event in watch.events if not event.moved]
    alarms = [event for event in watch.events if event.moved]
    seconds = time.perf_counter() - start
    print(f"{steps} steps, {len(first)} first judgements, {len(alarms)} alarms, {seconds:.0f} s")
    for event in alarms:
        print(f"    {event}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS)
