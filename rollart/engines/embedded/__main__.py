"""`python -m rollart.engines.embedded`: one engine process. Prints {"url", "pid"} on one line of stdout once it is healthy."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import click

from rollart.engines.embedded.process import PortInUse, bind, follow_parent, ignore_interrupt
from rollart.engines.speculative.settings import WEIGHTED, SpeculationSettings

USER_ERROR = 2


@click.command()
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="Folder with config.json.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=int, default=0, show_default=True, help="0 takes a free one.")
@click.option("--slots", type=click.IntRange(1), default=64, show_default=True, help="Sequences in the KV cache, running and retained.")
@click.option("--max-length", type=click.IntRange(2), default=2048, show_default=True, help="Tokens of prompt and response together.")
@click.option("--chunk", type=click.IntRange(1), default=1024, show_default=True, help="Prompt tokens in one step.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="torch threads.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--kv", type=click.Choice(["recomputed", "kept"]), default="recomputed", show_default=True, help="KV in flight at a swap.")
@click.option("--weight-version", default="default", show_default=True, help="Version of the weights in --model.")
@click.option("--stream-interval", type=click.IntRange(1), default=1, show_default=True, help="Tokens between two events of a stream.")
@click.option("--deterministic", is_flag=True, help="Tokens and log-probabilities depend bit for bit on weights, prompt and seed alone.")
@click.option("--draft", type=click.Choice(["none", "ngram", "model", "head"]), default="none", show_default=True, help="Who drafts tokens.")
@click.option("--draft-length", type=click.IntRange(1, 15), default=4, show_default=True, help="Tokens drafted at most.")
@click.option("--draft-fixed", is_flag=True, help="Always draft that many, also where fewer or none were measured to be faster.")
@click.option("--draft-memory", type=click.IntRange(0), default=65_536, show_default=True, help="Tokens that an ngram draft remembers.")
@click.option("--draft-model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of a draft's weights.")
@click.option("--draft-version", default="default", show_default=True, help="Version of the weights in --draft-model.")
@click.option("--detached", is_flag=True, help="Live on when stdin closes; for an engine started by hand.")
def main(host: str, port: int, detached: bool, **options: Any) -> None:
    """Serves a causal language model over SGLang's HTTP protocol."""
    if options["draft"] == "model" and options["draft_model"] is None:
        raise click.UsageError("--draft model needs --draft-model")
    if options["draft"] not in WEIGHTED and options["draft_model"] is not None:
        raise click.UsageError(f"--draft-model is of --draft {' or '.join(WEIGHTED)}")
    if options["draft"] != "none" and options["deterministic"]:
        raise click.UsageError("--deterministic allows no --draft: what a pass computes would depend on what was drafted")
    ignore_interrupt()
    if not detached:
        follow_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s", stream=sys.stderr)
    try:
        sock = bind(host, port)
    except PortInUse as error:
        click.echo(str(error), err=True)
        sys.exit(USER_ERROR)
    code = asyncio.run(_serve(sock, **options))
    sys.stderr.flush()
    os._exit(code)  # nothing is left to save, and the interpreter's own way out of torch takes a second


async def _serve(
    sock: socket.socket,
    model: Path,
    slots: int,
    max_length: int,
    chunk: int,
    threads: int,
    dtype: str,
    device: str,
    kv: Any,
    weight_version: str,
    stream_interval: int,
    deterministic: bool,
    draft: Any,
    draft_length: int,
    draft_fixed: bool,
    draft_memory: int,
    draft_model: Path | None,
    draft_version: str,
) -> int:
    """Serves until SIGTERM (0) or until the engine's loop fails (3)."""
    # Heavy imports come after the checks that need none of them.
    import torch
    from aiohttp import web

    from rollart.engines.embedded.model import PolicyModel
    from rollart.engines.embedded.scheduler import Scheduler
    from rollart.engines.embedded.server import EngineServer
    from rollart.engines.speculative.draft import DraftError
    from rollart.engines.speculative.making import make_speculator

    torch.set_num_threads(threads)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    policy = PolicyModel(model, getattr(torch, dtype), torch.device(device))
    speculation = SpeculationSettings(draft, draft_length, not draft_fixed, draft_model, draft_memory, version=draft_version)
    try:
        speculator = make_speculator(speculation, policy, slots, max_length, chunk)
    except DraftError as error:
        click.echo(f"--draft-model: {error}", err=True)
        return USER_ERROR
    server = EngineServer(
        policy,
        lambda report: Scheduler(policy, slots, max_length, chunk, weight_version, report, kv, deterministic, stream_interval, speculator),
        max_length,
        {
            "engine": "embedded", "model_path": str(model), "slots": slots, "max_length": max_length, "chunk": chunk, "threads": threads,
            "dtype": dtype, "device": device, "kv": kv, "deterministic": deterministic, "vocab_size": policy.vocabulary,
            "draft": draft, "draft_length": draft_length if speculator else 0,
        },
    )  # fmt: skip
    server.engine.start()
    # A caller that hangs up cancels its handler, which aborts the request: nobody pays for tokens that nobody reads.
    runner = web.AppRunner(server.application(), handle_signals=False, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    address, number = sock.getsockname()[:2]
    print(json.dumps({"url": f"http://{f'[{address}]' if ':' in address else address}:{number}", "pid": os.getpid()}), flush=True)
    server.crashed.add_done_callback(lambda _: stop.set())
    await stop.wait()
    await runner.cleanup()
    if server.crashed.done():
        return 3
    server.engine.stop()
    return 0


if __name__ == "__main__":
    main()
