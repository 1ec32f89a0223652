"""The smaller models of official LTX-2 files: public names and headers, literally, and tiny files of the same form."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from ltx2_official_cases import (
    CONFIGS,
    MODULES,
    PRESET,
    PUBLIC_NAMES,
    SECTIONS,
    UPSAMPLER_HEADERS,
    D,
    block_lists,
    part_params,
    release,
    section_of_blocks,
    sparse_file,
    write,
)

from core.checkpoint import LazyLeaf, LazyTree
from core.errors import UserError
from core.specs import specs_of
from core.transforms import apply, invert
from nn import ltx2_official_sections as sections
from nn import ltx2_upsampler as upsampler
from nn.ltx2_config import PRESETS as TRANSFORMERS
from nn.ltx2_names import official_name
from nn.ltx2_official import official_section
from nn.ltx2_official_parts import (
    PARTS,
    from_official_part,
    keys_of_part,
    open_single_part,
    open_upsampler_file,
    to_official_part,
)
from nn.ltx2_specs import param_specs as transformer_specs

FAMILIES = ("2.0", "2.3")
CASES = [(part, family) for part in PARTS for family in FAMILIES]


def faults(error) -> list[str]:
    return str(error.value).split("\n  - ")[1:]


def preset(part, family):
    return PARTS[part].presets[PRESET[part, family]]


def official_shapes(part, cfg, prefix=D):
    """Specs under official names."""
    wanted = MODULES[part].param_specs(cfg)
    return to_official_part(part, cfg, prefix)(wanted).specs


def equal(tree, params):
    read = tree.read()
    assert read.keys() == params.keys()
    assert all(torch.equal(read[k], params[k]) and read[k].dtype == params[k].dtype for k in params)


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part,family", PUBLIC_NAMES)
def test_public_names(part, family):
    names = PARTS[part].names(preset(part, family), D)
    for official, ours in PUBLIC_NAMES[part, family].items():
        assert names[ours] == official


@pytest.mark.parametrize("part,module", [("vae", "vae"), ("audio_vae", "audio_vae")])
def test_names_are_diffusers_converters(part, module):
    """Over every key of LTX-2.0's VAEs; the converter does not know the decoder's further blocks of 2.3."""
    from diffusers.loaders import single_file_utils

    names = PARTS[part].names(preset(part, "2.0"), D)
    theirs = getattr(single_file_utils, f"convert_ltx2_{module}_to_diffusers")({o: k for k, o in names.items()})
    assert theirs == {k: k for k in names}


def test_counts_of_the_public_files():
    """Keys of the parts of a public LTX-2.3 file."""

    def count(part, start):
        return sum(name.startswith(start) for name in official_shapes(part, preset(part, "2.3")))

    preset_audio = official_shapes("audio_vae", preset("audio_vae", "2.0"))
    assert count("vocoder", "vocoder.vocoder.") == 667 and count("vocoder", "vocoder.bwe_generator.") == 557
    assert count("vocoder", "vocoder.mel_stft.") == 3
    assert count("connectors", f"{D}audio_embeddings_connector.") == 129
    assert sum(k.startswith("audio_vae.encoder.") for k in preset_audio) == 44
    assert sum(k.startswith("audio_vae.decoder.") for k in preset_audio) == 56


@pytest.mark.parametrize("part,family", CASES)
@pytest.mark.parametrize("prefix", [D, "diffusion_model.", ""])
def test_official_names_and_back(part, family, prefix):
    """Beside the leaves of every other part; what no model uses is dropped, nothing else changes."""
    cfg, params = CONFIGS[part, family], part_params(part, family)
    bound = to_official_part(part, cfg, prefix)(specs_of(params))
    renamed = apply(params, bound)
    again = apply(renamed, invert(bound))
    beside = {"x.weight": torch.zeros(2), "vae_like.weight": torch.zeros(2)}
    note = f"{PARTS[part].prefix}per_channel_statistics.mean-of-stds_over_std-of-means"
    whole = {**beside, **renamed} | ({note: torch.zeros(2)} if "vae" in part else {})
    assert keys_of_part(part, whole) == set(whole) - set(beside)
    back = apply(whole, from_official_part(part, cfg)(specs_of(whole)))
    for found in (again, back):
        assert found.keys() == params.keys() and all(torch.equal(found[k], params[k]) for k in params)


# --- headers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part,family", SECTIONS)
def test_public_headers_are_the_presets(part, family):
    """But that Lightricks clamps the waveform of 2.3's first generator, and Diffusers' files say null."""
    cfg = preset(part, family)
    found = PARTS[part].read(SECTIONS[part, family], "file", official_shapes(part, cfg))
    if (part, family) == ("vocoder", "2.3"):
        assert found.vocoder.final_act_fn == "clamp"
        found = dataclasses.replace(found, vocoder=dataclasses.replace(found.vocoder, final_act_fn="none"))
    assert found == cfg


@pytest.mark.parametrize("name", UPSAMPLER_HEADERS)
def test_public_upsampler_headers_are_the_presets(name):
    """The scale of an upsampler in time, 1 in its header, means nothing."""
    cfg = sections.upsampler_config(UPSAMPLER_HEADERS[name], "file", {})
    same = upsampler.PRESETS[name]
    scale = cfg.rational_spatial_scale if cfg.temporal_upsample else same.rational_spatial_scale
    assert cfg == dataclasses.replace(same, rational_spatial_scale=scale)


def conv(name, n_in, n_out):
    return {f"{name}.conv.weight": (n_out, n_in, 3, 3, 3), f"{name}.conv.bias": (n_out,)}


def resnets(name, width, count):
    out = {}
    for i in range(count):
        out |= conv(f"{name}.res_blocks.{i}.conv1", width, width) | conv(f"{name}.res_blocks.{i}.conv2", width, width)
    return out


def vae_keys(encoder, decoder, z, base, patch=2):
    """Keys and shapes of the official VAE, block by block: what a change of size makes of channels, and where."""
    cells = {"space": 4, "time": 2, "all": 8}
    out = conv("vae.encoder.conv_in", 3 * patch**2, z) | {
        f"vae.per_channel_statistics.{k}-of-means": (z,) for k in ("mean", "std")
    }
    width = z
    for i, (kind, params) in enumerate(encoder):
        name, params = f"vae.encoder.down_blocks.{i}", {"num_layers": params} if isinstance(params, int) else params
        if kind == "res_x":
            out |= resnets(name, width, params["num_layers"])
        else:
            before, width = width, width * params["multiplier"]
            out |= conv(f"{name}.conv", before, width // cells[kind.split("_")[1]])
    out |= conv("vae.encoder.conv_out", width, z + 1)
    width = base
    for kind, params in decoder:
        width *= params["multiplier"] if kind != "res_x" else 1
    out |= conv("vae.decoder.conv_in", z, width)
    for i, (kind, params) in enumerate(reversed(decoder)):
        name = f"vae.decoder.up_blocks.{i}"
        if kind == "res_x":
            out |= resnets(name, width, params["num_layers"])
        else:
            before, width = width, width // params["multiplier"]
            out |= conv(f"{name}.conv", before, width * cells[kind.split("_")[1]])
    return out | conv("vae.decoder.conv_out", width, 3 * patch**2)


@given(blocks=block_lists())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_any_list_of_blocks_gives_the_official_keys_and_shapes(blocks):
    encoder, decoder, z, base = blocks
    cfg = sections.vae_config(section_of_blocks(*blocks), "file", {})
    assert {k: s.shape for k, s in official_shapes("vae", cfg).items()} == vae_keys(encoder, decoder, z, base)


def vae_section(**changes):
    return {**SECTIONS["vae", "2.3"], **changes}


@pytest.mark.parametrize(
    "part,section,fault",
    [
        ("vae", vae_section(_class_name="CausalDiffusionVAE"), "_class_name is 'CausalDiffusionVAE', only"),
        ("vae", vae_section(norm_layer="group_norm"), "norm_layer is 'group_norm', only 'pixel_norm' is supported"),
        ("vae", vae_section(patch_sizes=4), "unknown field patch_sizes (did you mean 'patch_size'?)"),
        ("vae", vae_section(encoder_blocks=[]), "encoder_blocks is [], expected a list of blocks"),
        ("vae", vae_section(decoder_blocks=[["attn", {}]]), "decoder_blocks[0] is 'attn', only res_x, res_x_y,"),
        ("vae", vae_section(decoder_blocks=[["res_x", {}]]), "decoder_blocks[0]: num_layers is missing"),
        ("vae", vae_section(decoder_blocks=[["res_x", {"num_layers": 0}]]), "num_layers is 0, expected 1 or more"),
        ("vae", vae_section(decoder_blocks=[["compress_all", {"a": 1}]]), "unknown parameter a of compress_all"),
        ("vae", vae_section(decoder_blocks=[["compress_all", {}]]), "decoder_blocks[0] is 'compress_all', expected"),
        ("vae", vae_section(encoder_blocks=[["res_x", 1], ["compress_all", {}]]), "encoder_blocks ends with"),
        ("vae", vae_section(encoder_base_channels=64), "encoder_base_channels is 64, must equal latent_channels 128"),
        ("vae", vae_section(latent_channels="128"), "latent_channels is '128', expected int"),
        ("vae", vae_section(decoder_blocks=[["res_x", 1], ["compress_time", {}], ["res_x", 1]]), "the decoder one 2"),
        ("audio_vae", {"model": {"params": {"ddconfig": {"norm_type": "group"}}}}, "norm_type is 'group', only"),
        ("audio_vae", {"model": {"params": {"ddconfig": []}}}, "model.params.ddconfig is [], expected an object"),
        ("audio_vae", {"model": {"params": {"sampling_rate": "16000"}}}, "sampling_rate is '16000', expected int"),
        ("audio_vae", {"preprocessing": {"stft": {"causal": False}}}, "stft.causal is False, only True is supported"),
        ("audio_vae", {"preprocessing": {"mel": {"mel_fmax": 7600}}}, "mel.mel_fmax is 7600, only 8000.0 is supported"),
        ("vocoder", {"resblock": "2"}, "resblock is '2', must be one of 1, AMP1"),
        ("vocoder", {"stereo": False}, "stereo is False, only True is supported"),
        ("vocoder", {"upsample_rate": [2]}, "unknown field upsample_rate (did you mean 'upsample_rates'?)"),
        ("vocoder", {"vocoder": {}, "bwe": {}}, "bwe.input_sampling_rate is missing"),
        ("connectors", {"connector_ff_bias": False}, "connector_ff_bias is False, only True is supported"),
        ("connectors", {"connector_num_layer": 3}, "unknown field connector_num_layer (did you mean 'connector_num_la"),
        ("connectors", {"connector_num_layers": "3"}, "video_connector_num_layers is '3', expected int"),
        ("connectors", {"connector_positional_embedding_max_pos": 9}, "max_pos is 9, expected 1 number"),
    ],
)
def test_bad_sections_name_file_and_field(part, section, fault):
    with pytest.raises(UserError) as error:
        PARTS[part].read(section, "x.safetensors", {})
    assert "x.safetensors" in str(error.value) and fault in str(error.value)


def test_all_faults_of_a_section_at_once():
    with pytest.raises(UserError) as error:
        sections.vae_config(vae_section(dims=2, use_quant_conv=True, encoder_blocks=3), "file", {})
    assert faults(error) == [
        "dims is 2, only 3 is supported",
        "use_quant_conv is True, only False is supported",
        "encoder_blocks is 3, expected a list of blocks",
    ]


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part,family", CASES)
def test_a_part_of_a_single_file_opens(tmp_path, part, family):
    leaves, head = release(family)
    tree, cfg = open_single_part(write(tmp_path / "x.safetensors", leaves, head), part)
    assert cfg == CONFIGS[part, family]
    equal(tree, part_params(part, family))


@pytest.mark.parametrize("part,family", PRESET)
def test_without_a_header_keys_and_shapes_decide_between_presets(tmp_path, part, family):
    shapes = official_shapes(part, preset(part, family))
    path = tmp_path / "x.safetensors"
    sparse_file(path, {k: ("BF16", s.shape) for k, s in shapes.items()}, None)
    tree, cfg = open_single_part(path, part)
    assert cfg == preset(part, family) and set(tree) == set(MODULES[part].param_specs(cfg))


def test_without_a_header_no_preset_fits(tmp_path):
    leaves, _ = release("2.0")
    path = write(tmp_path / "x.safetensors", leaves, None)
    with pytest.raises(UserError, match="its header has no section vocoder, and no preset fits:") as error:
        open_single_part(path, "vocoder")
    assert [fault.split(":")[0] for fault in faults(error)] == ["ltx-2", "ltx-2.3"]
    tree, _ = open_single_part(path, "vocoder", config=CONFIGS["vocoder", "2.0"])
    equal(tree, part_params("vocoder", "2.0"))


def test_the_others_are_never_read():
    leaves, reads = release("2.3")[0], []

    def leaf(key, value):
        return LazyLeaf(tuple(value.shape), value.dtype, lambda memo: reads.append(key) or value)

    tree = LazyTree({k: leaf(k, v) for k, v in leaves.items()}, {})
    for part in PARTS:
        reads.clear()
        apply(tree, from_official_part(part, CONFIGS[part, "2.3"])(tree.specs)).read()
        assert set(reads) == keys_of_part(part, leaves) and len(reads) == len(set(reads))


def test_what_does_not_fit_is_told_at_once(tmp_path):
    leaves, head = release("2.3")
    wrong = dict(leaves)
    wrong["vae.decoder.conv_on.conv.bias"] = wrong.pop("vae.decoder.conv_in.conv.bias")
    del wrong["vae.encoder.conv_out.conv.weight"]
    path = write(tmp_path / "x.safetensors", wrong, head)
    with pytest.raises(UserError) as error:
        open_single_part(path, "vae")
    assert str(path) in str(error.value)
    found = sorted(faults(error))
    assert found[:2] == ["missing vae.decoder.conv_in.conv.bias", "missing vae.encoder.conv_out.conv.weight"]
    assert len(found) == 3 and found[2].startswith("unexpected vae.decoder.conv_on.conv.bias (did you mean")
    wrong = {**leaves, "vae.encoder.conv_in.conv.bias": torch.zeros(3)}
    with pytest.raises(UserError, match=r"encoder.conv_in.conv.bias has shape \[3\], expected \[8\]"):
        open_single_part(write(tmp_path / "y.safetensors", wrong, head), "vae")


def test_other_files_are_refused(tmp_path):
    leaves, head = release("2.3")
    alone = {k: v for k, v in leaves.items() if not k.startswith("vae.")}
    path = write(tmp_path / "x.safetensors", alone, head)
    with pytest.raises(UserError, match="holds no vae: no key begins with vae."):
        open_single_part(path, "vae")
    with pytest.raises(UserError, match="part is 'text', must be one of vae, audio_vae, vocoder, connectors"):
        open_single_part(path, "text")
    for text, fault in (("{", "is not JSON"), ("[]", "is list, expected an object"), ('{"vae": 3}', "int, expected")):
        path = tmp_path / "y.safetensors"
        sparse_file(path, {"vae.a": ("F32", (1,))}, {"config": text})
        with pytest.raises(UserError, match=fault):
            open_single_part(path, "vae")


# --- upsamplers ---------------------------------------------------------------------------------------------------

TINY_UPSAMPLERS = [
    {"mid_channels": 32, "rational_resampler": True, "spatial_scale": 1.5},
    {"mid_channels": 32},
    {"mid_channels": 32, "temporal_upsample": True, "spatial_upsample": False, "rational_resampler": True},
]


@pytest.mark.parametrize("changes", TINY_UPSAMPLERS)
def test_an_upsampler_file_opens(tmp_path, changes):
    head = {"_class_name": "LatentUpsampler", "in_channels": 4, "num_blocks_per_stage": 1, **changes}
    cfg = sections.upsampler_config(head, "file", {})
    assert cfg.mid_channels == 32 and cfg.use_rational_resampler == changes.get("rational_resampler", False)
    params = {k: torch.randn(s.shape).bfloat16() for k, s in upsampler.param_specs(cfg).items()}
    path = write(tmp_path / "x.safetensors", params, head)
    tree, found = open_upsampler_file(path)
    assert found == cfg
    equal(tree, params)
    params["upsampler.1.weight"] = params.pop("final_conv.bias")
    with pytest.raises(UserError) as error:
        open_upsampler_file(write(path, params, head))
    assert faults(error)[0].startswith("missing final_conv.bias") and "upsampler.1.weight" in faults(error)[1]


@pytest.mark.parametrize("name", upsampler.PRESETS)
def test_an_upsampler_without_a_header(tmp_path, name):
    shapes, path = upsampler.param_specs(upsampler.PRESETS[name]), tmp_path / "x.safetensors"
    sparse_file(path, {k: ("BF16", s.shape) for k, s in shapes.items()}, None)
    assert open_upsampler_file(path)[1] == upsampler.PRESETS[name]


def test_other_upsampler_files_are_refused(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": torch.zeros(1)}, None)
    with pytest.raises(UserError, match="its header has no config, and no preset fits:"):
        open_upsampler_file(path)
    head = {"_class_name": "LTX2LatentUpsamplerModel", "rational_spatial_scale": 2.0}
    with pytest.raises(UserError, match="_class_name is 'LTX2LatentUpsamplerModel', only 'LatentUpsampler'"):
        open_upsampler_file(write(path, {"a": torch.zeros(1)}, head))


# --- large files --------------------------------------------------------------------------------------------------

LARGE = """
import sys
from nn.ltx2_formats import open_single_file
from nn.ltx2_official_parts import open_single_part

def peak():  # of this program, while ru_maxrss counts what its parent had when it was started too
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024

path, before, trees = sys.argv[1], peak(), {}
trees["transformer"], _ = open_single_file(path)
for part in ("vae", "audio_vae", "vocoder", "connectors"):
    trees[part], _ = open_single_part(path, part)
read = 0
for tree in trees.values():
    last = {}  # of every stack, the last layer's leaf
    for key in tree:
        last[".".join("*" if part.isdigit() else part for part in key.split("."))] = key
    for key in last.values():
        if key.endswith("text_proj_in.weight"):  # 1.4 GB: by rows
            read += tree[key].read_rows(0, 8).numel()
        else:
            read += tree[key].read().numel()
print(sum(len(tree) for tree in trees.values()), read, peak() - before)
"""


def test_a_whole_release_takes_no_memory(tmp_path):
    """The 19B release at full size as a sparse file: everything is opened, and one leaf of each stack read.

    Alone in a process, whose peak memory grows by the largest such leaf (128 MiB) and the header's strings.
    """
    cfg = TRANSFORMERS["ltx-2-19b"]
    leaves = {
        D + official_name(k): ("F32" if s.keep_fp32 else "BF16", s.shape) for k, s in transformer_specs(cfg).items()
    }
    for part in PARTS:
        leaves |= {k: ("BF16", s.shape) for k, s in official_shapes(part, preset(part, "2.0")).items()}
    path = tmp_path / "ltx-2-19b-dev.safetensors"
    head = {part: SECTIONS[part, "2.0"] for part in PARTS if part != "connectors"}
    size = sparse_file(path, leaves, {"config": json.dumps({"transformer": official_section(cfg), **head})})
    assert size > 36 * 2**30
    done = subprocess.run([sys.executable, "-c", LARGE, str(path)], capture_output=True, text=True, timeout=300)
    path.unlink()
    assert done.returncode == 0, done.stderr
    keys, read, grown = map(int, done.stdout.split())
    assert keys == len(leaves) and read > 3 * 10**8
    assert grown < 600 * 2**20
