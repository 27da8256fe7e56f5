"""Pictures of a finished (or running) run."""

from __future__ import annotations

from pathlib import Path

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.training.metrics import read_metrics


def plot_losses(metrics_path: str | Path, out_png: str | Path, title: str, uniform_nats: float) -> None:
    """Draws training and validation loss over steps, and ``uniform_nats`` = ln(vocabulary), the loss of a guess.

    Raises ConfigError without matplotlib, ValueError when there is no finite loss to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the loss curve needs a package that is not installed: pip install matplotlib") from error
    records = read_metrics(metrics_path)
    train = [(record["step"], record["loss"]) for record in records if record.get("loss") is not None]
    valid = [(record["step"], record["valid_loss"]) for record in records if record.get("valid_loss") is not None]
    if not train:
        raise ValueError(f"{metrics_path} holds no finite loss; train at least one step")

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")  # no pyplot: no global state, no display
    axes = figure.add_subplot()
    axes.axhline(uniform_nats, color="0.55", linestyle="--", linewidth=1)
    axes.annotate(
        f"uniform guess: ln(vocabulary) = {uniform_nats:.2f}",
        xy=(1.0, uniform_nats),
        xycoords=axes.get_yaxis_transform(),
        xytext=(-6, 5),
        textcoords="offset points",
        ha="right",
        color="0.35",
    )
    axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1.2, label=f"training (last {train[-1][1]:.2f})")
    if valid:
        label = f"validation (last {valid[-1][1]:.2f})"
        axes.plot(*zip(*valid, strict=True), color="tab:orange", marker="o", markersize=5, linewidth=1, label=label)
    low = min(loss for _, loss in [*train, *valid])
    high = max(uniform_nats, *(loss for _, loss in [*train, *valid]))
    span = max(high - low, 0.1)
    axes.set_ylim(max(0.0, low - 0.08 * span), high + 0.1 * span)
    axes.set(title=title, xlabel="optimizer step", ylabel="cross-entropy (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left" if train[-1][1] > (low + high) / 2 else "center right")
    Path(out_png).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png)
