"""The kernels of each layer, what the database says that they gain, and what the step gained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lokakern.bench.models.arms import Built
from lokakern.bench.models.shares import Shares
from lokakern.selection.choice import Choice

EXPLAINED = 0.10  # of the step's gain; a larger gap is explained


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """One product of a layer.

    Attributes:
        site: Name of the layer.
        gemm: "output", "grad_input" or "grad_weight".
        rows: Of the layer's input, in the batch at hand.
        n: Outputs.
        k: Inputs.
        kernel: What runs; "bf16" where nothing is quantized.
        bf16_us: Time of the unquantized product in the database; None where there is none.
        us: Of the kernel, with what it quantizes; None where there is none.
        why: In a few words.
    """

    site: str
    gemm: str
    rows: int
    n: int
    k: int
    kernel: str
    bf16_us: float | None
    us: float | None
    why: str

    @property
    def gain_us(self) -> float:
        """What it saves by the database."""
        return 0.0 if self.bf16_us is None or self.us is None else self.bf16_us - self.us


def rows_of_sites(built: Built, run: Any) -> dict[str, int]:
    """Rows that each converted layer multiplies in ``run``, which must not be compiled."""
    rows: dict[str, int] = {}
    handles = []
    for name, site in built.conversion.sites.items():

        def see(_module: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
            rows[name] = inputs[0].numel() // inputs[0].shape[-1]

        handles.append(site.module.register_forward_pre_hook(see))
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return rows


def layer_choices(built: Built, rows: dict[str, int], training: bool) -> list[LayerChoice]:
    """What runs in each layer that was called, product by product."""
    from lokakern.nn.module_scan import shape_of
    from lokakern.nn.routed_matmul import kernel_at

    found = []
    for name, site in built.conversion.sites.items():
        if name not in rows:
            continue
        m = rows[name]
        n, k, _, _ = shape_of(site.module)
        for route in site.routes if training else site.routes[:1]:
            kernel = kernel_at(route.text, m) or "bf16"
            plain, chosen = _times(route.choices, route.gemm, m, kernel)
            found.append(LayerChoice(name, route.gemm, m, n, k, kernel, plain, chosen, route.why))
    return found


def _times(
    choices: Sequence[Choice], gemm: str, m: int, kernel: str
) -> tuple[float | None, float | None]:
    """Of the unquantized product and of the kernel, at m rows of a layer."""
    if gemm == "grad_weight":  # sums over m, so that each m has a table of its own
        choices = [choice for choice in choices if choice.problem.k == m]
    if not choices:
        return None, None
    table = choices[0].table
    at = choices[0].m if gemm == "grad_weight" else m
    by_name = {candidate.name: candidate for candidate in table.candidates}

    def time_of(name: str | None) -> float | None:
        timed = by_name[name].time_at(at) if name in by_name else None
        return timed[0].latency_us if timed else None

    plain = time_of(table.baseline)
    return plain, plain if kernel == "bf16" else time_of(kernel)


def gap_words(
    choices: Sequence[LayerChoice], gained_us: float, before: Shares, after: Shares
) -> str:
    """What the layers' gains add up to, and where the rest of the step's gain is.

    Args:
        choices: Of all layers.
        gained_us: By how much the step is shorter than the baseline's.
        before: Of the baseline.
        after: Of the arm.
    """
    summed = sum(choice.gain_us for choice in choices)
    missing = sum(choice.bf16_us is None for choice in choices)
    words = (
        f"the layers' gains add up to {summed:.0f} us by the database, the step's is "
        f"{gained_us:.0f} us"
    )
    if missing:
        words += f"; {missing} of {len(choices)} products have no time in it"
    gap = gained_us - summed
    if abs(gap) <= EXPLAINED * abs(gained_us):
        return f"{words}: within {EXPLAINED:.0%}"
    moved = {kind: before.us[kind] - us for kind, us in after.us.items()}
    seen = moved["GEMM"] + moved["quantizing"]
    rest = ", ".join(
        f"{kind} {us:+.0f}" for kind, us in moved.items() if kind not in ("GEMM", "quantizing")
    )
    idle = gained_us - sum(moved.values())
    return (
        f"{words}. Of the gap of {gap:+.0f} us, GEMMs and quantizing, {seen:.0f} us shorter in the "
        f"profile, are {seen - summed:+.0f}; what is gained (+) or lost (-) elsewhere: {rest}, "
        f"gaps between kernels {idle:+.0f}"
    )
