"""What is planned: a training step of a model on a mesh."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch

from core.errors import UserError, nearest_names, raise_faults
from parallel.inventory import Model
from parallel.mesh import Sizes
from parallel.rules import Rules, check
from parallel.tensor import check_heads
from parallel.units import ShardOptions


@dataclasses.dataclass(frozen=True)
class Job:
    """A training step on a mesh.

    Args:
        sizes: of the mesh (`parallel.mesh.infer_sizes`).
        lengths: tokens of each stream of one sample.
        batch: samples of a microbatch on each data rank (`dp_replicate` x `dp_shard`).
        microbatches: per optimiser step.
        storage, compute: dtypes of leaves and of what blocks see; float32 exceptions stay so.
        ema: whether a float32 average of the weights is kept.
        trainable: by key.
        recompute: consecutive layers per recomputed group; 0 keeps all activations.
        token_timesteps: a timestep per token, as image-to-video of Wan2.2 5B has, instead of one per sample.
    """

    sizes: Sizes
    lengths: Mapping[str, int]
    batch: int = 1
    microbatches: int = 1
    options: ShardOptions = ShardOptions()
    rules: Rules = Rules()
    storage: torch.dtype = torch.float32
    compute: torch.dtype = torch.bfloat16
    ema: bool = False
    trainable: Callable[[str], bool] = lambda key: True
    recompute: int = 0
    token_timesteps: bool = False

    def size(self, *axes: str) -> int:
        """Product of the sizes of axes."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    @property
    def shards(self) -> int:
        """Ranks that share the weights."""
        return self.size("dp_shard", "sp")

    @property
    def passes(self) -> int:
        """Forward passes of a microbatch: the second one is the recomputation."""
        return 2 if self.recompute else 1

    @property
    def fsdp(self) -> bool:
        """Whether weights live in FSDP units: sharded, or replicated with averaged gradients."""
        return self.options.solo or self.size("dp_replicate", "dp_shard", "sp") > 1


def check_job(model: Model, job: Job) -> None:
    """Refuses what no run could do, in one UserError: heads that would be cut, missing lengths, counts below 1."""
    faults = []
    for name in ("batch", "microbatches"):
        if getattr(job, name) < 1:
            faults.append(f"{name} must be at least 1, got {getattr(job, name)}")
    if job.options.modules_per_group < 1:
        faults.append(f"modules_per_group must be at least 1, got {job.options.modules_per_group}")
    if job.recompute < 0:
        faults.append(f"recompute must be at least 0, got {job.recompute}")
    faults += [f"tokens of {name} are not given" for name in model.widths if name not in job.lengths]
    for name, n in job.lengths.items():
        if name not in model.widths:
            faults.append(f"tokens of {name}: {model.name} has no such stream{nearest_names(name, model.widths)}")
        elif n < 1:
            faults.append(f"tokens of {name} must be at least 1, got {n}")
    for faulty in (lambda: check_heads(job.size("tp"), model.heads), lambda: check(model.specs, job.sizes, job.rules)):
        try:
            faulty()
        except UserError as error:
            faults.append(str(error))
    tp, sp = job.size("tp"), job.size("sp")
    if model.split and sp > 1:
        exchanged = [b for b in model.branches if b.keys and set(b.keys) & set(model.split)]
        faults += [
            f"{b.site}: {b.heads} heads over tp {tp} are {b.heads / tp:g} a rank, which sp {sp} does not divide"
            for b in exchanged
            if b.heads % (tp * sp)
        ]
    raise_faults(f"no plan for {model.name}", faults)
