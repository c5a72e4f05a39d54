"""What is written about a measurement: values that know nothing of SQL."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from lokakern.errors import DatabaseError

if TYPE_CHECKING:
    from lokakern.numerics import Errors
    from lokakern.registry.register import Kernel

HOST_REGIMES = ("eager", "compiled")  # of host costs: those in which the host makes each call
HOST_PATHS = ("native", "python", "torch")  # of a call: by our C++ library, without, by torch alone


def now_utc_ms() -> int:
    """The present instant, UTC milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class KernelRow:
    """What the database knows of a kernel: one state of its source."""

    name: str
    op: str
    language: str
    modules: tuple[str, ...]
    digest: str
    accumulation: str
    granularity: str
    b_granularity: str

    @classmethod
    def of(cls, kernel: Kernel) -> KernelRow:
        """The row of a registered kernel as its source is now."""
        return cls(
            name=kernel.name,
            op=kernel.op,
            language=kernel.language,
            modules=tuple(kernel.modules),
            digest=kernel.digest,
            accumulation=kernel.accumulation,
            granularity=str(kernel.granularity),
            b_granularity=str(kernel.b_granularity),
        )

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.digest)  # a fifth of the time for all fields, once for each row counted


@dataclass(frozen=True, slots=True)
class DistributionRow:
    """What the database knows of a distribution; `parameters` is canonical JSON."""

    name: str
    parameters: str = "{}"
    realistic: bool = True

    @classmethod
    def of(
        cls, name: str, parameters: Mapping[str, object] | None = None, *, realistic: bool = True
    ) -> DistributionRow:
        """A distribution of given parameters.

        Raises:
            DatabaseError: The parameters are not plain JSON, or hold NaN or infinity.
        """
        return cls(name, canonical_json(parameters or {}), realistic)

    def __str__(self) -> str:
        return self.name


def canonical_json(value: Mapping[str, object]) -> str:
    """One text for equal values: sorted keys, no spaces.

    Raises:
        DatabaseError: The value is not plain JSON, or holds NaN or infinity.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DatabaseError(
            f"{value!r} cannot be stored: {error}; use strings, booleans and finite numbers"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRecord:
    """How long a kernel took at a problem.

    A status other than "ok" needs a reason and may leave out metrics (None). ``clock_mhz`` is None
    where no clock is readable.
    """

    status: str
    reason: str = ""
    latency_us_p20: float | None = None
    latency_us_p50: float | None = None
    latency_us_p80: float | None = None
    replay_count: int | None = None
    void_count: int | None = None
    calls_per_replay: int | None = None
    clock_mhz: float | None = None
    kernel_err: float | None = None
    kernel_err_row_p99: float | None = None
    timer: str = "none"
    operand_digest: str = "unknown"
    measured_utc_ms: int = field(default_factory=now_utc_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRecord:
    """How far a kernel's output was from the exact one, for one seed.

    A status other than "ok" needs a reason and may leave out metrics (None).
    """

    status: str
    reason: str = ""
    seed: int
    rows: int
    errors: Errors | None = None
    kernel_err: float | None = None
    kernel_err_row_p99: float | None = None
    flushed_share: float | None = None
    saturated_share: float | None = None
    operand_digest: str = "unknown"
    measured_utc_ms: int = field(default_factory=now_utc_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestResultRecord:
    """How the tests of one module ended for a kernel on a GPU.

    ``seeds`` is text of `canonical_seeds`; ``reason`` is "" where the status is "ok".
    """

    __test__: ClassVar[bool] = False  # pytest takes every other class of such a name for tests

    seeds: str
    passed_count: int
    failed_count: int
    skipped_count: int
    reason: str = ""
    measured_utc_ms: int = field(default_factory=now_utc_ms)

    @property
    def status(self) -> str:
        """What the counts say: "ok", "failed", or "nothing" where no test ran to its end."""
        if self.failed_count:
            return "failed"
        return "ok" if self.passed_count else "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCostRecord:
    """How long the host takes for a call, in us.

    Attributes:
        cpu: Name of the CPU.
        regime: "eager" or "compiled".
        call: What is called, see `lokakern.selection.host_cost`.
        language: Of the kernel of the GEMM.
        path: "native", "python", or "torch" of a call of torch alone.
    """

    cpu: str
    regime: str
    call: str
    language: str
    path: str
    host_us_p20: float
    host_us_p50: float
    host_us_p80: float
    round_count: int
    calls_per_round: int
    measured_utc_ms: int = field(default_factory=now_utc_ms)


def canonical_seeds(seeds: Iterable[int]) -> str:
    """One text for equal sets of seeds: ascending, such as "0,7"; "none" where nothing is drawn."""
    return ",".join(map(str, sorted(set(seeds)))) or "none"
