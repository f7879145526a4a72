"""The instance's image, made once and removed at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.sandboxes.docker import Engine
from tests.contracts.sandbox_support import HAVE_DOCKER
from tests.swe.instance import build


@pytest.fixture(scope="session")
def image() -> Iterator[str]:
    """Name of the image."""
    if not HAVE_DOCKER:
        pytest.skip("SAO_TEST_DOCKER=0, or not Linux: no real containers")
    name = build()
    yield name
    engine = Engine()
    engine.api.remove_image(name, force=True)
    engine.close()
