"""Buckets: counts without decoding equal those of decoding, the rule of choice equals its definition, faults have
their numbers."""

import math
import struct
from fractions import Fraction

import av
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import UserError
from infer.media import ClipInfo, probe, read_video, resize_cover, write_video
from train.preprocess.buckets import Bucket, Clip, Unusable, buckets_of, choose, cover, survey
from train.preprocess.finish import write_png
from train.preprocess.metadata import Entry
from train.preprocess.settings import Encoding

TURNS = {0: (1, 0, 0, 1), 90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}


def write_clip(path, stamps, b_frames: int, codec: str = "libx264") -> None:
    """A clip of 48x32 whose frame i is shown at `stamps[i]` milliseconds, with frames stored out of order."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=25, options={"bf": str(b_frames)})
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for i, stamp in enumerate(stamps):
            level = torch.full((32, 48, 3), (37 * i) % 256, dtype=torch.uint8).numpy()
            frame = av.VideoFrame.from_ndarray(level, format="rgb24")
            frame.pts, frame.time_base = stamp, Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


def turn(path, degrees: int) -> None:
    """Stores a rotation in an MP4: the matrix of ISO/IEC 14496-12, 8.3.2."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 44
    a, b, c, d = (v << 16 if v >= 0 else -(-v << 16) for v in TURNS[degrees])
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)


def outcome(read, *args, **options):
    """What a call gives, or the message of its error."""
    try:
        return read(*args, **options)
    except UserError as error:
        return str(error)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=14),
    st.sampled_from([None, 5, 12.5, 24, 29.97, 60]),
    st.integers(0, 3),
    st.sampled_from(["a.mp4", "a.mkv", "a.ts", "a.webm"]),
    st.sampled_from(list(TURNS)),
)
def test_probing_agrees_with_decoding(tmp_path_factory, gaps, fps, b_frames, name, degrees):
    path = tmp_path_factory.mktemp("probe") / name
    stamps = [sum(gaps[:i]) for i in range(len(gaps))]
    write_clip(path, stamps, b_frames, "libvpx-vp9" if name.endswith("webm") else "libx264")
    if name.endswith("mp4"):
        turn(path, degrees)
    info, video = outcome(probe, path, fps), outcome(read_video, path, fps=fps)
    if isinstance(video, str):  # some transport streams have no rate
        assert info == video
        return
    with av.open(str(path)) as container:
        assert info.in_file == sum(1 for _ in container.decode(video=0))
    assert (info.frames, info.fps, info.height, info.width) == (len(video.frames), video.fps, *video.frames.shape[1:3])


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
@pytest.mark.parametrize("fps", [None, 8.0])
def test_a_picture_is_a_clip_of_one_frame(tmp_path, name, fps):
    picture = (torch.arange(40 * 24 * 3) % 251).reshape(40, 24, 3).to(torch.uint8)
    path = tmp_path / name
    if name.endswith("png"):
        write_png(path, picture)
        assert torch.equal(read_video(path).frames[0], picture)
    else:
        from PIL import Image

        Image.fromarray(picture.numpy()).save(path)
    assert probe(path, fps) == ClipInfo(1, 1, 25.0 if fps is None else fps, 40, 24)
    assert read_video(path, fps=fps).frames.shape == (1, 40, 24, 3)


def test_damage_that_the_packets_show_is_refused_as_decoding_refuses_it(tmp_path):
    write_video(tmp_path / "good.mp4", torch.randint(0, 255, (9, 32, 48, 3), dtype=torch.uint8), 25)
    data = (tmp_path / "good.mp4").read_bytes()
    for name, content in (("empty.mp4", b""), ("text.mp4", b"no video" * 90), ("cut.mp4", data[:-40])):
        (tmp_path / name).write_bytes(content)
        for read in (probe, read_video):
            with pytest.raises(UserError, match=f"{name}: cannot be decoded as video"):
                read(tmp_path / name)
    with pytest.raises(UserError, match=r"gone\.mp4: no such file"):
        probe(tmp_path / "gone.mp4")


# --- the rule -------------------------------------------------------------------------------------------------

SIZE = st.sampled_from([16, 24, 32, 48, 64, 96])
BUCKETS = st.lists(st.builds(Bucket, SIZE, SIZE, st.sampled_from([1, 5, 9])), min_size=1, max_size=6, unique=True)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(BUCKETS, st.integers(1, 12), st.integers(8, 120), st.integers(8, 120))
def test_the_choice_equals_its_definition(buckets, frames, height, width):
    info, free = ClipInfo(frames, frames, 25.0, height, width), Encoding(max_crop=0.99, max_upscale=99)
    fitting = [b for b in buckets if b.frames <= frames]
    if not fitting:
        with pytest.raises(UserError, match=f"too short: it has {frames} frames?; the"):
            choose(info, buckets, free)
        return
    chosen = choose(info, buckets, free)
    far = lambda b: abs(math.log(width / height) - math.log(b.width / b.height))  # noqa: E731
    assert chosen in fitting and chosen.frames == max(b.frames for b in fitting)
    rivals = [b for b in fitting if b.frames == chosen.frames]
    assert far(chosen) == min(map(far, rivals))
    assert chosen.width * chosen.height == max(b.width * b.height for b in rivals if far(b) == far(chosen))
    assert choose(info, buckets[::-1], free).frames == chosen.frames


@settings(max_examples=50, deadline=None, derandomize=True)
@given(SIZE, SIZE, st.integers(8, 120), st.integers(8, 120))
def test_crop_and_scale_are_those_of_the_resize(width, height, h, w):
    """On a ramp from left to right, the span of what is left is the share of the width that was kept."""
    scale, crop = cover(ClipInfo(1, 1, 25.0, h, w), Bucket(width, height))
    assert scale * h >= height - 1e-9 and scale * w >= width - 1e-9 and 0 <= crop + 1e-9 < 1
    assert min(scale * h - height, scale * w - width) == pytest.approx(0, abs=1e-9)
    kept_h, kept_w = height / scale, width / scale
    assert 1 - crop == pytest.approx(kept_h * kept_w / (h * w))
    ramp = torch.linspace(0, 255, w).expand(h, w)[None, ..., None].expand(1, h, w, 3).round().to(torch.uint8)
    row = resize_cover(ramp, (height, width))[0, 0, :, 0].float()
    # Bicubic edges and whole pixels move each end by at most one and a half pixels of the source or of the result.
    assert float(row.max() - row.min()) == pytest.approx(255 * kept_w / w, abs=255 * (1.5 / w + 1.5 / width) + 2)


def test_misshapen_clips_have_their_numbers():
    wide = ClipInfo(9, 9, 25.0, 32, 96)
    with pytest.raises(UserError, match=r"misshapen: 96x32 for bucket 32x32x9: 67% of its area .* at most 50% may be"):
        choose(wide, [Bucket(32, 32, 9)], Encoding())
    assert choose(wide, [Bucket(32, 32, 9)], Encoding(max_crop=0.7)) == Bucket(32, 32, 9)
    with pytest.raises(UserError, match="it would be enlarged 3.00 times, at most 2 are allowed"):
        choose(wide, [Bucket(288, 96, 9)], Encoding())
    with pytest.raises(UserError, match="too short: it has 20 frames, 4 after resampling to 5 fps; .* takes 5"):
        choose(ClipInfo(4, 20, 5.0, 32, 32), [Bucket(32, 32, 9), Bucket(32, 32, 5)], Encoding())


def test_faults_of_buckets_come_in_one_message():
    assert buckets_of(Encoding(buckets=("832x480x81", "480x832")), 4, 8) == (Bucket(832, 480, 81), Bucket(480, 832))
    assert buckets_of(Encoding(num_frames=9, height=32, width=48), 4, 8) == (Bucket(48, 32, 9),)
    assert [str(b) for b in (Bucket(48, 32, 9), Bucket(48, 32))] == ["48x32x9", "48x32"]
    with pytest.raises(UserError) as error:
        buckets_of(Encoding(buckets=("48x32x8", "40x32x9", "48", "64x32", "64x32"), width=3, fps=-1.0), 4, 16)
    text = str(error.value)
    for part in ("bucket 48x32x8: num_frames is 8, expected 4k+1: nearest valid 5 or 9", "width: give either",
                 "bucket 40x32x9: width is 40, expected a multiple of 16: nearest valid 32 or 48",
                 "bucket '48': expected WxHxFRAMES", "bucket 64x32: given 2 times", "fps is -1.0"):  # fmt: skip
        assert part in text
    for given_, message in (
        ({}, "num_frames, height, width missing"),
        ({"height": 8, "num_frames": 1}, "width missing"),
        ({"buckets": ()}, "buckets is empty"),
    ):
        with pytest.raises(UserError, match=message):
            buckets_of(Encoding(**given_), 4, 8)


def test_a_survey_places_every_row_in_order(tmp_path):
    frames = torch.full((9, 32, 48, 3), 90, dtype=torch.uint8)
    write_video(tmp_path / "long.mp4", frames, 10)
    write_video(tmp_path / "short.mp4", frames[:6], 10)
    write_png(tmp_path / "p.png", frames[0])
    names = ["long.mp4", "p.png", "gone.mp4", "short.mp4", "long.mp4"]
    entries = [Entry(name, tmp_path / name, "") for name in names]
    buckets = (Bucket(48, 32, 9), Bucket(48, 32, 5), Bucket(48, 32))
    placed = survey([4, 0, 1, 2, 3], entries, buckets, Encoding())
    assert list(placed) == [4, 0, 1, 2, 3]
    expected = {4: buckets[0], 0: buckets[0], 1: buckets[2], 3: buckets[1]}
    assert {row: c.bucket for row, c in placed.items() if isinstance(c, Clip)} == expected
    assert placed[2] == Unusable(2, "gone.mp4", "no such file")
    assert survey([3], entries, buckets, Encoding(fps=5.0))[3].bucket == buckets[2]  # 3 frames are left
