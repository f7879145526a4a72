"""Messages to tokens and back, with the model's own tokenizer and chat template.

Flows in: a model folder (tokenizer.json, chat_template.jinja). Flows out: token ids of an opening conversation, token ids of
the messages that follow a sampled turn, and the parsed reply of sampled tokens. Nothing is ever re-tokenised that was sampled.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from harness.errors import ConfigError
from harness.protocols import Message

THINK, END_THINK = "<think>", "</think>"


class Chat:
    """One model's tokenizer and template."""

    def __init__(self, folder: Path, stop: Sequence[str]) -> None:
        """Load from a model folder. Raises `ConfigError` if a file is bad or a stop string is not one token."""
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            source = (folder / "chat_template.jinja").read_text()
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(
                f"{folder}: cannot load tokenizer or chat template: {error}", hint="give a model folder"
            ) from error
        self.stop_strings = tuple(stop)
        self.stop_ids = tuple(self._single_token(s) for s in stop)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(source)

    def _single_token(self, text: str) -> int:
        token = self.tokenizer.token_to_id(text)
        if token is None:
            raise ConfigError(f"`model.stop`: {text!r} is not a token of this tokenizer", hint="name a token of tokenizer.json")
        return int(token)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, prompt: bool) -> str:
        """The template's text, with the generation prompt if `prompt`. Raises `ConfigError` where the template refuses.

        A template that cannot read the arguments of calls as text, as Qwen3-Coder's and GLM's, is given them as mappings.
        """
        try:
            try:
                return self._text(messages, tools, prompt)
            except (TemplateError, TypeError):
                mapped = [_with_mappings(message) for message in messages]
                if mapped == list(messages):
                    raise
                return self._text(mapped, tools, prompt)
        except (TemplateError, TypeError, ValueError, KeyError) as error:  # templates call methods of whatever a message holds
            raise ConfigError(f"the chat template refuses the conversation: {error}", hint="check roles and order") from error

    def _text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], prompt: bool) -> str:
        return self._template.render(messages=list(messages), tools=list(tools) or None, add_generation_prompt=prompt)

    def encode(self, text: str) -> list[int]:
        """Token ids of text that contains its own special tokens."""
        whole = text.encode(errors="replace").decode()  # half surrogates, as of agents that cut strings in UTF-16
        return list(self.tokenizer.encode(whole, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of sampled tokens, special tokens kept."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def opening(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Tokens of the first request, generation prompt included."""
        return self.encode(self.render(messages, tools, prompt=True))

    def continuation(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[dict[str, Any]], last: int | None = None
    ) -> list[int]:
        """Tokens that follow a sampled turn: the rest of that turn, `new`, and the next generation prompt.

        `before` is the conversation up to and without that turn. The turn itself is rendered as a marker whose tokens are
        cut away: what was sampled is never rendered. The marker is random, so that no message can contain it. The template's
        stop token behind the turn is left out if the turn ends with it: if it is `last`, or if `last` is not given.
        """
        answer = f"\u241e{secrets.token_hex(8)}\u241e"
        text = self.render([*before, {"role": "assistant", "content": answer}, *new], tools, prompt=True)
        head, marker, rest = text.rpartition(answer)
        if not marker:
            raise ConfigError("the chat template drops the last assistant turn", hint="use a template that keeps history")
        for stop, token in zip(self.stop_strings, self.stop_ids, strict=True):
            if rest.startswith(stop) and last in (None, token):
                return self.encode(rest[len(stop) :])
        return self.encode(rest)

    def answer(self, before: Sequence[Message], message: Message, tools: Sequence[dict[str, Any]]) -> list[int]:
        """Tokens of a given assistant turn as the policy would sample it after `before`, its stop token included.

        Raises `ConfigError` where the template does not render the turn behind its own generation prompt.
        """
        prompt = self.render(before, tools, prompt=True)
        text = self.render([*before, message], tools, prompt=False)
        if text.startswith(prompt):
            for stop in self.stop_strings:
                said, end, rest = text[len(prompt) :].rpartition(stop)
                if end and not rest.strip():
                    return self.encode(said + stop)
        raise ConfigError(
            "the chat template does not continue its generation prompt with the assistant turn and a stop token",
            hint="check model.stop, and that the template keeps what an assistant turn says",
        )

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        """True if the prompt ends inside a block of reasoning that it has just opened, as that of Qwen3-Thinking does."""
        return self.decode(prompt[-16:]).rstrip().endswith(THINK)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Text of one sampled turn, its stop token removed."""
        body = tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens
        return self.decode(body)


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """(reasoning, rest) of a turn, where the prompt has `opened` the block of reasoning or the turn begins with `<think>`.

    The block reaches to the first `</think>`; without one it is the whole turn. Where none is open, `</think>` is plain text:
    a call that writes it into a file stays a call.
    """
    begun = text.lstrip().startswith(THINK)
    if not opened and not begun:
        return "", text
    inside = text.lstrip().removeprefix(THINK)
    reasoning, _, rest = inside.partition(END_THINK)
    return reasoning.strip(), rest


def _with_mappings(message: Message) -> Message:
    """The message with the arguments of its calls as mappings; those that are no JSON object under the name `arguments`."""
    calls = message.get("tool_calls") or []
    return {**message, "tool_calls": [{**call, "function": _mapped(call["function"])} for call in calls]} if calls else message


def _mapped(function: dict[str, Any]) -> dict[str, Any]:
    text = function["arguments"]
    if not isinstance(text, str):
        return function
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return {**function, "arguments": value if isinstance(value, dict) else {"arguments": text}}


def _raise(message: str) -> None:
    raise TemplateError(message)
