"""Rotary position embedding: what a config.json says, in any of its spellings, as RopeConfig."""

from __future__ import annotations

from typing import Final, cast, get_args

from neoserve.formats.fields import LIMITS, Fields
from neoserve.types.errors import CheckpointError, UnsupportedModelError
from neoserve.types.model import RopeConfig, RopeKind

KNOWN_KINDS: Final[tuple[str, ...]] = get_args(RopeKind)
LAYER_TYPES: Final = ("full_attention", "sliding_attention")

_KNOWN_KEYS: Final = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",  # a remark of the authors, without effect
    }
)
_BIG: Final = 1e12


def read_rope(config: Fields, *, head_dim: int, max_position: int, theta: float) -> RopeConfig:
    """The one rotary embedding of a model; ``theta`` is the architecture's default base."""
    table = _scaling_table(config)
    if table is not None and any(name in table for name in LAYER_TYPES):
        raise table.fault(LAYER_TYPES[0], "absent: this architecture has one rotary embedding for all layers")
    return _rope(config, table, head_dim=head_dim, max_position=max_position, theta=theta, theta_field="rope_theta")


def read_layer_ropes(config: Fields, *, head_dim: int, max_position: int) -> tuple[RopeConfig, RopeConfig]:
    """(global, local) rotary embeddings of Gemma 3.

    Old spelling: ``rope_theta`` and ``rope_scaling`` for global layers, ``rope_local_base_freq`` for local ones.
    New spelling: ``rope_parameters`` with an object per layer type. Scaling touches global layers only.
    """
    bases = (1_000_000.0, 10_000.0)
    fields = ("rope_theta", "rope_local_base_freq")
    table = _scaling_table(config)
    by_layer = table is not None and any(name in table for name in LAYER_TYPES)
    parts = [cast(Fields, table).table(name) for name in LAYER_TYPES] if by_layer else [table, None]
    ropes = []
    for part, theta, theta_field in zip(parts, bases, fields, strict=True):
        ropes.append(
            _rope(config, part, head_dim=head_dim, max_position=max_position, theta=theta, theta_field=theta_field)
        )
    return ropes[0], ropes[1]


def _scaling_table(config: Fields) -> Fields | None:
    """``rope_parameters`` (new) or ``rope_scaling`` (old); both may stand side by side only if they agree."""
    old, new = config.table("rope_scaling"), config.table("rope_parameters")
    if old is None or new is None:
        return new if old is None else old
    for name in old.names():
        if name in old and old.get(name) != new.get(name):
            raise CheckpointError(
                f"{config.file}: rope_scaling.{name} is {old.get(name)!r} but rope_parameters.{name} is "
                f"{new.get(name)!r}; remove one of the two"
            )
    return new


def _rope(
    config: Fields, table: Fields | None, *, head_dim: int, max_position: int, theta: float, theta_field: str
) -> RopeConfig:
    base = config.number(theta_field, 1.0, _BIG, theta)
    fraction = config.number("partial_rotary_factor", 1e-3, 1.0, 1.0)
    if table is None:
        return RopeConfig(theta=base, rotary_dim=_rotary_dim(config, head_dim, fraction))
    kind = _kind(table)
    unknown = sorted(name for name in table.names() if name not in _KNOWN_KEYS and name in table)
    if unknown:
        raise UnsupportedModelError(
            f"{table.file}: {table.prefix}{unknown[0]} is {table.get(unknown[0])!r}, which is not supported; "
            f"supported: {', '.join(sorted(_KNOWN_KEYS))}"
        )
    base = table.number("rope_theta", 1.0, _BIG, base)
    fraction = table.number("partial_rotary_factor", 1e-3, 1.0, fraction)
    rotary_dim = _rotary_dim(config, head_dim, fraction)
    match kind:
        case "default":
            return RopeConfig(theta=base, rotary_dim=rotary_dim)
        case "linear":
            return RopeConfig(theta=base, rotary_dim=rotary_dim, kind=kind, factor=_factor(table))
        case "dynamic":
            return RopeConfig(
                theta=base,
                rotary_dim=rotary_dim,
                kind=kind,
                factor=_factor(table),
                # As in transformers: scaling begins beyond max_position_embeddings, whatever the table says.
                original_max_position=max_position,
            )
        case "llama3":
            return _llama3(table, base, rotary_dim, _original(config, table, max_position))
        case "yarn":
            return _yarn(table, base, rotary_dim, max_position, _original(config, table, max_position))


def _kind(table: Fields) -> RopeKind:
    new, legacy = table.text("rope_type"), table.text("type")
    if new is not None and legacy is not None and new != legacy:
        raise CheckpointError(
            f"{table.file}: {table.prefix}rope_type is {new!r} but {table.prefix}type is {legacy!r}; remove one of them"
        )
    kind = new or legacy or "default"
    if kind not in KNOWN_KINDS:
        raise UnsupportedModelError(
            f"{table.file}: {table.prefix}rope_type {kind!r} is not supported; supported: {', '.join(KNOWN_KINDS)}"
        )
    return cast(RopeKind, kind)


def _rotary_dim(config: Fields, head_dim: int, fraction: float) -> int:
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(
            f"{config.file}: partial_rotary_factor {fraction:g} of head_dim {head_dim} gives {rotary_dim} rotated "
            "columns; it must be an even number of at least 2"
        )
    return rotary_dim


def _factor(table: Fields) -> float:
    return table.number("factor", 1.0, 1e6)


def _original(config: Fields, table: Fields, max_position: int) -> int:
    """Context length of pre-training: beside the table (as some models have it), in it, or the model's own."""
    name = "original_max_position_embeddings"
    outer = config.optional_integer(name, 1, LIMITS["max_position"])
    return outer if outer is not None else table.integer(name, 1, LIMITS["max_position"], max_position)


def _llama3(table: Fields, theta: float, rotary_dim: int, original: int) -> RopeConfig:
    low, high = table.number("low_freq_factor", 1e-6, 1e6), table.number("high_freq_factor", 1e-6, 1e6)
    if low >= high:
        raise table.fault("low_freq_factor", f"below high_freq_factor ({high:g})")
    return RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        kind="llama3",
        factor=_factor(table),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(table: Fields, theta: float, rotary_dim: int, max_position: int, original: int) -> RopeConfig:
    # The paper's authors leave the factor out where the two lengths already tell it.
    factor = table.number("factor", 1.0, 1e6, max(1.0, max_position / original))
    fast, slow = table.number("beta_fast", 1e-6, 1e6, 32.0), table.number("beta_slow", 1e-6, 1e6, 1.0)
    if fast < slow:
        raise table.fault("beta_fast", f"at least beta_slow ({slow:g})")
    return RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=table.optional_number("attention_factor", 1e-6, 1e6),
        mscale=table.optional_number("mscale", 0.0, 1e6),
        mscale_all_dim=table.optional_number("mscale_all_dim", 0.0, 1e6),
        truncate=table.flag("truncate", True),
    )
