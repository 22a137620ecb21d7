"""Names that are not the checkpoint's: wrappers put prefixes in front, and transformers 5 keeps experts fused.

python renamed.py --model DIR --server http://127.0.0.1:8000 --out TRAINED
"""

import argparse
import re
from collections.abc import Iterable

import torch
from transformers import AutoModelForCausalLM

from wt_trainer import (
    GlooTrainerInitInfo,
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    RenamedSource,
    WeightTransferTrainerFactory,
)

PREFIXES = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
FUSED_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


def checkpoint_name(name: str, tensor: torch.Tensor) -> str | Iterable[tuple[str, torch.Tensor]]:
    """The name without wrappers (torch.compile, DDP, FSDP1, activation checkpointing); fused experts one by one."""
    name = PREFIXES.sub("", name)
    fused = FUSED_EXPERTS.fullmatch(name)
    return name if fused is None else split_experts(*fused.groups(), tensor)


def split_experts(experts: str, projection: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """What a checkpoint has per expert, of transformers' [experts, ...] parameter: gate and up lie behind each other."""
    for index, expert in enumerate(tensor):
        if projection == "down_proj":
            yield f"{experts}.{index}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{experts}.{index}.gate_proj.weight", gate
            yield f"{experts}.{index}.up_proj.weight", up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint that the server has started with")
    parser.add_argument("--server", required=True, help="its URL")
    parser.add_argument("--out", required=True, help="where the trained model is saved")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    # Compiled layers and a compiled whole: every name has `_orig_mod.` in it, some twice.
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")
    compiled = torch.compile(model, backend="eager")
    assert "_orig_mod" in next(name for name, _ in compiled.named_parameters())

    trainer = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient(args.server),
        source=RenamedSource(ModuleSource(compiled), checkpoint_name),
    )
    with torch.no_grad():
        for param in compiled.parameters():  # in place of training
            param.mul_(1.05)
    report = trainer.send_weights(weight_version="renamed")
    print(report)
    print(f"tied, and so sent under another name: {report.aliases}")
    trainer.shutdown()
    state = {PREFIXES.sub("", name): tensor for name, tensor in model.state_dict().items()}
    model.save_pretrained(args.out, state_dict=state)


if __name__ == "__main__":
    main()
