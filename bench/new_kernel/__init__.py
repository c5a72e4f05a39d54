"""Templates of kernels in a package of the user's own."""
