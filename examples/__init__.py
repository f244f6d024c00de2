"""Runnable examples; the tests and benchmarks share their decoder and their text."""
