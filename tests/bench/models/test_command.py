"""The command `model` and what it is made of: arms, steps, times, shares and choices."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import profile
from typer.testing import CliRunner

import lokakern
from lokakern.bench.cli.main import app
from lokakern.bench.models import arms, learning, throughput
from lokakern.bench.models.arms import Setting, to_bfloat16
from lokakern.bench.models.catalog import config_named
from lokakern.bench.models.click_log import ClickLog
from lokakern.bench.models.comparison import LayerChoice, gap_words, layer_choices
from lokakern.bench.models.learning import Quality, Run, learn
from lokakern.bench.models.throughput import Shares, kind_of, shares_of
from lokakern.errors import UnknownNameError, UnsupportedError
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import Device
from lokakern.workloads.suite_files import suite_from_file

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
CPU = torch.device("cpu")
SETTING = Setting("dlrm", "tiny", config_named("dlrm", "tiny"), 32, True, CPU, 0.06)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rounds, and one seed of replays."""
    monkeypatch.setattr(arms, "REPLAYED_SEEDS", (0,))
    monkeypatch.setattr(throughput, "MOST_ROUNDS", 3)
    monkeypatch.setattr(throughput, "FEWEST_ROUNDS", 3)


def run(*words: str) -> Any:
    done = CliRunner().invoke(app, ["model", "dlrm", "--size", "tiny", "--batch", "32", *words])
    assert done.exit_code == 0, f"{done.output}\n{done.exception}"
    return done


def test_arms_are_selected_by_name_and_include_the_baseline() -> None:
    everybody = [arm.name for arm in arms.arms_named()]
    assert everybody[:2] == ["bf16", "as-written"] and everybody[-1] == "lokakern"
    assert {"torchao-tensorwise", "torchao-rowwise"} <= set(everybody)
    assert [arm.name for arm in arms.arms_named(("lokakern",))] == ["bf16", "lokakern"]
    with pytest.raises(UnknownNameError, match="no arm te; expected one of bf16, as-written"):
        arms.arms_named(("te",))


def test_missing_requirements_raise_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    rowwise = arms.arms_named(("torchao-rowwise",))[1]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UnsupportedError, match="torchao-rowwise: torchao is not installed"):
        arms.build(rowwise, SETTING, 0)


def routes_of_a_layer() -> str:
    """Routes of a layer of 2048 by 2048 on an H200."""
    layer = nn.Linear(2048, 2048, bias=False, device="meta")
    conversion = lokakern.convert(layer, 0.06, device="NVIDIA H200", inference=False)
    return " ".join(route.text for site in conversion.sites.values() for route in site.routes)


def test_dispatch_is_restricted_to_one_library_in_the_context() -> None:
    load_kernels()
    before = dict(KERNELS)
    owners = {arms.owner_of(k) for k in before.values() if k.op == "gemm" and k.quantizes}
    assert {"cuda", "torch"} <= owners
    with arms.only("cuda"):
        left = [k for k in KERNELS.values() if k.op == "gemm"]
        real = [k for k in left if k.quantizes and "any" not in k.architectures]
        assert {arms.owner_of(k) for k in real} == {"cuda"}
        assert "torch.bf16" in KERNELS
        assert all(part in KERNELS for kernel in left for part in kernel.parts)
        alone = routes_of_a_layer()
        assert "+cuda." in alone and "torch." not in alone
    assert before == KERNELS
    assert routes_of_a_layer() != alone


def test_predictions_keep_tables_in_high_precision() -> None:
    model = to_bfloat16(SETTING.build(0))
    dtypes = {
        name.partition(".")[0]: parameter.dtype for name, parameter in model.named_parameters()
    }
    assert dtypes.pop("tables") is torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


def test_runs_are_reproducible_by_seed() -> None:
    built = arms.build(arms.arms_named()[0], SETTING, 0).uncompiled
    first, other, again = (learn(built, SETTING, seed, 3) for seed in (0, 1, 0))
    assert first == again
    assert first.losses != other.losses


def test_another_seed_in_place_is_the_run_of_a_new_model() -> None:
    """Parameters, the state of the optimizer, and scales of weights are those of the new seed."""
    arm = replace(arms.arms_named(("fp8-rowwise",))[1], compiled=False)
    used = arms.build(arm, SETTING, 1)
    learn(used, SETTING, 1, 3)
    assert learn(used, SETTING, 0, 3) == learn(arms.build(arm, SETTING, 0), SETTING, 0, 3)


def test_a_run_starts_from_given_parameters_at_a_given_rate() -> None:
    built = arms.build(arms.arms_named()[0], SETTING, 0).uncompiled
    start = learning.parameters_of(built.arm, SETTING, 7)
    usual, slow = (learn(built, SETTING, 0, 3, start, rate) for rate in (1e-3, 1e-5))
    assert usual.losses[0] == slow.losses[0] != learn(built, SETTING, 0, 3).losses[0]
    assert usual.losses[1] != slow.losses[1]
    few = learn(built, SETTING, 0, 3, start, batches=2).quality
    assert few.samples == 2 * SETTING.samples < usual.quality.samples


@pytest.mark.parametrize("training", [True, False])
def test_fp8_in_all_layers_changes_the_loss(training: bool) -> None:
    """Every layer of multiples of 16 rounds its operands; the others, and the tables, do not."""
    setting = replace(SETTING, training=training, config=config_named("wukong", "tiny"),
                      name="wukong")  # fmt: skip
    plain = arms.build(arms.arms_named()[0], setting, 0).uncompiled
    naive = arms.build(arms.arms_named(("fp8-tensorwise",))[1], setting, 0).uncompiled
    assert naive.notes[-2] == "torch.quantize_tensor+torch.emulated_tensor"
    assert "bottom.0 (32x5)" in naive.notes[-1] and "head.0 (" not in naive.notes[-1]
    batch = ClickLog(setting.inputs, 0).batch(0, 32)
    if training:
        mine, theirs = naive.trainer(), plain.trainer()
        losses = [[x.step(batch, batch.labels).item() for _ in range(3)] for x in (mine, theirs)]
        found, expected = torch.tensor(losses)
    else:
        a, b = naive.predictor(), plain.predictor()
        found, expected = a.logits(a.embed(batch)), b.logits(b.embed(batch))
    error = (found - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.3, "E4M3 rounds by 4 %, bfloat16 by 0.3 %"


def test_training_lowers_the_loss() -> None:
    setting = replace(SETTING, samples=256)
    torch.manual_seed(0)
    model = setting.build(0)
    built = arms.Built(arms.arms_named(("as-written",))[1], model, model.interact)  # type: ignore[arg-type]
    done = learn(built, setting, 0, 300)
    assert sum(done.losses[-20:]) < 0.8 * sum(done.losses[:20])
    assert done.quality.normalized_entropy < 1.0, "worse than the click rate alone"
    assert done.quality.auc > 0.6


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_step_trains_the_tables_only_if_they_are_part_of_it(training: bool, whole: bool) -> None:
    setting = replace(SETTING, training=training)
    arm = arms.arms_named(("as-written",))[1]
    built = arms.build(arm, setting, 0)
    before = {name: x.clone() for name, x in built.model.state_dict().items()}
    found = throughput.stepper(built, setting, whole=whole)
    moved = {name for name, x in built.model.state_dict().items() if not x.equal(before[name])}
    assert ("tables.weight" in moved) == (training and whole)
    assert ("head.0.weight" in moved) == training
    assert found.timer == throughput.HOST


def test_gradients_of_given_embeddings_are_computed_and_dropped() -> None:
    x, dense = torch.ones(3, requires_grad=True), torch.ones(3)
    seen: list[torch.Tensor] = []
    sent = throughput.sent(x)
    sent.register_hook(seen.append)
    (sent * 2.0).sum().backward()
    assert seen[0].tolist() == [2.0] * 3 and x.grad is None
    assert throughput.sent(dense) is dense


def test_ratios_are_per_round_and_rounds_at_a_low_clock_are_void(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The baseline takes twice as long; the fourth round is at half the clock, and slow."""
    rounds = itertools.count()
    speeds = [1.0, 1.1, 0.9, 5.0, 1.0, 1.2]
    clocks = [1800.0, 1800.0, 1800.0, 900.0, 1800.0, 1800.0]

    def elapsed(runner: throughput.Stepper, _device: torch.device) -> float:
        place = next(rounds)
        of = 0 if place < 2 else (place - 2) // 2  # the first two warm up
        return throughput.BATCHES * speeds[of] * (200.0 if runner.name == "bf16" else 100.0)

    def read() -> float:
        return clocks[(next(reads)) // 2]

    reads = itertools.count()
    monkeypatch.setattr(throughput, "elapsed_us", elapsed)
    monkeypatch.setattr(throughput.timing, "clock_reader", lambda _device: read)
    monkeypatch.setattr(throughput, "MOST_ROUNDS", 6)
    monkeypatch.setattr(throughput, "FEWEST_ROUNDS", 6)
    steppers = [throughput.Stepper(n, lambda: None, lambda: None, "") for n in ("bf16", "fast")]
    found = throughput.race(steppers[0], steppers[1], CPU)
    assert found.rounds == 5
    assert found.speedup == 2.0 and found.speedup_margin == 0.0
    assert (found.step_us, found.baseline_us) == (100.0, 200.0)
    assert found.margin_us > 0


@pytest.mark.parametrize(("noise", "rounds"), [(0.0, 4), (0.004, 4), (0.2, 12)])
def test_rounds_go_on_while_the_ratio_is_uncertain(
    monkeypatch: pytest.MonkeyPatch, noise: float, rounds: int
) -> None:
    draws = random.Random(1)
    monkeypatch.setattr(
        throughput, "elapsed_us", lambda _runner, _device: 100 * draws.uniform(1 - noise, 1 + noise)
    )
    for name, value in {"FEWEST_ROUNDS": 2, "USUAL_ROUNDS": 4, "MOST_ROUNDS": 12}.items():
        monkeypatch.setattr(throughput, name, value)
    steppers = [throughput.Stepper(n, lambda: None, lambda: None, "") for n in ("bf16", "fast")]
    assert throughput.race(steppers[0], steppers[1], CPU).rounds == rounds
    monkeypatch.setattr(throughput, "RACE_SECONDS", 0.0)
    assert throughput.race(steppers[0], steppers[1], CPU).rounds == 2


@pytest.mark.parametrize(("kernel", "kind"), [
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "GEMM"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "GEMM"),
    ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel", "GEMM"),
    ("triton_tem_fused_addmm_relu_3", "GEMM"),
    ("triton_per_fused__to_copy_add_native_layer_norm_5", "norm"),
    ("triton_per_fused__to_copy_mean_mul_pow_rsqrt_5", "norm"),
    ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Kernel", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
    ("quantize_row_kernel", "quantizing"),
    ("void at::native::embedding_bag_kernel", "tables"),
    ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
    ("triton_poi_fused_cat_2", "other"),
    ("aten::addmm", "GEMM"), ("aten::bmm", "GEMM"), ("aten::native_layer_norm", "norm"),
    ("aten::add_", "other"),
])  # fmt: skip
def test_kinds_of_kernels_follow_from_their_names(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_amdahl_bounds_the_gain_of_gemms_and_norms() -> None:
    us = {"GEMM": 50.0, "norm": 10.0, "quantizing": 0.0, "other": 40.0}
    assert Shares(us, "").bound == pytest.approx(1 / (0.25 + 0.4))
    assert Shares(us, "").limit == pytest.approx(1 / 0.4)


def test_gemms_dominate_the_profile_of_gemms() -> None:
    a = torch.randn(512, 512)
    found = shares_of(lambda: [a @ a for _ in range(5)] and None, 5, CPU)
    assert found.share("GEMM") > 0.5
    assert found.total_us > 0


def test_gpu_shares_count_kernels_but_not_annotated_ranges() -> None:
    def event(device: DeviceType, is_user_annotation: bool) -> SimpleNamespace:
        return SimpleNamespace(
            device_type=device, is_user_annotation=is_user_annotation, self_device_time_total=7.0,
            self_cpu_time_total=3.0,
        )  # fmt: skip

    kernel, held = event(DeviceType.CUDA, False), event(DeviceType.CUDA, True)
    launch = event(DeviceType.CPU, False)
    assert [throughput._spent_us(x, True) for x in (kernel, held, launch)] == [7.0, 0.0, 0.0]
    assert throughput._spent_us(launch, False) == 3.0
    a = torch.randn(8, 8)
    with profile() as found:
        a @ a
    assert not found.key_averages()[0].is_user_annotation


def test_gains_of_layers_come_from_the_database() -> None:
    """They equal `lokakern.dispatch` of the same products on an H200."""
    model = nn.Sequential(nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16))
    conversion = lokakern.convert(model, 0.06, device="NVIDIA H200")
    built = arms.Built(arms.arms_named(("lokakern",))[1], model, model, conversion)
    found = {c.gemm: c for c in layer_choices(built, {"0": 20480}, training=True)}
    assert list(found) == ["output", "grad_input", "grad_weight"]
    chosen = lokakern.dispatch("gemm", (20480, 2048, 2048), 0.06, device="NVIDIA H200")
    plain = lokakern.dispatch("gemm", (20480, 2048, 2048), None, device="NVIDIA H200")
    output = found["output"]
    assert output.bf16_us == plain.latency_us
    assert output.us is not None and output.us <= plain.latency_us
    assert output.gain_us == output.bf16_us - output.us
    if output.kernel != "bf16":
        assert output.us >= chosen.latency_us  # of all forms of a weight one is taken for all m
    assert list(layer_choices(built, {}, training=True)) == []
    assert [c.gemm for c in layer_choices(built, {"0": 64}, training=False)] == ["output"]


def test_a_gap_between_layers_and_the_step_is_explained() -> None:
    def choice(gain: float) -> LayerChoice:
        return LayerChoice("a", "output", 8, 8, 8, "x", 100.0 + gain, 100.0, "")

    before = Shares({"GEMM": 500.0, "quantizing": 0.0, "other": 300.0}, "")
    after = Shares({"GEMM": 300.0, "quantizing": 60.0, "other": 350.0}, "")
    assert "within 10%" in gap_words([choice(100.0), choice(45.0)], 150.0, before, after)
    words = gap_words([choice(100.0), choice(100.0)], 100.0, before, after)
    assert "add up to 200 us by the database, the step's is 100 us" in words
    assert "gap of -100 us" in words
    assert "140 us shorter in the profile, are -60" in words
    assert "other -50" in words and "gaps between kernels +10" in words


def test_curves_are_smoothed_and_lines_hold_all_losses(tmp_path: Path) -> None:
    middles, means = learning.smoothed([1.0, 3.0, 2.0, 4.0, 9.0], points=2)
    assert (middles, means) == ([0.5, 2.5, 4.0], [2.0, 3.0, 9.0])
    quality = Quality(0.5, 0.5, 0.9, 0.7, 64)
    runs = [Run(arm, seed, (0.7, 0.6), quality) for arm in ("bf16", "x") for seed in (0, 1)]
    paths = learning.save_curves(runs, tmp_path / "new", "title")
    lines = [json.loads(line) for line in paths[0].read_text().splitlines()]
    assert [(x["arm"], x["seed"]) for x in lines] == [("bf16", 0), ("bf16", 1), ("x", 0), ("x", 1)]
    assert lines[0]["losses"] == [0.7, 0.6]
    has_plots = importlib.util.find_spec("matplotlib") is not None
    assert [path.name for path in paths] == ["runs.jsonl", *["loss.png"] * has_plots]


@pytest.mark.rest
def test_training_is_compared_from_the_command_line(tmp_path: Path) -> None:
    """A CPU has no measurements, so lokakern equals the baseline bit by bit."""
    done = run("--steps", "6", "--seeds", "2", "--arm", "lokakern", "--arm", "as-written",
               "--arm", "torchao-rowwise", "--out", str(tmp_path), "--json")  # fmt: skip
    facts = json.loads(done.stdout)
    rows = {row["arm"]: row for row in facts["rows"]}
    assert list(rows) == ["bf16", "as-written", "torchao-rowwise", "lokakern"]
    assert rows["torchao-rowwise"]["note"].startswith("left out: torchao-rowwise: ")
    for name in ("bf16", "as-written", "lokakern"):
        row = rows[name]
        assert row["step us"] > 0 and row["x bf16"] > 0 and row["log loss"] > 0
        assert (row["breaks"], row["recompiles"]) == (0, 0)
        assert facts["arms"][0]["pace"]["timer"] == throughput.HOST
    assert (rows["lokakern"]["expected %"], rows["lokakern"]["+- %"]) == (0.0, 0.0)
    assert rows["as-written"]["expected %"] != 0.0 and rows["as-written"]["+- %"] > 0
    assert rows["bf16"]["expected %"] is None
    choices = facts["arms"][3]["choices"]
    assert {c["gemm"] for c in choices} == {"output", "grad_input", "grad_weight"}
    assert {c["site"] for c in choices} >= {"cross.layers.0.down", "head.4"}
    assert {c["rows"] for c in choices} == {32}
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 3 * 2
    assert all(len(json.loads(line)["losses"]) == 6 for line in lines)


def test_a_failing_arm_has_a_reason_and_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **_options: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(arms, "probed", fail)
    monkeypatch.setattr(arms, "quantize_everywhere", fail)
    words = ("--steps", "2", "--seeds", "1", "--arm", "lokakern", "--arm", "fp8-rowwise", "--json")
    rows = {row["arm"]: row for row in json.loads(run(*words).stdout)["rows"]}
    assert "out of luck" in rows["lokakern"]["note"] and rows["lokakern"]["step us"] is None
    assert "out of luck" in rows["fp8-rowwise"]["note"]
    assert rows["bf16"]["step us"] > 0 and rows["bf16"]["expected %"] is None


def test_layers_of_a_model_become_a_suite(tmp_path: Path) -> None:
    """Wukong S at 2048 samples has rows B3 to B12 of the table of workloads, with gradients.

    B1, B6 and B7, and B8 and B11, multiply across tokens: nothing is chosen for them.
    """
    path = tmp_path / "new" / "wukong.toml"
    words = ["model", "wukong", "--size", "S", "--batch", "2048", "--suite", str(path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip().endswith("9 different layers")
    suite = suite_from_file(path)
    posed = {(c.problem.m, c.problem.n, c.problem.k) for c in suite.cases(H200)}
    for m, n, k in ((2048, 2048, 17280), (2048, 5120, 2048), (2048, 2048, 10240)):
        assert {(m, n, k), (m, k, n), (n, k, m)} <= posed
    assert max(m for m, _, _ in posed) < 160 * 2048
    assert "count = 16\n" in path.read_text()  # 8 perceptrons have two layers of 2048 by 2048
    words = ["model", "interformer", "--size", "taobao", "--batch", "64", "--suite", str(path)]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert "m = 64\nn = 1408\nk = 904\n" in path.read_text()  # rows of 900, which Mods pad
    run("--infer", "--suite", str(path))
    assert path.read_text().startswith('name = "dlrm-tiny-32"') and "grad" not in path.read_text()


def test_predictions_are_compared_from_the_command_line() -> None:
    done = run("--infer", "--steps", "4", "--seeds", "2", "--arm", "only-torch", "--quiet")
    assert "dlrm tiny, inference, batch 32, on " in done.stdout
    assert throughput.HOST in done.stdout
    assert "Amdahl: " in done.stdout
    assert "only-torch: choices, and times in the database" in done.stdout


def test_arm_by_budget_chooses_among_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def convert(_model: nn.Module, wanted: Any, **_: Any) -> None:
        asked.append((wanted, set(KERNELS)))

    monkeypatch.setattr(arms, "convert", convert)
    (_, arm) = arms.arms_named(("by-budget",))
    arms.build(arm, SETTING, 0)
    assert asked == [(SETTING.budget, set(KERNELS))]
