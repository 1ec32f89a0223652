"""Gemma 3's hidden states against transformers' whole Gemma; names of leaves, which are read, what is refused."""

import shutil

import pytest
import torch
from gemma_cases import CAPTIONS, LAYERS, WIDTH, make_case, own_copy, rewrite, save_tokenizer
from real_cases import WORDS

from core import stored
from core.errors import UserError
from infer.gemma import LENGTH, hidden_states, open_gemma, read_gemma

CPU = torch.device("cpu")
BELOW = "language_model.model."


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("gemma"), "2.0")


@pytest.fixture
def own(case, tmp_path):
    return own_copy(case, tmp_path / "model")


def states_of(folder, caption=CAPTIONS[0], dtype=torch.float32):
    reader = read_gemma(open_gemma(folder / "text_encoder"), CPU, dtype)
    with torch.no_grad():
        return hidden_states(reader, [caption])


def theirs(folder, caption, dtype=torch.float32):
    """The whole model's states of a caption's tokens between padding on the left; the tokens are counted by hand."""
    from transformers import Gemma3ForConditionalGeneration

    model = Gemma3ForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=dtype).eval()
    ids = [2, *(4 + WORDS.index(word) for word in caption.split())]
    ids, mask = (torch.tensor([[0] * (LENGTH - len(ids)) + row]) for row in (ids, [1] * len(ids)))
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states, mask.bool()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("caption", CAPTIONS)
def test_states_of_all_layers_equal_transformers(case, caption, dtype):
    (ours, mask), (wanted, real) = states_of(case.folder, caption, dtype), theirs(case.folder, caption, dtype)
    assert len(ours) == len(wanted) == LAYERS and torch.equal(mask, real)
    for a, b in zip(ours, wanted, strict=True):
        assert a.shape == (1, LENGTH, WIDTH) and a.dtype == dtype
        # The same operations on the same numbers; BLAS may sum in another order in other memory.
        torch.testing.assert_close(a[mask], b[real], rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert all(not torch.allclose(a[mask], b[mask], atol=1e-2) for a, b in zip(ours, ours[1:], strict=False))


def test_only_the_text_model_is_read_and_only_when_asked(case, monkeypatch):
    sizes, read = [], stored.read
    monkeypatch.setattr(stored, "read", lambda tensor, where: sizes.append(tensor.shape) or read(tensor, where))
    gemma = open_gemma(case.folder / "text_encoder")
    assert sizes == [] and (gemma.width, gemma.layers) == (WIDTH, LAYERS)
    reader = read_gemma(gemma, CPU, torch.float32)
    assert sorted(sizes) == sorted(tuple(p.shape) for p in reader.model.parameters())
    assert not any("vision" in key or "head" in key or "projector" in key for key in gemma.tree)
    assert not any(x.is_meta for x in [*reader.model.parameters(), *reader.model.buffers()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_the_asked_dtype(case, dtype):
    reader = read_gemma(open_gemma(case.folder / "text_encoder"), CPU, dtype)
    assert {p.dtype for p in reader.model.parameters()} == {dtype} and not reader.model.training


def test_reading_draws_no_random_numbers_of_its_caller(case):
    before = torch.get_rng_state()
    read_gemma(open_gemma(case.folder / "text_encoder"), CPU, torch.float32)
    assert torch.equal(before, torch.get_rng_state())


def test_names_of_every_writer_mean_the_same(case, own):
    """Below `language_model.model`, `model.language_model`, `model` or nothing; with or without a head."""
    wanted, _ = states_of(case.folder)
    last = BELOW
    for now in ("model.language_model.", "model.", ""):
        changed = lambda leaves, a=last, b=now: {  # noqa: E731
            b + k.removeprefix(a): v for k, v in leaves.items() if k.startswith(a)
        }
        head = {"lm_head.weight": torch.full((len(WORDS) + 4, WIDTH), float("nan"))} if now else {}
        rewrite(own, lambda leaves, changed=changed, head=head: changed(leaves) | head)
        assert all(torch.equal(a, b) for a, b in zip(states_of(own)[0], wanted, strict=True)), now
        last = now


def test_the_config_of_a_text_model_alone(case, own):
    """`model_type` gemma3_text, as text models are saved without the vision tower."""
    from transformers import Gemma3ForCausalLM, Gemma3ForConditionalGeneration

    whole = Gemma3ForConditionalGeneration.from_pretrained(case.folder / "text_encoder")
    alone = Gemma3ForCausalLM(whole.config.get_text_config())
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    shutil.rmtree(own / "text_encoder")
    alone.save_pretrained(own / "text_encoder")
    assert all(torch.equal(a, b) for a, b in zip(states_of(own)[0], states_of(case.folder)[0], strict=True))


def test_long_captions_are_cut_and_white_space_at_the_ends_is_not_read(case):
    _, mask = states_of(case.folder, "ball " * 1100)
    assert mask.shape == (1, LENGTH) and mask.all()
    (bare, short), (spaced, same) = states_of(case.folder, "a ball"), states_of(case.folder, " a ball \n")
    assert torch.equal(short, same) and short.sum() == 3 and all(map(torch.equal, bare, spaced))


def test_a_tokenizer_without_padding_pads_with_its_end(own):
    """What stands in padding has no effect on real tokens."""
    wanted, mask = states_of(own)
    shutil.rmtree(own / "tokenizer")
    save_tokenizer(own / "tokenizer", pad_token=None)
    found, same = states_of(own)
    assert torch.equal(mask, same)
    torch.testing.assert_close([x[mask] for x in found], [x[mask] for x in wanted], rtol=1e-5, atol=1e-5)


def without(key):
    return lambda leaves: {k: v for k, v in leaves.items() if k != key}


FAULTS = {
    "missing layers.1.mlp.up_proj.weight": without(f"{BELOW}layers.1.mlp.up_proj.weight"),
    r"norm.weight has shape \[5\], expected \[12\]": lambda leaves: leaves | {f"{BELOW}norm.weight": torch.ones(5)},
    r"unexpected layers.7.x \[1\]": lambda leaves: leaves | {f"{BELOW}layers.7.x": torch.ones(1)},
    "0 leaves are named embed_tokens.weight": without(f"{BELOW}embed_tokens.weight"),
    "2 leaves are named embed_tokens.weight": lambda leaves: leaves | {"embed_tokens.weight": torch.ones(1)},
    r"quantised.*\n.*norm.weight is torch.int8": lambda leaves: (
        leaves | {f"{BELOW}norm.weight": torch.ones(WIDTH, dtype=torch.int8)}
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_weights_that_do_not_fit_are_refused_when_opened(own, message):
    rewrite(own, FAULTS[message])
    with pytest.raises(UserError, match=message):
        open_gemma(own / "text_encoder")


def test_what_is_missing_or_another_model_is_refused(own, monkeypatch):
    from infer import encoders

    config = own / "text_encoder" / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"model_type": "gemma3",', '"model_type": "llama",'))
    with pytest.raises(UserError, match="'llama' is none of gemma3, gemma3_text"):
        open_gemma(own / "text_encoder")
    config.write_text(text.replace('"hidden_size": 12', '"hidden_size": "wide"'))
    with pytest.raises(UserError, match="config.json: it cannot be used"):
        open_gemma(own / "text_encoder")
    config.write_text(text)
    shutil.rmtree(own / "tokenizer")
    with pytest.raises(UserError, match="tokenizer: no such folder"):
        open_gemma(own / "text_encoder")
    monkeypatch.setattr(encoders.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package transformers: pip install"):
        open_gemma(own / "text_encoder")
