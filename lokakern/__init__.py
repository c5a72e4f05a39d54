"""The fastest FP8 kernel whose error you can afford, chosen from measurements."""

from typing import TYPE_CHECKING, Any

from lokakern import moved as _moved  # noqa: F401  # old import paths
from lokakern.build.prebuild import warmup
from lokakern.chain.dispatch import dispatch_chain
from lokakern.functional import run as _run  # noqa: F401  # what a `Choice` is called by
from lokakern.functional.gemm import gemm
from lokakern.functional.gemm_norm import gemm_norm, norm_quantize
from lokakern.functional.prepare_weight import prepare_weight
from lokakern.functional.quantize import dequantize, quantize, quantize_transpose
from lokakern.functional.scaled_gemm import scaled_gemm
from lokakern.registry.register import register
from lokakern.selection.dispatcher import Choice, dispatch
from lokakern.types import ErrorBudget, QuantizedTensor
from lokakern.version import __version__ as __version__

if TYPE_CHECKING:
    from lokakern import mods
    from lokakern.conversion.convert import convert
    from lokakern.native.plan_file import save_plans
    from lokakern.nn.linear import Linear
    from lokakern.nn.linear_norm_act import LinearNormAct
    from lokakern.probe.report import ProbeReport
    from lokakern.probe.session import Probe
    from lokakern.selection.frozen.write import freeze

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
    "save_plans",
    "scaled_gemm",
    "warmup",
]

_LATE = {
    "Linear": "lokakern.nn.linear",
    "LinearNormAct": "lokakern.nn.linear_norm_act",
    "Probe": "lokakern.probe.session",
    "ProbeReport": "lokakern.probe.report",
    "convert": "lokakern.conversion.convert",
    "freeze": "lokakern.selection.frozen.write",
    "mods": "lokakern.mods",
    "save_plans": "lokakern.native.plan_file",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access.

    These names import the bench, or more of torch. For a module, the result is the module itself.
    """
    if name not in _LATE:
        raise AttributeError(f"module 'lokakern' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_LATE[name])
    found = globals()[name] = module if name == "mods" else getattr(module, name)
    return found
