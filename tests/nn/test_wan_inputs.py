"""The input builder: identities of flow matching, and every misfit in one message. Also config files of models."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wan_cases import configs, random_inputs, random_params, tiny_config

from core import keys
from core.errors import UserError
from nn import wan
from nn.config_files import read_config
from nn.wan_formats import to_json
from nn.wan_inputs import (
    CHANNELS,
    check_latent_shape,
    clean_estimate,
    model_inputs,
    noised,
    null_conditions,
    pad_text,
    timestep_of,
    velocity_target,
)

SHAPES = st.tuples(*[st.integers(1, 3)] * 5)
I2V = wan.WanConfig(
    num_attention_heads=2, attention_head_dim=8, ffn_dim=8, num_layers=1, in_channels=7, out_channels=4,
    text_dim=5, freq_dim=8, image_dim=6, added_kv_proj_dim=16,
)  # fmt: skip


def faults(error) -> list[str]:
    return str(error.value).split("\n  - ")[1:]


# --- flow matching --------------------------------------------------------------------------------------------


@given(shape=SHAPES, seed=st.integers(0, 10**6))
def test_flow_matching_identities(shape, seed):
    """x0 is recovered from the true velocity, and d noised / d sigma is that velocity; float64, so to 1e-14."""
    k = keys.key(seed)
    clean, noise = (keys.normal(keys.fold_in(k, n), shape, torch.float64) for n in ("clean", "noise"))
    sigma = keys.uniform(keys.fold_in(k, "sigma"), shape[:1], torch.float64)
    x, velocity = noised(clean, noise, sigma), velocity_target(clean, noise)
    torch.testing.assert_close(clean_estimate(x, velocity, sigma), clean, rtol=0, atol=1e-14)
    # The same estimate extrapolated to sigma = 1 is the noise.
    torch.testing.assert_close(clean_estimate(x, velocity, sigma - 1), noise, rtol=0, atol=1e-14)
    _, slope = torch.func.jvp(lambda s: noised(clean, noise, s), (sigma,), (torch.ones_like(sigma),))
    torch.testing.assert_close(slope, velocity, rtol=0, atol=1e-14)


def test_noised_ends_and_samples_keep_their_own_sigma():
    clean, noise = torch.randn(3, 2, 1, 2, 2), torch.randn(3, 2, 1, 2, 2)
    x = noised(clean, noise, torch.tensor([0.0, 1.0, 0.25]))
    assert torch.equal(x[0], clean[0]) and torch.equal(x[1], noise[1])
    assert torch.equal(x[2], 0.75 * clean[2] + 0.25 * noise[2])


def test_half_precision_latents_are_noised_in_float32():
    clean, noise = torch.randn(2, 1, 1, 1, 1).bfloat16(), torch.randn(2, 1, 1, 1, 1)
    assert noised(clean, noise, torch.tensor([0.3, 0.7])).dtype == torch.float32


@given(sigma=st.floats(0, 1, width=16))
def test_timesteps_are_a_thousand_sigma_and_never_half_precision(sigma):
    """bfloat16 would round 1000 sigma to multiples of 4."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        t = timestep_of(torch.tensor([sigma], dtype=dtype))
        assert t.dtype == torch.float32 and torch.equal(t, torch.tensor([sigma]).to(dtype).float() * 1000)
    assert timestep_of(torch.tensor([sigma], dtype=torch.float64)).dtype == torch.float64


# --- the builder ----------------------------------------------------------------------------------------------


@given(
    cfg=configs(), image=configs(image=True), seed=st.integers(0, 10**6), dtype=st.sampled_from([None, torch.bfloat16])
)
def test_what_is_built_fits_the_model(cfg, image, seed, dtype):
    """Every channel in the compute dtype, masks bool, timesteps wide, the first frame beside the latents."""
    for c in (cfg, image):
        noisy, timestep, conditions = random_inputs(c, seed, image_len=3)
        conditions["text_mask"] = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
        inputs = model_inputs(c, noisy, timestep.to(torch.bfloat16), conditions, dtype=dtype)
        wanted = torch.float32 if dtype is None else dtype
        assert {k: v.dtype for k, v in inputs.items()} == {
            **dict.fromkeys(inputs, wanted), "text_mask": torch.bool, "timestep": torch.float32,
        }  # fmt: skip
        assert "first_frame" not in inputs and inputs["latents"].shape[1] == c.in_channels
        assert torch.equal(inputs["latents"][:, : c.out_channels], noisy.to(wanted))
        if c.condition_channels:
            assert torch.equal(inputs["latents"][:, c.out_channels :], conditions["first_frame"].to(wanted))
        out = wan.forward(random_params(c, seed), c, inputs)
        assert out.shape == noisy.shape and out.dtype == wanted and out.isfinite().all()


def test_padding_that_is_masked_changes_nothing():
    """Text of length 3, and the same with garbage behind a mask: 1e-5 covers sums in another order."""
    cfg = tiny_config(num_layers=2)
    params = random_params(cfg, 0)
    noisy, timestep, conditions = random_inputs(cfg, 0, text_len=3)
    longer = torch.cat([conditions["text"], torch.full((2, 4, cfg.text_dim), 9.0)], dim=1)
    mask = torch.arange(7).expand(2, 7) < 3
    plain = wan.forward(params, cfg, model_inputs(cfg, noisy, timestep, conditions))
    masked = wan.forward(params, cfg, model_inputs(cfg, noisy, timestep, {"text": longer, "text_mask": mask}))
    unmasked = wan.forward(params, cfg, model_inputs(cfg, noisy, timestep, {"text": longer}))
    torch.testing.assert_close(masked, plain, rtol=1e-5, atol=1e-5)
    assert (unmasked - plain).abs().max() > 1e-3


def test_everything_that_does_not_fit_is_in_one_message():
    cfg = tiny_config(text_dim=8)
    with pytest.raises(UserError) as error:
        model_inputs(
            cfg,
            torch.zeros(2, 5, 1, 3, 4),
            torch.zeros(2, 3),
            {
                "text": torch.zeros(3, 5, 9),
                "text_mask": torch.ones(2, 5),
                "image": torch.zeros(2, 1, 6),
                "first_frame": torch.zeros(2, 3, 1, 3, 4),
                "txt": torch.zeros(2),
            },
        )
    assert faults(error) == [
        "latents: 5 latent channels, the model has out_channels=4",
        "latents: latent height 3 must be a multiple of 2: nearest valid 2 or 4",
        "timestep: [2, 3], expected [2] or per token [2, 2]",
        "text: [3, 5, 9], expected [2, L, 8]",
        "condition 'image' was given to a model that has no such branch",
        "condition 'first_frame' was given to a model that has no such branch",
        "condition 'txt' is none of text, text_mask, image, first_frame",
        "text_mask: dtype torch.float32, expected torch.bool",
    ]


@pytest.mark.parametrize(
    "change,fault",
    [
        ({"text": None}, "condition 'text' is missing, expected [2, L, 5]"),
        ({"image": None}, "condition 'image' is missing, expected [2, M, 6]"),
        ({"first_frame": None}, "condition 'first_frame' is missing, expected [2, 3, 2, 4, 6]"),
        ({"text": (2, 5)}, "text: [2, 5], expected [2, L, 5]"),
        ({"image": (2, 4, 7)}, "image: [2, 4, 7], expected [2, M, 6]"),
        ({"first_frame": (2, 3, 1, 4, 6)}, "first_frame: [2, 3, 1, 4, 6], expected [2, 3, 2, 4, 6]"),
        ({"text_mask": (2, 4)}, "text_mask: [2, 4], expected [2, 5]"),
    ],
)
def test_each_channel_is_checked(change, fault):
    noisy, timestep, conditions = random_inputs(I2V, 0, image_len=4)
    for name, shape in change.items():
        conditions.pop(name, None)
        if shape is not None:
            conditions[name] = torch.zeros(shape, dtype=torch.bool if name == "text_mask" else torch.float32)
    with pytest.raises(UserError) as error:
        model_inputs(I2V, noisy, timestep, conditions)
    assert faults(error) == [fault]


def test_latents_without_a_batch_axis():
    cfg = tiny_config()
    with pytest.raises(UserError, match=r"latents: \[4, 1, 2, 2\], expected \[B, C, T, H, W\]"):
        model_inputs(cfg, torch.zeros(4, 1, 2, 2), torch.zeros(1), {"text": torch.zeros(1, 1, 8)})


@given(cfg=configs(), shape=st.tuples(st.integers(1, 5), *[st.integers(0, 7)] * 3))
def test_the_nearest_valid_latent_shape_is_valid(cfg, shape):
    found = check_latent_shape(cfg, shape)
    fits = shape[0] == cfg.out_channels and all(
        n and n % p == 0 for n, p in zip(shape[1:], cfg.patch_size, strict=True)
    )
    assert (not found) == fits
    fixed = [cfg.out_channels, *shape[1:]]
    for fault in found:
        for axis, name in enumerate(("frames", "height", "width"), start=1):
            if f"latent {name} " in fault:
                fixed[axis] = int(fault.rpartition("nearest valid ")[2].split(" or ")[0])
    assert check_latent_shape(cfg, fixed) == []


def test_latents_beyond_the_rotary_table():
    cfg = tiny_config(rope_max_seq_len=4)
    assert check_latent_shape(cfg, (4, 4, 8, 8)) == []
    (fault,) = check_latent_shape(cfg, (4, 1, 8, 10))
    assert fault == "latent width 10 is above 8 (rope_max_seq_len x patch)"
    assert "expected [C, T, H, W]" in check_latent_shape(cfg, (4, 4, 8))[0]


# --- text and guidance branches -------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4), spare=st.integers(0, 3), width=st.integers(1, 4))
def test_padding_keeps_every_embedding_and_adds_zeros(lengths, spare, width):
    texts = [torch.rand(n, width) + 1 for n in lengths]
    out = pad_text(texts, max(lengths) + spare)
    assert out.shape == (len(lengths), max(lengths) + spare, width)
    for row, text in zip(out, texts, strict=True):
        assert torch.equal(row[: len(text)], text) and not row[len(text) :].any()
    # A row does not depend on the others.
    assert torch.equal(out[-1:], pad_text(texts[-1:], max(lengths) + spare))


def test_embeddings_that_do_not_fit_are_all_named():
    texts = [torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(1, 4), torch.zeros(3)]
    with pytest.raises(UserError) as error:
        pad_text(texts, 4, names=["a", "b", "c", "d"])
    assert faults(error) == [f"{n}, expected at most [4, 3]" for n in ("b: [5, 3]", "c: [1, 4]", "d: [3]")]
    with pytest.raises(UserError, match=r"prompt 0: \[2, 3\], expected at most \[4, 9\]"):
        pad_text(texts[:1], 4, width=9)
    with pytest.raises(UserError, match="at least one"):
        pad_text([], 4)


@given(policy=st.dictionaries(st.sampled_from(CHANNELS), st.sampled_from(["keep", "zero", "drop"])))
def test_policies_of_a_guidance_branch(policy):
    conditions = {k: torch.full((2, 3), i + 1.0) for i, k in enumerate(CHANNELS)}
    out = null_conditions(conditions, policy)
    for name, value in conditions.items():
        action = policy.get(name, "keep")
        assert (name in out) == (action != "drop")
        if name in out:
            assert torch.equal(out[name], value * (action == "keep"))
    assert all(v.all() for v in conditions.values()), "the conditions themselves are not changed"


def test_bad_policies_are_all_named():
    with pytest.raises(UserError) as error:
        null_conditions({"text": torch.zeros(1)}, {"txt": "zero", "text": "remove"})
    assert faults(error) == ["txt: no such channel among ['text']", "text: 'remove' is none of keep, zero, drop"]


# --- config files ---------------------------------------------------------------------------------------------


def write(tmp_path, **changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**to_json(tiny_config()), **changes}))
    return path


def read(path):
    return read_config(
        wan.WanConfig, path, "_class_name", "WanTransformer3DModel", fixed={"qk_norm": "rms_norm_across_heads"}
    )


@given(cfg=configs(), image=configs(image=True))
def test_configs_survive_their_file(tmp_path_factory, cfg, image):
    for c in (cfg, image, dataclasses.replace(cfg, eps=1e-3)):
        path = tmp_path_factory.mktemp("config") / "config.json"
        path.write_text(json.dumps({"_diffusers_version": "0.42", **to_json(c)}))
        assert read(path) == c


@pytest.mark.parametrize(
    "changes,fault",
    [
        ({"num_layer": 3}, "unknown key num_layer (did you mean 'num_layers'?)"),
        ({"num_layers": "3"}, "num_layers is '3', expected int"),
        ({"num_layers": True}, "num_layers is True, expected int"),
        ({"num_layers": None}, "num_layers is None, expected int"),
        ({"cross_attn_norm": "true"}, "cross_attn_norm is 'true', expected bool"),
        ({"eps": True}, "eps is True, expected float"),
        ({"patch_size": [1, 2, "2"]}, "patch_size is [1, 2, '2'], expected a list of int"),
        ({"image_dim": 1.5}, "image_dim is 1.5, expected int"),
        ({"qk_norm": "rms_norm"}, "qk_norm is 'rms_norm', only 'rms_norm_across_heads' is supported"),
        ({"_class_name": "UNet3D"}, "_class_name is 'UNet3D', expected 'WanTransformer3DModel'"),
        # Found by the config itself, and still reported with its file.
        ({"attention_head_dim": 7}, "attention_head_dim must be even and at least 6, got 7"),
        ({"patch_size": [2, 2]}, "patch_size must be three positive integers, got (2, 2)"),
        ({"image_dim": 4}, "image_dim and added_kv_proj_dim go together"),
    ],
)
def test_a_bad_config_names_file_key_and_value(tmp_path, changes, fault):
    path = write(tmp_path, **changes)
    with pytest.raises(UserError) as error:
        read(path)
    assert str(path) in str(error.value) and fault in str(error.value)


def test_all_faults_of_a_config_come_at_once(tmp_path):
    with pytest.raises(UserError) as error:
        read(write(tmp_path, num_layer=3, eps="small", qk_norm=None))
    assert len(faults(error)) == 3
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="_class_name is 'list'"):
        read(tmp_path / "config.json")
