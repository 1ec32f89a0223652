"""Progress of work with a known length: a bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

Update = Callable[[int], None]


@contextlib.contextmanager
def progress(label: str, total: int, unit: str = "it", *, file: TextIO | None = None) -> Iterator[Update]:
    """Yields `update(done)`. A terminal gets a bar with rate and remaining time, else a line per tenth."""
    file = sys.stdout if file is None else file
    with (_bar if file.isatty() else _lines)(label, total, unit, file) as update:
        yield update


@contextlib.contextmanager
def _lines(label: str, total: int, unit: str, file: TextIO) -> Iterator[Update]:
    started, tenth = time.monotonic(), 0

    def update(done: int) -> None:
        nonlocal tenth
        if (reached := 10 * done // max(total, 1)) > tenth:  # `done` may jump
            tenth = reached
            rate = done / max(time.monotonic() - started, 1e-9)
            print(f"{label}: {done}/{total}  {rate:.3g} {unit}/s", file=file, flush=True)

    yield update


@contextlib.contextmanager
def _bar(label: str, total: int, unit: str, file: TextIO) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]}", style="cyan")
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    started = time.monotonic()
    with Progress(*columns, console=Console(file=file)) as bar:
        task = bar.add_task(label, total=total, rate="")

        def update(done: int) -> None:
            bar.update(task, completed=done, rate=f"{done / max(time.monotonic() - started, 1e-9):.3g} {unit}/s")

        yield update


def tracked(items: Sequence[Any], label: str, unit: str = "it") -> Iterator[Any]:
    """Iterates over `items` under a progress display."""
    with progress(label, len(items), unit) as update:
        for done, item in enumerate(items, start=1):
            yield item
            update(done)
