"""Sampling against Diffusers' WanPipeline on the same weights, noise and embeddings; seeds; progress."""

import dataclasses
import io
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wan_cases import configs, diffusers_model, random_params, tiny_config

from core import keys
from core.errors import UserError
from infer.conditions import encode_prompts, pad_prompts
from infer.folder import Defaults, Pipeline, TextEncoder, Vae
from infer.generate import (
    Sampling,
    check_sampling,
    generate,
    initial_noise,
    latent_shape,
    sample_latents,
)
from infer.progress import progress, tracked
from kernels import Attention
from nn import wan
from nn.run import Run

# Float32 on both sides: one call agrees to a few 1e-6 (test_wan_parity). Guidance of 5 multiplies the difference by
# up to 9, and it feeds back through at most 5 steps whose sigmas sum to 1; 250 random cases stayed below 1e-5.
TOLERANCE = 2e-5


def pipeline(cfg, params, *, codec=True, text_max=None, **defaults) -> Pipeline:
    """A pipeline in memory whose decoder repeats the first three latent channels."""

    def decode(z):
        video = z[:, :3].repeat_interleave(8, 3).repeat_interleave(8, 4).repeat_interleave(4, 2)
        return video[:, :, 3:]

    vae = Vae(decode, cfg.out_channels, 8, 4) if codec else None
    text = (
        None
        if text_max is None
        else TextEncoder(lambda prompts: [torch.ones(1, cfg.text_dim)] * len(prompts), text_max)
    )
    return Pipeline(params, cfg, vae, text, Defaults(**defaults), torch.device("cpu"), torch.float32)


def case(cfg, seed, batch):
    """Parameters, noise `[B, C, 2, 2 ph, 2 pw]` and positive and negative embeddings."""
    k = keys.key(seed)
    size = [2 * p for p in cfg.patch_size]
    draw = lambda name, *shape: keys.normal(keys.fold_in(k, name), shape)  # noqa: E731
    noise = initial_noise((cfg.out_channels, *size), range(seed, seed + batch))
    return (
        random_params(cfg, seed),
        noise,
        draw("text", batch, 5, cfg.text_dim),
        draw("negative", batch, 5, cfg.text_dim),
    )


def diffusers_run(cfg, params, sampling, noise, text, negative):
    """WanPipeline's latents after every step, and its transformer's calls as (latents, timestep, text, velocity)."""
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    if sampling.sampler == "unipc":
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=sampling.flow_shift
        )
    else:
        scheduler = FlowMatchEulerDiscreteScheduler(shift=sampling.flow_shift)
    model, calls, trail = diffusers_model(cfg, params), [], []
    model.register_forward_hook(
        lambda module, args, kwargs, out: calls.append(
            (kwargs["hidden_states"], kwargs["timestep"], kwargs["encoder_hidden_states"], out[0])
        ),
        with_kwargs=True,
    )
    pipe = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=model)
    pipe.set_progress_bar_config(disable=True)

    def after_step(_, i, t, tensors):
        trail.append(tensors["latents"])
        return {}

    out = pipe(
        prompt_embeds=text, negative_prompt_embeds=negative, latents=noise.clone(), height=16, width=16, num_frames=5,
        num_inference_steps=sampling.steps, guidance_scale=sampling.guidance_scale, output_type="latent",
        callback_on_step_end=after_step,
    ).frames  # fmt: skip
    assert torch.equal(out, trail[-1])
    return trail, calls


def our_run(monkeypatch, cfg, params, sampling, noise, text, negative, **options):
    """Our latents, and each call of the transformer, a doubled batch taken apart into its two halves."""
    calls, forward = [], wan.forward

    def recording(p, c, inputs, **run):
        out = forward(p, c, inputs, **run)
        rows = [slice(0, len(noise)), slice(len(noise), None)] if len(out) > len(noise) else [slice(None)]
        calls.extend((inputs["latents"][r], inputs["timestep"][r], inputs["text"][r], out[r]) for r in rows)
        return out

    monkeypatch.setattr(wan, "forward", recording)
    latents = sample_latents(pipeline(cfg, params), sampling, noise, text, negative, **options)
    return latents, calls


def close(ours, theirs, what, scale):
    error = (ours - theirs).abs().max().item()
    assert error <= TOLERANCE * scale, f"{what}: off by {error:.1e} of {scale:.2g}"


@given(
    cfg=configs(),
    seed=st.integers(0, 10**4),
    batch=st.integers(1, 2),
    sampling=st.builds(
        Sampling,
        *[st.just(16)] * 3,
        steps=st.integers(1, 5),
        sampler=st.sampled_from(["unipc", "euler"]),
        flow_shift=st.sampled_from([1.0, 3.0, 8.0]),
        guidance_scale=st.sampled_from([1.0, 1.5, 5.0]),
        batched_guidance=st.booleans(),
    ),
)
@settings(max_examples=24)
def test_sampling_equals_wan_pipeline_call_by_call(cfg, seed, batch, sampling):
    """Inputs and velocity of every call of the transformer, then the latents."""
    params, noise, text, negative = case(cfg, seed, batch)
    trail, theirs = diffusers_run(cfg, params, sampling, noise, text, negative)
    with pytest.MonkeyPatch.context() as patch:
        latents, ours = our_run(patch, cfg, params, sampling, noise, text, negative)
    assert len(ours) == len(theirs) == sampling.steps * (1 if sampling.guidance_scale == 1.0 else 2)
    scale = max(t.abs().max().item() for t in trail)
    speed = max(v.abs().max().item() for *_, v in theirs)
    for i, ((x, t, cond, v), (x_, t_, cond_, v_)) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(t, t_.float()) and torch.equal(cond, cond_), f"call {i}"
        close(x, x_, f"latents of call {i}", scale)
        close(v, v_, f"velocity of call {i}", max(speed, scale))
    close(latents, trail[-1], "latents", scale)
    assert latents.dtype == torch.float32 and not torch.equal(latents, noise)


# --- seeds ----------------------------------------------------------------------------------------------------


@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    shape=st.tuples(*[st.integers(1, 4)] * 4),
)
def test_noise_of_a_sample_depends_on_its_seed_alone(seeds, shape):
    torch.manual_seed(len(seeds))
    together = initial_noise(shape, seeds)
    assert together.shape == (len(seeds), *shape) and together.dtype == torch.float32
    assert together.device.type == "cpu"
    for row, seed in zip(together, seeds, strict=True):
        assert torch.equal(row, initial_noise(shape, [seed])[0])
    if shape != (1, 1, 1, 1):
        assert len({tuple(r.flatten().tolist()) for r in together}) == len(set(seeds))


def test_a_video_depends_on_its_own_seed_and_prompt_alone():
    """Frames of a batch of two equal those of single runs, but for one level where float sums are grouped otherwise."""
    cfg = tiny_config(num_layers=2)
    params, _, text, negative = case(cfg, 3, 2)
    pipe = pipeline(cfg, params)
    sampling = Sampling(num_frames=5, height=16, width=32, steps=3)
    both = generate(pipe, sampling, text, negative, [7, 8])
    for i, frames in enumerate(both):
        (alone,) = generate(pipe, sampling, text[i : i + 1], negative[i : i + 1], [7 + i])
        assert frames.shape == (5, 16, 32, 3) and frames.dtype == torch.uint8
        assert (frames.int() - alone.int()).abs().max() <= 1
    assert (both[0].int() - both[1].int()).abs().max() > 10


def test_the_same_call_gives_the_same_bits():
    cfg = tiny_config(num_layers=2)
    params, _, text, negative = case(cfg, 0, 1)
    run = lambda seed: generate(pipeline(cfg, params), Sampling(5, 16, 16, steps=2), text, negative, [seed])[0]  # noqa: E731
    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))


@pytest.mark.parametrize("batched,rows", [(True, [4, 4]), (False, [2, 2, 2, 2])])
def test_guidance_doubles_the_batch_or_the_calls(monkeypatch, batched, rows):
    cfg = tiny_config(num_layers=1)
    params, noise, text, negative = case(cfg, 0, 2)
    seen, forward = [], wan.forward
    monkeypatch.setattr(wan, "forward", lambda p, c, i, **k: (seen.append(len(i["latents"])), forward(p, c, i, **k))[1])
    sampling = Sampling(5, 16, 16, steps=2, batched_guidance=batched)
    sample_latents(pipeline(cfg, params), sampling, noise, text, negative)
    assert seen == rows


def test_steps_are_reported_and_backends_agree():
    cfg = tiny_config(num_layers=2)
    params, noise, text, negative = case(cfg, 0, 2)
    seen, sampling = [], Sampling(5, 16, 16, steps=4)
    one = sample_latents(pipeline(cfg, params), sampling, noise, text, negative, progress=lambda *a: seen.append(a))
    assert seen == [(i, 4) for i in range(1, 5)]
    run = Run(attention=Attention("reference"))
    close(sample_latents(pipeline(cfg, params), sampling, noise, text, negative, run=run), one, "reference", 10.0)


# --- what is refused ------------------------------------------------------------------------------------------


def test_guidance_needs_a_negative_embedding():
    cfg = tiny_config(num_layers=1)
    params, noise, text, _ = case(cfg, 0, 1)
    with pytest.raises(UserError, match="guidance_scale 5.0 needs a negative prompt"):
        sample_latents(pipeline(cfg, params), Sampling(5, 16, 16), noise, text)
    sample_latents(pipeline(cfg, params), Sampling(5, 16, 16, steps=1, guidance_scale=1.0), noise, text)


def test_seeds_and_prompts_must_be_as_many():
    cfg = tiny_config(num_layers=1)
    params, _, text, negative = case(cfg, 0, 2)
    with pytest.raises(UserError, match="1 seed for 2 prompts"):
        generate(pipeline(cfg, params), Sampling(5, 16, 16), text, negative, [0])


@pytest.mark.parametrize(
    "changes,parts",
    [
        ({"num_frames": 6}, ["num_frames is 6", "nearest valid 5 or 9"]),
        ({"height": 20, "width": 0}, ["height is 20", "nearest valid 16 or 32", "width is 0", "nearest valid 16"]),
        ({"steps": 0}, ["steps is 0"]),
        ({"steps": True}, ["steps is True"]),
    ],
)
def test_geometry_and_steps_name_the_nearest_valid_values(changes, parts):
    cfg = tiny_config(num_layers=1)
    pipe = pipeline(cfg, {})
    check_sampling(pipe, Sampling(5, 16, 16))
    with pytest.raises(UserError) as error:
        generate(pipe, dataclasses.replace(Sampling(5, 16, 16), **changes), torch.zeros(1, 1, 8), None, [0])
    assert all(part in str(error.value) for part in parts)


def test_models_that_do_not_go_together_are_all_named():
    cfg = tiny_config(out_channels=2, in_channels=5, patch_size=(2, 1, 2))
    pipe = dataclasses.replace(pipeline(cfg, {}), vae=Vae(lambda z: z, 4, 8, 4))
    with pytest.raises(UserError) as error:
        check_sampling(pipe, Sampling(5, 16, 16, steps=-1))
    message = str(error.value)
    assert "4 latent channels, the transformer 2" in message and "patch_size (2, 1, 2)" in message
    assert "image-to-video" in message and "steps is -1" in message
    with pytest.raises(UserError, match="has no vae"):
        check_sampling(pipeline(cfg, {}, codec=False), Sampling(5, 16, 16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_do_not_become_black_frames(bad):
    cfg = tiny_config(num_layers=1)
    params, _, text, negative = case(cfg, 0, 1)
    text[0, 0, 0] = bad
    with pytest.raises(UserError, match="NaN or infinite latents"):
        generate(pipeline(cfg, params), Sampling(5, 16, 16, steps=1), text, negative, [0])


def test_latents_of_a_geometry():
    cfg = tiny_config()
    pipe = pipeline(cfg, {})
    assert latent_shape(pipe, Sampling(1, 16, 32)) == (4, 1, 2, 4)
    assert latent_shape(pipe, Sampling(81, 480, 832)) == (4, 21, 60, 104)


@pytest.mark.parametrize(
    "options,length", [({}, 512), ({"text_max": 7}, 7), ({"text_length": 9}, 9), ({"text_max": 7, "text_length": 9}, 9)]
)
def test_prompts_are_padded_as_in_training(options, length):
    """To the length that the folder notes, else the encoder's, else Wan's 512; and only what fits is taken."""
    cfg = tiny_config()
    pipe = pipeline(cfg, {}, **options)
    out = pad_prompts(pipe, [torch.ones(2, 8), torch.ones(length, 8)])
    assert out.shape == (2, length, 8) and out[0].sum() == 16
    with pytest.raises(UserError) as error:
        pad_prompts(pipe, [torch.ones(length + 1, 8), torch.ones(2, 7)], ["long", "narrow"])
    assert f"long: [{length + 1}, 8], expected at most [{length}, 8]" in str(error.value)
    assert f"narrow: [2, 7], expected at most [{length}, 8]" in str(error.value)


def test_a_prompt_longer_than_training_took_is_cut_as_captions_were():
    pipe = pipeline(tiny_config(), {}, text_max=7, text_length=2)
    text = dataclasses.replace(pipe.text, embed=lambda prompts: [torch.arange(24.0).view(3, 8) for _ in prompts])
    out = encode_prompts(dataclasses.replace(pipe, text=text), ["three words here"])
    assert torch.equal(out, torch.arange(16.0).view(1, 2, 8))


# --- progress -------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@given(total=st.integers(1, 300), stride=st.integers(1, 40))
def test_plain_output_has_a_line_per_tenth_and_always_the_last(total, stride):
    """Also when the count jumps by more than one."""
    out = io.StringIO()
    with progress("sampling", total, "steps", file=out) as update:
        for done in [*range(stride, total, stride), total]:
            update(done)
    lines = out.getvalue().splitlines()
    counts = [int(line.split("/")[0].removeprefix("sampling: ")) for line in lines]
    assert 1 <= len(lines) <= 10 and counts[-1] == total and counts == sorted(set(counts))
    assert len(lines) >= min(10, -(-total // stride)) // 2
    assert all(f"/{total}  " in line and line.endswith(" steps/s") for line in lines)


def test_a_terminal_gets_a_bar():
    out = Terminal()
    assert list(tracked([], "empty")) == []
    with progress("sampling", 3, "steps", file=out) as update:
        for done in range(1, 4):
            update(done)
    assert "sampling" in out.getvalue() and "3/3" in out.getvalue() and "steps/s" in out.getvalue()


def test_tracked_yields_everything_and_counts_what_is_done(capsys):
    assert list(tracked("abc", "letters", "letters")) == ["a", "b", "c"]
    assert "letters: 3/3" in capsys.readouterr().out
