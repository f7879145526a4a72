"""Experiments: arms x seeds as one command, and the paper's tables and figures from their run folders.

`matrix.py` says what is run, `runner.py` runs it, `curves.py` reads what came out, `report.py` writes the tables and
`figures.py` the curves; `paper.toml` has the paper's numbers.
"""
