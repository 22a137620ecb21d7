"""On the path of every process of a GPU cell, vLLM's own included.

On SIGUSR1 a process prints the stacks of all its threads. With WT_SHARE_GPUS=1 all ranks of a vLLM take the one GPU they see.
Otherwise vLLM gives each rank a GPU of its own, and refuses to start where there are fewer.
"""

import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

faulthandler.register(signal.SIGUSR1, all_threads=True)

_MANY = 8  # GPUs that vLLM is told of


def _share_in_worker(module: Any) -> None:
    init_device = module.Worker.init_device

    def init_on_first(worker: Any, *args: Any, **kwargs: Any) -> Any:
        worker.local_rank = 0
        return init_device(worker, *args, **kwargs)

    module.Worker.init_device = init_on_first


def _share_in_platform(module: Any) -> None:
    for value in vars(module).values():
        if isinstance(value, type) and hasattr(value, "device_count"):
            value.device_count = classmethod(lambda cls: _MANY)


_CHANGES: dict[str, Callable[[Any], None]] = {
    "vllm.v1.worker.gpu_worker": _share_in_worker,
    "vllm.platforms.cuda": _share_in_platform,
}


class _Changing(importlib.abc.MetaPathFinder):
    """Changes the modules of `_CHANGES` as soon as they are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            _CHANGES[name](module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]  # of this one spec
        return spec


if os.environ.get("WT_SHARE_GPUS") == "1":
    sys.meta_path.insert(0, _Changing())
