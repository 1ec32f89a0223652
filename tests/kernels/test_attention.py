"""Attention backends against dense float64 maths, under transforms, and their refusals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

from core.errors import UserError
from kernels import Attention, attention, attention_reference, explain_attention
from kernels.attention import BACKENDS

CPU_BACKENDS = ["auto", "sdpa", "sdpa_math", "reference"]


def dense(q, k, v, mask, bias, scale):
    """float64, pair by pair, written independently of the code under test."""
    q, k, v = (t.double() for t in (q, k, v))
    rep = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(rep, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale + bias
    weights = torch.where(mask, scores, torch.full_like(scores, -1e300)).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), torch.where(mask, scores, -torch.inf).logsumexp(-1)


@st.composite
def cases(draw):
    b, kv, rep = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    lk = draw(st.integers(1, 9))
    lq = draw(st.integers(1, lk))
    d = draw(st.sampled_from([1, 4, 6, 16]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    q, k, v = (torch.randn(b, n, h, d, generator=g) for n, h in ((lq, kv * rep), (lk, kv), (lk, kv)))
    options, mask = {}, torch.ones(b, 1, lq, lk, dtype=torch.bool)
    if draw(st.booleans()):
        options["key_mask"] = torch.rand(b, lk, generator=g) < 0.7
        options["key_mask"][:, 0] = True
        mask = mask & options["key_mask"][:, None, None]
    if draw(st.booleans()):
        options["lens"] = torch.randint(1, lk + 1, (b,), generator=g)
        mask = mask & (torch.arange(lk) < options["lens"][:, None])[:, None, None]
    if draw(st.booleans()):
        options["causal"] = True
        mask = mask & (torch.arange(lk) <= torch.arange(lq)[:, None] + lk - lq)
    bias = torch.zeros(1, 1, 1, 1)
    if draw(st.booleans()):
        options["bias"] = bias = torch.randn(1, kv * rep, lq, lk, generator=g)
    if draw(st.booleans()):
        options["scale"] = 0.3
    return (q, k, v), options, mask, bias


@given(case=cases(), backend=st.sampled_from(CPU_BACKENDS))
def test_equals_dense_float64(case, backend):
    qkv, options, mask, bias = case
    expected, lse = dense(*qkv, mask, bias.double(), options.get("scale", qkv[0].shape[-1] ** -0.5))
    got = attention(*qkv, site="self", backend=backend, **options)
    # Float32 softmax over at most 9 keys: a few ulp of numbers near 1.
    torch.testing.assert_close(got.double(), expected, atol=3e-6, rtol=3e-6)
    if backend in ("auto", "reference"):
        got, got_lse = attention(*qkv, site="self", backend=backend, return_lse=True, **options)
        torch.testing.assert_close(got.double(), expected, atol=3e-6, rtol=3e-6)
        finite = lse.isfinite()
        torch.testing.assert_close(got_lse.double()[finite], lse[finite], atol=3e-6, rtol=3e-6)


def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients():
    q, k, v = (torch.randn(2, 3, 1, 4, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, True, False], [False, False, False]])
    out, lse = attention_reference(q, k, v, key_mask=mask, return_lse=True)
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize("backend", ["sdpa_math", "reference"])
def test_grad_vmap_and_vmap_of_grad(backend):
    """vmap over a leading axis equals a loop."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 2, 5, 3, 8, generator=g, dtype=torch.float64) for _ in range(3))
    f = lambda q, k, v: attention(q, k, v, site="self", backend=backend)  # noqa: E731
    loss = lambda q, k, v: f(q, k, v).square().sum()  # noqa: E731
    torch.testing.assert_close(vmap(f)(q, k, v), torch.stack([f(*t) for t in zip(q, k, v)]))
    looped = [torch.stack(g) for g in zip(*[grad(loss, (0, 1, 2))(*t) for t in zip(q, k, v)])]
    torch.testing.assert_close(list(vmap(grad(loss, (0, 1, 2)))(q, k, v)), looped)


def test_unknown_and_unusable_backends_say_why():
    q = torch.randn(1, 2, 1, 8)
    with pytest.raises(UserError, match=r"unknown backend 'sdpa_cuda'.*did you mean.*allowed: auto, sdpa"):
        attention(q, q, q, site="self", backend="sdpa_cuda")
    with pytest.raises(UserError, match="'sdpa_flash' cannot serve this call: it needs a CUDA device"):
        attention(q, q, q, site="self", backend="sdpa_flash")
    with pytest.raises(UserError, match="'sdpa' cannot serve this call: .*log-sum-exp"):
        attention(q, q, q, site="self", backend="sdpa", return_lse=True)
    with pytest.raises(UserError, match="unknown backend 'fast'"):
        Attention("fast")
    why = explain_attention(q, return_lse=True)
    assert list(why) == [b.name for b in BACKENDS] and why["reference"] == "usable" and "log-sum-exp" in why["sdpa"]


def test_bad_shapes_are_listed_together():
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 4, 2, 8)
    with pytest.raises(UserError, match=r"(?s)site 'cross'.*none of self.*heads a multiple"):
        attention(q, k, k, site="cross")
    with pytest.raises(UserError, match=r"key_mask must be \[B, Lk\] = \[1, 2\]"):
        attention(q, q, q, site="self", key_mask=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(UserError, match="share a dtype"):
        attention(q, q.double(), q, site="self")
