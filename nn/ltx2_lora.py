"""LoRA files of LTX-2: ComfyUI's, Diffusers' and PEFT's key forms, to and from companions of our leaves.

In a tree an adapter of the linear layer `name` is `name.lora_A` `[r, in]`, `name.lora_B` `[out, r]` and
`name.lora_scale` `[]`, alpha / r. A file has `name.lora_A.weight` and `name.lora_B.weight`, and `name.alpha` where
the scale is not 1: Lightricks' own loader knows no alpha, so that files of scale 1 are what all programs read alike.
An adapter of `to_qkv` or `to_kv`, as `nn.ltx2_specs.pack_projections` names them, becomes one for each of its parts.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from core.checkpoint import LazyLeaf, LazyTree, open_checkpoint, unknown
from core.errors import UserError, nearest_names, raise_faults
from core.save import save_file
from core.specs import ParamSpec, Specs
from core.transforms import Bound, Rule, Transform, apply, bind_rules
from nn.ltx2_config import LTX2Config
from nn.ltx2_formats import CLASS_NAMES
from nn.ltx2_names import official_name, whole
from nn.ltx2_specs import CROSS_ATTENTION, SELF_ATTENTION, param_specs

OF_TEXT = ("text_embedding_projection.", "video_embeddings_connector.", "audio_embeddings_connector.")
FORMS = {"comfyui": "diffusion_model.", "diffusers": "transformer.", "peft": "base_model.model."}
SUFFIXES = {
    "lora_A.weight": "A", "lora_B.weight": "B", "lora_down.weight": "A", "lora_up.weight": "B",
    "lora_A.default.weight": "A", "lora_B.default.weight": "B", "alpha": "alpha",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LoraInfo:
    """What a LoRA file says of itself. `reference_*`: how much smaller and faster its reference videos were (IC-LoRA).

    `base_model` is the class of the model it was trained on, `base_version` LTX-2's version; None where a file says
    nothing. `text_layers` counts the layers of the text connectors that the file adapts too; these are not used.
    """

    rank: int | None = None
    alpha: float | None = None
    base_model: str | None = None
    base_version: str | None = None
    reference_downscale_factor: int = 1
    reference_temporal_scale_factor: int = 1
    text_layers: int = 0


def version_of(cfg: LTX2Config) -> str:
    """The version of LTX-2 that a config belongs to, by what sets the versions apart."""
    if not cfg.prompt_tables:
        return "2.0"
    return "2.3" if cfg.ff_bias else "2.5"


def linear_layers(cfg: LTX2Config) -> dict[str, tuple[int, int]]:
    """`{name: (in, out)}` of every linear layer, which is what adapters can sit on."""
    weights = {k.removesuffix(".weight"): s.shape for k, s in param_specs(cfg).items() if k.endswith(".weight")}
    return {name: (shape[1], shape[0]) for name, shape in weights.items() if len(shape) == 2}


def packed_layers(cfg: LTX2Config) -> dict[str, tuple[str, ...]]:
    """`{x.to_qkv: (x.to_q, x.to_k, x.to_v)}` of self-attention, `{x.to_kv: ...}` of every cross-attention."""
    out = {}
    for name in linear_layers(cfg):
        attention, _, last = name.rpartition(".")
        if last == "to_k" and attention.rpartition(".")[2] in (*SELF_ATTENTION, *CROSS_ATTENTION):
            letters = "qkv" if attention.rpartition(".")[2] in SELF_ATTENTION else "kv"
            out[f"{attention}.to_{letters}"] = tuple(f"{attention}.to_{letter}" for letter in letters)
    return out


def _layers(cfg: LTX2Config) -> dict[str, tuple[str, ...]]:
    """`{layer that a file may adapt: our layers}`."""
    return {**{name: (name,) for name in linear_layers(cfg)}, **packed_layers(cfg)}


def _module_names(cfg: LTX2Config, form: str) -> dict[str, str]:
    """`{name in a file of this form: our name}` of every layer that it may adapt."""
    spell = official_name if form == "comfyui" else (lambda name: name)
    return {FORMS[form] + spell(name): name for name in _layers(cfg)}


def form_of(keys: Iterable[str]) -> str:
    """The form of a LoRA file by its keys. Raises UserError for none of them."""
    keys = list(keys)
    found = [form for form, prefix in FORMS.items() if any(key.startswith(prefix) for key in keys)]
    if len(found) != 1:
        forms = ", ".join(f"{prefix} ({form})" for form, prefix in FORMS.items())
        raise UserError(f"not a LoRA of LTX-2: keys must begin with one of {forms}; the first are {keys[:3]}")
    return found[0]


def from_lora(cfg: LTX2Config, *, alpha: float | None = None) -> Transform:
    """A LoRA file's leaves -> companions of the model's leaves.

    Args:
        alpha: of layers without one of their own in the file; None means the rank, so a scale of 1.

    Binding raises UserError that lists every key that matches no layer, every half pair and every shape that does not
    fit. Adapters of the stream that `cfg.modality` leaves out, and those of the text connectors, are dropped.
    """

    def bind(specs: Specs) -> Bound:
        form = form_of(specs)
        names, sizes, ours = _module_names(cfg, form), linear_layers(cfg), _layers(cfg)
        foreign = set(_module_names(whole(cfg), form)) - set(names)
        layers, dropped, faults = _grouped(specs, names, foreign)
        rules = [Rule((key,), (), (), lambda leaf: (), None, "drop") for key in dropped]
        for name, parts in layers.items():
            rows = [sizes[own][1] for own in ours[name]]
            found = _pair_faults(name, parts, (sizes[ours[name][0]][0], sum(rows)), specs)
            faults += found
            rules += [] if found else [_adapter_rule(ours[name], rows, parts, specs, alpha)]
        faults += [] if layers or faults else ["no adapter for any layer of this model"]
        raise_faults(f"LoRA for LTX-2 ({cfg.modality}): {len(faults)} faults", faults)
        return bind_rules(specs, rules, f"LoRA ({form})")

    return bind


def _of_text(module: str) -> bool:
    """Whether a layer of a file, by its name there, is one of the text connectors."""
    return any(part in module for part in OF_TEXT)


def _grouped(specs: Specs, names: Mapping[str, str], foreign: set[str]):
    """`({layer: {"A": key, "B": key, "alpha": key}}, keys of the other stream, faults)`."""
    layers: dict[str, dict[str, str]] = {}
    dropped, faults, strange = [], [], []
    for key in specs:
        suffix = next((s for s in SUFFIXES if key.endswith(f".{s}")), None)
        module = key if suffix is None else key.removesuffix(f".{suffix}")
        if suffix is None:
            faults.append(f"{key}: ends with none of {', '.join(SUFFIXES)}")
        elif module in foreign or _of_text(module):
            dropped.append(key)
        elif module not in names:
            strange.append(module)
        elif SUFFIXES[suffix] in layers.setdefault(names[module], {}):
            faults.append(f"{key}: a second {SUFFIXES[suffix]} of {names[module]}")
        else:
            layers[names[module]][SUFFIXES[suffix]] = key
    faults += [f"no such layer: {module}" for module in unknown(list(dict.fromkeys(strange)), names)]
    return layers, dropped, faults


def _pair_faults(name: str, parts: Mapping[str, str], size: tuple[int, int], specs: Specs) -> list[str]:
    """What keeps the leaves of one layer from being an adapter."""
    missing = [part for part in ("A", "B") if part not in parts]
    if missing:
        return [f"{name}: lora_{missing[0]} is missing beside {', '.join(parts.values())}"]
    a, b = (specs[parts[part]].shape for part in ("A", "B"))
    rank = a[0] if a else 0
    if a != (rank, size[0]) or b != (size[1], rank) or rank < 1:
        return [f"{name}: lora_A {list(a)} and lora_B {list(b)}, expected [r, {size[0]}] and [{size[1]}, r]"]
    if "alpha" in parts and specs[parts["alpha"]].shape not in ((), (1,)):
        return [f"{name}: alpha has shape {list(specs[parts['alpha']].shape)}, expected one number"]
    return []


def _adapter_rule(
    names: Sequence[str], rows: Sequence[int], parts: Mapping[str, str], specs: Specs, alpha: float | None
) -> Rule:
    """An adapter of a file as one for each of the layers `names`, whose outputs are `rows` of its own."""
    a, b = (specs[parts[part]] for part in ("A", "B"))
    rank = a.shape[0]
    sources = tuple(parts[part] for part in ("A", "B", "alpha") if part in parts)

    def forward(a: Tensor, b: Tensor, own: Tensor | None = None) -> tuple[Tensor, ...]:
        numerator = torch.tensor(rank if alpha is None else alpha) if own is None else own.reshape(())
        scale = numerator.to(torch.float32) / rank
        if len(names) == 1:
            return a, b, scale
        return tuple(x for part in b.split(list(rows)) for x in (a.clone(), part.clone(), scale.clone()))

    def inverse(*leaves: Tensor) -> tuple[Tensor, ...]:
        a, b, scale = leaves[0], torch.cat(leaves[1::3]) if len(names) > 1 else leaves[1], leaves[2]
        if "alpha" not in parts:
            return a, b
        stored = specs[parts["alpha"]]
        return a, b, (scale * rank).to(stored.dtype).reshape(stored.shape)

    targets = tuple(f"{name}.lora_{part}" for name in names for part in ("A", "B", "scale"))
    one = lambda n: (a, dataclasses.replace(b, shape=(n, rank)), ParamSpec((), torch.float32))  # noqa: E731
    wanted = tuple(spec for n in rows for spec in one(n))
    return Rule(sources, targets, wanted, forward, inverse, f"LoRA of {', '.join(names)}")


def open_lora(path: str | Path, cfg: LTX2Config, *, other_version: bool = False) -> tuple[LazyTree, LoraInfo]:
    """A LoRA file's adapters as companions of our leaves, not read, and what its header says.

    Args:
        other_version: take it though it was trained on another version of LTX-2.

    Raises:
        UserError: another model or version, keys or shapes that fit no layer; before any tensor is read.
    """
    tree = open_checkpoint(path)
    info = read_info(tree.metadata, str(path))
    faults = []
    if info.base_model not in (None, *CLASS_NAMES.values()):
        faults.append(f"it was trained on {info.base_model!r}, wanted {CLASS_NAMES['audio_video']!r}")
    if info.base_version not in (None, version_of(cfg)) and not other_version:
        faults.append(f"it was trained on LTX-2 version {info.base_version}, this model is {version_of(cfg)}")
    raise_faults(f"{path}: a LoRA of another model", faults)
    try:
        found = apply(tree, from_lora(cfg, alpha=info.alpha)(tree.specs))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    ranks = {key: leaf.shape[0] for key, leaf in found.items() if key.endswith(".lora_A")}
    other = [f"{key} has rank {rank}" for key, rank in ranks.items() if info.rank not in (None, rank)]
    raise_faults(f"{path}: its header says rank {info.rank}", other)
    text = {key.rpartition(".lora_")[0] or key for key in tree if _of_text(key)}
    return found, dataclasses.replace(info, text_layers=len(text))


def read_info(metadata: Mapping[str, str], source: str) -> LoraInfo:
    """What a header says. Raises UserError for entries that are no numbers where numbers belong."""
    faults, found = [], {}
    for name in ("rank", "alpha", "reference_downscale_factor", "reference_temporal_scale_factor"):
        if name not in metadata:
            continue
        try:
            number = float(metadata[name])
        except ValueError:
            number = math.nan
        if name == "alpha" and math.isfinite(number):
            found[name] = number
        elif name != "alpha" and number >= 1 and number.is_integer():
            found[name] = int(number)
        else:
            wanted = "a finite number" if name == "alpha" else "an integer of at least 1"
            faults.append(f"{name} is {metadata[name]!r}, expected {wanted}")
    raise_faults(f"{source}: metadata of a LoRA", faults)
    texts = {name: metadata.get(name) for name in ("base_model", "base_version")}
    return LoraInfo(**found, **texts)


def save_lora(
    path: str | Path, adapters: Mapping[str, Tensor | LazyLeaf], cfg: LTX2Config, *, rank: int, alpha: float,
    form: str = "comfyui", downscale: int = 1, temporal_scale: int = 1,
) -> None:  # fmt: skip
    """Writes adapters as one LoRA file.

    Args:
        adapters: `name.lora_A`, `name.lora_B`, `name.lora_scale`; all of one rank and scale `alpha / rank`.
        form: one of `FORMS`. downscale, temporal_scale: factors of the references it was trained with (IC-LoRA).

    Raises:
        UserError: an unknown form, a leaf of no layer, a half pair, or a scale other than `alpha / rank`.
    """
    if form not in FORMS:
        raise UserError(f"form is {form!r}, must be one of {', '.join(FORMS)}")
    out, faults = {}, []
    ours = {name: theirs for theirs, name in _module_names(cfg, form).items() if name in linear_layers(cfg)}
    for name in dict.fromkeys(key.rpartition(".")[0] for key in adapters):
        found = _saved_faults(name, ours, adapters, rank, alpha)
        faults += found
        if not found:
            out |= {f"{ours[name]}.lora_{part}.weight": adapters[f"{name}.lora_{part}"] for part in ("A", "B")}
            out |= {} if alpha == rank else {f"{ours[name]}.alpha": torch.tensor(float(alpha))}
    raise_faults(f"{path}: adapters cannot be saved", faults)
    info = dataclasses.asdict(
        LoraInfo(rank, alpha, CLASS_NAMES[cfg.modality], version_of(cfg), downscale, temporal_scale)
    )  # fmt: skip
    save_file(path, out, {key: str(value) for key, value in info.items() if key != "text_layers"})


def _saved_faults(name: str, ours: Mapping[str, str], adapters, rank: int, alpha: float) -> list[str]:
    """What keeps one layer's adapter from being written."""
    if name not in ours:
        return [f"{name}: no such layer{nearest_names(name, ours)}"]
    missing = [f"{name}.lora_{part}" for part in ("A", "B", "scale") if f"{name}.lora_{part}" not in adapters]
    if missing:
        return [f"missing {', '.join(missing)}"]
    scale = adapters[f"{name}.lora_scale"]
    scale = float(scale.read() if isinstance(scale, LazyLeaf) else scale)
    found = adapters[f"{name}.lora_A"].shape[0]
    if found != rank or abs(scale - alpha / rank) > 1e-6 * max(1.0, abs(scale)):
        return [f"{name}: rank {found} and scale {scale}, expected rank {rank} and scale {alpha / rank}"]
    return []
