"""Runs inside a sandbox: defines what the untrusted code says, then answers calls of it on descriptor 3. Nothing here is trusted once it runs."""

import math
import socket
import struct
import sys
from typing import Any

PLAIN = (int, bool, str, bytes, type(None), complex)


def literal(value: Any, kept: list[Any]) -> str:
    """Python text of a plain value; of any other one, a handle to what is kept here."""
    kind = type(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else "1e999" if value > 0 else "-1e999" if value < 0 else handle(value, kept)
    if kind in PLAIN:
        return repr(value)
    if kind is list:
        return f"[{', '.join(literal(item, kept) for item in value)}]"
    if kind is tuple:
        return f"({''.join(literal(item, kept) + ',' for item in value)})"
    if kind is dict:
        return f"{{{', '.join(f'{literal(k, kept)}: {literal(v, kept)}' for k, v in value.items())}}}"
    if kind is set and value:
        return f"{{{', '.join(literal(item, kept) for item in value)}}}"
    return "set()" if kind is set else handle(value, kept)


def handle(value: Any, kept: list[Any]) -> str:
    kept.append(value)
    return f"('\\0handle', {len(kept) - 1})"


def answer(request: Any, names: dict[str, Any], kept: list[Any]) -> str:
    """`('ok', VALUE)` or `('raised', TYPE, TEXT)`."""
    try:
        what, of, name, args, keywords = request
        args = [kept[arg[1]] if isinstance(arg, tuple) and arg[:1] == ("\0handle",) else arg for arg in args]
        found = names[name] if of is None else getattr(kept[of], name)
        return f"('ok', {literal(found(*args, **keywords) if what == 'call' else found, kept)})"
    except Exception as error:  # noqa: BLE001 - whatever the code raises is the answer
        return f"('raised', {type(error).__name__!r}, {str(error)[:500]!r})"


def main() -> None:
    import ast

    channel = socket.socket(fileno=3)
    names: dict[str, Any] = {"__name__": "solution", "__builtins__": __builtins__}
    kept: list[Any] = []
    try:
        exec(compile(sys.stdin.read(), "<solution>", "exec"), names)  # noqa: S102 - the sandbox is there for it
        text = f"('ok', {[name for name in names if not name.startswith('__')]!r})"
    except Exception as error:  # noqa: BLE001
        text = f"('raised', {type(error).__name__!r}, {str(error)[:500]!r})"
    while True:
        message = text.encode(errors="replace")
        channel.sendall(struct.pack("!I", len(message)) + message)
        head = channel.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            return
        text = answer(ast.literal_eval(channel.recv(struct.unpack("!I", head)[0], socket.MSG_WAITALL).decode()), names, kept)


if __name__ == "__main__":
    main()
