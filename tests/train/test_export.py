"""Exports: equal in Diffusers, sampled by inference, and a bit-exact start of another run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core import keys
from core.checkpoint import open_checkpoint
from core.errors import UserError
from core.files import write_json
from core.parts import Place
from core.save import describe, save_part
from core.trees import num_bytes
from infer.folder import Defaults, load_pipeline
from infer.media import read_video
from nn import wan
from nn.wan_formats import open_transformer, to_json
from train import state as states
from train.export import export, main
from train.setup import initial_state, prepare

ROOT = Path(__file__).parents[2]


def stored(out, step, group="params"):
    return open_checkpoint(states.folder_of(out, step) / group).read()


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory):
    """The newest checkpoint of the finished run, exported from its output folder."""
    out = tmp_path_factory.mktemp("exported") / "pipeline"
    assert export(finished, out) == states.folder_of(finished, 8)
    return out


def test_diffusers_loads_it_and_computes_the_same(exported, monkeypatch):
    from diffusers import WanTransformer3DModel

    # Diffusers needs accelerate for models with float32 exceptions; all weights are float32 here.
    monkeypatch.setattr(WanTransformer3DModel, "_keep_in_fp32_modules", None)
    model = WanTransformer3DModel.from_pretrained(exported / "transformer", low_cpu_mem_usage=False).eval()
    tree, cfg = open_transformer(exported / "transformer")
    draw = lambda name, *shape: keys.normal(keys.fold_in(keys.key(1), name), shape)  # noqa: E731
    latents, text, timestep = draw("x", 2, 4, 2, 4, 6), draw("c", 2, 6, 8), torch.tensor([17.0, 900.0])
    with torch.no_grad():
        theirs = model(latents, timestep, text, return_dict=False)[0]
        ours = wan.forward(tree.read(), cfg, {"latents": latents, "timestep": timestep, "text": text})
    # float32 with other orders of summation, two layers; outputs are of order 1.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert theirs.abs().max() > 0.01


def test_the_folder_says_what_it_is(exported, finished):
    tree, cfg = open_transformer(exported / "transformer")
    assert equal(tree.read(), stored(finished, 8))
    assert tree.metadata["model_type"] == "WanTransformer3DModel"
    assert json.loads(tree.metadata["transforms"]) == [], "nothing was changed"
    assert json.loads(tree.metadata["config"]) == to_json(cfg) and tree.metadata["format"] == "pt"
    assert tree.metadata["schema_version"] == "1" and tree.metadata["project_version"]
    assert json.loads((exported / "transformer" / "config.json").read_text()) == to_json(cfg)
    index = json.loads((exported / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "WanTransformer3DModel"]
    noted = index["_sampling"]
    assert (noted["num_frames"], noted["height"], noted["width"], noted["fps"]) == (5, 32, 32, 8.0)
    assert (noted["text_length"], noted["steps"], noted["guidance_scale"]) == (6, 2, 2.0)


def test_the_average_is_exported_when_asked_for(finished, tmp_path):
    export(states.folder_of(finished, 6), tmp_path / "ema", ema=True)
    tree, _ = open_transformer(tmp_path / "ema" / "transformer")
    assert equal(tree.read(), stored(finished, 6, "ema")) and not equal(tree.read(), stored(finished, 6))


def test_models_that_moved_are_named_by_hand(finished, clips, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.copytree(clips / "vae", tmp_path / "moved")
    record = states.folder_of(run, 8) / states.RECORD
    record.write_text(json.dumps(json.loads(record.read_text()) | {"vae": str(tmp_path / "gone")}))
    export(run, tmp_path / "out", vae=tmp_path / "moved")
    assert load_pipeline(tmp_path / "out", device=torch.device("cpu"), dtype=torch.float32).vae is not None


def test_bf16_keeps_tables_in_float32(finished, tmp_path):
    export(finished, tmp_path / "out", dtype="bf16")
    tree, _ = open_transformer(tmp_path / "out" / "transformer")
    assert json.loads(tree.metadata["transforms"]) == ["cast bfloat16"]
    tree, cfg = open_transformer(tmp_path / "out" / "transformer")
    specs_, weights, full = wan.param_specs(cfg), tree.read(), stored(finished, 8)
    kept = {k for k, s in specs_.items() if s.keep_fp32}
    assert {k for k, v in weights.items() if v.dtype == torch.float32} == kept != set()
    assert any("scale_shift_table" in k for k in kept) and any("time_embedder" in k for k in kept)
    assert all(torch.equal(v, full[k].to(v.dtype)) for k, v in weights.items())
    assert any("bfloat16" in text for text in json.loads(tree.metadata["transforms"]))


def test_another_run_starts_from_it_bit_for_bit(exported, recipe, finished, tmp_path):
    """Without a vae/ and text_encoder/ beside the data, those of the export are used as well."""
    made = recipe(tmp_path / "run", {"models.student.init_from": str(exported)})
    student = made.models.student.model_copy(update={"config": {}})
    made = made.model_copy(update={"models": made.models.model_copy(update={"student": student})})
    setup = prepare(made)
    state = initial_state(setup)
    assert equal({k: p.detach() for k, p in state.params.items()}, stored(finished, 8))
    assert equal(state.ema, stored(finished, 8)) and (state.step, state.position) == (0, 0)
    assert all(p.requires_grad for p in state.params.values())


def test_components_come_from_the_export_where_the_data_has_none(exported, recipe, write_set, tmp_path):
    data = write_set(tmp_path / "set", [(4, 2, 4, 4)])
    made = recipe(tmp_path / "run", {"models.student.init_from": str(exported), "training.data.data_path": str(data)})
    student = made.models.student.model_copy(update={"config": {}})
    setup = prepare(made.model_copy(update={"models": made.models.model_copy(update={"student": student})}))
    found = setup.components.folders
    assert (found["vae"], found["text_encoder"]) == (exported / "vae", exported / "text_encoder")


def test_it_samples_from_the_command_line_and_twice_the_same(exported, tmp_path):
    from infer.__main__ import main as infer

    asked = ["--model", str(exported), "--prompt", "clip number 1", "--device", "cpu", "--steps", "2", "--seed", "3"]
    for name in ("a.mp4", "b.mp4"):
        assert infer([*asked, "--output", str(tmp_path / name)]) == 0
    a, b = (read_video(tmp_path / name) for name in ("a.mp4", "b.mp4"))
    assert a.frames.shape == (5, 32, 32, 3) and torch.equal(a.frames, b.frames) and a.fps == 8


def test_nothing_but_an_older_export_is_ever_replaced(finished, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    export(finished, out)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    assert main([str(finished), "--output", str(out)]) == 2
    assert "already holds a pipeline; choose another --output or give --overwrite" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    assert main([str(finished), "--output", str(out), "--overwrite", "--ema"]) == 0
    assert equal(open_transformer(out / "transformer")[0].read(), stored(finished, 8, "ema"))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("x")
    for target in (tmp_path / "precious", tmp_path / "precious" / "thesis.txt"):
        with pytest.raises(UserError, match="already exists and is no pipeline folder"):
            export(finished, target, overwrite=True)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "x"


def test_what_cannot_be_exported_is_refused_before_anything_is_written(finished, recipe, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    last = states.folder_of(run, 8)
    with pytest.raises(UserError, match="neither a checkpoint nor a run with checkpoints"):
        export(tmp_path / "nowhere", tmp_path / "out")
    shutil.rmtree(last / "ema")
    with pytest.raises(UserError, match="no ema/ in this checkpoint .the run kept no average."):
        export(run, tmp_path / "out", ema=True)
    record = json.loads((last / states.RECORD).read_text())
    (last / states.RECORD).write_text(json.dumps(record | {"vae": str(tmp_path / "gone")}))
    with pytest.raises(UserError, match="(?s)models it was trained with are not there.*vae: .*gone; give --vae"):
        export(run, tmp_path / "out")
    (last / states.RECORD).write_text(json.dumps(record | {"config": record["config"] | {"ffn_dim": 48}}))
    with pytest.raises(UserError, match="(?s)step-000008/params: .*ffn.net.*shape .*expected"):
        export(run, tmp_path / "out")
    weights = last / "params" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="cut short"):
        export(run, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("dropout, scale", [(0.0, 1.0), (0.5, Defaults().guidance_scale)])
def test_guidance_is_off_where_nothing_unconditional_was_trained(recipe, tmp_path, dropout, scale):
    """Random initial weights, no validation that says otherwise, and no caption ever dropped."""
    changes = {"training.data.training_cfg_rate": dropout, "training.loop.max_train_steps": 1}
    assert prepare(recipe(tmp_path / "run", changes)).defaults.guidance_scale == scale


def test_an_image_encoder_for_a_model_without_image_features_is_refused(finished, clips, tmp_path, capsys):
    folder = str(clips / "text_encoder")
    assert main([str(finished), "--output", str(tmp_path / "out"), "--image-encoder", folder]) == 2
    assert f"--image-encoder {folder}: the model takes no image features" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main([str(finished), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("wrote "), "nothing is missing, so there is nothing to note"


def test_a_run_without_models_around_it_exports_the_transformer_alone(recipe, write_set, tmp_path):
    from train.run import train

    data = write_set(tmp_path / "set", [(4, 2, 4, 4)])
    train(recipe(tmp_path / "run", {"training.data.data_path": str(data), "training.loop.max_train_steps": 1}))
    export(tmp_path / "run", tmp_path / "out")
    pipe = load_pipeline(tmp_path / "out", device=torch.device("cpu"), dtype=torch.float32)
    assert pipe.vae is None and pipe.text is None and pipe.defaults.text_length == 512
    assert equal(pipe.params, stored(tmp_path / "run", 1))


PEAK = """
import re, sys
from pathlib import Path
from train.export import export
value = lambda name: int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = value("VmRSS")
export(sys.argv[1], sys.argv[2], dtype="bf16")
print(value("VmHWM") - before)
"""


def test_a_sharded_checkpoint_is_exported_in_the_memory_of_its_largest_leaf(finished, tmp_path):
    """200 MiB in leaves of at most 8: one in float32, its bfloat16, and the slices that it is read in."""
    cfg = wan.WanConfig(num_attention_heads=1, attention_head_dim=128, ffn_dim=16384, num_layers=12, in_channels=4,
                        out_channels=4, text_dim=8, freq_dim=16)  # fmt: skip
    folder, specs_, count = tmp_path / "run" / "checkpoints" / "step-000001", wan.param_specs(cfg), 4
    record = states.read_record(states.folder_of(finished, 8)) | {"config": to_json(cfg)}
    base = torch.randn(max(s.shape[0] for s in specs_.values()), 128)
    leaf_of = lambda s: base.flatten()[: torch.Size(s.shape).numel()].reshape(s.shape)  # noqa: E731
    for number in range(count):
        leaves, places = {}, {}
        for k, s in specs_.items():
            step = -(-s.shape[0] // count)
            first = number * step
            if first < s.shape[0]:
                leaves[k] = leaf_of(s)[first : first + step]
                places[k] = Place((first, *(0 for _ in s.shape[1:])), s.shape)
        metadata = describe("WanTransformer3DModel", to_json(cfg))
        save_part(folder / "params", leaves, places, number + 1, count, metadata=metadata)
    write_json(folder / states.RECORD, record)
    argv = [sys.executable, "-c", PEAK, str(folder), str(tmp_path / "out")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    largest = max(num_bytes({k: s}) for k, s in specs_.items())
    peak, total = int(done.stdout.splitlines()[-1]), num_bytes(specs_)
    assert largest == 8 * 2**20 and total > 24 * largest
    assert peak < 5 * largest, f"{peak / 2**20:.0f} MiB"
    out, _ = open_transformer(tmp_path / "out" / "transformer")
    assert all(torch.equal(leaf.read().float(), leaf_of(specs_[k]).to(leaf.dtype).float()) for k, leaf in out.items())
