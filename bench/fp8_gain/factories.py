"""A user's model, named on the command line: what its linear layers multiply, and how often."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lokakern.bench.fp8_gain.products import Product
from lokakern.errors import UnknownNameError, UnsupportedError
from lokakern.nn.linear import Routed
from lokakern.nn.module_scan import inner_layers, named_modules, shape_of

_TORCH = str(Path(torch.__file__).parent)
EXPECTED = (
    "a function without arguments that returns a model, or a model and an example of its inputs: a "
    "tensor, a tuple of arguments, or a dictionary of them by name"
)


def factory_named(spec: str) -> Callable[[], Any]:
    """The function that ``package.module:factory`` names.

    Raises:
        UnknownNameError: There is no such module or function.
        UnsupportedError: It cannot be called without arguments.
    """
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise UnknownNameError(f"--model is {spec!r}; expected package.module:factory, {EXPECTED}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = "" if error.name == module_name else f" needs {error.name!r}, which"
        raise UnknownNameError(
            f"--model: {module_name!r}{missing} was not found; run this in the folder that holds "
            "it, set PYTHONPATH, or install it"
        ) from None
    except Exception as error:
        raise UnsupportedError(
            f"--model: importing {module_name!r} raised {_words(error)}"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        known = [n for n, value in vars(module).items()
                 if inspect.isfunction(value) and value.__module__ == module_name]  # fmt: skip
        raise UnknownNameError(
            f"--model: {module_name!r} has no {name!r}; it has {', '.join(known) or 'no functions'}"
        )
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise UnsupportedError(
            f"--model: {spec} is of type {type(found).__name__}, which cannot be called; expected "
            f"{EXPECTED}"
        )
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UnsupportedError(f"--model: {spec} cannot be called: {error}; expected {EXPECTED}"
                               ) from None  # fmt: skip
    except ValueError:  # a builtin, of which nothing is known
        pass
    made: Callable[[], Any] = found
    return made


def products_of_model(
    spec: str, rows: int | None, say: Callable[[str], None]
) -> tuple[list[Product], float | None]:
    """What a model's linear layers multiply in a forward pass.

    The model is made and called on the meta device, where nothing is allocated or computed; one
    that needs values is called on the CPU, and this is said.

    Args:
        spec: ``package.module:factory``.
        rows: Of every layer, for a factory that gives no example; None where it does.
        say: Told what had to be done otherwise.

    Returns:
        The products, and the share of the FLOPs of the forward pass that they are, as far as torch
        counts them; None where nothing was called.

    Raises:
        UnknownNameError: There is no such module or function, or the model has no linear layer.
        UnsupportedError: The factory or the model failed, or returned something else.
    """
    factory = factory_named(spec)
    try:
        with torch.device("meta"):
            found = _traced(spec, factory, rows)
    except _Failed as error:
        say(f"{spec} runs on the CPU, with all its memory: on the meta device {error}")
        try:
            found = _traced(spec, factory, rows)
        except _Failed as again:
            raise UnsupportedError(f"--model: {again}") from again.__cause__
    if not found[0]:
        raise UnknownNameError(
            f"--model: no nn.Linear of {spec} was called; other products are not counted"
        )
    return found


class _Failed(Exception):
    """The user's code raised."""


def _traced(
    spec: str, factory: Callable[[], Any], rows: int | None
) -> tuple[list[Product], float | None]:
    try:
        made = factory()
    except Exception as error:
        raise _Failed(f"{spec} raised {_words(error)}") from error
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"--model: {spec} returned {type(model).__name__}; expected {EXPECTED}"
        )
    if (example is None) == (rows is None):
        raise UnsupportedError(
            f"--model: {spec} returned a model alone; return an example of its inputs, too, or say "
            "with --rows how many rows each layer multiplies" if example is None
            else f"--rows: {spec} returns an example, which says how many rows there are"
        )  # fmt: skip
    inner = inner_layers(model)

    def is_site(module: nn.Module, _name: str) -> bool:
        return isinstance(module, nn.Linear | Routed) and id(module) not in inner

    sites = list(named_modules(model, is_site))
    if rows is not None:
        return [_product(name, layer, rows, 1) for name, layer in sites], None
    calls: Counter[tuple[str, int]] = Counter()
    for name, module in sites:
        module.register_forward_pre_hook(_counter(name, calls), with_kwargs=True)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        try:
            _call(model.eval(), example)
        except Exception as error:
            raise _Failed(f"calling {type(model).__name__} raised {_words(error)}") from error
    by_name = dict(sites)
    products = []
    for (name, m), count in calls.items():
        products.append(_product(name, by_name[name], m, count))
    counted = flops.get_total_flops()
    share = sum(p.flops for p in products) / counted if counted else None
    return products, share


def _product(name: str, layer: nn.Module, m: int, count: int) -> Product:
    n, k, has_bias, _ = shape_of(layer)  # padded ones multiply more
    return Product(name or "the model", m, n, k, count, has_bias)


def _counter(name: str, calls: Counter[tuple[str, int]]) -> Callable[..., None]:
    def see(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = inputs[0] if inputs else named["input"]
        if x.numel():
            calls[name, x.numel() // x.shape[-1]] += 1

    return see


def _call(model: nn.Module, example: Any) -> None:
    if isinstance(example, dict):
        model(**example)
    elif isinstance(example, tuple | list):
        model(*example)
    else:
        model(example)


def _words(error: Exception) -> str:
    """What was raised, and where in the user's code."""
    every = traceback.extract_tb(error.__traceback__)[1:]  # the first is ours
    frames = [frame for frame in every if not frame.filename.startswith(_TORCH)] or every
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}{place}"
