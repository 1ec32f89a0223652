"""A pipeline folder in Diffusers' layout: opened with its models, or written.

    model_index.json      which classes stand in which folder, and the sampling defaults
    transformer/          config.json, diffusion_pytorch_model*.safetensors
    scheduler/            scheduler_config.json
    vae/                  Wan's VAE (2.1 or 2.2), or the demos' patch codec
    text_encoder/         UMT5 with the tokenizer/ beside it, or the demos' hash embedder
    image_encoder/        CLIP's vision model with the image_processor/ beside it, of image-to-video models

Every part is checked when a folder is opened; UMT5, CLIP and Wan's VAE are read by the call that needs them and
freed after it.
"""

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from core.checkpoint import LazyTree
from core.errors import UserError, raise_faults
from core.files import atomic_folder, read_json, write_json
from core.rules import cast
from core.save import describe, save_checkpoint
from core.specs import check
from core.transforms import apply
from core.trees import Params
from infer.autoencoders import Vae, load_vae
from infer.encoders import (
    CLIP_VISION,
    UMT5,
    ImageEncoder,
    TextEncoder,
    load_image_encoder,
    load_text_encoder,
    read_mapping,
)
from infer.schedules import is_int, is_number
from nn import wan_vae
from nn.wan import WanConfig, param_specs
from nn.wan_formats import CLASS_NAME, open_transformer, to_json

INDEX = "model_index.json"
PIPELINE = "WanPipeline"
IMAGE_PIPELINE = "WanImageToVideoPipeline"
SCHEDULERS = {"unipc": "UniPCMultistepScheduler", "euler": "FlowMatchEulerDiscreteScheduler"}
SHIFT_KEYS = {"unipc": "flow_shift", "euler": "shift"}
# How Diffusers' index names the models that we run; ours have no such entry.
CLASSES = {
    wan_vae.CLASS_NAME: ["diffusers", wan_vae.CLASS_NAME],
    UMT5: ["transformers", "UMT5EncoderModel"],
    CLIP_VISION: ["transformers", "CLIPVisionModel"],
}
# What must lie beside an encoder, and which entry of which file names its class.
COMPANIONS = {
    "text_encoder": ("tokenizer", "tokenizer_config.json", "tokenizer_class"),
    "image_encoder": ("image_processor", "preprocessor_config.json", "image_processor_type"),
}
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

    `vae`, `text` and `image` are None where the folder has none that we can run; `absent` then says why.
    `params` may be leaves that are not read yet, see `open_pipeline`. `expand_timesteps` marks Wan2.2's 5B model,
    which takes a picture as a clean first latent frame.
    """

    params: Params | LazyTree
    cfg: WanConfig
    vae: Vae | None
    text: TextEncoder | None
    defaults: Defaults
    device: torch.device
    dtype: torch.dtype
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    image: ImageEncoder | None = None
    expand_timesteps: bool = False


def read_index(folder: Path) -> dict[str, Any]:
    """`model_index.json`. Raises UserError for a pipeline of another kind."""
    path = folder / INDEX
    index = read_mapping(path)
    faults = []
    if index.get("_class_name") not in (PIPELINE, IMAGE_PIPELINE):
        faults.append(f"_class_name is {index.get('_class_name')!r}, expected {PIPELINE!r} or {IMAGE_PIPELINE!r}")
    if not isinstance(index.get("expand_timesteps", False), bool):
        faults.append(f"expand_timesteps is {index['expand_timesteps']!r}, expected true or false")
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
    config = read_mapping(path)
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


def _fitting(encoder: ImageEncoder, cfg: WanConfig, folder: Path) -> ImageEncoder:
    """The encoder, if the transformer takes features of its width; else a UserError."""
    if encoder.dim != cfg.image_dim:
        raise UserError(f"{folder}: it makes features of width {encoder.dim}, the transformer takes {cfg.image_dim}")
    return encoder


def open_parts(
    folder: Path,
    loaders: Mapping[str, Callable[[Path], Any]],
    needs: Sequence[str],
    unused: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The models around a transformer, and of those that are absent or cannot be run the reason, by folder name.

    Args:
        loaders: `(folder of the model)` -> the model. needs: names without which the caller cannot go on.
        unused: names that this transformer has no use for, with the reason.

    Raises:
        UserError: one message for all that is needed and cannot be run.
    """
    found, absent = {}, {} if unused is None else dict(unused)
    for name, load in loaders.items():
        if name in absent:
            continue
        try:
            found[name] = load(folder / name)
        except UserError as error:
            absent[name] = str(error)
    raise_faults(f"{folder}: models that are needed cannot be run", [absent[name] for name in needs if name in absent])
    return found, absent


def open_pipeline(
    folder: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    needs: Sequence[str] = (),
    vae_dtype: torch.dtype = torch.float32,
    vae_strips: int = 1,
) -> Pipeline:
    """Opens a pipeline folder and checks all of it; no weights of the transformer, UMT5, CLIP or Wan's VAE are read.

    `params` of the result are lazy leaves: `with_weights` reads them, when the encoders have done their work.

    Args:
        dtype: compute dtype of the transformer and the encoders; leaves that stay in float32 do.
        vae_strips: see `infer.autoencoders.load_vae`.
        needs: of `"vae"`, `"text_encoder"` and `"image_encoder"`, those without which the caller cannot go on. The
            others are None in the result where they are absent or cannot be run.

    Raises:
        UserError: one message for what is needed and cannot be run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    index = read_index(folder)
    tree, cfg = open_transformer(folder / "transformer")
    defaults = read_defaults(folder, index)
    loaders: dict[str, Callable[[Path], Any]] = {
        "vae": lambda f: load_vae(f, device=device, dtype=vae_dtype, keep=False, strips=vae_strips),
        "text_encoder": lambda f: load_text_encoder(f, device=device, dtype=dtype),
        "image_encoder": lambda f: _fitting(load_image_encoder(f, device=device, dtype=dtype), cfg, f),
    }
    if cfg.image_dim is None:
        del loaders["image_encoder"]
    found, absent = open_parts(folder, loaders, needs)
    model_specs = param_specs(cfg)
    bound = cast(dtype, keep_fp32=lambda k: model_specs[k].keep_fp32)(tree.specs)
    return Pipeline(
        apply(tree, bound),
        cfg,
        found.get("vae"),
        found.get("text_encoder"),
        defaults,
        device,
        dtype,
        absent,
        found.get("image_encoder"),
        index.get("expand_timesteps", False),
    )


P = TypeVar("P")


def with_weights(pipe: P) -> P:
    """A pipeline (also LTX-2's) with its transformer read to the device; itself where that was done."""
    if not isinstance(pipe.params, LazyTree):
        return pipe
    return dataclasses.replace(pipe, params=pipe.params.read(device=pipe.device))


def load_pipeline(
    folder: str | Path, *, device: torch.device, dtype: torch.dtype, needs: Sequence[str] = ()
) -> Pipeline:
    """`open_pipeline`, and the transformer read at once. Raises UserError before any weight is read."""
    return with_weights(open_pipeline(folder, device=device, dtype=dtype, needs=needs))


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
    image_encoder: Path | None = None,
    expand_timesteps: bool = False,
    transforms: Sequence[str] = (),
) -> None:
    """Writes a pipeline folder that appears whole: `transformer/` loads in Diffusers as it is.

    Args:
        params: tensors or lazy leaves with the canonical keys.
        vae, text_encoder, image_encoder: folders to copy; left out when None. The `tokenizer/` and the
            `image_processor/` beside the encoders go with them.

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
            "_class_name": IMAGE_PIPELINE if cfg.condition_channels else PIPELINE,
            "transformer": ["diffusers", CLASS_NAME],
            "scheduler": ["diffusers", SCHEDULERS[defaults.sampler]],
        }
        if expand_timesteps:
            index["expand_timesteps"] = True
        for name, source in (("vae", vae), ("text_encoder", text_encoder), ("image_encoder", image_encoder)):
            if source is not None:
                copy_files(source, part / name)
                index |= _copy_companion(name, source, part)
        noted = {k: getattr(defaults, k) for k in NOTED}
        index["_sampling"] = {k: v for k, v in noted.items() if v is not None}
        write_json(part / INDEX, index)


def _copy_companion(name: str, source: Path, part: Path) -> dict[str, list[str]]:
    """Copies what an encoder needs beside it; entries of the index for both."""
    config = read_json(source / "config.json")
    kind = config.get("_class_name", config.get("model_type"))
    out = {name: CLASSES.get(kind, ["latentree", kind])}
    if name in COMPANIONS and kind in CLASSES:
        companion, file, entry = COMPANIONS[name]
        copy_files(source.parent / companion, part / companion)
        out[companion] = ["transformers", read_mapping(source.parent / companion / file).get(entry)]
    return out


def copy_files(source: Path, target: Path) -> None:
    """Copies the files of one folder (a VAE, a text encoder)."""
    target.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.is_file():
            shutil.copyfile(file, target / file.name)
