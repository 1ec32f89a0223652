"""LTX-2's pipelines give what Diffusers' give for the same weights, texts and noise: every guidance, every kind of
condition, one stage and two. Folders are as Diffusers writes them."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ltx2_pipe_cases import MODULES, SAMPLING, Pair, drawing, make_pair, upsampler
from ltx2_side_cases import draw

from core.geometry import to_video
from infer.ltx2_generate import generate_latents, initial_noise, start_of
from infer.ltx2_guidance import StreamGuidance
from infer.ltx2_sampling import Given, image_crf, shapes_of, tokens_of
from infer.ltx2_schedules import DISTILLED_SIGMAS, shift_exponent
from infer.ltx2_stages import enlarged, half, refine
from infer.media import recompressed
from nn.ltx2_conditions import FirstFrame, Keyframe, Reference
from nn.ltx2_config import PRESETS

SEED = 5
# float32 on both sides through three steps of three blocks and up to four passes, whose differences guidance scales
# by up to 7: some hundred roundings of the largest entry.
NEAR = 2e-5
OFF = {"guidance_scale": 1.0, "stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
OFF |= {f"audio_{name}": value for name, value in OFF.items()}
GUIDES = {
    "none": {},
    "text": {"guidance_scale": 3.0, "audio_guidance_scale": 7.0},
    "sound alone": {"audio_guidance_scale": 7.0, "audio_guidance_rescale": 0.7},
    "all": {
        "guidance_scale": 3.0, "audio_guidance_scale": 7.0, "stg_scale": 1.0, "audio_stg_scale": 0.5,
        "modality_scale": 3.0, "audio_modality_scale": 2.0, "guidance_rescale": 0.7, "audio_guidance_rescale": 0.3,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=["2.3", "2.0"])
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("diffusers") / "pipeline", request.param)


@pytest.fixture(scope="module")
def newer(tmp_path_factory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("diffusers") / "pipeline", "2.3")


def guided(scales, sampling=SAMPLING):
    """A sampling with guidance named as Diffusers' arguments name it."""
    scales, blocks = OFF | scales, (1,)
    params = {
        name: StreamGuidance(
            cfg_scale=scales[f"{start}guidance_scale"], stg_scale=scales[f"{start}stg_scale"], stg_blocks=blocks,
            modality_scale=scales[f"{start}modality_scale"], rescale=scales[f"{start}guidance_rescale"],
        )
        for name, start in (("video", ""), ("audio", "audio_"))
    }  # fmt: skip
    return dataclasses.replace(sampling, **params), {**scales, "spatio_temporal_guidance_blocks": list(blocks)}


def noise_of(pair, sampling=SAMPLING, branch="latents"):
    return initial_noise(shapes_of(pair.ours, sampling), [SEED], branch)


def agree(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        error = (x - theirs[name]).abs().max() / theirs[name].abs().max()
        assert error < NEAR, f"{name}: relative error {error:.2e}"


def picture(seed: int, size=(SAMPLING.height, SAMPLING.width), frames: int = 1) -> torch.Tensor:
    """Random frames uint8 `[T, H, W, 3]`."""
    noise = draw(seed, "picture", frames, *size, 3)
    return (noise * 40 + 128).clamp(0, 255).to(torch.uint8)


def encoded(pair, frames):
    return pair.ours.vae.encode(to_video(frames)[None])


# --- one stage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guide", GUIDES)
def test_text_to_video_and_sound_with_every_guidance(pair, guide):
    sampling, options = guided(GUIDES[guide])
    text, noise = pair.texts(1), noise_of(pair)
    negative = pair.texts(2) if guide != "none" else None
    with drawing("LTX2Pipeline", noise.values()):
        theirs = pair.sample(pair.theirs("LTX2Pipeline"), text, negative, **options)
    agree(generate_latents(pair.ours, sampling, text, negative, [SEED]), theirs)


@pytest.mark.parametrize("options", [{}, {"image_crf": 0}], ids=["as trained", "as it is"])
def test_image_to_video(pair, options):
    """Diffusers compresses the picture by default, to a quality that follows from the model's text encoder."""
    from PIL import Image

    crf = options.get("image_crf", image_crf(pair.ours.cfg))
    sampling, guides = guided(GUIDES["text"])
    text, negative, frame = pair.texts(1), pair.texts(2), picture(3)
    image = Image.fromarray(frame[0].numpy())
    with drawing("LTX2ImageToVideoPipeline", noise_of(pair).values()):
        pipe = pair.theirs("LTX2ImageToVideoPipeline")
        theirs = pair.sample(pipe, text, negative, image=image, **options, **guides)
    first = encoded(pair, recompressed(frame[0], crf)[None])
    given = Given(conditions={"video": [FirstFrame("image")]}, extras={"image": first})
    agree(generate_latents(pair.ours, sampling, text, negative, [SEED], given=given), theirs)


def conditioned(pair, kind, given, text, negative, options, **conditions):
    """What Diffusers makes with noise for the appended tokens as ours has it, and two of its habits set aside.

    Its schedule counts tokens that are appended, and so changes with what is given; ours counts the video's own. And it
    takes x0 of a token that is partly given at the sample's noise level, not at its own, which its timestep says.
    """
    shapes, noise = shapes_of(pair.ours, SAMPLING), noise_of(pair)
    written = start_of(pair.ours, shapes, noise, given, SAMPLING.fps, [SEED]).written["video"]
    own = tokens_of(pair.ours, "video", noise["video"])
    exponent, levels = shift_exponent(own.shape[1]), written.denoise[..., None]

    def estimate(sample, velocity, step, scheduler):
        level = levels if sample.shape[1] == levels.shape[1] else 1.0
        return sample - velocity * scheduler.sigmas[step] * level

    drawn = [torch.cat([own, written.noise], dim=1), tokens_of(pair.ours, "audio", noise["audio"])]
    pipe = pair.theirs(kind)
    pipe.convert_velocity_to_x0 = estimate
    with drawing(kind, drawn), mock.patch(f"{MODULES[kind]}.calculate_shift", lambda *a: exponent):
        return pair.sample(pipe, text, negative, **conditions, **options)


def test_pictures_are_compressed_as_each_version_was_trained():
    """Diffusers tells versions apart by their text encoders."""
    from diffusers.pipelines.ltx2.utils import resolve_default_image_crf

    for name, encoder in (("ltx-2-19b", "gemma3"), ("ltx-2.3-22b", "gemma3"), ("ltx-2.5", "gemma4")):
        found = SimpleNamespace(config=SimpleNamespace(model_type=encoder))
        assert image_crf(PRESETS[name]) == resolve_default_image_crf(found)


@pytest.mark.parametrize("strength, crf", [(1.0, None), (0.6, 0)])
def test_a_first_frame_and_keyframes(newer, strength, crf):
    from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition

    sampling, options = guided(GUIDES["text"])
    text, negative, first, later = newer.texts(1), newer.texts(2), picture(3), picture(4)
    placed = {0: (first, 1.0), 2: (later, strength)}  # in latent frames, of which the second begins with frame 3
    theirs = [LTX2VideoCondition(f[0].numpy(), index=i, strength=s, crf=crf) for i, (f, s) in placed.items()]
    conditions = [FirstFrame("first"), Keyframe("later", frame=3, strength=strength)]
    first, later = (recompressed(f[0], 33 if crf is None else crf)[None] for f in (first, later))
    extras = {"first": encoded(newer, first), "later": encoded(newer, later)}
    given = Given(conditions={"video": conditions}, extras=extras)
    wanted = conditioned(newer, "LTX2ConditionPipeline", given, text, negative, options, conditions=theirs)
    agree(generate_latents(newer.ours, sampling, text, negative, [SEED], given=given), wanted)


@pytest.mark.parametrize("downscale, hidden", [(1, False), (2, False), (2, True)])
def test_a_reference_video(newer, downscale, hidden):
    from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition

    sampling, options = guided({})
    text, size = newer.texts(1), (SAMPLING.height // downscale, SAMPLING.width // downscale)
    frames = picture(3, size, SAMPLING.num_frames)
    pixels = frames.permute(0, 3, 1, 2) / 255
    # Diffusers hides whatever is below 1 from attention, so that only 0 means the same on both sides.
    attention = {"conditioning_attention_strength": 0.0} if hidden else {}
    condition = Reference("reference", downscale=downscale, attention=0.0 if hidden else None)
    given = Given(conditions={"video": [condition]}, extras={"reference": encoded(newer, frames)})
    wanted = conditioned(
        newer, "LTX2InContextPipeline", given, text, None, options, **attention,
        reference_conditions=[LTX2ReferenceCondition(pixels)], reference_downscale_factor=downscale,
    )  # fmt: skip
    agree(generate_latents(newer.ours, sampling, text, None, [SEED], given=given), wanted)


# --- two stages -----------------------------------------------------------------------------------------------


def test_two_stages(pair):
    """Latents of half the size, made larger outside of their statistics, noised and denoised on the fixed schedule."""
    from diffusers import LTX2LatentUpsamplePipeline

    large = dataclasses.replace(SAMPLING, height=64)
    large = dataclasses.replace(large, width=128)
    small, (_, off) = half(large), guided({})
    sampling, options = guided(GUIDES["text"], small)
    text, negative = pair.texts(1), pair.texts(2)
    with drawing("LTX2Pipeline", noise_of(pair, small).values()):
        first = pair.sample(pair.theirs("LTX2Pipeline"), text, negative, small, **options)
    ours = generate_latents(pair.ours, sampling, text, negative, [SEED])
    agree(ours, first)
    grow = LTX2LatentUpsamplePipeline(vae=pair.modules["vae"], latent_upsampler=upsampler())
    raw = grow(
        latents=first["video"], latents_normalized=True, height=small.height, width=small.width, output_type="latent",
        return_dict=False,
    )[0]  # fmt: skip
    bigger = enlarged(pair.ours, ours["video"])
    agree({"video": bigger}, {"video": pair.ours.vae.normalise(raw)})
    noise = {name: tokens_of(pair.ours, name, x) for name, x in noise_of(pair, large, "refine").items()}
    sound, vae = tokens_of(pair.ours, "audio", first["audio"]), pair.modules["audio_vae"]
    sigmas = list(DISTILLED_SIGMAS["two"])
    with drawing("LTX2Pipeline", noise.values()):
        theirs = pair.sample(
            pair.theirs("LTX2Pipeline", distilled=True), text, None, dataclasses.replace(large, steps=3), latents=raw,
            audio_latents=sound * vae.latents_std + vae.latents_mean, sigmas=sigmas, noise_scale=sigmas[0], **off,
        )  # fmt: skip
    agree(refine(pair.ours, large, {**ours, "video": bigger}, text, [SEED]), theirs)


# --- laws -----------------------------------------------------------------------------------------------------


def test_a_sample_depends_on_its_seed_alone_also_where_given_tokens_have_noise(newer):
    """Keyframes of a strength below 1 are noised, each sample's by its own seed."""
    frame = encoded(newer, picture(4))
    given = Given(conditions={"video": [Keyframe("k", frame=3, strength=0.6)]}, extras={"k": frame})
    text = {name: x.expand(2, -1, -1) for name, x in newer.texts(1).items()}
    both = generate_latents(newer.ours, SAMPLING, text, None, [1, 2], given=given)
    for row, seed in enumerate((1, 2)):
        one = {name: x[:1] for name, x in text.items()}
        alone = generate_latents(newer.ours, SAMPLING, one, None, [seed], given=given)
        agree({name: x[row : row + 1] for name, x in both.items()}, alone)
