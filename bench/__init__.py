"""Measuring kernels: sweeps, suites, distributions, comparisons."""
