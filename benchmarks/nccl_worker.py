"""A real vLLM in a process of its own, for `nccl_dense`; and the other end of a bare broadcast on the same GPU.

python nccl_worker.py vllm '{"port_file": ..., "model": DIR, "backend": "wt_nccl", ...}'
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "integration_tests"))

from lines import serve_lines
from worker_host import VLLMHost


class BenchHost(VLLMHost):
    """Four documented calls, and a bare broadcast."""

    def raw_join(self, unique_id: str, num_bytes: int) -> None:
        import torch
        from nccl import core

        self.flat = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self.communicator = core.Communicator.init(2, 1, core.UniqueId.from_bytes(bytes.fromhex(unique_id)))

    def raw_receive(self) -> None:
        import torch

        self.communicator.broadcast(self.flat, self.flat, 0, stream=torch.cuda.current_stream())
        torch.cuda.synchronize()

    def reset_peak(self) -> int:
        """What is allocated now; the peak is measured from here on."""
        import torch

        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated()


def main() -> None:
    config: dict[str, Any] = json.loads(sys.argv[2])
    serve_lines(BenchHost(config), config["port_file"])


if __name__ == "__main__":
    main()
