"""An LTX-2 pipeline folder in Diffusers' layout: opened with its models, or written. FastVideo's are opened as well.

    model_index.json      which classes stand in which folder, and the sampling defaults
    transformer/          config.json, diffusion_pytorch_model*.safetensors; one stream or both
    scheduler/            scheduler_config.json
    vae/                  LTX-2's video VAE, or the demos' patch codec
    audio_vae/, vocoder/  LTX-2's audio VAE and what makes sound of its spectrograms; or the demos' mel codec
    text_encoder/         Gemma 3 with the tokenizer/ and the connectors/ beside it, or the demos' hash embedder
    latent_upsampler/     for two stages; optional

Every part is checked when a folder is opened; models other than the demos' are read by the call that needs them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.checkpoint import LazyLeaf, LazyTree
from core.errors import UserError, raise_faults
from core.files import atomic_folder, read_json, write_json
from core.rules import cast
from core.save import describe, save_checkpoint
from core.specs import check
from core.transforms import apply
from core.trees import Params
from infer.autoencoders import AudioVae, Vae, load_audio_vae, load_vae
from infer.encoders import read_mapping
from infer.folder import IMAGE_PIPELINE, INDEX, PIPELINE, copy_files, open_parts
from infer.ltx2_defaults import SCHEDULER, LTX2Defaults, read_defaults, scheduler_config
from infer.ltx2_text import LTX2Text, load_ltx2_text
from nn import ltx2_upsampler
from nn.config_files import open_model
from nn.ltx2_config import LTX2Config
from nn.ltx2_formats import class_name, open_transformer, to_json
from nn.ltx2_specs import param_specs
from nn.ltx2_upsampler import UpsamplerConfig

PIPELINES = {"audio_video": "LTX2Pipeline", "video": "LTX2VideoOnlyPipeline", "audio": "LTX2AudioOnlyPipeline"}
"""Class names of pipelines by the streams of their model; the first is Diffusers', the others are ours."""

# How Diffusers' index names the classes that are its own or transformers'; ours have no such entry.
LIBRARIES = {
    **dict.fromkeys(("AutoencoderKLLTX2Video", "AutoencoderKLLTX2Audio"), "diffusers"),
    **dict.fromkeys(("LTX2Vocoder", "LTX2VocoderWithBWE", "LTX2TextConnectors"), "ltx2"),
    "LTX2LatentUpsamplerModel": "ltx2",
    "Gemma3ForConditionalGeneration": "transformers",
}
PARTS = ("vae", "audio_vae", "vocoder", "text_encoder", "tokenizer", "connectors", "latent_upsampler")
BESIDE_TEXT = ("tokenizer", "connectors", "text_encoder/gemma")  # the last one is FastVideo's


@dataclasses.dataclass(frozen=True)
class LTX2Pipeline:
    """A transformer with the models around it.

    Those that the folder lacks or that we cannot run are None; `absent` then says why. `params` may be leaves that are
    not read yet. `upsampler` makes latents larger, as `nn.ltx2_upsampler.upsample` takes and gives them.
    """

    params: Params | LazyTree
    cfg: LTX2Config
    vae: Vae | None
    sound: AudioVae | None
    text: LTX2Text | None
    defaults: LTX2Defaults
    device: torch.device
    dtype: torch.dtype
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    upsampler: Callable[[Tensor], Tensor] | None = None

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams of the model, video first."""
        return tuple(s.name for s in self.cfg.streams)


def kind_of_pipeline(folder: str | Path) -> str:
    """`"wan"` or `"ltx2"`: what a pipeline folder holds, by the class in its index.

    Raises UserError for another class, or a folder that is no pipeline.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    kinds = {PIPELINE: "wan", IMAGE_PIPELINE: "wan", **dict.fromkeys(PIPELINES.values(), "ltx2")}
    found = read_mapping(folder / INDEX).get("_class_name")
    if found not in kinds:
        raise UserError(f"{folder / INDEX}: _class_name is {found!r}, expected one of {', '.join(kinds)}")
    return kinds[found]


# --- reading --------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> dict[str, Any]:
    """`model_index.json`. Raises UserError for a pipeline of another kind."""
    path = folder / INDEX
    index = read_mapping(path)
    if (found := index.get("_class_name")) not in PIPELINES.values():
        raise UserError(f"{path}: _class_name is {found!r}, expected one of {', '.join(PIPELINES.values())}")
    return index


def load_upsampler(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The latent upsampler of a folder; its weights are read by each call and freed after it.

    Raises UserError for another model, or weights that do not fit the config.
    """
    tree, cfg = open_model(folder, UpsamplerConfig, ltx2_upsampler.CLASS_NAME, ltx2_upsampler.param_specs)
    rational = cfg.rational
    if cfg.temporal_upsample or (rational is not None and rational != (2, 1)):
        raise UserError(f"{folder}: expected an upsampler to twice the height and width, and as many frames")
    bound = cast(dtype)(tree.specs)

    def upsample(latents: Tensor) -> Tensor:
        params = apply(tree, bound).read(device=device)
        return ltx2_upsampler.upsample(params, cfg, latents.to(device, dtype)).float()

    return upsample


def _fitting(found: Any, faults: Sequence[str], folder: Path) -> Any:
    """A model whose sizes fit the transformer's, else a UserError."""
    raise_faults(f"{folder}: it does not fit the transformer", faults)
    return found


def _vae_faults(vae: Vae, cfg: LTX2Config) -> list[str]:
    volume = cfg.patch_size_t * cfg.patch_size**2
    channels, factors = vae.latent_channels * volume, (vae.temporal, vae.spatial, vae.spatial)
    faults = []
    if channels != cfg.in_channels:
        faults.append(f"{channels} channels of a token, in_channels is {cfg.in_channels}")
    if factors != cfg.vae_scale_factors:  # the model's positions rest on them
        faults.append(f"{factors} frames and pixels per latent, vae_scale_factors is {cfg.vae_scale_factors}")
    return faults


def _sound_faults(sound: AudioVae, cfg: LTX2Config) -> list[str]:
    channels = sound.latent_channels * sound.latent_bins
    rate = cfg.audio_sampling_rate / cfg.audio_hop_length / cfg.audio_scale_factor
    faults = []
    if channels != cfg.audio_in_channels:
        faults.append(f"{channels} channels of a token, audio_in_channels is {cfg.audio_in_channels}")
    if sound.latents_per_second != rate:
        faults.append(f"{sound.latents_per_second:g} latents a second, the transformer's positions take {rate:g}")
    return faults


def open_ltx2(
    folder: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    needs: Sequence[str] = (),
    modality: str | None = None,
    vae_dtype: torch.dtype = torch.float32,
    vae_tile: int | None = None,
) -> LTX2Pipeline:
    """Opens a pipeline folder and checks all of it; large models are not read.

    Args:
        needs: of `"vae"`, `"audio_vae"`, `"text_encoder"` and `"latent_upsampler"`, those without which the caller
            cannot go on. The others are None in the result where they are absent or cannot be run.
        modality: the streams to open of a model with both; the other one's weights are never read. None: all.
        vae_tile: see `infer.autoencoders.load_vae`.

    Raises:
        UserError: one message for what is needed and cannot be run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    index = read_index(folder)
    tree, cfg = open_transformer(folder / "transformer", modality)
    names, defaults = [s.name for s in cfg.streams], read_defaults(folder, index, cfg)
    vocoder = folder / "vocoder" if (folder / "vocoder").is_dir() else None

    def vae(part: Path) -> Vae:
        found = load_vae(part, device=device, dtype=vae_dtype, keep=False, tile=vae_tile)
        return _fitting(found, _vae_faults(found, cfg), part)

    def sound(part: Path) -> AudioVae:
        found = load_audio_vae(part, vocoder, device=device, dtype=vae_dtype)
        return _fitting(found, _sound_faults(found, cfg), part)

    loaders: dict[str, Callable[[Path], Any]] = {
        "vae": vae,
        "audio_vae": sound,
        "text_encoder": lambda part: load_ltx2_text(folder, cfg, device=device, dtype=dtype),
        "latent_upsampler": lambda part: load_upsampler(part, device=device, dtype=vae_dtype),
    }
    unused = {"vae": "video" not in names, "audio_vae": "audio" not in names, "latent_upsampler": "video" not in names}
    idle = {name: f"the model is {cfg.modality}" for name, none in unused.items() if none}
    found, absent = open_parts(folder, loaders, needs, idle)
    model_specs = param_specs(cfg)
    bound = cast(dtype, keep_fp32=lambda k: model_specs[k].keep_fp32)(tree.specs)
    return LTX2Pipeline(
        apply(tree, bound),
        cfg,
        found.get("vae"),
        found.get("audio_vae"),
        found.get("text_encoder"),
        defaults,
        device,
        dtype,
        absent,
        found.get("latent_upsampler"),
    )


# --- writing --------------------------------------------------------------------------------------------------


def _entry(folder: Path) -> list[str]:
    """How the index names the model in a folder."""
    config = folder / "config.json"
    if config.is_file():
        found = read_json(config)
        kind = found.get("_class_name", next(iter(found.get("architectures", [])), found.get("model_type")))
        return [LIBRARIES.get(kind, "latentree"), kind]
    return ["transformers", read_mapping(folder / "tokenizer_config.json").get("tokenizer_class")]


def write_index(folder: Path, cfg: LTX2Config, sampling: Mapping[str, Any] | None = None) -> None:
    """`model_index.json` of the models that are in a folder, with how they are sampled where that is noted."""
    index: dict[str, Any] = {"_class_name": PIPELINES[cfg.modality]}
    index["transformer"] = ["diffusers" if cfg.crossed else "latentree", class_name(cfg)]
    index["scheduler"] = ["diffusers", SCHEDULER]
    index |= {name: _entry(folder / name) for name in PARTS if (folder / name).is_dir()}
    write_json(folder / INDEX, index if sampling is None else {**index, "_sampling": sampling})


def write_scheduler(folder: Path, distilled: bool) -> None:
    """`scheduler/scheduler_config.json` of a pipeline's folder."""
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler_config(distilled))


def save_ltx2(
    folder: str | Path,
    params: Mapping[str, Tensor | LazyLeaf],
    cfg: LTX2Config,
    defaults: LTX2Defaults,
    *,
    parts: Mapping[str, Path],
    transforms: Sequence[str] = (),
) -> None:
    """Writes a pipeline folder that appears whole; with both streams its `transformer/` loads in Diffusers as it is.

    Args:
        params: tensors or lazy leaves with the canonical keys.
        parts: folders to copy, by the names of `PARTS`. What stands beside a text encoder goes with it.

    Raises:
        UserError: params that do not fit the config, or a part of another name, before anything is written.
    """
    check(params, param_specs(cfg), what=str(folder))
    raise_faults(f"parts of {folder}", [f"{k}: none of {', '.join(PARTS)}" for k in parts if k not in PARTS])
    text = parts.get("text_encoder")
    beside = {} if text is None else {n: text.parent / n for n in BESIDE_TEXT if (text.parent / n).is_dir()}
    wanted = {**parts, **{name: place for name, place in beside.items() if name not in parts}}
    with atomic_folder(folder) as part:
        metadata = describe(class_name(cfg), to_json(cfg), transforms)
        save_checkpoint(part / "transformer", params, metadata=metadata)
        write_json(part / "transformer" / "config.json", to_json(cfg))
        write_scheduler(part, defaults.distilled)
        for name, source in wanted.items():
            copy_files(source, part / name)
        write_index(part, cfg, {k: v for k, v in dataclasses.asdict(defaults).items() if v is not None})
