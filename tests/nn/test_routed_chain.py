"""Chains in modules: their results, operands, and the calls that run the modules one by one."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from lokakern import mods, numerics
from lokakern.chain.candidates import Chain, Layer, Step
from lokakern.chain.launches import kernel_on
from lokakern.chain.runner import ChainRun
from lokakern.device import current_device
from lokakern.errors import UnsupportedError
from lokakern.nn.adoption import Chosen, apply_choice, remove_choice
from lokakern.nn.chain_plan import ChainLayer, ChainStep, plan_text
from lokakern.nn.linear import Linear
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.routed_chain import WIDTH, form_of_input
from lokakern.nn.static_handoff import BoundedSequential, remove_handoff, set_handoff
from lokakern.registry.register import KERNELS, kernel_named, load_kernels
from lokakern.types import Granularity
from tests.support import native
from tests.support.routed_layers import BY_ROW, ROUTES, rows, same
from tests.support.routed_layers import layer_of as layer_by

NONE, TENSOR, ROW, GROUP, BLOCK = (
    Granularity.NONE, Granularity.TENSOR, Granularity.ROW, Granularity.GROUP, Granularity.BLOCK
)  # fmt: skip
K = 64
Columns = tuple[Granularity, Granularity, Granularity]


def step(place: int, kernel: str, scales: Columns) -> ChainStep:
    return ChainStep(place, kernel, *scales)


BY_ROWS = (
    step(0, "cuda.quantize_row+cuda.gemm_norm_row", (NONE, ROW, ROW)),
    step(1, "cuda.gemm_norm_row", (ROW, ROW, NONE)),
)
EPILOGUES = ("bias+layer+affine+relu", "bias+hardswish")


def plan_of(
    steps: tuple[ChainStep, ...] = BY_ROWS,
    weights: tuple[Granularity, Granularity] = (ROW, ROW),
    epilogues: tuple[str, str] = EPILOGUES,
    first: int = 16,
    n: int = 48,
) -> str:
    layers = [
        ChainLayer(n, K, epilogues[0], 1e-5, weights[0]),
        ChainLayer(40, n, epilogues[1], 1e-5, weights[1]),
    ]
    return plan_text(layers, [(0, ()), (first, steps)], [(0, ()), (first, steps)])


PLAN = plan_of()


def model_of(norm: nn.Module | None = None, n: int = 48) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.LayerNorm(n) if norm is None else norm
    model = nn.Sequential(
        Linear(K, n), norm, nn.ReLU(), Linear(n, 40), nn.Hardswish(), Linear(40, 8)
    ).bfloat16()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, -0.5, 1.0)
    return model


def chained(model: nn.Sequential | None = None, plan: str = PLAN, key: str = "") -> nn.Sequential:
    model = model_of() if model is None else model
    count = len(model)
    set_handoff(model, [""] * count, [""] * count, key, [plan] + [""] * (count - 1))
    return model


def one_by_one(model: nn.Sequential, x: Tensor) -> Tensor:
    for module in model:
        x = module(x)
    return x


def steps_run(model: nn.Sequential, x: Tensor, steps: tuple[ChainStep, ...], plan: str) -> Tensor:
    """The two layers of a model by `ChainRun`, on kernels in torch."""
    device = current_device()
    n = model[0].out_features
    words = plan.split(";")[0].split(",")
    layers = (Layer(n, K, words[0].split("|")[2]), Layer(40, n, words[1].split("|")[2]))
    chain = Chain(layers, len(x), device, (), None)
    found = [
        Step(s.place, chain.problem(s.place, s.reads, s.weight, s.writes), s.kernel) for s in steps
    ]
    norm = model[1]
    vectors = (getattr(norm, "weight", None), getattr(norm, "bias", None))
    parameters = [(model[0].weight, model[0].bias, *vectors),
                  (model[3].weight, model[3].bias, None, None)]  # fmt: skip
    made = ChainRun(chain, found, parameters, 1e-5)(x)
    assert isinstance(made, Tensor)
    return made


IN_TORCH = {
    ROW: ("torch.norm_emulated_row", ROW),
    TENSOR: ("torch.norm_emulated_row", ROW),
    GROUP: ("torch.norm_emulated_block", BLOCK),
}


@pytest.mark.parametrize("m", [1, 16, 17, 48])
@pytest.mark.parametrize("between", [ROW, GROUP, TENSOR])
@pytest.mark.parametrize("block", [False, True])
def test_a_chain_has_the_bits_of_its_steps(between: Granularity, block: bool, m: int) -> None:
    """A static scale is read as equal scales of rows."""
    kernel, scales = IN_TORCH[between]
    first, _ = IN_TORCH[ROW]
    steps = (
        step(0, f"torch.quantize_row+{first}", (NONE, ROW, between)),
        step(1, kernel, (ROW if between is TENSOR else between, scales, NONE)),
    )
    norm = mods.BlockRMSNorm(48, 16) if block else None
    epilogues = ("bias+block_rms(16)+relu" if block else EPILOGUES[0], EPILOGUES[1])
    plan = plan_of(steps, (ROW, scales), epilogues, first=1)
    model, x = model_of(norm), rows(m)
    with torch.no_grad():
        expected = model[5](steps_run(model, x, steps, plan))
        chained(model, plan)
        for _ in range(2):
            assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("cuda", "in_torch", "scales"),
    [
        ("cuda.gemm_norm_row", "torch.norm_emulated_row", (ROW, ROW)),
        ("cuda.gemm_norm_block", "torch.norm_emulated_block", (GROUP, BLOCK)),
        ("cuda.gemm_norm_tensor", "torch.norm_emulated_tensor", (TENSOR, TENSOR)),
        ("cuda.quantize_row+cuda.gemm_norm_row",
         "torch.quantize_row+torch.norm_emulated_row", (NONE, ROW)),
        ("cuda.scaled_gemm_row+cuda.norm_quantize",
         "torch.emulated_row+torch.norm_quantize", (ROW, ROW)),
        ("cuda.quantize_row+cuda.scaled_gemm_row+cuda.norm_quantize",
         "torch.quantize_row+torch.emulated_row+torch.norm_quantize", (NONE, ROW)),
        ("torch.bf16+cuda.norm_quantize", "torch.bf16+torch.norm_quantize", (NONE, NONE)),
    ],
)  # fmt: skip
def test_emulations_have_the_bits_of_kernels_in_torch(
    cuda: str, in_torch: str, scales: tuple[Granularity, Granularity]
) -> None:
    load_kernels()
    if cuda not in KERNELS or in_torch not in KERNELS:
        pytest.skip(f"{cuda} or {in_torch} is not registered here")
    reads, weight = scales
    model, x, found = model_of(), rows(), []
    before = (
        [] if reads is NONE else [step(0, f"torch.quantize_{reads.suffix}", (NONE, NONE, reads))]
    )
    for kernel in (cuda, in_torch):
        steps = (
            *before, step(0, kernel, (reads, weight, ROW)),
            step(1, "torch.norm_emulated_row", (ROW, ROW, NONE)),
        )  # fmt: skip
        with torch.no_grad():
            found.append(chained(model, plan_of(steps, (weight, ROW)))(x))
    # torch adds up a product of bfloat16 in another order.
    exact = weight is not NONE
    assert torch.equal(*found) if exact else torch.allclose(*found, rtol=0.05, atol=0.05)
    assert (kernel_on(cuda, x.device) is kernel_named(cuda)) == torch.cuda.is_available()


UNQUANTIZED = (
    step(0, "cuda.gemm_norm_bf16", (NONE, NONE, NONE)),
    step(1, "cuda.gemm_norm_bf16", (NONE, NONE, NONE)),
)
MIXED = (
    step(0, "cuda.gemm_norm_bf16", (NONE, NONE, ROW)),
    step(1, "cuda.gemm_norm_row", (ROW, ROW, NONE)),
)


@pytest.mark.parametrize(
    ("steps", "weights", "limit"),
    [(BY_ROWS, (ROW, ROW), 0.08), (MIXED, (NONE, ROW), 0.06), (UNQUANTIZED, (NONE, NONE), 0.01)],
)
def test_errors_against_float64(
    steps: tuple[ChainStep, ...], weights: tuple[Granularity, Granularity], limit: float
) -> None:
    """Rounding to FP8 costs up to 0.04 of a row for each quantized product."""
    model, x = model_of(), rows()
    exact = one_by_one(copy.deepcopy(model).double(), x.double()).detach()
    with torch.no_grad():
        y = chained(model, plan_of(steps, weights))(x)
    assert numerics.measure_errors(y.double(), exact).row_err < limit


def test_m_without_launches_runs_the_modules(calls: list[Any]) -> None:
    model = chained()
    for m in (0, 1, 15):
        assert torch.equal(model(rows(m)), one_by_one(model, rows(m)))
    assert not calls
    model(rows(16))
    assert len(calls) == 1


@pytest.mark.parametrize("norm", ["layer", "rms", "block"])
def test_the_op_computes_m_without_launches_as_the_modules(norm: str, calls: list[Any]) -> None:
    module, words = {
        "layer": (nn.LayerNorm(48), "layer+affine"),
        "rms": (nn.RMSNorm(48, eps=1e-5), "rms+affine"),
        "block": (mods.BlockRMSNorm(48, 16), "block_rms(16)"),
    }[norm]
    plan = plan_of(epilogues=(f"bias+{words}+relu", EPILOGUES[1]))
    model = chained(model_of(module), plan)
    model(rows())
    ((_, operands, _),) = calls
    weights = [model[0].weight, model[3].weight]
    whole = [x if i % WIDTH else weights[i // WIDTH] for i, x in enumerate(operands)]
    for m in (0, 1, 7):
        y = torch.ops.lokakern.routed_chain(rows(m), whole, plan)
        assert y.shape == (m, 40) and y.dtype is torch.bfloat16
        assert torch.equal(y, one_by_one(model[:5], rows(m)))
    # Without the bfloat16 weights those of FP8 are read.
    few = torch.ops.lokakern.routed_chain(rows(7), operands, plan)
    exact = one_by_one(model[:5], rows(7))
    assert 0 < numerics.measure_errors(few.double(), exact.double()).row_err < 0.08


def test_inputs_of_any_layout(calls: list[Any]) -> None:
    model, x = chained(), rows()
    expected = model(x)
    shifted = torch.empty(48 * K + 1, dtype=x.dtype)[1:].view(48, K).copy_(x)
    wide = torch.zeros(48, K + 3, dtype=x.dtype)
    wide[:, :K] = x
    for given in (x.t().contiguous().t(), shifted, wide[:, :K]):
        assert torch.equal(model(given), expected)
    for shape in ((3, 16), (2, 3, 8)):
        assert torch.equal(model(x.view(*shape, K)), expected.view(*shape, 8))
    turned = x.view(3, 16, K).transpose(0, 1)
    assert torch.equal(model(turned), model(turned.contiguous()))
    assert len(calls) == 8 and not calls[0][1][0]


def test_vectors_do_not_have_to_be_aligned(calls: list[Any]) -> None:
    model, x = chained(), rows()
    expected = model(x)
    for module in (model[0], model[1], model[3]):
        kept = torch.empty(module.bias.numel() + 1, dtype=torch.bfloat16)[1:]
        module.bias = nn.Parameter(kept.copy_(module.bias))
    assert torch.equal(model(x), expected) and len(calls) == 2


# --- calls that run the modules


def hooked(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda *_: None)


def hooked_norm(model: nn.Sequential) -> None:
    model[1].register_forward_pre_hook(lambda *_: None)


def hooked_activation(model: nn.Sequential) -> None:
    model[4].register_forward_hook(lambda *_: None)


def replaced(model: nn.Sequential) -> None:
    model[2] = nn.SiLU()


def replaced_in_place(model: nn.Sequential) -> None:
    model._modules["3"] = nn.Linear(48, 40).bfloat16()


def with_another_eps(model: nn.Sequential) -> None:
    model[1].eps = 1e-3


def without_bias(model: nn.Sequential) -> None:
    model[0].bias = None


def without_norm_weight(model: nn.Sequential) -> None:
    model[1].weight = model[1].bias = None


def with_another_forward(model: nn.Sequential) -> None:
    model[1].forward = lambda x: x


def padded(model: nn.Sequential) -> None:
    assert mods.apply(model[0], [mods.Pad(k=20, n=1)]).changed


def mixing(model: nn.Sequential) -> None:
    model[0].is_mixing = True
    model[0].changed()


def offloaded(model: nn.Sequential) -> None:
    layer = model[3]
    layer.take_routes((BY_ROW, "", ""), layer.weight)
    layer.freeze()
    layer.offload(torch.device("cpu"))


def parametrized(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[0])


CHANGES = [
    hooked, hooked_norm, hooked_activation, replaced, replaced_in_place, with_another_eps,
    without_bias, without_norm_weight, with_another_forward, padded, mixing, offloaded,
    parametrized,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_modules_run_one_by_one(
    change: Callable[[nn.Sequential], None], calls: list[Any]
) -> None:
    model, x = chained(), rows()
    model(x)
    assert len(calls) == 1
    change(model)
    assert torch.equal(model(x), one_by_one(model, x)) and len(calls) == 1
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", dynamic=False)
    assert torch.equal(compiled(x), one_by_one(model, x)) and len(calls) == 1


def test_global_hooks_run_the_modules(calls: list[Any]) -> None:
    model, x, seen = chained(), rows(), []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        model(x)
    finally:
        hook.remove()
    assert not calls and len(seen) == 7
    model(x)
    assert len(calls) == 1


def test_gradients_run_the_modules(calls: list[Any]) -> None:
    model, x = chained(), rows()
    with torch.enable_grad():
        y = model(x)
        y.float().sum().backward()
        assert not calls and model[0].weight.grad is not None
        model.requires_grad_(False)
        model(x.clone().requires_grad_())
        assert not calls
        model(x)  # nothing needs a gradient
    assert len(calls) == 1


def test_other_inputs_run_the_modules(calls: list[Any]) -> None:
    model, x = chained(), rows()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), one_by_one(model, x))
    model(x[0])  # a vector
    torch.func.vmap(model)(x.view(3, 16, K))
    with pytest.raises(NotImplementedError, match="hardswish"):  # of the module
        model(torch.nested.nested_tensor([x, x], layout=torch.jagged))
    wide = copy.deepcopy(model).float()
    wide(x.float())
    with pytest.raises(RuntimeError):
        model(x[:, :32])
    assert torch.fx.symbolic_trace(nn.Sequential(*model))(x).shape == (48, 8)
    assert not calls
    with torch.autocast("cpu", enabled=False):
        model(x)
    assert len(calls) == 1


def test_slices_run_the_modules(calls: list[Any]) -> None:
    model, x = chained(), rows()
    assert torch.equal(model[:5](x), one_by_one(model[:5], x)) and not calls


# --- weights


def chain_buffers(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_buffers() if "chain_" in name]


def test_a_frozen_weight_is_not_kept_twice(calls: list[Any]) -> None:
    model = model_of()
    for layer in (model[0], model[3]):
        layer.take_routes(ROUTES, layer.weight)
        layer.freeze()
    chained(model)
    assert not chain_buffers(model)
    y = model(rows())
    assert calls[0][1][1] is model[0].fp8_data and calls[0][1][2] is model[0].fp8_scale
    for layer in (model[0], model[3]):  # another product, so that its own weight is needed
        layer.take_routes(("", "", ""), layer.weight)
        layer.freeze()
    assert len(chain_buffers(model)) == 4
    assert torch.equal(chained(model_of())(rows()), y)
    model[0].take_routes(ROUTES, model[0].weight)
    model[0].freeze()
    assert len(chain_buffers(model)) == 2
    set_handoff(model, [""] * 6, [""] * 6)
    assert not chain_buffers(model)


def test_undoing_removes_weights_and_restores_the_class(calls: list[Any]) -> None:
    model, x = chained(key="a"), rows()
    assert "0.chain_data_row" in chain_buffers(model)
    assert not [name for name in model.state_dict() if "chain" in name]
    chained(model, key="b")
    remove_handoff(model, "a")
    assert len(chain_buffers(model)) == 4
    model(x)
    assert len(calls) == 1
    remove_handoff(model, "b")
    assert not chain_buffers(model) and type(model) is nn.Sequential
    assert not model[0]._chain_weights
    model(x)
    assert len(calls) == 1


def test_adopted_layers_become_linear_layers_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 40),
                          nn.Hardswish(), nn.Linear(40, 8)).bfloat16()  # fmt: skip
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    from lokakern.nn.adoption import adopt

    for place in (0, 3):
        adopt(model[place])
        apply_choice(model[place], Chosen("a", ("", "", ""), True))
    chained(model, key="a")
    assert chain_buffers(model)
    for place in (0, 3):
        remove_choice(model[place], "a")
    remove_handoff(model, "a")
    assert type(model[0]) is nn.Linear and type(model) is nn.Sequential
    assert not chain_buffers(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_new_weights_are_quantized_when_they_are_loaded(calls: list[Any]) -> None:
    model, x = chained(), rows()
    address = model[0].chain_data_row.data_ptr()
    other = model_of()
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    for assign in (False, True):
        model.load_state_dict(copy.deepcopy(other).state_dict(), assign=assign)
        assert torch.equal(model(x), chained(copy.deepcopy(other))(x))
        assert model[0].chain_data_row.data_ptr() == address
    assert len(calls) == 4
    nn.init.zeros_(model[0].weight)  # as of a frozen weight, this has no effect
    assert torch.equal(model(x), chained(other)(x))
    model[0].freeze()
    assert not torch.equal(model(x), other(x))


def test_a_shared_layer_keeps_one_weight(calls: list[Any]) -> None:
    shared = Linear(K, K).bfloat16()
    layers = [ChainLayer(K, K, "bias", 1e-5, ROW)] * 2
    steps = (
        step(0, "cuda.quantize_row+cuda.gemm_norm_row", (NONE, ROW, ROW)),
        step(1, "cuda.gemm_norm_row", (ROW, ROW, NONE)),
    )
    plan = plan_text(layers, [(0, steps)], [(0, steps)])
    first, second = nn.Sequential(shared, shared), nn.Sequential(shared, shared)
    for model in (first, second):
        set_handoff(model, ["", ""], ["", ""], "a", [plan, ""])
    assert shared._chain_weights == (("a", "row"),) * 4
    assert torch.equal(first(rows()), second(rows())) and len(calls) == 2
    remove_handoff(first, "a")
    second(rows())
    assert len(calls) == 3
    remove_handoff(second, "a")
    assert not chain_buffers(shared)


def test_a_newer_choice_for_one_layer_ends_the_chain(calls: list[Any]) -> None:
    """It may train the layer, whose FP8 weight for the chain would be stale."""
    model, x = model_of(), rows(32)
    for layer in (model[0], model[3]):
        apply_choice(layer, Chosen("first", ("", "", ""), True))
    chained(model, key="first")
    y = model(x)
    assert len(calls) == 1
    apply_choice(model[3], Chosen("second", (BY_ROW, "", ""), True))  # of the same granularity
    model(x)
    apply_choice(model[3], Chosen("second", ("", "", ""), False))
    model[3].weight.mul_(-1)
    assert torch.equal(model(x), one_by_one(model, x))
    assert len(calls) == 1 and "chain_data_row" not in model[3]._buffers
    model[3].weight.mul_(-1)
    remove_choice(model[3], "second")
    assert torch.equal(model(x), y) and len(calls) == 2


def test_copies_and_pickles(calls: list[Any]) -> None:
    model, x = chained(), rows()
    y = model(x)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(made, BoundedSequential) and torch.equal(made(x), y)
        compiled = torch.compile(made, backend="eager", fullgraph=True, dynamic=False)
        assert torch.equal(compiled(x), y)
        remove_handoff(made)
        assert not chain_buffers(made)
    assert torch.equal(model(x), y) and len(calls) >= 4


def test_casts_of_a_model(calls: list[Any]) -> None:
    model, x = chained(), rows()
    y = model(x)
    model.float()
    model(x.float())
    assert len(calls) == 1
    model.bfloat16()
    assert torch.equal(model(x), y) and len(calls) == 2
    model.to("meta")
    assert model(x.to("meta")).shape == (48, 8) and len(calls) == 2


def test_a_chain_of_other_modules_is_refused() -> None:
    model = model_of()
    for plan in (plan_of(n=32), plan_of(epilogues=("layer+relu", "bias"))):
        with pytest.raises(UnsupportedError, match="cannot begin at module 0"):
            chained(model, plan)
    with pytest.raises(UnsupportedError, match="cannot begin at module 3"):
        set_handoff(model, [""] * 6, [""] * 6, "", [""] * 3 + [PLAN, "", ""])
    assert type(model) is nn.Sequential and not chain_buffers(model)


# --- a layer with its norm


def layer_of(**options: Any) -> LinearNormAct:
    torch.manual_seed(0)
    return LinearNormAct(K, 48, dtype=torch.bfloat16, **options)


def plan_of_one(epilogue: str) -> str:
    steps = (step(0, "cuda.quantize_row+cuda.gemm_norm_row", (NONE, ROW, NONE)),)
    layer = ChainLayer(48, K, epilogue, 1e-5, ROW)
    return plan_text([layer], [(0, ()), (16, steps)], [(0, ())])


@pytest.mark.parametrize(
    ("options", "epilogue"),
    [
        ({}, "bias+layer+affine+relu"),
        ({"norm": "rms", "activation": None, "bias": False}, "rms+affine"),
        ({"norm": "block_rms(16)", "activation": "silu"}, "bias+block_rms(16)+silu"),
        ({"norm": "none", "activation": "hardswish"}, "bias+hardswish"),
    ],
)
def test_a_layer_with_a_norm_alone(
    options: dict[str, Any], epilogue: str, calls: list[Any]
) -> None:
    layer, x = layer_of(**options), rows()
    apply_choice(layer, Chosen("a", ("", "", ""), True, plan_of_one(epilogue)))
    y = layer(x)
    exact = copy.deepcopy(layer).double()(x.double())
    assert numerics.measure_errors(y.double(), exact).row_err < 0.06 and len(calls) == 1
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), y)
    layer(x, residual=torch.zeros(48, 48).bfloat16())
    layer(x[:5])
    made = pickle.loads(pickle.dumps(layer))
    assert torch.equal(made(x), y)
    sequence = nn.Sequential(layer, nn.Identity())
    set_handoff(sequence, ["", ""], ["", ""], "b", [plan_of_one(epilogue), ""])
    assert torch.equal(sequence(x), y)
    remove_handoff(sequence, "b")
    remove_choice(layer, "a")
    assert not chain_buffers(layer) and not layer._chain
    count = len(calls)
    layer(x)
    assert len(calls) == count


def test_a_layer_refuses_the_chain_of_another() -> None:
    for plan in (plan_of_one("bias+relu"), PLAN):
        with pytest.raises(UnsupportedError, match="cannot be set"):
            layer_of().take_chain(plan)


# --- compilers


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_models_have_one_op(backend: str) -> None:
    model, x = chained(), rows()
    with torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        assert torch.equal(compiled(x), model(x))
        few = compiled(x[:5])  # compiled for 5 rows: the modules
        assert torch.allclose(few, one_by_one(model, x[:5]), rtol=0.02, atol=0.02)


APART = (step(0, "cuda.quantize_row", (NONE, NONE, ROW)), BY_ROWS[1]._replace(place=0, writes=ROW),
         BY_ROWS[1])  # fmt: skip
OF_THREE = (
    BY_ROWS[0]._replace(kernel="cuda.quantize_row+cuda.scaled_gemm_row+cuda.norm_quantize"),
    BY_ROWS[1],
)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("steps", "is_fused"),
    [
        (BY_ROWS, True), (APART, False), (OF_THREE, True),  # 8 s each
        *(pytest.param(steps, is_fused, marks=pytest.mark.rest)
          for steps, is_fused in ((BY_ROWS, False), (APART, True), (OF_THREE, False))),
    ],
    ids=["whole-fused", "apart", "three-fused", "whole", "apart-fused", "three"],
)  # fmt: skip
def test_an_input_that_others_read_is_quantized_once(
    steps: tuple[ChainStep, ...], is_fused: bool
) -> None:
    """By Inductor where it computes it, else by one kernel; before or after the others."""
    plan = plan_of(steps)
    models, layer = [chained(plan=plan) for _ in range(2)], layer_by((BY_ROW, "", ""), n=32, k=K)
    x = rows(48, K)
    x[1], x[2, 3] = 0.0, float("nan")

    def read(first: int, last: int) -> Callable[[Tensor], list[Tensor]]:
        def call(x: Tensor) -> list[Tensor]:
            x = x.relu() if is_fused else x
            return [y(x).nan_to_num(7.0) for y in (models[0], layer, models[1])[first:last]]

        return call

    counts = [
        (read(0, 3), (2, 0)), (read(0, 2), (1, 0)), (read(1, 3), (1, 0)),
        (read(0, 1), (0, 1)),  # alone, it quantizes its input itself
    ]  # fmt: skip
    for call, expected in counts:
        torch._dynamo.reset()
        with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
            compiled = torch.compile(call, fullgraph=True, dynamic=False)
            found, (code,) = run_and_get_code(compiled, x)
            assert same(found, call(x))
        names = ("lokakern_quantized_chain(buf", "lokakern_routed_chain(")
        assert tuple(map(code.count, names)) == expected
        assert code.count("quantize_weight.default(") == (not is_fused and expected[0] > 0)


def test_only_rows_that_kernels_read_are_quantized_ahead() -> None:
    assert form_of_input(PLAN, 48, K) == ("row", "cuda.quantize_row")
    by_group = plan_of((step(0, "cuda.quantize_group+cuda.gemm_norm_block", (NONE, BLOCK, ROW)),
                        BY_ROWS[1]), (BLOCK, ROW))  # fmt: skip
    assert form_of_input(by_group, 48, 128) == ("1x128", "cuda.quantize_group")
    for plan, m, k in (
        (PLAN, 15, K), (PLAN, 50, K), (PLAN, 48, 1000), (by_group, 48, K),
        (plan_of(MIXED, (NONE, ROW)), 48, K),
    ):  # fmt: skip
        assert form_of_input(plan, m, k) == ("", "")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_graph_of_dynamic_m_has_one_op(backend: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = chained()
    with torch.no_grad():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
        for m in (48, 17, 16, 15, 5, 2):
            y = compiled(rows(m))  # not a view, whose memory would be one more size
            assert torch.allclose(y, model(rows(m)), rtol=0.02, atol=0.02)
        # With a cold cache, Inductor also hands over a graph without nodes.
        (graph,) = (graph for graph in counter.graphs if len(graph.graph.nodes) > 1)
        assert "routed_chain" in graph.code


def test_exported_models() -> None:
    model, x = chained(), rows()
    with torch.no_grad():
        y = model(x)
        exported = torch.export.export(model, (x,))
        assert torch.equal(exported.module()(x), y)
        sizes = ({0: torch.export.Dim("m", min=2, max=4096)},)
        dynamic = torch.export.export(model, (x,), dynamic_shapes=sizes)
        assert torch.equal(dynamic.module()(x), y)
        assert torch.equal(dynamic.module()(x[:7]), one_by_one(model, x[:7]))
    for program in (exported, dynamic):
        targets = [str(node.target) for node in program.graph.nodes]
        assert targets.count("lokakern.routed_chain.default") == 1
        assert "aten.layer_norm.default" not in targets


def test_compiled_models_with_gradients_or_autocast_run_the_modules() -> None:
    model, x = chained(), rows()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    compiled(x).float().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    one_by_one(model, x).float().sum().backward()
    assert all(map(torch.equal, found, (p.grad for p in model.parameters())))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), one_by_one(model, x))
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
        assert not torch.equal(compiled(x), one_by_one(model, x))


# --- replay in C++


def test_warm_calls_are_replayed(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of tensors are part of a call's signature, and so are tensors that are absent."""
    from lokakern.nn import routed_chain

    model = chained(model_of(mods.BlockRMSNorm(48, 16)), STATIC)
    model(rows())
    ((_, operands, plan),) = calls
    run, made = routed_chain._launched, []
    monkeypatch.setattr(routed_chain, "_launched", lambda *given: made.append(1) or run(*given))
    op, name = torch.ops.lokakern.routed_chain, "lokakern::routed_chain"
    with native.in_use() as library:
        assert library.call_op(name, rows(), operands, plan) is None
        for seed in range(4):
            x = rows(seed=seed)
            found, count = library.replay_chain(x, operands, plan), len(made)
            assert torch.equal(found, op(x, operands, plan))
            del made[count:]
            assert count == min(seed + 1, 2) and not made[count:]
        assert library.size() == 1
        count = len(made)
        for given in (operands, tuple(operands)):
            assert torch.equal(library.call_op(name, x, given, plan), found)
        assert torch.equal(model(x), model[5](found)) and len(made) == count  # as modules call it
        # Other operands are other calls.
        absent = [None if i == 3 else operand for i, operand in enumerate(operands)]
        copied = [None if y is None else y.clone() for y in operands]
        assert library.call_op(name, x, absent, plan) is None
        assert torch.equal(library.call_op(name, x, copied, plan), found)
        assert library.call_op(name, x, [*operands, None], plan) is None
        assert library.call_op(name, x, [operands], plan) is None
        assert library.call_op(name, x[:32], operands, plan) is None
        assert library.call_op(name, x, operands, plan + " ") is None
        assert library.call_op(name, x, [object()], plan) is None


def test_warm_calls_write_to_a_slice(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The op returns nothing, and a call from generated code finds the plan of the op."""
    from lokakern.nn import inductor, routed_chain

    model = chained(model_of(mods.BlockRMSNorm(48, 16)), STATIC)
    model(rows())
    ((_, operands, plan),) = calls
    run, made = routed_chain._launched, []
    monkeypatch.setattr(routed_chain, "_launched", lambda *given: made.append(1) or run(*given))
    with native.in_use() as library:
        for seed in range(4):
            x, joined = rows(seed=seed), torch.zeros(48, 104).bfloat16()
            out, count = joined[:, 64:], len(made)
            if seed < 3:
                library.replay_chain(x, operands, plan, out)
            else:
                inductor.routed_chain_into(x, operands, plan, out=out)
            assert len(made) - count == (seed < 2) and not joined[:, :64].any()
            assert torch.equal(out, torch.ops.lokakern.routed_chain(x, operands, plan))
        assert library.size() == 1
        inductor.routed_chain_into(x, operands, plan, out=joined[:, :40])
        assert torch.equal(joined[:, :40], torch.ops.lokakern.routed_chain(x, operands, plan))


STATIC = plan_of(
    (
        step(0, "cuda.quantize_row+cuda.gemm_norm_row", (NONE, ROW, TENSOR)),
        step(1, "cuda.gemm_norm_row", (ROW, ROW, NONE)),
    ),
    epilogues=("bias+block_rms(16)+relu", EPILOGUES[1]),
)


def test_a_replayed_chain_follows_a_renewed_norm(calls: list[Any]) -> None:
    """A static scale depends on the weight of the norm; both are renewed in the same memory."""
    steps = (
        step(0, "cuda.quantize_row+cuda.gemm_norm_row", (NONE, ROW, TENSOR)),
        step(1, "cuda.gemm_norm_row", (ROW, ROW, NONE)),
    )
    model, x = chained(plan=plan_of(steps)), rows()
    model(x)
    ((_, operands, plan),) = calls
    y = torch.ops.lokakern.routed_chain(x, operands, plan)
    with native.in_use() as library:
        for factor in itertools.chain([1.0] * 3, [3.0, 0.5]):
            model[1].weight.mul_(factor)
            model[0].renew_chain_weights()
            found = library.replay_chain(x, operands, plan)
            assert torch.equal(found, torch.ops.lokakern.routed_chain(x, operands, plan))
            assert torch.equal(found, y) == (factor == 1.0)
            y = found
        assert library.call_op("lokakern::routed_chain", x, operands, plan) is not None
