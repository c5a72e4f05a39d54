"""Host costs: the time that the host takes for one call, which limits steps of small products.

In the regimes `eager` and `compiled` the host makes every call, and the GPU works behind it. A
product then takes the longer of both times: a step that the host limits gains nothing from a faster
kernel and loses by a costlier call, and one that the GPU limits hides the host. In a CUDA graph
(`graph-cold`, `graph-hot`) the host makes no call.

Host costs are measured by ``python -m lokakern.bench host`` for kinds of calls, and hold for a
class of machines: one name of the CPU, and one minor version of torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from lokakern import native
from lokakern.device import current_device
from lokakern.problems import baseline_name
from lokakern.registry.schema.records import HOST_PATHS, HOST_REGIMES
from lokakern.selection.candidates import Candidate, HostCost
from lokakern.selection.ties import margin_us
from lokakern.types import COMPILED, Device, Format, Problem

if TYPE_CHECKING:
    from lokakern.registry.snapshot.cells import HostCostCell
    from lokakern.registry.snapshot.snapshot import Snapshot

NATIVE, PYTHON, TORCH = HOST_PATHS
# Kinds of calls. Of a layer: its product in bfloat16, or by a quantized kernel, whose weight was
# quantized before (PREPARED) or is quantized in each call (UNPREPARED).
BF16, PREPARED, UNPREPARED = "bf16", "prepared", "unprepared"
# One of the three products of a training step, with its quantizers: a third of the step.
TRAINING_BF16, TRAINING = "training bf16", "training"
# A training step of a model without products, see `lokakern.conversion.step_host`.
STEP = "training step"
REMEDY = "measure it with `python -m lokakern.bench host`"


@dataclass(frozen=True, slots=True)
class MachineClass:
    """Machines with equal host costs.

    Attributes:
        cpu: Name of the CPU, as the operating system gives it.
        torch: Minor version of torch, such as "2.11".
    """

    cpu: str
    torch: str

    def __str__(self) -> str:
        return f"{self.cpu}, torch {self.torch}"


def minor_version(version: str) -> str:
    """The minor version of a version: "2.11" of "2.11.0+cu130"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def machine_class() -> MachineClass:
    """The class of this machine."""
    return MachineClass(current_device("cpu").product, minor_version(torch.__version__))


def path_here() -> str:
    """The path of warm calls here: "native" if the C++ library is or will be in use."""
    return PYTHON if native.status().startswith("off") else NATIVE


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Host costs of calls in one regime on this machine.

    Attributes:
        words: Where they were measured, or why there are none; "" if the host makes no calls.
        by_call: Costs by kind of call and language of the GEMM; empty if there are none.
    """

    words: str = ""
    by_call: Mapping[tuple[str, str], HostCost] = field(default_factory=dict)

    def of(self, candidate: Candidate, problem: Problem, *, is_training: bool) -> HostCost | None:
        """The cost of a call of a candidate; None if that of bfloat16 is unknown.

        A call that was not measured is assumed to cost as much as one of bfloat16, so that it
        neither gains nor loses where the host is the limit. It is then marked. A quantized call
        counts at least as one of bfloat16: a cheaper call alone is no reason to quantize, because a
        step that the GPU limits would lose by it.
        """
        plain = self.by_call.get((TRAINING_BF16 if is_training else BF16, TORCH))
        if plain is None or candidate.name == baseline_name(problem):
            return plain
        assumed = replace(plain, is_assumed=True)
        if candidate.unquantized:
            return assumed
        call = TRAINING if is_training else PREPARED if problem.prepared else UNPREPARED
        language = candidate.kernel.language if candidate.kernel is not None else ""
        return replace(self.by_call.get((call, language), assumed), least_us=plain.us)


def host_costs(facts: Snapshot, device: Device, regime: str, *, is_local: bool) -> HostCosts:
    """The host costs that count for choices on a device in a regime.

    Args:
        facts: The rows. Imported rows that were not verified do not count.
        device: The GPU.
        regime: The regime of the choice.
        is_local: Whether the GPU is in this machine. The host of another one is unknown.
    """
    if regime not in HOST_REGIMES or not device.is_gpu:
        return HostCosts()
    alone = "times are those of the GPU alone"
    if regime != COMPILED:
        alone = f"times are those of the regime {regime}"
    if not is_local:
        return HostCosts(f"not counted: {device.product} is not in this machine; {alone}")
    here, path = machine_class(), path_here()
    cells = [c for c in facts.host_costs if c.regime == regime]
    found = [c for c in cells if not c.tier and _class_of(c) == here and c.path in (path, TORCH)]
    by_call = _medians(found)
    if not any(call in (BF16, TRAINING_BF16) for call, _ in by_call):
        words = f"not measured on this machine class ({here}); {alone}; {REMEDY}"
        others = {str(_class_of(c)) for c in cells if not c.tier} - {str(here)}
        words += f"; measured on {'; '.join(sorted(others))}" if others else ""
        if any(c.tier and _class_of(c) == here for c in cells):
            words += "; imported costs of this class were not verified and do not count"
        return HostCosts(words)
    return HostCosts(f"measured on {here}, {path} calls", by_call)


def with_host_costs(
    candidates: Sequence[Candidate], problem: Problem, costs: HostCosts, *, is_training: bool
) -> tuple[list[Candidate], str]:
    """The candidates with host costs, and a note about them for explanations.

    Args:
        candidates: Candidates of one problem.
        problem: The problem, at any m.
        costs: The costs of calls.
        is_training: Whether the product is one of a training step.
    """
    words = costs.words
    if not costs.by_call:
        return [*candidates], words
    is_half = problem.a.format in (Format.BFLOAT16, Format.FLOAT16)
    if problem.op != "gemm" or not is_half or problem.batch != 1:
        return [*candidates], "not counted: it is measured for products of two bfloat16 matrices"
    if problem.a.format is Format.FLOAT16:  # in compiled code equal; eager calls cost more
        words += ", with bfloat16"
    if costs.by_call.get((TRAINING_BF16 if is_training else BF16, TORCH)) is None:
        step = "training steps" if is_training else "forward passes"
        return [*candidates], f"not measured for {step} on this machine class; {REMEDY}"
    return [
        replace(c, host=costs.of(c, problem, is_training=is_training)) for c in candidates
    ], words


def digest_words(facts: Snapshot, device: Device) -> str:
    """What choices of this machine depend on besides the rows, to compare ranks of a job."""
    if not facts.host_costs or not device.is_gpu:
        return ""
    return repr([host_costs(facts, device, regime, is_local=True) for regime in HOST_REGIMES])


def _class_of(cell: HostCostCell) -> MachineClass:
    return MachineClass(cell.cpu, minor_version(cell.torch))


def _medians(cells: Iterable[HostCostCell]) -> dict[tuple[str, str], HostCost]:
    """The median over runs of each kind of call."""
    by_call: dict[tuple[str, str], list[HostCostCell]] = {}
    for cell in cells:
        by_call.setdefault((cell.call, cell.language), []).append(cell)
    return {
        call: HostCost(
            statistics.median(c.host_us_p50 for c in found),
            max(margin_us(c.host_us_p20, c.host_us_p80, c.round_count) for c in found),
        )
        for call, found in by_call.items()
    }
