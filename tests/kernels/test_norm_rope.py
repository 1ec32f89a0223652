"""RMSNorm and rotary embedding of queries and keys against float64, Wan's own composition, and every transform."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from norm_cases import DEVICE, GPU, as_sum, assert_close, check, launches, randn, with_gradients
from torch.func import grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from core.errors import UserError
from kernels import norm_rope, qk_norm_rope
from kernels.norm import explain_qk_norm_rope, reference, rope_launch
from nn import layers, rope

pytest.importorskip("triton")
BOTH = functools.partial(qk_norm_rope, backend="triton")
ONE = functools.partial(norm_rope, backend="triton")
TOKENS, HEADS = (300, (1, 12, 32)) if GPU else (5, (1, 3, 4))
OPTIONS = [{"over": o, "pairs": p} for o in ("inner", "head") for p in ("interleaved", "half")]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory for outputs is full of NaN: an element that a kernel leaves out shows."""
    plain = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **k: plain(x, *a, **k).fill_(float("nan")))


def tables(seed, *shape):
    angles = randn(seed, *shape) * 3
    return angles.cos(), angles.sin()


def weight_of(seed, h, d, over, dtype=torch.float32):
    return randn(seed, h * d if over == "inner" else d, dtype=dtype)


@st.composite
def calls(draw):
    b, t, h = draw(st.integers(1, 3)), draw(st.integers(1, TOKENS)), draw(st.sampled_from(HEADS))
    d, dtype = draw(st.sampled_from([4, 12, 16])), draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    options, seed = draw(st.sampled_from(OPTIONS)), draw(st.integers(0, 999))
    packed = randn(seed, b, t, 3, h, d, dtype=dtype)
    inputs = dict(zip("qk", packed.unbind(2)[:2]))
    if draw(st.booleans()):
        small = draw(st.sampled_from([torch.float32, dtype]))
        for i, name in enumerate(("q_weight", "k_weight")):
            inputs[name] = weight_of(seed + 1 + i, h, d, options["over"], small)
    shape = draw(st.sampled_from([None, (t,), (b, t), (1, t), (b, t, h), (1, t, h), (b, t, 1)]))
    return inputs, None if shape is None else tables(seed + 3, *shape, d // 2), options, dtype


@given(case=calls())
def test_qk_norm_rope_and_its_gradients(case):
    inputs, angles, options, dtype = case
    double = None if angles is None else tuple(t.double() for t in angles)
    kernel = functools.partial(BOTH, eps=1e-5, rope=angles, **options)
    check(kernel, functools.partial(reference.qk_norm_rope, eps=1e-5, rope=double, **options), inputs, dtype)


def test_the_reference_is_the_composition_of_wan_bit_for_bit():
    q, k, w = randn(0, 2, 12, 48), randn(1, 2, 12, 48), randn(2, 2, 48)
    angles = rope.rope_3d((3, 2, 2), 16, device=DEVICE)
    got = reference.qk_norm_rope(*(x.unflatten(-1, (3, 16)) for x in (q, k)), eps=1e-6, q_weight=w[0], k_weight=w[1],
                                 rope=angles)  # fmt: skip
    for one, x, weight in zip(got, (q, k), w):
        normed = layers.split_heads(layers.rms_norm_across_heads(x, weight, 1e-6), 16)
        assert torch.equal(one, rope.apply_rope(normed, angles))
        assert torch.equal(reference.norm_rope(x.unflatten(-1, (3, 16)), eps=1e-6, weight=weight), normed)


def test_the_two_conventions_differ_by_an_order_of_channels():
    x, angles = randn(0, 1, 4, 2, 8), tables(1, 4, 4)
    order = torch.arange(8).view(4, 2).T.flatten()  # even channels, then odd ones
    plain = norm_rope(x, eps=1e-6, rope=angles)
    torch.testing.assert_close(norm_rope(x[..., order], eps=1e-6, rope=angles, pairs="half"), plain[..., order])


def test_keys_of_another_length_and_number_of_heads():
    """Cross-attention and grouped queries: q and k are launched apart, and one alone is a call of its own."""
    q, k = randn(0, 2, 5, 4, 8), randn(1, 2, 3, 2, 8)
    kernel, plain = (functools.partial(f, eps=1e-5, over="head") for f in (BOTH, reference.qk_norm_rope))
    inputs = {"q": q, "k": k, "q_weight": randn(2, 8), "k_weight": randn(3, 8)}
    check(kernel, plain, inputs, torch.float32)
    one = {"x": k, "weight": randn(4, 16)}
    check(functools.partial(ONE, eps=1e-5), functools.partial(reference.norm_rope, eps=1e-5), one, torch.float32)


def test_widths_beyond_one_launch():
    """40 heads of 128 (Wan 14B) and the limit, 128 heads."""
    for h in (40, 128):
        inputs = {"q": randn(0, 1, 1, h, 128), "k": randn(1, 1, 1, h, 128)}
        inputs |= {"q_weight": randn(2, h * 128), "k_weight": randn(3, h * 128)}
        angles = tables(4, 1, 64)
        kernel = functools.partial(BOTH, eps=1e-5, rope=angles)
        double = tuple(t.double() for t in angles)
        check(kernel, functools.partial(reference.qk_norm_rope, eps=1e-5, rope=double), inputs, torch.float32)


@pytest.mark.parametrize("kernel", ["rope_forward", "rope_backward"])
def test_every_launch_gives_the_same_numbers(kernel):
    q, k, dq, dk = (randn(i, 2, 9, 3, 8) for i in range(4))
    head = (q, k, randn(4, 1, 24), randn(5, 1, 24), *(t[None, :, None] for t in tables(6, 9, 4)))
    rstds = rope_launch.rope_forward(*head, 1e-5, "inner", "half")[2:]
    run = {
        "rope_forward": lambda how: rope_launch.rope_forward(*head, 1e-5, "inner", "half", how),
        "rope_backward": lambda how: rope_launch.rope_backward(*head, *rstds, dq, dk, "inner", "half", how),
    }[kernel]
    for how in launches(kernel):
        for a, b in zip(run(how), run(None), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_empty_and_gradients_of_one_output():
    empty = {"q": randn(0, 0, 3, 2, 8), "k": randn(0, 0, 3, 2, 8), "q_weight": randn(1, 16), "k_weight": randn(2, 16)}
    got = with_gradients(functools.partial(BOTH, eps=1e-5), empty)
    assert got["output 0"].shape == (0, 3, 2, 8) and not got["q_weight"].any() and not got["k_weight"].any()
    q, k = randn(0, 1, 3, 2, 8), randn(1, 1, 3, 2, 8)
    for i in range(2):
        alone = lambda f: lambda **x: f(x.get("q", q), x.get("k", k), eps=1e-5)[i]  # noqa: B023, E731
        check(alone(BOTH), alone(reference.qk_norm_rope), {"qk"[i]: (q, k)[i]}, torch.float32)


def pair(q, k, w, angles, options=OPTIONS[1]):
    return torch.stack(BOTH(q, k, eps=1e-5, q_weight=w[0], k_weight=w[1], rope=angles, **options))


def plain_pair(q, k, w, angles, options=OPTIONS[1]):
    return torch.stack(
        reference.qk_norm_rope(q, k, eps=1e-5, q_weight=w[0], k_weight=w[1], rope=angles, **options)
    )


def args_of(*lead, over="inner"):
    return [randn(0, *lead, 2, 3, 2, 4), randn(1, *lead, 2, 3, 2, 4), randn(2, *lead, 2, 8 if over == "inner" else 4)]


@pytest.mark.parametrize(
    "mapped, options", [("all", OPTIONS[1]), ("all", OPTIONS[2]), ("q and k", OPTIONS[1]), ("weights", OPTIONS[2])]
)
def test_vmap_folds_and_gives_per_sample_gradients(mapped, options):
    chosen = {"all": range(3), "q and k": range(2), "weights": [2]}[mapped]
    full, single = args_of(3, over=options["over"]), args_of(over=options["over"])
    args = [full[i] if i in chosen else single[i] for i in range(3)]
    dims, angles = (*(0 if i in chosen else None for i in range(3)), None), tables(5, 2, 3, 2)
    run = lambda f: lambda *a: f(*a[:3], angles, options)  # noqa: E731
    got, want = (vmap(run(f), dims)(*args, None) for f in (pair, plain_pair))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    loss = lambda f: lambda *a: as_sum([run(f)(*a)])  # noqa: E731
    got, want = (vmap(grad(loss(f), (0, 1, 2)), dims)(*args, None) for f in (pair, plain_pair))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_vmap_over_tables_and_over_cotangents():
    q, k, w = args_of()
    angles = tables(5, 4, 3, 2)
    got, want = (vmap(f, (None, None, None, 0))(q, k, w, angles) for f in (pair, plain_pair))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    one = (q[:1], k[:1], w)
    rows = [vmap(vjp(lambda *a: f(*a, tuple(t[0] for t in angles)), *one)[1])(randn(8, 5, 2, 1, 3, 2, 4))  # noqa: B023
            for f in (pair, plain_pair)]  # fmt: skip
    for a, b in zip(*rows, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", OPTIONS)
def test_jvp(options):
    args, angles = args_of(over=options["over"]), tables(5, 2, 3, 2)
    tangents = [x.flip(0) for x in args]
    run = lambda f: lambda *a: f(*a, angles, options)  # noqa: E731
    got, want = (jvp(run(f), tuple(args), tuple(tangents)) for f in (pair, plain_pair))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for i in range(3):
        one = lambda f: lambda a: run(f)(*args[:i], a, *args[i + 1 :])  # noqa: B023, E731
        got, want = (jvp(one(f), (args[i],), (tangents[i],))[1] for f in (pair, plain_pair))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_no_silent_zero_gradient_of_the_tables():
    q, k, w = args_of()
    cos, sin = tables(5, 3, 2)
    with pytest.raises(UserError, match="no gradient for cosines and sines"):
        pair(q, k, w, (cos.requires_grad_(), sin))
    with pytest.raises(UserError, match="no gradient for cosines and sines"):
        grad(lambda c: pair(q, k, w, (c, sin)).sum())(cos.detach())
    with pytest.raises(NotImplementedError, match="no derivative of cosines"):
        jvp(lambda c: pair(q, k, w, (c, sin)), (cos.detach(),), (sin,))


def test_checkpoint_and_one_compiled_graph():
    q, k, w = args_of()
    angles, inputs = tables(5, 3, 2), {"q": q, "k": k, "w": w}
    call = lambda q, k, w: pair(q, k, w, angles)  # noqa: E731
    want = with_gradients(call, inputs)
    again = with_gradients(lambda **a: checkpoint(call, *a.values(), use_reentrant=False), inputs)
    assert all(torch.equal(again[n], want[n]) for n in want), "deterministic too"
    compiled = torch.compile(call, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    assert_close(with_gradients(compiled, inputs), want, 1e-6)


def test_faults_and_reasons():
    q, k = randn(0, 2, 3, 2, 8), randn(1, 2, 3, 2, 8)
    with pytest.raises(UserError) as error:
        qk_norm_rope(q, k, eps=1e-6, q_weight=randn(2, 7), rope=tables(3, 4, 4), over="heads")
    for text in ("q_weight must be", "cosines must be [T, D/2]", "over must be one of inner, head, got 'heads'"):
        assert text in str(error.value)
    with pytest.raises(UserError, match=r"q must be \[B, T, H, D\], got \[2, 3, 16\]"):
        qk_norm_rope(q.flatten(2), k, eps=1e-6)
    with pytest.raises(UserError, match="stride 1"):
        BOTH(q.mT, k.mT, eps=1e-6)
    with pytest.raises(UserError, match="head size must be even, got 7"):
        BOTH(q[..., :7], k[..., :7], eps=1e-6)
    with pytest.raises(UserError, match="sines must be float32, got torch.bfloat16"):
        BOTH(q, k, eps=1e-6, rope=tuple(t.bfloat16() for t in tables(3, 3, 4)))
    assert "float64" in explain_qk_norm_rope(q.double(), k.double())["triton"]
    assert explain_qk_norm_rope(q, k) == dict.fromkeys(("triton", "reference"), "usable")
