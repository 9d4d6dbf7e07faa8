"""Requests over loopback to a real server: right answers, and a sentence for whatever is wrong."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.serve.harness import Running, compiled, post, running, scores
from torch import nn
from torch.export import Dim

import intarsia
from intarsia.runtime import Compiled
from intarsia.serve.queue import Batching

RAW = "application/x-safetensors"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Compiled]:
    model, fast = scores()
    path = tmp_path_factory.mktemp("archives") / "scores.intarsia"
    intarsia.save(fast, path)
    return model, intarsia.load(path)


@pytest.fixture(scope="module")
def server(pair: tuple[nn.Module, Compiled]) -> Iterator[Running]:
    with running(pair[1], wait_ms=5, max_body=2**20, linger_s=0.2) as made:
        assert made.service.queue.batching == Batching(16)
        yield made


def request(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 20, (rows, 5), generator=random)
    return {"words": words, "weights": torch.rand(rows, 5, generator=random)}


def as_json(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"inputs": {name: value.tolist() for name, value in tensors.items()}}


def right(answer: Any, model: nn.Module, tensors: dict[str, torch.Tensor]) -> bool:
    with torch.no_grad():
        expected = model(**tensors)
    torch.testing.assert_close(answer["scores"], expected["scores"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(answer["state.0"], expected["state"][0], rtol=1e-4, atol=1e-5)
    return True


def from_json(body: Any) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in body["outputs"].items() if value is not None}


def test_json_and_raw_tensors(server: Running, pair: tuple[nn.Module, Compiled]) -> None:
    tensors = request(3)
    answer = server.post(as_json(tensors))
    assert answer.status == 200 and answer.json["outputs"]["nothing"] is None
    assert right(from_json(answer.json), pair[0], tensors)
    raw = server.post(safetensors.torch.save(tensors), RAW)
    assert raw.status == 200 and raw.headers["content-type"] == RAW
    assert right(safetensors.torch.load(raw.body), pair[0], tensors)
    mixed = server.post(as_json(tensors), Accept=RAW)
    assert right(safetensors.torch.load(mixed.body), pair[0], tensors)


def test_many_clients_share_calls_and_get_their_own(
    server: Running, pair: tuple[nn.Module, Compiled]
) -> None:
    def client(number: int) -> bool:
        connection = server.connect()  # kept alive over its requests
        for turn in range(5):
            tensors = request(1 + number % 3, number * 10 + turn)
            answer = post(connection, safetensors.torch.save(tensors), RAW)
            assert answer.status == 200, answer.body
            assert right(safetensors.torch.load(answer.body), pair[0], tensors)
        connection.close()
        return True

    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(client, range(24)))
    text = server.get("/metrics").body.decode()
    calls = float(
        next(line for line in text.splitlines() if line.startswith("intarsia_batch_rows_count")).split()[1]
    )
    rows = float(
        next(line for line in text.splitlines() if line.startswith("intarsia_batch_rows_sum")).split()[1]
    )
    assert rows / calls > 1.5


def test_it_tells_what_it_is(server: Running) -> None:
    told = server.get("/").json
    assert told["outputs"] == ["scores", "state.0", "nothing"]
    assert told["inputs"]["words"]["dtype"] == "int64" and told["inputs"]["words"]["shape"][1] == 5
    assert "16 rows" in told["batching"]
    assert server.get("/health").json == {"status": "ready"}
    assert b"intarsia_request_seconds_bucket" in server.get("/metrics").body
    nowhere = server.get("/nowhere")
    assert nowhere.status == 404 and nowhere.json["error"].startswith(
        "there is no GET /nowhere; there are POST"
    )
    wrong = server.get("/predict")
    assert wrong.status == 405 and wrong.json["error"].startswith("there is no GET /predict; there are POST")


GOOD = as_json(request(2))["inputs"]
BAD: dict[str, tuple[Any, str, int, str]] = {
    "no JSON": (b"{", "application/json", 400, "not JSON"),
    "nothing": (b"", "application/json", 400, "not JSON"),
    "NaN": (b'{"inputs": {"words": [[NaN]]}}', "application/json", 400, "NaN"),
    "no UTF-8": (b"\xff\xfe\x00", "application/json", 400, "not JSON"),
    "deep": (b"[" * 100_000, "application/json", 400, "deeply"),
    "digits": (b'{"inputs": ' + b"1" * 10_000 + b"}", "application/json", 400, "JSON"),
    "twice": (b'{"inputs": {}, "inputs": {}}', "application/json", 400, "twice"),
    "a list": ([1, 2], "application/json", 400, "inputs"),
    "more than inputs": ({"inputs": GOOD, "model": "x"}, "application/json", 400, "inputs"),
    "unknown": ({"inputs": {**GOOD, "tokens": [1]}}, "application/json", 400, "'tokens'"),
    "missing": ({"inputs": {"words": GOOD["words"]}}, "application/json", 422, "weights"),
    "ragged": ({"inputs": {**GOOD, "words": [[1, 2], [3]]}}, "application/json", 400, "equal lengths"),
    "words": ({"inputs": {**GOOD, "words": [["a"] * 5] * 2}}, "application/json", 400, "numbers"),
    "null": ({"inputs": {**GOOD, "words": None}}, "application/json", 400, "numbers"),
    "fractions": ({"inputs": {**GOOD, "words": [[0.5] * 5] * 2}}, "application/json", 400, "int64"),
    "huge integer": ({"inputs": {**GOOD, "words": [[10**30] * 5] * 2}}, "application/json", 400, "words"),
    "huge float": (
        b'{"inputs": {"words": [[1, 1, 1, 1, 1]], "weights": [[1e999, 1, 1, 1, 1]]}}',
        "application/json",
        400,
        "float32",
    ),
    "shape": ({"inputs": {**GOOD, "words": [[1] * 4] * 2}}, "application/json", 422, "compiled for 5"),
    "rank": ({"inputs": {**GOOD, "words": [1] * 5}}, "application/json", 422, "dimensions"),
    "other rows": ({"inputs": {**GOOD, "words": [[1] * 5] * 3}}, "application/json", 422, "both are"),
    "no rows": ({"inputs": {"words": [], "weights": []}}, "application/json", 422, "words"),
    "too many rows": (as_json(request(17)), "application/json", 422, "1 to 16"),
    "no such word": ({"inputs": {**GOOD, "words": [[99] * 5] * 2}}, "application/json", 422, "values"),
    "wrong kind": (b"x", "text/plain", 415, "application/json"),
    "truncated": (safetensors.torch.save(request(2))[:-7], RAW, 400, "safetensors"),
    "empty raw": (b"", RAW, 400, "safetensors"),
    "huge header": (struct.pack("<Q", 2**62) + b"{}", RAW, 400, "safetensors"),
    "raw dtype": (
        safetensors.torch.save({**request(2), "words": torch.zeros(2, 5)}),
        RAW,
        422,
        "torch.int64",
    ),
    "too large": (b" " * (2**20 + 1), "application/json", 413, "1048576 bytes"),
    "far too large": (b" " * (5 * 2**20), "application/json", 413, "1048576 bytes"),
    "160 MB": (bytes(160 * 10**6), RAW, 413, "1048576 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_a_sentence(server: Running, name: str) -> None:
    body, kind, status, said = BAD[name]
    answer = server.post(body, kind)
    assert answer.status == status, answer.body
    assert said in answer.json["error"]
    assert "Traceback" not in answer.json["error"] and "\n" not in answer.json["error"]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_hostile_bodies(server: Running, data: st.DataObject) -> None:
    """Whatever is sent, the answer is 200 or 4xx with a sentence."""
    if data.draw(st.booleans(), "raw"):
        body = bytearray(safetensors.torch.save(request(2)))
        for _ in range(data.draw(st.integers(1, 4))):
            body[data.draw(st.integers(0, min(200, len(body) - 1)))] = data.draw(st.integers(0, 255))
        answer = server.post(bytes(body[: data.draw(st.integers(0, len(body)))]), RAW)
    else:
        values = st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=12,
        )
        body = {"inputs": {"words": data.draw(values), "weights": data.draw(values)}}
        answer = server.post(data.draw(st.sampled_from([body, body["inputs"], body["inputs"]["words"]])))
    assert answer.status == 200 or (400 <= answer.status < 500 and answer.json["error"])


def test_a_bad_request_does_not_disturb_others(pair: tuple[nn.Module, Compiled]) -> None:
    """Words that the model has not fail in the same batch; those beside them are answered."""
    with running(pair[1], wait_ms=300, max_batch=8, linger_s=0) as server, ThreadPoolExecutor(8) as pool:
        bad = {**request(1), "words": torch.full((1, 5), 99)}
        sent = [bad if number in (2, 5) else request(1, number) for number in range(8)]
        answers = list(pool.map(lambda t: server.post(safetensors.torch.save(t), RAW), sent))
        for tensors, answer in zip(sent, answers, strict=True):
            if tensors is bad:
                assert answer.status == 422 and "values" in answer.json["error"]
            else:
                assert right(safetensors.torch.load(answer.body), pair[0], tensors)
        assert b"intarsia_split_batches_total 1.0" in server.get("/metrics").body


def test_rows_that_would_only_fit_together(pair: tuple[nn.Module, Compiled]) -> None:
    """2 rows of words with 3 of weights, and the reverse, would make a valid batch of 5; neither is valid."""
    with running(pair[1], wait_ms=200, linger_s=0) as server, ThreadPoolExecutor(2) as pool:
        some, more = request(2), request(3)
        sent = [{"words": a["words"], "weights": b["weights"]} for a, b in ((some, more), (more, some))]
        answers = list(pool.map(lambda t: server.post(safetensors.torch.save(t), RAW), sent))
        assert [answer.status for answer in answers] == [422, 422]


def test_infinite_answers_are_refused_in_json_and_given_raw() -> None:
    class Log(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.log()

    made = compiled(Log(), (torch.ones(2, 3),), {"x": {0: Dim("rows", max=9)}})
    with running(made, linger_s=0) as server:
        assert server.post({"inputs": {"x": [[0, 1, 1]]}}).status == 406
        answer = server.post({"inputs": {"x": [[0, 1, 1]]}}, Accept=RAW)
        assert safetensors.torch.load(answer.body)["output"][0, 0] == -torch.inf


class Gate:
    """What a module runs by: waits until let through, and counts its calls."""

    def __init__(self, made: Compiled) -> None:
        self.open, self.calls, self._run = threading.Event(), 0, made.run
        made.run_by(self)

    def __call__(self, inputs: Any) -> list[Any]:
        self.calls += 1
        assert self.open.wait(60)
        return [inputs[0] * 2]


@pytest.fixture
def gated() -> tuple[Compiled, Gate]:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    made = compiled(Twice(), (torch.ones(2, 3),), {"x": {0: Dim("rows", max=9)}})
    return made, Gate(made)


ONE = {"inputs": {"x": [[1.0, 2.0, 3.0]]}}


def until(what: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_full_queue_says_when_to_come_back(gated: tuple[Compiled, Gate]) -> None:
    made, gate = gated
    with running(made, Batching(0, "test"), queue=4, linger_s=0) as server, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(server.post, ONE) for _ in range(4)]
        until(lambda: server.service.in_flight == 4)
        refused = server.post(ONE)
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert "4 requests" in refused.json["error"]
        assert server.get("/health").status == 200
        gate.open.set()
        assert [task.result().status for task in waiting] == [200] * 4
        assert server.post(ONE).status == 200


def test_bytes_are_bounded_too(gated: tuple[Compiled, Gate]) -> None:
    made, gate = gated
    with running(made, Batching(0, "test"), max_held=60, linger_s=0) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, ONE)
        until(lambda: gate.calls == 1)
        refused = server.post(ONE)
        assert refused.status == 503 and "bytes" in refused.json["error"]
        gate.open.set()
        assert waiting.result().status == 200
        assert server.post(ONE).status == 200


def test_nothing_is_computed_for_clients_that_left(gated: tuple[Compiled, Gate]) -> None:
    made, gate = gated
    with running(made, Batching(0, "test"), linger_s=0) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, ONE)
        until(lambda: gate.calls == 1)
        body = json.dumps(ONE).encode()
        head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(head + body)
                until(lambda: server.service.in_flight == 2)
            until(lambda: server.service.in_flight == 1)
            assert not server.service.queue._waiting  # nor is anything kept of them
        gate.open.set()
        assert first.result().status == 200
        assert server.post(ONE).status == 200
        assert gate.calls == 2
        assert b"intarsia_gone_clients_total 5.0" in server.get("/metrics").body


def test_a_module_that_hangs_is_told(gated: tuple[Compiled, Gate]) -> None:
    made, gate = gated
    with running(made, Batching(0, "test"), answer_s=0.3, linger_s=0) as server:
        answer = server.post(ONE)
        assert answer.status == 504 and "0.3 s" in answer.json["error"]
        until(lambda: server.get("/health").json == {"status": "stuck"})
        gate.open.set()
        until(lambda: server.get("/health").status == 200)
        assert server.post(ONE).status == 200


def test_a_module_that_fails_is_500(gated: tuple[Compiled, Gate]) -> None:
    made, _ = gated

    def fails(inputs: Any) -> list[Any]:
        raise RuntimeError("the device is on fire\nand more")

    made.run_by(fails)
    with running(made, Batching(8), wait_ms=100, linger_s=0) as server, ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(server.post, [ONE] * 3))
        assert [answer.status for answer in answers] == [500] * 3
        assert answers[0].json["error"] == "the model failed: RuntimeError: the device is on fire"
        made.run_by(lambda inputs: [inputs[0] * 2])
        assert server.post(ONE).json == {"outputs": {"output": [[2.0, 4.0, 6.0]]}}


def test_slow_clients_are_hung_up_on(gated: tuple[Compiled, Gate]) -> None:
    made, gate = gated
    gate.open.set()
    with running(made, read_s=0.5, linger_s=0) as server:
        silent = socket.create_connection(("127.0.0.1", server.port))
        slow = socket.create_connection(("127.0.0.1", server.port))
        slow.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        drops = socket.create_connection(("127.0.0.1", server.port))
        drops.sendall(b"POST /pre")
        for client in (silent, slow, drops):
            client.settimeout(20)
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
        assert silent.recv(100) == b"" and drops.recv(100) == b""
        assert server.post(ONE).status == 200


def test_a_stopping_server_answers_what_it_has_and_refuses_in_words(gated: tuple[Compiled, Gate]) -> None:
    made, gate = gated
    with running(made, Batching(0, "test"), linger_s=2) as server, ThreadPoolExecutor(3) as pool:
        kept = server.connect()
        kept.request("GET", "/health")
        kept.getresponse().read()
        waiting = [pool.submit(server.post, ONE) for _ in range(3)]
        until(lambda: server.service.in_flight == 3)
        server.stop()
        refused = post(kept, ONE)
        assert refused.status == 503 and "stopping" in refused.json["error"]
        assert refused.headers["connection"] == "close" and refused.headers["retry-after"] == "1"
        assert server.get("/health").json == {"status": "stopping"}
        gate.open.set()
        assert [task.result().status for task in waiting] == [200] * 3
        until(lambda: _refused(server.port))


def _refused(port: int) -> bool:
    try:
        http.client.HTTPConnection("127.0.0.1", port, timeout=5).connect()
    except ConnectionRefusedError:
        return True
    return False
