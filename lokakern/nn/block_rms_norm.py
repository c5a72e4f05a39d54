"""`BlockRMSNorm`: RMS normalization of fixed blocks of columns."""

from __future__ import annotations

from torch import Tensor, float64, nn, rsqrt

from lokakern.errors import ShapeError


def block_rms_norm(input: Tensor, block: int, eps: float) -> Tensor:
    """`BlockRMSNorm` as a function."""
    blocks = input.reshape(*input.shape[:-1], input.shape[-1] // block, block)
    wide = blocks if input.dtype is float64 else blocks.float()
    y = wide * rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return y.to(input.dtype).reshape(input.shape)


class BlockRMSNorm(nn.Module):
    """``y / sqrt(mean(y^2) + eps)`` over each block of neighboring columns, without parameters.

    Statistics are float32, or float64 for float64 inputs; the output has the dtype of the input.
    `lokakern.gemm_norm` calls this norm ``block_rms(n)``.

    Args:
        columns: Columns of a row.
        block: Columns of a block; a divisor of ``columns``.
        eps: Added to the mean of squares.
    """

    def __init__(self, columns: int, block: int, eps: float = 1e-5) -> None:
        super().__init__()
        if block < 1 or columns % block:
            raise ShapeError(
                f"BlockRMSNorm: block is {block}; expected a divisor of the {columns} columns"
            )
        self.columns, self.block, self.eps = columns, block, eps
        self.norm_name = f"block_rms({block})"  # for Probe

    def forward(self, input: Tensor) -> Tensor:
        """The same shape and dtype."""
        return block_rms_norm(input, self.block, self.eps)

    def extra_repr(self) -> str:
        """Sizes and eps."""
        return f"{self.columns}, block={self.block}, eps={self.eps}"
