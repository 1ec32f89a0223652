"""LTX-2's video VAEs against Diffusers' AutoencoderKLLTX2Video; streams, tiles, memory, transforms, folders, errors."""

import dataclasses
import inspect
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_vae_cases import (
    Live,
    conditions,
    configs,
    diffusers_vae,
    random_latents,
    random_params,
    random_video,
    same_noise,
    vae_config,
)

from core import specs
from core.errors import UserError
from nn import ltx2_vae
from nn.ltx2_vae import LTX2VaeConfig, VaeRun
from nn.ltx2_vae_blocks import activate
from nn.ltx2_vae_config import decoder_blocks
from nn.ltx2_vae_tiling import frame_parts, tiled_decode, tiled_encode

# Float32 with sums of some hundred terms in another order: a few ulp (1.2e-7) per operation through some twenty
# convolutions in a row; a hundred times that in float64 is 2e-14.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
SEEDS = st.integers(0, 10**6)
SIZES = st.tuples(st.integers(2, 3), st.integers(2, 3))
DTYPES = st.sampled_from(list(TOLERANCE))
PUBLIC_UP = ("spatiotemporal", "spatiotemporal", "temporal", "spatial")
DOWN = ("spatial", "temporal", "spatiotemporal", "spatiotemporal")
# The two published shapes at tiny widths, and an older kind whose decoder is causal, timed, and changes its width.
KINDS = {
    "2.0": vae_config(
        DOWN, ("spatiotemporal",) * 3, block_out_channels=(8, 16, 16, 16), decoder_block_out_channels=(8, 16, 32),
        upsample_factor=(2, 2, 2), upsample_residual=(True,) * 3, patch_size=4,
    ),
    "2.3": vae_config(
        DOWN, PUBLIC_UP, block_out_channels=(8, 16, 16, 16), decoder_block_out_channels=(8, 16, 16, 32),
        upsample_factor=(2, 2, 1, 2), decoder_spatial_padding_mode="zeros", patch_size=4,
    ),
    "causal": vae_config(
        decoder_block_out_channels=(6, 8), decoder_causal=True, encoder_spatial_padding_mode="reflect"
    ),
    "timed": vae_config(timestep_conditioning=True),
}  # fmt: skip


def close(ours, theirs, what, tolerance=None, scale=None):
    assert ours.shape == theirs.shape, f"{what}: {list(ours.shape)}, expected {list(theirs.shape)}"
    assert ours.dtype == theirs.dtype, what
    scale = max(theirs.abs().max().item(), 1e-3) if scale is None else scale
    error = (ours - theirs).abs().max().item() / scale
    assert error < (TOLERANCE[ours.dtype] if tolerance is None else tolerance), f"{what}: relative error {error:.2e}"


def partition(total: int, cuts: list[int]) -> list[int]:
    """Sizes of at least 1 that sum to `total`, cut as `cuts` say."""
    sizes = []
    for cut in cuts:
        if sum(sizes) + cut < total:
            sizes.append(cut)
    return [*sizes, total - sum(sizes)]


# --- parity ---------------------------------------------------------------------------------------------------


@given(cfg=configs(), seed=SEEDS, groups=st.integers(0, 2), batch=st.integers(1, 2), size=SIZES, dtype=DTYPES)
@settings(max_examples=25)
def test_encoding_and_decoding_equal_diffusers(cfg, seed, groups, batch, size, dtype):
    """A timestep's sine and cosine are float32 in Diffusers whatever its dtype, so float64 then agrees to that."""
    params = random_params(cfg, seed, dtype)
    model = diffusers_vae(cfg, params, dtype=dtype)
    video = random_video(cfg, seed, batch=batch, groups=groups, size=size, dtype=dtype)
    given = conditions(cfg, batch, dtype=dtype)
    with torch.no_grad():
        posterior = model.encode(video).latent_dist
        mean, logvar = ltx2_vae.encode_moments(params, cfg, video)
        close(mean, posterior.mean, "mean")
        close(logvar, posterior.logvar, "log variance")
        latents = random_latents(cfg, seed, batch=batch, frames=groups + 1, size=size, dtype=dtype)
        theirs = model.decode(ltx2_vae.denormalise(params, cfg, latents), given["timestep"]).sample
        ours = ltx2_vae.decode(params, cfg, latents, clamp=False, **given)
        close(ours, theirs, "decode", 2e-5 if cfg.timestep_conditioning else None)
        assert 0.01 < theirs.abs().mean() < 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_causality_can_be_chosen_per_call(kind, causal):
    """Diffusers' `causal=False` leaves a causal model causal, so its config is changed instead."""
    cfg = KINDS[kind]
    params, video, latents = random_params(cfg, 1), random_video(cfg, 1), random_latents(cfg, 1, frames=3)
    model = diffusers_vae(cfg, params, encoder_causal=causal, decoder_causal=causal)
    given = conditions(cfg)
    with torch.no_grad():
        theirs = model.decode(ltx2_vae.denormalise(params, cfg, latents), given["timestep"]).sample
        close(ltx2_vae.decode(params, cfg, latents, causal=causal, clamp=False, **given), theirs, "decode")
        mean, _ = ltx2_vae.encode_moments(params, cfg, video, causal=causal)
        close(mean, model.encode(video).latent_dist.mean, "encode")
        other = ltx2_vae.decode(params, cfg, latents, causal=not causal, clamp=False, **given)
        assert (other - theirs).abs().max() > 1e-3


@given(cfg=configs(noise=True), seed=SEEDS, causal=st.booleans())
@settings(max_examples=10)
def test_injected_noise_equals_diffusers_with_the_same_draw(cfg, seed, causal):
    params, latents, given = random_params(cfg, seed), random_latents(cfg, seed, frames=2), conditions(cfg, seed=seed)
    model = diffusers_vae(cfg, params, decoder_causal=causal)
    with torch.no_grad(), same_noise(given["noise"], cfg):
        theirs = model.decode(ltx2_vae.denormalise(params, cfg, latents), given["timestep"]).sample
        ours = ltx2_vae.decode(params, cfg, latents, causal=causal, clamp=False, **given)
    close(ours, theirs, "decode")
    close(ltx2_vae.decode(params, cfg, latents, causal=causal, clamp=False, chunk=1, **given), theirs, "chunks")


def gradients(outputs, leaves):
    """Gradients of one fixed weighted sum of `outputs`."""
    loss = sum((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() for y in outputs)
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def compare_gradients(ours, theirs, names):
    largest = max(g.abs().max().item() for g in theirs if g is not None)
    for name, a, b in zip(names, ours, theirs, strict=True):
        assert (a is None) == (b is None), name
        if b is not None:
            # Sums over all pixels: the error is that of the largest terms, not of the leaf's own gradient.
            close(a, b, f"gradient of {name}", scale=largest)


@given(cfg=configs(timed=False), seed=SEEDS, dtype=DTYPES)
@settings(max_examples=10)
def test_gradients_equal_diffusers(cfg, seed, dtype):
    """With respect to the input and every parameter that takes part: a step through both halves."""
    _gradients_agree(cfg, seed, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_each_kind(kind):
    _gradients_agree(KINDS[kind], 3, torch.float32)


def _gradients_agree(cfg, seed, dtype):
    params = random_params(cfg, seed, dtype)
    model = diffusers_vae(cfg, params, dtype=dtype)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items() if not k.startswith("latents_")}
    theirs, names = dict(model.named_parameters()), [*leaves, "input"]
    assert theirs.keys() == leaves.keys()

    video = random_video(cfg, seed, dtype=dtype).requires_grad_()
    posterior = model.encode(video).latent_dist
    wanted = gradients((posterior.mean, posterior.logvar), [*[theirs[k] for k in leaves], video])
    got = gradients(ltx2_vae.encode_moments(leaves, cfg, video), [*leaves.values(), video])
    compare_gradients(got, wanted, names)

    latents, given = random_latents(cfg, seed, dtype=dtype).requires_grad_(), conditions(cfg, dtype=dtype)
    video = model.decode(ltx2_vae.denormalise(params, cfg, latents), given["timestep"]).sample
    wanted = gradients((video,), [*[theirs[k] for k in leaves], latents])
    video = ltx2_vae.decode(params | leaves, cfg, latents, clamp=False, **given)
    compare_gradients(gradients((video,), [*leaves.values(), latents]), wanted, names)


@pytest.mark.parametrize("kind", ["2.0", "2.3"])
def test_bfloat16_is_as_near_to_the_truth_as_diffusers(kind):
    """Two bf16 runs differ from each other by what each loses; both are measured against float64, as the root of the
    mean square over at least 192 values, which varies by some percent: 1.15 times is allowed."""
    cfg = KINDS[kind]
    exact, half = random_params(cfg, 4, torch.float64), random_params(cfg, 4, torch.bfloat16)
    exact = {k: v.bfloat16().double() for k, v in exact.items()}
    model = diffusers_vae(cfg, half, dtype=torch.bfloat16)
    video = random_video(cfg, 4, groups=2, size=(4, 4), dtype=torch.bfloat16)
    latents = random_latents(cfg, 4, frames=3, dtype=torch.bfloat16)
    with torch.no_grad():
        ours = ltx2_vae.encode_moments(half, cfg, video)[0], ltx2_vae.decode(half, cfg, latents, clamp=False)
        raw = ltx2_vae.denormalise(half, cfg, latents)
        theirs = model.encode(video).latent_dist.mean, model.decode(raw).sample
        truth = (
            ltx2_vae.encode_moments(exact, cfg, video.double())[0],
            ltx2_vae.decode(exact, cfg, latents.double(), clamp=False),
        )
    for a, b, true in zip(ours, theirs, truth, strict=True):
        assert a.dtype == torch.bfloat16
        lost, allowed = ((x.double() - true).square().mean().sqrt() for x in (a, b))
        assert lost < 1.15 * allowed, f"{lost:.2e}, Diffusers {allowed:.2e}"


def test_a_blank_pixel_is_finite_in_half_precision():
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.zeros(1, 4, 1, 1, 2, dtype=dtype)
        x[..., 1] = 3.0
        out = activate(x)
        assert out.dtype == dtype and torch.equal(out[..., 0], x[..., 0])
        torch.testing.assert_close(out[..., 1].float(), torch.full((1, 4, 1, 1), 0.7311), atol=1e-2, rtol=0)


# --- full configs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,count", [("ltx-2-vae", 1_222_479_857), ("ltx-2.3-vae", 726_106_225), ("ltx-2.5-vae", 726_106_225)]
)
def test_full_configs_key_by_key(name, count):
    """Every key and shape of the public models, without allocating them; 8 frames of 32x32 pixels to one."""
    cfg = ltx2_vae.PRESETS[name]
    theirs = diffusers_vae(cfg, device="meta").state_dict()
    specs.check(theirs, ltx2_vae.param_specs(cfg))
    assert sum(v.numel() for v in specs.abstract(ltx2_vae.param_specs(cfg)).values()) == count
    assert (cfg.factor_t, cfg.factor_s, cfg.latent_channels) == (8, 32, 128)
    assert cfg.encoder_causal and not cfg.decoder_causal and not cfg.timestep_conditioning


def test_defaults_are_those_of_diffusers():
    from diffusers import AutoencoderKLLTX2Video

    signature = inspect.signature(AutoencoderKLLTX2Video.__init__).parameters
    for field in dataclasses.fields(LTX2VaeConfig):
        assert field.default == signature[field.name].default, field.name
    assert {f.name for f in dataclasses.fields(LTX2VaeConfig)} == set(signature) - {"self"}


# --- latents --------------------------------------------------------------------------------------------------


def test_normalisation_stands_between_moments_and_latents():
    cfg = dataclasses.replace(KINDS["2.3"], scaling_factor=0.5)
    params, video = random_params(cfg, 5), random_video(cfg, 5)
    mean, logvar = ltx2_vae.encode_moments(params, cfg, video)
    latents = ltx2_vae.encode(params, cfg, video)
    for c in range(cfg.latent_channels):
        wanted = (mean[:, c] - params["latents_mean"][c]) * 0.5 / params["latents_std"][c]
        torch.testing.assert_close(latents[:, c], wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ltx2_vae.denormalise(params, cfg, latents), mean, atol=1e-6, rtol=1e-6)
    assert torch.equal(ltx2_vae.sample_latents(params, cfg, mean, logvar, torch.zeros_like(mean)), latents)
    drawn = ltx2_vae.sample_latents(params, cfg, mean, logvar, torch.ones_like(mean))
    drawn = ltx2_vae.denormalise(params, cfg, drawn)
    torch.testing.assert_close(drawn - mean, (0.5 * logvar).exp(), atol=1e-5, rtol=1e-5)


def test_the_clamp_can_be_left_out():
    cfg = KINDS["2.0"]
    params = random_params(cfg, 6)
    params["decoder.conv_out.conv.bias"] = params["decoder.conv_out.conv.bias"] + 1.0
    raw = ltx2_vae.decode(params, cfg, random_latents(cfg, 6), clamp=False)
    assert raw.max() > 1
    assert torch.equal(ltx2_vae.decode(params, cfg, random_latents(cfg, 6)), raw.clamp(-1, 1))


# --- streams --------------------------------------------------------------------------------------------------


@given(cfg=configs(), seed=SEEDS, total=st.integers(1, 12), cuts=st.lists(st.integers(1, 4), max_size=8))
@settings(max_examples=25)
def test_decoding_any_partition_equals_decoding_at_once(cfg, seed, total, cuts):
    """Causal or not, equal but for the order of sums in convolutions of another length. Frames come out as
    `frames_ready` says, and a cache does not grow."""
    params, latents = random_params(cfg, seed), random_latents(cfg, seed, frames=total)
    given = conditions(cfg)
    with torch.no_grad():
        whole = ltx2_vae.decode(params, cfg, latents, clamp=False, **given)
        assert whole.shape[2] == cfg.factor_t * (total - 1) + 1
        parts, cache, taken = [], {}, 0
        sizes = partition(total, cuts)
        for i, part in enumerate(latents.split(sizes, dim=2)):
            before, last = {k: v.clone() for k, v in cache.items()}, i + 1 == len(sizes)
            video, after = ltx2_vae.decode_chunk(params, cfg, part, cache, last=last, clamp=False, **given)
            assert cache.keys() == before.keys() and all(torch.equal(cache[k], before[k]) for k in cache)
            ready = [ltx2_vae.frames_ready(cfg, n) for n in (taken, taken + part.shape[2])]
            taken += part.shape[2]
            assert video.shape[2] == (whole.shape[2] if last else ready[1]) - (ready[0] if i else 0)
            assert max((v.shape[2] for v in after.values()), default=0) <= 2
            parts.append(video)
            cache = after
        assert cache == {}
        close(torch.cat(parts, dim=2), whole, "chunks")
        for chunk in (1, 2):
            close(ltx2_vae.decode(params, cfg, latents, chunk=chunk, clamp=False, **given), whole, f"chunk={chunk}")


@given(cfg=configs(timed=False), seed=SEEDS, total=st.integers(1, 5), cuts=st.lists(st.integers(1, 3), max_size=4))
@settings(max_examples=15)
def test_encoding_any_partition_equals_encoding_at_once(cfg, seed, total, cuts):
    params, factor = random_params(cfg, seed), cfg.factor_t
    video = random_video(cfg, seed, groups=total - 1)
    with torch.no_grad():
        whole = ltx2_vae.encode(params, cfg, video, causal=True)
        assert whole.shape[2] == total
        sizes = [factor * n for n in partition(total, cuts)]
        sizes[0] -= factor - 1
        parts, cache = [], {}
        for i, part in enumerate(video.split(sizes, dim=2)):
            latents, cache = ltx2_vae.encode_chunk(params, cfg, part, cache, last=i + 1 == len(sizes), causal=True)
            parts.append(latents)
        assert cache == {}
        close(torch.cat(parts, dim=2), whole, "chunks")
        close(ltx2_vae.encode(params, cfg, video, chunk=1, causal=True), whole, "chunk=1")


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_depends_on_the_frames_that_it_should(kind):
    """NaN in latent frame i reaches frames from its own on, and before them only if the decoder is not causal;
    `frames_ready` is how far back exactly."""
    cfg = KINDS[kind]
    params, given = random_params(cfg, 7), conditions(cfg)
    total, at = 30, 26
    latents = random_latents(cfg, 7, frames=total)
    latents[:, :, at] = torch.nan
    with torch.no_grad():
        for causal in (True, False):
            video = ltx2_vae.decode(params, cfg, latents, causal=causal, **given)
            spoilt = video.isnan().flatten(3).any(3).any(1)[0].nonzero().flatten()
            assert spoilt[0] == ltx2_vae.frames_ready(cfg, at, causal=causal)
            assert causal or spoilt[0] < cfg.factor_t * (at - 1) + 1


def test_gradients_flow_through_chunks():
    cfg = KINDS["2.3"]
    params, latents = random_params(cfg, 8), random_latents(cfg, 8, frames=4).requires_grad_()
    whole = gradients((ltx2_vae.decode(params, cfg, latents),), [latents])[0]
    close(gradients((ltx2_vae.decode(params, cfg, latents, chunk=1),), [latents])[0], whole, "gradient")


# --- memory ---------------------------------------------------------------------------------------------------


def _params(cfg, device):
    return specs.abstract(ltx2_vae.param_specs(cfg)) if device == "meta" else random_params(cfg, 9)


def _peak(cfg, frames, size=(2, 2), device="cpu", decode=ltx2_vae.decode, **options):
    """The most elements at any time, without parameters and latents, but with the video that comes out."""
    params, latents = _params(cfg, device), torch.zeros((1, cfg.latent_channels, frames, *size), device=device)
    with torch.no_grad(), Live() as live:
        decode(params, cfg, latents, clamp=False, **options)
    return live.peak


def _stream(params, cfg, latents, **options):
    """Latent frames one by one; frames are dropped as soon as they are there."""
    cache = {}
    for i in range(latents.shape[2]):
        last = i + 1 == latents.shape[2]
        cache = ltx2_vae.decode_chunk(params, cfg, latents[:, :, i : i + 1], cache, last=last, **options)[1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["2.0", "2.3"])
def test_memory_of_a_stream_does_not_grow_with_the_video(kind, causal):
    """In chunks it stays as it is once all layers have begun, also when a decoder that is not causal brings all that
    its layers held back at the end. At once it grows in proportion to the frames."""
    cfg = KINDS[kind]
    stream = [_peak(cfg, n, causal=causal, decode=_stream) for n in (12, 24)]
    assert stream[1] < 1.01 * stream[0]  # one hundredth: the latents, of which every chunk is a view
    whole = [_peak(cfg, n, causal=causal) for n in (12, 24)]
    assert whole[1] > 1.9 * whole[0] and whole[1] > 3 * stream[1]


@pytest.mark.parametrize("name", ["ltx-2-vae", "ltx-2.3-vae"])
def test_memory_of_the_public_decoders(name):
    """121 frames of 512x768 on meta tensors, 285 million elements of which are frames, in parts and joined."""
    cfg = ltx2_vae.PRESETS[name]
    whole, chunks = (_peak(cfg, 16, (16, 24), "meta", chunk=chunk) for chunk in (None, 2))
    assert chunks < 0.27 * whole


def test_memory_of_tiles_is_that_of_one():
    """Beside the video: that of one tile, whose frames are there three times, one of them times their weights."""
    cfg = KINDS["2.3"]
    tile, video = _peak(cfg, 4) + 3 * 3 * 25 * 64**2, 3 * 57 * 128**2
    tiles = _peak(cfg, 8, (4, 4), decode=tiled_decode, tile=(4, 2, 2), overlap=(1, 1, 1))
    assert tiles < tile + video and 5 * (tiles - video) < 2 * (_peak(cfg, 8, (4, 4)) - video)


# --- tiles ----------------------------------------------------------------------------------------------------

TILES = st.integers(2, 9).flatmap(lambda t: st.tuples(st.just(t), st.integers(1, t // 2)))


@given(size=st.integers(1, 40), tile=TILES, factor=st.sampled_from([1, 2, 8]))
@settings(max_examples=60)
def test_weights_over_time_sum_to_one(size, tile, factor):
    frames = factor * (size - 1) + 1
    total = torch.zeros(frames, dtype=torch.float64)
    parts = frame_parts(size, *tile, factor, torch.zeros(1, dtype=torch.float64))
    for part in parts:
        held = part.source.stop - part.source.start
        assert len(part.weights) == factor * (held - 1) + 1 and part.weights.min() > 0
        total[part.target] += part.weights
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-12, rtol=0)
    assert parts[0].target.start == 0 and parts[-1].target.stop == frames and parts[-1].source.stop == size


@given(cfg=configs(timed=False), seed=SEEDS, size=SIZES, extra=st.integers(0, 2))
@settings(max_examples=8)
def test_one_tile_over_everything_is_the_untiled_result(cfg, seed, size, extra):
    params, tile = random_params(cfg, seed), [n + extra for n in (2, *size)]
    latents, video = random_latents(cfg, seed, size=size), random_video(cfg, seed, size=size)
    with torch.no_grad():
        tiles = tiled_decode(params, cfg, latents, tile=tile, overlap=(0, 0, 0))
        assert torch.equal(tiles, ltx2_vae.decode(params, cfg, latents))
        tiles = tiled_encode(params, cfg, video, tile=tile[1:], overlap=(0, 0))
        assert torch.equal(tiles, ltx2_vae.encode(params, cfg, video))


def test_far_from_cuts_tiles_equal_the_whole_video():
    """A pixel that one tile holds alone, farther from its cuts than convolutions reach, has the untiled value.

    Decoder of one change by 2 and one residual block everywhere, in latent frames or pixels: 1 for the first
    convolution, 2 for the middle, 1 for the change, then 2/2 and 1/2 for the rest: less than 6.
    """
    cfg = vae_config(("spatiotemporal",), ("spatiotemporal",), block_out_channels=(8,), patch_size=1)
    params, size, tile, overlap = random_params(cfg, 11), 24, 16, 4
    for axis in range(3):
        sizes, tiles, overlaps = [2, 2, 2], [2, 2, 2], [0, 0, 0]
        sizes[axis], tiles[axis], overlaps[axis] = size, tile, overlap
        latents = random_latents(cfg, 11, frames=sizes[0], size=sizes[1:])
        with torch.no_grad():
            whole = ltx2_vae.decode(params, cfg, latents, clamp=False)
            cut = tiled_decode(params, cfg, latents, tile=tiles, overlap=overlaps, clamp=False)
        error = (cut - whole).abs().movedim(2 + axis, 0).flatten(1).amax(1)
        # Tiles hold 0 to 16 and 8 to 24; alone 0 to 8 and 16 to 24, six from the cuts 0 to 8 and 16 to 24.
        assert max(error[:16].max(), error[33:].max()) < 1e-5 and error[16:33].max() > 1e-3


def test_tiles_stream_in_chunks_and_stay_in_range():
    cfg = KINDS["2.3"]
    params, latents = random_params(cfg, 12), random_latents(cfg, 12, batch=2, frames=5, size=(3, 4))
    tiles = {"tile": (3, 2, 3), "overlap": (1, 1, 1)}
    with torch.no_grad():
        whole = tiled_decode(params, cfg, latents, **tiles)
        assert whole.shape == ltx2_vae.decode(params, cfg, latents).shape and whole.abs().max() <= 1
        close(tiled_decode(params, cfg, latents, chunk=1, **tiles), whole, "chunks")
        video, tiles = random_video(cfg, 12, groups=2, size=(3, 4)), {"tile": (2, 3), "overlap": (1, 1)}
        close(tiled_encode(params, cfg, video, chunk=1, **tiles), tiled_encode(params, cfg, video, **tiles), "chunks")


# --- transforms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["2.0", "2.3"])
def test_vmap_equals_batch(kind):
    cfg = KINDS[kind]
    params, latents = random_params(cfg, 13), random_latents(cfg, 13, batch=2, frames=3)
    each = torch.func.vmap(lambda z: ltx2_vae.decode(params, cfg, z[None], chunk=1)[0])(latents)
    close(each, ltx2_vae.decode(params, cfg, latents), "decode")
    video = random_video(cfg, 13, batch=2)
    each = torch.func.vmap(lambda v: ltx2_vae.encode(params, cfg, v[None], chunk=1)[0])(video)
    close(each, ltx2_vae.encode(params, cfg, video), "encode")


def test_forward_and_reverse_derivatives_agree():
    """For random u, v: u . (J v) == (J^T u) . v, and J v is the central difference along v."""
    cfg = KINDS["2.3"]
    params = random_params(cfg, 14, torch.float64)
    x, v = (random_video(cfg, seed, dtype=torch.float64) for seed in (14, 15))
    code = lambda x: ltx2_vae.decode(params, cfg, ltx2_vae.encode(params, cfg, x), clamp=False)  # noqa: E731
    _, forward = torch.func.jvp(code, (x,), (v,))
    u = torch.linspace(-1, 1, forward.numel(), dtype=torch.float64).view_as(forward)
    reverse = torch.func.grad(lambda x: (code(x) * u).sum())(x)
    torch.testing.assert_close((forward * u).sum(), (reverse * v).sum(), rtol=1e-9, atol=1e-12)
    step = 1e-5
    close((code(x + step * v) - code(x - step * v)) / (2 * step), forward, "difference", 1e-6)


def test_a_chunk_is_one_graph():
    """`torch.compile(fullgraph=True)`: no break, and equal results with the cache as input and output."""
    cfg = vae_config(("spatiotemporal",), ("spatiotemporal",), block_out_channels=(8,), decoder_causal=True)
    params, latents = random_params(cfg, 16), random_latents(cfg, 16, frames=3)
    step = torch.compile(ltx2_vae.decode_chunk, fullgraph=True, backend="eager", dynamic=False)
    parts, cache = [], {}
    for part in latents.split(1, dim=2):
        video, cache = step(params, cfg, part, cache)
        parts.append(video)
    close(torch.cat(parts, dim=2), ltx2_vae.decode(params, cfg, latents), "compiled")


def test_the_activation_can_be_replaced():
    cfg, calls = KINDS["timed"], []
    params, latents, given = random_params(cfg, 17), random_latents(cfg, 17), conditions(cfg)
    run = VaeRun(activate=lambda x, *pair: calls.append(x.shape) or activate(x, *pair))
    got = ltx2_vae.decode(params, cfg, latents, run=run, **given)
    assert torch.equal(got, ltx2_vae.decode(params, cfg, latents, **given))
    assert len(calls) == 1 + 2 * sum(block.layers for block in decoder_blocks(cfg))


# --- input, configs, folders ----------------------------------------------------------------------------------


def test_bad_input_is_named():
    cfg, zeros = KINDS["2.0"], torch.zeros
    params = random_params(cfg, 0)
    with pytest.raises(UserError, match=r"shape \[3, 5, 8, 8\], expected \[B, 3, T, H, W\]"):
        ltx2_vae.encode(params, cfg, zeros(3, 5, 8, 8))
    with pytest.raises(UserError, match=r"(?s)num_frames is 8.*1 or 9.*width is 40.*32 or 64"):
        ltx2_vae.encode(params, cfg, zeros(1, 3, 8, 32, 40))
    with pytest.raises(UserError, match="torch.uint8, expected a floating dtype"):
        ltx2_vae.encode(params, cfg, zeros(1, 3, 1, 32, 32, dtype=torch.uint8))
    with pytest.raises(UserError, match="video of 4x8: reflected borders need at least 8 each way"):
        ltx2_vae.encode(random_params(KINDS["causal"], 0), KINDS["causal"], zeros(1, 3, 1, 4, 8))
    with pytest.raises(UserError, match=r"shape \[1, 16, 1, 2, 2\], expected \[B, 4, t, h, w\]"):
        ltx2_vae.decode(params, cfg, zeros(1, 16, 1, 2, 2))
    with pytest.raises(UserError, match=r"shape \[4, 2, 2\], expected \[B, 4, t, h, w\]"):
        ltx2_vae.decode(params, cfg, zeros(4, 2, 2), chunk=1)
    with pytest.raises(UserError, match="torch.int64, expected a floating dtype"):
        ltx2_vae.decode(params, cfg, zeros(1, 4, 1, 2, 2, dtype=torch.int64))
    with pytest.raises(UserError, match="latents of 1x2: reflected borders need at least 2 each way"):
        ltx2_vae.decode(params, cfg, zeros(1, 4, 1, 1, 2))
    with pytest.raises(UserError, match="(?s)tile height is 0.*overlap in width is 3, expected 0 to 2"):
        tiled_decode(params, cfg, zeros(1, 4, 1, 2, 2), tile=(1, 0, 4), overlap=(0, 0, 3))
    with pytest.raises(UserError, match="overlap in time is 0, expected 1 to 2, half of a tile of 4"):
        tiled_decode(params, cfg, zeros(1, 4, 6, 2, 2), tile=(4, 2, 2), overlap=(0, 0, 0))


def test_conditions_and_caches_that_do_not_fit_are_named():
    cfg, timed, noisy = KINDS["2.0"], KINDS["timed"], vae_config(decoder_inject_noise=(True,) * 3)
    params, z = random_params(cfg, 0), torch.zeros(2, 4, 1, 2, 2)
    with pytest.raises(UserError, match="timestep is None, but timestep_conditioning is True"):
        ltx2_vae.decode(random_params(timed, 0), timed, z)
    with pytest.raises(UserError, match="timestep is tensor.*but timestep_conditioning is False"):
        ltx2_vae.decode(params, cfg, z, timestep=torch.zeros(2))
    with pytest.raises(UserError, match=r"timestep has shape \[3\], expected \[\] or \[2\]"):
        ltx2_vae.decode(random_params(timed, 0), timed, z, timestep=torch.zeros(3))
    with pytest.raises(UserError, match=r"noise is None, but decoder_inject_noise is \[True, True, True\]"):
        ltx2_vae.decode(random_params(noisy, 0), noisy, z)
    cache = ltx2_vae.decode_chunk(params, cfg, z, {})[1]
    with pytest.raises(UserError, match="cache has no entry decoder.conv_in:causal"):
        ltx2_vae.decode_chunk(params, cfg, z, cache, causal=True)
    with pytest.raises(UserError, match=r"decoder.conv_in:ahead has shape .*this chunk needs \[2, 4, 't', 2, 3\]"):
        ltx2_vae.decode_chunk(params, cfg, torch.zeros(2, 4, 1, 2, 3), cache)
    with pytest.raises(UserError, match="cache has no entry encoder.conv_in:causal"):
        ltx2_vae.encode_chunk(params, cfg, torch.zeros(2, 3, 8, 64, 64), cache)
    with pytest.raises(UserError, match="continues a video has 9 frames, expected a multiple of 8"):
        ltx2_vae.encode_chunk(params, cfg, torch.zeros(2, 3, 9, 64, 64), cache)
    with pytest.raises(UserError, match="not causal takes a video at once"):
        ltx2_vae.encode(params, cfg, torch.zeros(1, 3, 9, 64, 64), chunk=1, causal=False)


def test_bad_configs_are_named():
    with pytest.raises(UserError, match="(?s)layers_per_block must have 5 entries, got .1.*upsample_type must have 3"):
        LTX2VaeConfig(layers_per_block=(1,), upsample_type=("spatial",))
    with pytest.raises(UserError, match="(?s)latent_channels must be positive, got 0.*patch_size_t is 2, only 1"):
        LTX2VaeConfig(latent_channels=0, patch_size_t=2)
    with pytest.raises(UserError, match="downsample_type has 'time', must be one of spatial, temporal, spatiotemporal"):
        LTX2VaeConfig(downsample_type=("time",) * 4)
    with pytest.raises(UserError, match="the encoder makes 8 frames one, the decoder one 4"):
        LTX2VaeConfig(upsample_type=("spatiotemporal", "spatiotemporal", "spatial"))
    with pytest.raises(UserError, match="spatial_compression_ratio is 64, the blocks make it 32"):
        LTX2VaeConfig(spatial_compression_ratio=64)
    with pytest.raises(UserError, match="encoder block 0: 4 channels of 4 pixels do not become 6 channels"):
        vae_config(block_out_channels=(6, 6))
    with pytest.raises(UserError, match="encoder block 0 keeps its 4 channels, block_out_channels says 8"):
        vae_config(("conv",), ("spatiotemporal",), block_out_channels=(8,))
    with pytest.raises(UserError, match="decoder block 1 from the latents: upsample_factor 2 needs .* of 8 channels"):
        vae_config(decoder_block_out_channels=(6, 8), upsample_factor=(2, 1))
    with pytest.raises(UserError, match="block 1 from the latents: the shortcut lays 6 channels out as 4 pixels"):
        vae_config(decoder_block_out_channels=(6, 8), upsample_residual=(True, False))
    with pytest.raises(UserError, match="no timestep or noise where it goes from 8 to 6 channels"):
        vae_config(decoder_block_out_channels=(6, 8), timestep_conditioning=True)


@pytest.mark.parametrize("kind", KINDS)
def test_folder_round_trip_with_diffusers(kind, tmp_path):
    """What we save Diffusers loads, and what it saves we load: equal weights and configs."""
    from diffusers import AutoencoderKLLTX2Video

    cfg = KINDS[kind]
    params = random_params(cfg, 18)
    ltx2_vae.save(tmp_path / "ours", params, cfg)
    model = AutoencoderKLLTX2Video.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(v, params[k]) for k, v in model.state_dict().items())
    assert model.state_dict().keys() == params.keys()
    model.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        loaded, read = ltx2_vae.load(tmp_path / folder)
        assert read == cfg
        assert loaded.keys() == params.keys() and all(torch.equal(loaded[k], params[k]) for k in params)
    half, _ = ltx2_vae.load(tmp_path / "ours", dtype=torch.bfloat16)
    wide = {k for k, v in half.items() if v.dtype == torch.float32}
    assert wide == {k for k in half if k.startswith("latents_") or k.endswith("multiplier")}
    assert all(torch.equal(half[k], params[k].to(half[k].dtype)) for k in params)


def test_bad_folders_are_named(tmp_path):
    cfg, folder = KINDS["2.3"], tmp_path / "vae"
    params = random_params(cfg, 19)
    ltx2_vae.save(folder, params, cfg)
    config = json.loads((folder / "config.json").read_text())

    def rewrite(**changes):
        (folder / "config.json").write_text(json.dumps(config | changes))

    rewrite(patch_sise=4, upsample_factor=[2.0])
    faults = r"(?s)upsample_factor is \[2.0\], expected a list of int.*patch_sise.*'patch_size'"
    with pytest.raises(UserError, match=faults):
        ltx2_vae.load(folder)
    rewrite(spatial_compression_ratio=16)
    with pytest.raises(UserError, match=r"config.json: LTX2VaeConfig(?s:.*)the blocks make it 32"):
        ltx2_vae.load(folder)
    rewrite(_class_name="AutoencoderKLLTXVideo")
    with pytest.raises(UserError, match="'AutoencoderKLLTXVideo', expected 'AutoencoderKLLTX2Video'"):
        ltx2_vae.load(folder)
    rewrite(in_channels=4)
    with pytest.raises(UserError, match=r"encoder.conv_in.conv.weight has shape \[4, 48, 3, 3, 3\], expected \[4, 64,"):
        ltx2_vae.load(folder)
    with pytest.raises(UserError, match="missing latents_std"):
        ltx2_vae.save(tmp_path / "broken", {k: v for k, v in params.items() if k != "latents_std"}, cfg)
    assert not (tmp_path / "broken").exists()
