"""Ranks that share one sweep: torchrun starts them, torch.distributed's store is all they share.

Each has a GPU and a run file of its own. One of them plans, whoever comes first; all take shares of
the plan, large ones first, until none is left. A rank whose heart stands still is dead: what it had
taken and not finished is taken by another. There is no process group and nobody to wait for: a
store that answers is enough, on one host or several.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from lokakern.errors import MeasurementError
from lokakern.torchrun import number

BEAT_S = 2.0
PATIENCE_S = 30.0  # for a heart: loading a database may keep the interpreter for seconds
POLL_S = 0.2
# The first share of each rank is this much of what would be its own, and so is each share of what
# is left then. Operands of a share are drawn together, so it is not short at first; the last are.
SHARE = 0.5
LEAST_SHARES = 2  # of a rank, however short the plan is


class Store(Protocol):
    """What is asked of a store of torch.distributed."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True)
class Share:
    """Some of a plan: places in it, and what to call when they are done."""

    places: range
    done: Callable[[Any], None]


class Alone:
    """The crew of a sweep in one process: everything is its own."""

    rank, world = 0, 1

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        """The others need not wait for it any more."""

    def agree(self, _facts: dict[str, Any]) -> None:
        """See that all ranks sweep the same."""

    def plan(self, _name: str, make: Callable[[], Any]) -> Any:
        """What one of the ranks makes, JSON, for all of them."""
        return make()

    def once(self, _name: str, do: Callable[[], None]) -> None:
        """Do something on one rank of each host, while its others wait."""
        do()

    def shares(
        self, name: str, costs: Sequence[float], waiting: Callable[[int], None]
    ) -> Iterator[Share]:
        """What this rank is to do of a plan, and has to call `Share.done` for, one at a time.

        Args:
            name: Of the plan.
            costs: What each of its places costs, in any unit.
            waiting: Called with how much all have done, while others work.
        """
        self._results: list[Any] = []
        self._steps = 0
        if costs:
            yield Share(range(len(costs)), self._results.append)

    def step(self, _name: str) -> int:
        """Count a step of this rank; how many all have done."""
        self._steps += 1
        return self._steps

    def results(self, _name: str) -> list[Any]:
        """What `Share.done` was given, everywhere, when all shares of a plan are done."""
        return self._results

    def gather(self, _name: str, value: Any) -> list[Any] | None:
        """Values of all living ranks, on the first one; None elsewhere."""
        return [value]


class Crew(Alone):
    """See the module. Used as a context manager: inside it the rank is alive to the others.

    Args:
        store: Shared by the ranks.
        rank: This one, from 0.
        world: How many there are.
        host: Where this one is; ranks of a host share compiled kernels.
        patience_s: Silence after which another rank is dead, in seconds.
        clock: What the silence of others is measured by, in seconds.
    """

    def __init__(
        self, store: Store, rank: int, world: int, *, host: str = "",
        patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.rank, self.world = rank, world
        self._store, self._host = store, host or socket.gethostname()
        self._patience_s, self._clock = patience_s, clock
        self._seen: dict[int, tuple[int, float]] = {}
        self._stopped = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Crew:
        self._heart.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopped.set()
        self._heart.join(timeout=2 * BEAT_S)  # a store whose host is gone may keep it for minutes
        if any(map(_is_of_the_store, raised)):
            raise MeasurementError(
                f"rank {self.rank} lost the store that all ranks share ({raised[1]}); what was "
                "measured is in run files beside the database: sweep again to go on"
            ) from None

    def _beat(self) -> None:
        while not self._stopped.is_set():
            try:
                self._store.add(f"beat/{self.rank}", 1)
            except RuntimeError:  # the main thread will meet it too, and says so
                return
            self._stopped.wait(min(BEAT_S, self._patience_s / 4))

    def _is_dead(self, rank: int) -> bool:
        beats, now = self._store.add(f"beat/{rank}", 0), self._clock()
        before, since = self._seen.get(rank, (-1, now))
        if beats != before:
            self._seen[rank] = (beats, now)
            return False
        return now - since > self._patience_s

    # Never `get` before `check`: a store's client does one thing at a time, and the heart is one of
    # its users.
    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key))

    def _write(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _is_there(self, key: str) -> bool:
        return self._store.check([key])

    def _is_ours(self, key: str) -> bool:
        """Whether something is this rank's to do, because it came first or its owner is dead."""
        mine = str(self.rank)
        owner = self._store.compare_set(key, "", mine).decode()
        if owner != mine and self._is_dead(int(owner)):
            owner = self._store.compare_set(key, owner, mine).decode()
        return owner == mine

    def agree(self, facts: dict[str, Any]) -> None:
        """See that all ranks sweep the same.

        Raises:
            MeasurementError: Another rank says otherwise.
        """
        others: dict[str, Any] = self.plan("facts", lambda: facts)
        differ = [name for name in facts if facts[name] != others.get(name)]
        if differ:
            name = differ[0]
            raise MeasurementError(
                f"rank {self.rank} on {self._host} has another {name} than the rank that plans: "
                f"{facts[name]!r}, not {others.get(name)!r}; a sweep is of one GPU type, a GPU for "
                "each rank, with the same software everywhere"
            )

    def plan(self, name: str, make: Callable[[], Any]) -> Any:
        while not self._is_there(f"plan/{name}"):
            if self._is_ours(f"planner/{name}"):
                made = json.dumps(make())
                # Whoever was taken for dead and was not must not change what others use already.
                self._store.compare_set(f"plan/{name}", "", made)
            else:
                time.sleep(POLL_S)
        return self._read(f"plan/{name}")

    def once(self, name: str, do: Callable[[], None]) -> None:
        def doing() -> bool:
            do()
            return True

        self.plan(f"{name}/{self._host}", doing)

    def shares(
        self, name: str, costs: Sequence[float], waiting: Callable[[int], None]
    ) -> Iterator[Share]:
        every = share_out(costs, self.world)
        while (place := self._store.add(f"taken/{name}", 1) - 1) < len(every):
            if self._is_ours(f"owner/{name}/{place}"):
                yield self._share(name, place, every[place])
        left = set(range(len(every)))
        while left:
            left = {place for place in left if not self._is_there(f"done/{name}/{place}")}
            for place in sorted(left):
                if self._is_ours(f"owner/{name}/{place}"):  # whoever had it is dead
                    yield self._share(name, place, every[place])
                    break
            else:
                waiting(self._store.add(f"steps/{name}", 0))
                time.sleep(POLL_S)

    def _share(self, name: str, place: int, places: range) -> Share:
        return Share(places, lambda value: self._write(f"done/{name}/{place}", value))

    def step(self, name: str) -> int:
        return self._store.add(f"steps/{name}", 1)

    def results(self, name: str) -> list[Any]:
        places = itertools.takewhile(
            self._is_there, (f"done/{name}/{n}" for n in itertools.count())
        )
        return [self._read(place) for place in places]

    def gather(self, name: str, value: Any) -> list[Any] | None:
        self._write(f"{name}/{self.rank}", value)
        if self.rank:
            return None
        keys = {rank: f"{name}/{rank}" for rank in range(self.world)}
        waited = dict(keys)
        while waited := {
            rank: key
            for rank, key in waited.items()
            if not self._is_there(key) and not self._is_dead(rank)
        }:
            time.sleep(POLL_S)
        return [self._read(key) for key in keys.values() if self._is_there(key)]


def share_out(costs: Sequence[float], world: int) -> list[range]:
    """Places of a plan in shares, in their order: of equal costs at first, then ever smaller ones.

    Every rank cuts alike, so that one counter in the store is all it takes to hand them out.
    """
    left = list(itertools.accumulate(reversed(costs), initial=0.0))[::-1]  # from each place on
    shares: list[range] = []
    first = 0
    least = max(1, len(costs) // (64 * world))
    while first < len(costs):
        # A round is as many shares as there are ranks, all of the same size.
        part = left[first] * SHARE / world if len(costs) > LEAST_SHARES * world else 0.0
        for _ in range(world):
            last, end = first, left[first] - part
            while last < len(costs) and (last < first + least or left[last + 1] >= end):
                last += 1
            if last > first:
                shares.append(range(first, last))
            first = last
    return shares


def _is_of_the_store(error: object) -> bool:
    """Whether a store said it, rather than what was done with its answers."""
    from torch import distributed

    return distributed.is_available() and isinstance(error, distributed.DistError)


def crew_of_torchrun() -> Crew | Alone:
    """The crew that torchrun's environment variables tell of; alone without them.

    Raises:
        MeasurementError: The others cannot be reached.
    """
    if number("WORLD_SIZE", 1) < 2:
        return Alone()
    from torch import distributed

    if not distributed.is_available():
        raise MeasurementError(
            "WORLD_SIZE is set, and this torch has no torch.distributed; start the sweep alone"
        )
    found: Any = distributed  # its stubs do not export what its documentation names
    try:
        store, rank, world = next(found.rendezvous("env://", timeout=timedelta(minutes=5)))
    except Exception as error:
        raise MeasurementError(
            f"the other ranks cannot be reached: {error}; start the sweep with torchrun "
            "--nproc-per-node N -m lokakern.bench sweep"
        ) from error
    patience_s = number("LOKAKERN_CREW_PATIENCE_S", PATIENCE_S)
    return Crew(found.PrefixStore("lokakern", store), rank, world, patience_s=patience_s)


def take_gpu() -> None:
    """Leave this process, and those it starts, the GPU of its rank on this host.

    Before anything asks for a GPU, because what is visible is read once; so nobody looks here
    whether there is one: `Crew.agree` finds a rank that got none.

    Raises:
        MeasurementError: There are more ranks here than GPUs that this job may use.
    """
    if number("LOCAL_WORLD_SIZE", 1) < 2:
        return
    import torch

    rank = int(number("LOCAL_RANK", 0))
    name = "CUDA_VISIBLE_DEVICES"
    if torch.version.hip is not None and (
        os.environ.get("HIP_VISIBLE_DEVICES") or not os.environ.get(name)
    ):
        name = "HIP_VISIBLE_DEVICES"  # ROCm reads both
    given = [word.strip() for word in os.environ.get(name, "").split(",") if word.strip()]
    if given and rank >= len(given):
        raise MeasurementError(
            f"rank {rank} of this host has no GPU of its own: {name} is {','.join(given)}; start "
            f"at most --nproc-per-node {len(given)}"
        )
    os.environ[name] = given[rank] if given else str(rank)
