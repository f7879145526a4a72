"""The kit for one's own environments: `sao init env` writes a package (`init.py`), `sao check` runs the contract suite.

`check.py` runs the checks and words the verdicts; `tasks.py` and `episodes.py` hold them; `play.py` plays scripted episodes,
each watched by `watch.py`; `leaks.py` and `stalls.py` see what an episode leaves behind and what blocks the event loop.
"""
