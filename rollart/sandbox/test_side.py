"""Runs inside a sandbox of its own: one test, whose calls of the code go out on descriptor 3 and come back as literals; says the verdict on stdout.

What comes back is never run, only parsed. A value that is no literal stays where it is, and stands here as an object that is equal to itself alone.
"""

import ast
import builtins
import json
import os
import socket
import struct
import sys
from typing import Any

MOST = 1 << 20
"""Bytes of one answer."""


class CodeFailed(Exception):
    """The code raised what has no name here, or is gone."""


class Code:
    """The other end."""

    def __init__(self) -> None:
        self.channel = socket.socket(fileno=3)

    def read(self) -> Any:
        head = self.channel.recv(4, socket.MSG_WAITALL)
        length = struct.unpack("!I", head)[0] if len(head) == 4 else None
        if length is None or length > MOST:
            raise CodeFailed("the code's process ended" if length is None else f"an answer of {length} bytes")
        message = self.channel.recv(length, socket.MSG_WAITALL)
        try:
            found = ast.literal_eval(message.decode())
            kind, *rest = found
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise CodeFailed("an answer that is no literal") from error
        if kind == "ok" and len(rest) == 1:
            return self.value(rest[0])
        name, text = (str(part) for part in rest) if len(rest) == 2 else ("an answer", "that is none")
        cls = getattr(builtins, name, None)
        if isinstance(cls, type) and issubclass(cls, Exception) and cls not in (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError):
            raise cls(text)
        raise CodeFailed(f"{name}: {text}")

    def value(self, found: Any) -> Any:
        if isinstance(found, tuple) and len(found) == 2 and found[0] == "\0handle":
            return Remote(self, int(found[1]))
        if isinstance(found, list | tuple):
            return type(found)(self.value(item) for item in found)
        return {key: self.value(value) for key, value in found.items()} if isinstance(found, dict) else found

    def ask(self, what: str, of: int | None, name: str, args: Any = (), keywords: Any = None) -> Any:
        args = [("\0handle", object.__getattribute__(arg, "_number")) if isinstance(arg, Remote) else arg for arg in args]
        message = repr((what, of, name, args, keywords or {})).encode()
        try:
            self.channel.sendall(struct.pack("!I", len(message)) + message)
        except OSError as error:
            raise CodeFailed("the code's process ended") from error
        return self.read()


class Remote:
    """A value that stays with the code: its methods can be called. It has no truth, no order, and equals nothing else."""

    def __init__(self, code: Code, number: int) -> None:
        self._code, self._number = code, number

    def __getattr__(self, name: str) -> Any:
        found = self._code.ask("get", self._number, name)
        return (lambda *args, **keywords: self._code.ask("call", self._number, name, args, keywords)) if isinstance(found, Remote) else found

    def __bool__(self) -> bool:
        raise TypeError("the code returned an object that is no plain value, and a test of it has no meaning here")

    def __len__(self) -> int:
        return int(self._code.ask("call", self._number, "__len__"))


def caller(code: Code, name: str) -> Any:
    def call(*args: Any, **keywords: Any) -> Any:
        return code.ask("call", None, name, args, keywords)

    call.__name__ = name
    return call


def main() -> None:
    asked = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)  # what the test prints is not the verdict
    reason = ""
    try:
        code = Code()
        found: dict[str, Any] = {"__name__": "test"}
        for name in code.read():
            if isinstance(name, str) and not hasattr(builtins, name):  # the test's own `all` or `len` is never the code's
                found[name] = caller(code, name)
        exec(compile(asked["test"], "<test>", "exec"), found)  # noqa: S102 - the sandbox is there for it
        passed = True
    except BaseException as error:  # noqa: BLE001 - however a test ends but by its end, it has failed
        passed, reason = False, f"{type(error).__name__}: {error}"[:500]
    os.write(out, json.dumps({"nonce": asked["nonce"], "passed": passed, "reason": reason}).encode())


if __name__ == "__main__":
    main()
