"""Statistics of all ranks as one: sums add up, largest ones are compared, samples share places."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lokakern.probe.operand import OperandStatistics
from lokakern.probe.reservoir import Reservoir
from lokakern.probe.site import SiteStatistics

Shapes = Mapping[str, tuple[int, int, bool, str]]


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Of this process; 0 without torch.distributed."""
    return dist.get_rank() if _is_distributed() else 0


def total(count: int) -> int:
    """Sum over all ranks, each of which must call."""
    if not _is_distributed():
        return count
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    return sum(counts)


def merged(
    sites: Mapping[str, SiteStatistics], shapes: Shapes, group: Any = None
) -> dict[str, SiteStatistics]:
    """What all ranks of a group saw together; on every rank the same, but for the newest weight.

    Args:
        sites: What this rank saw, by name; some may be missing.
        shapes: n, k, bias and norm of every site, the same on every rank.
        group: A process group; None: the default one.
    """
    if not _is_distributed() or dist.get_world_size(group) == 1:
        return dict(sites)
    place, world = dist.get_rank(group), dist.get_world_size(group)
    nccl = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    copies = {name: _copy(sites.get(name), shapes[name]) for name in shapes}
    notes: list[Any] = [None] * world
    dist.all_gather_object(notes, {name: _notes(site) for name, site in copies.items()}, group)
    for name, site in copies.items():
        _use_notes(site, [note[name] for note in notes])
        for operand in (site.input, site.grad_output):
            _share_places(operand.sample, place, world)
    for parts, how in ((_sums, dist.ReduceOp.SUM), (_largest, dist.ReduceOp.MAX)):
        tensors = [x for site in copies.values() for x in parts(site)]
        flat = torch.cat([x.flatten().double() for x in tensors]).to(device)
        dist.all_reduce(flat, how, group)
        held, start = flat.cpu(), 0
        for x in tensors:
            x.copy_(held[start : start + x.numel()].view_as(x))
            start += x.numel()
    for site in copies.values():
        _finish(site)
    return {name: site for name, site in copies.items() if sum(site.sizes.values())}


def _copy(site: SiteStatistics | None, shape: tuple[int, int, bool, str]) -> SiteStatistics:
    n, k, has_bias, norm = shape
    found = SiteStatistics(n, k, torch.device("cpu"), has_bias=has_bias, norm=norm)
    if site is not None:
        found.merge(site)
    return found


def _notes(site: SiteStatistics) -> dict[str, Any]:
    """What the host knows."""
    return {
        "sizes": dict(site.sizes),
        "norm": site.norm,
        "snapshots": site.snapshots,
        **{part: (getattr(site, part).steps, getattr(site, part).stride) for part in _PARTS},
    }


_PARTS = ("input", "grad_output")


def _use_notes(site: SiteStatistics, notes: list[dict[str, Any]]) -> None:
    site.sizes.clear()
    for note in notes:
        site.sizes.update(note["sizes"])
    site.norm = next((note["norm"] for note in notes if note["norm"]), "")
    site.snapshots = sum(note["snapshots"] for note in notes)
    for part in _PARTS:
        operand = getattr(site, part)
        operand.align(max(note[part][1] for note in notes))
        operand.steps = max(note[part][0] for note in notes)
        for name, x in operand.moments.sums().items():
            operand.moments.tensors()[name].copy_(x)


def _share_places(sample: Reservoir, place: int, world: int) -> None:
    """Every rank has the places ``place, place + world, ...`` of the merged sample."""
    mine = slice(place, None, world)
    count = len(sample.keys[mine])
    rows, keys = sample.rows[:count].clone(), sample.keys[:count].clone()
    sample.rows.zero_()
    sample.keys.zero_()
    sample.rows[mine], sample.keys[mine] = rows, keys


def _operand_sums(operand: OperandStatistics) -> Iterator[Tensor]:
    yield from operand.moments.tensors().values()
    yield from (operand.row_sizes.counts, operand.values.counts)
    yield from (operand.sample.rows, operand.sample.keys)


def _sums(site: SiteStatistics) -> Iterator[Tensor]:
    for part in _PARTS:
        yield from _operand_sums(getattr(site, part))
    yield site.mean_ratios.counts
    yield site.cancellations


def _largest(site: SiteStatistics) -> Iterator[Tensor]:
    for part in _PARTS:
        operand = getattr(site, part)
        yield from (operand.column_sizes, operand.trace)


def _finish(site: SiteStatistics) -> None:
    for part in _PARTS:
        operand = getattr(site, part)
        moments = operand.moments
        moments.use_sums({name: x.clone() for name, x in moments.tensors().items()})
        keys, order = operand.sample.keys.nan_to_num(nan=math.inf, posinf=math.inf).sort()
        operand.sample.rows.copy_(operand.sample.rows[order])
        operand.sample.keys.copy_(keys)
