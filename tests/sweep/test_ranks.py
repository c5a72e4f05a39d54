"""Ranks that share a sweep do each task once, and lose nothing when one of them dies."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from lokakern.errors import MeasurementError
from lokakern.sweep.ranks import RankGroup, SingleRank, ranks_of_torchrun, share_out, take_gpu
from lokakern.torchrun import cores_of_rank

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 1.0  # of a clock that the tests move
ENDLESS_S = 1800  # ends what would wait for ever


@given(
    st.lists(st.floats(0.01, 100), max_size=300),
    st.integers(2, 9),
)
def test_shares_cover_all_places_in_order(costs: list[float], world: int) -> None:
    shares = share_out(costs, world)
    assert [place for share in shares for place in share] == list(range(len(costs)))
    assert all(shares)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_shares_begin_large_and_end_small(world: int) -> None:
    shares = share_out([1.0] * 2000, world)
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(0.5 * 2000 / world, abs=1)
    assert sizes[-1] <= 2000 / (32 * world)
    assert len(sizes) <= 12 * world


def test_costs_determine_the_size_of_shares() -> None:
    costs = [10.0] * 50 + [1.0] * 50
    first, second, *_ = share_out(costs, 2)
    assert sum(costs[p] for p in first) == pytest.approx(sum(costs[p] for p in second), abs=11)


@pytest.fixture
def groups() -> Iterator[Callable[..., list[RankGroup]]]:
    """Ranks with a store of torch.distributed, each a client of its own.

    By default time stands still, and nobody is taken for dead however busy the machine is.
    """
    first = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(
        world: int, hosts: str = "", clock: Callable[[], float] = lambda: 0.0
    ) -> list[RankGroup]:
        return [
            RankGroup(
                distributed.TCPStore("127.0.0.1", first.port, wait_for_workers=False),
                rank, world, host=hosts[rank : rank + 1] or "a", patience_s=PATIENCE_S, clock=clock,
            )
            for rank in range(world)
        ]  # fmt: skip

    yield make


def together(groups: list[RankGroup], work: Callable[[RankGroup], Any]) -> list[Any]:
    def inside(ranks: RankGroup) -> Any:
        with ranks:
            return work(ranks)

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(inside, groups))


def test_every_task_is_done_once(groups: Callable[..., list[RankGroup]]) -> None:
    done: list[int] = []
    heard: list[int] = []

    def work(ranks: RankGroup) -> list[Any]:
        for share in ranks.shares("times", [1.0] * 100, heard.append):
            for place in share.places:
                time.sleep(0.001 * (1 + ranks.rank))  # one is slower
                done.append(place)
                ranks.step("times")
            share.done(list(share.places))
        return ranks.results("times")

    every = together(groups(3), work)
    assert sorted(done) == list(range(100))
    assert all(sorted(itertools.chain(*results)) == list(range(100)) for results in every)
    assert all(0 < count <= 100 for count in heard)


def test_one_rank_plans_for_all_and_each_host_prebuilds_once(
    groups: Callable[..., list[RankGroup]],
) -> None:
    planned: list[int] = []
    prepared: list[str] = []

    def work(ranks: RankGroup) -> Any:
        def plan() -> dict[str, Any]:
            planned.append(ranks.rank)
            time.sleep(0.2)
            return {"by": ranks.rank, "todo": [1, 2]}

        ranks.agree({"device": "NVIDIA H200"})
        found = ranks.plan("times", plan)
        ranks.once("prebuild", lambda: prepared.append(ranks._host))
        return found, ranks.gather("report", ranks.rank)

    every = together(groups(4, "aabb"), work)
    assert len(planned) == 1 and sorted(prepared) == ["a", "b"]
    assert all(found == {"by": planned[0], "todo": [1, 2]} for found, _ in every)
    assert [gathered for _, gathered in every] == [[0, 1, 2, 3], None, None, None]


def test_another_rank_repeats_the_shares_of_a_dead_one(
    groups: Callable[..., list[RankGroup]],
) -> None:
    now_s = 0.0
    living, dead = groups(2, clock=lambda: now_s)
    done: dict[int, float] = {}
    waited: list[int] = []

    def waiting(_count: int) -> None:
        nonlocal now_s
        waited.append(len(done))
        now_s += 0.25 * PATIENCE_S

    with dead:
        taken = next(dead.shares("times", [1.0] * 40, lambda _: None))
        assert taken.places
    dead._heart.join()  # it stands still, and the share was never done
    with living:
        for share in living.shares("times", [1.0] * 40, waiting):
            done |= dict.fromkeys(share.places, now_s)
            share.done(list(share.places))
        assert sorted(done) == list(range(40))
        assert {done[place] for place in taken.places} == {1.25 * PATIENCE_S}
        assert {at for place, at in done.items() if place not in taken.places} == {0.0}
        assert waited[:5] == [40 - len(taken.places)] * 5
        now_s += PATIENCE_S
        assert living.gather("report", "me") == ["me"]


def test_another_rank_plans_after_the_planner_died(groups: Callable[..., list[RankGroup]]) -> None:
    ticks = itertools.count()
    living, dead = groups(2, clock=lambda: 0.4 * PATIENCE_S * next(ticks))

    def die() -> None:
        raise RuntimeError("killed")

    with dead, pytest.raises(RuntimeError):
        dead.plan("times", die)
    dead._heart.join()
    with living:
        assert living.plan("times", lambda: [7]) == [7]
    assert next(ticks) == 4, "0.4, 0.8 and 1.2 of its patience after the first look"


def test_a_slow_rank_does_not_count_as_dead(groups: Callable[..., list[RankGroup]]) -> None:
    """More than its patience passes while it works, and less between two beats of its heart."""
    now_s, beats = 0.0, 0
    (watch,) = groups(1)

    def clock() -> float:
        nonlocal now_s, beats
        while (heard := watch._store.add("beat/1", 0)) == beats:
            time.sleep(0.01)
        beats, now_s = heard, now_s + 0.9 * PATIENCE_S
        return now_s

    quick, slow = groups(2, clock=clock)
    done: dict[int, list[int]] = {0: [], 1: []}
    with slow:
        share = next(shares := slow.shares("times", [1.0] * 4, lambda _: None))

        def waiting(count: int) -> None:
            if now_s > 4 * PATIENCE_S and not done[1]:
                done[1] += share.places
                share.done(None)

        with quick:
            for other in quick.shares("times", [1.0] * 4, waiting):
                done[0] += other.places
                other.done(None)
        assert list(shares) == []
    assert now_s > 4 * PATIENCE_S
    assert done[1] == list(share.places) and sorted(done[0] + done[1]) == [0, 1, 2, 3]


def test_ranks_with_different_facts_raise(groups: Callable[..., list[RankGroup]]) -> None:
    def work(ranks: RankGroup) -> str:
        try:
            ranks.agree({"regime": "eager", "device": f"GPU {ranks.rank}"})
        except MeasurementError as error:
            return str(error)
        return ""

    first, second = together(groups(2), work)
    assert sorted((first == "", second == "")) == [False, True]
    assert "another device than the rank that plans" in first + second


def test_a_single_rank_does_all_work() -> None:
    with SingleRank() as ranks:
        ranks.agree({})
        assert ranks.plan("times", lambda: [3]) == [3]
        (share,) = ranks.shares("times", [1.0, 2.0], lambda _: None)
        assert list(share.places) == [0, 1]
        assert ranks.step("times") == 1
        share.done("result")
        assert ranks.results("times") == ["result"]
        assert list(ranks.shares("errors", [], lambda _: None)) == []
        assert ranks.gather("report", 5) == [5]


def test_torchrun_variables_define_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert type(ranks_of_torchrun()) is SingleRank
    for name, value in {"WORLD_SIZE": "2", "RANK": "x", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeasurementError, match=r"cannot be reached.*torchrun"):
        ranks_of_torchrun()


def test_a_slow_planner_does_not_replace_a_plan_in_use(
    groups: Callable[..., list[RankGroup]],
) -> None:
    first, second = groups(2)

    def slow() -> list[int]:  # meanwhile the other plans
        second._store.compare_set("plan/times", "", "[7]")
        return [1, 2]

    with first, second:
        assert first.plan("times", slow) == [7]
        assert second.plan("times", list) == [7]


@pytest.mark.parametrize(("given", "taken"), [("", "1"), ("4,7", "7"), ("GPU-a, GPU-b", "GPU-b")])
def test_a_rank_takes_its_gpu(given: str, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    take_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == given  # alone: all of them
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    take_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == taken
    assert cores_of_rank() >= 1


@pytest.mark.parametrize(
    ("cuda", "hip", "taken"),
    [
        ("", "", {"HIP_VISIBLE_DEVICES": "1"}),
        ("4,7", "", {"CUDA_VISIBLE_DEVICES": "7"}),
        ("4,7", "2,3", {"CUDA_VISIBLE_DEVICES": "4,7", "HIP_VISIBLE_DEVICES": "3"}),
    ],
)
def test_a_rank_takes_its_amd_gpu(
    cuda: str, hip: str, taken: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.hip", "7.0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for name, value in {"CUDA_VISIBLE_DEVICES": cuda, "HIP_VISIBLE_DEVICES": hip}.items():
        monkeypatch.setenv(name, value)
    take_gpu()
    assert {name: os.environ[name] for name in taken} == taken


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_environment_variables_must_be_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    take_gpu()
    assert type(ranks_of_torchrun()) is SingleRank
    monkeypatch.setenv(name, "two")
    with pytest.raises(MeasurementError, match=f"{name} is 'two'; expected a number"):
        (ranks_of_torchrun if name == "WORLD_SIZE" else take_gpu)()


def test_a_lost_store_raises_with_a_remedy(groups: Callable[..., list[RankGroup]]) -> None:
    (ranks,) = groups(1)

    def lost(*_: object) -> None:
        raise distributed.DistNetworkError("connection reset")

    with pytest.raises(MeasurementError, match=r"lost the store.*sweep again"), ranks:
        ranks._store = SimpleNamespace(add=lost)  # type: ignore[assignment]
        ranks.step("times")


def test_more_ranks_than_gpus_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "CUDA_VISIBLE_DEVICES": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeasurementError, match="at most --nproc-per-node 1"):
        take_gpu()


# --- real processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Rank 0 waits after its first row until rank 1 has one, and rank 1 then waits for its death. Until
# then time stands still, and nobody is taken for dead however late a heart beats.
RANK = """
import signal, sys, time
from pathlib import Path
from lokakern.bench.cli import main as cli
from lokakern.sweep import ranks as ranks

folder, mine = Path(sys.argv.pop(1)), sys.argv.pop(1)
step = ranks.RankGroup.step

def stepping(self, name):
    count = step(self, name)
    (folder / f"rows-{mine}").touch()
    while mine == "1" or not (folder / "rows-1").exists():
        time.sleep(0.05)
    return count

def clock():
    return time.monotonic() if (folder / "killed").exists() else 0.0

ranks.RankGroup.step = stepping
ranks.RankGroup.__init__.__kwdefaults__["clock"] = clock
cli.main()
"""


def rank_process(rank: int, port: int, database: Path, *words: str) -> subprocess.Popen[str]:
    """One rank of two, as torchrun starts it, on a CPU."""
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "LOKAKERN_CREW_PATIENCE_S": "3",
    }  # fmt: skip
    command = [sys.executable, "-c", RANK, str(database.parent), str(rank), "sweep",
               "--db", str(database), "--json"]  # fmt: skip
    return subprocess.Popen(
        [*command, *words], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


# Of some size: of small problems a CPU's cache holds thousands, all of which are laid out.
SHAPES = [word for m in range(512, 560, 16) for word in ("--shape", f"{m},512,512")]
FEW = ("--kernel", "torch.bf16", "--kernel", "torch.quantize_row", "--errors", "none")


def rows_of(database: Path) -> tuple[int, int]:
    """The numbers of timed problems and of runs."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        query = (
            "SELECT count(DISTINCT problem), count(DISTINCT run) FROM timing WHERE status = 'ok'"
        )
        problems, runs = connection.execute(query).fetchone()
    return int(problems), int(runs)


@pytest.mark.rest
def test_two_processes_share_a_sweep_and_one_is_killed(tmp_path: Path) -> None:
    database, port = tmp_path / "a.sqlite", free_port()
    first = rank_process(0, port, database, *SHAPES, *FEW)
    second = rank_process(1, port, database, *SHAPES, *FEW)
    while not (tmp_path / "rows-1").exists():
        assert first.poll() is None and second.poll() is None, "one ended before the other began"
        time.sleep(0.05)
    assert (tmp_path / "a.sqlite.runs").is_dir() and not database.exists()
    second.send_signal(signal.SIGKILL)
    second.wait()
    (tmp_path / "killed").touch()
    _, err = first.communicate(timeout=ENDLESS_S)
    assert first.returncode == 0, err
    again = subprocess.run(
        [sys.executable, "-m", "lokakern.bench", "sweep", "--db", str(database), *SHAPES, *FEW],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, text=True, capture_output=True,
        timeout=ENDLESS_S, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert "0 times of 0 problems" in again.stderr
    problems, runs = rows_of(database)
    assert problems >= len(SHAPES) // 2 and runs == 2  # also what the killed one had measured
