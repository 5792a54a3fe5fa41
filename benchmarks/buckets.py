"""A bucket on this machine to measure against, at any latency; owns which server stands in, measures nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.servers import ServerMissing, moto, seaweedfs
from benchmarks.slow_proxy import SlowProxy

log = logging.getLogger(__name__)


@contextmanager
def bucket(latency_s: float = 0.0) -> Iterator[tuple[str, dict[str, Any]]]:
    """URL and storage options of an empty bucket: SeaweedFS where it is installed, else moto. Every reply takes `latency_s` longer."""
    with ExitStack() as stack:
        try:
            options = stack.enter_context(seaweedfs())
        except ServerMissing as error:
            log.warning("%s; moto stands in", error)
            options = stack.enter_context(moto())
        if latency_s:
            options = {**options, "endpoint_url": stack.enter_context(SlowProxy(options["endpoint_url"], latency_s)).url}
        yield "s3://bucket", options
