"""Flags of other servers, answered with ours: users come from SGLang, vLLM and llama.cpp with a command line at hand.

Read only after a command line has failed to parse, so it costs nothing otherwise. A flag of ours is never looked up.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_ONE_MACHINE = "not needed: threads and memory come from the machine, and one process serves it"
_NO_GPU = "not applicable on CPUs"
_KV_MEMORY = f"{_NO_GPU}; --kv-cache-memory bounds the KV cache"
_QUANTISED = "not needed: the weight format is read from the checkpoint"
_LATER = "not built yet"
_ALWAYS = "always on"
_PROXY = "not built: put a proxy before the server"
_CHECKPOINT = "not supported: the checkpoint's own configuration is used"
_NOT_COMPILED = "not needed: nothing is compiled at the start"
_LOG_LEVEL = "--log-level: info logs one line a request, debug more"
# Commands take the model in one of these ways or both; what a command does not have is cut from its answer.
_MODEL = "MODEL or --model"

_NAME = re.compile(r"--[a-z][a-z-]*|\bMODEL\b")
_USABLE = ("-", "MODEL", "neoserve", "the ")
# Flags of ours that requests have as fields.
_FIELDS = ("max-tokens", "temperature", "top-p", "top-k", "min-p", "repetition-penalty", "seed")
REQUEST_FIELDS: Mapping[str, str] = MappingProxyType({f"--{name}": name.replace("-", "_") for name in _FIELDS})
_WHY_NOT = {("bench", "--context-length"): "bench sets the context from its tests"}


@dataclass(frozen=True, slots=True)
class Foreign:
    """One flag: whose it is and what to use here (a flag of ours, or the reason why there is none)."""

    owner: str
    answer: str

    def sentence(self, flag: str, command: str, flags: Mapping[str, Collection[str]]) -> str:
        """The line that the user of ``command`` sees; ``flags`` are those of every command.

        What is suggested exists: a flag that ``command`` does not have is told with the commands or the request field
        that have it.
        """
        own = flags.get(command, ())
        if command in flags and _MODEL in self.answer and not {"MODEL", "--model"} & set(own):
            return f"{flag} is a flag of {self.owner}; {command} takes no model"
        text = _model_of(own, self.answer)
        missing = [name for name in _NAME.findall(text) if name not in own]
        for name in missing:
            text = text.replace(name, _elsewhere(name, command, flags))
        verb = "use" if text.startswith(_USABLE) else "it is"
        notes = [_WHY_NOT.get((command, name), f"{command} has no {name}") for name in missing if command in flags]
        return "; ".join([f"{flag} is a flag of {self.owner}", f"{verb} {text}", *notes])


def _model_of(own: Collection[str], text: str) -> str:
    for name in ("MODEL", "--model"):
        if name in own and not {"MODEL", "--model"} <= set(own):
            return text.replace(_MODEL, name)
    return text


def _elsewhere(name: str, command: str, flags: Mapping[str, Collection[str]]) -> str:
    field = f"the request field {REQUEST_FIELDS[name]}" if name in REQUEST_FIELDS else None
    if field is not None and command == "serve":
        return field
    homes = [other for other, own in flags.items() if name in own]
    return f"{name} of {', '.join(homes)}" + ("" if field is None else f", or {field}")


def _table(owner: str, rows: Mapping[str, str]) -> dict[str, Foreign]:
    return {flag: Foreign(owner, answer) for flags, answer in rows.items() for flag in flags.split()}


_VLLM = _table(
    "vLLM",
    {
        "--max-model-len": "--context-length",
        "--max-num-seqs": "--max-running-requests",
        "--max-num-batched-tokens": "--chunked-prefill-size",
        "--block-size": "--page-size",
        "--tokenizer-mode --config-format --load-format": _QUANTISED,
        "--gpu-memory-utilization": _KV_MEMORY,
        "--kv-cache-memory-bytes": "--kv-cache-memory",
        "--swap-space --cpu-offload-gb --enforce-eager": _NO_GPU,
        "--tensor-parallel-size --pipeline-parallel-size -tp -pp": _ONE_MACHINE,
        "--enable-prefix-caching": f"{_ALWAYS}, unless --disable-radix-cache is given",
        "--no-enable-prefix-caching": "--disable-radix-cache",
        "--enable-chunked-prefill": f"{_ALWAYS}; --chunked-prefill-size sets the tokens of a step",
        "--uvicorn-log-level": "--log-level",
        "--enable-lora --lora-modules --speculative-config --enable-auto-tool-choice --tool-call-parser": _LATER,
        "--hf-overrides --hf-config-path": _CHECKPOINT,
        "--disable-log-requests --enable-log-requests --no-enable-log-requests": _LOG_LEVEL,
        "--generation-config --override-generation-config": "not supported: requests override the checkpoint",
        "--max-logprobs": "fixed: at most 20 alternatives a token",
        "--allowed-origins --allowed-methods --allowed-headers --allow-credentials": _PROXY,
        "--limit-mm-per-prompt": "not needed: prompts are text only",
        "--compilation-config": _NOT_COMPILED,
        "--kv-transfer-config": _LATER,
        "--task --runner": "not needed: the server generates text, nothing else",
    },
)
_SGLANG = _table(
    "SGLang",
    {
        "--model-path": _MODEL,
        "--mem-fraction-static": _KV_MEMORY,
        "--max-total-tokens": "--kv-cache-memory",
        "--tp --tp-size --dp --dp-size --data-parallel-size": _ONE_MACHINE,
        "--max-prefill-tokens": "--chunked-prefill-size",
        "--max-queued-reqs": "--max-queued-requests",
        "--attention-backend --sampling-backend": "--kernels",
        "--device": "not needed: NeoServe runs on CPUs only",
        "--enable-metrics": f"{_ALWAYS}; GET /metrics",
        "--enable-hierarchical-cache --schedule-policy": _LATER,
        "--reasoning-parser --speculative-algorithm --disaggregation-mode --lora-paths": _LATER,
        "--disable-cuda-graph --cuda-graph-max-bs": _NO_GPU,
        "--random-seed": "--seed",
        "--watchdog-timeout --grammar-backend --is-embedding": _LATER,
        "--log-requests --log-requests-level": _LOG_LEVEL,
        "--enable-torch-compile": _NOT_COMPILED,
    },
)
_LLAMA_CPP = _table(
    "llama.cpp",
    {
        "-m": _MODEL,
        "-c --ctx-size": "--context-length",
        "-t -tb --threads-batch": "--threads",
        "-ngl --n-gpu-layers --gpu-layers -sm --split-mode -mg --main-gpu -ts --tensor-split": _NO_GPU,
        "-n --n-predict --predict": "--max-tokens",
        "-np --parallel": "--max-running-requests",
        "-b --batch-size -ub --ubatch-size": "--chunked-prefill-size",
        "-p": "the PROMPT argument of generate",
        "-hf -hfr --hf-repo -hff --hf-file": f"{_MODEL}: org/name, or org/name:SELECTOR",
        "-a --alias": "--served-model-name",
        "-cb --cont-batching": _ALWAYS,
        "-fa --flash-attn --jinja": _ALWAYS,
        "--chat-template-file": "--chat-template",
        "--mlock --no-mmap -ctk -ctv --cache-type-k --cache-type-v": _LATER,
        "--override-kv": "--tokenizer-pre for the tokenizer's splitter; other keys are not overridden",
        "-i --interactive -cnv --conversation": "neoserve chat",
        "--temp --temperature": "--temperature",
        "--top-k": "--top-k",
        "--top-p": "--top-p",
        "--min-p": "--min-p",
        "--repeat-penalty": "--repetition-penalty",
        "-mu --model-url": f"{_MODEL}: org/name, org/name:SELECTOR, or a file that you have fetched",
        "-md --model-draft --embeddings --embedding --lora --lora-scaled": _LATER,
        "--slots --no-slots": "not built: GET /metrics tells the load",
        "--no-webui --webui": "not needed: there is no web page",
        "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale": _CHECKPOINT,
        "-to --timeout": _PROXY,
        "--no-warmup --warmup": "not needed: the start warms nothing up",
        "--threads-http": "not needed: HTTP has its own thread",
        "-v --verbose --log-verbose": _LOG_LEVEL,
        "--chat-template-kwargs": "the request field chat_template_kwargs",
    },
)
_SHARED = _table(
    "vLLM and SGLang",
    {
        "--quantization -q": "--quantization int8, int4 or bf16; quantised checkpoints need no flag",
        "--kv-cache-dtype": _LATER,
        "--tokenizer --tokenizer-path --skip-tokenizer-init --revision": "not supported: a model brings its tokenizer",
        "--trust-remote-code": "not supported: code from a checkpoint is never run",
        "--download-dir": "not needed: set HF_HOME or XDG_CACHE_HOME",
        "--seed": "--seed",
        "--nnodes --node-rank --dist-init-addr --enable-expert-parallel": _ONE_MACHINE,
        "--ssl-keyfile --ssl-certfile --root-path": _PROXY,
    },
)

FLAGS: Mapping[str, Foreign] = MappingProxyType({**_LLAMA_CPP, **_SHARED, **_VLLM, **_SGLANG})


def flags_of(commands: Mapping[str, Any]) -> dict[str, set[str]]:
    """The flags of every command, and the names of its arguments as its help shows them."""
    return {
        name: {text for parameter in one.params for text in (*parameter.opts, parameter.metavar) if text}
        for name, one in commands.items()
    }


def answer(arguments: Sequence[str], command: str, flags: Mapping[str, Collection[str]]) -> str | None:
    """The sentence for the first foreign flag among ``arguments`` that ``command`` does not have, or None.

    ``flags`` are the flags of every command, and MODEL where a command takes it as an argument.
    """
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag not in flags.get(command, ()) and flag in FLAGS:
            return FLAGS[flag].sentence(flag, command, flags)
    return None
