"""Suites from TOML: cases of valid files, and errors of invalid ones."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lokakern.errors import SuiteError, UnknownNameError
from lokakern.sweep.engine import candidates
from lokakern.types import Device, Format, Granularity, Layout
from lokakern.workloads import suite_files
from lokakern.workloads.drawn_sizes import WIDTHS, drawn_sizes
from lokakern.workloads.norm_cases import chain_layer_cases
from lokakern.workloads.suite_files import suite_from_file, suite_named
from lokakern.workloads.suites import Suite

H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
GOOD = """
name = "my-model"
title = "layers of my model"
[[layer]]
m = [2048, 8192]
n = 512
k = 1024
distribution = "X5"
bias = true
forms = ["gemm", "prepared", "scaled_gemm", "quantize", "grad_input", "grad_weight"]
[[layer]]
m = 27
n = 27
k = 128
batch = 2048
[[layer]]
m = 256
n = 64
k = 39
format = "float32"
distribution = "X14(spread=1e7)"
"""


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "model.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_is_a_suite(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    suite = suite_named(str(path))
    assert isinstance(suite, Suite)
    assert (suite.name, suite.title) == ("my-model", "layers of my model")
    cases = suite.cases(H200)
    assert cases == suite_from_file(str(path)).cases(H200)
    assert all(candidates(case.problem, H200) for case in cases)
    first = [c for c in cases if {c.problem.n, c.problem.k} & {512, 1024} and c.problem.m != 256]
    of_ops = Counter((c.problem.op, c.problem.prepared) for c in first if c.distribution == "X5")
    assert of_ops == {
        ("gemm", False): 2, ("gemm", True): 6, ("scaled_gemm", False): 6, ("quantize", False): 6
    }  # fmt: skip
    assert {c.problem.epilogue for c in first
            if c.problem.op == "gemm" and c.distribution == "X5"} == {"bias"}  # fmt: skip
    gradients = [c.problem for c in cases if c.distribution == "X12"]
    assert Counter(problem.shape for problem in gradients) == {
        (2048, 1024, 512): 3, (8192, 1024, 512): 3, (512, 1024, 2048): 1, (512, 1024, 8192): 1
    }  # fmt: skip
    batched = [c for c in cases if c.problem.batch != 1]
    assert [(c.problem.batch, c.problem.shape, c.distribution) for c in batched] == [
        (2048, (27, 27, 128), "X1")
    ]
    wide = [c.problem for c in cases if c.distribution == "X14(spread=1e+07)" or c.problem.k == 39]
    assert Counter((p.op, p.prepared) for p in wide) == {
        ("gemm", False): 1, ("gemm", True): 3, ("quantize", False): 3
    }  # fmt: skip
    assert {p.a.format for p in wide} == {Format.FLOAT32}
    assert {p.a.alignment for p in wide} == {4}


def test_defaults_of_a_layer(tmp_path: Path) -> None:
    suite = suite_from_file(written(tmp_path, "name='a'\n[[layer]]\nm=64\nn=32\nk=48\n"))
    assert suite.title == "model.toml"
    cases = suite.cases(H200)
    assert {case.distribution for case in cases} == {"X1"}
    gemms = [case.problem for case in cases if case.problem.op == "gemm"]
    assert [p.b.granularity for p in gemms if p.b] == [
        Granularity.NONE, Granularity.TENSOR, Granularity.ROW, Granularity.BLOCK
    ]  # fmt: skip
    assert all(p.b.layout is Layout.COLUMN for p in gemms if p.b)
    assert {p.epilogue for p in gemms} == {"none"}
    assert len(cases) == 7


@pytest.mark.parametrize(
    ("epilogue", "count"),
    [("bias+relu", 9), ("bias+layer+affine+silu", 11), ("none", 9), ("bias+block_rms(64)", 11)],
)
def test_a_layer_of_a_chain_has_its_cases(tmp_path: Path, epilogue: str, count: int) -> None:
    path = written(
        tmp_path,
        f"""
name = "chains"
[[layer]]
m = [64, 96]
n = 128
k = 256
distribution = "X8"
epilogue = "{epilogue}"
forms = ["chain"]
""",
    )
    cases = suite_from_file(path).cases(H200)
    assert len(cases) == 2 * count <= 2 * suite_files.FORMS["chain"]
    assert {(c.problem.op, c.problem.epilogue, c.distribution) for c in cases} == {
        ("gemm_norm", epilogue, "X8")
    }
    one = [c for c in cases if c.problem.m == 96]
    assert one == list(chain_layer_cases(96, 128, 256, epilogue, "X8", Format.E4M3FN))
    assert all(candidates(case.problem, H200) for case in cases)


LAYER = "[[layer]]\nm = 8\nn = 8\nk = 8\n"
NAMED = 'name = "a"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = ", "is not TOML"),
        (b"name = '\xff'", "is not text in UTF-8"),
        (b"\x00", "is not TOML"),
        ("a = " + "[" * 100_000, "is not TOML"),
        ("", "name is missing"),
        (LAYER, "name is missing"),
        ("name = 3\n" + LAYER, "name is 3; expected a line of text"),
        ('name = ""\n' + LAYER, "name is ''"),
        ('name = "../x"\n' + LAYER, "name is '../x'; expected letters"),
        ('name = "lrm"\n' + LAYER, "and not smoke, anchors, lrm"),
        (NAMED + "title = []\n" + LAYER, r"title is \[\]"),
        (NAMED + 'title = "a\\nb"\n' + LAYER, "expected a line of text"),
        (NAMED, r"found no \[\[layer\]\]"),
        (NAMED + "layer = []", r"found no \[\[layer\]\]"),
        (NAMED + "layer = 3", r"found no \[\[layer\]\]"),
        (NAMED + "layer = [3]", "layer 1: is 3; expected a table"),
        (NAMED + "[layer]\nm = 8", r"found no \[\[layer\]\]"),
        (NAMED + "layers = 3\n" + LAYER, "has no entry 'layers'; expected one of name, title"),
        (NAMED + LAYER + LAYER + "dist = 3", "layer 2: has no entry 'dist'; expected one of m, n"),
        (NAMED + "[[layer]]\nn = 8\nk = 8", "layer 1: m is missing; expected an integer from 1"),
        (NAMED + "[[layer]]\nm = 8\nk = 8", "n is missing"),
        (NAMED + "[[layer]]\nm = 8\nn = 8", "k is missing"),
        (NAMED + "[[layer]]\nm = []\nn = 8\nk = 8", "m is empty"),
        (NAMED + "[[layer]]\nm = [8, 0]\nn = 8\nk = 8", "m is 0"),
        (NAMED + "[[layer]]\nm = [[8]]\nn = 8\nk = 8", r"m is \[8\]"),
        (NAMED + "[[layer]]\nm = 8\nn = -1\nk = 8", "n is -1"),
        (NAMED + "[[layer]]\nm = 8\nn = 8\nk = 8.0", "k is 8.0"),
        (NAMED + "[[layer]]\nm = true\nn = 8\nk = 8", "m is True"),
        (NAMED + '[[layer]]\nm = "8"\nn = 8\nk = 8', "m is '8'"),
        (NAMED + "[[layer]]\nm = 2147483648\nn = 8\nk = 8", "m is 2147483648"),
        (NAMED + f"[[layer]]\nm = 0x{'f' * 5000}\nn = 8\nk = 8", "thousands of digits"),
        (NAMED + LAYER + "batch = 0", "batch is 0"),
        (NAMED + LAYER + "bias = 1", "bias is 1; expected true or false"),
        (NAMED + LAYER + "distribution = 5", "distribution is 5; expected a name such as X1"),
        (NAMED + LAYER + 'distribution = "X99"', "layer 1: unknown distribution 'X99'"),
        (NAMED + LAYER + 'distribution = "X14(spread=1)x"', "unknown distribution"),
        (NAMED + LAYER + 'distribution = "X14(spread=0)"', "expected a number from 1"),
        (NAMED + LAYER + 'format = "e4m3fn"', "format is 'e4m3fn'; expected one of bfloat16, fl"),
        (NAMED + LAYER + "format = [1]", r"format is \[1\]"),
        (NAMED + LAYER + 'forms = "gemm"', "forms is 'gemm'; expected a list of gemm, prepared"),
        (NAMED + LAYER + "forms = []", r"forms is \[\]"),
        (NAMED + LAYER + 'forms = ["gem"]', "forms holds 'gem'"),
        (NAMED + LAYER + "forms = [[1]]", r"forms holds \[1\]"),
        (NAMED + LAYER + 'batch = 2\nforms = ["gemm", "prepared"]',
         "'prepared' takes no batch, and batch is 2; expected some of gemm, grad_input"),
        (NAMED + LAYER + 'format = "float32"\nforms = ["scaled_gemm"]', "writes bfloat16"),
        (NAMED + LAYER + 'format = "float16"\nforms = ["scaled_gemm"]', "leave it out of float16"),
        (NAMED + LAYER + 'activation = "relu"\nformat = "float32"\nforms = ["activate"]',
         "reads bfloat16"),
        (NAMED + LAYER + 'activation = "elu"\nforms = ["activate"]', "expected one of relu, hard"),
        (NAMED + LAYER + 'activation = 1\nforms = ["activate"]', "activation is 1; expected one"),
        (NAMED + LAYER + 'forms = ["activate"]', "'activate' goes with an activation"),
        (NAMED + LAYER + 'activation = "relu"', "'activate' goes with an activation"),
        (NAMED + LAYER + 'activation = "relu"\nbatch = 2\nforms = ["activate"]', "takes no batch"),
        (NAMED + LAYER + 'forms = ["chain"]', "'chain' goes with an epilogue"),
        (NAMED + LAYER + 'epilogue = "bias"', "'chain' goes with an epilogue"),
        (NAMED + LAYER + 'epilogue = 3\nforms = ["chain"]', "epilogue is 3; expected text"),
        (NAMED + LAYER + 'epilogue = "relu+bias"\nforms = ["chain"]',
         "epilogue 'relu.bias' is unknown; expected words of bias"),
        (NAMED + LAYER + 'epilogue = "block_rms(3)"\nforms = ["chain"]', "layer 1: epilogue is"),
        (NAMED + LAYER + 'epilogue = "bias"\nbatch = 2\nforms = ["chain"]', "takes no batch"),
        (NAMED + LAYER + 'epilogue = "bias"\nformat = "float32"\nforms = ["chain"]',
         "'chain' reads bfloat16"),
        (NAMED + f"[[layer]]\nm = {list(range(1, 14_400))}\nn = 8\nk = 8",
         "has 100793 problems; expected at most 100000"),
        (NAMED + "# " + "x" * 2**20, "is larger than 1048576 bytes"),
    ],
)  # fmt: skip
def test_invalid_entries_raise_with_a_reason(tmp_path: Path, text: str | bytes, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(SuiteError, match=says) as caught:
        suite_from_file(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["missing.toml", "", "\0.toml", "a" * 5000 + ".toml"])
def test_unreadable_files_raise(tmp_path: Path, name: str) -> None:
    with pytest.raises(SuiteError, match="cannot be read") as caught:
        suite_from_file(tmp_path / name)
    assert "TOML" not in str(caught.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(SuiteError, match="cannot be read: it is not a regular file"):
        suite_from_file(tmp_path / "pipe.toml")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    expected = suite_from_file(written(tmp_path, NAMED + LAYER)).cases(H200)
    assert suite_from_file(written(tmp_path, "\ufeff" + NAMED + LAYER)).cases(H200) == expected


KEYS = [*suite_files.FILE_KEYS, *suite_files.LAYER_KEYS, "[[layer]]"]
VALUES = st.recursive(
    st.one_of(
        st.integers(), st.booleans(), st.floats(), st.text(max_size=8),
        st.sampled_from(["X1", "X14(spread=1e7)", "bfloat16", "gemm", "grad_weight", "my-model"]),
    ),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        escaped = "".join(f"\\U{ord(c):08x}" for c in value if not 0xD800 <= ord(c) < 0xE000)
        return f'"{escaped}"'
    return repr(value)


fuzzing = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@fuzzing
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=12), st.integers(0, 9))
def test_random_entries_raise_only_suite_errors(
    tmp_path: Path, entries: list[tuple[str, Any]], seed: int
) -> None:
    lines = GOOD.splitlines()
    random.Random(seed).shuffle(lines) if seed < 3 else None
    lines += [key if key[0] == "[" else f"{key} = {toml(value)}" for key, value in entries]
    _raises_ours_only(written(tmp_path, "\n".join(lines)))


@fuzzing
@given(st.binary(max_size=200))
@example(b"name = 1979-05-27T07:32:00Z")
@example(b"name = inf")
def test_random_bytes_raise_only_suite_errors(tmp_path: Path, data: bytes) -> None:
    _raises_ours_only(written(tmp_path, data))


@fuzzing
@given(st.dictionaries(st.sampled_from(suite_files.LAYER_KEYS), VALUES, max_size=8))
def test_random_layers_raise_only_suite_errors(tmp_path: Path, layer: dict[str, Any]) -> None:
    usual = {"m": 8, "n": 8, "k": 8}
    lines = [f"{key} = {toml(value)}" for key, value in (usual | layer).items()]
    _raises_ours_only(written(tmp_path, NAMED + "[[layer]]\n" + "\n".join(lines)))


def _raises_ours_only(path: Path) -> None:
    try:
        suite = suite_from_file(path)
    except SuiteError:
        return
    assert suite.cases(H200)


# ---- suites that are drawn, and several as one


def sizes_of(name: str) -> list[tuple[int, ...]]:
    return [c.problem.shape for c in suite_named(name).cases(H200) if c.problem.op == "scaled_gemm"]


def test_a_seed_draws_the_same_sizes_each_time_and_another_seed_others() -> None:
    drawn = drawn_sizes(7, 300)
    assert drawn == drawn_sizes(7, 300) and len(set(drawn)) == 300
    assert drawn[:60] == drawn_sizes(7) and not set(drawn) & set(drawn_sizes(8, 300))
    assert set(sizes_of("drawn-7")) == set(drawn_sizes(7))
    assert len(set(sizes_of("drawn-7-300"))) == 300


def test_drawn_sizes_are_of_all_kinds() -> None:
    drawn = drawn_sizes(1, 2000)
    widths = [size for _, n, k in drawn for size in (n, k)]
    assert all(512 <= m <= 40_960 + 64 for m, _, _ in drawn)
    assert min(widths) >= 16 and max(widths) <= 8192
    known, rest = [w for w in widths if w in WIDTHS], [w for w in widths if w not in WIDTHS]
    assert 0.3 < len(known) / len(widths) < 0.4
    assert 0.45 < sum(w % 16 == 0 for w in rest) / len(rest) < 0.6
    assert 0.45 < sum(m % 128 == 0 for m, _, _ in drawn) / len(drawn) < 0.55
    assert 0.45 < sum(w < 362 for w in rest) / len(rest) < 0.55  # half way from 16 to 8192


def test_suites_with_commas_are_one(tmp_path: Path) -> None:
    found = suite_named("smoke, drawn-3-5")
    cases = found.cases(H200)
    assert found.name == "smoke, drawn-3-5"
    apart = [*suite_named("smoke").cases(H200), *suite_named("drawn-3-5").cases(H200)]
    assert cases == list(dict.fromkeys(apart))
    path = tmp_path / "a,b.toml"
    path.write_text('name = "mine"\n[[layer]]\nm = 16\nn = 16\nk = 16\n')
    assert suite_named(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("drawn-x", "expected drawn-SEED or drawn-SEED-COUNT"),
        ("drawn-1-0", "1 to 10000 sizes"),
        ("drawn-1-10001", "1 to 10000 sizes"),
        ("smoke,anchor", "did you mean 'anchors'"),
        ("smoke,", "unknown"),
        (",".join(["smoke"] * 60) + ",x", "unknown"),  # longer than a file's name may be
        ("drawn-07", "expected drawn-SEED"),
        ("drawn-\u0667", "expected drawn-SEED"),
        ("smoke,mx", "mx is not for every GPU"),
    ],
)
def test_suites_that_do_not_exist_are_refused(name: str, says: str) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(says)):
        suite_named(name)


def test_a_file_may_not_have_the_name_of_a_drawn_suite(tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_text('name = "drawn-1"\n[[layer]]\nm = 16\nn = 16\nk = 16\n')
    with pytest.raises(SuiteError, match="drawn-"):
        suite_from_file(path)
