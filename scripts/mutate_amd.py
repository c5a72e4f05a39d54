"""Change HIP kernels line by line, and see whether the tests that need no GPU notice each change.

    python scripts/mutate_amd.py            # all, half a minute each
    python scripts/mutate_amd.py vmcnt NaN  # those whose description has one of these words

Works in a copy of the tree. What compilers made of kernels (kernels/hip/resources.json) is not
compared there: a change must be noticed because it is wrong, not because a register is another.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = tuple(
    f"tests/kernels/test_hip_{name}.py" for name in ("instructions", "compiled", "on_host")
)
# Tests of a file that others do not include, by words in their names.
OF_FILE = {
    "quantize.hip": "quantize and not dequantize",
    "dequantize.hip": "dequantize",
    "scaled_gemm.hip": "scaled_gemm",
    "gemm_norm.hip": "gemm_norm",
}


class Mutation(NamedTuple):
    """A text that occurs once in a file of kernels/hip, and its replacement."""

    what: str
    file: str
    old: str
    new: str


MUTATIONS = tuple(Mutation(*words) for words in (
    # Limits and codes
    ("MAX of fnuz", "amd.hpp", "LARGEST_FP8 240.0f", "LARGEST_FP8 448.0f"),
    ("MAX of OCP", "amd.hpp", "LARGEST_FP8 448.0f", "LARGEST_FP8 240.0f"),
    ("NaN byte of fnuz", "amd.hpp", "NAN_FP8 0x80u", "NAN_FP8 0x7fu"),
    ("NaN byte of OCP", "amd.hpp", "NAN_FP8 0x7fu", "NAN_FP8 0x80u"),
    ("no clamp", "amd.hpp", "__builtin_amdgcn_fmed3f(second, -LARGEST_FP8, LARGEST_FP8)", "second"),
    ("clamp from 0", "amd.hpp", "fmed3f(first, -LARGEST_FP8,", "fmed3f(first, 0.0f,"),
    ("clamp to half", "amd.hpp", "fmed3f(first, -LARGEST_FP8, LARGEST_FP8)",
     "fmed3f(first, -LARGEST_FP8, LARGEST_FP8 / 2)"),
    ("-0 is NaN of fnuz", "amd.hpp", "byte = byte == 0x80 ? 0 : byte", "byte = byte"),
    ("NaN is clamped", "amd.hpp", "first == first ? bytes[0] : NAN_FP8", "bytes[0]"),
    ("a pair is turned", "amd.hpp", "(low, high, 0, false)", "(high, low, 0, false)"),
    ("the high half", "amd.hpp", "(low, high, 0, false)", "(low, high, 0, true)"),
    ("bf8", "amd.hpp", "cvt_pk_fp8_f32(low", "cvt_pk_bf8_f32(low"),
    ("-0 of four", "amd.hpp", "word = (word & (sizes + 0x7f7f7f7fu)) | sizes;", ""),
    ("the low half twice", "amd.hpp", "from[3], low, true", "from[3], low, false"),
    ("one byte of four", "amd.hpp", "static_cast<int>(word), BYTE", "static_cast<int>(word), 0"),
    ("bf8 is read", "amd.hpp", "__builtin_amdgcn_cvt_f32_fp8", "__builtin_amdgcn_cvt_f32_bf8"),
    # Matrix instructions
    ("96 of k", "amd.hpp", "INSTRUCTIONS = 4", "INSTRUCTIONS = 3"),
    ("half of k twice", "amd.hpp", "from[2 * part + 1]", "from[2 * part]"),
    ("bf8 is multiplied", "amd.hpp", "16x16x32_fp8_fp8(", "16x16x32_fp8_bf8("),
    ("a part of all parts", "amd.hpp", "sums = multiply_part(x, y, sums, part)",
     "sums = multiply_part(x, y, sums, 0)"),
    ("scales are swapped", "amd.hpp", "0, x_scale, 0, y_scale", "0, y_scale, 0, x_scale"),
    ("cbsz", "amd.hpp", "sums, 0, 0, 0, x_scale", "sums, 1, 0, 0, x_scale"),
    ("blgp", "amd.hpp", "sums, 0, 0, 0, x_scale", "sums, 0, 1, 0, x_scale"),
    ("another byte of scales", "amd.hpp", "x_scale, 0, y_scale", "x_scale, 1, y_scale"),
    ("scales of 2", "amd.hpp", "ONE_E8M0 = 127", "ONE_E8M0 = 128"),
    ("the last product is moved, alone", "amd.hpp", 'asm volatile("" : "+a"(sums));', ""),
    ("the last product is moved", "amd.hpp", "hide(sums);", ""),
    # Copies, waits, barriers
    ("vmcnt(1)", "amd.hpp", "s_waitcnt(0x0f70 | LATER)", "s_waitcnt(0x0f71 + LATER)"),
    ("vmcnt(63)", "amd.hpp", "s_waitcnt(0x0f70 | LATER)", "s_waitcnt(0xcf7f)"),
    ("lgkmcnt(0) for vmcnt(0)", "amd.hpp", "s_waitcnt(0x0f70 | LATER)", "s_waitcnt(0xc07f)"),
    ("no vmcnt", "amd.hpp", "        __builtin_amdgcn_s_waitcnt(0x0f70 | LATER);", ""),
    ("vmcnt(9)", "gemm_norm.hip", "wait<right_rows.LOADS>()", "wait<right_rows.LOADS + 1>()"),
    ("4 bytes of 16", "amd.hpp", "(Local*)to, 16, offset", "(Local*)to, 4, offset"),
    ("each lane's own place", "amd.hpp", "(Local*)to, 16", "(Local*)(to + lane_index()), 16"),
    ("another shift in memory", "amd.hpp", "place(i) + BEFORE - shift(i)", "place(i) + BEFORE"),
    ("half of a shift", "amd.hpp", "number % 4 * WAVE * 16", "number % 4 * WAVE * 8"),
    ("a base for each copy", "amd.hpp", "number / 4 * 4 * WAVE", "number * WAVE"),
    ("an offset of all lanes", "amd.hpp", "16, offset, 0, SHIFT", "16, 0, offset, SHIFT"),
    ("structured buffers", "amd.hpp", "RAW = 0x00027000", "RAW = 0x00024000"),
    ("copies stay where they are", "amd.hpp", "offset += further", "offset += 0"),
    ("nothing is put", "amd.hpp", "to[number * WAVE + lane_index()] = held_[number];", ";"),
    ("no barrier", "amd.hpp", "    __builtin_amdgcn_s_barrier();\n", ""),
    ("no release", "amd.hpp", '    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");\n', ""),
    ("no acquire", "amd.hpp", '    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");\n', ""),
    ("half a wave", "amd.hpp", "constexpr int WAVE = 64", "constexpr int WAVE = 32"),
    ("bytes of a shuffle", "amd.hpp", "(lane_index() ^ distance) << 2", "lane_index() ^ distance"),
    ("barrier of one stage", "scaled_gemm.hip",
     "if (STAGES == 1) barrier();  // all have read what is overwritten", ""),
    ("barrier of one stage, alone", "scaled_gemm.hip", "if (number == READ) barrier();", ""),
    ("no wait for the next step, alone", "scaled_gemm.hip", "if (number == LAST) wait();", ""),
    ("barrier of one stage, norm", "gemm_norm.hip",
     "if (STAGES == 1) barrier();  // all have read what is overwritten", ""),
    ("barrier before sums are exchanged", "gemm_norm.hip",
     "if (STAGES == 1) barrier();  // before sums are exchanged there", ""),
    ("barrier of exchanged sums", "gemm_norm.hip",
     "barrier();\n                const float* from", "const float* from"),
    ("rows 8 apart in a bank", "products.hpp", "waves == 4 ? wave ^ row / 8 % 2 : wave", "wave"),
    ("numbers of other pairs of waves", "products.hpp", "wave ^ row / 8 % 2", "wave ^ row / 8 % 4"),
    ("one place for all exchanges", "gemm_norm.hip", "exchanged += TILE_M * WAVES_N;", ""),
    # Where things lie
    ("tiles of 8 dies", "products.hpp", "(die < more ? die : more)", "more"),
    ("rows of 2^16 bytes", "amd.hpp", "(y & 0xffffff)", "(y & 0xffff)"),
    ("swizzle", "products.hpp", "row * PARTS + (part ^ row % PARTS)", "row * PARTS + part"),
    ("tail of k", "products.hpp", "left < 4 ? words[i]", "left < 3 ? words[i]"),
    ("parts past k", "products.hpp", "part = count / 16; part < PARTS",
     "part = count / 16; part < 1"),
    ("copies of one row", "products.hpp", "row_of(EACH * i) - row_of(0)", "0"),
    ("the same between all copies", "products.hpp", "if (COUNT & (COUNT - 1))", "if (false)"),
    ("row past the last", "products.hpp", "copies_(data, (count - 1u) * stride",
     "copies_(data, count * stride"),
    ("row past the last in registers", "products.hpp", "from_(data, (count - 1u) * stride",
     "from_(data, count * stride"),
    ("half of k twice in registers", "products.hpp", "offsets_[j] + STEP / 2 * half",
     "offsets_[j]"),
    ("the same step in registers", "products.hpp", "offsets_[j] += STEP", "offsets_[j] += 0"),
    ("tail of k in registers", "products.hpp", "count - STEP / 2 * half - start()",
     "count - STEP / 2 * half"),
    ("a fragment that is still read", "gemm_norm.hip", "add(now, first, last, load_next)",
     "add(now, [&] { first(); load_next(0); }, last, [](int j) { if (j) load_next(j); })"),
    ("a step past k", "products.hpp", "is_last ? NOWHERE : ", ""),
    ("no barrier behind a tail", "products.hpp", "    barrier();\n}", "}"),
    ("scales of 128x128", "scaled_gemm.hip", "column / 128 *", "column / 256 *"),
    ("columns of a lane", "scaled_gemm.hip", "line / 4 * 4) + 4 * (j % TOGETHER)",
     "line / 4 * 4) + 4 * ((j + 1) % TOGETHER)"),
    ("rows of b as they come", "scaled_gemm.hip", "return column_of(row / 16, row % 16)",
     "return row"),
    ("tails are stored whole", "scaled_gemm.hip", "rows == TILE_M && columns == TILE_N",
     "rows == TILE_M"),
    ("rows are stored as if aligned", "scaled_gemm.hip", "TILE_N && is_aligned", "TILE_N"),
    ("words of tails are stored as if aligned", "scaled_gemm.hip", "(is_aligned && left", "(left"),
    ("words of tails are stored whole", "scaled_gemm.hip", "left >= 4 * TOGETHER", "left >= 4"),
    ("a bias of the first columns", "scaled_gemm.hip", "2u * (first_n + own_column)",
     "2u * own_column"),
    ("scales of the step before", "scaled_gemm.hip", "next_scales += a_scale_stride", ""),
    ("scales of the step before, norm", "gemm_norm.hip", "next_scales += a_scale_stride", ""),
    ("scales past the last step", "scaled_gemm.hip",
     "scale_bytes = left <= STEP ? 0 : scale_bytes;", ""),
    ("a fragment too late", "scaled_gemm.hip", "read_left(stage, i + AHEAD)",
     "read_left(stage, i)"),
    ("upper rows for lower ones, alone", "scaled_gemm.hip", "read_left(stage, HALF + number)",
     "read_left(stage, number)"),
    ("columns of the same step, alone", "scaled_gemm.hip", "read_right(after, j)",
     "read_right(stage, j)"),
    # Arithmetic
    ("scales are not raised", "amd.hpp", "RAISED = 0x1p26f", "RAISED = 1.0f"),
    ("products are not lowered", "amd.hpp", "ONE_E8M0 - 13, ONE_E8M0 - 13",
     "ONE_E8M0 - 13, ONE_E8M0"),
    ("sums are not lowered", "amd.hpp", "return sums * (1.0f / RAISED);", "return sums;"),
    ("scales of rows first", "scaled_gemm.hip", "sums[i][j] * of_rows[i] * of_columns[j]",
     "sums[i][j] * (of_rows[i] * of_columns[j])"),
    ("scales of rows first, norm", "gemm_norm.hip", "sums[i][j] * of_rows[i] * of_columns[j]",
     "sums[i][j] * (of_rows[i] * of_columns[j])"),
    ("columns of a lane, norm", "gemm_norm.hip", "4 * (j % TOGETHER) + line % 4",
     "4 * ((j + 1) % TOGETHER) + line % 4"),
    ("columns past n count", "gemm_norm.hip", "column_of(j, t) < n ? sums[i][j][t] : 0.0f",
     "column_of(j, t) < n ? sums[i][j][t] : 1.0f"),
    ("a quotient that is not corrected", "amd.hpp",
     "return __builtin_elementwise_fma(x, of.near, x * of.rest)", "return x * of.near"),
    ("the one quotient that is off", "gemm_norm.hip", "|| nearest == 0", ""),
    ("NaN is usual", "gemm_norm.hip", "nothing += sums[i][j] * 0.0f",
     "nothing += all<Floats4>(0.0f)"),
    ("NaN is usual, gfx950", "gemm_norm.hip", "nothing[i] = largest[i] * 0.0f",
     "nothing[i] = 0.0f"),
    ("NaN of others", "gemm_norm.hip", "between_0_and_1(power_of_two(e[t]))", "power_of_two(e[t])"),
    ("gelu by a factor that is not of the square", "gemm_norm.hip", "square = z * z", "square = z"),
    ("gelu by tanh by sqrt(2 / pi)", "gemm_norm.hip", "2.3022082f}", "1.1511041f}"),
    ("a term of gelu", "gemm_norm.hip", "-1.15744762e-4f", "1.15744762e-4f"),
    ("reciprocals of others", "gemm_norm.hip", "inverse * second, of_second = inverse * first",
     "inverse * first, of_second = inverse * second"),
    ("small scales are usual", "gemm_norm.hip", "smallest < bits_of(0x1p-50f) - 1", "false"),
    ("scales of rows of 0", "gemm_norm.hip", "largest[i] == 0.0f ? 1.0f : scale[i]", "scale[i]"),
    ("no limit under a given scale", "gemm_norm.hip",
     "some[t] = __builtin_amdgcn_fmed3f(some[t], -limit, limit);", ";"),
    ("whole tiles anywhere", "gemm_norm.hip", "rows == TILE_M && n == TILE_N && is_aligned",
     "rows == TILE_M && n == TILE_N"),
    ("no division by unusual scales", "gemm_norm.hip", "sums[i][j][t] / scale[i]",
     "sums[i][j][t] * reciprocal(scale[i])"),
    ("amax of two lanes", "gemm_norm.hip", "distance <= 32", "distance <= 16"),
    ("no eps", "gemm_norm.hip", "squares[i] + eps", "squares[i]"),
    ("subnormal roots", "amd.hpp", "is_small ? root * 0x1p32f : root", "root"),
    ("away from even", "amd.hpp", "0x7fff + (half >> 16 & 1)", "0x8000"),
    ("NaN of bfloat16", "amd.hpp",
     "    halves[0] = first == first ? halves[0] : 0x7fc00000u;\n", ""),
    ("bfloat16 is turned", "amd.hpp", "Floats2{first, second}", "Floats2{second, first}"),
    ("infinity saturates", "quantize.hip", "finite ? value / scale : float_of(0x7fc00000u)",
     "value / scale"),
    ("smallest scale", "quantize.hip", "smallest = float_of(0x00800000u)",
     "smallest = float_of(0x00400000u)"),
    ("powers of two round down", "quantize.hip", "bits_of(scale) + 0x007fffffu", "bits_of(scale)"),
    ("2^-127", "dequantize.hip", "exponent : 0x00400000u", "exponent : 0u"),
    ("a scale that is NaN", "dequantize.hip", "byte == 255 ? 0x7fc00000u : byte", "byte"),
))  # fmt: skip


def copy_tree(to: Path) -> None:
    """Files that git does not ignore, links as links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        place = to / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, place, follow_symlinks=False)
    recorded = to / "kernels/hip/resources.json"
    recorded.write_text(json.dumps(json.loads(recorded.read_text()) | {"compiler": "another"}))


def first_failure(tree: Path, words: str = "") -> str | None:
    """The first test with these words in its name that fails in a tree, or None.

    Of the core, and of the cases that the core samples.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not rest or sample"]
    command += ["-p", "no:cacheprovider", *TESTS, "-k", words]
    environment = {name: text for name, text in os.environ.items() if name != "LOKAKERN_TESTS"}
    ran = subprocess.run(
        command, cwd=tree, env=environment | {"PYTHONPATH": str(tree)}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    if ran.returncode == 0:
        return None
    found = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if ran.returncode != 1 or not found:
        sys.exit(f"pytest ended with {ran.returncode}\n{ran.stdout}{ran.stderr}")
    return found[0].split(" - ")[0].split("/")[-1]


def main(words: list[str]) -> int:
    chosen = [each for each in MUTATIONS if not words or any(word in each.what for word in words)]
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        failed = first_failure(tree)
        if failed is not None:
            sys.exit(f"without any change {failed} fails")
        for each in chosen:
            path = tree / "kernels/hip" / each.file
            text = path.read_text()
            if text.count(each.old) != 1:
                sys.exit(f"{each.what}: {each.file} must hold once what is changed: {each.old!r}")
            path.write_text(text.replace(each.old, each.new))
            start = time.monotonic()
            failed = first_failure(tree, OF_FILE.get(each.file, ""))
            path.write_text(text)
            seconds = time.monotonic() - start
            outcome = "SURVIVED" if failed is None else f"noticed by {failed}"
            print(f"{each.what} ({each.file}): {outcome}, {seconds:.0f} s", flush=True)
            survived += [each.what] if failed is None else []
    print(f"{len(chosen) - len(survived)} of {len(chosen)} noticed")
    return len(survived)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
