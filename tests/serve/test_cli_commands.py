"""The commands end to end with a tiny random model on the native engine."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path

import httpx
import pytest

from neoserve.cli.main import main

from .process import ServerProcess
from .tiny_served import make_tiny_model

pytest.importorskip("neoserve._native", reason="the native library is not built")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny-model")))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of one command line."""
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_is_reproducible(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("generate", "Once", "--model", model, "--max-tokens", "12", "--threads", "1", "--context-length", "128")
    first = run(capsys, *words, "--seed", "7", "--temperature", "1")
    again = run(capsys, *words, "--seed", "7", "--temperature", "1")
    other = run(capsys, *words, "--seed", "8", "--temperature", "1")
    assert first[0] == 0
    assert first[1].strip()
    assert first == again
    assert first[1] != other[1]


def test_generate_reads_standard_input(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", model, "--max-tokens", "4", "--temperature", "0", "--threads", "1", "--context-length", "64")
    plain = run(capsys, "generate", "Once", *words)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once"))
    assert run(capsys, "generate", "-", *words) == plain


def test_chat_keeps_going_until_the_input_ends(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/reset\nhello\n/exit\nnever\n"))
    words = ("--max-tokens", "5", "--temperature", "0", "--threads", "1", "--context-length", "256")
    code, out, err = run(capsys, "chat", model, *words)
    assert (code, err) == (0, "")
    first, _, second = out.partition("the conversation is forgotten\n")
    assert first == second
    assert first.strip("\n")


def test_a_bad_sampling_value_is_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "x", "--model", model, "--temperature", "-1", "--context-length", "64")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "temperature is -1" in err


def test_a_prompt_that_does_not_fit_is_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "generate", "x" * 500, "--model", model, "--context-length", "64")
    assert code == 1
    assert err.count("\n") == 1
    assert "64" in err


def test_inspect(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "inspect", model)
    assert (code, err) == (0, "")
    assert "llama" in out
    assert "4 heads of 32, 2 for KV" in out
    code, out, _ = run(capsys, "inspect", model, "--json")
    found = json.loads(out)
    assert found["config"]["num_layers"] == 2
    assert found["parameters"] == sum(item["nbytes"] for item in found["stored"]) // 4
    assert found["program"] is None


def test_inspect_program(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, plain, _ = run(capsys, "inspect", model, "--program")
    assert code == 0
    assert "# row " not in plain
    assert "FLOP" in plain
    code, bound, _ = run(capsys, "inspect", model, "--rows", "--kernels", "reference")
    assert code == 0
    assert "# row linear_f32_reference" in bound or "# row linear_bf16_reference" in bound
    assert len(bound.splitlines()) == len(plain.splitlines())


def test_pull_prints_where_the_model_is(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "pull", model)
    assert code == 0
    assert model in out


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "doctor", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["threads"] >= 1
    assert report["threads"] <= report["allowed_cpus"]
    chosen = [row["op"] for row in report["rows"] if row["chosen"]]
    assert len(chosen) == len(set(chosen)) == len({row["op"] for row in report["rows"]})
    assert all(row["reason"] for row in report["rows"] if not row["chosen"])
    code, out, _ = run(capsys, "doctor", "--kernels", "reference")
    assert code == 0
    lines = [line for line in out.splitlines() if "chosen" in line and "rejected" not in line]
    assert lines
    assert all("reference" in line for line in lines)


def test_doctor_refuses_unknown_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "doctor", "--kernels", "avx9000")
    assert (code, out) == (1, "")
    assert "avx9000" in err
    assert "reference" in err


def test_doctor_fingerprint(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for options in ([], ["--threads", "1"], ["--kernels", "reference"], ["--quantization", "int8"]):
        code, out, err = run(capsys, "doctor", "--fingerprint", model, "--json", *options)
        assert (code, err) == (0, "")
        found.append(json.loads(out))
    plain, one_thread, portable, int8 = found
    assert not plain["exempt"] or plain["formats"] == ["bf16"]
    assert one_thread["logits"] == plain["logits"]
    assert int8["formats"] == ["int8_channel"]
    assert all("reference" in row for row in portable["rows"])
    if not plain["exempt"]:
        assert portable["logits"] == plain["logits"]
    assert int8["logits"] != plain["logits"]


def test_doctor_fingerprint_options_need_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "doctor", "--quantization", "int8")
    assert (code, out) == (1, "")
    assert "--fingerprint MODEL" in err


def test_bench(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-p", "8,16", "-n", "4", "-t", "1", "--batch", "1,2", "-r", "1", "--json")
    code, out, err = run(capsys, "bench", model, *words)
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert [(line["test"], line["batch"]) for line in report["results"]] == [
        ("pp8", 1),
        ("pp8", 2),
        ("pp16", 1),
        ("pp16", 2),
        ("tg4", 1),
        ("tg4", 2),
    ]
    assert all(line["tokens_per_second"] > 0 and line["threads"] == 1 for line in report["results"])
    assert all((line["bandwidth_share"] is None) == (line["kind"] == "prefill") for line in report["results"])
    assert report["ceilings"][0]["read_gb_per_second"] > 0


def test_bench_without_a_test_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "bench", model, "-p", "0", "-n", "0")
    assert code == 1
    assert "nothing to measure" in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["serve", "--max-model-len", "4096"], "use --context-length"),
        (["serve", "x.gguf", "-ngl", "99"], "not applicable on CPUs"),
        (["bench", "-ngl", "99"], "not applicable on CPUs"),
        (["serve", "-c", "4096", "-m", "x.gguf"], "use --context-length"),
        (["serve", "--tp=2"], "not needed"),
        (["generate", "hi", "--temp", "1"], "use --temperature"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["no-such-command"], "no-such-command"),
        (["serve", "--port", "many"], "--port"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert part in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["serve", "--api-key", "secret"], "--api-key"),
        (["serve", "--kv-cache-memory", "lots"], "--kv-cache-memory"),
        (["serve", "--page-size", "17"], "page_size"),
        (["serve", "--dtype", "int3"], "dtype"),
        (["serve", "--port", "70000"], "port"),
        (["serve", "a", "--model", "b"], "--model"),
        (["inspect", "/no/such/file.gguf"], "/no/such/file.gguf"),
        (["chat", "/no/such/file.gguf"], "/no/such/file.gguf"),
        (["bench", "/no/such/file.gguf"], "/no/such/file.gguf"),
    ],
)
def test_what_cannot_be_met_is_one_line_and_exit_code_1(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert err.startswith("neoserve: ")
    assert part in err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("neoserve ")
    for command in ("serve", "chat", "generate", "pull", "inspect", "doctor", "bench"):
        code, out, _ = run(capsys, command, "--help")
        assert code == 0
        assert out.startswith(f"Usage: neoserve {command}")
    assert run(capsys)[0] == 2


def test_serve_end_to_end(model: str) -> None:
    words = ("serve", model, "--port", "0", "--served-model-name", "tiny", "--served-model-name", "alias")
    options = ("--threads", "1", "--context-length", "128", "--max-running-requests", "4")
    with ServerProcess("-m", "neoserve", *words, *options) as process:
        url = process.wait_until_ready()
        summary = process.out[0]
        assert "128 tokens" in summary
        assert "1 thread" in summary
        body = {"model": "alias", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 3}
        first = httpx.post(f"{url}/v1/chat/completions", json=body).json()
        again = httpx.post(f"{url}/v1/chat/completions", json=body).json()
        assert first["choices"] == again["choices"]
        assert first["model"] == "alias"
        assert first["system_fingerprint"] == again["system_fingerprint"]
        assert first["system_fingerprint"].startswith("fp_")
        card = httpx.get(f"{url}/v1/models/tiny").json()
        assert card["max_model_len"] == 128
        assert card["details"]["threads"] == 1
        process.signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert not any("Traceback" in line for line in process.err)


def test_a_chat_template_of_the_users_own(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "short.jinja"
    template.write_text("{{ raise_exception('my own template') }}")
    words = ("hi", "--chat", "--model", model, "--chat-template", str(template), "--context-length", "64")
    code, _, err = run(capsys, "generate", *words)
    assert code == 1
    assert "my own template" in err
    code, _, err = run(capsys, "generate", "hi", "--model", model, "--chat-template", str(tmp_path / "none"))
    assert code == 1
    assert err.count("\n") == 1
