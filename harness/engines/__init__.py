"""Clients of inference engines: one small contract, token ids in, token ids with log-probs and versions out."""
