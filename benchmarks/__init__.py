"""Benchmarks, one file each with `main()`; each prints one JSON line, both sides measured in the same run."""
