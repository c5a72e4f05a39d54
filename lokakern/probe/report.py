"""`ProbeReport`: verdicts on every site, as a table, as JSON, and as something to dispatch by."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from lokakern.device import current_device
from lokakern.errors import UnknownNameError, UnsupportedError
from lokakern.probe.fingerprint import fingerprint_of, moved, outside
from lokakern.probe.site import SiteStatistics
from lokakern.probe.site_report import Judged, SiteReport
from lokakern.probe.verdicts import BUDGET, Verdict, verdicts_of
from lokakern.selection import dispatcher
from lokakern.types import Device, ErrorBudget

VERSION = 1


class ProbeReport:
    """Verdicts on the sites of a model.

    ``report["layers.3.mlp"]`` is what was found of a site, or of all sites under a name, and may be
    the ``distribution`` of `dispatch` and `gemm`; so may ``report["layers.3.mlp"].gemm("output")``.

    Attributes:
        budget: The largest error that is safe.
        device: Whose times were compared; None: nobody's.
        steps: That were sampled, of all ranks together; 0 where that is not known.
        unseen: What there is no verdict on, by name, and why; see `Probe.unseen`.
    """

    def __init__(
        self,
        judged: Sequence[Judged],
        budget: ErrorBudget,
        device: Device | str | None,
        steps: int = 0,
        unseen: Mapping[str, str] | None = None,
    ) -> None:
        self._judged, self._device = tuple(judged), device
        self.budget, self.steps, self.unseen = budget, steps, dict(unseen or {})
        self.device = device.product if isinstance(device, Device) else device

    @classmethod
    def of(
        cls,
        sites: Mapping[str, SiteStatistics],
        *,
        budget: ErrorBudget | float = BUDGET,
        device: Device | str | None = None,
        seeds: Sequence[int] = (0, 1, 2),
        database: str | Path | None = None,
        times: bool = False,
        steps: int = 0,
        unseen: Mapping[str, str] | None = None,
    ) -> ProbeReport:
        """Replay every site and judge it.

        Args:
            sites: What was learned, by name.
            budget: The largest error that is safe, see `lokakern.probe.verdicts`.
            device: Whose times count, such as "NVIDIA H200" of a shipped file; None: of the GPU
                here, of nobody where there is none.
            seeds: Of the samples of a weight's gradient, see `lokakern.probe.replay.replay`.
            database: Where the errors go as rows; None: nowhere.
            times: Also time here, into the database, what was not timed before.
            steps: In which all this was seen, of all ranks together.
            unseen: What there is no verdict on, by name, and why.

        Raises:
            UnsupportedError: The budget limits what Probe does not measure, or there is no database
                for times, or another device's are asked for.
            DeviceError: The database does not know the device.
        """
        from lokakern.probe.as_distribution import LearnedSite
        from lokakern.probe.evidence import evidence_of  # they bring the bench with them
        from lokakern.probe.replay import compile_ahead, replay_site, time_sites

        here = current_device()
        if times and (database is None or device not in (None, here, here.product)):
            raise UnsupportedError(
                f"ProbeReport: times are measured on {here.product}, into database=; device is "
                f"{device!r} and database {database!r}"
            )
        if device is None and (times or here.is_gpu):
            device = here
        if times and database is not None:
            time_sites(sites, database)
        judged = []
        compile_ahead(LearnedSite(name, statistics) for name, statistics in sites.items())
        with nullcontext() if database is None or not times else _answering_from(database):
            for name, statistics in sites.items():
                site = LearnedSite(name, statistics)
                replayed = replay_site(site, seeds=seeds, database=database)
                for verdict in verdicts_of(
                    name, statistics, replayed, budget=budget, device=device
                ):
                    judged.append(
                        Judged(
                            verdict,
                            fingerprint_of(statistics, verdict.gemm),
                            evidence_of(site, verdict.gemm),
                            sum(statistics.sizes.values()),
                        )
                    )
        return cls(judged, ErrorBudget.of(budget), device, steps, unseen)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """On every GEMM, by site."""
        return tuple(j.verdict for j in self._judged)

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites."""
        return tuple(dict.fromkeys(v.site for v in self.verdicts))

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __getitem__(self, name: str) -> SiteReport:
        """What was found of a site, or of all whose names begin with this and a dot.

        Warns where operands are like no benchmarked distribution: kernels are bfloat16's then.

        Raises:
            UnknownNameError: There is none.
        """
        found = [j for j in self._judged
                 if j.verdict.site == name or j.verdict.site.startswith(f"{name}.")]  # fmt: skip
        if not found:
            raise UnknownNameError(
                f"no site {name!r} was seen; expected one of {', '.join(self.sites)}, or what "
                "their names begin with"
            )
        return SiteReport(name, found).warned()

    @property
    def saved_share(self) -> float | None:
        """Share of the time of all GEMMs in bfloat16 that the safe and fast ones save.

        As often as each was called. None where nothing was timed.
        """
        plain = [j.calls * j.verdict.bf16_us for j in self._judged if j.verdict.bf16_us is not None]
        saved = sum(j.calls * j.verdict.saved_us for j in self._judged)
        return saved / sum(plain) if sum(plain) else None

    @property
    def saved_us_per_step(self) -> float | None:
        """Time of a step of a rank that they save, in microseconds; None where it is not known."""
        if self.saved_share is None or not self.steps:
            return None
        return sum(j.calls * j.verdict.saved_us for j in self._judged) / self.steps

    def drift(self, sites: Mapping[str, SiteStatistics]) -> dict[str, str]:
        """What of today's operands is not where the verdicts were made; warns of it.

        Nothing is replayed: `renewed` does that.

        Args:
            sites: What was learned lately, by name, as after `Probe.forget`.

        Returns:
            By ``site/gemm``, what moved; empty where nothing did.
        """
        found = self._moved(sites)
        if found:
            why = "; ".join(f"{place}: {words}" for place, words in found.items())
            warnings.warn(f"operands moved since they were judged: {why}", stacklevel=2)
        return found

    def renewed(self, sites: Mapping[str, SiteStatistics], **options: Any) -> ProbeReport:
        """A report with sites that moved, or are new, replayed and judged again; see `of`."""
        calls = {j.verdict.site: j.calls for j in self._judged}
        stale = {place.rpartition("/")[0] for place in self._moved(sites)}
        asked = {name: x for name, x in sites.items() if name in stale or name not in calls}
        fresh = ProbeReport.of(asked, budget=self.budget, device=self._device, **options)
        # As often as they were called in the steps of this report.
        anew = [replace(j, calls=calls.get(j.verdict.site, j.calls)) for j in fresh._judged]
        kept = [j for j in self._judged if j.verdict.site not in asked]
        return ProbeReport([*kept, *anew], self.budget, self._device, self.steps, self.unseen)

    def _moved(self, sites: Mapping[str, SiteStatistics]) -> dict[str, str]:
        found = {}
        for j in self._judged:
            if j.verdict.site in sites:
                now = fingerprint_of(sites[j.verdict.site], j.verdict.gemm)
                words = moved(j.fingerprint, now)
                if words:
                    found[j.place] = words
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One row for each GEMM, with units in the names of columns."""
        found = []
        for v in self.verdicts:
            best = v.of(v.best)
            lowest = min((c.row_err for c in v.classes), default=None)
            found.append(
                {
                    "site": v.site,
                    "gemm": v.gemm,
                    "m,n,k": ",".join(map(str, v.shape)),
                    "verdict": f"{v.safety}, {v.speed or 'not timed'}",
                    "scales": v.best or "-",
                    "row_err": best.row_err if best else lowest,
                    "bf16_err": v.bf16_err,
                    "us": best.latency_us if best else None,
                    "bf16_us": v.bf16_us,
                    "unsafe": ", ".join(c.scales for c in v.classes if c.safety == "unsafe"),
                    "change": v.change,
                    "notes": "; ".join(v.notes),
                }
            )
        return found

    @property
    def summary(self) -> str:
        """What would be saved; "" where nothing was timed."""
        if self.saved_share is None:
            return ""
        words = f"{self.saved_share:.1%} of the time of these GEMMs in bfloat16 would be saved"
        us = self.saved_us_per_step
        return words if us is None else f"{words}, {us / 1e3:.2f} ms of a step"

    def table(self) -> None:
        """Print a table."""
        from lokakern.render.terminal import print_rows

        where = f", times of {self.device}" if self.device else ""
        unseen = [f"no verdict on {name}: {why}" for name, why in self.unseen.items()]
        note = "\n".join(line for line in (self.summary, *unseen) if line)
        print_rows(self.rows(), "table", title=f"within {self.budget}{where}", note=note)

    def to_json(self) -> str:
        """Everything as JSON; what is infinite or no number as null."""
        return json.dumps(self.content(), indent=2, allow_nan=False)

    def content(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        found: dict[str, Any] = _finite(
            {
                "format": "lokakern.probe.report",
                "version": VERSION,
                "budget": self.budget.limits,
                "device": self.device,
                "sampled_steps": self.steps,
                "saved_share": self.saved_share,
                "saved_us_per_step": self.saved_us_per_step,
                "summary": self.summary,
                "unseen": self.unseen,
                "verdicts": [
                    {
                        **j.verdict.as_row(),
                        "calls": j.calls,
                        "saved_us": j.verdict.saved_us,
                        "pareto": j.verdict.pareto(),
                        "evidence": j.evidence,
                        "fingerprint": j.fingerprint,
                        "outside": outside(j.fingerprint),
                    }
                    for j in self._judged
                ],
            }
        )
        return found

    def save_page(self, path: str | Path) -> None:
        """Write everything as one HTML file, which needs nothing else.

        Raises:
            OSError: It cannot be written.
        """
        from lokakern.probe.page import page_of

        Path(path).write_text(page_of(self.content()), encoding="utf-8")


@contextmanager
def _answering_from(database: str | Path) -> Iterator[None]:
    """Times are those of the shipped files and of this one meanwhile."""
    from lokakern.registry.snapshot.loading import load_snapshot
    from lokakern.registry.storage.paths import shipped_databases

    dispatcher.use_snapshot(load_snapshot([*shipped_databases(), database]))
    try:
        yield
    finally:
        dispatcher.use_snapshot(None)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(x) for x in value]
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value
