"""A training step of Wan on a mesh beside its plan: step time, exposed communication, bytes per rank, the network.

    python benchmarks/parallel.py                                           # one GPU: FSDP2 at world size 1, and plain
    torchrun --nproc-per-node 8 benchmarks/parallel.py --dp-shard 4 --sp 2  # a mesh; axes as in parallel.plan
    torchrun --nproc-per-node 2 benchmarks/parallel.py --toy --device cpu --tp 2    # a smoke run

Forward, backward and AdamW on FP32 masters with BF16 compute, 81x480x832, one sample per data rank. First a health
gate: an all-reduce has the right sum, and its bandwidth on the bus is measured. A step counts as long as its slowest
rank takes; the median of the steps is reported. Exposed communication (GPU only) is the time of one traced step in
which collectives run and nothing else does. Memory and time stand beside what `parallel.plan` predicts for the same
mesh. One process measures FSDP2 over itself between two runs of the plain step, with equal compile and recompute.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks import report  # noqa: E402
from benchmarks.network import health, slowest, traced  # noqa: E402
from benchmarks.train_step import LR, batch, our_step  # noqa: E402
from core import devices, keys, specs  # noqa: E402
from core.checkpoint import LazyLeaf  # noqa: E402
from core.errors import exit_status  # noqa: E402
from core.scan import compiled, recompute, scan  # noqa: E402
from kernels import Attention  # noqa: E402
from nn import wan  # noqa: E402
from nn.run import Run  # noqa: E402
from nn.wan_inputs import model_inputs, noised, timestep_of, velocity_target  # noqa: E402
from parallel.costs import compute_of  # noqa: E402
from parallel.inventory import wan_model  # noqa: E402
from parallel.job import Job  # noqa: E402
from parallel.launch import World, processes  # noqa: E402
from parallel.mesh import Mesh, build_mesh, infer_sizes  # noqa: E402
from parallel.norms import local  # noqa: E402
from parallel.plan import add_axes, add_options, given_axes, options_of  # noqa: E402
from parallel.sequence import sequence_parallel  # noqa: E402
from parallel.tables import said_mesh  # noqa: E402
from parallel.tensor import tensor_parallel  # noqa: E402
from parallel.traffic import Hardware, Plan, make_plan  # noqa: E402
from parallel.units import fill, shard  # noqa: E402
from train import optim  # noqa: E402

PLAIN, FSDP, AGAIN = "plain", "FSDP2 at world size 1", "plain, again"
# A toy with the shape of the model, for smoke runs.
TOY = {"num_attention_heads": 4, "attention_head_dim": 12, "ffn_dim": 64, "num_layers": 3, "text_dim": 16}
TOY_GRID, TOY_TEXT = (2, 4, 4), 8


# --- steps ------------------------------------------------------------------------------------------------------------


def drawn(model: specs.Specs) -> dict[str, LazyLeaf]:
    """The starting weights of `specs.init`, each drawn when it is read."""
    leaf = lambda name, s: specs.draw(s, keys.fold_in(keys.key(0), name))  # noqa: E731
    return {k: LazyLeaf(s.shape, s.dtype, lambda _, k=k, s=s: leaf(k, s)) for k, s in model.items()}


def sharded_step(cfg, mesh: Mesh, job: Job, run: Run, data) -> tuple[Callable[[], torch.Tensor], int]:
    """A closure that makes one step on the mesh and returns the loss, and the bytes of weights that this rank holds."""
    model = wan.param_specs(cfg)
    compute = {k: compute_of(s, job) for k, s in model.items()}
    sharded = shard(model, mesh, stacks=wan.STACKS, compute=compute, options=job.options)
    fill(sharded.params, drawn(model))
    state, opt = optim.adamw_init(sharded.params), optim.AdamW()
    clean, noise, sigma, text = data
    inputs = model_inputs(cfg, noised(clean, noise, sigma), timestep_of(sigma), {"text": text}, dtype=job.compute)
    target = velocity_target(clean, noise)

    def step():
        total = 0.0
        for i in range(job.microbatches):
            sharded.microbatch(i == job.microbatches - 1)
            out = sharded(lambda p: wan.forward(p, cfg, inputs, run=run))
            loss = (out.float() - target).square().mean() / job.microbatches
            loss.backward()
            total = total + loss.detach()
        optim.adamw_update(opt, {k: p.grad for k, p in sharded.params.items()}, state, sharded.params, LR)
        for p in sharded.params.values():
            p.grad = None
        return total

    return step, sum(local(p).nbytes for p in sharded.params.values())


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step: seconds of its slowest rank (median), peak bytes of the rank that needs most, the first and last loss,
    bytes of weights, and of a traced step the seconds of communication, all and exposed."""

    seconds: float
    peak: int
    losses: tuple[float, float]
    weights: int
    communication: tuple[float, float] | None


Made = tuple[Callable[[], torch.Tensor], int]


def measure(make: Callable[[], Made], mesh: Mesh, warmup: int, steps: int) -> Measured:
    """Makes a step and runs it."""
    device = mesh.device
    torch._dynamo.reset()
    devices.empty_cache(device)
    devices.reset_peak_memory(device)
    step, weights = make()
    losses, times = [step() for _ in range(warmup)], []
    devices.synchronize(device)
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(step())
        devices.synchronize(device)
        times.append(time.perf_counter() - start)
    peak = devices.memory_stats(device)["peak_bytes"]
    found = [int(n) for n in slowest([peak, weights], mesh)]
    return Measured(
        statistics.median(slowest(times, mesh)), found[0], (float(losses[0]), float(losses[-1])), found[1],
        traced(step, device) if mesh.world > 1 else None,
    )  # fmt: skip


@contextlib.contextmanager
def lone_group(device: torch.device):
    """A process group of this process alone, which FSDP2 needs even then."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=600)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- rows -------------------------------------------------------------------------------------------------------------


def said(name: str, got: Measured, tokens: int) -> str:
    """A variant's figures in a line."""
    parts = [f"{got.seconds:.4f} s/step", f"{tokens / got.seconds:,.0f} tokens/s", f"peak {got.peak / 2**30:.2f} GiB"]
    if got.communication is not None:
        parts.append(f"communication {got.communication[0]:.4f} s, exposed {got.communication[1]:.4f} s")
    return f"{name}: {', '.join(parts)}, loss {got.losses[0]:.4f} -> {got.losses[1]:.4f}"


def against_plan(got: Measured, plan: Plan, shape: str, floor: float | None) -> list[dict]:
    """A mesh beside its plan. Times are compared where the peak rate of the device is known."""
    known = floor is not None
    row = functools.partial(report.row, shape=shape, smaller_is_better=True)
    waited = plan.waited + max(0.0, plan.hidden - plan.compute)
    rows = [
        row("step time, slowest rank", ours=got.seconds, unit="s", peer="plan", peer_value=plan.step if known else None,
            ceiling=floor),
        row("weights per rank", ours=got.weights / 2**30, unit="GiB", peer="plan",
            peer_value=plan.memory.held.get("weights", 0) / 2**30, ceiling=None),
    ]  # fmt: skip
    if known:
        rows.append(row("peak memory per rank", ours=got.peak / 2**30, unit="GiB", peer="plan",
                        peer_value=plan.memory.peak / 2**30, ceiling=None))  # fmt: skip
    if got.communication is not None:
        total, alone = got.communication
        rows.append(row("exposed communication", ours=alone, unit="s", peer="plan", peer_value=waited, ceiling=None))
        rows.append(row("communication", ours=total, unit="s", peer="plan", peer_value=sum(plan.seconds), ceiling=None))
    return rows


def against_plain(results: dict[str, Measured], shape: str, floor: float | None) -> list[dict]:
    """FSDP2 over one process beside the faster of the plain runs."""
    plain, ours = min((results[PLAIN], results[AGAIN]), key=lambda m: m.seconds), results[FSDP]
    row = functools.partial(report.row, shape=shape, peer=PLAIN, smaller_is_better=True)
    return [
        row(f"step time, {FSDP}", ours=ours.seconds, unit="s", peer_value=plain.seconds, ceiling=floor),
        row(f"peak memory, {FSDP}", ours=ours.peak / 2**30, unit="GiB", peer_value=plain.peak / 2**30, ceiling=None),
    ]


# --- the command line -------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--preset", default="wan2.1-t2v-1.3b", choices=[n for n, cfg in wan.PRESETS.items() if cfg.image_dim is None])
    add("--layers", type=int, help="fewer layers")
    add("--toy", action="store_true", help="a toy of the model, for smoke runs: nothing is compiled or saved")
    add("--grid", type=int, nargs=3, default=(21, 30, 52), help="tokens in time, height, width")
    add("--text-len", type=int, default=512)
    add("--batch", type=int, default=1, help="samples of a microbatch per data rank")
    add("--microbatches", type=int, default=1)
    add("--recompute", type=int, default=0, help="layers per recomputed group; 0 keeps all activations")
    add("--no-compile", action="store_true")
    add("--attention", default="auto")
    add("--device", help="cuda or cpu; left out: the best there is")
    add("--warmup", type=int, default=3)
    add("--steps", type=int, default=6)
    add("--payload", type=int, default=256, help="MiB of the health gate's all-reduce")
    add("--label", help="name of the results file's end; left out: the mesh")
    add("--no-save", action="store_true")
    add_axes(p.add_argument_group("mesh"))
    add_options(p.add_argument_group("sharding"))
    return p


def config_of(args) -> wan.WanConfig:
    """The model, a toy of it, or one of fewer layers."""
    cfg = wan.PRESETS[args.preset]
    if args.toy:
        cfg = dataclasses.replace(cfg, **TOY)
        args.grid, args.text_len, args.no_compile, args.no_save = TOY_GRID, TOY_TEXT, True, True
        args.payload = min(args.payload, 1)
    return cfg if args.layers is None else dataclasses.replace(cfg, num_layers=args.layers)


def run_of(args, mesh: Mesh, tokens: int) -> Run:
    """How layers run."""
    how = scan if args.no_compile else compiled(scan)
    run = Run(
        attention=Attention(args.attention),
        scan=recompute(how, every=args.recompute) if args.recompute else how,
        tp=tensor_parallel(mesh),
    )
    return sequence_parallel(run, mesh, tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the results; bad input is an error of one line."""
    args = parser().parse_args(argv)
    return exit_status(lambda: bench(args))


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured, on which hardware. `data` is one microbatch."""

    cfg: wan.WanConfig
    job: Job
    hardware: Hardware
    data: Sequence[torch.Tensor]
    device: torch.device
    shape: str

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return make_plan(wan_model("wan", self.cfg), self.job, self.hardware)

    @property
    def floor(self) -> float | None:
        """Seconds of the arithmetic at the peak rate of the device; None where that is unknown."""
        plan = self.plan
        return None if devices.peak_flops(self.device) is None else plan.compute * plan.hardware.efficiency


def case_of(args, world: World) -> Case:
    """The case of a command line. Raises UserError for a mesh that the model does not fit."""
    cfg, device = config_of(args), world.device
    tokens = args.grid[0] * args.grid[1] * args.grid[2]
    job = Job(
        infer_sizes(world.size, {"dp_shard": -1} | given_axes(args)), {"video": tokens, "text": args.text_len},
        batch=args.batch, microbatches=args.microbatches, compute=devices.default_compute_dtype(device),
        recompute=args.recompute, options=options_of(args, solo=world.size == 1),
    )  # fmt: skip
    peak = devices.peak_flops(device)
    hardware = Hardware() if peak is None else Hardware(peak=peak)
    data = [t.repeat(args.batch, *[1] * (t.ndim - 1)) for t in batch(cfg, args.grid, args.text_len, device)]
    shape = f"{args.preset} x{cfg.num_layers} layers, {tokens} tokens x {args.batch}, {said_mesh(job.sizes)}"
    make_plan(wan_model("wan", cfg), job, hardware)  # refuses what does not fit before anything is built
    return Case(cfg, job, hardware, data, device, shape)


def bench(args) -> None:
    """One process beside the plain step, or several beside their plan."""
    with processes(args.device) as world:
        case = case_of(args, world)
        rows = lone(args, case) if world.size == 1 else several(args, case)
        if rows is not None:
            report.show(rows)
            if not args.no_save:
                mesh = said_mesh(case.job.sizes).replace(" x ", "-").replace(" ", "")
                name = f"parallel-{mesh if args.label is None else args.label}.py"
                report.save(name, rows, report.device_name(case.device))


def lone(args, case: Case) -> list[dict]:
    """Plain, FSDP2 over one process, and plain again."""
    with lone_group(case.device):
        mesh, tokens = build_mesh({}, case.device), case.job.lengths["video"]
        run = run_of(args, mesh, tokens)

        def plain() -> Made:
            params = specs.init(wan.param_specs(case.cfg), keys.key(0), device=case.device)
            weights = sum(p.nbytes for p in params.values())
            return our_step(case.cfg, params, run, case.data, case.job.compute), weights

        makers = {PLAIN: plain, FSDP: lambda: sharded_step(case.cfg, mesh, case.job, run, case.data), AGAIN: plain}
        results = {}
        for name, make in makers.items():
            results[name] = measure(make, mesh, args.warmup, args.steps)
            print(said(name, results[name], tokens * args.batch), flush=True)
    rows = against_plain(results, case.shape, case.floor)
    return rows + against_plan(results[FSDP], case.plan, f"{case.shape}, {FSDP}", case.floor)


def several(args, case: Case) -> list[dict] | None:
    """The health of the network and one mesh; rows on its first process."""
    mesh, plan, gpu = build_mesh(case.job.sizes, case.device), case.plan, case.device.type == "cuda"
    bandwidth = health(mesh, args.payload * 2**20, *((8, 32) if gpu else (1, 4)))
    run = run_of(args, mesh, case.job.lengths["video"])
    make = lambda: sharded_step(case.cfg, mesh, case.job, run, case.data)  # noqa: E731
    got = measure(make, mesh, args.warmup, args.steps)
    if not mesh.leader:
        return None
    print(said(said_mesh(case.job.sizes), got, case.job.lengths["video"] * plan.samples), flush=True)
    gate = report.row(
        "all-reduce on the bus", f"{args.payload} MiB, {mesh.world} ranks", bandwidth / 1e9, "GB/s", None, None,
        smaller_is_better=False, ceiling=case.hardware.network.inside / 1e9 if gpu else None,
    )  # fmt: skip
    return [gate, *against_plan(got, plan, case.shape, case.floor)]


if __name__ == "__main__":
    sys.exit(main())
