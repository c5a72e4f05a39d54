"""The command line, `python -m lokakern.bench`."""

from lokakern.bench.cli.main import app as app
