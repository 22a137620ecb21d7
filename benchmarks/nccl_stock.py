"""The trainer's side of vLLM's own `nccl` backend, packed, for `nccl_dense`. It needs all of vLLM, so it is a process of its own.

python nccl_stock.py trainer '{"port_file": ..., "worker_port": ..., "shapes": {name: shape}}'
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "integration_tests"))

import torch
from harness import free_port
from lines import LineClient, serve_lines


class StockTrainer:
    """One rank, whose tensors are on its GPU."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.tensors = {
            name: torch.randn(shape, dtype=torch.bfloat16, device="cuda") for name, shape in config["shapes"].items()
        }
        self.client = LineClient(config["worker_port"])
        self.beside = ThreadPoolExecutor(1)
        self.update_info = {
            "names": list(self.tensors),
            "dtype_names": ["bfloat16"] * len(self.tensors),
            "shapes": [list(tensor.shape) for tensor in self.tensors.values()],
            "packed": True,
        }

    def init(self) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self.engine = NCCLWeightTransferEngine
        where = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
        joining = self.beside.submit(self.client.init_weight_transfer_engine, {**where, "rank_offset": 1})
        self.group = self.engine.trainer_init(where)
        joining.result()

    def send(self) -> float:
        """Seconds of a whole round."""
        started = time.perf_counter()
        self.client.start_weight_update()
        updating = self.beside.submit(self.client.update_weights, self.update_info)
        self.engine.trainer_send_weights(iter(self.tensors.items()), {"group": self.group, "packed": True})
        updating.result()
        self.client.finish_weight_update()
        torch.cuda.synchronize()
        return time.perf_counter() - started


def main() -> None:
    config = json.loads(sys.argv[2])
    serve_lines(StockTrainer(config), config["port_file"])


if __name__ == "__main__":
    main()
