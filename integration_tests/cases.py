"""The matrix, as data: which model, trainer layout and engine are tested together.

`DEFAULT` is what a plain `nox` runs: few cells, chosen so that every value of every axis that is cheap appears in one of them.
`ALL` is every cell (`nox -s integration -- --all`).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALL", "DEFAULT", "Case"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell: a model kind of `models.py`, and where vLLM runs."""

    model: str
    engine: str

    def __str__(self) -> str:
        return f"{self.model}-{self.engine}"


MODELS = ("llama", "llama-tied", "qwen2", "qwen3-moe")
ENGINES = ("inprocess", "http")

ALL = tuple(Case(model=model, engine=engine) for engine in ENGINES for model in MODELS)
DEFAULT = ALL
