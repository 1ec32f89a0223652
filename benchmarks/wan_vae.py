"""Decoding with Wan's VAE at full size, beside Diffusers' AutoencoderKLWan in the same run: time and memory.

    python benchmarks/wan_vae.py                                    # 81x480x832 in bf16, needs a GPU
    python benchmarks/wan_vae.py --preset wan2.2-vae                # 81x480x832 is then 21x30x52 latents
    python benchmarks/wan_vae.py --frames 9 --size 32 32 --base-dim 8 --device cpu --repeats 1   # a smoke run

Both sides decode the same random latents with the same random weights. Diffusers decodes one latent frame at a
time; it is measured before and after ours, and its faster time counts, since a GPU slows down as it warms up.
Ours decode all frames at once, or stream chunks of some latent frames with the feature cache, with or without
the pointwise part (norm, SiLU, joining the cache) compiled; in strips, with equal results; and on tiles. Peak memory
counts the weights, the latents and the video. The ceiling of the time is the arithmetic of the convolutions and the
attention as Diffusers does them, at the device's peak.
"""

import argparse
import dataclasses
import gc
import statistics
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from benchmarks import report  # noqa: E402
from core import devices, keys, specs  # noqa: E402
from nn import wan_vae, wan_vae_blocks  # noqa: E402
from nn.wan_vae import VaeRun  # noqa: E402
from nn.wan_vae_strips import decode_strips  # noqa: E402
from nn.wan_vae_tiling import tiled_decode  # noqa: E402

PEER, PEER_AGAIN = "AutoencoderKLWan.decode", "AutoencoderKLWan.decode, again"


def peer_decode(cfg, params, latents):
    """A closure that decodes with Diffusers' model and the same weights."""
    from diffusers import AutoencoderKLWan

    body = {k: v for k, v in wan_vae.to_json(cfg).items() if k not in ("_class_name", "clip_output")}
    with torch.device("meta"):
        model = AutoencoderKLWan(**body)
    model.load_state_dict({k: v.to(latents.device) for k, v in params.items()}, strict=True, assign=True)
    raw = wan_vae.denormalise(cfg, latents)
    return lambda: model.eval().decode(raw, return_dict=False)[0]


def our_variants(cfg, latents, chunks, strips, tile) -> dict:
    """Name -> a function of the weights on the CPU that makes the closure, which holds them on the device."""
    eager, compiled = VaeRun(), VaeRun(activate=torch.compile(wan_vae_blocks.activate, dynamic=True))

    def placed(params, layout=wan_vae.channels_last):
        return layout({k: v.to(latents.device) for k, v in params.items()})

    def streamed(chunk, run, layout=wan_vae.channels_last):
        def make(params):
            weights = placed(params, layout)
            return lambda: wan_vae.decode(weights, cfg, latents, chunk=chunk, run=run)

        return make

    def tiled(params):
        weights, overlap = placed(params), tuple(n // 4 for n in tile)
        return lambda: tiled_decode(weights, cfg, latents, tile=tile, overlap=overlap, chunk=1, run=compiled)

    def stripped(strips, chunk):
        def make(params):
            weights = placed(params)
            return lambda: decode_strips(weights, cfg, latents, strips=strips, chunk=chunk)

        return make

    out = {"chunks of 1, channels first": streamed(1, eager, dict)}
    for chunk in (*chunks, None):
        name = "at once" if chunk is None else f"chunks of {chunk}"
        out |= {name: streamed(chunk, eager), f"{name}, compiled": streamed(chunk, compiled)}
    for count, chunk in strips:
        out[f"{count} strips, chunks of {chunk}"] = stripped(count, chunk)
    out[f"tiles of {tile[0]}x{tile[1]}, chunks of 1, compiled"] = tiled
    return out


@dataclasses.dataclass(frozen=True)
class Measured:
    """Median seconds, peak memory in GiB, and the video on the CPU."""

    seconds: float
    peak_gib: float
    video: torch.Tensor


@torch.no_grad()
def measure(make, device, repeats: int) -> Measured | None:
    """Runs a closure; None (with the error on stderr) when it does not fit."""
    gc.collect()
    devices.empty_cache(device)
    try:
        decode = make()
        video = decode().float().cpu()
        devices.synchronize(device)
        devices.reset_peak_memory(device)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            decode()
            devices.synchronize(device)
            times.append(time.perf_counter() - start)
        peak = devices.memory_stats(device)["peak_bytes"] / 2**30
        return Measured(statistics.median(times), peak, video)
    except torch.OutOfMemoryError as error:
        print(f"  out of memory: {str(error)[:160]}", file=sys.stderr)
    except Exception:
        traceback.print_exc(limit=3)
    return None


def count_flops(cfg, latents) -> int:
    """Multiply-adds times two of one decode as Diffusers does it, counted on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    meta = {k: v.to(latents.dtype) for k, v in specs.abstract(wan_vae.param_specs(cfg)).items()}
    with FlopCounterMode(display=False) as counter:
        peer_decode(cfg, meta, latents.to("meta"))()
    return counter.get_total_flops()


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="wan2.1-vae", choices=wan_vae.PRESETS)
    parser.add_argument("--base-dim", type=int, help="another width of both halves, for smoke runs")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--size", type=int, nargs=2, default=(480, 832), help="height and width in pixels")
    parser.add_argument("--chunks", type=int, nargs="*", default=(1, 2, 4), help="latent frames per chunk")
    parser.add_argument("--strips", nargs="*", default=("2x1", "4x1", "4x2", "8x1", "8x2"), help="strips x chunk")
    parser.add_argument("--tile", type=int, nargs=2, help="height and width in latent pixels; default half the picture")
    parser.add_argument("--device", type=devices.resolve, default=devices.preferred_device())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of variants to run")
    parser.add_argument("--no-save", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measures every variant and writes the results."""
    args = parse()
    cfg, device = wan_vae.PRESETS[args.preset], args.device
    if args.base_dim is not None:
        cfg = dataclasses.replace(cfg, base_dim=args.base_dim, decoder_base_dim=None)
    dtype = devices.default_compute_dtype(device)
    size = [n // cfg.scale_factor_spatial for n in args.size]
    frames = (args.frames - 1) // cfg.scale_factor_temporal + 1
    latents = keys.normal(keys.key(0), (1, cfg.z_dim, frames, *size), dtype=dtype, device=device)
    fresh = {k: v.to(dtype) for k, v in specs.init(wan_vae.param_specs(cfg), keys.key(1)).items()}
    tile = tuple(args.tile) if args.tile else tuple(-(-n // 2) for n in size)

    strips = [tuple(map(int, text.split("x"))) for text in args.strips]
    # One graph per layout and per start of a video or not, over all resolutions: more than the default of 8.
    torch._dynamo.config.recompile_limit = 64
    makers = {PEER: lambda: peer_decode(cfg, fresh, latents)}
    for name, make in our_variants(cfg, latents, args.chunks, strips, tile).items():
        makers[name] = lambda make=make: make(fresh)
    makers[PEER_AGAIN] = makers[PEER]
    results = {}
    for name, make in makers.items():
        if args.only and name not in args.only:
            continue
        results[name] = got = measure(make, device, args.repeats)
        if got is not None:
            print(f"{name}: {got.seconds:.3f} s, peak {got.peak_gib:.2f} GiB{difference(got, results)}", flush=True)
    peak = devices.peak_flops(device)
    floor = None if peak is None else count_flops(cfg, latents) / peak
    rows = compare(results, f"{args.preset}, {args.frames}x{args.size[0]}x{args.size[1]}, {dtype}", floor)
    report.show(rows)
    if not args.no_save:
        report.save(__file__, rows, report.device_name(device))


def difference(got: Measured, results: dict) -> str:
    """Root mean square of the difference from the peer's video, in levels of 8 bits."""
    peer = results.get(PEER)
    if peer is None or peer is got:
        return ""
    return f", differs by {127.5 * (got.video - peer.video).square().mean().sqrt():.3f} of 255 levels"


def compare(results: dict, shape: str, floor: float | None) -> list[dict]:
    """Rows of time and peak memory of each of our variants against the peer."""
    peers = [m for m in (results.get(PEER), results.get(PEER_AGAIN)) if m is not None]
    peer = min(peers, key=lambda m: m.seconds) if peers else None
    rows = []
    for name, got in results.items():
        if name in (PEER, PEER_AGAIN) or got is None:
            continue
        figures = [
            ("decode time", "s", lambda m: m.seconds, floor),
            ("peak memory", "GiB", lambda m: m.peak_gib, None),
        ]
        for op, unit, f, ceiling in figures:
            value = None if peer is None else f(peer)
            row = report.row(
                f"{op}, {name}", shape, f(got), unit, PEER, value, smaller_is_better=True, ceiling=ceiling
            )
            rows.append(row)
    return rows


if __name__ == "__main__":
    main()
