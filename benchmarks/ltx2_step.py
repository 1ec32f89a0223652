"""One training step of LTX-2 at full width and reduced depth, beside Diffusers' transformer in the same run.

    python benchmarks/ltx2_step.py                          # 12 layers, needs a GPU with about 110 GiB
    python benchmarks/ltx2_step.py --modality video --batches 1 2 3
    python benchmarks/ltx2_step.py --layers 2 --tiny --device cpu       # a smoke run

Forward, backward and fused AdamW on FP32 masters with BF16 compute: 81 frames of 480 x 832 (4,290 video tokens, 84 of
audio), 1,024 text tokens. Packed projections. Without recomputation, with full recomputation, and with a part of the
activations (the compiler's memory budget; uncompiled the recipes' `save_attention` and `save_matmuls`). The peer has
its blocks compiled, bf16 autocast and fused AdamW, and is measured before and after ours; its faster time counts. MFU
is by `nn.ltx2_flops.model_flops` of the video stream alone (blocks only, backward twice the forward), as published
figures are, at 989 TFLOP/s.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from benchmarks import report  # noqa: E402
from benchmarks.ltx2_forward import Sizes, config, parser, peer_inputs, peer_model, streams, weights  # noqa: E402
from benchmarks.train_step import LR  # noqa: E402
from benchmarks.variants import AGAIN, COMPILED, compare_steps, measure_all  # noqa: E402
from core import devices  # noqa: E402
from core.scan import compiled, recompute, scan  # noqa: E402
from core.transforms import apply  # noqa: E402
from nn import ltx2  # noqa: E402
from nn.ltx2_flops import model_flops  # noqa: E402
from nn.ltx2_inputs import model_inputs  # noqa: E402
from nn.ltx2_specs import pack_projections, param_specs  # noqa: E402
from nn.run import Run  # noqa: E402
from train import optim  # noqa: E402
from train.recompute import KINDS, policy_of  # noqa: E402


def targets(given) -> dict:
    """Random velocities of every stream."""
    torch.manual_seed(2)
    return {name: torch.randn_like(s.latents) for name, s in given.items()}


def our_step(cfg, params, run, given, compute):
    """A closure that makes one step and returns the loss."""
    leaves = {k: p.requires_grad_() for k, p in params.items()}
    state, opt = optim.adamw_init(leaves), optim.AdamW()
    inputs, wanted = model_inputs(cfg, given, dtype=compute), targets(given)

    def step():
        out = ltx2.forward(leaves, cfg, inputs, run=run)
        loss = sum((v.float() - wanted[name]).square().mean() for name, v in out.items())
        loss.backward()
        optim.adamw_update(opt, {k: p.grad for k, p in leaves.items()}, state, leaves, LR)
        for p in leaves.values():
            p.grad = None
        return loss.detach()

    return step


def peer_step(cfg, params, given, sizes, compute):
    """The same step with Diffusers' module, its blocks compiled, and torch.optim.AdamW."""
    model = peer_model(cfg, params).requires_grad_(True).train()
    model.compile_repeated_blocks(fullgraph=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)
    device, wanted = next(iter(params.values())).device, targets(given)
    inputs = peer_inputs(cfg, given, sizes, torch.float32)

    def step():
        with torch.autocast(device.type, compute, enabled=compute != torch.float32):
            out = model(**inputs)
        loss = sum((v.float() - t).square().mean() for v, t in zip(out, wanted.values(), strict=True))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def variants(budgets) -> dict[str, Run]:
    """Name -> how our layers run. What a part of the activations is, is the compiler's choice or a policy by names."""
    out = {"compiled": Run(scan=compiled(scan)), "compiled, recompute": Run(scan=recompute(compiled(scan)))}
    out |= {f"compiled, memory budget {b:g}": Run(scan=compiled(scan, memory_budget=b)) for b in budgets}
    selective = {kind: Run(scan=recompute(scan, policy=policy_of(kind))) for kind in KINDS}
    return {**out, "eager": Run(), **{f"eager, {kind}": run for kind, run in selective.items()}}


def makers(cfg, args, sizes) -> dict:
    """Name -> a function that makes the closure of a variant. Diffusers has no model of one stream."""
    device, compute = args.device, devices.default_compute_dtype(args.device)
    given, bound = streams(cfg, sizes, device), pack_projections(cfg)(param_specs(cfg))
    fresh = lambda: weights(cfg, device, torch.float32)  # noqa: E731
    peer = lambda: peer_step(cfg, fresh(), given, sizes, compute)  # noqa: E731
    ours = {
        name: lambda run=run: our_step(cfg, apply(fresh(), bound), run, given, compute)
        for name, run in variants(args.budgets).items()
    }
    return ours if args.modality == "video" else {COMPILED: peer, **ours, AGAIN: peer}


def measure_batch(cfg, args, sizes) -> list[dict]:
    """Measures every variant at one batch; rows of the results."""
    tokens, video = sizes.tokens(cfg)["video"], dataclasses.replace(cfg, modality="video")
    flops = sizes.batch * model_flops(video, {"video": tokens}, {"video": sizes.text})
    peak = devices.peak_flops(args.device)
    floor = None if peak is None else flops / peak
    mfu = lambda m: "" if floor is None else f", {floor / m.seconds:.1%} MFU"  # noqa: E731
    results = measure_all(
        makers(cfg, args, sizes), args.device, args.warmup, args.steps, only=args.only,
        told=lambda m: f"B{sizes.batch}: {1e3 * m.seconds:.1f} ms/step{mfu(m)}, {m.peak_gib:.1f} GiB, "
        f"loss {m.losses[0]:.4f} -> {m.losses[1]:.4f}",
    )  # fmt: skip
    shape = f"{args.preset} {args.modality} x{cfg.num_layers} layers, batch {sizes.batch}, {tokens} video tokens each"
    return compare_steps(results, shape, sizes.batch * tokens, floor)


def main() -> None:
    """Measures every variant at every batch and writes the results."""
    p = parser(__doc__)
    p.set_defaults(layers=12, steps=6)
    p.add_argument("--modality", choices=("audio_video", "video"), default="audio_video")
    p.add_argument("--batches", type=int, nargs="+", default=[1])
    p.add_argument("--budgets", type=float, nargs="*", default=[0.5], help="activation memory budgets")
    p.add_argument("--append", action="store_true", help="keep the rows of other shapes in the results file")
    args = p.parse_args()
    cfg = config(args, modality=args.modality)
    rows = [row for batch in args.batches for row in measure_batch(cfg, args, Sizes(batch=batch))]
    report.show(rows)
    if not args.no_save:
        report.save(__file__, rows, report.device_name(args.device), append=args.append)


if __name__ == "__main__":
    main()
