import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import UserError
from kernels import Attention, BlockCausal, QatAttention, attention_reference, plan_attention
from nn.run import Run
from parallel import collectives
from parallel.collectives import Group
from parallel.mesh import single
from parallel.sequence import SequenceTokens, Ulysses, heads_fault, sequence_parallel
from tests.parallel.pool import mesh_of
from tests.parallel.sequence_cases import (
    EXACT,
    BlockCausalAttention,
    Counted,
    difference,
    differences,
    drawn,
    gradients,
    sp_mesh,
)

SIZES = st.sampled_from([2, 3, 4])


def tokens_of(size: int, length: int, rank: int = 0) -> SequenceTokens:
    return SequenceTokens(Group("none", size, rank), length)


def ulysses(mesh, length: int, inner=None) -> Ulysses:
    run = Run() if inner is None else Run(attention=inner)
    return sequence_parallel(run, mesh, length).attention


# --- tokens -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(2, 9), st.integers(0, 3), st.sampled_from([torch.float64, torch.bool]))
def test_parts_one_after_another_are_the_whole_and_zeros(length, size, dim, dtype):
    shape = [2, 3, 1, 2]
    shape[dim] = length
    t = drawn(0, t=shape)["t"].to(dtype)
    parts = [tokens_of(size, length, rank).split(t, dim - 4) for rank in range(size)]
    assert {p.shape[dim] for p in parts} == {-(-length // size)}
    whole = torch.cat(parts, dim)
    assert torch.equal(whole.narrow(dim, 0, length), t)
    assert whole.shape[dim] - length < size and not whole.narrow(dim, length, whole.shape[dim] - length).any()


def test_a_part_does_not_keep_the_whole_in_memory():
    t = torch.zeros(1, 1000, 8)
    assert tokens_of(4, 1000).split(t, 1).untyped_storage().nbytes() == t.untyped_storage().nbytes() // 4


def test_one_entry_for_all_tokens_is_kept():
    timestep, tokens = torch.ones(2, 1), tokens_of(4, 7)
    assert tokens.split(timestep, 1) is timestep and tokens.merge(timestep, 1, 1) is timestep


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda t: t.split(torch.zeros(2, 6), 1), r"dimension 1 of \[2, 6\] is to have 7 tokens"),
        (lambda t: t.merge(torch.zeros(2, 2), 1, 6), "no part of 6 tokens; a part of 7 tokens over 4 processes has 2"),
        (lambda t: t.merge(torch.zeros(2, 7), 1, 7), "no part of 7 tokens; a part of 7 tokens over 4 processes has 2"),
        (lambda t: tokens_of(4, -1), "the number of tokens is -1"),
    ],
)
def test_tokens_of_another_count_are_refused(call, said):
    with pytest.raises(UserError, match=said):
        call(tokens_of(4, 7))


def _round_trip(sp, grid, batch, dim):
    """What comes back, and the gradient of a weighted sum of it, averaged over the group."""
    mesh = sp_mesh(sp)
    if mesh is None:
        return None
    length = math.prod(grid)
    shape = [batch, 2, 3]
    shape[dim] = length
    tokens = sequence_parallel(Run(), mesh, length).tokens
    leaves = drawn(1, t=shape)
    weight = drawn(2, w=shape)["w"]
    back = tokens.merge(tokens.split(leaves["t"], dim), dim, length)
    _, found = gradients(lambda p: (tokens.merge(tokens.split(p["t"], dim), dim, length) * weight).sum(), leaves, mesh)
    return torch.equal(back, leaves["t"]), difference(found["t"], weight)


@given(SIZES, st.tuples(*[st.integers(1, 4)] * 3), st.integers(1, 2), st.integers(0, 2))
def test_merging_the_parts_gives_the_whole_with_its_gradient(pool, sp, grid, batch, dim):
    """The gradient's ratio to the single process's is 1, not 1 / sp: merge's backward sums over the group."""
    for equal, error in filter(None, pool.run(_round_trip, sp, grid, batch, dim)):
        assert equal and error == 0


def _squared_error(sp, length):
    """Of a nonlinear function of tokens: on merged outputs, and each process on the real tokens of its part."""
    mesh = sp_mesh(sp)
    if mesh is None:
        return None
    tokens = sequence_parallel(Run(), mesh, length).tokens
    leaves, data = drawn(3, w=[5, 5], b=[5]), drawn(4, x=[2, length, 5], y=[2, length, 5])
    x, y, real = (tokens.split(t, 1) for t in (data["x"], data["y"], torch.ones(2, length, 1, dtype=torch.float64)))
    model = lambda p, x: torch.tanh(x @ p["w"] + p["b"])  # noqa: E731 - the bias makes rows of padding wrong
    plain = gradients(lambda p: (model(p, data["x"]) - data["y"]).square().sum(), leaves)
    merged = gradients(lambda p: (tokens.merge(model(p, x), 1, length) - data["y"]).square().sum(), leaves, mesh)
    own = gradients(lambda p: (real * (model(p, x) - y).square()).sum(), leaves, mesh)
    summed = collectives.all_sum(own[0], tokens.group), {k: g * sp for k, g in own[1].items()}
    return [max(difference(loss, plain[0]), *differences(g, plain[1]).values()) for loss, g in (merged, summed)]


@given(SIZES, st.integers(1, 13))
def test_the_squared_error_over_parts_is_the_global_one(pool, sp, length):
    """With its gradients: those of merged outputs averaged over the group, those of parts summed."""
    for errors in filter(None, pool.run(_squared_error, sp, length)):
        assert max(errors) < EXACT


# --- attention --------------------------------------------------------------------------------------------------------

BIASES = {"none": None, "keys": (1, 1, 1, -2), "pairs": (-2, -2), "heads": (1, -1, 1, 1), "all": (2, -1, -2, -2)}


def _arguments(length, heads, kv_heads, head_dim, bias, seed, dtype, batch=2):
    shapes = {"q": (batch, length, heads, head_dim), "k": (batch, length, kv_heads, head_dim)}
    shapes["v"] = shapes["k"]
    if BIASES[bias] is not None:
        shapes["bias"] = tuple({-1: heads, -2: length}.get(n, n) for n in BIASES[bias])
    return drawn(seed, dtype, **shapes), drawn(seed + 1, dtype, out=shapes["q"], lse=(batch, heads, length))


def _self_attention(sp, inner, leaves, weights, options):
    """Differences of loss and gradients between a group and one process, and the collectives."""
    mesh = sp_mesh(sp)
    if mesh is None:
        return None
    length = leaves["q"].shape[1]
    shared = ulysses(mesh, length, inner)
    tokens = shared.tokens

    def loss_of(attend, cut, merge):
        def loss(p):
            q, k, v = (cut(p[name], 1) for name in "qkv")
            more = {"bias": p["bias"]} if "bias" in p else {}
            out = attend(q, k, v, site="self", **options, **more)
            if not options.get("return_lse"):
                return (merge(out, 1, length) * weights["out"]).sum()
            out, lse = out
            return (merge(out, 1, length) * weights["out"]).sum() + (merge(lse, 2, length) * weights["lse"]).sum()

        return loss

    plain = gradients(loss_of(inner, lambda t, dim: t, lambda t, dim, n: t), leaves)
    with Counted() as seen:
        loss, found = gradients(loss_of(shared, tokens.split, tokens.merge), leaves, mesh)
    return difference(loss, plain[0]), differences(found, plain[1]), dict(seen.counts)


@given(
    sp=SIZES, length=st.integers(1, 11), share=st.integers(1, 2), groups=st.integers(1, 2),
    bias=st.sampled_from([*BIASES]), masked=st.sampled_from(["no", "lens", "key_mask"]), causal=st.booleans(),
    lse=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_self_attention_equals_one_process(pool, sp, length, share, groups, bias, masked, causal, lse, seed):
    """Any length and number of heads; masks and biases are those of all tokens; gradients of q, k, v and bias."""
    kv_heads = sp * groups
    leaves, weights = _arguments(length, kv_heads * share, kv_heads, 6, bias, seed, torch.float64)
    options = {"causal": causal, "return_lse": lse, "scale": 0.3}
    if masked == "lens":
        options["lens"] = torch.tensor([length, 1 + seed % length])
    if masked == "key_mask":
        options["key_mask"] = (torch.arange(2 * length).reshape(2, length) + seed) % 3 != 0
        options["key_mask"][:, 0] = True  # a query that sees nothing has lse -inf, which no weighted sum survives
    inner = Attention("reference")
    for loss, grads, _ in filter(None, pool.run(_self_attention, sp, inner, leaves, weights, options)):
        assert loss < EXACT and max(grads.values()) < EXACT


def test_collectives_of_self_attention(pool):
    """One exchange for q, k, v and one for the output, forward and backward, also where kv heads are fewer."""
    for kv_heads in (4, 8):
        leaves, weights = _arguments(6, 8, kv_heads, 4, "none", 0, torch.float64)
        for _, _, counts in pool.run(_self_attention, 4, Attention("reference"), leaves, weights, {}):
            of_merge_and_mean = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 3}
            assert counts == {"all_to_all_single": 4, **of_merge_and_mean}


@pytest.mark.parametrize("sp, length", [(2, 9), (4, 10), (4, 3)])
@pytest.mark.parametrize("settings", [{}, {"smooth_k": True, "global_scales": True}])
def test_quantised_attention_inside(pool, sp, length, settings):
    """Heads are quantised one by one and padding is cut off before, so nothing is rounded in another way.

    The backend computes in float32: its products over another number of heads differ in the last bits.
    """
    leaves, weights = _arguments(length, 4, 4, 16, "none", 5, torch.float32)
    inner = QatAttention(backend="reference", **settings)
    options = {"lens": torch.tensor([length, max(1, length - 4)])}
    for loss, grads, _ in filter(None, pool.run(_self_attention, sp, inner, leaves, weights, options)):
        assert loss < 1e-5 and max(grads.values()) < 1e-5


@pytest.mark.parametrize("sp", [2, 4])
@pytest.mark.parametrize("teacher_forcing", [False, True])
def test_block_causal_attention_inside(pool, sp, teacher_forcing):
    mask = BlockCausal(
        5, 3, 2, local_attn_size=4, sink_size=1, relativistic=True, teacher_forcing=teacher_forcing
    )
    planned = plan_attention(mask, head_dim=12, dtype=torch.float64, device="cpu", backend="reference")
    leaves, weights = _arguments(mask.q_len, 4, 4, 12, "none", 6, torch.float64)
    assert mask.q_len % 4
    inner = BlockCausalAttention(planned)
    for loss, grads, _ in filter(None, pool.run(_self_attention, sp, inner, leaves, weights, {})):
        assert loss < EXACT and max(grads.values()) < EXACT


def _poisoned(sp, length):
    """Real tokens of the output where the padding of q, k, v is NaN, and the gradient's rows of padding."""
    mesh = sp_mesh(sp)
    if mesh is None:
        return None
    attend = ulysses(mesh, length)
    tokens = attend.tokens
    leaves, _ = _arguments(length, 4, 4, 8, "none", 7, torch.float64)
    pad = torch.arange(tokens.part) + tokens.part * tokens.group.rank >= length
    parts = {k: tokens.split(x, 1).masked_fill(pad[None, :, None, None], torch.nan) for k, x in leaves.items()}
    loss = lambda p: tokens.merge(attend(p["q"], p["k"], p["v"], site="self"), 1, length).square().sum()  # noqa: E731
    value, found = gradients(loss, parts)
    expected = attention_reference(*leaves.values()).square().sum()
    return difference(value, expected), all(not g[:, pad].any() and g.isfinite().all() for g in found.values())


@pytest.mark.parametrize("length", [5, 2, 7])
def test_padding_has_no_influence_whatever_it_holds(pool, length):
    for error, clean in pool.run(_poisoned, 4, length):
        assert error < EXACT and clean


def _shapes_of_nothing(sp):
    mesh = sp_mesh(sp)
    tokens = sequence_parallel(Run(), mesh, 0).tokens
    q = tokens.split(torch.zeros(2, 0, 4, 8), 1)
    out, lse = Ulysses(tokens, Attention("reference"))(q, q, q, site="self", return_lse=True)
    return out.shape, lse.shape, tokens.merge(out, 1, 0).shape


def test_no_tokens_at_all(pool):
    for shapes in pool.run(_shapes_of_nothing, 4):
        assert [list(s) for s in shapes] == [[2, 0, 4, 8], [2, 4, 0], [2, 0, 4, 8]]


def _across(sp, site, length, with_bias, lse):
    """Queries that are cut, keys that all processes hold: against one process, and what is communicated."""
    mesh = sp_mesh(sp)
    if mesh is None:
        return None
    shared = ulysses(mesh, length, Attention("reference"))
    tokens = shared.tokens
    x = drawn(8, q=(2, length, 3, 6), k=(2, 5, 3, 6), v=(2, 5, 3, 6), bias=(1, 3, length, 5))
    options = {"key_mask": torch.arange(10).reshape(2, 5) % 4 != 1, "return_lse": lse}
    options["bias"] = x["bias"] if with_bias else None
    plain = attention_reference(x["q"], x["k"], x["v"], **options)
    with Counted() as seen:
        out = shared(tokens.split(x["q"], 1), x["k"], x["v"], site=site, **options)
    counts = dict(seen.counts)
    if not lse:
        return difference(tokens.merge(out, 1, length), plain), counts
    both = [difference(tokens.merge(o, dim, length), p) for o, p, dim in zip(out, plain, (1, 2), strict=True)]
    return max(both), counts


@pytest.mark.parametrize("site", ["cross_text", "cross_image", "a2v"])
@pytest.mark.parametrize("sp, length, bias, lse", [(2, 7, True, True), (4, 8, False, False), (4, 9, True, False)])
def test_keys_that_all_processes_hold_need_no_communication(pool, site, sp, length, bias, lse):
    """Three heads over 2 or 4 processes: only what is exchanged must be divisible."""
    for error, counts in filter(None, pool.run(_across, sp, site, length, bias, lse)):
        assert error < EXACT and counts == {}


def _replicated(sp, length):
    """`v2a` and the sites of the stream that all processes hold: results, gradients, and collectives."""
    mesh = sp_mesh(sp)
    if mesh is None:
        return None
    shared = ulysses(mesh, length, Attention("reference"))
    tokens = shared.tokens
    leaves = drawn(9, q=(2, 5, 8, 6), k=(2, length, 4, 6), v=(2, length, 4, 6), bias=(1, 8, 5, length))
    weights = drawn(10, out=(2, 5, 8, 6), lse=(2, 8, 5))
    lens = torch.tensor([length, 2])

    def loss_of(attend, cut):
        def loss(p):
            out, lse = attend(
                p["q"], cut(p["k"], 1), cut(p["v"], 1), site="v2a", bias=p["bias"], lens=lens, return_lse=True
            )
            return (out * weights["out"]).sum() + (lse * weights["lse"]).sum()

        return loss

    plain = gradients(loss_of(Attention("reference"), lambda t, dim: t), leaves)
    loss, found = gradients(loss_of(shared, tokens.split), leaves, mesh)
    with Counted() as seen:
        out = shared(leaves["q"], tokens.split(leaves["k"], 1), tokens.split(leaves["v"], 1), site="v2a")
    with Counted() as alone:
        q, own_sites = leaves["q"], ("audio_self", "audio_text")
        same = [torch.equal(shared(q, q, q, site=site), attention_reference(q, q, q)) for site in own_sites]
    return out, difference(loss, plain[0]), differences(found, plain[1]), dict(seen.counts), dict(alone.counts), same


@pytest.mark.parametrize("sp, length", [(2, 7), (4, 8), (4, 5)])
def test_queries_that_all_processes_hold(pool, sp, length):
    results = [r for r in pool.run(_replicated, sp, length) if r is not None]
    for out, loss, grads, counts, alone, same in results:
        assert torch.equal(out, results[0][0]), "the stream must be bit-identical on all processes"
        assert loss < EXACT and max(grads.values()) < EXACT
        assert counts == {"all_to_all_single": 1, "all_gather_into_tensor": 1} and alone == {} and all(same)


def _vary(name):
    """Calls that are refused, on every process and before anything is communicated."""
    attend = ulysses(sp_mesh(4), 10)
    part = lambda heads, tokens=3, dtype=torch.float32: torch.zeros(1, tokens, heads, 8, dtype=dtype)  # noqa: E731
    q, text = part(4), part(4, 5)
    calls = {
        "heads": lambda: attend(part(6), part(6), part(6), site="self"),
        "kv heads": lambda: attend(part(8), part(2), part(2), site="self"),
        "heads of v2a": lambda: attend(part(5, 7), part(5), part(5), site="v2a"),
        "tokens": lambda: attend(part(4, 10), part(4, 10), part(4, 10), site="self"),
        "queries": lambda: attend(part(4, 10), text, text, site="cross_text"),
        "dtypes": lambda: attend(q, part(4, dtype=torch.float64), q, site="self"),
        "causal": lambda: attend(q, text, text, site="cross_text", causal=True),
        "bias of a part": lambda: attend(q, q, q, site="self", bias=torch.zeros(3, 3)),
        "bias of own heads": lambda: attend(part(8), part(8), part(8), site="self", bias=torch.zeros(2, 10, 10)),
        "mask of a part": lambda: attend(q, q, q, site="self", key_mask=torch.ones(1, 3, dtype=torch.bool)),
        "site": lambda: attend(q, q, q, site="slef"),
        "twice": lambda: sequence_parallel(Run(tokens=attend.tokens, attention=attend), sp_mesh(4), 10),
    }
    with Counted() as seen:
        try:
            calls[name]()
        finally:
            assert name == "mask of a part" or not seen.counts


@pytest.mark.parametrize(
    "name, said",
    [
        ("heads", r"6 heads cannot be shared evenly by 4 processes \(sp 4\); sp can be 1, 2, 3, 6"),
        ("kv heads", "8 query heads and 2 key heads cannot be shared evenly by 4 processes"),
        ("heads of v2a", "5 heads cannot be shared evenly by 4"),
        ("tokens", "a part of 10 tokens over 4 processes has 3"),
        ("queries", "a part of 10 tokens over 4 processes has 3"),
        ("dtypes", "must share a dtype; got torch.float32, torch.float64"),
        ("causal", "causal needs queries and keys of one stream"),
        ("bias of a part", r"bias \[3, 3\] does not fit \[1, 4, 10, 10\]"),
        ("bias of own heads", r"bias \[2, 10, 10\] does not fit \[1, 8, 10, 10\]"),
        ("mask of a part", r"key_mask must be \[B, Lk\] = \[1, 10\], got \[1, 3\]"),
        ("site", "site 'slef' is none of"),
        ("twice", "Ulysses must be the outermost attention wrapper, it is inside Ulysses"),
    ],
)
def test_calls_that_do_not_fit_are_refused_everywhere(pool, name, said):
    with pytest.raises(UserError, match=said):
        pool.run(_vary, name)


@given(st.integers(1, 48), st.integers(1, 48), st.integers(1, 9))
def test_the_sizes_that_a_fault_names_are_those_that_work(heads, kv_heads, size):
    fault = heads_fault(heads, kv_heads, size)
    fits = {n for n in range(1, 49) if heads % n == 0 and kv_heads % n == 0}
    assert (fault is None) == (size in fits)
    assert fault is None or heads != kv_heads or fault.startswith(f"{heads} head" + ("s " if heads > 1 else " "))
    assert fault is None or {int(n) for n in fault.partition("sp can be ")[2].split(", ")} == fits


@pytest.mark.parametrize("around", [lambda u: QatAttention(u), lambda u: BlockCausalAttention(None, QatAttention(u))])
def test_it_is_the_outermost_wrapper(around):
    """Inside another wrapper it would not be asked at the sites that the other one serves, silently."""
    tokens = tokens_of(2, 6)
    with pytest.raises(UserError, match="Ulysses must be the outermost attention wrapper, it is inside"):
        Run(tokens=tokens, attention=around(Ulysses(tokens)))
    assert Run(tokens=tokens, attention=Ulysses(tokens, QatAttention())).attention.inner == QatAttention()


def test_attention_and_tokens_belong_together():
    tokens = tokens_of(2, 6)
    for attention, cut in ((Attention(), tokens), (Ulysses(tokens), tokens_of(2, 8)), (Ulysses(tokens), None)):
        with pytest.raises(UserError, match="tokens are"):
            Run(attention=attention, **({} if cut is None else {"tokens": cut}))


def test_one_process_is_left_alone():
    run = Run()
    assert sequence_parallel(run, single(), 7) is run


def _alone_on_its_axis():
    run = Run()
    with Counted() as seen:
        same = sequence_parallel(run, mesh_of(dp_shard=4), 7) is run
    return same and not seen.counts


def test_an_axis_of_size_one_has_no_collective(pool):
    assert all(pool.run(_alone_on_its_axis))
