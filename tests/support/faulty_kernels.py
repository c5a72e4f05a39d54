"""Kernels that misbehave on purpose, in ways that only a process of their own survives.

What one does follows from n, so that one sweep meets every fault. Imported by the tests and, since
they are registered from here, by the workers.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lokakern.norm import normalize
from lokakern.registry.register import register
from lokakern.types import ACCEPTED, Device, Format, NormEpilogue, Problem, Rejected, Support

FAULTS = ("segfault", "abort", "exit", "kill", "hang", "raise", "wrong", "out_of_memory")
STATUS = {
    "segfault": "crashed", "abort": "crashed", "exit": "crashed",
    "kill": "out_of_memory",  # what the system does then
    "hang": "timeout", "raise": "error", "wrong": "wrong", "out_of_memory": "error",
}  # fmt: skip
DEADLY = ("segfault", "abort", "exit", "kill", "hang")
NORM_FAULTS = ("norm_skips_eps", "norm_of_another_row", "norm_leaves_one")
# Calls that go well before: at the first launch, while it is timed, while it is checked.
PATIENCE = (0, 2, 7)
_calls: Counter[tuple[int, int]] = Counter()


def hang_of(process: int) -> Path:
    """File that a process writes before it hangs, so that tests need not wait to detect it."""
    return Path(os.environ["LOKAKERN_TESTS"], f"hangs-{process}")


def fault_of(problem: Problem) -> str:
    return FAULTS[problem.m % len(FAULTS)]


def _commit(fault: str, out: Tensor) -> None:
    match fault:
        case "segfault":
            ctypes.string_at(8)
        case "abort":
            os.abort()
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            hang_of(os.getpid()).touch()
            while True:
                time.sleep(0.01)
        case "raise":
            raise RuntimeError("raised on purpose")
        case "wrong":
            out.zero_()
        case "out_of_memory":
            torch.empty(2**60, dtype=torch.uint8)


def _chaos(
    a: Tensor, b: Any, out: Tensor, bias: Tensor | None, workspace: tuple[Tensor, ...]
) -> None:
    m, n = out.shape
    _calls[m, n] += 1
    torch.mm(a, b, out=out)
    fault = FAULTS[m % len(FAULTS)]
    if _calls[m, n] > PATIENCE[m // len(FAULTS) % len(PATIENCE)] or fault == "wrong":
        _commit(fault, out)


def _takes_plain(problem: Problem, _device: Device) -> Support:
    if problem.prepared or problem.epilogue != "none":
        return Rejected("takes plain products only")
    return ACCEPTED


def _always(fault: str, *operands: Any) -> None:
    _commit(fault, operands[2])


def _scribble(
    a: Tensor, b: Any, out: Tensor, bias: Tensor | None, workspace: tuple[Tensor, ...]
) -> None:
    torch.mm(a, b, out=out)
    a.mul_(2)


def _takes_a_plain_norm(problem: Problem, _device: Device) -> Support:
    plain = problem.a.format is problem.out_format is Format.BFLOAT16 and not problem.prepared
    return ACCEPTED if plain and problem.epilogue == "rms" else Rejected("takes plain norms only")


def _norm(
    fault: str, a: Tensor, b: Any, out: Tensor, epilogue: NormEpilogue, _workspace: Any
) -> None:
    """Right but for one thing."""
    kept = out[-1, -1].clone()
    y = a.float() @ b.float()
    norm = epilogue.norm._replace(eps=0.0) if fault == "norm_skips_eps" else epilogue.norm
    z = normalize(y, norm)
    if fault == "norm_of_another_row":
        z[1] = z[1] * y[1].norm() / y[0].norm()
    out.copy_(z)
    if fault == "norm_leaves_one":
        out[-1, -1] = kept


register("gemm", name="chaos", supports=_takes_plain)(_chaos)
register("gemm", name="scribble", supports=_takes_plain)(_scribble)
for _fault in ("segfault", "hang"):
    # Of torch.bf16's numerics class.
    register("gemm", name=_fault, supports=_takes_plain, accumulation="float32")(
        functools.partial(_always, _fault)
    )
for _fault in ("norm_is_right", *NORM_FAULTS):
    register("gemm_norm", name=_fault, supports=_takes_a_plain_norm, accumulation="float32")(
        functools.partial(_norm, _fault)
    )
