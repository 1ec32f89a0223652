"""metrics.jsonl, the figures drawn from it, and the progress display.

One JSON object per line. Every row has `phase` (setup, train, validate, save), `seconds` (how long that piece
of work took) and, but for setup, `step` (optimiser steps done). There is one train row per optimiser step; it
further has `loss`, `grad_norm`, `lr`, `tokens_per_second`, `mfu` and `peak_memory_bytes` where known, `loss_by_sigma`
(means by quarter of the noise level), and of models of several streams `loss_video`, `loss_by_sigma_video` and so on;
`data_seconds` is the longest that a process waited for data. Of several processes, losses, norms and tokens are those
of all, `data_rank` is the one that waited longest, `straggler_rank` the one that needed longest for the step, and
`straggler_seconds` how much longer than the fastest (collectives within the step make the fast wait for the slow, so
this shows what is outside of them). Setup rows have `effective_batch` and `mesh`. A number that is not finite is
written as null, since JSON has no NaN.
"""

import collections
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from core.errors import UserError
from core.files import atomic_file
from infer.words import counted

PHASES = ("setup", "train", "validate", "save")
# Steps that are left out of speeds: they allocate, compile and fill caches.
WARMUP_STEPS = 3
# Speeds on display are medians over this many steps.
WINDOW = 50

Rows = list[dict[str, Any]]


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # a 0-d tensor or a numpy scalar
        value = value.item()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_row(path: str | Path, phase: str, **values: Any) -> dict[str, Any]:
    """Appends one row and flushes it; returns it as written.

    Values are JSON values, 0-d tensors or numpy scalars. Raises ValueError for another phase, TypeError for
    another value; nothing is written then.
    """
    if phase not in PHASES:
        raise ValueError(f"phase {phase!r}: one of {', '.join(PHASES)}")
    row = {"phase": phase, **_plain(values)}
    line = json.dumps(row, allow_nan=False) + "\n"
    with open(path, "a", encoding="utf-8") as file:
        file.write(line)
    return row


def read_rows(path: str | Path) -> Rows:
    """The rows of a file. A last line without its newline (a killed write) is left out.

    Raises UserError naming file and line for a missing file or a damaged line.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    # A complete row ends in a newline; what follows the last newline is empty or torn.
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_parse(path, number, line) for number, line in enumerate(lines, 1)]


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number}: not a JSON object: {line[:80]!r}")
    return row


def drop_after(path: str | Path, step: int) -> int:
    """Atomically removes the rows of later steps than `step`, and a torn last line; returns how many rows.

    Called on resume, so that the file has each train step once. Rows without a step are kept. A file that
    does not exist stays so.
    """
    path = Path(path)
    if not path.exists():
        return 0
    rows = read_rows(path)
    kept = [row for row in rows if "step" not in row or row["step"] <= step]
    with atomic_file(path) as part:
        part.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in kept), encoding="utf-8")
    return len(rows) - len(kept)


def train_rows(rows: Iterable[Mapping[str, Any]]) -> Rows:
    """The rows of training steps, in order."""
    return [dict(row) for row in rows if row["phase"] == "train"]


def steady_seconds(rows: Iterable[Mapping[str, Any]], window: int | None = None) -> float | None:
    """Median seconds per step over train rows after the warm-up (the last `window` of them); None without rows.

    A run of no more than WARMUP_STEPS steps has its last step taken.
    """
    seconds = [row["seconds"] for row in train_rows(rows) if row.get("seconds") is not None]
    steady = seconds[WARMUP_STEPS:] if len(seconds) > WARMUP_STEPS else seconds[-1:]
    return statistics.median(steady[-window:] if window is not None else steady) if steady else None


def eta_seconds(rows: Iterable[Mapping[str, Any]], total_steps: int) -> float | None:
    """Seconds of training steps that remain; None before the first. Validation and saving are not counted."""
    rows = train_rows(rows)
    speed = steady_seconds(rows, WINDOW)
    return None if speed is None else max(0, total_steps - rows[-1]["step"]) * speed


def mean(rows: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Mean of one figure over the train rows that have it; None when none has."""
    values = [row[name] for row in train_rows(rows) if row.get(name) is not None]
    return statistics.fmean(values) if values else None


@dataclasses.dataclass(frozen=True)
class Summary:
    """A run in a few figures. What is unknown is None."""

    train_steps: int
    total_seconds: float
    steady_step_seconds: float | None
    peak_memory_bytes: int | None
    effective_batch: int | None
    last_loss: float | None


def summary(rows: Sequence[Mapping[str, Any]]) -> Summary:
    """Total time over all phases, steady step time, peak memory, effective batch (samples per optimiser step)."""
    train = train_rows(rows)
    peaks = [row["peak_memory_bytes"] for row in rows if row.get("peak_memory_bytes") is not None]
    batches = [row["effective_batch"] for row in rows if row.get("effective_batch") is not None]
    return Summary(
        train_steps=len(train),
        total_seconds=sum(row["seconds"] for row in rows if row.get("seconds") is not None),
        steady_step_seconds=steady_seconds(train),
        peak_memory_bytes=max(peaks, default=None),
        effective_batch=batches[-1] if batches else None,
        last_loss=train[-1].get("loss") if train else None,
    )


def summary_text(s: Summary) -> str:
    """A summary in one line, for the end of a run."""
    figures = [f"{counted(s.train_steps, 'step')} in {duration(s.total_seconds)}"]
    if s.steady_step_seconds is not None:
        figures.append(f"{s.steady_step_seconds:.3g} s per steady step")
    if s.peak_memory_bytes is not None:
        figures.append(f"peak memory {s.peak_memory_bytes / 2**30:.2f} GiB")
    if s.effective_batch is not None:
        figures.append(f"effective batch {s.effective_batch}")
    if s.last_loss is not None:
        figures.append(f"last loss {s.last_loss:.4g}")
    return ", ".join(figures)


def duration(seconds: float) -> str:
    """`75 -> "1:15"`, `3700 -> "1:01:40"`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def rate_text(seconds: float | None) -> str:
    """Seconds per step as the more readable of `0.52 s/step` and `3.1 steps/s`."""
    if seconds is None:
        return ""
    return f"{seconds:.3g} s/step" if seconds >= 0.5 else f"{1 / max(seconds, 1e-9):.3g} steps/s"


@dataclasses.dataclass(frozen=True)
class Display:
    """What a running progress display offers: `update(train_row)` once per step, `log(text)` for a line."""

    update: Callable[[Mapping[str, Any]], None]
    log: Callable[[str], None]


@contextlib.contextmanager
def silent() -> Iterator[Display]:
    """A display that shows nothing, for processes that another one speaks for."""
    yield Display(lambda row: None, lambda text: None)


@contextlib.contextmanager
def progress(total_steps: int, start_step: int = 0, *, file: TextIO | None = None, every_steps: int = 50,
             every_seconds: float = 10.0) -> Iterator[Display]:  # fmt: skip
    """Shows training progress with rate and remaining time: a bar on a terminal, plain lines elsewhere.

    Plain lines come at the first and last step, and whenever `every_steps` steps or `every_seconds` seconds
    have passed. Both count training steps only, so that validation does not spoil rate and remaining time.
    """
    file = sys.stdout if file is None else file
    show = _bar if file.isatty() else _lines
    recent: collections.deque = collections.deque(maxlen=WARMUP_STEPS + WINDOW)
    with show(total_steps, start_step, file, every_steps, every_seconds) as (draw, log):

        def update(row: Mapping[str, Any]) -> None:
            recent.append({**row, "phase": "train"})
            left = eta_seconds(recent, total_steps)
            draw(row["step"], _figures(row), rate_text(steady_seconds(recent)), "" if left is None else duration(left))

        yield Display(update, log)


def _figures(row: Mapping[str, Any]) -> str:
    names = (("loss", "loss {:.4f}"), ("grad_norm", "norm {:.3g}"), ("lr", "lr {:.2e}"), ("mfu", "MFU {:.1%}"))
    return "  ".join(text.format(float(row[name])) for name, text in names if row.get(name) is not None)


@contextlib.contextmanager
def _bar(total: int, start: int, file: TextIO, every_steps: int, every_seconds: float):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = [
        TextColumn("train"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", style="cyan"),
        TextColumn("{task.fields[left]} left", style="green"),
        TextColumn("{task.fields[figures]}"),
    ]
    with Progress(*columns, console=Console(file=file)) as bar:
        task = bar.add_task("train", total=total, completed=start, rate="", left="-:--", figures="")

        def draw(step: int, figures: str, rate: str, left: str) -> None:
            bar.update(task, completed=step, figures=figures, rate=rate, left=left)

        yield draw, lambda text: bar.console.print(text, markup=False, highlight=False)


@contextlib.contextmanager
def _lines(total: int, start: int, file: TextIO, every_steps: int, every_seconds: float):
    last = {"step": start, "time": -math.inf}

    def log(text: str) -> None:
        print(text, file=file, flush=True)

    def draw(step: int, figures: str, rate: str, left: str) -> None:
        now = time.monotonic()
        if step >= total or step - last["step"] >= every_steps or now - last["time"] >= every_seconds:
            last.update(step=step, time=now)
            log(f"step {step}/{total}  {figures}  {rate}  {left} left")

    yield draw, log
