"""Configs of LTX-2's vocoder and of LTX-2.3's, which a second generator extends to a higher sampling rate.

Field names and defaults are those of Diffusers' `LTX2Vocoder` and `LTX2VocoderWithBWE`.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from core.errors import UserError, raise_faults
from nn.config_files import parse_config

CLASS_NAME = "LTX2Vocoder"
BWE_CLASS_NAME = "LTX2VocoderWithBWE"
ACTIVATIONS = ("leaky_relu", "snake", "snakebeta")
FINAL_ACTIVATIONS = ("tanh", "clamp", "none")


@dataclasses.dataclass(frozen=True)
class VocoderConfig:
    """One generator (HiFi-GAN; with `snake` activations BigVGAN): log-mel frames to a waveform.

    `final_act_fn` is `"none"` where a file has null. `antialias` wraps every activation in up- and downsampling.
    """

    in_channels: int = 128
    hidden_channels: int = 1024
    out_channels: int = 2
    upsample_kernel_sizes: tuple[int, ...] = (16, 15, 8, 4, 4)
    upsample_factors: tuple[int, ...] = (6, 5, 2, 2, 2)
    resnet_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resnet_dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    act_fn: str = "leaky_relu"
    leaky_relu_negative_slope: float = 0.1
    antialias: bool = False
    antialias_ratio: int = 2
    antialias_kernel_size: int = 12
    final_act_fn: str = "tanh"
    final_bias: bool = True
    output_sampling_rate: int = 24000

    def __post_init__(self):
        for name in ("upsample_kernel_sizes", "upsample_factors", "resnet_kernel_sizes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "resnet_dilations", tuple(tuple(d) for d in self.resnet_dilations))
        raise_faults("VocoderConfig", [*_size_faults(self), *_upsample_faults(self), *_choice_faults(self)])

    @property
    def factor(self) -> int:
        """Samples per mel frame."""
        return math.prod(self.upsample_factors)

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels before the first upsampling and after each, which halves them."""
        return tuple(self.hidden_channels >> i for i in range(len(self.upsample_factors) + 1))

    @property
    def snake(self) -> bool:
        """Whether activations are periodic ones, with parameters."""
        return self.act_fn != "leaky_relu"


def _size_faults(cfg: VocoderConfig) -> list[str]:
    sizes = [f.name for f in dataclasses.fields(cfg) if f.type is int]
    faults = [f"{n} must be at least 1, got {getattr(cfg, n)}" for n in sizes if getattr(cfg, n) < 1]
    if len(cfg.resnet_kernel_sizes) != len(cfg.resnet_dilations) or not cfg.resnet_dilations:
        counts = f"{len(cfg.resnet_kernel_sizes)} and {len(cfg.resnet_dilations)}"
        faults.append(f"resnet_kernel_sizes and resnet_dilations must be equally many, at least one; got {counts}")
    if min([*cfg.resnet_kernel_sizes, *sum(cfg.resnet_dilations, ())], default=1) < 1:
        faults.append("resnet_kernel_sizes and resnet_dilations must be positive")
    if cfg.antialias_kernel_size < cfg.antialias_ratio:
        faults.append(f"antialias_kernel_size {cfg.antialias_kernel_size} is below antialias_ratio")
    return faults


def _upsample_faults(cfg: VocoderConfig) -> list[str]:
    """Each upsampling must give exactly its factor times as many samples, and leave channels."""
    kernels, factors = cfg.upsample_kernel_sizes, cfg.upsample_factors
    if len(kernels) != len(factors) or not factors:
        counts = f"{len(kernels)} and {len(factors)}"
        return [f"upsample_kernel_sizes and upsample_factors must be equally many, at least one; got {counts}"]
    faults = [
        f"upsample kernel {k} does not fit factor {f}: their difference must be even and not negative"
        for k, f in zip(kernels, factors, strict=True)
        if f < 1 or k < f or (k - f) % 2
    ]
    if cfg.widths[-1] < 1:
        faults.append(f"hidden_channels {cfg.hidden_channels} cannot be halved {len(factors)} times")
    return faults


def _choice_faults(cfg: VocoderConfig) -> list[str]:
    faults = []
    for name, words in (("act_fn", ACTIVATIONS), ("final_act_fn", FINAL_ACTIVATIONS)):
        if getattr(cfg, name) not in words:
            faults.append(f"{name} is {getattr(cfg, name)!r}, must be one of {', '.join(words)}")
    if cfg.antialias and not cfg.snake:
        faults.append("antialias needs act_fn snake or snakebeta, not leaky_relu")
    return faults


_BIGVGAN = {"act_fn": "snakebeta", "antialias": True, "final_act_fn": "none", "final_bias": False}
_VOCODER_23 = VocoderConfig(
    hidden_channels=1536, upsample_kernel_sizes=(11, 4, 4, 4, 4, 4), upsample_factors=(5, 2, 2, 2, 2, 2),
    output_sampling_rate=16000, **_BIGVGAN,
)  # fmt: skip
_BWE_23 = VocoderConfig(
    hidden_channels=512, upsample_kernel_sizes=(12, 11, 4, 4, 4), upsample_factors=(6, 5, 2, 2, 2),
    output_sampling_rate=48000, **_BIGVGAN,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BweVocoderConfig:
    """A generator at a low sampling rate, and one that adds what is missing at a high one.

    The second sees the causal log-mel spectrogram of the first one's waveform. The two `output_sampling_rate` are
    Diffusers' `input_sampling_rate` and `output_sampling_rate`.
    """

    vocoder: VocoderConfig = _VOCODER_23
    bwe: VocoderConfig = _BWE_23
    filter_length: int = 512
    hop_length: int = 80
    window_length: int = 512
    num_mel_channels: int = 64

    def __post_init__(self):
        raise_faults("BweVocoderConfig", _bwe_faults(self))

    @property
    def in_channels(self) -> int:
        """Channels times bands of the spectrogram that comes in."""
        return self.vocoder.in_channels

    @property
    def out_channels(self) -> int:
        """Channels of the waveform."""
        return self.bwe.out_channels

    @property
    def output_sampling_rate(self) -> int:
        """Samples per second of the waveform."""
        return self.bwe.output_sampling_rate

    @property
    def ratio(self) -> int:
        """Samples out per sample of the first generator."""
        return self.bwe.output_sampling_rate // self.vocoder.output_sampling_rate

    @property
    def factor(self) -> int:
        """Samples per mel frame."""
        return self.vocoder.factor * self.ratio


def _bwe_faults(cfg: BweVocoderConfig) -> list[str]:
    sizes = ("filter_length", "hop_length", "window_length", "num_mel_channels")
    faults = [f"{n} must be at least 1, got {getattr(cfg, n)}" for n in sizes if getattr(cfg, n) < 1]
    if faults:
        return faults
    if cfg.window_length != cfg.filter_length or cfg.filter_length % 2 or cfg.filter_length < cfg.hop_length:
        found = f"{cfg.filter_length}, {cfg.window_length} and {cfg.hop_length}"
        faults.append(f"filter_length must be even, equal window_length and not be below hop_length; got {found}")
    low, high = cfg.vocoder.output_sampling_rate, cfg.bwe.output_sampling_rate
    if high % low:
        return [*faults, f"output_sampling_rate {high} must be a multiple of input_sampling_rate {low}"]
    if cfg.bwe.factor != (wanted := cfg.hop_length * cfg.ratio):
        faults.append(f"bwe_upsample_factors multiply to {cfg.bwe.factor}, must be hop_length * {cfg.ratio} = {wanted}")
    if cfg.bwe.in_channels != (wanted := cfg.vocoder.out_channels * cfg.num_mel_channels):
        faults.append(f"bwe_in_channels is {cfg.bwe.in_channels}, must be out_channels * num_mel_channels = {wanted}")
    if cfg.bwe.out_channels != cfg.vocoder.out_channels:
        counts = f"{cfg.bwe.out_channels} and {cfg.vocoder.out_channels}"
        faults.append(f"bwe_out_channels and out_channels must be equal, got {counts}")
    return faults


AnyVocoderConfig = VocoderConfig | BweVocoderConfig

PRESETS: dict[str, AnyVocoderConfig] = {"ltx-2": VocoderConfig(), "ltx-2.3": BweVocoderConfig()}


# --- config.json ------------------------------------------------------------------------------------------------


def _fields(cfg: Any) -> dict[str, Any]:
    """A config's own entries as JSON has them."""
    out = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    if out.get("final_act_fn") == "none":
        out["final_act_fn"] = None
    return json.loads(json.dumps({k: v for k, v in out.items() if not dataclasses.is_dataclass(v)}))


def to_json(cfg: AnyVocoderConfig) -> dict[str, Any]:
    """`config.json` of a Diffusers vocoder folder."""
    if isinstance(cfg, VocoderConfig):
        return {"_class_name": CLASS_NAME, **_fields(cfg)}
    low, high = _fields(cfg.vocoder), _fields(cfg.bwe)
    rates = {"input_sampling_rate": low.pop("output_sampling_rate")}
    rates["output_sampling_rate"] = high.pop("output_sampling_rate")
    return {"_class_name": BWE_CLASS_NAME, **low, **{f"bwe_{k}": v for k, v in high.items()}, **_fields(cfg), **rates}


def _parse(data: Mapping[str, Any], source: str) -> VocoderConfig:
    spelled = {"final_act_fn": "none"} if data.get("final_act_fn", "") is None else {}
    return parse_config(VocoderConfig, {**data, **spelled}, source)


def from_json(data: Mapping[str, Any], source: str) -> AnyVocoderConfig:
    """The config of a `config.json`; `source` is what errors call the file.

    Raises UserError that lists every unknown entry and every one of a wrong type.
    """
    kind = data.get("_class_name")
    given = {k: v for k, v in data.items() if not k.startswith("_")}
    if kind == CLASS_NAME:
        return _parse(given, source)
    if kind != BWE_CLASS_NAME:
        raise UserError(f"{source}: _class_name is {kind!r}, expected {CLASS_NAME} or {BWE_CLASS_NAME}")
    given = {k: v for k, v in to_json(BweVocoderConfig()).items() if not k.startswith("_")} | given
    rates = given.pop("input_sampling_rate"), given.pop("output_sampling_rate")
    own = [f.name for f in dataclasses.fields(BweVocoderConfig) if f.type is int]
    rest = {k: given.pop(k) for k in own}
    high = {k.removeprefix("bwe_"): given.pop(k) for k in list(given) if k.startswith("bwe_")}
    low = _parse({**given, "output_sampling_rate": rates[0]}, source)
    high = _parse({**high, "output_sampling_rate": rates[1]}, f"{source}, keys bwe_*")
    faults = [f"{k} is {v!r}, expected int" for k, v in rest.items() if type(v) is not int]
    raise_faults(f"{source}: cannot be used", faults)
    try:
        return BweVocoderConfig(low, high, **rest)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
