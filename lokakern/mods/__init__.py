"""Mods: reusable changes to a model that widen where FP8 is safe and fast.

``mods.apply(model, [mods.NoBias(), mods.BlockNorm(256), mods.HardSwish()])`` changes a model in
place and reports what changed where; those that are exact keep what the model computes.
"""

from lokakern.mods.block_norm import BlockNorm
from lokakern.mods.editor import Change, Editor, Mod, Report, apply
from lokakern.mods.hard_swish import HardSwish
from lokakern.mods.intermediates import KeepIntermediates
from lokakern.mods.mix_tokens import MixTokens
from lokakern.mods.no_bias import NoBias
from lokakern.mods.norm_order import NormOrder
from lokakern.mods.pad import Pad
from lokakern.mods.residual import HighResidual
from lokakern.mods.together import BatchEqual, FuseShared
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
