"""What a video is conditioned on, as named channels: from files, pictures and prompts to tensors.

Channels are those of `nn.wan_inputs.model_inputs` (`text`, `text_mask`, `image`, `first_frame`), and `clean_frame`:
clean latents of the first frame, `[B, C, 1, h, w]`, which `inputs_of` puts in place of the noisy ones.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from core.checkpoint import open_checkpoint
from core.errors import UserError, raise_faults
from core.geometry import to_video
from core.save import save_file
from infer.encoders import WAN_TEXT_LENGTH
from infer.folder import Pipeline
from nn.wan import WanConfig
from nn.wan_i2v import condition_clip, first_frame_channels, first_frame_known, token_timesteps, with_clean_frame
from nn.wan_inputs import model_inputs, null_conditions, pad_text

Conditions = Mapping[str, Tensor]


# --- text -----------------------------------------------------------------------------------------------------


def encode_prompts(pipe: Pipeline, prompts: Sequence[str]) -> Tensor:
    """Prompt embeddings `[B, L, D]`, cut and zero-padded to the model's text length, as captions in training.

    Needs the pipeline's text encoder. An encoder that is read for the call is read once for all `prompts`.
    """
    if pipe.text is None:
        why = pipe.absent.get("text_encoder", "the pipeline has none")
        raise UserError(f"prompts need a text encoder: {why}; or give precomputed prompt embeddings")
    length = text_length(pipe)
    return pad_prompts(pipe, [e[:length] for e in pipe.text.embed(prompts)])


def text_length(pipe: Pipeline) -> int:
    """Tokens to which prompt embeddings are padded: as the folder notes, else the text encoder's, else Wan's 512."""
    own = WAN_TEXT_LENGTH if pipe.text is None else pipe.text.max_length
    return own if pipe.defaults.text_length is None else pipe.defaults.text_length


def pad_prompts(pipe: Pipeline, embeddings: Sequence[Tensor], names: Sequence[str] | None = None) -> Tensor:
    """Precomputed embeddings `[L_i, D]` as `[B, L, D]`, L from `text_length`.

    Raises UserError naming every embedding that is longer or not as wide as the model's text_dim.
    """
    rows = pad_text(list(embeddings), text_length(pipe), width=pipe.cfg.text_dim, names=names)
    return rows.to(pipe.device)


def _rows(path: str | Path, needed: Sequence[str], form: str) -> dict[str, Tensor]:
    """Leaves of a safetensors file as float32 matrices; stored as such or as a batch of one."""
    tree = open_checkpoint(path)
    raise_faults(f"{path}: it has {', '.join(tree) or 'no keys'}", [f"missing {k}" for k in needed if k not in tree])
    shapes = {k: tree[k].shape for k in needed}
    bad = [k for k, shape in shapes.items() if len(shape) != 2 and not (len(shape) == 3 and shape[0] == 1)]
    raise_faults(str(path), [f"{k} is {list(shapes[k])}, expected [{form}] or [1, {form}]" for k in bad])
    return {k: v.float().reshape(shapes[k][-2:]) for k, v in tree.read(needed).items()}


def read_embeddings(path: str | Path, guidance: bool) -> dict[str, Tensor]:
    """`prompt_embeds` and, for guidance, `negative_prompt_embeds` of a safetensors file as `[L, D]`, float32.

    They may be stored as `[L, D]` or `[1, L, D]`. Raises UserError naming what is missing or has another shape.
    """
    return _rows(path, ["prompt_embeds", *(["negative_prompt_embeds"] if guidance else [])], "L, D")


def read_clip_feature(path: str | Path) -> Tensor:
    """`clip_feature` of a safetensors file as `[M, D]`, float32; see `read_embeddings`."""
    return _rows(path, ["clip_feature"], "M, D")["clip_feature"]


def save_embeddings(path: str | Path, text: Tensor, negative: Tensor | None, feature: Tensor | None) -> None:
    """Writes what `read_embeddings` and `read_clip_feature` read, `[1, L, D]` and `[1, M, D]`; None is left out."""
    found = {"prompt_embeds": text, "negative_prompt_embeds": negative, "clip_feature": feature}
    save_file(path, {k: v.cpu() for k, v in found.items() if v is not None}, {})


# --- pictures -------------------------------------------------------------------------------------------------


def takes_image(pipe: Pipeline) -> bool:
    """Whether a picture has a place in this model."""
    return pipe.expand_timesteps or pipe.cfg.condition_channels > 0 or pipe.cfg.image_dim is not None


def image_features(pipe: Pipeline, images: Sequence[Tensor]) -> list[Tensor] | None:
    """CLIP features `[M, D]` of pictures uint8 `[H, W, 3]`; None for a model that takes none.

    The encoder is read once for all pictures. Raises UserError for a pipeline without one.
    """
    if pipe.cfg.image_dim is None:
        return None
    if pipe.image is None:
        why = pipe.absent.get("image_encoder", "the pipeline has none")
        raise UserError(f"pictures need an image encoder: {why}; or give a precomputed clip_feature")
    return pipe.image.embed(images)


def image_conditions(
    pipe: Pipeline, image: Tensor, num_frames: int, feature: Tensor | None = None
) -> dict[str, Tensor]:
    """Channels of a video that begins with `image`, for a batch of one, on the pipeline's device.

    Wan2.1 image-to-video: `first_frame` (mask and latents) and, where the model takes it, `image`. Wan2.2 5B:
    `clean_frame`.

    Args:
        image: uint8 `[H, W, 3]` of the video's size.
        feature: `[M, image_dim]` of `image_features` or a file.

    Raises:
        UserError: a model without a place for a picture, a feature of another width or none where one is needed.
    """
    if not takes_image(pipe):
        raise UserError("the transformer takes text only: a picture needs an image-to-video model")
    frame = to_video(image[None])[None, :, 0]
    if pipe.expand_timesteps:
        return {"clean_frame": pipe.vae.encode(frame[:, :, None]).to(pipe.device)}
    out = {}
    if pipe.cfg.condition_channels:
        latents = pipe.vae.encode(condition_clip(frame, num_frames)).to(pipe.device)
        out["first_frame"] = first_frame_channels(latents, first_frame_known(num_frames), pipe.vae.temporal)
    if pipe.cfg.image_dim is not None:
        out["image"] = _checked_feature(pipe.cfg, feature)[None].to(pipe.device)
    return out


def _checked_feature(cfg: WanConfig, feature: Tensor | None) -> Tensor:
    if feature is None:
        raise UserError(f"this model needs CLIP features [M, {cfg.image_dim}] of the picture")
    if feature.ndim != 2 or feature.shape[1] != cfg.image_dim:
        raise UserError(f"clip_feature is {list(feature.shape)}, the model takes [M, {cfg.image_dim}]")
    return feature.float()


# --- the model's inputs and the branches of guidance ----------------------------------------------------------


def inputs_of(pipe: Pipeline, x: Tensor, timestep: Tensor, conditions: Conditions) -> dict[str, Tensor]:
    """Inputs of `nn.wan.forward` for latents x `[B, C, t, h, w]` at a 0-d timestep; see `model_inputs`.

    With `clean_frame` the first latent frame is the clean one and its tokens have timestep 0.
    """
    conditions, timestep = dict(conditions), timestep.expand(x.shape[0])
    clean = conditions.pop("clean_frame", None)
    if clean is not None:
        x = with_clean_frame(x, clean)
        timestep = token_timesteps(pipe.cfg, timestep, x, clean.shape[2])
    return model_inputs(pipe.cfg, x, timestep, conditions, dtype=pipe.dtype)


def unconditional(conditions: Conditions, negative: Tensor | None, policy: Mapping[str, str]) -> dict[str, Tensor]:
    """The other branch of guidance: each channel kept, zeroed or dropped as `policy` says, kept by default.

    Text has the embedding of the negative prompt instead, unless `policy` names it. Raises UserError for text
    without either, and for channels and words that do not exist.
    """
    out = null_conditions(conditions, policy)
    if "text" in policy:
        return out
    if negative is None:
        raise UserError("guidance needs a negative prompt embedding, or a policy for the channel text")
    return {**out, "text": negative}


def repeated(conditions: Conditions, count: int, device: torch.device) -> dict[str, Tensor]:
    """Channels of a batch of one for a batch of `count`; those of other batches as they are."""
    return {k: (v.expand(count, *v.shape[1:]) if v.shape[0] == 1 else v).to(device) for k, v in conditions.items()}
