"""All kinds of models, both load formats and dtypes, one and two ranks: what is installed how, and how far off it is.

`nox -s integration -- --sweep -k sweep` prints the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import models
import pytest
from engines import FreshLoad, InProcess
from harness import Cast, HostError
from test_placement import SEED_NEW, sync
from test_sync import PROMPT

REFUSED: dict[tuple[str, str], str] = {}
"""By kind and dtype, words of the error for which a cell is refused, and is right to be: none at present."""


@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("num_ranks", [1, 2], ids=["tp1", "tp2"])
def test_sweep(
    request: pytest.FixtureRequest,
    fresh_load: Callable[..., FreshLoad],
    checkpoint: Any,
    tmp_path_factory: pytest.TempPathFactory,
    cast: Cast,
    noted: Callable[[str], None],
    kind: str,
    dtype: str,
    load_format: str,
    num_ranks: int,
) -> None:
    """The third round, on weights that the server never had, leaves what a fresh load of them leaves, or is refused."""
    if not request.config.getoption("--sweep"):
        pytest.skip("two engines for each of 120 cells: with --sweep")
    config: dict[str, Any] = {"dtype": dtype, "tensor_parallel_size": num_ranks}
    fresh = fresh_load(kind, SEED_NEW, PROMPT, **config)
    engine = InProcess(checkpoint(kind), tmp_path_factory.mktemp("sweep"), load_format=load_format, **config)
    report: dict[str, Any] = {}
    refused = ""
    try:
        trainer = cast.trainer([], layout="whole", model=kind, **engine.reach())
        trainer.call("init")
        try:
            for seed in (3, 4, SEED_NEW):
                report = sync(trainer, seed)
        except HostError as error:
            refused = f"{error.error['outcome']}: {error.error['message']}"
        now = FreshLoad.now(engine, PROMPT)
        kinds = [] if refused else engine.host.call("each_rank", method="kinds", arguments=[])
    finally:
        engine.close()
    difference = max(abs(a - b) for a, b in zip(now.logprobs, fresh.logprobs, strict=True))
    difference = math.inf if any(map(math.isnan, now.logprobs)) else difference
    layers = {name.rpartition(".")[0] for name in kinds[0]} if kinds else set()
    loaded = sum(map(len, report["workers"][0]["not_in_place"].values())) if kinds else 0
    noted(
        f"{kind:15} {load_format:5} {dtype:8} tp{num_ranks}: in place {len(layers) - loaded:3}, loader {loaded:3}, "
        f"difference {difference:.3g}{'; refused: ' + refused if refused else ''}"
    )
    if (kind, dtype) in REFUSED:
        assert REFUSED[kind, dtype] in refused
        assert refused.startswith("unchanged")
    else:
        assert (refused, difference) == ("", 0)
        assert now.digests == fresh.digests
