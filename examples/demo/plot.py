"""A picture of a run: the reward and the time of the sync, for each version of the weights."""

from pathlib import Path

from matplotlib.figure import Figure


def plot(path: Path, title: str, rewards: list[float], sync_ms: list[float]) -> None:
    """`path` is a PNG. A Figure of its own, without pyplot: no display, and no window, is ever asked for."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=[2, 1])
    upper.set_title(title, fontsize="medium")
    upper.plot(rewards, color="tab:blue", marker=".")
    upper.set_ylabel("mean reward")
    upper.set_ylim(0, 1.05)
    lower.bar(range(len(sync_ms)), sync_ms, color="tab:orange")
    lower.set_ylabel("sync, ms")
    lower.set_xlabel("version: optimizer steps after the warm-up")
    for axes in (upper, lower):
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, format="png", dpi=100)
