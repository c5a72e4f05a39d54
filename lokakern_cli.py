"""The command `lokakern`, which helps and refuses wrong usage without importing torch.

`import lokakern` imports torch, which takes seconds, unless `is_starting` says that the command
line imports it: the script that pip makes has to import a module outside of the package.
"""

import sys

is_starting = False


def main() -> None:
    """Run the command line, like ``python -m lokakern.bench``.

    Modules of the current folder are found as by ``python -m``, such as that of ``--model``.
    """
    global is_starting
    if not sys.flags.safe_path:
        sys.path.insert(0, "")
    is_starting = True
    from lokakern.bench.cli.main import main as run

    is_starting = False
    run("lokakern")
