"""LTX-2's public checkpoint forms: opened, checked against their config, and renamed, before any tensor is read.

* a Diffusers folder: `config.json` of `LTX2VideoTransformer3DModel` beside safetensors files;
* FastVideo's folder: `config.json` of `LTX2Transformer3DModel` with the official fields, leaves under official names;
* the official single file, with the config as JSON in its header, also as ComfyUI repacks it.

All give a lazy tree with Diffusers' names. `modality` opens one stream alone: the other one's leaves are never read.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from core.checkpoint import LazyLeaf, LazyTree, open_checkpoint
from core.errors import UserError, raise_faults
from core.files import atomic_folder, check_unused, read_json
from core.save import check_metadata
from core.specs import Specs, check
from nn import ltx2_upsampler
from nn.config_files import parse_config, save_model
from nn.ltx2_config import MODALITIES, LTX2Config
from nn.ltx2_names import PREFIXES, from_diffusers, from_official, official_prefix, whole
from nn.ltx2_official import official_config
from nn.ltx2_official_parts import PARTS, keys_of_part, open_upsampler_file, opened_as, part_of
from nn.ltx2_specs import param_specs

CLASS_NAMES = {
    "audio_video": "LTX2VideoTransformer3DModel",
    "video": "LTX2VideoOnlyTransformer3DModel",
    "audio": "LTX2AudioOnlyTransformer3DModel",
}
FASTVIDEO_CLASS = "LTX2Transformer3DModel"
FIXED = {  # entries of Diffusers' config that all LTX-2 checkpoints have alike
    "activation_fn": "gelu-approximate",
    "qk_norm": "rms_norm_across_heads",
    "norm_elementwise_affine": False,
    "attention_bias": True,
    "attention_out_bias": True,
}


def class_name(cfg: LTX2Config) -> str:
    """The model type that files of this config carry: Diffusers' class, or for one stream alone a name of its own."""
    return CLASS_NAMES[cfg.modality]


def to_json(cfg: LTX2Config) -> dict[str, Any]:
    """`config.json` of a Diffusers transformer folder; `use_cross_timestep` only where reading would infer another."""
    fields = json.loads(json.dumps(dataclasses.asdict(cfg)))
    del fields["modality"]
    if cfg.use_cross_timestep == cfg.cross_attn_mod:
        del fields["use_cross_timestep"]
    return {"_class_name": class_name(cfg), **fields, **FIXED}


def from_json(data: Mapping[str, Any], source: str, modality: str | None = None) -> LTX2Config:
    """The config of a `config.json`, Diffusers' or FastVideo's.

    Args:
        source: what errors call the file. modality: the streams to open; None for all that the file has.

    Raises:
        UserError: another model, every unknown or unusable entry, or a stream that the file does not have.
    """
    found = data.get("_class_name")
    given = {key: value for key, value in data.items() if not key.startswith("_")}
    if found == FASTVIDEO_CLASS:
        return with_modality(official_config(given, source), modality, source)
    own = next((m for m, name in CLASS_NAMES.items() if name == found), None)
    if own is None:
        names = ", ".join([*CLASS_NAMES.values(), FASTVIDEO_CLASS])
        raise UserError(f"{source}: _class_name is {found!r}, expected one of {names}")
    given.setdefault("use_cross_timestep", given.get("cross_attn_mod", False))
    for prefix in ("", "audio_"):  # null means as many channels out as in
        if f"{prefix}out_channels" in given and given[f"{prefix}out_channels"] is None:
            given[f"{prefix}out_channels"] = given.get(f"{prefix}in_channels", 128)
    cfg = parse_config(LTX2Config, {**given, "modality": own}, source, fixed=FIXED)
    return with_modality(cfg, modality, source)


def with_modality(cfg: LTX2Config, modality: str | None, source: str) -> LTX2Config:
    """`cfg` for one stream or both. Raises UserError for an unknown word, or a stream that `source` does not have."""
    if modality is None or modality == cfg.modality:
        return cfg
    if modality not in MODALITIES:
        raise UserError(f"modality is {modality!r}, must be one of {', '.join(MODALITIES)}")
    if cfg.modality != "audio_video":
        raise UserError(f"{source}: holds the {cfg.modality} stream only, not {modality}")
    return dataclasses.replace(cfg, modality=modality)


def read_config(folder: str | Path, modality: str | None = None) -> LTX2Config:
    """The config in `folder/config.json`; see `from_json`."""
    return _read(folder, modality)[0]


def _read(folder: str | Path, modality: str | None) -> tuple[LTX2Config, str]:
    """The config of a folder, and its class name."""
    path = Path(folder) / "config.json"
    data = read_json(path)
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected an object, found {type(data).__name__}")
    return from_json(data, str(path), modality), data["_class_name"]


def open_transformer(folder: str | Path, modality: str | None = None) -> tuple[LazyTree, LTX2Config]:
    """A transformer folder, Diffusers' or FastVideo's, opened but not read, and its config.

    Raises:
        UserError: another model, or keys and shapes that do not fit the config; before any tensor is read.
    """
    (cfg, kind), tree = _read(folder, modality), open_checkpoint(folder)
    check_metadata(tree, kind)
    transform = from_official(cfg) if kind == FASTVIDEO_CLASS else from_diffusers(cfg)
    return opened_as(tree, transform, param_specs(cfg), str(folder)), cfg


def open_single_file(
    path: str | Path, modality: str | None = None, *, config: LTX2Config | None = None
) -> tuple[LazyTree, LTX2Config]:  # fmt: skip
    """The transformer in an official single file, opened but not read, and its config.

    Args:
        config: the architecture, for files whose header has none (some repacked ones); else it is read there.

    Raises:
        UserError: no config, or keys and shapes that do not fit it; before any tensor is read.
    """
    return _transformer_of(open_checkpoint(path), modality, config, str(path))


def _transformer_of(
    tree: LazyTree, modality: str | None, config: LTX2Config | None, source: str
) -> tuple[LazyTree, LTX2Config]:
    """`open_single_file` of an opened file."""
    cfg = with_modality(header_config(tree, source) if config is None else config, modality, source)
    return opened_as(tree, from_official(cfg), param_specs(cfg), source), cfg


def header_config(tree: LazyTree, source: str) -> LTX2Config:
    """The config in an official file's header. Raises UserError when there is none, or one that is not LTX-2's."""
    text = tree.metadata.get("config")
    if text is None:
        raise UserError(f"{source}: its header has no config; pass the architecture, such as PRESETS['ltx-2-19b']")
    try:
        section = json.loads(text)["transformer"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{source}: the config in its header has no section transformer") from None
    return official_config(section, f"{source}, config in its header")


UPSAMPLER = "latent_upsampler"


class SingleModel(NamedTuple):
    """A model of a single file, checked and not read: its config, leaves, the specs that they fit, `config.json`."""

    cfg: Any
    leaves: LazyTree
    specs: Specs
    json: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Writes the model's folder in Diffusers' form, a leaf at a time, in its dtype: memory holds two at most."""
        save_model(folder, self.leaves, self.specs, self.json)


def _upsampler(path: str | Path, config: Any | None) -> SingleModel:
    """The model of an upsampler's file, checked."""
    leaves, cfg = open_upsampler_file(path, config=config)
    return SingleModel(cfg, leaves, ltx2_upsampler.param_specs(cfg), ltx2_upsampler.to_json(cfg))


def _model(tree: LazyTree, name: str, config: Any | None, source: str) -> SingleModel:
    """One model of a single file, checked."""
    if name == "transformer":
        leaves, cfg = _transformer_of(tree, None, config, source)
        return SingleModel(cfg, leaves, param_specs(cfg), to_json(cfg))
    leaves, cfg = part_of(tree, name, source, config=config)
    return SingleModel(cfg, leaves, PARTS[name].param_specs(cfg), PARTS[name].to_json(cfg))


def open_single_models(
    path: str | Path, *, upsampler: str | Path | None = None, configs: Mapping[str, Any] | None = None
) -> dict[str, SingleModel]:
    """Every model of an official single file by its folder in Diffusers' form (transformer, vae, audio_vae, vocoder,
    connectors), and that of an `upsampler` file as `latent_upsampler`.

    Args:
        configs: by folder, for models that the header says nothing (or too much) about.

    Raises:
        UserError: all faults of all models, and keys that belong to none.
    """
    tree, source, configs = open_checkpoint(path), str(path), {} if configs is None else configs
    known = ("transformer", *PARTS, *(() if upsampler is None else (UPSAMPLER,)))
    raise_faults("configs", [f"{k} is no model, must be one of {', '.join(known)}" for k in configs if k not in known])
    owned = {name: keys_of_part(name, tree) for name in PARTS}
    if any(key.startswith(f"{prefix}transformer_blocks.") for key in tree for prefix in PREFIXES):
        prefix = official_prefix(tree)
        owned = {"transformer": {key for key in tree if key.startswith(prefix)}, **owned}
    mine, out = set().union(*owned.values()), {}
    faults = [f"{key} belongs to no model that can be converted" for key in tree if key not in mine]
    found = {n: lambda n=n: _model(tree, n, configs.get(n), source) for n, keys in owned.items() if keys}
    if not found:
        faults.append(f"holds none of {', '.join(('transformer', *PARTS))}")
    found |= {} if upsampler is None else {UPSAMPLER: lambda: _upsampler(upsampler, configs.get(UPSAMPLER))}
    for name, opened in found.items():
        try:
            out[name] = opened()
        except UserError as error:
            faults.append(str(error))
    raise_faults(f"{source}: cannot be split", faults)
    return out


def split_single_file(
    path: str | Path,
    output_folder: str | Path,
    *,
    upsampler: str | Path | None = None,
    configs: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Converts an official single file to folders in Diffusers' form: transformer, vae, audio_vae, vocoder, connectors.

    `output_folder` appears at once with all that the file holds; `infer.convert` makes a whole pipeline of it.

    Args:
        output_folder: new, or an empty folder.
        upsampler, configs: see `open_single_models`.

    Returns:
        The folders written.

    Raises:
        UserError: as `open_single_models`, and for a folder in use; before anything is written.
    """
    check_unused(output_folder)
    models = open_single_models(path, upsampler=upsampler, configs=configs)
    with atomic_folder(output_folder) as part:
        for name, model in models.items():
            model.save(part / name)
    return tuple(models)


def merge_base(own: Mapping[str, Tensor | LazyLeaf], base: LazyTree, cfg: LTX2Config) -> dict[str, Tensor | LazyLeaf]:
    """A trained stream together with the untouched other one from `base`, in the order of the whole model.

    Args:
        own: leaves of the model `cfg`. base: a model with both streams of the same architecture, not read here.

    Raises:
        UserError: either tree does not fit.
    """
    check(own, param_specs(cfg), what=f"LTX-2 ({cfg.modality})")
    both = param_specs(whole(cfg))
    check(base, both, what="the base model")
    mixed = [f"{k}: {own[k].dtype}, the base has {base[k].dtype}" for k in own if own[k].dtype != base[k].dtype]
    raise_faults("dtypes of a trained stream and its base differ", mixed)
    return {key: own.get(key, base[key]) for key in both}
