"""Time small models whose inference runs as chains, against torch.compile's bf16, in CUDA graphs.

    python scripts/measure_chains.py [--rows 8192] [--budget 0.06] [--backend] [WORD ...]

Residual blocks, MLPs, feed-forward layers, torch's encoder layers, towers, and blocks with forwards
of their own: for each the speedup over bf16 of the same modules, times of both, the error of the
output beside float64, and the chains. Words choose models whose name contains one of them.
``--backend`` compiles the model with backend "lokakern" instead of converting it. ``--rows 64``
tries it on a CPU, without times.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

import lokakern
from lokakern.bench.models.throughput import EVENTS, Stepper, aside, capture, race, warm
from lokakern.conversion.compile_backend import compile_graph

CALLS = 8  # of a captured step


class PostNorm(nn.Module):
    """``norm(fc(x) + x)``."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(columns, columns), nn.LayerNorm(columns)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x) + x)  # type: ignore[no-any-return]


class Residual(PostNorm):
    """``x + relu(norm(fc(x)))``."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.fc(x)))


class FeedForward(nn.Module):
    """That of a transformer, with the norm in front."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(columns), nn.GELU()
        self.up, self.down = nn.Linear(columns, 4 * columns), nn.Linear(4 * columns, columns)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A layer, a norm if any, and relu, with a forward of its own."""

    def __init__(self, k: int, n: int, norm: bool) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(k, n), nn.LayerNorm(n) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.relu(y if self.norm is None else self.norm(y))


class MLP(nn.Module):
    """Two layers, with a forward of their own."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(columns, columns), nn.Linear(columns, columns)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Apart(nn.Module):
    """``norm(x + mlp(x))``."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.mlp, self.norm = MLP(columns), nn.LayerNorm(columns)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mlp(x))  # type: ignore[no-any-return]


def layers(sizes: tuple[int, ...], act: type[nn.Module], norm: bool) -> nn.Sequential:
    """An MLP, or a tower with layer norms."""
    modules: list[nn.Module] = []
    for k, n in itertools.pairwise(sizes):
        modules += [nn.Linear(k, n), *([nn.LayerNorm(n)] if norm else []), act()]
    return nn.Sequential(*modules)


def blocks(*sizes: int, norm: bool) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(Block(k, n, norm) for k, n in itertools.pairwise(sizes)))


class Encoder(nn.Module):
    """An encoder layer of torch over sequences of 16 rows."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            columns, 8, 4 * columns, batch_first=True, activation="gelu"
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.unflatten(0, (-1, 16)))
        return y.flatten(0, 1)  # type: ignore[no-any-return]


def repeated(kind: type[nn.Module], columns: int, count: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(kind(columns) for _ in range(count)))


MODELS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "4 x norm(fc(x) + x), 512": (512, repeated(PostNorm, 512, 4)),
    "4 x norm(fc(x) + x), 1024": (1024, repeated(PostNorm, 1024, 4)),
    "4 x x + relu(norm(fc(x))), 512": (512, repeated(Residual, 512, 4)),
    "4 x x + relu(norm(fc(x))), 1024": (1024, repeated(Residual, 1024, 4)),
    "2 x feed-forward 256-1024-256 with GELU": (256, repeated(FeedForward, 256, 2)),
    "2 x feed-forward 512-2048-512 with GELU": (512, repeated(FeedForward, 512, 2)),
    "2 x encoder layer 512-2048-512 with GELU": (512, repeated(Encoder, 512, 2)),
    "MLP 1024-1024-1024-512 with GELU": (
        1024, lambda: layers((1024, 1024, 1024, 512), nn.GELU, norm=False)
    ),
    "tower 1024-1024-1024-512 with GELU": (
        1024, lambda: layers((1024, 1024, 1024, 512), nn.GELU, norm=True)
    ),
    "tower 3200-2048-2048-1024 with relu": (
        3200, lambda: layers((3200, 2048, 2048, 1024), nn.ReLU, norm=True)
    ),
    "4 blocks relu(fc(x)), 1024": (1024, blocks(*[1024] * 5, norm=False)),
    "4 blocks relu(norm(fc(x))), 2048": (2048, blocks(*[2048] * 5, norm=True)),
    "tower of blocks 3200-2048-2048-1024 with relu": (
        3200, blocks(3200, 2048, 2048, 1024, norm=True)
    ),
    "2 x norm(x + mlp(x)), 1024": (1024, repeated(Apart, 1024, 2)),
}  # fmt: skip


def compiled(model: nn.Module, budget: float | None) -> Callable[[Tensor], Tensor]:
    """By Inductor, or by this library's backend with a budget."""
    torch._dynamo.reset()
    if budget is None:
        return torch.compile(model, dynamic=False)
    options = {"budget": budget, "regime": "compiled-graph"}
    # By its name, "lokakern", where this library is installed.
    return torch.compile(model, dynamic=False, backend=compile_graph, options=options)


def stepper(name: str, model: nn.Module, x: Tensor, budget: float | None = None) -> Stepper:
    run = compiled(model, budget)

    def step() -> None:
        with torch.no_grad():
            for _ in range(CALLS):
                run(x)

    made = Stepper(name, step, step, EVENTS, steps=CALLS)
    with aside(True):
        warm(step)
    capture(made)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--budget", type=float, default=0.06)
    parser.add_argument("--backend", action="store_true")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, (columns, make) in MODELS.items():
        if asked.words and not any(word in name for word in asked.words):
            continue
        torch.manual_seed(0)
        plain = make().to(device, torch.bfloat16).eval().requires_grad_(False)
        ours = copy.deepcopy(plain)
        if asked.backend:
            budget, handle = asked.budget, None
        else:
            budget = None
            handle = lokakern.convert(ours, asked.budget, inference=True, regime="compiled-graph")
        x = torch.randn(asked.rows, columns, device=device).bfloat16()
        exact = copy.deepcopy(plain).double()(x.double())
        with torch.no_grad():
            found = compiled(ours, budget)(x)
        error = float((found.double() - exact).norm() / exact.norm())
        words = f"error {error:.4f}"
        if handle is not None:
            chains = [row["site"] for row in handle.choices if row["gemm"] == "chain"]
            words += f", chains {', '.join(chains) or 'none'}"
        if device == "cuda":
            steppers = stepper("bf16", plain, x), stepper("lokakern", ours, x, budget)
            pace = race(*steppers, torch.device(device))
            words = (
                f"{pace.speedup:.3f} ± {pace.speedup_margin:.3f}, {pace.baseline_us:.1f} and "
                f"{pace.step_us:.1f} us; {words}"
            )
        print(f"{name}: {words}", flush=True)


if __name__ == "__main__":
    main()
