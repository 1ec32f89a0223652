"""LTX-2's text connectors: hidden states of all layers of the text encoder to the text of each stream.

Features come first: every layer is normalised and one linear layer joins them all. Then a small transformer per
stream, in which learned registers stand in place of padding, so that its output has no padding and needs no mask.
Features do not depend on the connectors: they may be computed once and kept.

Key names, config fields and numbers are those of Diffusers' `LTX2TextConnectors`.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from core import specs
from core.errors import UserError, raise_faults
from core.geometry import nearest_valid
from core.specs import ParamSpec, Specs
from core.trees import Params, stack
from kernels import gated_residual, norm_modulate, residual_gate_norm
from nn import layers
from nn.layers import affine_specs, linear, linear_specs, split_heads, wide
from nn.ltx2_config import MODALITIES, ROPE_TYPES
from nn.ltx2_rope import own_heads, rope_table
from nn.rope import Rope
from nn.run import Run

CLASS_NAME = "LTX2TextConnectors"
FIXED = {"causal_temporal_positioning": False}  # of no effect in Diffusers
STACKS = ("video_connector.transformer_blocks", "audio_connector.transformer_blocks")
EPS = 1e-6
LAYER_SCALE = 8.0  # a layer's values span this much after LTX-2.0's normalisation


@dataclasses.dataclass(frozen=True)
class ConnectorConfig:
    """Architecture; field names are those of a Diffusers `connectors/config.json`, and `modality`, which is ours.

    `text_proj_in_factor` is the number of hidden states of the text encoder, its embeddings among them.
    `per_modality_projections` is LTX-2.3's form: features of their own for each stream, of width `*_hidden_dim`.
    """

    caption_channels: int = 3840
    text_proj_in_factor: int = 49
    video_connector_num_attention_heads: int = 30
    video_connector_attention_head_dim: int = 128
    video_connector_num_layers: int = 2
    video_connector_num_learnable_registers: int = 128
    video_gated_attn: bool = False
    audio_connector_num_attention_heads: int = 30
    audio_connector_attention_head_dim: int = 128
    audio_connector_num_layers: int = 2
    audio_connector_num_learnable_registers: int = 128
    audio_gated_attn: bool = False
    connector_rope_base_seq_len: int = 4096
    rope_theta: float = 10000.0
    rope_double_precision: bool = True
    rope_type: str = "interleaved"
    per_modality_projections: bool = False
    video_hidden_dim: int = 4096
    audio_hidden_dim: int = 2048
    proj_bias: bool = False
    modality: str = "audio_video"

    def __post_init__(self):
        raise_faults("ConnectorConfig", _config_faults(self))

    @property
    def streams(self) -> tuple["Connector", ...]:
        """The connectors that this model has, video first."""
        return tuple(self.stream(name) for name in MODALITIES[self.modality])

    def stream(self, name: str) -> "Connector":
        """The sizes of one connector, `"video"` or `"audio"`, whether or not this model has it."""
        get = lambda field: getattr(self, f"{name}_{field}")  # noqa: E731
        return Connector(
            name=name,
            heads=get("connector_num_attention_heads"),
            head_dim=get("connector_attention_head_dim"),
            layers=get("connector_num_layers"),
            registers=get("connector_num_learnable_registers"),
            gated=get("gated_attn"),
            projection=f"{name}_text_proj_in" if self.per_modality_projections else "text_proj_in",
            feature_dim=get("hidden_dim") if self.per_modality_projections else self.caption_channels,
        )


@dataclasses.dataclass(frozen=True)
class Connector:
    """One stream's connector; `projection` names the linear layer that makes its features, of `feature_dim`."""

    name: str
    heads: int
    head_dim: int
    layers: int
    registers: int
    gated: bool
    projection: str
    feature_dim: int

    @property
    def dim(self) -> int:
        """Inner width, which is that of the features."""
        return self.heads * self.head_dim

    @property
    def prefix(self) -> str:
        """What its keys begin with."""
        return f"{self.name}_connector"


def _config_faults(cfg: ConnectorConfig) -> list[str]:
    sizes = [f.name for f in dataclasses.fields(cfg) if f.type is int]
    faults = [f"{n} must be at least 1, got {getattr(cfg, n)}" for n in sizes if getattr(cfg, n) < 1]
    for name, words in (("modality", tuple(MODALITIES)), ("rope_type", ROPE_TYPES)):
        if getattr(cfg, name) not in words:
            faults.append(f"{name} is {getattr(cfg, name)!r}, must be one of {', '.join(words)}")
    for s in (cfg.stream("video"), cfg.stream("audio")):
        if s.dim != s.feature_dim:
            faults.append(f"the {s.name} connector is {s.dim} wide, its features {s.feature_dim}: must be equal")
        if s.head_dim % 2:
            faults.append(f"{s.name}_connector_attention_head_dim must be even, got {s.head_dim}")
    return faults


PRESETS = {
    "ltx-2-19b": ConnectorConfig(rope_type="split"),
    "ltx-2.3-22b": ConnectorConfig(
        rope_type="split", per_modality_projections=True, proj_bias=True,
        video_connector_num_attention_heads=32, video_connector_num_layers=8, video_gated_attn=True,
        audio_connector_num_attention_heads=32, audio_connector_attention_head_dim=64, audio_connector_num_layers=8,
        audio_gated_attn=True,
    ),
}  # fmt: skip


# --- parameters -------------------------------------------------------------------------------------------------


def _block_specs(s: Connector) -> Specs:
    """Specs of one block, keys local to it."""
    out: Specs = {}
    for name in ("norm_q", "norm_k"):
        out |= affine_specs(f"attn1.{name}", s.dim, axis="heads", bias=False, keep_fp32=False)
    for name in ("to_q", "to_k", "to_v"):
        out |= linear_specs(f"attn1.{name}", s.dim, s.dim, axes=("heads", "embed"))
    out |= linear_specs("attn1.to_out.0", s.dim, s.dim, axes=("embed", "heads"))
    if s.gated:  # 2 sigmoid(0) = 1: a new gate lets everything through
        out |= linear_specs("attn1.to_gate_logits", s.dim, s.heads, axes=("heads", "embed"), init=specs.ZEROS)
    out |= linear_specs("ff.net.0.proj", s.dim, 4 * s.dim, axes=("mlp", "embed"))
    return out | linear_specs("ff.net.2", 4 * s.dim, s.dim, axes=("embed", "mlp"))


def param_specs(cfg: ConnectorConfig) -> Specs:
    """Specs of every leaf, keys and shapes as in the Diffusers checkpoint, of the streams of `cfg.modality`."""
    n_in = cfg.caption_channels * cfg.text_proj_in_factor
    out: Specs = {}
    for s in cfg.streams:
        out |= linear_specs(s.projection, n_in, s.feature_dim, axes=("embed", None), bias=cfg.proj_bias)
        table = ParamSpec((s.registers, s.dim), axes=(None, "embed"), init=specs.Init("uniform", 1.0))
        out[f"{s.prefix}.learnable_registers"] = table
        block = _block_specs(s)
        out |= {f"{s.prefix}.transformer_blocks.{i}.{k}": v for i in range(s.layers) for k, v in block.items()}
    return out


# --- features ---------------------------------------------------------------------------------------------------


def normalise_layers(hidden: Tensor, mask: Tensor) -> Tensor:
    """LTX-2.0's normalisation: per sample and layer, by the mean and the range over real tokens and channels.

    Args:
        hidden: `[B, L, C, layers]`. mask: bool `[B, L]`.

    Returns:
        `8 (x - mean) / (max - min)` in hidden's dtype, 0 at padding; computed in float32 or wider.
    """
    real, x = mask[:, :, None, None], hidden.to(wide(hidden))
    over = {"dim": (1, 2), "keepdim": True}
    count = real.sum(**over) * x.shape[2]
    mean = x.where(real, 0).sum(**over) / (count + EPS)
    span = x.where(real, -math.inf).amax(**over) - x.where(real, math.inf).amin(**over)
    return (LAYER_SCALE * (x - mean) / (span + EPS)).where(real, 0).to(hidden.dtype)


def normalise_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """LTX-2.3's normalisation: every token of every layer by its root mean square over channels.

    Arguments and result as of `normalise_layers`.
    """
    x = hidden.to(wide(hidden))
    x = x * torch.rsqrt(x.square().mean(2, keepdim=True) + EPS)
    return x.where(mask[:, :, None, None], 0).to(hidden.dtype)


def _checked(cfg: ConnectorConfig, hidden: Tensor) -> Tensor:
    """Hidden states as `[B, L, C, layers]`. Raises UserError for another width."""
    expected = (cfg.caption_channels, cfg.text_proj_in_factor)
    if hidden.ndim == 3 and hidden.shape[2] == math.prod(expected):
        hidden = hidden.unflatten(2, expected)
    if hidden.ndim != 4 or tuple(hidden.shape[2:]) != expected:
        wanted = f"[B, L, {expected[0]}, {expected[1]}], or the last two flattened"
        raise UserError(f"hidden states have shape {list(hidden.shape)}, expected {wanted}")
    return hidden


def _real(mask: Tensor, x: Tensor) -> Tensor:
    """A mask of tokens as bool. Raises UserError unless it is `[B, L]` of the tokens `x [B, L, ...]`."""
    if mask.shape != x.shape[:2]:
        raise UserError(f"mask has shape {list(mask.shape)}, the text {list(x.shape[:2])}")
    return mask.bool()


def stack_layers(hidden_states: Sequence[Tensor]) -> Tensor:
    """Hidden states `[B, L, C]` of all layers, embeddings first, as the connectors take them: `[B, L, C, layers]`."""
    return torch.stack(tuple(hidden_states), dim=-1)


def text_features(params: Params, cfg: ConnectorConfig, hidden: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """What the connectors start from, `{"video": [B, L, D], "audio": [B, L, D']}`; one tensor for both in LTX-2.0.

    Args:
        hidden: `[B, L, caption_channels, text_proj_in_factor]`, see `stack_layers`, or the last two flattened.
        mask: `[B, L]`, nonzero where a token is real.

    Raises:
        UserError: shapes that do not fit.
    """
    hidden = _checked(cfg, hidden)
    real = _real(mask, hidden)
    if not cfg.per_modality_projections:
        joint = linear(params, "text_proj_in", normalise_layers(hidden, real).flatten(2))
        return {s.name: joint for s in cfg.streams}
    x, width = normalise_tokens(hidden, real).flatten(2), cfg.caption_channels
    return {s.name: linear(params, s.projection, x * math.sqrt(s.feature_dim / width)) for s in cfg.streams}


# --- connectors -------------------------------------------------------------------------------------------------


def with_registers(x: Tensor, mask: Tensor, registers: Tensor) -> Tensor:
    """Real tokens moved to the front in their order, registers behind them up to the full length.

    Args:
        x: `[B, L, D]`. mask: bool `[B, L]`, padding anywhere. registers: `[R, D]`; the one at position i is `i mod R`.
    """
    length = x.shape[1]
    place = torch.arange(length, device=x.device)
    order = torch.where(mask, place, place + length).argsort(dim=1)
    front = x.take_along_dim(order[..., None], dim=1)
    tail = registers.to(x.dtype)[place % registers.shape[0]]
    return torch.where(place[:, None] < mask.sum(1)[:, None, None], front, tail)


def _rope(cfg: ConnectorConfig, s: Connector, length: int, device) -> Rope:
    """Cosines and sines `[1, L, heads, head_dim / 2]` of positions as fractions of `connector_rope_base_seq_len`."""
    place = torch.arange(length, dtype=torch.float32, device=device)
    intervals = torch.stack([place, place], dim=-1)[None, None]
    return rope_table(cfg, intervals, (cfg.connector_rope_base_seq_len,), s.heads, s.head_dim)


def _attention(p: Mapping[str, Tensor], x: Tensor, rope: Rope, s: Connector, pairs: str, run: Run) -> Tensor:
    x = run.tp.copy(x)
    q, k, v = layers.projections(p, "attn1", ("to_q", "to_k", "to_v"), x)
    weights = p["attn1.norm_q.weight"], p["attn1.norm_k.weight"]
    q, k = layers.norm_rope_heads(q, k, *weights, rope, s.head_dim, EPS, run.tp, pairs=pairs)
    out = run.attention(q, k, split_heads(v, s.head_dim), site="self")
    if s.gated:
        out = out * (2 * torch.sigmoid(linear(p, "attn1.to_gate_logits", x)))[..., None]
    return layers.reduced_linear(p, "attn1.to_out.0", out.flatten(2), run.tp)


def block(p: Mapping[str, Tensor], x: Tensor, rope: Rope, *, s: Connector, pairs: str, run: Run) -> Tensor:
    """One block: attention of all tokens and registers to each other, and an MLP, both after an RMS norm."""
    h = norm_modulate(x, eps=EPS, kind="rms")
    x, h = residual_gate_norm(x, _attention(p, h, rope, s, pairs, run), None, eps=EPS, kind="rms")
    return gated_residual(x, layers.gelu_mlp(p, "ff.net.0.proj", "ff.net.2", h, run.tp))


def _connect(params: Params, cfg: ConnectorConfig, s: Connector, x: Tensor, mask: Tensor, run: Run) -> Tensor:
    if x.ndim != 3 or x.shape[2] != s.feature_dim:
        raise UserError(f"{s.name} features have shape {list(x.shape)}, expected [B, L, {s.feature_dim}]")
    if x.shape[1] % s.registers:
        near = " or ".join(str(n) for n in nearest_valid(x.shape[1], s.registers))
        raise UserError(f"text of {x.shape[1]} tokens, must be a multiple of {s.registers} registers: nearest {near}")
    x = with_registers(x, _real(mask, x), params[f"{s.prefix}.learnable_registers"])
    rope = own_heads(_rope(cfg, s, x.shape[1], x.device), run.tp)
    pairs = "half" if cfg.rope_type == "split" else "interleaved"

    def step(p, carry, layer_x):
        return block(p, carry, rope, s=s, pairs=pairs, run=run), None

    x, _ = run.scan(step, x, stack(params, f"{s.prefix}.transformer_blocks"))
    return norm_modulate(x, eps=EPS, kind="rms")


def connect(
    params: Params, cfg: ConnectorConfig, features: Mapping[str, Tensor], mask: Tensor, *, run: Run = Run()
) -> dict[str, Tensor]:
    """Features to the text of each stream, `{"video": [B, L, D], "audio": [B, L, D']}`, in their dtype.

    The result has registers in place of padding, behind the text: all of it is to be attended to, without a mask.

    Args:
        params: leaves of `param_specs(cfg)`. features: as `text_features` gives them; L a multiple of the registers.
        mask: `[B, L]`, nonzero where a token is real.
        run: how layers run, with the whole text on every process.

    Raises:
        UserError: shapes that do not fit, with the nearest valid length.
    """
    missing = [f"{s.name} [B, L, {s.feature_dim}]" for s in cfg.streams if s.name not in features]
    raise_faults("text features are missing", missing)
    return {s.name: _connect(params, cfg, s, features[s.name], mask, run) for s in cfg.streams}


def forward(
    params: Params, cfg: ConnectorConfig, hidden: Tensor, mask: Tensor, *, run: Run = Run()
) -> dict[str, Tensor]:
    """`connect` of `text_features`: hidden states of all layers to the text of each stream."""
    return connect(params, cfg, text_features(params, cfg, hidden, mask), mask, run=run)


def to_json(cfg: ConnectorConfig) -> dict[str, Any]:
    """`config.json` of a Diffusers connectors folder; read it back with `config_files.read_config` and `FIXED`."""
    fields = json.loads(json.dumps(dataclasses.asdict(cfg)))
    del fields["modality"]
    return {"_class_name": CLASS_NAME, **fields, **FIXED}
