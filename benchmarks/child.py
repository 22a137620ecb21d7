"""Measures on the worker's side: its package is installed in an environment of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from harness import worker_environment, worker_python

HERE = Path(__file__).parent


def ask_worker(name: str) -> dict[str, Any]:
    """What `worker_side.py` has measured as `name`, in a process of the worker's environment."""
    command = [worker_python(), str(HERE / "worker_side.py"), name]
    result = subprocess.run(command, env=worker_environment(), stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(result.stdout.splitlines()[-1]))
