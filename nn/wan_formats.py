"""Wan's public folder form: a Diffusers `config.json` beside safetensors files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from core.checkpoint import LazyTree
from nn.config_files import open_model
from nn.config_files import read_config as read_dataclass
from nn.wan import WanConfig, param_specs

CLASS_NAME = "WanTransformer3DModel"
FIXED = {"qk_norm": "rms_norm_across_heads"}  # the only variant that Wan's checkpoints use


def to_json(cfg: WanConfig) -> dict[str, Any]:
    """`config.json` of a Diffusers transformer folder."""
    fields = json.loads(json.dumps(dataclasses.asdict(cfg)))
    return {"_class_name": CLASS_NAME, **fields, **FIXED}


def read_config(folder: str | Path) -> WanConfig:
    """The config in `folder/config.json`. Raises one UserError that names the file and lists every fault."""
    return read_dataclass(WanConfig, Path(folder) / "config.json", "_class_name", CLASS_NAME, fixed=FIXED)


def open_transformer(folder: str | Path) -> tuple[LazyTree, WanConfig]:
    """A transformer folder, opened but not read, and its config.

    Raises:
        UserError: another model, or keys and shapes that do not fit the config; before any tensor is read.
    """
    return open_model(folder, WanConfig, CLASS_NAME, param_specs, fixed=FIXED)
