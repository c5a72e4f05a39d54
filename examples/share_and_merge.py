"""Share and merge: two databases become one, and a file of others is taken in with caution.

Measures one shape into each of two databases, merges them, exports what is known of this machine,
and imports that file into a third, as a stranger would. Prints what each command says, and that
the two ways of merging give the same rows.
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
        run("diff", both, again)  # the order does not matter: no difference

        run("export", shared, "--device", current_device().product, "--db", both)
        run("import", shared, "--into", third)  # every row is checked, all or none
        # python -m lokakern.bench verify measures some of it again, and believes what holds


def run(*words: str) -> None:
    """Run a command in this process, as ``python -m lokakern.bench WORDS``."""
    print(f"$ python -m lokakern.bench {' '.join(Path(word).name for word in words)}")
    code = app(words, standalone_mode=False)
    if code:
        raise SystemExit(f"{words[0]} ended with {code}")


if __name__ == "__main__":
    main()
