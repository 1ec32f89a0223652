"""What training asks of LTX-2: see `train.families.Family`."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.checkpoint import LazyTree
from core.errors import UserError, raise_faults
from core.rules import cast
from core.transforms import apply
from core.trees import has_component
from infer.autoencoders import AudioVae
from infer.encoders import read_mapping
from infer.folder import INDEX
from infer.ltx2_defaults import LTX2Defaults, read_defaults
from infer.ltx2_folder import save_ltx2
from infer.ltx2_text import LTX2Text, load_ltx2_text
from nn import ltx2_formats
from nn.ltx2 import INCOMING
from nn.ltx2_config import LTX2Config
from nn.ltx2_flops import model_flops
from nn.ltx2_inputs import latent_faults
from nn.ltx2_names import whole
from nn.ltx2_specs import cross_adalns, param_specs
from parallel import inventory
from train.config import LTX2, SCHEMES, Recipe, Validation, sampler_of
from train.data import Dataset, first_fps
from train.ltx2_sft import DEFAULT_FPS, Objective, text_of, token_count
from train.rows import Batch

ROW_TYPES = {"t2v": ("video",), "t2va": ("video", "audio"), "t2a": ("audio",)}
"""The streams that rows have."""

UNREAD = ("keyframes_abs_pos_embedding",)
"""Leaves that are read where a caller marks tokens as keyframes alone (LTX-2.5): training marks none, no gradient."""


def names_of(cfg: LTX2Config) -> tuple[str, ...]:
    """The streams of a model."""
    return tuple(s.name for s in cfg.streams)


def heads(cfg: LTX2Config) -> dict[str, tuple[int, int]]:
    """Heads and their size, by the field of the config."""
    fields = {"video": "num_attention_heads", "audio": "audio_num_attention_heads"}
    return {fields[s.name]: (s.heads, s.head_dim) for s in cfg.streams}


def parts(cfg: LTX2Config) -> dict[str, str | None]:
    """The models around the transformer; None, or why this one has no place for it."""
    has = names_of(cfg)
    without = {name: None if name in has else f"the model has no {name}" for name in ("video", "audio")}
    return {"vae": without["video"], "audio_vae": without["audio"], "vocoder": without["audio"], "text_encoder": None}


def open_text(folder: Path, cfg: LTX2Config, device: torch.device, dtype: torch.dtype) -> LTX2Text:
    """The text encoder in `folder`, with the tokenizer and the connectors beside it."""
    return load_ltx2_text(folder.parent, cfg, device=device, dtype=dtype)


# --- who a leaf belongs to ------------------------------------------------------------------------------------


def owners(cfg: LTX2Config) -> dict[str, str]:
    """The stream that each leaf belongs to. Attention between streams belongs to the one that it is added to, tables
    and AdaLNs to the one whose tokens they modulate.
    """
    alone = {name: param_specs(dataclasses.replace(cfg, modality=name)) for name in names_of(cfg)}
    between = {
        s.name: (INCOMING[s.name][2], *cross_adalns(s), f"{s.name}_a2v_cross_attn_scale_shift_table")
        for s in cfg.streams
    }
    return {
        key: next(name for name in alone if key in alone[name] or has_component(key, between[name]))
        for key in param_specs(cfg)
    }


def frozen(role: LTX2, cfg: LTX2Config) -> frozenset[str]:
    """Keys of leaves that are not updated: those of the frozen stream, and those that nothing reads."""
    idle = {key for key in UNREAD if key in param_specs(cfg)}
    if role.frozen is None:
        return frozenset(idle)
    if not cfg.crossed:
        raise UserError(f"models.student.frozen: {role.frozen} needs a model of both streams, this is {cfg.modality}")
    return frozenset(idle | {key for key, owner in owners(cfg).items() if owner == role.frozen})


# --- the data -------------------------------------------------------------------------------------------------


def row_faults(cfg: LTX2Config, kind: str) -> list[str]:
    """Why rows of this type cannot train this model."""
    missing = [name for name in names_of(cfg) if name not in ROW_TYPES[kind]]
    if not missing:
        return []
    fits = " or ".join(k for k, streams in ROW_TYPES.items() if set(names_of(cfg)) <= set(streams))
    return [f"{kind} has no {missing[0]}, which a model of modality {cfg.modality} makes: use {fits} data"]


def video(cfg: LTX2Config) -> tuple[int, tuple[int, int, int]] | None:
    """Latent channels and patch of videos."""
    patch = (cfg.patch_size_t, cfg.patch_size, cfg.patch_size)
    return (cfg.in_channels // (patch[0] * patch[1] * patch[2]), patch) if "video" in names_of(cfg) else None


def tensor_faults(cfg: LTX2Config, shapes: Mapping[str, tuple]) -> list[str]:
    """What of a sample's tensors does not fit the model."""
    faults = latent_faults(cfg, shapes["vae_latent"]) if "video" in names_of(cfg) else []
    if "audio" in names_of(cfg):
        channels, frames, bins = shapes["audio_latent"]
        if channels * bins != cfg.audio_in_channels:
            wanted = f"[C, T, F] with C * F = {cfg.audio_in_channels}"
            faults.append(f"audio_latent {[channels, frames, bins]}, expected {wanted}")
    for name in names_of(cfg):
        own = name == "audio" and shapes.get("audio_text_embedding")
        stem = "audio_text_embedding" if own else "text_embedding"
        width, wanted = shapes[stem][1], cfg.stream(name).text_dim
        if width != wanted:
            faults.append(f"{stem} is {width} wide, expected {wanted} for the {name} stream, as its connector gives it")
    return faults


def latent_rate(cfg: LTX2Config) -> float:
    """Audio latents per second, as the model places them."""
    return cfg.audio_sampling_rate / cfg.audio_hop_length / cfg.audio_scale_factor


def place_faults(cfg: LTX2Config, strides: tuple[int, int] | None, sound: AudioVae | None) -> list[str]:
    """Why the positions of the model are not those of latents of a VAE with these pixels and frames, and of sound."""
    faults, (frames, pixels, _) = [], cfg.vae_scale_factors
    if strides not in (None, (pixels, frames)):
        faults.append(
            f"the data's VAE makes latents of {strides[0]} pixels and {strides[1]} frames, the model's positions are "
            f"of latents of {pixels} and {frames} (vae_scale_factors)"
        )
    rate = latent_rate(cfg)
    if sound is not None and sound.latents_per_second != rate:
        faults.append(
            f"the data's audio VAE makes {sound.latents_per_second:g} latents a second, the model's positions are of "
            f"{rate:g} (audio_sampling_rate, audio_hop_length, audio_scale_factor)"
        )
    return faults


# --- the recipe -----------------------------------------------------------------------------------------------


def objective(recipe: Recipe, cfg: LTX2Config) -> Objective:
    """The keys of a recipe that decide the loss. Raises UserError where no loss is left."""
    model, given = recipe.training.model, recipe.models.student.frozen
    every = {"video": model.video_loss_weight, "audio": model.audio_loss_weight}
    weights = {name: every[name] for name in names_of(cfg) if name != given}
    if not any(weights.values()):
        keys = " and ".join(f"training.model.{name}_loss_weight" for name in weights)
        raise UserError(f"{keys}: 0 leaves nothing to train, at least one must be above 0")
    return Objective(
        weights=weights,
        given=given,
        weighting_scheme=SCHEMES["ltx2"][0] if model.weighting_scheme is None else model.weighting_scheme,
        logit_std=model.logit_std,
        timestep_uniform_prob=model.timestep_uniform_prob,
        loss_weighting=model.loss_weighting,
        precondition_outputs=model.precondition_outputs,
        caption_dropout=recipe.training.data.training_cfg_rate,
    )


def empty_caption(recipe: Recipe, cfg: LTX2Config, text: LTX2Text | None) -> dict[str, Tensor]:
    """The embedding `[L, D]` of the empty caption by stream; {} where captions are never dropped.

    Raises UserError where they are to be and nothing can embed the empty one.
    """
    rate = recipe.training.data.training_cfg_rate
    if rate == 0:
        return {}
    if text is None:
        raise UserError(
            f"training.data.training_cfg_rate is {rate}: a dropped caption becomes the embedding of the empty one, and "
            "no text encoder is there to make it (pipeline.text_encoder, with its connectors); zeros would be no "
            "caption at all, since embeddings are stored after the connectors. Use 0, or name the encoder"
        )
    (embedding,) = text.embed([""])
    return {name: embedding[name].float().cpu() for name in names_of(cfg)}


def remarks(recipe: Recipe, dataset: Dataset, text: LTX2Text | None) -> list[str]:
    """What is said at the start of a run."""
    shown = any(column.target == "video" for column in dataset.row_type.channels)
    if shown and first_fps(dataset) is None:
        return [f"the data note no frame rate: {DEFAULT_FPS:g} frames per second are taken"]
    return []


def notes(recipe: Recipe, cfg: LTX2Config) -> dict[str, Any]:
    """What a checkpoint notes of the model beside its config."""
    return {"frozen": recipe.models.student.frozen}


def defaults(
    recipe: Recipe, cfg: LTX2Config, geometry: Mapping[str, Any], empty: Mapping[str, Tensor]
) -> LTX2Defaults:
    """What an export notes: geometry and rate of the data's most common shape, validation's sampling, and of what
    neither says what the pipeline says that training starts from. Distilled weights stay marked as such.
    """
    validation, noted = recipe.callbacks.validation, {k: v for k, v in geometry.items() if v is not None}
    if (latents := noted.pop("latents", None)) is not None:  # of sound alone, as long as so many frames
        noted["num_frames"] = max(1, round(latents / latent_rate(cfg) * noted.get("fps", DEFAULT_FPS)))
    if validation is not None:
        noted |= {"sampler": sampler_of(recipe), "steps": max(validation.sampling_steps), **guidance(validation)}
    elif recipe.models.student.init_from is None and recipe.training.data.training_cfg_rate == 0:
        noted |= {"guidance_scale": 1.0, "audio_guidance_scale": 1.0}  # nothing was trained without its caption
    return dataclasses.replace(_base_defaults(recipe.models.student.init_from, cfg), **noted)


def _base_defaults(init_from: str | None, cfg: LTX2Config) -> LTX2Defaults:
    if init_from is None or not (Path(init_from) / INDEX).is_file():
        return LTX2Defaults()
    return read_defaults(Path(init_from), read_mapping(Path(init_from) / INDEX), cfg)


def guidance(validation: Validation) -> dict[str, float]:
    """The scales of validation by the names of `LTX2Defaults`."""
    own = validation.audio_guidance_scale
    return {
        "guidance_scale": validation.guidance_scale,
        "audio_guidance_scale": validation.guidance_scale if own is None else own,
    }


# --- a step ---------------------------------------------------------------------------------------------------


def lengths(cfg: LTX2Config, batch: Batch, empty: Mapping[str, Tensor]) -> dict[str, int]:
    """Tokens of one sample by stream: `video`, `video_text`, `audio`, `audio_text`."""
    out = {}
    for name in names_of(cfg):
        out[name] = token_count(cfg, name, batch.targets[name].shape)
        out[f"{name}_text"] = text_of(name, batch)[0].shape[1]
    return out


@functools.lru_cache(maxsize=4)
def _frozen_model(cfg: LTX2Config, keys: frozenset[str]) -> inventory.Model:
    """The leaves that are not updated, as a model of matrices alone."""
    model = inventory.ltx2_model("frozen", cfg)
    return dataclasses.replace(model, specs={k: s for k, s in model.specs.items() if k in keys}, branches=())


def flops(cfg: LTX2Config, keys: frozenset[str], of: Mapping[str, int]) -> int:
    """Forward and backward pass of a sample with these `lengths`, blocks alone, as published figures count them.

    Leaves that are not updated need no gradient of their own, which is a third of what their products take.
    """
    names = names_of(cfg)
    total = model_flops(cfg, {name: of[name] for name in names}, {name: of[f"{name}_text"] for name in names})
    return total - inventory.forward_flops(_frozen_model(cfg, keys), of, layers_only=True)


# --- the export -----------------------------------------------------------------------------------------------


def save(folder: Path, tree: Mapping, cfg: LTX2Config, record: Mapping[str, Any], parts, transforms) -> None:
    """Writes a pipeline folder of a checkpoint's tree; a model of one stream carries its own model type."""
    found = {name: path for name, path in parts.items() if path is not None}
    noted = {k: tuple(v) if isinstance(v, list) else v for k, v in record["sampling"].items()}
    save_ltx2(folder, tree, cfg, LTX2Defaults(**noted), parts=found, transforms=transforms)


def merge_base(tree: Mapping, cfg: LTX2Config, folder: Path, dtype: torch.dtype) -> tuple[Mapping, LTX2Config]:
    """A trained stream with the other one of a pipeline, cast to `dtype`, and the config of the whole.

    Raises UserError for a model of both streams, and for a base of another architecture.
    """
    if cfg.crossed:
        raise UserError("the checkpoint has both streams: there is nothing to merge")
    base, found = ltx2_formats.open_transformer(folder / "transformer")
    wanted = dataclasses.asdict(whole(cfg))
    other = {k: v for k, v in dataclasses.asdict(found).items() if v != wanted[k]}
    raise_faults("another architecture", [f"{k} is {v!r}, the checkpoint has {wanted[k]!r}" for k, v in other.items()])
    specs = param_specs(found)
    base: LazyTree = apply(base, cast(dtype, keep_fp32=lambda k: specs[k].keep_fp32)(base.specs))
    return ltx2_formats.merge_base(tree, base, cfg), found
