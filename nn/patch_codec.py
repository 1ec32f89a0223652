"""A linear patch autoencoder with the interface of a video VAE, fitted in closed form.

It stands in for a real VAE where no weights can be downloaded: 8x8 pixels in space and 4 frames in time
become one latent vector. As in Wan's VAE the first frame stands alone, so 4k+1 frames become k+1 latent
frames. Each of the two kinds of patch (one frame, four frames) has a basis of principal components of
the training clips; the first-frame basis is then rotated inside its own subspace, which changes nothing
about the quality, so that a still picture has latents as equal as possible in frame 0 and later.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor

from core import specs
from core.checkpoint import open_checkpoint
from core.errors import UserError, raise_faults
from core.files import write_json
from core.geometry import check_geometry, to_video
from core.save import check_metadata, describe, save_checkpoint
from core.trees import Params
from nn.config_files import read_config

CLASS_NAME = "LatentreePatchCodec"
# Rounding to 8 bits adds noise of (2 / 255) / sqrt(12) to each pixel of [-1, 1] and so to each orthonormal
# component: a component weaker than that is kept at this scale instead of being blown up to unit variance.
STD_FLOOR = 2 / 255 / 12**0.5


@dataclasses.dataclass(frozen=True)
class PatchCodecConfig:
    """`latent_channels` per patch of `temporal` frames (or 1, at the start) by `spatial` by `spatial` pixels."""

    latent_channels: int = 32
    spatial: int = 8
    temporal: int = 4

    def __post_init__(self):
        limit = 3 * self.spatial**2
        if not 1 <= self.latent_channels <= limit:
            raise UserError(f"latent_channels is {self.latent_channels}, expected 1 to {limit} (3 * spatial^2)")


def patch_sizes(cfg: PatchCodecConfig) -> dict[str, int]:
    """Values in one patch: of a first frame, and of a group of frames."""
    return {"first": 3 * cfg.spatial**2, "group": 3 * cfg.temporal * cfg.spatial**2}


def param_specs(cfg: PatchCodecConfig) -> specs.Specs:
    """Per kind of patch: `mean [D]`, orthonormal rows `basis [C, D]` and `std [C]`, all kept in float32."""
    out: specs.Specs = {}
    for kind, size in patch_sizes(cfg).items():
        out[f"{kind}.mean"] = specs.ParamSpec((size,), keep_fp32=True)
        basis = specs.normal(size**-0.5)
        out[f"{kind}.basis"] = specs.ParamSpec((cfg.latent_channels, size), init=basis, keep_fp32=True)
        out[f"{kind}.std"] = specs.ParamSpec((cfg.latent_channels,), init=specs.ONES, keep_fp32=True)
    return out


def _split(cfg: PatchCodecConfig, video: Tensor) -> dict[str, Tensor]:
    """`[B, 3, T, H, W]` -> `{"first": [B, 1, h, w, D1], "group": [B, t - 1, h, w, D4]}`."""
    p = cfg.spatial
    first = rearrange(video[:, :, :1], "b c t (h p) (w q) -> b t h w (c p q)", p=p, q=p)
    group = rearrange(video[:, :, 1:], "b c (t f) (h p) (w q) -> b t h w (f c p q)", f=cfg.temporal, p=p, q=p)
    return {"first": first, "group": group}


def _check_video(cfg: PatchCodecConfig, video: Tensor) -> None:
    if video.ndim != 5 or video.shape[1] != 3:
        raise UserError(f"video has shape {list(video.shape)}, expected [B, 3, T, H, W]")
    if not video.dtype.is_floating_point:
        raise UserError(f"video has dtype {video.dtype}, expected a floating dtype with values in [-1, 1]")
    check_geometry(*video.shape[2:], temporal=cfg.temporal, spatial=cfg.spatial)


def encode(params: Params, cfg: PatchCodecConfig, video: Tensor) -> Tensor:
    """Video `[B, 3, T, H, W]` in [-1, 1] -> latents `[B, C, (T - 1) / 4 + 1, H / 8, W / 8]`, in its dtype.

    Every channel has zero mean and unit variance over the clips that the codec was fitted on. Raises
    UserError with the nearest valid sizes.
    """
    _check_video(cfg, video)
    latents = []
    for kind, patches in _split(cfg, video).items():
        mean, basis, std = (params[f"{kind}.{name}"].to(video) for name in ("mean", "basis", "std"))
        latents.append(((patches - mean) @ basis.mT) / std)
    return rearrange(torch.cat(latents, dim=1), "b t h w c -> b c t h w")


def decode(params: Params, cfg: PatchCodecConfig, latents: Tensor, *, first: bool = True) -> Tensor:
    """Latents `[B, C, t, h, w]` -> video `[B, 3, 4 (t - 1) + 1, 8 h, 8 w]`, not clamped, in their dtype.

    Latent frames are decoded independently of one another: for a chunk that continues a video pass
    `first=False`, and it gives 4 t frames.
    """
    if latents.ndim != 5 or latents.shape[1] != cfg.latent_channels:
        raise UserError(f"latents have shape {list(latents.shape)}, expected [B, {cfg.latent_channels}, t, h, w]")
    z = rearrange(latents, "b c t h w -> b t h w c")
    cut = 1 if first else 0
    frames = []
    for kind, part in (("first", z[:, :cut]), ("group", z[:, cut:])):
        mean, basis, std = (params[f"{kind}.{name}"].to(latents) for name in ("mean", "basis", "std"))
        patches = (part * std) @ basis + mean
        f = 1 if kind == "first" else cfg.temporal
        p = cfg.spatial
        frames.append(rearrange(patches, "b t h w (f c p q) -> b c (t f) (h p) (w q)", f=f, c=3, p=p, q=p))
    return torch.cat(frames, dim=2)


# --- fitting --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Moments:
    """Sums over patches of one kind, float64: `count`, `total [D]` and second moments `square [D, D]`."""

    count: int
    total: Tensor
    square: Tensor

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.count + other.count, self.total + other.total, self.square + other.square)


def clip_moments(cfg: PatchCodecConfig, clip: Tensor) -> dict[str, Moments]:
    """Moments of one clip, uint8 `[T, H, W, 3]`: every frame for "first", every group of frames for "group".

    Frames and pixels beyond the last whole group and patch are left out. Raises UserError for a clip with
    less than one patch of either kind.
    """
    if clip.ndim != 4 or clip.shape[-1] != 3 or clip.dtype != torch.uint8:
        raise UserError(f"clip is {clip.dtype} {list(clip.shape)}, expected uint8 [T, H, W, 3]")
    t, h, w = clip.shape[0], clip.shape[1] // cfg.spatial, clip.shape[2] // cfg.spatial
    groups = (t - 1) // cfg.temporal
    if groups < 1 or h < 1 or w < 1:
        need = f"{cfg.temporal + 1} frames of {cfg.spatial} by {cfg.spatial} pixels"
        raise UserError(f"clip {list(clip.shape)} is too small for the patch codec: it takes at least {need}")
    video = to_video(clip[:, : h * cfg.spatial, : w * cfg.spatial])[None].double()
    patches = {
        "first": rearrange(video, "1 c t h w -> t c 1 h w"),
        "group": video[:, :, : groups * cfg.temporal + 1],
    }
    flat = {kind: _split(cfg, x)[kind].flatten(0, -2) for kind, x in patches.items()}
    return {kind: Moments(len(x), x.sum(0), x.mT @ x) for kind, x in flat.items()}


def _covariance(m: Moments) -> tuple[Tensor, Tensor]:
    mean = m.total / m.count
    return mean, m.square / m.count - torch.outer(mean, mean)


def _principal(covariance: Tensor, channels: int) -> Tensor:
    """The leading eigenvectors as rows `[C, D]`, strongest first, the largest entry of each positive."""
    basis = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :channels].mT
    peak = basis.gather(1, basis.abs().argmax(dim=1, keepdim=True))
    return basis * peak.sign()


def _align(first: Tensor, group: Tensor, covariance: Tensor, repeats: int) -> Tensor:
    """Rotates the rows of `first` so that its latents of a frame match those of the still clip in `group`.

    The orthogonal matrix nearest to the cross-moment of the two latents (Schönemann 1966).
    """
    still = rearrange(group, "c (f d) -> f c d", f=repeats).sum(0)
    u, _, vt = torch.linalg.svd(still @ covariance @ first.mT)
    return u @ vt @ first


def fit_moments(cfg: PatchCodecConfig, moments: dict[str, Moments]) -> Params:
    """The codec of summed `clip_moments`. Raises UserError when there are fewer patches than channels."""
    few = {kind: m.count for kind, m in moments.items() if m.count <= cfg.latent_channels}
    least = f"at least {cfg.latent_channels + 1} are needed (longer, larger or more clips)"
    faults = [f"{count} {kind} patches: {least}" for kind, count in few.items()]
    raise_faults(f"the clips are too small to fit a patch codec of {cfg.latent_channels} channels", faults)
    (mean_first, cov_first), (mean_group, cov_group) = (_covariance(moments[kind]) for kind in ("first", "group"))
    group = _principal(cov_group, cfg.latent_channels)
    first = _align(_principal(cov_first, cfg.latent_channels), group, cov_first, cfg.temporal)
    out = {}
    for kind, mean, basis, cov in (("first", mean_first, first, cov_first), ("group", mean_group, group, cov_group)):
        variance = ((basis @ cov) * basis).sum(1)
        std = variance.clamp(min=0).sqrt().clamp(min=STD_FLOOR)
        out |= {f"{kind}.mean": mean, f"{kind}.basis": basis, f"{kind}.std": std}
    return {name: leaf.float().contiguous() for name, leaf in out.items()}


def fit(cfg: PatchCodecConfig, clips: Iterable[Tensor]) -> Params:
    """Fits the codec on clips uint8 `[T, H, W, 3]` in one pass (an iterator will do), in float64 inside.

    Principal components are the linear code with the least squared error, so PSNR is the best that any
    linear codec of this size reaches on these clips.
    """
    total: dict[str, Moments] | None = None
    for clip in clips:
        one = clip_moments(cfg, clip)
        total = one if total is None else {kind: total[kind] + one[kind] for kind in one}
    if total is None:
        raise UserError("patch codec: no clips to fit on")
    return fit_moments(cfg, total)


# --- files ----------------------------------------------------------------------------------------------------


def save(folder: str | Path, params: Params, cfg: PatchCodecConfig) -> None:
    """Writes `config.json` and `diffusion_pytorch_model.safetensors`, the form of a Diffusers VAE folder."""
    specs.check(params, param_specs(cfg), what="patch codec", dtypes=True)
    config = dataclasses.asdict(cfg)
    save_checkpoint(folder, params, metadata=describe(CLASS_NAME, config))
    write_json(Path(folder) / "config.json", {"_class_name": CLASS_NAME, **config})


def load(folder: str | Path, *, device="cpu") -> tuple[Params, PatchCodecConfig]:
    """Reads what `save` wrote. Raises UserError naming the file for another class, key, shape or damage."""
    cfg = read_config(PatchCodecConfig, Path(folder) / "config.json", "_class_name", CLASS_NAME)
    tree = open_checkpoint(folder)
    check_metadata(tree, CLASS_NAME)
    specs.check(tree, param_specs(cfg), what=str(folder), dtypes=True)
    return tree.read(device=device), cfg
