"""`export huggingface` with an upload, and `--checkpoint hf://NAME`, with a hub that the test serves."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file

from megatron_coca import load_model
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.commands.evaluate import main as evaluate
from megatron_coca.commands.export import main
from megatron_coca.commands.generate import main as generate
from tests.parity.exported import LLAMA, random_checkpoint


class Hub(ThreadingHTTPServer):
    """Answers the requests of an upload, keeps committed files and returns them; with `status`, this error."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.made: list[dict[str, object]] = []
        self.files: dict[str, bytes] = {}
        self.given: list[str] = []
        self.status = 200


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        place, hub = self.path, self.server
        answer: object = {}
        if place == "/api/repos/create":
            hub.made.append(json.loads(body))
            answer = {"url": f"http://127.0.0.1:{hub.server_port}/me/{hub.made[-1]['name']}"}
        elif "/preupload/" in place:
            asked = json.loads(body)["files"]
            kinds = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            answer = {"files": kinds}
        elif "/commit/" in place:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://127.0.0.1:{hub.server_port}/me/model/commit/1"
            answer = {"commitUrl": url, "commitOid": "1", "commitId": "1", "hookOutput": ""}
        self._send(answer)

    def do_GET(self) -> None:
        place, hub = self.path.partition("?")[0], self.server
        if "/tree/" in place:
            sums = {name: hashlib.sha1(content).hexdigest() for name, content in hub.files.items()}
            self._send([{"type": "file", "path": name, "size": 1, "oid": sums[name]} for name in hub.files])
        elif "/resolve/" in place:
            name = place.split("/resolve/0/")[1]
            hub.given += [name] if self.command == "GET" else []
            self._send_content(
                hub.files[name], **{"X-Repo-Commit": "0", "ETag": hashlib.sha1(name.encode()).hexdigest()}
            )
        else:
            repository = {"sha": "0", "id": "me/model", "modelId": "me/model", "private": True}
            self._send(repository | {"siblings": [], "tags": []})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send(self, answer: object) -> None:
        self._send_content(json.dumps(answer).encode(), **{"Content-Type": "application/json"})

    def _send_content(self, content: bytes, **headers: str) -> None:
        self.send_response(self.server.status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
    monkeypatch.setenv("HF_ENDPOINT", url)
    yield server
    server.shutdown()
    server.server_close()


def test_an_export_is_uploaded_whole_with_its_card(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = random_checkpoint(
        tmp_path / "run", **LLAMA, pos_emb="coca", rope_scaling={"rope_type": "yarn", "factor": 4}
    )
    results = tmp_path / "report.md"
    results.write_text("| window | perplexity |\n|---|---|\n| 64 | 12.5 |\n")
    notes = ["--licence", "apache-2.0", "--base-model", "me/base: one", "--results", str(results)]
    folder = tmp_path / "exported"
    assert main(["huggingface", str(checkpoint), str(folder), *notes, "--push", "me/model"]) == 0
    assert {name: (folder / name).read_bytes() for name in hub.files} == hub.files
    assert hub.files.keys() == {path.name for path in folder.iterdir()}
    private = (
        hub.made[0].get("private") or hub.made[0].get("visibility") == "private"
    )  # before huggingface_hub 2, and since
    assert private and "me/model" in capsys.readouterr().out
    _, head, text = hub.files["README.md"].decode().split("---\n", 2)
    facts = yaml.safe_load(head)
    assert (facts["license"], facts["base_model"]) == ("apache-2.0", "me/base: one")
    assert "## Results\n\n| window | perplexity |\n|---|---|\n| 64 | 12.5 |\n\n## Loading" in text
    (sources,) = [line for line in text.splitlines() if line.startswith("| method sources |")]
    assert sources.startswith("| method sources | CoCA, Zhu et al. 2024, ")
    assert sources.endswith(" paper trains; Peng et al. 2023 |")


def test_a_model_of_the_hub_without_safetensors(hub: Hub, tmp_path: Path) -> None:
    checkpoint, folder = random_checkpoint(tmp_path / "run", **LLAMA), tmp_path / "exported"
    assert main(["huggingface", str(checkpoint), str(folder), "--push", "me/model"]) == 0
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    hub.files["pytorch_model.bin"] = (tmp_path / "pytorch_model.bin").read_bytes()
    del hub.files["model.safetensors"]
    found, expected = load_model("hf://me/model").state_dict(), load_model(checkpoint).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_model_of_the_hub_is_downloaded_once_and_evaluated(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the family is read from, without copies in other formats; from the cache if the hub does not answer."""
    checkpoint, folder = random_checkpoint(tmp_path / "run", **LLAMA, pos_emb="coca"), tmp_path / "exported"
    assert main(["huggingface", str(checkpoint), str(folder), "--push", "me/model"]) == 0
    needed = {name for name in hub.files if name.endswith((".json", ".safetensors", ".jinja"))}
    hub.files |= {"consolidated.safetensors": b"the same weights", "onnx/config.json": b"{}", "model.onnx": b""}
    (tmp_path / "text.txt").write_text("a small boat lay near its shore until morning came over the hills. " * 3)
    command = ["perplexity", "--checkpoint", "hf://me/model", "--data", str(tmp_path / "text.txt"), "--windows", "32"]
    command += ["--stride", "16", "--device", "cpu", "--output"]
    assert evaluate([*command, str(tmp_path / "first")]) == 0
    assert sorted(hub.given) == sorted(needed)
    assert generate(["--checkpoint", "hf://me/model", "--prompt", "a small", "--max-new-tokens", "2"]) == 0
    hub.status = 503
    assert evaluate([*command, str(tmp_path / "second")]) == 0 and sorted(hub.given) == sorted(needed)
    for hub.status in (503, 0):  # 0 is no answer by HTTP
        capsys.readouterr()
        assert evaluate([*command, str(tmp_path / "third"), "--checkpoint", "hf://no/such"]) == 2
        assert "hf://no/such: cannot be downloaded" in capsys.readouterr().err


def test_a_failed_upload_keeps_the_folder(hub: Hub, tmp_path: Path) -> None:
    checkpoint, folder = random_checkpoint(tmp_path / "run", **LLAMA), tmp_path / "exported"
    hub.status = 401
    with pytest.raises(CheckpointError, match=r"--push me/model: (?s:.*)hf auth login.*hf upload me/model"):
        main(["huggingface", str(checkpoint), str(folder), "--push", "me/model"])
    assert (folder / "README.md").is_file() and not hub.files


def test_results_that_are_not_there(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **LLAMA)
    with pytest.raises(CheckpointError, match=r"--results .*none.md: cannot be read"):
        main(["huggingface", str(checkpoint), str(tmp_path / "out"), "--results", str(tmp_path / "none.md")])
    assert not (tmp_path / "out").exists()
