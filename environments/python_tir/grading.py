"""The verdict on a reply: its last box, judged by `equivalence.py` where that is quick and safe, else in a killable process.

Flows in: the right answer and a reply. Flows out: a `Verdict`. An answer that takes the judge too long or too much memory is
the policy's doing and wrong; a judge that does not start is a `VerifierFault`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import LifoQueue
from typing import IO

from environments.python_tir.equivalence import plain
from harness.errors import ConfigError, VerifierFault

INSTALL = 'pip install "math-verify>=0.9,<0.10" antlr4-python3-runtime==4.13.2'
JUDGES = 2
START_S = 120.0
WALL_S = 60.0
"""For one judgement, on a machine on which its processor time comes slowly."""
BRACES = re.compile(r"(?P<open>(?:\\(?:boxed|fbox)\s*)?\{)|(?P<close>\})|\\.", re.DOTALL)
ANSWER_MAX = 4_000
"""Characters; a longer answer is wrong."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an answer is right, and what has decided it: "plain", "algebra", "limit" (time or memory) or "length"."""

    correct: bool
    by: str


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{}` (or `\\fbox{}`) that is closed and not empty; None without one."""
    found, last = None, -1
    opened: list[int | None] = []
    for token in BRACES.finditer(text):
        if token["open"]:
            opened.append(token.end() if len(token[0]) > 1 else None)
        elif token["close"] and opened:
            start = opened.pop()
            if start is not None and start > last and (inside := text[start : token.start()].strip()):
                found, last = inside, start
    return found


class Grader:
    """Judges answers; its processes start with the first that needs one, and end with this process."""

    def __init__(self, judges: int = JUDGES) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("answers are judged by math-verify, which is missing", hint=INSTALL)
        self._threads = ThreadPoolExecutor(judges, thread_name_prefix="python_tir-judge")
        self._idle: LifoQueue[Judge | None] = LifoQueue()
        for _ in range(judges):
            self._idle.put(None)

    async def grade(self, gold: str, answer: str) -> Verdict:
        """The verdict. Raises `VerifierFault` if no judge can be had."""
        if len(answer) > ANSWER_MAX:
            return Verdict(False, "length")
        if (verdict := plain(gold, answer)) is not None:
            return Verdict(verdict, "plain")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._judged, gold, answer)

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown()
        while not self._idle.empty():
            if judge := self._idle.get():
                judge.kill()

    def _judged(self, gold: str, answer: str) -> Verdict:
        judge = self._idle.get()
        try:
            judge = judge or Judge()
            said = judge.ask(gold, answer)
            if said is None:
                judge.kill()
                judge = None
                return Verdict(False, "limit")
            return Verdict(said == "right", "limit" if said == "limit" else "algebra")
        except BaseException:
            if judge is not None:
                judge.kill()
            judge = None
            raise
        finally:
            self._idle.put(judge)


class Judge:
    """One process that runs `judge.py`."""

    def __init__(self) -> None:
        command = (sys.executable, "-m", "environments.python_tir.judge")
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True)
        if (said := self._line(START_S)) != "ready":
            self.kill()
            raise VerifierFault(f"the judge of answers does not start: {said!r}", hint="run: " + " ".join(command[1:]))

    def ask(self, gold: str, answer: str) -> str | None:
        """ "right", "wrong" or "limit"; None if it has not answered in time. Raises `VerifierFault` if it is dead."""
        try:
            self._stdin.write(json.dumps({"gold": gold, "answer": answer}).encode() + b"\n")
            self._stdin.flush()
        except OSError as error:
            raise VerifierFault(f"the judge of answers has ended: {error}") from error
        said = self._line(WALL_S)
        if said == "":
            raise VerifierFault("the judge of answers has ended")
        return said

    def kill(self) -> None:
        """End it, and with it what it forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._stdin.close()
        self._stdout.close()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _line(self, seconds: float) -> str | None:
        """Its next line; "" at its end; None if none comes in time. Lines come alone, one per question."""
        if not select.select([self._stdout], [], [], seconds)[0]:
            return None
        return self._stdout.readline().decode().strip()
