"""Measure the cost of `lokakern.Probe` in a compiled Wukong on a GPU, and check its results.

    python scripts/measure_probe.py [overhead] [learned] [gradients] [replay] [--batch N --rounds N]

Prints a line of JSON for each. At the batch that is preset the host can hardly launch a step in
its time; at 8192 the GPU is the limit, and `--rounds 7` take a minute. Wukong-S of arXiv
2403.02545 (Table 5), bfloat16, fused AdamW.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lokakern import numerics
from lokakern.probe.session import Probe
from lokakern.types import Granularity

FEATURES, WIDTH = 720, 160  # embeddings of a sample
LAYERS, KEPT, RANK, HIDDEN = 8, 32, 24, 2048
EVERY = 100


class Interaction(nn.Module):
    """``norm(concat(MLP(norm(X X^T P)), X^T L) + X^T R)``, over features of width d."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(features, RANK, bias=False)
        self.compress = nn.Linear(features, KEPT, bias=False)
        self.residual = nn.Linear(features, 2 * KEPT, bias=False)
        self.norm_products = nn.LayerNorm(features * RANK)
        self.mlp = nn.Sequential(
            nn.Linear(features * RANK, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, KEPT * width),
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        across = x.transpose(1, 2)
        products = torch.bmm(x, self.project(across)).flatten(1)
        made = self.mlp(self.norm_products(products)).view(len(x), KEPT, -1)
        kept = torch.cat((made, self.compress(across).transpose(1, 2)), dim=1)
        found: Tensor = self.norm(kept + self.residual(across).transpose(1, 2))
        return found


class Wukong(nn.Module):
    """Layers of interactions, and an MLP to one logit."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [FEATURES] + [2 * KEPT] * (LAYERS - 1)
        self.layers = nn.Sequential(*(Interaction(size, WIDTH) for size in sizes))
        self.head = nn.Sequential(
            nn.Linear(2 * KEPT * WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(x).flatten(1)).squeeze(1)
        return found


class Training:
    """A compiled model with its optimizer and a batch."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(0)
        self.model = Wukong().cuda().bfloat16()
        self.compiled = torch.compile(self.model, fullgraph=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.x = torch.randn(batch, FEATURES, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.y = (torch.rand(batch, device="cuda") < 0.03).bfloat16()

    def step(self) -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(self.compiled(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps_ms(self, count: int) -> list[float]:
        """Time of each step; the host waits for the last one only."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.step()
            mark.record()
        marks[-1].synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def overhead(batch: int, rounds: int) -> dict[str, Any]:
    """Blocks of `EVERY` steps with and without, in turn; each has one sampled step."""
    watched = Training(batch)
    probe = Probe(watched.model, every=2)
    probe.start()
    alone = Training(batch)
    for training in (watched, alone):
        for _ in range(6):
            training.step()
    torch.cuda.synchronize()
    stats = torch._dynamo.utils.counters
    graphs, breaks = stats["stats"]["unique_graphs"], dict(stats["graph_break"])
    torch._dynamo.config.error_on_recompile = True

    # What a sampled step asks of the host, weights included.
    probe.every = 1
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        watched.step()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    probe._sampler.buffer.settle()
    torch.cuda.synchronize()
    watched.step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    probe._sampler.buffer.settle()
    torch.cuda.synchronize()
    weights_s = time.perf_counter() - begun
    watched.step()
    launches, kernels_ms, host_ms = _profiled(watched)
    alone_launches, alone_ms, alone_host_ms = _profiled(alone)

    # Amid a block: before each the host waits for the GPU, which it does nowhere else.
    probe.every = EVERY
    while probe._steps % EVERY != EVERY // 2:
        watched.step()
    for training in (alone, watched):  # the GPU's clock comes down to where it stays
        training.steps_ms(EVERY)
    ratios, between, sampled, plain_ms, excess = [], [], [], [], []
    for place in range(rounds):
        order = (watched, alone) if place % 2 else (alone, watched)
        found = {id(training): training.steps_ms(EVERY) for training in order}
        mine, plain = found[id(watched)], found[id(alone)]
        usual = statistics.median(plain)
        ratios.append(sum(mine) / sum(plain))
        between.append(statistics.median(mine) / usual)
        # The middle one is sampled; what it leaves is taken in beside the next ones.
        early = mine[EVERY // 2 :]
        sampled.append((sum(early) - len(early) * statistics.median(mine)) / usual)
        plain_ms.append(usual)
        excess.append([ms - statistics.median(mine) for ms in early])
    torch._dynamo.config.error_on_recompile = False
    probe.stop()
    calls = {sum(site.sizes.values()) for site in probe.sites().values()}
    if len(calls) != 1 or launches <= alone_launches:
        raise SystemExit(f"steps were not sampled: {calls} calls, {launches} launches")
    return {
        "batch": batch,
        "overhead": statistics.median(ratios) - 1.0,
        "overheads": [ratio - 1.0 for ratio in ratios],
        "step_ms": statistics.median(plain_ms),
        "steps_between": statistics.median(between) - 1.0,
        "sampled_step_costs_steps": statistics.median(sampled),
        "early_steps_cost_ms": [
            round(statistics.median(each), 2) for each in zip(*excess, strict=True)
        ],
        "most_of_them_ms": [round(max(each), 1) for each in zip(*excess, strict=True)],
        "by_that": statistics.median(sampled) / EVERY + statistics.median(between) - 1.0,
        "sites": len(probe.sites()),
        "sampled_steps": max(calls),
        "launches": {"sampled": launches, "alone": alone_launches},
        "kernels_ms": {"sampled": kernels_ms, "alone": alone_ms},
        "host_ms": {"sampled": host_ms, "alone": alone_host_ms},
        "weights_of_all_sites_s": weights_s,
        "graph_breaks": breaks,
        "recompiled": stats["stats"]["unique_graphs"] - graphs,
        "host_waits": 0,  # or an error was raised
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def _profiled(training: Training) -> tuple[int, float, float]:
    """Kernels of a step, how long they run, and how long the host is busy."""
    training.step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        training.step()
        torch.cuda.synchronize()
    averages = [e for e in profile.key_averages() if e.self_device_time_total > 0
                and e.device_type == torch.autograd.DeviceType.CUDA]  # fmt: skip
    averages.sort(key=lambda e: -e.self_device_time_total)
    for e in averages[:25]:
        print(
            f"{e.self_device_time_total / 1e3:9.3f} ms {e.count:5d} {e.key[:110]}", file=sys.stderr
        )
    print(file=sys.stderr)
    begun = time.perf_counter()
    training.step()
    host_ms = (time.perf_counter() - begun) * 1e3
    torch.cuda.synchronize()
    busy_ms = sum(e.self_device_time_total for e in averages) / 1e3
    return sum(e.count for e in averages), busy_ms, host_ms


def learned() -> dict[str, Any]:
    """Column sizes of an input and a gradient under Inductor, beside float64's."""
    torch.compiler.reset()
    torch.manual_seed(0)
    k, n, rows = 96, 64, 256
    model = nn.Sequential(nn.Linear(k, n), nn.LayerNorm(n), nn.ReLU(), nn.Linear(n, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compiled = torch.compile(model, fullgraph=True)
    seen: list[list[Tensor]] = [[], []]
    with Probe(model, every=2) as probe:
        for step in range(7):
            x = torch.randn(rows, k, device="cuda") + 1.0
            compiled(x).square().mean().backward()
            optimizer.step()
            if step % 2 == 0:
                first = model[0](x).detach().requires_grad_()
                model[1:](first).square().mean().backward()
                seen[0].append(x)
                seen[1].append(first.grad)
    site, errors = probe.sites()["0"], {}
    for name, parts in zip(("input", "grad_output"), seen, strict=True):
        exact = torch.cat(parts).double()
        operand = getattr(site, name)
        errors[f"{name}_column_sizes"] = _apart(operand.column_sizes, exact.abs().amax(dim=0))
        errors[f"{name}_rows"] = operand.rows_seen - len(exact)
    return {"learned": errors, "norm": site.norm}


def _apart(x: Tensor, exact: Tensor) -> float:
    return float((x - exact).norm() / exact.norm())


def _trained_mlp() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(512, 1024), nn.LayerNorm(1024), nn.ReLU(), nn.Linear(1024, 256)
    ).cuda().bfloat16()  # fmt: skip
    return model, torch.randn(16384, 512, device="cuda", dtype=torch.bfloat16)


def gradients() -> dict[str, Any]:
    """Errors replayed of a site's three GEMMs, beside real FP8 kernels on rows held out."""
    import lokakern
    from lokakern.probe.replay import LearnedSite, replay

    model, x = _trained_mlp()
    with Probe(model, every=1) as probe:
        for part in x[:8192].split(2048):
            model(part).float().square().mean().backward()
    held = x[8192:10240]
    outputs: list[Tensor] = []
    handle = model[0].register_forward_hook(lambda _m, _i, y: outputs.append(y))
    y = model(held)
    (gradient,) = torch.autograd.grad(y.float().square().mean(), outputs)
    handle.remove()
    weight = model[0].weight.detach()
    products = {
        "output": (held, weight.t()),
        "grad_input": (gradient, weight),
        "grad_weight": (gradient.t(), held),
    }
    replayed = replay(LearnedSite("0", probe.sites()["0"]), seeds=(0,))
    found: dict[str, Any] = {}
    for gemm, (a, b) in products.items():
        exact = a.double() @ b.double()
        mine = {
            r.kernel: round(r.row_err, 5)
            for r in replayed
            if (r.gemm, r.norm) == (gemm, "") and r.granularity is not Granularity.NONE
        }
        real = {}
        for scales in ("row", "tensor"):
            left = lokakern.quantize(a.contiguous(), scales)
            right = lokakern.quantize(b.t().contiguous(), scales)
            out = lokakern.scaled_gemm(left, right.t())
            real[scales] = round(numerics.measure_errors(out, exact).row_err, 5)
        bad = {r.kernel: r.reason for r in replayed if r.gemm == gemm and r.reason}
        found[gemm] = {"replayed": mine, "held_out": real, "bad": bad}
    return {"gradients": found}


def replay() -> dict[str, Any]:
    """Verdicts with errors and times of this GPU, into a database."""
    from lokakern.registry.snapshot.loading import load_snapshot

    model, x = _trained_mlp()
    with Probe(model, every=1) as probe:
        for part in x.split(8192):
            model(part).float().square().mean().backward()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.sqlite"
        begun = time.perf_counter()
        report = probe.report(seeds=(0,), database=path, times=True)
        seconds = time.perf_counter() - begun
        names = sorted(d.name for d in load_snapshot([path]).distributions)
        report.save_page(Path(folder) / "page.html")
        size = (Path(folder) / "page.html").stat().st_size
    report.table()
    return {
        "replay_s": seconds,
        "verdicts": [[v.site, v.gemm, list(v.shape), v.safety, v.speed, v.best, v.change,
                      v.bf16_us, v.saved_us] for v in report],
        "saved_share": report.saved_share,
        "distributions": names,
        "page_bytes": size,
    }  # fmt: skip


def main() -> None:
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "learned": learned, "gradients": gradients, "replay": replay,
        "overhead": lambda: overhead(asked.batch, asked.rounds),
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wanted", nargs="*", help=f"{', '.join(measures)}; all of them if none")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    unknown = set(asked.wanted) - measures.keys()
    if unknown:
        parser.error(f"nothing is called {', '.join(unknown)}; expected {', '.join(measures)}")
    for name, measure in measures.items():
        if not asked.wanted or name in asked.wanted:
            begun = time.perf_counter()
            found = measure()
            found |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                      "took_s": round(time.perf_counter() - begun, 1)}  # fmt: skip
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
