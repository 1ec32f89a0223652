"""What a folder of LTX-2 says of how it is sampled: its notes, its scheduler, else the official recipe."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import UserError, raise_faults
from infer.encoders import read_mapping
from infer.folder import INDEX
from infer.ltx2_guidance import GUIDANCE
from infer.ltx2_schedules import LTX2_SAMPLERS, SHIFTS, TERMINAL, TOKENS
from infer.schedules import is_int, is_number
from nn.ltx2_config import PRESETS, LTX2Config
from nn.ltx2_lora import version_of

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
PUBLIC_SIZE = {"num_frames": 121, "height": 512, "width": 768}


@dataclasses.dataclass(frozen=True)
class LTX2Defaults:
    """What sampling uses when nothing else is asked for. None: the caller must say.

    The last three scales are of both streams, see `infer.ltx2_guidance.StreamGuidance`. `distilled` marks weights that
    were distilled to the fixed schedules of `ltx2_schedules.DISTILLED_SIGMAS`.
    """

    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    fps: float = 24.0
    steps: int = 40
    sampler: str = "euler"
    guidance_scale: float = 3.0
    audio_guidance_scale: float = 7.0
    stg_scale: float = 0.0
    stg_blocks: tuple[int, ...] = ()
    modality_scale: float = 1.0
    guidance_rescale: float = 0.0
    distilled: bool = False


def scheduler_config(distilled: bool) -> dict[str, Any]:
    """`scheduler_config.json` of the same schedule for Diffusers; distilled models bring sigmas of their own."""
    return {
        "_class_name": SCHEDULER,
        "num_train_timesteps": 1000,
        "use_dynamic_shifting": not distilled,
        "base_shift": SHIFTS[0],
        "max_shift": SHIFTS[1],
        "base_image_seq_len": TOKENS[0],
        "max_image_seq_len": TOKENS[1],
        "shift_terminal": None if distilled else TERMINAL,
        "time_shift_type": "exponential",
    }


def _noted_fault(name: str, value: Any) -> str | None:
    """What is wrong with an entry of `_sampling`, or None."""
    if name in ("num_frames", "height", "width", "steps"):
        return None if is_int(value) and value >= 1 else "expected an integer of at least 1"
    if name == "fps":
        return None if is_number(value) and value > 0 else "expected a number above 0"
    if name in ("guidance_scale", "audio_guidance_scale", "stg_scale", "modality_scale"):
        return None if is_number(value) else "expected a number"
    if name == "guidance_rescale":
        return None if is_number(value) and 0 <= value <= 1 else "expected a number from 0 to 1"
    if name == "stg_blocks":
        return None if isinstance(value, list) and all(map(is_int, value)) else "expected a list of integers"
    if name == "sampler":
        return None if value in LTX2_SAMPLERS else f"expected one of {', '.join(LTX2_SAMPLERS)}"
    if name == "distilled":
        return None if isinstance(value, bool) else "expected true or false"
    return f"unknown, expected one of {', '.join(f.name for f in dataclasses.fields(LTX2Defaults))}"


def _public(cfg: LTX2Config) -> dict[str, Any]:
    """Size and guidance that the official recipes give a public model; nothing for models of another depth."""
    name = "ltx-2-19b" if version_of(cfg) == "2.0" else "ltx-2.3-22b"
    if cfg.num_layers != PRESETS[name].num_layers:
        return {}
    video, audio = GUIDANCE[name]["video"], GUIDANCE[name]["audio"]
    shared = {"stg_scale": video.stg_scale, "stg_blocks": video.stg_blocks, "modality_scale": video.modality_scale}
    scales = {"guidance_scale": video.cfg_scale, "audio_guidance_scale": audio.cfg_scale}
    return {**PUBLIC_SIZE, **scales, **shared, "guidance_rescale": video.rescale}


def _scheduler_faults(folder: Path) -> tuple[bool, list[str]]:
    """Whether a folder's scheduler is that of distilled weights, and its entries that we would not follow."""
    path = folder / "scheduler" / "scheduler_config.json"
    if not path.is_file():
        return False, []
    config = read_mapping(path)
    if (name := config.get("_class_name")) != SCHEDULER:
        return False, [f"{path}: scheduler {name!r}, expected {SCHEDULER}"]
    distilled = config.get("use_dynamic_shifting", False) is False
    ours = scheduler_config(distilled)
    names = ("num_train_timesteps", "shift_terminal") if distilled else tuple(ours)
    other = [k for k in names if config.get(k, ours[k]) != ours[k]]
    return distilled, [f"{path}: {k} is {config[k]!r}, only {ours[k]!r} is supported" for k in other]


def read_defaults(folder: Path, index: Mapping[str, Any], cfg: LTX2Config) -> LTX2Defaults:
    """The sampling that an export noted in the index; of a folder that notes none, the official recipe.

    A scheduler that does not shift is that of distilled weights. Raises one UserError for every entry that cannot be
    used.
    """
    noted = index.get("_sampling", {})
    if not isinstance(noted, dict):
        raise UserError(f"{folder / INDEX}: _sampling is {noted!r}, expected a mapping")
    distilled, faults = _scheduler_faults(folder)
    bad = {k: why for k, v in noted.items() if (why := _noted_fault(k, v)) is not None}
    faults += [f"{folder / INDEX}: _sampling.{k} is {noted[k]!r}: {why}" for k, why in bad.items()]
    raise_faults(f"{folder}: cannot be sampled from", faults)
    found = {"distilled": distilled, **(noted if "_sampling" in index else _public(cfg))}
    return LTX2Defaults(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items()})
