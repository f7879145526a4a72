"""Sandboxes that are a dictionary: instant, for demonstrations, tests and benchmarks. They run trusted code only.

Flows in: files, and commands of one form, `<python> [-I] [-S] script.py arguments...`. Flows out: what they printed.
Scripts run in this process. Each sees its own `sys`, `open` and `print` and imports the dictionary's top-level modules
before installed ones, so the interpreter around it stays as it was. Nothing stops a script from running for ever.
"""

from __future__ import annotations

import builtins
import functools
import io
import posixpath
import shlex
import sys
import traceback
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.errors import SandboxError
from harness.protocols import ByteStream, ExecResult
from harness.task import Task


class MemoryConfig(BaseModel):
    """No options."""

    model_config = ConfigDict(extra="forbid")


class MemorySandboxes:
    """See the module docstring."""

    Config = MemoryConfig

    def __init__(self, config: MemoryConfig, run_id: str) -> None:
        pass

    async def start(self) -> None:
        """Nothing to check."""

    async def acquire(self, task: Task) -> MemorySandbox:
        """An empty dictionary."""
        return MemorySandbox()

    async def close(self) -> None:
        """Nothing outlives its last reference."""

    @classmethod
    def reap(cls, run_id: str | None) -> int:
        """Nothing is ever left."""
        return 0


class MemorySandbox:
    """Files by normalised path."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self._closed = False

    async def fresh(self) -> MemorySandbox:
        """See `Sandbox`."""
        return MemorySandbox()

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        """Run one script; anything else is exit code 127."""
        self._check_open()
        try:
            words = shlex.split(command)
        except ValueError as error:
            return ExecResult(f"memory sandbox: {error}\n", 2)
        isolated = "-I" in words[1:3]
        arguments = [word for i, word in enumerate(words[1:]) if i > 1 or word not in ("-I", "-S")]
        if not words or not posixpath.basename(words[0]).startswith("python") or not arguments:
            return ExecResult(f"memory sandbox: only `python [-I] [-S] script.py ...` can run here: {command}\n", 127)
        return Script(self.files, arguments, isolated).run()

    async def spawn(self, command: Sequence[str], *, tty: bool = False) -> ByteStream:
        """Raises `SandboxError`: there are no programs."""
        raise SandboxError(f"memory sandboxes run no programs: {command[0]}", hint="set sandbox.id to process or docker")

    async def read(self, path: str) -> bytes:
        """See `Sandbox`."""
        self._check_open()
        return _read(self.files, path)

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`."""
        self._check_open()
        self.files[posixpath.normpath(path)] = data

    async def close(self) -> None:
        """Forget the files."""
        self._closed = True
        self.files.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox is closed")


class Script:
    """One run of one script."""

    def __init__(self, files: dict[str, bytes], argv: list[str], isolated: bool) -> None:
        self._files = files
        self._output = io.StringIO()
        self._modules: dict[str, ModuleType] = {}
        self._sys = self._fake_sys(argv, [] if isolated else [posixpath.dirname(argv[0])])
        self._builtins = {
            **vars(builtins),
            "open": self._open,
            "print": self._print,
            "__import__": self._import,
        }

    def run(self) -> ExecResult:
        """Compile and run it as `__main__`."""
        path = self._sys.argv[0]
        try:
            source = _read(self._files, path)
        except FileNotFoundError:
            message = f"can't open file {path!r}: [Errno 2] No such file or directory"
            return ExecResult(f"python: {message}\n", 2)
        try:
            self._run_module("__main__", path, source)
            code = 0
        except SystemExit as exit_:
            code = self._exit_code(exit_.code)
        except BaseException as error:  # whatever a script raises is its output
            if isinstance(error, KeyboardInterrupt):
                raise
            self._print_traceback(error)
            code = 1
        return ExecResult(self._output.getvalue(), code)

    def _exit_code(self, code: object) -> int:
        if code is None or isinstance(code, int):
            return (code or 0) & 0xFF
        self._output.write(f"{code}\n")
        return 1

    def _run_module(self, name: str, path: str, source: bytes) -> ModuleType:
        module = ModuleType(name)
        module.__dict__.update(__builtins__=self._builtins, __file__=path)
        if name != "__main__":
            self._modules[name] = module
        try:
            exec(_compile(source, path), module.__dict__)
        except BaseException:
            self._modules.pop(name, None)
            raise
        return module

    def _fake_sys(self, argv: list[str], path: list[str]) -> Any:
        fake = ModuleType("sys")
        fake.__dict__.update(vars(sys))
        fake.__dict__.update(argv=argv, path=path, stdout=self._output, stderr=self._output, stdin=io.StringIO())
        return fake

    def _import(self, name: str, globals_: Any = None, locals_: Any = None, wanted: Any = (), level: int = 0) -> Any:
        if name == "sys":
            return self._sys
        if level == 0 and "." not in name:
            if name in self._modules:
                return self._modules[name]
            for folder in self._sys.path:
                path = posixpath.normpath(posixpath.join(folder, f"{name}.py"))
                if path in self._files:
                    return self._run_module(name, path, self._files[path])
        return builtins.__import__(name, globals_, locals_, wanted, level)

    def _print(self, *values: object, file: Any = None, **options: Any) -> None:
        print(*values, file=file or self._output, **options)

    def _open(self, path: str, mode: str = "r", *_: object, **__: object) -> io.IOBase:
        if mode in ("r", "rt"):
            return io.StringIO(_read(self._files, path).decode(), newline=None)
        if mode == "rb":
            return io.BytesIO(_read(self._files, path))
        raise ValueError(f"memory sandbox: open() has no mode {mode!r}")

    def _print_traceback(self, error: BaseException) -> None:
        report = traceback.TracebackException.from_exception(error, lookup_lines=False)
        frames = [frame for frame in report.stack if frame.filename != __file__]
        report.stack[:] = [self._with_source(frame) for frame in frames]
        self._output.write("".join(report.format()))

    def _with_source(self, frame: traceback.FrameSummary) -> traceback.FrameSummary:
        source = self._files.get(posixpath.normpath(frame.filename))
        if source is None or frame.lineno is None:
            return frame
        line = source.decode().splitlines()[frame.lineno - 1]
        return traceback.FrameSummary(frame.filename, frame.lineno, frame.name, line=line)


@functools.lru_cache(maxsize=1024)
def _compile(source: bytes, path: str) -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)


def _read(files: dict[str, bytes], path: str) -> bytes:
    try:
        return files[posixpath.normpath(path)]
    except KeyError:
        raise FileNotFoundError(2, "No such file or directory", path) from None
