"""The server's memory planner with our hooks: SGLang's own configurator and pool builders, on a CPU.

Plan, price and allocation are three computations; each test holds them against each other and against a figure
derived by hand.
"""

import inspect
import pkgutil
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo, resolve_layer_indices
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    resolve_spec_aux_hidden_state_config,
)
from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.test_utils import published_topology
from test_plan import DEEPSEEK, EAGLE3, GEMMA3, GIB, GPT_OSS, LLAMA, MIMO, QWEN3, QWEN35, head_nbytes, write_model

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import RECIPES
from sglang_quantkv.integration.planner import HOOKS, kv_shape, load_shape
from sglang_quantkv.integration.pool import QuantKVPool, pool_class
from sglang_quantkv.integration.selection import recipe_of
from sglang_quantkv.plan import plan_rows

PAGE = 64
# Without a quantization that SGLang's server refuses on a CPU; with few layers, for small pools.
GPT_OSS = {key: value for key, value in GPT_OSS.items() if key != "quantization_config"}
SMALL_GPT_OSS = GPT_OSS | {"num_hidden_layers": 4, "layer_types": GPT_OSS["layer_types"][:4]}
MODELS = {"llama": LLAMA, "qwen3": QWEN3, "qwen3.5": QWEN35, "gemma3": GEMMA3, "gpt-oss": SMALL_GPT_OSS, "mimo": MIMO}


@pytest.fixture
def write_config(tmp_path):
    return partial(write_model, tmp_path)


@pytest.fixture(autouse=True)
def hooks(monkeypatch):
    """Applies the planner's hooks as SGLang would, and lets the configurator build our pools."""
    for hook in HOOKS:
        owner, name = hook.target.rsplit(".", 1)
        owner = pkgutil.resolve_name(owner)
        monkeypatch.setattr(owner, name, _wrap_fn(getattr(owner, name), hook.fn, HookType(hook.kind)))

    resolve = KVCacheConfigurator._resolve_kv_pool_class

    def pool(self, *, kind, default):
        recipe = recipe_of(self)
        return pool_class(recipe) if recipe and kind == "mha" else resolve(self, kind=kind, default=default)

    monkeypatch.setattr(KVCacheConfigurator, "_resolve_kv_pool_class", pool)


@contextmanager
def configurator(directory, dtype: str, *, is_draft=False, layer_info=None, **server_args):
    """SGLang's configurator for a model directory, as its runner makes it, in a published process context."""
    # The context names a dummy model, which spares it SGLang's checks of what a machine can run.
    with published_topology(device="cpu", page_size=PAGE, kv_cache_dtype=dtype, **server_args) as args:
        model_config = ModelConfig.from_server_args(args, model_path=str(directory), is_draft_model=is_draft)
        algorithm = SpeculativeAlgorithm.from_string(args.speculative_algorithm)
        yield KVCacheConfigurator(
            device="cpu",
            gpu_id=0,
            attn_dp_size=1,
            pp_size=1,
            pp_group=None,
            model=None,
            model_config=model_config,
            server_args=args,
            kv_cache_dtype=torch.uint8 if dtype in RECIPES and not is_draft else torch.bfloat16,
            kv_cache_dtype_str="bfloat16" if is_draft else dtype,
            model_dtype=torch.bfloat16,
            page_size=PAGE,
            sliding_window_size=model_config.sliding_window_size if model_config.is_hybrid_swa else None,
            spec_algorithm=algorithm,
            is_draft_worker=is_draft,
            post_capture_kv_active=False,
            spec_aux_config=resolve_spec_aux_hidden_state_config(
                server_args=args, model_config=model_config, spec_algorithm=algorithm, is_draft_worker=is_draft
            ),
            is_hybrid_swa=model_config.is_hybrid_swa,
            is_hybrid_swa_compress=model_config.is_hybrid_swa_compress,
            use_mla_backend=False,
            layer_info=layer_info
            or resolve_layer_indices(model=None, model_config=model_config, is_draft_worker=is_draft),
            forward_stream=None,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            memory_pool_config=None,
        )


def cell_size(kvc) -> float:
    return create_memory_pool_configurator(kvc)._cell_size


def allocate(kvc, config):
    """The pool that SGLang's builders make for a pool config."""
    config.max_running_requests = 2
    requests = SimpleNamespace(mamba_pool=None, req_to_token=torch.zeros(2, 1))
    sizes = kvc._derive_pool_sizes(config=config)
    return kvc._build_token_to_kv_pool(sizes=sizes, is_dsa_model=False, is_dsv4_model=False, req_to_token_pool=requests)


def plain_pools(pool) -> list[MHATokenToKVPool]:
    """The pools inside a pool: full attention first, then the windowed layers'."""
    if isinstance(pool, SWAKVPool):
        return [pool.full_kv_pool, pool.swa_kv_pool]
    return [pool.full_kv_pool if isinstance(pool, HybridLinearKVPool) else pool]


def test_cards_name_what_they_hook():
    for hook in HOOKS:
        target = pkgutil.resolve_name(hook.target)
        assert "kvc" in inspect.signature(target).parameters
        assert len(hook.why) > 20 and len(hook.until) > 20


@pytest.mark.parametrize("dtype", ["bf16", *RECIPES])
@pytest.mark.parametrize("model", MODELS)
def test_plan_is_what_is_allocated(write_config, model, dtype):
    """Tokens as planned, and every byte of every tensor, the dummy page included. bf16 is all SGLang's own."""
    directory = write_config(MODELS[model])
    shape = load_shape(directory / "config.json")
    price = shape.price(RECIPES.get(dtype, 2), PAGE)
    budget = 400 * price.nbytes + 17
    (row,) = plan_rows(shape, kv_nbytes=budget, names=(dtype,))
    with configurator(directory, dtype) as kvc:
        config = kvc.config_from_budget(budget)
        assert config.max_total_num_tokens == row.tokens > 0
        pools = plain_pools(allocate(kvc, config))
    assert all(isinstance(pool, QuantKVPool) == (dtype in RECIPES) for pool in pools)
    assert pools[0].size == row.tokens
    for pool, nbytes in zip(pools, (price.full, price.sliding), strict=False):
        assert sum(map(int, pool.get_kv_size_bytes())) == nbytes * (pool.size + PAGE)
    assert len(pools) == 1 + shape.is_split
    assert sum(pool.layer_num for pool in pools) == sum(group.layers for group in shape.groups)


@pytest.mark.parametrize("recipe", RECIPES)
def test_price_of_a_token_by_hand(write_config, recipe):
    for config, heads in ((LLAMA, 32 * 8 * head_nbytes(recipe, 128)), (QWEN35, 16 * 4 * head_nbytes(recipe, 256))):
        with configurator(write_config(config), recipe) as kvc:
            assert cell_size(kvc) == heads
    half = 12 * 8 * head_nbytes(recipe, 64)
    with configurator(write_config(GPT_OSS), recipe) as kvc:
        assert cell_size(kvc) == half + 0.8 * half
    full, windowed = 2 * 4 * head_nbytes(recipe, 192, 128), 4 * 8 * head_nbytes(recipe, 192, 128)
    with configurator(write_config(MIMO), recipe, swa_full_tokens_ratio=0.5) as kvc:
        assert cell_size(kvc) == full + 0.5 * windowed


def test_ranks_and_stages_pay_for_what_they_hold(write_config):
    with configurator(write_config(LLAMA), "int8", tp_size=4) as kvc:
        assert cell_size(kvc) == 32 * 2 * 264
    # Of Qwen3.5's layers 16 to 39, those with index 19, 23, 27, 31, 35 and 39 have full attention.
    stage = ModelLayerInfo(start_layer=16, end_layer=40, num_effective_layers=24)
    with configurator(write_config(QWEN35), "int8", layer_info=stage) as kvc:
        assert cell_size(kvc) == 6 * 4 * 520


def test_windowed_pool_sized_by_requests(write_config):
    """Without a radix cache SGLang sizes the windowed pool by --max-running-requests and gives the rest to full."""
    options = {"disable_radix_cache": True, "max_running_requests": 4, "chunked_prefill_size": 512}
    budget = 64 * 2**20
    with configurator(write_config(SMALL_GPT_OSS), "int8", **options) as kvc:
        config = kvc.config_from_budget(budget)
        full, windowed = plain_pools(allocate(kvc, config))
    per_token = 2 * 8 * 136  # two layers each
    spent = per_token * (full.size + windowed.size)
    assert budget - PAGE * per_token < spent <= budget


def test_max_total_tokens_caps_and_the_memory_fraction_sets_the_budget(write_config, monkeypatch):
    """6 GiB free of 8 before loading: a fraction of 0.75 leaves 2 GiB alone, so 4 GiB are for the cache."""
    monkeypatch.setattr(kv_cache_configurator, "get_available_gpu_memory", lambda *args, **kwargs: 6.0)
    directory = write_config(LLAMA)
    fits = 4 * GIB // (32 * 8 * 264) // PAGE * PAGE
    for asked, tokens in ((None, fits), (5000, 5000 // PAGE * PAGE), (fits + 1000, fits)):
        with configurator(
            directory, "int8", mem_fraction_static=0.75, max_total_tokens=asked, cuda_graph_config=CudaGraphConfig()
        ) as kvc:
            get_parallel().override_permanently(world_group=SimpleNamespace(cpu_group=None))
            assert kvc._resolve_memory_pool_config(8.0).max_total_num_tokens == tokens


def speculation(draft, algorithm="EAGLE") -> dict:
    return {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft) if draft else None,
        "speculative_draft_kv_cache_dtype": "bf16",  # what our dtype hook makes of "not given"
    }


@pytest.mark.parametrize(("algorithm", "config"), [("EAGLE3", EAGLE3), ("STANDALONE", QWEN3)])
def test_a_draft_is_priced_as_its_bf16_pool(write_config, monkeypatch, algorithm, config):
    # SGLang's pools warm up a Triton kernel beside a draft, which a CPU does not have.
    monkeypatch.setattr(MHATokenToKVPool, "_init_kv_copy_and_warmup", lambda self: None)
    target, draft = write_config(LLAMA), write_config(config, "draft")
    options = speculation(draft, algorithm)
    draft_nbytes = config["num_hidden_layers"] * 8 * 256 * 2
    with configurator(target, "mxfp4", **options) as kvc:
        assert cell_size(kvc) == 32 * 8 * 136 + draft_nbytes
        planned = plan_rows(load_shape(target / "config.json"), load_shape(draft / "config.json", is_draft=True))
        assert cell_size(kvc) == {row.recipe: row.bytes_per_token for row in planned}["mxfp4"]
        budget = 700 * int(cell_size(kvc))
        config = kvc.config_from_budget(budget)
        used = sum(map(int, allocate(kvc, config).get_kv_size_bytes()))
    with configurator(draft, "mxfp4", is_draft=True, **options) as kvc:
        used += sum(map(int, allocate(kvc, config).get_kv_size_bytes()))
    assert used == (32 * 8 * 136 + draft_nbytes) * (640 + PAGE)


def test_an_mtp_layer_inside_the_target_is_priced(write_config, monkeypatch):
    """SGLang prices a draft without a path of its own by the target's config, which does not say its layers."""
    directory, read = write_config(QWEN35), ModelConfig.from_server_args

    def read_target(args, model_path=None, **kwargs):
        return read(args, model_path=model_path or str(directory), **kwargs)

    monkeypatch.setattr(ModelConfig, "from_server_args", staticmethod(read_target))
    with configurator(directory, "int8", **speculation(None)) as kvc:
        assert cell_size(kvc) == 33_280 + 4 * 512 * 2


def test_a_draft_beside_a_windowed_pool(write_config):
    """A draft without windowed layers costs each token in full; one with them has its own two pools."""
    target = write_config(GPT_OSS)
    half = 12 * 8 * 136
    with configurator(target, "int8", **speculation(write_config(EAGLE3, "eagle"), "EAGLE3")) as kvc:
        assert cell_size(kvc) == half + 0.8 * half + 8 * 256 * 2
    options = speculation(write_config(SMALL_GPT_OSS, "small"), "STANDALONE")
    with configurator(target, "int8", **options) as kvc:
        two_layers = 2 * 8 * 128 * 2
        assert cell_size(kvc) == pytest.approx(half + two_layers + 0.8 * (half + two_layers), rel=1e-12)


def test_sglang_dtypes_keep_their_price(write_config):
    with configurator(write_config(LLAMA), "bf16", **speculation(write_config(EAGLE3, "draft"), "EAGLE3")) as kvc:
        assert cell_size(kvc) == 33 * 8 * 256 * 2


def test_other_kinds_of_attention_are_refused_by_name(write_config):
    refused = pytest.raises(UnsupportedConfig, match="DeepseekV3ForCausalLM has MLA attention")
    with configurator(write_config(DEEPSEEK), "int8") as kvc, refused:
        kv_shape(kvc.model_config, kvc.layer_info, 1)
