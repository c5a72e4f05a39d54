"""Predicted times at sizes without measurements, with intervals of the speedup over bfloat16."""
