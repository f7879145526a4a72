"""A bad value's hint says what would be a good one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from harness.configfile import load_config
from harness.errors import ConfigError
from harness.registry import config_error


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    size: int = Field(1, ge=1, le=9)


class Opaque:
    """What no JSON schema can say."""


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["fast", "slow", 3] = "fast"
    only: Literal["this"] = "this"
    colour: Colour = Colour.RED
    colours: list[Colour] = []
    share: float = Field(0.5, gt=0, lt=1)
    share_or_file: Annotated[float, Field(ge=0, le=1)] | str = 0.5
    maybe: int | None = Field(None, ge=2)
    flag: bool = False
    name: str = Field("x", min_length=1, pattern="^[a-z]*$")
    pair: tuple[float, float] = (0.0, 1.0)
    levels: list[Annotated[int, Field(ge=1)]] = Field([1], min_length=1)
    inner: Inner = Inner()
    inners: dict[str, Inner] = {}
    even: int = 2

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("it is odd")
        return value


def hint(model: type[BaseModel] = Options, **given: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        model(**given)
    return config_error(caught.value, model).hint


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "quick"}, 'valid: one of "fast", "slow", 3'),
        ({"only": "that"}, 'valid: "this"'),
        ({"colour": "green"}, 'valid: one of "red", "blue"'),
        ({"colours": ["red", "green"]}, 'valid: one of "red", "blue"'),
        ({"share": 1.0}, "valid: a number (above 0, below 1)"),
        ({"share_or_file": []}, "valid: a number (at least 0, at most 1) or text"),
        ({"maybe": 1}, "valid: a whole number (at least 2)"),
        ({"flag": "perhaps"}, "valid: true or false"),
        ({"name": ""}, "valid: text (at least 1 characters, matches ^[a-z]*$)"),
        ({"pair": [0.5, "x"]}, "valid: a number"),
        ({"pair": 0.5}, "valid: a list of 2, each a number"),
        ({"levels": []}, "valid: a list (at least 1), each a whole number (at least 1)"),
        ({"levels": [0]}, "valid: a whole number (at least 1)"),
        ({"inner": {"size": 10}}, "valid: a whole number (at least 1, at most 9)"),
        ({"inners": {"a": {"size": 0}}}, "valid: a whole number (at least 1, at most 9)"),
        ({"inners": 1}, "valid: a table"),
        ({"even": 3}, "correct the value"),
    ],
)
def test_the_hint_says_what_is_valid(given: dict[str, Any], said: str) -> None:
    assert hint(**given) == said


def test_what_no_schema_can_say_is_left_unsaid() -> None:
    class Odd(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        thing: Opaque

    assert hint(Odd, thing=1) == "correct the value"


def test_a_run_s_configuration_has_such_hints(tmp_path: Path) -> None:
    for word, said in (
        ("engine.id=torche", '"torch", "vllm"'),
        ("algorithm.batch=0", "at least 1"),
        ("steps=x", "whole number"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(["configs/quickstart.toml", word])
        assert said in caught.value.hint
