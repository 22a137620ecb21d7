"""Which engine a worker rank belongs to, as all of its ranks say it."""

from __future__ import annotations

import itertools
import logging
import uuid
from datetime import timedelta
from typing import Any

import torch

__all__ = ["Identity"]

logger = logging.getLogger(__name__)

_READ_S = 10.0  # rank 0 has written when its engine was made, long before a trainer comes

_made = itertools.count()  # engines of several ranks in this process; all ranks make theirs in the same order


class Identity:
    """Rank, size and id of an engine.

    vLLM's `instance_id` is the time at which a configuration was made. Ranks that vLLM starts itself on one host share one
    configuration; those of an engine over several nodes, or that torchrun has started (`external_launcher`), have one each. So
    rank 0's is that of all. It travels through the key-value store of torch's default process group, in which all ranks of an
    engine are: rank 0 writes it when the engine is made, the others read it when the first trainer comes. No collective is run:
    so nobody waits for a rank that never starts, and vLLM's own groups stay as they are.

    Args:
        vllm_config: vLLM's configuration, or any object with some of its fields.

    Attributes:
        rank: in the engine.
        size: ranks of the engine.
    """

    def __init__(self, vllm_config: Any) -> None:
        parallel = getattr(vllm_config, "parallel_config", None)
        self.rank = int(getattr(parallel, "rank", 0))
        self.size = int(getattr(parallel, "world_size", 1))
        self._instance = getattr(vllm_config, "instance_id", None) or uuid.uuid4().hex[:12]
        # With torchrun, vLLM numbers and counts the ranks of all data-parallel replicas together: they are one engine here.
        is_external = getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
        self._index = 0 if is_external else getattr(parallel, "data_parallel_index", 0)
        self._is_shared = self.size == 1
        self._key = f"wt_worker/instance/{self._index}/{next(_made) if self.size > 1 else 0}"
        if self.size > 1 and self.rank == 0:
            self._write()

    @property
    def engine_id(self) -> str:
        """The same on all ranks of the engine, and no other engine's. The first call may take a moment; it never raises."""
        if not self._is_shared:
            self._read()
            self._is_shared = True
        return f"{self._instance}/{self._index}"

    def _write(self) -> None:
        self._is_shared = True
        store = _default_store()
        if store is not None:
            store.set(self._key, self._instance)

    def _read(self) -> None:
        store = _default_store()
        if store is None:
            return  # not in vLLM, or in one that makes no default group
        try:
            store.wait([self._key], timedelta(seconds=_READ_S))
            self._instance = store.get(self._key).decode()
        except RuntimeError as exc:
            logger.warning(
                "rank %d of %d found no engine id of rank 0 (%s): a trainer will not take the engine for a whole one, unless all "
                "ranks share one configuration",
                self.rank,
                self.size,
                exc,
            )


def _default_store() -> Any:
    """The store of torch's default process group, if there is one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001  # the only way to it; of many releases
