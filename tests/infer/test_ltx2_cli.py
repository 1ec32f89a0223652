"""`python -m infer` with LTX-2 folders: what is given stays as it is, stages and adapters are those of the functions,
and what cannot be, or would do nothing, is told by name before anything is encoded."""

import dataclasses
import json
from unittest import mock

import pytest
import torch
from ltx2_demo_cases import FPS, FRAMES, HEIGHT, WIDTH, make_parts, written
from ltx2_pipe_cases import SAMPLING, make_pair
from ltx2_side_cases import draw
from real_cases import write_png
from safetensors.torch import load_file

from core.geometry import to_video
from infer import ltx2_command, previews
from infer.__main__ import main
from infer.flags import parse, parser
from infer.idle import LTX2_ONLY, WAN_ONLY
from infer.ltx2_generate import generate
from infer.ltx2_guidance import StreamGuidance
from infer.ltx2_sampling import Given
from infer.ltx2_stages import adapted, generate_two_stage, half
from infer.ltx2_text import save_texts
from infer.media import psnr, read_video, write_video
from infer.prompts import Prompt
from infer.sound import Sound, log_mel_correlation, read_sound, write_sound
from nn.ltx2_conditions import FirstFrame, Keyframe, Reference
from nn.ltx2_lora import save_lora


def texts(pair):
    return pair.texts(1), pair.texts(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    parts = make_parts(tmp_path_factory.mktemp("parts"))
    return written(tmp_path_factory.mktemp("ltx2") / "pipeline", parts)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder as Diffusers writes it, with LTX-2's own autoencoders and an upsampler; texts come from a file."""
    pair = make_pair(tmp_path_factory.mktemp("diffusers") / "pipeline", "2.3")
    rows = [{name: x[0] for name, x in pair.texts(seed).items()} for seed in (1, 2)]
    save_texts(pair.folder / "e.safetensors", *rows)
    return pair


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """A clip with sound, a picture, and a sound of another rate that is shorter than the clip."""
    root, generator = tmp_path_factory.mktemp("media"), torch.Generator().manual_seed(1)
    frames = torch.nn.functional.interpolate(torch.rand(1, 3, 4, 8, generator=generator), (64, 128), mode="bilinear")
    frames = 12 * torch.arange(17).reshape(-1, 1, 1, 1) + 60 * frames.permute(0, 2, 3, 1)  # brighter and brighter
    frames = frames.to(torch.uint8)
    time = torch.arange(24000) / 24000
    wave = 0.3 * torch.sin(6.28 * (300 + 900 * time) * time).repeat(2, 1)
    write_video(root / "clip.mp4", frames, FPS, Sound(wave[:, : round(24000 * 17 / FPS)], 24000))
    write_video(root / "silent.mp4", frames, FPS)
    write_sound(root / "short.wav", Sound(wave[:, :4800], 24000))
    write_png(root / "first.png", frames[0])
    return root


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


def command(folder, *flags):
    return main(["--model", str(folder), "--device", "cpu", *map(str, flags)])


def flags_of(pair, tmp_path, flags, seed=0):
    """A whole command line for the folder of Diffusers' models; texts come from its file."""
    size = {"height": SAMPLING.height, "width": SAMPLING.width, "num-frames": SAMPLING.num_frames, "steps": 2}
    own = {**size, "seed": seed, "prompt-embeds": pair.folder / "e.safetensors", "output": tmp_path / "out.mp4"}
    given = [str(flag) for flag in flags]
    return [*given, *(str(w) for k, v in own.items() if f"--{k}" not in given for w in (f"--{k}", v))]


def made(pair, tmp_path, *flags, seed=0):
    """Frames of the file that the command writes with these flags, and how it says that it samples."""
    words = flags_of(pair, tmp_path, flags, seed)
    (frames,) = frames_of(pair.folder, *words).values()
    args = parse(["--model", str(pair.folder), *words])
    return frames, ltx2_command.sampling_of(args, pair.ours, Prompt(""))


def frames_of(folder, *flags):
    """Frames of the files that a command writes, by name: before H.264, which makes 26 levels out of a flip of one."""
    frames = {}

    def write(path, video, *rest):
        frames[path.name] = video
        write_video(path, video, *rest)

    with mock.patch.object(ltx2_command, "write_video", write):
        assert command(folder, *flags) == 0
    return frames


def same(a, b):
    """Equal but for roundings: where tensors lie in memory decides how sums are vectorised, so that a level of 255 may
    fall on the other side here and there."""
    return a.shape == b.shape and (a.int() - b.int()).abs().max() <= 1


def latents(pair, path, sampling, count=1, scale=1):
    """A file's first frames as latents of a clip's size, `scale` times smaller."""
    size = (sampling.height // scale, sampling.width // scale)
    frames = read_video(path, num_frames=count, size=size, fps=None if count == 1 else sampling.fps).frames
    return pair.ours.vae.encode(to_video(frames)[None])


def lora_file(pair, path, seed, **factors):
    """A random adapter of two layers, written as a file and as leaves."""
    leaves = {}
    for layer in ("transformer_blocks.0.attn1.to_q", "transformer_blocks.2.audio_attn2.to_v"):
        rows, columns = pair.ours.params[f"{layer}.weight"].shape
        leaves[f"{layer}.lora_A"] = draw(seed, "A" + layer, 2, columns)
        leaves[f"{layer}.lora_B"] = draw(seed, "B" + layer, rows, 2)
        leaves[f"{layer}.lora_scale"] = torch.tensor(1.0)
    save_lora(path, leaves, pair.ours.cfg, rank=2, alpha=2.0, **factors)
    return leaves


def times(leaves, strength):
    return {k: v * strength if k.endswith("lora_scale") else v for k, v in leaves.items()}


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
    picture, (text, negative) = latents(pair, first, sampling), texts(pair)
    conditions = [FirstFrame("image"), Keyframe("keyframe 0", frame=3, strength=0.6)]
    given = Given(conditions={"video": conditions}, extras={"image": picture, "keyframe 0": picture})
    (clip,) = generate(pair.ours, sampling, text, negative, [7], given=given)
    assert same(found, clip.frames)


def test_a_keyframe_at_0_is_the_first_frame_as_strong_as_it_says(tmp_path, pair, media):
    found, sampling = made(pair, tmp_path, "--keyframe", f"{media / 'first.png'}@0:0.7")
    picture, (text, negative) = latents(pair, media / "first.png", sampling), texts(pair)
    condition = FirstFrame("keyframe 0", strength=0.7)
    given = Given(conditions={"video": [condition]}, extras={"keyframe 0": picture})
    (clip,) = generate(pair.ours, sampling, text, negative, [0], given=given)
    assert same(found, clip.frames)


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


def test_two_stages_with_adapters_of_their_own(tmp_path, pair, media):
    """The second one has the distilled adapter and that of the style, not that of the references."""
    leaves = [lora_file(pair, tmp_path / f"{i}.safetensors", i) for i in range(3)]
    flags = ["--two-stage", "--refine-lora", f"{tmp_path / '0.safetensors'}:0.5", "--reference", media / "clip.mp4"]
    flags += ["--lora", tmp_path / "1.safetensors", "--lora", tmp_path / "2.safetensors"]
    flags += ["--height", 64, "--width", 128]
    found, sampling = made(pair, tmp_path, *flags, "--image", media / "first.png", seed=3)
    pictures = [latents(pair, media / "first.png", s) for s in (sampling, half(sampling))]
    reference = latents(pair, media / "clip.mp4", half(sampling), 5)
    first, extras = FirstFrame("image"), {"image": pictures[1], "reference": reference}
    small = Given(conditions={"video": [first, Reference("reference")]}, extras=extras)
    given, (text, negative) = Given(conditions={"video": [first]}, extras={"image": pictures[0]}), texts(pair)
    refiner = adapted(pair.ours, [leaves[2], times(leaves[0], 0.5)])
    (clip,) = generate_two_stage(
        adapted(pair.ours, leaves[1:]), sampling, text, negative, [3], given=given, small=small, refiner=refiner
    )  # fmt: skip
    assert clip.frames.shape == (5, 64, 128, 3) and same(found, clip.frames)


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
    frames = frames_of(folder, *flags)
    shapes = [tuple(read_video(tmp_path / f"a-00{i}-{j}.mp4").frames.shape) for i in (0, 1) for j in (0, 1)]
    assert shapes == [(FRAMES, HEIGHT, WIDTH, 3)] * 2 + [(5, 16, 16, 3)] * 2
    assert {p.name for p in tmp_path.glob("*.png")} == {"a.png", "a.spectrogram.png"}
    one = ["--prompt", "a rabbit", "--seed", 4, "--output", tmp_path / "b.mp4"]
    (alone,) = frames_of(folder, *one).values()
    assert same(alone, frames["a-000-1.mp4"]) and not same(alone, frames["a-000-0.mp4"])


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


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.fixture
def closed(monkeypatch):
    """Nothing may be encoded, and no weights of a transformer be read."""
    for name in ("embedded", "encode_files", "with_weights"):
        monkeypatch.setattr(ltx2_command, name, lambda *a, **k: pytest.fail("too late"))


REFUSED = {
    "no such picture": (["--image", "x.png"], ["x.png: no such file"]),
    "no such keyframe": (["--keyframe", "x.png@2"], ["x.png: no such file"]),
    "late keyframe": (["--keyframe", "first.png@5"], ["keyframe first.png@5: the clip has frames 0 to 4"]),
    "two first frames": (
        ["--keyframe", "first.png@0:0.5", "--image", "clip.mp4"],
        ["more than one picture at frame 0: first.png@0, clip.mp4"],
    ),
    "no sound": (["--sound", "silent.mp4"], ["silent.mp4: no audio stream"]),
    "short video": (
        ["--video", "clip.mp4", "--num-frames", "41"],
        ["asked for 41 frames", "the longest valid count (2k+1) from there is 17"],
    ),
    "size": (["--height", "20", "--width", "34"], ["width is 34, expected a multiple of 4: nearest valid 32 or 36"]),
    "frames": (["--num-frames", "4"], ["num_frames is 4, expected 2k+1: nearest valid 3 or 5"]),
    "two-stage size": (["--two-stage", "--distilled", "--height", "36", "--steps", "8"], ["nearest valid 32 or 40"]),
    "two stages, not distilled": (["--two-stage"], ["second one needs distilled weights"]),
    "distilled": (["--distilled", "--steps", "5"], ["steps is 5, a distilled model takes 8"]),
    "no such block": (["--stg-scale", "1", "--stg-blocks", "3"], ["video: stg_blocks has 3, allowed 0 to 2"]),
    "no such adapter": (["--lora", "x.safetensors"], ["x.safetensors"]),
    "no such refiner": (["--two-stage", "--refine-lora", "x.safetensors"], ["x.safetensors"]),
    "reference size": (
        ["--reference", "clip.mp4", "--lora", "ic.safetensors", "--height", "36", "--num-frames", "7"],
        ["num_frames is 7, expected 4k+1: nearest valid 5 or 9", "height is 36, expected a multiple of 8"],
    ),
    "reference of another": (
        ["--reference", "clip.mp4", "--lora", "plain.safetensors", "--lora", "ic.safetensors"],
        ["ic.safetensors: it was trained with references of factors (2, 2): make it the first --lora"],
    ),
    "attention": (
        ["--reference", "clip.mp4", "--reference-attention", "1.5"], ["(Reference): attention is 1.5, allowed 0 to 1"],
    ),
    "all given": (["--video", "clip.mp4", "--sound", "clip.mp4"], ["every stream is given"]),
    "itself": (["--sound", "clip.mp4", "--output", "clip.mp4"], ["would replace what is read", "clip.mp4"]),
    "sheet": (["--contact-sheet", "a.jpg"], ["--contact-sheet a.jpg: expected a name ending in .png"]),
    "sampler": (["--sampler", "unipc"], ["--sampler unipc is none of LTX-2's: euler, gradient_estimation, res_2s"]),
    "fps": (["--fps", "0"], ["fps is 0.0"]),
    "late preview": (["--preview-every", "4"], ["--preview-every 4 would do nothing: no multiple is among steps 1 to"]),
    "no preview": (["--video", "clip.mp4", "--preview-every", "1"], ["--preview-every would do nothing beside"]),
    # What would do nothing.
    "of Wan": (["--flow-shift", "2", "--vae-strips", "2"], ["--flow-shift, --vae-strips would do nothing for this"]),
    "other stream": (["--modality", "video", "--audio-stg-scale", "1"], ["--audio-stg-scale would do nothing here"]),
    "no video": (["--modality", "audio", "--image", "x.png"], ["--image, --height, --width would do nothing here"]),
    "no other": (["--modality", "video", "--modality-scale", "2"], ["--modality-scale would do nothing here"]),
    "sound given": (["--sound", "clip.mp4", "--audio-guidance-scale", "2"], ["would do nothing beside --sound"]),
    "video given": (
        ["--video", "clip.mp4", "--guidance-scale", "2", "--keyframe", "first.png@2", "--two-stage"],
        ["--guidance-scale would do nothing beside --video", "--keyframe, --two-stage would do nothing beside --video"],
    ),
    "no reference": (["--reference-attention", "0.5"], ["--reference-attention would do nothing without --reference"]),
    "one stage": (["--refine-lora", "x"], ["--refine-lora would do nothing without --two-stage"]),
    "no GPU": (["--cuda-graph"], ["--cuda-graph would do nothing on cpu"]),
    "unguided": (
        ["--guidance-scale", "1", "--audio-guidance-scale", "1", "--two-pass-guidance", "--max-batch", "1"],
        ["--two-pass-guidance, --max-batch would do nothing here: nothing is guided"],
    ),
    "rescaled": (["--distilled", "--steps", "8", "--guidance-rescale", "0.5"], ["--guidance-rescale would do nothing"]),
    "blocks": (["--stg-blocks", "1"], ["--stg-blocks would do nothing without --stg-scale"]),
    "batch": (["--max-batch", "2"], ["--max-batch would do nothing here: there are 2 passes"]),
    "batch of one": (["--max-batch", "1", "--two-pass-guidance"], ["would do nothing beside --two-pass-guidance"]),
    "negative": (["--negative-prompt", "x"], ["--negative-prompt would do nothing beside --prompt-embeds"]),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_or_would_do_nothing_is_told_before_any_work(
    tmp_path, pair, media, what, capsys, monkeypatch, closed
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    flags, said = REFUSED[what]
    for name in ("clip.mp4", "silent.mp4", "first.png"):
        (tmp_path / name).write_bytes((media / name).read_bytes())
    lora_file(pair, tmp_path / "ic.safetensors", 1, downscale=2, temporal_scale=2)
    lora_file(pair, tmp_path / "plain.safetensors", 1)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert command(pair.folder, *flags_of(pair, tmp_path, flags)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and all(part in error for part in said), error
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("text", ["a.png", "a.png@", "@3", "a.png@x", "a.png@-1", "a.png@3:0", "a.png@3:1.5"])
def test_a_keyframe_is_a_file_at_a_frame(text, capsys):
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--keyframe", text])
    assert "expected FILE@FRAME" in capsys.readouterr().err


def test_faults_of_a_prompt_file_are_told_by_place(tmp_path, folder, capsys, closed):
    data = [{"caption": "a", "num_frames": 10}, {"caption": "b"}, {"caption": "c", "width": 20}]
    (tmp_path / "p.json").write_text(json.dumps({"data": data}))
    flags = ["--prompt-file", tmp_path / "p.json", "--output", tmp_path / "a.mp4", "--negative-prompt", "blur"]
    assert command(folder, *flags) == 2
    error = capsys.readouterr().err
    assert "data[0]" in error and "data[1]" not in error and "data[2]" in error and "nearest valid 16 or 24" in error


@pytest.mark.parametrize("flags, why", [(["--video"], "is given by --video"), (["--modality"], "the model is audio")])
def test_a_picture_of_a_prompt_needs_a_video_to_make(tmp_path, folder, media, capsys, closed, flags, why):
    (tmp_path / "p.json").write_text(json.dumps({"data": [{"caption": "a", "image": str(media / "first.png")}]}))
    value = {"--video": media / "clip.mp4", "--modality": "audio"}[flags[0]]
    out = tmp_path / "a.mp4"
    assert command(folder, "--prompt-file", tmp_path / "p.json", "--output", out, *flags, value) == 2
    assert why in (error := capsys.readouterr().err) and "data[0]: " in error


# --- texts ----------------------------------------------------------------------------------------------------

VALUES = {
    "modality": ["video"], "sound": ["s.wav"], "keyframe": ["a.png@1"], "reference": ["a.mp4"], "two_stage": [],
    "reference_attention": ["0.5"], "lora": ["a"], "refine_lora": ["a"], "distilled": [], "stg_scale": ["1"],
    "audio_guidance_scale": ["2"], "audio_stg_scale": ["1"], "stg_blocks": ["0"], "modality_scale": ["2"],
    "audio_modality_scale": ["2"], "audio_guidance_rescale": ["0.5"], "skip_step": ["1"], "max_batch": ["1"],
    "cuda_graph": [], "vae_tile": ["4"], "image": ["a.png"], "video": ["a.mp4"], "output": ["a.mp4"], "steps": ["2"],
    "contact_sheet": ["a.png"], "samples_per_prompt": ["2"], "num_frames": ["5"], "height": ["16"], "width": ["16"],
    "fps": ["12"], "sampler": ["euler"], "guidance_rescale": ["0.5"], "two_pass_guidance": [], "seed": ["1"],
    "vae_dtype": ["fp32"], "attention_backend": ["auto"], "guidance_scale": ["1"], "negative_prompt": ["dull"],
    "preview_every": ["1"],
}  # fmt: skip
ELSEWHERE = {"model", "prompt", "prompt_file", "prompt_embeds", "save_embeds", "device", "dtype", *WAN_ONLY}


def test_the_table_has_every_flag():
    assert VALUES.keys() | ELSEWHERE == vars(parser().parse_args(["--model", "m"])).keys()
    assert VALUES.keys() >= set(LTX2_ONLY)


def test_beside_save_embeds_a_flag_changes_the_file_or_is_refused(tmp_path, folder, capsys):
    """The negative text is there where something is guided by it."""

    def saved(*flags):
        out = tmp_path / "e.safetensors"
        out.unlink(missing_ok=True)
        status = command(folder, "--prompt", "a red ball", "--save-embeds", out, *flags)
        return capsys.readouterr().err if status else load_file(out)

    names = [f"{which}{stream}_prompt_embeds" for which in ("", "negative_") for stream in ("video", "audio")]
    plain, kept = saved(), set()
    assert sorted(plain) == sorted(names)
    for name, value in VALUES.items():
        flag = f"--{name.replace('_', '-')}"
        found = saved(flag, *value)
        if isinstance(found, str):
            assert f"{flag} would do nothing beside --save-embeds" in found, found
        else:
            kept.add(name)
    assert kept == {"modality", "distilled", "negative_prompt", "guidance_scale", "audio_guidance_scale"}
    off = ["--guidance-scale", 1, "--audio-guidance-scale", 1]
    assert sorted(saved(*off)) == sorted(saved("--distilled")) == sorted(names[:2])
    assert sorted(saved("--modality", "video")) == sorted(names[::2])
    assert not torch.equal(saved("--negative-prompt", "dull")[names[2]], plain[names[2]])
