"""Options and fixtures of the integration tests. Trainer and worker are separate processes, in separate environments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # harness, models, engines and cases are modules of this folder

import cases
import engines
import models
from harness import Cast, EmbeddedServer, together


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all` runs every cell of the matrix, `--soak` the long test, `--sweep` all kinds in all ways."""
    parser.addoption("--sweep", action="store_true", help="run test_sweep.py, which prints a table")
    parser.addoption("--soak", action="store_true", help="run two hundred rounds with random failures")
    parser.addoption("--gpu-case", help="the cell of gpu_cells.py; set by gpu_runner.py")
    parser.addoption("--all", action="store_true", help="run every cell of the matrix, not only the default ones")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `case` runs once per cell; one that takes a `server`, with two ranks, and with `--all` also with one."""
    if "server" in metafunc.fixturenames:
        sizes = [2, 1] if metafunc.config.getoption("--all") else [2]
        metafunc.parametrize("server", sizes, ids=[f"tp{size}" for size in sizes], indirect=True, scope="module")
    if "placement" in metafunc.fixturenames:
        chosen = cases.PLACEMENT_ALL if metafunc.config.getoption("--all") else cases.PLACEMENT_DEFAULT
        metafunc.parametrize("placement", chosen, ids=str, scope="module")
    if "case" in metafunc.fixturenames:
        chosen = cases.ALL if metafunc.config.getoption("--all") else cases.DEFAULT
        metafunc.parametrize("case", chosen, ids=str)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of all cells that share an engine run one after the other, so that each engine starts once."""

    def engine_of(item: pytest.Item) -> tuple[int, str]:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        return (-1, "") if case is None else (cases.ENGINES.index(case.engine), case.model)

    items.sort(key=engine_of)  # a stable sort: what takes no case keeps its order, and comes first


_MEASURED = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """What `measured` collects."""
    config.stash[_MEASURED] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The times that tests measured, from which the README's table is written, and the rows of other tables."""
    for line in config.stash[_MEASURED]:
        terminalreporter.write_line(line)


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[float], None]:
    """Records how long the test's event took to be noticed, in seconds."""
    return lambda seconds: request.config.stash[_MEASURED].append(f"measured {request.node.name}: {seconds:.2f} s")


@pytest.fixture
def noted(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds a line to what is printed at the end."""
    return request.config.stash[_MEASURED].append


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from model kind, and seed (0 if none is given), to the folder of its checkpoint, written once."""
    made: dict[tuple[str, int], Path] = {}

    def get(kind: str, seed: int = 0) -> Path:
        if (kind, seed) not in made:
            made[kind, seed] = tmp_path_factory.mktemp(f"{kind}-{seed}")
            models.save_checkpoint(kind, seed, made[kind, seed])
        return made[kind, seed]

    return get


@pytest.fixture(scope="session")
def fresh_load(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., engines.FreshLoad]:
    """A function from model kind, seed and the engine's options to what an engine serves that has loaded just that.

    Each such engine is started once, and has ended when this returns.
    """
    made: dict[tuple[Any, ...], engines.FreshLoad] = {}

    def get(kind: str, seed: int, prompt: list[int], **config: Any) -> engines.FreshLoad:
        key = (kind, seed, tuple(prompt), *sorted(config.items()))
        if key not in made:
            directory = tmp_path_factory.mktemp(f"fresh-{kind}-{seed}")
            made[key] = engines.FreshLoad.of(checkpoint(kind, seed), directory, prompt, **config)
        return made[key]

    return get


@pytest.fixture(scope="session")
def servers(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[EmbeddedServer]]:
    """Two embedded ones, which started from the checkpoint of `llama`; for the examples and the documentation's code blocks."""
    started = [EmbeddedServer(checkpoint("llama"), tmp_path_factory.mktemp("server")) for _ in range(2)]
    try:
        for server in started:
            server.wait_ready()
        yield started
    finally:
        together(*(server.close for server in started))


@pytest.fixture(scope="session")
def _running(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Iterator[engines.Running]:
    """At most one engine at a time, kept while the next test wants the same."""
    running = engines.Running(tmp_path_factory, checkpoint)
    yield running
    running.stop()


@pytest.fixture
def engine(case: cases.Case, _running: engines.Running) -> engines.Engine:
    """The cell's vLLM. It started from the checkpoint with seed 0; earlier cells have left other weights."""
    return _running.get(case.engine, case.model)


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
