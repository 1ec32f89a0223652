"""The train state: one tree of tensors, saved as safetensors folders and read back bit for bit on any mesh.

    checkpoints/step-000100/
        params/ optimizer/ ema/     diffusion_pytorch_model*.safetensors of one process, part-*.safetensors of several
        scalars.safetensors         step, key, data position
        checkpoint.json             schema version, model config, sampling defaults, what the latents were made with

Keys and shapes are those of the whole model, whatever it was sharded over.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core import keys
from core.checkpoint import LazyTree, open_checkpoint
from core.errors import UserError, raise_faults
from core.files import clean_up, read_json, remove_folder, write_json
from core.save import check_metadata, describe, save_file
from core.specs import check, specs_of
from core.trees import Params
from parallel import checkpoint, units
from parallel.collectives import all_sum, as_group
from parallel.mesh import AXES, Mesh, single
from parallel.norms import local
from train.migrations import SCHEMA_VERSION, migrated
from train.optim import OptState
from train.packing import repacked

NAME = re.compile(r"step-(\d{6,})")
RECORD = "checkpoint.json"
SCALARS = "scalars.safetensors"
ENTRIES = ("step", "config", "sampling", "vae", "text_encoder", "data", "threads")
MODEL_TYPE = "WanTransformer3DModel"  # of records whose config has no _class_name


@dataclasses.dataclass
class TrainState:
    """Everything that decides the rest of a run. Trees are updated in place; the scalars are replaced.

    `step` counts optimiser steps done, `position` samples drawn by all processes, `key` is the root of all draws.
    `sharded` gathers `params` where they are sharded; None: they are whole.
    """

    params: Params
    optimizer: OptState
    ema: Params | None
    step: int
    position: int
    key: keys.Key
    sharded: units.Sharded | None = None

    @property
    def trained(self) -> Params:
        """The leaves that are updated: those that have a gradient."""
        return {k: p for k, p in self.params.items() if p.requires_grad}

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`fn(params, *args, **kwargs)`, inside the FSDP root where the params are sharded."""
        return fn(self.params, *args, **kwargs) if self.sharded is None else self.sharded(fn, *args, **kwargs)


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


def save(
    output_dir: str | Path,
    state: TrainState,
    record: Mapping[str, Any],
    *,
    keep: int,
    writer: checkpoint.Writer | None = None,
) -> Path:
    """Writes a checkpoint that appears whole, then removes all but the newest `keep` (0 keeps all).

    Args:
        writer: of the mesh that the state lies on; collective over it. One in the background may return before the
            checkpoint is there: `writer.wait()` waits for it. None: a process alone.

    Raises:
        UserError: a full disk, also of the save before where that went on in the background; the older checkpoints are
            untouched.
    """
    folder = folder_of(output_dir, state.step)
    header = {**describe(model_type(record), record["config"]), "step": str(state.step)}
    scalars = {
        "step": torch.tensor(state.step, dtype=torch.int64),
        "position": torch.tensor(state.position, dtype=torch.int64),
        "key": keys.to_tensor(state.key),
    }
    notes = {"schema_version": SCHEMA_VERSION, "step": state.step, **record}

    def complete(part: Path) -> None:
        save_file(part / SCALARS, scalars, header)
        write_json(part / RECORD, notes)

    def remove_old() -> None:
        for old in checkpoints(output_dir)[:-keep] if keep > 0 else []:
            try:
                remove_folder(old)
            except OSError as error:
                raise UserError(f"{folder} is there, but {old} could not be removed: {error}") from None

    duties = checkpoint.Duties(lambda: clean_up(folder.parent, NAME), complete, remove_old)
    writer = checkpoint.Writer(single()) if writer is None else writer
    writer.write(folder, groups(state), metadata=header, duties=duties)
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
    """`checkpoint.json` in today's schema. Raises UserError for an unknown one, and for entries that are missing."""
    record, _ = migrated(read_json(folder / RECORD), None, str(folder / RECORD))
    raise_faults(f"{folder / RECORD}: damaged", [f"missing {k}" for k in ENTRIES if k not in record])
    return record


def model_type(record: Mapping[str, Any]) -> str:
    """The kind of model of a record: the class that its config names."""
    return record["config"].get("_class_name", MODEL_TYPE)


def read_scalars(folder: Path) -> Params:
    """Step, data position and key in today's schema. Raises UserError."""
    scalars = open_checkpoint(folder / SCALARS).read(["step", "position", "key"])
    return migrated(read_json(folder / RECORD), scalars, str(folder / RECORD))[1]


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

    The state may lie on any mesh, and have its projections joined where the checkpoint's are separate, or the reverse.

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
    faults += [] if weights_only else [*_other_frozen(saved, record), *differences(saved, record, "data")]
    raise_faults(title, faults)
    wanted = groups(state)
    if weights_only:
        wanted = {k: v for k, v in wanted.items() if k == "params" or (k == "ema" and (folder / k).is_dir())}
    trees, scalars = {}, None
    for name, tree in wanted.items():
        try:
            found, wanted_specs = open_checkpoint(folder / name), specs_of(tree)
            check_metadata(found, model_type(record))
            faults += _other_step(found, saved["step"], folder / name)
            trees[name] = repacked(found, wanted_specs)
            check(trees[name], wanted_specs, what=f"{folder / name}", dtypes=True)
        except UserError as error:
            faults.append(str(error))
    if not weights_only:
        try:
            scalars = read_scalars(folder)
            if keys.from_tensor(scalars["key"]) != state.key:
                faults.append("training.data.seed: the checkpoint was made with another seed")
        except UserError as error:
            faults.append(str(error))
    raise_faults(title, faults)
    return Opened(folder, saved, trees, scalars)


def _other_frozen(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """A fault where another part of the model was trained: the moments belong to it."""
    a, b = saved.get("frozen"), ours.get("frozen")
    return [] if a == b else [f"models.student.frozen: the checkpoint has {a!r}, this run {b!r}"]


def _other_step(tree: LazyTree, step: int, where: Path) -> list[str]:
    """A fault where a folder was put in from another checkpoint. Older files do not note their step."""
    found = tree.metadata.get("step", str(step))
    return [] if found == str(step) else [f"{where} is of step {found}, {RECORD} of step {step}"]


@torch.no_grad()
def fill(state: TrainState, opened: Opened) -> None:
    """Fills a state in place, leaf by leaf, each process its own shards. Nothing is communicated.

    Without an EMA in the checkpoint it starts anew from the params. The optimiser's step stays on its device.
    """
    wanted = groups(state)
    for name, tree in opened.trees.items():
        units.fill(wanted[name], tree)
    if state.ema is not None and "ema" not in opened.trees:
        for k, leaf in state.ema.items():
            local(leaf).copy_(local(state.params[k]))
    if opened.scalars is not None:
        state.step, state.position = int(opened.scalars["step"]), int(opened.scalars["position"])


def check_weights(state: TrainState, last: Path | None, mesh: Mesh | None = None) -> None:
    """Refuses to save weights that are not finite: a step with a finite loss can still leave such.

    Args:
        last: the last good checkpoint, to be named.
        mesh: that the state is sharded over; collective over it. None: a process alone.

    Raises:
        UserError: names the step and the first keys, on all processes.
    """
    trees = {"params": state.params, **({} if state.ema is None else {"ema": state.ema})}
    bad = not_finite(checkpoint.flat(trees), mesh)
    if bad:
        kept = "no checkpoint was saved yet" if last is None else f"the last good checkpoint is {last}"
        raise UserError(f"step {state.step}: {len(bad)} leaves are not finite ({', '.join(bad[:3])}, ...); {kept}")


def not_finite(tree: Params, mesh: Mesh | None = None) -> list[str]:
    """Keys of leaves with a NaN or an infinity on any process of the mesh. One copy to the host when all are finite."""
    shards = [local(leaf).detach() for leaf in tree.values()]
    worst = [x.abs().max() if x.numel() else x.new_zeros(()) for x in shards]
    bad = torch.stack([x.isfinite().logical_not() for x in worst]).int()
    if mesh is not None:
        bad = all_sum(bad, as_group(mesh.group(*AXES)))
    return [k for k, wrong in zip(tree, bad.tolist(), strict=True) if wrong] if bad.any() else []
