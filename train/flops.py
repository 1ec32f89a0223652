"""Arithmetic of one training step, counted from the config."""

from nn.wan import WanConfig


def forward_flops(cfg: WanConfig, tokens: int, text_len: int, image_len: int = 0) -> int:
    """Multiply-adds times two of one sample's forward pass: matrix products and attention, nothing else.

    Args:
        tokens: video tokens after patchify. text_len, image_len: context tokens.
    """
    d, n = cfg.dim, tokens
    volume = cfg.patch_size[0] * cfg.patch_size[1] * cfg.patch_size[2]
    context = text_len + image_len
    products = n * d * d * (4 + 2)  # self-attention's q, k, v, o and cross-attention's q, o
    products += 2 * context * d * d  # cross-attention's k and v
    products += 2 * n * d * cfg.ffn_dim
    attention = 2 * n * n * d + 2 * n * context * d
    ends = n * d * volume * (cfg.in_channels + cfg.out_channels) + text_len * d * (cfg.text_dim + d)
    return 2 * (cfg.num_layers * (products + attention) + ends)


def train_flops(cfg: WanConfig, tokens: int, text_len: int, image_len: int = 0) -> int:
    """One sample's forward and backward pass: three times the forward, recomputation not counted."""
    return 3 * forward_flops(cfg, tokens, text_len, image_len)
