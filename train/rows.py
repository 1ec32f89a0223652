"""Row types of preprocessed Parquet sets: columns, tensors, and how rows become a batch.

A tensor is stored in three columns: `X_bytes` (raw, little-endian, C order), `X_shape` and `X_dtype`. The
columns of `t2v` are those of FastVideo's preprocessed text-to-video sets, so that published sets load.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
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
}


@dataclasses.dataclass(frozen=True)
class Batch:
    """`latents [B, C, T, H, W]` and `text [B, L, D]` (zero beyond `text_lens`), float32 on the CPU.

    `names` are the rows' ids and `indices` their places in the dataset.
    """

    latents: Tensor
    text: Tensor
    text_lens: list[int]
    names: list[str]
    indices: list[int]


@dataclasses.dataclass(frozen=True)
class TensorColumn:
    """A tensor named `stem` with one letter per dimension in `dims`; leading dimensions of 1 may be there too."""

    stem: str
    dims: str


@dataclasses.dataclass(frozen=True)
class RowType:
    """`schema` lists every column. Rows are put together in batches by the shape of the first of `tensors`."""

    name: str
    schema: pa.Schema
    tensors: tuple[TensorColumn, ...]
    collate: Callable[[Sequence[Mapping[str, Any]], Sequence[int]], Batch]


def _tensor_fields(stem: str) -> list[pa.Field]:
    return [
        pa.field(f"{stem}_bytes", pa.binary()),
        pa.field(f"{stem}_shape", pa.list_(pa.int64())),
        pa.field(f"{stem}_dtype", pa.string()),
    ]


def pad_text(texts: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Texts `[L_i, D]` -> `[B, max L_i, D]` with zeros at the end, and their lengths."""
    return torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True), [len(text) for text in texts]


def collate_t2v(rows: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> Batch:
    """Decoded rows with latents of one shape as a `Batch`."""
    text, lens = pad_text([row["text_embedding"].float() for row in rows])
    latents = torch.stack([row["vae_latent"].float() for row in rows])
    return Batch(latents, text, lens, [row["id"] for row in rows], list(indices))


T2V = RowType(
    name="t2v",
    schema=pa.schema(
        [
            pa.field("id", pa.string()),
            *_tensor_fields("vae_latent"),
            *_tensor_fields("text_embedding"),
            pa.field("file_name", pa.string()),
            pa.field("caption", pa.string()),
            pa.field("media_type", pa.string()),
            pa.field("width", pa.int64()),
            pa.field("height", pa.int64()),
            pa.field("num_frames", pa.int64()),
            pa.field("duration_sec", pa.float64()),
            pa.field("fps", pa.float64()),
        ]
    ),
    tensors=(TensorColumn("vae_latent", "CTHW"), TensorColumn("text_embedding", "LD")),
    collate=collate_t2v,
)

ROW_TYPES = {row_type.name: row_type for row_type in (T2V,)}


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


def check_schema(row_type: RowType, schema: pa.Schema, where: str) -> None:
    """Refuses the columns of another row type.

    Every column of the type must be there with its kind of value. A further tensor (`X_bytes` with
    `X_shape`) means conditioning that this type would train without, so it is refused; further plain
    columns are notes and are not read. Raises one UserError with both column lists.
    """
    missing = [field.name for field in row_type.schema if field.name not in schema.names]
    expected_tensors = {column.stem for column in row_type.tensors}
    found_tensors = {name.removesuffix("_bytes") for name in schema.names if name.endswith("_bytes")}
    extra = {stem for stem in found_tensors - expected_tensors if f"{stem}_shape" in schema.names}
    unexpected = {f"{stem}_{part}" for stem in extra for part in ("bytes", "shape", "dtype")}
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
    """A Parquet row as tensors under their stems beside the plain columns. `where` heads error messages."""
    tensors = {column.stem: decode_tensor(column, row, where) for column in row_type.tensors}
    parts = {f"{column.stem}_{part}" for column in row_type.tensors for part in ("bytes", "shape", "dtype")}
    plain = {name: row[name] for name in row_type.schema.names if name not in parts}
    return {**plain, **tensors}


def encode_row(row_type: RowType, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `decode_row`: every column of the type, bitwise the same tensors.

    Raises UserError for a missing or unknown entry, and for a tensor that is empty or of another rank or dtype.
    """
    row = dict(sample)
    where = f"row {sample.get('id')!r} of type {row_type.name}"
    for column in row_type.tensors:
        if not isinstance(tensor := row.pop(column.stem, None), Tensor):
            raise UserError(f"{where}: {column.stem} is {type(tensor).__name__}, expected a tensor")
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise UserError(f"{where}: {column.stem} has dtype {name}, expected one of {', '.join(DTYPES)}")
        row[f"{column.stem}_shape"] = list(check_shape(column, tensor.shape, where))
        row[f"{column.stem}_bytes"] = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        row[f"{column.stem}_dtype"] = name
    off = [f"missing {n}" for n in row_type.schema.names if n not in row]
    off += [f"unknown {n}{nearest_names(n, row_type.schema.names)}" for n in row if n not in row_type.schema.names]
    if off:
        raise UserError(f"{where}: {', '.join(off)}")
    return {name: row[name] for name in row_type.schema.names}
