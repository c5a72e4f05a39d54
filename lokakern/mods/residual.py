"""`HighResidual`: a residual stream in float32."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lokakern.errors import FormatError, UnknownNameError
from lokakern.mods.editor import Editor, Mod

_BRANCHES = ("self_attn", "multihead_attn", "linear2")  # of torch's transformer layers


def _to_float32(_module: nn.Module, _args: Any, output: Any) -> Any:
    """A forward hook; of attention the first of its outputs is what is added."""
    if isinstance(output, Tensor):
        return output.float()
    return (output[0].float(), *output[1:])


@dataclass(frozen=True)
class HighResidual(Mod):
    """Keep residual streams in float32: what is added to them is made float32 before.

    The sum is float32 then, by torch's rules of promotion, and so is the stream from there on;
    under autocast products still read bfloat16. Sums of many small branches lose nothing to
    rounding. It is for float32 parameters under autocast.

    Args:
        sites: Names, or patterns such as ``"blocks.*.project"``, of the modules whose output is
            added to a stream. None: those of torch's transformer layers.
    """

    sites: tuple[str, ...] | None = None

    def edit(self, editor: Editor) -> None:
        """See `Mod`."""
        found = list(self._found(editor))
        if not found:
            raise UnknownNameError(
                f"HighResidual: no module is {self.sites or 'a transformer layer of torch'}; name "
                "those whose output is added to a residual: HighResidual(('blocks.*.project',))"
            )
        for name, module in found:
            dtypes = {p.dtype for p in module.parameters()} - {torch.float32, torch.float64}
            if dtypes:
                raise FormatError(
                    f"HighResidual: parameters of {name} are {dtypes.pop()}; keep parameters "
                    "float32 and run under torch.autocast"
                )
            handles: list[Any] = []

            def hook(module: nn.Module = module, handles: list[Any] = handles) -> None:
                handles.append(module.register_forward_hook(_to_float32))

            def unhook(handles: list[Any] = handles) -> None:
                for handle in handles:
                    handle.remove()

            editor.do(hook, unhook)
            effect = "the sum with the residual is not rounded to bfloat16"
            editor.done(self, name, "residual as computed", "residual float32", effect)

    def _found(self, editor: Editor) -> list[tuple[str, nn.Module]]:
        if self.sites is not None:
            return [
                (name, module)
                for name, module in editor.modules()
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.sites)
            ]
        return [
            (f"{name}.{branch}" if name else branch, getattr(layer, branch))
            for name, layer in editor.modules(
                nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
            )
            for branch in _BRANCHES
            if hasattr(layer, branch)
        ]
