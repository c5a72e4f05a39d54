"""The backend "lokakern" of torch.compile: Inductor, with the kernels of `convert` in the graph.

::

    torch.compile(model, backend="lokakern", options={"budget": 0.06})

Each linear product of a graph (`lokakern.nn.graph_products`) gets the routes that measurements
choose. Layers without gradients, with the norms and activations behind them, are chains where these
are faster (`lokakern.nn.graph_chains`), and where nothing quantizes their products apply the relu
behind them (`lokakern.nn.rectified`). Weights are quantized in each call, so that they may change
between calls, and times include that. A graph without a chosen kernel reaches Inductor as Dynamo
made it. torch finds the backend through the entry point group ``torch_dynamo_backends``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from lokakern import sampled_check
from lokakern.conversion.chain_rivals import ChainJudge
from lokakern.conversion.chain_spans import chain_judge, why_no_chains
from lokakern.conversion.chain_spans import words_of as words_of_sites
from lokakern.conversion.compiled_chains import calls_of, planned_in, rectified_in
from lokakern.conversion.routes import GEMMS, Judge, Route, routes_of
from lokakern.errors import FormatError, UnknownNameError
from lokakern.nn.chain_call import has_no_launch
from lokakern.nn.compiled_form import fuse_quantizers
from lokakern.nn.graph_chains import Layers, layers_in, replace_chain, replace_relu
from lokakern.nn.graph_encoders import keep_changed, take_apart
from lokakern.nn.graph_products import Product, linear_products
from lokakern.nn.linear import words_of
from lokakern.nn.rectified import KERNEL as RELU_KERNEL
from lokakern.nn.routed_matmul import PLAIN, in_dtype, kernel_at
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of
from lokakern.selection.weight_forms import FORMS
from lokakern.types import COMPILED, Device, ErrorBudget, Format

logger = logging.getLogger("lokakern")
_EXPECTED = 'expected options={"budget": 0.06}, the largest row error of a product, or None'
IN_CHAIN = "a chain runs it"
WITH_RELU = f"{RELU_KERNEL} applies the relu behind it"
_EXPLAINED: dict[tuple[Any, ...], str] = {}  # by name and sizes


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Compile a graph of Dynamo by Inductor, its linear products by the fastest kernels.

    Args:
        gm: The graph, which is changed in place.
        example_inputs: Its inputs.
        options: Those of `Options`, of which "budget" is required, and those of Inductor.
        mode: Of torch.compile, which takes no options with it: an error.

    Returns:
        What Inductor returns.

    Raises:
        FormatError: There is no budget, or an option has another type.
        UnknownNameError: An option, mode, distribution or regime is unknown.
        BudgetError: The budget is not a finite, non-negative number, or ``check`` no check.
        DeviceError: The device is not in the database.
    """
    asked, inductor = Options.read(options, mode)
    if replace_products(gm, asked):
        gm.recompile()
        fuse_quantizers()
    return torch._inductor.compile(gm, list(example_inputs), options=inductor)


@dataclass(frozen=True)
class Options:
    """Options of the backend; all others are Inductor's.

    Attributes:
        budget: Largest accepted row error of each product, a number or an `ErrorBudget`; None
            quantizes nothing.
        device: As of `convert`.
        regime: As of `convert`.
        distribution: As of `convert`.
        check: As of `convert`.
        skip: As of `convert`: names of products, as `explain` tells them, or patterns. Names that
            do not occur have no effect, because a graph may be a part of a model.
        chains: As of `convert`: whether layers without gradients may run as chains.
        mode: The mode of torch.compile, which takes ``mode=`` or ``options=``, not both.
    """

    budget: ErrorBudget | None
    device: dispatcher.AnyDevice = None
    regime: str = COMPILED
    distribution: tuple[str, ...] | None = None
    check: str | None = None
    skip: tuple[str, ...] = ()
    chains: bool = True
    mode: str | None = None

    @classmethod
    def read(
        cls, options: Mapping[str, Any] | None, mode: str | None
    ) -> tuple[Options, dict[str, Any]]:
        """Check the options; also returns those of Inductor."""
        given = dict(options or {})
        if "budget" not in given:
            found = f"mode={mode!r}" if mode else f"options={given or None}"
            how = f'; with the mode: options={{"budget": 0.06, "mode": {mode!r}}}' if mode else ""
            raise FormatError(f"backend lokakern: {found}, without a budget; {_EXPECTED}{how}")
        own = {name: given.pop(name) for name in cls.__dataclass_fields__ if name in given}
        inductor = {str(name).replace("-", "_"): value for name, value in given.items()}
        unknown = sorted(inductor.keys() - set(torch._inductor.list_options()))
        if unknown:
            raise UnknownNameError(
                f"backend lokakern: unknown option {', '.join(unknown)}; expected one of "
                f"{', '.join(cls.__dataclass_fields__)}, or an option of Inductor "
                "(torch._inductor.list_options())"
            )
        return cls(**_checked(own)), _of_mode(own.get("mode")) | inductor


def _checked(own: dict[str, Any]) -> dict[str, Any]:
    if own["budget"] is not None:
        own["budget"] = budget_of(own["budget"])
    skip = own.get("skip", ())
    skip = (skip,) if isinstance(skip, str) else skip
    if not isinstance(skip, Sequence) or not all(isinstance(x, str) for x in skip):
        raise FormatError(f"backend lokakern: skip is {skip!r}; expected names, or patterns")
    own["skip"] = tuple(skip)
    own["distribution"] = dispatcher.distribution_names(own.get("distribution"))
    dispatcher.check_regime(own.get("regime", COMPILED))
    return own


def _of_mode(mode: object) -> dict[str, Any]:
    """Inductor's options of a mode of torch.compile."""
    modes = torch._inductor.list_mode_options()
    if mode is not None and mode not in list(modes):
        raise UnknownNameError(
            f"backend lokakern: mode {mode!r} is unknown; expected one of {', '.join(modes)}"
        )
    return dict(modes[mode]) if isinstance(mode, str) else {}


def replace_products(gm: fx.GraphModule, asked: Options) -> bool:
    """Replace the chains and products that have kernels; whether there was one."""
    judge = Judge(asked.budget, asked.distribution, regime=asked.regime)
    marker = sampled_check.Marker(asked.check)
    known: dict[tuple[Any, ...], tuple[Route, ...]] = {}
    found: dict[Product, tuple[Route, ...]] = {}
    whys: dict[Product, str] = {}
    encoders = take_apart(gm)
    for product in linear_products(gm):
        whys[product] = product.why_not
        if not whys[product] and any(fnmatchcase(product.name, x) for x in asked.skip):
            whys[product] = "skip names it"
        if not whys[product]:
            found[product] = _routes_of(product, judge, _device_for(product, asked), known)
    layers = layers_in(gm, found)
    chained = _replace_chains(layers, found, asked, is_checked=marker.is_on)
    rectified = _replace_relus(layers, found, asked, chained)
    is_changed = bool(chained or rectified)
    for product, why in whys.items():
        routes, texts = found.get(product, ()), list[str]()
        if product in chained:
            why = IN_CHAIN
        if product in rectified:
            why = WITH_RELU
        if not why:
            texts = [_text_at(route.text, product.m) for route in routes]
            why = "" if any(texts) else "no product is quantized"
        if not why:
            sites = (f"{product.name}/{gemm}" for gemm in GEMMS)
            marked = zip((in_dtype(text, product.dtype) for text in texts), sites, strict=True)
            product.replace([marker.mark(text, asked.budget, site) for text, site in marked])
            is_changed = True
        _tell(product, routes, texts, why)
    keep_changed(encoders)
    return is_changed


def _replace_chains(
    layers: Layers, found: Mapping[Product, tuple[Route, ...]], asked: Options, *, is_checked: bool
) -> set[Product]:
    """Run chains of layers without gradients, where they are faster; their products."""
    if not layers.products:
        return set()
    why = why_no_chains(
        asked.budget, is_forced=False, is_inference=True, is_checked=is_checked, is_between=True,
        is_wanted=asked.chains,
    )  # fmt: skip
    if why:
        _keep(f"no chains: {why}")
        return set()
    spans, left = planned_in(
        layers, {x: routes[0] for x, routes in found.items()}, lambda x: _judge_of(x, asked)
    )
    for sites, why in left.items():
        _keep(f"{sites}: no cross is a chain: {why}")
    chained: set[Product] = set()
    for span in spans:
        products = [layers.products[id(x.linear)][1] for x in span.found]
        m = products[0].m
        rows, idle = "any m" if m is None else f"m={m}", []
        for chain in span.plan.chains:
            words = f"{words_of_sites(span.sites_of(chain))} ({rows})"
            if m is not None and has_no_launch(chain.text, m):
                idle.append(f"\n{words}: no chain at this m")
                continue
            replace_chain(layers, calls_of(layers, span, chain), chain.text)
            chained.update(products[chain.start : chain.stop])
            logger.info("%s: %s", words, IN_CHAIN)
        _keep(span.explain(()) + "".join(idle), span.sites, rows)
    return chained


def _replace_relus(
    layers: Layers, found: Mapping[Product, tuple[Route, ...]], asked: Options,
    chained: Collection[Product],
) -> set[Product]:  # fmt: skip
    """Let products without gradients apply the relu behind them, by the rule of `convert`."""
    rectified = {
        product: relu for product, relu in rectified_in(layers, found).items()
        if product not in chained and dispatcher.is_timed(RELU_KERNEL, _device_for(product, asked))
    }  # fmt: skip
    for product, relu in rectified.items():
        replace_relu(layers, product, relu)
    return set(rectified)


def _judge_of(product: Product, asked: Options) -> ChainJudge:
    assert asked.budget is not None  # else there are no chains
    judge = chain_judge(
        asked.budget, _device_for(product, asked), asked.distribution, asked.regime, None, FORMS,
        Format.of(product.dtype),
    )  # fmt: skip
    return replace(judge, quantizes_weights=True)


def _text_at(route: str, m: int | None) -> str:
    """The route; where m is known and not quantized the plain one, which Inductor sees."""
    return route if m is None or kernel_at(route, m) else PLAIN


def _device_for(product: Product, asked: Options) -> Device:
    given = product.device if asked.device is None else asked.device
    return dispatcher.device_named(given)


def _routes_of(
    product: Product, judge: Judge, device: Device, known: dict[tuple[Any, ...], tuple[Route, ...]]
) -> tuple[Route, ...]:
    half = Format.of(product.dtype)
    key = (
        product.n, product.k, product.has_bias, product.is_trained, product.is_turned, device, half,
    )  # fmt: skip
    if key not in known:
        known[key] = routes_of(
            product.n, product.k, judge, device, has_bias=product.has_bias,
            inference=not product.is_trained, is_prepared=False, is_turned=product.is_turned,
            turns_gradient=True, half=half,
        )  # fmt: skip
    return known[key]


def _tell(product: Product, routes: Sequence[Route], texts: Sequence[str], why: str) -> None:
    """Log what was chosen, and keep it for `explain`."""
    rows = "any m" if product.m is None else f"m={product.m}"
    title = f"{product.name} ({rows}, n={product.n}, k={product.k})"
    chosen = (f"{gemm}={words_of(text)}" for gemm, text in zip(GEMMS, texts, strict=False))
    why = why if why in ("", IN_CHAIN, WITH_RELU) else f"unchanged: {why}"
    logger.info("%s: %s", title, why or ", ".join(chosen))
    lines = [f"{title}: {why}"] if why else []
    lines += [f"{title}: {route.explain()}" for route in routes]
    _keep("\n".join(lines), title, product.is_trained)


def _keep(text: str, *key: Any) -> None:
    """Keep a text for `explain`, in the place of that with the same key."""
    if len(_EXPLAINED) > 4096:
        _EXPLAINED.clear()
    _EXPLAINED[key or (text,)] = text


def explain() -> str:
    """What the backend chose for each product and chain in this process, and why.

    The logger "lokakern" tells the choices in short when a graph is compiled, at level INFO.
    """
    return "\n".join(_EXPLAINED.values())
