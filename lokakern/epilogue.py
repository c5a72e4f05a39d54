"""What a scaled GEMM does to its sums before it writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = ("none", "relu", "hardswish", "silu")
# What `Problem.epilogue` of a GEMM may say.
EPILOGUES = frozenset(
    "+".join(word for word in (bias, last) if word) or "none"
    for bias in ("", "bias")
    for last in ("", "cross", *ACTIVATIONS[1:])
)


class Epilogue(NamedTuple):
    """The last argument of a launcher of op ``scaled_gemm``, beside the bias.

    With v the sums: ``v = (acc * sa) * sb``; ``v += bias``; then ``v = activation(v)``, or DCN's
    cross ``v = x0 * v + x``; then ``out += v``, or ``out = cast(rn(v / out_scale))``, saturating,
    or ``out = v`` rounded. What is NaN stays NaN.

    Attributes:
        activation: "none", "relu", "hardswish" or "silu".
        x0: Of the cross, ``[m, n]``, bfloat16, columns contiguous, any row stride.
        x: As ``x0``.
        out_scale: Decode scale of an FP8 output, float32 ``[1, 1]``.
        accumulate: Whether to add to what is in ``out``, float32.
        groups: Weights that b holds one after the other, ``[k, groups * n]``; a and out have as
            many rows for each.
        offsets: Where each group's rows begin and end instead: int32 ``[groups + 1]`` on the
            device, ascending. Other rows are left as they are.
        batch_invariant: Whether the bits of a row must not depend on how many rows there are.
    """

    activation: str = "none"
    x0: Tensor | None = None
    x: Tensor | None = None
    out_scale: Tensor | None = None
    accumulate: bool = False
    groups: int = 1
    offsets: Tensor | None = None
    batch_invariant: bool = False

    def name(self, bias: bool) -> str:
        """What `Problem.epilogue` says."""
        last = "cross" if self.x0 is not None else self.activation
        words = [*(["bias"] if bias else []), *([last] if last != "none" else [])]
        return "+".join(words) or "none"


PLAIN = Epilogue()
