"""Held-out evaluation and its statistics. Reaches the other folders through the registry only."""
