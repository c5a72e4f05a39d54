"""Mods that keep tensors in float32: `KeepIntermediates` and `HighResidual`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lokakern.errors import FormatError, UnknownNameError
from lokakern.mods.editor import Editor, Mod, site_of
from lokakern.mods.epilogue import NORMS
from lokakern.nn.autocast import HALF

_BRANCHES = ("self_attn", "multihead_attn", "linear2")  # of torch's transformer layers


class _Unrounded(torch.autograd.Function):
    """``x @ weight.t()`` of operands of 16 bits as float32; gradients as of their product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):  # which would round the sums
            if x.is_cuda:
                return torch.mm(x, weight.t(), out_dtype=torch.float32)
            return x.float() @ weight.t().float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = gradients[0].to(x.dtype)
        return grad @ weight, grad.t() @ x


class WideLinear(nn.Linear):
    """`nn.Linear` with float32 output of bfloat16 or float16 operands, under autocast too."""

    def forward(self, input: Tensor) -> Tensor:
        kind, x = input.device.type, input
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        if dtype not in HALF or x.dtype is torch.float64:
            return functional.linear(x, self.weight, self.bias)
        rows = x.to(dtype).reshape(-1, self.in_features)
        y: Tensor = _Unrounded.apply(rows, self.weight.to(dtype))  # type: ignore[no-untyped-call]
        y = y if self.bias is None else y + self.bias.float()
        return y.view(*x.shape[:-1], self.out_features)


@dataclass(frozen=True)
class KeepIntermediates(Mod):
    """Keep the sums of a linear layer in float32 through the norm behind it.

    A norm that subtracts a large mean amplifies earlier rounding errors by mean / deviation; there
    are none in float32 sums. Applies to an `nn.Linear` followed by a norm in an `nn.Sequential`.
    `lokakern.convert` leaves such a layer unquantized.
    """

    def edit(self, editor: Editor) -> None:
        for name, sequence in editor.modules(nn.Sequential):
            items: list[tuple[str, Any]] = list(sequence._modules.items())
            for (key, layer), (_, norm) in pairwise(items):
                site = site_of(name, key)
                is_pair = isinstance(layer, nn.Linear) and isinstance(norm, NORMS)
                if not is_pair or not editor.accepts(layer, site):
                    continue
                if type(layer) is not nn.Linear:
                    editor.left(self, site, type(layer).__name__, "it is not a plain nn.Linear")
                elif any(p.dtype not in (torch.float32, torch.float64) for p in norm.parameters()):
                    why = "the norm has no float32 parameters, and takes no float32 sums"
                    editor.left(self, site, "Linear", why)
                else:
                    editor.set(layer, "__class__", WideLinear)
                    effect = "sums are not rounded to 16 bits before the norm"
                    editor.done(self, site, "Linear", "WideLinear", effect)


def _to_float32(_module: nn.Module, _args: Any, output: Any) -> Any:
    """A forward hook; of attention only the first output is added to the residual."""
    if isinstance(output, Tensor):
        return output.float()
    return (output[0].float(), *output[1:])


@dataclass(frozen=True)
class HighResidual(Mod):
    """Keep residual streams in float32: outputs that are added to them become float32.

    By torch's rules of promotion the sum, and the stream from there on, is float32, too; under
    autocast products still read 16 bits. Sums of many small branches are not rounded. For float32
    parameters under autocast.

    Args:
        sites: Names, or patterns such as ``"blocks.*.project"``, of the modules whose output is
            added to a stream. None: those of torch's transformer layers.
    """

    sites: tuple[str, ...] | None = None

    def edit(self, editor: Editor) -> None:
        found = list(self._found(editor))
        if not found:
            raise UnknownNameError(
                f"HighResidual: no module is {self.sites or 'a transformer layer of torch'}; name "
                "modules whose output is added to a residual: HighResidual(('blocks.*.project',))"
            )
        for name, module in found:
            dtypes = {p.dtype for p in module.parameters()} - {torch.float32, torch.float64}
            if dtypes:
                raise FormatError(
                    f"HighResidual: parameters of {name} are {dtypes.pop()}; keep parameters "
                    "float32 and run under torch.autocast"
                )
            handle = module.register_forward_hook(_to_float32)
            editor.do(lambda: None, handle.remove)
            effect = "the sum with the residual is not rounded to 16 bits"
            editor.done(self, name, "residual as computed", "residual float32", effect)

    def _found(self, editor: Editor) -> Iterator[tuple[str, nn.Module]]:
        kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        for name, module in editor.modules(*(kinds if self.sites is None else ())):
            if self.sites is None:
                branches = (x for x in _BRANCHES if hasattr(module, x))
                yield from ((site_of(name, x), getattr(module, x)) for x in branches)
            elif any(fnmatch.fnmatchcase(name, pattern) for pattern in self.sites):
                yield name, module
