"""The embedded engine in process: every sampled token against a fresh full forward, whatever else runs, whatever was cached."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.trainer import support
from trainer.engine import core as core_module
from trainer.engine.core import EngineCore, Sequence
from trainer.model import build_policy
from trainer.weights import export

MAX_STEPS = 5_000


def plain(folder: Path) -> Any:
    """Transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["moe", "dense"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return plain(folder)


def engine(folder: Path, slots: int = 8, max_len: int = 4096, version: int = 0) -> EngineCore:
    return EngineCore(build_policy(folder).model, slots, max_len, version)


def words(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(support.VOCAB) for _ in range(n)]


def submit(
    engine: EngineCore, prompt: list[int], n: int, *, seed: int = 0, temperature: float = 1.0, stop: tuple[int, ...] = ()
) -> Sequence:
    finished: list[Sequence] = []
    sequence = Sequence(list(prompt), n, frozenset(stop), temperature, random.Random(seed), finished.append)
    engine.submit(sequence)
    return sequence


def run(engine: EngineCore, until: Callable[[], bool] | None = None) -> int:
    """Step until idle (or `until`); the number of steps."""
    for steps in range(MAX_STEPS):
        if not engine.busy or (until is not None and until()):
            return steps
        engine.step()
    raise AssertionError("the engine does not come to an end")


def answer(sequence: Sequence) -> list[int]:
    return sequence.tokens[sequence.prompt :]


def scored(model: Any, sequence: Sequence, temperature: float = 1.0) -> Tensor:
    """log p of the sampled tokens by one fresh full forward."""
    ids = torch.tensor(sequence.tokens)
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    logp = torch.log_softmax(logits / temperature, -1)
    return logp[:-1].gather(1, ids[1:, None])[:, 0][sequence.prompt - 1 :]


def check(model: Any, *sequences: Sequence, temperature: float = 1.0) -> None:
    for sequence in sequences:
        assert sequence.finish in ("stop", "length")
        torch.testing.assert_close(torch.tensor(sequence.logprobs), scored(model, sequence, temperature), atol=1e-4, rtol=0)


# --- exactness -------------------------------------------------------------------------------------------------------


def test_batched_sequences_of_different_lengths(folder: Path, reference: Any) -> None:
    rng = random.Random(1)
    made = engine(folder, slots=8)
    sequences = [submit(made, words(rng, n), m, seed=n) for n, m in ((1, 40), (2, 7), (33, 1), (100, 20), (7, 60), (250, 12))]
    run(made)
    check(reference, *sequences)
    assert [len(answer(s)) for s in sequences] == [40, 7, 1, 20, 60, 12]
    assert all(s.finish == "length" for s in sequences)


def test_turns_reuse_the_prefix(folder: Path, reference: Any) -> None:
    """Four turns of three conversations that grow in turn, on fewer slots than conversations need at once."""
    rng = random.Random(2)
    made = engine(folder, slots=3)
    shared = words(rng, 20)
    conversations = [shared + words(rng, 3 + i) for i in range(3)]
    reused = 0
    for turn in range(4):
        sequences = [submit(made, c, 9, seed=10 * turn + i) for i, c in enumerate(conversations)]
        made._admit()
        reused += sum(s.computed for s in sequences)
        run(made)
        check(reference, *sequences)
        conversations = [s.tokens + words(rng, rng.randint(1, 6)) for s in sequences]
    assert reused > 100, "the test is about reuse"


def test_the_cache_of_a_longer_text_serves_a_shorter_prompt(folder: Path, reference: Any) -> None:
    """Stale keys behind the reused prefix are never seen; a prompt that is cached whole still computes its last token."""
    rng = random.Random(3)
    made = engine(folder, slots=1)
    long = submit(made, words(rng, 80), 30)
    run(made)
    for prompt in (long.tokens[:50], long.tokens[:50] + words(rng, 3), long.tokens, long.tokens[:1]):
        again = submit(made, prompt, 20, seed=7)
        made._admit()
        assert again.computed >= min(len(prompt), 50) - 1
        run(made)
        check(reference, again)
        long_again = submit(made, long.tokens, 1)
        run(made)
        check(reference, long_again)


def test_chunked_prefill(folder: Path, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beyond the tokens of one step, beside sequences that are decoding; also a chunk of exactly one token."""
    monkeypatch.setattr(core_module, "TOKENS_PER_STEP", 32)
    rng = random.Random(4)
    made = engine(folder, slots=5)
    first = submit(made, words(rng, 3), 25)
    made.step()
    others = [submit(made, words(rng, n), 6, seed=n) for n in (100, 32, 31, 64)]
    before = len(first.logprobs)
    made.step()
    assert len(first.logprobs) == before + 1, "decoding goes on beside a long prefill"
    run(made)
    check(reference, first, *others)


def test_a_prompt_of_several_full_steps(dense: Path) -> None:
    rng = random.Random(5)
    made = engine(dense, slots=2, max_len=8192)
    assert core_module.TOKENS_PER_STEP == 2048
    long, short = submit(made, words(rng, 2600), 3), submit(made, words(rng, 5), 8, seed=1)
    run(made)
    check(plain(dense), long, short)


def test_unwritten_memory_is_never_read(folder: Path, reference: Any) -> None:
    """With fresh memory full of NaN: a masked position has weight 0, but 0 * NaN is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills `torch.empty` with NaN
    try:
        assert torch.empty(1).isnan()
        made = engine(folder, slots=3)
        sequences = [submit(made, words(random.Random(n), n), 40, seed=n) for n in (3, 240, 30)]
        run(made)
    finally:
        torch.use_deterministic_algorithms(False)
    check(reference, *sequences)


@pytest.mark.parametrize(("start", "n"), [(230, 300), (255, 8), (256, 8), (257, 8)])
def test_the_cache_grows_over_its_first_capacity(folder: Path, reference: Any, start: int, n: int) -> None:
    rng = random.Random(start)
    made = engine(folder, slots=2, max_len=700)
    grows, stays = submit(made, words(rng, start), n), submit(made, words(rng, 9), 20, seed=1)
    run(made)
    check(reference, grows, stays)
    assert grows.finish == "length" and len(grows.tokens) == start + n


def test_up_to_the_last_position(folder: Path, reference: Any) -> None:
    made = engine(folder, slots=1, max_len=300)
    full = submit(made, words(random.Random(6), 200), 100)
    run(made)
    check(reference, full)
    assert len(full.tokens) == 300


def test_score_is_a_full_forward(folder: Path, reference: Any) -> None:
    made = engine(folder)
    tokens = words(random.Random(7), 50)
    submit(made, tokens, 5)
    made.step()
    with torch.no_grad():
        logp = torch.log_softmax(reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0], -1)
    expected = logp[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(made.score(tokens)), expected, atol=1e-4, rtol=0)
    assert made.score(tokens[:1]) == []


# --- continuous batching ---------------------------------------------------------------------------------------------


def test_a_seeded_request_does_not_depend_on_its_neighbours(folder: Path) -> None:
    rng = random.Random(8)
    prompt = words(rng, 12)
    alone = submit(engine(folder), prompt, 40, seed=5)
    single = engine(folder)
    single.submit(alone)
    run(single)
    busy = engine(folder, slots=4)
    for n in (1, 30, 200):
        submit(busy, words(rng, n), 15, seed=n)
    for _ in range(3):
        busy.step()
    among = submit(busy, prompt, 40, seed=5)
    waiting = [submit(busy, prompt + words(rng, 2), 15, seed=n) for n in range(4)]
    run(busy)
    assert answer(among) == answer(alone)
    torch.testing.assert_close(torch.tensor(among.logprobs), torch.tensor(alone.logprobs), atol=1e-4, rtol=0)
    assert len({tuple(answer(w)) for w in waiting}) == 4, "other seeds, other samples"


def test_waiting_requests_start_in_order_of_arrival(folder: Path) -> None:
    made = engine(folder, slots=2)
    sequences = [submit(made, words(random.Random(i), 5), 3 + i % 3, seed=i) for i in range(7)]
    made.step()
    assert made.load == (2, 5)
    started: list[Sequence] = []
    for _ in range(MAX_STEPS):
        started += [s for s in sequences if s.logprobs and s not in started]
        if not made.busy:
            break
        made.step()
        assert made.load[0] <= 2
    assert started == sequences


def test_slots_are_admitted_first_come_first_served(folder: Path) -> None:
    """Also when a later one would find a better cache."""
    made = engine(folder, slots=1)
    first = submit(made, words(random.Random(0), 8), 2)
    run(made)
    second, third = submit(made, words(random.Random(1), 8), 2), submit(made, first.tokens, 2)
    run(made, until=lambda: second.finish is not None)
    assert third.finish is None and not third.logprobs
    run(made)
    assert third.finish == "length"


def test_stop_tokens_end_a_turn_and_are_recorded(folder: Path, reference: Any) -> None:
    made = engine(folder)
    free = submit(made, [1, 2, 3], 30, seed=3)
    run(made)
    stop = answer(free)[4]
    at = answer(free).index(stop)
    stopped, cut = submit(made, [1, 2, 3], 30, seed=3, stop=(stop, 63)), submit(made, [1, 2, 3], at + 1, seed=3, stop=(stop,))
    short = submit(made, [1, 2, 3], at, seed=3, stop=(stop,)) if at else None
    prompted = submit(made, [stop, stop], 2, seed=3, stop=(99,))
    run(made)
    assert answer(stopped) == answer(free)[: at + 1] and stopped.finish == "stop"
    assert cut.finish == "stop", "a stop on the last allowed token is a stop"
    assert short is None or short.finish == "length"
    assert prompted.finish == "length", "stop tokens of the prompt do not count"
    check(reference, stopped, cut)


def test_temperature(folder: Path, reference: Any) -> None:
    made = engine(folder)
    sequences = {t: submit(made, [4, 5, 6], 40, seed=1, temperature=t) for t in (0.0, 0.3, 1.0, 2.5)}
    twin = submit(made, [4, 5, 6], 40, seed=2, temperature=0.0)
    run(made)
    for t, sequence in sequences.items():
        check(reference, sequence, temperature=t or 1.0)
    assert answer(twin) == answer(sequences[0.0]), "greedy ignores the seed"
    ids = torch.tensor(sequences[0.0].tokens)
    with torch.no_grad():
        best = reference(input_ids=ids[None], use_cache=False).logits[0].argmax(-1)
    assert best[2:-1].tolist() == answer(sequences[0.0])
    means = [sum(sequences[t].logprobs) for t in (0.3, 1.0, 2.5)]
    assert means == sorted(means, reverse=True)


def test_samples_follow_the_distribution(dense: Path) -> None:
    """4,000 first tokens against the model's probabilities (chi-square, fixed seeds)."""
    made = engine(dense, slots=500, max_len=8)
    n = 4_000
    sequences = [submit(made, [9, 8, 7], 1, seed=i) for i in range(n)]
    run(made)
    with torch.no_grad():
        p = torch.softmax(plain(dense)(input_ids=torch.tensor([[9, 8, 7]]), use_cache=False).logits[0, -1].double(), -1)
    counts = torch.bincount(torch.tensor([answer(s)[0] for s in sequences]), minlength=support.VOCAB).double()
    big = p * n >= 5
    statistic = ((counts - n * p)[big].square() / (n * p)[big]).sum()
    degrees = int(big.sum())
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy of the same shape."""
    family = "qwen3_moe" if "moe" in folder.name else "qwen3"
    return support.write_model(tmp_path_factory.mktemp("other"), support.policy(family, seed=77))


def tensors(folder: Path) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in export(build_policy(folder).model)}


def hybrid(old: Any, new: Any, tokens: list[int], switch: int) -> Tensor:
    """log p of tokens[switch:] under the new weights with the old model's keys and values for tokens[: switch - 1]."""
    ids = torch.tensor(tokens)
    with torch.no_grad():
        cache = old(input_ids=ids[None, : switch - 1], use_cache=True).past_key_values
        logits = new(input_ids=ids[None, switch - 1 :], past_key_values=cache, use_cache=True).logits[0]
    return torch.log_softmax(logits, -1)[:-1].gather(1, ids[switch:, None])[:, 0]


def test_weights_change_between_two_tokens(folder: Path, other: Path, reference: Any) -> None:
    """Running sequences keep their old keys and values: versions, old tokens and new tokens by hand."""
    made, new = engine(folder, version=3), plain(other)
    sequences = [submit(made, words(random.Random(n), n), 30, seed=n) for n in (4, 19)]
    for _ in range(10):
        made.step()
    made.set_weights(tensors(other), 4)
    run(made)
    for s in sequences:
        assert s.versions == [3] * 10 + [4] * 20
        got = torch.tensor(s.logprobs)
        torch.testing.assert_close(got[:10], scored(reference, s)[:10], atol=1e-4, rtol=0)
        expected = hybrid(reference, new, s.tokens, s.prompt + 10)
        torch.testing.assert_close(got[10:], expected, atol=1e-4, rtol=0)
        assert (got[10:] - scored(new, s)[10:]).abs().max() > 1e-2, "fresh keys would give other numbers"


def test_weights_change_in_the_middle_of_a_prefill(
    folder: Path, other: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "TOKENS_PER_STEP", 16)
    made, new = engine(folder), plain(other)
    s = submit(made, words(random.Random(0), 40), 5)
    made.step()
    assert s.computed == 16
    made.set_weights(tensors(other), 1)
    run(made)
    assert s.versions == [1] * 5
    expected = hybrid(reference, new, s.tokens, 17)[s.prompt - 17 :]
    torch.testing.assert_close(torch.tensor(s.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("label", [1, 0], ids=["new-label", "same-label"])
def test_caches_are_not_reused_across_weights(folder: Path, other: Path, label: int) -> None:
    """Neither of a finished sequence nor of one that lived through the change; not even if the label stays."""
    made, new = engine(folder, slots=3), plain(other)
    done = submit(made, words(random.Random(0), 60), 3)
    run(made)
    through = submit(made, words(random.Random(1), 60), 6)
    made.step()
    made.set_weights(tensors(other), label)
    run(made)
    for old in (done, through):
        fresh = submit(made, old.tokens, 10, seed=2)
        made._admit()
        assert fresh.computed == 0
        run(made)
        check(new, fresh)
    again = submit(made, fresh.tokens, 5, seed=3)
    made._admit()
    assert again.computed > 60, "under one version it is reused"
    run(made)
    check(new, again)


def test_there_and_back_again(folder: Path, other: Path, reference: Any) -> None:
    made = engine(folder)
    first = submit(made, [1, 2, 3, 4], 20, seed=1)
    run(made)
    made.set_weights(tensors(other), 1)
    made.set_weights(tensors(folder), 2)
    second = submit(made, [1, 2, 3, 4], 20, seed=1)
    run(made)
    assert answer(first) == answer(second) and second.versions == [2] * 20
    check(reference, second)


# --- aborts and refusals ---------------------------------------------------------------------------------------------


def test_an_aborted_request_frees_its_slot(folder: Path, reference: Any) -> None:
    made = engine(folder, slots=1)
    running, waiting, last = (submit(made, words(random.Random(i), 5), 50, seed=i) for i in range(3))
    for _ in range(4):
        made.step()
    assert made.load == (1, 2)
    running.aborted = waiting.aborted = True
    made.step()
    assert made.load == (1, 0)
    run(made)
    check(reference, last)
    assert running.finish is None and waiting.finish is None and len(waiting.logprobs) == 0
    again = submit(made, running.tokens, 5)
    run(made)
    check(reference, again)


def test_no_slot_is_ever_lost(folder: Path, reference: Any) -> None:
    """A random life of submits, aborts and weight labels; at the end all slots are free and the next answers are exact."""
    rng = random.Random(9)
    made = engine(folder, slots=3)
    same = tensors(folder)
    alive: list[Sequence] = []
    for i in range(120):
        if rng.random() < 0.4:
            prompt = words(rng, rng.randint(1, 8)) if not alive or rng.random() < 0.5 else list(rng.choice(alive).tokens)
            alive.append(submit(made, prompt[:200], rng.randint(1, 12), seed=i))
        if alive and rng.random() < 0.2:
            victim = rng.choice(alive)
            victim.aborted = victim.finish is None
        if rng.random() < 0.1:
            made.set_weights(same, made.version + 1)
        made.step()
        assert made.load[0] <= 3
    run(made)
    assert sorted(made._free_slots) == [0, 1, 2] and len(made._free) == 3 and not made._slot_version
    check(reference, *(s for s in alive if not s.aborted))


@pytest.mark.parametrize(
    ("prompt", "n", "temperature"),
    [
        ([], 5, 1.0),
        ([1], 0, 1.0),
        ([1], -3, 1.0),
        ([1] * 60, 5, 1.0),
        ([1] * 64, 1, 1.0),
        ([1, support.VOCAB], 5, 1.0),
        ([-1, 1], 5, 1.0),
        ([1], 5, -0.5),
        ([1], 5, float("nan")),
        ([1], 5, float("inf")),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(dense: Path, prompt: list[int], n: int, temperature: float) -> None:
    """One bad request must not end the engine for all others."""
    made = engine(dense, max_len=64)
    good = submit(made, [1] * 59, 5)
    with pytest.raises(ValueError):
        submit(made, prompt, n, temperature=temperature)
    run(made)
    assert good.finish == "length"


def test_two_equal_requests_are_two(folder: Path) -> None:
    made = engine(folder, slots=2)
    done: list[Sequence] = []
    rng = random.Random(0)
    a = Sequence([1, 2], 3, frozenset(), 0.0, rng, done.append)
    b = copy.copy(a)
    b.tokens, b.logprobs, b.versions = list(a.tokens), [], []
    made.submit(a)
    made.submit(b)
    made.step()
    b.aborted = True
    run(made)
    assert done == [a] and done[0] is a and b.finish is None


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
