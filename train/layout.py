"""From `training.distributed` of a recipe to the mesh of its processes, and how they hold and run the model."""

import dataclasses
import datetime
import os
from pathlib import Path
from typing import Any

import torch

from core.errors import UserError, named, raise_faults
from core.scan import compiled, recompute, scan
from core.specs import Specs
from kernels import Attention
from nn.run import Run
from parallel import rules
from parallel.launch import Place, World, check_policy, device_of, start
from parallel.mesh import Mesh, Sizes, build_mesh, single
from parallel.sequence import heads_fault
from parallel.tensor import check_heads, tensor_parallel
from parallel.units import Sharded, ShardOptions, shard, symmetric_faults
from train.config import Distributed, Recipe
from train.families import family_of
from train.order import Share
from train.precision import FLOATS, classes, policy
from train.recompute import policy_of

DATA = ("dp_replicate", "dp_shard")  # processes along these read different samples
KEY = "training.distributed"
OF_SHARDS = (  # keys of it that say how sharded weights and their gradients are moved
    "reshard_after_forward", "fsdp_symmetric_memory", "pin_cpu_memory", "fsdp_modules_per_group", "fsdp_prefetch",
    "accumulate",
)  # fmt: skip


def start_world(recipe: Recipe, place: Place) -> World:
    """The group and the device of a process among those that are `together`.

    Raises UserError, as `parallel.launch.start`, with the key of the recipe that is at fault.
    """
    d = recipe.training.distributed
    with named(KEY):
        check_policy(d.fsdp_symmetric_memory, os.environ)
    with named("training.device"):
        device_of(recipe.training.device, place)
    return start(
        place,
        recipe.training.device,
        timeout_s=d.timeout_s,
        symmetric_memory=d.fsdp_symmetric_memory,
        traces=Path(recipe.training.checkpoint.output_dir),
    )


# --- the mesh -------------------------------------------------------------------------------------------------


def mesh_sizes(d: Distributed, world: int) -> Sizes:
    """The axes of the mesh over `world` processes.

    Raises:
        UserError: sizes that do not multiply to the number of processes, with all the numbers.
    """
    given = f"hsdp_replicate_dim {d.hsdp_replicate_dim} x hsdp_shard_dim {d.hsdp_shard_dim} x tp_size {d.tp_size}"
    if d.num_gpus not in (None, world):
        count = f"{world} process{'es are' if world > 1 else ' is'} running"
        raise UserError(f"{KEY}.num_gpus is {d.num_gpus}, {count}: start them with torchrun --nproc-per-node")
    others = d.hsdp_replicate_dim * d.tp_size
    shards = world // others if d.hsdp_shard_dim == -1 else d.hsdp_shard_dim
    if others * shards != world:
        raise UserError(f"{KEY}: {given} do not multiply to the {world} process{'es' * (world > 1)} of this run")
    if shards % d.sp_size:
        counted = f"{shards} shard{'s' * (shards > 1)}"
        raise UserError(f"{KEY}.sp_size is {d.sp_size}, it must divide the {counted} ({given} over {world})")
    return {
        "dp_replicate": d.hsdp_replicate_dim, "dp_shard": shards // d.sp_size, "sp": d.sp_size, "tp": d.tp_size
    }  # fmt: skip


def mesh_of(recipe: Recipe, world: World) -> Mesh:
    """The mesh of a run. Collective over its processes; errors as in `mesh_sizes`."""
    sizes = mesh_sizes(recipe.training.distributed, world.size)
    return single(world.device) if world.size == 1 else build_mesh(sizes, world.device)


def check_layout(recipe: Recipe, cfg: Any, mesh: Mesh) -> None:
    """Refuses a mesh that would cut heads, and keys that do nothing or cannot work on this one."""
    d, tp, sp, family = recipe.training.distributed, mesh.size("tp"), mesh.size("sp"), family_of(recipe)
    heads, faults = {name: heads for name, (heads, _) in family.heads(cfg).items()}, []
    with named(f"{KEY}.tp_size"):
        check_heads(tp, heads)
        rules.check(family.param_specs(cfg), mesh.sizes, rules.Rules())
    for n in heads.values():
        if fault := heads_fault(n // tp, n // tp, sp):
            faults.append(f"sp_size: {fault}" + (f" (of {n}, tp_size is {tp})" if tp > 1 else ""))
    if sp > 1 and not family.cut(cfg):
        faults.append(f"sp_size: {sp} processes would share the tokens of a video, which this model has none of")
    if tp > 1 and recipe.training.model.pack_attention_projections:
        faults.append("tp_size: training.model.pack_attention_projections would be cut across q, k and v; use 1")
    if mesh.size(*DATA, "sp") == 1:
        usual = {key: Distributed.model_fields[key].default for key in OF_SHARDS}
        faults += [
            f"{key}: {str(getattr(d, key)).lower()} needs weights that are sharded over several processes"
            for key, value in usual.items()
            if getattr(d, key) != value
        ]
    else:
        faults += [f"fsdp_{fault}" for fault in symmetric_faults(shard_options(d), mesh, sharded=True)]
    raise_faults(KEY, dict.fromkeys(faults))


def data_share(mesh: Mesh) -> Share:
    """Which part of a global microbatch this process reads."""
    return Share(mesh.index(*DATA), mesh.size(*DATA))


def microbatch_size(recipe: Recipe, mesh: Mesh) -> int:
    """Samples of a microbatch over all processes."""
    return recipe.training.data.train_batch_size * mesh.size(*DATA)


# --- the model ------------------------------------------------------------------------------------------------


def stored_specs(recipe: Recipe, cfg: Any) -> Specs:
    """Specs with the dtypes that weights are stored in: float32 tables stay float32. Projections are joined if asked.
    """
    stored, family = FLOATS[recipe.training.dit_precision], family_of(recipe)
    keep = lambda s: dataclasses.replace(s, dtype=torch.float32 if s.keep_fp32 else stored)  # noqa: E731
    found = {k: keep(s) for k, s in family.param_specs(cfg).items()}
    return family.pack(cfg)(found).specs if recipe.training.model.pack_attention_projections else found


def shard_options(d: Distributed) -> ShardOptions:
    """How units communicate, as the recipe says."""
    return ShardOptions(
        modules_per_group=d.fsdp_modules_per_group,
        reshard_after_forward=d.reshard_after_forward,
        reduce_dtype=FLOATS["fp32" if d.reduce_dtype is None else d.reduce_dtype],
        cpu_offload=d.pin_cpu_memory,
        symmetric_memory=d.fsdp_symmetric_memory,
        prefetch=d.fsdp_prefetch,
        accumulate=d.accumulate,
    )


def sharded_model(recipe: Recipe, cfg: Any, mesh: Mesh, compute: torch.dtype) -> Sharded:
    """The model on a mesh of several processes, its leaves allocated and not filled."""
    names, family = {dtype: name for name, dtype in FLOATS.items()}, family_of(recipe)
    table, stored = policy(recipe.training.dit_precision, names[compute]), stored_specs(recipe, cfg)
    frozen = family.frozen(recipe.models.student, cfg)
    return shard(
        stored,
        mesh,
        stacks=family.stacks,
        compute={k: table[kind].compute for k, kind in classes(stored).items()},
        trainable=lambda key: key not in frozen,
        options=shard_options(recipe.training.distributed),
    )


def layers_run(recipe: Recipe, mesh: Mesh) -> Run:
    """How the layers of training run: attention backend, compile, recomputation, tensor parallelism."""
    model = recipe.training.model
    how, kind = scan, model.enable_gradient_checkpointing_type
    if model.enable_torch_compile:
        budget = model.activation_memory_budget
        how = compiled(how, memory_budget=None if budget == 1.0 else budget)
    if kind is not None:
        how = recompute(
            how,
            every=model.gradient_checkpointing_every,
            policy=policy_of(kind),
            nth=model.gradient_checkpointing_nth,
            offload=model.activation_offload,
        )
    attention = Attention(recipe.models.student.attention_backend)
    return Run(attention=attention, scan=how, tp=tensor_parallel(mesh))


def collective_timeout(recipe: Recipe) -> datetime.timedelta:
    """How long processes wait for each other."""
    return datetime.timedelta(seconds=recipe.training.distributed.timeout_s)
