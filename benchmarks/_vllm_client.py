"""vLLM's own benchmark client (`vllm bench serve`), one run per line of standard input, in vLLM's interpreter.

Flows in: JSON lines with `url`, `model`, `prompts` (token ids), `new` (tokens), `concurrency` and `logprobs`. Flows out: JSON
lines with `tokens_s` and `tokens`. Its completions backend takes token ids, so that the server tokenizes for neither side.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

from vllm.benchmarks.datasets import SampleRequest
from vllm.benchmarks.serve import TaskType, benchmark


async def run(job: dict[str, Any]) -> dict[str, float]:
    """One run as `vllm bench serve --backend openai --request-rate inf --max-concurrency N --ignore-eos` does it."""
    result = await benchmark(
        task_type=TaskType.GENERATION,
        endpoint_type="openai",
        api_url=f"{job['url']}/v1/completions",
        base_url=job["url"],
        model_id=job["model"],
        model_name=job["model"],
        tokenizer=None,
        input_requests=[
            SampleRequest(prompt=ids, prompt_len=len(ids), expected_output_len=job["new"]) for ids in job["prompts"]
        ],
        logprobs=job["logprobs"],
        request_rate=float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=0,
        profile=False,
        selected_percentile_metrics=["ttft"],
        selected_percentiles=[50.0],
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=job["concurrency"],
        lora_modules=None,
        lora_assignment="random",
        extra_headers=None,
        extra_body={"temperature": 1.0},
        ramp_up_strategy=None,
        ramp_up_start_rps=None,
        ramp_up_end_rps=None,
        ready_check_timeout_sec=0,
        ssl_context=None,
        self_timed=False,
        probe_request_rate=0,
    )
    return {"tokens_s": result["output_throughput"], "tokens": result["total_output_tokens"]}


for line in sys.stdin:
    with contextlib.redirect_stdout(sys.stderr):
        answer = asyncio.run(run(json.loads(line)))
    print(json.dumps(answer), flush=True)
