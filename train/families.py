"""The kinds of models that can be trained, each as plain functions: everything that training asks of one.

Set-up, steps, layouts, checkpoints and exports know no kind of model, only its `Family`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.checkpoint import LazyTree
from core.errors import UserError
from core.specs import Specs
from core.transforms import Transform
from infer.autoencoders import AudioVae
from infer.encoders import load_text_encoder
from nn import ltx2, ltx2_formats, wan
from nn.ltx2_config import PRESETS as LTX2_PRESETS
from nn.ltx2_config import LTX2Config
from nn.ltx2_specs import pack_projections as pack_ltx2
from nn.wan_formats import CLASS_NAME as WAN_CLASS
from nn.wan_formats import open_transformer as open_wan
from nn.wan_formats import to_json as wan_to_json
from train import ltx2_family, ltx2_sft, sft, wan_family
from train.config import Recipe
from train.rows import Batch


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of model. `cfg` is its config, `role` the section of the recipe that names it.

    Args:
        name: `_target_` of the section. classes: model types of its checkpoints, see `to_json`.
        config: dataclass of the architecture. presets: those by name. given: `(role)` -> fields that a role sets.
        stacks: names of its stacks of layers, in the order of the forward pass.
        param_specs: `(cfg)`. pack: `(cfg)` -> the transform that joins projections of attention.
        open_transformer: `(folder, role)` -> a lazy tree under our names, and its config.
        to_json, from_json: a config as `config.json` of a transformer folder, with its `_class_name`.
        heads: `(cfg)` -> `{field: (heads, size)}` of the attentions.
        cut: whether sequence parallelism has tokens to share, by `(cfg)`.
        frozen: `(role, cfg)` -> keys of leaves that are not updated.
        row_types: those that it can be trained with; row_faults: `(cfg, row type)` -> why this model cannot be.
        streams: `(cfg)` -> those that a data set is read for; None: all that its rows have.
        video: `(cfg)` -> latent channels and patch of its videos; None for a model without.
        tensors, tensor_faults: what is wanted of a sample's tensors, see `train.wan_family`.
        parts: `(cfg)` -> the models around it: None, or why it has no place for one.
        open_text: `(folder, cfg, device, dtype)` -> what embeds captions.
        strides: `(cfg)` -> pixels and frames per latent, as the model's usually are; place_faults: `(cfg, strides,
            audio VAE)` -> why such latents cannot be placed, of a model whose positions are seconds and pixels.
        objective: `(recipe, cfg)` -> what the loss depends on, with its `caption_dropout`, and `weights` by stream.
        empty_caption: `(recipe, cfg, text encoder)` -> what dropout puts in, `{name: [L, D]}`.
        remarks: `(recipe, dataset, text encoder)` -> lines that are said at the start.
        notes: `(recipe, cfg)` -> what a checkpoint notes beside the config.
        defaults: `(recipe, cfg, geometry, empty)` -> what an export notes for sampling, a dataclass.
        draw: `(cfg, objective, key, step, first, batch)` -> draws, with `sigmas` by stream and `to(device)`.
        loss: `(params, cfg, objective, batch, empty, draws, *, dtype, run)` -> `{stream: [B]}`, squared errors summed
            over the stream's elements.
        lengths: `(cfg, batch, empty)` -> tokens of a sample by stream, texts included.
        flops: `(cfg, frozen, lengths)` -> a sample's forward and backward pass.
        save: `(folder, tree, cfg, record, parts, transforms)` writes a pipeline folder.
        merge_base: `(tree, cfg, folder, dtype)` -> a model of one stream completed from a pipeline, and its config.
    """

    name: str
    classes: tuple[str, ...]
    config: type
    presets: Mapping[str, Any]
    given: Callable[[Any], dict[str, Any]]
    stacks: tuple[str, ...]
    param_specs: Callable[[Any], Specs]
    pack: Callable[[Any], Transform]
    open_transformer: Callable[[Path, Any], tuple[LazyTree, Any]]
    to_json: Callable[[Any], dict[str, Any]]
    from_json: Callable[[Mapping[str, Any], str], Any]
    heads: Callable[[Any], dict[str, tuple[int, int]]]
    cut: Callable[[Any], bool]
    frozen: Callable[[Any, Any], frozenset[str]]
    row_types: tuple[str, ...]
    row_faults: Callable[[Any, str], list[str]]
    streams: Callable[[Any], tuple[str, ...] | None]
    video: Callable[[Any], tuple[int, tuple[int, int, int]] | None]
    tensors: Callable[[Any, str], dict[str, dict[str, Any]]]
    tensor_faults: Callable[[Any, Mapping[str, tuple]], list[str]]
    parts: Callable[[Any], dict[str, str | None]]
    open_text: Callable[[Path, Any, torch.device, torch.dtype], Any]
    strides: Callable[[Any], tuple[int, int]]
    place_faults: Callable[[Any, tuple[int, int] | None, AudioVae | None], list[str]]
    objective: Callable[[Recipe, Any], Any]
    empty_caption: Callable[[Recipe, Any, Any], dict[str, Tensor]]
    remarks: Callable[[Recipe, Any, Any], list[str]]
    notes: Callable[[Recipe, Any], dict[str, Any]]
    defaults: Callable[[Recipe, Any, Mapping[str, Any], Mapping[str, Tensor]], Any]
    draw: Callable[..., Any]
    loss: Callable[..., dict[str, Tensor]]
    lengths: Callable[[Any, Batch, Mapping[str, Tensor]], dict[str, int]]
    flops: Callable[[Any, frozenset[str], Mapping[str, int]], int]
    save: Callable[..., None]
    merge_base: Callable[..., tuple[Mapping[str, Any], Any]]


WAN = Family(
    name="wan",
    classes=(WAN_CLASS,),
    config=wan.WanConfig,
    presets=wan.PRESETS,
    given=lambda role: {},
    stacks=wan.STACKS,
    param_specs=wan.param_specs,
    pack=lambda cfg: wan.pack_projections(),
    open_transformer=lambda folder, role: open_wan(folder),
    to_json=wan_to_json,
    from_json=wan_family.from_json,
    heads=lambda cfg: {"num_attention_heads": (cfg.num_attention_heads, cfg.attention_head_dim)},
    cut=lambda cfg: True,
    frozen=lambda role, cfg: frozenset(),
    row_types=("t2v", "i2v"),
    row_faults=wan_family.row_faults,
    streams=lambda cfg: None,
    video=lambda cfg: (cfg.out_channels, cfg.patch_size),
    tensors=wan_family.tensors,
    tensor_faults=wan_family.tensor_faults,
    parts=wan_family.parts,
    open_text=lambda folder, cfg, device, dtype: load_text_encoder(folder, device=device, dtype=dtype),
    strides=wan_family.strides,
    place_faults=lambda cfg, found, sound: [],
    objective=wan_family.objective,
    empty_caption=wan_family.empty_caption,
    remarks=wan_family.remarks,
    notes=wan_family.notes,
    defaults=wan_family.defaults,
    draw=sft.draw_batch,
    loss=sft.batch_loss,
    lengths=wan_family.lengths,
    flops=lambda cfg, frozen, lengths: wan_family.flops(cfg, lengths),
    save=wan_family.save,
    merge_base=wan_family.merge_base,
)

LTX2 = Family(
    name="ltx2",
    classes=tuple(ltx2_formats.CLASS_NAMES.values()),
    config=LTX2Config,
    presets=LTX2_PRESETS,
    given=lambda role: {} if role.modality is None else {"modality": role.modality},
    stacks=ltx2.STACKS,
    param_specs=ltx2.param_specs,
    pack=pack_ltx2,
    open_transformer=lambda folder, role: ltx2_formats.open_transformer(folder, role.modality),
    to_json=ltx2_formats.to_json,
    from_json=ltx2_formats.from_json,
    heads=ltx2_family.heads,
    cut=lambda cfg: "video" in ltx2_family.names_of(cfg),
    frozen=ltx2_family.frozen,
    row_types=tuple(ltx2_family.ROW_TYPES),
    row_faults=ltx2_family.row_faults,
    streams=ltx2_family.names_of,
    video=ltx2_family.video,
    tensors=lambda cfg, kind: {},
    tensor_faults=ltx2_family.tensor_faults,
    parts=ltx2_family.parts,
    open_text=ltx2_family.open_text,
    strides=lambda cfg: (cfg.vae_scale_factors[1], cfg.vae_scale_factors[0]),
    place_faults=ltx2_family.place_faults,
    objective=ltx2_family.objective,
    empty_caption=ltx2_family.empty_caption,
    remarks=ltx2_family.remarks,
    notes=ltx2_family.notes,
    defaults=ltx2_family.defaults,
    draw=ltx2_sft.draw_batch,
    loss=ltx2_sft.batch_loss,
    lengths=ltx2_family.lengths,
    flops=ltx2_family.flops,
    save=ltx2_family.save,
    merge_base=ltx2_family.merge_base,
)

FAMILIES: dict[str, Family] = {family.name: family for family in (WAN, LTX2)}


def family_of(recipe: Recipe) -> Family:
    """The kind of the model that a recipe trains."""
    return FAMILIES[recipe.models.student.target]


def family_of_class(name: Any, source: str) -> Family:
    """The kind of model that a checkpoint's config names by `_class_name`. Raises UserError that names `source`."""
    for family in FAMILIES.values():
        if name in family.classes:
            return family
    known = ", ".join(name for family in FAMILIES.values() for name in family.classes)
    raise UserError(f"{source}: _class_name is {name!r}, expected one of {known}")
