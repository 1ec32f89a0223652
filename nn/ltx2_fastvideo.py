"""FastVideo's LTX-2 folders: which files and keys the models around the transformer have, and how they are opened.

FastVideo cuts an official single file into folders. Each has `config.json` and safetensors files, whose leaves keep
their official names without that of the part in front:

    vae/           CausalVideoAutoencoder     encoder.*, decoder.*, per_channel_statistics.*
    audio_vae/     LTX2AudioDecoder           the same; without encoder.* it only decodes
    vocoder/       LTX2Vocoder                conv_pre.*, ups.*, resblocks.*, conv_post.*; those of a vocoder with
                                              bandwidth extension below vocoder.*, beside bwe_generator.*, mel_stft.*
    text_encoder/  LTX2GemmaTextEncoderModel  the connectors: aggregate_embed.*, embeddings_connector.*,
                                              audio_embeddings_connector.*; Gemma 3 stands in text_encoder/gemma/

The first three configs hold a section of the single file's header under the part's name (`{"_class_name": ...,
"vae": {...}}`), the last one has fields of its own. The tokenizer is in `tokenizer/`, else beside Gemma. Trees come
with Diffusers' names, which are ours.

Source: FastVideo's `convert_ltx2_weights.py`, `component_loader.py` and `encoders/gemma.py`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.checkpoint import LazyTree, open_checkpoint
from core.errors import UserError, nearest_names, raise_faults
from core.files import read_json
from core.save import check_metadata
from core.specs import Specs, check
from nn.ltx2_connectors import ConnectorConfig
from nn.ltx2_names import CONNECTORS
from nn.ltx2_official_parts import NOTES, PARTS
from nn.ltx2_official_sections import connector_config

CLASS_NAMES = {"vae": "CausalVideoAutoencoder", "audio_vae": "LTX2AudioDecoder", "vocoder": "LTX2Vocoder"}
TEXT_CLASS = "LTX2GemmaTextEncoderModel"
ENCODER, STATISTICS = "encoder.", "per_channel_statistics."

# What the connectors' modules are called here, first by official name, and other names that FastVideo reads as well.
MODULES = {f"{CONNECTORS[0]}.": "embeddings_connector."}
OTHER_NAMES = {
    "feature_extractor.": "", "feature_extractor_linear.": "", "video_connector.": "embeddings_connector.",
    "audio_connector.": "audio_embeddings_connector.", "video_feature_extractor_linear.": "video_aggregate_embed.",
    "audio_feature_extractor_linear.": "audio_aggregate_embed.",
}  # fmt: skip

# Entries of text_encoder/config.json. Those of connectors are the official section's, but for these three.
ROPE, DOUBLE, THETA = "connector_rope_type", "connector_double_precision_rope", "connector_positional_embedding_theta"
CONNECTOR_FIELDS = (
    "connector_num_attention_heads", "connector_attention_head_dim", "connector_num_layers",
    "connector_num_learnable_registers", "connector_positional_embedding_max_pos", "connector_apply_gated_attention",
    "audio_connector_num_attention_heads", "audio_connector_attention_head_dim", "audio_connector_num_layers",
    "caption_proj_before_connector",
)  # fmt: skip
WIDTHS = "feature_extractor_in_features", "feature_extractor_out_features"
STREAM_WIDTHS = {name: f"{name}_feature_extractor_out_features" for name in ("video", "audio")}
TEXT_REQUIRED = {"text_len": 1024, "padding_side": "left"}
TEXT_NOTES = (  # Gemma's own, which its folder says too; and what neither FastVideo nor we make use of
    "architectures", "num_hidden_layers", "num_attention_heads", "pad_token_id", "eos_token_id", "gemma_model_path",
    "gemma_dtype", "caption_projection_first_linear", "caption_projection_second_linear", "caption_proj_input_norm",
    "transformers_version", "model_type", "tokenizer_class", "torch_dtype", "dtype",
)  # fmt: skip
TEXT_FIELDS = (
    "hidden_size", ROPE, DOUBLE, THETA, *CONNECTOR_FIELDS, *WIDTHS, *STREAM_WIDTHS.values(), *TEXT_REQUIRED, *TEXT_NOTES
)


# --- names ------------------------------------------------------------------------------------------------------


def part_names(part: str, cfg: Any) -> dict[str, str]:
    """Our keys of a part (of `nn.ltx2_official_parts.PARTS`) and those that a FastVideo folder has."""
    out = {key: name.removeprefix(PARTS[part].prefix) for key, name in PARTS[part].names(cfg, "").items()}
    return {key: _replaced(name, MODULES) for key, name in out.items()} if part == "connectors" else out


def _replaced(name: str, starts: Mapping[str, str]) -> str:
    """A name with another beginning, by the table."""
    start = next((start for start in starts if name.startswith(start)), "")
    return starts.get(start, "") + name.removeprefix(start)


def _spelled(names: Mapping[str, str], tree: LazyTree) -> dict[str, str]:
    """The names with those that a file calls otherwise; where it has both, the converter's."""
    found = {_replaced(key, OTHER_NAMES): key for key in tree}
    return {key: name if name in tree else found.get(name, name) for key, name in names.items()}


def _renamed(tree: LazyTree, names: Mapping[str, str], wanted: Specs) -> LazyTree:
    """The tree under our names. Raises UserError with every key that is missing, too much or misshapen, as the file
    has it.
    """
    notes = {f"{STATISTICS}{note}" for note in NOTES if any(name.startswith(STATISTICS) for name in names.values())}
    leaves = {key: leaf for key, leaf in tree.items() if key not in notes}
    check(leaves, {name: wanted[key] for key, name in names.items()}, what=_files(tree))
    return LazyTree({key: leaves[name] for key, name in names.items()}, tree.metadata, tree.files)


def _files(tree: LazyTree) -> str:
    return ", ".join(map(str, tree.files))


# --- the autoencoders and the vocoder ---------------------------------------------------------------------------


def is_vocoder(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of FastVideo's vocoder; Diffusers' has the same class, and no section."""
    return config.get("_class_name") == CLASS_NAMES["vocoder"] and "vocoder" in config


def open_part(folder: str | Path, part: str) -> tuple[LazyTree, Any]:
    """FastVideo's `vae/`, `audio_vae/` or `vocoder/`, opened but not read, and its config.

    The tree of an audio VAE that only decodes has no leaves of an encoder, see `encodes`.

    Raises:
        UserError: another class, entries of the config that cannot be used, and every missing, unexpected or misshapen
            key, with the file; before any tensor is read.
    """
    folder, found = Path(folder), PARTS[part]
    path = folder / "config.json"
    section, tree = _section(path, part), open_checkpoint(folder)
    check_metadata(tree, CLASS_NAMES[part])
    shapes = {found.prefix + key: spec for key, spec in tree.specs.items()}
    cfg = found.read(section, f"{path}, {part}", shapes)
    names = part_names(part, cfg)
    if part == "audio_vae" and not encodes(tree):
        names = {key: name for key, name in names.items() if not name.startswith(ENCODER)}
    return _renamed(tree, names, found.param_specs(cfg)), cfg


def encodes(tree: Mapping[str, Any]) -> bool:
    """Whether an autoencoder has an encoder: FastVideo itself reads the decoder of an audio VAE alone."""
    return any(key.startswith(ENCODER) for key in tree)


def _section(path: Path, part: str) -> Mapping[str, Any]:
    """The section of a part in its `config.json`."""
    config = _mapping(path)
    faults = [f"unknown entry {key}" for key in config if key != part and not key.startswith("_")]
    if (name := config.get("_class_name")) != CLASS_NAMES[part]:
        faults.insert(0, f"_class_name is {name!r}, expected {CLASS_NAMES[part]!r}")
    if not isinstance(section := config.get(part), Mapping):
        faults.append(f"{part} is {section!r}, expected an object: the section of the single file's header")
    raise_faults(f"{path}: not FastVideo's config of a {part}", faults)
    return section


def _mapping(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise UserError(f"{path}: {type(config).__name__}, expected an object")
    return config


# --- text -------------------------------------------------------------------------------------------------------


def is_text_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of FastVideo's `text_encoder/`."""
    return config.get("architectures") == [TEXT_CLASS]


def open_connectors(folder: str | Path) -> tuple[LazyTree, ConnectorConfig]:
    """The connectors in FastVideo's `text_encoder/`, opened but not read, and their config. Errors: see `open_part`."""
    folder = Path(folder)
    path, part = folder / "config.json", PARTS["connectors"]
    config, tree = _mapping(path), open_checkpoint(folder)
    check_metadata(tree, TEXT_CLASS)
    official = {_official(_replaced(key, OTHER_NAMES)): spec for key, spec in tree.specs.items()}
    cfg = text_config(config, str(path), official, _transformer(folder))
    return _renamed(tree, _spelled(part_names("connectors", cfg), tree), part.param_specs(cfg)), cfg


def _official(name: str) -> str:
    """What the single file calls a leaf of the features' layers; connectors keep their names, which tell nothing."""
    return PARTS["connectors"].prefix + name if "aggregate_embed." in name else name


def _transformer(folder: Path) -> dict[str, Any]:
    """The config of the transformer in the same pipeline, which says what the text encoder's leaves open."""
    path = folder.parent / "transformer" / "config.json"
    return _mapping(path) if path.is_file() else {}


def text_config(
    config: Mapping[str, Any], source: str, shapes: Specs, transformer: Mapping[str, Any]
) -> ConnectorConfig:
    """The connectors of a `text_encoder/config.json`.

    Args:
        shapes: of the leaves, projections under their official names.
        transformer: config of the transformer, FastVideo's: where the type of RoPE is not said it is the transformer's,
            and frequencies are doubles where either says so.

    Raises:
        UserError: another class, and every entry that is unknown or cannot be used.
    """
    faults = [] if is_text_encoder(config) else [f"architectures is {config.get('architectures')!r}, not {TEXT_CLASS}"]
    given = {key: value for key, value in config.items() if not key.startswith("_")}
    faults += [f"unknown entry {key}{nearest_names(key, TEXT_FIELDS)}" for key in given if key not in TEXT_FIELDS]
    for key, only in TEXT_REQUIRED.items():
        faults += [f"{key} is {given[key]!r}, only {only!r} is supported"] if given.get(key, only) != only else []
    double, theta = given.get(DOUBLE, False), given.get(THETA, ConnectorConfig.rope_theta)
    faults += [f"{DOUBLE} is {double!r}, expected true or false"] if not isinstance(double, bool) else []
    faults += [f"{THETA} is {theta!r}, expected a number"] if type(theta) not in (int, float) else []
    raise_faults(f"{source}: not a config of FastVideo's text encoder", faults)
    double = double or transformer.get("double_precision_rope") is True
    section = {key: given[key] for key in CONNECTOR_FIELDS if key in given} | {
        "caption_channels": given.get("hidden_size"),
        "rope_type": given.get(ROPE, transformer.get("rope_type", "split")),
        "frequencies_precision": "float64" if double else "float32",
    }
    cfg = dataclasses.replace(connector_config(section, source, shapes), rope_theta=float(theta))
    raise_faults(f"{source}: its widths are not those of its connectors", _width_faults(given, cfg))
    return cfg


def _width_faults(config: Mapping[str, Any], cfg: ConnectorConfig) -> list[str]:
    """Widths of the features' layers that are not those of the connectors and of the weights."""
    widths = {WIDTHS[0]: cfg.caption_channels * cfg.text_proj_in_factor}
    if not cfg.per_modality_projections or config.get(STREAM_WIDTHS["video"]) is None:
        widths[WIDTHS[1]] = cfg.stream("video").feature_dim
    if cfg.per_modality_projections:
        widths |= {key: cfg.stream(name).feature_dim for name, key in STREAM_WIDTHS.items()}
    wrong = [key for key, width in widths.items() if config.get(key) not in (None, width)]
    return [f"{key} is {config[key]!r}, expected {widths[key]}" for key in wrong]


def gemma_folder(folder: str | Path) -> Path:
    """Where Gemma 3 stands for FastVideo's `text_encoder/`: `gemma/` in it, or what the pipeline's index says."""
    folder = Path(folder)
    index = folder.parent / "model_index.json"
    noted = _mapping(index).get("gemma_model_path", "") if index.is_file() else ""
    if not isinstance(noted, str):
        raise UserError(f"{index}: gemma_model_path is {noted!r}, expected the path of a folder")
    return folder.parent / noted if noted else folder / "gemma"


def tokenizer_folder(folder: str | Path) -> Path:
    """Where the tokenizer stands for FastVideo's `text_encoder/`: `tokenizer/` beside it, else with Gemma."""
    beside = Path(folder).parent / "tokenizer"
    return beside if beside.is_dir() else gemma_folder(folder)
