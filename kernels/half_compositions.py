"""float16 between a GEMM and a norm, in compositions whose file says bfloat16.

What of them decides the dtype of the sums is the workspace. Its function is taken over with another
word for that dtype: the file itself is part of the digests of rows in bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from lokakern.kernels import norm_compositions
from lokakern.registry.float16 import has_half
from lokakern.registry.register import KERNELS, Kernel, Workspace

_WORDS = SimpleNamespace(bfloat16=torch.float16, empty=torch.empty)
_workspace_in_half = FunctionType(
    norm_compositions._workspace.__code__, {**vars(norm_compositions), "torch": _WORDS}
)


def _with_half(first: Kernel, second: Kernel, plain: Workspace) -> Workspace:
    in_half = _workspace_in_half(first, second)

    def workspace(a: Any, b: Any, out: Any, epilogue: Any) -> tuple[Any, ...]:
        return (in_half if has_half(a, out, epilogue) else plain)(a, b, out, epilogue)

    return workspace


for _name, _kernel in list(KERNELS.items()):
    _norm = _kernel.parts[-1] if _kernel.op == "gemm_norm" and _kernel.parts else ""
    if _norm and KERNELS[_norm].op == "norm_quantize":
        _first, _second = KERNELS[_name.removesuffix(f"+{_norm}")], KERNELS[_norm]
        _workspace = _with_half(_first, _second, _kernel.workspace)
        KERNELS[_name] = replace(_kernel, workspace=_workspace)
