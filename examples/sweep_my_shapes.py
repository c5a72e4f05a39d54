"""Sweep the shapes of a model: time and error of every kernel, then dispatch's choice.

Writes a suite of two layers, measures it into a new database, and asks dispatch for its choice.
Prints a row for each kernel, and the explanation. To save time, it makes quick measurements of
bf16 and of kernels with rowwise scaling only; for real measurements omit `quick` and `few`.
"""

import tempfile
from pathlib import Path

from lokakern.bench.cli.main import app  # python -m lokakern.bench

SUITE = """
name = "my-model"

[[layer]]          # Y[m, n] = X[m, k] W[n, k]^T + bias[n]
m = 512
n = 256
k = 128
bias = true
forms = ["gemm"]

[[layer]]
m = 512
n = 64
k = 256
forms = ["gemm"]
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        suite, database = Path(folder, "my-model.toml"), str(Path(folder, "mine.sqlite"))
        suite.write_text(SUITE)
        quick = ["--grade", "quick", "--errors", "needed", "--quiet"]
        few = ["--kernel", "torch.bf16", "--kernel", "torch.quantize_row"]
        run("sweep", "--suite", str(suite), "--db", database, *quick, *few)
        run("explain", "gemm", "--shape", "512,64,256", "--db", database)


def run(*words: str) -> None:
    """Run a command in this process, as ``python -m lokakern.bench WORDS``."""
    code = app(words, standalone_mode=False)
    if code:
        raise SystemExit(f"{words[0]} ended with {code}")


if __name__ == "__main__":
    main()
