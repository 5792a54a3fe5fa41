"""Weights sent as tensors: how they are described to another process, and the calls that an SGLang server gets, for which a quick one stands here."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from rollart.engines.client import EngineClient
from rollart.engines.errors import EngineRefused
from rollart.engines.sglang.settings import SglangSettings
from rollart.engines.sglang.tensors import described, shared_weights
from rollart.engines.speculative.settings import SpeculationSettings
from rollart.engines.updating import give_weights

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}
READER = (
    "import base64, json, pickle, sys; print(json.dumps([[n, str(t.dtype), t.tolist()] for n, t in pickle.loads(base64.b64decode(sys.argv[1]))]))"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(STATE, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    return tmp_path


def test_another_process_finds_the_tensors_where_they_are_described_once_for_each_rank(folder: Path) -> None:
    weights = shared_weights(folder)
    before = torch.multiprocessing.get_sharing_strategy()
    ranks = described([weights, weights])
    assert len(ranks) == 2 and max(map(len, ranks)) < 4000, "descriptions, not values"
    assert torch.multiprocessing.get_sharing_strategy() == before
    for rank in ranks:
        read = subprocess.run([sys.executable, "-c", READER, rank], capture_output=True, text=True, check=True, timeout=60)
        assert json.loads(read.stdout) == [[n, str(t.dtype), t.tolist()] for n, t in STATE.items()]
    pickled = base64.b64decode(ranks[0])
    assert b"float" in pickled.lower() or b"storage" in pickled.lower()


@dataclass
class Calls:
    """What the server was asked, and what it refuses."""

    url: str = ""
    came: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refused: str | None = None


@pytest.fixture
async def server() -> AsyncIterator[Calls]:
    calls = Calls()

    async def answer(request: web.Request) -> web.Response:
        calls.came.append((request.path, await request.json()))
        refused = request.path == calls.refused
        return web.json_response({"success": not refused, "message": "no such parameter" if refused else "Success"}, status=400 if refused else 200)

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    calls.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield calls
    await runner.cleanup()


def launch(kv: Any, draft: Any = "model") -> SglangSettings:
    speculation = SpeculationSettings(draft, model=None if draft == "ngram" else "/draft")
    return SglangSettings("x", device="cuda", kv=kv, tensor_parallel=2, speculation=speculation)


@pytest.mark.parametrize(("kv", "mode", "flush"), [("recomputed", "retract", True), ("kept", "in_place", False)])
async def test_a_frozen_draft_keeps_its_weights_since_the_policys_are_sent_to_the_target_alone(
    server: Calls, folder: Path, kv: str, mode: str, flush: bool
) -> None:
    async with EngineClient() as client:
        await give_weights(client, launch(kv), folder, server.url, folder, "0-7")
    paths = ["/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update", "/continue_generation"]
    assert [path for path, _ in server.came] == paths
    bodies = dict(server.came)
    assert (bodies[paths[0]], bodies[paths[1]], bodies[paths[3]]) == ({"mode": mode}, {"selector": "target"}, {})
    sent = bodies[paths[2]]
    assert (sent["selector"], sent["weight_version"], sent["flush_cache"]) == ("target", "0-7", flush)
    assert len(sent["serialized_named_tensors"]) == 2 and "load_format" not in sent


async def test_each_rank_is_sent_its_part_of_a_policy_whose_layout_is_known(server: Calls, tmp_path: Path, tiny: Any) -> None:
    tiny.model("qwen2").save_pretrained(tmp_path)
    async with EngineClient() as client:
        await give_weights(client, launch("kept"), tmp_path, server.url, tmp_path, "0-1")
    sent = dict(server.came)["/update_weights_from_tensor"]
    assert sent["load_format"] == "direct"
    names = "model.layers.0.self_attn.qkv_proj.bias"
    script = f"import base64, pickle, sys; print(dict(pickle.loads(base64.b64decode(sys.argv[1])))['{names}'].tolist())"
    whole = tiny.model("qwen2").state_dict()
    for rank, described_tensors in enumerate(sent["serialized_named_tensors"]):
        said = await asyncio.to_thread(subprocess.check_output, [sys.executable, "-c", script, described_tensors], text=True, timeout=60)
        halves = [whole[f"model.layers.0.self_attn.{n}_proj.bias"].chunk(2)[rank] for n in "qkv"]
        assert json.loads(said) == torch.cat(halves).tolist()


async def test_a_version_of_the_draft_changes_neither_the_policys_version_nor_its_cache(server: Calls, folder: Path) -> None:
    async with EngineClient() as client:
        await give_weights(client, launch("recomputed"), folder, server.url, folder, "0-3", "draft")
    bodies = dict(server.came)
    assert bodies["/pause_generation"] == {"mode": "in_place"} and bodies["/begin_weight_update"] == {"selector": "draft"}
    sent = bodies["/update_weights_from_tensor"]
    assert (sent["selector"], sent["flush_cache"]) == ("draft", False) and "weight_version" not in sent


async def test_where_n_grams_draft_the_server_loads_the_folder(server: Calls, folder: Path) -> None:
    async with EngineClient() as client:
        await give_weights(client, launch("recomputed", "ngram"), folder, server.url, folder, "0-1")
    assert [path for path, _ in server.came] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


async def test_what_is_refused_leaves_a_server_that_goes_on(server: Calls, folder: Path) -> None:
    server.refused = "/update_weights_from_tensor"
    async with EngineClient() as client:
        with pytest.raises(EngineRefused, match="no such parameter"):
            await give_weights(client, launch("kept"), folder, server.url, folder, "0-1")
        assert [path for path, _ in server.came][-2:] == ["/end_weight_update", "/continue_generation"]
        with pytest.raises(ValueError, match="swap is retracting or in_place"):
            await client.update_by_tensors(server.url, ["x"], "target", "0-1", "between_steps")
