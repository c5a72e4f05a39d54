"""scripts/mutate.py: its mutations, and the order of its tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''
"""A module."""

@dataclass(frozen=True)
class Limits:
    """What is allowed."""

    most: int = 7

def spread(values: list[int], names: dict[str, int], least=0) -> int | None:
    log.info("so many: %d", 3)
    if least < 1 and not names["a"]:
        raise ValueError(f"least is {least + 1}")
    values.sort(key=abs, reverse=True)
    for value in values:
        if value is None:
            continue
    return max(1, least + len(values))
'''


@pytest.fixture(scope="module")
def mutate() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "scripts" / "mutate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # where its dataclass looks for itself
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutate"]


def test_every_mutation_changes_one_line_of_code(
    mutate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(SOURCE)
    found = {(m.kind, m.after.strip()) for m in mutate.mutations_of(Path("a.py"))}
    assert found == {
        ("constant", "most: int = 8"),
        (
            "constant",
            "def spread(values: list[int], names: dict[str, int], least=1) -> int | None:",
        ),
        ("comparison", 'if (least <= 1) and not names["a"]:'),
        ("and/or", "if (least < 1 or not names['a']):"),
        ("not left out", "if least < 1 and (names['a']):"),
        ("condition", "if (not (least < 1 and (not names['a']))):"),
        ("constant", 'if least < 2 and not names["a"]:'),
        ("key", "if least < 1 and not names['ax']:"),
        ("call left out", "pass"),
        ("argument left out", "values.sort(key=abs)"),
        ("constant", "values.sort(key=abs, reverse=False)"),
        ("comparison", "if (value is not None):"),
        ("condition", "if (not (value is None)):"),
        ("continue", "break"),
        ("returned value", "return None"),
        ("arguments swapped", "return max(least + len(values), 1)"),
        ("constant", "return max(2, least + len(values))"),
        ("operator", "return max(1, (least - len(values)))"),
    }
    for mutation in mutate.mutations_of(Path("a.py")):
        (tmp_path / "a.py").write_text(SOURCE)
        mutation.apply(tmp_path)
        changed = (tmp_path / "a.py").read_text()
        compile(changed, "a.py", "exec")
        pairs = list(zip(SOURCE.splitlines(), changed.splitlines(), strict=True))
        assert [one for one, other in pairs if one != other] == [mutation.before.rstrip("\n")]


@pytest.mark.rest
def test_tests_of_a_module_run_before_others(mutate: Any) -> None:
    first, importing, others = mutate.tests_of(Path("lokakern/nn/linear.py"))
    assert first[0] == "tests/nn/test_linear.py" and len(first) == mutate.CLOSEST
    assert "tests/test_docs.py" in importing + others
    every = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(first + importing + others) == sorted(every)
    closest, *_ = mutate.tests_of(Path("registry/snapshot/loading.py"))
    assert "tests/registry/snapshot/test_facts.py" in closest
