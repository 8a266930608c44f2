"""`ganger plot` and `ganger export`, against canned answers."""

from __future__ import annotations

import csv
import io
import json
import struct
from pathlib import Path

import pytest
from ganger.cli.metric_plot import write_events
from ganger.v1 import job_service_pb2
from ganger.wire import times
from kit.canned import Call, CannedMaster

Output = pytest.CaptureFixture[str]


def logged(master: CannedMaster) -> job_service_pb2.Series:
    """Let the master have two metrics of job 1 and two epochs."""
    series = master.series
    series.metrics.add(name="accuracy", stride=1, steps=[4, 8], times=[104.0, 108.5], values=[0.5, 0.75])
    series.metrics.add(
        name="loss", stride=2, steps=[2, 4, 6, 8], times=[102.0, 104.0, 106.0, 108.0], values=[4.0, 3.0, 2.0, 1.0]
    )
    for number in range(2):
        series.epochs.add(
            number=number,
            begin_time=times.timestamp(100.0 + 4 * number),
            end_time=times.timestamp(104.0 + 4 * number),
            first_step=4 * number,
            steps=4,
            active_duration=times.duration(2.0),
            mean_loss=None if number else 3.5,
        )
    return series


def test_each_metric_is_drawn_by_step_and_the_epochs_are_listed(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    logged(master)
    assert call("plot", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    loss = lines.index("loss by step: * job 1, 1 at step 8")
    drawn = lines[loss - 14 : loss - 2]
    assert drawn[0].split() == ["4", "|*"], "the first is the highest"
    assert drawn[-1].endswith("*"), "the last is the lowest"
    assert lines[loss - 1].split() == ["2", "8"]
    assert "accuracy by step: * job 1, 0.75 at step 8" in lines
    epochs = [line.split() for line in lines[lines.index("job 1: epochs") + 2 :]]
    assert [(row[0], *row[3:]) for row in epochs] == [("0", "2s", "4", "0.5", "3.5"), ("1", "2s", "4", "0.5")]


def test_several_jobs_are_drawn_together_and_one_metric_can_be_chosen(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    logged(master)
    assert call("plot", "1", "2", "--metric", "accuracy") == 0
    out = capsys.readouterr().out
    assert "accuracy by step: * job 1, 0.75 at step 8; o job 2, 0.75 at step 8" in out
    assert "loss by step" not in out
    assert call("plot", "1", "--metric", "f1") == 3
    assert "no metric 'f1': there are accuracy, loss" in capsys.readouterr().err


def test_a_job_that_has_logged_nothing_has_nothing_to_draw(call: Call, capsys: Output) -> None:
    assert call("plot", "1") == 3
    assert "job 1 has logged nothing: job.log(accuracy=0.93) in its script does" in capsys.readouterr().err


def test_a_picture_is_drawn_where_matplotlib_is_installed(
    call: Call, master: CannedMaster, tmp_path: Path, capsys: Output
) -> None:
    pytest.importorskip("matplotlib")
    logged(master)
    assert call("plot", "1", "--output", str(tmp_path / "plot.png")) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert call("plot", "1", "--output", str(tmp_path / "plot.xyz")) == 4
    assert "xyz" in capsys.readouterr().err


def test_json_has_all_points_and_epochs(call: Call, master: CannedMaster, capsys: Output) -> None:
    logged(master)
    assert call("plot", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)["1"]
    assert [metric["name"] for metric in found["metrics"]] == ["accuracy", "loss"]
    assert len(found["epochs"]) == 2


def test_values_and_epochs_are_exported_as_csv(
    call: Call, master: CannedMaster, tmp_path: Path, capsys: Output
) -> None:
    logged(master)
    assert call("export", "1") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[1] == {"job": "1", "metric": "accuracy", "step": "8", "unix_s": "108.500", "value": "0.75"}
    assert len(rows) == 6
    assert call("export", "1", "--epochs", "--output", str(tmp_path / "epochs.csv")) == 0
    first, second = csv.DictReader((tmp_path / "epochs.csv").read_text().splitlines())
    assert (first["epoch"], first["steps"], first["active_s"], first["mean_loss"]) == ("0", "4", "2.000", "3.5")
    assert second["mean_loss"] == ""


def test_tensorboard_needs_a_directory(call: Call, master: CannedMaster, tmp_path: Path, capsys: Output) -> None:
    logged(master)
    assert call("export", "1", "--format", "tensorboard") == 2
    assert call("export", "1", "--format", "tensorboard", "--output", str(tmp_path)) == 0
    assert [path.parent.name for path in tmp_path.rglob("events.out.tfevents.*")] == ["1"]
    capsys.readouterr()


def test_an_event_file_has_records_of_the_known_format(tmp_path: Path, master: CannedMaster) -> None:
    records = []
    data = write_events(tmp_path, logged(master)).read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        records.append(data[12 : 12 + length])
        data = data[16 + length :]
    assert len(records) == 7
    # An Event of 102 s, of step 0, with the version of the format.
    assert records[0] == bytes.fromhex("09000000000080594010001a0d627261696e2e4576656e743a32")
    assert records[1][-4:] == struct.pack("<f", 4.0)


def test_tensorboard_reads_what_was_exported(tmp_path: Path, master: CannedMaster) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    series = logged(master)
    series.metrics[1].values[0] = 1e300
    write_events(tmp_path, series)
    read = accumulators.EventAccumulator(str(tmp_path))
    read.Reload()
    assert read.Tags()["scalars"] == ["loss", "accuracy"]
    assert [(one.step, one.value) for one in read.Scalars("accuracy")] == [(4, 0.5), (8, 0.75)]
    assert [one.wall_time for one in read.Scalars("accuracy")] == [104.0, 108.5]
    assert read.Scalars("loss")[0].value == float("inf")
