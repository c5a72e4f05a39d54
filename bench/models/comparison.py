"""Arms of a model side by side: how fast, and how good; what is missing has a reason."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lokakern.bench.models import arms as ways
from lokakern.bench.models.arms import Arm, Built
from lokakern.bench.models.choices import LayerChoice, gap_words, layer_choices, rows_of_sites
from lokakern.bench.models.click_log import ClickLog
from lokakern.bench.models.learning import Run, best_quality, judged, learn
from lokakern.bench.models.metrics import Quality
from lokakern.bench.models.setting import Setting
from lokakern.bench.models.shares import Shares, shares_of
from lokakern.bench.models.throughput import (
    BATCHES,
    GRAPH,
    Pace,
    Stepper,
    memory,
    pace_words,
    race,
    stepper,
)  # fmt: skip
from lokakern.errors import UnsupportedError
from lokakern.measure import timing
from lokakern.probe.loss import LossChange, interval_of

States = dict[tuple[bool, int], ways.State]  # by whether Mods were applied, and seed


@dataclass
class Result:
    """An arm.

    Attributes:
        arm: Which.
        failed: Why it has no numbers; "" where it has.
        pace: Its time against the baseline's.
        runs: What it learned, by seed.
        change: Relative change of the expected log loss against the baseline, over seeds; None of
            fewer than 2.
        choices: What runs in each layer, of arms that were converted.
        gap: What the layers' gains add up to, and where the rest of the step's is.
        shares: Where the time of its step goes.
        notes: What a reader should know of it.
    """

    arm: Arm
    failed: str = ""
    pace: Pace | None = None
    runs: list[Run] = field(default_factory=list)
    change: LossChange | None = None
    choices: list[LayerChoice] = field(default_factory=list)
    gap: str = ""
    shares: Shares | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Arms, the baseline first, and what no model could do better."""

    setting: Setting
    results: tuple[Result, ...]
    best: Quality


def compare(
    setting: Setting,
    arms: Sequence[Arm],
    *,
    steps: int,
    seeds: int,
    whole: bool = True,
    say: Callable[[str], None] = lambda _text: None,
) -> Comparison:
    """Time and judge arms of a model.

    Args:
        setting: The model and where it runs.
        arms: The baseline first.
        steps: Of training, before quality is judged; 0: it is not.
        seeds: How many pairs of runs quality is judged by.
        whole: Whether the timed step includes the tables.
        say: Told of what is done.

    Raises:
        UnsupportedError: The baseline cannot be built.
    """
    # All arms compile the same code, each for modules of its own: not one that changes its mind.
    with torch._dynamo.config.patch(recompile_limit=8 * len(arms)):
        results = _measured(setting, arms, steps, seeds, whole, say)
    return Comparison(setting, tuple(results), best_quality(setting, 0))


def _measured(
    setting: Setting,
    arms: Sequence[Arm],
    steps: int,
    seeds: int,
    whole: bool,
    say: Callable[[str], None],
) -> list[Result]:
    states: States = {}
    if not setting.training and steps:
        states = _trained(setting, arms, steps, seeds, say)
    reports: dict[str, Any] = {}
    for arm in arms:
        if arm.name == ways.PROBED:
            say(f"{arm.name}: probing")
            try:
                reports[arm.name] = ways.probed(arm, setting, 0, states.get((arm.has_mods, 0)))
            except Exception as error:  # is said of the arm when its turn comes
                reports[arm.name] = error
    say(f"{arms[0].name}: building")
    before = memory(setting.device)
    base = ways.build(arms[0], setting, 0, states.get((arms[0].has_mods, 0)))
    clock = stepper(base, setting, whole=whole, before=before)
    first = Result(arms[0], notes=base.notes)
    first.pace = race(clock, clock, setting.device)
    say(f"{arms[0].name}: {pace_words(first.pace)}")
    first.shares = shares_of(clock.step, BATCHES, setting.device)
    first.runs = _runs(base, setting, steps, seeds, states, say)
    results = [first]
    for arm in arms[1:]:
        result = Result(arm)
        results.append(result)
        try:
            report = reports.get(arm.name)
            if isinstance(report, Exception):
                raise report
            _measure(result, setting, first, clock, states, report, steps, seeds, whole, say)
        except UnsupportedError as error:
            result.failed = f"left out: {error}"
        except Exception as error:  # any library may raise anything; the others go on
            result.failed = "{}: {}".format(*timing.status_and_reason(error))
        gc.collect()
    return results


def _measure(
    result: Result,
    setting: Setting,
    first: Result,
    clock: Stepper,
    states: States,
    report: Any,
    steps: int,
    seeds: int,
    whole: bool,
    say: Callable[[str], None],
) -> None:
    arm = result.arm
    say(f"{arm.name}: building")
    before = memory(setting.device)
    built = ways.build(arm, setting, 0, states.get((arm.has_mods, 0)), report)
    result.notes = built.notes
    if built.conversion is not None:
        result.choices = _choices(built, setting)
    mine = stepper(built, setting, whole=whole, before=before)
    say(f"{arm.name}: timing")
    result.pace = race(clock, mine, setting.device)
    say(f"{arm.name}: {pace_words(result.pace)}")
    result.shares = shares_of(mine.step, BATCHES, setting.device)
    if result.choices and first.shares is not None:
        gained = result.pace.baseline_us - result.pace.step_us
        result.gap = gap_words(result.choices, gained, first.shares, result.shares)
    result.runs = _runs(built, setting, steps, seeds, states, say)
    changes = [
        run.quality.expected_log_loss / base.quality.expected_log_loss - 1
        for run, base in zip(result.runs, first.runs, strict=True)
    ]
    result.change = interval_of(changes) if len(changes) > 1 else None


def _choices(built: Built, setting: Setting) -> list[LayerChoice]:
    batch = ClickLog(setting.inputs, 0, setting.device).batch(0, setting.samples)
    plain = built.uncompiled
    model = plain.trainer() if setting.training else plain.predictor()
    rows = rows_of_sites(built, lambda: model.logits(model.embed(batch)))
    return layer_choices(built, rows, setting.training)


def _runs(
    built: Built,
    setting: Setting,
    steps: int,
    seeds: int,
    states: States,
    say: Callable[[str], None],
) -> list[Run]:
    found = []
    for seed in range(seeds if steps else 0):
        say(f"{built.arm.name}: seed {seed}")
        if setting.training:
            found.append(learn(built, setting, seed, steps))
            continue
        # Not compiled: a seed has weights of its own, and a compiled graph takes a minute.
        plain = replace(built.arm, compiled=False)
        other = ways.build(plain, setting, seed, states[plain.has_mods, seed])
        log = ClickLog(setting.inputs, seed, setting.device)
        found.append(Run(plain.name, seed, (), judged(other.predictor(), log, setting.samples)))
    return found


def _trained(
    setting: Setting, arms: Sequence[Arm], steps: int, seeds: int, say: Callable[[str], None]
) -> States:
    """Parameters that predictions are made with: of bf16, with Mods and without."""
    states: States = {}
    training = replace(setting, training=True)
    for has_mods in sorted({arm.has_mods for arm in arms}):
        teacher = Arm(ways.BASELINE if has_mods else ways.AS_WRITTEN, "", has_mods)
        built = ways.build(teacher, training, 0)
        for seed in range(max(1, seeds)):
            say(f"training what predicts{' with Mods' if has_mods else ''}: seed {seed}")
            learn(built, training, seed, steps)
            state = built.model.state_dict()
            states[has_mods, seed] = {name: x.cpu().clone() for name, x in state.items()}
    return states


def rows_of(found: Comparison) -> list[dict[str, Any]]:
    """One row for each arm, with units in the names of columns."""
    rows = []
    for result in found.results:
        pace, runs = result.pace, result.runs
        row: dict[str, Any] = {"arm": result.arm.name}
        row["step us"] = pace.step_us if pace else None
        row["+- us"] = pace.margin_us if pace else None
        row["x bf16"] = pace.speedup if pace else None
        row["+-"] = pace.speedup_margin if pace else None
        row["samples/s"] = round(found.setting.samples / pace.step_us * 1e6) if pace else None
        row["graph"] = pace.timer == GRAPH if pace else None
        row["peak GiB"] = pace.peak_gib if pace else None
        row["breaks"] = pace.graph_breaks if pace else None
        row["recompiles"] = pace.recompiles if pace else None
        row["log loss"] = _mean([run.quality.log_loss for run in runs])
        row["NE"] = _mean([run.quality.normalized_entropy for run in runs])
        row["AUC"] = _mean([run.quality.auc for run in runs])
        change = result.change
        row["expected %"] = 100 * change.mean if change else None
        row["+- %"] = 100 * (change.high - change.low) / 2 if change else None
        row["note"] = result.failed or (pace.note if pace else "")
        rows.append({name: _finite(value) for name, value in row.items()})
    return rows


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
