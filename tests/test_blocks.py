"""KV blocks against a model that keeps plain lists."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batchgen.engine.blocks import BlockManager

NUM_BLOCKS = 8


class Blocks(RuleBasedStateMachine):
    """Holders take and drop block tables; the model knows who holds what and in which order blocks became free."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.hashes: dict[int, bytes] = {}
        self.freed: list[int] = []  # free blocks with a hash, oldest first
        self.serial = 0

    def references(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        if count > self.blocks.num_free:
            with pytest.raises(AssertionError):
                self.blocks.allocate(count)
            return
        num_empty = self.blocks.num_free - len(self.freed)
        block_ids = self.blocks.allocate(count)
        assert len(set(block_ids)) == count
        assert not any(self.references(block) for block in block_ids), "a held block was given away"
        evicted = [block for block in block_ids if block in self.hashes]
        assert evicted == self.freed[: max(0, count - num_empty)], "not the least recently freed, or before empty ones"
        for block in evicted:
            self.freed.remove(block)
            assert self.blocks.find(self.hashes.pop(block)) is None
        self.tables.append(block_ids)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({block for table in self.tables for block in table})))
        if data.draw(st.booleans()) and self.hashes:
            taken = data.draw(st.sampled_from(sorted(self.hashes.values())))
            assert not self.blocks.register([block], [taken])
            return
        self.serial += 1
        block_hash = b"%d" % self.serial
        registered = self.blocks.register([block], [block_hash])
        assert bool(registered) == (block not in self.hashes)
        if registered:
            self.hashes[block] = block_hash

    @precondition(lambda self: self.hashes)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        wanted = data.draw(st.lists(st.sampled_from(sorted(self.hashes.values())), min_size=1, unique=True))
        found = [self.blocks.find(block_hash) for block_hash in wanted]
        block_ids = [block for block in found if block is not None]
        assert [self.hashes[block] for block in block_ids] == wanted
        before = self.blocks.num_free
        assert self.blocks.count_free(block_ids) == sum(block in self.freed for block in block_ids)
        self.blocks.share(block_ids)
        revived = [block for block in block_ids if block in self.freed]
        assert self.blocks.num_free == before - len(revived)
        self.freed = [block for block in self.freed if block not in revived]
        self.tables.append(block_ids)

    @precondition(lambda self: self.hashes)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.hashes)))
        self.blocks.forget(block)
        self.blocks.forget(block)
        assert self.blocks.find(self.hashes.pop(block)) is None
        self.freed = [other for other in self.freed if other != block]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.blocks.free(table)
        self.freed += [block for block in reversed(table) if block in self.hashes and not self.references(block)]

    @invariant()
    def the_pool_is_whole(self) -> None:
        self.blocks.check()
        held = {block for table in self.tables for block in table}
        assert self.blocks.num_used == len(held)
        assert self.blocks.num_free == NUM_BLOCKS - len(held)
        for block, block_hash in self.hashes.items():
            assert self.blocks.find(block_hash) == block


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_end_of_a_prefix_goes_first() -> None:
    blocks = BlockManager(4)
    table = blocks.allocate(4)
    for index, block in enumerate(table):
        assert blocks.register([block], [b"%d" % index])
    blocks.free(table)
    assert blocks.num_free == 4
    blocks.allocate(3)
    assert [blocks.find(b"%d" % index) is not None for index in range(4)] == [True, False, False, False]
