"""A check's verdict in one sentence, and how a check says it.

A check is a coroutine function of a `Subject`: it returns what it saw, raises `Broken` for a fault of the environment, or
`Skipped` where it cannot tell. Its docstring's first line says what it holds the environment to.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from harness.kit.play import Subject


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    said: str
    todo: str = ""


class Broken(Exception):
    """The environment breaks the contract: what was seen, and what to do."""

    def __init__(self, said: str, todo: str) -> None:
        super().__init__(said)
        self.said, self.todo = said, todo


class Skipped(Exception):
    """The check cannot tell: why, and what to do."""

    def __init__(self, said: str, todo: str = "") -> None:
        super().__init__(said)
        self.said, self.todo = said, todo


@dataclass(frozen=True, slots=True)
class Check:
    """A named check and those that must have passed before it can tell anything."""

    name: str
    run: Callable[[Subject], Awaitable[str]]
    needs: tuple[str, ...] = ()

    async def verdict(self, subject: Subject, before: dict[str, Verdict]) -> Verdict:
        """Run it, unless an earlier one stands in the way."""
        first = next((name for name in self.needs if before[name].outcome != "passed"), None)
        if first is not None:
            return Verdict(self.name, "skipped", f"`{first}` comes first")
        try:
            return Verdict(self.name, "passed", await self.run(subject))
        except Broken as broken:
            return Verdict(self.name, "failed", broken.said, broken.todo)
        except Skipped as skipped:
            return Verdict(self.name, "skipped", skipped.said, skipped.todo)
        except Exception as error:  # noqa: BLE001 - a stranger's code may raise anything
            return Verdict(self.name, "failed", f"raised {type(error).__name__}: {error}", "mend what raised it")


def short(value: Any, most: int = 200) -> str:
    """The beginning of its text, on one line."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."
