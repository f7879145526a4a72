"""Where torch lives: model, critic, advantages, losses, optimizer step, embedded engine. Knows `harness` only."""
