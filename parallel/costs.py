"""Memory of one rank in a training step, by formula: nothing is allocated and no process group is needed.

What the formulas leave out, a few GB on a GPU: the CUDA context, buffers of NCCL, temporaries of single operators, and
what the allocator cannot use.
"""

import dataclasses
import math
from collections.abc import Mapping

import torch

from core.specs import ParamSpec
from core.trees import split_key
from parallel.inventory import Branch, Model, num_layers
from parallel.job import Job, check_job
from parallel.rules import local_shape, mesh_dims, shard_dim

WIDE = torch.float32.itemsize  # of gradients, moments, averages and statistics


# --- leaves -------------------------------------------------------------------------------------------------------


def shard_numel(spec: ParamSpec, job: Job) -> int:
    """Elements of a leaf on the rank that holds most, which is what FSDP pads every shard to."""
    shape, n = list(local_shape(spec, job.sizes, job.rules)), mesh_dims(job.sizes).get("shard", 1)
    if shape and n > 1:
        dim = shard_dim(tuple(shape), n)
        shape[dim] = -(-shape[dim] // n)
    return math.prod(shape)


def gathered_numel(spec: ParamSpec, job: Job) -> int:
    """Elements of a leaf when it is gathered for use, padding included."""
    return shard_numel(spec, job) * (mesh_dims(job.sizes).get("shard", 1) if spec.shape else 1)


def storage_of(spec: ParamSpec, job: Job) -> torch.dtype:
    """The dtype that a leaf is stored in."""
    return torch.float32 if spec.keep_fp32 else job.storage


def compute_of(spec: ParamSpec, job: Job) -> torch.dtype:
    """The dtype that a block sees a leaf in."""
    return torch.float32 if spec.keep_fp32 else job.compute


def _travels(spec: ParamSpec, job: Job) -> torch.dtype:
    """The dtype that gradients are reduced in: float32 exceptions stay so."""
    return job.options.reduce_dtype if compute_of(spec, job) == job.compute else torch.float32


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that are gathered together: the root's own, or those of consecutive layers."""

    name: str
    keys: tuple[str, ...]
    parts: int  # collectives: one for each pair of storage and compute dtype
    learning: int  # those of them with trainable leaves
    stored: int  # bytes of a rank's shards
    gathered: int  # bytes in the compute dtype
    own: int  # trainable elements of a rank's shards
    whole: int  # and when gathered
    reduced: int  # bytes of their gradients as they travel


def groups(model: Model, job: Job) -> list[Group]:
    """Communication groups in the order of the forward pass: the root, then `modules_per_group` layers each."""
    layers: dict[tuple[str, int], list[str]] = {}
    root = []
    for key, spec in model.specs.items():
        at = next(((name, i[0]) for name in model.stacks if (i := split_key(key, name)) is not None), None)
        if spec.alias_of is None:
            (root if at is None else layers.setdefault(at, [])).append(key)
    out, g = [_group("root", root, model, job)], job.options.modules_per_group
    for name in model.stacks:
        indices = sorted(i for stack, i in layers if stack == name)
        for first in range(0, len(indices), g):
            chunk = indices[first : first + g]
            keys = [key for i in chunk for key in layers[name, i]]
            label = f"{name}.{chunk[0]}" + (f"-{chunk[-1]}" if len(chunk) > 1 else "")
            out.append(_group(label, keys, model, job))
    return out


def _group(name: str, keys: list[str], model: Model, job: Job) -> Group:
    leaves = [(key, model.specs[key]) for key in keys]
    dtypes = lambda chosen: len({(storage_of(s, job), compute_of(s, job)) for k, s in leaves if chosen(k)})  # noqa: E731
    return Group(
        name,
        tuple(keys),
        parts=dtypes(lambda key: True),
        learning=dtypes(job.trainable),
        stored=sum(shard_numel(s, job) * storage_of(s, job).itemsize for _, s in leaves),
        gathered=sum(gathered_numel(s, job) * compute_of(s, job).itemsize for _, s in leaves),
        own=sum(shard_numel(s, job) for key, s in leaves if job.trainable(key)),
        whole=sum(gathered_numel(s, job) for key, s in leaves if job.trainable(key)),
        reduced=sum(gathered_numel(s, job) * _travels(s, job).itemsize for key, s in leaves if job.trainable(key)),
    )


# --- activations --------------------------------------------------------------------------------------------------


def local_tokens(model: Model, job: Job, stream: str) -> int:
    """Tokens of a stream in a microbatch of one rank, with the padding of sequence parallelism."""
    sp = job.size("sp") if stream in model.split else 1
    return job.batch * -(-job.lengths[stream] // sp)


def kept_by(branch: Branch, model: Model, job: Job) -> int:
    """Bytes that one branch keeps for its backward pass, with the fused kernels and without recomputation.

    In units of its tokens' width: the norm's output and the new residual, and with a gate the branch's output; and the
    two statistics of the norm in float32. An MLP keeps its hidden layer before and after the activation. For
    attention see `_kept_by_attention`.
    """
    e, tokens = job.compute.itemsize, local_tokens(model, job, branch.stream)
    kept = tokens * ((2 + branch.gated) * model.widths[branch.stream] * e + 2 * WIDE)
    if branch.keys:
        return kept + _kept_by_attention(branch, model, job)
    return kept + tokens * 2 * (branch.width // job.size("tp")) * e


def _kept_by_attention(branch: Branch, model: Model, job: Job) -> int:
    """Queries before and after their norm, keys likewise, values, and the output; a number of each norm and of each
    head (its log-sum-exp) in float32.

    Several contexts have an output each, and their sum. Under `tp` the norm across heads keeps two float32 tensors in
    place of its input. Under `sp` an exchanged output is kept beside what it was exchanged for. A gate of heads keeps
    the gated output, the gates and their sigmoid. Keys of another stream have a norm of their own; a context that is
    scaled anew is kept in float32, and scaled.
    """
    e, tp, sp = job.compute.itemsize, job.size("tp"), job.size("sp")
    width, heads, contexts = branch.width // tp, branch.heads // tp, len(branch.keys)
    normed = width * e if tp == 1 else 2 * width * WIDE
    outputs = contexts + (contexts > 1) + branch.head_gates
    scores = heads * contexts * WIDE
    queries = normed + (1 + outputs) * width * e + 2 * heads * e * branch.head_gates + WIDE
    if sp > 1 and set(branch.keys) & set(model.split):
        apart = branch.stream not in model.split  # then its queries are whole on every rank, which takes some heads
        queries += width * e // (sp if apart else 1)
        scores //= sp if apart else 1
    total = local_tokens(model, job, branch.stream) * (queries + scores)
    residual = {b.stream for b in model.branches}
    for stream in branch.keys:
        keys = normed + 2 * width * e + WIDE
        if stream in residual and stream != branch.stream:
            keys += model.widths[stream] * e + 2 * WIDE
        if stream not in residual and model.context_rows:
            keys += model.widths[stream] * (e + WIDE)
        total += local_tokens(model, job, stream) * keys
    return total


def layer_activations(model: Model, job: Job) -> int:
    """Bytes that one layer keeps for its backward pass: those of its branches, and its modulation in float32."""
    per = {s: local_tokens(model, job, s) if job.token_timesteps else job.batch for s in model.rows}
    modulation = sum(per[s] * rows * model.widths[s] * WIDE for s, rows in model.rows.items())
    return modulation + sum(kept_by(b, model, job) for b in model.branches)


def _residuals(model: Model, job: Job) -> int:
    streams = {b.stream for b in model.branches}
    return sum(local_tokens(model, job, s) * model.widths[s] * job.compute.itemsize for s in streams)


def running_activations(model: Model, job: Job) -> dict[str, int]:
    """Bytes of the layers whose backward pass runs: what they keep, and gradients of an MLP's hidden layer and of the
    residual before and after it (by the time that these are there, their neighbours are freed)."""
    if not model.branches:
        return {}
    n = min(max(1, job.recompute), num_layers(model))
    mlp = max(local_tokens(model, job, b.stream) * b.width // job.size("tp") for b in model.branches if not b.keys)
    return {
        "activations of the running layers": n * layer_activations(model, job),
        "their gradients": mlp * job.compute.itemsize + 2 * _residuals(model, job),
    }


def waiting_activations(model: Model, job: Job) -> dict[str, int]:
    """Bytes of what waits when the backward pass begins: the other layers' activations, or with recomputation the
    residual before each of the other groups of layers; and contexts, which are kept before, within and after their
    projection."""
    if not model.branches:
        return {}
    layers, e = num_layers(model), job.compute.itemsize
    streams = {b.stream for b in model.branches}
    contexts = sum(local_tokens(model, job, s) * 3 * width * e for s, width in model.widths.items() if s not in streams)
    if job.recompute:
        waiting = {"residuals before other groups": (-(-layers // job.recompute) - 1) * _residuals(model, job)}
    else:
        waiting = {"activations of other layers": (layers - 1) * layer_activations(model, job)}
    return waiting | {"contexts": contexts}


# --- memory -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one rank by purpose: held all the time; and beside that when the last backward pass begins, when it
    reaches the first layer (activations are gone, gradients are there), and when the optimiser updates; and what is in
    host memory."""

    held: Mapping[str, int]
    begin: Mapping[str, int]
    end: Mapping[str, int]
    update: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def peak(self) -> int:
        """The largest of the three moments, with what is held."""
        return sum(self.held.values()) + max(sum(part.values()) for part in (self.begin, self.end, self.update))


def memory(model: Model, job: Job) -> Memory:
    """Memory of one rank (the one with the largest shards).

    * weights, moments (two), average: shards of all or of the trainable leaves;
    * gathered weights: the root, the running group and the one that is fetched ahead; every group if they stay after
      the forward. Without FSDP: weights in the compute dtype, which layers keep for their backward;
    * gradients of two groups: the float32 buffer that is reduced while the next group runs, and the gradients of that
      one in the compute dtype, as far as they need more than the activations whose place they take;
    * gradients of earlier microbatches in float32: whole if `accumulate` is `last`, else shards;
    * activations: see `running_activations` and `waiting_activations`;
    * gradients: shards in float32.

    With `cpu_offload` shards are in host memory.
    """
    check_job(model, job)
    units, offload = groups(model, job), job.fsdp and job.options.cpu_offload
    own = [WIDE * g.own for g in units]
    held = {"weights": sum(g.stored for g in units), "moments": 2 * sum(own)}
    held["average of the weights"] = WIDE * sum(shard_numel(s, job) for s in model.specs.values()) if job.ema else 0
    running = running_activations(model, job)
    reduced = {"gradients of two groups": _reduced(units, job, sum(running.values()))}
    begin = _gathered(units, job, first=True) | reduced | running | waiting_activations(model, job)
    begin |= _earlier(units, job)
    earlier = "gradients of earlier microbatches" in begin  # which the last one's are added to
    end = _gathered(units, job, first=False) | reduced | running
    layers = num_layers(model)
    others = max(0, layers - max(1, job.recompute))
    end["gradients"] = 0 if offload else sum(own) if earlier else sum(own[1:]) * others // max(1, layers)
    update = {"gradients": sum(own)}
    host = held | update if offload else {}
    parts = ({} if offload else held, begin, end, {} if offload else update, host)
    return Memory(*({name: n for name, n in part.items() if n} for part in parts))


def _reduced(units: list[Group], job: Job, activations: int) -> int:
    largest = max((g.whole for g in units[1:]), default=0)
    return WIDE * largest + max(0, job.compute.itemsize * largest - activations) if job.fsdp else 0


def _earlier(units: list[Group], job: Job) -> dict[str, int]:
    """Gradients of the microbatches before the last one."""
    if job.microbatches == 1:
        return {}
    if job.fsdp and job.options.accumulate == "last":
        return {"whole gradients of earlier microbatches": WIDE * sum(g.whole for g in units)}
    return {"gradients of earlier microbatches": WIDE * sum(g.own for g in units)}


def _gathered(units: list[Group], job: Job, *, first: bool) -> dict[str, int]:
    """Gathered weights; `first`: when the backward pass begins, else at its last group."""
    layers, every = sorted(g.gathered for g in units[1:]), len(units)
    if not job.fsdp:
        cast = job.storage != job.compute
        count = max(1, job.recompute) if job.recompute or not first else every
        return {"weights in the compute dtype": cast * (units[0].gathered + sum(layers[-count:]))}
    count = 1 if not first else 2 if job.options.reshard_after_forward else every
    return {"gathered weights": units[0].gathered + sum(layers[-count:])}
