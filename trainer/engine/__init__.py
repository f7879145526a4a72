"""The embedded engine: a small torch server for machines without vLLM, behind the same HTTP contract."""
