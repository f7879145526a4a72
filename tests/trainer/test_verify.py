"""The proofs of invariants 4 and 5: every arm passes, and planted faults are found and named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import trainer.step
from harness.config import Config
from harness.registry import BUILTIN, find
from harness.trajectory import Trajectory
from tests.trainer import support
from trainer import estimate as estimation
from trainer.advantages.gae import SKIP_OBSERVATION
from trainer.advantages.types import AdvantageInput, Estimate, Outcomes, State
from trainer.losses.dis import dis_loss
from trainer.losses.types import PolicyLossInput, PolicyLossOutput
from trainer.verify import Proof, prove

HERE = "tests.trainer.test_verify"


@pytest.fixture(scope="module")
def stored() -> list[Trajectory]:
    """Groups, forks, a turn reward, and a limit that cut every third episode."""
    return [
        t.judged(t.reward or 0.0, t.turn_rewards, termination=("max_turns", "finished", "finished")[i % 3])
        for i, t in enumerate(support.grouped(0))
    ]


def config(**tables: Any) -> Config:
    algorithm = {"batch": 8, "group": 2, "loss_norm": "token_global"} | tables.pop("algorithm", {})
    trainer = {"micro_batch_tokens": 60} | tables.pop("trainer", {})
    return Config(environment={"id": "toy_repair"}, algorithm=algorithm, trainer=trainer, **tables)


def arm(loss: str = "dis", advantage: str = "skip_observation", **tables: Any) -> Config:
    return config(loss={"id": loss}, advantage={"id": advantage}, **tables)


def faults(proofs: dict[int, Proof]) -> dict[int, list[str]]:
    return {number: proof[2] for number, proof in proofs.items()}


NONE: dict[int, list[str]] = {4: [], 5: []}


@pytest.mark.parametrize("loss", BUILTIN["loss"])
def test_every_loss_passes(stored: list[Trajectory], loss: str) -> None:
    proofs = prove(stored, arm(loss, algorithm={"loss_norm": find("loss", loss).norm}))
    assert faults(proofs) == NONE
    assert proofs[4][0].startswith(f"sample of {len(stored)} trajectories") and ", 0 with" not in proofs[4][0]


@pytest.mark.parametrize("advantage", [name for name in BUILTIN["advantage"] if name != "through_observation"])
def test_every_estimator_passes(stored: list[Trajectory], advantage: str) -> None:
    proofs = prove(stored, arm(advantage=advantage))
    assert faults(proofs) == NONE and proofs[5][0] and ", 0 with" not in proofs[5][0]


@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage_norm": "global_mean_std"},
        {"advantage_norm": "global_std_only", "truncation": "bootstrap"},
        {"truncation": "mask", "loss_norm": "token_kept"},
        {"control": "flip_sign", "loss_norm": "seq_sum_const"},
    ],
    ids=str,
)
def test_every_setting_passes(stored: list[Trajectory], algorithm: dict[str, Any]) -> None:
    assert faults(prove(stored, arm(algorithm=algorithm, critic={"value_clip": 0.2, "lam": 0.9}))) == NONE


def test_the_control_that_reads_observations_is_told_apart(stored: list[Trajectory]) -> None:
    proofs = prove(stored, arm(advantage="through_observation"))
    assert "the advantage moves when observations hold 1e9" in proofs[4][2][0] and proofs[5][2] == []


def test_a_group_estimator_without_a_group_is_proved_on_its_loss_only(stored: list[Trajectory]) -> None:
    alone = [t for t in stored if t.episode_id == "g0-0-1"]
    proofs = prove(alone, arm(advantage="rloo"), estimator=False)
    assert faults(proofs) == NONE and "no complete group for rloo" in proofs[4][1] and proofs[4][0]


def test_a_sample_that_is_not_trained_proves_nothing(stored: list[Trajectory]) -> None:
    cut = [t for t in stored if t.info["termination"] == "max_turns"]
    proofs = prove(cut, arm(algorithm={"truncation": "mask"}))
    assert proofs[4] == proofs[5] == ("", "no token of the sample has a gradient", [])


def test_two_proofs_are_the_same(stored: list[Trajectory]) -> None:
    assert prove(stored, arm()) == prove(stored, arm())


# --- planted faults --------------------------------------------------------------------------------------------------


def reads_the_token_before(inputs: AdvantageInput, lam: float | Tensor) -> Estimate:
    """In the same trajectory, whose first token has no value of its own."""
    real = SKIP_OBSERVATION.estimate(inputs, lam)
    second = torch.zeros_like(inputs.mask).index_fill_(0, inputs.cu_seqlens[:-1], True).roll(1)
    leak = torch.where(inputs.mask & ~second, 1e-3 * inputs.values.roll(1), 0.0)
    return Estimate(real.advantages + leak, real.returns)


def centred_on_the_micro_batch(inputs: AdvantageInput, lam: float | Tensor) -> Estimate:
    real = SKIP_OBSERVATION.estimate(inputs, lam)
    mean = real.advantages.sum() / inputs.mask.sum()
    return Estimate(torch.where(inputs.mask, real.advantages - mean, 0.0), real.returns)


class Reads(find("advantage", "skip_observation")):  # type: ignore[misc]
    function = dataclasses.replace(SKIP_OBSERVATION, estimate=reads_the_token_before)


class Centred(find("advantage", "skip_observation")):  # type: ignore[misc]
    function = dataclasses.replace(SKIP_OBSERVATION, estimate=centred_on_the_micro_batch)


class Supervised(find("advantage", "skip_observation")):  # type: ignore[misc]
    function = dataclasses.replace(SKIP_OBSERVATION, supervised=lambda inputs: torch.ones_like(inputs.mask))


def by_position(outcomes: Outcomes, state: State) -> tuple[Tensor, State]:
    return outcomes.rewards * torch.arange(len(outcomes.rewards)), state


class ByPosition(find("advantage", "batch_norm")):  # type: ignore[misc]
    function = staticmethod(by_position)


def all_tokens(inputs: PolicyLossInput, **options: float) -> PolicyLossOutput:
    return dis_loss(dataclasses.replace(inputs, mask=torch.ones_like(inputs.mask)), **options)


def unselected(inputs: PolicyLossInput, **options: float) -> PolicyLossOutput:
    """The mask multiplied in at the end: zero times NaN."""
    output = dis_loss(inputs, **options)
    loss = -output.weight * inputs.advantages * inputs.logprobs * output.keep
    return dataclasses.replace(output, token_loss=loss)


def mean_of_micro_batch(inputs: PolicyLossInput, **options: float) -> PolicyLossOutput:
    output = dis_loss(inputs, **options)
    return dataclasses.replace(output, token_loss=output.token_loss / max(int(inputs.mask.sum()), 1))


class AllTokens(find("loss", "dis")):  # type: ignore[misc]
    function = staticmethod(all_tokens)


class Unselected(find("loss", "dis")):  # type: ignore[misc]
    function = staticmethod(unselected)


class MeanOfMicroBatch(find("loss", "dis")):  # type: ignore[misc]
    function = staticmethod(mean_of_micro_batch)


@pytest.mark.parametrize(
    ("tables", "invariant", "words"),
    [
        ({"advantage": f"{HERE}:Reads"}, 4, "the advantage moves when observations hold"),
        ({"advantage": f"{HERE}:Supervised"}, 4, "the value loss has a gradient on an observation"),
        ({"advantage": f"{HERE}:Centred"}, 5, "the advantage differs with"),
        ({"advantage": f"{HERE}:ByPosition"}, 5, "the advantage differs with one trajectory per micro-batch, backwards"),
        ({"loss": f"{HERE}:AllTokens"}, 4, "AllTokens moves when observations hold 1e9"),
        ({"loss": f"{HERE}:Unselected"}, 4, "moves when observations hold NaN"),
        ({"loss": f"{HERE}:MeanOfMicroBatch"}, 5, "the gradient of the policy loss differs with"),
    ],
    ids=lambda x: next(iter(x.values())).partition(":")[2] if isinstance(x, dict) else None,
)
def test_a_planted_plug_in_is_found(stored: list[Trajectory], tables: dict[str, str], invariant: int, words: str) -> None:
    found = faults(prove(stored, arm(**tables)))
    assert words in "\n".join(found[invariant]) and found[9 - invariant] == []
    assert any(".0.parquet: position " in fault for fault in found[invariant])


def test_a_mean_of_means_is_found(stored: list[Trajectory], monkeypatch: pytest.MonkeyPatch) -> None:
    real = trainer.step.trajectory_weights
    monkeypatch.setattr(
        trainer.step, "trajectory_weights", lambda norm, counts, totals: real(norm, counts, totals) / counts.sum()
    )
    found = faults(prove(stored, arm()))
    assert found[4] == [] and "the gradient of the policy loss differs with all in one micro-batch" in found[5][0]
    assert any(fault.startswith("the policy loss is") for fault in found[5])


def test_whitening_per_micro_batch_is_found(stored: list[Trajectory], monkeypatch: pytest.MonkeyPatch) -> None:
    real = estimation._whiten

    def each(batches: Any, objective: Any) -> None:
        for batch in batches:
            real([batch], objective)

    monkeypatch.setattr(estimation, "_whiten", each)
    found = faults(prove(stored, arm(algorithm={"advantage_norm": "global_mean_std"})))
    assert found[4] == [] and found[5]
