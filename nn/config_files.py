"""Folders in Diffusers' form: `config.json`, read strictly into a frozen dataclass, beside safetensors files."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from core import specs
from core.checkpoint import LazyTree, open_checkpoint
from core.errors import UserError, nearest_names, raise_faults
from core.files import read_json, write_json
from core.save import check_metadata, describe, save_checkpoint
from core.specs import Specs
from core.trees import Params

C = TypeVar("C")


def _wrong_type(default: Any, value: Any) -> str | None:
    """What was expected in place of `value`, or None when it can stand for a field with this default."""
    if value is None:
        return None if default is None else type(default).__name__
    if isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and all(_wrong_type(default[0], v) is None for v in value)
        return None if fits else f"a list of {type(default[0]).__name__}"
    kind = int if default is None else type(default)  # the optional fields of these models are sizes
    allowed = (int, float) if kind is float else (kind,)
    return None if type(value) in allowed else kind.__name__


def parse_config(cls: type[C], data: Mapping[str, Any], source: str, *, fixed: Mapping[str, Any] | None = None) -> C:
    """A config from its entries by name.

    `cls` is a dataclass whose fields all have defaults: int, float, bool, str, a tuple of one of them, or
    None for an optional integer. `fixed` are further entries that may have one value only. Raises one
    UserError that names `source` and lists every fault.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    given, faults = dict(data), []
    for key, only in ({} if fixed is None else fixed).items():
        if given.pop(key, only) != only:
            faults.append(f"{key} is {data[key]!r}, only {only!r} is supported")
    for key, value in given.items():
        if key not in defaults:
            faults.append(f"unknown key {key}{nearest_names(key, defaults)}; known: {', '.join(defaults)}")
        elif (expected := _wrong_type(defaults[key], value)) is not None:
            faults.append(f"{key} is {value!r}, expected {expected}")
    raise_faults(f"{source}: cannot be used", faults)
    try:
        return cls(**given)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def read_config(
    cls: type[C], path: str | Path, tag: str, name: str, *, fixed: Mapping[str, Any] | None = None
) -> C:
    """The config of a JSON file whose entry `tag` must be `name` (`{"_class_name": "AutoencoderKLWan", ...}`).

    Other keys that start with an underscore are notes of the writer and ignored. Raises one UserError that
    names the file and lists every fault.
    """
    data = read_json(path)
    if not isinstance(data, dict) or data.get(tag) != name:
        found = data.get(tag) if isinstance(data, dict) else type(data).__name__
        raise_faults(f"{path}: wrong kind of model", [f"{tag} is {found!r}, expected {name!r}"])
    given = {key: value for key, value in data.items() if key != tag and not key.startswith("_")}
    return parse_config(cls, given, str(path), fixed=fixed)


def open_model(
    folder: str | Path,
    cls: type[C],
    name: str,
    specs_of: Callable[[C], Specs],
    *,
    fixed: Mapping[str, Any] | None = None,
) -> tuple[LazyTree, C]:
    """The folder of a model with the class name `name`, its leaves not read yet, and its config.

    Args:
        specs_of: the specs that a config asks for.

    Raises:
        UserError: naming the file and every fault of config, keys and shapes; before any tensor is read.
    """
    cfg = read_config(cls, Path(folder) / "config.json", "_class_name", name, fixed=fixed)
    tree = open_checkpoint(folder)
    check_metadata(tree, name)
    specs.check(tree, specs_of(cfg), what=str(folder))
    return tree, cfg


def save_model(folder: str | Path, params: Params, wanted: Specs, config: Mapping[str, Any]) -> None:
    """Writes such a folder: `config` with its `_class_name`, and safetensors files.

    Raises UserError for parameters that are not those of the specs `wanted`, before anything is written.
    """
    specs.check(params, wanted, what=config["_class_name"])
    save_checkpoint(folder, params, metadata=describe(config["_class_name"], config))
    write_json(Path(folder) / "config.json", config)
