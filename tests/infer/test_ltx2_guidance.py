"""Guidance of LTX-2: the formula, which passes run, equal results however they are run, and what is refused."""

import dataclasses

import pytest
import torch
from diffusers.guiders.ltx2_guidance import LTX2Guidance
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_cases import random_params, tiny_config

from core import keys
from core.errors import UserError
from infer.ltx2_guidance import (
    GUIDANCE,
    SigmaBins,
    StreamGuidance,
    at_sigma,
    combine,
    guided_velocity,
    pack_streams,
    plan_steps,
    unpack_streams,
)
from infer.ltx2_schedules import LTX2_SAMPLERS, distilled_schedule
from infer.samplers import euler
from infer.schedules import from_sigmas
from nn import ltx2
from nn.ltx2_conditions import (
    FirstFrame,
    VideoGeometry,
    noise_latents,
    stream_inputs,
    write_conditions,
    written_channels,
)
from nn.ltx2_inputs import model_inputs
from nn.ltx2_rope import audio_positions, video_positions

LAW = settings(max_examples=20, deadline=None, derandomize=True)
CFG = tiny_config()
VIDEO_CFG = dataclasses.replace(CFG, modality="video")
KEY = keys.key(0)
SCHEDULE = distilled_schedule("two")
SHAPES = {"video": (12, 4), "audio": (5, 6)}
FULL = StreamGuidance(cfg_scale=3.0, stg_scale=1.0, stg_blocks=(1,), modality_scale=2.0, rescale=0.7)


def normal(name, *shape, dtype=torch.float32):
    return keys.normal(keys.fold_in(KEY, name), shape, dtype)


def estimates(batch=2, dtype=torch.float32):
    return {name: normal(name, batch, 4, 3, dtype=dtype) + 0.3 for name in ("cond", "uncond", "stg", "modality")}


# --- the formula --------------------------------------------------------------------------------------------------


SCALE = st.sampled_from([0.0, 1.0, 1.5, 4.0])


@LAW
@given(cfg=SCALE, stg=SCALE, modality=SCALE, rescale=st.sampled_from([0.0, 0.7, 1.0]))
def test_one_stream_is_diffusers_guider(cfg, stg, modality, rescale):
    ours = combine(StreamGuidance(cfg, stg, None, modality, rescale), found := estimates(dtype=torch.float64))
    names = {"cond": "pred_cond", "uncond": "pred_uncond", "stg": "pred_cond_stg", "modality": "pred_cond_modality"}
    guider = LTX2Guidance(cfg, stg, modality, rescale)
    theirs = guider.forward(**{names[k]: v for k, v in found.items()}).pred
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_arithmetic_is_float32():
    low = {k: v.bfloat16() for k, v in estimates().items()}
    out = combine(FULL, low)
    assert out.dtype == torch.float32
    assert torch.equal(out, combine(FULL, {k: v.float() for k, v in low.items()}))


@LAW
@given(rescale=st.floats(0.3, 1), batch=st.integers(2, 4))
def test_rescale_is_per_sample_unless_asked_for_the_batch(rescale, batch):
    params = StreamGuidance(cfg_scale=5.0, rescale=rescale)
    found = estimates(batch, torch.float64)
    found["cond"] = found["cond"] * torch.arange(1, batch + 1).view(-1, 1, 1)
    alone = [combine(params, {k: v[i : i + 1] for k, v in found.items()}) for i in range(batch)]
    torch.testing.assert_close(combine(params, found), torch.cat(alone), rtol=1e-12, atol=1e-12)
    whole, cond = combine(params, found, whole_batch=True), found["cond"]
    plain = cond + 4 * (cond - found["uncond"])
    factor = rescale * cond.std() / plain.std() + 1 - rescale
    torch.testing.assert_close(whole, plain * factor, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(whole, torch.cat(alone), rtol=1e-3)


# --- the plan -----------------------------------------------------------------------------------------------------


def test_a_pass_runs_where_some_stream_needs_it():
    def passes(video, audio, cfg=CFG):
        (step,) = {s.passes for s in plan_steps(cfg, {"video": video, "audio": audio}, SCHEDULE)}
        return step

    none = StreamGuidance()
    assert passes(none, none) == ("cond",)
    assert passes(none, StreamGuidance(cfg_scale=7.0)) == ("cond", "uncond")
    assert passes(StreamGuidance(stg_scale=1.0, stg_blocks=(0,)), none) == ("cond", "stg")
    assert passes(none, StreamGuidance(modality_scale=3.0)) == ("cond", "modality")
    assert passes(FULL, none) == ("cond", "uncond", "stg", "modality")
    assert passes(none, FULL, VIDEO_CFG) == ("cond",), "a video-only model ignores audio scales"
    assert passes(FULL, none, VIDEO_CFG) == ("cond", "uncond", "stg"), "and has nothing to isolate"


def test_what_each_pass_skips():
    audio = StreamGuidance(stg_scale=0.5, stg_blocks=None)
    (step, *_) = plan_steps(CFG, {"video": FULL, "audio": audio}, SCHEDULE)
    assert step.skips("stg") == {"self": (1,), "audio_self": None}
    assert step.skips("modality") == {"a2v": None, "v2a": None} and step.skips("cond") == step.skips("uncond") == {}
    (step, *_) = plan_steps(CFG, {"audio": audio}, SCHEDULE)
    assert step.skips("stg") == {"audio_self": None}, "only the stream that asks for it"


@LAW
@given(sigma=st.floats(0, 1), bounds=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=5, unique=True))
def test_bins(sigma, bounds):
    bins = SigmaBins(tuple((b, StreamGuidance(cfg_scale=b)) for b in bounds))
    above = [b for b in bounds if b >= sigma]
    assert at_sigma(bins, sigma).cfg_scale == (min(above) if above else max(bounds))
    assert at_sigma(FULL, sigma) is FULL


def test_bins_decide_step_by_step():
    late = SigmaBins(((1.0, StreamGuidance(cfg_scale=3.0)), (0.5, StreamGuidance())))
    plan = plan_steps(CFG, {"video": late}, SCHEDULE)  # sigmas 0.909, 0.725, 0.422
    assert [s.passes for s in plan] == [("cond", "uncond"), ("cond", "uncond"), ("cond",)]


def test_the_public_recipes():
    for name, block in (("ltx-2-19b", 29), ("ltx-2.3-22b", 28)):
        video, audio = GUIDANCE[name]["video"], GUIDANCE[name]["audio"]
        assert (video.cfg_scale, audio.cfg_scale, video.stg_blocks, audio.stg_blocks) == (3.0, 7.0, (block,), (block,))


# --- passes through a model ---------------------------------------------------------------------------------------


def small_model(cfg, calls=None, dtype=torch.float64):
    """`denoise` of a tiny LTX-2 with random weights."""
    params = random_params(cfg, 4, dtype)

    def denoise(x, sigma, timestep, conditions, keep):
        batch = next(iter(x.values())).shape[0]
        if calls is not None:
            calls.append((batch, None if keep is None else keep.clone()))
        level = torch.full((batch,), sigma, dtype=dtype)
        streams = {name: stream_inputs(cfg, name, latents, level, conditions) for name, latents in x.items()}
        inputs = model_inputs(cfg, streams, keep=keep, dtype=dtype)
        return ltx2.clean_estimates(cfg, inputs, ltx2.forward(params, cfg, inputs))

    return denoise


def texts(cfg, batch, name="prompt", length=4):
    """Channels of a batch: random text, and where the tokens are."""
    where = {"video": video_positions(cfg, (2, 2, 3), 24.0), "audio": audio_positions(cfg, 5)}
    out = {}
    for s in cfg.streams:
        out[f"{s.name}_text"] = normal(f"{name} {s.name}", batch, length, s.text_dim, dtype=torch.float64)
        out[f"{s.name}_positions"] = where[s.name].expand(batch, -1, -1, -1)
    return out


def start_of(cfg, batch, dtype=torch.float64):
    return pack_streams({s.name: normal(s.name, batch, *SHAPES[s.name], dtype=dtype) for s in cfg.streams})


def shapes_of(cfg):
    return {s.name: SHAPES[s.name] for s in cfg.streams}


def velocity(cfg, guidance, batch=2, calls=None, schedule=SCHEDULE, **changes):
    return guided_velocity(
        cfg, small_model(cfg, calls), guidance, schedule, shapes_of(cfg), texts(cfg, batch), texts(cfg, batch, "none"),
        **changes,
    )  # fmt: skip


def test_a_video_only_build_makes_exactly_one_call_a_step():
    calls = []
    guidance = {"video": StreamGuidance(), "audio": dataclasses.replace(FULL, cfg_scale=7.0)}
    euler(velocity(VIDEO_CFG, guidance, calls=calls), start_of(VIDEO_CFG, 2), SCHEDULE)
    assert calls == [(2, None)] * 3


@pytest.mark.parametrize("max_batch", [None, 1, 3])
@pytest.mark.parametrize("batched", [True, False])
def test_batched_sequential_and_split_passes_agree(batched, max_batch):
    calls, x = [], start_of(CFG, 2)
    out = velocity(CFG, {"video": FULL, "audio": FULL}, calls=calls, batched=batched, max_batch=max_batch)(x, 0.7, None)
    expected = velocity(CFG, {"video": FULL, "audio": FULL}, batched=False)(x, 0.7, None)
    # Float64 products of other shapes are summed in another order; guidance and 1/sigma magnify that some ten times.
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    rows, limit = (8, 1) if batched else (2, 4), max_batch
    total = [min(limit or rows[0], rows[0] - a) for a in range(0, rows[0], limit or rows[0])] * rows[1]
    assert [n for n, _ in calls] == total
    assert all(keep.shape == (4, 2, n) for n, keep in calls)
    keeps = torch.cat([keep for _, keep in calls], dim=-1)
    assert keeps[:, :, :4].all() and not keeps[:2, 1, 4:6].any() and not keeps[2:, :, 6:].any()


def test_the_velocity_is_the_closed_form():
    """Four hand-made passes, combined, as a velocity; each stream with its own scales."""
    model, x, cond, none = small_model(CFG), start_of(CFG, 2), texts(CFG, 2), texts(CFG, 2, "none")
    audio = StreamGuidance(cfg_scale=7.0, stg_scale=0.5, stg_blocks=(0,))
    out = unpack_streams(velocity(CFG, {"video": FULL, "audio": audio})(x, 0.7, None), SHAPES)
    keep = torch.ones(4, 2, 2, dtype=torch.bool)
    stg, alone = keep.clone(), keep.clone()
    stg[0, 1], stg[1, 0], alone[2:] = False, False, False
    latents = unpack_streams(x, SHAPES)
    passes = [(cond, keep), (none, keep), (cond, stg), (cond, alone)]
    c, u, s, m = (model(latents, 0.7, None, text, mask) for text, mask in passes)
    video = c["video"] + 2 * (c["video"] - u["video"]) + (c["video"] - s["video"]) + (c["video"] - m["video"])
    factor = c["video"].std(dim=(1, 2), keepdim=True) / video.std(dim=(1, 2), keepdim=True)
    video = video * (0.7 * factor + 0.3)
    sound = c["audio"] + 6 * (c["audio"] - u["audio"]) + 0.5 * (c["audio"] - s["audio"])
    for name, x0 in (("video", video), ("audio", sound)):
        torch.testing.assert_close(out[name], (latents[name] - x0) / 0.7, rtol=1e-9, atol=1e-9)
    assert (video - c["video"]).abs().max() > 0.1


def test_skipped_steps_keep_the_last_estimate():
    schedule = from_sigmas([1.0, 0.8, 0.6, 0.4, 0.2])
    video, audio = StreamGuidance(cfg_scale=3.0, skip_step=1), StreamGuidance(skip_step=2)
    plan = plan_steps(CFG, {"video": video, "audio": audio}, schedule)
    assert [s.reused for s in plan] == [(), ("video", "audio"), ("audio",), ("video",), ("audio",)]
    assert [s.passes for s in plan] == [("cond", "uncond"), (), ("cond", "uncond"), ("cond",), ("cond", "uncond")]
    calls, x = [], start_of(CFG, 1)
    v = velocity(CFG, {"video": video, "audio": audio}, 1, calls, schedule)
    first = unpack_streams(x - schedule.sigmas[0].item() * v(x, schedule.sigmas[0].item(), None), SHAPES)
    sigma = schedule.sigmas[1].item()
    second = unpack_streams(x + 1 - sigma * v(x + 1, sigma, None), SHAPES)
    assert len(calls) == 1
    for name in SHAPES:
        torch.testing.assert_close(second[name], first[name])
    fresh = velocity(CFG, {"video": video}, 1, schedule=schedule)
    with pytest.raises(UserError, match="step 1 keeps estimates of video from a step before it: give start=1"):
        fresh(x, sigma, None)
    later = plan_steps(CFG, {"video": video}, schedule, start=1)
    assert later[1].reused == () and later[2].reused == ("video",), "sampling begins with a guided step"


@pytest.mark.parametrize("name", LTX2_SAMPLERS)
def test_given_tokens_stay_clean_through_every_sampler(name):
    """Rescaling and guidance would move them; between the schedule's sigmas the plan of the step counts."""
    cfg, batch = CFG, 2
    geometry = VideoGeometry(cfg, (2, 2, 3), 24.0)
    frame = normal("frame", 1, 4, 1, 2, 3, dtype=torch.float64)
    written = write_conditions(KEY, torch.zeros(batch, 12, 4).double(), geometry, [FirstFrame("f")], {"f": frame})
    sigma = torch.full((batch,), SCHEDULE.sigmas[0].item(), dtype=torch.float64)
    noise = normal("noise", batch, 12, 4, dtype=torch.float64)
    sound = normal("a", batch, 5, 6, dtype=torch.float64)
    x = {"video": noise_latents(cfg, written, noise, sigma).latent, "audio": sound}
    v = guided_velocity(
        cfg, small_model(cfg), {"video": FULL, "audio": FULL}, SCHEDULE, SHAPES,
        texts(cfg, batch) | written_channels("video", written), texts(cfg, batch, "none"),
        written={"video": written}, max_batch=3,
    )  # fmt: skip
    out = unpack_streams(LTX2_SAMPLERS[name](v, pack_streams(x), SCHEDULE), SHAPES)["video"]
    assert torch.equal(out[:, :6], written.clean[:, :6]) and not torch.allclose(out[:, 6:], noise[:, 6:], atol=0.1)


def test_packing_is_a_round_trip():
    x = {"video": normal("v", 2, 12, 4), "audio": normal("a", 2, 5, 6)}
    packed = pack_streams(x)
    assert packed.shape == (2, 78)
    assert all(torch.equal(v, x[k]) for k, v in unpack_streams(packed, SHAPES).items())


# --- faults -------------------------------------------------------------------------------------------------------


NONE = texts(CFG, 2, "none")


def guided_with(guidance={"video": FULL}, uncond=NONE, **changes):  # noqa: B006
    return guided_velocity(CFG, None, guidance, SCHEDULE, SHAPES, texts(CFG, 2), uncond, **changes)


@pytest.mark.parametrize(
    "make,fault",
    [
        (lambda: StreamGuidance(cfg_scale="3"), "cfg_scale is '3', allowed is a number"),
        (lambda: StreamGuidance(rescale=2.0), "rescale is 2.0, allowed is 0..1"),
        (lambda: StreamGuidance(skip_step=-1), "skip_step is -1, allowed is an integer >= 0"),
        (lambda: StreamGuidance(stg_scale=1.0), "stg_scale is 1.0 without stg_blocks"),
        (lambda: SigmaBins(()), "no bins"),
        (lambda: SigmaBins(((0.5, FULL), (0.5, FULL))), "bound 0.5 is given twice"),
        (lambda: guided_with(guidance={"sound": FULL}), "'sound' is no stream, allowed: video, audio"),
        (lambda: guided_with({"video": StreamGuidance(stg_scale=1.0, stg_blocks=(2,))}), "block 2, blocks are 0 to 1"),
        (lambda: guided_with(max_batch=0), "max_batch is 0, allowed is an integer >= 1"),
        (lambda: guided_with(uncond=None), "needs conditions without the prompt"),
        (lambda: guided_with(uncond={"text": torch.zeros(2, 4, 9)}), "channel 'text': only in uncond"),
        (lambda: guided_with(uncond=texts(CFG, 2, length=3)), "'video_text': cond has shape [2, 4, 16], uncond [2, 3"),
    ],
)
def test_faults(make, fault):
    with pytest.raises(UserError) as error:
        make()
    assert fault in str(error.value)


def test_what_is_equal_in_both_branches_may_be_left_out_and_lengths_differ_in_sequence():
    short = {k: v for k, v in texts(CFG, 2, "none", length=3).items() if k == "video_text"}
    v = guided_velocity(CFG, small_model(CFG), {"video": FULL}, SCHEDULE, SHAPES, texts(CFG, 2), short, batched=False)
    assert v(start_of(CFG, 2), 0.7, None).shape == (2, 78)
