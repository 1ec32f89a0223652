"""From prompts to everything that their videos need besides the transformer, for the command line and for training.

All files are read before the first encoder is, and every encoder is read once for all prompts.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from infer.conditions import encode_prompts, image_conditions, image_features
from infer.folder import Pipeline
from infer.generate import Sampling, check_sampling
from infer.media import read_video
from infer.prompts import Prompt

Place = tuple[Path, int, int]  # a picture, and the height and width at which it is used
Texts = tuple[Tensor, Tensor | None]  # text and, with guidance, negative text, each `[1, L, D]`


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """All that the videos of one prompt need besides the transformer; tensors are batches of one."""

    prompt: Prompt
    sampling: Sampling
    text: Tensor
    negative: Tensor | None
    conditions: Mapping[str, Tensor]
    video: Tensor | None = None


def moved(job: Job, device: str | torch.device) -> Job:
    """The job with its tensors on a device."""
    to = lambda x: None if x is None else x.to(device)  # noqa: E731
    conditions = {k: v.to(device) for k, v in job.conditions.items()}
    return dataclasses.replace(
        job, text=job.text.to(device), negative=to(job.negative), conditions=conditions, video=to(job.video)
    )


# --- checks ---------------------------------------------------------------------------------------------------


def place_of(prompt: Prompt, sampling: Sampling) -> Place | None:
    """The picture of a prompt and its size in the video; None for a prompt without one."""
    return None if prompt.image is None else (prompt.image, sampling.height, sampling.width)


def check_jobs(
    pipe: Pipeline,
    prompts: Sequence[Prompt],
    sampling_of: Callable[[Prompt], Sampling],
    *,
    title: str | None,
    given: Collection[str] = (),
) -> tuple[list[Sampling], dict[Place, Tensor]]:
    """How each prompt is sampled, and the pictures of all, uint8 `[H, W, 3]`, each once per size, scaled and cropped.

    Args:
        title: heads the error that lists every prompt that cannot be sampled, or whose picture cannot be read, by its
            place in the file; None raises the first fault as it is.
        given: what every video begins with besides the prompt's own picture, see `check_sampling`.
    """
    samplings: list[Sampling] = []
    images: dict[Place, Tensor] = {}
    faults = []
    for i, prompt in enumerate(prompts):
        try:
            sampling = sampling_of(prompt)
            check_sampling(pipe, sampling, [*given, *([] if prompt.image is None else ["image"])])
            place = place_of(prompt, sampling)
            if place is not None and place not in images:
                images[place] = read_video(place[0], num_frames=1, size=place[1:]).frames[0]
            samplings.append(sampling)
        except UserError as error:
            if title is None:
                raise
            faults.append(f"data[{i}]: {error}")
    if title is not None:
        raise_faults(title, faults)
    return samplings, images


# --- encoding -------------------------------------------------------------------------------------------------


def embed_texts(pipe: Pipeline, captions: Sequence[str], negatives: Sequence[str] | None) -> list[Texts]:
    """Text and negative text of every caption, each distinct one embedded once; without `negatives` None."""
    order = list(dict.fromkeys([*captions, *(() if negatives is None else negatives)]))
    rows = dict(zip(order, encode_prompts(pipe, order).split(1), strict=True))
    avoided = [None] * len(captions) if negatives is None else [rows[n] for n in negatives]
    return list(zip((rows[c] for c in captions), avoided, strict=True))


def embed_pictures(pipe: Pipeline, images: Mapping[Place, Tensor]) -> dict[Place, Tensor | None]:
    """CLIP features `[M, D]` of every picture, from one reading of the encoder; None for models that take none.

    CLIP and the transformer see the same picture, scaled and cropped.
    """
    found = image_features(pipe, list(images.values())) if images else None
    return dict.fromkeys(images) if found is None else dict(zip(images, found, strict=True))


def make_jobs(
    pipe: Pipeline,
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    texts: Sequence[Texts],
    images: Mapping[Place, Tensor],
    features: Mapping[Place, Tensor | None],
    videos: Mapping[Sampling, Tensor] | None = None,
) -> list[Job]:
    """One job a prompt. Pictures become conditions by the VAE once per size and length.

    Args:
        images, features: of `check_jobs` and `embed_pictures`.
        videos: latents `[1, C, t, h, w]` to start from, by how they are sampled.
    """
    shown: dict[tuple[Place, int], Mapping[str, Tensor]] = {}
    out = []
    for prompt, sampling, text in zip(prompts, samplings, texts, strict=True):
        place, conditions = place_of(prompt, sampling), {}
        if place is not None:
            key = (place, sampling.num_frames)
            if key not in shown:
                shown[key] = image_conditions(pipe, images[place], sampling.num_frames, features[place])
            conditions = shown[key]
        out.append(Job(prompt, sampling, *text, conditions, None if videos is None else videos.get(sampling)))
    return out
