"""The Python of an episode, as it runs in the sandbox: a supervisor that speaks the protocol, a forked worker that runs the
cells.

Flows in, on standard input: `{"cell": n, "code": text, "seconds": limit}` per line. Flows out: `{"ready": true}` once, then for
each cell `{"cell": n, "output": text, "end": how, "why": text}`. `end` is "ok", "error" (a traceback is the last of the
output), "interrupted" (at the limit; the state is kept), "killed" (it went on after that) or "died" (`why` names exit code or
signal); after the last two the next cell has a new worker without state.

The worker has the null device as input and one pipe as output and errors, so that what its subprocesses write is captured
too. The supervisor reads that pipe to the end and keeps the first and the last `HALF` bytes. The worker holds none of the
protocol's descriptors. This file is sent to the sandbox as text: standard library, Python 3.8 and later.
"""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import os
import select
import signal
import sys
import time
import traceback
import types

HALF = 4_000
"""Bytes of a cell's output that are kept at its beginning, and at its end."""
GRACE_S = 2.0
"""Time to stop after the interrupt."""
TICK_S = 0.1
CHUNK = 1 << 20


class Capture:
    """The two ends of an output of any length."""

    def __init__(self) -> None:
        self._head, self._tail, self._total = b"", b"", 0

    def add(self, data: bytes) -> None:
        """The next bytes."""
        self._total += len(data)
        room = HALF - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-HALF:]

    def text(self) -> str:
        """What is kept, the gap marked."""
        gap = self._total - len(self._head) - len(self._tail)
        if not gap:
            return (self._head + self._tail).decode("utf-8", "replace")
        head, tail = self._head.decode("utf-8", "replace"), self._tail.decode("utf-8", "replace")
        return f"{head}\n[... {gap} bytes left out ...]\n{tail}"


# --- the supervisor --------------------------------------------------------------------------------------------------


class Worker:
    """A forked process with the state of the cells so far."""

    def __init__(self) -> None:
        code, self._code = os.pipe()
        self._done, done = os.pipe()
        self._output, output = os.pipe()
        self._ended, self._status = False, 0
        self.pid = os.fork()
        if self.pid == 0:
            _become_worker(code, done, output)
        for descriptor in (code, done, output):
            os.close(descriptor)
        os.set_blocking(self._output, False)

    def run(self, number: int, code: str, seconds: float) -> dict[str, object]:
        """One cell, to its end or its limit."""
        capture, answer, mark = Capture(), b"", b"%d " % number
        line = json.dumps({"cell": number, "code": code}).encode() + b"\n"
        deadline, interrupted, end = time.monotonic() + seconds, False, "died"
        try:
            while line:
                line = line[os.write(self._code, line) :]
        except BrokenPipeError:
            pass  # it has ended since the last cell
        while not self._has_ended():
            wait = min(TICK_S, max(0.0, deadline - time.monotonic()))
            ready = select.select([self._output, self._done], [], [], wait)[0]
            if self._output in ready:
                capture.add(self._read())
            if self._done in ready:
                data = os.read(self._done, CHUNK)
                answer = (answer + data)[-1000:]
                ends = [word[len(mark) :] for word in answer.split(b"\n")[:-1] if word.startswith(mark)]
                if ends:
                    capture.add(self._read())
                    end = "interrupted" if interrupted else "ok" if ends[0] == b"ok" else "error"
                    return {"output": capture.text(), "end": end, "why": ""}
                if not data:
                    break
            elif time.monotonic() >= deadline and not interrupted:
                interrupted, deadline = True, deadline + GRACE_S
                self._signal(signal.SIGINT)
            elif time.monotonic() >= deadline:
                end = "killed"
                break
        self.end()
        capture.add(self._read())
        for descriptor in (self._code, self._done, self._output):
            os.close(descriptor)
        why = f"signal {self._status & 0x7F}" if self._status & 0x7F else f"exit code {self._status >> 8}"
        return {"output": capture.text(), "end": end, "why": why}

    def end(self) -> None:
        """Kill it, if it lives, and what it has started in its process group."""
        self._signal(signal.SIGKILL)
        if not self._ended:
            self._status, self._ended = os.waitpid(self.pid, 0)[1], True

    def _has_ended(self) -> bool:
        """Asked for again and again: children of it may hold its pipes open."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self._status, self._ended = status, True
        return self._ended

    def _signal(self, number: int) -> None:
        for kill, target in ((os.killpg, self.pid), (os.kill, self.pid)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(target, number)

    def _read(self) -> bytes:
        try:
            return os.read(self._output, CHUNK)
        except BlockingIOError:
            return b""


def supervise() -> None:
    """Serve cells until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker: Worker | None = Worker()
    _say({"ready": True})
    pending = b""
    while True:
        line, newline, pending = pending.partition(b"\n")
        if not newline:
            data = os.read(0, CHUNK)
            if not data:
                break
            pending = line + data
            continue
        request = json.loads(line)
        worker = worker or Worker()
        answer = worker.run(request["cell"], request["code"], request["seconds"])
        if answer["end"] in ("killed", "died"):
            worker = None
        _say({"cell": request["cell"], **answer})
    if worker is not None:
        worker.end()


def _say(message: dict[str, object]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


# --- the worker ------------------------------------------------------------------------------------------------------


def _become_worker(code: int, done: int, output: int) -> None:
    try:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, number in ((null, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, number)
        for number in range(3, max(code, done, output, null) + 1):
            if number not in (code, done):
                with contextlib.suppress(OSError):
                    os.close(number)
        _prefer_for_memory()
        _run_cells(code, done)
    finally:
        os._exit(1)


def _prefer_for_memory() -> None:
    """Where memory runs out, the kernel is to kill this process and not the supervisor."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def _run_cells(code: int, done: int) -> None:
    me = os.getpid()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = [""]
    sys.path.insert(0, "")
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = open(number, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    with open(code, "rb") as requests:
        for line in requests:
            request = json.loads(line)
            end = b"error"
            try:
                end = _run_cell(request["cell"], request["code"], main.__dict__)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            except KeyboardInterrupt:  # between the end of the cell and the line above
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            if os.getpid() != me:  # forked in the cell
                os._exit(0)
            os.write(done, b"%d %s\n" % (request["cell"], end))


def _run_cell(number: int, code: str, space: dict[str, object]) -> bytes:
    name = f"<cell {number}>"
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        statements = compile(tree, name, "exec", dont_inherit=True)
        value = compile(ast.Expression(last.value), name, "eval", dont_inherit=True) if isinstance(last, ast.Expr) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        _print_error(error, None)
        return b"error"
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exec(statements, space)
        if value is not None:
            result = eval(value, space)
            if result is not None:
                space["_"] = result
                sys.stdout.write(repr(result) + "\n")
    except SystemExit as end:
        _print(f"SystemExit: {end.code}\n")
        return b"error"
    except BaseException as error:  # noqa: BLE001 - whatever a cell raises is its output
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _print_error(error, error.__traceback__ and error.__traceback__.tb_next)
        return b"error"
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    return b"ok"


def _print_error(error: BaseException, trace: types.TracebackType | None) -> None:
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception:  # noqa: BLE001 - an error whose text raises
        text = f"{type(error).__name__}\n"
    _print(text)


def _print(text: str) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(2, data) :]


if __name__ == "__main__":
    supervise()
