"""The Triton attention kernels against dense float64 maths, and under everything that a kernel must compose with.

On a machine without a GPU Triton interprets the kernels, on tiny shapes; with one the same laws run on larger shapes.
"""

import interpret  # isort: skip  (before Triton is imported)

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from core.errors import UserError
from kernels import attention, attention_reference
from kernels.attention import attention_varlen, by_hand, flash_attention, flash_with_tangent
from kernels.attention.tiles import SMALL, splits, tiles_for

DEVICE = interpret.DEVICE
GPU = DEVICE.type == "cuda"
FACTOR = 9 if GPU else 1  # lengths on a GPU are this many times as long
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative error in the norm. float32: sums of at most a few hundred terms. 16-bit: inputs are exact, P and dS are
# rounded to 8 (bf16: 4e-3, or twice that where the interpreter truncates) or 11 bits before they are multiplied, and
# so is the result.
BOUND = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def relative(got, expected) -> float:
    """||got - expected|| / ||expected||, and exactly 0 where nothing is expected."""
    error = (got.double() - expected.double()).norm()
    return (error / expected.double().norm().clamp_min(1e-12)).item()


def draw(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def tensors(b, lq, lk, heads, kv_heads, d, dtype=torch.float32, seed=0):
    shapes = ((b, lq, heads, d), (b, lk, kv_heads, d), (b, lk, kv_heads, d))
    return [draw(s, seed + i, dtype) for i, s in enumerate(shapes)]


def outputs_and_gradients(f, qkv, weights):
    """Output, finite lse and gradients of a loss that uses both; `weights` for the output and the lse."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out, lse = f(*leaves)
    seen = lse.isfinite()
    loss = (out * weights[0]).sum() + (torch.where(seen, lse, 0) * weights[1]).sum()
    return [out, torch.where(seen, lse, -1e3), *torch.autograd.grad(loss, leaves)]


def assert_equals_float64(qkv, dtype, bound=None, **options):
    """Under `bound`, by default the dtype's."""
    bound = BOUND[dtype] if bound is None else bound
    b, lq, heads, d = qkv[0].shape
    weights = [draw((b, lq, heads, d), 7), draw((b, heads, lq), 8)]
    triton = lambda *x: attention(*x, site="self", backend="triton", return_lse=True, **options)  # noqa: E731
    exact = lambda *x: attention_reference(*x, return_lse=True, **options)  # noqa: E731
    got = outputs_and_gradients(triton, qkv, weights)
    expected = outputs_and_gradients(exact, [x.double() for x in qkv], weights)
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        assert relative(x, y) < bound, (name, relative(x, y))


@st.composite
def cases(draw_):
    b, kv, group = draw_(st.integers(1, 2)), draw_(st.integers(1, 2)), draw_(st.sampled_from([1, 3]))
    lq, lk = (draw_(st.integers(1, 40)) * FACTOR - draw_(st.integers(0, 1)) * (FACTOR - 1) for _ in range(2))
    d, dtype = draw_(st.sampled_from([16, 24, 32])), draw_(st.sampled_from(DTYPES))
    layout, seed = draw_(st.sampled_from(["blhd", "bhld", "packed"])), draw_(st.integers(0, 10**6))
    options = {}
    if draw_(st.booleans()):
        options["causal"] = True
    if draw_(st.booleans()):
        options["lens"] = torch.randint(0, lk + 2, (b,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    if draw_(st.booleans()):
        options["key_mask"] = draw((b, lk), seed) < 0.5
    if draw_(st.booleans()):
        options["scale"] = 0.3
    return (b, lq, lk, kv * group, kv, d), dtype, layout, seed, options


def laid_out(x, layout):
    """The same values in another layout: [B, H, L, D] seen as [B, L, H, D], or a slice of a wider row."""
    if layout == "bhld":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.stack([x, x], 2)[:, :, 1] if layout == "packed" else x


@(settings(max_examples=60) if GPU else interpret.few(6))
@given(case=cases())
def test_equals_float64(case):
    """Outputs, log-sum-exp and all gradients, at any length, head grouping, mask, dtype and layout."""
    shape, dtype, layout, seed, options = case
    assert_equals_float64([laid_out(x, layout) for x in tensors(*shape, dtype, seed)], dtype, **options)


@pytest.mark.parametrize("d", [16, 40, 64, 96, 128, 192, 256])
def test_every_head_size(d):
    length = 300 if GPU else 17
    for dtype in DTYPES if GPU else [torch.float32]:
        assert_equals_float64(tensors(1, length, length + 5, 1, 1, d, dtype), dtype)


@pytest.mark.parametrize("lq, lk", [(1, 1), (1, 33), (33, 1), (64, 64), (32, 16)])
def test_length_one_and_whole_tiles(lq, lk):
    assert_equals_float64(tensors(1, lq, lk, 2, 1, 16), torch.float32, causal=True)


@pytest.mark.parametrize("scale", [1e-3, 4.0])
def test_peaked_and_flat_weights(scale):
    """Scores up to some thousands: the weights are one-hot or equal, and nothing overflows.

    The exponent is the difference of a score s and the log-sum-exp, both of which float32 holds to |s| 2^-24: so a
    weight is known to |s| 2^-23, whatever the kernel.
    """
    q, k, v = tensors(1, 48 * FACTOR, 48 * FACTOR, 1, 1, 16)
    q, k = q * 5, k * 5
    largest = scale * torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()).abs().max().item()
    assert_equals_float64([q, k, v], torch.float32, BOUND[torch.float32] + largest * 2**-23, scale=scale)


def test_sums_become_the_gradient_of_q():
    """What follows the kernel in Gluon: sums by head, padded, become dQ in the layout of q."""
    from kernels.attention import launch

    q = laid_out(tensors(2, 35 * FACTOR, 1, 3, 1, 24, torch.float16)[0], "bhld")
    sums = draw((2, 3, -(-q.shape[1] // 128) * 128, 32), 5)
    dq = torch.full_like(q, torch.nan)
    launch.finish_queries(dq, sums, 0.3)
    assert dq.stride() == q.stride()
    assert relative(dq, sums[:, :, : q.shape[1], :24].transpose(1, 2) * 0.3) < BOUND[torch.float16]


hopper_only = pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability()[0] != 9 or by_hand.version_fault() is not None,
    reason="Gluon has no interpreter; compiled for Hopper, for some versions of Triton",
)
IN_GLUON = {"gluon_forward.forward", "triton_backward.prepare", "gluon_backward.backward"} | {
    "triton_backward.finish_queries"
}


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that are launched; outputs are full of NaN before."""
    from kernels.attention import launch

    names, run, output, lse = [], launch._run, launch.new_output, launch.new_lse

    def spy(kernel, *args):
        names.append(f"{kernel.fn.__module__.split('.')[-1]}.{kernel.fn.__name__}")
        run(kernel, *args)

    monkeypatch.setattr(launch, "_run", spy)
    monkeypatch.setattr(launch, "new_output", lambda *args: output(*args).fill_(torch.nan))
    monkeypatch.setattr(launch, "new_lse", lambda *args: lse(*args).fill_(torch.nan))
    return names


# Each head size is one more compilation of both kernels, 20 seconds each.
@hopper_only
@pytest.mark.parametrize("d, dtype", [(128, torch.bfloat16), (72, torch.float16)], ids=str)
def test_by_hand(launched, d, dtype):
    """Lengths that tiles divide or not, several samples, grouped heads, each layout; outputs and gradients."""
    for layout, lq, lk in (("blhd", 2051, 2049), ("bhld", 2048, 2560), ("packed", 2500, 2176)):
        launched.clear()
        assert_equals_float64([laid_out(x, layout) for x in tensors(2, lq, lk, 12, 6, d, dtype)], dtype)
        assert set(launched) == IN_GLUON, launched


@hopper_only
def test_forward_by_hand(launched):
    """More tiles than processors, and fewer; one key, one query; the same bits again."""
    for layout, lq, lk in (("blhd", 1027, 1), ("bhld", 128, 1000), ("packed", 64, 4096), ("blhd", 1, 129)):
        qkv = [laid_out(x, layout) for x in tensors(2, lq, lk, 12, 4, 128, torch.bfloat16)]
        (out, lse), exact = flash_attention(*qkv, return_lse=True), [x.double() for x in qkv]
        for x, y in zip((out, lse), attention_reference(*exact, return_lse=True), strict=True):
            assert relative(x, y) < BOUND[torch.bfloat16], (layout, lq, lk, relative(x, y))
        assert torch.equal(flash_attention(*qkv), out)
    assert launched == ["gluon_forward.forward"] * 8


@hopper_only
def test_our_forward_and_the_backward_of_cudnn(launched):
    """As exact as the two by themselves, in every layout, mapped, and compiled; `auto` takes it for long training."""
    mixed = functools.partial(attention, site="self", backend="triton_cudnn")
    for layout, lq, lk in (("blhd", 2051, 2049), ("bhld", 300, 2560), ("packed", 2500, 2176)):
        launched.clear()
        qkv = [laid_out(x, layout) for x in tensors(2, lq, lk, 6, 6, 128, torch.bfloat16)]
        weight, leaves = draw((2, lq, 6, 128), 9), [x.detach().requires_grad_() for x in qkv]
        wide = [x.double().requires_grad_() for x in qkv]
        out, exact = mixed(*leaves), attention_reference(*wide)
        found = torch.autograd.grad((out * weight).sum(), leaves)
        expected = torch.autograd.grad((exact * weight).sum(), wide)
        for x, y in zip((out, *found), (exact, *expected), strict=True):
            assert relative(x, y) < BOUND[torch.bfloat16], (layout, relative(x, y))
        assert launched == ["gluon_forward.forward"]
        again = torch.compile(mixed, fullgraph=True)(*leaves)
        for x, y in zip(torch.autograd.grad((again * weight).sum(), leaves), found, strict=True):
            assert relative(x, y) < BOUND[torch.bfloat16]
    loss = lambda *x: mixed(*x).float().square().sum()  # noqa: E731
    parts = [torch.stack([x, 2 * x]) for x in tensors(1, 2100, 2100, 2, 2, 128, torch.bfloat16)]
    mapped = vmap(grad(loss, argnums=(0, 1, 2)))(*parts)
    for i in range(2):
        for x, y in zip(mapped, grad(loss, argnums=(0, 1, 2))(*(p[i] for p in parts)), strict=True):
            assert relative(x[i], y) < BOUND[torch.bfloat16]


def test_what_the_mixed_backend_refuses():
    """Everything that one of its two halves cannot do, with the reason."""
    from kernels.attention.dispatch import AttentionRequest, _mixed_refusal

    def refusal(**changes):
        plain = {"masked": False, "biased": False, "causal": False, "return_lse": False, "forward_by_hand": None}
        base = {"device": "cuda", "dtype": torch.bfloat16, "head_dim": 128, "capability": (9, 0), "queries": 4096}
        return _mixed_refusal(AttentionRequest(**(base | plain | changes)))

    assert refusal() is None
    told = {
        "as many heads": {"grouped": True}, "no log-sum-exp": {"return_lse": True}, "float16 or bfloat16":
        {"dtype": torch.float32}, "CUDA device": {"device": "cpu"}, "up to 128": {"head_dim": 256},
        "additive bias": {"biased": True}, "has a mask": {"forward_by_hand": "it has a mask"},
        "jvp": {"tangents": True},
    }  # fmt: skip
    for text, changes in told.items():
        assert text in refusal(**changes), (text, refusal(**changes))


@hopper_only
def test_masks_and_few_tiles_and_results_that_must_repeat_take_the_pair(launched):
    """So does the forward pass where the kernel in Gluon does not serve."""

    def ran(lk, **options):
        launched.clear()
        qkv = tensors(2, 2051, lk, 12, 6, 128, torch.bfloat16)
        assert_equals_float64(qkv, torch.bfloat16, **options)
        return set(launched)

    pair = {"triton_backward.prepare", "triton_backward.backward_keys", "triton_backward.backward_queries"}
    assert ran(2049, causal=True) == ran(2049, lens=torch.tensor([2000, 77], device=DEVICE)) == pair | {
        "triton_forward.forward"
    }
    assert ran(500) == pair | {"gluon_forward.forward"}
    torch.use_deterministic_algorithms(True, warn_only=True)  # the reference too calls cuBLAS
    try:
        assert ran(2049) == pair | {"gluon_forward.forward"}
    finally:
        torch.use_deterministic_algorithms(False)


def test_when_the_kernels_in_gluon_serve(monkeypatch):
    """A function of the call, the GPU and the version of Triton alone."""
    monkeypatch.setattr(by_hand, "_installed", lambda: "3.6.0")
    call = by_hand.Call(torch.bfloat16, (9, 0), 128, 1, 12, 32760, 32760, plain=True, repeat=False)
    serves = lambda **changes: [  # noqa: E731
        fault(call._replace(**changes)) is None for fault in (by_hand.forward_fault, by_hand.backward_fault)
    ]
    assert serves() == serves(head_size=72) == serves(dtype=torch.float16, queries=2048, keys=8192) == [True, True]
    assert serves(repeat=True) == serves(keys=512) == serves(queries=1000) == [True, False]
    # 3 * 64 programs fill 73 % of 2 * 132 places, 64 fill 48 % of 132: below 5 / 7 the pair is faster.
    assert serves(keys=8192, kv_heads=3) == [True, True] and serves(keys=8192, kv_heads=1) == [True, False]
    for changes in ({"plain": False}, {"capability": (10, 0)}, {"capability": None}, {"dtype": torch.float32},
                    {"head_size": 256}, {"head_size": 64}, {"describable": False}):  # fmt: skip
        assert serves(**changes) == [False, False], changes
    monkeypatch.setattr(by_hand, "_installed", lambda: "3.5.1")
    assert serves() == [False, False]
    assert "Triton 3.5.1 is none of the versions that they were compiled with: 3.6" in by_hand.forward_fault(call)
    assert by_hand.fault_of_version("3.60.0") is not None and by_hand.fault_of_version("3.6.0+git1") is None
    assert by_hand.fault_of_version(None) == "Triton is not installed"


def test_few_keys_split_the_queries():
    """Partial sums over parts of the queries add up to the same gradient."""
    lq, lk = (5000, 77) if GPU else (400, 20)
    assert splits(2, lq // 64 if GPU else lq // 16, 132 if GPU else 4) > 1
    assert_equals_float64(tensors(1, lq, lk, 1, 1, 16), torch.float32)
    assert_equals_float64(tensors(1, lq, lk, 1, 1, 16), torch.float32, causal=True)


@given(programs=st.integers(1, 3000), steps=st.integers(1, 600), units=st.integers(1, 200))
def test_splits_fill_the_machine(programs, steps, units):
    n = splits(programs, steps, units)
    assert 1 <= n <= max(1, steps // 4)
    used = lambda n: programs * n / (-(-programs * n // units) * units)  # noqa: E731
    assert used(n) >= used(1) - 1e-9 or used(n) >= 0.95


@pytest.mark.parametrize(
    "options, dtype",
    [
        ({}, torch.bfloat16),
        ({"causal": True}, torch.float16),
        ({"lens": True}, torch.bfloat16),
        ({"key_mask": True, "causal": True}, torch.float16),
    ],
    ids=str,
)
def test_gradients_in_half_precision(options, dtype):
    options = dict(options)
    if "lens" in options:
        options["lens"] = torch.tensor([0, 27 * FACTOR], device=DEVICE)
    if "key_mask" in options:
        options["key_mask"] = draw((2, 41 * FACTOR), 3) < 0.5
    assert_equals_float64(tensors(2, 35 * FACTOR, 41 * FACTOR, 2, 1, 24, dtype), dtype, **options)
    if not options:
        assert_equals_float64(tensors(1, 200 * FACTOR, 20 * FACTOR, 2, 1, 64, dtype), dtype)


def test_gradients_of_packed_rows_are_bitwise_repeatable():
    qkv, cu, limits = packed([5 * FACTOR, 33 * FACTOR], [60 * FACTOR, 20 * FACTOR], dtype=torch.float16)
    f = lambda *x: attention_varlen(*x, *cu, **limits, return_lse=True, backend="triton")  # noqa: E731
    weights = draw(qkv[0].shape, 8), 1.0
    first, second = (outputs_and_gradients(f, qkv, weights) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    exact = outputs_and_gradients(lambda *x: one_by_one(*x, *cu, False), [x.double() for x in qkv], weights)
    assert all(relative(a, b) < BOUND[torch.float16] for a, b in zip(first, exact, strict=True))


def test_nothing_is_left_unwritten():
    """PyTorch fills every new tensor with NaN here; hidden keys get zero gradients, not garbage."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        lens = torch.tensor([0, 19], device=DEVICE)
        assert_equals_float64(tensors(2, 37, 45, 1, 1, 24), torch.float32, lens=lens)
        assert_equals_float64(tensors(2, 150, 20, 1, 1, 24), torch.float32, lens=lens, causal=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_bitwise_repeatable():
    qkv, weights = tensors(2, 70 * FACTOR, 20 * FACTOR, 2, 1, 16, torch.float16), [1.0, 1.0]
    f = lambda *x: flash_attention(*x, return_lse=True)  # noqa: E731
    first, second = (outputs_and_gradients(f, qkv, weights) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_inputs_are_read_where_they_are(monkeypatch):
    """No layout is copied: the kernels get the addresses of the caller's tensors; the output has q's layout."""
    from kernels.attention import launch

    pointers, run = set(), launch._run

    def spy(kernel, programs, tiles, device, args, flags):
        pointers.update(getattr(x, "base", x).data_ptr() for x in args if hasattr(getattr(x, "base", x), "data_ptr"))
        run(kernel, programs, tiles, device, args, flags)

    monkeypatch.setattr(launch, "_run", spy)
    for layout in ("blhd", "bhld", "packed"):
        q, k, v = (laid_out(x, layout) for x in tensors(2, 20, 20, 2, 2, 16))
        pointers.clear()
        out = flash_attention(q, k, v)
        assert {x.data_ptr() for x in (q, k, v)} <= pointers
        if layout != "packed":
            assert out.stride() == q.stride()


def test_expanded_inputs_and_gradients():
    """Stride 0 (one set of keys for all samples; the gradient of a sum) is read through plain pointers or copied."""
    q, k, v = tensors(1, 20, 20, 2, 2, 16)
    leaves = [x.requires_grad_() for x in (draw((3, 20, 2, 16), 5), k, v)]
    f = lambda attend: attend(leaves[0], *(x.expand(3, -1, -1, -1) for x in leaves[1:]))  # noqa: E731
    got, expected = f(flash_attention), f(attention_reference)
    assert relative(got, expected) < 1e-5
    pairs = zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True)
    assert all((a - b).abs().max() < 1e-5 for a, b in pairs)


def test_attention_over_parts_merges_by_the_log_sum_exp():
    """Ring attention's law: two halves of the keys, weighted by their lse, are the whole, gradients included."""

    def merged(q, k, v):
        half = k.shape[1] // 2
        parts = [flash_attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(half), slice(half, None))]
        weights = torch.stack([lse for _, lse in parts]).softmax(0).transpose(2, 3)[..., None]
        return sum(w * out for w, (out, _) in zip(weights, parts, strict=True))

    qkv = tensors(1, 20 * FACTOR, 30 * FACTOR, 2, 2, 16)
    loss = lambda f: lambda *x: (f(*x) * draw(qkv[0].shape, 9)).sum()  # noqa: E731
    got = grad(loss(merged), (0, 1, 2))(*qkv)
    expected = grad(loss(attention_reference), (0, 1, 2))(*(x.double() for x in qkv))
    assert all(relative(a, b) < 1e-5 for a, b in zip(got, expected, strict=True))


def loss_of(attend):
    return lambda *x: attend(*x).square().sum()


def assert_close_under(transform, one, other, args):
    """Both functions give the same tensors under a transform."""
    got, expected = transform(one)(*args), transform(other)(*args)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, expected)), strict=True):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("dims", [(0, 0, 0), (2, None, 1)], ids=["all mapped", "keys shared"])
def test_vmap_and_grad_in_any_order(dims):
    q, k, v = (draw((2, 2, 18, 1, 16), i) for i in range(3))
    args = q.movedim(0, dims[0]), k if dims[1] == 0 else k[0], v.movedim(0, dims[2])
    ours, exact = (lambda *x, f=f: f(*x, causal=True) for f in (flash_attention, attention_reference))
    for transform in (
        lambda f: vmap(f, dims),
        lambda f: vmap(grad(loss_of(f), (0, 1, 2)), dims),
        lambda f: grad(lambda *x: vmap(loss_of(f), dims)(*x).sum(), (0, 1, 2)),
    ):
        assert_close_under(transform, ours, exact, args)


def test_vmap_maps_masks_too():
    q, k, v = (draw((3, 1, 18, 1, 16), i) for i in range(3))
    lens = torch.tensor([[4], [18], [9]], device=DEVICE)
    f = lambda attend: vmap(lambda q, k, v, n: attend(q, k, v, lens=n))(q, k, v, lens)  # noqa: E731
    assert relative(f(flash_attention), f(attention_reference)) < 1e-5


def moved(qkv):
    return [draw(x.shape, 20 + i, x.dtype) for i, x in enumerate(qkv)]


@pytest.mark.parametrize("options", [{}, {"causal": True, "lens": True}], ids=["plain", "causal, lens"])
def test_forward_mode(options):
    """Tangents of output and lse against float64 forward mode; the one-kernel function gives both."""
    qkv = tensors(2, 37 * FACTOR, 45 * FACTOR, 2, 1, 24)
    options = options | ({"lens": torch.tensor([0, 20 * FACTOR], device=DEVICE)} if "lens" in options else {})
    t = moved(qkv)
    (out, _), (tout, tlse) = jvp(lambda *x: flash_attention(*x, return_lse=True, **options), tuple(qkv), tuple(t))
    wide = lambda xs: tuple(x.double() for x in xs)  # noqa: E731
    exact = lambda *x: attention_reference(*x, return_lse=True, **options)  # noqa: E731
    (expected, lse), (texpected, tlse_expected) = jvp(exact, wide(qkv), wide(t))
    assert relative(out, expected) < BOUND[torch.float32] and relative(tout, texpected) < BOUND[torch.float32]
    seen = lse.isfinite()
    assert relative(tlse[seen], tlse_expected[seen]) < BOUND[torch.float32]
    both = flash_with_tangent(*qkv, *t, **options)
    assert relative(both[0], expected) < BOUND[torch.float32] and torch.equal(both[1], tout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forward_mode_in_16_bits(dtype):
    qkv = tensors(1, 40 * FACTOR, 40 * FACTOR, 1, 1, 32, dtype)
    t = moved(qkv)
    wide = lambda xs: tuple(x.double() for x in xs)  # noqa: E731
    assert relative(flash_with_tangent(*qkv, *t)[1], jvp(attention_reference, wide(qkv), wide(t))[1]) < BOUND[dtype]


def test_forward_mode_of_some_inputs_and_under_vmap():
    q, k, v = (draw((3, 1, 18, 1, 16), i) for i in range(3))
    t = draw(q.shape, 30)
    for name, f in (
        ("q only", lambda attend: jvp(lambda q: attend(q[0], k[0], v[0]), (q,), (t,))[1]),
        ("v only", lambda attend: jvp(lambda v: attend(q[0], k[0], v[0]), (v,), (t,))[1]),
        (
            "vmap of jvp",
            lambda attend: vmap(lambda q, t, k, v: jvp(lambda q: attend(q, k, v), (q,), (t,))[1])(q, t, k, v),
        ),
        ("jvp of vmap", lambda attend: jvp(lambda k: vmap(attend)(q, k, v), (k,), (t,))[1]),
    ):
        assert relative(f(flash_attention), f(attention_reference)) < 1e-5, name


def test_further_derivatives_are_refused_not_zero():
    q, k, v = tensors(1, 18, 18, 1, 1, 16)
    f = lambda q: flash_attention(q, k, v).square().sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="attention_backward has no derivative"):
        grad(lambda q: grad(f)(q).square().sum())(q)
    with pytest.raises(NotImplementedError, match="attention_backward has no derivative"):
        jvp(grad(f), (q,), (q,))
    with pytest.raises(NotImplementedError, match="attention_tangent has no derivative"):
        grad(lambda q: jvp(f, (q,), (q,))[1])(q)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"] if GPU else ["aot_eager"])
def test_one_graph_and_the_same_numbers(backend):
    """torch.compile(fullgraph=True), forward and backward, through the front door, with the mask as an input."""
    lens = torch.tensor([9, 18], device=DEVICE)

    def f(q, k, v, lens):
        out, lse = attention(q * 1.0, k, v, site="self", backend="triton", lens=lens, return_lse=True)
        return (out * out).sum() + lse.sum()

    results = []
    for run in (f, torch.compile(f, fullgraph=True, backend=backend)):
        leaves = [x.requires_grad_() for x in tensors(2, 18, 18, 2, 1, 16)]
        results.append([run(*leaves, lens), *torch.autograd.grad(run(*leaves, lens), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_compiled_with_other_lengths():
    """Dynamic lengths neither break the graph nor change the numbers."""
    f = torch.compile(
        lambda q, k, v: attention(q, k, v, site="self", backend="triton"), fullgraph=True, dynamic=True, backend="eager"
    )
    for n in (18, 25):
        qkv = tensors(1, n, n + 3, 1, 1, 16)
        assert relative(f(*qkv), attention_reference(*qkv)) < 1e-5


def test_checkpoint_recomputes_it():
    leaves = [x.requires_grad_() for x in tensors(1, 18, 18, 1, 1, 16)]
    plain = torch.autograd.grad(flash_attention(*leaves).square().sum(), leaves)
    again = checkpoint(lambda *x: flash_attention(*x).square().sum(), *leaves, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, torch.autograd.grad(again, leaves), strict=True))


def test_empty_inputs():
    for b, lq, lk, h in ((0, 4, 4, 1), (1, 0, 4, 1), (1, 4, 0, 1), (1, 4, 4, 0)):
        q, k, v = (x.requires_grad_() for x in tensors(b, lq, lk, h, max(h, 1) if lk else 1, 16))
        out, lse = flash_attention(q, k, v, return_lse=True)
        assert out.shape == q.shape and lse.shape == (b, h, lq) and (out == 0).all() and (lse == -torch.inf).all()
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_refusals_name_the_fault():
    def refused(match, q, k=None, **options):
        k = q if k is None else k
        with pytest.raises(UserError, match=match):
            attention(q, k, k, site="self", backend="triton", **options)

    refused("head size 8 is outside of 16 to 256", draw((1, 4, 1, 8), 0))
    refused("head size 264 is outside", draw((1, 4, 1, 264), 0))
    refused("needs float16, bfloat16 or float32, got torch.float64", draw((1, 4, 1, 16), 0).double())
    q = draw((1, 4, 1, 18), 0)
    refused("q: stride 18 of dimension 1 is 72 bytes, not a multiple of 16", q)
    refused("last dimension of q is not contiguous", draw((1, 4, 16, 2), 0).transpose(2, 3))
    q = draw((1, 4, 1, 16), 0)
    refused("k: stride 17 .*not a multiple of 16", q, draw((1, 4, 1, 17), 0)[..., :16])
    refused("no additive bias; sdpa and reference do", q, bias=torch.zeros(1, 1, 4, 4, device=DEVICE))
    refused("scale above 0", q, scale=0.0)
    with pytest.raises(UserError, match="precision 'fp8' is none of ieee, tf32"):
        flash_attention(q, q, q, precision="fp8")


def test_tiles_cover_every_head_size_dtype_and_architecture():
    for d in range(16, 257):
        for capability in (None, (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
            for dtype in DTYPES:
                assert tiles_for(d, dtype, capability).forward.queries % 16 == 0
    assert tiles_for(128, torch.bfloat16, (12, 0)) == SMALL[128] != tiles_for(128, torch.bfloat16, (9, 0))


def packed(lengths_q, lengths_k, heads=2, kv_heads=1, d=16, spare=3, dtype=torch.float32):
    """Random packed rows, `spare` of which belong to no sequence, and both lists of borders."""
    cu = [torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32) for lengths in (lengths_q, lengths_k)]
    rows = [sum(lengths) + spare for lengths in (lengths_q, lengths_k)]
    qkv = draw((rows[0], heads, d), 0, dtype), *(draw((rows[1], kv_heads, d), i, dtype) for i in (1, 2))
    return qkv, cu, {"max_q": max(lengths_q), "max_k": max(lengths_k)}


def one_by_one(q, k, v, cu_q, cu_k, causal):
    """float64 attention of every sequence by itself; zeros for spare rows."""
    outs, lses = torch.zeros_like(q).double(), torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64)
    lses = lses.to(q.device)
    for i in range(len(cu_q) - 1):
        a, b = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        out, lse = attention_reference(
            *(x[s][None].double() for x, s in ((q, a), (k, b), (v, b))), causal=causal, return_lse=True
        )
        outs = outs.index_put((torch.arange(a.start, a.stop, device=q.device),), out[0])
        lses[:, a] = lse[0]
    return outs, lses


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_sequences_equal_each_by_itself(backend, causal):
    """Unlike lengths, an empty sequence, one without keys and one without queries; gradients with the lse's."""
    lengths = [n * FACTOR for n in (5, 0, 33, 16, 7)], [n * FACTOR for n in (9, 4, 20, 40, 0)]
    qkv, cu, limits = packed(*lengths)
    weights = draw(qkv[0].shape, 8), draw((2, qkv[0].shape[0]), 9)
    f = lambda *x: attention_varlen(*x, *cu, **limits, causal=causal, return_lse=True, backend=backend)  # noqa: E731
    got = outputs_and_gradients(f, qkv, weights)
    expected = outputs_and_gradients(
        lambda *x: one_by_one(*x, *cu, causal), [x.double() for x in qkv], weights
    )
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        assert relative(x, y) < BOUND[torch.float32], (name, relative(x, y))
    assert all((x[-3:] == 0).all() for x in (got[0], *got[2:]))


@pytest.mark.parametrize("dim", [None, 0], ids=["shared borders", "own borders"])
def test_packed_sequences_under_vmap(dim):
    qkv, cu, _ = packed([5, 20], [9, 33], heads=1)
    qkv = [torch.stack([x, x.flip(0)]) for x in qkv]
    if dim == 0:
        cu = [torch.stack([c, torch.tensor([0, 4, c[-1] - 2], device=DEVICE, dtype=c.dtype)]) for c in cu]
    dims = (0, 0, 0, dim, dim)
    ours, exact = (
        functools.partial(attention_varlen, max_q=40, max_k=40, backend=name) for name in ("triton", "reference")
    )
    for transform in (lambda f: vmap(f, dims), lambda f: vmap(grad(loss_of(f), (0, 1, 2)), dims)):
        assert_close_under(transform, ours, exact, (*qkv, *cu))


def test_packed_sequences_compile_and_have_tangents():
    qkv, cu, limits = packed([5, 20], [9, 33])
    f = lambda *x: attention_varlen(*x, *cu, **limits, backend="triton")  # noqa: E731
    assert torch.equal(torch.compile(f, fullgraph=True, backend="eager")(*qkv), f(*qkv))
    exact = lambda *x: attention_varlen(*x, *cu, **limits, backend="reference")  # noqa: E731
    t = tuple(moved(qkv))
    assert relative(jvp(f, tuple(qkv), t)[1], jvp(exact, tuple(qkv), t)[1]) < 1e-5


def test_packed_faults_are_listed():
    (q, k, v), (cu_q, cu_k), limits = packed([5], [9])
    with pytest.raises(UserError, match=r"(?s)must be \[rows, H, D\].*cu_k must be int32 or int64"):
        attention_varlen(q[None], k, v, cu_q, cu_k.float(), **limits)
    with pytest.raises(UserError, match="have 1 and 2 sequences"):
        attention_varlen(q, k, v, cu_q, torch.cat([cu_k, cu_k[-1:]]), **limits)
    with pytest.raises(UserError, match="unknown backend 'tritn'.*did you mean 'triton'"):
        attention_varlen(q, k, v, cu_q, cu_k, **limits, backend="tritn")
    with pytest.raises(UserError, match="'triton' cannot serve this call: it needs float16"):
        attention_varlen(q.double(), k.double(), v.double(), cu_q, cu_k, **limits, backend=" Triton")


def test_the_compiler_is_told_how_much_work_it_is():
    """What the memory budget of the compiler goes by: 2 products forward, 5 backward, each 2 B H Lq Lk D."""
    q, k, v = (torch.randn(2, n, 3, 16, device=DEVICE, requires_grad=True) for n in (20, 36, 36))
    with FlopCounterMode(display=False) as counter:
        flash_attention(q, k, v).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * 2 * 3 * 20 * 36 * 16
