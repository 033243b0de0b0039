"""What fits: bytes per token of a model's KV cache, and the tokens that fit into memory, per recipe.

``python -m sglang_quantkv.plan --model-path M`` shows it without a GPU and without weights. A model's shape
comes from SGLang itself (``integration.planner``), and the server's memory planner prices with the same
classes, so what this prints is what a server allocates.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import (
    DEFAULT_PAGE_SIZE,
    DTYPE_NAMES,
    PAGE_SIZES,
    RECIPES,
    Recipe,
    check_page_size,
    find_recipe,
    is_recipe,
)

# What SGLang stores itself, in bytes per element, and the --kv-cache-dtype values that mean it.
BASELINES = {"bf16": 2, "fp8": 1}
BASELINE_ALIASES = {"auto": "bf16", "bfloat16": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
ALL_NAMES = (*BASELINES, *RECIPES)
DRAFT_ELEMENT_NBYTES = 2  # beside a recipe, a draft model's cache stays in SGLang's own bf16 pool
SWA_FULL_TOKENS_RATIO = 0.8  # SGLang's default


@dataclass(frozen=True)
class LayerGroup:
    """Layers of a model whose keys and values have one shape.

    Attributes:
        kv_heads: per tensor-parallel rank.
        head_dim, v_head_dim: elements of a key and of a value.
        window: the window of layers that SGLang gives a smaller pool of their own; None where the pool keeps
            every token, which is also so for windowed layers of models without that split (Gemma 2 and 3).
    """

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None

    def layer_nbytes(self, storage: Recipe | int, page_size: int) -> int:
        """Bytes of one token in one layer, K and V, in a recipe or in elements of ``storage`` bytes.

        Raises:
            UnsupportedConfig: when the recipe has no records for this head dim or page size.
        """
        if isinstance(storage, Recipe):
            return storage.nbytes_per_token(self.kv_heads, self.head_dim, self.v_head_dim, page_size)
        return self.kv_heads * (self.head_dim + self.v_head_dim) * storage


@dataclass(frozen=True)
class Price:
    """Bytes of one token: in the layers that keep every token, and in those with a pool for their window."""

    full: int
    sliding: int = 0

    def __add__(self, other: Price) -> Price:
        return Price(self.full + other.full, self.sliding + other.sliding)

    @property
    def nbytes(self) -> int:
        return self.full + self.sliding


@dataclass(frozen=True)
class KVShape:
    """What of a model is cached per token, on one rank.

    Attributes:
        model_layers: all layers of the model; those in no group (linear attention, Mamba) cache no tokens.
        context_length: the model's own limit.
    """

    architecture: str
    model_layers: int
    context_length: int
    groups: tuple[LayerGroup, ...]

    @property
    def is_split(self) -> bool:
        """Whether SGLang keeps two pools, one for full attention and a smaller one for windowed layers."""
        return {group.window is None for group in self.groups if group.layers} == {True, False}

    def price(self, storage: Recipe | int, page_size: int) -> Price:
        """See ``LayerGroup.layer_nbytes``."""
        total = Price(0)
        for group in self.groups:
            nbytes = group.layers * group.layer_nbytes(storage, page_size)
            total += Price(nbytes) if group.window is None else Price(0, nbytes)
        return total


@dataclass(frozen=True)
class Row:
    """One line of a plan. ``ratio_to_bf16`` is how many tokens fit where one fits in bf16; ``tokens`` is None
    without a memory size, and everything is for a recipe refused for this model."""

    recipe: str
    bytes_per_token: int | None = None
    ratio_to_bf16: float | None = None
    tokens: int | None = None
    refused: str | None = None


def tokens_that_fit(kv_nbytes: int, shape: KVShape, price: Price, page_size: int, ratio: float) -> int:
    """The ``max_total_num_tokens`` that SGLang makes of a KV budget; 0 where it would refuse to start.

    With two pools a token's windowed layers cost ``ratio`` of their bytes, since that pool holds only
    ``ratio`` times as many tokens. SGLang does not charge the one dummy page each pool has on top.
    """
    cell = price.full + (ratio if shape.is_split else 1) * price.sliding
    tokens = int(kv_nbytes // cell) // page_size * page_size
    if shape.is_split:
        window = max(group.window or 0 for group in shape.groups)
        if int(tokens * ratio) // page_size * page_size <= window + page_size:
            return 0  # the windowed pool could not hold one request
    return tokens


def plan_rows(
    shape: KVShape,
    draft: KVShape | None = None,
    *,
    page_size: int = DEFAULT_PAGE_SIZE,
    kv_nbytes: int | None = None,
    ratio: float = SWA_FULL_TOKENS_RATIO,
    names: tuple[str, ...] = ALL_NAMES,
) -> list[Row]:
    """A row per name in ``names``, each a baseline or a recipe. A draft model's own cache adds to the bytes of
    a token; beside bf16 and fp8 it has the target's dtype, beside a recipe it is bf16."""

    def price(name: str) -> Price:
        cost = shape.price(BASELINES.get(name) or RECIPES[name], page_size)
        return cost + draft.price(BASELINES.get(name, DRAFT_ELEMENT_NBYTES), page_size) if draft else cost

    bf16, rows = price("bf16").nbytes, []
    for name in names:
        try:
            cost = price(name)
        except UnsupportedConfig as refusal:
            rows.append(Row(name, refused=refusal.asked))
            continue
        tokens = None if kv_nbytes is None else tokens_that_fit(kv_nbytes, shape, cost, page_size, ratio)
        rows.append(Row(name, cost.nbytes, round(bf16 / cost.nbytes, 4), tokens))
    return rows


def find_config(model_path: str, flag: str) -> Path:
    """The config file that the flag's value stands for: a file, a directory with a ``config.json``, or a model
    of the Hugging Face hub that is in the local cache.

    Raises:
        UnsupportedConfig: when there is none, or it is not a model's config.
    """
    path = Path(model_path).expanduser()
    path = path / "config.json" if path.is_dir() else path
    config = path if path.is_file() else _find_cached(model_path)
    supported = "a model directory, a config.json, or the name of a model in the local Hugging Face cache"
    if config is None:
        raise UnsupportedConfig(f"{flag} {path} does not exist", supported, "Check the path")
    try:
        architectures = json.loads(config.read_bytes()).get("architectures")
    except (ValueError, AttributeError):
        architectures = None
    if not architectures:
        raise UnsupportedConfig(f"{flag} {config} names no model architecture", supported, "Check the file")
    return config


def _find_cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not even the form of a hub name
        return None
    return Path(found) if isinstance(found, str) else None


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_quantkv.plan",
        description="Bytes per token of a model's KV cache, and how many tokens fit, for bf16, fp8 and every recipe. "
        "Reads the model's config.json only: no GPU, no weights, no network. All figures are per rank.",
    )
    add = parser.add_argument
    add("--model-path", required=True, metavar="M", help="model directory, config.json, or cached hub name")
    draft_help = "draft model of EAGLE or standalone speculation, whose bf16 cache adds to the bytes of a token"
    add("--draft-model-path", "--speculative-draft-model-path", metavar="M", help=draft_help)
    dtypes = ", ".join((*BASELINES, *DTYPE_NAMES))
    add("--kv-cache-dtype", metavar="NAME", help=f"show only bf16 and this one: {dtypes} (default: all)")
    add("--kv-gib", type=float, metavar="G", help="memory for the cache of one rank in GiB; shows the tokens that fit")
    page_help = f"tokens per page: {', '.join(map(str, PAGE_SIZES))} (default: %(default)s)"
    add("--page-size", type=int, default=DEFAULT_PAGE_SIZE, metavar="P", help=page_help)
    add("--tp-size", "--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: %(default)s)")
    ratio_help = "for models with a sliding-window pool: its tokens per token of the full pool (default: %(default)s)"
    add("--swa-full-tokens-ratio", type=float, default=SWA_FULL_TOKENS_RATIO, metavar="R", help=ratio_help)
    add("--trust-remote-code", action="store_true", help="allow a config that brings its own code")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(argv)


def _check_args(args: argparse.Namespace) -> tuple[str, ...]:
    """The names of the rows asked for; raises UnsupportedConfig for values that make no sense."""
    check_page_size(args.page_size)
    for flag, value, is_good, allowed in (
        ("--kv-gib", args.kv_gib, args.kv_gib is None or args.kv_gib > 0, "a number above 0"),
        ("--tp-size", args.tp_size, args.tp_size >= 1, "1 or more"),
        (
            "--swa-full-tokens-ratio",
            args.swa_full_tokens_ratio,
            0 < args.swa_full_tokens_ratio <= 1,
            "above 0, up to 1",
        ),
    ):
        if not is_good:
            raise UnsupportedConfig(f"{flag} {value} makes no sense", f"{flag} with {allowed}", "Change the value")
    name = BASELINE_ALIASES.get(args.kv_cache_dtype, args.kv_cache_dtype)
    if name is None:
        return ALL_NAMES
    if name not in BASELINES and not is_recipe(name):
        supported = ", ".join((*BASELINES, *BASELINE_ALIASES, *DTYPE_NAMES))
        raise UnsupportedConfig(f"--kv-cache-dtype {name} is unknown", supported, "Choose one of these")
    return tuple(dict.fromkeys(("bf16", name if name in BASELINES else find_recipe(name).name)))


def _layer_lines(title: str, shape: KVShape) -> list[str]:
    lines = [f"{title}: {shape.architecture}, {shape.model_layers} layers"]
    for group in filter(lambda group: group.layers, shape.groups):
        value = f", values {group.v_head_dim}" if group.v_head_dim != group.head_dim else ""
        window = f", in a pool for their window of {group.window}" if group.window else ""
        lines.append(f"  {group.layers} with {group.kv_heads} KV heads, head_dim {group.head_dim}{value}{window}")
    others = shape.model_layers - sum(group.layers for group in shape.groups)
    if others > 0:
        lines.append(f"  {others} cache no tokens (linear attention, Mamba); their state is separate, not counted here")
    return lines


def _table(args: argparse.Namespace, shape: KVShape, draft: KVShape | None, rows: list[Row]) -> str:
    lines = _layer_lines(args.model_path, shape)
    lines += _layer_lines(f"draft {args.draft_model_path}", draft) if draft else []
    ratio = f", --swa-full-tokens-ratio {args.swa_full_tokens_ratio:g}" if shape.is_split else ""
    lines += [f"per rank with --tp-size {args.tp_size}, --page-size {args.page_size}{ratio}", ""]
    budget = "tokens" if args.kv_gib is None else f"tokens in {args.kv_gib:g} GiB"
    cells = [("recipe", "bytes/token", "against bf16", budget, f"requests of {shape.context_length:,}")]
    for row in rows:
        fit = ("-", "-") if row.tokens is None else (f"{row.tokens:,}", f"{row.tokens / shape.context_length:.1f}")
        price = ("refused", "-") if row.refused else (f"{row.bytes_per_token:,}", f"{row.ratio_to_bf16:.2f}x")
        cells.append((row.recipe, *price, *fit))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines += ["  ".join((line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:]))) for line in cells]
    return "\n".join(lines + [f"{row.recipe} is refused: {row.refused}" for row in rows if row.refused])


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, or 2 with a message about what cannot be planned."""
    args = _parse_args(argv)
    try:
        names = _check_args(args)
        config = find_config(args.model_path, "--model-path")
        draft_config = args.draft_model_path and find_config(args.draft_model_path, "--draft-model-path")
        print("Importing SGLang to read the config; this can take 20 seconds.", file=sys.stderr)
        from sglang_quantkv.integration.planner import load_shape

        options = {"tp_size": args.tp_size, "trust_remote_code": args.trust_remote_code}
        shape = load_shape(config, **options)
        draft = load_shape(draft_config, is_draft=True, **options) if draft_config else None
    except UnsupportedConfig as error:
        print(error, file=sys.stderr)
        return 2
    kv_nbytes = None if args.kv_gib is None else int(args.kv_gib * 2**30)
    ratio = args.swa_full_tokens_ratio
    rows = plan_rows(shape, draft, page_size=args.page_size, kv_nbytes=kv_nbytes, ratio=ratio, names=names)
    if args.json:
        flags = {name: value for name, value in vars(args).items() if name != "json"}
        models = {"model": asdict(shape), "draft": draft and asdict(draft)}
        document = {"recipes": [asdict(row) for row in rows]} | flags | models
        print(json.dumps(document, indent=2))
    else:
        print(_table(args, shape, draft, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
