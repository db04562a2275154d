"""From a complete shard to its part: what was dropped is read again, texts are decoded, the part is written."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from batchgen.carry import InputFields
from batchgen.collector import OpenShard, results_of
from batchgen.errors import StorageError
from batchgen.feeder_child import carried_again
from batchgen.io import sinks
from batchgen.io.files import InputFile
from batchgen.ledger import Ledger, Written
from batchgen.runfolder import Counters
from batchgen.spec import JobSpec
from batchgen.tokenizer import Tokenizer
from batchgen.types import Completion, ShardRange

logger = logging.getLogger(__name__)

MAX_IDS = 200_000  # remembered to see whether they repeat


@dataclass(frozen=True, slots=True)
class Built:
    """A part that has been written; `written` is None for a trial's, which commits nothing."""

    counters: Counters
    written: Written | None


class PartWriter:
    """Builds and writes parts; runs in the writer's thread."""

    def __init__(
        self,
        spec: JobSpec,
        files: Sequence[InputFile],
        formats: Sequence[str],
        fields: InputFields,
        schema: pa.Schema,
        book: Ledger,
        tokenizer: Tokenizer,
    ) -> None:
        self._spec, self._files, self._formats, self._fields, self._schema = spec, files, formats, fields, schema
        self._ledger, self._tokenizer = book, tokenizer
        self._has_warned = False
        self._ids: set[int] = set()  # hashes of ids

    def write(self, shard: OpenShard, pieces: Sequence[str], earlier: Mapping[int, ShardRange | None]) -> Built:
        """Build a complete shard's part and write it.

        `pieces` hold what was dropped of the shard, `earlier` are the shards before it in its file.
        """
        assert shard.end is not None
        end, output = shard.end, self._spec.output
        saved: Mapping[tuple[int, int], Completion] = {}
        if shard.dropped:
            try:
                saved = self._ledger.read_back(end, pieces)
            except StorageError:
                if (standing := self._ledger.standing(end)) is None:
                    raise
                return Built(standing.proof.counters, standing)
        carried: list[pa.RecordBatch] = []
        if shard.dropped and self._fields.columns:
            file, kind = self._files[end.file], self._formats[end.file]
            carried = carried_again(self._spec, file, kind, self._fields, end, earlier)
        results = results_of(
            shard,
            self._tokenizer,
            skip_special=output.skip_special_tokens,
            saved=saved,
            carried=carried,
        )
        counters = results.counters()
        self._warn_of_repeated_ids(results)
        data = sinks.build_part(output.format, self._schema, results, self._ledger.part_metadata(end, counters))
        if shard.cut_off:
            self._ledger.show_trial(end, data)
            return Built(counters, None)
        return Built(counters, self._ledger.write_part(end, data, counters))

    def _warn_of_repeated_ids(self, results: sinks.ShardResults) -> None:
        """Once; seen inside a shard, and among the first MAX_IDS rows of this start."""
        if self._fields.id is None or self._has_warned or not len(results.rows):
            return
        try:
            ids = pa.Table.from_batches(results.inputs).column(0).drop_null().to_pylist()
            known = {hash(one) for one in ids}
        except (TypeError, ValueError, OverflowError):  # lists, structs, dates beyond Python's: ids that nobody counts
            return
        repeats = len(known) < len(ids) or not self._ids.isdisjoint(known)
        if len(self._ids) < MAX_IDS:
            self._ids |= known
        if repeats:
            self._has_warned = True
            logger.warning(
                "ids repeat in column %s: rows of one id draw the same random numbers, and results cannot be joined by "
                "it alone",
                self._fields.id.name,
            )
