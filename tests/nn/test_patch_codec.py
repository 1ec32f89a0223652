"""The patch codec: best linear code, Wan's first-frame rule, aligned latents, pointwise in time, files."""

import json

import pytest
import torch

from core import keys, specs
from core.errors import UserError
from core.geometry import to_frames, to_video
from nn import patch_codec
from nn.patch_codec import PatchCodecConfig, decode, encode, fit

CFG = PatchCodecConfig(latent_channels=12)


def clip(seed: int, frames: int = 13, height: int = 32, width: int = 48, amount: float = 1.0) -> torch.Tensor:
    """A texture that drifts, with noise, so that patches vary in every direction: uint8 [T, H, W, 3]."""
    t, y, x = torch.meshgrid(*(torch.arange(n).double() for n in (frames, height, width)), indexing="ij")
    waves = torch.zeros(frames, height, width, 3, dtype=torch.float64)
    for i, (fy, fx, ft, *rgb) in enumerate(keys.normal(keys.key(seed), (8, 6)).double().tolist()):
        waves += torch.tensor(rgb) * torch.sin(0.5 * fy * y + 0.5 * fx * x + 0.3 * ft * t + i).unsqueeze(-1)
    noise = keys.normal(keys.fold_in(keys.key(seed), "noise"), waves.shape).double()
    return (128 + amount * (20 * waves + 4 * noise)).round().clamp(0, 255).to(torch.uint8)


CLIPS = [clip(0), clip(1, frames=9), clip(2, height=40)]
PARAMS = fit(CFG, CLIPS)


def batch(seed: int, frames: int = 13) -> torch.Tensor:
    return torch.stack([to_video(clip(seed + i, frames)) for i in range(2)])


def stills(video: torch.Tensor) -> torch.Tensor:
    """`[1, 3, T, H, W]` -> `[T, 3, 1, H, W]`: each frame as a clip of its own, as the first-frame basis sees it."""
    return video[0].transpose(0, 1)[:, :, None]


def patches_of(clips, kind: str) -> torch.Tensor:
    """All patches by plain loops over places: an oracle for the order of dimensions. Float64 [N, D]."""
    out = []
    for c in clips:
        video = to_video(c).double()  # [3, T, H, W]
        starts = range(video.shape[1]) if kind == "first" else range(1, video.shape[1], 4)
        length = 1 if kind == "first" else 4
        for t in starts:
            for top in range(0, video.shape[2], 8):
                for left in range(0, video.shape[3], 8):
                    patch = video[:, t : t + length, top : top + 8, left : left + 8]
                    out.append(patch.transpose(0, 1).flatten())
    return torch.stack(out)


def test_params_fit_the_specs_and_are_reproducible():
    specs.check(PARAMS, patch_codec.param_specs(CFG), dtypes=True)
    again = fit(CFG, iter(CLIPS))
    assert all(torch.equal(PARAMS[k], again[k]) for k in PARAMS)


@pytest.mark.parametrize("frames", [1, 5, 13])
def test_shapes_follow_the_first_frame_rule(frames):
    video = batch(5, frames)
    latents = encode(PARAMS, CFG, video)
    assert latents.shape == (2, 12, (frames - 1) // 4 + 1, 4, 6)
    assert decode(PARAMS, CFG, latents).shape == video.shape
    # The first latent frame is the first frame's, the second that of frames 1 to 4.
    changed = video.clone()
    changed[:, :, 0] += 0.1
    moved = (encode(PARAMS, CFG, changed) - latents).abs().amax(dim=(0, 1, 3, 4)) > 1e-4
    assert moved.tolist() == [True] + [False] * (latents.shape[2] - 1)


def test_groups_reach_the_error_of_the_best_linear_code():
    """Rebuilding loses exactly the energy of the eigenvalues left out (Eckart and Young), for both kinds."""
    for kind, pick in (("first", slice(0, 1)), ("group", slice(1, None))):
        x = patches_of(CLIPS, kind)
        values = torch.linalg.svdvals(x - x.mean(0)).square()
        error = torch.zeros((), dtype=torch.float64)
        for c in CLIPS:
            video = to_video(c)[None].double()
            clips = stills(video) if kind == "first" else video
            rebuilt = decode(PARAMS, CFG, encode(PARAMS, CFG, clips))
            error += (rebuilt - clips)[:, :, pick].square().sum()
        # 1e-4: the basis is stored in float32 and components under the rounding noise are kept as they are.
        assert float(error) == pytest.approx(float(values[12:].sum()), rel=1e-4)


def test_all_channels_rebuild_the_clip_exactly():
    small = PatchCodecConfig(latent_channels=48, spatial=4, temporal=1)  # one frame per group: 48 values per patch
    params = fit(small, CLIPS)
    video = batch(0)
    rebuilt = decode(params, small, encode(params, small, video))
    torch.testing.assert_close(rebuilt, video, atol=2e-5, rtol=0)
    assert torch.equal(to_frames(rebuilt[0]), CLIPS[0])


def test_more_channels_rebuild_better():
    video = to_video(CLIPS[0])[None]
    errors = []
    for channels in (4, 12, 32):
        cfg = PatchCodecConfig(channels)
        params = fit(cfg, CLIPS)
        errors.append(float((decode(params, cfg, encode(params, cfg, video)) - video).square().mean()))
    assert errors[0] > 1.5 * errors[1] > 1.5 * errors[2]


def test_latents_have_zero_mean_and_unit_variance_on_the_fitting_clips():
    latents = [encode(PARAMS, CFG, to_video(c)[None].double())[0] for c in CLIPS]
    groups = torch.cat([z[:, 1:].flatten(1) for z in latents], dim=1)
    every = [encode(PARAMS, CFG, stills(to_video(c)[None].double())) for c in CLIPS]
    firsts = torch.cat([z.transpose(0, 1).flatten(1) for z in every], dim=1)
    for values in (groups, firsts):
        # Parameters are rounded to float32: 1e-4 of a standard deviation.
        assert values.mean(1).abs().max() < 1e-4
        assert (values.std(1, correction=0) - 1).abs().max() < 1e-4


def test_components_weaker_than_rounding_noise_are_not_blown_up():
    # A plain colour that changes: one direction varies, eleven do not.
    levels = torch.linspace(20, 200, 13).round().view(13, 1, 1, 1)
    still = levels.expand(13, 32, 48, 3).to(torch.uint8)
    params = fit(CFG, [still])
    latents = encode(params, CFG, to_video(still)[None])
    assert torch.isfinite(latents).all() and latents.abs().max() < 4
    assert torch.equal(to_frames(decode(params, CFG, latents)[0]), still)


def test_a_still_clip_has_nearly_the_same_latents_in_frame_0_and_later():
    slow = [clip(seed, amount=0.8)[:1].expand(9, -1, -1, -1) for seed in range(3)]
    params = fit(CFG, slow)
    z = encode(params, CFG, torch.stack([to_video(c[:, :32]) for c in slow]))
    first, later = z[:, :, 0].flatten(), z[:, :, 1].flatten()
    assert float(first @ later / (first.norm() * later.norm())) > 0.999
    assert torch.equal(z[:, :, 1], z[:, :, 2])
    # With moving clips the two bases span different subspaces and agree as far as those allow.
    moving = encode(PARAMS, CFG, torch.stack([to_video(clip(7)[:1].expand(5, -1, -1, -1))]))
    a, b = moving[:, :, 0].flatten(), moving[:, :, 1].flatten()
    assert float(a @ b / (a.norm() * b.norm())) > 0.7


def test_decoding_in_chunks_equals_decoding_at_once():
    latents = encode(PARAMS, CFG, batch(3, 17))
    whole = decode(PARAMS, CFG, latents)
    parts = [
        decode(PARAMS, CFG, latents[:, :, :2]),
        decode(PARAMS, CFG, latents[:, :, 2:3], first=False),
        decode(PARAMS, CFG, latents[:, :, 3:], first=False),
    ]
    # Equal but for the order of sums in a matrix product of another height.
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, atol=1e-6, rtol=0)


def test_decode_inverts_encode_on_latents():
    """The basis is orthonormal, so a latent survives decoding and encoding."""
    latents = keys.normal(keys.key(1), (1, 12, 3, 2, 2))
    again = encode(PARAMS, CFG, decode(PARAMS, CFG, latents))
    torch.testing.assert_close(again, latents, atol=2e-4, rtol=0)  # float32, divided by the weakest std


def test_vmap_and_grad_equal_batch_and_autograd():
    video = batch(4, 5)
    one = torch.func.vmap(lambda v: encode(PARAMS, CFG, v[None])[0])(video)
    torch.testing.assert_close(one, encode(PARAMS, CFG, video))

    def loss(latents):
        return decode(PARAMS, CFG, latents).square().sum()

    latents = encode(PARAMS, CFG, video).double().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(latents), latents)
    torch.testing.assert_close(torch.func.grad(loss)(latents.detach()), wanted)
    small = latents[:1, :, :, :1, :1].detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: decode(PARAMS, CFG, z), small)


def test_dtypes_are_kept():
    for dtype in (torch.float64, torch.bfloat16):
        latents = encode(PARAMS, CFG, batch(0, 5).to(dtype))
        assert latents.dtype == dtype and decode(PARAMS, CFG, latents).dtype == dtype


def test_bad_input_is_named():
    with pytest.raises(UserError, match="latent_channels is 193, expected 1 to 192"):
        PatchCodecConfig(193)
    with pytest.raises(UserError, match=r"shape \[3, 5, 8, 8\], expected \[B, 3, T, H, W\]"):
        encode(PARAMS, CFG, torch.zeros(3, 5, 8, 8))
    with pytest.raises(UserError, match=r"(?s)num_frames is 4.*1 or 5.*width is 12.*8 or 16"):
        encode(PARAMS, CFG, torch.zeros(1, 3, 4, 8, 12))
    with pytest.raises(UserError, match="torch.uint8, expected a floating dtype"):
        encode(PARAMS, CFG, torch.zeros(1, 3, 1, 8, 8, dtype=torch.uint8))
    with pytest.raises(UserError, match=r"shape \[1, 16, 1, 2, 2\], expected \[B, 12, t, h, w\]"):
        decode(PARAMS, CFG, torch.zeros(1, 16, 1, 2, 2))
    with pytest.raises(UserError, match="no clips"):
        fit(CFG, [])
    with pytest.raises(UserError, match="too small .* at least 5 frames of 8 by 8"):
        fit(CFG, [CLIPS[0], clip(0, frames=4)])
    with pytest.raises(UserError, match="too small"):
        fit(CFG, [clip(0, height=7)])
    with pytest.raises(UserError, match="torch.float32"):
        fit(CFG, [CLIPS[0].float()])
    with pytest.raises(UserError, match="(?s)12 channels.*10 first patches: at least 13.*2 group patches"):
        fit(CFG, [clip(0, frames=5, height=16, width=8)])


def test_folder_round_trip_and_its_errors(tmp_path):
    patch_codec.save(tmp_path / "vae", PARAMS, CFG)
    config = json.loads((tmp_path / "vae" / "config.json").read_text())
    assert config["_class_name"] == "LatentreePatchCodec"
    params, cfg = patch_codec.load(tmp_path / "vae")
    assert cfg == CFG and params.keys() == PARAMS.keys()
    assert all(torch.equal(params[k], PARAMS[k]) for k in params)

    def rewrite(**changes):
        (tmp_path / "vae" / "config.json").write_text(json.dumps(config | changes))

    rewrite(_class_name="AutoencoderKLWan")
    with pytest.raises(UserError, match="config.json.*(?s:.*)'AutoencoderKLWan', expected 'LatentreePatchCodec'"):
        patch_codec.load(tmp_path / "vae")
    rewrite(latent_chanels=3, spatial="8")
    with pytest.raises(UserError, match="(?s)spatial is '8'.*latent_chanels .did you mean 'latent_channels'"):
        patch_codec.load(tmp_path / "vae")
    rewrite(latent_channels=16)
    with pytest.raises(UserError, match=r"(?s)group.basis has shape \[12, 768\], expected \[16, 768\]"):
        patch_codec.load(tmp_path / "vae")
    rewrite()
    weights = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="cut short"):
        patch_codec.load(tmp_path / "vae")
    with pytest.raises(UserError, match="no such file"):
        patch_codec.load(tmp_path / "nothing")
