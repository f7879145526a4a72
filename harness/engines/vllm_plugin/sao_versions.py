"""Which versions of vLLM are trusted with live updates. Both interpreters import this: vLLM's and the harness's. No imports."""

PROVEN = ("0.32.0",)
"""Versions whose live updates were compared, token by token, with the trainer's log-probs."""
ALLOW = "SAO_VLLM_UNPROVEN"
"""Environment variable that lets others pass, if it is 1."""


def proven(version: str) -> bool:
    """Whether this is one of them, also as a build for CPUs or another CUDA."""
    return version.split("+")[0] in PROVEN
