"""Building blocks of Wan's VAEs: convolutions that are causal in time, and what stands between them.

Activations are `[B, C, T, H, W]`. Every layer that looks back in time takes the frames before a chunk from
`Stream.past` and leaves its own last ones in `Stream.future`, so a chunk gives what the whole video would.
Results are laid out channels-last where a layer has to copy anyway: convolutions on a GPU are fastest so.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from core import specs
from core.errors import UserError
from core.specs import ParamSpec, Specs
from kernels import Attention
from nn.layers import linear, wide

Cache = dict[str, Tensor]

# Bounds the inverse norm of an all-zero pixel, as in torch.nn.functional.normalize.
EPS = 1e-12


def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    """`x / |x|_2 * sqrt(C) * gamma` over channels, in x's dtype; only the norm itself is float32 or wider.

    `gamma` is `[C, 1, ...]`, broadcast over what follows dimension 1 of `x`.
    """
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=wide(x))
    # The upper bound is for float16 alone: elsewhere sqrt(C) / EPS is finite.
    scale = (x.shape[1] ** 0.5 / norm.clamp_min(EPS)).clamp_max(torch.finfo(x.dtype).max)
    return x * scale.to(x.dtype) * gamma.to(x.dtype)


def join(past: Tensor | None, x: Tensor, frames: int) -> Tensor:
    """`x [B, C, T, H, W]` after the `frames` frames of `past`, or after zeros: `[B, C, frames + T, H, W]`."""
    return F.pad(x, (0, 0, 0, 0, frames, 0)) if past is None else torch.cat([past, x], dim=2)


def activate(x: Tensor, gamma: Tensor, past: Tensor | None, frames: int) -> Tensor:
    """`silu(rms_norm(x))` joined to its past: what a causal convolution inside a block takes."""
    return join(past, F.silu(rms_norm(x, gamma)), frames)


@dataclasses.dataclass(frozen=True)
class VaeRun:
    """How layers run: `attention` of a frame over its pixels, and `activate`, which a compiled one may replace."""

    attention: Callable[..., Any] = Attention()
    activate: Callable[..., Tensor] = activate


@dataclasses.dataclass(frozen=True)
class Stream:
    """What the pass of one chunk carries besides activations.

    `past`: the last input frames of every causal layer at the chunk before, taken out as they are used, so
    that memory holds them once; None at the start of a video. `future`: filled with the same for the next
    chunk; None when no chunk follows.
    """

    past: Cache | None
    future: Cache | None
    run: VaeRun = VaeRun()

    @property
    def first(self) -> bool:
        """True at the start of a video."""
        return self.past is None


def recall(stream: Stream, name: str, x: Tensor, frames: int) -> Tensor | None:
    """The `frames` frames before `x [B, C, T, H, W]` in layer `name`; None at the start of a video.

    Raises UserError for a cache that lacks this layer or was made for other sizes.
    """
    if stream.past is None:
        return None
    if name not in stream.past:
        raise UserError(f"cache has no entry {name}: pass on what the chunk before returned, or {{}} at the start")
    past = stream.past.pop(name)
    expected = (*x.shape[:2], frames, *x.shape[3:])
    if past.shape != expected:
        raise UserError(f"cache entry {name} has shape {list(past.shape)}, this chunk needs {list(expected)}")
    return past


def remember(stream: Stream, name: str, x: Tensor, frames: int) -> None:
    """Keeps the last frames of `x` for the next chunk, as a copy: a view would keep all of `x` alive."""
    if stream.future is not None:
        stream.future[name] = x[:, :, -frames:].clone()


# --- convolutions ---------------------------------------------------------------------------------------------


def conv_specs(name: str, n_in: int, n_out: int, *kernel: int) -> Specs:
    """Specs of `name.weight [n_out, n_in, *kernel]` and `name.bias [n_out]`, PyTorch's default for convolutions."""
    init = specs.fan_in(n_in * math.prod(kernel))
    return {
        f"{name}.weight": ParamSpec((n_out, n_in, *kernel), init=init),
        f"{name}.bias": ParamSpec((n_out,), init=init),
    }


def conv(p: Mapping[str, Tensor], name: str, x: Tensor, *, stride=1) -> Tensor:
    """2-D or 3-D convolution of `x`, by the rank of `name.weight`; zeros around height and width, none in time."""
    weight, bias = p[f"{name}.weight"].to(x.dtype), p[f"{name}.bias"].to(x.dtype)
    around = tuple(k // 2 for k in weight.shape[-2:])
    if weight.ndim == 4:
        return F.conv2d(x, weight, bias, stride, around)
    return F.conv3d(x, weight, bias, stride, (0, *around))


def causal_conv(p: Mapping[str, Tensor], name: str, x: Tensor, stream: Stream, *, norm: str | None = None) -> Tensor:
    """Convolution `[B, C, T, H, W] -> [B, C', T, H, W]` that sees a frame and those before it.

    With `norm`, of `silu(rms_norm(x))`. `x` is rebound, so that memory does not hold it without its past too.
    """
    reach = p[f"{name}.weight"].shape[2] - 1
    past = recall(stream, name, x, reach)
    x = join(past, x, reach) if norm is None else stream.run.activate(x, p[f"{norm}.gamma"], past, reach)
    remember(stream, name, x, reach)
    return conv(p, name, x)


def per_frame(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies a function of pictures `[N, C, H, W]` to every frame; a view each way when channels-last."""
    y = fn(x.movedim(2, 1).flatten(0, 1))
    return y.unflatten(0, (x.shape[0], x.shape[2])).movedim(1, 2)


# --- residual blocks and attention ----------------------------------------------------------------------------


def gamma_specs(name: str, dim: int) -> Specs:
    """Specs of the `name.gamma` of a norm over video, ones."""
    return {f"{name}.gamma": ParamSpec((dim, 1, 1, 1), init=specs.ONES)}


def resnet_specs(name: str, n_in: int, n_out: int) -> Specs:
    """Specs of one residual block; the shortcut is a 1x1x1 convolution where the width changes."""
    out = gamma_specs(f"{name}.norm1", n_in) | conv_specs(f"{name}.conv1", n_in, n_out, 3, 3, 3)
    out |= gamma_specs(f"{name}.norm2", n_out) | conv_specs(f"{name}.conv2", n_out, n_out, 3, 3, 3)
    return out if n_in == n_out else out | conv_specs(f"{name}.conv_shortcut", n_in, n_out, 1, 1, 1)


def resnet(p: Mapping[str, Tensor], name: str, x: Tensor, stream: Stream) -> Tensor:
    """`shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x))))))`."""
    shortcut = conv(p, f"{name}.conv_shortcut", x) if f"{name}.conv_shortcut.weight" in p else x
    first = lambda h: causal_conv(p, f"{name}.conv1", h, stream, norm=f"{name}.norm1")  # noqa: E731
    return causal_conv(p, f"{name}.conv2", first(x), stream, norm=f"{name}.norm2") + shortcut


def attention_specs(name: str, dim: int) -> Specs:
    """Specs of the attention of one frame over its own pixels."""
    norm = {f"{name}.norm.gamma": ParamSpec((dim, 1, 1), init=specs.ONES)}
    return norm | conv_specs(f"{name}.to_qkv", dim, 3 * dim, 1, 1) | conv_specs(f"{name}.proj", dim, dim, 1, 1)


def frame_attention(p: Mapping[str, Tensor], name: str, x: Tensor, stream: Stream) -> Tensor:
    """`x + proj(attention(norm(x)))` with one head of width C, every frame over its own pixels."""

    def attend(frames: Tensor) -> Tensor:
        h = rms_norm(frames, p[f"{name}.norm.gamma"])
        tokens = h.flatten(2).mT
        q, k, v = linear(p, f"{name}.to_qkv", tokens).unsqueeze(2).chunk(3, dim=-1)
        y = linear(p, f"{name}.proj", stream.run.attention(q, k, v, site="self").squeeze(2))
        return y.mT.unflatten(2, h.shape[2:])

    return x + per_frame(attend, x)


def mid_specs(name: str, dim: int) -> Specs:
    """Specs of the middle: residual block, attention, residual block."""
    out = resnet_specs(f"{name}.resnets.0", dim, dim) | attention_specs(f"{name}.attentions.0", dim)
    return out | resnet_specs(f"{name}.resnets.1", dim, dim)


def middle(p: Mapping[str, Tensor], name: str, x: Tensor, stream: Stream) -> Tensor:
    """Residual block, attention, residual block at the lowest resolution."""
    x = resnet(p, f"{name}.resnets.0", x, stream)
    x = frame_attention(p, f"{name}.attentions.0", x, stream)
    return resnet(p, f"{name}.resnets.1", x, stream)


# --- changes of resolution ------------------------------------------------------------------------------------

# Row 2i + a of a picture doubled by repetition and filtered with taps w0, w1, w2 is a filter of two taps on the
# small picture: w0, w1 + w2 at rows i - 1, i for a = 0; w0 + w1, w2 at rows i, i + 1 for a = 1.
PHASES = (((1.0, 0.0, 0.0), (0.0, 1.0, 1.0)), ((1.0, 1.0, 0.0), (0.0, 0.0, 1.0)))


def double_size(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """`conv3x3(nearest_upsample(x))`, `[N, C, H, W] -> [N, C', 2H, 2W]`, without the upsampled picture.

    Each of the four output phases is a 2x2 convolution of the small picture (`PHASES`): 16 products per
    input pixel and channel pair instead of 36.
    """
    weight, bias = p[f"{name}.weight"], p[f"{name}.bias"].to(x.dtype)
    taps = torch.tensor(PHASES, dtype=wide(weight), device=weight.device)
    kernel = torch.einsum("aur,bvs,ocrs->abocuv", taps, taps, weight.to(taps.dtype)).flatten(0, 2).to(x.dtype)
    y = F.conv2d(x, kernel, bias.repeat(4), padding=1).movedim(1, -1).unflatten(-1, (2, 2, -1))
    h, w = x.shape[-2:]
    rows = [torch.stack([y[:, a : a + h, b : b + w, a, b] for b in (0, 1)], dim=3) for a in (0, 1)]
    return torch.stack(rows, dim=2).flatten(3, 4).flatten(1, 2).movedim(-1, 1)


def halve_size(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """3x3 convolution with stride 2, `[N, C, 2H, 2W] -> [N, C, H, W]`; zeros below and to the right only."""
    weight, bias = p[f"{name}.weight"].to(x.dtype), p[f"{name}.bias"].to(x.dtype)
    return F.conv2d(F.pad(x, (0, 1, 0, 1)), weight, bias, stride=2)


def double_frames(p: Mapping[str, Tensor], name: str, x: Tensor, stream: Stream) -> Tensor:
    """T frames -> 2T, but 2T - 1 at the start of a video: its first frame stays as it is.

    The convolution gives two frames per frame as two groups of channels. It does not see the first frame:
    where the second one begins, zeros stand before it.
    """
    head, x = (x[:, :, :1], x[:, :, 1:]) if stream.first else (None, x)
    reach = p[f"{name}.weight"].shape[2] - 1
    joined = join(recall(stream, name, x, reach), x, reach)
    remember(stream, name, joined, reach)
    if x.shape[2] == 0:
        return head
    pairs = conv(p, name, joined)
    y = rearrange(pairs, "b (f c) t h w -> b (t f) h w c", f=2).movedim(-1, 1)
    return y if head is None else torch.cat([head, y], dim=2)


def halve_frames(p: Mapping[str, Tensor], name: str, x: Tensor, stream: Stream) -> Tensor:
    """2T frames -> T, and 2T + 1 -> T + 1 at the start of a video: its first frame stays as it is.

    Output frame i sees three frames, the last of which is its own second one (stride 2, one frame of context).
    """
    head = x[:, :, :1]
    past = recall(stream, name, x, 1)
    remember(stream, name, x, 1)
    if past is not None:
        return conv(p, name, torch.cat([past, x], dim=2), stride=(2, 1, 1))
    return head if x.shape[2] == 1 else torch.cat([head, conv(p, name, x, stride=(2, 1, 1))], dim=2)


def average_down(x: Tensor, n_out: int, factor_t: int, factor_s: int, *, first: bool) -> Tensor:
    """The shortcut around a down stage: pixels of a cell become channels, which are averaged in groups.

    `[B, C, T, H, W] -> [B, n_out, T / ft, H / fs, W / fs]`. The first frame of a video shares its cell with
    zero frames before it.
    """
    if first and factor_t > 1:
        x = F.pad(x, (0, 0, 0, 0, factor_t - 1, 0))
    cells = rearrange(x, "b c (t f) (h p) (w q) -> b t h w (c f p q)", f=factor_t, p=factor_s, q=factor_s)
    return cells.unflatten(-1, (n_out, -1)).mean(-1).movedim(-1, 1)


def repeat_up(x: Tensor, n_out: int, factor_t: int, factor_s: int, *, first: bool) -> Tensor:
    """The shortcut around an up stage: channels are repeated and laid out as the pixels of a cell.

    `[B, C, T, H, W] -> [B, n_out, T * ft, H * fs, W * fs]`; of the first frame of a video only the last of
    its ft copies stays.
    """
    repeats = n_out * factor_t * factor_s**2 // x.shape[1]
    cells = x.movedim(1, -1).repeat_interleave(repeats, dim=-1)
    y = rearrange(cells, "b t h w (o f p q) -> b (t f) (h p) (w q) o", f=factor_t, p=factor_s, q=factor_s)
    return (y[:, factor_t - 1 :] if first else y).movedim(-1, 1)
