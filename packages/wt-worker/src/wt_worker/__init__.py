"""The inference worker's side of weight transfer. Never imports a trainer framework; vLLM only inside `wt_worker.vllm`.

Importing this is cheap: no CUDA initialisation, no vLLM, no backend, no change to the environment.
"""

from wt_common import (
    WeightTransferError,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from wt_worker.engine import WeightTransferConfig, WeightTransferEngine
from wt_worker.factory import WeightTransferEngineFactory

__all__ = [
    "WeightTransferConfig",
    "WeightTransferEngine",
    "WeightTransferEngineFactory",
    "WeightTransferError",
    "WeightTransferInitInfo",
    "WeightTransferInitRequest",
    "WeightTransferUpdateInfo",
    "WeightTransferUpdateRequest",
]
