"""`Attention`: an `nn.MultiheadAttention` whose projections run on kernels of their routes.

torch passes all parameters of an attention to one function, which multiplies by slices of them.
This class computes the same in the same steps, with `lokakern.nn.raw_product.RawProduct` for the
products. Where none of them is quantized, and for calls that it does not know, the forward of torch
runs, which may be one kernel for all of it.

An attention of one tensor is one product by the whole ``in_proj_weight``. Where keys and values are
another tensor, it is one product by the first third and one by the rest, which are sites of their
own: kernels are chosen for each size.
"""

from __future__ import annotations

import math

import torch
from torch import Size, Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from lokakern.functional.checks import warn_once
from lokakern.nn.linear import _is_without_data
from lokakern.nn.raw_pattern import LINEAR, Matrix
from lokakern.nn.raw_product import products_of

PACKED, SEPARATE = "in_proj_weight", ("q_proj_weight", "k_proj_weight", "v_proj_weight")
OUT = "out_proj.weight"
Masks = tuple[Tensor | None, Tensor | None]  # key_padding_mask and attn_mask
OUT_KEY = OUT.replace(".", "/")


class Attention(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` with registered products, which `adopt_attention` makes of it."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `nn.MultiheadAttention`."""
        masks = (key_padding_mask, attn_mask)
        if not self._quantizes(query, key, value, masks, is_causal):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip
        if self.batch_first:  # one tensor stays one tensor
            is_one, is_pair = query is key, key is value
            query = query.transpose(1, 0)
            key = query if is_one else key.transpose(1, 0)
            value = key if is_pair else value.transpose(1, 0)
        y, weights = self._attend(query, key, value, masks, need_weights, is_causal)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if self.batch_first:
            y = y.transpose(1, 0)
            if not self.training:  # as of torch's kernel for evaluation
                y = y.contiguous()
        return y, weights

    def _quantizes(
        self, query: Tensor, key: Tensor, value: Tensor, masks: Masks, is_causal: bool
    ) -> bool:
        """Whether a product of this call is quantized, and `_attend` computes the call."""
        products = products_of(self)
        if not any(product.is_special for product in products.values()):
            return False
        if not is_compiling() and _is_without_data(query):
            return False
        why = self._why_not(query, key, value, masks)
        if is_causal and masks[1] is None:
            why = "is_causal is a hint about attn_mask, and there is none"
        if why:
            if not is_compiling():
                warn_once(
                    f"a converted nn.MultiheadAttention multiplies unquantized, as torch: {why}"
                )
            return False
        if not self._qkv_same_embed_dim:
            pairs = [*zip(SEPARATE, (query, key, value), strict=True)]
        elif query is key:
            pairs = [(PACKED, query)]
        else:
            first, rest = parts_of(self.embed_dim)
            pairs = [(first.key, query), (rest.key, key)]
        weight = self.out_proj.weight
        return any(
            name in products and products[name].quantizes(x, weight)
            for name, x in (*pairs, (OUT_KEY, query))
        )

    def _why_not(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> str:
        """Why `_attend` does not compute a call, or ""."""
        if query.is_nested or key.is_nested or value.is_nested:
            return "its inputs are nested tensors"
        if query.dim() == 2:
            return "its inputs have no batch"
        if self._qkv_same_embed_dim and key is not value:
            return "its keys and values are two tensors: pass one, or set kdim or vdim"
        if self.bias_k is not None or self.bias_v is not None or self.add_zero_attn:
            return unusual(self)
        is_known = query.dim() == key.dim() == value.dim() == 3 and self._fit(
            query.shape, key.shape, value.shape, *(None if x is None else x.shape for x in masks)
        )
        return "" if is_known else "the shapes of its inputs or masks do not fit"

    def _fit(
        self, query: Size, key: Size, value: Size, padding: Size | None, mask: Size | None
    ) -> bool:
        """Whether these are shapes of inputs and masks; torch has an error for most others."""
        batch, length = (0, 1) if self.batch_first else (1, 0)
        many, rows, source = query[batch], query[length], key[length]
        if (query[2], key[2], value[2]) != (self.embed_dim, self.kdim, self.vdim):
            return False
        if key[:2] != value[:2] or key[batch] != many:
            return False
        if padding is not None and padding != (many, source):
            return False
        pairs = (rows, source)
        return mask is None or mask == pairs or mask == (many * self.num_heads, *pairs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        masks: Masks,
        need_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The steps of `torch.nn.functional.multi_head_attention_forward`, bits included.

        Args:
            query: ``[length, batch, embed_dim]``.
            key: ``[source, batch, kdim]``.
            value: ``[source, batch, vdim]``.
            masks: Of padded keys ``[batch, source]``, and of pairs ``[length, source]`` or
                ``[batch * heads, length, source]``; None each where there is none.
            need_weights: Whether the weights are returned.
            is_causal: Whether the mask of pairs is a causal one.

        Returns:
            ``[length, batch, embed_dim]``, and ``[batch, heads, length, source]`` or None.
        """
        length, batch, width = query.shape
        source, heads, columns = key.shape[0], self.num_heads, self.head_dim
        projected = self._projected(query, key, value)
        q, k, v = (x.view(x.shape[0], batch * heads, columns).transpose(0, 1) for x in projected)
        is_causal = is_causal and masks[0] is None
        mask = None
        if need_weights or not is_causal:
            mask = self._mask(masks, query.dtype, batch, source)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scaled = q * math.sqrt(1.0 / float(columns))
            if mask is None:
                scores = torch.bmm(scaled, k.transpose(-2, -1))
            else:
                scores = torch.baddbmm(mask, scaled, k.transpose(-2, -1))
            weights = functional.softmax(scores, dim=-1)
            if dropout > 0.0:
                weights = functional.dropout(weights, p=dropout)
            y = torch.bmm(weights, v).transpose(0, 1).reshape(length * batch, width)
            weights = weights.view(batch, heads, length, source)
        else:
            if mask is not None:
                is_same = mask.shape[0] == 1
                mask = mask.unsqueeze(0) if is_same else mask.view(batch, heads, -1, source)
            q, k, v = (x.view(batch, heads, x.shape[1], columns) for x in (q, k, v))
            y = functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
            y = y.permute(2, 0, 1, 3).reshape(batch * length, width)
        y = self._product(OUT_KEY, y, self.out_proj.weight, self.out_proj.bias)
        return y.view(length, batch, y.shape[1]), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of the heads."""
        n, bias = self.embed_dim, self.in_proj_bias
        if not self._qkv_same_embed_dim:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            inputs = zip(SEPARATE, (query, key, value), weights, biases, strict=True)
            return tuple(self._product(*each) for each in inputs)
        if query is key:
            y = self._product(PACKED, query, self.in_proj_weight, bias)
            return _unpacked(y, 3)
        first, rest = parts_of(n)
        to_query, to_pair = torch.split(self.in_proj_weight, [n, 2 * n])
        of_query, of_pair = (None, None) if bias is None else torch.split(bias, [n, 2 * n])
        q = self._product(first.key, query, to_query, of_query)
        return q, *_unpacked(self._product(rest.key, key, to_pair, of_pair), 2)

    def _product(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        products = products_of(self)
        if name in products:
            y: Tensor = products[name](x, weight, bias, LINEAR)
            return y
        return functional.linear(x, weight, bias)

    def _mask(self, masks: Masks, dtype: torch.dtype, batch: int, source: int) -> Tensor | None:
        """Both masks as one summand of scores ``[1 or batch * heads, 1 or length, source]``."""
        padding, mask = masks
        padding = functional._canonical_mask(
            mask=padding, mask_name="key_padding_mask", other_name="attn_mask",
            other_type=functional._none_or_dtype(mask), target_type=dtype,
        )  # fmt: skip
        mask = functional._canonical_mask(
            mask=mask, mask_name="attn_mask", other_type=None, other_name="", target_type=dtype,
            check_other=False,
        )  # fmt: skip
        if mask is not None and mask.dim() == 2:
            mask = mask.unsqueeze(0)
        if padding is None:
            return mask
        padding = padding.view(batch, 1, 1, source).expand(-1, self.num_heads, -1, -1)
        padding = padding.reshape(batch * self.num_heads, 1, source)
        return padding if mask is None else mask + padding


def parts_of(n: int) -> tuple[Matrix, Matrix]:
    """Of a packed weight the n rows for queries, and the others, for keys and values."""
    whole = Matrix(PACKED, (), False)
    return whole._replace(rows=(0, n)), whole._replace(rows=(n, 3 * n))


def _unpacked(y: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Parts of the last axis, each contiguous, by one copy."""
    y = y.view(*y.shape[:-1], parts, y.shape[-1] // parts)
    y = y.unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    return tuple(y[place] for place in range(parts))


def unusual(attention: nn.MultiheadAttention) -> str:
    """Why no call of an attention is quantized, or ""."""
    if attention.bias_k is not None or attention.bias_v is not None:
        return "it adds a bias to keys and values (add_bias_kv)"
    return "it adds zeros to keys and values (add_zero_attn)" if attention.add_zero_attn else ""


def is_attention(module: nn.Module) -> bool:
    """Whether it is torch's own attention, converted or not; subclasses may do something else."""
    return type(module) in (nn.MultiheadAttention, Attention)


def matrices_of(model: nn.Module) -> dict[int, list[Matrix]]:
    """The matrices that the attentions of a model multiply by, by the id of the attention.

    torch's own layers show whether an attention gets one tensor or two; others may do both.
    """
    alone, pairs = set(), set()
    for module in model.modules():
        if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
            alone.add(id(module.self_attn))
        if type(module) is nn.TransformerDecoderLayer:
            pairs.add(id(module.multihead_attn))
    found = {}
    for module in model.modules():
        if not is_attention(module):
            continue
        assert isinstance(module, nn.MultiheadAttention)
        wanted = [Matrix(name, (), False) for name in (*SEPARATE, OUT)]
        if module._qkv_same_embed_dim:
            wanted = [Matrix(PACKED, (), False), *parts_of(module.embed_dim), wanted[-1]]
            if id(module) in alone - pairs:
                del wanted[1:3]
            elif id(module) in pairs - alone:
                del wanted[0]
        found[id(module)] = [x for x in wanted if _is_matrix(module, x.parameter)]
    return found


def _is_matrix(attention: nn.MultiheadAttention, name: str) -> bool:
    """Whether the name is that of a parameter with several rows and columns."""
    path, _, key = name.rpartition(".")
    parameter = attention.get_submodule(path)._parameters.get(key)
    return parameter is not None and min(parameter.shape) > 1


def adopt_attention(module: nn.Module) -> None:
    """Make an `nn.MultiheadAttention` an `Attention`."""
    if type(module) is nn.MultiheadAttention:
        module.__class__ = Attention


def release_attention(module: nn.Module) -> None:
    """Make it an `nn.MultiheadAttention` again if it has no products left."""
    if type(module) is Attention and not products_of(module):
        module.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
