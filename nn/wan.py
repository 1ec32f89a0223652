"""Wan 2.1 and 2.2 video diffusion transformers (text-to-video, image-to-video, 5B text/image-to-video).

Key names are those of the Diffusers checkpoints. The native output is the velocity `noise - x0`.
"""

import dataclasses
import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from core import specs
from core.errors import raise_faults
from core.rules import pack
from core.specs import ParamSpec, Specs
from core.transforms import Transform, compose
from core.trees import stack
from kernels import gated_residual, norm_modulate, residual_gate_norm
from nn import layers, rope
from nn.layers import affine_specs, linear, linear_specs, split_heads
from nn.run import Run

STACKS = ("blocks",)
NUM_TRAIN_TIMESTEPS = 1000


@dataclasses.dataclass(frozen=True)
class WanConfig:
    """Architecture; field names are those of a Diffusers `transformer/config.json`."""

    num_attention_heads: int = 12
    attention_head_dim: int = 128
    ffn_dim: int = 8960
    num_layers: int = 30
    in_channels: int = 16
    out_channels: int = 16
    patch_size: tuple[int, int, int] = (1, 2, 2)
    text_dim: int = 4096
    freq_dim: int = 256
    cross_attn_norm: bool = True
    eps: float = 1e-6
    image_dim: int | None = None
    added_kv_proj_dim: int | None = None
    pos_embed_seq_len: int | None = None
    rope_max_seq_len: int = 1024

    def __post_init__(self):
        object.__setattr__(self, "patch_size", tuple(self.patch_size))
        sizes = ("num_attention_heads", "attention_head_dim", "ffn_dim", "num_layers", "in_channels", "out_channels")
        sizes += ("text_dim", "freq_dim", "rope_max_seq_len")
        faults = [f"{n} must be at least 1, got {getattr(self, n)}" for n in sizes if getattr(self, n) < 1]
        if self.attention_head_dim % 2 or self.attention_head_dim < 6:
            faults.append(f"attention_head_dim must be even and at least 6, got {self.attention_head_dim}")
        if self.freq_dim % 2:
            faults.append(f"freq_dim must be even, got {self.freq_dim}")
        if len(self.patch_size) != 3 or min(self.patch_size) < 1:
            faults.append(f"patch_size must be three positive integers, got {self.patch_size}")
        if (self.image_dim is None) != (self.added_kv_proj_dim is None):
            faults.append("image_dim and added_kv_proj_dim go together: set both or neither")
        elif self.added_kv_proj_dim not in (None, self.dim):
            faults.append(f"added_kv_proj_dim {self.added_kv_proj_dim} must equal the inner width {self.dim}")
        raise_faults("WanConfig", faults)

    @property
    def dim(self) -> int:
        """Inner width."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def condition_channels(self) -> int:
        """Channels that are concatenated to the latents (36 - 16 = 20 for image-to-video)."""
        return self.in_channels - self.out_channels


def _wan(heads: int, layers_: int, ffn: int, **rest) -> WanConfig:
    return WanConfig(num_attention_heads=heads, num_layers=layers_, ffn_dim=ffn, **rest)


PRESETS = {
    "wan2.1-t2v-1.3b": _wan(12, 30, 8960),
    "wan2.1-t2v-14b": _wan(40, 40, 13824),
    "wan2.1-i2v-14b": _wan(40, 40, 13824, in_channels=36, image_dim=1280, added_kv_proj_dim=5120),
    "wan2.2-ti2v-5b": _wan(24, 30, 14336, in_channels=48, out_channels=48),
}


def _attention_specs(name: str, dim: int, eps_axes=("heads", "embed")) -> Specs:
    out: Specs = {}
    for part in ("to_q", "to_k", "to_v"):
        out |= linear_specs(f"{name}.{part}", dim, dim, axes=eps_axes)
    out |= linear_specs(f"{name}.to_out.0", dim, dim, axes=eps_axes[::-1])
    for part in ("norm_q", "norm_k"):
        out |= affine_specs(f"{name}.{part}", dim, axis="heads", bias=False, keep_fp32=False)
    return out


def block_specs(cfg: WanConfig) -> Specs:
    """Specs of one transformer block, keys local to the block."""
    dim = cfg.dim
    table = ParamSpec((1, 6, dim), axes=(None, None, "embed"), init=specs.normal(dim**-0.5), keep_fp32=True)
    out = {"scale_shift_table": table, **_attention_specs("attn1", dim), **_attention_specs("attn2", dim)}
    if cfg.added_kv_proj_dim is not None:
        for part in ("add_k_proj", "add_v_proj"):
            out |= linear_specs(f"attn2.{part}", cfg.added_kv_proj_dim, dim, axes=("heads", "embed"))
        out |= affine_specs("attn2.norm_added_k", dim, axis="heads", bias=False, keep_fp32=False)
    if cfg.cross_attn_norm:
        out |= affine_specs("norm2", dim)
    out |= linear_specs("ffn.net.0.proj", dim, cfg.ffn_dim, axes=("mlp", "embed"))
    out |= linear_specs("ffn.net.2", cfg.ffn_dim, dim, axes=("embed", "mlp"))
    return out


def _embedder_specs(cfg: WanConfig) -> Specs:
    dim, small = cfg.dim, specs.normal(0.02)
    time, text = "condition_embedder.time_embedder", "condition_embedder.text_embedder"
    out = {
        **linear_specs(f"{time}.linear_1", cfg.freq_dim, dim, axes=("embed", None), init=small, keep_fp32=True),
        **linear_specs(f"{time}.linear_2", dim, dim, axes=("embed", None), init=small, keep_fp32=True),
        **linear_specs("condition_embedder.time_proj", dim, 6 * dim, axes=("embed", None)),
        **linear_specs(f"{text}.linear_1", cfg.text_dim, dim, axes=("embed", None), init=small),
        **linear_specs(f"{text}.linear_2", dim, dim, axes=("embed", None), init=small),
    }
    if cfg.image_dim is not None:
        image = "condition_embedder.image_embedder"
        out |= affine_specs(f"{image}.norm1", cfg.image_dim, axis=None)
        out |= linear_specs(f"{image}.ff.net.0.proj", cfg.image_dim, cfg.image_dim)
        out |= linear_specs(f"{image}.ff.net.2", cfg.image_dim, dim, axes=("embed", None))
        out |= affine_specs(f"{image}.norm2", dim)
        if cfg.pos_embed_seq_len is not None:
            out[f"{image}.pos_embed"] = ParamSpec((1, cfg.pos_embed_seq_len, cfg.image_dim))
    return out


def param_specs(cfg: WanConfig) -> Specs:
    """Specs of the whole model, keyed by the names of Diffusers' `WanTransformer3DModel`."""
    dim, patch = cfg.dim, cfg.patch_size
    volume = patch[0] * patch[1] * patch[2]
    one_block = block_specs(cfg)
    return {
        **linear_specs("patch_embedding", cfg.in_channels, dim, axes=("embed", None), kernel=patch),
        **_embedder_specs(cfg),
        **{f"blocks.{i}.{k}": s for i in range(cfg.num_layers) for k, s in one_block.items()},
        # A zero head starts the model at velocity 0.
        **linear_specs("proj_out", dim, cfg.out_channels * volume, axes=(None, "embed"), init=specs.ZEROS),
        "scale_shift_table": ParamSpec(
            (1, 2, dim), axes=(None, None, "embed"), init=specs.normal(dim**-0.5), keep_fp32=True
        ),
    }


def pack_projections() -> Transform:
    """The transform that joins q, k, v of self-attention (`to_qkv`) and k, v of text cross-attention (`to_kv`).

    One matrix product instead of three or two; blocks take either layout. `core.transforms.invert` of the bound
    transform splits it again, bit by bit. With tensor parallelism bind it to the specs of local shards.
    """
    return compose(
        pack("to_qkv", ("to_q", "to_k", "to_v"), under=("attn1",)), pack("to_kv", ("to_k", "to_v"), under=("attn2",))
    )


def _self_attention(p, x: Tensor, *, cfg: WanConfig, run: Run, angles) -> Tensor:
    x = run.tp.copy(x)
    q, k, v = layers.projections(p, "attn1", ("to_q", "to_k", "to_v"), x)
    weights = (p["attn1.norm_q.weight"], p["attn1.norm_k.weight"])
    q, k = layers.norm_rope_heads(q, k, *weights, angles, cfg.attention_head_dim, cfg.eps, run.tp)
    out = run.attention(q, k, split_heads(v, cfg.attention_head_dim), site="self")
    return layers.reduced_linear(p, "attn1.to_out.0", out.flatten(2), run.tp)


def _cross_attention(p, x: Tensor, *, cfg: WanConfig, run: Run, const: Mapping[str, Tensor]) -> Tensor:
    x, text = run.tp.copy(x), run.tp.copy(const["text"])
    normed = functools.partial(layers.norm_heads, head_dim=cfg.attention_head_dim, eps=cfg.eps, tp=run.tp)
    heads = functools.partial(split_heads, head_dim=cfg.attention_head_dim)
    q = normed(linear(p, "attn2.to_q", x), p["attn2.norm_q.weight"])
    k, v = layers.projections(p, "attn2", ("to_k", "to_v"), text)
    k, v = normed(k, p["attn2.norm_k.weight"]), heads(v)
    out = run.attention(q, k, v, site="cross_text", key_mask=const.get("text_mask"))
    if "image" in const:
        image = run.tp.copy(const["image"])
        k = normed(linear(p, "attn2.add_k_proj", image), p["attn2.norm_added_k.weight"])
        v = heads(linear(p, "attn2.add_v_proj", image))
        out = out + run.attention(q, k, v, site="cross_image")
    return layers.reduced_linear(p, "attn2.to_out.0", out.flatten(2), run.tp)


def block(p: Mapping[str, Tensor], x: Tensor, _, *, cfg: WanConfig, run: Run, const: Mapping[str, Tensor]):
    """One transformer block: self-attention, cross-attention, MLP.

    Args:
        p: block-local tree. x: `[B, N, D]`.
        const: `modulation` `[B, 1, 6, D]` or `[B, N, 6, D]`, `cos`/`sin` `[N, head_dim/2]`, `text`
            `[B, L, D]`, optional `text_mask` bool `[B, L]` and `image` `[B, M, D]`.

    Returns:
        `(x, None)`.
    """
    table = p["scale_shift_table"].to(layers.wide(x)) + const["modulation"]
    shift1, scale1, gate1, shift3, scale3, gate3 = table.unbind(2)
    h = norm_modulate(x, eps=cfg.eps, scale=scale1, shift=shift1)
    y = _self_attention(p, h, cfg=cfg, run=run, angles=(const["cos"], const["sin"]))
    if cfg.cross_attn_norm:
        x, h = residual_gate_norm(x, y, gate1, eps=cfg.eps, weight=p["norm2.weight"], bias=p["norm2.bias"])
    else:
        h = x = gated_residual(x, y, gate1)
    y = _cross_attention(p, h, cfg=cfg, run=run, const=const)
    x, h = residual_gate_norm(x, y, None, eps=cfg.eps, scale=scale3, shift=shift3)
    y = layers.gelu_mlp(p, "ffn.net.0.proj", "ffn.net.2", h, run.tp)
    return gated_residual(x, y, gate3), None


def embed_image(p: Mapping[str, Tensor], cfg: WanConfig, image: Tensor) -> Tensor:
    """CLIP features `[B, M, image_dim]` (`[2B, M/2, image_dim]` with first and last frame) -> `[B, M, D]`."""
    name = "condition_embedder.image_embedder"
    if cfg.pos_embed_seq_len is not None:
        image = image.reshape(-1, 2 * image.shape[1], image.shape[2]) + p[f"{name}.pos_embed"].to(image.dtype)
    norm = lambda x, which: norm_modulate(  # noqa: E731
        x, eps=1e-5, weight=p[f"{name}.{which}.weight"], bias=p[f"{name}.{which}.bias"]
    )
    h = F.gelu(linear(p, f"{name}.ff.net.0.proj", norm(image, "norm1")))
    return norm(linear(p, f"{name}.ff.net.2", h), "norm2")


def embed_time(p: Mapping[str, Tensor], cfg: WanConfig, timestep: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Timesteps `[B]` or `[B, N]` -> embedding `[B, 1|N, D]` and modulation `[B, 1|N, 6, D]`.

    The embedder runs in float32 or wider; the projection in `dtype`.
    """
    t = timestep[:, None] if timestep.ndim == 1 else timestep
    h = layers.timestep_embedding(t, cfg.freq_dim).to(torch.promote_types(dtype, torch.float32))
    h = linear(p, "condition_embedder.time_embedder.linear_1", h)
    emb = linear(p, "condition_embedder.time_embedder.linear_2", F.silu(h)).to(dtype)
    modulation = linear(p, "condition_embedder.time_proj", F.silu(emb)).unflatten(-1, (6, -1))
    return emb, modulation.to(layers.wide(emb))


def embed_text(p: Mapping[str, Tensor], text: Tensor) -> Tensor:
    """Text embeddings `[B, L, text_dim] -> [B, L, D]`."""
    name = "condition_embedder.text_embedder"
    h = F.gelu(linear(p, f"{name}.linear_1", text), approximate="tanh")
    return linear(p, f"{name}.linear_2", h)


def forward(params, cfg: WanConfig, inputs: Mapping[str, Tensor], *, run: Run = Run()) -> Tensor:
    """Velocity `noise - x0` `[B, out_channels, T, H, W]` in the dtype of the latents.

    Args:
        params: flat tree, or `Layered`.
        inputs: as `nn.wan_inputs.model_inputs` builds them: `latents` `[B, in_channels, T, H, W]` (its dtype
            is the compute dtype), `timestep` `[B]` or per token `[B, N]` in 0..1000, `text`
            `[B, L, text_dim]`, optional `text_mask` bool `[B, L]` and `image` `[B, M, image_dim]`.
        run: how layers run.
    """
    latents, timestep = inputs["latents"], inputs["timestep"]
    grid = tuple(n // p for n, p in zip(latents.shape[2:], cfg.patch_size, strict=True))
    split = lambda t, dim: run.tokens.split(t, dim)  # noqa: E731

    x = linear(params, "patch_embedding", split(layers.patchify(latents, cfg.patch_size), 1))
    cos, sin = (split(t, 0) for t in rope.rope_3d(grid, cfg.attention_head_dim, device=latents.device))
    if timestep.ndim == 2:
        timestep = split(timestep, 1)
    emb, modulation = embed_time(params, cfg, timestep, latents.dtype)
    const = {"modulation": modulation, "cos": cos, "sin": sin, "text": embed_text(params, inputs["text"])}
    if "text_mask" in inputs:
        const["text_mask"] = inputs["text_mask"]
    if "image" in inputs:
        const["image"] = embed_image(params, cfg, inputs["image"])

    def step(p, carry, layer_x):
        return block(p, carry, layer_x, cfg=cfg, run=run, const=const)

    x, _ = run.scan(step, x, stack(params, "blocks"))
    table = params["scale_shift_table"].to(layers.wide(emb)) + emb[:, :, None].to(layers.wide(emb))
    shift, scale = table.unbind(2)
    x = norm_modulate(x, eps=cfg.eps, scale=scale, shift=shift)
    x = run.tokens.merge(linear(params, "proj_out", x), 1, grid[0] * grid[1] * grid[2])
    return layers.unpatchify(x, cfg.patch_size, grid)
