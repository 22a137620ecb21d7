"""FSDP2: two ranks train sharded weights, and the server gets them whole. Run with torchrun, a server listening:

torchrun --nproc-per-node 2 fsdp2.py --model DIR --server http://127.0.0.1:8000 --out TRAINED
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from wt_trainer import GlooTrainerInitInfo, HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint that the server has started with")
    parser.add_argument("--server", required=True, help="its URL")
    parser.add_argument("--out", required=True, help="where the trained model is saved")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    model = AutoModelForCausalLM.from_pretrained(args.model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # Every rank makes the same calls. The default group tells the ranks where rank 0 listens.
    trainer = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo(rank=dist.get_rank()),
        client=HTTPVLLMWeightSyncClient(args.server),
        source=ModuleSource(model),  # gathers one parameter after the other, never the whole model
    )
    for step in range(2):
        batch = torch.randint(model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = trainer.send_weights(weight_version=f"step-{step}")
        if dist.get_rank() == 0:
            print(report)
    trainer.shutdown()

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        model.save_pretrained(args.out, state_dict=whole)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
