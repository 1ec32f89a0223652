"""LTX-2's pipelines on tiny random models with the demos' codecs: folders, sampling, conditions, stages, command."""

import dataclasses

import pytest
import torch
from ltx2_demo_cases import (
    CFG,
    FPS,
    FRAMES,
    HEIGHT,
    PLAIN,
    WIDTH,
    make_parts,
    opened,
    random_params,
    texts_of,
    written,
)

from core.errors import UserError
from infer import ltx2_stages
from infer.__main__ import main
from infer.ltx2_folder import LTX2Defaults, kind_of_pipeline, open_ltx2
from infer.ltx2_generate import (
    Given,
    decode,
    generate,
    generate_latents,
    initial_noise,
    schedule_of,
    shapes_of,
)
from infer.ltx2_guidance import StreamGuidance
from infer.ltx2_schedules import distilled_schedule, shifted_schedule
from infer.media import read_video, write_video
from infer.sound import Sound, has_sound, read_sound
from nn import ltx2
from nn.ltx2_conditions import FirstFrame
from nn.ltx2_inputs import StreamInputs, audio_tokens, model_inputs, video_tokens
from nn.ltx2_rope import audio_positions, video_positions
from nn.ltx2_specs import param_specs


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return make_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, parts):
    return written(tmp_path_factory.mktemp("ltx2") / "pipeline", parts)


@pytest.fixture(scope="module")
def pipe(folder):
    return opened(folder)


# --- folders --------------------------------------------------------------------------------------------------


def test_a_folder_opens_as_it_was_written(folder, pipe):
    assert kind_of_pipeline(folder) == "ltx2" and pipe.cfg == CFG and not pipe.absent.get("vae")
    assert pipe.streams == ("video", "audio")
    params = random_params(CFG)
    assert all(torch.equal(v, params[k]) for k, v in pipe.params.items()) and len(pipe.params) == len(params)
    assert pipe.defaults == LTX2Defaults(FRAMES, HEIGHT, WIDTH, FPS, 3)


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_a_model_of_one_stream_has_its_own_type_and_opens_again(tmp_path, parts, folder, modality):
    """From a folder with both it is opened alone, and makes what the whole model's stream has weights for."""
    alone = opened(folder, modality=modality)
    assert alone.streams == (modality,) and set(alone.params) == set(param_specs(alone.cfg))
    again = opened(written(tmp_path / "one", parts, alone.cfg))
    assert again.cfg.modality == modality and kind_of_pipeline(tmp_path / "one") == "ltx2"
    with pytest.raises(UserError, match=f"holds the {modality} stream only"):
        open_ltx2(tmp_path / "one", device=torch.device("cpu"), dtype=torch.float32, modality="audio_video")
    (clip,) = generate(again, PLAIN, texts_of(again), None, [0])
    assert (clip.frames is None) == (modality == "audio") and (clip.sound is None) == (modality == "video")


def test_models_that_do_not_fit_are_told_with_both_sizes(tmp_path, parts):
    cfg = dataclasses.replace(CFG, vae_scale_factors=(8, 32, 32))
    with pytest.raises(UserError, match="vae_scale_factors is"):
        open_ltx2(
            written(tmp_path / "p", parts, cfg), device=torch.device("cpu"), dtype=torch.float32, needs=["vae"]
        )  # fmt: skip


# --- sampling -------------------------------------------------------------------------------------------------


def test_euler_over_the_model_by_hand(pipe):
    """The loop written out: both streams on one schedule, each step from the model's velocity."""
    texts, shapes, schedule = texts_of(pipe), shapes_of(pipe, PLAIN), schedule_of(pipe, PLAIN)
    x = {k: v.double() for k, v in initial_noise(shapes, [5]).items()}
    x = {"video": video_tokens(CFG, x["video"]), "audio": audio_tokens(CFG, x["audio"])}
    grid, params = (shapes["video"][1:]), {k: v.double() for k, v in pipe.params.items()}
    where = {"video": video_positions(CFG, grid, FPS), "audio": audio_positions(CFG, shapes["audio"][1])}
    sigmas = schedule.sigmas.tolist()
    for a, b in zip(sigmas, sigmas[1:]):
        t = torch.tensor([1000 * a], dtype=torch.float64)
        streams = {k: StreamInputs(v, t, where[k], texts[k].double()) for k, v in x.items()}
        velocity = ltx2.forward(params, CFG, model_inputs(CFG, streams))
        x = {k: v + (b - a) * velocity[k] for k, v in x.items()}
    found = generate_latents(pipe, PLAIN, texts, None, [5])
    # float32 against float64 through three steps of two blocks: some 1e-6 of the largest entry.
    assert (video_tokens(CFG, found["video"]) - x["video"]).abs().max() < 2e-5 * x["video"].abs().max()
    assert (audio_tokens(CFG, found["audio"]) - x["audio"]).abs().max() < 2e-5 * x["audio"].abs().max()


def test_a_sample_depends_on_its_seed_alone(pipe):
    guided = dataclasses.replace(PLAIN, video=StreamGuidance(cfg_scale=3.0, stg_scale=1.0, stg_blocks=(1,)))
    two, texts = texts_of(pipe, ["a rabbit", "a dog"]), texts_of(pipe, ["a dog"])  # as many words
    negative = texts_of(pipe, [""])
    both = {k: v.expand(2, -1, -1) for k, v in negative.items()}
    together = generate_latents(pipe, guided, two, both, [1, 2])
    alone = generate_latents(pipe, guided, texts, negative, [2])
    apart = generate_latents(pipe, dataclasses.replace(guided, batched_guidance=False), texts, negative, [2])
    for name in ("video", "audio"):  # batches sum in another order
        torch.testing.assert_close(together[name][1:], alone[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(apart[name], alone[name], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(together[name][0], together[name][1], atol=1e-2)


def test_what_is_given_stays_as_it_is(pipe):
    """A first frame, and a sound as a whole: bit by bit in the result, and seen by what is made."""
    texts, shapes = texts_of(pipe), shapes_of(pipe, PLAIN)
    picture = torch.randn(1, 8, 1, *shapes["video"][2:])
    sound = torch.randn(1, *shapes["audio"])
    given = Given({"audio": sound}, {"video": [FirstFrame("picture")]}, {"picture": picture})
    latents = generate_latents(pipe, PLAIN, texts, None, [0], given=given)
    assert set(latents) == {"video"} and torch.allclose(latents["video"][:, :, :1], picture, atol=1e-6)
    other = dataclasses.replace(given, streams={"audio": -sound})
    assert not torch.allclose(generate_latents(pipe, PLAIN, texts, None, [0], given=other)["video"], latents["video"])
    (clip,) = decode(pipe, latents, given, FPS, FRAMES)
    assert clip.frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert clip.sound.waveform.shape[1] == round(FRAMES / FPS * clip.sound.rate)
    made = generate_latents(pipe, PLAIN, texts, None, [0], given=Given({"video": torch.randn(1, *shapes["video"])}))
    assert set(made) == {"audio"} and made["audio"].shape[1:] == shapes["audio"]


def test_refusals_name_what_would_be_right(pipe):
    texts = texts_of(pipe)
    with pytest.raises(UserError, match="nearest valid 9 or 13"):
        generate(pipe, dataclasses.replace(PLAIN, num_frames=10), texts, None, [0])
    with pytest.raises(UserError, match="these weights are full"):
        generate(pipe, dataclasses.replace(PLAIN, distilled=True, steps=8), texts, None, [0])
    with pytest.raises(UserError, match="every stream is given"):
        shapes = shapes_of(pipe, PLAIN)
        generate(pipe, PLAIN, texts, None, [0], given=Given({k: torch.zeros(1, *v) for k, v in shapes.items()}))
    with pytest.raises(UserError, match="expected"):
        generate(pipe, PLAIN, texts, None, [0], given=Given({"audio": torch.zeros(1, 4, 1, 4)}))
    assert schedule_of(pipe, PLAIN).sigmas.tolist() == shifted_schedule(3, 3 * 2 * 4).sigmas.tolist()


def test_two_stages(pipe):
    """Half the size, latents made larger, noised to the first level of stage two, three plain steps of the refiner."""
    grow = lambda z: torch.nn.functional.interpolate(z, scale_factor=(1, 2, 2))  # noqa: E731
    same = lambda z: z  # noqa: E731
    vae = dataclasses.replace(pipe.vae, normalise=same, denormalise=same)
    whole = dataclasses.replace(pipe, vae=vae, upsampler=grow)
    refiner = dataclasses.replace(whole, params={k: v * 0 for k, v in pipe.params.items()})
    texts = texts_of(pipe)
    with pytest.raises(UserError, match="distilled weights"):
        ltx2_stages.generate_two_stage(whole, PLAIN, texts, None, [4])
    with pytest.raises(UserError, match="nearest valid 16 or 32"):
        odd = dataclasses.replace(PLAIN, height=24)
        ltx2_stages.generate_two_stage(whole, odd, texts, None, [4], refiner=refiner)
    (clip,) = ltx2_stages.generate_two_stage(whole, PLAIN, texts, None, [4], refiner=refiner)
    first = generate_latents(whole, ltx2_stages.half(PLAIN), texts, None, [4])
    sigma, noise = distilled_schedule("two").sigmas[0], initial_noise(shapes_of(whole, PLAIN), [4], "refine")
    first["video"] = grow(first["video"])
    # Weights of zero give velocity 0: what comes out is what stage two started from.
    expected = {k: (1 - sigma) * v + sigma * noise[k] for k, v in first.items()}
    (wanted,) = decode(whole, expected, Given(), FPS, FRAMES)
    assert (clip.frames.int() - wanted.frames.int()).abs().max() <= 1


def test_adapters_of_two_files_are_one(pipe):
    layer = "transformer_blocks.0.attn1.to_q"
    parts = [
        {f"{layer}.lora_A": torch.randn(r, 16), f"{layer}.lora_B": torch.randn(16, r), f"{layer}.lora_scale": s}
        for r, s in ((2, torch.tensor(0.5)), (3, torch.tensor(2.0)))
    ]
    one = ltx2_stages.joined(parts)
    delta = sum(p[f"{layer}.lora_scale"] * p[f"{layer}.lora_B"] @ p[f"{layer}.lora_A"] for p in parts)
    torch.testing.assert_close(one[f"{layer}.lora_B"] @ one[f"{layer}.lora_A"], delta)
    texts = texts_of(pipe)
    merged = dict(pipe.params) | {f"{layer}.weight": pipe.params[f"{layer}.weight"] + delta}
    beside = generate_latents(ltx2_stages.adapted(pipe, parts), PLAIN, texts, None, [0])
    inside = generate_latents(dataclasses.replace(pipe, params=merged), PLAIN, texts, None, [0])
    torch.testing.assert_close(beside["video"], inside["video"], rtol=1e-4, atol=1e-4)


# --- the command ----------------------------------------------------------------------------------------------


def command(folder, *flags):
    return main(["--model", str(folder), "--device", "cpu", *flags])


def test_the_command_writes_a_clip_with_sound_and_pictures_of_both(tmp_path, folder):
    out = tmp_path / "a.mp4"
    flags = ["--prompt", "a rabbit", "--output", str(out), "--stg-scale", "1", "--stg-blocks", "0"]
    assert command(folder, *flags) == 0
    assert has_sound(out) and read_video(out).frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert abs(read_sound(out, rate=16000).seconds - FRAMES / FPS) < 0.02
    assert (tmp_path / "a.png").is_file() and (tmp_path / "a.spectrogram.png").is_file()


def test_the_command_takes_pictures_sound_and_embeddings(tmp_path, folder):
    clip, embeds = tmp_path / "in.mp4", tmp_path / "e.safetensors"
    wave = torch.sin(torch.arange(8000) * 0.1)[None].repeat(2, 1)
    write_video(clip, torch.randint(0, 255, (FRAMES, 32, 64, 3), dtype=torch.uint8), FPS, Sound(wave, 16000))
    assert command(folder, "--prompt", "a rabbit", "--save-embeds", str(embeds)) == 0
    flags = ["--prompt-embeds", str(embeds), "--image", str(clip), "--sound", str(clip), "--sampler", "res_2s",
             "--keyframe", f"{clip}@4:0.5", "--output", str(tmp_path / "o.mp4")]  # fmt: skip
    assert command(folder, *flags) == 0 and has_sound(tmp_path / "o.mp4")
    assert command(folder, "--prompt", "x", "--video", str(clip), "--output", str(tmp_path / "v.mp4")) == 0
    sound = tmp_path / "s.wav"
    assert command(folder, "--prompt", "x", "--modality", "audio", "--output", str(sound)) == 0 and sound.is_file()


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--flow-shift", "3"], "--flow-shift would do nothing for this LTX-2 pipeline"),
        (["--sampler", "unipc"], "unipc is none of LTX-2's"),
        (["--modality", "video", "--sound", "x.wav"], "--sound would do nothing here: the model is video"),
        (["--two-stage"], "latent_upsampler"),
        (["--modality", "audio", "--num-frames", "0"], "num_frames is 0"),
        (["--height", "20"], "nearest valid 16 or 24"),
        (["--refine-lora", "x"], "--refine-lora would do nothing without --two-stage"),
        (["--output", "x.avi"], "expected a name ending in .mp4"),
        (["--stg-scale", "1"], "without stg_blocks"),
        (["--distilled", "--steps", "5"], "a distilled model takes 8"),
    ],
)
def test_bad_flags_are_told_before_any_work(tmp_path, folder, flags, said, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(folder, "--prompt", "a", *flags) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
