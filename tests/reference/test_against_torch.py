"""The torch implementation against the reference on 1,000 random ragged batches, to 1e-6 absolute plus relative.

Observations carry poison wherever a family must not read them.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.reference import critic, gae, losses, outcomes
from tests.reference.cases import GAMMAS, Case, Episodes, make_cases, make_run, pack
from trainer.advantages.types import AdvantageInput, CriticEstimator, Outcomes
from trainer.losses.types import PolicyLossInput

COUNT, SEED, ALPHA = 1000, 20260708, 1.5


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def batches(zero_actions: bool) -> list[Case]:
    """The cases; trajectories without an action token are dropped before training, only estimators must survive them."""
    return make_cases(COUNT, SEED, zero_actions=zero_actions)


def implementation(path: str) -> Any:
    """`module:name` below `trainer`."""
    module, name = path.split(":")
    return getattr(importlib.import_module(f"trainer.{module}"), name)


def close(actual: Any, expected: Any, atol: float = 1e-6) -> None:
    """Equal to 1e-6 absolute plus 1e-6 relative."""
    actual = actual.detach().numpy() if isinstance(actual, torch.Tensor) else np.asarray(actual)
    np.testing.assert_allclose(actual.astype(np.float64), np.asarray(expected, np.float64), rtol=1e-6, atol=atol)


def f32(array: Any) -> torch.Tensor:
    """A float32 tensor."""
    return torch.tensor(np.asarray(array), dtype=torch.float32)


# --- a critic's values -----------------------------------------------------------------------------------------------


def skip(case: Case, b: int, s: slice, lam: float) -> tuple[Any, ...]:
    """(A, G, steps, tokens that train the critic) of trajectory b, by the reference."""
    mask = case.mask[s]
    pair = gae.skip_observation(case.values[s], case.rewards[s], mask, case.gamma, lam, case.bootstrap[b])
    return *pair, int(mask.sum()), mask


def through(case: Case, b: int, s: slice, lam: float) -> tuple[Any, ...]:
    """The same through observations."""
    mask = case.mask[s]
    where = np.flatnonzero(mask)
    pair = gae.through_observations(case.values[s], case.rewards[s], mask, case.gamma, lam, case.bootstrap[b])
    return *pair, int(where[-1] - where[0] + 1) if len(where) else 0, mask


def step(kind: Any, case: Case, b: int, s: slice, lam: float) -> tuple[Any, ...]:
    """The same by turns."""
    turn_ids = case.turn_ids[s]
    pair = gae.step_level(case.values[s], case.rewards[s], turn_ids, case.gamma, lam, case.bootstrap[b], kind)
    last = np.array([turn >= 0 and (t + 1 == len(turn_ids) or turn_ids[t + 1] != turn) for t, turn in enumerate(turn_ids)])
    return *pair, int(turn_ids.max()) + 1, case.mask[s] if kind == "average" else last


CRITICS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "advantages.gae:SKIP_OBSERVATION": skip,
    "advantages.through:THROUGH_OBSERVATIONS": through,
    "advantages.step:STEP_AVERAGE": functools.partial(step, "average"),
    "advantages.step:STEP_LAST": functools.partial(step, "last"),
}


def unread(path: str, case: Case) -> np.ndarray:
    """Tokens whose values the estimator must not read: observations; with `through` those outside the steps."""
    if "through" not in path:
        return ~case.mask
    outside = np.ones(len(case.mask), bool)
    for _, s in case.bounds():
        where = np.flatnonzero(case.mask[s])
        if len(where):
            outside[s.start + where[0] : s.start + where[-1] + 1] = False
    return outside


def estimator_input(path: str, case: Case, poison: float) -> AdvantageInput:
    """The torch side of a case."""
    return AdvantageInput(
        values=f32(np.where(unread(path, case), poison, case.values)),
        rewards=f32(case.rewards),
        mask=torch.tensor(case.mask),
        turn_ids=torch.tensor(case.turn_ids),
        cu_seqlens=torch.tensor(case.cu_seqlens),
        bootstrap=f32(case.bootstrap),
        gamma=case.gamma,
    )


def check_estimator(path: str, case: Case, lam: float | str, poison: float) -> None:
    """A, G, lengths and critic tokens of one pack; `lam` "adaptive" is one lambda per trajectory."""
    estimator: CriticEstimator = implementation(path)
    inputs = estimator_input(path, case, poison)
    lengths = estimator.length(inputs)
    assert lengths.dtype == torch.int64
    lambdas = [gae.length_adaptive_lambda(int(n), ALPHA) if lam == "adaptive" else float(lam) for n in lengths]
    found = [CRITICS[path](case, b, s, lambdas[b]) for b, s in case.bounds()]
    estimate = estimator.estimate(inputs, torch.tensor(lambdas, dtype=torch.float64) if lam == "adaptive" else float(lam))
    assert lengths.tolist() == [row[2] for row in found]
    assert estimator.supervised(inputs).tolist() == np.concatenate([row[3] for row in found]).tolist()
    assert estimate.advantages.dtype == estimate.returns.dtype == torch.float32
    close(estimate.advantages, np.concatenate([row[0] for row in found]))
    close(estimate.returns, np.concatenate([row[1] for row in found]))


@pytest.mark.parametrize("path", CRITICS)
def test_estimator_batch_by_batch(path: str) -> None:
    for case in batches(zero_actions=False):
        check_estimator(path, case, case.lam, poison=1e9)


@pytest.mark.parametrize("lam", [1.0, "adaptive"])
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("path", CRITICS)
def test_estimator_in_one_pack_with_trajectories_without_actions(path: str, gamma: float, lam: float | str) -> None:
    case = pack([case for case in batches(zero_actions=True) if case.gamma == gamma])
    assert any(not case.mask[s].any() for _, s in case.bounds())
    check_estimator(path, case, lam, poison=math.nan)


def test_length_adaptive_lambda() -> None:
    lengths, function = [*range(1, 200), 1000, 10_000, 131_072], implementation("advantages.gae:length_adaptive_lambda")
    for alpha in (0.05, 1.5):
        expected = [gae.length_adaptive_lambda(n, alpha) for n in lengths]
        close(function(torch.tensor(lengths), alpha), expected, atol=1e-15)


def test_return_to_go() -> None:
    for gamma in GAMMAS:
        case = pack([case for case in batches(zero_actions=True) if case.gamma == gamma])
        found = implementation("advantages.reinforce:return_to_go")(
            f32(case.rewards), torch.tensor(case.mask), torch.tensor(case.cu_seqlens), gamma=gamma
        )
        close(found, np.concatenate([outcomes.return_to_go(case.rewards[s], case.mask[s], gamma) for _, s in case.bounds()]))


@pytest.mark.parametrize("centre", [True, False])
def test_whiten(centre: bool) -> None:
    for case in batches(zero_actions=True):
        found = implementation("advantages.whiten:whiten")(f32(case.advantages), torch.tensor(case.mask), centre=centre)
        close(found[case.mask], outcomes.whiten(case.advantages[case.mask].tolist(), centre))
        assert (found[~case.mask] == 0).all() or found[~case.mask].isnan().all()


# --- rewards alone ---------------------------------------------------------------------------------------------------


class Stateless:
    """A function of one batch, (rewards, prompts) -> advantages, as a tracker."""

    def __init__(self, function: Callable[[list[float], tuple[str, ...]], list[float]]) -> None:
        self.function = function

    def batch(self, episodes: Episodes) -> list[float]:
        return self.function(episodes.rewards, episodes.prompts)


class Running:
    """The running mean over the batches of a run."""

    def __init__(self, **options: Any) -> None:
        self.tracker = outcomes.RunningMean(**options)

    def batch(self, episodes: Episodes) -> list[float]:
        return [self.tracker.step(*pair) for pair in zip(episodes.rewards, episodes.prompts, strict=True)]


class Spo:
    """A tracker per prompt over the batches of a run."""

    def __init__(self, **options: float) -> None:
        self.options, self.trackers, self.visited = options, {}, {}

    def batch(self, episodes: Episodes) -> list[float]:
        found = []
        for reward, prompt in zip(episodes.rewards, episodes.prompts, strict=True):
            tracker = self.trackers.setdefault(prompt, outcomes.SpoTracker(**self.options))
            found.append(tracker.step(reward, episodes.drift - self.visited.get(prompt, episodes.drift)))
            self.visited[prompt] = episodes.drift
        return found


SPO = {"d_half": 0.06, "rho_min": 0.875, "rho_max": 0.96, "v0": 0.4}
RUNNING = [
    {"window": window, "per_prompt": per_prompt, "inclusive": inclusive, "initial": 0.3}
    for window, per_prompt, inclusive in ((8, True, False), (3, True, False), (128, False, True), (3, False, True))
]
OUTCOMES: list[tuple[str, dict[str, Any], Callable[[], Any]]] = [
    ("group:group_normalised", {}, lambda: Stateless(lambda r, p: outcomes.grpo(r, p, "population"))),
    ("group:group_normalised", {"std": "sample"}, lambda: Stateless(lambda r, p: outcomes.grpo(r, p, "sample"))),
    ("group:leave_one_out", {}, lambda: Stateless(outcomes.rloo)),
    ("group:group_centred", {}, lambda: Stateless(outcomes.dr_grpo)),
    ("batch_norm:batch_normalised", {}, lambda: Stateless(lambda r, p: outcomes.batch_norm(r))),
    ("spo:spo", SPO, lambda: Spo(**SPO)),
    *[("running_mean:running_mean", options, functools.partial(Running, **options)) for options in RUNNING],
]


def without_groups_of_one(episodes: Episodes) -> Episodes:
    """Leave-one-out is not defined for them; the implementation refuses them."""
    again = [i for i, prompt in enumerate(episodes.prompts) if episodes.prompts.count(prompt) > 1]
    return Episodes([episodes.rewards[i] for i in again], tuple(episodes.prompts[i] for i in again), episodes.drift)


def test_leave_one_out_refuses_a_group_of_one() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    with pytest.raises(ValueError, match="single"):
        implementation("advantages.group:leave_one_out")(Outcomes(rewards, ("a", "a", "b")), {})


@pytest.mark.parametrize(("path", "options", "reference"), OUTCOMES)
def test_outcomes(path: str, options: dict[str, Any], reference: Callable[[], Any]) -> None:
    function = implementation(f"advantages.{path}")
    for rng in np.random.default_rng(SEED).spawn(COUNT // 4):
        state, tracker = {}, reference()
        for episodes in make_run(rng):
            if path == "group:leave_one_out":
                episodes = without_groups_of_one(episodes)
            rewards = torch.tensor(episodes.rewards, dtype=torch.float64)
            found, state = function(Outcomes(rewards, episodes.prompts, episodes.drift), state, **options)
            assert found.dtype == torch.float64
            close(found, tracker.batch(episodes), atol=1e-9)


# --- losses ----------------------------------------------------------------------------------------------------------


LOSSES: list[tuple[str, dict[str, Any], Callable[..., list[losses.Token]], tuple[float, ...]]] = [
    ("dis:dis_loss", {"eps_low": 0.3, "eps_high": 5.0}, losses.dis, (0.3, 5.0)),
    ("dis:dis_loss", {"eps_low": 0.8, "eps_high": 3.0}, losses.dis, (0.8, 3.0)),
    ("dis:dis_loss", {"eps_low": 1.0, "eps_high": 0.1}, losses.dis, (1.0, 0.1)),
    *[
        (path, {**options, "old": old}, function, tuple(options.values()))
        for path, options, function in (
            ("ppo_clip:clipped_surrogate", {"eps_low": 0.2, "eps_high": 0.28}, losses.ppo_clip),
            ("gspo:gspo_loss", {"eps_low": 3e-4, "eps_high": 4e-4}, losses.gspo),
            ("gspo:gspo_loss", {"eps_low": 0.2, "eps_high": 0.28}, losses.gspo),
            ("cispo:cispo_loss", {"eps_high": 0.28}, losses.cispo),
        )
        for old in ("rollout", "trainer")
    ],
    ("tis:tis_loss", {"cap": 2.0}, losses.tis, (2.0,)),
    ("mis:mis_loss", {"low": 0.5, "high": 5.0}, losses.mis, (0.5, 5.0)),
    ("sequence_rejection:sequence_rejection_loss", {"low": 0.999, "high": 1.002}, losses.sequence_rejection, (0.999, 1.002)),
    ("sequence_rejection:sequence_rejection_loss", {"low": 0.9, "high": 1.1}, losses.sequence_rejection, (0.9, 1.1)),
]


def check_loss(case: Case, path: str, options: dict[str, Any], function: Callable[..., Any], bounds: Any) -> np.ndarray:
    """Keep flags, weights, loss values and gradients of one pack; (action tokens, kept ones)."""
    logp = f32(case.logp).requires_grad_()
    inputs = PolicyLossInput(
        logprobs=logp,
        rollout_logprobs=f32(case.rollout_logp),
        advantages=f32(case.advantages),
        mask=torch.tensor(case.mask),
        cu_seqlens=torch.tensor(case.cu_seqlens),
        old_logprobs=f32(case.old_logp),
    )
    output = implementation(f"losses.{path}")(inputs, **options)
    output.token_loss.sum().backward()
    behaviour = case.old_logp if options.get("old") == "trainer" else case.rollout_logp
    expected = np.zeros((len(case.mask), 4))
    for _, s in case.bounds():
        where = s.start + np.flatnonzero(case.mask[s])
        columns = (array[where].tolist() for array in (case.logp, behaviour, case.advantages))
        expected[where] = np.array(function(*columns, *bounds)).reshape(-1, 4)
    np.testing.assert_array_equal(output.keep.numpy(), expected[:, 0] == 1)
    assert not output.weight.requires_grad
    for actual, column in ((output.weight, 1), (output.token_loss, 2), (logp.grad, 3)):
        close(actual, expected[:, column])
    return np.array([case.mask.sum(), output.keep.sum()])


@pytest.mark.parametrize(("path", "options", "function", "bounds"), LOSSES)
def test_loss(path: str, options: dict[str, Any], function: Callable[..., Any], bounds: tuple[float, ...]) -> None:
    cases = batches(zero_actions=False)
    packs = [*cases[:50], *(pack(cases[i : i + 50]) for i in range(0, COUNT, 50))]
    actions, kept = sum(check_loss(case, path, options, function, bounds) for case in packs)
    never = function in (losses.tis, losses.cispo)
    assert 0.1 * actions < kept and (kept == actions if never else kept < 0.99 * actions), "both sides of the band are compared"


@pytest.mark.parametrize(("path", "options", "function", "bounds"), LOSSES)
def test_loss_rejects_records_that_are_not_finite(
    path: str, options: dict[str, Any], function: Callable[..., Any], bounds: tuple[float, ...]
) -> None:
    """About one in ten behaviour log-probs of action tokens is NaN or infinite, and one pack has no trajectory with actions."""
    case = pack(batches(zero_actions=True)[:100])
    rng = np.random.default_rng(SEED)
    broken = np.where(rng.random(len(case.mask)) < 0.1, rng.choice([np.nan, np.inf, -np.inf], len(case.mask)), 0.0)
    case = replace(case, rollout_logp=case.rollout_logp + broken, old_logp=case.old_logp + broken)
    check_loss(case, path, options, function, bounds)


@pytest.mark.parametrize(
    ("path", "options", "function", "bounds"), [row for row in LOSSES if "eps_low" not in row[1] or "dis" in row[0]]
)
def test_weighted_loss_survives_extreme_ratios(
    path: str, options: dict[str, Any], function: Callable[..., Any], bounds: tuple[float, ...]
) -> None:
    """Delta of +-1000 nats on about one in twenty tokens."""
    case = pack(batches(zero_actions=False)[100:200])
    rng = np.random.default_rng(SEED)
    broken = np.where(rng.random(len(case.mask)) < 0.05, rng.choice([-1000.0, 1000.0], len(case.mask)), 0.0)
    moved = {name: getattr(case, name).astype(np.float32) + broken.astype(np.float32) for name in ("rollout_logp", "old_logp")}
    check_loss(replace(case, **moved), path, options, function, bounds)


def test_no_sequence_ratio_stands_on_a_bound() -> None:
    """Otherwise float32 and float64 may differ in which side it is on, and the comparison would be a matter of luck."""
    logs = np.log([1 - 3e-4, 1 + 4e-4, 0.8, 1.28, 0.999, 1.002, 0.9, 1.1])
    for case in batches(zero_actions=False):
        for _, s in case.bounds():
            for behaviour in (case.rollout_logp, case.old_logp):
                if case.mask[s].any():
                    mean = np.mean((case.logp[s] - behaviour[s])[case.mask[s]])
                    assert np.abs(mean - logs).min() > 2e-7


@pytest.mark.parametrize("path", ["ppo_clip:clipped_surrogate", "gspo:gspo_loss"])
def test_the_trainers_own_ratio_is_one_without_old_logprobs(path: str) -> None:
    """One step per batch: pi_old is the policy itself, nothing is clipped."""
    case = pack(batches(zero_actions=False)[:100])
    actions = torch.tensor(case.mask)
    inputs = PolicyLossInput(
        f32(case.logp).requires_grad_(), f32(case.rollout_logp), f32(case.advantages), actions, torch.tensor(case.cu_seqlens)
    )
    output = implementation(f"losses.{path}")(inputs, eps_low=0.2, eps_high=0.28, old="trainer")
    assert torch.equal(output.keep, actions)
    assert torch.equal(output.weight, actions.float())


# --- the critic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(clip: float | None) -> None:
    """The squared error per token, clipped as in PPO or not, nothing of an observation."""
    function = implementation("losses.value:value_loss")
    rng = np.random.default_rng(SEED)
    for case in batches(zero_actions=True):
        targets, old = (np.float32(case.values + rng.normal(0, 0.3, len(case.mask))).astype(float) for _ in range(2))
        columns = [np.where(case.mask, array, math.nan) for array in (case.values, targets, old)]
        values = f32(columns[0]).requires_grad_()
        found = function(values, f32(columns[1]), torch.tensor(case.mask), old_values=f32(columns[2]), clip=clip)
        found.sum().backward()
        expected = np.zeros(len(case.mask))
        expected[case.mask] = critic.squared_error(*(array[case.mask].tolist() for array in columns), clip)
        close(found, expected)
        if clip is None:
            close(values.grad, np.where(case.mask, 2 * (case.values - targets), 0.0))


def test_explained_variance() -> None:
    """The three weightings over packs of trajectories, some without an action."""
    measure, facts_of, sums_of = (
        importlib.import_module("trainer.measure.critic"),
        implementation("measure.tokens:TokenFacts"),
        implementation("measure.sums:Sums"),
    )
    cases = batches(zero_actions=True)
    for case in (pack(cases[i : i + 20]) for i in range(0, COUNT, 20)):
        targets = np.float32(0.5 * case.values + np.roll(case.values, 1)).astype(float)
        counts = [int(case.mask[s].sum()) for _, s in case.bounds()]
        rank = torch.tensor([j for n in counts for j in range(n)])
        zero = torch.zeros_like(rank)
        row = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        facts = facts_of(row, rank, torch.tensor(counts), zero, zero, 10 * rank // 40, zero, rank == 0, rank == 0)
        sums, success = sums_of(), torch.arange(len(counts)) % 2 == 0
        measure.add(sums, f32(case.values[case.mask]), f32(targets[case.mask]), facts, success, r_min=0.0, r_max=1.0)
        ragged = [[array[s][case.mask[s]].tolist() for _, s in case.bounds()] for array in (case.values, targets)]
        found = measure.report(sums)
        for weighting, key in (("token", "ev"), ("trajectory", "ev_traj"), ("first", "ev_first")):
            close(found[f"value/{key}"], critic.explained_variance(*ragged, weighting))  # type: ignore[arg-type]
