"""Training steps of a model on fake tensors: what the device's kernels would keep, hold and send, with no memory.

Kernels run their shape rules only, so that a step of any size is traced on any machine. Where there is no GPU, the
Triton kernels are asked for by name, as `auto` would take the references there.
"""

import functools
from collections import Counter
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from core.trees import tensors
from kernels import Attention
from nn import layers, ltx2, wan
from nn.ltx2_config import LTX2Config
from nn.run import Run
from parallel import rules
from parallel.collectives import Group
from parallel.costs import compute_of, storage_of
from parallel.inventory import Model
from parallel.job import Job
from parallel.sequence import SequenceTokens, Ulysses
from parallel.tensor import GroupTensorParallel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NORMS = [(model, name) for model in (wan, ltx2) for name in ("norm_modulate", "residual_gate_norm", "gated_residual")]
NORMS += [(layers, "norm_rope"), (layers, "qk_norm_rope")]


@contextmanager
def fused_norms(monkeypatch):
    """The kernels that a GPU runs, on any device."""
    with monkeypatch.context() as m:
        for module, name in NORMS:
            m.setattr(module, name, functools.partial(getattr(module, name), backend="triton"))
        yield


class Traced(TorchDispatchMode):
    """Bytes of the live tensors, at most and after each operator, and the bytes that collectives move by name."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.sent, self.calls = {}, 0, Counter(), Counter()

    @property
    def now(self) -> int:
        """Bytes of the storages that are alive, at the sizes that they have now (FSDP frees by resizing)."""
        total = 0
        for key, ref in list(self.live.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self.live[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        new = [t.untyped_storage() for t in tensors(out) if t.device.type != "meta"]
        new = {s._cdata: s for s in new if s._cdata not in self.live}
        self.live |= {key: StorageWeakRef(s) for key, s in new.items()}
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in func.name():
            self._count(func.name().partition("::")[2], args)
        if new or func.namespace in ("fsdp", "c10d"):  # FSDP resizes storages before these
            self.peak = max(self.peak, self.now)
        return out

    def _count(self, name, args) -> None:
        self.calls[name] += 1
        self.sent[name] += max(t.numel() * t.element_size() for t in tensors(args))


def fake_params(model: Model, job: Job, dtype_of=storage_of):
    """The leaves that one rank holds under `tp` alone."""
    local = rules.local_specs(model.specs, job.sizes, job.rules)
    return {
        k: torch.empty(s.shape, dtype=dtype_of(s, job), device=DEVICE).requires_grad_() for k, s in local.items()
    }


def wan_inputs(cfg: wan.WanConfig, job: Job, grid):
    """Inputs of a forward pass of Wan."""
    new = lambda *shape, dtype=job.compute: torch.empty(shape, dtype=dtype, device=DEVICE)  # noqa: E731
    b, tokens = job.batch, grid[0] * grid[1] * grid[2]
    out = {
        "latents": new(b, cfg.in_channels, *[n * p for n, p in zip(grid, cfg.patch_size, strict=True)]),
        "timestep": new(b, *([tokens] if job.token_timesteps else []), dtype=torch.float32),
        "text": new(b, job.lengths["text"], cfg.text_dim),
    }
    if cfg.image_dim is not None:
        out["image"] = new(b, job.lengths["image"], cfg.image_dim)
    return out


def ltx2_inputs(cfg: LTX2Config, job: Job, grid):
    """Inputs of a forward pass of LTX-2."""
    new = lambda *shape, dtype=job.compute: torch.empty(shape, dtype=dtype, device=DEVICE)  # noqa: E731
    wide = {"dtype": torch.float32}
    out = {}
    for s in cfg.streams:
        n, axes = job.lengths[s.name], 3 if s.name == "video" else 1
        out |= {
            s.name: new(job.batch, n, s.in_channels), f"{s.name}_positions": new(1, axes, n, 2, **wide),
            f"{s.name}_timestep": new(job.batch, n if job.token_timesteps else 1, **wide),
            f"{s.name}_text": new(job.batch, job.lengths[f"{s.name}_text"], s.text_dim),
            f"{s.name}_level": new(job.batch, 1, **wide),
        }  # fmt: skip
    return out


def call(params, cfg, inputs, run) -> Tensor:
    """The model's forward pass; all outputs as one tensor."""
    if isinstance(cfg, LTX2Config):
        return torch.cat([y.flatten() for y in ltx2.forward(params, cfg, inputs, run=run).values()])
    return wan.forward(params, cfg, inputs, run=run)


def fake_inputs(cfg, job: Job, grid):
    """Inputs of a forward pass."""
    return (ltx2_inputs if isinstance(cfg, LTX2Config) else wan_inputs)(cfg, job, grid)


def run_of(job: Job, scan) -> Run:
    """How layers run on the mesh; groups are names that no process has to answer to."""
    run = Run(attention=Attention("triton"), scan=scan)
    tp, sp = job.size("tp"), job.size("sp")
    changes = {}
    if tp > 1:
        changes["tp"] = GroupTensorParallel(Group("tp", tp, 0))
    if sp > 1:
        changes["tokens"] = SequenceTokens(Group("sp", sp, 0), job.lengths["video"])
        changes["attention"] = Ulysses(changes["tokens"], run.attention)
    return Run(**{**run.__dict__, **changes})


def kept_bytes(model: Model, cfg, job: Job, grid, scan) -> int:
    """Bytes that a forward pass keeps for its backward, without the leaves."""
    seen = {}
    with FakeTensorMode():
        params = fake_params(model, job, compute_of)
        own = {StorageWeakRef(p.untyped_storage()) for p in params.values()}

        def pack(t):
            ref = StorageWeakRef(t.untyped_storage())
            if ref not in own:
                seen.setdefault(ref, t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            call(params, cfg, fake_inputs(cfg, job, grid), run_of(job, scan))
    return sum(t.untyped_storage().nbytes() for t in seen.values())


def step(trace: Traced, forward) -> int:
    """One forward and backward pass inside a trace; the bytes that were live in between."""
    out = forward().float()
    loss = (out - torch.empty_like(out)).square().mean()
    between = trace.now
    loss.backward()
    return between
