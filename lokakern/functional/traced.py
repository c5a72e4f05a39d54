"""Arguments of public functions as arguments of ops, for calls that torch.compile traces.

A traced call is one opaque op, because a look-up during tracing would fix the kernel of one m in
the graph. The op makes the eager call. Quantized tensors are taken apart into tensors and text, and
put together again around results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lokakern.errors import BudgetError, ShapeError, UnknownNameError
from lokakern.norm import KINDS, Norm
from lokakern.types import ErrorBudget, Format, Granularity, QuantizedTensor

LIMITS = ("row_err", "row_p99", "rel_err", "sqnr_db", "mean_rel_err", "mean_shift")
UNQUANTIZED = ""  # instead of a granularity: a tensor
Matrix = Tensor | QuantizedTensor


def limits_of(budget: ErrorBudget | float | None) -> list[float]:
    """A budget as numbers, which `budget_of_limits` reads; none for None.

    No ErrorBudget is made here: up to torch 2.11 Dynamo cannot trace the hash of a tuple.

    Raises:
        BudgetError: It is a bool or NaN; the op checks the rest.
    """
    if isinstance(budget, ErrorBudget):
        given = [getattr(budget, name) for name in LIMITS]
        return [math.nan if limit is None else limit for limit in given]
    if budget is None:
        return []
    if isinstance(budget, bool) or budget != budget:
        raise BudgetError(f"budget is {budget!r}; expected a number or an ErrorBudget")
    return [budget]  # a limit on row_err


def budget_of_limits(limits: Sequence[float]) -> ErrorBudget | None:
    """The budget of `limits_of`."""
    given = {n: v for n, v in zip(LIMITS, limits, strict=False) if not math.isnan(v)}
    return ErrorBudget(**given) if given else None


def names_of(distribution: str | Sequence[str] | None) -> list[str]:
    """Distributions as a list; empty for None."""
    return [distribution] if isinstance(distribution, str) else list(distribution or ())


def text_of(option: Format | Granularity | str | None) -> str:
    """An option as text; "" for None."""
    if isinstance(option, Format | Granularity):
        return option.value
    return "" if option is None else option


def parts_of(
    op: str, name: str, x: Matrix, is_right: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
    """Data, scale, source and granularity of an operand; its granularity is "" for a tensor.

    Raises:
        ShapeError: A quantized operand is the wrong way round.
    """
    if not isinstance(x, QuantizedTensor):
        return x, None, None, UNQUANTIZED
    if x.transposed is not is_right:
        raise ShapeError(
            f"{op}: {name} must be {'quantize(weight).t()' if is_right else 'quantize(x)'}"
        )
    return x.data, x.scale, x.source, x.granularity.value


def whole(
    data: Tensor, scale: Tensor | None, source: Tensor | None, granularity: str, is_right: bool,
    budget: ErrorBudget | None = None,
) -> Matrix:  # fmt: skip
    """The operand of `parts_of`."""
    if granularity == UNQUANTIZED:
        return data
    return QuantizedTensor(data, scale, Granularity(granularity), is_right, source, budget)


def columns_of(b: Tensor, granularity: str) -> Any:
    """Columns of the right operand of `parts_of`."""
    return b.shape[1] if granularity == UNQUANTIZED else b.shape[0]


def norm_words(op: str, norm: str | Norm, eps: float | None) -> tuple[str, float]:
    """Name and eps of a norm; the op checks the rest.

    Raises:
        UnknownNameError: A `Norm` has a block and another name, or none and needs it.
    """
    if not isinstance(norm, Norm):
        return norm, 1e-5 if eps is None else eps
    if norm.kind not in KINDS or (norm.kind == "block_rms") is (norm.block == 0):
        raise UnknownNameError(
            f"{op}: norm has kind {norm.kind!r} and block {norm.block!r}; expected one of "
            f"{', '.join(KINDS)}; only block_rms takes a block size, an int"
        )
    name = f"block_rms({norm.block})" if norm.kind == "block_rms" else norm.kind
    return name, norm.eps if eps is None else eps
