"""The products that a model asks for, as a suite that a sweep measures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from torch import nn

from lokakern.bench.models.arms import apply_mods
from lokakern.bench.models.batch import Batch, random_batch
from lokakern.bench.models.catalog import CATALOG
from lokakern.bench.models.setting import Setting
from lokakern.nn.linear import Routed
from lokakern.nn.module_scan import shape_of

# Sweeps time layers on a distribution that somebody says; Probe looks for itself. Most inputs come
# out of a norm.
DISTRIBUTION = "X3"
FEW = 16  # samples of a batch that is run: rows of every layer are so many for each


def products_of(setting: Setting) -> Counter[tuple[int, int, int]]:
    """Rows, outputs and inputs of the linear layers, and how often; nothing is computed."""
    with torch.device("meta"):
        model = CATALOG[setting.name].build(setting.config)
    apply_mods(model)
    found: Counter[tuple[int, int, int]] = Counter()

    def see(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if getattr(layer, "is_mixing", False):
            return  # is never quantized
        n, k, _, _ = shape_of(layer)
        rows = inputs[0].numel() // inputs[0].shape[-1]  # of which Pad makes k
        found[rows * setting.samples // FEW, n, k] += 1

    for layer in model.modules():
        if isinstance(layer, nn.Linear | Routed):
            layer.register_forward_pre_hook(see)
    batch = random_batch(setting.inputs, FEW)
    model(Batch(*(tensor.to("meta") for tensor in batch)))
    return found


def write_suite(setting: Setting, path: Path) -> int:
    """Write a suite for ``sweep --suite``; returns the number of layers in it."""
    forms = ["gemm", "prepared", *(["grad_input", "grad_weight"] if setting.training else [])]
    words = ", ".join(f'"{form}"' for form in forms)
    name = f"{setting.name}-{setting.size}-{setting.samples}"
    parts = [f'name = "{name}"\ntitle = "layers of {setting.name} {setting.size}"\n']
    products = products_of(setting)
    for (m, n, k), count in products.items():
        parts.append(
            f"\n[[layer]]\nm = {m}\nn = {n}\nk = {k}\ncount = {count}\n"
            f'distribution = "{DISTRIBUTION}"\nforms = [{words}]\n'
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(parts), encoding="utf-8")
    return len(products)
