"""KV blocks: who holds which, and which still hold a prefix that another sample can share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockManager:
    """Reference counts over `num_blocks` equal blocks, and a prefix cache over the chained hash of what they hold.

    A block is free when nobody holds it. A free block that has a hash keeps its content and can be held again through
    it; it is given away last, least recently freed first. Every operation costs O(1) per block it names.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))  # free, without a hash
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, with a hash, the next to be given away first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this prefix's last tokens, held or free."""
        return self._block_of.get(block_hash)

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these `share` would take out of the free ones."""
        return sum(not self._references[block] for block in block_ids)

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that were found."""
        for block in block_ids:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hold `count` blocks of unknown content; the caller has seen that so many are free."""
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        num_empty = min(count, len(self._empty))
        block_ids = self._empty[len(self._empty) - num_empty :]
        del self._empty[len(self._empty) - num_empty :]
        block_ids.reverse()
        for _ in range(count - num_empty):
            block, _ = self._cached.popitem(last=False)
            self._drop_hash(block)
            block_ids.append(block)
        references = self._references
        for block in block_ids:
            references[block] = 1
        return block_ids

    def register(self, block_ids: Iterable[int], hashes: Iterable[bytes]) -> list[int]:
        """Make held, full blocks findable, and say which: not those that have a hash, nor those whose prefix another
        block holds."""
        hash_of, block_of, new = self._hash_of, self._block_of, []
        for block, block_hash in zip(block_ids, hashes, strict=True):
            if hash_of[block] is None and block_of.setdefault(block_hash, block) == block:
                hash_of[block] = block_hash
                new.append(block)
        return new

    def forget(self, block: int) -> None:
        """Take back `register`: the content never came to be."""
        if self._hash_of[block] is None:
            return
        self._drop_hash(block)
        if not self._references[block]:
            del self._cached[block]
            self._empty.append(block)

    def free(self, block_ids: Sequence[int]) -> None:
        """Let go of a block table. Its last blocks become the older ones: a prefix is of use without what follows it,
        not the other way round."""
        references, hash_of, empty, cached = self._references, self._hash_of, self._empty, self._cached
        for block in reversed(block_ids):
            references[block] -= 1
            if references[block]:
                continue
            if hash_of[block] is None:
                empty.append(block)
            else:
                cached[block] = None

    def check(self) -> None:
        """Assert what must always hold; for tests, O(num_blocks)."""
        empty, cached = set(self._empty), set(self._cached)
        assert len(empty) == len(self._empty), "a block is free twice"
        assert not empty & cached
        for block in range(self.num_blocks):
            assert self._references[block] >= 0
            assert (self._references[block] == 0) == (block in empty or block in cached)
            block_hash = self._hash_of[block]
            assert (block_hash is None) or self._block_of[block_hash] == block
            assert (block in cached) <= (block_hash is not None)
            assert (block in empty) <= (block_hash is None)
        assert len(self._block_of) == sum(h is not None for h in self._hash_of)

    def _drop_hash(self, block: int) -> None:
        block_hash = self._hash_of[block]
        assert block_hash is not None
        del self._block_of[block_hash]
        self._hash_of[block] = None
