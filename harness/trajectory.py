"""A trajectory: the exact tokens of one episode, tiled by action and observation spans.

Flows in: token ids, log-probs and weight versions as the engine reported them (through `harness.session`, the only writer).
Flows out: plain numpy arrays and a parquet file; nothing here knows torch, a tokenizer or a reward function.

A two-turn episode `P A O A` (prompt, action, observation, action):

    tokens            p0   p1   a0   a1   o0   o1   a2
    spans             [observation)[  action )[ observation)[action)
    loss_mask          0    0    1    1    0    0    1        derived from the spans
    rollout_logprobs  nan  nan -0.1 -0.7  nan  nan -0.2       log pi_rollout(token | all before it), nats
    policy_versions    -1   -1    4    5   -1   -1    5       weights that sampled the token; may change inside an action
    turn_ids           -1   -1    0    0   -1   -1    1
    token_rewards       0    0    0    0    0    0    R       the terminal reward sits on the last ACTION token
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import InvariantError

SpanKind = Literal["action", "observation"]
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop): sampled by the policy in turn `turn` (action), or anything else (observation, turn -1)."""

    kind: SpanKind
    start: int
    stop: int
    turn: int = -1


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished trajectory of L tokens. Arrays are [L]; every invariant is checked on construction.

    Raises `InvariantError` when spans do not tile [0, L), an action token lacks a finite log-prob or a version,
    or an observation token has either.
    """

    episode_id: str
    task_id: str
    tokens: npt.NDArray[np.int32]
    """Exact ids that the engine consumed and produced."""
    turn_ids: npt.NDArray[np.int32]
    """Turn of an action token, -1 on observations; the spans are its runs."""
    rollout_logprobs: npt.NDArray[np.float32]
    """log pi_rollout of the sampled token, nats; NaN on observations."""
    policy_versions: npt.NDArray[np.int32]
    """Completed policy steps of the weights that sampled the token; -1 on observations."""
    reward: float | None = None
    """Terminal reward; None while unjudged."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Optional extra reward of a turn, placed on its last action token."""
    segment: int = 0
    """Index of the fork, where an agent rewrote its history."""
    info: dict[str, Any] = field(default_factory=dict)
    """Facts for the record (termination, sampling contract, timings); JSON-serialisable."""
    experts: npt.NDArray[np.int32] | None = None
    """[n, layers, experts per token]: where a mixture of experts sent the first n <= L tokens, where the engine told it."""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        for name in ("turn_ids", "rollout_logprobs", "policy_versions"):
            if getattr(self, name).shape != (n,):
                raise InvariantError(f"trajectory {self.episode_id}: {name} has shape {getattr(self, name).shape}, not ({n},)")
        mask = self.loss_mask
        if not np.isfinite(self.rollout_logprobs[mask]).all():
            raise InvariantError(f"trajectory {self.episode_id}: an action token has no finite rollout_logprob")
        if (self.rollout_logprobs[mask] > 1e-4).any():
            raise InvariantError(f"trajectory {self.episode_id}: a rollout_logprob is above 0")
        if (self.policy_versions[mask] < 0).any():
            raise InvariantError(f"trajectory {self.episode_id}: an action token has no policy_version")
        if not np.isnan(self.rollout_logprobs[~mask]).all() or (self.policy_versions[~mask] != -1).any():
            raise InvariantError(f"trajectory {self.episode_id}: an observation token has a log-prob or a version")
        if (self.turn_ids[~mask] != -1).any():
            raise InvariantError(f"trajectory {self.episode_id}: an observation token has a turn other than -1")
        if not np.isfinite([self.reward or 0.0, *self.turn_rewards.values()]).all():
            raise InvariantError(f"trajectory {self.episode_id}: a reward is not finite")
        turns = self.turn_ids[mask]
        if turns.size and (turns[0] != 0 or not np.isin(np.diff(turns), (0, 1)).all()):
            raise InvariantError(f"trajectory {self.episode_id}: turns do not count up from 0: {np.unique(turns)[:8]}")
        if self.experts is not None and (self.experts.ndim != 3 or len(self.experts) > n):
            raise InvariantError(f"trajectory {self.episode_id}: experts has shape {self.experts.shape} for {n} tokens")
        for turn in self.turn_rewards:
            if not (turns == turn).any():
                raise InvariantError(
                    f"trajectory {self.episode_id}: a reward is given to turn {turn}, which has no action token"
                )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """True on action tokens, [L]."""
        return self.turn_ids >= 0

    @property
    def spans(self) -> tuple[Span, ...]:
        """The tiling: maximal runs of equal turn id, in order, together exactly [0, L)."""
        if len(self) == 0:
            return ()
        cuts = np.flatnonzero(np.diff(self.turn_ids)) + 1
        edges = [0, *cuts.tolist(), len(self)]
        return tuple(
            Span("action" if self.turn_ids[a] >= 0 else "observation", a, b, int(self.turn_ids[a]))
            for a, b in zip(edges, edges[1:], strict=False)
        )

    @property
    def n_actions(self) -> int:
        """Number of action tokens: the `l` of the length-adaptive lambda."""
        return int(self.loss_mask.sum())

    @property
    def n_turns(self) -> int:
        """Number of action turns."""
        return int(self.turn_ids.max(initial=-1)) + 1

    def token_rewards(self) -> npt.NDArray[np.float32]:
        """Rewards per token, [L]: the terminal one on the last action token, turn rewards on the last token of their turn.

        Raises `InvariantError` if the trajectory is unjudged or has no action token.
        """
        where = np.flatnonzero(self.loss_mask)
        if self.reward is None or where.size == 0:
            raise InvariantError(f"trajectory {self.episode_id} has no reward or no action token and cannot be trained")
        rewards = np.zeros(len(self), np.float32)
        rewards[where[-1]] += self.reward
        for turn, value in self.turn_rewards.items():
            rewards[np.flatnonzero(self.turn_ids == turn)[-1]] += value
        return rewards

    def judged(self, reward: float, turn_rewards: dict[int, float] | None = None, **info: Any) -> Trajectory:
        """The same tokens with a verdict and more facts."""
        return replace(self, reward=reward, turn_rewards=turn_rewards or {}, info={**self.info, **info})

    def save(self, path: Path) -> None:
        """Write one parquet file atomically; readers see the whole file or none."""
        header = {
            "format": FORMAT,
            "episode_id": self.episode_id,
            "task_id": self.task_id,
            "reward": self.reward,
            "turn_rewards": self.turn_rewards,
            "segment": self.segment,
            "info": self.info,
        }
        columns: dict[str, Any] = {
            "token": self.tokens,
            "turn": self.turn_ids,
            "rollout_logprob": self.rollout_logprobs,
            "policy_version": self.policy_versions,
        }
        if self.experts is not None:
            header["experts"] = self.experts.shape
            rows = pa.FixedSizeListArray.from_arrays(self.experts.reshape(-1), int(np.prod(self.experts.shape[1:])))
            columns["experts"] = pa.concat_arrays([rows, pa.nulls(len(self) - len(rows), rows.type)])
        table = pa.table(columns).replace_schema_metadata({"trajectory": json.dumps(header)})
        part = path.with_suffix(".part")
        pq.write_table(table, part, compression="zstd")
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> Trajectory:
        """Read a file written by `save`. Raises `InvariantError` if it is not one."""
        try:
            table = pq.read_table(path, partitioning=None)
        except pa.ArrowInvalid as error:
            raise InvariantError(f"{path} is not a trajectory file: {error}") from error
        raw = (table.schema.metadata or {}).get(b"trajectory")
        if raw is None:
            raise InvariantError(f"{path} is not a trajectory file")
        header = json.loads(raw)
        if header["format"] != FORMAT:
            raise InvariantError(f"{path} has format {header['format']}, not {FORMAT}")
        shape = header.get("experts")
        rows = None if shape is None else table["experts"].slice(0, shape[0]).combine_chunks().flatten().to_numpy()
        return cls(
            episode_id=header["episode_id"],
            task_id=header["task_id"],
            tokens=table["token"].to_numpy().astype(np.int32, copy=False),
            turn_ids=table["turn"].to_numpy().astype(np.int32, copy=False),
            rollout_logprobs=table["rollout_logprob"].to_numpy().astype(np.float32, copy=False),
            policy_versions=table["policy_version"].to_numpy().astype(np.int32, copy=False),
            reward=header["reward"],
            turn_rewards={int(k): v for k, v in header["turn_rewards"].items()},
            segment=header["segment"],
            info=header["info"],
            experts=None if rows is None else rows.astype(np.int32, copy=False).reshape(shape),
        )


class TrajectoryBuilder:
    """Append-only record of one conversation: what was put in stays put in."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._turn_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._experts: list[npt.NDArray[np.integer[Any]]] = []
        self._turns = 0

    def observe(self, tokens: list[int]) -> None:
        """Append tokens that the policy did not sample."""
        n = len(tokens)
        self.tokens += tokens
        self._turn_ids += [-1] * n
        self._logprobs += [float("nan")] * n
        self._versions += [-1] * n

    def act(self, tokens: list[int], logprobs: list[float], versions: list[int]) -> None:
        """Append one turn's sampled tokens. Raises `InvariantError` if the three lists do not match."""
        if not len(tokens) == len(logprobs) == len(versions):
            raise InvariantError(f"{len(tokens)} sampled tokens, {len(logprobs)} log-probs, {len(versions)} versions")
        if not tokens:
            return
        self.tokens += tokens
        self._turn_ids += [self._turns] * len(tokens)
        self._logprobs += logprobs
        self._versions += versions
        self._turns += 1

    @property
    def routed(self) -> int:
        """Tokens from the start whose experts are known."""
        return sum(map(len, self._experts))

    def route(self, experts: npt.NDArray[np.integer[Any]]) -> None:
        """Append where the tokens from `routed` on were sent, [tokens, layers, experts per token]."""
        self._experts.append(experts)

    @property
    def n_turns(self) -> int:
        """Turns with at least one action token."""
        return self._turns

    def build(self, episode_id: str, task_id: str, **fields: Any) -> Trajectory:
        """The trajectory so far, checked."""
        return Trajectory(
            episode_id=episode_id,
            task_id=task_id,
            tokens=np.asarray(self.tokens, np.int32),
            turn_ids=np.asarray(self._turn_ids, np.int32),
            rollout_logprobs=np.asarray(self._logprobs, np.float32),
            policy_versions=np.asarray(self._versions, np.int32),
            experts=np.concatenate(self._experts).astype(np.int32) if self._experts else None,
            **fields,
        )
