"""The train state: one tree of tensors, saved as safetensors folders and read back bit for bit.

    checkpoints/step-000100/
        params/ optimizer/ ema/     diffusion_pytorch_model*.safetensors
        scalars.safetensors         step, key, data position
        checkpoint.json             schema version, model config, sampling defaults, what the latents were made with
"""

import dataclasses
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core import keys
from core.checkpoint import LazyTree, open_checkpoint
from core.errors import UserError, raise_faults
from core.files import atomic_folder, read_json, write_json
from core.save import SCHEMA_VERSION, check_metadata, describe, save_checkpoint, save_file
from core.specs import check, specs_of
from core.trees import Params
from train.optim import OptState

NAME = re.compile(r"step-(\d{6,})")
RECORD = "checkpoint.json"
SCALARS = "scalars.safetensors"
ENTRIES = ("step", "config", "sampling", "vae", "text_encoder", "data", "threads")
MODEL_TYPE = "WanTransformer3DModel"


@dataclasses.dataclass
class TrainState:
    """Everything that decides the rest of a run. Trees are updated in place; the scalars are replaced.

    `step` counts optimiser steps done, `position` microbatches drawn, `key` is the root of all draws.
    """

    params: Params
    optimizer: OptState
    ema: Params | None
    step: int
    position: int
    key: keys.Key


def folder_of(output_dir: str | Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return Path(output_dir) / "checkpoints" / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """The optimiser step of a checkpoint folder, from its name. Raises UserError for another name."""
    match = NAME.fullmatch(folder.name)
    if match is None:
        raise UserError(f"{folder}: expected a folder called step-NNNNNN")
    return int(match[1])


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    parent = Path(output_dir) / "checkpoints"
    found = [p for p in parent.iterdir() if NAME.fullmatch(p.name)] if parent.is_dir() else []
    return sorted(found, key=step_of)


def save(output_dir: str | Path, state: TrainState, record: Mapping[str, Any], *, keep: int) -> Path:
    """Writes a checkpoint that appears whole, then removes all but the newest `keep` (0 keeps all).

    Raises:
        UserError: a full disk; the older checkpoints are untouched.
    """
    folder = folder_of(output_dir, state.step)
    scalars = {
        "step": torch.tensor(state.step, dtype=torch.int64),
        "position": torch.tensor(state.position, dtype=torch.int64),
        "key": keys.to_tensor(state.key),
    }
    metadata = describe(MODEL_TYPE, record["config"])
    try:
        with atomic_folder(folder) as part:
            for name, tree in groups(state).items():
                save_checkpoint(part / name, tree, metadata=metadata)
            save_file(part / SCALARS, scalars, metadata)
            write_json(part / RECORD, {"schema_version": SCHEMA_VERSION, "step": state.step, **record})
    except OSError as error:
        raise UserError(f"{folder}: the checkpoint could not be written ({error}); older ones are untouched") from None
    for old in checkpoints(output_dir)[:-keep] if keep > 0 else []:
        shutil.rmtree(old)
    return folder


def groups(state: TrainState) -> dict[str, Mapping[str, Tensor]]:
    """The trees of a state by folder name."""
    out = {"params": state.params, "optimizer": state.optimizer}
    return out if state.ema is None else {**out, "ema": state.ema}


def find(output_dir: str | Path, which: str) -> Path:
    """The checkpoint that `latest` or a path names. Raises UserError when there is none."""
    if which != "latest":
        folder = Path(which)
        if not (folder / RECORD).is_file():
            raise UserError(f"training.checkpoint.resume_from_checkpoint: {which} is not a checkpoint folder")
        return folder
    found = checkpoints(output_dir)
    if not found:
        parent = Path(output_dir) / "checkpoints"
        raise UserError(f"training.checkpoint.resume_from_checkpoint: no checkpoint in {parent}")
    return found[-1]


def read_record(folder: Path) -> dict[str, Any]:
    """`checkpoint.json`. Raises UserError for another schema, and for entries that are missing."""
    record = read_json(folder / RECORD)
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(f"{folder / RECORD}: schema_version {version!r}, this version reads {SCHEMA_VERSION}")
    raise_faults(f"{folder / RECORD}: damaged", [f"missing {k}" for k in ENTRIES if k not in record])
    return record


def differences(saved: Mapping[str, Any], ours: Mapping[str, Any], section: str) -> list[str]:
    """What a checkpoint notes otherwise than this run, key by key."""
    a, b = saved[section], ours[section]
    return [
        f"{section}.{k}: the checkpoint has {a.get(k)!r}, this run {b.get(k)!r}"
        for k in dict.fromkeys([*a, *b])
        if a.get(k) != b.get(k)
    ]


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint that fits: its trees, not read yet, and its scalars (None where only weights are wanted)."""

    folder: Path
    record: dict[str, Any]
    trees: dict[str, LazyTree]
    scalars: Params | None


def open_for(state: TrainState, folder: Path, record: Mapping[str, Any], *, weights_only: bool) -> Opened:
    """Opens a checkpoint and compares it with a state (meta tensors will do); no tensor of a tree is read.

    Args:
        record: of the run that resumes; its `config` must be the checkpoint's, and its `data` too, since the
            data position belongs to them.
        weights_only: take params and the EMA, not step, data position and optimiser.

    Raises:
        UserError: another model, data or seed, damaged or missing files, keys or shapes that differ, in one
            message. Of another model only the entries of its config are listed: its keys say nothing more.
    """
    saved = read_record(folder)
    title = f"{folder}: this checkpoint cannot be resumed (weights_only: true needs only params/)"
    faults = differences(saved, record, "config")
    faults += [] if weights_only else differences(saved, record, "data")
    raise_faults(title, faults)
    wanted = groups(state)
    if weights_only:
        wanted = {k: v for k, v in wanted.items() if k == "params" or (k == "ema" and (folder / k).is_dir())}
    trees, scalars = {}, None
    for name, tree in wanted.items():
        try:
            trees[name] = open_checkpoint(folder / name)
            check_metadata(trees[name], MODEL_TYPE)
            check(trees[name], specs_of(tree), what=f"{folder / name}", dtypes=True)
        except UserError as error:
            faults.append(str(error))
    if not weights_only:
        try:
            scalars = open_checkpoint(folder / SCALARS).read(["step", "position", "key"])
            if keys.from_tensor(scalars["key"]) != state.key:
                faults.append("training.data.seed: the checkpoint was made with another seed")
        except UserError as error:
            faults.append(str(error))
    raise_faults(title, faults)
    return Opened(folder, saved, trees, scalars)


@torch.no_grad()
def fill(state: TrainState, opened: Opened) -> None:
    """Fills a state in place, leaf by leaf. Without an EMA in the checkpoint it starts anew from the params."""
    wanted = groups(state)
    for name, tree in opened.trees.items():
        for k, leaf in wanted[name].items():
            leaf.copy_(tree[k].read())
    if state.ema is not None and "ema" not in opened.trees:
        for k, leaf in state.ema.items():
            leaf.copy_(state.params[k])
    if opened.scalars is not None:
        state.step, state.position = int(opened.scalars["step"]), int(opened.scalars["position"])


def check_weights(state: TrainState, last: Path | None) -> None:
    """Refuses to save weights that are not finite: a step with a finite loss can still leave such.

    Raises:
        UserError: names the step and the first keys, and the last good checkpoint.
    """
    trees = {"params": state.params, **({} if state.ema is None else {"ema": state.ema})}
    bad = [f"{name}/{k}" for name, tree in trees.items() for k in not_finite(tree)]
    if bad:
        kept = "no checkpoint was saved yet" if last is None else f"the last good checkpoint is {last}"
        raise UserError(f"step {state.step}: {len(bad)} leaves are not finite ({', '.join(bad[:3])}, ...); {kept}")


def not_finite(tree: Params) -> list[str]:
    """Keys of leaves with a NaN or an infinity. One copy to the host when all are finite."""
    largest = torch.stack([leaf.detach().abs().max().float() for leaf in tree.values()])
    finite = largest.isfinite()
    return [] if finite.all() else [k for k, ok in zip(tree, finite.tolist(), strict=True) if not ok]
