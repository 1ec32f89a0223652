"""Loading a Wan 14B folder: peak memory of the host and time, beside Diffusers' `from_pretrained`.

    python benchmarks/load_folder.py --folder /scratch/wan14b      # writes 28 GB of random BF16 weights there first
    python benchmarks/load_folder.py --folder /tmp/tiny --layers 2 --device cpu     # a smoke run

Each side loads in a process of its own, once to the CPU and, where there is one, to the GPU. The peak is the
process's highest resident memory while it loads, minus what it held before; pages of a mapped file count. On the CPU
no side can do with less than the size of the weights.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from benchmarks import report  # noqa: E402
from core import devices  # noqa: E402
from core.files import write_json  # noqa: E402
from core.save import describe, save_checkpoint  # noqa: E402
from nn import wan  # noqa: E402
from nn.wan_formats import CLASS_NAME, open_transformer, to_json  # noqa: E402

SIDES = ("ours", "diffusers")


def write_folder(folder: Path, cfg: wan.WanConfig, device: torch.device) -> None:
    """A `transformer/` folder with random BF16 weights, in Diffusers' shards."""
    model_specs = wan.param_specs(cfg)
    dtype = lambda s: torch.float32 if s.keep_fp32 else torch.bfloat16  # noqa: E731
    params = {k: torch.randn(s.shape, dtype=dtype(s), device=device) * 0.02 for k, s in model_specs.items()}
    save_checkpoint(folder, params, metadata=describe(CLASS_NAME, to_json(cfg)))
    write_json(folder / "config.json", to_json(cfg))


class Peak:
    """The highest resident bytes of this process while it is open, looked at every 5 ms.

    The system's own high-water mark is of no use: a process inherits its parent's.
    """

    def __enter__(self):
        self.start, self.highest, self.done = self.now(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.done.set()
        self.thread.join()

    def now(self) -> int:
        return devices.memory_stats("cpu")["allocated_bytes"]

    def watch(self) -> None:
        while not self.done.wait(0.005):
            self.highest = max(self.highest, self.now() - self.start)


def load(side: str, folder: Path, device: torch.device) -> dict[str, float]:
    """Loads in this process; what it took."""
    torch.zeros(1, device=device)
    if side == "diffusers":
        from diffusers import WanTransformer3DModel
    with Peak() as peak:
        start = time.perf_counter()
        if side == "ours":
            tree, _ = open_transformer(folder)
            held = list(tree.read(device=device).values())
        else:
            kwargs = {"device_map": str(device)} if device.type == "cuda" else {}
            model = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16, **kwargs)
            held = list(model.parameters())
        for p in held:  # every page, so that a file that is only mapped is read
            p.detach().view(torch.uint8).flatten()[::4096].sum()
        devices.synchronize(device)
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak": peak.highest, "bytes": sum(p.nbytes for p in held)}


def measured(side: str, folder: Path, device: str) -> dict[str, float] | None:
    """`load` in a process of its own; None, with the error on stderr, when it fails."""
    command = [sys.executable, __file__, "--folder", str(folder), "--device", device, "--load", side]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{side} to {device}: {done.stderr.strip()[-300:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Writes the folder where it is missing, measures every side and device, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the weights are, or are to be written")
    parser.add_argument("--preset", default="wan2.1-t2v-14b", choices=wan.PRESETS)
    parser.add_argument("--layers", type=int, help="fewer layers, for smoke runs")
    parser.add_argument("--device", type=devices.resolve, default=devices.preferred_device())
    parser.add_argument("--load", choices=SIDES, help="only load, print the figures as JSON")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    if args.load is not None:
        print(json.dumps(load(args.load, args.folder, args.device)))
        return
    cfg = wan.PRESETS[args.preset]
    if args.layers is not None:
        cfg = dataclasses.replace(cfg, num_layers=args.layers)
    if not (args.folder / "config.json").is_file():
        write_folder(args.folder, cfg, args.device)
    size = sum(f.stat().st_size for f in args.folder.glob("*.safetensors"))
    rows = []
    for device in dict.fromkeys([str(args.device), "cpu"]):
        found = {side: measured(side, args.folder, device) for side in SIDES}
        rows += compare(found, f"{args.preset} x{cfg.num_layers} layers to {device}", size)
        print(f"{device}: {found}", flush=True)
    report.show(rows)
    if not args.no_save:
        report.save(__file__, rows, report.device_name(args.device))


def compare(found: dict, shape: str, size: int) -> list[dict]:
    """Host memory as a share of the file, and seconds, of ours against the peer."""
    mine, other = (found[side] for side in SIDES)
    figures = (("peak host memory / file", "x", lambda m: m["peak"] / size), ("time", "s", lambda m: m["seconds"]))
    ceiling = 1.0 if shape.endswith("cpu") else None
    return [
        report.row(f"load, {op}", shape, f(mine), unit, "from_pretrained", None if other is None else f(other),
                   smaller_is_better=True, ceiling=ceiling if unit == "x" else None)
        for op, unit, f in figures if mine is not None
    ]  # fmt: skip


if __name__ == "__main__":
    main()
