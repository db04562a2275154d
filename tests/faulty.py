"""A store whose n-th operation goes wrong, or stops while others go on."""

from __future__ import annotations

from batchgen.errors import StorageError
from batchgen.io.stores import Store


class Died(BaseException):
    """The process's death, for a test that stays in one process."""


class FaultyStore(Store):
    """A Store whose `at`-th operation of the kinds in `kinds` meets `fault`, which is given the operation."""

    def __init__(self, url, at, fault, kinds):
        super().__init__(url)
        self.at, self.fault, self.kinds, self.count = at, fault, kinds, 0
        self.job = None

    def _meet(self, kind, operation):
        if kind not in self.kinds:
            return operation()
        self.count += 1
        return self.fault(self, operation) if self.count == self.at else operation()

    def create(self, name, data):
        return self._meet("write", lambda: super(FaultyStore, self).create(name, data))

    def replace(self, name, data):
        return self._meet("write", lambda: super(FaultyStore, self).replace(name, data))

    def delete(self, name):
        return self._meet("write", lambda: super(FaultyStore, self).delete(name))

    def read(self, name):
        return self._meet("read", lambda: super(FaultyStore, self).read(name))

    def open(self, name):
        return self._meet("read", lambda: super(FaultyStore, self).open(name))

    def list(self, prefix="", *, recursive=True):
        return self._meet("read", lambda: super(FaultyStore, self).list(prefix, recursive=recursive))


def dies_before(store, operation):
    raise Died


def dies_after(store, operation):
    operation()
    raise Died


def fails_before(store, operation):
    raise StorageError("the store is away")


def fails_after(store, operation):
    operation()
    raise StorageError("timeout: nobody knows whether it was done")


def goes_away(store, operation):
    store.at += 1  # and the next one fails too
    raise StorageError("the store is away for good")


FAULTS = {
    "dies before a write": (dies_before, ("write",)),
    "dies after a write": (dies_after, ("write",)),
    "write fails": (fails_before, ("write",)),
    "write is done but not acknowledged": (fails_after, ("write",)),
    "read fails": (fails_before, ("read",)),
    "store goes away": (goes_away, ("write", "read")),
}
