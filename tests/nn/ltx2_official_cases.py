"""Official LTX-2 files: the public headers and names, literally, and tiny files of the same form."""

import json
import struct

import torch
from hypothesis import strategies as st
from ltx2_cases import random_params, tiny_config
from ltx2_side_cases import random_leaves
from safetensors.torch import save_file

from nn import ltx2_audio, ltx2_connectors, ltx2_vae, ltx2_vocoder
from nn.ltx2_audio import AudioVaeConfig
from nn.ltx2_connectors import ConnectorConfig
from nn.ltx2_names import official_name
from nn.ltx2_official import official_section
from nn.ltx2_official_parts import PARTS
from nn.ltx2_vae_config import DOWN_BLOCK, LTX2VaeConfig
from nn.ltx2_vocoder_config import BweVocoderConfig, VocoderConfig

MODULES = {"vae": ltx2_vae, "audio_vae": ltx2_audio, "vocoder": ltx2_vocoder, "connectors": ltx2_connectors}

# --- public names: {official: ours} -----------------------------------------------------------------------------

D = "model.diffusion_model."
PUBLIC_NAMES = {
    ("vae", "2.0"): {
        "vae.per_channel_statistics.mean-of-means": "latents_mean",
        "vae.per_channel_statistics.std-of-means": "latents_std",
        "vae.encoder.conv_in.conv.weight": "encoder.conv_in.conv.weight",
        "vae.encoder.conv_out.conv.bias": "encoder.conv_out.conv.bias",
        "vae.encoder.down_blocks.0.res_blocks.3.conv1.conv.weight": "encoder.down_blocks.0.resnets.3.conv1.conv.weight",
        "vae.encoder.down_blocks.1.conv.conv.weight": "encoder.down_blocks.0.downsamplers.0.conv.conv.weight",
        "vae.encoder.down_blocks.7.conv.conv.bias": "encoder.down_blocks.3.downsamplers.0.conv.conv.bias",
        "vae.encoder.down_blocks.8.res_blocks.1.conv2.conv.bias": "encoder.mid_block.resnets.1.conv2.conv.bias",
        "vae.decoder.conv_in.conv.weight": "decoder.conv_in.conv.weight",
        "vae.decoder.up_blocks.0.res_blocks.0.conv1.conv.weight": "decoder.mid_block.resnets.0.conv1.conv.weight",
        "vae.decoder.up_blocks.1.conv.conv.weight": "decoder.up_blocks.0.upsamplers.0.conv.conv.weight",
        "vae.decoder.up_blocks.6.res_blocks.4.conv2.conv.bias": "decoder.up_blocks.2.resnets.4.conv2.conv.bias",
    },
    ("vae", "2.3"): {
        "vae.encoder.down_blocks.4.res_blocks.3.conv1.conv.bias": "encoder.down_blocks.2.resnets.3.conv1.conv.bias",
        "vae.encoder.down_blocks.8.res_blocks.0.conv2.conv.weight": "encoder.mid_block.resnets.0.conv2.conv.weight",
        "vae.decoder.up_blocks.2.res_blocks.1.conv2.conv.weight": "decoder.up_blocks.0.resnets.1.conv2.conv.weight",
        "vae.decoder.up_blocks.7.conv.conv.bias": "decoder.up_blocks.3.upsamplers.0.conv.conv.bias",
        "vae.decoder.up_blocks.8.res_blocks.3.conv1.conv.weight": "decoder.up_blocks.3.resnets.3.conv1.conv.weight",
        "vae.decoder.conv_out.conv.weight": "decoder.conv_out.conv.weight",
    },
    ("audio_vae", "2.0"): {
        "audio_vae.per_channel_statistics.mean-of-means": "latents_mean",
        "audio_vae.per_channel_statistics.std-of-means": "latents_std",
        "audio_vae.encoder.conv_in.conv.weight": "encoder.conv_in.conv.weight",
        "audio_vae.encoder.down.0.downsample.conv.weight": "encoder.down.0.downsample.conv.weight",
        "audio_vae.encoder.mid.block_1.conv1.conv.bias": "encoder.mid.block_1.conv1.conv.bias",
        "audio_vae.decoder.mid.block_2.conv2.conv.weight": "decoder.mid.block_2.conv2.conv.weight",
        "audio_vae.decoder.up.0.block.0.nin_shortcut.conv.weight": "decoder.up.0.block.0.nin_shortcut.conv.weight",
        "audio_vae.decoder.up.1.upsample.conv.conv.weight": "decoder.up.1.upsample.conv.conv.weight",
        "audio_vae.decoder.conv_out.conv.bias": "decoder.conv_out.conv.bias",
    },
    ("vocoder", "2.0"): {
        "vocoder.conv_pre.weight": "conv_in.weight",
        "vocoder.ups.0.weight": "upsamplers.0.weight",
        "vocoder.ups.4.bias": "upsamplers.4.bias",
        "vocoder.resblocks.14.convs1.2.weight": "resnets.14.convs1.2.weight",
        "vocoder.resblocks.0.convs2.0.bias": "resnets.0.convs2.0.bias",
        "vocoder.conv_post.bias": "conv_out.bias",
    },
    ("vocoder", "2.3"): {
        "vocoder.vocoder.conv_pre.weight": "vocoder.conv_in.weight",
        "vocoder.vocoder.ups.5.weight": "vocoder.upsamplers.5.weight",
        "vocoder.vocoder.resblocks.17.convs1.0.weight": "vocoder.resnets.17.convs1.0.weight",
        "vocoder.vocoder.resblocks.0.acts1.2.act.alpha": "vocoder.resnets.0.acts1.2.act.alpha",
        "vocoder.vocoder.resblocks.0.acts2.1.upsample.filter": "vocoder.resnets.0.acts2.1.upsample.filter",
        "vocoder.vocoder.resblocks.0.acts2.1.downsample.lowpass.filter": "vocoder.resnets.0.acts2.1.downsample.filter",
        "vocoder.vocoder.act_post.act.beta": "vocoder.act_out.act.beta",
        "vocoder.vocoder.act_post.upsample.filter": "vocoder.act_out.upsample.filter",
        "vocoder.vocoder.act_post.downsample.lowpass.filter": "vocoder.act_out.downsample.filter",
        "vocoder.vocoder.conv_post.weight": "vocoder.conv_out.weight",
        "vocoder.bwe_generator.conv_pre.bias": "bwe_generator.conv_in.bias",
        "vocoder.bwe_generator.ups.0.weight": "bwe_generator.upsamplers.0.weight",
        "vocoder.bwe_generator.act_post.act.alpha": "bwe_generator.act_out.act.alpha",
        "vocoder.mel_stft.mel_basis": "mel_stft.mel_basis",
        "vocoder.mel_stft.stft_fn.forward_basis": "mel_stft.stft_fn.forward_basis",
        "vocoder.mel_stft.stft_fn.inverse_basis": "mel_stft.stft_fn.inverse_basis",
    },
    ("connectors", "2.0"): {
        "text_embedding_projection.aggregate_embed.weight": "text_proj_in.weight",
        f"{D}video_embeddings_connector.learnable_registers": "video_connector.learnable_registers",
        f"{D}video_embeddings_connector.transformer_1d_blocks.0.attn1.to_q.weight":
            "video_connector.transformer_blocks.0.attn1.to_q.weight",
        f"{D}audio_embeddings_connector.transformer_1d_blocks.0.attn1.q_norm.weight":
            "audio_connector.transformer_blocks.0.attn1.norm_q.weight",
        f"{D}audio_embeddings_connector.transformer_1d_blocks.1.attn1.k_norm.weight":
            "audio_connector.transformer_blocks.1.attn1.norm_k.weight",
        f"{D}audio_embeddings_connector.transformer_1d_blocks.0.attn1.to_out.0.bias":
            "audio_connector.transformer_blocks.0.attn1.to_out.0.bias",
    },
    ("connectors", "2.3"): {
        "text_embedding_projection.video_aggregate_embed.weight": "video_text_proj_in.weight",
        "text_embedding_projection.audio_aggregate_embed.bias": "audio_text_proj_in.bias",
        f"{D}video_embeddings_connector.transformer_1d_blocks.7.ff.net.2.weight":
            "video_connector.transformer_blocks.7.ff.net.2.weight",
        f"{D}video_embeddings_connector.transformer_1d_blocks.7.ff.net.0.proj.bias":
            "video_connector.transformer_blocks.7.ff.net.0.proj.bias",
        f"{D}audio_embeddings_connector.transformer_1d_blocks.7.attn1.to_gate_logits.weight":
            "audio_connector.transformer_blocks.7.attn1.to_gate_logits.weight",
    },
}  # fmt: skip

# --- public headers ---------------------------------------------------------------------------------------------

BLOCKS_20 = {
    "encoder_blocks": [
        ["res_x", {"num_layers": 4}], ["compress_space_res", {"multiplier": 2}], ["res_x", {"num_layers": 6}],
        ["compress_time_res", {"multiplier": 2}], ["res_x", {"num_layers": 6}], ["compress_all_res", {"multiplier": 2}],
        ["res_x", {"num_layers": 2}], ["compress_all_res", {"multiplier": 2}], ["res_x", {"num_layers": 2}],
    ],
    "decoder_blocks": [
        ["res_x", {"num_layers": 5, "inject_noise": False}], ["compress_all", {"residual": True, "multiplier": 2}],
        ["res_x", {"num_layers": 5, "inject_noise": False}], ["compress_all", {"residual": True, "multiplier": 2}],
        ["res_x", {"num_layers": 5, "inject_noise": False}], ["compress_all", {"residual": True, "multiplier": 2}],
        ["res_x", {"num_layers": 5, "inject_noise": False}],
    ],
}  # fmt: skip
BLOCKS_23 = {
    "encoder_blocks": [
        ["res_x", {"num_layers": 4}], ["compress_space_res", {"multiplier": 2}], ["res_x", {"num_layers": 6}],
        ["compress_time_res", {"multiplier": 2}], ["res_x", {"num_layers": 4}], ["compress_all_res", {"multiplier": 2}],
        ["res_x", {"num_layers": 2}], ["compress_all_res", {"multiplier": 1}], ["res_x", {"num_layers": 2}],
    ],
    "decoder_blocks": [
        ["res_x", {"num_layers": 4}], ["compress_space", {"multiplier": 2}], ["res_x", {"num_layers": 6}],
        ["compress_time", {"multiplier": 2}], ["res_x", {"num_layers": 4}], ["compress_all", {"multiplier": 1}],
        ["res_x", {"num_layers": 2}], ["compress_all", {"multiplier": 2}], ["res_x", {"num_layers": 2}],
    ],
}  # fmt: skip
VAE_COMMON = {
    "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128,
    "scaling_factor": 1.0, "norm_layer": "pixel_norm", "patch_size": 4, "latent_log_var": "uniform",
    "use_quant_conv": False, "causal_decoder": False, "timestep_conditioning": False,
    "normalize_latent_channels": False,
}  # fmt: skip
AUDIO = {
    "model": {"params": {
        "ddconfig": {
            "double_z": True, "mel_bins": 64, "z_channels": 8, "resolution": 256, "downsample_time": False,
            "in_channels": 2, "out_ch": 2, "ch": 128, "ch_mult": [1, 2, 4], "num_res_blocks": 2, "attn_resolutions": [],
            "dropout": 0.0, "mid_block_add_attention": False, "norm_type": "pixel", "causality_axis": "height",
        },
        "sampling_rate": 16000,
    }},
    "preprocessing": {
        "audio": {"sampling_rate": 16000, "max_wav_value": 32768.0, "duration": 5.12, "stereo": True,
                  "causal_padding": 3},
        "stft": {"filter_length": 1024, "hop_length": 160, "win_length": 1024, "causal": True},
        "mel": {"n_mel_channels": 64, "mel_fmin": 0, "mel_fmax": 8000},
    },
}  # fmt: skip
AMP = {
    "resblock": "AMP1", "resblock_kernel_sizes": [3, 7, 11], "stereo": True, "use_tanh_at_final": False,
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]], "activation": "snakebeta", "use_bias_at_final": False,
}  # fmt: skip
SECTIONS = {
    ("vae", "2.0"): {**VAE_COMMON, **BLOCKS_20},
    ("vae", "2.3"): {
        **VAE_COMMON, **BLOCKS_23, "encoder_base_channels": 128, "decoder_base_channels": 128,
        "spatial_padding_mode": "zeros",
    },
    ("audio_vae", "2.0"): AUDIO,
    ("vocoder", "2.0"): {
        "resblock": "1", "stereo": True, "upsample_initial_channel": 1024, "upsample_rates": [6, 5, 2, 2, 2],
        "upsample_kernel_sizes": [16, 15, 8, 4, 4], "resblock_kernel_sizes": [3, 7, 11],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
    },
    ("vocoder", "2.3"): {
        "vocoder": {**AMP, "upsample_initial_channel": 1536, "upsample_rates": [5, 2, 2, 2, 2, 2],
                    "upsample_kernel_sizes": [11, 4, 4, 4, 4, 4]},
        "bwe": {**AMP, "upsample_initial_channel": 512, "upsample_rates": [6, 5, 2, 2, 2],
                "upsample_kernel_sizes": [12, 11, 4, 4, 4], "apply_final_activation": False,
                "input_sampling_rate": 16000, "output_sampling_rate": 48000, "hop_length": 80, "n_fft": 512,
                "win_size": 512, "num_mels": 64},
    },
    ("connectors", "2.0"): {
        "caption_channels": 3840, "use_embeddings_connector": True, "rope_type": "split",
        "frequencies_precision": "float64", "num_layers": 48,
    },
    ("connectors", "2.3"): {
        "caption_channels": 3840, "use_embeddings_connector": True, "connector_attention_head_dim": 128,
        "connector_num_attention_heads": 32, "connector_num_layers": 8, "connector_num_learnable_registers": 128,
        "connector_positional_embedding_max_pos": [4096], "connector_norm_output": True,
        "connector_apply_gated_attention": True, "caption_projection_first_linear": False,
        "caption_projection_second_linear": False, "caption_proj_input_norm": False,
        "connector_learnable_registers_std": 1, "caption_proj_before_connector": True,
        "audio_connector_attention_head_dim": 64, "audio_connector_num_attention_heads": 32,
        "text_encoder_norm_type": "per_token_rms", "rope_type": "split", "frequencies_precision": "float64",
    },
}  # fmt: skip
UPSAMPLER = {"_class_name": "LatentUpsampler", "in_channels": 128, "num_blocks_per_stage": 4, "dims": 3}
UPSAMPLER_HEADERS = {
    "ltx-2-spatial-x2": {
        **UPSAMPLER, "mid_channels": 1024, "spatial_upsample": True, "temporal_upsample": False, "spatial_scale": 2.0,
        "rational_resampler": True,
    },
    "ltx-2.3-spatial-x2": {
        **UPSAMPLER, "mid_channels": 1024, "spatial_upsample": True, "temporal_upsample": False, "spatial_scale": 2.0,
        "rational_resampler": False,
    },
    "ltx-2.3-spatial-x1.5": {
        **UPSAMPLER, "mid_channels": 1024, "spatial_upsample": True, "temporal_upsample": False, "spatial_scale": 1.5,
        "rational_resampler": True,
    },
    "ltx-2-temporal-x2": {
        **UPSAMPLER, "mid_channels": 512, "spatial_upsample": False, "temporal_upsample": True, "spatial_scale": 1.0,
        "rational_resampler": True,
    },
}  # fmt: skip
PRESET = {  # of each part and family
    ("vae", "2.0"): "ltx-2-vae", ("vae", "2.3"): "ltx-2.3-vae", ("audio_vae", "2.0"): "ltx-2",
    ("vocoder", "2.0"): "ltx-2", ("vocoder", "2.3"): "ltx-2.3", ("connectors", "2.0"): "ltx-2-19b",
    ("connectors", "2.3"): "ltx-2.3-22b",
}  # fmt: skip

# --- tiny models and their sections -----------------------------------------------------------------------------

RATIOS = {"decoder_causal": False, "patch_size": 2, "latent_channels": 8}
SNAKE = {"in_channels": 6, "hidden_channels": 8, "act_fn": "snakebeta", "antialias": True, "final_bias": False}
SMALL = {"resnet_kernel_sizes": (3,), "resnet_dilations": ((1, 3),)}
CONFIGS = {
    ("vae", "2.0"): LTX2VaeConfig(
        block_out_channels=(16,), down_block_types=(DOWN_BLOCK,), layers_per_block=(2, 1),
        decoder_layers_per_block=(1, 2), decoder_block_out_channels=(16,), spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,), decoder_inject_noise=(False, True),
        downsample_type=("spatiotemporal",), upsample_type=("spatiotemporal",), upsample_residual=(True,),
        upsample_factor=(2,), timestep_conditioning=True, spatial_compression_ratio=4,
        temporal_compression_ratio=2, **RATIOS,
    ),
    ("vae", "2.3"): LTX2VaeConfig(
        block_out_channels=(16, 16), down_block_types=(DOWN_BLOCK,) * 2, layers_per_block=(1, 2, 1),
        decoder_layers_per_block=(1, 2, 1), decoder_block_out_channels=(16, 16), spatio_temporal_scaling=(True,) * 2,
        decoder_spatio_temporal_scaling=(True,) * 2, decoder_inject_noise=(False,) * 3,
        downsample_type=("spatial", "temporal"), upsample_type=("temporal", "spatial"), upsample_residual=(False,) * 2,
        upsample_factor=(2, 1), decoder_spatial_padding_mode="zeros", spatial_compression_ratio=4,
        temporal_compression_ratio=2, **RATIOS,
    ),
    ("audio_vae", "2.0"): AudioVaeConfig(base_channels=4, latent_channels=1, mel_bins=16, num_res_blocks=1),
    ("vocoder", "2.0"): VocoderConfig(
        in_channels=6, hidden_channels=8, upsample_kernel_sizes=(4, 4), upsample_factors=(2, 2), **SMALL
    ),
    ("vocoder", "2.3"): BweVocoderConfig(
        VocoderConfig(upsample_kernel_sizes=(4,), upsample_factors=(2,), final_act_fn="clamp", output_sampling_rate=100,
                      **SNAKE, **SMALL),
        VocoderConfig(upsample_kernel_sizes=(4, 4), upsample_factors=(2, 2), final_act_fn="none",
                      output_sampling_rate=200, **SNAKE, **SMALL),
        filter_length=16, window_length=16, hop_length=2, num_mel_channels=3,
    ),
    ("connectors", "2.0"): ConnectorConfig(
        caption_channels=12, text_proj_in_factor=3, video_connector_num_attention_heads=3,
        video_connector_attention_head_dim=4, audio_connector_num_attention_heads=3,
        audio_connector_attention_head_dim=4, video_connector_num_layers=1, audio_connector_num_layers=1,
        connector_rope_base_seq_len=32, rope_type="split",
    ),
    ("connectors", "2.3"): ConnectorConfig(
        caption_channels=12, text_proj_in_factor=3, video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8, audio_connector_num_attention_heads=3,
        audio_connector_attention_head_dim=2, video_connector_num_layers=1, audio_connector_num_layers=2,
        video_connector_num_learnable_registers=4, audio_connector_num_learnable_registers=4, video_gated_attn=True,
        audio_gated_attn=True, rope_type="split",
        per_modality_projections=True, video_hidden_dim=16, audio_hidden_dim=6, proj_bias=True,
    ),
}  # fmt: skip
CONFIGS["audio_vae", "2.3"] = CONFIGS["audio_vae", "2.0"]
_AMP = {**AMP, "upsample_initial_channel": 8, "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]]}
TINY = {
    ("vae", "2.0"): {  # without an entry for timesteps: the keys tell
        **{k: v for k, v in VAE_COMMON.items() if k != "timestep_conditioning"}, "latent_channels": 8, "patch_size": 2,
        "decoder_base_channels": 8,
        "encoder_blocks": [["res_x", 2], ["compress_all_res", {"multiplier": 2}], ["res_x", {"num_layers": 1}]],
        "decoder_blocks": [["res_x", 1], ["compress_all", {"residual": True, "multiplier": 2}],
                           ["res_x", {"num_layers": 2, "inject_noise": True}]],
    },
    ("vae", "2.3"): {
        **VAE_COMMON, "latent_channels": 8, "patch_size": 2, "decoder_base_channels": 8,
        "spatial_padding_mode": "zeros",
        "encoder_blocks": [["res_x", 1], ["compress_space_res", {}], ["res_x", 2],
                           ["compress_time_res", {"multiplier": 1}], ["res_x", 1]],
        "decoder_blocks": [["res_x", 1], ["compress_space", {"multiplier": 2}], ["res_x", 2], ["compress_time", {}],
                           ["res_x", 1]],
    },
    ("audio_vae", "2.0"): {
        "model": {"params": {
            "ddconfig": {"ch": 4, "z_channels": 1, "mel_bins": 16, "num_res_blocks": 1}, "sampling_rate": 16000,
        }},
        "preprocessing": {"mel": {"n_mel_channels": 16}},
    },
    ("vocoder", "2.0"): {
        "upsample_initial_channel": 8, "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4],
        "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
    },
    ("vocoder", "2.3"): {
        "vocoder": {**_AMP, "upsample_rates": [2], "upsample_kernel_sizes": [4]},
        "bwe": {**_AMP, "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4], "input_sampling_rate": 100,
                "output_sampling_rate": 200, "hop_length": 2, "n_fft": 16, "num_mels": 3},
    },
    ("connectors", "2.0"): {
        "caption_channels": 12, "connector_num_attention_heads": 3, "connector_attention_head_dim": 4,
        "connector_num_layers": 1, "connector_positional_embedding_max_pos": [32], "frequencies_precision": "float64",
    },
    ("connectors", "2.3"): {
        **SECTIONS["connectors", "2.3"], "caption_channels": 12, "connector_num_attention_heads": 2,
        "connector_attention_head_dim": 8, "connector_num_layers": 1, "connector_num_learnable_registers": 4,
        "audio_connector_num_attention_heads": 3, "audio_connector_attention_head_dim": 2,
        "audio_connector_num_layers": 2,
    },
}  # fmt: skip
TINY["audio_vae", "2.3"] = TINY["audio_vae", "2.0"]


@st.composite
def block_lists(draw):
    """`(encoder_blocks, decoder_blocks, latent channels, base)` with the same changes of size both ways."""
    sizes = draw(st.lists(st.sampled_from(["space", "time", "all"]), min_size=1, max_size=3))
    count = st.integers(1, 2)
    encoder, decoder = [], []
    for size in sizes:
        encoder += [["res_x", draw(count)], [f"compress_{size}_res", {"multiplier": draw(count)}]]
        decoder += [["res_x", {"num_layers": draw(count)}], [f"compress_{size}", {"multiplier": draw(count)}]]
        if draw(st.booleans()):  # a block without a change of size
            encoder += [["res_x", draw(count)]]
    middle = [["res_x", {"num_layers": draw(count)}]]
    return encoder + middle, decoder + middle, draw(st.sampled_from([8, 16])), draw(st.sampled_from([8, 16]))


def section_of_blocks(encoder, decoder, z, base):
    """A section `vae` with these lists of blocks."""
    return {
        **VAE_COMMON, "latent_channels": z, "patch_size": 2, "decoder_base_channels": base, "encoder_blocks": encoder,
        "decoder_blocks": decoder,
    }  # fmt: skip


def part_params(part, family):
    """Random leaves of a tiny part under our names, bfloat16 but for its statistics."""
    wanted = MODULES[part].param_specs(CONFIGS[part, family])
    return {k: v if k.startswith("latents_") else v.bfloat16() for k, v in random_leaves(wanted, 0).items()}


def transformer_config(family):
    """The tiny transformer of a release; its text is as wide as the connectors make it."""
    return tiny_config(family=family, perturbed_attn=True, caption_channels=12)


def release(family):
    """`(leaves under official names, sections)` of a tiny single file with everything in it."""
    cfg = transformer_config(family)
    leaves = {D + official_name(k): v for k, v in random_params(cfg, 0).items()}
    for part in PARTS:
        names = PARTS[part].names(CONFIGS[part, family], D)
        leaves |= {names[k]: v for k, v in part_params(part, family).items()}
    head = {part: TINY[part, family] for part in PARTS if part != "connectors"}
    transformer = {**TINY["connectors", family], **official_section(cfg), "caption_channels": 12}
    return leaves, {"transformer": transformer, **head, "scheduler": {"_class_name": "RectifiedFlowScheduler"}}


def write(path, leaves, head):
    """A safetensors file with the config `head` in its header, or without one for None."""
    metadata = None if head is None else {"config": json.dumps(head)}
    save_file({k: v.contiguous() for k, v in leaves.items()}, path, metadata=metadata)
    return path


def sparse_file(path, leaves, metadata):
    """A safetensors file of zeros that takes no disk: only the header is written."""
    sizes, header, at = {"BF16": 2, "F32": 4}, {"__metadata__": metadata} if metadata else {}, 0
    for key, (kind, shape) in leaves.items():
        count = sizes[kind] * torch.Size(shape).numel()
        header[key] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + count]}
        at += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return at
