"""LTX-2's vocoders against Diffusers' LTX2Vocoder and LTX2VocoderWithBWE; filters, precision, configs and errors."""

import dataclasses
import inspect
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_side_cases import close, compare, draw, loaded, random_leaves
from torch.utils._python_dispatch import TorchDispatchMode

from core import keys, specs
from core.errors import UserError
from core.trees import num_params
from nn import ltx2_vocoder as vocoder
from nn.ltx2_vocoder_config import PRESETS, BweVocoderConfig, VocoderConfig, from_json, to_json
from nn.ltx2_vocoder_filters import downsample, hann_sinc, hann_upsample, kaiser_sinc, kaiser_upsample

# Some thirty convolutions and filters in a row, in another order of summation: a few ulp (1.2e-7, 2.2e-16) per layer.
# Bandwidth extension takes the logarithm of magnitudes between, which divides by quiet bands. In float32 at most 6.5e-6
# and 2.7e-5 over 100 random cases of each.
TOLERANCE = {torch.float32: 5e-5, torch.float64: 1e-11}
BWE_TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-10}
SEEDS = st.integers(0, 10**6)


@st.composite
def generators(draw, **fixed):
    """Tiny generators of every activation, with odd kernels, any dilations, one or two upsamplings."""
    count, ups = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    dilations = st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)
    factors = fixed.pop("upsample_factors", None)
    factors = tuple(draw(st.integers(1, 3)) for _ in range(ups)) if factors is None else factors
    act = draw(st.sampled_from(["leaky_relu", "snake", "snakebeta"]))
    base = {
        "in_channels": draw(st.sampled_from([2, 6])),
        "hidden_channels": draw(st.sampled_from([8, 12])),
        "out_channels": draw(st.integers(1, 2)),
        "upsample_factors": factors,
        "upsample_kernel_sizes": tuple(f + 2 * draw(st.integers(0, 2)) for f in factors),
        "resnet_kernel_sizes": tuple(draw(st.sampled_from([1, 3, 7])) for _ in range(count)),
        "resnet_dilations": tuple(draw(dilations) for _ in range(count)),
        "act_fn": act,
        "leaky_relu_negative_slope": draw(st.sampled_from([0.1, 0.3])),
        "antialias": act != "leaky_relu" and draw(st.booleans()),
        "antialias_ratio": draw(st.sampled_from([2, 3])),
        "antialias_kernel_size": draw(st.sampled_from([12, 7])),
        "final_act_fn": draw(st.sampled_from(["tanh", "clamp", "none"])),
        "final_bias": draw(st.booleans()),
    }
    return VocoderConfig(**base | fixed)


@st.composite
def extended(draw):
    """A pair of generators that fit, where the first waveform is a multiple of the hop or is not."""
    hop, ratio, bands = draw(st.sampled_from([2, 3, 4])), draw(st.integers(1, 3)), draw(st.integers(2, 3))
    low = draw(generators(output_sampling_rate=16000))
    high = draw(
        generators(
            upsample_factors=(hop, ratio), in_channels=low.out_channels * bands, out_channels=low.out_channels,
            output_sampling_rate=16000 * ratio,
        )
    )  # fmt: skip
    return BweVocoderConfig(low, high, filter_length=16, window_length=16, hop_length=hop, num_mel_channels=bands)


def tiny(act="snakebeta", **changes) -> VocoderConfig:
    base = {
        "in_channels": 4, "hidden_channels": 8, "upsample_kernel_sizes": (4, 4), "upsample_factors": (2, 2),
        "resnet_kernel_sizes": (3, 5), "resnet_dilations": ((1, 3), (2,)), "act_fn": act,
        "antialias": act != "leaky_relu", "output_sampling_rate": 16000,
    }  # fmt: skip
    return VocoderConfig(**base | changes)


def tiny_bwe() -> BweVocoderConfig:
    high = tiny(in_channels=6, upsample_factors=(4, 3), upsample_kernel_sizes=(8, 5), output_sampling_rate=48000)
    return BweVocoderConfig(tiny(), high, filter_length=16, window_length=16, hop_length=4, num_mel_channels=3)


def diffusers_model(cfg, params=None, dtype=torch.float32):
    from diffusers.pipelines.ltx2 import vocoder as theirs

    body = to_json(cfg)
    make = lambda: getattr(theirs, body["_class_name"])(**{k: v for k, v in body.items() if k != "_class_name"})
    if params is None:
        return make()
    model = loaded(make, params, dtype)
    if isinstance(cfg, BweVocoderConfig) and dtype == torch.float64:  # Diffusers computes this filter in float32
        model.resampler.filter = hann_sinc(cfg.ratio).view(1, 1, -1)
    return model


def random_params(cfg, seed, dtype=torch.float32):
    return random_leaves(vocoder.param_specs(cfg), seed, dtype, vocoder.constants(cfg))


def mel_of(cfg, seed, frames=3, batch=1, dtype=torch.float32):
    return draw(seed, "mel", batch, 2, frames, cfg.in_channels // 2, dtype=dtype)


def compare_with_diffusers(cfg, seed, frames, batch, dtype):
    params = random_params(cfg, seed, dtype)
    model = diffusers_model(cfg, params, dtype)
    extended = isinstance(cfg, BweVocoderConfig)
    mel = mel_of(cfg, seed, frames, batch, dtype)
    wave = vocoder.vocode(params, cfg, mel)
    assert wave.shape == (batch, cfg.out_channels, cfg.factor * frames) and wave.abs().max() <= 1
    # Diffusers clamps the extended waveform, and a plain one only where its config says so.
    ours = lambda p, x: [vocoder.vocode(p, cfg, x, clamp=extended)]
    tolerance = (BWE_TOLERANCE if extended else TOLERANCE)[dtype]
    compare(ours, lambda x: [model(x)], params, model, [mel], tolerance)


@given(cfg=generators(), seed=SEEDS, frames=st.integers(1, 6), batch=st.integers(1, 2))
@settings(max_examples=15)
def test_outputs_and_gradients_equal_diffusers(cfg, seed, frames, batch):
    compare_with_diffusers(cfg, seed, frames, batch, torch.float32)


@given(cfg=extended(), seed=SEEDS, frames=st.integers(1, 6), batch=st.integers(1, 2))
@settings(max_examples=12)
def test_bandwidth_extension_equals_diffusers(cfg, seed, frames, batch):
    compare_with_diffusers(cfg, seed, frames, batch, torch.float32)


@pytest.mark.parametrize("cfg", [tiny("leaky_relu"), tiny("snake"), tiny(), tiny_bwe()], ids=lambda c: type(c).__name__)
def test_float64_equals_diffusers(cfg):
    compare_with_diffusers(cfg, 5, 3, 2, torch.float64)


# --- precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [tiny("leaky_relu"), tiny_bwe()], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_run_in_float32(cfg, dtype):
    """Bitwise what the same weights give in float32; half-precision input gives that, cast back. So under autocast."""
    params = {k: v.to(dtype) for k, v in random_params(cfg, 1).items()}
    wide = {k: v.float() for k, v in params.items()}
    mel = mel_of(cfg, 1).to(dtype)
    exact = vocoder.vocode(wide, cfg, mel.float())
    assert torch.equal(vocoder.vocode(params, cfg, mel.float()), exact)
    half = vocoder.vocode(params, cfg, mel)
    assert half.dtype == dtype and torch.equal(half, exact.to(dtype).clamp(-1, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(vocoder.vocode(params, cfg, mel.float()), exact)


class CastBytes(TorchDispatchMode):
    """The most bytes of half-precision tensors' casts to float32 that were alive at one time."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.bfloat16:
            self.alive[id(out)] = out.nbytes
            weakref.finalize(out, self.alive.pop, id(out), None)
            self.most = max(self.most, sum(self.alive.values()))
        return out


def test_no_second_copy_of_the_weights():
    """At any time, casts hold no more than one layer's weight and bias."""
    cfg = tiny_bwe()
    params = {k: v.bfloat16() for k, v in random_params(cfg, 1).items()}
    with torch.no_grad(), CastBytes() as seen:
        vocoder.vocode(params, cfg, mel_of(cfg, 1))
    largest = max(4 * v.numel() for v in params.values())
    assert 0 < seen.most < 1.2 * largest < 0.5 * sum(4 * v.numel() for v in params.values())


@pytest.mark.parametrize("name", PRESETS)
def test_runs_without_data(name):
    """On meta tensors, for counting operations: shapes of the public models."""
    cfg = PRESETS[name]
    mel = torch.empty(1, 2, 5, 64, device="meta")
    wave = vocoder.vocode(specs.abstract(vocoder.param_specs(cfg)), cfg, mel)
    assert wave.shape == (1, 2, 5 * cfg.factor) and cfg.output_sampling_rate == 100 * cfg.factor  # 100 frames a second


def test_the_clamp_can_be_left_out():
    cfg = tiny(final_act_fn="none")
    params = random_params(cfg, 2)
    params["conv_out.bias"] = params["conv_out.bias"] + 1
    raw = vocoder.vocode(params, cfg, mel_of(cfg, 2), clamp=False)
    assert raw.max() > 1 and torch.equal(vocoder.vocode(params, cfg, mel_of(cfg, 2)), raw.clamp(-1, 1))


def test_samples_of_a_batch_are_independent():
    cfg = tiny_bwe()
    params, mel = random_params(cfg, 3), mel_of(cfg, 3, batch=3)
    whole = vocoder.vocode(params, cfg, mel)
    close(torch.cat([vocoder.vocode(params, cfg, m) for m in mel.split(1)]), whole, "batch", 1e-5)


# --- filters ----------------------------------------------------------------------------------------------------


@given(ratio=st.integers(1, 6), taps=st.integers(6, 25))
def test_filters_are_diffusers(ratio, taps):
    from diffusers.pipelines.ltx2.vocoder import UpSample1d, kaiser_sinc_filter1d

    taps = max(taps, ratio)
    close(kaiser_sinc(ratio, taps).float(), kaiser_sinc_filter1d(0.5 / ratio, 0.6 / ratio, taps), "Kaiser", 2e-6)
    theirs = UpSample1d(ratio, window_type="hann").filter.flatten()
    close(hann_sinc(ratio).float(), theirs, "Hann", 2e-6)


@given(ratio=st.integers(2, 3), even=st.booleans(), level=st.floats(-2, 2))
def test_a_constant_signal_stays(ratio, even, level):
    """Up and down again in phase: filters of sum 1 whose phases sum to nearly 1 / ratio."""
    taps = kaiser_sinc(ratio, 6 * ratio + (0 if even else 1))
    x = torch.full((1, 2, 9), level, dtype=torch.float64)
    up = kaiser_upsample(x, taps, ratio)
    assert up.shape == (1, 2, 9 * ratio)
    torch.testing.assert_close(up, torch.full_like(up, level), atol=0.05 * abs(level) + 1e-12, rtol=0)
    torch.testing.assert_close(downsample(up, taps, ratio), x, atol=0.05 * abs(level) + 1e-12, rtol=0)


@given(ratio=st.integers(1, 4), cycles=st.floats(0.5, 12))
def test_resampling_keeps_a_tone(ratio, cycles):
    """A tone far below the Nyquist frequency (32 cycles), away from the ends, is the same tone at a higher rate."""
    time = lambda n: torch.arange(64 * n, dtype=torch.float64) / (64 * n)
    tone = lambda n: torch.sin(2 * math.pi * cycles * time(n))[None, None]
    inner = slice(8 * ratio, -8 * ratio)
    up = hann_upsample(tone(1), ratio)
    torch.testing.assert_close(up[..., inner], tone(ratio)[..., inner], atol=0.02, rtol=0)


@pytest.mark.parametrize("cfg", [tiny(), tiny("snake"), tiny("leaky_relu")], ids=lambda c: c.act_fn)
def test_fresh_parameters_have_diffusers_filters(cfg):
    fresh, theirs = vocoder.init(cfg, keys.key(0)), diffusers_model(cfg).state_dict()
    specs.check(fresh, vocoder.param_specs(cfg))
    filters = [k for k in theirs if k.endswith(".filter")]
    assert set(vocoder.constants(cfg)) == set(filters)
    for name in filters:
        close(fresh[name], theirs[name], name, 2e-6)
    assert vocoder.vocode(fresh, cfg, mel_of(cfg, 0)).isfinite().all()


def test_fresh_bandwidth_extension_learns_from_silence():
    """The mel front end is in place, and a silent waveform between gives no NaN."""
    cfg = tiny_bwe()
    params = vocoder.init(cfg, keys.key(0))
    params |= {k: torch.zeros_like(v) for k, v in params.items() if k.startswith("vocoder.conv_out")}
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    vocoder.vocode(leaves, cfg, mel_of(cfg, 0), clamp=False).square().sum().backward()
    assert all(v.grad is None or v.grad.isfinite().all() for v in leaves.values())
    assert params["mel_stft.mel_basis"].sum() > 0


# --- configs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,count", [("ltx-2", 194), ("ltx-2.3", 1227)])
def test_full_configs_key_by_key(name, count):
    with torch.device("meta"):
        theirs = diffusers_model(PRESETS[name]).state_dict()
    ours = vocoder.param_specs(PRESETS[name])
    specs.check(theirs, ours)
    assert len(ours) == count
    if name == "ltx-2.3":  # 128.5 million parameters without constants
        trained = num_params({k: v for k, v in ours.items() if "mel_stft" not in k and not k.endswith(".filter")})
        assert trained == 128_537_448


@pytest.mark.parametrize("name", PRESETS)
def test_defaults_are_diffusers(name):
    from diffusers.pipelines.ltx2 import vocoder as theirs

    ours = to_json(PRESETS[name])
    parameters = inspect.signature(getattr(theirs, ours.pop("_class_name")).__init__).parameters
    assert ours == {k: v.default for k, v in parameters.items() if k != "self"}


@given(cfg=st.one_of(generators(), extended()))
def test_configs_round_trip(cfg):
    assert from_json(to_json(cfg), "config.json") == cfg


def test_config_errors():
    body = to_json(PRESETS["ltx-2.3"])
    with pytest.raises(UserError, match="bwe_hidden_chanels|unknown key hidden_chanels"):
        from_json(body | {"bwe_hidden_chanels": 3}, "config.json")
    with pytest.raises(UserError, match="hop_length is '80', expected int"):
        from_json(body | {"hop_length": "80"}, "config.json")
    with pytest.raises(UserError, match="config.json: BweVocoderConfig\n.*bwe_upsample_factors multiply to 240"):
        from_json(body | {"hop_length": 40}, "config.json")
    with pytest.raises(UserError, match="_class_name is 'HiFiGAN', expected LTX2Vocoder or LTX2VocoderWithBWE"):
        from_json({"_class_name": "HiFiGAN"}, "config.json")
    with pytest.raises(UserError) as error:
        tiny("relu", upsample_kernel_sizes=(4, 5), hidden_channels=3, final_act_fn=None)
    faults = "kernel 5 does not fit factor 2", "cannot be halved 2 times", "act_fn is 'relu'", "final_act_fn is None"
    for part in faults:
        assert part in str(error.value)
    with pytest.raises(UserError, match="antialias needs act_fn snake"):
        tiny("leaky_relu", antialias=True)
    with pytest.raises(UserError) as error:
        dataclasses.replace(tiny_bwe(), window_length=12, num_mel_channels=4)
    assert "equal window_length" in str(error.value) and "bwe_in_channels is 6, must be" in str(error.value)


def test_input_errors():
    cfg = tiny()
    with pytest.raises(UserError, match=r"shape \[1, 2, 3, 3\], expected \[B, channels, T, bands\] .* = 4"):
        vocoder.vocode({}, cfg, torch.zeros(1, 2, 3, 3))
    with pytest.raises(UserError, match="floating"):
        vocoder.vocode({}, cfg, torch.zeros(1, 2, 3, 2, dtype=torch.int32))
