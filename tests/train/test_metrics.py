"""metrics.jsonl, its figures, the progress display and the loss picture."""

import io
import json
import math
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import UserError
from train import metrics, plot

SETTINGS = settings(max_examples=30, deadline=None, derandomize=True)


def train_row(step, seconds=1.0, **values):
    return {"phase": "train", "step": step, "seconds": seconds, **values}


# --- The file ----------------------------------------------------------------------------------------------


def test_rows_come_back_as_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [metrics.append_row(path, "setup", seconds=2.0, effective_batch=4),
            metrics.append_row(path, "train", step=1, loss=torch.tensor(0.5), lr=np.float32(0.25), seconds=0.1),
            metrics.append_row(path, "train", step=2, loss=torch.tensor(1.5, dtype=torch.bfloat16), seconds=0.1),
            metrics.append_row(path, "validate", step=2, files=("a.mp4", "b.mp4"), psnr={"a": 20.0})]  # fmt: skip
    assert metrics.read_rows(path) == rows
    assert rows[1] == {"phase": "train", "step": 1, "loss": 0.5, "lr": 0.25, "seconds": 0.1}
    assert rows[3]["files"] == ["a.mp4", "b.mp4"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, torch.tensor(math.nan), np.float64("inf")])
def test_what_is_not_finite_becomes_null(tmp_path, value):
    metrics.append_row(tmp_path / "m", "train", step=1, loss=value, norms=[1.0, value])
    # Strict JSON: a reader that refuses NaN must accept the file.
    row = json.loads((tmp_path / "m").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert row["loss"] is None and row["norms"] == [1.0, None]


def test_a_bad_row_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="'eval': one of setup, train, validate, save"):
        metrics.append_row(tmp_path / "m", "eval", step=1)
    with pytest.raises(TypeError):
        metrics.append_row(tmp_path / "m", "train", step=object())
    assert not (tmp_path / "m").exists()


def test_damage_is_an_error_but_a_torn_end_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        metrics.append_row(path, "train", step=step, loss=0.5)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        assert [row["step"] for row in metrics.read_rows(path)] == [1, 2, 3][: whole[:cut].count(b"\n")]
    path.write_bytes(whole.replace(b'"step": 2', b'"step": 2"'))
    with pytest.raises(UserError, match=r"metrics.jsonl:2: not a JSON object"):
        metrics.read_rows(path)
    with pytest.raises(UserError, match="no such file"):
        metrics.read_rows(tmp_path / "none")


@SETTINGS
@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), st.booleans())
def test_resumed_files_have_each_train_step_once(tmp_path_factory, stops, torn):
    """Runs that are killed at step `stop` and resume from the last state (saved every 3 steps)."""
    path = tmp_path_factory.mktemp("resume") / "metrics.jsonl"
    saved = 0
    for stop in [*stops, 20]:
        metrics.drop_after(path, saved)
        metrics.append_row(path, "setup", seconds=1.0)
        for step in range(saved + 1, stop + 1):
            metrics.append_row(path, "train", step=step, loss=1.0)
            if step % 3 == 0:
                metrics.append_row(path, "save", step=step)
                saved = step
        if torn:
            path.write_bytes(path.read_bytes() + b'{"phase": "tra')
    rows = metrics.read_rows(path)
    assert [row["step"] for row in rows if row["phase"] == "train"] == list(range(1, 21))
    assert [row["step"] for row in rows if row["phase"] == "save"] == [3, 6, 9, 12, 15, 18]


def test_drop_after_is_atomic_and_counts(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    assert metrics.drop_after(path, 3) == 0 and not path.exists()
    for step in range(1, 6):
        metrics.append_row(path, "train", step=step)
    before = path.read_bytes()
    with monkeypatch.context() as m:
        m.setattr("core.files.os.replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError):
            metrics.drop_after(path, 3)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert metrics.drop_after(path, 3) == 2 and len(metrics.read_rows(path)) == 3


# --- Figures -----------------------------------------------------------------------------------------------


def test_summary_of_a_run():
    rows = [{"phase": "setup", "seconds": 5.0, "effective_batch": 8, "peak_memory_bytes": 10},
            train_row(1, 9.0, loss=3.0, peak_memory_bytes=100), train_row(2, 7.0, loss=2.5),
            train_row(3, 5.0, loss=2.0), train_row(4, 1.0, loss=1.0),
            train_row(5, 1.2, loss=None), train_row(6, 1.1, loss=0.5),
            {"phase": "validate", "step": 6, "seconds": 50.0, "peak_memory_bytes": 300},
            {"phase": "save", "step": 6, "seconds": 2.0}]  # fmt: skip
    s = metrics.summary(rows)
    assert s == metrics.Summary(6, pytest.approx(81.3), 1.1, 300, 8, 0.5)
    text = metrics.summary_text(s)
    assert "6 steps in 1:21" in text and "1.1 s per steady step" in text and "effective batch 8" in text
    assert metrics.mean(rows, "loss") == pytest.approx(9.0 / 5)
    assert metrics.eta_seconds(rows, 16) == pytest.approx(11.0)


def test_an_empty_run_has_a_summary():
    assert metrics.summary([]) == metrics.Summary(0, 0, None, None, None, None)
    assert metrics.summary_text(metrics.summary([])) == "0 steps in 0:00"
    assert metrics.eta_seconds([], 5) is None and metrics.mean([], "loss") is None


@SETTINGS
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=30), st.lists(st.floats(0, 1e4), max_size=5))
def test_speed_and_eta_ignore_other_phases(seconds, others):
    rows = [train_row(i, s, loss=1.0) for i, s in enumerate(seconds, 1)]
    mixed = rows + [{"phase": p, "step": 1, "seconds": s, "loss": 99.0} for s in others for p in ("validate", "save")]
    random.Random(0).shuffle(others)
    assert metrics.eta_seconds(mixed, 100) == metrics.eta_seconds(rows, 100)
    assert metrics.mean(mixed, "loss") == 1.0
    assert metrics.summary(mixed).total_seconds == pytest.approx(sum(seconds) + 2 * sum(others))


@pytest.mark.parametrize("seconds, text", [(0, "0:00"), (59.6, "1:00"), (75, "1:15"), (3700, "1:01:40")])
def test_duration(seconds, text):
    assert metrics.duration(seconds) == text


# --- Progress ----------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def drive(file, steps, start=0, **kw):
    with metrics.progress(steps, start, file=file, **kw) as display:
        for step in range(start + 1, steps + 1):
            display.update({"step": step, "seconds": 2.0, "loss": 1.0 / step, "grad_norm": None, "lr": 1e-3})
            if step == start + 2:
                display.log("saved [bold]")
    return file.getvalue()


def test_plain_lines_elsewhere():
    lines = drive(io.StringIO(), 120, every_steps=50, every_seconds=1e9).splitlines()
    steps = [int(m[1]) for line in lines if (m := re.match(r"step (\d+)/120", line))]
    assert steps == [1, 51, 101, 120] and "saved [bold]" in lines
    assert lines[0] == "step 1/120  loss 1.0000  lr 1.00e-03  2 s/step  3:58 left"
    assert lines[-1].endswith("0:00 left") and "\x1b" not in "".join(lines)


def test_a_bar_on_a_terminal():
    text = drive(Terminal(), 20, start=10)
    assert "20/20" in text and "2 s/step" in text and "0:00 left" in text and "saved [bold]" in text


# --- Picture -----------------------------------------------------------------------------------------------


def image(path):
    from matplotlib.image import imread

    return imread(path)


def colored(pixels, hex_color):
    rgb = np.array([int(hex_color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.abs(pixels[..., :3] - rgb).max(-1) < 0.02


def test_picture_has_a_panel_for_every_series(tmp_path):
    rows = [train_row(s, loss=2 / s, lr=1e-3, grad_norm=1.0 + 1 / s) for s in range(1, 60)]
    plot.loss_plot(rows, tmp_path / "all.png")
    plot.loss_plot([{k: v for k, v in r.items() if k != "lr"} for r in rows], tmp_path / "no_lr.png")
    both, one = image(tmp_path / "all.png"), image(tmp_path / "no_lr.png")
    assert all(colored(both, c).sum() > 200 for c in (plot.BLUE, plot.ORANGE, plot.GREEN))
    assert colored(one, plot.ORANGE).sum() == 0 and one.shape[0] < both.shape[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.png", "no_lr.png"]


@pytest.mark.parametrize("rows", [
    [], [train_row(1, loss=0.5)], [train_row(1, loss=None), train_row(2, loss=None)],
    [train_row(1, loss=0.5, lr=0.0, grad_norm=0.0), train_row(2, loss=-0.5, lr=0.0, grad_norm=None)],
    [{"phase": "validate", "step": 0, "seconds": 1.0}],
])  # fmt: skip
def test_picture_of_odd_runs(tmp_path, rows):
    plot.loss_plot(rows, tmp_path / "loss.png")
    assert image(tmp_path / "loss.png").std() > 0


@SETTINGS
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.floats(0.5, 20))
def test_smoothing_is_an_average(values, span):
    out = plot.smooth(values, span)
    assert out[0] == pytest.approx(values[0], abs=1e-9)
    assert all(min(values) - 1e-9 <= v <= max(values) + 1e-9 for v in out)
    # The closed form of the last one: weights keep^age, normalised.
    weights = np.array([(span / (1 + span)) ** age for age in range(len(values))])[::-1]
    assert out[-1] == pytest.approx((weights * values).sum() / weights.sum(), rel=1e-9, abs=1e-9)


def test_smoothing_skips_what_is_missing():
    assert plot.smooth([1.0, None, 1.0], 3) == pytest.approx([1.0, None, 1.0])
