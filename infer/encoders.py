"""Text and image encoders: prompts and pictures to embeddings.

The encoders of Wan's public folders run through the package `transformers`, which is imported only where one is
used. Such an encoder is read from its folder by the call that needs it and freed before that call returns, so
that it and the transformer are never in memory together; one call therefore takes everything there is to embed.
Where many calls follow one another, `keep` reads an encoder at the first and holds it.
"""

import contextlib
import dataclasses
import gc
import html
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core import devices
from core.checkpoint import open_checkpoint
from core.errors import UserError, raise_faults
from core.files import read_json
from nn import text_hash

WAN_TEXT_LENGTH = 512  # tokens to which Wan's own pipelines pad prompt embeddings
UMT5 = "umt5"
CLIP_VISION = "clip_vision_model"
PACKAGE = "transformers"
# Bytes at which PyTorch's own memory begins on a CPU. BLAS may sum in another order elsewhere, such as in the buffers
# that a file was read into, and then one read of a model would not give the bits of another.
ALIGNMENT = 64
INSTALL = 'pip install "latentree[text]" (or: pip install transformers sentencepiece ftfy)'


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """A text encoder: `embed(prompts) -> [L_i, D] each`, and the length to which the model pads them."""

    embed: Callable[[Sequence[str]], list[Tensor]]
    max_length: int


@dataclasses.dataclass(frozen=True)
class ImageEncoder:
    """An image encoder: `embed(images, each uint8 [H, W, 3]) -> [M, D] each`, D = `dim`."""

    embed: Callable[[Sequence[Tensor]], list[Tensor]]
    dim: int


# --- prompts --------------------------------------------------------------------------------------------------


def _mend(text: str) -> str:
    """Undoes wrong decoding (mojibake) where the package ftfy is installed; without it the text stays."""
    if importlib.util.find_spec("ftfy") is None:
        return text
    return importlib.import_module("ftfy").fix_text(text)


def clean_prompt(prompt: str) -> str:
    """A prompt as Wan's text encoder was trained on them: mended, HTML entities (also doubly escaped ones)
    resolved, runs of white space as one space, none at the ends.

    Source: `prompt_clean` of Diffusers' Wan pipelines, which also mends only where ftfy is installed.
    """
    text = html.unescape(html.unescape(_mend(prompt)))
    return re.sub(r"\s+", " ", text.strip()).strip()


# --- one encoder at a time ------------------------------------------------------------------------------------


def read_model(class_name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """A `transformers` model from the safetensors of a folder, on `device`, ready for inference.

    Raises UserError for weights that are missing or misshapen, which transformers would replace by random ones.
    """
    kind = getattr(importlib.import_module(PACKAGE), class_name)
    try:
        with _without_bars():
            model, info = kind.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{folder}: {class_name} cannot be read: {error}") from error
    faults = [f"missing {key}" for key in sorted(info["missing_keys"])]
    faults += [f"{entry[0]} has another shape" for entry in sorted(info["mismatched_keys"])]
    raise_faults(f"{folder}: the weights do not fit {class_name}", faults)
    for p in model.parameters() if device.type == "cpu" else ():
        if p.data_ptr() % ALIGNMENT:
            p.data = p.data.clone()
    return model.to(device).eval()


def free(device: torch.device) -> None:
    """Gives back what models without references still occupy: `transformers` models hold cycles."""
    gc.collect()
    devices.empty_cache(device)


def borrowed(read: Callable[[], Any], device: torch.device, keep: bool) -> Callable[[Callable[[Any], Any]], Any]:
    """`run(use)` gives `use(model)` of a model that is read for that call alone, or with `keep` at the first call."""
    held: list[Any] = []

    def run(use: Callable[[Any], Any]) -> Any:
        if keep and not held:
            held.append(read())
        try:
            with torch.no_grad():
                return use(held[0] if keep else read())
        finally:
            if not keep:
                free(device)

    return run


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bars of `transformers` meanwhile (they are no lines where the output is no terminal); afterwards
    they, and those of `huggingface_hub` that go with them, are as they were.
    """
    ours, hub = (importlib.import_module(name) for name in (f"{PACKAGE}.utils.logging", "huggingface_hub.utils"))
    if not ours.is_progress_bar_enabled():
        yield
        return
    hidden = hub.are_progress_bars_disabled()
    ours.disable_progress_bar()
    try:
        yield
    finally:
        ours.enable_progress_bar()
        if hidden:
            hub.disable_progress_bars()


def check_package(folder: Path, what: str) -> None:
    """Raises UserError where `transformers`, which the model `what` of a folder needs, is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(f"{folder}: {what} needs the package {PACKAGE}: {INSTALL}")


def read_mapping(path: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping. Raises UserError naming it when it does not."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise UserError(f"{path}: it holds a {type(data).__name__}, expected a mapping")
    return data


def kind_of(config: Mapping[str, Any], key: str) -> str:
    """What a model's config.json says under `key`, for messages; where it says nothing, what it says instead."""
    other = "model_type" if key == "_class_name" else "_class_name"
    instead = f" ({other} is {config[other]!r})" if key not in config and other in config else ""
    return f"{config.get(key)!r}{instead}"


# --- text -----------------------------------------------------------------------------------------------------


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder. Raises UserError for one that cannot be read."""
    try:
        return importlib.import_module(PACKAGE).AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"{folder}: the tokenizer cannot be read: {error}") from error


def _embed_prompt(model: Any, tokenizer: Any, prompt: str, device: torch.device) -> Tensor:
    """`[L, D]` on the CPU. One prompt to a call, so that a result does not depend on the other prompts."""
    tokens = tokenizer([prompt], padding="max_length", max_length=WAN_TEXT_LENGTH, truncation=True, return_tensors="pt")
    ids, mask = tokens.input_ids.to(device), tokens.attention_mask.to(device)
    states = model(ids, mask).last_hidden_state[0]
    return states[: int(mask.sum())].cpu().clone()  # a mere slice would keep all 512 rows


def umt5_encoder(folder: str | Path, *, device: torch.device, dtype: torch.dtype, keep: bool = False) -> TextEncoder:
    """UMT5 of a `text_encoder/` folder with the `tokenizer/` beside it; read by every call of `embed`, then freed.

    With `keep` it is read by the first call and held.

    `embed` cleans the prompts, cuts them to 512 tokens and returns the last hidden states `[L, D]` of the real
    tokens in `dtype` on the CPU (Wan pads with zeros, not with the states of padding tokens).

    Raises:
        UserError: a missing package, tokenizer or file of weights, before anything is read.
    """
    folder = Path(folder)
    tokens = folder.parent / "tokenizer"
    check_package(folder, "the text encoder")
    if not tokens.is_dir():
        raise UserError(f"{tokens}: no such folder; the text encoder beside it needs its tokenizer")
    open_checkpoint(folder)
    device = torch.device(device)

    read = lambda: (read_tokenizer(tokens), read_model("UMT5EncoderModel", folder, device, dtype))  # noqa: E731
    run = borrowed(read, device, keep)

    def embed(prompts: Sequence[str]) -> list[Tensor]:
        cleaned = [clean_prompt(prompt) for prompt in prompts]
        return run(lambda pair: [_embed_prompt(pair[1], pair[0], prompt, device) for prompt in cleaned])

    return TextEncoder(embed, WAN_TEXT_LENGTH)


def load_text_encoder(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    keep: bool = False,
) -> TextEncoder:
    """The encoder of a `text_encoder/` folder: UMT5, or the hash embedder of the demos (which has no weights).

    `keep` reads the weights at the first call and holds them; without it every call reads and frees them. Raises
    UserError naming the kind it cannot run.
    """
    config = read_mapping(Path(folder) / "config.json")
    name = config.get("model_type")
    if name == UMT5:
        return umt5_encoder(folder, device=torch.device(device), dtype=dtype, keep=keep)
    if name != text_hash.MODEL_TYPE:
        raise UserError(
            f"{folder}: text encoder {kind_of(config, 'model_type')} cannot be run by this version, only {UMT5!r} and "
            f"{text_hash.MODEL_TYPE!r}; give precomputed prompt embeddings instead"
        )
    cfg = text_hash.load(folder)
    return TextEncoder(lambda prompts: text_hash.embed(cfg, prompts), cfg.max_length)


# --- images ---------------------------------------------------------------------------------------------------


def load_image_encoder(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    keep: bool = False,
) -> ImageEncoder:
    """CLIP's vision model of an `image_encoder/` folder with the `image_processor/` beside it.

    Read by every call of `embed`, then freed; with `keep` read by the first and held. `embed` gives the hidden states
    before the last layer, `[M, D]` (M = patches + 1) in `dtype` on the CPU: Wan's `clip_feature`.

    Raises:
        UserError: another kind of model, a missing package, processor or file of weights.
    """
    folder = Path(folder)
    config = read_mapping(folder / "config.json")
    if config.get("model_type") != CLIP_VISION:
        raise UserError(
            f"{folder}: image encoder {kind_of(config, 'model_type')} cannot be run by this version, only "
            f"{CLIP_VISION!r}; give a precomputed clip_feature instead"
        )
    check_package(folder, "the image encoder")
    processor_folder = folder.parent / "image_processor"
    if not (processor_folder / "preprocessor_config.json").is_file():
        raise UserError(f"{processor_folder / 'preprocessor_config.json'}: no such file")
    open_checkpoint(folder)
    device = torch.device(device)

    def read() -> tuple[Any, Any]:
        processor = importlib.import_module(PACKAGE).CLIPImageProcessor.from_pretrained(processor_folder)
        return processor, read_model("CLIPVisionModel", folder, device, dtype)

    run = borrowed(read, device, keep)

    def embed(images: Sequence[Tensor]) -> list[Tensor]:
        def use(pair: tuple[Any, Any]) -> list[Tensor]:
            processor, model = pair
            pixels = processor(images=[image.numpy() for image in images], return_tensors="pt")["pixel_values"]
            rows = (x.to(device, dtype) for x in pixels.split(1))
            return [model(x, output_hidden_states=True).hidden_states[-2][0].cpu().clone() for x in rows]

        return run(use)

    return ImageEncoder(embed, config.get("hidden_size", 768))
