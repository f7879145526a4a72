"""corridor: a walk through rooms, each with a sign and three doors; which door a sign means is learnt from the reward alone.

The miniature of an agent's episode for experiments on two cores: several turns, thinking before each action, observations that
no one sampled, one reward at the end. `environment.py` walks and judges, `language.py` is the 55 words that are spoken there,
`wanderer.py` the demonstrator of the warm start: it opens any door.
"""
