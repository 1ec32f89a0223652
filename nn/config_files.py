"""`config.json` of small models, read strictly into their frozen dataclasses."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from core.errors import nearest_names, raise_faults
from core.files import read_json

C = TypeVar("C")


def _wrong_type(default: Any, value: Any) -> bool:
    allowed = (int, float) if isinstance(default, float) else (type(default),)
    return isinstance(value, bool) != isinstance(default, bool) or not isinstance(value, allowed)


def read_config(cls: type[C], path: str | Path, tag: str, name: str) -> C:
    """The config of a JSON file whose entry `tag` must be `name` (`{"_class_name": "AutoencoderKLWan", ...}`).

    `cls` is a dataclass whose fields all have defaults of type int, float, bool or str. Other keys that
    start with an underscore are notes of the writer and ignored. Raises one UserError that names the file
    and lists every fault.
    """
    data = read_json(path)
    if not isinstance(data, dict) or data.get(tag) != name:
        found = data.get(tag) if isinstance(data, dict) else type(data).__name__
        raise_faults(f"{path}: wrong kind of model", [f"{tag} is {found!r}, expected {name!r}"])
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    given = {key: value for key, value in data.items() if key != tag and not key.startswith("_")}
    faults = []
    for key, value in given.items():
        if key not in defaults:
            faults.append(f"unknown key {key}{nearest_names(key, defaults)}; known: {', '.join(defaults)}")
        elif _wrong_type(defaults[key], value):
            faults.append(f"{key} is {value!r}, expected {type(defaults[key]).__name__}")
    raise_faults(f"{path}: cannot be used", faults)
    return cls(**given)
