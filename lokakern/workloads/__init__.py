"""What is measured: problems, suites, input distributions."""
