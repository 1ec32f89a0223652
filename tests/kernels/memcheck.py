"""Every Triton and Gluon kernel once, forward and backward, at sizes that fill no tile: for a memory checker.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/kernels/memcheck.py

Without the caching allocator every tensor is an allocation of its own, so that an access beside it is seen. Names of
kernels as arguments choose among them. Not a test: it needs a GPU and the checker.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402

import kernels  # noqa: E402
from kernels import BlockCausal  # noqa: E402

DEVICE, BF16 = "cuda", torch.bfloat16
LENGTH, OTHER = 323, 197  # of queries and keys: odd, a little over two tiles of 128 or 64


def tensors(*shapes, dtype=BF16) -> list[torch.Tensor]:
    """Random leaves."""
    return [torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes]


def through(fn: Callable, *inputs: torch.Tensor) -> None:
    """Forward and backward pass."""
    out = fn(*inputs)
    parts = out if isinstance(out, tuple) else (out,)
    sum(part.float().square().sum() for part in parts).backward()


def flash(head_size: int, **options) -> None:
    """Attention: head size 128 without masks runs by hand on Hopper, all else in Triton."""
    q, k, v = tensors((2, LENGTH, 4, head_size), *[(2, OTHER, 2, head_size)] * 2)
    through(lambda *x: kernels.attention(*x, site="self", backend="triton", **options), q, k, v)


def varlen() -> None:
    q, k, v = tensors(*[(LENGTH, 3, 64)] * 3)
    cu = torch.tensor([0, 130, 130, 300], device=DEVICE, dtype=torch.int32)
    through(lambda *x: kernels.attention_varlen(*x, cu, cu, max_q=170, max_k=170, backend="triton"), q, k, v)


def tangent() -> None:
    q, k, v, *tangents = (x.detach() for x in tensors(*[(1, LENGTH, 2, 64)] * 6))
    kernels.flash_with_tangent(q, k, v, *tangents)


def masked(head_size: int) -> None:
    """Block-causal attention with a sink and a window over six blocks."""
    mask = BlockCausal(frames=6, tokens_per_frame=55, block=1, local_attn_size=3, sink_size=1)
    planned = kernels.plan_attention(mask, head_dim=head_size, dtype=BF16, device=DEVICE)
    through(lambda *x: kernels.block_causal_sink(*x, planned), *tensors(*[(1, 330, 3, head_size)] * 3))


def qat() -> None:
    q, k, v = tensors((1, LENGTH, 2, 64), *[(1, OTHER, 2, 64)] * 2)
    through(lambda *x: kernels.qat_attention(*x, backend="triton"), q, k, v)


def nvfp4() -> None:
    (x,) = tensors((LENGTH, 48))
    through(lambda x: kernels.fake_quant_nvfp4(x, backend="triton"), x)
    kernels.quantise_nvfp4(x.detach(), backend="triton")


def fp8() -> None:
    (x,) = tensors((LENGTH, 200))
    for form in ("fp8", "fp8_block"):
        through(lambda x, form=form: kernels.fake_quant(x, form, "weight", backend="triton"), x)


def norm(width: int) -> None:
    x, y, gate, scale, shift = tensors(*[(2, LENGTH, width)] * 2, *[(2, 1, width)] * 3)
    (weight,) = tensors((width,))
    call = lambda x, y, g, s, z, w: kernels.residual_gate_norm(  # noqa: E731
        x, y, g, eps=1e-6, kind="rms", weight=w, scale=s, shift=z, backend="triton"
    )
    through(call, x, y, gate, scale, shift, weight)
    through(lambda x, s: kernels.norm_modulate(x, eps=1e-6, scale=s, backend="triton"), x, scale)


def rope(heads: int, head_size: int) -> None:
    q, k, q_weight, k_weight = tensors(*[(2, LENGTH, heads, head_size)] * 2, *[(heads * head_size,)] * 2)
    table = tuple(torch.randn(1, LENGTH, heads, head_size // 2, device=DEVICE) for _ in range(2))
    for pairs in ("half", "interleaved"):
        through(
            lambda q, k, a, b, pairs=pairs: kernels.qk_norm_rope(
                q, k, eps=1e-6, q_weight=a, k_weight=b, rope=table, pairs=pairs, backend="triton"
            ),
            q, k, q_weight, k_weight,
        )  # fmt: skip


CASES = {
    "attention by hand": lambda: flash(128),
    "attention": lambda: flash(64),
    "attention, causal": lambda: flash(40, causal=True),
    "attention, lengths": lambda: flash(64, lens=torch.tensor([100, OTHER], device=DEVICE)),
    "attention, packed": varlen,
    "attention, tangent": tangent,
    "block-causal by hand": lambda: masked(128),
    "block-causal": lambda: masked(64),
    "qat attention": qat,
    "nvfp4": nvfp4,
    "fp8": fp8,
    "norm": lambda: norm(200),
    "norm, wide": lambda: norm(4096),
    "rope": lambda: rope(4, 24),
    "rope, wide": lambda: rope(32, 128),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        CASES[name]()
        torch.cuda.synchronize()
        print("ran", name, flush=True)
