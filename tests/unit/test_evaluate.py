"""An evaluation: what it asks, what comes out against endpoints whose answers are known, and that it goes on where it stood."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals.compare import compare
from evals.evaluate import PURPOSE, _settings, evaluate, prepare, store, stored
from evals.models import Model, find_model
from evals.result import load
from evals.scripted_endpoint import lucky
from evals.statistics import mean_success
from evals.suites import Suite, SuiteTable, load_suite
from evals.verbs import comparison, evaluation
from harness.config import Config
from harness.configfile import load_config
from harness.errors import ConfigError
from harness.ledger import Ledger, Slot
from harness.registry import find
from harness.rollout import SEEDS, TASKS
from harness.rundir import RunDir
from tests.unit.eval_support import SUITES, play, prepared, resumed, served

WARM = {"model": {"path": "configs/corridor-warm", "stop": ["<eos>"]}}
TINY = Model("tiny", WARM, identity={"sha256": "x"})
FAR = Model("far", endpoint={"url": "http://localhost/v1", "model": "m"}, identity={"url": "http://localhost/v1", "model": "m"})
PLAN = {"suite": "a", "model": "m", "identity": {}, "endpoint": None, "runs": 1, "split": "heldout", "problems": 1}
PLAN |= {"official": False}


def suite(**layers: Any) -> Suite:
    return Suite("mine", SuiteTable(), {"environment": {"id": "corridor"}, "limits": {"max_context": 64}, **layers})


def predicted(index: int, run: int, seed: int = 0) -> float:
    """What random play gets for a run of a problem."""
    return float(lucky(seed + SEEDS * (index + TASKS * run)))


# --- what is asked ---------------------------------------------------------------------------------------------------


def test_the_user_lies_over_the_model_and_the_model_over_the_suite() -> None:
    below = suite(limits={"max_turns": 1, "max_context": 10}, rollout={"tool_calls": "hermes", "concurrency": 3})
    model = replace(TINY, layers=WARM | {"rollout": {"tool_calls": "glm"}, "limits": {"max_turns": 2}})
    config, plan = prepare(below, model, ["limits.max_turns=3"], None, None)
    assert (config.limits.max_turns, config.limits.max_context) == (3, 10)
    assert (config.rollout.tool_calls, config.rollout.concurrency) == ("glm", 3)
    assert config.model.path is not None and config.model.path.endswith("configs/corridor-warm")
    assert (plan.model, plan.identity, plan.endpoint) == ("tiny", {"sha256": "x"}, None)


def test_a_runs_agent_plays_unless_the_suite_names_one() -> None:
    model = replace(TINY, layers=WARM | {"agent": {"id": "tool_loop", "nudge": "the run's"}})
    for below, expected in ((suite(), "the run's"), (suite(agent={"id": "tool_loop", "nudge": "the suite's"}), "the suite's")):
        assert prepare(below, model, [], None, None)[0].agent.table()["nudge"] == expected


def test_what_only_training_needs_is_dropped() -> None:
    config, _ = prepare(load_suite("configs/corridor.toml"), TINY, [], None, None)
    trained, plain = load_config(["configs/corridor.toml"]), Config(environment=config.environment, model=config.model)
    plain.check(model=False)
    assert config.value is None and trained.value is not None and config.steps == 0
    for name in ("algorithm", "loss", "critic"):
        assert getattr(config, name) == getattr(plain, name) != getattr(trained, name), name
    assert config.limits == trained.limits != plain.limits, "what an episode may use stays"
    assert config.engine.noise == 0.0 != trained.engine.noise
    assert config.engine.max_batch == trained.engine.max_batch != plain.engine.max_batch


def test_servers_that_the_suite_names_are_not_asked() -> None:
    below = suite(engine={"id": "vllm", "url": "http://localhost:9", "start_s": 9.0})
    config, _ = prepare(below, TINY, [], None, None)
    assert (config.engine.id, config.engine.url, config.engine.start_s) == ("vllm", None, 9.0)


def test_a_model_that_the_suite_names_is_not_asked() -> None:
    below = suite(model={"path": "nowhere", "scratch": {"model_type": "x"}, "stop": ["<eos>"]})
    config, _ = prepare(below, replace(TINY, layers={"model": {"path": "configs/corridor-warm"}}), [], None, None)
    assert config.model.scratch is None and config.model.stop == ["<eos>"]
    assert config.model.path is not None and config.model.path.endswith("corridor-warm")


@pytest.mark.parametrize(
    ("layers", "problems", "expected"),
    [({}, None, None), ({}, 3, 3), ({"eval": {"tasks": 9}}, None, 9), ({"eval": {"tasks": 9}}, 3, 3)],
)
def test_how_many_problems(layers: dict[str, Any], problems: int | None, expected: int | None) -> None:
    assert prepare(suite(**layers), TINY, [], None, problems)[1].problems == expected


def test_an_endpoint_needs_no_model_and_takes_settings() -> None:
    below = suite(endpoint={"temperature": 0.5, "top_p": 0.9})
    config, plan = prepare(below, FAR, ["endpoint.top_p=0.8", 'endpoint.extra.reasoning_effort="low"'], 2, 3)
    assert config.model.path is None and plan.endpoint is not None
    assert (plan.endpoint["temperature"], plan.endpoint["top_p"], plan.endpoint["model"]) == (0.5, 0.8, "m")
    assert plan.endpoint["extra"] == {"reasoning_effort": "low"} and (plan.runs, plan.problems) == (2, 3)


@pytest.mark.parametrize(
    "word", ["engine.noise=0.1", "rollout.tool_calls=glm", 'model.stop=["<bos>"]', "limits.max_turns=2", "seed=1"]
)
def test_what_a_score_depends_on_is_a_setting(word: str) -> None:
    def settings(*words: str) -> dict[str, Any]:
        return _settings(*prepare(suite(), TINY, list(words), None, None))

    assert settings() == settings("rollout.concurrency=3", "engine.max_batch=3") != settings(word)


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        (TINY, ["limits.max_turn=3"], r"`limits\.max_turn` is not a setting"),
        (TINY, ["endpoint.temperature=0"], "the model is no endpoint"),
        (TINY, ["model.path=configs/quickstart-warm"], r"`model\.path` is not for an evaluation"),
        (TINY, ['model.scratch.model_type="qwen3"'], r"`model\.scratch` is not for an evaluation"),
        (TINY, ["model=5"], "`model` = 5 is no table"),
        (TINY, ["eval.tasks=0"], r"`eval\.tasks` = 0"),
        (TINY, ["engine.id=vllm", "engine.url=http://localhost:9"], r"`engine\.url` = 'http://localhost:9'"),
        (TINY, ["environment.id=coridor"], "coridor"),
        (TINY, ["limits.max_context=100000"], "positions"),
        (FAR, ["endpoint=5"], "`endpoint` = 5 is no table"),
        (FAR, ["endpoint.temperature=-1"], r"`endpoint\.temperature` = -1"),
        (FAR, ["endpoint.temprature=1"], r"`endpoint\.temprature` is not a setting"),
        (FAR, ["endpoint.url=http://user:secret@host/v1"], r"`endpoint\.url`"),
        (FAR, ["x"], "is not key=value"),
    ],
)
def test_one_clear_error(model: Model, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(suite(), model, words, None, None)
    assert caught.value.hint


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"suite": "a"}', PLAN | {"problems": "x"}, PLAN | {"split": "x"}])
def test_a_folder_that_is_no_evaluation(tmp_path: Path, text: str | dict[str, Any] | None) -> None:
    if text is not None:
        (tmp_path / "evaluation.json").write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(ConfigError, match="is no evaluation"):
        stored(tmp_path)


def test_as_many_runs_as_can_be_listed() -> None:
    with pytest.raises(ConfigError, match=r"`--runs` = 99999999999") as caught:
        prepare(suite(), TINY, [], 99_999_999_999, None)
    assert "10000" in caught.value.hint


def test_weights_that_changed_are_not_mixed_into_a_result(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree("configs/corridor-warm", model)
    found = find_model(str(model))
    config, plan = prepare(suite(model={"stop": ["<eos>"]}), found, [f"run_dir={tmp_path}", "trainer.dtype=float32"], None, 2)
    run = RunDir.create(config, "eval-mine")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"\0")
    with pytest.raises(ConfigError, match=r"has changed: .*was begun with " + found.identity["sha256"]) as caught:
        asyncio.run(evaluate(run, config, plan))
    assert "--model" in caught.value.hint


def test_a_plan_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    for model in (TINY, FAR):
        config, plan = prepare(suite(), model, [f"run_dir={tmp_path}"], 2, 3)
        folder = RunDir.create(config, f"eval-{model.name}")
        store(folder, plan)
        assert stored(folder.path) == plan
        folder.close()


# --- perfect and random play -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", SUITES)
def test_perfect_play_is_all_of_it(tmp_path: Path, word: str) -> None:
    result, run, _ = play(word, tmp_path, "sandbox.id=memory" if word != "tir_synthetic" else "sandbox.id=process")
    assert (len(result.problems), len(result.samples), len(set(result.problems))) == (8, 8, 8)
    assert mean_success(result.successes) == 1.0
    assert all(s.turns > 0 and s.tokens > s.action_tokens > 0 and s.seconds > 0 and not s.error for s in result.samples)
    assert load(run.path) == result, "what is stored is what is returned"


@pytest.mark.parametrize("word", ["corridor", "sums"])
def test_random_play_is_exactly_the_lucky_ones(tmp_path: Path, word: str) -> None:
    result, _, seeds = play(word, tmp_path, "seed=7", mode="random", runs=3)
    expected = [[predicted(i, run, 7) for run in range(3)] for i in range(8)]
    assert result.successes.tolist() == expected
    assert 0 < sum(map(sum, expected)) < 24 and mean_success(result.successes) == sum(map(sum, expected)) / 24
    assert len(set(seeds)) == len(seeds), "no turn of any sample shares its seed with another"


def test_as_many_walks_as_there_are_are_told_apart(tmp_path: Path) -> None:
    """Some of the 1,024 begin alike; the solver goes by what it sees later."""
    table = load_suite("corridor").layers["environment"]
    tasks = served("corridor", (), "perfect")._environment.tasks("heldout")
    alike: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        alike.setdefault(json.dumps(task.messages), []).append(index)
    last = max(pair[1] for pair in alike.values() if len(pair) > 1)
    assert table == {"id": "corridor"} and last > 256
    result, _, _ = play("corridor", tmp_path, "rollout.concurrency=32", problems=last + 1)
    assert mean_success(result.successes) == 1.0


# --- resuming --------------------------------------------------------------------------------------------------------


def failing(begins: int) -> Callable[[dict[str, Any]], bool]:
    """Fails whatever is asked for the first turn of problems from this one on."""
    return lambda body: body["seed"] % (SEEDS * TASKS) >= begins * SEEDS


def test_what_infrastructure_loses_is_missing_and_never_zero(tmp_path: Path) -> None:
    result, run, seeds = play("sums", tmp_path, fails=failing(5), runs=2)
    rows = result.successes
    assert rows[:5].tolist() == [[1.0, 1.0]] * 5 and np.isnan(rows[5:]).all()
    lost = [s for s in result.samples if s.reward is None]
    assert len(lost) == 6 and {s.termination for s in lost} == {"engine_error"} and all("overloaded" in s.error for s in lost)
    assert mean_success(rows) == 1.0, "the mean is over those that were judged"
    assert len(seeds) == 10 + 6 * 3, "three tries each"

    again, asked = resumed("sums", run)
    assert len(asked) == 6 and all(seed % (SEEDS * TASKS) >= 5 * SEEDS for seed in asked), "only what was missing"
    assert again.successes.tolist() == [[1.0, 1.0]] * 8 and again.problems == result.problems
    assert load(run.path) == again
    same, asked = resumed("sums", run)
    assert not asked and same.samples == again.samples, "nothing is missing: nothing is played"


def test_an_evaluation_that_was_killed_goes_on(tmp_path: Path) -> None:
    """At the kill two episodes ran, one had a verdict: the book is closed, the verdict stays."""

    async def begin() -> RunDir:
        async with served("sums", (), "perfect") as endpoint:
            config, plan = prepared("sums", endpoint.url, tmp_path, problems=4)
            run = RunDir.create(config, "eval-sums")
            store(run, plan)
            await evaluate(run, config, replace(plan, problems=1))
            return run

    run = asyncio.run(begin())
    ledger = Ledger(run.path)
    for index in (1, 2):
        ledger.dispatch(f"{PURPOSE}-9-{index}", PURPOSE, "t", Slot(index, index), 0)
    ledger.close()
    result, asked = resumed("sums", run)
    assert len(asked) == 3 and result.successes.tolist() == [[1.0]] * 4
    ledger = Ledger(run.path)
    assert ledger.counts() == {"evaluated": 4, "dropped": 2}
    assert [s.seconds for s in result.samples] == [ledger.attempts(PURPOSE)[i, 0].seconds for i in range(4)]
    ledger.close()


# --- the verb --------------------------------------------------------------------------------------------------------


def verb(words: list[str], model: str | None, **options: Any) -> int:
    defaults: dict[str, Any] = {"runs": None, "problems": None, "resume": None, "dry_run": False, "as_json": True}
    return evaluation(words, model=model, run=asyncio.run, **defaults | options)


def test_missing_samples_are_exit_code_1_until_they_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The endpoint is down in the first call and up in the second, at the same address."""
    endpoint = served("sums", (), "perfect")
    words = ["sums", "endpoint.attempts=1", "rollout.concurrency=4", f"run_dir={tmp_path}"]

    async def main() -> None:
        async with endpoint:
            endpoint.fails = failing(2)  # type: ignore[method-assign]
            code = await asyncio.to_thread(verb, words, f"{endpoint.url}#m", problems=3)
            said = capsys.readouterr()
            report = json.loads(said.out)
            assert (code, report["missing"], report["judged"], report["success"]) == (1, 1, 2, 1.0)
            assert f"sao eval --resume {report['run']}" in said.err
            assert "the last that was lost: " in said.err and "overloaded" in said.err
            endpoint.fails = lambda body: False  # type: ignore[method-assign]
            code = await asyncio.to_thread(verb, [], None, resume=Path(report["run"]))
            said = capsys.readouterr()
            assert (code, json.loads(said.out)["missing"], json.loads(said.out)["judged"]) == (0, 0, 3)
            assert "are missing" not in said.err
            for name in ("report.md", "report.html", "result.json"):
                assert (Path(report["run"]) / name).is_file()

    asyncio.run(main())


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb(["sums", f"run_dir={tmp_path}"], "http://localhost:9/v1#m", dry_run=True) == 0
    said = capsys.readouterr().out
    assert 'id = "sums"' in said and not list(tmp_path.iterdir())
    for line in (
        "# suite sums: 256 problems at most of heldout, 1 runs each",
        "# model http://",
        "# endpoint.temperature = 1.0",
    ):
        assert line in said, said
    _, run, _ = play("sums", tmp_path, fails=lambda _: True, problems=1)
    before = (run.path / "result.json").stat().st_mtime_ns
    assert verb([], None, resume=run.path, dry_run=True) == 0
    assert 'id = "sums"' in capsys.readouterr().out
    assert (run.path / "result.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("words", "model", "options", "message"),
    [
        ([], "configs/corridor-warm", {}, "a suite and a --model are needed"),
        (["sums"], None, {}, "a suite and a --model are needed"),
        (["sums"], None, {"resume": Path("x")}, "drop the other arguments"),
        ([], None, {"resume": Path("x"), "runs": 2}, "drop the other arguments"),
        ([], None, {"resume": Path("configs")}, "is no evaluation"),
    ],
)
def test_arguments_that_do_not_go_together(words: list[str], model: str | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        verb(words, model, **options)
    assert message in f"{caught.value.message} {caught.value.hint}"


def test_an_interruption_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(job: Any) -> None:
        job.close()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluation(
            ["sums", f"run_dir={tmp_path}"],
            model="http://localhost:9/v1#m",
            runs=None, problems=None, resume=None, dry_run=False, as_json=False, run=interrupted,
        )  # fmt: skip
    (run,) = tmp_path.iterdir()
    assert f"sao eval --resume {run}" in capsys.readouterr().err


def test_two_results_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    perfect, first, _ = play("sums", tmp_path / "a", runs=2)
    chance, second, _ = play("sums", tmp_path / "b", "limits.max_context=500", mode="random", runs=2)
    found = compare(perfect, chance)
    assert found.found and found.difference == 1.0 - mean_success(chance.successes)
    assert {"limits", "endpoint"} <= found.unlike.keys() and "environment" not in found.unlike
    assert comparison([str(first.path), str(second.path)], out=tmp_path / "out", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["difference"] == found.difference
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"comparison.md", "comparison.html"}


# --- the official judge ----------------------------------------------------------------------------------------------


def test_an_environment_without_an_official_judge_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    async def main() -> list[int]:
        async with served("sums", (), "perfect") as endpoint:
            config, plan = prepared("sums", endpoint.url, tmp_path)
            run = RunDir.create(config, "eval-sums")
            with pytest.raises(ConfigError, match="has no official judge"):
                await evaluate(run, config, replace(plan, official=True))
            return endpoint.seeds

    assert asyncio.run(main()) == []


def test_a_missing_official_judge_is_named_before_anything_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="needs swebench 5") as caught:
        find("environment", "swe").official_ready(None)
    assert "make setup-swe" in str(caught.value.hint)


def test_the_official_judge_gets_what_was_judged_run_by_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from environments import sums

    asked: list[tuple[list[str], list[str], str]] = []

    async def official(self: Any, tasks: Any, artifacts: Any, folder: Path) -> dict[str, list[str]]:
        asked.append(([task.id for task in tasks], list(artifacts), folder.name))
        return {"resolved": [task.id for task in tasks[:1]], "errors": []}

    monkeypatch.setattr(sums.Sums, "official", official, raising=False)
    monkeypatch.setattr(sums.Sums, "official_ready", lambda self: None, raising=False)
    monkeypatch.setattr(logging.getLogger("sao"), "disabled", True)

    async def main() -> Path:
        async with served("sums", (), "perfect") as endpoint:
            endpoint.fails = lambda body: body["seed"] >= SEEDS * (TASKS + 1)  # type: ignore[method-assign]
            config, plan = prepared("sums", endpoint.url, tmp_path, runs=3, problems=2)
            run = RunDir.create(config, "eval-sums")
            await evaluate(run, config, replace(plan, official=True))
            return run.path

    verdicts = json.loads((asyncio.run(main()) / "official.json").read_text())
    first, second = [task.id for task in served("sums", (), "perfect")._environment.tasks("heldout")[:2]]
    assert asked == [([first, second], [first, second], "run-0"), ([first], [first], "run-1")], "run 2 is lost whole"
    assert verdicts == {f"run {n}": {"resolved": [first], "errors": []} for n in (0, 1)}


def test_the_official_judge_is_asked_once_about_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from environments import sums

    asked: list[int] = []

    async def official(self: Any, tasks: Any, artifacts: Any, folder: Path) -> dict[str, list[str]]:
        asked.append(len(tasks))
        return {"resolved": [], "errors": []}

    monkeypatch.setattr(sums.Sums, "official", official, raising=False)
    monkeypatch.setattr(sums.Sums, "official_ready", lambda self: None, raising=False)

    async def main() -> None:
        async with served("sums", (), "perfect") as endpoint:
            config, plan = prepared("sums", endpoint.url, tmp_path, runs=1, problems=2)
            run = RunDir.create(config, "eval-sums")
            await evaluate(run, config, replace(plan, official=True))
            await evaluate(RunDir.resume(run.path, model=False)[0], config, replace(plan, official=True))

    asyncio.run(main())
    assert asked == [2]
