"""The catalog of estimators: every entry finds its function, and every option is one of its keywords."""

from __future__ import annotations

import importlib
import inspect
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from trainer.advantages import catalog
from trainer.advantages.types import CriticEstimator, Outcomes

ENTRIES = {cls.__name__: cls for cls in vars(catalog).values() if isinstance(cls, type) and hasattr(cls, "function")}


def target(entry: type[catalog.Estimator]) -> Any:
    module, attribute = entry.function.split(":")
    return getattr(importlib.import_module(module), attribute)


def test_the_catalog_is_complete() -> None:
    assert len(ENTRIES) == len({entry.function for entry in ENTRIES.values()}) == 13
    assert {name for name, entry in ENTRIES.items() if entry.groups} == {"Grpo", "Rloo", "DrGrpo", "ReinforcePPBaseline"}
    assert {name for name, entry in ENTRIES.items() if entry.kind == "return"} == {"ReinforcePP", "ReinforcePPBaseline"}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_catalog_entries_fit_their_functions(entry: type[catalog.Estimator]) -> None:
    function, options = target(entry), entry.Config().model_dump()
    if entry.kind == "critic":
        assert isinstance(function, CriticEstimator)
        assert options == {"alpha": 1.5, "lam": None}
    else:
        parameters = inspect.signature(function).parameters.values()
        keywords = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        assert keywords == options
        advantages, _ = function(Outcomes(torch.tensor([1.0, 0.0]), ("a", "a")), {}, **options)
        assert advantages.isfinite().all()
    with pytest.raises(ValidationError, match="extra"):
        entry.Config(**{"unknown": 1})


def test_lambda_is_adaptive_or_fixed() -> None:
    config = catalog.SkipObservation.Config
    for given_, expected in [
        ({"lam": 0.9}, {"alpha": None, "lam": 0.9}),
        ({"lam": 0.0, "alpha": None}, {"alpha": None, "lam": 0.0}),
        ({"alpha": 0.05}, {"alpha": 0.05, "lam": None}),
    ]:
        dumped = config.model_validate(given_).model_dump()
        assert dumped == expected
        assert (
            config(**dumped).model_dump() == config(**config(**dumped).model_dump(exclude_none=True)).model_dump() == expected
        )
    for wrong in (
        {"lam": 0.9, "alpha": 1.5},
        {"alpha": None},
        {"lam": 1.1},
        {"lam": -0.1},
        {"alpha": 0.0},
        {"alpha": math.inf},
    ):
        with pytest.raises(ValidationError):
            config.model_validate(wrong)


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        (catalog.StepLast, {"lam": 0.9, "alpha": 1.5}),
        (catalog.StepLast, {"alpha": None}),
        (catalog.StepLast, {"alpha": 0.0}),
        (catalog.StepLast, {"alpha": math.inf}),
        (catalog.StepLast, {"lam": 1.1}),
        (catalog.StepLast, {"lam": -0.1}),
        (catalog.Grpo, {"std": "biased"}),
        (catalog.RunningMeanPrompt, {"window": 0}),
        (catalog.RunningMeanPrompt, {"initial": math.nan}),
        (catalog.RunningMeanGlobal, {"window": 0}),
        (catalog.Spo, {"rho_min": 1.0}),
        (catalog.Spo, {"rho_min": 0.9, "rho_max": 0.8}),
        (catalog.Spo, {"d_half": 0.0}),
        (catalog.Spo, {"v0": 1.1}),
    ],
)
def test_options_have_bounds(entry: type[catalog.Estimator], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        entry.Config.model_validate(wrong)


def test_the_catalog_needs_no_torch() -> None:
    code = "import sys, trainer.advantages.catalog; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
