"""The trainer's side of weight transfer: sources, clients and engines. Never imports vLLM.

Importing this is cheap: no CUDA initialisation, no `requests`, no DTensor, no backend, no change to the environment.
"""

from wt_common import Outcome, WeightTransferError
from wt_trainer.client import HTTPVLLMWeightSyncClient, RayVLLMWeightSyncClient, VLLMWeightSyncClient
from wt_trainer.engine import TrainerInitInfo, TrainerWeightTransferEngine
from wt_trainer.factory import WeightTransferTrainerFactory
from wt_trainer.init_infos import GlooTrainerInitInfo, NCCLTrainerInitInfo
from wt_trainer.report import TransferReport, WorkerReport
from wt_trainer.source import (
    ModuleSource,
    ParamMeta,
    RenamedSource,
    Replicate,
    Shard,
    WeightSource,
    materialize_full_tensor,
)

__all__ = [
    "GlooTrainerInitInfo",
    "HTTPVLLMWeightSyncClient",
    "ModuleSource",
    "NCCLTrainerInitInfo",
    "Outcome",
    "ParamMeta",
    "RayVLLMWeightSyncClient",
    "RenamedSource",
    "Replicate",
    "Shard",
    "TrainerInitInfo",
    "TrainerWeightTransferEngine",
    "TransferReport",
    "VLLMWeightSyncClient",
    "WeightSource",
    "WeightTransferError",
    "WeightTransferTrainerFactory",
    "WorkerReport",
    "materialize_full_tensor",
]
