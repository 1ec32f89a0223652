"""Variants of one step or pass, measured one after another in one run, and compared with the peer among them."""

import dataclasses
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks import report
from core import devices

EAGER, COMPILED = "diffusers", "diffusers, blocks compiled"
AGAIN = f"{COMPILED}, again"  # the peer once more, last: a GPU slows down as it warms up, and the faster time counts


@dataclasses.dataclass(frozen=True)
class Measured:
    """Median time of a step in seconds, peak memory in GiB, and what the first and the last step returned."""

    seconds: float
    peak_gib: float
    losses: tuple[float, float]


def measure(make: Callable[[], Callable], device: torch.device, warmup: int, steps: int) -> Measured | None:
    """Runs the closure of a step that `make` gives; None (with the error on stderr) when it does not fit."""
    gc.collect()
    devices.empty_cache(device)
    devices.reset_peak_memory(device)
    try:
        step = make()
        losses = [step() for _ in range(warmup)]
        devices.synchronize(device)
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            losses.append(step())
            devices.synchronize(device)
            times.append(time.perf_counter() - start)
        peak = devices.memory_stats(device)["peak_bytes"] / 2**30
        return Measured(statistics.median(times), peak, (float(losses[0]), float(losses[-1])))
    except torch.OutOfMemoryError as error:
        print(f"  out of memory: {str(error)[:160]}", file=sys.stderr)
    except Exception:
        traceback.print_exc(limit=3)
    return None


def measure_all(
    makers: Mapping[str, Callable], device: torch.device, warmup: int, steps: int, *,
    only: Sequence[str] | None, told: Callable[[Measured], str],
) -> dict[str, Measured | None]:  # fmt: skip
    """Measures the variants in order, or those of `only`, and prints what is `told` of each."""
    results = {}
    for name, make in makers.items():
        if only and name not in only:
            continue
        torch._dynamo.reset()
        results[name] = got = measure(make, device, warmup, steps)
        if got is not None:
            print(f"{name}: {told(got)}", flush=True)
    return results


def _faster(results: Mapping[str, Measured | None]) -> Measured | None:
    """The faster of the two measurements of the compiled peer."""
    found = [m for m in (results.get(COMPILED), results.get(AGAIN)) if m is not None]
    return min(found, key=lambda m: m.seconds, default=None)


def compare_steps(
    results: Mapping[str, Measured | None], shape: str, tokens: int, floor: float | None
) -> list[dict]:  # fmt: skip
    """Rows of step time, tokens/s, MFU and peak memory of each of our variants against the compiled peer.

    Args:
        floor: seconds that the arithmetic takes at the device's peak.
    """
    peer, rows = _faster(results), []
    figures = [
        ("step time", "s", lambda m: m.seconds, True, floor),
        ("tokens per second", "1/s", lambda m: tokens / m.seconds, False, floor and tokens / floor),
        ("peak memory", "GiB", lambda m: m.peak_gib, True, None),
    ]
    if floor is not None:
        figures.insert(2, ("MFU", "%", lambda m: 100 * floor / m.seconds, False, 100.0))
    for name, got in results.items():
        if name in (COMPILED, AGAIN) or got is None:
            continue
        for op, unit, f, smaller, ceiling in figures:
            value = None if peer is None else f(peer)
            how = {"smaller_is_better": smaller, "ceiling": ceiling}
            rows.append(report.row(f"{op}, {name}", shape, f(got), unit, COMPILED, value, **how))
    return rows


def compare_passes(results: Mapping[str, Measured | None], shape: str, floor: float | None) -> list[dict]:
    """Time and peak memory of each of our variants, named "ours...", against the faster compiled peer; of "ours", which
    is not compiled, against the peer that is not either."""
    fastest, rows = _faster(results), []
    for name, got in results.items():
        if not name.startswith("ours") or got is None:
            continue
        who, peer = (EAGER, results.get(EAGER)) if name == "ours" else (COMPILED, fastest)
        for op, unit, field, ceiling in (("time", "s", "seconds", floor), ("peak memory", "GiB", "peak_gib", None)):
            value = None if peer is None else getattr(peer, field)
            how = {"smaller_is_better": True, "ceiling": ceiling}
            rows.append(report.row(f"forward {op}, {name}", shape, getattr(got, field), unit, who, value, **how))
    return rows
