"""Tables of kernels that others tuned, as evidence of which sizes matter. Nobody has verified them.

    AITER         CSV with a header: cu_num, M, N, K, mostly gfx, and times and names of kernels
    vLLM, kernels of Hugging Face
                  JSON from m to launch parameters, in a file whose name has the rest:
                  N=2048,K=512,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json

Sizes and GPU types are all that is read: a sweep measures problems of such sizes first. Their times
and kernels become no row, and decide nothing.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lokakern.errors import SuiteError
from lokakern.types import Device, Problem
from lokakern.workloads.suite_files import MOST_CASES, read_text, shown, size_of
from lokakern.workloads.suites import Case

SIZES = ("M", "N", "K")
NEAR_M = 2  # a factor between m that counts as the same size
MOST_DIGITS = 10  # of a size


@dataclass(frozen=True, slots=True)
class Tuned:
    """A product for which somebody tuned a kernel.

    Attributes:
        m: Rows.
        n: Outputs.
        k: Inputs.
        gpu: Architecture ("gfx942"), or product with underscores ("NVIDIA_H200"); "" if unknown.
        compute_units: Number of CUs of the GPU; 0 if unknown.
    """

    m: int
    n: int
    k: int
    gpu: str = ""
    compute_units: int = 0

    def is_on(self, device: Device) -> bool:
        """Whether it was tuned for this GPU type."""
        if self.compute_units not in (0, device.compute_units):
            return False
        names = {device.architecture, device.product.replace(" ", "_")}
        is_amd = device.vendor == "amd" and self.compute_units > 0  # AITER named no gfx before
        return self.gpu in names if self.gpu else is_amd


def read_tuned(path: Path) -> list[Tuned]:
    """The products of a table.

    Raises:
        SuiteError: The file cannot be read, is too large, or is not such a table.
    """
    readers = {".csv": _from_csv, ".json": _from_json}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise SuiteError(f"table {path}: expected a file that ends in {' or '.join(readers)}")
    found = reader(path)
    if not 1 <= len(found) <= MOST_CASES:
        raise SuiteError(f"table {path}: holds {len(found)} products; expected 1 to {MOST_CASES}")
    return found


def _from_csv(path: Path) -> list[Tuned]:
    try:
        lines = [line for line in csv.reader(io.StringIO(read_text(path), newline="")) if any(line)]
    except csv.Error as error:
        raise SuiteError(f"table {path}: is not CSV: {error}") from None
    head = [word.strip() for word in lines[0]] if lines else []
    if not {*SIZES, "cu_num"} <= {*head}:
        raise SuiteError(
            f"table {path}: its first line is {shown(','.join(head))}; expected AITER's columns, "
            "among them cu_num, M, N and K"
        )
    found = []
    for place, line in enumerate(lines[1:], 1):
        where = f"table {path}, row {place}"
        if len(line) != len(head):
            raise SuiteError(f"{where}: has {len(line)} values for {len(head)} columns")
        row = dict(zip(head, line, strict=True))
        m, n, k, units = (_size(row[key], key, where) for key in (*SIZES, "cu_num"))
        found.append(Tuned(m, n, k, _gpu(row.get("gfx", ""), where), units))
    return found


def _from_json(path: Path) -> list[Tuned]:
    named = dict(part.partition("=")[::2] for part in path.stem.split(","))
    if not {"N", "K"} <= named.keys():
        raise SuiteError(
            f"table {path}: expected a name such as N=2048,K=512,device_name=NVIDIA_H200,"
            "dtype=fp8_w8a8.json"
        )
    n, k = (_size(named[key], key, f"table {path}") for key in ("N", "K"))
    gpu = _gpu(named.get("device_name", ""), f"table {path}")
    try:
        table = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise SuiteError(f"table {path}: is not JSON: {error}") from None
    if isinstance(table, dict):
        table.pop("triton_version", None)
    if not isinstance(table, dict) or not all(isinstance(x, dict) for x in table.values()):
        raise SuiteError(f"table {path}: is {shown(table)}; expected launch parameters by m")
    return [Tuned(_size(m, "m", f"table {path}"), n, k, gpu) for m in table]


def _size(text: str, key: str, where: str) -> int:
    text = text.strip()
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    return size_of(int(text) if is_number else text, key, where)


def _gpu(text: str, where: str) -> str:
    if not re.fullmatch(r"[\w().+-]{0,100}", text, re.ASCII):
        raise SuiteError(f"{where}: the GPU is {shown(text)}; expected a name without spaces")
    return text


def rank_of(cases: Sequence[Case], tuned: Sequence[Tuned], device: Device) -> list[int]:
    """The rank of each case; the lowest comes first.

    Args:
        cases: The problems of a sweep.
        tuned: Products of tables.
        device: The device of the sweep.

    Returns:
        0 if it was tuned for this GPU type at a similar m, 1 at another m, 2 for another GPU type,
        3 if it was not.
    """
    here: dict[tuple[int, int], list[int]] = {}
    elsewhere: set[tuple[int, int]] = set()
    for product in tuned:
        if product.is_on(device):
            here.setdefault((product.n, product.k), []).append(product.m)
        else:
            elsewhere.add((product.n, product.k))

    def rank(problem: Problem) -> int:
        size = (problem.n, problem.k)
        if problem.b is None:
            return 3
        if size in here:
            m = problem.m
            is_near = any(m <= NEAR_M * other and other <= NEAR_M * m for other in here[size])
            return 0 if is_near else 1
        return 2 if size in elsewhere else 3

    return [rank(case.problem) for case in cases]
