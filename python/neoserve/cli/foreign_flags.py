"""Flags of other servers, answered with ours: users come from SGLang, vLLM and llama.cpp with a command line at hand.

Read only after a command line has failed to parse, so it costs nothing otherwise. A flag of ours is never looked up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

_ONE_MACHINE = "not needed: threads and memory come from the machine, and one process serves it"
_NO_GPU = "not applicable on CPUs"
_QUANTISED = "not needed: the weight format is read from the checkpoint"
_LATER = "not built yet"
_ALWAYS = "always on"


@dataclass(frozen=True, slots=True)
class Foreign:
    """One flag: whose it is and what to use here (a flag of ours, or the reason why there is none)."""

    owner: str
    answer: str

    def sentence(self, flag: str) -> str:
        """The line that the user sees."""
        verb = "use" if self.answer.startswith(("-", "MODEL", "neoserve")) else "it is"
        return f"{flag} is a flag of {self.owner}; {verb} {self.answer}"


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
        "--gpu-memory-utilization": f"{_NO_GPU}; --kv-cache-memory bounds the KV cache",
        "--kv-cache-memory-bytes": "--kv-cache-memory",
        "--swap-space --cpu-offload-gb --enforce-eager": _NO_GPU,
        "--tensor-parallel-size --pipeline-parallel-size -tp -pp": _ONE_MACHINE,
        "--enable-prefix-caching --no-enable-prefix-caching": _LATER,
        "--enable-chunked-prefill": f"{_ALWAYS}; --chunked-prefill-size sets the tokens of a step",
        "--uvicorn-log-level": "--log-level",
        "--enable-lora --lora-modules --speculative-config --enable-auto-tool-choice --tool-call-parser": _LATER,
        "--hf-overrides --hf-config-path": "not supported: the checkpoint's own configuration is used",
    },
)
_SGLANG = _table(
    "SGLang",
    {
        "--model-path": "MODEL or --model",
        "--mem-fraction-static": f"{_NO_GPU}; --kv-cache-memory bounds the KV cache",
        "--max-total-tokens": "--kv-cache-memory",
        "--tp --tp-size --dp --dp-size --data-parallel-size": _ONE_MACHINE,
        "--max-prefill-tokens": "--chunked-prefill-size",
        "--max-queued-reqs": "--max-queued-requests",
        "--attention-backend --sampling-backend": "--kernels",
        "--device": "not needed: NeoServe runs on CPUs only",
        "--enable-metrics": f"{_ALWAYS}; GET /metrics",
        "--disable-radix-cache --enable-hierarchical-cache --schedule-policy": _LATER,
        "--reasoning-parser --speculative-algorithm --disaggregation-mode --lora-paths": _LATER,
        "--disable-cuda-graph --cuda-graph-max-bs": _NO_GPU,
        "--random-seed": "not needed: give seed with each request",
    },
)
_LLAMA_CPP = _table(
    "llama.cpp",
    {
        "-m": "MODEL or --model",
        "-c --ctx-size": "--context-length",
        "-t -tb --threads-batch": "--threads",
        "-ngl --n-gpu-layers --gpu-layers --split-mode --main-gpu --tensor-split": _NO_GPU,
        "-n --n-predict --predict": "--max-tokens (generate, chat) or max_tokens of a request",
        "-np --parallel": "--max-running-requests",
        "-b --batch-size -ub --ubatch-size": "--chunked-prefill-size",
        "-p": "the PROMPT argument of generate",
        "-hf -hfr --hf-repo -hff --hf-file": "MODEL: org/name or org/name:SELECTOR",
        "-a --alias": "--served-model-name",
        "-cb --cont-batching": _ALWAYS,
        "-fa --flash-attn --jinja": _ALWAYS,
        "--chat-template-file": "--chat-template",
        "--mlock --no-mmap --numa -ctk -ctv --cache-type-k --cache-type-v": _LATER,
        "--override-kv": "--tokenizer-pre for the tokenizer's splitter; other keys are not overridden",
        "-i --interactive -cnv --conversation": "neoserve chat",
        "--temp": "--temperature",
        "--repeat-penalty": "--repetition-penalty",
    },
)
_SHARED = _table(
    "vLLM and SGLang",
    {
        "--quantization -q": _QUANTISED,
        "--kv-cache-dtype": _LATER,
        "--tokenizer --tokenizer-path --skip-tokenizer-init --revision": "not supported: a model brings its tokenizer",
        "--trust-remote-code": "not supported: code from a checkpoint is never run",
        "--download-dir": "not needed: set HF_HOME or XDG_CACHE_HOME",
        "--seed": "not needed: give seed with each request",
        "--nnodes --node-rank --dist-init-addr --enable-expert-parallel": _ONE_MACHINE,
        "--ssl-keyfile --ssl-certfile --root-path": "not built: put a proxy before the server",
    },
)

FLAGS: Mapping[str, Foreign] = MappingProxyType({**_LLAMA_CPP, **_SHARED, **_VLLM, **_SGLANG})


def answer(arguments: Sequence[str], own: Collection[str]) -> str | None:
    """The sentence for the first foreign flag among ``arguments`` that is not in ``own``, or None."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag not in own and flag in FLAGS:
            return FLAGS[flag].sentence(flag)
    return None
