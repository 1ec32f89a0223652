"""Configs of LTX-2's video VAEs, the plan of their blocks, and the specs of their parameters."""

import dataclasses
import math

from core import specs
from core.errors import raise_faults
from core.specs import ParamSpec, Specs
from nn.layers import affine_specs, linear_specs
from nn.wan_vae_blocks import conv_specs

DOWN_BLOCK = "LTX2VideoDownBlock3D"
# Frames and rows (and columns) that a change of resolution makes one of.
STRIDES = {"spatial": (1, 2), "temporal": (2, 1), "spatiotemporal": (2, 2)}
# A convolution with strides, without a shortcut: of the older VAEs.
STRIDED = {"conv": (2, 2)}
PADDINGS = ("zeros", "reflect", "replicate", "circular")
TIME_DIM = 256  # channels of the sinusoidal embedding of timesteps


@dataclasses.dataclass(frozen=True)
class LTX2VaeConfig:
    """Architecture; field names and defaults are those of Diffusers' `AutoencoderKLLTX2Video`.

    Lists of the decoder run from the pixels to the latents, as those of the encoder do, but for `upsample_type`,
    which Diffusers reads from the latents to the pixels. The two compression ratios are notes: None, or what the
    blocks make them.
    """

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 128
    block_out_channels: tuple[int, ...] = (256, 512, 1024, 2048)
    down_block_types: tuple[str, ...] = (DOWN_BLOCK,) * 4
    decoder_block_out_channels: tuple[int, ...] = (256, 512, 1024)
    layers_per_block: tuple[int, ...] = (4, 6, 6, 2, 2)
    decoder_layers_per_block: tuple[int, ...] = (5, 5, 5, 5)
    spatio_temporal_scaling: tuple[bool, ...] = (True,) * 4
    decoder_spatio_temporal_scaling: tuple[bool, ...] = (True,) * 3
    decoder_inject_noise: tuple[bool, ...] = (False,) * 4
    downsample_type: tuple[str, ...] = ("spatial", "temporal", "spatiotemporal", "spatiotemporal")
    upsample_type: tuple[str, ...] = ("spatiotemporal",) * 3
    upsample_residual: tuple[bool, ...] = (True,) * 3
    upsample_factor: tuple[int, ...] = (2, 2, 2)
    timestep_conditioning: bool = False
    patch_size: int = 4
    patch_size_t: int = 1
    resnet_norm_eps: float = 1e-6
    scaling_factor: float = 1.0
    encoder_causal: bool = True
    decoder_causal: bool = True
    encoder_spatial_padding_mode: str = "zeros"
    decoder_spatial_padding_mode: str = "reflect"
    spatial_compression_ratio: int | None = None
    temporal_compression_ratio: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if isinstance(field.default, tuple):
                object.__setattr__(self, field.name, tuple(getattr(self, field.name)))
        faults = _length_faults(self) or _value_faults(self)
        raise_faults("LTX2VaeConfig", faults or [*_encoder_faults(self), *_decoder_faults(self)] or _scale_faults(self))

    @property
    def factor_t(self) -> int:
        """Frames per latent frame: T = factor_t * (t - 1) + 1."""
        return math.prod(b.change.factor_t for b in encoder_blocks(self) if b.change is not None)

    @property
    def factor_s(self) -> int:
        """Pixels per latent pixel along height and width."""
        return self.patch_size * math.prod(b.change.factor_s for b in encoder_blocks(self) if b.change is not None)

    @property
    def pixel_width(self) -> int:
        """Channels of the decoder's last norm."""
        return decoder_blocks(self)[-1].width


def _length_faults(cfg: LTX2VaeConfig) -> list[str]:
    """Lists that are not of the length of the blocks."""
    down, up = len(cfg.block_out_channels), len(cfg.decoder_block_out_channels)
    lengths = {
        "block_out_channels": max(down, 1),
        "decoder_block_out_channels": max(up, 1),
        "layers_per_block": down + 1,
        "decoder_layers_per_block": up + 1,
        "decoder_inject_noise": up + 1,
        **dict.fromkeys(("down_block_types", "spatio_temporal_scaling", "downsample_type"), down),
        **dict.fromkeys(("decoder_spatio_temporal_scaling", "upsample_type", "upsample_residual"), up),
        "upsample_factor": up,
    }
    return [
        f"{name} must have {n} entries, got {list(getattr(cfg, name))}"
        for name, n in lengths.items()
        if len(getattr(cfg, name)) != n
    ]


def _value_faults(cfg: LTX2VaeConfig) -> list[str]:
    """Sizes below 1 and words that are none of the allowed ones."""
    sizes = ["in_channels", "out_channels", "latent_channels", "patch_size", "scaling_factor", "resnet_norm_eps"]
    faults = [f"{n} must be positive, got {getattr(cfg, n)}" for n in sizes if getattr(cfg, n) <= 0]
    lists = ["block_out_channels", "decoder_block_out_channels", "layers_per_block", "decoder_layers_per_block"]
    for name in (*lists, "upsample_factor"):
        if min(getattr(cfg, name)) < 1:
            faults.append(f"{name} must be positive integers, got {list(getattr(cfg, name))}")
    if cfg.patch_size_t != 1:
        faults.append(f"patch_size_t is {cfg.patch_size_t}, only 1 is supported")
    allowed = {
        "down_block_types": (DOWN_BLOCK,),
        "downsample_type": (*STRIDES, *STRIDED),
        "upsample_type": tuple(STRIDES),
        "encoder_spatial_padding_mode": PADDINGS,
        "decoder_spatial_padding_mode": PADDINGS,
    }
    for name, words in allowed.items():
        value = getattr(cfg, name)
        for word in (value,) if isinstance(value, str) else value:
            if word not in words:
                faults.append(f"{name} has {word!r}, must be one of {', '.join(words)}")
    return faults


def _encoder_faults(cfg: LTX2VaeConfig) -> list[str]:
    """Widths that the changes of resolution cannot make."""
    faults = []
    for i, block in enumerate(encoder_blocks(cfg)[:-1]):
        n_in, n_out = block.width, cfg.block_out_channels[i]
        if block.change is None or block.change.strided:
            if n_in != n_out:
                faults.append(f"encoder block {i} keeps its {n_in} channels, block_out_channels says {n_out}")
            continue
        cells = block.change.cells
        if n_out % cells or n_in * cells % n_out:
            faults.append(f"encoder block {i}: {n_in} channels of {cells} pixels do not become {n_out} channels")
    return faults


def _decoder_faults(cfg: LTX2VaeConfig) -> list[str]:
    """The same of the decoder, whose blocks change their width either by `upsample_factor` or by a first block."""
    faults, width = [], cfg.decoder_block_out_channels[-1]
    for i, block in enumerate(decoder_blocks(cfg)[1:]):
        at, factor = f"decoder block {i} from the latents", tuple(reversed(cfg.upsample_factor))[i]
        wanted = tuple(reversed(cfg.decoder_block_out_channels))[i]
        if factor > 1 and (wanted != width or width % factor or block.change is None):
            faults.append(f"{at}: upsample_factor {factor} needs an upsampling of {width} channels to divide them")
        elif block.change is not None and block.change.shortcut:
            n_in, cells = block.change.widths[0], block.change.cells
            if n_in % cells or cells % factor:
                faults.append(f"{at}: the shortcut lays {n_in} channels out as {cells} pixels, {factor} to one channel")
        if block.enter is not None and (block.timed or block.noise):
            faults.append(f"{at}: no timestep or noise where it goes from {width} to {wanted} channels")
        width = block.width
    return faults


def _scale_faults(cfg: LTX2VaeConfig) -> list[str]:
    """Encoder and decoder that do not change sizes alike, and ratios that are not theirs."""
    changes = [b.change for b in decoder_blocks(cfg) if b.change is not None]
    faults = []
    for name, note, down, up in (
        ("frames", "temporal_compression_ratio", cfg.factor_t, math.prod(c.factor_t for c in changes)),
        ("pixels", "spatial_compression_ratio", cfg.factor_s, cfg.patch_size * math.prod(c.factor_s for c in changes)),
    ):
        if down != up:
            faults.append(f"the encoder makes {down} {name} one, the decoder one {up}")
        elif getattr(cfg, note) not in (None, down):
            faults.append(f"{note} is {getattr(cfg, note)}, the blocks make it {down}")
    return faults


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of resolution: `factor_t` frames of `factor_s` x `factor_s` pixels are one on the smaller side.

    `widths`: channels before and after. `shortcut`: pixels as channels, averaged or repeated, go around the
    convolution. `strided`: a convolution with strides, without all that.
    """

    name: str
    widths: tuple[int, int]
    factor_t: int
    factor_s: int
    shortcut: bool
    strided: bool = False

    @property
    def cells(self) -> int:
        """Pixels of the larger side per pixel of the smaller."""
        return self.factor_t * self.factor_s**2


@dataclasses.dataclass(frozen=True)
class Block:
    """Residual blocks of one width, and a change of resolution after them (encoder) or before (decoder).

    `enter`: channels that a further residual block takes before everything else; None for no such block.
    """

    name: str
    width: int
    layers: int
    change: Change | None = None
    enter: int | None = None
    noise: bool = False
    timed: bool = False


def encoder_blocks(cfg: LTX2VaeConfig) -> list[Block]:
    """From the pixels to the latents; the middle comes last."""
    out, width = [], cfg.latent_channels
    for i, n_out in enumerate(cfg.block_out_channels):
        name, kind, change = f"encoder.down_blocks.{i}", cfg.downsample_type[i], None
        if cfg.spatio_temporal_scaling[i]:
            strides = (STRIDES | STRIDED)[kind]
            change = Change(f"{name}.downsamplers.0", (width, n_out), *strides, kind in STRIDES, kind in STRIDED)
        out.append(Block(name, width, cfg.layers_per_block[i], change))
        width = n_out
    return [*out, Block("encoder.mid_block", width, cfg.layers_per_block[-1])]


def decoder_blocks(cfg: LTX2VaeConfig) -> list[Block]:
    """From the latents to the pixels; the middle comes first."""
    timed, width = cfg.timestep_conditioning, cfg.decoder_block_out_channels[-1]
    noise = cfg.decoder_inject_noise[-1]
    out = [Block("decoder.mid_block", width, cfg.decoder_layers_per_block[-1], noise=noise, timed=timed)]
    lists = (
        cfg.decoder_block_out_channels, cfg.upsample_factor, cfg.decoder_spatio_temporal_scaling,
        cfg.upsample_residual, cfg.decoder_layers_per_block[:-1], cfg.decoder_inject_noise[:-1],
    )  # fmt: skip
    for i, (n, factor, scaled, residual, layers, noise) in enumerate(zip(*map(reversed, lists), strict=True)):
        name, n_out = f"decoder.up_blocks.{i}", n // factor
        enter = width if factor == 1 and n_out != width else None
        change = None
        if scaled:
            strides = STRIDES[cfg.upsample_type[i]]
            change = Change(f"{name}.upsamplers.0", (n_out * factor, n_out), *strides, residual)
        out.append(Block(name, n_out, layers, change, enter, noise, timed))
        width = n_out
    return out


# --- specs ----------------------------------------------------------------------------------------------------


def causal_specs(name: str, n_in: int, n_out: int) -> Specs:
    """Specs of a 3x3x3 convolution, which Diffusers wraps in a module of its own."""
    return conv_specs(f"{name}.conv", n_in, n_out, 3, 3, 3)


def resnet_specs(name: str, n_in: int, n_out: int, *, noise: bool = False, timed: bool = False) -> Specs:
    """Specs of one residual block; where the width changes, its shortcut is a norm and a 1x1x1 convolution."""
    out = causal_specs(f"{name}.conv1", n_in, n_out) | causal_specs(f"{name}.conv2", n_out, n_out)
    if n_in != n_out:
        out |= affine_specs(f"{name}.norm3", n_in, axis=None, keep_fp32=False)
        out |= conv_specs(f"{name}.conv_shortcut", n_in, n_out, 1, 1, 1)
    if noise:
        out |= {f"{name}.per_channel_scale{i}": ParamSpec((n_in, 1, 1)) for i in (1, 2)}
    if timed:
        out[f"{name}.scale_shift_table"] = ParamSpec((4, n_in), init=specs.normal(n_in**-0.5))
    return out


def time_specs(name: str, dim: int) -> Specs:
    """Specs of the two layers that turn a timestep into `dim` numbers."""
    first = linear_specs(f"{name}.timestep_embedder.linear_1", TIME_DIM, dim)
    return first | linear_specs(f"{name}.timestep_embedder.linear_2", dim, dim)


def _change_specs(change: Change, up: bool) -> Specs:
    n_in, n_out = change.widths
    if change.strided:
        return causal_specs(change.name, n_in, n_out)
    return causal_specs(f"{change.name}.conv", n_in, n_out * change.cells if up else n_out // change.cells)


def _block_specs(block: Block, up: bool) -> Specs:
    out: Specs = {}
    if block.timed:
        out |= time_specs(f"{block.name}.time_embedder", 4 * block.width)
    if block.enter is not None:
        out |= resnet_specs(f"{block.name}.conv_in", block.enter, block.width)
    if block.change is not None:
        out |= _change_specs(block.change, up)
    for i in range(block.layers):
        name = f"{block.name}.resnets.{i}"
        out |= resnet_specs(name, block.width, block.width, noise=block.noise, timed=block.timed)
    return out


def param_specs(cfg: LTX2VaeConfig) -> Specs:
    """Specs of every leaf, keys and shapes as in the Diffusers checkpoint; the statistics of latents are leaves too."""
    down, up, z = encoder_blocks(cfg), decoder_blocks(cfg), cfg.latent_channels
    out = causal_specs("encoder.conv_in", cfg.in_channels * cfg.patch_size**2, z)
    for block in down:
        out |= _block_specs(block, up=False)
    out |= causal_specs("encoder.conv_out", down[-1].width, z + 1)
    out |= causal_specs("decoder.conv_in", z, up[0].width)
    for block in up:
        out |= _block_specs(block, up=True)
    out |= causal_specs("decoder.conv_out", cfg.pixel_width, cfg.out_channels * cfg.patch_size**2)
    if cfg.timestep_conditioning:
        # 1000 in published VAEs, whose timesteps are in [0, 1].
        out["decoder.timestep_scale_multiplier"] = ParamSpec((), init=specs.ONES, keep_fp32=True)
        out |= time_specs("decoder.time_embedder", 2 * cfg.pixel_width)
        out["decoder.scale_shift_table"] = ParamSpec((2, cfg.pixel_width), init=specs.normal(cfg.pixel_width**-0.5))
    out["latents_mean"] = ParamSpec((z,), keep_fp32=True)
    out["latents_std"] = ParamSpec((z,), init=specs.ONES, keep_fp32=True)
    return out


_RATIOS = {"decoder_causal": False, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
_LTX23 = LTX2VaeConfig(
    block_out_channels=(256, 512, 1024, 1024),
    decoder_block_out_channels=(256, 512, 512, 1024),
    layers_per_block=(4, 6, 4, 2, 2),
    decoder_layers_per_block=(4, 6, 4, 2, 2),
    decoder_spatio_temporal_scaling=(True,) * 4,
    decoder_inject_noise=(False,) * 5,
    upsample_type=("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
    upsample_residual=(False,) * 4,
    upsample_factor=(2, 2, 1, 2),
    decoder_spatial_padding_mode="zeros",
    **_RATIOS,
)

PRESETS = {"ltx-2-vae": LTX2VaeConfig(**_RATIOS), "ltx-2.3-vae": _LTX23, "ltx-2.5-vae": _LTX23}
