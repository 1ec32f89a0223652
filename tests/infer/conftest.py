"""A tiny pipeline folder: a random Wan, a patch codec and the hash text encoder."""

import dataclasses
import functools
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "nn"))

from wan_cases import random_params, tiny_config  # noqa: E402

from core import keys, specs  # noqa: E402
from infer.folder import Defaults, save_pipeline  # noqa: E402
from nn import patch_codec, text_hash  # noqa: E402
from nn.patch_codec import PatchCodecConfig  # noqa: E402
from nn.text_hash import HashTextConfig  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A pipeline folder and what it was made of."""

    folder: Path
    cfg: object
    params: dict
    defaults: Defaults


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    """Read only: tests that change the folder take `own_folder`."""
    root = tmp_path_factory.mktemp("tiny")
    cfg = tiny_config(num_layers=2)
    codec = PatchCodecConfig(latent_channels=cfg.out_channels, spatial=4)
    patch_codec.save(root / "vae", specs.init(patch_codec.param_specs(codec), keys.key(1)), codec)
    text_hash.save(root / "text", HashTextConfig(dim=cfg.text_dim, max_length=6))
    defaults = Defaults(num_frames=5, height=16, width=24, fps=12, steps=3, guidance_scale=2.5, flow_shift=4.0)
    params = random_params(cfg, 0)
    save_pipeline(root / "pipe", params, cfg, defaults, vae=root / "vae", text_encoder=root / "text")
    return Tiny(root / "pipe", cfg, params, defaults)


@pytest.fixture
def own_folder(tiny, tmp_path) -> Path:
    """A copy of the tiny folder to change."""
    return Path(shutil.copytree(tiny.folder, tmp_path / "model"))


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """`real(kind)`: a folder of tiny real components (t2v, i2v, 5b), made once; read only."""
    from real_cases import make_real

    return functools.cache(lambda kind: make_real(tmp_path_factory.mktemp(kind), kind))
