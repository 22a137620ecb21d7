"""A vLLM worker extension for tests: a call that every rank answers with its own name."""

from __future__ import annotations

from typing import Any


class EchoExtension:
    """Mixed into vLLM's worker class by `--worker-extension-cls`."""

    def echo_rank(self, value: Any) -> str:
        return f"{value} from rank {self.rank}"
