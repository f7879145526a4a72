"""The judge's process: it imports the algebra once and forks for each answer, so that no answer can hold or harm it.

Flows in, on standard input: `{"gold": text, "answer": text}` per line. Flows out: "ready" once, then "right", "wrong" or
"limit" per line: the fork took more than `LIMIT_S` of processor time or `MEMORY` bytes, or crashed. The limit is of processor
time: on a busy machine a verdict comes later, not otherwise.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

from environments.python_tir.equivalence import equivalent

LIMIT_S = 5
MEMORY = 2 << 30


def main() -> None:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.set_int_max_str_digits(0)
    equivalent("x", "y")  # so that every fork has the libraries
    _say("ready")
    for line in sys.stdin:
        question = json.loads(line)
        _say(_in_a_fork(question["gold"], question["answer"]))


def _say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def _in_a_fork(gold: str, answer: str) -> str:
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            code = int(not equivalent(gold, answer))
        except (MemoryError, RecursionError):
            pass
        except Exception:  # noqa: BLE001 - what the libraries cannot read is no right answer
            code = 1
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    return {0: "right", 1: "wrong"}.get(os.waitstatus_to_exitcode(status), "limit")


if __name__ == "__main__":
    main()
