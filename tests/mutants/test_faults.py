"""The planted faults still fit the sources; `make mutants` checks that the tests find them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text()
    assert source.count(fault.right) == 1
    assert ast.dump(ast.parse(source.replace(fault.right, fault.wrong))) != ast.dump(ast.parse(source))
    assert all((ROOT / test).is_file() for test in fault.tests)
