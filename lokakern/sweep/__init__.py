"""Sweeps: measuring every kernel of a suite into a database."""
