"""Where each shard of a dimension lies: the one splitting rule that both sides use."""

from __future__ import annotations

__all__ = ["shard_bounds"]


def shard_bounds(size: int, num_shards: int, index: int) -> tuple[int, int]:
    """The half-open range `[start, stop)` of shard `index` when `size` elements are split into `num_shards`.

    The split is that of `torch.chunk`, which is also that of DTensor's `Shard`: every shard has
    `ceil(size / num_shards)` elements, except that the last ones may be shorter or empty. An empty shard is
    `(size, size)`.

    Raises:
        ValueError: `size` is negative, `num_shards` is not positive, or `index` is outside `[0, num_shards)`.
    """
    if size < 0:
        raise ValueError(f"size must be at least 0, got {size}")
    if num_shards < 1:
        raise ValueError(f"num_shards must be at least 1, got {num_shards}")
    if not 0 <= index < num_shards:
        raise ValueError(f"index must be in [0, {num_shards}), got {index}")
    step = -(-size // num_shards)
    return min(index * step, size), min((index + 1) * step, size)
