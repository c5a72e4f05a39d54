"""Ahead-of-time compilation of kernels in worker processes."""
