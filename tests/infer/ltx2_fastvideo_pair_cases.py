"""The same tiny LTX-2 models in a pipeline folder of Diffusers' layout and in one of FastVideo's."""

import dataclasses
import shutil
from pathlib import Path

from gemma_cases import WIDTH, make_case
from ltx2_cases import random_params, tiny_config
from ltx2_fastvideo_cases import convert, text_config
from ltx2_pipe_cases import SOUND, VOICE
from ltx2_side_cases import random_leaves
from ltx2_vae_cases import random_params as random_vae
from ltx2_vae_cases import vae_config

from core.specs import specs_of
from core.transforms import apply
from infer.ltx2_folder import LTX2Defaults, save_ltx2
from nn import ltx2_audio, ltx2_connectors, ltx2_vae, ltx2_vocoder
from nn.config_files import save_model
from nn.ltx2_config import LTX2Config
from nn.ltx2_names import to_official
from nn.ltx2_official_parts import to_official_part
from nn.ltx2_official_save import official_sections
from nn.ltx2_vocoder_config import to_json

# 8 frames and 32 x 32 pixels a latent, which FastVideo's transformers always have.
VAE = vae_config(
    ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
    ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
    patch_size=4, block_out_channels=(4, 4, 8, 8),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same models in Diffusers' layout and in FastVideo's."""

    diffusers: Path
    fastvideo: Path
    cfg: LTX2Config


def make_pair(root: Path, family: str) -> Pair:
    parts, case = root / "parts", make_case(root / "parts", family)
    # As many registers for both streams, since FastVideo's config has one number of them.
    connectors = dataclasses.replace(case.connectors, audio_connector_num_learnable_registers=8)
    joined = ltx2_connectors.param_specs(connectors)
    audio = {"audio_num_attention_heads": 3, "audio_attention_head_dim": 2, "audio_cross_attention_dim": 6}
    cfg = tiny_config(
        family=family, caption_channels=WIDTH, audio_in_channels=8, audio_out_channels=8, rope_type="interleaved",
        perturbed_attn=True, **audio,
    )  # fmt: skip
    voice = ltx2_vocoder.param_specs(VOICE)
    models = {
        "vae": (random_vae(VAE, 1), VAE),
        "audio_vae": (random_leaves(ltx2_audio.param_specs(SOUND), 2), SOUND),
        "vocoder": (random_leaves(voice, 3, constants=ltx2_vocoder.constants(VOICE)), VOICE),
        "connectors": (random_leaves(joined, 3), connectors),
    }
    models["audio_vae"][0]["latents_std"].abs_().add_(0.5)
    shutil.rmtree(parts / "connectors")
    save_model(parts / "connectors", models["connectors"][0], joined, ltx2_connectors.to_json(connectors))
    ltx2_vae.save(parts / "vae", *models["vae"])
    save_model(parts / "audio_vae", models["audio_vae"][0], ltx2_audio.param_specs(SOUND), ltx2_audio.to_json(SOUND))
    save_model(parts / "vocoder", models["vocoder"][0], voice, to_json(VOICE))
    params, names = random_params(cfg, 1), ("vae", "audio_vae", "vocoder", "text_encoder")
    save_ltx2(root / "diffusers", params, cfg, LTX2Defaults(), parts={name: parts / name for name in names})
    leaves = apply(params, to_official(cfg)(specs_of(params)))
    head = official_sections({"transformer": cfg})
    for name, (tree, own) in models.items():
        leaves |= apply(tree, to_official_part(name, own)(specs_of(tree)))
        head |= {} if name == "connectors" else official_sections({name: own})
    new = {k: head["transformer"][k] for k in ("apply_gated_attention", "cross_attention_adaln") if family == "2.3"}
    new |= {"caption_proj_before_connector": True} if family == "2.3" else {}
    folder = convert(leaves, head, root / "fastvideo", text_config(connectors), **new)
    shutil.copytree(parts / "text_encoder", folder / "text_encoder" / "gemma")
    shutil.copytree(parts / "tokenizer", folder / "tokenizer")
    return Pair(root / "diffusers", folder, cfg)
