"""Building blocks of LTX-2's video VAEs: convolutions over time that run on a whole video or on a stream of chunks.

Activations are `[B, C, T, H, W]`. A causal convolution sees a frame and the two before it, one that is not causal the
frame before and the one after. In a stream the latter therefore gives its frames one behind what it takes, and what
goes around it waits; at the end of the video all that is left comes out. Beyond both ends stands a copy of the end's
frame, per layer, as in Diffusers. Either way the frames of all chunks are those of the whole video.
"""

import dataclasses
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from core import keys
from core.errors import UserError
from core.keys import Key
from nn.layers import linear, timestep_embedding, wide
from nn.ltx2_vae_config import TIME_DIM, Block, Change
from nn.wan_vae_blocks import Cache

REACH = 2  # frames beside its own that a convolution over time sees
NORM_EPS = 1e-8


def pixel_norm(x: Tensor) -> Tensor:
    """`x / sqrt(mean(x^2) + eps)` over channels, in x's dtype; only the mean is float32 or wider."""
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=wide(x))
    return x * torch.rsqrt(norm.square() / x.shape[1] + NORM_EPS).to(x.dtype)


def activate(x: Tensor, modulation: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """`silu(pixel_norm(x) * (1 + scale) + shift)` with a modulation `(shift, scale)`, each `[B, C, 1, 1, 1]`."""
    x = pixel_norm(x)
    if modulation is not None:
        shift, scale = modulation
        x = x * (1 + scale) + shift
    return F.silu(x)


@dataclasses.dataclass(frozen=True)
class VaeRun:
    """How layers run: `activate`, which a compiled one may replace."""

    activate: Callable[..., Tensor] = activate


@dataclasses.dataclass(frozen=True)
class Stream:
    """What a pass through the layers carries besides activations.

    Attributes:
        cache: frames that layers keep for the chunk to come, by name; taken out and put in as the pass goes on.
        causal: which kind of convolution.
        last: no chunk follows: layers give all that they hold, and keep nothing.
        padding: what stands around height and width: "zeros" or a mode of `torch.nn.functional.pad`.
        eps: of the norm in front of a 1x1x1 shortcut.
        timestep: `[B]`, times the model's multiplier, for decoders that are conditioned on it.
        noise: key of the noise that blocks with `per_channel_scale1` add.
        run: how layers run.
    """

    cache: Cache
    causal: bool
    last: bool
    padding: str
    eps: float = 1e-6
    timestep: Tensor | None = None
    noise: Key | None = None
    run: VaeRun = VaeRun()

    @property
    def ahead(self) -> int:
        """Frames after its own that a convolution sees."""
        return 0 if self.causal else 1

    def entry(self, name: str) -> str:
        """The key in the cache of what layer `name` keeps; the two kinds keep different frames."""
        return f"{name}:{'causal' if self.causal else 'ahead'}"


# --- streams --------------------------------------------------------------------------------------------------


def _recall(stream: Stream, entry: str, x: Tensor) -> Tensor | None:
    """What the chunk before left, or None. Raises UserError for a cache made for other sizes."""
    past = stream.cache.pop(entry, None)
    if past is not None and (past.shape[:2] != x.shape[:2] or past.shape[3:] != x.shape[3:]):
        seen, wanted = list(past.shape), [*x.shape[:2], "t", *x.shape[3:]]
        raise UserError(f"cache entry {entry} has shape {seen}, this chunk needs {wanted}")
    return past


def _remember(stream: Stream, entry: str, frames: Tensor) -> None:
    """Keeps a copy of frames: a view would keep the whole activation alive."""
    if not stream.last and frames.shape[2] > 0:
        stream.cache[entry] = frames.clone()


def window(stream: Stream, name: str, x: Tensor, *, step: int = 1) -> tuple[Tensor, bool]:
    """The frames that a convolution with stride `step` slides over, and whether it starts the video.

    Until it has what its first frame takes, it holds back all that came: fewer than `REACH + 1` frames.
    """
    entry, keep = stream.entry(name), REACH + 1 - step
    past = _recall(stream, entry, x)
    first = past is None or past.shape[2] < keep
    parts = [x] if past is None else [past, x]
    count = sum(part.shape[2] for part in parts)
    starts = first and (stream.last or count > stream.ahead)
    if starts:
        parts = [parts[0][:, :, :1]] * (REACH - stream.ahead) + parts
    if stream.last:
        end = parts[-1] if parts[-1].shape[2] > 0 else parts[-2]
        parts = parts + [end[:, :, -1:]] * stream.ahead
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    _remember(stream, entry, joined[:, :, -keep:] if starts or not first else joined)
    return joined, first


def delayed(stream: Stream, name: str, x: Tensor, frames: int) -> Tensor:
    """The next `frames` frames of what goes around layers that may be behind; the others wait."""
    if stream.causal:
        return x
    entry = stream.entry(name)
    past = _recall(stream, entry, x)
    joined = x if past is None else torch.cat([past, x], dim=2)
    _remember(stream, entry, joined[:, :, frames:])
    return joined[:, :, :frames]


# --- convolutions ---------------------------------------------------------------------------------------------


def conv(p: Mapping[str, Tensor], name: str, x: Tensor, stream: Stream, *, stride: tuple[int, int] = (1, 1)) -> Tensor:
    """3x3x3 convolution of a stream, `[B, C, T, H, W] -> [B, C', T', H / s, W / s]`; `stride` is (time, s)."""
    return slide(p, name, window(stream, name, x, step=stride[0])[0], stream, stride=stride)


def slide(p: Mapping[str, Tensor], name: str, x: Tensor, stream: Stream, *, stride=(1, 1)) -> Tensor:
    """The convolution `name.conv` over every window of three frames that lies within `x`; none in fewer frames."""
    weight, bias = p[f"{name}.conv.weight"].to(x.dtype), p[f"{name}.conv.bias"].to(x.dtype)
    strides = (stride[0], stride[1], stride[1])
    if x.shape[2] <= REACH:
        return x.new_zeros(x.shape[0], len(weight), 0, *(n // stride[1] for n in x.shape[3:]))
    if stream.padding == "zeros":
        return F.conv3d(x, weight, bias, strides, (0, 1, 1))
    return F.conv3d(F.pad(x, (1, 1, 1, 1, 0, 0), mode=stream.padding), weight, bias, strides)


def embed(p: Mapping[str, Tensor], name: str, stream: Stream, dtype: torch.dtype) -> Tensor:
    """The timestep as `[B, D]` in `dtype`, through the two layers of `name`."""
    h = linear(p, f"{name}.timestep_embedder.linear_1", timestep_embedding(stream.timestep, TIME_DIM).to(dtype))
    return linear(p, f"{name}.timestep_embedder.linear_2", F.silu(h))


def modulations(table: Tensor, embedded: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs of shift and scale, each `[B, C, 1, 1, 1]`, of a table `[2n, C]` and an embedding `[B, 2n * C]`."""
    rows = embedded.unflatten(1, (len(table), -1)) + table.to(embedded.dtype)
    rows = [row[..., None, None, None] for row in rows.unbind(1)]
    return list(zip(rows[::2], rows[1::2], strict=True))


# --- residual blocks ------------------------------------------------------------------------------------------


def resnet(p: Mapping[str, Tensor], name: str, x: Tensor, stream: Stream, embedded: Tensor | None = None) -> Tensor:
    """`shortcut(x) + conv2(act(conv1(act(x))))`, modulated by `embedded [B, 4C]`; it may give fewer frames than x."""
    pairs = [None, None] if embedded is None else modulations(p[f"{name}.scale_shift_table"], embedded)
    h = x
    for i, pair in enumerate(pairs, start=1):
        h = conv(p, f"{name}.conv{i}", stream.run.activate(h, pair), stream)
        h = _with_noise(p, f"{name}.per_channel_scale{i}", h, stream)
    return h + _shortcut(p, name, delayed(stream, f"{name}.shortcut", x, h.shape[2]), stream.eps)


def _with_noise(p: Mapping[str, Tensor], name: str, h: Tensor, stream: Stream) -> Tensor:
    """Adds one picture of noise, the same for every frame and video, times a scale per channel."""
    if name not in p:
        return h
    noise = keys.normal(keys.fold_in(stream.noise, name), h.shape[3:], device=h.device, dtype=h.dtype)
    return h + (p[name].to(h.dtype) * noise)[:, None]


def _shortcut(p: Mapping[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    """`x`, or where the width changes a 1x1x1 convolution of its LayerNorm over channels."""
    if f"{name}.conv_shortcut.weight" not in p:
        return x
    channels = x.movedim(1, -1)
    norm = [p[f"{name}.norm3.{leaf}"].to(x.dtype) for leaf in ("weight", "bias")]
    h = F.layer_norm(channels, channels.shape[-1:], *norm, eps)
    weight = p[f"{name}.conv_shortcut.weight"].flatten(1).to(x.dtype)
    return F.linear(h, weight, p[f"{name}.conv_shortcut.bias"].to(x.dtype)).movedim(-1, 1)


def block(p: Mapping[str, Tensor], plan: Block, x: Tensor, stream: Stream) -> Tensor:
    """The residual blocks of `plan`, each with the block's embedding of the timestep where it has one."""
    embedded = embed(p, f"{plan.name}.time_embedder", stream, x.dtype) if plan.timed else None
    for i in range(plan.layers):
        x = resnet(p, f"{plan.name}.resnets.{i}", x, stream, embedded)
    return x


def down(p: Mapping[str, Tensor], plan: Block, x: Tensor, stream: Stream) -> Tensor:
    """Residual blocks, then the change of resolution."""
    x = block(p, plan, x, stream)
    return x if plan.change is None else downsample(p, plan.change, x, stream)


def up(p: Mapping[str, Tensor], plan: Block, x: Tensor, stream: Stream) -> Tensor:
    """The residual block that changes the width, the change of resolution, then residual blocks."""
    if plan.enter is not None:
        x = resnet(p, f"{plan.name}.conv_in", x, stream)
    if plan.change is not None:
        x = upsample(p, plan.change, x, stream)
    return block(p, plan, x, stream)


# --- changes of resolution ------------------------------------------------------------------------------------


def fold(x: Tensor, change: Change) -> Tensor:
    """Cells of pixels to channels, `[B, C, T, H, W] -> [B, C * cells, T / ft, H / fs, W / fs]`, C outermost."""
    f, s = change.factor_t, change.factor_s
    return rearrange(x, "b c (t f) (h p) (w q) -> b (c f p q) t h w", f=f, p=s, q=s)


def unfold(x: Tensor, change: Change) -> Tensor:
    """Inverse of `fold`."""
    f, s = change.factor_t, change.factor_s
    return rearrange(x, "b (c f p q) t h w -> b c (t f) (h p) (w q)", f=f, p=s, q=s)


def downsample(p: Mapping[str, Tensor], change: Change, x: Tensor, stream: Stream) -> Tensor:
    """Folds a convolution of x, and adds x itself folded, averaged over groups of channels.

    At the start of a video the first frame is doubled, so that 2k + 1 frames are k + 1.
    """
    if change.strided:
        return conv(p, change.name, x, stream, stride=(change.factor_t, change.factor_s))
    name, n_out = f"{change.name}.conv", change.widths[1]
    if stream.entry(name) not in stream.cache:
        x = torch.cat([x[:, :, :1]] * (change.factor_t - 1) + [x], dim=2)
    around = fold(x, change).unflatten(1, (n_out, -1)).mean(2)
    return fold(conv(p, name, x, stream), change) + around


def upsample(p: Mapping[str, Tensor], change: Change, x: Tensor, stream: Stream) -> Tensor:
    """Unfolds a convolution of x; with a shortcut adds x itself unfolded, its channels repeated in turn.

    At the start of a video the first of its two frames is left out, so that k + 1 frames are 2k + 1.
    """
    name, n_out = f"{change.name}.conv", change.widths[1]
    joined, first = window(stream, name, x)
    h = slide(p, name, joined, stream)
    y = unfold(h, change)
    if change.shortcut:
        around = unfold(delayed(stream, f"{change.name}.shortcut", x, h.shape[2]), change)
        y = y + around.repeat(1, n_out // around.shape[1], 1, 1, 1)
    return y[:, :, change.factor_t - 1 :] if first else y
