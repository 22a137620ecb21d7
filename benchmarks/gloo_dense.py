"""1 GB in bfloat16 to the embedded server: `send_weights()` whole, against gloo alone moving the same bytes in the same chunks.

Without digests first (`verify="off"`), then with them, which is the default (`gloo_dense_verified`). Beside it, as
`gloo_dense_flat`, against one flat broadcast; and `gloo_dense_copied`, a source that does not vouch for its tensors, so that they
are copied, against one that does. Both references receive into memory that has been touched, and do nothing else: no
control plane, no check, no second copy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from gloo_reference import Reference
from harness import EmbeddedServer, worker_python
from measure import in_turn, line
from transformers import LlamaConfig, LlamaForCausalLM

from wt_trainer import GlooTrainerInitInfo, HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory

RUNS = 7
CHUNK_BYTES = 64 << 20  # the default of `packed_buffer_size_bytes`
SHAPE = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "head_dim": 128}


class Unvouched(ModuleSource):
    """The same tensors; nobody says that they stay as they are."""

    yields_stable = False


def measure() -> Iterator[str]:
    torch.set_num_threads(1)  # the other core is the receiver's
    config = LlamaConfig(**SHAPE, num_attention_heads=16, num_key_value_heads=8, dtype="bfloat16")
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        with EmbeddedServer(Path(directory), Path(directory)) as server:
            server.wait_ready()
            client = HTTPVLLMWeightSyncClient(server.base_url, timeout=120)
            num_bytes = sum(parameter.nbytes for parameter in model.parameters())
            with Reference(worker_python(), num_bytes, Path(directory)) as reference:
                for name, verify in (("gloo_dense", "off"), ("gloo_dense_verified", "full")):
                    info = GlooTrainerInitInfo(rank=0, timeout_s=120, verify=verify, num_trainer_ranks=1)
                    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
                    unvouched = Unvouched(model)
                    ours_ms, copied_ms, chunks_ms, flat_ms = in_turn(
                        trainer.send_weights,
                        lambda trainer=trainer, source=unvouched: trainer.send_weights(source=source),
                        lambda: reference.move(CHUNK_BYTES),
                        lambda: reference.move(num_bytes),
                        runs=RUNS,
                    )
                    trainer.shutdown()
                    yield line(name, ours_ms=ours_ms, reference_ms=chunks_ms, num_bytes=num_bytes, runs=RUNS)
                    copied = name.replace("dense", "dense_copied")
                    yield line(copied, ours_ms=copied_ms, reference_ms=ours_ms, num_bytes=num_bytes, runs=RUNS)
                    if verify == "off":
                        flat = {"ours_ms": ours_ms, "reference_ms": flat_ms, "num_bytes": num_bytes, "runs": RUNS}
                        yield line("gloo_dense_flat", **flat)
