"""``python -m lokakern.bench``."""

from lokakern.bench.cli.main import main

main()
