"""What wt-trainer and wt-worker must agree on: wire dataclasses, rules and errors. Standard library only."""

from wt_common.errors import (
    AgreementError,
    BackendUnavailableError,
    ConfigurationError,
    FailureCode,
    IntegrityError,
    Outcome,
    PeerLostError,
    Phase,
    PlanError,
    PoisonedError,
    RoundTimeoutError,
    Side,
    SourceModeError,
    StaleSessionError,
    TransportError,
    WeightTransferError,
)
from wt_common.info import (
    MAX_TIMEOUT_S,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from wt_common.schema import SCHEMA
from wt_common.sharding import shard_bounds

__all__ = [
    "MAX_TIMEOUT_S",
    "SCHEMA",
    "AgreementError",
    "BackendUnavailableError",
    "ConfigurationError",
    "FailureCode",
    "IntegrityError",
    "Outcome",
    "PeerLostError",
    "Phase",
    "PlanError",
    "PoisonedError",
    "RoundTimeoutError",
    "Side",
    "SourceModeError",
    "StaleSessionError",
    "TransportError",
    "WeightTransferError",
    "WeightTransferInitInfo",
    "WeightTransferInitRequest",
    "WeightTransferUpdateInfo",
    "WeightTransferUpdateRequest",
    "shard_bounds",
]
