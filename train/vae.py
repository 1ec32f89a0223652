"""Training a Wan VAE as functions: random windows of a clip, the objective, an optimiser step, the loop.

The objective is the negative evidence lower bound of Kingma and Welling (2014) with a Laplace likelihood, per
value of the video, and its second term weighted (Higgins et al., 2017; Rombach et al., 2022, weight 1e-6):

    loss = ( sum |x - x_hat| + kl_weight * KL ) / number of values of x
    KL   = sum ( mean^2 + exp(logvar) - 1 - logvar ) / 2        (their appendix B: to a standard normal)

with `x_hat = decode(mean + exp(logvar / 2) * noise)`. Wan's own VAE adds a perceptual and an adversarial term.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core import keys
from core.errors import raise_faults
from core.trees import Params
from nn import wan_vae
from nn.wan_vae import WanVaeConfig
from train import optim
from train.schedules import learning_rate

# Deviations below this are those of a channel that says nothing; the config must not divide by zero.
LEAST_STD = 1e-6


@dataclasses.dataclass(frozen=True)
class VaeTraining:
    """What a run does: `batch` windows of `frames` x `size` x `size` pixels in each of `steps` optimiser steps."""

    steps: int
    frames: int = 9
    size: int = 64
    batch: int = 2
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    kl_weight: float = 1e-4
    max_grad_norm: float = 1.0
    optimizer: optim.AdamW = optim.AdamW(betas=(0.9, 0.99), weight_decay=0.0)


class Losses(NamedTuple):
    """0-d tensors: what is minimised, mean absolute error (of a range of 2), and KL in nats per value of the video."""

    total: Tensor
    error: Tensor
    kl: Tensor


def check(t: VaeTraining, cfg: WanVaeConfig, video: Tensor) -> None:
    """Raises UserError, with every fault, for settings that do not fit the VAE or the video `[3, T, H, W]`."""
    wan_vae.check_video(cfg, video[None])
    least = {"steps": 1, "frames": 1, "size": cfg.scale_factor_spatial, "batch": 1}
    faults = [f"{n} is {getattr(t, n)}, expected at least {low}" for n, low in least.items() if getattr(t, n) < low]
    faults += [f"{n} is {getattr(t, n)}, expected 0 or more" for n in ("kl_weight", "learning_rate") if getattr(t, n) < 0]
    frames, side = video.shape[1], min(video.shape[2:])
    faults += [f"frames is {t.frames}, the video has {frames}"] if t.frames > frames else []
    faults += [f"size is {t.size}, the video has {side} pixels on its shorter side"] if t.size > side else []
    raise_faults("this VAE training cannot be run", faults)
    wan_vae.check_video(cfg, video[None, :, : t.frames, : t.size, : t.size])


def windows(t: VaeTraining, k: keys.Key, video: Tensor) -> Tensor:
    """`batch` windows of a video `[3, T, H, W]`, uniform over all places: `[B, 3, frames, size, size]`."""
    shape = (t.frames, t.size, t.size)
    room = [n - m + 1 for n, m in zip(video.shape[1:], shape, strict=True)]
    places = keys.generator(k).integers(0, room, size=(t.batch, 3)).tolist()
    cuts = [[slice(a, a + n) for a, n in zip(place, shape, strict=True)] for place in places]
    return torch.stack([video[:, times, rows, columns] for times, rows, columns in cuts])


def kl_divergence(mean: Tensor, logvar: Tensor) -> Tensor:
    """KL of `N(mean, exp(logvar))` to N(0, 1) in nats, summed over all but the batch: `[B, ...] -> [B]`."""
    return 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).flatten(1).sum(1)


def loss(
    params: Params,
    cfg: WanVaeConfig,
    video: Tensor,
    noise: Tensor,
    *,
    kl_weight: float,
    run: wan_vae.VaeRun = wan_vae.VaeRun(),
) -> Losses:
    """The objective of this module's head on a batch.

    Args:
        params: leaves of `param_specs(cfg)`.
        video: `[B, 3, T, H, W]` in [-1, 1], sizes as for `wan_vae.encode`.
        noise: standard normal, of the latents' shape `[B, z_dim, t, h, w]`.
        kl_weight: of the KL; 0 leaves a plain autoencoder with noisy latents.
        run: how layers run.
    """
    mean, logvar = wan_vae.encode_moments(params, cfg, video, run=run)
    latents = wan_vae.sample_latents(cfg, mean, logvar, noise)
    decoded = wan_vae.decode(params, cfg, latents, clamp=False, run=run)
    error = (decoded - video).abs().mean()
    kl = kl_divergence(mean, logvar).sum() / video.numel()
    return Losses(error + kl_weight * kl, error, kl)


def latent_shape(cfg: WanVaeConfig, video: Tensor) -> tuple[int, ...]:
    """Shape of the latents of a video `[B, 3, T, H, W]`."""
    frames, height, width = video.shape[2:]
    s = cfg.scale_factor_spatial
    return video.shape[0], cfg.z_dim, (frames - 1) // cfg.scale_factor_temporal + 1, height // s, width // s


def train_step(
    t: VaeTraining, params: Params, state: optim.OptState, cfg: WanVaeConfig, video: Tensor, k: keys.Key, step: int
) -> dict[str, Any]:
    """Optimiser step number `step` (from 0) on random windows of `video`; `params` and `state` change in place.

    Windows and noise depend on `k` and `step` alone. Returns loss, error and kl as in `Losses`, and grad_norm (0-d
    tensors), and lr.
    """
    place, draw = keys.split(keys.fold_in(k, step))
    batch = windows(t, place, video)
    noise = keys.normal(draw, latent_shape(cfg, batch), device=video.device)
    losses = loss(params, cfg, batch, noise, kl_weight=t.kl_weight)
    losses.total.backward()
    grads = {key: p.grad for key, p in params.items()}
    norm = optim.clip_(grads, t.max_grad_norm)
    lr = learning_rate(
        step, t.learning_rate, scheduler="cosine", total_steps=t.steps, warmup_steps=min(t.warmup_steps, t.steps)
    )
    optim.adamw_update(t.optimizer, grads, state, params, lr)
    for p in params.values():
        p.grad = None
    total, error, kl = (x.detach() for x in losses)
    return {"loss": total, "error": error, "kl": kl, "grad_norm": norm, "lr": lr}
