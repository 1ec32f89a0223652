"""A tiny LTX-2, rows for it, and recipes over them, for the tests of its training."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from core import keys
from nn.ltx2_config import LTX2Config
from train.config import load_recipe
from train.rows import encode_row, row_type

SIZES = {
    "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8, "cross_attention_dim": 32, "in_channels": 4,
    "out_channels": 4, "audio_num_attention_heads": 4, "audio_attention_head_dim": 4, "audio_cross_attention_dim": 16,
    "audio_in_channels": 6, "audio_out_channels": 6, "caption_channels": 9, "rope_type": "split",
    "vae_scale_factors": [4, 8, 8],
}  # fmt: skip
LTX23 = SIZES | {
    "gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False, "use_cross_timestep": True,
}  # fmt: skip
LTX25 = LTX23 | {"ff_bias": False, "use_prompt_adaln_single": False, "use_keyframes_abs_pos_embedding": True}
GRID, STEPS = (2, 4, 4), 5  # latents of a video, and of a sound


def config(sizes=SIZES, **changes) -> LTX2Config:
    return LTX2Config(**{**sizes, **changes})


def row(kind: str, i: int, grid=GRID, steps=STEPS, widths=(9, 9), own_text=False, fps=25.0) -> dict:
    """Sample i of a set: the same latents and texts in every type of row."""
    k = keys.fold_in(keys.key(0), i)
    draw = lambda name, *shape: keys.normal(keys.fold_in(k, name), shape)  # noqa: E731
    tensors = {"vae_latent": draw("v", 4, *grid), "audio_latent": draw("a", 2, steps, 3),
               "text_embedding": draw("t", 4, widths[0])}  # fmt: skip
    if own_text:
        tensors["audio_text_embedding"] = draw("s", 4, widths[1])
    notes = {"id": f"sample-{i}", "file_name": f"{i}.mp4", "caption": f"caption {i}", "media_type": "video",
             "width": 32, "height": 32, "num_frames": 5, "duration_sec": 0.2, "fps": fps,
             "audio_sample_rate": 16000}  # fmt: skip
    known = row_type(kind)
    stems = {column.stem for column in known.tensors}
    return {k: v for k, v in (notes | tensors).items() if k in known.schema.names or k in stems}


def write(folder: Path, kind: str, rows) -> Path:
    """A set of one file."""
    folder.mkdir(parents=True)
    known = row_type(kind)
    table = pa.Table.from_pylist([encode_row(known, r) for r in rows], known.schema)
    pq.write_table(table, folder / "part.parquet")
    return folder


def recipe_of(data: Path, out: Path, kind: str = "t2va", sizes=SIZES, changes=None):
    """A recipe; `changes` are `{dotted key: value}`."""
    base = {
        "models": {"student": {"_target_": "ltx2", "config": dict(sizes)}},
        "method": {"_target_": "sft"},
        "training": {
            "data": {"data_path": str(data), "preprocessed_data_type": kind, "train_batch_size": 2, "seed": 3},
            "optimizer": {"learning_rate": 1e-2},
            "loop": {"max_train_steps": 4},
            "checkpoint": {"output_dir": str(out), "training_state_checkpointing_steps": 2},
            "device": "cpu",
        },
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.parent / f"{out.name}.yaml"
    path.write_text(json.dumps(base))  # JSON is YAML
    pairs = {} if changes is None else changes
    return load_recipe(path, [s for k, v in pairs.items() for s in (f"--{k}", json.dumps(v))])
