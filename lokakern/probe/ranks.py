"""Statistics of all ranks as one: sums add up, largest ones are compared, samples share places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lokakern.probe.statistics import LARGEST, SUMMED, SiteStatistics


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if _is_distributed() else 0


def merged(
    sites: Mapping[str, SiteStatistics],
    empty: Mapping[str, Callable[[torch.device], SiteStatistics]],
    group: Any = None,
) -> dict[str, SiteStatistics]:
    """Statistics of all ranks of a group; on every rank the same, but for the newest weight.

    By one gather of a few numbers and two reductions. `empty` makes empty statistics of every site,
    the same sites on every rank, of which those of this rank, `sites`, may lack some.
    """
    if not _is_distributed() or dist.get_world_size(group) == 1:
        return dict(sites)
    nccl = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    copies = {name: made(torch.device("cpu")) for name, made in empty.items()}
    for name, site in sites.items():
        copies[name].merge(site)
    notes: list[Any] = [None] * dist.get_world_size(group)
    own = {
        name: (site.sizes, site.norm, site.needs_input_gradient, site.half.dtype)
        for name, site in copies.items()
    }
    dist.all_gather_object(notes, own, group)
    # Every rank has the places ``rank, rank + world, ...`` of the merged samples.
    mine = slice(dist.get_rank(group), None, len(notes))
    for name, site in copies.items():
        site.sizes = sum((note[name][0] for note in notes), Counter())
        site.norm = next((note[name][1] for note in notes if note[name][1]), "")
        site.needs_input_gradient = any(note[name][2] for note in notes)
        for note in notes:
            site.see_half(note[name][3])
        for operand in (site.input, site.grad_output):
            for x in (operand.rows, operand.keys):
                kept = x[: len(x[mine])].clone()
                x.zero_()[mine] = kept
    for kinds, how in (
        ((*SUMMED, "rows", "keys"), dist.ReduceOp.SUM),
        (LARGEST, dist.ReduceOp.MAX),
    ):
        tensors = [x for site in copies.values() for name, x in site.tensors()
                   if name.rpartition(".")[2] in kinds]  # fmt: skip
        flat = torch.cat([x.flatten().double() for x in tensors]).to(device)
        dist.all_reduce(flat, how, group)
        parts = flat.cpu().split([x.numel() for x in tensors])  # type: ignore[no-untyped-call]
        for x, found in zip(tensors, parts, strict=True):
            x.copy_(found.view_as(x))
    for site in copies.values():
        for operand in (site.input, site.grad_output):
            operand.keys, order = operand.keys.sort()
            operand.rows = operand.rows[order]
    return {name: site for name, site in copies.items() if sum(site.sizes.values())}
