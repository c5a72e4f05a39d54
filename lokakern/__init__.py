"""The fastest FP8 kernel whose error you can afford, chosen from measurements."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from lokakern import mods
    from lokakern.converting import convert
    from lokakern.linear import Linear
    from lokakern.linear_norm_act import LinearNormAct
    from lokakern.probe.report import ProbeReport
    from lokakern.probe.session import Probe

__version__ = "0.1.0"
__all__ = [
    "Choice",
    "ErrorBudget",
    "Linear",
    "LinearNormAct",
    "Probe",
    "ProbeReport",
    "QuantizedTensor",
    "convert",
    "dequantize",
    "dispatch",
    "dispatch_chain",
    "freeze",
    "gemm",
    "gemm_norm",
    "mods",
    "norm_quantize",
    "prepare_weight",
    "quantize",
    "quantize_transpose",
    "register",
    "scaled_gemm",
    "warmup",
]

_LATE = {
    "Linear": "lokakern.linear",
    "LinearNormAct": "lokakern.linear_norm_act",
    "Probe": "lokakern.probe.session",
    "ProbeReport": "lokakern.probe.report",
    "convert": "lokakern.converting",
    "mods": "lokakern.mods",
}


def __getattr__(name: str) -> Any:
    """What is imported when it is first asked for: it brings the bench, or more of torch, with it.

    A module is itself.
    """
    if name not in _LATE:
        raise AttributeError(f"module 'lokakern' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_LATE[name])
    found = globals()[name] = module if name == "mods" else getattr(module, name)
    return found
