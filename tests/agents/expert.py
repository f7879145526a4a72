"""Who plays behind OpenHands in these tests: a scripted expert of the tiny projects, and a small policy that really samples.

Flows in: the text of a conversation whose task names a manner. Flows out: the next turn. The expert knows the fixes, but finds
file and folder in what the tools answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import nn

from environments.swe.rows import SweRow
from environments.toy_repair import tokenizer
from tests.agents.support import FINISH, call, run
from tests.swe.instance import BASE, FIXED
from tests.swe.projects import PROJECTS
from trainer.model import Policy, random_policy
from trainer.weights import export, write_file

FIXES = {"shop/prices.py": (BASE["shop/prices.py"], FIXED), **{p.module: (p.buggy, p.fixed) for p in PROJECTS}}
"""Module -> the buggy text and the right one."""
NOTHING = ("\n\n", "\n\n")
TESTS = "python3 -m pytest -q -p no:cacheprovider tests"


@dataclass(frozen=True, slots=True)
class Seen:
    """What the conversation has shown so far."""

    turn: int
    last: str
    """The latest observation."""
    folder: str
    module: str


def look(text: str) -> Seen:
    """Read a rendered conversation."""
    parts = text.split("<|im_start|>tool\n")[1:]
    folder = re.search(r"^at (\S+)$", "".join(parts), re.MULTILINE)
    module = next((name for name in FIXES if any(re.search(rf"^{re.escape(name)}\b", p, re.MULTILINE) for p in parts)), "")
    return Seen(text.count("<|im_start|>assistant\n") - 1, parts[-1] if parts else "", folder[1] if folder else "", module)


EXPLORE = run('echo "at $(pwd)"; git ls-files; git status --short')


def editor(command: str, seen: Seen, **more: Any) -> str:
    """A call of the file editor on the module."""
    return call("file_editor", command=command, path=f"{seen.folder}/{seen.module}", security_risk="LOW", **more)


def line_of(text: str) -> str:
    """The line that the fix changes."""
    return text.splitlines()[1]


def edits(seen: Seen) -> str:
    """Explores, views, repairs with the editor, runs the tests, finishes if they pass."""
    old, new = FIXES.get(seen.module, NOTHING)
    return (
        "Let me look around.\n" + EXPLORE,
        editor("view", seen),
        editor("str_replace", seen, old_str=line_of(old), new_str=line_of(new)),
        run(TESTS),
        FINISH if re.search(r"\d passed", seen.last) else "The tests do not pass.",
    )[seen.turn]


def applies(seen: Seen) -> str:
    """Explores, writes the right file through the terminal, runs the tests with a thought between, commits."""
    new = FIXES.get(seen.module, NOTHING)[1]
    return (
        EXPLORE,
        run(f"cat > {seen.module} <<'END'\n{new}END\ngit diff --stat"),
        call("think", thought="Now the tests."),
        run(TESTS),
        run("git -c user.name=a -c user.email=a@a commit -qam work && git log --oneline | wc -l"),
        FINISH,
    )[seen.turn]


def stumbles(seen: Seen) -> str:
    """Makes every mistake that OpenHands answers, and repairs all the same."""
    old, new = FIXES.get(seen.module, NOTHING)
    return (
        EXPLORE,
        '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls}\n</tool_call>',
        call("repair", what="everything"),
        "",
        editor("str_replace", seen, old_str="not in this file", new_str="x"),
        run("exit 3"),
        run(f"cd {seen.folder}; sleep 300; echo never", timeout=1),
        run("C-c", is_input="true"),
        editor("str_replace", seen, old_str=line_of(old), new_str=line_of(new)) + run(f"cd {seen.folder} && {TESTS}"),
        FINISH if re.search(r"\d passed", seen.last) else "The tests do not pass.",
    )[seen.turn]


def finishes(seen: Seen) -> str:
    """Does nothing."""
    return FINISH


def breaks(seen: Seen) -> str:
    """Leaves a file that is no Python, and says that it is done."""
    return (EXPLORE, run(f"echo 'def (' > {seen.module}"), "I have repaired it.")[seen.turn]


def repeats(seen: Seen) -> str:
    """The same look again and again."""
    return EXPLORE


MANNERS: dict[str, tuple[Callable[[Seen], str], float]] = {
    "edits": (edits, 1.0),
    "applies": (applies, 1.0),
    "stumbles": (stumbles, 1.0),
    "finishes": (finishes, 0.0),
    "breaks": (breaks, 0.0),
    "repeats": (repeats, 0.0),
}
"""Name -> the manner and the reward that it deserves."""


def in_manner(row: SweRow, manner: str) -> SweRow:
    """The row, with a problem that tells the expert how to play."""
    return row.model_copy(update={"problem_statement": f"{row.problem_statement}\nManner: {manner}."})


def expert(text: str, rng: random.Random) -> str:
    """The next turn of the manner that the task names (`harness.engines.scripted.Script`)."""
    manner = re.search(r"^Manner: (\w+)\.$", text, re.MULTILINE)
    assert manner is not None, text[-500:]
    return MANNERS[manner[1]][0](look(text))


# --- a policy that samples -------------------------------------------------------------------------------------------

THINK = '<tool_call>\n{"name": "think", "arguments": {"thought": "'
SAY = '<tool_call>\n{"name": "terminal", "arguments": {"security_risk": "LOW", "command": "tee -a said <<< '
CLOSE = '"}}\n</tool_call>'
LETTERS = "abcdefghijkl"
SLIM = "Use the tools."
"""A system prompt for models that know few positions."""


def write_sampler(folder: Path, seed: int, steps: int = 300, positions: int = 16_384) -> Path:
    """A tiny policy that answers any prompt with a thought or with a command that appends letters to the file `said`.

    Which one, and which letters, is sampled. The fixed part of a call is one token each, so that what follows depends on the
    token before: the training takes seconds, and holds behind any context. The attention is there and acts, untaught.
    """
    torch.manual_seed(seed)
    words = tokenizer.build_tokenizer()
    words.add_tokens([AddedToken(word, special=False, normalized=False) for word in (THINK, SAY, CLOSE)])
    tokenizer.write(folder)
    words.save(str(folder / "tokenizer.json"))
    policy = random_policy(
        {
            "model_type": "qwen3",
            "vocab_size": words.get_vocab_size(),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": positions,
            "initializer_range": 0.2,
        },
        seed,
    )
    if steps:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # such a small model only waits for more
        _teach(policy, words, steps)
        torch.set_num_threads(threads)
    policy.model.config.to_json_file(folder / "config.json")
    write_file(dict(export(policy.model)), folder / "model.safetensors")
    return folder


def _teach(policy: Policy, words: Any, steps: int) -> None:
    """Contexts of random tokens, the generation prompt, an answer that carries the loss."""
    rng = random.Random(0)
    size = words.get_vocab_size()
    ids = {word: words.token_to_id(word) for word in (THINK, SAY, CLOSE, "assistant\n", "<|im_end|>", *LETTERS)}
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_("self_attn" not in name)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 1e-4)
    for _ in range(steps):
        tokens, where, starts = [], [], [0]
        for _ in range(16):
            few = rng.sample(range(size), rng.randint(1, 40))
            tokens += rng.choices(few, k=rng.randint(1, 100))
            tokens += [ids["assistant\n"]]
            said = [ids[rng.choice((THINK, SAY))], *(ids[x] for x in rng.choices(LETTERS, k=rng.choice((1, 2, 3, 4))))]
            answer = [*said, ids[CLOSE], ids["<|im_end|>"]]
            where += range(len(tokens), len(tokens) + len(answer))
            tokens += answer
            starts.append(len(tokens))
        positions = [i - start for start, stop in zip(starts, starts[1:], strict=False) for i in range(start, stop)]
        logprobs, _ = policy(torch.tensor(tokens, dtype=torch.int32), torch.tensor(positions), starts, torch.tensor(where))
        loss = -logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        policy.model.lm_head.weight *= 2.0  # what was not taught becomes as good as impossible
