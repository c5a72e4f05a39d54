"""Kernels, ops, and the database of what was measured."""
