"""A file of questions and answers at any fsspec URL, JSONL or Parquet: owns which rows belong to a split and reading one of them.

An index (where each row of the split lies, eight bytes a row) is made by one pass over the file; rows themselves aren't kept in memory.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import fsspec

from rollart.environments.registry import EnvironmentSettingsError

Split = Literal["training", "held_out", "all"]

MAX_LINE = 16 * 2**20
"""Bytes of a JSONL line at most: what is longer is no question, and would be read into memory whole."""


class BadQuestions(EnvironmentSettingsError):
    """A file can't be read as questions; the message names it, and the line or row."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where questions are and which of them are meant. `options`: fsspec's, as JSON. `held_out`: the share of questions that training never sees."""

    url: str
    options: str
    question: str
    answer: str
    split: Split
    held_out: float

    @property
    def is_parquet(self) -> bool:
        return self.url.endswith((".parquet", ".pq"))

    def open(self) -> Any:
        return fsspec.open(self.url, "rb", **json.loads(self.options))


def is_held_out(question: str, share: float) -> bool:
    """Whether a question is among the `share` held out: by a hash of its words alone, so that neither order, file nor a second copy matters."""
    digest = hashlib.sha256(" ".join(question.casefold().split()).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


@lru_cache(maxsize=16)
def index(source: Source) -> array[int]:
    """Where each row of the split lies: its byte offset (JSONL), or its number (Parquet). BadQuestions."""
    kept = array("Q")
    try:
        rows = _parquet_rows(source) if source.is_parquet else _lines(source)
        for place, where, row in rows:
            question, _ = _texts(source, row, where)
            if source.split == "all" or (source.split == "held_out") == is_held_out(question, source.held_out):
                kept.append(place)
    except (OSError, ImportError) as error:
        raise BadQuestions(f"url: {source.url} cannot be read: {type(error).__name__}: {error}") from error
    if not kept:
        raise BadQuestions(f"url: {source.url} has no question in the split {source.split!r} (held_out: {source.held_out:g})")
    return kept


def read(source: Source, place: int) -> tuple[str, str]:
    """The question and the answer that lie at `place`, which the index gave; OSError, BadQuestions where the file has changed since."""
    if source.is_parquet:
        return _texts(source, _parquet_row(source, place), f"row {place + 1}")
    with source.open() as file:
        file.seek(place)
        return _texts(source, _parsed(source, file.readline(MAX_LINE), f"byte {place}"), f"byte {place}")


def _lines(source: Source) -> Iterator[tuple[int, str, Any]]:
    with source.open() as file:
        offset = number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise BadQuestions(f"{source.url}:{number}: the line has over {MAX_LINE} bytes")
            if line.strip():
                yield offset, str(number), _parsed(source, line, str(number))
            offset += len(line)


def _parsed(source: Source, line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadQuestions(f"{source.url}:{where}: no JSON object: {error}") from error


def _texts(source: Source, row: Any, where: str) -> tuple[str, str]:
    if not isinstance(row, dict):
        raise BadQuestions(f"{source.url}:{where}: no JSON object, but {type(row).__name__}")
    texts = []
    for field in (source.question, source.answer):
        if field not in row:
            raise BadQuestions(f"{source.url}:{where}: no field {field!r}; it has {', '.join(map(str, row)) or 'none'}")
        value = row[field]
        if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
            raise BadQuestions(f"{source.url}:{where}: field {field!r} is no text or number, but {str(value)[:60]!r}")
        texts.append(str(value))
    return texts[0], texts[1]


def _parquet_rows(source: Source) -> Iterator[tuple[int, str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with source.open() as file:
            table, number = pq.ParquetFile(file), 0
            columns = [c for c in (source.question, source.answer) if c in table.schema_arrow.names]
            if len(columns) < 2:
                raise BadQuestions(f"{source.url}: its columns are {', '.join(table.schema_arrow.names)}, not {source.question} and {source.answer}")
            for batch in table.iter_batches(columns=columns, batch_size=1024):
                for row in batch.to_pylist():
                    yield number, f"row {number + 1}", row
                    number += 1
    except pa.ArrowException as error:
        raise BadQuestions(f"{source.url}: no Parquet file: {error}") from error


def _parquet_row(source: Source, place: int) -> Any:
    """A row by its number; of the file, its footer and that row's group are read."""
    import pyarrow.parquet as pq

    with source.open() as file:
        table = pq.ParquetFile(file)
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if place < rows:
                return table.read_row_group(group, columns=[source.question, source.answer]).slice(place, 1).to_pylist()[0]
            place -= rows
    raise BadQuestions(f"{source.url} has fewer rows than when it was first read")
