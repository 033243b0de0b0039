"""The fixed prompts of the greedy comparisons, and the two figures that compare runs."""

from __future__ import annotations

from itertools import zip_longest

TOKENS = 50

# Open questions, for how far a recipe drifts from an unquantized cache where the model itself wavers.
QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "List three uses of a hammer.",
    "How do I boil an egg?",
    "Translate 'good morning' into Spanish.",
    "What is the difference between a virus and a bacterium?",
    "Give me a name for a small red boat.",
    "Who wrote Romeo and Juliet?",
    "Describe a rainy day in a big city.",
    "What should I pack for a week in the mountains?",
    "Why do cats purr?",
)


def chat_ids(tokenizer) -> list[list[int]]:
    """The questions as chat prompts, in tokens."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


# Texts whose continuation is no coin toss, for runs that must agree token for token. Two programs that sum in
# another order differ by 1e-6, which flips some int8 codes at a tie and moves logits of the demo model by up to
# 0.06; along these paths the best token leads the second by at least 0.2 (the reference itself, both recipes).
COUNTING = (
    ", ".join(map(str, range(1, 18))) + ",",
    " ".join(map(str, range(30, 48))) + " ",
    "\n".join(f"Item {i}" for i in range(1, 13)) + "\n",
    ", ".join(f"Chapter {i}" for i in range(1, 13)) + ",",
    ", ".join(map(str, range(2, 43, 2))) + ",",
    ", ".join(map(str, range(5, 76, 5))) + ",",
    ", ".join(map(str, range(10, 131, 10))) + ",",
    "; ".join(f"Day {i}: done" for i in range(1, 11)) + ";",
    "\n".join(f"<td>{i}</td>" for i in range(1, 9)) + "\n",
    ", ".join(map(str, range(100, 112))) + ",",
    " | ".join(f"line {i}" for i in range(1, 14)) + " |",
    "\n".join(f"1.{i}" for i in range(1, 14)) + "\n",
)


def counting_ids(tokenizer) -> list[list[int]]:
    """The counting texts in tokens, each less than a page of 128."""
    return [tokenizer(text).input_ids for text in COUNTING]


def long_counting_ids(tokenizer) -> list[list[int]]:
    """Three counting texts of 100 to 120 tokens: they outgrow a page of 128 soon."""
    texts = (
        ", ".join(map(str, range(1, 33))) + ",",
        "; ".join(f"Day {i}: done" for i in range(1, 18)) + ";",
        " | ".join(f"line {i}" for i in range(1, 26)) + " |",
    )
    return [tokenizer(text).input_ids for text in texts]


def token_match(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of positions at which both runs have the same token; the longer output of a prompt counts."""
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip_longest(x, y)]
    return sum(a == b for a, b in pairs) / len(pairs)


def sequence_exact(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of prompts whose whole output is the same."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
