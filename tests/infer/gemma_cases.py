"""Pipeline folders with a tiny random Gemma 3, a tokenizer and LTX-2's connectors, and what Diffusers makes of them."""

import dataclasses
import shutil
from pathlib import Path

import torch
from ltx2_cases import tiny_config
from ltx2_side_cases import random_leaves
from real_cases import WORDS, randomise
from safetensors.torch import load_file, save_file

from nn import ltx2_connectors
from nn.config_files import save_model
from nn.ltx2_config import LTX2Config
from nn.ltx2_connectors import ConnectorConfig

WIDTH, LAYERS = 12, 4
CAPTIONS = ["a red ball rolls over the green meadow", "", "  the dog's blue cube\n"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A folder, and the config of the transformer that is to take its texts."""

    folder: Path
    cfg: LTX2Config
    connectors: ConnectorConfig


def save_tokenizer(folder: Path, **changes) -> None:
    """One token a word and `<bos>` in front, as Gemma has it; it pads on the right until it is told otherwise."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"} | changes
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", **names).save_pretrained(folder)


def make_gemma():
    """A whole Gemma: text model with layers of a sliding window among its three, vision tower and head."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": len(WORDS) + 4, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": LAYERS - 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8,
        "sliding_window": 4, "pad_token_id": 0, "max_position_embeddings": 2048,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 8, "patch_size": 4}  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return randomise(Gemma3ForConditionalGeneration(config), 5)


def make_case(folder: Path, family: str) -> Case:
    """A folder with Gemma as Diffusers has it: all of it in text_encoder/."""
    make_gemma().save_pretrained(folder / "text_encoder")
    save_tokenizer(folder / "tokenizer")
    new = family == "2.3"
    own = ConnectorConfig(
        caption_channels=WIDTH, text_proj_in_factor=LAYERS, rope_type="split", per_modality_projections=new,
        video_connector_num_attention_heads=2 if new else 3, video_connector_attention_head_dim=8 if new else 4,
        audio_connector_num_attention_heads=3, audio_connector_attention_head_dim=2 if new else 4,
        video_connector_num_layers=1, audio_connector_num_layers=2, video_gated_attn=new, audio_gated_attn=new,
        video_connector_num_learnable_registers=8, audio_connector_num_learnable_registers=4, proj_bias=new,
        video_hidden_dim=16, audio_hidden_dim=6,
    )  # fmt: skip
    specs = ltx2_connectors.param_specs(own)
    save_model(folder / "connectors", random_leaves(specs, 3), specs, ltx2_connectors.to_json(own))
    audio = {"audio_num_attention_heads": 3, "audio_attention_head_dim": 2, "audio_cross_attention_dim": 6}
    cfg = tiny_config(family=family, caption_channels=WIDTH, rope_type="interleaved", **audio)
    return Case(folder, cfg, own)


def own_copy(case: Case, folder: Path) -> Path:
    """A copy of a case's folder to change."""
    return Path(shutil.copytree(case.folder, folder))


def rewrite(folder: Path, change) -> None:
    """Changes the weights of a text_encoder/: `change(leaves)` gives the new ones."""
    path = folder / "text_encoder" / "model.safetensors"
    save_file({k: v.contiguous() for k, v in change(load_file(path)).items()}, path, {"format": "pt"})


def diffusers_texts(case: Case, captions, dtype=torch.float32):
    """Embeddings `[B, L, C * layers]`, mask, and the connectors' texts, by Diffusers' own pipeline and classes."""
    from diffusers import FlowMatchEulerDiscreteScheduler, LTX2Pipeline
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
    from transformers import AutoTokenizer, Gemma3ForConditionalGeneration

    connectors = LTX2TextConnectors.from_pretrained(case.folder / "connectors", torch_dtype=dtype)
    gemma = Gemma3ForConditionalGeneration.from_pretrained(case.folder / "text_encoder", dtype=dtype)
    pipe = LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=None, audio_vae=None, text_encoder=gemma.eval(),
        tokenizer=AutoTokenizer.from_pretrained(case.folder / "tokenizer"), connectors=connectors, transformer=None,
        vocoder=None,
    )  # fmt: skip
    with torch.no_grad():
        embeds, mask, _, _ = pipe.encode_prompt(
            list(captions), do_classifier_free_guidance=False, device=torch.device("cpu")
        )
        video, audio, _ = connectors(embeds, mask, padding_side="left")
    return embeds, mask.bool(), {"video": video, "audio": audio}
