"""Whose fault it is that a worker has other bytes than were sent, as far as that can be known. Plain data; no session, no tensor.

The trainer rank that sent a parameter digests it again, if it was sent from the source's own memory and that is still there.
"""

from __future__ import annotations

from wt_common import IntegrityError, PlanError, Side, WeightTransferError

__all__ = ["blamed"]


def blamed(error: IntegrityError, *, root: int, sent: int, now: int | None) -> WeightTransferError:
    """The error to raise instead of `error`, which names a parameter whose digests differ.

    Args:
        error: what the comparison has found.
        root: the trainer rank that sent the parameter.
        sent: its digest when it was sent.
        now: its digest in the memory that it was sent from; None if it was sent from a copy, or from memory that is freed.

    Returns:
        A `PlanError` where the trainer's memory has changed, else an `IntegrityError` that says what is known.
    """
    where = f"trainer rank {root}"
    if now is not None and now != sent:
        return PlanError(
            f"parameter {error.param!r} changed in the memory of {where} during the round: expected digest {sent:016x}, as when "
            f"it was taken from the source, got {now:016x} now. Its source says that its tensors are stable (yields_stable): do "
            "not write to them before send_weights() has returned, also not through `.data` or on another thread, or let the "
            "source say False. Then send again",
            side=Side.TRAINER,
            rank=root,
            param=error.param,
        )
    if now is None:
        known = (
            f"It is not known where they changed: {where} has sent them from a copy that it no longer has, so it can have been "
            "there, on the wire, or on the worker"
        )
    else:
        known = (
            f"{where} still has the bytes that it took from its source, so they changed on the wire or on the worker (or were "
            "changed on the trainer for a moment, and restored)"
        )
    return IntegrityError(
        f"{error.message}. {known}", side=error.side, engine=error.engine, rank=error.rank, param=error.param
    )
