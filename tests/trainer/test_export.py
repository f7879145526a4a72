"""The policy of a checkpoint as a model folder: the very weights that were trained, without a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer import support
from trainer import checkpoint
from trainer.export import TOKENIZER_FILES, export_checkpoint, save_folder
from trainer.model import build_policy
from trainer.weights import export, read_file

pytestmark = pytest.mark.usefixtures("rank")


@pytest.mark.parametrize("family", ["moe", "dense"])
def test_a_checkpoint_becomes_a_model_folder(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    start: Path = request.getfixturevalue(family)
    made = support.learners(start)
    support.step(made, support.batch(1))
    trained = dict(export(build_policy(start).model)), {name: support.whole(p) for name, p in export(made.policy.model)}
    checkpoint.save(made, tmp_path / "c")
    support.step(made, support.batch(2))  # the trainer goes on; the checkpoint does not

    export_checkpoint(tmp_path / "c", start, tmp_path / "out")
    written = read_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == trained[1].keys()
    assert all(torch.equal(written[name], trained[1][name]) for name in written), "bit for bit"
    assert not all(torch.equal(written[name], trained[0][name]) for name in written), "the step has moved them"
    for name in TOKENIZER_FILES:
        assert (tmp_path / "out" / name).read_bytes() == (start / name).read_bytes()
    again = dict(export(build_policy(tmp_path / "out").model))
    assert support.equal(again, written), "what was written can be loaded"


def test_a_folder_without_weights_is_not_whole(moe: Path, tmp_path: Path) -> None:
    """They are written last: what is cut short is not taken for a model."""
    policy = build_policy(moe)
    with pytest.raises(FileNotFoundError):
        save_folder(dict(export(policy.model)), policy.model.config, tmp_path / "out", tmp_path / "no-tokenizer")
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_critics_record_stands_beside_its_weights(moe: Path, tmp_path: Path) -> None:
    policy = build_policy(moe)
    save_folder(dict(export(policy.model)), policy.model.config, tmp_path, moe, {"gate": {"passed": True}})
    assert support.read_json(tmp_path / "critic.json") == {"gate": {"passed": True}}
