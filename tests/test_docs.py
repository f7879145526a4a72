"""docs/metrics.md is made of the tables in the modules' docstrings: `python -m tests.test_docs` writes it anew.
docs/acceptance.md names tests that exist.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = """\
# Metrics

One row per batch in `metrics.jsonl` of the run folder: the harness's own facts, then the trainer's. Every mean is a global sum
over a global count, whatever the ranks, micro-batches and packing. What is undefined or not finite is null. This page is made
of the docstrings of the modules that compute the numbers.
"""
MORE = """
## The step (`trainer/report.py`, `trainer/step.py`)

| name | formula |
|---|---|
| `batch/action_tokens` | N, action tokens of the batch that enter the losses |
| `dis/all_masked` | 1 if the loss rejected every token: no policy step |
| `grad/policy`, `grad/critic_0`, .. | global gradient norms before clipping; null: not finite, and no step was taken |
| `clip/policy`, `clip/critic_0`, .. | clip coefficient min(1, c / norm) |
| `lr/policy`, `lr/critic_0`, .. | learning rate of the last step |
| `value/mse_0`, .. | value loss before each critic update, over the supervised tokens |
| `value/ev_post` | `value/ev` of the values after the updates: how well the batch was fitted, not out of sample |

`value/ev_post`, `value/leak`, `value/leak_signflip` cost a pass of the critic: each step with `advantage_values = "post"`,
every 10th with `"pre"`. `update/*` is there every 10th step. Every 50th step proves that no frozen parameter has changed by
a bit.
"""
PARTS = (
    ("The harness", "harness.telemetry"),
    ("The batch", "trainer.measure.batch"),
    ("The policy loss", "trainer.measure.off_policy"),
    ("Staleness", "trainer.measure.staleness"),
    ("The critic", "trainer.measure.critic"),
    ("Advantages", "trainer.measure.advantages"),
    ("Gradients and updates", "trainer.measure.gradients"),
)


def page() -> str:
    """The page as it should be."""
    parts = [HEAD]
    for title, name in PARTS:
        parts.append(f"\n## {title} (`{name.replace('.', '/')}.py`)\n\n{_text(name)}\n")
    parts.append(MORE)
    parts.append(f"\n## Alarms (`harness/alarms.py`)\n\n{_text('harness.alarms')}\n\n")
    parts.append('A warning is logged when it begins. `alarms = "stop"` ends the run on a stop; `"warn"` goes on.\n')
    return "".join(parts)


def _text(name: str) -> str:
    return (importlib.import_module(name).__doc__ or "").strip()


def test_the_page_is_what_the_modules_say() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.test_docs"


def test_every_acceptance_test_exists() -> None:
    page = (PAGE.parent / "acceptance.md").read_text()
    rows = re.findall(r"^\| (T-[A-Z-]+) \|(.*)", page, re.MULTILINE)
    assert len({item for item, _ in rows}) == len(rows) == 16
    for item, row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, item
        for file, name in named:
            assert re.search(rf"^(async )?def {name}\(", (TESTS / file).read_text(), re.MULTILINE), f"{item}: {file}::{name}"


if __name__ == "__main__":
    PAGE.write_text(page())
