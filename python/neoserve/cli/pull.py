"""``neoserve pull``: fetches a model and nothing else."""

from __future__ import annotations

from neoserve.cli import options as opt


def pull(model: opt.ModelArgument = None, model_option: opt.ModelOption = None) -> None:
    """Fetch a model (or find it on this machine) and print where it is."""
    from neoserve.engine.inspection import fetch_model

    found = fetch_model(opt.chosen_model(model, model_option))
    print(f"{found.served_name}: {found.path} ({found.origin})")
