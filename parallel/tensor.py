"""Tensor parallelism: the collectives of a block whose heads and MLP width are split over a group.

The block sees plain local shards, as `parallel.rules.local_specs` describes them: column-parallel `to_q`, `to_k`,
`to_v` and `up` have rows of whole heads (or of the width), row-parallel `to_out` and `down` the columns that match, and
everything else is whole on every rank. All-reduces of a block, forward plus backward:

* one each for a region (attention, MLP): `reduce` at its end forward, `copy` at its start backward. Cross-attention
  has a second `copy`, of the context, where the context has a gradient;
* two for each norm of queries or keys over all heads (`mean_square`), of one number per token.

So attention and MLP make 8; Wan's block, with self-attention, cross-attention to text and MLP, 7 forward and 8
backward; cross-attention to an image adds 1 and 2. Recomputation repeats those of the forward pass.
"""

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from core.errors import raise_faults
from nn.run import TensorParallel
from parallel import collectives
from parallel.collectives import Group, as_group
from parallel.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class GroupTensorParallel(TensorParallel):
    """The three collectives over a group of ranks that hold different heads of the same tokens."""

    group: Group

    def copy(self, x: Tensor) -> Tensor:
        """Enters a column-parallel region: x, equal on the group; backward: the sum of all ranks' gradients."""
        return collectives.copy(x, self.group)

    def reduce(self, x: Tensor) -> Tensor:
        """Leaves a row-parallel region: the sum of all ranks' partial products; backward: identity."""
        return collectives.all_sum(x, self.group)

    def mean_square(self, x: Tensor) -> Tensor:
        """Mean of squares over the full inner width: `[..., D / size] -> [..., 1]`, equal on the group.

        Each rank scales its own heads by it, so its gradient is summed over the group as well.
        """
        mean = x.square().mean(-1, keepdim=True) / self.group.size
        return collectives.copy(collectives.all_sum(mean, self.group), self.group)


def tensor_parallel(mesh: Mesh) -> TensorParallel:
    """What a model's `Run.tp` is on a mesh: the identities where the mesh does not cut heads."""
    group = as_group(mesh.group("tp"))
    return TensorParallel() if group is None else GroupTensorParallel(group)


def check_heads(tp: int, heads: Mapping[str, int]) -> None:
    """Refuses a tensor-parallel size that would cut a head.

    The rows of a projection may well be divisible where the heads are not (12 heads of 128 rows over 8 ranks), so
    this is checked apart from `rules.check`, before anything is built.

    Args:
        heads: number of heads by name (`num_attention_heads`, key-value heads, other streams), all of which are split.

    Raises:
        UserError: names every number that `tp` does not divide, and the sizes that divide all.
    """
    most = min(heads.values(), default=tp)
    fits = [n for n in range(1, most + 1) if all(count % n == 0 for count in heads.values())]
    faults = [
        f"{name} {count} is not divisible by tp {tp}; heads are never cut, tp can be {', '.join(map(str, fits))}"
        for name, count in heads.items()
        if count % tp
    ]
    raise_faults(f"tensor parallelism over {tp} ranks", faults)
