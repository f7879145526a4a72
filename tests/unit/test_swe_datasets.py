"""Datasets: files of three kinds and a hub (a stub that speaks its API) give the same rows; a fault is one clear error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from environments.datasets import read, split_files, split_of
from environments.swe import swebench
from environments.swe.datasets import load
from harness.errors import ConfigError

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data" / "swe"
SHARED = os.environ.get("SAO_SHARED_DATA", "")
NAME = "SWE-bench/SWE-bench_Verified"


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    raw = json.loads((DATA / "swebench5.jsonl").read_text())
    return [{**raw, "instance_id": f"a__b-{n}"} for n in range(5)]


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_three_formats_give_the_same_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    parquet(tmp_path / "a.parquet", rows)
    loaded = [load(str(tmp_path / f"a{suffix}"))[0] for suffix in (".jsonl", ".json", ".parquet")]
    assert loaded[0] == loaded[1] == loaded[2]
    assert [row.instance_id for row in loaded[0]] == [row["instance_id"] for row in rows]


def test_every_sample_loads_through_its_adapter() -> None:
    assert len(load(str(DATA / "swegym.jsonl"), "swegym")[0]) == 1
    kept, refused = load(str(DATA / "r2egym.jsonl"), "r2egym", invalid="skip")
    assert [row.repo for row in kept] == ["aiohttp"]
    assert ["contradicts" in refused[0], "problem_statement" in refused[1]] == [True, True]
    kept, refused = load(str(DATA / "rebench.jsonl"), "rebench", invalid="skip")
    assert (len(kept), len(refused)) == (2, 1)
    kept, refused = load(str(DATA / "swesmith.jsonl"), "swesmith", invalid="skip")
    assert (len(kept), len(refused)) == (1, 1)


def test_a_refusal_stops_unless_it_is_to_be_skipped() -> None:
    source = str(DATA / "r2egym.jsonl")
    with pytest.raises(ConfigError, match=r"r2egym\.jsonl: namanjain12/aiohttp_final:0+1: .*contradicts"):
        load(source, "r2egym")


def test_old_rows_go_through_swebench_4_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    columns = {"image": "i", "eval_script": "s", "log_parser": "parse_log_sympy", "eval_type": "pass_and_fail"}

    def answer(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
        asked.append(len(rows))
        return [columns, {"error": "KeyError: '4.1'"}]

    monkeypatch.setattr(swebench, "legacy_columns", answer)
    kept, refused = load(str(DATA / "swebench4.jsonl"), invalid="skip")
    assert asked == [2]
    assert [row.log_parser for row in kept] == ["parse_log_sympy"]
    assert "KeyError" in refused[0]


def test_raw_pull_requests_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "pulls.jsonl").write_text('{"url": "u", "number": 1, "title": "Update"}\n')
    with pytest.raises(ConfigError, match="a row without instance_id: `instance_id` is missing"):
        load(str(tmp_path / "pulls.jsonl"))


def test_duplicates(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = parquet(tmp_path / "a.parquet", [rows[0], rows[0]])
    with pytest.raises(ConfigError, match="a__b-0: `instance_id` is there twice"):
        load(str(path))
    assert len(load(str(path), invalid="skip")[0]) == 1


def load_raw(source: str) -> None:
    """Every line is read before the first is judged."""
    if not list(read(source)):
        load(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{}\n{", "line 2: no JSON"),
        ("a.jsonl", b"3\n", "a row is int"),
        ("a.json", b"[[]]", "a row is list"),
        ("a.jsonl", b"", "no usable row"),
        ("a.parquet", b"PAR0", "cannot be read as parquet"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_raw(str(tmp_path / name))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"source": "nowhere.jsonl"}, "no such file"),
        ({"source": "verifed"}, "neither a file nor a hub name"),
        ({"source": "nowhere.jsonl", "adapter": "swegim"}, "adapter = 'swegim' is not known"),
    ],
)
def test_wrong_arguments(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(**call)
    assert caught.value.hint


def test_split_is_by_id_alone_and_of_the_right_size() -> None:
    ids = [f"owner__repo-{n}" for n in range(4_000)]
    heldout = {i for i in ids if split_of(i) == "heldout"}
    assert 150 < len(heldout) < 250
    assert heldout < {i for i in ids if split_of(i, 0.1) == "heldout"}
    assert [i for i in range(60) if split_of(f"a__b-{i}") == "heldout"] == HELDOUT_60


HELDOUT_60 = [11, 17, 19, 25, 34, 47, 58]
"""Pinned: another split would leak held-out tasks into runs that are resumed."""


def test_split_files() -> None:
    files = ["README.md", "data/test-00000-of-00002.parquet", "data/test-00001-of-00002.parquet", "data/train-0.parquet"]
    assert split_files(files, "test") == files[1:3]
    assert split_files(["test.jsonl", "train.jsonl", "testing.jsonl"], "test") == ["test.jsonl"]
    assert split_files(["default/test/0000.parquet", "test.json"], "test") == ["default/test/0000.parquet"]
    assert split_files(files, "dev") == []


class Hub(BaseHTTPRequestHandler):
    """The two calls of a hub that a download makes."""

    content = b""
    file = "data/test-00000-of-00001.parquet"
    commit = "a" * 40

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith(f"/api/datasets/{NAME}"):
            entry = {"type": "file", "path": self.file, "oid": "0" * 40, "size": len(self.content), "rfilename": self.file}
            body = json.dumps([entry] if "/tree/" in path else {"id": NAME, "sha": self.commit, "siblings": [entry]}).encode()
        elif path.startswith(f"/datasets/{NAME}/resolve/") and path.endswith(self.file):
            body = self.content
        else:
            self.send_error(404)
            return
        self.send_response(200)
        headers = {
            "Content-Length": str(len(body)),
            "ETag": '"e1"',
            "X-Repo-Commit": self.commit,
            "Content-Type": "application/json",
        }
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path, rows: list[dict[str, Any]]) -> Iterator[str]:
    Hub.content = parquet(tmp_path / "hub.parquet", rows).read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


LOAD = """
import sys
from environments.swe.datasets import load
from harness.errors import ConfigError
try:
    print([row.instance_id for row in load(sys.argv[1], split=sys.argv[2] or None)[0]])
except ConfigError as error:
    print(error.message, "|", error.hint)
"""


def fetch(endpoint: str, home: Path, source: str, split: str = "", offline: str = "0") -> str:
    """In another process: the hub's client reads its address once, at import."""
    env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and not k.startswith("HF_")}
    env |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": offline,
        "NO_PROXY": "*",
    }
    command = [sys.executable, "-c", LOAD, source, split]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("source", ["verified", NAME])
def test_a_hub_dataset(hub: str, tmp_path: Path, source: str) -> None:
    assert fetch(hub, tmp_path / "home", source) == f"{[f'a__b-{n}' for n in range(5)]}\n"


def test_hub_errors(hub: str, tmp_path: Path) -> None:
    assert "no file of split 'dev' | its files: data/test" in fetch(hub, tmp_path, "verified", "dev")
    assert "dataset = 'no/body' cannot be fetched from the hub" in fetch(hub, tmp_path, "no/body")
    assert "cannot be fetched from the hub" in fetch(hub, tmp_path, "lite", offline="1")


@pytest.mark.skipif(not Path(SHARED, "swe_rows_example.jsonl").is_file(), reason="SAO_SHARED_DATA names no folder with samples")
def test_shared_samples() -> None:
    assert len(load(str(Path(SHARED, "swe_rows_example.jsonl")))[0]) == 2
    assert len(load(str(Path(SHARED, "swe_rebench_v2_sample.json")), "rebench")[0]) == 1
    with pytest.raises(ConfigError, match="`instance_id` is missing"):
        load(str(Path(SHARED, "swebench_pvlib_rows.jsonl")))
