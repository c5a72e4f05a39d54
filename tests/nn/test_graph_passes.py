"""Passes over graphs of converted models: products of parts, and norms of concatenations."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config, custom_graph_pass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from lokakern.nn import concatenated_tokens, graph_passes, summed_norm
from lokakern.nn.block_rms_norm import block_rms_norm
from tests.support.routed_layers import ROUTE, layer_of
from tests.support.traced_graphs import passed

ROOT = Path(__file__).parents[2]
BATCH, TOKENS, D = 20, 39, 96
BOTH = ("rows_of_parts", "summed_norm")


@pytest.fixture(autouse=True)
def everything_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a pass can change, it changes, on a CPU too."""
    monkeypatch.setattr(concatenated_tokens, "LEAST_SAVED_BYTES", -(2**60))
    monkeypatch.setattr(summed_norm, "LEAST_BYTES", 0)
    monkeypatch.setattr(summed_norm, "has_triton", lambda *_: True)
    with config.patch(force_disable_caches=True):
        yield


class Layer(nn.Module):
    """The layer of Wukong in short, with a product that `convert` chose a kernel for."""

    def __init__(self, n: int, kept: int = 8, rank: int = 8, made: int = 4, d: int = D) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.sizes, self.made = (rank, kept - made, kept), made
        self.across = nn.Parameter(torch.randn(sum(self.sizes), n).bfloat16() / n**0.5)
        self.linear = layer_of((ROUTE, "", ""), made * d, n * rank, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.across.expand(len(x), -1, -1)
        projected, others, kept = torch.bmm(weight, x).split(self.sizes, 1)
        products = torch.bmm(x, projected.mT).flatten(1)
        made = self.linear(products.relu()).unflatten(1, (self.made, -1))
        return block_rms_norm(torch.cat([made, others], 1) + kept, x.shape[2], 1e-5)


class Model(nn.Module):
    """Two layers over a concatenation of tokens."""

    def __init__(self, *counts: int, d: int = D, read: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.first, self.second = Layer(sum(counts), d=d), Layer(8, d=d)
        self.read = read

    def forward(self, *parts: Tensor) -> Any:
        x = torch.cat(parts, 1)
        y = self.second(self.first(x))
        return y if self.read is None else (y, self.read(x))


def parts_of(*counts: int, d: int = D) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(BATCH, count, d).bfloat16() for count in counts]


def compiled(model: nn.Module, *parts: Tensor) -> tuple[Any, str]:
    """The result of Inductor, and its code."""
    torch._dynamo.reset()
    with torch.no_grad():
        found, codes = run_and_get_code(torch.compile(model, dynamic=False), *parts)
    return found, "\n".join(codes)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("counts", [(1, 38), (38, 1), (2, 36, 1), (1, 39), (4, 32)])
def test_concatenated_tokens_are_multiplied_by_parts(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the large part begins, and whether its tokens fill 16 bytes, changes no result."""
    model, parts = Model(*counts), parts_of(*counts)
    found, code = passed(model, *parts)
    assert all(f"torch.ops.lokakern.{name}" in code for name in BOTH)
    assert "plus_outer" not in code
    with torch.no_grad():
        # Sums of bfloat16 are rounded elsewhere, which FP8 amplifies in some elements.
        assert distance(found, model(*parts)) < 0.02


def test_inductor_runs_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, parts = Model(1, 38), parts_of(1, 38)
    found, code = compiled(model, *parts)
    assert all(f"torch.ops.lokakern.{name}" in code for name in BOTH)
    assert f"({BATCH}, 39, {D})" not in code  # no such buffer
    monkeypatch.setattr(graph_passes, "PASSES", ())
    expected, code = compiled(model, *parts)
    assert f"({BATCH}, 39, {D})" in code and not any(name in code for name in BOTH)
    assert distance(found, expected) < 0.02


def test_products_are_as_exact_by_parts() -> None:
    """Each product alone, against float64."""
    for counts in ((1, 38), (37, 2), (3, 40)):
        x = parts_of(*counts)
        n = sum(counts)
        torch.manual_seed(2)
        weight = (torch.randn(24, n) / n**0.5).bfloat16()
        y = (torch.randn(BATCH, D, 8) / D**0.5).bfloat16()

        def call(weight: Tensor, y: Tensor, *parts: Tensor) -> Any:
            whole = torch.cat(parts, 1)
            return torch.bmm(weight.expand(BATCH, -1, -1), whole), torch.bmm(whole, y)

        gm = make_fx(call, tracing_mode="fake")(weight, y, *x)
        concatenated_tokens.multiply_parts(gm.graph)
        concatenated_tokens.write_terms(gm.graph)
        gm.recompile()
        assert "aten.cat" not in gm.code and "plus_outer" not in gm.code
        wide = torch.cat(x, 1).double()
        for found, expected in zip(
            gm(weight, y, *x), (weight.double() @ wide, wide @ y.double()), strict=True
        ):
            assert found.dtype is torch.bfloat16
            assert distance(found, expected) < 2**-8
            assert (found.double() - expected).abs().max() < 2**-6 * expected.abs().max()


READERS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("a sum", lambda x: x.sum()),
    ("the concatenation itself", lambda x: x),
    ("a product of columns", lambda x: torch.bmm(x.mT, x)),
    ("a product with itself", lambda x: torch.bmm(x, x.mT)),
    ("rows side by side", lambda x: x.flatten(1) * 2),
]


@pytest.mark.parametrize(("what", "read"), READERS)
def test_what_others_read_is_concatenated(what: str, read: Callable[[Tensor], Tensor]) -> None:
    model = Model(1, 38, read=read)
    found, code = passed(model, *parts_of(1, 38))
    assert "lokakern.rows_of_parts" not in code and "lokakern.summed_norm" in code, what
    with torch.no_grad():
        expected = model(*parts_of(1, 38))
    assert all(distance(a, b) < 0.02 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("counts", [(5, 34), (19, 20), (2, 2, 30, 1)])
def test_several_large_parts_are_concatenated(counts: tuple[int, ...]) -> None:
    found, code = passed(Model(*counts), *parts_of(*counts))
    assert "lokakern.rows_of_parts" not in code and found.isfinite().all()


def test_small_gains_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concatenated_tokens, "LEAST_SAVED_BYTES", 80_000_000)
    monkeypatch.setattr(summed_norm, "LEAST_BYTES", 32_000_000)
    _, code = passed(Model(1, 38), *parts_of(1, 38))
    assert not any(name in code for name in BOTH)


def test_saved_bytes_are_those_of_the_copy_less_what_is_added() -> None:
    def call(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(weight.expand(BATCH, -1, -1), torch.cat([x, y], 1))

    gm = make_fx(call, tracing_mode="fake")(*parts_of(1, 38), torch.randn(24, 39).bfloat16())
    cat = next(x for x in gm.graph.nodes if x.target is torch.ops.aten.cat.default)
    product = concatenated_tokens._product(next(iter(cat.users)), cat)
    assert product is not None
    saved = concatenated_tokens._saved_bytes(cat, [product])
    assert saved == 2 * 2 * BATCH * D * (39 - 24)


@pytest.mark.parametrize("d", [32, 64, 128, 112])
def test_norms_of_columns_that_were_not_measured_are_left(d: int) -> None:
    found, code = passed(Model(1, 38, d=d), *parts_of(1, 38, d=d))
    assert "lokakern.summed_norm" not in code and "lokakern.rows_of_parts" in code
    assert found.isfinite().all()


def test_nan_and_infinities_stay_where_they_are() -> None:
    model, parts = Model(1, 38), parts_of(1, 38)
    parts[0][3, 0, 5] = float("nan")
    parts[1][7, 2, 9] = float("inf")
    found, code = passed(model, *parts)
    assert "lokakern.rows_of_parts" in code
    bad = ~found.isfinite().all((1, 2))
    assert bad.nonzero().flatten().tolist() == [3, 7]


def test_models_without_a_converted_product_stay_as_they_are() -> None:
    model = Model(1, 38)
    for layer in (model.first, model.second):
        layer.linear = nn.Linear(
            layer.linear.in_features, layer.linear.out_features, bias=False, dtype=torch.bfloat16
        )
    _, code = passed(model, *parts_of(1, 38))
    assert not any(name in code for name in BOTH)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_training_keeps_the_concatenation(is_frozen: bool) -> None:
    """Its gradients read it; where none does, times were not measured."""
    model, parts = Model(1, 38), parts_of(1, 38)
    for layer in (model.first, model.second):
        layer.across.requires_grad_(not is_frozen)
    y, code = passed(model, *parts, trains=True)
    y.sum().backward()
    assert "aten.cat" in code and "lokakern.rows_of_parts" not in code
    assert model.second.linear.weight.grad is not None


B = BATCH
WEIGHTS: list[tuple[str, tuple[int, ...], Callable[[Tensor], Tensor]]] = [
    ("of each sample", (B, 24, 39), lambda w: w),
    ("of each sample, computed", (24, 39), lambda w: w.expand(B, -1, -1) * 0.5),
    ("one column", (24, 1), lambda w: w.expand(B, 24, 39)),
    ("one row", (39,), lambda w: w.expand(B, 24, 39)),
    ("one row of two", (1, 39), lambda w: w.expand(B, 24, 39)),
]


@pytest.mark.parametrize(("what", "shape", "expand"), WEIGHTS)
def test_weights_that_are_no_matrix_for_all_samples(
    what: str, shape: tuple[int, ...], expand: Callable[[Tensor], Tensor]
) -> None:
    def call(w: Tensor, *parts: Tensor) -> Tensor:
        return torch.bmm(expand(w), torch.cat(parts, 1))

    given = torch.randn(shape).bfloat16(), *parts_of(1, 38)
    gm = make_fx(call, tracing_mode="fake")(*given)
    concatenated_tokens.multiply_parts(gm.graph)
    gm.recompile()
    assert "aten.cat" in gm.code, what
    assert torch.equal(gm(*given), call(*given))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("is_strided", [False, True])
def test_pieces_of_a_sum_are_right(dims: int, is_strided: bool) -> None:
    """As `split` takes them, also where another reads the memory around a piece."""

    def call(w: Tensor, *parts: Tensor) -> Any:
        y = torch.bmm(w.expand(BATCH, -1, -1), torch.cat(parts, 1))
        one, two = y.split([8, 16], 1)
        return one.as_strided((4, 4), (24 * D, 1)) if is_strided else one, two

    weight = torch.randn(24, 39).bfloat16()
    given = weight if dims == 2 else weight[None], *parts_of(1, 38)
    gm = make_fx(call, tracing_mode="fake")(*given)
    concatenated_tokens.multiply_parts(gm.graph)
    concatenated_tokens.write_terms(gm.graph)
    gm.recompile()
    assert "aten.cat" not in gm.code
    for found, expected in zip(gm(*given), call(*given), strict=True):
        assert distance(found, expected) < 2**-7


def test_sums_in_float16_are_left() -> None:
    """A part of a sum could overflow where the sum does not; rows are of one part each."""

    def rows(y: Tensor, *parts: Tensor) -> Tensor:
        return torch.bmm(torch.cat(parts, 1), y)

    def both(y: Tensor, w: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        return rows(y, *parts), torch.bmm(w.expand(BATCH, -1, -1), torch.cat(parts, 1))

    y, w = torch.randn(BATCH, D, 8).half(), torch.randn(24, 39).half()
    parts = [x.half() for x in parts_of(1, 38)]
    for call, given, is_left in ((rows, (y, *parts), False), (both, (y, w, *parts), True)):
        gm = make_fx(call, tracing_mode="fake")(*given)
        gm.graph.eliminate_dead_code()
        for cat in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)[1:]:
            cat.replace_all_uses_with(
                gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)[0]
            )
        concatenated_tokens.multiply_parts(gm.graph)
        gm.recompile()
        assert ("aten.cat" in gm.code) is is_left and ("rows_of_parts" in gm.code) is not is_left
        if not is_left:
            assert distance(gm(*given), call(*given)) < 2**-10


def normed(alpha: float | None, times: int) -> Callable[..., Tensor]:
    def call(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        v = torch.cat([x, y], 1) + z
        v = (v if times == 1 else v.expand(times, -1, -1, -1)).float()
        mean = v.square().mean(-1, keepdim=True)
        mean = mean + 1e-5 if alpha is None else torch.add(mean, 1e-5, alpha=alpha)
        return (v * torch.rsqrt(mean)).bfloat16()

    return call


@pytest.mark.parametrize(
    ("alpha", "times", "is_fused"), [(None, 1, True), (1e4, 1, False), (None, 2, False)]
)
def test_other_norms_are_left(alpha: float | None, times: int, is_fused: bool) -> None:
    given, call = parts_of(3, 5, 8), normed(alpha, times)
    gm = make_fx(call, select_decomp_table(), tracing_mode="fake")(*given)
    summed_norm.norm_sums(gm.graph)
    gm.recompile()
    assert ("summed_norm" in gm.code) == is_fused
    assert distance(gm(*given), call(*given)) < 2**-7


def test_a_pass_of_the_user_runs_first() -> None:
    seen = []

    def theirs(graph: fx.Graph) -> None:
        seen.append(any(node.target is torch.ops.aten.cat.default for node in graph.nodes))

    with config.patch(post_grad_custom_post_pass=theirs):
        _, code = compiled(Model(1, 38), *parts_of(1, 38))  # which installs ours
        assert isinstance(config.post_grad_custom_post_pass, graph_passes.Passes)
        assert config.post_grad_custom_post_pass.uuid() is None  # a function has none
        assert seen and seen[0] and "lokakern.rows_of_parts" in code


@pytest.mark.parametrize(
    ("name", "kind"),
    [("post_grad_custom_post_pass", graph_passes.Passes),
     ("joint_custom_pre_pass", graph_passes.JointPasses)],
)  # fmt: skip
def test_passes_are_installed_once_and_again_where_they_are_gone(name: str, kind: Any) -> None:
    for _ in range(2):
        with config.patch({name: None}):
            graph_passes.install_passes()
            first = getattr(config, name)
            graph_passes.install_passes()
            assert getattr(config, name) is first and type(first) is kind
            assert pickle.loads(pickle.dumps(first)).uuid() == first.uuid() is not None


def test_a_joint_pass_of_the_user_runs_first_and_ours_on_converted_models_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(graph_passes, "JOINT_PASSES", (lambda graph: seen.append("ours"),))
    passes = graph_passes.JointPasses([lambda graph: seen.append("theirs")])
    graph = fx.Graph()
    passes(graph)
    assert seen == ["theirs"] and passes.uuid() is None
    graph.call_function(torch.ops.lokakern.logit.default, (graph.placeholder("x"),))
    passes(graph)
    assert seen == ["theirs", "theirs"]  # of an inference, for which Inductor calls it, too
    graph.placeholder("tangents_1")
    passes(graph)
    assert seen == ["theirs", "theirs", "theirs", "ours"]


def test_passes_that_want_to_know_are_told_of_inference() -> None:
    kind = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if kind is None:
        pytest.skip("needs a torch with such passes")

    class Theirs(kind):  # type: ignore[misc]
        told: bool | None = None

        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
            self.told = is_inference

        def uuid(self) -> Any:
            return "theirs"

    theirs = Theirs()
    passes = graph_passes.Passes(theirs)
    for is_inference in (True, False):
        passes(fx.Graph(), is_inference)
        assert theirs.told is is_inference
    assert passes.uuid()[1] == "theirs"


def test_code_of_other_sources_is_not_taken(tmp_path: Path) -> None:
    """Not only those of passes: lowerings ask routes and kernels, which are behind a link."""
    package, kernels = tmp_path / "package", tmp_path / "kernels"
    (package / "nn").mkdir(parents=True)
    kernels.mkdir()
    (package / "kernels").symlink_to(kernels)
    seen = set()
    for path in (package / "a.py", package / "nn" / "a.py", kernels / "a.py"):
        for text in ("a = 1", "a = 2"):
            path.write_text(text)
            graph_passes.sources_digest.cache_clear()
            seen.add(graph_passes.sources_digest(str(package)))
    assert len(seen) == 6
    package = Path(graph_passes.__file__).parents[1]
    for kind in (graph_passes.Passes, graph_passes.JointPasses):
        assert kind(None).uuid()[0] == graph_passes.sources_digest(str(package))


def at_once(call: Callable[[], Tensor]) -> Tensor:
    return call()


def in_a_thread(call: Callable[[], Tensor]) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.parametrize("run", [at_once, in_a_thread])
def test_code_that_overwrites_saved_tensors_is_not_what_a_kept_graph_gets(
    run: Callable[[Callable[[], Tensor]], Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's key is the same for both, and the second backward pass would be wrong.

    Whichever thread compiles the backward pass: from torch 2.12 on each has settings of its own.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    first, second = layer_of(n=64), layer_of(n=64)
    x = torch.randn(48, 64).bfloat16().requires_grad_()

    def gradients(times: int) -> list[Tensor]:
        torch._dynamo.reset()
        y = torch.compile(lambda x: second(torch.tanh(first(x)) * torch.sigmoid(x)))(x).sum()
        is_kept = times > 1
        return [
            run(lambda: torch.autograd.grad(y, x, retain_graph=is_kept)[0]) for _ in range(times)
        ]

    with config.patch(force_disable_caches=False):
        for _ in range(2):  # without and with such code in the cache
            (expected,) = gradients(1)
            assert all(torch.equal(found, expected) for found in gradients(3))


def test_what_runs_without_python_stays_as_it_is() -> None:
    """C++ of `lokakern.native` does not have these ops."""
    model, parts = Model(1, 38), parts_of(1, 38)
    with config.patch(cpp_wrapper=True):
        _, code = passed(model, *parts)
    assert not any(name in code for name in BOTH)


@pytest.mark.parametrize("has_addend", [False, True])
@pytest.mark.parametrize("has_outer", [False, True])
@pytest.mark.parametrize("counts", [(3,), (5, 4), (1, 2, 6)])
def test_ops_are_right(counts: tuple[int, ...], has_outer: bool, has_addend: bool) -> None:
    check_norm(torch.ops.lokakern.summed_norm, "cpu", counts, has_outer, has_addend, 160)


def check_norm(
    call: Callable[..., Tensor], device: str, counts: tuple[int, ...], has_outer: bool,
    has_addend: bool, d: int, dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Parts that are slices of others, against float64."""
    torch.manual_seed(sum(counts))
    n = sum(counts)
    wide = [torch.randn(BATCH, count + 3, d, device=device).to(dtype) * 10 for count in counts]
    parts = [x[:, 2 : 2 + count] for x, count in zip(wide, counts, strict=True)]
    addend = torch.randn(BATCH, n, d, device=device).to(dtype) if has_addend else None
    column = torch.randn(n, device=device) if has_outer else None
    token = torch.randn(BATCH, 1, d, device=device).to(dtype) if has_outer else None
    found = call(parts, addend, column, token, 1e-5)
    v = torch.cat(parts, 1).double()
    if addend is not None:
        v = v + addend.double()
    if column is not None and token is not None:
        v = v + column.double()[:, None] * token.double()
    expected = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-5)
    assert found.shape == expected.shape and found.dtype is dtype and found.is_contiguous()
    assert distance(found, expected) < torch.finfo(dtype).eps / 2
    if call is torch.ops.lokakern.summed_norm and device == "cpu":
        given = (parts, addend, column, token, 1e-5)
        torch.library.opcheck(torch.ops.lokakern.summed_norm.default, given)


def test_rows_of_parts_are_those_of_a_product() -> None:
    parts = parts_of(2, 9)
    y = torch.randn(BATCH, 8, D).bfloat16().mT
    found = torch.ops.lokakern.rows_of_parts(parts, y)
    assert distance(found, torch.cat(parts, 1).double() @ y.double()) < 2**-8
    torch.library.opcheck(torch.ops.lokakern.rows_of_parts.default, (parts, y))


INTERPRETED = """
import torch
from lokakern.kernels.triton.summed_norm import halves_of, summed_norm
from tests.nn.test_graph_passes import check_norm
assert halves_of(160) == (128, 32) and halves_of(128) is None and halves_of(112) is None
for d in (48, 96, 160):
    for counts in ((3,), (5, 4), (1, 2, 6)):
        for outer in (False, True):
            for addend in (False, True):
                check_norm(summed_norm, "cpu", counts, outer, addend, d)
turned, whole = torch.randn(4, 96, 3).mT, torch.randn(4, 3, 96)
again = summed_norm([whole, turned.contiguous()], torch.zeros(4, 6, 96), None, None, 1e-5)
plain = torch.cat([whole, turned], 1)
plain = plain * torch.rsqrt(plain.square().mean(-1, keepdim=True) + 1e-5)
assert (plain - again).abs().max() < 1e-5
left = summed_norm([whole], turned, None, None, 1e-5)
assert torch.equal(left, summed_norm([whole], turned.contiguous(), None, None, 1e-5))
assert summed_norm([torch.ones(0, 3, 96)], None, None, None, 1e-5).shape == (0, 3, 96)
for parts in ([torch.ones(1, 1, 96)] * 4, [torch.ones(1, 1, 100)]):
    try:
        summed_norm(parts, None, None, None, 1e-5)
        raise AssertionError("no error")
    except ValueError as error:
        assert "expected" in str(error)
print("right")
"""


@pytest.mark.rest
def test_the_kernel_is_right_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ran.stdout == "right\n", ran.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [(3,), (5, 4), (1, 2, 6), (48, 48)])
def test_the_kernel_is_right_on_a_gpu(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    for outer in (False, True):
        for addend in (False, True):
            check_norm(torch.ops.lokakern.summed_norm, "cuda", counts, outer, addend, 160, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(1, 38), (37, 2), (1, 39)])
def test_a_model_is_right_on_a_gpu(counts: tuple[int, ...]) -> None:
    """The emulated layers run on a GPU, too."""
    model, parts = Model(*counts).cuda(), [x.cuda() for x in parts_of(*counts)]
    found, code = compiled(model, *parts)
    assert all(f"torch.ops.lokakern.{name}" in code for name in BOTH)
    with torch.no_grad():
        assert distance(found, model(*parts)) < 0.02
