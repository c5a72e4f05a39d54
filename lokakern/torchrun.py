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


def cores_of_rank() -> int:
    """Number of CPU cores for each rank of this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // int(number("LOCAL_WORLD_SIZE", 1)))
