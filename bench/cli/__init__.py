"""The command line, `python -m lokakern.bench`."""
