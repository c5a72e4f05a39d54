"""The schema of the benchmark database."""
