"""Tables of others order a sweep, and nothing else; malformed ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lokakern.bench.exchange.tuned_tables import Tuned, rank_of, read_tuned
from lokakern.errors import SuiteError
from lokakern.types import Device, Format, Granularity
from lokakern.workloads.gemm_cases import quantize_case, unquantized_case
from tests.support.measurements import H200

HEAD = "gfx,cu_num,M,N,K,q_dtype_w,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n"
ROW = (
    "gfx942,304,{m},1280,8192,torch.float8_e4m3fnuz,34,0,20.5,a8w8_rowwise_256x16,1.02,510.5,0.0\n"
)
VLLM = "N=2048,K=512,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
MI300X = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)
LAUNCH = {"BLOCK_SIZE_M": 64, "num_warps": 4}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def written(name: str, text: str) -> Path:
        place = tmp_path / name
        place.write_text(text, encoding="utf-8")
        return place

    return written


def test_aiters_rows_name_sizes_and_gpus(write: Callable[[str, str], Path]) -> None:
    found = read_tuned(write("a8w8_tuned_gemm.csv", HEAD + ROW.format(m=1) + ROW.format(m=64)))
    assert found == [Tuned(1, 1280, 8192, "gfx942", 304), Tuned(64, 1280, 8192, "gfx942", 304)]
    before = "cu_num,M,N,K,kernelId,splitK,us,kernelName\n80,32,1280,8192,5,0,20.0,a8w8\n"
    (older,) = read_tuned(write("older.csv", before))
    assert older == Tuned(32, 1280, 8192, "", 80)
    assert read_tuned(write("excel.csv", "\ufeff" + before)) == [older]


def test_vllms_files_have_sizes_in_their_names(write: Callable[[str, str], Path]) -> None:
    table = {"1": LAUNCH, "4096": LAUNCH, "triton_version": "3.4.0"}
    assert read_tuned(write(VLLM, json.dumps(table))) == [
        Tuned(1, 2048, 512, "NVIDIA_H200"), Tuned(4096, 2048, 512, "NVIDIA_H200"),
    ]  # fmt: skip


def test_gpus_are_types() -> None:
    assert Tuned(1, 1, 1, "gfx942", 304).is_on(MI300X)
    assert Tuned(1, 1, 1, "AMD_Instinct_MI300X").is_on(MI300X)
    assert Tuned(1, 1, 1, "", 304).is_on(MI300X)
    assert not Tuned(1, 1, 1, "gfx942", 80).is_on(MI300X), "MI308X, or a partition"
    assert not Tuned(1, 1, 1, "gfx950", 304).is_on(MI300X)
    assert not Tuned(1, 1, 1, "", 0).is_on(MI300X)
    assert not Tuned(1, 1, 1, "", H200.compute_units).is_on(H200), "AITER is for AMD"
    assert Tuned(1, 1, 1, "NVIDIA_H200").is_on(H200)


def test_cases_of_tuned_sizes_come_first() -> None:
    tuned = [Tuned(4096, 512, 1024, "NVIDIA_H200"), Tuned(64, 2048, 512, "gfx942", 304)]
    cases = [
        quantize_case(4096, 1024, Granularity.ROW, "X1", Format.E4M3FN),
        unquantized_case(4096, 1024, 512, "X1"),
        unquantized_case(64, 2048, 512, "X1"),
        unquantized_case(16384, 512, 1024, "X1"),
        unquantized_case(8192, 512, 1024, "X1"),
    ]
    assert rank_of(cases, tuned, H200) == [3, 3, 2, 1, 0]
    assert rank_of(cases, tuned, MI300X) == [3, 3, 0, 2, 2]
    assert rank_of(cases, [], H200) == [3] * 5


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.py", "import os", "ends in .csv or .json"),
        ("x.csv", "", "expected AITER's columns"),
        ("x.csv", "m,n,k\n1,2,3\n", "expected AITER's columns"),
        ("x.csv", HEAD, "holds 0 products"),
        ("x.csv", HEAD + "gfx942,304,1\n", "row 1: has 3 values for 13 columns"),
        ("x.csv", HEAD + ROW.format(m=-1), "row 1: M is '-1'; expected an integer"),
        ("x.csv", HEAD + ROW.format(m="9" * 5000), "row 1: M is"),
        ("x.csv", HEAD + ROW.format(m="1e3"), "row 1: M is '1e3'"),
        ("x.csv", HEAD + ROW.format(m=0), "row 1: M is 0"),
        ("x.csv", HEAD + ROW.format(m=1).replace("gfx942", "\x1b[31m"), "the GPU is"),
        ("x.csv", HEAD + ROW.format(m=1) * 20_000, "is larger than"),
        ("x.csv", "cu_num,M,N,K\n" + "1,1,1,1\n" * 100_001, "holds 100001 products"),
        ("x.json", "{}", "expected a name such as N=2048"),
        ("N=8,K=x.json", "{}", "K is 'x'"),
        (VLLM, "{", "is not JSON"),
        (VLLM, "[" * 100_000, "is not JSON"),
        (VLLM, "[]", "expected launch parameters by m"),
        (VLLM, '{"1": 5}', "expected launch parameters by m"),
        (VLLM, '{"one": {}}', "m is 'one'"),
        (VLLM, "{}", "holds 0 products"),
    ],
)
def test_what_is_no_such_table_is_refused(
    write: Callable[[str, str], Path], name: str, text: str, words: str
) -> None:
    with pytest.raises(SuiteError) as refused:
        read_tuned(write(name, text))
    assert words in str(refused.value)
    assert "\x1b" not in str(refused.value)
    assert len(str(refused.value)) < 600


@given(st.binary(max_size=200), st.sampled_from(["x.csv", VLLM]))
def test_any_bytes_are_a_table_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str
) -> None:
    place = tmp_path_factory.mktemp("any") / name
    place.write_bytes(HEAD.encode() + data if name == "x.csv" else data)
    try:
        found = read_tuned(place)
    except SuiteError:
        return
    assert all(min(p.m, p.n, p.k) >= 1 for p in found)
