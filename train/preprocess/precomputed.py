"""`.precomputed` folders of the public LTX trainer: what is in them, every fault of theirs, and our rows of them.

    latents/        `latents` [C, T, H, W] or, in old ones, [T * H * W, C]; `num_frames`, `height`, `width` in latents;
                    `fps`
    audio_latents/  `latents` [C, T, F]; `num_time_steps`, `frequency_bins`; `duration` in seconds
    conditions/     `video_prompt_embeds` [L, D], `audio_prompt_embeds` [L, D'], in old ones `prompt_embeds` [L, D]:
                    features of the text encoder, as the connectors take them; `prompt_attention_mask` [L]

A sample is one file of the same name in each folder (in old ones `conditions/condition_N.pt` goes with
`latents/latent_N.pt`). The files are pickles: they are read with `torch.load(weights_only=True)`, which runs no code of
theirs. Texts may be stored without their padding, which stands on the left.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from core.errors import UserError, raise_faults
from infer.progress import progress
from infer.words import counted
from nn.ltx2_config import LTX2Config
from nn.ltx2_connectors import ConnectorConfig
from train.preprocess.finish import LISTED

ROOT, TEXT_FOLDER = ".precomputed", "conditions"
FOLDERS = {"video": "latents", "audio": "audio_latents"}
UNREAD = ("reference_latents", "reference_audio_latents", "video_masks", "audio_masks")
MASK = "prompt_attention_mask"
SIZES = {"video": ("num_frames", "height", "width"), "audio": ("num_time_steps", "frequency_bins")}
KINDS = {("video", "audio"): "t2va", ("video",): "t2v", ("audio",): "t2a"}
THREADS = 8  # that open files: waiting for them, not computing


@dataclasses.dataclass(frozen=True)
class Folder:
    """A `.precomputed` folder: the names of its samples, without `.pt`, and the streams that are taken from it."""

    root: Path
    names: tuple[str, ...]
    streams: tuple[str, ...]

    def path(self, folder: str, name: str) -> Path:
        """The file of a sample in one of the folders; an old name of latents stands for that of its conditions."""
        place = Path(name)
        if folder == TEXT_FOLDER and place.name.startswith("latent_"):
            place = place.with_name(f"condition_{place.name.removeprefix('latent_')}")
        return self.root / folder / f"{place}.pt"

    @property
    def folders(self) -> list[str]:
        """Those that are read, the one that names the samples first."""
        return [*(FOLDERS[name] for name in self.streams), TEXT_FOLDER]


# --- which samples there are ----------------------------------------------------------------------------------


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.pt")}


def open_folder(
    folder: str | Path, streams: Sequence[str] | None = None, *, without_conditions: bool = False
) -> Folder:
    """The samples of a `.precomputed` folder, or of the data set that holds one; no file is read.

    Args:
        streams: `"video"`, `"audio"`, those to take; None: all that there are.
        without_conditions: take no notice of masks and references, which our rows cannot hold.

    Raises:
        UserError: one message with every folder that is missing or cannot be used, and every sample that lacks a file.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"{root}: no such folder")
    root = root / ROOT if (root / ROOT).is_dir() else root
    held = tuple(name for name in FOLDERS if (root / FOLDERS[name]).is_dir())
    asked = held if streams is None else tuple(streams)
    wanted = [*(FOLDERS[name] for name in asked), TEXT_FOLDER]
    faults = [f"{name}/: no such folder" for name in wanted if not (root / name).is_dir()]
    if not held:
        faults.append(f"neither {' nor '.join(f'{name}/' for name in FOLDERS.values())} is there")
    unread = [name for name in UNREAD if (root / name).is_dir() and not without_conditions]
    faults += [f"{name}/: rows hold no masks or references; --without-conditions leaves them out" for name in unread]
    found = Folder(root, (), asked)
    if not faults:
        found, faults = _paired(found)
    raise_faults(f"{root}: cannot be read", faults)
    return found


def _paired(folder: Folder) -> tuple[Folder, list[str]]:
    """The folder with its samples, and what is missing of them."""
    files = {name: _names(folder.root / name) for name in folder.folders}
    names = sorted(set().union(*(files[name] for name in folder.folders[:-1])))
    folder, faults = dataclasses.replace(folder, names=tuple(names)), []
    for place in folder.folders:
        own = {folder.path(place, name).relative_to(folder.root / place).with_suffix("").as_posix() for name in names}
        counts = f"{place}/ has {counted(len(files[place]), 'file')} for {counted(len(names), 'sample')}"
        for what, off in (("missing", own - files[place]), ("without latents", files[place] - own)):
            if off:
                shown = ", ".join(sorted(off)[:LISTED]) + (" ..." if len(off) > LISTED else "")
                faults.append(f"{counts}, {what}: {shown}")
    return folder, faults if names else ["it has no samples"]


# --- what is in their files -----------------------------------------------------------------------------------


def read_file(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """A file's dict; a tensor alone counts as its `latents`. `mapped`: tensors are read from disk when they are used.

    Raises UserError for a file that is no such pickle, or that holds more than tensors and plain values.
    """
    try:
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # the classes of what damaged pickles raise are without number
        if mapped and "mmap" in str(error):
            return read_file(path)  # of PyTorch before 1.6
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: cannot be read as tensors and plain values: {reason}") from None
    data = {"latents": data} if isinstance(data, Tensor) else data
    if not isinstance(data, Mapping):
        raise UserError(f"{path}: it holds a {type(data).__name__}, expected a mapping")
    return dict(data)


def _number(value: Any) -> float | None:
    """A plain number, also one in a tensor; None for anything else."""
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _tensor(data: Mapping[str, Any], name: str, ranks: Sequence[int]) -> Tensor:
    """A floating tensor of one of these ranks. Raises UserError for anything else."""
    value, wanted = data.get(name), " or ".join(map(str, ranks))
    if not isinstance(value, Tensor):
        raise UserError(f"{name} is {'missing' if name not in data else f'a {type(value).__name__}'}")
    if value.ndim not in ranks or not value.numel() or not value.dtype.is_floating_point:
        raise UserError(f"{name} is {value.dtype} {list(value.shape)}, expected floating of rank {wanted}, not empty")
    return value


def latents_of(stream: str, data: Mapping[str, Any]) -> Tensor:
    """Latents `[C, T, H, W]` or `[C, T, F]`; old ones of videos, `[T * H * W, C]`, are put in order.

    Raises UserError for other shapes, and for sizes that are noted beside them and are others.
    """
    latents, noted = _tensor(data, "latents", (4, 2) if stream == "video" else (3,)), {}
    for name in SIZES[stream]:
        noted[name] = _number(data.get(name))
    if latents.ndim == 2:
        t, h, w = (noted[name] for name in SIZES["video"])
        if None in (t, h, w) or t * h * w != len(latents):
            raise UserError(f"latents are {list(latents.shape)} for {noted}: expected num_frames * height * width rows")
        latents = rearrange(latents, "(t h w) c -> c t h w", t=t, h=h, w=w)
    sizes = dict(zip(SIZES[stream], latents.shape[1:], strict=True))
    off = [f"{name} is {noted[name]}" for name, n in sizes.items() if noted[name] not in (None, n)]
    if off:
        raise UserError(f"{', '.join(off)}, but latents are {list(latents.shape)}")
    return latents


def features_of(data: Mapping[str, Any], cfg: ConnectorConfig) -> tuple[dict[str, Tensor], Tensor]:
    """The features of a caption `[L, D]` by stream of the connectors, and bool `[L]`: where a token is real.

    Where both streams have the same features (LTX-2.0), the video's or old ones' serve both. Raises UserError for
    features that are missing or do not fit.
    """
    out, names = {}, {"video": "video_prompt_embeds", "audio": "audio_prompt_embeds"}
    for s in cfg.streams:
        own = names[s.name]
        if own not in data and not cfg.per_modality_projections:
            own = next((name for name in (names["video"], "prompt_embeds") if name in data), own)
        out[s.name] = _tensor(data, own, (2,))
        if out[s.name].shape[1] != s.feature_dim:
            raise UserError(f"{own} is {list(out[s.name].shape)}, expected [L, {s.feature_dim}] for the connectors")
    mask, (length, *_) = data.get(MASK), next(iter(out.values())).shape
    if not isinstance(mask, Tensor) or mask.shape != (length,) or any(len(x) != length for x in out.values()):
        seen = {name: list(x.shape) for name, x in out.items()}
        raise UserError(f"{MASK} is {_shown(mask)}, expected [{length}] for features {seen}")
    if not bool(mask.any()):
        raise UserError(f"{MASK}: no token of the caption is real")
    return out, mask.bool()


def _shown(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, Tensor) else "missing" if value is None else type(value).__name__


def left_padded(features: Mapping[str, Tensor], mask: Tensor, length: int) -> tuple[dict[str, Tensor], Tensor]:
    """Features `[L, D]` and mask `[L]` at the text encoder's length, zeros on the left: connectors put their registers
    there, over all of that length. Raises UserError for longer ones.
    """
    short = length - len(mask)
    if short < 0:
        raise UserError(f"the caption has {len(mask)} tokens, the text encoder takes {length}")
    pad = torch.nn.functional.pad
    return {name: pad(x, (0, 0, short, 0)) for name, x in features.items()}, pad(mask, (short, 0))


# --- a sample -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Checked:
    """A sample without faults: latents `shapes` by stream, frames per second (None: not noted), seconds of sound."""

    shapes: Mapping[str, tuple[int, ...]]
    fps: float | None
    seconds: float | None


def expected(cfg: LTX2Config) -> dict[str, str]:
    """What latents a model takes, in words."""
    patch = cfg.patch_size_t * cfg.patch_size**2
    return {"video": f"{cfg.in_channels // patch} channels", "audio": f"C * F = {cfg.audio_in_channels}"}


def _misfit(stream: str, shape: Sequence[int], cfg: LTX2Config) -> str | None:
    volume = cfg.patch_size_t * cfg.patch_size**2
    fits = shape[0] * volume == cfg.in_channels if stream == "video" else shape[0] * shape[2] == cfg.audio_in_channels
    return None if fits else f"latents are {list(shape)}, the model takes {expected(cfg)[stream]}"


def check_sample(
    folder: Folder, name: str, cfg: LTX2Config, connectors: ConnectorConfig, length: int
) -> Checked | list[str]:
    """A sample's shapes from its files' headers, or everything that is wrong with it."""
    faults, shapes, fps, seconds = [], {}, None, None
    for place in folder.folders:
        path = folder.path(place, name)
        try:
            data = read_file(path, mapped=True)
            if place == TEXT_FOLDER:
                left_padded(*features_of(data, connectors), length)
                continue
            stream = next(s for s, own in FOLDERS.items() if own == place)
            shapes[stream] = tuple(latents_of(stream, data).shape)
            faults += [f"{path}: {fault}" for fault in [_misfit(stream, shapes[stream], cfg)] if fault is not None]
            if stream == "video":
                fps = _number(data.get("fps"))
            else:
                seconds = _number(data.get("duration"))
        except UserError as error:
            faults.append(str(error) if str(error).startswith(str(path)) else f"{path}: {error}")
    return faults if faults else Checked(shapes, fps, seconds)


def check_samples(
    folder: Folder, cfg: LTX2Config, connectors: ConnectorConfig, length: int
) -> list[Checked | list[str]]:
    """`check_sample` of every sample, by several threads."""
    check: Callable[[str], Checked | list[str]] = lambda name: check_sample(folder, name, cfg, connectors, length)  # noqa: E731
    pool, out = concurrent.futures.ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)), []
    try:
        with progress("checking samples", len(folder.names), "samples") as update:
            for one in pool.map(check, folder.names):
                out.append(one)
                update(len(out))
    finally:
        pool.shutdown(cancel_futures=True)
    return out
