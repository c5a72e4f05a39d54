"""`Conversion.limit_loss`: the products in FP8 that a limit of the whole model's loss admits.

Changes of the loss are paired: each batch is run with and without FP8, with the same random
numbers. Those of single layers add up in first order. Which layers to keep is then a knapsack: the
most time saved, by the database, within the limit. The choice is measured together, because the sum
is an estimate, and because a sum of many noisy changes hides more than one change does.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lokakern import progress
from lokakern.conversion import tuning_file
from lokakern.conversion.chain_spans import words_of
from lokakern.conversion.restored_state import own_buffers, restored_state
from lokakern.conversion.routes import ANY_M
from lokakern.conversion.variants import (
    LAYOUT,
    RELU,
    Dtypes,
    Group,
    Off,
    Rows,
    Switch,
    groups_of,
    is_emulated,
    observed_rows,
    refuse_ranks,
    start_again,
)
from lokakern.errors import MeasurementError, UnsupportedError
from lokakern.nn.chain_plan import read_plan, steps_at
from lokakern.nn.module_scan import shape_of
from lokakern.nn.routed_matmul import kernel_at, read_route, traced_route
from lokakern.probe.loss import LossChange, interval_of, loss_of, relative_change
from lokakern.selection.arguments import device_of

if TYPE_CHECKING:
    from lokakern.conversion.convert import Conversion

FEWEST_BATCHES = 4  # two for an interval, in each half
BINS = 1000  # of the limit, in which the knapsack counts losses
MOST_TRIES = 10  # sets that are measured together
MOST_ALONE = 32  # batches of each layer alone, whose change varies less than that of all together
NOISE = 0.1  # of the limit: what two runs of a batch may differ by
SHRINK = (0.4, 0.9)  # the next set may lose so much of what the last one might
UNKNOWN_GAIN_US = 1e-3  # of a product without a time at these rows: FP8 rather than not
EAGER_ONLY = "in FP8 in eager calls only, such as the loss; compiled code leaves it in bf16"
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
        name: Of the layer, or of the first and last layer of the chain. Layers of a chain have a
            row, too: their own products run where the chain does not.
        kernels: Names of its kernels.
        change: Of the loss, with it alone in FP8.
        gain_us: What it saves by times in the database, in microseconds; None if unknown.
        is_kept: Whether it stays in FP8.
        is_compiled: Whether compiled code runs it, too; else eager calls alone, as those of the
            loss are.
        why: Why it does not stay; "" if it does.
    """

    name: str
    kernels: tuple[str, ...]
    change: LossChange
    gain_us: float | None
    is_kept: bool
    is_compiled: bool = True
    why: str = ""


@dataclass(frozen=True)
class UnjudgedSite:
    """A layer in FP8 or a chain that does not run in FP8 in the batches; it stays.

    Attributes:
        name: As of `LimitedSite`.
        kernels: Names of its kernels.
        least_m: The least m at which it runs.
        rows: Rows of its inputs in the batches.
        why: Where it runs, or why not in the batches, in words.
        is_unfit: Whether it has kernels at these rows, which do not take the operands.
    """

    name: str
    kernels: tuple[str, ...]
    least_m: int
    rows: tuple[int, ...]
    why: str
    is_unfit: bool = False


@dataclass(frozen=True)
class LossLimit:
    """The outcome of `Conversion.limit_loss`.

    Attributes:
        sites: The outcome for each layer and chain.
        relative: The limit.
        before: Change of the loss with everything in FP8, on the first half of the batches.
        predicted: Change with the sites that are kept, on the first half, which chose them.
        added: Sum of the changes by these sites, each alone.
        change: Change with these, on the second half; told because it is within the limit, so that
            its interval is a little optimistic.
        front: For several limits, the sum of the changes and of the predicted gains in microseconds
            of the sites that would be kept.
        runs: Forward passes.
        seconds: Time that it took.
        unseen: Layers in FP8 that no batch called; they are as before.
        unjudged: Layers in FP8 and chains, but only at other numbers of rows or with operands of
            other dtypes; they stay.
        file: What `save` writes.
    """

    sites: tuple[LimitedSite, ...]
    relative: float
    before: LossChange
    predicted: LossChange
    added: float
    change: LossChange
    front: tuple[tuple[float, float, float], ...]
    runs: int
    seconds: float
    unseen: tuple[str, ...]
    unjudged: tuple[UnjudgedSite, ...]
    file: tuning_file.TuningFile

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer and chain, as plain data."""
        judged = [
            {
                "site": site.name, "kernel": ", ".join(site.kernels),
                "loss change": f"{site.change.mean:+.1e}",
                "interval": f"{site.change.low:+.1e} to {site.change.high:+.1e}",
                "predicted gain us": site.gain_us, "kept": site.is_kept,
                "why": "; ".join(filter(None, (site.why, EAGER_ONLY * (not site.is_compiled)))),
            }
            for site in self.sites
        ]  # fmt: skip
        return judged + [
            {
                "site": site.name, "kernel": ", ".join(site.kernels), "loss change": None,
                "interval": None, "predicted gain us": None, "kept": True, "why": site.why,
            }
            for site in self.unjudged
        ]  # fmt: skip

    @property
    def summary(self) -> str:
        """The change of the loss and the gain, in a few words."""
        notes = "; errors were emulated" if self.file.is_emulated else ""
        elsewhere = [site for site in self.unjudged if not site.is_unfit]
        if elsewhere:
            rows = _words({m for site in elsewhere for m in site.rows})
            notes += (
                f"; {len(elsewhere)} not judged: their rows are others than those of the "
                f"batches ({rows})"
            )
        if unfit := [site.name for site in self.unjudged if site.is_unfit]:
            notes += f"; not judged, as kernels do not take the operands: {', '.join(unfit)}"
        if elsewhere and not self.sites:
            least = min(site.least_m for site in elsewhere)
            notes += f"; the least m at which one runs is {least}"
        if eager := [site.name for site in self.sites if not site.is_compiled]:
            notes += f"; {', '.join(eager)}: {EAGER_ONLY}"
        if self.unseen:
            notes += f"; not called, and as before: {', '.join(self.unseen)}"
        if not self.sites:
            return f"no product is quantized at these rows: the loss is that of nn.Linear{notes}"
        kept = [site for site in self.sites if site.is_kept]
        gains = [sum(s.gain_us or 0.0 for s in some) for some in (kept, self.sites)]
        others = "; ".join(
            f"{limit:.1e}: {gain_us:.0f} us at {loss:+.1e}" for limit, loss, gain_us in self.front
        )
        return (
            f"loss {self.change.mean:+.1e} ({self.change.low:+.1e} to {self.change.high:+.1e} in "
            f"95 %, {self.change.batches} other batches; predicted {self.predicted.mean:+.1e} by "
            f"the first half, {self.added:+.1e} by each alone), limit {self.relative:.1e}; "
            f"everything in FP8 {self.before.mean:+.1e}. "
            f"{len(kept)} of {len(self.sites)} products and chains kept, {gains[0]:.0f} of "
            f"{gains[1]:.0f} us of predicted gain. By limit, by changes of the first half alone, "
            f"not confirmed on the second: {others}. {self.runs} runs in "
            f"{self.seconds:.0f} s{notes}"
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
    loss: Callable[[Any], Tensor | float],
    batches: Sequence[Any],
    relative: float,
) -> LossLimit:
    """See `Conversion.limit_loss`."""
    begun = time.monotonic()
    model = conversion.model
    if not conversion.is_inference:
        raise UnsupportedError(
            "limit_loss: the conversion is for training, where errors of gradients count, too, "
            "which no forward pass shows; convert with inference=True"
        )
    if isinstance(batches, Mapping):
        raise MeasurementError("limit_loss: batches is a mapping; expected a sequence of batches")
    batches = list(batches)
    if len(batches) < FEWEST_BATCHES:
        raise MeasurementError(
            f"limit_loss: there are {len(batches)} batches; expected at least {FEWEST_BATCHES}"
        )
    if not (isinstance(relative, int | float) and 0 < relative < math.inf):
        raise MeasurementError(
            f"limit_loss: relative is {relative!r}; expected a finite number above 0, such as 2e-4"
        )
    refuse_ranks("limit_loss")
    routes_before = {name: site.routes for name, site in conversion.sites.items()}
    plain_before, relus_before = conversion.plain, conversion.has_relus
    chains_before = conversion.off_chains
    over_before = conversion.over_limit, conversion.over_limit_chains
    run = functools.partial(
        loss_of, functools.partial(_checked, loss), buffers=list(own_buffers(model))
    )
    with contextlib.ExitStack() as stack:
        if not progress.is_shown():
            from lokakern.render.terminal import TerminalProgress  # rich takes time to import

            stack.enter_context(TerminalProgress())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(restored_state(model, is_trained=False))
        conversion.over_limit, conversion.over_limit_chains = {}, frozenset()
        try:
            start_again(conversion)
            progress.tell("loss", 0.0)
            rows, _, unfit = observed_rows(conversion, lambda: [run(batch) for batch in batches])
            if not rows:
                raise MeasurementError(
                    "limit_loss: the loss calls none of the converted layers; expected one that "
                    "runs the converted model"
                )
            groups = single(groups_of(conversion, rows, set()))
            groups = _fitting(groups, unfit)
            trial = _Trial(conversion, groups, run, batches)
            off = trial.run(relative)
        except BaseException:
            conversion.over_limit, conversion.over_limit_chains = over_before
            conversion.use_routes(
                routes_before, plain_before, keep_classes=True, off_chains=chains_before,
                has_relus=relus_before,
            )  # fmt: skip
            raise
        why = f"the loss may rise by {relative:.1e} at most"
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
        conversion, texts, rows, set(), (1.0, 1.0, 1.0), is_graph=False, is_timed=False,
        is_emulated=_is_emulated(conversion, groups),
    )  # fmt: skip
    unseen = tuple(
        name for name, site in conversion.sites.items() if name not in rows and site.routes[0].text
    )
    unjudged = _unjudged(conversion, rows, unfit)
    return trial.outcome(off, relative, time.monotonic() - begun, file, unseen, unjudged)


def _is_emulated(conversion: Conversion, groups: Iterable[Group]) -> bool:
    """Whether the device of the model does not run a kernel of the trial."""
    here = device_of(shape_of(next(iter(conversion.sites.values())).module)[3])
    names = {name for group in groups if group.gemm != RELU for name in group.kernels}
    return any(is_emulated(name, here) for name in names)


def _fitting(groups: list[Group], unfit: Mapping[str, Dtypes]) -> list[Group]:
    """The groups without those that no call of the loss runs in FP8, as operands are unfit.

    Raises:
        UnsupportedError: No product is left that would run in FP8.
    """
    found = [
        group for group in groups
        if not _quantizes(group) or unfit.keys().isdisjoint(_layers_of(group))
    ]  # fmt: skip
    if len(found) < len(groups) and not any(map(_quantizes, found)):
        lost = (name for group in groups if _quantizes(group) for name in _layers_of(group))
        dtypes = next(unfit[name] for name in lost if name in unfit)
        raise UnsupportedError(
            f"limit_loss: {_why_unfit(*dtypes)}, so that nothing runs in FP8 and the loss does not "
            f"change; run the loss under torch.autocast in {_named(dtypes[2])}, or convert all of "
            f"the model to {_named(dtypes[2])}"
        )
    return found


def _layers_of(group: Group) -> tuple[str, ...]:
    """Layers of a group, those of its chains included."""
    return group.sites + tuple(name for sites in group.chains for name in sites)


def _quantizes(group: Group) -> bool:
    """Whether it is a product or chain in FP8, and no relu or layout of a weight."""
    return group.gemm != RELU and group.kernels != (LAYOUT,)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _why_unfit(x: torch.dtype, weight: torch.dtype, _: torch.dtype) -> str:
    return f"the loss multiplies {x} by weights in {weight}, unquantized"


def _unjudged(
    conversion: Conversion, rows: Rows, unfit: Mapping[str, Dtypes]
) -> tuple[UnjudgedSite, ...]:
    """Chains, and products in FP8, that batches call, but not so that they run in FP8."""
    found = []
    for span in conversion.spans:
        for chain in span.plan.chains:
            sites = span.sites_of(chain)
            sizes = rows.get(sites[0], ())
            is_at = any(steps_at(chain.text, m) for m in sizes)
            dtypes = next((unfit[name] for name in sites if name in unfit), None)
            if sizes and (not is_at or dtypes):
                parts = [
                    [(start, tuple(step.kernel for step in steps)) for start, steps in part]
                    for part in read_plan(chain.text)[1:]
                ]
                one = _unjudged_site(words_of(sites), parts, sizes, is_chain=True)
                found.append(_of_operands(one, dtypes) if is_at and dtypes else one)
    for name, site in conversion.sites.items():
        text, sizes = site.routes[0].text, rows.get(name, ())
        is_at = any(kernel_at(text, m) for m in sizes)
        if text and sizes and (not is_at or name in unfit):
            segments = [
                [(start, (kernel,) if kernel else ()) for start, kernel in part]
                for part in read_route(text)[1:]
            ]
            one = _unjudged_site(name, segments, sizes)
            found.append(_of_operands(one, unfit[name]) if is_at else one)
    return tuple(found)


def _of_operands(site: UnjudgedSite, dtypes: Dtypes) -> UnjudgedSite:
    """With the words for operands that kernels do not take."""
    why = f"{_why_unfit(*dtypes)}, as kernels need {_named(dtypes[2])}: not judged, stays"
    return replace(site, why=why, is_unfit=True)


def _unjudged_site(
    name: str, parts: Sequence[Sequence[tuple[int, tuple[str, ...]]]], sizes: Sequence[int],
    is_chain: bool = False,
) -> UnjudgedSite:  # fmt: skip
    """From first m and kernels, for m that 16 divides and for other m."""
    both = [_ranges(part) for part in parts]
    rounded = [(-(-first // 16) * 16, last) for first, last in both[0]]
    least = min(first for first, _ in (*rounded[:1], *both[1][:1]))
    shown = (both[0] if both[1] else rounded) or both[1]
    only = "" if both[1] else " that 16 divides"
    ends = ("" if m == last else ".." if last == ANY_M - 1 else f"..{last}" for m, last in shown)
    ranges = ", ".join(f"{m}{end}" for (m, _), end in zip(shown, ends, strict=True))
    names = dict.fromkeys(name for part in parts for _, kernels in part for name in kernels)
    what, stays = ("a chain", "stays") if is_chain else ("quantized", "stays in FP8")
    why = f"{what} at m={ranges}{only}; the batches have {_words(sizes)} rows: not judged, {stays}"
    return UnjudgedSite(name, tuple(names), least, tuple(sizes), why)


def _ranges(part: Sequence[tuple[int, tuple[str, ...]]]) -> list[tuple[int, int]]:
    """The first and last m of each range with kernels."""
    found: list[tuple[int, int]] = []
    for (start, kernels), (end, _) in pairwise([*part, (ANY_M, ())]):
        if kernels and found and found[-1][1] == start - 1:
            found[-1] = (found[-1][0], end - 1)
        elif kernels:
            found.append((max(start, 1), end - 1))
    return found


def _words(sizes: Iterable[int]) -> str:
    """Numbers of rows; the least and the largest of many."""
    some = sorted(sizes)
    return ", ".join(map(str, some)) if len(some) <= 4 else f"{some[0]} to {some[-1]}"


def _checked(loss: Callable[[Any], Tensor | float], batch: Any) -> Tensor | float:
    found = loss(batch)
    if isinstance(found, Tensor):
        if found.numel() != 1:
            raise MeasurementError(
                f"limit_loss: the loss has the shape {tuple(found.shape)}; expected one number"
            )
        if found.dtype in (torch.float16, torch.bfloat16):
            raise MeasurementError(
                f"limit_loss: the loss is {found.dtype}, which hides changes under a thousandth; "
                "return it in float32"
            )
    elif not isinstance(found, int | float):
        raise MeasurementError(
            f"limit_loss: the loss is of type {type(found).__name__}; expected one number"
        )
    return found


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
    """Runs a model with some groups in FP8, against the same batch with none.

    Relus in products and other layouts of weights are in both: they save time, and change a loss by
    roundings.
    """

    def __init__(
        self,
        conversion: Conversion,
        groups: list[Group],
        run: Callable[[Any], float],
        batches: Sequence[Any],
    ) -> None:
        self.groups, self.runs, self._conversion = groups, 0, conversion
        self._run, self._batches = run, batches
        self._switch = Switch(conversion, groups)
        self._free: Off = frozenset(
            place for place, group in enumerate(groups) if _quantizes(group)
        )
        half = (len(batches) + 1) // 2
        self._first, self._second = range(half), range(half, len(batches))
        self._plain: dict[int, float] = {}  # losses without FP8, by batch
        self._changes: dict[frozenset[int], LossChange] = {}  # of each option
        self._alone: dict[int, LossChange] = {}  # of each group
        self._items: list[list[Option]] = []
        self._kept: list[Option] = []
        self._failed: list[tuple[frozenset[int], LossChange, str]] = []  # sets, on which half
        self._share = 0.0  # of the work that is done
        self._before = self._chosen = LossChange(0.0, 0.0, 0.0, len(self._first))
        self._after = replace(self._chosen, batches=len(self._second))

    def run(self, relative: float) -> Off:
        """The groups that are off at the end."""
        if not self._free:
            return frozenset()
        self._check_repeats(relative)
        self._before = self._change(self._free, self._first)
        self._items = self._measured_items()
        # If everything is within the limit, a sum beyond it is noise, which counts above 0 alone.
        is_all = self._before.high <= relative
        target, tried = sys.float_info.max if is_all else relative, set()
        for _ in range(MOST_TRIES):
            some = best_within(self._items, target)
            while some and self._on(some) in tried:  # which seem to cost nothing
                some.remove(max(some, key=lambda x: (self._changes[x.on].high, -x.gain_us)))
            if not some:
                break
            on = self._on(some)
            tried.add(on)
            chosen = self._before if on == self._free else self._change(on, self._first)
            found, half = chosen, "first"
            if found.high <= relative:
                found, half = self._change(on, self._second), "second"
            if found.high <= relative:
                self._kept, self._chosen, self._after = some, chosen, found
                return self._free - on
            self._failed.append((on, found, half))
            spent = sum(option.loss for option in some) or relative
            left = relative - (found.high - found.mean)  # for the mean, in an interval as wide
            share = left / found.mean if found.mean > 0 else 0.0
            target = min(target, spent) * min(max(SHRINK[0], share), SHRINK[1])
        return self._free

    def outcome(
        self,
        off: Off,
        relative: float,
        seconds: float,
        file: tuning_file.TuningFile,
        unseen: tuple[str, ...],
        unjudged: tuple[UnjudgedSite, ...],
    ) -> LossLimit:
        """What is told."""
        sites = [
            LimitedSite(group.sites[0], group.kernels, self._alone[place], group.predicted_us,
                        place not in off, self._is_compiled(group),
                        self._why(place, relative) if place in off else "")
            for place, group in enumerate(self.groups) if place in self._alone
        ]  # fmt: skip
        front = []
        for multiple in FRONT:
            limit = multiple * relative
            within = best_within(self._items, limit) if self._items else []
            front.append((limit, sum(map(self._mean, within)), sum(o.gain_us for o in within)))
        return LossLimit(
            tuple(sites), relative, self._before, self._chosen, sum(map(self._mean, self._kept)),
            self._after, tuple(front), self.runs, seconds, unseen, unjudged, file,
        )  # fmt: skip

    def _why(self, place: int, limit: float) -> str:
        """Why a group is off: the last set with it that failed, if it was in one."""
        for on, found, half in reversed(self._failed):
            if place not in on:
                continue
            where = f"{limit:.1e} on the {half} half of the batches"
            where += f", with {len(on) - 1} more in FP8" if len(on) > 1 else ""
            if found.mean <= limit:
                return f"upper end {found.high:.1e} > {where}; more batches would narrow it"
            return f"change {found.mean:+.1e} > {where}"
        alone = self._alone[place].mean
        if not alone <= limit:
            return f"change {alone:+.1e} > {limit:.1e} on the first half of the batches"
        return f"with what saves more time the changes add up to more than {limit:.1e}"

    def _is_compiled(self, group: Group) -> bool:
        """Whether compiled code runs a layer or chain in FP8 at any of its rows."""
        if group.gemm != "output":
            return True
        text = traced_route(self._conversion.untuned[group.sites[0]][0].text)
        return any(kernel_at(text, m) for m in group.rows)

    def _check_repeats(self, relative: float) -> None:
        """Refuse a loss that differs between two runs of the same batch."""
        place = self._first[0]
        once, again = (self._losses(frozenset(), [place])[0] for _ in range(2))
        if not abs(relative_change(once, again)) <= NOISE * relative and math.isfinite(once):
            raise MeasurementError(
                f"limit_loss: without FP8 the loss of batch {place} is {once} and {again} in two "
                "runs: something of it is not restored between them, such as a generator of its "
                "own, or a buffer that forward replaces"
            )

    def _measured_items(self) -> list[list[Option]]:
        """Each chain, or its layers without it; and each other product."""
        batches = self._first[:MOST_ALONE]
        items: list[list[tuple[int, frozenset[int]]]] = []  # what it is named by, and what is on
        left = set(self._free)
        for place in sorted(self._free):
            for sites in self.groups[place].chains:
                inside = frozenset(
                    other for other in self._free
                    if not self.groups[other].chains and self.groups[other].sites[0] in sites
                )  # fmt: skip
                left -= inside | {place}
                # With a chain its layers keep their routes, which run where there is no chain.
                whole = [(place, inside | {place})]
                items.append([*whole, (-1, inside)] if inside else whole)
                for other in inside:
                    self._alone[other] = self._change(frozenset({other}), batches)
        items += [[(place, frozenset({place}))] for place in sorted(left)]
        found = []
        for number, ways in enumerate(items):
            self._share = 0.9 * number / len(items)
            options = []
            for place, on in ways:
                change = self._change(on, batches)
                self._changes[on] = change
                if place >= 0:
                    self._alone[place] = change
                known = (self.groups[other].predicted_us for other in on)
                gain_us = sum(UNKNOWN_GAIN_US if us is None else us for us in known)
                loss = max(change.mean, 0.0) if math.isfinite(change.mean) else math.inf
                options.append(Option(on, loss, gain_us))
            found.append(options)
        return found

    def _mean(self, option: Option) -> float:
        return self._changes[option.on].mean

    def _on(self, options: Iterable[Option]) -> frozenset[int]:
        return frozenset(place for option in options for place in option.on)

    def _change(self, on: frozenset[int], batches: Iterable[int]) -> LossChange:
        """The relative change of the loss over some batches."""
        places = list(batches)
        for place in places:
            if place not in self._plain:
                self._plain[place] = self._losses(frozenset(), [place])[0]
                if not math.isfinite(self._plain[place]):
                    raise MeasurementError(
                        f"limit_loss: without FP8 the loss of batch {place} is "
                        f"{self._plain[place]}; expected a finite number"
                    )
        after = self._losses(on, places)
        return interval_of([
            relative_change(self._plain[place], one)
            for place, one in zip(places, after, strict=True)
        ])  # fmt: skip

    def _losses(self, on: frozenset[int], places: Iterable[int]) -> list[float]:
        self._switch(self._free - on)
        found = []
        for place in places:
            progress.tell("loss", self._share)
            found.append(self._run(self._batches[place]))
        self.runs += len(found)
        return found
