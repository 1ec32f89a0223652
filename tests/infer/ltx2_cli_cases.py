"""Folders, files and command lines of `python -m infer` for LTX-2, and what its functions make of the same."""

from unittest import mock

import torch
from ltx2_demo_cases import FPS, make_parts, written
from ltx2_pipe_cases import SAMPLING, make_pair
from ltx2_side_cases import draw
from real_cases import write_png

from core.geometry import to_video
from infer import ltx2_command
from infer.__main__ import main
from infer.flags import parse
from infer.ltx2_generate import Clip
from infer.ltx2_text import save_texts
from infer.media import read_video, recompressed, resize_cover, write_video
from infer.prompts import Prompt
from infer.sound import Sound, write_sound
from nn.ltx2_lora import save_lora


def texts(pair):
    return pair.texts(1), pair.texts(2)


def make_folder(tmp_path_factory):
    """A folder with the demos' stand-ins around its transformer."""
    parts = make_parts(tmp_path_factory.mktemp("parts"))
    return written(tmp_path_factory.mktemp("ltx2") / "pipeline", parts)


def make_cli_pair(tmp_path_factory):
    """A folder as Diffusers writes it, with LTX-2's own autoencoders and an upsampler; texts come from a file."""
    pair = make_pair(tmp_path_factory.mktemp("diffusers") / "pipeline", "2.3")
    rows = [{name: x[0] for name, x in pair.texts(seed).items()} for seed in (1, 2)]
    save_texts(pair.folder / "e.safetensors", *rows)
    return pair


def make_media(tmp_path_factory):
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
    mask = torch.zeros(17, 64, 128, 3, dtype=torch.uint8)
    write_png(root / "black.png", mask[0])
    mask[:, :, 62:] = 255
    write_png(root / "right.png", mask[0])
    write_png(root / "square.png", mask[0, :, :64])
    mask[:2] = 0
    mask[:, 32:, :56] = 90
    write_video(root / "later.mp4", mask, FPS)
    write_png(root / "white.png", 255 - 0 * mask[0])
    return root


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
    clip, sampling = made_clip(pair, tmp_path, *flags, seed=seed)
    return clip.frames, sampling


def made_clip(pair, tmp_path, *flags, seed=0):
    """As `made`, with the sound."""
    words = flags_of(pair, tmp_path, flags, seed)
    (clip,) = clips_of(pair.folder, *words).values()
    args = parse(["--model", str(pair.folder), *words])
    return clip, ltx2_command.sampling_of(args, pair.ours, Prompt(""))


def frames_of(folder, *flags):
    """Frames of the files that a command writes, by name."""
    return {name: clip.frames for name, clip in clips_of(folder, *flags).items()}


def clips_of(folder, *flags):
    """The clips that a command writes, by name: before H.264, which makes 26 levels out of a flip of one."""
    clips = {}

    def write(path, video, fps, sound=None):
        clips[path.name] = Clip(video, sound)
        write_video(path, video, fps, sound)

    with mock.patch.object(ltx2_command, "write_video", write):
        assert command(folder, *flags) == 0
    return clips


def same(a, b):
    """Equal but for roundings: where tensors lie in memory decides how sums are vectorised, so that a level of 255 may
    fall on the other side here and there."""
    return a.shape == b.shape and (a.int() - b.int()).abs().max() <= 1


def alike(a, b):
    """Equal pictures and sounds but for roundings, see `same`; waveforms are in [-1, 1]."""
    return same(a.frames, b.frames) and torch.allclose(a.sound.waveform, b.sound.waveform, atol=1e-3)


def resampled(path, sampling, **how):
    """Frames of a file at a clip's size and rate."""
    return read_video(path, size=(sampling.height, sampling.width), fps=sampling.fps, **how).frames


def latents(pair, path, sampling, count):
    """A file's first frames as latents of a clip's size."""
    return pair.ours.vae.encode(to_video(resampled(path, sampling, num_frames=count))[None])


def kept(pair, mask, sampling):
    """What a mask's file keeps, `[1, t, h, w]`: latents whose pixels are all below the middle level."""
    still = mask.suffix == ".png"
    white = read_video(mask, num_frames=1, size=(sampling.height, sampling.width)).frames if still else None
    white = resampled(mask, sampling, num_frames=sampling.num_frames) if white is None else white
    white = (white.float().mean(-1) >= 127.5).expand(sampling.num_frames, -1, -1)
    t, s = pair.ours.vae.temporal, pair.ours.vae.spatial
    spans = [slice(0, 1), *(slice(i, i + t) for i in range(1, sampling.num_frames, t))]
    rows, columns = range(0, sampling.height, s), range(0, sampling.width, s)
    cells = [[[not white[span, y : y + s, x : x + s].any() for x in columns] for y in rows] for span in spans]
    return torch.tensor(cells).float()[None]


def seen(pair, path, sampling, crf=33):
    """A picture as latents of a clip's size, compressed before it is scaled."""
    picture = recompressed(read_video(path, num_frames=1).frames[0], crf)[None]
    return pair.ours.vae.encode(to_video(resize_cover(picture, (sampling.height, sampling.width)))[None])


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
