"""AdamW, clipping and EMA against PyTorch's own and against closed forms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import keys
from core.errors import UserError
from train.optim import AdamW, adamw_init, adamw_update, clip_, ema_update, exchange, holding, swapped

SHAPES = {"a.weight": (3, 5), "b.bias": (7,), "c.table": (1, 2, 3), "d.scale": ()}


def tree(seed, dtype=torch.float32, scale=1.0):
    k = keys.key(seed)
    return {name: (keys.normal(keys.fold_in(k, name), shape) * scale).to(dtype) for name, shape in SHAPES.items()}


def theirs(params, opt: AdamW, lr):
    leaves = [p.clone().requires_grad_() for p in params.values()]
    options = {"betas": opt.betas, "eps": opt.eps, "weight_decay": opt.weight_decay}
    return leaves, torch.optim.AdamW(leaves, lr=lr, foreach=False, fused=False, **options)


@pytest.mark.parametrize("fused", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99), (0.0, 0.0)])
def test_adamw_equals_torch_over_several_steps(fused, dtype, betas):
    opt = AdamW(betas=betas, eps=1e-6, weight_decay=0.1, fused=fused)
    params = tree(0, dtype)
    state = adamw_init(params)
    leaves, reference = theirs(params, opt, 1.0)
    for step in range(6):
        grads, lr = tree(1 + step, dtype), 1e-2 / (1 + step)
        adamw_update(opt, grads, state, params, lr)
        reference.param_groups[0]["lr"] = lr
        for leaf, grad in zip(leaves, grads.values(), strict=True):
            leaf.grad = grad.clone()
        reference.step()
    # Six updates of rounding in float32. In float64 the multi-tensor kernels have their bias corrections from a
    # float32 step count, exact to about 1e-7 of an update of at most 1e-2.
    tolerance = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 1e-8 if fused is False else 1e-14}
    for (name, p), leaf in zip(params.items(), leaves, strict=True):
        torch.testing.assert_close(p, leaf.detach(), **tolerance, msg=lambda m, name=name: f"{name}: {m}")
        saved = reference.state[leaf]
        torch.testing.assert_close(state[f"exp_avg.{name}"], saved["exp_avg"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state[f"exp_avg_sq.{name}"], saved["exp_avg_sq"], rtol=1e-6, atol=1e-6)


def test_the_step_is_one_tensor_that_counts_updates_and_moments_are_in_place():
    params = tree(0)
    state = adamw_init(params)
    before = {k: v.data_ptr() for k, v in state.items()} | {k: p.data_ptr() for k, p in params.items()}
    for _ in range(3):
        adamw_update(AdamW(), tree(1), state, params, 0.1)
    assert state["step"].shape == () and state["step"].dtype == torch.float32 and float(state["step"]) == 3
    assert {k: v.data_ptr() for k, v in {**state, **params}.items()} == before


@pytest.mark.parametrize("fused", [True, False])
def test_bf16_masters_have_float32_moments_and_round_once_per_update(fused):
    params, opt = tree(0, torch.bfloat16), AdamW(weight_decay=0.1, fused=fused)
    wide = {k: p.float() for k, p in params.items()}
    state, wide_state = adamw_init(params), adamw_init(wide)
    assert all(v.dtype == torch.float32 for v in state.values())
    for step in range(4):
        grads = tree(1 + step)
        adamw_update(opt, grads, state, params, 1e-2)
        adamw_update(opt, grads, wide_state, wide, 1e-2)
        wide = {k: p.bfloat16().float() for k, p in wide.items()}
        for k, p in params.items():
            assert p.dtype == torch.bfloat16 and torch.equal(p.float(), wide[k])
            assert torch.equal(state[f"exp_avg.{k}"], wide_state[f"exp_avg.{k}"])


def test_mixed_dtypes_update_as_each_would_alone():
    params = tree(0) | {k + ".half": v.bfloat16() for k, v in tree(9).items()}
    grads = {k: keys.normal(keys.fold_in(keys.key(5), k), p.shape) for k, p in params.items()}
    alone = {}
    for k, p in params.items():
        one = {k: p.clone()}
        adamw_update(AdamW(), {k: grads[k]}, adamw_init(one), one, 0.1)
        alone |= one
    adamw_update(AdamW(), grads, adamw_init(params), params, 0.1)
    assert all(torch.equal(params[k], alone[k]) for k in params)


def test_gradients_of_other_keys_are_refused_before_anything_changes():
    params = tree(0)
    state, before = adamw_init(params), {k: p.clone() for k, p in params.items()}
    grads = {k: v for k, v in tree(1).items() if k != "b.bias"} | {"x": torch.zeros(1)}
    with pytest.raises(UserError, match=r"different keys\n  - b.bias\n  - x"):
        adamw_update(AdamW(), grads, state, params, 0.1)
    assert float(state["step"]) == 0 and all(torch.equal(params[k], before[k]) for k in params)


@given(st.floats(0.01, 20), st.integers(0, 99), st.sampled_from([1e-3, 1.0, 1e3]))
def test_clip_equals_torch(max_norm, seed, scale):
    grads = tree(seed, scale=scale)
    leaves = [torch.zeros_like(g).requires_grad_() for g in grads.values()]
    for leaf, grad in zip(leaves, grads.values(), strict=True):
        leaf.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(leaves, max_norm)
    norm = clip_(grads, max_norm)
    assert isinstance(norm, torch.Tensor) and norm.shape == ()
    # The same float32 norms of leaves, whose squares are added up in another order.
    torch.testing.assert_close(norm, expected, rtol=3e-7, atol=0)
    for g, leaf in zip(grads.values(), leaves, strict=True):
        torch.testing.assert_close(g, leaf.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("max_norm", [0, 0.0, -1.0])
def test_no_limit_still_measures_the_norm_and_scales_nothing(max_norm):
    grads, before = tree(0, scale=100.0), tree(0, scale=100.0)
    norm = clip_(grads, max_norm)
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in before.values()]).norm())
    assert all(torch.equal(grads[k], before[k]) for k in grads)


@given(st.floats(0, 0.999), st.integers(1, 6))
def test_ema_is_the_weighted_sum_of_its_past(decay, steps):
    """ema_n = d^n ema_0 + (1 - d) sum_i d^(n - i) p_i."""
    path = [tree(i, torch.float64) for i in range(steps + 1)]
    ema = {k: v.clone() for k, v in path[0].items()}
    for params in path[1:]:
        ema_update(ema, params, decay)
    for k, value in ema.items():
        terms = [(1 - decay) * decay ** (steps - i) * path[i][k] for i in range(1, steps + 1)]
        torch.testing.assert_close(value, decay**steps * path[0][k] + sum(terms), rtol=1e-12, atol=1e-12)


def test_ema_of_bf16_weights_stays_float32_and_decay_0_copies():
    params, ema = tree(0, torch.bfloat16), tree(1)
    ema_update(ema, params, 0.0)
    assert all(ema[k].dtype == torch.float32 and torch.equal(ema[k], params[k].float()) for k in params)


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_swapped_exchanges_storage_and_restores_on_any_exit(other):
    params, ema = {k: v.to(other).requires_grad_() for k, v in tree(0).items()}, tree(1)
    a, b = ({k: v.detach().clone() for k, v in t.items()} for t in (params, ema))
    for error in (None, RuntimeError, KeyboardInterrupt):
        try:
            with swapped(params, ema):
                assert all(torch.equal(params[k].detach(), b[k]) and torch.equal(ema[k], a[k]) for k in a)
                if error is not None:
                    raise error
        except (RuntimeError, KeyboardInterrupt) as seen:
            assert type(seen) is error
        assert all(torch.equal(params[k].detach(), a[k]) and torch.equal(ema[k], b[k]) for k in a)
        assert all(p.requires_grad for p in params.values())


def test_leaves_hold_other_values_for_a_while_in_their_own_storage():
    params, ema = {k: v.to(torch.bfloat16).requires_grad_() for k, v in tree(0).items()}, tree(1)
    before, places = {k: p.detach().clone() for k, p in params.items()}, {k: p.data_ptr() for k, p in params.items()}
    with pytest.raises(RuntimeError), holding(params, ema):
        assert all(torch.equal(params[k].detach(), v.to(torch.bfloat16)) for k, v in ema.items())
        raise RuntimeError
    assert all(torch.equal(params[k].detach(), v) for k, v in before.items())
    assert {k: p.data_ptr() for k, p in params.items()} == places and all(torch.equal(ema[k], tree(1)[k]) for k in ema)


def test_swapped_with_nothing_does_nothing_and_other_keys_are_refused_whole():
    params, ema = tree(0), tree(1)
    with swapped(params, None):
        assert all(torch.equal(params[k], v) for k, v in tree(0).items())
    del ema["d.scale"]
    with pytest.raises(UserError, match="different keys\n  - d.scale"):
        exchange(params, ema)
    assert all(torch.equal(params[k], v) for k, v in tree(0).items())


@pytest.mark.parametrize("fused", [True, False])
def test_layouts_of_gradients_and_moments_change_nothing(fused):
    """PyTorch's fused kernel goes by position in memory: a gradient laid out otherwise would update other elements."""
    contiguous = keys.normal(keys.key(0), (4, 3, 2, 5, 6))
    grad = keys.normal(keys.key(1), contiguous.shape)
    last = lambda x: x.contiguous(memory_format=torch.channels_last_3d)  # noqa: E731
    expected = {"w": contiguous.clone()}
    state = adamw_init(expected)
    adamw_update(AdamW(fused=False), {"w": grad}, state, expected, 1e-2)
    same = lambda x: x  # noqa: E731
    for leaf, layout, moments in ((last, same, last), (same, last, same), (last, last, same)):
        params = {"w": leaf(contiguous.clone())}
        own = {k: moments(v) if v.ndim == 5 else v for k, v in adamw_init({"w": contiguous}).items()}
        adamw_update(AdamW(fused=fused), {"w": layout(grad)}, own, params, 1e-2)
        torch.testing.assert_close(params["w"], expected["w"], rtol=0, atol=1e-7)
        torch.testing.assert_close(own["exp_avg.w"], state["exp_avg.w"], rtol=1e-6, atol=1e-7)
