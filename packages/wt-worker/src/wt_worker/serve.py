"""An HTTP server around one Hugging Face causal language model, with vLLM's RL routes: for machines without vLLM, and for tests.

    python -m wt_worker.serve --model DIR --backend gloo

It hosts one `WeightTransferEngine` and makes the same calls as vLLM's worker; `completions.py` computes the tokens. It listens on
this host only unless told otherwise, and has no authentication. Needs the extra `[serve]`.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM

from wt_common import ConfigurationError
from wt_worker.checkpoint import checkpoint_tensors
from wt_worker.completions import Completions
from wt_worker.engine import WeightTransferConfig
from wt_worker.factory import WeightTransferEngineFactory
from wt_worker.model_digest import model_digest

__all__ = ["ModelHost", "make_app"]

MAX_REQUESTS = 256
"""Completions in hand at once, each with a thread, also while a pause has frozen it; vLLM's `max_num_seqs` is of that size."""

logger = logging.getLogger(__name__)


class ModelHost:
    """A model, its completions, and the engine that updates it.

    Args:
        model: its parameters' names are those of the checkpoint.
        backend: a built-in worker backend, or one published as an entry point (`wt_worker.backends`).
    """

    def __init__(self, model: torch.nn.Module, backend: str) -> None:
        device = next(model.parameters()).device
        parallel = SimpleNamespace(rank=0, world_size=1, data_parallel_index=0)
        vllm_config = SimpleNamespace(parallel_config=parallel, model_config=None)
        config = WeightTransferConfig(backend=backend)
        self.completions = Completions(model, device)
        self.engine = WeightTransferEngineFactory.create_engine(config, vllm_config, device, model)
        self.version = "default"
        self._update_open = False
        self._calls = threading.Lock()  # the engine gets one call at a time, as in vLLM's worker

    def init(self, *, init_info: dict[str, Any]) -> dict[str, Any]:
        """A trainer is connected."""
        with self._calls:
            self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))
        return {"message": "Weight transfer initialized"}

    def start(self) -> dict[str, Any]:
        """An update is open."""
        with self._calls:
            self._expect_open("start_weight_update", is_open=False)
            self.engine.start_weight_update()
            self._update_open = True
        return {"message": "Weight update started"}

    def update(self, *, update_info: dict[str, Any]) -> dict[str, Any]:
        """The weights are in the model; no token is computed meanwhile."""
        with self._calls, self.completions.held():
            self._expect_open("update_weights", is_open=True)
            try:
                self.engine.update_weights(update_info)
            except BaseException:
                self._update_open = False
                raise
        return {"message": "Weights updated"}

    def finish(self, *, weight_version: str | None = None) -> dict[str, Any]:
        """The update is closed, and its version published."""
        with self._calls, self.completions.held():
            self._expect_open("finish_weight_update", is_open=True)
            self.engine.finish_weight_update()
            self._update_open = False
            self.version = self.version if weight_version is None else weight_version
        return {"message": "Weight update finished"}

    def shutdown(self) -> dict[str, Any]:
        """No trainer is connected."""
        with self._calls:
            self.engine.shutdown()
        return {"message": "Weight transfer shut down"}

    def set_version(self, *, new_version: str) -> dict[str, Any]:
        """The label is `new_version`."""
        self.version = new_version
        return {"success": True, "new_version": new_version}

    def weight_info(self) -> dict[str, Any]:
        """The label, and how the engine's last round ended (None before the first)."""
        return {"weight_version": self.version, "outcome": getattr(self.engine, "last_outcome", None)}

    def weight_digest(self) -> dict[str, Any]:
        """One digest for all weights and persistent buffers, as `wt_worker.model_digest` computes it; 1 GB takes 0.5 s."""
        with self._calls, self.completions.held():
            tensors = checkpoint_tensors(self.completions.model, remove_duplicate=True)
            return {"digest": model_digest(tensors.items())}

    def _expect_open(self, call: str, *, is_open: bool) -> None:
        if self._update_open is not is_open:
            state = "an update is open already" if self._update_open else "no update is open; start_weight_update first"
            raise ConfigurationError(f"{call}: {state}", side="worker")


def make_app(host: ModelHost) -> Starlette:
    """The routes of `host`. Errors are answered as vLLM does: `{"error": {"message", "type", "code"}}`."""
    completions, success = host.completions, {"success": True}
    at_once: dict[str, Callable[..., dict[str, Any]]] = {
        "GET /health": lambda: {"status": "ok"},
        "GET /get_world_size": lambda: {"world_size": 1},
        "GET /weight_info": host.weight_info,
        "POST /update_weight_version": host.set_version,
        "GET /load": completions.load,
        "GET /is_paused": completions.is_paused,
        "GET /is_sleeping": completions.is_sleeping,
        "POST /resume": completions.resume,
        # There is nothing to reset: no keys and values are kept.
        **{f"POST /reset_{kind}_cache": lambda: success for kind in ("prefix", "mm", "encoder")},
    }
    on_a_thread: dict[str, Callable[..., dict[str, Any]]] = {
        "POST /v1/completions": completions.complete,
        "POST /init_weight_transfer_engine": host.init,
        "POST /start_weight_update": host.start,
        "POST /update_weights": host.update,
        "POST /finish_weight_update": host.finish,
        "POST /shutdown_weight_transfer_engine": host.shutdown,
        "GET /weight_digest": host.weight_digest,
        "POST /pause": completions.pause,
        "POST /sleep": completions.sleep,
        "POST /wake_up": completions.wake_up,
    }
    # A limit for each route: no completion, and no stuck call, holds up another.
    routes = [_route(key, call, CapacityLimiter(MAX_REQUESTS)) for key, call in on_a_thread.items()]
    return Starlette(routes=[*routes, *(_route(key, call, None) for key, call in at_once.items())])


def _route(key: str, call: Callable[..., dict[str, Any]], limiter: CapacityLimiter | None) -> Route:
    """`call`, with the fields of the request's body, else of its query, that it takes; on a thread if there is a `limiter`."""
    method, path = key.split()
    names = set(inspect.signature(call).parameters)

    async def answer(request: Request) -> JSONResponse:
        try:
            fields: dict[str, Any] = dict(request.query_params)
            if await request.body():
                fields |= await request.json()
            if "tags" in names and "tags" in fields:
                fields["tags"] = request.query_params.getlist("tags")
            taken = fields if "body" in names else {name: value for name, value in fields.items() if name in names}
            reply = await to_thread.run_sync(lambda: call(**taken), limiter=limiter) if limiter else call(**taken)
            return JSONResponse(reply)
        except Exception as exc:
            status = 400 if isinstance(exc, (ValueError, TypeError)) else 500
            logger.exception("%s failed", path)
            error = {"message": str(exc), "type": type(exc).__name__, "code": status}
            return JSONResponse({"error": error}, status_code=status)

    return Route(path, answer, methods=[method])


def main(argv: list[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m wt_worker.serve", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="a Hugging Face checkpoint's folder")
    parser.add_argument("--backend", default="gloo", help="worker backend (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 is any free one (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="torch's name of it; auto is the checkpoint's (%(default)s)")
    parser.add_argument("--device", default="cpu", help="as torch calls it (%(default)s)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).to(args.device)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # out of the checkpoint's file, to which they are mapped
    host = ModelHost(model.requires_grad_(requires_grad=False), args.backend)
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False}
    # uvicorn answers a signal by ending gracefully, then raises it once more: SIGINT ends the process there, as SIGTERM does.
    # With Python's own handler, threads would be waited for, and one that a pause has frozen never ends.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    uvicorn.run(make_app(host), host=args.host, port=args.port, timeout_graceful_shutdown=1, **quiet)


if __name__ == "__main__":
    main()
