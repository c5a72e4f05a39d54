"""Models from PyPI that were not written for lokakern: docs/public-models.md, run as printed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests  # type: ignore[import-untyped]
import torch

import lokakern
from lokakern.nn.linear import is_linear
from lokakern.probe.unhooked_products import BETWEEN

SEEDS = (0,)
PAGE = Path(__file__).parents[3] / "docs" / "public-models.md"
SNIPPETS = dict(
    re.findall(r"^## (\w+).*?^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
Ran = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """Run each snippet in this process and keep its variables; Probe replays fewer rows."""
    found: Ran = {}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(requests, "get", None)  # deepctr-torch asks PyPI for its newest version
        patch.setattr("lokakern.problems.ACCURACY_ROWS", 128)
        patch.chdir(tmp_path_factory.mktemp("public"))  # trainers write where they are
        for name, code in SNIPPETS.items():
            torch.manual_seed(0)
            found[name] = {}
            exec(compile(code, f"{PAGE.name}: {name}", "exec"), found[name])
        yield found


def gemms_of(left: dict[str, Any]) -> set[str]:
    """Products that are quantized, as ``site/gemm``."""
    return {f"{row['site']}/{row['gemm']}" for row in left["handle"].choices
            if row["choice"] != "bf16"}  # fmt: skip


def shares_of(left: dict[str, Any]) -> dict[str, float]:
    """Share of the products outside linear layers, in percent."""
    words = {name: re.search(r"([\d.]+)%", why) for name, why in left["report"].unseen.items()}
    return {name: float(found[1]) for name, found in words.items() if found}


def test_each_conversion_takes_fewer_than_fifteen_lines() -> None:
    assert list(SNIPPETS) == ["DCNv2", "DCNMix", "HSTU"]
    for code in SNIPPETS.values():
        _, ours = code.split("# With lokakern:\n")
        assert len(ours.splitlines()) < 15


@pytest.mark.rest
def test_public_models_train_in_fp8_where_it_was_measured(ran: Ran) -> None:
    expected = {
        "DCNv2": {"parallel_dnn.mlp.0/output"}, "DCNMix": {"dnn.linears.0/output"}, "HSTU": set(),
    }  # fmt: skip
    for name, left in ran.items():
        assert expected[name] <= gemms_of(left), name
        assert {x.rpartition("/")[0] for x in gemms_of(left)} <= {
            x.rpartition("/")[0] for x in expected[name]
        }
        assert left["loss"] == left["loss"] and 0.0 < left["loss"] < 10.0, name
        assert all(is_linear(site.module) for site in left["handle"].sites.values())
        gradients = [p.grad for p in left["model"].parameters() if p.grad is not None]
        assert gradients and all(g.isfinite().all() for g in gradients)


@pytest.mark.rest
def test_conversion_preserves_learning(ran: Ran) -> None:
    """The converted model and the one after `undo` start equally and see the same samples.

    The page's own choice is bf16 at 256 samples, so that kernels are forced here.
    """
    left = ran["DCNv2"]
    model, batch, label = left["model"], left["batch"], left["batches"][0][1].float()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    losses: dict[str, list[float]] = {}
    left["handle"].undo()
    handle = lokakern.convert(model, kernels="row")
    for way in ("fp8", "bf16"):
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[way] = []
        for _ in range(4):
            loss = torch.nn.functional.binary_cross_entropy(model(batch), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[way].append(loss.item())
        handle.undo()
    assert losses["fp8"] != losses["bf16"]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.02)
    assert losses["fp8"][-1] < losses["fp8"][0]


@pytest.mark.rest
def test_products_outside_of_linear_layers_are_named(ran: Ran) -> None:
    assert ran["DCNv2"]["report"].unseen == {}
    shares = shares_of(ran["DCNMix"])
    assert set(shares) == {
        "crossnet.U_list", "crossnet.V_list", "crossnet.C_list", "linear_model.weight", BETWEEN
    }  # fmt: skip
    d, r, experts = 479, 8, 2  # of the snippet
    others = d * 1024 + 1024 * 64 + d + 64 + experts * d + 15 + d * experts
    cross = experts * d * r
    total = others + 2 * cross + experts * r * r
    assert shares["crossnet.U_list"] == pytest.approx(100 * cross / total, abs=0.06)
    shares = shares_of(ran["HSTU"])
    assert set(shares) == {"token_embedding.weight", BETWEEN}
    length, width = 16, 64
    attention = 2 * length * width  # a token: scores and values, of all heads together
    total = 200 * width + width * 4 * width + width * width + attention
    assert shares["token_embedding.weight"] == pytest.approx(100 * 200 * width / total, abs=0.06)
    assert shares[BETWEEN] == pytest.approx(100 * attention / total, abs=0.06)
    for left in ran.values():
        assert set(left["report"].unseen) == set(left["handle"].skipped)
