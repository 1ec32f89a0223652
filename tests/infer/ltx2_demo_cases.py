"""Tiny random LTX-2 pipelines with the demos' stand-ins for the models around the transformer."""

import torch

from core import keys
from infer.folder import with_weights
from infer.ltx2_folder import LTX2Defaults, open_ltx2, save_ltx2
from infer.ltx2_generate import LTX2Sampling
from nn import mel_codec, patch_codec, text_hash
from nn.ltx2_config import LTX2Config
from nn.ltx2_specs import param_specs

CFG = LTX2Config(
    num_layers=2, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, in_channels=8, out_channels=8,
    vae_scale_factors=(4, 8, 8), audio_num_attention_heads=2, audio_attention_head_dim=6, audio_cross_attention_dim=12,
    audio_in_channels=16, audio_out_channels=16, caption_channels=12, rope_type="split",
)  # fmt: skip
FPS, FRAMES, HEIGHT, WIDTH = 25.0, 9, 16, 32
PLAIN = LTX2Sampling(FRAMES, HEIGHT, WIDTH, fps=FPS, steps=3)


def random_params(cfg):
    return {
        k: keys.normal(keys.fold_in(keys.key(3), k), s.shape) * (0.4 / max(1, s.shape[-1]) ** 0.5) + ("norm" in k)
        for k, s in param_specs(cfg).items()
    }


def make_parts(folder):
    """Folders of the stand-ins, by the names of a pipeline's parts."""
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 255, (17, 32, 64, 3), generator=generator, dtype=torch.uint8)
    video = patch_codec.PatchCodecConfig(latent_channels=8)
    patch_codec.save(folder / "vae", patch_codec.fit(video, [frames]), video)
    wave = torch.sin(torch.arange(32000) * 0.05)[None].repeat(2, 1) * torch.linspace(0.1, 0.5, 32000)
    wave = wave + 0.01 * torch.randn(2, 32000, generator=generator)
    sound = mel_codec.MelCodecConfig(latent_channels=4, latent_bins=4, iterations=4)
    mel_codec.save(folder / "audio_vae", mel_codec.fit(sound, [wave]), sound)
    text_hash.save(folder / "text_encoder", text_hash.HashTextConfig(12, 6))
    return {name: folder / name for name in ("vae", "audio_vae", "text_encoder")}


def written(folder, parts, cfg=CFG, **defaults):
    given = {"num_frames": FRAMES, "height": HEIGHT, "width": WIDTH, "fps": FPS, "steps": 3, **defaults}
    wanted = {k: v for k, v in parts.items() if k != ("vae" if cfg.modality == "audio" else "audio_vae")}
    save_ltx2(folder, random_params(cfg), cfg, LTX2Defaults(**given), parts=parts if cfg.crossed else wanted)
    return folder


def opened(folder, **options):
    return with_weights(open_ltx2(folder, device=torch.device("cpu"), dtype=torch.float32, **options))


def texts_of(pipe, captions=("a rabbit",)):
    rows = pipe.text.embed(list(captions))
    return {name: torch.stack([row[name] for row in rows]) for name in pipe.streams}
