"""Attention over tile plans: the plans against dense masks, the kernels against dense float64 maths.

Without a GPU Triton interprets the kernels, on tiny shapes; with one the same laws run on larger shapes.
"""

import interpret  # isort: skip  (before Triton is imported)

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from core.errors import UserError
from kernels.attention import by_hand
from kernels.attention import masks as masks_module
from kernels.attention.masks import (
    HOPPER_DKV,
    block_causal_sink,
    explain_mask,
    plan_attention,
    planned_attention,
    planned_reference,
    turn_back,
)
from kernels.attention.plan import (
    BlockCausal,
    block_mask,
    delta,
    intervals,
    packed,
    row_bounds,
    steps,
    tile_plan,
    visible_pairs,
)
from kernels.attention.planned_flex import flex, flex_block_mask
from kernels.attention.tiles import HOPPER, Tiles, TileSet
from nn.rope import apply_rope, rope_3d

DEVICE = interpret.DEVICE
GPU = DEVICE.type == "cuda"
# Tokens per frame: on a GPU frames are longer than its tiles and no multiple of them.
TOKENS = 167 if GPU else 7
# Relative error in the norm. float32: sums of at most some hundred terms. 16 bits: P and dS are rounded to 8 (bf16:
# 4e-3, twice that where the interpreter truncates) or 11 bits before they are multiplied, and so is the result.
BOUND = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def sees(m: BlockCausal, i: int, j: int) -> bool:
    """Whether token i sees token j, from the definition, frame by frame."""
    (q_noisy, f), (k_noisy, k) = (divmod(n // m.tokens_per_frame, m.frames) for n in (i, j))
    end = (f // m.block + 1) * m.block
    kept = m.local_attn_size == -1 or k >= end - (m.local_attn_size - m.sink_size) or k < m.sink_size
    if q_noisy:
        return k // m.block == f // m.block if k_noisy else k < end - m.block and kept
    return not k_noisy and k < end and kept


def dense(m: BlockCausal) -> np.ndarray:
    return np.array([[sees(m, i, j) for j in range(m.k_len)] for i in range(m.q_len)])


@st.composite
def geometries(draw, tokens=5):
    """Mostly with more frames than the window, so that it rolls."""
    block, sink, spare = draw(st.integers(1, 3)), draw(st.integers(0, 2)), draw(st.sampled_from([0, 1, 2, -1]))
    window = -1 if spare < 0 else sink + block + spare
    frames = draw(st.one_of(st.integers(window + 1, window + 5), st.integers(1, 3)))
    tokens = draw(st.integers(1, tokens))
    return BlockCausal(max(1, frames), tokens, block, window, sink, draw(st.booleans()), draw(st.booleans()))


@st.composite
def masks(draw):
    """A mask and its dense form."""
    if draw(st.booleans()):
        m = draw(geometries())
        return m, dense(m)
    bq, bk, lq, lk = (draw(st.integers(1, n)) for n in (5, 5, 40, 40))
    g = np.random.default_rng(draw(st.integers(0, 10**6)))
    blocks = g.random((-(-lq // bq), -(-lk // bk))) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    return block_mask(blocks, bq, bk, lq, lk), blocks.repeat(bq, 0).repeat(bk, 1)[:lq, :lk]


@settings(max_examples=max(60, settings().max_examples))
@given(case=masks(), tile_q=st.sampled_from([4, 8, 16]), tile_k=st.sampled_from([4, 8, 16]), transposed=st.booleans())
def test_a_plan_visits_what_is_visible_and_nothing_else(case, tile_q, tile_k, transposed):
    mask, seen = case
    spans = intervals(mask)
    plan = tile_plan(spans, tile_q, tile_k, transposed=transposed)
    tiles = -(-np.array(seen.shape) // (tile_q, tile_k))
    # Beyond the last key nothing is visible; rows beyond the last query do not exist.
    padded = np.zeros((seen.shape[0], tiles[1] * tile_k), bool)
    padded[:, : seen.shape[1]] = seen
    count = np.zeros(padded.shape, int)
    keys = np.arange(padded.shape[1])
    visited = {}
    for tile, group in itertools.product(range(len(plan.order)), range(4)):
        for first, length, slot in plan.runs[plan.index[tile, group] : plan.index[tile, group + 1]]:
            assert (slot == -1) == (group % 2 == 0) and length > 0
            assert slot == -1 or spans.rotated[slot] == (group > 1)
            for other in range(first, first + length):
                i, j = (other, tile) if transposed else (tile, other)
                rows = np.arange(i * tile_q, min((i + 1) * tile_q, seen.shape[0]))
                shown = np.ones(padded.shape[1], bool)[None]
                if slot >= 0:
                    lo, hi = spans.bounds[slot, rows // spans.class_rows].T
                    shown = (keys >= lo[:, None]) & (keys < hi[:, None])
                inside = (keys // tile_k == j) & shown
                assert inside.any(), "a visit that shows nothing"
                count[rows] += inside
                visited.setdefault((i, j), []).append(slot)
    assert (count == padded).all()
    for i, j in np.ndindex(*tiles):
        block = padded[i * tile_q : (i + 1) * tile_q, j * tile_k : (j + 1) * tile_k]
        assert ((i, j) in visited) == block.any()
        if not any(spans.rotated):
            assert (visited.get((i, j)) == [-1]) == block.all()
    work = [plan.runs[plan.index[t, 0] : plan.index[t, 4], 1].sum() for t in plan.order]
    assert sorted(plan.order) == list(range(len(plan.order))) and work == sorted(work, reverse=True)
    assert visible_pairs(spans) == seen.sum()
    assert packed(plan).dtype == np.int32 and len(packed(plan)) == 6 * len(plan.order) + plan.runs.size


@settings(max_examples=max(60, settings().max_examples))
@given(case=masks(), tile_q=st.sampled_from([4, 8, 16]), tile_k=st.sampled_from([4, 8, 16]), transposed=st.booleans())
def test_steps_and_bounds_show_each_pair_once(case, tile_q, tile_k, transposed):
    """What the kernels in Gluon read: the same visits, in which the intervals of the rows are the mask."""
    mask, seen = case
    spans = intervals(mask)
    plan, bounds = tile_plan(spans, tile_q, tile_k, transposed=transposed), row_bounds(spans)
    n, low_high = len(plan.order), bounds.transpose(0, 1, 3, 2).reshape(len(bounds), -1, 2)
    listed = steps(plan, len(spans.rotated))
    assert listed.dtype == bounds.dtype == np.int32 and low_high.shape[1] % 128 == 0
    order, begin, partial, rest = np.split(listed, [n, 2 * n + 1, 3 * n + 1])
    assert (order == plan.order).all() and begin[-1] == len(rest)
    count, keys = np.zeros(seen.shape, int), np.arange(seen.shape[1])
    for tile in range(n):
        mine = rest[begin[tile] : begin[tile + 1]]
        assert len(mine) >= max(1, partial[tile])
        for number, step in enumerate(mine):
            other, slot, turned = step >> 8, step >> 1 & 127, step & 1
            assert (slot == 0) == (number >= partial[tile])
            assert slot in (0, len(spans.rotated) + 1) or turned == spans.rotated[slot - 1]
            i, j = (other, tile) if transposed else (tile, other)
            rows = np.arange(i * tile_q, min((i + 1) * tile_q, seen.shape[0]))
            low, high = low_high[slot, rows].T[..., None]
            count[rows] += (keys // tile_k == j) & (keys >= low) & (keys < high)
    assert (count == seen).all()


def test_the_published_geometry_costs_little_more_than_its_visible_pairs():
    mask = BlockCausal(21, 1560, 3, 6, 1)
    spans = intervals(mask)
    # Frames seen by each block: 3, then 6 in all others.
    assert visible_pairs(spans) == 1560**2 * 3 * (3 + 6 * 6)
    visited = tile_plan(spans, 128, 64).runs[:, 1].sum() * 128 * 64
    assert visited < 1.03 * visible_pairs(spans)
    assert hash(mask) == hash(dataclasses.replace(mask)) and delta(mask).max() == 0
    assert list(delta(dataclasses.replace(mask, relativistic=True))[::3]) == [0, 0, 3, 6, 9, 12, 15]


@pytest.mark.parametrize(
    "numbers, message",
    [
        ((21, 1560, 3, 2, 0), r"local_attn_size 2 - sink_size 0 = 2 frames, is smaller than a block of 3.*is 3"),
        ((21, 1560, 3, 6, 4), r"local_attn_size 6 - sink_size 4 = 2 frames, is smaller than a block of 3.*is 7"),
        ((21, 1560, 3, 6, 7), r"sink_size 7 leaves nothing of local_attn_size 6.*sink_size \+ block = 10"),
        ((21, 1560, 3, 0, 0), r"local_attn_size is 0; it is -1 .* or at least block = 3"),
        ((0, 0, -1, -1, -2), r"(?s)frames is 0.*tokens_per_frame is 0.*block is -1.*sink_size is -2"),
    ],
)
def test_geometry_faults_name_the_numbers(numbers, message):
    with pytest.raises(UserError, match=message):
        BlockCausal(*numbers)


def test_block_mask_faults():
    with pytest.raises(UserError, match=r"100 queries in blocks of 16 and 90 keys.*\[7, 6\], got bool \[7, 7\]"):
        block_mask(np.ones((7, 7), bool), 16, 16, 100, 90)
    with pytest.raises(UserError, match="block_q is 0"):
        block_mask(np.ones((7, 7), bool), 0, 16, 100, 90)


def draw(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def qkv(mask, heads=2, kv_heads=1, d=16, b=1, dtype=torch.float32, seed=0):
    shapes = ((b, mask.q_len, heads, d), (b, mask.k_len, kv_heads, d), (b, mask.k_len, kv_heads, d))
    return [draw(s, seed + i, dtype) for i, s in enumerate(shapes)]


def planned(mask, x, backend="triton", **options):
    return plan_attention(mask, head_dim=x.shape[-1], dtype=x.dtype, device=x.device, backend=backend, **options)


def exact(mask, x):
    return plan_attention(mask, head_dim=x.shape[-1], dtype=torch.float64, device=x.device, backend="reference")


@given(m=geometries(tokens=3))
@example(m=BlockCausal(7, 2, 2, 4, 1))
def test_the_reference_equals_dense_attention_with_sink_keys_moved(m):
    """Sink keys rotated at their frame + delta, instead of queries turned back: the same scores, other maths."""
    m = dataclasses.replace(m, teacher_forcing=False, relativistic=True)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, m.q_len, 2, 16, generator=g, dtype=torch.float64) for _ in range(3))
    frames = m.frames + int(delta(m).max())
    table = rope_3d((frames, 1, m.tokens_per_frame), 16)
    at = lambda shift, n: tuple(t[shift * m.tokens_per_frame :][:n] for t in table)  # noqa: E731
    rope = at(0, m.q_len)
    plan = exact(m, q)
    out, lse = planned_reference(apply_rope(q, rope), apply_rope(k, rope), v, plan, 0.3)
    seen = torch.from_numpy(dense(m))
    sink = m.sink_size * m.tokens_per_frame
    for f in range(m.frames):
        rows = slice(f * m.tokens_per_frame, (f + 1) * m.tokens_per_frame)
        moved = apply_rope(k, at(int(delta(m)[f]), m.q_len))
        keys = torch.cat([moved[:, :sink], apply_rope(k, rope)[:, sink:]], 1)
        scores = torch.einsum("bqhd,bkhd->bhqk", apply_rope(q, rope)[:, rows], keys) * 0.3
        weights = torch.where(seen[rows], scores, -torch.inf).softmax(-1)
        # The tables are float32, angles of up to some tens of radians.
        expected = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        torch.testing.assert_close(out[:, rows], expected, atol=2e-5, rtol=2e-5)
        expected = torch.where(seen[rows], scores, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(lse[:, :, rows], expected, atol=2e-5, rtol=2e-5)


def test_turning_back_keeps_lengths_and_is_undone_by_turning_forth():
    m = BlockCausal(8, 3, 2, 4, 1, relativistic=True)
    q = torch.randn(2, 24, 3, 16, dtype=torch.float64)
    rotation = exact(m, q).rotation
    turned = turn_back(q, rotation, 3)
    assert torch.equal(turned[:, :12], q[:, :12]) and not torch.allclose(turned[:, 12:], q[:, 12:])
    forth = rotation * torch.tensor([1.0, -1.0])[:, None, None]
    # Cosines and sines are rounded to float32.
    torch.testing.assert_close(turn_back(turned, forth, 3), q, atol=1e-6, rtol=1e-6)


def relative(got, expected) -> float:
    error = (got.double() - expected.double()).norm()
    return (error / expected.double().norm().clamp_min(1e-12)).item()


def outputs_and_gradients(f, tensors):
    """Output, finite lse, and gradients of a loss that uses both."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = f(*leaves)
    seen = lse.isfinite()
    loss = (out * draw(out.shape, 7)).sum() + (torch.where(seen, lse, 0) * draw(lse.shape, 8)).sum()
    return [out, torch.where(seen, lse, -1e3), *torch.autograd.grad(loss, leaves)]


def assert_equals_float64(mask, tensors, **options):
    plans = planned(mask, tensors[0], **options), exact(mask, tensors[0])
    run = lambda p: lambda *x: planned_attention(*x, p, return_lse=True)  # noqa: E731
    torch.use_deterministic_algorithms(True)  # fills what torch.empty allocates with NaN
    try:
        got = outputs_and_gradients(run(plans[0]), tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = outputs_and_gradients(run(plans[1]), [x.double() for x in tensors])
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        assert a.shape == b.shape and a.isfinite().all(), name
        assert relative(a, b) <= BOUND[tensors[0].dtype], name


ROLLING = BlockCausal(7, TOKENS, 2, 4, 1)
TURNED = dataclasses.replace(ROLLING, relativistic=True)
FORCED = BlockCausal(3, TOKENS, 1, 2, 1, teacher_forcing=True, relativistic=True)


@pytest.mark.parametrize(
    "mask, dtype, options",
    [
        (ROLLING, torch.float16, {"heads": 1}),
        (TURNED, torch.float32, {"heads": 4, "kv_heads": 2}),
        (TURNED, torch.bfloat16, {"d": 40, "b": 2}),
        (FORCED, torch.float32, {"d": 36}),
        (BlockCausal(4, TOKENS, 3), torch.float32, {"heads": 1}),
        (BlockCausal(1, 1, 1), torch.float32, {}),
    ],
)
def test_equals_float64(mask, dtype, options):
    assert_equals_float64(mask, qkv(mask, dtype=dtype, **options))


def sparse_mask(seed=0, lq=9 * TOKENS, lk=8 * TOKENS + 3, block=11):
    """Random blocks, no multiple of a tile; some queries see nothing."""
    g = np.random.default_rng(seed)
    blocks = g.random((-(-lq // block), -(-lk // block))) < 0.4
    blocks[1] = False
    return block_mask(blocks, block, block, lq, lk)


def test_a_block_mask_is_one_more_plan_for_the_same_kernel():
    mask = sparse_mask()
    x = qkv(mask)
    assert_equals_float64(mask, x)
    out, lse = planned_attention(*x, planned(mask, x[0]), return_lse=True)
    assert (out[:, 11:22] == 0).all() and (lse[:, :, 11:22] == -torch.inf).all()


def test_heads_first_and_packed_layouts_need_no_copies():
    m = BlockCausal(3, TOKENS, 1, 2, 1)
    b, n, h, d = 2, m.q_len, 2, 16
    heads_first = [draw((b, h, n, d), i).transpose(1, 2) for i in range(3)]
    slices = list(draw((b, n, 3, h, d), 3).unbind(2))
    for tensors in (heads_first, slices):
        assert_equals_float64(m, tensors)
    assert planned_attention(*heads_first, planned(m, slices[0])).stride() == heads_first[0].stride()


def test_repeated_runs_are_bitwise_equal():
    x = qkv(TURNED, heads=1, dtype=torch.bfloat16)
    p = planned(TURNED, x[0])
    first, second = (outputs_and_gradients(lambda *t: planned_attention(*t, p, return_lse=True), x) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def blocks_without_pairs():
    """Whole tiles of queries that see nothing, and of keys that nobody sees."""
    blocks = np.ones((5, 6), bool)
    blocks[2] = blocks[:, 3] = False
    return block_mask(blocks, 300, 300, 1443, 1707)


@pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability()[0] != 9 or by_hand.version_fault() is not None,
    reason="Gluon has no interpreter; compiled for Hopper, for some versions of Triton",
)
@pytest.mark.parametrize(
    "mask", [ROLLING, TURNED, FORCED, sparse_mask(), blocks_without_pairs()],
    ids=["rolling", "turned", "forced", "sparse", "nothing seen"],
)  # fmt: skip
def test_by_hand(monkeypatch, mask):
    """Outputs and gradients, each new tensor full of NaN before; where results must repeat, the pair for the latter."""
    from kernels.attention import launch

    launched, run = [], launch._run
    spy = lambda kernel, *args: [launched.append(kernel.fn.__module__), run(kernel, *args)]  # noqa: E731
    monkeypatch.setattr(launch, "_run", spy)
    x = qkv(mask, heads=4, kv_heads=2, d=128, b=2, dtype=torch.bfloat16)
    tiles = dataclasses.replace(HOPPER[128], dkv=HOPPER_DKV)
    for repeat in (False, True):
        launched.clear()
        # Deterministic algorithms stay on, for the sake of the NaN.
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeat)  # noqa: B023
        assert_equals_float64(mask, x, tiles=tiles)
        assert launched.count("kernels.attention.gluon_forward") == 1
        assert launched.count("kernels.attention.gluon_backward") == (0 if repeat else 1)
    p = planned(mask, x[0], tiles=tiles)
    assert torch.equal(planned_attention(*x, p), planned_attention(*x, p))


def test_when_plans_are_for_the_kernels_in_gluon(monkeypatch):
    """By the table on a Hopper GPU; elsewhere, with another Triton or with too many intervals the plans of Triton's."""
    monkeypatch.setattr(masks_module, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(masks_module, "triton_fault", lambda device: None)
    monkeypatch.setattr(by_hand, "_installed", lambda: "3.6.0")
    plan = lambda mask, d=128: plan_attention(  # noqa: E731
        mask, head_dim=d, dtype=torch.bfloat16, device="cpu", backend="triton"
    )
    large = BlockCausal(7, 400, 2, 4, 1, relativistic=True)
    found = plan(large)
    assert found.not_by_hand is None and found.plans[2] is not None and found.plans[5] is not None
    assert found.tiles[:2] == [128, 128] and len(found.tiles) == 20
    small = plan(BlockCausal(7, 40, 2, 4, 1))
    assert small.plans[2] is not None and small.plans[5] is None, "too short for the backward kernel"
    assert "head size 64" in plan(large, 64).not_by_hand and plan(large, 64).plans[2] is None
    scattered = block_mask(np.arange(300)[None] % 2 == 0, 1, 1, 1, 300)
    assert "up to 150 separate intervals of keys, above 126" in plan(scattered).not_by_hand
    monkeypatch.setattr(by_hand, "_installed", lambda: "3.5.0")
    assert "Triton 3.5.0" in plan(large).not_by_hand and plan(large).plans[2] is None


SMALL_MASK = BlockCausal(3, TOKENS, 1, 2, 1, relativistic=True)


def loss(p):
    return lambda q, k, v: (planned_attention(q, k, v, p) * q.detach().cos()).sum()


def close(got, expected):
    # Two float32 evaluations of the same sums.
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def test_vmap_grad_and_vmap_of_grad_fold_into_the_batch():
    x = [t.unflatten(0, (2, 1)) for t in qkv(SMALL_MASK, b=2)]
    p = planned(SMALL_MASK, x[0])
    f = lambda q, k, v: planned_attention(q, k, v, p)  # noqa: E731
    close(vmap(f)(*x), torch.stack([f(*t) for t in zip(*x)]))
    close(vmap(f, (0, None, 0))(x[0], x[1][0], x[2]), torch.stack([f(x[0][i], x[1][0], x[2][i]) for i in range(2)]))
    each = [torch.autograd.grad(loss(p)(*t), t) for t in zip(*([y.clone().requires_grad_() for y in t] for t in x))]
    close(list(vmap(grad(loss(p), (0, 1, 2)))(*x)), [torch.stack(g) for g in zip(*each)])
    close(grad(lambda k: vmap(loss(p))(x[0], k, x[2]).sum())(x[1]), torch.stack([g[1] for g in each]))


@pytest.mark.parametrize("wrap", ["checkpoint", "compile"])
def test_checkpoint_and_one_compiled_graph_give_the_same_gradients(wrap):
    x = [t.requires_grad_() for t in qkv(SMALL_MASK)]
    p = planned(SMALL_MASK, x[0])
    expected = torch.autograd.grad(loss(p)(*x), x)
    if wrap == "checkpoint":
        value = checkpoint(loss(p), *x, use_reentrant=False)
    else:
        value = torch.compile(loss(p), fullgraph=True, backend="inductor" if GPU else "aot_eager")(*x)
    close(torch.autograd.grad(value, x), expected)


def test_forward_mode_is_refused_not_zero():
    x = qkv(SMALL_MASK)
    p = planned(SMALL_MASK, x[0])
    with pytest.raises(NotImplementedError, match="planned_forward has no derivative"):
        jvp(lambda q: planned_attention(q, *x[1:], p), (x[0],), (x[0],))


def test_an_empty_batch():
    x = [t[:0].requires_grad_() for t in qkv(SMALL_MASK)]
    out = planned_attention(*x, planned(SMALL_MASK, x[0]))
    assert out.shape == x[0].shape and torch.autograd.grad(out.sum(), x)[1].shape == x[1].shape


@pytest.mark.parametrize("compiled", [False] + [True] * GPU)
@pytest.mark.parametrize("mask", [ROLLING, dataclasses.replace(FORCED, relativistic=False)])
def test_flex_attention_of_the_same_intervals(mask, compiled):
    x = qkv(mask)
    p = exact(mask, x[0])
    block = flex_block_mask(intervals(mask), p.bounds)
    got = flex(*x, block, 0.3, compiled)
    # A float32 softmax; compiled on a GPU its products may be tf32, with 10 bits.
    bound = 2e-3 if GPU else 5e-6
    for a, b in zip(got, planned_reference(*(t.double() for t in x), p, 0.3), strict=True):
        assert relative(a, b) <= bound


def test_faults_of_a_call_are_listed_with_their_numbers():
    mask = BlockCausal(21, 1560, 3, teacher_forcing=True)
    p = plan_attention(mask, head_dim=16, dtype=torch.float32, device="cpu")
    q = torch.randn(1, 32760, 1, 8)
    sizes = r"q has 32760 and k 32760 tokens, .*frames 21 \* tokens_per_frame 1560 \* 2 .*= 65520"
    with pytest.raises(UserError, match=f"(?s){sizes}.*made for 16 and torch.float32.*scale is -1"):
        planned_attention(q, q, q, p, scale=-1)
    with pytest.raises(UserError, match="k and v must be equal"):
        planned_attention(q, q[..., :4], q, p)
    with pytest.raises(UserError, match="block_causal_sink needs a plan of a BlockCausal mask, got one of a BlockMask"):
        block_causal_sink(q, q, q, planned(sparse_mask(), q, "reference"))
    x = qkv(SMALL_MASK, d=18)
    with pytest.raises(UserError, match="head size 18 is not a multiple of 4 from 16 to 256"):
        planned(SMALL_MASK, x[0])
    crooked = [draw((1, SMALL_MASK.q_len, 2, 17), 0)[..., :16] for _ in range(3)]
    with pytest.raises(UserError, match=r"[qk]: stride \d+ of dimension \d is \d+ bytes, not a multiple of 16"):
        planned_attention(*crooked, planned(SMALL_MASK, crooked[0]))
    tiles = TileSet(*[Tiles(32, 16, 1, 1), Tiles(64, 16, 1, 1)] * 2)
    with pytest.raises(UserError, match=r"dkv.queries 64 does not divide forward.queries 32"):
        planned(SMALL_MASK, x[0][..., :16], tiles=tiles)


def test_backends_say_why_they_cannot_serve():
    options = {"head_dim": 16, "dtype": torch.float64, "device": "cpu"}
    why = explain_mask(TURNED, **options)
    assert list(why) == ["triton", "flex", "reference"] and why["reference"] == "usable"
    assert "float64" in why["triton"] or "CUDA" in why["triton"]
    assert "CUDA" in why["flex"]
    assert "turned" in explain_mask(TURNED, **options | {"device": "cuda"})["flex"]
    scattered = block_mask(np.eye(40, dtype=bool)[::2].repeat(2, 0) | (np.arange(40) % 2 == 0), 1, 1, 40, 40)
    assert "up to 20 separate intervals" in explain_mask(scattered, **options | {"device": "cuda"})["flex"]
    assert plan_attention(TURNED, **options).backend == "reference"
    assert plan_attention(TURNED, backend=" Reference ", **options).backend == "reference"
    with pytest.raises(UserError, match=r"unknown backend 'tritn' \(did you mean 'triton'\?\); allowed: auto, t"):
        plan_attention(TURNED, backend="tritn", **options)
    with pytest.raises(UserError, match="backend 'flex' cannot serve this call: .*CUDA"):
        plan_attention(TURNED, backend="flex", **options)
