"""`python -m infer` with LTX-2 folders: what cannot be, or would do nothing, is told before anything is encoded."""

import json

import pytest
import torch
from ltx2_cli_cases import command, flags_of, lora_file, make_cli_pair, make_folder, make_media
from safetensors.torch import load_file

from infer import ltx2_command
from infer.flags import parse, parser
from infer.idle import LTX2_ONLY, WAN_ONLY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_cli_pair(tmp_path_factory)


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    return make_media(tmp_path_factory)


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
        ["--reference", "clip.mp4", "--reference-attention", "1.5", "--reference-strength", "2"],
        ["(Reference): strength is 2.0, allowed 0 to 1", "(Reference): attention is 1.5, allowed 0 to 1"],
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
    "other stream": (
        ["--modality", "video", "--audio-stg-scale", "1", "--reference-sound", "clip.mp4"],
        ["--reference-sound, --audio-stg-scale would do nothing here"],
    ),
    "no video": (
        ["--modality", "audio", "--image", "x.png", "--suffix", "clip.mp4@3", "--mask", "x"],
        ["--image, --suffix, --mask, --height, --width would do nothing here"],
    ),
    "no other": (["--modality", "video", "--modality-scale", "2"], ["--modality-scale would do nothing here"]),
    "sound given": (
        ["--sound", "clip.mp4", "--audio-guidance-scale", "2", "--reference-sound", "clip.mp4"],
        ["--reference-sound, --audio-guidance-scale would do nothing beside --sound"],
    ),
    "video given": (
        ["--video", "clip.mp4", "--guidance-scale", "2", "--keyframe", "first.png@2", "--two-stage", "--prefix", "x@1"],
        ["--guidance-scale would do nothing beside --video", "--keyframe, --prefix, --two-stage would do nothing"],
    ),
    "counts": (
        ["--prefix", "clip.mp4@2", "--suffix", "clip.mp4@1", "--image", "first.png"],
        ["prefix clip.mp4@2: expected 2k+1 frames: nearest valid 1 or 3", "suffix clip.mp4@1: expected 2k+1 frames: "
         "nearest valid 3", "more than one picture at frame 0: first.png, the prefix clip.mp4"],
    ),
    "nothing left": (
        ["--prefix", "clip.mp4@3", "--suffix", "clip.mp4@3"],
        ["--prefix and --suffix leave nothing to make of 5 frames"],
    ),
    "short prefix": (
        ["--prefix", "clip.mp4@19", "--num-frames", "41"],
        ["asked for 19 frames", "longest valid count (2k+1) from there is 17"],
    ),
    "no such suffix": (["--suffix", "x.mp4@3"], ["x.mp4: no such file"]),
    "no such mask": (["--video", "clip.mp4", "--mask", "x.png"], ["x.png: no such file"]),
    "short mask": (["--video", "clip.mp4", "--mask", "later.mp4", "--num-frames", "41"], ["later.mp4: asked for 41"]),
    "shape of a mask": (
        ["--video", "clip.mp4", "--mask", "square.png"], ["the mask is 64x64, clip.mp4 128x64: they must be of one"]
    ),
    "black mask": (["--video", "clip.mp4", "--mask", "black.png"], ["nothing of clip.mp4 would be made anew"]),
    "white mask": (["--video", "clip.mp4", "--mask", "white.png"], ["nothing of clip.mp4 would be kept"]),
    "no such reference": (["--reference-sound", "silent.mp4"], ["silent.mp4: no audio stream"]),
    "mask itself": (
        ["--video", "clip.mp4", "--mask", "right.png", "--contact-sheet", "right.png"], ["would replace what is read"]
    ),
    "no video to mask": (["--mask", "right.png"], ["--mask would do nothing without --video"]),
    "mask and parts": (
        ["--video", "clip.mp4", "--mask", "right.png", "--prefix", "clip.mp4@1", "--suffix", "clip.mp4@3"],
        ["--prefix, --suffix would do nothing beside --video with --mask"],
    ),
    "no picture": (["--image-crf", "0"], ["--image-crf would do nothing without a picture"]),
    "no reference": (
        ["--reference-attention", "0.5", "--reference-strength", "1"],
        ["--reference-attention, --reference-strength would do nothing without --reference"],
    ),
    "one stage": (["--refine-lora", "x"], ["--refine-lora would do nothing without --two-stage"]),
    "no compiler": (["--compile"], ["--compile on a CPU needs a C++ compiler: there is no no-such-compiler"]),
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
    monkeypatch.setenv("CXX", "no-such-compiler")
    flags, said = REFUSED[what]
    for file in media.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
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
    assert "expected FILE@FRAME or" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--prefix", "--suffix"])
@pytest.mark.parametrize("text", ["a.mp4", "a.mp4@0", "a.mp4@9:2"])
def test_a_part_of_a_video_is_a_file_and_a_count(flag, text, capsys):
    with pytest.raises(SystemExit):
        parse(["--model", "m", flag, text])
    assert "expected FILE@FRAMES or FILE@FRAMES:STRENGTH" in capsys.readouterr().err


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


@pytest.mark.parametrize("text", ["52", "-1", "1.5", "x"])
def test_a_crf_is_one_of_x264(text, capsys):
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--image-crf", text])
    assert "expected an integer from 0 (as it is) to 51" in capsys.readouterr().err


# --- texts ----------------------------------------------------------------------------------------------------

VALUES = {
    "modality": ["video"], "sound": ["s.wav"], "keyframe": ["a.png@1"], "image_crf": ["0"], "reference": ["a.mp4"],
    "two_stage": [], "reference_attention": ["0.5"], "lora": ["a"], "refine_lora": ["a"], "distilled": [],
    "prefix": ["a.mp4@9"], "suffix": ["a.mp4@9"], "mask": ["a.png"], "reference_strength": ["0.5"],
    "reference_sound": ["a.wav"], "stg_scale": ["1"], "compile": [], "audio_guidance_scale": ["2"],
    "audio_stg_scale": ["1"], "stg_blocks": ["0"], "modality_scale": ["2"],
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
