"""Configs of LTX-2's smaller models as official files write them: sections of the JSON in a file's header.

Field names are Lightricks'. What a section does not say (counts of channels, the text encoder's depth, whether a
decoder takes timesteps) is read off the keys and shapes: `shapes` are those of the model's leaves under their official
names. Each function raises UserError that names `source` and lists every field that is unknown or cannot be used.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import UserError, nearest_names, raise_faults
from core.specs import Specs
from nn.config_files import parse_config
from nn.ltx2_audio import AudioVaeConfig
from nn.ltx2_connectors import ConnectorConfig
from nn.ltx2_upsampler import UpsamplerConfig
from nn.ltx2_vae_config import DOWN_BLOCK, LTX2VaeConfig
from nn.ltx2_vocoder_config import AnyVocoderConfig, BweVocoderConfig, VocoderConfig

Section = Mapping[str, Any]


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _faults(section: Section, required: Section, known: Sequence[str], at: str = "") -> list[str]:
    """Fields that are none of `known`, and those of `required` with another value."""
    faults = []
    for key, value in section.items():
        if key in required and value != required[key]:
            faults.append(f"{at}{key} is {value!r}, only {required[key]!r} is supported")
        elif key not in required and key not in known and not key.startswith("_"):
            faults.append(f"unknown field {at}{key}{nearest_names(key, (*known, *required))}")
    return faults


def _fields(section: Section, table: Mapping[str, str]) -> dict[str, Any]:
    """The fields of `table` that are there, under our names."""
    return {ours: section[key] for key, ours in table.items() if section.get(key) is not None}


def _inner(section: Section, path: str, faults: list[str]) -> Section:
    """The object at a dotted path, empty where there is none; anything else than objects is added to `faults`."""
    for key in path.split("."):
        section = section.get(key, {})
        if not isinstance(section, Mapping):
            faults.append(f"{path} is {section!r}, expected an object")
            return {}
    return section


# --- the video VAE ----------------------------------------------------------------------------------------------

VAE_TABLE = {
    **_same("in_channels", "out_channels", "latent_channels", "scaling_factor", "patch_size", "timestep_conditioning"),
    "causal_decoder": "decoder_causal",
}
VAE_REQUIRED = {
    "_class_name": "CausalVideoAutoencoder", "dims": 3, "norm_layer": "pixel_norm", "latent_log_var": "uniform",
    "use_quant_conv": False, "normalize_latent_channels": False,
}  # fmt: skip
VAE_OWN = (
    "encoder_blocks", "decoder_blocks", "encoder_base_channels", "decoder_base_channels", "spatial_padding_mode",
    "encoder_spatial_padding_mode", "decoder_spatial_padding_mode",
)  # fmt: skip
DOWN = {
    "compress_space_res": "spatial", "compress_time_res": "temporal", "compress_all_res": "spatiotemporal",
    "compress_all": "conv",
}  # fmt: skip
UP = {"compress_space": "spatial", "compress_time": "temporal", "compress_all": "spatiotemporal"}
PARAMS = {  # what an entry of a list of blocks may say
    "encoder": {"res_x": ("num_layers",), **{k: ("multiplier",) for k in DOWN if k != "compress_all"}}
    | {"compress_all": ()},
    "decoder": {
        "res_x": ("num_layers", "inject_noise"), "res_x_y": ("multiplier",), "compress_space": ("multiplier",),
        "compress_time": ("multiplier",), "compress_all": ("multiplier", "residual"),
    },
}  # fmt: skip
FLAGS = ("inject_noise", "residual")

# A `res_x` and what follows it: {"res_x": params, "change": (kind, params), "res_x_y": params}, the last two optional.
Group = dict[str, Any]


def _entry_faults(entry: Any, at: str, kinds: Mapping[str, Sequence[str]]) -> list[str]:
    """What is wrong with one `[kind, params]`."""
    if not isinstance(entry, list | tuple) or len(entry) != 2 or not isinstance(entry[1], Mapping | int):
        return [f"{at} is {entry!r}, expected [kind, parameters]"]
    kind, params = entry[0], _params(entry[1])
    if kind not in kinds:
        return [f"{at} is {kind!r}, only {', '.join(kinds)} are supported"]
    faults = [f"{at}: unknown parameter {key} of {kind}" for key in params if key not in kinds[kind]]
    for key, value in params.items():
        fits = isinstance(value, bool) if key in FLAGS else type(value) is int and value >= 1
        if key in kinds[kind] and not fits:
            faults.append(f"{at}: {key} is {value!r}, expected {'true or false' if key in FLAGS else '1 or more'}")
    return faults + ([f"{at}: num_layers is missing"] if kind == "res_x" and "num_layers" not in params else [])


def _params(value: Any) -> Section:
    """Parameters of a block; a number alone is that of layers."""
    return {"num_layers": value} if isinstance(value, int) else value


def _groups(section: Section, half: str, faults: list[str]) -> list[Group]:
    """The blocks of one half from the pixels, each beginning with a `res_x`; the last one is the middle.

    Faults are added to `faults`; the result is then of no use.
    """
    name = f"{half}_blocks"
    entries = section.get(name)
    if not isinstance(entries, list | tuple) or not entries:
        faults.append(f"{name} is {entries!r}, expected a list of blocks")
        return []
    found = [f for i, e in enumerate(entries) for f in _entry_faults(e, f"{name}[{i}]", PARAMS[half])]
    faults += found
    out: list[Group] = []
    for i, (kind, value) in enumerate(entries if not found else []):
        role = kind if kind in ("res_x", "res_x_y") else "change"
        if role == "res_x":
            out.append({"res_x": _params(value)})
        elif not out or role in out[-1] or "res_x_y" in out[-1]:
            faults.append(f"{name}[{i}] is {kind!r}, expected res_x before it")
        else:
            out[-1][role] = (kind, value) if role == "change" else value
    if out and len(out[-1]) > 1:
        faults.append(f"{name} ends with {entries[-1][0]!r}, expected res_x")
    return out


def _encoder_fields(groups: Sequence[Group], width: int) -> dict[str, Any]:
    """Fields of the encoder, whose convolutions begin `width` wide."""
    widths, kinds = [], []
    for group in groups[:-1]:
        kind, params = group.get("change", (None, {}))
        width *= params.get("multiplier", 2) if kind in DOWN and kind != "compress_all" else 1
        widths.append(width)
        kinds.append(DOWN.get(kind))
    return {
        "block_out_channels": tuple(widths),
        "down_block_types": (DOWN_BLOCK,) * len(widths),
        "layers_per_block": tuple(g["res_x"]["num_layers"] for g in groups),
        "spatio_temporal_scaling": tuple(kind is not None for kind in kinds),
        "downsample_type": tuple("spatial" if kind is None else kind for kind in kinds),
    }


def _decoder_fields(groups: Sequence[Group], base: int) -> dict[str, Any]:
    """Fields of the decoder, which ends `base` wide: every multiplier on the way from the latents divides the width."""
    outer = [(*g.get("change", (None, {})), g.get("res_x_y")) for g in groups[:-1]]
    factors = [params.get("multiplier", 1) for _, params, _ in outer]
    enters = [1 if enter is None else enter.get("multiplier", 2) for *_, enter in outer]
    # Diffusers counts the width before a change of size, and after a block that only narrows.
    widths = [base * math.prod(factors[: i + 1]) * math.prod(enters[:i]) for i in range(len(outer))]
    return {
        "decoder_block_out_channels": tuple(widths),
        "decoder_layers_per_block": tuple(g["res_x"]["num_layers"] for g in groups),
        "decoder_inject_noise": tuple(g["res_x"].get("inject_noise", False) for g in groups),
        "decoder_spatio_temporal_scaling": tuple(kind is not None for kind, *_ in outer),
        "upsample_type": tuple("spatial" if kind is None else UP[kind] for kind, *_ in reversed(outer)),
        "upsample_residual": tuple(params.get("residual", False) for _, params, _ in outer),
        "upsample_factor": tuple(factors),
    }


def vae_config(section: Section, source: str, shapes: Specs) -> LTX2VaeConfig:
    """The video VAE of a section `vae`; one padding mode for both halves where it says only one."""
    faults = _faults(section, VAE_REQUIRED, (*VAE_TABLE, *VAE_OWN))
    found = section.get("_class_name", VAE_REQUIRED["_class_name"])
    if found != VAE_REQUIRED["_class_name"]:  # such as CausalDiffusionVAE: its other fields say nothing here
        faults = [f"_class_name is {found!r}, only {VAE_REQUIRED['_class_name']!r} is supported"]
        raise_faults(f"{source}: not a config of LTX-2's video VAE", faults)
    encoder, decoder = (_groups(section, half, faults) for half in ("encoder", "decoder"))
    if decoder and any("res_x_y" in group for group in decoder[-2:]):
        faults.append("decoder_blocks has res_x_y beside its middle, which is not supported")
    latents = section.get("latent_channels", 128)
    if (base := section.get("encoder_base_channels", latents)) != latents:
        faults.append(f"encoder_base_channels is {base!r}, must equal latent_channels {latents!r}")
    sizes = {"latent_channels": latents, "decoder_base_channels": section.get("decoder_base_channels", 128)}
    faults += [f"{key} is {value!r}, expected int" for key, value in sizes.items() if type(value) is not int]
    raise_faults(f"{source}: not a config of LTX-2's video VAE", faults)
    one = section.get("spatial_padding_mode")
    fields = {
        "decoder_causal": False,
        "timestep_conditioning": "vae.decoder.last_scale_shift_table" in shapes,
        **_fields(section, VAE_TABLE),
        **_encoder_fields(encoder, latents),
        **_decoder_fields(decoder, sizes["decoder_base_channels"]),
    }
    for half, usual in (("encoder", "zeros"), ("decoder", "reflect")):
        name = f"{half}_spatial_padding_mode"
        fields[name] = section.get(name, usual) if one is None else one
    cfg = parse_config(LTX2VaeConfig, fields, source)
    return dataclasses.replace(cfg, spatial_compression_ratio=cfg.factor_s, temporal_compression_ratio=cfg.factor_t)


# --- the audio VAE ----------------------------------------------------------------------------------------------

AUDIO_TABLE = {
    **_same("ch_mult", "num_res_blocks", "in_channels", "resolution", "mel_bins"),
    "ch": "base_channels", "out_ch": "output_channels", "z_channels": "latent_channels",
}  # fmt: skip
AUDIO_REQUIRED = {
    "double_z": True, "attn_resolutions": [], "dropout": 0.0, "mid_block_add_attention": False, "norm_type": "pixel",
    "causality_axis": "height", "downsample_time": False, "resamp_with_conv": True, "attn_type": "vanilla",
    "give_pre_end": False, "tanh_out": False,
}  # fmt: skip
STFT_REQUIRED = {"filter_length": 1024, "win_length": 1024, "causal": True}


def audio_vae_config(section: Section, source: str, shapes: Specs) -> AudioVaeConfig:
    """The audio VAE of a section `audio_vae`: its architecture, and the front end whose spectrograms it takes."""
    faults: list[str] = []
    model, params = (_inner(section, path, faults) for path in ("model.params.ddconfig", "model.params"))
    stft, mel = (_inner(section, f"preprocessing.{name}", faults) for name in ("stft", "mel"))
    rate, bins = params.get("sampling_rate", 16000), mel.get("n_mel_channels", 64)
    if type(rate) is not int:
        raise UserError(f"{source}: sampling_rate is {rate!r}, expected int")
    bands = {"n_mel_channels": model.get("mel_bins", bins), "mel_fmin": 0, "mel_fmax": rate / 2}
    faults += _faults(model, AUDIO_REQUIRED, tuple(AUDIO_TABLE), "ddconfig.")
    faults += _faults(stft, STFT_REQUIRED, ("hop_length",), "stft.") + _faults(mel, bands, (), "mel.")
    raise_faults(f"{source}: not a config of LTX-2's audio VAE", faults)
    fields = {"mel_bins": bins, "sample_rate": rate} | _fields(stft, {"hop_length": "mel_hop_length"})
    return parse_config(AudioVaeConfig, fields | _fields(model, AUDIO_TABLE), source)


# --- the vocoder ------------------------------------------------------------------------------------------------

VOCODER_TABLE = {
    **_same("upsample_kernel_sizes", "output_sampling_rate"),
    "upsample_initial_channel": "hidden_channels", "upsample_rates": "upsample_factors",
    "resblock_kernel_sizes": "resnet_kernel_sizes", "resblock_dilation_sizes": "resnet_dilations",
    "use_bias_at_final": "final_bias",
}  # fmt: skip
VOCODER_OWN = ("resblock", "activation", "use_tanh_at_final", "apply_final_activation")
BWE_TABLE = {"n_fft": "filter_length", "hop_length": "hop_length", "num_mels": "num_mel_channels"}
RESBLOCKS = {"1": "leaky_relu", "AMP1": None}  # and the activation that it has, None for the section's own


def _generator(section: Section, source: str, shapes: Specs, at: str, own: Sequence[str] = (), **fixed) -> Any:
    """One generator, whose leaves have names that begin with `at`; `own` are the section's further fields."""
    faults = _faults(section, {"stereo": True}, (*VOCODER_TABLE, *VOCODER_OWN, *own))
    if (block := section.get("resblock", "1")) not in tuple(RESBLOCKS):
        faults.append(f"resblock is {block!r}, must be one of {', '.join(RESBLOCKS)}")
    raise_faults(f"{source}: not a config of LTX-2's vocoder", faults)
    fields = _fields(section, VOCODER_TABLE) | fixed
    fields["act_fn"] = section.get("activation", "snake") if RESBLOCKS[block] is None else RESBLOCKS[block]
    fields["antialias"] = block == "AMP1"
    last = "tanh" if section.get("use_tanh_at_final", True) else "clamp"
    fields["final_act_fn"] = last if section.get("apply_final_activation", True) else "none"
    for name, key, axis in (("in_channels", "conv_pre.weight", 1), ("out_channels", "conv_post.weight", 0)):
        if (leaf := shapes.get(at + key)) is not None and len(leaf.shape) == 3:
            fields[name] = leaf.shape[axis]
    return parse_config(VocoderConfig, fields, source)


def vocoder_config(section: Section, source: str, shapes: Specs) -> AnyVocoderConfig:
    """The vocoder of a section `vocoder`, which has a part `bwe` where there is bandwidth extension."""
    if "bwe" not in section:
        return _generator(section, source, shapes, "vocoder.")
    faults = _faults(section, {}, ("vocoder", "bwe"))
    low, high = (_inner(section, name, faults) for name in ("vocoder", "bwe"))
    missing = [f"bwe.{k} is missing" for k in ("input_sampling_rate", "output_sampling_rate") if k not in high]
    raise_faults(f"{source}: not a config of LTX-2's vocoder", faults + missing)
    own = (*BWE_TABLE, "input_sampling_rate", "win_size")
    rate = high["input_sampling_rate"]
    first = _generator(low, f"{source}.vocoder", shapes, "vocoder.vocoder.", output_sampling_rate=rate)
    # Whatever the section says, nothing is applied to what the second generator adds.
    at, section = "vocoder.bwe_generator.", {**high, "apply_final_activation": False}
    second = _generator(section, f"{source}.bwe", shapes, at, own)
    window = {"n_fft": "window_length"} if "win_size" not in high else {"win_size": "window_length"}
    sizes = _fields(high, BWE_TABLE) | _fields(high, window)
    faults = [f"bwe: {key} is {value!r}, expected int" for key, value in sizes.items() if type(value) is not int]
    raise_faults(f"{source}: not a config of LTX-2's vocoder", faults)
    return BweVocoderConfig(first, second, **sizes)


# --- the text connectors ----------------------------------------------------------------------------------------

CONNECTOR_TABLE = {
    **_same(*(f"connector_num_{what}" for what in ("attention_heads", "layers", "learnable_registers"))),
    **_same("connector_attention_head_dim"), "connector_apply_gated_attention": "gated_attn",
}  # fmt: skip
CONNECTOR_REQUIRED = {
    "connector_norm_output": True, "connector_ff_bias": True, "caption_projection_first_linear": False,
    "caption_projection_second_linear": False, "caption_proj_input_norm": False,
}  # fmt: skip
CONNECTOR_NOTES = ("connector_learnable_registers_std", "caption_proj_before_connector", "text_encoder_norm_type")
CONNECTOR_MARKS = ("connector_", "audio_connector_", "video_connector_", "caption_proj", "text_encoder_")
TOKEN_NORM = "per_token_rms"
POSITIONS = "connector_positional_embedding_max_pos"
PROJECTION = "text_embedding_projection.{}aggregate_embed.{}"


def connector_config(section: Section, source: str, shapes: Specs) -> ConnectorConfig:
    """The connectors of a section `transformer`: the audio one is like the video one where nothing else is said.

    Features of their own for each stream (`caption_proj_before_connector`) are normalised by token, others by layer.
    """
    audio = tuple(f"audio_{key}" for key in CONNECTOR_TABLE)
    known = (*CONNECTOR_TABLE, *audio, *CONNECTOR_NOTES, POSITIONS)
    faults = _faults({k: v for k, v in section.items() if k.startswith(CONNECTOR_MARKS)}, CONNECTOR_REQUIRED, known)
    own = section.get("caption_proj_before_connector", False)
    if own and (norm := section.get("text_encoder_norm_type", TOKEN_NORM)) != TOKEN_NORM:
        faults.append(f"text_encoder_norm_type is {norm!r}, only {TOKEN_NORM!r} is supported")
    extent = section.get(POSITIONS, [4096])
    if not isinstance(extent, list | tuple) or len(extent) != 1:
        faults.append(f"{POSITIONS} is {extent!r}, expected 1 number")
    raise_faults(f"{source}: not a config of LTX-2's text connectors", faults)
    video = _fields(section, CONNECTOR_TABLE)
    other = video | _fields(section, {f"audio_{key}": ours for key, ours in CONNECTOR_TABLE.items()})
    fields = {f"{stream}_{k}": v for stream, have in (("video", video), ("audio", other)) for k, v in have.items()}
    fields |= {"connector_rope_base_seq_len": extent[0], "rope_type": section.get("rope_type", "split")}
    fields["rope_double_precision"] = section.get("frequencies_precision") == "float64"
    fields |= _fields(section, _same("caption_channels")) | {"per_modality_projections": own}
    return parse_config(ConnectorConfig, fields | _projection_fields(fields, shapes), source)


def _projection_fields(fields: Section, shapes: Specs) -> dict[str, Any]:
    """What the layers say that make features of the text encoder's states."""
    name, usual = "video_" if fields["per_modality_projections"] is True else "", ConnectorConfig()
    out: dict[str, Any] = {"proj_bias": PROJECTION.format(name, "bias") in shapes}
    leaf, width = shapes.get(PROJECTION.format(name, "weight")), fields.get("caption_channels", usual.caption_channels)
    if leaf is not None and len(leaf.shape) == 2 and type(width) is int and width > 0 and leaf.shape[1] % width == 0:
        out["text_proj_in_factor"] = leaf.shape[1] // width
    for stream in ("video", "audio") if name else ():
        both = (f"{stream}_connector_num_attention_heads", f"{stream}_connector_attention_head_dim")
        heads, size = (fields.get(field, getattr(usual, field)) for field in both)
        if type(heads) is type(size) is int:  # else reading the config says so
            out[f"{stream}_hidden_dim"] = heads * size
    return out


# --- the upsamplers ---------------------------------------------------------------------------------------------

UPSAMPLER_TABLE = {
    **_same("in_channels", "mid_channels", "num_blocks_per_stage", "dims", "spatial_upsample", "temporal_upsample"),
    "spatial_scale": "rational_spatial_scale", "rational_resampler": "use_rational_resampler",
}  # fmt: skip
UPSAMPLER_ABSENT = {"mid_channels": 512, "use_rational_resampler": False}  # what is meant where nothing is said


def upsampler_config(section: Section, source: str, shapes: Specs) -> UpsamplerConfig:
    """The upsampler of a file of its own, whose whole config this is."""
    faults = _faults(section, {"_class_name": "LatentUpsampler"}, tuple(UPSAMPLER_TABLE))
    raise_faults(f"{source}: not a config of LTX-2's latent upsampler", faults)
    return parse_config(UpsamplerConfig, UPSAMPLER_ABSENT | _fields(section, UPSAMPLER_TABLE), source)
