"""Runs inside every vLLM worker: weight updates that are exact, or fail before a layer is touched.

vLLM imports this module through `--worker-extension-cls sao_vllm.WorkerExtension`; importing it registers the weight-transfer
backend `sao`. Flows in: a safetensors file with the whole model under its Hugging Face names, or the same as a broadcast of a
trainer over gloo or NCCL. Flows out: the model with these weights, or an error and the model as it was.

An update is checked in full (sha256, names, shapes, number types) before `load` begins; of one over NCCL (not run here: no GPU)
only what is announced, because its tensors go into the layers as they come. From then until `finish_weight_update` the model
refuses to run, so an engine that is resumed too early dies instead of sampling from half-loaded weights; a later complete
update recovers it.
"""

# mypy: allow-subclassing-any, disable-error-code="import-not-found"
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sao_address
import sao_meeting
import torch
import vllm
from safetensors import safe_open
from sao_versions import ALLOW, PROVEN, proven
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import LOADING_LAYERS, _place_kernel_tensors, get_layerwise_info
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

HEAD = "lm_head.weight"
NUMBERS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
Shapes = dict[str, tuple[int, ...]]


class UpdateError(ValueError):
    """An update that cannot be loaded; the server answers HTTP 500 with this message."""


def require_proven(version: str) -> None:
    """Refuse a vLLM in which live updates were not shown to be exact."""
    if not proven(version) and os.environ.get(ALLOW) != "1":
        raise RuntimeError(
            f"vLLM {version}: live weight updates are proven for {', '.join(PROVEN)} only; other versions may load wrong "
            f"weights without an error. Install a proven version, or set {ALLOW}=1 and rely on the canary after every update."
        )


def read_shapes(files: Iterable[Path]) -> Shapes:
    """Name and shape of every tensor in safetensors files. Raises `UpdateError` for a file that is none."""
    shapes: Shapes = {}
    for path in files:
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    tensor = file.get_slice(name)
                    if tensor.get_dtype() not in NUMBERS:
                        raise UpdateError(f"{path}: `{name}` is {tensor.get_dtype()}, not one of {', '.join(NUMBERS)}")
                    shapes[name] = tuple(tensor.get_shape())
        except UpdateError:
            raise
        except Exception as error:  # safetensors raises its own Rust types
            raise UpdateError(f"{path}: not a complete safetensors file: {error}") from error
    return shapes


def check_shapes(found: Shapes, expected: Shapes, *, tied: bool) -> None:
    """Every tensor of the model, each in its shape, and nothing else. A tied head may be there or not."""
    optional = {HEAD} if tied else set()
    if missing := sorted(expected.keys() - found.keys() - optional):
        raise UpdateError(f"the update lacks {len(missing)} of {len(expected)} tensors, the first is `{missing[0]}`")
    if unknown := sorted(found.keys() - expected.keys() - optional):
        raise UpdateError(f"the update has {len(unknown)} tensors that this model lacks, the first is `{unknown[0]}`")
    for name in sorted(found.keys() & expected.keys()):
        if found[name] != expected[name]:
            raise UpdateError(f"`{name}` has shape {found[name]}, the model {expected[name]}")


def check_digest(path: Path, digest: str) -> None:
    """Refuse a file whose sha256 is another one."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UpdateError(f"{path}: cannot be read: {error.strerror}") from error
    if found != digest:
        raise UpdateError(f"{path}: sha256 is {found[:12]}, not {digest[:12]}: the file is damaged or not complete")


@contextmanager
def packed_experts() -> Iterator[None]:
    """Pack a mixture's experts again for the CPU's grouped matrix product while a file is loaded.

    `UnquantizedFusedMoEMethod._setup_kernel` packs them on the first load only: a later one leaves plain weights where the
    kernel reads packed ones. The packing must happen inside it, before the layerwise loader copies into the kernel's storage.
    """
    setup = UnquantizedFusedMoEMethod._setup_kernel

    def setup_and_pack(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        again = self.moe_kernel is not None
        setup(self, layer, w13, w2)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    with patch.object(UnquantizedFusedMoEMethod, "_setup_kernel", setup_and_pack):
        yield


def pack_tied_head(model: torch.nn.Module) -> None:
    """Pack a tied output head from the embedding it shares.

    The CPU's linear layers run on packed copies. A tied head gets no tensor of its own, so the layerwise loader leaves its
    copy at the weights of the start.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def forget_unfinished(model: torch.nn.Module) -> None:
    """Put the kernel's tensors back into layers that an interrupted load left empty, so that a load can begin anew."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
    LOADING_LAYERS.clear()


def refuse_to_run(*_: Any) -> None:
    """Forward hook of a model whose update is not finished."""
    raise RuntimeError("the weights are between two versions: a complete update must be finished before the engine is resumed")


@dataclass
class Meeting(WeightTransferInitInfo):
    """Where a trainer (rank 0) waits, and which ranks this server's workers take: `rank_offset` and up."""

    master_address: str
    master_port: int
    meeting: str
    """Its name in the trainer's store; each is used once."""
    world_size: int
    backend: str
    rank_offset: int = 1
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.backend not in sao_meeting.BACKENDS:
            raise UpdateError(f"backend {self.backend!r} is not one of {', '.join(sao_meeting.BACKENDS)}")
        if self.backend == "nccl" and not current_platform.is_cuda():
            raise UpdateError("backend nccl needs CUDA, which this server does not have")


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """A safetensors file that all workers can read, and its sha256 (hex)."""

    path: str
    sha256: str

    def __post_init__(self) -> None:
        if not (isinstance(self.path, str) and isinstance(self.sha256, str)):
            raise UpdateError("update_info needs `path` and `sha256`, both strings")


@dataclass
class BroadcastUpdate(WeightTransferUpdateInfo):
    """What the trainer is going to broadcast, in this order, and the sha256 (hex) over all of its bytes.

    Over NCCL `sha256` is null: the bytes lie on the device, and whoever publishes judges the result by a canary.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    sha256: str | None
    step_s: float = 60.0
    """Limit of each tensor."""
    whole_s: float = 600.0
    """Limit of all tensors."""


def received(update: BroadcastUpdate, group: sao_meeting.Group) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a broadcast, one after the other."""
    end = time.monotonic() + update.whole_s
    try:
        for name, dtype, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
            group.broadcast(tensor, min(update.step_s, end - time.monotonic()))
            yield name, tensor
        group.part(update.step_s)
    except RuntimeError as error:
        raise UpdateError(f"the broadcast broke off; meet again with /init_weight_transfer_engine: {error}") from error


def gathered(update: BroadcastUpdate, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All tensors of a broadcast over gloo, if their sha256 is the announced one."""
    digest, whole = hashlib.sha256(), dict(tensors)
    for tensor in whole.values():
        digest.update(tensor.view(-1).view(torch.uint8).numpy())
    if digest.hexdigest() != update.sha256:
        raise UpdateError(f"sha256 of what came is {digest.hexdigest()[:12]}, not {str(update.sha256)[:12]}")
    return whole


class WholeModelEngine(WeightTransferEngine[Meeting, Any]):
    """One update carries the whole model, is received and checked in full, and only then loaded."""

    init_info_cls = Meeting

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.model_config.quantization is not None:
            raise ValueError(f"the update of {self.model_config.quantization} weights is not supported")
        self.tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        folder = Path(self.model_config.model)
        self.expected = read_shapes(sorted(folder.glob("*.safetensors")))
        if not self.expected:
            raise ValueError(f"{folder} has no safetensors file: the names an update must have are read from it")
        self.group: sao_meeting.Group | None = None
        self.barrier: Any = None
        self.loaded = False

    def init_transfer_engine(self, init_info: Meeting) -> None:
        """Meet a trainer, once for each broadcast."""
        self.group = None
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        trainer, end = (init_info.master_address, init_info.master_port), time.monotonic() + init_info.timeout_s
        try:
            self.group = sao_meeting.Group(
                sao_meeting.visit(*trainer, init_info.timeout_s),
                init_info.meeting,
                rank,
                init_info.world_size,
                init_info.backend,
                sao_address.facing(*trainer),
                max(0.001, end - time.monotonic()),
            )
        except (RuntimeError, OSError) as error:
            raise UpdateError(f"no trainer came to the meeting at {trainer[0]}:{trainer[1]}: {error}") from error

    def start_weight_update(self) -> None:
        """Open an update. No layer is touched before its content is known to be whole."""
        self.loaded = False

    def parse_update_info(self, update_dict: dict[str, Any]) -> FileUpdate | BroadcastUpdate:
        """A file if a path is named, a broadcast otherwise."""
        kind = FileUpdate if "path" in update_dict else BroadcastUpdate
        try:
            return kind(**update_dict)
        except TypeError as error:
            raise UpdateError(f"update_info: {error}") from error

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check, then load. (The base class would wait for an accelerator, also where there is none.)"""
        if self.loaded:
            raise UpdateError("this update has its weights already: one update carries the whole model")
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate | BroadcastUpdate) -> None:
        """Load what was announced, if all of it is whole: sha256, names, shapes, number types."""
        if isinstance(update_info, BroadcastUpdate):
            group, self.group = self.group, None
            if group is None:
                raise UpdateError("this server has not met a trainer: call /init_weight_transfer_engine")
            with group:
                self.check_announced(update_info, group.backend)
                tensors = received(update_info, group)
                return self.load(tensors if update_info.sha256 is None else gathered(update_info, tensors).items())
        path = Path(update_info.path)
        check_digest(path, update_info.sha256)
        check_shapes(read_shapes([path]), self.expected, tied=self.tied)
        with safe_open(str(path), framework="pt") as file:
            return self.load((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - not a dict

    def check_announced(self, update: BroadcastUpdate, backend: str) -> None:
        """Refuse what cannot be loaded before anything is sent."""
        if (update.sha256 is None) != (backend == "nccl"):
            raise UpdateError("a broadcast over gloo announces its sha256, one over NCCL announces null")
        check_shapes(dict(zip(update.names, map(tuple, update.shapes), strict=True)), self.expected, tied=self.tied)
        for name, dtype in zip(update.names, update.dtype_names, strict=True):
            if getattr(torch, dtype, None) not in NUMBERS.values():
                raise UpdateError(f"`{name}` is {dtype}, not one of {', '.join(map(str, NUMBERS.values()))}")

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights. The model refuses to run until `finish_weight_update`."""
        if self.barrier is None:
            self.barrier = self.model.register_forward_pre_hook(refuse_to_run)
        forget_unfinished(self.model)
        initialize_layerwise_reload(self.model)
        on_cpu = current_platform.is_cpu()
        with packed_experts() if on_cpu else nullcontext():
            self.model.load_weights((name, tensor) for name, tensor in tensors if not (self.tied and name == HEAD))
            finalize_layerwise_reload(self.model, self.model_config)
        if on_cpu and self.tied:
            pack_tied_head(self.model)
        self.loaded = True

    def finish_weight_update(self) -> None:
        """Let the model run again. vLLM sets the version label after this."""
        if not self.loaded:
            raise UpdateError("no weights have come in this update")
        self.loaded = False
        self.barrier.remove()
        self.barrier = None

    def shutdown(self) -> None:
        """Leave the trainer."""
        self.group = None


def restart_open_updates() -> None:
    """Let `start_weight_update` open a new update where one was left open.

    vLLM refuses it until `finish_weight_update` succeeds: a trainer that died in between would block every later update.
    """
    start = Worker._start_weight_update

    def restart(self: Any, is_draft: bool = False) -> None:
        self._weight_update_active = False
        start(self, is_draft)

    Worker._start_weight_update = restart


class WorkerExtension:
    """Its import is what counts: this module is then loaded in every worker, before the model."""


require_proven(vllm.__version__)
restart_open_updates()
WeightTransferEngineFactory.register_engine("sao", WholeModelEngine)
