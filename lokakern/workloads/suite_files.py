"""Suites from TOML files of users.

    name = "my-model"
    title = "layers of my model"           # default: the name of the file

    [[layer]]                              # Y[m, n] = X[m, k] W[n, k]^T + bias[n]
    m = [2048, 8192]                       # or one integer
    n = 512
    k = 1024
    distribution = "X5"                    # of X; default X1
    bias = true                            # default false
    format = "float32"                     # of X, W and Y, or float16; default bfloat16
    name = "mlp.0"                         # for `explain --shapes`; default "layer 1"
    count = 3                              # for the same, uses in a step; default 1
    forms = ["gemm", "prepared", "scaled_gemm", "quantize", "grad_input", "grad_weight"]

    [[layer]]
    m = 27
    n = 27
    k = 128
    batch = 2048                           # products at once; default 1
    forms = ["gemm", "grad_input"]

    [[layer]]
    m = 8192
    n = 2048
    k = 2048
    activation = "relu"                    # before the product: for form "activate" only
    forms = ["prepared", "activate"]

    [[layer]]
    m = [2048, 8192]
    n = 1024
    k = 1024
    epilogue = "bias+layer+affine+relu"    # after the product: for form "chain" only
    forms = ["chain"]

Forms are the problems of a layer: ``gemm`` of unquantized operands, ``prepared`` with a prepared W
(tensor, row and 128x128 scales), ``scaled_gemm`` of quantized operands, ``quantize`` of X (tensor,
row and 1x128 scales), and the gradients, timed on X12: ``grad_input`` (W as stored, and prepared
with row and 128x128 scales) and ``grad_weight``. ``cross_gradient`` is of a layer in a DCN cross,
``x0 * (W x + bias) + x``: the gradient of its output, multiplied by x0, summed for the bias, and
quantized with 1x128 scales for both gradients behind it, in one kernel. ``activate`` is an
activation of `lokakern.epilogue` and rowwise quantization of X in one kernel. ``chain`` is the
layer with its epilogue in op gemm_norm, in the formats between which a chain of layers chooses: X
unquantized, with rowwise and with 1x128 scales, the output likewise, or with a static scale where a
norm bounds it. An epilogue is a bias, a residual, a norm (layer, rms or block_rms(columns), with
affine), an activation, a gate or a cross, and a residual_last, joined by +, such as "bias+relu",
"bias+cross" or "bias+layer+affine+relu+residual_last". The default is gemm,
prepared and quantize; for a batch gemm, because no quantized form has batches. ``bias`` applies to
gemm and prepared. A scaled GEMM writes bfloat16, and activate and cross_gradient read it, so that
layers in float16 and float32 have none of them, and chain takes no float32.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lokakern.epilogue import ACTIVATIONS, norm_form
from lokakern.errors import ShapeError, SuiteError, UnknownNameError
from lokakern.registry.register import ANY
from lokakern.render.did_you_mean import did_you_mean
from lokakern.types import Format, Granularity
from lokakern.workloads.distributions import distribution_named
from lokakern.workloads.drawn_sizes import DRAWN, drawn_suite
from lokakern.workloads.gemm_cases import (
    LEFT_SCALES,
    PREPARED_FORMS,
    Case,
    prepared_cases,
    quantize_case,
    scaled_gemm_cases,
    unquantized_case,
)
from lokakern.workloads.gemm_gradient_cases import (
    PREPARED_BACKWARD_FORMS,
    grad_input_cases,
    grad_weight_case,
)
from lokakern.workloads.norm_cases import (
    MOST_CHAIN_CASES,
    chain_layer_cases,
    cross_backward_case,
    norm_quantize_case,
)
from lokakern.workloads.suites import SUITES, Suite

LARGEST_FILE_BYTES = 2**20
MOST_CASES = 100_000
LARGEST_SIZE = 2**31 - 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}")
FILE_KEYS = ("name", "title", "layer")
FORMATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Layer:
    """A ``[[layer]]``, checked."""

    name: str
    count: int
    m: tuple[int, ...]
    n: int
    k: int
    distribution: str
    bias: bool
    batch: int
    format: Format
    forms: tuple[str, ...]
    activation: str = ""
    epilogue: str = ""


def _cases(form: str, layer: Layer, m: int, fp8: Format) -> Iterator[Case]:
    n, k, distribution = layer.n, layer.k, layer.distribution
    epilogue = "bias" if layer.bias else "none"
    match form:
        case "gemm":
            yield unquantized_case(
                m, n, k, distribution, layer.format, epilogue=epilogue, batch=layer.batch
            )
        case "prepared":
            yield from prepared_cases(m, n, k, distribution, fp8, layer.format, epilogue=epilogue)
        case "scaled_gemm":
            yield from scaled_gemm_cases(m, n, k, distribution, fp8)
        case "quantize":
            for granularity in LEFT_SCALES:
                yield quantize_case(m, k, granularity, distribution, fp8, layer.format)
        case "grad_input":
            yield from grad_input_cases(m, n, k, fp8, layer.format, batch=layer.batch)
        case "grad_weight":
            yield grad_weight_case(m, n, k, layer.format, batch=layer.batch)
        case "cross_gradient":
            yield cross_backward_case(m, n, fp8)
        case "chain":
            yield from chain_layer_cases(
                m, n, k, layer.epilogue, distribution, fp8, half=layer.format
            )
        case _:
            row = Granularity.ROW
            yield norm_quantize_case(m, k, layer.activation, distribution, fp8, row)


# Forms, with the largest number of their cases at one m.
FORMS = {
    "gemm": 1, "prepared": len(PREPARED_FORMS), "scaled_gemm": len(LEFT_SCALES),
    "quantize": len(LEFT_SCALES), "grad_input": 1 + len(PREPARED_BACKWARD_FORMS),
    "grad_weight": 1, "cross_gradient": 1, "activate": 1, "chain": MOST_CHAIN_CASES,
}  # fmt: skip
DEFAULT_FORMS = ("gemm", "prepared", "quantize")
BATCHED_FORMS = ("gemm", "grad_input", "grad_weight")


def suite_named(name: str) -> Suite:
    """The suite with a name, or from a file whose name ends in ``.toml``.

    ``drawn-7`` draws sizes with seed 7 (`lokakern.workloads.drawn_sizes`), and names with commas
    between them are one suite.

    Raises:
        UnknownNameError: The suite is unknown.
        SuiteError: The file cannot be read, or is not a suite.
    """
    if "," not in name or os.path.isfile(name):  # of names that no file can have, too
        return _one_suite(name)
    parts = [_one_suite(part.strip()) for part in name.split(",")]

    def build(fp8: Format) -> Iterator[Case]:
        return itertools.chain.from_iterable(part.build(fp8) for part in parts)

    for_some = {part.name: part.architectures for part in parts if part.architectures != ANY}
    if for_some:
        raise UnknownNameError(
            f"suite {name!r}: {', '.join(for_some)} is not for every GPU; give it alone"
        )
    return Suite(", ".join(part.name for part in parts), "several suites", build)


def _one_suite(name: str) -> Suite:
    if name.endswith(".toml"):
        return suite_from_file(Path(name))
    if name.startswith(DRAWN):
        return drawn_suite(name)
    try:
        return SUITES[name]
    except KeyError:
        raise UnknownNameError(
            f"suite {name!r} is unknown; {did_you_mean(name, SUITES)}expected one of "
            f"{', '.join(SUITES)}, a name such as {DRAWN}7 (sizes drawn with seed 7), or a file "
            "that ends in .toml"
        ) from None


def suite_from_file(path: str | Path) -> Suite:
    """The suite in a TOML file.

    Raises:
        SuiteError: The file cannot be read, is larger than 1 MiB, is not TOML, has more than
            100,000 problems, or has an unknown, missing or invalid entry.
    """
    path = Path(path)
    table = _table_of(path)
    title = _text(table, "title", f"suite {path}") if "title" in table else path.name
    layers = _layers_of(table, path)
    count = sum(len(layer.m) * FORMS[form] for layer in layers for form in layer.forms)
    if count > MOST_CASES:
        raise SuiteError(
            f"suite {path}: has {count} problems; expected at most {MOST_CASES}: use fewer sizes "
            "of m or fewer forms"
        )

    def build(fp8: Format) -> Iterator[Case]:
        for layer in layers:
            for m in layer.m:
                for form in layer.forms:
                    yield from _cases(form, layer, m, fp8)

    return Suite(table["name"], title, build)


def layers_from_file(path: str | Path) -> list[Layer]:
    """The layers in a TOML file.

    Raises:
        SuiteError: As `suite_from_file`.
    """
    path = Path(path)
    return _layers_of(_table_of(path), path)


def _table_of(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # too many brackets
        raise SuiteError(f"suite {path}: is not TOML: {error}") from None
    check_keys(table, FILE_KEYS, f"suite {path}")
    name = _text(table, "name", f"suite {path}")
    if not NAME.fullmatch(name) or name in SUITES or name.startswith(DRAWN):
        raise SuiteError(
            f"suite {path}: name is {name!r}; expected letters, digits, blanks, dots, dashes and "
            f"underscores, at most 100, and not {', '.join(SUITES)} or {DRAWN}..."
        )
    return table


def _layers_of(table: dict[str, Any], path: Path) -> list[Layer]:
    entries = table.get("layer")
    if not isinstance(entries, list) or not entries:
        raise SuiteError(f"suite {path}: found no [[layer]]; expected at least one")
    return [_layer(entry, i, f"suite {path}, layer {i}") for i, entry in enumerate(entries, 1)]


def read_text(path: Path) -> str:
    """A small file of text, without the mark (BOM) that some programs put first.

    Raises:
        SuiteError: It cannot be read, is larger than 1 MiB, or is not UTF-8.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe may never end
            raise SuiteError(f"suite {path}: cannot be read: it is not a regular file")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SuiteError(f"suite {path}: cannot be read: {reason}") from None
    if len(data) > LARGEST_FILE_BYTES:
        raise SuiteError(f"suite {path}: is larger than {LARGEST_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except ValueError as error:
        raise SuiteError(f"suite {path}: is not text in UTF-8: {error}") from None


def check_keys(table: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    unknown = sorted(table.keys() - set(keys))
    if unknown:
        raise SuiteError(f"{where}: has no entry {unknown[0]!r}; expected one of {', '.join(keys)}")


def _text(table: dict[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        found = "missing" if value is None else shown(value)
        raise SuiteError(f"{where}: {key} is {found}; expected a line of text")
    return value


def shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def size_of(value: object, key: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
        found = "missing" if value is None else shown(value)
        raise SuiteError(f"{where}: {key} is {found}; expected an integer from 1 to {LARGEST_SIZE}")
    return value


LAYER_KEYS = (
    "m", "n", "k", "distribution", "bias", "batch", "format", "activation", "epilogue", "forms",
    "name", "count",
)  # fmt: skip


def _layer(entry: object, place: int, where: str) -> Layer:
    if not isinstance(entry, dict):
        raise SuiteError(f"{where}: is {shown(entry)}; expected a table, [[layer]]")
    check_keys(entry, LAYER_KEYS, where)
    given = entry.get("m")
    many = given if isinstance(given, list) else [given]
    if not many:
        raise SuiteError(f"{where}: m is empty; expected one integer or more")
    batch = size_of(entry.get("batch", 1), "batch", where)
    bias = entry.get("bias", False)
    if not isinstance(bias, bool):
        raise SuiteError(f"{where}: bias is {shown(bias)}; expected true or false")
    form = entry.get("format", "bfloat16")
    if form not in FORMATS:
        known = ", ".join(FORMATS)
        raise SuiteError(f"{where}: format is {shown(form)}; expected one of {known}")
    forms = _forms(entry, batch, Format(form), where)
    activation = entry.get("activation", "")
    known = ", ".join(ACTIVATIONS[1:])
    if activation not in ("", *ACTIVATIONS[1:]):
        raise SuiteError(f"{where}: activation is {shown(activation)}; expected one of {known}")
    if ("activate" in forms) != bool(activation):
        raise SuiteError(
            f"{where}: activation is {shown(activation)} and forms are {', '.join(forms)}; form "
            f"'activate' goes with an activation, one of {known}"
        )
    n = size_of(entry.get("n"), "n", where)
    epilogue = _epilogue(entry.get("epilogue", ""), n, forms, where)
    return Layer(
        name=_text(entry, "name", where) if "name" in entry else f"layer {place}",
        count=size_of(entry.get("count", 1), "count", where),
        m=tuple(dict.fromkeys(size_of(size, "m", where) for size in many)),
        n=n,
        k=size_of(entry.get("k"), "k", where),
        distribution=_distribution(entry.get("distribution", "X1"), where),
        bias=bias,
        batch=batch,
        format=Format(form),
        forms=forms,
        activation=activation,
        epilogue=epilogue,
    )


def _epilogue(value: object, n: int, forms: tuple[str, ...], where: str) -> str:
    """The epilogue of form "chain", "" without that form."""
    if not isinstance(value, str):
        raise SuiteError(f"{where}: epilogue is {shown(value)}; expected text such as 'bias+relu'")
    if ("chain" in forms) != bool(value):
        raise SuiteError(
            f"{where}: epilogue is {shown(value)} and forms are {', '.join(forms)}; form 'chain' "
            "goes with an epilogue, such as 'bias+relu' or 'none'"
        )
    if not value:
        return ""
    try:
        norm_form(value).norm.span(n)
    except (UnknownNameError, ShapeError) as error:
        raise SuiteError(f"{where}: epilogue is {shown(value)}: {error}") from None
    return value


def _distribution(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise SuiteError(f"{where}: distribution is {shown(value)}; expected a name such as X1")
    try:
        return distribution_named(value).name
    except UnknownNameError as error:
        raise SuiteError(f"{where}: {error}") from None


def _forms(entry: dict[str, Any], batch: int, form: Format, where: str) -> tuple[str, ...]:
    default = DEFAULT_FORMS if batch == 1 else ("gemm",)
    forms = entry.get("forms", list(default))
    if not isinstance(forms, list) or not forms:
        raise SuiteError(f"{where}: forms is {shown(forms)}; expected a list of {', '.join(FORMS)}")
    for name in forms:
        if not isinstance(name, str) or name not in FORMS:
            raise SuiteError(
                f"{where}: forms holds {shown(name)}; expected some of {', '.join(FORMS)}"
            )
        if batch != 1 and name not in BATCHED_FORMS:
            raise SuiteError(
                f"{where}: form {name!r} takes no batch, and batch is {batch}; expected some of "
                f"{', '.join(BATCHED_FORMS)}"
            )
        is_known = form is Format.BFLOAT16 or (form is Format.FLOAT16 and name == "chain")
        if not is_known and name in ("scaled_gemm", "cross_gradient", "activate", "chain"):
            verb = "writes" if name == "scaled_gemm" else "reads"
            raise SuiteError(
                f"{where}: form {name!r} {verb} bfloat16; leave it out of {form.value}"
            )
    return tuple(dict.fromkeys(forms))
