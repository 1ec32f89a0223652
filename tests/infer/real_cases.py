"""Pipeline folders with tiny random components of the real classes, and Diffusers' pipelines over the same ones."""

import dataclasses
import functools
import logging
from pathlib import Path

import torch
from vae_cases import random_params as random_vae
from vae_cases import vae_config
from wan_cases import diffusers_model, random_params, tiny_config

from core import keys
from infer.folder import Defaults, save_pipeline
from nn import wan_vae
from nn.wan import WanConfig

WORDS = "a red ball rolls over the green meadow dull blue cube &amp; & < > dog's cafe café".split()
TEXT_DIM, IMAGE_DIM, LATENTS = 32, 16, 4


@dataclasses.dataclass(frozen=True)
class Real:
    """A folder, and the transformer in it."""

    folder: Path
    cfg: WanConfig
    params: dict
    expand_timesteps: bool


def save_tokenizer(folder: Path) -> None:
    """One token a word; `</s>` at the end, as T5 has it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="right"
    )
    fast.save_pretrained(folder)


def randomise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Every parameter random, so that no initial zero or one hides a fault."""
    k = keys.key(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = keys.normal(keys.fold_in(k, name), p.shape)
            p.copy_(0.3 * noise / max(1, p.shape[-1]) ** 0.5 + (1.0 if p.ndim == 1 and "weight" in name else 0.0))
    return model.eval()


def save_text_encoder(folder: Path) -> None:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=len(WORDS) + 3, d_model=TEXT_DIM, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = randomise(UMT5EncoderModel(config), 1)
    with torch.no_grad():
        model.shared.weight.mul_(8)  # else all words mean nearly the same
    model.save_pretrained(folder / "text_encoder")
    save_tokenizer(folder / "tokenizer")


def save_image_encoder(folder: Path) -> None:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=IMAGE_DIM, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=16,
        patch_size=8, hidden_act="gelu",
    )  # fmt: skip
    randomise(CLIPVisionModel(config), 2).save_pretrained(folder / "image_encoder")
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(
        folder / "image_processor"
    )


def config_of(kind: str) -> WanConfig:
    if kind == "i2v":
        image = {"in_channels": 4 + 2 * LATENTS, "image_dim": IMAGE_DIM, "added_kv_proj_dim": 24}
    else:
        image = {"in_channels": LATENTS}
    return tiny_config(num_layers=2, out_channels=LATENTS, text_dim=TEXT_DIM, **image)


def make_real(root: Path, kind: str) -> Real:
    """A folder of `kind` t2v, i2v or 5b below `root`."""
    parts, cfg = root / "parts", config_of(kind)
    vae = vae_config(residual=kind == "5b", z_dim=LATENTS)
    wan_vae.save(parts / "vae", random_vae(vae, 3), vae)
    save_text_encoder(parts)
    if kind == "i2v":
        save_image_encoder(parts)
    defaults = Defaults(num_frames=9, height=32, width=48, fps=8, steps=3, guidance_scale=3.0, flow_shift=4.0)
    params, folder = random_params(cfg, 4), root / "pipe"
    save_pipeline(
        folder, params, cfg, defaults, vae=parts / "vae", text_encoder=parts / "text_encoder",
        image_encoder=parts / "image_encoder" if kind == "i2v" else None, expand_timesteps=kind == "5b",
    )  # fmt: skip
    return Real(folder, cfg, params, kind == "5b")


def diffusers_pipeline(real: Real, class_name: str, flow_shift: float):
    """Diffusers' pipeline over the parts of a folder, each read by its own class."""
    import diffusers
    import transformers

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    folder, parts = real.folder, {}
    if class_name == "WanImageToVideoPipeline" and real.cfg.image_dim is not None:
        parts["image_encoder"] = transformers.CLIPVisionModel.from_pretrained(folder / "image_encoder")
        parts["image_processor"] = transformers.CLIPImageProcessor.from_pretrained(folder / "image_processor")
    if class_name != "WanVideoToVideoPipeline":
        parts["expand_timesteps"] = real.expand_timesteps
    pipe = getattr(diffusers, class_name)(
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"),
        text_encoder=transformers.UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float32),
        vae=diffusers.AutoencoderKLWan.from_pretrained(folder / "vae"),
        transformer=diffusers_model(real.cfg, real.params),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
        ),
        **parts,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def random_frames(seed: int, count: int, height: int, width: int) -> torch.Tensor:
    """Smooth pictures uint8 `[T, H, W, 3]`."""
    noise = keys.normal(keys.key(seed), (count, 3, height // 8, width // 8))
    big = torch.nn.functional.interpolate(noise, (height, width), mode="bicubic")
    return (big * 60 + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def pictures(frames: torch.Tensor) -> list:
    """Frames as PIL images."""
    from PIL import Image

    return [Image.fromarray(frame.numpy()) for frame in frames]


def same_video(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for a level of rounding and what the codec makes of it: a mean difference of at most 1 of 255.

    BLAS may sum in another order when memory is aligned otherwise, as the buffers into which transformers reads an
    encoder may be. One pixel that is one level off can move a decoded H.264 clip of this size by 24
    levels at the worst pixel and 0.4 in the mean; videos of other seeds or prompts differ by more than 10.
    """
    return a.shape == b.shape and float((a.float() - b.float()).abs().mean()) <= 1


def write_png(path: Path, frame: torch.Tensor) -> Path:
    """One frame uint8 `[H, W, 3]` as a PNG, which keeps it to the bit."""
    pictures(frame[None])[0].save(path)
    return path


def without_loss(monkeypatch) -> None:
    """MP4s are encoded without loss from now on: else the codec makes many levels of one that was rounded otherwise."""
    from infer import __main__ as cli
    from infer.media import write_video
    from train import validate

    for module in (cli, validate):
        monkeypatch.setattr(module, "write_video", functools.partial(write_video, crf=0))
