"""Token counts of one request, gathered over its choices."""

from __future__ import annotations

from collections.abc import Sequence


class Usage:
    """Counts for prompts of ``choices_per_prompt`` choices each, numbered prompt by prompt.

    Each prompt counts once, however many choices it has; ``completion_tokens`` counts all choices, with the token
    that ended each. With ``score_only`` nothing generated is counted.
    """

    def __init__(self, prompts: Sequence[tuple[int, ...]], choices_per_prompt: int, score_only: bool = False) -> None:
        self.prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.completion_tokens = 0
        self._choices_per_prompt = choices_per_prompt
        self._score_only = score_only
        self._cached = [0] * len(prompts)

    def add(self, choice: int, tokens: int, cached_tokens: int) -> None:
        """``tokens`` more of a choice, whose prompt had ``cached_tokens`` in the prefix cache."""
        if not self._score_only:
            self.completion_tokens += tokens
        # Later choices of a prompt find what the first has left; only the first tells what there was before.
        prompt, later = divmod(choice, self._choices_per_prompt)
        if not later:
            self._cached[prompt] = max(self._cached[prompt], cached_tokens)

    def body(self) -> dict[str, object]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }
