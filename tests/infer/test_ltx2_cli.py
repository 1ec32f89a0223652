"""`python -m infer` with LTX-2 folders: what is given stays as it is, all else is as the functions make it."""

import dataclasses
import functools
import json

import pytest
import torch
from ltx2_cli_cases import (
    alike,
    command,
    flags_of,
    frames_of,
    kept,
    latents,
    lora_file,
    made,
    made_clip,
    make_cli_pair,
    make_folder,
    make_media,
    resampled,
    same,
    seen,
    texts,
    times,
)
from ltx2_demo_cases import FPS, FRAMES, HEIGHT, WIDTH, opened
from ltx2_pipe_cases import SAMPLING
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from core.geometry import to_frames, to_video
from core.scan import compiled
from infer import flags, ltx2_command, previews
from infer.flags import parse
from infer.ltx2_generate import generate
from infer.ltx2_given import read_files
from infer.ltx2_guidance import StreamGuidance
from infer.ltx2_sampling import Given
from infer.ltx2_stages import adapted, generate_two_stage, half
from infer.media import psnr, read_video, recompressed, resize_cover
from infer.sound import log_mel_correlation, read_sound
from nn.ltx2_conditions import FirstFrame, Keyframe, Mask, Prefix, Reference, ReferenceAudio, Suffix
from nn.ltx2_lora import LoraInfo


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_cli_pair(tmp_path_factory)


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    return make_media(tmp_path_factory)


@pytest.fixture
def shown(monkeypatch):
    """Contact sheets as `(path, label, frames)` of what they show, without drawing."""
    sheets = []

    def note(rows, path):
        path.write_bytes(b"sheet")
        sheets.extend((path, *row) for row in rows)

    for module in (ltx2_command, previews):
        monkeypatch.setattr(module, "contact_sheet", note)
    return sheets


# --- what is given --------------------------------------------------------------------------------------------


def test_a_given_sound_is_the_sound_of_the_clip(tmp_path, folder, media):
    """Not what a codec makes of it; after its end there is silence."""
    out = tmp_path / "out.mp4"
    assert command(folder, "--prompt", "a", "--sound", media / "clip.mp4", "--output", out) == 0
    wanted = read_sound(media / "clip.mp4", rate=24000, seconds=FRAMES / FPS)
    assert log_mel_correlation(read_sound(out, rate=24000), wanted) > 0.97  # AAC once more
    assert command(folder, "--prompt", "a", "--sound", media / "short.wav", "--output", out) == 0
    wave = read_sound(out, rate=24000).waveform
    assert wave[:, 24000 // 4 :].abs().max() < 0.02 < wave.abs().max()


def test_a_given_video_is_the_video_of_the_clip_at_its_own_speed(tmp_path, folder, media):
    """Frames are taken by their times, not their numbers: half the rate shows every second one."""
    out, size = tmp_path / "out.mp4", {"num_frames": FRAMES, "size": (HEIGHT, WIDTH)}
    assert command(folder, "--prompt", "a", "--video", media / "clip.mp4", "--fps", FPS / 2, "--output", out) == 0
    given = read_video(media / "clip.mp4", fps=FPS / 2, **size).frames
    assert psnr(read_video(out).frames, given) > 30  # H.264 once more
    assert psnr(given, read_video(media / "clip.mp4", **size).frames) < 20
    assert abs(read_sound(out, rate=24000).seconds - 2 * FRAMES / FPS) < 0.05


def test_pictures_and_guidance_are_what_the_functions_take(tmp_path, pair, media):
    first, flags = media / "first.png", ["--guidance-scale", 2, "--audio-guidance-scale", 1, "--guidance-rescale", 0.5]
    flags += ["--stg-scale", 1, "--audio-stg-scale", 0, "--stg-blocks", "0,2", "--audio-modality-scale", 3]
    found, sampling = made(pair, tmp_path, "--image", first, "--keyframe", f"{first}@3:0.6", *flags, seed=7)
    assert sampling.video == StreamGuidance(2.0, 1.0, (0, 2), 1.0, 0.5)
    assert sampling.audio == StreamGuidance(1.0, 0.0, (0, 2), 3.0, 0.5)
    picture, (text, negative) = seen(pair, first, sampling), texts(pair)
    conditions = [FirstFrame("image"), Keyframe("keyframe 0", frame=3, strength=0.6)]
    given = Given(conditions={"video": conditions}, extras={"image": picture, "keyframe 0": picture})
    (clip,) = generate(pair.ours, sampling, text, negative, [7], given=given)
    assert same(found, clip.frames)


@pytest.mark.parametrize("crf", [0, 51])
def test_a_keyframe_at_0_is_the_first_frame_as_strong_and_as_good_as_it_says(tmp_path, pair, media, crf):
    found, sampling = made(pair, tmp_path, "--keyframe", f"{media / 'first.png'}@0:0.7", "--image-crf", crf)
    picture, (text, negative) = seen(pair, media / "first.png", sampling, crf), texts(pair)
    condition = FirstFrame("keyframe 0", strength=0.7)
    given = Given(conditions={"video": [condition]}, extras={"keyframe 0": picture})
    (clip,) = generate(pair.ours, sampling, text, negative, [0], given=given)
    assert same(found, clip.frames)


@pytest.mark.parametrize("flags, crf", [([], 33), (["--image-crf", "7"], 7), (["--image-crf", "0"], 0)])
def test_pictures_are_compressed_as_the_models_were_trained_unless_told(pair, media, flags, crf):
    """In their own size, before they are scaled; a video's first frame too, a reference's frames not."""
    clip = media / "clip.mp4"
    words = ["--image", media / "first.png", "--keyframe", f"{clip}@2", "--reference", clip, *flags]
    args = parse(["--model", str(pair.folder), *map(str, words)])
    found = [pixels for _, pixels in read_files(args, media / "first.png", SAMPLING, LoraInfo(), pair.ours).conditions]
    own = [read_video(path, num_frames=1).frames[0] for path in (media / "first.png", clip)]
    wanted = [resize_cover(recompressed(picture, crf)[None], (SAMPLING.height, SAMPLING.width)) for picture in own]
    wanted.append(resampled(clip, SAMPLING, num_frames=SAMPLING.num_frames))
    assert all(torch.equal(a, to_video(b)[None]) for a, b in zip(found, wanted, strict=True))


def test_a_reference_is_read_as_its_adapter_was_trained(tmp_path, pair, media):
    """Half the size and every second frame after the first, since the file says so; another adapter beside it."""
    ic = lora_file(pair, tmp_path / "ic.safetensors", 1, downscale=2, temporal_scale=2)
    style = lora_file(pair, tmp_path / "style.safetensors", 2)
    flags = ["--reference", media / "clip.mp4", "--lora", tmp_path / "ic.safetensors", "--reference-attention", 0.5]
    found, sampling = made(pair, tmp_path, *flags, "--lora", f"{tmp_path / 'style.safetensors'}:0.5")
    frames = read_video(media / "clip.mp4", num_frames=5, size=(16, 32), fps=sampling.fps).frames[[0, 1, 3]]
    reference = pair.ours.vae.encode(to_video(frames)[None])
    conditions = [Reference("reference", downscale=2, temporal=2, attention=0.5)]
    given = Given(conditions={"video": conditions}, extras={"reference": reference})
    whole, (text, negative) = adapted(pair.ours, [ic, times(style, 0.5)]), texts(pair)
    (clip,) = generate(whole, sampling, text, negative, [0], given=given)
    assert same(found, clip.frames)


@pytest.mark.parametrize("name", ["clip.mp4", "silent.mp4"])
def test_a_prefix_is_the_end_of_a_video_with_its_sound(tmp_path, pair, media, name):
    found, sampling = made_clip(pair, tmp_path, "--prefix", f"{media / name}@3:0.8")
    frames, (text, negative) = resampled(media / name, sampling), texts(pair)
    extras = {"prefix": pair.ours.vae.encode(to_video(frames[-3:])[None])}
    conditions = {"video": [Prefix("prefix", strength=0.8, count=2)]}
    if name == "clip.mp4":
        start = (len(frames) - 3) / sampling.fps
        sound = read_sound(media / name, rate=pair.ours.sound.input_rate, start=start, seconds=0.2)
        extras["prefix sound"] = pair.ours.sound.encode(sound.waveform[None])[:, :, :3]
        conditions["audio"] = [Prefix("prefix sound", strength=0.8, count=3)]
    given = Given(conditions=conditions, extras=extras)
    (clip,) = generate(pair.ours, sampling, text, negative, [0], given=given)
    assert alike(found, clip)


def test_a_suffix_is_the_beginning_of_a_video_and_a_given_sound_stays(tmp_path, pair, media):
    """Its latents after the first one, which stands for a frame by itself. The prefix's sound is left out."""
    flags = ["--suffix", f"{media / 'clip.mp4'}@3", "--prefix", f"{media / 'clip.mp4'}@1", "--sound"]
    found, sampling = made_clip(pair, tmp_path, *flags, media / "short.wav")
    last, (text, negative) = resampled(media / "clip.mp4", sampling)[-1:], texts(pair)
    extras = {"prefix": pair.ours.vae.encode(to_video(last)[None])}
    extras["suffix"] = latents(pair, media / "clip.mp4", sampling, 3)[:, :, 1:]
    sound = read_sound(media / "short.wav", rate=pair.ours.sound.input_rate, seconds=0.3)
    given = Given(
        {"audio": pair.ours.sound.encode(sound.waveform[None])[:, :, :5]},
        {"video": [Prefix("prefix"), Suffix("suffix")]}, extras,
        {"audio": read_sound(media / "short.wav", rate=48000, seconds=sampling.seconds)},
    )  # fmt: skip
    (clip,) = generate(pair.ours, sampling, text, negative, [0], given=given)
    assert alike(found, clip)


def test_a_masked_video_is_made_where_the_mask_is_white(tmp_path, pair, media):
    """The mask moves: its first frames are black, and a level below the middle is no white."""
    found, sampling = made_clip(pair, tmp_path, "--video", media / "clip.mp4", "--mask", media / "later.mp4")
    mask, (text, negative) = kept(pair, media / "later.mp4", sampling), texts(pair)
    assert [float(part.mean()) for part in mask[0]] == [1.0, 7 / 16, 7 / 16]  # columns 0 to 6 of 16
    video = latents(pair, media / "clip.mp4", sampling, sampling.num_frames)
    given = Given(conditions={"video": [Mask("video")]}, extras={"video": video, "mask": mask})
    (clip,) = generate(pair.ours, sampling, text, negative, [0], given=given)
    assert alike(found, clip)


def test_a_mask_in_two_stages_beside_a_keyframe(tmp_path, pair, media):
    flags = ["--distilled", "--two-stage", "--height", 64, "--width", 128, "--steps", 8, "--video", media / "clip.mp4"]
    flags += ["--mask", media / "right.png", "--keyframe", f"{media / 'first.png'}@3"]
    found, sampling = made_clip(pair, tmp_path, *flags)
    parts = []
    for size in (sampling, half(sampling)):
        extras = {"video": latents(pair, media / "clip.mp4", size, 5), "mask": kept(pair, media / "right.png", size)}
        extras["keyframe"] = seen(pair, media / "first.png", size)
        parts.append(Given(conditions={"video": [Mask("video"), Keyframe("keyframe", frame=3)]}, extras=extras))
    ours = dataclasses.replace(pair.ours, defaults=dataclasses.replace(pair.ours.defaults, distilled=True))
    sampling = dataclasses.replace(sampling, distilled=True, video=StreamGuidance(), audio=StreamGuidance())
    (clip,) = generate_two_stage(ours, sampling, texts(pair)[0], None, [0], given=parts[0], small=parts[1])
    assert alike(found, clip)


def test_references_of_both_streams(tmp_path, pair, media):
    flags = ["--reference", media / "clip.mp4", "--reference-strength", 0.5, "--reference-sound", media / "short.wav"]
    found, sampling = made_clip(pair, tmp_path, *flags)
    sound = read_sound(media / "short.wav", rate=pair.ours.sound.input_rate, seconds=0.25)
    extras = {"reference": latents(pair, media / "clip.mp4", sampling, 5)}
    extras["reference sound"] = pair.ours.sound.encode(sound.waveform[None])[:, :, :5]  # 0.2 seconds
    conditions = {"video": [Reference("reference", strength=0.5)], "audio": [ReferenceAudio("reference sound")]}
    given, (text, negative) = Given(conditions=conditions, extras=extras), texts(pair)
    (clip,) = generate(pair.ours, sampling, text, negative, [0], given=given)
    assert alike(found, clip)


def test_what_is_given_of_a_video_is_seen_in_the_clip(tmp_path, folder, media):
    """The demos' codec codes every patch by itself, so that what is kept comes back as it decodes."""
    frames, vae = read_video(media / "clip.mp4", size=(HEIGHT, WIDTH)).frames, opened(folder).vae
    decoded = lambda part: to_frames(vae.decode(vae.encode(to_video(part)[None]))[0])  # noqa: E731
    own = ["--prompt", "a", "--steps", 1, "--output", tmp_path / "a.mp4"]
    ends = ["--prefix", f"{media / 'clip.mp4'}@1", "--suffix", f"{media / 'clip.mp4'}@5"]
    (made,) = frames_of(folder, *own, *ends).values()
    assert same(made[:1], decoded(frames[-1:])) and same(made[5:], decoded(frames[:5])[1:])
    (made,) = frames_of(folder, *own, "--video", media / "clip.mp4", "--mask", media / "right.png").values()
    left, right = ((x[:, :, :8], x[:, :, 16:]) for x in (made, decoded(frames[:FRAMES])))
    assert same(left[0], right[0]) and not same(left[1], right[1])


def test_two_stages_with_adapters_of_their_own(tmp_path, pair, media):
    """The second one has the distilled adapter and that of the style, not that of the references."""
    leaves = [lora_file(pair, tmp_path / f"{i}.safetensors", i) for i in range(3)]
    flags = ["--two-stage", "--refine-lora", f"{tmp_path / '0.safetensors'}:0.5", "--reference", media / "clip.mp4"]
    flags += ["--lora", tmp_path / "1.safetensors", "--lora", tmp_path / "2.safetensors"]
    flags += ["--height", 64, "--width", 128]
    found, sampling = made(pair, tmp_path, *flags, "--image", media / "first.png", seed=3)
    pictures = [seen(pair, media / "first.png", s) for s in (sampling, half(sampling))]
    reference = latents(pair, media / "clip.mp4", half(sampling), 5)
    first, extras = FirstFrame("image"), {"image": pictures[1], "reference": reference}
    small = Given(conditions={"video": [first, Reference("reference")]}, extras=extras)
    given, (text, negative) = Given(conditions={"video": [first]}, extras={"image": pictures[0]}), texts(pair)
    refiner = adapted(pair.ours, [leaves[2], times(leaves[0], 0.5)])
    (clip,) = generate_two_stage(
        adapted(pair.ours, leaves[1:]), sampling, text, negative, [3], given=given, small=small, refiner=refiner
    )  # fmt: skip
    assert clip.frames.shape == (5, 64, 128, 3) and same(found, clip.frames)


def test_layers_of_an_adapter_that_stay_unused_are_noted(tmp_path, pair, capsys):
    path = tmp_path / "a.safetensors"
    lora_file(pair, path, 1)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    name = "text_embedding_projection.aggregate_embed.lora_"
    save_file(load_file(path) | {f"{name}{part}.weight": torch.zeros(2, 2) for part in "AB"}, path, metadata)
    made(pair, tmp_path, "--lora", path)
    assert f"note: {path} also adapts 1 layer of the text connectors" in capsys.readouterr().out


def test_distilled_weights_in_both_stages(tmp_path, pair, capsys):
    """Eight fixed steps and three, without guidance; no adapter is needed."""
    flags = ["--distilled", "--two-stage", "--height", 64, "--width", 128, "--steps", 8]
    found, sampling = made(pair, tmp_path, *flags)
    assert "11/11" in capsys.readouterr().out  # steps of both
    defaults = dataclasses.replace(pair.ours.defaults, distilled=True)
    ours, (text, _) = dataclasses.replace(pair.ours, defaults=defaults), texts(pair)
    sampling = dataclasses.replace(sampling, distilled=True, video=StreamGuidance(), audio=StreamGuidance())
    (clip,) = generate_two_stage(ours, sampling, text, None, [0])
    assert same(found, clip.frames)


def test_prompts_of_a_file_have_their_own_sizes_pictures_and_seeds(tmp_path, folder, media):
    data = [
        {"caption": "a rabbit", "seed": 3},
        {"caption": "a dog", "image": str(media / "first.png"), "num_frames": 5, "height": 16, "width": 16, "seed": 9},
    ]
    (tmp_path / "p.json").write_text(json.dumps({"data": data}))
    flags = ["--prompt-file", tmp_path / "p.json", "--output", tmp_path / "a.mp4", "--samples-per-prompt", 2]
    flags += ["--image-crf", 0]  # of the picture that a prompt brings
    frames = frames_of(folder, *flags)
    shapes = [tuple(read_video(tmp_path / f"a-00{i}-{j}.mp4").frames.shape) for i in (0, 1) for j in (0, 1)]
    assert shapes == [(FRAMES, HEIGHT, WIDTH, 3)] * 2 + [(5, 16, 16, 3)] * 2
    assert {p.name for p in tmp_path.glob("*.png")} == {"a.png", "a.spectrogram.png"}
    one = ["--prompt", "a rabbit", "--seed", 4, "--output", tmp_path / "b.mp4"]
    (alone,) = frames_of(folder, *one).values()
    assert same(alone, frames["a-000-1.mp4"]) and not same(alone, frames["a-000-0.mp4"])


def test_compiled_blocks_make_the_same_clip(tmp_path, pair, monkeypatch):
    """One graph for every pass of guidance: they differ in keep-masks only, here with one sample a call.

    Of the video alone, whose block is traced in half the time.
    """
    graphs = []

    def counted(module, inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    monkeypatch.setattr(flags, "compiled", functools.partial(compiled, backend=counted))
    guides = ["--modality", "video", "--stg-scale", 1, "--stg-blocks", 1, "--two-pass-guidance"]
    plain, _ = made(pair, tmp_path, *guides)
    assert not graphs
    fast, _ = made(pair, tmp_path, *guides, "--compile")
    assert len(graphs) == 1 and same(fast, plain)


@pytest.mark.parametrize("sampler", ["euler", "res_2s"])
def test_previews_show_the_video_every_few_steps(tmp_path, pair, shown, sampler):
    """The last step's estimate is the clip."""
    flags = ["--preview-every", 2, "--steps", 4, "--sampler", sampler]
    (frames,) = frames_of(pair.folder, *flags_of(pair, tmp_path, flags)).values()
    assert [(path.name, label) for path, label, _ in shown[:-1]] == [
        ("out.preview.png", "e.safetensors (step 2 of 4)"), ("out.preview.png", "e.safetensors (step 4 of 4)")
    ]  # fmt: skip
    early, last = (video for _, _, video in shown[:-1])
    assert same(last, frames) and not same(early, frames)


def test_previews_of_two_stages_count_on_and_grow(tmp_path, pair, shown):
    flags = ["--preview-every", 4, "--distilled", "--two-stage", "--height", 64, "--width", 128, "--steps", 8]
    frames_of(pair.folder, *flags_of(pair, tmp_path, flags))
    assert [(label[-14:], video.shape[1:3]) for _, label, video in shown[:-1]] == [
        ("(step 4 of 11)", (32, 64)), ("(step 8 of 11)", (32, 64))
    ]  # fmt: skip
