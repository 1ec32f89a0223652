"""Text, pictures and videos to videos with real components, against Diffusers' pipelines over the same folders."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from real_cases import diffusers_pipeline, pictures, random_frames, same_video, without_loss, write_png
from safetensors.torch import save_file
from wan_cases import tiny_config

from core.errors import UserError
from core.geometry import to_frames, to_video
from infer import __main__ as cli
from infer import previews
from infer.__main__ import main
from infer.autoencoders import decode_frames, load_vae
from infer.conditions import encode_prompts, image_conditions, image_features, inputs_of, unconditional
from infer.folder import load_pipeline
from infer.generate import (
    Sampling,
    check_sampling,
    generate,
    initial_noise,
    latent_shape,
    noised_video,
    sample_latents,
    start_step,
)
from infer.media import read_video, write_video
from infer.samplers import schedule_of
from nn.wan_i2v import first_frame_channels, first_frame_known, frame_mask, token_timesteps, with_clean_frame


@pytest.fixture(autouse=True)
def lossless(monkeypatch):
    without_loss(monkeypatch)


CPU = torch.device("cpu")
PROMPT, NEGATIVE = "a red  ball &amp;amp; the dog's\n meadow", "dull blue"
SAMPLING = Sampling(9, 32, 48, steps=3, guidance_scale=3.0, flow_shift=4.0)
# Float32 on both sides through an encoder, a VAE, two blocks and three steps with guidance, which multiplies
# differences of one call by up to 5; observed are 1e-6 to 4e-6 of the largest value.
TOLERANCE = 3e-5


def close(ours, theirs, what):
    scale = theirs.abs().max().item()
    error = (ours - theirs).abs().max().item()
    assert ours.shape == theirs.shape and error <= TOLERANCE * scale, f"{what}: off by {error:.1e} of {scale:.2g}"


def opened(case, needs=("vae", "text_encoder")):
    return load_pipeline(case.folder, device=CPU, dtype=torch.float32, needs=needs)


def their_run(case, class_name, sampling, **inputs):
    """Latents of a Diffusers pipeline, and what its transformer was called with at the first step."""
    pipe, calls = diffusers_pipeline(case, class_name, sampling.flow_shift), []
    pipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    out = pipe(
        prompt=PROMPT, negative_prompt=NEGATIVE, height=sampling.height, width=sampling.width, output_type="latent",
        num_inference_steps=sampling.steps, guidance_scale=sampling.guidance_scale, **inputs,
    ).frames  # fmt: skip
    return out, calls, pipe


# --- parity ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["t2v", "5b"])
def test_text_to_video_equals_diffusers(real, kind):
    """Embeddings, final latents and the decoded video."""
    case = real(kind)
    pipe = opened(case)
    noise = initial_noise(latent_shape(pipe, SAMPLING), [1])
    theirs, calls, them = their_run(case, "WanPipeline", SAMPLING, num_frames=9, latents=noise.clone())
    text, negative = encode_prompts(pipe, [PROMPT, NEGATIVE]).split(1)
    assert text.shape == (1, 512, 32) and bool(text[0, 0].any())
    close(text, calls[0]["encoder_hidden_states"], "text")
    close(negative, calls[1]["encoder_hidden_states"], "negative text")
    assert torch.equal(text == 0, calls[0]["encoder_hidden_states"] == 0), "padding"
    ours = sample_latents(pipe, SAMPLING, noise, text, negative)
    close(ours, theirs, "latents")
    (frames,) = generate(pipe, SAMPLING, text, negative, [1])
    mean, std = (
        torch.tensor(getattr(them.vae.config, n)).view(1, -1, 1, 1, 1) for n in ("latents_mean", "latents_std")
    )
    with torch.no_grad():
        video = them.vae.decode(theirs * std + mean, return_dict=False)[0]
    assert (frames.int() - to_frames(video[0]).int()).abs().max() <= 1  # a value on the edge of two levels


@pytest.mark.parametrize("kind", ["i2v", "5b"])
@pytest.mark.parametrize("batched", [False, True])
def test_image_to_video_equals_diffusers(real, kind, batched):
    """Condition latents, masks, CLIP features, per-token timesteps, final latents."""
    case = real(kind)
    pipe = opened(case, ("vae", "text_encoder", *(["image_encoder"] if kind == "i2v" else [])))
    sampling = Sampling(9, 32, 48, steps=3, guidance_scale=3.0, flow_shift=4.0, batched_guidance=batched)
    image = random_frames(5, 1, 32, 48)
    noise = initial_noise(latent_shape(pipe, sampling), [2])
    theirs, calls, _ = their_run(
        case, "WanImageToVideoPipeline", sampling, image=pictures(image)[0], num_frames=9, latents=noise.clone()
    )
    features = image_features(pipe, [image[0]])
    conditions = image_conditions(pipe, image[0], 9, None if features is None else features[0])
    text, negative = encode_prompts(pipe, [PROMPT, NEGATIVE]).split(1)
    _, schedule = schedule_of("unipc", 3, 4.0)
    inputs = inputs_of(pipe, noise, schedule.timesteps[0], {**conditions, "text": text})
    first = calls[0]
    close(inputs["latents"], first["hidden_states"], "model input")
    assert torch.equal(inputs["timestep"], first["timestep"].float())
    if kind == "i2v":
        assert torch.equal(inputs["latents"][:, 4:8], first["hidden_states"][:, 4:8]), "mask"
        close(inputs["image"], first["encoder_hidden_states_image"], "CLIP features")
    else:
        assert first["timestep"].shape == (1, 3 * 2 * 3) and set(inputs) == {"latents", "timestep", "text"}
        assert inputs["timestep"][0, :6].eq(0).all() and inputs["timestep"][0, 6:].eq(999).all()
    close(sample_latents(pipe, sampling, noise, text, negative, conditions=conditions), theirs, "latents")


@pytest.mark.parametrize("strength", [0.3, 0.8, 1.0])
def test_video_to_video_equals_diffusers(real, strength):
    case = real("t2v")
    pipe, frames = opened(case), random_frames(6, 9, 32, 48)
    sampling = Sampling(9, 32, 48, steps=4, guidance_scale=3.0, flow_shift=4.0)
    theirs, calls, _ = their_run(
        case, "WanVideoToVideoPipeline", sampling, video=pictures(frames), strength=strength,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    noise = torch.randn(1, 4, 3, 8, 12, generator=torch.Generator().manual_seed(3))
    start = start_step(4, strength)
    assert len(calls) == 2 * (4 - start)
    x = noised_video(sampling, pipe.vae.encode(to_video(frames)[None]), noise, start)
    close(x, calls[0]["hidden_states"], "noised video")
    text, negative = encode_prompts(pipe, [PROMPT, NEGATIVE]).split(1)
    close(sample_latents(pipe, sampling, x, text, negative, start=start), theirs, "latents")


# --- pieces ---------------------------------------------------------------------------------------------------


@given(known=st.lists(st.booleans(), min_size=1, max_size=21), temporal=st.integers(1, 5))
def test_the_mask_says_of_every_frame_whether_it_is_known(known, temporal):
    known = torch.tensor(known[: (len(known) - 1) // temporal * temporal + 1])
    mask = frame_mask(known, temporal)
    assert mask.shape == (temporal, (len(known) - 1) // temporal + 1)
    for frame, value in enumerate(known.tolist()):
        column, row = (frame + temporal - 1) // temporal, (frame - 1) % temporal
        assert bool((mask[:, 0] == value).all()) if frame == 0 else mask[row, column] == value


def test_masks_and_latents_of_unequal_lengths_are_refused():
    with pytest.raises(UserError, match="9 known frames make 3 latent frames, the condition has 2"):
        first_frame_channels(torch.zeros(1, 4, 2, 2, 2), first_frame_known(9), 4)
    with pytest.raises(UserError, match=r"expected \[4k\+1\]"):
        frame_mask(torch.ones(8, dtype=torch.bool), 4)


@given(grid=st.tuples(*[st.integers(1, 4)] * 3), clean=st.integers(0, 4), batch=st.integers(1, 2))
def test_clean_frames_have_timestep_zero(grid, clean, batch):
    cfg, (t, h, w) = tiny_config(), grid
    out = token_timesteps(cfg, torch.arange(1, batch + 1) * 10.0, torch.zeros(batch, 4, t, 2 * h, 2 * w), clean)
    frames = out.view(batch, t, h * w)
    assert bool((frames[:, :clean] == 0).all())
    for b in range(batch):
        assert bool((frames[b, clean:] == 10 * (b + 1)).all())
    with pytest.raises(UserError, match="1 clean latent frames do not fill"):
        token_timesteps(tiny_config(patch_size=(2, 1, 1)), torch.ones(1), torch.zeros(1, 4, 2, 1, 1), 1)


def test_the_clean_frame_comes_out_as_it_went_in(real):
    pipe = opened(real("5b"))
    image = random_frames(1, 1, 32, 48)[0]
    conditions = image_conditions(pipe, image, 9)
    noise, seen = initial_noise(latent_shape(pipe, SAMPLING), [0, 1]), []
    text = encode_prompts(pipe, ["a ball", "a dog"])
    out = sample_latents(pipe, SAMPLING, noise, text, torch.zeros_like(text), conditions=conditions,
                         preview=lambda step, x0: seen.append((step, x0)))  # fmt: skip
    for latents in (out, *(x0 for _, x0 in seen)):
        assert torch.equal(latents[:, :, :1], conditions["clean_frame"].expand(2, -1, -1, -1, -1))
    assert [step for step, _ in seen] == [1, 2, 3]
    assert torch.equal(with_clean_frame(out, conditions["clean_frame"].expand(2, -1, -1, -1, -1)), out)
    # The last step goes to sigma 0 with first order: it ends at its own estimate of x0.
    close(seen[-1][1], out, "estimate of the last step")
    assert (seen[0][1] - out).abs().max() > 1e-3


@given(steps=st.integers(1, 100), strength=st.floats(0.001, 1))
def test_strength_counts_the_steps_that_are_run(steps, strength):
    if int(steps * strength) == 0:
        with pytest.raises(UserError, match="leaves none to do"):
            start_step(steps, strength)
    else:
        assert start_step(steps, strength) == steps - int(steps * strength)


@pytest.mark.parametrize("strength", [0, -0.5, 1.01, float("nan"), True])
def test_strength_out_of_range(strength):
    with pytest.raises(UserError, match="expected a number above 0, at most 1"):
        start_step(10, strength)


def test_policies_of_the_unconditional_branch(real):
    pipe = opened(real("t2v"))
    noise, text = initial_noise(latent_shape(pipe, SAMPLING), [0]), encode_prompts(pipe, ["a red ball"])
    zero = Sampling(9, 32, 48, steps=2, guidance_scale=3.0, policy=(("text", "zero"),))
    plain = Sampling(9, 32, 48, steps=2, guidance_scale=3.0)
    expected = sample_latents(pipe, plain, noise, text, torch.zeros_like(text))
    assert torch.equal(sample_latents(pipe, zero, noise, text), expected)
    keep = Sampling(9, 32, 48, steps=2, guidance_scale=3.0, policy=(("text", "keep"),))
    alone = Sampling(9, 32, 48, steps=2, guidance_scale=1.0)
    close(sample_latents(pipe, keep, noise, text), sample_latents(pipe, alone, noise, text), "equal branches")
    channels = {"text": text, "image": torch.ones(1, 2, 3)}
    out = unconditional(channels, None, {"text": "zero", "image": "drop"})
    assert set(out) == {"text"} and not out["text"].any()
    with pytest.raises(UserError, match="negative prompt embedding, or a policy"):
        unconditional(channels, None, {"image": "zero"})
    with pytest.raises(UserError, match="imag: no such channel"):
        unconditional(channels, text, {"imag": "zero"})


def test_decoding_in_chunks_equals_decoding_at_once(real, tiny):
    for folder in (real("t2v").folder, real("5b").folder, tiny.folder):
        vae = load_pipeline(folder, device=CPU, dtype=torch.float32).vae
        latents = initial_noise((4, 10, 2, 3), [0, 1])
        chunks = list(vae.decode_chunks(latents))
        whole = vae.decode(latents)
        assert [c.shape[2] for c in chunks] == [13, 16, 8], "4, 4 and 2 latent frames, one frame for the first"
        # Equal but for the order of float sums over other sizes.
        torch.testing.assert_close(torch.cat(chunks, 2), whole, rtol=0, atol=2e-5)
        frames = decode_frames(vae, latents)
        assert len(frames) == 2 and frames[0].shape == (37, *whole.shape[3:], 3)
        assert (frames[1].int() - to_frames(whole[1]).int()).abs().max() <= 1


def test_decoding_in_strips_equals_decoding_at_once(real, tiny):
    vae = load_vae(real("t2v").folder / "vae", strips=3)
    latents = initial_noise((4, 3, 2, 9), [0])
    whole = load_vae(real("t2v").folder / "vae").decode(latents)
    torch.testing.assert_close(vae.decode(latents), whole, rtol=0, atol=2e-5)
    (frames,) = decode_frames(vae, latents)
    assert (frames.int() - to_frames(whole[0]).int()).abs().max() <= 1
    with pytest.raises(UserError, match="decoded at once, strips would do nothing"):
        load_vae(tiny.folder / "vae", strips=2)


def test_models_and_pictures_that_do_not_go_together(real):
    text, image, small = opened(real("t2v")), opened(real("i2v")), random_frames(0, 1, 32, 48)[0]
    check_sampling(image, SAMPLING, ["image"])
    with pytest.raises(UserError, match="takes text only: a picture needs an image-to-video model"):
        check_sampling(text, SAMPLING, ["image"])
    with pytest.raises(UserError, match="takes text only"):
        image_conditions(text, small, 9)
    with pytest.raises(UserError, match="image-to-video model: it needs a picture"):
        check_sampling(image, SAMPLING)
    with pytest.raises(UserError, match=r"clip_feature is \[5, 9\], the model takes \[M, 16\]"):
        image_conditions(image, small, 9, torch.zeros(5, 9))
    with pytest.raises(UserError, match="needs CLIP features"):
        image_conditions(image, small, 9)


# --- the command line -----------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Contact sheets as lists of what they show, without drawing."""
    sheets = {}

    def note(rows, path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"sheet")
        sheets.setdefault(path.name, []).append([(label, len(frames)) for label, frames in rows])

    for module in (cli, previews):
        monkeypatch.setattr(module, "contact_sheet", note)
    return sheets


def arguments(case, out, *more):
    return ["--model", str(case.folder), "--output", str(out), "--device", "cpu", *map(str, more)]


def test_an_image_from_the_command_line(real, tmp_path, quick):
    """The PNG and its CLIP feature from a file make the same video as the library call; another picture another."""
    case, out, image = real("i2v"), tmp_path / "a.mp4", random_frames(5, 1, 32, 48)
    png, other = write_png(tmp_path / "first.png", image[0]), write_png(tmp_path / "b.png", 255 - image[0])
    flags = ["--prompt", PROMPT, "--negative-prompt", NEGATIVE, "--seed", 2, "--image"]
    assert main(arguments(case, out, *flags, png)) == 0
    frames = read_video(out).frames
    pipe = opened(case, ("image_encoder",))
    (feature,) = image_features(pipe, [image[0]])
    text, negative = encode_prompts(pipe, [PROMPT, NEGATIVE]).split(1)
    (ours,) = generate(pipe, SAMPLING, text, negative, [2], conditions=image_conditions(pipe, image[0], 9, feature))
    write_video(tmp_path / "ours.mp4", ours, 8, crf=0)
    assert same_video(read_video(tmp_path / "ours.mp4").frames, frames)
    save_file({"clip_feature": feature[None].contiguous()}, tmp_path / "clip.safetensors")
    assert main(arguments(case, out, *flags, png, "--clip-feature", tmp_path / "clip.safetensors")) == 0
    assert same_video(read_video(out).frames, frames)
    assert main(arguments(case, out, *flags, other)) == 0
    assert not same_video(read_video(out).frames, frames)


def test_a_video_from_the_command_line(real, tmp_path, quick, capsys):
    """Only part of the steps runs, and less strength stays nearer to the video's own latents."""
    case, source = real("t2v"), tmp_path / "source.mp4"
    write_video(source, random_frames(6, 12, 40, 56), 8)
    flags = ["--prompt", "a ball", "--video", source, "--steps", 10, "--guidance-scale", 1, "--strength"]
    pipe = opened(case)
    clean = pipe.vae.encode(to_video(read_video(source, num_frames=9, size=(32, 48)).frames)[None])
    (target,) = decode_frames(pipe.vae, clean)
    off = []
    for strength in (0.1, 0.5, 1.0):
        assert main(arguments(case, tmp_path / "a.mp4", *flags, strength)) == 0
        off.append((read_video(tmp_path / "a.mp4").frames.float() - target.float()).square().mean())
    assert off[0] < off[1] < off[2]
    printed = capsys.readouterr().out
    assert "sampling: 1/1 " in printed and "sampling: 5/5 " in printed and "sampling: 10/10 " in printed


def test_a_prompt_file_with_samples_and_previews(real, tmp_path, quick):
    """Each prompt with its own seed and size, and the same video as when it is asked for alone."""
    case = real("5b")
    write_png(tmp_path / "first.png", random_frames(5, 1, 32, 32)[0])
    rows = [{"caption": "a red ball", "image": "first.png", "width": 32}, {"caption": "a dog's meadow", "seed": 7}]
    (tmp_path / "prompts.json").write_text(json.dumps({"data": rows}))
    more = ["--prompt-file", tmp_path / "prompts.json", "--samples-per-prompt", 2, "--preview-every", 2]
    assert main(arguments(case, tmp_path / "out" / "a.mp4", *more)) == 0
    names = ["a-000-0", "a-000-1", "a-001-0", "a-001-1"]
    expected = [f"{n}{suffix}" for n in names for suffix in (".mp4", ".preview.png")]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted([*expected, "a.png"])
    assert quick["a-000-0.preview.png"] == [[("a red ball (step 2 of 3)", 9)]]
    assert [label for label, _ in quick["a.png"][0]] == ["a red ball"] * 2 + ["a dog's meadow"] * 2
    videos = [read_video(tmp_path / "out" / f"{n}.mp4").frames for n in names]
    assert videos[0].shape == (9, 32, 32, 3) and videos[2].shape == (9, 32, 48, 3)
    assert not same_video(videos[0], videos[1])
    assert main(arguments(case, tmp_path / "b.mp4", "--prompt", "a dog's meadow", "--seed", 8)) == 0
    assert same_video(read_video(tmp_path / "b.mp4").frames, videos[3])
    alone = ["--prompt", "a red ball", "--image", tmp_path / "first.png", "--width", 32]
    assert main(arguments(case, tmp_path / "b.mp4", *alone)) == 0
    assert same_video(read_video(tmp_path / "b.mp4").frames, videos[0])


BAD_FLAGS = {
    "picture for text": (["--prompt", "a", "--image", "PNG"], ["the transformer takes text only"]),
    "text": (["--prompt", "caf\udce9"], ["--prompt is no valid Unicode text", "character 3"]),
    "rate": (["--prompt", "a", "--fps", 1e9], ["fps is 1000000000.0", "at most 1000"]),
    "both": (["--prompt", "a", "--image", "PNG", "--video", "PNG"], ["--image or --video, not both"]),
    "feature": (["--prompt", "a", "--clip-feature", "x"], ["--clip-feature is that of --image"]),
    "preview": (["--prompt", "a", "--preview-every", 0], ["--preview-every is 0"]),
    "strips": (["--prompt", "a", "--vae-strips", 0], ["the vae's strips are 0"]),
    "samples": (["--prompt", "a", "--samples-per-prompt", 0], ["samples per prompt is 0"]),
    "strength": (["--prompt", "a", "--video", "PNG", "--strength", 0.1], ["leaves none to do: at least 0.333"]),
    "short": (["--prompt", "a", "--video", "PNG"], ["asked for 9 frames", "the clip has 1 frame"]),
    "sizes": (["--prompt-file", "FILE"], ["data[1]: this video size", "num_frames is 6", "nearest valid 5 or 9"]),
}


@pytest.mark.parametrize("what", BAD_FLAGS)
def test_flags_that_cannot_be_used_write_nothing(real, tmp_path, capsys, what):
    flags, parts = BAD_FLAGS[what]
    rows = [{"caption": "a"}, {"caption": "b", "num_frames": 6}]
    (tmp_path / "p.json").write_text(json.dumps({"data": rows}))
    files = {"PNG": write_png(tmp_path / "in.png", random_frames(0, 1, 32, 48)[0]), "FILE": tmp_path / "p.json"}
    case, out = real("t2v"), tmp_path / "out" / "a.mp4"
    capsys.readouterr()  # what making the folder printed
    assert main(arguments(case, out, *(files.get(f, f) for f in flags))) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and not out.parent.exists()
    for part in parts:
        assert part in message, message


def test_what_is_read_is_never_replaced(real, tmp_path, capsys):
    """The contact sheet of a.mp4 is a.png: a picture of that name is refused, not lost."""
    png = write_png(tmp_path / "a.png", random_frames(0, 1, 32, 48)[0])
    before = png.read_bytes()
    assert main(arguments(real("5b"), tmp_path / "a.mp4", "--prompt", "a", "--image", png)) == 2
    assert "would replace what is read" in capsys.readouterr().err
    assert png.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_a_prompt_file_lists_all_its_faults(real, tmp_path, capsys):
    rows = [{"caption": 3}, {"capton": "a"}, {"caption": "a", "image": "gone.png", "seed": "x", "height": 1.5}, "a",
            {"caption": "half a smile \ud83d"}]  # fmt: skip
    (tmp_path / "p.json").write_text(json.dumps({"data": rows}))
    assert main(arguments(real("t2v"), tmp_path / "a.mp4", "--prompt-file", tmp_path / "p.json")) == 2
    message = capsys.readouterr().err
    for part in (
        "data[0]: caption is 3", "data[1]: unknown key 'capton' (did you mean 'caption'?)", "data[3]: is 'a'",
        "data[2]: image", "gone.png: no such file", "data[2]: seed is 'x'", "data[2]: height is 1.5",
        "data[4]: caption is no valid Unicode text",
    ):  # fmt: skip
        assert part in message, message
