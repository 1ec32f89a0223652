"""Arithmetic of LTX-2, counted from the config: matrix products and attention, a multiply-add as two.

`model_flops` is the numerator of MFU. It follows the convention of the published figures: blocks only, backward twice
the forward, no recomputation. For the 19B model's video stream, 81 frames of 480 x 832 (4,290 tokens) and 1,024 text
tokens it is 353,880,819,892,224. PyTorch's counter reports 363,035,693,154,304 for such a step with a fused attention
backward; to the digit, the difference is

* 8,964,168,744,960: the scores that a fused attention backward computes again (`attention_scores`);
* 190,704,517,120: the layers outside the blocks (`root_flops`): 75,805,753,344 forward and 114,898,763,776
  backward, where the layers that read data (patches, text, sinusoids) have no gradient of their input.
"""

from collections.abc import Mapping

from nn.ltx2_config import LTX2Config, Stream
from nn.ltx2_specs import CROSS_ROWS, TIME_DIM

Counts = Mapping[str, int]


def _stream_products(s: Stream, tokens: int, text: int) -> int:
    """Multiply-adds of the linear layers of one stream in one block."""
    products = tokens * s.dim * s.dim * (4 + 2 + 8) + 2 * text * s.dim * s.dim
    return products + (2 * tokens * s.dim * s.heads if s.gated else 0)


def _cross_products(cfg: LTX2Config, tokens: Counts) -> int:
    """Multiply-adds of the linear layers between the streams in one block."""
    audio, total = cfg.stream("audio"), 0
    for s in cfg.streams:
        total += tokens[s.name] * s.dim * audio.dim * (2 + 2)  # q and out of one direction, k and v of the other
        total += tokens[s.name] * s.dim * audio.heads if s.gated else 0
    return total


def attention_scores(cfg: LTX2Config, tokens: Counts, text: Counts) -> int:
    """FLOPs of all scores q k^T, once: half of attention's forward pass."""
    total = sum(tokens[s.name] * (tokens[s.name] + text[s.name]) * s.dim for s in cfg.streams)
    if cfg.crossed:
        total += 2 * tokens["video"] * tokens["audio"] * cfg.stream("audio").dim
    return 2 * cfg.num_layers * total


def block_flops(cfg: LTX2Config, tokens: Counts, text: Counts) -> int:
    """One sample's forward pass through all blocks.

    Args:
        tokens, text: latent and text tokens per stream, `{"video": 4290, "audio": 84}`.
    """
    products = sum(_stream_products(s, tokens[s.name], text[s.name]) for s in cfg.streams)
    products += _cross_products(cfg, tokens) if cfg.crossed else 0
    return 2 * cfg.num_layers * products + 2 * attention_scores(cfg, tokens, text)


def model_flops(cfg: LTX2Config, tokens: Counts, text: Counts) -> int:
    """One sample's forward and backward pass as MFU counts them: three times the forward of the blocks."""
    return 3 * block_flops(cfg, tokens, text)


def _adalns(cfg: LTX2Config, s: Stream) -> list[tuple[int, bool]]:
    """`(rows, whether it may see a timestep per token)` of every AdaLN of one stream outside the blocks."""
    out = [(s.rows, True)]
    if cfg.prompt_tables and cfg.use_prompt_adaln_single:
        out.append((2, False))
    own = not cfg.use_cross_timestep
    return out + ([(CROSS_ROWS - 1, own), (1, own)] if cfg.crossed else [])


def root_flops(cfg: LTX2Config, tokens: Counts, text: Counts, timesteps: Counts | None = None) -> tuple[int, int]:
    """One sample's forward and backward pass outside the blocks.

    Args:
        timesteps: per stream the timesteps of a sample, 1 unless there is one per token. Prompts, and with
            `use_cross_timestep` attention between streams, always see one.
    """
    forward = unread = 0
    for s in cfg.streams:
        count = 1 if timesteps is None else timesteps[s.name]
        first = tokens[s.name] * s.in_channels * s.dim  # layers whose input has no gradient
        rest = tokens[s.name] * s.dim * s.out_channels
        if cfg.use_prompt_embeddings:
            first += text[s.name] * s.text_dim * s.dim
            rest += text[s.name] * s.dim * s.dim
        for rows, per_token in _adalns(cfg, s):
            n = count if per_token else 1
            first += n * TIME_DIM * s.dim
            rest += n * s.dim * s.dim * (1 + rows)
        forward += 2 * (first + rest)
        unread += 2 * first
    return forward, 2 * forward - unread


def counted_flops(
    cfg: LTX2Config, tokens: Counts, text: Counts, *, timesteps: Counts | None = None, fused: bool = True
) -> tuple[int, int]:  # fmt: skip
    """Forward and backward pass of a sample as PyTorch's FLOP counter sees them, without checkpointing.

    Args:
        fused: attention's backward computes the scores again, as flash kernels do and plain PyTorch does not.
    """
    blocks, (forward, backward) = block_flops(cfg, tokens, text), root_flops(cfg, tokens, text, timesteps)
    backward += 2 * blocks + (attention_scores(cfg, tokens, text) if fused else 0)
    if not cfg.use_prompt_embeddings and not cfg.prompt_tables:  # keys and values of text then read data
        backward -= sum(2 * cfg.num_layers * 2 * text[s.name] * s.dim * s.dim for s in cfg.streams)
    return blocks + forward, backward
