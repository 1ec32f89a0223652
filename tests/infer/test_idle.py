"""Flags that would do nothing beside others are refused by name, and those that are not refused do something."""

import functools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from real_cases import random_frames, write_png
from safetensors.torch import load_file, save_file

from core.scan import compiled
from infer import __main__ as cli
from infer import flags
from infer.__main__ import main
from infer.flags import parse, parser
from infer.idle import LTX2_ONLY, OF_PROMPTS, idle_beside_prompts
from infer.prompts import Prompt
from infer.words import counted
from nn import text_hash
from nn.text_hash import HashTextConfig

# Every flag with a value that it may have, all but those that say what to show or where the model is.
VALUES = {
    "negative_prompt": ["dull"], "image": ["PNG"], "clip_feature": ["EMBEDS"], "video": ["PNG"], "strength": ["0.8"],
    "samples_per_prompt": ["1"], "output": ["sample.mp4"], "contact_sheet": ["sheet.png"], "preview_every": ["1"],
    "num_frames": ["9"], "height": ["64"], "width": ["64"], "fps": ["16"], "steps": ["2"], "sampler": ["euler"],
    "flow_shift": ["2"], "guidance_scale": ["1"], "guidance_rescale": ["0"], "unconditional": ["text=zero"],
    "two_pass_guidance": [], "seed": ["0"], "device": ["cpu"], "dtype": ["bf16"], "vae_dtype": ["fp32"],
    "vae_strips": ["1"], "attention_backend": ["auto"], "compile": [],
}  # fmt: skip
OTHERS = {"model", "prompt", "prompt_file", "prompt_embeds", "save_embeds", *LTX2_ONLY}  # see test_ltx2_pipelines


def flag(name: str) -> list[str]:
    return [f"--{name.replace('_', '-')}", *VALUES[name]]


def test_the_table_has_every_flag():
    assert VALUES.keys() | OTHERS == vars(parser().parse_args(["--model", "m"])).keys()


@settings(deadline=None, derandomize=True)
@given(st.sets(st.sampled_from(sorted(VALUES))))
def test_what_was_given_is_known_also_where_it_is_the_default(names):
    args = parse(["--model", "m", *(word for name in sorted(names) for word in flag(name))])
    assert args.given == names | {"model"}
    assert args.unconditional == ([("text", "zero")] if "unconditional" in names else [])


@pytest.mark.parametrize("pictured", [False, True])
def test_beside_save_embeds_a_flag_changes_the_file_or_is_refused(real, tmp_path, capsys, monkeypatch, pictured):
    """All but the device, which decides where it is computed. Quick encoders stand in for UMT5 and CLIP."""
    words = lambda pipe, texts: text_hash.embed(HashTextConfig(dim=pipe.cfg.text_dim), texts)  # noqa: E731
    rows = lambda pipe, texts: [v[None].to(pipe.dtype) for v in words(pipe, texts)]  # noqa: E731
    monkeypatch.setattr(
        cli, "embed_texts",
        lambda pipe, a, b: list(zip(rows(pipe, a), [None] if b is None else rows(pipe, b), strict=True)),
    )  # fmt: skip
    monkeypatch.setattr(
        cli, "embed_pictures",
        lambda pipe, images: {k: v[:2].reshape(-1, 3).to(pipe.dtype) for k, v in images.items()},
    )  # fmt: skip
    png = write_png(tmp_path / "first.png", random_frames(5, 1, 48, 80)[0])
    save_file({"clip_feature": torch.ones(5, 16)}, tmp_path / "e.safetensors")
    files = {"PNG": str(png), "EMBEDS": str(tmp_path / "e.safetensors")}
    shown = ["--image", str(png)] if pictured else []

    def saved(*more):
        out = tmp_path / "saved.safetensors"
        out.unlink(missing_ok=True)
        asked = ["--model", str(real("i2v").folder), "--prompt", "a red ball", *shown, *(files.get(w, w) for w in more)]
        status, said = main([*asked, "--save-embeds", str(out)]), capsys.readouterr().err
        return said if status else {k: v.float() for k, v in load_file(out).items()}

    plain, refused = saved(), set()
    assert plain.keys() == {"prompt_embeds", "negative_prompt_embeds", *(["clip_feature"] if pictured else [])}
    for name in VALUES.keys() - {"device", *(["image"] if pictured else [])}:
        found = saved(*flag(name))
        if isinstance(found, str):
            refused.add(name)
            assert f"{flag(name)[0]} would do nothing beside --save-embeds" in found, found
        else:
            same = found.keys() == plain.keys() and all(torch.equal(found[k], plain[k]) for k in plain)
            assert not same, f"{name} was taken and did nothing"
    kept = {"negative_prompt", "guidance_scale", "unconditional", "dtype", "device", "image"}
    assert refused == VALUES.keys() - kept - ({"height", "width"} if pictured else set())
    assert not list(tmp_path.glob("*.mp4")) and "--unconditional would do" in saved("--unconditional", "image=zero")


CASES = {
    "strength": ("t2v", ["--strength", "0.5"], ["--strength would do nothing without --video"]),
    "negative, embeds": ("t2v", ["EMBEDS", "--negative-prompt", ""], ["--negative-prompt would do", "--prompt-embeds"]),
    "negative, policy": (
        "t2v", ["--negative-prompt", "x", "--unconditional", "text=zero"], ["would do nothing beside --unconditional"],
    ),
    "policy twice": (
        "t2v", ["--unconditional", "text=zero", "--unconditional", "text=keep"], ["--unconditional names text twice"],
    ),
    "guidance off": (
        "t2v", ["--guidance-scale", "1", "--unconditional", "text=zero", "--guidance-rescale", "0"],
        ["guidance is off (scale 1), so --guidance-rescale, --unconditional would do nothing"],
    ),
    "no channel": (
        "t2v", ["--unconditional", "image=zero"], ["--unconditional image=zero: the transformer has no such channel"],
    ),
    "no feature": ("5b", ["--image", "PNG", "--clip-feature", "FILE"], ["--clip-feature would do nothing for this"]),
    "image, embeds": ("5b", ["--image", "PNG", "--save-embeds", "OUT"], ["--image would do nothing beside --save-"]),
    "preview": ("t2v", ["--preview-every", "4"], ["--preview-every 4 would do nothing: no multiple", "steps 1 to 3"]),
    "preview, video": (
        "t2v", ["--video", "PNG", "--num-frames", "1", "--strength", "0.4", "--preview-every", "2"], ["steps 3 to 3"],
    ),
    "vae dtype": ("codec", ["--vae-dtype", "bf16"], ["'LatentreePatchCodec' stays in float32", "would do nothing"]),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_flags_without_effect_are_refused_before_anything_is_encoded(real, tiny, tmp_path, capsys, monkeypatch, what):
    kind, words, parts = CASES[what]
    folder = tiny.folder if kind == "codec" else real(kind).folder
    save_file({"prompt_embeds": torch.ones(2, 32), "clip_feature": torch.ones(5, 16)}, tmp_path / "e.safetensors")
    png, out = write_png(tmp_path / "first.png", random_frames(5, 1, 32, 48)[0]), tmp_path / "out"
    files = {"PNG": str(png), "FILE": str(tmp_path / "e.safetensors"), "OUT": str(out / "e.safetensors")}
    argv = ["--prompt-embeds", files["FILE"], *words[1:]] if words[0] == "EMBEDS" else ["--prompt", "a ball", *words]
    argv += [] if "--save-embeds" in words else ["--output", str(out / "a.mp4")]
    capsys.readouterr()
    for name in ("embed_texts", "embed_pictures"):
        monkeypatch.setattr(cli, name, lambda *a: pytest.fail("encoded"))
    assert main(["--model", str(folder), "--device", "cpu", *(files.get(w, w) for w in argv)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and not out.exists()
    for part in parts:
        assert part in said, said


def test_sizes_are_no_matter_of_the_text_alone(real, tmp_path, own_folder):
    """Embeddings of a prompt need no sizes, not even where the folder has no defaults; nor a VAE."""
    index = json.loads((own_folder / "model_index.json").read_text())
    (own_folder / "model_index.json").write_text(json.dumps(index | {"_sampling": {}}))
    for file in (own_folder / "vae").iterdir():
        file.unlink()
    saved = tmp_path / "e.safetensors"
    assert main(["--model", str(own_folder), "--prompt", "a red ball", "--save-embeds", str(saved)]) == 0
    assert load_file(saved).keys() == {"prompt_embeds", "negative_prompt_embeds"}


@pytest.mark.parametrize("name", OF_PROMPTS)
def test_what_every_prompt_says_itself_is_not_taken_from_a_flag(name):
    own = {"image": "a.png", "negative_prompt": "", "seed": 0}.get(name, 8)
    args = parse(["--model", "m", "--prompt-file", "p.json", *flag(name)])
    (fault,) = idle_beside_prompts(args, [Prompt("a", **{name: own})] * 2)
    assert fault.startswith(f"{flag(name)[0]} would do nothing beside --prompt-file p.json")
    assert idle_beside_prompts(args, [Prompt("a", **{name: own}), Prompt("b")]) == []
    assert idle_beside_prompts(parse(["--model", "m"]), [Prompt("a", **{name: own})]) == []


def test_the_command_refuses_what_the_prompts_say(tiny, tmp_path, capsys):
    size = {"num_frames": 5, "height": 16, "width": 24}
    (tmp_path / "p.json").write_text(json.dumps({"data": [{"caption": "a", **size}]}))
    argv = ["--model", str(tiny.folder), "--prompt-file", str(tmp_path / "p.json"), "--output", str(tmp_path / "a.mp4")]
    assert main([*argv, "--height", "32", "--num-frames", "9"]) == 2
    assert "--num-frames, --height would do nothing beside --prompt-file" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_compile_compiles_one_block_and_gives_the_same_video(tiny, tmp_path, monkeypatch):
    graphs, frames = [], []

    def counted_graphs(module, inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    monkeypatch.setattr(flags, "compiled", functools.partial(compiled, backend=counted_graphs))
    monkeypatch.setattr(cli, "write_video", lambda path, video, *rest: frames.append(video))
    argv = ["--model", str(tiny.folder), "--prompt", "a", "--device", "cpu", "--output", str(tmp_path / "a.mp4")]
    assert main(argv) == main([*argv, "--compile"]) == 0
    assert len(graphs) == 1 and (frames[0].int() - frames[1].int()).abs().max() <= 1


def test_compile_needs_a_compiler_on_a_cpu(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    argv = ["--model", str(tiny.folder), "--prompt", "a", "--device", "cpu", "--output", str(tmp_path / "a.mp4")]
    assert main([*argv, "--compile"]) == 2
    assert "needs a C++ compiler: there is no no-such-compiler" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_one_is_no_plural():
    assert [counted(n, "clip") for n in (0, 1, 2)] == ["0 clips", "1 clip", "2 clips"]
