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
from torch.overrides import TorchFunctionMode
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

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

_HEADLESS: dict[str, Any] = {
    "vocab_size": _NUM_TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "bos_token_id": _BOS,
    "eos_token_id": _EOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "attn_implementation": "eager",
}
_SHAPE: dict[str, Any] = _HEADLESS | {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's CPU attention takes
    "max_position_embeddings": 256,
}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_WIDE: dict[str, Any] = {"hidden_size": 128}  # where the size of a head is hidden_size / num_attention_heads
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}

_YARN: dict[str, Any] = {  # vLLM takes no other for gpt-oss
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}

_KINDS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SHAPE)),
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**_SHAPE | _TIED)),
    "llama-oddvocab": (LlamaForCausalLM, LlamaConfig(**_SHAPE | {"vocab_size": 301})),
    # vLLM takes the size of a qwen2 head from these two, whatever head_dim says.
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_SHAPE | _WIDE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SHAPE | _TIED)),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**_SHAPE, **_EXPERTS, num_experts=4, moe_intermediate_size=48, norm_topk_prob=True),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**_SHAPE, **_EXPERTS, num_local_experts=4)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **_SHAPE | _TIED,
            query_pre_attn_scalar=32,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config(**_SHAPE | _WIDE)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(**_HEADLESS | _TIED, n_head=2, n_inner=96, n_positions=256)),
    "falcon": (
        FalconForCausalLM,
        FalconConfig(**_HEADLESS | _WIDE, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True),
    ),
    # vLLM's CPU kernel for these experts takes multiples of 32 on each rank.
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **_SHAPE | {"intermediate_size": 64},
            **_EXPERTS,
            num_local_experts=4,
            sliding_window=8,
            rope_parameters=_YARN,
        ),
    ),
    # vLLM's CPU kernels for latent attention take these two sizes alone.
    "deepseek-v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(
            **_SHAPE | {"num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            q_lora_rank=None,
            qk_nope_head_dim=128,
            v_head_dim=128,
            first_k_dense_replace=1,
            n_routed_experts=4,
            num_experts_per_tok=3,  # with 2, some seeds leave an expert without any token of a short prompt
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=48,
        ),
    ),
    "glm4-moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(
            **_SHAPE,
            **_EXPERTS,
            first_k_dense_replace=1,
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=48,
            norm_topk_prob=True,
        ),
    ),
    "mamba2": (
        Mamba2ForCausalLM,
        Mamba2Config(**_HEADLESS, num_heads=4, head_dim=32, state_size=16, n_groups=1, chunk_size=16),
    ),
}

KINDS: tuple[str, ...] = tuple(_KINDS)
"""Plain; head tied; a vocabulary that 2 does not divide; biases; norms of q and k; experts (two spellings); two windows;
projections fused on disk; transposed; fused by groups; sinks, and a loader that writes into its source; latent
attention; a router's bias, which is a buffer in transformers; a parameter that is loaded as minus its exponential.

vLLM computes what transformers does, with one exception: on the CPU its rotary kernel is wrong for `deepseek-v2`, unless
`compilation_config={"custom_ops": ["-rotary_embedding"]}`.
"""

_NOISE: tuple[tuple[str, int, float, int | None], ...] = (
    # what "kind name" has; mean and deviation; by the root of which dimension's size that is divided: of the inputs
    (r"e_score_correction_bias$", 0, 5, None),  # beside scores between 0 and 1: it decides which experts are taken
    (r"bias$|sinks$", 0, 0.3, None),
    (r"norm|\.ln_", 1, 0.3, None),
    (r"^gemma.*embed", 0, 0.1, None),  # the model multiplies it by 8, and would repeat its input if this were more
    (r"embed|\.wte\.", 0, 0.25, None),  # so that a tied head gives logits around 2
    (r"lm_head", 0, 2, -1),
    (r"\.c_\w+\.weight$|^gpt-oss.*_proj$", 0, 1.5, -2),  # transposed
    (r"", 0, 1.5, -1),
)


def build_model(kind: str, seed: int) -> PreTrainedModel:
    """A model of `kind` in float32 on the CPU, in which every parameter, and every router's bias, depends on `seed`."""
    model_class, config = _KINDS[kind]
    model: PreTrainedModel = model_class(config)
    model.train(mode=False).requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(seed)
    router_biases = [each for each in model.named_buffers() if each[0].endswith("e_score_correction_bias")]
    for name, parameter in (*model.named_parameters(), *router_biases):
        noise = torch.randn(parameter.shape, generator=generator)
        _, mean, deviation, dim = next(rule for rule in _NOISE if re.search(rule[0], f"{kind} {name}"))
        noise = deviation * (noise.clamp(-2, 2) if mean else noise)
        parameter.copy_(mean + (noise / parameter.shape[dim] ** 0.5 if dim else noise))
    return model


def save_checkpoint(kind: str, seed: int, directory: Path | str) -> None:
    """`directory` holds config, weights and tokenizer: what a server is started with."""
    model = build_model(kind, seed)
    model.save_pretrained(directory)
    tokenizer = build_tokenizer(model.config.vocab_size)
    if kind == "mixtral":
        # transformers would look for Mistral's own tokenizer first, whose import needs more than a lean vLLM has;
        # it does not for one that names code, and without trust in remote code it takes its own class all the same.
        tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["none.None", "none.None"]}
    tokenizer.save_pretrained(directory)


class _WithoutCopies(TorchFunctionMode):
    """`contiguous` returns the tensor itself, so that what transformers takes apart it does not copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def checkpoint_items(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors as a checkpoint on disk has them, tied ones once; the tensors are views, of every kind.

    By the functions that `save_pretrained` calls: transformers 5 keeps the experts of a layer in two fused
    parameters, under names of its own, and writes one set of three per expert, which is what vLLM loads. A kind
    that is fused on disk and not in memory would get copies.
    """
    with _WithoutCopies():
        state = remove_tied_weights_from_state_dict(model.state_dict(), model)
        return list(revert_weight_conversion(model, state).items())


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


def build_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """One token per byte, then the special ones, then unused ones up to the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    vocabulary |= {"<s>": _BOS, "</s>": _EOS}
    vocabulary |= {f"<unused{index}>": index for index in range(_EOS + 1, num_tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers'
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
