"""Checks of arguments, and their conversion to Python numbers and types of lokakern.

NumPy numbers are accepted. Arrays and tensors are no budgets, even with one element: reading a
tensor waits for its device.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch

from lokakern.device import current_device
from lokakern.errors import BudgetError, DeviceError, FormatError, ShapeError, UnknownNameError
from lokakern.problems import make_problem
from lokakern.registry.ops import EPILOGUE_OPS, op_named
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import Device, ErrorBudget, Format, Granularity, Layout, Operand, Problem

FLAGS = ("prepared", "out_strided", "accumulate")
ALIGNMENTS = (1, 2, 4, 8, 16)

Name = TypeVar("Name", bound=StrEnum)


def budget_of(given: ErrorBudget | float) -> ErrorBudget:
    """A budget; a bare number limits ``row_err``.

    Raises:
        BudgetError: Neither a number nor an ErrorBudget, not finite, or negative; or ``row_err`` is
            above 1, which no row error exceeds.
    """
    number: object = given  # callers may pass anything
    if not isinstance(number, bool) and isinstance(number, Real):
        try:
            given = float(number)
        except OverflowError:
            given = math.inf
    found = ErrorBudget.of(given)
    # Not in ErrorBudget: digests of kernels cover its file, and measured rows would be stale.
    if found.row_err is not None and found.row_err > 1:
        raise BudgetError(
            f"budget row_err is {found.row_err:g}; expected 1 at most, which no row error exceeds: "
            "0.06 is 6 %"
        )
    return found


def flag_of(op: str, name: str, given: object) -> bool:
    """A flag.

    Raises:
        FormatError: It is neither True nor False.
    """
    if not isinstance(given, bool | np.bool_):
        raise FormatError(f"{op}: {name} is {given!r}; expected True or False")
    return bool(given)


def m_range_of(op: str, given: Any) -> tuple[int, int]:
    """Smallest and largest m.

    Raises:
        ShapeError: Not two integers in order, of at least 1.
    """
    sizes = tuple(given) if isinstance(given, Sequence | np.ndarray) else ()
    try:
        least, largest = (0 if isinstance(m, bool) else operator.index(m) for m in sizes)
    except (TypeError, ValueError):
        least, largest = 0, 0
    if not 1 <= least <= largest:
        raise ShapeError(
            f"{op}: m_range is {given!r}; expected (smallest, largest) in this order, integers of "
            "at least 1"
        )
    return least, largest


def device_of_torch(given: torch.device) -> Device:
    """The type of a local torch device.

    Raises:
        DeviceError: It is not present, or neither a GPU nor a CPU.
    """
    if given.type == "cpu":
        return current_device("cpu")
    named = f"device is torch.device({str(given)!r})"
    expected = "expected a GPU or CPU that is here, or a product such as 'NVIDIA H200'"
    if given.type != "cuda":
        raise DeviceError(f"{named}, on which nothing is measured; {expected}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = 0 if given.index is None else given.index
    if index >= count:
        raise DeviceError(f"{named}, and torch finds {count} GPUs here; {expected}")
    return current_device("cuda", index)


def problem_of(op: str, shape: Sequence[int], fields: dict[str, Any]) -> Problem:
    """`make_problem` with checked fields.

    Raises:
        UnknownNameError: No such op, field, epilogue of the op, format, granularity or layout.
        ShapeError: As `make_problem` says, or an invalid alignment.
        FormatError: A flag is neither True nor False, or an operand is no `Operand`.
    """
    op_named(op if isinstance(op, str) else repr(op))
    named = dict(fields)
    for name in FLAGS:
        if name in named:
            named[name] = flag_of(op, name, named[name])
    if "out_format" in named:
        named["out_format"] = _named(op, "out_format", Format, named["out_format"])
    if "out_granularity" in named:
        scales = _named(op, "out_granularity", Granularity, named["out_granularity"])
        named["out_granularity"] = scales
    for name in ("a", "b"):
        if isinstance(named.get(name), Operand):
            named[name] = _operand(op, name, named[name])
    if "epilogue" in named:
        _check_epilogue(op, named["epilogue"])
    return make_problem(op, shape, **named)


def _named(op: str, name: str, kind: type[Name], given: Any) -> Name:
    try:
        return kind(given)
    except ValueError:
        known = ", ".join(kind)
        raise UnknownNameError(f"{op}: {name} is {given!r}; expected one of {known}") from None


def _operand(op: str, name: str, given: Operand) -> Operand:
    if given.alignment not in ALIGNMENTS:
        raise ShapeError(
            f"{op}: alignment of {name} is {given.alignment!r} bytes; expected 1, 2, 4, 8 or 16"
        )
    return replace(
        given,
        format=_named(op, f"format of {name}", Format, given.format),
        granularity=_named(op, f"granularity of {name}", Granularity, given.granularity),
        layout=_named(op, f"layout of {name}", Layout, given.layout),
        alignment=int(given.alignment),
    )


def _check_epilogue(op: str, given: object) -> None:
    """Check that some kernel of an op has an epilogue; `make_problem` checks those with a norm."""
    if op in EPILOGUE_OPS and isinstance(given, str):
        return
    load_kernels()
    known = {name for kernel in KERNELS.values() if kernel.op == op for name in kernel.epilogues}
    if "n" not in op_named(op).axes:
        known -= {"bias"}  # the default of kernels
    if not isinstance(given, str) or given not in known:
        expected = f"one of {', '.join(sorted(known))}" if op not in EPILOGUE_OPS else "a text"
        raise UnknownNameError(f"{op}: epilogue is {given!r}; expected {expected}")


def device_of(x: torch.Tensor) -> Device:
    """The type of a tensor's device."""
    return current_device(x.device.type, x.device.index or 0)
