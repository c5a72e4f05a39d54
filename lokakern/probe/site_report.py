"""`SiteReport`: what was found of a site, as something to dispatch by."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lokakern.errors import UnknownNameError
from lokakern.probe.fingerprint import Fingerprint, nearest, outside
from lokakern.probe.site import GEMMS
from lokakern.probe.verdicts import Verdict
from lokakern.selection.dispatcher import OUTSIDE

MOST_NAMED = 3  # outlying GEMMs whose reasons stand in the name of a distribution


@dataclass(frozen=True, slots=True)
class Judged:
    """One GEMM of a site.

    Attributes:
        verdict: On it.
        fingerprint: What its operands look like.
        evidence: What was seen of them, with units in the names; see `lokakern.probe.evidence`.
        calls: How often it came, all steps and ranks together.
    """

    verdict: Verdict
    fingerprint: Fingerprint
    evidence: dict[str, Any]
    calls: int

    @property
    def place(self) -> str:
        """Site and GEMM."""
        return f"{self.verdict.site}/{self.verdict.gemm}"


class SiteReport(Sequence[str]):
    """What was found of one site, or of all under a name: names of distributions to dispatch by.

    A sequence of names, as `dispatch` takes it: the benchmarked distributions that the GEMMs are
    nearest to, or one that begins with `OUTSIDE` and says why, where one is like none of them.

    Attributes:
        name: Of the site, or what the names of several begin with.
        verdicts: On each GEMM.
        outside: By GEMM, what of it is like no benchmarked distribution; empty where all are.
    """

    def __init__(self, name: str, judged: Sequence[Judged]) -> None:
        self.name, self._judged = name, tuple(judged)
        self.verdicts = tuple(j.verdict for j in judged)
        found = {j.place: outside(j.fingerprint) for j in judged}
        self.outside = {place: words for place, words in found.items() if words}
        self._names: tuple[str, ...]
        if self.outside:
            self._names = (f"{OUTSIDE}: {self.why_outside}",)
        else:
            self._names = tuple(dict.fromkeys(nearest(j.fingerprint) for j in judged))

    @property
    def why_outside(self) -> str:
        """In one line; "" where it is like something that was benchmarked."""
        named = [f"{place}: {words}" for place, words in self.outside.items()]
        more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        return "; ".join(named[:MOST_NAMED]) + more

    def gemm(self, gemm: str) -> SiteReport:
        """The same of one GEMM alone, "output", "grad_input" or "grad_weight".

        Warns where its operands are like no benchmarked distribution.

        Raises:
            UnknownNameError: There is no such, or none was seen.
        """
        found = [j for j in self._judged if j.verdict.gemm == gemm]
        if gemm not in GEMMS or not found:
            known = dict.fromkeys(j.verdict.gemm for j in self._judged)
            raise UnknownNameError(
                f"{self.name} has no GEMM {gemm!r} that was seen; expected one of "
                f"{', '.join(known)}"
            )
        return SiteReport(self.name, found).warned()

    def warned(self) -> SiteReport:
        """Itself; warns where operands are like no benchmarked distribution."""
        if self.outside:
            warnings.warn(
                f"{self.name} is like no benchmarked distribution, so its kernels are bfloat16's: "
                f"{self.why_outside}",
                stacklevel=3,
            )
        return self

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
