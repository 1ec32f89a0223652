"""Configs of Wan's VAEs, the plan of their stages, and the specs of their parameters."""

import dataclasses
import itertools

from core.errors import raise_faults
from core.specs import Specs
from nn import wan_vae_blocks as blocks

# Statistics of the latents of the training sets, from the public vae/config.json of each model.
MEAN_21 = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
STD_21 = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip
MEAN_22 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
    -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
    -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
    -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
    0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
STD_22 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
    0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
    0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
    0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
    0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class WanVaeConfig:
    """Architecture; field names (with their spelling) are those of a Diffusers `vae/config.json`.

    `is_residual` adds the shortcuts of 2.2. `patch_size` folds pixels into channels before the encoder, so
    `in_channels` is then 3 * patch_size^2. `clip_output` is kept for the file's sake: current Diffusers
    ignores it and always clamps, and here `decode(clamp=)` decides.
    """

    base_dim: int = 96
    decoder_base_dim: int | None = None
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = MEAN_21
    latents_std: tuple[float, ...] = STD_21
    is_residual: bool = False
    in_channels: int = 3
    out_channels: int = 3
    patch_size: int | None = None
    scale_factor_temporal: int = 4
    scale_factor_spatial: int = 8
    clip_output: bool = True

    def __post_init__(self):
        for name in ("dim_mult", "temperal_downsample", "latents_mean", "latents_std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        raise_faults("WanVaeConfig", _config_faults(self) or _width_faults(self))

    @property
    def encoder_dims(self) -> tuple[int, ...]:
        """Channels before the first stage of the encoder and after each."""
        return tuple(self.base_dim * m for m in (1, *self.dim_mult))

    @property
    def decoder_dims(self) -> tuple[int, ...]:
        """Channels before the first stage of the decoder and after the blocks of each."""
        base = self.base_dim if self.decoder_base_dim is None else self.decoder_base_dim
        return tuple(base * m for m in (self.dim_mult[-1], *reversed(self.dim_mult)))

    @property
    def patch(self) -> int:
        """Side of the square of pixels that becomes channels; 1 for none."""
        return 1 if self.patch_size is None else self.patch_size


def _config_faults(cfg: WanVaeConfig) -> list[str]:
    sizes = {n: getattr(cfg, n) for n in ("base_dim", "z_dim", "num_res_blocks", "in_channels", "out_channels")}
    sizes |= {n: getattr(cfg, n) for n in ("decoder_base_dim", "patch_size") if getattr(cfg, n) is not None}
    faults = [f"{n} must be at least 1, got {v}" for n, v in sizes.items() if v < 1]
    if not cfg.dim_mult or min(cfg.dim_mult) < 1:
        return [*faults, f"dim_mult must be positive integers, got {list(cfg.dim_mult)}"]
    if len(cfg.temperal_downsample) != len(cfg.dim_mult) - 1:
        got, want = list(cfg.temperal_downsample), len(cfg.dim_mult) - 1
        faults.append(f"temperal_downsample must have {want} entries, one less than dim_mult, got {got}")
    for name in ("latents_mean", "latents_std"):
        if len(getattr(cfg, name)) != cfg.z_dim:
            faults.append(f"{name} has {len(getattr(cfg, name))} entries, z_dim is {cfg.z_dim}")
    if min(cfg.latents_std, default=1.0) <= 0:
        faults.append(f"latents_std must be positive, the least is {min(cfg.latents_std)}")
    scales = {
        "scale_factor_temporal": 2 ** sum(cfg.temperal_downsample),
        "scale_factor_spatial": 2 ** (len(cfg.dim_mult) - 1) * cfg.patch,
    }
    faults += [f"{n} is {getattr(cfg, n)}, the stages make it {v}" for n, v in scales.items() if getattr(cfg, n) != v]
    for name in ("in_channels", "out_channels"):
        if getattr(cfg, name) % cfg.patch**2:
            faults.append(f"{name} is {getattr(cfg, name)}, not a multiple of patch_size^2 = {cfg.patch**2}")
    return faults


def _width_faults(cfg: WanVaeConfig) -> list[str]:
    """Every stage needs channels, and the shortcuts of 2.2 average or repeat whole groups of them."""
    faults = []
    for part, stages in (("encoder", encoder_stages(cfg)), ("decoder", decoder_stages(cfg))):
        for i, stage in enumerate(stages):
            n_in, n_out = stage.widths
            if min(n_in, n_out, stage.resampled) < 1:
                faults.append(f"{part} stage {i}: no channels are left of {stage.widths}")
                continue
            many, few = (n_in, n_out) if part == "encoder" else (n_out, n_in)
            pixels = stage.factor_t * stage.factor_s**2
            if stage.shortcut and many * pixels % few:
                faults.append(f"{part} stage {i}: {many} channels of {pixels} pixels do not divide into {few} groups")
    return faults


@dataclasses.dataclass(frozen=True)
class Stage:
    """Residual blocks at one resolution, then a change of resolution.

    `widths`: channels before and after the blocks; `resampled`: after the change. `resample` is the key
    prefix of the change, None for the last stage; `temporal`: it halves or doubles frames too.
    """

    resnets: tuple[str, ...]
    widths: tuple[int, int]
    resample: str | None
    resampled: int
    temporal: bool
    shortcut: bool

    @property
    def factor_t(self) -> int:
        """Frames per frame at the other side of the change."""
        return 2 if self.temporal else 1

    @property
    def factor_s(self) -> int:
        """Pixels per pixel along height and width."""
        return 1 if self.resample is None else 2


def encoder_stages(cfg: WanVaeConfig) -> list[Stage]:
    """From full resolution down. The flat form of 2.1 numbers blocks and changes in one list."""
    stages, n, last = [], cfg.num_res_blocks, len(cfg.dim_mult) - 1
    for i, widths in enumerate(itertools.pairwise(cfg.encoder_dims)):
        at = f"encoder.down_blocks.{i}." if cfg.is_residual else "encoder.down_blocks."
        first = i * (n + 1)
        names = [f"{at}resnets.{j}" if cfg.is_residual else f"{at}{first + j}" for j in range(n)]
        change = f"{at}downsampler" if cfg.is_residual else f"{at}{first + n}"
        temporal = i < last and cfg.temperal_downsample[i]
        resample = change if i < last else None
        stages.append(Stage(tuple(names), widths, resample, widths[1], temporal, cfg.is_residual))
    return stages


def decoder_stages(cfg: WanVaeConfig) -> list[Stage]:
    """From the latents up. Without shortcuts (2.1) the upsampling also halves the channels."""
    stages, last = [], len(cfg.dim_mult) - 1
    for i, (n_in, n_out) in enumerate(itertools.pairwise(cfg.decoder_dims)):
        at = f"decoder.up_blocks.{i}"
        names = [f"{at}.resnets.{j}" for j in range(cfg.num_res_blocks + 1)]
        temporal = i < last and cfg.temperal_downsample[last - 1 - i]
        change = f"{at}.upsampler" if cfg.is_residual else f"{at}.upsamplers.0"
        widths = (n_in if cfg.is_residual or i == 0 else n_in // 2, n_out)
        resampled = n_out if cfg.is_residual or i == last else n_out // 2
        shortcut = cfg.is_residual and i < last
        stages.append(Stage(tuple(names), widths, change if i < last else None, resampled, temporal, shortcut))
    return stages


def _stage_specs(stage: Stage, frames_out: int) -> Specs:
    """Specs of one stage; the temporal convolution gives `frames_out` frames per frame as channels."""
    out: Specs = {}
    n_in, n_out = stage.widths
    for i, name in enumerate(stage.resnets):
        out |= blocks.resnet_specs(name, n_in if i == 0 else n_out, n_out)
    if stage.resample is not None:
        out |= blocks.conv_specs(f"{stage.resample}.resample.1", n_out, stage.resampled, 3, 3)
        if stage.temporal:
            out |= blocks.conv_specs(f"{stage.resample}.time_conv", n_out, frames_out * n_out, 3, 1, 1)
    return out


def _half_specs(part: str, stages: list[Stage], frames_out: int, middle: int, ends: tuple[int, int]) -> Specs:
    """Specs of encoder or decoder: `ends` are the channels that come in and go out, `middle` those at the middle."""
    first, last = stages[0].widths[0], stages[-1].widths[1]
    out = blocks.conv_specs(f"{part}.conv_in", ends[0], first, 3, 3, 3)
    out |= blocks.mid_specs(f"{part}.mid_block", middle)
    for stage in stages:
        out |= _stage_specs(stage, frames_out)
    out |= blocks.gamma_specs(f"{part}.norm_out", last)
    return out | blocks.conv_specs(f"{part}.conv_out", last, ends[1], 3, 3, 3)


def param_specs(cfg: WanVaeConfig) -> Specs:
    """Specs of every leaf, keys and shapes as in the Diffusers checkpoint."""
    down, up, z = encoder_stages(cfg), decoder_stages(cfg), cfg.z_dim
    out = _half_specs("encoder", down, 1, cfg.encoder_dims[-1], (cfg.in_channels, 2 * z))
    out |= blocks.conv_specs("quant_conv", 2 * z, 2 * z, 1, 1, 1)
    out |= blocks.conv_specs("post_quant_conv", z, z, 1, 1, 1)
    return out | _half_specs("decoder", up, 2, cfg.decoder_dims[0], (z, cfg.out_channels))


PRESETS = {
    "wan2.1-vae": WanVaeConfig(),
    "wan2.2-vae": WanVaeConfig(
        base_dim=160, decoder_base_dim=256, z_dim=48, latents_mean=MEAN_22, latents_std=STD_22, is_residual=True,
        in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=16, clip_output=False,
    ),
}  # fmt: skip
