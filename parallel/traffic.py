"""Communication and arithmetic of one rank in a training step, by formula, and the time that links need for it."""

import dataclasses
import math
from collections.abc import Sequence

from parallel.costs import WIDE, Memory, groups, local_tokens, memory
from parallel.inventory import Model, forward_flops, num_layers
from parallel.job import Job, check_job
from parallel.mesh import Sizes


@dataclasses.dataclass(frozen=True)
class Flow:
    """One kind of communication in a step.

    Args:
        what: the collective and what it moves.
        axes: mesh axes of its group, of `size` ranks.
        kind: `all_gather`, `reduce_scatter`, `all_reduce` or `all_to_all`.
        calls: collectives per step.
        payload: bytes of the whole tensors of all calls: what is gathered, reduced, or handed to an all-to-all.
        hidden: whether it runs beside the arithmetic; the others are waited for.
    """

    what: str
    axes: tuple[str, ...]
    size: int
    kind: str
    calls: int
    payload: int
    hidden: bool

    @property
    def sent(self) -> int:
        """Bytes that each rank sends (and receives): `(n - 1) / n` of the payload, twice that for an all-reduce."""
        return round(self.payload * (2 if self.kind == "all_reduce" else 1) * (self.size - 1) / self.size)


@dataclasses.dataclass(frozen=True)
class Network:
    """Links of a rank: to the other ranks of its node (`per_node` in all) and to other nodes, in bytes/s each way, and
    the seconds that a message needs for one hop."""

    per_node: int = 8
    inside: float = 450e9
    between: float = 50e9
    hop_inside: float = 3e-6
    hop_between: float = 10e-6

    def seconds(self, flow: Flow, sizes: Sizes) -> float:
        """Time of a flow if both links are used at once and to their full rate.

        Of the group's n ranks m share a node. Gathering P bytes in rings, a rank receives P (n - m) / (n m) from other
        nodes, whose links the ranks of a node share evenly, and P (m - 1) / m from its own node; n - 1 hops, n / m of
        them between nodes. Reducing likewise; an all-reduce is both. An all-to-all sends each other rank its n-th of
        P, in one hop.
        """
        order = list(sizes)
        inner = math.prod(sizes[axis] for axis in order[order.index(flow.axes[-1]) + 1 :])
        n, m = flow.size, max(1, min(flow.size, self.per_node // inner))
        if flow.kind == "all_to_all":
            near, far = flow.payload * (m - 1) / n, flow.payload * (n - m) / n
            hop = self.hop_between if n > m else self.hop_inside
            return max(near / self.inside, far / self.between) + flow.calls * hop
        near, far = flow.payload * (m - 1) / m, flow.payload * (n - m) / (n * m)
        outer = n / m if n > m else 0
        hops = outer * self.hop_between + max(0, n - 1 - outer) * self.hop_inside
        once = max(near / self.inside, far / self.between) + flow.calls * hops
        return 2 * once if flow.kind == "all_reduce" else once


def traffic(model: Model, job: Job) -> list[Flow]:
    """Everything that ranks send each other in a step but scalars and the model's output: weights, gradients, and
    inside layers."""
    check_job(model, job)
    flows = (*_weight_flows(model, job), *_sequence_flows(model, job), *_tensor_flows(model, job))
    return [flow for flow in flows if flow.size > 1 and flow.calls]


def _weight_flows(model: Model, job: Job) -> list[Flow]:
    if not job.fsdp:
        return []
    units, options = groups(model, job), job.options
    root, layers = units[0], units[1:]
    gathers = 2 * job.microbatches if options.reshard_after_forward else 1
    root_gathers = job.microbatches if options.reshard_after_forward else 1
    reduces = job.microbatches if options.accumulate == "sharded" else 1
    weights = root.gathered * root_gathers + sum(g.gathered for g in layers) * gathers
    grads = sum(g.reduced for g in units) * reduces
    calls = root.parts * root_gathers + gathers * sum(g.parts for g in layers)
    learning = reduces * sum(g.learning for g in units)
    shards, copies = job.shards, job.size("dp_replicate")
    axes = ("dp_shard", "sp")
    return [
        Flow("all-gather of weights", axes, shards, "all_gather", calls, weights, True),
        Flow("reduce-scatter of gradients", axes, shards, "reduce_scatter", learning, grads, True),
        Flow("all-reduce of gradient shards", ("dp_replicate",), copies, "all_reduce", learning,
             sum(g.whole for g in units) // shards * WIDE * reduces, True),
    ]  # fmt: skip


def _sequence_flows(model: Model, job: Job) -> list[Flow]:
    """Ulysses, forward (and again) and backward: q, k, v and the output of attention within a split stream; k and v of
    a split stream that another one attends to, whose output is gathered."""
    sp, tp, e = job.size("sp"), job.size("tp"), job.compute.itemsize
    moved = calls = gathered = gathers = 0
    for b in model.branches:
        if set(b.keys) & set(model.split):
            apart = b.stream not in model.split
            tokens = sum(local_tokens(model, job, k) for k in b.keys)
            moved += (2 if apart else 4) * tokens * b.width // tp
            calls += 1 if apart else 2
            gathered += apart * local_tokens(model, job, b.stream) * b.width // tp
            gathers += apart
    times = num_layers(model) * job.microbatches * (job.passes + 1)
    return [
        Flow("all-to-all of attention", ("sp",), sp, "all_to_all", calls * times, moved * e * times, False),
        Flow("all-gather of attention", ("sp",), sp, "all_gather", gathers * times, gathered * e * times, False),
    ]


def _tensor_flows(model: Model, job: Job) -> list[Flow]:
    """The sum at the end of each branch, forward (and again), and of the gradients of its inputs, backward; norms
    across heads add one number per token both ways."""
    ahead = back = norms = calls = 0
    for b in model.branches:
        inputs = {b.stream, *b.keys}
        ahead += local_tokens(model, job, b.stream) * model.widths[b.stream]
        back += sum(local_tokens(model, job, s) * model.widths[s] for s in inputs)
        queries = (b.stream, *b.keys) if b.keys else ()
        norms += sum(local_tokens(model, job, s) for s in queries)
        calls += job.passes * (1 + len(queries)) + len(inputs) + len(queries)
    layers = num_layers(model) * job.microbatches
    bytes_ = (ahead * job.passes + back) * job.compute.itemsize + norms * WIDE * (job.passes + 1)
    size = job.size("tp")
    return [Flow("all-reduce inside layers", ("tp",), size, "all_reduce", calls * layers, bytes_ * layers, False)]


def step_flops(model: Model, job: Job) -> float:
    """FLOPs of one rank in a step: forward, twice that backward, and the forward again where it is recomputed. `tp`
    shares what lies in layers."""
    check_job(model, job)
    every, layers = (forward_flops(model, job.lengths, layers_only=only, sp=job.size("sp")) for only in (False, True))
    forward = every - layers + layers / job.size("tp")
    return (2 + job.passes) * forward * job.batch * job.microbatches


# --- a plan -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a rank runs on: memory in bytes, FLOP/s at its peak, and the share of it that a step reaches when it waits
    for nothing (measured: docs/performance.md)."""

    network: Network = Network()
    memory: float = 139 * 2**30
    peak: float = 989.4e12
    efficiency: float = 0.47


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training step by formula. `seconds` of each flow is what its links need; `compute` what the arithmetic does."""

    model: Model
    job: Job
    hardware: Hardware
    memory: Memory
    flows: Sequence[Flow]
    seconds: Sequence[float]
    compute: float

    @property
    def hidden(self) -> float:
        """Seconds of the communication that runs beside the arithmetic."""
        return sum(s for flow, s in zip(self.flows, self.seconds, strict=True) if flow.hidden)

    @property
    def waited(self) -> float:
        """Seconds of the communication that the arithmetic waits for."""
        return sum(self.seconds) - self.hidden

    @property
    def step(self) -> float:
        """Seconds of a step, if what can be hidden is hidden as far as the arithmetic lasts."""
        return max(self.compute, self.hidden) + self.waited

    @property
    def samples(self) -> int:
        """Samples of all ranks in a step."""
        return self.job.batch * self.job.microbatches * self.job.size("dp_replicate", "dp_shard")


def make_plan(model: Model, job: Job, hardware: Hardware = Hardware()) -> Plan:
    """The plan of a step. Raises UserError for what cannot be laid out, all faults at once."""
    check_job(model, job)
    flows = traffic(model, job)
    seconds = [hardware.network.seconds(flow, job.sizes) for flow in flows]
    compute = step_flops(model, job) / (hardware.peak * hardware.efficiency)
    return Plan(model, job, hardware, memory(model, job), flows, seconds, compute)
