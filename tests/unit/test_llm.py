"""LLM and AsyncLLM over the scripted fake model and a byte-level tokenizer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from neoserve.engine.core import EngineCore
from neoserve.engine.fake import FakeExecutor, FakeFaults, fake_limits
from neoserve.engine.load import LoadedModel
from neoserve.llm import LLM, AsyncLLM, RequestOutput, SamplingParams
from neoserve.types.errors import ConfigurationError, ContextLengthError, EngineDeadError, InvalidRequestError
from neoserve.types.model import GenerationDefaults, ModelConfig, TokenizerSource
from neoserve.types.options import EngineOptions

EOS = 256
BOS = 257
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)

# A byte-level vocabulary of the 256 bytes in order, and two control tokens.
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_tokenizer(path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE({char: number for number, char in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<s>"])
    backend.save(str(path))


def ids(text: str) -> list[int]:
    backend = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [BYTES.index(char) for char in backend.pre_tokenize_str(text)[0][0]]


def user_turn(text: str) -> tuple[int, ...]:
    """A conversation of one message as TEMPLATE renders it."""
    return (*ids(text), EOS, *ids(">"))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeExecutor]:
    """Makes LLM load a fake executor instead of a model; returns the executor."""
    write_tokenizer(tmp_path / "tokenizer.json")

    def use(
        what: object, *, faults: FakeFaults | None = None, pace: float = 0.0, template: str | None = TEMPLATE
    ) -> FakeExecutor:
        limits = fake_limits(vocab_size=300, max_context=200, num_pages=200, max_tokens=32)
        executor = FakeExecutor(what, limits=limits, eos_token_id=EOS, faults=faults, seconds_per_step=pace)

        def fake_load(model: str | None, options: EngineOptions) -> LoadedModel:
            return LoadedModel(
                core=EngineCore(executor, options, strict=True),
                config=ModelConfig(
                    architecture="fake",
                    vocab_size=300,
                    hidden_size=1,
                    intermediate_size=1,
                    num_layers=1,
                    num_heads=1,
                    num_kv_heads=1,
                    head_dim=1,
                    max_position=200,
                    rms_norm_eps=1e-5,
                    attention_scale=1.0,
                    ropes=(),
                    layer_ropes=(),
                    layer_windows=(),
                ),
                generation=GenerationDefaults(eos_token_ids=(EOS,), temperature=0.5, top_k=7),
                tokenizer_source=TokenizerSource(
                    tokenizer_json=str(tmp_path / "tokenizer.json"),
                    tokenizer_config={"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": True},
                    chat_templates={} if template is None else {"default": template},
                ),
                served_name=model or "default",
                path=tmp_path,
                digest="",
                summary="",
                details={},
                load_seconds=0.0,
            )

        monkeypatch.setattr("neoserve.llm.model.load_engine", fake_load)
        return executor

    return use


def answers(table: dict[str, str]) -> dict[tuple[int, ...], list[int]]:
    return {(BOS, *ids(prompt)): ids(answer) for prompt, answer in table.items()}


def test_texts_in_texts_out_in_order(script):
    script(answers({"one": "eins", "two": "zwei", "three": "drei"}))
    with LLM("m") as llm:
        outputs = llm.generate(["three", "one", "two"])
        assert [output.text for output in outputs] == ["drei", "eins", "zwei"]
        first = outputs[0]
        assert (first.prompt, first.prompt_token_ids) == ("three", (BOS, *ids("three")))
        assert (first.token_ids, first.finish_reason, first.error) == ((*ids("drei"), EOS), "stop", None)
        assert llm.generate("one")[0].text == "eins"
        assert llm.generate((BOS, *ids("two")))[0] == RequestOutput(
            request_id="request-5",
            prompt=None,
            prompt_token_ids=(BOS, *ids("two")),
            text="zwei",
            token_ids=(*ids("zwei"), EOS),
            finish_reason="stop",
        )
        assert llm.generate([]) == []


def test_one_set_of_parameters_for_all_or_one_each(script):
    script(answers({"a": "xxxxxxxx", "b": "yyyyyyyy"}))
    with LLM() as llm:
        both = llm.generate(["a", "b"], SamplingParams(max_tokens=2))
        assert [output.text for output in both] == ["xx", "yy"]
        each = llm.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)])
        assert [output.text for output in each] == ["x", "yyy"]
        assert {output.finish_reason for output in each} == {"length"}
        with pytest.raises(InvalidRequestError, match="sampling_params has 1 entries for 2 prompts"):
            llm.generate(["a", "b"], [SamplingParams()])


def test_parameters_default_to_the_checkpoint(script):
    script([1])
    with LLM() as llm:
        assert llm.default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)


def test_stop_strings_end_the_request_in_the_engine(script):
    executor = script(answers({"a": "one two three four five six"}))
    with LLM() as llm:
        output = llm.generate("a", SamplingParams(stop=("three", "absent")))[0]
        assert (output.text, output.finish_reason, output.stop_reason) == ("one two ", "stop", "three")
        assert executor.tokens_drawn == len("one two three")
        assert llm.core.stats().used_pages == 0


def test_logprobs_and_prompt_logprobs(script):
    script(answers({"ab": "xy"}))
    with LLM() as llm:
        output = llm.generate("ab", SamplingParams(logprobs=1, max_tokens=2), prompt_logprobs=1)[0]
        assert [entry.token_id for entry in output.logprobs] == ids("xy")
        assert output.prompt_logprobs is not None
        assert [entry and entry.token_id for entry in output.prompt_logprobs] == [None, *ids("ab")]


def test_more_prompts_than_the_queue_holds(script):
    prompts = {f"prompt {number}": f"answer {number}" for number in range(30)}
    script(answers(prompts))
    with LLM(max_running_requests=2, max_queued_requests=3) as llm:
        assert [output.text for output in llm.generate(list(prompts))] == list(prompts.values())


def test_nothing_runs_if_one_prompt_is_refused(script):
    executor = script([1])
    with LLM() as llm:
        with pytest.raises(ContextLengthError):
            llm.generate(["fine", "x" * 300])
        with pytest.raises(InvalidRequestError, match="prompt has token id 300"):
            llm.generate([[1, 2], [300]])
        with pytest.raises(InvalidRequestError, match="no tokens"):
            llm.generate([[1], []])
        assert executor.history == []
        assert len(llm.generate("fine", SamplingParams(max_tokens=1))) == 1


def test_a_failed_request_says_why_and_the_others_are_answered(script):
    script(answers({"fine": "good", "bad": "lost"}), faults=FakeFaults(nan_token=ids("s")[0]))
    with LLM() as llm:
        good, bad = llm.generate(["fine", "bad"])
        assert (good.text, good.finish_reason, good.error) == ("good", "stop", None)
        assert (bad.text, bad.finish_reason) == ("los", "error")
        assert "no finite value" in (bad.error or "")


def test_chat_renders_the_template(script):
    prompt = "[user]Hi</s>>"
    script(
        {
            user_turn("[user]Hi"): ids("Hello"),
            user_turn("[user]Bye"): ids("Ciao"),
        }
    )
    with LLM() as llm:
        one = llm.chat([{"role": "user", "content": "Hi"}])
        assert [(output.text, output.prompt) for output in one] == [("Hello", prompt)]
        two = llm.chat([[{"role": "user", "content": "Bye"}], [{"role": "user", "content": "Hi"}]])
        assert [output.text for output in two] == ["Ciao", "Hello"]
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]"):
            llm.chat([{"role": "nobody", "content": "Hi"}])


def test_special_token_text_in_a_chat_stays_text(script):
    prompt = user_turn("[user]a</s>b")
    script({prompt: ids("ok")})
    with LLM() as llm:
        output = llm.chat([{"role": "user", "content": "a</s>b"}])[0]
        assert (output.text, output.prompt_token_ids) == ("ok", prompt)


def test_a_model_without_a_template_takes_one_as_argument(script, tmp_path):
    script([1], template=None)
    with LLM() as llm, pytest.raises(InvalidRequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "Hi"}])
    file = tmp_path / "template.jinja"
    file.write_text("<{{ messages[0].content }}>")
    for template in (file, "<{{ messages[0].content }}>"):
        script({tuple(ids("<Hi>")): ids("yes")}, template=None)
        with LLM(chat_template=template) as llm:
            assert llm.chat([{"role": "user", "content": "Hi"}])[0].text == "yes"
    with pytest.raises(ConfigurationError, match="missing"):
        LLM(chat_template=tmp_path / "missing")


def test_streams_join_to_the_answer_and_end_when_left(script):
    executor = script(answers({"a": "h\u00e9llo \U0001f600 " * 5}))
    with LLM() as llm:
        pieces = [delta.text for delta in llm.stream("a")]
        assert "".join(pieces) == "h\u00e9llo \U0001f600 " * 5
        assert len(pieces) > 20
        stream = llm.stream("a")
        next(stream)
        with pytest.raises(RuntimeError, match="this LLM is generating"):
            llm.generate("a")
        stream.close()
        assert llm.core.stats().running == 0
        drawn = executor.tokens_drawn
        assert "".join(delta.text for delta in llm.stream("a")).startswith("h\u00e9llo")
        assert executor.tokens_drawn == drawn + len(pieces)


def test_stream_chat_renders_the_template(script):
    script({user_turn("[user]Hi"): ids("Hello")})
    with LLM() as llm:
        assert "".join(delta.text for delta in llm.stream_chat([{"role": "user", "content": "Hi"}])) == "Hello"


def test_unknown_options_are_refused_with_the_known_ones(script):
    script([1])
    with pytest.raises(ConfigurationError, match=r"option max_model_len is unknown; the options are .*context_length"):
        LLM(max_model_len=100)


def test_the_vocabulary_beyond_the_tokenizer_is_never_drawn(script):
    script(lambda _: 290)
    with LLM() as llm:
        output = llm.generate("a", SamplingParams(max_tokens=20, ignore_eos=True, temperature=2.0))[0]
        assert max(output.token_ids) < 258


def test_a_closed_llm_says_so(script):
    executor = script([1])
    llm = LLM()
    llm.close()
    assert executor.closed
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a")


async def test_async_streams_side_by_side(script):
    table = {f"p{number}": f"answer {number}" for number in range(8)}
    executor = script(answers(table), pace=0.001)
    async with AsyncLLM() as llm:

        async def one(prompt: str) -> str:
            deltas = [delta async for delta in llm.generate(prompt)]
            assert deltas[-1].finish_reason == "stop"
            return "".join(delta.text for delta in deltas)

        assert await asyncio.gather(*map(one, table)) == list(table.values())
        with pytest.raises(ContextLengthError):
            await one("x" * 300)
    assert executor.closed


async def test_async_stop_strings_and_leaving_end_the_request(script):
    script(answers({"a": "one two three " * 10}), pace=0.001)
    async with AsyncLLM() as llm:
        deltas = [delta async for delta in llm.generate("a", SamplingParams(stop=("two",)))]
        assert ("".join(delta.text for delta in deltas), deltas[-1].stop_reason) == ("one ", "two")
        async with aclosing(llm.generate("a")) as stream:
            async for _ in stream:
                break
        for _ in range(1000):
            if not llm.client.stats().running:
                break
            await asyncio.sleep(0.005)
        assert llm.client.stats().used_pages == 0
        assert llm.client.stats().generated_tokens < 40


async def test_async_chat(script):
    script({user_turn("[user]Hi"): ids("Hello")})
    async with AsyncLLM() as llm:
        deltas = [delta async for delta in llm.chat([{"role": "user", "content": "Hi"}])]
        assert "".join(delta.text for delta in deltas) == "Hello"


def test_importing_the_package_is_cheap_and_names_are_there():
    """`import neoserve` loads none of its parts; the public names come when they are used."""
    code = (
        "import sys, neoserve; print(neoserve.__version__);"
        "assert not [name for name in sys.modules if name.startswith(('neoserve.', 'numpy', 'tokenizers'))];"
        "from neoserve import LLM, AsyncLLM, RequestOutput, SamplingParams; print(LLM.__name__);"
        "assert set(neoserve.__all__) <= set(dir(neoserve)) | {'__version__'}"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["0.1.0", "LLM"]
