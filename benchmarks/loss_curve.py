"""The training loss of our Wan beside Diffusers' model: same data, noise, timesteps and optimiser settings.

    python benchmarks/loss_curve.py                                   # the demo's model and clip, 500 steps, CPU
    python benchmarks/loss_curve.py --preset wan2.1-t2v-1.3b --layers 8 --steps 200 --device cuda

Needs the demo's data (`make demo`) for the small run; the large run draws Gaussian latents. Writes
docs/loss_curve-<name>.png and benchmarks/results/loss_curve-<name>.json with every loss of both sides.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from benchmarks import report  # noqa: E402
from core import devices, keys, specs  # noqa: E402
from nn import wan  # noqa: E402
from nn.config_files import parse_config  # noqa: E402
from nn.wan_formats import to_json  # noqa: E402
from nn.wan_inputs import model_inputs, noised, timestep_of, velocity_target  # noqa: E402
from train import optim  # noqa: E402
from train.data import Reader, open_dataset  # noqa: E402
from train.rows import row_type  # noqa: E402
from train.schedules import learning_rate  # noqa: E402
from train.sft import Objective, draw  # noqa: E402

SMALL = {"num_attention_heads": 8, "attention_head_dim": 32, "ffn_dim": 1024, "num_layers": 4, "in_channels": 32,
         "out_channels": 32, "text_dim": 64}  # fmt: skip
ROOT = Path(__file__).parents[1]


def clip_data(folder: Path):
    """Latents `[1, C, T, H, W]` and padded text `[1, 32, D]` of the demo's clip."""
    batch = Reader(open_dataset(folder, row_type("t2v"))).batch([0])
    text = torch.nn.functional.pad(batch.text, (0, 0, 0, 32 - batch.text.shape[1]))
    return batch.latents, text


def gaussian_data(cfg: wan.WanConfig, grid: tuple[int, int, int]):
    """Latents and text of the large run."""
    k, size = keys.key(0), [n * p for n, p in zip(grid, cfg.patch_size, strict=True)]
    latents = keys.normal(keys.fold_in(k, "latents"), (1, cfg.out_channels, *size))
    return latents, keys.normal(keys.fold_in(k, "text"), (1, 512, cfg.text_dim))


def batches(clean, text, steps: int, device):
    """`(noisy, sigma, target, text)` of every step, equal for both sides."""
    objective, k = Objective(flow_shift=3.0), keys.key(1)
    for step in range(steps):
        draws = draw(objective, k, step, 0, tuple(clean.shape))
        noise, sigma = draws.noise.to(device), draws.sigma.to(device)
        yield noised(clean, noise, sigma), sigma, velocity_target(clean, noise), text


def rate(step: int, steps: int, peak: float) -> float:
    """Linear warmup and decay, as in the demo's recipe."""
    return learning_rate(step, peak, scheduler="linear", total_steps=steps, warmup_steps=50, min_lr_ratio=0.05)


def our_losses(cfg, params, data, steps, peak, dtype) -> list[float]:
    """Losses of our functional model with our AdamW."""
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    state, opt, losses = optim.adamw_init(leaves), optim.AdamW(betas=(0.9, 0.99)), []
    for step, (noisy, sigma, target, text) in enumerate(data):
        inputs = model_inputs(cfg, noisy, timestep_of(sigma), {"text": text}, dtype=dtype)
        loss = (wan.forward(leaves, cfg, inputs).float() - target).square().mean()
        loss.backward()
        grads = {k: p.grad for k, p in leaves.items()}
        optim.clip_(grads, 1.0)
        optim.adamw_update(opt, grads, state, leaves, rate(step, steps, peak))
        for p in leaves.values():
            p.grad = None
        losses.append(loss.item())
    return losses


def their_losses(cfg, params, data, steps, peak, dtype) -> list[float]:
    """Losses of Diffusers' module with torch.optim.AdamW, under autocast for BF16."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(**{k: v for k, v in to_json(cfg).items() if not k.startswith("_")})
    model.load_state_dict(params)
    device = next(iter(params.values())).device
    model.to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.99), weight_decay=0.01)
    losses = []
    for step, (noisy, sigma, target, text) in enumerate(data):
        for group in optimiser.param_groups:
            group["lr"] = rate(step, steps, peak)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            out = model(noisy, timestep_of(sigma), text, return_dict=False)[0]
        loss = (out.float() - target).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def smoothed(values: list[float], window: int = 25) -> torch.Tensor:
    """Running mean over `window` steps."""
    return torch.tensor(values).unfold(0, min(window, len(values)), 1).mean(-1)


def plot(ours: list[float], theirs: list[float], title: str, path: Path) -> None:
    """Both curves on one axis, and their relative difference below."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    top, low = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    a, b = smoothed(ours), smoothed(theirs)
    steps = range(len(ours) - len(a), len(ours))
    top.plot(steps, b, color="#d9822b", linewidth=4, alpha=0.6, label="Diffusers")
    top.plot(steps, a, color="#2f6db3", linewidth=1.5, label="Latentree")
    top.set(yscale="log", ylabel="loss, mean of 25 steps", title=title)
    top.legend(frameon=False)
    low.plot([abs(x - y) / y for x, y in zip(ours, theirs, strict=True)], color="#8a8f98", linewidth=0.8)
    low.set(yscale="log", ylabel="relative difference", xlabel="optimiser step")
    for axis in (top, low):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Trains both sides one after the other and compares their losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "outputs/demo/data")
    parser.add_argument("--preset", choices=wan.PRESETS, help="a full-width model on Gaussian latents instead")
    parser.add_argument("--layers", type=int, default=8, help="layers of the preset")
    parser.add_argument("--grid", type=int, nargs=3, default=(5, 16, 16), help="tokens of the preset's latents")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, help="default 3e-3 for the small model, 1e-4 for a preset")
    parser.add_argument("--device", type=devices.resolve, default=torch.device("cpu"))
    args = parser.parse_args()
    if args.preset is None:
        cfg, name = parse_config(wan.WanConfig, SMALL, "the demo's model"), "demo"
        clean, text = clip_data(args.data)
    else:
        cfg, name = dataclasses.replace(wan.PRESETS[args.preset], num_layers=args.layers), args.preset
        clean, text = gaussian_data(cfg, args.grid)
    peak = args.lr if args.lr is not None else (3e-3 if args.preset is None else 1e-4)
    dtype = devices.default_compute_dtype(args.device)
    clean, text = clean.to(args.device), text.to(args.device)
    params = specs.init(wan.param_specs(cfg), keys.key(0), device=args.device)
    feed = lambda: batches(clean, text, args.steps, args.device)  # noqa: E731
    ours = our_losses(cfg, params, feed(), args.steps, peak, dtype)
    theirs = their_losses(cfg, params, feed(), args.steps, peak, dtype)
    a, b = smoothed(ours), smoothed(theirs)
    worst = ((a - b).abs() / b).max().item()
    first = max(abs(x - y) / y for x, y in zip(ours[:50], theirs[:50], strict=True))
    print(f"largest relative difference: {first:.1e} in the first 50 steps, {worst:.1%} between the running means")
    plot(ours, theirs, f"Wan ({name}), {args.steps} steps, {dtype}", ROOT / f"docs/loss_curve-{name}.png")
    rows = [
        report.row(
            f"loss, mean of the last {min(50, args.steps)} steps", f"{name}, {args.steps} steps",
            sum(ours[-50:]) / len(ours[-50:]), "mse", "diffusers", sum(theirs[-50:]) / len(theirs[-50:]),
            smaller_is_better=True, ceiling=None,
        )
    ]  # fmt: skip
    report.show(rows)
    report.save(f"loss_curve-{name}.py", rows, report.device_name(args.device))
    path = ROOT / f"benchmarks/results/loss_curve-{name}.json"
    data = json.loads(path.read_text())
    data["losses"] = {"ours": ours, "diffusers": theirs}
    path.write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    main()
