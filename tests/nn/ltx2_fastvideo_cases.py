"""FastVideo's folders of tiny LTX-2 models: its converter's rules for names, files and configs, written down apart."""

import json

from ltx2_official_cases import D
from safetensors.torch import save_file

CLASSES = {"vae": "CausalVideoAutoencoder", "audio_vae": "LTX2AudioDecoder", "vocoder": "LTX2Vocoder"}
# Beginnings of official names, and of what becomes of them in which folder; the first one that fits counts.
RULES = [
    (f"{D}audio_embeddings_connector.", "text_encoder", "audio_embeddings_connector."),
    (f"{D}video_embeddings_connector.", "text_encoder", "embeddings_connector."),
    (D, "transformer", ""),
    *((f"{part}.", part, "") for part in CLASSES),
    ("text_embedding_projection.", "text_encoder", ""),
]
TRANSFORMER = (  # fields of the single file's section that the converter keeps
    "num_attention_heads", "attention_head_dim", "num_layers", "cross_attention_dim", "caption_channels", "norm_eps",
    "attention_type", "positional_embedding_theta", "positional_embedding_max_pos", "timestep_scale_multiplier",
    "use_middle_indices_grid", "rope_type", "in_channels", "out_channels", "audio_num_attention_heads",
    "audio_attention_head_dim", "audio_in_channels", "audio_out_channels", "audio_cross_attention_dim",
    "audio_positional_embedding_max_pos", "av_ca_timestep_scale_multiplier",
)  # fmt: skip
# What it notes of every LTX-2.0.
TEXT = {
    "architectures": ["LTX2GemmaTextEncoderModel"], "hidden_size": 3840, "num_hidden_layers": 48,
    "num_attention_heads": 30, "text_len": 1024, "pad_token_id": 0, "eos_token_id": 2, "gemma_model_path": "gemma",
    "gemma_dtype": "bfloat16", "padding_side": "left", "feature_extractor_in_features": 3840 * 49,
    "feature_extractor_out_features": 3840, "connector_num_attention_heads": 30, "connector_attention_head_dim": 128,
    "connector_num_layers": 2, "connector_positional_embedding_theta": 10000.0,
    "connector_positional_embedding_max_pos": [4096], "connector_rope_type": "split",
    "connector_double_precision_rope": True, "connector_num_learnable_registers": 128,
}  # fmt: skip
INDEX = {
    "_class_name": "LTX2Pipeline", "_diffusers_version": "0.33.0.dev0",
    "transformer": ["diffusers", "LTX2Transformer3DModel"], "vae": ["diffusers", "CausalVideoAutoencoder"],
    "text_encoder": ["transformers", "LTX2GemmaTextEncoderModel"], "tokenizer": ["transformers", "AutoTokenizer"],
    "audio_vae": ["diffusers", "LTX2AudioDecoder"], "vocoder": ["diffusers", "LTX2Vocoder"],
}  # fmt: skip


def cut(leaves):
    """Leaves of a single file by folder, under the names that they have there."""
    out = {}
    for key, leaf in leaves.items():
        start, folder, instead = next(rule for rule in RULES if key.startswith(rule[0]))
        out.setdefault(folder, {})[instead + key.removeprefix(start)] = leaf
    return out


def text_config(cfg, **changes):
    """`text_encoder/config.json` of connectors: LTX-2.3's with fields that FastVideo's text encoder has besides."""
    video, audio = cfg.stream("video"), cfg.stream("audio")
    out = TEXT | {
        "hidden_size": cfg.caption_channels, "num_hidden_layers": cfg.text_proj_in_factor - 1,
        "feature_extractor_in_features": cfg.caption_channels * cfg.text_proj_in_factor,
        "feature_extractor_out_features": video.feature_dim, "connector_num_attention_heads": video.heads,
        "connector_attention_head_dim": video.head_dim, "connector_num_layers": video.layers,
        "connector_positional_embedding_theta": cfg.rope_theta, "connector_rope_type": cfg.rope_type,
        "connector_positional_embedding_max_pos": [cfg.connector_rope_base_seq_len],
        "connector_double_precision_rope": cfg.rope_double_precision,
        "connector_num_learnable_registers": video.registers,
    }  # fmt: skip
    out |= {
        "audio_connector_num_attention_heads": audio.heads, "audio_connector_attention_head_dim": audio.head_dim,
        "audio_connector_num_layers": audio.layers,
    }  # fmt: skip
    if cfg.per_modality_projections:
        out |= {
            "caption_proj_before_connector": True, "connector_apply_gated_attention": video.gated,
            "video_feature_extractor_out_features": video.feature_dim,
            "audio_feature_extractor_out_features": audio.feature_dim,
        }  # fmt: skip
    return out | changes


def transformer_config(section, **more):
    """`transformer/config.json` of a single file's section; `more` are LTX-2.3's fields, which the converter drops."""
    kept = {key: section[key] for key in TRANSFORMER if key in section}
    double = section.get("frequencies_precision") == "float64"
    return {**kept, "double_precision_rope": double, "_class_name": "LTX2Transformer3DModel", **more}


def convert(leaves, head, folder, text, **more):
    """Writes the folders of a single file's leaves and header as FastVideo does; `text` is the text encoder's config,
    `more` are further fields of the transformer.
    """
    configs = {part: {part: head[part], "_class_name": name} for part, name in CLASSES.items() if part in head}
    configs |= {"text_encoder": text, "transformer": transformer_config(head["transformer"], **more)}
    for name, own in cut(leaves).items():
        (folder / name).mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in own.items()}, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(configs[name]))
    (folder / "model_index.json").write_text(json.dumps(INDEX))
    return folder
