"""What a traced forward does not show is refused, and what it shows is what the forward does."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lokakern.errors import UnsupportedError
from lokakern.nn.crossed_forward import CrossedForward
from lokakern.nn.raw_pattern import Matrix
from lokakern.nn.raw_product import RawProduct
from lokakern.nn.traced_forward import forward_of, traced, traced_modes

Run = Callable[[Any, Any], Any]
K = 16


class Around(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(K, K)), nn.Parameter(torch.randn(K))
        self.child, self.run = nn.ReLU(), run
        self.seen: list[Any] = []
        self.cache: dict[Any, Any] = {"of": []}

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def keeps_in_a_list(s: Any, x: Tensor) -> Tensor:
    s.seen.append(x @ s.w)
    return s.seen[-1]  # type: ignore[no-any-return]


def keeps_in_a_list_of_a_dict(s: Any, x: Tensor) -> Tensor:
    s.cache["of"].append(x)
    return x @ s.w  # type: ignore[no-any-return]


def keeps_by_size(s: Any, x: Tensor) -> Tensor:
    if x.shape[0] not in s.cache:
        s.cache[x.shape[0]] = x * 2
    return x @ s.w  # type: ignore[no-any-return]


def keeps_in_a_child(s: Any, x: Tensor) -> Tensor:
    s.child.last = x @ s.w
    return s.child.last  # type: ignore[no-any-return]


def registers(s: Any, x: Tensor) -> Tensor:
    s.register_buffer("made", None)
    return x @ s.w  # type: ignore[no-any-return]


def writes_an_attribute(s: Any, x: Tensor) -> Tensor:
    y = x @ s.w
    y.is_logits = True
    return y  # type: ignore[no-any-return]


def asks_for_gradients(s: Any, x: Tensor) -> Tensor:
    return x @ s.w if torch.is_grad_enabled() else x  # type: ignore[no-any-return]


def asks_for_autocast(s: Any, x: Tensor) -> Tensor:
    return x @ s.w if torch.is_autocast_enabled("cpu") else x  # type: ignore[no-any-return]


def asks_by_hasattr(s: Any, x: Tensor) -> Tensor:
    return x @ s.w if hasattr(x, "lengths") else x  # type: ignore[no-any-return]


def asks_an_attribute(s: Any, x: Any) -> Tensor:
    return x.values @ s.w if hasattr(x.values, "scale") else x.values  # type: ignore[no-any-return]


def asks_an_attribute_for_its_type(s: Any, x: Any) -> Tensor:
    return x.values @ s.w if isinstance(x.values, Tensor) else x  # type: ignore[no-any-return]


def asks_with_a_default(s: Any, x: Tensor) -> Tensor:
    scale = getattr(x, "scale", None)
    return x @ s.w if scale is None else x @ s.w * scale  # type: ignore[no-any-return]


def reads_what_may_be_missing(s: Any, x: Any) -> Tensor:
    mask = x.get("mask")
    return x["rows"] @ s.w if mask is None else mask  # type: ignore[no-any-return]


def checkpoints(s: Any, x: Tensor) -> Any:
    return checkpoint(lambda x: torch.tanh(x @ s.w), x, use_reentrant=False)


def attends_by_a_backend(s: Any, x: Tensor) -> Tensor:
    x = x @ s.w
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(x, x, x)


def seeds(s: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.rand_like(x) @ s.w


def asks_for_inference(s: Any, x: Tensor) -> Tensor:
    return x @ s.w if torch.is_inference_mode_enabled() else x  # type: ignore[no-any-return]


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


def calls_an_autograd_function(s: Any, x: Tensor) -> Tensor:
    return Negated.apply(x) @ s.w  # type: ignore[no-any-return, no-untyped-call]


def reads_all_attributes_of_a_child(s: Any, x: Tensor) -> Tensor:
    return x @ s.w if "shift" not in s.child.__dict__ else x  # type: ignore[no-any-return]


REFUSED = "the mode of gradients or autocast"


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (keeps_in_a_list, "sets the attribute seen"),
        (keeps_in_a_list_of_a_dict, "sets the attribute in a container"),
        (keeps_by_size, "sets the attribute cache"),
        (keeps_in_a_child, "sets the attribute last"),
        (registers, "sets the attribute _buffers"),
        (writes_an_attribute, "sets the attribute is_logits of a tensor"),
        (asks_for_gradients, f"depends on {REFUSED}"),
        (asks_for_autocast, f"depends on {REFUSED}"),
        (lambda s, x: x @ s.w * time.perf_counter(), "differs in each call"),
        (asks_by_hasattr, "asks whether a tensor has an attribute lengths"),
        (asks_an_attribute, "asks whether a tensor has an attribute scale"),
        (asks_an_attribute_for_its_type, "depends on the type of a tensor"),
        (asks_with_a_default, "asks whether a tensor has an attribute scale"),
        (reads_what_may_be_missing, r"calls get\(\)"),
        (checkpoints, f"changes {REFUSED}, or another one"),
        (attends_by_a_backend, f"changes {REFUSED}, or another one"),
        (seeds, f"changes {REFUSED}, or another one"),
        (asks_for_inference, f"depends on {REFUSED}"),
        (calls_an_autograd_function, "calls the autograd function Negated"),
        (reads_all_attributes_of_a_child, "reads all attributes of a child"),
    ],
)
@pytest.mark.parametrize("has_gradients", [True, False])
def test_what_a_graph_does_not_show(run: Run, words: str, has_gradients: bool) -> None:
    model = Around(run)
    before = [dict(vars(m)) for m in model.modules()]
    state = copy.deepcopy((model.seen, model.cache)), list(model._buffers)
    with torch.set_grad_enabled(has_gradients), pytest.raises(UnsupportedError, match=words):
        traced_modes(model)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert not torch.is_inference_mode_enabled()
    assert torch.equal(Negated.apply(torch.ones(1)), torch.ones(1))  # type: ignore[no-untyped-call]
    assert [dict(vars(m)) for m in model.modules()] == before
    assert ((model.seen, model.cache), list(model._buffers)) == state


def adds(s: Any, x: Tensor) -> Tensor:
    y = x @ s.w
    first = y
    y += s.b
    return y * first


def changes_its_input(s: Any, x: Tensor) -> Tensor:
    before = x
    x *= 2
    x -= 1
    return before @ s.w  # type: ignore[no-any-return]


def changes_a_slice(s: Any, x: Tensor) -> Tensor:
    y = x @ s.w
    part = y[:, :3]
    part /= 2
    return y  # type: ignore[no-any-return]


def counts(s: Any, x: Tensor) -> Tensor:
    size = x.shape[0]
    more = size
    more += 1
    return x @ s.w * size + more  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", [adds, changes_its_input, changes_a_slice, counts])
def test_operators_in_place(run: Run) -> None:
    model = Around(run)
    twin, x, y = copy.deepcopy(model), torch.randn(4, K), torch.randn(4, K)
    y.copy_(x)
    crossed = _with_its_product(model)
    model.forward = crossed.run  # type: ignore[method-assign]
    model = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.equal(model(x), twin(y)) and torch.equal(x, y)


def _with_its_product(model: nn.Module) -> CrossedForward:
    RawProduct(model, Matrix("w", (), True), has_bias=False).register()
    return CrossedForward(model, None, ())


def test_other_operators_in_place_are_refused() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        x **= 2
        return x @ s.w  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedError, match="in place"):
        traced_modes(Around(run))


def test_an_argument_that_holds_none_runs_the_own_forward() -> None:
    def run(s: Any, given: Any) -> Tensor:
        rows, others = given
        y: Tensor = rows @ s.w
        return y if others["mask"] is None else y * others["mask"]

    model = Around(run)
    x = torch.randn(4, K)
    model.forward = _with_its_product(model).run  # type: ignore[method-assign]
    with torch.no_grad():
        assert torch.equal(model((x, {"mask": None})), x @ model.w)
        assert torch.equal(model((x, {"mask": x})), x @ model.w * x)


def test_a_changed_graph_keeps_the_order_of_writes() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        y = x @ s.w
        first = s.child(s.child(y))
        both = y * first  # ready late, but before y changes
        y.add_(1)
        return both + y

    model, x = Around(run), torch.randn(4, K)
    expected = model(x)
    assert torch.equal(forward_of(model, traced(model))(model, x), expected)
