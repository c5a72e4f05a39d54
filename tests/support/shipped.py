"""The shipped database files by GPU type."""

from lokakern.registry.storage.paths import shipped_databases

_BY_NAME = {path.name: path for path in shipped_databases()}
H100_FILE = _BY_NAME["nvidia-h100.sqlite"]
H200_FILE = _BY_NAME["nvidia-h200.sqlite"]
