"""The models: forward and backward at tiny sizes, and the sizes that were published."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lokakern.bench.models import dlrm, interformer, wukong
from lokakern.bench.models.arms import apply_mods, fits
from lokakern.bench.models.blocks import CRITEO, PADDING, Batch, Inputs, Tables
from lokakern.bench.models.catalog import CATALOG, config_named
from lokakern.errors import ShapeError, UnknownNameError
from lokakern.mods.together import FusedLinear
from lokakern.nn.linear import Linear


def random_batch(inputs: Inputs, samples: int) -> Batch:
    """A random batch: uniform ids in full bags, normal features, labels by a coin."""
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def of_slots(numbers: tuple[int, ...]) -> Tensor:
        slots = torch.tensor(inputs.slots)
        return torch.tensor(numbers).repeat_interleave(slots)

    ids = (
        of_slots(inputs.starts)
        + (uniform(samples, sum(inputs.slots)) * of_slots(inputs.rows)).long()
    )
    history = 1 + (uniform(samples, inputs.history) * inputs.rows[0]).long()
    dense = torch.randn(samples, inputs.dense, generator=generator)
    labels = (uniform(samples) < 0.5).float()
    return Batch(dense, ids.flatten(), inputs.offsets(samples), history, labels)


def multiply_adds(model: nn.Module, samples: int = 2) -> float:
    """FLOPs of all matrix products of a forward pass per sample, counted on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    batch = random_batch(model.config.inputs, samples)  # type: ignore[union-attr]
    with FlopCounterMode(display=False) as counter:
        model(Batch(*(tensor.to("meta") for tensor in batch)))
    return counter.get_total_flops() / 2 / samples


def gemms_of(model: nn.Module) -> set[tuple[int, int]]:
    """Outputs and inputs of the linear layers."""
    linear = (module for module in model.modules() if isinstance(module, nn.Linear))
    return {(module.out_features, module.in_features) for module in linear}


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize(("name", "size"), [("wukong", "S"), ("wukong", "M"), ("dhen", "large")])
def test_mods_reach_every_norm_and_every_layer_across_tokens(
    name: str, size: str, is_fused: bool
) -> None:
    with torch.device("meta"):
        model = CATALOG[name].build(config_named(name, size))
    words, *left = apply_mods(model, is_fused=is_fused)
    (line,) = left
    assert line.startswith("NoBias left head.")  # the prediction
    assert words.startswith("changes: NoBias: ") and ("FuseShared" in words) == is_fused
    assert "Pad" not in words  # 13 dense features are no row to align
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    mixing = [m for m in model.modules() if getattr(m, "is_mixing", False)]
    if is_fused:
        assert len(mixing) == 8 and {type(m) for m in mixing} <= {Linear, FusedLinear}
    else:  # others' tools replace those that fit
        assert all(type(m) is Linear and not fits(m) for m in mixing)


def test_bags_sum_rows_of_their_own_table() -> None:
    inputs = Inputs(dense=1, rows=(3, 5), slots=(2, 3))
    tables, batch = Tables(inputs, 4), random_batch(inputs, 6)
    ids = batch.ids.view(6, 5)
    assert ids[:, :2].min() >= 1 and ids[:, :2].max() <= 3
    assert ids[:, 2:].min() >= 4 and ids[:, 2:].max() <= 8
    ids[0, 2:] = PADDING
    found = tables(batch)
    torch.testing.assert_close(found[:, 0], tables.weight[ids[:, :2]].sum(1))
    torch.testing.assert_close(found[1:, 1], tables.weight[ids[1:, 2:]].sum(1))
    assert found[0, 1].count_nonzero() == 0


def test_initial_tables_scale_with_their_rows() -> None:
    torch.manual_seed(0)
    tables = Tables(Inputs(dense=1, rows=(4, 10_000), slots=(1, 1)), 64)
    short, long = tables.weight.detach()[1:].split([4, 10_000])
    assert short.abs().max() == pytest.approx(0.5, rel=0.05)
    assert long.abs().max() == pytest.approx(0.01, rel=0.02)


def test_inconsistent_inputs_raise() -> None:
    with pytest.raises(ShapeError, match="as many bags as tables"):
        Inputs(dense=1, rows=(3, 5), slots=(2,))


def test_table_sizes_can_be_limited() -> None:
    assert max(CRITEO.capped(1000).rows) == 1000
    assert CRITEO.capped(1000).rows[5] == 3


def test_models_and_sizes_are_found_by_name() -> None:
    assert config_named("wukong", "tiny") == wukong.SIZES["tiny"]
    assert config_named("dlrm", most_rows=100).inputs == CRITEO.capped(100)
    assert config_named("wukong", "S").inputs == wukong.SIZES["S"].inputs.capped(1000)
    assert sum(config_named("wukong", "S").inputs.rows) < 2**20
    assert sum(wukong.SIZES["S"].inputs.capped(10_000).rows) > 2**20
    with pytest.raises(UnknownNameError, match="expected one of wukong"):
        config_named("nobody")
    with pytest.raises(UnknownNameError, match="wukong has no size 'XXL'; expected one of tiny"):
        config_named("wukong", "XXL")


@pytest.mark.parametrize("name", CATALOG)
def test_a_model_overfits_one_batch(name: str) -> None:
    torch.manual_seed(0)
    config = config_named(name, "tiny")
    model, batch = CATALOG[name].build(config), random_batch(config.inputs, 64)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(40):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(2), abs=0.1)
    assert losses[-1] < 0.2


@pytest.mark.parametrize("name", CATALOG)
def test_samples_are_independent(name: str) -> None:
    """Logits of a sample are the same in every batch, and change with each of its inputs."""
    torch.manual_seed(0)
    config = config_named(name, "tiny")
    model, batch = CATALOG[name].build(config).double(), random_batch(config.inputs, 6)
    batch = batch._replace(dense=batch.dense.double())
    logits = model(batch)
    assert logits.shape == (6,)
    slots = sum(config.inputs.slots)
    first = Batch(
        batch.dense[:2], batch.ids[: 2 * slots], config.inputs.offsets(2), batch.history[:2],
        batch.labels[:2],
    )  # fmt: skip
    torch.testing.assert_close(model(first), logits[:2])
    changes = [batch._replace(dense=batch.dense + 1)]
    changes += [batch._replace(ids=batch.ids.index_fill(0, torch.arange(slots), PADDING))]
    if config.inputs.history:
        changes += [batch._replace(history=torch.zeros_like(batch.history))]
    assert all((model(change)[0] - logits[0]).abs() > 1e-6 for change in changes)


@pytest.mark.parametrize("name", CATALOG)
def test_models_run_under_autocast(name: str) -> None:
    """In bf16 a logit differs from float32's by some of bf16's 2^-8, of values of about 1."""
    torch.manual_seed(0)
    config = config_named(name, "tiny")
    model, batch = CATALOG[name].build(config), random_batch(config.inputs, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(batch)
    error = (found.float() - model(batch)).abs().max().item()
    assert 0 < error < 0.05


# Training takes 6 floating-point operations for each multiply-add of a forward pass. The numbers
# are the paper's, which says nothing of the last perceptron.
@pytest.mark.parametrize(("size", "gflop"), [("M", 5.6), ("L", 22.23)])
def test_wukong_is_as_large_as_published(size: str, gflop: float) -> None:
    with torch.device("meta"):
        model = wukong.Wukong(wukong.SIZES[size])
    assert 6 * multiply_adds(model) / 1e9 == pytest.approx(gflop, rel=0.1)


def test_wukong_has_the_gemms_of_the_suite() -> None:
    """Rows B1 to B12 of suite `lrm` are layers of S, C1 to C4 of M."""
    from lokakern.workloads.published_models import layer_named

    for size, names in {
        "S": ("B1", "B3", "B4", "B5", "B6", "B7", "B8", "B10", "B11", "B12"),
        "M": ("C1", "C2", "C3", "C4"),
    }.items():
        with torch.device("meta"):
            model = wukong.Wukong(wukong.SIZES[size])
        found = gemms_of(model)
        for name in names:
            layer = layer_named(name)
            assert (layer.n, layer.k) in found, f"{size} has no {layer}"


def test_dlrm_has_the_gemms_of_the_suite() -> None:
    """Rows A1 to A10 of suite `lrm`, and MLPerf's count of parameters outside of the tables."""
    from lokakern.workloads.published_models import layer_named

    with torch.device("meta"):
        model = dlrm.DLRM(dlrm.SIZES["mlperf"])
    found = gemms_of(model)
    for name in (f"A{row}" for row in range(1, 11)):
        layer = layer_named(name)
        assert (layer.n, layer.k) in found, f"no {layer}"
    dense = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("tables"))
    crosses = 3 * (2 * 512 * 3456 + 3456)
    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 128 + 128
    over = 3456 * 1024 + 1024 + 1024**2 + 1024 + 1024 * 512 + 512 + 512 * 256 + 256 + 256 + 1
    assert dense == bottom + crosses + over


@pytest.mark.parametrize(("size", "features", "length"), [("amazon", 6, 100), ("taobao", 22, 50),
                                                          ("kuaivideo", 9, 100)])  # fmt: skip
def test_interformer_has_public_sizes(size: str, features: int, length: int) -> None:
    """Features and lengths of the data sets; the head is rows L1 of suite `lrm`."""
    config = interformer.SIZES[size]
    assert 1 + len(config.inputs.rows) == features
    assert config.inputs.history == length
    with torch.device("meta"):
        model = interformer.InterFormer(config)
    assert {(512, 1024), (256, 512), (128, 256)} <= gemms_of(model)


def test_attention_uses_present_tokens_and_relative_positions() -> None:
    """Against sums written out; tokens that lie k further do not change what others say."""
    torch.manual_seed(0)
    attention, pool = interformer.Attention(16, 2, 7).double(), interformer.Pool(16, 2, 3).double()
    x, present = torch.randn(4, 7, 16).double(), torch.rand(4, 7) < 0.6
    present[:, 0] = True
    places = torch.arange(7)[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
    turns = torch.polar(torch.ones(7, 4), places)

    def turned(y: torch.Tensor) -> torch.Tensor:
        both = torch.complex(y[..., :4], y[..., 4:]) * turns
        return torch.cat([both.real, both.imag], -1)

    for module, count in ((attention, 3), (pool, 2)):
        *query, key, value = module.inputs(x).view(4, 7, count, 2, 8).permute(2, 0, 3, 1, 4)
        if query:
            q, key = turned(query[0]), turned(key)
        else:
            q = pool.learned.view(3, 2, 8).transpose(0, 1).expand(4, -1, -1, -1)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, key) / 8**0.5
        weight = scores.exp() * present[:, None, None]
        found = torch.einsum("bhqk,bhkd->bqhd", weight / weight.sum(-1, keepdim=True), value)
        torch.testing.assert_close(module(x, present), module.output(found.flatten(2)),
                                   rtol=1e-6, atol=1e-6)  # fmt: skip
    few = attention(x[:, :3], present[:, :3])
    torch.testing.assert_close(few[:1], attention(x[:1, :3], present[:1, :3]))
    assert not any("cos" in name or "sin" in name for name in attention.state_dict())


def test_only_long_unaligned_rows_are_padded() -> None:
    with torch.device("meta"):
        model = CATALOG["interformer"].build(config_named("interformer", "taobao"))
    assert "Pad: 3" in apply_mods(model)[0]
    assert "Pad" not in apply_mods(CATALOG["dlrm"].build(config_named("dlrm", "tiny")))[0]
    padded = {n: m.padding for n, m in model.named_modules() if getattr(m, "padding", (0, 0))[0]}
    assert padded == {f"layers.{i}.interaction.dots": (4, 0) for i in range(3)}


def test_the_longest_k_of_dhen_is_that_of_loka() -> None:
    with torch.device("meta"):
        model = CATALOG["dhen"].build(config_named("dhen", "large"))
    assert (1024, 123_200) in gemms_of(model)
