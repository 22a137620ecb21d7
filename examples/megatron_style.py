"""A Megatron-style model: per-stage names, fused and interleaved weights, a padded vocabulary. Run with torchrun:

    torchrun --nproc-per-node 2 megatron_style.py --model DIR --server http://127.0.0.1:8000 --out TRAINED

What is here stands for Megatron-Core, which is not installed: its names, and how it lays out a Llama's weights in memory.
"""

import argparse
from collections.abc import Iterator
from functools import cached_property

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from wt_trainer import (
    GlooTrainerInitInfo,
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)

VOCABULARY_MULTIPLE = 128  # Megatron's make_vocab_size_divisible_by

# Megatron's name in a layer, and the checkpoint's names of what it holds, in order.
LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": ["input_layernorm.weight"],
    "self_attention.linear_qkv.weight": [f"self_attn.{which}_proj.weight" for which in "qkv"],
    "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"],
    "mlp.linear_fc1.layer_norm_weight": ["post_attention_layernorm.weight"],
    "mlp.linear_fc1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.linear_fc2.weight": ["mlp.down_proj.weight"],
}
OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


class MegatronStageSource(WeightSource):
    """One stage's parameters, under the checkpoint's names and in its layout.

    Args:
        stage: this rank's parameters by Megatron's names, in which layers count from 0 on every stage.
        first_layer: what its layer 0 is called in the whole model.
        config: of the whole model.
    """

    yields_stable = (
        True  # views of the stage's parameters, or made from them: nobody writes to either while they are sent
    )

    def __init__(self, stage: dict[str, torch.Tensor], first_layer: int, config: LlamaConfig) -> None:
        self.stage = stage
        self.first_layer = first_layer
        self.config = config

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Every stage's, one after the other: a rank knows only its own, so they tell each other, once."""
        own = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.iter_full()]
        stages = [None] * dist.get_world_size()
        dist.all_gather_object(stages, own)
        return [ParamMeta(*entry, owners=(rank,)) for rank, entries in enumerate(stages) for entry in entries]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.stage.items():
            yield from self._export(name, tensor.detach())

    def _export(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's parameters that `tensor` holds."""
        if name in OUTSIDE:
            is_padded = "embed" in name or "output" in name
            yield OUTSIDE[name], tensor[: self.config.vocab_size] if is_padded else tensor
            return
        _, _, layer, within = name.split(".", 3)
        if within == "self_attention.linear_qkv.weight":
            parts = split_qkv(tensor, self.config)
        else:
            parts = tensor.chunk(len(LAYER[within]))
        for leaf, part in zip(LAYER[within], parts, strict=True):
            yield f"model.layers.{self.first_layer + int(layer)}.{leaf}", part


def split_qkv(fused: torch.Tensor, config: LlamaConfig) -> list[torch.Tensor]:
    """q, k and v of Megatron's fused weight, whose rows are by group: the group's queries, its key, its value."""
    groups, size = config.num_key_value_heads, config.head_dim
    queries = config.num_attention_heads // groups * size
    by_group = fused.reshape(groups, queries + 2 * size, -1)
    return [part.reshape(-1, fused.shape[-1]) for part in by_group.split([queries, size, size], dim=1)]


def fuse_qkv(parts: list[torch.Tensor], config: LlamaConfig) -> torch.Tensor:
    """The inverse of `split_qkv`."""
    by_group = [part.reshape(config.num_key_value_heads, -1, part.shape[-1]) for part in parts]
    return torch.cat(by_group, dim=1).reshape(-1, parts[0].shape[-1])


def import_stage(
    checkpoint: dict[str, torch.Tensor], config: LlamaConfig, rank: int, num_stages: int
) -> dict[str, torch.Tensor]:
    """What Megatron's own converter makes of a checkpoint, for one stage."""
    padding = -config.vocab_size % VOCABULARY_MULTIPLE
    per_stage = config.num_hidden_layers // num_stages
    stage = {}
    for name, source in OUTSIDE.items():
        if rank == (0 if "embed" in name else num_stages - 1):
            rows = 0 if "norm" in name else padding
            stage[name] = torch.cat([checkpoint[source], torch.zeros(rows, *checkpoint[source].shape[1:])])
    for local in range(per_stage):
        prefix = f"model.layers.{rank * per_stage + local}."
        for within, leaves in LAYER.items():
            parts = [checkpoint[prefix + leaf] for leaf in leaves]
            stage[f"decoder.layers.{local}.{within}"] = fuse_qkv(parts, config) if len(parts) == 3 else torch.cat(parts)
    return stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint that the server has started with")
    parser.add_argument("--server", required=True, help="its URL")
    parser.add_argument("--out", required=True, help="where the trained model is saved")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    stage = import_stage(model.state_dict(), model.config, rank, num_stages)
    source = MegatronStageSource(stage, rank * model.config.num_hidden_layers // num_stages, model.config)

    trainer = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo(rank=rank), client=HTTPVLLMWeightSyncClient(args.server), source=source
    )
    for step in range(2):
        for tensor in stage.values():
            tensor.mul_(1.05)  # in place of training
        report = trainer.send_weights(weight_version=f"step-{step}")
        if rank == 0:
            print(report)
    trainer.shutdown()

    stages = [None] * num_stages
    dist.all_gather_object(stages, list(source.iter_full()))
    if rank == 0:
        model.save_pretrained(
            args.out, state_dict={name: tensor.contiguous() for part in stages for name, tensor in part}
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
