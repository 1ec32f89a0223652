"""From a recipe to everything a run needs, with every fault found before the first expensive step."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core import devices, keys, specs
from core.checkpoint import LazyLeaf, LazyTree
from core.errors import UserError, named, nearest_names, raise_faults
from core.files import check_target
from core.rules import cast
from core.transforms import apply
from core.trees import Params
from kernels import explain_attention
from nn.config_files import parse_config
from nn.run import Run
from parallel.launch import World, agreed
from parallel.mesh import Mesh
from parallel.units import Sharded, fill
from train import state as states
from train.components import Components, find_components, strides
from train.config import LTX2, Recipe, Wan
from train.data import Dataset, common_shape, first_fps
from train.families import FAMILIES, Family, family_of
from train.layout import check_layout, layers_run, mesh_of, microbatch_size, sharded_model, stored_specs
from train.optim import FUSED_DEVICES, adamw_init
from train.precision import FLOATS
from train.recipe_data import check_data, check_models, fingerprint, open_recipe_data
from train.state import TrainState

Role = Wan | LTX2


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a run is made of.

    `frozen` are keys of leaves that are not updated, `empty` what caption dropout puts in (`{channel: [L, D]}`),
    `defaults` what an export notes for sampling, `notes` what a checkpoint notes of the model beside its config.
    """

    recipe: Recipe
    family: Family
    mesh: Mesh
    device: torch.device
    compute: torch.dtype
    cfg: Any
    frozen: frozenset[str]
    dataset: Dataset
    components: Components
    objective: Any
    run: Run
    empty: dict[str, Tensor]
    defaults: Any
    notes: dict[str, Any]
    fingerprint: str  # of the data

    @property
    def microbatch(self) -> int:
        """Samples of a microbatch over all processes."""
        return microbatch_size(self.recipe, self.mesh)

    def record(self) -> dict[str, Any]:
        """What a checkpoint notes beside the tensors: for the export, and for a resuming run to compare."""
        folders = {k: None if p is None else str(p.resolve()) for k, p in self.components.folders.items()}
        return {
            "config": self.family.to_json(self.cfg),
            "sampling": dataclasses.asdict(self.defaults),
            **folders,
            **self.notes,
            "data": {
                "samples": len(self.dataset),
                "fingerprint": self.fingerprint,
                "streaming": order_of(self.dataset),
            },
            "threads": torch.get_num_threads(),
        }


def order_of(dataset: Dataset) -> dict[str, Any] | None:
    """What the order of a stream depends on beside the data; None for a map (as in records before streams)."""
    how = dataset.streaming
    return None if how is None else {"shuffle_row_groups": how.shuffle_row_groups}


# --- the model ------------------------------------------------------------------------------------------------


def check_capability(recipe: Recipe, cfg: Any) -> None:
    """Refuses a row type that the kind of model, or this model, cannot be trained with."""
    family, kind = family_of(recipe), recipe.training.data.preprocessed_data_type
    title = f"training.data.preprocessed_data_type: {kind}"
    if kind not in family.row_types:
        able = ", ".join(family.row_types)
        raise UserError(f"{title} cannot train {family.name} with method {recipe.method.target}; it takes: {able}")
    raise_faults(f"{title} does not fit this model", family.row_faults(cfg, kind))


def model_config(role: Role, where: str) -> Any:
    """The architecture of a role: `init_from`'s or the preset's, with the `config` overrides on top.

    Raises:
        UserError: no source, unknown preset or field, or values that the model refuses.
    """
    faults, family = [], FAMILIES[role.target]
    if role.init_from is not None and (role.preset is not None or role.config):
        faults.append(f"{where}.init_from brings its own architecture: leave out preset and config")
    if role.preset is not None and role.preset not in family.presets:
        hint = nearest_names(role.preset, family.presets)
        faults.append(f"{where}.preset {role.preset!r} is unknown{hint}; allowed: {', '.join(family.presets)}")
    if role.init_from is None and role.preset is None and not role.config:
        faults.append(f"{where}: one of init_from, preset or config is needed")
    raise_faults("the model cannot be built", faults)
    if role.init_from is not None:
        with named(f"{where}.init_from"):
            return family.open_transformer(Path(role.init_from) / "transformer", role)[1]
    base = {} if role.preset is None else dataclasses.asdict(family.presets[role.preset])
    return parse_config(family.config, {**base, **role.config, **family.given(role)}, f"{where}.config")


def starting_params(role: Role, cfg: Any, seed: int, dtype: torch.dtype, device, *, packed: bool = False) -> Params:
    """Weights of `init_from`, or fresh ones from the seed, in the stored dtype (float32 tables stay float32)."""
    return starting_tree(role, cfg, seed, dtype, packed=packed).read(device=device)


def starting_tree(role: Role, cfg: Any, seed: int, dtype: torch.dtype, *, packed: bool = False) -> LazyTree:
    """The weights that training starts from, not read or drawn yet; each leaf depends on the seed and its key alone.

    `packed` joins the projections of attention.
    """
    family = FAMILIES[role.target]
    model_specs = family.param_specs(cfg)
    if role.init_from is not None:
        tree, _ = family.open_transformer(Path(role.init_from) / "transformer", role)
        tree = apply(tree, cast(dtype, keep_fp32=lambda k: model_specs[k].keep_fp32)(tree.specs))
    else:
        tree = fresh_tree(model_specs, seed, dtype)
    return apply(tree, family.pack(cfg)(tree.specs)) if packed else tree


def fresh_tree(model_specs: specs.Specs, seed: int, dtype: torch.dtype) -> LazyTree:
    """Leaves that are drawn when they are read."""
    root = keys.fold_in(keys.key(seed), "init")

    def leaf(k: str, spec: specs.ParamSpec) -> LazyLeaf:
        stored = dataclasses.replace(spec, dtype=torch.float32 if spec.keep_fp32 else dtype)
        return LazyLeaf(spec.shape, stored.dtype, lambda memo: specs.draw(stored, keys.fold_in(root, k)))

    return LazyTree({k: leaf(k, s) for k, s in model_specs.items()}, {})


def check_kernels(recipe: Recipe, cfg: Any, device: torch.device, compute: torch.dtype) -> None:
    """Refuses an attention backend or an optimiser kernel that was asked for and that this device cannot run."""
    faults, backend, family = [], recipe.models.student.attention_backend, family_of(recipe)
    for heads, size in () if backend == "auto" else family.heads(cfg).values():
        q = torch.empty(1, 1, heads, size, dtype=compute, device=device)
        if (reason := explain_attention(q)[backend]) != "usable":
            faults.append(f"models.student.attention_backend: {backend} cannot run here: {reason}")
    if recipe.training.optimizer.fused and device.type not in FUSED_DEVICES:
        faults.append(f"training.optimizer.fused: there is no fused AdamW on {device.type}; use null or false")
    raise_faults("kernels that cannot be used", dict.fromkeys(faults))


# --- the data -------------------------------------------------------------------------------------------------


def sampling_defaults(recipe: Recipe, cfg: Any, dataset: Dataset, components: Components, empty: Params) -> Any:
    """What an export notes: geometry and rate of the data's most common shape, text length, validation's sampling.

    Of sound alone the geometry is its number of `latents`.
    """
    family, geometry = family_of(recipe), {"fps": first_fps(dataset)}
    if family.video(cfg) is None:
        geometry["latents"] = common_shape(dataset)[1]
    else:
        _, t, h, w = common_shape(dataset)
        spatial, temporal = strides(components, family, cfg)
        geometry |= {"num_frames": temporal * (t - 1) + 1, "height": h * spatial, "width": w * spatial}
    return family.defaults(recipe, cfg, geometry, empty)


# --- all of it ------------------------------------------------------------------------------------------------


def check_output_dir(recipe: Recipe) -> None:
    """Refuses an output folder that cannot be written, or that holds anything but the past of this run.

    Its past is what led to the checkpoint to resume from: later checkpoints in the folder belong to another
    course of the run, and `latest` and the limit on checkpoints would mix the two.
    """
    checkpoint = recipe.training.checkpoint
    folder, asked = Path(checkpoint.output_dir), checkpoint.resume_from_checkpoint
    check_target(folder / "config.yaml")
    source = None if asked is None else states.find(folder, asked)
    holds = [n for n in ("config.yaml", "metrics.jsonl", "checkpoints") if (folder / n).exists()]
    found = states.checkpoints(folder)
    if source is not None and source.resolve().parent.parent == folder.resolve():
        later = [p.name for p in found if states.step_of(p) > states.step_of(source)]
        if later:
            raise UserError(
                f"training.checkpoint.output_dir: {folder} holds later checkpoints than {source.name}: "
                f"{', '.join(later)}; move them away, or choose another folder"
            )
    elif holds:
        go_on = "continue it with --training.checkpoint.resume_from_checkpoint latest"
        raise UserError(
            f"training.checkpoint.output_dir: {folder} already holds a run ({', '.join(holds)}); choose another "
            f"folder, or {go_on if found else 'remove this one, which has no checkpoint'}"
        )


def prepare(recipe: Recipe, world: World | None = None) -> Setup:
    """Checks the whole recipe against its files and the machine; no weights are read or made yet.

    Collective over the processes of `world`; None: a process alone.
    """
    student, training = recipe.models.student, recipe.training
    if world is None:
        with named("training.device"):
            world = World(0, 1, 0, devices.resolve(training.device))
    mesh = mesh_of(recipe, world)
    agreed(lambda: check_output_dir(recipe), mesh)
    if not student.trainable:
        raise UserError("models.student.trainable: false leaves nothing to train with method sft")
    device = mesh.device
    cfg = model_config(student, "models.student")
    family = family_of(recipe)
    check_capability(recipe, cfg)
    check_layout(recipe, cfg, mesh)
    dataset = open_data(recipe, cfg, mesh)
    asked = training.compute_dtype
    compute = devices.default_compute_dtype(device) if asked is None else FLOATS[asked]
    components = find_components(recipe, cfg, device, compute)
    check_data(recipe, cfg, dataset, components)
    check_models(recipe, components)
    check_kernels(recipe, cfg, device, compute)
    empty = family.empty_caption(recipe, cfg, components.text)
    return Setup(
        recipe=recipe,
        family=family,
        mesh=mesh,
        device=device,
        compute=compute,
        cfg=cfg,
        frozen=family.frozen(student, cfg),
        dataset=dataset,
        components=components,
        objective=family.objective(recipe, cfg),
        run=layers_run(recipe, mesh),
        empty=empty,
        defaults=sampling_defaults(recipe, cfg, dataset, components, empty),
        notes=family.notes(recipe, cfg),
        fingerprint=fingerprint(dataset),
    )


def open_data(recipe: Recipe, cfg: Any, mesh: Mesh) -> Dataset:
    """The data set of a recipe. The first process makes an index that is missing, before the others look for it."""
    data, streams = recipe.training.data, family_of(recipe).streams(cfg)
    with named("training.data.data_path"):
        if mesh.world > 1 and data.streaming_manifest_path is not None:
            agreed(lambda: len(open_recipe_data(data, mesh.device, streams)), mesh)
        log = print if mesh.leader else lambda text: None
        return open_recipe_data(data, mesh.device, streams, once=lambda choose: agreed(choose, mesh), log=log)


# --- the state ------------------------------------------------------------------------------------------------


def initial_state(setup: Setup) -> TrainState:
    """A fresh state on the run's device: weights, zero moments, and the EMA as a copy where one is kept.

    On a mesh of several processes each makes or reads its own shards, one leaf at a time.
    """
    training = setup.recipe.training
    start = (setup.recipe.models.student, setup.cfg, training.data.seed, FLOATS[training.dit_precision])
    packed = training.model.pack_attention_projections
    if setup.mesh.world == 1:
        return _state(setup, starting_params(*start, setup.device, packed=packed))
    sharded = sharded_model(setup.recipe, setup.cfg, setup.mesh, setup.compute)
    fill(sharded.params, starting_tree(*start, packed=packed))
    return _state(setup, sharded.params, sharded)


def blank_state(setup: Setup, device: torch.device | str) -> TrainState:
    """A state with weights that are not set, for a checkpoint to fill; on `meta` it takes no memory, and is whole."""
    if setup.mesh.world > 1 and torch.device(device).type != "meta":
        sharded = sharded_model(setup.recipe, setup.cfg, setup.mesh, setup.compute)
        return _state(setup, sharded.params, sharded)
    leaf = lambda s: torch.empty(s.shape, dtype=s.dtype, device=device)  # noqa: E731
    return _state(setup, {k: leaf(s) for k, s in stored_specs(setup.recipe, setup.cfg).items()})


def _state(setup: Setup, params: Params, sharded: Sharded | None = None) -> TrainState:
    if sharded is None:
        params = {k: p.requires_grad_(k not in setup.frozen) for k, p in params.items()}
    ema = None
    if setup.recipe.callbacks.ema is not None:
        ema = {k: p.detach().float().clone() for k, p in params.items()}
    key = keys.key(setup.recipe.training.data.seed)
    moments = adamw_init({k: p for k, p in params.items() if p.requires_grad})
    return TrainState(params, moments, ema, step=0, position=0, key=key, sharded=sharded)
