"""Options and fixtures of the integration tests. Trainer and worker are separate processes, in separate environments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # harness, models and cases are modules of this folder

import cases
import models
from harness import Cast, VLLMServer, WorkerHost


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all` runs every cell of the matrix."""
    parser.addoption("--all", action="store_true", help="run every cell of the matrix, not only the default ones")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `case` runs once per cell."""
    if "case" in metafunc.fixturenames:
        chosen = cases.ALL if metafunc.config.getoption("--all") else cases.DEFAULT
        metafunc.parametrize("case", chosen, ids=str, scope="module")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """A function from model kind to the folder of its checkpoint with seed 0, written once."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            models.save_checkpoint(kind, 0, made[kind])
        return made[kind]

    return get


@pytest.fixture(scope="module")
def engine(case: cases.Case, checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerHost | VLLMServer]:
    """The cell's vLLM, serving the checkpoint with seed 0."""
    directory = tmp_path_factory.mktemp(str(case))
    if case.engine == "inprocess":
        with WorkerHost("vllm", directory, model=str(checkpoint(case.model))) as host:
            assert host.port
            yield host
    else:
        with VLLMServer(checkpoint(case.model), directory) as server:
            server.wait_ready()
            yield server


@pytest.fixture(scope="session")
def _company(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    """All processes without vLLM, alive for the whole run."""
    company = Cast(tmp_path_factory.mktemp("processes"))
    yield company
    company.close()


@pytest.fixture
def cast(_company: Cast) -> Iterator[Cast]:
    """The processes of one test."""
    yield _company
    _company.release()
