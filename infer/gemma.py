"""Gemma 3 as LTX-2's text encoder: the hidden states of all its layers, from one forward pass of its text model.

Diffusers' folders hold the whole of Gemma, with its vision tower and sometimes its head: neither is ever read. The
model's arithmetic is that of the package `transformers`, which is imported only where a Gemma is opened.
"""

import copy
import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.checkpoint import LazyTree, open_checkpoint
from core.errors import UserError, raise_faults
from core.rules import cast
from core.specs import ParamSpec, Specs, check
from core.transforms import apply
from infer.encoders import PACKAGE, check_package, kind_of, read_mapping, read_tokenizer

MODEL_TYPES = ("gemma3", "gemma3_text")  # with a vision tower, and without
LENGTH = 1024  # tokens to which LTX-2's own pipelines pad captions
_FIRST = "embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class Gemma:
    """A Gemma whose weights are checked and not read.

    `tree` has the text model's leaves by its own names, `config` is that of `transformers`. `hidden_states` gives
    `layers` tensors, the embeddings among them, of `width`.
    """

    folder: Path
    tokenizer: Path
    tree: LazyTree
    config: Any
    width: int
    layers: int


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """A Gemma in memory: the text model and its tokenizer, which pads on the left."""

    model: Any
    tokenizer: Any


# --- opening --------------------------------------------------------------------------------------------------


def _config(folder: Path) -> Any:
    """The text model's config as `transformers` understands it."""
    try:
        whole = importlib.import_module(PACKAGE).AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # validators of configs raise classes of their own, which differ between versions
        raise UserError(f"{folder / 'config.json'}: it cannot be used: {error}") from error
    return whole.get_text_config()


def _without_weights(config: Any) -> Any:
    """The text model with parameters that have shapes and no values."""
    with torch.device("meta"):
        return importlib.import_module(PACKAGE).Gemma3TextModel(config)


def _text_model(tree: LazyTree, specs: Specs, folder: Path) -> LazyTree:
    """The leaves of the text model of a Gemma, by the text model's own names.

    Whole Gemmas put them below `language_model.model` or `model.language_model`, depending on who wrote them. Raises
    UserError where there is no text model or more than one, and for leaves that do not fit `specs`.
    """
    above = [key.removesuffix(_FIRST) for key in tree if f".{key}".endswith(f".{_FIRST}")]
    if len(above) != 1:
        raise UserError(f"{folder}: {len(above)} leaves are named {_FIRST}, expected one: that of Gemma's text model")
    leaves = {key.removeprefix(above[0]): leaf for key, leaf in tree.items() if key.startswith(above[0])}
    check(leaves, specs, what=f"{folder}: Gemma's text model")
    floats = lambda dtype: dtype.is_floating_point and dtype.itemsize > 1  # noqa: E731
    coded = [f"{key} is {leaf.dtype}" for key, leaf in leaves.items() if not floats(leaf.dtype)]
    raise_faults(f"{folder}: quantised weights cannot be run, only floating ones of 16 bits or more", coded)
    return LazyTree(leaves, tree.metadata, tree.files)


def open_gemma(folder: str | Path, tokenizer: str | Path | None = None) -> Gemma:
    """The Gemma 3 of a `text_encoder/` folder with its tokenizer, None: that in `tokenizer/` beside it; nothing of its
    weights is read.

    Raises:
        UserError: another kind of model, a missing package or tokenizer, keys and shapes that do not fit the config.
    """
    folder = Path(folder)
    kind = read_mapping(folder / "config.json")
    tokens = folder.parent / "tokenizer" if tokenizer is None else Path(tokenizer)
    if kind.get("model_type") not in MODEL_TYPES:
        raise UserError(f"{folder}: text encoder {kind_of(kind, 'model_type')} is none of {', '.join(MODEL_TYPES)}")
    check_package(folder, "the text encoder")
    if not tokens.is_dir():
        raise UserError(f"{tokens}: no such folder; the text encoder {folder} needs its tokenizer")
    tree, config = open_checkpoint(folder), _config(folder)
    specs = {key: ParamSpec(tuple(x.shape), x.dtype) for key, x in _without_weights(config).state_dict().items()}
    leaves = _text_model(tree, specs, folder)
    return Gemma(folder, tokens, leaves, config, config.hidden_size, config.num_hidden_layers + 1)


# --- reading --------------------------------------------------------------------------------------------------


def _constants(config: Any) -> Mapping[str, Tensor]:
    """The tensors that no file holds (scale of embeddings, rotary frequencies): those of a model without layers."""
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size = 0, 1 if config.pad_token_id is None else config.pad_token_id + 1
    with torch.random.fork_rng(devices=[]):  # its weights are drawn, and nobody's next draw is to change by that
        return dict(importlib.import_module(PACKAGE).Gemma3TextModel(small).named_buffers())


def read_gemma(gemma: Gemma, device: torch.device, dtype: torch.dtype) -> Reader:
    """The text model in `dtype` on `device`, and its tokenizer. Leaves are read, cast and moved one by one."""
    tokenizer = read_tokenizer(gemma.tokenizer)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = _without_weights(gemma.config)
    params = apply(gemma.tree, cast(dtype)(gemma.tree.specs)).read(device=device)
    model.load_state_dict(params, assign=True)
    for name, value in _constants(gemma.config).items():
        above, _, own = name.rpartition(".")
        setattr(model.get_submodule(above), own, value.to(device))
    return Reader(model.eval(), tokenizer)


def hidden_states(reader: Reader, captions: Sequence[str]) -> tuple[tuple[Tensor, ...], Tensor]:
    """The states of all layers, embeddings first, each `[B, 1024, C]`, and the mask of real tokens, bool `[B, 1024]`.

    Captions lose white space at their ends and tokens beyond 1024; padding stands on the left. One pass for all of
    them: those of Gemma 3 12B take 0.4 GB a caption in bfloat16.
    """
    bare = [caption.strip() for caption in captions]
    tokens = reader.tokenizer(bare, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt")
    ids, mask = tokens.input_ids.to(reader.model.device), tokens.attention_mask.to(reader.model.device)
    out = reader.model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    return out.hidden_states, mask.bool()
