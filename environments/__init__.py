"""What the agent must do and how it is judged. Knows `harness` only."""
