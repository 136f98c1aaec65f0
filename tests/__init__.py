"""The tests, as a package: tests and benchmarks share `tests.cases`."""
