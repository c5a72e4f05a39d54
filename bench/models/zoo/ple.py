"""PLE: experts of each task and shared ones, in levels (Tang et al., RecSys 2020).

A gate of each task weighs its own and the shared experts; the gate of the shared input weighs all.

Sizes are those of examples/ple_taobao.config in alibaba/TorchEasyRec on GitHub: 16 embeddings of
16, two tasks, three levels with 2, 3 and 4 experts for each task and as many shared ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from lokakern.bench.models.blocks import perceptron


@dataclass(frozen=True, slots=True)
class Level:
    """Sizes of a level: experts of each task, as many shared ones, and their layers."""

    experts: int
    hidden: tuple[int, ...]


LEVELS = (Level(2, (1024, 512, 256)), Level(3, (256, 128, 64)), Level(4, (128, 64, 32)))


class Extraction(nn.Module):
    """One level: inputs of the tasks, then the shared input, ``[batch, k]`` each."""

    def __init__(self, k: int, tasks: int, level: Level, *, is_last: bool) -> None:
        super().__init__()
        experts, groups = level.experts, tasks + 1
        self.experts = nn.ModuleList(
            nn.ModuleList(perceptron((k, *level.hidden)) for _ in range(experts))
            for _ in range(groups)
        )
        self.gates = nn.ModuleList(nn.Linear(k, 2 * experts) for _ in range(tasks))
        self.shared_gate = None if is_last else nn.Linear(k, groups * experts)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        *own, shared = (
            [expert(x) for expert in cast(nn.ModuleList, group)]
            for group, x in zip(self.experts, inputs, strict=True)
        )
        made = [
            _mixed(gate(x), mine + shared)
            for gate, x, mine in zip(self.gates, inputs, own, strict=False)
        ]
        if self.shared_gate is not None:
            every = itertools.chain(*own, shared)
            made.append(_mixed(self.shared_gate(inputs[-1]), list(every)))
        return made


def _mixed(gate: Tensor, experts: list[Tensor]) -> Tensor:
    """Experts ``[batch, n]``, weighted by the softmax of a gate ``[batch, experts]``."""
    return (gate.softmax(dim=1)[:, None] @ torch.stack(experts, dim=1))[:, 0]


class PLE(nn.Module):
    """Embeddings ``[batch, k]`` to logits ``[batch, tasks]``."""

    def __init__(
        self,
        k: int = 256,
        tasks: int = 2,
        levels: Sequence[Level] = LEVELS,
        tower: Sequence[int] = (256, 128, 64),
    ) -> None:
        super().__init__()
        self.tasks = tasks
        self.levels = nn.ModuleList()
        for level in levels:
            self.levels.append(Extraction(k, tasks, level, is_last=level is levels[-1]))
            k = level.hidden[-1]
        self.towers = nn.ModuleList(perceptron((k, *tower), last=1) for _ in range(tasks))

    def forward(self, embedded: Tensor) -> Tensor:
        inputs = [embedded] * (self.tasks + 1)
        for level in self.levels:
            inputs = level(inputs)
        logits = [tower(x) for tower, x in zip(self.towers, inputs, strict=True)]
        return torch.cat(logits, dim=1)
