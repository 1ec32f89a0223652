"""Which way up a decoded frame is shown, from its display matrix.

FFmpeg makes that matrix of a container's (MP4, Matroska), of a stream's (H.264, HEVC) and of a picture's EXIF
orientation, of which 2, 4, 5 and 7 are mirrored. In it, `[x', y'] = [a x + c y, b x + d y]`.
"""

import dataclasses
import struct
from typing import Any

import av
import torch
from av.sidedata.sidedata import Type
from torch import Tensor

from core.errors import UserError

# Side data of newer kinds (EXIF among them) make PyAV fail to list any: FFmpeg's numbers of them, with some to come.
UNKNOWN = range(1 + max(kind.value for kind in Type), 64)
SKEW = 0.01  # by how much the axes may be off, as a share: half a degree


@dataclasses.dataclass(frozen=True)
class Orientation:
    """What makes a picture upright: height and width change places, then rows or columns (or both) are reversed."""

    transposed: bool = False
    rows: bool = False
    columns: bool = False


def _side_data(frame: av.VideoFrame) -> Any:
    """The side data of a frame by their kinds; those of kinds that PyAV does not know are left out."""
    try:
        return frame.side_data
    except ValueError:
        pass
    graph = av.filter.Graph()
    source = graph.add_buffer(
        width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base or 1
    )
    removed = [graph.add("sidedata", f"mode=delete:type={kind}") for kind in UNKNOWN]
    graph.link_nodes(source, *removed, graph.add("buffersink")).configure()
    graph.push(frame)
    return graph.pull().side_data


def orientation(frame: av.VideoFrame) -> Orientation:
    """The orientation that a frame's display matrix asks for. Raises UserError for one off the picture's axes."""
    data = _side_data(frame).get("DISPLAYMATRIX")
    if data is None:
        return Orientation()
    a, b, _, c, d, *_ = struct.unpack("9i", bytes(data))
    straight, crossed = abs(a) + abs(d), abs(b) + abs(c)
    if min(straight, crossed) > SKEW * max(straight, crossed):
        shown = ", ".join(f"{v / 65536:.3g}" for v in (a, b, c, d))
        raise UserError(f"it is to be turned by no right angle (display matrix {shown}): store it upright")
    if crossed > straight:
        return Orientation(True, b < 0, c < 0)
    return Orientation(False, d < 0, a < 0)


def upright(picture: Tensor, asked: Orientation) -> Tensor:
    """A picture `[H, W, 3]` as it is shown, `[H, W, 3]` or `[W, H, 3]`."""
    picture = picture.transpose(0, 1) if asked.transposed else picture
    dims = [*([0] if asked.rows else []), *([1] if asked.columns else [])]
    return torch.flip(picture, dims) if dims else picture
