"""`preprocess.json`: what a set was made with. A set that is unfinished, or was made with other models than a run
uses, is refused by it. Sets without it (published ones) are taken as they are.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import torch

from core.errors import UserError, raise_faults
from core.save import describe
from infer import gemma
from infer.encoders import CLIP_VISION, UMT5, read_mapping
from infer.folder import COMPANIONS
from nn import ltx2_fastvideo
from train.preprocess.metadata import Entry, digest
from train.preprocess.models import BESIDE, CONFIG, Sources, stand_ins
from train.preprocess.parts import parts_of, read_report
from train.preprocess.settings import Settings, noted
from train.preprocess.stamps import sampled

MANIFEST = "preprocess.json"
VERSION = 1
MODELS = ("vae", "text_encoder", "image_encoder", "audio_vae", "connectors")
WEIGHTS, SMALL = (".safetensors",), (".json", ".model", ".txt")
TOKENIZER, PROCESSOR = COMPANIONS["text_encoder"][0], COMPANIONS["image_encoder"][0]
WITH = {UMT5: TOKENIZER, **dict.fromkeys(gemma.MODEL_TYPES, TOKENIZER), CLIP_VISION: PROCESSOR}


# --- fingerprints ---------------------------------------------------------------------------------------------


def _header(path: Path) -> tuple[int, bytes]:
    """Where the tensors of a safetensors file begin, and its header without the notes of whoever wrote it."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(min(length, path.stat().st_size)))
        entries.pop("__metadata__", None)
    except (struct.error, ValueError, AttributeError):
        raise UserError(f"{path}: not a safetensors file, or cut short") from None
    return 8 + length, json.dumps(entries, sort_keys=True).encode()


def fingerprint(folder: str | Path) -> str:
    """Of a model's folder: its config, names, sizes and sampled contents of its weights, and the tokenizer or image
    processor beside it; of FastVideo's text encoder Gemma's too. It does not change when the folder is copied or moved,
    and takes a fraction of a second.
    """
    folder, out = Path(folder), hashlib.blake2b(digest_size=16)
    config = read_mapping(folder / CONFIG)
    out.update(json.dumps(config, sort_keys=True).encode())
    beside, weights = folder.parent / WITH.get(config.get("model_type"), ""), [folder]
    if ltx2_fastvideo.is_text_encoder(config):
        beside = ltx2_fastvideo.tokenizer_folder(folder)
        weights += [place for place in [ltx2_fastvideo.gemma_folder(folder)] if place.is_dir()]
    files = [f for place in weights for f in sorted(place.iterdir()) if f.suffix in WEIGHTS]
    if beside != folder.parent and beside.is_dir():
        files += [f for f in sorted(beside.iterdir()) if f.suffix in SMALL]
    for file in files:
        begin = _header(file) if file.suffix in WEIGHTS else (0, b"")
        out.update(file.name.encode() + sampled(file, *begin))
    return out.hexdigest()


def model_entry(folder: Path, noted: str | None = None) -> dict[str, str]:
    """A model in the record; `noted` is its place inside the set, else the folder's own is noted."""
    config = read_mapping(folder / CONFIG)
    name = config.get("_class_name", config.get("model_type", next(iter(config.get("architectures", [])), None)))
    return {
        "class": str(name),
        "folder": str(folder.resolve()) if noted is None else noted,
        "fingerprint": fingerprint(folder),
    }


# --- one set --------------------------------------------------------------------------------------------------


def identity(entries: Sequence[Entry], settings: Settings, sources: Sources, device: torch.device) -> dict[str, Any]:
    """The record of a set to be made of clips. Models that it makes itself stand by their place in the set only."""
    made = [name for name in stand_ins(settings.row_type) if getattr(sources, name) is None]
    return new_record(settings.row_type, noted(settings, Settings, settings.row_type), sources, made, entries, device)


def new_record(
    row_type: str,
    settings: Mapping[str, Any],
    sources: Sources,
    made: Sequence[str],
    entries: Sequence[Entry],
    device: torch.device,
) -> dict[str, Any]:
    """The record of a set that was just begun; `made` are the models that it makes itself."""
    models: dict[str, Any] = {}
    for name in MODELS:
        folder = getattr(sources, name)
        if folder is not None:
            models[name] = model_entry(folder)
        elif name in made:
            models[name] = {"folder": name}
    return {
        "version": VERSION,
        "row_type": row_type,
        "complete": False,
        "settings": dict(settings),
        "models": models,
        "metadata": {"clips": len(entries), "digest": digest(entries)},
        "device": device.type,
        "versions": {
            "latentree": describe(row_type, {})["project_version"],
            "torch": str(torch.__version__),
            "av": av.__version__,
        },
    }


def _model_differs(recorded: Any, wanted: Any) -> bool:
    if recorded is None or wanted is None:
        return recorded is not wanted
    key = "fingerprint" if "fingerprint" in wanted else "folder"
    return recorded.get(key) != wanted[key]


def differences(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What keeps a set from being continued with other settings, models or metadata, each with both values."""
    if recorded.get("version") != VERSION:
        return [f"version: recorded {recorded.get('version')}, this one writes {VERSION}"]
    pairs = {"row_type": (recorded["row_type"], wanted["row_type"])}
    for group in ("settings", "metadata"):
        pairs |= {f"{group}.{k}": (recorded[group].get(k), v) for k, v in wanted[group].items()}
    out = [f"{name}: recorded {a!r}, now {b!r}" for name, (a, b) in pairs.items() if a != b]
    for name in MODELS:
        a, b = (record["models"].get(name) for record in (recorded, wanted))
        if _model_differs(a, b):
            out.append(f"models.{name}: recorded {_shown(a)}, now {_shown(b)}")
    return out


def _shown(entry: Mapping[str, str] | None) -> str:
    if entry is None:
        return "none"
    if "fingerprint" not in entry:
        return "one made here"
    return f"{entry['class']} {entry['fingerprint'][:12]} ({entry['folder']})"


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a set; None where there is none."""
    path = folder / MANIFEST
    return read_mapping(path) if path.is_file() else None


# --- sets that are read ---------------------------------------------------------------------------------------


def check_complete(files: Iterable[Path]) -> None:
    """Refuses Parquet files of a set that is not finished, or of which parts are gone: its record stands beside them
    or one folder above."""
    faults = []
    for folder in sorted({above for file in files for above in (file.parent, file.parent.parent)}):
        record = read_record(folder)
        if record is None:
            continue
        parts = parts_of(record["metadata"]["clips"], record["settings"]["clips_per_file"])
        gone = [part.name for part in parts if read_report(folder, part) is None]
        if gone or not record["complete"]:
            faults.append(f"{folder}" + (f": {', '.join(gone[:8])}{' ...' if len(gone) > 8 else ''}" if gone else ""))
    go_on = "run the same `python -m train.preprocess` again: it makes the parts that are missing"
    raise_faults(f"sets that are not finished ({go_on})", faults)


def sets_of(roots: Iterable[Path]) -> list[Path]:
    """The folders of the sets with a record behind data paths: at a path, up to two folders above it, or below."""
    found = []
    for root in roots:
        near = [p for p in (root, root.parent, root.parent.parent) if (p / MANIFEST).is_file()]
        below = sorted(p.parent for p in root.rglob(MANIFEST)) if root.is_dir() and not near else []
        found += near[:1] or below
    return list(dict.fromkeys(found))


def recorded_models(roots: Iterable[Path], name: str) -> list[tuple[Path, dict[str, str]]]:
    """`(set, entry)` for every set behind the data paths that records the model `name`."""
    entries = [(folder, read_record(folder).get("models", {}).get(name)) for folder in sets_of(roots)]
    return [(folder, entry) for folder, entry in entries if entry is not None]


def recorded_folders(roots: Iterable[Path], name: str) -> list[Path]:
    """Where the sets behind the data paths found their model `name`, or what it stands beside; folders that are gone
    are left out.
    """
    recorded = recorded_models(roots, name if name in MODELS else BESIDE.get(name, name))
    found = [folder / entry["folder"] for folder, entry in recorded]
    found = found if name in MODELS else [folder.parent / name for folder in found]
    return [folder for folder in found if (folder / CONFIG).is_file()]


def check_models(roots: Iterable[Path], folders: Mapping[str, Path | None]) -> None:
    """Refuses sets that were made with other models than each other, or than a run uses.

    Args:
        roots: data paths; sets without a record are taken as they are.
        folders: the run's models by their names in MODELS; None or absent for those that it has not.

    Raises:
        UserError: one message naming each such set with what it records and what was found.
    """
    roots, faults = list(roots), []
    for name in MODELS:
        recorded = recorded_models(roots, name)
        if not recorded:
            continue
        folder, (first, expected) = folders.get(name), recorded[0]
        own, origin = expected["fingerprint"], f"{first} records {_shown(expected)}"
        if folder is not None:
            own, origin = fingerprint(folder), f"the run uses {_shown(model_entry(folder))}"
        faults += [
            f"{name}: {where} records {_shown(entry)}, but {origin}"
            for where, entry in recorded
            if entry["fingerprint"] != own
        ]
    raise_faults("data that were made with other models", faults)
