"""The one place where a Wan model's inputs are built: training, validation and inference all call it.

Flow matching with `x_sigma = (1 - sigma) x0 + sigma noise`, velocity target `noise - x0` and timestep
`1000 sigma`. Conditioning is a dict of named channels: `text` `[B, L, text_dim]` (zero-padded, as Wan's own
pipelines do), `text_mask` bool `[B, L]`, `image` `[B, M, image_dim]`, `first_frame` `[B, C', T, H, W]`
(concatenated to the latents' channels).
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from core.geometry import nearest_valid
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


def pad_text(
    embeddings: Sequence[Tensor], length: int, *, width: int | None = None, names: Sequence[str] | None = None
) -> Tensor:
    """Text embeddings `[L_i, D]` zero-padded to `[B, length, D]`.

    Args:
        width: what D must be; default that of the first embedding.
        names: what the rows are called in an error.

    Raises:
        UserError: none at all, or an embedding that is longer than `length` or of another width; names every
            such row.
    """
    if not embeddings:
        raise UserError("text embeddings: expected at least one")
    names = names if names is not None else [f"prompt {i}" for i in range(len(embeddings))]
    width = embeddings[0].shape[-1] if width is None else width
    faults = [
        f"{name}: {list(e.shape)}, expected at most [{length}, {width}]"
        for name, e in zip(names, embeddings, strict=True)
        if e.ndim != 2 or e.shape[0] > length or e.shape[1] != width
    ]
    raise_faults("text embeddings do not fit the model's text length and width", faults)
    out = embeddings[0].new_zeros(len(embeddings), length, width)
    for row, e in zip(out, embeddings, strict=True):
        row[: e.shape[0]] = e
    return out


def check_latent_shape(cfg: WanConfig, shape: Sequence[int]) -> list[str]:
    """Faults of a latent shape `[C, T, H, W]` against a config; empty when it fits."""
    if len(shape) != 4:
        return [f"shape {list(shape)} of one sample, expected [C, T, H, W]"]
    channels, *grid = shape
    faults = []
    if channels != cfg.out_channels:
        faults.append(f"{channels} latent channels, the model has out_channels={cfg.out_channels}")
    for name, n, p in zip(("frames", "height", "width"), grid, cfg.patch_size, strict=True):
        if n < 1 or n % p:
            near = " or ".join(str(v) for v in nearest_valid(n, p))
            faults.append(f"latent {name} {n} must be a multiple of {p}: nearest valid {near}")
        elif n // p > cfg.rope_max_seq_len:
            faults.append(f"latent {name} {n} is above {cfg.rope_max_seq_len * p} (rope_max_seq_len x patch)")
    return faults


def timestep_of(sigma: Tensor) -> Tensor:
    """The timestep that a noise level stands for, `1000 sigma`, in float32 or wider."""
    return sigma.to(torch.promote_types(sigma.dtype, torch.float32)) * NUM_TRAIN_TIMESTEPS


def _condition_shapes(cfg: WanConfig, latents: Tensor, conditions: Conditions) -> dict[str, tuple[int | str, ...]]:
    """The shape of every channel that the model takes; a letter stands for any size."""
    batch, _, *grid = latents.shape
    text = conditions.get("text")
    length = "L" if text is None or text.ndim != 3 else text.shape[1]
    out = {"text": (batch, "L", cfg.text_dim), "text_mask": (batch, length)}
    if cfg.image_dim is not None:
        # The features of a first and a last frame come as two rows each.
        both = cfg.pos_embed_seq_len
        out["image"] = (batch, "M", cfg.image_dim) if both is None else (2 * batch, both // 2, cfg.image_dim)
    if cfg.condition_channels:
        out["first_frame"] = (batch, cfg.condition_channels, *grid)
    return out


def _fits(shape: Sequence[int], expected: Sequence[int | str]) -> bool:
    return len(shape) == len(expected) and all(
        isinstance(e, str) or n == e for n, e in zip(shape, expected, strict=True)
    )


def _condition_faults(cfg: WanConfig, latents: Tensor, conditions: Conditions) -> list[str]:
    expected = _condition_shapes(cfg, latents, conditions)
    faults = [
        f"condition {k!r} is missing, expected [{', '.join(map(str, shape))}]"
        for k, shape in expected.items()
        if k not in conditions and k != "text_mask"
    ]
    for k, value in conditions.items():
        if k not in CHANNELS:
            faults.append(f"condition {k!r} is none of {', '.join(CHANNELS)}")
        elif k not in expected:
            faults.append(f"condition {k!r} was given to a model that has no such branch")
        elif not _fits(value.shape, expected[k]):
            faults.append(f"{k}: {list(value.shape)}, expected [{', '.join(map(str, expected[k]))}]")
    if "text_mask" in conditions and conditions["text_mask"].dtype != torch.bool:
        faults.append(f"text_mask: dtype {conditions['text_mask'].dtype}, expected torch.bool")
    return faults


def _check(cfg: WanConfig, latents: Tensor, timestep: Tensor, conditions: Conditions) -> None:
    title = "the model's inputs do not fit its config"
    if latents.ndim != 5:  # without a batch and a grid nothing else can be judged
        raise_faults(title, [f"latents: {list(latents.shape)}, expected [B, C, T, H, W]"])
    faults = [f"latents: {f}" for f in check_latent_shape(cfg, latents.shape[1:])]
    batch, grid = latents.shape[0], [n // p for n, p in zip(latents.shape[2:], cfg.patch_size, strict=True)]
    if tuple(timestep.shape) not in ((batch,), (batch, math.prod(grid))):
        faults.append(f"timestep: {list(timestep.shape)}, expected [{batch}] or per token [{batch}, {math.prod(grid)}]")
    raise_faults(title, faults + _condition_faults(cfg, latents, conditions))


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
    actions = ("keep", "zero", "drop")
    unknown += [f"{k}: {v!r} is none of {', '.join(actions)}" for k, v in policy.items() if v not in actions]
    raise_faults("guidance branch", unknown)
    out = {}
    for name, value in conditions.items():
        action = policy.get(name, "keep")
        if action != "drop":
            out[name] = torch.zeros_like(value) if action == "zero" else value
    return out
