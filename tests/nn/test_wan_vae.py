"""Wan's VAEs against Diffusers' AutoencoderKLWan; chunks, tiles, transforms, folders and their errors."""

import dataclasses
import inspect
import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from vae_cases import configs, diffusers_vae, random_latents, random_params, random_video, vae_config

from core import keys, specs
from core.errors import UserError
from kernels import Attention
from nn import wan_vae
from nn import wan_vae_blocks as blocks
from nn.wan_vae import VaeRun, WanVaeConfig
from nn.wan_vae_config import decoder_stages
from nn.wan_vae_strips import decode_strips, margins
from nn.wan_vae_tiling import blend_weights, tiled_decode, tiled_encode, windows

# Float32 with sums of some hundred terms in another order: a few ulp (1.2e-7) per operation through some twenty
# convolutions in a row. Over 250 random cases the error had a median of 8e-7 of the largest value and at most 8e-6.
TOLERANCE = 2e-5
KINDS = {"2.1": vae_config(), "2.2": vae_config(residual=True)}
SEEDS = st.integers(0, 10**6)
SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3))


def close(ours, theirs, what, tolerance=TOLERANCE, scale=None):
    assert ours.shape == theirs.shape, what
    scale = max(theirs.abs().max().item(), 1e-3) if scale is None else scale
    error = (ours - theirs).abs().max().item() / scale
    assert error < tolerance, f"{what}: relative error {error:.2e}"


def partition(total: int, cuts: list[int]) -> list[int]:
    """Sizes of at least 1 that sum to `total`, cut as `cuts` say."""
    sizes = []
    for cut in cuts:
        if sum(sizes) + cut < total:
            sizes.append(cut)
    return [*sizes, total - sum(sizes)]


# --- parity ---------------------------------------------------------------------------------------------------


@given(cfg=configs(), seed=SEEDS, groups=st.integers(0, 3), batch=st.integers(1, 2), size=SIZES)
@settings(max_examples=25)
def test_encoding_and_decoding_equal_diffusers(cfg, seed, groups, batch, size):
    """Diffusers goes frame by frame with its cache; we go at once. Its encoder takes four frames at a time."""
    params = random_params(cfg, seed)
    model = diffusers_vae(cfg, params)
    video = random_video(cfg, seed, batch=batch, frames=4 * groups + 1, size=size)
    with torch.no_grad():
        posterior = model.encode(video).latent_dist
        mean, logvar = wan_vae.encode_moments(params, cfg, video)
        close(mean, posterior.mean, "mean")
        close(logvar, posterior.logvar, "log variance")
        latents = random_latents(cfg, seed, batch=batch, frames=groups + 1, size=size)
        theirs = model.decode(wan_vae.denormalise(cfg, latents)).sample
        close(wan_vae.decode(params, cfg, latents), theirs, "decode")
        assert (theirs.abs() < 1).float().mean() > 0.5  # otherwise the clamp would hide a fault


def gradients(outputs, leaves):
    """Gradients of one fixed weighted sum of `outputs`."""
    loss = sum((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in outputs)
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def compare_gradients(ours, theirs, names):
    largest = max(g.abs().max().item() for g in theirs if g is not None)
    for name, a, b in zip(names, ours, theirs, strict=True):
        assert (a is None) == (b is None), name
        if b is not None:
            # Sums over all pixels: the error is that of the largest terms, not of the leaf's own gradient.
            close(a, b, f"gradient of {name}", scale=largest)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_diffusers(kind):
    """With respect to the input and every parameter that takes part."""
    cfg = KINDS[kind]
    params = random_params(cfg, 1)
    model = diffusers_vae(cfg, params)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    theirs = dict(model.named_parameters())
    names = [*leaves, "input"]

    video = random_video(cfg, 2, frames=9).requires_grad_()
    posterior = model.encode(video).latent_dist
    wanted = gradients((posterior.mean, posterior.logvar), [*[theirs[k] for k in leaves], video])
    got = gradients(wan_vae.encode_moments(leaves, cfg, video), [*leaves.values(), video])
    compare_gradients(got, wanted, names)

    latents = random_latents(cfg, 3, frames=3).requires_grad_()
    video = model.decode(wan_vae.denormalise(cfg, latents)).sample
    wanted = gradients((video,), [*[theirs[k] for k in leaves], latents])
    got = gradients((wan_vae.decode(leaves, cfg, latents),), [*leaves.values(), latents])
    compare_gradients(got, wanted, names)


@pytest.mark.parametrize("kind", KINDS)
def test_float64_equals_diffusers(kind):
    """Diffusers upsamples in float32, which rounds its decoder's activations to 6e-8; its encoder is all float64."""
    cfg = KINDS[kind]
    params = random_params(cfg, 4, torch.float64)
    model = diffusers_vae(cfg, params, dtype=torch.float64)
    with torch.no_grad():
        video = random_video(cfg, 4, dtype=torch.float64)
        close(wan_vae.encode_moments(params, cfg, video)[0], model.encode(video).latent_dist.mean, "mean", 1e-12)
        latents = random_latents(cfg, 4, frames=3, dtype=torch.float64)
        ours = wan_vae.decode(params, cfg, latents)
        assert ours.dtype == torch.float64
        close(ours, model.decode(wan_vae.denormalise(cfg, latents)).sample, "decode", 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_near_to_the_truth_as_diffusers(kind):
    """Two bf16 runs differ from each other by what each loses; both are measured against float64, as the root
    of the mean square over some thousand values, which varies by a few percent: 1.15 times is allowed."""
    cfg = dataclasses.replace(KINDS[kind], base_dim=16)
    exact, half = random_params(cfg, 4, torch.float64), random_params(cfg, 4, torch.bfloat16)
    exact = {k: v.bfloat16().double() for k, v in exact.items()}
    model = diffusers_vae(cfg, half, dtype=torch.bfloat16)
    video = random_video(cfg, 4, size=(2, 3), dtype=torch.bfloat16)
    latents = random_latents(cfg, 4, frames=3, size=(2, 3), dtype=torch.bfloat16)
    with torch.no_grad():
        ours = wan_vae.encode_moments(half, cfg, video)[0], wan_vae.decode(half, cfg, latents)
        theirs = model.encode(video).latent_dist.mean, model.decode(wan_vae.denormalise(cfg, latents)).sample
        truth = wan_vae.encode_moments(exact, cfg, video.double())[0], wan_vae.decode(exact, cfg, latents.double())
    for a, b, true in zip(ours, theirs, truth, strict=True):
        assert a.dtype == torch.bfloat16
        lost, allowed = ((x.double() - true).square().mean().sqrt() for x in (a, b))
        assert lost < 1.15 * allowed, f"{lost:.2e}, Diffusers {allowed:.2e}"


def test_a_blank_pixel_is_finite_in_half_precision():
    gamma = torch.ones(4, 1, 1, 1)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.zeros(1, 4, 1, 1, 2, dtype=dtype)
        x[..., 1] = 3.0
        out = blocks.rms_norm(x, gamma)
        assert out.dtype == dtype and torch.equal(out[..., 0], x[..., 0])
        torch.testing.assert_close(out[..., 1].float(), torch.ones(1, 4, 1, 1), atol=1e-2, rtol=0)


@given(seed=SEEDS, size=st.tuples(*[st.integers(1, 4)] * 2), widths=st.tuples(*[st.integers(1, 5)] * 2))
def test_doubling_by_phases_is_upsampling_then_filtering(seed, size, widths):
    k = keys.key(seed)
    draw = lambda name, *shape: keys.normal(keys.fold_in(k, name), shape, dtype=torch.float64)  # noqa: E731
    n_in, n_out = widths
    p = {"c.weight": draw("weight", n_out, n_in, 3, 3), "c.bias": draw("bias", n_out)}
    x = draw("x", 2, n_in, *size)
    wanted = F.conv2d(F.interpolate(x, scale_factor=2, mode="nearest-exact"), p["c.weight"], p["c.bias"], padding=1)
    torch.testing.assert_close(blocks.double_size(p, "c", x), wanted, atol=1e-12, rtol=0)


# --- full configs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,count", [("wan2.1-vae", 126_892_531), ("wan2.2-vae", 704_688_668)])
def test_full_configs_key_by_key(name, count):
    """Every key and shape of the public models, without allocating them."""
    cfg = wan_vae.PRESETS[name]
    theirs = diffusers_vae(cfg, device="meta").state_dict()
    specs.check(theirs, wan_vae.param_specs(cfg))
    assert sum(v.numel() for v in specs.abstract(wan_vae.param_specs(cfg)).values()) == count


def test_presets_are_the_public_configs():
    """2.1 is what Diffusers' class has as defaults; 2.2 is the config.json of Wan2.2-TI2V-5B."""
    from diffusers import AutoencoderKLWan

    signature = inspect.signature(AutoencoderKLWan.__init__).parameters
    ours = wan_vae.to_json(wan_vae.PRESETS["wan2.1-vae"])
    for name in ours.keys() - {"_class_name", "clip_output"}:
        assert ours[name] == signature[name].default, name

    cfg = wan_vae.PRESETS["wan2.2-vae"]
    assert (cfg.base_dim, cfg.decoder_base_dim, cfg.z_dim, cfg.dim_mult) == (160, 256, 48, (1, 2, 4, 4))
    assert (cfg.patch_size, cfg.scale_factor_spatial, cfg.temperal_downsample) == (2, 16, (False, True, True))
    # The published 48 means and deviations by their sum and their sum weighted with the channel's number.
    for values, total, weighted in ((cfg.latents_mean, -0.5589, -7.0659), (cfg.latents_std, 32.536, 758.3531)):
        assert sum(values) == pytest.approx(total, abs=1e-9)
        assert sum(i * v for i, v in enumerate(values)) == pytest.approx(weighted, abs=1e-9)


# --- latents --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_normalisation_stands_between_moments_and_latents(kind):
    cfg = KINDS[kind]
    params, video = random_params(cfg, 5), random_video(cfg, 5)
    mean, logvar = wan_vae.encode_moments(params, cfg, video)
    latents = wan_vae.encode(params, cfg, video)
    for c in range(cfg.z_dim):
        wanted = (mean[:, c] - cfg.latents_mean[c]) / cfg.latents_std[c]
        torch.testing.assert_close(latents[:, c], wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(wan_vae.denormalise(cfg, latents), mean, atol=1e-6, rtol=1e-6)
    assert torch.equal(wan_vae.sample_latents(cfg, mean, logvar, torch.zeros_like(mean)), latents)
    noise = torch.ones_like(mean)
    drawn = wan_vae.denormalise(cfg, wan_vae.sample_latents(cfg, mean, logvar, noise))
    torch.testing.assert_close(drawn - mean, (0.5 * logvar).exp(), atol=1e-5, rtol=1e-5)


def test_the_clamp_can_be_left_out():
    cfg = KINDS["2.1"]
    params = random_params(cfg, 6)
    params["decoder.conv_out.bias"] = params["decoder.conv_out.bias"] + 1.0
    raw = wan_vae.decode(params, cfg, random_latents(cfg, 6), clamp=False)
    assert raw.max() > 1
    assert torch.equal(wan_vae.decode(params, cfg, random_latents(cfg, 6)), raw.clamp(-1, 1))


# --- chunks ---------------------------------------------------------------------------------------------------


@given(cfg=configs(), seed=SEEDS, total=st.integers(1, 6), cuts=st.lists(st.integers(1, 4), max_size=5))
def test_decoding_any_partition_equals_decoding_at_once(cfg, seed, total, cuts):
    """Equal but for the order of sums in convolutions of another length."""
    params, latents = random_params(cfg, seed), random_latents(cfg, seed, frames=total)
    whole = wan_vae.decode(params, cfg, latents)
    assert whole.shape[2] == cfg.scale_factor_temporal * (total - 1) + 1
    parts, cache = [], {}
    for part in latents.split(partition(total, cuts), dim=2):
        before = {k: v.clone() for k, v in cache.items()}
        video, after = wan_vae.decode_chunk(params, cfg, part, cache)
        assert cache.keys() == before.keys() and all(torch.equal(cache[k], before[k]) for k in cache)
        assert not before or {k: v.shape for k, v in after.items()} == {k: v.shape for k, v in before.items()}
        parts.append(video)
        cache = after
    close(torch.cat(parts, dim=2), whole, "chunks")
    for chunk in (1, 2):
        close(wan_vae.decode(params, cfg, latents, chunk=chunk), whole, f"chunk={chunk}")


@given(cfg=configs(), seed=SEEDS, total=st.integers(1, 5), cuts=st.lists(st.integers(1, 3), max_size=4))
def test_encoding_any_partition_equals_encoding_at_once(cfg, seed, total, cuts):
    params, factor = random_params(cfg, seed), cfg.scale_factor_temporal
    video = random_video(cfg, seed, frames=factor * (total - 1) + 1)
    whole = wan_vae.encode(params, cfg, video)
    assert whole.shape[2] == total
    sizes = [factor * n for n in partition(total, cuts)]
    sizes[0] -= factor - 1
    parts, cache = [], {}
    for i, part in enumerate(video.split(sizes, dim=2)):
        latents, cache = wan_vae.encode_chunk(params, cfg, part, cache, last=i == len(sizes) - 1)
        parts.append(latents)
    assert cache == {}
    close(torch.cat(parts, dim=2), whole, "chunks")
    close(wan_vae.encode(params, cfg, video, chunk=1), whole, "chunk=1")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_the_cache(kind):
    """A loss on the last chunk alone reaches the first chunk's latents as it does in the whole video."""
    cfg = KINDS[kind]
    params, latents = random_params(cfg, 7), random_latents(cfg, 7, frames=3).requires_grad_()
    (wanted,) = torch.autograd.grad(wan_vae.decode(params, cfg, latents)[:, :, -4:].square().sum(), latents)
    _, cache = wan_vae.decode_chunk(params, cfg, latents[:, :, :2], {})
    last, _ = wan_vae.decode_chunk(params, cfg, latents[:, :, 2:], cache, last=True)
    (got,) = torch.autograd.grad(last.square().sum(), latents)
    assert wanted[:, :, 0].abs().max() > 0
    close(got, wanted, "gradient")


@given(cfg=configs(), seed=SEEDS, total=st.integers(2, 4), data=st.data())
@settings(max_examples=10)
def test_earlier_frames_do_not_see_later_ones(cfg, seed, total, data):
    at = data.draw(st.integers(1, total - 1))
    params, latents = random_params(cfg, seed), random_latents(cfg, seed, frames=total)
    other = latents.clone()
    other[:, :, at:] += 1.0
    a, b = (wan_vae.decode(params, cfg, z, clamp=False) for z in (latents, other))
    border = cfg.scale_factor_temporal * (at - 1) + 1
    assert torch.equal(a[:, :, :border], b[:, :, :border])
    assert (a[:, :, border] - b[:, :, border]).abs().max() > 1e-4


def test_a_wrong_cache_is_named():
    cfg = KINDS["2.1"]
    params, latents = random_params(cfg, 8), random_latents(cfg, 8)
    _, cache = wan_vae.decode_chunk(params, cfg, latents, {})
    with pytest.raises(UserError, match=r"cache entry decoder.conv_in has shape \[1, 2, 2, 1, 2\].*\[1, 2, 2, 2, 2\]"):
        wan_vae.decode_chunk(params, cfg, random_latents(cfg, 8, size=(2, 2)), cache)
    with pytest.raises(UserError, match="cache has no entry encoder.conv_in"):
        wan_vae.encode_chunk(params, cfg, random_video(cfg, 8, frames=4), cache)
    with pytest.raises(UserError, match="continues a video has 5 frames, expected a multiple of 4"):
        wan_vae.encode_chunk(params, cfg, random_video(cfg, 8, frames=5), cache)
    with pytest.raises(UserError, match="chunk is 0, expected at least 1"):
        wan_vae.decode(params, cfg, latents, chunk=0)


# --- tiles ----------------------------------------------------------------------------------------------------

TILES = st.integers(1, 9).flatmap(lambda t: st.tuples(st.just(t), st.integers(0, t // 2)))


@given(size=st.integers(1, 40), tile=TILES, scale=st.sampled_from([1, 2, 8]))
@settings(max_examples=60)
def test_blend_weights_sum_to_one(size, tile, scale):
    total = torch.zeros(size * scale, dtype=torch.float64)
    tiles = windows(size, *tile)
    for w, weights in zip(tiles, blend_weights(size, *tile, scale=scale, dtype=torch.float64), strict=True):
        assert len(weights) == (w.stop - w.start) * scale and weights.min() > 0
        total[w.start * scale : w.stop * scale] += weights
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-12, rtol=0)
    assert tiles[0].start == 0 and tiles[-1].stop == size
    for a, b in zip(tiles, tiles[1:], strict=False):
        assert a.stop - b.start >= tile[1] and b.start > a.start


def test_two_tiles_blend_linearly():
    left, right = blend_weights(6, 4, 2, dtype=torch.float64)
    assert left.tolist() == [1, 1, 0.75, 0.25] and right.tolist() == [0.25, 0.75, 1, 1]


@given(cfg=configs(), seed=SEEDS, size=SIZES, extra=st.integers(0, 2))
@settings(max_examples=8)
def test_one_tile_over_everything_is_the_untiled_result(cfg, seed, size, extra):
    params = random_params(cfg, seed)
    tile = tuple(n + extra for n in size)
    latents = random_latents(cfg, seed, size=size)
    assert torch.equal(tiled_decode(params, cfg, latents, tile=tile, overlap=0), wan_vae.decode(params, cfg, latents))
    video = random_video(cfg, seed, frames=cfg.scale_factor_temporal + 1, size=size)
    assert torch.equal(tiled_encode(params, cfg, video, tile=tile, overlap=0), wan_vae.encode(params, cfg, video))


def test_far_from_cuts_tiles_equal_the_whole_picture():
    """Convolutions reach a bounded way. With the attention switched off (its projection zero), a pixel that
    only one tile holds and that is farther than this reach from the tile's cuts has the untiled value.

    Decoder, in latent pixels: one for the first convolution, four for the two residual blocks of the middle
    and four for those of the first stage, 1/2 for the upsampling, 4/2 for the last stage and 1/2 for the last
    convolution: 12. The encoder's reach is less.
    """
    cfg = vae_config(dim_mult=(1, 1), temperal_downsample=(False,), base_dim=2)
    params = random_params(cfg, 9)
    for part in ("encoder", "decoder"):
        for leaf in ("weight", "bias"):
            params[f"{part}.mid_block.attentions.0.proj.{leaf}"].zero_()
    reach, size, tile, overlap = 12, 46, 30, 8
    first, second = windows(size, tile, overlap)
    alone = [*range(second.start), *range(first.stop, size)]
    safe = [i for i in alone if not first.stop - reach <= i < second.start + reach]
    assert safe[:2] == [0, 1] and safe[-1] == size - 1
    latents = random_latents(cfg, 9, size=(size, 1))
    whole, tiles = (
        wan_vae.decode(params, cfg, latents),
        tiled_decode(params, cfg, latents, tile=(tile, 1), overlap=(overlap, 0)),
    )
    rows = [2 * i + a for i in safe for a in (0, 1)]
    close(tiles[..., rows, :], whole[..., rows, :], "decoded", 2e-6)
    assert (tiles - whole).abs().max() > 1e-4  # elsewhere the cuts do show
    video = random_video(cfg, 9, size=(size, 1), frames=1)
    whole, tiles = (
        wan_vae.encode(params, cfg, video),
        tiled_encode(params, cfg, video, tile=(tile, 1), overlap=(overlap, 0)),
    )
    close(tiles[..., safe, :], whole[..., safe, :], "encoded", 2e-6)


def test_tiles_stream_in_chunks_and_stay_in_range():
    cfg = KINDS["2.2"]
    params, latents = random_params(cfg, 10), random_latents(cfg, 10, batch=2, frames=3, size=(3, 4))
    tiles = {"tile": (2, 3), "overlap": 1}
    whole = tiled_decode(params, cfg, latents, **tiles)
    assert whole.shape == wan_vae.decode(params, cfg, latents).shape and whole.abs().max() <= 1
    close(tiled_decode(params, cfg, latents, chunk=1, **tiles), whole, "chunks")
    video = random_video(cfg, 10, frames=9, size=(3, 4))
    close(tiled_encode(params, cfg, video, chunk=1, **tiles), tiled_encode(params, cfg, video, **tiles), "chunks")


# --- transforms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_equals_batch(kind):
    cfg = KINDS[kind]
    params, latents = random_params(cfg, 11), random_latents(cfg, 11, batch=2, size=(2, 2))
    plain = VaeRun(attention=Attention("sdpa_math"))  # the CPU's flash attention has no batching rule
    each = torch.func.vmap(lambda z: wan_vae.decode(params, cfg, z[None], chunk=1, run=plain)[0])(latents)
    close(each, wan_vae.decode(params, cfg, latents), "decode")
    tiles = {"tile": (1, 2), "overlap": 0, "run": plain}
    each = torch.func.vmap(lambda z: tiled_decode(params, cfg, z[None], **tiles)[0])(latents)
    close(each, tiled_decode(params, cfg, latents, **tiles), "tiles")
    video = random_video(cfg, 11, batch=2)
    each = torch.func.vmap(lambda v: wan_vae.encode(params, cfg, v[None], run=plain)[0])(video)
    close(each, wan_vae.encode(params, cfg, video), "encode")


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_reverse_derivatives_agree(kind):
    """For random u, v: u . (J v) == (J^T u) . v, and J v is the central difference along v."""
    cfg = KINDS[kind]
    params = random_params(cfg, 12, torch.float64)
    x, v = random_video(cfg, 12, dtype=torch.float64), random_video(cfg, 13, dtype=torch.float64)
    run = VaeRun(attention=Attention("sdpa_math"))

    def code(x):
        return wan_vae.decode(params, cfg, wan_vae.encode(params, cfg, x, run=run), clamp=False, run=run)

    _, forward = torch.func.jvp(code, (x,), (v,))
    u = torch.linspace(-1, 1, forward.numel(), dtype=torch.float64).view_as(forward)
    reverse = torch.func.grad(lambda x: (code(x) * u).sum())(x)
    torch.testing.assert_close((forward * u).sum(), (reverse * v).sum(), rtol=1e-9, atol=1e-12)
    step = 1e-5
    close((code(x + step * v) - code(x - step * v)) / (2 * step), forward, "difference", 1e-6)


def test_a_chunk_is_one_graph():
    """`torch.compile(fullgraph=True)`: no break, and equal results with the cache as input and output."""
    cfg = KINDS["2.2"]
    params, latents = random_params(cfg, 14), random_latents(cfg, 14, frames=3)
    step = torch.compile(wan_vae.decode_chunk, fullgraph=True, backend="eager", dynamic=False)
    parts, cache = [], {}
    for part in latents.split(1, dim=2):
        video, cache = step(params, cfg, part, cache)
        parts.append(video)
    close(torch.cat(parts, dim=2), wan_vae.decode(params, cfg, latents), "compiled")


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_of_weights_changes_nothing(kind):
    cfg = KINDS[kind]
    params, latents = random_params(cfg, 15), random_latents(cfg, 15, frames=3, size=(2, 2))
    other = wan_vae.channels_last(params)
    assert all(torch.equal(other[k], params[k]) for k in params)
    assert other["decoder.conv_in.weight"].is_contiguous(memory_format=torch.channels_last_3d)
    close(wan_vae.decode(other, cfg, latents, chunk=1), wan_vae.decode(params, cfg, latents), "decode")


# --- input, configs, folders ----------------------------------------------------------------------------------


def test_bad_input_is_named():
    cfg = KINDS["2.2"]
    params = random_params(cfg, 0)
    with pytest.raises(UserError, match=r"shape \[3, 5, 8, 8\], expected \[B, 3, T, H, W\]"):
        wan_vae.encode(params, cfg, torch.zeros(3, 5, 8, 8))
    with pytest.raises(UserError, match=r"(?s)num_frames is 4.*1 or 5.*width is 12.*8 or 16"):
        wan_vae.encode(params, cfg, torch.zeros(1, 3, 4, 8, 12))
    with pytest.raises(UserError, match="torch.uint8, expected a floating dtype"):
        wan_vae.encode(params, cfg, torch.zeros(1, 3, 1, 8, 8, dtype=torch.uint8))
    with pytest.raises(UserError, match=r"shape \[1, 16, 1, 2, 2\], expected \[B, 2, t, h, w\]"):
        wan_vae.decode(params, cfg, torch.zeros(1, 16, 1, 2, 2))
    with pytest.raises(UserError, match="torch.int64, expected a floating dtype"):
        wan_vae.decode(params, cfg, torch.zeros(1, 2, 1, 2, 2, dtype=torch.int64))
    with pytest.raises(UserError, match="(?s)tile height is 0.*overlap in width is 3, expected 0 to 2"):
        tiled_decode(params, cfg, torch.zeros(1, 2, 1, 2, 2), tile=(0, 4), overlap=3)


def test_bad_configs_are_named():
    with pytest.raises(UserError, match="(?s)z_dim must be at least 1, got 0.*latents_mean has 16 entries, z_dim is 0"):
        WanVaeConfig(z_dim=0)
    with pytest.raises(UserError, match="temperal_downsample must have 3 entries.*got .True."):
        WanVaeConfig(temperal_downsample=(True,))
    with pytest.raises(UserError, match="scale_factor_spatial is 8, the stages make it 16"):
        WanVaeConfig(patch_size=2, in_channels=12, out_channels=12)
    with pytest.raises(UserError, match="in_channels is 3, not a multiple of patch_size.2 = 4"):
        WanVaeConfig(patch_size=2, out_channels=12, scale_factor_spatial=16)
    with pytest.raises(UserError, match="latents_std must be positive, the least is 0.0"):
        WanVaeConfig(z_dim=1, latents_mean=(0.0,), latents_std=(0.0,))
    with pytest.raises(UserError, match="dim_mult must be positive integers, got .1, 0."):
        WanVaeConfig(dim_mult=(1, 0))
    with pytest.raises(UserError, match="decoder stage 1: no channels are left"):
        vae_config(base_dim=1, dim_mult=(1, 1), temperal_downsample=(False,))
    with pytest.raises(UserError, match="encoder stage 1: 6 channels of 8 pixels do not divide into 30 groups"):
        vae_config(residual=True, dim_mult=(1, 5, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_folder_round_trip_with_diffusers(kind, tmp_path):
    """What we save Diffusers loads, and what it saves we load: equal weights and configs."""
    from diffusers import AutoencoderKLWan

    cfg = KINDS[kind]
    params = random_params(cfg, 16)
    wan_vae.save(tmp_path / "ours", params, cfg)
    model = AutoencoderKLWan.from_pretrained(tmp_path / "ours")
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in params.items()}
    assert all(torch.equal(v, params[k]) for k, v in model.state_dict().items())
    model.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        loaded, read = wan_vae.load(tmp_path / folder)
        assert read == dataclasses.replace(cfg, clip_output=read.clip_output)
        assert loaded.keys() == params.keys() and all(torch.equal(loaded[k], params[k]) for k in params)
    half, _ = wan_vae.load(tmp_path / "ours", dtype=torch.bfloat16)
    assert all(torch.equal(half[k], params[k].bfloat16()) for k in params)


def test_bad_folders_are_named(tmp_path):
    cfg = KINDS["2.1"]
    params = random_params(cfg, 17)
    folder = tmp_path / "vae"
    wan_vae.save(folder, params, cfg)
    config = json.loads((folder / "config.json").read_text())

    def rewrite(**changes):
        (folder / "config.json").write_text(json.dumps(config | changes))

    rewrite(latents_mean=[0, 1])  # whole numbers are numbers
    assert wan_vae.load(folder)[1].latents_mean == (0, 1)
    rewrite(attn_scales=[0.5], base_dims=4, temperal_downsample=[1, 1])
    faults = r"(?s)attn_scales is \[0.5\], only \[\] .*base_dims.*'base_dim'"
    with pytest.raises(UserError, match=r"(?s)temperal_downsample is \[1, 1\], expected a list of bool.*base_dims"):
        wan_vae.load(folder)
    with pytest.raises(UserError, match=faults):
        wan_vae.load(folder)
    rewrite(scale_factor_spatial=16)
    with pytest.raises(UserError, match=r"config.json: WanVaeConfig(?s:.*)the stages make it 4"):
        wan_vae.load(folder)
    rewrite(_class_name="AutoencoderKL")
    with pytest.raises(UserError, match="'AutoencoderKL', expected 'AutoencoderKLWan'"):
        wan_vae.load(folder)
    rewrite(base_dim=4)
    with pytest.raises(UserError, match=r"conv_in.weight has shape \[6, 3, 3, 3, 3\], expected \[4, 3, 3, 3, 3\]"):
        wan_vae.load(folder)
    rewrite()
    with pytest.raises(UserError, match="missing quant_conv.bias"):
        wan_vae.save(tmp_path / "broken", {k: v for k, v in params.items() if k != "quant_conv.bias"}, cfg)
    assert not (tmp_path / "broken").exists()


# --- strips ---------------------------------------------------------------------------------------------------


@given(cfg=configs(), seed=SEEDS, size=st.tuples(st.integers(1, 3), st.integers(4, 60)), data=st.data())
@settings(max_examples=20)
def test_strips_equal_decoding_at_once(cfg, seed, size, data):
    """Up to 60 latent pixels: the margins of several small strips then overlap within the picture, and of a few large
    ones they end inside it. Equal but for the rounding of convolutions over other sizes."""
    size = size if data.draw(st.booleans(), label="wide") else size[::-1]
    strips, chunk = data.draw(st.integers(1, max(size)), label="strips"), data.draw(st.sampled_from([1, 2, None]))
    params, latents = random_params(cfg, seed), random_latents(cfg, seed, frames=2, size=size)
    with torch.no_grad():
        got = decode_strips(params, cfg, latents, strips=min(strips, 7), chunk=chunk)
        close(got, wan_vae.decode(params, cfg, latents), "strips")


@given(cfg=configs())
def test_margins_hold_what_a_strip_needs_and_nothing_more(cfg):
    """NaN goes wherever a convolution looks: one beside the margin leaves the strip alone, one inside does not."""
    params, stages = random_params(cfg, 0), decoder_stages(cfg)
    start, size = margins(stages)[0] + 1, 2 * margins(stages)[0] + 3
    shape = (1, stages[0].widths[0], 1, 1, size)

    def spoilt(column: int):
        low = torch.zeros(shape)
        low[..., column] = torch.nan
        video = wan_vae.raised(params, cfg, low, blocks.Stream(None, None))
        return video[..., start * cfg.scale_factor_spatial : (start + 1) * cfg.scale_factor_spatial].isnan().any()

    with torch.no_grad():
        assert [bool(spoilt(c)) for c in (0, 1, size - 2, size - 1)] == [False, True, True, False]


def test_strips_that_cannot_be_are_named():
    cfg = KINDS["2.1"]
    params, latents = random_params(cfg, 1), random_latents(cfg, 1, size=(2, 3))
    for strips in (0, 4):
        with pytest.raises(UserError, match=f"strips is {strips}, expected 1 to 3"):
            decode_strips(params, cfg, latents, strips=strips)
