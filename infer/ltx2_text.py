"""LTX-2's text: captions to the embeddings that each stream of the transformer attends to.

Folders are in Diffusers' form, or in FastVideo's, whose `text_encoder/` holds the connectors and Gemma in `gemma/`.
Gemma's hidden states of all layers become features, and the connectors make the text of each stream of them. Weights
are checked when a folder is opened, read by the call that needs them and freed before it returns, so that they and the
transformer are never in memory together; one call therefore takes everything there is to embed.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.checkpoint import LazyLeaf, LazyTree, open_checkpoint
from core.errors import UserError, raise_faults
from core.geometry import nearest_valid
from core.rules import cast
from core.save import save_file
from core.transforms import apply
from core.trees import Params
from infer.encoders import borrowed, kind_of, read_mapping
from infer.gemma import LENGTH, MODEL_TYPES, Gemma, Reader, hidden_states, open_gemma, read_gemma
from nn import ltx2_connectors, text_hash
from nn import ltx2_fastvideo as fastvideo
from nn.config_files import open_model
from nn.ltx2_config import LTX2Config
from nn.ltx2_connectors import ConnectorConfig

Texts = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class LTX2Text:
    """What makes text of captions, with its weights bound. All results are on the CPU.

    `embed(captions)`: `{"video": [L, Dv], "audio": [L, Da]}` per caption, only the model's streams, L = `length`; each
    tensor has its own memory.
    `features(captions)`: what connectors start from, `[B, L, D]` by stream, and the mask `[B, L]` of real tokens,
    padding on the left; may be kept.
    `connect(features, mask)`: the texts of such features, `[B, L, D]` by stream.
    The demos' embedder has no connectors: it embeds only, and L is the number of words, `length` at most.
    """

    embed: Callable[[Sequence[str]], list[Texts]]
    length: int
    features: Callable[[Sequence[str]], tuple[Texts, Tensor]]
    connect: Callable[[Mapping[str, Tensor], Tensor], Texts]


def _refusing(why: str) -> Callable[..., Any]:
    """A function that raises UserError whatever it is given."""

    def refuse(*args: Any) -> Any:
        raise UserError(why)

    return refuse


def _listed(captions: Sequence[str]) -> list[str]:
    if isinstance(captions, str):
        raise UserError(f"captions is the string {captions!r}, expected a list of strings")
    return list(captions)


# --- the demos' embedder --------------------------------------------------------------------------------------


def _hash_text(folder: Path, cfg: LTX2Config) -> LTX2Text:
    """Words by their hash, the same embedding for every stream."""
    own, names = text_hash.load(folder), [s.name for s in cfg.streams]
    wide = {s.name: s.text_dim for s in cfg.streams if s.text_dim != own.dim}
    faults = [f"its embeddings are {own.dim} wide, the {name} stream takes {n}" for name, n in wide.items()]
    raise_faults(f"{folder}: the text embedder does not fit the transformer", faults)

    def embed(captions: Sequence[str]) -> list[Texts]:
        return [{name: x.clone() for name in names} for x in text_hash.embed(own, _listed(captions))]

    refuse = _refusing(f"{folder}: a text embedder without connectors has no features: its embeddings are the text")
    return LTX2Text(embed, own.max_length, refuse, refuse)


# --- connectors -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Connectors:
    """Connectors whose weights are checked and not read, of the streams of a transformer."""

    folder: Path
    tree: LazyTree
    cfg: ConnectorConfig


def _is_fastvideo(text_encoder: Path) -> bool:
    """Whether a `text_encoder/` is FastVideo's, which has the connectors in it."""
    path = text_encoder / "config.json"
    return path.is_file() and fastvideo.is_text_encoder(read_mapping(path))


def _find_connectors(folder: Path) -> tuple[Path, LazyTree, ConnectorConfig]:
    """Where the connectors of a pipeline's folder stand, their leaves, and the config of both streams."""
    text, place = folder / "text_encoder", folder / "connectors"
    if _is_fastvideo(text):
        return text, *fastvideo.open_connectors(text)
    if not place.is_dir():
        raise UserError(f"{place}: no such folder; the text encoder's hidden states need their connectors")
    kind, fixed = ltx2_connectors.CLASS_NAME, ltx2_connectors.FIXED
    return place, *open_model(place, ConnectorConfig, kind, ltx2_connectors.param_specs, fixed=fixed)


def _open_connectors(folder: Path, cfg: LTX2Config) -> _Connectors:
    """The connectors of a pipeline's folder. Raises UserError for ones that are missing or do not fit."""
    place, tree, own = _find_connectors(folder)
    own = dataclasses.replace(own, modality=cfg.modality)
    raise_faults(f"{place}: these connectors cannot be used", _connector_faults(own, cfg))
    leaves = {key: tree[key] for key in ltx2_connectors.param_specs(own)}
    return _Connectors(place, LazyTree(leaves, tree.metadata, tree.files), own)


def _connector_faults(own: ConnectorConfig, cfg: LTX2Config) -> list[str]:
    """Widths that are not the transformer's, and registers that do not fill the text."""
    faults = []
    for s in own.streams:
        if s.dim != (wanted := cfg.stream(s.name).text_dim):
            faults.append(f"the {s.name} connector is {s.dim} wide, the transformer's {s.name} stream takes {wanted}")
        if LENGTH % s.registers:
            near = " or ".join(str(n) for n in nearest_valid(LENGTH, s.registers))
            faults.append(f"{s.registers} {s.name} registers fill {near} tokens, not the {LENGTH} of a text")
    return faults


def _read(connectors: _Connectors, keys: Sequence[str], device: torch.device, dtype: torch.dtype) -> Params:
    """Leaves of the connectors in `dtype` on `device`; no other is read."""
    tree = connectors.tree
    return apply(tree, cast(dtype)(tree.specs)).read(keys, device)


def _projections(connectors: _Connectors) -> list[str]:
    """Keys of the layers that make features of hidden states; all others connect."""
    first = {s.projection for s in connectors.cfg.streams}
    return [key for key in connectors.tree if key.rpartition(".")[0] in first]


def _connected(params: Params, cfg: ConnectorConfig, features: Mapping[str, Tensor], mask: Tensor) -> list[Texts]:
    """The texts `[1, L, D]` of each sample on the CPU, made where `params` are; none depends on the others."""
    like, parts = params[f"{cfg.streams[0].prefix}.learnable_registers"], []
    for row in range(len(mask)):
        one = {s.name: features[s.name][row : row + 1].to(like) for s in cfg.streams}
        parts.append(_on_cpu(ltx2_connectors.connect(params, cfg, one, mask[row : row + 1].to(like.device))))
    return parts


def _on_cpu(texts: Texts) -> Texts:
    return {name: x.cpu() for name, x in texts.items()}


def _joined(parts: Sequence[Texts]) -> Texts:
    """The rows of all parts, of which there is at least one."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _connecting(
    connectors: _Connectors, device: torch.device, dtype: torch.dtype, keep: bool
) -> Callable[[Mapping[str, Tensor], Tensor], list[Texts]]:
    """A function that reads the connectors for features and their mask and gives the texts of each sample."""
    cfg, before = connectors.cfg, set(_projections(connectors))
    keys = [key for key in connectors.tree if key not in before]
    run = borrowed(lambda: _read(connectors, keys, device, dtype), device, keep)

    def connected(features: Mapping[str, Tensor], mask: Tensor) -> list[Texts]:
        missing = [f"{s.name} [B, L, {s.feature_dim}]" for s in cfg.streams if s.name not in features]
        raise_faults("text features are missing", missing)
        rows = {s.name: len(features[s.name]) for s in cfg.streams if len(features[s.name]) != len(mask)}
        raise_faults("text features", [f"{name} has {n} rows, the mask {len(mask)}" for name, n in rows.items()])
        return run(lambda params: _connected(params, cfg, features, mask)) if len(mask) else []

    return connected


def _in_one(
    connected: Callable[[Mapping[str, Tensor], Tensor], list[Texts]], cfg: ConnectorConfig, dtype: torch.dtype
) -> Callable[[Mapping[str, Tensor], Tensor], Texts]:
    """`LTX2Text.connect`: the samples of `connected` as one."""

    def connect(features: Mapping[str, Tensor], mask: Tensor) -> Texts:
        none = {s.name: torch.empty(0, mask.shape[1], s.dim, dtype=dtype) for s in cfg.streams}
        return _joined(parts) if (parts := connected(features, mask)) else none

    return connect


def connector_config(folder: str | Path, cfg: LTX2Config) -> ConnectorConfig:
    """The config of a pipeline's connectors, for the streams of its transformer. Errors as of `load_ltx2_text`."""
    return _open_connectors(Path(folder), cfg).cfg


def load_connectors(
    folder: str | Path,
    cfg: LTX2Config,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    keep: bool = False,
) -> LTX2Text:
    """The connectors of a pipeline's folder alone, for features that are there: of the result `connect` can be used.

    Arguments and errors as of `load_ltx2_text`; the projections that make features are not read.
    """
    connectors = _open_connectors(Path(folder), cfg)
    refuse = _refusing(f"{connectors.folder}: only connectors were opened, there is no text encoder for captions")
    connected = _connecting(connectors, torch.device(device), dtype, keep)
    return LTX2Text(refuse, LENGTH, refuse, _in_one(connected, connectors.cfg, dtype))


# --- Gemma and connectors -------------------------------------------------------------------------------------


def _gemma_faults(gemma: Gemma, cfg: ConnectorConfig) -> list[str]:
    """Hidden states that the connectors do not take."""
    faults = []
    if gemma.width != cfg.caption_channels:
        faults.append(f"caption_channels is {cfg.caption_channels}, the text encoder's hidden_size {gemma.width}")
    if gemma.layers != cfg.text_proj_in_factor:
        states = f"{gemma.layers} hidden states ({gemma.layers - 1} layers and the embeddings)"
        faults.append(f"text_proj_in_factor is {cfg.text_proj_in_factor}, the text encoder gives {states}")
    return faults


def _open_gemma(text_encoder: Path) -> Gemma:
    """The Gemma of a pipeline's `text_encoder/`. Raises UserError where there is none that fits."""
    if not _is_fastvideo(text_encoder):
        return open_gemma(text_encoder)
    place, tokens = fastvideo.gemma_folder(text_encoder), fastvideo.tokenizer_folder(text_encoder)
    if not (place / "config.json").is_file():
        raise UserError(f"{place}: no Gemma 3 there; {text_encoder} has connectors only, and captions need both")
    return open_gemma(place, tokens)


def _features(
    reader: Reader, params: Params, cfg: ConnectorConfig, captions: Sequence[str]
) -> tuple[Texts, Tensor]:
    """Features `[B, L, D]` by stream and the mask `[B, L]` of captions that go through together, on the CPU."""
    states, mask = hidden_states(reader, captions)
    found = ltx2_connectors.text_features(params, cfg, ltx2_connectors.stack_layers(states), mask)
    return _on_cpu(found), mask.cpu()


def _gemma_text(
    folder: Path, cfg: LTX2Config, device: torch.device, dtype: torch.dtype, keep: bool, batch: int
) -> LTX2Text:
    """Gemma, its tokenizer and the connectors of a pipeline's folder."""
    gemma, connectors = _open_gemma(folder / "text_encoder"), _open_connectors(folder, cfg)
    own, first = connectors.cfg, _projections(connectors)
    raise_faults(f"{connectors.folder}: the text encoder does not fit these connectors", _gemma_faults(gemma, own))
    read = lambda: (read_gemma(gemma, device, dtype), _read(connectors, first, device, dtype))  # noqa: E731
    run, connected = borrowed(read, device, keep), _connecting(connectors, device, dtype, keep)

    def features(captions: Sequence[str]) -> tuple[Texts, Tensor]:
        if not (listed := _listed(captions)):
            none = {s.name: torch.empty(0, LENGTH, s.feature_dim, dtype=dtype) for s in own.streams}
            return none, torch.empty(0, LENGTH, dtype=torch.bool)
        groups = [listed[i : i + batch] for i in range(0, len(listed), batch)]
        found = run(lambda pair: [_features(*pair, own, group) for group in groups])
        return _joined([texts for texts, _ in found]), torch.cat([mask for _, mask in found])

    def embed(captions: Sequence[str]) -> list[Texts]:
        return [{name: x[0] for name, x in texts.items()} for texts in connected(*features(captions))]

    return LTX2Text(embed, LENGTH, features, _in_one(connected, own, dtype))


def load_ltx2_text(
    folder: str | Path,
    cfg: LTX2Config,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    keep: bool = False,
    batch: int = 8,
) -> LTX2Text:
    """The text encoder of a pipeline's folder: Gemma 3 (`text_encoder/`, `tokenizer/`, `connectors/`, or as FastVideo
    has them: see `nn.ltx2_fastvideo`), or the demos' hash embedder, which has no weights and no connectors and gives
    every stream the same embedding.

    Args:
        cfg: of the transformer; only its streams are made, and connectors of others are not read.
        dtype: of weights, arithmetic and results; the demos' embedder stays in float32.
        keep: hold the weights from their first use; False reads them at every call and frees them after it, Gemma
            before the connectors.
        batch: captions that go through Gemma together, at most; their hidden states of all layers are in memory at
            once (Gemma 3 12B: 0.4 GB a caption in bfloat16). With 1 no text depends on the others; else roundings may.

    Raises:
        UserError: another kind of text encoder; a missing package, tokenizer, or connectors; keys, shapes, widths and
            numbers of layers that do not fit each other or `cfg`; a `batch` below 1. All before any weight is read.
    """
    if batch < 1:
        raise UserError(f"batch is {batch}, expected at least 1 caption")
    folder = Path(folder)
    place, device = folder / "text_encoder", torch.device(device)
    config = read_mapping(place / "config.json")
    if config.get("model_type") == text_hash.MODEL_TYPE:
        return _hash_text(place, cfg)
    if config.get("model_type") not in MODEL_TYPES and not _is_fastvideo(place):
        raise UserError(
            f"{place}: text encoder {kind_of(config, 'model_type')} cannot be run for LTX-2, only "
            f"{', '.join(MODEL_TYPES)} and {text_hash.MODEL_TYPE}; give precomputed prompt embeddings instead"
        )
    return _gemma_text(folder, cfg, device, dtype, keep, batch)


# --- files ----------------------------------------------------------------------------------------------------


def _name(stream: str, negative: bool) -> str:
    """The name of a stream's text in a file, as in those of the public trainer."""
    return f"{'negative_' if negative else ''}{stream}_prompt_embeds"


def save_texts(path: str | Path, texts: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None = None) -> None:
    """Writes texts `[L, D]` by stream to a safetensors file: `video_prompt_embeds`, `audio_prompt_embeds`, and
    `negative_video_prompt_embeds`, `negative_audio_prompt_embeds`. `read_texts` reads them.
    """
    found = {_name(stream, False): x for stream, x in texts.items()}
    found |= {} if negative is None else {_name(stream, True): x for stream, x in negative.items()}
    save_file(path, {name: x.detach().cpu().contiguous() for name, x in found.items()}, {})


def _text_faults(leaf: LazyLeaf, width: int | None) -> list[str]:
    """Why a text of a file cannot be used, `width` wide where it is known."""
    shape, wide = tuple(leaf.shape), "D" if width is None else width
    matrix = len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)
    fits = matrix and 0 not in shape and width in (None, shape[-1])
    faults = [] if fits else [f"is {list(shape)}, expected [L, {wide}] or [1, L, {wide}]"]
    return faults + ([] if leaf.dtype.is_floating_point else [f"is {leaf.dtype}, expected floats"])


def read_texts(
    path: str | Path, streams: Sequence[str], negative: bool, *, widths: Mapping[str, int] | None = None
) -> tuple[Texts, Texts | None]:
    """Texts `[L, D]` by stream of a safetensors file, in the dtype that they have there, and the negative ones.

    Args:
        streams: whose texts are read; no other is.
        negative: whether the negative ones are needed; None in the result where they are not.
        widths: D of each stream; None: whatever is there.

    Raises:
        UserError: naming every text that is missing, has another shape than `[L, D]` or `[1, L, D]`, or is no float.
    """
    tree, wanted = open_checkpoint(path), (False, True) if negative else (False,)
    names = {_name(stream, which): stream for which in wanted for stream in streams}
    faults = [f"missing {name} (there: {', '.join(tree) or 'nothing'})" for name in names if name not in tree]
    for name, stream in names.items():
        width = None if widths is None else widths[stream]
        faults += [f"{name} {fault}" for fault in _text_faults(tree[name], width)] if name in tree else []
    raise_faults(f"{path}: prompt embeddings that cannot be used", faults)
    found = {name: x.reshape(x.shape[-2:]) for name, x in tree.read(names).items()}
    texts = lambda which: {stream: found[_name(stream, which)] for stream in streams}  # noqa: E731
    return texts(False), texts(True) if negative else None
