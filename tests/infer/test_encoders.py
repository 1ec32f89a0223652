"""UMT5 and CLIP through transformers: cleaning, padding, order of loading, and what is refused up front."""

import gc
import html
import json
import shutil
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from real_cases import pictures, random_frames, same_video, without_loss, write_png
from safetensors.torch import load_file, save_file

from core.errors import UserError
from infer import __main__ as cli
from infer import conditions, encoders, folder
from infer.__main__ import main
from infer.encoders import clean_prompt, load_image_encoder, load_text_encoder
from infer.folder import INDEX, load_pipeline, open_pipeline, save_pipeline
from infer.media import read_video


@pytest.fixture(autouse=True)
def lossless(monkeypatch):
    without_loss(monkeypatch)


CPU = torch.device("cpu")


@pytest.fixture
def own(real, tmp_path):
    """A copy of the image-to-video folder to change."""
    return shutil.copytree(real("i2v").folder, tmp_path / "model")


# --- prompts --------------------------------------------------------------------------------------------------


def diffusers_clean(prompt):
    from diffusers.pipelines.wan import pipeline_wan

    return pipeline_wan.prompt_clean(prompt)


PIECES = st.sampled_from(
    ["a", "dog's", "&amp;", "&amp;amp;", "&lt;b&gt;", "&#39;", "&nbsp;", "caf\u00e9", "caf\u00c3\u00a9", "\t\n", "  ",
     "\u201cq\u201d", "\ufb01ne", "\uff21\uff22", "\u3000", "\x00", "\u200b", "\u732b", "don\u00e2\u20ac\u2122t",
     "\r\n", "\x1b[31m"]
)  # fmt: skip


@given(prompt=st.lists(PIECES | st.text(max_size=6), max_size=6).map(" ".join))
def test_cleaning_equals_diffusers(prompt):
    assert clean_prompt(prompt) == diffusers_clean(prompt)


def test_cleaning_by_hand(monkeypatch):
    """Mended with ftfy, left as it is without; everything else is the same."""
    prompt = "  caf\u00c3\u00a9 &amp;amp;\n\t&lt;x&gt;  "
    assert clean_prompt(prompt) == "caf\u00e9 & <x>"
    monkeypatch.setattr(encoders.importlib.util, "find_spec", lambda name: None)
    assert clean_prompt(prompt) == "caf\u00c3\u00a9 & <x>"
    assert clean_prompt(html.escape(html.escape("<b>"))) == "<b>"


# --- embeddings -----------------------------------------------------------------------------------------------


def test_embeddings_are_the_states_of_the_real_tokens(real):
    """Against transformers without any padding: the mask hides padding, and it is cut off."""
    import transformers

    root = real("t2v").folder
    model = transformers.UMT5EncoderModel.from_pretrained(root / "text_encoder", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "tokenizer")
    prompts = ["a red ball", "", "the dog's &amp; meadow"]
    ours = load_text_encoder(root / "text_encoder").embed(prompts)
    for prompt, rows in zip(prompts, ours, strict=True):
        ids = tokenizer(clean_prompt(prompt), return_tensors="pt").input_ids
        with torch.no_grad():
            theirs = model(ids).last_hidden_state[0]
        # Float32 sums over 512 keys, most of them masked, against sums over a few.
        torch.testing.assert_close(rows, theirs, rtol=0, atol=1e-5)
        assert rows.untyped_storage().nbytes() == rows.numel() * 4 and not rows.requires_grad
    assert [len(rows) for rows in ours] == [4, 1, 5]


def test_long_prompts_are_cut_to_512_tokens_and_half_precision_is_kept(real):
    encoder = load_text_encoder(real("t2v").folder / "text_encoder", dtype=torch.bfloat16)
    (rows,) = encoder.embed(["ball " * 600])
    assert rows.shape == (512, 32) and rows.dtype == torch.bfloat16 and encoder.max_length == 512


def test_a_prompt_does_not_depend_on_the_others(real):
    encoder = load_text_encoder(real("t2v").folder / "text_encoder")
    together = encoder.embed(["a ball", "a dog's blue cube over the meadow", ""])
    # Not to the bit only because memory may be aligned otherwise, see `same_video`.
    torch.testing.assert_close(together[0], encoder.embed(["a ball"])[0], rtol=0, atol=1e-6)


def test_clip_features_equal_transformers(real):
    import transformers

    root, frames = real("i2v").folder, random_frames(3, 2, 40, 24)
    encoder = load_image_encoder(root / "image_encoder")
    model = transformers.CLIPVisionModel.from_pretrained(root / "image_encoder")
    processor = transformers.CLIPImageProcessor.from_pretrained(root / "image_processor")
    with torch.no_grad():
        states = model(**processor(pictures(frames), return_tensors="pt"), output_hidden_states=True).hidden_states
    ours = encoder.embed(list(frames))
    assert encoder.dim == 16 and [f.shape for f in ours] == [(5, 16)] * 2
    torch.testing.assert_close(torch.stack(ours), states[-2], rtol=0, atol=1e-5)
    assert (states[-2] - states[-1]).abs().max() > 1e-2, "the last layer would be another answer"


# --- one model at a time --------------------------------------------------------------------------------------


def test_encoders_are_read_in_turn_and_gone_before_the_transformer(real, tmp_path, monkeypatch):
    """The order of reads and frees of a whole command, and that nothing holds an encoder that was freed."""
    events, alive = [], []
    read_model, free, with_weights = encoders.read_model, encoders.free, folder.with_weights
    read_vae = folder.load_vae.__globals__["_read_wan_vae"]

    def reading(name, *args):
        assert not [r for r in alive if r() is not None], "two encoders at once"
        model = read_model(name, *args)
        alive.append(weakref.ref(model))
        events.append(f"read {name}")
        return model

    def freeing(device):
        free(device)
        events.append("free")

    def vae(*args):
        events.append("read vae")
        return read_vae(*args)

    def weights(pipe):
        gc.collect()
        assert len(alive) == 2 and not [r for r in alive if r() is not None]
        events.append("read transformer")
        return with_weights(pipe)

    monkeypatch.setattr(encoders, "read_model", reading)
    monkeypatch.setattr(encoders, "free", freeing)
    monkeypatch.setattr("infer.autoencoders._read_wan_vae", vae)
    monkeypatch.setattr(cli, "with_weights", weights)
    monkeypatch.setattr(cli, "contact_sheet", lambda rows, path: None)
    png = write_png(tmp_path / "first.png", random_frames(5, 1, 32, 48)[0])
    argv = ["--model", real("i2v").folder, "--prompt", "a ball", "--image", png, "--samples-per-prompt", 2]
    assert main([*map(str, argv), "--device", "cpu", "--output", str(tmp_path / "a.mp4")]) == 0
    assert events == [
        "read UMT5EncoderModel", "free", "read CLIPVisionModel", "free", "read vae", "read transformer",
        "read vae", "read vae",
    ]  # fmt: skip


def test_an_encoder_that_fails_is_freed_too(real, monkeypatch):
    freed = []
    monkeypatch.setattr(encoders, "free", freed.append)
    monkeypatch.setattr(encoders, "read_model", lambda *a: lambda *b: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        load_text_encoder(real("t2v").folder / "text_encoder").embed(["a"])
    assert freed == [CPU]


@pytest.mark.parametrize("name", ["text_encoder", "image_encoder"])
def test_a_kept_encoder_is_read_once_and_gives_the_same_bits(real, monkeypatch, name):
    """At its first use, not before; and one read of a model gives the bits of another."""
    reads, freed, read_model = [], [], encoders.read_model
    monkeypatch.setattr(encoders, "read_model", lambda kind, *a: reads.append(kind) or read_model(kind, *a))
    monkeypatch.setattr(encoders, "free", freed.append)
    load = {"text_encoder": load_text_encoder, "image_encoder": load_image_encoder}[name]
    given_ = {"text_encoder": ["a red ball"], "image_encoder": [random_frames(0, 1, 24, 32)[0]]}[name]
    kept, fresh = (load(real("i2v").folder / name, keep=keep) for keep in (True, False))
    assert reads == []
    rows = [kept.embed(given_)[0] for _ in range(3)]
    assert len(reads) == 1 and freed == []
    rows += [fresh.embed(given_)[0] for _ in range(2)]
    assert len(reads) == 3 and freed == [CPU, CPU]
    assert all(torch.equal(rows[0], row) for row in rows) and not rows[0].requires_grad


def test_opening_reads_no_weights(real, monkeypatch):
    for name in ("core.checkpoint.read_leaves", "infer.encoders.read_model", "nn.wan_vae.load"):
        monkeypatch.setattr(name, lambda *a, **k: pytest.fail("weights were read"))
    pipe = open_pipeline(
        real("i2v").folder, device=CPU, dtype=torch.float32, needs=("vae", "text_encoder", "image_encoder")
    )
    assert (pipe.vae.latent_channels, pipe.vae.spatial, pipe.vae.temporal) == (4, 4, 4)
    assert pipe.image.dim == 16 and not pipe.absent and not pipe.expand_timesteps


def test_precomputed_features_need_no_encoder(real, tmp_path):
    """Stored as a matrix or a batch of one, and back to the bit."""
    feature = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    for stored in (feature, feature[None]):
        save_file({"clip_feature": stored.contiguous()}, tmp_path / "f.safetensors")
        assert torch.equal(conditions.read_clip_feature(tmp_path / "f.safetensors"), feature)
    save_file({"clip": feature}, tmp_path / "f.safetensors")
    with pytest.raises(UserError, match="it has clip\n  - missing clip_feature"):
        conditions.read_clip_feature(tmp_path / "f.safetensors")


def test_saved_embeddings_make_the_same_video(real, tmp_path, monkeypatch):
    """Written without reading the transformer; then a folder without encoders samples from them."""
    monkeypatch.setattr(cli, "contact_sheet", lambda rows, path: None)
    png, out = write_png(tmp_path / "first.png", random_frames(5, 1, 32, 48)[0]), tmp_path / "a.mp4"
    asked = ["--prompt", "a red ball", "--negative-prompt", "dull", "--image", str(png)]
    argv = ["--model", str(real("i2v").folder), "--device", "cpu", "--output", str(out)]
    assert main([*argv, *asked]) == 0
    expected = read_video(out).frames
    out.unlink()
    saved = str(tmp_path / "e.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(cli, "with_weights", lambda pipe: pytest.fail("the transformer was read"))
        assert main([*argv[:4], *asked, "--save-embeds", saved]) == 0
    assert not out.exists() and set(load_file(saved)) == {"prompt_embeds", "negative_prompt_embeds", "clip_feature"}
    bare = shutil.copytree(real("i2v").folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*_encoder"))
    argv[1] = str(bare)
    assert main([*argv, "--prompt-embeds", saved, "--clip-feature", saved, "--image", str(png)]) == 0
    assert same_video(read_video(out).frames, expected)
    (tmp_path / "p.json").write_text(json.dumps({"data": [{"caption": "a"}, {"caption": "b"}]}))
    assert main([*argv[:4], "--prompt-file", str(tmp_path / "p.json"), "--save-embeds", saved]) == 2


@pytest.mark.parametrize("shown, hub", [(True, True), (True, False), (False, True)])
def test_reading_an_encoder_draws_no_bars_and_leaves_those_of_others_as_they_were(real, capsys, shown, hub):
    from huggingface_hub import utils
    from transformers.utils import logging

    def switch(bars, of_hub):
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
        (utils.enable_progress_bars if of_hub else utils.disable_progress_bars)()

    before = logging.is_progress_bar_enabled(), not utils.are_progress_bars_disabled()
    folder = real("t2v").folder / "text_encoder"
    try:
        switch(shown, hub)
        capsys.readouterr()
        load_text_encoder(folder).embed(["a ball"])
        assert capsys.readouterr() == ("", "")
        assert (logging.is_progress_bar_enabled(), not utils.are_progress_bars_disabled()) == (shown, hub)
        with pytest.raises(UserError, match="cannot be read"):
            encoders.read_model("UMT5EncoderModel", folder.parent / "vae", CPU, torch.float32)
        assert logging.is_progress_bar_enabled() == shown
    finally:
        switch(*before)


# --- folders --------------------------------------------------------------------------------------------------


def test_a_saved_folder_opens_in_diffusers(real):
    """The index names Diffusers' classes, and every part comes back from it."""
    from diffusers import WanImageToVideoPipeline

    with pytest.MonkeyPatch.context() as patch:
        # Without this it keeps leaves in float32 in a way that needs low_cpu_mem_usage; all of ours are float32.
        patch.setattr("diffusers.WanTransformer3DModel._keep_in_fp32_modules", None)
        pipe = WanImageToVideoPipeline.from_pretrained(real("i2v").folder, low_cpu_mem_usage=False)
    assert type(pipe.image_encoder).__name__ == "CLIPVisionModel" and pipe.tokenizer is not None
    assert json.loads((real("5b").folder / INDEX).read_text())["expand_timesteps"] is True
    assert load_pipeline(real("5b").folder, device=CPU, dtype=torch.float32).expand_timesteps


def test_a_resaved_folder_keeps_its_encoders(real, tmp_path):
    case = real("i2v")
    parts = {name: case.folder / name for name in ("vae", "text_encoder", "image_encoder")}
    save_pipeline(tmp_path / "p", case.params, case.cfg, folder.Defaults(), **parts)
    needs = ("vae", "text_encoder", "image_encoder")
    pipe = open_pipeline(tmp_path / "p", device=CPU, dtype=torch.float32, needs=needs)
    expected = load_text_encoder(case.folder / "text_encoder").embed(["a ball"])[0]
    torch.testing.assert_close(pipe.text.embed(["a ball"])[0], expected, rtol=0, atol=1e-6)


def refused(root, need, *parts):
    with pytest.raises(UserError) as error:
        open_pipeline(root, device=CPU, dtype=torch.float32, needs=[need])
    for part in parts:
        assert part in str(error.value), error.value


def change(path, **entries):
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_parts_that_are_missing_or_of_another_kind(own):
    """At the door, by name; other parts are still open."""
    change(own / "text_encoder" / "config.json", model_type="t5")
    refused(own, "text_encoder", "text encoder 't5' cannot be run", "'umt5'", "precomputed")
    change(own / "text_encoder" / "config.json", model_type="umt5")
    change(own / "image_encoder" / "config.json", model_type="siglip")
    refused(own, "image_encoder", "image encoder 'siglip' cannot be run", "clip_feature")
    change(own / "image_encoder" / "config.json", model_type="clip_vision_model")
    shutil.rmtree(own / "tokenizer")
    refused(own, "text_encoder", "tokenizer: no such folder")
    shutil.rmtree(own / "image_processor")
    refused(own, "image_encoder", "preprocessor_config.json: no such file")
    change(own / "vae" / "config.json", z_dim=5)
    refused(own, "vae", "latents_mean has 4 entries, z_dim is 5")


def test_an_image_encoder_of_another_width_is_refused_at_the_door(own):
    change(own / "image_encoder" / "config.json", hidden_size=20)
    refused(own, "image_encoder", "features of width 20, the transformer takes 16")


def test_weights_that_are_cut_short_are_refused_at_the_door(own):
    for name in ("text_encoder", "image_encoder", "vae"):
        (weights,) = (own / name).glob("*.safetensors")
        weights.write_bytes(weights.read_bytes()[:-4])
        refused(own, name, str(weights), "cut short")


def test_missing_weights_are_not_replaced_by_random_ones(own):
    """transformers would initialise them and only log it."""
    for name, key, encoder in (
        ("text_encoder", "encoder.block.1.layer.0.SelfAttention.q.weight", "text"),
        ("image_encoder", "layers.1.self_attn.q_proj.weight", "image"),
    ):
        (path,) = (own / name).glob("*.safetensors")
        tree = load_file(path)
        (found,) = [k for k in tree if k.endswith(key)]
        del tree[found]
        save_file(tree, path, metadata={"format": "pt"})
        pipe = open_pipeline(own, device=CPU, dtype=torch.float32)
        given = ["a"] if encoder == "text" else [random_frames(0, 1, 16, 16)[0]]
        with pytest.raises(UserError, match=f"missing .*{key}"):
            getattr(pipe, encoder).embed(given)


def test_a_missing_package_says_what_to_install(real, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(encoders.importlib.util, "find_spec", lambda name: None)
    argv = ["--model", str(real("t2v").folder), "--prompt", "a", "--device", "cpu", "--output", str(tmp_path / "a.mp4")]
    assert main(argv) == 2
    assert "needs the package transformers: pip install" in capsys.readouterr().err
    assert open_pipeline(real("t2v").folder, device=CPU, dtype=torch.float32).text is None
