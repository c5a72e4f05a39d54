"""Save recorded plans of ops with their kernels, for programs without Python.

`load_plans` of ``plan.h`` reads the file: a header, the product name of the GPU, kernels as machine
code, and plans, each with the signature of its calls. No program outside of the tests read one yet.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from lokakern import nvrtc
from lokakern.device import current_device
from lokakern.errors import ChoicesError
from lokakern.native.record import KERNELS, Recording, Text
from lokakern.native.replay import OPS, status

_HEADER = b"lokakern plans 1"


def save_plans(path: str | Path, device: torch.device | str | int | None = None) -> int:
    """Save the plans of all op calls recorded so far on one GPU, with their kernels.

    A call is recorded when its signature (shapes, strides, alignments and all other arguments)
    comes for the second time after the library was loaded, so run a model three times with each
    shape that it will serve. The file replaces an older one in one step. It holds machine code,
    and loads on GPUs of the same product only.

    Args:
        path: The file, such as ``model.plans``.
        device: The GPU whose calls are saved; None: the current one.

    Returns:
        The number of plans.

    Raises:
        ChoicesError: No call was recorded, or one cannot be replayed: the message has the reasons.
        CompilationError: A kernel is no longer in the cache and does not compile.
    """
    index = _index(device)
    plans: dict[bytes, Recording] = {}
    reasons = []
    for signature, recording in list(OPS.items()):
        if struct.unpack_from("<q", signature)[0] != index:
            continue
        if isinstance(recording, str):
            reasons.append(recording)
        elif recording.constants:
            reasons.append("a call needs a cached tensor, such as that of a static scale")
        else:
            plans[signature] = recording
    if reasons:
        found = "; ".join(sorted(set(reasons)))
        raise ChoicesError(f"save_plans: calls that C++ cannot make were recorded: {found}")
    if not plans:
        raise ChoicesError(
            f"save_plans: no call of an op of lokakern was recorded on GPU {index}; run the "
            f"exported model three times with each shape first. Recording is {status()}"
        )
    return _write(Path(path), plans, index)


def _index(device: torch.device | str | int | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _write(path: Path, plans: dict[bytes, Recording], index: int) -> int:
    here = current_device("cuda", index)
    text = Text()
    text.text(_HEADER)
    text.text(torch.cuda.get_device_name(index).encode())
    places: dict[Any, int] = {}  # two launches may share a program
    numbers = {
        function: places.setdefault(KERNELS[function], len(places))
        for plan in plans.values()
        for function in plan.kernels
    }
    text.number(len(places))
    for program, shared_bytes, cluster in places:
        text.text(program.entry.encode())
        text.number(shared_bytes, cluster)
        text.text(nvrtc.cubin(program, here.architecture))
    text.number(len(plans))
    for signature, plan in plans.items():
        text.text(signature)
        text.text(plan.text(numbers))
    with _replacing(path) as file:
        file.write(text.bytes)
    return len(plans)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path` that takes its place if the block succeeds."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
