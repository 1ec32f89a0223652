"""`python -m infer`: what it writes, that it repeats itself, and every bad input with nothing written."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch
from real_cases import without_loss
from safetensors.torch import load_file, save_file

from core.errors import UserError
from infer import __main__ as cli
from infer.__main__ import main
from infer.flags import parser, sampling_of
from infer.folder import INDEX, Defaults, load_pipeline, save_pipeline
from infer.generate import Sampling
from infer.media import read_video


@pytest.fixture(autouse=True)
def lossless(monkeypatch):
    without_loss(monkeypatch)


ROOT = Path(__file__).parents[2]
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def args_for(folder, out, *more, prompt="a red ball"):
    asked = [] if prompt is None else ["--prompt", prompt]
    return ["--model", str(folder), *asked, "--output", str(out), "--device", "cpu", *map(str, more)]


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out" / "a.mp4"


@pytest.fixture
def no_sheet(monkeypatch):
    """Leaves out the contact sheet, whose drawing takes longer than the sampling."""
    monkeypatch.setattr(cli, "contact_sheet", lambda rows, path: Path(path).write_bytes(b"sheet"))


def frames_of(folder, out, *more, **options):
    assert main(args_for(folder, out, *more, **options)) == 0
    return read_video(out).frames


def embeddings(path, **tensors):
    save_file(tensors, path)
    return ["--prompt-embeds", path]


# --- what it makes --------------------------------------------------------------------------------------------


def test_a_video_and_a_contact_sheet(tiny, out, capsys):
    """Count, size and rate are the folder's; nothing else is left."""
    assert main(args_for(tiny.folder, out)) == 0
    video = read_video(out)
    assert video.frames.shape == (5, 16, 24, 3) and video.fps == 12
    assert video.frames.float().std() > 1, "one plain colour"
    assert matplotlib.image.imread(out.with_suffix(".png")).ndim == 3
    assert sorted(p.name for p in out.parent.iterdir()) == ["a.mp4", "a.png"]
    printed = capsys.readouterr().out
    assert "sampling: 3/3" in printed and f"wrote {out} (5 frames, 24x16, 12 fps)" in printed


def test_flags_override_the_folder(tiny, out, no_sheet, tmp_path, capsys):
    sheet = tmp_path / "elsewhere" / "sheet.png"
    sheet.parent.mkdir()
    more = ["--num-frames", 9, "--height", 24, "--width", 16, "--fps", 29.97, "--steps", 2, "--contact-sheet", sheet]
    assert main(args_for(tiny.folder, out, *more)) == 0
    video = read_video(out)
    assert video.frames.shape == (9, 24, 16, 3) and video.fps == pytest.approx(29.97)
    assert sheet.is_file() and "sampling: 2/2" in capsys.readouterr().out


def test_a_single_frame(tiny, out, no_sheet):
    assert frames_of(tiny.folder, out, "--num-frames", 1).shape == (1, 16, 24, 3)


def test_the_seed_decides_to_the_bit(tiny, out, no_sheet):
    first = frames_of(tiny.folder, out, "--seed", 5)
    assert torch.equal(frames_of(tiny.folder, out, "--seed", 5), first)
    assert not torch.equal(frames_of(tiny.folder, out, "--seed", 6), first)
    assert not torch.equal(frames_of(tiny.folder, out), first), "the default seed is 0"
    assert torch.equal(frames_of(tiny.folder, out), frames_of(tiny.folder, out, "--seed", 0))


def test_prompts_and_settings_matter(tiny, out, no_sheet):
    base = frames_of(tiny.folder, out)
    for more in (
        ["--negative-prompt", "dull"], ["--guidance-scale", 1], ["--guidance-scale", 0], ["--dtype", "bf16"],
        ["--sampler", "euler"], ["--flow-shift", 1], ["--steps", 5],
    ):  # fmt: skip
        assert not torch.equal(frames_of(tiny.folder, out, *more), base), more
    assert not torch.equal(frames_of(tiny.folder, out, prompt="a blue cube"), base)
    strong = ["--guidance-scale", 50]
    assert not torch.equal(
        frames_of(tiny.folder, out, *strong), frames_of(tiny.folder, out, *strong, "--guidance-rescale", 1)
    )
    # Two passes compute the same; a level of rounding and the codec's loss remain.
    two = frames_of(tiny.folder, out, "--two-pass-guidance")
    assert (two.int() - base.int()).abs().max() <= 8
    again = frames_of(tiny.folder, out, "--attention-backend", "reference")
    assert (again.int() - base.int()).abs().max() <= 8


@pytest.mark.parametrize("batched", [False, True])
def test_precomputed_embeddings_equal_the_prompt(tiny, out, no_sheet, tmp_path, batched):
    """As `[L, D]` and as `[1, L, D]`, in a folder without a text encoder that notes the padding length."""
    pipe = load_pipeline(tiny.folder, device=torch.device("cpu"), dtype=torch.float32)
    text, negative = ((e[None] if batched else e).clone() for e in pipe.text.embed(["a red ball", ""]))
    flags = embeddings(tmp_path / "e.safetensors", prompt_embeds=text, negative_prompt_embeds=negative)
    expected = frames_of(tiny.folder, out)
    assert torch.equal(frames_of(tiny.folder, out, *flags, prompt=None), expected)
    bare = dataclasses.replace(tiny.defaults, text_length=6)
    save_pipeline(tmp_path / "bare", tiny.params, tiny.cfg, bare, vae=tiny.folder / "vae")
    assert torch.equal(frames_of(tmp_path / "bare", out, *flags, prompt=None), expected)


def test_without_guidance_no_negative_embedding_is_needed(tiny, out, no_sheet, tmp_path):
    flags = embeddings(tmp_path / "e.safetensors", prompt_embeds=torch.ones(2, 8))
    assert main(args_for(tiny.folder, out, *flags, "--guidance-scale", 1, prompt=None)) == 0


def test_what_sampling_is_asked_for(tiny):
    """The command line over the folder over the defaults; an explicit 0 stays 0."""
    read = lambda *flags: sampling_of(parser().parse_args(["--model", "m", *flags]), tiny.defaults)  # noqa: E731
    assert read() == Sampling(5, 16, 24, steps=3, flow_shift=4.0, guidance_scale=2.5)
    assert read("--guidance-scale", "0").guidance_scale == 0 and read("--steps", "0").steps == 0
    flags = "--num-frames 9 --height 32 --width 48 --steps 7 --sampler euler --flow-shift 2 --guidance-scale 3"
    full = read(*flags.split(), "--guidance-rescale", "0.5", "--two-pass-guidance")
    assert full == Sampling(9, 32, 48, 7, "euler", 2.0, 3.0, 0.5, False)
    with pytest.raises(UserError, match="--num-frames\n  - --width"):
        sampling_of(parser().parse_args(["--model", "m"]), Defaults(height=16))


def test_help_in_a_fresh_process():
    done = subprocess.run([sys.executable, "-m", "infer", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "python -m infer" in done.stdout
    for flag in ("--prompt-embeds", "--seed", "--attention-backend", "4k+1", "example:"):
        assert flag in done.stdout


# --- bad input ------------------------------------------------------------------------------------------------


def refused(capsys, argv, out, *parts):
    """Exit code 2, `error:` with all parts and no traceback, and nothing written."""
    before = sorted(out.parent.rglob("*")) if out.parent.exists() else None
    assert main(argv) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    for part in parts:
        assert part in message, message
    assert (sorted(out.parent.rglob("*")) if out.parent.exists() else None) == before
    return message


BAD_FLAGS = {
    "guidance off": (
        ["--guidance-scale", 1, "--negative-prompt", "dull", "--guidance-rescale", 0.5, "--two-pass-guidance"],
        ["--negative-prompt, --guidance-rescale, --two-pass-guidance would do nothing", "--guidance-scale"],
    ),
    "frames": (["--num-frames", 6], ["num_frames is 6, expected 4k+1: nearest valid 5 or 9"]),
    "sizes": (["--height", 20, "--width", 4], ["height is 20", "16 or 24", "width is 4", "nearest valid 8"]),
    "steps": (["--steps", 0], ["steps is 0, expected an integer of at least 1"]),
    "fps": (["--fps", 0], ["fps is 0.0, expected a positive number"]),
    "shift": (["--flow-shift", 0], ["shift is 0.0, allowed is a number > 0"]),
    "guidance": (["--guidance-scale", -1], ["scale is -1.0"]),
    "nan": (["--guidance-scale", "nan"], ["scale is nan"]),
    "rescale": (["--guidance-rescale", 2], ["rescale is 2.0, allowed is a number 0..1"]),
    "seed": (["--seed", 2**63], [f"{2**63} is outside int64"]),
    "backend": (["--attention-backend", "sdpa_flash"], ["backend 'sdpa_flash' cannot serve", "needs a CUDA device"]),
    "device": (["--device", "cuda:7"], ["device 'cuda:7' is not available here", "cpu"]),
    "device name": (["--device", "gpu"], ["device 'gpu' is not available here"]),
    "sheet": (["--contact-sheet", "sheet.jpg"], ["--contact-sheet sheet.jpg: expected a name ending in .png"]),
}


@pytest.mark.parametrize("what", BAD_FLAGS)
def test_bad_flags(tiny, out, capsys, what):
    flags, parts = BAD_FLAGS[what]
    refused(capsys, args_for(tiny.folder, out, *flags), out, *parts)


@pytest.mark.parametrize(
    "flags", [["--attention-backend", "flash"], ["--sampler", "ddim"], ["--steps", "many"], ["--sed", "1x"]]
)
def test_flags_that_the_parser_refuses(tiny, out, capsys, flags):
    with pytest.raises(SystemExit) as exit_:
        main(args_for(tiny.folder, out, *flags))
    assert exit_.value.code == 2 and flags[1] in capsys.readouterr().err and not out.parent.exists()


def test_output_must_be_an_mp4_that_can_be_written(tiny, out, capsys, tmp_path):
    refused(capsys, args_for(tiny.folder, out.with_suffix(".avi")), out, "a.avi: expected a name ending in .mp4")
    (tmp_path / "folder.mp4").mkdir()
    refused(capsys, args_for(tiny.folder, tmp_path / "folder.mp4"), out, "a folder stands where the file should be")
    (tmp_path / "file").write_text("")
    refused(capsys, args_for(tiny.folder, tmp_path / "file" / "a.mp4"), out, "file is not a folder")


def test_a_full_disk_is_reported_and_keeps_the_old_video(tiny, out, capsys, monkeypatch):
    out.parent.mkdir()
    out.write_bytes(b"old")

    def fail(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("core.files.os.fsync", fail)
    refused(capsys, args_for(tiny.folder, out), out, "could not be written", "No space left")
    assert out.read_bytes() == b"old"


def test_exactly_one_of_prompt_and_embeddings(tiny, out, capsys, tmp_path):
    flags = embeddings(tmp_path / "e.safetensors", prompt_embeds=torch.ones(2, 8))
    for argv in (args_for(tiny.folder, out, *flags), args_for(tiny.folder, out, prompt=None)):
        refused(capsys, argv, out, "exactly one of --prompt, --prompt-file, --prompt-embeds")


BAD_EMBEDDINGS = {
    "wide": ({"prompt_embeds": (2, 9)}, ["e.safetensors: prompt_embeds: [2, 9], expected at most [6, 8]"]),
    "long": ({"prompt_embeds": (7, 8)}, ["prompt_embeds: [7, 8], expected at most [6, 8]"]),
    "negative": ({"prompt_embeds": (2, 8), "negative_prompt_embeds": (2, 5)}, ["negative_prompt_embeds: [2, 5]"]),
    "flat": ({"prompt_embeds": (8,)}, ["prompt_embeds is [8], expected [L, D] or [1, L, D]"]),
    # Two prompts are not one long prompt.
    "two": ({"prompt_embeds": (2, 3, 8)}, ["prompt_embeds is [2, 3, 8], expected [L, D] or [1, L, D]"]),
    "missing": ({"text": (2, 8)}, ["it has text", "missing prompt_embeds"]),
}


@pytest.mark.parametrize("what", BAD_EMBEDDINGS)
def test_bad_embeddings(tiny, out, capsys, tmp_path, what):
    shapes, parts = BAD_EMBEDDINGS[what]
    flags = embeddings(tmp_path / "e.safetensors", **{k: torch.ones(s) for k, s in shapes.items()})
    guidance = 2 if "negative_prompt_embeds" in shapes else 1
    refused(capsys, args_for(tiny.folder, out, *flags, "--guidance-scale", guidance, prompt=None), out, *parts)


def test_embeddings_without_a_negative_one_or_without_a_file(tiny, out, capsys, tmp_path):
    flags = embeddings(tmp_path / "e.safetensors", prompt_embeds=torch.ones(2, 8))
    refused(capsys, args_for(tiny.folder, out, *flags, prompt=None), out, "missing negative_prompt_embeds")
    gone = ["--prompt-embeds", tmp_path / "gone.safetensors"]
    refused(capsys, args_for(tiny.folder, out, *gone, prompt=None), out, "gone.safetensors: no such file")
    (tmp_path / "e.pt").write_bytes(b"")
    refused(capsys, args_for(tiny.folder, out, "--prompt-embeds", tmp_path / "e.pt", prompt=None), out, "pickle")


def test_embeddings_that_are_not_finite(tiny, out, capsys, tmp_path):
    flags = embeddings(tmp_path / "e.safetensors", prompt_embeds=torch.full((2, 8), torch.nan))
    refused(capsys, args_for(tiny.folder, out, *flags, "--guidance-scale", 1, prompt=None), out, "NaN or infinite")


def test_missing_and_foreign_folders(own_folder, out, capsys, tmp_path):
    refused(capsys, args_for(tmp_path / "gone", out), out, "gone: no such folder")
    refused(capsys, args_for(own_folder / "transformer", out), out, f"{INDEX}: no such file")
    index = own_folder / INDEX
    index.write_text(json.dumps({**json.loads(index.read_text()), "_class_name": "FluxPipeline"}))
    refused(capsys, args_for(own_folder, out), out, "FluxPipeline", "WanPipeline")


def test_a_transformer_of_another_model(own_folder, out, capsys):
    path = own_folder / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "_class_name": "FluxTransformer2DModel"}))
    refused(capsys, args_for(own_folder, out), out, str(path), "FluxTransformer2DModel", "WanTransformer3DModel")


def test_a_config_that_fits_no_weights(own_folder, out, capsys):
    path = own_folder / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_layers": 3}))
    message = refused(capsys, args_for(own_folder, out), out, "missing blocks.2.attn1.to_q.weight [24, 24]")
    assert "blocks.1." not in message
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_heads": 3}))
    refused(capsys, args_for(own_folder, out), out, str(path), "unknown key num_heads", "num_attention_heads")


def test_truncated_weights(own_folder, out, capsys):
    path = own_folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-10])
    refused(capsys, args_for(own_folder, out), out, str(path), "cut short")
    path.unlink()
    refused(capsys, args_for(own_folder, out), out, "no *.safetensors in this folder")


def test_keys_that_are_missing_unexpected_and_misshapen_are_all_in_one_message(own_folder, out, capsys):
    tree = load_file(own_folder / WEIGHTS)
    del tree["proj_out.bias"]
    tree["blocks.0.extra"] = torch.zeros(3)
    tree["blocks.1.ffn.net.2.bias"] = torch.zeros(5)
    save_file(tree, own_folder / WEIGHTS)
    message = refused(
        capsys, args_for(own_folder, out), out, "missing proj_out.bias [16]", "unexpected blocks.0.extra [3]",
        "blocks.1.ffn.net.2.bias has shape [5], expected [24]",
    )  # fmt: skip
    assert message.count("\n  - ") == 3


def test_parts_that_cannot_be_run(own_folder, out, capsys, no_sheet, tmp_path):
    """The text encoder matters only where there is a prompt; the VAE always, and before weights are read."""
    flags = embeddings(tmp_path / "e.safetensors", prompt_embeds=torch.ones(2, 8))
    by_embedding = args_for(own_folder, out, *flags, "--guidance-scale", 1, prompt=None)
    text = own_folder / "text_encoder" / "config.json"
    text.write_text(json.dumps({"model_type": "clip_text_model"}))
    refused(capsys, args_for(own_folder, out), out, "'clip_text_model' cannot be run", "precomputed prompt embeddings")
    assert main(by_embedding) == 0
    shutil.rmtree(text.parent)
    refused(capsys, args_for(own_folder, out), out, "text_encoder/config.json: no such file")
    weights = next((own_folder / "vae").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    refused(capsys, by_embedding, out, str(weights), "cut short")
    vae = own_folder / "vae" / "config.json"
    vae.write_text(json.dumps({"_class_name": "AutoencoderKLCogVideoX"}))
    refused(capsys, by_embedding, out, "'AutoencoderKLCogVideoX' cannot be run", "LatentreePatchCodec")
    shutil.rmtree(vae.parent)
    refused(capsys, by_embedding, out, "vae/config.json: no such file")


def test_a_folder_without_sizes_asks_for_all_of_them(tiny, out, capsys, tmp_path):
    save_pipeline(
        tmp_path / "p",
        tiny.params,
        tiny.cfg,
        Defaults(),
        vae=tiny.folder / "vae",
        text_encoder=tiny.folder / "text_encoder",
    )
    refused(capsys, args_for(tmp_path / "p", out), out, "--num-frames", "--height", "--width")
