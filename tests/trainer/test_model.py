"""Policy and critic against plain transformers: packing changes nothing, files keep every bit and every public name."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from harness.errors import ConfigError, InvariantError
from harness.trajectory import TrajectoryBuilder
from tests.trainer import support
from trainer.batch import EMPTY, pack, plan
from trainer.critic_step import state_values
from trainer.model import build_critic, build_policy, is_critic
from trainer.weights import export, load_folder, load_tensors, read_file, sha256, write_file

MODELS = [
    pytest.param("qwen3_moe", {}, id="moe"),
    pytest.param("qwen3_moe", {"tie_word_embeddings": True}, id="moe-tied"),
    pytest.param("qwen3", {}, id="dense-tied"),
    pytest.param("qwen3", {"tie_word_embeddings": False}, id="dense"),
    pytest.param("llama", {}, id="llama"),
]


def reference(folder: Path) -> torch.nn.Module:
    """What transformers itself reads from the folder, with its own attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()  # type: ignore[no-any-return]


def alone(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    """log p of tokens 1.. by a plain forward of one sequence."""
    ids = torch.tensor(tokens)
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    return torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize(("family", "more"), MODELS)
def test_packed_is_separate(family: str, more: dict[str, object], tmp_path: Path) -> None:
    policy = support.policy(family, 1, **more)
    folder = support.write_model(tmp_path, policy)
    plain = reference(folder)
    rng = random.Random(0)
    sequences = [[rng.randrange(support.VOCAB) for _ in range(n)] for n in (2, 37, 1, 128, 5, 64)]
    tokens = torch.tensor([t for s in sequences for t in s], dtype=torch.int32)
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    edges = [0, *torch.tensor([len(s) for s in sequences]).cumsum(0).tolist()]
    where = torch.tensor([a + i for a, s in zip(edges, sequences, strict=False) for i in range(1, len(s))])
    with torch.no_grad():
        logprobs, entropy = policy(tokens, positions, edges, where)
    expected = torch.cat([alone(plain, s) for s in sequences])
    assert expected.min() < -7, "the model is too flat to show a mistake"
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    assert entropy.isfinite().all()

    critic = support.critic_of(folder)
    with torch.no_grad():
        values = critic(tokens, positions, edges)
        for a, s in zip(edges, sequences, strict=False):
            hidden = plain.model(input_ids=torch.tensor(s)[None], use_cache=False).last_hidden_state[0]
            by_hand = (hidden @ critic.v_head.weight.t())[:, 0] + critic.v_head.bias
            torch.testing.assert_close(values[a : a + len(s)], by_hand, atol=1e-5, rtol=0)
    assert values.std() > 0.05


def test_values_are_of_the_state_before_the_token(moe: Path) -> None:
    critic = support.critic_of(moe)
    trajectories = support.batch(1)
    packed = pack(trajectories)
    values, last = state_values(critic, packed)
    with torch.no_grad():
        for b, t in enumerate(trajectories):
            a = packed.cu_seqlens[b]
            after = critic(torch.from_numpy(t.tokens), torch.arange(len(t)), [0, len(t)])
            torch.testing.assert_close(values[a + 1 : a + len(t)], after[:-1], atol=1e-5, rtol=0)
            torch.testing.assert_close(last[b], after[-1], atol=1e-5, rtol=0)


def test_an_action_without_a_state_before_it_is_refused() -> None:
    """Its log-prob and value would be read from the neighbour in the pack."""
    builder = TrajectoryBuilder()
    builder.act([1, 2], [-1.0, -1.0], [0, 0])
    with pytest.raises(InvariantError, match="starts with an action"):
        pack([builder.build("e", "t", reward=1.0)])


@pytest.mark.parametrize("seed", range(20))
def test_the_plan_covers_everything_once(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 5, 60, 400]) for _ in range(rng.randint(0, 12))]
    ranks, budget = rng.randint(1, 5), rng.choice([1, 64, 500])
    layout = plan(lengths, ranks, budget)
    assert len({len(bins) for bins in layout}) == 1 and len(layout) == ranks
    assert sorted(i for bins in layout for b in bins for i in b) == list(range(len(lengths)))
    for chosen in (b for bins in layout for b in bins):
        assert len(chosen) <= 1 or sum(lengths[i] for i in chosen) <= budget


def test_an_empty_micro_batch_scores_nothing(moe: Path) -> None:
    policy = build_policy(moe)
    logprobs, _ = policy(EMPTY.tokens, EMPTY.positions, EMPTY.cu_seqlens, EMPTY.where)
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())


# --- files and names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "more"), MODELS)
def test_export_and_load_keep_every_bit(family: str, more: dict[str, object]) -> None:
    policy, other = support.policy(family, 2, **more), support.policy(family, 3, **more)
    assert not support.equal(support.parameters(policy), support.parameters(other))
    load_tensors(other.model, {name: t.clone() for name, t in export(policy.model)})
    assert support.equal(support.parameters(policy), support.parameters(other))


@pytest.mark.parametrize(("family", "more"), MODELS)
def test_names_are_those_of_save_pretrained(family: str, more: dict[str, object], tmp_path: Path) -> None:
    policy = support.policy(family, 4, **more)
    policy.model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(str(tmp_path / "theirs" / "model.safetensors"))
    ours = {name: t for name, t in export(policy.model)}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    loaded = build_policy(tmp_path / "theirs")
    assert support.equal(support.parameters(policy), support.parameters(loaded))


@pytest.mark.parametrize(("family", "more"), MODELS)
def test_transformers_reads_what_we_write(family: str, more: dict[str, object], tmp_path: Path) -> None:
    policy = support.policy(family, 5, **more)
    folder = support.write_model(tmp_path, policy)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(40)[None] % support.VOCAB
    with torch.no_grad():
        theirs = model(input_ids=ids, use_cache=False).logits
        ours = policy.model(input_ids=ids, use_cache=False, cu_seqlens=[0, 40]).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == [type(policy.model).__name__], "vLLM finds the class by this field"


def test_bad_names_and_shapes_are_config_errors(moe: Path) -> None:
    good = read_file(moe / "model.safetensors")
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"

    def check(tensors: dict[str, Tensor], match: str) -> None:
        with pytest.raises(ConfigError, match=match) as caught:
            load_tensors(support.policy("qwen3_moe").model, tensors)
        assert caught.value.hint

    for name in (expert, "model.norm.weight", "lm_head.weight", "model.layers.1.mlp.experts.0.down_proj.weight"):
        check({n: t for n, t in good.items() if n != name}, "lacks")
    check({}, "lacks")
    check(good | {"model.layers.7.input_layernorm.weight": torch.ones(32)}, "which this model lacks")
    check(good | {"model.layers.0.mlp.experts.4.up_proj.weight": good[expert]}, "which this model lacks")
    check(good | {"model.layers.0.mlp.experts.99.down_proj.weight": torch.zeros(32, 16)}, "which this model lacks")
    check(good | {expert: good[expert].t().contiguous()}, "shape")
    check(good | {expert: good[expert][:, :1]}, "shape")
    check(good | {"model.norm.weight": torch.ones(1)}, "shape")
    check(good | {"lm_head.weight": good["lm_head.weight"][:-1]}, "shape")
    with pytest.raises(ConfigError):
        load_tensors(support.policy("qwen3").model, good)


def test_a_critic_folder_keeps_its_head(moe: Path, tmp_path: Path) -> None:
    critic = support.critic_of(moe, seed=7)
    (tmp_path / "config.json").write_bytes((moe / "config.json").read_bytes())
    write_file(dict(export(critic)), tmp_path / "model.safetensors")
    (tmp_path / "critic.json").write_text('{"sha256": "x"}')
    assert is_critic(tmp_path) and not is_critic(moe)
    assert support.equal(support.parameters(build_critic(tmp_path, bias=9.0)), support.parameters(critic))
    fresh = build_critic(moe, bias=0.25)
    assert not fresh.v_head.weight.any() and fresh.v_head.bias.item() == 0.25
    backbone = support.policy("qwen3_moe", 8)
    load_folder(backbone.model, moe)
    assert support.equal(support.parameters(backbone.model.model), support.parameters(fresh.model))


def test_a_damaged_file_is_refused(moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    digest = write_file(read_file(moe / "model.safetensors"), path)
    assert digest == sha256(path) and [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]
    read_file(path, digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="sha256"):
        read_file(path, digest)


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o644), (0o750, 0o640), (0o700, 0o600)])
def test_who_may_read_a_folder_may_read_its_weights(moe: Path, tmp_path: Path, folder: int, file: int) -> None:
    tmp_path.chmod(folder)
    write_file(read_file(moe / "model.safetensors"), tmp_path / "w.safetensors")
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == file


def test_the_exported_dtype(moe: Path) -> None:
    policy = build_policy(moe)
    for (name, full), (_, half) in zip(export(policy.model), export(policy.model, torch.bfloat16), strict=True):
        assert torch.equal(full.to(torch.bfloat16), half), name
