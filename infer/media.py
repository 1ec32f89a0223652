"""Video files in and out with PyAV, contact sheets, and the distance between two videos."""

import contextlib
import dataclasses
import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import torch
from torch import Tensor
from torch.nn import functional as F

from core.errors import UserError, named
from core.files import atomic_file
from core.geometry import longest_valid, nearest_valid
from infer.orientation import orientation, upright
from infer.sound import Sound, add_track, fit_length, for_aac, mux_samples, opened
from infer.words import counted

# swscale's SWS_BICUBIC | SWS_FULL_CHR_H_INT | SWS_ACCURATE_RND: its fast default truncates instead of
# rounding and darkens every picture by more than one level of 255 per conversion.
_SWSCALE_FLAGS = 0x4 | 0x2000 | 0x40000
_BT709 = 1  # ISO/IEC 23091-2 code point of matrix, primaries and transfer
_LIMITED_RANGE = 1
CRF = range(52)  # x264's constant rate factors of 8 bit


@dataclasses.dataclass(frozen=True)
class Video:
    """Frames uint8 `[T, H, W, 3]` (RGB) and their rate in frames per second."""

    frames: Tensor
    fps: float


@dataclasses.dataclass(frozen=True)
class ClipInfo:
    """What `read_video` would give of a file: `frames` (of `in_file` before resampling) at `fps`, upright pixels."""

    frames: int
    in_file: int
    fps: float
    height: int
    width: int


SLOWEST = Fraction(1, 10_000)  # frames per second; also the precision to which rates are kept
FASTEST = 1000  # what is more is a time base, not a rate
SQUARE = Fraction(1, 100)  # by how much pixels may be wider or higher and still count as square


def frame_rate(fps: float | Fraction) -> Fraction:
    """A frame rate as a short fraction: 30000 / 1001 as a float gives Fraction(30000, 1001) again.

    Raises UserError unless it is a number from 1/10000 to 1000.
    """
    if isinstance(fps, bool) or not math.isfinite(fps) or not SLOWEST <= fps <= FASTEST:
        raise UserError(f"fps is {fps!r}, expected a positive number of at least {float(SLOWEST)}, at most {FASTEST}")
    return Fraction(fps).limit_denominator(SLOWEST.denominator)


def resize_cover(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Scales frames uint8 `[T, H, W, 3]` until they cover `size` (height, width), then crops the centre.

    One scale for both axes, the smaller that covers; bicubic with antialiasing; rounded to uint8.
    """
    height, width = frames.shape[1:3]
    if (height, width) == tuple(size):
        return frames
    scale = max(size[0] / height, size[1] / width)
    scaled = max(size[0], round(height * scale)), max(size[1], round(width * scale))
    x = frames.permute(0, 3, 1, 2).float()
    x = F.interpolate(x, scaled, mode="bicubic", antialias=True, align_corners=False)
    top, left = (scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2
    x = x[:, :, top : top + size[0], left : left + size[1]]
    return x.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _decode(container, stream, counter: list[int]) -> Iterator[tuple[Fraction, av.VideoFrame]]:
    """`(seconds, frame)` in presentation order; `counter[0]` counts the frames of the file."""
    for frame in container.decode(stream):
        if frame.is_corrupt:
            raise av.error.InvalidDataError(0, f"frame {counter[0]} is damaged")
        seconds = _seconds(frame, counter[0], stream)
        counter[0] += 1
        yield seconds, frame


def _seconds(shown, number: int, stream) -> Fraction:
    """When a frame or packet is shown; by its number where the file does not say."""
    return number / Fraction(stream.average_rate) if shown.pts is None else Fraction(shown.pts * shown.time_base)


def resample(frames: Iterable[tuple[Fraction, Any]], fps: Fraction) -> Iterator[Any]:
    """For k = 0, 1, ... the frame whose timestamp is nearest to `first + k / fps`, a tie going to the later.

    The clip ends one mean frame interval after its last timestamp.
    """
    start = last = None
    count = emitted = 0
    for time, frame in frames:
        start = time if start is None else start
        while last is not None and start + emitted / fps < (last[0] + time) / 2:
            yield last[1]
            emitted += 1
        last, count = (time, frame), count + 1
    if last is not None:
        interval = (last[0] - start) / (count - 1) if count > 1 else 1 / fps
        while start + emitted / fps < last[0] + interval:
            yield last[1]
            emitted += 1


def _to_rgb(frame: av.VideoFrame, size: tuple[int, int] | None) -> Tensor:
    """One decoded frame as uint8 `[H, W, 3]`, upright, scaled to `size`."""
    rgb = torch.from_numpy(frame.reformat(format="rgb24", interpolation=_SWSCALE_FLAGS).to_ndarray())
    rgb = upright(rgb, orientation(frame))
    return rgb.contiguous() if size is None else resize_cover(rgb[None], size)[0]


def _too_short(
    path, asked: int, start: int, found: int, in_file: int, fps: Fraction | None, stride: int
) -> UserError:
    has = counted(found, "frame")
    if fps is not None:
        has = f"{counted(in_file, 'frame')}, {found} after resampling to {float(fps):g} fps"
    left = longest_valid(found - start, stride)
    advice = f"the longest valid count ({stride}k+1) from there is {left}" if left > 0 else "no frame is left there"
    return UserError(f"{path}: asked for {counted(asked, 'frame')} from frame {start}, the clip has {has}: {advice}")


def _check_request(path: Path, num_frames: int | None, start: int, size: tuple[int, int] | None) -> None:
    if num_frames is not None and num_frames < 1:
        raise UserError(f"{path}: num_frames is {num_frames}, expected at least 1")
    if start < 0:
        raise UserError(f"{path}: start is {start}, expected 0 or more")
    if size is not None and min(size) < 1:
        raise UserError(f"{path}: size (height, width) is {tuple(size)}, expected positive numbers")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """A file and its first video stream. Raises UserError naming it, also for what fails while it is read."""
    with opened(path, "video", "a video or a picture") as container:
        if not container.streams.video:
            raise UserError(f"{path}: no video stream")
        stream = container.streams.video[0]
        if (aspect := stream.sample_aspect_ratio) and abs(aspect - 1) > SQUARE:
            raise UserError(f"{path}: its pixels are not square ({aspect} as wide as high): make them square first")
        yield container, stream


def _rate_of(path: Path, stream, asked: Fraction | None) -> float:
    if asked is None and not stream.average_rate:
        raise UserError(f"{path}: the file does not say its frame rate; pass fps")
    return float(stream.average_rate if asked is None else asked)


def probe(path: str | Path, fps: float | Fraction | None = None) -> ClipInfo:
    """Counts and sizes as `read_video` finds them, from the timestamps of the packets and the first picture alone.

    Raises UserError naming the file when it is missing, cannot be read, or holds no picture. Damage further on is
    found by decoding only.
    """
    path = Path(path)
    rate, times, first = None if fps is None else frame_rate(fps), [], None
    with _opened(path) as (container, stream):
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise UserError(f"{path}: cannot be decoded as video: packet {len(times)} is damaged or cut short")
            if first is None:
                first = next(iter(packet.decode()), None)
            if packet.size and not packet.is_discard:  # the last packet is empty, edit lists discard others
                times.append(_seconds(packet, len(times), stream))
        if first is None or not times:
            raise UserError(f"{path}: cannot be decoded as video: it holds no picture")
        fps = _rate_of(path, stream, rate)
    shown = ((time, None) for time in sorted(times))
    frames = len(times) if rate is None else sum(1 for _ in resample(shown, rate))
    with named(str(path)):
        turned = orientation(first).transposed
    height, width = (first.width, first.height) if turned else (first.height, first.width)
    return ClipInfo(frames, len(times), fps, height, width)


def read_video(
    path: str | Path,
    *,
    num_frames: int | None = None,
    start: int = 0,
    fps: float | Fraction | None = None,
    size: tuple[int, int] | None = None,
    stride: int = 4,
) -> Video:
    """Decodes a clip to uint8 `[T, H, W, 3]` RGB, frame by frame and without seeking, so exactly.

    `fps` resamples in time by the nearest timestamp (None: every frame of the file); `start` and `num_frames`
    count frames after resampling, None meaning all to the end. `size` = (height, width) scales to cover and
    crops the centre, see `resize_cover`. Frames are as they are shown: turned and mirrored as the file says.

    Raises UserError naming the file when it is missing, cannot be decoded, has no video stream, or is
    shorter than asked (with the frames found before and after resampling, and the longest count `stride * k + 1`
    that a VAE of so many frames per latent frame can take).
    """
    path = Path(path)
    _check_request(path, num_frames, start, size)
    rate, counter = None if fps is None else frame_rate(fps), [0]
    with _opened(path) as (container, stream):
        decoded = _decode(container, stream, counter)
        kept = (frame for _, frame in decoded) if rate is None else resample(decoded, rate)
        stop = None if num_frames is None else start + num_frames
        found, frames = 0, []
        for frame in itertools.islice(kept, stop):
            if found >= start:
                with named(str(path)):
                    frames.append(_to_rgb(frame, size))
            found += 1
        if len(frames) < (1 if num_frames is None else num_frames):
            raise _too_short(path, num_frames if num_frames is not None else 1, start, found, counter[0], rate, stride)
        return Video(torch.stack(frames), _rate_of(path, stream, rate))


def to_uint8(frames: Tensor) -> Tensor:
    """Frames uint8, or floating in [0, 1] (clamped, rounded), `[T, H, W, 3]` as uint8 on the CPU."""
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.shape[0] == 0:
        raise UserError(f"frames have shape {list(frames.shape)}, expected [T, H, W, 3] with T >= 1")
    if frames.dtype == torch.uint8:
        return frames.cpu().contiguous()
    if not frames.dtype.is_floating_point:
        raise UserError(f"frames have dtype {frames.dtype}, expected uint8 or a floating dtype in [0, 1]")
    if not bool(torch.isfinite(frames).all()):
        raise UserError("frames hold NaN or infinite values")
    return (frames.float().clamp(0, 1) * 255).round().to(torch.uint8).cpu().contiguous()


def _check_even(height: int, width: int) -> None:
    if height % 2 or width % 2:
        near = " by ".join("/".join(str(v) for v in nearest_valid(n, 2)) for n in (height, width))
        raise UserError(f"H.264 in yuv420p needs even sizes, the frames are {height} by {width}: nearest {near}")


def _lasting(sound: Sound, frames: int, rate: Fraction) -> Sound:
    """The sound as an AAC track takes it, as long as `frames` of picture: cut, or with silence after it."""
    sound = for_aac(sound)
    return Sound(fit_length(sound.waveform, max(1, round(frames / rate * sound.rate))), sound.rate)


def _exact_times(rate: Fraction, sound: Sound | None) -> dict[str, str]:
    """Units of time in which the lengths of both tracks are whole numbers; FFmpeg's own is a thousandth of a second."""
    units = 0 if sound is None else math.lcm(rate.numerator, sound.rate)
    return {"movie_timescale": str(units)} if 0 < units < 2**31 else {}


def write_video(
    path: str | Path, frames: Tensor, fps: float | Fraction, sound: Sound | None = None, *, crf: int = 18
) -> None:
    """Writes frames `[T, H, W, 3]`, uint8 or floating in [0, 1], as an H.264 MP4 (yuv420p, BT.709, limited range).

    `fps` is kept exactly as a fraction. `sound` becomes an AAC track that begins with the first frame and ends with the
    last: cut, or with silence after it. `crf` is x264's constant rate factor: 0 lossless, 18 near transparent, 51
    worst. The file appears whole or not at all. Raises UserError for odd sizes (with the nearest even ones), other
    shapes and dtypes, non-positive rates, and sounds with NaN or infinite samples.
    """
    frames, rate = to_uint8(frames), frame_rate(fps)
    height, width = frames.shape[1:3]
    _check_even(height, width)
    sound = None if sound is None else _lasting(sound, len(frames), rate)
    options = {"movflags": "+faststart", **_exact_times(rate, sound)}
    with atomic_file(path) as part, av.open(str(part), "w", format="mp4", options=options) as out:
        stream = out.add_stream("libx264", rate=rate, options={"crf": str(crf)})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        codec = stream.codec_context
        codec.colorspace = codec.color_primaries = codec.color_trc = _BT709
        codec.color_range = _LIMITED_RANGE
        track = None if sound is None else add_track(out, sound)
        for index, rgb in enumerate(frames.numpy()):
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24").reformat(
                format="yuv420p", dst_colorspace=_BT709, dst_color_range=_LIMITED_RANGE, interpolation=_SWSCALE_FLAGS
            )
            frame.pts, frame.time_base = index, 1 / rate
            out.mux(stream.encode(frame))
            if track is not None:  # side by side, so that a player finds both where it reads
                mux_samples(out, track, sound, *_share(sound, index, len(frames)))
        for one in (stream, track):
            out.mux([] if one is None else one.encode(None))


def recompressed(picture: Tensor, crf: int) -> Tensor:
    """A picture uint8 `[H, W, 3]` as one frame of H.264 leaves it: encoded, and decoded again.

    LTX-2's models were trained on given pictures like that, with this preset and FFmpeg's own conversion of colours:
    the result equals Diffusers' `apply_image_conditioning_crf` bit by bit. Odd sizes lose their last row or column.

    Args:
        crf: x264's constant rate factor, 1 to 51, the worst; 0 gives the picture as it is.

    Raises:
        UserError: another crf, shape or dtype; a picture of fewer than 2 by 2 pixels.
    """
    if picture.dtype != torch.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise UserError(f"a picture is {picture.dtype} {list(picture.shape)}, expected torch.uint8 [H, W, 3]")
    if crf not in CRF:
        raise UserError(f"crf is {crf!r}, allowed {CRF[0]} (as it is) to {CRF[-1]}")
    if crf == 0:
        return picture
    height, width = (n - n % 2 for n in picture.shape[:2])
    if min(height, width) == 0:
        raise UserError(f"a picture of {picture.shape[0]} by {picture.shape[1]} pixels is too small for H.264")
    encoder, decoder = av.CodecContext.create("libx264", "w"), av.CodecContext.create("h264", "r")
    encoder.height, encoder.width, encoder.pix_fmt, encoder.time_base = height, width, "yuv420p", Fraction(1)
    encoder.options = {"crf": str(crf), "preset": "veryfast"}
    rgb = picture[:height, :width].cpu().contiguous().numpy()
    frame = av.VideoFrame.from_ndarray(rgb, format="rgb24").reformat(format="yuv420p")
    packets = [*encoder.encode(frame), *encoder.encode(None), None]
    (seen,) = (shown for packet in packets for shown in decoder.decode(packet))
    return torch.from_numpy(seen.to_ndarray(format="rgb24"))


def _share(sound: Sound, index: int, parts: int) -> tuple[int, int]:
    """First and last sample (exclusive) of one of `parts` almost equal parts of a sound."""
    samples = sound.waveform.shape[1]
    return samples * index // parts, samples * (index + 1) // parts


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of two videos of equal shape, each uint8 or floating in [0, 1].

    10 log10(1 / mean squared error) over all values; `inf` for equal videos.
    """
    if a.shape != b.shape:
        raise UserError(f"psnr of videos of unequal shapes {list(a.shape)} and {list(b.shape)}")
    unit = [x.double() / 255 if x.dtype == torch.uint8 else x.double() for x in (a, b)]
    error = float((unit[0] - unit[1]).square().mean())
    return math.inf if error == 0 else -10 * math.log10(error)


def contact_sheet(
    rows: Sequence[tuple[str, Tensor]], path: str | Path, columns: int = 6, *, title: str | None = None
) -> None:
    """Writes a PNG with one labelled row per clip: `columns` evenly spaced frames, first and last included.

    `rows` holds `(label, frames)` with frames as for `write_video`; clips may differ in length and size.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not rows or columns < 1:
        raise UserError(f"contact sheet: {len(rows)} rows and {columns} columns, expected at least one of each")
    clips = [(label, to_uint8(frames)) for label, frames in rows]
    columns = min(columns, max(len(frames) for _, frames in clips))
    room = 20 * columns  # characters of a label that fit
    cell = 2.0  # inches of one picture's width
    heights = [cell * frames.shape[1] / frames.shape[2] for _, frames in clips]
    gap, caption, head = 0.06, 0.34, 0.5 if title else 0.08
    size = columns * (cell + gap) + gap, sum(heights) + len(rows) * (caption + gap) + head
    figure = Figure(figsize=size, facecolor="white")
    FigureCanvasAgg(figure)
    if title:
        bold = {"fontsize": 13, "fontweight": "bold", "parse_math": False}
        figure.text(gap / size[0], 1 - 0.28 / size[1], textwrap.shorten(title, room), va="center", **bold)
    top = size[1] - head
    for (label, frames), height in zip(clips, heights, strict=True):
        top -= caption
        plain = {"fontsize": 11, "color": "#333333", "parse_math": False}
        figure.text(gap / size[0], (top + caption / 2) / size[1], textwrap.shorten(label, room), va="center", **plain)
        top -= height
        _draw_row(figure, frames, columns, top, height, cell, gap)
        top -= gap
    with atomic_file(path) as part:
        figure.savefig(part, format="png", dpi=120)


def _draw_row(figure, frames: Tensor, columns: int, bottom: float, height: float, cell: float, gap: float) -> None:
    """Draws evenly spaced frames side by side, each with its index in a corner; lengths are in inches."""
    width, total = figure.get_size_inches()
    picks = torch.linspace(0, len(frames) - 1, min(columns, len(frames))).round().long().tolist()
    for column, index in enumerate(picks):
        left = gap + column * (cell + gap)
        axes = figure.add_axes((left / width, bottom / total, cell / width, height / total))
        axes.imshow(frames[index].numpy(), interpolation="lanczos", aspect="auto")
        axes.set_axis_off()
        badge = {"boxstyle": "round,pad=0.25", "facecolor": "black", "edgecolor": "none", "alpha": 0.55}
        axes.text(0.02, 0.96, str(index), transform=axes.transAxes, va="top", fontsize=8, color="white", bbox=badge)
