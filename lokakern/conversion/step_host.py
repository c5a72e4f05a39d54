"""The host of a whole training step: while it is the limit, every product stays in bfloat16.

Where the host makes each call, a step takes the longer of two times: that of the GPU, and that of
the host, which works ahead of it. Besides its products a step enters the model, computes a loss,
walks autograd's graph and zeroes gradients: on the host of an H200 1.6 to 1.7 ms, as much as 40
products. A faster product gains nothing in a step that the host limits, and a quantized one costs
the host 6 to 9 us more.

The GPU is the limit from the m on at which its times of all products in bfloat16 exceed what the
host takes for the step as converted. Each product counts once, with the same m.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lokakern.conversion.routes import ANY_M, Route
from lokakern.nn.routed_matmul import PLAIN
from lokakern.selection import dispatcher
from lokakern.selection.frozen.answers import digest_of, question
from lokakern.selection.host_cost import STEP, TORCH, TRAINING_BF16, HostCosts
from lokakern.types import Device

_NUMBER = re.compile(r"\d{1,12}\.\d{3}")


@dataclass(frozen=True, slots=True)
class StepHost:
    """The host of a training step.

    Attributes:
        fixed_us: What a step takes the host without its products.
        products_us: What its products take, where they are quantized at any m.
        count: Their number.
        least_m: The m from which on the GPU takes longer.
    """

    fixed_us: float
    products_us: float
    count: int
    least_m: int

    def limited(self, route: Route) -> Route:
        """A route that quantizes only where the GPU is the limit of the step."""
        if not self.least_m:
            return route
        return route.above(self.least_m, f"bf16 below m={self.least_m}: the host limits the step")

    def __str__(self) -> str:
        words = (
            f"a training step takes the host {self.fixed_us + self.products_us:.0f} us, "
            f"{self.products_us:.0f} of them for {self.count} products"
        )
        if not self.least_m:
            return f"{words}; the GPU takes longer for these in bf16 at every m"
        return (
            f"{words}; below m={self.least_m} the GPU takes less for these in bf16, and nothing is "
            "quantized, but in eager calls where nothing pads rows"
        )


def host_of_step(routes: Sequence[Route], device: Device, regime: str) -> StepHost | None:
    """The host of a step with these products; with frozen choices that of the file.

    None if its cost is unknown.

    Raises:
        ChoicesError: The file of frozen choices holds no host of these products, but something
            else.
    """
    products = sorted(route.text for route in routes)
    asked = question("training step", regime=regime, products=digest_of(products))
    if dispatcher.choices() is not None:
        answer = dispatcher.held_answer(device, asked)
        if answer is None:
            return None
        numbers = [float(x) if _NUMBER.fullmatch(x) else -1.0 for x in answer.texts]
        is_right = len(numbers) == 4 and all(0 <= x <= ANY_M for x in numbers)
        answer.expect(is_right, f"{answer.texts} are no numbers of a step")
        fixed_us, products_us, count, least_m = numbers
        return StepHost(fixed_us, products_us, int(count), int(least_m))
    found = step_host(routes, dispatcher.host_costs_on(device, regime))
    if found is not None:
        numbers = [found.fixed_us, found.products_us, found.count, found.least_m]
        dispatcher.keep_answer(device, asked, [f"{x:.3f}" for x in numbers], ())
    return found


def step_host(routes: Iterable[Route], costs: HostCosts) -> StepHost | None:
    """The host of a step with these products; None if its cost is unknown.

    Between measured m, times of the GPU are interpolated. At smaller m they are those of the
    smallest, where launches take most of the time; at larger m they grow with it. A product without
    times counts for the host alone.

    Args:
        routes: Of all products of the model in training.
        costs: Host costs in the regime of the routes.
    """
    counts = Counter(routes)
    step, plain = (costs.by_call.get((call, TORCH)) for call in (STEP, TRAINING_BF16))
    if step is None or plain is None:
        return None
    products_us = sum(n * _host_us(route, plain.us) for route, n in counts.items())
    times = {route: found for route in counts if (found := _gpu_us(route))}
    sizes = np.array(sorted({m for found in times.values() for m in found} | {ANY_M}))
    gpu_us = np.zeros(len(sizes))
    for route, found in times.items():
        at = sorted(found)
        known_us = np.interp(sizes, at, [found[m] for m in at])
        gpu_us += counts[route] * known_us * np.maximum(sizes / at[-1], 1.0)
    least_m = _last_crossing(sizes, gpu_us, step.us + products_us)
    return StepHost(step.us, products_us, sum(counts.values()), least_m)


def _host_us(route: Route, plain_us: float) -> float:
    """The largest time of the host for a product at any m."""
    if route.text == PLAIN:
        return plain_us
    hosts = (c.pick.time.host for c in route.choices if c.pick.time is not None)
    return max([plain_us, *(host.us for host in hosts if host is not None)])


def _gpu_us(route: Route) -> dict[int, float]:
    """Times of the GPU in bfloat16 by m."""
    timed = ((route.rows_at(c), c.table.plain_at(c.m)) for c in route.choices)
    return {m: time.gpu_us for m, time in timed if time is not None}


def _last_crossing(sizes: np.ndarray, gpu_us: np.ndarray, host_us: float) -> int:
    """The m from which on the times of the GPU, linear between sizes, are larger; 0 if all are."""
    (below,) = np.nonzero(gpu_us <= host_us)
    if not len(below):
        return 0
    last = below[-1]
    return int(np.interp(host_us, gpu_us[last : last + 2], sizes[last : last + 2])) + 1
