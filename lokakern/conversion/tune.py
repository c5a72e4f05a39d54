"""`Conversion.tune`: keeps the products of a model that make its own step faster.

Products that are alike form a group. A variant of the model is a set of groups that are off, that
is, multiplied as `nn.Linear`. Groups are tried one by one, in the order of their predicted gain:
the best variant so far is timed against the same without the group, and the group is kept only if
that is slower. Under torch.compile each variant is compiled once, which decides how many groups
can be tried in the time limit; the rest is tried as one.

Products whose kernels are for other rows than those of the step go, too, where their layer is an
`nn.Linear` then: comparing rows at each call takes a host that is busy 1 % longer (HSTU without
graphs), which no gain pays for.

A chain of layers is off if its layers run by their routes. Chains are tried first. While a chain is
on, the products of its layers do not run, so that groups of such products alone are not tried. The
relus that products apply (`lokakern.nn.rectified`), gradients behind layers in one op
(`lokakern.nn.joined`), and forms of layers in compiled code (`lokakern.nn.compiled_form`) are one
group, tried last: each saves launches.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lokakern import native, progress
from lokakern.conversion import tuning_file
from lokakern.conversion.chain_spans import OFF
from lokakern.conversion.paired_timing import (
    FEWEST_ROUNDS,
    OutOfTime,
    Ratio,
    StepTimer,
    Timer,
    Variant,
    compare,
)
from lokakern.conversion.restored_state import restored_state
from lokakern.conversion.routes import GEMMS
from lokakern.conversion.variants import (
    OTHER_FORM,
    RELU,
    Group,
    Off,
    Switch,
    applies_relus,
    as_plain,
    groups_of,
    idle_products,
    observed_rows,
    refuse_emulation,
    refuse_ranks,
    start_again,
)
from lokakern.errors import MeasurementError
from lokakern.nn.module_scan import shape_of

if TYPE_CHECKING:
    from lokakern.conversion.convert import Conversion

TIME_LIMIT_S = {True: 150.0, False: 300.0}  # of inference and of training
# Dynamo gives up on a function after 8 variants, and runs it without compiling.
MOST_VARIANTS = 256
MakeTimer = Callable[
    [Callable[[], object], Callable[[Variant], None], torch.device, bool], Timer
]  # step, switch, device, graph


@dataclass(frozen=True)
class Tuned:
    """The outcome for a group.

    Attributes:
        group: The group.
        is_kept: Whether it stays as chosen.
        gain: Time of a step without the group over the time with it; None if it was not tried.
        gain_us: The difference in microseconds.
        together: Number of groups that were tried as one with it, itself included: all have this
            gain together.
        is_idle: Whether chains run its layers, so that there was nothing to try.
    """

    group: Group
    is_kept: bool
    gain: Ratio | None
    gain_us: float | None
    together: int = 1
    is_idle: bool = False


@dataclass(frozen=True)
class Tuning:
    """The outcome of `Conversion.tune`.

    Attributes:
        groups: The outcome for each group.
        before: Time of a step of `nn.Linear` over that of the conversion before tuning; None if the
            step has no product to decide on.
        after: The same after tuning, from new measurements unless all groups are kept; None if none
            is, so that the step is that of `nn.Linear`.
        seconds: Time that tuning took.
        variants: Number of variants that were timed.
        is_timed_out: Whether groups were decided together, or not at all, for lack of time.
        file: What `save` writes.
        idle: Products, as ``site/gemm``, whose kernels are for other numbers of rows than those of
            the step, in layers that multiply as `nn.Linear` at any number now.
    """

    groups: tuple[Tuned, ...]
    before: Ratio | None
    after: Ratio | None
    seconds: float
    variants: int
    is_timed_out: bool
    file: tuning_file.TuningFile
    idle: tuple[str, ...] = ()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row for each group, as plain data; times of a step are in microseconds."""
        return [
            {
                "sites": _words(t.group.sites), "gemm": t.group.gemm,
                "n": t.group.n, "k": t.group.k, "rows": ", ".join(map(str, t.group.rows)),
                "kernel": ", ".join(t.group.kernels),
                "predicted gain us": t.group.predicted_us, "gain us": t.gain_us,
                "gain": None if t.gain is None else t.gain.value,
                "interval": "-" if t.gain is None else f"{t.gain.low:.3f} to {t.gain.high:.3f}",
                "kept": t.is_kept,
                "why": _why(t),
            }
            for t in self.groups
        ]  # fmt: skip

    @property
    def summary(self) -> str:
        """The gain of a step before and after, in a few words."""
        idle = (
            f"; kernels of {_words(self.idle)}, which are for other numbers of rows, were dropped"
            if self.idle else ""
        )  # fmt: skip
        if self.before is None:
            where = " (the model is on a CPU)" * (self.file.device["vendor"] == "cpu")
            return f"the step has no quantized product{where}: there is nothing to tune{idle}"
        if self.after is None:
            now = "nothing is quantized in the step, which is nn.Linear's"
        else:
            now = f"{self.after} after tuning, {self.after.other_us:.0f} us a step"
        return (
            f"gain over nn.Linear: {self.before} before, {now}; {self.variants} variants in "
            f"{self.seconds:.0f} s"
            + (", too little to try each group alone" if self.is_timed_out else "")
            + idle
        )

    def table(self, how: str = "table") -> None:
        """Print a table of the groups, or as "json" or "csv"."""
        from lokakern.render.terminal import print_rows

        print_rows(self.rows, how, title="tuning", note=self.summary, spare=("why", "rows"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file for ``convert(..., tuned=path)``, atomically.

        Raises:
            ChoicesError: It cannot be written.
        """
        tuning_file.write(self.file, path)

    def __repr__(self) -> str:
        return f"Tuning({self.summary})"


def tune(
    conversion: Conversion,
    step: Callable[[], object],
    *,
    graph: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    rounds: int = 64,
    time_limit: float | None = None,
    make_timer: MakeTimer = StepTimer,
) -> Tuning:
    """See `Conversion.tune`; ``make_timer`` makes what times the step."""
    model = conversion.model
    if rounds < FEWEST_ROUNDS:
        raise MeasurementError(f"tune: rounds is {rounds}; expected at least {FEWEST_ROUNDS}")
    refuse_ranks("tune")
    limit = TIME_LIMIT_S[conversion.is_inference] if time_limit is None else time_limit
    before = {name: site.routes for name, site in conversion.sites.items()}, conversion.plain
    others_before = conversion.off_chains, conversion.has_relus
    weight = shape_of(next(iter(conversion.sites.values())).module)[3]
    if make_timer is StepTimer:
        refuse_emulation(conversion)
        if weight.device.type == "cpu" and not _is_quantized(conversion):
            start_again(conversion)
            return _nothing(conversion, graph)
    with contextlib.ExitStack() as stack:
        if not progress.is_shown():
            from lokakern.render.terminal import TerminalProgress  # rich takes time to import

            stack.enter_context(TerminalProgress())
        stack.enter_context(
            restored_state(model, optimizer, is_trained=not conversion.is_inference)
        )
        try:
            start_again(conversion)
            rows, trained, _ = observed_rows(conversion, step)
            native.wait()  # warm calls become faster when it is there
            groups = groups_of(conversion, rows, trained)
            switch = Switch(conversion, groups)

            def timed_step() -> object:
                if timer.now() > deadline:
                    raise OutOfTime
                return step()

            timer = make_timer(timed_step, switch, weight.device, graph)
            deadline = math.inf if time_limit is None else timer.now() + time_limit
            search = _Search(groups, timer, rounds, limit, deadline)
            with _many_variants():
                off = search.run()
                idle = idle_products(conversion, rows, trained, groups, off)
                switch(off, search.reasons(off), idle)
                if search.compiled():
                    # Other code may be compiled only a few times, so variants must not count.
                    torch._dynamo.reset()
                    step()
        except BaseException:
            conversion.use_routes(
                *before, keep_classes=True, off_chains=others_before[0], has_relus=others_before[1]
            )
            raise
    progress.tell("tuning", 1.0)
    products = [groups[place] for place in off if groups[place].gemm in GEMMS]
    dropped = {(name, group.gemm) for group in products for name in group.sites} | idle.keys()
    off_chains = {sites for place in off for sites in groups[place].chains}
    has_relus = applies_relus(groups, off)
    after = search.after
    gain = (1.0, 1.0, 1.0) if after is None else (after.value, after.low, after.high)
    texts = {name: tuple(r.text for r in routes) for name, routes in conversion.untuned.items()}
    relus = {name for group in groups if group.gemm == RELU for name in group.kernels}
    tried = relus - {OTHER_FORM}
    file = tuning_file.file_of(
        conversion, texts, rows, dropped, gain, graph, off_chains, has_relus, tried
    )
    tuned = tuple(search.outcome(place, off) for place in range(len(groups)))
    return Tuning(
        tuned, search.before, after, timer.now() - search.begun, len(search.variants),
        search.is_timed_out, file, tuple(f"{name}/{gemm}" for name, gemm in idle),
    )  # fmt: skip


def _is_quantized(conversion: Conversion) -> bool:
    """Whether some product or chain is; of all else a step gains launches, which a CPU has not."""
    routes = (route for routes in conversion.untuned.values() for route in routes)
    return any(route.text for route in routes) or any(s.plan.chains for s in conversion.spans)


def _nothing(conversion: Conversion, is_graph: bool) -> Tuning:
    """The outcome without a product to decide on, for which the step need not run."""
    texts = {name: tuple(r.text for r in routes) for name, routes in conversion.untuned.items()}
    file = tuning_file.file_of(conversion, texts, {}, set(), (1.0, 1.0, 1.0), is_graph)
    return Tuning((), None, None, 0.0, 0, False, file)


def apply_tuning(conversion: Conversion, file: tuning_file.TuningFile) -> None:
    """Drop products and chains that a file does not keep; it was checked for this conversion."""
    by_gemm: dict[str, set[str]] = defaultdict(set)
    for name, gemm in file.dropped:
        by_gemm[gemm].add(name)
    routes = {
        name: tuple(as_plain(r, OFF) if name in by_gemm[r.gemm] else r for r in site.routes)
        for name, site in conversion.sites.items()
    }
    changed = {name: new for name, new in routes.items() if new != conversion.sites[name].routes}
    conversion.over_limit = dict.fromkeys(file.over_limit, OFF)
    conversion.over_limit_chains = file.over_limit_chains
    conversion.use_routes(
        changed, plain=by_gemm["output"], off_chains=file.dropped_chains, has_relus=file.has_relus
    )


@contextlib.contextmanager
def _many_variants() -> Iterator[None]:
    """Let Dynamo compile many variants of one function."""
    config: Any = torch._dynamo.config
    with config.patch(
        recompile_limit=max(config.recompile_limit, MOST_VARIANTS),
        accumulated_recompile_limit=max(config.accumulated_recompile_limit, 16 * MOST_VARIANTS),
        error_on_recompile=False,
    ):
        yield


# ---- the search


class _Search:
    """Finds the groups that are off at the end."""

    def __init__(
        self, groups: Sequence[Group], timer: Timer, rounds: int, time_limit: float,
        deadline: float,
    ) -> None:  # fmt: skip
        self.groups, self.timer, self.rounds = groups, timer, rounds
        self.begun = timer.now()
        self.until, self.deadline = self.begun + time_limit, deadline
        self.variants: set[Off] = set()
        self.before: Ratio | None = None
        self.after: Ratio | None = None
        self.is_timed_out = False
        self._tried: dict[int, tuple[Ratio, int]] = {}  # and how many groups together
        self._graphs = _compiled_graphs()
        self._slowest = 0.0  # seconds to prepare a variant
        self._comparison_s = 0.0
        self._done, self._planned = 0, 3

    def run(self) -> Off:
        """Try the groups and time the outcome."""
        everything: Off = frozenset(range(len(self.groups)))
        if not everything:
            return everything
        try:
            self.before = self._compare(everything, frozenset())
        except OutOfTime:
            raise MeasurementError(
                f"tune: time_limit={self.until - self.begun:g} passed before the step was compared "
                f"with nn.Linear's in {FEWEST_ROUNDS} rounds; expected more seconds, or a faster "
                "step"
            ) from None
        try:
            return self._searched(everything)
        except OutOfTime:
            # What was compared first is known to gain, or not; what came after is not.
            self.is_timed_out = True
            self._tried.clear()
            if self.before.low <= 1:
                return everything
            self.after = self.before
            return frozenset()

    def _searched(self, everything: Off) -> Off:
        """The groups that are off after each was tried."""
        assert self.before is not None  # the first comparison
        best: Off = frozenset()
        bundles = self._bundles()
        self._planned += len(bundles)
        for bundle in bundles:
            if not self._has_time():
                self.is_timed_out = True
                break
            running = [place for place in bundle if not self._is_idle(place, best)]
            if not running:
                continue
            other = best | frozenset(running)
            found = self._compare(other, best, keep=everything)
            self._tried |= dict.fromkeys(running, (found, len(running)))
            if found.low <= 1:
                best = other
        best = self._with_undecided(best)
        if best == everything:
            return best
        is_decided = self.before.low > 1 or self.before.high < 1
        # Nothing was selected if all groups are on: the first comparison is that of the outcome.
        found = self._compare(everything, best) if best or not is_decided else self.before
        if found.low <= 1:
            return everything
        self.after = found
        return best

    def _is_idle(self, place: int, off: Off) -> bool:
        """Whether chains that are on run all products of a group."""
        group = self.groups[place]
        chained = {
            name
            for other, chain in enumerate(self.groups)
            if other not in off and set(chain.rows) >= set(group.rows)
            for sites in chain.chains
            for name in sites
        }
        return not group.chains and group.gemm == "output" and chained >= set(group.sites)

    def _with_undecided(self, best: Off) -> Off:
        """Try groups whose own gains are below the noise once more, together."""
        undecided = tuple(place for place, (x, _) in self._tried.items() if x.low <= 1 <= x.high)
        if len(undecided) < 2 or not self._has_time():
            return best
        other = best - frozenset(undecided)
        found = self._compare(best, other, keep=frozenset(range(len(self.groups))))
        if found.low <= 1:
            return best
        self._tried |= dict.fromkeys(undecided, (found, len(undecided)))
        return other

    def _bundles(self) -> list[tuple[int, ...]]:
        """Groups one by one, as many as there is time for, and the others together."""
        one = self._slowest + self._comparison_s
        left = self.until - self.timer.now() - one  # which the outcome takes
        count = len(self.groups) if one * len(self.groups) <= left else max(0, int(left / one))
        if count == len(self.groups):
            return [] if count == 1 else [(place,) for place in range(count)]
        self.is_timed_out = True
        rest = tuple(range(max(count - 1, 0), len(self.groups)))
        singles = [(place,) for place in range(rest[0])]
        return [*singles, rest] if singles else []  # all together were timed already

    def _has_time(self) -> bool:
        return self.timer.now() + 2 * (self._slowest + self._comparison_s) <= self.until

    def _compare(self, one: Off, other: Off, keep: Off | None = None) -> Ratio:
        """Prepare and time two variants."""
        for variant in (one, other):
            progress.tell("tuning", min(0.99, self._done / self._planned))
            self._slowest = max(self._slowest, self.timer.prepare(variant))
            self.variants.add(variant)
        begun = self.timer.now()
        found = compare(
            self.timer, one, other, rounds=self.rounds, until=self.until, deadline=self.deadline
        )
        self._comparison_s = max(self._comparison_s, self.timer.now() - begun)
        self.timer.keep([v for v in (one, other, keep) if v is not None])
        self._done += 1
        return found

    def compiled(self) -> bool:
        """Whether torch.compile compiled anything since the search began."""
        return _compiled_graphs() != self._graphs

    def reasons(self, off: Off) -> dict[int, str]:
        """Why each group that is off is off."""
        return {place: _why(self.outcome(place, off)) for place in off}

    def outcome(self, place: int, off: Off) -> Tuned:
        """The outcome for a group."""
        found, together = self._tried.get(place, (None, 1))
        if found is None and len(self.groups) == 1:
            found = self.before
        us = None if found is None else found.other_us * (found.value - 1)
        is_kept = place not in off
        is_idle = is_kept and self._is_idle(place, off)
        return Tuned(self.groups[place], is_kept, found, us, together, is_idle)


def _compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _why(tuned: Tuned) -> str:
    gain = tuned.gain
    if gain is None and tuned.is_idle:
        return "chains run its layers in the step"
    if gain is None:
        return "the step gains" if tuned.is_kept else "the step does not gain in place"
    others = f" with {tuned.together - 1} other groups" if tuned.together > 1 else ""
    if tuned.is_kept:
        return f"it gains in place{others}: {gain}"
    if gain.low > 1:
        return f"it gains in place{others}: {gain}, but the step does not"
    word = "loses" if gain.high < 1 else "gains nothing for certain"
    return f"it {word} in place{others}: {gain}"


def _words(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
