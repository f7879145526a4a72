"""Two gloo ranks measure what one process does, also when one of them holds nothing; shards count every element once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.unit.measure_support import case, measured, same
from trainer.measure import gradients
from trainer.measure.sums import Sums, reduce

SPLITS = {
    "uneven": [[[0, 1, 2, 3, 4], [5]], [[6], []]],
    "one rank empty": [[[0, 1, 2], [3, 4, 5, 6]], [[], []]],
    "more on the second": [[[4]], [[0, 1, 2, 3, 5, 6]]],
}


class Model(nn.Module):
    """Odd sizes, so that ranks hold different numbers of rows, and sometimes none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(5, 3), "down_proj": nn.Linear(3, 5, bias=False)})
        self.norm = nn.RMSNorm(5)
        self.v_head = nn.Linear(5, 1)
        self.self_attn = nn.ModuleDict({"q_proj": nn.Linear(5, 5)})
        self.norm.requires_grad_(False)
        self.self_attn.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.self_attn["q_proj"](self.norm(x))
        value: Tensor = self.v_head(self.mlp["down_proj"](self.mlp["up_proj"](x).tanh()))
        return value


def stepped(model: nn.Module) -> dict[str, Any]:
    """Gradient norms, the move of one SGD step, and the frozen checksum around it."""
    model(torch.linspace(-1, 1, 20).view(4, 5)).square().mean().backward()
    before, checksum = gradients.Snapshot(model), gradients.frozen_checksum(model)
    norms = gradients.group_norms(model)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return {
        "norms": norms,
        "ratios": before.update_ratio(),
        "checksums": (checksum, gradients.frozen_checksum(model)),
    }


def placed(mesh: Any) -> nn.Module:
    """The same frozen parameters split by columns, replicated, or plain on each rank."""
    model = Model()
    if mesh is not None:
        query, norm = model.self_attn["q_proj"], model.norm
        query.weight = nn.Parameter(distribute_tensor(query.weight, mesh, [Shard(1)]), requires_grad=False)
        query.bias = nn.Parameter(distribute_tensor(query.bias, mesh, [Replicate()]), requires_grad=False)
        norm.weight = nn.Parameter(norm.weight, requires_grad=False)
    return model


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    made = case(1)
    results: dict[str, Any] = {name: measured(made, *split[rank]) for name, split in SPLITS.items()}
    lone = Sums()
    lone.collect("nothing", torch.zeros(0))
    results["nothing"] = len(reduce(lone).values("nothing"))
    model = Model()
    fully_shard(model.mlp["up_proj"], mesh=mesh)
    fully_shard(model, mesh=mesh)
    results["stepped"] = stepped(model)
    results["placed"] = gradients.frozen_checksum(placed(mesh))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, (str(folder),), nprocs=2)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("split", SPLITS)
def test_reduce_is_one_process(ranks: list[dict[str, Any]], split: str) -> None:
    whole = measured(case(1), list(range(7)))
    assert None not in (whole["value/auroc_first"], whole["delta/p99"], whole["value/ev"])
    for results in ranks:
        same(results[split], whole, rel=1e-9)


def test_gathering_nothing(ranks: list[dict[str, Any]]) -> None:
    assert [results["nothing"] for results in ranks] == [0, 0]


def test_shards_are_the_model(ranks: list[dict[str, Any]]) -> None:
    one = stepped(Model())
    for results in ranks:
        two = results["stepped"]
        assert two["checksums"] == one["checksums"]
        assert two["norms"].keys() == one["norms"].keys() == {"attention", "dense_mlp", "norms", "value_head"}
        for group, pair in one["norms"].items():
            assert two["norms"][group] == pytest.approx(pair, rel=1e-5)
            assert two["ratios"][group] == pytest.approx(one["ratios"][group], rel=1e-5)
        assert two["norms"]["attention"] == (0.0, 0.0) and two["norms"]["dense_mlp"][0] > 0
    assert one["checksums"][0] == one["checksums"][1]


def test_a_checksum_is_blind_to_placement(ranks: list[dict[str, Any]]) -> None:
    assert [results["placed"] for results in ranks] == [gradients.frozen_checksum(placed(None))] * 2
