"""``python -m lokakern.bench``."""

from lokakern.bench.cli import main

main()
