"""Metrics and report on a store that knows no appending and no folders: S3, as moto's server speaks it."""

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from rollart.dashboard import metrics
from rollart.dashboard.metrics import MetricsWriter, read_metrics
from rollart.dashboard.report import write_report


@pytest.fixture
def options() -> Iterator[dict[str, Any]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    found = {"key": "test", "secret": "test", "endpoint_url": f"http://{host}:{port}"}
    fsspec.filesystem("s3", **found).mkdir("reports")
    yield found
    server.stop()


def test_a_run_on_s3_is_written_resumed_and_reported(options: dict[str, Any], made_up, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics, "PIECE_BYTES", 2000)
    url = "s3://reports/runs/one"
    written = made_up.lines(steps=12)[1:]
    with MetricsWriter(url, options) as writer:
        for line in written:
            writer.write(line)
    assert [line for line in read_metrics(url, options) if line["kind"] != "start"] == written
    with MetricsWriter(url, options, resume_step=10) as writer:
        writer.write({"kind": "step", "step": 11, "reward": {}})
    assert [line["step"] for line in read_metrics(url, options) if line["kind"] == "step"] == list(range(1, 12))
    fs = fsspec.filesystem("s3", **options)
    names = [path.rpartition("/")[2] for path in fs.ls("reports/runs/one/metrics", detail=False)]
    assert sum(name.endswith(".jsonl") for name in names) > 2
    assert sum("tfevents" in name for name in names) == 2
    assert write_report(url, options, made_up.rows(20, 20)) == "s3://reports/runs/one/report.html"
    assert b"Reward on held-out episodes" in fs.cat_file("reports/runs/one/report.html")
