"""What runs instead of a chain: the time of each layer without it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lokakern.chain.candidates import NONE, Chain, Layer
from lokakern.conversion.chain_verdicts import SafeWays
from lokakern.conversion.routes import MRange, Route, problem_of
from lokakern.nn.routed_matmul import kernel_at
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, Kernel, fp8_format
from lokakern.selection import dispatcher
from lokakern.selection.candidates import Candidate, Time
from lokakern.selection.padded_rows import padded_problem
from lokakern.selection.table import Table
from lokakern.selection.weight_forms import FORMS
from lokakern.types import (
    COMPILER_PADS,
    Device,
    Format,
    Granularity,
    NormForm,
    Operand,
    Problem,
    norm_form,
)

MOST_KEPT = 1024  # columns of a row that Inductor's reductions keep in registers


class SpanLayer(NamedTuple):
    """A layer that may be part of a chain.

    Attributes:
        layer: Its sizes and epilogue.
        eps: Of its norm.
        route: The route of its output without a chain.
        is_handed: Whether its input then has a static scale, so that no quantizer runs.
        tensors: Of a layer without a norm that reads matrices beside, such as a cross, the number
            of tensors of the size of its output that are read and written less than by a product,
            and a kernel for the rest.
        ways: What a report of Probe finds safe; None: errors are those of the database.
        added: What a static scale of its output adds to its error if its norm has a weight or a
            bias, see `lokakern.conversion.static_rounding`; infinite where that is unknown.
    """

    layer: Layer
    eps: float
    route: Route
    is_handed: bool = False
    tensors: int = 0
    ways: SafeWays | None = None
    added: float = math.inf


@dataclass(frozen=True)
class ChainJudge:
    """What chains of a conversion are judged by.

    Attributes:
        limit: Largest accepted row error of each layer, stored or reported.
        device: Device of the times.
        distributions: Distributions of stored errors.
        regime: Regime of the times, as of `dispatch`.
        m_range: Smallest and largest m to choose for; None: all measured m.
        admits_static: Whether the budget admits static scales.
        weights: Granularities of quantized weights.
        half: Format in which layers multiply unquantized, and of a chain's input and output.
        quantizes_weights: Whether each call quantizes the weights, so that times of chains are with
            that.
    """

    limit: float
    device: Device
    distributions: tuple[str, ...]
    regime: str | None = None
    m_range: MRange | None = None
    admits_static: bool = True
    weights: tuple[Granularity, ...] = FORMS
    half: Format = Format.BFLOAT16
    quantizes_weights: bool = False

    def chain(self, layers: tuple[Layer, ...], m: int) -> Chain:
        """A request for a chain of unquantized input and output."""
        return Chain(layers, m, self.device, self.distributions, self.regime, half=self.half)

    def product(self, layer: Layer) -> Problem:
        """The product of a layer alone."""
        return problem_of("output", 16, layer.n, layer.k, half=self.half)


class Rivals:
    """The times of layers without a chain."""

    def __init__(self, judge: ChainJudge) -> None:
        self._judge = judge
        self._known: dict[tuple[SpanLayer, int, float], tuple[float, float] | None] = {}

    def measured_m(self, layer: Layer) -> list[int]:
        """The m at which the unquantized layer was measured."""
        return sorted({m for candidate in self._separate(layer) for m in candidate.times})

    def at(
        self, x: SpanLayer, m: int, reader: SpanLayer | None = None
    ) -> tuple[float, float] | None:
        """Time of a layer without a chain, and half of its interval; None if unknown.

        Args:
            x: The layer.
            m: Rows.
            reader: The next layer of the span, if there is one.
        """
        activation = 0.0 if reader is None else self._us_of_activation(x, reader, m)
        key = x, m, activation
        if key not in self._known:
            plain = min(_times(self._separate(x.layer), m), default=None, key=_us)
            known: list[tuple[float, float]] = []
            if is_pointwise(x.layer):
                known = list(self._pointwise(x, m))
            elif plain is not None:
                routed = self._by_route(x, m, plain)
                known = [(us + activation, margin) for us, margin in routed]
                # A kernel for nothing but a bias would be slower than the product alone.
                if not is_product(x.layer):
                    known.append((plain.gpu_us, plain.margin_us))
                again = self._us_to_read_again(x.layer, m)
                known = [(us + again, margin) for us, margin in known]
            self._known[key] = min(known, default=None)
        return self._known[key]

    def _us_of_activation(self, x: SpanLayer, reader: SpanLayer, m: int) -> float:
        """What a kernel for the activation takes that follows a product by its route, at least.

        It reads and writes the output, no faster than the fastest kernel that was ever timed. A
        product of torch.compile (but for templates of max-autotune) applies relu, and the kernel
        that quantizes for the next layer may apply any.
        """
        form = norm_form(x.layer.epilogue)
        is_free = form.last in ("none", "relu") or form.norm.kind != "none" or bool(form.beside)
        if is_free or kernel_at(reader.route.text, m):
            return 0.0
        return 2 * 2 * m * x.layer.n * self._least_us_per_byte()

    def _pointwise(self, x: SpanLayer, m: int) -> Iterator[tuple[float, float]]:
        """The times of a cross, residual or gate after the product by its route, or unquantized.

        A kernel for it moves bytes no faster than the fastest one that was ever timed.
        """
        least = 2 * x.tensors * m * x.layer.n * self._least_us_per_byte()
        alone = self._table_of(self._judge.product(x.layer)).plain_at(m)
        products = [(alone.gpu_us, alone.margin_us)] if alone is not None else []
        products += self._routed(x, m, 0.0)
        return ((us + least, margin) for us, margin in products)

    def _least_us_per_byte(self) -> float:
        device = self._judge.device
        return dispatcher.snapshot().least_us_per_byte(device, dispatcher.default_regime(device))

    def _us_to_read_again(self, layer: Layer, m: int) -> float:
        """What a compiler's norm of long rows takes longer than the norms that were timed.

        Those keep a row in registers. Inductor reads it once for its statistics and once more to
        normalize it: 28.6 us at 8192 x 2048 on an H200, where one read is 10 to 17.
        """
        norm = norm_form(layer.epilogue).norm
        is_compiled = self._judge.regime in COMPILER_PADS
        if not is_compiled or norm.kind == "none" or (norm.block or layer.n) <= MOST_KEPT:
            return 0.0
        return 2 * m * layer.n * self._least_us_per_byte()

    def _by_route(self, x: SpanLayer, m: int, plain: Time) -> Iterator[tuple[float, float]]:
        """The time of a layer as converted, if that of its product is known."""
        yield from self._routed(x, m, self._norm_us(x.layer, m, plain))

    def _routed(self, x: SpanLayer, m: int, norm: float) -> Iterator[tuple[float, float]]:
        """The time of the product by its route, if known, and of an unquantized norm."""
        if not x.route.choices:
            return
        table, name = x.route.choices[0].table, kernel_at(x.route.text, m)
        if not name:
            found = table.plain_at(m)
        elif x.is_handed:
            found = self._without_quantizer(x.layer, name, m)
            if found is None:  # what is not known counts nothing
                quantizer = self._quantizer(x.layer, name, m)
                whole = next(_times(_named(table, name), m), None)
                if whole is not None and quantizer is not None:
                    norm += max(0.0, whole.gpu_us - quantizer.gpu_us)
                yield norm, 0.0
        else:
            found = next(_times(_named(table, name), m), None)
        if found is not None:
            margin = found.margin_us if not found.is_of_host else 0.0
            yield found.gpu_us + norm, margin

    def _norm_us(self, layer: Layer, m: int, plain: Time) -> float:
        """What a norm adds to a product; 0 if unknown, as where a compiler pads unaligned rows."""
        if norm_form(layer.epilogue).norm.kind == "none":
            return 0.0
        alone = self._judge.product(layer)
        if padded_problem(alone) is not None:
            return 0.0
        product = self._table_of(alone).plain_at(m)
        return 0.0 if product is None else max(0.0, plain.gpu_us - product.gpu_us)

    def _without_quantizer(self, layer: Layer, name: str, m: int) -> Time | None:
        """The time of the GEMM of a composition."""
        kernel = KERNELS[(KERNELS[name].parts or (name,))[-1]]
        form = norm_form(layer.epilogue)
        problem = make_problem(
            "scaled_gemm", (16, layer.n, layer.k),
            a=Operand(fp8_format(self._judge.device), kernel.granularity),
            epilogue="bias" if form.bias else "none", out_format=self._judge.half,
        )  # fmt: skip
        return next(_times(_named(self._table_of(problem), kernel.name), m), None)

    def _quantizer(self, layer: Layer, name: str, m: int) -> Time | None:
        """The time of the quantizer of a composition."""
        kernel = KERNELS[(KERNELS[name].parts or (name,))[0]]
        problem = make_problem(
            "quantize", (16, layer.k), a=self._judge.chain((layer,), 16).operand(layer.k),
            out_format=fp8_format(self._judge.device), out_granularity=kernel.granularity,
        )  # fmt: skip
        return next(_times(_named(self._table_of(problem), kernel.name), m), None)

    def of_weight(self, layer: Layer, scales: Granularity) -> Time | None:
        """The least time to quantize the weight of a layer; None if none was measured."""
        problem = make_problem(
            "quantize", (layer.n, layer.k), a=self._judge.chain((layer,), 16).operand(layer.k),
            out_format=fp8_format(self._judge.device), out_granularity=scales,
        )  # fmt: skip
        return min(_times(self._table_of(problem).candidates, layer.n), default=None, key=_us)

    def _separate(self, layer: Layer) -> Iterator[Candidate]:
        """Unquantized kernels with a separate norm or activation."""
        problem = self._judge.chain((layer,), 16).problem(0, NONE, NONE, NONE)
        for candidate in self._table_of(problem).candidates:
            kernel = candidate.kernel
            if candidate.unquantized and kernel is not None and is_separate(kernel):
                yield candidate

    def _table_of(self, problem: Problem) -> Table:
        judge = self._judge
        return dispatcher.table_for(
            problem, None, judge.distributions, judge.device, judge.regime, is_choice=False,
            predicts=False,
        )  # fmt: skip


def is_separate(kernel: Kernel) -> bool:
    """Whether the norm or activation is a kernel of its own."""
    return bool(kernel.parts) or kernel.language == "torch"


def _named(table: Table, name: str) -> Iterator[Candidate]:
    return (candidate for candidate in table.candidates if candidate.name == name)


def _times(candidates: Iterable[Candidate], m: int) -> Iterator[Time]:
    for candidate in candidates:
        found = candidate.time_at(m)
        if found is not None:
            yield found[0]


def is_pointwise(layer: Layer) -> bool:
    """Whether a cross, residual or gate follows the product, and no norm."""
    form = norm_form(layer.epilogue)
    return form.norm.kind == "none" and bool(form.beside)


def is_product(layer: Layer) -> bool:
    """Whether nothing but a bias follows the product."""
    return norm_form(layer.epilogue)._replace(bias=False) == NormForm()


def _us(time: Time) -> float:
    return time.gpu_us
