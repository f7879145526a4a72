"""Which limit of its container a command ran into: the kernel's counters, read by the command's own shell.

Flows in: the shell's answer to `script`. Flows out: "memory", "pids" or "". The shell reads without forking, because it cannot
fork where the processes are used up; and it costs no engine call.
"""

from __future__ import annotations

import re

from harness.sandboxes.shell import Limit

NO_FORK = "Resource temporarily unavailable"
"""What a shell says that cannot fork; its exit code may be 0 all the same."""

# The same under cgroup version 1 and 2; the files of the other version do not exist.
_FILES: tuple[tuple[Limit, str], ...] = (
    ("memory", "/sys/fs/cgroup/memory/memory.oom_control"),
    ("memory", "/sys/fs/cgroup/memory.events"),
    ("pids", "/sys/fs/cgroup/pids/pids.events"),
    ("pids", "/sys/fs/cgroup/pids.events"),
)


class Counters:
    """Kills and refusals counted so far in one container."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def clear(self) -> None:
        """The container was started again: the kernel counts from 0."""
        self._seen.clear()

    @staticmethod
    def script(nonce: str) -> str:
        """A command that prints the counters, whatever `set` and `cd` the shell has seen."""
        loop = (
            "{ while builtin read -r; do builtin printf '%s %s %s\\n' NONCE LIMIT \"$REPLY\"; done < FILE; } 2>/dev/null || :; "
        )
        return "".join(loop.replace("LIMIT", limit).replace("FILE", file) for limit, file in _FILES).replace("NONCE", nonce)

    def hit(self, nonce: str, output: str) -> Limit:
        """The limit whose counter has grown since the last answer."""
        found = re.findall(rf"^{nonce} (memory oom_kill|pids max) (\d+)$", output, re.MULTILINE)
        before, self._seen = self._seen, {name: int(count) for name, count in found}
        grown = [name for name, count in self._seen.items() if count > before.get(name, 0)]
        return "memory" if "memory oom_kill" in grown else "pids" if "pids max" in grown else ""
