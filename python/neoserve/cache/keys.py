"""What a cached page is known by: token bytes, the namespace they belong to, and chained digests (design D3)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

TOKEN_BYTES = 4
"""Bytes of one token id in a key: little-endian u32."""


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """The prompt of a request as the prefix cache looks it up: ``tokens`` as token_bytes gives them."""

    namespace: bytes
    tokens: bytes


def token_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32, the form in which they are compared and hashed."""
    return np.asarray(ids, "<u4").tobytes()


def token_ids(data: bytes) -> list[int]:
    """The ids that token_bytes made ``data`` of."""
    ids: list[int] = np.frombuffer(data, "<u4").tolist()
    return ids


def digest_of(fields: Iterable[tuple[str, str]]) -> bytes:
    """SHA-256 over named fields. Every name and value is preceded by its length, so that no two lists collide."""
    digest = hashlib.sha256()
    for field in fields:
        for text in field:
            # A lone surrogate is no character, but as good a salt as any.
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def namespace_digest(model: bytes, cache_salt: str | None, extra_key: str | None) -> bytes:
    """The namespace of a request: only requests of equal namespace may share pages.

    ``model`` identifies all that the bits of a page depend on beside the tokens (see engine.load). Salt and extra
    key are fields of their own: neither can be spelled so that it equals the other, or none.
    """
    fields = [("model", model.hex())]
    fields += [("cache_salt", cache_salt)] if cache_salt is not None else []
    fields += [("extra_key", extra_key)] if extra_key is not None else []
    return digest_of(fields)


def page_keys(parent: bytes, tokens: bytes, page_size: int) -> Iterator[bytes]:
    """The key of every full page of ``tokens``: SHA-256 of the key before it and the page's token bytes.

    ``parent`` is the key of the page before the first one; for the first page of a prompt, its namespace.
    """
    width = page_size * TOKEN_BYTES
    for end in range(width, len(tokens) + 1, width):
        parent = hashlib.sha256(parent + tokens[end - width : end]).digest()
        yield parent
