"""Clients: how the sender's control calls reach the inference engines."""

from wt_trainer.client.http import HTTPVLLMWeightSyncClient
from wt_trainer.client.protocol import PauseMode, ServingControl, VLLMWeightSyncClient
from wt_trainer.client.ray import RayVLLMWeightSyncClient

__all__ = ["HTTPVLLMWeightSyncClient", "PauseMode", "RayVLLMWeightSyncClient", "ServingControl", "VLLMWeightSyncClient"]
