"""The hash text embedder: the same for ever, one vector per word, a prompt of no words of its own."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import UserError
from nn import text_hash
from nn.text_hash import HashTextConfig, embed, positions, word_vector, words

CFG = HashTextConfig()
UNORDERED = HashTextConfig(position_scale=0.0)


RECORDED = [-0.631812, -0.219285, 0.269677, -0.151438, 0.220025, -0.426108]


def test_numbers_are_the_same_for_ever():
    """Recorded once: a change would silently void every preprocessed set and every trained model."""
    vector = embed(CFG, ["rabbit"])[0][0]
    recorded = torch.tensor(RECORDED)
    # 1e-5: sine, cosine and logarithm differ in the last bits between processors.
    torch.testing.assert_close(vector[:6], recorded, atol=1e-5, rtol=0)


def test_shapes_and_lengths():
    out = embed(HashTextConfig(dim=16, max_length=3), ["one", "one two three four", ""])
    assert [tuple(x.shape) for x in out] == [(1, 16), (3, 16), (1, 16)]
    assert all(x.dtype == torch.float32 for x in out)
    assert torch.equal(out[1][:1], out[0])


@given(st.text(max_size=40), st.text(max_size=40))
def test_a_prompt_depends_on_its_words_alone(a, b):
    first, second, again = embed(CFG, [a, b, a])
    assert torch.equal(first, again) and torch.equal(first, embed(CFG, [a])[0])
    assert (words(a)[:32] == words(b)[:32]) == (first.shape == second.shape and torch.equal(first, second))
    assert first.shape == (min(max(len(words(a)), 1), 32), 64)


@given(st.text(min_size=1, max_size=12))
def test_word_vectors_have_zero_mean_and_unit_variance(word):
    vector = word_vector(word, 64).double()
    assert abs(vector.mean()) < 1e-6 and abs(vector.var(correction=0) - 1) < 1e-6


def test_words_are_folded():
    assert words("A  big, RABBIT's  ｒａｂｂｉｔ_2") == ["a", "big", "rabbit", "s", "rabbit_2"]
    assert words("Straße ﬁn!") == ["strasse", "fin"]
    same = embed(CFG, ["A big Rabbit", "a big rabbit", "a, BIG -- rabbit."])
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])


def test_the_empty_prompt_is_no_word():
    empty = embed(CFG, [""])[0]
    assert torch.equal(empty, embed(CFG, [" ?! \n"])[0])
    others = torch.cat(embed(CFG, ["empty", "none", "s", "0", "null", "_"]))
    # Independent vectors of 64 values: a correlation over 0.6 has a chance below 1e-6.
    assert (torch.cosine_similarity(empty, others) < 0.6).all()


def test_different_words_are_nearly_orthogonal_and_order_matters():
    vectors = torch.cat(embed(UNORDERED, [f"word{i}" for i in range(50)])) / 8
    off = (vectors @ vectors.mT - torch.eye(50)).abs()
    assert off.max() < 0.6 and off.mean() < 0.15
    forward, backward = embed(CFG, ["dog bites man", "man bites dog"])
    assert not torch.equal(forward, backward.flip(0))
    assert torch.equal(*(x if i == 0 else x.flip(0) for i, x in enumerate(embed(UNORDERED, ["a b c", "c b a"]))))
    # Small beside the word's own variance of 1.
    assert torch.allclose(forward - embed(UNORDERED, ["dog bites man"])[0], 0.25 * positions(3, 64), atol=1e-6)


def test_folder_round_trip_and_bad_input(tmp_path):
    cfg = HashTextConfig(dim=10, max_length=7, position_scale=0.5)
    text_hash.save(tmp_path / "text_encoder", cfg)
    path = tmp_path / "text_encoder" / "config.json"
    assert json.loads(path.read_text())["model_type"] == "latentree-hash"
    assert text_hash.load(tmp_path / "text_encoder") == cfg
    path.write_text(json.dumps({"model_type": "umt5", "dim": 3}))
    with pytest.raises(UserError, match="(?s)config.json.*'umt5', expected 'latentree-hash'"):
        text_hash.load(tmp_path / "text_encoder")
    path.write_text(json.dumps({"model_type": "latentree-hash", "dim": True}))
    with pytest.raises(UserError, match="dim is True, expected int"):
        text_hash.load(tmp_path / "text_encoder")
    with pytest.raises(UserError, match="(?s)dim is 7.*max_length is 0"):
        HashTextConfig(dim=7, max_length=0)
    with pytest.raises(UserError, match="expected a list of strings"):
        embed(CFG, "a prompt")
