"""Live updates of a dense policy with a tied head: vLLM's fault with tied heads does not need a mixture of experts."""

from __future__ import annotations

import pytest

from tests.vllm.support import Fleet, needs_fix, there_and_back

pytestmark = pytest.mark.timeout(1_500)  # the first test starts the servers


def test_there_and_back_is_exact(fleet: Fleet) -> None:
    there_and_back(fleet.servers[0])


def test_the_tied_head_needs_its_fix(fleet: Fleet) -> None:
    needs_fix(fleet.servers[0], "tied")
