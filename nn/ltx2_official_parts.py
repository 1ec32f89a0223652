"""LTX-2's smaller models in official files: found beside the transformer, checked, and renamed, before any is read.

The single files of a release hold the video VAE (`vae.*`), the audio VAE (`audio_vae.*`), the vocoder (`vocoder.*`)
and the text connectors (`text_embedding_projection.*` and, among the transformer's names, `*_embeddings_connector.*`),
with their configs as sections of the JSON in the header. Upsamplers are files of their own, under Diffusers' names.
Trees come with Diffusers' names, which are ours; renaming loses nothing but the three notes on a VAE's latents.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from core.checkpoint import LazyTree, open_checkpoint
from core.errors import UserError
from core.rules import rename
from core.specs import Specs, check
from core.transforms import Bound, Transform, apply
from nn import ltx2_audio, ltx2_connectors, ltx2_upsampler, ltx2_vae, ltx2_vocoder, ltx2_vocoder_config
from nn import ltx2_official_sections as sections
from nn.ltx2_connectors import ConnectorConfig
from nn.ltx2_names import CONNECTORS, PREFIXES, bind_names
from nn.ltx2_upsampler import UpsamplerConfig
from nn.ltx2_vae_config import LTX2VaeConfig, decoder_blocks, encoder_blocks
from nn.ltx2_vocoder_config import AnyVocoderConfig

STATISTICS = {
    "latents_mean": "per_channel_statistics.mean-of-means",
    "latents_std": "per_channel_statistics.std-of-means",
}
NOTES = ("channel", "mean-of-stds", "mean-of-stds_over_std-of-means")  # statistics that no model uses
VAE_LEAVES = {"time_embedder": "last_time_embedder", "scale_shift_table": "last_scale_shift_table"}
VOCODER = {
    "conv_in": "conv_pre", "conv_out": "conv_post", "upsamplers": "ups", "resnets": "resblocks", "act_out": "act_post",
}  # fmt: skip
CONNECTOR = {"transformer_blocks": "transformer_1d_blocks", "norm_q": "q_norm", "norm_k": "k_norm"}
PROJECTIONS = "text_embedding_projection."


# --- names ------------------------------------------------------------------------------------------------------


def _vae_modules(cfg: LTX2VaeConfig) -> dict[str, str]:
    """Modules of the blocks and their official names: one list per half, in which changes of size count as blocks."""
    out: dict[str, str] = {}
    for half, blocks in (("encoder.down_blocks", encoder_blocks(cfg)), ("decoder.up_blocks", decoder_blocks(cfg))):
        places = (f"{half}.{i}" for i in itertools.count())
        for block in blocks:
            around = [f"{block.name}.conv_in"] if block.enter is not None else []
            around += [block.change.name] if block.change is not None else []
            # The encoder's blocks come before their change of size, the decoder's behind.
            modules = [block.name, *around] if half.startswith("encoder") else [*around, block.name]
            out |= dict(zip(modules, places, strict=False))
    return out


def _vae_name(key: str, modules: Mapping[str, str]) -> str:
    if key in STATISTICS:
        return STATISTICS[key]
    module = max((m for m in modules if key.startswith(f"{m}.")), key=len, default=None)
    if module is not None:
        return modules[module] + key.removeprefix(module).replace(".resnets.", ".res_blocks.", 1)
    half, leaf, *rest = key.split(".")
    return ".".join([half, VAE_LEAVES.get(leaf, leaf), *rest])


def _vae_names(cfg: LTX2VaeConfig, prefix: str) -> dict[str, str]:
    modules = _vae_modules(cfg)
    return {key: f"vae.{_vae_name(key, modules)}" for key in ltx2_vae.param_specs(cfg)}


def _audio_names(cfg: ltx2_audio.AudioVaeConfig, prefix: str) -> dict[str, str]:
    return {key: f"audio_vae.{STATISTICS.get(key, key)}" for key in ltx2_audio.param_specs(cfg)}


def _vocoder_name(key: str) -> str:
    """Components by the table; a downsampling filter is the leaf of a module of its own."""
    name = ".".join(VOCODER.get(part, part) for part in key.split("."))
    return name.replace(".downsample.filter", ".downsample.lowpass.filter")


def _vocoder_names(cfg: AnyVocoderConfig, prefix: str) -> dict[str, str]:
    return {key: f"vocoder.{_vocoder_name(key)}" for key in ltx2_vocoder.param_specs(cfg)}


def _connector_name(key: str, prefix: str) -> str:
    module, *rest = key.split(".")
    stream, kind = module.removesuffix("_text_proj_in"), f"{module.split('_')[0]}_embeddings_connector"
    if module.endswith("text_proj_in"):
        stream = "" if module == "text_proj_in" else f"{stream}_"
        return ".".join([f"{PROJECTIONS}{stream}aggregate_embed", *rest])
    return prefix + ".".join([kind, *(CONNECTOR.get(part, part) for part in rest)])


def _connector_names(cfg: ConnectorConfig, prefix: str) -> dict[str, str]:
    return {key: _connector_name(key, prefix) for key in ltx2_connectors.param_specs(cfg)}


# --- the parts --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """One model of a single file.

    Attributes:
        section: of the header's config. prefix: what its names begin with; connectors have others too.
        names: config and the transformer's prefix -> our names to official ones. param_specs: leaves of a config.
        read: section, source and shapes under official names -> config. presets: of headers without a section.
        to_json: `config.json` of a Diffusers folder, which is called like the part.
    """

    section: str
    prefix: str
    names: Callable[[Any, str], dict[str, str]]
    param_specs: Callable[[Any], Specs]
    read: Callable[[Mapping[str, Any], str, Specs], Any]
    presets: Mapping[str, Any]
    to_json: Callable[[Any], dict[str, Any]]


PARTS = {
    "vae": Part(
        "vae", "vae.", _vae_names, ltx2_vae.param_specs, sections.vae_config, ltx2_vae.PRESETS, ltx2_vae.to_json
    ),
    "audio_vae": Part(
        "audio_vae", "audio_vae.", _audio_names, ltx2_audio.param_specs, sections.audio_vae_config, ltx2_audio.PRESETS,
        ltx2_audio.to_json,
    ),
    "vocoder": Part(
        "vocoder", "vocoder.", _vocoder_names, ltx2_vocoder.param_specs, sections.vocoder_config, ltx2_vocoder.PRESETS,
        ltx2_vocoder_config.to_json,
    ),
    "connectors": Part(
        "transformer", PROJECTIONS, _connector_names, ltx2_connectors.param_specs, sections.connector_config,
        ltx2_connectors.PRESETS, ltx2_connectors.to_json,
    ),
}  # fmt: skip


def _part(name: str) -> Part:
    if name not in PARTS:
        raise UserError(f"part is {name!r}, must be one of {', '.join(PARTS)}")
    return PARTS[name]


def _prefix(keys: Iterable[str]) -> str:
    """What stands before the connectors' names: the transformer's prefix."""
    keys = list(keys)
    starts = ((prefix, f"{prefix}{name}.") for prefix in PREFIXES for name in CONNECTORS)
    return next((prefix for prefix, start in starts if any(key.startswith(start) for key in keys)), PREFIXES[0])


def keys_of_part(part: str, keys: Iterable[str]) -> set[str]:
    """Those of a file's keys that belong to a part; none where the file does not hold it.

    Raises UserError for another name than those of `PARTS`.
    """
    keys, starts = list(keys), (_part(part).prefix,)
    if part == "connectors":
        starts += tuple(f"{_prefix(keys)}{name}." for name in CONNECTORS)
    return {key for key in keys if key.startswith(starts)}


def from_official_part(part: str, cfg: Any) -> Transform:
    """A single file's leaves -> those of one part under our names; everything beside it is dropped, never read.

    Binding raises UserError that lists every missing and every unexpected key of the part.
    """

    def bind(specs: Specs) -> Bound:
        found, own = _part(part), keys_of_part(part, specs)
        ignored = (set(specs) - own) | {f"{found.prefix}per_channel_statistics.{note}" for note in NOTES}
        return bind_names(specs, found.names(cfg, _prefix(specs)), ignored, f"LTX-2's {part} from official names")

    return bind


def to_official_part(part: str, cfg: Any, prefix: str = PREFIXES[0]) -> Transform:
    """One part's leaves -> their names in a single file whose transformer's begin with `prefix`; lossless."""
    return rename(_part(part).names(cfg, prefix))


# --- opening ----------------------------------------------------------------------------------------------------


def header_sections(tree: LazyTree, source: str) -> dict[str, Any]:
    """The config in a file's header, empty where there is none. Raises UserError for one that is no JSON object."""
    try:
        found = json.loads(tree.metadata.get("config", "{}"))
    except ValueError as error:
        raise UserError(f"{source}: the config in its header is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{source}: the config in its header is {type(found).__name__}, expected an object")
    return found


def opened_as(tree: LazyTree, transform: Transform, wanted: Specs, source: str) -> LazyTree:
    """The tree under our names, checked against the keys and shapes `wanted`. Raises UserError naming `source`."""
    try:
        tree = apply(tree, transform(tree.specs))
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    check(tree, wanted, what=source)
    return tree


def _fitting(attempts: Iterator[tuple[str, Any, Callable[[], LazyTree]]], what: str) -> tuple[LazyTree, Any]:
    """The first preset that fits, by keys and shapes. Raises UserError with the first fault of each."""
    faults = []
    for name, cfg, opened in attempts:
        try:
            return opened(), cfg
        except UserError as error:
            first = [line.strip() for line in str(error).splitlines()[1:2]]
            faults.append(f"{name}: {' '.join(first)}")
    raise UserError(f"{what}, and no preset fits:" + "".join(f"\n  - {fault}" for fault in faults))


def part_of(tree: LazyTree, part: str, source: str, *, config: Any | None = None) -> tuple[LazyTree, Any]:
    """One part of an opened single file, and its config; see `open_single_part`."""
    found = _part(part)
    own = keys_of_part(part, tree)
    if not own:
        raise UserError(f"{source}: holds no {part}: no key begins with {found.prefix}")

    def opened(cfg: Any) -> LazyTree:
        return opened_as(tree, from_official_part(part, cfg), found.param_specs(cfg), source)

    if config is None:
        section = header_sections(tree, source).get(found.section)
        if section is None:
            attempts = ((name, cfg, lambda cfg=cfg: opened(cfg)) for name, cfg in found.presets.items())
            return _fitting(attempts, f"{source}: its header has no section {found.section}")
        where = f"{source}, section {found.section} of its header"
        if not isinstance(section, Mapping):
            raise UserError(f"{where}: {type(section).__name__}, expected an object")
        config = found.read(section, where, {key: spec for key, spec in tree.specs.items() if key in own})
    return opened(config), config


def open_single_part(path: str | Path, part: str, *, config: Any | None = None) -> tuple[LazyTree, Any]:
    """A smaller model in an official single file, opened but not read, and its config.

    Args:
        part: `"vae"`, `"audio_vae"`, `"vocoder"` or `"connectors"`.
        config: the architecture, instead of the one in the header. Where there is neither, keys and shapes decide
            between the presets.

    Raises:
        UserError: an unknown part, one that the file does not hold, a section with fields that cannot be used, and
            every missing, unexpected or misshapen key; before any tensor is read.
    """
    return part_of(open_checkpoint(path), part, str(path), config=config)


def open_upsampler_file(path: str | Path, *, config: UpsamplerConfig | None = None) -> tuple[LazyTree, UpsamplerConfig]:
    """A latent upsampler in an official file of its own, opened but not read, and its config.

    Its names are ours. `config` and errors as of `open_single_part`; here the header's whole config is the section.
    """
    tree, source = open_checkpoint(path), str(path)

    def opened(cfg: UpsamplerConfig) -> LazyTree:
        check(tree, ltx2_upsampler.param_specs(cfg), what=source)
        return tree

    if config is None:
        section = header_sections(tree, source)
        if not section:
            attempts = ((name, c, lambda c=c: opened(c)) for name, c in ltx2_upsampler.PRESETS.items())
            return _fitting(attempts, f"{source}: its header has no config")
        config = sections.upsampler_config(section, f"{source}, config in its header", tree.specs)
    return opened(config), config
