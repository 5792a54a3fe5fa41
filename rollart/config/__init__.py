"""The whole configuration as typed models; owns what may be said and what contradicts what. Starts nothing, imports no torch."""

from rollart.config.hardware import HardwareClass
from rollart.config.reading import RESUMABLE, changed_fields, load, parse
from rollart.config.run import RunSettings
from rollart.config.section import ConfigError
from rollart.config.tasks import AgentSettings, TaskSettings
from rollart.config.whole import Config

__all__ = [
    "RESUMABLE", "AgentSettings", "Config", "ConfigError", "HardwareClass", "RunSettings", "TaskSettings", "changed_fields", "load", "parse",
]  # fmt: skip
