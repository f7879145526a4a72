"""Runs a command in its own process group and ends the whole group when standard input closes: `python guard.py COMMAND ...`.

vLLM does not watch its parent. This process becomes the command (same pid, same exit status); a forked watcher keeps the pipe
that our starter holds. When the starter is gone, or has closed the pipe, the watcher asks the command to end, and after
`GRACE_S` kills all of the group. When the command ends first, the watcher kills what it left behind. Linux and the standard
library only.
"""

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

GRACE_S = 20.0
SWEEP_S = 15.0


def watch(command: int, pipe: int) -> None:
    """Wait until `command` (a pidfd) ends or `pipe` closes; then it is asked to end."""
    while command not in (ready := select.select([command, pipe], [], [])[0]):
        if pipe in ready and not os.read(pipe, 4096):
            signal.pidfd_send_signal(command, signal.SIGTERM)
            select.select([command], [], [], GRACE_S)
            return


def kill_but_trackers() -> None:
    """Kill the group but Python's resource trackers, which then remove the dead processes' shared memory and end."""
    trackers = []
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        with suppress(ProcessLookupError, FileNotFoundError):
            if pid == os.getpid() or os.getpgid(pid) != os.getpgrp():
                continue
            if b"multiprocessing.resource_tracker" in (process / "cmdline").read_bytes():
                trackers.append(os.pidfd_open(pid))
            else:
                os.kill(pid, signal.SIGKILL)
    for tracker in trackers:
        select.select([tracker], [], [], SWEEP_S)


def main() -> None:
    """Fork the watcher, then become the command."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    command = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            watch(command, sys.stdin.fileno())
            kill_but_trackers()
        finally:
            os.killpg(0, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
