"""Problems, suites and input distributions to measure."""
