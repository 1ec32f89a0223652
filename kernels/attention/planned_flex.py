"""Attention over a plan by PyTorch's FlexAttention, with a block mask made from the same intervals."""

import numpy as np
import torch
from torch import Tensor

from kernels.attention.plan import Intervals, visits

BLOCK = 128
MAX_SLOTS = 8


def _listed(marked: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many columns are marked per row `[1, 1, rows]`, and which, those first `[1, 1, rows, columns]`."""
    columns = np.argsort(~marked, axis=1, kind="stable").astype(np.int32)
    return tuple(torch.from_numpy(x)[None, None].to(device) for x in (marked.sum(1, dtype=np.int32), columns))


def flex_block_mask(spans: Intervals, bounds: Tensor):
    """FlexAttention's BlockMask for a mask without rotated slots; `bounds` is `spans.bounds` on the device."""
    from torch.nn.attention.flex_attention import BlockMask

    full, _, partial = visits(spans, BLOCK, BLOCK)

    def seen(b, h, row, key):
        cls = row // spans.class_rows
        found = (key >= bounds[0, cls, 0]) & (key < bounds[0, cls, 1])
        for slot in range(1, bounds.shape[0]):
            found = found | ((key >= bounds[slot, cls, 0]) & (key < bounds[slot, cls, 1]))
        return found

    partial, full = _listed(partial.any(0), bounds.device), _listed(full, bounds.device)
    lengths = (spans.q_len, spans.k_len)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=lengths)


def flex(
    q: Tensor, k: Tensor, v: Tensor, block_mask, scale: float | None, compiled: bool = True
) -> tuple[Tensor, Tensor]:
    """Output `[B, L, H, D]` and natural lse `[B, H, L]` by a kernel that PyTorch generates and compiles.

    Args:
        compiled: False runs the dense eager form, for tests.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    wrap = compiled and not torch.compiler.is_compiling()
    run = torch.compile(flex_attention, dynamic=False) if wrap else flex_attention
    grouped = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
    out, aux = run(
        *(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask, scale=scale, return_aux=AuxRequest(lse=True),
        **grouped,
    )  # fmt: skip
    return out.transpose(1, 2), aux.lse
