"""Frozen choices: the content of a file that `lokakern.freeze` wrote."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lokakern.device import devices_here
from lokakern.errors import DeviceError
from lokakern.selection.frozen.answers import HeldAnswer
from lokakern.selection.table import FrozenTable, Origin, Table
from lokakern.types import Device, ErrorBudget, Format, Granularity, Problem, alignment_of

logger = logging.getLogger("lokakern")


class Weight(NamedTuple):
    """The arguments of `prepare_weight` without the values of the weight."""

    n: int
    k: int
    format: Format
    budget: ErrorBudget
    distributions: tuple[str, ...]
    least_m: int
    largest_m: int


class Key(NamedTuple):
    """The question that a table answers."""

    problem: Problem  # with m = 0
    m_alignment: int
    budget: ErrorBudget | None
    distributions: tuple[str, ...]
    regime: str
    needs: frozenset[str]

    @classmethod
    def of(cls, table: Table) -> Key:
        return cls(
            replace(table.problem, m=0), table.m_alignment, table.budget, table.distributions,
            table.regime, table.needs,
        )  # fmt: skip


@dataclass(eq=False)
class Choices:
    """The content of a file.

    Attributes:
        origin: The file.
        digest: SHA-256, in hex, of its content.
        device: The device of the choices.
    """

    origin: Origin
    digest: str
    device: Device
    _tables: dict[Key, FrozenTable]
    _forms: dict[Weight, Granularity]
    _kernels: Collection[str] = ()
    _answers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set, init=False)

    def __str__(self) -> str:
        return f"frozen choices {self.digest}"

    @property
    def tables(self) -> list[FrozenTable]:
        return list(self._tables.values())

    def table(
        self,
        problem: Problem,
        budget: ErrorBudget | None,
        distributions: tuple[str, ...],
        device: Device,
        regime: str,
        needs: frozenset[str],
    ) -> Table:
        """The frozen table, or one without candidates, which chooses the unquantized kernel."""
        unit = alignment_of(problem.m)
        key = Key(replace(problem, m=0), unit, budget, distributions, regime, needs)
        found = self._tables.get(key) if device == self.device else None
        if found is not None:
            return found
        local = device in devices_here()
        return Table(problem, device, budget, distributions, regime, local,
                     needs=needs, origin=self.origin)  # fmt: skip

    def tell(self, table: Table) -> None:
        """Log, once for each family of problems, that a table is not in the file.

        Only for ops without an unquantized kernel; other misses are logged by `selection.misses`.
        """
        if table.baseline is None and not isinstance(table, FrozenTable) and table.callable_here:
            self._tell(str(replace(table.problem, m=0)), table.winners[0] or "no kernel")

    def _tell(self, family: str, instead: str) -> None:
        if family not in self._told:
            self._told.add(family)
            words = "%s: not among the choices of %s; using %s. To mend it, %s"
            logger.warning(words, family, self.origin, instead, self.origin.remedy)

    def form(self, asked: Weight, device: Device) -> Granularity:
        """The scaling of a prepared weight; NONE, which leaves it unquantized, if unknown."""
        found = self._forms.get(asked) if device == self.device else None
        if found is None:
            sizes = f"n={asked.n} k={asked.k} m={asked.least_m} to {asked.largest_m}"
            family = f"prepare_weight {sizes} {asked.format} within {asked.budget}"
            self._tell(family, "the weight as it is")
        return found or Granularity.NONE

    def answer(self, asked: str, device: Device) -> HeldAnswer | None:
        """The answer to a question of `answers.question`; None if the file has none."""
        found = self._answers.get(asked) if device == self.device else None
        if found is None:
            return None
        return HeldAnswer(found, frozenset(self._kernels), str(self.origin))

    def find_device(self, name: str) -> Device:
        """The device of the file, if it has this product name.

        Raises:
            DeviceError: It has another.
        """
        if _plain(name) != _plain(self.device.product):
            raise DeviceError(
                f"device is {name!r}, and answers are those of {self.origin}, for "
                f"{self.device.product!r}; unset LOKAKERN_CHOICES to ask the database"
            )
        return self.device


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
