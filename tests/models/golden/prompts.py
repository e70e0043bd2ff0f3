"""The eight prompts of the golden greedy outputs: chat, code, several languages, and one longer than a window."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """``text`` is a user message for chat models when ``chat`` is set, and goes in as it stands otherwise."""

    name: str
    text: str
    chat: bool = True
    system: str = "You are a helpful assistant."


def _inventory() -> str:
    """About 600 tokens: with 64 new ones it passes Gemma's window of 512."""
    goods = ("brass hinge", "oak shelf", "copper wire", "glass jar", "wool blanket", "iron nail", "paper bag")
    lines = [f"Row {row}: {goods[row % 7]}, {(row * 13) % 90 + 3} pieces in box {row % 11}." for row in range(36)]
    return "Stock of the warehouse\n" + "\n".join(lines)


PROMPTS: tuple[Prompt, ...] = (
    Prompt("capital", "What is the capital of France, and which river flows through it?"),
    Prompt("explain", "Explain in simple words why the sky is blue and the sunset is red."),
    Prompt("code-chat", "Write a Python function that returns the n-th Fibonacci number without recursion."),
    Prompt(
        "code", 'def is_prime(n: int) -> bool:\n    """True if n is a prime number."""\n    if n < 2:\n', chat=False
    ),
    Prompt("story", "Once upon a time, in a village at the foot of a tall mountain, there lived", chat=False),
    Prompt("chinese", "请用三句话介绍一下长城的历史。", system="You answer in the language of the question."),
    Prompt(
        "languages", "Bonjour = hello\nGuten Morgen = good morning\n¿Dónde está? = where is it?\nСпасибо =", chat=False
    ),
    Prompt("long", _inventory() + "\nQuestion: what is in row 30, and how many pieces?\nAnswer:", chat=False),
)


def render(prompt: Prompt, *, chat: bool) -> str:
    """Text to tokenise with special tokens recognised: ChatML for chat models (SmolLM2 and Qwen2.5 both use it)."""
    if not (chat and prompt.chat):
        return prompt.text
    return (
        f"<|im_start|>system\n{prompt.system}<|im_end|>\n<|im_start|>user\n{prompt.text}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
