"""The fastest FP8 kernel whose error you can afford, chosen from measurements."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from lokakern import moved as _moved  # noqa: F401  # old import paths
from lokakern.version import __version__ as __version__

if TYPE_CHECKING:
    from lokakern import mods
    from lokakern.build.prebuild import warmup
    from lokakern.chain.dispatch import dispatch_chain
    from lokakern.conversion.convert import convert
    from lokakern.functional.gemm import gemm
    from lokakern.functional.gemm_norm import gemm_norm, norm_quantize
    from lokakern.functional.prepare_weight import prepare_weight
    from lokakern.functional.quantize import dequantize, quantize, quantize_transpose
    from lokakern.functional.scaled_gemm import scaled_gemm
    from lokakern.native.plan_file import save_plans
    from lokakern.nn.linear import Linear
    from lokakern.nn.linear_norm_act import LinearNormAct
    from lokakern.probe.report import ProbeReport
    from lokakern.probe.session import Probe
    from lokakern.registry.register import register
    from lokakern.selection.dispatcher import Choice, dispatch
    from lokakern.selection.frozen.write import freeze
    from lokakern.types import ErrorBudget, QuantizedTensor

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

_AT_ONCE = {
    "warmup": "lokakern.build.prebuild",
    "dispatch_chain": "lokakern.chain.dispatch",
    "gemm": "lokakern.functional.gemm",
    "gemm_norm": "lokakern.functional.gemm_norm",
    "norm_quantize": "lokakern.functional.gemm_norm",
    "prepare_weight": "lokakern.functional.prepare_weight",
    "dequantize": "lokakern.functional.quantize",
    "quantize": "lokakern.functional.quantize",
    "quantize_transpose": "lokakern.functional.quantize",
    "scaled_gemm": "lokakern.functional.scaled_gemm",
    "register": "lokakern.registry.register",
    "Choice": "lokakern.selection.dispatcher",
    "dispatch": "lokakern.selection.dispatcher",
    "ErrorBudget": "lokakern.types",
    "QuantizedTensor": "lokakern.types",
}
# These import the bench, or more of torch.
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

    For a module, the result is the module itself.
    """
    place = _LATE.get(name) or _AT_ONCE.get(name)
    if place is None:
        raise AttributeError(f"module 'lokakern' has no attribute {name!r}")
    module = importlib.import_module(place)
    found = globals()[name] = module if name == "mods" else getattr(module, name)
    return found


def _import_at_once() -> None:
    """Import what every user of the library needs; the ops are in `torch.ops.lokakern` then."""
    importlib.import_module("lokakern.functional.run")  # what a `Choice` is called by
    for name in _AT_ONCE:
        if name not in globals():
            __getattr__(name)


def _is_command_line() -> bool:
    """Whether the command line is being imported: it parses and helps without torch.

    torch takes seconds to import. A command imports the rest before it runs (`says_errors`).
    """
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module to run
        words = sys.orig_argv
        return "-m" in words and words[words.index("-m") + 1 :][:1] == ["lokakern.bench"]
    return getattr(sys.modules.get("lokakern_cli"), "is_starting", False)


if not _is_command_line():
    _import_at_once()
