"""The worker of `agents.openhands` with OpenHands' stock LLM class: litellm and HTTP where ours asks over the pipe.

Runs in the agents' interpreter. The start of an episode names, besides what ours names, `base_url` and `api_key`. Agent, tools,
conversation and everything else are the product's own.
"""

from __future__ import annotations

import asyncio

from openhands.sdk import LLM

from agents.openhands_worker import __main__ as worker
from agents.openhands_worker import episode


class StockEpisode(episode.Episode):
    """An episode whose model is behind an address."""

    def _model(self) -> LLM:
        start = self._start
        return LLM(
            model="openai/policy",
            usage_id="agent",
            base_url=start["base_url"],
            api_key=start["api_key"],
            temperature=1.0,
            top_p=1.0,
            max_input_tokens=start["max_context"],
            max_output_tokens=start["max_tokens_per_turn"],
            capability_overrides={
                "supports_sampling_params": True,
                "supports_reasoning_effort": False,
                "supports_prompt_cache_key": False,
            },
            caching_prompt=False,
            force_string_serializer=True,
            native_tool_calling=True,
            stream=False,
            num_retries=1,
        )


if __name__ == "__main__":
    episode.Episode = StockEpisode  # type: ignore[misc]
    asyncio.run(worker.main())
