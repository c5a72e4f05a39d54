"""What each column of the database holds, in words, and in which unit."""

from __future__ import annotations

_UNITS = {
    "_us": "us", "_utc_ms": "ms since 1970, UTC", "_mhz": "MHz", "_gib": "GiB", "_w": "W",
    "_db": "dB", "_share": "share, 0 to 1",
}  # fmt: skip
_SAYS = {
    "key": "SHA-256 of the row's identity, 32 bytes (of a run: its UUID, 16 bytes)",
    "id": "number in this file only, never part of an identity",
    "vendor": "nvidia, amd or cpu", "product": "name of the GPU type",
    "architecture": "such as sm_90 or gfx942", "compute_units": "multiprocessors",
    "memory_gib": "memory", "partition": "MIG or compute partition; none",
    "driver": "version", "toolkit": "version of CUDA or ROCm", "torch": "version",
    "triton": "version", "libraries": "other versions that decide what a kernel becomes",
    "power_cap_w": "power limit, as text", "name": "as registered",
    "language": "what it is written in, or whose library it calls",
    "modules": "its files, and versions of packages, separated by commas",
    "digest": "SHA-256 of its source", "accumulation": "how sums are added up",
    "granularity": "scales of a", "b_granularity": "scales of b", "op": "what is computed",
    "m": "rows of a", "n": "columns of b", "k": "columns of a", "batch": "products at once",
    "a": "format, scales, layout and alignment of a", "b": "those of b; none",
    "prepared": "whether b was quantized ahead", "epilogue": "what comes after the product",
    "out_format": "format of the output", "out_granularity": "scales of the output",
    "out_strided": "whether the output is a slice", "accumulate": "whether it is added to",
    "parameters": "canonical JSON", "realistic": "whether errors are judged on it by default",
    "started_utc_ms": "when the process began", "harness_digest": "of the measuring code",
    "command": "how to do it again", "grade": "`quick` counts only where nothing is `full`",
    "run": "of which process", "kernel": "what was measured", "problem": "at which problem",
    "distribution": "of which values", "device": "on which GPU type",
    "environment": "under which software", "regime": "graph-cold, graph-hot or eager",
    "status": "how it ended", "reason": "why not `ok`; empty where it is",
    "latency_us_p20": "time of a call, 20th percentile", "latency_us_p50": "median",
    "latency_us_p80": "80th percentile", "replay_count": "measurements that count",
    "void_count": "measurements that do not, for the clock was low",
    "calls_per_replay": "calls in each", "clock_mhz": "median clock; NULL where none is readable",
    "kernel_err": "largest error against the exact product of what was given, in roundings",
    "kernel_err_row_p99": "its 99th percentile over rows", "timer": "what was read",
    "operand_digest": "of the values", "measured_utc_ms": "when", "seed": "of the values",
    "rows": "rows compared", "row_err": "root mean square over rows of min(e, 1), e a row's "
    "relative error", "row_p50": "median of e", "row_p99": "99th percentile of e",
    "row_max": "largest e", "rel_err": "relative error of the whole output",
    "sqnr_db": "signal to quantization noise", "mean_rel_err": "mean of |out - ref| / |ref|",
    "mean_rel_err_excluded_share": "elements that it leaves out, too close to 0",
    "mean_shift": "|mean(out - ref)| / rms(ref)", "nonfinite_count": "outputs not finite",
    "nonfinite_unexpected_count": "of these, where the reference is finite",
    "flushed_share": "operands that became 0",
    "saturated_share": "operands that became the largest",
    "seeds": "that the module's tests draw from", "passed_count": "tests",
    "failed_count": "tests", "skipped_count": "tests",
}  # fmt: skip
_OWN = {  # where a name says something else
    ("run", "suite"): "what was measured", ("test_result", "suite"): "the test module",
    ("distribution", "name"): "such as X1",
}  # fmt: skip


def what_of(table: str, column: str) -> str:
    """What a column holds.

    Raises:
        KeyError: Nobody said.
    """
    own = _OWN.get((table, column))
    if own is not None:
        return own
    found = _SAYS.get(column.removesuffix("_upper"))
    if found is None:
        raise KeyError(f"column {column} is not described; say in _SAYS what it holds")
    return f"upper limit of it: {found}" if column.endswith("_upper") else found


def unit_of(column: str) -> str:
    """Its unit, which is in its name; "" where it has none."""
    return next((unit for end, unit in _UNITS.items() if _ends(column, end)), "")


def _ends(name: str, end: str) -> bool:
    return name.endswith(end) or (f"{end}_" in name and name.startswith("latency"))
