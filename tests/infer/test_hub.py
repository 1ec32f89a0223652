"""Models by hub id, with a stub in place of the network."""

import json

import pytest
from huggingface_hub import errors
from ltx2_demo_cases import make_parts, written

from core.errors import UserError
from infer import __main__ as cli
from infer import hub
from infer.__main__ import main
from infer.hub import KNOWN, WEIGHTS, Hub, resolve_index, resolve_model, wanted
from infer.media import read_video

WAN = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
FILES = {
    "model_index.json": 500,
    "scheduler/scheduler_config.json": 500,
    "transformer/diffusion_pytorch_model.safetensors": 3 * 10**9,
    "transformer/pytorch_model.bin": 3 * 10**9,
    "vae/diffusion_pytorch_model.safetensors": 10**9,
    "text_encoder/model-00001-of-00001.safetensors": 11 * 10**9,
    "tokenizer/tokenizer.json": 10**6,
    "image_encoder/model.safetensors": 2 * 10**9,
    "assets/demo.mp4": 10**9,
}


class Answer:
    """As much of an HTTP response as the package's errors look at."""

    headers, status_code, request = {}, 404, None


def http_error(kind):
    return kind("no", response=Answer())


def stub(folder=None, *, sizes=FILES, cached=None, fails=None):
    """A hub and the calls it has seen; errors that are given instead of results are raised."""
    calls = []

    def ask(name):
        calls.append(("sizes", name))
        if isinstance(sizes, Exception):
            raise sizes
        return sizes

    def download(name, patterns, cache_dir, local):
        calls.append(("local" if local else "download", name, tuple(patterns), cache_dir))
        found = cached if local else folder
        if fails is not None or found is None:
            raise fails if fails is not None else errors.LocalEntryNotFoundError("not in the cache")
        return str(found)

    return Hub(ask, download), calls


def refused(name, the_hub, *parts, **options):
    with pytest.raises(UserError) as error:
        resolve_model(name, ["text_encoder"], hub=the_hub, log=lambda text: None, **options)
    for part in parts:
        assert part in str(error.value), error.value


def test_a_folder_is_itself_and_asks_nobody(tmp_path, monkeypatch):
    """Also one whose name could be an id."""
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    the_hub, calls = stub(errors.OfflineModeIsEnabled("no"))
    assert str(resolve_model("owner/name", hub=the_hub)) == "owner/name" and calls == []
    for gone in ("a/b/c", "name", str(tmp_path / "gone"), "../gone", "owner/name/"):
        if not (tmp_path / gone).is_dir():
            refused(gone, the_hub, f"{gone}: no such folder")
    (tmp_path / "owner" / "file").write_text("")
    refused("owner/file", the_hub, "owner/file: no such folder")
    assert calls == []


@pytest.mark.parametrize("parts,size", [([], 4), (["text_encoder"], 15), (["text_encoder", "image_encoder"], 17)])
def test_an_id_downloads_what_is_needed_and_says_how_much(tmp_path, parts, size):
    """Neither pickles nor files beside the pipeline."""
    the_hub, calls = stub(tmp_path)
    said = []
    assert resolve_model(WAN, parts, hub=the_hub, cache_dir=tmp_path, log=said.append) == tmp_path
    assert said == [f"{WAN}: {size} GB from the hub or its local cache"]
    assert calls == [("sizes", WAN), ("download", WAN, tuple(wanted(parts, True)), tmp_path)]
    assert ("tokenizer/*" in wanted(parts, True)) == ("text_encoder" in parts)
    assert resolve_model(WAN, parts, transformer=False, hub=the_hub, log=said.append) == tmp_path
    assert said[1].startswith(f"{WAN}: {size - 3} GB") and WEIGHTS not in calls[-1][2]


OFFLINE = [errors.OfflineModeIsEnabled("offline"), ConnectionError("refused"), TimeoutError(), OSError("proxy")]


@pytest.mark.parametrize("error", OFFLINE, ids=lambda e: type(e).__name__)
def test_without_a_network_the_cache_serves(tmp_path, error):
    named = {file.split("/")[0]: ["of", "a class"] for file in FILES if "/" in file}
    for file in (*FILES, "transformer/config.json"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(json.dumps({**named, "image_encoder": [None, None]}))
    the_hub, calls = stub(sizes=error, cached=tmp_path)
    assert resolve_model(WAN, ["text_encoder", "image_encoder"], hub=the_hub) == tmp_path
    assert [c[0] for c in calls] == ["sizes", "local"]
    # A snapshot that was fetched without its tokenizer does not serve prompts.
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    refused(WAN, the_hub, "it is not in the local cache")
    assert resolve_model(WAN, [], hub=the_hub) == tmp_path
    # Nor does one that was fetched for its autoencoders sample.
    (tmp_path / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    assert resolve_model(WAN, [], hub=the_hub, transformer=False) == resolve_index(WAN, hub=the_hub) == tmp_path
    with pytest.raises(UserError, match="it is not in the local cache"):
        resolve_model(WAN, [], hub=the_hub)


@pytest.mark.parametrize("error", OFFLINE, ids=lambda e: type(e).__name__)
def test_without_a_network_and_a_cache_the_error_says_what_to_download(error):
    """The command, and the size of a known model: 1.42 + 0.13 + 5.68 billion parameters at two bytes."""
    the_hub, _ = stub(sizes=error)
    command = f"hf download {WAN} --include 'model_index.json'"
    refused(WAN, the_hub, command, "--include 'tokenizer/*'", "at least 14 GB", type(error).__name__, "--model FOLDER")
    refused("someone/else", the_hub, "hf download someone/else", "its size is not known")


def test_sizes_of_known_models_follow_from_our_own_configs():
    import math

    from nn import ltx2_config, ltx2_specs, ltx2_vae_config, wan, wan_vae

    def billions(specs):
        return sum(math.prod(s.shape) for s in specs.values()) / 1e9

    def wan_of(name):
        presets = {"T2V-1.3B": "t2v-1.3b", "T2V-14B": "t2v-14b", "I2V-14B": "i2v-14b", "TI2V-5B": "ti2v-5b"}
        version, kind = "2.2" if "Wan2.2" in name else "2.1", next(v for k, v in presets.items() if f"-{k}" in name)
        vae = wan_vae.param_specs(wan_vae.PRESETS[f"wan{version}-vae"])
        return wan.param_specs(wan.PRESETS[f"wan{version}-{kind}"]), vae

    def ltx2_of(name):
        transformer, vae = ("ltx-2.3-22b", "ltx-2.3-vae") if "2.3" in name else ("ltx-2-19b", "ltx-2-vae")
        vae = ltx2_vae_config.param_specs(ltx2_vae_config.PRESETS[vae])
        return ltx2_specs.param_specs(ltx2_config.PRESETS[transformer]), vae

    assert len(KNOWN) == 8
    for name, (transformer, vae, *_) in KNOWN.items():
        specs = (ltx2_of if "LTX" in name else wan_of)(name)
        assert (transformer, vae) == pytest.approx([billions(s) for s in specs], abs=0.01)


def test_ids_that_the_hub_does_not_know_or_hand_out():
    unknown, _ = stub(sizes=http_error(errors.RepositoryNotFoundError))
    refused("Wan-AI/Wan2.1-T2V-1.3-Diffusers", unknown, "no such model on the hub", f"did you mean '{WAN}'?")
    gated, _ = stub(sizes=http_error(errors.GatedRepoError))
    refused("a/b", gated, "terms to be accepted", "https://huggingface.co/a/b")
    invalid, _ = stub(sizes=errors.HFValidationError("two dots"))
    refused("a/b..c", invalid, "no id of the hub", "two dots")


def test_a_repository_in_another_layout_points_to_the_right_one():
    original, calls = stub(sizes={"Wan2.1_VAE.pth": 5, "config.json": 5})
    refused("Wan-AI/Wan2.1-T2V-1.3B", original, "no model_index.json", f"did you mean '{WAN}'?")
    assert [c[0] for c in calls] == ["sizes"], "nothing is downloaded"
    single, _ = stub(sizes={"ltx-2.3-22b-dev.safetensors": 46 * 10**9})
    refused("Lightricks/LTX-2.3", single, "no model_index.json", "did you mean 'diffusers/LTX-2.3-Diffusers'?")


def test_a_download_that_fails_says_so(tmp_path):
    broken, _ = stub(tmp_path, fails=OSError(28, "No space left on device"))
    refused(WAN, broken, "the download of 15 GB failed", "No space left", "run again to continue")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package huggingface_hub: pip install huggingface_hub"):
        resolve_model(WAN)


def test_the_command_line_takes_an_id(real, tmp_path, monkeypatch, capsys):
    """With exactly the parts that its flags need; and an unknown id writes nothing."""
    the_hub, calls = stub(real("t2v").folder)
    monkeypatch.setattr(hub, "client", lambda: the_hub)
    monkeypatch.setattr(cli, "contact_sheet", lambda rows, path: None)
    argv = ["--model", WAN, "--prompt", "a ball", "--device", "cpu", "--output", str(tmp_path / "a.mp4")]
    assert main(argv) == 0 and read_video(tmp_path / "a.mp4").frames.shape == (9, 32, 48, 3)
    assert calls[-1][2] == tuple(wanted(["text_encoder"], True))
    assert f"{WAN}: 15 GB" in capsys.readouterr().out
    (tmp_path / "a.mp4").unlink()
    monkeypatch.setattr(hub, "client", lambda: stub(sizes=ConnectionError())[0])
    assert main(argv) == 2 and list(tmp_path.iterdir()) == []
    assert "error: " + WAN in capsys.readouterr().err


LTX2 = "Lightricks/LTX-2"
SOUND = ("audio_vae/*", "vocoder/*")


@pytest.mark.parametrize("flags, fetched", [
    ([], ("tokenizer/*", "connectors/*", *SOUND)), (["--modality", "video"], ("tokenizer/*", "connectors/*")),
    (["--save-embeds"], ("tokenizer/*", "connectors/*")),
])  # fmt: skip
def test_the_command_line_takes_an_id_of_ltx2(tmp_path, monkeypatch, flags, fetched):
    """Its index says of what kind it is, before the parts that the flags need are fetched."""
    the_hub, calls = stub(written(tmp_path / "pipeline", make_parts(tmp_path / "parts")))
    monkeypatch.setattr(hub, "client", lambda: the_hub)
    out = str(tmp_path / ("e.safetensors" if "--save-embeds" in flags else "a.mp4"))
    argv = ["--model", LTX2, "--prompt", "a ball", "--device", "cpu", *flags]
    assert main([*argv, *([out] if "--save-embeds" in flags else ["--output", out])]) == 0
    assert [c[2] for c in calls if c[0] == "download"][0] == ("model_index.json",)
    assert set(calls[-1][2]) == {*wanted([], True), "text_encoder/*", *fetched}


def test_flags_of_another_kind_are_refused_before_a_model_is_fetched(tmp_path, monkeypatch, capsys):
    the_hub, calls = stub(written(tmp_path / "pipeline", make_parts(tmp_path / "parts")))
    monkeypatch.setattr(hub, "client", lambda: the_hub)
    assert main(["--model", LTX2, "--prompt", "a ball", "--sampler", "unipc"]) == 2
    assert "unipc is none of LTX-2's" in capsys.readouterr().err
    assert [c[2] for c in calls if c[0] == "download"] == [("model_index.json",)]


def test_the_real_client_without_a_network_is_an_error_of_ours(tmp_path, monkeypatch):
    """The package's own offline switch: nothing leaves this machine."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("someone/model", None, "hf download someone/model", cache_dir=tmp_path)
