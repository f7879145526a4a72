"""The shell protocol against a real bash, and against every way a stream can be cut."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import uuid

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.protocols import ExecResult
from harness.sandboxes.process import ProcessSandboxes
from harness.sandboxes.shell import CappedOutput, Shell
from tests.contracts.sandbox_support import (
    COMMAND_S,
    TASK,
)

pytestmark = pytest.mark.timeout(180)

# --- the shell protocol ----------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=200)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_printf_gives_any_text_back() -> None:
    with asyncio.Runner() as runner:
        provider = ProcessSandboxes(ProcessSandboxes.Config(), f"test-{uuid.uuid4().hex[:8]}")
        runner.run(provider.start())
        sandbox = runner.run(provider.acquire(TASK))

        @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(TEXT)
        def round_trip(text: str) -> None:
            result = runner.run(sandbox.exec(f"printf %s {shlex.quote(text)}", timeout_s=COMMAND_S))
            assert result == ExecResult(text, 0)

        @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(TEXT)
        def any_command(text: str) -> None:
            # In a subshell and without redirections it may fail, but can neither hang nor break the next command.
            harmless = text.translate({ord(char): "_" for char in "><|&;(){}`$\n\\"})
            runner.run(sandbox.exec(f"( : {harmless}", timeout_s=COMMAND_S))
            assert runner.run(sandbox.exec("echo fine", timeout_s=COMMAND_S)) == ExecResult("fine\n", 0)

        try:
            round_trip()
            any_command()
        finally:
            runner.run(provider.close())


class ScriptedStream:
    """Answers every command with the same bytes, in pieces of given sizes."""

    def __init__(self, output: bytes, sizes: list[int]) -> None:
        self._output, self._sizes = output, sizes
        self._waiting = b""

    async def write(self, data: bytes) -> None:
        """Take a command and queue its answer."""
        words = data.split()
        if words[0] != b"sao-go":
            self._waiting += self._output + b"\n" + words[-4] + b" 7 /folder\n"

    async def read(self) -> bytes:
        """The next piece."""
        self._sizes.append(size := self._sizes.pop(0))
        piece, self._waiting = self._waiting[:size], self._waiting[size:]
        return piece


@given(st.binary(max_size=300) | TEXT.map(str.encode), st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_the_marker_is_found_however_the_stream_is_cut(output: bytes, sizes: list[int]) -> None:
    async def main() -> None:
        stream = ScriptedStream(output, sizes)

        async def opened() -> ScriptedStream:
            return stream

        async def killed() -> None:
            raise AssertionError("nothing is to be killed")

        shell = Shell(opened, killed)
        for _ in range(2):
            result = await shell.exec("anything", timeout_s=COMMAND_S)
            assert result == ExecResult(output.decode(errors="replace"), 7)

    asyncio.run(main())


@given(st.lists(st.binary(max_size=40)), st.integers(1, 20))
def test_capped_output_keeps_both_ends(pieces: list[bytes], half: int) -> None:
    whole, output = b"".join(pieces), CappedOutput(2 * half)
    for piece in pieces:
        output.add(piece)
    gap = f"\n[... {len(whole) - 2 * half} bytes left out ...]\n".encode()
    expected = whole if len(whole) <= 2 * half else whole[:half] + gap + whole[-half:]
    assert output.text() == expected.decode(errors="replace")
