"""The one place where a Wan model's inputs are built: training, validation and inference all call it.

Flow matching with `x_sigma = (1 - sigma) x0 + sigma noise`, velocity target `noise - x0` and timestep
`1000 sigma`. Conditioning is a dict of named channels: `text` `[B, L, text_dim]` (zero-padded, as Wan's own
pipelines do), `text_mask` bool `[B, L]`, `image` `[B, M, image_dim]`, `first_frame` `[B, C', T, H, W]`
(concatenated to the latents' channels).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core.errors import raise_faults
from nn.wan import NUM_TRAIN_TIMESTEPS, WanConfig

CHANNELS = ("text", "text_mask", "image", "first_frame")
Conditions = Mapping[str, Tensor]


def _per_sample(sigma: Tensor, like: Tensor) -> Tensor:
    return sigma.reshape(-1, *([1] * (like.ndim - 1)))


def noised(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """`(1 - sigma) clean + sigma noise`, float32 or wider.

    Args:
        clean, noise: `[B, C, T, H, W]`. sigma: `[B]` in [0, 1].
    """
    s = _per_sample(sigma, clean)
    return (1 - s) * clean + s * noise


def velocity_target(clean: Tensor, noise: Tensor) -> Tensor:
    """What the model is trained to return at every sigma: `noise - clean`."""
    return noise - clean


def clean_estimate(noisy: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """The x0 that a velocity implies: `noisy - sigma velocity`."""
    return noisy - _per_sample(sigma, noisy) * velocity


def pad_text(embeddings: Sequence[Tensor], length: int, *, names: Sequence[str] | None = None) -> Tensor:
    """Text embeddings `[L_i, D]` zero-padded to `[B, length, D]`.

    Raises:
        UserError: an embedding is longer than `length`, or widths differ; names every such row.
    """
    names = names if names is not None else [f"prompt {i}" for i in range(len(embeddings))]
    width = embeddings[0].shape[-1]
    faults = [
        f"{name}: {list(e.shape)}, expected at most [{length}, {width}]"
        for name, e in zip(names, embeddings, strict=True)
        if e.ndim != 2 or e.shape[0] > length or e.shape[1] != width
    ]
    raise_faults("text embeddings do not fit the padding length", faults)
    out = embeddings[0].new_zeros(len(embeddings), length, width)
    for row, e in zip(out, embeddings, strict=True):
        row[: e.shape[0]] = e
    return out


def check_latent_shape(cfg: WanConfig, shape: Sequence[int]) -> list[str]:
    """Faults of a latent shape `[C, T, H, W]` against a config; empty when it fits."""
    channels, *grid = shape
    faults = []
    if channels != cfg.out_channels:
        faults.append(f"{channels} latent channels, the model has out_channels={cfg.out_channels}")
    for name, n, p in zip(("frames", "height", "width"), grid, cfg.patch_size, strict=True):
        if n < 1 or n % p:
            below = max(p, n // p * p)
            faults.append(f"latent {name} {n} must be a multiple of {p}: nearest are {below} and {below + p}")
        elif n // p > cfg.rope_max_seq_len:
            faults.append(f"latent {name} {n} is above rope_max_seq_len={cfg.rope_max_seq_len}")
    return faults


def timestep_of(sigma: Tensor) -> Tensor:
    """The timestep that a noise level stands for, `1000 sigma`, in float32 or wider."""
    return sigma.to(torch.promote_types(sigma.dtype, torch.float32)) * NUM_TRAIN_TIMESTEPS


def _check(cfg: WanConfig, latents: Tensor, timestep: Tensor, conditions: Conditions) -> None:
    faults = [f"latents: {f}" for f in check_latent_shape(cfg, latents.shape[1:])]
    batch = latents.shape[0]
    faults += [
        f"condition {k!r} is none of {', '.join(CHANNELS)}" for k in conditions if k not in CHANNELS
    ]
    faults += [
        f"{k}: batch {v.shape[0]}, the latents have {batch}" for k, v in conditions.items() if v.shape[0] != batch
    ]
    if timestep.ndim not in (1, 2) or timestep.shape[0] != batch:
        faults.append(f"timestep must be [B] or [B, tokens] with B={batch}, got {list(timestep.shape)}")
    if "text" not in conditions:
        faults.append("condition 'text' is missing")
    elif conditions["text"].shape[-1] != cfg.text_dim:
        faults.append(f"text: width {conditions['text'].shape[-1]}, the model has text_dim={cfg.text_dim}")
    if ("image" in conditions) != (cfg.image_dim is not None):
        faults.append(
            "condition 'image' is missing: the model has an image branch"
            if cfg.image_dim is not None
            else "condition 'image' was given to a model without an image branch"
        )
    extra = conditions["first_frame"].shape[1] if "first_frame" in conditions else 0
    if extra != cfg.condition_channels:
        faults.append(f"first_frame: {extra} channels, the model takes {cfg.condition_channels}")
    raise_faults("the model's inputs do not fit its config", faults)


def model_inputs(
    cfg: WanConfig, noisy: Tensor, timestep: Tensor, conditions: Conditions, *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Inputs of `nn.wan.forward`.

    Args:
        noisy: latents at some noise level, `[B, C, T, H, W]`, float32 or wider.
        timestep: that level as `timestep_of` or a schedule gives it, `[B]`, or per token `[B, N]`, in 0..1000.
        conditions: named channels, see the module docstring.
        dtype: compute dtype; default that of `noisy`.

    Returns:
        `latents` `[B, in_channels, T, H, W]` in `dtype`, `timestep` `[B]` or `[B, N]` in float32 or wider,
        and the conditions in `dtype` (masks stay bool).

    Raises:
        UserError: everything that does not fit the config, in one message.
    """
    _check(cfg, noisy, timestep, conditions)
    dtype = noisy.dtype if dtype is None else dtype
    inputs = {k: v if v.dtype == torch.bool else v.to(dtype) for k, v in conditions.items()}
    first_frame = inputs.pop("first_frame", None)
    latents = noisy.to(dtype)
    inputs["latents"] = latents if first_frame is None else torch.cat([latents, first_frame], dim=1)
    inputs["timestep"] = timestep.to(torch.promote_types(timestep.dtype, torch.float32))
    return inputs


def null_conditions(conditions: Conditions, policy: Mapping[str, str]) -> dict[str, Tensor]:
    """The conditions of a guidance branch.

    Args:
        policy: per channel `"keep"`, `"zero"` or `"drop"`; channels without an entry are kept.

    Raises:
        UserError: another word, or a channel that is not there.
    """
    unknown = [f"{k}: no such channel among {sorted(conditions)}" for k in policy if k not in conditions]
    unknown += [f"{k}: {v!r} is none of keep, zero, drop" for k, v in policy.items() if v not in ("keep", "zero", "drop")]
    raise_faults("guidance branch", unknown)
    out = {}
    for name, value in conditions.items():
        action = policy.get(name, "keep")
        if action != "drop":
            out[name] = torch.zeros_like(value) if action == "zero" else value
    return out
