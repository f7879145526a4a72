"""Benchmarks, one file each with `main()`; each prints a JSON line per comparison, both sides measured in the same run."""
