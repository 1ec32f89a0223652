"""Autoencoders of pipeline folders behind one interface for pictures and one for sound.

Pictures: Wan's VAEs, LTX-2's video VAEs, and the demos' patch codec. Sound: LTX-2's audio VAE with its vocoder, and the
demos' mel codec. LTX-2's are in Diffusers' form or in FastVideo's.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.checkpoint import LazyTree, open_checkpoint
from core.errors import UserError, raise_faults
from core.geometry import to_frames
from core.rules import cast
from core.save import check_metadata
from core.specs import check
from core.transforms import apply
from core.trees import Params
from infer.encoders import kind_of, read_mapping
from nn import ltx2_audio, ltx2_vae, ltx2_vae_tiling, ltx2_vocoder, ltx2_vocoder_config, mel_codec, patch_codec, wan_vae
from nn import ltx2_fastvideo as fastvideo
from nn.config_files import open_model
from nn.ltx2_audio_mel import log_mel
from nn.ltx2_vocoder_config import AnyVocoderConfig
from nn.wan_vae_strips import decode_strips

# Latent frames that are decoded or encoded at a time. The cache of the causal layers makes the result that of one
# pass over everything; fewer save memory, more save launches of kernels.
CHUNK = 4


@dataclasses.dataclass(frozen=True)
class Vae:
    """An autoencoder with its weights bound.

    `decode(latents [B,C,t,h,w]) -> video [B,3,T,H,W]` in [-1, 1] and `encode`, its inverse for T = temporal * k + 1,
    take and return normalised latents. `decode_chunks` yields the video of `decode` in parts along time, so that
    the whole of it is never in the device's memory. Both are None where the model has none. `denormalise` gives
    latents as the encoder's last layer does, which LTX-2's upsamplers take, and `normalise` is its inverse; None where
    nothing takes such latents.
    """

    decode: Callable[[Tensor], Tensor]
    latent_channels: int
    spatial: int
    temporal: int
    encode: Callable[[Tensor], Tensor] | None = None
    decode_chunks: Callable[[Tensor], Iterator[Tensor]] | None = None
    normalise: Callable[[Tensor], Tensor] | None = None
    denormalise: Callable[[Tensor], Tensor] | None = None


def _reader(read: Callable[[], Params], keep: bool) -> Callable[[], Params]:
    """Gives the weights: read at every call, or with `keep` at the first one and held."""
    held: list[Params] = []

    def get() -> Params:
        if not keep:
            return read()
        if not held:
            held.append(read())
        return held[0]

    return get


# --- pictures -------------------------------------------------------------------------------------------------


def _codec_chunks(params: Params, cfg: patch_codec.PatchCodecConfig, latents: Tensor) -> Iterator[Tensor]:
    for i, part in enumerate(latents.split(CHUNK, dim=2)):
        yield patch_codec.decode(params, cfg, part, first=i == 0)


def _codec(folder: Path, device: torch.device) -> Vae:
    params, cfg = patch_codec.load(folder, device=device)
    return Vae(
        lambda z: patch_codec.decode(params, cfg, z),
        cfg.latent_channels,
        cfg.spatial,
        cfg.temporal,
        encode=lambda video: patch_codec.encode(params, cfg, video),
        decode_chunks=lambda z: _codec_chunks(params, cfg, z),
    )


def _wan_chunks(params: Params, cfg: wan_vae.WanVaeConfig, latents: Tensor) -> Iterator[Tensor]:
    cache, parts = {}, latents.split(CHUNK, dim=2)
    for i, part in enumerate(parts):
        frames, cache = wan_vae.decode_chunk(params, cfg, part, cache, last=i + 1 == len(parts))
        yield frames


def _wan_vae(
    cfg: wan_vae.WanVaeConfig, read: Callable[[], Params], device: torch.device, dtype: torch.dtype, strips: int
) -> Vae:
    """`read()` gives the weights for one call."""

    def encode(video: Tensor) -> Tensor:
        return wan_vae.encode(read(), cfg, video.to(device, dtype), chunk=CHUNK).float()

    def decode(latents: Tensor) -> Tensor:
        z = latents.to(device, dtype)
        if strips == 1:
            return wan_vae.decode(read(), cfg, z, chunk=CHUNK)
        return decode_strips(read(), cfg, z, strips=min(strips, max(z.shape[3:])), chunk=2)

    return Vae(
        decode,
        cfg.z_dim,
        cfg.scale_factor_spatial,
        cfg.scale_factor_temporal,
        encode=encode,
        decode_chunks=None if strips > 1 else lambda z: _wan_chunks(read(), cfg, z.to(device, dtype)),
    )


def _ltx2_chunks(params: Params, cfg: ltx2_vae.LTX2VaeConfig, latents: Tensor) -> Iterator[Tensor]:
    """A decoder that is not causal holds frames back, so chunks differ in length; those without frames are left out."""
    cache, parts = {}, latents.split(CHUNK, dim=2)
    for i, part in enumerate(parts):
        frames, cache = ltx2_vae.decode_chunk(params, cfg, part, cache, last=i + 1 == len(parts))
        if frames.shape[2]:
            yield frames


def _check_decoder(folder: Path, cfg: ltx2_vae.LTX2VaeConfig) -> None:
    """Raises UserError for decoders that want noise besides latents, which no released LTX-2 does."""
    given = {"timestep_conditioning": cfg.timestep_conditioning, "decoder_inject_noise": any(cfg.decoder_inject_noise)}
    raise_faults(f"{folder}: pipelines cannot run this decoder", [f"{name} is set" for name in given if given[name]])


def _ltx2_vae(
    cfg: ltx2_vae.LTX2VaeConfig,
    statistics: Params,
    read: Callable[[], Params],
    device: torch.device,
    dtype: torch.dtype,
    tile: int | None,
) -> Vae:
    """`read()` gives the weights for one call; `statistics` are those of the latents."""
    chunk = CHUNK if cfg.encoder_causal else None
    tiles = None if tile is None else {"tile": (tile, tile), "overlap": (tile // 4, tile // 4)}

    def encode(video: Tensor) -> Tensor:
        x = video.to(device, dtype)
        if tiles is None:
            return ltx2_vae.encode(read(), cfg, x, chunk=chunk).float()
        return ltx2_vae_tiling.tiled_encode(read(), cfg, x, chunk=chunk, **tiles).float()

    def decode(latents: Tensor) -> Tensor:
        z = latents.to(device, dtype)
        if tiles is None:
            return ltx2_vae.decode(read(), cfg, z, chunk=CHUNK)
        tall = {"tile": (z.shape[2], *tiles["tile"]), "overlap": (0, *tiles["overlap"])}
        return ltx2_vae_tiling.tiled_decode(read(), cfg, z, chunk=CHUNK, **tall)

    return Vae(
        decode,
        cfg.latent_channels,
        cfg.factor_s,
        cfg.factor_t,
        encode=encode,
        decode_chunks=None if tile is not None else lambda z: _ltx2_chunks(read(), cfg, z.to(device, dtype)),
        normalise=lambda raw: ltx2_vae.normalise(statistics, cfg, raw),
        denormalise=lambda latents: ltx2_vae.denormalise(statistics, cfg, latents),
    )


def load_vae(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    keep: bool = True,
    strips: int = 1,
    tile: int | None = None,
) -> Vae:
    """The autoencoder of a `vae/` folder: Wan's or LTX-2's VAE in `dtype`, or the patch codec, which stays in float32.

    Args:
        keep: read a VAE's weights now and hold them; False reads them at every call and frees them after it.
        strips: of Wan's VAE, into how many strips of the picture decoding is cut, with equal results, to save memory
            (see `nn.wan_vae_strips`); no more than the longer side has latent pixels are used.
        tile: of LTX-2's VAE, latent pixels along the side of the square tiles that pictures are cut into to save
            memory; neighbours share a quarter and are blended, so results are near those without. None: no tiles.

    Raises:
        UserError: another class, by name; keys and shapes that do not fit the config, before any tensor is read;
            strips, tiles or a dtype for a model that has no use for them.
    """
    folder, device = Path(folder), torch.device(device)
    config = read_mapping(folder / "config.json")
    name = config.get("_class_name")
    known = (patch_codec.CLASS_NAME, wan_vae.CLASS_NAME, ltx2_vae.CLASS_NAME, fastvideo.CLASS_NAMES["vae"])
    if name not in known:
        seen, ours = kind_of(config, "_class_name"), ", ".join(map(repr, known))
        raise UserError(f"{folder}: _class_name {seen} cannot be run as a VAE by this version, only {ours}")
    _check_options(folder, name, dtype, strips, tile)
    if name == patch_codec.CLASS_NAME:
        return _codec(folder, device)
    tree, cfg, load = _opened_vae(name, folder, device, dtype)
    if name != wan_vae.CLASS_NAME:
        _check_decoder(folder, cfg)
    read = _reader(load, keep)
    if keep:
        read()
    if name == wan_vae.CLASS_NAME:
        return _wan_vae(cfg, read, device, dtype, strips)
    statistics = {k: tree[k].read() for k in ("latents_mean", "latents_std")}
    return _ltx2_vae(cfg, statistics, read, device, dtype, tile)


def _opened_vae(
    name: str, folder: Path, device: torch.device, dtype: torch.dtype
) -> tuple[LazyTree, Any, Callable[[], Params]]:
    """A VAE of the class `name` that is checked and not read, its config, and what reads its weights."""
    if name == fastvideo.CLASS_NAMES["vae"]:
        tree, cfg = fastvideo.open_part(folder, "vae")
        return tree, cfg, lambda: _read_fastvideo_vae(tree, cfg, device, dtype)
    kind, load = (wan_vae, _read_wan_vae) if name == wan_vae.CLASS_NAME else (ltx2_vae, _read_ltx2_vae)
    return *kind.open_folder(folder), lambda: load(folder, device, dtype)


def _check_options(folder: Path, name: str, dtype: torch.dtype, strips: int, tile: int | None) -> None:
    """Raises UserError for values that cannot be, and for options that a model has no use for."""
    if strips < 1:
        raise UserError(f"the vae's strips are {strips}, expected at least 1")
    if tile is not None and tile < 2:
        raise UserError(f"the vae's tile is {tile}, expected at least 2 latent pixels")
    ways = {wan_vae.CLASS_NAME: "in strips", patch_codec.CLASS_NAME: "at once"}
    ways |= dict.fromkeys((ltx2_vae.CLASS_NAME, fastvideo.CLASS_NAMES["vae"]), "in tiles")
    asked = {"in strips": strips > 1, "in tiles": tile is not None}
    for way in asked:
        if asked[way] and way != ways[name]:
            raise UserError(f"{folder}: {name!r} is decoded {ways[name]}, {way.split()[1]} would do nothing")
    if dtype != torch.float32 and name == patch_codec.CLASS_NAME:
        raise UserError(f"{folder}: {name!r} stays in float32, a vae_dtype of {dtype} would do nothing")


def _read_wan_vae(folder: Path, device: torch.device, dtype: torch.dtype) -> Params:
    params, _ = wan_vae.load(folder, device=device, dtype=dtype)
    return wan_vae.channels_last(params) if device.type == "cuda" else params


def _read_ltx2_vae(folder: Path, device: torch.device, dtype: torch.dtype) -> Params:
    params, _ = ltx2_vae.load(folder, device=device, dtype=dtype)
    return wan_vae.channels_last(params) if device.type == "cuda" else params


def _read_fastvideo_vae(
    tree: LazyTree, cfg: ltx2_vae.LTX2VaeConfig, device: torch.device, dtype: torch.dtype
) -> Params:
    kept = {k for k, spec in ltx2_vae.param_specs(cfg).items() if spec.keep_fp32}
    params = apply(tree, cast(dtype, kept.__contains__)(tree.specs)).read(device=device)
    return wan_vae.channels_last(params) if device.type == "cuda" else params


def decode_frames(vae: Vae, latents: Tensor) -> list[Tensor]:
    """Latents `[B, C, t, h, w]` -> one video per row, uint8 `[T, H, W, 3]` on the CPU.

    With `decode_chunks` only a few frames at a time are floats, and on the device.
    """
    chunks = [vae.decode(latents)] if vae.decode_chunks is None else vae.decode_chunks(latents)
    parts = [[to_frames(video.cpu()) for video in chunk] for chunk in chunks]
    return [torch.cat(frames) for frames in zip(*parts, strict=True)]


# --- sound ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AudioVae:
    """An autoencoder of sound with its weights bound.

    `encode(waveform [B, 2, N]) -> latents [B, C, T, F]` takes samples at `input_rate` and gives normalised latents,
    `latents_per_second` of them, and perhaps one for what a window reaches beyond the end. `decode(latents) -> waveform
    [B, 2, N']` gives samples in [-1, 1] at `output_rate`; these two are None where there is no vocoder. `no_encoder`
    says why `encode` raises UserError whatever it is given; None where it does not.
    """

    encode: Callable[[Tensor], Tensor]
    latent_channels: int
    latent_bins: int
    input_rate: int
    latents_per_second: float
    decode: Callable[[Tensor], Tensor] | None = None
    output_rate: int | None = None
    no_encoder: str | None = None

    def latent_frames(self, seconds: float) -> int:
        """Latent frames of a clip: the nearest number, an odd half to the even (as LTX-2's pipelines), at least 1."""
        return max(1, round(seconds * self.latents_per_second))


def _mel_codec(folder: Path, device: torch.device) -> AudioVae:
    """On the CPU whatever the device: it is small, and its iterations give the same bits everywhere."""
    params, cfg = mel_codec.load(folder)
    return AudioVae(
        lambda wave: mel_codec.encode(params, cfg, wave.float().cpu()).to(device),
        cfg.latent_channels,
        cfg.latent_bins,
        cfg.rate,
        cfg.latents_per_second,
        decode=lambda z: mel_codec.decode(params, cfg, z.float().cpu()).to(device),
        output_rate=cfg.rate,
    )


def _open_audio_vae(folder: Path, name: str) -> tuple[LazyTree, ltx2_audio.AudioVaeConfig]:
    if name == fastvideo.CLASS_NAMES["audio_vae"]:
        return fastvideo.open_part(folder, "audio_vae")
    kind = ltx2_audio.AudioVaeConfig
    return open_model(folder, kind, ltx2_audio.CLASS_NAME, ltx2_audio.param_specs, fixed=ltx2_audio.FIXED)


def _open_vocoder(folder: Path) -> tuple[LazyTree, AnyVocoderConfig]:
    config = read_mapping(folder / "config.json")
    if fastvideo.is_vocoder(config):
        return fastvideo.open_part(folder, "vocoder")
    cfg, tree = ltx2_vocoder_config.from_json(config, str(folder / "config.json")), open_checkpoint(folder)
    check_metadata(tree, config["_class_name"])
    check(tree, ltx2_vocoder.param_specs(cfg), what=str(folder))
    return tree, cfg


def _check_vocoder(folder: Path, cfg: ltx2_audio.AudioVaeConfig, voice: AnyVocoderConfig) -> None:
    """Raises UserError for a vocoder that takes other spectrograms than the VAE gives."""
    faults = []
    if voice.in_channels != (given := cfg.output_channels * cfg.mel_bins):
        faults.append(f"it takes {voice.in_channels} channels times bands, the VAE gives {given}")
    if voice.output_sampling_rate * cfg.mel_hop_length != cfg.sample_rate * voice.factor:
        rates = voice.output_sampling_rate / voice.factor, cfg.sample_rate / cfg.mel_hop_length
        faults.append(f"it makes a second of {rates[0]:g} frames, the VAE of {rates[1]:g}")
    raise_faults(f"{folder}: this vocoder does not fit the audio VAE", faults)


def _cast(tree: LazyTree, kept: Callable[[str], bool], device: torch.device, dtype: torch.dtype) -> Params:
    """A tree read to a device, its leaves in `dtype` but for those that stay as they are stored."""
    return {k: leaf.read().to(device, None if kept(k) else dtype) for k, leaf in tree.items()}


def _no_encoder(folder: Path, tree: LazyTree, vocoder: Path | None) -> str | None:
    """Why an audio VAE cannot encode, or None. Raises UserError for one that can do nothing."""
    if fastvideo.encodes(tree):
        return None
    why = f"{folder}: it has a decoder and no encoder (no key begins with encoder.), so it makes no latents of sound"
    if vocoder is None:
        raise UserError(f"{why}; and there is no vocoder for what it decodes")
    return why


def _ltx2_sound(
    folder: Path, name: str, vocoder: Path | None, device: torch.device, dtype: torch.dtype, keep: bool
) -> AudioVae:
    tree, cfg = _open_audio_vae(folder, name)
    no_encoder = _no_encoder(folder, tree, vocoder)
    voice_tree, voice = (None, None) if vocoder is None else _open_vocoder(vocoder)
    if voice is not None:
        _check_vocoder(vocoder, cfg, voice)
    wanted = ltx2_audio.param_specs(cfg)
    read = _reader(lambda: _cast(tree, lambda k: wanted[k].keep_fp32, device, dtype), keep)
    # Vocoders compute in float32 whatever the weights are, so a cast would only lose some of them.
    read_voice = _reader(lambda: _cast(voice_tree, lambda k: True, device, dtype), keep)

    def encode(waveform: Tensor) -> Tensor:
        if no_encoder is not None:
            raise UserError(no_encoder)
        mel = log_mel(cfg.mel, waveform.to(device, torch.float32))
        return ltx2_audio.encode(read(), cfg, mel.to(dtype)).float()

    def decode(latents: Tensor) -> Tensor:
        mel = ltx2_audio.decode(read(), cfg, latents.to(device, dtype))
        return ltx2_vocoder.vocode(read_voice(), voice, mel.float())

    return AudioVae(
        encode,
        cfg.latent_channels,
        cfg.latent_mel_bins,
        cfg.sample_rate,
        cfg.latents_per_second,
        decode=None if voice is None else decode,
        output_rate=None if voice is None else voice.output_sampling_rate,
        no_encoder=no_encoder,
    )


def load_audio_vae(
    folder: str | Path,
    vocoder: str | Path | None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    keep: bool = False,
) -> AudioVae:
    """The autoencoder of an `audio_vae/` folder: LTX-2's audio VAE, or the mel codec, which stays in float32.

    The mel codec has no phases to give back: its waveform is one that has the decoded spectrogram, found by
    deterministic Griffin-Lim iterations (see `nn.mel_codec`).

    Args:
        vocoder: the folder of the vocoder that makes sound of LTX-2's spectrograms; None: there is nothing to decode
            with. Its weights stay as they are stored. The mel codec needs none, and takes no notice of one.
        dtype: of the audio VAE's weights and arithmetic. The mel front end and the vocoder compute in float32.
        keep: hold the weights from their first use; False reads them at every call and frees them after it.

    Raises:
        UserError: another class, by name; keys and shapes that do not fit the config, before any tensor is read; a
            vocoder that does not fit; a VAE without an encoder (see `AudioVae.no_encoder`) that has no vocoder either;
            a dtype for the mel codec.
    """
    folder, device = Path(folder), torch.device(device)
    config = read_mapping(folder / "config.json")
    name = config.get("_class_name")
    if name == mel_codec.CLASS_NAME:
        if dtype != torch.float32:
            raise UserError(f"{folder}: {name!r} stays in float32, a vae_dtype of {dtype} would do nothing")
        return _mel_codec(folder, device)
    known = (mel_codec.CLASS_NAME, ltx2_audio.CLASS_NAME, fastvideo.CLASS_NAMES["audio_vae"])
    if name not in known:
        seen, ours = kind_of(config, "_class_name"), ", ".join(map(repr, known))
        raise UserError(f"{folder}: _class_name {seen} cannot be run as an audio VAE by this version, only {ours}")
    return _ltx2_sound(folder, name, None if vocoder is None else Path(vocoder), device, dtype, keep)
