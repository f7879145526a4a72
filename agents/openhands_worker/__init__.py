"""The process in which OpenHands' conversation loops run; its interpreter needs openhands-sdk and openhands-tools, not us.

`wire.py` is the pipe to the harness, `link.py` its calls, `model.py` the LLM that asks the harness, `terminal.py` and
`editor.py` the stock tools acting in a sandbox, `episode.py` one conversation. Imports nothing of the harness.
"""
