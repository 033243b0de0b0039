"""A real server process, and what tests ask of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai

START_TIMEOUT = 300


class Server:
    """``python -m sglang_quantkv.launch_server`` in its own process group, answering when constructed."""

    def __init__(self, model: Path, flags: tuple[str, ...], log: Path):
        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        command = [sys.executable, "-m", "sglang_quantkv.launch_server", "--model-path", str(model)]
        command += ["--served-model-name", "demo", "--port", self.url.rsplit(":", 1)[1], *flags]
        self.process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none")
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server exited with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
            if "The server is fired up" in self.log.read_text():
                return
            time.sleep(0.5)
        self.stop()
        raise TimeoutError(f"the server was not ready in {START_TIMEOUT} s:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return json.load(response)

    def post(self, path: str, body: dict, timeout: float = 600) -> dict:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)

    def flush_cache(self) -> None:
        urllib.request.urlopen(urllib.request.Request(self.url + "/flush_cache", method="POST"), timeout=60).close()

    def generate(self, input_ids: list[int], tokens: int, *, ignore_eos: bool = True) -> dict:
        """Greedy tokens from token ids; the answer has ``output_ids`` and ``meta_info``."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": ignore_eos}
        return self.post("/generate", {"input_ids": input_ids, "sampling_params": sampling})

    def quantkv(self) -> dict:
        return self.get("/server_info")["quantkv"]
