"""Who acts in a sandbox. Knows `harness` only; tokens are recorded by the session, never here."""
