"""Suites: named lists of problems with input distributions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lokakern.registry.register import ANY, fp8_format
from lokakern.types import GROUP, Device, Format, Granularity, Layout, Operand
from lokakern.workloads import published_models, zoo_layers
from lokakern.workloads.gemm_cases import (
    LEFT_SCALES,
    dequantize_case,
    fused_case,
    quantize_case,
    quantized_output,
    scaled_gemm_cases,
    unquantized_case,
    whole_gemm_cases,
)
from lokakern.workloads.gemm_cases import PREPARED_FORMS as PREPARED_FORMS
from lokakern.workloads.gemm_cases import Case as Case
from lokakern.workloads.gemm_cases import gemm_cases as gemm_cases
from lokakern.workloads.gemm_cases import shape_cases as shape_cases
from lokakern.workloads.gemm_gradient_cases import (
    GRADIENTS,
    WIDE_RANGE,
    grad_input_cases,
    grad_weight_case,
    main_grad_case,
)
from lokakern.workloads.norm_cases import (
    BACKWARD_SHAPES,
    chain_layer_cases,
    chained_cases,
    cross_backward_case,
    gemm_norm_case,
    gemm_norm_cases,
    grouped_norm_cases,
    norm_backward_cases,
    norm_quantize_cases,
)


@dataclass(frozen=True, slots=True)
class Suite:
    """A named list of cases, in the FP8 format of the device; empty on other architectures."""

    name: str
    title: str
    build: Callable[[Format], Iterable[Case]]
    architectures: frozenset[str] = ANY

    def cases(self, device: Device) -> list[Case]:
        if self.architectures != ANY and device.architecture not in self.architectures:
            return []
        return list(dict.fromkeys(self.build(fp8_format(device))))


def _smoke(fp8: Format) -> Iterator[Case]:
    for m in (512, 2048):
        yield from gemm_cases(m, 256, 256, "X1", fp8)
    yield quantize_case(256, 256, Granularity.BLOCK, "X1", fp8)
    yield dequantize_case(512, 256, Granularity.ROW, "X1", fp8)


# m x (n, k): small and large batches, layer sizes of recommendation models.
ANCHOR_M = (2048, 8192, 32768)
ANCHOR_N_K = (
    (128, 128), (256, 256), (512, 512), (1024, 1024), (2048, 2048),
    (256, 1024), (1024, 256), (512, 2048), (2048, 512),
)  # fmt: skip


def _anchors(fp8: Format) -> Iterator[Case]:
    for m in ANCHOR_M:
        for n, k in ANCHOR_N_K:
            yield from gemm_cases(m, n, k, "X1", fp8)
            yield from whole_gemm_cases(m, n, k, "X1", fp8, epilogue="bias")
            yield quantize_case(n, k, Granularity.BLOCK, "X1", fp8)
            yield dequantize_case(m, k, Granularity.ROW, "X1", fp8)
            yield from gemm_norm_cases(m, n, k, "X1", fp8)
    for granularity in (Granularity.TENSOR, Granularity.GROUP, Granularity.BLOCK):
        yield dequantize_case(8192, 1024, granularity, "X1", fp8)
    for n, k in ((512, 512), (1024, 1024), (2048, 2048)):
        wide = Operand(Format.FLOAT32, Granularity.NONE, Layout.ROW)
        yield Case.of("gemm", (8192, n, k), "X1", a=wide)


GROUPED_NORM_SHAPES = ((2048, 512, 512), (8192, 1024, 1024), (32768, 512, 2048), (32768, 2048, 512))
CHAINED_N_K = ((512, 512),)  # of consecutive layers
LONG_ROWS = 2048  # least columns for a norm in a separate kernel


def _norms(fp8: Format) -> Iterator[Case]:
    for m in ANCHOR_M:
        for n, k in ANCHOR_N_K:
            yield from gemm_norm_cases(m, n, k, "X1", fp8)
        for n, k in CHAINED_N_K:
            yield from chained_cases(m, n, k, "X1", fp8)
    for m, n, k in GROUPED_NORM_SHAPES:
        yield from grouped_norm_cases(m, n, k, "X1", fp8)
    long = [(m, n) for m in ANCHOR_M for n, _ in ANCHOR_N_K if n >= LONG_ROWS]
    for m, k in (*QUANTIZER_SHAPES, *long):
        yield from norm_quantize_cases(m, k, "X1", fp8)
    for m, k in BACKWARD_SHAPES:
        yield from norm_backward_cases(m, k, fp8)


# m of scaled GEMMs; other sizes follow from `gemm` and quantizers.
SCALED_M = 2048
SCALED = (Granularity.ROW, Granularity.GROUP)
TENSOR_QUANTIZE_M = (2048, 20480)


def _lrm(fp8: Format) -> Iterator[Case]:
    quantized: set[tuple[int, int]] = set()
    in_one_scale: set[int] = set()
    for layer in published_models.LAYERS:
        n, k, distribution = layer.n, layer.k, layer.distribution
        epilogue = "bias" if layer.bias else "none"
        sizes = layer.sizes()
        for batch, m in sizes:
            if batch != 1:
                yield unquantized_case(m, n, k, distribution, epilogue=epilogue, batch=batch)
                continue
            yield from whole_gemm_cases(m, n, k, distribution, fp8, epilogue=epilogue)
            if m in (SCALED_M, sizes[-1][1]):
                yield from scaled_gemm_cases(m, n, k, distribution, fp8, SCALED)
            if (m, k) not in quantized:  # layers with the same X share its quantization
                quantized.add((m, k))
                for granularity in SCALED:
                    yield quantize_case(m, k, granularity, distribution, fp8)
            if m in TENSOR_QUANTIZE_M and m * k not in in_one_scale:
                in_one_scale.add(m * k)
                yield quantize_case(m, k, Granularity.TENSOR, distribution, fp8)
    yield from _fused(fp8)


def _fused(fp8: Format) -> Iterator[Case]:
    """Scaled GEMMs with epilogues, FP8 outputs and groups."""
    row, to_fp8 = Granularity.ROW, quantized_output(fp8, Granularity.TENSOR)
    for names, epilogue, out in (
        (published_models.RELU_TO_FP8, "bias+relu", to_fp8),
        (published_models.CROSS, "bias+cross", {}),
        (published_models.SILU, "bias+silu", {}),
    ):
        for layer in map(published_models.layer_named, names):
            for _, m in layer.sizes(published_models.FUSED_BATCHES)[:2]:
                n, k, distribution = layer.n, layer.k, layer.distribution
                yield fused_case(m, n, k, row, distribution, fp8, epilogue, **out)
    for layer in map(published_models.layer_named, published_models.GROUPED):
        batch, m = layer.sizes((SCALED_M,))[0]
        scales = SCALED if layer.k % GROUP == 0 and layer.batch else (row,)
        for granularity in scales:
            yield fused_case(m, layer.n, layer.k, granularity, layer.distribution, fp8,
                             batch=batch)  # fmt: skip


def _lrm_backward(fp8: Format) -> Iterator[Case]:
    for layer in published_models.LAYERS:
        for batch, m in layer.sizes(published_models.BACKWARD_BATCHES):
            yield from grad_input_cases(m, layer.n, layer.k, fp8, batch=batch)
        wide = layer.per_sample > 1
        batches = (
            published_models.WIDE_GRAD_WEIGHT_BATCHES if wide else published_models.BACKWARD_BATCHES
        )
        for batch, m in layer.sizes(batches):
            yield grad_weight_case(m, layer.n, layer.k, batch=batch)
    for name, samples in published_models.MAIN_GRAD.items():
        layer = published_models.layer_named(name)
        for _, m in layer.sizes(samples):
            for form in (WIDE_RANGE[fp8], fp8):
                yield main_grad_case(m, layer.n, layer.k, form, fp8)
    for layer in map(published_models.layer_named, published_models.CROSS):
        for _, m in layer.sizes(published_models.BACKWARD_BATCHES):
            yield cross_backward_case(m, layer.n, fp8)


def _zoo(fp8: Format) -> Iterator[Case]:
    for layer in zoo_layers.LAYERS:
        for batch in zoo_layers.BATCHES:
            m, n, k = batch * layer.per_sample, layer.n, layer.k
            yield from whole_gemm_cases(m, n, k, layer.distribution, fp8)
            yield from grad_input_cases(m, n, k, fp8)
            yield grad_weight_case(m, n, k)
            wide_n, wide_k = (-(-size // 8) * 8 for size in (n, k))
            if (wide_n, wide_k) != (n, k):  # a compiler pads rows, so that FP8 competes with these
                yield unquantized_case(m, wide_n, wide_k, layer.distribution)
                yield next(grad_input_cases(m, wide_n, wide_k, fp8))
                yield grad_weight_case(m, wide_n, wide_k)


def _zoo_chains(fp8: Format) -> Iterator[Case]:
    for layer in zoo_layers.CHAIN_LAYERS:
        for m in zoo_layers.BATCHES:
            yield from chain_layer_cases(
                m, layer.n, layer.k, layer.epilogue, layer.distribution, fp8, first=layer.first,
                later=layer.later,
            )  # fmt: skip


# Blocks around their input: post-norm, pre-activation and gated ones.
RESIDUAL_COLUMNS, RESIDUAL_M = (512, 1024), (2048, 8192)
RESIDUAL_EPILOGUES = (
    "bias+residual+layer+affine", "bias+layer+affine+relu+residual_last", "bias+gate",
)  # fmt: skip


def _residuals(fp8: Format) -> Iterator[Case]:
    for columns in RESIDUAL_COLUMNS:
        for epilogue in RESIDUAL_EPILOGUES:
            for m in RESIDUAL_M:
                yield from chain_layer_cases(m, columns, columns, epilogue, "X3", fp8)


# Feed-forward layers of transformers, an MLP and a tower with GELU: outputs, inputs, epilogue,
# whether a chain may begin there, whether the layer may follow another.
GELU_LAYERS = (
    (1024, 256, "bias+gelu", True, False), (256, 1024, "bias", False, True),
    (2048, 512, "bias+gelu", True, False), (512, 2048, "bias", False, True),
    (1024, 1024, "bias+gelu", True, True), (512, 1024, "bias+gelu", False, True),
    (1024, 1024, "bias+layer+affine+gelu", True, True),
    (512, 1024, "bias+layer+affine+gelu", False, True),
)  # fmt: skip
GELU_M = (2048, 8192, 32768)


def _gelu(fp8: Format) -> Iterator[Case]:
    for n, k, epilogue, first, later in GELU_LAYERS:
        for m in GELU_M:
            given = (m, n, k, epilogue, "X8" if later else "X3", fp8)
            yield from chain_layer_cases(*given, first=first, later=later)
    row = quantized_output(fp8, Granularity.ROW)
    for n in (512, 1024, 2048):
        for m in GELU_M:
            yield Case.of("norm_quantize", (m, n), "X3", epilogue="gelu", **row)


# Projections to few outputs, bound by the bytes of a.
NARROW_M = (131072, 327680)
NARROW_N = (1, 8, 16, 24, 32, 64)
NARROW_K = (64, 128, 192, 720)


def _narrow(fp8: Format) -> Iterator[Case]:
    for m in NARROW_M:
        for k in NARROW_K:
            for n in NARROW_N:
                yield from scaled_gemm_cases(m, n, k, "X5", fp8, (Granularity.ROW,))
            yield quantize_case(m, k, Granularity.ROW, "X5", fp8)


# Weight gradients of few outputs: sums over samples, in parts that all SMs share.
LONG_SUMS = (
    (24, 64, 1310720), (64, 16, 1277952), (24, 720, 327680), (256, 512, 115200), (64, 64, 65536),
    (512, 512, 32768), (1152, 32, 7344),
)  # fmt: skip


def _long_sums(fp8: Format) -> Iterator[Case]:
    for m, n, k in LONG_SUMS:
        yield from scaled_gemm_cases(m, n, k, GRADIENTS, fp8)
        yield main_grad_case(k, m, n, WIDE_RANGE[fp8], fp8)


QUANTIZER_SHAPES = ((2048, 512), (8192, 1024), (32768, 2048))


def _quantizers(fp8: Format) -> Iterator[Case]:
    scaled = {
        "none": (*LEFT_SCALES, Granularity.BLOCK),
        "power_of_two": (Granularity.ROW, Granularity.GROUP, Granularity.BLOCK),
        "static": (Granularity.TENSOR,),
        "delayed": (Granularity.TENSOR,),
    }
    for (m, k), (epilogue, granularities) in itertools.product(QUANTIZER_SHAPES, scaled.items()):
        for granularity in granularities:
            fields = quantized_output(fp8, granularity) | {"epilogue": epilogue}
            turned = Operand(Format.BFLOAT16, layout=Layout.COLUMN)
            yield Case.of("quantize", (m, k), "X1", **fields)
            yield Case.of("quantize", (m, k), "X1", a=turned, **fields)
            yield Case.of("quantize_transpose", (m, k), "X1", **fields)
    for m, k in QUANTIZER_SHAPES:
        fields = quantized_output(fp8, Granularity.GROUP)
        yield Case.of("quantize_transpose", (m, k), "X1", epilogue="column_sums", **fields)


NORMED_SHAPES = ((2048, 512, 512), (8192, 1024, 1024), (32768, 512, 1024))


def _float16(fp8: Format) -> Iterator[Case]:
    half = Operand(Format.FLOAT16)
    for m in ANCHOR_M:
        for n, k in ANCHOR_N_K:
            yield unquantized_case(m, n, k, "X1", Format.FLOAT16)
            for granularity in LEFT_SCALES:
                given = {"out_format": Format.FLOAT16}
                yield fused_case(m, n, k, granularity, "X1", fp8, **given)
    for m, k in QUANTIZER_SHAPES:
        for granularity in (*LEFT_SCALES, Granularity.BLOCK):
            fields = quantized_output(fp8, granularity)
            yield Case.of("quantize", (m, k), "X1", a=half, **fields)
            yield Case.of("quantize_transpose", (m, k), "X1", a=half, **fields)
        fields = quantized_output(fp8, Granularity.ROW)
        for epilogue in ("layer+affine", "rms", "relu"):
            yield Case.of("norm_quantize", (m, k), "X1", a=half, epilogue=epilogue, **fields)
    for m, n, k in NORMED_SHAPES:
        for epilogue in ("bias+layer+affine+silu", "rms", "bias+cross"):
            for a in (half, *[Operand(fp8, g) for g in (Granularity.ROW, Granularity.GROUP)]):
                yield gemm_norm_case(m, n, k, epilogue, "X1", a, out_format=Format.FLOAT16)
        fields = quantized_output(fp8, Granularity.ROW)
        yield gemm_norm_case(m, n, k, "bias+layer+affine", "X1", half, **fields)
        layer = {"a": half, "epilogue": "bias+layer+affine+silu"}
        for out in (quantized_output(WIDE_RANGE[fp8], Granularity.GROUP),
                    {"out_format": Format.FLOAT16}):  # fmt: skip
            yield Case.of("norm_backward", (m, n), GRADIENTS, **layer, **out)


MX_GPUS = frozenset({"sm_100", "gfx950"})


def _mx(fp8: Format) -> Iterator[Case]:
    for m in ANCHOR_M:
        for n, k in ANCHOR_N_K:
            yield from scaled_gemm_cases(m, n, k, "X1", fp8, (Granularity.MX,))
    for m, k in QUANTIZER_SHAPES:
        yield quantize_case(m, k, Granularity.MX, "X1", fp8)
        yield dequantize_case(m, k, Granularity.MX, "X1", fp8)


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("smoke", "one small GEMM at two m: seconds on a CPU", _smoke),
        Suite("anchors", "27 GEMM shapes measured against today's libraries", _anchors),
        Suite("lrm", "layers of published recommendation models", _lrm),
        Suite("zoo", "layers of the models of `model zoo`, with gradients", _zoo),
        Suite("zoo-chains", "its layers with norms and activations, in chains", _zoo_chains),
        Suite("residuals", "layers with a residual or a gate, in chains", _residuals),
        Suite("gelu", "layers with GELU, in chains", _gelu),
        Suite("quantizers", "every way to quantize, at three sizes", _quantizers),
        Suite("lrm-backward", "gradients of their inputs and weights", _lrm_backward),
        Suite("norms", "the 27 anchors, each followed by a norm; norms of rows", _norms),
        Suite("narrow", "many rows, at most 64 outputs: bound by the bytes of a", _narrow),
        Suite("long-sums", "few outputs, each a sum over many samples", _long_sums),
        Suite(
            "float16",
            "products, quantizers, norms and their gradients in float16",
            _float16,
        ),
        Suite("mx", "scales of 1x32, for GPUs that multiply with them", _mx, MX_GPUS),
    )
}
