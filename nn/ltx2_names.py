"""Names of LTX-2's leaves in public files, as transforms from and to Diffusers' names, which are ours.

The official names (Lightricks' single file, ComfyUI, FastVideo's folder) differ from Diffusers' by whole path
components. Single files put `model.diffusion_model.` before them and hold other models (VAEs, vocoder, text) beside.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from core.checkpoint import unknown
from core.errors import UserError, raise_faults
from core.rules import rename
from core.specs import Specs
from core.transforms import Bound, Rule, Transform, bind_rules, move
from nn.ltx2_config import LTX2Config
from nn.ltx2_specs import param_specs

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.", "")
CONNECTORS = ("video_embeddings_connector", "audio_embeddings_connector")  # text models beside the transformer
GATE_NAMES = ("to_gate_logits", "to_gate_compress")  # two spellings of gated attention's weights

OFFICIAL = {
    "proj_in": "patchify_proj",
    "audio_proj_in": "audio_patchify_proj",
    "time_embed": "adaln_single",
    "audio_time_embed": "audio_adaln_single",
    "prompt_adaln": "prompt_adaln_single",
    "audio_prompt_adaln": "audio_prompt_adaln_single",
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
    "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
    "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
    "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
    "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}
"""Path components of Diffusers' names and what they are called officially; all others are equal."""


def official_name(key: str) -> str:
    """A key, or the name of a module, as official files call it, without a prefix."""
    return ".".join(OFFICIAL.get(part, part) for part in key.split("."))


def whole(cfg: LTX2Config) -> LTX2Config:
    """The config of the model with both streams."""
    return dataclasses.replace(cfg, modality="audio_video")


def foreign_keys(cfg: LTX2Config) -> set[str]:
    """Keys of the model with both streams that this one, with `cfg.modality`, lacks: whole names, no patterns."""
    return set(param_specs(whole(cfg))) - set(param_specs(cfg)) if not cfg.crossed else set()


def official_prefix(keys: Iterable[str]) -> str:
    """What stands before the transformer's names in a file. Raises UserError when there is no transformer."""
    keys = list(keys)
    for prefix in PREFIXES:
        if any(key.startswith(f"{prefix}transformer_blocks.") for key in keys):
            return prefix
    places = ", ".join(repr(prefix) for prefix in PREFIXES)
    raise UserError(f"no key with transformer_blocks after any of {places}: {len(keys)} keys, the first is {keys[:1]}")


def bind_names(specs: Specs, names: Mapping[str, str], ignored: set[str], what: str) -> Bound:
    """Moves each `names[key]` to `key`, drops `ignored`, refuses what is missing and whatever else there is.

    Raises UserError that lists every missing and every unexpected key.
    """
    taken = set(names.values())
    faults = [f"missing {name}" for name in names.values() if name not in specs]
    rest = [key for key in specs if key not in taken and key not in ignored]
    faults += [f"unexpected {name}" for name in unknown(rest, taken | ignored)]
    raise_faults(f"{what}: {len(faults)} keys do not fit", faults)
    rules = [move(name, key, specs[name], f"rename {name}") for key, name in names.items()]
    rules += [Rule((key,), (), (), lambda leaf: (), None, "drop") for key in specs if key in ignored]
    return bind_rules(specs, rules, what)


def from_diffusers(cfg: LTX2Config) -> Transform:
    """Diffusers' leaves -> this model's: those of the stream that `cfg.modality` leaves out are dropped, never read.

    Binding raises UserError that lists every missing and every unexpected key.
    """
    names = {key: key for key in param_specs(cfg)}
    return lambda specs: bind_names(specs, names, foreign_keys(cfg), f"LTX-2 ({cfg.modality}) from Diffusers' names")


def _speller(specs: Specs) -> Callable[[str], str]:
    """How a file calls a key: its prefix, the official name, and its spelling of gates."""
    prefix, (ours, other) = official_prefix(specs), GATE_NAMES
    found = other if any(f".{other}." in key for key in specs) else ours
    return lambda key: prefix + official_name(key).replace(f".{ours}.", f".{found}.")


def from_official(cfg: LTX2Config) -> Transform:
    """An official file's leaves, under any of `PREFIXES` -> this model's. Binding raises as `from_diffusers` does.

    Dropped are the other stream, the text connectors, and where there is a prefix all that stands beside it.
    """

    def bind(specs: Specs) -> Bound:
        prefix, spell = official_prefix(specs), _speller(specs)
        beside = {key for key in specs if not key.startswith(prefix)}
        connectors = {key for key in specs if key.removeprefix(prefix).split(".")[0] in CONNECTORS}
        ignored = beside | connectors | {spell(key) for key in foreign_keys(cfg)}
        names = {key: spell(key) for key in param_specs(cfg)}
        return bind_names(specs, names, ignored, f"LTX-2 ({cfg.modality}) from official names")

    return bind


def to_official(cfg: LTX2Config, prefix: str = PREFIXES[0]) -> Transform:
    """This model's leaves, with split projections -> official names after `prefix`; lossless."""
    return rename({key: prefix + official_name(key) for key in param_specs(cfg)})
