"""What a run notes beside its tensors, from the form of an older version to today's.

A migration takes the record (`checkpoint.json`) and the scalars of its schema, and gives those of the next. Scalars are
None where only weights are wanted. `tests/data/checkpoints` holds a checkpoint of every schema there was.
"""

from collections.abc import Callable, Mapping
from typing import Any

from core.errors import UserError
from core.trees import Params

SCHEMA_VERSION = 2

Record = dict[str, Any]
Notes = tuple[Record, Params | None]


def _count_samples(record: Record, scalars: Params | None) -> Notes:
    """Schema 1 was of one process and counted the data position in microbatches of `data.train_batch_size` samples.

    Since then neither the size of a batch nor the number of processes decides which samples come.
    """
    data = dict(record["data"])
    size = data.pop("train_batch_size")
    if data.get("streaming") is not None:
        data["streaming"] = {k: v for k, v in data["streaming"].items() if k != "world"}
    counted = None if scalars is None else {**scalars, "position": scalars["position"] * size}
    return {**record, "data": data}, counted


MIGRATIONS: Mapping[int, Callable[[Record, Params | None], Notes]] = {1: _count_samples}


def migrated(record: Any, scalars: Params | None, where: str) -> Notes:
    """Record and scalars in today's schema.

    Raises UserError, which begins with `where`, for a schema that no migration starts from, and for a record that
    lacks what its schema has.
    """
    version = record.get("schema_version") if isinstance(record, dict) else None
    if type(version) is not int or not (version == SCHEMA_VERSION or version in MIGRATIONS):
        known = ", ".join(map(str, sorted({*MIGRATIONS, SCHEMA_VERSION})))
        raise UserError(f"{where}: schema_version {version!r}, this version reads {known}")
    try:
        for number in range(version, SCHEMA_VERSION):
            record, scalars = MIGRATIONS[number](record, scalars)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: damaged, not a record of schema {version} ({error!r})") from None
    return {**record, "schema_version": SCHEMA_VERSION}, scalars
