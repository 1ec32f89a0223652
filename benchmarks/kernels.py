"""Our kernels beside their peers in the same run: median time, rate, ratio, and the ceilings of the machine.

    python benchmarks/kernels.py                         # every family, needs a GPU
    python benchmarks/kernels.py --only attention norm   # some families
    python benchmarks/kernels.py --match "attention fwd" # cases whose op contains a text

The ceilings are measured first: bytes per second of a large copy, and FLOP/s of a large bf16 matrix product. The
closures of one case are warmed up, then timed in turn with CUDA events, the L2 cache flushed before every call; the
median counts.
"""

import argparse
import dataclasses
import importlib
import random
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from benchmarks import report  # noqa: E402
from benchmarks.kernel_cases import Case  # noqa: E402
from core import devices  # noqa: E402

FAMILIES = ("attention", "masks", "qat", "norm")


def medians_ms(runs: Mapping[str, Callable[[], object]], repeats: int, flush: torch.Tensor) -> dict[str, float]:
    """Median milliseconds of `repeats` rounds by name, L2 flushed before every call.

    In each round all of them run, in a random order: a GPU that grows warm and slow does so for all alike, and none
    always follows the hottest. Call them once before.
    """
    names, times, order = list(runs), {name: [] for name in runs}, random.Random(0)
    for _ in range(repeats):
        order.shuffle(names)
        for name in names:
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            runs[name]()
            end.record()
            times[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in times.items()}


def ceilings(device: torch.device, flush: torch.Tensor) -> tuple[float, float]:
    """Measured bytes/s of a copy (read plus written) and FLOP/s of a bf16 product."""
    x = torch.empty(2**30, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    runs = {"copy": lambda: y.copy_(x), "product": lambda: a @ b}
    for run in runs.values():
        run()
    ms = medians_ms(runs, 20, flush)
    return 2 * x.nbytes / ms["copy"] * 1e3, 2 * 8192**3 / ms["product"] * 1e3


def measure(case: Case, repeats: int, flush: torch.Tensor, copy: float, product: float) -> list[dict]:
    """Rows of one case: each of ours against the fastest peer; what fails is reported on stderr."""
    runs = {}
    for name, make in {**case.peers, **case.ours}.items():
        try:
            run = make()
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            runs[name] = run
        except Exception:
            print(f"{case.op}, {case.shape}, {name}:", file=sys.stderr)
            traceback.print_exc(limit=-2)
    found = medians_ms(runs, repeats, flush)
    runs.clear()
    torch.cuda.empty_cache()
    peers = {n: found[n] for n in case.peers if n in found}
    best = min(peers, key=peers.get) if peers else None
    work, ceiling = (case.flops, product) if case.flops is not None else (case.bytes, copy)
    unit = "TFLOP/s" if case.flops is not None else "TB/s"
    rows = []
    for name, ms in found.items():
        rate = "" if work is None else f", {work / ms / 1e9:.2f} {unit}"
        print(f"{case.op} {case.shape} | {name}: {ms:.3f} ms{rate}", flush=True)
        if name in case.ours:
            floor = None if work is None else work / ceiling * 1e3
            rows.append(
                report.row(f"{case.op}, {name}", case.shape, ms, "ms", best, None if best is None else peers[best],
                           smaller_is_better=True, ceiling=floor)
            )  # fmt: skip
    return rows


def main() -> None:
    """Measures every case and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--match", default="", help="text that the op of a case must contain")
    parser.add_argument("--sweep", action="store_true", help="also other tiles than those of the tables")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    device = devices.resolve("cuda")
    torch._dynamo.config.recompile_limit = 64  # one graph per shape and mode of the compiled peers
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    copy, product = ceilings(device, flush)
    print(f"ceilings: copy {copy / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s", flush=True)
    rows = []
    for family in args.only:
        for case in importlib.import_module(f"benchmarks.kernel_cases.{family}").cases(device):
            if args.sweep:
                case = dataclasses.replace(case, ours={**case.ours, **case.variants})
            if args.match in case.op and case.ours:
                rows += measure(case, args.repeats, flush, copy, product)
    report.show(rows)
    if not args.no_save:
        report.save(__file__, rows, report.device_name(device))


if __name__ == "__main__":
    main()
