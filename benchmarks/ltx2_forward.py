"""One forward pass of LTX-2 (19B) at full size in BF16, audio and video, beside Diffusers' transformer in the same run.

    python benchmarks/ltx2_forward.py                      # needs a GPU with about 90 GiB
    python benchmarks/ltx2_forward.py --layers 2 --tiny --device cpu    # a smoke run

A denoising step without guidance: batch 1, 81 frames of 480 x 832 at 24 per second (4,290 video and 84 audio tokens),
1,024 text tokens, random weights in BF16. Ours has packed projections (`pack_projections`). Diffusers is measured with
and without compiled blocks, before and after ours, and its faster time counts. "Replayed" is our compiled model as a
recorded CUDA graph (`core.capture`). The ceiling is the arithmetic of the blocks at the device's peak.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from benchmarks import report  # noqa: E402
from benchmarks.variants import AGAIN, COMPILED, EAGER, compare_passes, measure_all  # noqa: E402
from core import devices  # noqa: E402
from core.capture import replayed  # noqa: E402
from core.scan import compiled, scan  # noqa: E402
from core.specs import specs_of  # noqa: E402
from core.transforms import apply  # noqa: E402
from core.trees import Params  # noqa: E402
from kernels import Attention  # noqa: E402
from nn import ltx2  # noqa: E402
from nn.ltx2_config import PRESETS, LTX2Config  # noqa: E402
from nn.ltx2_flops import block_flops  # noqa: E402
from nn.ltx2_formats import to_json  # noqa: E402
from nn.ltx2_inputs import StreamInputs, model_inputs  # noqa: E402
from nn.ltx2_rope import audio_positions, video_positions  # noqa: E402
from nn.ltx2_specs import pack_projections, param_specs  # noqa: E402
from nn.run import Run  # noqa: E402

FPS, SIGMA = 24.0, 0.7
TINY = {
    "num_attention_heads": 2, "attention_head_dim": 64, "cross_attention_dim": 128, "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 32, "audio_cross_attention_dim": 64, "caption_channels": 16, "in_channels": 4,
    "out_channels": 4, "audio_in_channels": 4, "audio_out_channels": 4,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What goes through the model: the grid of video tokens, audio and text tokens, and samples."""

    grid: tuple[int, int, int] = (11, 15, 26)
    audio: int = 84
    text: int = 1024
    batch: int = 1

    def tokens(self, cfg: LTX2Config) -> dict[str, int]:
        """Latent tokens of each stream of the model."""
        t, h, w = self.grid
        return {name: n for name, n in (("video", t * h * w), ("audio", self.audio)) if name in names(cfg)}


def names(cfg: LTX2Config) -> list[str]:
    """The streams of a model."""
    return [s.name for s in cfg.streams]


def config(args: argparse.Namespace, **changes) -> LTX2Config:
    """The preset with what the command line changes."""
    layers = {} if args.layers is None else {"num_layers": args.layers}
    return dataclasses.replace(PRESETS[args.preset], **(TINY if args.tiny else {}), **layers, **changes)


def weights(cfg: LTX2Config, device: torch.device, dtype: torch.dtype) -> Params:
    """Random weights, drawn where they lie: norms around 1, matrices so that activations keep their size."""
    torch.manual_seed(0)
    out = {}
    for key, spec in param_specs(cfg).items():
        stored = torch.float32 if spec.keep_fp32 and dtype != torch.float32 else dtype
        leaf = torch.empty(spec.shape, dtype=stored, device=device).normal_(0, 1 / max(1, spec.shape[-1]) ** 0.5)
        out[key] = leaf.add_(1.0) if "norm" in key else leaf
    return out


def streams(cfg: LTX2Config, sizes: Sizes, device: torch.device) -> dict[str, StreamInputs]:
    """Random inputs of every stream at one noise level."""
    torch.manual_seed(1)
    where = {"video": video_positions(cfg, sizes.grid, FPS, device=device), "audio": None}
    where["audio"] = audio_positions(cfg, sizes.audio, device=device)
    draw = lambda *shape: torch.randn(sizes.batch, *shape, device=device)  # noqa: E731
    level, counts = torch.full((sizes.batch,), 1000 * SIGMA, device=device), sizes.tokens(cfg)
    return {
        s.name: StreamInputs(draw(counts[s.name], s.in_channels), level, where[s.name], draw(sizes.text, s.text_dim))
        for s in cfg.streams
    }


def peer_model(cfg: LTX2Config, params: Params):
    """Diffusers' module around `params`, all in the dtype of the first matrix, as it runs."""
    from diffusers import LTX2VideoTransformer3DModel

    body = {k: v for k, v in to_json(cfg).items() if not k.startswith("_") and k != "use_cross_timestep"}
    with torch.device("meta"):
        model = LTX2VideoTransformer3DModel(**body)
    dtype = params["proj_in.weight"].dtype
    model.load_state_dict({k: v.to(dtype) for k, v in params.items()}, strict=True, assign=True)
    return model


def peer_inputs(cfg: LTX2Config, given: dict[str, StreamInputs], sizes: Sizes, dtype: torch.dtype) -> dict:
    """The same inputs by the names of Diffusers' forward."""
    t, h, w = sizes.grid
    out = {"num_frames": t, "height": h, "width": w, "audio_num_frames": sizes.audio, "fps": FPS, "return_dict": False}
    for name, s in given.items():
        prefix = "" if name == "video" else "audio_"
        out |= {f"{prefix}hidden_states": s.latents.to(dtype), f"{prefix}encoder_hidden_states": s.text.to(dtype)}
        out[f"{prefix}timestep"] = s.timestep[:, None].expand(-1, s.latents.shape[1])
    return out


def ours(
    cfg: LTX2Config, params: Params, given: dict[str, StreamInputs], dtype: torch.dtype, run: Run, replay: bool = False
):
    """A closure that makes one pass and returns a number of its output; `replay`: of a recording of the model."""
    inputs = model_inputs(cfg, given, dtype=dtype)
    model = lambda inputs: ltx2.forward(params, cfg, inputs, run=run)  # noqa: E731
    model = replayed(model) if replay else model
    return torch.no_grad()(lambda: sum(v.float().square().mean() for v in model(inputs).values()))


def theirs(cfg: LTX2Config, params: Params, given, sizes: Sizes, dtype: torch.dtype, compile_blocks: bool):
    """The same with Diffusers' module."""
    model, inputs = peer_model(cfg, params).eval(), peer_inputs(cfg, given, sizes, dtype)
    if compile_blocks:
        model.compile_repeated_blocks(fullgraph=True)
    return torch.no_grad()(lambda: sum(v.float().square().mean() for v in model(**inputs)))


def parser(description: str) -> argparse.ArgumentParser:
    """What the benchmarks of LTX-2 take."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--preset", default="ltx-2-19b", choices=PRESETS)
    p.add_argument("--layers", type=int, help="fewer layers")
    p.add_argument("--tiny", action="store_true", help="a narrow model, for smoke runs")
    p.add_argument("--device", type=devices.resolve, default=devices.preferred_device())
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--only", nargs="*", help="names of variants to run")
    p.add_argument("--no-save", action="store_true")
    return p


def main() -> None:
    """Measures every variant and writes the results."""
    p = parser(__doc__)
    p.add_argument("--attention", nargs="*", default=[], help="further attention backends to measure")
    args = p.parse_args()
    cfg, device, sizes = config(args), args.device, Sizes()
    dtype = devices.default_compute_dtype(device)
    params, given = weights(cfg, device, dtype), streams(cfg, sizes, device)
    bound = pack_projections(cfg)(specs_of(params))
    makers = {EAGER: lambda: theirs(cfg, params, given, sizes, dtype, False)}
    makers[COMPILED] = lambda: theirs(cfg, params, given, sizes, dtype, True)
    makers["ours"] = lambda: ours(cfg, apply(params, bound), given, dtype, Run())
    for name in ("auto", *args.attention):
        run = Run(attention=Attention(name), scan=compiled(scan))
        label = f"ours, compiled, attention {name}"
        makers[label] = lambda run=run: ours(cfg, apply(params, bound), given, dtype, run)
        makers[f"{label}, replayed"] = lambda run=run: ours(cfg, apply(params, bound), given, dtype, run, replay=True)
    makers[AGAIN] = makers[COMPILED]
    flops = block_flops(cfg, sizes.tokens(cfg), dict.fromkeys(names(cfg), sizes.text))
    peak = devices.peak_flops(device)
    results = measure_all(
        makers, device, args.warmup, args.steps, only=args.only,
        told=lambda m: f"{1e3 * m.seconds:.1f} ms, {flops / m.seconds / 1e12:.0f} TFLOP/s, {m.peak_gib:.2f} GiB, "
        f"mean square {m.losses[-1]:.6f}",
    )  # fmt: skip
    tokens = " + ".join(f"{n} {name}" for name, n in sizes.tokens(cfg).items())
    shape = f"{args.preset} x{cfg.num_layers} layers, {tokens} + {sizes.text} text tokens, {dtype}"
    rows = compare_passes(results, shape, None if peak is None else flops / peak)
    report.show(rows)
    if not args.no_save:
        report.save(__file__, rows, report.device_name(device))


if __name__ == "__main__":
    main()
