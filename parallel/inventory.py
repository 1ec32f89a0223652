"""What a plan knows of a model: its leaves, and the residual branches of one layer.

Everything a plan counts beside the leaves (arithmetic, activations, collectives inside layers) follows from `Branch`es:
a layer is a sequence of `x = x + gate * branch(norm(x), context)`, each an attention or an MLP.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

from core.specs import Specs
from core.trees import components, split_key
from nn import ltx2, wan
from nn.ltx2_config import PRESETS as LTX2_PRESETS
from nn.ltx2_config import LTX2Config, Stream
from nn.ltx2_specs import CROSS_ROWS


@dataclasses.dataclass(frozen=True)
class Branch:
    """One residual branch of a layer.

    Args:
        site: the attention's site (`kernels.attention`), or `mlp`.
        stream: the tokens that it is added to.
        keys: streams that are attended to, each with an attention of its own; empty for an MLP.
        width: inner width, `heads * head_dim` or that of the MLP.
        heads: of the attention; they are what `tp` splits, and `sp` where tokens are traded for heads.
        gated: whether the output is multiplied by a gate that has a gradient.
        head_gates: whether each head is multiplied by a gate that is computed from its tokens.
    """

    site: str
    stream: str
    keys: tuple[str, ...]
    width: int
    heads: int = 0
    gated: bool = True
    head_gates: bool = False


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to plan.

    Args:
        specs: global shapes, logical axes and float32 exceptions of all leaves.
        stacks: names of the stacks of layers.
        widths: streams of tokens and the width of their residual.
        branches: of one layer, in order.
        stream_of: key of a matrix -> the stream whose tokens it multiplies; "sample" for once per sample.
        split: streams that sequence parallelism cuts; the others are whole on every rank.
        rows: modulation vectors that a layer makes per sample (or per token), by stream.
        lengths: tokens of the streams that are given with a default.
        context_rows: whether each layer shifts and scales its context anew.
    """

    name: str
    specs: Specs
    stacks: tuple[str, ...]
    widths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    branches: tuple[Branch, ...] = ()
    stream_of: Callable[[str], str] = lambda key: "sample"
    split: tuple[str, ...] = ()
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    context_rows: bool = False

    @property
    def heads(self) -> dict[str, int]:
        """Heads of every attention of a layer."""
        return {b.site: b.heads for b in self.branches if b.keys}


def num_layers(model: Model) -> int:
    """Layers of all stacks."""
    return len({(n, at[0]) for k in model.specs for n in model.stacks if (at := split_key(k, n)) is not None})


def forward_flops(model: Model, lengths: Mapping[str, int], *, layers_only: bool = False, sp: int = 1) -> int:
    """FLOPs of one sample's forward pass: two per element of a matrix and token, four per pair of tokens and width of
    attention. `layers_only` leaves out what lies outside the stacks, as published figures do. With `sp`, those of one
    of so many ranks that share the tokens of split streams: each projects the contexts for itself.
    """
    tokens = {name: -(-n // sp) if name in model.split else n for name, n in lengths.items()} | {"sample": 1}
    total = 0
    for key, spec in model.specs.items():
        layer = any(split_key(key, name) is not None for name in model.stacks)
        matrix = len(spec.shape) >= 2 and key.endswith(".weight")
        if matrix and (layer or not layers_only):
            total += 2 * math.prod(spec.shape) * tokens[model.stream_of(key)]
    for b in model.branches:
        shared = {b.stream, *b.keys} & set(model.split)
        pairs = sum(4 * lengths[b.stream] * lengths[k] * b.width for k in b.keys)
        total += num_layers(model) * pairs // (sp if shared else 1)
    return total


# --- Wan ----------------------------------------------------------------------------------------------------------

IMAGE_TOKENS = 257  # of CLIP ViT-H/14


def _wan_stream(key: str) -> str:
    parts = components(key)
    if parts[0] in wan.STACKS:
        if parts[2] == "attn2" and parts[3] in ("to_k", "to_v"):
            return "text"
        return "image" if parts[3].startswith("add_") else "video"
    by_name = {"text_embedder": "text", "image_embedder": "image", "patch_embedding": "video", "proj_out": "video"}
    return next((by_name[p] for p in parts if p in by_name), "sample")


def wan_model(name: str, cfg: wan.WanConfig) -> Model:
    """A Wan transformer: video tokens, text, and with `image_dim` the tokens of a picture."""
    image, h, d = cfg.image_dim is not None, cfg.num_attention_heads, cfg.dim
    context = ("text", "image") if image else ("text",)
    return Model(
        name,
        wan.param_specs(cfg),
        wan.STACKS,
        widths=dict.fromkeys(("video", *context), d),
        branches=(
            Branch("self", "video", ("video",), d, h),
            Branch("cross_text", "video", context, d, h, gated=False),
            Branch("mlp", "video", (), cfg.ffn_dim),
        ),
        stream_of=_wan_stream,
        split=("video",),
        rows={"video": 6},
        lengths={"text": 512, **({"image": IMAGE_TOKENS} if image else {})},
    )


# --- LTX-2 --------------------------------------------------------------------------------------------------------


def _ltx2_stream(key: str) -> str:
    parts = components(key)
    keys = parts[-2] in ("to_k", "to_v")
    if "audio_to_video_attn" in parts:
        return "audio" if keys else "video"
    if "video_to_audio_attn" in parts:
        return "video" if keys else "audio"
    stream = "audio" if any(p.startswith("audio_") for p in parts) else "video"
    if parts[0] in ltx2.STACKS:
        return f"{stream}_text" if keys and parts[2].endswith("attn2") else stream
    if parts[0].endswith("caption_projection"):
        return f"{stream}_text"
    return stream if parts[0].endswith(("proj_in", "proj_out")) else "sample"


def _ltx2_own(s: Stream) -> list[Branch]:
    text, shared = f"{s.name}_text", {"heads": s.heads, "head_gates": s.gated}
    return [
        Branch(ltx2.SELF_SITE[s.name], s.name, (s.name,), s.dim, **shared),
        Branch(ltx2.TEXT_SITE[s.name], s.name, (text,), s.dim, gated=s.mod, **shared),
    ]


def ltx2_model(name: str, cfg: LTX2Config) -> Model:
    """An LTX-2 transformer: video, audio or both, each with its text, and attention between the two."""
    streams, audio = cfg.streams, cfg.stream("audio")
    branches = [b for s in streams for b in _ltx2_own(s)]
    if cfg.crossed:
        branches += [
            Branch(site, to, (source,), audio.dim, heads=audio.heads, head_gates=cfg.stream(to).gated)
            for to, (site, source, _) in ltx2.INCOMING.items()
        ]
    branches += [Branch("mlp", s.name, (), 4 * s.dim) for s in streams]
    # 25 audio latents a second; 81 frames at 24 a second.
    lengths = {f"{s.name}_text": 1024 for s in streams} | ({"audio": 84} if audio in streams else {})
    return Model(
        name,
        ltx2.param_specs(cfg),
        ltx2.STACKS,
        widths={key: s.dim for s in streams for key in (s.name, f"{s.name}_text")},
        branches=tuple(branches),
        stream_of=_ltx2_stream,
        split=("video",),
        rows={s.name: s.rows + CROSS_ROWS * cfg.crossed for s in streams},
        lengths=lengths,
        context_rows=cfg.prompt_tables,
    )


WAN = {name: lambda name=name: wan_model(name, wan.PRESETS[name]) for name in wan.PRESETS}
LTX2 = {name: lambda name=name: ltx2_model(name, LTX2_PRESETS[name]) for name in LTX2_PRESETS} | {
    f"{name}-video": lambda name=name: ltx2_model(
        f"{name}-video", dataclasses.replace(LTX2_PRESETS[name], modality="video")
    )
    for name in LTX2_PRESETS
}
PRESETS: dict[str, Callable[[], Model]] = WAN | LTX2
# Video tokens of 81 frames at 480x832 after patchify: VAE strides (4, 8, 8), of Wan2.2's 5B (4, 16, 16), of LTX-2 (8,
# 32, 32).
GRIDS = dict.fromkeys(WAN, (21, 30, 52)) | {"wan2.2-ti2v-5b": (21, 15, 26)} | dict.fromkeys(LTX2, (11, 15, 26))
