"""Parameter specs: one leaf of a tree without its data.

A spec is what initialisation, meta tensors, sharding rules, transforms and checkpoint checks all read,
so that shape, dtype and logical axes of a leaf are declared once.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core import keys
from core.errors import raise_faults
from core.trees import Params


@dataclasses.dataclass(frozen=True)
class Init:
    """How a leaf starts: `zeros`, `ones`, `normal` or `uniform`, the last two times `scale`.

    `uniform` is on [-scale, scale).
    """

    kind: str = "zeros"
    scale: float = 1.0


ZEROS = Init("zeros")
ONES = Init("ones")


def normal(std: float) -> Init:
    """Gaussian with standard deviation `std`."""
    return Init("normal", std)


def fan_in(n: int) -> Init:
    """Uniform on ±1/sqrt(n), PyTorch's default for linear layers with n inputs."""
    return Init("uniform", 1.0 / math.sqrt(n))


def xavier(n_in: int, n_out: int) -> Init:
    """Uniform on ±sqrt(6 / (n_in + n_out)) (Glorot and Bengio, 2010)."""
    return Init("uniform", math.sqrt(6.0 / (n_in + n_out)))


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One leaf: global shape, storage dtype, logical axes and how it starts.

    `axes` names each dimension logically (`"heads"`, `"mlp"`, `"embed"`, None) for sharding rules.
    `keep_fp32` leaves are stored and used in float32 whatever the compute dtype. `companions` are keys of
    leaves that travel with this one everywhere (`weight_scale`). `alias_of` names the leaf this one is
    tied to; a tied leaf is stored once, under that name.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    axes: tuple[str | None, ...] | None = None
    init: Init = ZEROS
    keep_fp32: bool = False
    companions: tuple[str, ...] = ()
    alias_of: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if self.axes is not None and len(self.axes) != len(self.shape):
            raise ValueError(f"axes {self.axes} do not name the {len(self.shape)} dimensions of {self.shape}")


Specs = dict[str, ParamSpec]


def spec_of(leaf: Any) -> ParamSpec:
    """The spec of anything with `.shape` and `.dtype`; a ParamSpec passes through."""
    return leaf if isinstance(leaf, ParamSpec) else ParamSpec(tuple(leaf.shape), leaf.dtype)


def specs_of(tree: Mapping[str, Any]) -> Specs:
    """Specs of a tree of tensors, of lazy leaves or of specs."""
    return {k: spec_of(v) for k, v in tree.items()}


def draw(spec: ParamSpec, k: keys.Key, device="cpu") -> Tensor:
    """One initialised leaf. Raises ValueError for an unknown kind."""
    kind, scale = spec.init.kind, spec.init.scale
    if kind == "zeros":
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    if kind == "ones":
        return torch.ones(spec.shape, dtype=spec.dtype, device=device)
    if kind == "normal":
        return (keys.normal(k, spec.shape) * scale).to(device, spec.dtype)
    if kind == "uniform":
        return ((keys.uniform(k, spec.shape) * 2 - 1) * scale).to(device, spec.dtype)
    raise ValueError(f"unknown initialiser {kind!r}: zeros, ones, normal, uniform")


def init(specs: Specs, k: keys.Key, *, device="cpu") -> Params:
    """Fresh parameters. Each leaf depends only on the key and its own name; tied leaves are left out."""
    return {name: draw(s, keys.fold_in(k, name), device) for name, s in specs.items() if s.alias_of is None}


def abstract(specs: Specs) -> Params:
    """Meta tensors of the specs' shapes and dtypes: no memory is taken."""
    return {k: torch.empty(s.shape, dtype=s.dtype, device="meta") for k, s in specs.items() if s.alias_of is None}


def check(tree: Mapping[str, Any], specs: Specs, *, what: str = "parameters", dtypes: bool = False) -> None:
    """Compares keys and global shapes (and dtypes if asked) of anything with `.shape` and `.dtype`.

    Raises one UserError that lists every missing, unexpected and misshapen key.
    """
    stored = {k: s for k, s in specs.items() if s.alias_of is None}
    faults = [f"missing {k} {list(s.shape)}" for k, s in stored.items() if k not in tree]
    for k, leaf in tree.items():
        if k not in stored:
            tied = specs[k].alias_of if k in specs else None
            faults.append(f"unexpected {k} {list(leaf.shape)}" + (f": it is tied to {tied}" if tied else ""))
        elif found := _misfits(leaf, stored[k], dtypes):
            faults.append(f"{k} has {' and '.join(found)}")
    raise_faults(f"{what}: {len(faults)} keys do not fit the model", faults)


def _misfits(leaf: Any, spec: ParamSpec, dtypes: bool) -> list[str]:
    shape = tuple(leaf.shape)
    out = [] if shape == spec.shape else [f"shape {list(shape)}, expected {list(spec.shape)}"]
    return out + ([f"dtype {leaf.dtype}, expected {spec.dtype}"] if dtypes and leaf.dtype != spec.dtype else [])


def tied(params: Params, specs: Specs) -> Params:
    """`params` with every `alias_of` key pointing at the tensor it is tied to."""
    return {**params, **{k: params[s.alias_of] for k, s in specs.items() if s.alias_of is not None}}
