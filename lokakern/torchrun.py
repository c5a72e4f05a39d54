"""Environment variables of torchrun."""

from __future__ import annotations

import math
import os

from lokakern.errors import MeasurementError


def number(variable: str, default: float) -> float:
    """The number in an environment variable; empty counts as unset.

    Raises:
        MeasurementError: It is not a finite, non-negative number.
    """
    text = os.environ.get(variable, "").strip()
    try:
        number = float(text) if text else default
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise MeasurementError(f"{variable} is {text!r}; expected a number, as torchrun sets it")
    return number


def cores() -> int:
    """Number of CPU cores of this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_of_rank() -> int:
    """Number of CPU cores for each rank of this host."""
    return max(1, cores() // int(number("LOCAL_WORLD_SIZE", 1)))
