"""Training a Wan VAE: objective, windows, steps and statistics; and the demo as a command."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core import keys, specs
from core.errors import UserError
from core.geometry import to_frames, to_video
from infer.media import psnr, read_video, write_video
from nn import wan_vae
from nn import wan_vae_blocks as blocks
from nn.wan_vae import VaeRun, WanVaeConfig
from train import demo_vae, optim, vae

FIELDS = {"base_dim": 6, "z_dim": 2, "num_res_blocks": 1, "latents_mean": (0.0, 0.0), "latents_std": (1.0, 1.0)}
KINDS = {
    "2.1": WanVaeConfig(
        dim_mult=(1, 2, 2), temperal_downsample=(True, True), scale_factor_spatial=4, scale_factor_temporal=4, **FIELDS
    ),
    "2.2": WanVaeConfig(
        dim_mult=(1, 1), temperal_downsample=(True,), is_residual=True, patch_size=2, in_channels=12, out_channels=12,
        scale_factor_spatial=4, scale_factor_temporal=2, **FIELDS,
    ),
}  # fmt: skip
SHORT = vae.VaeTraining(steps=4, frames=5, size=16, warmup_steps=1)
SEEDS = st.integers(0, 10**6)


def moving_ramps(frames=9, height=24, width=32) -> torch.Tensor:
    """Smooth colours that move, uint8 `[T, H, W, 3]`."""
    t, y, x = torch.meshgrid(*(torch.arange(n) for n in (frames, height, width)), indexing="ij")
    waves = [torch.sin(x / 7 + t / 5), torch.cos(y / 6 - t / 9), torch.sin((x + y) / 9)]
    return ((torch.stack(waves, -1) + 1) * 127).to(torch.uint8)


VIDEO = to_video(moving_ramps())


def random_params(cfg, seed=0):
    """Every leaf random (`vae.start` has zeros), small enough that videos stay inside [-1, 1]."""
    params = specs.init(wan_vae.param_specs(cfg), keys.key(seed))
    return {k: 0.3 * p if k.startswith("decoder.conv_out") else p for k, p in params.items()}


# --- the objective --------------------------------------------------------------------------------------------


@given(seed=SEEDS, shape=st.lists(st.integers(1, 3), min_size=2, max_size=5))
@settings(max_examples=20)
def test_kl_is_that_of_torch_distributions(seed, shape):
    mean, logvar = (keys.normal(k, shape, dtype=torch.float64) for k in keys.split(keys.key(seed)))
    posterior = torch.distributions.Normal(mean, (0.5 * logvar).exp())
    wanted = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0))
    torch.testing.assert_close(vae.kl_divergence(mean, logvar), wanted.flatten(1).sum(1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_gradient_are_those_of_diffusers_model(kind):
    """Its posterior's `kl()` and the squared error of its decoder, at the same draw. Diffusers clamps what it
    decodes, so the parameters are such that nothing reaches 1. Tolerances are float32's through some twenty layers."""
    from diffusers import AutoencoderKLWan

    cfg, k, weight = KINDS[kind], keys.key(7), 0.05
    params = {name: p.requires_grad_() for name, p in random_params(cfg).items()}
    video = torch.stack([VIDEO[:, :5, :16, :16], VIDEO[:, 4:, 8:, 16:]])
    ours = vae.loss(params, cfg, video, k, kl_weight=weight)

    body = {f: v for f, v in wan_vae.to_json(cfg).items() if f not in ("_class_name", "clip_output")}
    model = AutoencoderKLWan(**body)
    model.load_state_dict({name: p.detach() for name, p in params.items()})
    posterior = model.encode(video).latent_dist
    decoded = model.decode(posterior.mean + posterior.std * keys.normal(k, posterior.mean.shape)).sample
    assert decoded.abs().max() < 1
    error, kl = (decoded - video).square().mean(), posterior.kl().sum() / video.numel()
    torch.testing.assert_close(ours.error, error, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.kl, kl, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.total, error + weight * kl, atol=1e-6, rtol=1e-5)

    names = dict(model.named_parameters())
    wanted = torch.autograd.grad(error + weight * kl, [names[name] for name in params])
    largest = max(g.abs().max() for g in wanted)
    for name, got, want in zip(params, torch.autograd.grad(ours.total, list(params.values())), wanted, strict=True):
        torch.testing.assert_close(got / largest, want / largest, atol=2e-5, rtol=0, msg=name)


def test_normalisation_does_not_change_the_objective():
    cfg = KINDS["2.1"]
    other = dataclasses.replace(cfg, latents_mean=(0.4, -1.0), latents_std=(2.0, 0.3))
    losses = [vae.loss(random_params(cfg), c, VIDEO[None], keys.key(1), kl_weight=0.1) for c in (cfg, other)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-5)


def test_what_is_decoded_beyond_the_range_has_a_gradient():
    """A decoder that gives 3 everywhere is 3 - x off, and is told so."""
    cfg = KINDS["2.1"]
    params = random_params(cfg)
    params["decoder.conv_out.weight"].zero_()
    bias = params["decoder.conv_out.bias"].fill_(3.0).requires_grad_()
    losses = vae.loss(params, cfg, VIDEO[None], keys.key(0), kl_weight=0.0)
    torch.testing.assert_close(losses.error, (3.0 - VIDEO).square().mean())
    wanted = 2 * (3.0 - VIDEO).flatten(1).mean(1) / 3
    torch.testing.assert_close(torch.autograd.grad(losses.total, bias)[0], wanted)


# --- windows and steps ----------------------------------------------------------------------------------------


@given(seed=SEEDS, shape=st.tuples(st.integers(1, 6), st.integers(2, 7), st.integers(2, 7)), data=st.data())
@settings(max_examples=20)
def test_windows_are_cut_from_the_video(seed, shape, data):
    """The video counts its own pixels: a window's corner says where it is, and the rest must follow from it."""
    t = vae.VaeTraining(steps=1, batch=3, frames=data.draw(st.integers(1, shape[0])), size=data.draw(st.integers(1, 2)))
    video = torch.arange(3 * math.prod(shape)).view(3, *shape)
    cut = vae.windows(t, keys.key(seed), video)
    assert cut.shape == (3, 3, t.frames, t.size, t.size)
    for window in cut:
        a, b, c = (int(i) for i in torch.unravel_index(window[0, 0, 0, 0], shape))
        assert torch.equal(window, video[:, a : a + t.frames, b : b + t.size, c : c + t.size])
    assert torch.equal(cut, vae.windows(t, keys.key(seed), video))


def test_every_place_is_reached():
    """4 x 3 x 2 places and 200 windows: that one is missed has a probability of 24 * (23 / 24)^200 = 0.5 %."""
    video = torch.arange(3 * 7 * 6 * 5).view(3, 7, 6, 5)
    cut = vae.windows(vae.VaeTraining(steps=1, frames=4, size=4, batch=200), keys.key(1), video)
    corners = set(cut[:, 0, 0, 0, 0].tolist())
    assert corners == {int(video[0, a, b, c]) for a in range(4) for b in range(3) for c in range(2)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_adamw_on_the_clipped_gradient(kind):
    """Against `torch.optim.AdamW`, whatever the layout of weights and gradients in memory: three steps with warmup
    and cosine from the closed form. Adam divides by the gradient's size, so that a relative error of 1e-5 in a tiny
    gradient is one of 1e-5 of the learning rate; a gradient in the wrong place would be off by all of it."""
    cfg, k = KINDS[kind], keys.key(5)
    t = dataclasses.replace(SHORT, steps=3, learning_rate=1e-2, max_grad_norm=0.05)
    ours = {n: p.requires_grad_() for n, p in wan_vae.channels_last(random_params(cfg)).items()}
    theirs = {n: p.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for n, p in ours.items()}
    state = optim.adamw_init(ours)
    reference = torch.optim.AdamW(theirs.values(), betas=t.optimizer.betas, weight_decay=t.optimizer.weight_decay)
    for step, lr in enumerate((0.0, 1e-2, 0.5e-2)):
        taken = vae.train_step(t, cfg, ours, state, VIDEO, k, step)
        place, draw = keys.split(keys.fold_in(k, step))
        losses = vae.loss(theirs, cfg, vae.windows(t, place, VIDEO), draw, kl_weight=t.kl_weight)
        reference.zero_grad()
        losses.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), t.max_grad_norm)
        assert norm > t.max_grad_norm and taken.lr == pytest.approx(lr)
        torch.testing.assert_close(taken.grad_norm, norm, rtol=1e-3, atol=0)
        torch.testing.assert_close(taken.losses.total, losses.total.detach(), rtol=1e-3, atol=0)
        reference.param_groups[0]["lr"] = lr
        reference.step()
    moved = max((ours[n] - p).abs().max().item() for n, p in random_params(cfg).items())
    assert moved > 0.01
    for n, p in theirs.items():
        wrong = (ours[n] - p).abs() > 0.05 * 1e-2
        assert wrong.float().mean() < 0.02, f"{n}: {int(wrong.sum())} of {wrong.numel()} values"


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_start_as_their_shortcuts(kind):
    cfg = KINDS[kind]
    params, stream = vae.start(cfg, keys.key(0)), blocks.Stream(None, None, VaeRun())
    for name in sorted({k.split(".conv1.")[0] for k in params if ".conv1." in k}):
        x = keys.normal(keys.key(1), (1, params[f"{name}.conv1.weight"].shape[1], 2, 3, 3))
        shortcut = f"{name}.conv_shortcut"
        wanted = blocks.conv(params, shortcut, x) if f"{shortcut}.weight" in params else x
        assert torch.equal(blocks.resnet(params, name, x, stream), wanted), name
    for part in ("encoder", "decoder"):
        name = f"{part}.mid_block.attentions.0"
        x = keys.normal(keys.key(2), (1, params[f"{name}.proj.weight"].shape[0], 2, 3, 3))
        assert torch.equal(blocks.frame_attention(params, name, x, stream), x)


@pytest.mark.parametrize("kind", KINDS)
def test_training_reconstructs_better_and_is_reproducible(kind):
    """A few dozen steps on smooth waves leave less than 70 % of the error of a picture of the mean colour: 25 % to
    57 % for three seeds, and less after twice the steps. An untrained VAE leaves more than 100 %."""
    cfg, t = KINDS[kind], dataclasses.replace(SHORT, steps=60, learning_rate=3e-3, kl_weight=1e-4)
    params, seen = vae.start(cfg, keys.key(0)), []
    before = {k: v.clone() for k, v in params.items()}
    vae.fit(t, cfg, params, VIDEO, keys.key(1), report=lambda done, step: seen.append((done, float(step.losses.total))))
    assert [done for done, _ in seen] == list(range(1, 61))
    assert all(not p.requires_grad and not torch.equal(p, before[k]) for k, p in params.items())
    colour, left = VIDEO.flatten(1).var(1).mean(), [error_of(cfg, p) for p in (before, params)]
    assert left[0] > colour and left[1] < 0.7 * colour

    again = []
    short = {k: v.clone() for k, v in before.items()}
    with pytest.raises(StopIteration):
        vae.fit(t, cfg, short, VIDEO, keys.key(1), report=lambda done, step: stop_after(again, done, step))
    assert again == seen[:5] and not any(p.requires_grad for p in short.values())


def error_of(cfg, params):
    """Mean squared error of VIDEO's reconstruction."""
    with torch.no_grad():
        return (wan_vae.decode(params, cfg, wan_vae.encode(params, cfg, VIDEO[None])) - VIDEO).square().mean()


def stop_after(seen, done, step):
    seen.append((done, float(step.losses.total)))
    if done == 5:
        raise StopIteration


# --- statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_latents_have_mean_zero_and_deviation_one(kind):
    """And decoding gives what it gave before: the config's change cancels but for rounding."""
    cfg, params = KINDS[kind], random_params(KINDS[kind])
    videos = torch.stack([VIDEO, VIDEO.flip(-1)])
    made = vae.with_statistics(params, cfg, videos, chunk=1)
    latents = wan_vae.encode(params, made, videos)
    torch.testing.assert_close(latents.mean((0, 2, 3, 4)), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(latents.std((0, 2, 3, 4), correction=0), torch.ones(2), atol=1e-4, rtol=0)
    decoded = wan_vae.decode(params, made, latents)
    wanted = wan_vae.decode(params, cfg, wan_vae.encode(params, cfg, videos))
    torch.testing.assert_close(decoded, wanted, atol=1e-5, rtol=0)


def test_a_constant_channel_gets_the_least_deviation():
    cfg, params = KINDS["2.1"], random_params(KINDS["2.1"])
    params["quant_conv.weight"][0] = 0.0
    made = vae.with_statistics(params, cfg, VIDEO[None])
    assert made.latents_mean[0] == pytest.approx(params["quant_conv.bias"][0].item())
    assert made.latents_std[0] == vae.LEAST_STD < made.latents_std[1]


# --- bad input ------------------------------------------------------------------------------------------------


def test_bad_settings_are_named_before_the_first_step():
    cfg = KINDS["2.1"]
    params = vae.start(cfg, keys.key(0))

    def refused(match, **changes):
        with pytest.raises(UserError, match=match):
            vae.fit(dataclasses.replace(SHORT, **changes), cfg, params, VIDEO, keys.key(0))

    refused("(?s)steps is 0, expected at least 1.*batch is -1.*learning_rate is nan", steps=0, batch=-1,
            learning_rate=math.nan)  # fmt: skip
    refused("(?s)frames is 13, the video has 9.*size is 28, the video has 24 pixels", frames=13, size=28)
    refused("(?s)num_frames is 4.*1 or 5.*height is 10.*8 or 12", frames=4, size=10)
    with pytest.raises(UserError, match="num_frames is 8"):
        vae.fit(SHORT, cfg, params, VIDEO[:, :8], keys.key(0))


def test_a_loss_that_is_not_finite_stops_the_run():
    cfg = KINDS["2.2"]
    params = vae.start(cfg, keys.key(0))
    params["decoder.conv_out.bias"][0] = torch.inf
    with pytest.raises(UserError, match="step 1: loss is (inf|nan)"):
        vae.fit(SHORT, cfg, params, VIDEO, keys.key(0))


# --- the demo -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_demo(tmp_path, monkeypatch):
    """The demo on a small clip of our own."""
    write_video(tmp_path / "clip.mp4", moving_ramps(33, 32, 48), 12)
    monkeypatch.setattr(demo_vae, "find_clip", lambda: tmp_path / "clip.mp4")
    monkeypatch.setattr(demo_vae, "HEIGHT", 32)
    monkeypatch.setattr(demo_vae, "WIDTH", 48)
    return lambda *flags: demo_vae.main(["--output", str(tmp_path / "out"), "--steps", "2", *flags])


def test_the_demo_leaves_a_vae_that_diffusers_loads(small_demo, tmp_path, capsys):
    """Diffusers, at once and with the config's normalisation undone by hand, reconstructs what the demo shows."""
    from diffusers import AutoencoderKLWan

    out = tmp_path / "out"
    assert small_demo() == 0
    printed = capsys.readouterr().out
    assert "step 2: the whole clip at" in printed and "mean 0.000, deviation 1.000" in printed
    assert (out / "contact_sheet.png").read_bytes().startswith(b"\x89PNG")
    clip = read_video(tmp_path / "clip.mp4").frames
    film = read_video(out / "input_and_reconstruction.mp4")
    assert film.frames.shape == (33, 32, 96, 3) and film.fps == 12

    params, cfg = wan_vae.load(out / "vae")
    model = AutoencoderKLWan.from_pretrained(out / "vae")
    with torch.no_grad():
        mean = model.encode(to_video(clip)[None]).latent_dist.mean
        frames = to_frames(model.decode(mean).sample[0])
    assert printed.splitlines()[-1] == f"PSNR {psnr(clip, frames):.2f} dB"
    latents = wan_vae.encode(params, cfg, to_video(clip)[None])
    centre, std = (torch.tensor(c).view(-1, 1, 1, 1) for c in (model.config.latents_mean, model.config.latents_std))
    torch.testing.assert_close(latents * std + centre, mean, atol=1e-4, rtol=1e-4)
    # Compression blurs the colours of so noisy a picture, but its halves are what they should be.
    left, right = film.frames.split(48, dim=2)
    assert psnr(left, clip) > psnr(left, frames) + 5 and psnr(right, frames) > psnr(right, clip) + 5

    assert small_demo() == 2
    assert "vae exists; --fresh replaces it" in capsys.readouterr().err
    assert small_demo("--fresh", "--seed", "1") == 0
    assert not torch.equal(wan_vae.load(out / "vae")[0]["quant_conv.weight"], params["quant_conv.weight"])


def test_the_demo_fails_at_the_door_and_leaves_nothing_behind(small_demo, tmp_path, capsys, monkeypatch):
    assert small_demo("--steps", "0") == 2
    assert "steps is 0, expected at least 1" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert small_demo("--output", str(tmp_path / "file" / "out")) == 2
    assert "is not a folder" in capsys.readouterr().err

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("nn.config_files.write_json", interrupted)  # the weights are there, the config is not yet
    assert small_demo() == 130
    assert list((tmp_path / "out").iterdir()) == []
