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

_made = itertools.count()  # engines in this process; all ranks of an engine make theirs in the same order


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
        self._instance: str = getattr(vllm_config, "instance_id", None) or uuid.uuid4().hex[:12]
        # With torchrun, vLLM numbers and counts the ranks of all data-parallel replicas together: they are one engine here.
        is_external = getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
        self._index = 0 if is_external else getattr(parallel, "data_parallel_index", 0)
        number = next(_made)
        self._of_engine = _Shared(
            f"wt_worker/instance/{number}/{self._index}",
            self._instance,
            is_first=self.rank == 0,
            is_alone=self.size == 1,
        )
        self._of_replicas = _Shared(
            f"wt_worker/replicas/{number}",
            self._instance,
            is_first=self.rank == self._index == 0,
            is_alone=getattr(parallel, "data_parallel_size", 1) == 1,
        )

    @property
    def engine_id(self) -> str:
        """The same on all ranks of the engine, and no other engine's. The first call may take a moment; it never raises."""
        return f"{self._of_engine.value}/{self._index}"

    @property
    def replicas_id(self) -> str:
        """The same on all ranks of all data-parallel replicas that vLLM has started together. As `engine_id` otherwise."""
        return self._of_replicas.value


class _Shared:
    """A word of the first of some ranks, which all of them have then.

    Args:
        key: in the store, the same on all of them and no others.
        own: this rank's word, which it keeps where it can read none.
        is_first: whether it is the first.
        is_alone: whether there are no others.
    """

    def __init__(self, key: str, own: str, *, is_first: bool, is_alone: bool) -> None:
        self.key = key
        self._value = own
        self._is_known = is_first or is_alone
        store = _default_store() if is_first and not is_alone else None
        if store is not None:
            store.set(key, own)

    @property
    def value(self) -> str:
        """The first rank's word, read when it is asked for first."""
        store = None if self._is_known else _default_store()
        self._is_known = True
        if store is not None:
            try:
                store.wait([self.key], timedelta(seconds=_READ_S))
                self._value = store.get(self.key).decode()
            except RuntimeError as exc:
                logger.warning(
                    "%s: the first rank has written no id (%s). Unless all ranks share one configuration, a trainer will miss "
                    "ranks of this engine",
                    self.key,
                    exc,
                )
        return self._value


def _default_store() -> Any:
    """The store of torch's default process group, if there is one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001  # the only way to it; of many releases
