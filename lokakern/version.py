"""The version of lokakern."""

__version__ = "0.1.0"
