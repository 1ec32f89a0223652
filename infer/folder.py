"""A pipeline folder in Diffusers' layout: opened with its models, or written.

    model_index.json      which classes stand in which folder, and the sampling defaults
    transformer/          config.json, diffusion_pytorch_model*.safetensors
    scheduler/            scheduler_config.json
    vae/, text_encoder/   the patch codec and the hash embedder, or what the folder came with
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from core.files import atomic_folder, read_json, write_json
from core.rules import cast
from core.save import describe, save_checkpoint
from core.specs import check
from core.transforms import apply
from core.trees import Params
from infer.schedules import is_int, is_number
from nn import patch_codec, text_hash
from nn.wan import WanConfig, param_specs
from nn.wan_formats import CLASS_NAME, open_transformer, to_json

INDEX = "model_index.json"
PIPELINE = "WanPipeline"
WAN_TEXT_LENGTH = 512  # tokens to which Wan's own pipelines pad prompt embeddings
SCHEDULERS = {"unipc": "UniPCMultistepScheduler", "euler": "FlowMatchEulerDiscreteScheduler"}
SHIFT_KEYS = {"unipc": "flow_shift", "euler": "shift"}
# What our samplers do, as entries of scheduler_config.json: written, and compared when a folder is read.
BEHAVIOUR: dict[str, dict[str, Any]] = {
    "unipc": {
        "num_train_timesteps": 1000,
        "use_flow_sigmas": True,
        "prediction_type": "flow_prediction",
        "predict_x0": True,
        "solver_order": 2,
        "solver_type": "bh2",
        "lower_order_final": True,
        "disable_corrector": [],
        "final_sigmas_type": "zero",
    },
    "euler": {
        "num_train_timesteps": 1000,
        "invert_sigmas": False,
        "stochastic_sampling": False,
        "use_dynamic_shifting": False,
        "shift_terminal": None,
    },
}
# Diffusers' defaults where they differ from the above: what an entry that is left out means.
OTHER_DEFAULTS = {"use_flow_sigmas": False, "prediction_type": "epsilon"}


@dataclasses.dataclass(frozen=True)
class Vae:
    """An autoencoder with its weights bound: `decode(latents [B,C,t,h,w]) -> video [B,3,T,H,W]` in [-1, 1]."""

    decode: Callable[[Tensor], Tensor]
    latent_channels: int
    spatial: int
    temporal: int


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """A text encoder: `embed(prompts) -> [L_i, D] each`, and the length to which the model pads them."""

    embed: Callable[[Sequence[str]], list[Tensor]]
    max_length: int


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What sampling uses when nothing else is asked for. None: the caller must say.

    `text_length` is the number of tokens to which prompts were padded in training; None leaves it to the
    text encoder.
    """

    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    fps: float | None = None
    text_length: int | None = None
    steps: int = 50
    guidance_scale: float = 5.0
    sampler: str = "unipc"
    flow_shift: float = 3.0


# Entries of _sampling in model_index.json.
NOTED = ("num_frames", "height", "width", "fps", "text_length", "steps", "guidance_scale")


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A transformer with the models around it.

    `vae` and `text` are None where the folder has none that we can run; `absent` then says why.
    """

    params: Params
    cfg: WanConfig
    vae: Vae | None
    text: TextEncoder | None
    defaults: Defaults
    device: torch.device
    dtype: torch.dtype
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _mapping(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise UserError(f"{path}: it holds a {type(data).__name__}, expected a mapping")
    return data


def load_vae(folder: str | Path, *, device="cpu") -> Vae:
    """The autoencoder of a `vae/` folder. Raises UserError naming the class it cannot run."""
    name = _mapping(Path(folder) / "config.json").get("_class_name")
    if name != patch_codec.CLASS_NAME:
        raise UserError(f"{folder}: {name!r} cannot be run by this version, only {patch_codec.CLASS_NAME!r}")
    params, cfg = patch_codec.load(folder, device=device)
    return Vae(lambda z: patch_codec.decode(params, cfg, z), cfg.latent_channels, cfg.spatial, cfg.temporal)


def load_text_encoder(folder: str | Path) -> TextEncoder:
    """The encoder of a `text_encoder/` folder. Raises UserError naming the kind it cannot run."""
    name = _mapping(Path(folder) / "config.json").get("model_type")
    if name != text_hash.MODEL_TYPE:
        raise UserError(
            f"{folder}: text encoder {name!r} cannot be run by this version, only {text_hash.MODEL_TYPE!r}; "
            "give precomputed prompt embeddings instead"
        )
    cfg = text_hash.load(folder)
    return TextEncoder(lambda prompts: text_hash.embed(cfg, prompts), cfg.max_length)


def read_index(folder: Path) -> dict[str, Any]:
    """`model_index.json`. Raises UserError for a pipeline of another kind."""
    path = folder / INDEX
    index = _mapping(path)
    faults = []
    if index.get("_class_name") != PIPELINE:
        faults.append(f"_class_name is {index.get('_class_name')!r}, expected {PIPELINE!r}")
    if index.get("boundary_ratio") is not None or index.get("transformer_2") not in (None, [None, None]):
        faults.append("it has two transformers (boundary_ratio, transformer_2), only one is supported")
    raise_faults(f"{path}: this pipeline cannot be sampled from", faults)
    return index


def _noted_fault(key: str, value: Any) -> str | None:
    if key not in NOTED:
        return f"unknown, expected one of {', '.join(NOTED)}"
    if key == "fps":
        return None if is_number(value) and value > 0 else "expected a number above 0"
    if key == "guidance_scale":
        return None if is_number(value) and value >= 0 else "expected a number of at least 0"
    return None if is_int(value) and value >= 1 else "expected an integer of at least 1"


def _read_scheduler(path: Path) -> tuple[dict[str, Any], list[str]]:
    """`sampler` and `flow_shift` of a scheduler_config.json, and its faults."""
    config = _mapping(path)
    name = config.get("_class_name")
    sampler = next((k for k, v in SCHEDULERS.items() if v == name), None)
    if sampler is None:
        return {}, [f"{path}: scheduler {name!r}, expected one of {', '.join(SCHEDULERS.values())}"]
    faults = [
        f"{path}: {key} is {found!r}, only {ours!r} is supported"
        for key, ours in BEHAVIOUR[sampler].items()
        if (found := config.get(key, OTHER_DEFAULTS.get(key, ours))) != ours
    ]
    shift = config.get(SHIFT_KEYS[sampler], 1.0)
    if not is_number(shift) or shift <= 0:
        return {}, [*faults, f"{path}: {SHIFT_KEYS[sampler]} is {shift!r}, expected a number above 0"]
    return {"sampler": sampler, "flow_shift": float(shift)}, faults


def read_defaults(folder: Path, index: Mapping[str, Any]) -> Defaults:
    """Sampling defaults of a folder: the scheduler's kind and shift, and the geometry noted by an export.

    Raises one UserError that lists every entry that cannot be used.
    """
    noted, path = index.get("_sampling", {}), folder / "scheduler" / "scheduler_config.json"
    if not isinstance(noted, dict):
        raise UserError(f"{folder / INDEX}: _sampling is {noted!r}, expected a mapping")
    scheduler, faults = _read_scheduler(path) if path.is_file() else ({}, [])
    bad = {k: fault for k, v in noted.items() if (fault := _noted_fault(k, v)) is not None}
    faults += [f"{folder / INDEX}: _sampling.{k} is {noted[k]!r}: {fault}" for k, fault in bad.items()]
    raise_faults(f"{folder}: cannot be sampled from", faults)
    return Defaults(**noted, **scheduler)


def load_pipeline(
    folder: str | Path, *, device: torch.device, dtype: torch.dtype, needs: Sequence[str] = ()
) -> Pipeline:
    """Opens a pipeline folder, checks all of it, then reads the weights to `device` in `dtype`.

    Leaves that stay in float32 do.

    Args:
        needs: of `"vae"` and `"text_encoder"`, those without which the caller cannot go on. The others are
            None in the result where they are absent or cannot be run.

    Raises:
        UserError: before any weight of the transformer is read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    index = read_index(folder)
    tree, cfg = open_transformer(folder / "transformer")
    defaults = read_defaults(folder, index)
    found, absent = {}, {}
    for name, load in (("vae", lambda f: load_vae(f, device=device)), ("text_encoder", load_text_encoder)):
        try:
            found[name] = load(folder / name)
        except UserError as error:
            absent[name] = str(error)
    raise_faults(f"{folder}: models that are needed cannot be run", [absent[name] for name in needs if name in absent])
    model_specs = param_specs(cfg)
    bound = cast(dtype, keep_fp32=lambda k: model_specs[k].keep_fp32)(tree.specs)
    params = apply(tree, bound).read(device=device)
    return Pipeline(params, cfg, found.get("vae"), found.get("text_encoder"), defaults, device, dtype, absent)


def scheduler_config(sampler: str, flow_shift: float) -> dict[str, Any]:
    """`scheduler_config.json` that Diffusers' class of the same sampler reads."""
    return {"_class_name": SCHEDULERS[sampler], **BEHAVIOUR[sampler], SHIFT_KEYS[sampler]: flow_shift}


def save_pipeline(
    folder: str | Path,
    params: Mapping[str, Tensor],
    cfg: WanConfig,
    defaults: Defaults,
    *,
    vae: Path | None = None,
    text_encoder: Path | None = None,
    transforms: Sequence[str] = (),
) -> None:
    """Writes a pipeline folder that appears whole: `transformer/` loads in Diffusers as it is.

    Args:
        params: tensors or lazy leaves with the canonical keys.
        vae, text_encoder: folders to copy; left out when None.

    Raises:
        UserError: params that do not fit the config, before anything is written.
    """
    check(params, param_specs(cfg), what=str(folder))
    with atomic_folder(folder) as part:
        save_checkpoint(part / "transformer", params, metadata=describe(CLASS_NAME, to_json(cfg), transforms))
        write_json(part / "transformer" / "config.json", to_json(cfg))
        scheduler = scheduler_config(defaults.sampler, defaults.flow_shift)
        write_json(part / "scheduler" / "scheduler_config.json", scheduler)
        index: dict[str, Any] = {
            "_class_name": PIPELINE,
            "transformer": ["diffusers", CLASS_NAME],
            "scheduler": ["diffusers", SCHEDULERS[defaults.sampler]],
        }
        for name, source, key in (("vae", vae, "_class_name"), ("text_encoder", text_encoder, "model_type")):
            if source is not None:
                copy_files(source, part / name)
                index[name] = ["latentree", read_json(source / "config.json").get(key)]
        noted = {k: getattr(defaults, k) for k in NOTED}
        index["_sampling"] = {k: v for k, v in noted.items() if v is not None}
        write_json(part / INDEX, index)


def copy_files(source: Path, target: Path) -> None:
    """Copies the files of one folder (a VAE, a text encoder)."""
    target.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
