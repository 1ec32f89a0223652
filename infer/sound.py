"""Sound files in and out with PyAV, spectrograms as pictures, and how alike two sounds are."""

import contextlib
import dataclasses
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import torch
from torch import Tensor

from core.errors import UserError
from core.files import atomic_file
from nn.ltx2_audio_mel import MelConfig, hz_to_mel, log_mel

LAYOUTS = {1: "mono", 2: "stereo"}
AAC_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)
BIT_RATE = 96_000  # of AAC, per channel and second: 35 dB and more above what it loses, on a film's sound
FILES = {".wav": ("wav", "pcm_s16le"), ".m4a": ("ipod", "aac"), ".mp4": ("mp4", "aac")}
"""By a file's suffix its container and its codec, as FFmpeg calls them."""

KIND = ("sound", "a file with sound")
GAP = Fraction(1, 10)  # seconds; timestamps that are off by less are rounding, not silence
MARGIN = 1  # second before and after a span that is converted with it: a whole number of samples at every rate
BANDS = 64
TICKS = (100, 500, 1000, 2000, 4000, 8000, 16000)  # Hz
RANGE = 80.0  # dB below the loudest that a spectrogram shows


@dataclasses.dataclass(frozen=True, eq=False)
class Sound:
    """A waveform `[C, N]`, mono or stereo, floating in [-1, 1], and its samples per second."""

    waveform: Tensor
    rate: int

    def __post_init__(self):
        x = self.waveform
        if x.ndim != 2 or len(x) not in LAYOUTS or x.shape[1] < 1 or not x.dtype.is_floating_point:
            raise UserError(f"a sound is {x.dtype} {list(x.shape)}, expected floating [1 or 2 channels, N samples]")
        if isinstance(self.rate, bool) or not isinstance(self.rate, int) or self.rate < 1:
            raise UserError(f"a sound's rate is {self.rate!r}, expected a positive number of samples per second")

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.waveform.shape[1] / self.rate


# --- conversion -----------------------------------------------------------------------------------------------


def _as_frame(waveform: Tensor, rate: int, at: int = 0) -> av.AudioFrame:
    """Samples `[C, N]` as FFmpeg takes them, the first of them number `at` of the sound."""
    samples = waveform.detach().float().cpu().clamp(-1, 1).contiguous().numpy()
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=LAYOUTS[len(samples)])
    frame.sample_rate, frame.pts, frame.time_base = rate, at, Fraction(1, rate)
    return frame


def fit_length(waveform: Tensor, samples: int) -> Tensor:
    """A waveform `[..., N]` cut to `samples`, or with zeros after it."""
    return torch.nn.functional.pad(waveform, (0, samples - waveform.shape[-1]))


def resample_sound(sound: Sound, rate: int) -> Sound:
    """The sound at another rate, `round(N * rate / sound.rate)` samples, by FFmpeg's polyphase filter."""
    if rate == sound.rate:
        return sound
    converter = av.AudioResampler(format="fltp", layout=LAYOUTS[len(sound.waveform)], rate=rate)
    frames = [*converter.resample(_as_frame(sound.waveform, sound.rate)), *converter.resample(None)]
    samples = max(1, round(Fraction(sound.waveform.shape[1] * rate, sound.rate)))
    parts = [torch.from_numpy(frame.to_ndarray()) for frame in frames]
    whole = torch.cat(parts, dim=1) if parts else sound.waveform.new_zeros(len(sound.waveform), 0)
    return Sound(fit_length(whole, samples).clamp(-1, 1), rate)


# --- reading --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path, what: str, wanted: str) -> Iterator[Any]:
    """A media file's container. Raises UserError naming the file, also for what fails while it is read as `what`;
    `wanted` says what a folder is not."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder, expected {wanted}")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        with av.open(str(path)) as container:
            if not len(container.streams):
                raise UserError(f"{path}: cannot be decoded as {what}: it holds no streams, or is cut short")
            yield container
    except av.error.FFmpegError as error:
        raise UserError(f"{path}: cannot be decoded as {what}: {error.strerror}") from None


def has_sound(path: str | Path) -> bool:
    """Whether a media file has an audio stream. Raises UserError for a file that is missing or cannot be opened."""
    with opened(Path(path), *KIND) as container:
        return len(container.streams.audio) > 0


def _frames(path: Path, container, stream) -> Iterator[av.AudioFrame]:
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise UserError(f"{path}: cannot be decoded as sound: it is damaged or cut short")
        yield from packet.decode()


def _decoded(path: Path, container, stream) -> Iterator[tuple[Fraction, int, Tensor]]:
    """`(seconds, rate, samples [1 or 2, n])` of each block in a file; more channels than two are mixed down."""
    mixer, form, read = None, None, 0
    for frame in _frames(path, container, stream):
        found = frame.sample_rate, frame.layout.name, frame.format.name
        time = Fraction(read, frame.sample_rate) if frame.pts is None else Fraction(frame.pts * frame.time_base)
        if mixer is None:
            layout, form = LAYOUTS[min(2, frame.layout.nb_channels)], found
            mixer = av.AudioResampler(format="fltp", layout=layout, rate=frame.sample_rate)
        elif found != form:
            raise UserError(f"{path}: its sound changes from {form} to {found} after {float(time):g} s")
        read += frame.samples
        parts = [torch.from_numpy(part.to_ndarray()) for part in mixer.resample(frame)]
        yield time, frame.sample_rate, torch.cat(parts, dim=1)


def _origin(container, first: Fraction) -> Fraction:
    """When a clip begins: with its first picture; a file without moving pictures with its `first` sample."""
    films = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
    if not films:
        return first
    return Fraction(0) if films[0].start_time is None else films[0].start_time * films[0].time_base


def _placed(blocks: Iterable[tuple[int, Tensor]], begin: int, end: int | None, slack: int) -> Tensor:
    """Samples `begin` to `end` of blocks, each with the number of its first sample: silence before the first of them,
    and where one comes more than `slack` late. Where the blocks end before `end`, so does the result."""
    out, at, expected = [], begin, None
    for position, block in blocks:
        here = position if expected is None or position - expected > slack else expected
        expected = here + block.shape[1]
        kept = block[:, max(0, at - here) :]
        if kept.shape[1]:
            out += [block.new_zeros(len(block), max(0, here - at)), kept]
            at = expected
        if end is not None and at >= end:
            break
    return torch.cat(out, dim=1)[:, : None if end is None else end - begin] if out else torch.zeros(1, 0)


def _span(path: Path, container, begin: int, end: float | None) -> Sound | None:
    """The sound from `begin` whole seconds after the clip's start to `end`, as the file has it; None: nothing there."""
    stream = container.streams.audio[0]
    blocks = _decoded(path, container, stream)
    first = next(blocks, None)
    if first is None:
        return None
    rate, origin = first[1], _origin(container, first[0])
    if "mp4" in container.format.name and stream.duration and stream.start_time is not None:
        # The last block of a codec is longer than the sound, and MP4 says by how much.
        length = round(((stream.start_time + stream.duration) * stream.time_base - origin) * rate)
        end = length / rate if end is None else min(end, length / rate)
    numbered = ((round((time - origin) * rate), block) for time, _, block in (first, *blocks))
    stop = None if end is None else max(begin * rate, round(end * rate))
    samples = _placed(numbered, begin * rate, stop, round(GAP * rate))
    return Sound(samples, rate) if samples.shape[1] else None


def _check_span(path: Path, rate: int, start: float, seconds: float | None) -> None:
    if rate < 1:
        raise UserError(f"{path}: rate is {rate}, expected a positive number of samples per second")
    if not (math.isfinite(start) and start >= 0):
        raise UserError(f"{path}: start is {start} s, expected 0 or more")
    if seconds is not None and not (math.isfinite(seconds) and round(seconds * rate) >= 1):
        raise UserError(f"{path}: {seconds} s are asked for, expected at least one sample")


def read_sound(path: str | Path, *, rate: int, start: float = 0.0, seconds: float | None = None) -> Sound:
    """Decodes the sound of a file in stereo at `rate`: `[2, round(seconds * rate)]` float32 in [-1, 1].

    Time begins with the first picture, so that equal spans of picture and sound belong together; in a file without
    pictures with the first sample. Without seeking, so exactly. Mono is doubled, more channels are mixed down with
    FFmpeg's weights. Silence comes before sound that begins late, in gaps, and after the end; `seconds` None: to the
    end of the sound.

    Raises UserError naming the file when it is missing, cannot be decoded, has no sound, or none is left at `start`
    and no length was asked for.
    """
    path = Path(path)
    _check_span(path, rate, start, seconds)
    begin = max(0, math.floor(start) - MARGIN)
    with opened(path, *KIND) as container:
        if not container.streams.audio:
            raise UserError(f"{path}: no audio stream")
        found = _span(path, container, begin, None if seconds is None else start + seconds + MARGIN)
    if found is None and seconds is None:
        raise UserError(f"{path}: no sound is left at {start:g} s")
    waveform = torch.zeros(2, 0) if found is None else resample_sound(found, rate).waveform.expand(2, -1)
    first = round((start - begin) * rate)
    if seconds is not None:
        return Sound(fit_length(waveform[:, first:], round(seconds * rate)).clamp(-1, 1), rate)
    if waveform.shape[1] <= first:
        raise UserError(f"{path}: no sound is left at {start:g} s, it lasts {begin + waveform.shape[1] / rate:.3f} s")
    return Sound(waveform[:, first:].clamp(-1, 1).contiguous(), rate)


# --- writing --------------------------------------------------------------------------------------------------


def for_aac(sound: Sound) -> Sound:
    """The sound at a rate that AAC has: its own, or else 48 kHz."""
    return resample_sound(sound, sound.rate if sound.rate in AAC_RATES else 48_000)


def add_track(out: Any, sound: Sound, codec: str = "aac") -> Any:
    """A stream of a container for a sound. Raises UserError for NaN or infinite samples."""
    if not bool(torch.isfinite(sound.waveform).all()):
        raise UserError("the sound holds NaN or infinite samples")
    stream = out.add_stream(codec, rate=sound.rate, layout=LAYOUTS[len(sound.waveform)])
    if codec == "aac":
        stream.bit_rate = BIT_RATE * len(sound.waveform)
    return stream


def mux_samples(out: Any, stream: Any, sound: Sound, begin: int, end: int) -> None:
    """Encodes samples `begin` to `end` of a sound and writes what comes out; calls go on from one another.

    What an encoder puts before the first sample has negative timestamps, which players leave out.
    """
    if end > begin:
        out.mux(stream.encode(_as_frame(sound.waveform[:, begin:end], sound.rate, begin)))


def write_sound(path: str | Path, sound: Sound) -> None:
    """Writes a sound alone: `.wav` (16 bit), or `.m4a` and `.mp4` (AAC). The file appears whole or not at all.

    Raises UserError for another suffix and for NaN or infinite samples.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FILES:
        raise UserError(f"{path}: a sound cannot be written as {suffix!r}, only as {', '.join(FILES)}")
    form, codec = FILES[suffix]
    sound = for_aac(sound) if codec == "aac" else sound
    # Units of time in which the length is a whole number; FFmpeg's own is a thousandth of a second.
    options = {"movflags": "+faststart", "movie_timescale": str(sound.rate)} if codec == "aac" else {}
    with atomic_file(path) as part, av.open(str(part), "w", format=form, options=options) as out:
        stream = add_track(out, sound, codec)
        mux_samples(out, stream, sound, 0, sound.waveform.shape[1])
        out.mux(stream.encode(None))


# --- comparing ------------------------------------------------------------------------------------------------


def _mel_config(rate: int, bands: int) -> MelConfig:
    """The front end of LTX-2 (64 ms every 10 ms) at another rate, its bands up to half of that."""
    step = max(1, round(rate / 100))
    return MelConfig(rate, 2 * max(1, round(0.032 * rate)), step, bands, f_max=rate / 2)


def log_mel_correlation(a: Sound, b: Sound) -> float:
    """Pearson's correlation of the log-mel bins of two sounds: 1 for equal ones.

    Sounds that have nothing to do with one another do not give 0: most of them have more low frequencies than high.
    Both are taken at the lower of their rates, in stereo where either is, and cut to the shorter. 0 where one of them
    is the same in all bins, as silence is. Raises UserError for sounds shorter than half a window (32 ms).
    """
    rate = min(a.rate, b.rate)
    waves = [resample_sound(sound, rate).waveform.double().cpu() for sound in (a, b)]
    samples, channels = min(x.shape[1] for x in waves), max(len(x) for x in waves)
    bins = [log_mel(_mel_config(rate, BANDS), x[:, :samples].expand(channels, -1)[None]).flatten() for x in waves]
    if any(bool(v.min() == v.max()) for v in bins):
        return 0.0
    return float(torch.corrcoef(torch.stack(bins))[0, 1])


def _decibels(sound: Sound) -> Tensor:
    """Log-mel levels of both channels' mean, `[128, T]` dB, with equal levels for equal sounds at any rate."""
    wave = sound.waveform.float().cpu().mean(0)
    cfg = _mel_config(sound.rate, 128)
    wave = fit_length(wave, max(len(wave), cfg.n_fft))
    return (log_mel(cfg, wave[None, None])[0, 0].mT - math.log(cfg.n_fft)) * (20 / math.log(10))


def _mel(hz: float) -> float:
    return float(hz_to_mel(torch.tensor(float(hz), dtype=torch.float64)))


def _draw(ax: Any, label: str, sound: Sound, levels: Tensor, top: float, limits: tuple[float, float]) -> Any:
    """One row: levels over seconds and Hz (on the mel scale); black above what its rate can hold."""
    nyquist = sound.rate / 2
    image = ax.imshow(
        levels.numpy(), origin="lower", aspect="auto", cmap="magma", vmin=limits[0], vmax=limits[1],
        extent=(0, sound.seconds, 0, _mel(nyquist)), interpolation="bilinear",
    )  # fmt: skip
    ax.set_facecolor("black")
    ax.set_ylim(0, _mel(top))
    ticks = [hz for hz in TICKS if hz <= top]
    ax.set_yticks([_mel(hz) for hz in ticks], [f"{hz:,}" for hz in ticks])
    ax.set_ylabel("Hz")
    plain = {"fontsize": 11, "color": "#333333", "parse_math": False}
    ax.set_title(textwrap.shorten(label, 100), loc="left", **plain)
    ax.spines[["top", "right"]].set_visible(False)
    return image


def spectrogram(rows: Sequence[tuple[str, Sound]], path: str | Path, title: str = "") -> None:
    """Writes a PNG of log-mel spectrograms, one row per `(label, sound)`: seconds across, Hz up, one scale of levels.

    Levels are of both channels' mean, relative to the loudest of all rows.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not rows:
        raise UserError("spectrogram: no rows, expected at least one")
    levels = [_decibels(sound) for _, sound in rows]
    peak = max(float(x.max()) for x in levels)
    figure = Figure(figsize=(9, 0.9 + 2.3 * len(rows)), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    top = max(sound.rate for _, sound in rows) / 2
    for ax, (label, sound), level in zip(axes, rows, levels, strict=True):
        image = _draw(ax, label, sound, level - peak, top, (-RANGE, 0.0))
    axes[-1].set_xlim(0, max(sound.seconds for _, sound in rows))
    axes[-1].set_xlabel("seconds")
    figure.colorbar(image, ax=list(axes), label="dB, relative to the loudest", fraction=0.03, pad=0.015)
    if title:
        bold = {"fontsize": 13, "fontweight": "bold", "parse_math": False}
        figure.suptitle(textwrap.shorten(title, 90), x=0.01, ha="left", **bold)
    with atomic_file(path) as part:
        figure.savefig(part, format="png", dpi=120)
