"""QAT attention: an oracle that walks the online softmax in float64, kernels against the reference, every transform."""

import dataclasses
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpret import DEVICE, few
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from core.errors import UserError
from kernels import Attention, attention
from kernels.qat import (
    QatAttention,
    explain_qat_attention,
    fake_quant_nvfp4,
    nvfp4_global_scale,
    qat_attention,
)
from kernels.qat import attention as module
from kernels.qat.attention import QatRequest

BIG = DEVICE.type == "cuda"
LOG2E = 1.4426950408889634


def draws(shape_q, shape_k, seed, dtype=torch.float32, spread=1.5):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(s, generator=g) * spread for s in (shape_q, shape_k, shape_k))
    return [t.to(DEVICE, dtype) for t in (q, k, v, torch.randn(shape_q, generator=g))]


def error(ours, theirs, floor=1e-30):
    """The norm of the difference over that of `theirs`, or over elements of size `floor` if that is more."""
    ours, theirs = (torch.nan_to_num(t.double().cpu(), neginf=0.0) for t in (ours, theirs))
    return ((ours - theirs).norm() / theirs.norm().clamp(min=floor * max(theirs.numel(), 1) ** 0.5)).item()


def all_of(qkvg, **options):
    """Output, lse and the gradients of q, k, v."""
    q, k, v, g = qkvg
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = qat_attention(*leaves, return_lse=True, **options)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, g)]


# --- the oracle ---------------------------------------------------------------------------------------------


def rounded(x, scale=None):
    """NVFP4 of float64 values (its own oracle is in test_qat_nvfp4.py)."""
    return fake_quant_nvfp4(x.float(), scale, backend="reference").double()


def quantised_p(p, p_scale):
    """One row's weights of one tile, `[64]`."""
    if p_scale == "row":
        return rounded(p, 2688 / p.max().float().clamp(min=1e-8))
    return rounded(p, torch.tensor(2688.0) if p_scale == "static" else None)


def online(s, v, p_scale):
    """One row of scores `[Lk]` in log2, -inf where masked, by the online softmax: weights of v, exact ones, lse."""
    peak, total = torch.tensor(-torch.inf).double(), torch.zeros(()).double()
    acc, exact = torch.zeros(2, len(s)).double()
    s = torch.cat([s, torch.full((-len(s) % 64,), -torch.inf).double()])
    for start in range(0, len(s), 64):
        tile = s[start : start + 64]
        top = torch.maximum(peak, tile.max())
        if top == -torch.inf:
            continue
        p, keep = (tile - top).exp2(), (peak - top).exp2()
        acc, exact, total, peak = acc * keep, exact * keep, total * keep + p.sum(), top
        here = slice(start, start + min(64, len(acc) - start))
        acc[here], exact[here] = quantised_p(p, p_scale)[: here.stop - start], p[: here.stop - start]
    share = 1 / total if total > 0 else total
    return acc * share, exact * share, (peak + total.log2()) / LOG2E


def oracle(q, k, v, g, *, lens=None, causal=False, scale=None, smooth_k=False, p_scale="group",
           global_scales=False, dv="consistent"):  # fmt: skip
    """As `all_of`: rows one by one, gradients by autograd through `softmax` with straight-through weights."""
    q, k, v, g = (t.cpu().double().transpose(1, 2) for t in (q, k, v, g))
    (b, h, lq, d), lk = q.shape, k.shape[2]
    lens = torch.full((b,), lk) if lens is None else lens.cpu()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    outs, lses = torch.zeros(b, h, lq, d).double(), torch.full((b, h, lq), -torch.inf).double()
    for i in range(b):
        for j in range(h):
            n = lens[i].item()
            if n == 0:
                continue
            real = [t[i, j, :n] if t is not leaves[0] else t[i, j] for t in leaves]
            mean = real[1].detach().mean(0, keepdim=True) if smooth_k else 0
            real[1] = real[1] - mean
            scales = [nvfp4_global_scale(t.detach()) if global_scales else None for t in real]
            qh, kh, vh = (t + (rounded(t.detach(), c) - t).detach() for t, c in zip(real, scales))
            scores = qh @ kh.T * (d**-0.5 if scale is None else scale)
            if causal:
                scores = scores.masked_fill(torch.ones(lq, n).tril(lk - lq) == 0, -torch.inf)
            seen = scores.detach().isfinite().any(-1)
            rows = [online(r, vh, p_scale) for r in scores.detach()[seen] * LOG2E]
            weights = torch.stack([r[0] for r in rows])
            soft = scores[seen].softmax(-1)
            torch.testing.assert_close(soft.detach(), torch.stack([r[1] for r in rows]))
            outs[i, j, seen] = (weights @ vh).detach()
            lses[i, j, seen] = torch.stack([r[2] for r in rows])
            if dv == "published":
                padded = torch.nn.functional.pad(soft.detach(), (0, -n % 64))
                weights = rounded(padded)[:, :n]
            ((soft + (weights - soft).detach()) @ vh * g[i, j, seen]).sum().backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
    return [outs.transpose(1, 2), lses, *[t.transpose(1, 2) for t in grads]]


OPTIONS = [
    {},
    {"dv": "published"},
    {"causal": True, "p_scale": "static"},
    {"smooth_k": True, "global_scales": True, "p_scale": "row", "scale": 0.4},
    {"lens": [70, 0]},
    {"lens": [129, 64], "causal": True, "smooth_k": True, "p_scale": "row"},
]


def prepared(options):
    lens = options.get("lens")
    return options if lens is None else {**options, "lens": torch.tensor(lens, device=DEVICE)}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_reference_is_the_online_softmax_in_float64(options):
    """float32 against float64: 1e-6, and a code that falls on the other side of a tie moves 0.5 of about 1e4 units."""
    qkvg = draws((2, 9, 2, 16), (2, 130, 2, 16), 0)
    options = prepared(options)
    for ours, theirs in zip(all_of(qkvg, backend="reference", **options), oracle(*qkvg, **options)):
        assert error(ours, theirs) < 1e-3


# --- kernels ------------------------------------------------------------------------------------------------

# float32 operands under the interpreter (ties as above); bfloat16 products of unrounded P, dO and dS on a GPU: 2^-8
# each, and an output in bfloat16: 2^-9.
TOLERANCE = 1e-2 if BIG else 1e-3
DTYPE = torch.bfloat16 if BIG else torch.float32
SIZES = [(600, 1000, 128), (257, 513, 80), (64, 64, 16), (300, 129, 256)] if BIG else [(70, 130, 32)]


def check(qkvg, **options):
    ours = all_of(qkvg, backend="triton", **options)
    assert all(t.isfinite().all() for i, t in enumerate(ours) if i != 1), "every element is written"
    # The floor: with a single key the gradients of q and k are differences of equal numbers.
    found = [error(a, b, floor=0.1) for a, b in zip(ours, all_of(qkvg, backend="reference", **options))]
    assert max(found) < TOLERANCE, found
    return ours


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kernels_equal_the_reference(size, options):
    lq, lk, d = size
    heads = 2 if BIG or options.get("smooth_k") else 1
    check(draws((2, lq, heads, d), (2, lk, heads, d), 1, DTYPE), **prepared(options))


@given(
    lq=st.sampled_from([1, 17, 64, 65]),
    lk=st.sampled_from([1, 16, 63, 64, 100]),
    d=st.sampled_from([16, 48]),
    layout=st.sampled_from(["blhd", "bhld", "packed"]),
    causal=st.booleans(),
    seed=st.integers(0, 10**6),
)
@few(6)
def test_lengths_head_sizes_and_strides(lq, lk, d, layout, causal, seed):
    """Views of `[B, H, L, D]` and of a packed projection, more queries than keys, a single query or key."""
    qkvg = draws((1, lq, 2, d), (1, lk, 2, d), seed, DTYPE)
    if layout == "bhld":
        qkvg = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkvg]
    if layout == "packed":
        qkvg = [torch.cat([torch.full_like(t, torch.nan), t], -1)[..., d:] for t in qkvg]
    check(qkvg, causal=causal)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_keys_beyond_lens_are_never_looked_at(backend):
    q, k, v, g = draws((1, 20, 1, 16), (1, 90, 1, 16), 2, DTYPE)
    options = {"backend": backend, "smooth_k": True, "global_scales": True}
    short = all_of((q, k[:, :70], v[:, :70], g), **options)
    k, v = (torch.cat([t[:, :70], torch.full_like(t[:, 70:], torch.nan)], 1) for t in (k, v))
    whole = all_of((q, k, v, g), lens=torch.tensor([70], device=DEVICE), **options)
    for i, (a, b) in enumerate(zip(short, whole)):
        torch.testing.assert_close(a, b[:, :70] if i > 2 else b)
    assert all((t[:, 70:] == 0).all() for t in whole[3:])


def test_it_is_deterministic_and_a_bounded_workspace_changes_nothing(monkeypatch):
    from kernels.qat import launch

    qkvg = draws((1, 64, 3, 16), (1, 130, 3, 16), 3, DTYPE)
    once = all_of(qkvg, backend="triton")
    monkeypatch.setattr(launch, "WORKSPACE", 1)
    for a, b in zip(once, all_of(qkvg, backend="triton")):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)], ids=str)
def test_nothing_to_attend(backend, sizes):
    lq, lk = sizes
    out, lse, *grads = all_of(draws((2, lq, 1, 16), (2, lk, 1, 16), 0), backend=backend)
    assert out.shape == (2, lq, 1, 16) and (out == 0).all() and (lse == -torch.inf).all()
    assert all((t == 0).all() for t in grads) and [t.shape[1] for t in grads] == [lq, lk, lk]


# --- what the numbers mean ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_published_gradient_of_v_underflows_for_long_rows_and_the_default_does_not(backend):
    """Flat rows: a weight is about 1/L, its scale 1/(6 L) < 2^-10 from 171 keys on. dV of exact weights is true."""
    q, k, v, g = draws((1, 8, 1, 16), (1, 1024, 1, 16), 4, spread=0.3)
    exact = all_of((q, k, v, g), backend="reference")
    weights = (fake_quant_nvfp4(q)[0, :, 0] @ fake_quant_nvfp4(k)[0, :, 0].T / 4).softmax(-1)
    truth = weights.T @ g[0, :, 0]
    published = all_of((q, k, v, g), backend=backend, dv="published")[4][0, :, 0]
    consistent = all_of((q, k, v, g), backend=backend)[4][0, :, 0]
    assert published.abs().max() == 0 and truth.abs().max() > 1e-3
    # E2M1 has one mantissa bit: errors up to a sixth of a value, and E4M3 scales below 2^-6 lose bits; a third at most.
    assert error(consistent, truth) < 0.3
    cosine = torch.nn.functional.cosine_similarity(consistent.flatten(), truth.flatten(), 0)
    assert cosine > 0.97
    # And it is the gradient of what the forward pass computes: out is linear in the quantised V, dV its transpose.
    torch.testing.assert_close((consistent * fake_quant_nvfp4(v)[0, :, 0]).sum(), (exact[0] * g).sum(),
                               rtol=1e-3, atol=1e-3)  # fmt: skip


def test_it_imitates_attention_and_finer_scales_of_p_imitate_it_better():
    """Against attention of the quantised Q, K, V in full precision, on rows long enough to need the range of scales."""
    q, k, v, _ = draws((1, 16, 2, 32), (1, 2048, 2, 32), 5, spread=1.0)
    exact = attention(*(fake_quant_nvfp4(t) for t in (q, k, v)), site="self", backend="reference")
    errors = {p: error(qat_attention(q, k, v, p_scale=p), exact) for p in ("group", "static", "row")}
    assert errors["row"] < errors["group"] and errors["static"] < errors["group"] < 0.5
    assert errors["row"] > 1e-4, "P is quantised"


def test_smoothing_k_does_not_move_the_softmax_but_helps_its_precision():
    q, k, v, _ = draws((1, 16, 2, 32), (1, 300, 2, 32), 6, spread=1.0)
    k = k + 10 * torch.randn(1, 1, 2, 32, device=DEVICE, generator=None if BIG else torch.Generator().manual_seed(1))
    exact = attention(q, k, v, site="self", backend="reference")
    assert error(qat_attention(q, k, v, smooth_k=True), exact) < 0.5 * error(qat_attention(q, k, v), exact)


def test_scores_do_not_depend_on_the_other_heads():
    """Global scales are per sample and head: what sequence parallelism hands to a rank does not change a bit."""
    qkvg = draws((2, 9, 4, 16), (2, 70, 4, 16), 7)
    whole = all_of(qkvg, global_scales=True, smooth_k=True, backend="reference")
    part = all_of([t[:1, :, 1:3] for t in qkvg], global_scales=True, smooth_k=True, backend="reference")
    torch.testing.assert_close(part[0], whole[0][:1, :, 1:3])
    torch.testing.assert_close(part[3], whole[3][:1, :, 1:3])


# --- transforms ---------------------------------------------------------------------------------------------

FULL = {"smooth_k": True, "global_scales": True, "p_scale": "row"}


@pytest.mark.parametrize("backend, options", [("reference", {}), ("reference", FULL), ("triton", FULL)], ids=str)
def test_grad_vmap_and_vmap_of_grad(backend, options):
    q, k, v, g = draws((2, 1, 20, 1, 16), (2, 1, 70, 1, 16), 8)
    f = functools.partial(qat_attention, backend=backend, **options)
    loss = lambda q, k, v, g: (f(q, k, v) * g).sum()  # noqa: E731
    torch.testing.assert_close(vmap(f)(q, k, v), torch.stack([f(*t) for t in zip(q, k, v)]))
    both = vmap(grad(loss, (0, 1, 2)))(q, k, v, g)
    for i in range(2):
        leaves = [t[i].clone().requires_grad_() for t in (q, k, v)]
        loss(*leaves, g[i]).backward()
        for a, b in zip(both, leaves):
            torch.testing.assert_close(a[i], b.grad)
    shared = vmap(f, in_dims=(0, None, None))(q, k[0], v[0])
    torch.testing.assert_close(shared[1], f(q[1], k[0], v[0]))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_checkpoint_and_one_compiled_graph(backend):
    q, k, v, g = draws((1, 20, 1, 16), (1, 70, 1, 16), 9)
    expected = all_of((q, k, v, g), backend=backend, **FULL)
    loss = lambda q, k, v: (qat_attention(q, k, v, backend=backend, **FULL) * g).sum()  # noqa: E731
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if BIG else "aot_eager")
    for run in (lambda *t: checkpoint(loss, *t, use_reentrant=False), compiled):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        run(*leaves).backward()
        for leaf, b in zip(leaves, expected[2:]):
            torch.testing.assert_close(leaf.grad, b)


def test_without_gradients_the_output_is_the_same():
    q, k, v, _ = draws((1, 20, 1, 16), (1, 70, 1, 16), 10)
    for backend in ("reference", "triton"):
        expected = qat_attention(q, k, v, backend=backend)
        with torch.no_grad():
            assert torch.equal(qat_attention(q, k, v, backend=backend), expected)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_forward_mode_is_refused(backend):
    q, k, v, _ = draws((1, 4, 1, 16), (1, 4, 1, 16), 11)
    with pytest.raises(NotImplementedError, match="qat_attention has no derivative of this kind"):
        jvp(lambda q: qat_attention(q, k, v, backend=backend), (q,), (q,))


# --- the front door -----------------------------------------------------------------------------------------


def test_faults_are_listed_together():
    q, k = torch.zeros(1, 2, 2, 24), torch.zeros(1, 2, 2, 24)
    with pytest.raises(UserError, match=r"(?s)head size 24 is no multiple of 16.*scale.*-1.*p_scale 'both'.*dv 'none'"):
        qat_attention(q, k, k, scale=-1, p_scale="both", dv="none")
    with pytest.raises(UserError, match=r"batch, heads and head size shared"):
        qat_attention(torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, 2, 16))
    with pytest.raises(UserError, match=r"lens must be \[B\] = \[1\], got \[2\]"):
        qat_attention(*[torch.zeros(1, 2, 2, 16)] * 3, lens=torch.ones(2))
    with pytest.raises(UserError, match="share a floating-point dtype"):
        qat_attention(torch.zeros(1, 2, 2, 16), *[torch.zeros(1, 2, 2, 16).half()] * 2)
    with pytest.raises(UserError, match="unknown backend 'tritton'.*allowed: auto, native_fp4, triton, reference"):
        qat_attention(*[torch.zeros(1, 2, 2, 16)] * 3, backend="tritton")


@pytest.mark.parametrize(
    "capability, native, triton",
    [
        ((8, 0), "FP4 matrix products need sm_100 or newer, the device is sm_80", "needs compute capability 9.0"),
        ((9, 0), "FP4 matrix products need sm_100 or newer, the device is sm_90", "usable"),
        ((10, 0), "sm_100 multiplies FP4, but no kernel for it is built yet; triton imitates it there", "usable"),
        ((12, 0), "sm_120 multiplies FP4, but no kernel for it is built yet", "usable"),
    ],
)
def test_what_each_architecture_is_told(monkeypatch, capability, native, triton):
    """By mocked capability only: there was no such GPU."""
    real = module._request
    mocked = lambda q: dataclasses.replace(real(q), device="cuda", capability=capability)  # noqa: E731
    monkeypatch.setattr(module, "_request", mocked)
    q = torch.zeros(1, 2, 2, 16, device=DEVICE)
    why = explain_qat_attention(q)
    assert native in why["native_fp4"] and triton in why["triton"] and why["reference"] == "usable"
    told = explain_qat_attention(torch.zeros(1, 2, 2, 128, device=DEVICE))["triton"]
    assert "not measured" not in told and ("64 and 128 were" in why["triton"]) == why["triton"].startswith("usable")
    with pytest.raises(UserError, match="'native_fp4' cannot serve this call: .*FP4"):
        qat_attention(q, q, q, backend=" Native_FP4 ")


def test_a_cpu_is_told_why_and_gets_the_reference(monkeypatch):
    request = QatRequest("cpu", torch.float32, 16)
    assert "tensors are on cpu" in module._native_refusal(request)
    monkeypatch.setattr(module, "triton_fault", lambda device: "Triton is not installed")
    q = torch.zeros(1, 2, 2, 16)
    with pytest.raises(UserError, match="'triton' cannot serve this call: Triton is not installed"):
        qat_attention(q, q, q, backend="triton")
    assert qat_attention(q, q, q).shape == q.shape


def test_the_wrapper_quantises_its_sites_only():
    """The student's attention; teacher and critic hold another one, in the same process."""
    q, k, v, _ = draws((1, 9, 2, 16), (1, 70, 2, 16), 12)
    student, teacher = QatAttention(Attention(), smooth_k=True), Attention()
    assert torch.equal(student(q, k, v, site="self"), qat_attention(q, k, v, smooth_k=True))
    assert torch.equal(student(q, k, v, site="cross_text"), teacher(q, k, v, site="cross_text"))
    assert error(student(q, k, v, site="self"), teacher(q, k, v, site="self")) > 1e-3
    out, lse = student(q, k, v, site="self", return_lse=True, lens=torch.tensor([50], device=DEVICE))
    assert lse.shape == (1, 2, 9) and out.shape == q.shape
    with pytest.raises(UserError, match="takes lens, but neither key_mask nor bias"):
        student(q, k, v, site="self", key_mask=torch.ones(1, 70, dtype=torch.bool))
    with pytest.raises(UserError, match=r"(?s)site 'selff'.*backend 'x'"):
        QatAttention(sites=("selff",), backend="x")
