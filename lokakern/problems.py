"""Problems: as a caller asks for them, as errors are stored, and their unquantized baseline."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lokakern.epilogue import ACTIVATIONS
from lokakern.errors import FormatError, ShapeError, UnknownNameError
from lokakern.registry.ops import EPILOGUE_OPS, op_named
from lokakern.types import (
    Epilogue,
    Format,
    Granularity,
    Layout,
    NormForm,
    Operand,
    Problem,
    alignment_of,
    norm_form,
)

ACCURACY_ROWS = 2048  # error is measured at this m
# And at no larger k where samples run along it: sums of more samples err alike, because signal and
# noise add up alike, but for the amax that a scale over more samples sees.
ACCURACY_SAMPLES = 1024
# Of the bias, and of a norm's weight and bias, where nothing says: of measurements, and compiled
# for ahead. `Problem` does not tell it.
NORM_VECTORS = Format.FLOAT32


def format_named(op: str, value: Format | str) -> Format:
    try:
        return Format(value)
    except ValueError:
        known = ", ".join(f.value for f in Format)
        raise FormatError(f"{op}: format is {value!r}; expected one of {known}") from None


def _integers(shape: object) -> tuple[int, ...]:
    """Sizes as Python integers; empty where one is none."""
    try:
        sizes: tuple[Any, ...] = tuple(shape)  # type: ignore[arg-type]
        return () if any(isinstance(s, bool) for s in sizes) else tuple(map(operator.index, sizes))
    except TypeError:
        return ()


def make_problem(op: str, shape: Sequence[int], **fields: Any) -> Problem:
    """A problem with the usual operands: bfloat16, a row-major, b column-major, aligned by k.

    Args:
        op: Name of an op.
        shape: Sizes in the order of the op's axes: ``(m, n, k)`` or ``(m, k)``.
        fields: Fields of `Problem` that differ from the usual.

    Raises:
        UnknownNameError: No such op, a field that `Problem` does not have, or an epilogue that an
            op with a norm does not have.
        ShapeError: Wrong number of sizes, or a size that is not an integer of at least 0 (m), 1;
            a batch that is not an integer of at least 1; blocks of a norm that do not divide a row.
    """
    axes = op_named(op).axes
    known = {f.name for f in dataclasses.fields(Problem)} - {"op", "m", "n", "k"}
    unknown = ", ".join(sorted(fields.keys() - known))
    if unknown:
        raise UnknownNameError(
            f"{op}: a problem has no field {unknown}; expected {', '.join(sorted(known))}"
        )
    sizes = _integers(shape)
    usable = len(sizes) == len(axes) and all(
        size >= (0 if place == 0 else 1) for place, size in enumerate(sizes)
    )
    if not usable:
        raise ShapeError(
            f"{op}: shape is {shape!r}; expected ({', '.join(axes)}), integers, m >= 0, others >= 1"
        )
    if "batch" in fields:
        batch = _integers((fields["batch"],))
        if not batch or batch[0] < 1:
            raise ShapeError(f"{op}: batch is {fields['batch']!r}; expected an integer >= 1")
        fields["batch"] = batch[0]
    m, k = sizes[0], sizes[-1]
    n = sizes[1] if len(sizes) == 3 else 1
    for name in ("a", "b"):
        if fields.get(name) is not None and not isinstance(fields[name], Operand):
            raise FormatError(
                f"{op}: {name} is {fields[name]!r}; expected a lokakern.types.Operand"
            )
    if "out_format" in fields:
        fields["out_format"] = format_named(op, fields["out_format"])
    a = fields.pop("a", None)
    b = fields.pop("b", None)
    if op in ("quantize", "quantize_transpose"):
        fields = {"out_format": Format.E4M3FN, "out_granularity": Granularity.ROW, **fields}
    if op in ("dequantize", "scaled_gemm"):
        a = a or Operand(Format.E4M3FN, Granularity.ROW)
    a = a or Operand(Format.BFLOAT16, Granularity.NONE, Layout.ROW, alignment_of(k * 2))
    if op in EPILOGUE_OPS:
        _check_norm(op, (m, n, k), fields)
    if op in ("gemm", "scaled_gemm", "gemm_norm"):
        wide = a.granularity is Granularity.GROUP
        granularity = Granularity.BLOCK if wide else a.granularity
        # b's contiguous axis is k, as a's is unless a is transposed. FP8 rows are padded.
        along_k = a.layout is Layout.ROW or a.format.is_fp8
        alignment = a.alignment if along_k else alignment_of(k * a.format.dtype.itemsize)
        b = b or Operand(a.format, granularity, Layout.COLUMN, alignment)
        if op == "gemm":
            fields.setdefault("out_format", a.format)
    return Problem(op=op, m=m, n=n, k=k, a=a, b=b, **fields)


def _check_norm(op: str, shape: tuple[int, int, int], fields: dict[str, Any]) -> None:
    """Check the epilogue of an op with a norm; an FP8 output usually has row, or 1x128, scales."""
    form = norm_form(fields.get("epilogue", "none"))
    try:
        form.norm.span(row_length(op, shape))
    except ShapeError as error:
        raise ShapeError(f"{op}: {error}") from None
    usual = Format.BFLOAT16 if op == "gemm_norm" else Format.E4M3FN
    out = fields.setdefault("out_format", usual)
    scales = Granularity.GROUP if op == "norm_backward" else Granularity.ROW
    fields.setdefault("out_granularity", scales if out.is_fp8 else Granularity.NONE)


def row_length(op: str, shape: tuple[int, int, int]) -> int:
    """Columns of what an op with a norm normalizes, of its m, n and k."""
    return shape[1] if op == "gemm_norm" else shape[2]


def is_plain(problem: Problem) -> bool:
    """Whether a launcher needs no `Epilogue`: the kernel adds a bias at most, to one product.

    Not asked of ops with a norm, whose launchers always get a `NormEpilogue`.
    """
    scaled = problem.op == "scaled_gemm"
    return not scaled or (
        problem.epilogue in ("none", "bias")
        and not problem.accumulate
        and not problem.out_format.is_fp8
        and problem.batch == 1
    )


def epilogue_of(
    problem: Problem, x0: Tensor | None, x: Tensor | None, out_scale: Tensor | None
) -> Epilogue:
    """Epilogue that a launcher of a scaled GEMM gets at a problem, with groups of equal rows."""
    last = problem.epilogue.split("+")[-1]
    return Epilogue(
        last if last in ACTIVATIONS else "none",
        x0,
        x,
        out_scale,
        problem.accumulate,
        problem.batch,
    )


def scaling_of(problem: Problem) -> str:
    """Source of a quantizer's scales: "none", "power_of_two", "static" or "delayed"."""
    words = [word for word in problem.epilogue.split("+") if word != "column_sums"]
    return words[0] if words else "none"


def has_column_sums(problem: Problem) -> bool:
    """Whether a quantizer adds up the columns of what it reads, too."""
    return problem.epilogue.endswith("column_sums")


def bias_format(problem: Problem) -> Format:
    """Of the bias: the output's, bfloat16 where that is FP8."""
    return Format.BFLOAT16 if problem.out_format.is_fp8 else problem.out_format


def source_format(problem: Problem) -> Format:
    """The format from which quantized operands are made: float16 where that is written, too."""
    return Format.FLOAT16 if problem.out_format is Format.FLOAT16 else Format.BFLOAT16


def sums_over_samples(problem: Problem) -> bool:
    """Whether the samples of a batch run along k: ``dW = dY^T X`` of operands as they lie."""
    return (
        problem.b is not None
        and problem.a.layout is Layout.COLUMN
        and problem.b.layout is Layout.ROW
    )


def accuracy_problem(problem: Problem, fp8: Format) -> Problem:
    """The problem under which the error of a numerics class is stored.

    What does not change the error is set to its usual value: layout, alignment, preparation,
    strides of the output, bias, batch, and m. One scale may span all rows, but operands have at
    most 2048 distinct ones, so that its amax is the same at any larger m. A scaled GEMM in
    ``fp8``, the format that a GEMM quantizes to on the device, has the error of that GEMM, because
    quantizing is exact in every kernel. Where samples run along k (the gradient of a weight) the
    layouts stay, because a scale of a row spans samples there, and k is at most 1024. What comes
    after the sums is left out, but for the format of the output, and a norm with the activation
    after it: a norm enlarges errors where rows have a common mean. Quantized operands of a GEMM
    with a norm are treated as those of a scaled GEMM.
    """
    op, a, b = problem.op, problem.a, problem.b
    scaled = op in ("scaled_gemm", "gemm_norm")
    if scaled and b is not None and (a.format, b.format) == (fp8, fp8):
        op = "gemm" if op == "scaled_gemm" else op
        a = b = Operand(source_format(problem))
    along_k = sums_over_samples(problem)
    a = replace(a, layout=Layout.COLUMN if along_k else Layout.ROW, alignment=16)
    if b is not None:
        plain = op == "gemm" or (op == "gemm_norm" and not a.format.is_fp8)
        form = a.format if plain else b.format
        layout = Layout.ROW if along_k else Layout.COLUMN
        b = Operand(form, Granularity.NONE if plain else b.granularity, layout, 16)
    return replace(
        problem,
        op=op,
        a=a,
        b=b,
        m=ACCURACY_ROWS,
        k=min(problem.k, ACCURACY_SAMPLES) if along_k else problem.k,
        accumulate=False,
        batch=1,
        prepared=False,
        out_strided=False,
        epilogue=_accuracy_epilogue(problem),
    )


def _accuracy_epilogue(problem: Problem) -> str:
    if problem.op not in EPILOGUE_OPS:
        return "none"
    form = norm_form(problem.epilogue)
    return str(NormForm(form.norm, last=form.last if form.last in ACTIVATIONS else "none"))


PADDED = "torch.bf16_padded"
_PADDED_TO = 8  # elements of 16 bits: rows of 16 bytes


def padded_sizes(problem: Problem) -> tuple[int, int, int]:
    """m, n and k of a GEMM that `PADDED` computes: multiples of 8 along contiguous axes."""

    def up(size: int, least: int = 2) -> int:
        return size if size < least else -(-size // _PADDED_TO) * _PADDED_TO

    m, n, k = problem.m, problem.n, problem.k
    is_along_m = problem.a.layout is Layout.COLUMN
    is_along_k = (
        not is_along_m
        or problem.prepared
        or (problem.b is not None and problem.b.layout is Layout.COLUMN)
    )
    return up(m) if is_along_m else m, up(n), up(k, 1) if is_along_k else k


def baseline_name(problem: Problem) -> str | None:
    """The unquantized kernel that is legal whatever the budget; None for ops without one.

    Of a GEMM with a norm it is that of bfloat16 operands: quantized ones leave no choice.
    """
    if problem.op == "gemm_norm" and not problem.a.format.is_fp8:
        return "torch.norm_unfused"
    if problem.op != "gemm":
        return None
    return "torch.fp32" if problem.a.format is Format.FLOAT32 else "torch.bf16"
