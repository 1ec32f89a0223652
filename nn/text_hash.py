"""A text embedder without weights: every word is a fixed random vector, derived from a public hash.

It stands in for a real text encoder where no weights can be downloaded. Prompts that share words share
vectors; it knows nothing about meaning.
"""

import dataclasses
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from core import keys
from core.errors import UserError, raise_faults
from core.files import write_json
from nn.config_files import read_config

MODEL_TYPE = "latentree-hash"
_ROOT = keys.fold_in(keys.key(0), MODEL_TYPE)


@dataclasses.dataclass(frozen=True)
class HashTextConfig:
    """`dim` values per word; words beyond `max_length` are cut off; `position_scale` weighs their order."""

    dim: int = 64
    max_length: int = 32
    position_scale: float = 0.25

    def __post_init__(self):
        faults = []
        if self.dim < 2 or self.dim % 2:
            faults.append(f"dim is {self.dim}, expected a positive even number")
        if self.max_length < 1:
            faults.append(f"max_length is {self.max_length}, expected at least 1")
        raise_faults("text embedder", faults)


def words(prompt: str) -> list[str]:
    """The words of a prompt: runs of letters, digits and underscores after NFKC and case folding."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", prompt).casefold())
    return re.findall(r"\w+", folded)


def word_vector(word: str, dim: int) -> Tensor:
    """The vector of a word, float32 `[dim]` of mean 0 and variance 1. `""` stands for an empty prompt."""
    v = keys.normal(keys.fold_in(_ROOT, word), (dim,)).double()
    return ((v - v.mean()) / v.std(correction=0)).float()


def positions(length: int, dim: int) -> Tensor:
    """Sines and cosines of the word's index, float32 `[length, dim]` (Vaswani et al. 2017, section 3.5)."""
    rates = 10_000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def embed(cfg: HashTextConfig, prompts: Sequence[str]) -> list[Tensor]:
    """One float32 `[L, dim]` per prompt, L = its number of words, at most `max_length`; nothing is padded.

    A prompt without words (`""`, the unconditional prompt) gives `[1, dim]`: the vector of the empty
    string, which no word can be. Equal on every machine; a prompt's result does not depend on the others.
    """
    if isinstance(prompts, str):
        raise UserError(f"prompts is the string {prompts!r}, expected a list of strings")
    out = []
    for prompt in prompts:
        tokens = words(prompt)[: cfg.max_length] or [""]
        vectors = torch.stack([word_vector(token, cfg.dim) for token in tokens])
        out.append(vectors + cfg.position_scale * positions(len(tokens), cfg.dim))
    return out


def save(folder: str | Path, cfg: HashTextConfig) -> None:
    """Writes `config.json`; there are no weights."""
    write_json(Path(folder) / "config.json", {"model_type": MODEL_TYPE, **dataclasses.asdict(cfg)})


def load(folder: str | Path) -> HashTextConfig:
    """Reads what `save` wrote. Raises UserError naming the file and key when it is something else."""
    return read_config(HashTextConfig, Path(folder) / "config.json", "model_type", MODEL_TYPE)
