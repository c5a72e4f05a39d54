"""Old import paths, public classes in a fresh process, and models that an older version saved."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

from lokakern.moved import MOVED

DOCUMENTED = {
    "lokakern.communication": "Compression",
    "lokakern.converting": "Conversion",
    "lokakern.gathering": "Gathering",
    "lokakern.linear": "Linear",
    "lokakern.linear_norm_act": "LinearNormAct",
    "lokakern.mods.block_norm": "BlockRMSNorm",
    "lokakern.mods.intermediates": "WideLinear",
    "lokakern.mods.no_bias": "RowBatchNorm",
    "lokakern.normalizing_backward": "norm_backward",
    "lokakern.quantized": "QuantizedTensor",
    "lokakern.choice": "Choice",
}


def test_every_moved_path_has_a_documented_name() -> None:
    assert set(DOCUMENTED) == set(MOVED)


@pytest.mark.parametrize("old", MOVED)
def test_old_paths_give_the_objects_of_the_new_ones(old: str) -> None:
    new = importlib.import_module(MOVED[old])
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        moved = importlib.import_module(old)
    name = DOCUMENTED[old]
    assert getattr(moved, name) is getattr(new, name)
    with pytest.raises(AttributeError):
        moved.no_such_name  # noqa: B018
    assert new.__spec__ is not None and new.__spec__.name == MOVED[old]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pickles_that_name_an_old_path_load() -> None:
    from lokakern.nn.linear import Linear

    old = b"clokakern.linear\nLinear\n."
    assert pickle.loads(old) is Linear


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("layer", ["Linear", "LinearNormAct"])
def test_a_layer_with_a_budget_can_be_the_first_use(layer: str) -> None:
    code = f"import lokakern; print(lokakern.{layer}(8, 8, budget=0.06))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "output=bf16" in ran.stdout
