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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai

START_TIMEOUT = 400


class Server:
    """``python -m sglang_quantkv.launch_server`` in its own process group. Constructing it starts it; it answers
    after ``wait``. Flags of the form ``NAME=value`` go to its environment."""

    def __init__(self, model: Path, flags: tuple[str, ...], log: Path):
        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        variables = [flag for flag in flags if flag[0] != "-" and flag.split("=")[0].isupper()]
        command = [sys.executable, "-m", "sglang_quantkv.launch_server", "--port", self.url.rsplit(":", 1)[1]]
        command += [flag for flag in flags if flag not in variables]
        if "--demo" not in flags:
            command += ["--model-path", str(model), "--served-model-name", "demo"]
        # Admit requests as if they wanted one token: only so does a pool overflow and requests are retracted.
        environment = os.environ | {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"}
        environment |= dict(variable.split("=") for variable in variables)
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none")

    def wait(self) -> Server:
        """Until it answers; itself."""
        deadline = time.monotonic() + START_TIMEOUT
        while "The server is fired up" not in self.log.read_text():
            status = self.process.poll()
            if status is not None or time.monotonic() > deadline:
                self.stop()
                reason = f"exited with {status}" if status is not None else f"was not ready in {START_TIMEOUT} s"
                raise RuntimeError(f"the server {reason}:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)
        return self

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return json.load(response)

    def post(self, path: str, body: dict) -> dict:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)

    def flush_cache(self) -> None:
        urllib.request.urlopen(urllib.request.Request(self.url + "/flush_cache", method="POST"), timeout=60).close()

    def generate(self, input_ids: list[int], tokens: int, *, ignore_eos: bool = True) -> dict:
        """Up to ``tokens`` greedy tokens from token ids; the answer has ``output_ids`` and ``meta_info``."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": ignore_eos}
        return self.post("/generate", {"input_ids": input_ids, "sampling_params": sampling})

    def generate_together(self, prompts: list[list[int]], tokens: int, **kwargs) -> list[dict]:
        """All prompts at once, one connection each."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self.generate(ids, tokens, **kwargs), prompts))

    def quantkv(self) -> dict:
        """The ``quantkv`` object of ``/server_info``."""
        return self.get("/server_info")["quantkv"]


class Servers:
    """Servers of one model, shared by all tests that ask for the same flags."""

    def __init__(self, model: Path, logs: Path):
        self.model, self.logs = model, logs
        self.running: dict[tuple[str, ...], Server] = {}

    def start(self, flags: tuple[str, ...]) -> Server:
        """Starts one in the background unless it runs: a start takes a minute that other tests can use."""
        if flags not in self.running:
            self.running[flags] = Server(self.model, flags, self.logs / f"{len(self.running)}.log")
        return self.running[flags]

    def __call__(self, flags: tuple[str, ...]) -> Server:
        """One that answers."""
        return self.start(flags).wait()

    def stop(self) -> None:
        for server in self.running.values():
            server.stop()
