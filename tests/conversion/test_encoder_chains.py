"""Chains of the feed-forward blocks of torch's encoder and decoder layers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo import lookup_backend

from lokakern import numerics
from lokakern.chain.candidates import Layer
from lokakern.conversion.compile_backend import compile_graph, explain
from lokakern.errors import UnsupportedError
from lokakern.nn.crossed_forward import crossed_of
from lokakern.nn.graph_encoders import take_apart
from lokakern.nn.torch_owners import set_fast_paths
from lokakern.nn.traced_forward import traced
from tests.conversion.test_compiled_chains import OPTIONS, Compiled, of_weights
from tests.support.chain_rows import layer_rows
from tests.support.chained_models import chains_of, convert
from tests.support.measurements import BF16, Book, gemm, time

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PLAIN, FP8 = {512: 20.0, 2048: 60.0}, {512: 5.0, 2048: 15.0}
BOTH = ["linear1 linear2"]
LENGTH = 128


@pytest.fixture(autouse=True)
def _known(book: Book) -> None:
    """Rows by which both layers are one chain."""
    layers = [Layer(1024, 512, f"bias+{name}") for name in ("relu", "gelu")]
    layers += [Layer(512, 1024, f"bias+residual{norm}") for norm in ("", "+layer+affine")]
    sizes = ((1024, 512), (512, 1024))
    book.write(*(row for layer in layers for row in layer_rows(layer, PLAIN, FP8)))
    book.write(*(time(BF16, gemm(m, *x), us - 2) for m, us in PLAIN.items() for x in sizes))


def layer_of(kind: type[nn.Module] = nn.TransformerEncoderLayer, **options: Any) -> Any:
    torch.manual_seed(0)
    given = {"batch_first": True, "dropout": 0.25, **options}
    layer = kind(512, 8, 1024, **given)
    for norm in (x for x in layer.modules() if isinstance(x, nn.LayerNorm)):
        nn.init.normal_(norm.weight, 1.0, 0.25)
        nn.init.normal_(norm.bias)
    return layer.bfloat16().eval().requires_grad_(False)


def tokens(length: int = LENGTH, batch: int = 4) -> Tensor:
    return torch.randn(batch, length, 512, generator=torch.Generator().manual_seed(1)).bfloat16()


def is_chained(call: Any, *given: Any, **options: Any) -> bool:
    with torch.no_grad(), torch.profiler.profile() as profile:
        call(*given, **options)
    return any(event.name == "lokakern::routed_chain" for event in profile.events())


def without_fast_path(layer: nn.Module) -> Any:
    """A copy that calls its children, as the converted layer does."""
    copied: Any = copy.deepcopy(layer)
    copied.activation_relu_or_gelu = 0
    return copied


def error(y: Tensor, expected: Tensor) -> float:
    return numerics.measure_errors(y.flatten(0, 1), expected.flatten(0, 1).double()).row_err


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.GELU()])
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_feed_forward_block_is_a_chain(
    norm_first: bool, activation: Any, batch_first: bool
) -> None:
    model = layer_of(norm_first=norm_first, activation=activation, batch_first=batch_first)
    x, exact = tokens(), copy.deepcopy(model).double()(tokens().double())
    before, plain = model(x), without_fast_path(model)
    handle = convert(model, 0.06)
    assert chains_of(handle) == BOTH and torch.backends.mha.get_fastpath_enabled()
    y = model(x)
    assert is_chained(model, x) and torch.equal(model(x), y) and error(y, exact) < 0.06
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    assert is_chained(compiled, x) and error(compiled(x), exact) < 0.06
    # The attention of torch has a fast path in eager mode.
    assert batch_first or torch.equal(compiled(x), y)
    few = tokens(25)  # nothing was measured there
    assert torch.equal(model(few), plain(few)) and not is_chained(model, few)
    assert torch.equal(model(src=few, src_mask=None), plain(few))
    handle.undo()
    assert torch.equal(model(x), before) and "forward" not in vars(model)


def masks_of(kind: str, length: int) -> dict[str, Any]:
    causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.bfloat16)
    padding = torch.arange(length)[None] >= torch.tensor([length, 9, 5, length - 3])[:, None]
    return {
        "causal": {"src_mask": causal, "is_causal": True},
        "switches": {"src_mask": causal < 0},
        "padding": {"src_key_padding_mask": padding},
        "both": {"src_mask": causal < 0, "src_key_padding_mask": padding},
        "none": {"src_mask": None, "src_key_padding_mask": None, "is_causal": False},
    }[kind]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", ["causal", "switches", "padding", "both", "none"])
def test_calls_with_masks_run_the_chain(kind: str, norm_first: bool) -> None:
    model = layer_of(norm_first=norm_first)
    plain = without_fast_path(model)
    convert(model, 0.06)
    x, masks, few = tokens(), masks_of(kind, LENGTH), masks_of(kind, 25)
    y = model(x, **masks)
    assert is_chained(model, x, **masks) and error(y, plain(x, **masks)) < 0.06
    given = (masks.get(name) for name in ("src_mask", "src_key_padding_mask"))
    assert torch.equal(model(x, *given), y)
    assert torch.equal(y, model(x)) == (kind == "none")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    assert is_chained(compiled, x, **masks)
    assert error(compiled(x, **masks), plain(x, **masks)) < 0.06
    assert torch.equal(model(tokens(25), **few), plain(tokens(25), **few))
    with pytest.raises(AssertionError, match="only bool and floating types"):
        model(x, src_mask=torch.zeros(LENGTH, LENGTH, dtype=torch.int64))


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_decoder_layer_has_a_chain(norm_first: bool) -> None:
    model = layer_of(nn.TransformerDecoderLayer, norm_first=norm_first)
    plain, x, memory = copy.deepcopy(model), tokens(), tokens(17) * 0.5
    assert chains_of(convert(model, 0.06)) == BOTH
    causal = masks_of("causal", LENGTH)["src_mask"]
    for options in ({}, {"tgt_mask": causal, "tgt_is_causal": True}):
        assert is_chained(model, x, memory, **options)
        assert error(model(x, memory, **options), plain(x, memory, **options)) < 0.06
    assert torch.equal(model(tokens(25), memory), plain(tokens(25), memory))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("options", [{}, {"mask": "causal"}, {"src_key_padding_mask": "padding"}])
def test_encoders_of_several_layers(options: dict[str, str]) -> None:
    model = nn.TransformerEncoder(layer_of(), 2, enable_nested_tensor=True).eval()
    plain = copy.deepcopy(model)
    handle = convert(model, 0.06)
    assert chains_of(handle) == [f"layers.{i}.linear1 layers.{i}.linear2" for i in range(2)]
    given = {key: next(iter(masks_of(x, LENGTH).values())) for key, x in options.items()}
    x = tokens()
    y, expected = model(x, **given), plain(x, **given)
    if "src_key_padding_mask" in given:  # where torch's fast path has zeros
        kept = ~given["src_key_padding_mask"]
        y, expected = y[kept][None], expected[kept][None]
    assert is_chained(model, x, **given) and error(y, expected) < 0.09
    handle.undo()
    assert torch.equal(model(x, **given), plain(x, **given))


def test_nested_tensors_and_rows_without_a_batch() -> None:
    model = layer_of()
    before, other = copy.deepcopy(model), layer_of()
    convert(model, 0.06)
    convert(other, 0.06, chains=False)
    nested = torch.nested.nested_tensor([tokens(5)[0], tokens(7)[1]])
    for call in (model, lambda x: model(x, src_mask=None)):
        for one, two, three in zip(
            call(nested).unbind(), other(nested).unbind(), before(nested).unbind(), strict=True
        ):
            assert torch.equal(one, two) and error(one[None], three[None]) < 0.02
    flat = tokens(512, 1)[0]
    assert is_chained(model, flat) and error(model(flat)[None], before(flat)[None]) < 0.06


def seeded(model: nn.Module, *given: Any, **options: Any) -> Tensor:
    torch.manual_seed(3)
    return model(*given, **options)  # type: ignore[no-any-return]


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("norm_first", [False, True])
def test_training_is_that_of_torch(norm_first: bool) -> None:
    model = layer_of(norm_first=norm_first)
    plain, x = copy.deepcopy(model), tokens()
    convert(model, 0.06)
    chained = model(x)
    for each in (model, plain):
        each.train().requires_grad_(True)
    for options in ({}, masks_of("both", LENGTH)):
        assert torch.equal(seeded(model, x, **options), seeded(plain, x, **options))
        for each in (model, plain):
            each.zero_grad()
            seeded(each, x, **options).square().mean().backward()
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad)
    for each in (model, plain):
        each.eval()
    asked = x.clone().requires_grad_(True)
    y = model(asked)
    assert y.requires_grad and torch.equal(y, without_fast_path(plain)(asked))
    model.requires_grad_(False)
    assert torch.equal(model(x), chained)


def add_hook(name: str) -> Any:
    return lambda m: m.get_submodule(name).register_forward_hook(lambda *given: given[-1] * 2.0)


CHANGES: dict[str, Any] = {
    "linear1": add_hook("linear1"), "dropout": add_hook("dropout"), "norm2": add_hook("norm2"),
    "another activation": lambda m: setattr(m, "activation", F.silu),
    "another norm": lambda m: setattr(m, "norm2", nn.LayerNorm(512, eps=1.0).bfloat16()),
    "another order": lambda m: setattr(m, "norm_first", True),
    "another block": lambda m: setattr(m, "_ff_block", lambda x: x * 2.0),
    "samples": lambda m: m.dropout2.train(),
}  # fmt: skip


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", CHANGES)
def test_changed_layers_run_as_they_are(name: str) -> None:
    model, x = layer_of(), tokens()
    plain = without_fast_path(model)
    convert(model, 0.06)
    y = model(x)
    for each in (model, plain):
        CHANGES[name](each)
    assert torch.equal(seeded(model, x), seeded(plain, x)) and not is_chained(model, x)
    assert not torch.equal(seeded(model, x), y)


def test_a_fast_path_that_is_on_again_is_taken() -> None:
    model, x = layer_of(), tokens()
    plain = copy.deepcopy(model)
    convert(model, 0.06)
    model.activation_relu_or_gelu = 1
    assert torch.equal(model(x), plain(x)) and not is_chained(model, x)
    model.activation_relu_or_gelu = 0
    assert is_chained(model, x)


@pytest.mark.parametrize("is_on", [False, True])
def test_a_conversion_leaves_the_switch_of_fast_paths(is_on: bool) -> None:
    torch.backends.mha.set_fastpath_enabled(is_on)
    try:
        assert chains_of(convert(layer_of(), 0.06)) == BOTH
        assert torch.backends.mha.get_fastpath_enabled() == is_on
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class Own(nn.TransformerEncoderLayer):
    """A layer of a user."""

    def _ff_block(self, x: Tensor) -> Tensor:
        return super()._ff_block(x) * 2.0


def test_subclasses_and_training_conversions_are_left_alone() -> None:
    assert not chains_of(convert(layer_of(Own), 0.06))
    model = layer_of()
    convert(model.requires_grad_(True), 0.06, inference=False)
    assert crossed_of(model) is None
    with pytest.raises(UnsupportedError):  # mods do not see what a branch does
        traced(layer_of())


def test_copies_files_and_states() -> None:
    model, x = layer_of(), tokens()
    names = list(model.state_dict())
    convert(model, 0.06)
    y, file = model(x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert is_chained(other, x) and torch.equal(other(x), y)
    plain = layer_of()
    plain.load_state_dict({name: model.state_dict()[name] for name in names})
    assert torch.equal(plain(x), layer_of()(x))


def test_tuning_turns_the_chain_off() -> None:
    model, x = layer_of(), tokens()
    plain = without_fast_path(model)
    handle = convert(model, 0.06)
    handle.use_routes({}, off_chains=[("linear1", "linear2")], keep_classes=True)
    set_fast_paths([model])
    assert torch.equal(model(x), plain(x)) and not is_chained(model, x)
    handle.use_routes({}, off_chains=[], keep_classes=True)
    assert is_chained(model, x)


# ---- the backend of torch.compile ----

FAST = torch._transformer_encoder_layer_fwd


def apart(gm: fx.GraphModule, inputs: Any) -> Any:
    """The parts of encoder layers alone."""
    for fast, _ in take_apart(gm):
        gm.graph.erase_node(fast)
    gm.recompile()
    return lookup_backend("aot_eager")(gm, inputs)


# torch 2.11 does not compile its own fast path at dynamic sizes.
DYNAMIC = [False] if torch.__version__ < (2, 12) else [False, True]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("dynamic", DYNAMIC)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("kind", ["causal", "switches", "padding", "both", "none"])
def test_the_parts_of_a_fast_path_compute_what_it_does(
    kind: str, activation: str, norm_first: bool, dynamic: bool
) -> None:
    model = layer_of(norm_first=norm_first, activation=activation)
    masks, x = masks_of(kind, 25), tokens(25)
    call = torch.compile(model, backend=apart, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        y = call(x, **masks)
        assert torch.equal(y, model(x, **masks))
        assert kind != "none" or torch.equal(y, without_fast_path(model)(x))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_backend_chains_the_feed_forward_block(
    activation: str, norm_first: bool, book: Book
) -> None:
    norm = "" if norm_first else "+layer+affine"
    first, second = Layer(1024, 512, "bias+gelu"), Layer(512, 1024, f"bias+residual{norm}")
    book.write(*of_weights(first, second))
    model = nn.Sequential(
        layer_of(norm_first=norm_first, activation=activation), nn.Identity(),
        layer_of(norm_first=norm_first, activation=activation),
    )  # fmt: skip
    x, exact = tokens(), copy.deepcopy(model).double()(tokens().double())
    call = Compiled(model)
    assert error(call(x), exact) < 0.06
    assert call.epilogues == 2 * [[f"bias+{activation}", second.epilogue]]
    assert not call.calls_of(FAST)
    assert "0.linear1 to 0.linear2: chain of 2 layers (1024" in explain()


def test_an_encoder_layer_without_a_chain_stays_one_call(book: Book) -> None:
    model, x = layer_of(), tokens()
    for options in ({}, {"chains": False}, {"budget": None}):  # weights have no times here
        torch._dynamo.reset()
        call = Compiled(model, **options)
        assert torch.equal(call(x), model(x))
        assert call.calls_of(FAST) and not call.calls_of(F.layer_norm)


@pytest.mark.rest
def test_inductor_compiles_the_parts(book: Book) -> None:
    model, x = layer_of(), tokens()
    book.write(*of_weights(Layer(1024, 512, ""), Layer(512, 1024, "")))
    call = torch.compile(model, backend=compile_graph, options=OPTIONS, fullgraph=True)
    assert is_chained(call, x)
    with torch.no_grad():
        assert error(call(x), copy.deepcopy(model).double()(x.double())) < 0.06
