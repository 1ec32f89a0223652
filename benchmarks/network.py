"""The network under a benchmark: whether it adds up, how fast it is, and how much of it a step waits for."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from core import devices
from core.errors import UserError
from parallel.mesh import AXES, Mesh


def slowest(seconds: Sequence[float], mesh: Mesh) -> list[float]:
    """Element by element the longest over the ranks of the mesh."""
    group = mesh.group(*AXES)
    if group is None:
        return list(seconds)
    times = torch.tensor(seconds, dtype=torch.float64, device=mesh.device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    return times.tolist()


def health(mesh: Mesh, payload: int, warmup: int, rounds: int) -> float:
    """Bandwidth on the bus in bytes/s of an all-reduce of `payload` bytes, `payload * 2 (n - 1) / n` per second.

    Raises:
        UserError: a sum of ranks or of ones that is wrong.
    """
    group, n = mesh.group(*AXES), mesh.world
    ranks = torch.full((1,), float(mesh.index(*AXES) + 1), device=mesh.device)
    dist.all_reduce(ranks, group=group)
    if (found := ranks.item()) != n * (n + 1) / 2:
        raise UserError(f"health: an all-reduce of 1..{n} gave {found:g}, the sum is {n * (n + 1) / 2:g}")
    dtype = torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    ones = torch.ones(payload // dtype.itemsize, dtype=dtype, device=mesh.device)

    def run(times: int) -> None:
        for _ in range(times):
            dist.all_reduce(ones, group=group)
            ones.div_(n)  # so that it stays 1
        devices.synchronize(mesh.device)

    run(warmup)
    start = time.perf_counter()
    run(rounds)
    (seconds,) = slowest([(time.perf_counter() - start) / rounds], mesh)
    if not bool((ones == 1).all()):
        raise UserError(f"health: the mean of ones over {n} ranks is not 1 everywhere")
    return ones.numel() * dtype.itemsize * 2 * (n - 1) / n / seconds


# --- exposed communication --------------------------------------------------------------------------------------------

Span = tuple[float, float]


def covered(spans: Sequence[Span]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def exposed(communication: Sequence[Span], work: Sequence[Span]) -> float:
    """Time in which communication runs and no work does."""
    return covered([*communication, *work]) - covered(work)


def kind_of(name: str, annotation: bool = False) -> str | None:
    """What runs on a GPU under this name: `communication`, `work`, or nothing (a range that the host marked)."""
    if annotation or name.startswith(("nccl:", "FSDP::", "ProfilerStep", "## ")):
        return None
    return "communication" if name.startswith("nccl") else "work"


def traced(step: Callable[[], object], device: torch.device) -> tuple[float, float] | None:
    """`(seconds of communication, seconds of it that are exposed)` of one step on a GPU; None elsewhere."""
    if device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        step()
        devices.synchronize(device)
    spans: dict[str | None, list[Span]] = {"communication": [], "work": [], None: []}
    for e in seen.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            kind = kind_of(e.name, getattr(e, "is_user_annotation", False))
            spans[kind].append((e.time_range.start / 1e6, e.time_range.end / 1e6))
    return covered(spans["communication"]), exposed(spans["communication"], spans["work"])
