"""The stock file editor on a local folder, for the agents' interpreter: calls in (JSON), what a model would see out (JSON).

Standard input: {"folder": ..., "calls": [...]}; a call that is a string is a shell command. Standard output: a list of texts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from openhands.sdk.llm import TextContent
from openhands.tools.file_editor.definition import FileEditorAction
from openhands.tools.file_editor.impl import FileEditorExecutor


def play(folder: str, calls: list[Any]) -> list[str]:
    """The texts of all calls; a shell command has none."""
    executor = FileEditorExecutor(workspace_root=folder)
    os.chdir(folder)
    seen = []
    for call in calls:
        if isinstance(call, str):
            subprocess.run(["bash", "-c", call], cwd=folder, check=True, stdin=subprocess.DEVNULL)
            continue
        try:
            content = executor(FileEditorAction(**call)).to_llm_content
            seen.append("\n".join(part.text for part in content if isinstance(part, TextContent)))
        except Exception as error:  # noqa: BLE001 - as the SDK's executor does
            seen.append(f"Error executing tool 'file_editor': {error}")
    return seen


if __name__ == "__main__":
    answers = sys.stdout
    sys.stdout = sys.stderr
    json.dump(play(**json.load(sys.stdin)), answers)
