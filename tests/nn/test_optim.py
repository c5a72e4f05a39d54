"""Steps of Adam and AdamW of large parameters by a kernel, beside torch's."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lokakern.nn import optim
from tests.support.interpreted import run_interpreted

PAIRS = ("Adam", "AdamW")


def by_formula(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, *, lr: float, betas: tuple[float, float],
    eps: float, decay: float, is_decoupled: bool, maximizes: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Parameter and averages after a step, in float64."""
    p, g, m, v = (x.double() for x in (p, g, m, v))
    first, second = (float(torch.tensor(beta)) for beta in betas)
    g = -g if maximizes else g
    if is_decoupled:
        p = p - lr * decay * p
    else:
        g = g + decay * p
    m = first * m + (1 - first) * g
    v = second * v + (1 - second) * g * g
    root = (v / (1 - second**t)).sqrt() + eps
    return p - lr / (1 - first**t) * m / root, m, v


def check_steps_by_formula(device: str = "cpu") -> None:
    """Single steps of the kernel, from given averages, at many step numbers; odd sizes and dtypes.

    Run by `test_interpreted` in a process that interprets Triton.
    """
    from lokakern.kernels.triton.adam_step import adam_step

    given = torch.Generator().manual_seed(0)
    cases = [
        (t, dtype, is_decoupled, maximizes, lr_at)
        for t in (1, 2, 7, 100, 10_000)
        for dtype in optim.DTYPES
        for is_decoupled, maximizes, lr_at in ((True, False, False), (False, True, True))
    ]
    for t, dtype, is_decoupled, maximizes, lr_at in cases:
        p, g, m = (torch.randn(5003, generator=given).to(device, dtype) for _ in range(3))
        v = torch.rand(5003, generator=given).to(device, dtype)
        g[:3] = torch.tensor([0.0, 1e-6, 1000.0])
        m[0] = v[0] = 0.0
        setting: Any = {
            "lr": 0.25, "betas": (0.9, 0.999), "eps": 1e-8, "decay": 0.1,
            "is_decoupled": is_decoupled, "maximizes": maximizes,
        }  # fmt: skip
        expected = by_formula(p, g, m, v, t, **setting)
        poison = [torch.cat([x, x.new_full((5,), math.nan)]) for x in (p, g, m, v)]
        found = [x[:5003] for x in poison]
        if lr_at:
            setting["lr"] = torch.tensor(0.25, device=device)
        adam_step(*found, torch.tensor(float(t), device=device), **setting)
        ulp = torch.finfo(dtype).eps
        for name, x, exact in zip("pmv", (found[0], *found[2:]), expected, strict=True):
            # The update of p has some six digits.
            update = (exact - p.double()).abs() if name == "p" else 0.0
            limit = 2 * ulp * exact.abs() + 4e-6 * update + 2.0**-24
            assert bool(((x - exact).abs() <= limit).all()), (t, dtype, name)
        assert all(bool(x[5003:].isnan().all()) for x in poison), "wrote behind a tensor"
        assert torch.equal(found[1], poison[1][:5003])


def test_interpreted() -> None:
    run_interpreted("tests.nn.test_optim")


@pytest.mark.parametrize("target", ["cuda:90:32", "hip:gfx942:64"])
def test_compiles_for_gpus(target: str) -> None:
    """With loads and stores of 16 bytes, which NVIDIA's assembly names."""
    pytest.importorskip("triton", reason="needs Triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from lokakern.kernels.triton.adam_step import ELEMENTS, WARPS, adam_step_kernel

    vendor, architecture, warp = target.split(":")
    constants = {
        "IS_DECOUPLED": True, "MAXIMIZES": False, "LOADS_LR": False, "ELEMENTS": ELEMENTS
    }  # fmt: skip
    names = adam_step_kernel.arg_names
    kinds = {
        name: "constexpr" if name in constants else "*fp32" if name.endswith("_at")
        else "i32" if name == "count" else "fp32"
        for name in names
    }  # fmt: skip
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        adam_step_kernel, kinds, {(names.index(x),): value for x, value in constants.items()},
        {(place,): aligned for place, x in enumerate(names) if x.endswith("_at") or x == "count"},
    )  # fmt: skip
    is_nvidia = vendor == "cuda"
    made = compile(
        source,
        target=GPUTarget(vendor, int(architecture) if is_nvidia else architecture, int(warp)),
        options={"num_warps": WARPS},
    )
    if is_nvidia:
        assert made.asm["ptx"].count("ld.global.v4") == 2 * 4
        assert made.asm["ptx"].count("st.global.v4") == 2 * 3
    else:
        assert len(re.findall("(global|buffer)_load_dwordx4", made.asm["amdgcn"])) == 4


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes that the kernel stepped, of all sizes and on every device, computed by torch."""
    import lokakern.kernels.triton.adam_step as module

    shapes: list[tuple[int, ...]] = []

    def adam_step(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, **setting: Any) -> None:
        shapes.append(tuple(p.shape))
        lr = float(setting.pop("lr"))
        found = by_formula(p, g, m, v, int(step), lr=lr, **setting)
        for x, value in zip((p, m, v), found, strict=True):
            x.copy_(value)

    if not torch.cuda.is_available():
        monkeypatch.setattr(module, "adam_step", adam_step)
        monkeypatch.setattr(optim, "_on_gpu", lambda p: True)
    else:
        kernel = module.adam_step

        def counted(p: Tensor, *args: Any, **setting: Any) -> None:
            shapes.append(tuple(p.shape))
            kernel(p, *args, **setting)

        monkeypatch.setattr(module, "adam_step", counted)
    monkeypatch.setattr(optim, "LEAST_ELEMENTS", 64)
    yield shapes


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4)).to(DEVICE)


def trained(of: Any, name: str, steps: int = 5, **options: Any) -> tuple[nn.Module, Any]:
    net = model()
    optimizer = getattr(of, name)(net.parameters(), **options)
    for step in range(steps):
        backward(net, step)
        optimizer.step()
    return net, optimizer


def backward(net: nn.Module, seed: int) -> None:
    given = torch.Generator().manual_seed(seed)
    net.zero_grad()
    net(torch.randn(8, 16, generator=given).to(DEVICE)).square().sum().backward()


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("options", [
    {"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.3, "maximize": True, "betas": (0.8, 0.95)},
])  # fmt: skip
def test_trains_as_torch_does(seen: list[Any], name: str, options: dict[str, Any]) -> None:
    net, optimizer = trained(optim, name, **options)
    expected, of_torch = trained(torch.optim, name, fused=True, **options)
    assert_close(net, expected)
    assert seen == [(24, 16), (4, 24)] * 4  # the first step, and small parameters, are torch's
    state, other = optimizer.state_dict(), of_torch.state_dict()
    assert state["param_groups"] == other["param_groups"]
    for place, values in state["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(value, other["state"][place][key])


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("options", [{"fused": True}, {}])
def test_checkpoints_of_torch_go_on(seen: list[Any], name: str, options: dict[str, bool]) -> None:
    """By default torch leaves ``fused`` open, and counts steps on the host."""
    net, optimizer = trained(torch.optim, name, lr=0.01, **options)
    other = copy.deepcopy(net)
    mine = getattr(optim, name)(other.parameters(), lr=0.5)
    mine.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, stepper in ((net, optimizer), (other, mine)):
        backward(one, 9)
        stepper.step()
    assert seen == [(24, 16), (4, 24)] and mine.param_groups[0]["lr"] == 0.01
    assert_close(other, net)


def test_a_state_of_another_shape_or_device_is_not_read(seen: list[Any]) -> None:
    net, optimizer = trained(optim, "Adam", 1)
    weight = net[0].weight
    backward(net, 1)
    state = dict(optimizer.state[weight])
    assert optim._fits(weight, state)
    for other in (state["exp_avg"][:8], state["exp_avg"].to("meta"), state["exp_avg"].double()):
        assert not optim._fits(weight, state | {"exp_avg": other})
    assert not optim._fits(weight, state | {"exp_avg_sq": torch._neg_view(state["exp_avg_sq"])})


def test_hooks_run_once_around_the_whole_step(seen: list[Any]) -> None:
    """A hook that clips gradients does so before any parameter is stepped, and all are there."""
    trained(torch.optim, "AdamW", 1, fused=True)  # now the step of its class calls hooks, too
    trained(torch.optim, "Adam", 1, fused=True)
    net, optimizer = trained(optim, "AdamW", 2, lr=0.01)
    called = []

    def before(stepped: Any, args: Any, options: Any) -> None:
        called.append("before")
        for p in net.parameters():
            assert p.grad is not None
            p.grad.zero_()

    def after(stepped: Any, args: Any, options: Any) -> None:
        called.append("after")
        assert all(p.grad is not None for p in net.parameters())

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    backward(net, 3)
    averages = [optimizer.state[p]["exp_avg"].clone() for p in net.parameters()]
    seen.clear()
    optimizer.step()
    assert called == ["before", "after"] and len(seen) == 2
    for p, average in zip(net.parameters(), averages, strict=True):
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.9 * average)


def test_an_error_of_torch_loses_no_gradient(
    seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = trained(optim, "Adam", 2)
    backward(net, 3)

    def fails(*_: Any) -> None:
        raise RuntimeError("no step")

    monkeypatch.setattr(torch.optim.Adam, "step", fails)
    seen.clear()
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step()
    assert all(p.grad is not None for p in net.parameters()) and not seen
    assert all(map(torch.equal, before, net.parameters()))


def test_what_torch_steps(seen: list[Any]) -> None:
    """Groups with amsgrad and without fused steps, and a scaler's steps."""
    for options in ({"amsgrad": True}, {"foreach": True, "fused": False}):
        assert_close(
            trained(optim, "Adam", lr=0.01, **options)[0],
            trained(torch.optim, "Adam", lr=0.01, **({"fused": True} | options))[0],
        )
    net, optimizer = trained(optim, "Adam", 1)
    backward(net, 1)
    optimizer.grad_scale = torch.ones((), device=DEVICE)
    optimizer.found_inf = torch.zeros((), device=DEVICE)
    optimizer.step()
    assert not seen


def test_weights_of_columns(seen: list[Any]) -> None:
    found = []
    for of in (optim, torch.optim):
        p = nn.Parameter(torch.arange(96.0, device=DEVICE).view(8, 12).mT)
        optimizer = of.AdamW([p], 0.1, fused=True)
        for _ in range(3):
            (p * p).sum().backward()
            optimizer.step()
        found.append(p)
    assert seen == [(12, 8)] * 2
    torch.testing.assert_close(*found)


def test_a_step_makes_a_new_version(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the kernel writes by address, as on a GPU."""
    import lokakern.kernels.triton.adam_step as module

    net, optimizer = trained(optim, "AdamW", 1)
    monkeypatch.setattr(module, "adam_step", lambda *_, **__: None)
    backward(net, 1)
    weight = net[0].weight
    average = optimizer.state[weight]["exp_avg"]
    versions = weight._version, average._version
    optimizer.step()
    assert weight._version > versions[0] and average._version > versions[1]


def test_a_rate_in_a_tensor_of_the_host(seen: list[Any]) -> None:
    found = [
        trained(of, "AdamW", lr=torch.tensor(0.01), fused=True)[0] for of in (optim, torch.optim)
    ]
    assert_close(*found)
    assert len(seen) == 8


def test_a_closure_and_a_schedule(seen: list[Any]) -> None:
    found = []
    for of in (optim, torch.optim):
        net = model()
        optimizer = of.AdamW(net.parameters(), 0.1, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)

        def closure(net: nn.Module = net) -> Tensor:
            backward(net, 4)
            return torch.tensor(4.0)

        for _ in range(5):
            assert optimizer.step(closure) == 4.0
            schedule.step()
        found.append(net)
    assert_close(*found)
    assert len(seen) == 8


@pytest.mark.gpu
def test_steps_by_formula_on_a_gpu() -> None:
    check_steps_by_formula("cuda")


@pytest.mark.gpu
def test_steps_in_a_cuda_graph() -> None:
    """At the size that the kernel takes, with a rate in a tensor that changes between replays."""
    found = []
    for of in (optim, torch.optim):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(2048, 2051, device="cuda"))
        p.grad = torch.randn_like(p)
        lr = torch.tensor(0.01, device="cuda")
        optimizer = of.AdamW([p], lr, fused=True, capturable=True)
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        for rate in (0.01, 0.02, 0.5):
            lr.fill_(rate)
            graph.replay()
        found.append(p)
        assert float(optimizer.state[p]["step"]) == 4.0
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    check_steps_by_formula()
