"""A tiny LTX-2 pipeline folder that Diffusers wrote, its pipelines over it, and texts and noise for both sides."""

import dataclasses
import functools
from pathlib import Path
from unittest import mock

import torch
from ltx2_cases import diffusers_model, random_params, tiny_config
from ltx2_side_cases import draw, random_leaves
from ltx2_vae_cases import diffusers_vae, vae_config
from ltx2_vae_cases import random_params as random_vae_params

from infer.folder import with_weights
from infer.ltx2_defaults import scheduler_config
from infer.ltx2_folder import LTX2Pipeline, open_ltx2
from infer.ltx2_sampling import LTX2Sampling, tokens_of
from nn import ltx2_audio, ltx2_upsampler, ltx2_vocoder
from nn.config_files import save_model
from nn.ltx2_upsampler import UpsamplerConfig
from nn.ltx2_vocoder_config import VocoderConfig, to_json

VAE = vae_config()  # 2 frames and 4 x 4 pixels a latent
SOUND = ltx2_audio.AudioVaeConfig(base_channels=8, ch_mult=(1, 2, 2), num_res_blocks=1, latent_channels=4, mel_bins=8)
VOICE = VocoderConfig(
    in_channels=16, hidden_channels=16, upsample_kernel_sizes=(16, 15), upsample_factors=(16, 15),
    resnet_kernel_sizes=(3,), resnet_dilations=((1,),),
)  # fmt: skip
UPSAMPLER = UpsamplerConfig(in_channels=4, mid_channels=32, num_blocks_per_stage=1)
FPS, TEXT = 24.0, 4
SAMPLING = LTX2Sampling(5, 32, 64, fps=FPS, steps=3)  # sizes that Diffusers' pipelines take: multiples of 32


MODULES = {
    "LTX2Pipeline": "diffusers.pipelines.ltx2.pipeline_ltx2",
    "LTX2ImageToVideoPipeline": "diffusers.pipelines.ltx2.pipeline_ltx2_image2video",
    "LTX2ConditionPipeline": "diffusers.pipelines.ltx2.pipeline_ltx2_condition",
    "LTX2InContextPipeline": "diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora",
}


def config(family: str):
    return tiny_config(
        family=family, vae_scale_factors=(2, 4, 4), audio_in_channels=8, audio_out_channels=8, num_layers=3,
        perturbed_attn=True,
    )  # fmt: skip


class Split(torch.nn.Module):
    """In the place of connectors: text is given as one tensor with both streams' channels."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, embeds, mask, padding_side="left"):
        return embeds[..., : self.width], embeds[..., self.width :], mask


@dataclasses.dataclass(frozen=True)
class Pair:
    """Our pipeline of a folder, and the models of Diffusers that wrote it."""

    folder: Path
    ours: LTX2Pipeline
    modules: dict

    def theirs(self, kind: str, *, distilled: bool = False):
        """A pipeline of Diffusers over these models."""
        import diffusers

        scheduler = {k: v for k, v in scheduler_config(distilled).items() if not k.startswith("_")}
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**scheduler)
        absent = dict.fromkeys(("text_encoder", "tokenizer", "vocoder"))
        split = Split(self.ours.cfg.stream("video").text_dim)
        pipe = getattr(diffusers, kind)(scheduler=scheduler, connectors=split, **absent, **self.modules)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def texts(self, seed: int, batch: int = 1) -> dict[str, torch.Tensor]:
        dims = {s.name: s.text_dim for s in self.ours.cfg.streams}
        return {name: draw(seed, name, batch, TEXT, dim) for name, dim in dims.items()}

    def sample(self, pipe, text, negative=None, sampling=SAMPLING, **options):
        """Normalised latents by stream that a pipeline of Diffusers makes."""
        joined = lambda t: torch.cat([t["video"], t["audio"]], dim=-1)  # noqa: E731
        mask = torch.ones(text["video"].shape[:2], dtype=torch.long)
        if negative is not None:
            options |= {"negative_prompt_embeds": joined(negative), "negative_prompt_attention_mask": mask}
        video, audio = pipe(
            prompt_embeds=joined(text), prompt_attention_mask=mask, height=sampling.height, width=sampling.width,
            num_frames=sampling.num_frames, frame_rate=sampling.fps, num_inference_steps=sampling.steps,
            output_type="latent", return_dict=False, use_cross_timestep=self.ours.cfg.use_cross_timestep, **options,
        )  # fmt: skip
        return {"video": self.ours.vae.normalise(video), "audio": self.sound_tokens(audio)}

    def sound_tokens(self, raw: torch.Tensor) -> torch.Tensor:
        """Their audio latents, which are not normalised, as ours."""
        tokens, vae = tokens_of(self.ours, "audio", raw), self.modules["audio_vae"]
        tokens = (tokens - vae.latents_mean) / vae.latents_std
        return tokens.unflatten(2, (-1, raw.shape[-1])).transpose(1, 2)


def drawing(kind: str, values):
    """Diffusers' draws of noise in a pipeline's module replaced by these values, in order."""
    left = list(values)

    def give(shape, **options):
        value = left.pop(0)
        assert tuple(value.shape) == tuple(shape)
        return value

    return mock.patch(f"{MODULES[kind]}.randn_tensor", give)


@functools.cache
def upsampler(**changes):
    """Diffusers' upsampler with random weights."""
    from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel

    cfg = dataclasses.replace(UPSAMPLER, **changes)
    model = LTX2LatentUpsamplerModel(**dataclasses.asdict(cfg))
    model.load_state_dict(random_leaves(ltx2_upsampler.param_specs(cfg), 5), strict=False)
    return model.eval()


def make_pair(folder: Path, family: str) -> Pair:
    """Writes a pipeline with Diffusers and opens it with ours; connectors and text encoder are left out."""
    import diffusers

    cfg = config(family)
    audio = diffusers.AutoencoderKLLTX2Audio(
        **{k: v for k, v in ltx2_audio.to_json(SOUND).items() if not k.startswith("_")}
    )  # fmt: skip
    audio.load_state_dict(random_leaves(ltx2_audio.param_specs(SOUND), 2))
    audio.latents_std.abs_().add_(0.5)
    modules = {
        "transformer": diffusers_model(cfg, random_params(cfg, 1)),
        "vae": diffusers_vae(VAE, random_vae_params(VAE, 1), **ratios()),
        "audio_vae": audio.eval(),
    }
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        **{k: v for k, v in scheduler_config(False).items() if not k.startswith("_")}
    )  # fmt: skip
    absent = dict.fromkeys(("text_encoder", "tokenizer", "connectors", "vocoder"))
    diffusers.LTX2Pipeline(scheduler=scheduler, **modules, **absent).save_pretrained(folder)
    upsampler().save_pretrained(folder / "latent_upsampler")
    voice = ltx2_vocoder.param_specs(VOICE)
    leaves = random_leaves(voice, 3, constants=ltx2_vocoder.constants(VOICE))
    save_model(folder / "vocoder", leaves, voice, to_json(VOICE))
    ours = open_ltx2(folder, device=torch.device("cpu"), dtype=torch.float32)
    return Pair(folder, with_weights(ours), modules)


def ratios() -> dict[str, int]:
    return {"spatial_compression_ratio": VAE.factor_s, "temporal_compression_ratio": VAE.factor_t}
