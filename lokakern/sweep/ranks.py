"""Ranks of one sweep, started by torchrun, which share only the store of torch.distributed.

Each rank has its own GPU and run file. The first rank that asks makes the plan; all ranks take
shares of it, large ones first, until none is left. A rank whose heartbeat stops counts as dead, and
another rank repeats its unfinished shares. There is no process group and no barrier, so that ranks
may end at any time, on one host or several.
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
PATIENCE_S = 30.0  # longest gap between heartbeats: loading a database may hold the GIL for seconds
POLL_S = 0.2
# In each round a rank takes this part of the remaining work per rank. Operands of a share are
# sampled together, so that shares are long at first and short at the end.
SHARE = 0.5
LEAST_SHARES = 2  # shares of each rank in a short plan


class Store(Protocol):
    """The methods of a store of torch.distributed that are used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True)
class Share:
    """A range of places of a plan, and a function to call with their results."""

    places: range
    done: Callable[[Any], None]


class SingleRank:
    """The ranks of a sweep in one process, which does all work."""

    rank, world = 0, 1

    def __enter__(self) -> SingleRank:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the heartbeat, if any."""

    def agree(self, _facts: dict[str, Any]) -> None:
        """Check that all ranks sweep the same."""

    def plan(self, _name: str, make: Callable[[], Any]) -> Any:
        """A JSON value that one rank makes for all ranks."""
        return make()

    def once(self, _name: str, do: Callable[[], object]) -> None:
        """Call a function on one rank of each host; other ranks of the host wait."""
        do()

    def shares(
        self, name: str, costs: Sequence[float], waiting: Callable[[int], None]
    ) -> Iterator[Share]:
        """The shares of this rank; it has to call `Share.done` before it takes the next one.

        Args:
            name: Name of the plan.
            costs: Cost of each place of the plan, in any unit.
            waiting: Called with the steps of all ranks, while this rank waits for others.
        """
        self._results: list[Any] = []
        self._steps = 0
        if costs:
            yield Share(range(len(costs)), self._results.append)

    def step(self, _name: str) -> int:
        """Count a step of this rank; returns the steps of all ranks."""
        self._steps += 1
        return self._steps

    def results(self, _name: str) -> list[Any]:
        """Arguments of `Share.done` from all ranks, once all shares of a plan are done."""
        return self._results

    def gather(self, _name: str, value: Any) -> list[Any] | None:
        """Values of all live ranks on rank 0; None on other ranks."""
        return [value]


class RankGroup(SingleRank):
    """Several ranks that share a sweep; the heartbeat runs inside the context manager.

    Args:
        store: The store of torch.distributed.
        rank: This rank.
        world: Number of ranks.
        host: Name of this host, whose ranks share compiled kernels.
        patience_s: Longest gap between heartbeats, in seconds; then a rank counts as dead.
        clock: Clock for that gap, in seconds.
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

    def __enter__(self) -> RankGroup:
        self._heart.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopped.set()
        self._heart.join(timeout=2 * BEAT_S)  # a lost host may block it for minutes
        if any(map(_is_of_the_store, raised)):
            raise MeasurementError(
                f"rank {self.rank} lost the store that all ranks share ({raised[1]}); its "
                "measurements are in run files beside the database: sweep again to go on"
            ) from None

    def _beat(self) -> None:
        while not self._stopped.is_set():
            try:
                self._store.add(f"beat/{self.rank}", 1)
            except RuntimeError:  # the main thread gets the same error
                return
            self._stopped.wait(min(BEAT_S, self._patience_s / 4))

    def _is_dead(self, rank: int) -> bool:
        beats, now = self._store.add(f"beat/{rank}", 0), self._clock()
        before, since = self._seen.get(rank, (-1, now))
        if beats != before:
            self._seen[rank] = (beats, now)
            return False
        return now - since > self._patience_s

    # Call `check` before `get`: a client of the store runs one request at a time, and `get` would
    # block the heartbeat.
    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key))

    def _write(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _is_there(self, key: str) -> bool:
        return self._store.check([key])

    def _is_ours(self, key: str) -> bool:
        """Whether this rank owns a key, as the first rank or because the owner is dead."""
        mine = str(self.rank)
        owner = self._store.compare_set(key, "", mine).decode()
        if owner != mine and self._is_dead(int(owner)):
            owner = self._store.compare_set(key, owner, mine).decode()
        return owner == mine

    def agree(self, facts: dict[str, Any]) -> None:
        """Check that all ranks sweep the same.

        Raises:
            MeasurementError: A fact differs from that of the planning rank.
        """
        others: dict[str, Any] = self.plan("facts", lambda: facts)
        differ = [name for name in facts if facts[name] != others.get(name)]
        if differ:
            name = differ[0]
            raise MeasurementError(
                f"rank {self.rank} on {self._host} has another {name} than the rank that plans: "
                f"{facts[name]!r}, not {others.get(name)!r}; a sweep needs one GPU type, a GPU for "
                "each rank, and the same software on all hosts"
            )

    def plan(self, name: str, make: Callable[[], Any]) -> Any:
        while not self._is_there(f"plan/{name}"):
            if self._is_ours(f"planner/{name}"):
                made = json.dumps(make())
                # A slow planner that was taken for dead must not replace a plan in use.
                self._store.compare_set(f"plan/{name}", "", made)
            else:
                time.sleep(POLL_S)
        return self._read(f"plan/{name}")

    def once(self, name: str, do: Callable[[], object]) -> None:
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
                if self._is_ours(f"owner/{name}/{place}"):  # its owner is dead
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
    """Consecutive shares of a plan, with decreasing costs.

    All ranks compute the same shares, so that one counter in the store distributes them.
    """
    left = list(itertools.accumulate(reversed(costs), initial=0.0))[::-1]  # cost from each place on
    shares: list[range] = []
    first = 0
    least = max(1, len(costs) // (64 * world))
    while first < len(costs):
        # Each round has one share for each rank, all with the same cost.
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
    """Whether an exception comes from the store itself."""
    from torch import distributed

    return distributed.is_available() and isinstance(error, distributed.DistError)


def ranks_of_torchrun() -> RankGroup | SingleRank:
    """The ranks that torchrun's environment variables describe; a single rank without them.

    Raises:
        MeasurementError: The other ranks cannot be reached.
    """
    if number("WORLD_SIZE", 1) < 2:
        return SingleRank()
    from torch import distributed

    if not distributed.is_available():
        raise MeasurementError(
            "WORLD_SIZE is set, but this torch has no torch.distributed; start the sweep without "
            "torchrun"
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
    return RankGroup(found.PrefixStore("lokakern", store), rank, world, patience_s=patience_s)


def take_gpu() -> None:
    """Make only the GPU of this rank visible to this process and its children.

    Must run before CUDA starts, which reads the variable once. So this does not check that the GPU
    exists: `RankGroup.agree` finds a rank without a GPU.

    Raises:
        MeasurementError: This host has more ranks than visible GPUs.
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
