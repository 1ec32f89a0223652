"""`python -m parallel.plan --preset NAME ...`: where each leaf of a model lies on a mesh, and what a step costs.

Reads specs only: nothing is allocated, no process group is started, and a laptop plans for a thousand GPUs.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from core import devices
from core.errors import UserError, exit_status, nearest_names, raise_faults
from core.trees import num_params
from parallel.costs import storage_of
from parallel.inventory import GRIDS, PRESETS, Model
from parallel.job import Job
from parallel.mesh import AXES, Sizes, infer_sizes
from parallel.tables import GIB, comparison, layout_rows, layout_table, report
from parallel.traffic import Hardware, Network, Plan, make_plan
from parallel.units import ShardOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def as_json(plan: Plan) -> dict[str, Any]:
    """The numbers of a plan, unrounded: bytes and seconds."""
    m = plan.memory
    return {
        "model": plan.model.name,
        "parameters": num_params(plan.model.specs),
        "mesh": dict(plan.job.sizes),
        "memory": {**dataclasses.asdict(m), "peak": m.peak},
        "traffic": [
            {**dataclasses.asdict(f), "sent": f.sent, "seconds": s}
            for f, s in zip(plan.flows, plan.seconds, strict=True)
        ],
        "compute_seconds": plan.compute,
        "step_seconds": plan.step,
        "samples": plan.samples,
    }


LEFT_OUT = {"default": argparse.SUPPRESS}  # so that `given_axes` knows what was said


def add_axes(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """A flag for the size of each axis of the mesh."""
    for name in AXES:
        said = f"size of it; -1: what is left (default: {'-1 with --gpus' if name == 'dp_shard' else '1'})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=said, **LEFT_OUT)


def given_axes(args: argparse.Namespace) -> dict[str, int]:
    """The sizes that a command line names."""
    return {name: getattr(args, name) for name in AXES if hasattr(args, name)}


def add_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Flags of `ShardOptions`."""
    add = parser.add_argument
    add("--group", type=int, default=1, help="layers per communication group")
    add("--reduce", default="fp32", choices=DTYPES, help="dtype in which gradients are reduced")
    add("--keep-gathered", action="store_true", help="keep weights gathered after the forward pass")
    add("--accumulate", default="last", choices=("last", "sharded"), help="when microbatches are reduced")
    add("--cpu-offload", action="store_true", help="keep shards in host memory")


def options_of(args: argparse.Namespace, **others: Any) -> ShardOptions:
    """The options that a command line names; `others` have no flag."""
    return ShardOptions(
        modules_per_group=args.group, reshard_after_forward=not args.keep_gathered, reduce_dtype=DTYPES[args.reduce],
        cpu_offload=args.cpu_offload, accumulate=args.accumulate, **others,
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m parallel.plan", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = p.add_argument
    add("--preset", required=True, help=f"model: {', '.join(PRESETS)}")
    add("--layout", action="store_true", help="print where each leaf lies, instead of costs")
    add("--json", action="store_true", help="print the numbers as JSON")
    mesh = p.add_argument_group("mesh")
    several = {"default": [], "metavar": "MESH", "help": "a line for each of these meshes, such as dp_shard=8,sp=2"}
    mesh.add_argument("--compare", nargs="+", **several)
    mesh.add_argument("--gpus", type=int, help="processes (default: the product of the axes)", **LEFT_OUT)
    add_axes(mesh)
    work = p.add_argument_group("work of a step")
    grid = {"metavar": ("T", "H", "W"), "help": "video tokens (default: of 81x480x832)", **LEFT_OUT}
    work.add_argument("--grid", type=int, nargs=3, **grid)
    work.add_argument("--tokens", action="append", default=[], metavar="STREAM=N", help="tokens of another stream")
    work.add_argument("--batch", type=int, default=1, help="samples of a microbatch per data rank")
    work.add_argument("--microbatches", type=int, default=1, help="microbatches per optimiser step")
    work.add_argument("--recompute", type=int, default=1, help="layers per recomputed group; 0 keeps all activations")
    work.add_argument("--token-timesteps", action="store_true", help="a timestep per token instead of per sample")
    work.add_argument("--storage", default="fp32", choices=DTYPES, help="dtype of stored weights")
    work.add_argument("--compute", default="bf16", choices=DTYPES, help="dtype of gathered weights and activations")
    work.add_argument("--ema", action="store_true", help="keep a float32 average of the weights")
    add_options(p.add_argument_group("sharding (parallel.units.ShardOptions)"))
    hard = p.add_argument_group("hardware")
    hard.add_argument("--device", default="H200", help="GPU whose peak BF16 rate is taken, by name")
    hard.add_argument("--efficiency", type=float, default=Hardware.efficiency, help="share of the peak that is reached")
    hard.add_argument("--memory", type=float, default=Hardware.memory / GIB, help="GiB of a GPU")
    hard.add_argument("--per-node", type=int, default=Network.per_node, help="GPUs of a node")
    hard.add_argument("--inside", type=float, default=Network.inside / 1e9, help="GB/s per GPU and direction in a node")
    hard.add_argument("--between", type=float, default=Network.between / 1e9, help="GB/s per GPU to other nodes")
    hops = [x * 1e6 for x in (Network.hop_inside, Network.hop_between)]
    hard.add_argument("--hops", type=float, nargs=2, default=hops, metavar="US", help="of a hop in and between nodes")
    return p


def _lengths(args, model: Model) -> dict[str, int]:
    """Tokens of every stream: those of the grid, the model's defaults, and what `--tokens` says."""
    lengths, faults = dict(model.lengths), []
    grid = getattr(args, "grid", GRIDS[args.preset])
    if "video" in model.widths:
        lengths["video"] = grid[0] * grid[1] * grid[2]
    for said in args.tokens:
        name, equals, n = said.partition("=")
        if not equals or not n.isdecimal():
            faults.append(f"--tokens {said}: expected STREAM=N")
        lengths[name] = int(n) if n.isdecimal() else 1
    raise_faults("the command line", faults)
    return lengths


def _axes(text: str) -> dict[str, int]:
    """`dp_shard=8,sp=2` as sizes."""
    out, faults = {}, []
    for said in text.split(","):
        name, equals, n = said.partition("=")
        name = name.strip().replace("-", "_")
        if name not in AXES:
            faults.append(f"--compare {text}: no axis {name!r}{nearest_names(name, AXES)}, there are {', '.join(AXES)}")
        elif not equals or not n.strip().lstrip("-").isdecimal():
            faults.append(f"--compare {text}: expected {name}=N, got {said.strip()!r}")
        elif name in out:
            faults.append(f"--compare {text}: {name} is named twice")
        else:
            out[name] = int(n)
    raise_faults("the command line", faults)
    return out


def _sizes(args, given: Mapping[str, int]) -> Sizes:
    if hasattr(args, "gpus"):
        if args.gpus < 1:
            raise UserError(f"--gpus must be at least 1, got {args.gpus}")
        return infer_sizes(args.gpus, given if -1 in given.values() else {"dp_shard": -1} | given)
    if -1 in given.values():
        raise UserError("an axis of -1 takes what is left of --gpus, which is not given")
    return infer_sizes(math.prod(max(n, 1) for n in given.values()), given)


def _hardware(args) -> Hardware:
    peak, faults = devices.named_peak_flops(args.device), []
    if peak is None:
        names = [" ".join(words) for words, flops in devices.PEAK_FLOPS if flops is not None]
        faults.append(f"--device {args.device}: unknown, known: {', '.join(names)}{nearest_names(args.device, names)}")
    positive = ("efficiency", "memory", "per_node", "inside", "between")
    bad = [name for name in positive if not 0 < getattr(args, name) < math.inf]
    faults += [f"--{name.replace('_', '-')} must be above 0 and finite, got {getattr(args, name)}" for name in bad]
    if args.efficiency > 1:
        faults.append(f"--efficiency is a share of the peak, at most 1, got {args.efficiency}")
    faults += [f"--hops must be at least 0 us, got {us}" for us in args.hops if not 0 <= us < math.inf]
    raise_faults("the command line", faults)
    network = Network(args.per_node, args.inside * 1e9, args.between * 1e9, *(us / 1e6 for us in args.hops))
    return Hardware(network, args.memory * GIB, peak, args.efficiency)


def plans_of(args: argparse.Namespace) -> list[Plan]:
    """The plans that a command line asks for: one, or one for each mesh of `--compare`. Raises UserError."""
    if args.preset not in PRESETS:
        near = nearest_names(args.preset, PRESETS)
        raise UserError(f"--preset {args.preset}: unknown{near}; there are {', '.join(PRESETS)}")
    own = given_axes(args)
    if args.layout and (args.compare or args.json):
        raise UserError(f"--layout prints a table of one mesh; leave out --{'compare' if args.compare else 'json'}")
    if own and args.compare:
        raise UserError(f"--compare names whole meshes; leave out --{next(iter(own)).replace('_', '-')}")
    meshes = [_sizes(args, given) for given in map(_axes, args.compare)] or [_sizes(args, own)]
    hardware, model = _hardware(args), PRESETS[args.preset]()
    options = options_of(args)
    jobs = [
        Job(
            sizes, _lengths(args, model), batch=args.batch, microbatches=args.microbatches, options=options,
            storage=DTYPES[args.storage], compute=DTYPES[args.compute], ema=args.ema, recompute=args.recompute,
            token_timesteps=args.token_timesteps,
        )
        for sizes in meshes
    ]  # fmt: skip
    return [make_plan(model, job, hardware) for job in jobs]


def _print(args: argparse.Namespace) -> None:
    plans = plans_of(args)
    if args.json:
        print(json.dumps([as_json(p) for p in plans] if args.compare else as_json(plans[0]), indent=1))
    elif args.compare:
        print(comparison(plans))
    elif args.layout:
        job, model = plans[0].job, plans[0].model
        stored = {k: dataclasses.replace(s, dtype=storage_of(s, job)) for k, s in model.specs.items()}
        print(layout_table(layout_rows(stored, job.sizes, job.rules)))
    else:
        print(report(plans[0]))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; bad input is printed as `error: ...` to stderr, with exit status 2."""
    args = _parser().parse_args(argv)
    return exit_status(lambda: _print(args))


if __name__ == "__main__":
    sys.exit(main())
