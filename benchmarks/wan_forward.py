"""One forward pass of Wan2.1 T2V 1.3B at full size in BF16, beside Diffusers' transformer in the same run.

    python benchmarks/wan_forward.py                       # 81x480x832, needs a GPU
    python benchmarks/wan_forward.py --layers 2 --grid 3 4 4 --text-len 8 --device cpu   # a smoke run

A denoising step without guidance: batch 1, 32,760 tokens, 512 text tokens, weights in BF16. Diffusers is measured with
and without compiled blocks, before and after ours, and its faster time counts. The ceiling is the model's arithmetic
at the device's peak. `--attention NAME ...` adds our compiled variant with other attention backends.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from benchmarks import report  # noqa: E402
from benchmarks.train_step import batch, peer_model  # noqa: E402
from benchmarks.variants import AGAIN, COMPILED, EAGER, compare_passes, measure_all  # noqa: E402
from core import devices, keys, specs  # noqa: E402
from core.rules import cast  # noqa: E402
from core.scan import compiled, scan  # noqa: E402
from core.transforms import apply  # noqa: E402
from kernels import Attention  # noqa: E402
from nn import wan  # noqa: E402
from nn.run import Run  # noqa: E402
from nn.wan_inputs import model_inputs, noised, timestep_of  # noqa: E402
from train.flops import forward_flops  # noqa: E402


def weights(cfg: wan.WanConfig, device: torch.device, dtype: torch.dtype):
    """Random weights in `dtype`, the output's too, so that results can be compared; float32 tables stay so."""
    model_specs = wan.param_specs(cfg)
    tree = specs.init(model_specs, keys.key(0), device=device)
    for name in ("proj_out.weight", "proj_out.bias"):
        tree[name] = keys.normal(keys.fold_in(keys.key(1), name), tree[name].shape, device=device) / cfg.dim**0.5
    return apply(tree, cast(dtype, keep_fp32=lambda k: model_specs[k].keep_fp32)(specs.specs_of(tree)))


def ours(cfg, params, run, data, dtype):
    """A closure that makes one pass and returns a number of its output."""
    clean, noise, sigma, text = data
    inputs = model_inputs(cfg, noised(clean, noise, sigma), timestep_of(sigma), {"text": text}, dtype=dtype)
    return torch.no_grad()(lambda: wan.forward(params, cfg, inputs, run=run).float().square().mean())


def theirs(cfg, params, data, dtype, compile_blocks: bool):
    """The same with Diffusers' module."""
    model = peer_model(cfg, params).eval()
    if compile_blocks:
        model.compile_repeated_blocks(fullgraph=True)
    clean, noise, sigma, text = data
    noisy, timestep, text = noised(clean, noise, sigma).to(dtype), timestep_of(sigma), text.to(dtype)
    return torch.no_grad()(lambda: model(noisy, timestep, text, return_dict=False)[0].float().square().mean())


def main() -> None:
    """Measures every variant and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="wan2.1-t2v-1.3b", choices=wan.PRESETS)
    parser.add_argument("--layers", type=int, help="fewer layers, for smoke runs")
    parser.add_argument("--grid", type=int, nargs=3, default=(21, 30, 52), help="tokens in time, height, width")
    parser.add_argument("--text-len", type=int, default=512)
    parser.add_argument("--device", type=devices.resolve, default=devices.preferred_device())
    parser.add_argument("--attention", nargs="*", default=[], help="further attention backends to measure")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    cfg, device = wan.PRESETS[args.preset], args.device
    if args.layers is not None:
        cfg = dataclasses.replace(cfg, num_layers=args.layers)
    dtype = devices.default_compute_dtype(device)
    data, params = batch(cfg, args.grid, args.text_len, device), weights(cfg, device, dtype)
    tokens = args.grid[0] * args.grid[1] * args.grid[2]
    flops, peak = forward_flops(cfg, tokens, args.text_len), devices.peak_flops(device)
    makers = {EAGER: lambda: theirs(cfg, params, data, dtype, False)}
    makers[COMPILED] = makers[AGAIN] = lambda: theirs(cfg, params, data, dtype, True)
    makers["ours"] = lambda: ours(cfg, params, Run(), data, dtype)
    for name in ("auto", *args.attention):
        run = Run(attention=Attention(name), scan=compiled(scan))
        makers[f"ours, compiled, attention {name}"] = lambda run=run: ours(cfg, params, run, data, dtype)
    makers[AGAIN] = makers.pop(AGAIN)  # last
    results = measure_all(
        makers, device, args.warmup, args.steps, only=None,
        told=lambda m: f"{m.seconds:.4f} s, {flops / m.seconds / 1e12:.0f} TFLOP/s, {m.peak_gib:.2f} GiB, "
        f"mean square {m.losses[-1]:.6f}",
    )  # fmt: skip
    shape = f"{args.preset} x{cfg.num_layers} layers, {tokens} tokens, {dtype}"
    rows = compare_passes(results, shape, None if peak is None else flops / peak)
    report.show(rows)
    if not args.no_save:
        report.save(__file__, rows, report.device_name(device))


if __name__ == "__main__":
    main()
