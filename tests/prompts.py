"""The twelve fixed prompts of the greedy comparisons, and the two figures that compare runs."""

from __future__ import annotations

TOKENS = 50
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


def token_ids(tokenizer) -> list[list[int]]:
    """The questions as chat prompts, in tokens."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


def token_match(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of positions at which both runs have the same token."""
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def sequence_exact(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of prompts whose whole output is the same."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
