"""The way to a Docker engine on another machine: one `ssh` that carries a unix socket here to the engine's there.

Flows in: ssh://user@host:port/socket. Flows out: the path of a socket on this machine. The remote command ends with its
standard input, so a killed harness leaves no tunnel.
"""

from __future__ import annotations

import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from threading import Lock
from urllib.parse import urlsplit

from harness.errors import ConfigError, SandboxError

READY_S = 30.0
OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=15"),
    *("-o", "ExitOnForwardFailure=yes"),
    *("-o", "ServerAliveInterval=15"),
    *("-o", "StreamLocalBindUnlink=yes"),
)


class Tunnel:
    """Open from its construction on; `ensure` opens it again."""

    def __init__(self, url: str) -> None:
        if shutil.which("ssh") is None:
            raise ConfigError(f"engine {url} needs `ssh`, which is not on PATH", hint="install openssh-client")
        self._url, self._there = url, urlsplit(url)
        self._folder = Path(tempfile.mkdtemp(prefix="sao-ssh-"))
        self.socket = self._folder / "docker.sock"
        self._lock = Lock()
        self._ssh: subprocess.Popen[bytes] | None = None
        try:
            self.ensure()
        except SandboxError as error:
            self.close()
            raise ConfigError(error.message, hint=error.hint) from error

    def ensure(self) -> None:
        """Open it unless it is open. Raises `SandboxError`."""
        with self._lock:
            if self._ssh is None or self._ssh.poll() is not None:
                self._end()
                self._open()

    def close(self) -> None:
        """End the ssh."""
        with self._lock:
            self._end()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self) -> None:
        there = self._there
        target = f"{there.username}@{there.hostname}" if there.username else str(there.hostname)
        forward = f"{self.socket}:{there.path or '/var/run/docker.sock'}"
        port = ["-p", str(there.port)] if there.port else []
        with (self._folder / "log").open("wb") as log:
            self._ssh = subprocess.Popen(
                ["ssh", *OPTIONS, *port, "-L", forward, target, "echo ready; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the harness, which still has containers to remove through it
            )
        assert self._ssh.stdout is not None
        # The forward is set up before the remote command begins.
        said = self._ssh.stdout.readline() if select.select([self._ssh.stdout], [], [], READY_S)[0] else b""
        if said != b"ready\n":
            self._end()
            reason = (self._folder / "log").read_text(errors="replace").strip() or f"no answer within {READY_S:g} s"
            raise SandboxError(f"engine {self._url}: ssh: {reason}", hint=f"`ssh -o BatchMode=yes {target} true` must work")

    def _end(self) -> None:
        if self._ssh is not None:
            self._ssh.kill()
            self._ssh.communicate()
            self._ssh = None
