"""Two trainer ranks over gloo, each with a ModuleSource of DTensors; what they find goes to `rank<n>.json`."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from wt_common import ConfigurationError
from wt_trainer import ModuleSource

RANKS = 2


def module_of_dtensors(rank):
    """A module with one parameter per kind of layout, all of the same value."""
    mesh = init_device_mesh("cpu", (RANKS,))
    mesh_2d = init_device_mesh("cpu", (1, RANKS))
    last = DeviceMesh("cpu", [RANKS - 1])
    slices = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "tp"))
    full = torch.arange(15.0).reshape(5, 3)
    piece = full.tensor_split(RANKS)[rank]
    tensors = {
        "plain": full.clone(),
        "rows": distribute_tensor(full, mesh, [Shard(0)]),
        "columns": distribute_tensor(full, mesh, [Shard(-1)]),
        "replicated": distribute_tensor(full, mesh, [Replicate()]),
        "both": distribute_tensor(full, mesh_2d, [Replicate(), Shard(0)]),
        "partial": DTensor.from_local(full / RANKS, mesh, [Partial()]),
        "strided": DTensor.from_local(
            piece, mesh, [_StridedShard(0, split_factor=1)], shape=full.shape, stride=full.stride()
        ),
        "last": distribute_tensor(full, last, [Shard(0)]),
        "slice": distribute_tensor(full, slices["tp"], [Shard(0)]),
        "outer slice": distribute_tensor(full, slices["dp"], [Shard(0)]),
    }
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(tensor))
    return module


def values_of(iterator):
    return {name: [type(tensor).__name__, tensor.requires_grad, tensor.tolist()] for name, tensor in iterator}


def mismatch_of(source, rank):
    """The error of asking for another rank than the default group's."""
    try:
        source.owned_names(rank + 1)
    except ConfigurationError as exc:
        return str(exc)
    return None


def main(directory):
    rank = int(os.fork() == 0)  # forked, since importing torch takes longest
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", RANKS), rank=rank, world_size=RANKS)
    source = ModuleSource(module_of_dtensors(rank))
    found = {
        "metadata": [
            [meta.name, str(meta.dtype), meta.shape, meta.owners, meta.mesh_shape, repr(meta.placements)]
            for meta in source.metadata
        ],
        "owned": source.owned_names(rank),
        "full": values_of(source.iter_full()),
        "local": values_of(source.iter_local()),
        "mismatch": mismatch_of(source, rank),
    }
    Path(directory, f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    if rank:
        os._exit(0)
    if os.wait()[1]:
        sys.exit("the other rank failed")


if __name__ == "__main__":
    main(sys.argv[1])
