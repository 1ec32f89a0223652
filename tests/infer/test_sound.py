"""Sound survives the way through a file and stays with its picture; spans are exact; bad files are named."""

import math
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core import keys
from core.errors import UserError
from infer.media import read_video, write_video
from infer.sound import (
    AAC_RATES,
    Sound,
    has_sound,
    log_mel_correlation,
    read_sound,
    resample_sound,
    spectrogram,
    write_sound,
)
from nn.ltx2_audio_mel import MelConfig, log_mel


def melody(rate: int, seconds: float = 1.3, channels: int = 2, seed: int = 0) -> Sound:
    """Tones with overtones that begin and fade at random times, below 3 kHz: no two moments sound alike."""
    time = torch.arange(round(seconds * rate), dtype=torch.float64) / rate
    wave = torch.zeros(channels, len(time), dtype=torch.float64)
    for i, (hz, begin, side) in enumerate(keys.uniform(keys.key(seed), (12, 3)).double().tolist()):
        since = (time - begin * seconds).clamp(min=0)
        tone = torch.sin(2 * math.pi * (150 + 900 * hz) * since) * (1 + torch.sin(2 * math.pi * 3 * since))
        tone += 0.3 * torch.sin(2 * math.pi * 3 * (150 + 900 * hz) * since)
        wave += tone * (-6 * since).exp() * torch.tensor([[0.3 + side], [1.3 - side]][:channels]) * (1 + i % 3)
    return Sound((0.7 * wave / wave.abs().max()).float(), rate)


def lag(given: torch.Tensor, heard: torch.Tensor) -> int:
    """By how many samples the second waveform is late, by the peak of their cross-correlation."""
    n = given.shape[1] + heard.shape[1]
    spectra = torch.fft.rfft(heard.double().mean(0), n) * torch.fft.rfft(given.double().mean(0), n).conj()
    peak = int(torch.fft.irfft(spectra, n).argmax())
    return peak if peak < n // 2 else peak - n


def pictures(frames: int) -> torch.Tensor:
    return torch.arange(frames, dtype=torch.uint8).view(-1, 1, 1, 1).expand(frames, 16, 16, 3) * 5


def mux(path, tracks, *, form=None) -> None:
    """A file of PyAV alone. `tracks`: ("picture", first second, frames) at 10 fps, or (codec, rate, layout, blocks),
    each block a first sample and samples `[C, n]`."""
    with av.open(str(path), "w", format=form) as out:
        streams = []
        for track in tracks:
            if track[0] == "picture":
                stream = out.add_stream("libx264", rate=10, options={"bf": "0"})
                stream.height, stream.width, stream.pix_fmt = 16, 16, "yuv420p"
            else:
                stream = out.add_stream(track[0], rate=track[1], layout=track[2])
            streams.append(stream)
        for track, stream in zip(tracks, streams, strict=True):
            if track[0] == "picture":
                for i in range(track[2]):
                    frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 9 * i, np.uint8), format="rgb24")
                    frame.pts, frame.time_base = round(track[1] * 1000) + 100 * i, Fraction(1, 1000)
                    out.mux(stream.encode(frame))
            else:
                for first, samples in track[3]:
                    frame = av.AudioFrame.from_ndarray(
                        np.ascontiguousarray(samples.numpy()), format="fltp", layout=track[2]
                    )
                    frame.sample_rate, frame.pts, frame.time_base = track[1], first, Fraction(1, track[1])
                    out.mux(stream.encode(frame))
            out.mux(stream.encode(None))


# --- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [48000, 24000, 16000])
@pytest.mark.parametrize("channels", [1, 2])
def test_aac_gives_back_the_sound_not_late_and_not_longer(tmp_path, rate, channels):
    sound = melody(rate, channels=channels)
    write_sound(tmp_path / "a.m4a", sound)
    back = read_sound(tmp_path / "a.m4a", rate=rate)
    assert back.waveform.shape == (2, sound.waveform.shape[1]) and back.waveform.dtype == torch.float32
    # The encoder's delay of 1024 samples is left out by readers, not heard as silence.
    assert lag(sound.waveform, back.waveform) == 0
    error = back.waveform - sound.waveform
    # 96 kbit/s a channel: some 47 dB of this melody; a shift by one sample alone leaves 13 to 23.
    assert 10 * math.log10(sound.waveform.square().mean() / error.square().mean()) > 30
    assert log_mel_correlation(sound, back) > 0.97
    with av.open(str(tmp_path / "a.m4a")) as container:
        codec = container.streams.audio[0].codec_context
        assert (codec.name, codec.sample_rate, codec.layout.nb_channels) == ("aac", rate, channels)


@pytest.mark.parametrize("rate", [44100, 16000, 12345])
def test_wav_gives_back_the_samples(tmp_path, rate):
    sound = melody(rate)
    write_sound(tmp_path / "a.wav", sound)
    back = read_sound(tmp_path / "a.wav", rate=rate).waveform
    assert back.shape == sound.waveform.shape
    assert (back - sound.waveform).abs().max() <= 0.501 / 32768  # rounded to 16 bits


def test_rates_that_aac_lacks_become_48_khz(tmp_path):
    assert 18000 not in AAC_RATES
    for rate, stored in ((18000, 48000), (22050, 22050), (32000, 32000)):
        write_video(tmp_path / "a.mp4", pictures(10), 10, melody(rate, 1.0))
        with av.open(str(tmp_path / "a.mp4")) as container:
            assert container.streams.audio[0].codec_context.sample_rate == stored
        assert log_mel_correlation(melody(rate, 1.0), read_sound(tmp_path / "a.mp4", rate=rate)) > 0.97


def test_other_files_and_sounds_are_refused(tmp_path):
    sound = melody(16000, 0.1)
    with pytest.raises(UserError, match=r"a\.mp3: a sound cannot be written as '.mp3', only as .wav, .m4a, .mp4"):
        write_sound(tmp_path / "a.mp3", sound)
    write_sound(tmp_path / "a.wav", sound)
    before = (tmp_path / "a.wav").read_bytes()
    bad = Sound(sound.waveform * math.nan, 16000)
    with pytest.raises(UserError, match="NaN or infinite samples"):
        write_sound(tmp_path / "a.wav", bad)
    with pytest.raises(UserError, match="NaN or infinite samples"):
        write_video(tmp_path / "a.mp4", pictures(3), 10, bad)
    assert (tmp_path / "a.wav").read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.wav"]
    for waveform in (torch.zeros(3, 5), torch.zeros(5), torch.zeros(2, 0), torch.zeros(2, 5, dtype=torch.int16)):
        with pytest.raises(UserError, match=r"expected floating \[1 or 2 channels, N samples\]"):
            Sound(waveform, 16000)
    for rate in (0, 16000.0, True):
        with pytest.raises(UserError, match="rate is .*, expected a positive number"):
            Sound(torch.zeros(1, 5), rate)


# --- beside a picture -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate, channels", [(48000, 2), (24000, 2), (24000, 1), (16000, 2)])
@pytest.mark.parametrize("fps, frames", [(25, 33), (Fraction(24000, 1001), 17), (29.97, 9), (24, 1)])
@pytest.mark.parametrize("given", [0.02, 2.0])
def test_picture_and_sound_begin_together_and_last_equally(tmp_path, rate, channels, fps, frames, given):
    sound, path = melody(rate, given, channels), tmp_path / "a.mp4"
    write_video(path, pictures(frames), fps, sound)
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        assert video.start_time == audio.start_time == 0
        assert video.duration * video.time_base == frames / Fraction(fps).limit_denominator(10000)
        off = video.duration * video.time_base - audio.duration * audio.time_base
        assert abs(off) * rate <= Fraction(1, 2)  # the nearest whole number of samples
    back = read_sound(path, rate=rate)
    kept = min(sound.waveform.shape[1], back.waveform.shape[1])
    assert lag(sound.waveform[:, :kept], back.waveform[:, :kept]) == 0
    # What was shorter ends in silence; a codec smears what it hears over one block.
    assert back.waveform[:, kept + 2048 :].abs().sum() <= 1e-3 * back.waveform[:, kept + 2048 :].numel()
    assert torch.equal(read_video(path).frames[:, 0, 0, 0].diff() > 0, torch.ones(frames - 1, dtype=torch.bool))


def test_a_clap_is_heard_when_it_is_seen(tmp_path):
    """A flash in frame 13 and a click at its start, in the file's own timestamps."""
    fps, frame, rate = Fraction(30000, 1001), 13, 24000
    frames, wave = torch.zeros(30, 16, 16, 3, dtype=torch.uint8), torch.zeros(2, rate)
    at = round(frame / fps * rate)
    frames[frame], wave[:, at : at + 8] = 255, 0.9
    write_video(tmp_path / "a.mp4", frames, fps, Sound(wave, rate))
    with av.open(str(tmp_path / "a.mp4")) as container:
        (seen,) = [f.pts * f.time_base for f in container.decode(video=0) if f.to_ndarray(format="gray").mean() > 128]
    with av.open(str(tmp_path / "a.mp4")) as container:
        heard, loudest = None, 0.0
        for f in container.decode(audio=0):
            peak = np.abs(f.to_ndarray()[0])
            if peak.max() > loudest:
                heard, loudest = f.pts * f.time_base + Fraction(int(peak.argmax()), rate), peak.max()
    assert seen == frame / fps and abs(heard - seen) <= Fraction(10, rate)


def test_the_picture_is_that_of_a_file_without_sound_and_writing_is_reproducible(tmp_path):
    write_video(tmp_path / "a.mp4", pictures(9), 25)
    for name in ("b.mp4", "c.mp4"):
        write_video(tmp_path / name, pictures(9), 25, melody(24000))
    assert torch.equal(read_video(tmp_path / "a.mp4").frames, read_video(tmp_path / "b.mp4").frames)
    assert (tmp_path / "b.mp4").read_bytes() == (tmp_path / "c.mp4").read_bytes()
    assert [has_sound(tmp_path / name) for name in ("a.mp4", "b.mp4")] == [False, True]


# --- spans ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "long.wav"
    write_sound(path, melody(44100, 4.1))
    return path


@given(start=st.floats(0, 5), seconds=st.floats(0.01, 3), rate=st.sampled_from([16000, 44100, 48000]))
@settings(max_examples=20)
def test_a_span_is_that_part_of_the_whole_and_silence_after_it(long, start, seconds, rate):
    whole, part = read_sound(long, rate=rate).waveform, read_sound(long, rate=rate, start=start, seconds=seconds)
    first, count = round(start * rate), round(seconds * rate)
    wanted = torch.nn.functional.pad(whole, (0, first + count))[:, first : first + count]
    assert part.rate == rate and part.waveform.shape == (2, count)
    # Resampled from whole seconds on, a second earlier: the filter's steps are the same, its window is far shorter.
    assert (part.waveform - wanted).abs().max() < 1e-6


def test_reading_starts_with_the_first_picture(tmp_path):
    """Sound that begins before the picture loses its beginning, one that begins after it gets silence."""
    for picture, sound in ((0.4, 0.1), (0.1, 0.4), (0.2, 0.2)):
        wave, rate = melody(16000, 1.0).waveform, 16000
        tracks = [("picture", picture, 8), ("pcm_s16le", rate, "stereo", [(round(sound * rate), wave)])]
        mux(tmp_path / "a.mkv", tracks)
        heard = read_sound(tmp_path / "a.mkv", rate=rate, seconds=0.6).waveform
        offset = round((picture - sound) * rate)
        wanted = torch.nn.functional.pad(wave, (max(0, -offset), 0))[:, max(0, offset) :][:, : heard.shape[1]]
        shift = lag(wanted, heard)
        assert abs(shift) <= 16  # Matroska keeps milliseconds
        assert log_mel_correlation(Sound(wanted, rate), Sound(heard, rate)) > 0.98


def test_gaps_are_silent_and_what_follows_stays_in_time(tmp_path):
    wave, rate = melody(16000, 1.0).waveform, 16000
    blocks = [(0, wave[:, :4000]), (8000, wave[:, 8000:])]
    mux(tmp_path / "a.mkv", [("picture", 0, 10), ("pcm_s16le", rate, "stereo", blocks)])
    heard = read_sound(tmp_path / "a.mkv", rate=rate, seconds=1.0).waveform
    wanted = wave.clone()
    wanted[:, 4000:8000] = 0
    assert (heard - wanted).abs().max() < 1e-4


def test_mono_is_doubled_and_more_channels_are_mixed_down(tmp_path):
    mono = melody(16000, 0.5, channels=1)
    write_sound(tmp_path / "mono.wav", mono)
    heard = read_sound(tmp_path / "mono.wav", rate=16000).waveform
    assert torch.equal(heard[0], heard[1]) and (heard[0] - mono.waveform[0]).abs().max() < 1e-4
    # FL, FR, FC, LFE, BL, BR of 5.1; ITU-R BS.775: the centre and what is behind at -3 dB, without the deep channel.
    levels = torch.tensor([0.1, 0.2, 0.05, 0.4, 0.06, 0.02])
    mux(tmp_path / "six.mkv", [("pcm_f32le", 16000, "5.1", [(0, levels[:, None].repeat(1, 4000))])], form="matroska")
    half = math.sqrt(0.5)
    wanted = torch.tensor([0.1 + half * (0.05 + 0.06), 0.2 + half * (0.05 + 0.02)])
    heard = read_sound(tmp_path / "six.mkv", rate=16000).waveform
    assert (heard[:, 1000:3000] - wanted[:, None]).abs().max() < 1e-4


def test_bad_files_and_spans_are_named(tmp_path):
    good = tmp_path / "good.wav"
    write_sound(good, melody(16000, 0.5))
    write_video(tmp_path / "silent.mp4", pictures(3), 10)
    (tmp_path / "text.wav").write_bytes(b"not a sound at all" * 50)
    (tmp_path / "empty.mp4").write_bytes(b"")
    with pytest.raises(UserError, match=r"silent\.mp4: no audio stream"):
        read_sound(tmp_path / "silent.mp4", rate=16000)
    for name, message in (("none.wav", "no such file"), ("text.wav", "cannot be decoded as sound"),
                          ("empty.mp4", "cannot be decoded as sound"), (".", "is a folder, expected")):  # fmt: skip
        for read in (has_sound, lambda path: read_sound(path, rate=16000)):
            with pytest.raises(UserError, match=message):
                read(tmp_path / name)
    with pytest.raises(UserError, match=r"good\.wav: no sound is left at 0.6 s, it lasts 0.500 s"):
        read_sound(good, rate=16000, start=0.6)
    with pytest.raises(UserError, match=r"good\.wav: no sound is left at 60 s"):
        read_sound(good, rate=16000, start=60)
    for bad in ({"start": -1}, {"start": math.nan}, {"seconds": 0}, {"seconds": math.inf}, {"rate": 0}):
        with pytest.raises(UserError, match=r"good\.wav: .*expected"):
            read_sound(good, **{"rate": 16000, **bad})


@pytest.mark.parametrize("name", ["a.wav", "a.m4a", "a.mp4"])
@pytest.mark.parametrize("share", [0.4, 0.9])
def test_files_that_are_cut_short_are_not_taken_for_silence(tmp_path, name, share):
    if name == "a.mp4":
        write_video(tmp_path / name, pictures(10), 10, melody(16000, 1.0))
    else:
        write_sound(tmp_path / name, melody(16000, 1.0))
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match=f"{name}: cannot be decoded as sound"):
        read_sound(tmp_path / name, rate=16000, seconds=1.0)


def test_sound_that_changes_on_the_way_is_refused(tmp_path):
    """AAC streams of other rates behind one another, as broadcasts have them."""
    for name, rate in (("a.aac", 16000), ("b.aac", 24000)):
        mux(tmp_path / name, [("aac", rate, "stereo", [(0, melody(rate, 0.5).waveform)])])
    (tmp_path / "c.aac").write_bytes((tmp_path / "a.aac").read_bytes() + (tmp_path / "b.aac").read_bytes())
    assert read_sound(tmp_path / "a.aac", rate=16000).seconds == pytest.approx(0.5, abs=0.2)
    with pytest.raises(UserError, match=r"c\.aac: its sound changes from \(16000, 'stereo', .*24000.* after 0\.\d+ s"):
        read_sound(tmp_path / "c.aac", rate=16000)


@pytest.mark.parametrize("rate", [16000, 24000, 44100, 48000])
@pytest.mark.parametrize("target", [16000, 24000, 48000])
def test_resampling_keeps_tones_and_their_phases(rate, target):
    def tone(r: int) -> Sound:
        time = torch.arange(r, dtype=torch.float64) / r
        return Sound(0.5 * torch.stack([torch.sin(2 * math.pi * f * time + f) for f in (440, 1230)]).float(), r)

    got, wanted = resample_sound(tone(rate), target), tone(target)
    assert got.rate == target and got.waveform.shape == wanted.waveform.shape
    # The filter sees silence beyond the ends; inside it ripples by some 1e-4 of a tone.
    assert (got.waveform - wanted.waveform)[:, 200:-200].abs().max() < 2e-4


# --- comparing ------------------------------------------------------------------------------------------------


def test_log_mel_correlation_is_pearsons_of_the_bins():
    a, b = melody(16000, seed=1), melody(16000, seed=2)
    bins = [log_mel(MelConfig(), x.waveform[None].double()).flatten().numpy() for x in (a, b)]
    assert log_mel_correlation(a, b) == pytest.approx(np.corrcoef(*bins)[0, 1], abs=1e-9)
    assert log_mel_correlation(a, b) == pytest.approx(log_mel_correlation(b, a))
    assert log_mel_correlation(a, a) == pytest.approx(1)
    assert log_mel_correlation(a, Sound(a.waveform / 2, 16000)) > 0.99  # loudness is only an offset
    late = Sound(torch.nn.functional.pad(a.waveform, (8000, 0)), 16000)
    assert max(log_mel_correlation(a, b), log_mel_correlation(a, late)) < 0.75
    assert log_mel_correlation(a, Sound(torch.zeros(2, 9000), 16000)) == 0


def test_log_mel_correlation_of_other_rates_lengths_and_channels():
    a = melody(48000)
    assert log_mel_correlation(a, resample_sound(a, 16000)) > 0.999
    assert log_mel_correlation(a, Sound(a.waveform[:, :30000], 48000)) == pytest.approx(1)
    same = Sound(a.waveform[:1].repeat(2, 1), 48000)
    assert log_mel_correlation(same, Sound(a.waveform[:1], 48000)) == pytest.approx(1)
    with pytest.raises(UserError, match="waveform has 100 samples, expected at least 513"):
        log_mel_correlation(melody(16000), Sound(torch.zeros(1, 100), 16000))


def test_spectrograms_show_tones_where_they_are(tmp_path):
    """Two rows, one with a tone early and low, one with a tone late and high, at other rates and lengths."""
    from PIL import Image

    def tone(rate: int, hz: float, begin: float, end: float, seconds: float) -> Sound:
        time = torch.arange(round(seconds * rate)) / rate
        return Sound((0.5 * torch.sin(2 * math.pi * hz * time) * ((time > begin) & (time < end)))[None], rate)

    path = tmp_path / "a.png"
    rows = [("the clip, $5", tone(16000, 400, 0.1, 0.5, 1.0)), ("sample", tone(24000, 6000, 1.2, 1.6, 2.0))]
    spectrogram(rows, path, title="Sound")
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 900
        light = np.asarray(image.convert("RGB")).astype(int)
    height, width = light.shape[:2]
    # Pale orange and yellow, the top of the colour map; the scale of levels at the right is left out.
    bright = (light[..., 0] > 230) & (light[..., 1] > 120) & (light[..., 2] < 220)
    bright[:, width * 17 // 20 :] = False
    places = [np.argwhere(half) / (height // 2, width) for half in (bright[: height // 2], bright[height // 2 :])]
    (low, early), (high, late) = (np.median(p, axis=0) for p in places)
    assert low - high > 0.25 and early < 0.3 and late > 0.5
    with pytest.raises(UserError, match="no rows"):
        spectrogram([], path)
