"""Wan's public folder form: a Diffusers `config.json` beside safetensors files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from core.errors import UserError, raise_faults, nearest_names
from core.files import read_json
from nn.wan import WanConfig

CLASS_NAME = "WanTransformer3DModel"
FIXED = {"qk_norm": "rms_norm_across_heads"}  # the only variant that Wan's checkpoints use


def to_json(cfg: WanConfig) -> dict[str, Any]:
    """`config.json` of a Diffusers transformer folder."""
    fields = json.loads(json.dumps(dataclasses.asdict(cfg)))
    return {"_class_name": CLASS_NAME, **fields, **FIXED}


def from_json(data: dict[str, Any], source: str) -> WanConfig:
    """The config of a `config.json`'s contents.

    Raises:
        UserError: another model class, unknown or unsupported keys, wrong types; all in one message that
            names `source`.
    """
    if data.get("_class_name") != CLASS_NAME:
        raise UserError(f"{source}: _class_name is {data.get('_class_name')!r}, expected {CLASS_NAME!r}")
    body = {k: v for k, v in data.items() if not k.startswith("_")}
    known = {f.name: f for f in dataclasses.fields(WanConfig)}
    faults = [f"{k} = {body[k]!r} is not supported, only {v!r}" for k, v in FIXED.items() if body.pop(k, v) != v]
    faults += [f"unknown key {k!r}{nearest_names(k, known)}" for k in body if k not in known]
    for name, value in body.items():
        if name in known and (why := _type_fault(known[name].default, value)) is not None:
            faults.append(f"{name} = {value!r}: {why}")
    raise_faults(f"{source}: not a config this version can run", faults)
    return WanConfig(**body)


def _type_fault(default: Any, value: Any) -> str | None:
    """Why `value` cannot stand for a field with this default, or None."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "expected true or false"
    if isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and all(type(n) is int for n in value)
        return None if fits else "expected a list of integers"
    if isinstance(default, float):
        return None if type(value) in (int, float) else "expected a number"
    if default is None and value is None:
        return None
    return None if type(value) is int else "expected an integer"


def read_config(folder: str | Path) -> WanConfig:
    """The config in `folder/config.json`. Raises UserError naming the file."""
    path = Path(folder) / "config.json"
    return from_json(read_json(path), str(path))
