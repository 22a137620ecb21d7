"""Completions by a Hugging Face causal language model, one token at a time, which can be paused and put to sleep.

No keys and values are kept: a token costs a forward pass over the whole sequences, and never depends on older weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from wt_common import ConfigurationError

__all__ = ["Completions"]


class Completions:
    """What a server does between weight updates. May be called from any thread.

    Args:
        model: a Hugging Face causal language model.
        device: where it lies.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.model = model.eval()
        self._config: Any = model.config
        self._device = device
        self._step = threading.Lock()  # held for one forward pass, and while weights change
        self._changed = threading.Condition()  # of all below
        self._paused = self._frozen = False  # no request begins; those in hand wait too
        self._num_running = self._num_aborts = 0
        self._asleep: set[str] = set()
        self._backup: dict[str, torch.Tensor] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it no token is computed, and the weights are in memory.

        Raises:
            ConfigurationError: they sleep.
        """
        with self._step:
            if "weights" in self._asleep:
                raise ConfigurationError("the weights are asleep; POST /wake_up?tags=weights first", side="worker")
            yield

    # --- what a server's control routes do -----------------------------------------------------------------

    def pause(self, mode: str = "abort") -> dict[str, Any]:
        """No token is computed until `resume`; requests in hand are ended (`abort`), completed (`wait`) or frozen (`keep`)."""
        if mode not in ("abort", "wait", "keep"):
            raise ConfigurationError(f"mode: expected 'abort', 'wait' or 'keep', got {mode!r}", side="worker")
        with self._changed:
            self._paused, self._frozen = True, self._frozen or mode == "keep"
            self._num_aborts += mode == "abort"
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._frozen or self._num_running == 0)
        with self._step:  # a token that was being computed is done
            return {"status": "paused"}

    def resume(self) -> dict[str, Any]:
        """Tokens are computed again, unless something sleeps."""
        with self._changed:
            self._paused = self._frozen = False
            self._changed.notify_all()
        return {"status": "resumed"}

    def load(self) -> dict[str, Any]:
        """How many requests are in hand."""
        return {"num_running": self._num_running}

    def is_paused(self) -> dict[str, Any]:
        """Whether `resume` is needed."""
        return {"is_paused": self._paused}

    def sleep(self, level: str = "1") -> dict[str, Any]:
        """The weights' memory is free: their values are kept elsewhere (level 1) or gone (2). Requests in hand are ended."""
        if level not in ("1", "2"):
            raise ConfigurationError(f"level: expected 1 or 2, got {level!r}", side="worker")
        with self.held(), self._changed:
            self._asleep = {"weights", "kv_cache"}
            self._num_aborts += 1
            self._changed.notify_all()
            for name, tensor in self.model.named_parameters():
                if level == "1":
                    self._backup[name] = tensor.detach().clone()
                tensor.untyped_storage().resize_(0)
        return {"status": "sleeping", "level": int(level)}

    @torch.no_grad()
    def wake_up(self, tags: list[str] | None = None) -> dict[str, Any]:
        """What `tags` name (`weights`, `kv_cache`; None is both) is there again; weights that are gone are NaN until a round."""
        woken = self._asleep & set(tags or self._asleep)
        with self._step, self._changed:
            for name, tensor in self.model.named_parameters() if "weights" in woken else ():
                tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
                tensor.copy_(self._backup.pop(name)) if name in self._backup else tensor.fill_(torch.nan)
            self._asleep -= woken
            self._changed.notify_all()
        return {"status": "sleeping" if self._asleep else "awake", "tags": tags}

    def is_sleeping(self) -> dict[str, Any]:
        """Whether the weights are out of memory."""
        return {"is_sleeping": "weights" in self._asleep}

    # --- tokens --------------------------------------------------------------------------------------------

    def complete(self, **body: Any) -> dict[str, Any]:
        """An OpenAI completion of `prompt`: a list of token ids, or several lists, `n` times each. At temperature 0 it is greedy.

        Log-probabilities are of the model's distribution, before the temperature.

        Raises:
            ConfigurationError: a field is not what is expected.
        """
        prompts = _prompts(body.get("prompt"), self._config.vocab_size)
        num_tokens, copies = int(_number(body, "max_tokens", 16)), int(_number(body, "n", 1))
        temperature = _number(body, "temperature", 1.0)
        random = torch.Generator(self._device)
        random.manual_seed(int(_number(body, "seed", random.seed() % 2**32)))
        eos = None if body.get("ignore_eos") else self._config.eos_token_id
        stop = {*([eos] if isinstance(eos, int) else eos or []), *body.get("stop_token_ids", [])}
        rows = [_Row(prompt) for prompt in prompts for _ in range(copies)]
        with self._request() as goes_on:
            if body.get("prompt_logprobs") is not None:
                for index, prompt in enumerate(prompts):
                    given = self._prompt_logprobs(prompt)
                    for row in rows[index * copies : (index + 1) * copies]:
                        row.prompt_logprobs = given
            for _ in range(num_tokens):
                live = [row for row in rows if row.reason != "stop"]
                if not live or not goes_on():
                    break
                self._append_token(live, temperature, random)
                for row in live:
                    row.reason = (
                        "stop" if row.token_ids[-1] in stop else "length" if row.num_tokens == num_tokens else "abort"
                    )
        choices = [{"index": index, **row.choice()} for index, row in enumerate(rows)]
        return {"object": "text_completion", "model": body.get("model"), "choices": choices}

    @contextmanager
    def _request(self) -> Iterator[Callable[[], bool]]:
        """Within it a request is in hand; what it yields waits while that is frozen, and says whether the request goes on."""
        with self._changed:
            self._changed.wait_for(lambda: not self._paused and not self._asleep)
            self._num_running += 1
            aborts = self._num_aborts

        def goes_on() -> bool:
            with self._changed:
                self._changed.wait_for(lambda: not self._frozen or self._num_aborts > aborts)
                return self._num_aborts == aborts

        try:
            yield goes_on
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    @torch.inference_mode()
    def _logprobs(self, rows: list[list[int]]) -> torch.Tensor:
        """float32 [rows, longest, vocabulary]. Shorter rows are filled up at their end, where causal attention does not look."""
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self._device)
        with self.held():
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits.float().log_softmax(-1)

    def _prompt_logprobs(self, prompt: list[int]) -> list[dict[str, Any] | None]:
        values = self._logprobs([prompt])[0, :-1].gather(1, torch.tensor(prompt[1:], device=self._device)[:, None])
        return [
            None,
            *({str(token): {"logprob": value}} for token, [value] in zip(prompt[1:], values.tolist(), strict=True)),
        ]

    def _append_token(self, rows: list[_Row], temperature: float, random: torch.Generator) -> None:
        lengths = torch.tensor([len(row.token_ids) for row in rows], device=self._device)
        logprobs = self._logprobs([row.token_ids for row in rows])[torch.arange(len(rows)), lengths - 1]
        if temperature > 0:
            tokens = torch.multinomial((logprobs / temperature).softmax(-1), 1, generator=random)
        else:
            tokens = logprobs.argmax(-1, keepdim=True)
        for row, token, value in zip(
            rows, tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist(), strict=True
        ):
            row.token_ids.append(token)
            row.logprobs.append(value)


@dataclass(slots=True)
class _Row:
    """One completion: its prompt, and what has come after it so far."""

    prompt: list[int]
    token_ids: list[int] = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    reason: str = "abort"

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt)

    def choice(self) -> dict[str, Any]:
        """It as an OpenAI choice, with the fields that vLLM adds. The text is left to who has a tokenizer."""
        tokens = self.token_ids[len(self.prompt) :]
        return {
            "text": "",
            "token_ids": tokens,
            "logprobs": {"tokens": [f"token_id:{token}" for token in tokens], "token_logprobs": self.logprobs},
            "prompt_logprobs": self.prompt_logprobs,
            "finish_reason": self.reason,
        }


def _prompts(value: Any, num_tokens: int) -> list[list[int]]:
    prompts = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    for prompt in prompts:
        if (
            not isinstance(prompt, list)
            or not prompt
            or not all(type(token) is int and 0 <= token < num_tokens for token in prompt)
        ):
            raise ConfigurationError(
                f"prompt: expected token ids below {num_tokens}, as [1, 2] or [[1, 2], [3]], got {value!r:.80}; this server has "
                "no tokenizer",
                side="worker",
            )
    return prompts


def _number(body: dict[str, Any], name: str, default: float) -> float:
    value = default if body.get(name) is None else body[name]
    if type(value) not in (int, float) or value < 0:
        raise ConfigurationError(f"{name}: expected a number of at least 0, got {value!r}", side="worker")
    return float(value)
