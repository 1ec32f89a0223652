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
    """What sampling uses when nothing else is asked for. None: the caller must say."""

    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    fps: float | None = None
    steps: int = 50
    guidance_scale: float = 5.0
    sampler: str = "unipc"
    flow_shift: float = 3.0


NOTED = ("num_frames", "height", "width", "fps", "steps", "guidance_scale")  # in model_index.json: _sampling


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A transformer with the models around it. `vae` and `text` are None where the folder has none we can run."""

    params: Params
    cfg: WanConfig
    vae: Vae | None
    text: TextEncoder | None
    defaults: Defaults
    device: torch.device
    dtype: torch.dtype


def load_vae(folder: str | Path, *, device="cpu") -> Vae:
    """The autoencoder of a `vae/` folder. Raises UserError naming the class it cannot run."""
    name = read_json(Path(folder) / "config.json").get("_class_name")
    if name != patch_codec.CLASS_NAME:
        raise UserError(f"{folder}: {name!r} cannot be run by this version, only {patch_codec.CLASS_NAME!r}")
    params, cfg = patch_codec.load(folder, device=device)
    return Vae(lambda z: patch_codec.decode(params, cfg, z), cfg.latent_channels, cfg.spatial, cfg.temporal)


def load_text_encoder(folder: str | Path) -> TextEncoder:
    """The encoder of a `text_encoder/` folder. Raises UserError naming the kind it cannot run."""
    name = read_json(Path(folder) / "config.json").get("model_type")
    if name != text_hash.MODEL_TYPE:
        raise UserError(
            f"{folder}: text encoder {name!r} cannot be run by this version, only {text_hash.MODEL_TYPE!r}; "
            "give precomputed prompt embeddings instead"
        )
    cfg = text_hash.load(folder)
    return TextEncoder(lambda prompts: text_hash.embed(cfg, prompts), cfg.max_length)


def read_defaults(folder: Path, index: Mapping[str, Any]) -> Defaults:
    """Sampling defaults of a folder: the scheduler's kind and shift, and the geometry noted by an export."""
    noted = index.get("_sampling", {})
    path = folder / "scheduler" / "scheduler_config.json"
    scheduler = read_json(path) if path.is_file() else {}
    name = scheduler.get("_class_name", SCHEDULERS["unipc"])
    kinds = {v: k for k, v in SCHEDULERS.items()}
    faults = [] if name in kinds else [f"{path}: scheduler {name!r}, expected one of {', '.join(kinds)}"]
    sampler = kinds.get(name, "unipc")
    shift = scheduler.get(SHIFT_KEYS[sampler], 1.0)
    if not is_number(shift) or shift <= 0:
        faults.append(f"{path}: {SHIFT_KEYS[sampler]} is {shift!r}, expected a number above 0")
    for key, value in noted.items():
        fits = key in NOTED and is_number(value) and value > 0 and (key in ("fps", "guidance_scale") or is_int(value))
        if not fits:
            faults.append(f"{folder / INDEX}: _sampling.{key} is {value!r}, expected a positive number ({', '.join(NOTED)})")
    raise_faults(f"{folder}: cannot be sampled from", faults)
    return Defaults(**noted, sampler=sampler, flow_shift=float(shift))


def load_pipeline(folder: str | Path, *, device: torch.device, dtype: torch.dtype) -> Pipeline:
    """Opens a pipeline folder, checks all of it, then reads the weights to `device` in `dtype`.

    Leaves that stay in float32 do. A VAE or text encoder that cannot be run is an error only when it is
    needed: `vae` and `text` are None where their folders are absent.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    index = read_json(folder / INDEX)
    tree, cfg = open_transformer(folder / "transformer")
    defaults = read_defaults(folder, index)
    vae = load_vae(folder / "vae", device=device) if (folder / "vae").is_dir() else None
    text = load_text_encoder(folder / "text_encoder") if (folder / "text_encoder").is_dir() else None
    model_specs = param_specs(cfg)
    bound = cast(dtype, keep_fp32=lambda k: model_specs[k].keep_fp32)(tree.specs)
    return Pipeline(apply(tree, bound).read(device=device), cfg, vae, text, defaults, device, dtype)


def scheduler_config(sampler: str, flow_shift: float) -> dict[str, Any]:
    """`scheduler_config.json` that Diffusers' class of the same sampler reads."""
    common = {"_class_name": SCHEDULERS[sampler], "num_train_timesteps": 1000, SHIFT_KEYS[sampler]: flow_shift}
    if sampler == "unipc":
        common |= {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "solver_order": 2}
    return common


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
    """
    with atomic_folder(folder) as part:
        save_checkpoint(part / "transformer", params, metadata=describe(CLASS_NAME, to_json(cfg), transforms))
        write_json(part / "transformer" / "config.json", to_json(cfg))
        write_json(part / "scheduler" / "scheduler_config.json", scheduler_config(defaults.sampler, defaults.flow_shift))
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
