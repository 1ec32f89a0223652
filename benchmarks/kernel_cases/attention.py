"""Dense attention: our Triton kernels beside PyTorch's backends and compiled FlexAttention; sweeps of tiles."""

import dataclasses
import functools

import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.kernel_cases import Case, backward_of
from kernels import attention
from kernels.attention import attention_varlen, flash_with_tangent
from kernels.attention import tiles as tile_tables

PEERS = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
BF16 = torch.bfloat16
# (batch, heads, queries, keys, head size): Wan 1.3B at 81x480x832, the next multiple of 128, LTX-2; their text.
SELF = ((1, 12, 32760, 32760, 128), (1, 12, 32768, 32768, 128), (1, 32, 4290, 4290, 128), (2, 16, 4096, 4096, 64))
CROSS = ((1, 12, 32760, 512, 128), (1, 32, 4290, 1024, 128))


def _inputs(shape, device):
    b, h, lq, lk, d = shape
    return [torch.randn(b, n, h, d, device=device, dtype=BF16) for n in (lq, lk, lk)]


def _flops(shape, causal: bool = False) -> float:
    """Multiplications and additions of the two products, of visible pairs only."""
    b, h, lq, lk, d = shape
    return 4.0 * b * h * lq * lk * d * (0.5 if causal else 1.0)


def _named(backend: str, causal: bool = False):
    return functools.partial(attention, site="self", backend=backend, causal=causal)


def _flex(q, k, v):
    return _compiled_flex()(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


@functools.cache
def _compiled_flex():
    return torch.compile(flex_attention)


def _forward(f, shape, device):
    def make():
        qkv = _inputs(shape, device)
        return lambda: f(*qkv)

    return make


def _backward(f, shape, device):
    return lambda: backward_of(f, *_inputs(shape, device))


def _main_cases(shape, device, flex: bool) -> list[Case]:
    kind = "self" if shape[2] == shape[3] else "cross"
    cases = []
    for name, make, factor in (("fwd", _forward, 1.0), ("bwd", _backward, 2.5)):
        peers = {p: make(_named(p), shape, device) for p in PEERS} | (
            {"compiled FlexAttention": make(_flex, shape, device)} if flex else {}
        )
        ours = {"triton": make(_named("triton"), shape, device), "auto": make(_named("auto"), shape, device)}
        cases.append(Case(f"attention {name} {kind}", str(shape), ours, peers, factor * _flops(shape)))
    return cases


def _causal_cases(shape, device) -> list[Case]:
    peers = {p: _named(p, True) for p in PEERS[:2]}
    ours = _named("triton", True)
    return [
        Case(
            f"attention {name} causal", str(shape), {"triton": make(ours, shape, device)},
            {p: make(f, shape, device) for p, f in peers.items()}, factor * _flops(shape, True),
        )
        for name, make, factor in (("fwd", _forward, 1.0), ("bwd", _backward, 2.5))
    ]  # fmt: skip


def _label(tiles) -> str:
    return f"{tiles.queries}x{tiles.keys} w{tiles.warps} s{tiles.stages}"


def _label_of_forward(tiles) -> str:
    if not isinstance(tiles, tile_tables.ByHand):
        return f"triton {_label(tiles)}"
    return f"gluon {_label(tiles)}{' persistent' * tiles.persistent}"


def _sweep_forward(shape, device) -> Case:
    def make(tiles):
        def closure():
            from kernels.attention import launch

            q, k, v = _inputs(shape, device)
            none = (None,) * 5
            return lambda: launch.forward(q, k, v, none, shape[2], shape[3], False, 0.1, "ieee", tiles=tiles)

        return closure

    tried = (*tile_tables.SWEEP_FORWARD, *tile_tables.SWEEP_BY_HAND[tile_tables.padded(shape[4])])
    ours = {f"ours, {_label_of_forward(t)}": make(t) for t in tried}
    peers = {"sdpa_cudnn": _forward(_named("sdpa_cudnn"), shape, device)}
    return Case("attention sweep fwd", str(shape), {}, peers, _flops(shape), variants=ours)


def _backward_with(tiles, shape, device):
    """The backward kernels alone, on the forward pass's own output."""

    def closure():
        from kernels.attention import launch

        q, k, v = _inputs(shape, device)
        none = (None,) * 5
        sizes = shape[2], shape[3], False, shape[4] ** -0.5, "ieee"
        out, lse = launch.forward(q, k, v, none, *sizes)
        g = torch.randn_like(out)
        return lambda: launch.backward(q, k, v, out, lse, g, None, none, *sizes, tiles=tiles)

    return closure


def _sweep_backward(shape, device) -> Case:
    """The pair in Triton, one of the two varied at a time, and the one kernel in Gluon that makes all gradients.

    `turn`: tiles of queries by which neighbouring programs begin apart.
    """
    head_size = tile_tables.padded(shape[4])
    base = dataclasses.replace(tile_tables.HOPPER[head_size], fused=None)
    sets = {f"triton pair, dkv {_label(t)}": dataclasses.replace(base, dkv=t) for t in tile_tables.SWEEP_DKV}
    sets |= {f"triton pair, dq {_label(t)}": dataclasses.replace(base, dq=t) for t in tile_tables.SWEEP_DQ}
    fused = tile_tables.SWEEP_FUSED[head_size] if shape[3] >= base.fused_from else ()
    sets |= {f"gluon {_label(t)} turn {t.turn}": dataclasses.replace(base, fused=t) for t in fused}
    ours = {f"ours, {name}": _backward_with(tiles, shape, device) for name, tiles in sets.items()}
    peers = {"sdpa_cudnn": _backward(_named("sdpa_cudnn"), shape, device)}
    return Case("attention sweep bwd", str(shape), {}, peers, 2.5 * _flops(shape), variants=ours)


def _tangent_case(shape, device) -> Case:
    """Six products where a forward pass has two; no public flash kernel has a tangent, so ours alone."""

    def make():
        x, t = _inputs(shape, device), _inputs(shape, device)
        return lambda: flash_with_tangent(*x, *t)

    return Case("attention output and tangent", str(shape), {"triton": make}, flops=3 * _flops(shape))


def _varlen_case(device) -> Case:
    """Packed lengths against the same sequences padded to the longest with a key mask."""
    lengths, heads, d = (4290, 1000, 300, 2500), 32, 128
    longest = max(lengths)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)

    def packed():
        qkv = [torch.randn(sum(lengths), heads, d, device=device, dtype=BF16) for _ in range(3)]
        return lambda: attention_varlen(*qkv, cu, cu, max_q=longest, max_k=longest, backend="triton")

    def padded(backend):
        def make():
            qkv = _inputs((len(lengths), heads, longest, longest, d), device)
            lens = torch.tensor(lengths, device=device)
            return lambda: attention(*qkv, site="self", lens=lens, backend=backend)

        return make

    flops = sum(_flops((1, heads, n, n, d)) for n in lengths)
    ours = {"packed": packed, "padded, lens": padded("triton")}
    peers = {"padded, sdpa_cudnn": padded("sdpa_cudnn"), "padded, sdpa_efficient": padded("sdpa_efficient")}
    return Case("attention fwd lengths", f"{lengths} x {heads} x {d}", ours, peers, flops)


def cases(device: torch.device) -> list[Case]:
    """Main figures first, sweeps last (`--match "attention fwd self"` and so on picks some)."""
    main = [c for shape in SELF + CROSS for c in _main_cases(shape, device, flex=shape in (SELF[0], CROSS[0]))]
    return [
        *main,
        *_causal_cases(SELF[2], device),
        _tangent_case(SELF[2], device),
        _varlen_case(device),
        *[_sweep_forward(shape, device) for shape in (SELF[0], *SELF[2:], CROSS[0])],
        *[_sweep_backward(shape, device) for shape in (SELF[0], *SELF[2:], CROSS[0])],
    ]
