"""Golden greedy outputs and perplexities of three published GGUF models, by transformers in float32.

Run with an interpreter that has torch, transformers and gguf; one model at a time keeps memory under 4 GB:

    python tests/models/golden/make_real.py greedy MODELS_FOLDER [smollm2 qwen gemma]
    python tests/models/golden/make_real.py perplexity MODELS_FOLDER TEXT_FILE [smollm2 qwen gemma]

``greedy`` writes real/NAME.json: for each prompt its text and ids, 64 output ids (arg max; end-of-sequence ids do not
end it), and at each step the gap between the two highest logits. ``perplexity`` adds to real/perplexity.json; what it
measures is told in ``measure`` there, and neither the text nor its tokens are stored, only digests.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
import gguf_oracle
from prompts import PROMPTS, render

ROOT = Path(__file__).parent / "real"
MODELS = {
    "smollm2": "smollm2-135m-instruct-q4_1.gguf",
    "qwen": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "gemma": "gemma-3-270m-q4_k_m.gguf",
}
CHAT = {"smollm2": True, "qwen": True, "gemma": False}
NEW_TOKENS = 64
TEXT_BYTES = 100 * 1024
WINDOW = 512
MEASURE = (
    "The first 102400 bytes of the text are decoded as UTF-8 and tokenised in one piece, without special tokens. The "
    "tokens are cut into consecutive windows of 512; a last window that is not full is dropped. For a model whose "
    "file asks for BOS, a window is BOS and 511 tokens of the text instead. Every window is run alone, from position "
    "0. nll[w] is the sum over positions 1 to 511 of -log softmax(logits[i - 1])[token[i]], in nats (float32 logits, "
    "log softmax in float64). perplexity = exp(sum(nll) / (511 * len(nll))), over the windows scored; windows counts "
    "all of the text. tokens_sha256 is of all tokens of the text as little-endian uint32, BOS not included."
)


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def generate(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy ids and top-2 gaps; gaps are read from one pass over the whole sequence, without a KV cache."""
    ids = torch.tensor([prompt])
    past, output = None, []
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            step = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = step.past_key_values
            output.append(int(step.logits[0, -1].argmax()))
            ids = torch.tensor([output[-1:]])
        whole = model(torch.tensor([prompt + output[:-1]]), use_cache=False, logits_to_keep=NEW_TOKENS).logits[0]
    best = whole.topk(2, dim=-1)
    gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
    for index, (token, again) in enumerate(zip(output, best.indices[:, 0].tolist(), strict=True)):
        if token != again and gaps[index] > 1e-3:
            raise SystemExit(f"step {index}: cached pass says {token}, whole pass {again}, gap {gaps[index]}")
    return output, gaps


def make_greedy(name: str, path: Path) -> None:
    model, tokenizer, bos = gguf_oracle.load_model(path), gguf_oracle.Tokenizer(path), gguf_oracle.adds_bos(path)
    cases = []
    for prompt in PROMPTS:
        text = render(prompt, chat=CHAT[name])
        ids = ([] if bos is None else [bos]) + tokenizer.encode(text)
        output, gaps = generate(model, ids)
        print(f"{name} {prompt.name} {len(ids)} tokens, least gap {min(gaps):.1e}: {tokenizer.decode(output)[:100]!r}")
        rounded = [float(f"{gap:.4g}") for gap in gaps]
        cases.append({"name": prompt.name, "text": text, "prompt_ids": ids, "output_ids": output, "gaps": rounded})
    head = {
        "model": {"file": path.name, "bytes": path.stat().st_size, "sha256": gguf_oracle.sha256(path)},
        "oracle": {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32"},
        "adds_bos": bos is not None,
    }
    body = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases)
    lines = json.dumps(head, indent=1)[:-2] + f',\n "prompts": [\n{body}\n ]\n}}\n'
    ROOT.mkdir(exist_ok=True)
    (ROOT / f"{name}.json").write_text(lines, encoding="utf-8")


def window_nll(model: Any, window: list[int]) -> float:
    """Negative log likelihood (nats) of positions 1 on."""
    ids = torch.tensor([window])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1]
    total = 0.0
    for start in range(0, len(window) - 1, 64):  # float64 rows of a large vocabulary, a few at a time
        rows = logits[start : start + 64].double()
        wanted = ids[0, 1 + start : 1 + start + rows.shape[0], None]
        total += float((rows.logsumexp(-1) - rows.gather(1, wanted)[:, 0]).sum())
    return total


def read_perplexities() -> dict[str, Any]:
    file = ROOT / "perplexity.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"models": {}}


def make_perplexity(name: str, path: Path, text_path: Path) -> None:
    """Scores the windows that perplexity.json does not hold yet, and saves after each: it can be stopped any time."""
    raw = text_path.read_bytes()[:TEXT_BYTES]
    model, tokenizer, bos = gguf_oracle.load_model(path), gguf_oracle.Tokenizer(path), gguf_oracle.adds_bos(path)
    tokens = tokenizer.encode(raw.decode("utf-8"))
    head = [] if bos is None else [bos]
    step = WINDOW - len(head)
    windows = [head + tokens[start : start + step] for start in range(0, len(tokens) - step + 1, step)]
    entry = {
        "file": path.name,
        "bos": bos,
        "tokens": len(tokens),
        "tokens_sha256": hashlib.sha256(np.asarray(tokens, "<u4").tobytes()).hexdigest(),
        "windows": len(windows),
        "window": WINDOW,
    }
    text = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    before = read_perplexities()["models"].get(name, {})
    nll = before.get("nll", []) if all(before.get(key) == value for key, value in entry.items()) else []
    begin = time.time()
    for index in range(len(nll), len(windows)):
        nll.append(round(window_nll(model, windows[index]), 4))
        perplexity = math.exp(sum(nll) / (len(nll) * (WINDOW - 1)))
        models = read_perplexities()["models"] | {name: {**entry, "perplexity": perplexity, "nll": nll}}
        write_json(ROOT / "perplexity.json", {"measure": MEASURE, "text": text, "models": models})
        print(f"{name} {index + 1}/{len(windows)} {perplexity:.4f} {time.time() - begin:.0f} s", flush=True)


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    verb, folder = arguments[0], Path(arguments[1])
    names = arguments[3 if verb == "perplexity" else 2 :] or list(MODELS)
    for name in names:
        if verb == "greedy":
            make_greedy(name, folder / MODELS[name])
        else:
            make_perplexity(name, folder / MODELS[name], Path(arguments[2]))


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("greedy", "perplexity"):
        raise SystemExit(__doc__)
    main(sys.argv[1:])
