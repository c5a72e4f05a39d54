"""Agreement of ranks: each rank compares the digests of its snapshot and kernels with others.

The comparison is no collective, in which ranks that dispatch would wait for ranks that never do.
The first rank with a type of GPU leaves its digests in the job's store, and the others compare
theirs. Different types of GPU may choose different kernels and are not compared.

A process compares once, when it first dispatches for its device. A snapshot that is loaded later
(`selection.use_snapshot`) is not compared, because ranks need not load snapshots equally often.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lokakern.device import current_environment
from lokakern.errors import DisagreementError
from lokakern.registry import libraries
from lokakern.registry.register import KERNELS, Kernel, load_kernels
from lokakern.registry.schema.row_keys import key_of
from lokakern.types import Device

logger = logging.getLogger("lokakern")
COMPARED: set[Device] = set()
SHOWN = 12  # characters of a digest


class Store(Protocol):
    """The part of a store of torch.distributed that is used."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


def check(device: Device, answers: Callable[[], str]) -> None:
    """Compare, at the first call, with the ranks of this job that have the same type of device.

    Args:
        device: A local device.
        answers: Gives kind and digest of the source of choices; called only in a distributed job.

    Raises:
        DisagreementError: An earlier rank has another source of choices or other kernels.
    """
    if device in COMPARED:
        return
    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_world_size() > 1:
        mine = {"answers": answers(), "kernels": f"kernels {usable_digest(device)}"}
        who = f"rank {distributed.get_rank()} on {socket.gethostname()}"
        try:
            compare(distributed.distributed_c10d._get_default_store(), device, who, mine)
        except RuntimeError as error:  # of the store, without which the job ends soon
            logger.warning("%s could not compare what it chooses kernels from: %s", who, error)
    COMPARED.add(device)


def compare(store: Store, device: Device, who: str, mine: dict[str, str]) -> None:
    """Compare digests with those of the first caller with this store and device.

    Raises:
        DisagreementError: They differ.
    """
    given = json.dumps({"who": who, **mine})
    there = json.loads(store.compare_set(f"lokakern/answers/{key_of(device)}", "", given))
    differing = [name for name in mine if mine[name] != there.get(name)]
    if not differing:
        return
    words = {"answers": "what was measured or frozen", "kernels": "the kernels that run here"}
    raise DisagreementError(
        f"{who} would choose other kernels than {there.get('who')} on {device.product}: they "
        f"differ in {' and '.join(words[name] for name in differing)} ("
        + "; ".join(f"{_short(mine[x])} here, {_short(there.get(x))} there" for x in differing)
        + "); give all ranks the same LOKAKERN_DB and the same software, or write one file with "
        "lokakern.freeze(FILE) and set LOKAKERN_CHOICES=FILE on all"
    )


def _short(words: str | None) -> str:
    kind, _, digest = (words or "nothing").rpartition(" ")
    return f"{kind} {digest[:SHOWN]}".strip()


def usable_digest(device: Device) -> str:
    """SHA-256, in hex, of the kernels that run on a local device and of the toolchain.

    Versions count, because rows of another toolchain rank lower.
    """
    load_kernels()
    here = current_environment()
    words = [here.torch, here.toolkit, here.triton, here.libraries]
    words += [
        f"{k.name} {readable_digest(k) or 'unknown'}"
        for _, k in sorted(KERNELS.items())
        if _runs(k, device)
    ]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def readable_digest(kernel: Kernel) -> str:
    """Digest of a kernel; "" for one of a plugin without source files."""
    try:
        return kernel.digest
    except (OSError, ValueError, SyntaxError):
        return ""


def _runs(kernel: Kernel, device: Device) -> bool:
    parts = [kernel, *(KERNELS[name] for name in kernel.parts if name in KERNELS)]
    return kernel.runs_on(device) and all(
        libraries.why_not(part.library, device, part.name) is None for part in parts if part.library
    )
