"""Old import paths of modules that moved into packages, for programs and pickles that name them.

A path in `MOVED` imports as a module that takes its names from the new one. Whole models that were
saved with `torch.save`, and pickles of a `Choice` or a `QuantizedTensor`, name such paths.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "lokakern.choice": "lokakern.selection.choice",
    "lokakern.communication": "lokakern.distributed.ddp_compression",
    "lokakern.converting": "lokakern.conversion.convert",
    "lokakern.gathering": "lokakern.distributed.fsdp2_gather",
    "lokakern.linear": "lokakern.nn.linear",
    "lokakern.linear_norm_act": "lokakern.nn.linear_norm_act",
    "lokakern.mods.block_norm": "lokakern.nn.block_rms_norm",
    "lokakern.mods.intermediates": "lokakern.mods.float32",
    "lokakern.mods.no_bias": "lokakern.mods.epilogue",
    "lokakern.normalizing_backward": "lokakern.functional.norm_backward",
    "lokakern.quantized": "lokakern.quantized_tensor",
}


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        new = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is now {new}", DeprecationWarning, stacklevel=2)

        def found(name: str) -> Any:
            return getattr(importlib.import_module(new), name)

        module.__getattr__ = found  # type: ignore[method-assign]


if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.append(_Finder())
