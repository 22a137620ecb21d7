"""A mixture-of-experts model without values, and its loader, which cuts and fuses as vLLM's does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

Row = tuple[str, torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Qwen3-30B-A3B, on one of two ranks: 18,867 checkpoint parameters."""

    num_layers: int = 48
    num_experts: int = 128
    hidden: int = 2048
    expert_hidden: int = 768
    heads: int = 32
    kv_heads: int = 4
    head: int = 128
    vocabulary: int = 151_936
    tp_rank: int = 1
    tp_size: int = 2


def checkpoint(config: Config) -> Iterator[Row]:
    """Names, dtypes and shapes, in the order of the checkpoint."""
    c = config

    def row(name: str, *shape: int) -> Row:
        return name, torch.bfloat16, shape

    yield row("model.embed_tokens.weight", c.vocabulary, c.hidden)
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}"
        yield row(f"{prefix}.input_layernorm.weight", c.hidden)
        yield row(f"{prefix}.self_attn.q_proj.weight", c.heads * c.head, c.hidden)
        yield row(f"{prefix}.self_attn.k_proj.weight", c.kv_heads * c.head, c.hidden)
        yield row(f"{prefix}.self_attn.v_proj.weight", c.kv_heads * c.head, c.hidden)
        yield row(f"{prefix}.self_attn.o_proj.weight", c.hidden, c.heads * c.head)
        yield row(f"{prefix}.self_attn.q_norm.weight", c.head)
        yield row(f"{prefix}.self_attn.k_norm.weight", c.head)
        yield row(f"{prefix}.post_attention_layernorm.weight", c.hidden)
        yield row(f"{prefix}.mlp.gate.weight", c.num_experts, c.hidden)
        for expert in range(c.num_experts):
            yield row(f"{prefix}.mlp.experts.{expert}.gate_proj.weight", c.expert_hidden, c.hidden)
            yield row(f"{prefix}.mlp.experts.{expert}.up_proj.weight", c.expert_hidden, c.hidden)
            yield row(f"{prefix}.mlp.experts.{expert}.down_proj.weight", c.hidden, c.expert_hidden)
    yield row("model.norm.weight", c.hidden)
    yield row("lm_head.weight", c.vocabulary, c.hidden)


class Mixture(torch.nn.Module):
    """The model: its parameters by their full names, each with a `weight_loader` where it is not copied as it comes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.config = config
        self.by_name: dict[str, torch.nn.Parameter] = {}
        self._add("model.embed_tokens.weight", (c.vocabulary // c.tp_size, c.hidden), self._load_rows)
        q, kv = c.heads // c.tp_size * c.head, c.kv_heads // c.tp_size * c.head
        for layer in range(c.num_layers):
            prefix = f"model.layers.{layer}"
            for norm, size in (("input_layernorm", c.hidden), ("post_attention_layernorm", c.hidden)):
                self._add(f"{prefix}.{norm}.weight", (size,))
            for norm in ("q_norm", "k_norm"):
                self._add(f"{prefix}.self_attn.{norm}.weight", (c.head,))
            self._add(f"{prefix}.self_attn.qkv_proj.weight", (q + 2 * kv, c.hidden), self._load_qkv)
            self._add(f"{prefix}.self_attn.o_proj.weight", (c.hidden, q), self._load_columns)
            self._add(f"{prefix}.mlp.gate.weight", (c.num_experts, c.hidden))
            inner = c.expert_hidden // c.tp_size
            self._add(f"{prefix}.mlp.experts.w13_weight", (c.num_experts, 2 * inner, c.hidden), self._load_expert)
            self._add(f"{prefix}.mlp.experts.w2_weight", (c.num_experts, c.hidden, inner), self._load_expert)
        self._add("model.norm.weight", (c.hidden,))
        self._add("lm_head.weight", (c.vocabulary // c.tp_size, c.hidden), self._load_rows)

    def _add(self, name: str, shape: tuple[int, ...], loader: Callable[..., None] | None = None) -> None:
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"), requires_grad=False)
        if loader is not None:
            parameter.weight_loader = loader  # type: ignore[attr-defined]  # as vLLM does
        self.by_name[name] = parameter
        self.register_parameter(name.replace(".", "_"), parameter)

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As a model of vLLM's: a checkpoint name is a parameter's own, a part of a fused one, or an expert's."""
        for name, tensor in pairs:
            layer, _, leaf = name.removesuffix(".weight").rpartition(".")
            if ".experts." in name:
                experts, _, expert = layer.rpartition(".")
                part = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[leaf]
                parameter = self.by_name[f"{experts}.{'w2' if part == 'w2' else 'w13'}_weight"]
                parameter.weight_loader(parameter, tensor, part, int(expert))  # type: ignore[attr-defined]
            elif leaf in {"q_proj", "k_proj", "v_proj"}:
                parameter = self.by_name[f"{layer}.qkv_proj.weight"]
                parameter.weight_loader(parameter, tensor, leaf[0])  # type: ignore[attr-defined]
            else:
                parameter = self.by_name[name]
                getattr(parameter, "weight_loader", _load_whole)(parameter, tensor)

    def _load_qkv(self, parameter: torch.nn.Parameter, loaded: torch.Tensor, part: str) -> None:
        c = self.config
        q, kv = c.heads // c.tp_size * c.head, c.kv_heads // c.tp_size * c.head
        start, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[part]
        _load_whole(parameter.data.narrow(0, start, size), loaded.narrow(0, c.tp_rank * size, size))

    def _load_rows(self, parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        size = parameter.shape[0]
        _load_whole(parameter, loaded.narrow(0, self.config.tp_rank * size, size))

    def _load_columns(self, parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        size = parameter.shape[1]
        _load_whole(parameter, loaded.narrow(1, self.config.tp_rank * size, size))

    def _load_expert(self, parameter: torch.nn.Parameter, loaded: torch.Tensor, part: str, expert: int) -> None:
        data = parameter.data[expert]
        dim = 1 if part == "w2" else 0
        size = loaded.shape[dim] // self.config.tp_size
        loaded = loaded.narrow(dim, self.config.tp_rank * size, size)
        if part != "w2":
            data = data.narrow(0, 0 if part == "w1" else size, size)
        data.copy_(loaded)


def _load_whole(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    if parameter.shape != loaded.shape:
        raise ValueError(f"expected shape {tuple(parameter.shape)}, got {tuple(loaded.shape)}")
    parameter.data.copy_(loaded)
