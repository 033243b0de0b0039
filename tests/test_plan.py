"""The plan: shapes as SGLang reads them, bytes and tokens derived by hand, and the command."""

import json
import socket
import subprocess
import sys
import time
from functools import partial

import pytest

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import RECIPES
from sglang_quantkv.plan import KVShape, LayerGroup, Price, find_config, main, plan_rows, tokens_that_fit

GIB = 2**30
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
# head_dim is not hidden_size / heads (80) here.
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "max_position_embeddings": 40960,
}
PHI_LIKE = LLAMA | {"hidden_size": 2560, "num_key_value_heads": 32}  # head_dim 80
QWEN35 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "head_dim": 64,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
# Has windowed layers, but SGLang keeps every token of all of them in one pool.
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "head_dim": 256,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2,
    "max_position_embeddings": 32768,
}
# Windowed layers with twice the heads; values narrower than keys.
MIMO = LLAMA | {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "head_dim": 192,
    "v_head_dim": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 32,
}
EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}


def write_model(parent, config: dict, name: str | None = None):
    """Makes a model directory that holds only a config. SGLang remembers configs by path: one path per model."""
    directory = parent / (name or config["architectures"][0])
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def write_config(tmp_path, monkeypatch):
    """``write_model``; and nothing may reach for the network afterwards."""

    def refuse(*args):
        raise AssertionError(f"reached for the network: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return partial(write_model, tmp_path)


def head_nbytes(recipe: str, d: int, dv: int | None = None) -> int:
    """Bytes of one token, one KV head, K and V; from the formats' words, for shapes without padding."""
    k = {"int8": d + 4, "mxfp4": d // 2 + d // 32, "fp4_g32": d // 2 + d // 32 * 4, "k8v4": d + 4}[recipe]
    d = dv or d
    v = {"int8": d + 4, "mxfp4": d // 2 + d // 32, "fp4_g32": d // 2 + d // 32 * 4, "k8v4": d // 2 + d // 32}[recipe]
    return k + v


def run(capsys, *argv) -> dict:
    """The JSON document that the command prints."""
    assert main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def bytes_by_recipe(document: dict) -> dict:
    return {row["recipe"]: row["bytes_per_token"] for row in document["recipes"]}


def test_qwen35_27b_counts_only_its_full_attention_layers(write_config, capsys):
    document = run(capsys, "--model-path", write_config(QWEN35))
    assert bytes_by_recipe(document) == {
        "bf16": 65_536,  # 16 layers x 4 heads x (256 + 256) x 2
        "fp8": 32_768,
        "int8": 33_280,  # 16 x 4 x (260 + 260)
        "mxfp4": 17_408,  # 16 x 4 x (136 + 136)
        "fp4_g32": 20_480,  # 16 x 4 x (160 + 160)
        "k8v4": 25_344,  # 16 x 4 x (260 + 136)
    }
    assert document["model"]["model_layers"] == 64
    assert [group["layers"] for group in document["model"]["groups"]] == [16]


@pytest.mark.parametrize(
    ("config", "layers", "heads", "dim"),
    [(LLAMA, 32, 8, 128), (QWEN3, 36, 8, 128), (GEMMA3, 26, 1, 256)],
    ids=["llama", "qwen3", "gemma3"],
)
def test_models_with_one_pool(write_config, capsys, config, layers, heads, dim):
    document = run(capsys, "--model-path", write_config(config), "--kv-gib", 10)
    expected = {name: layers * heads * head_nbytes(name, dim) for name in RECIPES}
    expected |= {"bf16": layers * heads * 2 * dim * 2, "fp8": layers * heads * 2 * dim}
    assert bytes_by_recipe(document) == expected
    for row in document["recipes"]:
        nbytes = expected[row["recipe"]]
        assert row["tokens"] == 10 * GIB // nbytes // 64 * 64
        assert row["ratio_to_bf16"] == pytest.approx(expected["bf16"] / nbytes, abs=1e-4)


def test_a_sliding_window_pool_takes_its_share(write_config, capsys):
    """gpt-oss: 12 full and 12 windowed layers; the windowed pool holds 0.8 tokens per token."""
    path = write_config(GPT_OSS)
    document = run(capsys, "--model-path", path, "--kv-gib", 10)
    half = 12 * 8 * head_nbytes("int8", 64)
    assert half == 12 * 8 * 136
    int8 = next(row for row in document["recipes"] if row["recipe"] == "int8")
    assert int8["bytes_per_token"] == 2 * half
    assert int8["tokens"] == int(10 * GIB / (1.8 * half)) // 64 * 64
    assert [group["window"] for group in document["model"]["groups"]] == [None, 128]
    document = run(capsys, "--model-path", path, "--kv-gib", 10, "--swa-full-tokens-ratio", 0.1)
    int8 = next(row for row in document["recipes"] if row["recipe"] == "int8")
    assert int8["tokens"] == int(10 * GIB / (1.1 * half)) // 64 * 64


def test_windowed_layers_have_their_own_heads(write_config, capsys):
    figures = bytes_by_recipe(run(capsys, "--model-path", write_config(MIMO)))
    assert figures["bf16"] == (2 * 4 + 4 * 8) * (192 + 128) * 2
    assert figures["int8"] == (2 * 4 + 4 * 8) * head_nbytes("int8", 192, 128)
    assert figures["k8v4"] == (2 * 4 + 4 * 8) * (196 + 68)


def test_tensor_parallel_ranks_share_heads_and_keep_at_least_one(write_config, capsys):
    path = write_config(LLAMA)
    for tp_size, heads in ((4, 2), (16, 1)):
        figures = bytes_by_recipe(run(capsys, "--model-path", path, "--tp-size", tp_size))
        assert figures["int8"] == 32 * heads * (132 + 132)


def test_padded_head_blocks_cost_what_they_take(write_config, capsys):
    """D = 64 in pages of 32: a 32 x 34-byte mxfp4 block, 1088 bytes, takes 1152."""
    figures = bytes_by_recipe(run(capsys, "--model-path", write_config(GPT_OSS), "--page-size", 32))
    assert figures["mxfp4"] == 24 * 8 * 2 * (1152 // 32)


def test_a_draft_adds_its_own_bf16_cache(write_config, capsys):
    document = run(
        capsys,
        *("--model-path", write_config(LLAMA), "--draft-model-path", write_config(EAGLE3, "draft"), "--kv-gib", 1),
    )
    figures = bytes_by_recipe(document)
    draft = 8 * (128 + 128) * 2
    assert figures["int8"] == 32 * 8 * 264 + draft
    assert figures["mxfp4"] == 32 * 8 * 136 + draft
    assert figures["bf16"] == 33 * draft
    assert figures["fp8"] == 33 * draft // 2  # beside fp8, SGLang gives the draft fp8 too
    int8 = next(row for row in document["recipes"] if row["recipe"] == "int8")
    assert int8["tokens"] == GIB // (32 * 8 * 264 + draft) // 64 * 64


def test_a_model_is_its_own_draft_when_it_has_an_mtp_layer(write_config, capsys):
    path = write_config(QWEN35)
    document = run(capsys, "--model-path", path, "--draft-model-path", path / "config.json")
    assert document["draft"]["model_layers"] == 1
    assert bytes_by_recipe(document)["int8"] == 33_280 + 4 * 512 * 2


def test_a_recipe_without_records_for_the_head_dim_is_a_row_with_its_reason(write_config, capsys):
    path = write_config(PHI_LIKE)
    document = run(capsys, "--model-path", path, "--kv-gib", 1)
    rows = {row["recipe"]: row for row in document["recipes"]}
    assert rows["bf16"]["bytes_per_token"] == 32 * 32 * 160 * 2
    assert rows["bf16"]["tokens"] == GIB // (32 * 32 * 160 * 2) // 64 * 64
    for name in RECIPES:
        assert rows[name]["bytes_per_token"] is rows[name]["tokens"] is rows[name]["ratio_to_bf16"] is None
        assert "head_dim 80" in rows[name]["refused"]
    assert main(["--model-path", str(path)]) == 0
    assert "int8 is refused: head_dim 80" in capsys.readouterr().out


def test_json_has_the_promised_rows_and_keys(write_config, capsys):
    document = run(capsys, "--model-path", write_config(QWEN35))
    assert [row["recipe"] for row in document["recipes"]] == ["bf16", "fp8", "int8", "mxfp4", "fp4_g32", "k8v4"]
    for row in document["recipes"]:
        assert row.keys() >= {"recipe", "bytes_per_token", "ratio_to_bf16", "tokens"}
        assert row["tokens"] is None  # no memory was given
    assert document["page_size"] == 64
    assert document["kv_gib"] is None


def test_the_table_shows_the_same_figures(write_config, capsys):
    path = write_config(QWEN35)
    assert main(["--model-path", str(path), "--kv-cache-dtype", "quantkv_int8", "--kv-gib", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["bf16", "65,536", "1.00x", f"{GIB * 10 // 65_536 // 64 * 64:,}", "0.6"]
    assert lines[-1].split() == ["int8", "33,280", "1.97x", f"{GIB * 10 // 33_280 // 64 * 64:,}", "1.2"]
    assert any("48 cache no tokens" in line for line in lines)


def test_a_config_may_have_any_file_name(write_config, capsys):
    path = write_config(LLAMA) / "config.json"
    other = path.rename(path.with_name("llama.json"))
    assert bytes_by_recipe(run(capsys, "--model-path", other))["bf16"] == 131_072


@pytest.mark.parametrize("config", [DEEPSEEK, LLAMA | {"architectures": ["NoModel"], "model_type": "no_model"}])
def test_what_sglang_reads_but_we_cannot_plan_is_refused_by_name(write_config, capsys, config):
    assert main(["--model-path", str(write_config(config))]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "sglang_quantkv: " in output.err
    assert ("DeepseekV3ForCausalLM has MLA attention" if config is DEEPSEEK else "no_model") in output.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model-path", "{tmp}/none"], "--model-path {tmp}/none does not exist"),
        (["--model-path", "{tmp}"], "--model-path {tmp}/config.json does not exist"),
        (["--model-path", "{tmp}/notes.txt"], "notes.txt names no model architecture"),
        (["--model-path", "{tmp}/list.json"], "list.json names no model architecture"),
        (["--model-path", "{tmp}/other.json"], "other.json names no model architecture"),
        (["--model-path", "{tmp}/ok.json", "--draft-model-path", "{tmp}/d"], "--draft-model-path {tmp}/d does not"),
        (["--model-path", "{tmp}/ok.json", "--kv-cache-dtype", "int3"], "--kv-cache-dtype int3 is unknown"),
        (["--model-path", "{tmp}/ok.json", "--page-size", "16"], "--page-size 16 has no record layout"),
        (["--model-path", "{tmp}/ok.json", "--kv-gib", "0"], "--kv-gib 0.0 makes no sense"),
        (["--model-path", "{tmp}/ok.json", "--tp-size", "0"], "--tp-size 0 makes no sense"),
    ],
)
def test_user_errors_are_one_line_and_status_2(tmp_path, capsys, argv, said):
    (tmp_path / "notes.txt").write_text("not json")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"name": "something else"}')
    (tmp_path / "ok.json").write_text(json.dumps(LLAMA))
    assert main([word.format(tmp=tmp_path) for word in argv]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("sglang_quantkv: ")
    assert said.format(tmp=tmp_path) in output.err
    assert output.err.count("\n") == 1


def test_help_is_fast_and_needs_no_torch():
    blocked = "import sys, runpy; sys.modules.update(torch=None, sglang=None, transformers=None); "
    start = time.monotonic()
    command = [sys.executable, "-c", blocked + "runpy.run_module('sglang_quantkv.plan', run_name='__main__')", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - start < 2
    flags = ("model-path", "draft-model-path", "kv-cache-dtype", "kv-gib", "page-size", "tp-size", "json")
    assert all(f"--{flag}" in result.stdout for flag in flags)


def test_a_windowed_pool_too_small_for_one_request_fits_nothing():
    """Window 128 and pages of 64: the windowed pool needs more than 192 slots, so 256; at 0.8, 320 tokens."""
    shape = KVShape("Any", 2, 1024, (LayerGroup(1, 1, 64, 64), LayerGroup(1, 1, 64, 64, window=128)))
    price = Price(full=100, sliding=100)
    assert tokens_that_fit(320 * 180, shape, price, 64, 0.8) == 320
    assert tokens_that_fit(320 * 180 - 1, shape, price, 64, 0.8) == 0


def test_layers_that_are_all_windowed_have_one_pool():
    shape = KVShape("Any", 2, 1024, (LayerGroup(0, 1, 64, 64), LayerGroup(2, 1, 64, 64, window=128)))
    (int8,) = plan_rows(shape, names=("int8",), kv_nbytes=1000 * 2 * 136)
    assert (int8.bytes_per_token, int8.tokens) == (2 * 136, 960)


def test_a_hub_name_stands_for_its_cached_config(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--some--model", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    config = repository / "snapshots" / commit / "config.json"
    config.write_text(json.dumps(LLAMA))
    assert find_config("some/model", "--model-path") == config


def test_find_config_raises_for_callers():
    with pytest.raises(UnsupportedConfig, match="--model-path no/such-model does not exist"):
        find_config("no/such-model", "--model-path")
