"""What training asks of Wan: see `train.families.Family`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import UserError
from infer.encoders import TextEncoder, read_mapping
from infer.folder import INDEX, Defaults, save_pipeline
from nn.config_files import parse_config
from nn.wan import WanConfig
from nn.wan_formats import FIXED
from nn.wan_inputs import check_latent_shape
from train.config import SCHEMES, Recipe, sampler_of
from train.data import Dataset
from train.flops import train_flops
from train.rows import Batch
from train.sft import Objective, image_channels

# Pixels and frames per latent where the data set's VAE cannot be read: Wan 2.1's, and Wan 2.2's with 48 channels.
VAE_STRIDES, VAE_STRIDES_48 = (8, 4), (16, 4)


def from_json(entries: Mapping[str, Any], source: str) -> WanConfig:
    """The config that a checkpoint notes. Raises UserError that names `source` and lists every fault."""
    return parse_config(WanConfig, {k: v for k, v in entries.items() if not k.startswith("_")}, source, fixed=FIXED)


def strides(cfg: WanConfig) -> tuple[int, int]:
    """Pixels and frames per latent of the VAE that a model's latents are usually of."""
    return VAE_STRIDES_48 if cfg.out_channels == 48 else VAE_STRIDES


def parts(cfg: WanConfig) -> dict[str, str | None]:
    """The models around the transformer; None, or why this one has no place for it."""
    without = None if cfg.image_dim is not None else "the model takes no image features (its image_dim is null)"
    return {"vae": None, "text_encoder": None, "image_encoder": without}


# --- the data -------------------------------------------------------------------------------------------------


def row_faults(cfg: WanConfig, kind: str) -> list[str]:
    """Why rows of this type cannot train this model."""
    takes = image_channels(cfg)
    if kind == "t2v" and takes:
        needs = "which this model needs (image_dim, in_channels > out_channels)"
        return [f"{kind} has no image conditions, {needs}: use i2v data"]
    if kind == "i2v" and not takes:
        return ["it takes no image (no image_dim, and in_channels = out_channels): use t2v data"]
    faults, channels = [], cfg.out_channels + VAE_STRIDES[1]
    if "first_frame" in takes and cfg.condition_channels != channels:
        faults.append(
            f"in_channels is {cfg.in_channels}, expected {cfg.out_channels + channels}: latents, {VAE_STRIDES[1]} mask "
            "channels, and the first frame's latents"
        )
    if takes and cfg.pos_embed_seq_len is not None:
        faults.append("it needs a first and a last frame (pos_embed_seq_len), the data have only the first")
    return faults


def tensor_faults(cfg: WanConfig, shapes: Mapping[str, tuple]) -> list[str]:
    """What of a sample's tensors does not fit the model, beyond `tensors`."""
    return check_latent_shape(cfg, shapes["vae_latent"])


def tensors(cfg: WanConfig, kind: str) -> dict[str, dict[str, tuple | str]]:
    """`{title of the error: {stem: sizes}}` for `train.data.check_tensors`."""
    out = {"text embeddings that do not fit the model": {"text_embedding": (None, cfg.text_dim)}}
    if kind == "i2v":
        image = {} if cfg.image_dim is None else {"clip_feature": (None, cfg.image_dim)}
        title = "image conditions that do not fit the model or the latents"
        out[title] = {"first_frame_latent": "vae_latent", **image}
    return out


# --- the recipe -----------------------------------------------------------------------------------------------


def objective(recipe: Recipe, cfg: WanConfig) -> Objective:
    """The keys of a recipe that decide the loss."""
    model = recipe.training.model
    return Objective(
        weighting_scheme=SCHEMES["wan"][0] if model.weighting_scheme is None else model.weighting_scheme,
        logit_mean=model.logit_mean,
        logit_std=model.logit_std,
        flow_shift=recipe.pipeline.flow_shift,
        loss_weighting=model.loss_weighting,
        precondition_outputs=model.precondition_outputs,
        caption_dropout=recipe.training.data.training_cfg_rate,
    )


def empty_caption(recipe: Recipe, cfg: WanConfig, text: TextEncoder | None) -> dict[str, Tensor]:
    """`text`: the embedding `[L, text_dim]` of the empty caption, zero-padded; zeros where no encoder can be run.

    L is `training.data.text_padding_length`, else the encoder's length, else 512 (Wan's).
    """
    length = recipe.training.data.text_padding_length
    if length is None:
        length = 512 if text is None else text.max_length
    empty = torch.zeros(length, cfg.text_dim)
    # Embedded only when it is used: a large encoder takes minutes to read.
    if text is not None and recipe.training.data.training_cfg_rate > 0:
        (embedding,) = text.embed([""])
        if embedding.shape[0] > length or embedding.shape[1] != cfg.text_dim:
            raise UserError(
                f"the text encoder gives {list(embedding.shape)} for an empty caption, the model takes at most "
                f"[{length}, {cfg.text_dim}] (text_dim)"
            )
        empty[: embedding.shape[0]] = embedding
    return {"text": empty}


def remarks(recipe: Recipe, dataset: Dataset, text: TextEncoder | None) -> list[str]:
    """What is said at the start of a run."""
    if recipe.training.data.training_cfg_rate > 0 and text is None:
        return ["dropped captions become zeros, since there is no text encoder to embed the empty caption"]
    return []


def notes(recipe: Recipe, cfg: WanConfig) -> dict[str, Any]:
    """What a checkpoint notes of the model beside its config.

    `expand_timesteps`: whether a picture is the model's clean first latent frame (Wan2.2's 5B): as the recipe says,
    else as `init_from` does. Raises UserError for a model that takes pictures in another way.
    """
    where, value = "pipeline.expand_timesteps", recipe.pipeline.expand_timesteps
    init_from = recipe.models.student.init_from
    if value is None and init_from is not None and (Path(init_from) / INDEX).is_file():
        where = f"{Path(init_from) / INDEX}: expand_timesteps"
        value = read_mapping(Path(init_from) / INDEX).get("expand_timesteps")
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{where} is {value!r}, expected true or false")
    if value and (cfg.condition_channels or cfg.image_dim is not None):
        raise UserError(
            f"{where} is true, but this model takes pictures by condition channels or features "
            f"(in_channels {cfg.in_channels}, out_channels {cfg.out_channels}, image_dim {cfg.image_dim})"
        )
    return {"expand_timesteps": value is True}


def defaults(
    recipe: Recipe, cfg: WanConfig, geometry: Mapping[str, Any], empty: Mapping[str, Tensor]
) -> Defaults:
    """What an export notes: geometry and rate of the data's most common shape, text length, validation's sampling."""
    noted = {**geometry, "text_length": empty["text"].shape[0], "flow_shift": recipe.pipeline.flow_shift}
    validation = recipe.callbacks.validation
    if validation is not None:
        noted |= {"sampler": sampler_of(recipe), "steps": max(validation.sampling_steps)}
        noted["guidance_scale"] = validation.guidance_scale
    elif recipe.models.student.init_from is None and recipe.training.data.training_cfg_rate == 0:
        noted["guidance_scale"] = 1.0  # the unconditional branch was never trained
    return Defaults(**noted)


# --- a step ---------------------------------------------------------------------------------------------------


def lengths(cfg: WanConfig, batch: Batch, empty: Mapping[str, Tensor]) -> dict[str, int]:
    """Tokens of one sample by stream: video after patchify, text, and the picture's features."""
    pt, ph, pw = cfg.patch_size
    t, h, w = batch.latents.shape[2:]
    out = {"video": t // pt * (h // ph) * (w // pw), "text": empty["text"].shape[0]}
    image = batch.conditions.get("image") if cfg.image_dim is not None else None
    return out if image is None else out | {"image": image.shape[1]}


def flops(cfg: WanConfig, of: Mapping[str, int]) -> int:
    """Forward and backward pass of a sample with these `lengths`."""
    return train_flops(cfg, of["video"], of["text"], of.get("image", 0))


# --- the export -----------------------------------------------------------------------------------------------


def save(folder: Path, tree: Mapping, cfg: WanConfig, record: Mapping[str, Any], parts, transforms) -> None:
    """Writes a pipeline folder of a checkpoint's tree; those from before `expand_timesteps` was noted have none."""
    expand = record.get("expand_timesteps", False)
    noted = Defaults(**record["sampling"])
    save_pipeline(folder, tree, cfg, noted, **parts, expand_timesteps=expand, transforms=transforms)


def merge_base(tree: Mapping, cfg: WanConfig, folder: Path, dtype: torch.dtype) -> tuple[Mapping, WanConfig]:
    """Refused: there is no other stream."""
    raise UserError("a Wan model is whole: only LTX-2 has streams that a base completes")
