"""online_writing: write in the style that the reader prefers today; the preference switches twice during training.

The paper's simulation of online learning (arXiv 2607.07508, section 4.5). `stream.py` says which style is preferred when,
`environment.py` asks and judges. The writing comes in two forms: `symbols` (tier A: a language of 60 words for a tiny policy,
with `tokenizer.py`, the demonstrator `expert.py` and the warm policy's `gate.py`) and `texts` (tier B: English for an
instruct model, judged by `lexicon.py` or by the model behind `llm_judge.py`).
"""
