"""Arithmetic of one training step of Wan, counted from the config."""

import functools

from nn.wan import WanConfig
from parallel import inventory


@functools.lru_cache(maxsize=4)
def _model(cfg: WanConfig) -> inventory.Model:
    return inventory.wan_model("wan", cfg)


def forward_flops(cfg: WanConfig, tokens: int, text_len: int, image_len: int = 0) -> int:
    """Multiply-adds times two of one sample's forward pass: matrix products and attention, as PyTorch counts them.

    Args:
        tokens: video tokens after patchify. text_len, image_len: context tokens.
    """
    lengths = {"video": tokens, "text": text_len} | ({} if cfg.image_dim is None else {"image": image_len})
    return inventory.forward_flops(_model(cfg), lengths)


def train_flops(cfg: WanConfig, tokens: int, text_len: int, image_len: int = 0) -> int:
    """One sample's forward and backward pass: three times the forward, recomputation not counted."""
    return 3 * forward_flops(cfg, tokens, text_len, image_len)
