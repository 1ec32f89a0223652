"""Sequence parallelism: the processes of a group share the tokens of each sample.

Between attention calls a process works on its part of the tokens, with whole weights. For attention it trades tokens
for heads (DeepSpeed-Ulysses, Jacobs et al., 2023): all tokens of its share of the heads, so that every kind of
attention (masked, causal, quantised) is the single-process one with fewer heads. Tokens are padded to equal parts; the
padding is cut off before attention, which therefore needs no mask for it.

Gradients: every process of the group computes the loss, on the merged output. A value that is cut then has `size` times
its gradient; a value that all processes hold (weights, text, audio) has gradients whose average over the group is the
true one. Averaging the gradients of weights over the group, as FSDP does, is all that is left to do.

Ring attention (keys and values travel, queries stay) is not here. With n processes, and as many key heads as query
heads, it sends n / 2 times the bytes of this forward pass and 3 n / 4 times those of forward and backward; every mask
and every quantised attention would need a ring of its own, with merged log-sum-exps. It would serve only n above the
number of heads, where data and tensor parallelism are left.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import UserError, raise_faults
from kernels.attention import SITES, Attention, Site
from nn.run import Run, Tokens
from parallel.collectives import Group, as_group, exchange, gather
from parallel.mesh import Mesh

REPLICATED = ("audio_self", "audio_text")  # queries and keys of streams that every process holds whole


@dataclasses.dataclass(frozen=True)
class SequenceTokens(Tokens):
    """One stream of `length` tokens, cut into equal parts over `group`; the last parts are padded with zeros.

    A dimension of one token stands for all tokens (a timestep per sample) and is left as it is.
    """

    group: Group
    length: int

    def __post_init__(self):
        if self.length < 0:
            raise UserError(f"sequence parallel: the number of tokens is {self.length}, it must be at least 0")

    @property
    def part(self) -> int:
        """Tokens of each process, padding included."""
        return -(-self.length // self.group.size)

    def split(self, t: Tensor, dim: int) -> Tensor:
        """This process's part of `t`, a copy: `[..., length, ...] -> [..., part, ...]`.

        Raises UserError when the dimension has neither `length` nor 1 entries.
        """
        count = t.shape[dim]
        if count == 1 != self.length:
            return t
        if count != self.length:
            raise UserError(f"sequence parallel: dimension {dim} of {list(t.shape)} is to have {self.length} tokens")
        start = min(self.group.rank * self.part, count)
        real = min(self.part, count - start)
        mine = t.narrow(dim, start, real)
        # Also a whole part is copied: a view would keep all tokens in memory for as long as the part is used.
        return _padded(mine, dim, self.part) if real < self.part else mine.clone()

    def merge(self, t: Tensor, dim: int, length: int) -> Tensor:
        """Inverse of `split`, on every process. Backward: the sum over the group (see the top of this file).

        Raises UserError when `t` is no part of a stream of `length` tokens.
        """
        if length == 1 != self.length:
            return t
        if length != self.length or t.shape[dim] != self.part:
            raise UserError(
                f"sequence parallel: dimension {dim} of {list(t.shape)} is no part of {length} tokens; a part of "
                f"{self.length} tokens over {self.group.size} processes has {self.part}"
            )
        return _first(_joined(t, dim % t.ndim, self.group), dim, length)


def _padded(t: Tensor, dim: int, count: int) -> Tensor:
    """`t` with zeros after its last entries along `dim`, `count` in all."""
    behind = t.ndim - 1 - dim % t.ndim
    return F.pad(t, [0, 0] * behind + [0, count - t.shape[dim]]) if t.shape[dim] < count else t


def _first(t: Tensor, dim: int, count: int) -> Tensor:
    return t.narrow(dim, 0, count) if t.shape[dim] > count else t


def _joined(t: Tensor, dim: int, group: Group) -> Tensor:
    """Every process's `t`, one after another along `dim`."""
    return gather(t, group).unflatten(0, (group.size, t.shape[0])).movedim(0, dim).flatten(dim, dim + 1)


def _traded(t: Tensor, cut: int, join: int, group: Group) -> Tensor:
    """`t`, whole along `cut` and a part along `join`, as a part along `cut` and whole along `join`."""
    parts = t.unflatten(cut, (group.size, t.shape[cut] // group.size)).movedim(cut, 0)
    return exchange(parts, group).movedim(0, join).flatten(join, join + 1)


def heads_fault(heads: int, kv_heads: int, size: int) -> str | None:
    """Why attention with these heads cannot be shared by `size` processes of a sequence-parallel group, or None."""
    if heads % size == 0 and kv_heads % size == 0:
        return None
    common = math.gcd(heads, kv_heads)
    allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    equal = f"{heads} head{'s' * (heads != 1)}"
    counted = equal if heads == kv_heads else f"{heads} query heads and {kv_heads} key heads"
    return f"{counted} cannot be shared evenly by {size} processes (sp {size}); sp can be {allowed}"


@dataclasses.dataclass(frozen=True)
class Ulysses:
    """Attention over the tokens that `tokens` cut, with `inner` for the heads of one process. The outermost wrapper.

    What a call exchanges depends on its site:

    * `self`: q, k, v in one all-to-all, the output in another one;
    * `v2a` (queries of a stream that every process holds, keys that are cut): each process takes its heads of q and
      trades tokens of k, v for heads; the outputs are gathered and equal on all processes;
    * `cross_text`, `cross_image`, `a2v` (cut queries, keys that every process holds) and `audio_self`, `audio_text`
      (nothing is cut): nothing.

    Masks, biases and lens count all tokens, never those of a part.
    """

    tokens: SequenceTokens
    inner: Callable[..., Any] = Attention()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        site: Site,
        key_mask: Tensor | None = None,
        lens: Tensor | None = None,
        bias: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        return_lse: bool = False,
    ):
        """Attention as `kernels.attention` states it, of this process's part.

        Args:
            q: `[B, Lq, H, D]`, k, v: `[B, Lk, Hkv, D]`; a stream that is cut has `tokens.part` tokens.
            key_mask, lens, bias, causal: over all tokens (without padding) and all heads.

        Returns:
            `[B, Lq, H, D]`, with `return_lse` also the log-sum-exp `[B, H, Lq]`.

        Raises:
            UserError: tensors that do not fit each other, the tokens or the number of processes, every fault at once.
        """
        _check(self.tokens, q, k, v, bias, causal, site)
        bias = _own_bias(self.tokens, bias, q.shape[2], site)
        options = {"site": site, "key_mask": key_mask, "lens": lens, "bias": bias, "causal": causal, "scale": scale}
        options["return_lse"] = return_lse
        if site == "self":
            out = self.inner(*_to_heads(self.tokens, q, k, v), **options)
            back = _to_tokens
        elif site == "v2a":
            out = self.inner(_own_heads(q, 2, self.tokens.group), *_to_heads(self.tokens, k, v), **options)
            back = _to_all
        else:
            return self.inner(q, k, v, **options)
        if not return_lse:
            return back(self.tokens, out, heads=2, rows=1)
        return back(self.tokens, out[0], heads=2, rows=1), back(self.tokens, out[1], heads=1, rows=2)


def _to_heads(tokens: SequenceTokens, *parts: Tensor) -> tuple[Tensor, ...]:
    """Each of `[B, part, H, D]` as `[B, length, H / size, D]`, in one exchange."""
    n = tokens.group.size
    rows = torch.cat([x.unflatten(2, (n, x.shape[2] // n)).movedim(2, 0) for x in parts], dim=3)
    whole = exchange(rows, tokens.group).movedim(0, 1).flatten(1, 2)
    return _first(whole, 1, tokens.length).split([x.shape[2] // n for x in parts], dim=2)


def _to_tokens(tokens: SequenceTokens, x: Tensor, *, heads: int, rows: int) -> Tensor:
    """Results for all tokens and this process's heads as those for its tokens and all heads; padding gets zeros."""
    return _traded(_padded(x, rows, tokens.part * tokens.group.size), rows, heads, tokens.group)


def _to_all(tokens: SequenceTokens, x: Tensor, *, heads: int, rows: int) -> Tensor:
    """Results for this process's heads as those for all heads, on every process."""
    return _joined(x, heads, tokens.group)


def _own_heads(x: Tensor, dim: int, group: Group) -> Tensor:
    share = x.shape[dim] // group.size
    return x.narrow(dim, group.rank * share, share)


def _own_bias(tokens: SequenceTokens, bias: Tensor | None, heads: int, site: str) -> Tensor | None:
    """The bias `[.., Lq, Lk]` or `[.., H, Lq, Lk]` (1 for any) for the heads and queries of this process."""
    if bias is None or site in REPLICATED:
        return bias
    if site in ("self", "v2a"):
        own = bias.ndim > 2 and bias.shape[-3] == heads
        return _own_heads(bias, -3, tokens.group) if own else bias
    return tokens.split(bias, -2) if bias.ndim > 1 else bias


def _bias_faults(tokens: SequenceTokens, q: Tensor, k: Tensor, bias: Tensor, site: str) -> list[str]:
    rows = q.shape[1] if site in ("v2a", *REPLICATED) else tokens.length
    keys = tokens.length if site in ("self", "v2a") else k.shape[1]
    wanted = (q.shape[0], q.shape[2], rows, keys)
    fits = bias.ndim <= 4 and all(n in (1, w) for n, w in zip(reversed(bias.shape), reversed(wanted)))
    return [] if fits else [f"bias {list(bias.shape)} does not fit {list(wanted)} ([B, H, Lq, Lk] over all tokens)"]


def _check(tokens: SequenceTokens, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, site) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    faults = [] if site in SITES else [f"site {site!r} is none of {', '.join(SITES)}"]
    if not q.dtype == k.dtype == v.dtype:
        faults.append(f"q, k, v must share a dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape != v.shape or q.shape[::3] != k.shape[::3]:
        faults.append(f"{shapes}: expected [B, L, H, D], k and v equal, batch and head size shared")
    elif not faults:
        if site in ("self", "v2a"):
            faults += [fault for fault in [heads_fault(q.shape[2], k.shape[2], tokens.group.size)] if fault]
        elif site not in REPLICATED and causal:
            faults.append("causal needs queries and keys of one stream")
        cut = {"self": (q, k), "v2a": (k,)}.get(site, () if site in REPLICATED else (q,))
        if any(x.shape[1] != tokens.part for x in cut):
            faults.append(
                f"{shapes}: a part of {tokens.length} tokens over {tokens.group.size} processes has {tokens.part}"
            )
        if bias is not None:
            faults += _bias_faults(tokens, q, k, bias, site)
    raise_faults(f"sequence-parallel attention at {site!r}: the arguments do not fit", faults)


def sequence_parallel(run: Run, mesh: Mesh, length: int) -> Run:
    """`run` for streams of `length` tokens that the axis `sp` of the mesh shares; `run` itself where that has size 1.

    Raises UserError when `run` is sequence parallel already.
    """
    group = as_group(mesh.group("sp"))
    if group is None:
        return run
    tokens = SequenceTokens(group, length)
    return dataclasses.replace(run, tokens=tokens, attention=Ulysses(tokens, run.attention))
