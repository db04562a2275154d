"""Columns that folders give: `day=2025-01-31/part.parquet`, as Hive and Spark write them."""

from __future__ import annotations

from urllib.parse import unquote

NULL = "__HIVE_DEFAULT_PARTITION__"


def partitions(path: str) -> dict[str, str | None]:
    """Name and value of every `name=value` folder in a file's path or URL; of one name the innermost counts."""
    head = path.partition("::")[0]  # zip://day=1/x.csv::s3://bucket/file.zip: the file's own folders are in the first
    if head.startswith(("http://", "https://")):
        head = head.partition("?")[0]
    folders = head.split("/")[:-1]
    found: dict[str, str | None] = {}
    for folder in folders:
        name, sign, value = folder.partition("=")
        if name and sign:
            text = unquote(value)
            found[unquote(name)] = None if text == NULL else text
    return found
