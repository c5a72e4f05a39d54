"""Epilogues of scaled GEMMs, and of GEMMs with a norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lokakern.errors import UnknownNameError
from lokakern.norm import KINDS, NO_NORM, Norm, norm_named

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = ("none", "relu", "hardswish", "silu", "gelu", "gelu_tanh")
# Words of an epilogue with a norm, and how many matrices of the output's shape each reads.
BESIDE = {"residual": 1, "gate": 1, "cross": 2, "residual_last": 1}
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
        activation: One of `ACTIVATIONS`.
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
        """Its name in `Problem.epilogue`."""
        last = "cross" if self.x0 is not None else self.activation
        words = [*(["bias"] if bias else []), *([last] if last != "none" else [])]
        return "+".join(words) or "none"


PLAIN = Epilogue()


class NormEpilogue(NamedTuple):
    """The last argument but one of a launcher of ops ``gemm_norm`` and ``norm_quantize``.

    With y the sums, or what is given: ``y += bias``; ``y += residual``; ``z = norm(y) * norm_weight
    + norm_bias``; then ``d = activation(z)``, or ``gate * sigmoid(z)``, or DCN's cross ``x0 * z +
    x``; where `residual_last`, the residual is added here instead. What is NaN stays NaN. Vectors,
    and rows of matrices, start at multiples of 16 bytes
    (`lokakern.functional.norm_checks.aligned_epilogue`).

    Attributes:
        norm: Of rows, or of blocks of them.
        bias: ``[n]``, bfloat16 or float32, as are the next two, all of one dtype.
        norm_weight: ``[n]``.
        norm_bias: ``[n]``.
        activation: One of `ACTIVATIONS`.
        residual: ``[m, n]``, bfloat16, columns contiguous, any row stride, as are the next three.
        residual_last: Whether the residual is added to the output, not to the sums.
        gate: ``[m, n]``.
        x0: Of the cross, ``[m, n]``.
        x: As `x0`.
    """

    norm: Norm = NO_NORM
    bias: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    activation: str = "none"
    residual: Tensor | None = None
    residual_last: bool = False
    gate: Tensor | None = None
    x0: Tensor | None = None
    x: Tensor | None = None

    @property
    def form(self) -> NormForm:
        """All but the tensors."""
        last = self.activation
        if self.gate is not None:
            last = "gate"
        elif self.x0 is not None:
            last = "cross"
        return NormForm(
            self.norm,
            self.bias is not None,
            self.residual is not None and not self.residual_last,
            self.norm_weight is not None or self.norm_bias is not None,
            last,
            self.residual is not None and self.residual_last,
        )

    def name(self) -> str:
        """Its name in `Problem.epilogue`."""
        return str(self.form)


class NormForm(NamedTuple):
    """Parts of an epilogue with a norm, as named by `Problem.epilogue`.

    Attributes:
        norm: Of rows, or of blocks of them; eps is the usual.
        bias: Whether there is one.
        residual: Whether one is added before the norm.
        affine: Whether the norm has a weight or a bias.
        last: An activation, "gate" or "cross".
        residual_last: Whether one is added at the end.
    """

    norm: Norm = NO_NORM
    bias: bool = False
    residual: bool = False
    affine: bool = False
    last: str = "none"
    residual_last: bool = False

    @property
    def beside(self) -> tuple[str, ...]:
        """The words for what reads matrices of the output's shape, in order; a cross reads two."""
        words = ("residual" * self.residual, self.last, "residual_last" * self.residual_last)
        return tuple(word for word in words if word in BESIDE)

    @property
    def is_bounded(self) -> bool:
        """Whether the norm bounds the output, which then has a static scale."""
        return self.norm.kind != "none" and self.last in ACTIVATIONS and not self.residual_last

    def __str__(self) -> str:
        words = [
            "bias" if self.bias else "",
            "residual" if self.residual else "",
            "" if self.norm.kind == "none" else str(self.norm),
            "affine" if self.affine else "",
            "" if self.last == "none" else self.last,
            "residual_last" if self.residual_last else "",
        ]
        return "+".join(word for word in words if word) or "none"


_LAST = (*ACTIVATIONS[1:], "gate", "cross")


def norm_form(text: str) -> NormForm:
    """Reads what ``str`` of a `NormForm` wrote.

    Raises:
        UnknownNameError: It did not write this.
    """
    words = [] if text == "none" else text.split("+")
    rest = [word for word in words if word not in ("bias", "residual", "affine", "residual_last")]
    last = rest.pop() if rest and rest[-1] in _LAST else "none"
    try:
        norm = norm_named(rest.pop()) if rest else NO_NORM
    except UnknownNameError:
        rest = [text]
        norm = NO_NORM
    form = NormForm(
        norm, "bias" in words, "residual" in words, "affine" in words, last,
        "residual_last" in words,
    )  # fmt: skip
    if rest or str(form) != text:  # an order, or a word, that nothing writes
        raise UnknownNameError(
            f"epilogue {text!r} is unknown; expected words of bias, residual, a norm "
            f"({', '.join(KINDS[:-1])}), affine, one of {', '.join(_LAST)}, and residual_last, in "
            "this order, joined by +"
        )
    return form
