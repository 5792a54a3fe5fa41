"""What a training worker does with the draft head that learns there, as a Dask task pinned to it.

Torch is imported in the worker alone, as in `worker`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollart.training.errors import StateError
from rollart.training.worker import learner_plugin
from storage.version import Version

__all__ = ["publish_draft_task"]


def publish_draft_task(lineage: int, metadata: Mapping[str, Any]) -> Version:
    """Publishes the head held now, named by the policy's version that it was trained beside, and returns once it exists; one that exists
    already stays as it is."""
    from rollart.drafts.folder import CONFIG, config_file

    plugin = learner_plugin()
    learner = plugin.learner
    with learner.lock:
        if learner.draft is None:
            raise StateError("there is no draft head here; set training.draft.online")
        version = Version(lineage, learner.step)
        weights, config = learner.draft.weights(), learner.draft.head.config
    if plugin.drafts.newest(lineage) != version:
        plugin.drafts.publish(weights, version=version, metadata=metadata, files={CONFIG: config_file(config)}, background=False).result()
    return version
