"""Row types of preprocessed Parquet sets: columns, tensors, and how rows become a batch.

A tensor is stored in three columns: `X_bytes` (raw, little-endian, C order), `X_shape` and `X_dtype`. The
columns are those of FastVideo's preprocessed sets, in their order, so that published sets load; a file may lack the
columns of an optional tensor.

Types with sound: `t2va` (clips) and `t2a` (sound alone). `text_embedding` is the text of the video, and of the sound
where a row has no `audio_text_embedding`. `narrowed(row_type, streams)`, which `train.data.open_dataset(..., streams=)`
applies, is a type as a model of one stream sees it: the other stream's tensors are neither read nor in a batch.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from core.errors import UserError, nearest_names

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "uint8": torch.uint8,  # pictures
}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples of equal shapes, float32 on the CPU, as dicts of named channels.

    `targets` is what a model learns to make: `video` `[B, C, T, H, W]`, `audio` `[B, C, T, F]`. `conditions` is
    what it is given: `text` `[B, L, D]` (zero beyond `text_lens`), of sound alone that of the sound; `audio_text`
    `[B, L', D']` (zero beyond `audio_text_lens`), the text of the sound where the rows of both have another than the
    video's; `image` `[B, M, D'']` (features of the first frame), `first_frame` `[B, C, T, H, W]` (latents of a clip
    that is grey after its first frame).
    `names` are the rows' ids, `indices` their places in the dataset, and `fps` the rates of their videos in frames per
    second; None for pictures, sound, and where it is not noted.
    """

    targets: dict[str, Tensor]
    conditions: dict[str, Tensor]
    text_lens: list[int]
    names: list[str]
    indices: list[int]
    fps: list[float | None] = dataclasses.field(default_factory=list)
    audio_text_lens: list[int] = dataclasses.field(default_factory=list)

    @property
    def latents(self) -> Tensor:
        """The video latents."""
        return self.targets["video"]

    @property
    def text(self) -> Tensor:
        """The padded text embeddings."""
        return self.conditions["text"]


@dataclasses.dataclass(frozen=True)
class TensorColumn:
    """A tensor named `stem` with one letter per dimension in `dims`; leading dimensions of 1 may be there too.

    It becomes the channel `target` or `condition` of a batch; without either it is a note, which training never
    reads and which may be absent from a row, as may an `optional` channel: then it is absent from the row's batch too.
    Sizes of the dimensions in `free` may differ within a batch.
    """

    stem: str
    dims: str
    target: str | None = None
    condition: str | None = None
    free: str = ""
    optional: bool = False

    @property
    def is_note(self) -> bool:
        """Whether no channel is made of it."""
        return self.target is None and self.condition is None

    @property
    def may_lack(self) -> bool:
        """Whether a row can be without it: then its bytes and its shape are empty."""
        return self.optional or self.is_note


@dataclasses.dataclass(frozen=True)
class RowType:
    """`schema` lists every column, `tensors` those that are tensors, the one that defines the sample first."""

    name: str
    schema: pa.Schema
    tensors: tuple[TensorColumn, ...]

    @property
    def channels(self) -> tuple[TensorColumn, ...]:
        """The tensors that a batch holds."""
        return tuple(column for column in self.tensors if not column.is_note)


# The sizes that samples of one batch share, per channel of the row type; None where they may differ, () without it.
Signature = tuple[tuple[int | None, ...], ...]


def stored_columns(stem: str) -> list[str]:
    """The columns that hold a tensor."""
    return [f"{stem}_{part}" for part in ("bytes", "shape", "dtype")]


def _row_type(name: str, tensors: Sequence[TensorColumn], notes: Mapping[str, pa.DataType]) -> RowType:
    fields = [pa.field("id", pa.string())]
    for column in tensors:
        kinds = (pa.binary(), pa.list_(pa.int64()), pa.string())
        fields += [pa.field(*pair) for pair in zip(stored_columns(column.stem), kinds, strict=True)]
    return RowType(name, pa.schema(fields + [pa.field(*pair) for pair in notes.items()]), tuple(tensors))


VIDEO = TensorColumn("vae_latent", "CTHW", target="video")
AUDIO = TensorColumn("audio_latent", "CTF", target="audio")
TEXT = TensorColumn("text_embedding", "LD", condition="text", free="L")
AUDIO_TEXT = TensorColumn("audio_text_embedding", "LD", condition="audio_text", free="L", optional=True)
SOLE_TEXT = dataclasses.replace(AUDIO_TEXT, condition="text")  # takes the place of text_embedding in a batch
IMAGE = TensorColumn("clip_feature", "LD", condition="image", optional=True)  # models without CLIP need none
FIRST_FRAME = TensorColumn("first_frame_latent", "CTHW", condition="first_frame")
PICTURE = TensorColumn("pil_image", "CHW")

CLIP_NOTES = {
    "file_name": pa.string(),
    "caption": pa.string(),
    "media_type": pa.string(),
    "width": pa.int64(),
    "height": pa.int64(),
    "num_frames": pa.int64(),
    "duration_sec": pa.float64(),
    "fps": pa.float64(),
}

T2V = _row_type("t2v", (VIDEO, TEXT), CLIP_NOTES)
I2V = _row_type("i2v", (VIDEO, TEXT, IMAGE, FIRST_FRAME, PICTURE), CLIP_NOTES)
T2VA = _row_type("t2va", (VIDEO, AUDIO, TEXT, AUDIO_TEXT), {**CLIP_NOTES, "audio_sample_rate": pa.int64()})
SOUND_NOTES = {
    "file_name": pa.string(),
    "caption": pa.string(),
    "media_type": pa.string(),
    "duration_sec": pa.float64(),
    "audio_sample_rate": pa.int64(),
}
T2A = _row_type("t2a", (AUDIO, TEXT, SOLE_TEXT), SOUND_NOTES)
TEXT_ONLY = _row_type("text_only", (TEXT,), {"caption": pa.string()})

ROW_TYPES = {row_type.name: row_type for row_type in (T2V, I2V, T2VA, T2A, TEXT_ONLY)}


def unread(row_type: RowType, *stems: str) -> RowType:
    """The type with these tensors as notes: they are in its files, but not read."""
    as_note = lambda c: dataclasses.replace(c, target=None, condition=None) if c.stem in stems else c  # noqa: E731
    return dataclasses.replace(row_type, tensors=tuple(map(as_note, row_type.tensors)))


def narrowed(row_type: RowType, streams: Sequence[str] | None) -> RowType:
    """The type as a model of these streams, `"video"` and `"audio"`, sees it; None: as it is.

    The sound's text becomes `text` where there is no video. Raises UserError for a stream that the rows do not have.
    """
    if streams is None:
        return row_type
    has = {column.target for column in row_type.tensors} - {None}
    if lacking := [name for name in streams if name not in has]:
        found = ", ".join(sorted(has, reverse=True)) if has else "neither video nor audio"
        raise UserError(f"rows of type {row_type.name} have no {' and no '.join(lacking)}: they hold {found}")
    if set(streams) == has:
        return row_type
    if "audio" not in streams:
        return unread(row_type, AUDIO.stem, AUDIO_TEXT.stem)
    tensors = tuple(SOLE_TEXT if column == AUDIO_TEXT else column for column in row_type.tensors)
    return unread(dataclasses.replace(row_type, tensors=tensors), VIDEO.stem)


def read_columns(row_type: RowType) -> list[str]:
    """The columns that readers ask a file for: all but tensors that are notes."""
    left = {part for column in row_type.tensors if column.is_note for part in stored_columns(column.stem)}
    return [name for name in row_type.schema.names if name not in left]


def pad_text(texts: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Texts `[L_i, D]` -> `[B, max L_i, D]` with zeros at the end, and their lengths."""
    return torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True), [len(text) for text in texts]


def collate(row_type: RowType, rows: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> Batch:
    """Decoded rows of one signature as a `Batch`."""
    targets, conditions, lens = {}, {}, {"text": [], "audio_text": []}
    for column in row_type.channels:
        if column.optional and rows[0].get(column.stem) is None:
            continue
        tensors = [row[column.stem].float() for row in rows]
        if column.condition in lens:
            conditions[column.condition], lens[column.condition] = pad_text(tensors)
        elif column.condition is not None:
            conditions[column.condition] = torch.stack(tensors)
        else:
            targets[column.target] = torch.stack(tensors)
    names, rates = [row["id"] for row in rows], [rate_of(row) for row in rows]
    return Batch(targets, conditions, lens["text"], names, list(indices), rates, lens["audio_text"])


def rate_of(row: Mapping[str, Any]) -> float | None:
    """Frames per second that a row notes; None for a picture, whose rate is made up, and where none is noted."""
    return float(row["fps"]) if row.get("fps") and row.get("num_frames") != 1 else None


def row_type(name: str) -> RowType:
    """The row type of that name. Raises UserError listing the known ones."""
    if name not in ROW_TYPES:
        raise UserError(f"row type {name!r} is not known{nearest_names(name, ROW_TYPES)}: {', '.join(ROW_TYPES)}")
    return ROW_TYPES[name]


def _kind(kind: pa.DataType) -> str:
    """What a column holds, whatever its width or offsets."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return f"list of {_kind(kind.value_type)}"
    if pa.types.is_dictionary(kind):
        return _kind(kind.value_type)
    names = {
        "binary": (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary),
        "text": (pa.types.is_string, pa.types.is_large_string),
        "integer": (pa.types.is_integer,),
        "floating": (pa.types.is_floating,),
    }
    return next((name for name, tests in names.items() if any(test(kind) for test in tests)), str(kind))


def lacks(column: TensorColumn, schema: pa.Schema) -> bool:
    """Whether a file has none of the columns of an optional tensor: then no row has it."""
    return column.optional and not any(part in schema.names for part in stored_columns(column.stem))


def check_schema(row_type: RowType, schema: pa.Schema, where: str) -> None:
    """Refuses the columns of another row type.

    Every column of the type must be there with its kind of value, but those of an optional tensor may be missing
    together. A further tensor (`X_bytes` with `X_shape`) means conditioning that this type would train without, so it
    is refused; further plain columns are notes and are not read. Raises one UserError with both column lists.
    """
    lacking = {part for column in row_type.tensors if lacks(column, schema) for part in stored_columns(column.stem)}
    missing = [field.name for field in row_type.schema if field.name not in {*schema.names, *lacking}]
    expected_tensors = {column.stem for column in row_type.tensors}
    found_tensors = {name.removesuffix("_bytes") for name in schema.names if name.endswith("_bytes")}
    extra = {stem for stem in found_tensors - expected_tensors if f"{stem}_shape" in schema.names}
    unexpected = {part for stem in extra for part in stored_columns(stem)}
    wrong = {
        field.name: f"{_kind(schema.field(field.name).type)}, expected {_kind(field.type)}"
        for field in row_type.schema
        if field.name in schema.names and _kind(schema.field(field.name).type) != _kind(field.type)
    }
    if missing or unexpected or wrong:
        wanted = ", ".join(f"{n} (missing)" if n in missing else n for n in row_type.schema.names)
        marks = {n: "unexpected" for n in unexpected} | wrong
        found = ", ".join(f"{n} ({marks[n]})" if n in marks else n for n in schema.names)
        raise UserError(
            f"{where}: not a file of row type {row_type.name!r}\n  - columns of {row_type.name}: {wanted}"
            f"\n  - columns of the file: {found}"
        )


def check_shape(column: TensorColumn, shape: Sequence[int] | None, where: str) -> tuple[int, ...]:
    """The stored shape without surplus leading ones. Raises UserError for another rank or an empty tensor."""
    dims = ", ".join(column.dims)
    shape = tuple(shape if shape is not None else ())
    while len(shape) > len(column.dims) and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != len(column.dims):
        raise UserError(f"{where}, column {column.stem}_shape: {list(shape)}, expected [{dims}]")
    if min(shape) < 1:
        raise UserError(f"{where}, column {column.stem}_shape: {list(shape)} is empty, {dims} must all be >= 1")
    return shape


def signature_of(column: TensorColumn, shape: Sequence[int]) -> tuple[int | None, ...]:
    """A tensor's part of a signature: its sizes, None where they are free."""
    return tuple(None if d in column.free else n for d, n in zip(column.dims, shape, strict=True))


def decode_tensor(column: TensorColumn, row: Mapping[str, Any], where: str) -> Tensor:
    """One tensor of a row, in its stored dtype.

    Published sets store float32 whatever the dtype column says, so float32 is taken where only that fits
    the number of bytes. Raises UserError naming file, row and column when nothing fits.
    """
    stem = column.stem
    shape = check_shape(column, row[f"{stem}_shape"], where)
    name, data = row[f"{stem}_dtype"], row[f"{stem}_bytes"]
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise UserError(f"{where}, column {stem}_dtype: {name!r}, expected one of {', '.join(DTYPES)}")
    count, size = math.prod(shape), 0 if data is None else len(data)
    if size == count * torch.float32.itemsize:
        dtype = torch.float32
    if size != count * dtype.itemsize:
        expected = f"{count * dtype.itemsize} for {list(shape)} in {name}"
        raise UserError(f"{where}, column {stem}_bytes: {size} bytes, expected {expected}")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def decode_row(row_type: RowType, row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A Parquet row as tensors under their stems beside the plain columns. `where` heads error messages.

    Notes that were not read are left out; what may be absent and is, is None.
    """
    tensors: dict[str, Tensor | None] = {}
    for column in row_type.tensors:
        if not column.may_lack or row.get(f"{column.stem}_bytes"):
            tensors[column.stem] = decode_tensor(column, row, where)
        elif f"{column.stem}_bytes" in row:
            tensors[column.stem] = None
    parts = {part for column in row_type.tensors for part in stored_columns(column.stem)}
    plain = {name: row[name] for name in row_type.schema.names if name not in parts}
    return {**plain, **tensors}


def encode_row(row_type: RowType, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `decode_row`: every column of the type, bitwise the same tensors.

    Raises UserError for a missing or unknown entry, and for a tensor that is empty or of another rank or dtype.
    """
    row = dict(sample)
    where = f"row {sample.get('id')!r} of type {row_type.name}"
    for column in row_type.tensors:
        tensor = row.pop(column.stem, None)
        if column.may_lack and tensor is None:
            row |= dict(zip(stored_columns(column.stem), (b"", [], ""), strict=True))
            continue
        if not isinstance(tensor, Tensor):
            raise UserError(f"{where}: {column.stem} is {type(tensor).__name__}, expected a tensor")
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise UserError(f"{where}: {column.stem} has dtype {name}, expected one of {', '.join(DTYPES)}")
        shape = list(check_shape(column, tensor.shape, where))
        data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        row |= dict(zip(stored_columns(column.stem), (data, shape, name), strict=True))
    off = [f"missing {n}" for n in row_type.schema.names if n not in row]
    off += [f"unknown {n}{nearest_names(n, row_type.schema.names)}" for n in row if n not in row_type.schema.names]
    if off:
        raise UserError(f"{where}: {', '.join(off)}")
    return {name: row[name] for name in row_type.schema.names}
