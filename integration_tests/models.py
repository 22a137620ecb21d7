"""Tiny checkpoints: a server starts with one in seconds, and no parameter is without effect.

Every parameter is random, norms and biases too, and large enough that a server which lacks the new
value of any single one shows it in the log-probabilities of a prompt. All is float32, so that vLLM
and transformers agree to about 1e-5 there and exactly in greedy tokens.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

__all__ = [
    "KINDS",
    "build_model",
    "checkpoint_items",
    "greedy",
    "prompt_logprobs",
    "save_checkpoint",
]

_NUM_TOKENS = 300  # no multiple of 64, to which vLLM pads the vocabulary
_BOS, _EOS = 256, 257  # after the 256 bytes

_SHAPE: dict[str, Any] = {
    "vocab_size": _NUM_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's CPU attention takes
    "max_position_embeddings": 256,
    "bos_token_id": _BOS,
    "eos_token_id": _EOS,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "attn_implementation": "eager",
}

_KINDS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SHAPE)),
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**_SHAPE | {"tie_word_embeddings": True})),
    # vLLM takes the size of a qwen2 head from these two, whatever head_dim says.
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_SHAPE | {"hidden_size": 128})),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**_SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True),
    ),
}

KINDS: tuple[str, ...] = tuple(_KINDS)
"""Plain; output head tied to the embedding; biases in attention; experts and norms of q and k."""


def build_model(kind: str, seed: int) -> PreTrainedModel:
    """A model of `kind` in float32 on the CPU, in which every parameter depends on `seed`."""
    model_class, config = _KINDS[kind]
    model: PreTrainedModel = model_class(config)
    model.train(mode=False).requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(".bias"):
            parameter.copy_(0.3 * noise)
        elif "norm" in name:
            parameter.copy_(1 + 0.3 * noise.clamp(-2, 2))
        elif "embed_tokens" in name:
            parameter.copy_(0.25 * noise)  # so that a tied head gives logits around 2
        elif "lm_head" in name:
            parameter.copy_(2 * noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    return model


def save_checkpoint(kind: str, seed: int, directory: Path | str) -> None:
    """`directory` holds config, weights and tokenizer: what a server is started with."""
    build_model(kind, seed).save_pretrained(directory)
    _build_tokenizer().save_pretrained(directory)


def checkpoint_items(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors as a checkpoint on disk has them, tied ones once; the tensors are views.

    transformers 5 keeps the experts of a layer in two fused parameters and writes one set of three
    per expert; the latter is what vLLM loads.
    """
    items: list[tuple[str, torch.Tensor]] = []
    for name, parameter in model.named_parameters():  # which has tied ones once
        tensor = parameter.detach()
        fused = re.fullmatch(r"(.+\.experts)\.(gate_up_proj|down_proj)", name)
        if fused is None:
            items.append((name, tensor))
            continue
        experts, projection = fused.groups()
        for index, expert in enumerate(tensor):
            if projection == "down_proj":
                items.append((f"{experts}.{index}.down_proj.weight", expert))
            else:
                gate, up = expert.chunk(2)
                items.append((f"{experts}.{index}.gate_proj.weight", gate))
                items.append((f"{experts}.{index}.up_proj.weight", up))
    return items


@torch.no_grad()
def prompt_logprobs(model: PreTrainedModel, token_ids: list[int]) -> list[float]:
    """The log-probability of each token of the prompt but the first."""
    logprobs = model(torch.tensor([token_ids])).logits[0].double().log_softmax(dim=-1)
    return [logprobs[at, token].item() for at, token in enumerate(token_ids[1:])]


@torch.no_grad()
def greedy(model: PreTrainedModel, token_ids: list[int], num_tokens: int) -> list[int]:
    """The `num_tokens` most likely next tokens; the end-of-text token does not end them."""
    ids = list(token_ids)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(token_ids) :]


def _build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, then the special ones, then unused ones up to the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    vocabulary |= {"<s>": _BOS, "</s>": _EOS}
    vocabulary |= {f"<unused{index}>": index for index in range(_EOS + 1, _NUM_TOKENS)}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers'
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
