"""The Python interface on the default model: sensible answers, and equal ones however they are computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from neoserve.engine.core import EngineCore
from neoserve.llm import LLM, SamplingParams
from neoserve.types.options import EngineOptions

from ..models.real_models import model_file
from ..serve.invariance import assert_same_answer

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model_file("smollm2"), context_length=512, max_running_requests=8) as loaded:
        yield loaded


def test_a_known_question_gets_the_known_answer(llm):
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    output = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=24))[0]
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
    assert output.prompt is not None
    assert output.prompt.endswith("<|im_start|>assistant\n")


def test_a_batch_answers_as_its_members_do(llm):
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
    together = llm.generate(prompts, params, prompt_logprobs=1)
    alone = [llm.generate(prompt, params, prompt_logprobs=1)[0] for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        assert one.prompt_logprobs == other.prompt_logprobs
    assert len({output.text for output in together}) == 3


def test_no_way_of_running_changes_an_answer(llm):
    """Design D6 on a real model through the whole engine, with the weights as the file has them."""

    class Shared:
        """The loaded executor for one engine after the other; closing an engine leaves it open."""

        def __getattr__(self, name: str) -> object:
            return getattr(llm.core.executor, name)

        def close(self) -> None:
            pass

    def make_core(chunk: int) -> EngineCore:
        return EngineCore(Shared(), EngineOptions(max_running_requests=8, max_tokens_per_step=chunk), strict=True)

    prompts = [llm.tokenizer.encode(text) for text in ("Hello", "The quick brown fox jumps over the lazy dog.")]
    assert_same_answer(make_core, prompts, chunks=(11,))
