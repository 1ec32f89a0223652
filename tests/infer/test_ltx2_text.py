"""LTX-2's texts against Diffusers' pipeline: streams, what is in memory when, the demos' embedder, files."""

import dataclasses
import functools
import gc
import json
import shutil
import weakref

import pytest
import torch
from gemma_cases import CAPTIONS, LAYERS, diffusers_texts, make_case, own_copy
from ltx2_cases import tiny_config
from safetensors.torch import load_file, save_file

from core import stored
from core.errors import UserError
from infer import ltx2_text
from infer.gemma import LENGTH
from infer.ltx2_text import load_connectors, load_ltx2_text, read_texts, save_texts
from nn import ltx2_connectors, text_hash
from nn.text_hash import HashTextConfig

FAMILIES = ("2.0", "2.3")
# Four layers, two of the connectors' and five norms in another order of summation: some ulp (1.2e-7) each, more where a
# norm divides by little.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """`case(family)`: a folder of LTX-2.0's or 2.3's form, made once; read only."""
    return functools.cache(lambda family: make_case(tmp_path_factory.mktemp("text"), family))


@pytest.fixture
def own(case, tmp_path):
    """A copy of LTX-2.3's folder to change, and the transformer's config."""
    return own_copy(case("2.3"), tmp_path / "model"), case("2.3").cfg


def opened(case, **changes):
    modality = changes.pop("modality", "audio_video")
    return load_ltx2_text(case.folder, dataclasses.replace(case.cfg, modality=modality), **changes)


@pytest.fixture
def reads(monkeypatch):
    """Names of the tensors that are read from files from now on."""
    names, read = [], stored.read
    monkeypatch.setattr(stored, "read", lambda tensor, where: names.append(tensor.key) or read(tensor, where))
    return names


# --- against Diffusers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_equal_those_of_diffusers_pipeline(case, family):
    text, (_, mask, wanted) = opened(case(family)), diffusers_texts(case(family), CAPTIONS)
    ours = text.embed(CAPTIONS)
    assert text.length == 1024 and [list(row) for row in ours] == [["video", "audio"]] * len(CAPTIONS)
    for i, row in enumerate(ours):
        for s in case(family).cfg.streams:
            assert row[s.name].shape == (1024, s.text_dim)
            torch.testing.assert_close(row[s.name], wanted[s.name][i], **CLOSE)
    assert (ours[0]["video"] - ours[1]["video"]).abs().max() > 0.1, "captions would all mean the same"
    _, found = text.features(CAPTIONS)
    assert torch.equal(found, mask) and found.dtype == torch.bool


def test_half_precision_equals_diffusers_in_half_precision(case):
    """Eight bits of mantissa: as near to Diffusers' as that is to its own result in float32."""
    one, half = case("2.3"), torch.bfloat16
    (ours,) = opened(one, dtype=half).embed(CAPTIONS[:1])
    _, _, exact = diffusers_texts(one, CAPTIONS[:1])
    _, _, theirs = diffusers_texts(one, CAPTIONS[:1], half)
    for name, x in ours.items():
        assert x.dtype == half
        error = (x.float() - exact[name][0]).square().mean().sqrt()
        rounding = (theirs[name][0].float() - exact[name][0]).square().mean().sqrt()
        assert 0 < error < 2 * rounding


@pytest.mark.parametrize("family", FAMILIES)
def test_features_that_are_kept_give_the_same_texts(case, family):
    """From the text encoder or from connectors alone, whatever stands in padding."""
    text, alone = opened(case(family)), load_connectors(case(family).folder, case(family).cfg)
    features, mask = text.features(CAPTIONS)
    own = case(family).connectors
    assert {k: x.shape for k, x in features.items()} == {s.name: (3, 1024, s.feature_dim) for s in own.streams}
    other = {name: torch.where(mask[..., None], x, 7.0) for name, x in features.items()}
    wanted = text.embed(CAPTIONS)
    for found in (text.connect(features, mask), alone.connect(other, mask)):
        assert list(found) == ["video", "audio"]
        for name, x in found.items():
            torch.testing.assert_close(x, torch.stack([row[name] for row in wanted]), rtol=1e-6, atol=1e-6)
    assert alone.length == text.length


# --- streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stream", ["video", "audio"])
def test_a_model_of_one_stream_has_its_text_alone(case, family, stream, reads):
    (both,) = opened(case(family)).embed(CAPTIONS[:1])
    reads.clear()
    (alone,) = opened(case(family), modality=stream).embed(CAPTIONS[:1])
    assert list(alone) == [stream]
    torch.testing.assert_close(alone[stream], both[stream], rtol=1e-6, atol=1e-6)
    other = "audio" if stream == "video" else "video"
    assert not [key for key in reads if key.startswith(f"{other}_")]
    assert not [key for key in reads if "vision" in key or "projector" in key]


def test_a_caption_does_not_depend_on_the_others_and_owns_its_memory(case):
    text = opened(case("2.0"))
    together = text.embed(CAPTIONS)
    for caption, row in zip(CAPTIONS, together, strict=True):
        (alone,) = text.embed([caption])
        for name, x in row.items():
            # To a rounding, since memory may be aligned otherwise.
            torch.testing.assert_close(x, alone[name], rtol=1e-6, atol=1e-6)
            assert x.device.type == "cpu" and not x.requires_grad
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
    places = [x.untyped_storage().data_ptr() for row in together for x in row.values()]
    assert len(set(places)) == len(places)


def test_captions_go_through_gemma_in_batches_of_the_asked_size(case, monkeypatch):
    sizes, states = [], ltx2_text.hidden_states
    monkeypatch.setattr(ltx2_text, "hidden_states", lambda reader, c: sizes.append(len(c)) or states(reader, c))
    found = [opened(case("2.0"), **how).embed(CAPTIONS) for how in ({"batch": 1}, {"batch": 2}, {})]
    assert sizes == [1, 1, 1, 2, 1, 3], "a list of captions is one forward pass where nothing else is asked for"
    for one, *others in zip(*found, strict=True):
        for name, x in ((name, x) for row in others for name, x in row.items()):
            torch.testing.assert_close(x, one[name], rtol=1e-5, atol=1e-5)  # sums in another order
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
    with pytest.raises(UserError, match="batch is 0, expected at least 1"):
        opened(case("2.0"), batch=0)


def test_no_captions_are_no_texts_and_nothing_is_read(case, reads):
    text = opened(case("2.3"))
    features, mask = text.features([])
    assert text.embed([]) == [] and mask.shape == (0, 1024)
    for found in (features, text.connect(features, mask)):
        assert {name: x.shape for name, x in found.items()} == {"video": (0, 1024, 16), "audio": (0, 1024, 6)}
    assert reads == []
    for embed in (text.embed, text.features):
        with pytest.raises(UserError, match="captions is the string 'a ball', expected a list"):
            embed("a ball")


# --- memory ---------------------------------------------------------------------------------------------------


def watched(monkeypatch):
    """Weak references to every Gemma that is read."""
    models, read = [], ltx2_text.read_gemma

    def reading(*args):
        reader = read(*args)
        models.append(weakref.ref(reader.model))
        return reader

    monkeypatch.setattr(ltx2_text, "read_gemma", reading)
    return models


def test_each_call_reads_what_it_needs_and_frees_it_before_the_connectors(case, reads, monkeypatch):
    models, alive, connect = watched(monkeypatch), [], ltx2_connectors.connect

    def connecting(*args, **kwargs):
        alive.append([m for m in models if m() is not None])
        return connect(*args, **kwargs)

    monkeypatch.setattr(ltx2_connectors, "connect", connecting)
    text = opened(case("2.3"))
    assert reads == [] and models == []
    text.embed(CAPTIONS)
    once = list(reads)
    assert len(models) == 1 and alive == [[]] * len(CAPTIONS) and len(set(once)) == len(once)
    text.embed(CAPTIONS[:1])
    gc.collect()
    assert len(models) == 2 and reads == once * 2 and not any(m() for m in models)
    reads.clear()
    features, mask = text.features(CAPTIONS[:1])
    projections = {k for k in once if "text_proj_in" in k}
    assert {k for k in reads if not k.startswith("language_model.")} == projections and projections
    reads.clear()
    text.connect(features, mask)
    assert set(reads) == {k for k in once if k.startswith(("video_connector.", "audio_connector."))}


def test_kept_weights_are_read_once(case, reads, monkeypatch):
    models = watched(monkeypatch)
    text = opened(case("2.3"), keep=True)
    assert reads == []
    first = text.embed(CAPTIONS[:1])
    once = list(reads)
    second = text.embed(CAPTIONS[:1])
    assert reads == once and len(models) == 1 and models[0]() is not None
    assert all(torch.equal(first[0][name], second[0][name]) for name in ("video", "audio"))


def test_connectors_alone_read_no_projections_and_embed_nothing(case, reads):
    alone = load_connectors(case("2.3").folder, case("2.3").cfg, keep=True)
    features, mask = opened(case("2.3")).features(CAPTIONS[:2])
    reads.clear()
    alone.connect(features, mask)
    assert alone.connect(features, mask)["video"].shape == (2, 1024, 16) and len(reads) == len(set(reads))
    assert not [key for key in reads if "text_proj_in" in key or not key.startswith(("video_", "audio_"))]
    for call in (alone.embed, alone.features):
        with pytest.raises(UserError, match="only connectors were opened"):
            call(CAPTIONS)
    with pytest.raises(UserError, match=r"features are missing\n  - audio \[B, L, 6\]"):
        alone.connect({"video": features["video"]}, mask)
    with pytest.raises(UserError, match="video has 2 rows, the mask 1"):
        alone.connect(features, mask[:1])


# --- the demos' embedder --------------------------------------------------------------------------------------


def hash_folder(folder, dim=12):
    (folder / "text_encoder").mkdir(parents=True)
    text_hash.save(folder / "text_encoder", HashTextConfig(dim=dim, max_length=3))
    return folder


def test_the_demos_embedder_gives_every_stream_the_same(tmp_path):
    cfg = tiny_config(family="2.0", caption_channels=12)
    text = load_ltx2_text(hash_folder(tmp_path), cfg)
    captions = ["a red ball rolls", "", "ball"]
    rows, wanted = text.embed(captions), text_hash.embed(HashTextConfig(12, 3), captions)
    for row, x in zip(rows, wanted, strict=True):
        assert list(row) == ["video", "audio"] and all(torch.equal(v, x) for v in row.values())
        assert row["video"].data_ptr() != row["audio"].data_ptr()
    assert text.length == 3 and text.embed([]) == []
    audio = load_ltx2_text(tmp_path, dataclasses.replace(cfg, modality="audio"))
    assert list(audio.embed(["ball"])[0]) == ["audio"]
    with pytest.raises(UserError, match="has no features"):
        text.features(captions)
    with pytest.raises(UserError, match="is the string"):
        text.embed("ball")


def test_an_embedder_of_another_width_is_refused(tmp_path):
    with pytest.raises(UserError) as error:
        load_ltx2_text(hash_folder(tmp_path, dim=10), tiny_config(family="2.3"))
    assert "its embeddings are 10 wide, the video stream takes 16" in str(error.value)
    assert "its embeddings are 10 wide, the audio stream takes 12" in str(error.value)


# --- what does not fit ----------------------------------------------------------------------------------------


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(folder, cfg):
    with pytest.raises(UserError) as error:
        load_ltx2_text(folder, cfg)
    return str(error.value)


def test_missing_parts_and_other_encoders_are_named(own):
    folder, cfg = own
    shutil.move(folder / "connectors", folder / "elsewhere")
    assert f"{folder / 'connectors'}: no such folder; the text encoder's hidden states need" in refused(folder, cfg)
    shutil.move(folder / "elsewhere", folder / "connectors")
    shutil.move(folder / "tokenizer", folder / "elsewhere")
    assert f"{folder / 'tokenizer'}: no such folder" in refused(folder, cfg)
    edit(folder / "text_encoder" / "config.json", model_type="umt5")
    message = refused(folder, cfg)
    assert "text encoder 'umt5' cannot be run for LTX-2, only gemma3, gemma3_text and latentree-hash" in message
    shutil.rmtree(folder / "text_encoder")
    assert "text_encoder/config.json" in refused(folder, cfg)


def test_connectors_and_the_transformer_must_be_of_one_width(own):
    folder, _ = own
    cfg = tiny_config(family="2.3")
    message = "the audio connector is 6 wide, the transformer's audio stream takes 12"
    assert message in refused(folder, cfg) and "the video connector" not in refused(folder, cfg)
    with pytest.raises(UserError, match=message):
        load_connectors(folder, cfg)
    load_ltx2_text(folder, dataclasses.replace(cfg, modality="video"))  # the other stream is nobody's concern


def test_hidden_states_must_be_what_the_connectors_take(own, reads):
    """Widths and layers are compared before anything is read, all faults in one message."""
    folder, cfg = own
    own_cfg = make_connectors(folder, caption_channels=10, text_proj_in_factor=7)
    message = refused(folder, cfg)
    assert f"caption_channels is {own_cfg.caption_channels}, the text encoder's hidden_size 12" in message
    assert f"text_proj_in_factor is 7, the text encoder gives {LAYERS} hidden states (3 layers and the emb" in message
    assert reads == []


def make_connectors(folder, **changes):
    """Other connectors in place of a folder's."""
    from ltx2_side_cases import random_leaves

    from nn.config_files import parse_config, save_model

    path = folder / "connectors"
    data = {k: v for k, v in json.loads((path / "config.json").read_text()).items() if k != "_class_name"}
    cfg = parse_config(ltx2_connectors.ConnectorConfig, data | changes, "test", fixed=ltx2_connectors.FIXED)
    shutil.rmtree(path)
    specs = ltx2_connectors.param_specs(cfg)
    save_model(path, random_leaves(specs, 1), specs, ltx2_connectors.to_json(cfg))
    return cfg


def test_registers_must_divide_the_text(own):
    folder, cfg = own
    make_connectors(folder, audio_connector_num_learnable_registers=6)
    message = "6 audio registers fill 1020 or 1026 tokens, not the 1024 of a text"
    assert message in refused(folder, cfg)
    with pytest.raises(UserError, match=message):
        load_connectors(folder, cfg)


def test_weights_of_connectors_are_checked_when_opened(own, reads):
    folder, cfg = own
    (path,) = (folder / "connectors").glob("*.safetensors")
    leaves = load_file(path)
    del leaves["video_connector.learnable_registers"]
    save_file(leaves, path)
    assert "missing video_connector.learnable_registers [8, 16]" in refused(folder, cfg) and reads == []


# --- files ----------------------------------------------------------------------------------------------------


def texts(seed):
    make = torch.Generator().manual_seed(seed)
    return {"video": torch.randn(5, 4, generator=make), "audio": torch.randn(5, 3, generator=make).bfloat16()}


def test_files_give_back_what_was_saved(tmp_path):
    path, text, negative = tmp_path / "texts.safetensors", texts(0), texts(1)
    save_texts(path, text, negative)
    names = {f"{sign}{name}_prompt_embeds" for sign in ("", "negative_") for name in ("video", "audio")}
    assert set(load_file(path)) == names
    found = read_texts(path, ["video", "audio"], True)
    for a, b in zip(found, (text, negative), strict=True):
        assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in b) and set(a) == set(b)
    first, none = read_texts(path, ["audio"], False)
    assert list(first) == ["audio"] and none is None


def test_a_file_without_negative_texts_serves_where_none_are_needed(tmp_path):
    path = tmp_path / "texts.safetensors"
    save_texts(path, {"video": texts(0)["video"]})
    assert list(read_texts(path, ["video"], False)[0]) == ["video"]
    with pytest.raises(UserError) as error:
        read_texts(path, ["video", "audio"], True)
    for name in ("audio_prompt_embeds", "negative_video_prompt_embeds", "negative_audio_prompt_embeds"):
        assert f"missing {name}" in str(error.value)
    assert "(there: video_prompt_embeds)" in str(error.value)


def test_a_batch_of_one_is_read_and_other_shapes_are_refused(tmp_path):
    path = tmp_path / "texts.safetensors"
    save_file({"video_prompt_embeds": torch.ones(1, 5, 4)}, path)
    assert read_texts(path, ["video"], False)[0]["video"].shape == (5, 4)
    save_file({"video_prompt_embeds": torch.ones(2, 5, 4), "audio_prompt_embeds": torch.ones(5, 4).long()}, path)
    with pytest.raises(UserError) as error:
        read_texts(path, ["video", "audio"], False)
    assert "video_prompt_embeds is [2, 5, 4], expected [L, D] or [1, L, D]" in str(error.value)
    assert "audio_prompt_embeds is torch.int64, expected floats" in str(error.value)


def test_texts_of_another_width_are_refused_where_widths_are_known(tmp_path):
    path, widths = tmp_path / "texts.safetensors", {"video": 4, "audio": 3}
    save_texts(path, texts(0), {"video": torch.ones(2, 5), "audio": torch.ones(0, 3)})
    assert read_texts(path, ["video", "audio"], False, widths=widths)[0]["audio"].shape == (5, 3)
    with pytest.raises(UserError) as error:
        read_texts(path, ["video", "audio"], True, widths=widths)
    assert "negative_video_prompt_embeds is [2, 5], expected [L, 4] or [1, L, 4]" in str(error.value)
    assert "negative_audio_prompt_embeds is [0, 3], expected [L, 3]" in str(error.value)


def test_the_length_is_that_of_diffusers():
    import inspect

    from diffusers import LTX2Pipeline

    assert inspect.signature(LTX2Pipeline.encode_prompt).parameters["max_sequence_length"].default == LENGTH
