"""Metrics are global: splitting a batch over micro-batches and ranks changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.advantages.whiten import whiten
from trainer.losses.dis import dis_loss
from trainer.losses.types import PolicyLossInput
from trainer.metrics import Sums, add_policy, add_staleness, add_value, reduce, report

BAND = {"eps_low": 0.3, "eps_high": 5.0}


def batch(lengths: list[int], seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    mask = torch.rand(n, generator=rng) < 0.6
    rollout = torch.where(mask, -torch.rand(n, generator=rng) * 5, math.nan)
    return {
        "lengths": torch.tensor(lengths),
        "mask": mask,
        "rollout": rollout,
        "logprobs": rollout.nan_to_num(0.0) + torch.randn(n, generator=rng),
        "advantages": torch.randn(n, generator=rng),
        "values": torch.rand(n, generator=rng),
        "targets": (torch.rand(n, generator=rng) < 0.5).float(),
        "entropy": torch.where(mask, torch.rand(n, generator=rng), math.nan),
        "staleness": torch.where(mask, torch.randint(0, 3, (n,), generator=rng), 99),
    }


def part(b: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    """Trajectories first:last."""
    edges = torch.nn.functional.pad(b["lengths"].cumsum(0), (1, 0))
    tokens = slice(int(edges[first]), int(edges[last]))
    return {name: x[first:last] if name == "lengths" else x[tokens] for name, x in b.items()}


def add_all(sums: Sums, b: dict[str, Tensor]) -> None:
    cu = torch.nn.functional.pad(b["lengths"].cumsum(0), (1, 0))
    inputs = PolicyLossInput(b["logprobs"], b["rollout"], b["advantages"], b["mask"])
    add_policy(sums, inputs, dis_loss(inputs, **BAND), b["staleness"], b["entropy"], **BAND)
    add_value(sums, b["values"], b["targets"], b["mask"], cu)
    add_staleness(sums, b["staleness"], b["mask"], cu)


def metrics(*parts: dict[str, Tensor]) -> dict[str, float | None]:
    sums = Sums()
    for b in parts:
        add_all(sums, b)
    return report(reduce(sums))


def same(a: dict[str, float | None], b: dict[str, float | None]) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        y = b[name]
        assert x is y is None or x == pytest.approx(y, rel=1e-6, abs=1e-9), name


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 2**31), st.data())
def test_micro_batches_change_nothing(lengths: list[int], seed: int, data: st.DataObject) -> None:
    b = batch(lengths, seed)
    cut = data.draw(st.integers(0, len(lengths)))
    same(metrics(b), metrics(part(b, 0, cut), part(b, cut, len(lengths))))


def test_formulas_on_plain_lists() -> None:
    lengths = [7, 0, 5, 9, 3]
    b = batch(lengths, seed=3)
    m = metrics(b)
    mask = b["mask"]
    delta = (b["logprobs"] - b["rollout"])[mask].double()
    rho, kept = delta.exp(), (delta.exp() > 0.7) & (delta.exp() < 6.0)
    w, a, n = rho * kept, b["advantages"][mask].double(), int(mask.sum())
    fresh = b["staleness"][mask] == 0
    error = b["values"][mask].double() - b["targets"][mask].double()
    rows = torch.repeat_interleave(torch.arange(5), b["lengths"])[mask].tolist()
    versions = [{s for s, r in zip(b["staleness"][mask].tolist(), rows, strict=True) if r == row} for row in set(rows)]
    expected: dict[str, Any] = {
        "dis/mask_frac": 1 - kept.double().mean(),
        "dis/mask_low": (rho <= 0.7).double().mean(),
        "dis/mask_high": (rho >= 6.0).double().mean(),
        "dis/mean_ratio": rho.mean(),
        "dis/ess": w.sum() ** 2 / (n * (w**2).sum()),
        "mismatch/abs_logp_diff": delta.abs().mean(),
        "mismatch/abs_logp_diff_fresh": delta[fresh].abs().mean(),
        "kl/k1": -delta.mean(),
        "kl/k2": (delta**2).mean() / 2,
        "kl/k3": (rho - 1 - delta).mean(),
        "entropy/exact": b["entropy"][mask].mean(),
        "entropy/sampled": -b["logprobs"][mask].mean(),
        "adv/mean": a.mean(),
        "adv/std": a.std(correction=0),
        "adv/abs": a.abs().mean(),
        "data/nonfinite_rollout_logp": 0,
        "value/ev": 1 - error.var(correction=0) / b["targets"][mask].double().var(correction=0),
        "value/bias": error.mean(),
        "value/mse": (error**2).mean(),
        "staleness/mean": b["staleness"][mask].double().mean(),
        "staleness/max": b["staleness"][mask].max(),
        "async/mixed_version_frac": sum(len(v) > 1 for v in versions) / len(versions),
    }
    got = {name: m[name] for name in expected}
    same(got, {name: float(x) for name, x in expected.items()})
    assert m.keys() - expected.keys() == {"value/ev_traj", "value/ev_first"}


def test_nothing_to_measure_is_none_not_nan_or_zero() -> None:
    b = batch([4], seed=0)
    b["mask"] = torch.zeros(4, dtype=torch.bool)
    m = metrics(b)
    assert m.pop("data/nonfinite_rollout_logp") == 0
    assert set(m.values()) == {None}
    assert report(Sums()) == {}


def test_explained_variance_is_none_when_targets_hardly_vary() -> None:
    mask, cu = torch.ones(4, dtype=torch.bool), torch.tensor([0, 2, 4])
    for spread, defined in ((1e-5, False), (1e-3, True)):
        sums = Sums()
        add_value(sums, torch.rand(4), torch.tensor([0.5, 0.5, 0.5 + spread, 0.5 + spread]), mask, cu)
        m = report(sums)
        assert [m[name] is not None for name in ("value/ev", "value/ev_traj", "value/ev_first")] == [defined] * 3
        assert m["value/mse"] is not None


def test_wild_deltas_do_not_hide_the_rest() -> None:
    rollout = torch.tensor([-1.0, -1000.0, math.nan, -math.inf])
    inputs = PolicyLossInput(torch.tensor([-1.0, 0.0, -1.0, -1.0]), rollout, torch.ones(4), torch.ones(4, dtype=torch.bool))
    sums = Sums()
    add_policy(sums, inputs, dis_loss(inputs, **BAND), torch.zeros(4), torch.ones(4), **BAND)
    m = report(sums)
    assert m["data/nonfinite_rollout_logp"] == 2
    assert m["dis/mask_frac"] == 0.75
    assert m["kl/k1"] == -500.0
    assert m["dis/mean_ratio"] == pytest.approx((1 + math.exp(20)) / 2)
    assert None not in m.values()


def test_a_token_on_the_bound_counts_as_masked_on_its_side() -> None:
    inputs = PolicyLossInput(
        torch.zeros(2), torch.tensor([-math.log(0.5), -math.log(2.0)]), torch.ones(2), torch.ones(2, dtype=torch.bool)
    )
    sums = Sums()
    output = dis_loss(inputs, eps_low=0.5, eps_high=1.0)
    add_policy(sums, inputs, output, torch.zeros(2), torch.ones(2), eps_low=0.5, eps_high=1.0)
    m = report(sums)
    assert (m["dis/mask_frac"], m["dis/mask_low"], m["dis/mask_high"]) == (1.0, 0.5, 0.5)


def test_a_version_switch_between_trajectories_is_not_mixed() -> None:
    sums = Sums()
    mask = torch.tensor([True, False, True, True, True])
    add_staleness(sums, torch.tensor([2, 50, 2, 1, 1]), mask, torch.tensor([0, 3, 5]))
    assert report(sums) == {"staleness/mean": 1.5, "staleness/max": 2.0, "async/mixed_version_frac": 0.0}


def _rank(rank: int, folder: str, b: dict[str, Tensor]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for name, cuts in SPLITS.items():
        mine = part(b, cuts[rank], cuts[rank + 1])
        sums = Sums()
        add_all(sums, mine)
        result: dict[str, Any] = {"metrics": report(reduce(sums)), "white": whiten(mine["advantages"], mine["mask"])}
        torch.save(result, f"{folder}/{name}-{rank}.pt")
    dist.destroy_process_group()


SPLITS = {"uneven": [0, 1, 4], "one rank empty": [0, 4, 4]}


def test_ranks_change_nothing(tmp_path: Path) -> None:
    """Two gloo processes give the numbers of one."""
    b = batch([5, 9, 2, 11], seed=4)
    mp.spawn(_rank, (str(tmp_path), b), nprocs=2)
    for name in SPLITS:
        results = [torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2)]
        for result in results:
            same(result["metrics"], metrics(b))
        torch.testing.assert_close(torch.cat([r["white"] for r in results]), whiten(b["advantages"], b["mask"]))
