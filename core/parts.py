"""Sharded checkpoints: files that each hold regions of leaves, and the leaves put together from them.

Every file is ordinary safetensors; its metadata say where its tensors lie:

    latentree.part      "2/4": the second of four files
    latentree.regions   JSON, {key: {"at": first index per dimension, "of": shape of the whole leaf}}
"""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from core import regions
from core.errors import UserError
from core.regions import Region
from core.stored import Contents, Stored, read_into

PART, REGIONS = "latentree.part", "latentree.regions"  # named so that no other library's entries are taken for them
SHOWN = 8  # faults of one kind that a message lists


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor begins in a leaf of shape `of`."""

    at: tuple[int, ...]
    of: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Whole:
    """A leaf in pieces: stored tensors, each with its region of the leaf."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Region, Stored], ...]


def part_name(number: int, count: int) -> str:
    """Name of one of `count` files, the first being 1."""
    return f"part-{number:05d}-of-{count:05d}.safetensors"


def part_metadata(places: Mapping[str, Place], number: int, count: int) -> dict[str, str]:
    """What the header of a file says of its tensors."""
    table = {k: {"at": list(p.at), "of": list(p.of)} for k, p in places.items()}
    return {PART: f"{number}/{count}", REGIONS: json.dumps(table)}


def is_part(contents: Contents) -> bool:
    """Whether a file is one of a sharded checkpoint."""
    return PART in contents.metadata or REGIONS in contents.metadata


def read(whole: Whole, where: Region) -> Tensor:
    """A region of a leaf, put together from the pieces that it touches; fresh on the CPU."""
    out = torch.empty(regions.extent(where), dtype=whole.dtype)
    for region, stored in whole.pieces:
        common = regions.overlap(region, where)
        if common is not None:
            read_into(stored, out[regions.relative(common, where)], regions.relative(common, region))
    return out


def assemble(files: Sequence[Contents], damaged: Collection[str]) -> tuple[dict[str, Whole], list[str]]:
    """The leaves of a sharded checkpoint, and what is wrong with it: `(leaves, faults)`.

    `damaged` names files of the same folder that could not be opened. Faults are files that are missing, of another
    save or without readable regions; dtypes or shapes that differ between files; regions that lie outside their leaf,
    overlap, or leave some of it out.
    """
    places, faults = {}, []
    for contents in files:
        try:
            places[contents.file.path] = _places(contents)
        except UserError as error:
            faults.append(str(error))
    missing = _missing_files(files, damaged)
    faults += [*missing, *_other_saves(files)]
    if faults or damaged:
        return {}, faults  # what the leaves lack says nothing more
    found: dict[str, list[tuple[Place, Stored]]] = {}
    for contents in files:
        for key, place in places[contents.file.path].items():
            found.setdefault(key, []).append((place, contents.tensors[key]))
    leaves, kinds = {}, {}
    for key, pieces in found.items():
        fault = _leaf_fault(pieces)
        if fault is None:
            leaves[key] = _whole(pieces)
        else:
            kinds.setdefault(fault[0], []).append(f"{key}: {fault[1]}")
    for lines in kinds.values():
        faults += lines[:SHOWN] + ([f"and {len(lines) - SHOWN} more leaves likewise"] if len(lines) > SHOWN else [])
    return leaves, faults


def _places(contents: Contents) -> dict[str, Place]:
    """The places of a file's tensors. Raises UserError when its metadata do not say them."""
    try:
        table = json.loads(contents.metadata.get(REGIONS, "null"))
        places = {k: Place(tuple(v["at"]), tuple(v["of"])) for k, v in table.items()}
        numbers = [n for p in places.values() for n in (*p.at, *p.of)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{contents.file.path}: its metadata entry {REGIONS!r} is damaged") from None
    if places.keys() != contents.tensors.keys() or not all(type(n) is int and n >= 0 for n in numbers):
        raise UserError(f"{contents.file.path}: its metadata entry {REGIONS!r} does not describe its tensors")
    return places


def _missing_files(files: Sequence[Contents], damaged: Collection[str]) -> list[str]:
    """Faults of the files' numbers: damaged, of different counts, twice, or missing."""
    numbers: dict[int, Contents] = {}
    counts, faults = set(), []
    for contents in files:
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", contents.metadata.get(PART, ""))
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            faults.append(f"{contents.file.path}: its metadata entry {PART!r} is damaged")
            continue
        number, count = int(match[1]), int(match[2])
        counts.add(count)
        if number in numbers:
            faults.append(f"{numbers[number].file.path} and {contents.file.path} are both part {number} of {count}")
        numbers[number] = contents
    if len(counts) > 1:
        faults.append(f"parts of checkpoints of {' and of '.join(map(str, sorted(counts)))} files")
    elif counts and not faults:
        (count,) = counts
        gone = [part_name(n, count) for n in range(1, count + 1) if n not in numbers]
        gone = [name for name in gone if name not in damaged]
        faults += [f"{files[0].file.path.parent}: {name} is missing" for name in gone[:SHOWN]]
        faults += [f"and {len(gone) - SHOWN} more parts"] if len(gone) > SHOWN else []
    return faults


def _other_saves(files: Sequence[Contents]) -> list[str]:
    """Files whose metadata differ from the first one's by more than their regions."""
    faults, first = [], files[0]
    for contents in files[1:]:
        entries = (first.metadata.keys() | contents.metadata.keys()) - {PART, REGIONS}
        differ = sorted(k for k in entries if first.metadata.get(k) != contents.metadata.get(k))
        if differ:
            faults.append(f"{first.file.path} and {contents.file.path} differ in {', '.join(differ)}: of two saves")
    return faults


def _leaf_fault(pieces: Sequence[tuple[Place, Stored]]) -> tuple[str, str] | None:
    """`(kind, description)` of the first thing wrong with the pieces of one leaf, or None."""
    shapes = {(place.of, stored.dtype) for place, stored in pieces}
    if len(shapes) > 1:
        seen = (f"{list(place.of)} {stored.dtype} in {stored.file.path.name}" for place, stored in pieces)
        return "differ", f"its files do not agree: {', '.join(dict.fromkeys(seen))}"
    shape = pieces[0][0].of
    for place, stored in pieces:
        same = len(place.at) == len(stored.shape) == len(shape)
        if not same or any(a + n > s for a, n, s in zip(place.at, stored.shape, shape, strict=True)):
            size, where = list(stored.shape), list(place.at)
            return "outside", f"{size} at {where} in {stored.file.path.name} lies outside its shape {list(shape)}"
    parts = [regions.at(place.at, stored.shape) for place, stored in pieces]
    for i, j in regions.overlaps(parts):
        names = [f"{regions.text(parts[k])} of {pieces[k][1].file.path.name}" for k in (i, j)]
        return "overlap", f"{' and '.join(names)} overlap"
    lacking = regions.uncovered(shape, parts)
    return None if lacking == 0 else ("lacking", f"{lacking} of {_size(shape)} elements are in no file")


def _size(shape: Sequence[int]) -> int:
    return regions.uncovered(shape, ())


def _whole(pieces: Sequence[tuple[Place, Stored]]) -> Whole:
    place, stored = pieces[0]
    return Whole(place.of, stored.dtype, tuple((regions.at(p.at, s.shape), s) for p, s in pieces))
