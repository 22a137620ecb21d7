"""What is trained: a small Llama that reads bytes, on the docstrings of Python's standard library."""

import ast
import sysconfig
import time
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CORPUS_BYTES = 512 << 10
HELD_OUT_BYTES = 192  # the end of the corpus, never trained on
BATCH_SIZE, CONTEXT_BYTES, LEARNING_RATE = 12, 64, 2e-3


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


def read_corpus() -> str:
    """The docstrings of the top-level modules, in the order of their files, which are parsed and not imported."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented)]
        text += "".join(f"{ast.get_docstring(node)}\n\n" for node in nodes if ast.get_docstring(node))
        if len(text) > CORPUS_BYTES:
            break
    return text[:CORPUS_BYTES]


class Training:
    """A model and what its training needs. The same seed gives the same steps."""

    def __init__(self, *, num_steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.tokenizer = build_tokenizer()
        self.model = build_model(self.tokenizer)
        self.losses: list[float] = []  # nats per byte, one for each step
        self.seconds = 0.0  # in all steps
        self._optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, weight_decay=0.1)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, LEARNING_RATE, num_steps, pct_start=0.1)

    def save(self, checkpoint: Path) -> None:
        transformers.logging.disable_progress_bar()
        self.model.save_pretrained(checkpoint)
        self.tokenizer.save_pretrained(checkpoint)

    def read(self, text: str) -> None:
        """`step` can be called."""
        ids = self.tokenizer(text)["input_ids"]
        self._tokens, self.held_out = torch.tensor(ids[:-HELD_OUT_BYTES]), ids[-HELD_OUT_BYTES:]

    @property
    def loss(self) -> float:
        """The mean of the latest ten steps."""
        return sum(self.losses[-10:]) / len(self.losses[-10:])

    def step(self) -> None:
        """One step on random pieces of the text."""
        began = time.monotonic()
        starts = torch.randint(len(self._tokens) - CONTEXT_BYTES, (BATCH_SIZE, 1))
        batch = self._tokens[starts + torch.arange(CONTEXT_BYTES)]
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        self.losses.append(loss.item())
        self.seconds += time.monotonic() - began

    @torch.no_grad()
    def judge(self, prompt: list[int], continuation: list[int]) -> tuple[torch.Tensor, list[int]]:
        """The log-probability of each token of `prompt` but the first, and the likeliest at `continuation`'s places.

        The latter are `continuation` itself exactly if that was generated greedily from these weights.
        """
        logprobs = self.model(torch.tensor([prompt + continuation])).logits[0].log_softmax(dim=-1)
        of_prompt = logprobs[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        return of_prompt, logprobs[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
