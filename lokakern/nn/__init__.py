"""Modules whose products run on chosen kernels."""
