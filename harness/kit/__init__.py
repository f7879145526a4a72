"""The kit for one's own environments: `sao init env` writes a package (`init.py`), `sao check` runs the contract suite.

`check.py` runs the checks of `tasks.py`, `episodes.py`, `secrets.py` and `trouble.py`, whose verdicts `verdicts.py` words.
`play.py` plays scripted episodes, each watched by `watch.py`; `rubbish.py` is what a model may write; `leaks.py` and
`stalls.py` see what an episode leaves behind and what blocks the event loop. `elsewhere.py` asks other processes:
`digest.py` for the tasks, `replies.py` for what tools reply.
"""
