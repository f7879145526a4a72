"""One conversation of the unmodified OpenHands agent: stock prompt, stock tools, no condenser, no context of this machine."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.conversation import ConversationExecutionStatus, LocalConversation
from openhands.sdk.conversation.exceptions import ConversationRunError
from openhands.sdk.event import AgentErrorEvent, Event, MessageEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.tools.task_tracker import TaskTrackerTool

from agents.openhands_worker import editor, terminal
from agents.openhands_worker.link import Link
from agents.openhands_worker.model import SessionLLM


class Episode:
    """Plays one conversation; everything it does outside of this process goes through the link."""

    def __init__(self, link: Link, start: dict[str, Any]) -> None:
        self._link, self._start = link, start
        self._id: str = start["start"]
        self._conversation: LocalConversation | None = None
        self._cancelled = False
        self._counts: Counter[str] = Counter()

    def cancel(self) -> None:
        """End it now, whatever it waits for."""
        self._cancelled = True
        if self._conversation is not None:
            self._conversation.interrupt()

    async def play(self) -> dict[str, Any]:
        """How it ended: `finished` (a finish call or a message without a call), `stuck`, `max_turns`, `cancelled`, `error`."""
        folder = Path(tempfile.mkdtemp(prefix="episode-"))
        terminal.ASK[self._id] = partial(self._link.call_from_thread, self._id)
        try:
            conversation = await asyncio.to_thread(self._open, folder)
            self._conversation = conversation
            if self._cancelled:
                return {"end": "cancelled", "detail": "", "counts": self._counts}
            # A task of its own: `interrupt` cancels the task that it finds.
            await asyncio.create_task(conversation.arun())
            return {**self._ending(), "counts": self._counts}
        except ConversationRunError as error:
            detail = f"{type(error.__cause__).__name__}: {error.__cause__}"
            return {"end": "error", "detail": detail, "counts": self._counts}
        finally:
            if self._conversation is not None:
                await asyncio.to_thread(self._conversation.close)
            del terminal.ASK[self._id]
            shutil.rmtree(folder, ignore_errors=True)

    def _model(self) -> LLM:
        llm = SessionLLM(
            model="openai/policy",
            usage_id="agent",
            max_input_tokens=self._start["max_context"],
            max_output_tokens=self._start["max_tokens_per_turn"],
            caching_prompt=False,
            native_tool_calling=True,
            stream=False,
        )
        llm.attach(partial(self._link.call, self._id))
        return llm

    def _open(self, folder: Path) -> LocalConversation:
        start = self._start
        where = {"episode": self._id}
        agent = Agent(
            llm=self._model(),
            tools=[
                Tool(name=terminal.NAME, params=where),
                Tool(name=editor.NAME, params={**where, "folder": start["folder"]}),
                Tool(name=TaskTrackerTool.name),
            ],
            system_prompt_kwargs={"cli_mode": True},
            condenser=None,
            agent_context=None,
            **({} if start["system_prompt"] is None else {"system_prompt": start["system_prompt"]}),
        )
        conversation = Conversation(
            agent=agent,
            workspace=str(folder),
            persistence_dir=start["state"],
            conversation_id=uuid.uuid5(uuid.NAMESPACE_OID, self._id),
            callbacks=[self._count],
            max_iteration_per_run=start["max_turns"],
            stuck_detection=start["stuck_detection"],
            visualizer=None,
            delete_on_close=False,
        )
        assert isinstance(conversation, LocalConversation)
        if not conversation.state.events:
            conversation.send_message(start["prompt"])
            self._counts.clear()  # that was no nudge
        else:
            # The leaf is saved at the end of a step, events at once: after a kill within one the last event is the leaf.
            conversation.state.leaf_event_id = None
            # What ran when the process before was killed may have taken effect: it is told, not done again.
            conversation._emit_orphaned_action_errors()
        return conversation

    def _count(self, event: Event) -> None:
        if isinstance(event, AgentErrorEvent):
            self._counts["agent_errors"] += 1
        elif isinstance(event, MessageEvent) and event.source in ("user", "environment"):
            self._counts["nudges"] += 1

    def _ending(self) -> dict[str, str]:
        assert self._conversation is not None
        status = self._conversation.state.execution_status
        if status is ConversationExecutionStatus.FINISHED:
            return {"end": "finished", "detail": ""}
        if status is ConversationExecutionStatus.STUCK:
            return {"end": "stuck", "detail": ""}
        if status is ConversationExecutionStatus.PAUSED:
            return {"end": "cancelled", "detail": ""}
        errors = [e for e in self._conversation.state.events if isinstance(e, ConversationErrorEvent)]
        if errors and errors[-1].code == "MaxIterationsReached":
            return {"end": "max_turns", "detail": ""}
        return {"end": "error", "detail": f"status {status.value}: {errors[-1].detail if errors else ''}"}
