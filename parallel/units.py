"""FSDP2 over the layers of a model: flat specs become sharded leaves, and layers that gather them when called.

A *unit* is the root or one layer. Its leaves of equal storage and compute dtype form a *part*, a thin module under
PyTorch's public `fully_shard`; parts of a unit are entered one inside the other, so a block sees one plain tree.
Consecutive layers share the collectives of `modules_per_group` layers. A part gathers in the compute dtype, and
its gradients are averaged over the data axes (`dp_replicate`, `dp_shard`, `sp`).

Weights of a layer are gathered for its forward, and again for its backward if `reshard_after_forward`. The root's own
leaves stay gathered from the forward to the end of the backward: the head needs them first, so that gathering them
again would not overlap with anything. Nothing stays gathered after a call without gradients, or from one call to the
next, except between the microbatches of one step if `reshard_after_forward` is false.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from core import compat, trees
from core import specs as core_specs
from core.checkpoint import LazyLeaf
from core.errors import UserError, nearest_names, raise_faults
from core.specs import Specs
from core.trees import split_key
from parallel import rules as layout
from parallel.mesh import Mesh
from parallel.modules import Part, Root, data_and_model, groups_of, make_unit, meta_leaf
from parallel.norms import local
from parallel.rules import Rules, shard_dim


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """How units communicate.

    Args:
        modules_per_group: consecutive layers that share one all-gather and one reduce-scatter; the last group may be
            shorter. Fewer launches for larger buffers and less overlap: measure.
        reshard_after_forward: free a layer's gathered weights after its forward and gather them again for its
            backward; false keeps them (more memory, fewer all-gathers), also between microbatches.
        reduce_dtype: float32, or bfloat16: gradients travel in bfloat16 where they were computed in the model's
            narrowest dtype. Sums over microbatches are float32 either way.
        cpu_offload: shards, their gradients and so the optimiser's state live in host memory.
        symmetric_memory: NCCL's symmetric-memory collectives (CUDA only).
        prefetch: groups that are gathered ahead of the running one in the forward; 0: left to PyTorch's streams.
        accumulate: `last` reduces gradients only after the last microbatch and keeps whole gradients until then;
            `sharded` reduces after each and keeps shards.
        solo: use FSDP even where no other process shares the weights, to measure what it costs by itself.
    """

    modules_per_group: int = 1
    reshard_after_forward: bool = True
    reduce_dtype: torch.dtype = torch.float32
    cpu_offload: bool = False
    symmetric_memory: bool = False
    prefetch: int = 1
    accumulate: str = "last"
    solo: bool = False


# --- what is refused, before anything is built -----------------------------------------------------------------------


def _option_faults(options: ShardOptions) -> list[str]:
    g, p = options.modules_per_group, options.prefetch
    whole = lambda n: isinstance(n, int) and not isinstance(n, bool)  # noqa: E731
    faults = []
    if not whole(g) or g < 1:
        faults.append(f"modules_per_group must be at least 1, got {g!r}")
    if not whole(p) or p < 0:
        faults.append(f"prefetch must be at least 0, got {p!r}")
    if options.reduce_dtype not in (torch.float32, torch.bfloat16):
        faults.append(f"reduce_dtype must be float32 or bfloat16, got {options.reduce_dtype}")
    if options.accumulate not in ("last", "sharded"):
        faults.append(f"accumulate must be 'last' or 'sharded', got {options.accumulate!r}")
    return faults


def _key_faults(specs: Specs, stacks: Sequence[str], compute: Mapping[str, torch.dtype]) -> list[str]:
    faults = [] if stacks else ["stacks is empty: no layer would be a unit"]
    names = {key.partition(".")[0] for key in specs}
    for name in stacks:
        found = sorted({at[0] for key in specs if (at := split_key(key, name)) is not None})
        if not found:
            faults.append(f"stack {name!r} has no layer{nearest_names(name, names)}")
        elif found != list(range(len(found))):
            faults.append(f"stack {name!r}: expected layers 0..n-1, the specs have {found}")
        lost = [k for k in specs if k.startswith(name + ".") and split_key(k, name) is None]
        faults += [f"{k} belongs to no layer of {name!r}" for k in lost]
    faults += [f"stack {name!r} is named twice" for name in sorted(set(stacks)) if list(stacks).count(name) > 1]
    tied = [k for k, s in specs.items() if s.alias_of is not None]
    faults += [f"{k} is tied to {specs[k].alias_of}: two units cannot own one leaf" for k in tied]
    faults += [f"compute dtype for {k}, which is no leaf{nearest_names(k, specs)}" for k in compute if k not in specs]
    return faults


def symmetric_faults(options: ShardOptions, mesh: Mesh, sharded: bool) -> list[str]:
    """Why NCCL's symmetric memory, where `options` ask for it, cannot be used on a mesh with `sharded` weights or not.
    """
    if not options.symmetric_memory:
        return []
    if not sharded:
        return ["symmetric_memory needs weights that are sharded: the mesh has no dp_shard, sp or dp_replicate"]
    if mesh.device.type != "cuda":
        return [f"symmetric_memory needs CUDA and NCCL, the mesh is on {mesh.device.type}"]
    if not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        return [f"symmetric_memory: FSDP2 of PyTorch {torch.__version__} has none, 2.13 does"]
    narrow = options.reduce_dtype != torch.float32 and options.accumulate == "last"
    return ["symmetric_memory would sum microbatches in bfloat16: use accumulate 'sharded'"] if narrow else []


# --- wrapping --------------------------------------------------------------------------------------------------------


class _Narrow:
    """A reduce-scatter, as FSDP2 takes one, of float32 buffers that travel in `dtype`. HSDP then sums the shards over
    replicas in float32."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, op, async_op: bool = False) -> None:
        received = output_tensor.to(self.dtype)
        compat.reduce_scatter_into(received, input_tensor.to(self.dtype), op, group)
        output_tensor.copy_(received)


def _wrap(parts: Sequence[Part], data: DeviceMesh, options: ShardOptions, narrow: bool, reshard: bool) -> None:
    """One communication group. `narrow`: whether its gradients are computed in the model's narrowest dtype."""
    part, native = parts[0], narrow and options.symmetric_memory
    wide = torch.float64 if part.compute == torch.float64 else torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=None if part.compute == part.storage else part.compute,
        # PyTorch sums microbatches in this dtype, so a narrower one is a matter of the wire alone.
        reduce_dtype=options.reduce_dtype if native else wide,
        cast_forward_inputs=False,
    )
    n = data["shard"].size()
    fully_shard(
        list(parts) if len(parts) > 1 else part,
        mesh=data,
        reshard_after_forward=reshard,
        shard_placement_fn=lambda p: Shard(shard_dim(tuple(local(p).shape), n)),
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy(data.device_type != "cpu") if options.cpu_offload else OffloadPolicy(),
    )
    if narrow and options.reduce_dtype == torch.bfloat16 and not native:
        part.set_custom_reduce_scatter(_Narrow(options.reduce_dtype))


def shard(
    specs: Specs,
    mesh: Mesh,
    *,
    stacks: Sequence[str],
    rules: Rules = Rules(),
    compute: Mapping[str, torch.dtype] | None = None,
    trainable: Callable[[str], bool] = lambda key: True,
    options: ShardOptions = ShardOptions(),
) -> "Sharded":
    """A model as sharded units on a mesh. Leaves are allocated, shard by shard, and not filled: see `fill`.

    Collective over the mesh. Without `dp_shard`, `sp` and `dp_replicate` there is no FSDP (but see `solo`): units only
    supply trees, local parts under `tp`.

    Args:
        specs: global shapes, and the dtypes that leaves are stored in.
        stacks: names of the model's stacks of layers, in the order of the forward pass (`nn.wan.STACKS`).
        rules: logical axes that are cut over `tp` and further axes.
        compute: `{key: dtype}` that blocks see; a key that is missing is used as it is stored.
        trainable: by key; integer leaves never are.
        options: see `ShardOptions`.

    Raises:
        UserError: one that lists everything that does not fit, before anything is built.
    """
    compute = {} if compute is None else compute
    raise_faults("cannot shard the model", [*_option_faults(options), *_key_faults(specs, stacks, compute)])
    layout.check(specs, mesh.sizes, rules)
    data, model = data_and_model(mesh, options.solo)
    faults = symmetric_faults(options, mesh, data is not None)
    if data is not None:
        scalars = [k for k, s in specs.items() if not s.shape and trainable(k)]
        faults += [f"{k} has no dimension: FSDP cannot shard a trainable scalar" for k in scalars]
        codes = [k for k, s in specs.items() if not compat.fsdp_takes(s.dtype)]
        faults += [f"{k} is {specs[k].dtype}: FSDP shards integers since torch 2.13 only" for k in codes]
    raise_faults("cannot shard the model", faults)

    flat = trees.layered(specs, stacks)
    make = functools.partial(meta_leaf, mesh=mesh, model=model, rules=rules)
    unit = functools.partial(make_unit, make=make, compute=compute, trainable=trainable, fsdp=data is not None)
    layers = {name: [unit(f"{name}.{i}.", tree) for i, tree in enumerate(flat.stacks[name])] for name in stacks}
    root = Root(unit("", flat.root), layers, options.modules_per_group)
    if data is not None:
        _wrap_all(root, data, options)
    root.to_empty(device="cpu" if options.cpu_offload else mesh.device)
    for part in (p for p in root.parts() if p.whole):
        part.to_empty(device=mesh.device)
    return Sharded(root, options, keys=specs, fsdp=data is not None)


def _wrap_all(root: Root, data: DeviceMesh, options: ShardOptions) -> None:
    compute = [part.compute for part in root.parts() if part.trainable]
    narrowest = min(compute, key=lambda dtype: dtype.itemsize, default=None)
    groups = [groups_of(units) for units in root.order]
    for parts in itertools.chain(*groups[1:]):
        _wrap(parts, data, options, parts[0].compute == narrowest, options.reshard_after_forward)
    for parts in groups[0]:
        _wrap(parts, data, options, parts[0].compute == narrowest, reshard=False)
    fully_shard(
        root,
        mesh=data,
        reshard_after_forward=False,
        mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
        ignored_params={p for part in root.parts() if part.whole for p in part.parameters()},
    )
    if options.symmetric_memory:
        for module in (root, *(parts[0] for parts in itertools.chain(*groups))):
            module.set_force_sum_reduction_for_comms(True)
            module.set_symm_mem_for_comm("NCCL")


# --- running ---------------------------------------------------------------------------------------------------------


class Sharded:
    """Sharded leaves, and the only way to use them: `sharded(fn, *args)` is `fn(layered, *args)` inside the FSDP root.

    `params` is `{flat key: leaf}`: DTensors, or tensors where nothing is sharded. Update them in place, between a
    backward pass and the next call; their gradients are in `.grad`, averaged over the data axes.
    """

    def __init__(self, root: Root, options: ShardOptions, *, keys: Iterable[str], fsdp: bool):
        self.root, self.options, self.fsdp = root, options, fsdp
        leaves = dict(root.named_parameters())
        self.params: dict[str, Tensor] = {key: leaves[key] for key in keys}
        # One part of each communication group: those of the root's own leaves, then of each group of layers.
        self.groups = [[parts[0] for parts in groups_of(units)] for units in root.order] if fsdp else []
        self.trainable = any(p.requires_grad for p in self.params.values())
        self._keep, self._next_keep = False, False  # gathered weights of the microbatch before, and of this one

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`fn(layered, *args, **kwargs)`; tensors in arguments and results must lie in tuples, lists or dicts.

        After an exception the next call starts afresh (since torch 2.13); the gradients of the step are lost.

        Raises UserError in inference mode: gathered weights outlive the call and could not be trained on later.
        """
        if not self.fsdp:
            return self.root(fn, *args, **kwargs)
        if torch.is_inference_mode_enabled():
            raise UserError("sharded weights cannot be gathered in inference mode: use torch.no_grad()")
        if not self._keep:
            self.reshard()
        self._prefetch(self.options.prefetch)
        try:
            out = self.root(fn, *args, **kwargs)
        except BaseException:
            if hasattr(self.root, "reset_iter_state"):
                self.root.reset_iter_state()
            raise
        finally:
            self._prefetch(0)  # layers also run in a backward pass that recomputes, where the next ones are done
        self._drop_unused()
        if not torch.is_grad_enabled():
            self.reshard()
        return out

    def microbatch(self, last: bool) -> None:
        """Says before each forward pass of a step whether it is the step's last; not needed where each is.

        Nothing is set where no leaf is trainable, so that a frozen model communicates as it did.
        """
        if not (self.fsdp and self.trainable):
            return
        self._keep, self._next_keep = self._next_keep, not last and not self.options.reshard_after_forward
        if self.options.accumulate == "last":
            self.root.set_requires_gradient_sync(last)
        if not self.options.reshard_after_forward:
            self.root.set_reshard_after_backward(last)
        if self.options.accumulate == "last":
            self.root.set_is_last_backward(last)

    def reshard(self) -> None:
        """Frees gathered weights, so that the next call sees what `params` hold."""
        for parts in self.groups:
            for part in parts:
                part.reshard()

    def _prefetch(self, ahead: int) -> None:
        for i, parts in enumerate(self.groups):
            last = parts[-1] if parts else self.root
            last.set_modules_to_forward_prefetch([p for later in self.groups[i + 1 : i + 1 + ahead] for p in later])

    def _drop_unused(self) -> None:
        """Frees weights that were fetched ahead for layers that then did not run."""
        ran = [any(unit.ran for unit in units) for units in self.root.order]
        for i, parts in enumerate(self.groups):
            if not ran[i] and any(ran[max(0, i - self.options.prefetch) : i]):
                for part in parts:
                    part.unshard()
                    part.reshard()


# --- filling ---------------------------------------------------------------------------------------------------------


def local_slices(leaf: Tensor) -> tuple[slice, ...]:
    """Which part of a leaf this process holds, one slice per dimension of its global shape: shards as `torch.chunk`
    makes them. Raises ValueError for a DTensor that holds partial sums.
    """
    bounds = [(0, n) for n in leaf.shape]
    if isinstance(leaf, DTensor):
        mesh, at = leaf.device_mesh, leaf.device_mesh.get_coordinate()
        # A strided placement cuts what the dimensions inside it left; the others cut from the outside.
        outer = [i for i, p in enumerate(leaf.placements) if not hasattr(p, "split_factor")]
        strided = [i for i, p in enumerate(leaf.placements) if hasattr(p, "split_factor")]
        for i in (*outer, *reversed(strided)):
            placement = leaf.placements[i]
            if placement.is_partial():
                raise ValueError(f"a leaf of placements {leaf.placements} holds partial sums")
            if not placement.is_replicate():
                start, stop = bounds[placement.dim]
                step = -(-(stop - start) // mesh.size(i))
                first = min(start + at[i] * step, stop)
                bounds[placement.dim] = (first, min(first + step, stop))
    return tuple(slice(start, stop) for start, stop in bounds)


@torch.no_grad()
def fill(params: Mapping[str, Tensor], tree: Mapping[str, Tensor | LazyLeaf]) -> None:
    """Copies a tree of whole or lazy leaves into sharded `params`, leaf by leaf, each process its own part.

    Raises UserError that lists all keys and global shapes that differ, before anything is read.
    """
    core_specs.check(tree, core_specs.specs_of(params), what="weights")
    memo: dict[Any, Any] = {}  # what computed leaves share
    for key, leaf in params.items():
        source, where = tree[key], local_slices(leaf)
        part = source.read(where, memo) if isinstance(source, LazyLeaf) else source[where]
        local(leaf).copy_(part)
