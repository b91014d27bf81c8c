"""API keys: who a client is, and what it may do."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llmjax.checks import shown, type_errors
from llmjax.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """Who a client is. A limit that is None does not bind.

    Attributes:
        name: what usage and logs call it.
        digest: SHA-256 of what the client sends; the key itself is not kept.
        requests_per_minute, tokens_per_minute: tokens are those of prompts and of answers.
        max_concurrent: requests at a time.
        models: the names of those it may use.
        admin: sees everyone's usage.
    """

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    models: list[str] | None = None
    admin: bool = False

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


ANONYMOUS = ApiKey(name="anonymous", digest=b"", admin=True)
"""Everyone, where no keys are asked for."""

LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent")
FIELDS = {"key", "sha256"} | {field.name for field in fields(ApiKey)} - {"digest"}


class KeyRing:
    """All keys that are let in: those of the command line, and those of a file.

    Args:
        given: keys in clear; they are the operator's own, without limits.
        path: of a file for `read_keys`.

    Raises:
        ConfigError: says what is wrong with the file.
    """

    def __init__(self, given: Sequence[str] = (), path: str | None = None):
        self._given = [
            ApiKey(name=f"api-key-{number}", digest=digest_of(key), admin=True)
            for number, key in enumerate(given, 1)
        ]
        self._path = path
        self._keys = self._read()

    @property
    def is_open(self) -> bool:
        """Whether everyone is let in."""
        return not self._given and self._path is None

    def find(self, secret: str) -> ApiKey | None:
        """Whose key this is. It is compared with all of them, which takes the same time always."""
        digest, found = digest_of(secret), None
        for key in self._keys:
            # Digests: compare_digest leaks the length of what it compares, and takes no text
            # outside ASCII.
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def reload(self) -> None:
        """Reads the file again. Where it is bad the keys stay as they were."""
        try:
            self._keys = self._read()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("API keys: %d", len(self._keys))

    def _read(self) -> list[ApiKey]:
        if self._path is None:
            return self._given
        keys = self._given + read_keys(self._path)
        names, digests = [key.name for key in keys], [key.digest for key in keys]
        for i, key in enumerate(keys):
            if key.name in names[:i]:
                raise ConfigError(f"{self._path}: the name {shown(key.name)} comes twice")
            if key.digest in digests[:i]:
                raise ConfigError(f"{self._path}: {shown(key.name)} has the key of another")
        return keys


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: str) -> list[ApiKey]:
    """The keys of a file: a JSON list of objects, each with `name`, `key` or `sha256` (64 hex
    digits), and what else `ApiKey` has.

    Raises:
        ConfigError: it cannot be read, or is not that.
    """
    try:
        entries = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"api_key_file {path} cannot be read: {error}") from None
    if not isinstance(entries, list):
        raise ConfigError(f"api_key_file {path} is no JSON list, allowed: a list of objects")
    return [parse_key(entry, f"{path}: entry {i}") for i, entry in enumerate(entries, 1)]


def parse_key(entry: Any, where: str) -> ApiKey:
    """One entry. Messages quote no value that could be a key."""

    def require(ok: bool, message: str) -> None:
        if not ok:
            raise ConfigError(f"{where} {message}")

    require(isinstance(entry, dict), "is no object")
    unknown = sorted(entry.keys() - FIELDS)
    require(not unknown, f"has {shown(unknown)}, allowed: {', '.join(sorted(FIELDS))}")
    name, secret, sha256 = (entry.get(field) for field in ("name", "key", "sha256"))
    require(isinstance(name, str) and name.isprintable() and bool(name), "needs a name")
    where += f" ({shown(name)})"
    require((secret is None) != (sha256 is None), "needs one of key and sha256")
    if secret is not None:
        require(isinstance(secret, str) and bool(secret), "has a key that is no text")
        digest = digest_of(secret)
    else:
        is_hex = isinstance(sha256, str) and re.fullmatch("[0-9a-fA-F]{64}", sha256)
        require(bool(is_hex), "has a sha256 that is not 64 hex digits")
        digest = bytes.fromhex(sha256)
    rest = {field: value for field, value in entry.items() if field not in ("key", "sha256")}
    key = ApiKey(digest=digest, **rest)
    for _, message in type_errors(key):
        raise ConfigError(f"{where}: {message}")
    for limit in LIMITS:
        value = getattr(key, limit)
        require(value is None or value >= 1, f"has {limit} {value}, allowed: 1 or more")
    return key
