"""`ProbeReport`: verdicts on every site, as a table, JSON, a page, and names to dispatch by."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from lokakern.device import current_device
from lokakern.errors import DeviceError, FormatError, UnknownNameError, UnsupportedError
from lokakern.nn.autocast import HALF
from lokakern.probe.fingerprint import Fingerprint, fingerprint_of, moved, nearest, outside, unusual
from lokakern.probe.statistics import SiteStatistics
from lokakern.probe.verdicts import BUDGET, SPEEDS, Verdict, verdicts_of
from lokakern.progress import Progress, is_shown
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of
from lokakern.types import Device, ErrorBudget
from lokakern.what_if.devices import device_named, formats_of
from lokakern.what_if.formats import WhatIf

VERSION = 1
MOST_NAMED = 3  # outlying GEMMs whose reasons stand in the name of a distribution
SAFETIES = ("safe", "undecided", "unsafe")
NOT_TIMED = "not timed"


@dataclass(frozen=True, slots=True)
class Judged:
    """One GEMM of a site."""

    verdict: Verdict
    fingerprint: Fingerprint
    calls: int  # all steps and ranks together

    @property
    def place(self) -> str:
        """Site and GEMM."""
        return f"{self.verdict.site}/{self.verdict.gemm}"


class SiteReport(tuple[str, ...]):
    """Results of one site, or of all under a name: names of distributions to dispatch by.

    A tuple of names, as `dispatch` takes it: the benchmarked distributions that the GEMMs are
    nearest to, or one that begins with `dispatcher.OUTSIDE` and says why, where one is like none of
    them.
    """

    name: str
    _judged: Sequence[Judged]

    def __new__(cls, name: str, judged: Sequence[Judged]) -> SiteReport:
        named = [f"{j.place}: {words}" for j in judged if (words := outside(j.fingerprint))]
        more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        names = [f"{dispatcher.OUTSIDE}: {'; '.join(named[:MOST_NAMED])}{more}"] if named else []
        self = super().__new__(cls, names or dict.fromkeys(nearest(j.fingerprint) for j in judged))
        self.name, self._judged = name, judged
        return self

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """On each GEMM."""
        return tuple(j.verdict for j in self._judged)

    def gemm(self, gemm: str) -> SiteReport:
        """The same of one GEMM alone, "output", "grad_input" or "grad_weight".

        Warns where its operands are like no benchmarked distribution.

        Raises:
            UnknownNameError: There is no such, or none was seen.
        """
        found = [j for j in self._judged if j.verdict.gemm == gemm]
        if not found:
            known = dict.fromkeys(v.gemm for v in self.verdicts)
            raise UnknownNameError(
                f"{self.name} has no GEMM {gemm!r} that was seen; expected one of "
                f"{', '.join(known)}"
            )
        return SiteReport(self.name, found).warned()

    def warned(self) -> SiteReport:
        """Itself; warns where operands are like no benchmarked distribution.

        Verdicts do not depend on that.
        """
        if self[0].startswith(dispatcher.OUTSIDE):
            warnings.warn(
                f"{self.name} is like no benchmarked distribution, so dispatch by it chooses "
                "bfloat16's kernels; verdicts, and convert by the report, are of its own rows: "
                f"{self[0].removeprefix(dispatcher.OUTSIDE + ': ')}",
                stacklevel=3,
            )
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.name, self._judged


class ProbeReport:
    """Verdicts on the sites of a model.

    ``report["layers.3.mlp"]``, of a site or of all sites under a name, may be the ``distribution``
    of `dispatch` and `gemm`; so may ``report["layers.3.mlp"].gemm("output")``.

    Attributes:
        budget: The largest error that is safe.
        device: Whose times were compared; None: nobody's.
        unseen: What there is no verdict on, by name, and why; see `Probe.unseen`.
    """

    def __init__(
        self,
        judged: Sequence[Judged],
        budget: ErrorBudget,
        device: Device | str | None,
        unseen: Mapping[str, str] | None = None,
    ) -> None:
        self._judged, self.budget, self.unseen = tuple(judged), budget, dict(unseen or {})
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
        unseen: Mapping[str, str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> ProbeReport:
        """Replay every site and judge it.

        Without a GPU a site takes a second to half a minute: 15 s of 1500 columns on two cores.

        Args:
            sites: Their statistics, by name.
            budget: The largest error that is safe, see `lokakern.probe.verdicts`.
            device: Whose times count, such as "NVIDIA H200" of a shipped file; None: of the GPU
                here, of nobody where there is none. One that nobody has measured, such as "NVIDIA
                B200", has no times: see `lokakern.what_if.devices`.
            seeds: Of the samples of a weight's gradient. The first gives its error, the
                others its limit, and each is replayed, see `lokakern.probe.replay.replay`.
            database: Where the errors go as rows; None: nowhere.
            times: Also time here, into the database, what was not timed before.
            unseen: What there is no verdict on, by name, and why.
            dtype: Of operands and outputs that are replayed, ``torch.bfloat16`` or
                ``torch.float16``; None: float16 for sites whose outputs were, bfloat16 for others.
                `convert` takes verdicts for the dtype in which a layer multiplies.

        Raises:
            FormatError: ``dtype`` is another one.
            UnsupportedError: The budget limits what Probe does not measure, or there is no database
                for times, or another device's are asked for.
            DeviceError: The database does not know the device.
        """
        # They import the bench.
        from lokakern.probe.replay import LearnedSite, compile_ahead, replay, time_sites
        from lokakern.registry.snapshot.loading import load_snapshot
        from lokakern.registry.storage.paths import shipped_databases
        from lokakern.render.terminal import TerminalProgress

        if dtype is not None:
            if dtype not in HALF:
                raise FormatError(
                    f"ProbeReport: dtype is {dtype!r}; expected torch.bfloat16 or torch.float16"
                )
            sites = {name: statistics.in_dtype(dtype) for name, statistics in sites.items()}
        here = current_device()
        if times and (database is None or device not in (None, here, here.product)):
            raise UnsupportedError(
                f"ProbeReport: times are measured on {here.product}, into database=; device is "
                f"{device!r} and database {database!r}"
            )
        if device is None and (times or here.is_gpu):
            device = here
        judged = []
        learned = [LearnedSite(name, statistics) for name, statistics in sites.items()]
        with contextlib.ExitStack() as stack:
            shown = Progress() if is_shown() else TerminalProgress()
            stack.enter_context(shown)
            if times:  # those of the shipped files alone afterwards
                stack.callback(dispatcher.use_snapshot, None)
            if times and database is not None:
                time_sites(sites, database)
                dispatcher.use_snapshot(load_snapshot([*shipped_databases(), database]))
            formats: tuple[WhatIf, ...] = ()
            if isinstance(device, str):
                device, formats = _known(device)
            compile_ahead(learned)
            shown.begin("judging sites", len(learned))
            for site in learned:
                seen = site.statistics
                replayed = replay(site, seeds=seeds, database=database, formats=formats)
                for v in verdicts_of(site.name, seen, replayed, budget=budget, device=device):
                    print_ = fingerprint_of(seen, v.gemm)
                    judged.append(Judged(v, print_, seen.sizes.total()))
                shown.step(site.name)
        return cls(judged, budget_of(budget), device, unseen)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """On every GEMM, by site."""
        return tuple(j.verdict for j in self._judged)

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites."""
        return tuple(dict.fromkeys(v.site for v in self.verdicts))

    @property
    def dtypes(self) -> str:
        """The dtypes of products that were judged, such as "float16", or of sites of each."""
        return " and ".join(dict.fromkeys(v.dtype for v in self.verdicts)) or "bfloat16"

    def __repr__(self) -> str:
        words = [f"{len(self.verdicts)} GEMMs of {len(self.sites)} sites"]
        safeties = Counter(v.safety for v in self.verdicts)
        words += [f"{safeties[safety]} {safety}" for safety in SAFETIES if safeties[safety]]
        if self.device:
            wins = sum(v.is_worth_it for v in self.verdicts)
            is_timed = any(v.bf16_us for v in self.verdicts)
            words.append(f"{wins} worth it on {self.device}" if is_timed else NOT_TIMED)
        words += [f"{len(self.unseen)} without a verdict"] if self.unseen else []
        return f"ProbeReport({', '.join(words)}, within {self.budget}, in {self.dtypes})"

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __getitem__(self, name: str) -> SiteReport:
        """Results of a site, or of all whose names begin with this and a dot.

        Warns where operands are like no benchmarked distribution: dispatch chooses bfloat16's
        kernels then.

        Raises:
            UnknownNameError: There is none.
        """
        found = [j for j in self._judged if f"{j.verdict.site}.".startswith(f"{name}.")]
        if not found:
            raise UnknownNameError(
                f"no site {name!r} was seen; expected one of {', '.join(self.sites)}, or what "
                "their names begin with"
            )
        return SiteReport(name, found).warned()

    @property
    def saved_share(self) -> float | None:
        """Share of the time of all GEMMs in bfloat16 that the safe and fast ones save.

        Each counts as often as it was called. None where nothing was timed.
        """
        plain = sum(j.calls * (j.verdict.bf16_us or 0.0) for j in self._judged)
        saved = sum(j.calls * j.verdict.saved_us for j in self._judged)
        return saved / plain if plain else None

    def drift(self, sites: Mapping[str, SiteStatistics]) -> dict[str, str]:
        """Operands that moved, by ``site/gemm``, and how; warns of them, and replays nothing.

        Args:
            sites: New statistics, by name, as after `Probe.forget`.
        """
        found = {
            j.place: moved(j.fingerprint, fingerprint_of(sites[j.verdict.site], j.verdict.gemm))
            for j in self._judged
            if j.verdict.site in sites
        }
        found = {place: words for place, words in found.items() if words}
        if found:
            why = "; ".join(f"{place}: {words}" for place, words in found.items())
            warnings.warn(f"operands moved since they were judged: {why}", stacklevel=2)
        return found

    def fingerprints(self) -> dict[str, dict[str, Fingerprint]]:
        """Those of the operands that were judged, by site and GEMM."""
        found: dict[str, dict[str, Fingerprint]] = {}
        for j in self._judged:
            found.setdefault(j.verdict.site, {})[j.verdict.gemm] = j.fingerprint
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One row for each GEMM, with units in the names of columns."""
        return [
            {
                "site": v.site,
                "gemm": v.gemm,
                "m,n,k": ",".join(map(str, v.shape)),
                "verdict": f"{v.safety}, {v.speed or NOT_TIMED}",
                "scales": v.best or "-",
                **_numbers(asdict(v)),
                "unsafe": ", ".join(c.scales for c in v.classes if c.safety == "unsafe"),
                "change": v.change,
                "notes": "; ".join((*v.notes, *_seen(j.fingerprint))),
            }
            for j in self._judged
            for v in (j.verdict,)
        ]

    @property
    def summary(self) -> str:
        """How much time would be saved, or that no size was timed; "" without a measured device."""
        explain = f'`explain --probe FILE --training --device "{self.device}"`'
        if self.saved_share is None:
            if self.device not in {device.product for device in dispatcher.snapshot().devices}:
                return ""
            return f"{self.device}: none of these sizes was timed; {explain} predicts them"
        timed, every = (
            sum(j.calls * math.prod(j.verdict.shape) for j in some)
            for some in ([j for j in self._judged if j.verdict.bf16_us], self._judged)
        )
        which = "these GEMMs"
        rest = ""
        if timed < every:
            which = f"the GEMMs that were timed, {timed / every:.0%} of the FLOPs,"
            rest = f"; of the others {explain} predicts times"
        return (
            f"{self.saved_share:.1%} of the time of {which} in {self.dtypes} would be saved{rest}"
        )

    def table(self) -> None:
        """Print a table."""
        from lokakern.render.terminal import print_rows

        summary = self.summary
        where = ""
        if self.device and (self.saved_share is not None or not summary):
            where = f", {'no ' if self.saved_share is None else ''}times of {self.device}"
        unseen = [f"no verdict on {name}: {why}" for name, why in self.unseen.items()]
        note = "\n".join(line for line in (summary, *unseen) if line)
        print_rows(
            self.rows(), "table", title=f"within {self.budget}, in {self.dtypes}{where}", note=note
        )

    def to_json(self) -> str:
        """Everything as JSON; what is infinite or no number as null."""
        return json.dumps(self.content(), indent=2, allow_nan=False)

    def content(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        content = {
            "format": "lokakern.probe.report",
            "version": VERSION,
            "budget": self.budget.limits,
            "device": self.device,
            "dtypes": self.dtypes,
            "saved_share": self.saved_share,
            "summary": self.summary,
            "unseen": self.unseen,
            "verdicts": [
                {
                    **asdict(j.verdict),
                    "calls": j.calls,
                    "saved_us": j.verdict.saved_us,
                    "fingerprint": j.fingerprint,
                    "outside": outside(j.fingerprint),
                }
                for j in self._judged
            ],
        }
        # msgspec writes numbers that are not finite as null.
        return msgspec.json.decode(msgspec.json.encode(content))  # type: ignore[no-any-return]

    def save_page(self, path: str | Path) -> None:
        """Write everything as one HTML file, which needs nothing else.

        Raises:
            OSError: It cannot be written.
        """
        Path(path).write_text(page_of(self.content()), encoding="utf-8")


def _seen(fingerprint: Fingerprint) -> list[str]:
    """What a reader may miss in the errors of operands: they are those of its own rows."""
    words = unusual(fingerprint)
    return [f"seen: {words}; judged on its own rows"] if words else []


def _known(device: str) -> tuple[Device, tuple[WhatIf, ...]]:
    """The device of a database, or one that nobody has measured, and formats to emulate for it.

    Raises:
        DeviceError: Neither is of that name.
    """
    try:
        return dispatcher.device_named(device), ()
    except DeviceError:
        absent = device_named(device)
        if absent is None:
            raise
        return absent, formats_of(absent)


def page_of(content: Mapping[str, Any]) -> str:
    """HTML of what `ProbeReport.content` gives, or of its JSON read back.

    Names of sites, kernels and files may be hostile: all are escaped, and the page loads nothing
    from elsewhere.
    """
    from lokakern.render.html import rendered

    verdicts = [
        {
            **v,
            "numbers": [*_numbers(v).values(), v["saved_us"] or None],
            "speed": v["speed"] or NOT_TIMED,
        }
        for v in content["verdicts"]
    ]
    counts = Counter(v["safety"] for v in verdicts)
    return rendered(
        Path(__file__).with_name("page.html"),
        report=content,
        verdicts=verdicts,
        counts=[(safety, counts[safety]) for safety in SAFETIES],
        gemms=list(dict.fromkeys(v["gemm"] for v in verdicts)),
        safeties=SAFETIES,
        speeds=(*SPEEDS, NOT_TIMED),
    )


def _numbers(verdict: Mapping[str, Any]) -> dict[str, float | None]:
    """Error and time of the scales to take, beside bfloat16's; of none, the smallest error."""
    best = next((c for c in verdict["classes"] if c["scales"] == verdict["best"]), None)
    errors = [c["row_err"] for c in verdict["classes"] if c["row_err"] is not None]
    return {
        "row_err": best["row_err"] if best else min(errors, default=None),
        "bf16_err": verdict["bf16_err"],
        "us": best["latency_us"] if best else None,
        "bf16_us": verdict["bf16_us"],
    }
