"""LTX-2's models written as one official single file: Lightricks' names, and their configs as sections of the header.

The inverse of `ltx2_formats.open_single_file` and `ltx2_official_parts.open_single_part`. Not every config can be said
in such a header: each section is read back, and a config that would come out otherwise is refused.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from core.checkpoint import LazyLeaf
from core.errors import UserError, raise_faults
from core.save import save_file
from core.specs import Specs, check, specs_of
from core.transforms import Transform, apply
from nn import ltx2_official_sections as sections
from nn.ltx2_audio import AudioVaeConfig
from nn.ltx2_connectors import ConnectorConfig
from nn.ltx2_names import to_official
from nn.ltx2_official import official_config, official_section
from nn.ltx2_official_parts import PARTS, to_official_part
from nn.ltx2_specs import param_specs
from nn.ltx2_vae_config import Block, LTX2VaeConfig, decoder_blocks, encoder_blocks
from nn.ltx2_vocoder_config import AnyVocoderConfig, VocoderConfig

# A model's leaves under our names, and its config, as what opens it gives them.
Model = tuple[Mapping[str, Tensor | LazyLeaf], Any]
SIZES = {(1, 2): "space", (2, 1): "time", (2, 2): "all"}  # by factors of time and space


def _said(table: Mapping[str, str], cfg: Any, prefix: str = "") -> dict[str, Any]:
    """The official fields of a table, with the values that a config has under our names."""
    return {official: getattr(cfg, prefix + ours) for official, ours in table.items()}


# --- sections ---------------------------------------------------------------------------------------------------


def _down_entries(block: Block) -> list[list[Any]]:
    """A block of the encoder and the change of size behind it."""
    out, change = [["res_x", {"num_layers": block.layers}]], block.change
    if change is not None:
        size, (before, after) = SIZES[change.factor_t, change.factor_s], change.widths
        multiplied = {"multiplier": after // before}
        out.append([f"compress_{size}", {}] if change.strided else [f"compress_{size}_res", multiplied])
    return out


def _up_entries(block: Block) -> list[list[Any]]:
    """A block of the decoder, the change of size before it, and the block that narrows before that."""
    out, change = [["res_x", {"num_layers": block.layers, "inject_noise": block.noise}]], block.change
    if change is not None:
        params = {"multiplier": change.widths[0] // change.widths[1]}
        params |= {"residual": True} if change.shortcut else {}
        out.append([f"compress_{SIZES[change.factor_t, change.factor_s]}", params])
    if block.enter is not None:
        out.append(["res_x_y", {"multiplier": block.enter // block.width}])
    return out


def _vae_section(cfg: LTX2VaeConfig) -> dict[str, Any]:
    """The section `vae`, whose lists of blocks run from the pixels to the latents."""
    modes = {half: getattr(cfg, f"{half}_spatial_padding_mode") for half in ("encoder", "decoder")}
    return {
        **sections.VAE_REQUIRED,
        **_said(sections.VAE_TABLE, cfg),
        "encoder_blocks": [entry for block in encoder_blocks(cfg) for entry in _down_entries(block)],
        "decoder_blocks": [entry for block in reversed(decoder_blocks(cfg)) for entry in _up_entries(block)],
        "encoder_base_channels": cfg.latent_channels,
        "decoder_base_channels": cfg.pixel_width,
        **{f"{half}_spatial_padding_mode": mode for half, mode in modes.items()},
    }


def _audio_vae_section(cfg: AudioVaeConfig) -> dict[str, Any]:
    model = {**sections.AUDIO_REQUIRED, **_said(sections.AUDIO_TABLE, cfg)}
    stft = {**sections.STFT_REQUIRED, "hop_length": cfg.mel_hop_length}
    mel = {"n_mel_channels": cfg.mel_bins, "mel_fmin": 0, "mel_fmax": cfg.sample_rate / 2}
    return {
        "model": {"params": {"ddconfig": model, "sampling_rate": cfg.sample_rate}},
        "preprocessing": {"stft": stft, "mel": mel},
    }


def _generator_section(cfg: VocoderConfig) -> dict[str, Any]:
    block = "AMP1" if cfg.antialias else "1"
    return _said(sections.VOCODER_TABLE, cfg) | {
        "stereo": True, "resblock": block, "activation": cfg.act_fn, "use_tanh_at_final": cfg.final_act_fn == "tanh",
        "apply_final_activation": cfg.final_act_fn != "none",
    }  # fmt: skip


def _vocoder_section(cfg: AnyVocoderConfig) -> dict[str, Any]:
    """The section `vocoder`; of two generators, the second says at which rate it finds what the first made."""
    if isinstance(cfg, VocoderConfig):
        return _generator_section(cfg)
    low, high = _generator_section(cfg.vocoder), _generator_section(cfg.bwe)
    high |= {"input_sampling_rate": low.pop("output_sampling_rate"), "win_size": cfg.window_length}
    return {"vocoder": low, "bwe": high | _said(sections.BWE_TABLE, cfg)}


def _connector_section(cfg: ConnectorConfig) -> dict[str, Any]:
    """What the section `transformer` says of the connectors."""
    audio = {f"audio_{key}": ours for key, ours in sections.CONNECTOR_TABLE.items()}
    return {
        **sections.CONNECTOR_REQUIRED,
        **_said(sections.CONNECTOR_TABLE, cfg, "video_"),
        **_said(audio, cfg, "audio_"),
        sections.POSITIONS: [cfg.connector_rope_base_seq_len],
        "caption_channels": cfg.caption_channels,
        "caption_proj_before_connector": cfg.per_modality_projections,
        "rope_type": cfg.rope_type,
        "frequencies_precision": "float64" if cfg.rope_double_precision else "float32",
    }


WRITERS = {  # the transformer's fields win over what its section says of the connectors
    "connectors": ("transformer", _connector_section), "transformer": ("transformer", official_section),
    "vae": ("vae", _vae_section), "audio_vae": ("audio_vae", _audio_vae_section),
    "vocoder": ("vocoder", _vocoder_section),
}  # fmt: skip


def official_sections(configs: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a single file's header for models by name: `transformer`, and those of `ltx2_official_parts`.

    Raises UserError for another name, and with every field of every config that reading would give another value.
    """
    strange = [f"{name} is none of {', '.join(WRITERS)}" for name in configs if name not in WRITERS]
    raise_faults("models of a single file", strange)
    out: dict[str, Any] = {}
    for name, (section, write) in WRITERS.items():
        if name in configs:
            out.setdefault(section, {}).update(write(configs[name]))
    out = json.loads(json.dumps(out))  # as a reader finds it
    losses = [fault for name, cfg in configs.items() for fault in _losses(name, cfg, out)]
    raise_faults("these configs have no official form", losses)
    return out


def _losses(name: str, cfg: Any, written: Mapping[str, Any]) -> list[str]:
    """Fields of a config that its section does not give back."""
    section = written[WRITERS[name][0]]
    try:
        if name == "transformer":
            found = official_config(section, name)
        else:
            found = PARTS[name].read(section, name, _renamed(name, cfg)(_wanted(name, cfg)).specs)
    except UserError as error:
        return [str(error)]
    if type(found) is not type(cfg):
        return [f"{name} is a {type(cfg).__name__}, would be read as a {type(found).__name__}"]
    if isinstance(cfg, LTX2VaeConfig):  # a note, which may be left out
        ratios = {"spatial_compression_ratio": cfg.factor_s, "temporal_compression_ratio": cfg.factor_t}
        cfg = dataclasses.replace(cfg, **ratios)
    values = [(f.name, getattr(cfg, f.name), getattr(found, f.name)) for f in dataclasses.fields(cfg)]
    return [f"{name}: {field} is {ours!r}, would be read as {read!r}" for field, ours, read in values if ours != read]


# --- files ------------------------------------------------------------------------------------------------------


def _wanted(name: str, cfg: Any) -> Specs:
    """Specs of a model under our names."""
    return param_specs(cfg) if name == "transformer" else PARTS[name].param_specs(cfg)


def _renamed(name: str, cfg: Any) -> Transform:
    """From our names of a model to official ones."""
    return to_official(cfg) if name == "transformer" else to_official_part(name, cfg)


def save_single_file(path: str | Path, models: Mapping[str, Model]) -> None:
    """Writes models into one official single file, whole or absent, a lazy leaf at a time.

    Args:
        models: `(leaves, config)` of `transformer`, `vae`, `audio_vae`, `vocoder` and `connectors`, or some of them.

    Raises:
        UserError: leaves that do not fit their config, and as `official_sections`; before anything is written.
    """
    header = official_sections({name: cfg for name, (_, cfg) in models.items()})
    out: dict[str, Tensor | LazyLeaf] = {}
    for name, (tree, cfg) in models.items():
        check(tree, _wanted(name, cfg), what=name)
        out |= apply(tree, _renamed(name, cfg)(specs_of(tree)))
    save_file(path, out, {"config": json.dumps(header)})
