"""The picture of a run: loss, learning rate and gradient norm over the steps."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.files import atomic_file
from train.metrics import train_rows

BLUE, ORANGE, GREEN, GREY = "#2f6db3", "#d9822b", "#3c8d5a", "#8a8f98"


def smooth(values: Sequence[float | None], span: float) -> list[float | None]:
    """Exponential moving average with centre of mass `span` steps, corrected for its start (as Adam's moments).

    None (a loss that was not finite) is left out and stays None.
    """
    keep = span / (1.0 + span)
    total, weight, out = 0.0, 0.0, []
    for value in values:
        if value is None:
            out.append(None)
            continue
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(total / weight)
    return out


def _series(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one figure; a null becomes NaN, which leaves a gap in the line."""
    rows = [row for row in rows if name in row]
    return [row["step"] for row in rows], [float("nan") if row[name] is None else row[name] for row in rows]


def _use_log(values: Sequence[float]) -> bool:
    """A log axis helps when all values are positive and they span more than a factor of 20."""
    finite = [v for v in values if v == v]
    return bool(finite) and min(finite) > 0 and max(finite) > 20 * min(finite)


def _log_axis(ax: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def _style(ax: Any, label: str) -> None:
    ax.set_ylabel(label)
    ax.grid(True, color="#e6e8eb", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.01)


def _line(ax: Any, steps: Sequence[int], values: Sequence[float], **style: Any) -> None:
    # A single point has no line: show it as a dot.
    ax.plot(steps, values, marker="o" if len(steps) == 1 else None, markersize=4, **style)


def _loss_panel(ax: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    steps, values = _series(rows, "loss")
    averaged = smooth([None if v != v else v for v in values], max(1.0, len(values) / 40))
    averaged = [float("nan") if v is None else v for v in averaged]
    _line(ax, steps, values, color=BLUE, alpha=0.25, linewidth=0.9, label="each step")
    _line(ax, steps, averaged, color=BLUE, linewidth=2.0, label="moving average")
    if _use_log(values):
        _log_axis(ax)
    last = next(((s, v) for s, v in zip(reversed(steps), reversed(averaged), strict=True) if v == v), None)
    if last is not None:
        ax.annotate(f"{last[1]:.3g}", last, xytext=(6, 0), textcoords="offset points", color=BLUE, va="center",
                    fontweight="bold", annotation_clip=False)  # fmt: skip
    _style(ax, "loss")


def _small_panel(ax: Any, rows: Sequence[Mapping[str, Any]], name: str, label: str, color: str) -> None:
    steps, values = _series(rows, name)
    _line(ax, steps, values, color=color, linewidth=1.4, clip_on=False)
    if name == "grad_norm" and _use_log(values):
        _log_axis(ax)
    if name == "lr":
        ax.set_ylim(0, 1.1 * max([v for v in values if v > 0], default=1.0))
        ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    _style(ax, label)


def loss_plot(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str = "Training loss") -> None:
    """Draws `rows` of metrics.jsonl as a PNG, written atomically.

    Loss of each step (faint) and its moving average, learning rate and gradient norm; dotted lines mark
    validations. Panels without data are left out; without train rows an empty loss panel is drawn.
    """
    # The object API on the Agg canvas: no pyplot, whose figures and backend are global.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    train = train_rows(rows)
    small = [(name, label, color) for name, label, color in
             (("lr", "learning rate", ORANGE), ("grad_norm", "gradient norm", GREEN))
             if any(row.get(name) is not None for row in train)]  # fmt: skip
    figure = Figure(figsize=(9, 4.2 + 1.5 * len(small)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 + len(small), 1, sharex=True, squeeze=False, height_ratios=[3] + [1] * len(small))[:, 0]
    _loss_panel(axes[0], train)
    for ax, panel in zip(axes[1:], small, strict=True):
        _small_panel(ax, train, *panel)
    validations = sorted({row["step"] for row in rows if row["phase"] == "validate"})
    for ax in axes:
        for i, step in enumerate(validations):
            ax.axvline(step, color=GREY, linewidth=0.9, linestyle=":", zorder=0, label="validation" if i == 0 else None)
    axes[0].set_title(title, loc="left", fontweight="bold")
    if train:
        axes[0].legend(frameon=False, loc="upper right")
    axes[-1].set_xlabel("optimiser step")
    if len(train) == 1:
        axes[-1].set_xlim(train[0]["step"] - 1, train[0]["step"] + 1)
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels(axes)
    with atomic_file(path) as part:
        figure.savefig(part, format="png")
