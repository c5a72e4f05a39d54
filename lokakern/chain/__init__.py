"""`dispatch_chain`: kernels and output formats of consecutive layers, chosen together."""
