"""Suites: problems that can be measured, each once, with a distribution that exists."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from lokakern import nvrtc
from lokakern.chain import candidates as chain_candidates
from lokakern.chain.candidates import Chain, Layer
from lokakern.errors import ShapeError, UnknownNameError
from lokakern.functional.checks import operand_of
from lokakern.problems import baseline_name, make_problem
from lokakern.registry.register import KERNELS, fp8_format, load_kernels
from lokakern.sweep.engine import candidates
from lokakern.types import (
    REALISTIC_DISTRIBUTIONS,
    Device,
    Format,
    Granularity,
    Layout,
    Operand,
    Problem,
    Rejected,
    alignment_of,
    norm_form,
)
from lokakern.workloads import published_models
from lokakern.workloads.distributions import DISTRIBUTIONS
from lokakern.workloads.gemm_cases import dense_operand
from lokakern.workloads.gemm_gradient_cases import WIDE_RANGE, grad_input_cases, grad_weight_case
from lokakern.workloads.norm_cases import (
    MOST_CHAIN_CASES,
    chain_layer_cases,
    chained_cases,
    gemm_norm_cases,
)
from lokakern.workloads.suite_files import suite_named
from lokakern.workloads.suites import (
    ANCHOR_M,
    ANCHOR_N_K,
    QUANTIZER_SHAPES,
    SUITES,
    Case,
    gemm_cases,
    shape_cases,
)

load_kernels()
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
MI300X = Device("amd", "AMD Instinct MI300X", "gfx942", 304, 192)
CPU = Device("cpu", "some CPU", "x86_64", 2, 16)
MI350X = Device("amd", "AMD Instinct MI350X", "gfx950", 256, 288)
ELSEWHERE = ("mx",)  # of some GPUs only
EVERY = [
    (name, device) for name in SUITES for device in (H200, MI300X, CPU) if name not in ELSEWHERE
]
EVERY += [("mx", MI350X)]
every_suite = pytest.mark.parametrize(
    ("name", "device"), EVERY, ids=[f"{name} on {device}" for name, device in EVERY]
)


def remade(problem: Problem) -> Problem:
    """The same problem through the checks that a caller's problem goes through."""
    names = ("a", "b", "prepared", "epilogue", "out_format", "out_granularity", "out_strided",
             "batch", "accumulate")  # fmt: skip
    fields = {name: getattr(problem, name) for name in names}
    return make_problem(problem.op, problem.shape, **fields)


def lying(operand: Operand, shape: tuple[int, int], prefer: Layout) -> Operand:
    """The operand with the layout and alignment that a tensor of that shape has."""
    if operand.format.is_fp8:  # whose rows are padded
        return replace(operand, alignment=16)
    if operand.layout is prefer:  # a vector is given the alignment of its one long row
        size = shape[1] if prefer is Layout.ROW else shape[0]
        return replace(operand, alignment=alignment_of(size * operand.format.dtype.itemsize))
    made = dense_operand(operand.format, shape, operand.layout, prefer)
    return replace(made, granularity=operand.granularity)


@every_suite
def test_cases_are_problems_with_a_distribution(name: str, device: Device) -> None:
    cases = SUITES[name].cases(device)
    assert cases
    for case in cases:
        problem = case.problem
        assert case.distribution in DISTRIBUTIONS
        assert case.distribution in REALISTIC_DISTRIBUTIONS
        assert remade(problem) == problem
        assert min(problem.shape) >= 1
        assert problem.a == lying(problem.a, (problem.m, problem.k), Layout.ROW)
        if problem.b is not None:
            assert problem.b == lying(problem.b, (problem.k, problem.n), Layout.COLUMN)
        formats = [problem.a.format, problem.out_format, *([problem.b.format] if problem.b else [])]
        fp8 = fp8_format(device)
        assert {form for form in formats if form.is_fp8} <= {fp8, WIDE_RANGE[fp8]}
        assert problem.b is None or problem.b.format is not WIDE_RANGE[fp8]


def test_a_suite_for_some_gpus_is_empty_on_others() -> None:
    assert not any(SUITES["mx"].cases(device) for device in (H200, MI300X, CPU))


@every_suite
def test_cases_are_unique(name: str, device: Device) -> None:
    cases = SUITES[name].cases(device)
    assert len(set(cases)) == len(cases)
    assert cases == SUITES[name].cases(device)


def is_fused(problem: Problem) -> bool:
    """Whether it asks for more than a product, of which kernels are being written."""
    if problem.op != "scaled_gemm" or problem.b is None:
        return False
    fused = problem.batch > 1 or problem.epilogue != "none" or problem.accumulate
    return fused or problem.b.granularity is Granularity.GROUP or problem.out_format.is_fp8


@every_suite
def test_every_case_has_a_kernel(name: str, device: Device) -> None:
    for case in SUITES[name].cases(device):
        assert is_fused(case.problem) or candidates(case.problem, device), case


@pytest.mark.parametrize("name", SUITES)
def test_fp8_competes_with_the_unquantized_kernel_on_an_h200(name: str) -> None:
    for case in SUITES[name].cases(H200):
        problem = case.problem
        if problem.op != "gemm":
            continue
        kernels = {kernel.name: kernel for kernel in candidates(case.problem, H200)}
        assert baseline_name(case.problem) in kernels
        transposed = not problem.prepared and problem.b and problem.b.layout is Layout.ROW
        if problem.batch == 1 and not transposed:
            assert any(kernel.quantizes for kernel in kernels.values()), case


def gemm_shapes(name: str) -> set[tuple[int, ...]]:
    return {c.problem.shape for c in SUITES[name].cases(H200) if c.problem.op == "gemm"}


def test_anchors_have_27_shapes() -> None:
    found = gemm_shapes("anchors")
    assert len(found) == 27
    assert found == {(m, n, k) for m in ANCHOR_M for n, k in ANCHOR_N_K}
    assert {m for m, _, _ in found} == {2048, 8192, 32768}
    problems = [case.problem for case in SUITES["anchors"].cases(H200)]
    of_bf16 = Counter(p.op for p in problems if p.a.format is not Format.FLOAT32)
    assert of_bf16["gemm"] == 27 * 4 * 2  # with and without a bias
    assert of_bf16["scaled_gemm"] == 27 * 3
    assert any(p.op == "gemm" and p.a.format is Format.FLOAT32 for p in problems)


@pytest.mark.parametrize("op", ["quantize", "dequantize"])
def test_anchors_have_every_granularity(op: str) -> None:
    problems = [c.problem for c in SUITES["anchors"].cases(H200) if c.problem.op == op]
    found = {p.out_granularity if op == "quantize" else p.a.granularity for p in problems}
    assert found == set(Granularity) - {Granularity.NONE, Granularity.MX}


@pytest.mark.parametrize("name", ["anchors", "norms"])
def test_each_anchor_is_followed_by_a_norm(name: str) -> None:
    """The layers are in FP8, with the output format after the norm, and entirely in bfloat16."""
    whole = [p for p in problems_of(name, "gemm_norm") if p.a.granularity is not Granularity.GROUP]
    if name == "norms":  # which has one shape in every form of a chain, too
        chained = {case.problem for m in ANCHOR_M
                   for case in chained_cases(m, 512, 512, "X1", Format.E4M3FN)}  # fmt: skip
        assert chained <= set(problems_of(name, "gemm_norm"))
        twice = {case.problem for m in ANCHOR_M
                 for case in gemm_norm_cases(m, 512, 512, "X1", Format.E4M3FN)}  # fmt: skip
        whole = [p for p in whole if p in twice or p not in chained]
    assert len(whole) == 27 * 6
    for m, (n, k) in itertools.product(ANCHOR_M, ANCHOR_N_K):
        found = [p for p in whole if p.shape == (m, n, k)]
        block = f"bias+block_rms({min(256, n)})+hardswish"
        fp8 = {granularity: Format.E4M3FN for granularity in (Granularity.ROW, Granularity.TENSOR)}
        operands = {Granularity.NONE: Format.BFLOAT16, **fp8}
        forms = {(p.epilogue, p.a.granularity, p.out_format, p.out_granularity) for p in found}
        assert forms == {
            *(
                ("bias+layer+affine", scales, Format.BFLOAT16, Granularity.NONE)
                for scales in operands
            ),
            *((block, scales, Format.E4M3FN, Granularity.TENSOR) for scales in fp8),
            (block, Granularity.NONE, Format.BFLOAT16, Granularity.NONE),
        }
        assert all(p.a.format is operands[p.a.granularity] for p in found)
        for problem in found:
            assert problem.b is not None and not problem.prepared
            assert (problem.b.format, problem.b.granularity) == (
                problem.a.format, problem.a.granularity
            )  # fmt: skip


def test_suite_norms_has_chained_grouped_and_row_cases() -> None:
    group = [p for p in problems_of("norms", "gemm_norm") if p.a.granularity is Granularity.GROUP]
    assert 0 < len(group) < 27
    for problem in group:
        assert problem.b is not None and problem.b.granularity is Granularity.BLOCK
        is_last = problem.out_format is Format.BFLOAT16 and (problem.n, problem.k) == (512, 512)
        assert is_last or problem.out_granularity is Granularity.GROUP
    rows = problems_of("norms", "norm_quantize")
    found = {(norm_form(p.epilogue).norm.kind, p.out_granularity) for p in rows}
    assert found == set(itertools.product(("layer", "rms", "block_rms"),
                                          (Granularity.ROW, Granularity.GROUP)))  # fmt: skip
    assert {p.shape for p in rows} >= {*QUANTIZER_SHAPES, *((m, 2048) for m in ANCHOR_M)}


# --- lrm and lrm-backward

ROWS = {"A": 12, "B": 12, "C": 4, "D": 6, "E": 4, "F": 4, "G": 2, "H": 6, "I": 8, "J": 4,
        "K": 2, "L": 4}  # fmt: skip


def problems_of(name: str, op: str = "gemm") -> list[Problem]:
    return [case.problem for case in SUITES[name].cases(H200) if case.problem.op == op]


def test_every_row_of_the_table_occurs_once() -> None:
    ids = [name for layer in published_models.LAYERS for name in layer.ids.split()]
    assert len(set(ids)) == len(ids)
    expected = {f"{letter}{i}" for letter, rows in ROWS.items() for i in range(1, rows + 1)}
    assert {name.partition("/")[0] for name in ids} == expected
    facts = [replace(layer, ids=()) for layer in published_models.LAYERS]
    assert len(set(facts)) == len(facts), "equal rows share one entry"


def test_every_layer_has_every_size_of_its_row() -> None:
    found = {(p.batch, *p.shape) for p in problems_of("lrm")}
    for layer in published_models.LAYERS:
        sizes = layer.sizes()
        assert sizes, layer
        for batch, m in sizes:
            assert (batch, m, layer.n, layer.k) in found
        at_most = len(layer.m) or len(published_models.BATCHES)
        if layer.batch == 0:
            at_most = len(published_models.BATCHES)
        assert len(sizes) <= at_most
        if 2 * max(1, layer.batch) * layer.n * layer.k * 160 * 20480 < published_models.FLOP_LIMIT:
            assert len(sizes) == at_most


@pytest.mark.parametrize("name", ["lrm", "lrm-backward"])
def test_layers_are_below_the_limit_of_flops(name: str) -> None:
    assert max(p.flops for p in problems_of(name)) < 5e12
    assert max(p.bytes_moved for p in problems_of(name)) < 16 * 2**30


@pytest.mark.parametrize(
    ("m", "n", "k", "batch"),
    [
        (20480, 512, 13, 1), (20480, 1024, 479, 1), (20480, 512, 312, 1), (64 * 8192, 8, 39, 1),
        (20480, 1, 256, 1), (64 * 20480, 8, 39, 1), (160 * 20480, 24, 720, 1),
        (160 * 8192, 24, 720, 1), (160 * 20480, 32, 720, 1), (160 * 20480, 64, 720, 1),
        (2048, 1024, 123200, 1), (2048, 768, 256, 1), (2048, 16384, 73728, 1),
        (1024, 16384, 115200, 1), (20480, 115200, 512, 1), (152710, 2048, 512, 1),
        (131168, 4096, 1024, 1), (36032, 512, 1536, 1), (15168, 256, 512, 1),
        (27, 27, 128, 20480), (720, 24, 160, 256), (64, 24, 160, 6144), (720, 96, 160, 20480),
        (1000, 192, 128, 3072), (1000, 256, 128, 4608), (1000, 256, 32, 4608),
        (100, 128, 128, 2048), (20480, 3072, 768, 16), (8192, 6144, 1536, 32),
        (256, 1536, 6144, 32),
    ],
)  # fmt: skip
def test_lrm_has_its_forms(m: int, n: int, k: int, batch: int) -> None:
    assert any((p.batch, p.shape) == (batch, (m, n, k)) for p in problems_of("lrm"))


def test_lrm_excludes_layers_that_are_too_large() -> None:
    found = {(p.batch, *p.shape) for p in problems_of("lrm")}
    assert (1, 8192, 16384, 69120) not in found
    assert (1, 2048, 16384, 115200) not in found
    assert (32, 20480, 6144, 1536) not in found


def test_the_table_pairs_distributions() -> None:
    paired = {
        name: layer.distribution for layer in published_models.LAYERS for name in layer.ids.split()
    }
    pairing = {
        "X7": "A1", "X2": "A5", "X4": "G1", "X9": "I2",
        "X3": "B3 B10 C1 C4 D2 D5 E1 E3 H2 H4 I1",
        "X8": "B4 A7 C2 D3 E2",
        "X5": "B1 B6 B7 D1 I3 I5",
    }  # fmt: skip
    for distribution, ids in pairing.items():
        assert {paired[name] for name in ids.split()} == {distribution}
    assert {paired[name] for name in ("A4", "A6", "F1", "F2", "F3", "G2")} <= {"X5", "X6"}
    assert {d for name, d in paired.items() if name[:2] in ("L1", "L2", "L3")} <= {"X10", "X3"}
    biased = {name for layer in published_models.LAYERS for name in layer.ids.split() if layer.bias}
    assert {name.partition("/")[0] for name in biased} == set(
        ["A1", "A2", "A3", "A5", "A6", "A7", "A8", "A9", "F2", "I1", "I8"]
    )


def test_forms_of_lrm() -> None:
    cases = SUITES["lrm"].cases(H200)
    gemms = [c for c in cases if c.problem.op == "gemm"]
    whole = {(c.problem.shape, c.distribution, c.problem.epilogue)
             for c in gemms if not c.problem.prepared and c.problem.batch == 1}  # fmt: skip
    prepared = Counter((c.problem.shape, c.distribution, c.problem.epilogue)
                       for c in gemms if c.problem.prepared)  # fmt: skip
    assert set(prepared) == whole
    assert set(prepared.values()) == {3}
    assert all(c.problem.batch == 1 for c in cases if c.problem.op in ("quantize", "dequantize"))
    quantized = Counter((p.shape, p.out_granularity) for p in problems_of("lrm", "quantize"))
    assert set(quantized.values()) == {1}
    inputs = {(m, k) for (m, _, k), _, _ in whole}
    for granularity in (Granularity.ROW, Granularity.GROUP):
        assert {shape for shape, g in quantized if g is granularity} == inputs
    by_tensor = [shape for shape, g in quantized if g is Granularity.TENSOR]
    assert {m for m, _ in by_tensor} == {2048, 20480}
    assert len({m * k for m, k in by_tensor}) == len(by_tensor)
    scaled = [p for p in problems_of("lrm", "scaled_gemm") if not is_fused(p)]
    assert {p.a.granularity for p in scaled} == {Granularity.ROW, Granularity.GROUP}
    for layer in published_models.LAYERS:
        sizes = [m for batch, m in layer.sizes() if batch == 1]
        if sizes:
            found = {p.m for p in scaled if (p.n, p.k) == (layer.n, layer.k)}
            assert found >= {sizes[-1], *({2048} & set(sizes))}


def test_lrm_backward_contains_the_gradients_of_every_layer() -> None:
    cases = SUITES["lrm-backward"].cases(H200)
    assert {case.distribution for case in cases} == {"X12"}
    crosses = [c.problem for c in cases if c.problem.op == "norm_backward"]
    assert {(p.m, p.k, p.epilogue) for p in crosses} == {
        (m, 3456, "bias+cross") for m in published_models.BACKWARD_BATCHES
    }
    cases = [case for case in cases if case.problem.op != "norm_backward"]
    assert {c.problem.op for c in cases if not is_fused(c.problem)} == {"gemm"}
    found = {(c.problem.batch, *c.problem.shape) for c in cases}
    for layer in published_models.LAYERS:
        for batch, m in layer.sizes(published_models.BACKWARD_BATCHES):
            assert (batch, m, layer.k, layer.n) in found
        samples = (2048, 8192) if layer.per_sample > 1 else published_models.BACKWARD_BATCHES
        for batch, m in layer.sizes(samples):
            assert (batch, layer.n, layer.k, m) in found
    assert (1, 131168, 1024, 4096) in found  # J2
    assert (1, 4096, 1024, 131168) in found
    assert (1, 1024, 1024, 131168) in found  # J4
    assert (1, 24, 720, 160 * 8192) in found
    assert (1, 24, 720, 160 * 20480) not in found
    prepared = [c.problem for c in cases if c.problem.prepared]
    assert {p.b.granularity for p in prepared if p.b} == {Granularity.ROW, Granularity.BLOCK}


def test_lrm_has_every_kind_of_epilogue_and_of_groups() -> None:
    fused = [p for p in problems_of("lrm", "scaled_gemm") if is_fused(p)]
    assert len(fused) <= 40, "each costs errors of its own: a handful"
    kinds = Counter((p.epilogue, p.out_format, p.batch > 1) for p in fused)
    assert set(kinds) == {
        ("bias+relu", Format.E4M3FN, False), ("bias+cross", Format.BFLOAT16, False),
        ("bias+silu", Format.BFLOAT16, False), ("none", Format.BFLOAT16, True),
    }  # fmt: skip
    for problem in fused:
        static = problem.out_format.is_fp8
        assert problem.out_granularity is (Granularity.TENSOR if static else Granularity.NONE)
    cross = [p.shape for p in fused if p.epilogue == "bias+cross"]
    assert set(cross) == {(2048, 3456, 512), (20480, 3456, 512)}
    groups = {(p.batch, *p.shape) for p in fused if p.batch > 1}
    assert groups >= {(16, 2048, 3072, 768), (16, 2048, 768, 3072), (32, 2048, 6144, 1536),
                      (2048, 100, 128, 128), (3072, 1000, 192, 128)}  # fmt: skip


@pytest.mark.parametrize("device", [H200, MI300X], ids=str)
def test_main_gradients_accumulate_in_float32(device: Device) -> None:
    fp8 = fp8_format(device)
    problems = [c.problem for c in SUITES["lrm-backward"].cases(device) if is_fused(c.problem)]
    assert {p.shape for p in problems} >= {
        (1024, 1024, 8192),
        (4096, 4096, 2048),
        (24, 720, 327680),
    }
    assert len(problems) <= 20
    for problem in problems:
        assert problem.accumulate and problem.out_format is Format.FLOAT32
        assert problem.b is not None
        assert problem.a.granularity is problem.b.granularity is Granularity.GROUP
        assert (problem.a.layout, problem.b.layout) == (Layout.ROW, Layout.COLUMN)
    assert {(p.a.format, p.b.format) for p in problems if p.b} == {
        (WIDE_RANGE[fp8], fp8), (fp8, fp8)
    }  # fmt: skip


def test_narrow_outputs_are_bound_by_bytes() -> None:
    problems = [case.problem for case in SUITES["narrow"].cases(H200)]
    assert Counter(p.op for p in problems) == {"scaled_gemm": 2 * 4 * 6, "quantize": 2 * 4}
    for problem in problems:
        assert problem.m >= 100_000
        assert problem.bytes_moved / 4.3e6 > problem.flops / 1.979e9
        scale = problem.out_granularity if problem.op == "quantize" else problem.a.granularity
        assert scale is Granularity.ROW
        assert problem.op == "quantize" or problem.out_format is Format.BFLOAT16
    assert {p.n for p in problems if p.b} == {1, 8, 16, 24, 32, 64}


def test_long_sums_are_those_of_split_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "why_not", lambda _: None)
    taken: Counter[str] = Counter()
    for problem in (case.problem for case in SUITES["long-sums"].cases(H200)):
        assert problem.m * problem.n <= 2**18 and problem.k > 4 * max(problem.m, problem.n)
        (kernel,) = (
            kernel
            for name, kernel in KERNELS.items()
            if name.endswith("_split") and not isinstance(kernel.supports(problem, H200), Rejected)
        )
        taken[kernel.name] += 1
    scales = ("tensor", "row", "block", "group")
    assert taken == {f"cuda.scaled_gemm_{name}_split": 7 for name in scales}


def test_gradients_read_operands_in_their_layout() -> None:
    whole, row, block = (c.problem for c in grad_input_cases(64, 48, 40, Format.E4M3FN))
    assert whole == make_problem(
        "gemm", (64, 40, 48), b=Operand(Format.BFLOAT16, layout=Layout.ROW)
    )
    assert [p.b.layout for p in (row, block) if p.b] == [Layout.COLUMN] * 2
    weight = grad_weight_case(64, 48, 40).problem
    assert weight.shape == (48, 40, 64)
    assert (weight.a.layout, weight.b and weight.b.layout) == (Layout.COLUMN, Layout.ROW)
    assert weight.out_format is Format.BFLOAT16
    odd = grad_weight_case(64, 13, 39).problem
    assert (odd.a.alignment, odd.b and odd.b.alignment) == (2, 2)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("columns", [1, 2, 3, 8])
@pytest.mark.parametrize("prefer", [Layout.ROW, Layout.COLUMN])
def test_dense_operand_equals_the_operand_of_a_tensor(
    rows: int, columns: int, prefer: Layout
) -> None:
    x = torch.zeros(rows, columns, dtype=torch.bfloat16)
    made = dense_operand(Format.BFLOAT16, (rows, columns), Layout.ROW, prefer)
    assert made == operand_of(x, prefer)
    made = dense_operand(Format.BFLOAT16, (columns, rows), Layout.COLUMN, prefer)
    assert made == operand_of(x.t(), prefer)


def test_smoke_is_small() -> None:
    cases = SUITES["smoke"].cases(CPU)
    assert len(cases) <= 30
    assert max(case.problem.flops for case in cases) <= 2 * 2048 * 256 * 256
    assert {case.problem.op for case in cases} == {
        "gemm", "scaled_gemm", "quantize", "dequantize"
    }  # fmt: skip


def test_a_gemm_has_unquantized_prepared_and_partial_forms() -> None:
    cases = list(gemm_cases(64, 32, 48, "X4", Format.E4M3FN, epilogue="bias"))
    gemms = [case.problem for case in cases if case.problem.op == "gemm"]
    assert [problem.prepared for problem in gemms] == [False, True, True, True]
    assert [problem.b.granularity for problem in gemms if problem.b] == [
        Granularity.NONE, Granularity.TENSOR, Granularity.ROW, Granularity.BLOCK
    ]  # fmt: skip
    assert {problem.epilogue for problem in gemms} == {"bias"}
    for problem in gemms:
        assert problem.b is not None
        assert problem.b.layout is Layout.COLUMN
    parts = [case.problem for case in cases if case.problem.op != "gemm"]
    scales = {Granularity.TENSOR, Granularity.ROW, Granularity.GROUP}
    assert {p.out_granularity for p in parts if p.op == "quantize"} == scales
    assert {p.a.granularity for p in parts if p.op == "scaled_gemm"} == scales
    assert {case.distribution for case in cases} == {"X4"}


def test_shapes_of_a_user() -> None:
    cases = list(shape_cases([(64, 32, 48), (128, 64)], Format.E4M3FN))
    assert all(isinstance(case, Case) for case in cases)
    assert {c.problem.shape for c in cases if c.problem.op == "gemm"} == {(64, 32, 48)}
    of_two = [c.problem for c in cases if c.problem.shape == (128, 64)]
    assert Counter(problem.op for problem in of_two) == {"quantize": 4, "dequantize": 4}
    assert list(shape_cases([], Format.E4M3FN)) == []
    with pytest.raises(ShapeError):
        list(shape_cases([(64, 0, 48)], Format.E4M3FN))


def test_suites_are_found_by_name() -> None:
    for name, suite in SUITES.items():
        assert suite_named(name) is suite
        assert suite.name == name
        assert suite.title
    with pytest.raises(
        UnknownNameError,
        match=r"'anchor' is unknown; did you mean 'anchors'\? expected one of smoke, anch",
    ):
        suite_named("anchor")


NONE, TENSOR, ROW = Granularity.NONE, Granularity.TENSOR, Granularity.ROW
GROUPED, BLOCK = Granularity.GROUP, Granularity.BLOCK
FIRST_FORMS = {  # granularities of X, W and Y
    (NONE, NONE, NONE), (NONE, NONE, ROW), (NONE, ROW, NONE), (NONE, ROW, ROW),
    (NONE, BLOCK, GROUPED),
}  # fmt: skip
LATER_FORMS = {
    (NONE, NONE, NONE), (ROW, ROW, NONE), (ROW, ROW, ROW), (GROUPED, BLOCK, NONE),
    (GROUPED, BLOCK, GROUPED),
}  # fmt: skip


def form_of(problem: Problem) -> tuple[Granularity, Granularity, Granularity]:
    assert problem.b is not None
    return problem.a.granularity, problem.b.granularity, problem.out_granularity


@pytest.mark.parametrize("device", [H200, MI300X], ids=str)
@pytest.mark.parametrize("k", [384, 389])
@pytest.mark.parametrize(
    "epilogue", ["bias", "bias+relu", "silu", "bias+layer+affine+silu", "rms+affine+residual_last"]
)
def test_chain_cases_are_what_dispatch_chain_asks_for(
    epilogue: str, k: int, device: Device
) -> None:
    layers = (Layer(k, k, epilogue), Layer(k, k, epilogue), Layer(256, k))
    chain = Chain(layers, 2048, device, ("X1",), None)
    bounded = layers[0].is_bounded
    assert bounded is (epilogue == "bias+layer+affine+silu")
    for place, forms in enumerate((FIRST_FORMS, LATER_FORMS)):
        static = {((NONE, ROW, TENSOR), (ROW, ROW, TENSOR))[place]} if bounded else set()
        cases = chain_layer_cases(
            2048, k, k, epilogue, "X5", fp8_format(device), first=place == 0, later=place == 1
        )
        problems = [case.problem for case in cases if case.distribution == "X5"]
        wanted = [
            p for p in chain_candidates._problems(chain, place) if form_of(p) in forms | static
        ]
        assert set(problems) == set(wanted)
        assert len(problems) == len(wanted) == len(forms | static)


def test_a_layer_of_both_places_has_the_cases_of_both() -> None:
    layer = (2048, 512, 512, "bias+layer+affine+relu", "X1", Format.E4M3FN)
    first, later = (
        set(chain_layer_cases(*layer, first=one, later=not one)) for one in (True, False)
    )
    both = list(chain_layer_cases(*layer))
    assert len(both) == len(set(both)) == MOST_CHAIN_CASES
    assert set(both) == first | later


@pytest.mark.parametrize(
    ("suite", "count"), [("zoo-chains", 452), ("residuals", 116), ("gelu", 162)]
)
def test_chains_of_suites_have_fused_kernels_on_an_h200(suite: str, count: int) -> None:
    cases = SUITES[suite].cases(H200)
    assert len(cases) == len({case.problem for case in cases}) == count
    for case in cases:
        if case.problem.op != "gemm_norm":
            continue
        names = {kernel.name for kernel in candidates(case.problem, H200)}
        scales = form_of(case.problem)[:2]
        fused = {
            (NONE, NONE): "cuda.gemm_norm_bf16"
            if case.problem.k % 8 == 0
            else "torch.norm_unfused",
            (NONE, ROW): "cuda.quantize_row+cuda.gemm_norm_row",
            (NONE, BLOCK): "cuda.quantize_group+cuda.gemm_norm_block",
            (ROW, ROW): "cuda.gemm_norm_row",
            (GROUPED, BLOCK): "cuda.gemm_norm_block",
        }[scales]
        assert fused in names, case
