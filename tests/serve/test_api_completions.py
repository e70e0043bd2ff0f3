"""POST /v1/completions, whole and streamed, with a scripted model."""

from __future__ import annotations

import math
from typing import Any

import pytest

from neoserve.engine.fake import fake_limits
from neoserve.types.model import GenerationDefaults

from .api_harness import CONTEXT, END, MODEL, SCRIPT, VOCABULARY, Call, Server, events, serving


async def test_a_whole_answer() -> None:
    async with serving() as server:
        response = await server.complete("say hello", max_tokens=50)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": SCRIPT, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": len(SCRIPT) + 1,
        "total_tokens": 9 + len(SCRIPT) + 1,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_max_tokens_defaults_to_16_and_cuts_with_length() -> None:
    async with serving("x" + "abcdefghijklmnopqrstuvw") as server:
        default = (await server.complete()).json()["choices"][0]
        five = (await server.complete(max_tokens=5)).json()["choices"][0]
    assert (len(default["text"]), default["finish_reason"]) == (16, "length")
    assert (five["text"], five["finish_reason"]) == ("xabcd", "length")


async def stream(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    call = Call(server.app, path, {"model": MODEL, "stream": True, **body})
    await call.end()
    assert call.status == 200
    return events(call.text)


async def test_a_stream_adds_up_to_the_whole_answer() -> None:
    async with serving() as server:
        chunks = await stream(server, "/v1/completions", {"prompt": "hi", "max_tokens": 50})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == SCRIPT
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_usage_is_streamed_only_when_asked_for(options: dict[str, bool] | None) -> None:
    """B30."""
    async with serving() as server:
        chunks = await stream(server, "/v1/completions", {"prompt": "hi", "max_tokens": 50, "stream_options": options})
    if not (options and options.get("include_usage")):
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
        return
    assert [chunk for chunk in chunks if not chunk["choices"]] == chunks[-1:]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == len(SCRIPT) + 1


async def test_one_write_per_step_however_many_choices() -> None:
    async with serving(seconds_per_step=0.01) as server:
        call = Call(server.app, "/v1/completions", {"model": MODEL, "prompt": ["a", "b", "c"], "stream": True})
        await call.end()
        steps = len(server.executor.history)
        assert len(call.writes) <= steps + 1
        texts = ["", "", ""]
        for chunk in events(call.text):
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
    assert texts == [SCRIPT] * 3


async def test_stop_strings_end_the_text_before_them() -> None:
    """B29: across token borders, streamed and not; the engine stops too."""
    async with serving("The quick brown fox jumps") as server:
        whole = (await server.complete(stop=["own fox"], max_tokens=50)).json()["choices"][0]
        assert (whole["text"], whole["finish_reason"]) == ("The quick br", "stop")
        chunks = await stream(server, "/v1/completions", {"prompt": "p", "stop": "own fox", "max_tokens": 50})
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "The quick br"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
        await server.idle()
        assert server.engine.stats().generated_tokens < 2 * 25
        assert await server.metric('neoserve:num_requests_total{finish_reason="stop"}') == 2
        assert await server.metric("neoserve:num_aborted_requests_total") == 0


async def test_a_near_miss_of_a_stop_string_is_released() -> None:
    async with serving("own foe and own") as server:
        answer = (await server.complete(stop=["own fox"], max_tokens=50)).json()["choices"][0]
    assert answer["text"] == "own foe and own"


@pytest.mark.parametrize("text", ["😀", "👨‍👩‍👧", "汉字", "é"])
async def test_characters_are_never_cut(text: str) -> None:
    """B28: one byte a token, so that every character comes in pieces."""
    async with serving(text) as server:
        chunks = await stream(server, "/v1/completions", {"prompt": "p", "max_tokens": 50})
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


async def test_a_character_cut_by_max_tokens_is_one_replacement_character() -> None:
    async with serving("😀") as server:
        whole = (await server.complete(max_tokens=2)).json()["choices"][0]
        chunks = await stream(server, "/v1/completions", {"prompt": "p", "max_tokens": 2})
    assert (whole["text"], whole["finish_reason"]) == ("\ufffd", "length")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "\ufffd"


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt() -> None:
    script = {(ord("a"),): b"A!", (ord("b"),): b"B?"}
    async with serving(script) as server:
        body = (await server.complete(["a", "b"], n=2, max_tokens=9)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "A!"),
        (1, "A!"),
        (2, "B?"),
        (3, "B?"),
    ]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 12


async def test_token_ids_are_taken_as_they_are() -> None:
    script = {(1, 2): b"ids", (3,): b"other"}
    async with serving(script) as server:
        one = (await server.complete([1, 2])).json()
        two = (await server.complete([[1, 2], [3]])).json()
    assert one["choices"][0]["text"] == "ids"
    assert [choice["text"] for choice in two["choices"]] == ["ids", "other"]


@pytest.mark.parametrize("ids", [[-1], [VOCABULARY], [2**31], [1, VOCABULARY + 5]])
async def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    """B73, B74: 400, and the next request works."""
    async with serving() as server:
        response = await server.complete(ids)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        for fields in ({"logit_bias": {str(VOCABULARY): 1}}, {"stop_token_ids": [VOCABULARY]}):
            refused = await server.complete(**fields)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] in fields
        assert (await server.complete()).json()["choices"][0]["text"] == SCRIPT


async def test_logit_bias_steers_the_answer() -> None:
    async with serving("abc") as server:
        steered = (await server.complete(logit_bias={str(ord("z")): 100}, max_tokens=3)).json()
    assert steered["choices"][0]["text"] == "zzz"


async def test_min_tokens_and_ignore_eos_and_stop_token_ids() -> None:
    async with serving(b"ab") as server:
        longer = (await server.complete(min_tokens=5, max_tokens=5)).json()["choices"][0]
        assert longer["finish_reason"] == "length"
        ignored = (await server.complete(ignore_eos=True, max_tokens=5)).json()
        assert ignored["choices"][0]["finish_reason"] == "length"
        assert ignored["usage"]["completion_tokens"] == 5
        stopped = (await server.complete(stop_token_ids=[ord("b")])).json()["choices"][0]
        assert (stopped["text"], stopped["finish_reason"]) == ("a", "stop")


async def test_a_seed_gives_the_same_answer_alone_and_in_company() -> None:
    """B40."""
    async with Server(None, defaults=GenerationDefaults(temperature=1.0)) as server:
        fields = {"seed": 42, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}

        async def drawn(**more: Any) -> list[list[str]]:
            body = (await server.complete("p", **{**fields, **more})).json()
            return [choice["logprobs"]["tokens"] for choice in body["choices"]]

        alone = await drawn()
        assert await drawn() == alone
        both = await drawn(n=2)
        assert both[0] == alone[0]
        assert both[1] == (await drawn(seed=43))[0]
        assert both[0] != both[1]


async def test_logprobs_in_the_older_layout() -> None:
    """B37."""
    async with serving("hé", defaults=GenerationDefaults(temperature=0.0)) as server:
        body = (await server.complete("p", logprobs=2)).json()["choices"][0]
        chunks = await stream(server, "/v1/completions", {"prompt": "p", "logprobs": 2})
    got = body["logprobs"]
    assert got["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert got["text_offset"] == [0, 1, 1, 2]
    assert all(-1 < value <= 0 for value in got["token_logprobs"])
    for token, alternatives in zip(got["tokens"], got["top_logprobs"], strict=True):
        assert token in alternatives
        assert 2 <= len(alternatives) <= 3
        assert sum(math.exp(value) for value in alternatives.values()) <= 1 + 1e-6
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for key, values in got.items():
        assert [item for part in streamed for item in part[key]] == values


async def test_logprobs_zero_gives_the_chosen_token_only() -> None:
    async with serving("ab") as server:
        got = (await server.complete("p", logprobs=0)).json()["choices"][0]["logprobs"]
    assert [list(entry) for entry in got["top_logprobs"]] == [["a"], ["b"], ["<|im_end|>"]]


async def test_ids_beyond_the_tokenizer_are_no_alternatives() -> None:
    """Output layers are padded: the model ranks ids that the tokenizer does not know, and they are left out (B61)."""
    limits = fake_limits(vocab_size=VOCABULARY + 60, max_context=CONTEXT, num_pages=256)
    async with serving(None, step_limits=limits) as server:
        response = await server.complete(logprobs=20, max_tokens=20, ignore_eos=True, echo=True)
        assert response.status_code == 200, response.text
        logprobs = response.json()["choices"][0]["logprobs"]
    for alternatives in logprobs["top_logprobs"][1:]:
        assert len(alternatives) >= 20
        assert "" not in alternatives


async def test_echo_repeats_the_prompt() -> None:
    async with serving() as server:
        whole = (await server.complete("say: ", echo=True, max_tokens=50)).json()
        ids = (await server.complete([104, 105], echo=True, max_tokens=3)).json()
        chunks = await stream(server, "/v1/completions", {"prompt": "say: ", "echo": True, "max_tokens": 50})
    assert whole["choices"][0]["text"] == "say: " + SCRIPT
    assert whole["usage"]["completion_tokens"] == len(SCRIPT) + 1
    assert ids["choices"][0]["text"] == "hiHel"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "say: " + SCRIPT


async def test_echo_scores_the_prompt() -> None:
    """B26: echo, logprobs and max_tokens 0 is legal; the next request works."""
    async with serving("abcd") as server:
        body = (await server.complete("xab", echo=True, logprobs=1, max_tokens=0)).json()
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("xab", "length")
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["x", "a", "b"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        # The script makes "b" near certain after "a"; "a" after "x" begins it.
        assert -0.01 < logprobs["token_logprobs"][2] <= 0
        assert logprobs["text_offset"] == [0, 1, 2]
        assert body["usage"]["completion_tokens"] == 0
        both = (await server.complete("x", echo=True, logprobs=1, max_tokens=9)).json()["choices"][0]
        assert both["logprobs"]["tokens"] == ["x", "a", "b", "c", "d", "<|im_end|>"]
        assert both["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]
        chunks = await stream(
            server, "/v1/completions", {"prompt": "xab", "echo": True, "logprobs": 1, "max_tokens": 0}
        )
        tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
        assert tokens == ["x", "a", "b"]
        assert (await server.complete()).status_code == 200


async def test_the_checkpoints_defaults_apply_unless_given() -> None:
    async with serving(None, defaults=GenerationDefaults(temperature=0.0)) as server:
        fields = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0}
        first = (await server.complete("p", **fields)).json()["choices"][0]["logprobs"]
        again = (await server.complete("p", **fields)).json()["choices"][0]["logprobs"]
        hot = (await server.complete("p", temperature=5.0, seed=1, **fields)).json()["choices"][0]["logprobs"]
    assert first == again
    assert hot["tokens"] != first["tokens"]


async def test_special_tokens_are_shown_only_when_asked_for() -> None:
    async with serving([ord("a"), 256, ord("b")]) as server:
        hidden = (await server.complete()).json()["choices"][0]["text"]
        shown = (await server.complete(skip_special_tokens=False)).json()["choices"][0]["text"]
    assert hidden == "ab"
    assert shown == "a<|im_start|>b"
    assert END == 257


async def test_an_empty_prompt_is_refused_when_the_model_has_no_bos() -> None:
    """B42."""
    async with serving() as server:
        response = await server.complete("")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        for _ in range(2):
            assert (await server.complete("same")).json()["choices"][0]["text"] == SCRIPT
