"""What is trained: a small Llama that reads bytes, by rewards for counting.

A prompt is three digits that count up, such as "678"; after 9 comes 0. The reward of a completion is the share of it before
its first mistake: 1.0 for "901234". A short warm-up has shown the model digits that count in a third of their places.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DIGITS = "0123456789"
PROMPTS = [(DIGITS + DIGITS)[start : start + 3] for start in range(10)]
NUM_TOKENS, NUM_SAMPLES = 6, 8  # of a completion; completions of each prompt, which are one group
LEARNING_RATE = 3e-3
WARM_UP_STEPS, WARM_UP_SHAPE = 60, (32, 16)
WARM_UP_COUNTING = 0.3  # of the digits; of the rest one in ten does by chance


def reward(prompt: str, text: str) -> float:
    """The share of `text` before the first byte that does not count on from `prompt`."""
    start = DIGITS.index(prompt[-1]) + 1
    expected = (DIGITS + DIGITS)[start : start + NUM_TOKENS]
    return (
        next((place for place in range(NUM_TOKENS) if text[place : place + 1] != expected[place]), NUM_TOKENS)
        / NUM_TOKENS
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one for the end of a text."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>"]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    # 32 is the smallest head that vLLM's attention on a CPU takes.
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), dtype="float32", **shape, **heads, **special))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The server's completions of all prompts, those of one prompt next to each other."""

    token_ids: torch.Tensor  # [completions, tokens], the prompt's and the completion's
    logprobs: torch.Tensor  # [completions, NUM_TOKENS], by the server
    texts: list[str]
    rewards: torch.Tensor  # [prompts, NUM_SAMPLES]


class Policy:
    """A model and what its training needs. The same seed gives the same model and warm-up; the completions are the server's."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.tokenizer = build_tokenizer()
        self.model = build_model(self.tokenizer)
        self.prompts: list[list[int]] = self.tokenizer(PROMPTS)["input_ids"]
        self._optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, weight_decay=0.0)

    def save(self, checkpoint: Path) -> None:
        transformers.logging.disable_progress_bar()
        self.model.save_pretrained(checkpoint)
        self.tokenizer.save_pretrained(checkpoint)

    def warm_up(self) -> None:
        """The model writes digits, and counts often enough to be rewarded."""
        digits = torch.tensor(self.tokenizer(DIGITS)["input_ids"])
        for _ in range(WARM_UP_STEPS):
            counts = torch.rand(WARM_UP_SHAPE) < WARM_UP_COUNTING
            steps = torch.where(counts, 1, torch.randint(len(digits), WARM_UP_SHAPE))
            batch = digits[steps.cumsum(1) % len(digits)]
            self._descend(self.model(input_ids=batch, labels=batch).loss)

    def grade(self, choices: list[dict[str, Any]]) -> Rollouts:
        """What the server's completions of `prompts`, NUM_SAMPLES of each, are worth."""
        texts = [self.tokenizer.decode(choice["token_ids"]) for choice in choices]
        prompts = [prompt for prompt in PROMPTS for _ in range(NUM_SAMPLES)]
        rewards = [reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        prompt_ids = torch.tensor(self.prompts).repeat_interleave(NUM_SAMPLES, dim=0)
        return Rollouts(
            token_ids=torch.cat([prompt_ids, torch.tensor([choice["token_ids"] for choice in choices])], dim=1),
            logprobs=torch.tensor([choice["logprobs"]["token_logprobs"] for choice in choices]),
            texts=texts,
            rewards=torch.tensor(rewards).view(len(PROMPTS), NUM_SAMPLES),
        )

    def logprobs(self, rollouts: Rollouts) -> torch.Tensor:
        """[completions, NUM_TOKENS], as `rollouts.logprobs`, but by this model."""
        logprobs = self.model(input_ids=rollouts.token_ids).logits[:, :-1].log_softmax(dim=-1)
        return logprobs.gather(2, rollouts.token_ids[:, 1:, None])[:, -NUM_TOKENS:, 0]

    def learn(self, rollouts: Rollouts, logprobs: torch.Tensor) -> None:
        """One step of GRPO: completions that beat the others of their group are likelier, the rest less likely.

        One step for each set of rollouts, which are the current weights' own: the ratio is 1, and needs no clipping.
        """
        rewards = rollouts.rewards
        spread = rewards.std(dim=1, keepdim=True) + 1e-4  # a group without any has nothing to teach
        advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / spread
        ratio = (logprobs - rollouts.logprobs).exp()
        self._descend(-(ratio * advantages.view(-1, 1)).mean())

    def _descend(self, loss: torch.Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
