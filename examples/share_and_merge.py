"""Share and merge databases: join two of them, and import a file of another user with caution.

Measures one shape into each of two databases, merges them, exports the measurements of this
machine, and imports the file into a third database, as another user would. Prints the output of
each command, and shows that both orders of merging give the same rows.
"""

import tempfile
from pathlib import Path

from lokakern.bench.cli.main import app  # python -m lokakern.bench
from lokakern.device import current_device


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second, both, again, shared, third = (
            str(Path(folder, f"{name}.sqlite"))
            for name in ("first", "second", "both", "again", "shared", "third")
        )
        quick = ["--grade", "quick", "--errors", "none", "--kernel", "torch.bf16", "--quiet"]
        run("sweep", "--shape", "512,256,128", "--db", first, *quick)
        run("sweep", "--shape", "512,128,256", "--db", second, *quick)

        run("merge", first, second, "--out", both)
        run("merge", second, first, "--out", again)
        run("diff", both, again)  # no difference: the order does not matter

        run("export", shared, "--device", current_device().product, "--db", both)
        run("import", shared, "--into", third)  # every row is checked, all or none
        # python -m lokakern.bench verify repeats some measurements and accepts the rows that hold


def run(*words: str) -> None:
    """Run a command in this process, as ``python -m lokakern.bench WORDS``."""
    print(f"$ python -m lokakern.bench {' '.join(Path(word).name for word in words)}")
    code = app(words, standalone_mode=False)
    if code:
        raise SystemExit(f"{words[0]} ended with {code}")


if __name__ == "__main__":
    main()
