"""The precision table: for each class of leaf, in what dtype it is stored, computed with, summed up and averaged.

It holds for every layout. `python -c "from train.precision import table; print(table('fp32', 'bf16'))"` prints it.
"""

import dataclasses

import torch

from core.specs import Specs
from core.trees import components, has_component

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Precision:
    """`gradient` is what the optimiser gets: the sum over microbatches. `moments` are the optimiser's."""

    storage: torch.dtype
    compute: torch.dtype
    gradient: torch.dtype = torch.float32
    moments: torch.dtype = torch.float32


def policy(dit_precision: str, compute_dtype: str) -> dict[str, Precision]:
    """The table of a recipe's `training.dit_precision` and `training.compute_dtype`, each `fp32` or `bf16`.

    matrix: weights and biases of linear layers. norm: scales of norms without a float32 exception, which
    multiply float32 statistics. table: leaves that are kept in float32 (modulation, timestep embedder).
    adapter: LoRA pairs. scale: scales of quantised weights and of adapters.
    """
    stored, compute, wide = FLOATS[dit_precision], FLOATS[compute_dtype], torch.float32
    return {
        "matrix": Precision(stored, compute),
        "norm": Precision(stored, wide),
        "table": Precision(wide, wide),
        "adapter": Precision(wide, compute),
        "scale": Precision(wide, wide),
    }


def leaf_class(key: str, keep_fp32: bool) -> str:
    """The class of a leaf by its key and its spec's `keep_fp32`."""
    if has_component(key, ("lora_A", "lora_B")):
        return "adapter"
    if components(key)[-1].endswith("_scale"):
        return "scale"
    if keep_fp32:
        return "table"
    return "norm" if any(part.startswith("norm") for part in components(key)) else "matrix"


def classes(specs: Specs) -> dict[str, str]:
    """The class of every leaf of a model."""
    return {key: leaf_class(key, spec.keep_fp32) for key, spec in specs.items()}


def table(dit_precision: str, compute_dtype: str) -> str:
    """The policy as text, a line per class."""
    name = lambda dtype: str(dtype).removeprefix("torch.")  # noqa: E731
    rows = policy(dit_precision, compute_dtype).items()
    lines = [["class", *(field.name for field in dataclasses.fields(Precision))]]
    lines += [[kind, *map(name, (p.storage, p.compute, p.gradient, p.moments))] for kind, p in rows]
    return "\n".join("  ".join(cell.ljust(9) for cell in line).rstrip() for line in lines)
