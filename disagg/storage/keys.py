"""Keys of stored pages: a chain of cryptographic hashes over everything that determines a page's content.

A page's *link* is the hash of the previous page's link and the page's tokens, as vLLM's prefix cache chains its block
hashes. The first link is the hash of the model, the layout and the tenant's salt. The key of a part has 192 bits of
the hash of the page's link, then 64 bits of the hash of the part, so the keys of all parts of a page begin alike. All
hashes are BLAKE2b. A key is trusted without a comparison of tokens, so it must be infeasible to construct two prompts
with equal keys.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import TOKEN_BYTES
from disagg.storage.contract import ITEM_BYTES, KEY_BYTES
from disagg.storage.parts import PagePart, PartGrid

# BLAKE2b's personalization separates the kinds of hash; each string has at most 16 bytes.
_MODEL, _ROOT, _LINK, _PART = b"disagg kv model", b"disagg kv root", b"disagg kv link", b"disagg kv part"
_PAGE, _STATE = b"disagg kv page", b"disagg kv state"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Everything except tokens and salt that determines a page's content."""

    fingerprint: str
    """Hash of the model's configuration and weights (`GroupInfo.fingerprint`)."""
    grid: PartGrid
    """Layout, page size and parts. Pages of another grid have other keys."""
    variant: str = ""
    """Further settings that change bits of KV, such as the deterministic mode or the dtype of the computation."""


class PageKeys:
    """Computes the keys of one model's pages. Immutable, so thread-safe."""

    def __init__(self, model: StoredModel) -> None:
        grid = model.grid
        self._kv_classes = len(grid.layout.classes)
        self.page_size = grid.page_size
        """Tokens of a page."""
        self._model = _hash(
            _MODEL,
            model.fingerprint.encode(),
            model.variant.encode(),
            msgspec.msgpack.encode(grid.layout),
            struct.pack("<3Q", grid.page_size, grid.unit_heads, grid.unit_layers),
        )

    def root(self, salt: str) -> bytes:
        """Returns the link before the first page of prompts with `salt`."""
        return _hash(_ROOT, self._model, salt.encode())

    def links(self, key: PrefixKey) -> list[bytes]:
        """Returns the link of each whole page of a prompt: the hash of all tokens up to the page's end."""
        return self.extended(self.root(key.salt), key.data)

    def extended(self, link: bytes, tokens: bytes) -> list[bytes]:
        """Returns the links of the whole pages of packed `tokens` that follow the page of `link`."""
        found: list[bytes] = []
        page_bytes = self.page_size * TOKEN_BYTES
        for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
            # The link and the page's tokens have fixed lengths, so their lengths need not be hashed.
            link = blake2b(
                link + tokens[start : start + page_bytes], digest_size=KEY_BYTES, person=_LINK
            ).digest()
            found.append(link)
        return found

    def item(self, link: bytes, *, state: bool) -> bytes:
        """Returns the beginning of the keys of all parts of the page of `link`, or of the state behind this page."""
        return blake2b(link, digest_size=ITEM_BYTES, person=_STATE if state else _PAGE).digest()

    def part_key(self, link: bytes, part: PagePart) -> bytes:
        """Returns the key of a part of the page of `link`, or of the state behind this page."""
        return self.item(link, state=part.class_index >= self._kv_classes) + part_name(part)

    def keys(self, links: Sequence[bytes], parts: Sequence[PagePart]) -> list[bytes]:
        """Returns the keys of all `parts` of each link, link by link."""
        ends = [(part.class_index >= self._kv_classes, part_name(part)) for part in parts]
        kinds = {state for state, _ in ends}
        found: list[bytes] = []
        for link in links:
            items = {state: self.item(link, state=state) for state in kinds}
            found += [items[state] + name for state, name in ends]
        return found


def part_name(part: PagePart) -> bytes:
    """Returns the end of the keys of a part."""
    return blake2b(part.encoded(), digest_size=KEY_BYTES - ITEM_BYTES, person=_PART).digest()


def _hash(kind: bytes, *fields: bytes) -> bytes:
    """Hashes fields with their lengths, so that no two lists of fields are hashed as the same bytes."""
    state = blake2b(digest_size=KEY_BYTES, person=kind)
    for field in fields:
        state.update(_LENGTH.pack(len(field)))
        state.update(field)
    return state.digest()
