"""Dispatch: the fastest kernel whose measured error is within a budget, with reasons.

A pure function of (snapshot, usable kernels, op, problem, budget, distribution, regime). The result
for a problem without m is cached as a `Table` with sorted breakpoints of m and the winner of each
range, so that a warm call is one dict look-up and one bisection.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lokakern.device import current_device, devices_here
from lokakern.errors import ChoicesError, DeviceError, UnknownNameError
from lokakern.registry import float16
from lokakern.registry.register import KERNELS, kernels_for, load_kernels
from lokakern.selection import rank_agreement
from lokakern.selection.arguments import budget_of, device_of_torch, problem_of
from lokakern.selection.candidates import Candidate, Evidence, Memory, candidate_of
from lokakern.selection.choice import Choice as Choice
from lokakern.selection.frozen.answers import HeldAnswer, KeptAnswer, question
from lokakern.selection.frozen.lookup import Choices, Weight
from lokakern.selection.host_cost import (
    HostCosts,
    digest_words,
    host_costs,
    with_host_costs,
)
from lokakern.selection.measured_neighbors import measured_instead, sizes_of
from lokakern.selection.padded_rows import with_padded_rows
from lokakern.selection.table import LooseTable, Table
from lokakern.selection.weight_forms import FORMS, with_weight
from lokakern.types import (
    CHOICE_REGIMES,
    COMPILER_PADS,
    REALISTIC_DISTRIBUTIONS,
    Device,
    ErrorBudget,
    Granularity,
    Problem,
    alignment_of,
)

if TYPE_CHECKING:
    from lokakern.registry.snapshot.cells import TimingCell
    from lokakern.registry.snapshot.snapshot import Snapshot
    from lokakern.selection.prediction.forecast import Forecast
    from lokakern.selection.prediction.model_file import Model

# A distribution unlike all measured ones. No error is known under it, so that the rule for missing
# cells rejects all quantizing kernels. The reason may follow after a colon.
OUTSIDE = "outside"
AnyDevice = Device | torch.device | str | None


_TABLES: dict[Any, Table] = {}
_PREPARED: dict[Any, Table] = {}  # by m, too: the fastest form of a weight depends on m
_LOCK = threading.RLock()
_SNAPSHOT: Snapshot | None = None
_MODELS: dict[Device, Model | None] = {}  # of the snapshot
_MEMORIES: dict[tuple[Device, tuple[str, ...]], Memory] = {}  # by device and distributions
_CHOICES: Choices | None = None
_IS_ENVIRONMENT_READ = False
_GENERATION = 0
_MOST_TABLES = 4096  # bounds the memory for callers with ever new budgets
_FORGOTTEN = False  # whether tables were dropped because there were more
# Scales that `prepare_weight` chose for weights, for `freeze`; NONE leaves a weight unquantized.
CHOSEN_FORMS: dict[tuple[Device, Weight], Granularity] = {}
_ANSWERS: dict[tuple[Device, str], KeptAnswer] = {}  # by device and question, for `freeze`


def snapshot() -> Snapshot:
    """The snapshot of the shipped files and the user's database, loaded at first use."""
    global _SNAPSHOT
    with _LOCK:
        if _SNAPSHOT is None:
            from lokakern.registry.snapshot.loading import load_snapshot

            _SNAPSHOT = load_snapshot()
        return _SNAPSHOT


def model_of(device: Device) -> Model | None:
    """The time model of a device that belongs to the snapshot; None if predictions are off.

    Raises:
        UnknownNameError: LOKAKERN_PREDICT is neither 0 nor 1.
    """
    with _LOCK:
        if device not in _MODELS:
            from lokakern.selection.prediction import models

            _MODELS[device] = models.model_for(snapshot(), device) if models.is_on() else None
        return _MODELS[device]


def use_snapshot(new: Snapshot | None) -> None:
    """Dispatch from another snapshot; None reads the files again at the next use.

    Frozen choices are dropped; with None, LOKAKERN_CHOICES is read again.
    """
    _answer_from(new, None, new is not None)


def choices() -> Choices | None:
    """The frozen choices in use; None if dispatch reads databases.

    They are from LOKAKERN_CHOICES, read at first use, or from `use_choices`.

    Raises:
        ChoicesError: The file that LOKAKERN_CHOICES names cannot be used here.
    """
    global _CHOICES, _IS_ENVIRONMENT_READ
    with _LOCK:
        if not _IS_ENVIRONMENT_READ:
            named = os.environ.get("LOKAKERN_CHOICES")
            _CHOICES = _load_choices(named) if named else None
            _IS_ENVIRONMENT_READ = True
        return _CHOICES


def _load_choices(path: str | Path) -> Choices:
    from lokakern.selection.frozen import file_format  # msgspec, which only frozen choices need

    return file_format.load(path)


def use_choices(path: str | Path | None) -> None:
    """Dispatch from a file of `lokakern.freeze` instead of databases.

    Args:
        path: The file; None reads databases again, even if LOKAKERN_CHOICES is set.

    Raises:
        ChoicesError: The file cannot be used here; the previous source is kept.
    """
    _answer_from(_SNAPSHOT, None if path is None else _load_choices(path), True)


def _answer_from(facts: Snapshot | None, held: Choices | None, is_environment_read: bool) -> None:
    global _SNAPSHOT, _CHOICES, _IS_ENVIRONMENT_READ, _GENERATION, _FORGOTTEN
    with _LOCK:
        _SNAPSHOT, _CHOICES, _IS_ENVIRONMENT_READ = facts, held, is_environment_read
        _GENERATION += 1
        _FORGOTTEN = False
        _TABLES.clear()
        _PREPARED.clear()
        CHOSEN_FORMS.clear()
        _ANSWERS.clear()
        _MODELS.clear()
        _MEMORIES.clear()
        for listener in _LISTENERS:
            listener()


def on_new_snapshot(clear: Callable[[], None]) -> None:
    """Call ``clear`` whenever the snapshot changes, for caches of tables."""
    _LISTENERS.append(clear)


def chosen() -> list[Table]:
    """The tables by which kernels were chosen since the snapshot was loaded.

    Raises:
        ChoicesError: Some were dropped because there were too many.
    """
    with _LOCK:
        if _FORGOTTEN:
            raise ChoicesError(
                f"more than {_MOST_TABLES} choices were made here, and not all are kept; freeze in "
                "a process that only runs the model"
            )
        return [table for table in dict.fromkeys(_TABLES.values()) if table.is_choice]


def keep_answer(
    device: Device, asked: str, texts: Sequence[str], kernels: Iterable[str],
    rank: tuple[object, ...] = (),
) -> None:  # fmt: skip
    """Keep an answer that `lokakern.freeze` writes, with the names of its kernels.

    Of several answers to a question, which have a rank, that of the least one.
    """
    global _FORGOTTEN
    with _LOCK:
        if len(_ANSWERS) >= _MOST_TABLES:
            _ANSWERS.clear()
            _FORGOTTEN = True
        before = _ANSWERS.get((device, asked))
        if before is None or not rank or rank < before.rank:
            _ANSWERS[device, asked] = KeptAnswer(tuple(texts), frozenset(kernels), rank)


def kept_answers() -> dict[tuple[Device, str], KeptAnswer]:
    """The answers that were kept since the snapshot was loaded, by device and question."""
    with _LOCK:
        return dict(_ANSWERS)


def held_answer(device: Device, asked: str) -> HeldAnswer | None:
    """The answer of the frozen choices in use; None if they have none.

    Raises:
        ChoicesError: No choices are frozen.
        DisagreementError: Another rank of this job would choose from other data.
    """
    held = choices()
    if held is None:
        raise ChoicesError("no choices are frozen; set LOKAKERN_CHOICES")
    if device in devices_here():
        rank_agreement.check(device, lambda: str(held))
    return held.answer(asked, device)


def is_timed(name: str, device: Device) -> bool:
    """Whether a kernel was timed on a device, from the database or the frozen choices."""
    asked = question("timed", kernel=name)
    if choices() is not None:
        answer = held_answer(device, asked)
        if answer is not None:
            answer.expect(answer.texts == (name,) and name in answer.kernels, f"{asked} is wrong")
        return answer is not None
    is_so = snapshot().is_timed(name, device)
    if is_so:
        keep_answer(device, asked, [name], [name])
    return is_so


def device_named(device: AnyDevice, without_times: Sequence[str] = ()) -> Device:
    """The device with a product name or of a torch device; None means the local one.

    ``without_times`` are products that the caller also takes, for the error.

    Raises:
        DeviceError: The product is unknown, or the torch device is not present.
    """
    if device is None or isinstance(device, Device):
        return device or current_device()
    if isinstance(device, torch.device):
        return device_of_torch(device)
    if not isinstance(device, str) or device.partition(":")[0] in ("cuda", "cpu", "meta"):
        raise DeviceError(
            f"device is {device!r}; expected a product such as 'NVIDIA H200', a torch.device, a "
            "lokakern.types.Device, or None for the one here"
        )
    held = choices()
    if held is not None:
        return held.find_device(device)
    return snapshot().find_device(device, without_times)


_LISTENERS: list[Callable[[], None]] = []


def dispatch(
    op: str,
    shape: Sequence[int],
    error_budget: ErrorBudget | float | None = None,
    *,
    distribution: str | Sequence[str] | None = None,
    device: AnyDevice = None,
    regime: str | None = None,
    **problem: Any,
) -> Choice:
    """The fastest kernel whose measured error is within the budget.

    1. Candidates: registered kernels that support the problem; for a device that is not present,
       the kernels of the database's rows (the Choice is then not callable).
    2. Error: the largest stored bound over the distributions. It is no bound for other inputs. A
       kernel with a missing cell or an incorrect result is rejected.
    3. Time: measured, or interpolated between measured m of the same (n, k) and marked.
       Without any, a fitted model predicts times, and the Choice is marked `predicted`. A kernel
       that quantizes is then chosen only where the lower end of its speedup is above 1.
    4. The shortest time wins. In a tie the lower error wins, then operands that one launch
       quantizes, then the name; so an FP8 kernel is chosen only if it is faster than the
       unquantized one beyond noise.

    For a prepared weight (``prepared=True``) without a description (``b=``), each form that
    `prepare_weight` makes is considered: tensorwise, rowwise and blockwise (128x128) scaling. The
    form that is fastest at this m is taken; `Choice.problem` has it.

    Args:
        op: A key of `registry.ops.OPS`, such as "gemm", "scaled_gemm", "gemm_norm" or "quantize".
        shape: ``(m, n, k)``, or ``(m, k)`` for ops with one operand.
        error_budget: A limit on row_err, or an `ErrorBudget`. None means the fastest unquantized
            kernel, or the fastest of all for ops without one. Numbers of NumPy are accepted, arrays
            and tensors are not.
        distribution: Name or names of the input distributions whose errors count; None means all
            realistic ones.
        device: A product such as "NVIDIA H200", a `torch.device` that is present, or a `Device`;
            None means the local one.
        regime: "graph-cold", "graph-hot" or "eager"; None means graph-cold on GPUs and eager on
            CPUs, which have no graphs. "compiled" is for a product in a compiled model: times of
            the default regime, and rows of activations are padded at no cost. "compiled-graph" is
            the same in a CUDA graph, where the host makes no call.
            In "compiled" and "eager" the host makes each call. If host costs were measured on this
            class of machines, a kernel takes the longer of its time on the GPU, that of the default
            regime, and of the host; see `Choice.host_us`.
        problem: Fields of `Problem` that differ from their defaults, such as ``prepared=True`` or
            ``epilogue="bias"``.

    Raises:
        UnknownNameError: Unknown op, regime or distribution; or a field, epilogue, format,
            granularity or layout that no problem of the op has.
        ShapeError: The shape does not fit the op.
        FormatError: A flag is neither True nor False, or an operand is no `Operand`.
        BudgetError: The budget is not a finite, non-negative number.
        DeviceError: The database does not know the device.
    """
    key = None
    try:
        n: Any = None
        if len(shape) == 3:
            m, n, k = shape
        else:
            m, k = shape
        # Types are part of the key, because True == 1 == 1.0.
        if type(m) is type(k) is int and (type(n) is int or len(shape) == 2):
            low = m & -m
            key = (op, n, k, type(error_budget), error_budget, distribution, device, regime,
                   low if low < 16 else 16)  # fmt: skip
            if problem:
                values = problem.values()
                key = (*key, *problem, *values, *map(type, values))
            table = _PREPARED.get((*key, m)) if "prepared" in problem else None
            if table is None:
                table = _TABLES.get(key)
            if table is not None and m >= 0:
                return Choice(table, m)
    except (TypeError, ValueError):  # unhashable, or no sizes: checked below
        key = None
    generation = _GENERATION
    asked = problem_of(op, shape, problem)
    budget = None if error_budget is None else budget_of(error_budget)
    judged = budget, distribution_names(distribution)
    is_form_open = (
        asked.prepared
        and asked.b is not None
        and problem.get("b") is None
        and not asked.a.format.is_fp8
    )
    if is_form_open:
        table = _prepared_table(asked, *judged, device, regime)
    else:
        table = table_for(asked, *judged, device, regime)
    with _LOCK:
        if key is not None and generation == _GENERATION:
            if not is_form_open:
                _TABLES[key] = table
            else:
                if len(_PREPARED) >= _MOST_TABLES:
                    _PREPARED.clear()
                _PREPARED[(*key, asked.m)] = table
    return Choice(table, asked.m)


def _prepared_table(
    problem: Problem,
    budget: ErrorBudget | None,
    distributions: tuple[str, ...] | None,
    device: AnyDevice,
    regime: str | None,
) -> Table:
    """The table of the form of a prepared weight that is fastest at this m."""
    target = device_named(device)
    forms = [with_weight(problem, form, target) for form in FORMS]

    def rank(form: Problem) -> tuple[bool, float]:
        """Measured times first, then predicted ones."""
        table = table_for(form, budget, distributions, target, regime, is_choice=False)
        choice = Choice(table, problem.m)
        time = choice.latency_us
        if time is None and choice.predicted is not None:
            time = choice.predicted.latency_us
        return choice.is_miss, math.inf if time is None else time

    best = min(forms, key=rank)
    return table_for(best, budget, distributions, target, regime)


def distribution_names(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Names as a tuple; None for all realistic ones.

    Raises:
        UnknownNameError: Neither a name nor names.
    """
    if given is None or isinstance(given, str):
        return None if given is None else (given,)
    names = tuple(given) if isinstance(given, Iterable) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise UnknownNameError(f"distribution is {given!r}; expected a name such as 'X3', or names")
    return names


def generation() -> int:
    """A number that changes with the snapshot, to detect outdated caches."""
    return _GENERATION


def table_for(
    problem: Problem,
    budget: ErrorBudget | None,
    distributions: tuple[str, ...] | None = None,
    device: AnyDevice = None,
    regime: str | None = None,
    needs: frozenset[str] = frozenset(),
    *,
    is_choice: bool = True,
    is_training: bool = False,
    predicts: bool = True,
    has_bias: bool = False,
) -> Table:
    """The choices for a problem at every m with the same alignment.

    Only kernels with the abilities ``needs`` (`registry.register.NEEDS`) are considered. With
    ``is_choice`` the chosen kernel is run, and `lokakern.freeze` writes the table. With
    ``is_training`` host costs are those of products in training steps. Without ``predicts`` only
    measurements count. With ``has_bias`` a layer adds a bias to the product, whatever the epilogue.

    Raises:
        UnknownNameError: Unknown regime or distribution.
        DeviceError: The database does not know the device.
        DisagreementError: Another rank of this job would choose from other data.
    """
    global _FORGOTTEN
    m_alignment = alignment_of(problem.m)
    check_regime(regime)
    device = device_named(device)
    key = (replace(problem, m=0), m_alignment, budget, distributions, device, regime, needs,
           is_training, predicts, has_bias)  # fmt: skip
    with _LOCK:
        table = _TABLES.get(key)
        if table is None:
            if len(_TABLES) > _MOST_TABLES:
                _TABLES.clear()
                _MEMORIES.clear()
                _FORGOTTEN = True
            table = _TABLES[key] = _build(
                problem,
                budget,
                distributions,
                device,
                regime,
                needs,
                is_training=is_training,
                predicts=predicts,
                has_bias=has_bias,
            )
        if is_choice and not table.is_choice:
            table.is_choice = True
            if _CHOICES is not None:
                _CHOICES.tell(table)
        return table


def loose_table(
    problem: Problem, device: AnyDevice, regime: str | None, *, predicts: bool = False
) -> LooseTable:
    """A table for `LooseTable.pick` at any m and within any budget, which is not kept.

    Errors are those on all realistic distributions. Without ``predicts`` only measured times
    count, with errors as of `dispatch`.

    Raises:
        ChoicesError: Choices are frozen, so that times and errors are unknown.
        UnknownNameError: Unknown regime.
        DeviceError: The database does not know the device.
    """
    held = choices()
    if held is not None:
        raise ChoicesError(
            f"answers are those of {held}, which has no times and errors; unset "
            "LOKAKERN_CHOICES to read databases"
        )
    check_regime(regime)
    target = device_named(device)
    with _LOCK:  # bounds of errors are kept for one snapshot
        found = _build(
            problem, None, None, target, regime, frozenset(), LooseTable, predicts=predicts
        )
    assert isinstance(found, LooseTable)
    return found


def unquantized_table(problem: Problem, device: Device) -> Table:
    """A table of the unquantized kernel, without any measurement."""
    load_kernels()
    regime = default_regime(device)
    return Table(problem, device, None, REALISTIC_DISTRIBUTIONS, regime, callable_here=True)


def host_costs_on(device: Device, regime: str) -> HostCosts:
    """The host costs that count for choices on a device in a regime."""
    return host_costs(snapshot(), device, regime, is_local=device in devices_here())


def default_regime(device: Device) -> str:
    """Graph-cold on GPUs; CPUs have no graphs."""
    return "graph-cold" if device.is_gpu else "eager"


def check_regime(regime: str | None) -> None:
    """Raise an `UnknownNameError` for what is no regime of choices."""
    if regime is not None and not (isinstance(regime, str) and regime in CHOICE_REGIMES):
        raise UnknownNameError(
            f"regime {regime!r} is unknown; expected one of {', '.join(CHOICE_REGIMES)}"
        )


def _digest_here(device: Device) -> str:
    """Digest of the rows, and of the host costs of this machine if there are any."""
    facts = snapshot()
    words = digest_words(facts, device)
    if not words:
        return facts.digest
    return hashlib.sha256(f"{facts.digest} {words}".encode()).hexdigest()


def _build(
    problem: Problem,
    budget: ErrorBudget | None,
    distributions: tuple[str, ...] | None,
    target: Device,
    regime: str | None,
    needs: frozenset[str],
    kind: type[Table] = Table,
    *,
    is_training: bool = False,
    predicts: bool = False,
    has_bias: bool = False,
) -> Table:
    held = choices()
    local = target in devices_here()
    if regime is None:
        regime = default_regime(target)
    if local:
        rank_agreement.check(target, lambda: str(held) if held else _answers_of(target))
    if held is not None:
        judged = distributions or REALISTIC_DISTRIBUTIONS
        return held.table(problem, budget, judged, target, regime, needs)
    from lokakern.registry.schema.row_keys import family_key

    facts = snapshot()
    if distributions is None:
        distributions = REALISTIC_DISTRIBUTIONS
    else:
        known = {*REALISTIC_DISTRIBUTIONS, *facts.distribution_names, OUTSIDE}
        for name in distributions:
            if name.partition(":")[0] != OUTSIDE and name not in known:
                raise UnknownNameError(
                    f"distribution {name!r} was never measured; "
                    f"expected one of {', '.join(sorted(known))}"
                )
    cells: dict[str, list[TimingCell]] = {}
    costs = host_costs(facts, target, regime, is_local=local)
    timed = default_regime(target) if regime in COMPILER_PADS or costs.by_call else regime
    known_as = problem
    for asked in (problem, float16.as_bfloat16(problem)) if float16.is_in(problem) else (problem,):
        for cell in facts.timing_cells(target, family_key(asked), timed):
            cells.setdefault(cell.kernel.name, []).append(cell)
        known_as = asked
        if cells:
            break
    rejected: list[tuple[str, str]] = []
    barred: set[str] = set()
    candidates: list[Candidate] = []
    memory = _MEMORIES.setdefault((target, distributions), {})
    evidence = Evidence(facts, target, local, distributions, memory)
    load_kernels()
    names = set(cells)
    if local:
        names |= {k.name for k in kernels_for(problem.op, target)}
    for name in sorted(names):
        reason = KERNELS[name].lacks(needs) if name in KERNELS else None
        if reason is not None:
            rejected.append((name, reason))
            continue
        found = candidate_of(name, cells.get(name, []), problem, evidence)
        if isinstance(found, str):
            rejected.append((name, found))
            barred |= {name} if name in cells else set()
        else:
            candidates.append(found)
            barred |= {name} if found.failed else set()
    instead: Callable[[], str] = str
    if not candidates:
        reasons = "; ".join(f"{name}: {why}" for name, why in rejected if name in cells)
        told = f"no time at {sizes_of(problem)}, {regime}, counts: {reasons}" if cells else ""
        # A search among all measured problems, which few misses need: not before it is asked for.
        instead = functools.cache(
            lambda: told or measured_instead(facts, problem, target, timed, regime)
        )
    candidates, padded = with_padded_rows(
        known_as, candidates, evidence, timed, is_compiled=regime in COMPILER_PADS,
        has_bias=has_bias or "bias" in known_as.epilogue.split("+"),
    )  # fmt: skip
    candidates, host = with_host_costs(candidates, problem, costs, is_training=is_training)
    predicted: Forecast | None = None
    # The unquantized kernel of a gemm is no choice; loose tables are asked within many budgets.
    asks = budget is not None or problem.op != "gemm" or kind is LooseTable
    # A loose table without predicted times has the bounds of errors of one with them.
    if (predicts or kind is LooseTable) and asks and timed == default_regime(target):
        model = model_of(target)
        if model is not None and model.content.regime == timed:
            from lokakern.selection.prediction.errors import with_predicted_errors
            from lokakern.selection.prediction.forecast import forecast

            if predicts:
                predicted = forecast(
                    known_as, model, evidence, alignment_of(problem.m), needs, barred,
                    is_compiled=regime in COMPILER_PADS,
                    with_costs=lambda found: with_host_costs(
                        found, problem, costs, is_training=is_training
                    )[0],
                )  # fmt: skip
            candidates = with_predicted_errors(candidates, problem, evidence)
    if known_as is not problem:
        how = "that of bfloat16, which has as many bytes"
        candidates = [replace(c, estimated=c.estimated or how) for c in candidates]
        if predicted is not None:
            predicted.leave_out_errors("error not measured with float16")
    names = {candidate.name for candidate in candidates}
    rejected = [(name, why) for name, why in rejected if name not in names]
    return kind(
        problem=problem,
        device=target,
        budget=budget,
        distributions=distributions,
        regime=regime,
        candidates=tuple(candidates),
        rejected=tuple(rejected),
        callable_here=local,
        needs=needs,
        instead=instead,
        padded=padded,
        host=host,
        forecast=predicted,
    )


def _answers_of(device: Device) -> str:
    """The kind and digest of what choices are made from: rows, and a model if there is one."""
    model, rows = model_of(device), _digest_here(device)
    if model is None:
        return f"snapshot {rows}"
    return f"snapshot and model {hashlib.sha256((rows + model.digest).encode()).hexdigest()}"
