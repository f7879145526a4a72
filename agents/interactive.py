"""An interactive bash on a terminal of a sandbox: which bytes are whose output, and when a command has ended.

Flows in: commands (any text) and keys. Flows out: output, and a `Prompt` when bash waits for the next command. What bash
says to us goes to its terminal between \\x1e and \\x1f, with a secret that no output holds by chance:

    us    { ..printf start N.. } 2>/dev/null; eval $'<text>'; ..printf prompt..   printable, in lines that a terminal takes
    bash  \\x1e <secret> s <N> \\x1f                                  what comes before it is not the command's
    bash  \\x1e <secret> p <exit code> <job> <python> <folder> \\x1f  the line is done or (PROMPT_COMMAND) was interrupted
    outer \\x1e <secret> x <exit code> \\x1f                          bash has ended (`exit 3`, `kill -9 $$`)

No process is started per command. A command keeps the terminal as its input, and a shell inside the shell prompts as well,
for it inherits PROMPT_COMMAND. A task reads all the time, so that no program waits for us while the model thinks, unless
it floods us.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import dataclass

from harness.protocols import ByteStream, Sandbox
from harness.sandboxes.shell import OUTPUT_CAP, CappedOutput

ENVIRONMENT = ("PAGER=cat", "GIT_PAGER=cat", "MANPAGER=cat")
SIZE = "rows 200 cols 256"
LINE = 500
"""Bytes of a command that are sent in one line, at most four characters each: a terminal cuts lines longer than 4095."""
SEND_S = 5.0
"""How long to wait for somebody who reads; what is not read then is sent when it is."""
FLOOD = 1 << 24
"""Bytes of output that are read while nobody waits for it; who says more than that is stopped until somebody does."""
HELD = 256

# Unfinished UTF-8 and escape sequences at the end of what has come so far.
_UNFINISHED = re.compile(
    rb"(?:[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2}|"
    rb"\x1b(?:\[[0-9;>]*|\][^\x07\x1b]*\x1b?|P[^\x1b]*\x1b?)?)\Z"
)
# How readline asks to be told what is pasted.
_PASTE = re.compile(rb"\x1b\[\?2004[hl]")
# Questions to the terminal, which would be answered when they are shown: cursor, colours, attributes, settings.
_QUESTION = re.compile(
    r"\x1b\[\?2004[hl]|\x1b\[6n|\x1b\[>?0?c|\x1b\]\d+(?:;[^;\x07\x1b]*)?;\?(?:\x07|\x1b\\)|\x1bP\$q[^\x1b]*\x1b\\",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What bash says of itself when it waits for a command. `job`: the last process in the background, or -1."""

    exit_code: int
    folder: str
    python: str
    job: int


class InteractiveBash:
    """See the module docstring."""

    def __init__(self, stream: ByteStream, secret: str) -> None:
        self.prompt: Prompt | None = None
        """That bash waits for a command."""
        self.exit_code: int | None = None
        """Bash's own, if it has ended and that is known."""
        self.changed = 0.0
        """When there was output last, by the event loop's clock."""
        self._stream, self._secret = stream, secret
        self._mark = re.compile(rb"\x1e%s\x1d([^\x1f]*)\x1f" % secret.encode())
        self._unread = bytearray()
        self._output, self._idle = CappedOutput(OUTPUT_CAP), CappedOutput(OUTPUT_CAP)
        self._before = bytearray()
        self._number = 0
        self._started = False
        self._echoed = False
        self._unseen = 0
        self._news, self._awaited = asyncio.Event(), asyncio.Event()
        self._listening = asyncio.create_task(self._listen())
        self._listening.add_done_callback(lambda _: self._news.set())

    @classmethod
    async def open(cls, sandbox: Sandbox) -> InteractiveBash:
        """Start it in the sandbox's folder."""
        secret = secrets.token_hex(16)
        environment = (*ENVIRONMENT, f"PROMPT_COMMAND={_tell(secret, '$?')}")
        outer = (
            f"trap : INT QUIT TSTP; stty -echo {SIZE}; exec 2>/dev/null; bash --noprofile --norc --noediting -i 2>&1; code=$?; "
            f"trap '' TTOU; printf '\\036{secret}\\035x\\035%d\\037' $code"
        )
        command = ("env", *environment, "bash", "--noprofile", "--norc", "-c", outer)
        return cls(await sandbox.spawn(command, tty=True), secret)

    @property
    def ended(self) -> bool:
        """Whether bash is no more. Raises `SandboxError` if that is because the sandbox is lost."""
        if self._listening.done():
            self._listening.result()
            return True
        return self.exit_code is not None

    async def start(self, command: str) -> None:
        """Begin a command, where bash waits for one."""
        self._output.add(self._idle.text().encode())
        self._idle = CappedOutput(OUTPUT_CAP)
        self._before.clear()
        self._number += 1
        self.prompt, self._started, self._echoed = None, False, False
        # An empty line, because there may be half a line of what was typed, and bash forgets a quote that was never closed.
        # What the command before has left in $? is there again, for which only a failed one costs a process.
        await self.send(
            (
                '\n{ __sao_q=${__sao_rc:-$?} __sao_rc=; [ "$__sao_q" != 0 ] || __sao_q=; '
                f"\\builtin printf -v PROMPT_COMMAND %s '{_tell(self._secret, '$?')}'; "
                f'\\builtin printf "\\036{self._secret}\\035s\\035{self._number}\\037" >/dev/tty; }} 2>/dev/null; \\\n'
                f'\\builtin eval -- {_quoted(command)}${{__sao_q:+$(\\builtin exit "$__sao_q")}}; \\\n'
                "{ __sao_rc=$?; \\builtin hash python || :; __sao_python=${BASH_CMDS[python]-}; "
                f"{_tell(self._secret, '$__sao_rc')}; }} 2>/dev/null\n"
            ).encode()
        )

    async def press(self, keys: bytes) -> None:
        """Send keys to what runs; one that interrupts must not do so before our line is read."""
        until = asyncio.get_running_loop().time() + SEND_S
        while not self._started and not self.ended and asyncio.get_running_loop().time() < until:
            await self.wait(until)
        self._started = True
        if self.prompt is None:
            await self.send(keys)

    async def send(self, data: bytes) -> None:
        """Send bytes. Nobody may read them: that shows in what comes next."""
        try:
            async with asyncio.timeout(SEND_S):
                await self._stream.write(data)
        except (TimeoutError, ConnectionError):
            pass

    async def wait(self, until: float) -> None:
        """Wait for output, a prompt or the end, at most until that time of the event loop's clock."""
        self._awaited.set()
        try:
            async with asyncio.timeout_at(until):
                await self._news.wait()
        except TimeoutError:
            pass
        finally:
            self._awaited.clear()
        self._news.clear()

    def take(self) -> str:
        """The output that has not been taken."""
        if not self._started:
            self._begin()
        text = self._output.text()
        self._output, self._unseen = CappedOutput(OUTPUT_CAP), 0
        return _QUESTION.sub("", text).replace("\r", "")

    async def close(self) -> None:
        """End it and what it has started. Safe to call twice."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        await self._stream.close()

    # --- what comes --------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while data := await self._stream.read():
            self._unread += data
            while found := self._mark.search(self._unread):
                self._add(bytes(self._unread[: found.start()]))
                kind, *fields = found[1].split(b"\x1d")
                del self._unread[: found.end()]
                self._told(kind, [field.decode(errors="replace").replace("\r", "") for field in fields])
            done = self._finished()
            self._add(bytes(self._unread[:done]))
            del self._unread[:done]
            self._news.set()
            self._unseen += len(data)
            if self._unseen > FLOOD:
                await self._awaited.wait()
        self._add(bytes(self._unread))

    def _finished(self) -> int:
        """How much of what has come is no beginning of something that we must see whole."""
        unread, head = self._unread, b"\x1e" + self._secret.encode() + b"\x1d"
        at = unread.rfind(b"\x1e")
        if at >= 0 and len(unread) - at < OUTPUT_CAP and (unread.startswith(head, at) or head.startswith(unread[at:])):
            return at
        cut = max(0, len(unread) - HELD)
        unfinished = _UNFINISHED.search(unread, cut)
        return unfinished.start() if unfinished else len(unread)

    def _told(self, kind: bytes, fields: list[str]) -> None:
        if kind == b"s" and fields == [str(self._number)]:
            self._begin()
            self._started = True
        elif kind == b"p" and self._started and self.prompt is None and len(fields) == 4:
            code, job, python, folder = fields
            self.prompt = Prompt(_number(code), folder, python, _number(job))
        elif kind == b"x":
            self.exit_code = _number(fields[0])

    def _begin(self) -> None:
        """What the background has said is output; what readline says of the lines that it reads is none."""
        if _PASTE.sub(b"", bytes(self._before)).strip():
            self._output.add(bytes(self._before))
        self._before.clear()

    def _add(self, data: bytes) -> None:
        if not data:
            return
        self.changed = asyncio.get_running_loop().time()
        if self.prompt is not None:
            self._idle.add(data)
        elif self._started:
            self._output.add(data)
        else:
            # Bash has not begun with our line: here is what the background says, or our own line if something echoes it.
            self._before += data
            if self._echoed or self._secret.encode() in self._before:
                self._echoed = True
                self._before.clear()
            elif len(self._before) > OUTPUT_CAP:
                self._begin()


def _tell(secret: str, code: str) -> str:
    """Bash's words for "I wait for a command"; no ' in it. The prompts themselves stay empty, whatever has set them."""
    form = f'"\\036{secret}\\035p\\035%s\\035%s\\035%s\\035%s\\037"'
    fields = f'"{code}" "${{!:--1}}" "${{__sao_python-}}" "$PWD"'
    return f"{{ \\builtin printf {form} {fields} >/dev/tty; PS1= PS2=; }} 2>/dev/null"


def _quoted(command: str) -> str:
    """One word of shell in printable ASCII, without `!`, cut into lines."""
    characters = [_QUOTED[byte] for byte in command.encode(errors="replace")]
    return "\\\n".join(f"$'{''.join(characters[at : at + LINE])}'" for at in range(0, len(characters) or 1, LINE))


_QUOTED = [chr(byte) if 32 <= byte < 127 and byte not in b"\\'!" else f"\\{byte:03o}" for byte in range(256)]


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"-?\d{1,10}", text) else -1
