"""LTX-2, LTX-2.3 and LTX-2.5: the two-stream audio-video diffusion transformer as a pure function.

Key names are those of Diffusers' `LTX2VideoTransformer3DModel`. The native output is the velocity `noise - x0` of
each stream; `clean_estimates` turns it into x0.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.trees import stack
from kernels import gated_residual, norm_modulate, residual_gate_norm
from nn import layers, ltx2_rope
from nn.layers import linear, split_heads
from nn.ltx2_config import LTX2Config, Stream
from nn.ltx2_rope import own_heads
from nn.ltx2_specs import STACKS, TIME_DIM, cross_adalns, param_specs
from nn.rope import Rope
from nn.run import Run, Tokens

__all__ = ["SKIPS", "STACKS", "block", "clean_estimates", "forward", "param_specs"]

SKIPS = ("self", "audio_self", "a2v", "v2a")
"""The attention sites that a guidance pass can skip: the rows of the keep-mask."""

SELF_SITE = {"video": "self", "audio": "audio_self"}
TEXT_SITE = {"video": "cross_text", "audio": "audio_text"}
INCOMING = {"video": ("a2v", "audio", "audio_to_video_attn"), "audio": ("v2a", "video", "video_to_audio_attn")}
"""Of a stream: the site of its attention to the other stream, that stream, and the name of the layer."""


def _kept(keep: Tensor | None, site: str) -> Tensor | None:
    """Which samples run the attention at `site`, bool `[B]`; None when all do."""
    return None if keep is None else keep[SKIPS.index(site)]


def _heads(
    p, name: str, x: Tensor, context: Tensor | None, ropes: tuple[Rope | None, Rope | None], head_dim: int,
    cfg: LTX2Config, run: Run,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries of x, keys and values of the context (None: of x), `[B, L, H, D]`, from split or packed weights."""
    weights = p[f"{name}.norm_q.weight"], p[f"{name}.norm_k.weight"]
    pairs = "half" if cfg.rope_type == "split" else "interleaved"
    shared = {"head_dim": head_dim, "eps": cfg.norm_eps, "tp": run.tp, "pairs": pairs}
    if context is None:
        q, k, v = layers.projections(p, name, ("to_q", "to_k", "to_v"), x)
        q, k = layers.norm_rope_heads(q, k, *weights, ropes[0], **shared)
    else:
        q = linear(p, f"{name}.to_q", x)
        k, v = layers.projections(p, name, ("to_k", "to_v"), run.tp.copy(context))
        q, k = (layers.norm_heads(t, w, rope=r, **shared) for t, w, r in zip((q, k), weights, ropes, strict=True))
    return q, k, split_heads(v, head_dim)


def _attention(
    p, name: str, x: Tensor, context: Tensor | None, ropes: tuple[Rope | None, Rope | None], *, head_dim: int,
    cfg: LTX2Config, run: Run, site: str, keep: Tensor | None = None, **masks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of x `[B, Lq, Dq]` over the context `[B, Lk, Dk]` (None: over x) -> `[B, Lq, Dq]`.

    Where `keep` `[B]` is False, a token gets its own values instead of attention's (spatio-temporal guidance).
    """
    x = run.tp.copy(x)
    q, k, v = _heads(p, name, x, context, ropes, head_dim, cfg, run)
    out = run.attention(q, k, v, site=site, **masks)
    if keep is not None:  # chosen, not multiplied: what was not to run cannot spread a NaN
        out = torch.where(keep[:, None, None, None], out, v)
    if f"{name}.to_gate_logits.weight" in p:
        out = out * (2 * torch.sigmoid(linear(p, f"{name}.to_gate_logits", x)))[..., None]
    return layers.reduced_linear(p, f"{name}.to_out.0", out.flatten(2), run.tp)


def _text(p, s: Stream, cfg: LTX2Config, c: Mapping[str, Any]) -> Tensor:
    """The text that keys and values are made of, `[B, L, D]`, where there is a table for it shifted and scaled."""
    text = c["text"]
    if not cfg.prompt_tables:
        return text
    table = p[s.key("prompt_scale_shift_table")].to(layers.wide(text))
    shift, scale = (table + c["prompt"] if "prompt" in c else table[None, None]).unbind(2)
    return (text.to(shift.dtype) * (1 + scale) + shift).to(text.dtype)


State = tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]


def _own_attention(p, s: Stream, x: Tensor, keep: Tensor | None, cfg: LTX2Config, run: Run, c: Mapping) -> State:
    """A stream's attention to itself and to its text.

    Returns the residual stream, what is to be added to it, the gate of that (None for 1), and the modulation of
    the MLP: the addition is fused with the norm that comes next.
    """
    rows = (p[s.key("scale_shift_table")].to(layers.wide(x)) + c["modulation"]).unbind(2)
    shared = {"head_dim": s.head_dim, "cfg": cfg, "run": run}
    h = norm_modulate(x, eps=cfg.norm_eps, kind="rms", scale=rows[1], shift=rows[0])
    site = SELF_SITE[s.name]
    ropes, kept = (c["rope"], c["rope"]), _kept(keep, site)
    y = _attention(p, s.key("attn1"), h, None, ropes, site=site, keep=kept, bias=c.get("bias"), **shared)
    modulation = {"scale": rows[7], "shift": rows[6]} if s.mod else {}
    x, h = residual_gate_norm(x, y, rows[2], eps=cfg.norm_eps, kind="rms", **modulation)
    text, site = _text(p, s, cfg, c), TEXT_SITE[s.name]
    y = _attention(p, s.key("attn2"), h, text, (None, None), site=site, key_mask=c.get("text_mask"), **shared)
    return x, y, rows[8] if s.mod else None, rows[3:6]


def _attend_across(p, states: Mapping[str, State], keep, cfg: LTX2Config, run: Run, const) -> dict[str, State]:
    """Attention of each stream to the other, both from the streams as they were before either was changed."""
    residual, normed, gates = {}, {}, {}
    for name, (x, y, gate, _) in states.items():
        table = p[f"{name}_a2v_cross_attn_scale_shift_table"].to(layers.wide(x))
        a2v_scale, a2v_shift, v2a_scale, v2a_shift = (table[:4] + const[name]["cross"]).unbind(2)
        gates[name] = table[4] + const[name]["cross_gate"]
        x, for_a2v = residual_gate_norm(x, y, gate, eps=cfg.norm_eps, kind="rms", scale=a2v_scale, shift=a2v_shift)
        for_v2a = norm_modulate(x, eps=cfg.norm_eps, kind="rms", scale=v2a_scale, shift=v2a_shift)
        residual[name], normed[name] = x, {"a2v": for_a2v, "v2a": for_v2a}
    out, head_dim = {}, cfg.stream("audio").head_dim
    for name, (*_, mlp) in states.items():
        site, other, layer = INCOMING[name]
        ropes = const[name]["cross_rope"], const[other]["cross_rope"]
        x, context = normed[name][site], normed[other][site]
        y = _attention(p, layer, x, context, ropes, head_dim=head_dim, cfg=cfg, run=run, site=site)
        if (kept := _kept(keep, site)) is not None:
            y = torch.where(kept[:, None, None], y, torch.zeros_like(y))
        out[name] = residual[name], y, gates[name], mlp
    return out


def _mlp(p, s: Stream, state: State, cfg: LTX2Config, run: Run) -> Tensor:
    x, y, gate, (mlp_shift, mlp_scale, mlp_gate) = state
    x, h = residual_gate_norm(x, y, gate, eps=cfg.norm_eps, kind="rms", scale=mlp_scale, shift=mlp_shift)
    name = s.key("ff")
    return gated_residual(x, layers.gelu_mlp(p, f"{name}.net.0.proj", f"{name}.net.2", h, run.tp), mlp_gate)


def block(p: Mapping[str, Tensor], carry: Mapping[str, Tensor], keep: Tensor | None, *, cfg: LTX2Config, run: Run,
          const: Mapping[str, Mapping[str, Any]]):  # fmt: skip
    """One transformer block.

    Args:
        p: block-local tree, with split or packed projections. carry: per stream `[B, N, D]`.
        keep: bool `[4, B]` in the order of `SKIPS`; None runs everything.
        const: per stream what all blocks share, as `_stream_inputs` makes it.

    Returns:
        `(carry, None)`.
    """
    streams = cfg.streams
    states = {s.name: _own_attention(p, s, carry[s.name], keep, cfg, run, const[s.name]) for s in streams}
    if cfg.crossed:
        states = _attend_across(p, states, keep, cfg, run, const)
    return {s.name: _mlp(p, s, states[s.name], cfg, run) for s in streams}, None


def adaln(p: Mapping[str, Tensor], name: str, timestep: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Timesteps `[B, T]` in 0..1000 -> modulation `[B, T, rows * D]` and embedding `[B, T, D]`, in `dtype`.

    The sinusoids are float32 whatever the dtype, as in the public models.
    """
    h = layers.timestep_embedding(timestep.float(), TIME_DIM).to(dtype)
    h = linear(p, f"{name}.emb.timestep_embedder.linear_1", h)
    emb = linear(p, f"{name}.emb.timestep_embedder.linear_2", F.silu(h))
    return linear(p, f"{name}.linear", F.silu(emb)), emb


def _rows(modulation: Tensor, dim: int) -> Tensor:
    """`[B, T, rows * D] -> [B, T, rows, D]`, float32 or wider."""
    return modulation.unflatten(-1, (-1, dim)).to(layers.wide(modulation))


def embed_text(p: Mapping[str, Tensor], s: Stream, text: Tensor) -> Tensor:
    """Text embeddings `[B, L, text_dim] -> [B, L, D]`; as they are in models without a caption projection."""
    name = s.key("caption_projection")
    if f"{name}.linear_1.weight" not in p:
        return text
    return linear(p, f"{name}.linear_2", F.gelu(linear(p, f"{name}.linear_1", text), approximate="tanh"))


def _tokens(s: Stream, run: Run) -> Tokens:
    """How a stream's tokens are shared: video as `run` says, audio is whole on every process."""
    return run.tokens if s.name == "video" else Tokens()


def _embed(p, s: Stream, inputs: Mapping[str, Tensor], run: Run) -> Tensor:
    """Latent tokens -> `[B, N, D]`."""
    split = _tokens(s, run).split
    x = linear(p, s.key("proj_in"), split(inputs[s.name], 1))
    if s.name == "video" and "keyframes" in inputs:
        x = torch.where(split(inputs["keyframes"], 1)[..., None], x + p["keyframes_abs_pos_embedding"].to(x.dtype), x)
    return x


def _stream_inputs(p, s: Stream, cfg: LTX2Config, inputs: Mapping[str, Tensor], run: Run) -> dict[str, Any]:
    """What all blocks share of one stream, and `embedding` `[B, 1|N, D]` for the output.

    `modulation` `[B, 1|N, rows, D]`, `rope`, `text` `[B, L, D]`, `text_mask`, `bias`, `prompt` `[B, 1, 2, D]`, and
    for attention between the streams `cross` `[B, T, 4, D]`, `cross_gate` `[B, T, D]`, `cross_rope`.
    """
    split, dtype = _tokens(s, run).split, inputs[s.name].dtype
    timestep, positions = split(inputs[f"{s.name}_timestep"], 1), split(inputs[f"{s.name}_positions"], 2)
    modulation, embedding = adaln(p, s.key("time_embed"), timestep, dtype)
    c = {"modulation": _rows(modulation, s.dim), "embedding": embedding}
    c["rope"] = own_heads(ltx2_rope.self_rope(cfg, s, positions), run.tp)
    c["text"] = embed_text(p, s, inputs[f"{s.name}_text"])
    c |= {k: inputs[f"{s.name}_{k}"] for k in ("text_mask", "bias") if f"{s.name}_{k}" in inputs}
    if cfg.prompt_tables and cfg.use_prompt_adaln_single:
        prompt, _ = adaln(p, s.key("prompt_adaln"), inputs[f"{s.name}_level"], dtype)
        c["prompt"] = _rows(prompt, s.dim)
    if cfg.crossed:
        other = INCOMING[s.name][1]
        source = inputs[f"{other}_level"] if cfg.use_cross_timestep else timestep
        modulation_name, gate_name = cross_adalns(s)
        c["cross"] = _rows(adaln(p, modulation_name, source, dtype)[0], s.dim)
        factor = cfg.cross_attn_timestep_scale_multiplier / cfg.timestep_scale_multiplier
        c["cross_gate"] = adaln(p, gate_name, source * factor, dtype)[0].to(layers.wide(embedding))
        c["cross_rope"] = own_heads(ltx2_rope.cross_rope(cfg, positions), run.tp)
    return c


def _velocity(p, s: Stream, x: Tensor, embedding: Tensor, cfg: LTX2Config, run: Run, length: int) -> Tensor:
    """The output layer: `[B, N, D] -> [B, length, C]`."""
    wide = layers.wide(x)
    shift, scale = (p[s.key("scale_shift_table")].to(wide) + embedding[:, :, None].to(wide)).unbind(2)
    x = norm_modulate(x, eps=cfg.norm_eps, scale=scale, shift=shift)
    return _tokens(s, run).merge(linear(p, s.key("proj_out"), x), 1, length)


def forward(params, cfg: LTX2Config, inputs: Mapping[str, Tensor], *, run: Run = Run()) -> dict[str, Tensor]:
    """Velocity `noise - x0` of each stream, `{"video": [B, N, C], "audio": [B, M, C]}`, in the dtype of its tokens.

    Args:
        params: flat tree, or `Layered`.
        inputs: as `nn.ltx2_inputs.model_inputs` builds them, checked there.
        run: how layers run. `run.tokens` is the video stream's; audio is whole on every process.
    """
    streams = cfg.streams
    const = {s.name: _stream_inputs(params, s, cfg, inputs, run) for s in streams}
    embeddings = {name: c.pop("embedding") for name, c in const.items()}
    keep = inputs.get("keep")
    xs = None if keep is None else [k.contiguous() for k in keep.unbind(1)]

    def step(p, carry, layer_x):
        return block(p, carry, layer_x, cfg=cfg, run=run, const=const)

    carry = {s.name: _embed(params, s, inputs, run) for s in streams}
    carry, _ = run.scan(step, carry, stack(params, STACKS[0]), xs)
    return {
        s.name: _velocity(params, s, carry[s.name], embeddings[s.name], cfg, run, inputs[s.name].shape[1])
        for s in streams
    }


def clean_estimates(
    cfg: LTX2Config, inputs: Mapping[str, Tensor], velocities: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The x0 that the model's velocities imply: `x - sigma v` with each token's own sigma, in float32 or wider.

    Args:
        inputs: those of the model's call, or others with the same entries whose latents are not rounded to the compute
            dtype. velocities: `forward`'s result.
    """
    out = {}
    for name, velocity in velocities.items():
        wide = layers.wide(inputs[name])
        sigma = inputs[f"{name}_timestep"].to(wide) / cfg.timestep_scale_multiplier
        out[name] = inputs[name].to(wide) - sigma[..., None] * velocity.to(wide)
    return out
