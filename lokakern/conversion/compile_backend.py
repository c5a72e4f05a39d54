"""The backend "lokakern" of torch.compile: Inductor, with the kernels of `convert` in the graph.

::

    torch.compile(model, backend="lokakern", options={"budget": 0.06})

Each linear product of a graph (`lokakern.nn.graph_products`) gets the routes that measurements
choose. Weights are quantized in each call, so that they may change between calls, and times include
that. A graph without a chosen kernel reaches Inductor as Dynamo made it. torch finds the backend
through the entry point group ``torch_dynamo_backends``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from lokakern import sampled_check
from lokakern.conversion.routes import GEMMS, Judge, Route, routes_of
from lokakern.errors import FormatError, UnknownNameError
from lokakern.nn.compiled_form import fuse_quantizers
from lokakern.nn.graph_products import Product, linear_products
from lokakern.nn.linear import words_of
from lokakern.nn.routed_matmul import PLAIN, in_dtype, kernel_at
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of
from lokakern.types import COMPILED, Device, ErrorBudget, Format

logger = logging.getLogger("lokakern")
_EXPECTED = 'expected options={"budget": 0.06}, the largest row error of a product, or None'
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
        mode: The mode of torch.compile, which takes ``mode=`` or ``options=``, not both.
    """

    budget: ErrorBudget | None
    device: dispatcher.AnyDevice = None
    regime: str = COMPILED
    distribution: tuple[str, ...] | None = None
    check: str | None = None
    skip: tuple[str, ...] = ()
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
    """Replace the products that have a kernel; whether there was one."""
    judge = Judge(asked.budget, asked.distribution, regime=asked.regime)
    marker = sampled_check.Marker(asked.check)
    known: dict[tuple[Any, ...], tuple[Route, ...]] = {}
    is_changed = False
    for product in linear_products(gm):
        why, routes, texts = product.why_not, tuple[Route, ...](), list[str]()
        if not why and any(fnmatchcase(product.name, pattern) for pattern in asked.skip):
            why = "skip names it"
        if not why:
            routes = _routes_of(product, judge, _device_for(product, asked), known)
            texts = [_text_at(route.text, product.m) for route in routes]
            why = "" if any(texts) else "no product is quantized"
        if not why:
            sites = (f"{product.name}/{gemm}" for gemm in GEMMS)
            marked = zip((in_dtype(text, product.dtype) for text in texts), sites, strict=True)
            product.replace([marker.mark(text, asked.budget, site) for text, site in marked])
            is_changed = True
        _tell(product, routes, texts, why)
    return is_changed


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
    logger.info("%s: %s", title, f"unchanged: {why}" if why else ", ".join(chosen))
    lines = [f"{title}: unchanged: {why}"] if why else []
    lines += [f"{title}: {route.explain()}" for route in routes]
    if len(_EXPLAINED) > 4096:
        _EXPLAINED.clear()
    _EXPLAINED[title, product.is_trained] = "\n".join(lines)


def explain() -> str:
    """What the backend chose for each product in this process, kernel by kernel, and why.

    The logger "lokakern" tells the choices in short when a graph is compiled, at level INFO.
    """
    return "\n".join(_EXPLAINED.values())
