"""Writes the tiny random models and what transformers computes for them (float32, eager attention).

Run with an interpreter that has torch and transformers (versions in ``tiny/VERSIONS.json``):

    python tests/models/golden/make_tiny.py

Each folder ``tiny/NAME`` gets config.json, generation_config.json, the weights, and expected.npz with ``input_ids``
int64 [L] and ``logits`` float32 [L, V]. The script stops if the float32 logits are further than 2e-5 from float64,
if a scaling case gives the logits of its base, or if the logits are too flat to show an error.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import safetensors
import torch
import transformers
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, Case, input_ids, weights

ROOT = Path(__file__).parent / "tiny"
WORK = ROOT.with_name("tiny.new")  # takes the place of ROOT when all is made
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
UNCHANGED = {"llama-dynamic"}  # dynamic scaling acts only beyond the trained length


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_weights(case: Case, folder: Path) -> None:
    """One file, several with an index, or a link to another case's file."""
    if case.weights_of is not None:
        (folder / "model.safetensors").symlink_to(Path("..") / case.weights_of / "model.safetensors")
        return
    tensors = {name: torch.from_numpy(value).to(DTYPES[case.storage]) for name, value in weights(case).items()}
    if case.shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(case.shards):
        file = f"model-{shard + 1:05d}-of-{case.shards:05d}.safetensors"
        part = names[shard :: case.shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def write_checkpoint(case: Case, folder: Path) -> None:
    folder.mkdir(parents=True)
    write_json(folder / "config.json", case.config)
    generation = {"bos_token_id": case.config["bos_token_id"], "eos_token_id": case.eos, "do_sample": False}
    write_json(folder / "generation_config.json", generation)
    write_weights(case, folder)


def run(folder: Path, ids: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Logits [L, V] of transformers; every tensor of the file must have been used."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    leftover = {key: sorted(value) for key, value in info.items() if value and key != "error_msgs"}
    leftover.pop("missing_keys", None) if leftover.get("missing_keys") == ["lm_head.weight"] else None
    if leftover or info.get("error_msgs"):
        raise SystemExit(f"{folder.name}: transformers did not load it cleanly: {leftover} {info.get('error_msgs')}")
    with torch.no_grad():
        return model.eval()(torch.from_numpy(ids)[None]).logits[0].numpy()


def make(case: Case) -> np.ndarray:
    folder = WORK / case.name
    write_checkpoint(case, folder)
    ids = input_ids(case)
    logits = run(folder, ids, torch.float32)
    gap = float(np.abs(logits - run(folder, ids, torch.float64)).max())
    spread = float(logits.std())
    size = sum(f.lstat().st_size for f in folder.iterdir())
    print(f"{case.name:20} spread {spread:5.2f}  float32 to float64 {gap:.1e}  {size / 1e3:6.0f} kB")
    if gap > 2e-5 or spread < 1.5:
        raise SystemExit(f"{case.name}: not fit as a golden model")
    np.savez(folder / "expected.npz", input_ids=ids, logits=logits.astype(np.float32))
    return logits


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    shutil.rmtree(WORK, ignore_errors=True)
    logits: dict[str, np.ndarray] = {}
    for case in CASES:
        logits[case.name] = make(case)
        if case.weights_of is not None and case.name not in UNCHANGED:
            change = float(np.abs(logits[case.name] - logits[case.weights_of]).max())
            print(f"{'':20} differs from {case.weights_of} by {change:.2f}")
            if change < 0.1:
                raise SystemExit(f"{case.name}: does not differ from {case.weights_of}")
    versions = {m.__name__: m.__version__ for m in (torch, transformers, safetensors, np)}
    write_json(WORK / "VERSIONS.json", versions)
    total = sum(f.lstat().st_size for f in WORK.rglob("*") if not f.is_dir())
    print(f"total {total / 1e6:.2f} MB")
    shutil.rmtree(ROOT, ignore_errors=True)
    WORK.rename(ROOT)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    main()
