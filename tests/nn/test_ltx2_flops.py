"""LTX-2's FLOP formula: the published integers, and PyTorch's counter on our model to the digit."""

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_cases import configs, random_case
from torch.utils.flop_counter import FlopCounterMode

from core import specs
from nn import ltx2
from nn.ltx2_config import PRESETS
from nn.ltx2_flops import attention_scores, block_flops, counted_flops, model_flops, root_flops
from nn.ltx2_inputs import StreamInputs, model_inputs
from nn.ltx2_rope import video_positions
from nn.ltx2_specs import param_specs

VIDEO = dataclasses.replace(PRESETS["ltx-2-19b"], modality="video")
TOKENS, TEXT = {"video": 4290}, {"video": 1024}  # 81 frames of 480 x 832


def counted(cfg, inputs, params) -> tuple[int, int]:
    """Forward and backward of our model by PyTorch's counter."""
    with FlopCounterMode(display=False) as forward:
        out = ltx2.forward(params, cfg, inputs)
    with FlopCounterMode(display=False) as backward:
        sum(y.sum() for y in out.values()).backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_published_integers():
    """The numerator of MFU and its parts; and the audit of a real step, of which the docstring explains the rest."""
    assert model_flops(VIDEO, TOKENS, TEXT) == 353_880_819_892_224
    attention = 6 * attention_scores(VIDEO, TOKENS, TEXT)
    assert model_flops(VIDEO, TOKENS, TEXT) - attention == 300_095_807_422_464
    assert attention == 43_420_719_513_600 + 10_364_292_956_160
    assert attention_scores(VIDEO, TOKENS, TEXT) == 8_964_168_744_960
    assert root_flops(VIDEO, TOKENS, TEXT) == (75_805_753_344, 114_898_763_776)
    assert counted_flops(VIDEO, TOKENS, TEXT) == (118_036_079_050_752, 244_999_614_103_552)
    assert sum(counted_flops(VIDEO, TOKENS, TEXT)) == 363_035_693_154_304


def test_the_counter_at_full_width():
    """At 4,290 tokens on the meta device, where attention is plain matrix products: nothing is computed again."""
    cfg = dataclasses.replace(VIDEO, num_layers=2)
    params = {k: v.requires_grad_() for k, v in specs.abstract(param_specs(cfg)).items()}
    meta = lambda *shape: torch.empty(*shape, device="meta")  # noqa: E731
    positions = video_positions(cfg, (11, 15, 26), 24.0, device="meta")
    inputs = model_inputs(cfg, {"video": StreamInputs(meta(1, 4290, 128), meta(1), positions, meta(1, 1024, 3840))})
    assert counted(cfg, inputs, params) == counted_flops(cfg, TOKENS, TEXT, fused=False)


@given(
    cfg=configs(), modality=st.sampled_from(["audio_video", "video", "audio"]), per_token=st.booleans(),
    audio=st.integers(2, 7), text=st.integers(2, 6),
)  # fmt: skip
@settings(max_examples=6)
def test_the_counter_over_all_flags(cfg, modality, per_token, audio, text):
    cfg = dataclasses.replace(cfg, modality=modality)
    params = {k: v.requires_grad_() for k, v in specs.abstract(param_specs(cfg)).items()}
    case = random_case(cfg, 0, batch=1, audio=audio, text=text, per_token=per_token)
    inputs = {k: v.to("meta") for k, v in model_inputs(cfg, case.streams).items()}
    tokens, texts = {"video": 12, "audio": audio}, {"video": text, "audio": text}
    wanted = counted_flops(cfg, tokens, texts, timesteps=tokens if per_token else None, fused=False)
    assert counted(cfg, inputs, params) == wanted


def test_flops_grow_with_layers_and_gates():
    audio_video, both = PRESETS["ltx-2-19b"], {"video": 4290, "audio": 84}
    text = {"video": 1024, "audio": 1024}
    half = dataclasses.replace(audio_video, num_layers=24)
    assert block_flops(audio_video, both, text) == 2 * block_flops(half, both, text)
    assert block_flops(PRESETS["ltx-2.3-22b"], both, text) > block_flops(audio_video, both, text)
    assert block_flops(audio_video, both, text) > block_flops(VIDEO, both, text)
