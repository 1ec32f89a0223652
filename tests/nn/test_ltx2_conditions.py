"""Conditioning of LTX-2's streams: what stays clean, what is lost on, where appended tokens are, Diffusers' numbers."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from diffusers import LTX2ConditionPipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2InContextPipeline
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_cases import diffusers_model, random_params, tiny_config

from core import keys
from core.errors import UserError
from nn import ltx2
from nn.ltx2_conditions import (
    AudioGeometry,
    FirstFrame,
    Keyframe,
    LatentFrames,
    Mask,
    Prefix,
    Reference,
    ReferenceAudio,
    SpatialCrop,
    Suffix,
    VideoGeometry,
    apply_conditions,
    keep_given,
    noise_latents,
    stream_inputs,
    write_conditions,
    written_channels,
)
from nn.ltx2_inputs import model_inputs, noised
from nn.ltx2_rope import audio_positions, video_positions

LAW = settings(max_examples=20, deadline=None, derandomize=True)
CFG = tiny_config()
KEY = keys.key(0)
GRID, FPS = (5, 2, 3), 24.0
VIDEO, AUDIO = VideoGeometry(CFG, GRID, FPS), AudioGeometry(CFG, 7)


def normal(name, *shape, dtype=torch.float32):
    return keys.normal(keys.fold_in(KEY, name), shape, dtype)


def sample(geometry, batch=2, dtype=torch.float32):
    """Clean latents, noise `[B, N, C]` and a sigma `[B]`."""
    width = CFG.stream(geometry.stream).in_channels
    count = geometry.grid[0] * geometry.grid[1] * geometry.grid[2]
    clean, noise = (normal(f"{geometry.stream} {n}", batch, count, width, dtype=dtype) for n in ("clean", "noise"))
    return clean, noise, torch.tensor([0.3, 0.85, 1.0, 0.6][:batch], dtype=dtype)


def latents(name, t, h=GRID[1], w=GRID[2], batch=1):
    return normal(name, batch, CFG.in_channels, t, h, w)


EXTRAS = {
    "frame": latents("frame", 1), "clip": latents("clip", 2), "whole": latents("whole", 5),
    "small": latents("s", 3, 1, 1),
    "mask": (normal("mask", 2, *GRID) > 0).float(), "seen": keys.uniform(KEY, (1, 3)), "audio mask": torch.eye(7)[:2],
    "step": normal("step", 1, 2, 1, 3), "sound": normal("sound", 2, 2, 4, 3),
}  # fmt: skip
ALONE = [
    (VIDEO, FirstFrame()), (VIDEO, FirstFrame("frame")), (VIDEO, Prefix(count=2)), (VIDEO, Prefix("clip", count=2)),
    (VIDEO, Suffix("clip", count=2)), (VIDEO, LatentFrames("clip", index=-3, count=2)), (VIDEO, Mask()),
    (VIDEO, Mask("whole")), (VIDEO, SpatialCrop(region=(0, 40, 32, 96))),
    (VIDEO, SpatialCrop("whole", region=(0, 0, 99, 32))), (VIDEO, Keyframe("frame", frame=9)),
    (VIDEO, Keyframe("clip", frame=0, single=False)), (VIDEO, Reference("whole")), (AUDIO, Prefix(count=3)),
    (AUDIO, Suffix("step")), (AUDIO, Mask(mask="audio mask")), (AUDIO, ReferenceAudio("sound")),
]  # fmt: skip


def run(geometry, listed, batch=2, extras=EXTRAS, **kwargs):
    return apply_conditions(KEY, *sample(geometry, batch, **kwargs), geometry, listed, extras)


# --- laws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", [VIDEO, AUDIO], ids=["video", "audio"])
def test_nothing_is_plain_generation_with_one_timestep(geometry):
    clean, noise, sigma = sample(geometry)
    latent, timesteps, loss_mask, positions, target = apply_conditions(KEY, clean, noise, sigma, geometry, [], {})
    torch.testing.assert_close(latent, noised(clean, noise, sigma[:, None]), rtol=1e-6, atol=1e-6)  # one rounding
    assert torch.equal(timesteps, 1000 * sigma[:, None]) and timesteps.shape == (2, 1)
    assert loss_mask.all() and torch.equal(target, noise - clean)
    own = video_positions(CFG, GRID, FPS) if geometry is VIDEO else audio_positions(CFG, 7)
    assert torch.equal(positions, own)


@pytest.mark.parametrize("geometry,condition", ALONE, ids=lambda v: type(v).__name__)
@LAW
@given(level=st.floats(0, 1))
def test_given_tokens_are_clean_and_not_lost_on_at_every_sigma(geometry, condition, level):
    clean, noise, _ = sample(geometry)
    out = apply_conditions(KEY, clean, noise, torch.full((2,), level), geometry, [condition], EXTRAS)
    written = write_conditions(KEY, clean, geometry, [condition], EXTRAS)
    held = ~out.loss_mask
    assert held.any() and out.timesteps.shape == held.shape == out.latent.shape[:2]
    assert torch.equal(out.latent[held], written.clean[held])
    assert (out.timesteps[held] == 0).all() and torch.equal(written.denoise, (~held).float())
    n = clean.shape[1]
    free = out.loss_mask[:, :n]
    plain = noised(clean, noise, torch.full((2, 1), level))
    torch.testing.assert_close(out.latent[:, :n][free], plain[free], rtol=1e-5, atol=1e-6)
    seen = out.timesteps[out.loss_mask]
    torch.testing.assert_close(seen, torch.full_like(seen, 1000 * level))
    assert torch.equal(out.target[:, :n], noise - clean)
    estimate = torch.randn_like(out.latent)
    pinned = keep_given(written, estimate)
    assert torch.equal(pinned[held], written.clean[held]) and torch.equal(pinned[~held], estimate[~held])


def test_where_each_condition_writes_and_what():
    clean, every = sample(VIDEO)[0].unflatten(1, GRID), slice(None)
    corner = EXTRAS["whole"][:, :, :, 1:2, 1:3]
    wanted = {
        Prefix("clip", count=2): (slice(0, 2), every, every, EXTRAS["clip"]),
        Suffix("clip", count=2): (slice(3, 5), every, every, EXTRAS["clip"]),
        LatentFrames("clip", index=-3, count=2): (slice(2, 4), every, every, EXTRAS["clip"]),
        FirstFrame("frame"): (slice(0, 1), every, every, EXTRAS["frame"]),
        SpatialCrop("whole", region=(32, 40, 64, 96)): (every, slice(1, 2), slice(1, 3), corner),
    }
    for condition, (t, h, w, put) in wanted.items():
        written = write_conditions(KEY, sample(VIDEO)[0], VIDEO, [condition], EXTRAS)
        expected, mask = clean.clone(), torch.ones(2, *GRID)
        expected[:, t, h, w] = put.permute(0, 2, 3, 4, 1)
        mask[:, t, h, w] = 0
        assert torch.equal(written.clean.unflatten(1, GRID), expected), condition
        assert torch.equal(written.denoise.unflatten(1, GRID), mask), condition


@LAW
@given(order=st.permutations(range(4)), strength=st.sampled_from([1.0, 0.7]), probability=st.sampled_from([1.0, 0.5]))
def test_the_order_of_disjoint_conditions_does_not_matter(order, strength, probability):
    shared = {"strength": strength, "probability": probability}
    listed = [FirstFrame("frame", **shared), Suffix(count=2, **shared), LatentFrames(index=2, **shared)]
    listed.append(Keyframe("frame", frame=9))
    first, again = run(VIDEO, listed), run(VIDEO, [listed[i] for i in order])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@LAW
@given(strength=st.floats(0, 1), level=st.floats(0, 1))
def test_strength_and_soft_masks_are_the_noisers_formula(strength, level):
    clean, noise, _ = sample(VIDEO, dtype=torch.float64)
    soft = keys.uniform(keys.fold_in(KEY, "soft"), (2, *GRID), torch.float64)
    out = apply_conditions(
        KEY, clean, noise, torch.full((2,), level, dtype=torch.float64), VIDEO, [Mask("whole", strength, mask="m")],
        {"m": soft, "whole": EXTRAS["whole"]},
    )  # fmt: skip
    given_tokens = EXTRAS["whole"].double().flatten(2).mT
    s = soft.flatten(1)[..., None]
    held, m = clean * (1 - s) + given_tokens * s, 1 - strength * s
    expected = (1 - m) * held + m * ((1 - level) * clean + level * noise)
    torch.testing.assert_close(out.latent, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.timesteps, 1000 * level * m[..., 0], rtol=1e-12, atol=1e-12)


def test_a_strength_keeps_float32_whatever_the_latents():
    """In bf16 1 - 0.7 would be 0.30078125."""
    clean, noise, sigma = sample(VIDEO)
    written = write_conditions(KEY, clean.bfloat16(), VIDEO, [FirstFrame(strength=0.7)], {})
    assert written.denoise[0, 0] == torch.tensor(1 - 0.7) and written.clean.dtype == torch.float32
    assert noise_latents(CFG, written, noise.bfloat16(), sigma).latent.dtype == torch.float32


def test_a_threshold_makes_masks_hard():
    soft = {"mask": torch.full((1, *GRID), 0.5)}
    soft["mask"][:, 1] = 0.51
    mask = run(VIDEO, [Mask(threshold=0.5)], extras=soft).loss_mask.unflatten(1, GRID)
    assert not mask[:, 1].any() and mask[:, 0].all() and mask[:, 2:].all()


def test_probability_is_drawn_per_sample_and_for_appended_tokens_per_batch():
    clean, noise = (t.expand(64, -1, -1) for t in (sample(VIDEO, 1)[0], sample(VIDEO, 1)[1]))
    args = clean, noise, torch.full((64,), 0.5), VIDEO
    hard = ~apply_conditions(KEY, *args, [FirstFrame(probability=0.5)], {}).loss_mask
    given_first = hard[:, 0]
    assert 16 < int(given_first.sum()) < 48 and torch.equal(hard.sum(1), given_first * 6)
    never = apply_conditions(KEY, *args, [FirstFrame(probability=0.0)], {})
    assert never.loss_mask.all() and never.timesteps.shape == (64, 30)
    sometimes = [Reference("whole", probability=0.5)]
    longer = [apply_conditions(keys.key(i), *args, sometimes, EXTRAS).latent.shape[1] for i in range(32)]
    assert set(longer) == {30, 60} and 8 < longer.count(60) < 24
    gone = apply_conditions(KEY, *args, [Reference("whole", probability=0.0)], EXTRAS)
    assert gone.timesteps.shape == (64, 1), "without any condition left this is plain generation"


def test_a_token_is_a_whole_patch():
    """With patches of 2 x 2 x 2 a token is given only where all of its latents are."""
    cfg = dataclasses.replace(CFG, patch_size=2, patch_size_t=2, in_channels=8, out_channels=8)
    geometry = VideoGeometry(cfg, (2, 1, 2), FPS)
    clean, mask = torch.zeros(1, 4, 8), torch.ones(1, 4, 2, 4)
    mask[0, 0, 0, 0] = 0
    written = write_conditions(KEY, clean, geometry, [Mask()], {"mask": mask})
    assert written.denoise.tolist() == [[1, 0, 0, 0]]
    tail = {"tail": torch.ones(1, 1, 2, 2, 4)}
    written = write_conditions(KEY, clean, geometry, [Suffix("tail", count=2)], tail)
    assert written.denoise.tolist() == [[1, 1, 0, 0]] and (written.clean[0, 2:] == 1).all()
    with pytest.raises(UserError, match=r"\(Prefix\): latent frame 1 is inside a patch of 2 frames"):
        write_conditions(KEY, clean, geometry, [Prefix(count=1)], {})


# --- positions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("fps", [24.0, torch.tensor([24.0, 12.0])], ids=["one", "per sample"])
def test_a_thinned_reference_spans_what_the_video_spans(factor, fps):
    geometry = VideoGeometry(CFG, (5, 2, 2), fps)
    reference = {"r": latents("r", 4 // factor + 1, 1, 1)}
    clean = torch.zeros(2, 20, CFG.in_channels)
    where = write_conditions(KEY, clean, geometry, [Reference("r", downscale=2, temporal=factor)], reference).positions
    own, appended = where[:, :, :20], where[:, :, 20:]
    torch.testing.assert_close(appended[:, 0, 0], own[:, 0, 0])  # the first frame of either, one frame long
    torch.testing.assert_close(appended[:, 0, -1, 1], own[:, 0, -1, 1])
    assert torch.equal(appended[0, 1:, 0], torch.tensor([[0.0, 64.0]] * 2)), "a token of half the size covers two"


def test_references_of_sound_start_with_the_sound():
    where = run(AUDIO, [ReferenceAudio("sound")]).positions
    assert torch.equal(where[:, :, 7:], where[:, :, :4]) and where.shape == (1, 1, 11, 2)


# --- Diffusers ----------------------------------------------------------------------------------------------------


def theirs(kind):
    """A pipeline of Diffusers whose VAE takes pictures that are latents already, for CFG and GRID."""
    pipe = object.__new__(kind)
    ratios = {"vae_temporal_compression_ratio": 8, "vae_spatial_compression_ratio": 32}
    vae = SimpleNamespace(
        encode=lambda x: SimpleNamespace(latents=x), dtype=torch.float32, latents_mean=torch.zeros(4),
        latents_std=torch.ones(4),
    )  # fmt: skip
    values = ratios | {"transformer_spatial_patch_size": 1, "transformer_temporal_patch_size": 1}
    pipe.__dict__.update(values | {"vae": vae, "transformer": SimpleNamespace(rope=diffusers_model(CFG).rope)})
    return pipe


def as_case(pipe, monkeypatch, given_list):
    """`preprocess_conditions` gives these `(latents, strength, latent index, pixel frames)`."""
    columns = [list(c) for c in zip(*given_list, strict=True)] if given_list else [[], [], [], []]
    monkeypatch.setattr(type(pipe), "preprocess_conditions", lambda *a, **k: columns)


def theirs_latents(pipe, noise, **changes):
    """Their latents, conditioning mask, clean latents and the rest, from our noise for all tokens."""
    import diffusers.pipelines.ltx2.pipeline_ltx2_condition as one
    import diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora as two

    with pytest.MonkeyPatch.context() as patch:
        for module in (one, two):
            patch.setattr(module, "randn_tensor", lambda shape, **k: noise)
        return pipe.prepare_latents(
            [], batch_size=2, num_channels_latents=4, height=64, width=96, num_frames=33, frame_rate=FPS,
            dtype=torch.float32, device=torch.device("cpu"), **changes,
        )  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 0.6])
@pytest.mark.parametrize("strength", [1.0, 0.8])
def test_first_frame_and_keyframes_are_diffusers(monkeypatch, scale, strength):
    frame, clip = EXTRAS["frame"], EXTRAS["clip"]
    pipe = theirs(LTX2ConditionPipeline)
    as_case(pipe, monkeypatch, [(frame, 1.0, 0, 1), (frame + 1, strength, 2, 1), (clip, 1.0, 3, 9)])
    listed = [
        FirstFrame("frame"), Keyframe("other", strength, frame=9), Keyframe("clip", frame=17, single=False),
    ]  # fmt: skip
    extras = {"frame": frame, "other": frame + 1, "clip": clip}
    written = write_conditions(KEY, torch.zeros(2, 30, 4), VIDEO, listed, extras)
    noise = torch.cat([sample(VIDEO)[1], written.noise], dim=1)
    latent, mask, clean, places = theirs_latents(pipe, noise, noise_scale=scale)
    ours = noise_latents(CFG, written, noise[:, :30], torch.full((2,), scale))
    # Both in float32, sums in another order.
    torch.testing.assert_close(ours.latent, latent, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(1 - written.denoise, mask[..., 0])
    torch.testing.assert_close(ours.timesteps, 1000 * scale * (1 - mask[..., 0]), rtol=1e-6, atol=1e-4)
    assert torch.equal(written.clean, clean)
    assert torch.equal(written.positions[:, :, 30:].expand(2, -1, -1, -1), places)


@pytest.mark.parametrize("downscale", [1, 2])
@pytest.mark.parametrize("attention", [1.0, 0.4, "map"])
def test_references_are_diffusers(monkeypatch, downscale, attention):
    """Two references, the second shorter, beside a keyframe: tokens, mask, positions and who sees whom."""
    geometry = VideoGeometry(CFG, (5, 2, 4), FPS)
    shapes = [(5, 2 // downscale, 4 // downscale), (2, 2 // downscale, 4 // downscale)]
    videos = [latents(f"video {i}", *shape) for i, shape in enumerate(shapes)]
    frame = latents("wide", 1, 2, 4)
    pipe = theirs(LTX2InContextPipeline)
    as_case(pipe, monkeypatch, [(frame, 1.0, 2, 1)])
    pipe.video_processor = SimpleNamespace(preprocess_video=lambda frames, h, w, resize_mode: videos[frames])
    extras = {"frame": frame, "0": videos[0], "1": videos[1]}
    pixels = keys.uniform(KEY, (1, 1, 33, 64, 128)) if attention == "map" else None
    names: list = [attention] * 2
    if attention == "map":
        names = ["map 0", "map 1"]
        pixels_of = [pixels, pixels[:, :, :9]]
        extras |= {n: pipe._downsample_mask_to_latent(p, *s) for n, p, s in zip(names, pixels_of, shapes, strict=True)}
    else:
        pixels_of = [None, None]
    listed = [Reference("0", downscale=downscale, attention=names[0]), Keyframe("frame", frame=9)]
    listed += [Reference("1", 0.9, downscale=downscale, attention=names[1])]
    written = write_conditions(KEY, torch.zeros(2, 40, 4), geometry, listed, extras)
    shared = dict(height=64, width=128, num_frames=33, reference_downscale_factor=downscale, device=torch.device("cpu"))
    encoded = [
        pipe._encode_reference_conditions(
            [SimpleNamespace(frames=i, strength=1.0)], conditioning_attention_mask=p, dtype=torch.float32,
            conditioning_attention_strength=1.0 if attention == "map" else attention, frame_rate=FPS, **shared,
        )
        for i, p in enumerate(pixels_of)
    ]  # fmt: skip
    tokens = torch.cat([e[0] for e in encoded], dim=1)
    places = torch.cat([e[1] for e in encoded], dim=2)
    counts = [e[3][0] for e in encoded]
    assert torch.equal(written.clean[:, 48:], tokens.expand(2, -1, -1))
    assert torch.equal(written.positions[:, :, 48:], places)
    assert torch.allclose(written.denoise[0, 40:], torch.tensor([0.0] * (8 + counts[0]) + [0.1] * counts[1]))
    masks = [torch.ones(1, n) if e[2] is None else e[2] for n, e in zip(counts, encoded, strict=True)]
    seen = pipe._build_video_self_attention_mask(40, 48, masks, torch.device("cpu"))
    torch.testing.assert_close(written.strengths, seen.expand(2, -1, -1))


# --- through the model --------------------------------------------------------------------------------------------


def forward(written, conditioned, sigma, text, params):
    cfg = dataclasses.replace(CFG, modality="video")
    channels = written_channels("video", written) | {"video_text": text}
    given_inputs = stream_inputs(cfg, "video", conditioned.latent, sigma, channels)
    return ltx2.forward(params, cfg, model_inputs(cfg, {"video": given_inputs}))["video"]


def test_a_reference_that_is_not_seen_changes_nothing_and_half_seen_something():
    params = random_params(dataclasses.replace(CFG, modality="video"), 3)
    clean, noise, sigma = sample(VIDEO)
    text = normal("text", 2, 4, CFG.stream("video").text_dim)
    outs = {}
    for attention in (None, 0.0, 0.5, 1.0):
        listed = [Mask(strength=0.0), Reference("whole", attention=attention)]
        written = write_conditions(KEY, clean, VIDEO, listed, EXTRAS)
        outs[attention] = forward(written, noise_latents(CFG, written, noise, sigma), sigma, text, params)[:, :30]
    written = write_conditions(KEY, clean, VIDEO, [Mask(strength=0.0)], EXTRAS)
    alone = forward(written, noise_latents(CFG, written, noise, sigma), sigma, text, params)
    # Float32 attention over more keys: sums in another order.
    torch.testing.assert_close(outs[0.0], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outs[1.0], outs[None], rtol=1e-4, atol=1e-5)
    assert min((a - b).abs().max() for a, b in itertools.combinations([outs[0.0], outs[0.5], outs[1.0]], 2)) > 1e-3


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "geometry,condition,fault",
    [
        (VIDEO, Prefix(count=6), "conditions[0] (Prefix): count is 6, allowed 1 to 5"),
        (VIDEO, Suffix(count=0), "(Suffix): count is 0, allowed 1 to 5"),
        (VIDEO, LatentFrames(index=5), "(LatentFrames): index is 5, allowed -5 to 4"),
        (VIDEO, LatentFrames(index=-2, count=3), "(LatentFrames): count is 3, allowed 1 to 2"),
        (VIDEO, FirstFrame("clip"), "latents 'clip': 2 x 2 x 3 tokens (time x height x width), allowed 1 x 2 x 3"),
        (VIDEO, FirstFrame("none"), "(FirstFrame): extras has no 'none', it has frame, clip,"),
        (VIDEO, FirstFrame("sound"), "latents 'sound': [2, 2, 4, 3], expected [B or 1, C, T, H, W]"),
        (VIDEO, FirstFrame(strength=1.5), "(FirstFrame): strength is 1.5, allowed 0 to 1"),
        (VIDEO, FirstFrame(probability=-1), "(FirstFrame): probability is -1, allowed 0 to 1"),
        (VIDEO, Keyframe("frame", frame=33), "(Keyframe): frame is 33, allowed 0 to 32"),
        (VIDEO, Keyframe("clip", frame=3), "allowed 1 x 2 x 3"),
        (VIDEO, Keyframe(frame=3), "(Keyframe): latents is None, allowed is the name of an entry of extras"),
        (VIDEO, Reference("small", downscale=3), "3 x 1 x 1 tokens (time x height x width), allowed any x 0 x 1"),
        (VIDEO, Reference("whole", temporal=2), "5 tokens along time, allowed 1 to 3 with temporal 2"),
        (VIDEO, Reference("whole", attention=2.0), "(Reference): attention is 2.0, allowed 0 to 1"),
        (VIDEO, Reference("whole", attention="seen"), "attention 'seen': [1, 3], allowed [1 or 2, 30]"),
        (VIDEO, Mask(mask="seen"), "mask 'seen': [1, 3], allowed [1 or 2, 5, 2, 3]"),
        (VIDEO, SpatialCrop(region=(0, 0, 31, 99)), "holds no whole token of (32, 32) pixels, the video is (64, 96)"),
        (VIDEO, ReferenceAudio("sound"), "(ReferenceAudio): not for video"),
        (AUDIO, FirstFrame(), "(FirstFrame): not for audio"),
        (AUDIO, Prefix("frame"), "latents 'frame': [1, 4, 1, 2, 3], expected [B or 1, C, T, mel] with C * mel = 6"),
        (AUDIO, Prefix("sound", count=3), "4 x 1 x 1 tokens (time x height x width), allowed 3 x 1 x 1"),
        (AUDIO, "prefix", "conditions[0]: str is no condition"),
    ],
)
def test_faults_name_the_condition_and_what_is_allowed(geometry, condition, fault):
    with pytest.raises(UserError) as error:
        run(geometry, [condition])
    assert fault in str(error.value)


def test_all_faults_come_in_one_message():
    with pytest.raises(UserError) as error:
        run(VIDEO, [Prefix(count=9), FirstFrame(), Keyframe("frame", frame=99)])
    assert "conditions[0] (Prefix)" in str(error.value) and "conditions[2] (Keyframe)" in str(error.value)
    with pytest.raises(UserError, match=r"video clean: \[2, 29, 4\], expected \[B, 30, 4\]"):
        apply_conditions(KEY, torch.zeros(2, 29, 4), torch.zeros(2, 29, 4), torch.ones(2), VIDEO, [], {})
    with pytest.raises(UserError, match="attention of a Reference: call write_conditions"):
        run(VIDEO, [Reference("whole", attention=0.5)])
