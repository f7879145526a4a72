"""python_tir: mathematics with a Python tool, judged by the last boxed answer.

`environment.py` gives an episode its problem, its tool and its verdict; `repl.py` and `repl_program.py` are the persistent
Python; `grading.py`, `judge.py` and `equivalence.py` judge; `rows.py` reads problems, `synthetic.py` makes them; `audit.py`
measures the grader; `expert.py` and `tokenizer.py` serve the tiny policy.
"""
