"""toy_repair: small generated Python repositories with one planted bug, repaired by looking, editing and checking.

`tasks.py` generates them, `environment.py` puts one into a sandbox with its tools and judges it, `expert.py` is the flawed
scripted demonstrator, `lookup.py` the text that teaches the skill before RL, `tokenizer.py` the tiny policy's vocabulary.
"""
