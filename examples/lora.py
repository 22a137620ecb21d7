"""LoRA with PEFT: only adapters are trained, and the server, which knows nothing of them, gets merged weights.

python lora.py --model DIR --server http://127.0.0.1:8000 --out TRAINED
"""

import argparse
from collections.abc import Iterator
from functools import cached_property

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from wt_trainer import (
    GlooTrainerInitInfo,
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)


class MergedLoraSource(WeightSource):
    """The base model's parameters under their own names, each with its adapter added on the way out.

    The model itself is never merged: training goes on with adapters, and rounding does not add up over the steps.
    """

    # A source that merged in place, and took that back after the `yield`, would leave this False: its tensors are then copied.
    yields_stable = True

    def __init__(self, model: PeftModel, adapter: str = "default") -> None:
        self._base = model.get_base_model()
        self._adapter = adapter

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, param.dtype, tuple(param.shape)) for name, param, _ in self._parameters()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            for name, param, layer in self._parameters():
                yield name, param if layer is None else param + layer.get_delta_weight(self._adapter)

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor, LoraLayer | None]]:
        """(checkpoint name, base parameter, its LoRA layer); PEFT wraps a layer, and keeps what it wraps as `base_layer`."""
        modules = dict(self._base.named_modules())
        for name, param in self._base.named_parameters():
            path, _, leaf = name.rpartition(".")
            if ".lora_" in name:
                continue
            parent = path.removesuffix(".base_layer")
            is_adapted = parent != path and leaf == "weight"
            yield f"{parent}.{leaf}", param.detach(), modules[parent] if is_adapted else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint that the server has started with")
    parser.add_argument("--server", required=True, help="its URL")
    parser.add_argument("--out", required=True, help="where the merged model is saved")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(args.model), config)
    optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-2)

    trainer = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient(args.server),
        source=MergedLoraSource(model),
    )
    for step in range(2):
        batch = torch.randint(model.config.vocab_size, (2, 16))
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(trainer.send_weights(weight_version=f"step-{step}"))
    trainer.shutdown()
    model.merge_and_unload().save_pretrained(args.out)


if __name__ == "__main__":
    main()
