"""Mods: reusable changes to a model that make FP8 safe and fast at more sites.

``mods.apply(model, [mods.NoBias(), mods.BlockNorm(256), mods.HardSwish()])`` changes a model in
place and reports each change. Exact mods do not change the result of the model.
"""

from lokakern.mods.editor import Change, Editor, Mod, Report, apply
from lokakern.mods.epilogue import BlockNorm, HardSwish, NoBias, NormOrder
from lokakern.mods.float32 import HighResidual, KeepIntermediates
from lokakern.mods.pad import Pad
from lokakern.mods.together import BatchEqual, FuseShared, MixTokens
from lokakern.nn.block_rms_norm import BlockRMSNorm

__all__ = [
    "BatchEqual",
    "BlockNorm",
    "BlockRMSNorm",
    "Change",
    "Editor",
    "FuseShared",
    "HardSwish",
    "HighResidual",
    "KeepIntermediates",
    "MixTokens",
    "Mod",
    "NoBias",
    "NormOrder",
    "Pad",
    "Report",
    "apply",
]
