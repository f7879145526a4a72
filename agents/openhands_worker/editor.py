"""OpenHands' file editor on a sandbox's files: the stock editor works on a mirror of the one path that a call names.

The sandbox is asked what is there, the mirror is made the same, the stock editor runs, and what it writes is sent back before
it goes on. The mirror of a path is named by a digest, so no path leads out of it, and is shown to the model as the path.
Unlike the stock editor, a file keeps the line endings of the lines that were not edited; new lines get its most frequent one.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import posixpath
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from openhands.sdk.llm import TextContent
from openhands.sdk.tool import Action, DeclaredResources, ToolExecutor, register_tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.file_editor.definition import FileEditorAction, FileEditorObservation
from openhands.tools.file_editor.editor import IMAGE_EXTENSIONS, FileEditor
from openhands.tools.file_editor.exceptions import EditorToolParameterInvalidError, ToolError

from agents.openhands_worker.endings import keep_endings, with_newlines
from agents.openhands_worker.terminal import ASK, Ask

NAME = "sandbox_file_editor"
SIZE_SHOWN_MAX = 2**40
"""The mirror of a bigger file is a hole of this many bytes: no file system refuses it, and no file is that big in earnest."""
UNDOABLE = 10
_RAISED = {os.strerror(number): number for number in (errno.EACCES, errno.ENAMETOOLONG)}
"""Why a path cannot even be looked for."""


class SandboxFileEditor(FileEditorTool):
    """The tool as the model sees it."""

    name = "file_editor"

    @classmethod
    def create(cls, conv_state: Any, episode: str = "", folder: str = "/", **_: Any) -> Sequence[FileEditorTool]:
        """For the episode of that id, which has registered how to ask in `ASK`; `folder` is its working folder."""
        (stock,) = super().create(conv_state)
        _forget(stock.executor.editor)
        description = stock.description.replace(conv_state.workspace.working_dir, folder)
        return [stock.model_copy(update={"description": description, "executor": Executor(ASK[episode], folder)})]

    def declared_resources(self, action: Action) -> DeclaredResources:
        """One call at a time: an executor has one mirror. The stock tool would look for the path on this machine."""
        return DeclaredResources(keys=(self.name,), declared=True)


class _Entry(PurePosixPath):
    """What the stock editor lists of a folder; it can name a path, and reach nothing on this machine."""

    below: dict[str, _Entry] | None = None
    """What is in it; None: it is no folder."""

    def is_dir(self) -> bool:
        return self.below is not None

    def iterdir(self) -> Iterator[_Entry]:
        return iter((self.below or {}).values())

    def add(self, name: str, is_folder: bool) -> None:
        """Something in this folder or, if the name has a slash, in a folder of it."""
        parent, slash, rest = name.partition("/")
        if self.below is None:
            self.below = {}
        entry = self.below.setdefault(parent, _Entry(self, parent))
        if slash:
            entry.add(rest.replace("/", "\ufffd"), is_folder)
        elif is_folder and entry.below is None:
            entry.below = {}


class _Editor(FileEditor):
    """The stock editor; what is in a folder, and whether a file is written, is the sandbox's to say."""

    folder: _Entry
    hidden: int | OSError
    save: Callable[[Path], None]

    def view(self, path: Path, view_range: list[int] | None = None) -> FileEditorObservation:
        return super().view(self.folder if path.is_dir() else path, view_range)

    def insert(self, path: Path, insert_line: int, new_str: str, **_: Any) -> FileEditorObservation:
        self.validate_file(path)  # the stock editor looks for the encoding first, and reads all of a file that is too large
        return super().insert(path, insert_line, new_str)

    def undo_edit(self, path: Path) -> FileEditorObservation:
        self.validate_file(path)
        return super().undo_edit(path)

    def _count_hidden_children(self, path: Path) -> int:
        if isinstance(self.hidden, OSError):
            raise self.hidden
        return self.hidden

    def _atomic_write(self, path: Path, file_text: str, encoding: str) -> None:
        super()._atomic_write(path, file_text, encoding)
        self.save(path)


class Executor(ToolExecutor[FileEditorAction, FileEditorObservation]):
    """Runs in a thread of its own, one call at a time."""

    def __init__(self, ask: Ask, folder: str) -> None:
        self._ask, self._folder = ask, folder
        self._editor = _Editor()
        self._mirror = Path(tempfile.mkdtemp(prefix="mirror-"))
        self._replaced: dict[str, deque[bytes]] = {}
        """The last bytes of files that have a \\r, for an undo to bring back as they were."""

    def close(self) -> None:
        """Remove the mirror and the history."""
        _forget(self._editor)
        shutil.rmtree(self._mirror, ignore_errors=True)

    def __call__(self, action: FileEditorAction, conversation: Any = None) -> FileEditorObservation:
        """One call of the editor. Raises ValueError with a message for the model where the stock editor fails with one."""
        shown = PurePosixPath(action.path)
        digest = hashlib.sha256(str(shown).encode(errors="surrogatepass")).hexdigest()
        here = self._mirror / digest / ("-" if shown.name in ("", "..") else shown.name)
        path = posixpath.join(self._folder, str(shown))

        def as_shown(text: str) -> str:
            beside = posixpath.join(posixpath.dirname(path), "")
            return text.replace(str(here), str(shown)).replace(f"{here.parent}/", beside)

        try:
            result = self._edit(action, path, shown, here)
        except ToolError as error:
            result = FileEditorObservation.from_text(text=error.message, command=action.command, is_error=True)
        except (OSError, ValueError) as error:
            raise ValueError(as_shown(str(error))) from error
        finally:
            for left in self._mirror.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        content = [TextContent(text=as_shown(part.text)) if isinstance(part, TextContent) else part for part in result.content]
        return result.model_copy(update={"content": content, "path": str(shown) if result.path else None})

    def _edit(self, action: FileEditorAction, path: str, shown: PurePosixPath, here: Path) -> FileEditorObservation:
        if not str(shown).strip().startswith(("/", "~")):  # what the stock editor takes for absolute
            hint = "" if self._look(path)["kind"] == "missing" else f" Maybe you meant {PurePosixPath(path)}?"
            raise EditorToolParameterInvalidError("path", str(shown), f"The path should be an absolute path.{hint}")
        before, may_write = self._copy(path, shown, here, looks=action.command == "view")

        def save(written: Path) -> None:
            if not may_write:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(shown))
            after = written.read_bytes()
            replaced = self._replaced.setdefault(path, deque(maxlen=UNDOABLE))
            undone = action.command == "undo_edit" and replaced and with_newlines(replaced[-1]) == with_newlines(after)
            after = replaced[-1] if undone else keep_endings(before or b"", after)
            if after != before:
                _checked(self._ask("write", path=path, data=base64.b64encode(after).decode()))
            if undone:
                replaced.pop()
            elif before and b"\r" in before and action.command != "undo_edit":
                replaced.append(before)

        self._editor.save = save
        result: FileEditorObservation = self._editor(
            command=action.command,
            path=str(here),
            file_text=action.file_text,
            view_range=action.view_range,
            old_str=action.old_str,
            new_str=action.new_str,
            insert_line=action.insert_line,
        )
        return result

    def _copy(self, path: str, shown: PurePosixPath, here: Path, looks: bool) -> tuple[bytes | None, bool]:
        """Make the mirror of a path; the bytes of a file, and whether it may be written."""
        found = self._look(path)
        match found["kind"]:
            case "missing":
                if found["why"] in _RAISED:
                    raise OSError(_RAISED[found["why"]], found["why"], str(shown))
                if found["parent"]:
                    here.parent.mkdir()
                elif found["why"] == os.strerror(errno.ENOTDIR):
                    here.parent.touch()
                return None, found["may_write"]
            case "folder":
                here.mkdir(parents=True)
                self._editor.folder, self._editor.hidden = _Entry(shown), found["hidden"]
                self._editor.folder.below = {}
                if not found["may_read"]:
                    self._editor.hidden = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(shown))
                for is_folder, name in found["entries"]:
                    self._editor.folder.add(name, is_folder)
                return None, False
        if not found["may_read"]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(shown))
        here.parent.mkdir()
        data = b""
        if found["size"] <= self._editor._max_file_size:
            data = base64.b64decode(_checked(self._ask("read", path=path))["data"])
            here.write_bytes(data)
        else:
            # Of an image nothing is shown but that it is there; of the rest the size.
            is_image = looks and shown.suffix.lower() in IMAGE_EXTENSIONS
            with here.open("wb") as file:
                file.truncate(0 if is_image else min(found["size"], SIZE_SHOWN_MAX))
        return data, found["may_write"]

    def _look(self, path: str) -> dict[str, Any]:
        if "\0" in path or path.encode(errors="ignore").decode() != path:
            return {"kind": "missing", "parent": True, "may_write": True, "why": os.strerror(errno.ENOENT)}
        return _checked(self._ask("look", path=path))


def _forget(editor: FileEditor) -> None:
    """Remove the history, which the stock editor leaves behind."""
    shutil.rmtree(editor._history_manager.cache.directory, ignore_errors=True)


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """What the sandbox said; what it refused is the model's to know."""
    if "error" in answer:
        raise ToolError(answer["error"])
    return answer


register_tool(NAME, SandboxFileEditor)
