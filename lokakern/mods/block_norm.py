"""`BlockNorm`: normalizes fixed blocks of columns, so that no statistic leaves a GEMM's tile."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lokakern.errors import ShapeError
from lokakern.mods.editor import Editor, Mod
from lokakern.nn.block_rms_norm import BlockRMSNorm

_OF_OTHERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.InstanceNorm1d)


@dataclass(frozen=True)
class BlockNorm(Mod):
    """Put BlockNorm in the place of every `nn.LayerNorm` and `nn.RMSNorm` of whole rows.

    Rows of fewer columns than a block are one block. A norm whose columns the block does not divide
    is left alone.

    Args:
        block: Columns that are normalized together.
        eps: Added to the mean of squares; None: as of the norm before.
    """

    block: int = 256
    eps: float | None = None

    def edit(self, editor: Editor) -> None:
        """See `Mod`."""
        if not isinstance(self.block, int) or self.block < 1:
            raise ShapeError(f"BlockNorm: block is {self.block!r}; expected an integer >= 1")
        for name, norm in editor.modules(nn.LayerNorm, nn.RMSNorm):
            before = f"{type(norm).__name__}({', '.join(map(str, norm.normalized_shape))})"  # type: ignore[arg-type]
            if len(norm.normalized_shape) != 1:  # type: ignore[arg-type]
                editor.left(self, name, before, "it normalizes more than one axis")
                continue
            columns = int(norm.normalized_shape[0])  # type: ignore[index]
            block = min(self.block, columns)
            if columns % block:
                why = f"{block} does not divide its {columns} columns; pad them, or take a divisor"
                editor.left(self, name, before, why)
                continue
            eps = self.eps if self.eps is not None else norm.eps
            new = BlockRMSNorm(columns, block, 1e-5 if eps is None else float(eps))  # type: ignore[arg-type]
            if not editor.replace(norm, new):
                editor.left(self, name, before, "it is the model itself")
                continue
            lost = [word for word in ("weight", "bias") if getattr(norm, word, None) is not None]
            effect = "no mean is subtracted; " if isinstance(norm, nn.LayerNorm) else ""
            effect += f"each {block} columns have their own scale"
            effect += f"; its {' and '.join(lost)} are gone" if lost else ""
            editor.done(self, name, before, f"BlockRMSNorm({columns}, {block})", effect)
        for name, norm in editor.modules(*_OF_OTHERS):
            editor.left(self, name, type(norm).__name__, "it does not normalize rows")
