"""Planted faults that the tests must find. `make mutants` runs them."""
