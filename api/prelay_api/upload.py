"""A file on its way in: multipart/form-data, parsed as it comes, its content written to disk as it comes.

Never more of it is in memory than what the last read brought. Everything here blocks and runs in a thread.
"""

from __future__ import annotations

import re
from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from prelay_files.store import FileLimits, FileStore, StoredFile, Writing
from prelay_text.checks import show, wrong_value
from prelay_text.errors import RequestError

#: The one purpose that a file can have here.
PURPOSE = "batch"
#: Characters of a file's name; of a longer one the end is kept.
MAX_NAME = 255
#: Bytes of a field that is not the file.
MAX_FIELD_BYTES = 1024
#: Bytes of a body beside its file: boundaries, headers, fields.
MAX_FRAME_BYTES = 64 * 1024

_NOT_KEPT = {"expires_after": "files are kept until they are deleted"}
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


def boundary_of(content_type: str) -> bytes:
    """The boundary that the header names. Raise RequestError, 415, when the body is no form."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        message = f"content-type must be multipart/form-data with a boundary, not {show(content_type)}"
        raise RequestError(message, param="content-type", code="unsupported_media_type", status=415)
    return boundary


class Upload:
    """One upload. Always `abort` it; after `finish` that does nothing."""

    def __init__(self, store: FileStore, limits: FileLimits, boundary: bytes) -> None:
        """Raise RequestError for a boundary that cannot be."""
        self._store, self._limits = store, limits
        self._writing: Writing | None = None
        self._fields: dict[str, bytes] = {}
        self._header = [b"", b""]
        self._headers: dict[bytes, bytes] = {}
        self._part = ""
        self._in_file = self._complete = False
        try:
            self._parser = MultipartParser(boundary, self._callbacks())
        except FormParserError as error:
            raise _broken(error) from None

    def feed(self, data: bytes) -> None:
        """Take a piece of the body. Raise RequestError, FileTooLarge or StorageFailed; then only `abort` is left."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken(error) from None

    def finish(self) -> StoredFile:
        """The body has ended: make it a file. Raise RequestError, StorageFailed."""
        if not self._complete:
            raise RequestError("the form ends before its last boundary", code="invalid_form")
        if "purpose" not in self._fields:
            raise RequestError("purpose is missing: a form field", param="purpose", code="missing_required_parameter")
        purpose = self._fields["purpose"].decode(errors="replace")
        if purpose != PURPOSE:
            raise wrong_value("purpose", f"{PURPOSE}, the only one that is served", purpose)
        if self._writing is None:
            raise RequestError("file is missing: a form field", param="file", code="missing_required_parameter")
        if not self._writing.bytes:
            raise RequestError("file has 0 bytes: nothing is in it", param="file", code="empty_file")
        return self._writing.commit()

    def abort(self) -> None:
        """Leave nothing on the disk."""
        if self._writing is not None:
            self._writing.abort()

    # --- what the parser tells

    def _callbacks(self) -> Any:
        return {
            "on_part_begin": self._headers.clear,
            "on_header_begin": self._begin_header,
            "on_header_field": lambda data, begin, end: self._add_to_header(0, data[begin:end]),
            "on_header_value": lambda data, begin, end: self._add_to_header(1, data[begin:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_part,
            "on_part_data": lambda data, begin, end: self._take(data[begin:end]),
            "on_end": self._end,
        }

    def _begin_header(self) -> None:
        self._header = [b"", b""]

    def _add_to_header(self, which: int, data: bytes) -> None:
        self._header[which] += data

    def _end_header(self) -> None:
        self._headers[self._header[0].lower()] = self._header[1]

    def _begin_part(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = _text(options.get(b"name", b""))
        self._part, self._in_file = name, name == "file"
        if name in self._fields or (self._in_file and self._writing is not None):
            raise RequestError(f"{name} stands twice in the form", param=name, code="invalid_form")
        if self._in_file:
            self._writing = self._store.create(PURPOSE, _file_name(options), self._limits)
        elif name == "purpose":
            self._fields[name] = b""
        else:
            raise _unknown(name)

    def _take(self, data: bytes) -> None:
        if self._in_file:
            assert self._writing is not None
            self._writing.write(data)
            return
        whole = self._fields[self._part] + data
        if len(whole) > MAX_FIELD_BYTES:
            message = f"{self._part} has more bytes than the {MAX_FIELD_BYTES} that are taken"
            raise RequestError(message, param=self._part, code="invalid_value")
        self._fields[self._part] = whole

    def _end(self) -> None:
        self._complete = True


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _file_name(options: dict[bytes, bytes]) -> str:
    """The name that the client gives, without folders: it is shown, and never becomes a path."""
    given = _UNPRINTABLE.sub("", _text(options.get(b"filename", b"")))
    return re.split(r"[/\\]", given)[-1][-MAX_NAME:] or "upload.jsonl"


def _unknown(name: str) -> RequestError:
    plain = name.partition("[")[0]
    if why := _NOT_KEPT.get(plain):
        return RequestError(f"{plain} is not implemented: {why}", param=plain, code="unsupported_parameter")
    message = f"{show(name)} is not a field of this form: it has file and purpose"
    return RequestError(message, param=name[:64], code="unknown_parameter")


def _broken(error: FormParserError) -> RequestError:
    return RequestError(f"the form cannot be read: {error}", code="invalid_form")
