"""Videos survive the way through a file; resampling equals its definition; bad files are named."""

import math
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import UserError
from core.geometry import (
    check_geometry,
    geometry_rule,
    longest_valid,
    nearest_valid,
    to_frames,
    to_video,
    valid_num_frames,
)
from infer.media import (
    contact_sheet,
    probe,
    psnr,
    read_video,
    recompressed,
    resample,
    resize_cover,
    write_video,
)


def gradient(frames: int, height: int = 32, width: int = 48) -> torch.Tensor:
    """A smooth coloured gradient that moves, uint8 [T, H, W, 3]."""
    t = torch.arange(frames).view(-1, 1, 1).float()
    y, x = torch.linspace(0, 1, height).view(1, -1, 1), torch.linspace(0, 1, width).view(1, 1, -1)
    channels = [x + 0 * y + 0.02 * t, y + 0 * x - 0.01 * t, 0.5 + 0.4 * torch.sin(3 * x + 2 * y + 0.1 * t)]
    return (torch.stack(torch.broadcast_tensors(*channels), -1).clamp(0, 1) * 255).round().to(torch.uint8)


def write_numbered(path, stamps, *, time_base=Fraction(1, 1000)) -> None:
    """An MP4 written with PyAV alone: frame i is plain grey of level 10 + 6 i, shown at stamps[i] * time_base."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=25, options={"qp": "0"})
        stream.height, stream.width, stream.pix_fmt = 16, 16, "yuv420p"
        stream.time_base = stream.codec_context.time_base = time_base
        for i, stamp in enumerate(stamps):
            grey = torch.full((16, 16, 3), 10 + 6 * i, dtype=torch.uint8).numpy()
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            frame.pts, frame.time_base = stamp, time_base
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


def numbers(video) -> list[int]:
    """Which frame of `write_numbered` each frame is."""
    return ((video.frames.float().mean((1, 2, 3)) - 10) / 6).round().int().tolist()


@pytest.mark.parametrize("fps", [25, 12.5, 29.97, 30000 / 1001, Fraction(24000, 1001), 60])
def test_round_trip_keeps_count_rate_and_pictures(tmp_path, fps):
    for frames in (gradient(1), gradient(10)):
        write_video(tmp_path / "a.mp4", frames, fps)
        back = read_video(tmp_path / "a.mp4")
        assert back.frames.shape == frames.shape and back.frames.dtype == torch.uint8
        assert back.fps == float(fps)
        # crf 18 loses about 3 levels of 255 on this steep little gradient (38 dB); reading it with another
        # colour matrix or range loses 10 and more.
        assert psnr(back.frames, frames) > 34


def test_colours_have_no_bias_and_are_tagged(tmp_path):
    frames = torch.empty(3, 32, 32, 3, dtype=torch.uint8)
    for colour in ((30, 40, 200), (200, 30, 60), (90, 200, 90), (0, 0, 0), (255, 255, 255)):
        frames[:] = torch.tensor(colour, dtype=torch.uint8)
        write_video(tmp_path / "a.mp4", frames, 25, crf=1)
        back = read_video(tmp_path / "a.mp4").frames.float().mean((0, 1, 2))
        # 8-bit YUV of limited range resolves one level of RGB in luma and two in blue.
        assert (back - torch.tensor(colour)).abs().max() <= 2.1
    with av.open(str(tmp_path / "a.mp4")) as container:
        codec = container.streams.video[0].codec_context
        assert (codec.name, codec.pix_fmt) == ("h264", "yuv420p")
        assert (codec.colorspace, codec.color_range, codec.color_primaries, codec.color_trc) == (1, 1, 1, 1)


def test_float_frames_equal_uint8_frames(tmp_path):
    frames = gradient(5)
    write_video(tmp_path / "a.mp4", frames, 25)
    write_video(tmp_path / "b.mp4", frames.float() / 255, 25)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    with pytest.raises(UserError, match="dtype torch.int64"):
        write_video(tmp_path / "c.mp4", frames.long(), 25)
    with pytest.raises(UserError, match="NaN"):
        write_video(tmp_path / "c.mp4", frames.float() * math.nan, 25)
    with pytest.raises(UserError, match=r"\[5, 32, 48\], expected \[T, H, W, 3\]"):
        write_video(tmp_path / "c.mp4", frames[..., 0], 25)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.mp4", "b.mp4"]


def test_odd_sizes_and_bad_rates_are_refused(tmp_path):
    with pytest.raises(UserError, match="33 by 47: nearest 32/34 by 46/48"):
        write_video(tmp_path / "a.mp4", gradient(2, 33, 47), 25)
    for fps in (0, -1, math.nan, math.inf, True):
        with pytest.raises(UserError, match="fps is"):
            write_video(tmp_path / "a.mp4", gradient(2), fps)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    write_video(tmp_path / "a.mp4", gradient(2), 25)
    before = (tmp_path / "a.mp4").read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(av.VideoFrame, "from_ndarray", fail)
    with pytest.raises(OSError, match="disk full"):
        write_video(tmp_path / "a.mp4", gradient(3), 25)
    assert (tmp_path / "a.mp4").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


def test_start_and_num_frames_pick_exactly_those_frames(tmp_path):
    write_numbered(tmp_path / "a.mp4", range(0, 1200, 40))
    assert numbers(read_video(tmp_path / "a.mp4")) == list(range(30))
    assert numbers(read_video(tmp_path / "a.mp4", start=7, num_frames=9)) == list(range(7, 16))
    assert numbers(read_video(tmp_path / "a.mp4", start=29)) == [29]


def test_resampling_an_uneven_clip_takes_the_nearest_timestamps(tmp_path):
    stamps = [0, 40, 50, 130, 200, 210, 330, 400]
    write_numbered(tmp_path / "a.mp4", stamps)
    video = read_video(tmp_path / "a.mp4", fps=20)
    assert video.fps == 20
    times = [50 * k for k in range(len(video.frames))]
    assert numbers(video) == [min(range(8), key=lambda i: (abs(stamps[i] - t), -i)) for t in times]
    assert len(times) == math.ceil((400 + 400 / 7) / 50)  # the last frame lasts a mean interval
    assert numbers(read_video(tmp_path / "a.mp4", fps=20, start=3, num_frames=4)) == numbers(video)[3:7]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 120))
def test_resample_equals_its_definition(gaps, fps):
    times = [Fraction(sum(gaps[:i]), 100) for i in range(len(gaps))]
    got = list(resample([(t, i) for i, t in enumerate(times)], Fraction(fps)))
    interval = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else Fraction(1, fps)
    wanted = []
    while (t := times[0] + Fraction(len(wanted), fps)) < times[-1] + interval:
        wanted.append(min(range(len(times)), key=lambda i: (abs(times[i] - t), -i)))
    assert got == wanted


def test_resampling_to_the_own_rate_changes_nothing(tmp_path):
    write_video(tmp_path / "a.mp4", gradient(9), Fraction(30000, 1001))
    plain, same = read_video(tmp_path / "a.mp4"), read_video(tmp_path / "a.mp4", fps=30000 / 1001)
    assert torch.equal(plain.frames, same.frames) and plain.fps == same.fps


def test_resize_covers_and_crops_the_centre():
    picture = torch.zeros(1, 40, 80, 3, dtype=torch.uint8)
    picture[:, :, 20:60] = 200  # the square in the middle
    assert (resize_cover(picture, (20, 20)).float() - 200).abs().max() < 40  # bicubic overshoot at the cut edge only
    assert resize_cover(picture, (20, 20))[0, 5:15, 5:15].eq(200).all()
    assert resize_cover(picture, (40, 80)) is picture
    for size in ((16, 64), (64, 16), (13, 13), (80, 160)):
        assert resize_cover(picture, size).shape == (1, *size, 3)
    # Antialiasing: a fine checkerboard becomes its mean instead of an alias.
    board = ((torch.arange(64)[:, None] + torch.arange(64)) % 2 * 254).to(torch.uint8)
    small = resize_cover(board[None, :, :, None].expand(1, 64, 64, 3), (8, 8))
    assert (small[0, 2:-2, 2:-2].float() - 127).abs().max() <= 2


def test_the_rotation_stored_in_the_file_is_applied(tmp_path):
    frames = gradient(3, 32, 48)
    write_video(tmp_path / "a.mp4", frames, 25)
    data = bytearray((tmp_path / "a.mp4").read_bytes())
    matrix = data.index(b"tkhd") + 44  # ISO/IEC 14496-12, 8.3.2; this one turns the picture 90 degrees clockwise
    data[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    (tmp_path / "a.mp4").write_bytes(data)
    upright = read_video(tmp_path / "a.mp4").frames
    assert psnr(upright, torch.rot90(frames, -1, dims=(1, 2))) > 34


# Of a picture [H, W]: `(a, b, c, d)` of its display matrix, by which column x and row y go to (ax + cy, bx + dy).
TURNS = [(a, 0, 0, d) for a in (1, -1) for d in (1, -1)] + [(0, b, c, 0) for b in (1, -1) for c in (1, -1)]


def store_matrix(path, matrix) -> None:
    """Stores a display matrix in an MP4: ISO/IEC 14496-12, 8.3.2."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 44
    a, b, c, d = (round(v * 65536) for v in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)


@pytest.mark.parametrize("matrix", TURNS)
def test_a_display_matrix_is_applied_mirrored_or_not(tmp_path, matrix):
    """Pixel by pixel as the matrix says; written without loss, so that the same decoding gives the same numbers."""
    a, b, c, d = matrix
    path = tmp_path / "a.mp4"
    write_video(path, gradient(3, 32, 48), 25, crf=0)
    plain = read_video(path).frames
    y, x = torch.meshgrid(torch.arange(32), torch.arange(48), indexing="ij")
    column, row = a * x + c * y, b * x + d * y
    column, row = column - column.min(), row - row.min()
    expected = torch.zeros(3, int(row.max()) + 1, int(column.max()) + 1, 3, dtype=torch.uint8)
    expected[:, row, column] = plain
    store_matrix(path, matrix)
    assert torch.equal(read_video(path).frames, expected)
    info = probe(path)
    assert (info.height, info.width) == expected.shape[1:3]


def test_a_turn_by_no_right_angle_is_refused(tmp_path):
    write_video(tmp_path / "a.mp4", gradient(2), 25)
    half = math.sqrt(0.5)
    store_matrix(tmp_path / "a.mp4", (half, half, -half, half))
    for read in (probe, read_video):
        with pytest.raises(UserError, match=r"a\.mp4: it is to be turned by no right angle \(display matrix 0.707, "):
            read(tmp_path / "a.mp4")


@pytest.mark.parametrize("ending, mode", [("jpg", "RGB"), ("jpg", "L"), ("png", "RGB"), ("png", "P"), ("webp", "RGB")])
def test_pictures_are_as_their_exif_orientation_says(tmp_path, ending, mode):
    """All eight, compared with Pillow; of JPEG only what the other way of making colours from chroma leaves open."""
    from PIL import Image, ImageOps

    path = tmp_path / f"a.{ending}"
    picture = Image.fromarray(gradient(1, 24, 40)[0].numpy()).convert(mode)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        picture.save(path, exif=exif, **({"lossless": True} if ending == "webp" else {"quality": 95}))
        with Image.open(path) as stored:
            expected = torch.from_numpy(np.array(ImageOps.exif_transpose(stored).convert("RGB")))
        (frame,) = read_video(path).frames
        assert frame.shape == expected.shape == (probe(path).height, probe(path).width, 3)
        error = (frame.float() - expected.float()).abs()
        assert error.mean() < 1.5 if ending == "jpg" else error.max() == 0, orientation


def test_a_folder_is_no_clip(tmp_path):
    for read in (probe, read_video):
        with pytest.raises(UserError, match="is a folder, expected a video or a picture"):
            read(tmp_path)


@pytest.mark.parametrize("aspect, square", [(Fraction(2), False), (Fraction(400, 401), True), (Fraction(1, 2), False)])
def test_pixels_that_are_not_square_are_refused(tmp_path, aspect, square):
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        stream.codec_context.sample_aspect_ratio = aspect
        out.mux(stream.encode(av.VideoFrame.from_ndarray(gradient(1, 32, 32)[0].numpy(), format="rgb24")))
        out.mux(stream.encode(None))
    for read in (probe, read_video):
        if square:
            assert read(path)
        else:
            with pytest.raises(UserError, match=f"a.mp4: its pixels are not square .{aspect} as wide as high"):
                read(path)


def test_bad_files_are_named(tmp_path):
    good = tmp_path / "good.mp4"
    write_video(good, gradient(30), 25)
    data = good.read_bytes()
    with pytest.raises(UserError, match=r"nothing\.mp4: no such file"):
        read_video(tmp_path / "nothing.mp4")
    damaged = bytearray(data)
    for i in range(len(data) * 2 // 3, len(data), 5):
        damaged[i] ^= 0x5A
    for name, content in (
        ("empty.mp4", b""),
        ("text.mp4", b"not a video at all" * 50),
        ("header.mp4", data[:100]),
        ("cut.mp4", data[: len(data) * 4 // 5]),
        ("damaged.mp4", bytes(damaged)),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}: cannot be decoded as video"):
            read_video(tmp_path / name)


def test_a_file_without_video_is_named(tmp_path):
    with av.open(str(tmp_path / "sound.mp4"), "w") as out:
        stream = out.add_stream("aac", rate=8000)
        frame = av.AudioFrame(format="fltp", layout="mono", samples=1024)
        frame.planes[0].update(bytes(4096))
        frame.sample_rate = 8000
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    with pytest.raises(UserError, match=r"sound\.mp4: no video stream"):
        read_video(tmp_path / "sound.mp4")


def test_a_clip_shorter_than_asked_says_what_is_there(tmp_path):
    path = tmp_path / "a.mp4"
    write_video(path, gradient(20), 20)
    with pytest.raises(UserError, match=r"a\.mp4: asked for 33 .* has 20 frames: .*\(4k\+1\) from there is 17"):
        read_video(path, num_frames=33)
    with pytest.raises(UserError, match="asked for 9 frames from frame 14, .* from there is 5"):
        read_video(path, num_frames=9, start=14)
    with pytest.raises(UserError, match="20 frames, 10 after resampling to 10 fps: .* is 9"):
        read_video(path, num_frames=13, fps=10)
    with pytest.raises(UserError, match="no frame is left there"):
        read_video(path, start=20)
    for bad in ({"num_frames": 0}, {"start": -1}, {"size": (0, 8)}, {"fps": 0}):
        with pytest.raises(UserError, match="expected"):
            read_video(path, **bad)


@pytest.mark.parametrize("height, width", [(64, 96), (33, 47), (3, 2)])
@pytest.mark.parametrize("crf", [0, 1, 18, 33, 51])
def test_a_recompressed_picture_is_that_of_diffusers_bit_by_bit(height, width, crf):
    from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf

    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    for picture in (gradient(1, height, width)[0], noise):
        found = recompressed(picture, crf)
        assert torch.equal(found, torch.from_numpy(apply_image_conditioning_crf(picture.numpy(), crf)))


def test_a_recompressed_picture_loses_more_the_larger_the_crf():
    picture = gradient(1, 64, 96)[0]
    lost = [-psnr(recompressed(picture, crf), picture) for crf in (1, 18, 33, 51)]
    assert lost == sorted(lost) and lost[-1] - lost[0] > 10


def test_pictures_that_cannot_be_recompressed_are_told():
    picture = gradient(1)[0]
    for crf in (-1, 52):
        with pytest.raises(UserError, match=f"crf is {crf}, allowed 0 .as it is. to 51"):
            recompressed(picture, crf)
    for wrong in (picture.float(), picture[None], picture[..., :1]):
        with pytest.raises(UserError, match=r"expected torch.uint8 \[H, W, 3\]"):
            recompressed(wrong, 33)
    with pytest.raises(UserError, match="1 by 48 pixels is too small"):
        recompressed(picture[:1], 33)


def test_psnr():
    a = torch.full((2, 4, 4, 3), 100, dtype=torch.uint8)
    assert psnr(a, a) == math.inf
    assert psnr(a, a + 10) == pytest.approx(20 * math.log10(255 / 10))
    assert psnr(a, (a + 10).double() / 255) == pytest.approx(psnr(a, a + 10))
    with pytest.raises(UserError, match=r"\[2, 4, 4, 3\] and \[1, 4, 4, 3\]"):
        psnr(a, a[:1])


def test_contact_sheet_shows_first_and_last_frame_of_every_clip(tmp_path):
    from PIL import Image

    red, blue = torch.zeros(9, 16, 32, 3), torch.zeros(3, 16, 16, 3)
    red[0, ..., 0] = red[8, ..., 1] = blue[..., 2] = 1
    path = tmp_path / "sheet.png"
    contact_sheet([("a clip that costs $5 and $6", red), ("sample", blue)], path, columns=4, title="title")
    with Image.open(path) as image:
        colours = image.convert("RGB").getcolors(1 << 24)
        assert image.format == "PNG" and image.width > 900
    counts = {colour: count for count, colour in colours}
    pixels = 240 * 120  # of one picture: 2 inches wide at 120 dpi, the upper clip twice as wide as high
    assert 0.8 * pixels < counts[255, 0, 0] < pixels and 0.8 * pixels < counts[0, 255, 0] < pixels
    assert 0.8 * 3 * 240 * 240 < counts[0, 0, 255] < 3 * 240 * 240  # the lower has three frames, each shown once
    for rows, columns in (([], 3), ([("a", red)], 0)):
        with pytest.raises(UserError, match="at least one"):
            contact_sheet(rows, path, columns=columns)


@given(st.integers(-20, 500), st.integers(1, 40), st.integers(0, 1))
def test_nearest_valid_values_are_valid_and_nearest(n, step, offset):
    near = nearest_valid(n, step, offset)
    valid = [v for v in range(1, 600) if (v - offset) % step == 0]
    assert near == sorted(set(near)) and set(near) <= set(valid)
    assert min(abs(v - n) for v in valid) == min(abs(v - n) for v in near)
    assert longest_valid(n, step) == max((v for v in range(1, n + 1) if v % step == 1 % step), default=0)


def test_geometry_lists_every_fault_with_the_nearest_values():
    check_geometry(33, 96, 160, spatial=16)
    with pytest.raises(UserError) as error:
        check_geometry(32, 100, 0, spatial=16)
    text = str(error.value)
    assert geometry_rule(4, 16) in text
    for part in ("num_frames is 32", "29 or 33", "height is 100", "96 or 112", "width is 0", "nearest valid 16"):
        assert part in text
    with pytest.raises(UserError, match="height is True, expected an integer"):
        check_geometry(1, True, 8)
    assert valid_num_frames(17) == 17
    with pytest.raises(UserError, match="num_frames is 18, .* 17 or 21"):
        valid_num_frames(18)
    with pytest.raises(UserError, match="num_frames is 18, .* 17 or 25"):
        valid_num_frames(18, multiple=8)


def test_video_tensors_round_trip_every_level():
    frames = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    video = to_video(frames)
    assert video.shape == (3, 1, 16, 16) and video.min() == -1 and video.max() == 1
    assert torch.equal(to_frames(video), frames)
    assert to_frames(video * 1e9).unique().tolist() == [0, 255]
