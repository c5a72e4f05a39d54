"""Race tiles of FP8 products, and tell how much slower the rule's tile is than the fastest.

    python scripts/measure_tiles.py --seed 7 [--count 60] [--tiles 18] [--drawn 6] [--out FILE]
    python scripts/measure_tiles.py --read FILE [FILE ...]

At each size of `lokakern.workloads.drawn_sizes` with more than 64 columns: the tile of
`fast_tiles.tile_of`, the ``tiles`` with the least cost by its formula, and ``drawn`` others, which
the formula finds slower. Take a seed that no constant was fitted to. Row scales, outputs in
bfloat16, no epilogue; without promoted sums, and with them. Times are those of a sweep: CUDA
graphs, cold operands, replays in random order.

Prints a line for each race and, for both kinds of sums, the geometric mean and the worst sizes.
``--out`` keeps times as lines of JSON, which ``--read`` summarizes again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lokakern import jit, nvrtc
from lokakern.bench.compare.race import geometric_mean
from lokakern.device import current_device
from lokakern.kernels.cuda import fast_tiles, scaled_gemm, scaled_gemm_fast
from lokakern.kernels.cuda.fast_tiles import FastTile
from lokakern.kernels.cuda.tiles import Kind, Tile
from lokakern.measure.operands import Operands
from lokakern.measure.time_problem import contender_of, floor_us, torch_device
from lokakern.measure.timing import quantiles, release, time_contenders
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.types import PLAIN, Epilogue, Format, Granularity, Operand, Rejected
from lokakern.workloads.drawn_sizes import drawn_sizes

LEAST_N = 65  # narrower outputs have rules of their own
WORST = 5


@dataclass(frozen=True)
class Race:
    """Times of tiles at one size, in us.

    Attributes:
        shape: m, n and k.
        askew: Where rows start, see `fast_tiles.askew`.
        promotes: Whether sums are promoted.
        chosen: The rule's tile.
        us: By tile; of tiles 1.5 times slower than the fastest, by few replays.
    """

    shape: tuple[int, int, int]
    askew: int
    promotes: bool
    chosen: str
    us: dict[str, float]

    @property
    def regret(self) -> float:
        """Time of the rule's tile by that of the fastest."""
        return self.us[self.chosen] / min(self.us.values())


def name_of(tile: Tile) -> str:
    """Rows and columns, and what a tile has beside them."""
    words = [f"{tile.height}x{tile.block_n}"]
    fast = tile if isinstance(tile, FastTile) else FastTile(tile.block_n)
    words += ["stays"] * tile.resident + [f"{tile.blocks} an SM"] * (tile.blocks > 1)
    words += [f"{tile.parts} parts"] * (tile.parts > 1) + ["in turn"] * fast.in_turn
    words += [f"{fast.above} above"] * (fast.above > 1) + [f"{fast.along} along"] * (fast.along > 1)
    return " ".join(words)


def tiles_for(
    shape: Sequence[int], kind: Kind, askew: int, promotes: bool, sms: int, few: int, drawn: int
) -> list[Tile]:
    """The rule's tile first, those of the least cost, and some of the others."""
    m, n, k = shape
    chosen = fast_tiles.tile_of(m, n, k, kind, askew, True, sms, promotes)

    def cost(tile: FastTile) -> float:
        return fast_tiles.cost_us(m, n, k, tile, askew, sms, promotes)

    # Infinite are those that have no such tiles.
    able = [
        tile
        for tile in fast_tiles.tiles_of(kind.out_bytes, askew, True, promotes)
        if cost(tile) < math.inf and name_of(tile) != name_of(chosen)
    ]
    able.sort(key=cost)
    source = random.Random(f"{shape} {promotes}")
    others = able[few:]
    return [chosen, *able[:few], *source.sample(others, min(drawn, len(others)))]


def launch(tile: Tile, promotes: bool, *operands: Any, epilogue: Epilogue = PLAIN) -> None:
    """`scaled_gemm_fast.launch` with a given tile."""
    a, a_scale, b, b_scale, out, bias, _workspace = operands
    kind = scaled_gemm._kind_of("row", (a,), b, out, bias, epilogue)
    plan = scaled_gemm_fast.make_plan(
        *out.shape, b.shape[0], kind, tile, jit.compute_units(out.get_device()), promotes
    )
    scaled_gemm.run(plan, kind, len(out), 1, (a,), (a_scale,), b, b_scale, out, bias, epilogue)


def race(
    shape: tuple[int, int, int], promotes: bool, few: int, drawn: int, seed: int = 0
) -> Race | None:
    """Times of tiles at a size; None where the kernel does not take it.

    Raises:
        SystemExit: A tile failed.
    """
    device, where = current_device(), torch_device()
    kernel: Kernel = KERNELS[f"cuda.scaled_gemm_row_{'paired' if promotes else 'fast'}"]
    problem = make_problem("scaled_gemm", shape, a=Operand(Format.E4M3FN, Granularity.ROW))
    if isinstance(kernel.supports(problem, device), Rejected):
        return None
    operands = Operands(problem, "X1", where, device, cold=True, seed=seed)
    a, b, out = operands.sets[0][0], operands.sets[0][2], operands.outputs(operands.sets[0])[0]
    starts = a.data_ptr() | a.stride(0) | b.data_ptr() | b.stride(1)
    askew, kind = fast_tiles.askew(starts), scaled_gemm._kind_of("row", (a,), b, out, None, PLAIN)
    sms = jit.compute_units(out.get_device())
    tiles = {
        name_of(tile): tile for tile in tiles_for(shape, kind, askew, promotes, sms, few, drawn)
    }
    programs = [
        scaled_gemm_fast.bind(*shape[1:], tile, promotes, kind).program for tile in tiles.values()
    ]
    with ThreadPoolExecutor() as pool:  # 0.2 s each, one after the other in the race
        list(pool.map(functools.partial(nvrtc.cubin, architecture=device.architecture), programs))
    contenders = [
        contender_of(operands, replace(kernel, launch=functools.partial(launch, tile, promotes)),
                     name)
        for name, tile in tiles.items()
    ]  # fmt: skip
    time_contenders(contenders, regime="graph-cold", device=where, floor_us=floor_us(problem),
                    seed=seed)  # fmt: skip
    failed = next((c for c in contenders if c.status != "ok"), None)
    if failed is not None:
        told = f"{failed.name} at {shape}: {failed.status}: {failed.reason}"
        raise SystemExit(f"measure_tiles: {told}")
    times = {contender.name: quantiles(contender).p50 for contender in contenders}
    release(contenders)
    return Race(shape, askew, promotes, next(iter(tiles)), times)


def summary(races: Sequence[Race]) -> Iterator[str]:
    """What the rule loses, for each kind of sums."""
    for promotes in (False, True):
        found = sorted((r for r in races if r.promotes == promotes), key=lambda r: -r.regret)
        if not found:
            continue
        yield (
            f"{'promoted' if promotes else 'fast'} sums, {len(found)} sizes: the rule's tile takes "
            f"{geometric_mean([r.regret for r in found]):.4f} of the fastest's time in geometric "
            f"mean, {found[0].regret:.3f} at most"
        )
        for at in found[:WORST]:
            best = min(at.us, key=at.us.__getitem__)
            yield (
                f"    {' x '.join(map(str, at.shape))}: {at.us[at.chosen]:.1f} us by {at.chosen}, "
                f"{at.us[best]:.1f} by {best} ({at.regret:.3f})"
            )


def read(paths: Sequence[Path]) -> list[Race]:
    """Races of files of ``--out``."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines() if line]
    return [Race(**row | {"shape": tuple(row["shape"])}) for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Race tiles of FP8 products.")
    parser.add_argument("--seed", type=int, help="of the sizes")
    parser.add_argument("--count", type=int, default=60, help="of the sizes")
    parser.add_argument("--tiles", type=int, default=18, help="with the least cost, at a size")
    parser.add_argument("--drawn", type=int, default=6, help="of the others, at a size")
    parser.add_argument("--out", type=Path, help="file that gets a line of JSON for each race")
    parser.add_argument("--read", type=Path, nargs="+", help="summarize such files; time nothing")
    asked = parser.parse_args(arguments)
    if asked.read:
        print(*summary(read(asked.read)), sep="\n")
        return
    if asked.seed is None:
        parser.error("--seed says which sizes are drawn; take one that nothing was fitted to")
    if not current_device().is_gpu:
        raise SystemExit("measure_tiles: no GPU is available; --read summarizes what was timed")
    load_kernels()
    races = []
    sizes = [shape for shape in drawn_sizes(asked.seed, asked.count) if shape[1] >= LEAST_N]
    for shape, promotes in itertools.product(sizes, (False, True)):
        found = race(shape, promotes, asked.tiles, asked.drawn)
        if found is None:
            continue
        races.append(found)
        if asked.out:
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(found)) + "\n")
        sums = "promoted" if promotes else "fast"
        print(*shape, sums, found.chosen, f"{found.regret:.3f}", flush=True)
    print(*summary(races), sep="\n")


if __name__ == "__main__":
    main()
