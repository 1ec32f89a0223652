"""Devices: which to use, what they can compute, and how much memory they hold. Nothing here is remembered."""

import os
import re
import sys
from pathlib import Path

import torch

from core.errors import UserError

# Dense BF16 with FP32 accumulation, FLOP/s, from the vendors' data sheets. A row applies when all its words
# are words of the device's name; the first that applies wins, so special boards stand before general ones.
PEAK_FLOPS = (
    (("MIG",), None),
    (("Laptop",), None),
    (("H200", "NVL"), 835.5e12),
    (("H200",), 989.4e12),
    (("GH200",), 989.4e12),
    (("H100", "PCIe"), 756e12),
    (("H100", "NVL"), 835.5e12),
    (("H100",), 989.4e12),
    (("GB200",), 2500e12),
    (("B200",), 2250e12),
    (("A100",), 312e12),
    (("A40",), 149.7e12),
    (("A30",), 165e12),
    (("A10",), 125e12),
    (("L40S",), 362.05e12),
    (("L40",), 181.05e12),
    (("L4",), 121e12),
    (("4090", "D"), None),
    (("4090",), 165.2e12),
    (("3090",), 71e12),
    (("MI300X",), 1307.4e12),
)


def available() -> list[str]:
    """Names of the devices of this process, best first: `["cuda:0", "cuda:1", "mps", "cpu"]`."""
    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*cuda, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]


def preferred_device() -> torch.device:
    """CUDA (the process's current device), else MPS, else the CPU."""
    return torch.device(available()[0].partition(":")[0])


def resolve(device: str | torch.device | None) -> torch.device:
    """The device asked for, or the preferred one for None.

    Raises UserError, with the available ones, for a device that does not exist here.
    """
    if device is None:
        return preferred_device()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    names = available()
    # "cuda" means the current device, "cpu:0" and "mps:0" the only one.
    kinds = {name.partition(":")[0] for name in names}
    exists = found is not None and found.type in kinds and (
        found.index is None or str(found) in names or (found.type != "cuda" and found.index == 0)
    )  # fmt: skip
    if not exists:
        raise UserError(f"device {str(device)!r} is not available here; available: {', '.join(names)}")
    return found


def highest_float(device: str | torch.device) -> torch.dtype:
    """The most precise float of a device: float64, but float32 on MPS, which has no float64."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def default_compute_dtype(device: str | torch.device) -> torch.dtype:
    """bfloat16 on CUDA devices with native support, else float32."""
    device = torch.device(device)
    if device.type != "cuda":
        return torch.float32
    # Compute capability 8.0 (Ampere) is the first with BF16 tensor cores; ROCm reports 9 for its BF16 boards.
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32


def synchronize(device: str | torch.device) -> None:
    """Waits until the device has done all queued work."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def empty_cache(device: str | torch.device) -> None:
    """Returns memory that PyTorch keeps but does not use to the device."""
    device = torch.device(device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def memory_stats(device: str | torch.device) -> dict[str, int]:
    """`{"allocated_bytes", "peak_bytes"}` of this process.

    CUDA: tensors now, and at most since `reset_peak_memory`. MPS: tensors now, and the memory PyTorch holds
    from the driver (which grows until `empty_cache`). CPU: resident set now, and at most since the start.
    """
    device = torch.device(device)
    if device.type == "cuda":
        allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    elif device.type == "mps":
        allocated, peak = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    else:
        peak = _peak_resident()
        allocated = _resident(peak)
    return {"allocated_bytes": allocated, "peak_bytes": max(peak, allocated)}


def _peak_resident() -> int:
    import resource

    # Kilobytes on Linux, bytes on macOS (getrusage(2) of each).
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resident(fallback: int) -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else fallback


def reset_peak_memory(device: str | torch.device) -> None:
    """Starts a new peak on CUDA; other devices keep theirs for the life of the process."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_flops(device: str | torch.device) -> float | None:
    """Dense BF16 FLOP/s of a device by its name; None where unknown (CPUs, MPS, MIG slices, laptops)."""
    device = torch.device(device)
    return named_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def named_peak_flops(name: str) -> float | None:
    """`"NVIDIA H200" -> 989.4e12`; None for a name that the table lacks."""
    words = set(re.split(r"[\s\-]+", name))
    return next((flops for need, flops in PEAK_FLOPS if words.issuperset(need)), None)
