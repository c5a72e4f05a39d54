"""`NormOrder`: norms before linear layers, or right behind them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lokakern.errors import UnknownNameError
from lokakern.mods.editor import Editor, Mod
from lokakern.nn.block_rms_norm import BlockRMSNorm

_NORMS = (nn.LayerNorm, nn.RMSNorm, BlockRMSNorm)
_ACTIVATIONS = (nn.ReLU, nn.SiLU, nn.Hardswish, nn.GELU, nn.Sigmoid, nn.Tanh, nn.ReLU6)


@dataclass(frozen=True)
class NormOrder(Mod):
    """Change where norms stand.

    "post": a norm behind an activation goes before it, right behind the linear layer, where it can
    be a part of that GEMM. "pre": a norm behind a linear layer of as many outputs as inputs goes
    before it, so that what is quantized there is normalized. Both in an `nn.Sequential`, whose
    modules keep their names; transformer layers of torch have ``norm_first`` set.

    Args:
        order: "pre" or "post".
    """

    order: str

    def edit(self, editor: Editor) -> None:
        """See `Mod`."""
        if self.order not in ("pre", "post"):
            raise UnknownNameError(f"NormOrder: order is {self.order!r}; expected 'pre' or 'post'")
        for name, module in editor.modules():
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                if module.norm_first != (self.order == "pre"):
                    editor.set(module, "norm_first", self.order == "pre")
                    effect = "the residual stream is not normalized" if self.order == "pre" else (
                        "the residual stream is normalized")  # fmt: skip
                    self._done(editor, name, effect)
            elif type(module) is nn.Sequential:
                self._reorder(editor, name, module)

    def _done(self, editor: Editor, name: str, effect: str) -> None:
        before = "pre" if self.order == "post" else "post"
        editor.done(self, name, f"{before}-norm", f"{self.order}-norm", effect)

    def _reorder(self, editor: Editor, name: str, sequence: nn.Sequential) -> None:
        items = list(sequence._modules.items())
        moved = []
        for place in range(len(items)):
            kinds = [child for _, child in items[place : place + 3]]
            is_post = self.order == "post" and len(kinds) == 3
            if (
                is_post
                and isinstance(kinds[0], nn.Linear)
                and isinstance(kinds[1], _ACTIVATIONS)
                and isinstance(kinds[2], _NORMS)
            ):
                items[place + 1], items[place + 2] = items[place + 2], items[place + 1]
                moved.append((items[place + 1][0], "the norm sees what was not activated"))
            elif (
                self.order == "pre"
                and len(kinds) > 1
                and isinstance(kinds[0], nn.Linear)
                and isinstance(kinds[1], _NORMS)
                and not (place and isinstance(items[place - 1][1], _NORMS))
            ):
                norm_name = f"{name}.{items[place + 1][0]}" if name else items[place + 1][0]
                if kinds[0].in_features != kinds[0].out_features:
                    why = (
                        f"the layer has {kinds[0].in_features} inputs and {kinds[0].out_features} "
                        "outputs: the norm does not fit before it"
                    )
                    editor.left(self, norm_name, "post-norm", why)
                    continue
                items[place], items[place + 1] = items[place + 1], items[place]
                moved.append((items[place][0], "the norm sees the input of the layer"))
        if moved:  # names stay with their modules, and so do keys of a state_dict
            before, after = list(sequence._modules), [key for key, _ in items]
            editor.do(lambda: _sort(sequence, after), lambda: _sort(sequence, before))
        for key, effect in moved:
            self._done(editor, f"{name}.{key}" if name else key, effect)


def _sort(sequence: nn.Sequential, keys: list[str]) -> None:
    """Put children in the order of these keys, whatever they are by now; new ones come last."""
    children = dict(sequence._modules)
    order = [*(key for key in keys if key in children), *(k for k in children if k not in keys)]
    sequence._modules = {key: children[key] for key in order}
