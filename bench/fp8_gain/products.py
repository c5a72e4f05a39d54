"""Products of a user's model, from a file of shapes, a Probe, or the model itself.

A file of shapes is TOML as ``sweep --suite`` reads it (`lokakern/workloads/suite_files.py`), CSV
with a header, or JSON, a list of objects or of lists:

    m,n,k,count,layer           [{"m": 8192, "n": 512, "k": 1024, "count": 3}, [8192, 512, 512]]
    8192,512,1024,3,mlp.0
    8192,512,512,,mlp.1
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib
import inspect
import io
import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lokakern.errors import SuiteError, UnknownNameError, UnsupportedError
from lokakern.mods.pad import Pad
from lokakern.nn.linear import Routed
from lokakern.nn.module_scan import inner_layers, named_modules, shape_of
from lokakern.probe.statistics import SiteStatistics
from lokakern.progress import tell
from lokakern.types import Format
from lokakern.workloads.suite_files import (
    MOST_CASES,
    check_keys,
    layers_from_file,
    read_text,
    shown,
    size_of,
)

KEYS = ("m", "n", "k", "count", "layer")


@dataclass(frozen=True, slots=True)
class Product:
    """A layer ``Y[m, n] = X[m, k] W[n, k]^T`` at one m."""

    layer: str  # its name
    m: int  # rows of X
    n: int  # outputs
    k: int  # inputs
    count: int = 1  # number of calls
    bias: bool = False  # whether the output has a bias
    batch: int = 1  # products in a batch
    format: Format = Format.BFLOAT16  # format of X, W and Y
    needs_input_gradient: bool = True  # in training; not if X depends on no parameter
    can_pad: bool = True  # whether `mods.Pad` takes a layer of this kind
    # Distributions similar to the operands, by GEMM; by default all realistic.
    distributions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        """FLOPs of all calls of one of its GEMMs."""
        return 2 * self.m * self.n * self.k * self.batch * self.count

    @property
    def padded(self) -> Product | None:
        """The product after `mods.Pad`; None if rows are aligned, or the layer would stay."""
        wide = Pad().sizes_of(self.n, self.k) if self.can_pad and self.batch == 1 else None
        if wide is None or not (self.n % 8 or self.k % 8):
            return None
        return replace(self, n=wide[0], k=wide[1])


def products_from_file(path: Path) -> list[Product]:
    """Read the products of a file of shapes.

    Raises:
        SuiteError: The file is unreadable or malformed.
    """
    readers = {".toml": _from_toml, ".csv": _from_csv, ".json": _from_json}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise SuiteError(f"shapes {path}: expected a file that ends in {', '.join(readers)}")
    found = reader(path)
    if not 1 <= len(found) <= MOST_CASES:
        raise SuiteError(f"shapes {path}: holds {len(found)} products; expected 1 to {MOST_CASES}")
    return found


def _from_toml(path: Path) -> list[Product]:
    return [
        Product(layer.name, m, layer.n, layer.k, layer.count, layer.bias, layer.batch, layer.format)
        for layer in layers_from_file(path)
        if {"gemm", "prepared"} & set(layer.forms)  # other forms are not products of a model
        for m in layer.m
    ]


def _from_csv(path: Path) -> list[Product]:
    text = io.StringIO(read_text(path), newline=None)
    try:
        lines = [line for line in csv.reader(text) if any(line)]
    except csv.Error as error:
        raise SuiteError(f"shapes {path}: is not CSV: {error}") from None
    head = [word.strip().lower() for word in lines[0]] if lines else []
    if not {"m", "n", "k"} <= set(head):
        raise SuiteError(
            f"shapes {path}: its first line is {shown(','.join(head))}; expected a header such as "
            "m,n,k or m,n,k,count,layer"
        )
    found = []
    for place, line in enumerate(lines[1:], 1):
        if len(line) > len(head):
            raise SuiteError(f"shapes {path}, row {place}: has {len(line)} values for {len(head)} "
                             "columns")  # fmt: skip
        entry = {key: word.strip() for key, word in zip(head, line, strict=False) if word.strip()}
        numbers = {k: int(v) if v.isascii() and v.isdigit() and len(v) < 20 else v
                   for k, v in entry.items()}  # fmt: skip
        if "layer" in entry:
            numbers["layer"] = entry["layer"]
        found.append(_product(numbers, place, path))
    return found


def _from_json(path: Path) -> list[Product]:
    try:
        entries = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise SuiteError(f"shapes {path}: is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise SuiteError(f"shapes {path}: is {shown(entries)}; expected a list of products")
    return [_product(entry, place, path) for place, entry in enumerate(entries, 1)]


def _product(entry: object, place: int, path: Path) -> Product:
    where = f"shapes {path}, row {place}"
    if isinstance(entry, list):
        entry = dict(zip(KEYS, entry, strict=False)) if 3 <= len(entry) <= len(KEYS) else None
    if not isinstance(entry, dict):
        raise SuiteError(f"{where}: expected m, n and k, such as [8192, 512, 1024]")
    check_keys(entry, KEYS, where)
    layer = entry.get("layer", f"row {place}")
    if not isinstance(layer, str) or not layer.isprintable():
        raise SuiteError(f"{where}: layer is {shown(layer)}; expected a name")
    m, n, k = (size_of(entry.get(key), key, where) for key in ("m", "n", "k"))
    return Product(layer, m, n, k, size_of(entry.get("count", 1), "count", where))


def products_of_probe(sites: Mapping[str, SiteStatistics], gemms: Sequence[str]) -> list[Product]:
    """Products of a Probe, each with the benchmarked distributions most similar to its operands.

    Nothing is replayed; `ProbeReport` judges by errors of the operands themselves.
    """
    found: list[Product] = []
    for place, (name, site) in enumerate(sites.items()):
        tell("reading layers", place / len(sites))
        found += _of_site(name, site, gemms)
    tell("reading layers", 1)
    return found


def _of_site(name: str, site: SiteStatistics, gemms: Sequence[str]) -> Iterator[Product]:
    from lokakern.probe.fingerprint import fingerprint_of, nearest, outside
    from lokakern.selection.dispatcher import OUTSIDE

    distributions = {}
    for gemm in gemms:
        print_ = fingerprint_of(site, gemm)
        words = outside(print_)
        distributions[gemm] = (f"{OUTSIDE}: {words}" if words else nearest(print_),)
    for m, count in sorted(site.sizes.items()):
        if m:
            yield Product(name, m, *site.shape[1:], count, site.has_bias,
                          needs_input_gradient=site.needs_input_gradient,
                          distributions=distributions)  # fmt: skip


def suite_of(layers: Iterable[Mapping[str, Any]], **header: str) -> str:
    """TOML for ``sweep --suite`` of layers, each by its fields in a suite file."""
    tables = [("", header), *(("[[layer]]\n", layer) for layer in layers)]
    return "\n".join(
        head + "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())
        for head, fields in tables
    )


# --- a model, named on the command line

_TORCH = str(Path(torch.__file__).parent)
EXPECTED = (
    "a function without arguments that returns a model, or a model and an example of its inputs: a "
    "tensor, a tuple of arguments, or a dictionary of them by name"
)


def factory_named(spec: str, what: str = "--model", expected: str = EXPECTED) -> Callable[[], Any]:
    """Import the function named ``package.module:factory``.

    Args:
        spec: The name.
        what: The argument that names it, for errors.
        expected: What it should be, for errors.

    Raises:
        UnknownNameError: The module or function is missing.
        UnsupportedError: It cannot be called without arguments.
    """
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise UnknownNameError(f"{what} is {spec!r}; expected package.module:factory, {expected}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = "" if error.name == module_name else f" needs {error.name!r}, which"
        raise UnknownNameError(
            f"{what}: {module_name!r}{missing} was not found; run this in the folder that holds "
            "it, set PYTHONPATH, or install it"
        ) from None
    except Exception as error:
        raise UnsupportedError(
            f"{what}: importing {module_name!r} raised {_words(error)}"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        known = [n for n, value in vars(module).items()
                 if inspect.isfunction(value) and value.__module__ == module_name]  # fmt: skip
        raise UnknownNameError(
            f"{what}: {module_name!r} has no {name!r}; it has {', '.join(known) or 'no functions'}"
        )
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise UnsupportedError(
            f"{what}: {spec} is of type {type(found).__name__}, which cannot be called; expected "
            f"{expected}"
        )
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UnsupportedError(f"{what}: {spec} cannot be called: {error}; expected {expected}"
                               ) from None  # fmt: skip
    except ValueError:  # a builtin without a signature
        pass
    made: Callable[[], Any] = found
    return made


def products_of_model(
    spec: str, rows: int | None, say: Callable[[str], None], *, is_trained: bool = False
) -> tuple[list[Product], float | None]:
    """Products of a model's linear layers in a forward pass.

    The model is built and called on the meta device, without memory or computation; a model that
    needs values is called on the CPU, with a message.

    Args:
        spec: ``package.module:factory``.
        rows: Rows of every layer, for a factory without an example of inputs.
        say: Called with messages.
        is_trained: Whether to find out which inputs need gradients.

    Returns:
        The products, and their share of the FLOPs of the forward pass as torch counts them; None
        if nothing was called.

    Raises:
        UnknownNameError: The module or function is missing, or the model has no linear layer.
        UnsupportedError: The factory or the model failed, or returned an unexpected type.
    """
    factory = factory_named(spec)
    try:
        with torch.device("meta"):
            found = _traced(spec, factory, rows, is_trained)
    except _Failed as error:
        say(f"{spec} runs on the CPU, with all its memory: on the meta device {error}")
        try:
            found = _traced(spec, factory, rows, is_trained)
        except _Failed as again:
            raise UnsupportedError(f"--model: {again}") from again.__cause__
    if not found[0]:
        raise UnknownNameError(
            f"--model: no nn.Linear of {spec} was called; other products are not counted"
        )
    return found


class _Failed(Exception):
    """The user's code raised an exception."""


def _traced(
    spec: str, factory: Callable[[], Any], rows: int | None, is_trained: bool
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
        return [_layer_product(name, layer, rows, 1) for name, layer in sites], None
    layers = dict(sites)
    grad = torch.set_grad_enabled(is_trained)
    needs: set[str] = set()
    with grad, FlopCounterMode(display=False) as flops, counted(layers, needs) as calls:
        try:
            _call(model.eval(), example)
        except Exception as error:
            raise _Failed(f"calling {type(model).__name__} raised {_words(error)}") from error
    products = [
        replace(
            _layer_product(name, layers[name], m, count),
            needs_input_gradient=not is_trained or name in needs,
        )
        for (name, m), count in calls.items()
    ]
    total = flops.get_total_flops()
    return products, sum(p.flops for p in products) / total if total else None


def _layer_product(name: str, layer: nn.Module, m: int, count: int) -> Product:
    n, k, has_bias, _ = shape_of(layer)  # as padded
    can_pad = Pad().takes(layer)
    return Product(name or "the model", m, n, k, count, has_bias, can_pad=can_pad)


@contextlib.contextmanager
def counted(
    layers: Mapping[str, nn.Module], differentiated: set[str] | None = None
) -> Iterator[Counter[tuple[str, int]]]:
    """Count calls of layers inside, by name and rows of the input.

    Args:
        layers: The layers by name.
        differentiated: Receives the names of layers with an input that requires a gradient.
    """
    calls: Counter[tuple[str, int]] = Counter()

    def see(name: str, _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = inputs[0] if inputs else named["input"]
        if x.numel():
            calls[name, x.numel() // x.shape[-1]] += 1
            if differentiated is not None and x.requires_grad:
                differentiated.add(name or "the model")

    handles = [
        layer.register_forward_pre_hook(functools.partial(see, name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _call(model: nn.Module, example: Any) -> None:
    if isinstance(example, dict):
        model(**example)
    elif isinstance(example, tuple | list):
        model(*example)
    else:
        model(example)


def _words(error: Exception) -> str:
    """The exception, and its line in the user's code."""
    every = traceback.extract_tb(error.__traceback__)[1:]  # the first frame is ours
    frames = [frame for frame in every if not frame.filename.startswith(_TORCH)] or every
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}{place}"
