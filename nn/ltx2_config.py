"""What an LTX-2 transformer is made of: two streams, video and audio, and what couples them.

Field names and defaults are those of the `config.json` of Diffusers' `LTX2VideoTransformer3DModel`; the last two
fields are ours. `modality` leaves one stream out: parameters, key filters and inputs all follow from it.
"""

import dataclasses

from core.errors import raise_faults

MODALITIES = {"audio_video": ("video", "audio"), "video": ("video",), "audio": ("audio",)}
ROPE_TYPES = ("interleaved", "split")


@dataclasses.dataclass(frozen=True)
class Stream:
    """One of the two streams. `gated`: a gate per head; `mod`: AdaLN of text attention; `text_dim`: width of text."""

    name: str
    in_channels: int
    out_channels: int
    heads: int
    head_dim: int
    gated: bool
    mod: bool
    ff_bias: bool
    text_dim: int

    @property
    def dim(self) -> int:
        """Inner width."""
        return self.heads * self.head_dim

    @property
    def rows(self) -> int:
        """Rows of the modulation table: shift, scale, gate of self-attention and MLP, with `mod` of text attention."""
        return 9 if self.mod else 6

    def key(self, name: str) -> str:
        """The name of this stream's part of the model: `attn1`, or `audio_attn1`."""
        return name if self.name == "video" else f"audio_{name}"


@dataclasses.dataclass(frozen=True)
class LTX2Config:
    """Architecture of LTX-2 (19B), LTX-2.3 (22B) and LTX-2.5.

    Beyond Diffusers' fields: `modality` (`"audio_video"`, `"video"` or `"audio"`) and `use_cross_timestep`: the
    modulation of attention between the streams follows the other stream's noise level (LTX-2.3), not its own.
    `perturbed_attn` is kept for Diffusers' sake: here any model can skip attention.
    """

    in_channels: int = 128
    out_channels: int = 128
    patch_size: int = 1
    patch_size_t: int = 1
    num_attention_heads: int = 32
    attention_head_dim: int = 128
    cross_attention_dim: int = 4096
    vae_scale_factors: tuple[int, int, int] = (8, 32, 32)
    pos_embed_max_pos: int = 20
    base_height: int = 2048
    base_width: int = 2048
    gated_attn: bool = False
    cross_attn_mod: bool = False
    audio_in_channels: int = 128
    audio_out_channels: int = 128
    audio_patch_size: int = 1
    audio_patch_size_t: int = 1
    audio_num_attention_heads: int = 32
    audio_attention_head_dim: int = 64
    audio_cross_attention_dim: int = 2048
    audio_scale_factor: int = 4
    audio_pos_embed_max_pos: int = 20
    audio_sampling_rate: int = 16000
    audio_hop_length: int = 160
    audio_gated_attn: bool = False
    audio_cross_attn_mod: bool = False
    num_layers: int = 48
    norm_eps: float = 1e-6
    caption_channels: int = 3840
    rope_theta: float = 10000.0
    rope_double_precision: bool = True
    causal_offset: int = 1
    timestep_scale_multiplier: int = 1000
    cross_attn_timestep_scale_multiplier: int = 1000
    rope_type: str = "interleaved"
    use_prompt_embeddings: bool = True
    perturbed_attn: bool = False
    ff_bias: bool = True
    audio_ff_bias: bool = True
    use_prompt_adaln_single: bool = True
    use_keyframes_abs_pos_embedding: bool = False
    modality: str = "audio_video"
    use_cross_timestep: bool = False

    def __post_init__(self):
        object.__setattr__(self, "vae_scale_factors", tuple(self.vae_scale_factors))
        raise_faults("LTX2Config", [*_size_faults(self), *_width_faults(self), *_choice_faults(self)])

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams that this model has, video first."""
        return tuple(self.stream(name) for name in MODALITIES[self.modality])

    @property
    def crossed(self) -> bool:
        """Whether there are two streams, which attend to each other."""
        return self.modality == "audio_video"

    @property
    def prompt_tables(self) -> bool:
        """Whether text is modulated before it becomes keys and values; one stream with `mod` gives both the tables."""
        return self.cross_attn_mod or self.audio_cross_attn_mod

    def stream(self, name: str) -> Stream:
        """The sizes of one stream, `"video"` or `"audio"`, whether or not this model has it."""
        get = lambda field: getattr(self, field if name == "video" else f"audio_{field}")  # noqa: E731
        return Stream(
            name=name,
            in_channels=get("in_channels"),
            out_channels=get("out_channels"),
            heads=get("num_attention_heads"),
            head_dim=get("attention_head_dim"),
            gated=get("gated_attn"),
            mod=get("cross_attn_mod"),
            ff_bias=get("ff_bias"),
            text_dim=self.caption_channels if self.use_prompt_embeddings else get("cross_attention_dim"),
        )


def _size_faults(cfg: LTX2Config) -> list[str]:
    """Sizes below 1."""
    sizes = [f.name for f in dataclasses.fields(cfg) if f.type is int and f.name != "causal_offset"]
    faults = [f"{n} must be at least 1, got {getattr(cfg, n)}" for n in sizes if getattr(cfg, n) < 1]
    if len(cfg.vae_scale_factors) != 3 or min(cfg.vae_scale_factors) < 1:
        faults.append(f"vae_scale_factors must be three positive integers, got {cfg.vae_scale_factors}")
    if cfg.causal_offset < 0:
        faults.append(f"causal_offset must be at least 0, got {cfg.causal_offset}")
    return faults


def _width_faults(cfg: LTX2Config) -> list[str]:
    """Widths that do not go together."""
    faults = []
    for name, axes in (("video", 3), ("audio", 1)):
        stream, prefix = cfg.stream(name), "" if name == "video" else "audio_"
        context = getattr(cfg, f"{prefix}cross_attention_dim")
        if context != stream.dim:
            faults.append(f"{prefix}cross_attention_dim {context} must equal the {name} stream's width {stream.dim}")
        if stream.head_dim % 2:
            faults.append(f"{prefix}attention_head_dim must be even, got {stream.head_dim}")
        if stream.dim < 2 * axes:
            faults.append(f"the {name} stream's width must be at least {2 * axes}, got {stream.dim}")
    heads = cfg.num_attention_heads, cfg.audio_num_attention_heads
    if cfg.rope_type == "split" and cfg.modality == "audio_video" and heads[0] != heads[1]:
        # Diffusers would then turn the two sides of cross-modal attention by unlike halves.
        needed = "num_attention_heads == audio_num_attention_heads"
        faults.append(f"rope_type 'split' with two streams needs {needed}, got {heads[0]} and {heads[1]}")
    if cfg.in_channels % (volume := cfg.patch_size_t * cfg.patch_size**2):
        faults.append(f"in_channels {cfg.in_channels} is not divisible by the {volume} positions of a patch")
    return faults


def _choice_faults(cfg: LTX2Config) -> list[str]:
    """Words that are none of the allowed ones."""
    allowed = {"modality": tuple(MODALITIES), "rope_type": ROPE_TYPES}
    return [
        f"{name} is {getattr(cfg, name)!r}, must be one of {', '.join(words)}"
        for name, words in allowed.items()
        if getattr(cfg, name) not in words
    ]


def _ltx2(**changes) -> LTX2Config:
    return LTX2Config(rope_type="split", perturbed_attn=True, **changes)


_LTX23 = {
    **dict.fromkeys(("gated_attn", "audio_gated_attn", "cross_attn_mod", "audio_cross_attn_mod"), True),
    "use_prompt_embeddings": False,
    "use_cross_timestep": True,
}

PRESETS = {
    "ltx-2-19b": _ltx2(),
    "ltx-2.3-22b": _ltx2(**_LTX23),
    "ltx-2.5": _ltx2(
        **_LTX23, ff_bias=False, use_prompt_adaln_single=False, use_keyframes_abs_pos_embedding=True
    ),
}
