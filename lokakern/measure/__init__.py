"""Measurements of kernels: the Timing contract and the Error contract."""
