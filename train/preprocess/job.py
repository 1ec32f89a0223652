"""A set from its beginning to its end, whatever its samples are made of: one rank's share, resumable at any point."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import UserError, raise_faults
from core.files import atomic_folder, check_target, write_json
from infer.progress import progress
from infer.words import counted
from train.preprocess.buckets import Clip, Unusable
from train.preprocess.finish import LISTED, Outcome, finish, listed, outcome
from train.preprocess.metadata import Entry
from train.preprocess.parts import (
    Part,
    disk_faults,
    edited,
    merged,
    parts_of,
    read_report,
    write_if_new,
    write_part,
)
from train.preprocess.record import MANIFEST, MODELS, differences, model_entry, read_record
from train.preprocess.stop import Stopped
from train.rows import RowType

Encoder = Callable[[Clip], tuple[dict[str, Any], float | None]]
"""Of a clip: its sample, and how well its latents give it again in dB, or None."""


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """What a set is made of.

    Args:
        record: see `record.identity`; what `differences` compares decides whether a begun set is gone on with.
        survey: `(rows)` -> the clips of these rows of `entries`, or why they cannot be used.
        fit: `(placed clips)` -> what saves the models in a folder that the set makes itself.
        open: `(folder of the set, clip by clip)` -> the function of a clip: its sample, and how well its latents give
            it again, in dB, or None. `clip by clip(row)` is to be called before a clip is read.
    """

    entries: Sequence[Entry]
    record: dict[str, Any]
    kind: RowType
    survey: Callable[[Sequence[int]], dict[int, Clip | Unusable]]
    fit: Callable[[Mapping[int, Clip | Unusable]], Callable[[Path], None]]
    open: Callable[[Path, Callable[[int], None]], Encoder]

    @property
    def parts(self) -> list[Part]:
        """The parts of the set."""
        return parts_of(len(self.entries), self.record["settings"]["clips_per_file"])


@dataclasses.dataclass(frozen=True)
class How:
    """How a set is made, see `run.preprocess`."""

    overwrite: bool = False
    strict: bool = False
    retry_unusable: bool = False
    rank: int = 0
    world: int = 1
    log: Callable[[str], None] = print
    stop: Sequence[int] = ()


def make_set(job: Job, output: Path, how: How) -> Outcome:
    """Makes the parts of a set that belong to `how.rank` and are not there, and completes it when all are.

    Raises:
        UserError: a folder that is no set, or another set; no usable clip; a file that cannot be written.
        Stopped: a signal, see `train.preprocess.stop`.
    """
    record, entries, parts = job.record, job.entries, job.parts
    started = opened(output, record, how.overwrite, how.world)
    if started is not None:
        record = started
    mine = [part for part in parts if part.number % how.world == how.rank]
    with clips_counted(output, parts, started is not None):
        todo = mine if started is None else owed(output, mine, entries, how.retry_unusable, how.log)
        rows = range(len(entries)) if how.strict else [row for part in todo for row in range(part.first, part.stop)]
        placed = job.survey(rows) if rows else {}
        check_usable(placed, started is None and how.world == 1, how.strict)
        if started is None:
            record = create(output, record, job.fit(placed), alone=how.world == 1)
    with clips_counted(output, parts, True):
        if todo:
            record = {**record, "complete": False}
            write_if_new(output / MANIFEST, record)
            make_parts(job, output, todo, placed, how)
        done = finish(output, record, entries, parts, strict=how.strict)
    if done is not None:
        return done
    own = merged([report for part in mine if (report := read_report(output, part)) is not None])
    return outcome(own, sum(part.stop - part.first for part in mine), False)


@contextlib.contextmanager
def clips_counted(output: Path, parts: Sequence[Part], begun: bool) -> Iterator[None]:
    """Notes in a Stopped how many clips are in finished parts of the set, whoever made them, if the set is `begun`."""
    try:
        yield
    except Stopped as stopped:
        if begun:
            size = lambda part: part.stop - part.first  # noqa: E731
            stopped.clips = sum(map(size, parts))
            stopped.done = sum(size(part) for part in parts if read_report(output, part) is not None)
        raise


# --- before anything is written -------------------------------------------------------------------------------


def opened(output: Path, record: dict[str, Any], overwrite: bool, world: int) -> dict[str, Any] | None:
    """The record of a set to go on with; None where there is none, or one to be replaced.

    Raises UserError for a folder that holds something else or cannot be written, and for a set of other settings,
    models or metadata, listing what differs.
    """
    check_target(output / MANIFEST)
    # Other ranks may be at work: temporary names begin with a dot, and the record comes after the stand-in.
    begun = {"text_encoder"} if world > 1 else set()
    names = {p.name for p in output.iterdir()} if output.is_dir() else set()
    held = [name for name in names if not name.startswith(".") and name not in begun]
    found = read_record(output)
    if found is None and held:
        raise UserError(f"{output}: already exists and is not a preprocessed set; give another --output")
    if found is None:
        return None
    other = differences(found, record)
    if not overwrite:
        raise_faults(f"{output}: already holds another set; give another --output, or --overwrite", other)
    if overwrite and (other or found["complete"]):
        if world > 1:
            raise UserError(f"{output}: {world} processes cannot replace a set: remove it first")
        return None
    return found


def owed(
    output: Path, mine: Sequence[Part], entries: Sequence[Entry], retry_unusable: bool, log: Callable[[str], None]
) -> list[Part]:
    """The parts to make: unfinished ones, those with edited clips, and with `retry_unusable` those with unusable ones.

    A repaired clip that had been unusable counts as one of the last, not as edited.
    """
    reports = {part: read_report(output, part) for part in mine}
    rows = {part: [] if report is None else edited(report, entries) for part, report in reports.items()}
    names = [entries[row].name for found in rows.values() for row in found]
    if names:
        shown = ", ".join(names[:LISTED]) + (" ..." if len(names) > LISTED else "")
        parts = counted(sum(map(bool, rows.values())), "part")
        log(f"{counted(len(names), 'clip')} changed since being encoded, so {parts} will be made again: {shown}")
    retried = lambda report: retry_unusable and len(report.unusable) > 0  # noqa: E731
    return [part for part, report in reports.items() if report is None or rows[part] or retried(report)]


def check_usable(placed: dict[int, Clip | Unusable], all_new: bool, strict: bool) -> None:
    """Refuses clips of which none is usable when they are `all_new`, a whole set; with `strict` any unusable one."""
    unusable = [clip for clip in placed.values() if isinstance(clip, Unusable)]
    if strict or (all_new and len(unusable) == len(placed)):
        raise_faults(f"{len(unusable)} of {counted(len(placed), 'clip')} cannot be used", listed(unusable))


# --- making a set ---------------------------------------------------------------------------------------------


def create(output: Path, record: dict[str, Any], save: Callable[[Path], None], *, alone: bool) -> dict[str, Any]:
    """Begins a set: the models made here, which `save` writes, and its record. Returns the record.

    `alone`, the folder appears at once, in place of an older one; else other ranks may write the same files there.
    """
    own = [name for name in MODELS if record["models"].get(name) == {"folder": name}]

    def begin(folder: Path) -> dict[str, Any]:
        begun = {**record, "models": dict(record["models"])}
        save(folder)
        for name in own:
            begun["models"][name] = model_entry(folder / name, name)
        write_json(folder / MANIFEST, begun)
        return begun

    with disk_faults(output, "nothing was begun"):
        if not alone:
            return begin(output)
        with atomic_folder(output) as part:
            return begin(part)


def make_parts(
    job: Job, output: Path, todo: Sequence[Part], placed: Mapping[int, Clip | Unusable], how: How
) -> None:
    """Writes parts of a set, with the models in memory throughout."""
    clips = [placed[row] for part in todo for row in range(part.first, part.stop)]
    numbers = {clip.row: i for i, clip in enumerate(clips)}
    with progress("encoding", len(clips), "clips") as update:

        def begun(row: int) -> None:
            update(numbers[row])
            if how.stop:
                raise Stopped(how.stop[0])

        encode, done = job.open(output, begun), 0
        for part in todo:
            mine = clips[done : done + part.stop - part.first]
            write_part(output, part, mine, encode, job.kind, job.record["settings"]["rows_per_group"],
                       strict=how.strict)  # fmt: skip
            update(done := done + len(mine))
