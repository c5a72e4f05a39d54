"""The models of the zoo: their layers, inputs and sizes, and the suite of their layers."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lokakern.bench.fp8_gain.products import counted
from lokakern.bench.models.blocks import CrossLayer
from lokakern.bench.models.dlrm import DLRM, SIZES
from lokakern.bench.models.zoo.architecture import DRAWN_ROWS, DensePart, Feature, Parallel
from lokakern.bench.models.zoo.autoint import FieldAttention
from lokakern.bench.models.zoo.catalog import ZOO, dlrm_dcnv2
from lokakern.bench.models.zoo.dcnv2 import FullCrossNetwork, dcnv2
from lokakern.bench.models.zoo.hstu import HSTU, HSTULayer
from lokakern.bench.models.zoo.masknet import MaskBlock, MaskNet
from lokakern.bench.models.zoo.ple import PLE, Extraction, Level
from lokakern.workloads import zoo_layers


def layers_of(name: str, batch: int = 256) -> Counter[tuple[int, int, float]]:
    """Outputs, inputs and rows for each sample of the linear layers that a model calls."""
    architecture = ZOO[name]
    with torch.device("meta"), torch.no_grad():
        model = architecture.build().eval()
        layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        with counted(layers) as calls:
            model(*(torch.empty(batch, feature.columns) for feature in architecture.features))
    found: Counter[tuple[int, int, float]] = Counter()
    for (site, rows), count in calls.items():
        found[layers[site].out_features, layers[site].in_features, rows / batch] += count
    return found


@pytest.mark.parametrize("name", ZOO)
def test_the_suite_holds_the_layers_of_each_model_with_their_counts(name: str) -> None:
    expected = {
        layer: count
        for layer, count in layers_of(name).items()
        if layer[0] >= zoo_layers.FEWEST_OUTPUTS
    }
    listed = [layer for layer in zoo_layers.LAYERS if layer.model == name]
    found = {(layer.n, layer.k, layer.per_sample): layer.count for layer in listed}
    assert found == expected and len(found) == len(listed)


def places_of(sequence: nn.Sequential) -> set[tuple[int, int, str, bool]]:
    """Outputs, inputs and epilogue of the layers of a sequence, and whether each follows another.

    A single linear layer with nothing to fuse is no chain.
    """
    words = {nn.LayerNorm: "layer+affine", nn.ReLU: "relu", nn.SiLU: "silu"}
    runs: list[list[tuple[int, int, str]]] = [[]]
    for module in sequence:
        if isinstance(module, nn.Linear):
            sizes = module.out_features, module.in_features
            if min(sizes) < zoo_layers.FEWEST_OF_A_CHAIN:
                runs.append([])
            else:
                runs[-1].append((*sizes, "bias"))
        elif type(module) in words and runs[-1]:
            n, k, epilogue = runs[-1].pop()
            runs[-1].append((n, k, f"{epilogue}+{words[type(module)]}"))
        else:
            runs.append([])
    kept = [run for run in runs if len(run) > 1 or (run and run[0][2] != "bias")]
    return {(*layer, place > 0) for run in kept for place, layer in enumerate(run)}


def places_in_cross(cross: CrossLayer) -> set[tuple[int, int, str, bool]]:
    """The same of the layers of a cross."""
    found = [(cross.down, "", False), (cross.up, "cross", True)]
    return {
        (
            layer.out_features, layer.in_features,
            "+".join(["bias"] * (layer.bias is not None) + [last] * bool(last)) or "none", later,
        )
        for layer, last, later in found
    }  # fmt: skip


def test_the_suite_of_chains_holds_the_layers_of_each_sequence_and_cross() -> None:
    with torch.device("meta"):
        models = [architecture.build() for architecture in ZOO.values()]
    expected = {
        place
        for model in models
        for module in model.modules()
        if isinstance(module, nn.Sequential)
        for place in places_of(module)
    }
    for module in itertools.chain(*(model.modules() for model in models)):
        if isinstance(module, CrossLayer):
            expected |= places_in_cross(module)
    found = [
        (layer.n, layer.k, layer.epilogue, later)
        for layer in zoo_layers.CHAIN_LAYERS
        for later in (False, True)
        if (layer.later if later else layer.first)
    ]
    assert set(found) == expected
    assert len(found) == len(set(found))


def test_the_suite_has_no_other_models() -> None:
    assert {layer.model for layer in zoo_layers.LAYERS} == set(ZOO)


def test_sizes_are_as_published() -> None:
    with torch.device("meta"):
        made = {name: ZOO[name].build() for name in ("masknet", "autoint", "dcnv2")}
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in made.items()}
    assert round(counts["masknet"] / 1e6) == 48
    assert counts["autoint"] == 4 * 16 * 64 + 8 * 64 * 64 + 39 * 64 + 1
    assert isinstance(made["dcnv2"][0], Parallel)  # type: ignore[index]
    assert made["dcnv2"][1].in_features == 1677 + 512  # type: ignore[index]


@pytest.mark.parametrize("is_learned", [True, False])
def test_features_have_the_rows_of_a_batch(is_learned: bool) -> None:
    feature = Feature(24, "X5", is_learned)
    small, large = feature.draw(40, 0), feature.draw(DRAWN_ROWS + 40, 0)
    assert small.shape == (40, 24) and small.dtype is torch.bfloat16
    assert large.shape == (DRAWN_ROWS + 40, 24) and large.is_contiguous()
    assert torch.equal(large[:40], large[DRAWN_ROWS:])
    assert not torch.equal(feature.draw(40, 1), small)
    assert small.float().std() > 0


def test_a_dense_part_is_the_model_without_its_tables() -> None:
    torch.manual_seed(0)
    model = DLRM(SIZES["tiny"])
    dense, embedded = torch.randn(6, 5), torch.randn(6, 4, 16)
    expected = model.interact(dense, embedded)
    part = DensePart(model)
    assert torch.equal(part(dense, embedded.flatten(1)), expected[:, None])
    assert not any("tables" in name for name, _ in part.named_parameters())
    assert sum(p.numel() for p in dlrm_dcnv2("tiny").parameters()) == sum(
        p.numel() for p in part.parameters()
    )


def test_crosses_multiply_by_the_first_input() -> None:
    network = FullCrossNetwork(5, 2)
    first, second = network.layers
    x = torch.randn(3, 5)
    once = x * first(x) + x
    assert torch.equal(network(x), x * second(once) + once)
    assert dcnv2(5, 1, (4,))(x).shape == (3, 1)


def test_fields_attend_to_each_other() -> None:
    layer, x = FieldAttention(6, 8, 2), torch.randn(3, 5, 6)
    q, k, v = (f(x).view(3, 5, 2, 4).mT.mT.transpose(1, 2) for f in
               (layer.query, layer.key, layer.value))  # fmt: skip
    read = F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).reshape(3, 5, 8)
    torch.testing.assert_close(layer(x), (read + layer.residual(x)).relu())


def test_hstu_weighs_tokens_of_a_sequence_without_a_softmax() -> None:
    layer, x = HSTULayer(8, 2), torch.randn(3, 5, 8)
    gate, v, q, k = F.silu(layer.first(layer.norm_in(x))).split(8, dim=-1)
    heads = [slice(0, 4), slice(4, 8)]
    read = torch.cat(
        [F.silu(q[..., h] @ k[..., h].mT) / 5 @ v[..., h] for h in heads], dim=-1
    )  # fmt: skip
    torch.testing.assert_close(layer(x), x + layer.second(layer.norm_out(read) * gate))
    assert HSTU(8, 2, 2, 5)(torch.randn(15, 8)).shape == (3, 1)


def test_a_mask_multiplies_the_input() -> None:
    block, x = MaskBlock(6, 4, 3), torch.randn(7, 6)
    expected = block.norm(block.hidden(x * block.mask(x)))
    assert torch.equal(block(x), expected)
    logits = MaskNet(6, 2, 4, 5, (3,), 2)(torch.randn(7, 4), torch.randn(7, 2))
    assert logits.shape == (7, 2)


def test_equal_gates_average_the_experts_of_a_task_and_the_shared_ones() -> None:
    level = Extraction(6, 2, Level(2, (4,)), is_last=False)
    gates = [*level.gates, level.shared_gate]
    for gate in gates:
        nn.init.zeros_(gate.weight)
        nn.init.zeros_(gate.bias)
    inputs = [torch.randn(5, 6) for _ in range(3)]
    groups = [
        torch.stack([e(x) for e in group]) for group, x in zip(level.experts, inputs, strict=True)  # type: ignore[arg-type]
    ]  # fmt: skip
    a, b, shared = level(inputs)
    torch.testing.assert_close(a, torch.cat([groups[0], groups[2]]).mean(0))
    torch.testing.assert_close(b, torch.cat([groups[1], groups[2]]).mean(0))
    torch.testing.assert_close(shared, torch.cat(groups).mean(0))
    model = PLE(6, 2, (Level(2, (4,)), Level(1, (3,))), (2,))
    assert model(torch.randn(5, 6)).shape == (5, 2)
    assert model.levels[-1].shared_gate is None


@pytest.mark.rest
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_models_compile_without_graph_breaks(name: str, training: bool) -> None:
    torch._dynamo.reset()
    architecture = ZOO[name]
    model = architecture.build().bfloat16().train(training)
    rows = getattr(model, "length", 8)  # a sequence; more take longer, and the graph is the same
    inputs = [feature.draw(rows, 0) for feature in architecture.features]
    with torch.set_grad_enabled(training):
        compiled = torch.compile(model, dynamic=False, backend="eager", fullgraph=True)
        logits: Tensor = compiled(*inputs)
        assert logits.isfinite().all()
        if training:
            logits.float().sum().backward()  # type: ignore[no-untyped-call]
            assert all(p.grad is not None for p in model.parameters())
