"""Attention backends against dense float64 maths, under transforms, and their refusals."""

import interpret  # isort: skip  # noqa: F401  (before Triton is imported)

import dataclasses
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

from core.errors import UserError
from kernels import Attention, attention, attention_reference, explain_attention
from kernels.attention import BACKENDS, AttentionRequest, by_hand, dispatch, print_choice
from kernels.attention.table import TABLE, Row, preferred

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
    for backend in ("auto", "triton", "reference"):
        options = {"site": "self", "backend": backend}
        for wrong in (torch.int64, torch.uint8, torch.float32):  # tokenizers give int64
            with pytest.raises(UserError, match=f"key_mask must be bool, got {wrong}"):
                attention(q, q, q, key_mask=torch.ones(1, 2, dtype=wrong), **options)
            if wrong != torch.int64:
                with pytest.raises(UserError, match=f"lens must be int32 or int64, got {wrong}"):
                    attention(q, q, q, lens=torch.ones(1, dtype=wrong), **options)
        with pytest.raises(UserError, match=r"lens must be \[B\] = \[1\], got \[1, 2\]"):
            attention(q, q, q, lens=torch.ones(1, 2, dtype=torch.int64), **options)
        with pytest.raises(UserError, match="(?s)k is on meta, q on cpu.*v is on meta"):
            attention(q, q.to("meta"), q.to("meta"), **options)
        with pytest.raises(UserError, match="key_mask is on meta"):
            attention(q, q, q, key_mask=torch.ones(1, 2, dtype=torch.bool, device="meta"), **options)
        with pytest.raises(UserError, match="must be floating, got torch.int32"):
            attention(q.int(), q.int(), q.int(), **options)
    none = torch.zeros(1, 2, 0, 8)
    assert attention(none, none, none, site="self").shape == (1, 2, 0, 8)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "sdpa_math"])
def test_the_gradient_of_a_bias_is_the_references(backend):
    """Attention strengths are trained through it."""
    q, k, v = (torch.randn(2, n, 3, 16, dtype=torch.float64) for n in (5, 7, 7))
    bias, weight = torch.randn(2, 1, 5, 7, dtype=torch.float64), torch.randn(2, 5, 3, 16, dtype=torch.float64)

    def gradients(**options):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        out = attention(*leaves[:3], site="self", bias=leaves[3], **options)
        return torch.autograd.grad((out * weight).sum(), leaves)

    torch.testing.assert_close(gradients(backend=backend), gradients(backend="reference"))


def test_cudnn_is_refused_where_results_must_repeat():
    """Its backward pass adds in any order, and PyTorch's own check sees only its own calls of it."""
    plain = {"forward_by_hand": None, "backward_by_hand": None}
    for name in ("sdpa_cudnn", "triton_cudnn"):
        assert "deterministic" in dispatch.BY_NAME[name].refusal(request(repeat=True, **plain))
        assert "deterministic" not in str(dispatch.BY_NAME[name].refusal(request(**plain)))


def test_names_are_stripped_and_in_any_case():
    q = torch.randn(1, 2, 1, 8)
    assert torch.equal(attention(q, q, q, site="self", backend=" Reference\n"), attention_reference(q, q, q))
    assert Attention(" SDPA_math ").backend == "sdpa_math"
    for wrong in ("", "sdpa cudnn", None, 3):
        with pytest.raises(UserError, match="unknown backend .*; allowed: auto, sdpa, .*, triton, .*, fa4, reference"):
            attention(q, q, q, site="self", backend=wrong)


def request(**changes):
    base = AttentionRequest("cuda", torch.bfloat16, 128, False, False, False, False, 0, (9, 0), 4290, 4290)
    return dataclasses.replace(base, **changes)


IN_GLUON = {"forward_by_hand": None, "backward_by_hand": None}
LONG = {"queries": 32760, "keys": 32760}


@pytest.mark.parametrize(
    "changes, name",
    [
        ({}, "sdpa"),
        ({"forward_by_hand": None}, "triton"),
        ({"forward_by_hand": None, "queries": 2000, "keys": 2000}, "sdpa"),
        ({"forward_by_hand": None, "keys": 512}, "sdpa"),
        ({"forward_by_hand": None, "head_dim": 64}, "sdpa"),
        ({**IN_GLUON, "gradients": True}, "triton_cudnn"),
        ({**IN_GLUON, "queries": 2000, "keys": 2000, "gradients": True}, "sdpa"),
        ({**IN_GLUON, **LONG, "gradients": True}, "triton_cudnn"),
        ({**IN_GLUON, **LONG, "gradients": True, "grouped": True}, "sdpa"),
        ({"forward_by_hand": None, **LONG, "gradients": True}, "sdpa"),
        ({"return_lse": True}, "triton"),
        ({"tangents": True}, "triton"),
        ({"tangents": True, "biased": True}, "reference"),
        ({"capability": (10, 0), "keys": 512}, "sdpa"),  # fa4 leads there, but is not installed
        ({"capability": (12, 0)}, "sdpa"),
        ({"device": "cpu", "capability": None}, "sdpa"),
        ({"device": "cpu", "capability": None, "return_lse": True}, "reference"),
        ({"device": "cpu", "capability": None, "tangents": True}, "reference"),
    ],
)
def test_what_auto_takes(changes, name):
    """The capability is part of the request, so the routing of GPUs that are not here is a pure function."""
    assert dispatch._choice("auto", request(**changes)).name == name


def test_a_request_says_why_kernels_in_gluon_do_not_serve_it(monkeypatch, capsys):
    """As on a Hopper GPU: the facts of the call decide, deterministic algorithms among them."""
    monkeypatch.setattr(dispatch, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(by_hand, "_installed", lambda: "3.6.0")
    monkeypatch.setattr(dispatch, "triton_fault", lambda device: None)
    q = torch.empty(1, 32760, 12, 128, dtype=torch.bfloat16, device="meta").requires_grad_()
    auto = lambda x=q, **options: dispatch.order(dispatch.request_of(x, **options))[0]  # noqa: E731
    assert auto() == "triton_cudnn" and auto(q.detach()) == "triton"
    lens, mask = torch.empty(1, device="meta"), torch.empty(1, 32760, device="meta", dtype=torch.bool)
    for options in ({"causal": True}, {"lens": lens}, {"key_mask": mask}, {"bias": lens}):
        assert auto(**options) == auto(q.detach(), **options) == "sdpa"
    torch.use_deterministic_algorithms(True)
    try:
        assert auto() == "sdpa" and auto(q.detach()) == "triton"
        print_choice(q, backend="triton")
    finally:
        torch.use_deterministic_algorithms(False)
    told = capsys.readouterr().out
    assert "forward: in Gluon" in told and "backward: in Triton, not in Gluon: deterministic algorithms" in told
    monkeypatch.setattr(by_hand, "_installed", lambda: "3.5.0")
    assert auto() == auto(q.detach()) == "sdpa"
    print_choice(q)
    assert "forward: in Triton, not in Gluon: Triton 3.5.0 is none of" in capsys.readouterr().out


def test_the_table_answers_by_device_kind_pass_and_size():
    rows = (
        Row((9, 0), ("triton",), kind="cross", passes="backward", head_dim=(64, 128), length=(1000, 40000)),
        Row((9, 0), ("sdpa_cudnn", "sdpa")),
    )
    first = lambda *a: preferred(*a, table=rows)[0]  # noqa: E731
    assert first((9, 0), "cross", "backward", 64, 1000) == first((9, 0), "cross", "backward", 128, 40000) == "triton"
    others = [("self", "backward", 64, 1000), ("cross", "forward", 64, 1000), ("cross", "backward", 63, 1000),
              ("cross", "backward", 64, 999)]  # fmt: skip
    assert all(first((9, 0), *call) == "sdpa_cudnn" for call in others)
    assert preferred((8, 0), "self", "forward", 64, 9, rows) == ("sdpa", "triton", "reference")
    assert preferred((9, 0), "self", "forward", 64, 9, rows) == ("sdpa_cudnn", "sdpa", "triton", "reference")
    known = {b.name for b in BACKENDS}
    for row in TABLE:
        assert set(row.names) <= known


def test_why_each_backend_was_or_was_not_usable(capsys):
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 5, 1, 16)
    bias = torch.zeros(1, 1, 2, 5)
    assert "no additive bias; sdpa and reference do" in explain_attention(q, k, k, bias=bias)["triton"]
    print_choice(q, k, k, bias=bias)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "attention, torch.float32, 2 x 5, head size 16, on cpu:"
    assert lines[1].startswith("-> sdpa: usable")
    assert [line[3:].split(":")[0] for line in lines[1:]] == [b.name for b in BACKENDS]
    assert "needs a CUDA device" in lines[2]
    print_choice(q, backend="Reference")
    assert "-> reference: usable" in capsys.readouterr().out


def test_a_cached_choice_depends_on_every_part_of_the_request():
    """Equal calls ask no backend again; another dtype, shape, mask, device or name does."""
    q = torch.randn(1, 2, 1, 16)
    attention(q, q, q, site="self")
    hits = dispatch._decide.cache_info().hits
    attention(q, q, q, site="self")
    assert dispatch._decide.cache_info().hits == hits + 1
    torch.use_deterministic_algorithms(True)
    try:
        attention(q, q, q, site="self")
    finally:
        torch.use_deterministic_algorithms(False)
    assert dispatch._decide.cache_info().hits == hits + 1
    changes = [{"dtype": torch.float16}, {"queries": 3}, {"masked": True}, {"index": 1}, {"return_lse": True}]
    assert len({request(), *(request(**c) for c in changes)}) == 1 + len(changes)


def test_compiled_code_leaves_the_cache_alone():
    q = torch.randn(1, 7, 1, 16)
    before = dispatch._decide.cache_info()
    torch.compile(lambda q: attention(q, q, q, site="self"), fullgraph=True, backend="eager")(q)
    assert dispatch._decide.cache_info() == before


@pytest.mark.parametrize("name, module", [("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")])
def test_flash_attention_packages_when_they_are_there(name, module, monkeypatch):
    """Refused by name when missing; when there, their public function gets our arguments."""
    q, k = torch.randn(2, 3, 2, 16), torch.randn(2, 5, 2, 16)
    assert "is not installed" in explain_attention(q)[name]
    stub = types.ModuleType(module)

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        return attention_reference(q, k, v, scale=softmax_scale, causal=causal), None

    stub.flash_attn_func = flash_attn_func
    if "." in module:
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
        sys.modules["flash_attn"].cute = stub
    monkeypatch.setitem(sys.modules, module, stub)
    assert "needs a CUDA device" in explain_attention(q)[name]
    refusal = dispatch.BY_NAME[name].refusal
    assert refusal(request()) is None
    assert "takes neither key masks nor a bias" in refusal(request(masked=True))
    assert "log-sum-exp has no gradient" in refusal(request(return_lse=True))
    assert "compute capability" in refusal(request(capability=(8, 0)))
    assert "head size 264" in refusal(request(head_dim=264))
    if name == "fa4":
        assert dispatch._choice("auto", request(capability=(10, 0), keys=512)).name == "fa4"
    got = dispatch.BY_NAME[name].run(q, k, k, key_mask=None, lens=None, bias=None, causal=True, scale=0.3)
    assert torch.equal(got, attention_reference(q, k, k, causal=True, scale=0.3))


@pytest.mark.parametrize("masked", [False, True])
def test_forward_mode_of_the_reference_under_every_transform(masked):
    """jvp alone, mapped, of a gradient, under a gradient and compiled, against finite differences in float64."""
    g = torch.Generator().manual_seed(0)
    q, k, v, t = (torch.randn(3, 1, 5, 2, 4, generator=g, dtype=torch.float64) for _ in range(4))
    options = {"lens": torch.tensor([3]), "causal": True} if masked else {}
    f = lambda q, k, v: attention(q, k, v, site="self", **options)  # noqa: E731
    along = lambda q: f(q, q + k[0], q * v[0])  # noqa: E731
    step = 1e-6  # the error of a central difference is step**2 plus 1e-16 / step
    expected = (along(q[0] + step * t[0]) - along(q[0] - step * t[0])) / (2 * step)
    close = lambda a, b: torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)  # noqa: E731
    tangent = lambda q, t: jvp(along, (q,), (t,))[1]  # noqa: E731
    close(tangent(q[0], t[0]), expected)
    close(vmap(tangent)(q, t)[0], expected)
    close(jvp(vmap(along), (q,), (t,))[1][0], expected)
    close(torch.compile(tangent, fullgraph=True, backend="eager")(q[0], t[0]), expected)
    slope = grad(lambda q: along(q).square().sum())
    expected = (slope(q[0] + step * t[0]) - slope(q[0] - step * t[0])) / (2 * step)
    close(jvp(slope, (q[0],), (t[0],))[1], expected)
    # The Hessian of sum(along^2) times t, the other way round.
    close(grad(lambda q: (tangent(q, t[0]) * 2 * along(q)).sum())(q[0]), expected)
    with pytest.raises(UserError, match="'sdpa' cannot serve this call: forward-mode"):
        jvp(lambda q: attention(q, q, q, site="self", backend="sdpa"), (q[0],), (t[0],))


def test_triton_refuses_what_would_be_a_silent_zero_tangent():
    q = torch.randn(1, 18, 1, 16, device=interpret.DEVICE)
    f = lambda q: jvp(lambda q: attention(q, q, q, site="self", backend="triton"), (q,), (q,))[1]  # noqa: E731
    with pytest.raises(Exception, match="Observed exception|no forward-mode derivative"):
        torch.compile(f, fullgraph=True, backend="eager")(q)
