"""Pipeline parallelism: every stage holds, and sends, its own layers. Run with torchrun, a server listening:

    torchrun --nproc-per-node 2 pipeline.py --model DIR --server http://127.0.0.1:8000 --out TRAINED

No rank gathers what another one has: each is a data sender of what it owns, and rank 0 drives the servers.
"""

import argparse
from collections.abc import Iterator
from functools import cached_property

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from wt_trainer import (
    GlooTrainerInitInfo,
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)


class StageSource(WeightSource):
    """One pipeline stage of a model. `stages` maps every checkpoint name to the rank of its stage, the same on all ranks."""

    yields_stable = True  # these are the stage's own parameters, and nobody trains while they are sent: no copy

    def __init__(self, stage: torch.nn.ParameterDict, shapes: dict[str, torch.Tensor], stages: dict[str, int]) -> None:
        self.stage = stage
        self.shapes = shapes  # of the whole model, as tensors on the meta device
        self.stages = stages

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, shape.dtype, tuple(shape.shape), owners=(self.stages[name],))
            for name, shape in self.shapes.items()
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.owned_names(dist.get_rank()):
            yield name, self.stage[name.replace(".", "/")].detach()


def stage_of(name: str, num_layers: int, num_stages: int) -> int:
    """The embedding is on the first stage, the head on the last, layers in equal parts on all."""
    parts = name.split(".")
    if "layers" in parts:
        return int(parts[parts.index("layers") + 1]) * num_stages // num_layers
    return 0 if "embed_tokens" in name else num_stages - 1


def load_stage(model: PreTrainedModel, stages: dict[str, int], rank: int) -> torch.nn.ParameterDict:
    """This rank's own parameters; a dot is no part of a ParameterDict's key."""
    own = {name: param for name, param in model.named_parameters() if stages[name] == rank}
    return torch.nn.ParameterDict({name.replace(".", "/"): param for name, param in own.items()})


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
    num_layers = model.config.num_hidden_layers
    stages = {name: stage_of(name, num_layers, num_stages) for name, _ in model.named_parameters()}
    shapes = {name: param.detach().to("meta") for name, param in model.named_parameters()}
    stage = load_stage(model, stages, rank)

    trainer = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo(rank=rank),
        client=HTTPVLLMWeightSyncClient(args.server),
        source=StageSource(stage, shapes, stages),
    )
    for step in range(2):
        with torch.no_grad():  # in place of a step of pipelined training: each stage changes its own parameters
            for param in stage.values():
                param.mul_(1.05)
        report = trainer.send_weights(weight_version=f"step-{step}")
        if rank == 0:
            print(report)
    trainer.shutdown()

    stages_of_all = [None] * num_stages
    dist.all_gather_object(stages_of_all, dict(stage.items()))
    if rank == 0:
        whole = {name.replace("/", "."): param for part in stages_of_all for name, param in part.items()}
        model.save_pretrained(args.out, state_dict=whole)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
