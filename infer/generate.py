"""Conditions to frames, as one function over a pipeline: from noise, or from a video that is noised part of the way."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from core import keys
from core.errors import UserError, raise_faults
from core.geometry import check_geometry
from infer.autoencoders import decode_frames
from infer.conditions import inputs_of, repeated, takes_image, unconditional
from infer.folder import Pipeline
from infer.guidance import guided
from infer.samplers import sample, schedule_of
from infer.schedules import is_int, is_number
from infer.words import counted
from nn import wan
from nn.run import Run
from nn.wan_i2v import with_clean_frame
from nn.wan_inputs import clean_estimate, noised

Progress = Callable[[int, int], None]
Preview = Callable[[int, Tensor], None]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Geometry of the video in frames and pixels, and how it is sampled.

    `policy` are pairs of a channel and what the unconditional branch of guidance does with it (`keep`, `zero` or
    `drop`); channels without one are kept, and text is then that of the negative prompt.
    """

    num_frames: int
    height: int
    width: int
    steps: int = 50
    sampler: str = "unipc"
    flow_shift: float = 3.0
    guidance_scale: float = 5.0
    guidance_rescale: float = 0.0
    batched_guidance: bool = True
    policy: tuple[tuple[str, str], ...] = ()


def check_sampling(pipe: Pipeline, sampling: Sampling, given: Collection[str] = ()) -> None:
    """Refuses a geometry that the autoencoder and the patches cannot hold, naming the nearest valid one.

    Also a pipeline whose models do not fit together, or that cannot make a video from text and what is `given`
    besides it, of `"image"` and `"video"`.
    """
    if pipe.vae is None:
        raise UserError(f"latents cannot be decoded to a video: {pipe.absent.get('vae', 'the pipeline has no vae')}")
    (pt, ph, pw), faults = pipe.cfg.patch_size, []
    if pipe.vae.latent_channels != pipe.cfg.out_channels:
        faults.append(
            f"the vae has {pipe.vae.latent_channels} latent channels, the transformer {pipe.cfg.out_channels}"
        )
    if ph != pw or pt != 1:
        faults.append(f"patch_size {pipe.cfg.patch_size} is not supported for sampling, only (1, p, p)")
    faults += _image_faults(pipe, given)
    if given and pipe.vae.encode is None:
        faults.append("the vae cannot encode pictures")
    if not is_int(sampling.steps) or sampling.steps < 1:
        faults.append(f"steps is {sampling.steps!r}, expected an integer of at least 1")
    raise_faults("this pipeline cannot be sampled so", faults)
    check_geometry(
        sampling.num_frames, sampling.height, sampling.width, temporal=pipe.vae.temporal, spatial=pipe.vae.spatial * ph
    )


def _image_faults(pipe: Pipeline, given: Collection[str]) -> list[str]:
    """What does not fit of a model's place for a picture."""
    cfg, faults = pipe.cfg, []
    if "image" in given and not takes_image(pipe):
        faults.append("the transformer takes text only: a picture needs an image-to-video model")
    if "image" not in given and (cfg.image_dim is not None or cfg.condition_channels):
        faults.append("the transformer is an image-to-video model: it needs a picture to begin with")
    expected = pipe.vae.temporal + pipe.vae.latent_channels
    if cfg.condition_channels not in (0, expected):
        faults.append(f"the transformer takes {cfg.condition_channels} condition channels, this vae makes {expected}")
    if cfg.pos_embed_seq_len is not None:
        faults.append("the transformer takes a first and a last frame (pos_embed_seq_len), which is not supported")
    return faults


def start_step(steps: int, strength: float) -> int:
    """The step at which video-to-video begins: all but the last `int(steps * strength)` are left out.

    Raises UserError for a strength outside (0, 1], or one so small that no step is left.
    """
    if not is_number(strength) or not 0 < strength <= 1:
        raise UserError(f"strength is {strength!r}, expected a number above 0, at most 1")
    left = int(steps * strength)
    if left < 1:
        said = f"strength {strength} of {counted(steps, 'step')} leaves none to do"
        raise UserError(f"{said}: at least {1 / steps:.3g} is needed")
    return steps - left


def latent_shape(pipe: Pipeline, sampling: Sampling) -> tuple[int, int, int, int]:
    """`[C, t, h, w]` of the latents of a video of this geometry."""
    vae = pipe.vae
    frames = (sampling.num_frames - 1) // vae.temporal + 1
    return pipe.cfg.out_channels, frames, sampling.height // vae.spatial, sampling.width // vae.spatial


def initial_noise(shape: Sequence[int], seeds: Sequence[int]) -> Tensor:
    """Standard normal latents `[B, C, t, h, w]`, float32 on the CPU; a sample's noise depends on its seed alone."""
    return torch.stack([keys.normal(keys.fold_in(keys.key(seed), "latents"), shape) for seed in seeds])


def _watched(field: Callable[..., Tensor], preview: Preview, first: int) -> Callable[..., Tensor]:
    """`field`, which also shows the x0 that its velocity implies; samplers call it once a step."""
    steps = itertools.count(first)

    def velocity(x: Tensor, sigma: float, timestep: Tensor) -> Tensor:
        v = field(x, sigma, timestep)
        preview(next(steps), clean_estimate(x, v, torch.tensor([sigma], device=x.device)))
        return v

    return velocity


@torch.no_grad()
def sample_latents(
    pipe: Pipeline,
    sampling: Sampling,
    noise: Tensor,
    text: Tensor,
    negative: Tensor | None = None,
    *,
    conditions: Mapping[str, Tensor] | None = None,
    start: int = 0,
    run: Run = Run(),
    progress: Progress | None = None,
    preview: Preview | None = None,
) -> Tensor:
    """Denoises `noise [B, C, t, h, w]` to latents of the same shape, float32.

    Args:
        noise: with `start` above 0 the latents at the noise level of that step.
        text, negative: `[B, L, D]`; `negative` is needed unless guidance_scale is 1 or the policy names text.
        conditions: further channels `[B or 1, ...]`, see `infer.conditions.image_conditions`.
        progress: called with (done, total) after each step.
        preview: called in each step with its number (1 is the first of the schedule) and the current estimate of
            the clean latents.
    """
    conditions = {} if conditions is None else repeated(conditions, noise.shape[0], pipe.device)
    clean, branch = conditions.get("clean_frame"), {**conditions, "text": text}
    whole = (lambda x: x) if clean is None else (lambda x: with_clean_frame(x, clean))
    scale, other = sampling.guidance_scale, {}
    if scale != 1.0:
        if negative is None and "text" not in dict(sampling.policy):
            raise UserError(f"guidance_scale {scale} needs a negative prompt embedding")
        other = unconditional(branch, negative, dict(sampling.policy))

    def velocity(x, sigma, timestep, channels):
        return wan.forward(pipe.params, pipe.cfg, inputs_of(pipe, x, timestep, channels), run=run)

    field = guided(velocity, branch, other, scale, batched=sampling.batched_guidance, rescale=sampling.guidance_rescale)
    if preview is not None:
        field = _watched(field, lambda step, x0: preview(step, whole(x0)), start + 1)
    x = noise.to(pipe.device)
    out = sample(sampling.sampler, field, x, sampling.steps, sampling.flow_shift, progress=progress, start=start)
    return whole(out)


@torch.no_grad()
def generate(
    pipe: Pipeline,
    sampling: Sampling,
    text: Tensor,
    negative: Tensor | None,
    seeds: Sequence[int],
    *,
    conditions: Mapping[str, Tensor] | None = None,
    video: Tensor | None = None,
    strength: float = 1.0,
    run: Run = Run(),
    progress: Progress | None = None,
    preview: Preview | None = None,
) -> list[Tensor]:
    """One video per row of `text`: uint8 frames `[T, H, W, 3]` on the CPU.

    Args:
        conditions, progress, preview: as in `sample_latents`.
        video: latents `[B or 1, C, t, h, w]` to start from, which are noised to the step of `start_step` first.
        strength: how much of the schedule is run on them; at 1 they leave next to no trace.

    Raises:
        UserError: a geometry or setting that cannot be sampled, before any work; latents that are not
            finite at the end.
    """
    pictured = conditions is not None and len(conditions) > 0
    check_sampling(pipe, sampling, ["image"] if pictured else [])
    if len(seeds) != text.shape[0]:
        raise UserError(f"{counted(len(seeds), 'seed')} for {counted(text.shape[0], 'prompt')}")
    x, start = initial_noise(latent_shape(pipe, sampling), seeds), 0
    if video is not None:
        start = start_step(sampling.steps, strength)
        x = noised_video(sampling, video, x, start)
    latents = sample_latents(
        pipe, sampling, x, text, negative, conditions=conditions, start=start, run=run, progress=progress,
        preview=preview,
    )  # fmt: skip
    if not bool(latents.isfinite().all()):  # else they would become black frames without a word
        raise UserError(
            f"sampling in {pipe.dtype} gave NaN or infinite latents: the weights or embeddings hold such values, "
            "or the dtype overflows (float16 does with many models; try bfloat16 or float32)"
        )
    return decode_frames(pipe.vae, latents)


def noised_video(sampling: Sampling, video: Tensor, noise: Tensor, start: int) -> Tensor:
    """Clean latents `[B or 1, C, t, h, w]` at the noise level of step `start`, float32 on the CPU.

    Raises UserError for latents that are not as large as the noise `[B, C, t, h, w]`.
    """
    if video.shape[1:] != noise.shape[1:] or video.shape[0] not in (1, noise.shape[0]):
        raise UserError(f"the video's latents are {list(video.shape)}, this sampling takes {list(noise.shape)}")
    _, schedule = schedule_of(sampling.sampler, sampling.steps, sampling.flow_shift)
    return noised(video.float().cpu(), noise, schedule.sigmas[start : start + 1])
