"""Layers against independent formulas, and the whole tiny Wan under PyTorch's function transforms."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from wan_cases import diffusers_model, random_inputs, random_params, tiny_config

from core import keys
from core.interop import from_module, to_module
from core.scan import compiled, recompute, scan
from kernels import Attention, fake_quant_nvfp4, nvfp4_global_scale, quantise_nvfp4
from nn import layers, rope, wan
from nn.run import Run
from nn.wan_inputs import model_inputs

SIZES = st.integers(1, 6)


def normals(seed: int, **shapes) -> dict[str, torch.Tensor]:
    """Standard normal float64 tensors by name."""
    k = keys.key(seed)
    return {name: keys.normal(keys.fold_in(k, name), shape, torch.float64) for name, shape in shapes.items()}


# --- linear and its companions --------------------------------------------------------------------------------


@given(n_in=SIZES, n_out=SIZES, rank=SIZES, bias=st.booleans(), seed=st.integers(0, 10**6))
def test_an_adapter_equals_its_merged_weight(n_in, n_out, rank, bias, seed):
    """Values and the gradient of x, in float64: products of at most 36 terms agree to 1e-12."""
    t = normals(seed, w=(n_out, n_in), b=(n_out,), down=(rank, n_in), up=(n_out, rank), scale=(), x=(2, 3, n_in))
    p = {"l.weight": t["w"], "l.lora_A": t["down"], "l.lora_B": t["up"], "l.lora_scale": t["scale"]}
    merged = {"l.weight": t["w"] + t["scale"] * t["up"] @ t["down"]}
    if bias:
        p["l.bias"] = merged["l.bias"] = t["b"]
    run = lambda tree: torch.func.vjp(lambda x: layers.linear(tree, "l", x), t["x"])  # noqa: E731
    (ours, back), (theirs, back_theirs) = run(p), run(merged)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(back(ours), back_theirs(ours), rtol=1e-12, atol=1e-11)
    without = layers.linear(p, "l", t["x"], add_bias=False) + (t["b"] if bias else 0)
    torch.testing.assert_close(without, theirs, rtol=1e-12, atol=1e-12)


def test_an_adapter_leaves_the_base_gradient_alone_and_gets_its_own():
    t = normals(0, w=(4, 3), down=(2, 3), up=(4, 2), x=(5, 3))
    p = {"l.weight": t["w"], "l.lora_A": t["down"], "l.lora_B": t["up"], "l.lora_scale": torch.tensor(0.5).double()}
    loss = lambda tree: layers.linear(tree, "l", t["x"]).square().sum()  # noqa: E731
    grads = torch.func.grad(loss)(p)
    merged = torch.func.grad(loss)({"l.weight": t["w"] + 0.5 * t["up"] @ t["down"]})["l.weight"]
    # Chain rule through W + s B A: dA = s B^T dW, dB = s dW A^T; float64, so to 1e-12.
    torch.testing.assert_close(grads["l.weight"], merged, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads["l.lora_A"], 0.5 * t["up"].T @ merged, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads["l.lora_B"], 0.5 * merged @ t["down"].T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scaled_weight_is_its_codes_times_the_scale(codes, shape, dtype):
    t = normals(1, w=(4, 3), x=(5, 3), b=(4,))
    weight, scale = (t["w"] * 20).to(codes), torch.full(shape, 0.037) * (1 + torch.arange(4.0)[:, None] if shape else 1)
    p = {"l.weight": weight, "l.weight_scale": scale, "l.bias": t["b"].float()}
    x = t["x"].to(dtype)
    expected = F.linear(x, (weight.float() * scale).to(dtype), t["b"].to(dtype))
    assert torch.equal(layers.linear(p, "l", x), expected)
    without = layers.linear({k: v for k, v in p.items() if k != "l.weight_scale"}, "l", x)
    assert not torch.allclose(without, expected)


@pytest.mark.parametrize("scaled", [False, True], ids=["group scales", "and a global one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_codes_are_the_weight_that_fake_quantisation_imitates(scaled, dtype):
    """Codes, group scales and the global scale are leaves of the tree."""
    t = {k: v.float() for k, v in normals(3, w=(4, 32), x=(5, 32)).items()}
    top = nvfp4_global_scale(t["w"]) if scaled else None
    codes, scales = quantise_nvfp4(t["w"], top)
    p = {"l.weight": codes, "l.weight_scale": scales} | ({"l.weight_global_scale": top} if scaled else {})
    x = t["x"].to(dtype)
    ours = layers.linear(p, "l", x)
    assert torch.equal(ours, F.linear(x, fake_quant_nvfp4(t["w"], top).to(dtype)))
    if scaled:
        del p["l.weight_global_scale"]
        assert not torch.allclose(layers.linear(p, "l", x), ours)


def test_fake_quantisation_rounds_to_codes_and_lets_the_gradient_through():
    t = {k: v.float() for k, v in normals(2, w=(4, 3), x=(5, 3)).items()}
    scale = t["w"].abs().amax(1, keepdim=True) / 448
    p = {"l.weight": t["w"], "l.weight_fake_scale": scale}
    real = {"l.weight": (t["w"] / scale).to(torch.float8_e4m3fn), "l.weight_scale": scale}
    # w + (round(w) - w) rounds twice in float32: 1e-6 of the largest weight.
    torch.testing.assert_close(layers.linear(p, "l", t["x"]), layers.linear(real, "l", t["x"]), rtol=0, atol=1e-5)
    assert not torch.allclose(layers.linear(p, "l", t["x"]), F.linear(t["x"], t["w"]), atol=1e-3)
    weights = torch.linspace(-1, 1, 20).reshape(5, 4)
    loss = lambda tree: (layers.linear(tree, "l", t["x"]) * weights).sum()  # noqa: E731
    grad = torch.func.grad(lambda w: loss({**p, "l.weight": w}))(t["w"])
    torch.testing.assert_close(grad, torch.func.grad(lambda w: loss({"l.weight": w}))(t["w"]))
    # Codes saturate instead of becoming NaN.
    assert (
        layers.effective_weight({"l.weight": t["w"] * 1e6, "l.weight_fake_scale": scale}, "l", torch.float32)
        .isfinite()
        .all()
    )


# --- patches --------------------------------------------------------------------------------------------------

PATCHES = st.tuples(*[st.integers(1, 3)] * 3)


@given(patch=PATCHES, grid=PATCHES, batch=st.integers(1, 2), channels=st.integers(1, 3))
def test_patchify_and_unpatchify_are_inverse_up_to_the_order_of_features(patch, grid, batch, channels):
    """patchify gives features (c, pt, ph, pw), Wan's head emits (pt, ph, pw, c)."""
    size = [n * p for n, p in zip(grid, patch, strict=True)]
    x = torch.arange(batch * channels * math.prod(size)).reshape(batch, channels, *size)
    tokens = layers.patchify(x, patch)
    assert tokens.shape == (batch, math.prod(grid), channels * math.prod(patch))
    head_order = tokens.unflatten(-1, (channels, -1)).transpose(-1, -2).flatten(-2)
    assert torch.equal(layers.unpatchify(head_order, patch, grid), x)


@given(patch=PATCHES, grid=PATCHES, seed=st.integers(0, 99))
def test_the_patch_embedding_is_a_strided_convolution(patch, grid, seed):
    """float64 sums of at most 54 terms in another order: 1e-12."""
    size = [n * p for n, p in zip(grid, patch, strict=True)]
    t = normals(seed, x=(2, 2, *size), w=(5, 2, *patch), b=(5,))
    ours = layers.linear({"p.weight": t["w"], "p.bias": t["b"]}, "p", layers.patchify(t["x"], patch))
    theirs = F.conv3d(t["x"], t["w"], t["b"], stride=patch).flatten(2).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


# --- rotary embedding -----------------------------------------------------------------------------------------

HEAD_DIMS = st.sampled_from([6, 8, 10, 12, 14, 16, 32, 64, 128])


@given(dim=HEAD_DIMS)
def test_axes_share_a_head_with_pairs_kept_together(dim):
    t, h, w = rope.axis_dims(dim)
    assert t + h + w == dim and h == w and not any(n % 2 for n in (t, h, w)) and t >= h
    assert rope.axis_dims(128) == (44, 42, 42)


@given(dim=HEAD_DIMS, grid=PATCHES, seed=st.integers(0, 10**6))
def test_rotation_is_complex_multiplication(dim, grid, seed):
    """Pair i of axis a at position p turns by p * 10000 ** (-2 i / dim_a). Tables are float32: 1e-6."""
    length = math.prod(grid)
    x = normals(seed, x=(2, length, 3, dim))["x"]
    ours = rope.apply_rope(x, rope.rope_3d(grid, dim))
    positions = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in grid)).reshape(length, 3)
    rates = [10000.0 ** (-2 * torch.arange(n // 2, dtype=torch.float64) / n) for n in rope.axis_dims(dim)]
    angles = torch.cat([positions[:, a, None] * rates[a] for a in range(3)], dim=1)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(ours, torch.view_as_real(turned).flatten(-2), rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)


@given(dim=HEAD_DIMS, seed=st.integers(0, 10**6), axis=st.integers(0, 2), shift=st.integers(1, 3))
def test_scores_depend_on_offsets_only(dim, seed, axis, shift):
    """q at position a and k at position b give one score for equal b - a on every axis; float32 tables: 1e-5."""
    grid = (5, 5, 5)
    t = normals(seed, q=(dim,), k=(dim,))
    spread = lambda v: rope.apply_rope(v.expand(1, 125, 1, dim), rope.rope_3d(grid, dim))  # noqa: E731
    scores = torch.einsum("ad,bd->ab", spread(t["q"])[0, :, 0], spread(t["k"])[0, :, 0]).reshape(5, 5, 5, 5, 5, 5)
    scores = scores.movedim((axis, 3 + axis), (0, 1))
    moved = scores[shift:, shift:]
    torch.testing.assert_close(moved, scores[:-shift, :-shift], rtol=0, atol=1e-5 * dim)
    # The law is not empty: another offset gives another score.
    assert (scores[0, 1] - scores[0, 0]).abs().max() > 1e-3


def test_rotation_keeps_the_dtype_and_works_in_float32():
    x = torch.randn(1, 4, 2, 8)
    table = rope.rope_3d((1, 2, 2), 8)
    half = rope.apply_rope(x.bfloat16(), table)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, rope.apply_rope(x.bfloat16().float(), table).bfloat16())


# --- timesteps ------------------------------------------------------------------------------------------------


@given(times=st.lists(st.floats(0, 1000, width=32), min_size=1, max_size=5), half=st.integers(1, 130))
def test_timestep_embedding_equals_diffusers(times, half):
    """Angles reach 1000, whose float32 spacing is 6e-5: both sides may round a rate to either side."""
    from diffusers.models.embeddings import get_timestep_embedding

    t = torch.tensor(times)
    theirs = get_timestep_embedding(t, 2 * half, flip_sin_to_cos=True, downscale_freq_shift=0)
    torch.testing.assert_close(layers.timestep_embedding(t, 2 * half), theirs, rtol=0, atol=2e-4)


def test_timestep_embedding_in_float64_and_per_token():
    t = torch.tensor([[0.0, 1.5], [999.0, 1000.0]], dtype=torch.float64)
    out = layers.timestep_embedding(t, 4)
    rates = torch.tensor([1.0, 0.01], dtype=torch.float64)
    angles = t[..., None] * rates
    # 10000 ** -0.5 through exp and log is exact to a few 1e-16, times 1000.
    torch.testing.assert_close(out, torch.cat([angles.cos(), angles.sin()], -1), rtol=0, atol=1e-12)


@functools.cache
def small(num_layers: int = 2):
    """A config, float64 parameters and inputs of a tiny Wan."""
    cfg = tiny_config(num_layers=num_layers, num_attention_heads=2, attention_head_dim=6, ffn_dim=10)
    noisy, timestep, conditions = random_inputs(cfg, 1, grid=(1, 2, 2), text_len=3, dtype=torch.float64)
    return cfg, random_params(cfg, 0, torch.float64), model_inputs(cfg, noisy, timestep, conditions)


def test_timesteps_matter_down_to_their_differences():
    """Also near each other (999 and 998.9), and per token: only the token whose time changed first differs."""
    cfg, params, inputs = small()
    at = lambda t: wan.forward(params, cfg, {**inputs, "timestep": t})  # noqa: E731
    t = torch.tensor([999.0, 500.0], dtype=torch.float64)
    base = at(t)
    moved = at(t - torch.tensor([0.1, 0.0], dtype=torch.float64))
    assert (moved[0] - base[0]).abs().max() > 1e-6 and torch.equal(moved[1], base[1])
    # One timestep for all tokens is the per-token form of equal timesteps; sums in another order, so 1e-12.
    torch.testing.assert_close(at(t[:, None].expand(2, 4)), base, rtol=1e-12, atol=1e-12)


# --- function transforms of the whole model -------------------------------------------------------------------

RUNS = {name: Run(attention=Attention(name)) for name in ("reference", "sdpa_math")}


def stacked(trees):
    return {k: torch.stack([t[k] for t in trees]) for k in trees[0]}


@pytest.mark.parametrize("backend", RUNS)
def test_vmap_runs_an_ensemble(backend):
    """A batch of parameter trees equals a loop over them, values and gradients: float64, sums in another order."""
    cfg, _, inputs = small()
    trees = [random_params(cfg, seed, torch.float64) for seed in range(3)]
    weight = torch.linspace(-1, 1, inputs["latents"].numel(), dtype=torch.float64).reshape(inputs["latents"].shape)
    forward = lambda p: wan.forward(p, cfg, inputs, run=RUNS[backend])  # noqa: E731
    loss = lambda p: (forward(p) * weight).sum()  # noqa: E731
    close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    close(torch.vmap(forward)(stacked(trees)), torch.stack([forward(p) for p in trees]))
    grads = torch.vmap(torch.func.grad(loss))(stacked(trees))
    each = [torch.func.grad(loss)(p) for p in trees]
    for name in trees[0]:
        close(grads[name], torch.stack([g[name] for g in each]), msg=lambda m, name=name: f"{name}: {m}")
    assert all(g.abs().max() > 0 for g in each[0].values()), "every leaf takes part"


def test_func_grad_equals_backward():
    cfg, params, inputs = small()
    loss = lambda p: wan.forward(p, cfg, inputs).square().sum()  # noqa: E731
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    loss(leaves).backward()
    for name, grad in torch.func.grad(loss)(params).items():
        torch.testing.assert_close(grad, leaves[name].grad, rtol=1e-12, atol=1e-12)


def test_jvp_equals_finite_differences():
    """Along a random direction of all parameters, the latents and the timestep.

    Central differences at h = 1e-6 in float64: truncation h^2 = 1e-12, rounding 1e-16 / h = 1e-10 of values
    of order 1; 1e-7 of the largest derivative leaves room for the timestep's steep angles.
    """
    cfg, params, inputs = small()
    args = ({**params}, inputs["latents"], inputs["timestep"])
    k = keys.key(5)
    draw = lambda name, t: keys.normal(keys.fold_in(k, name), t.shape, torch.float64)  # noqa: E731
    tangents = ({n: draw(n, p) for n, p in params.items()}, draw(".x", args[1]), draw(".t", args[2]))

    def forward(p, latents, timestep):
        return wan.forward(p, cfg, {**inputs, "latents": latents, "timestep": timestep}, run=RUNS["reference"])

    def moved(h):
        p, x, t = tangents
        return forward({n: params[n] + h * p[n] for n in params}, args[1] + h * x, args[2] + h * t)

    value, slope = torch.func.jvp(forward, args, tangents)
    assert torch.equal(value, forward(*args))
    h = 1e-6
    numeric = (moved(h) - moved(-h)) / (2 * h)
    assert slope.abs().max() > 1e-3
    torch.testing.assert_close(slope, numeric, rtol=0, atol=1e-7 * slope.abs().max().item())


# --- modules --------------------------------------------------------------------------------------------------


def test_wan_as_a_module():
    """state_dict keys are the tree's (so Diffusers' too), it compiles, and functional_call replaces its weights."""
    cfg, params, inputs = small()
    module = to_module(wan.forward, params, cfg)
    plain = wan.forward(params, cfg, inputs)
    assert set(module.state_dict()) == set(params)
    assert set(module.state_dict()) == set(diffusers_model(cfg, device="meta").state_dict())
    assert torch.equal(module(inputs), plain)
    # float64; a compiled graph may order sums otherwise.
    torch.testing.assert_close(torch.compile(module, backend="aot_eager")(inputs), plain, rtol=1e-12, atol=1e-12)
    other = random_params(cfg, 9, torch.float64)
    assert torch.equal(torch.func.functional_call(module, other, (inputs,)), wan.forward(other, cfg, inputs))
    assert torch.equal(module(inputs), plain)


def test_diffusers_module_as_a_function():
    """`from_module` of their transformer has our keys, and one tree serves both: 2e-5 as in the parity tests."""
    cfg, params, inputs = small()
    params, inputs = ({k: v.float() for k, v in tree.items()} for tree in (params, inputs))
    forward, theirs, buffers = from_module(diffusers_model(cfg))
    assert set(theirs) == set(params)
    out = forward(params, buffers, inputs["latents"], inputs["timestep"], inputs["text"], return_dict=False)[0]
    ours = wan.forward(params, cfg, inputs)
    torch.testing.assert_close(ours, out, rtol=0, atol=2e-5 * out.abs().max().item())


@pytest.mark.parametrize(
    "how,exact",
    [
        (recompute(every=1), True),
        (recompute(every=2), True),
        (compiled(backend="aot_eager"), False),
        (recompute(compiled(backend="aot_eager"), every=2), False),
    ],
    ids=["recompute-1", "recompute-2", "compiled", "recompute-compiled"],
)
def test_how_layers_run_does_not_change_gradients(how, exact):
    """Recomputation repeats the same operations, so bits are equal; a compiled graph may order sums otherwise."""
    cfg, params, inputs = small(3)

    def grads(run):
        leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
        out = wan.forward(leaves, cfg, inputs, run=run)
        out.square().sum().backward()
        return {"output": out.detach(), **{k: v.grad for k, v in leaves.items()}}

    plain, other = grads(Run(scan=scan)), grads(Run(scan=how))
    assert set(plain) == set(other)
    for name, value in plain.items():
        if exact:
            assert torch.equal(other[name], value), name
        else:
            torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
