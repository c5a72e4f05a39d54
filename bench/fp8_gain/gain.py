"""Choices of dispatch for the products of a user's model, and their gains over bf16.

Times are measurements on a device. GEMMs without any have predicted times, if a model of the device
covers them, which are marked and summed apart; others are reported and left out of sums. Inference
may use prepared weights in the fastest form, training quantizes both operands each time. A gain is
over the unquantized kernel that was timed with the choice, as in `explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lokakern.bench.fp8_gain.products import Product
from lokakern.conversion.routes import measures_bias, with_padded_sizes
from lokakern.registry.register import fp8_format
from lokakern.selection import dispatcher
from lokakern.selection.choice import Choice
from lokakern.selection.table import Table
from lokakern.types import COMPILED, Device, ErrorBudget, Format, Problem
from lokakern.workloads.gemm_cases import prepared_cases, unquantized_case
from lokakern.workloads.gemm_gradient_cases import grad_input_cases, grad_weight_case

if TYPE_CHECKING:
    from lokakern.selection.prediction.forecast import Prediction

NEVER = "never measured"
PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted times of one call of a GEMM, in microseconds."""

    us: float  # of the choice
    bf16_us: float  # of the fastest unquantized kernel
    least_us: float  # the ends of the interval of `us`
    most_us: float


@dataclass(frozen=True, slots=True)
class Row:
    """One GEMM of a product."""

    product: Product
    gemm: str  # "output", "grad_input" or "grad_weight"
    state: str  # "measured", "interpolated" between measured m, `PREDICTED` or `NEVER`
    kernel: str  # the choice; "" if nothing was measured
    us: float | None  # its time including quantization, if measured
    bf16_us: float | None  # time of the unquantized kernel
    row_err: float | None  # the worst stored bound of the choice, if known
    why: str  # a short reason
    predicted: Predicted | None = None  # without measurements
    transferred: Prediction | None = None  # of another GPU type, by which nothing is chosen

    @property
    def speedup(self) -> float | None:
        return None if self.us is None or self.bf16_us is None else self.bf16_us / self.us

    @property
    def any_us(self) -> tuple[float, float] | None:
        """Time of the choice and of bf16, measured or predicted; None if there is neither."""
        if self.predicted is not None:
            return self.predicted.us, self.predicted.bf16_us
        return None if self.us is None or self.bf16_us is None else (self.us, self.bf16_us)

    @property
    def gain_us(self) -> float | None:
        """Time saved by all its calls together."""
        if self.us is None or self.bf16_us is None:
            return None
        return self.product.count * (self.bf16_us - self.us)

    @property
    def is_quantized(self) -> bool:
        return bool(self.gain_us)


@dataclass(frozen=True, slots=True)
class Worth:
    """Rows and sums of all products."""

    rows: tuple[Row, ...]  # one for each GEMM of each product
    device: Device  # the device of the times
    budget: ErrorBudget  # the error budget of the choices
    regime: str  # of the times

    def total(self) -> dict[str, Any]:
        """Sums over measured rows for JSON; null if there are none."""
        rows = [row for row in self.rows if row.us is not None]
        flops = sum(row.product.flops for row in rows)
        bf16_us = sum(row.product.count * (row.bf16_us or 0.0) for row in rows)
        us = sum(row.product.count * (row.us or 0.0) for row in rows)
        return {
            "products": len(self.rows),
            "measured": len(rows),
            "interpolated": sum(row.state == "interpolated" for row in self.rows),
            "quantized": sum(row.is_quantized for row in self.rows),
            "measured_flops_share": flops / sum(row.product.flops for row in self.rows),
            "bf16_us": bf16_us if rows else None,
            "us": us if rows else None,
            "gain_us": bf16_us - us if rows else None,
            "speedup": bf16_us / us if rows else None,
            "predicted": self._predicted(),
        }

    def _predicted(self) -> dict[str, float] | None:
        """Sums over predicted rows, with all intervals at the same end; None without any."""
        rows = [(row.predicted, row.product.count) for row in self.rows if row.predicted]
        if not rows:
            return None
        bf16_us, us, least, most = (
            sum(count * getattr(p, name) for p, count in rows)
            for name in ("bf16_us", "us", "least_us", "most_us")
        )
        return {
            "products": len(rows), "bf16_us": bf16_us, "us": us, "speedup": bf16_us / us,
            "speedup_low": bf16_us / most, "speedup_high": bf16_us / least,
        }  # fmt: skip

    def words(self) -> str:
        """The sums, each in a line."""
        total, count = self.total(), len(self.rows)
        what = "GEMMs" if any(row.gemm != "output" for row in self.rows) else "products"
        lines = [self._measured_words(total, what)]
        predicted, measured = total["predicted"], total["measured"]
        left = count - measured
        if predicted:
            left -= predicted["products"]
            lines.append(
                f"Predicted, not measured: {predicted['products']}. "
                f"{predicted['bf16_us']:.1f} us in bf16, {predicted['us']:.1f} us by these "
                f"choices, {predicted['speedup']:.2f}x as fast ({predicted['speedup_low']:.2f} to "
                f"{predicted['speedup_high']:.2f})."
            )
            if measured:
                bf16_us, us = (total[name] + predicted[name] for name in ("bf16_us", "us"))
                lines.append(f"Together: {bf16_us:.1f} us in bf16, {us:.1f} us by these choices, "
                             f"{bf16_us / us:.2f}x as fast.")  # fmt: skip
        if measured and left:
            lines.append(f"Never measured, and in no sum: {left}.")
        return "\n".join(lines)

    def convert_words(self) -> str:
        """The regime of these times, and what `convert` chooses otherwise."""
        words = f"Times are of the regime {self.regime}"
        if self.regime == COMPILED:
            words += ", the default of convert."
        else:
            words += f"; that of convert is by default {COMPILED}: --regime {COMPILED}."
        left = sum(
            row.predicted is not None and row.predicted.us < row.predicted.bf16_us
            and bool(row.product.n % 8 or row.product.k % 8) for row in self.rows
        )  # fmt: skip
        if left:
            words += (
                f" Predicted in FP8 with an n or k that is no multiple of 8: {left}, which convert "
                "takes only where they were measured, or after mods.Pad."
            )
        return words

    def _measured_words(self, total: dict[str, Any], what: str) -> str:
        count = len(self.rows)
        if not total["measured"]:
            where = f"on {self.device} for the regime {self.regime}"
            return f"None of {count} {what} was ever measured {where}."
        between = total["interpolated"]
        how = f" ({between} between measured m, marked ~)" if between else ""
        return (
            f"{total['measured']} of {count} {what} were measured{how}, "
            f"{total['measured_flops_share']:.1%} of the FLOPs: {total['bf16_us']:.1f} us in bf16, "
            f"{total['us']:.1f} us by these choices, {total['speedup']:.2f}x as fast, "
            f"{total['quantized']} of them in FP8."
        )

    def missing(self) -> list[dict[str, Any]]:
        """Layers of a suite that were never measured, without batched products.

        Of unaligned layers also the padded sizes, as in `Conversion.suite`. Layers of equal sizes
        are one, with the names of all and their number of calls. Outputs have the bias of the layer
        unless only other m were measured, and without it.
        """
        forms: dict[tuple[int, int, int, bool], dict[str, None]] = {}
        counts: dict[tuple[int, int, int, bool], dict[str, int]] = {}
        is_training = any(row.gemm != "output" for row in self.rows)
        of_output = ("gemm",) if is_training else ("gemm", "prepared")
        for row in self.rows:
            p = row.product
            if row.us is None and p.batch == 1 and p.format is Format.BFLOAT16:
                names = of_output if row.gemm == "output" else (row.gemm,)
                wide = with_padded_sizes(p.n, p.k, names) if p.can_pad else {}
                for (n, k), wanted in ((p.n, p.k), names), *wide.items():
                    has_bias = p.bias and measures_bias(p.m, n, k, self.device, self.regime)
                    key = p.m, n, k, has_bias
                    forms.setdefault(key, {}).update(dict.fromkeys(wanted))
                    counts.setdefault(key, {})[p.layer] = p.count
        return [
            {"name": ", ".join(counts[key]), "count": sum(counts[key].values()),
             "m": key[0], "n": key[1], "k": key[2], **({"bias": True} if key[3] else {}),
             "forms": [*x]}
            for key, x in forms.items()
        ]  # fmt: skip


def worth(
    products: Sequence[Product],
    *,
    budget: ErrorBudget,
    device: Device,
    distributions: tuple[str, ...] | None = None,
    regime: str | None = None,
    gemms: Sequence[str] = ("output",),
    step: Callable[[str], None] = lambda _text: None,
) -> Worth:
    """Choose kernels for every product.

    Args:
        products: The products.
        budget: Largest accepted error.
        device: The device of the times, which need not be this one.
        distributions: Distributions of the errors; None takes a product's own, or all realistic.
        regime: How the model runs; None is the default of `convert`.
        gemms: GEMMs of each product; with gradients, weights are quantized each time.
        step: Called with each layer's name.

    Raises:
        UnknownNameError: Unknown regime or distribution.
    """
    regime = regime or COMPILED
    is_training = len(gemms) > 1
    known: dict[tuple[Any, ...], Row] = {}  # many layers are equal
    rows = []

    def choice_of(problem: Problem, judged: tuple[str, ...] | None, has_bias: bool) -> Choice:
        table = dispatcher.table_for(
            problem, budget, judged, device, regime, is_choice=False, has_bias=has_bias
        )
        return Choice(table, problem.m)

    for product in products:
        for gemm in gemms:
            if gemm == "grad_input" and not product.needs_input_gradient:
                continue
            judged = distributions or product.distributions.get(gemm)
            outside = judged[0].partition(f"{dispatcher.OUTSIDE}: ")[2] if judged else ""
            alike = (product.m, product.n, product.k, product.bias, product.batch, product.format)
            key = (gemm, judged, *alike)
            if key not in known:
                ways = _problems(product, gemm, device, is_training)
                has_bias = product.bias and gemm == "output"
                choices = [[choice_of(x, judged, has_bias) for x in way] for way in ways]
                found = _row(product, gemm, choices)
                if outside:
                    found = replace(found, why=_why_outside(outside, found.why))
                known[key] = found
            rows.append(replace(known[key], product=product))
        step(product.layer)
    return Worth(tuple(rows), device, budget, regime)


def pad_words(
    found: Worth, distributions: tuple[str, ...] | None, gemms: Sequence[str] = ("output",)
) -> str:
    """The unaligned layers that `mods.Pad` makes faster, and the sum with it; "" without any.

    Layers without a time, as they are and padded, are named, too.

    Args:
        found: The products as they are.
        distributions: As of `worth`.
        gemms: As of `worth`.
    """
    unaligned = [row for row in found.rows if row.product.padded is not None]
    products = {id(row.product): row.product.padded for row in unaligned}
    wide = [product for product in products.values() if product is not None]
    padded = worth(wide, budget=found.budget, device=found.device, distributions=distributions,
                   regime=found.regime, gemms=gemms)  # fmt: skip
    pairs: dict[int, list[tuple[Row, Row]]] = {}
    for row, then in zip(unaligned, padded.rows, strict=True):
        pairs.setdefault(id(row.product), []).append((row, then))
    names, gain_us, are_predicted = [], 0.0, False
    for of_layer in pairs.values():
        times = [(row.any_us, then.any_us) for row, then in of_layer]
        gain = sum(before[0] - after[0] for before, after in times if before and after)
        if gain > 0 or not any(time for pair in times for time in pair):
            p = of_layer[0][1].product
            names.append(f"{p.layer} (n={p.n} k={p.k})")
            gain_us += p.count * gain
            are_predicted |= any(then.predicted for _, then in of_layer)
    if not names:
        return ""
    words = f"lokakern.mods.Pad(16), before convert, aligns the rows of {', '.join(names)}"
    if not gain_us:
        return f"{words}, of which no time is known."
    timed = [(row.product.count, *row.any_us) for row in found.rows if row.any_us]
    us, bf16_us = (sum(time[0] * time[at] for time in timed) for at in (1, 2))
    return (
        f"{words}: {'predicted ' * are_predicted}{us - gain_us:.1f} us by the choices then, "
        f"instead of {us:.1f}, {bf16_us / (us - gain_us):.2f}x as fast as bf16."
    )


def _problems(
    product: Product, gemm: str, device: Device, is_training: bool
) -> list[list[Problem]]:
    """Alternative problems of a GEMM, with the bias and as a fallback without."""
    m, n, k, form, batch = product.m, product.n, product.k, product.format, product.batch
    if gemm == "grad_weight":
        return [[grad_weight_case(m, n, k, form, batch=batch).problem]]
    fp8 = fp8_format(device)
    if gemm == "grad_input":
        return [[next(iter(grad_input_cases(m, n, k, fp8, form, batch=batch))).problem]]
    found = []
    for epilogue in ("bias", "none") if product.bias else ("none",):
        cases = [unquantized_case(m, n, k, "X1", form, epilogue=epilogue, batch=batch)]
        if not is_training and batch == 1:
            cases += prepared_cases(m, n, k, "X1", fp8, form, epilogue=epilogue)
        found.append([case.problem for case in cases])
    return found


def _row(product: Product, gemm: str, ways: Sequence[Sequence[Choice]]) -> Row:
    for place, choices in enumerate(ways):
        timed = [(choice, plain) for choice in choices if (plain := _bf16_us(choice)) is not None]
        if not timed:
            continue
        choice, plain = min(timed, key=lambda pair: (not _quantizes(pair[0]), pair[0].latency_us))
        us = choice.latency_us
        if not _quantizes(choice):
            choice, plain = timed[0]  # the unprepared weight
            us = plain
        state = "interpolated" if choice.interpolated else "measured"
        is_explained = _quantizes(choice) and choice.errors
        why = _why_quantized(choice) if is_explained else _why_plain([c for c, _ in timed])
        if place:
            why += "; times without the bias"
        if choice.pick.time is not None and choice.pick.time.freshness == "stale":
            why += "; a stale time"
        return Row(product, gemm, state, choice.kernel, us, plain, choice.errors.get("row_err"),
                   why)  # fmt: skip
    predicted = _predicted_row(product, gemm, ways)
    if predicted is not None:
        return predicted
    shown = _transferred(ways[0])
    why = ways[0][0].pick.note
    if shown is not None:
        why = f"transferred from {shown.transferred_from}, never chosen by: {shown}; {why}"
    return Row(product, gemm, NEVER, "", None, None, None, why, transferred=shown)


def _transferred(choices: Sequence[Choice]) -> Prediction | None:
    """The least predicted time among forms, by the measurements of another GPU type."""
    found = [p for choice in choices if (p := choice.predicted) and p.transferred_from]
    return min(found, key=lambda prediction: prediction.latency_us, default=None)


def _predicted_row(product: Product, gemm: str, ways: Sequence[Sequence[Choice]]) -> Row | None:
    """The row of the choice with the least predicted time; None without predictions."""
    for choices in ways:
        known = [
            (choice, found)
            for choice in choices
            if (found := choice.predicted) is not None and not found.transferred_from
        ]
        if not known:
            continue
        choice, found = min(known, key=lambda x: (not _quantizes(x[0]), x[1].latency_us))
        if _quantizes(choice):
            ends = found.plain_us / found.high, found.plain_us / found.low
        else:
            choice, found = known[0]  # the unprepared weight
            ends = found.latency_us, found.latency_us
        return Row(
            product, gemm, PREDICTED, choice.kernel, None, None, choice.errors.get("row_err"),
            _why_predicted(choice, found), Predicted(found.latency_us, found.plain_us, *ends),
        )  # fmt: skip
    return None


def _why_outside(words: str, otherwise: str) -> str:
    return (
        f"no FP8, as its operands are like no benchmarked distribution ({words}): `report --probe` "
        f"judges them on their own rows; {otherwise}"
    )


def _why_predicted(choice: Choice, found: Prediction) -> str:
    if not found.quantizing:
        return f"predicted: {found}"
    is_certain = _quantizes(choice) or found.speedup <= 1
    return (
        f"predicted: FP8 {found.speedup:.2f}x as fast ({found.low:.2f} to {found.high:.2f})"
        f"{'' if is_certain else ', not for certain'}; {found.quantizing} against {found.plain}; "
        f"{found.coverage:.0%} of held-out measurements lie in such intervals"
    )


def _quantizes(choice: Choice) -> bool:
    chosen = choice.pick.candidate
    return chosen is not None and not chosen.unquantized


def time_us(table: Table, name: str | None, m: int) -> float | None:
    """Time of a kernel of a table at m; None if it is not known."""
    found = next((c.time_at(m) for c in table.candidates if c.name == name), None)
    return found[0].latency_us if found else None


def _bf16_us(choice: Choice) -> float | None:
    """Time of the fastest unquantized kernel, if dispatch has an answer."""
    if choice.is_miss or choice.latency_us is None:
        return None
    plain = choice.table.plain_at(choice.m)
    return None if plain is None else plain.latency_us


def _why_quantized(choice: Choice) -> str:
    found = choice.pick.candidate
    limit = f" at most, by {found.errors_at}" if found and found.errors_at else ""
    worst = found.worst_distribution if found else ""
    return f"row_err {choice.errors['row_err']:.4f}{limit}, worst on {worst}"


def _why_plain(choices: Sequence[Choice]) -> str:
    """The reason against the fastest quantizing kernel, with the form of the weight if it varies.

    A kernel that exceeds the budget counts only where it is faster than bf16: else its error is no
    reason.
    """
    against: list[tuple[bool, float, str]] = []
    is_varied = len({choice.problem.prepared for choice in choices}) > 1
    for choice in choices:
        table, m = choice.table, choice.m
        for candidate in table.candidates:
            time = candidate.time_at(m)
            reason = choice.rejected.get(candidate.name)
            if time is None or reason is None or candidate.unquantized:
                continue
            if not table.takes(candidate, m):
                continue
            us = time[0].latency_us
            is_beside = not table.admits(candidate, m) and us >= (_bf16_us(choice) or 0.0)
            weight = "prepared weight" if choice.problem.prepared else "weight quantized each time"
            form = f" ({weight})" if is_varied else ""
            against.append((is_beside, us, f"{candidate.name}: {reason}{form}"))
    if not against:
        return "no kernel that quantizes was measured"
    return min(against)[-1]
