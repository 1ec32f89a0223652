"""Where a model is: a folder, or an id of the Hugging Face Hub that is downloaded to the local cache.

The package `huggingface_hub` is imported only for ids. Weights come as safetensors; pickles are never fetched.
"""

import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from core.errors import UserError, nearest_names
from infer.encoders import read_mapping

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PACKAGE = "huggingface_hub"
INDEX = "model_index.json"
ALWAYS, WEIGHTS = (INDEX, "scheduler/*", "vae/*", "transformer/config.json"), "transformer/*.safetensors*"
PARTS = {
    "text_encoder": ("text_encoder/*", "tokenizer/*", "connectors/*"),
    "image_encoder": ("image_encoder/*", "image_processor/*"),
    "audio_vae": ("audio_vae/*", "vocoder/*"),
    "latent_upsampler": ("latent_upsampler/*",),
}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
# The smallest that a public repository can be, in 10^9 parameters: transformer, VAE, and UMT5-XXL, CLIP ViT-H or
# Gemma 3 12B. The first two follow from our own configs of them, the others from their public ones. Used where the hub
# cannot be asked.
TEXT, CLIP, GEMMA, VAE_21, VAE_22, LTX2_VAE, LTX23_VAE = 5.68, 0.63, 12.19, 0.13, 0.70, 1.22, 0.73
KNOWN = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (1.42, VAE_21, TEXT),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": (14.29, VAE_21, TEXT),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": (16.40, VAE_21, TEXT, CLIP),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": (16.40, VAE_21, TEXT, CLIP),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (5.00, VAE_22, TEXT),
    "Lightricks/LTX-2": (18.88, LTX2_VAE, GEMMA),
    "diffusers/LTX-2.3-Diffusers": (18.99, LTX23_VAE, GEMMA),
    "diffusers/LTX-2.3-Distilled-Diffusers": (18.99, LTX23_VAE, GEMMA),
}


@dataclasses.dataclass(frozen=True)
class Hub:
    """The hub as we use it.

    `sizes(id) -> {file: bytes}` asks what a repository holds; `download(id, patterns, cache_dir, local) -> folder`
    fetches what is not in the cache, or with `local` only looks there. Both raise the package's own exceptions.
    """

    sizes: Callable[[str], dict[str, int]]
    download: Callable[[str, Sequence[str], Path | None, bool], str]


def client() -> Hub:
    """The real hub. Raises UserError where the package is missing."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(f"a hub id needs the package {PACKAGE}: pip install {PACKAGE}")
    package = importlib.import_module(PACKAGE)

    def sizes(name: str) -> dict[str, int]:
        found = package.HfApi().model_info(name, files_metadata=True).siblings
        return {file.rfilename: file.size for file in found if file.size is not None}

    def download(name: str, allow: Sequence[str], cache: Path | None, local: bool) -> str:
        return package.snapshot_download(
            name, allow_patterns=list(allow), ignore_patterns=list(PICKLES), cache_dir=cache, local_files_only=local
        )

    return Hub(sizes, download)


def wanted(parts: Sequence[str], transformer: bool) -> list[str]:
    """Patterns of the files of a pipeline with the encoders `parts`, keys of `PARTS`."""
    return [*ALWAYS, *([WEIGHTS] if transformer else []), *(p for part in parts for p in PARTS[part])]


def _matches(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(file, p) for p in patterns) and not any(fnmatch(file, p) for p in PICKLES)


def _total(sizes: dict[str, int], patterns: Sequence[str]) -> int:
    return sum(size for file, size in sizes.items() if _matches(file, patterns))


def _size_hint(name: str) -> str:
    """How large a known repository is at least, from the parameters of its models at two bytes each."""
    if name not in KNOWN:
        return "its size is not known here"
    return f"at least {2 * sum(KNOWN[name]):.0f} GB, twice that where its files are float32"


def _is(error: Exception, name: str) -> bool:
    """Whether an error is of a class of this name. By name, since the classes moved between versions of the package."""
    return any(kind.__name__ == name for kind in type(error).__mro__)


def _refusal(name: str, error: Exception) -> UserError | None:
    """What the hub's answer means; None where there was no answer."""
    if _is(error, "GatedRepoError"):
        return UserError(
            f"{name}: the hub asks for its terms to be accepted: open https://huggingface.co/{name}, then hf auth login"
        )
    if _is(error, "RepositoryNotFoundError"):
        return UserError(
            f"{name}: no such folder here and no such model on the hub{nearest_names(name, KNOWN)}; "
            "a private one needs hf auth login"
        )
    if _is(error, "HFValidationError"):
        return UserError(f"{name}: no such folder, and no id of the hub either: {error}")
    return None


def _offline(name: str, patterns: Sequence[str], error: Exception) -> UserError:
    include = " ".join(f"--include '{p}'" for p in patterns)
    return UserError(
        f"{name}: no such folder here, it is not in the local cache, and the hub cannot be reached "
        f"({type(error).__name__}). Where there is a network run: hf download {name} {include} --local-dir FOLDER "
        f"({_size_hint(name)}), and give --model FOLDER"
    )


def _from_cache(name: str, patterns: Sequence[str], hub: Hub, cache_dir: Path | None) -> Path | None:
    """The snapshot in the local cache, if it has files of every pattern that its index has a model for."""
    try:
        folder = Path(hub.download(name, patterns, cache_dir, True))
    except Exception:  # whatever the package raises here, the files are not there
        return None
    if not (folder / INDEX).is_file():
        return None
    index = read_mapping(folder / INDEX)
    named = {part for part, entry in index.items() if isinstance(entry, list) and entry[:1] != [None]}
    return folder if all(any(folder.glob(p)) for p in patterns if p.split("/")[0] in named) else None


def _resolve(
    name: str, patterns: Sequence[str], hub: Hub | None, cache_dir: Path | None, log: Callable[[str], None],
    later: Sequence[str] = (),
) -> Path:  # fmt: skip
    """The folder with files of `patterns`; an error tells what to download for these and what is needed `later`."""
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists() or not HUB_ID.fullmatch(name):
        raise UserError(f"{name}: no such folder")
    hub = client() if hub is None else hub
    try:
        sizes = hub.sizes(name)
    except Exception as error:  # the classes of network errors differ between versions of the package
        refusal = _refusal(name, error)
        if refusal is not None:
            raise refusal from error
        folder = _from_cache(name, patterns, hub, cache_dir)
        if folder is None:
            raise _offline(name, later or patterns, error) from error
        return folder
    if INDEX not in sizes:
        raise UserError(
            f"{name}: the repository has no {INDEX}: only pipelines in Diffusers' layout can be used"
            f"{nearest_names(name + '-Diffusers', KNOWN)}"
        )
    total = _total(sizes, patterns) / 1e9
    log(f"{name}: {total:.3g} GB from the hub or its local cache")
    try:
        return Path(hub.download(name, patterns, cache_dir, False))
    except Exception as error:  # as above, and a full disk
        refusal = _refusal(name, error)
        if refusal is not None:
            raise refusal from error
        raise UserError(f"{name}: the download of {total:.3g} GB failed: {error}; run again to continue it") from error


def resolve_index(
    name: str, parts: Sequence[str] = (), *, hub: Hub | None = None, cache_dir: Path | None = None
) -> Path:
    """A folder with the `model_index.json` of a model, which says of what kind it is before all of it is downloaded.

    Args:
        parts: what is downloaded afterwards, see `resolve_model`; an error without a network names those files too.

    Raises:
        UserError: as `resolve_model`.
    """
    return _resolve(name, [INDEX], hub, cache_dir, lambda text: None, wanted(parts, True))


def resolve_model(
    name: str,
    parts: Sequence[str] = (),
    *,
    transformer: bool = True,
    hub: Hub | None = None,
    cache_dir: Path | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    """The folder of a model: `name` itself when it is one, else the snapshot of the hub id `owner/name`.

    Args:
        parts: models to fetch besides transformer, VAE and scheduler, keys of `PARTS`; a repository may lack some.
        transformer: False leaves its weights out, which are most of the bytes.
        hub: default the real one. cache_dir: default that of huggingface_hub.
        log: is told the size before a download.

    Raises:
        UserError: neither a folder nor an id; an id that the hub does not know or hand out; a repository in
            another layout; no network and nothing in the cache (with what to download and its size where known).
    """
    return _resolve(name, wanted(parts, transformer), hub, cache_dir, log)
