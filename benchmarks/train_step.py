"""One training step of Wan2.1 T2V 1.3B at full size, beside Diffusers' transformer in the same run.

    python benchmarks/train_step.py                       # full size, needs a GPU with about 110 GiB
    python benchmarks/train_step.py --layers 2 --grid 3 4 4 --text-len 8 --device cpu   # a smoke run

Forward, backward and AdamW on FP32 masters with BF16 compute, batch 1, 81x480x832 (32,760 tokens). The
peer is the strongest setting that Diffusers offers for it: compiled blocks, fused AdamW, bf16 autocast. It
is measured before and after ours, and its faster time counts, since a GPU slows down as it warms up. The
ceiling is the model's arithmetic at 989 TFLOP/s (dense BF16 of an H100 or H200).
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from benchmarks import report  # noqa: E402
from benchmarks.variants import AGAIN, COMPILED, compare_steps, measure_all  # noqa: E402
from core import devices, keys, specs  # noqa: E402
from core.scan import compiled, recompute, scan  # noqa: E402
from kernels import Attention  # noqa: E402
from nn import wan  # noqa: E402
from nn.run import Run  # noqa: E402
from nn.wan_formats import to_json  # noqa: E402
from nn.wan_inputs import model_inputs, noised, timestep_of, velocity_target  # noqa: E402
from train import optim  # noqa: E402
from train.flops import train_flops  # noqa: E402

LR = 1e-5


def batch(cfg, grid, text_len, device):
    """Latents, noise, sigma and text of one sample, the same for both sides."""
    k = keys.key(0)
    size = [n * p for n, p in zip(grid, cfg.patch_size, strict=True)]
    draw = lambda name, *shape: keys.normal(keys.fold_in(k, name), shape, device=device)  # noqa: E731
    clean, noise = (draw(n, 1, cfg.out_channels, *size) for n in ("clean", "noise"))
    return clean, noise, torch.tensor([0.7], device=device), draw("text", 1, text_len, cfg.text_dim)


def our_step(cfg, params, run, data, compute):
    """A closure that makes one step and returns the loss."""
    leaves = {k: p.requires_grad_() for k, p in params.items()}
    state, opt = optim.adamw_init(leaves), optim.AdamW()
    clean, noise, sigma, text = data
    inputs = model_inputs(cfg, noised(clean, noise, sigma), timestep_of(sigma), {"text": text}, dtype=compute)
    target = velocity_target(clean, noise)

    def step():
        loss = (wan.forward(leaves, cfg, inputs, run=run).float() - target).square().mean()
        loss.backward()
        optim.adamw_update(opt, {k: p.grad for k, p in leaves.items()}, state, leaves, LR)
        for p in leaves.values():
            p.grad = None
        return loss.detach()

    return step


def peer_model(cfg, params):
    """Diffusers' module around `params`."""
    from diffusers import WanTransformer3DModel

    body = {k: v for k, v in to_json(cfg).items() if not k.startswith("_")}
    with torch.device("meta"):
        model = WanTransformer3DModel(**body)
    # The rotary tables are non-persistent buffers: a meta model does not have them.
    rope = type(model.rope)(cfg.attention_head_dim, cfg.patch_size, cfg.rope_max_seq_len)
    model.load_state_dict(params, strict=True, assign=True)
    model.rope = rope.to(next(iter(params.values())).device)
    return model


def peer_step(cfg, params, data, compute):
    """The same step with Diffusers' module, its blocks compiled, and torch.optim.AdamW."""
    model, device = peer_model(cfg, params), next(iter(params.values())).device
    model.requires_grad_(True).train()
    model.compile_repeated_blocks(fullgraph=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)
    clean, noise, sigma, text = data
    target = velocity_target(clean, noise)
    noisy, timestep = noised(clean, noise, sigma), timestep_of(sigma)

    def step():
        with torch.autocast(device.type, compute, enabled=compute != torch.float32):
            out = model(noisy, timestep, text, return_dict=False)[0]
        loss = (out.float() - target).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def ours_variants(budget: float) -> dict[str, Run]:
    """Name -> how our layers run."""
    return {
        "compiled": Run(scan=compiled(scan)),
        f"compiled, memory budget {budget}": Run(scan=compiled(scan, memory_budget=budget)),
        "compiled, recompute": Run(scan=recompute(compiled(scan))),
    }


def main() -> None:
    """Parses arguments, measures every variant and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="wan2.1-t2v-1.3b", choices=wan.PRESETS)
    parser.add_argument("--layers", type=int, help="fewer layers, for smoke runs")
    parser.add_argument("--grid", type=int, nargs=3, default=(21, 30, 52), help="tokens in time, height, width")
    parser.add_argument("--text-len", type=int, default=512)
    parser.add_argument("--budget", type=float, default=0.9, help="activation memory budget of the second variant")
    parser.add_argument("--device", type=devices.resolve, default=devices.preferred_device())
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", nargs="*", help="names of variants to run")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()

    cfg, device = wan.PRESETS[args.preset], args.device
    if args.layers is not None:
        cfg = dataclasses.replace(cfg, num_layers=args.layers)
    compute = devices.default_compute_dtype(device)
    data = batch(cfg, args.grid, args.text_len, device)
    fresh = lambda: specs.init(wan.param_specs(cfg), keys.key(0), device=device)  # noqa: E731
    tokens = args.grid[0] * args.grid[1] * args.grid[2]
    flops = train_flops(cfg, tokens, args.text_len)
    peak = devices.peak_flops(device)
    floor = None if peak is None else flops / peak
    mfu = lambda m: "" if floor is None else f", {floor / m.seconds:.1%} MFU"  # noqa: E731

    peer = lambda: peer_step(cfg, fresh(), data, compute)  # noqa: E731
    makers = {COMPILED: peer}
    for name, run in ours_variants(args.budget).items():
        run = dataclasses.replace(run, attention=Attention(args.attention))
        makers[name] = lambda run=run: our_step(cfg, fresh(), run, data, compute)
    makers[AGAIN] = peer
    results = measure_all(
        makers, device, args.warmup, args.steps, only=args.only,
        told=lambda m: f"{m.seconds:.4f} s/step, {tokens / m.seconds:,.0f} tokens/s{mfu(m)}, {m.peak_gib:.1f} GiB, "
        f"loss {m.losses[0]:.4f} -> {m.losses[1]:.4f}",
    )  # fmt: skip
    rows = compare_steps(results, f"{args.preset} x{cfg.num_layers} layers, {tokens} tokens", tokens, floor)
    report.show(rows)
    if not args.no_save:
        report.save(__file__, rows, report.device_name(device))


if __name__ == "__main__":
    main()
