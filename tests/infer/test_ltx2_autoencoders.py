"""LTX-2's autoencoders behind the pipelines' interface are the functions that are proven equal to Diffusers'."""

import gc
import json
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_side_cases import random_leaves
from ltx2_vae_cases import random_params, vae_config

from core import keys
from core.errors import UserError
from core.geometry import to_frames
from infer import autoencoders
from infer.autoencoders import AudioVae, decode_frames, load_audio_vae, load_vae
from nn import ltx2_audio, ltx2_vae, ltx2_vae_tiling, ltx2_vocoder, mel_codec, patch_codec
from nn.config_files import save_model
from nn.ltx2_audio_mel import log_mel
from nn.ltx2_vocoder_config import BweVocoderConfig, VocoderConfig, to_json

CFG = vae_config()
PARAMS = random_params(CFG, 1)
# Chunks and tiles compute the same sums in convolutions of other sizes: roundings of some ten layers in float32.
NEAR = {"rtol": 1e-4, "atol": 1e-5}

SOUND = ltx2_audio.AudioVaeConfig(base_channels=8, ch_mult=(1, 2, 2), num_res_blocks=1, latent_channels=4, mel_bins=8)
# 16 channels times bands in, 100 frames a second: 240 samples a frame at 24 kHz.
PLAIN = VocoderConfig(
    in_channels=16, hidden_channels=16, upsample_kernel_sizes=(16, 15), upsample_factors=(16, 15),
    resnet_kernel_sizes=(3,), resnet_dilations=((1,),),
)  # fmt: skip
WIDER = {"act_fn": "snakebeta", "antialias": True, "final_act_fn": "none", "final_bias": False}
LOW = {"upsample_kernel_sizes": (16, 10), "upsample_factors": (16, 10), "output_sampling_rate": 16000}
HIGH = {"upsample_kernel_sizes": (8, 3), "upsample_factors": (8, 3), "output_sampling_rate": 48000, "in_channels": 6}
SMALL = {"hidden_channels": 16, "resnet_kernel_sizes": (3,), "resnet_dilations": ((1,),), **WIDER}
EXTENDED = BweVocoderConfig(
    VocoderConfig(in_channels=16, **SMALL, **LOW), VocoderConfig(**SMALL, **HIGH),
    filter_length=32, window_length=32, hop_length=8, num_mel_channels=3,
)  # fmt: skip
VOICES = {"plain": PLAIN, "extended": EXTENDED}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return keys.normal(keys.key(seed), shape)


def sound_params() -> dict[str, torch.Tensor]:
    return random_leaves(ltx2_audio.param_specs(SOUND), 2)


def voice_params(name: str) -> dict[str, torch.Tensor]:
    cfg = VOICES[name]
    return random_leaves(ltx2_vocoder.param_specs(cfg), 3, torch.float32, ltx2_vocoder.constants(cfg))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("ltx2")
    ltx2_vae.save(root / "vae", PARAMS, CFG)
    save_model(root / "audio_vae", sound_params(), ltx2_audio.param_specs(SOUND), ltx2_audio.to_json(SOUND))
    for name, cfg in VOICES.items():
        save_model(root / name, voice_params(name), ltx2_vocoder.param_specs(cfg), to_json(cfg))
    codec = mel_codec.MelCodecConfig(latent_channels=4, latent_bins=4)
    mel_codec.save(root / "mel", mel_codec.fit(codec, [0.1 * draw(4, 2, 32000)]), codec)
    pictures = patch_codec.PatchCodecConfig(latent_channels=4)
    clip = (draw(5, 9, 16, 16, 3) * 40 + 128).clamp(0, 255).to(torch.uint8)
    patch_codec.save(root / "patch", patch_codec.fit(pictures, [clip]), pictures)
    return root


def change(folder, tmp_path, name: str, **entries):
    """A copy of a folder with other entries in its config."""
    copy = tmp_path / name
    copy.mkdir()
    for file in (folder / name).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | entries))
    return copy


# --- pictures -------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 99), latent=st.integers(1, 11), keep=st.booleans())
@settings(max_examples=8)
def test_the_video_vae_is_the_one_that_equals_diffusers(folder, seed, latent, keep):
    vae = load_vae(folder / "vae", keep=keep)
    assert (vae.latent_channels, vae.spatial, vae.temporal) == (4, CFG.factor_s, CFG.factor_t) == (4, 4, 2)
    z = draw(seed, 1, 4, latent, 3, 2)
    wanted = ltx2_vae.decode(PARAMS, CFG, z)
    assert torch.allclose(vae.decode(z), wanted, **NEAR)
    chunks = list(vae.decode_chunks(z))
    assert torch.allclose(torch.cat(chunks, dim=2), wanted, **NEAR) and all(c.shape[2] > 0 for c in chunks)
    video = draw(seed, 1, 3, 2 * (latent - 1) + 1, 12, 8).clamp(-1, 1)
    assert torch.allclose(vae.encode(video), ltx2_vae.encode(PARAMS, CFG, video), **NEAR)


def test_frames_come_a_few_at_a_time(folder):
    """Also of a decoder that must see what comes later, so that first nothing comes out."""
    vae, z = load_vae(folder / "vae"), draw(0, 2, 4, 40, 3, 2)
    assert not CFG.decoder_causal
    chunks = [c.shape[2] for c in vae.decode_chunks(z)]
    assert len(chunks) > 3 and sum(chunks) == 79 and max(chunks) < 40
    frames = decode_frames(vae, z)
    wanted = [to_frames(video) for video in ltx2_vae.decode(PARAMS, CFG, z)]
    # Roundings may fall on the other side of a step of 8 bits.
    assert all((a.int() - b.int()).abs().max() <= 1 and a.shape == b.shape for a, b in zip(frames, wanted, strict=True))


def test_statistics_are_those_of_the_vae(folder):
    vae, z = load_vae(folder / "vae", keep=False), draw(1, 1, 4, 2, 3, 2)
    raw = vae.denormalise(z)
    assert torch.equal(raw, ltx2_vae.denormalise(PARAMS, CFG, z)) and not torch.allclose(raw, z)
    assert torch.allclose(vae.normalise(raw), z, atol=1e-5)
    assert torch.equal(vae.normalise(raw), ltx2_vae.normalise(PARAMS, CFG, raw))
    assert vae.denormalise(z.bfloat16()).dtype == torch.bfloat16


def test_tiles_are_those_of_the_tiling(folder):
    z, video = draw(2, 1, 4, 3, 10, 9), draw(3, 1, 3, 5, 40, 36).clamp(-1, 1)
    vae = load_vae(folder / "vae", tile=8)
    options = {"tile": (3, 8, 8), "overlap": (0, 2, 2)}
    assert vae.decode_chunks is None
    assert torch.allclose(vae.decode(z), ltx2_vae_tiling.tiled_decode(PARAMS, CFG, z, **options), **NEAR)
    tiled = ltx2_vae_tiling.tiled_encode(PARAMS, CFG, video, tile=(8, 8), overlap=(2, 2))
    assert torch.allclose(vae.encode(video), tiled, **NEAR)
    whole = load_vae(folder / "vae")
    assert not torch.allclose(vae.decode(z), whole.decode(z), **NEAR)
    one = load_vae(folder / "vae", tile=10)
    assert torch.allclose(one.decode(z), whole.decode(z), **NEAR)
    assert torch.allclose(one.encode(video), whole.encode(video), **NEAR)


def test_a_vae_in_bfloat16_keeps_its_statistics(folder):
    z = draw(6, 1, 4, 3, 3, 2)
    vae = load_vae(folder / "vae", dtype=torch.bfloat16)
    half, cfg = ltx2_vae.load(folder / "vae", dtype=torch.bfloat16)
    assert half["latents_mean"].dtype == torch.float32
    assert torch.equal(vae.decode(z), ltx2_vae.decode(half, cfg, z.bfloat16(), chunk=autoencoders.CHUNK))
    assert vae.encode(torch.zeros(1, 3, 5, 8, 8)).dtype == torch.float32


@pytest.mark.parametrize("keep", [False, True])
def test_weights_are_read_by_the_call_that_needs_them_or_held(folder, monkeypatch, keep):
    reads, load = [], ltx2_vae.load

    def reading(*args, **options):
        params, cfg = load(*args, **options)
        reads.append(weakref.ref(params["decoder.conv_in.conv.weight"]))
        return params, cfg

    monkeypatch.setattr(ltx2_vae, "load", reading)
    vae = load_vae(folder / "vae", keep=keep)
    assert len(reads) == int(keep)
    for _ in range(2):
        vae.decode(draw(0, 1, 4, 1, 2, 2))
    gc.collect()
    assert [r() is not None for r in reads] == ([True] if keep else [False, False])


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("vae", {"strips": 2}, "'AutoencoderKLLTX2Video' is decoded in tiles, strips would do nothing"),
        ("vae", {"tile": 1}, "tile is 1, expected at least 2 latent pixels"),
        ("patch", {"tile": 8}, "'LatentreePatchCodec' is decoded at once, tiles would do nothing"),
        ("audio_vae", {}, "_class_name 'AutoencoderKLLTX2Audio' cannot be run as a VAE by this version, only"),
    ],
)
def test_what_a_vae_cannot_do_is_refused(folder, name, options, message):
    with pytest.raises(UserError, match=message):
        load_vae(folder / name, **options)


def test_decoders_that_want_noise_are_refused(folder, tmp_path):
    cfg = vae_config(timestep_conditioning=True)
    ltx2_vae.save(tmp_path / "vae", random_params(cfg, 0), cfg)
    with pytest.raises(UserError, match="pipelines cannot run this decoder\n  - timestep_conditioning is set"):
        load_vae(tmp_path / "vae", keep=False)


# --- sound ----------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 99), samples=st.integers(600, 6000), name=st.sampled_from(list(VOICES)), keep=st.booleans())
@settings(max_examples=8)
def test_the_audio_vae_and_the_vocoders_are_those_that_equal_diffusers(folder, seed, samples, name, keep):
    vae, voice = load_audio_vae(folder / "audio_vae", folder / name, keep=keep), VOICES[name]
    assert (vae.latent_channels, vae.latent_bins, vae.input_rate, vae.latents_per_second) == (4, 2, 16000, 25)
    assert vae.output_rate == voice.output_sampling_rate
    wave = 0.3 * draw(seed, 2, 2, samples)
    latents = vae.encode(wave)
    assert torch.equal(latents, ltx2_audio.encode(sound_params(), SOUND, log_mel(SOUND.mel, wave)))
    assert latents.shape[2] >= vae.latent_frames(samples / 16000)
    heard = vae.decode(latents)
    mel = ltx2_audio.decode(sound_params(), SOUND, latents)
    assert torch.equal(heard, ltx2_vocoder.vocode(voice_params(name), voice, mel))
    assert heard.shape == (2, 2, voice.factor * (4 * latents.shape[2] - 3)) and heard.abs().max() <= 1


@given(frames=st.integers(2, 2000), fps=st.sampled_from([24, 25, 30, 24000 / 1001, 29.97]))
def test_as_many_latents_as_diffusers_pipeline_takes(folder, frames, fps):
    """`round(duration * sampling rate / hop / temporal factor)`, in floats as there; and never none."""
    vae = load_audio_vae(folder / "audio_vae", None)
    assert vae.latent_frames(frames / fps) == round(frames / fps * (16000 / 160 / 4.0))
    assert vae.latent_frames(0.001) == 1


def test_sound_in_bfloat16_keeps_front_end_statistics_and_vocoder_exact(folder):
    vae = load_audio_vae(folder / "audio_vae", folder / "plain", dtype=torch.bfloat16)
    kept = {k for k, spec in ltx2_audio.param_specs(SOUND).items() if spec.keep_fp32}
    half = {k: v if k in kept else v.bfloat16() for k, v in sound_params().items()}
    wave = 0.3 * draw(0, 1, 2, 4000)
    latents = vae.encode(wave)
    assert latents.dtype == torch.float32
    assert torch.equal(latents, ltx2_audio.encode(half, SOUND, log_mel(SOUND.mel, wave).bfloat16()).float())
    mel = ltx2_audio.decode(half, SOUND, latents.bfloat16()).float()
    assert torch.equal(vae.decode(latents), ltx2_vocoder.vocode(voice_params("plain"), PLAIN, mel))


@pytest.mark.parametrize("keep", [False, True])
def test_nothing_is_read_until_a_call_needs_it(folder, monkeypatch, keep):
    reads, real = [], autoencoders._cast

    def reading(tree, *args):
        params = real(tree, *args)
        reads.append(("voice" if "conv_in.weight" in params else "vae", weakref.ref(next(iter(params.values())))))
        return params

    monkeypatch.setattr(autoencoders, "_cast", reading)
    vae = load_audio_vae(folder / "audio_vae", folder / "plain", keep=keep)
    assert reads == []
    latents = vae.encode(draw(0, 1, 2, 2000))
    assert [name for name, _ in reads] == ["vae"]
    for _ in range(2):
        vae.decode(latents)
    gc.collect()
    assert [name for name, _ in reads] == (["vae", "voice"] if keep else ["vae"] + ["vae", "voice"] * 2)
    assert all((ref() is not None) == keep for _, ref in reads)


def test_without_a_vocoder_there_is_nothing_to_decode_with(folder):
    vae = load_audio_vae(folder / "audio_vae", None)
    assert isinstance(vae, AudioVae) and vae.decode is None and vae.output_rate is None


def test_the_mel_codec_is_behind_the_same_interface(folder):
    vae = load_audio_vae(folder / "mel", None)
    params, cfg = mel_codec.load(folder / "mel")
    assert (vae.latent_channels, vae.latent_bins, vae.latents_per_second) == (4, 4, 25)
    assert vae.input_rate == vae.output_rate == 16000
    wave = 0.1 * draw(7, 1, 2, 5000)
    latents = vae.encode(wave)
    assert torch.equal(latents, mel_codec.encode(params, cfg, wave)) and latents.shape[2] == 8
    assert torch.equal(vae.decode(latents), mel_codec.decode(params, cfg, latents))
    with pytest.raises(UserError, match="'LatentreeMelCodec' stays in float32, a vae_dtype of torch.bfloat16"):
        load_audio_vae(folder / "mel", None, dtype=torch.bfloat16)


def test_vocoders_and_folders_that_do_not_fit_are_refused(folder, tmp_path):
    with pytest.raises(UserError, match="_class_name 'LatentreePatchCodec' cannot be run as an audio VAE by"):
        load_audio_vae(folder / "patch", None)
    slow = VocoderConfig(**{**vars(PLAIN), "in_channels": 8, "output_sampling_rate": 48000})
    specs = ltx2_vocoder.param_specs(slow)
    save_model(tmp_path / "slow", random_leaves(specs, 0), specs, to_json(slow))
    with pytest.raises(UserError) as error:
        load_audio_vae(folder / "audio_vae", tmp_path / "slow")
    assert "it takes 8 channels times bands, the VAE gives 16" in str(error.value)
    assert "it makes a second of 200 frames, the VAE of 100" in str(error.value)
    with pytest.raises(UserError, match="_class_name is 'AutoencoderKLLTX2Audio', expected LTX2Vocoder or"):
        load_audio_vae(folder / "audio_vae", folder / "audio_vae")
    with pytest.raises(UserError, match=r"conv_in\.weight"):
        load_audio_vae(folder / "audio_vae", change(folder, tmp_path, "plain", hidden_channels=32))
    with pytest.raises(UserError, match="norm_type is 'group', only 'pixel'"):
        load_audio_vae(change(folder, tmp_path, "audio_vae", norm_type="group"), None)
    with pytest.raises(UserError, match="no such file|config.json"):
        load_audio_vae(folder / "nothing", None)
