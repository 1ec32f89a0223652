"""Attention over tile plans: block-causal with sinks and a rolling window, teacher forcing, block masks.

Rates count visible pairs only: 4 * head size FLOPs each forward, 10 backward. The pair of backward kernels in Triton
executes 14.
"""

import dataclasses
import functools

import numpy as np
import torch

from benchmarks.kernel_cases import Case, backward_of
from kernels.attention.masks import HOPPER_DKV, plan_attention, planned_attention
from kernels.attention.plan import BlockCausal, Mask, block_mask, intervals, visible_pairs
from kernels.attention.tiles import HOPPER, SWEEP_BY_HAND, SWEEP_FUSED, Tiles, TileSet

HEADS, HEAD_DIM = 12, 128
DEFAULT = dataclasses.replace(HOPPER[HEAD_DIM], dkv=HOPPER_DKV)
PUBLISHED = BlockCausal(21, 1560, 3, 6, 1)
RELATIVISTIC = dataclasses.replace(PUBLISHED, relativistic=True)
MASKS = {
    "21x1560, block 3, local 6, sink 1": PUBLISHED,
    "21x1560, block 3, local 6, sink 1, relativistic": RELATIVISTIC,
    "21x1560, block 1, local 6, sink 1": dataclasses.replace(PUBLISHED, block=1),
    "21x1560, block 3, local 12, sink 3": dataclasses.replace(PUBLISHED, local_attn_size=12, sink_size=3),
    "21x1560 clean and noisy, block 3, local 6, sink 1": dataclasses.replace(PUBLISHED, teacher_forcing=True),
}
# What else might be best on a Hopper GPU, apart from the table's own tiles.
FORWARD = [Tiles(128, 128, 8, 3), Tiles(64, 64, 4, 2)]
DQ = [Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 4), Tiles(64, 128, 8, 2)]
DKV = [Tiles(64, 128, 8, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 8, 3)]


def _named(tiles: Tiles) -> str:
    return f"{tiles.queries}x{tiles.keys} w{tiles.warps} s{tiles.stages}"


def _make(mask: Mask, device: torch.device, backward: bool, backend: str = "triton", tiles: TileSet | None = None):
    """A maker of the timed closure for one backend or one choice of tiles."""
    shape = {"q": mask.q_len, "k": mask.k_len, "v": mask.k_len}
    draw = lambda n: torch.randn(1, n, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)  # noqa: E731
    inputs = [draw(n) for n in shape.values()]
    planned = plan_attention(
        mask, head_dim=HEAD_DIM, dtype=torch.bfloat16, device=device, backend=backend, tiles=tiles
    )  # fmt: skip
    run = functools.partial(planned_attention, planned=planned)
    return backward_of(run, *inputs) if backward else lambda: run(*inputs)


def _variants(backward: bool) -> dict[str, TileSet]:
    pair = dataclasses.replace(DEFAULT, forward_by_hand=None, fused=None)
    if not backward:
        found = {f"triton {_named(t)}": dataclasses.replace(pair, forward=t) for t in (DEFAULT.forward, *FORWARD)}
        gluon = {f"gluon {_named(t)}{' persistent' * t.persistent}": t for t in SWEEP_BY_HAND[HEAD_DIM]}
        return found | {name: dataclasses.replace(DEFAULT, forward_by_hand=t) for name, t in gluon.items()}
    found = {f"triton pair, dq {_named(t)}": dataclasses.replace(pair, dq=t) for t in (DEFAULT.dq, *DQ)}
    found |= {f"triton pair, dkv {_named(t)}": dataclasses.replace(pair, dkv=t) for t in DKV}
    gluon = {f"gluon {_named(t)} turn {t.turn}": t for t in SWEEP_FUSED[HEAD_DIM]}
    return found | {name: dataclasses.replace(DEFAULT, fused=t) for name, t in gluon.items()}


def _case(name: str, mask: Mask, device: torch.device, backward: bool) -> Case:
    make = functools.partial(functools.partial, _make, mask, device, backward)
    sweep = _variants(backward) if mask in (PUBLISHED, RELATIVISTIC) else {}
    variants = {f"ours, {label}": make(tiles=tiles) for label, tiles in sweep.items()}
    # FlexAttention cannot turn the queries of sink keys: its time there is that of the plain mask.
    plain = dataclasses.replace(mask, relativistic=False) if isinstance(mask, BlockCausal) else mask
    peers = {"flex": functools.partial(_make, plain, device, backward, "flex")} if isinstance(mask, BlockCausal) else {}
    flops = (10 if backward else 4) * HEADS * HEAD_DIM * visible_pairs(intervals(mask))
    op = f"masked attention {'bwd' if backward else 'fwd'}"
    return Case(op, name, {"triton": make()}, peers, flops=flops, variants=variants)


def cases(device: torch.device) -> list[Case]:
    """Every mask forward and backward; the published one with all tiles that are worth a try."""
    blocks = np.random.default_rng(0).random((256, 256)) < 0.25
    masks = MASKS | {"32768, a quarter of the 128x128 blocks": block_mask(blocks, 128, 128, 32768, 32768)}
    return [_case(name, mask, device, backward) for name, mask in masks.items() for backward in (False, True)]
