"""Save recorded plans of ops with their kernels, for programs without Python.

`load_plans` of ``plan.h`` reads the file: a header, the product name of the GPU, kernels as machine
code, and plans, each with the signature of its calls.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import torch

from lokakern import nvrtc
from lokakern.device import current_device
from lokakern.errors import ChoicesError
from lokakern.native.record import KERNELS, Recording, Text
from lokakern.native.replay import NATIVE, keeping

_HEADER = b"lokakern plans 2"
_RUNS = 3  # the first compiles kernels, the second is recorded, the third must find all plans


def save_plans(path: str | Path, model: Callable[..., Any], *inputs: Any) -> int:
    """Save the plans of all calls of ops that a model makes on a GPU, with their kernels.

    A C++ program loads the file beside the package of AOTInductor that has the same model. This
    function runs ``model(*inputs)`` three times without gradients, so that each call is recorded.
    A plan is for calls of equal signature: shapes, strides, alignments and all other arguments.

    Args:
        path: The file, such as ``model.plans``; an older one is replaced in one step. It holds
            machine code, and loads on GPUs of the same product only.
        model: The compiled model (`torch.compile`), whose ops get the operands that they get in
            the package.
        inputs: Tensors on the GPU of the model, in the shapes of the package.

    Returns:
        The number of plans.

    Raises:
        ChoicesError: The model calls no op of lokakern on a GPU, or calls them on several, or C++
            cannot make one of the calls: the message has the reasons.
        CompilationError: The native library is off or does not compile, or a kernel does not.
    """
    with keeping() as kept, torch.no_grad():
        for _ in range(_RUNS):
            kept.unrecorded.clear()
            model(*inputs)
    operators = frozenset(NATIVE.module.operators())
    plans: dict[bytes, Recording] = {}
    reasons = set()
    for signature, recording in kept.calls.items():
        if isinstance(recording, str):
            reasons.add(recording)
        elif recording.constants:
            reasons.add("a call needs a cached tensor, such as that of a static scale, which "
                        "convert(..., between=False) does not choose")  # fmt: skip
        elif recording.operators - operators:
            reasons.add(f"a call needs {', '.join(sorted(recording.operators - operators))}; files "
                        f"may hold {', '.join(sorted(operators))}")  # fmt: skip
        elif not KERNELS.keys() >= set(recording.kernels):
            reasons.add("a call launches a kernel of HIP, and files hold those of CUDA")
        else:
            plans[signature] = recording
    if not reasons and kept.unrecorded:
        reasons.add(f"no call of {', '.join(sorted(set(kept.unrecorded)))} was recorded")
    if reasons:
        raise ChoicesError(f"save_plans: C++ cannot make all calls: {'; '.join(sorted(reasons))}")
    devices = sorted({struct.unpack_from("<q", signature)[0] for signature in plans})
    if len(devices) != 1:
        raise ChoicesError(
            f"save_plans: the model called ops of lokakern on {len(devices)} GPUs; a file is for "
            "one: convert the model, and move it and its inputs to one GPU"
        )
    return _write(Path(path), plans, devices[0])


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
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with open(beside, "wb") as file:  # with the usual permissions: another user may serve it
            yield file
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
