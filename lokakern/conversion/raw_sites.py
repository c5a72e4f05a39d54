"""Sites that are no layers: products of modules with parameters of their own.

They show in the forward of the module, which is traced (`lokakern.nn.raw_pattern`); attentions of
torch are known (`lokakern.nn.attention`). A product that is called several times is one site, as a
layer is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from lokakern.errors import UnsupportedError
from lokakern.nn.attention import OUT, is_attention, matrices_of, unusual
from lokakern.nn.crossed_forward import graphs_of
from lokakern.nn.module_scan import NOT_SHOWN, OF_TORCH, matrices_elsewhere, named_modules
from lokakern.nn.raw_pattern import HOLDERS, Matrix, products_in
from lokakern.nn.raw_product import RawProduct, products_of
from lokakern.nn.traced_forward import is_traceable

NO_OPERANDS = "Probe has no verdict on products of no nn.Linear: convert them by a budget"


def raw_sites(
    model: nn.Module, unseen: Mapping[str, str] | None
) -> tuple[dict[str, RawProduct], dict[str, str]]:
    """The raw products of a model by name, and reasons against others by parameter.

    Names are those of the parameters, such as ``layer.uvqk``, or of their matrices, such as
    ``experts.0.1``. Where a module multiplies by a matrix and by its transpose, the one that it
    reads as ``[k, n]`` has ".t" behind its name.

    Args:
        model: Any module.
        unseen: What a report of Probe has no verdict on, and why; raw products are then left alone.
    """
    elsewhere = matrices_elsewhere(model, is_seen=bool(unseen))
    if unseen is not None:
        return {}, {x: _told(why, NO_OPERANDS) for x, why in elsewhere.items()} | dict(unseen)
    found = _of_attentions(model, elsewhere)
    for name, module in named_modules(model, _may_multiply):
        prefix = f"{name}." if name else ""
        try:
            graphs, _ = graphs_of(module)
        except UnsupportedError as error:
            why = str(error).partition("\n")[0]
            for parameter in {prefix + key for key in _matrices(module)} & elsewhere.keys():
                elsewhere[parameter] = _told(elsewhere[parameter], why)
            continue
        matrices: dict[Matrix, bool] = {}
        for product in (x for graph in graphs for x in products_in(graph, module)):
            has_bias = matrices.get(product.matrix, False)
            matrices[product.matrix] = has_bias or product.bias is not None
        for matrix, has_bias in matrices.items():
            both = matrix._replace(is_turned=False) in matrices
            site = prefix + matrix.name + (".t" if matrix.is_turned and both else "")
            while site in found:  # of a module that reads a parameter of this one
                site += f" in {type(module).__name__}"
            known = products_of(module).get(matrix.key)
            found[site] = known or RawProduct(module, matrix, has_bias)
            elsewhere.pop(prefix + matrix.parameter, None)
    return found, elsewhere


def _of_attentions(model: nn.Module, elsewhere: dict[str, str]) -> dict[str, RawProduct]:
    """The projections of torch's attentions, with reasons against others in ``elsewhere``.

    The output projection has the name of the layer, whose parameters the attention reads.
    """
    found = {}
    matrices = matrices_of(model)
    for name, module in named_modules(model, lambda module, _: is_attention(module)):
        assert isinstance(module, nn.MultiheadAttention)
        prefix = f"{name}." if name else ""
        why = unusual(module) or ("" if is_traceable(module) else "it has a forward of its own")
        for matrix in matrices[id(module)]:
            parameter = prefix + matrix.parameter
            if why:
                if parameter in elsewhere:
                    elsewhere[parameter] = _told(elsewhere[parameter], why)
                continue
            bias = module.in_proj_bias if matrix.parameter != OUT else module.out_proj.bias
            known = products_of(module).get(matrix.key)
            site = prefix + ("out_proj" if matrix.parameter == OUT else matrix.name)
            found[site] = known or RawProduct(module, matrix, bias is not None)
            elsewhere.pop(parameter, None)
    return found


def _told(words: str, why: str) -> str:
    """Words of `matrices_elsewhere` with a reason."""
    return words.replace(NOT_SHOWN, why).replace(OF_TORCH, why)


def _may_multiply(module: nn.Module, _: str) -> bool:
    kind = type(module).__module__
    if isinstance(module, nn.Linear):  # a subclass, which is left alone as a layer
        return False
    return not kind.startswith(("torch.", "lokakern.")) and any(_matrices(module))


def _matrices(module: nn.Module) -> Iterator[str]:
    """Names of the parameters of a module that it may multiply by."""
    for path, owner in [("", module), *_holders(module, "")]:
        for key, parameter in owner.named_parameters(recurse=False):
            is_there = not isinstance(parameter, nn.UninitializedParameter)
            if is_there and parameter.dim() > 1 and min(parameter.shape[-2:]) > 1:
                yield path + key


def _holders(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Children that hold parameters only, with the beginnings of their names."""
    for name, child in module.named_children():
        if isinstance(child, HOLDERS):
            yield f"{path}{name}.", child
        elif isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _holders(child, f"{path}{name}.")
