"""What a report of Probe admits of a layer of a chain: the scales that it finds safe.

A layer of a chain multiplies what the product that Probe saw multiplied, by a kernel with the same
scales and sums, so that the verdict on this product holds for it. Of an output in FP8 a report says
how the next layer reads it, and nothing of a norm that writes it: there the stored error has to be
within the budget of the report, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lokakern.chain.candidates import Step
from lokakern.conversion.routes import NO_VERDICT, why_other_dtype
from lokakern.probe.problems import way_of
from lokakern.probe.verdicts import Verdict
from lokakern.registry.register import KERNELS
from lokakern.types import Device, Format, Granularity

# Ways to scale and to sum, as of `way_of`, each with the upper limit of its row error.
SafeWays = tuple[tuple[str, float], ...]


def safe_ways(verdict: Verdict | None, device: Device, half: Format) -> tuple[SafeWays, str]:
    """The ways that a report finds safe on a device, or the reason why there is none."""
    if verdict is None:
        return (), NO_VERDICT
    if verdict.dtype != half.value:
        return (), why_other_dtype(verdict, half.value)
    classes = [c for c in verdict.classes if c.architecture in ("", device.architecture)]
    found = tuple((c.scales, c.row_err_upper) for c in classes if c.safety == "safe")
    if found:
        return found, ""
    doubtful = [c for c in classes if c.safety == "undecided"]
    least = min(doubtful or classes, key=lambda c: c.row_err, default=None)
    if least is None:
        return (), f"Probe replayed nothing in FP8 that holds on {device.architecture}"
    return (), f"{least.safety} by the report, at best with {least.scales}: {least.reason}"


def ways_at(
    sites: Iterable[str], verdicts: Mapping[str, Verdict] | None, device: Device, half: Format
) -> tuple[dict[str, SafeWays | None], dict[str, str]]:
    """The safe ways of layers by name, and the reasons of layers that have none.

    Args:
        sites: Names of the layers.
        verdicts: Those of a report on outputs by name; None: there is no report, and all have None.
        device: The device.
        half: Format in which the layers multiply unquantized.
    """
    if verdicts is None:
        return dict.fromkeys(sites), {}
    found = {site: safe_ways(verdicts.get(site), device, half) for site in sites}
    ways: dict[str, SafeWays | None] = {
        site: ways for site, (ways, why) in found.items() if not why
    }
    return ways, {site: why for site, (_, why) in found.items() if why}


def reported_error(step: Step, ways: SafeWays) -> float | None:
    """Row error of a layer by a report; None if that does not find the kernel's way safe.

    Unquantized kernels have their stored error. With an FP8 output it is the larger of both.
    """
    kernel = KERNELS.get(step.kernel)
    if kernel is None:
        return None
    if kernel.granularity is Granularity.NONE:
        return step.row_err
    way = way_of(kernel.granularity, kernel.b_granularity, kernel.accumulation)
    reported = dict(ways).get(way)
    if reported is None or step.problem.out_granularity is Granularity.NONE:
        return reported
    return None if step.row_err is None else max(step.row_err, reported)


def reads_safely(ways: SafeWays, granularity: Granularity) -> bool:
    """Whether a report finds an operand with such scales safe, by any kernel."""
    return any(way.split()[0] == granularity.value for way, _ in ways)
