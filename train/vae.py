"""Training a Wan VAE as functions: random windows of a clip, the objective, an optimiser step, the loop.

The objective is the negative evidence lower bound of Kingma and Welling (2014) for a Gaussian decoder of variance
`kl_weight / 2`, times `kl_weight` and per value of the video:

    loss = ( |x - x_hat|^2 + kl_weight * KL ) / number of values of x
    KL   = sum ( mean^2 + exp(logvar) - 1 - logvar ) / 2        (their appendix B: to a standard normal)

with `x_hat = decode(mean + exp(logvar / 2) * noise)`, not clamped. A small weight keeps the latents' noise small and
yet bounds their size, as in Rombach et al. (2022). Published VAEs add a perceptual and an adversarial term.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from core import keys, specs
from core.errors import UserError, raise_faults
from core.trees import Params
from nn import wan_vae
from nn.wan_vae import VaeRun, WanVaeConfig
from train import optim
from train.schedules import learning_rate

# The least deviation that a config gets: of a channel that is constant, which must not be divided by zero.
LEAST_STD = 1e-6
# Layers whose output is added to what came in.
BRANCH_ENDS = ("conv2.weight", "conv2.bias", "proj.weight", "proj.bias")


@dataclasses.dataclass(frozen=True)
class VaeTraining:
    """What a run does: `batch` windows of `frames` x `size` x `size` pixels in each of `steps` optimiser steps.

    The learning rate warms up and then falls as a cosine. With a batch of one PyTorch's CPU convolutions of
    small videos take a kernel that is several times slower.
    """

    steps: int
    frames: int = 17
    size: int = 32
    batch: int = 2
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    kl_weight: float = 5e-5
    max_grad_norm: float = 1.0
    optimizer: optim.AdamW = optim.AdamW(betas=(0.9, 0.99), weight_decay=0.0)


class Losses(NamedTuple):
    """0-d tensors, each per value of the video: what is minimised, mean squared error, KL in nats."""

    total: Tensor
    error: Tensor
    kl: Tensor


@dataclasses.dataclass(frozen=True)
class VaeStep:
    """What one optimiser step leaves: its losses, without their graph; gradient norm before clipping; rate."""

    losses: Losses
    grad_norm: Tensor
    lr: float


def check(t: VaeTraining, cfg: WanVaeConfig, video: Tensor) -> None:
    """Raises UserError, naming every fault, for a run that does not fit the VAE or the video `[3, T, H, W]`."""
    wan_vae.check_video(cfg, video[None])
    least = {"steps": 1, "frames": 1, "size": 1, "batch": 1, "warmup_steps": 0, "kl_weight": 0, "learning_rate": 0}
    faults = [f"{n} is {getattr(t, n)}, expected at least {v}" for n, v in least.items() if not getattr(t, n) >= v]
    frames, side = video.shape[1], min(video.shape[2:])
    if t.frames > frames:
        faults.append(f"frames is {t.frames}, the video has {frames}")
    if t.size > side:
        faults.append(f"size is {t.size}, the video has {side} pixels on its shorter side")
    raise_faults("this VAE training cannot be run", faults)
    wan_vae.check_video(cfg, video[None, :, : t.frames, : t.size, : t.size])


def windows(t: VaeTraining, k: keys.Key, video: Tensor) -> Tensor:
    """`batch` windows of a video `[3, T, H, W]`, every place as likely: `[B, 3, frames, size, size]`."""
    shape = (t.frames, t.size, t.size)
    places = [n - m + 1 for n, m in zip(video.shape[1:], shape, strict=True)]
    starts = keys.generator(k).integers(0, places, size=(t.batch, 3)).tolist()
    cuts = [[slice(a, a + n) for a, n in zip(start, shape, strict=True)] for start in starts]
    return torch.stack([video[:, times, rows, columns] for times, rows, columns in cuts])


def kl_divergence(mean: Tensor, logvar: Tensor) -> Tensor:
    """KL of `N(mean, exp(logvar))` to N(0, 1) in nats, summed over all but the batch: `[B, ...] -> [B]`."""
    return 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).flatten(1).sum(1)


def loss(
    params: Params, cfg: WanVaeConfig, video: Tensor, k: keys.Key, *, kl_weight: float, run: VaeRun = VaeRun()
) -> Losses:
    """The objective of this module's head, averaged over a batch.

    Args:
        params: leaves of `param_specs(cfg)`, used in the video's dtype.
        video: `[B, 3, T, H, W]` in [-1, 1], sizes as for `wan_vae.encode`.
        k: of the noise that is added to the latents.
        kl_weight: twice the variance that the decoder's error is taken to have.
        run: how layers run.
    """
    mean, logvar = wan_vae.encode_moments(params, cfg, video, run=run)
    noise = keys.normal(k, mean.shape, mean.dtype, mean.device)
    latents = wan_vae.sample_latents(cfg, mean, logvar, noise)
    decoded = wan_vae.decode(params, cfg, latents, clamp=False, run=run)
    error = (decoded - video).square().mean()
    kl = kl_divergence(mean, logvar).sum() / video.numel()
    return Losses(error + kl_weight * kl, error, kl)


def start(cfg: WanVaeConfig, k: keys.Key, *, device="cpu") -> Params:
    """Fresh leaves whose residual blocks and attention pass their input on unchanged (Zhang et al., 2019).

    Deep stacks then learn from the first step on. Convolution weights are channels-last.
    """
    params = wan_vae.channels_last(specs.init(wan_vae.param_specs(cfg), k, device=device))
    return {key: torch.zeros_like(p) if key.endswith(BRANCH_ENDS) else p for key, p in params.items()}


def train_step(
    t: VaeTraining, cfg: WanVaeConfig, params: Params, state: optim.OptState, video: Tensor, k: keys.Key, step: int
) -> VaeStep:
    """The 0-based optimiser step `step` on windows of `video` `[3, T, H, W]`; `params` and `state` change in place.

    `params` require gradients. Windows and noise depend on `k` and `step` alone. Nothing is copied to the host.
    """
    place, draw = keys.split(keys.fold_in(k, step))
    losses = loss(params, cfg, windows(t, place, video), draw, kl_weight=t.kl_weight)
    # Through `.grad`, which is laid out as its leaf: the fused update goes by position in memory.
    losses.total.backward()
    grads = {key: p.grad for key, p in params.items()}
    norm = optim.clip_(grads, t.max_grad_norm)
    warmup = min(t.warmup_steps, t.steps)
    lr = learning_rate(step, t.learning_rate, scheduler="cosine", total_steps=t.steps, warmup_steps=warmup)
    optim.adamw_update(t.optimizer, grads, state, params, lr)
    for p in params.values():
        p.grad = None
    return VaeStep(Losses(*(x.detach() for x in losses)), norm, lr)


def fit(
    t: VaeTraining,
    cfg: WanVaeConfig,
    params: Params,
    video: Tensor,
    k: keys.Key,
    *,
    report: Callable[[int, VaeStep], None] = lambda done, step: None,
) -> None:
    """Trains `params` in place on windows of `video`.

    Args:
        params: float32 leaves on the video's device.
        video: `[3, T, H, W]` in [-1, 1].
        k: what windows and noise are drawn from.
        report: called with the number of steps done and what the last one left.

    Raises:
        UserError: settings that do not fit, before the first step; a loss or gradient that is not finite.
    """
    check(t, cfg, video)
    for p in params.values():
        p.requires_grad_()
    try:
        state = optim.adamw_init(params)
        for number in range(t.steps):
            step = train_step(t, cfg, params, state, video, k, number)
            _check_finite(step, number + 1)
            report(number + 1, step)
    finally:
        for p in params.values():
            p.requires_grad_(False)


def _check_finite(step: VaeStep, number: int) -> None:
    total, norm = float(step.losses.total), float(step.grad_norm)
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise UserError(f"step {number}: loss is {total}, gradient norm {norm}; a lower learning rate may help")


@torch.no_grad()
def with_statistics(
    params: Params, cfg: WanVaeConfig, videos: Tensor, *, chunk: int | None = None, run: VaeRun = VaeRun()
) -> WanVaeConfig:
    """`cfg` with the `latents_mean` and `latents_std` of `videos`: `wan_vae.encode` of them has mean 0, deviation 1.

    Args:
        params: leaves of `param_specs(cfg)`.
        videos: `[B, 3, T, H, W]` in [-1, 1].
        chunk: latent frames at a time, see `wan_vae.encode`.
        run: how layers run.
    """
    mean, _ = wan_vae.encode_moments(params, cfg, videos, chunk=chunk, run=run)
    std, centre = torch.std_mean(mean.double().transpose(0, 1).flatten(1), dim=1, correction=0)
    columns = {"latents_mean": tuple(centre.tolist()), "latents_std": tuple(std.clamp_min(LEAST_STD).tolist())}
    return dataclasses.replace(cfg, **columns)
