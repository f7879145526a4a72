"""corridor: a walk through rooms, each with a sign and three doors; every door that the signs mean has to be opened.

The miniature of an agent's episode for experiments on two cores: several turns, thinking before each action, observations that
no one sampled, one reward at the end. `environment.py` walks and judges, `language.py` is the 51 words that are spoken there,
`wanderer.py` the demonstrator of the warm start, which often opens any door.
"""
