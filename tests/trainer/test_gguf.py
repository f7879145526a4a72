"""GGUF files: dequantisation against blocks computed by hand, settings, and files that are damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.errors import ConfigError
from trainer.gguf import Gguf

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (pip install gguf)")
Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


def half(value: float) -> bytes:
    """fp16, little endian."""
    return np.float16(value).tobytes()


def write(path: Path, **tensors: tuple[object, np.ndarray]) -> Path:
    """A file with some settings and these tensors (type, raw bytes or None, numbers)."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("eps", 1e-5)
    writer.add_uint32("heads", 9)
    writer.add_bool("space", False)
    writer.add_array("words", ["a", "é", "<|x|>"])
    for name, (kind, values) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_q4_1_block_by_hand(tmp_path: Path) -> None:
    """d = 0.5, m = -2. Byte i holds value i in its low half and value 16 + i in its high half: here i and 15 - i."""
    block = half(0.5) + half(-2.0) + bytes(i | (15 - i) << 4 for i in range(16))
    read = dict(Gguf(write(tmp_path / "f.gguf", w=(Q4_1, np.frombuffer(block, np.uint8)[None]))).tensors())
    first = [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5]
    assert read["w"].dtype == np.float32
    assert read["w"].tolist() == [first + first[::-1]]


def test_a_q8_0_block_by_hand(tmp_path: Path) -> None:
    """d = 0.25, then 32 signed bytes."""
    numbers = [-128, -127, -1, 0, 1, 127, *range(26)]
    block = half(0.25) + np.array(numbers, np.int8).tobytes()
    read = dict(Gguf(write(tmp_path / "f.gguf", w=(Q8_0, np.frombuffer(block, np.uint8)[None]))).tensors())
    assert read["w"].tolist() == [[-32.0, -31.75, -0.25, 0.0, 0.25, 31.75, *(n / 4 for n in range(26))]]


@pytest.mark.parametrize("seed", range(5))
def test_any_blocks_in_rows_and_columns(seed: int, tmp_path: Path) -> None:
    """Matrices of several blocks keep their shape [out, in], and every value follows the formula of its block."""
    rng = np.random.default_rng(seed)
    rows, blocks = (int(n) for n in rng.integers(1, 5, 2))
    scale, least = rng.normal(size=(2, rows, blocks)).astype(np.float16)
    four, eight = rng.integers(0, 16, (rows, blocks, 32)), rng.integers(-128, 128, (rows, blocks, 32))
    heads = [s[..., None].view(np.uint8) for s in (scale, least)]
    packed = (four[..., :16] | four[..., 16:] << 4).astype(np.uint8)
    raw4 = np.concatenate([*heads, packed], -1).reshape(rows, -1)
    raw8 = np.concatenate([heads[0], eight.astype(np.int8).view(np.uint8)], -1).reshape(rows, -1)
    plain = rng.normal(size=(3, 7)).astype(np.float32)
    path = write(
        tmp_path / "f.gguf",
        four=(Q4_1, raw4),
        eight=(Q8_0, raw8),
        plain=(None, plain),
        halves=(None, plain.astype(np.float16)),
        line=(None, plain[0]),
    )
    read = dict(Gguf(path).tensors())
    d, m = scale[..., None].astype(np.float32), least[..., None].astype(np.float32)
    assert list(read) == ["four", "eight", "plain", "halves", "line"]
    np.testing.assert_allclose(read["four"], (d * four + m).reshape(rows, -1), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(read["eight"], (d * eight).reshape(rows, -1), rtol=1e-6, atol=1e-6)
    assert np.array_equal(read["plain"], plain)
    assert np.array_equal(read["halves"], plain.astype(np.float16).astype(np.float32))
    assert np.array_equal(read["line"], plain[0])
    assert {array.dtype for array in read.values()} == {np.dtype(np.float32)}


def test_settings(tmp_path: Path) -> None:
    file = Gguf(write(tmp_path / "f.gguf"))
    assert file.setting("eps") == 1e-5, "not fp32's 9.999999747378752e-06"
    assert file.setting("heads") == 9
    assert file.setting("space") is False
    assert file.setting("words") == ["a", "é", "<|x|>"]
    assert file.setting("general.architecture") == "llama"
    with pytest.raises(ConfigError, match="does not say `legs`"):
        file.setting("legs")


def test_a_damaged_file_is_one_clear_error(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", w=(None, np.arange(64, dtype=np.float32))).read_bytes()
    bad = tmp_path / "bad.gguf"
    for size in range(0, len(whole), 7):
        bad.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"bad\.gguf is no whole GGUF file"):
            Gguf(bad)
    bad.write_bytes(b"PK" + whole[2:])
    with pytest.raises(ConfigError, match="no whole GGUF file"):
        Gguf(bad)
    with pytest.raises(ConfigError, match="no whole GGUF file"):
        Gguf(tmp_path / "none.gguf")
