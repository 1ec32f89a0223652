"""Random tiny LTX-2 models and inputs, and Diffusers' model with the same weights and inputs."""

import dataclasses

import torch
from hypothesis import strategies as st

from core import keys
from nn.ltx2_config import LTX2Config
from nn.ltx2_formats import to_json
from nn.ltx2_inputs import StreamInputs
from nn.ltx2_names import whole
from nn.ltx2_rope import audio_positions, video_positions
from nn.ltx2_specs import param_specs

FPS, GRID, AUDIO, TEXT = 24.0, (2, 2, 3), 5, 4


def tiny_config(**changes) -> LTX2Config:
    """One small LTX-2.3 for tests that need no search; `family="2.0"` for the other one."""
    new = changes.pop("family", "2.3") != "2.0"
    base = LTX2Config(
        num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, audio_num_attention_heads=2,
        audio_attention_head_dim=6, audio_cross_attention_dim=12, in_channels=4, out_channels=4, audio_in_channels=6,
        audio_out_channels=6, caption_channels=9, num_layers=2, rope_type="split", gated_attn=new,
        audio_gated_attn=new, cross_attn_mod=new, audio_cross_attn_mod=new, use_prompt_embeddings=not new,
        use_cross_timestep=new,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


@st.composite
def configs(draw):
    """Tiny configs over all flags; odd head counts, head sizes whose channel pairs three axes do not share evenly."""
    flag = st.booleans()
    heads, rope = draw(st.integers(1, 3)), draw(st.sampled_from(["split", "interleaved"]))
    audio_heads = heads if rope == "split" else draw(st.integers(1, 3))
    head_dim, audio_head_dim = draw(st.sampled_from([8, 10])), draw(st.sampled_from([2, 4, 6]))
    names = "gated_attn audio_gated_attn cross_attn_mod audio_cross_attn_mod rope_double_precision ff_bias"
    names += " use_prompt_embeddings audio_ff_bias use_prompt_adaln_single use_keyframes_abs_pos_embedding"
    return LTX2Config(
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        cross_attention_dim=heads * head_dim,
        audio_num_attention_heads=audio_heads,
        audio_attention_head_dim=audio_head_dim,
        audio_cross_attention_dim=audio_heads * audio_head_dim,
        in_channels=draw(st.integers(1, 4)),
        out_channels=draw(st.integers(1, 4)),
        audio_in_channels=draw(st.integers(1, 4)),
        audio_out_channels=draw(st.integers(1, 4)),
        caption_channels=draw(st.integers(3, 9)),
        num_layers=draw(st.integers(1, 2)),
        rope_type=rope,
        rope_theta=draw(st.sampled_from([10000.0, 500.0])),
        pos_embed_max_pos=draw(st.sampled_from([20, 3])),
        audio_pos_embed_max_pos=draw(st.sampled_from([20, 5])),
        base_height=draw(st.sampled_from([2048, 96])),
        cross_attn_timestep_scale_multiplier=draw(st.sampled_from([1000, 1, 250])),
        use_cross_timestep=draw(flag),
        **{name: draw(flag) for name in names.split()},
    )


def random_params(cfg: LTX2Config, seed: int, dtype=torch.float32):
    """Every leaf random, so that no zero-initialised layer hides a fault. A leaf depends on its name alone."""
    k, out = keys.key(seed), {}
    for name, s in param_specs(cfg).items():
        noise = keys.normal(keys.fold_in(k, name), s.shape) * (0.4 / max(1, s.shape[-1]) ** 0.5)
        out[name] = (noise + (1.0 if "norm" in name else 0.0)).to(dtype)
    return out


def diffusers_model(cfg: LTX2Config, params=None, dtype=torch.float32, device=None):
    """Diffusers' model with both streams, with the given weights; absent ones are as Diffusers starts them."""
    from diffusers import LTX2VideoTransformer3DModel

    body = {k: v for k, v in to_json(whole(cfg)).items() if not k.startswith("_") and k != "use_cross_timestep"}
    with torch.device("cpu" if device is None else device):
        model = LTX2VideoTransformer3DModel(**body)
    model = model if dtype == torch.float32 else model.to(dtype)
    if params is not None:
        found = model.load_state_dict(params, strict=False)
        assert not found.unexpected_keys
    return model.eval()


def _strengths(drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Strengths for us, and the mask that makes Diffusers add the same to its scores.

    Diffusers adds `10000 (mask - 1)`, which hides whatever is below 1; a strength's logarithm can be said so with
    float64's digits only. In float32 they are 0 and 1.
    """
    diagonal = torch.eye(drawn.shape[-1], dtype=torch.bool)
    hidden = (drawn < 0.3) & ~diagonal
    if drawn.dtype != torch.float64:
        mask = 1 - hidden.to(drawn.dtype)
        return mask, mask
    strengths = torch.where(hidden, 0, drawn + 1e-3).clamp(max=1)
    return strengths, torch.where(hidden, 0, 1 + strengths.log() / 10000)


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs for us and, as `theirs`, for Diffusers' forward."""

    streams: dict[str, StreamInputs]
    theirs: dict


def random_case(
    cfg: LTX2Config, seed: int, *, batch=2, grid=GRID, audio=AUDIO, text=TEXT, fps=FPS, per_token=False,
    masks=False, strengths=False, dtype=torch.float32,
) -> Case:  # fmt: skip
    """Both streams' inputs whatever the modality; `per_token`: a timestep for each token, and another level."""
    k = keys.key(seed)
    draw = lambda name, *shape: keys.normal(keys.fold_in(k, name), shape, dtype=dtype)  # noqa: E731
    part = lambda name, *shape: keys.uniform(keys.fold_in(k, name), shape, dtype=dtype)  # noqa: E731
    both = whole(cfg)
    counts = {"video": grid[0] * grid[1] * grid[2], "audio": audio}
    where = {"video": video_positions(cfg, grid, fps), "audio": audio_positions(cfg, audio)}
    streams, theirs = {}, {"return_dict": False, "use_cross_timestep": cfg.use_cross_timestep, "fps": fps}
    for s in both.streams:
        n, prefix, sigma = counts[s.name], "" if s.name == "video" else "audio_", "sigma"
        level = 1000 * part(f"{s.name} level", batch)
        timestep = 1000 * part(f"{s.name} timestep", batch, n) if per_token else level[:, None]
        mask = None
        if masks:
            mask = part(f"{s.name} mask", batch, text) < 0.6
            mask[:, 0] = True  # a query that sees nothing has no defined output
        strength = seen = None
        if strengths and s.name == "video":
            strength, seen = _strengths(part("strengths", batch, n, n))
        frames = None
        if s.name == "video" and cfg.use_keyframes_abs_pos_embedding:
            frames = part("keyframes", batch, n) < 0.5
        latents, texts = draw(s.name, batch, n, s.in_channels), draw(f"{s.name} text", batch, text, s.text_dim)
        streams[s.name] = StreamInputs(
            latents, timestep, where[s.name], texts, text_mask=mask, level=level, strengths=strength, keyframes=frames
        )
        theirs |= {
            f"{prefix}hidden_states": latents, f"{prefix}encoder_hidden_states": texts,
            f"{prefix}timestep": timestep.expand(batch, n), f"{prefix}{sigma}": level,
            f"{prefix}encoder_attention_mask": None if mask is None else mask.to(dtype),
        }  # fmt: skip
        if s.name == "video":
            theirs |= {"video_self_attention_mask": seen, "num_frames": grid[0], "height": grid[1]}
            theirs |= {"width": grid[2], "audio_num_frames": audio}
            theirs["video_keyframes_mask"] = None if frames is None else frames[..., None].to(dtype)
    return Case({s.name: streams[s.name] for s in cfg.streams}, theirs)
