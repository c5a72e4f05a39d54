"""What torchrun's environment variables say."""

from __future__ import annotations

import math
import os

from lokakern.errors import MeasurementError


def number(variable: str, default: float) -> float:
    """The number in an environment variable; empty counts as unset.

    Raises:
        MeasurementError: It is no finite, non-negative number.
    """
    said = os.environ.get(variable, "").strip()
    try:
        number = float(said) if said else default
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise MeasurementError(f"{variable} is {said!r}; expected a number, as torchrun sets it")
    return number


def cores_of_rank() -> int:
    """CPU cores for each rank of this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // int(number("LOCAL_WORLD_SIZE", 1)))
