from __future__ import annotations

from pathlib import Path

import pytest
from tests.compute.harness import Machine

from chabok.compute import isa

_machines: dict[str, Machine] = {}


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of compiled kernels for the whole run, so that each is compiled once."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def machines(kernel_folder: Path) -> dict[str, Machine]:
    """A machine for each instruction set this processor can run, by name, best first."""
    for one in isa.available():
        if one.name not in _machines:
            _machines[one.name] = Machine(one, kernel_folder)
    return _machines


@pytest.fixture(params=[one.name for one in isa.available()])
def machine(request: pytest.FixtureRequest, machines: dict[str, Machine]) -> Machine:
    """Each instruction set in turn."""
    return machines[request.param]


@pytest.fixture(scope="session")
def best(machines: dict[str, Machine]) -> Machine:
    """The instruction set that would be chosen here."""
    return next(iter(machines.values()))
