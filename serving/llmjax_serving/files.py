"""/v1/files: what clients upload for batches, and what comes of these, in a folder."""

from __future__ import annotations

import json
import re
import time
import uuid
from pathlib import Path

from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError

from llmjax.checks import cut, shown
from llmjax.errors import InvalidRequestError

from . import paging
from .body_budget import CLAIM, Claim
from .errors import ApiError
from .formatter import JsonObject
from .owner import owner_of
from .paging import page, query
from .schema.fields import Field, text
from .state import STATE

PURPOSES = ("batch", "batch_output")
_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
MOST_LISTED = 10_000


class Folder:
    """Records as JSON files, which belong to those who made them, and contents beside them.

    Args:
        kind: of the records, which their ids begin with.
    """

    def __init__(self, path: Path, kind: str):
        self._path, self._kind = path, kind
        path.mkdir(parents=True, exist_ok=True)

    def new_id(self) -> str:
        return f"{self._kind}-{uuid.uuid4().hex}"

    def content(self, record_id: str) -> Path:
        return self._path / f"{record_id}.data"

    def put(self, record: JsonObject, owner: str) -> None:
        """Writes a record, whole or not at all."""
        path = self._record(record["id"])
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps({"owner": owner, "record": record}))
        draft.replace(path)

    def get(self, record_id: str, owner: str | None) -> JsonObject:
        """A record; `owner` None is anybody.

        Raises:
            ApiError: 404 where there is none, or it is another's.
        """
        try:
            kept = json.loads(self._record(record_id).read_text())
        except (OSError, ValueError) as error:
            raise self._none(record_id) from error
        if owner is not None and kept["owner"] != owner:
            raise self._none(record_id)
        return kept["record"]

    def owner(self, record_id: str) -> str:
        return json.loads(self._record(record_id).read_text())["owner"]

    def list(self, owner: str | None) -> list[JsonObject]:
        """The records of an owner, newest first; `owner` None is all."""
        found = []
        for path in self._path.glob("*.json"):
            try:
                found.append(self.get(path.stem, owner))
            except ApiError:
                continue
        return sorted(found, key=lambda record: (-record["created_at"], record["id"]))

    def delete(self, record_id: str, owner: str) -> None:
        """Raises ApiError as `get` does."""
        self.get(record_id, owner)
        self._record(record_id).unlink()
        self.content(record_id).unlink(missing_ok=True)

    def _record(self, record_id: str) -> Path:
        if not _ID.fullmatch(record_id):
            raise self._none(record_id)
        return self._path / f"{record_id}.json"

    def _none(self, record_id: str) -> ApiError:
        message = f"there is no {self._kind} {record_id[:80]!r}"
        return ApiError(404, message, code="not_found")


FILES = web.AppKey("files", Folder)


def files_of(request: web.Request) -> Folder:
    """Raises ApiError (404) where the server keeps none."""
    if FILES not in request.app:
        message = "this server keeps no files; it does with --files-dir"
        raise ApiError(404, message, code="not_found")
    return request.app[FILES]


def new_file(folder: Folder, name: str, purpose: str, data: bytes, owner: str) -> JsonObject:
    record: JsonObject = {
        "id": folder.new_id(),
        "object": "file",
        "bytes": len(data),
        "created_at": int(time.time()),
        "filename": name,
        "purpose": purpose,
        "status": "processed",
    }
    folder.content(record["id"]).write_bytes(data)
    folder.put(record, owner)
    return record


async def read_part(part: BodyPartReader, claim: Claim) -> bytes:
    """Raises what `Claim.add` does."""
    pieces = []
    while piece := await part.read_chunk():
        claim.add(len(piece))
        pieces.append(piece)
    return b"".join(pieces)


async def read_form(request: web.Request) -> tuple[bytes | None, str, str | None]:
    """The file, its name, and what it is for.

    Raises:
        InvalidRequestError: there is something else.
        ApiError: 400, what came is no form.
    """
    data, name, purpose = None, "", None
    try:
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader):
                raise InvalidRequestError("parts within parts are not read", param="file")
            if part.name not in ("file", "purpose"):
                unknown = cut(str(part.name))
                raise InvalidRequestError(f"unknown field: {unknown}", param=unknown)
            came = await read_part(part, request[CLAIM])
            if part.name == "file":
                data, name = came, part.filename or "file"
            else:
                purpose = came.decode(errors="replace")
    except InvalidRequestError:
        raise
    except (ValueError, LookupError, RuntimeError, HttpProcessingError) as error:
        # aiohttp has as many ways to say so as there are to get a form wrong.
        message = f"the form cannot be read: {cut(' '.join(str(error).split()))}"
        raise ApiError(400, message) from error
    return data, name, purpose


async def upload(request: web.Request) -> web.Response:
    folder, state = files_of(request), request.app[STATE]
    if request.content_type != "multipart/form-data":
        raise ApiError(415, "Content-Type is not multipart/form-data")
    data, name, purpose = await read_form(request)
    if data is None:
        raise InvalidRequestError("file is required", param="file")
    if purpose != "batch":
        message = f"purpose is {shown(purpose)}, allowed: batch"
        raise InvalidRequestError(message, param="purpose")
    record = await state.in_thread(new_file, folder, name, purpose, data, owner_of(request))
    return web.json_response(record)


PAGE = paging.fields(default=MOST_LISTED, most=MOST_LISTED)


async def list_files(request: web.Request) -> web.Response:
    folder, asked = files_of(request), query(request, PAGE | {"purpose": Field(text)})
    found = await request.app[STATE].in_thread(folder.list, owner_of(request))
    purpose = asked["purpose"]
    data = [record for record in found if purpose in (None, record["purpose"])]
    return web.json_response(page(data, asked))


async def show_file(request: web.Request) -> web.Response:
    return web.json_response(files_of(request).get(request.match_info["id"], owner_of(request)))


async def file_content(request: web.Request) -> web.StreamResponse:
    folder, file_id = files_of(request), request.match_info["id"]
    folder.get(file_id, owner_of(request))
    headers = {"Content-Type": "application/octet-stream"}
    return web.FileResponse(folder.content(file_id), headers=headers)


async def delete_file(request: web.Request) -> web.Response:
    file_id = request.match_info["id"]
    files_of(request).delete(file_id, owner_of(request))
    return web.json_response({"id": file_id, "object": "file", "deleted": True})
