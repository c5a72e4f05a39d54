"""The fastest FP8 kernel whose error you can afford, chosen from measurements."""

from lokakern.chains import dispatch_chain
from lokakern.freezing import freeze
from lokakern.functional import (
    dequantize,
    gemm,
    gemm_norm,
    norm_quantize,
    quantize,
    quantize_transpose,
    scaled_gemm,
)
from lokakern.prebuild import warmup
from lokakern.preparation import prepare_weight
from lokakern.registry.register import register
from lokakern.selection import Choice, dispatch
from lokakern.types import ErrorBudget, QuantizedTensor

__version__ = "0.1.0"
__all__ = [
    "Choice",
    "ErrorBudget",
    "QuantizedTensor",
    "dequantize",
    "dispatch",
    "dispatch_chain",
    "freeze",
    "gemm",
    "gemm_norm",
    "norm_quantize",
    "prepare_weight",
    "quantize",
    "quantize_transpose",
    "register",
    "scaled_gemm",
    "warmup",
]
