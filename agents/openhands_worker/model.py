"""OpenHands' LLM without a library between: chat messages go to the harness's token session, its reply comes back.

Only the transport differs from the stock class; messages and tool schemas are written as the stock class writes them. Of a
conversation only the new messages cross the pipe.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from litellm import ModelResponse
from openhands.sdk import LLM
from openhands.sdk.llm import LLMResponse, Message
from pydantic import PrivateAttr

Ask = Callable[..., Awaitable[dict[str, Any]]]


class SessionLLM(LLM):
    """See the module docstring. `attach` it before use."""

    _ask: Ask | None = PrivateAttr(default=None)
    _sent: list[dict[str, Any]] = PrivateAttr(default_factory=list)
    _tools: tuple[tuple[int, ...], list[Any]] = PrivateAttr(default=((), []))
    _told: bool = PrivateAttr(default=False)

    def attach(self, ask: Ask) -> None:
        """Say how the harness is asked: `ask("complete", keep=..., new=..., tools=...)`."""
        self._ask = ask

    async def acompletion(
        self,
        messages: list[Message],
        tools: Sequence[Any] | None = None,
        add_security_risk_prediction: bool = False,
        **_: Any,
    ) -> LLMResponse:
        """One model call on the whole conversation; sampling settings are the session's."""
        assert self._ask is not None, "attach the model first"
        chat = [
            message.to_chat_dict(
                cache_enabled=False,
                vision_enabled=False,
                function_calling_enabled=True,
                force_string_serializer=True,
                send_reasoning_content=False,
            )
            for message in messages
        ]
        keep = _common(self._sent, chat)
        schemas = self._schemas(list(tools or ()), add_security_risk_prediction)
        reply = await self._ask("complete", keep=keep, new=chat[keep:], tools=schemas)
        self._sent = chat
        for said in reply["message"].get("tool_calls", ()):
            said["function"]["arguments"] = _encodable(said["function"]["arguments"])
        raw = ModelResponse(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            model=self.model,
            choices=[{"index": 0, "finish_reason": reply["finish_reason"], "message": reply["message"]}],
            usage={
                "prompt_tokens": reply["prompt_tokens"],
                "completion_tokens": reply["completion_tokens"],
                "total_tokens": reply["prompt_tokens"] + reply["completion_tokens"],
            },
        )
        return LLMResponse(
            message=Message.from_llm_chat_message(raw.choices[0].message),
            metrics=self.metrics.get_snapshot(),
            raw_response=raw,
        )

    def _schemas(self, tools: list[Any], risk: bool) -> list[Any] | None:
        """The tools' schemas; None if the harness has them already."""
        key = (risk, *map(id, tools))
        if self._told and self._tools[0] == key:
            return None
        self._tools = key, [tool.to_openai_tool(add_security_risk_prediction=risk) for tool in tools]
        self._told = True
        return self._tools[1]


def _encodable(arguments: str) -> str:
    """Arguments without half surrogates, which JSON can escape, and which OpenHands cannot write down."""
    if "\\ud" not in arguments.lower():
        return arguments
    try:
        text = json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments
    return text.encode(errors="replace").decode()


def _common(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> int:
    """Length of the common prefix."""
    n = 0
    for a, b in zip(old, new, strict=False):
        if a != b:
            break
        n += 1
    return n
