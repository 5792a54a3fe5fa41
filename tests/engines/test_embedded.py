"""What the embedded engine does over HTTP beyond the protocol."""

from __future__ import annotations

import pytest


async def test_without_weights_it_serves_once_they_came(tiny, tmp_path, start_engine, wire_to):
    model = tiny.model()
    model.config.save_pretrained(tmp_path / "bare")
    model.save_pretrained(tmp_path / "weights")
    url = start_engine("--model", str(tmp_path / "bare"), "--max-length", "64")
    async with wire_to(url) as wire:
        assert (await wire.get("/health"))[0] == 200
        assert (await wire.get("/health_generate"))[0] == 503
        status, answer = await wire.post("/generate", {"input_ids": [5]})
        assert (status, "no weights yet" in answer["error"]["message"]) == (503, True)
        await wire.post("/update_weights_from_disk", {"model_path": str(tmp_path / "weights"), "weight_version": "0-3"})
        reply = await wire.generate([5, 6], 5)
        assert reply["output_ids"] == tiny.greedy(model, [5, 6], 5)
        assert reply["meta_info"]["weight_version"] == "0-3"


@pytest.mark.parametrize("parameter", [{"stop": "x"}, {"n": 2}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}])
async def test_a_parameter_that_would_be_ignored_is_refused(wire, parameter):
    status, answer = await wire.post("/generate", {"input_ids": [5], "sampling_params": parameter})
    assert status == 400
    assert next(iter(parameter)) in answer["error"]["message"]


@pytest.mark.parametrize("parameter", [{"top_k": 2**70}, {"top_p": 1e-300}, {"temperature": 1e300}, {"sampling_seed": -(2**200)}])
async def test_a_number_that_its_arrays_cannot_hold_is_served(wire, parameter):
    assert len((await wire.generate([5, 6], 4, **parameter))["output_ids"]) == 4


async def test_a_path_that_no_file_system_takes_is_refused(wire):
    status, answer = await wire.post("/update_weights_from_disk", {"model_path": "/" + "a" * 5000})
    assert (status, answer["success"]) == (400, False)
    assert "cannot be listed: File name too long" in answer["message"]
