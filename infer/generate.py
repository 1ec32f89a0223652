"""Text-to-video: prompts to frames, as one function over a pipeline."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core import keys
from core.errors import UserError, raise_faults
from core.geometry import check_geometry, to_frames
from infer.folder import WAN_TEXT_LENGTH, Pipeline
from infer.guidance import guided
from infer.samplers import sample
from infer.schedules import is_int
from nn import wan
from nn.run import Run
from nn.wan_inputs import model_inputs, pad_text


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Geometry of the video in frames and pixels, and how it is sampled."""

    num_frames: int
    height: int
    width: int
    steps: int = 50
    sampler: str = "unipc"
    flow_shift: float = 3.0
    guidance_scale: float = 5.0
    guidance_rescale: float = 0.0
    batched_guidance: bool = True


def check_sampling(pipe: Pipeline, sampling: Sampling) -> None:
    """Refuses a geometry that the autoencoder and the patches cannot hold, naming the nearest valid one.

    Also a pipeline whose models do not fit together or cannot make a video from text alone.
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
    if pipe.cfg.image_dim is not None or pipe.cfg.condition_channels:
        faults.append("the transformer is an image-to-video model, only text-to-video can be sampled")
    if not is_int(sampling.steps) or sampling.steps < 1:
        faults.append(f"steps is {sampling.steps!r}, expected an integer of at least 1")
    raise_faults("this pipeline cannot be sampled so", faults)
    check_geometry(
        sampling.num_frames, sampling.height, sampling.width, temporal=pipe.vae.temporal, spatial=pipe.vae.spatial * ph
    )


def latent_shape(pipe: Pipeline, sampling: Sampling) -> tuple[int, int, int, int]:
    """`[C, t, h, w]` of the latents of a video of this geometry."""
    vae = pipe.vae
    frames = (sampling.num_frames - 1) // vae.temporal + 1
    return pipe.cfg.out_channels, frames, sampling.height // vae.spatial, sampling.width // vae.spatial


def encode_prompts(pipe: Pipeline, prompts: Sequence[str]) -> Tensor:
    """Prompt embeddings `[B, L, D]`, zero-padded to the model's text length. Needs the pipeline's text encoder."""
    if pipe.text is None:
        why = pipe.absent.get("text_encoder", "the pipeline has none")
        raise UserError(f"prompts need a text encoder: {why}; or give precomputed prompt embeddings")
    return pad_prompts(pipe, pipe.text.embed(prompts))


def pad_prompts(pipe: Pipeline, embeddings: Sequence[Tensor], names: Sequence[str] | None = None) -> Tensor:
    """Precomputed embeddings `[L_i, D]` as `[B, L, D]`, padded as in training.

    L is the length that the folder notes, else the text encoder's, else Wan's 512. Raises UserError naming
    every embedding that is longer or not as wide as the model's text_dim.
    """
    length = WAN_TEXT_LENGTH if pipe.text is None else pipe.text.max_length
    length = length if pipe.defaults.text_length is None else pipe.defaults.text_length
    return pad_text(list(embeddings), length, width=pipe.cfg.text_dim, names=names).to(pipe.device)


def initial_noise(shape: Sequence[int], seeds: Sequence[int]) -> Tensor:
    """Standard normal latents `[B, C, t, h, w]`, float32 on the CPU; a sample's noise depends on its seed alone."""
    return torch.stack([keys.normal(keys.fold_in(keys.key(seed), "latents"), shape) for seed in seeds])


@torch.no_grad()
def sample_latents(
    pipe: Pipeline,
    sampling: Sampling,
    noise: Tensor,
    text: Tensor,
    negative: Tensor | None = None,
    *,
    run: Run = Run(),
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Denoises `noise [B, C, t, h, w]` to latents of the same shape, float32.

    Args:
        text, negative: `[B, L, D]`; `negative` is needed unless guidance_scale is 1.
        progress: called with (done, total) after each step.
    """
    if negative is None:
        if sampling.guidance_scale != 1.0:
            raise UserError(f"guidance_scale {sampling.guidance_scale} needs a negative prompt embedding")
        negative = torch.zeros_like(text)

    def velocity(x, sigma, timestep, conditions):
        inputs = model_inputs(pipe.cfg, x, timestep.expand(x.shape[0]), conditions, dtype=pipe.dtype)
        return wan.forward(pipe.params, pipe.cfg, inputs, run=run)

    field = guided(
        velocity,
        {"text": text},
        {"text": negative},
        sampling.guidance_scale,
        batched=sampling.batched_guidance,
        rescale=sampling.guidance_rescale,
    )
    x = noise.to(pipe.device)
    return sample(sampling.sampler, field, x, sampling.steps, sampling.flow_shift, progress=progress)


@torch.no_grad()
def text_to_video(
    pipe: Pipeline,
    sampling: Sampling,
    text: Tensor,
    negative: Tensor | None,
    seeds: Sequence[int],
    *,
    run: Run = Run(),
    progress: Callable[[int, int], None] | None = None,
) -> list[Tensor]:
    """One video per row of `text`: uint8 frames `[T, H, W, 3]` on the CPU.

    Raises:
        UserError: a geometry or setting that cannot be sampled, before any work; latents that are not
            finite at the end.
    """
    check_sampling(pipe, sampling)
    if len(seeds) != text.shape[0]:
        raise UserError(f"{len(seeds)} seeds for {text.shape[0]} prompts")
    noise = initial_noise(latent_shape(pipe, sampling), seeds)
    latents = sample_latents(pipe, sampling, noise, text, negative, run=run, progress=progress)
    if not bool(latents.isfinite().all()):  # else they would become black frames without a word
        raise UserError(
            f"sampling in {pipe.dtype} gave NaN or infinite latents: the weights or embeddings hold such values, "
            "or the dtype overflows (float16 does with many models; try bfloat16 or float32)"
        )
    return [to_frames(video.cpu()) for video in pipe.vae.decode(latents)]
