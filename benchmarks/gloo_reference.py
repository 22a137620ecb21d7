"""gloo alone, between two processes: what `gloo_dense` is compared with. The receiver runs this file, with torch only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist


class Reference:
    """gloo's own broadcast between this process and another one, which receives into one buffer.

    Args:
        python: the other's interpreter.
        num_bytes: to move each time.
        directory: for the file over which the two meet.
    """

    def __init__(self, python: str, num_bytes: int, directory: Path) -> None:
        store = directory / "reference-store"
        self.buffer = torch.ones(num_bytes, dtype=torch.uint8)
        self.receiver = subprocess.Popen(
            [python, __file__, str(store), str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=0, world_size=2)

    def move(self, chunk_bytes: int) -> None:
        """All bytes are in the receiver's buffer."""
        self.receiver.stdin.write(f"{chunk_bytes}\n")
        self.receiver.stdin.flush()
        broadcast(self.buffer, chunk_bytes)
        assert self.receiver.stdout.readline() == "done\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        dist.destroy_process_group()
        self.receiver.stdin.close()
        self.receiver.kill()
        self.receiver.wait()


def broadcast(buffer: torch.Tensor, chunk_bytes: int) -> None:
    for piece in buffer.split(chunk_bytes):
        dist.broadcast(piece, 0)


def receive(store: str, num_bytes: int) -> None:
    """The other end: moves once for each line on stdin, which is the size of a chunk."""
    torch.set_num_threads(1)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=1, world_size=2)
    for chunk_bytes in sys.stdin:
        broadcast(buffer, int(chunk_bytes))
        print("done", flush=True)


if __name__ == "__main__":
    receive(sys.argv[1], int(sys.argv[2]))
