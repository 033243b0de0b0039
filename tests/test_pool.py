"""The pool against a shadow dictionary, on memory filled with poison; and SGLang's whole pool interface."""

from __future__ import annotations

import random

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVCache, KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_quantkv import reference
from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import RECIPES, Operand
from sglang_quantkv.integration.pool import QuantKVPool, pool_class, sub_pools

HEADS, DIM, LAYERS, POISON = 3, 64, 2, 0xFF


def make_pool(recipe, *, size=512, page_size=32, head_dim=DIM, poison=True, **kwargs) -> QuantKVPool:
    pool = pool_class(recipe)(
        size,
        page_size=page_size,
        dtype=torch.uint8,
        head_num=HEADS,
        head_dim=head_dim,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        **kwargs,
    )
    if poison:
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.fill_(POISON)
    return pool


class Layer:
    def __init__(self, layer_id: int):
        self.layer_id = layer_id


@pytest.fixture(params=RECIPES.values(), ids=RECIPES)
def recipe(request):
    return request.param


# Methods that are right as inherited: they hand out buffers, count their bytes, or describe whole pages by
# the descriptors that the overridden shapes make; or they belong to SGLang's own quantized pools and raise.
INHERITED = {
    "finalize_backing",  # post-capture sizing, refused at construction
    "get_contiguous_buf_infos",
    "get_device_pool_infos",
    "get_dequant_workspace",
    "get_flashinfer_decode_dequant_workspace_kv_buffer",
    "get_flashinfer_dequant_workspace_kv_buffer",
    "get_key_buffer",
    "get_kv_buffer",
    "get_kv_buffer_shape",
    "get_kv_cache_quant_method",
    "get_kv_size_bytes",
    "get_raw_kv_buffer",
    "get_v_head_dim",
    "get_value_buffer",
    "host_pool_decls",
    "is_quantized_kv_cache",  # of SGLang's own quantized caches
    "maybe_get_custom_mem_pool",
    "post_capture_backed_bytes",  # post-capture sizing
    "register_layer_transfer_counter",
}


def test_every_public_method_of_the_base_pool_is_decided_on():
    public = {
        name
        for cls in (MHATokenToKVPool, KVCache)
        for name, value in vars(cls).items()
        if (callable(value) or isinstance(value, (property, classmethod, staticmethod))) and not name.startswith("_")
    }
    overridden = {name for name in vars(QuantKVPool) if name in public}
    assert public - overridden == INHERITED
    assert not overridden & INHERITED


def test_methods_of_other_quantized_pools_raise(recipe):
    pool = make_pool(recipe)
    with pytest.raises(RuntimeError, match="non-FP4"):
        pool.get_raw_kv_buffer(0)
    with pytest.raises(RuntimeError, match="without FP4"):
        pool.get_dequant_workspace()


class Shadow:
    """What every slot of every layer must hold: the rows last written there."""

    def __init__(self, pool: QuantKVPool):
        self.pool = pool
        self.rows: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def set(self, slots: list[int], layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        k_rows = reference.encode(k, self.pool.recipe.k)
        v_rows = reference.encode(v, self.pool.recipe.v)
        for i, slot in enumerate(slots):
            self.rows.setdefault(slot, [None] * LAYERS)[layer] = (k_rows[i], v_rows[i])

    def check(self) -> None:
        """Every live row is byte-exact, and every byte that no live row owns is still poison."""
        for layer in range(LAYERS):
            buffers = zip((self.pool.k_buffer, self.pool.v_buffer), (self.pool.k_block, self.pool.v_block))
            for which, (buffer, block) in enumerate(buffers):
                expected = torch.full_like(buffer[layer], POISON)
                for slot, rows in self.rows.items():
                    page, offsets = slot // block.page_size, block.row_offsets(slot % block.page_size)
                    expected[page][:, offsets] = rows[layer][which]
                assert torch.equal(buffer[layer], expected)


def slot_buffers(pool, layer: int):
    cache = pool.paged_cache(layer)
    return (cache.k_records, cache.k_block), (cache.v_records, cache.v_block)


def test_a_long_random_life_leaves_no_stale_or_foreign_byte(recipe):
    """Allocate, write, overwrite, evict, reuse, move, offload and restore, in random order."""
    rng = random.Random(recipe.name)
    generator = torch.Generator().manual_seed(7)
    pool = make_pool(recipe)
    shadow = Shadow(pool)
    free = set(range(pool.page_size, pool.size + pool.page_size))
    requests: list[list[int]] = []

    def write(slots: list[int]) -> None:
        for layer in range(LAYERS):
            scale = 10.0 ** rng.uniform(-6, 6)
            k, v = (torch.randn(len(slots), HEADS, DIM, generator=generator).bfloat16() * scale for _ in range(2))
            pool.set_kv_buffer(Layer(layer), torch.tensor(slots), k, v)
            shadow.set(slots, layer, k, v)

    def evict(request: list[int]) -> None:
        """What the next owner of a slot finds: poison again, so that a write which misses bytes shows."""
        for slot in request:
            del shadow.rows[slot]
            for layer in range(LAYERS):
                for buffer, block in slot_buffers(pool, layer):
                    buffer[slot // pool.page_size][:, block.row_offsets(slot % pool.page_size)] = POISON
        free.update(request)

    for step in range(400):
        action = rng.choice(("allocate", "allocate", "overwrite", "commit", "evict", "move", "offload"))
        if action == "allocate" and len(free) >= 70:
            slots = rng.sample(sorted(free), rng.randint(1, 70))
            free.difference_update(slots)
            write(slots)
            requests.append(slots)
        elif action == "overwrite" and requests:
            request = rng.choice(requests)
            write(rng.sample(request, rng.randint(1, len(request))))
        elif action == "commit" and requests:
            # A verified draft: of each row of slots only the first few are written.
            request = rng.choice(requests)
            loc = torch.tensor(rng.sample(request, len(request) // 3 * 3)).view(-1, 3)
            lens = [rng.randint(0, 3) for _ in loc]
            k, v = (torch.randn(loc.numel(), HEADS, DIM, generator=generator) for _ in range(2))
            for layer in range(LAYERS):
                pool.set_kv_buffer_prefix_valid(Layer(layer), loc, torch.tensor(lens), k, v)
                for buffer, block in slot_buffers(pool, layer):
                    buffer[0][:, block.row_offsets(0)] = POISON  # the dummy slot, where the others went
                kept = [3 * row + n for row, count in enumerate(lens) for n in range(count)]
                shadow.set(loc.flatten()[kept].tolist(), layer, k[kept], v[kept])
        elif action == "evict" and requests:
            evict(requests.pop(rng.randrange(len(requests))))
        elif action == "move" and len(shadow.rows) > 8:
            sources = rng.sample(sorted(shadow.rows), rng.randint(1, 8))
            targets = rng.sample(sorted(shadow.rows), len(sources))  # may overlap the sources
            pool.move_kv_cache(torch.tensor(targets), torch.tensor(sources))
            moved = {t: list(shadow.rows[s]) for t, s in zip(targets, sources)}
            shadow.rows.update(moved)
        elif action == "offload" and requests:
            index = rng.randrange(len(requests))
            request = requests[index]
            pool.cpu_offloading_chunk_size = rng.choice((1, 7, 8192))
            host = pool.get_cpu_copy(torch.tensor(request))
            rows = [shadow.rows[slot] for slot in request]
            evict(request)
            target = rng.sample(sorted(free), len(request))
            free.difference_update(target)
            pool.load_cpu_copy(host, torch.tensor(target))
            shadow.rows.update(zip(target, rows))
            requests[index] = target
        if step % 50 == 0:
            shadow.check()
    assert len(shadow.rows) > 50
    shadow.check()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_a_write_ignores_checkpoint_scales_and_leaves_its_input_alone(recipe, dtype):
    pool, other = make_pool(recipe), make_pool(recipe)
    slots = torch.arange(40, 60)
    k, v = torch.randn(20, HEADS, DIM).to(dtype), torch.randn(20, HEADS, DIM).to(dtype)
    k_before, v_before = k.clone(), v.clone()
    pool.set_kv_buffer(Layer(1), slots, k, v, 0.06, 0.06)
    other.set_kv_buffer(Layer(1), KVWriteLoc(slots), k, v)
    assert torch.equal(pool.k_buffer[1], other.k_buffer[1]) and torch.equal(pool.v_buffer[1], other.v_buffer[1])
    assert torch.equal(k, k_before) and torch.equal(v, v_before)


def test_prefix_valid_writes_only_committed_rows(recipe):
    pool, expected = make_pool(recipe), make_pool(recipe)
    loc = torch.arange(64, 76).view(3, 4)
    commit = torch.tensor([4, 0, 2])
    k, v = torch.randn(12, HEADS, DIM), torch.randn(12, HEADS, DIM)
    pool.set_kv_buffer_prefix_valid(Layer(0), loc, commit, k, v)
    kept = torch.tensor([0, 1, 2, 3, 8, 9])
    expected.set_kv_buffer(Layer(0), loc.flatten()[kept], k[kept], v[kept])
    assert torch.equal(pool.k_buffer[0][1:], expected.k_buffer[0][1:])  # page 0 takes the dropped rows
    assert torch.equal(pool.v_buffer[0][1:], expected.v_buffer[0][1:])


@pytest.mark.parametrize("page_size", (32, 64, 128))
@pytest.mark.parametrize("head_dim", (64, 96, 128))
def test_sizes_are_the_formats_to_the_byte(recipe, page_size, head_dim):
    pool = make_pool(recipe, size=4 * page_size, page_size=page_size, head_dim=head_dim, poison=False)
    per_token = LAYERS * recipe.nbytes_per_token(HEADS, head_dim, page_size=page_size)
    assert sum(pool.get_kv_size_bytes()) == per_token * (pool.size + page_size)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        assert buffer.dtype == torch.uint8 and buffer.is_contiguous() and not buffer.any()
        assert buffer.stride(1) % 128 == 0


def test_page_transfer_by_buffer_infos_carries_codes_and_scales(recipe):
    """What PD transfer does: pages as byte ranges at base + page * item length, into other pages."""
    import ctypes

    source, target = make_pool(recipe), make_pool(recipe)
    slots = torch.arange(32, 96)
    source.set_kv_buffer(Layer(0), slots, torch.randn(64, HEADS, DIM), torch.randn(64, HEADS, DIM))
    pointers, lengths, items = source.get_contiguous_buf_infos()
    target_pointers, _, _ = target.get_contiguous_buf_infos()
    assert len(pointers) == 2 * LAYERS
    for pointer, to, length, item in zip(pointers, target_pointers, lengths, items):
        assert length == item * (source.size + source.page_size) // source.page_size
        for page, new_page in ((1, 5), (2, 3)):
            ctypes.memmove(to + new_page * item, pointer + page * item, item)
    for buffer, new in ((source.k_buffer, target.k_buffer), (source.v_buffer, target.v_buffer)):
        assert torch.equal(new[0][[5, 3]], buffer[0][[1, 2]])


def copy_pages_to_host(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """What SGLang's GPU-only ``transfer_kv_all_layer_direct_lf_pf`` does: whole pages of rows, from each layer's
    buffer (K of all layers, then V) into host buffers ``[pages, layers, P, ...]``."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for n, src in enumerate(src_ptrs):
        for source, target in zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist()):
            dst_ptrs[n // layers][target // page_size, n % layers] = src[source : source + page_size]


def copy_pages_to_device(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """The way back, ``transfer_kv_per_layer_direct_pf_lf``: one layer of each host buffer."""
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        for source, target in zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist()):
            dst[target : target + page_size] = src[source // page_size, layer_id]


def test_host_pool_round_trip_of_whole_pages(recipe, monkeypatch):
    """HiCache's host pool, as SGLang builds it from our description, writes pages back and loads them elsewhere."""
    from sglang.srt.mem_cache.pool_host import base, mha

    monkeypatch.setattr(base, "host_memory_budget_bytes", lambda requested: requested)  # it keeps 10 GB back
    monkeypatch.setattr(mha, "transfer_kv_all_layer_direct_lf_pf", copy_pages_to_host, raising=False)
    monkeypatch.setattr(mha, "transfer_kv_per_layer_direct_pf_lf", copy_pages_to_device, raising=False)
    pool = make_pool(recipe)
    slots = torch.arange(64, 128)
    for layer in range(LAYERS):
        pool.set_kv_buffer(Layer(layer), slots, torch.randn(64, HEADS, DIM), torch.randn(64, HEADS, DIM))
    info = pool._mha_buffer_info()
    info.validate()
    assert info.scales is None and info.dtype == torch.uint8
    host = mha.get_mha_host_pool_cls(info)(
        info,
        2.0,
        0,
        pool.page_size,
        "page_first_direct",
        pin_memory=False,
        device_capacity_tokens=pool.size,
        start_layer=0,
        end_layer=LAYERS - 1,
    )
    assert host.get_size_per_token() == LAYERS * recipe.nbytes_per_token(HEADS, DIM, page_size=pool.page_size)
    before = [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    host_slots, new_slots = torch.arange(0, 64), torch.arange(256, 320)
    host.backup_from_device_all_layer(pool, host_slots, slots, "direct")
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(POISON)
    for layer in range(LAYERS):
        host.load_to_device_per_layer(pool, host_slots, new_slots, layer, "direct")
    for buffer, old in zip((*pool.k_buffer, *pool.v_buffer), before):
        assert torch.equal(buffer[8:10], old[2:4])


def test_composite_pools_hold_packed_records(recipe):
    from sglang.srt.mem_cache.memory_pool import MambaPool

    common = {
        "page_size": 32,
        "dtype": torch.uint8,
        "head_num": HEADS,
        "head_dim": DIM,
        "device": "cpu",
        "full_attention_layer_ids": [1],
    }
    swa = SWAKVPool(
        size=256, size_swa=128, swa_attention_layer_ids=[0], token_to_kv_pool_class=pool_class(recipe), **common
    )
    swa.register_mapping(torch.arange(288) % 128)
    hybrid = HybridLinearKVPool(
        size=256, mamba_pool=MambaPool.__new__(MambaPool), full_kv_pool_class=pool_class(recipe), **common
    )
    k, v = torch.randn(2, HEADS, DIM), torch.randn(2, HEADS, DIM)
    rows = reference.encode(k, recipe.k)
    loc = KVWriteLoc(torch.tensor([200, 201]), swa_loc=torch.tensor([72, 73]))
    for pool, layer, slots in ((swa, 1, [200, 201]), (swa, 0, [72, 73]), (hybrid, 1, [200, 201])):
        pool.set_kv_buffer(Layer(layer), loc, k, v)
        k_records, _ = pool.get_kv_buffer(layer)
        block = recipe.block(Operand.K, DIM, 32)
        assert torch.equal(reference.read_rows(k_records, block, torch.tensor(slots)), rows)
    assert all(isinstance(part, QuantKVPool) for pool in (swa, hybrid) for _, part in sub_pools(pool))
    swa_bytes = recipe.nbytes_per_token(HEADS, DIM, page_size=32) * (256 + 32 + 128 + 32)
    assert sum(swa.get_kv_size_bytes()) == swa_bytes


@pytest.mark.parametrize(
    "change, message",
    (
        ({"page_size": 16}, "--page-size 16"),
        ({"head_dim": 80}, "head_dim 80"),
        ({"post_capture_active": True}, "post-capture"),
    ),
)
def test_a_pool_without_records_is_refused_by_name(change, message):
    with pytest.raises(UnsupportedConfig, match=message):
        make_pool(RECIPES["mxfp4"], **change)


def test_context_parallel_writes_are_refused():
    pool = make_pool(RECIPES["int8"])
    k = torch.randn(1, HEADS, DIM)
    with pytest.raises(UnsupportedConfig, match="--dcp-size"):
        pool.set_kv_buffer(Layer(0), torch.tensor([40]), k, k, dcp_kv_mask=torch.ones(1, dtype=torch.bool))
