"""LTX-2's text connectors against Diffusers' LTX2TextConnectors; registers, padding, single streams, errors."""

import dataclasses
import inspect
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_side_cases import close, compare, draw, loaded, random_leaves

from core import keys, specs
from core.errors import UserError
from core.trees import num_params
from nn import ltx2_connectors as connectors
from nn.config_files import read_config
from nn.ltx2_connectors import ConnectorConfig
from nn.ltx2_specs import param_specs as transformer_specs

# Some ten matrix products in a row, in another order of summation: a few ulp (1.2e-7) per layer, more where an RMS norm
# divides by little: at most 2.2e-5 over 500 random cases. In float64 Diffusers still turns queries and keys in float32
# (some 1e-7 of their gradients), and divides by a count in float32.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 2e-6}
SEEDS = st.integers(0, 10**6)


def tiny(family="2.3", **changes) -> ConnectorConfig:
    new = family != "2.0"
    base = {
        "caption_channels": 12, "text_proj_in_factor": 3, "video_connector_num_attention_heads": 2 if new else 3,
        "video_connector_attention_head_dim": 8 if new else 4, "audio_connector_num_attention_heads": 3,
        "audio_connector_attention_head_dim": 2 if new else 4, "video_connector_num_learnable_registers": 4,
        "audio_connector_num_learnable_registers": 2, "video_gated_attn": new, "audio_gated_attn": new,
        "rope_type": "split", "per_modality_projections": new, "video_hidden_dim": 16, "audio_hidden_dim": 6,
        "proj_bias": new,
    }  # fmt: skip
    return ConnectorConfig(**base | changes)


@st.composite
def configs(draw):
    """At least four channels: an RMS norm over two may divide by nearly nothing, which blows rounding errors up."""
    flag, split = st.booleans(), draw(st.booleans())
    heads = [draw(st.integers(1, 3)) for _ in range(2)]
    dims = [draw(st.integers(2 if h == 1 else 1, 3)) for h in heads]
    if split:
        sizes = {"caption_channels": draw(st.integers(4, 9))}
        sizes |= {"video_hidden_dim": heads[0] * 2 * dims[0], "audio_hidden_dim": heads[1] * 2 * dims[1]}
    else:  # both are as wide as the text
        heads, dims = [2, 3], [3, 2]
        sizes = {"caption_channels": 12}
    return ConnectorConfig(
        text_proj_in_factor=draw(st.integers(1, 3)),
        video_connector_num_attention_heads=heads[0],
        video_connector_attention_head_dim=2 * dims[0],
        video_connector_num_layers=draw(st.integers(1, 2)),
        video_connector_num_learnable_registers=draw(st.sampled_from([1, 2, 4])),
        audio_connector_num_attention_heads=heads[1],
        audio_connector_attention_head_dim=2 * dims[1],
        audio_connector_num_layers=draw(st.integers(1, 2)),
        audio_connector_num_learnable_registers=draw(st.sampled_from([1, 2, 4])),
        connector_rope_base_seq_len=draw(st.sampled_from([4096, 8])),
        rope_theta=draw(st.sampled_from([10000.0, 50.0])),
        rope_type=draw(st.sampled_from(["split", "interleaved"])),
        per_modality_projections=split,
        **sizes,
        **{k: draw(flag) for k in ("video_gated_attn", "audio_gated_attn", "rope_double_precision", "proj_bias")},
    )


def diffusers_model(cfg, params=None, dtype=torch.float32):
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

    make = lambda: LTX2TextConnectors(**{k: v for k, v in connectors.to_json(cfg).items() if k != "_class_name"})
    return make() if params is None else loaded(make, params, dtype)


def padded(side, lengths, length):
    place = torch.arange(length)
    counts = torch.tensor(lengths)[:, None]
    return place >= length - counts if side == "left" else place < counts


def hidden_of(cfg, seed, batch=2, length=8, dtype=torch.float32):
    return draw(seed, "hidden", batch, length, cfg.caption_channels, cfg.text_proj_in_factor, dtype=dtype)


def compare_with_diffusers(cfg, seed, mask, side, dtype, flat=False):
    params = random_leaves(connectors.param_specs(cfg), seed, dtype)
    model = diffusers_model(cfg, params, dtype)
    hidden = hidden_of(cfg, seed, *mask.shape, dtype=dtype)
    hidden = hidden.flatten(2) if flat else hidden
    ours = lambda p, x: list(connectors.forward(p, cfg, x, mask).values())
    theirs = lambda x: list(model(x, mask.long(), padding_side=side)[:2])
    compare(ours, theirs, params, model, [hidden], TOLERANCE[dtype])


@given(
    cfg=configs(), seed=SEEDS, side=st.sampled_from(["left", "right"]), flat=st.booleans(),
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=3),
)  # fmt: skip
@settings(max_examples=20)
def test_outputs_and_gradients_equal_diffusers(cfg, seed, side, flat, lengths):
    compare_with_diffusers(cfg, seed, padded(side, lengths, 8), side, torch.float32, flat)


@pytest.mark.parametrize("family", ["2.0", "2.3"])
@pytest.mark.parametrize("rope_type", ["split", "interleaved"])
def test_float64_equals_diffusers(family, rope_type):
    compare_with_diffusers(tiny(family, rope_type=rope_type), 1, padded("left", [3, 8], 8), "left", torch.float64)


def test_bfloat16_stays_and_is_near():
    """8 bits of mantissa, 4e-3 per rounding, some ten roundings deep."""
    for family in ("2.0", "2.3"):
        cfg = tiny(family)
        params, mask = random_leaves(connectors.param_specs(cfg), 1), padded("left", [3, 8], 8)
        exact = connectors.forward(params, cfg, hidden_of(cfg, 1), mask)
        half = connectors.forward(params, cfg, hidden_of(cfg, 1).bfloat16(), mask)
        for name in exact:
            assert half[name].dtype == torch.bfloat16
            close(half[name].float(), exact[name], name, 6e-2)


# --- laws -------------------------------------------------------------------------------------------------------


@given(seed=SEEDS, mask=st.lists(st.booleans(), min_size=1, max_size=9), registers=st.integers(1, 4))
def test_registers_stand_behind_the_text(seed, mask, registers):
    x, table = draw(seed, "x", 1, len(mask), 3), draw(seed, "registers", registers, 3)
    real = [x[0, i] for i, m in enumerate(mask) if m]
    wanted = real + [table[i % registers] for i in range(len(real), len(mask))]
    ours = connectors.with_registers(x, torch.tensor([mask]), table)
    assert torch.equal(ours[0], torch.stack(wanted))


@pytest.mark.parametrize("family", ["2.0", "2.3"])
@given(seed=SEEDS, length=st.integers(0, 8))
@settings(max_examples=6)
def test_padding_and_its_side_do_not_matter(family, seed, length):
    """What stands in padding reaches nothing, not even as NaN, and text is where it is by its order alone."""
    cfg = tiny(family)
    params = random_leaves(connectors.param_specs(cfg), seed)
    text = hidden_of(cfg, seed, 1, length)
    filler = torch.full((1, 8 - length, *text.shape[2:]), torch.nan)
    left = connectors.forward(params, cfg, torch.cat([filler, text], 1), padded("left", [length], 8))
    zeros = torch.zeros_like(filler)
    right = connectors.forward(params, cfg, torch.cat([text, zeros], 1), padded("right", [length], 8))
    for name in left:
        assert left[name].isfinite().all()
        close(left[name], right[name], name, 1e-5)


def test_prompts_of_a_batch_are_independent():
    for family in ("2.0", "2.3"):
        cfg = tiny(family)
        params, mask = random_leaves(connectors.param_specs(cfg), 4), padded("left", [3, 8, 1], 8)
        hidden = hidden_of(cfg, 4, 3)
        whole = connectors.forward(params, cfg, hidden, mask)
        for i in range(3):
            alone = connectors.forward(params, cfg, hidden[i : i + 1], mask[i : i + 1])
            for name in whole:
                close(alone[name], whole[name][i : i + 1], name, 1e-5)


def test_kept_features_give_the_same():
    cfg = tiny()
    params, mask, hidden = random_leaves(connectors.param_specs(cfg), 5), padded("left", [3, 8], 8), hidden_of(cfg, 5)
    own = {k: v for k, v in params.items() if "_connector." in k}
    features = connectors.text_features({k: params[k] for k in params.keys() - own.keys()}, cfg, hidden, mask)
    whole = connectors.forward(params, cfg, connectors.stack_layers(hidden.unbind(-1)), mask)
    for name, out in connectors.connect(own, cfg, features, mask.float()).items():
        assert torch.equal(out, whole[name])


@pytest.mark.parametrize("family", ["2.0", "2.3"])
@pytest.mark.parametrize("modality", ["video", "audio"])
def test_one_stream_alone(family, modality):
    both, cfg = tiny(family), tiny(family, modality=modality)
    params, mask, hidden = random_leaves(connectors.param_specs(both), 6), padded("left", [3, 8], 8), hidden_of(both, 6)
    own = {k: params[k] for k in connectors.param_specs(cfg)}
    assert not any(k.startswith("audio" if modality == "video" else "video") for k in own)
    (name, out), = connectors.forward(own, cfg, hidden, mask).items()
    assert name == modality and torch.equal(out, connectors.forward(params, both, hidden, mask)[name])


@pytest.mark.parametrize("family", ["2.0", "2.3"])
def test_fresh_parameters(family):
    """Registers fill [-1, 1); gates that are new change nothing."""
    cfg = tiny(family)
    params = specs.init(connectors.param_specs(cfg), keys.key(0))
    table = params["video_connector.learnable_registers"]
    assert table.min() < -0.5 and table.max() > 0.5 and table.abs().max() <= 1
    mask, hidden = padded("left", [3, 8], 8), hidden_of(cfg, 0)
    closed = dataclasses.replace(cfg, video_gated_attn=False, audio_gated_attn=False)
    without = {k: params[k] for k in connectors.param_specs(closed)}
    for name, out in connectors.forward(params, cfg, hidden, mask).items():
        assert torch.equal(out, connectors.forward(without, closed, hidden, mask)[name])


# --- configs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,count", [("ltx-2-19b", 1_431_475_200), ("ltx-2.3-22b", 3_172_227_584)])
def test_full_configs_key_by_key(name, count):
    cfg = connectors.PRESETS[name]
    with torch.device("meta"):
        theirs = diffusers_model(cfg).state_dict()
    specs.check(theirs, connectors.param_specs(cfg))
    assert num_params(connectors.param_specs(cfg)) == count


@pytest.mark.parametrize("name", connectors.PRESETS)
def test_widths_are_the_transformers(name):
    """The text that comes out is as wide as the transformer of the same name takes it."""
    from nn.ltx2_config import PRESETS

    ours = {s.name: s.dim for s in connectors.PRESETS[name].streams}
    assert ours == {s.name: s.text_dim for s in PRESETS[name].streams}
    assert transformer_specs(PRESETS[name])["transformer_blocks.0.attn2.to_k.weight"].shape[1] == 4096


def test_defaults_are_diffusers():
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

    theirs = inspect.signature(LTX2TextConnectors.__init__).parameters
    ours = {k: v for k, v in connectors.to_json(ConnectorConfig()).items() if k != "_class_name"}
    assert ours == {k: v.default for k, v in theirs.items() if k != "self"}


def test_config_files(tmp_path):
    path, cfg = tmp_path / "config.json", tiny()
    path.write_text(json.dumps(connectors.to_json(cfg)))
    read = lambda: read_config(ConnectorConfig, path, "_class_name", connectors.CLASS_NAME, fixed=connectors.FIXED)
    assert read() == cfg
    path.write_text(json.dumps(connectors.to_json(cfg) | {"video_connector_num_learnable_registers": None}))
    with pytest.raises(UserError, match="video_connector_num_learnable_registers is None, expected int"):
        read()


def test_errors():
    cfg = tiny()
    params, mask = random_leaves(connectors.param_specs(cfg), 0), padded("left", [3, 8], 8)
    hidden = hidden_of(cfg, 0)
    with pytest.raises(UserError, match=r"expected \[B, L, 12, 3\], or the last two flattened"):
        connectors.forward(params, cfg, hidden[:, :, :-1], mask)
    with pytest.raises(UserError, match=r"mask has shape \[2, 7\], the text \[2, 8\]"):
        connectors.forward(params, cfg, hidden, mask[:, :-1])
    with pytest.raises(UserError, match="text of 7 tokens, must be a multiple of 4 registers: nearest 4 or 8"):
        connectors.forward(params, cfg, hidden[:, :-1], mask[:, :-1])
    features = connectors.text_features(params, cfg, hidden, mask)
    with pytest.raises(UserError, match=r"text features are missing\n  - audio \[B, L, 6\]"):
        connectors.connect(params, cfg, {"video": features["video"]}, mask)
    with pytest.raises(UserError, match=r"video features have shape \[2, 8, 6\], expected \[B, L, 16\]"):
        connectors.connect(params, cfg, features | {"video": features["audio"]}, mask)
    with pytest.raises(UserError) as error:
        dataclasses.replace(cfg, rope_type="half", video_hidden_dim=20, audio_connector_num_layers=0)
    for part in ("rope_type is 'half'", "video connector is 16 wide, its features 20", "num_layers must be at least 1"):
        assert part in str(error.value)
