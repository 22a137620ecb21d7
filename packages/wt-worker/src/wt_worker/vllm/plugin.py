"""What vLLM calls in each of its processes: our engines become names that it knows."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from importlib.metadata import entry_points

__all__ = ["ALLOW_ANY_VLLM", "register"]

ALLOW_ANY_VLLM = "WT_ALLOW_ANY_VLLM"
"""Environment variable; set to 1, it lets the plugin register with a vLLM that is not supported."""

# Since 0.26 a worker builds its engine as (config, vllm_config, device, model). Up to 0.33 the
# layerwise reload was read, and compared with what wt_worker.vllm.reload expects of it.
_FIRST_VLLM = (0, 26)
_NEXT_VLLM = (0, 34)

_logger = logging.getLogger(__name__)
_registered: set[str] = set()


def register() -> None:
    """In vLLM, every built-in backend is now called `wt_<name>`, and every user's by its own name.

    Built-in backends have the prefix because vLLM took the plain names for engines of its own.
    Users' backends are the entry points of group `wt_worker.backends`. No engine is imported here:
    vLLM is given module path and class name, and imports what its configuration asks for. Calling
    this again changes nothing; a name that somebody else has taken stays theirs.

    With a vLLM outside 0.26 to 0.33, or one whose version says nothing, no name is registered and
    the log says so: the engines rely on how vLLM builds an engine and reloads a layer, and a
    difference there can show as wrong weights rather than as an error. An unknown backend stops
    the server before it serves. `WT_ALLOW_ANY_VLLM=1` registers all the same.

    Never raises, since that would stop every vLLM with this package in its image, also those that
    transfer no weights: what goes wrong is logged.
    """
    try:
        if _is_supported():
            for name, module, attribute in _engines():
                _register_engine(name, module, attribute)
    except Exception:
        _logger.exception("wt-worker registered no weight transfer backend, or not all of them")


def _is_supported() -> bool:
    import vllm

    version = getattr(vllm, "__version__", "")
    release = re.match(r"(\d+)\.(\d+)", version)
    if release and _FIRST_VLLM <= tuple(int(part) for part in release.groups()) < _NEXT_VLLM:
        return True
    found = f"wt-worker supports vLLM 0.26 to 0.33, and this is {version or 'of no known version'}"
    if os.environ.get(ALLOW_ANY_VLLM) == "1":
        _logger.warning("%s; its backends are registered because %s=1", found, ALLOW_ANY_VLLM)
        return True
    _logger.warning(
        "%s: its backends are not registered; install a supported vLLM, or set %s=1 to try",
        found,
        ALLOW_ANY_VLLM,
    )
    return False


def _engines() -> Iterator[tuple[str, str, str]]:
    from wt_worker.factory import BUILTIN_BACKENDS, ENTRY_POINT_GROUP

    for name, (module, class_name) in BUILTIN_BACKENDS.items():
        yield f"wt_{name}", module, class_name
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if not (entry.attr or "").isidentifier():  # vLLM looks up one attribute of the module
            _logger.warning(
                "backend %s is not registered: entry point %r is not of the form module:Class",
                entry.name,
                entry.value,
            )
            continue
        yield entry.name, entry.module, entry.attr


def _register_engine(name: str, module: str, attribute: str) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if name in _registered:
        return
    try:
        WeightTransferEngineFactory.register_engine(name, module, attribute)
    except ValueError:
        _logger.warning(
            "backend %s of %s:%s is not registered: the name is taken; give it another name",
            name,
            module,
            attribute,
        )
    _registered.add(name)
