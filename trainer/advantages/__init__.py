"""Advantage estimators, one file each, pure functions of packed tensors."""
