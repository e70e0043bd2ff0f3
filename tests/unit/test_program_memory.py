"""KV memory: page sizes, page counts and context length."""

from __future__ import annotations

from typing import Any

import pytest

from neoserve.program.ir import KvGroup
from neoserve.program.memory import page_bytes, plan_kv
from neoserve.types.errors import ConfigurationError

GROUP = KvGroup("full", tuple(range(9)), None, 1, 24)
PAGE = 2 * 9 * 1 * 24 * 2 * 16
"""Bytes of a bf16 page of GROUP: K and V, layers, heads, head_dim, bytes, tokens. Not a multiple of 4096."""


def plan(**changes: object) -> Any:
    arguments: dict[str, Any] = {
        "page_size": 16,
        "kv_dtype": "bf16",
        "max_context": 1000,
        "context_length": None,
        "max_sequences": 4,
        "kv_cache_bytes": None,
        "available_bytes": 1 << 40,
    }
    return plan_kv((GROUP,), **{**arguments, **changes})


class TestPages:
    def test_size(self) -> None:
        assert page_bytes(GROUP, 16, "bf16") == PAGE
        assert page_bytes(GROUP, 16, "f32") == 2 * PAGE
        assert page_bytes(GROUP, 64, "bf16") == 4 * PAGE

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_pages_do_not_alias_in_cache_sets(self, head_dim: int) -> None:
        group = KvGroup("full", tuple(range(32)), None, 8, head_dim)
        plain = 2 * 32 * 8 * head_dim * 2 * 16
        assert plain % 4096 == 0
        assert page_bytes(group, 16, "bf16") == plain + 64

    def test_all_requests_at_full_length(self) -> None:
        result = plan()
        assert (result.context_length, result.num_pages) == (1000, 4 * 63)
        assert "enough for 4 requests of full length" in result.reason

    def test_half_of_the_available_memory(self) -> None:
        result = plan(available_bytes=2 * 100 * PAGE + 5)
        assert (result.num_pages, result.context_length) == (100, 1000)
        assert result.total_bytes <= 100 * PAGE
        assert "limited by half of the available memory" in result.reason

    def test_context_is_cut_to_what_fits_and_said(self) -> None:
        result = plan(available_bytes=2 * 10 * PAGE)
        assert (result.num_pages, result.context_length) == (10, 160)
        assert "context 160 tokens" in result.reason
        assert "the model's 1000 tokens need" in result.reason

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"kv_cache_bytes": 10 * PAGE}, True),
            ({"kv_cache_bytes": 125 * PAGE}, True),
            ({"kv_cache_bytes": 126 * PAGE}, False),
            ({"kv_cache_bytes": 19 * PAGE, "context_length": 160}, True),
            ({"kv_cache_bytes": 20 * PAGE, "context_length": 160}, False),
            ({}, False),
            ({"max_sequences": 1}, False),
        ],
    )
    def test_room_for_one_full_context_only_is_said(self, changes: dict[str, int], said: bool) -> None:
        reason = plan(**changes).reason
        assert (
            "a request without max_tokens reserves the whole context: set max_tokens or a smaller" in reason
        ) == said
        assert "\n" not in reason

    def test_kv_cache_bytes_wins_over_available_memory(self) -> None:
        assert plan(kv_cache_bytes=20 * PAGE, available_bytes=4 * PAGE).num_pages == 20

    def test_a_chosen_context_length_is_not_cut(self) -> None:
        assert plan(context_length=160, kv_cache_bytes=10 * PAGE).num_pages == 10
        with pytest.raises(
            ConfigurationError, match=r"kv_cache_bytes .* context_length of 161 tokens.*raise kv_cache_bytes"
        ):
            plan(context_length=161, kv_cache_bytes=10 * PAGE)

    def test_not_even_one_page(self) -> None:
        with pytest.raises(ConfigurationError, match=r"half of the available memory is .* KiB"):
            plan(available_bytes=PAGE)

    def test_groups_share_the_budget(self) -> None:
        window = KvGroup("window_8", (9, 10, 11), 8, 1, 24)
        result = plan_kv(
            (GROUP, window), page_size=16, kv_dtype="f32", max_context=64, context_length=None, max_sequences=1,
            kv_cache_bytes=3 * (2 * PAGE + 2 * PAGE // 3), available_bytes=0,
        )  # fmt: skip
        assert result.page_bytes == (2 * PAGE, 2 * PAGE // 3)
        assert (result.num_pages, result.context_length) == (3, 48)
