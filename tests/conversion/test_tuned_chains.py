"""`Conversion.tune` of chains, with times from a script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from lokakern.conversion import tuning_file
from lokakern.conversion.convert import Conversion
from lokakern.conversion.tune import Tuning, tune
from lokakern.errors import ChoicesError
from lokakern.nn.linear import CHAIN_DATA
from lokakern.nn.routed_matmul import kernel_at
from tests.conversion.test_tune import On, Script
from tests.support.chained_models import convert, is_chained, rows, tower
from tests.support.measurements import Book

CHAIN = ("0 to 2", "chain")
FIRST, SECOND = ("0", "output"), ("2", "output")
M = 512


class ChainScript(Script):
    """Times follow from the products and chains that run."""

    def on(self) -> On:
        chains = {
            sites for span in self.handle.spans for chain in span.plan.chains
            if (sites := span.sites_of(chain)) not in self.handle.off_chains
        }  # fmt: skip
        idle = {name for sites in chains for name in sites}
        found = {(f"{sites[0]} to {sites[-1]}", "chain") for sites in chains}
        for site in self.handle.sites.values():
            is_on = kernel_at(site.routes[0].text, M) and site.name not in idle
            found |= {(site.name, "output")} if is_on else set()
        return found


def tuned(
    model: nn.Module,
    gains_us: dict[tuple[str, str], float],
    handle: Conversion | None = None,
    **options: Any,
) -> tuple[Tuning, Conversion, ChainScript]:
    handle = handle or convert(model, 0.06)
    script = ChainScript(handle, lambda on: 100.0 - sum(gains_us.get(x, 0.0) for x in on))

    def step() -> None:
        with torch.no_grad():
            model(rows(M))

    return tune(handle, step, make_timer=script, **options), handle, script


def kept(found: Tuning) -> dict[tuple[str, ...], bool]:
    return {(t.group.gemm, *t.group.sites): t.is_kept for t in found.groups}


def test_a_chain_that_gains_is_kept_and_its_products_are_not_tried(tuning_book: Book) -> None:
    model = tower()
    found, _, script = tuned(model, {CHAIN: 30.0, FIRST: -5.0, SECOND: 5.0})
    assert found.groups[0].group.gemm == "chain"
    assert kept(found) == {
        ("chain", "0 to 2"): True, ("output", "0"): True, ("output", "2"): True,
    }  # fmt: skip
    assert [t.gain is None for t in found.groups] == [False, True, True]
    assert found.rows[1]["why"] == "chains run its layers in the step"
    # All on, all off, and all but the chain.
    assert len(script.prepared) == 3
    assert is_chained(model)
    # The routes take 16 and 17 us; nothing is known of the norm.
    assert found.groups[0].group.predicted_us == pytest.approx(33.0 - 12.0)


def test_a_chain_that_loses_is_off_and_its_products_are_tried(tuning_book: Book) -> None:
    model = tower()
    found, handle, _ = tuned(model, {CHAIN: -30.0, FIRST: -5.0, SECOND: 5.0})
    assert kept(found) == {
        ("chain", "0 to 2"): False, ("output", "0"): False, ("output", "2"): True,
    }  # fmt: skip
    assert not is_chained(model)
    assert "chain" not in repr(handle)
    row = handle.choices[-1]
    assert (row["gemm"], row["choice"], row["m"]) == ("chain", "off", [])
    assert "0 to 2 (tuning, or a limit of the loss, gave it up): chain of" in handle.explain("0")
    handle.refresh()
    assert is_chained(model)


def test_without_any_gain_the_model_is_the_unconverted_one(tuning_book: Book) -> None:
    model = tower()
    with torch.no_grad():
        plain = model(rows(M))
    tuned(model, {CHAIN: -1.0, FIRST: -1.0, SECOND: -1.0})
    with torch.no_grad():
        assert torch.equal(model(rows(M)), plain)


def test_equal_chains_are_one_group(tuning_book: Book) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = tower(), tower()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.b(self.a(x) * 1.0)  # else one chain crosses both
            return y

    chains = {("a.0 to a.2", "chain"): 10.0, ("b.0 to b.2", "chain"): 10.0}
    found, handle, _ = tuned(Two(), chains)
    assert found.groups[0].group.sites == ("a.0 to a.2", "b.0 to b.2")
    assert found.groups[0].is_kept
    assert not handle.off_chains


def test_chains_that_the_step_does_not_run_are_no_groups(tuning_book: Book) -> None:
    handle = convert(tower(), 0.06)
    script = ChainScript(handle, lambda _: 100.0)

    def step() -> None:
        with torch.no_grad():
            handle.model(rows(100))

    found = tune(handle, step, make_timer=script)
    assert not found.groups
    assert not handle.off_chains


def saved(path: Path, gains_us: dict[tuple[str, str], float]) -> Path:
    found, *_ = tuned(tower(), gains_us)
    found.save(path / "tuned.json")
    return path / "tuned.json"


@pytest.mark.parametrize(("gain", "is_on"), [(30.0, True), (-30.0, False)])
def test_a_file_keeps_what_became_of_chains(
    tuning_book: Book, tmp_path: Path, gain: float, is_on: bool
) -> None:
    path = saved(tmp_path, {CHAIN: gain, FIRST: 1.0, SECOND: 1.0})
    model = tower()
    handle = convert(model, 0.06, tuned=path)
    assert is_chained(model) is is_on
    assert handle.off_chains == (frozenset() if is_on else {("0", "2")})


def test_a_file_for_another_chain_is_refused(tuning_book: Book, tmp_path: Path) -> None:
    path = saved(tmp_path, {CHAIN: 30.0})
    file = tuning_file.read(path)
    other = msgspec.structs.replace(file.chains[0], plan=file.chains[0].plan + " ")
    handle = convert(tower(), 0.06)
    tuning_file.check(file, handle, "here")
    for chains in ([], [other], [*file.chains, *file.chains]):
        with pytest.raises(ChoicesError, match="another chain was chosen for 0 to 2"):
            tuning_file.check(msgspec.structs.replace(file, chains=chains), handle, "here")


def test_variants_keep_the_memory_of_weights(tuning_book: Book) -> None:
    model, seen = tower(), []

    def see(switch: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(variant: Any) -> None:
            switch(variant)
            for layer in (model[0], model[2]):
                for name in ("fp8_data", f"{CHAIN_DATA}row"):
                    if name in layer._buffers:
                        seen.append((layer, name, layer._buffers[name].data_ptr()))

        return call

    class Seeing(ChainScript):
        def __call__(self, step: Any, switch: Any, device: Any, graph: bool) -> ChainScript:
            super().__call__(step, see(switch), device, graph)
            return self

    handle = convert(model, 0.06)
    gains = {CHAIN: -30.0, FIRST: -5.0, SECOND: 5.0}
    script = Seeing(handle, lambda on: 100.0 - sum(gains.get(x, 0.0) for x in on))

    def step() -> None:
        with torch.no_grad():
            model(rows(M))

    tune(handle, step, make_timer=script)
    assert seen
    assert len(set(seen)) == len({x[:2] for x in seen})


def test_a_step_that_fails_leaves_chains_as_they_were(tuning_book: Book) -> None:
    model = tower()
    handle = convert(model, 0.06)

    def fail() -> None:
        raise RuntimeError("no step")

    with pytest.raises(RuntimeError, match="no step"):
        tune(handle, fail, make_timer=ChainScript(handle, lambda _: 1.0))
    assert is_chained(model)
