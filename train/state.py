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
from core.checkpoint import open_checkpoint
from core.errors import UserError, raise_faults
from core.files import atomic_folder, read_json, write_json
from core.save import SCHEMA_VERSION, check_metadata, describe, save_checkpoint, save_file
from core.specs import check, specs_of
from core.trees import Params
from train.optim import OptState

NAME = re.compile(r"step-(\d{6,})")
RECORD = "checkpoint.json"
SCALARS = "scalars.safetensors"
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
            write_json(part / RECORD, {"schema_version": SCHEMA_VERSION, **record})
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
    """`checkpoint.json`. Raises UserError for a newer schema."""
    record = read_json(folder / RECORD)
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(f"{folder / RECORD}: schema_version {version!r}, this version reads {SCHEMA_VERSION}")
    return record


def differences(saved: Mapping[str, Any], ours: Mapping[str, Any], section: str) -> list[str]:
    """What a checkpoint notes otherwise than this run, key by key."""
    a, b = saved[section], ours[section]
    return [
        f"{section}.{k}: the checkpoint has {a.get(k)!r}, this run {b.get(k)!r}"
        for k in dict.fromkeys([*a, *b])
        if a.get(k) != b.get(k)
    ]


@torch.no_grad()
def load_into(state: TrainState, folder: Path, record: Mapping[str, Any], *, weights_only: bool) -> None:
    """Fills `state` in place from a checkpoint.

    Args:
        record: of the run that resumes; its `config` must be the checkpoint's, and its `data` too, since the
            data position belongs to them.
        weights_only: take params and the EMA (without one in the checkpoint it starts anew from the params),
            and leave step, data position and optimiser as they start.

    Raises:
        UserError: another model, data or seed, damaged or missing files, keys or shapes that differ: all in
            one message, before `state` is touched.
    """
    saved = read_record(folder)
    faults = differences(saved, record, "config")
    faults += [] if weights_only else differences(saved, record, "data")
    wanted = groups(state)
    if weights_only:
        wanted = {k: v for k, v in wanted.items() if k == "params" or (k == "ema" and (folder / k).is_dir())}
    trees = {}
    for name, tree in wanted.items():
        try:
            trees[name] = open_checkpoint(folder / name)
            check_metadata(trees[name], MODEL_TYPE)
            check(trees[name], specs_of(tree), what=f"{folder / name}", dtypes=True)
        except UserError as error:
            faults.append(str(error))
    scalars = None
    if not weights_only:
        try:
            scalars = open_checkpoint(folder / SCALARS).read(["step", "position", "key"])
            if keys.from_tensor(scalars["key"]) != state.key:
                faults.append("training.data.seed: the checkpoint was made with another seed")
        except UserError as error:
            faults.append(str(error))
    raise_faults(f"{folder}: this checkpoint cannot be resumed (weights_only: true needs only params/)", faults)
    for name, tree in wanted.items():
        for k, leaf in tree.items():
            leaf.copy_(trees[name][k].read())
    if state.ema is not None and "ema" not in wanted:
        for k, leaf in state.ema.items():
            leaf.copy_(state.params[k])
    if scalars is not None:
        state.step, state.position = int(scalars["step"]), int(scalars["position"])
