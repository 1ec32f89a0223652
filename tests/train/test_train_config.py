"""Laws of the recipe: no explicit value is ever replaced, cross-field faults, the grammar of the recipes."""

import copy

import pytest
import yaml

from core.config import describe, help_text, save_config, show
from core.errors import UserError
from train.config import Recipe, load_recipe

BASE = {
    "models": {"student": {"_target_": "wan", "preset": "tiny", "config": {"num_layers": 2}}},
    "method": {"_target_": "sft"},
    "training": {
        "data": {"data_path": {"set.parquet": 300}, "training_cfg_rate": 0.1, "seed": 7},
        "optimizer": {"learning_rate": 1e-4, "lr_scheduler": "cosine", "min_lr_ratio": 0.5, "lr_warmup_steps": 3},
        "loop": {"max_train_steps": 10, "gradient_accumulation_steps": 2},
        "checkpoint": {"output_dir": "out", "training_state_checkpointing_steps": 5, "checkpoints_total_limit": 3,
                       "resume_from_checkpoint": "latest"},
        "model": {"enable_torch_compile": True, "enable_gradient_checkpointing_type": "full"},
        "profile": {"start": 3, "steps": 2},
    },
    "callbacks": {
        "ema": {"decay": 0.9, "start_iter": 4},
        "validation": {"dataset_file": "v.json", "every_steps": 5, "sampling_steps": [8]},
    },
    "pipeline": {"flow_shift": 5.0},
}  # fmt: skip

FALSY = [0, 0.0, False, [], {}, "", None]
ROWS = describe(Recipe)


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "run.yaml"

    def write(data):
        path.write_text(yaml.safe_dump(data))
        return path

    return write


OWN = ("models.student.modality", "models.student.frozen")  # of LTX-2 alone


def base_of(key):
    """BASE, with the clips of a metadata file for the keys of encoding on the fly, and LTX-2 for its own."""
    data = copy.deepcopy(BASE)
    if key in OWN:
        data["models"]["student"] = {"_target_": "ltx2", "preset": "ltx-2-19b"}
        del data["pipeline"]
    if key.startswith("training.data.encode."):
        data["training"]["data"] |= {"data_path": "clips.json", "encode": {"vae": "v", "text_encoder": "t"}}
    return data


def edited(key, value):
    data = base_of(key)
    node = data
    *parents, last = key.split(".")
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value
    return data


def value_at(recipe, key):
    node = recipe.model_dump(mode="json", by_alias=True)
    for part in key.split("."):
        node = node[part]
    return node


def same(seen, given):
    """Equal with equal type, but for an integer given for a float."""
    return seen == given and (type(seen) is type(given) or (type(seen), type(given)) == (float, int))


def loads_as_given(path, overrides, key, given):
    """Whether the value is legal; asserts that it is kept if so, and that the fault names the key if not."""
    try:
        recipe = load_recipe(path, overrides)
    except UserError as error:
        assert key in str(error) and str(path) in str(error)
        return False
    assert same(value_at(recipe, key), given), f"{key}: {given!r} became {value_at(recipe, key)!r}"
    return True


@pytest.mark.parametrize("key", [row.key for row in ROWS])
def test_no_explicit_falsy_value_is_replaced(write, key):
    # The command line must agree with the file, but for text fields (there 0 is the text "0") and for the two
    # mappings of BASE, which a scalar may not override.
    row = next(row for row in ROWS if row.key == key)
    agrees = "text" not in row.type and key != "models.student.config"
    for value in FALSY:
        legal = loads_as_given(write(edited(key, value)), [], key, value)
        if agrees and value != {}:
            text = show(value) if value != "" else '""'
            assert legal == loads_as_given(write(base_of(key)), [f"--{key}", text], key, value)


LEGAL = {
    "training.data.training_cfg_rate": 0.0, "training.data.seed": 0, "training.data.dataloader_num_workers": 0,
    "training.optimizer.min_lr_ratio": 0.0, "training.optimizer.lr_warmup_steps": 0,
    "training.optimizer.weight_decay": 0.0, "training.optimizer.fused": False, "training.loop.max_train_steps": 0,
    "training.checkpoint.training_state_checkpointing_steps": 0, "training.checkpoint.checkpoints_total_limit": 0,
    "training.checkpoint.resume_from_checkpoint": None, "training.profile": None, "training.profile.start": 0,
    "callbacks.grad_clip.max_grad_norm": 0.0, "callbacks.grad_clip.log_grad_norms": False, "callbacks.ema": None,
    "callbacks.ema.decay": 0.0, "callbacks.ema.start_iter": 0, "callbacks.validation": None,
    "callbacks.validation.guidance_scale": 0.0, "callbacks.validation.use_ema": False,
    "models.student.trainable": False, "models.student.config": {}, "training.model.logit_mean": 0.0,
    "training.data.data_path": [],
}  # fmt: skip


@pytest.mark.parametrize("key, value", LEGAL.items())
def test_zero_false_null_and_empty_are_legal_where_they_mean_something(write, key, value):
    assert loads_as_given(write(edited(key, value)), [], key, value)


def test_every_key_says_what_it_means():
    assert all(row.doc and row.type and row.default for row in ROWS)
    flat = " ".join(help_text(Recipe).split())
    assert all(f"{row.key} {row.type}; " in flat for row in ROWS)


def test_the_smallest_recipe_and_its_defaults(write, tmp_path):
    data = {"models": {"student": {"_target_": "wan"}}, "method": {"_target_": "sft"},
            "training": {"data": {"data_path": "d"}, "optimizer": {"learning_rate": 1e-4},
                         "loop": {"max_train_steps": 1}, "checkpoint": {"output_dir": "o"}}}  # fmt: skip
    recipe = load_recipe(write(data))
    for row in ROWS:
        if (
            row.default != "required"
            and row.key.split(".")[1] not in ("ema", "validation")
            and "profile." not in row.key
            and row.key not in OWN
            and "encode." not in row.key
        ):
            seen = value_at(recipe, row.key)
            assert row.default == (seen if isinstance(seen, str) else show(seen)), row.key
    save_config(recipe, tmp_path / "config.yaml")
    assert load_recipe(tmp_path / "config.yaml") == recipe


@pytest.mark.parametrize("overrides, words", [
    (["--training.data.num_frames", "80"], ["training.data.num_frames must be 4k + 1, got 80; nearest: 77 or 81"]),
    (["--training.data.num_frames", "3"], ["nearest: 1 or 5"]),
    (["--callbacks.validation.num_frames", "82"], ["callbacks.validation.num_frames", "81 or 85"]),
    (["--training.data.num_frames", "81", "--training.data.num_latent_t", "20"],
     ["training.data.num_frames must be 77 for num_latent_t 20, got 81"]),
    (["--training.model.enable_torch_compile", "false", "--training.model.activation_memory_budget", "0.5"],
     ["training.model.activation_memory_budget", "enable_torch_compile: true"]),
    (["--training.model.enable_gradient_checkpointing_type", "null", "--training.model.gradient_checkpointing_every=2"],
     ["training.model.gradient_checkpointing_every", "enable_gradient_checkpointing_type: full"]),
    (["--training.checkpoint.resume_from_checkpoint", "null", "--training.checkpoint.weights_only", "true"],
     ["training.checkpoint.weights_only", "resume_from_checkpoint"]),
    (["--training.data.data_path", "other"], ['training.data.data_path is the mapping {"set.parquet": 300}']),
    (["--training.optimizer.betas", "[0.9, 1.0]"], ["training.optimizer.betas[1] must be a float >= 0 and < 1"]),
    (["--training.model.activation_memory_budget", "0"], ["must be a float > 0 and <= 1"]),
    (["--callbacks.validation.sampling_steps", "8"], ["validation.sampling_steps must be a list of int >= 1"]),
    (["--callbacks.validation.sampling_steps", "[]"], ["callbacks.validation.sampling_steps", "at least 1"]),
    (["--training.dit_precision", "fp16"], ["training.dit_precision must be one of fp32, bf16", "fp16"]),
    (["--models.student.config.rope", "{a: 1}"], ["models.student.config.rope must be scalar or list"]),
    (["--callbacks.emma.decay", "0.9"], ["callbacks.emma is not a known key (did you mean 'ema'?)"]),
])  # fmt: skip
def test_faults_give_the_full_dotted_key(write, overrides, words):
    with pytest.raises(UserError) as caught:
        load_recipe(write(BASE), overrides)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("frames, latent", [(1, 1), (77, 20), (81, 21), (121, 31), (249, 63)])
def test_frame_counts_of_the_public_recipes_pass(write, frames, latent):
    data = load_recipe(
        write(BASE), ["--training.data.num_frames", f"{frames}", "--training.data.num_latent_t", f"{latent}"]
    ).training.data
    assert (data.num_frames, data.num_latent_t) == (frames, latent)


def test_architecture_overrides_keep_their_types(write):
    recipe = load_recipe(
        write(BASE),
        ["--models.student.config.patch_size", "[1, 2, 2]", "--models.student.config.qk_norm=false",
         "--models.student.config.eps", "1e-6", "--models.student.config.num_layers", "4"],
    )  # fmt: skip
    assert recipe.models.student.config == {"num_layers": 4, "patch_size": (1, 2, 2), "qk_norm": False, "eps": 1e-6}
