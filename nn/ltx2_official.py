"""LTX-2's architecture as official files write it: the section `transformer` of a single file's config.

Field names are Lightricks'; FastVideo's `config.json` has most of them, and `double_precision_rope` for
`frequencies_precision`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from core.errors import UserError, nearest_names, raise_faults
from nn.config_files import parse_config
from nn.ltx2_config import LTX2Config

SAME = (
    "num_attention_heads", "attention_head_dim", "num_layers", "in_channels", "out_channels", "cross_attention_dim",
    "caption_channels", "norm_eps", "timestep_scale_multiplier", "rope_type", "audio_num_attention_heads",
    "audio_attention_head_dim", "audio_in_channels", "audio_out_channels", "audio_cross_attention_dim", "ff_bias",
    "audio_ff_bias", "use_prompt_adaln_single", "use_keyframes_abs_pos_embedding",
)  # fmt: skip
RENAMED = {
    "positional_embedding_theta": "rope_theta",
    "av_ca_timestep_scale_multiplier": "cross_attn_timestep_scale_multiplier",
    "double_precision_rope": "rope_double_precision",
}
OWN = (
    "frequencies_precision", "positional_embedding_max_pos", "audio_positional_embedding_max_pos",
    "apply_gated_attention", "cross_attention_adaln", "caption_proj_before_connector", "patch_size",
)  # fmt: skip
ABSENT = {  # what a field means where it is left out
    "rope_type": "split",
    "cross_attn_timestep_scale_multiplier": 1,
    "rope_double_precision": False,
}
REQUIRED = {  # variants that no checkpoint uses and this model does not have
    "dropout": 0.0, "attention_bias": True, "num_vector_embeds": None, "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000, "use_linear_projection": False, "only_cross_attention": False,
    "cross_attention_norm": True, "double_self_attention": False, "upcast_attention": False,
    "standardization_norm": "rms_norm", "norm_elementwise_affine": False, "qk_norm": "rms_norm",
    "positional_embedding_type": "rope", "use_middle_indices_grid": True, "causal_temporal_positioning": True,
    "use_audio_video_cross_attention": True, "share_ff": False, "av_cross_ada_norm": True,
}  # fmt: skip
ELSEWHERE = ("connector_", "audio_connector_", "video_connector_", "text_encoder_", "caption_proj")  # text models
NOTES = (
    "attention_type", "norm_num_groups", "use_embeddings_connector", "stg_block_idx", "num_channels_latents",
    "pack_attention_projections",
)  # fmt: skip


def _whole_number(value: Any) -> Any:
    """1000.0, as some headers write a count, as 1000; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _faults(section: Mapping[str, Any]) -> list[str]:
    """Fields that this model does not know, or knows with another value only."""
    known = (*SAME, *RENAMED, *OWN, *REQUIRED, *NOTES)
    faults = []
    for key, value in section.items():
        if key in REQUIRED and value != REQUIRED[key]:
            faults.append(f"{key} is {value!r}, only {REQUIRED[key]!r} is supported")
        elif key not in known and not key.startswith(("_", *ELSEWHERE)):
            faults.append(f"unknown field {key}{nearest_names(key, known)}")
    return faults + _extent_faults(section)


def _extent_faults(section: Mapping[str, Any]) -> list[str]:
    """Lists of another length."""
    faults = []
    lengths = {"positional_embedding_max_pos": 3, "audio_positional_embedding_max_pos": 1, "patch_size": 3}
    for key, count in lengths.items():
        value = section.get(key)
        if value is not None and (not isinstance(value, list | tuple) or len(value) != count):
            faults.append(f"{key} is {value!r}, expected {count} numbers")
    return faults


def official_config(section: Any, source: str) -> LTX2Config:
    """The config that an official section describes, with both streams.

    Raises UserError that names `source` and lists every field that is unknown or has an unsupported value.
    """
    if not isinstance(section, Mapping):
        raise UserError(f"{source}: transformer is {type(section).__name__}, expected an object")
    raise_faults(f"{source}: not a config of LTX-2", _faults(section))
    floats = {f.name for f in dataclasses.fields(LTX2Config) if f.type is float}
    fields = {key: section[key] for key in SAME if section.get(key) is not None}
    fields |= {new: section[old] for old, new in RENAMED.items() if old in section}
    fields = {key: value if key in floats else _whole_number(value) for key, value in fields.items()}
    fields = {**ABSENT, **fields, **_derived(section)}
    return parse_config(LTX2Config, fields, source)


def _derived(section: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ours that official ones stand for together."""
    gated, mod = (section.get(key, False) for key in ("apply_gated_attention", "cross_attention_adaln"))
    out = {"gated_attn": gated, "audio_gated_attn": gated, "cross_attn_mod": mod, "audio_cross_attn_mod": mod}
    out |= {"use_cross_timestep": mod, "perturbed_attn": True}
    out["use_prompt_embeddings"] = section.get("caption_proj_before_connector", False) is False
    if "frequencies_precision" in section:
        out["rope_double_precision"] = section["frequencies_precision"] == "float64"
    if (extents := section.get("positional_embedding_max_pos")) is not None:
        out |= dict(zip(("pos_embed_max_pos", "base_height", "base_width"), map(_whole_number, extents), strict=True))
    if (extents := section.get("audio_positional_embedding_max_pos")) is not None:
        out["audio_pos_embed_max_pos"] = _whole_number(extents[0])
    if (patch := section.get("patch_size")) is not None:
        out |= {"patch_size_t": patch[0], "patch_size": patch[1]}
    return out


def official_section(cfg: LTX2Config) -> dict[str, Any]:
    """The section `transformer` of an official file for this config; `official_config` gives the config back.

    Raises UserError for a config that official files cannot say, such as gates in one stream alone.
    """
    pairs = (("gated_attn", "apply_gated_attention"), ("cross_attn_mod", "cross_attention_adaln"))
    faults = [
        f"{name} {getattr(cfg, name)} and audio_{name} {getattr(cfg, f'audio_{name}')} must be equal"
        for name, _ in pairs
        if getattr(cfg, name) != getattr(cfg, f"audio_{name}")
    ]
    raise_faults("this config has no official form", faults)
    out = {key: getattr(cfg, key) for key in SAME}
    out |= {old: getattr(cfg, new) for old, new in RENAMED.items() if old != "double_precision_rope"}
    out |= {official: getattr(cfg, name) for name, official in pairs}
    return out | {
        **REQUIRED,
        "frequencies_precision": "float64" if cfg.rope_double_precision else "float32",
        "positional_embedding_max_pos": [cfg.pos_embed_max_pos, cfg.base_height, cfg.base_width],
        "audio_positional_embedding_max_pos": [cfg.audio_pos_embed_max_pos],
        "caption_proj_before_connector": not cfg.use_prompt_embeddings,
    }
