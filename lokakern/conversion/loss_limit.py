"""`Conversion.limit_loss`: the products in FP8 that a limit of the whole model's loss admits.

Changes of the loss are paired: each batch is run with and without FP8, with the same random
numbers. Those of single layers add up in first order. Which layers to keep is then a knapsack: the
most time saved, by the database, within the limit. The choice is measured together, because the sum
is an estimate, and because a sum of many noisy changes hides more than one change does.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lokakern import progress
from lokakern.conversion import tuning_file
from lokakern.conversion.restored_state import own_buffers, restored_state
from lokakern.conversion.variants import (
    LAYOUT,
    RELU,
    Group,
    Off,
    Switch,
    groups_of,
    observed_rows,
    refuse_ranks,
    start_again,
)
from lokakern.errors import MeasurementError, UnsupportedError
from lokakern.probe.loss import LossChange, interval_of, loss_of, relative_change

if TYPE_CHECKING:
    from lokakern.conversion.convert import Conversion

FEWEST_BATCHES = 4  # two for an interval, in each half
BINS = 1000  # of the limit, in which the knapsack counts losses
MOST_TRIES = 10  # sets that are measured together
SHRINK = (0.4, 0.7)  # the next set may lose so much of what the last one might, by its excess
UNKNOWN_GAIN_US = 1e-3  # of a product without a time at these rows: FP8 rather than not
FRONT = (0.25, 0.5, 1.0, 2.0, 4.0)  # limits that the outcome tells about, as multiples


class Option(NamedTuple):
    """One way to run an item of the knapsack in FP8.

    Attributes:
        on: Places of its groups.
        loss: Relative change of the loss by it alone; not negative.
        gain_us: What it saves.
    """

    on: frozenset[int]
    loss: float
    gain_us: float


@dataclass(frozen=True)
class LimitedSite:
    """A layer or a chain.

    Attributes:
        name: Of the layer, or of the first and last layer of the chain.
        kernels: Names of its kernels.
        change: Of the loss, with it alone in FP8.
        gain_us: What it saves by times in the database, in microseconds; None if unknown.
        is_kept: Whether it stays in FP8.
    """

    name: str
    kernels: tuple[str, ...]
    change: LossChange
    gain_us: float | None
    is_kept: bool


@dataclass(frozen=True)
class LossLimit:
    """The outcome of `Conversion.limit_loss`.

    Attributes:
        sites: The outcome for each layer and chain.
        relative: The limit.
        before: Change of the loss with everything in FP8, on the first half of the batches.
        predicted: Sum of the changes by the sites that are kept.
        change: Change with these, on the second half.
        front: For several limits, the sum of the changes and of the predicted gains in microseconds
            of the sites that would be kept.
        runs: Forward passes.
        seconds: Time that it took.
        file: What `save` writes.
    """

    sites: tuple[LimitedSite, ...]
    relative: float
    before: LossChange
    predicted: float
    change: LossChange
    front: tuple[tuple[float, float, float], ...]
    runs: int
    seconds: float
    file: tuning_file.TuningFile

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer and chain, as plain data."""
        return [
            {
                "site": site.name, "kernel": ", ".join(site.kernels),
                "loss change": f"{site.change.mean:+.1e}",
                "interval": f"{site.change.low:+.1e} to {site.change.high:+.1e}",
                "predicted gain us": site.gain_us, "kept": site.is_kept,
            }
            for site in self.sites
        ]  # fmt: skip

    @property
    def summary(self) -> str:
        """The change of the loss and the gain, in a few words."""
        if not self.sites:
            return "no product is quantized at these rows: the loss is that of nn.Linear"
        kept = [site for site in self.sites if site.is_kept]
        gains = [sum(s.gain_us or 0.0 for s in some) for some in (kept, self.sites)]
        others = "; ".join(
            f"{limit:.1e}: {gain_us:.0f} us at {loss:+.1e}" for limit, loss, gain_us in self.front
        )
        return (
            f"loss {self.change.mean:+.1e} ({self.change.low:+.1e} to {self.change.high:+.1e} in "
            f"95 %, {self.change.batches} other batches; predicted {self.predicted:+.1e}), limit "
            f"{self.relative:.1e}; everything in FP8 {self.before.mean:+.1e}. "
            f"{len(kept)} of {len(self.sites)} layers and chains in FP8, {gains[0]:.0f} of "
            f"{gains[1]:.0f} us of predicted gain. By limit: {others}. {self.runs} runs in "
            f"{self.seconds:.0f} s"
        )

    def table(self, how: str = "table") -> None:
        """Print a table of the layers and chains, or as "json" or "csv"."""
        from lokakern.render.terminal import print_rows

        print_rows(self.rows, how, title="limit of the loss", note=self.summary)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file for ``convert(..., tuned=path)``, atomically.

        Raises:
            ChoicesError: It cannot be written.
        """
        tuning_file.write(self.file, path)

    def __repr__(self) -> str:
        return f"LossLimit({self.summary})"


def limit_loss(
    conversion: Conversion,
    loss: Callable[[Any], Tensor],
    batches: Sequence[Any],
    relative: float,
) -> LossLimit:
    """See `Conversion.limit_loss`."""
    begun = time.monotonic()
    model, batches = conversion.model, list(batches)
    if not conversion.is_inference:
        raise UnsupportedError(
            "limit_loss: the conversion is for training, where errors of gradients count, too, "
            "which no forward pass shows; convert with inference=True"
        )
    if len(batches) < FEWEST_BATCHES:
        raise MeasurementError(
            f"limit_loss: there are {len(batches)} batches; expected at least {FEWEST_BATCHES}"
        )
    if not (0 < relative < math.inf):
        raise MeasurementError(f"limit_loss: relative is {relative}; expected more than 0")
    refuse_ranks("limit_loss")
    before = dict(conversion.over_limit), conversion.over_limit_chains
    with (
        torch.compiler.set_stance("force_eager"),
        torch.no_grad(),
        restored_state(model, is_trained=False),
    ):
        conversion.over_limit, conversion.over_limit_chains = {}, frozenset()
        try:
            start_again(conversion)
            rows, _ = observed_rows(conversion, lambda: loss(batches[0]))
            trial = _Trial(conversion, single(groups_of(conversion, rows, set())), loss, batches)
            off = trial.run(relative)
        except BaseException:
            conversion.over_limit, conversion.over_limit_chains = before
            start_again(conversion)
            raise
        groups = trial.groups
        why = f"the loss may rise by {relative:.1e}, and other layers gain more for it"
        conversion.over_limit = {
            (groups[place].sites[0], groups[place].gemm): why
            for place in off if groups[place].gemm == "output"
        }  # fmt: skip
        conversion.over_limit_chains = frozenset(
            sites for place in off for sites in groups[place].chains
        )
        start_again(conversion)
    progress.tell("loss", 1.0)
    texts = {name: tuple(r.text for r in routes) for name, routes in conversion.untuned.items()}
    file = tuning_file.file_of(
        conversion, texts, rows, set(conversion.over_limit), (1.0, 1.0, 1.0), is_graph=False,
        dropped_chains=conversion.over_limit_chains,
    )  # fmt: skip
    return trial.outcome(off, relative, time.monotonic() - begun, file)


def single(groups: Iterable[Group]) -> list[Group]:
    """Each layer and chain as a group of its own; relus and layouts of weights as they are."""
    found = []
    for group in groups:
        if group.gemm == RELU or group.kernels == (LAYOUT,):
            found.append(group)
            continue
        count = len(group.sites)
        us = None if group.predicted_us is None else group.predicted_us / count
        chains = group.chains or ((),) * count
        found += [
            replace(group, sites=(name,), predicted_us=us, chains=(chain,) if chain else ())
            for name, chain in zip(group.sites, chains, strict=True)
        ]
    return found


def best_within(items: Sequence[Sequence[Option]], limit: float) -> list[Option]:
    """At most one option of each item, of the largest gain with a sum of losses within a limit.

    Losses are rounded up to thousandths of the limit.
    """
    gains = np.zeros(BINS + 1)  # the largest, by the loss that is spent at most
    taken: list[np.ndarray[Any, Any]] = []
    for options in items:
        best, choice = gains.copy(), np.full(BINS + 1, -1)
        for place, option in enumerate(options):
            cost = math.ceil(option.loss / limit * BINS) if option.loss <= limit else BINS + 1
            if cost > BINS:
                continue
            with_it = gains[: BINS + 1 - cost] + option.gain_us
            is_better = with_it > best[cost:]
            best[cost:][is_better] = with_it[is_better]
            choice[cost:][is_better] = place
        gains = best
        taken.append(choice)
    found, left = [], BINS
    for options, choice in zip(reversed(items), reversed(taken), strict=True):
        if choice[left] >= 0:
            option = options[choice[left]]
            found.append(option)
            left -= math.ceil(option.loss / limit * BINS)
    return found


class _Trial:
    """Runs a model with some groups in FP8, against the same batch with none."""

    def __init__(
        self,
        conversion: Conversion,
        groups: list[Group],
        loss: Callable[[Any], Tensor],
        batches: Sequence[Any],
    ) -> None:
        self.groups, self.runs = groups, 0
        self._loss, self._batches = loss, batches
        self._switch = Switch(conversion, groups)
        self._buffers = list(own_buffers(conversion.model))
        self._everything: Off = frozenset(range(len(groups)))
        half = (len(batches) + 1) // 2
        self._chosen_by, self._held_out = range(half), range(half, len(batches))
        self._plain: dict[int, float] = {}  # losses without FP8, by batch
        self._alone: dict[frozenset[int], LossChange] = {}
        self._items: list[list[Option]] = []
        self._before = self._change_held = LossChange(0.0, 0.0, 0.0, 0)
        # Neither changes a loss by more than roundings, and both save time.
        self._fixed = frozenset(
            place for place, group in enumerate(groups)
            if group.gemm == RELU or group.kernels == (LAYOUT,)
        )  # fmt: skip

    def run(self, relative: float) -> Off:
        """The groups that are off at the end."""
        free = self._everything - self._fixed
        self._before = self._change_held = LossChange(0.0, 0.0, 0.0, len(self._held_out))
        if not free:
            return frozenset()
        self._before = self._change(frozenset(), self._chosen_by)
        self._items = self._measured_items(free)
        target = relative
        for _ in range(MOST_TRIES):
            on = self._on(best_within(self._items, target))
            off = free - on
            found = self._change(off, self._chosen_by)
            if found.high <= relative:
                found = self._change(off, self._held_out)
                if found.high <= relative:
                    self._change_held = found
                    return off
            target *= min(max(SHRINK[0], relative / found.high), SHRINK[1])
        return self._everything  # to the bit as nn.Linear

    def outcome(
        self, off: Off, relative: float, seconds: float, file: tuning_file.TuningFile
    ) -> LossLimit:
        """What is told."""
        sites = []
        for place, group in enumerate(self.groups):
            alone = self._alone.get(frozenset({place}))
            if alone is not None:
                sites.append(LimitedSite(group.sites[0], group.kernels, alone,
                                         group.predicted_us, place not in off))  # fmt: skip
        kept = [o for options in self._items for o in options if not o.on & off]
        front = []
        for multiple in FRONT:
            within = best_within(self._items, multiple * relative) if self._items else []
            front.append((
                multiple * relative, sum(o.loss for o in within), sum(o.gain_us for o in within)
            ))  # fmt: skip
        predicted = sum(self._alone[option.on].mean for option in kept)
        return LossLimit(
            tuple(sites), relative, self._before, predicted, self._change_held, tuple(front),
            self.runs, seconds, file,
        )  # fmt: skip

    def _measured_items(self, free: Off) -> list[list[Option]]:
        """Each chain, or instead of it the products of its layers; and each other product."""
        items: list[list[tuple[frozenset[int], float]]] = []
        left = set(free)
        for place in sorted(free):
            for sites in self.groups[place].chains:
                inside = frozenset(
                    other for other in free
                    if not self.groups[other].chains and self.groups[other].sites[0] in sites
                )  # fmt: skip
                left -= inside | {place}
                # That of a chain is over the products that would run instead.
                gain_us = self._gain_us(inside)
                chain = frozenset({place}), gain_us + self._gain_us({place})
                items.append([chain, *([(inside, gain_us)] if inside else [])])
        items += [[(frozenset({place}), self._gain_us({place}))] for place in sorted(left)]
        found = []
        for number, ways in enumerate(items):
            progress.tell("loss", 0.9 * number / len(items))
            found.append([Option(on, self._loss_with(on, free), gain_us) for on, gain_us in ways])
        return found

    def _gain_us(self, places: Iterable[int]) -> float:
        known = (self.groups[place].predicted_us for place in places)
        return sum(UNKNOWN_GAIN_US if us is None else us for us in known)

    def _loss_with(self, on: frozenset[int], free: Off) -> float:
        """Change of the loss with some groups on; and, for the table, with each of them."""
        for some in dict.fromkeys((on, *(frozenset({place}) for place in on))):
            self._alone[some] = self._change(free - some, self._chosen_by)
        mean = self._alone[on].mean
        return max(mean, 0.0) if math.isfinite(mean) else math.inf

    def _on(self, options: Iterable[Option]) -> frozenset[int]:
        return frozenset(place for option in options for place in option.on)

    def _change(self, off: Off, batches: Iterable[int]) -> LossChange:
        """The relative change of the loss over some batches."""
        for place in batches:
            if place not in self._plain:
                self._plain[place] = self._losses(self._everything, [place])[0]
                if not math.isfinite(self._plain[place]):
                    raise MeasurementError(
                        f"limit_loss: without FP8 the loss of batch {place} is "
                        f"{self._plain[place]}; expected a finite number"
                    )
        places = list(batches)
        after = self._losses(off, places)
        return interval_of([
            relative_change(self._plain[place], one)
            for place, one in zip(places, after, strict=True)
        ])  # fmt: skip

    def _losses(self, off: Off, places: Iterable[int]) -> list[float]:
        self._switch(off)
        found = [loss_of(self._loss, self._batches[place], self._buffers) for place in places]
        self.runs += len(found)
        return found
