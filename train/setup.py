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
from infer.folder import Defaults
from kernels import explain_attention
from nn import wan
from nn.config_files import parse_config
from nn.run import Run
from nn.wan_formats import open_transformer, to_json
from parallel.launch import World, agreed
from parallel.mesh import Mesh
from parallel.units import Sharded, fill
from train import state as states
from train.components import VAE_STRIDES, Components, empty_caption, find_components, strides
from train.config import Recipe, Wan
from train.data import Dataset, common_shape, first_fps
from train.layout import check_layout, layers_run, mesh_of, microbatch_size, sharded_model, stored_specs
from train.optim import FUSED_DEVICES, adamw_init
from train.precision import FLOATS
from train.recipe_data import check_data, check_models, fingerprint, open_recipe_data
from train.sft import Objective, image_channels
from train.state import TrainState

# The row types that a method can train a kind of model with.
CAPABILITIES: dict[tuple[str, str], tuple[str, ...]] = {("sft", "wan"): ("t2v", "i2v")}



@dataclasses.dataclass(frozen=True)
class Setup:
    """What a run is made of. `empty` `[L, D]` is the caption that dropout puts in; text is padded to L."""

    recipe: Recipe
    mesh: Mesh
    device: torch.device
    compute: torch.dtype
    cfg: wan.WanConfig
    dataset: Dataset
    components: Components
    objective: Objective
    run: Run
    empty: Tensor
    defaults: Defaults
    fingerprint: str  # of the data

    @property
    def text_length(self) -> int:
        """Tokens to which prompt embeddings are padded."""
        return self.empty.shape[0]

    @property
    def microbatch(self) -> int:
        """Samples of a microbatch over all processes."""
        return microbatch_size(self.recipe, self.mesh)

    def record(self) -> dict[str, Any]:
        """What a checkpoint notes beside the tensors: for the export, and for a resuming run to compare."""
        folder = lambda p: None if p is None else str(p.resolve())  # noqa: E731
        return {
            "config": to_json(self.cfg),
            "sampling": dataclasses.asdict(self.defaults),
            "vae": folder(self.components.vae_folder),
            "text_encoder": folder(self.components.text_folder),
            "image_encoder": folder(self.components.image_folder),
            "expand_timesteps": self.components.expand_timesteps,
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


def check_capability(recipe: Recipe, cfg: wan.WanConfig) -> None:
    """Refuses a row type that the method, the kind of model or this model cannot be trained with."""
    method, student = recipe.method.target, recipe.models.student.target
    kind, able = recipe.training.data.preprocessed_data_type, CAPABILITIES[method, student]
    title = f"training.data.preprocessed_data_type: {kind}"
    if kind not in able:
        raise UserError(f"{title} cannot train {student} with method {method}; it takes: {', '.join(able)}")
    takes = image_channels(cfg)
    if kind == "t2v" and takes:
        raise UserError(
            f"{title} has no image conditions, which this model needs (image_dim, in_channels > out_channels): "
            "use i2v data"
        )
    if kind == "i2v":
        raise_faults(f"{title} does not fit this model", _image_faults(cfg, takes))


def _image_faults(cfg: wan.WanConfig, takes: tuple[str, ...]) -> list[str]:
    if not takes:
        return ["it takes no image (no image_dim, and in_channels = out_channels): use t2v data"]
    faults, channels = [], cfg.out_channels + VAE_STRIDES[1]
    if "first_frame" in takes and cfg.condition_channels != channels:
        faults.append(
            f"in_channels is {cfg.in_channels}, expected {cfg.out_channels + channels}: latents, {VAE_STRIDES[1]} mask "
            "channels, and the first frame's latents"
        )
    if cfg.pos_embed_seq_len is not None:
        faults.append("it needs a first and a last frame (pos_embed_seq_len), the data have only the first")
    return faults


def model_config(role: Wan, where: str) -> wan.WanConfig:
    """The architecture of a role: `init_from`'s or the preset's, with the `config` overrides on top.

    Raises:
        UserError: no source, unknown preset or field, or values that the model refuses.
    """
    faults = []
    if role.init_from is not None and (role.preset is not None or role.config):
        faults.append(f"{where}.init_from brings its own architecture: leave out preset and config")
    if role.preset is not None and role.preset not in wan.PRESETS:
        hint = nearest_names(role.preset, wan.PRESETS)
        faults.append(f"{where}.preset {role.preset!r} is unknown{hint}; allowed: {', '.join(wan.PRESETS)}")
    if role.init_from is None and role.preset is None and not role.config:
        faults.append(f"{where}: one of init_from, preset or config is needed")
    raise_faults("the model cannot be built", faults)
    if role.init_from is not None:
        with named(f"{where}.init_from"):
            return open_transformer(Path(role.init_from) / "transformer")[1]
    base = wan.PRESETS[role.preset] if role.preset is not None else wan.WanConfig()
    return parse_config(wan.WanConfig, {**dataclasses.asdict(base), **role.config}, f"{where}.config")


def starting_params(role: Wan, cfg: wan.WanConfig, seed: int, dtype: torch.dtype, device) -> Params:
    """Weights of `init_from`, or fresh ones from the seed, in the stored dtype (float32 tables stay float32)."""
    tree = starting_tree(role, cfg, seed, dtype)
    return tree.read(device=device) if isinstance(tree, LazyTree) else {k: v.read().to(device) for k, v in tree.items()}


def starting_tree(role: Wan, cfg: wan.WanConfig, seed: int, dtype: torch.dtype) -> LazyTree | dict[str, LazyLeaf]:
    """The weights that training starts from, not read or drawn yet; each leaf depends on the seed and its key alone."""
    model_specs = wan.param_specs(cfg)
    if role.init_from is not None:
        tree, _ = open_transformer(Path(role.init_from) / "transformer")
        return apply(tree, cast(dtype, keep_fp32=lambda k: model_specs[k].keep_fp32)(tree.specs))
    root = keys.fold_in(keys.key(seed), "init")

    def leaf(k: str, spec: specs.ParamSpec) -> LazyLeaf:
        stored = dataclasses.replace(spec, dtype=torch.float32 if spec.keep_fp32 else dtype)
        return LazyLeaf(spec.shape, stored.dtype, lambda memo: specs.draw(stored, keys.fold_in(root, k)))

    return {k: leaf(k, s) for k, s in model_specs.items()}


def check_kernels(recipe: Recipe, cfg: wan.WanConfig, device: torch.device, compute: torch.dtype) -> None:
    """Refuses an attention backend or an optimiser kernel that was asked for and that this device cannot run."""
    faults, backend = [], recipe.models.student.attention_backend
    if backend != "auto":
        q = torch.empty(1, 1, cfg.num_attention_heads, cfg.attention_head_dim, dtype=compute, device=device)
        if (reason := explain_attention(q)[backend]) != "usable":
            faults.append(f"models.student.attention_backend: {backend} cannot run here: {reason}")
    if recipe.training.optimizer.fused and device.type not in FUSED_DEVICES:
        faults.append(f"training.optimizer.fused: there is no fused AdamW on {device.type}; use null or false")
    raise_faults("kernels that cannot be used", faults)


# --- the data -------------------------------------------------------------------------------------------------


def sampling_defaults(recipe: Recipe, dataset: Dataset, components: Components, text_length: int) -> Defaults:
    """What an export notes: geometry and rate of the data's most common shape, text length, validation's sampling."""
    channels, t, h, w = common_shape(dataset)
    spatial, temporal = strides(components, channels)
    validation = recipe.callbacks.validation
    noted = Defaults(
        num_frames=temporal * (t - 1) + 1,
        height=h * spatial,
        width=w * spatial,
        fps=first_fps(dataset),
        text_length=text_length,
        flow_shift=recipe.pipeline.flow_shift,
    )
    if validation is None and recipe.models.student.init_from is None and recipe.training.data.training_cfg_rate == 0:
        return dataclasses.replace(noted, guidance_scale=1.0)  # the unconditional branch was never trained
    if validation is None:
        return noted
    return dataclasses.replace(
        noted,
        sampler=validation.sampler,
        steps=max(validation.sampling_steps),
        guidance_scale=validation.guidance_scale,
    )


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
    check_capability(recipe, cfg)
    check_layout(recipe, cfg, mesh)
    dataset = open_data(recipe, mesh)
    asked = training.compute_dtype
    compute = devices.default_compute_dtype(device) if asked is None else FLOATS[asked]
    components = find_components(recipe, cfg, device, compute)
    check_data(recipe, cfg, dataset, components)
    check_models(recipe, components)
    check_kernels(recipe, cfg, device, compute)
    empty = empty_caption(recipe, cfg, components.text)
    return Setup(
        recipe=recipe,
        mesh=mesh,
        device=device,
        compute=compute,
        cfg=cfg,
        dataset=dataset,
        components=components,
        objective=objective_of(recipe),
        run=layers_run(recipe, mesh),
        empty=empty,
        defaults=sampling_defaults(recipe, dataset, components, empty.shape[0]),
        fingerprint=fingerprint(dataset),
    )


def open_data(recipe: Recipe, mesh: Mesh) -> Dataset:
    """The data set of a recipe. The first process makes an index that is missing, before the others look for it."""
    data = recipe.training.data
    with named("training.data.data_path"):
        if mesh.world > 1 and data.streaming_manifest_path is not None:
            agreed(lambda: len(open_recipe_data(data, mesh.device)), mesh)
        return open_recipe_data(data, mesh.device)


def objective_of(recipe: Recipe) -> Objective:
    """The keys of a recipe that decide the loss."""
    model = recipe.training.model
    return Objective(
        weighting_scheme=model.weighting_scheme,
        logit_mean=model.logit_mean,
        logit_std=model.logit_std,
        flow_shift=recipe.pipeline.flow_shift,
        loss_weighting=model.loss_weighting,
        precondition_outputs=model.precondition_outputs,
        caption_dropout=recipe.training.data.training_cfg_rate,
    )


# --- the state ------------------------------------------------------------------------------------------------


def initial_state(setup: Setup) -> TrainState:
    """A fresh state on the run's device: weights, zero moments, and the EMA as a copy where one is kept.

    On a mesh of several processes each makes or reads its own shards, one leaf at a time.
    """
    training = setup.recipe.training
    start = (setup.recipe.models.student, setup.cfg, training.data.seed, FLOATS[training.dit_precision])
    if setup.mesh.world == 1:
        return _state(setup, starting_params(*start, setup.device))
    sharded = sharded_model(setup.recipe, setup.cfg, setup.mesh, setup.compute)
    fill(sharded.params, starting_tree(*start))
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
        params = {k: p.requires_grad_() for k, p in params.items()}
    ema = None
    if setup.recipe.callbacks.ema is not None:
        ema = {k: p.detach().float().clone() for k, p in params.items()}
    key = keys.key(setup.recipe.training.data.seed)
    return TrainState(params, adamw_init(params), ema, step=0, position=0, key=key, sharded=sharded)
