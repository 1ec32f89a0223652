"""A `.precomputed` folder becomes a set: its latents as they are, its texts through the connectors, once."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from infer.ltx2_text import LTX2Text, connector_config, load_connectors
from infer.words import counted
from nn import ltx2_formats
from nn.ltx2_config import MODALITIES, LTX2Config
from nn.ltx2_connectors import ConnectorConfig
from train.precision import FLOATS
from train.preprocess.buckets import Bucket, Clip, Unusable
from train.preprocess.finish import Outcome
from train.preprocess.job import Encoder, How, Job, make_set
from train.preprocess.metadata import Entry, read_metadata
from train.preprocess.models import CONFIG, Sources, with_dtype
from train.preprocess.precomputed import (
    FOLDERS,
    KINDS,
    TEXT_FOLDER,
    Checked,
    Folder,
    check_samples,
    features_of,
    latents_of,
    left_padded,
    open_folder,
    read_file,
)
from train.preprocess.record import MODELS, new_record
from train.preprocess.settings import Settings
from train.preprocess.stamps import stamp
from train.rows import AUDIO, AUDIO_TEXT, TEXT, VIDEO, row_type

OWN = ("dtype", "clips_per_file", "rows_per_group")
"""Settings that mean something for samples whose latents are there."""

PARTS = ("vae", "text_encoder", "audio_vae", "connectors")
"""Models of the pipeline that belong to the samples, as far as they are there; only the connectors are run."""


@dataclasses.dataclass(frozen=True)
class Span:
    """The size of samples of sound alone, in latents; in place of a bucket."""

    latents: int

    def __str__(self) -> str:
        return f"{counted(self.latents, 'latent')} of sound"


def adopt(
    folder: str | Path,
    output: str | Path,
    model: str | Path,
    settings: Settings = Settings(),
    *,
    modality: str | None = None,
    captions: str | Path | None = None,
    without_conditions: bool = False,
    skip_unusable: bool = False,
    device: str | torch.device = "cpu",
    how: How = How(),
) -> Outcome:
    """Makes a set of a `.precomputed` folder of the public LTX trainer, or goes on with one that was begun.

    Args:
        model: folder of the LTX-2 pipeline that the trainer's checkpoint is; its connectors are run.
        settings: those in OWN count.
        modality: `"audio_video"`, `"video"` or `"audio"`: what is taken, and whose connectors are read; None: all that
            there is.
        captions: metadata file with the captions of the samples, which the folder does not hold; its paths are their
            names, whatever their endings.
        without_conditions: take no notice of masks and references.
        skip_unusable: leave out samples that cannot be used.

    Raises:
        UserError: everything that is wrong with the folder, or with the model, in one message, before anything is
            written. Further as `preprocess`.
    """
    model, device = Path(model), torch.device(device)
    settings = with_dtype(settings, device)
    raise_faults("settings that cannot be used", setting_faults(settings))
    streams = None if modality is None else MODALITIES[modality]
    found = open_folder(folder, streams, without_conditions=without_conditions)
    cfg, connectors = configs(model, found.streams)
    text = load_connectors(model, cfg, device=device, dtype=FLOATS[settings.dtype], keep=True)
    entries = entries_of(found, captions)
    placed = examined(found, entries, cfg, connectors, text.length)
    faults = [str(one) for one in placed if isinstance(one, Unusable)]
    if not skip_unusable:
        what = f"{found.root}: {len(faults)} of {counted(len(placed), 'sample')} cannot be used"
        raise_faults(f"{what} (--skip-unusable leaves them out)", faults)
    kind = row_type(KINDS[found.streams])
    noted = {"precomputed": True, "captions": captions is not None}
    noted |= settings.model_dump(mode="json", include=set(OWN))
    sources = Sources(**{name: model / name for name in MODELS if name in PARTS and (model / name / CONFIG).is_file()})
    job = Job(
        entries=entries,
        record=new_record(kind.name, noted, sources, (), entries, device),
        kind=kind,
        survey=lambda rows: {row: placed[row] for row in rows},
        fit=lambda placed: lambda folder: None,
        open=lambda output, begun: encoder(found, cfg, connectors, text, begun),
    )
    return make_set(job, Path(output), how)


# --- before anything is written -------------------------------------------------------------------------------


def setting_faults(settings: Settings) -> list[str]:
    """Settings that decide nothing here, and those that cannot be."""
    changed = [name for name, field in Settings.model_fields.items() if getattr(settings, name) != field.default]
    faults = [f"{name}: decides nothing, the latents are there; leave it out" for name in changed if name not in OWN]
    low = [name for name in ("rows_per_group", "clips_per_file") if getattr(settings, name) < 1]
    return faults + [f"{name} is {getattr(settings, name)}, expected at least 1" for name in low]


def configs(model: Path, streams: Sequence[str]) -> tuple[LTX2Config, ConnectorConfig]:
    """The configs of a pipeline's transformer and of its connectors, for these streams.

    Raises UserError for what is no such pipeline, and for a model that lacks a stream.
    """
    place = model / "transformer"
    cfg = ltx2_formats.read_config(place)
    lacking = [name for name in streams if name not in {s.name for s in cfg.streams}]
    if lacking:
        raise UserError(f"{place}: holds the {cfg.modality} stream only, not {' and '.join(lacking)}")
    modality = next(word for word, names in MODALITIES.items() if names == tuple(streams))
    cfg = ltx2_formats.with_modality(cfg, modality, str(place))
    return cfg, connector_config(model, cfg)


def entries_of(folder: Folder, captions: str | Path | None) -> list[Entry]:
    """The samples, with their captions where there are any. Raises UserError for samples without one in the file."""
    first = FOLDERS[folder.streams[0]]
    listed = [] if captions is None else read_metadata(captions)
    said = {Path(entry.name).with_suffix("").as_posix(): entry.caption for entry in listed}
    lacking = [name for name in folder.names if captions is not None and name not in said]
    raise_faults(f"{captions}: samples of {folder.root} without a caption", lacking)
    return [Entry(name, folder.path(first, name), said.get(name, "")) for name in folder.names]


def examined(
    folder: Folder, entries: Sequence[Entry], cfg: LTX2Config, connectors: ConnectorConfig, length: int
) -> list[Clip | Unusable]:
    """Every sample with its size, or everything that is wrong with it."""
    out: list[Clip | Unusable] = []
    for row, (entry, one) in enumerate(zip(entries, check_samples(folder, cfg, connectors, length), strict=True)):
        if isinstance(one, Checked):
            out.append(Clip(row, entry, size_of(one, cfg), one.fps, stamp(entry.path)))
        else:
            out.append(Unusable(row, entry.name, "; ".join(one)))
    return out


def size_of(sample: Checked, cfg: LTX2Config) -> Bucket | Span:
    """A sample's size in pixels and frames; of sound alone in latents."""
    if "video" not in sample.shapes:
        return Span(sample.shapes["audio"][1])
    (_, t, h, w), (temporal, vertical, horizontal) = sample.shapes["video"], cfg.vae_scale_factors
    return Bucket(w * horizontal, h * vertical, temporal * (t - 1) + 1)


# --- a sample -------------------------------------------------------------------------------------------------


def encoder(folder: Folder, cfg: LTX2Config, connectors: ConnectorConfig, text: LTX2Text, begun: Any) -> Encoder:
    """The function of a sample: its row."""

    def encode(clip: Clip) -> tuple[dict[str, Any], None]:
        begun(clip.row)
        name = clip.entry.name
        stored = {place: read_file(folder.path(place, name)) for place in folder.folders}
        features, mask = left_padded(*features_of(stored[TEXT_FOLDER], connectors), text.length)
        row = {"id": name, "file_name": clip.entry.path.name, "caption": clip.entry.caption}
        for stream, column in (("video", VIDEO), ("audio", AUDIO)):
            if stream in folder.streams:
                row[column.stem] = latents_of(stream, stored[FOLDERS[stream]]).contiguous()
        return {**row, **connected(text, features, mask), **notes(row, clip, cfg)}, None

    return encode


def connected(text: LTX2Text, features: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """What the connectors make of one caption's features `[L, D]`, as rows hold it."""
    made = text.connect({name: x[None] for name, x in features.items()}, mask[None])
    by = {name: x[0].contiguous() for name, x in made.items()}
    return {TEXT.stem: by.get("video", by.get("audio")), **({AUDIO_TEXT.stem: by["audio"]} if len(by) == 2 else {})}


def notes(row: Mapping[str, Any], clip: Clip, cfg: LTX2Config) -> dict[str, Any]:
    """The plain columns of a sample."""
    out, size = {}, clip.bucket
    if AUDIO.stem in row:
        rate = cfg.audio_sampling_rate
        per_second = rate / cfg.audio_hop_length / cfg.audio_scale_factor
        out = {"media_type": "audio", "duration_sec": row[AUDIO.stem].shape[1] / per_second, "audio_sample_rate": rate}
    if VIDEO.stem not in row:
        return out
    seconds = size.frames / clip.fps if clip.fps else None
    sizes = {"width": size.width, "height": size.height, "num_frames": size.frames}
    kind = "image" if size.frames == 1 else "video"
    return {**out, **sizes, "media_type": kind, "duration_sec": seconds, "fps": clip.fps}
