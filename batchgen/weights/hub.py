"""Models on the Hugging Face hub: `org/name` or `hf://org/name[@revision]`, and single GGUF files in a repository."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, NamedTuple

from batchgen.errors import BatchgenError, ConfigError, ModelError, PermissionDenied, StorageError

SCHEME = "hf://"
NAME = r"[\w-][\w.-]*/[\w-][\w.-]*"
PLAIN = re.compile(rf"(?P<repo>{NAME})(?:/(?P<file>(?:[\w-][\w.-]*/)*[\w-][\w.-]*\.gguf))?")
URL = re.compile(
    rf"{SCHEME}(?P<repo>{NAME})(?:@(?P<revision>[^/@]+(?:/[^/@]+)*?))?"
    r"(?:/(?P<file>(?:[\w-][\w.-]*/)*[\w-][\w.-]*\.gguf))?/?"
)
FILES = ["*.json", "*.safetensors", "*.jinja"]
SKIPPED = ["*/*", "consolidated*"]  # other copies of the same weights, which no index names
PROBE_SECONDS = 10.0


class Reference(NamedTuple):
    repo: str
    revision: str | None
    file: str | None  # a GGUF file; None is the whole model


def parse(path: str, revision: str | None) -> Reference | None:
    """What `path` names on the hub; None where it has not the form of such a name."""
    if not path.startswith(SCHEME):
        found = PLAIN.fullmatch(path)
        if found is None or (found["file"] is None and path.endswith(".gguf")):
            return None
        return Reference(found["repo"], revision, found["file"])
    found = URL.fullmatch(path)
    if found is None:
        raise ModelError(f"model path {path!r}: expected hf://org/name, hf://org/name@revision or .../file.gguf in it")
    if revision is not None and found["revision"] not in (None, revision):
        raise ConfigError(f"model.path is {path!r}, but model.revision {revision!r}; give one of them")
    return Reference(found["repo"], found["revision"] or revision, found["file"])


def fetch(path: str, wanted: Reference) -> Path:
    """Download what is wanted, or find it in the hub's cache, also where the hub cannot be reached."""
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise ModelError(
            f"model path {path!r} is no local folder or file; to download it from the Hugging Face hub, "
            "pip install 'batchgen[hub]'"
        ) from error
    away: Exception | None = None
    try:  # the library falls back to its cache without a word
        hub.HfApi().model_info(wanted.repo, revision=wanted.revision, timeout=PROBE_SECONDS)
    except BatchgenError:  # a signal
        raise
    except Exception as error:
        away = error
    try:
        found = _download(hub, wanted, local=away is not None)
    except BatchgenError:
        raise
    except Exception as error:
        raise _translated(hub.errors, path, wanted, away or error) from (away or error)
    if away is not None:
        logging.getLogger(__name__).warning(
            "the Hugging Face hub did not answer for %s (%s); what was downloaded of it before is used: %s",
            wanted.repo,
            str(away).split("\n")[0] or type(away).__name__,
            found,
        )
    return found


def _download(hub: Any, wanted: Reference, *, local: bool) -> Path:
    options = {"revision": wanted.revision, "local_files_only": local}
    if wanted.file is not None:
        return Path(hub.hf_hub_download(wanted.repo, wanted.file, **options))
    return Path(hub.snapshot_download(wanted.repo, allow_patterns=FILES, ignore_patterns=SKIPPED, **options))


def _translated(errors: Any, path: str, wanted: Reference, error: Exception) -> BatchgenError:
    at = f" at revision {wanted.revision!r}" if wanted.revision else ""
    if isinstance(error, errors.GatedRepoError):
        return PermissionDenied(
            f"model {path!r} on the Hugging Face hub is gated: accept its terms there and set HF_TOKEN"
        )
    if isinstance(error, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)):
        return ModelError(
            f"model path {path!r}{at} is neither a local folder or file nor found on the Hugging Face hub "
            "(private models need HF_TOKEN)"
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return ModelError(f"model path {path!r}: {wanted.repo}{at} on the Hugging Face hub has no file {wanted.file}")
    return StorageError(
        f"model {path!r}{at} could not be downloaded from the Hugging Face hub, nor is it whole in its cache: {error}"
    )
