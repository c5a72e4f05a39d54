"""`ProbeReport`: verdicts on every site, as a table, as JSON, and as something to dispatch by."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lokakern.device import current_device
from lokakern.errors import UnknownNameError
from lokakern.probe.fingerprint import fingerprint_of, moved, nearest, outside
from lokakern.probe.site import SiteStatistics
from lokakern.probe.verdicts import BUDGET, Verdict, verdicts_of
from lokakern.selection import OUTSIDE
from lokakern.types import Device, ErrorBudget

VERSION = 1


class SiteReport(Sequence[str]):
    """What was found of one site, or of all under a name: names of distributions to dispatch by.

    A sequence of names, as `dispatch` takes it: the benchmarked distributions that the GEMMs are
    nearest to, or `OUTSIDE` where one is like none of them.

    Attributes:
        name: Of the site, or what the names of several begin with.
        verdicts: On each GEMM.
        outside: By GEMM, what of it is like no benchmarked distribution; empty where all are.
    """

    def __init__(
        self, name: str, verdicts: Sequence[Verdict], names: Sequence[str],
        outside: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.name, self.verdicts, self.outside = name, tuple(verdicts), dict(outside)
        self._names = (OUTSIDE,) if self.outside else tuple(dict.fromkeys(names))

    def __getitem__(self, place: Any) -> Any:
        return self._names[place]

    def __len__(self) -> int:
        return len(self._names)

    def __hash__(self) -> int:
        return hash(self._names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SiteReport) and self._names == other._names

    def __repr__(self) -> str:
        return f"SiteReport({self.name!r}, {', '.join(self._names)})"


@dataclass(frozen=True, slots=True)
class _Judged:
    """One GEMM: its verdict, and what its operands look like."""

    verdict: Verdict
    fingerprint: dict[str, float]


class ProbeReport:
    """Verdicts on the sites of a model.

    ``report["layers.3.mlp"]`` is what was found of a site, or of all sites under a name, and may be
    the ``distribution`` of `dispatch` and `gemm`.

    Attributes:
        budget: The largest error that is safe.
        device: Whose times were compared; None: nobody's.
    """

    def __init__(
        self, judged: Mapping[str, Sequence[_Judged]], budget: ErrorBudget, device: str | None
    ) -> None:
        self._judged = {name: tuple(found) for name, found in judged.items()}
        self.budget, self.device = budget, device

    @classmethod
    def of(
        cls,
        sites: Mapping[str, SiteStatistics],
        *,
        budget: ErrorBudget | float = BUDGET,
        device: Device | str | None = None,
        seeds: Sequence[int] = (0, 1, 2),
        database: str | Path | None = None,
    ) -> ProbeReport:
        """Replay every site and judge it.

        Args:
            sites: What was learned, by name.
            budget: The largest error that is safe, see `lokakern.probe.verdicts`.
            device: Whose times count, such as "NVIDIA H200" of a shipped file; None: of the GPU
                here, of nobody where there is none.
            seeds: Of the draws.
            database: Where the errors go as rows; None: nowhere.

        Raises:
            UnsupportedError: The budget limits what Probe does not measure.
            DeviceError: The database does not know the device.
        """
        from lokakern.probe.replay import replay  # brings the bench with it

        if device is None and current_device().is_gpu:
            device = current_device()
        judged: dict[str, list[_Judged]] = {}
        for name, site in sites.items():
            replayed = replay(name, site, seeds=seeds, database=database)
            verdicts = verdicts_of(name, site, replayed, budget=budget, device=device)
            judged[name] = [_Judged(v, fingerprint_of(site, v.gemm)) for v in verdicts]
        where = device.product if isinstance(device, Device) else device
        return cls(judged, ErrorBudget.of(budget), where)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """On every GEMM, by site."""
        return tuple(j.verdict for found in self._judged.values() for j in found)

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites."""
        return tuple(self._judged)

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __getitem__(self, name: str) -> SiteReport:
        """What was found of a site, or of all whose names begin with this and a dot.

        Warns where operands are like no benchmarked distribution: kernels are bfloat16's then.

        Raises:
            UnknownNameError: There is none.
        """
        found = [j for site, judged in self._judged.items() for j in judged
                 if site == name or site.startswith(f"{name}.")]  # fmt: skip
        if not found:
            raise UnknownNameError(
                f"no site {name!r} was seen; expected one of {', '.join(self._judged)}, or what "
                "their names begin with"
            )
        outlying = {
            f"{j.verdict.site}/{j.verdict.gemm}": words
            for j in found
            if (words := outside(j.fingerprint))
        }
        if outlying:
            why = "; ".join(f"{place}: {words}" for place, words in outlying.items())
            warnings.warn(
                f"{name} is like no benchmarked distribution, so its kernels are bfloat16's: {why}",
                stacklevel=2,
            )
        names = [] if outlying else [nearest(j.fingerprint) for j in found]
        return SiteReport(name, [j.verdict for j in found], names, outlying)

    @property
    def saved_share(self) -> float | None:
        """Share of the time of all GEMMs in bfloat16 that the safe and fast ones save.

        None where nothing was timed.
        """
        plain = [v.bf16_us for v in self.verdicts if v.bf16_us is not None]
        return sum(v.saved_us for v in self.verdicts) / sum(plain) if plain else None

    def drift(self, sites: Mapping[str, SiteStatistics]) -> dict[str, str]:
        """What of today's operands is not where the verdicts were made; warns of it.

        Sites that are named want another `ProbeReport.of` with them.

        Args:
            sites: What was learned lately, by name.

        Returns:
            By ``site/gemm``, what moved; empty where nothing did.
        """
        found = {}
        for name, judged in self._judged.items():
            for j in judged if name in sites else ():
                words = moved(j.fingerprint, fingerprint_of(sites[name], j.verdict.gemm))
                if words:
                    found[f"{name}/{j.verdict.gemm}"] = words
        if found:
            why = "; ".join(f"{place}: {words}" for place, words in found.items())
            warnings.warn(f"operands moved since they were judged: {why}", stacklevel=2)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One row for each GEMM, with units in the names of columns."""
        found = []
        for v in self.verdicts:
            best = v.of(v.best)
            found.append(
                {
                    "site": v.site,
                    "gemm": v.gemm,
                    "m,n,k": ",".join(map(str, v.shape)),
                    "verdict": f"{v.safety}, {v.speed or 'not timed'}",
                    "scales": v.best or "-",
                    "row_err": best.row_err
                    if best
                    else min((c.row_err for c in v.classes), default=None),
                    "bf16_err": v.bf16_err,
                    "us": best.latency_us if best else None,
                    "bf16_us": v.bf16_us,
                    "unsafe": ", ".join(c.scales for c in v.classes if c.safety == "unsafe"),
                    "change": v.change,
                    "notes": "; ".join(v.notes),
                }
            )
        return found

    def table(self) -> None:
        """Print a table."""
        from lokakern.bench.report import print_rows

        where = f", times of {self.device}" if self.device else ""
        note = (
            ""
            if self.saved_share is None
            else (f"{self.saved_share:.1%} of the time of these GEMMs in bfloat16 would be saved")
        )
        print_rows(self.rows(), "table", title=f"within {self.budget}{where}", note=note)

    def to_json(self) -> str:
        """Everything as JSON; what is infinite as null."""
        content = {
            "format": "lokakern.probe.report",
            "version": VERSION,
            "budget": self.budget.limits,
            "device": self.device,
            "saved_share": self.saved_share,
            "verdicts": [
                {**j.verdict.as_row(), "pareto": j.verdict.pareto(), "fingerprint": j.fingerprint}
                for found in self._judged.values()
                for j in found
            ],
        }
        return json.dumps(_finite(content), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(x) for x in value]
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value
