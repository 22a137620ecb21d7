"""Trainer and server on one device, in turn: what sleeps when, and in which order it wakes up.

    python colocated.py --model DIR --server http://127.0.0.1:8000 --out TRAINED

On a GPU the server is `vllm serve --enable-sleep-mode` and the two share its memory; here both are on the CPU, and the order is
the same. Weights must be awake before they are sent, and the key-value cache should come after, when the trainer's own memory
(gradients, gathered parameters) is free again.
"""

import argparse

import requests
import torch
from transformers import AutoModelForCausalLM

from wt_trainer import GlooTrainerInitInfo, HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory


def post(url: str, **params: str) -> None:
    requests.post(url, params=params, timeout=60).raise_for_status()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint that the server has started with")
    parser.add_argument("--server", required=True, help="its URL")
    parser.add_argument("--out", required=True, help="where the trained model is saved")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo(rank=0), client=HTTPVLLMWeightSyncClient(args.server), source=ModuleSource(model)
    )
    for step in range(2):
        # 1. The server has generated, and gives up its memory. Level 2 drops the weights: new ones will come.
        post(f"{args.server}/sleep", level="2")
        # 2. The trainer has the device.
        batch = torch.randint(model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        # 3. The trainer gives up what it does not send.
        optimizer.zero_grad(set_to_none=True)
        # 4. Memory for the weights, then the weights. Before 4 a send is refused: "asleep".
        post(f"{args.server}/wake_up", tags="weights")
        print(trainer.send_weights(weight_version=f"step-{step}"))
        # 5. The rest; from here on the server generates.
        post(f"{args.server}/wake_up", tags="kv_cache")
    trainer.shutdown()
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
