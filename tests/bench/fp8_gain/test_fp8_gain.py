"""`explain` of many products: files, models and Probes, against the shipped measurements."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lokakern
from lokakern.bench.cli.main import app
from lokakern.bench.fp8_gain.products import products_from_file
from lokakern.errors import SuiteError
from lokakern.probe import files
from lokakern.selection import dispatcher
from lokakern.types import Format
from lokakern.workloads.suite_files import suite_from_file

H200 = ("--device", "NVIDIA H200")
Run = Callable[..., tuple[int, str, str]]
FACTORIES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512, bias=False)

    def forward(self, x, times=1):
        for _ in range(times):
            x = self.second(x)
        return self.first(x) @ x.t()[:, :8]

class Reader(Net):
    def forward(self, x):
        return super().forward(x, int(x.new_ones(1).item()))

class Fails(Net):
    def forward(self, x):
        raise KeyError("no such table")

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 256)

    def forward(self, x):
        return self.first(x).sum() + self.second(x).sum()

class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 512)
        self.dense, self.top, self.sparse = (nn.Linear(512, 512) for _ in range(3))

    def forward(self, x, places):
        return self.top(self.dense(x)) + self.sparse(self.table(places))

def fused():
    from lokakern import mods
    model = Pair()
    mods.apply(model, [mods.FuseShared()])
    return model, torch.zeros(8192, 512)
def fused_alone(): return fused()[0]
def net(): return Net(), {"x": torch.zeros(8192, 512), "times": 3}
def ranker(): return Ranker(), (torch.zeros(8192, 512), torch.zeros(8192, dtype=torch.long))
def tower():
    layers = nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
    return nn.Sequential(*layers).bfloat16(), torch.zeros(8192, 1024).bfloat16()
def unaligned():
    model = nn.Sequential(nn.Linear(1300, 1300), nn.ReLU(), nn.Linear(1300, 1)).bfloat16()
    return model, torch.zeros(8192, 1300).bfloat16()
def padded():
    from lokakern import mods
    model, x = unaligned()
    mods.apply(model, [mods.Pad(16)])
    return model, x
def reader(): return Reader(), torch.zeros(16, 512)
def valued():
    size = int(torch.ones(1).item())
    return nn.Linear(512, 512), torch.zeros(16, 512)
def alone(): return Net()
def fails(): return Fails(), (torch.zeros(2, 512),)
def sized(size): return Net()
def seven(): return 7
def none(): return nn.ReLU(), torch.zeros(2)
number = 3
"""


@pytest.fixture(scope="module", autouse=True)
def _snapshot() -> Iterator[None]:
    dispatcher.use_snapshot(None)
    yield
    dispatcher.use_snapshot(None)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def explain(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app(("explain", *map(str, words)), prog_name="python -m lokakern.bench")
        found = capsys.readouterr()
        return int(ended.value.code or 0), found.out, found.err

    return explain


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "somebodys.py").write_text(FACTORIES)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "somebodys"
    for name in ("somebodys", "broken"):
        sys.modules.pop(name, None)


def shapes_file(folder: Path, *lines: str) -> Path:
    path = folder / "shapes.csv"
    path.write_text("\n".join(["m,n,k,count,layer", *lines]) + "\n")
    return path


def test_layers_and_totals_are_printed(run: Run, tmp_path: Path) -> None:
    """Each layer is what `explain` says of it alone, and the sum holds what was measured only."""
    path = shapes_file(tmp_path, "32768,2048,2048,3,big", "8192,512,512,,small", "64,77,99,,odd")
    code, out, _ = run("--shapes", path, *H200, "--json")
    assert code == 0
    found = json.loads(out)
    big, small, odd = found["layers"]
    assert odd["why"].startswith("nothing was measured at n=77 k=99, compiled, on NVIDIA H200;")
    choice = lokakern.dispatch("gemm", (8192, 512, 512), 0.06, device="NVIDIA H200")
    assert (small["kernel"], small["us"]) == (choice.kernel, choice.latency_us)
    assert small["kernel"] == "torch.bf16"
    assert small["gain_us"] == 0
    assert "slower" in small["why"]
    assert big["speedup"] > 1.3
    assert big["gain_us"] == pytest.approx(3 * (big["bf16_us"] - big["us"]))
    assert odd["state"] == "never measured"
    assert (odd["us"], odd["kernel"], odd["gain_us"]) == (None, None, None)
    total = found["total"]
    assert (total["products"], total["measured"], total["quantized"]) == (3, 2, 1)
    assert total["bf16_us"] == pytest.approx(3 * big["bf16_us"] + small["bf16_us"])
    assert total["us"] == pytest.approx(3 * big["us"] + small["us"])
    flops = [2 * r["m"] * r["n"] * r["k"] * r["count"] for r in found["layers"]]
    assert total["measured_flops_share"] == pytest.approx(sum(flops[:2]) / sum(flops))


def test_a_table_reports_missing_measurements(run: Run, tmp_path: Path) -> None:
    path = shapes_file(tmp_path, "8192,512,512,,small", "64,77,99,,odd")
    code, out, err = run("--shapes", path, *H200)
    assert code == 0
    assert "1 of 2 products were measured" in out
    assert "Never measured, and in no sum: 1." in out
    assert "\x1b" not in out + err  # neither is a terminal here
    assert err == "--missing FILE writes unmeasured products into a file for sweep --suite\n"


def test_csv_has_all_columns(run: Run, tmp_path: Path) -> None:
    _, out, err = run("--shapes", shapes_file(tmp_path, "8192,512,512,,a"), *H200,
                      "--format", "csv")  # fmt: skip
    (row,) = csv.DictReader(io.StringIO(out))
    assert row["layer"] == "a"
    assert float(row["bf16_us"]) > 0
    assert "1 of 1 products were measured, 100.0% of the FLOPs" in err


def test_csv_of_spreadsheets_is_read(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "sheet.csv"
    path.write_bytes(b"\xef\xbb\xbfm,n,k\r8192,512,512\r")
    code, out, _ = run("--shapes", path, *H200, "--json")
    assert code == 0 and json.loads(out)["layers"][0]["m"] == 8192
    for text in ("m,n,k\n" + "9" * 5000 + ",1,1", "m,n,k\n" + "x" * 200_000 + ",1,1"):
        path.write_text(text)
        code, _, err = run("--shapes", path, *H200)
        assert code and str(path) in err


def test_a_strict_budget_chooses_bf16(run: Run, tmp_path: Path) -> None:
    path = shapes_file(tmp_path, "32768,2048,2048,1,big")
    _, out, _ = run("--shapes", path, *H200, "--budget", "0.01", "--json")
    (row,) = json.loads(out)["layers"]
    assert (row["kernel"], row["speedup"]) == ("torch.bf16", 1.0)
    assert "row_err" in row["why"]


def test_the_reason_for_bf16_is_that_of_a_form_in_which_it_holds(run: Run, tmp_path: Path) -> None:
    """Kernels that launch both quantizers at once take no prepared weight."""
    h100 = ("--device", "NVIDIA H100 80GB HBM3")
    path = shapes_file(tmp_path, "8192,512,1024,1,long", "512,256,256,1,short")
    _, out, _ = run("--shapes", path, *h100, "--json")
    long, short = json.loads(out)["layers"]
    assert (
        long["why"] == "cuda.quantize_row+cuda.scaled_gemm_row: slower: 20.42 us (prepared weight)"
    )
    assert short["why"].endswith("scaled_gemm_row: slower: 3.69 us (weight quantized each time)")
    for row, words in ((long, ("--prepared", "row")), (short, ())):
        _, alone, _ = run(row["m"], row["n"], row["k"], *words, *h100, "--json")
        kernel, _, reason = row["why"].rpartition(" (")[0].partition(": ")
        assert json.loads(alone)["rejected"][kernel] == reason
    for row in (long, short):  # times of bf16 are those of a weight that is not prepared
        _, alone, _ = run(row["m"], row["n"], row["k"], *h100, "--json")
        assert json.loads(alone)["latency_us"] == row["bf16_us"]


def test_an_error_beyond_the_budget_is_a_reason_only_of_a_faster_kernel(
    run: Run, tmp_path: Path
) -> None:
    path = shapes_file(tmp_path, "8192,512,512,1,slow", "32768,2048,2048,1,fast")
    _, out, _ = run("--shapes", path, *H200, "--budget", "0.03", "--json")
    slow, fast = json.loads(out)["layers"]
    assert slow["kernel"] == fast["kernel"] == "torch.bf16"
    assert "> 0.03" in fast["why"]


def test_interpolated_m_is_marked(run: Run, tmp_path: Path) -> None:
    path = shapes_file(tmp_path, "16384,2048,2048,1,between")
    _, out, _ = run("--shapes", path, *H200, "--json")
    found = json.loads(out)
    assert found["layers"][0]["state"] == "interpolated"
    assert found["total"]["interpolated"] == 1


def test_training_includes_gradients(run: Run, tmp_path: Path) -> None:
    path = shapes_file(tmp_path, "8192,2048,2048,1,layer")
    _, out, _ = run("--shapes", path, *H200, "--training", "--json")
    rows = {row["gemm"]: row for row in json.loads(out)["layers"]}
    assert list(rows) == ["output", "grad_input", "grad_weight"]
    choice = lokakern.dispatch("gemm", (8192, 2048, 2048), 0.06, device="NVIDIA H200")
    assert rows["output"]["kernel"] == choice.kernel  # of a weight that is quantized anew
    assert rows["output"]["us"] == choice.latency_us


def test_missing_measurements_become_a_suite(run: Run, tmp_path: Path) -> None:
    lines = ("8192,512,512,,a", "64,77,99,2,b", "64,77,99,3,c")
    path, suite = shapes_file(tmp_path, *lines), tmp_path / "more.toml"
    code, _, err = run("--shapes", path, *H200, "--missing", suite)
    assert (code, "sweep --suite" in err) == (0, True)
    cases = suite_from_file(suite).build(Format.E4M3FN)
    # Also with rows that are padded by a compiler, and by Pad(16).
    assert {case.problem.shape for case in cases} == {(64, 77, 99), (64, 80, 104), (64, 80, 112)}
    again = json.loads(run("--shapes", suite, *H200, "--json")[1])["layers"]
    assert [(row["layer"], row["count"]) for row in again] == [("b, c", 5)] * 3
    code, _, err = run("--shapes", path, *H200, "--missing", tmp_path / "no" / "more.toml")
    assert code == 1
    assert "cannot be written: No such file or directory" in err


@pytest.mark.parametrize("training", [(), ("--training",)])
def test_what_pad_gains_is_told_with_the_sum_of_padded_sizes(
    run: Run, factories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: tuple[str]
) -> None:
    monkeypatch.setenv("LOKAKERN_PREDICT", "1")
    dispatcher.use_snapshot(None)
    more = (*H200, *training)
    suite = tmp_path / "more.toml"
    found = json.loads(run("--model", f"{factories}:unaligned", *more, "--missing", suite,
                           "--json")[1])  # fmt: skip
    (line,) = [note for note in found["notes"] if "mods.Pad" in note]
    padded = json.loads(run("--model", f"{factories}:padded", *more, "--json")[1])
    us = [x["total"]["predicted"]["us"] for x in (found, padded)]
    assert line.startswith("lokakern.mods.Pad(16), before convert, aligns the rows of 0 (n=1312 "
                           f"k=1312): predicted {us[1]:.1f} us by the choices then, instead of "
                           f"{us[0]:.1f}, ")  # fmt: skip
    assert us[1] < 0.97 * us[0] and "mods.Pad" not in " ".join(padded["notes"])
    problems = [case.problem for case in suite_from_file(suite).build(Format.E4M3FN)]
    sizes = {(p.n, p.k) for p in problems if p.op == "gemm"}
    # Pad leaves the layer with one output alone.
    assert (1312, 1312) in sizes and not sizes & {(8, 1312), (16, 1312)}
    out = run("--model", f"{factories}:unaligned", *more)[1]
    assert "..." not in out and line in out


def test_suites_and_json_are_read(tmp_path: Path) -> None:
    suite = tmp_path / "suite.toml"
    suite.write_text(
        'name = "mine"\n[[layer]]\nm = [16, 32]\nn = 8\nk = 64\nbias = true\ncount = 3\n'
        '[[layer]]\nname = "dots"\nm = 27\nn = 27\nk = 128\nbatch = 4\nforms = ["gemm"]\n'
    )
    first, second, dots = products_from_file(suite)
    assert [(p.layer, p.m, p.count, p.bias) for p in (first, second)] == [
        ("layer 1", 16, 3, True), ("layer 1", 32, 3, True)
    ]  # fmt: skip
    assert (dots.layer, dots.batch, dots.flops) == ("dots", 4, 2 * 27 * 27 * 128 * 4)
    listed = tmp_path / "shapes.json"
    listed.write_text('[[16, 8, 64], {"m": 16, "n": 8, "k": 64, "count": 2, "layer": "x"}]')
    one, two = products_from_file(listed)
    assert (one.layer, one.count, two.layer, two.count) == ("row 1", 1, "x", 2)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "", "expected a header such as m,n,k"),
        ("a.csv", "8,8,8\n", "its first line is '8,8,8'; expected a header"),
        ("a.csv", "m,n,k\n", "holds 0 products"),
        ("a.csv", "m,n,k\n8,8\n", "row 1: k is missing; expected an integer"),
        ("a.csv", "m,n,k\n8,8,x\n", "row 1: k is 'x'; expected an integer"),
        ("a.csv", "m,n,k\n8,8,8,8\n", "row 1: has 4 values for 3 columns"),
        ("a.csv", "m,n,k,o\n8,8,8,8\n", "row 1: has no entry 'o'; expected one of m, n, k"),
        ("a.json", "{", "is not JSON"),
        ("a.json", "{}", "expected a list"),
        ("a.json", "[[1, 2]]", "row 1: expected m, n and k"),
        ("a.json", '[{"m": 0, "n": 1, "k": 1}]', "row 1: m is 0; expected an integer from 1"),
        ("a.txt", "", r"ends in \.toml, \.csv, \.json"),
    ],
)
def test_malformed_files_of_shapes_raise(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SuiteError, match=words):
        products_from_file(tmp_path / name)


def test_a_model_on_the_meta_device(run: Run, factories: str) -> None:
    code, out, err = run("--model", f"{factories}:net", *H200, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [(r["layer"], r["m"], r["count"]) for r in found["layers"]] == [
        ("second", 8192, 3), ("first", 8192, 1)
    ]  # fmt: skip
    assert all(r["state"] == "measured" for r in found["layers"])
    share = 4 * 512 / (4 * 512 + 8)  # of 4 layers, and a product with 8 columns
    assert f"Linear layers, in bfloat16, take {share:.1%}" in found["notes"][0]


def test_chains_of_convert_are_told_beside_the_products(run: Run, factories: str) -> None:
    """Of a sequence one kernel computes product and relu, which no row of a product counts."""
    (line,) = json.loads(run("--model", f"{factories}:tower", *H200, "--json")[1])["notes"][2:]
    assert line.startswith(
        "convert(inference=True) runs 0 as a chain at m=8192, which is in no sum"
    )
    model = sys.modules[factories].tower()[0]
    handle = lokakern.convert(model, 0.06, inference=True, device="NVIDIA H200")
    assert [row["why"] for row in handle.choices if row["gemm"] == "chain"] == [
        line.rpartition(": ")[2].removesuffix(".")
    ]
    code, out, _ = run("--model", f"{factories}:tower", *H200, "--training", "--json")
    assert code == 0 and "chain" not in out


def test_chains_of_a_model_that_needs_values_are_left_out(run: Run, factories: str) -> None:
    found = json.loads(run("--model", f"{factories}:valued", *H200, "--json")[1])
    assert found["notes"][2].endswith("are not among these products.")


def test_an_input_that_no_parameter_is_before_needs_no_gradient(run: Run, factories: str) -> None:
    code, out, _ = run("--model", f"{factories}:ranker", *H200, "--training", "--json")
    found = json.loads(out)
    rows = [(row["layer"], row["gemm"]) for row in found["layers"]]
    assert code == 0 and len(rows) == 8 and ("dense", "grad_weight") in rows
    assert ("dense", "grad_input") not in rows and ("sparse", "grad_input") in rows
    assert "The input of dense needs no gradient." in found["notes"][0]


def test_measured_and_predicted_times_have_one_sum(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOKAKERN_PREDICT", "1")
    dispatcher.use_snapshot(None)
    path = shapes_file(tmp_path, "8192,512,512,2,known", "8192,520,1544,1,odd")
    rows = json.loads(run("--shapes", path, *H200, "--json")[1])["layers"]
    known, guess = rows[0], rows[1]["predicted"]
    bf16, us = (2 * known[x] + guess[x] for x in ("bf16_us", "us"))
    assert (
        f"Together: {bf16:.1f} us in bf16, {us:.1f} us by these choices"
        in run("--shapes", path, *H200)[1]
    )


def test_what_convert_chooses_otherwise_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It chooses for compiled code, and by measurements alone where rows are unaligned."""
    monkeypatch.setenv("LOKAKERN_PREDICT", "1")
    dispatcher.use_snapshot(None)
    path = shapes_file(tmp_path, "8192,777,512,,n", "16384,2064,2001,,k", "16384,2064,2000,,even")
    found = json.loads(run("--shapes", path, *H200, "--json", "--regime", "graph-cold")[1])
    rows, words = found["layers"], found["notes"][-2]
    assert all("scaled" in row["kernel"] and row["state"] == "predicted" for row in rows)
    assert words.startswith("Times are of the regime graph-cold; that of convert is by default")
    assert "compiled: --regime compiled. Predicted in FP8" in words
    assert "with an n or k that is no multiple of 8: 2, which convert takes only where" in words
    path = shapes_file(tmp_path, "8192,512,512,,", "16384,2064,2000,,")
    table = run("--shapes", path, *H200)[1]
    assert table.startswith("predictions within row_err 0.06 on NVIDIA H200, compiled ")
    assert "Times are of the regime compiled, the default of convert.\n" in table
    assert json.loads(run("--shapes", path, *H200, "--json")[1])["regime"] == "compiled"
    table = run("--shapes", path, *H200, "--regime", "eager")[1]  # no host costs here
    assert "None of 2 products was ever measured on NVIDIA H200 for the regime eager.\n" in table


def test_fused_layers_are_one_product(run: Run, factories: str) -> None:
    for words in ((f"{factories}:fused",), (f"{factories}:fused_alone", "--rows", 8192)):
        code, out, err = run("--model", *words, *H200, "--json")
        assert code == 0 and "somebodys" not in err
        rows = json.loads(out)["layers"]
        assert [(r["layer"], r["m"], r["n"], r["k"]) for r in rows] == [
            ("fusedlinear_0", 8192, 768, 512)
        ]


def test_a_model_that_needs_values_runs_on_the_cpu(run: Run, factories: str) -> None:
    code, out, err = run("--model", f"{factories}:reader", *H200, "--json")
    assert code == 0
    assert {row["m"] for row in json.loads(out)["layers"]} == {16}
    assert "reader runs on the CPU, with all its memory: on the meta device calling Reader" in err
    assert "somebodys.py:" in err


def test_a_model_without_an_example_needs_rows(run: Run, factories: str) -> None:
    code, out, _ = run("--model", f"{factories}:alone", "--rows", 8192, *H200, "--json")
    assert code == 0
    assert [row["m"] for row in json.loads(out)["layers"]] == [8192, 8192]
    assert run("--model", f"{factories}:alone", *H200)[0] == 1
    code, _, err = run("--model", f"{factories}:net", "--rows", 8, *H200)
    assert (code, "returns an example, which says how many rows" in err) == (1, True)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("somebodys", "expected package.module:factory"),
        ("nobodys:net", "'nobodys' was not found; run this in the folder that holds it"),
        ("broken:net", "'broken' needs 'no_such_package', which was not found"),
        ("somebodys:nett", "has no 'nett'; it has fused, fused_alone, net"),
        ("somebodys:number", "is of type int, which cannot be called"),
        ("somebodys:sized", "cannot be called: missing a required argument: 'size'"),
        ("somebodys:seven", "returned int; expected a function"),
        ("somebodys:alone", "say with --rows"),
        ("somebodys:fails", "calling Fails raised KeyError: 'no such table'"),
        ("somebodys:none", "no nn.Linear of somebodys:none was called"),
    ],
)
def test_unusable_factories_raise(run: Run, factories: str, spec: str, words: str) -> None:
    code, out, err = run("--model", spec, *H200)
    assert (code, out) == (2 if err.startswith("UnknownNameError") else 1, "")
    assert words in err
    assert "Traceback" not in err


def test_a_probe_is_judged_on_similar_distributions(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512))
    with lokakern.Probe(model, every=1) as probe:
        for _ in range(2):
            model(torch.randn(2048, 512)).square().mean().backward()
    probe.save(tmp_path / "probe")
    code, out, _ = run("--probe", tmp_path / "probe", *H200, "--json")
    assert code == 0
    (row,) = json.loads(out)["layers"]
    assert (row["layer"], row["m"], row["n"], row["k"], row["count"]) == ("0", 2048, 512, 512, 2)
    assert row["state"] == "measured"
    assert "no benchmarked distribution" not in row["why"]
    for dtype, is_told in ((torch.bfloat16, False), (torch.float16, True)):
        files.save(tmp_path / "probe", {"0": probe.sites()["0"].in_dtype(dtype)})
        _, out, _ = run("--probe", tmp_path / "probe", *H200)
        words = "In float16 were 0: here they are judged as in bfloat16."
        assert (words in " ".join(out.split())) is is_told


def test_what_is_like_no_benchmarked_distribution_says_so(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512))
    with lokakern.Probe(model, every=1) as probe:
        x = torch.randn(2048, 512)
        model(x * (torch.rand_like(x) > 0.9)).square().mean().backward()
    probe.save(tmp_path / "probe")
    code, out, _ = run("--probe", tmp_path / "probe", *H200, "--json")
    (row,) = json.loads(out)["layers"]
    assert code == 0 and row["kernel"].startswith("torch.bf16")
    words = "no FP8, as its operands are like no benchmarked distribution (zeros 0.9"
    assert row["why"].startswith(words) and "`report --probe` judges them" in row["why"]


@pytest.mark.parametrize(
    "words",
    [
        ("--shapes", "a.csv", "--model", "a:b"),
        ("--shapes", "a.csv", "--shape", "8,8,8"),
        ("quantize", "--shapes", "a.csv"),
        ("--shapes", "a.csv", "--rows", "8"),
        ("--training",),
        ("--missing", "a.toml"),
        ("--format", "csv"),
    ],
    ids=" ".join,
)
def test_incompatible_options_raise(run: Run, words: tuple[str, ...]) -> None:
    assert run(*words)[0] == 2


def test_a_device_without_measurements_lists_others(run: Run, tmp_path: Path) -> None:
    _, out, err = run("--shapes", shapes_file(tmp_path, "8,8,8,,a"))
    if not torch.cuda.is_available():
        assert "None of 1 products was ever measured on" in out
        assert "choose --device from 'NVIDIA H100 80GB HBM3', 'NVIDIA H200'" in err


@pytest.fixture
def predicting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOKAKERN_PREDICT", "1")
    dispatcher.use_snapshot(None)
    yield
    monkeypatch.undo()
    dispatcher.use_snapshot(None)


@pytest.mark.usefixtures("predicting")
def test_transferred_predictions_are_shown_and_never_summed(run: Run, tmp_path: Path) -> None:
    h100 = ("--device", "NVIDIA H100 80GB HBM3")
    path = shapes_file(tmp_path, "12288,777,512,1,odd")
    _, out, _ = run("--shapes", path, *h100, "--json")
    found = json.loads(out)
    (row,) = found["layers"]
    assert (row["state"], row["predicted"], found["total"]["predicted"]) == (
        "never measured",
        None,
        None,
    )
    assert row["transferred"]["transferred_from"] == "NVIDIA H200"
    assert row["why"].startswith("transferred from NVIDIA H200, never chosen by: ")
    _, alone, _ = run(12288, 777, 512, *h100, "--json")
    assert json.loads(alone)["predicted"]["latency_us"] >= row["transferred"]["latency_us"]


@pytest.mark.usefixtures("predicting")
def test_products_without_measurements_are_predicted_and_summed_apart(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text("m,n,k,count\n32768,2048,2048,3\n16384,2064,2000,2\n8192,20,1000,1\n7,7,7,1\n")
    _, text, _ = run("--shapes", str(path), *H200, "--json")
    found = json.loads(text)
    states = [row["state"] for row in found["layers"]]
    assert states == ["measured", "predicted", "predicted", "never measured"]
    measured, fast, plain, never = found["layers"]
    assert measured["predicted"] is never["predicted"] is None
    assert fast["us"] is fast["speedup"] is fast["gain_us"] is None  # no facts
    guess = fast["predicted"]
    assert guess["least_us"] < guess["us"] < guess["most_us"] < guess["bf16_us"]
    assert plain["predicted"]["us"] == plain["predicted"]["bf16_us"]
    total, apart = found["total"], found["total"]["predicted"]
    assert total["measured"] == 1
    assert total["us"] == pytest.approx(3 * measured["us"])
    assert apart["products"] == 2
    assert apart["us"] == pytest.approx(2 * guess["us"] + plain["predicted"]["us"])
    assert 1 < apart["speedup_low"] < apart["speedup"] < apart["speedup_high"]
    _, table, _ = run("--shapes", str(path), *H200)
    assert "Predicted, not measured: 2. " in table
    assert "Never measured, and in no sum: 1." in table
    missing = tmp_path / "missing.toml"
    run("--shapes", str(path), *H200, "--missing", str(missing))
    assert "2064" in missing.read_text()  # a prediction is to be measured


@pytest.mark.usefixtures("predicting")
def test_a_single_prediction_is_in_the_json(run: Run) -> None:
    _, text, _ = run("gemm", "--shape", "16384,2064,2000", *H200, "--json")
    found = json.loads(text)
    assert found["miss"] is True and found["latency_us"] is None
    assert found["predicted"]["quantizing"] == found["kernel"]
    assert found["predicted"]["low"] > 1
