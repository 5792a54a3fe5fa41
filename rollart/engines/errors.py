"""What can go wrong between a caller and an engine; owns the types alone, so that callers need not import an HTTP library."""

from __future__ import annotations

__all__ = ["EngineDied", "EngineError", "EngineRefused", "EngineUnreachable", "NoEngine"]


class EngineError(RuntimeError):
    """Base of everything that an engine or the way to it can do wrong."""


class EngineUnreachable(EngineError):
    """No answer came: nothing listens at `url`, it went away in the middle, or it took longer than allowed. Try another engine."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"engine {url} cannot be reached: {reason}")
        self.url = url
        self.reason = reason

    def __reduce__(self) -> tuple[type[EngineUnreachable], tuple[str, str]]:
        return type(self), (self.url, self.reason)


class EngineRefused(EngineError):
    """The engine answered with an error: `status` is HTTP's, `message` the engine's own word. The same request will fail again on 4xx."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"engine {url} refused ({status}): {message}")
        self.url = url
        self.status = status
        self.message = message

    def __reduce__(self) -> tuple[type[EngineRefused], tuple[str, int, str]]:
        return type(self), (self.url, self.status, self.message)


class EngineDied(EngineError):
    """The engine's process ended, or never came up. `serve` starts it again."""


class NoEngine(EngineError):
    """The table holds no engine that may serve `hardware_class`."""

    def __init__(self, hardware_class: str, known: tuple[str, ...]) -> None:
        have = f"there are engines of {', '.join(known)}" if known else "the table is empty"
        super().__init__(f"no engine of hardware class {hardware_class!r}: {have}; start a generation worker with that resource")
        self.hardware_class = hardware_class
        self.known = known

    def __reduce__(self) -> tuple[type[NoEngine], tuple[str, tuple[str, ...]]]:
        return type(self), (self.hardware_class, self.known)
