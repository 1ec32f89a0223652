"""LTX-2's audio VAE against Diffusers' AutoencoderKLLTX2Audio, and the mel front end against its definition."""

import dataclasses
import inspect
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_side_cases import close, compare, draw, loaded, random_leaves

from core import keys, specs
from core.errors import UserError
from core.trees import num_params
from nn import ltx2_audio as audio
from nn.config_files import read_config
from nn.ltx2_audio import AudioVaeConfig
from nn.ltx2_audio_mel import MelConfig, causal_log_mel, fourier_basis, hz_to_mel, log_mel, mel_filters, mel_to_hz
from nn.ltx2_config import LTX2Config
from nn.ltx2_inputs import audio_latents, audio_tokens

# Some twenty convolutions in a row of up to some hundred terms, in another order of summation: a few ulp (1.2e-7,
# 2.2e-16) per layer; in float32 at most 1.5e-5 over 100 random cases.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}
SEEDS = st.integers(0, 10**6)


def tiny(**changes) -> AudioVaeConfig:
    base = {"base_channels": 8, "ch_mult": (1, 2, 2), "num_res_blocks": 1, "latent_channels": 4, "mel_bins": 8}
    return AudioVaeConfig(**base | changes)


@st.composite
def configs(draw):
    """At least 4 channels, so that a pixel's size is never near zero, which would blow rounding errors up."""
    z, bands = draw(st.integers(2, 4)), draw(st.integers(2, 3))
    return AudioVaeConfig(
        base_channels=z * bands,
        ch_mult=draw(st.tuples(*[st.integers(1, 2)] * 3)),
        num_res_blocks=draw(st.integers(1, 2)),
        in_channels=draw(st.integers(1, 2)),
        output_channels=draw(st.integers(1, 3)),
        latent_channels=z,
        mel_bins=4 * bands,
    )


def diffusers_vae(cfg, params=None, dtype=torch.float32):
    from diffusers import AutoencoderKLLTX2Audio

    make = lambda: AutoencoderKLLTX2Audio(**{k: v for k, v in audio.to_json(cfg).items() if k != "_class_name"})
    return make() if params is None else loaded(make, params, dtype)


def random_params(cfg, seed, dtype=torch.float32):
    params = random_leaves(audio.param_specs(cfg), seed, dtype)
    return params | {"latents_std": params["latents_std"].abs() + 0.5}


def compare_both_ways(cfg, seed, frames, batch, dtype):
    params = random_params(cfg, seed, dtype)
    model = diffusers_vae(cfg, params, dtype)
    mel = draw(seed, "mel", batch, cfg.in_channels, frames, cfg.mel_bins, dtype=dtype)

    def posterior(x):
        found = model.encode(x).latent_dist
        return [found.mean, found.logvar]

    compare(lambda p, x: audio.encode_moments(p, cfg, x), posterior, params, model, [mel], TOLERANCE[dtype])
    model.zero_grad()
    z = draw(seed, "z", batch, cfg.latent_channels, audio.latent_frames(frames), cfg.latent_mel_bins, dtype=dtype)
    fixed = {k: params[k] for k in ("latents_mean", "latents_std")}
    ours = lambda p, x: [audio.decode(p | fixed, cfg, audio.normalise(fixed, cfg, x))]
    compare(ours, lambda x: [model.decode(x).sample], params, model, [z], TOLERANCE[dtype])


@given(cfg=configs(), seed=SEEDS, frames=st.integers(1, 11), batch=st.integers(1, 2))
@settings(max_examples=12)
def test_outputs_and_gradients_equal_diffusers(cfg, seed, frames, batch):
    compare_both_ways(cfg, seed, frames, batch, torch.float32)


def test_float64_equals_diffusers():
    compare_both_ways(tiny(num_res_blocks=2), 3, 9, 2, torch.float64)


def test_full_config_key_by_key():
    cfg = audio.PRESETS["ltx-2"]
    with torch.device("meta"):
        theirs = diffusers_vae(cfg).state_dict()
    specs.check(theirs, audio.param_specs(cfg))
    assert num_params(audio.param_specs(cfg)) == 53_248_402


def test_defaults_are_diffusers():
    from diffusers import AutoencoderKLLTX2Audio

    theirs = inspect.signature(AutoencoderKLLTX2Audio.__init__).parameters
    ours = {k: v for k, v in audio.to_json(AudioVaeConfig()).items() if k != "_class_name"}
    default = {k: list(v.default) if isinstance(v.default, tuple) else v.default for k, v in theirs.items()}
    assert ours == {k: v for k, v in default.items() if k != "self"}


def test_config_files(tmp_path):
    path, cfg = tmp_path / "config.json", tiny(ch_mult=(1, 2, 3))
    path.write_text(json.dumps(audio.to_json(cfg)))
    assert read_config(AudioVaeConfig, path, "_class_name", audio.CLASS_NAME, fixed=audio.FIXED) == cfg
    path.write_text(json.dumps(audio.to_json(cfg) | {"norm_type": "group"}))
    with pytest.raises(UserError, match="norm_type is 'group', only 'pixel'"):
        read_config(AudioVaeConfig, path, "_class_name", audio.CLASS_NAME, fixed=audio.FIXED)


# --- latents ----------------------------------------------------------------------------------------------------


@given(seed=SEEDS, batch=st.integers(1, 3), frames=st.integers(1, 5))
def test_normalised_tokens_are_the_pipelines(seed, batch, frames):
    """Diffusers packs latents into tokens, then normalises; so the statistics are in a token's order."""
    from diffusers import LTX2Pipeline

    cfg = tiny()
    params = random_params(cfg, seed)
    raw = draw(seed, "raw", batch, cfg.latent_channels, frames, cfg.latent_mel_bins)
    model = LTX2Config(audio_in_channels=cfg.base_channels)
    tokens = audio_tokens(model, audio.normalise(params, cfg, raw))
    statistics = params["latents_mean"], params["latents_std"]
    packed = LTX2Pipeline._pack_audio_latents(raw)
    close(tokens, LTX2Pipeline._normalize_audio_latents(packed, *statistics), "tokens", 1e-6)
    back = audio.denormalise(params, cfg, audio_latents(tokens, cfg.latent_mel_bins))
    close(back, raw, "round trip", 1e-5)
    theirs = LTX2Pipeline._denormalize_audio_latents(tokens, *statistics)
    close(back, LTX2Pipeline._unpack_audio_latents(theirs, frames, cfg.latent_mel_bins), "latents", 1e-6)


def test_a_draw_from_the_posterior():
    cfg = tiny()
    params = random_params(cfg, 0)
    mean, logvar = audio.encode_moments(params, cfg, draw(0, "mel", 1, 2, 9, 8))
    zero, one = torch.zeros_like(mean), torch.ones_like(mean)
    assert torch.equal(audio.sample_latents(params, cfg, mean, logvar, zero), audio.normalise(params, cfg, mean))
    drawn = audio.denormalise(params, cfg, audio.sample_latents(params, cfg, mean, logvar, one))
    close(drawn - mean, (logvar / 2).exp(), "deviation", 1e-5)


@given(seed=SEEDS, frames=st.integers(1, 14), cut=st.integers(0, 13))
def test_no_frame_sees_a_later_one(seed, frames, cut):
    cfg = tiny()
    params, cut = random_params(cfg, seed), min(cut, frames - 1)
    mel = draw(seed, "mel", 1, 2, frames, 8)
    latents = audio.encode(params, cfg, mel)
    assert latents.shape == (1, 4, audio.latent_frames(frames), 2)
    changed = audio.encode(params, cfg, torch.cat([mel[:, :, :cut], mel[:, :, cut:] + 1], 2))
    before = audio.latent_frames(cut)  # latent frame k sees up to 4 k
    assert torch.equal(changed[:, :, :before], latents[:, :, :before])
    assert not torch.equal(changed[:, :, before:], latents[:, :, before:]) or before == latents.shape[2]
    decoded = audio.decode(specs.init(audio.param_specs(cfg), keys.key(1)), cfg, latents)
    assert decoded.isfinite().all()
    decoded = audio.decode(params, cfg, latents)
    assert decoded.shape == (1, 2, audio.decoded_frames(latents.shape[2]), 8)
    part = audio.decode(params, cfg, latents[:, :, :1])
    close(part, decoded[:, :, :1], "first frame", 1e-5)


def test_bfloat16_stays_and_is_near():
    """8 bits of mantissa, 4e-3 per rounding, through some twenty layers that each keep size."""
    cfg = tiny()
    params, mel = random_params(cfg, 1), draw(1, "mel", 2, 2, 9, 8)
    half = audio.encode(params, cfg, mel.bfloat16())
    assert half.dtype == torch.bfloat16
    close(half.float(), audio.encode(params, cfg, mel), "latents", 6e-2)
    assert audio.decode(params, cfg, half).dtype == torch.bfloat16


def test_errors():
    cfg = tiny()
    params = random_params(cfg, 0)
    with pytest.raises(UserError, match=r"mel spectrogram: shape \[1, 2, 5, 9\], expected \[B, 2, T, 8\]"):
        audio.encode(params, cfg, torch.zeros(1, 2, 5, 9))
    with pytest.raises(UserError, match="int64, expected a floating"):
        audio.encode(params, cfg, torch.zeros(1, 2, 5, 8, dtype=torch.int64))
    with pytest.raises(UserError, match=r"audio latents: shape \[1, 4, 0, 2\]"):
        audio.decode(params, cfg, torch.zeros(1, 4, 0, 2))
    with pytest.raises(UserError) as error:
        tiny(mel_bins=10, ch_mult=(1, 2), num_res_blocks=0)
    for part in ("mel_bins must be a multiple of 4", "ch_mult must be three", "num_res_blocks must be at least 1"):
        assert part in str(error.value)


# --- mel front end ----------------------------------------------------------------------------------------------

MELS = st.builds(
    MelConfig,
    sampling_rate=st.sampled_from([8000, 16000]),
    n_fft=st.sampled_from([64, 100, 256]),
    hop_length=st.sampled_from([16, 33, 64]),
    n_mels=st.integers(1, 9),
    f_min=st.sampled_from([0.0, 50.0]),
    f_max=st.sampled_from([900.0, 4000.0]),
)


@given(cfg=MELS)
def test_filters_are_slaneys(cfg):
    from transformers.audio_utils import mel_filter_bank

    bounds = cfg.f_min, cfg.f_max, cfg.sampling_rate
    theirs = mel_filter_bank(cfg.n_freqs, cfg.n_mels, *bounds, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(mel_filters(cfg).T.numpy(), theirs, atol=1e-12)


def test_the_mel_scale_is_continuous_and_inverts():
    hz = torch.tensor([0.0, 200.0, 999.999999, 1000.0, 6400.0, 8000.0], dtype=torch.float64)
    mel = hz_to_mel(hz)
    assert mel[3:5].tolist() == pytest.approx([15, 42]) and (mel.diff() > 0).all()
    assert mel[3] - mel[2] < 1e-7
    torch.testing.assert_close(mel_to_hz(mel), hz, atol=1e-9, rtol=1e-12)


@given(cfg=MELS, seed=SEEDS, samples=st.integers(129, 700))
def test_log_mel_is_its_definition(cfg, seed, samples):
    """Against transformers' numpy spectrogram: float64 transforms, stored in complex64 (6e-8)."""
    from transformers.audio_utils import mel_filter_bank, spectrogram

    wave = draw(seed, "wave", 2, 2, samples, dtype=torch.float64) * 0.2
    ours = log_mel(cfg, wave)
    assert ours.shape == (2, 2, 1 + samples // cfg.hop_length, cfg.n_mels) and ours.dtype == torch.float64
    bounds = cfg.f_min, cfg.f_max, cfg.sampling_rate
    filters = mel_filter_bank(cfg.n_freqs, cfg.n_mels, *bounds, norm="slaney", mel_scale="slaney")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(cfg.n_fft) / cfg.n_fft)
    for i in range(2):
        for c in range(2):
            theirs = spectrogram(
                wave[i, c].numpy(), window, cfg.n_fft, cfg.hop_length, mel_filters=filters, mel_floor=1e-5,
                log_mel="log", dtype=np.float64,
            )  # fmt: skip
            np.testing.assert_allclose(ours[i, c].T.numpy(), theirs, atol=1e-4)
    # float32 rounds a magnitude by some 1e-6 of the loudest one, which for a quiet band is more of itself
    np.testing.assert_allclose(log_mel(cfg, wave.float()).exp(), ours.exp(), atol=1e-6)


def test_the_public_front_end():
    """A second of sound is 25 latent frames; a 440 Hz tone is in the band whose peak is next to 440 Hz."""
    cfg = AudioVaeConfig()
    assert cfg.mel == MelConfig() == MelConfig(16000, 1024, 160, 64, 0.0, 8000.0) and cfg.latents_per_second == 25
    time = torch.arange(16000, dtype=torch.float64) / 16000
    bands = log_mel(cfg.mel, torch.sin(2 * torch.pi * 440 * time)[None, None])
    assert bands.shape == (1, 1, 101, 64)
    peaks = mel_to_hz(torch.linspace(0, hz_to_mel(torch.tensor(8000.0)).item(), 66))[1:-1]
    assert bands[0, 0, 50].argmax() == (peaks - 440).abs().argmin()
    assert log_mel(cfg.mel, torch.zeros(1, 2, 800)).eq(np.log(np.float32(1e-5))).all()
    assert log_mel(cfg.mel, torch.zeros(1, 2, 800, dtype=torch.bfloat16)).dtype == torch.bfloat16


@given(seed=SEEDS, half=st.integers(2, 20), hop=st.integers(1, 4), frames=st.integers(1, 6))
def test_causal_frames_are_transforms_of_what_came_before(seed, half, hop, frames):
    n_fft, cfg = 2 * half, MelConfig(16000, 2 * half, hop, 3)
    wave = draw(seed, "wave", 2, frames * hop, dtype=torch.float64)
    filters = mel_filters(cfg)
    ours = causal_log_mel(wave, fourier_basis(n_fft), filters, hop)
    assert ours.shape == (2, 3, frames)
    before = torch.cat([torch.zeros(2, n_fft, dtype=torch.float64), wave], 1)
    for i in range(frames):
        end = n_fft + (i + 1) * hop
        window = torch.hann_window(n_fft, dtype=torch.float64)
        spectrum = torch.fft.rfft(before[:, end - n_fft : end] * window).abs()
        torch.testing.assert_close(ours[:, :, i], (spectrum @ filters.T).clamp(min=1e-5).log(), atol=1e-9, rtol=0)


def test_silence_has_a_gradient_of_zero():
    wave = torch.zeros(1, 1, 64, requires_grad=True)
    causal_log_mel(wave[0], fourier_basis(16).float(), mel_filters(MelConfig(16000, 16, 4, 3)), 4).sum().backward()
    assert torch.equal(wave.grad, torch.zeros_like(wave))


def test_front_end_errors():
    with pytest.raises(UserError, match="waveform has 512 samples, expected at least 513"):
        log_mel(MelConfig(), torch.zeros(1, 1, 512))
    with pytest.raises(UserError, match=r"expected floating \[B, channels, samples\]"):
        log_mel(MelConfig(), torch.zeros(2, 2000))
    with pytest.raises(UserError) as error:
        dataclasses.replace(MelConfig(), n_fft=1023, f_max=9000.0)
    assert "n_fft must be even" in str(error.value) and "f_max 9000" in str(error.value)
