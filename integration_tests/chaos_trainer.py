"""A trainer rank that `chaos.py` can disturb: its source fails or stalls where it is told to, and SIGINT interrupts a call.

python chaos_trainer.py '{"port_file": ...}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

from hosting import serve
from trainer_host import TensorSource, Trainer

from wt_trainer import WeightSource


class Disturbed(WeightSource):
    """Another source, at one place of which something happens: `raise`, `end` or `stall`."""

    def __init__(self, inner: WeightSource) -> None:
        self.inner = inner
        self.pause_s = 0.0
        self.fault: tuple[str, int, float] | None = None

    @property
    def yields_stable(self) -> bool:
        """What the other source says."""
        return self.inner.yields_stable

    @cached_property
    def metadata(self) -> Any:
        return self.inner.metadata

    def iter_full(self):
        for index, item in enumerate(self.inner.iter_full()):
            time.sleep(self.pause_s)
            if self.fault is not None and self.fault[1] == index:
                what, _, seconds = self.fault
                if what == "raise":
                    raise ArithmeticError(f"the source failed at {item[0]}")
                if what == "end":
                    return
                time.sleep(seconds)
            yield item


class ChaosTrainer(Trainer):
    """`Trainer`, whose calls say what they ended with, whatever that is, and when."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._may_interrupt = False
        signal.signal(signal.SIGINT, self._on_interrupt)

    def configure(self, config: dict[str, Any]) -> None:
        super().configure(config)
        self.source = Disturbed(self.source)

    def disturb(self, pause_s: float, fault: tuple[str, int, float] | None) -> None:
        """From now on, a pause before each parameter, and perhaps a fault."""
        self.source.pause_s = pause_s
        self.source.fault = None if fault is None else tuple(fault)  # from JSON

    def try_init(self, **options: Any) -> dict[str, Any]:
        """An init, as `try_send` reports it."""
        return self._ended(lambda: self.init(**options))

    def try_send(self, weight_version: str, names: list[str] | None = None) -> dict[str, Any]:
        """A round, of some parameters only if `names` says so: its report, error or interrupt, and when it began and ended."""
        if names is None:
            return self._ended(lambda: self.engine.send_weights(weight_version=weight_version).to_dict())
        part = TensorSource({name: tensor for name, tensor in self.source.inner if name in names}, self.rank)
        return self._ended(lambda: self.engine.send_weights(weight_version=weight_version, source=part).to_dict())

    def _ended(self, call: Callable[[], Any]) -> dict[str, Any]:
        started = time.monotonic()
        result: dict[str, Any]
        try:
            try:
                self._may_interrupt = True
                result = {"report": call()}
            finally:
                self._may_interrupt = False
        except KeyboardInterrupt as exc:
            self._may_interrupt = False
            result = {"interrupted": True, "notes": getattr(exc, "__notes__", [])}
        except Exception as exc:
            attributes = exc.attributes() if hasattr(exc, "attributes") else {}
            error = {"type": type(exc).__name__, "message": getattr(exc, "message", str(exc)), **attributes}
            error["kinds"] = [each.__name__ for each in type(exc).__mro__]
            result = {"error": error, "notes": getattr(exc, "__notes__", [])}
        return {**result, "started": started, "ended": time.monotonic()}

    def _on_interrupt(self, *_: Any) -> None:
        if self._may_interrupt:
            raise KeyboardInterrupt


def main() -> None:
    config = json.loads(sys.argv[1])
    serve(ChaosTrainer(config), config["port_file"])
    os._exit(0)


if __name__ == "__main__":
    main()
