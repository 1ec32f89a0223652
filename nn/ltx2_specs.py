"""LTX-2's parameters: specs keyed by Diffusers' names, and the packed layout of its attention projections.

Key names are those of Diffusers' `LTX2VideoTransformer3DModel`. All modulation tables are `keep_fp32`: they are the
194 float32 leaves of the public 19B checkpoint, where everything else is bfloat16.
"""

from core import specs
from core.rules import pack
from core.specs import ParamSpec, Specs
from core.transforms import Transform, compose
from nn.layers import affine_specs, linear_specs
from nn.ltx2_config import LTX2Config, Stream

STACKS = ("transformer_blocks",)
TIME_DIM = 256  # channels of the sinusoidal embedding of timesteps
CROSS_ROWS = 5  # scale and shift of the two directions, gate
SELF_ATTENTION = ("attn1", "audio_attn1")
CROSS_ATTENTION = ("attn2", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")


def _table(name: str, rows: int, dim: int) -> Specs:
    return {name: ParamSpec((rows, dim), axes=(None, "embed"), init=specs.normal(dim**-0.5), keep_fp32=True)}


def _attention(name: str, query_dim: int, context_dim: int, heads: int, head_dim: int, gated: bool) -> Specs:
    """Queries and output of width `query_dim`, keys and values from `context_dim`; a gate is one number per head."""
    inner = heads * head_dim
    out = affine_specs(f"{name}.norm_q", inner, axis="heads", bias=False, keep_fp32=False)
    out |= affine_specs(f"{name}.norm_k", inner, axis="heads", bias=False, keep_fp32=False)
    for part, width in (("to_q", query_dim), ("to_k", context_dim), ("to_v", context_dim)):
        out |= linear_specs(f"{name}.{part}", width, inner, axes=("heads", "embed"))
    out |= linear_specs(f"{name}.to_out.0", inner, query_dim, axes=("embed", "heads"))
    if gated:  # 2 sigmoid(0) = 1: a new gate lets everything through
        out |= linear_specs(f"{name}.to_gate_logits", query_dim, heads, axes=("heads", "embed"), init=specs.ZEROS)
    return out


def _stream_block(cfg: LTX2Config, s: Stream) -> Specs:
    """What one stream has of its own in a block."""
    out = _table(s.key("scale_shift_table"), s.rows, s.dim)
    if cfg.prompt_tables:
        out |= _table(s.key("prompt_scale_shift_table"), 2, s.dim)
    for name in ("attn1", "attn2"):
        out |= _attention(s.key(name), s.dim, s.dim, s.heads, s.head_dim, s.gated)
    up, down = f"{s.key('ff')}.net.0.proj", f"{s.key('ff')}.net.2"
    out |= linear_specs(up, s.dim, 4 * s.dim, axes=("mlp", "embed"), bias=s.ff_bias)
    return out | linear_specs(down, 4 * s.dim, s.dim, axes=("embed", "mlp"), bias=s.ff_bias)


def block_specs(cfg: LTX2Config) -> Specs:
    """Specs of one transformer block, keys local to the block."""
    out: Specs = {}
    for s in cfg.streams:
        out |= _stream_block(cfg, s)
    if cfg.crossed:
        video, audio = cfg.streams
        for s in cfg.streams:
            out |= _table(f"{s.name}_a2v_cross_attn_scale_shift_table", CROSS_ROWS, s.dim)
        sizes = (audio.heads, audio.head_dim)  # both directions have the audio stream's heads
        out |= _attention("audio_to_video_attn", video.dim, audio.dim, *sizes, video.gated)
        out |= _attention("video_to_audio_attn", audio.dim, video.dim, *sizes, audio.gated)
    return out


def _adaln(name: str, dim: int, rows: int) -> Specs:
    """A timestep embedding and its projection to `rows` modulations."""
    small, axes = specs.normal(0.02), ("embed", None)
    return {
        **linear_specs(f"{name}.emb.timestep_embedder.linear_1", TIME_DIM, dim, axes=axes, init=small),
        **linear_specs(f"{name}.emb.timestep_embedder.linear_2", dim, dim, axes=axes, init=small),
        **linear_specs(f"{name}.linear", dim, rows * dim, axes=axes),
    }


def _stream_root(cfg: LTX2Config, s: Stream) -> Specs:
    """What one stream has of its own outside the blocks."""
    out = {**_table(s.key("scale_shift_table"), 2, s.dim)}
    out |= linear_specs(s.key("proj_in"), s.in_channels, s.dim, axes=("embed", None))
    if cfg.use_prompt_embeddings:
        name = s.key("caption_projection")
        out |= linear_specs(f"{name}.linear_1", s.text_dim, s.dim, axes=("embed", None), init=specs.normal(0.02))
        out |= linear_specs(f"{name}.linear_2", s.dim, s.dim, axes=("embed", None), init=specs.normal(0.02))
    out |= _adaln(s.key("time_embed"), s.dim, s.rows)
    if cfg.prompt_tables and cfg.use_prompt_adaln_single:
        out |= _adaln(s.key("prompt_adaln"), s.dim, 2)
    if s.name == "video" and cfg.use_keyframes_abs_pos_embedding:
        out["keyframes_abs_pos_embedding"] = ParamSpec((1, s.dim), axes=(None, "embed"))
    # A zero head starts the model at velocity 0.
    return out | linear_specs(s.key("proj_out"), s.dim, s.out_channels, axes=(None, "embed"), init=specs.ZEROS)


def cross_adalns(s: Stream) -> tuple[str, str]:
    """The names of a stream's two AdaLNs for attention between streams: scale and shift, and gate."""
    gate = "a2v" if s.name == "video" else "v2a"
    return f"av_cross_attn_{s.name}_scale_shift", f"av_cross_attn_{s.name}_{gate}_gate"


def param_specs(cfg: LTX2Config) -> Specs:
    """Specs of the whole model; `cfg.modality` leaves out what only the other stream needs."""
    out: Specs = {}
    for s in cfg.streams:
        out |= _stream_root(cfg, s)
        if cfg.crossed:
            modulation, gate = cross_adalns(s)
            out |= _adaln(modulation, s.dim, CROSS_ROWS - 1) | _adaln(gate, s.dim, 1)
    one_block = block_specs(cfg)
    return out | {f"transformer_blocks.{i}.{k}": v for i in range(cfg.num_layers) for k, v in one_block.items()}


def pack_projections(cfg: LTX2Config) -> Transform:
    """The transform that joins q, k, v of self-attention (`to_qkv`) and k, v of every cross-attention (`to_kv`).

    One matrix product instead of three or two; the blocks take either layout. `core.transforms.invert` of the bound
    transform splits it again, bit by bit. With tensor parallelism bind it to the specs of local shards.
    """
    present = {key.split(".")[0] for key in block_specs(cfg)}
    inside = lambda names: [n for n in names if n in present]  # noqa: E731
    return compose(
        pack("to_qkv", ("to_q", "to_k", "to_v"), under=inside(SELF_ATTENTION)),
        pack("to_kv", ("to_k", "to_v"), under=inside(CROSS_ATTENTION)),
    )
