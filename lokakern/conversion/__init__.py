"""`convert`: replaces the products of a model's linear layers by the fastest kernels."""
