"""`export huggingface` with a model card's notes and an upload, against a hub that is a server of this test."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.commands.export import main
from tests.parity.exported import LLAMA, random_checkpoint


class Hub(ThreadingHTTPServer):
    """Answers what an upload of small files asks, and keeps what is committed; with `status` it refuses."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.made: list[dict[str, object]] = []
        self.files: dict[str, bytes] = {}
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
        self._send({"sha": "0", "id": "me/model", "modelId": "me/model", "private": True, "siblings": [], "tags": []})

    def _send(self, answer: object) -> None:
        content = json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
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
    (sources,) = [line for line in text.splitlines() if line.startswith("| methods of |")]
    assert sources == "| methods of | CoCA, Zhu et al. 2024, the form the paper trains; Peng et al. 2023 |"


def test_an_upload_that_is_refused_keeps_the_folder(hub: Hub, tmp_path: Path) -> None:
    checkpoint, folder = random_checkpoint(tmp_path / "run", **LLAMA), tmp_path / "exported"
    hub.status = 401
    with pytest.raises(CheckpointError, match=r"--push me/model: .*(?s:.)*hf auth login.*hf upload me/model"):
        main(["huggingface", str(checkpoint), str(folder), "--push", "me/model"])
    assert (folder / "README.md").is_file() and not hub.files


def test_results_that_are_not_there(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **LLAMA)
    with pytest.raises(CheckpointError, match=r"--results .*none.md: cannot be read"):
        main(["huggingface", str(checkpoint), str(tmp_path / "out"), "--results", str(tmp_path / "none.md")])
    assert not (tmp_path / "out").exists()
